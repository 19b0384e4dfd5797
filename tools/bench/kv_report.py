#!/usr/bin/env python3
"""Fills the measured parts of docs/kv-cache.md from the raw results in results/.

    python3 tools/bench/kv_report.py           writes them
    python3 tools/bench/kv_report.py --check   says whether the page is up to date, and fails if not; for CI

A measured part stands between `<!-- measured: NAME -->` and `<!-- end -->`; NAME is a function below. The results are what these print:

    folio bench cache --trace conversation_trace.jsonl.gz --blocks 1k,2k,5k,10k,20k,50k,100k --kv-formats f16,int8,int4 --json --plot docs/cache-hits.svg
    cargo run --release -p folio-kv --example block_cost
    cargo run --release -p folio-sim --example retention_study -- conversation_trace.jsonl.gz 2 > tools/bench/results/DATE-retention-study.csv
    cargo run --release -p folio-sim --example state_study -- conversation_trace.jsonl.gz 2 > tools/bench/results/DATE-state-study.csv
    cargo run --release -p folio-sim --example admission_study -- FOLDER 2 (and the other rules by the patch beside the results)
    python3 tools/bench/isolation.py --folio target/release/folio --out tools/bench/results/DATE-isolation.json

Standard library only.
"""

import csv
import glob
import json
import os
import re
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.normpath(os.path.join(HERE, "..", "..", "docs", "kv-cache.md"))


def newest(pattern, folder=None):
    """Names begin with a date, so the last is the newest."""
    files = sorted(glob.glob(os.path.join(folder or os.path.join(HERE, "results"), pattern)))
    if not files:
        return None, None
    with open(files[-1]) as file:
        text = file.read()
    return os.path.basename(files[-1]), text


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---:|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def policies():
    """Every policy at every capacity."""
    name, text = newest("*-cache-conversation.json")
    if text is None:
        return "Not measured yet."
    data = json.loads(text)
    order = list(data["capacities"][0]["hit_blocks"])
    rows = []
    for row in data["capacities"]:
        found = [f"{100 * row['hit_blocks'][policy] / data['blocks']:.2f} %" for policy in order]
        gap = "" if row["gap_closed"] is None or abs(row["gap_closed"]) < 0.05 else f"{100 * row['gap_closed']:.1f} %"
        rows.append([f"{row['blocks']:,}", *found, gap])
    return table(["blocks", *order, "of the gap LRU to MIN"], rows) + f"\n\nFrom `{name}`."


def formats():
    """Folio's hits in the same memory, by format."""
    name, text = newest("*-cache-conversation.json")
    if text is None:
        return "Not measured yet."
    data = json.loads(text)
    order = list(data["capacities"][0]["formats"])
    rows = []
    for row in data["capacities"]:
        cells = []
        for format_ in order:
            stored = row["formats"][format_]
            cells.append(f"{stored['blocks']:,}: {100 * stored['hit_blocks'] / data['blocks']:.2f} %")
        rows.append([f"{row['blocks']:,}", *cells])
    return table(["memory of f16 blocks", *order], rows) + f"\n\nHeads of {data['head_dim']}, blocks that fit: share found. From `{name}`."


def block_cost():
    name, text = newest("*-block-cost.txt")
    return "Not measured yet." if text is None else f"```text\n{text.strip()}\n```\n\nFrom `{name}`."


def isolation():
    name, text = newest("*-isolation.json")
    if text is None:
        return "Not measured yet."
    data = json.loads(text)
    rows = []
    for key in ("repeat_against_cold", "hit_against_cold"):
        found = data[key]
        what = {"repeat": "repeat across tenants", "hit": "repeat of one tenant (control)"}[found["what"]]
        rows.append([what, f"{found['mean_difference']:+.2%}", f"{found['p_value']:.4f}", str(found["pairs"]), f"{found['detectable_difference']:.2%}"])
    return table(["against a cold request", "TTFT differs by", "p", "pairs", "found with 90 % power"], rows) + f"\n\nFrom `{name}`."


RULES = [
    "forecast", "forecast z=1", "sum of mean remaining", "vLLM watermark 10",
    "watermark 0", "watermark 10", "watermark 20", "watermark 50", "watermark 100", "headroom 16", "headroom 32", "headroom 64",
    "learned headroom 5", "learned headroom 20", "learned headroom 100", "learned share 5", "learned share 20", "learned share 100",
]
TAKEN = "headroom 64"


def admission_cells(pattern="*-admission.csv"):
    """Results by cell (mix, holds, arrivals, device, swap: none since there is no such space) and rule, one per seed; and the file's name."""
    name, text = newest(pattern)
    cells = {}
    for row in csv.DictReader((text or "").splitlines()):
        cell = cells.setdefault(tuple(row.get(key, "0") for key in ("mix", "holds", "arrivals", "device", "swap")), {})
        cell.setdefault(row["rule"], {})[row["seed"]] = row
    return name, cells


def against(base, cell, rule, what):
    """The median over seeds of the ratio to the rule `base` in the same world."""
    pairs = [(row, cell[base][seed]) for seed, row in cell[rule].items() if seed in cell.get(base, {})]
    ratios = [float(row[what]) / float(other[what]) for row, other in pairs if float(other[what]) > 0]
    return statistics.median(ratios) if ratios else None


def median_of(cell, rule, what):
    return statistics.median(float(row[what]) for row in cell[rule].values())


def admission():
    """Every rule over all cells: geometric mean of ratios to the forecast, the worst cell in brackets."""
    name, cells = admission_cells()
    rows = []
    for rule in RULES:
        with_rule = [cell for cell in cells.values() if rule in cell]
        row = [rule, str(len(with_rule))]
        for what in ("tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "e2e_p99"):
            ratios = [ratio for ratio in (against("forecast", cell, rule, what) for cell in with_rule) if ratio]
            worst = min(ratios) if what == "tokens_per_s" else max(ratios)
            row.append(f"{statistics.geometric_mean(ratios):.2f} ({worst:.2f})")
        for what in ("preempted", "recomputed", "fill"):
            row.append(f"{100 * statistics.mean(median_of(cell, rule, what) for cell in with_rule):.1f} %")
        rows.append(row)
    header = ["rule", "cells", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99", "preempted", "computed again", "fill"]
    return table(header, rows) + f"\n\nFrom `{name}`."


def admission_cells_taken():
    """The forecast and the rule that was taken, cell by cell."""
    _, cells = admission_cells()
    rows = []
    for (mix, holds, arrivals, device, swap), cell in sorted(cells.items()):
        row = [f"{mix}, {arrivals}, {holds}, {device}" + (", swap" if swap == "1" else "")]
        for what in ("tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "e2e_p99", "makespan"):
            row.append(" / ".join(f"{median_of(cell, rule, what):.3g}" for rule in ("forecast", TAKEN)))
        for what in ("preempted", "recomputed", "fill"):
            row.append(" / ".join(f"{100 * median_of(cell, rule, what):.1f}" for rule in ("forecast", TAKEN)))
        rows.append(row)
    header = ["traffic, arrivals, pool, device", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99", "makespan", "preempted %", "again %", "fill %"]
    return table(header, rows)


SHARE_RULES = [TAKEN, "headroom 64, preempted first", "share, fading", "share, returning", "share, returning, faster", "share, half at first", "share, learned from ends"]


def admission_share():
    """Rules around the one that was taken: ratios to it, and of the slowest streams in bursts to the forecast."""
    name, cells = admission_cells("*-admission-share.csv")
    rows = []
    for rule in SHARE_RULES:
        with_rule = [cell for cell in cells.values() if rule in cell]
        row = [rule, str(len(with_rule))]
        for base, what in [(TAKEN, what) for what in ("tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p99", "e2e_p50", "e2e_p99")] + [("forecast", "tpot_p99")]:
            ratios = [ratio for ratio in (against(base, cell, rule, what) for cell in with_rule) if ratio]
            worst = min(ratios) if what == "tokens_per_s" else max(ratios)
            row.append(f"{statistics.geometric_mean(ratios):.2f} ({worst:.2f})")
        row.append(f"{100 * statistics.mean(median_of(cell, rule, 'preempted') for cell in with_rule):.1f} %")
        rows.append(row)
    header = ["rule", "cells", "tokens/s", "TTFT p50", "p99", "TPOT p99", "end to end p50", "p99", "TPOT p99 / forecast, bursts", "preempted"]
    return table(header, rows) + f"\n\nFrom `{name}`."


GAP = 0.01
BELOW = 0.99


def study(tiers):
    """Of the runs without a tier, or with one: {family: {size: {part: {what: (found, written)}}}} as shares of all blocks; and the file's name."""
    name, text = newest("*-retention-study.csv")
    families = {}
    for row in csv.DictReader((text or "").splitlines()):
        if (row["tier"] != "0") == tiers:
            parts = families.setdefault(row["family"], {}).setdefault((int(row["blocks"]), int(row["tier"])), {})
            found = tuple(int(row[key]) / int(row["total"]) for key in ("found", "written"))
            parts.setdefault(row["part"], {})[row["what"]] = found
    return name, families


def gap_closed(parts, what):
    """Of each part with a gap of a point and more, the share of it that is closed; and the least that is found of what LRU finds."""
    found = [{key: value[0] for key, value in part.items()} for part in parts.values()]
    shares = [(of[what] - of["LRU"]) / (of["MIN"] - of["LRU"]) for of in found if of["MIN"] - of["LRU"] >= GAP]
    return shares, min(of[what] / of["LRU"] for of in found)


def settings_of(families):
    """Of each of the settings, whether it finds nowhere clearly less than LRU, the share of the gaps that it closes on the mean over families
    and sizes, and the least that it finds of what LRU finds."""
    sizes = [parts for sizes in families.values() for parts in sizes.values()]
    ranked = {}
    for what in next(iter(sizes[0].values())):
        if what.startswith("doubt"):
            closed = [gap_closed(parts, what) for parts in sizes]
            least = min(least for _, least in closed)
            ranked[what] = (least >= BELOW, statistics.mean(statistics.mean(shares) for shares, _ in closed if shares), least)
    return ranked


def left_out():
    """Each family of workloads judged by the settings that were best on all others, the worst first."""
    name, families = study(tiers=False)
    if not families:
        return "Not measured yet."
    judged, sizes = [], sorted(size for size in next(iter(families.values())))
    for family, of in families.items():
        ranked = settings_of({other: sizes for other, sizes in families.items() if other != family})
        chosen = max(ranked, key=ranked.get)
        closed = [gap_closed(of[size], chosen) for size in sizes]
        judged.append((min(statistics.mean(shares) for shares, _ in closed if shares), family, chosen, closed))
    rows, cells = [], []
    for _, family, chosen, closed in sorted(judged):
        row = [family]
        for shares, least in closed:
            cells += [statistics.mean(shares)] if shares else []
            row.append(f"{100 * statistics.mean(shares):.1f} % ({100 * min(shares):.1f})" if shares else "no gap")
        rows.append([*row, f"{100 * min(least for _, least in closed) - 100:+.2f} %", chosen])
    header = ["workload", *(f"{blocks:,} blocks" for blocks, _ in sizes), "least of what LRU finds", "settings, from the others"]
    told = f"{sum(cell >= 0.15 for cell in cells)} of {len(cells)} are 15 % and more, the median is {100 * statistics.median(cells):.1f} %."
    every = settings_of(families).values()
    means = [100 * mean for _, mean, _ in every]
    told += f" Whichever settings are taken, the mean over all is {min(means):.1f} to {max(means):.1f} %, and nowhere less than {100 * min(least for *_, least in every):.1f} % of what LRU finds is found."
    return table(header, rows) + f"\n\n{told} From `{name}`."


def best_admission(families):
    """What writes the least of what finds nowhere half a point less than writing all does."""
    found = [part for sizes in families.values() for parts in sizes.values() for part in parts.values()]
    settings = [what for what in found[0] if what.startswith("least return")]
    all_ = "least return 0"
    safe = [what for what in settings if all(part[what][0] >= part[all_][0] - 0.005 for part in found)]
    return min(safe, key=lambda what: sum(part[what][1] for part in found))


def tiers():
    """A cache with a tier behind it: found in both, and written."""
    name, families = study(tiers=True)
    if not families:
        return "Not measured yet."
    rows = []
    for family, of in families.items():
        chosen = best_admission({other: sizes for other, sizes in families.items() if other != family})
        for (blocks, tier), parts in sorted(of.items()):
            mean = lambda what, at: 100 * statistics.mean(part[what][at] for part in parts.values())
            if mean("MIN", 0) - mean("LRU", 0) < 0.5:
                continue
            found = [f"{mean(what, 0):.2f} %" for what in ("LRU", "least return 0", chosen, "MIN")]
            written = [f"{mean(what, 1):.1f} %" for what in ("LRU", chosen)]
            rows.append([family, f"{blocks:,} + {tier:,}", *found, *written, chosen.removeprefix("least return ")])
    header = ["workload", "blocks, in the tier", "LRU in both", "Folio, all is written", "what is worth it", "MIN over the sum", "written: all", "what is worth it", "least chance, from the others"]
    return table(header, rows) + f"\n\nShares of all blocks; where LRU finds what MIN does, within half a point, nothing is to be told. From `{name}`."


HALF = "0.5"


def states():
    """Which states are kept: the engine's rule beside Marconi's, in the same memory, the worst first."""
    name, text = newest("*-state-study.csv")
    if text is None:
        return "Not measured yet."
    # {(model, family): {(memory, part): {share: {rule: share of all blocks that is found}}}}
    of = {}
    for row in csv.DictReader(text.splitlines()):
        cells = of.setdefault((row["model"], row["family"]), {}).setdefault((int(row["memory"]), row["part"]), {})
        cells.setdefault(row["share"], {})[row["rule"]] = int(row["found"]) / int(row["total"])
    rows, ratios = [], []
    for (model, family), cells in of.items():
        against = [(shares[HALF]["passed"] / shares[HALF]["Marconi"], memory, part) for (memory, part), shares in cells.items()]
        best = [max(cell["passed"] for cell in shares.values()) / max(cell["Marconi"] for cell in shares.values()) for shares in cells.values()]
        ratios += [ratio for ratio, *_ in against]
        least, memory, part = min(against)
        worst = cells[memory, part][HALF]
        found = [f"{100 * worst[rule]:.2f} %" for rule in ("passed", "Marconi", "no states")]
        middle, most = statistics.median(ratio for ratio, *_ in against), max(against)[0]
        rows.append((least, [model, family, f"{least:.3f}", f"{middle:.3f}", f"{most:.3f}", f"{memory:,}, {part}", *found, f"{min(best):.3f}"]))
    header = ["model", "workload", "of what Marconi's rule finds: least", "median", "most", "the least: blocks, part", "Folio's rule", "Marconi's", "a state anywhere", "each at its best division: least"]
    told = f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} are 1 and more, {sum(ratio < 0.99 for ratio in ratios)} less than 0.99."
    return table(header, [row for _, row in sorted(rows)]) + f"\n\n{told} From `{name}`."


PARTS = {"states": states, "left_out": left_out, "tiers": tiers, "admission": admission, "admission_share": admission_share, "admission_cells": admission_cells_taken, "policies": policies, "formats": formats, "block_cost": block_cost, "isolation": isolation}


def fill(page):
    def part(match):
        name = match[1]
        if name not in PARTS:
            raise SystemExit(f"docs/kv-cache.md: no measured part is called {name}; there are {', '.join(PARTS)}")
        return f"<!-- measured: {name} -->\n{PARTS[name]()}\n<!-- end -->"
    return re.sub(r"<!-- measured: (\w+) -->\n.*?<!-- end -->", part, page, flags=re.S)


def main():
    with open(PAGE) as file:
        page = file.read()
    made = fill(page)
    if "--check" in sys.argv[1:]:
        sys.exit(None if made == page else "docs/kv-cache.md is not what tools/bench/kv_report.py makes of the results: run it")
    with open(PAGE, "w") as out:
        out.write(made)


if __name__ == "__main__":
    main()
