#!/usr/bin/env python3
"""The small models whose quantized forms `tools/bench/kl.py` compares with their 16-bit form.

    python tools/kl_models.py --ggml PATH/libggml-base.so --out FOLDER [--stories FOLDER] [--only NAME]

For each model: NAME.f16.gguf, NAME.FORMAT.gguf with every matrix whose columns are whole blocks in that format (the rest stays f16),
by ggml's own quantizer without an importance matrix, NAME.tokens.json and NAME.json. Two models are trained: `demo`, the one that is built into Folio, and
`stories260k` (--stories: its Hugging Face folder); their tokens are what they generate themselves at temperature 1. The others are
random, one of each family, 256 wide so that every format fits, and read random tokens: they say whether both engines compute the same,
not what quantization does to text. Needs torch, transformers >= 5, gguf >= 0.19 and llama.cpp's libggml-base. Deterministic.
"""

import argparse
import json
import os
import pathlib

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config, SmolLM3Config

from make_gguf_fixtures import Ggml, finish, interleave, stored_name, writer

ROOT = pathlib.Path(__file__).resolve().parent.parent
FORMATS = [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4]
CONTEXT, WINDOWS = 512, 12
SIZES = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
RANDOM = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "smollm3": SmolLM3Config, "phi3": Phi3Config}


def weights(model):
    """(name, values as f32) as they are stored."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values, part = parameter.detach().float().numpy(), name.split(".")[-2]
        if config.model_type in ("llama", "smollm3") and part in heads:
            values = interleave(values, heads[part])
        yield stored_name(name), np.ascontiguousarray(values)


def write(path, model, kind, ggml):
    """Returns the share of the weights in matrices that took the format."""
    w, taken, all_ = writer(path, model.config), 0, 0
    w.add_tokenizer_model("no_vocab")  # token ids are all that is compared
    block = gguf.GGML_QUANT_SIZES[kind][0] if kind else 0
    for name, values in weights(model):
        if values.ndim == 1:
            w.add_tensor(name, values)
            continue
        all_ += values.size
        # What is quantized is what the 16-bit file holds.
        values = values.astype(np.float16)
        if kind and values.shape[1] % block == 0:
            taken += values.size
            w.add_tensor(name, ggml.quantize(values.astype(np.float32), kind), raw_dtype=kind)
        else:
            w.add_tensor(name, values)
    finish(w)
    return taken / all_


def random_model(name):
    torch.manual_seed(7)
    config = RANDOM[name](**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
            else:
                parameter.uniform_(0.5, 1.5)
        # Predictions about as sharp as those of a trained model.
        model.lm_head.weight.mul_(2)
    return model


def sample(model):
    """Windows that the model writes itself."""
    torch.manual_seed(7)
    ids = torch.full((WINDOWS, 1), model.config.bos_token_id)
    cache = None
    with torch.no_grad():
        for _ in range(CONTEXT - 1):
            out = model(ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = torch.softmax(out.logits[:, -1].float(), -1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
    return ids.flatten().tolist()


def make(name, model, trained, a, ggml):
    model.eval()
    if trained:
        tokens = sample(model)
    else:
        tokens = torch.randint(3, model.config.vocab_size, (WINDOWS * CONTEXT,), generator=torch.Generator().manual_seed(7)).tolist()
    out = pathlib.Path(a.out)
    (out / f"{name}.tokens.json").write_text(json.dumps(tokens))
    shares = {}
    write(out / f"{name}.f16.gguf", model, None, ggml)
    for kind in FORMATS:
        path = out / f"{name}.{kind.name.lower()}.gguf"
        share = write(path, model, kind, ggml)
        if share:
            shares[kind.name] = share
        else:
            os.remove(path)
    about = dict(family=model.config.model_type, trained=trained, context=CONTEXT, windows=WINDOWS, shares=shares,
                 parameters=sum(p.numel() for p in model.parameters()))
    (out / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    print(name, about, flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ggml", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--stories")
    ap.add_argument("--only", choices=["demo", "stories260k", *(f"{name}-256" for name in RANDOM)])
    a = ap.parse_args()
    torch.set_num_threads(1)
    os.makedirs(a.out, exist_ok=True)
    ggml = Ggml(a.ggml)
    trained = {"demo": ROOT / "crates/folio/assets/demo"}
    if a.stories:
        trained["stories260k"] = a.stories
    for name, path in trained.items():
        if a.only in (None, name):
            make(name, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), True, a, ggml)
    for name in RANDOM:
        if a.only in (None, f"{name}-256"):
            make(f"{name}-256", random_model(name), False, a, ggml)


if __name__ == "__main__":
    main()
