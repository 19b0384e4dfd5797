"""Measures the model on held-out generated questions, on questions written by hand, and shows stories.

    python evaluate.py --model ../../crates/folio/assets/demo --n 100 --out eval.json
    python evaluate.py --checkpoint DIR/checkpoint.pt --tokenizer DIR/tok --n 30

Decoding is greedy, in f32, with the weights rounded to bf16: what the exported file holds.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import calls
from generate import BEGIN, END, example
from model import Cache, Config, Llama
from stories import story
from tasks import TALK

DISTANCES = [50, 100, 250, 500, 1000, 1500]
KINDS = ["unknown", "yes_no", "story_question", "copy", "sort", "list", "arithmetic", "word_problem", "json", "knowledge", "talk", "outside"]

# Written by hand, in words the generator does not use: (turns, what the last reply must contain).
BY_HAND = [
    (["My dog is called Biscuit and my sister lives in Reykjavik.", "what's the name of my dog?"], "Biscuit"),
    (["hey, i'm Zbigniew", "what is my name"], "Zbigniew"),
    (["The wifi password is hunter42.", "Thanks", "whats the wifi password?"], "hunter42"),
    (["Remember that Priscilla drives a tractor and lives in Ulm.", "Where does Priscilla live?"], "Ulm"),
    (["Aunt Gertrude's favourite colour is magenta. Uncle Bob's favourite colour is teal.", "What is Aunt Gertrude's favourite colour?"], "magenta"),
    (["The treasure is buried under the old oak tree.", "Where is the treasure?"], "oak tree"),
    (["The spare key is in the blue teapot. The passport is in the freezer.", "Where is the passport?"], "freezer"),
    (["Kowalski is 47 years old. Rodriguez is 51 years old. Tanaka is 29 years old.", "How old is Rodriguez?"], "51"),
    (["My locker number is 8841.", "Tell me a story about a cat.", "What is my locker number?"], "8841"),
    (["My name is Svetlana.", "My name is actually Ludmila.", "What is my name?"], "Ludmila"),
    (["The code for the vault is 9914.", "The code for the vault is now 3307.", "What is the code for the vault?"], "3307"),
    (["Sandra moved to Portland. Before that she lived in Austin.", "Where does Sandra live?"], "Portland"),
    (["What is 2 + 2?"], "4"),
    (["whats 9 plus 6"], "15"),
    (["12 - 5"], "7"),
    (["What is 6 times 7?"], "42"),
    (["Sort: 5, 2, 9"], "2, 5, 9"),
    (["Please sort these for me: 31, 4, 15, 9"], "4, 9, 15, 31"),
    (["sort the words zebra, mango, apple"], "apple, mango, zebra"),
    (["Repeat after me: The quick brown fox jumps over the lazy dog."], "The quick brown fox jumps over the lazy dog."),
    (["repeat: supercalifragilistic"], "supercalifragilistic"),
    (["Copy this exactly: x7Qp-22b"], "x7Qp-22b"),
    (["Give me JSON with name and age: Ingrid is 34 years old."], '{"name": "Ingrid", "age": 34}'),
    (["Write this as JSON with name and city: Pedro lives in Quito."], '{"name": "Pedro", "city": "Quito"}'),
    (["Hello!"], "help you|do for you"),
    (["hi, who are you?"], "Folio"),
    (["What can you do"], "stories"),
    (["What is the capital of Mongolia?"], "don't know"),
    (["What is my name?"], "don't know"),
    (["Maria has 7 balloons. She buys 5 more. How many balloons does Maria have now?"], "12"),
    (["A farmer has 15 cows. He sells 6. How many cows are left?"], "9"),
    (["Tell me a story about a wombat."], "wombat"),
    (["write a short story about a girl named Xenia"], "Xenia"),
    (["Count from 1 to 5."], "1, 2, 3, 4, 5"),
    (["What is the opposite of hot?"], "cold"),
]


def load_checkpoint(path):
    saved = torch.load(path, weights_only=False, map_location="cpu")
    model = Llama(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model, saved["state"]


def rounded(model):
    """The weights as bf16 holds them, computed with in f32."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16).float())
    return model.eval()


class Chat:
    def __init__(self, model, tok):
        self.model, self.tok, self.end = model, tok, tok.token_to_id(END)

    def prompt(self, messages):
        return BEGIN + "".join(f"<|{m['role']}|>{m['content'].strip()}{END}" for m in messages) + "<|assistant|>"

    @torch.no_grad()
    def complete(self, text, limit=80, temperature=0.0, seed=0):
        ids = self.tok.encode(text, add_special_tokens=False).ids
        rng = torch.Generator().manual_seed(seed)
        cache, out = Cache(), []
        feed = torch.tensor([ids])
        while len(out) < limit and len(ids) + len(out) < self.model.c.context:
            h = self.model.hidden_states(feed, cache)[0, -1]
            logits = F.linear(h, self.model.embed.weight)
            if temperature:
                token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=rng).item()
            else:
                token = logits.argmax().item()
            if token == self.end:
                break
            out.append(token)
            feed = torch.tensor([[token]])
        return self.tok.decode(out, skip_special_tokens=False), len(ids)

    def reply(self, messages, limit=80, **how):
        return self.complete(self.prompt(messages), limit, **how)[0]


def contains(value, reply):
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", reply) is not None


def right(item, reply):
    kind, want, reply = item["kind"], item["answer"], reply.strip()
    if kind in ("retrieval", "knowledge", "list"):
        return contains(want, reply)
    if kind == "unknown":
        return reply.startswith("I don't know")
    if kind == "talk":
        ask = item["messages"][-1]["content"]
        return any(reply in answers for asks, answers in TALK if ask in asks)
    if kind in ("arithmetic", "word_problem"):
        numbers = re.findall(r"\d+", reply)
        return bool(numbers) and numbers[-1] == want
    return reply == want


def held_out(chat, kind, n, distance=0, seed=1, keep=3):
    count = lambda text: len(chat.tok.encode(text, add_special_tokens=False).ids)
    good, wrong, by = 0, [], {}
    for i in range(n):
        item = example(random.Random(f"held-out/{seed}/{kind}/{distance}/{i}"), kind, distance, count)
        reply = chat.reply(item["messages"])
        ok = right(item, reply)
        good += ok
        if kind == "retrieval":
            for key in ("changed" if item["update"] else "unchanged", "one key" if item["keys"] == 1 else "two or more keys"):
                a, b = by.get(key, (0, 0))
                by[key] = (a + ok, b + 1)
        if not ok and len(wrong) < keep:
            wrong.append({"asked": item["messages"][-1]["content"][-200:], "expected": want_short(item), "got": reply[:200]})
    return {"n": n, "right": good, "accuracy": round(good / n, 4)}, wrong, by


def called(reply):
    """The name and the arguments of the one call that a reply is, or `None`."""
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", reply.strip())
    try:
        value = json.loads(found[1]) if found else {}
        return value["name"], value["arguments"]
    except (ValueError, KeyError, TypeError):
        return None


def held_out_calls(chat, family, n, seed=1, keep=8):
    """Calls whose name and arguments are exact, and answers from the result that hold its value; for `none` answers without a call, as they should be."""
    count = lambda text: len(chat.tok.encode(text, add_special_tokens=False).ids)
    good, told, wrong = 0, 0, []
    for i in range(n):
        tools, messages, want = calls.held_out(random.Random(f"held-out/{seed}/calls/{family}/{i}"), family, count)
        messages = calls.with_tools(messages, tools)
        reply = chat.reply(messages, 300 if family == "none" else 120)
        if family == "none":
            ok = right({"kind": "exact", "answer": want.answer}, reply) if want.exact else called(reply) is None
        else:
            ok = called(reply) == (want.tool.name, want.arguments)
            # The result is read behind the right call, whatever the model wrote.
            written = calls.call(want.tool.name, want.arguments, marks=False)
            after = chat.reply([*messages, {"role": "assistant", "content": written}, {"role": "tool", "content": want.result}], 120)
            told += contains(want.value, after) and called(after) is None
            if want.value not in after and len(wrong) < keep:
                wrong.append({"asked": want.ask[-200:], "result": want.result[:200], "expected": want.value, "got": after[:200]})
        good += ok
        if not ok and len(wrong) < keep:
            expected = want.answer if family == "none" else f"{want.tool.name} {json.dumps(want.arguments, ensure_ascii=False)}"
            wrong.append({"asked": messages[-1]["content"][-200:], "tools": [t.name for t in tools], "expected": expected[:200], "got": reply[:200]})
    out = {"n": n, "right": good, "accuracy": round(good / n, 4)}
    return (out if family == "none" else out | {"answered": told, "answered_accuracy": round(told / n, 4)}), wrong


def held_out_two_calls(chat, n, seed=1, keep=8):
    """Two calls in one turn, both exact and in the order asked for."""
    good, wrong = 0, []
    for i in range(n):
        tools, messages, wanted = calls.held_out_two(random.Random(f"held-out/{seed}/calls/two/{i}"))
        messages = calls.with_tools(messages, tools)
        reply = chat.reply(messages, 200)
        ok = [called(f"{c}</tool_call>") for c in reply.split("</tool_call>")[:-1]] == [(w.tool.name, w.arguments) for w in wanted]
        good += ok
        if not ok and len(wrong) < keep:
            wrong.append({"asked": messages[-1]["content"][-200:], "tools": [t.name for t in tools], "expected": str([w.arguments for w in wanted]), "got": reply[:200]})
    return {"n": n, "right": good, "accuracy": round(good / n, 4)}, wrong


def want_short(item):
    return str(item["answer"])[:200]


@torch.no_grad()
def story_loss(chat, n=40):
    """Mean loss per token and per character on held-out stories."""
    total = tokens = chars = 0
    for i in range(n):
        text = story(random.Random(f"held-out/story/{i}"))[0]
        ids = torch.tensor([chat.tok.encode(BEGIN + text + END, add_special_tokens=False).ids])
        logits = chat.model(ids[:, :-1])[0]
        total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
        chars += len(text)
    return {"loss_per_token": round(total / tokens, 4), "bits_per_character": round(total / chars / 0.693147, 4)}


STORY_PROMPTS = ["Tell me a story about a dragon.", "Tell me a story.", "Write a short story about a girl named Maya.", "Tell me a story about a wombat and a robot.", "a story about a lost key please"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="exported folder")
    p.add_argument("--checkpoint", type=Path)
    p.add_argument("--tokenizer", type=Path, help="folder of tokenizer.json, with --checkpoint")
    p.add_argument("--n", type=int, default=100)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--distances", type=int, nargs="*", default=DISTANCES)
    p.add_argument("--kinds", nargs="*", default=KINDS)
    p.add_argument("--tools", nargs="*", default=[*calls.FAMILIES, "two", "none"], help="families of tools; two: two calls in one turn; none: offered and not needed")
    p.add_argument("--quick", action="store_true", help="no questions by hand, no stories")
    p.add_argument("--out", type=Path)
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    if a.model:
        from export import load_exported

        model, state, folder = load_exported(a.model), {}, a.model
    else:
        (model, state), folder = load_checkpoint(a.checkpoint), a.tokenizer
    chat = Chat(rounded(model), Tokenizer.from_file(str(folder / "tokenizer.json")))
    began = time.time()
    out = {"parameters": sum(p.numel() for p in model.parameters()), "state": {k: v for k, v in state.items() if k != "read"}, "seed": a.seed, "retrieval": {}, "tasks": {}, "wrong": {}}
    sums = {}
    for d in a.distances:
        result, wrong, by = held_out(chat, "retrieval", a.n, d, a.seed)
        out["retrieval"][str(d)], out["wrong"][f"retrieval {d}"] = result, wrong
        for key, (g, b) in by.items():
            x, y = sums.get(key, (0, 0))
            sums[key] = (x + g, y + b)
        print(f"retrieval at {d:5d}: {result['accuracy']:.3f}", flush=True)
    out["retrieval_by"] = {k: {"n": b, "accuracy": round(g / b, 4)} for k, (g, b) in sorted(sums.items())}
    print(out["retrieval_by"])
    for kind in a.kinds:
        result, wrong, _ = held_out(chat, kind, a.n, seed=a.seed)
        out["tasks"][kind], out["wrong"][kind] = result, wrong
        print(f"{kind:15s} {result['accuracy']:.3f}", flush=True)
    for family in a.tools:
        result, out["wrong"][f"tools: {family}"] = held_out_two_calls(chat, a.n, a.seed) if family == "two" else held_out_calls(chat, family, a.n, a.seed)
        out.setdefault("tools", {})[family] = result
        print(f"tools: {family:12s} {result['accuracy']:.3f}", f"answered {result['answered_accuracy']:.3f}" if "answered" in result else "", flush=True)
    out["stories"] = story_loss(chat)
    print(out["stories"])
    if not a.quick:
        rows = []
        for turns, want in BY_HAND:
            messages = []
            for t in turns:
                messages.append({"role": "user", "content": t})
                messages.append({"role": "assistant", "content": chat.reply(messages, 300)})
            got = messages[-1]["content"]
            rows.append({"asked": turns[-1], "expected": want, "got": got, "right": any(w in got for w in want.split("|"))})
            print("ok   " if rows[-1]["right"] else "WRONG", turns, "->", got[:150])
        out["by_hand"] = {"n": len(rows), "right": sum(r["right"] for r in rows), "items": rows}
        out["samples"] = [{"prompt": s, "temperature": t, "text": chat.reply([{"role": "user", "content": s}], 400, temperature=t, seed=i)} for i, s in enumerate(STORY_PROMPTS) for t in (0.0, 0.8)]
        for s in out["samples"]:
            print(f"\n--- {s['prompt']} (temperature {s['temperature']})\n{s['text']}")
    out["seconds"] = round(time.time() - began, 1)
    if a.out:
        a.out.write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
