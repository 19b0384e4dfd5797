#!/usr/bin/env python3
"""What drafts from text gain on real texts, at the measured cost of a model's steps.

    drafting_texts.py --folio target/release/folio [--model tools/bench/shapes/llama-1b] [--load-format dummy:Q4_0] [--rounds 3]

What steps of so many rows take is measured with `folio bench engine` (so many sequences that decode), and the texts are this repository's own: a file that is
given back with the changes of a real commit; the same changes as an agent makes them, in calls that quote what they replace, behind the file that
it read; and an answer about a document that quotes it. `cargo run --example drafting_texts` says what drafting makes of each. Standard library only.
"""

import argparse
import difflib
import json
import os
import re
import statistics
import subprocess
import tempfile

from common import folio_version, machine, now

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# A file of about 4,000 words, as a commit found and left it.
COMMIT, FILE = "99974b52", "crates/folio-engine/src/scheduler/drafts.rs"
DOCUMENT = "docs/speculation.md"
ROWS = [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17]


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], check=True, capture_output=True, text=True).stdout


def texts():
    """Name to prompt, answer, prediction."""
    before, after = (git("show", f"{revision}:{FILE}") for revision in (f"{COMMIT}^", COMMIT))
    asked = f"Here is {FILE}:\n```\n{before}```\nSplit what decides on drafts into three functions.\n"
    old, new = before.splitlines(True), after.splitlines(True)
    calls = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(2):
        (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
        calls.append(json.dumps({"name": "edit", "arguments": {"path": FILE, "old_string": "".join(old[a:b]), "new_string": "".join(new[c:d])}}))
    # A tool's result has its text as it is, a call has it in JSON.
    read = json.dumps({"name": "read", "result": before})
    document = git("show", f"{COMMIT}:{DOCUMENT}")
    sentences = [sentence for sentence in re.split(r"(?<=[.:]) +|\n+", document) if len(sentence) > 80][:60:3]
    remarks = [line[2:] for line in git("show", f"{COMMIT}:CHANGELOG.md").splitlines() if line.startswith("- ")]
    quotes = "\n".join(f'"{sentence}" {remark}' for sentence, remark in zip(sentences, reversed(remarks)))
    return {
        "a file with changes": (asked, after, before),
        "an agent's edits": (f"{asked}{read}\n", "\n".join(calls), ""),
        "quotes with remarks": (f"{document}\nWhat does it say about costs? Quote it.\n", quotes, ""),
        "quotes": (f"{document}\nWhat does it say about costs? Quote it.\n", "\n".join(sentences), ""),
    }


def curve(folio, model, load, depth):
    """Microseconds of a step by its rows: so many sequences that decode behind `depth` tokens each."""
    command = [folio, "bench", "engine", model, "--load-format", load, "--prefill", "128", "--batch", ",".join(map(str, ROWS)), "--depth", str(depth),
               "--decode", "24", "--repeat", "3", "--max-model-len", str(2 * depth + 256), "--json"]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {row["batch"]: round(1e6 * row["batch"] / row["tokens_per_s"]) for row in measured["decode"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folio", required=True)
    parser.add_argument("--model", default=os.path.join(HERE, "shapes", "llama-1b"))
    parser.add_argument("--load-format", default="dummy:Q4_0")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    rounds = [curve(args.folio, args.model, args.load_format, args.depth) for _ in range(args.rounds)]
    steps = {rows: round(statistics.median(one[rows] for one in rounds)) for rows in rounds[0]}
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for name, parts in texts().items():
            names.append(os.path.join(folder, name))
            os.mkdir(names[-1])
            for part, text in zip(("prompt", "answer", "prediction"), parts):
                with open(os.path.join(names[-1], part), "w", encoding="utf-8") as file:
                    file.write(text)
        us = ",".join(f"{rows}:{took}" for rows, took in sorted(steps.items()))
        command = ["cargo", "run", "--quiet", "--release", "--locked", "-p", "folio-engine", "--example", "drafting_texts", "--", "--us", us, *names]
        table = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    print("microseconds of a step by its rows:", us)
    print(table)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            shape = os.path.basename(args.model)
            json.dump({"date": now(), "folio": folio_version(args.folio), "machine": machine(), "model": shape, "load_format": args.load_format, "depth": args.depth,
                       "us_by_rows_of_rounds": rounds, "us_by_rows": steps, "table": table.splitlines()}, file, indent=1)


if __name__ == "__main__":
    main()
