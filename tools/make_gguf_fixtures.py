"""Makes the GGUF files that the reader is tested with, by ggml's own code.

    python tools/make_gguf_fixtures.py --ggml PATH/libggml-base.so

Writes, into crates/folio-model/tests/:
  quant/blocks.safetensors   blocks of every format, quantized by ggml and random, and what ggml decodes them to
  gguf/smollm2/              the fixture of that name as GGUF, with a sentencepiece-style tokenizer and a chat template
  gguf/mixed/                a random llama whose tensors have all the block formats, with a byte-level tokenizer, and what
                             transformers computes from the decoded weights (see make_fixtures.py)

Needs torch, transformers >= 5, safetensors, gguf >= 0.19 and llama.cpp's libggml-base. Deterministic.
"""

import argparse
import ctypes
import json
import shutil

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quants
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import make_fixtures
from make_fixtures import DISTINCT, MARGIN, greedy, randomize

TESTS = make_fixtures.ROOT.parent
BLOCKS = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4]
# Not in the mixed model: of a random one they would leave nothing.
TERNARY = [Q.TQ1_0, Q.TQ2_0]
RANDOM = [Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.IQ1_S, Q.IQ1_M, Q.NVFP4]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Ggml:
    """The few functions that are needed, by ctypes."""

    def __init__(self, path):
        class Params(ctypes.Structure):
            _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

        self.lib = ctypes.CDLL(path)
        self.lib.ggml_init.restype = ctypes.c_void_p
        self.lib.ggml_init.argtypes = [Params]
        self.lib.ggml_init(Params(1 << 20, None, False))  # fills the table of f16 values
        self.lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [
            ctypes.c_void_p]

    def quantize(self, values, kind):
        """float32 `[rows, cols]` to uint8 `[rows, row bytes]`."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        rows, cols = values.shape
        block, size = gguf.GGML_QUANT_SIZES[kind]
        out = np.zeros((rows, cols // block * size), dtype=np.uint8)
        written = self.lib.ggml_quantize_chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, cols, None)
        assert written == out.nbytes, (kind, written, out.nbytes)
        return out

    def dequantize(self, blocks, kind):
        function = getattr(self.lib, "dequantize_row_" + kind.name.lower().replace("_k", "_K"))
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.ascontiguousarray(blocks)
        out = np.zeros(blocks.nbytes // size * block, dtype=np.float32)
        function(blocks.ctypes.data, out.ctypes.data, out.size)
        # Two implementations by the same project; a difference would be theirs to explain.
        again = quants.dequantize(blocks.reshape(-1), kind)
        assert np.array_equal(out.view(np.uint32), again.reshape(-1).view(np.uint32)), kind
        return out


def scales_at(kind):
    """Offsets of the f16 numbers in a block: random bytes there would mostly be infinite or not numbers."""
    return {Q.Q4_1: [0, 2], Q.Q5_1: [0, 2], Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2],
            Q.Q6_K: [208], Q.TQ1_0: [52], Q.TQ2_0: [64], Q.MXFP4: []}.get(kind, [0])


def blocks(ggml):
    tensors = {}
    for kind in BLOCKS + TERNARY:
        rng = np.random.default_rng(int(kind))
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = 3 if block == 256 else 8
        real = rng.standard_normal((1, count * block)) * np.exp(rng.standard_normal((1, count * block)))
        quantized = ggml.quantize(real, kind).reshape(count, size)
        noise = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in scales_at(kind):
            noise[:, at:at + 2] = (rng.standard_normal((count, 1)) / 16).astype(np.float16).view(np.uint8)
        both = np.concatenate([quantized, noise]).reshape(-1)
        tensors[f"{kind.name}.bytes"] = both
        tensors[f"{kind.name}.values"] = ggml.dequantize(both, kind)
    # Random ones only: ggml wants the importance of weights for what is better, and of NVFP4 all bytes are numbers.
    for kind in RANDOM:
        rng = np.random.default_rng(int(kind))
        noise = rng.integers(0, 256, (6, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        d = (rng.standard_normal((6, 1)) / 16).astype(np.float16)
        if kind == Q.IQ1_M:
            words, shifts = noise[:, 48:].view(np.uint16), np.array([0, 4, 8, 12], dtype=np.uint16)
            words[:] = words & 0x0FFF | (d.view(np.uint16) >> shifts & 15) << 12
        elif kind != Q.NVFP4:
            noise[:, :2] = d.view(np.uint8)
        tensors[f"{kind.name}.bytes"] = noise.reshape(-1)
        tensors[f"{kind.name}.values"] = ggml.dequantize(noise.reshape(-1), kind)
    folder = TESTS / "quant"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "blocks.safetensors")


def interleave(weight, heads):
    """Rows of q and k from halves to neighbours, as llama.cpp's converter does."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}


def stored_name(name):
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    part, leaf = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{leaf}"


def writer(path, config):
    path.parent.mkdir(parents=True, exist_ok=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    w = gguf.GGUFWriter(path, config.model_type)
    w.add_name(path.name.split(".")[0])
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_rope_dimension_count(head_dim)
    w.add_rope_freq_base(config.rope_parameters["rope_theta"])
    w.add_vocab_size(config.vocab_size)
    return w


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def sentencepiece(w, size):
    """A vocabulary of letters and a few words; what it lacks is <unk>."""
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    kinds = [2, 3, 3, 3, 3]
    words = ["▁t", "he", "▁the", "▁a", "in", "▁in", "er", "on", "an", "▁an", "or", "ll", "▁to", "▁w", "▁s", "ing"]
    chars = ["▁", "\n"] + [chr(c) for c in range(33, 127)]
    text = words + chars
    tokens += text + [f"<pad{i}>" for i in range(size - len(tokens) - len(text))]
    kinds += [1] * len(text)
    kinds += [5] * (size - len(kinds))
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * 5 + [-float(i) for i in range(size - 5)])
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(4)
    w.add_add_bos_token(True)


def byte_level(w, size):
    """GPT-2's bytes, a few merges and three control tokens."""
    bytes_ = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    alphabet = [chr(b) for b in bytes_] + [chr(256 + i) for i in range(256 - len(bytes_))]
    merges = ["t h", "th e", "i n", "Ġ the", "Ġ a", "e r", "o n", "a n", "in g", "Ġ t", "l l", "Ġ w", "o r", "Ġ s"]
    tokens = alphabet + [merge.replace(" ", "") for merge in merges] + ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * (len(tokens) - 3) + [3] * 3
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    kinds += [5] * (size - len(kinds))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges(merges)
    w.add_eos_token_id(272)
    w.add_pad_token_id(270)


def smollm2():
    """The same weights, bit for bit, in the other format."""
    source = make_fixtures.ROOT / "smollm2"
    config = LlamaConfig.from_pretrained(source)
    w = writer(TESTS / "gguf/smollm2/smollm2.gguf", config)
    sentencepiece(w, config.vocab_size)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        value = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = interleave(value, heads)
        kind = Q.F32 if value.ndim == 1 else Q.BF16
        w.add_tensor(stored_name(name), quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    w.add_chat_template(TEMPLATE)
    finish(w)


FIRST = dict(q=Q.Q4_K, k=Q.Q5_K, v=Q.Q6_K, o=Q.IQ4_XS, gate=Q.Q2_K, up=Q.Q3_K, down=Q.Q4_0)
SECOND = dict(q=Q.Q4_1, k=Q.Q5_0, v=Q.Q5_1, o=Q.MXFP4, gate=Q.Q8_0, up=Q.IQ4_NL, down=Q.Q4_K)


def kind_of(name):
    if name.startswith("model.layers."):
        _, _, layer, _, part, _ = name.split(".")
        return (FIRST if layer == "0" else SECOND)[part.removesuffix("_proj")]
    return Q.Q6_K if name == "lm_head.weight" else Q.Q8_0


def mixed(ggml):
    settings = dict(vocab_size=288, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=1, head_dim=64, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=None,
                    eos_token_id=272, tie_word_embeddings=False)
    path = TESTS / "gguf/mixed/mixed.gguf"
    shutil.rmtree(path.parent, ignore_errors=True)
    for seed in range(10000):
        config = LlamaConfig(**settings)
        config._attn_implementation = "eager"
        model = LlamaForCausalLM(config).eval()
        randomize(model, seed)
        stored = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = parameter.numpy()
                if value.ndim == 1:
                    stored[name] = (value, Q.F32)
                    continue
                heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
                part = name.split(".")[-2]
                # Rows move, columns do not, so what is decoded is what was quantized, row by row.
                blocks = ggml.quantize(value, kind_of(name))
                parameter.copy_(torch.from_numpy(ggml.dequantize(blocks, kind_of(name)).reshape(value.shape)))
                if part in heads:
                    blocks = interleave(blocks, heads[part])
                stored[name] = (blocks, kind_of(name))
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, 270, (23,), generator=generator).tolist()
        tokens, margin = greedy(model, prompt)
        if margin >= MARGIN and len(set(tokens)) >= DISTINCT:
            break
    w = writer(path, config)
    byte_level(w, config.vocab_size)
    for name, (value, kind) in stored.items():
        w.add_tensor(stored_name(name), np.ascontiguousarray(value), raw_dtype=kind)
    w.add_chat_template(TEMPLATE)
    finish(w)
    expect(model, path.parent, prompt, tokens, margin, seed)


def expect(model, folder, prompt, tokens, margin, seed):
    ids = prompt + tokens[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    positions = sorted({0, 1, len(prompt) - 1, len(ids) - 1, *range(4, len(ids), 17)})
    save_file({"logits.0": logits[positions].numpy()}, folder / "expected.safetensors")
    case = dict(prompt=prompt, greedy=tokens, positions=positions, max_model_len=None, smallest_margin=round(margin, 5))
    note = dict(made_by="tools/make_gguf_fixtures.py", seed=seed, cases=[case])
    (folder / "expected.json").write_text(json.dumps(note) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ggml", required=True, help="llama.cpp's libggml-base")
    ggml = Ggml(parser.parse_args().ggml)
    torch.set_num_threads(1)
    blocks(ggml)
    smollm2()
    mixed(ggml)
    for path in sorted([*TESTS.glob("gguf/*/*"), *TESTS.glob("quant/*")]):
        print(f"{path.relative_to(TESTS)}: {path.stat().st_size // 1024} KiB")
