"""Fills the results of README.md, between the two marks, from eval.json and loss.csv.

    python report.py
"""

import csv
import json
from pathlib import Path

HERE = Path(__file__).parent
START, STOP = "<!-- results -->", "<!-- end of results -->"


def main():
    e = json.loads((HERE / "eval.json").read_text())
    rows = list(csv.DictReader(open(HERE / "loss.csv")))
    out = [START, "", f"{e['parameters']:,} parameters, {int(rows[-1]['tokens']) / 1e6:.1f} M tokens, {float(rows[-1]['seconds']) / 60:.0f} minutes on two cores shared with other work, seed of the questions {e['seed']}.", ""]
    out += ["| fact told this many tokens back | right |", "|---:|---:|"]
    out += [f"| {d} | {r['accuracy']:.1%} of {r['n']} |" for d, r in e["retrieval"].items()]
    out += ["", "| over all distances | right |", "|---|---:|"] + [f"| {k} | {r['accuracy']:.1%} of {r['n']} |" for k, r in e["retrieval_by"].items()]
    out += ["", "| other task | right |", "|---|---:|"] + [f"| {k.replace('_', ' ')} | {r['accuracy']:.1%} of {r['n']} |" for k, r in e["tasks"].items()]
    out += ["", "| tool, with up to three others offered, `tool_choice` `auto` | name and arguments exact | answer from the result right |", "|---|---:|---:|"]
    out += [f"| {k.replace('_', ' ')} | {r['accuracy']:.1%} of {r['n']} | {r['answered_accuracy']:.1%} |" for k, r in e["tools"].items() if k not in ("two", "none")]
    two, none = e["tools"]["two"], e["tools"]["none"]
    out += ["", f"Asked for the time or the weather of two places: both calls exact in one turn {two['accuracy']:.1%} of {two['n']}."]
    out += ["", f"Tools offered and none of them needed: right, or at least no call where several answers are right, {none['accuracy']:.1%} of {none['n']}."]
    by = e["by_hand"]
    out += ["", f"Questions written by hand, in words and names the generator does not have: {by['right']} of {by['n']}. The wrong ones:", ""]
    out += [f"- {i['asked']!r}: {i['got'][:120]!r}" for i in by["items"] if not i["right"]]
    out += ["", f"Held-out stories: {e['stories']['bits_per_character']} bits per character.", "", "Stories:", ""]
    for s in e["samples"]:
        text = s["text"].replace("\n\n", " / ")
        out += [f"> **{s['prompt']}** (temperature {s['temperature']}) {text}", ""]
    out.append(STOP)
    readme = HERE / "README.md"
    text = readme.read_text()
    before, rest = text.split(START)
    readme.write_text(before + "\n".join(out) + rest.split(STOP)[1])


if __name__ == "__main__":
    main()
