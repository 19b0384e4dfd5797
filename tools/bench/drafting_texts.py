#!/usr/bin/env python3
"""What drafts from text gain on real texts, in the steps of a model's shape.

    drafting_texts.py --folio target/release/folio [--model tools/bench/shapes/llama-1b] [--load-format dummy:Q4_0] [--repeat 3] [--out FILE]

The texts are this repository's own: a file that is given back with the changes of a real commit; the same changes as an agent makes them, in calls
that quote what they replace, behind the file that it read; and an answer about a document that quotes it. `folio bench engine --texts` says them with
drafts and without, in turn. Standard library only.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import tempfile

from common import folio_version, machine, now

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# A file of about 4,000 words, as a commit found and left it.
COMMIT, FILE = "c24f1f00", "crates/folio-engine/src/scheduler/fair.rs"
DOCUMENT = "docs/kv-cache.md"


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], check=True, capture_output=True, text=True).stdout


def texts():
    """Name to prompt, answer, prediction."""
    before, after = (git("show", f"{revision}:{FILE}") for revision in (f"{COMMIT}^", COMMIT))
    what = "Make what was said about it.\n"
    asked = f"Here is {FILE}:\n```\n{before}```\n{what}"
    old, new = before.splitlines(True), after.splitlines(True)
    calls = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(2):
        (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
        calls.append(json.dumps({"name": "edit", "arguments": {"path": FILE, "old_string": "".join(old[a:b]), "new_string": "".join(new[c:d])}}))
    # A tool's result has its text as it is, a call has it in JSON.
    read = json.dumps({"name": "read", "result": before})
    document = git("show", f"{COMMIT}:{DOCUMENT}")[:11000]
    sentences = [sentence for sentence in re.split(r"(?<=[.:]) +|\n+", document) if len(sentence) > 80][:60:3]
    remarks = [line[2:] for line in git("show", f"{COMMIT}:CHANGELOG.md").splitlines() if line.startswith("- ")]
    quotes = "\n".join(f'"{sentence}" {remark}' for sentence, remark in zip(sentences, reversed(remarks)))
    return {
        "a file with changes": (asked, after, before),
        "an agent's edits": (f"{what}{read}\n", "\n".join(calls), ""),
        "quotes": (f"{document}\nWhat does it say about costs? Quote it.\n", "\n".join(sentences), ""),
        "quotes with remarks": (f"{document}\nWhat does it say about costs? Quote it.\n", quotes, ""),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folio", required=True)
    parser.add_argument("--model", default=os.path.join(HERE, "shapes", "llama-1b"))
    parser.add_argument("--load-format", default="dummy:Q4_0")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for name, parts in texts().items():
            names.append(os.path.join(folder, name))
            os.mkdir(names[-1])
            for part, text in zip(("prompt", "answer", "prediction"), parts):
                if text:
                    with open(os.path.join(names[-1], part), "w", encoding="utf-8") as file:
                        file.write(text)
        command = [args.folio, "bench", "engine", args.model, "--load-format", args.load_format, "--speculate", "suffix", "--kv-cache-memory", "2GiB",
                   "--max-model-len", "32768", "--repeat", str(args.repeat), "--json", "--texts", *names]
        measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for text in measured["texts"]:
        least, most = text["interval"]
        print(f"{text['text'] + (', predicted' if text['predicted'] else ''):<32} {text['prompt_tokens']:>6} {text['answer_tokens']:>6}  "
              f"{text['right']:>5} of {text['drafts']:<5} {text['tokens_per_step']:5.1f}  {text['ratio']:.2f} ({least:.2f}..{most:.2f})")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"date": now(), "folio": folio_version(args.folio), "machine": machine(), "model": os.path.basename(args.model),
                       "load_format": args.load_format, "commit": COMMIT, "texts": measured["texts"]}, file, indent=1)


if __name__ == "__main__":
    main()
