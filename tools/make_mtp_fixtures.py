"""Makes the tiny random MTP heads that Folio's are checked against: fixtures of `make_fixtures.py` with a layer more.

Of the fixture `qwen3` one for each form in which checkpoints have a head, and one of each family that is published with one, as it is: the
checkpoint (config.json, safetensors), and what the head computes in float32 from the stored weights. The layer is transformers' own; what is
before and behind it is written here after vLLM's `qwen3_next_mtp.py`, `qwen3_5_mtp.py`, `deepseek_mtp.py` and `mimo_mtp.py` (without the zeros
that the latter two put in place of the first embedding), over the target's hidden states as transformers gives them: logits of all rows of a
text, and then three drafts that are fed back.

    python tools/make_mtp_fixtures.py [name ...]

Needs torch, transformers >= 5 and safetensors. Writes crates/folio-model/tests/mtp/<name>/. Deterministic.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

TESTS = Path(__file__).resolve().parent.parent / "crates/folio-model/tests"
VOCAB, TOKENS, DRAFTS = 199, 30, 3

# names of a form's tensors, N for the layer's number, what is multiplied in which order, whether hidden states are normed
QWEN = dict(token_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden", projection="mtp.fc", norm="mtp.norm",
            layer="mtp.layers.0", order="eh", normed=True)
DEEPSEEK = dict(token_norm="model.layers.N.enorm", hidden_norm="model.layers.N.hnorm", projection="model.layers.N.eh_proj",
                norm="model.layers.N.shared_head.norm", layer="model.layers.N", order="eh", normed=True,
                embedding="model.layers.N.embed_tokens", output="model.layers.N.shared_head.head")
MIMO = dict(token_norm="model.mtp_layers.0.token_layernorm", hidden_norm="model.mtp_layers.0.hidden_layernorm",
            projection="model.mtp_layers.0.input_proj", norm="model.mtp_layers.0.final_layernorm", layer="model.mtp_layers.0",
            order="he", normed=False)
NEXTN, QWEN_MTP = dict(num_nextn_predict_layers=1), dict(mtp_num_hidden_layers=1)

# name -> form, fixture, class of its layers and the number of one that is like the head's, what config.json says, how experts are stored
HEADS = {
    "qwen": (QWEN, "qwen3", Qwen3DecoderLayer, 0, QWEN_MTP, None),
    "deepseek": (DEEPSEEK, "qwen3", Qwen3DecoderLayer, 0, NEXTN, None),
    "mimo": (MIMO, "qwen3", Qwen3DecoderLayer, 0, NEXTN, None),
    "qwen3_next": (QWEN, "qwen3_next", Qwen3NextDecoderLayer, 1, NEXTN, "each"),
    # The model's experts are all in one tensor, the head's are not: Qwen3.5-35B-A3B.
    "qwen3_5_moe": (QWEN, "qwen3_5_moe", Qwen3_5MoeDecoderLayer, 2, QWEN_MTP, "each"),
    # Qwen3.6-35B-A3B.
    "qwen3_5_moe_text": (QWEN, "qwen3_5_moe_text", Qwen3_5MoeDecoderLayer, 1, QWEN_MTP, "stacked"),
    "deepseek_v3": (DEEPSEEK, "deepseek_v3", DeepseekV3DecoderLayer, 2, NEXTN, "each"),
    "glm4_moe_lite": (DEEPSEEK, "glm4_moe_lite", Glm4MoeLiteDecoderLayer, 2, NEXTN, "each"),
}


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def decoder(target):
    return target.model.language_model if hasattr(target.model, "language_model") else target.model


def randomized(form, layer, config, generator):
    """Every tensor of a head, as transformers calls those of its layer."""
    hidden = config.hidden_size
    shapes = {form["layer"] + "." + name: tuple(value.shape) for name, value in layer.state_dict().items()}
    shapes |= {form[name] + ".weight": (hidden,) for name in ["token_norm", "hidden_norm", "norm"]}
    shapes[form["projection"] + ".weight"] = (hidden, 2 * hidden)
    shapes |= {form[name] + ".weight": (VOCAB, hidden) for name in ["embedding", "output"] if name in form}
    tensors = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            value = 0.1 * noise - 0.5
        elif len(shape) == 1:
            value = 0.2 * noise + (1.0 - plus_one(layer))
        else:
            value = noise * (0.6 if shape[0] == VOCAB else 1.6 / shape[-1] ** 0.5)
        tensors[name] = value.to(torch.bfloat16)
    return tensors


def plus_one(layer):
    """What the family adds to the weights of its norms."""
    return 1.0 if type(layer) in (Qwen3NextDecoderLayer, Qwen3_5MoeDecoderLayer) else 0.0


def stored_experts(tensors, how):
    """The tensors as checkpoints have them: transformers has the experts of a layer in one."""
    if how == "stacked" or how is None:
        return tensors
    apart = {}
    for name, value in tensors.items():
        prefix, found, part = name.partition(".mlp.experts.")
        if not found:
            apart[name] = value
            continue
        for number, expert in enumerate(value):
            own = f"{prefix}.mlp.experts.{number}."
            if part == "down_proj":
                apart[own + "down_proj.weight"] = expert.contiguous()
            else:
                gate, up = expert.chunk(2)
                apart |= {own + "gate_proj.weight": gate.contiguous(), own + "up_proj.weight": up.contiguous()}
    return apart


class Head:
    def __init__(self, form, layer, tensors, target):
        self.form, self.tensors, self.layer = form, tensors, layer.eval()
        self.plus_one, self.eps = plus_one(layer), decoder(target).config.rms_norm_eps
        self.rotary = decoder(target).rotary_emb
        table = target.get_input_embeddings().weight.detach()
        self.embedding = tensors[form["embedding"] + ".weight"] if "embedding" in form else table
        self.output = tensors[form["output"] + ".weight"] if "output" in form else target.get_output_embeddings().weight.detach()
        prefix = form["layer"] + "."
        self.layer.load_state_dict({name: tensors[prefix + name] for name in layer.state_dict()})

    def norm(self, x, name):
        return norm(x, self.plus_one + self.tensors[self.form[name] + ".weight"], self.eps)

    def rows(self, tokens, hidden):
        """Logits of all rows of these tokens, and the hidden states of the rows behind them."""
        embedded, before = self.norm(self.embedding[tokens], "token_norm"), self.norm(hidden, "hidden_norm")
        both = [embedded, before] if self.form["order"] == "eh" else [before, embedded]
        x = (torch.cat(both, -1) @ self.tensors[self.form["projection"] + ".weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
        x = (x[0] if isinstance(x, tuple) else x)[0]
        final = self.norm(x, "norm")
        return final @ self.output.T, final if self.form["normed"] else x


def hidden_states(model, tokens, normed):
    """Of the last layer."""
    seen = []
    take = decoder(model).norm.register_forward_hook(lambda module, args, out: seen.append((out if normed else args[0])[0].clone()))
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    take.remove()
    return seen[0]


def opened(fixture):
    kind = AutoModelForCausalLM
    config = json.loads((fixture / "config.json").read_text())
    if "text_config" in config:
        kind = getattr(transformers, config["architectures"][0])
    return kind.from_pretrained(fixture, dtype=torch.float32, attn_implementation="eager").eval()


def make(number, name):
    form, fixture, layer_class, like, said, experts = HEADS[name]
    fixture = TESTS / "fixtures" / fixture
    target = opened(fixture)
    settings = decoder(target).config
    settings._experts_implementation = "eager"
    form = {key: value.replace(".N", f".{settings.num_hidden_layers}") if isinstance(value, str) else value for key, value in form.items()}
    layer = layer_class(settings, like)
    generator = torch.Generator().manual_seed(100 + number)
    stored = randomized(form, layer, settings, generator)
    head = Head(form, layer, {key: value.to(torch.float32) for key, value in stored.items()}, target)
    tokens = torch.randint(3, VOCAB, (TOKENS,), generator=generator).tolist()
    features = hidden_states(target, tokens, form["normed"])
    # The row of a token has the hidden state of the position before, and lies there.
    logits, following = head.rows(tokens[1:], features[:-1])
    drafts, rows, given, row = [], [], features[:-1], logits[-1]
    for _ in range(DRAFTS):
        drafts.append(int(row.argmax()))
        given = torch.cat([given, following[-1:]])
        out, following = head.rows(tokens[1:] + drafts, given)
        row = out[-1]
        rows.append(row)
    folder = TESTS / "mtp" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(load_file(fixture / "model.safetensors") | stored_experts(stored, experts), folder / "model.safetensors")
    config = json.loads((fixture / "config.json").read_text())
    config.get("text_config", config).update(said)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    expected = {"features": features, "logits": logits, "draft_logits": torch.stack(rows)}
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    note = dict(made_by="tools/make_mtp_fixtures.py", tokens=tokens, drafts=drafts)
    (folder / "expected.json").write_text(json.dumps(note) + "\n")
    print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir()) // 1024} KiB, drafts {drafts}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, name in enumerate(HEADS):
        if name in (sys.argv[1:] or HEADS):
            make(number, name)
