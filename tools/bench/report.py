#!/usr/bin/env python3
"""Makes docs/performance.md and its plots from the raw results in results/ and the prose in performance.in.md.

    python3 tools/bench/report.py           writes docs/performance.md, docs/roofline.svg, docs/batch-scaling.svg
    python3 tools/bench/report.py --check   says what is not up to date, and fails; for CI

Standard library only, and the same results give the same bytes. A line `{{name arguments}}` of the prose is replaced by what `name` below makes,
and `{{name arguments of FOLDER}}` by the same of the results of another machine, in results/FOLDER/.
"""

import os
import re
import statistics
import sys

import plots
import side_by_side
from results import FORMATS, HERE, SHAPES, Results, body, cost, head
from server_threads import table as threads_table

DOCS = os.path.normpath(os.path.join(HERE, "..", "..", "docs"))
ORDER = ["prefill 512", "decode x1 at 128", "decode x8 at 128", "decode x32 at 128", "decode x1 at 8192"]
NAMES = {"decode x1 at 128": "decode alone, depth 128", "decode x8 at 128": "decode x8, depth 128",
         "decode x32 at 128": "decode x32, depth 128", "decode x1 at 8192": "decode alone, depth 8,192"}
# Times llama.cpp, and the share of the limit where one was set.
WANTED = {
    ("llama-1b", "bf16"): [(1.0, 0.87), (1.0, 0.92), (1.3, None), (1.3, None), (1.9, None)],
    ("llama-1b", "Q8_0"): [(1.8, None), (1.15, 0.92), (2.2, None), (2.1, None), (2.5, None)],
    ("llama-1b", "Q4_0"): [(2.0, None), (1.15, 0.88), (2.8, None), (2.5, None), (2.5, None)],
}
# Columns of `targets`, and where their results lie.
MACHINES = [("Zen 5, AVX2", "zen5-avx2"), ("Intel, AVX2", "avx2"), ("Zen 5", "zen5"), ("Zen 4", None), ("Intel", "intel")]
# (what, how to read it from a run in seconds or t/s, wanted at most, what llama-server did on the machine)
LOAD = [
    ("all 64 requests", lambda r: r["load"]["elapsed_s"], 67, "268 s", "s"),
    ("output tokens per s", lambda r: r["load"]["output_tokens_per_s"], None, "11", ""),
    ("TTFT, p50", lambda r: r["load"]["ttft_ms"]["p50"] / 1e3, 3, "10 s", "s"),
    ("TTFT, p99", lambda r: r["load"]["ttft_ms"]["p99"] / 1e3, 24, "121 s", "s"),
    ("inter-token, p50", lambda r: r["load"]["itl_ms"]["p50"] / 1e3, None, "", "s"),
    ("inter-token, p99", lambda r: r["load"]["itl_ms"]["p99"] / 1e3, 0.5, "13.8 s", "s"),
    ("failed", lambda r: r["load"]["requests"] - r["load"]["completed"], 0, "2", ""),
]


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def spread(values, digits=1):
    """Median, and the range where there is one."""
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"


def share_of_limit(share, by):
    return f"{share:.0%} of {'bandwidth' if by == 'bytes' else 'arithmetic'}"


def verdict(value, wanted, at_least=True):
    reached = value >= wanted if at_least else value <= wanted
    return "reached" if reached else "**missed**"


def pairs(results, shape, format_):
    """One model in one format, cell by cell."""
    wanted = WANTED.get((shape, format_), [(1.0, None)] * len(ORDER))
    rows = []
    for what, (ratio, share) in zip(ORDER, wanted):
        cell = results.cells.get((shape, format_, what))
        if cell is None:
            continue
        limit = "" if not cell.shares else share_of_limit(cell.share(), cell.by[0])
        target = f"{ratio:g}x: {verdict(cell.ratio(), ratio)}"
        if share and cell.shares:
            target += f"; {share:.0%}: {verdict(cell.share(), share)}"
        rows.append([NAMES.get(what, what), spread(cell.ours), spread(cell.theirs), f"**{spread(cell.ratios(), 2)}**" if len(cell.ours) == 1
                     else f"**{cell.ratio():.2f}** ({min(cell.ratios()):.2f}..{max(cell.ratios()):.2f})", target, limit, str(len(cell.ours))])
    if not rows:
        return "Not measured yet."
    header = ["", "Folio t/s", "llama.cpp t/s", "ratio", "wanted", "share of the limit", "pairs"]
    files = sorted({results.files[key] for key in results.cells if key[:2] == (shape, format_)})
    return table(header, rows) + "\n\nFrom " + ", ".join(f"`{name}`" for name in files) + "."


def of_machine(folder):
    return Results(os.path.join(HERE, "results", folder))


def targets(results):
    """Every target of the llama-1b shape on every machine: `results` and the folders beside it."""
    machines = [of_machine(folder) if folder else results for _, folder in MACHINES]
    mark = lambda text, reached: text if reached else f"**{text}**"
    rows = []
    for format_ in ("Q8_0", "Q4_0"):
        for what, (ratio, share) in zip(ORDER, WANTED["llama-1b", format_]):
            row = [f"{format_}, {NAMES.get(what, what)}", f"{ratio:g}" + (f" and {share:.0%}" if share else "")]
            for machine_ in machines:
                cell = machine_.cells.get(("llama-1b", format_, what))
                texts = []
                if cell:
                    texts.append(mark(f"{cell.ratio():.2f}", cell.ratio() >= ratio))
                if cell and share and cell.shares:
                    texts.append(mark(f"{100 * cell.share():.1f} %", cell.share() >= share))
                row.append(", ".join(texts))
            rows.append(row)
    return table(["", "wanted", *(name for name, _ in MACHINES)], rows)


def peers(results, shape, format_):
    """Folio and other engines than llama.cpp, cell by cell, and who is ahead of Folio."""
    name, data = results.of("peers").get((shape, format_), (None, None))
    if data is None or not data["rounds"]:
        return "Not measured yet."
    rounds, others = data["rounds"], data["arguments"]["peers"]
    cells = {other: list(zip(*(side_by_side.rows(data["arguments"], r["folio"], r[other]) for r in rounds))) for other in others}
    rows, slower = [], []
    for i, pairs in enumerate(cells[others[0]]):
        what = NAMES.get(pairs[0][0], pairs[0][0])
        figures = rounds[0]["folio"]["prefill"][:1] + rounds[0]["folio"]["decode"]
        row = [what, spread([pair[1] for pair in pairs]), share_of_limit(statistics.median(pair[3] for pair in pairs), figures[i]["limited_by"])]
        for other in others:
            theirs, ratios = zip(*((pair[2], pair[1] / pair[2]) for pair in cells[other][i]))
            ratio = statistics.median(ratios)
            row += [spread(theirs), f"**{ratio:.2f}** ({min(ratios):.2f}..{max(ratios):.2f})"]
            slower += [f"{what} than {other} ({ratio:.2f})"] if ratio < 1 else []
        rows.append(row)
    header = ["", "Folio t/s", "share of the limit", *(text for other in others for text in (f"{other} t/s", "ratio"))]
    versions = "; ".join(sorted({v for entry in data["versions"] for v in entry.values()}))
    return (table(header, rows) + f"\n\nFrom `{name}`, {len(rounds)} rounds; {versions}. "
            + ("Folio is slower: " + ", ".join(slower) + "." if slower else "Folio is slower nowhere."))


def small(results):
    """Ratios of all cells of the smaller shapes."""
    rows, slower = [], []
    for shape in [s for s in SHAPES if s != "llama-1b"]:
        for format_ in FORMATS:
            cells = [results.cells.get((shape, format_, what)) for what in ORDER[:4]]
            if not any(cells):
                continue
            show = lambda c: "" if c is None else f"{statistics.median(c.ours):.0f} / {statistics.median(c.theirs):.0f} = **{c.ratio():.2f}**"
            rows.append([shape, format_, *map(show, cells), str(max(len(c.ours) for c in cells if c))])
            slower += [f"{shape} {format_} {NAMES.get(w, w)} ({c.ratio():.2f})" for w, c in zip(ORDER, cells) if c and c.ratio() < 1]
    if not rows:
        return "Not measured yet."
    text = table(["shape", "format", *(NAMES.get(w, w) for w in ORDER[:4]), "pairs"], rows)
    return text + "\n\nFolio t/s / llama.cpp t/s = median of the ratios of pairs. " + (
        "Slower than llama.cpp: " + ", ".join(slower) + "." if slower else "Slower than llama.cpp: nowhere.")


def load(results):
    """The load on a server, newest result of each model."""
    out = []
    for (shape, format_), (name, data) in sorted(results.of("load").items(), key=str):
        runs, a = data["runs"], data["arguments"]
        if not runs:
            continue
        rows = []
        for what, read, wanted, theirs, unit in LOAD:
            values = [read(run) for run in runs]
            goal = "" if wanted is None else f"at most {wanted:g}{' ' + unit if unit else ''}: {verdict(statistics.median(values), wanted, False)}"
            digits = 0 if what == "failed" else 2 if unit else 1
            rows.append([what, spread(values, digits) + (f" {unit}" if unit else ""), goal, theirs])
        over = [run["over"] for run in runs]
        rows.append(["resident memory over weights and written KV", spread([100 * o for o in over]) + " %",
                     f"at most 10 %: {verdict(statistics.median(over), 0.10, False)}", ""])
        out.append(f"{shape}, {format_}; {a['requests']} requests from {a['clients']} clients, {a['groups']} shared prefixes of {a['shared']} tokens and "
                   f"{a['unique']} of their own, {a['output']} out; {len(runs)} runs, each on a new server (`{name}`).\n\n"
                   + table(["", "Folio", "wanted", "llama-server, quoted¹"], rows))
    return "\n\n".join(out) or "Not measured yet."


# Microseconds of CPU per request at most.
FRONT_END = {False: 150, True: 250}


def front_end(results):
    """CPU of the server's process per request, where steps take no time and where they take some."""
    rows, files = [], []
    for (kind, step_us), (name, data) in sorted((key, value) for key, value in results.server.items() if key[0] == "front-end"):
        files.append(f"`{name}`")
        for what in front_end_kinds(data):
            runs = [run[what] for run in data["runs"]]
            engine = statistics.median(run["by_thread_us"].get("folio-engine", 0) for run in runs)
            wanted = FRONT_END["streamed" in what]
            cpu = [run["cpu_us"] for run in runs]
            rows.append(["none" if step_us == 0 else f"{step_us / 1000:g} ms", what, f"**{spread(cpu)}**", f"{engine:.1f}",
                         f"{wanted}: {verdict(statistics.median(cpu), wanted, False)}", spread([run["requests_per_s"] for run in runs], 0)])
    if not rows:
        return "Not measured yet."
    header = ["a step takes", "requests", "CPU per request, µs", "of it the engine's thread", "wanted at most", "requests/s"]
    return table(header, rows) + "\n\nFrom " + " and ".join(files) + "."


def front_end_kinds(data):
    return [what for what in data["runs"][0] if what != "at"]


def server_threads(results):
    """By numbers of threads."""
    name, data = results.server.get(("server-threads", None), (None, None))
    return "Not measured yet." if data is None else threads_table(data) + f"\n\nFrom `{name}`."


def start(results):
    """Process start to the first token, of the newest file."""
    if not results.starts:
        return "Not measured yet."
    name, data = results.starts[-1]
    rows = []
    for entry in data["results"]:
        def seconds(field):
            values = [run[field] for run in entry["runs"] if field in run]
            return spread(values, 2) if values else ""
        flags = f" `{entry['flags']}`" if entry["flags"] else ""
        served = statistics.median(run["served_mib"]["VmRSS"] for run in entry["runs"])
        rows.append([entry["model"] + flags, seconds("listening_s"), seconds("first_token_s"), seconds("first_token_cpu_s"), f"{served:.0f} MiB"])
    note = f" {data['note'][0].upper()}{data['note'][1:]}." if data.get("note") else ""
    return table(["model", "listening, s", "first token, s", "processor time until then, s", "resident"], rows) + f"\n\nFrom `{name}`.{note}"


def agent_turns(results):
    """What is before the engine in an agent's turn, by build."""
    rows, files = [], []
    steps = ["read", "render", "tokenize", "breakpoints"]
    for (name, _), (file, data) in sorted(results.of("agent-turns").items(), key=lambda item: item[1][0]):
        turns = [turn for session in data["sessions"] for turn in session]
        middle = lambda values: statistics.median(list(values))
        times = middle(turn["steps"]["render"]["times"] for turn in turns)
        row = [name, f"{middle(turn['tokens'] for turn in turns):,.0f}", f"**{middle(turn['ms'] for turn in turns):.1f}**"]
        row += [f"{middle(turn['steps'].get(step, {'ms': 0})['ms'] for turn in turns):.1f}" + (f" ({times:.0f} times)" if step == "render" else "") for step in steps]
        row += [f"{middle(turn['hashing_ms'] for turn in turns):.1f}", " / ".join(f"{session[-1]['resident_mib']:.0f}" for session in data["sessions"])]
        rows.append(row)
        files.append(file)
    if not rows:
        return "Not measured yet."
    header = ["", "tokens of a prompt", "ms a turn", *steps, "hashing its blocks, apart", "MiB resident after each session"]
    return table(header, rows) + "\n\nFrom " + ", ".join(f"`{name}`" for name in files) + "; medians over all turns."


def number(value, error=None):
    digits = 3 if value >= 0.1 else 4 if value >= 0.001 else 6
    text = f"{value:.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def kl_of(row, engine):
    side = row.get(engine)
    if side is None:
        return ""
    return "refused" if "error" in side else number(side["mean_kl"], side["mean_kl_error"])


def kl_trained(results):
    (_, data), = [value for key, value in results.latest.items() if key[0] == "kl"] or [(None, None)]
    if data is None:
        return "Not measured yet."
    out = []
    for model, about in sorted(data["models"].items()):
        rows = [row for row in data["rows"] if row["model"] == model]
        if not about["trained"] or not rows:
            continue
        cells = []
        for row in rows:
            top = " / ".join(f"{row[e]['same_top']:.1%}" for e in ("folio", "llama.cpp") if "same_top" in row.get(e, {}))
            cells.append([f"`{row['format']}`" if row["format"].startswith("--") else row["format"], f"{row['share']:.0%}" if row["share"] else "",
                          kl_of(row, "folio"), kl_of(row, "llama.cpp"), top,
                          f"{row['folio']['model']['perplexity']:.3f}" if "model" in row["folio"] else ""])
        first = rows[0]["folio"]
        out.append(f"**{model}** ({about['family']}, {about['parameters'] / 1e6:.2f} M parameters, trained; {first['positions']:,} positions of text that the "
                   f"model wrote itself; perplexity in 16 bits {first['base']['perplexity']:.3f}):\n\n"
                   + table(["format", "weights in it", "Folio, mean KL", "llama.cpp, mean KL", "same top token, Folio / llama.cpp", "perplexity"], cells))
    return "\n\n".join(out)


def kl_random(results):
    (_, data), = [value for key, value in results.latest.items() if key[0] == "kl"] or [(None, None)]
    if data is None:
        return "Not measured yet."
    models = [m for m, about in sorted(data["models"].items()) if not about["trained"] and any(r["model"] == m for r in data["rows"])]
    rows = {(row["model"], row["format"]): row for row in data["rows"]}
    formats = list(dict.fromkeys(row["format"] for row in data["rows"] if row["model"] in models and "llama.cpp" in row))
    def cell(model, format_):
        row = rows.get((model, format_))
        if row is None:
            return ""
        ours, theirs = row["folio"], row["llama.cpp"]
        if "error" in ours or "error" in theirs:
            return " / ".join("refused" if "error" in side else number(side["mean_kl"]) for side in (ours, theirs))
        return f"{number(ours['mean_kl'])} / {number(theirs['mean_kl'])}"
    return table(["format", *(data["models"][m]["family"] for m in models)], [[f, *(cell(m, f) for m in models)] for f in formats])


def machine(results):
    """The newest description of the machine, and its limits by threads."""
    newest = max((value for value in results.latest.values() if "machine" in value[1]), key=lambda v: v[0], default=None)
    if newest is None:
        return "A virtual machine of 2 vCPU of a Zen 4 server (AVX2 and AVX-512 with VNNI, no GPU), 24 GiB."
    m = newest[1]["machine"]
    caches = ", ".join(f"{level} {size}" for level, size in m["caches"].items())
    text = (f"{m['cpu']} (family {m['family']}, model {m['model']}), {m['cpus']} processors{', virtual' if 'hypervisor' in m['flags'] else ''}; "
            f"{', '.join(f for f in m['flags'] if f != 'hypervisor')}; {caches}; {m['memory_bytes'] / 2**30:.0f} GiB; {m['system']}.")
    versions = sorted({f"{v}" for _, data in results.latest.values() for entry in data.get("versions", []) if isinstance(entry, dict) for v in entry.values()})
    if versions:
        text += " Versions: " + "; ".join(versions) + "."
    doctor = [data for (kind, *_), (_, data) in results.latest.items() if kind == "doctor"]
    if doctor:
        rows = [[str(r["threads"]), f"{r['read_bytes_per_s'] / 1e9:.1f}", f"{r['f32_flop_per_s'] / 1e9:.0f}", f"{r['int8_op_per_s'] / 1e9:.0f}"]
                for r in doctor[-1]["report"]["by_threads"]]
        text += "\n\n" + table(["threads", "read GB/s", "f32 GFLOP/s", "bytes Gop/s"], rows) + "\n\n`folio doctor`, all in one buffer; a multiply-add counts as two."
    return text


def limits(results):
    """What every Folio process of a side by side measured."""
    rows = []
    for shape in SHAPES:
        for format_ in FORMATS:
            runs = results.folio.get((shape, format_), [])
            if runs:
                weight_bytes = results.median(shape, format_, "weight_bytes")
                scaled = lambda field: [r[field] / 1e9 for r in runs if field in r]
                ints = scaled("int8_op_per_s")
                rows.append([shape, format_, f"{weight_bytes / 1e9:.2f} GB", f"{body(shape) / 1e9:.2f} + {head(shape) / 1e9:.2f} G",
                             spread(scaled("read_bytes_per_s")), spread(scaled("f32_flop_per_s"), 0), spread(ints, 0) if ints else ""])
    header = ["shape", "format", "weights", "multiply-adds per token: layers + head", "read GB/s", "f32 GFLOP/s", "bytes Gop/s"]
    return table(header, rows) if rows else "Not measured yet."


def expand(results):
    makers = {f.__name__: f for f in (pairs, targets, peers, small, load, front_end, server_threads, start, agent_turns, kl_trained, kl_random, machine, limits)}
    def one(match):
        name, *arguments = match[1].split()
        if arguments[-2:-1] == ["of"]:
            return makers[name](of_machine(arguments[-1]), *arguments[:-2])
        return makers[name](results, *arguments)
    return "<!-- Made by tools/bench/report.py from tools/bench/performance.in.md and tools/bench/results; do not edit. -->\n\n" + re.sub(
        r"^\{\{(.*)\}\}$", one, read(os.path.join(HERE, "performance.in.md")), flags=re.M)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def publish(pages):
    """Writes what is not up to date of `pages`, by name below docs/; with --check fails instead. What has no text is left alone."""
    stale = []
    for name, text in pages.items():
        path = os.path.join(DOCS, name)
        old = read(path) if os.path.exists(path) else None
        if text is not None and text != old:
            stale.append(name)
            if "--check" not in sys.argv:
                with open(path, "w", encoding="utf-8") as out:
                    out.write(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"docs/ is not what {os.path.basename(sys.argv[0])} makes: {', '.join(stale)}")
    print("written: " + ", ".join(stale) if stale else "up to date")


def main():
    results = Results()
    publish({"performance.md": expand(results), "roofline.svg": plots.roofline(results), "batch-scaling.svg": plots.scaling(results)})


if __name__ == "__main__":
    main()
