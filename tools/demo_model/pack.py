"""Writes the training rows that `train.py` reads: token ids (u16) and loss weights (u8, times 100), one conversation a row.

    python pack.py --work DIR --tokenizer DIR/tok/tokenizer.json --name facts --length 512 --rows 8000

A row never holds two conversations: what one of them told would be a wrong answer in the other. Row i of a name is made
from the seed "train/NAME/LENGTH/i" alone, so a file can be extended, or made again, at any time.
"""

import argparse
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import calls
from facts import CLOSE, OPEN
from generate import BEGIN, END, conversation, story_prompt, Conversation
from stories import story

VALUE_WEIGHT = 2.0  # the tokens that carry an answer
OTHER_WEIGHT = 0.1  # text of the user and the system


def render(messages):
    """The chat template's text, with a weight per character."""
    text, weights = [BEGIN], [0.0] * len(BEGIN)
    for role, content, weight in messages:
        head = f"<|{role}|>"
        text.append(head)
        weights += [0.0] * len(head)
        inside = False
        for ch in content:
            if ch in (OPEN, CLOSE):
                inside = ch == OPEN
                continue
            text.append(ch)
            weights.append(OTHER_WEIGHT if role != "assistant" else VALUE_WEIGHT if inside else weight)
        text.append(END)
        weights += [1.0 if role == "assistant" else OTHER_WEIGHT] * len(END)
    return "".join(text), np.array(weights, np.float32)


def plain_story(rng, length):
    """Stories without a chat around them, for the completions endpoint; some without the begin token."""
    parts = [] if rng.random() < 0.2 else [BEGIN]
    while sum(map(len, parts)) < length * 4:
        parts += [story(rng)[0], END, BEGIN]
    text = "".join(parts)
    return text, np.full(len(text), 0.6, np.float32)


def story_chat(rng, length):
    c = Conversation(rng, length)
    c.system()
    while c.room(20):
        c.tell_story(by_user=rng.random() < 0.1)
        while c.room(30) and rng.random() < 0.4:
            q, ans = c.story_question()
            c.add("user", q)
            c.add("assistant", ans)
    return render(c.messages)


def row_text(rng, name, length):
    if name == "story":
        return plain_story(rng, length) if rng.random() < 0.4 else story_chat(rng, length)
    if name == "calls":
        return render(calls.conversation(rng, int(length * 1.06) + 10).messages)
    mode = {"facts": rng.choice(["facts", "facts", "facts", "document"]), "quiz": "quiz", "mix": None, "tasks": "tasks", "sums": "sums"}[name]
    return render(conversation(rng, int(length * 1.06) + 10, mode).messages)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--name", choices=["facts", "quiz", "mix", "tasks", "sums", "story", "calls"], required=True)
    p.add_argument("--length", type=int, required=True)
    p.add_argument("--rows", type=int, required=True)
    a = p.parse_args()
    tok = Tokenizer.from_file(a.tokenizer)
    end = tok.token_to_id(END)
    folder = a.work / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    width = a.length + 1
    base = folder / f"{a.name}-{a.length}"
    have = base.with_suffix(".w").stat().st_size // width if base.with_suffix(".w").exists() else 0
    with open(base.with_suffix(".ids"), "ab") as ids_file, open(base.with_suffix(".w"), "ab") as w_file:
        for start in range(have, a.rows, 64):
            made = [row_text(random.Random(f"train/{a.name}/{a.length}/{i}"), a.name, a.length) for i in range(start, min(start + 64, a.rows))]
            for (_, weights), e in zip(made, tok.encode_batch([t for t, _ in made], add_special_tokens=False)):
                at = np.fromiter((o[1] - 1 for o in e.offsets[:width]), np.int64)  # a leading space belongs to its word
                ids = np.full(width, end, np.uint16)
                w = np.zeros(width, np.uint8)
                ids[: len(at)] = e.ids[:width]
                w[: len(at)] = np.round(weights[at] * 100)
                ids_file.write(ids.tobytes())
                ids_file.flush()
                w_file.write(w.tobytes())
                w_file.flush()


if __name__ == "__main__":
    main()
