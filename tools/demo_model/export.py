"""Writes a checkpoint as a Hugging Face folder (bf16) and checks it against `transformers`.

    python export.py --checkpoint DIR/checkpoint.pt --tokenizer DIR/tok --out ../../crates/folio/assets/demo

The check compares logits on a generated conversation, the chat template's text with the one trained on (tools too), and the tokens of a
round trip through the tokenizer; it fails loudly, because a model served by the wrong formula is only a little worse.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import calls
from evaluate import Chat, load_checkpoint, rounded
from generate import example
from model import Config, Llama

SIZE_MAX = 15 * 2**20


def hf_state_dict(model):
    c = model.c
    kv = c.kv_heads * c.head_dim
    out = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for i, b in enumerate(model.blocks):
        q, k, v = b.qkv.weight.split((c.hidden, kv, kv))
        gate, up = b.gate_up.weight.chunk(2)
        out |= {
            f"model.layers.{i}.{name}.weight": w
            for name, w in {
                "input_layernorm": b.attn_norm.weight,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": b.o.weight,
                "post_attention_layernorm": b.mlp_norm.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": b.down.weight,
            }.items()
        }
    return {k: v.detach().to(torch.bfloat16).contiguous().clone() for k, v in out.items()}


def load_exported(folder: Path):
    """The plain model with the weights of an exported folder."""
    f = json.loads((folder / "config.json").read_text())
    c = Config(
        vocab_size=f["vocab_size"],
        hidden=f["hidden_size"],
        layers=f["num_hidden_layers"],
        heads=f["num_attention_heads"],
        kv_heads=f["num_key_value_heads"],
        intermediate=f["intermediate_size"],
        rope_theta=f["rope_theta"],
        norm_eps=f["rms_norm_eps"],
        context=f["max_position_embeddings"],
    )
    model, w = Llama(c), {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    state = {"embed.weight": w["model.embed_tokens.weight"], "norm.weight": w["model.norm.weight"]}
    for i in range(c.layers):
        at = lambda name: w[f"model.layers.{i}.{name}.weight"]
        state |= {
            f"blocks.{i}.attn_norm.weight": at("input_layernorm"),
            f"blocks.{i}.qkv.weight": torch.cat([at(f"self_attn.{x}_proj") for x in "qkv"]),
            f"blocks.{i}.o.weight": at("self_attn.o_proj"),
            f"blocks.{i}.mlp_norm.weight": at("post_attention_layernorm"),
            f"blocks.{i}.gate_up.weight": torch.cat([at("mlp.gate_proj"), at("mlp.up_proj")]),
            f"blocks.{i}.down.weight": at("mlp.down_proj"),
        }
    model.load_state_dict(state)
    return model


def config_json(c: Config, bos: int, eos: int):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }


def check_tools(tok, chat):
    """The template shows tools, calls and results as `calls.py` writes them."""
    for i in range(40):
        requests = [request for _, request in calls.offer(random.Random(f"export/{i}"), calls.FAMILIES, 3)]
        messages, written = ([{"role": "system", "content": "Be brief."}] if i % 2 else [] for _ in range(2))
        for r in requests:
            function = {"name": r.tool.name, "arguments": r.arguments}
            messages += [{"role": "user", "content": r.ask}, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}, {"role": "tool", "content": r.result}]
            written += [{"role": "user", "content": r.ask}, {"role": "assistant", "content": calls.call(r.tool.name, r.arguments, marks=False)}, {"role": "tool", "content": r.result}]
        text = tok.apply_chat_template(messages, tools=[r.tool.json() for r in requests], tokenize=False, add_generation_prompt=True)
        assert text == chat.prompt(calls.with_tools(written, [r.tool for r in requests])), "the chat template shows tools in another way than the text trained on"


def check(folder: Path, chat: Chat):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tok = AutoTokenizer.from_pretrained(folder)
    messages = example(random.Random("export"), "conversation", 1500)["messages"]
    if messages[-1]["role"] == "assistant":
        messages.pop()
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == chat.prompt(messages), "the chat template differs from the text trained on"
    check_tools(tok, chat)
    ids = tok(text, add_special_tokens=False, return_tensors="pt").input_ids
    assert ids[0].tolist() == chat.tok.encode(text, add_special_tokens=False).ids, "the tokenizers differ"
    assert tok.decode(ids[0], clean_up_tokenization_spaces=False) == text, "decoding does not give the text back"
    assert tok("Once").input_ids[0] == tok.bos_token_id, "plain text does not start with the begin token"
    with torch.no_grad():
        ours, other = load_exported(folder).eval()(ids), theirs(ids).logits
    worst = (ours - other).abs().max().item()
    same = (ours.argmax(-1) == other.argmax(-1)).float().mean().item()
    print(f"{ids.shape[1]} tokens: largest difference of a logit {worst:.2e}, same best token {same:.4f}")
    assert worst < 2e-3, "the export computes something else than transformers does"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, required=True)
    p.add_argument("--tokenizer", type=Path, required=True, help="folder that tokenizer.py wrote")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    torch.set_num_threads(1)
    from tokenizers import Tokenizer

    model, state = load_checkpoint(a.checkpoint)
    a.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(a.tokenizer / name, a.out / name)
    tok = Tokenizer.from_file(str(a.out / "tokenizer.json"))
    bos, eos = tok.token_to_id("<|begin|>"), tok.token_to_id("<|end|>")
    (a.out / "config.json").write_text(json.dumps(config_json(model.c, bos, eos), indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos, "do_sample": False, "max_new_tokens": 256}
    (a.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    part = a.out / "model.safetensors.part"
    save_file(hf_state_dict(model), part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(a.out / "model.safetensors")
    size = sum(f.stat().st_size for f in a.out.iterdir())
    assert size <= SIZE_MAX, f"{size} bytes: too large to embed"
    print(f"{sum(x.numel() for x in model.parameters())} parameters, {size / 2**20:.2f} MiB, {state['tokens'] / 1e6:.1f} M tokens seen")
    check(a.out, Chat(rounded(model), tok))


if __name__ == "__main__":
    main()
