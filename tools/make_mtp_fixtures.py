"""Makes the tiny random MTP heads that Folio's are checked against: the `qwen3` fixture of `make_fixtures.py` with a layer more.

For each form in which checkpoints have one: the checkpoint (config.json, safetensors), and what the head computes in float32 from the stored
weights. The layer is transformers' own; what is before and behind it is written here after vLLM's `qwen3_next_mtp.py`, `deepseek_mtp.py` and
`mimo_mtp.py` (without the zeros that the latter two put in place of the first embedding), over the target's hidden states as transformers
gives them: logits of all rows of a text, and then three drafts that are fed back.

    python tools/make_mtp_fixtures.py

Needs torch, transformers >= 5 and safetensors. Writes crates/folio-model/tests/mtp/<name>/. Deterministic.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

TESTS = Path(__file__).resolve().parent.parent / "crates/folio-model/tests"
TARGET, VOCAB, TOKENS, DRAFTS = "qwen3", 199, 30, 3

# name -> names of its tensors, what is multiplied in which order, whether hidden states are normed, what config.json says of it
FORMS = {
    "qwen": dict(token_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden", projection="mtp.fc", norm="mtp.norm",
                 layer="mtp.layers.0", order="eh", normed=True, config=dict(mtp_num_hidden_layers=1)),
    "deepseek": dict(token_norm="model.layers.2.enorm", hidden_norm="model.layers.2.hnorm", projection="model.layers.2.eh_proj",
                     norm="model.layers.2.shared_head.norm", layer="model.layers.2", order="eh", normed=True,
                     embedding="model.layers.2.embed_tokens", output="model.layers.2.shared_head.head",
                     config=dict(num_nextn_predict_layers=1)),
    "mimo": dict(token_norm="model.mtp_layers.0.token_layernorm", hidden_norm="model.mtp_layers.0.hidden_layernorm",
                 projection="model.mtp_layers.0.input_proj", norm="model.mtp_layers.0.final_layernorm", layer="model.mtp_layers.0",
                 order="he", normed=False, config=dict(num_nextn_predict_layers=1)),
}


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def randomized(form, target, generator):
    hidden = target.config.hidden_size
    layer = Qwen3DecoderLayer(target.config, 0)
    shapes = {form["layer"] + "." + name: tuple(value.shape) for name, value in layer.state_dict().items()}
    shapes |= {form[name] + ".weight": (hidden,) for name in ["token_norm", "hidden_norm", "norm"]}
    shapes[form["projection"] + ".weight"] = (hidden, 2 * hidden)
    shapes |= {form[name] + ".weight": (VOCAB, hidden) for name in ["embedding", "output"] if name in form}
    tensors = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        value = 1.0 + 0.2 * noise if len(shape) == 1 else noise * (0.6 if shape[0] == VOCAB else 1.6 / shape[1] ** 0.5)
        tensors[name] = value.to(torch.bfloat16)
    return tensors


class Head:
    def __init__(self, form, tensors, target):
        self.form, self.tensors, self.eps = form, tensors, target.config.rms_norm_eps
        self.rotary = target.model.rotary_emb
        table = target.get_input_embeddings().weight.detach()
        self.embedding = self.weight("embedding") if "embedding" in form else table
        self.output = self.weight("output") if "output" in form else target.get_output_embeddings().weight.detach()
        self.layer = Qwen3DecoderLayer(target.config, 0).eval()
        prefix = form["layer"] + "."
        own = self.layer.state_dict()
        self.layer.load_state_dict({name: tensors[prefix + name] for name in own})

    def weight(self, name):
        return self.tensors[self.form[name] + ".weight"]

    def rows(self, tokens, hidden):
        """Logits of all rows of these tokens, and the hidden states of the rows behind them."""
        embedded = norm(self.embedding[tokens], self.weight("token_norm"), self.eps)
        before = norm(hidden, self.weight("hidden_norm"), self.eps)
        both = [embedded, before] if self.form["order"] == "eh" else [before, embedded]
        x = (torch.cat(both, -1) @ self.weight("projection").T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
        x = (x[0] if isinstance(x, tuple) else x)[0]
        final = norm(x, self.weight("norm"), self.eps)
        return final @ self.output.T, final if self.form["normed"] else x


def hidden_states(model, tokens, normed):
    """Of the last layer."""
    seen = []
    take = model.model.norm.register_forward_hook(lambda module, args, out: seen.append((out if normed else args[0])[0].clone()))
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    take.remove()
    return seen[0]


def make(number, name):
    form, fixture = FORMS[name], TESTS / "fixtures" / TARGET
    target = AutoModelForCausalLM.from_pretrained(fixture, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(100 + number)
    stored = randomized(form, target, generator)
    head = Head(form, {key: value.to(torch.float32) for key, value in stored.items()}, target)
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
    save_file(load_file(fixture / "model.safetensors") | stored, folder / "model.safetensors")
    config = json.loads((fixture / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | form["config"], indent=2) + "\n")
    expected = {"features": features, "logits": logits, "draft_logits": torch.stack(rows)}
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    note = dict(made_by="tools/make_mtp_fixtures.py", tokens=tokens, drafts=drafts)
    (folder / "expected.json").write_text(json.dumps(note) + "\n")
    print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir()) // 1024} KiB, drafts {drafts}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, name in enumerate(FORMS):
        make(number, name)
