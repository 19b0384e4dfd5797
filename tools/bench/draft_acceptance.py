#!/usr/bin/env python3
"""How often drafts of a model are accepted, by the rule that accepts them, on the same logits.

    python draft_acceptance.py [--head DIR] [--dialogues 48] [--tokens 96] [--drafts 3] [--temperatures 0.7,1.0] [--out results.json]

The target is the built-in model. Two drafters: an EAGLE-3 head (crates/folio/assets/demo-eagle3), and, as a small draft model, the target's own first
half of layers with its norm and embeddings, which was trained for nothing of the kind. Dialogues are those of dialogues.jsonl, which
tools/demo_model/generate.py made from seeds that no training row has and the head's texts neither; answers are drawn from the target at the temperature that is measured.

Four rules, all exact (p: target, q: drafter, both at the temperature):
    greedy      the draft is argmax q, and accepted while the target, drawing as without it, says the same: accepted with p(argmax q)
    coupled     the draft is drawn with the target's Gumbel noise of that position (Daliri, Musco, Suresh 2024), accepted in the same way:
                sum over x of 1 / sum over y of max(p(y)/p(x), q(y)/q(x))
    sharper     the same with the drafter at half the temperature
    rejection   Leviathan's and Chen's rejection sampling: sum of min(p, q). Another token than without drafts may come of it.

What is said of a step of k drafts is no estimate of independent ones: a chain goes along text that the target said, each draft weighed by the
probability that it is accepted where the target says that token. At temperature 0 they are one.

Needs torch, transformers, safetensors; some minutes on one core.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent.parent
DIALOGUES = Path(__file__).resolve().parent / "dialogues.jsonl"
sys.path.insert(0, str(ROOT / "tools/demo_model"))

import eagle  # noqa: E402

RULES = ("greedy", "sharper", "coupled", "rejection")


def dialogues(count, tokenizer):
    """Prompts as ids."""
    for line in DIALOGUES.read_text().splitlines()[:count]:
        dialogue = json.loads(line)
        text = "<|begin|>" + "".join(f"<|{m['role']}|>{m['content'].strip()}<|end|>" for m in dialogue["messages"]) + "<|assistant|>"
        yield dialogue["kind"], tokenizer.encode(text, add_special_tokens=False)


class Trained(eagle.Head):
    """The head that was saved, in f32."""

    def __init__(self, folder):
        super().__init__()
        saved = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name in self.names:
                self[name].copy_(saved[name].float())
        self.ids = saved["d2t"] + torch.arange(len(saved["d2t"]))


def of_head(head, table, ids, hidden, layers, steps):
    """Logits over the target's vocabulary of each step: row s of step j is for the token s + 2, told the tokens to s + 1 and features to s - j."""
    taps = [2, layers // 2, layers - 3]
    features = torch.cat([hidden[tap] for tap in taps], -1) @ head["fc.weight"].T
    features, embedded, before, out = features[:, :-1], table[ids[:, 1:]], [], []
    rotation = eagle.rotary(ids.shape[1])
    for _ in range(steps):
        said, following = head(embedded, features, rotation, before)
        logits = torch.full((*said.shape[:2], table.shape[0]), float("-inf"))
        logits[..., head.ids] = said
        out.append(F.pad(logits[0], (0, 0, 1, 0), value=0.0))
        features = F.pad(following, (0, 0, 1, 0))[:, :-1]
    return out


def coupled(p, q, token):
    """Probability that both draw `token` of the same noise: 1 / sum over y of max(p(y)/p(token), q(y)/q(token))."""
    own_p, own_q = (x.gather(-1, token[:, None]) for x in (p, q))
    return torch.where(own_q[:, 0] > 0, 1 / torch.maximum(p / own_p, q / own_q.clamp_min(1e-30)).sum(-1), torch.zeros(len(token)))


def coupled_at_all(p, q):
    """The same summed over tokens, by sorting the ratios."""
    order = (p / q.clamp_min(1e-30)).sort(-1, descending=True).indices
    p, q = p.gather(-1, order), q.gather(-1, order)
    above, below = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    each = 1 / (above / p.clamp_min(1e-30) + below / q.clamp_min(1e-30))
    return torch.where((p > 0) & (q > 0), each, torch.zeros_like(each)).sum(-1)


class Sums:
    def __init__(self, drafts):
        self.alone = {rule: [] for rule in RULES}
        self.steps = {rule: [] for rule in self.alone}
        self.drafts = drafts

    def add(self, logits, drafted, ids, first, temperature):
        """`logits[s]` and `drafted[j][s]` are for the token s + 1; tokens from `first` on are the answer's."""
        rows = torch.arange(first - 1, len(ids) - 1)
        token, weights = ids[rows + 1], {rule: [] for rule in self.alone}
        for depth, of_depth in enumerate(drafted):
            # The head's first row has no features of its own.
            p, said = logits[rows], of_depth[rows]
            greedy = said.argmax(-1)
            if temperature == 0:
                same = (greedy == token).double()
                for rule in weights:
                    weights[rule].append(same)
                    if depth == 0:
                        self.alone[rule] += same.tolist()
                continue
            p, q = (p / temperature).double().softmax(-1), (said / temperature).double().softmax(-1)
            own_p, own_q = (x.gather(-1, token[:, None])[:, 0] for x in (p, q))
            weights["greedy"].append((greedy == token).double())
            sharp = (said / (temperature / 2)).double().softmax(-1)
            weights["coupled"].append((coupled(p, q, token) / own_p).clamp(max=1))
            weights["sharper"].append((coupled(p, sharp, token) / own_p).clamp(max=1))
            weights["rejection"].append((own_q / own_p).clamp(max=1))
            if depth == 0:
                self.alone["greedy"] += p.gather(-1, greedy[:, None])[:, 0].tolist()
                self.alone["coupled"] += coupled_at_all(p, q).tolist()
                self.alone["sharper"] += coupled_at_all(p, sharp).tolist()
                self.alone["rejection"] += torch.minimum(p, q).sum(-1).tolist()
        for rule, of_depths in weights.items():
            for start in range(len(rows) - self.drafts + 1):
                survives, tokens = 1.0, 1.0
                for depth in range(self.drafts):
                    survives *= float(of_depths[depth][start + depth])
                    tokens += survives
                self.steps[rule].append(tokens)

    def figures(self):
        mean = lambda values: round(statistics.fmean(values), 4) if values else None
        return {rule: {"first draft accepted": mean(self.alone[rule]), "tokens a step": mean(self.steps[rule])} for rule in self.alone}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=ROOT / "crates/folio/assets/demo-eagle3")
    parser.add_argument("--dialogues", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--temperatures", default="0,0.7,1.0")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(eagle.MODEL, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(eagle.MODEL)
    head, table, layers = Trained(args.head), model.get_input_embeddings().weight.detach(), model.config.num_hidden_layers
    results = {"kind": "draft-acceptance", "dialogues": args.dialogues, "tokens": args.tokens, "drafts": args.drafts, "temperatures": {}}
    for temperature in map(float, args.temperatures.split(",")):
        torch.manual_seed(1)
        sums, kinds = {name: Sums(args.drafts) for name in ("EAGLE-3 head", "first half of the layers")}, {}
        for kind, prompt in dialogues(args.dialogues, tokenizer):
            how = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
            with torch.no_grad():
                ids = model.generate(torch.tensor([prompt]), max_new_tokens=args.tokens, pad_token_id=1, **how)
                out = model(ids, output_hidden_states=True, use_cache=False)
                half = model.model.norm(out.hidden_states[layers // 2]) @ table.T
                of = {"EAGLE-3 head": of_head(head, table, ids, out.hidden_states, layers, args.drafts),
                      "first half of the layers": [half[0]] * args.drafts}
                per_kind = kinds.setdefault(kind, Sums(args.drafts))
                per_kind.add(out.logits[0], of["EAGLE-3 head"], ids[0], len(prompt), temperature)
                for name, drafted in of.items():
                    sums[name].add(out.logits[0], drafted, ids[0], len(prompt), temperature)
        figures = {name: of_drafter.figures() for name, of_drafter in sums.items()}
        results["temperatures"][temperature] = {"all": figures, "head by kind": {kind: of_kind.figures() for kind, of_kind in kinds.items()}}
        for name, by_rule in figures.items():
            for rule, figure in by_rule.items():
                print(f"T {temperature}: {name:25} {rule:10} first draft {figure['first draft accepted']}, tokens a step of {args.drafts} drafts {figure['tokens a step']}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
