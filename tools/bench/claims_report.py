#!/usr/bin/env python3
"""Makes docs/claims.md and docs/claims.svg from the raw results in results/claims/ and the prose in claims.in.md.

    python3 tools/bench/claims_report.py                                             writes both
    python3 tools/bench/claims_report.py --check                                     says what is not up to date, and fails; for CI
    python3 tools/bench/claims_report.py --folio target/release/folio [MODEL ...] [-- FLAGS]    measures, keeps the raw results and writes both

A result is what `folio bench claims MODEL --json` prints, with the machine and the version, in results/claims/DATE-MODEL.json; of a model the newest file counts, by its
name. FLAGS are of `folio bench claims`. Measure on a machine that does nothing else. Standard library only, and the same results give the same bytes. A line
`{{name}}` of the prose is replaced by what `name` below makes.
"""

import argparse
import datetime

import glob
import json
import os
import re
import subprocess
import sys

import kv_formats_report
from common import folio_version, machine, now, save
from plots import GRID, INK, OURS, THEIRS, Log, Svg
from report import publish, table

HERE = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.path.join(HERE, "results", "claims")
MARKS = ("circle", "square", "triangle")


def read(folder=RESULTS):
    """The newest result of each model."""
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path) as file:
            data = json.load(file)
        found[data["model"]] = (os.path.basename(path), data)
    return found


def measure(folio, model, flags, folder=RESULTS):
    """The file that has what came of it."""
    before = os.getloadavg()
    text = subprocess.run([folio, "bench", "claims", model, "--json", *flags], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(text)
    # A folder's place is nobody's business.
    name = found["model"] = os.path.basename(found["model"].rstrip("/"))
    told = {"measured": now(), "folio": folio_version(folio), "machine": machine(), "load_average": [before, os.getloadavg()], "flags": flags}
    path = os.path.join(folder, f"{datetime.date.today()}-{name}.json")
    save(path, {**told, **found})
    return path


def label(figure):
    return " ".join([figure["claim"], figure["of"]]).strip()


def said(figure):
    if figure["field"] is None:
        return ""
    low, high = figure["field"]
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def figures(results):
    out = []
    for model, (name, data) in sorted(results.items()):
        rows = []
        for figure in data["figures"]:
            least, most = min(figure["gains"]), max(figure["gains"])
            value = lambda x: f"{x:,.3g} {figure['unit']}"
            is_measured = figure["unit"] != "%"
            gain = f"**{figure['gain']:.2f}**" + (f" ({least:.2f} to {most:.2f})" if is_measured else "")
            # What paging wastes is counted since 2026-11-28, and was computed from lengths before.
            is_counted = is_measured or figure["note"].startswith("counted")
            note = figure["note"] if is_counted else f"arithmetic, from lengths and the size of blocks: {figure['note']}"
            rows.append([f"`{label(figure)}`", value(figure["without"]), value(figure["with"]), gain, said(figure) if is_measured else "", note])
        out.append(f"**{model}** on {data['device']} (`results/claims/{name}`):\n\n"
                   + table(["claim", "without", "with", "times as good", "said", "measured"], rows))
    return "\n\n".join(out) or "Not measured yet."


def formats(results):
    out = []
    measured = kv_formats_report.Results().quality
    for model, (_, data) in sorted(results.items()):
        # The built-in model has two names.
        _, quality = measured.get("built-in model" if model == "folio-demo" else model, ("", {"formats": []}))
        kl = {row["format"]: row["loss"]["kl"] for row in quality["formats"]}
        rows = [[f"`{f['name']}`", f"{f['bytes_per_token']:,}", f"{f['share']:.3f}", f"{kl[f['name']]:.1e}" if f["name"] in kl else ""] for f in data["formats"]]
        # Four bits, and a scale of eight for sixteen of them; FP8 has one scale for a whole tensor there.
        rows.append(["NVFP4, on paper", "", f"{(4 + 8 / 16) / 16:.3f}, {100 - 100 * (4 + 8 / 16) / 8:.0f} % less than FP8", "not served"])
        out.append(f"**{model}**:\n\n" + table(["KV", "bytes a token", "of f16", "KL from f16"], rows))
    return "\n\n".join(out)


def curve(results):
    """How many times as good, beside what is said."""
    models = sorted(results.items())
    names = []
    for _, (_, data) in models:
        names += [label(f) for f in data["figures"] if f["unit"] != "%" and label(f) not in names]
    if not names:
        return None
    height = 90 + 34 * len(names)
    svg = Svg(900, height, "Claims of the field, re-created")
    x = Log(0.5, 32.0, 280, 860)
    bottom = height - 45
    for tick in (0.5, 1, 2, 5, 10, 20):
        svg.line([(x(tick), 50), (x(tick), bottom)], INK if tick == 1 else GRID)
        svg.text(x(tick), bottom + 18, f"{tick:g}", "middle")
    svg.text(570, bottom + 36, "times as good as without", "middle")
    svg.area([(280, 18), (280, 30), (310, 30), (310, 18)], "#f3d9c8")
    svg.text(316, 28, "said", color=THEIRS)
    for at, (model, _) in enumerate(models):
        svg.mark(380 + 220 * at, 24, MARKS[at % len(MARKS)], OURS)
        svg.text(392 + 220 * at, 28, model, color=OURS)
    for row, name in enumerate(names):
        y = 67 + 34 * row
        svg.text(270, y + 4, name, "end")
        found = [(at, f) for at, (_, (_, data)) in enumerate(models) for f in data["figures"] if label(f) == name]
        field = found[0][1]["field"]
        if field is not None:
            low, high = x(field[0] * 0.97), x(field[1] * 1.03)
            svg.area([(low, y - 9), (high, y - 9), (high, y + 9), (low, y + 9)], "#f3d9c8")
        for at, figure in found:
            inside = lambda gain: x(min(max(gain, 0.5), 32.0))
            svg.line([(inside(min(figure["gains"])), y), (inside(max(figure["gains"])), y)], OURS, 1.5)
            svg.mark(inside(figure["gain"]), y, MARKS[at % len(MARKS)], OURS)
    return svg.done()


def page(results):
    with open(os.path.join(HERE, "claims.in.md")) as file:
        prose = file.read()
    makers = {"figures": figures, "formats": formats, "plot": lambda results: "![](claims.svg)" if results else ""}
    text = re.sub(r"^\{\{(\w+)\}\}$", lambda match: makers[match[1]](results), prose, flags=re.M)
    return "<!-- Made by tools/bench/claims_report.py from tools/bench/claims.in.md and tools/bench/results/claims; do not edit. -->\n" + text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--folio", help="measure with this binary first")
    parser.add_argument("--check", action="store_true")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1:]
    for model in args.models if args.folio else []:
        print(measure(args.folio, model, flags))
    results = read()
    publish({"claims.md": page(results), "claims.svg": curve(results)})


if __name__ == "__main__":
    main()
