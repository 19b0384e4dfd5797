"""Makes the tiny random EAGLE-3 heads that Folio's are checked against, for targets among the fixtures of `make_fixtures.py`.

For each form in which heads are published: a checkpoint (config.json, safetensors), and what the head computes in float32 from the stored
weights, written here by the formulas of the paper (arXiv 2503.01840) and of vLLM's `llama_eagle3.py`, over the target's hidden states as
transformers gives them: features, logits of all rows of a text, and then three drafts that are fed back.

    python tools/make_eagle_fixtures.py

Needs torch, transformers >= 5 and safetensors. Writes crates/folio-model/tests/eagle/<name>/. Deterministic.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

TESTS = Path(__file__).resolve().parent.parent / "crates/folio-model/tests"
VOCAB = 199
TOKENS, DRAFTS = 30, 3

# name -> target, taps as inputs of layers, configuration of the head, dtype, naming of its layer
HEADS = {
    # As SafeAILab publishes them: a Llama's fields, the layers that are read by default, the target's embeddings.
    "authors": dict(target="smollm3", taps=[2, 2, 2], dtype=torch.float16, layer="midlayer", own_embedding=False, draft_vocab=64,
                    config=dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, hidden_act="silu",
                                hidden_size=48, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
                                rope_theta=10000.0, max_position_embeddings=64, vocab_size=VOCAB, draft_vocab_size=64,
                                tie_word_embeddings=False)),
    # vLLM's speculators: everything that may be on is on; another width than the target's.
    "speculators": dict(target="llama3", taps=[0, 1, 2], dtype=torch.bfloat16, layer="layers.0", own_embedding=True, draft_vocab=80,
                        norm_before_residual=True, fc_norm=True, norm_output=True, bias=True,
                        config=dict(architectures=["Eagle3Speculator"], speculators_model_type="eagle3", speculators_version="0.3.0",
                                    draft_vocab_size=80, norm_before_residual=True, fc_norm=True, norm_output=True,
                                    eagle_aux_hidden_state_layer_ids=[0, 1, 2],
                                    transformer_layer_config=dict(
                                        model_type="llama", hidden_size=40, intermediate_size=56, num_attention_heads=2,
                                        num_key_value_heads=2, head_dim=24, num_hidden_layers=1, hidden_act="silu", rms_norm_eps=1e-6,
                                        vocab_size=VOCAB, max_position_embeddings=256, attention_bias=True,
                                        rope_scaling=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                                          high_freq_factor=4.0, original_max_position_embeddings=32),
                                        rope_theta=10000.0))),
    # SGLang's: layers by their outputs, all tokens, the target's tables.
    "sglang": dict(target="qwen3", taps=[1, 2], dtype=torch.float32, layer="midlayer", own_embedding=False, draft_vocab=None,
                   config=dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, hidden_act="silu",
                               hidden_size=48, intermediate_size=64, num_attention_heads=3, num_key_value_heads=1, head_dim=32,
                               rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=256, vocab_size=VOCAB,
                               draft_vocab_size=VOCAB,
                               eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 1], use_aux_hidden_state=True))),
    # Of gpt-oss: one norm over all layers that are read; here in another order than theirs, and behind the last one, too.
    "gpt_oss": dict(target="gpt_oss", taps=[2, 1, 3], dtype=torch.bfloat16, layer="midlayer", own_embedding=False, draft_vocab=72,
                    norm_before_fc=True,
                    config=dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, hidden_act="silu",
                                hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=256, vocab_size=VOCAB, draft_vocab_size=72,
                                eagle_config=dict(norm_before_fc=True, eagle_aux_hidden_state_layer_ids=[1, 0, 2],
                                                  use_aux_hidden_state=True))),
}


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def frequencies(config, dim):
    inverse = 1.0 / config["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return inverse
    # Llama 3: low frequencies are divided, those between are blended.
    original, low, high = (scaling[name] for name in ["original_max_position_embeddings", "low_freq_factor", "high_freq_factor"])
    turns = original * inverse / (2 * torch.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / scaling["factor"] + smooth * inverse


def rotate(x, positions, inverse):
    """x: [rows, heads, dim]"""
    angle = positions[:, None].to(torch.float64) * inverse
    cos, sin = (f(angle).to(torch.float32).repeat(1, 2)[:, None] for f in [torch.cos, torch.sin])
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Head:
    def __init__(self, spec, tensors, embedding, output):
        self.spec, self.tensors = spec, tensors
        self.config = spec["config"].get("transformer_layer_config", spec["config"])
        self.embedding, self.output = embedding, output
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.dim = self.config.get("head_dim", self.config["hidden_size"] // self.heads)
        self.keys, self.values = [], []

    def weight(self, name):
        return self.tensors[name.replace("LAYER", self.spec["layer"])]

    def linear(self, x, name):
        bias = name.replace("LAYER", self.spec["layer"]) + ".bias"
        y = x @ self.weight(name + ".weight").T
        return y + self.tensors[bias] if bias in self.tensors else y

    def features(self, tapped):
        if self.spec.get("fc_norm"):
            tapped = [norm(x, self.tensors[f"fc_norm.{i}.weight"], self.config["rms_norm_eps"]) for i, x in enumerate(tapped)]
        tapped = torch.cat(tapped, -1)
        if self.spec.get("norm_before_fc"):
            tapped = norm(tapped, self.tensors["input_norm.weight"], self.config["rms_norm_eps"])
        return tapped @ self.tensors["fc.weight"].T

    def rows(self, tokens, features, first):
        """Logits of rows of these tokens, and the features of the rows behind them. Row i lies at position first + i."""
        eps = self.config["rms_norm_eps"]
        embedded = norm(self.embedding[tokens], self.weight("LAYER.input_layernorm.weight"), eps)
        normed = norm(features, self.weight("LAYER.hidden_norm.weight"), eps)
        residual = normed if self.spec.get("norm_before_residual") else features
        both = torch.cat([embedded, normed], -1)
        positions = torch.arange(first, first + len(tokens))
        split = lambda name, heads: self.linear(both, f"LAYER.self_attn.{name}").view(len(tokens), heads, self.dim)
        inverse = frequencies(self.config, self.dim)
        q, k, v = split("q_proj", self.heads), split("k_proj", self.kv_heads), split("v_proj", self.kv_heads)
        q, k = rotate(q, positions, inverse), rotate(k, positions, inverse)
        self.keys, self.values = self.keys[:first] + list(k), self.values[:first] + list(v)
        group = self.heads // self.kv_heads
        keys, values = (torch.stack(of).repeat_interleave(group, 1) for of in [self.keys, self.values])
        scores = torch.einsum("rhd,phd->hrp", q, keys) / self.dim ** 0.5
        scores = scores.masked_fill(torch.arange(len(keys))[None, None] > positions[None, :, None], float("-inf"))
        attended = torch.einsum("hrp,phd->rhd", scores.softmax(-1), values).reshape(len(tokens), -1)
        x = residual + self.linear(attended, "LAYER.self_attn.o_proj")
        inner = norm(x, self.weight("LAYER.post_attention_layernorm.weight"), eps)
        gate, up = self.linear(inner, "LAYER.mlp.gate_proj"), self.linear(inner, "LAYER.mlp.up_proj")
        x = x + self.linear(torch.nn.functional.silu(gate) * up, "LAYER.mlp.down_proj")
        final = norm(x, self.tensors["norm.weight"], eps)
        return final @ self.output.T, final if self.spec.get("norm_output") else x


def randomized(spec, hidden, generator):
    config = spec["config"].get("transformer_layer_config", spec["config"])
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim", width // heads)
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    layer = spec["layer"]
    shapes = {
        "fc.weight": (width, len(spec["taps"]) * hidden),
        f"{layer}.self_attn.q_proj.weight": (q, 2 * width),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * width),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * width),
        f"{layer}.self_attn.o_proj.weight": (width, q),
        f"{layer}.mlp.gate_proj.weight": (inner, width),
        f"{layer}.mlp.up_proj.weight": (inner, width),
        f"{layer}.mlp.down_proj.weight": (width, inner),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.hidden_norm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
    }
    if spec["draft_vocab"]:
        shapes["lm_head.weight"] = (spec["draft_vocab"], width)
    if spec["own_embedding"]:
        shapes["embed_tokens.weight"] = (VOCAB, width)
    if spec.get("fc_norm"):
        shapes.update({f"fc_norm.{i}.weight": (hidden,) for i in range(len(spec["taps"]))})
    if spec.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(spec["taps"]) * hidden,)
    if spec.get("bias"):
        shapes.update({f"{layer}.self_attn.{name}.bias": (rows,) for name, rows in
                       [("q_proj", q), ("k_proj", kv), ("v_proj", kv), ("o_proj", width)]})
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            value = 0.3 * noise
        elif len(shape) == 1:
            value = 1.0 + 0.2 * noise
        elif name.startswith(("embed_tokens", "lm_head")):
            value = 0.6 * noise
        else:
            value = noise * (1.6 / shape[1] ** 0.5)
        tensors[name] = value.to(spec["dtype"])
    if spec["draft_vocab"]:
        ids = torch.randperm(VOCAB, generator=generator)[:spec["draft_vocab"]].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def hidden_states(model, tokens):
    """The residual stream before each layer, and behind the last one."""
    seen = []
    keep = lambda module, args, kwargs: seen.append((args or [kwargs["hidden_states"]])[0][0].clone())
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    hooks.append(model.model.norm.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    [hook.remove() for hook in hooks]
    return seen


def make(number, name):
    spec = HEADS[name]
    target = AutoModelForCausalLM.from_pretrained(TESTS / "fixtures" / spec["target"], dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(number)
    stored = randomized(spec, target.config.hidden_size, generator)
    tensors = {key: value.to(torch.float32) if value.is_floating_point() else value for key, value in stored.items()}
    table = target.get_input_embeddings().weight.detach()
    head = Head(spec, tensors, tensors.get("embed_tokens.weight", table), tensors.get("lm_head.weight", target.get_output_embeddings().weight.detach()))
    tokens = torch.randint(3, VOCAB, (TOKENS,), generator=generator).tolist()
    states = hidden_states(target, tokens)
    features = head.features([states[tap] for tap in spec["taps"]])
    # The row of a token has the features of the position before, and lies there.
    logits, following = head.rows(torch.tensor(tokens[1:]), features[:-1], 0)
    to_target = lambda draft: draft + int(tensors["d2t"][draft]) if "d2t" in tensors else draft
    drafts, rows, own = [], [], following[-1:]
    row = logits[-1]
    for at in range(DRAFTS):
        drafts.append(to_target(int(row.argmax())))
        out, own = head.rows(torch.tensor(drafts[-1:]), own, TOKENS - 1 + at)
        row = out[0]
        rows.append(row)
    folder = TESTS / "eagle" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file({key: value.contiguous() for key, value in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(spec["config"], indent=2) + "\n")
    expected = {"features": features, "logits": logits, "draft_logits": torch.stack(rows)}
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    note = dict(made_by="tools/make_eagle_fixtures.py", target=spec["target"], taps=spec["taps"], tokens=tokens, drafts=drafts)
    (folder / "expected.json").write_text(json.dumps(note) + "\n")
    print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir()) // 1024} KiB, drafts {drafts}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, name in enumerate(HEADS):
        make(number, name)
