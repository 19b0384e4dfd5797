#!/usr/bin/env python3
"""Makes a model and a draft model for it whose drafts are right as often as is asked for, at the real cost of both shapes.

  draft_pair.py OUT_DIR [--layers 22] [--draft-layers 2] [--noise 0.0] [--seed 1]
  draft_pair.py OUT_DIR --head-for MODEL_DIR [--draft-vocab 32000]

The first writes OUT_DIR/model, OUT_DIR/draft and OUT_DIR/head, Hugging Face folders in bfloat16 of TinyLlama-1.1B's shape (hidden 2048, 32 heads on 4,
5632, 32,000 tokens). The head is an EAGLE-3 head of random weights: its drafts are never right, what it costs is real. The draft model is the model's first layers with its embeddings, norm and head; what the model's other layers add is random and
scaled by --noise: with 0 both say the same, and the more noise the less often. Every matrix is read and multiplied all the same. The
text means nothing. The second writes such a head, OUT_DIR/head, for a model that is there: of its sizes, with so many of its tokens as published heads have. Needs numpy; the tokenizer is that of the built-in model.
"""
import argparse
import json
import pathlib
import shutil
import struct

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 2048, 32, 4, 64, 5632, 32000
SIZES = dict(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, intermediate_size=FFN, vocab_size=VOCAB,
             max_position_embeddings=2048, rope_theta=10000.0, rms_norm_eps=1e-5)
DTYPES = {"uint16": "BF16", "int64": "I64"}


def bf16(values):
    """Rounded to nearest, as little-endian 16-bit words."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(layers, draft_layers, noise, seed):
    """(name, array) of the model, in order; the draft model's are those of its layers and what is no layer's."""
    def random(name, rows, columns, scale):
        generator = np.random.default_rng([seed, *name.encode()])
        return name, bf16(generator.standard_normal((rows, columns), np.float32) * scale)

    yield random("model.embed_tokens.weight", VOCAB, HIDDEN, 1.0)
    for layer in range(layers):
        to = noise if layer >= draft_layers else 1.0
        at = f"model.layers.{layer}."
        inner = HIDDEN ** -0.5
        yield random(at + "self_attn.q_proj.weight", HEADS * HEAD, HIDDEN, inner)
        yield random(at + "self_attn.k_proj.weight", KV_HEADS * HEAD, HIDDEN, inner)
        yield random(at + "self_attn.v_proj.weight", KV_HEADS * HEAD, HIDDEN, inner)
        yield random(at + "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD, inner * to)
        yield random(at + "mlp.gate_proj.weight", FFN, HIDDEN, inner)
        yield random(at + "mlp.up_proj.weight", FFN, HIDDEN, inner)
        yield random(at + "mlp.down_proj.weight", HIDDEN, FFN, FFN ** -0.5 * to)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield at + norm + ".weight", bf16(np.ones(HIDDEN))
    yield "model.norm.weight", bf16(np.ones(HIDDEN))
    yield random("lm_head.weight", VOCAB, HIDDEN, HIDDEN ** -0.5)


def head_tensors(sizes, draft_vocab, seed):
    """Of an EAGLE-3 head in the authors' form, with an output of its own; its tokens are the model's first ones."""
    def random(name, rows, columns):
        generator = np.random.default_rng([seed, *name.encode()])
        return name, bf16(generator.standard_normal((rows, columns), np.float32) * columns ** -0.5)

    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    yield random("fc.weight", hidden, 3 * hidden)
    for name, rows, columns in (("self_attn.q_proj", queries, 2 * hidden), ("self_attn.k_proj", keys, 2 * hidden),
                                ("self_attn.v_proj", keys, 2 * hidden), ("self_attn.o_proj", hidden, queries),
                                ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner)):
        yield random(f"midlayer.{name}.weight", rows, columns)
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        yield name + ".weight", bf16(np.ones(hidden))
    yield random("lm_head.weight", draft_vocab, hidden)
    yield "d2t", np.zeros(draft_vocab, np.int64)


def write(folder, layers, named, sizes=SIZES, **more):
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=layers, tie_word_embeddings=False,
                  hidden_act="silu", torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2) | sizes | more
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, array in named:
        header[name] = dict(dtype=DTYPES[str(array.dtype)], shape=list(array.shape), data_offsets=[at, at + array.nbytes])
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in named:
            file.write(array.tobytes())


def write_model(folder, layers, named):
    write(folder, layers, named)
    demo = pathlib.Path(__file__).resolve().parents[2] / "crates/folio/assets/demo"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder / name)


def write_head(folder, sizes, draft_vocab, seed):
    named = list(head_tensors(sizes, draft_vocab, seed))
    write(folder, 1, named, sizes, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=draft_vocab)


def sizes_of(model):
    """What of a model's config.json its head has, too."""
    config = json.loads((model / "config.json").read_text())
    sizes = {name: config[name] for name in SIZES if name in config}
    sizes.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return sizes | {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--head-for", type=pathlib.Path, metavar="MODEL_DIR")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    args = parser.parse_args()
    if args.head_for:
        sizes = sizes_of(args.head_for)
        write_head(args.out / "head", sizes, min(args.draft_vocab, sizes["vocab_size"]), args.seed)
        return
    named = list(tensors(args.layers, args.draft_layers, args.noise, args.seed))
    write_model(args.out / "model", args.layers, named)
    kept = tuple(f"model.layers.{layer}." for layer in range(args.draft_layers))
    draft = [(name, array) for name, array in named if name.startswith(kept) or not name.startswith("model.layers.")]
    write_model(args.out / "draft", args.draft_layers, draft)
    write_head(args.out / "head", SIZES, VOCAB, args.seed)


if __name__ == "__main__":
    main()
