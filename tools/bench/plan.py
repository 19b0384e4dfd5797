#!/usr/bin/env python3
"""Holds `folio plan` against the engine: measures a model's steps one kind at a time, plans loads, and runs them.

    python3 tools/bench/plan.py --folio target/release/folio [MODEL ...]      measures and keeps the raw results; on a machine that does nothing else
    python3 tools/bench/plan.py --docs                                        writes what is kept into docs/plan.md
    python3 tools/bench/plan.py --docs --check                                says whether it is up to date, and fails if not

For each model: `folio bench plan MODEL` (twelve runs of --seconds and four measurements of steps, --repeat times: about 20 minutes with 16 seconds and 5 turns). Nothing that is
compared was part of what was measured first. Other flags are those of `folio bench plan`: a model that serves less than ten requests a second wants
--max-num-seqs 8, for the knee is measured with four times as many requests. Results go to results/plan/DATE-MODEL.json: what `folio bench plan --json` prints, with
the machine and the version. Standard library only.
"""

import argparse
import datetime
import glob
import json
import os
import subprocess
import statistics
import sys

from common import folio_version, machine, now, save
from report import table

HERE = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.path.join(HERE, "results", "plan")
PAGE = os.path.join(HERE, "..", "..", "docs", "plan.md")
BEGIN, END = "<!-- begin: made by tools/bench/plan.py --docs -->", "<!-- end -->"


def measure(folio, model, flags, more):
    before = os.getloadavg()
    text = subprocess.run([folio, "bench", "plan", model, "--json", *flags, *more], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(text)
    # A folder's place is nobody's business.
    found["model"] = os.path.basename(found["model"].rstrip("/"))
    return {"measured": now(), "folio": folio_version(folio), "machine": machine(), "load_average": [before, os.getloadavg()], "flags": flags, **found}


def read(folder=RESULTS):
    """The newest result of each model in each form."""
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path) as file:
            data = json.load(file)
        found[data["model"], *data["flags"]] = (os.path.basename(path), data)
    return found


def rendered(results):
    out = []
    for key, (name, data) in sorted(results.items()):
        rows, steps = [], []
        for cell in data["cells"]:
            if cell["what"].startswith("a step"):
                steps.append(abs(cell["error"]))
                continue
            load = "all at once" if cell["load"] is None else f"{100 * cell['load']:.0f} % of the knee"
            spread = lambda turns: f"{min(turns):.4g} to {max(turns):.4g}"
            rows.append([cell["traffic"], load, cell["what"], f"{cell['planned']:.4g}", spread(cell["planned_turns"]), f"{cell['measured']:.4g}",
                         spread(cell["turns"]), f"{100 * cell['error']:+.1f} %"])
        bounds = "; ".join(f"{one['what']} {100 * one['error']:.1f} % ({'within' if one['within'] else '**beyond**'} {100 * one['most']:.0f} %)"
                           for one in data["bounds"])
        others = "" if data["others"] is None else f" Other processes had {100 * data['others']:.1f} % of the processors meanwhile."
        out.append(f"**{' '.join(key)}** on {data['machine']['cpu']}, {data['device']}, {data['turns']} turns of {data['seconds']} s (`tools/bench/results/plan/{name}`): {bounds}. "
                   f"Of the steps that were run, the curve is off by {100 * statistics.median(steps):.1f} % in the median and {100 * max(steps):.1f} % at worst "
                   f"(means of {len(steps)} kinds in all cells).{others}\n\n"
                   + table(["traffic", "load", "", "planned", "in turns", "measured", "in turns", "error"], rows))
    return "\n\n".join(out) or "Not measured yet."


def docs(check):
    with open(PAGE) as file:
        old = file.read()
    head, rest = old.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    new = f"{head}{BEGIN}\n{rendered(read())}\n{END}{tail}"
    if check:
        sys.exit("docs/plan.md is not up to date: run tools/bench/plan.py --docs" if new != old else 0)
    with open(PAGE, "w") as file:
        file.write(new)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--folio", default=os.path.join(HERE, "..", "..", "target", "release", "folio"))
    parser.add_argument("--threads")
    parser.add_argument("--quantize")
    parser.add_argument("--seconds", default="20")
    parser.add_argument("--repeat", default="5")
    parser.add_argument("--out", default=RESULTS)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--check", action="store_true")
    args, more = parser.parse_known_args()
    if args.docs:
        return docs(args.check)
    flags = [part for name in ("threads", "quantize") if getattr(args, name) for part in (f"--{name}", getattr(args, name))]
    for model in args.models:
        data = measure(args.folio, model, flags, ["--seconds", args.seconds, "--repeat", args.repeat, *more])
        form = "".join("-" + flag.strip("-") for flag in flags if not flag.startswith("--"))
        name = f"{datetime.date.today()}-{os.path.basename(data['model'].rstrip('/'))}{form}.json"
        save(os.path.join(args.out, name), data)
        for bound in data["bounds"]:
            print(f"{data['model']}: {bound['what']} {100 * bound['error']:.1f} %, {'within' if bound['within'] else 'beyond'} {100 * bound['most']:.0f} %")
        print(os.path.join(args.out, name))


if __name__ == "__main__":
    main()
