#!/usr/bin/env python3
"""Makes docs/kv-formats.md and docs/kv-formats.svg from the raw results in results/kv-formats/ and the prose in kv-formats.in.md.

    python3 tools/bench/kv_formats_report.py           writes both
    python3 tools/bench/kv_formats_report.py --check   says what is not up to date, and fails; for CI

A result is what `folio bench kv --json` prints; the newest file of a model, or with speeds, counts, by its name, which begins with the date.
Standard library only, and the same results give the same bytes. A line `{{name}}` of the prose is replaced by what `name` below makes.
"""

import glob
import json
import math
import os
import re

from plots import GRID, INK, Svg
from report import publish, table

HERE = os.path.dirname(os.path.abspath(__file__))
COLORS = {"f32": "#777777", "f16": "#222222", "bf16": "#8a6d00", "int8": "#1558b0", "fp8": "#1f7a3a", "int4": "#c2570c"}
MARKS = {"f32": "square", "f16": "circle", "bf16": "triangle", "int8": "circle", "fp8": "square", "int4": "triangle"}


class Results:
    def __init__(self, folder=os.path.join(HERE, "results", "kv-formats")):
        self.quality, self.speed = {}, None
        for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
            with open(path) as file:
                data = json.load(file)
            name = os.path.basename(path)
            if data.get("quality"):
                self.quality[data["quality"]["model"]] = (name, data["quality"])
            if data.get("speed"):
                self.speed = (name, data["speed"])


# Distances that questions are asked for; the facts of one come to lie a little nearer or farther.
DISTANCES = [50, 100, 250, 500, 1000, 1500]


def binned(retrieval):
    """Right answers of a format by the distance asked for, nearest by ratio: those that were met."""
    bins = {}
    for distance, count in retrieval["by_distance"].items():
        nearest = min(DISTANCES, key=lambda d: abs(math.log(int(distance) / d)))
        into = bins.setdefault(nearest, {"asked": 0, "right": 0})
        for key in into:
            into[key] += count[key]
    return dict(sorted(bins.items()))


def noise(quality):
    """What rounding to 16 bits in another way, or not at all, does to the loss."""
    losses = [row["loss"] for row in quality["formats"] if row["format"] in ("f32", "bf16") and "loss" in row]
    return max((abs(loss["difference"]) for loss in losses), default=None)


def verdict(row, quality):
    """Against the noise of rounding, and against what the text can tell apart: two standard errors."""
    loss, level = row["loss"], noise(quality)
    if row["format"] in ("f16", "f32", "bf16"):
        return ""
    if level is not None and abs(loss["difference"]) <= level:
        return "within the noise of 16 bits"
    if abs(loss["difference"]) <= 2 * loss["difference_error"]:
        return "not told from f16 by this text"
    return f"**{100 * loss['difference'] / quality['formats'][0]['loss']['nll']:+.2f} %**"


def losses(results):
    out = []
    for model, (name, quality) in sorted(results.quality.items()):
        rows = []
        for row in quality["formats"]:
            if "loss" not in row:
                continue
            loss = row["loss"]
            rows.append([row["format"], str(row["bytes_per_token"]), f"{loss['nll']:.4f} ± {loss['nll_error']:.4f}",
                         f"{loss['difference']:+.5f} ± {loss['difference_error']:.5f}", f"{loss['kl']:.2e}", f"{loss['same_top']:.2%}", verdict(row, quality)])
        if rows:
            out.append(f"**{model}**, {quality['weights']}, head_dim {quality['head_dim']}; {quality['positions']:,} predictions in windows of {quality['context']} tokens (`{name}`).\n\n"
                       + table(["KV", "bytes per token", "nats per token", "less f16, position by position", "KL from f16", "same first choice", "the loss"], rows))
    return "\n\n".join(out) or "Not measured yet."


def retrieval(results):
    out = []
    for model, (name, quality) in sorted(results.quality.items()):
        asked = [row for row in quality["formats"] if "retrieval" in row]
        if not asked:
            continue
        distances = list(binned(asked[0]["retrieval"]))
        rows = []
        for row in asked:
            cells = binned(row["retrieval"]).values()
            whole = row["retrieval"]["all"]
            rows.append([row["format"], *(f"{c['right'] / c['asked']:.0%}" for c in cells), f"**{whole['right'] / whole['asked']:.1%}**", f"{whole['same'] / whole['asked']:.1%}"])
        whole = asked[0]["retrieval"]["all"]["asked"]
        out.append(f"**{model}**: {whole} questions, by the tokens between a fact and the question (`{name}`).\n\n"
                   + table(["KV", *map(str, distances), "all", "answers as f16's, letter for letter"], rows))
    return "\n\n".join(out) or "Not measured yet."


def speed(results):
    if results.speed is None:
        return "Not measured yet."
    name, shapes = results.speed
    out = []
    for entry in shapes:
        shape = entry["shape"]
        rows = [[row["format"], f"{row['us']:.1f}", f"{row['us_min']:.1f}", f"**{row['against_f16']:.2f}**", f"{row['bytes_per_s'] / 1e9:.1f}"] for row in entry["formats"]]
        out.append(f"{shape['heads']} query heads over {shape['kv_heads']} KV heads of {shape['head_dim']}, depth {entry['depth']:,}, {entry['threads']} threads on {entry['backend']}:\n\n"
                   + table(["KV", "us a layer", "least", "times f16", "GB/s"], rows))
    return "\n\n".join(out) + f"\n\nFrom `{name}`."


def curve(results):
    """Right answers by distance, one line for each format, and beside it what each format costs in loss."""
    found = [(model, quality) for model, (_, quality) in sorted(results.quality.items()) if any("retrieval" in row for row in quality["formats"])]
    if not found:
        return None
    model, quality = found[0]
    rows = [row for row in quality["formats"] if "retrieval" in row]
    distances = list(binned(rows[0]["retrieval"]))
    svg = Svg(900, 430, "Formats of the KV cache")
    svg.text(70, 26, f"{model}: right answers by distance of the fact", bold=True, size=15)
    left, right, bottom, top = 70, 520, 370, 60
    shares = {row["format"]: [c["right"] / c["asked"] for c in binned(row["retrieval"]).values()] for row in rows}
    low = min(0.9, min(min(values) for values in shares.values()))
    low = max(0.0, int(low * 20 - 1) / 20)
    x = lambda i: left + 25 + i * (right - left - 50) / max(1, len(distances) - 1)
    y = lambda share: bottom - (share - low) / (1.0 - low) * (bottom - top)
    steps = 5
    for i in range(steps + 1):
        tick = low + (1.0 - low) * i / steps
        svg.line([(left, y(tick)), (right, y(tick))], GRID)
        svg.text(left - 7, y(tick) + 4, f"{tick:.0%}", "end")
    for i, distance in enumerate(distances):
        svg.text(x(i), bottom + 18, str(distance), "middle")
    svg.line([(left, top), (left, bottom), (right, bottom)], INK, 1.2)
    svg.text((left + right) / 2, bottom + 40, "tokens between fact and question", "middle")
    # Equal figures would lie on each other: formats are a few pixels apart.
    for index, (name, values) in enumerate(shares.items()):
        shift = (index - len(shares) / 2) * 4
        svg.line([(x(i) + shift, y(v)) for i, v in enumerate(values)], COLORS[name], 1.6)
        for i, v in enumerate(values):
            svg.mark(x(i) + shift, y(v), MARKS[name], COLORS[name], name in ("f16", "int8", "fp8", "int4"))
    at = left + 10
    for name in shares:
        svg.mark(at, top - 16, MARKS[name], COLORS[name], name in ("f16", "int8", "fp8", "int4"))
        svg.text(at + 10, top - 12, name, color=COLORS[name], bold=True)
        at += 70
    bars(svg, model, rows, 590, 870, bottom, top)
    return svg.done()


def bars(svg, model, rows, left, right, bottom, top):
    """KL from f16, on a logarithmic scale."""
    values = [(row["format"], row["loss"]["kl"]) for row in rows if "loss" in row and row["loss"]["kl"] > 0 and row["format"] != "f16"]
    if not values:
        return
    svg.text(left - 25, 26, "KL of its predictions from f16's", bold=True, size=15)
    low = math.floor(math.log10(min(v for _, v in values)))
    high = math.ceil(math.log10(max(v for _, v in values)))
    high = max(high, low + 1)
    y = lambda v: bottom - (math.log10(v) - low) / (high - low) * (bottom - top)
    for exponent in range(low, high + 1):
        svg.line([(left, y(10.0 ** exponent)), (right, y(10.0 ** exponent))], GRID)
        svg.text(left - 7, y(10.0 ** exponent) + 4, f"1e{exponent}", "end")
    width = (right - left) / len(values)
    for i, (name, value) in enumerate(values):
        a, b = left + i * width + 8, left + (i + 1) * width - 8
        svg.area([(a, bottom), (a, y(value)), (b, y(value)), (b, bottom)], COLORS[name])
        svg.text((a + b) / 2, y(value) - 6, f"{value:.0e}".replace("e-0", "e-"), "middle", size=12)
        svg.text((a + b) / 2, bottom + 18, name, "middle", COLORS[name], bold=True)
    svg.line([(left, top), (left, bottom), (right, bottom)], INK, 1.2)
    svg.text((left + right) / 2, bottom + 40, "nats per token (less is better)", "middle")


def page(results):
    with open(os.path.join(HERE, "kv-formats.in.md")) as file:
        prose = file.read()
    makers = {"losses": losses, "retrieval": retrieval, "speed": speed}
    text = re.sub(r"^\{\{(\w+)\}\}$", lambda match: makers[match[1]](results), prose, flags=re.M)
    return "<!-- Made by tools/bench/kv_formats_report.py from tools/bench/kv-formats.in.md and tools/bench/results/kv-formats; do not edit. -->\n" + text


def main():
    results = Results()
    publish({"kv-formats.md": page(results), "kv-formats.svg": curve(results)})


if __name__ == "__main__":
    main()
