#!/usr/bin/env python3
"""Tiny random LoRA adapters of fixtures of `make_fixtures.py`, and what PEFT computes with them, in float32.

`python3 tools/make_adapter_fixtures.py [name ...]`, with torch, transformers, peft and safetensors. Writes
`crates/folio-model/tests/adapters/NAME`: a PEFT folder, and beside it what is expected.
"""
import json
import shutil
import sys
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file

TESTS = Path(__file__).resolve().parent.parent / "crates/folio-model/tests"
STEPS = 64
MARGIN = 2e-3
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Base, dtype of the file, and PEFT's settings.
ADAPTERS = {
    "llama3": ("llama3", torch.bfloat16, dict(r=4, lora_alpha=6, target_modules=LLAMA)),
    # Ranks above 16, and other scales for some; some modules without.
    "llama3_ranks": ("llama3", torch.float32, dict(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.v_proj": 17, "down_proj": 2}, alpha_pattern={"v_proj": 9})),
    "llama3_bias": ("llama3", torch.float16, dict(r=16, lora_alpha=16, lora_bias=True, target_modules=["k_proj", "up_proj"])),
    "phi3": ("phi3", torch.float32, dict(r=5, lora_alpha=8, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
    "qwen3_5_text": ("qwen3_5_text", torch.float32, dict(
        r=6, lora_alpha=8, target_modules=LLAMA + ["in_proj_qkv", "in_proj_z", "out_proj"])),
    "deepseek_v2_lite": ("deepseek_v2_lite", torch.float32, dict(
        r=4, lora_alpha=8, target_modules=["q_proj", "kv_a_proj_with_mqa", "o_proj"])),
}


def greedy(model, prompt):
    ids, margin = list(prompt), 1.0
    with torch.no_grad():
        for _ in range(STEPS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            top = logits.topk(2)
            margin = min(margin, float((top.values[0] - top.values[1]) / logits.abs().max()))
            if margin < MARGIN:
                break
            ids.append(int(top.indices[0]))
    return ids[len(prompt):], margin


def make(name):
    base, dtype, settings = ADAPTERS[name]
    for seed in range(1000):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            TESTS / "fixtures" / base, dtype=torch.float32, attn_implementation="eager").eval()
        if hasattr(model.config, "_experts_implementation"):
            model.config._experts_implementation = "eager"
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                if "lora_" in part:
                    parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.15).to(dtype).float())
        prompt = torch.randint(3, model.config.vocab_size, (23,), generator=generator).tolist()
        tokens, margin = greedy(model, prompt)
        if len(tokens) == STEPS and len(set(tokens)) >= 8:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a varied continuation with clear margins")
    ids = prompt + tokens[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        plain = model.base_model.model
        with model.disable_adapter():
            without = plain(torch.tensor([ids]), use_cache=False).logits[0]
    positions = sorted({0, 1, len(prompt) - 1, len(ids) - 1, *range(4, len(ids), 9)})
    assert float((logits - without)[positions].abs().max()) > 0.1, f"{name} changes next to nothing"
    folder = TESTS / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({"logits.0": logits[positions].contiguous()}, folder / "expected.safetensors")
    case = dict(prompt=prompt, greedy=tokens, positions=positions, max_model_len=None, smallest_margin=round(margin, 5))
    note = dict(made_by="tools/make_adapter_fixtures.py", base=base, seed=seed, cases=[case])
    (folder / "expected.json").write_text(json.dumps(note) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, margin {margin:.4f}, {size // 1024} KiB")


if __name__ == "__main__":
    for name in sys.argv[1:] or ADAPTERS:
        make(name)
