#!/usr/bin/env python3
"""Makes docs/performance-gpu.md of what tools/gpu/verify.sh measured.

    python3 tools/gpu/report.py                   from the committed results
    python3 tools/gpu/report.py RESULTS           from a folder that verify.sh wrote; its figures go to tools/gpu/results/NAME.json first
    python3 tools/gpu/report.py RESULTS --print   a summary, nothing written
    python3 tools/gpu/report.py --check           whether the page is what the committed results make of it

Whatever was not measured is listed by name with the command that measures it.
"""

import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools/gpu/results"
PAGE = ROOT / "docs/performance-gpu.md"

# What is wanted: (name, file, phase, batch, tokens, wanted share of the limit or None)
WANTED = [
    ("prefill 512, bf16", "engine-BF16", "prefill", 1, 512, None),
    ("prefill 4,096, bf16", "engine-BF16", "prefill", 1, 4096, 0.55),
    ("decode alone, depth 1,024, bf16", "engine-BF16", "decode", 1, 1024, 0.75),
    ("decode x8, depth 1,024, bf16", "engine-BF16", "decode", 8, 1024, None),
    ("decode x64, depth 1,024, bf16", "engine-BF16", "decode", 64, 1024, 0.60),
    ("prefill 4,096, FP8 weights", "engine-Fp8x128", "prefill", 1, 4096, None),
    ("decode alone, depth 1,024, FP8 weights", "engine-Fp8x128", "decode", 1, 1024, None),
    ("decode x64, depth 1,024, FP8 weights", "engine-Fp8x128", "decode", 64, 1024, None),
    ("prefill 4,096, 4-bit weights", "engine-Int4x128", "prefill", 1, 4096, None),
    ("decode alone, depth 1,024, 4-bit weights", "engine-Int4x128", "decode", 1, 1024, None),
    ("decode x64, depth 1,024, 4-bit weights", "engine-Int4x128", "decode", 64, 1024, None),
    ("prefill 512, bf16, cuBLASLt", "cublaslt-BF16", "prefill", 1, 512, None),
    ("prefill 4,096, bf16, cuBLASLt", "cublaslt-BF16", "prefill", 1, 4096, None),
    ("decode alone, depth 1,024, bf16, cuBLASLt", "cublaslt-BF16", "decode", 1, 1024, None),
    ("decode x64, depth 1,024, bf16, cuBLASLt", "cublaslt-BF16", "decode", 64, 1024, None),
    ("prefill 4,096, FP8 weights and activations, cuBLASLt", "cublaslt-Fp8x128", "prefill", 1, 4096, None),
    ("decode alone, depth 1,024, FP8 weights and activations, cuBLASLt", "cublaslt-Fp8x128", "decode", 1, 1024, None),
    ("decode x64, depth 1,024, FP8 weights and activations, cuBLASLt", "cublaslt-Fp8x128", "decode", 64, 1024, None),
]
# Through the server: (name, file).
SERVED = [
    ("256 clients at once, 1,000 tokens in and 100 out, bf16", "serve-100"),
    ("256 clients at once, 1,000 tokens in and 1,000 out, bf16", "serve-1000"),
]
LINK = "copies to and from host memory at 80 % of the link"
TESTS = {
    "families": "every family against transformers and the reference",
    "kernels": "rows, KV writes, attention and sampling against their scalar definitions",
    "library": "cuBLASLt's algorithms tried, and products by the one that is pinned",
    "linear": "products of every weight format against the decoded weights",
    "bitwise": "the bitwise suite: batches, chunks, hits, preemption, copies to the host",
    "nvrtc": "the compiler of the machine",
    "machine": "the limits of the device",
}


def load(folder):
    """Everything in a folder that verify.sh wrote, as one object."""
    run = {"figures": {}, "tests": {}, "device": None, "peers": None}
    for path in sorted(folder.glob("*.json")):
        try:
            figures = json.loads(path.read_text())
        except json.JSONDecodeError:
            continue
        if path.stem == "peers":
            run["peers"] = figures
        else:
            run["figures"][path.stem] = figures
    if (folder / "device.csv").exists() and (lines := (folder / "device.csv").read_text().strip().splitlines()):
        run["device"] = lines[-1]
    if (folder / "tests.txt").exists():
        for line in (folder / "tests.txt").read_text().splitlines():
            if found := re.match(r"(\w+): (\w+) in (\d+) s", line):
                run["tests"][found[1]] = found[2] == "passed"
    return run


def figure(run, file, phase, batch, tokens):
    rows = run["figures"].get(file, {}).get(phase, [])
    return next((row for row in rows if (row["batch"], row["tokens"]) == (batch, tokens)), None)


def peer(run, phase, batch, tokens):
    """Tokens per second of PyTorch for the same figure, if it was measured."""
    peers = run["peers"] or {}
    if phase == "prefill":
        row = peers.get("prefill")
        return row["tokens_per_s"] if row and row["tokens"] == tokens else None
    rows = peers.get("decode") or []
    row = next((row for row in rows if (row["batch"], row["depth"]) == (batch, tokens)), None)
    return row and row["tokens_per_s"]


def table(run):
    lines = [
        "| | Folio t/s | limit | reached | wanted | PyTorch, SDPA | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    missing = []
    for name, file, phase, batch, tokens, wanted in WANTED:
        row = figure(run, file, phase, batch, tokens)
        if row is None:
            missing.append(name)
            continue
        other = peer(run, phase, batch, tokens) if file == "engine-BF16" else None
        share = row["share_of_limit"]
        goal = "" if wanted is None else f"{wanted:.0%}: " + ("reached" if share >= wanted else "**missed**")
        ratio = f"**{row['tokens_per_s'] / other:.2f}**" if other else ""
        lines.append(
            f"| {name} | {row['tokens_per_s']:,.0f} ({row['min_tokens_per_s']:,.0f}..{row['max_tokens_per_s']:,.0f}) "
            f"| {row['limit_tokens_per_s']:,.0f} ({row['limited_by']}) | {share:.0%} | {goal} "
            f"| {f'{other:,.0f}' if other else ''} | {ratio} |"
        )
    return (lines if len(missing) < len(WANTED) else []), missing


# GB/s of a lane, by generation of PCI Express.
LANE = {"3": 0.985, "4": 1.969, "5": 3.938, "6": 7.877}


def link(run):
    """What copies to and from pinned host memory reach of the link."""
    gpu = run["figures"].get("link", {}).get("gpu")
    if not gpu:
        return []
    up, down = gpu["upload_bytes_per_s"] / 1e9, gpu["download_bytes_per_s"] / 1e9
    line = f"- copies from pinned host memory {up:.1f} GB/s, to it {down:.1f} GB/s"
    generation, width = [field.strip() for field in (run["device"] or ",").split(",")][-2:]
    if generation in LANE and width.isdigit():
        most = LANE[generation] * int(width)
        share = min(up, down) / most
        line += f", of {most:.1f} that the link has (PCIe {generation} x{width}): {share:.0%}, wanted 80%: " + ("reached" if share >= 0.8 else "**missed**")
    return [line + f"; device memory is read at {gpu['read_bytes_per_s'] / 1e9:,.0f} GB/s, matrices multiply at {gpu['matrix_flop_per_s'] / 1e12:,.0f} TFLOP/s"]


def part(file):
    """The part of verify.sh that measures a file."""
    return file.split("-")[0]


def served(run):
    """A line for each load through the server."""
    for name, file in SERVED:
        if load := run["figures"].get(file):
            ttft, gaps = load["ttft_ms"], load["itl_ms"]
            yield (
                f"- {name}: **{load['output_tokens_per_s']:,.0f}** output tokens per s; {load['completed']} of {load['requests']} answered in "
                f"{load['elapsed_s']:.1f} s; time to first token p50 {ttft['p50'] / 1e3:.2f} s, p99 {ttft['p99'] / 1e3:.2f} s; between tokens p50 "
                f"{gaps['p50']:.0f} ms, p99 {gaps['p99']:.0f} ms"
            )


def page(runs):
    out = [
        "<!-- Made by tools/gpu/report.py from tools/gpu/results; do not edit. -->",
        "",
        "# Performance on a GPU",
        "",
        "Llama-3.1-8B's shape with random weights (`--load-format dummy`). Limits are measured in the same process: device memory read, and `mma.sync` of bf16 out of registers.",
        "",
        "```sh",
        "tools/gpu/pack.sh                      # builds the binary and the tests into target/gpu.tar.xz; needs no GPU",
        "tools/gpu/verify.sh RESULTS            # where the GPU is: all of this page, in about ten minutes",
        "tools/gpu/verify.sh RESULTS PART       # one part: tests, engine, serve, peers or cublaslt",
        "python3 tools/gpu/report.py RESULTS    # makes this page",
        "```",
        "",
    ]
    for name, run in runs:
        out += [f"## {name}: {run['device'] or 'device unknown'}", ""]
        for test, passed in sorted(run["tests"].items()):
            out.append(f"- {TESTS.get(test, test)}: {'passed' if passed else '**failed**'}")
        lines, _ = table(run)
        out += ["", *lines, ""]
        if through := [*served(run), *link(run)]:
            out += ["Through the server, and limits:", "", *through, ""]
        peers = run["peers"] or {}
        if peers.get("continuous"):
            row = peers["continuous"]
            out += [
                f"transformers' continuous batching ({peers['transformers']}): {row['output_tokens_per_s']:,.0f} output tokens per s, "
                f"{row['requests']} requests of 1,000 in and 100 out.",
                "",
            ]
    measured = [run for _, run in runs]
    missing = [row for row in WANTED if not any(figure(run, *row[1:5]) for run in measured)]
    untested = [test for test in TESTS if not any(test in run["tests"] for run in measured)]
    out += ["## Not measured", ""]
    if not runs:
        out += ["No GPU was at hand yet: nothing on this page has run on one. All of it is measured by `tools/gpu/verify.sh RESULTS`, or part by part:", ""]
    rows = [(row[0] + (f" (wanted: {row[5]:.0%} of the limit)" if row[5] else ""), row[1]) for row in missing]
    rows += [(name, file) for name, file in SERVED if not any(file in run["figures"] for run in measured)]
    out += [f"- {name} (`tools/gpu/verify.sh RESULTS {part(file)}`)" for name, file in rows]
    out += [f"- on a device: {TESTS[test]} (`tools/gpu/verify.sh RESULTS tests`)" for test in untested]
    if not any(run["peers"] for run in measured):
        out.append("- PyTorch with SDPA, and transformers' continuous batching, beside it (`tools/gpu/verify.sh RESULTS peers`)")
    if not any("link" in run["figures"] for run in measured):
        out.append(f"- {LINK} (`tools/gpu/verify.sh RESULTS engine`)")
    out += [
        "",
        "What is known without a GPU is in [gpu-kernels.md](gpu-kernels.md): registers, shared memory and spills of every kernel. All of the tests above run in CI with the kernels on the host.",
        "",
    ]
    return "\n".join(out)


def committed():
    return [(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="?", type=pathlib.Path)
    parser.add_argument("--name", default="latest", help="name of the run among the committed results")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.results and args.print:
        run = load(args.results)
        lines, missing = table(run)
        print("\n".join([*lines, *served(run), *link(run)] + [f"not measured: {name}" for name in missing]))
        return 0
    if args.results:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.name}.json").write_text(json.dumps(load(args.results), indent=1) + "\n")
    text = page(committed())
    if args.check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE.relative_to(ROOT)} is stale: python3 tools/gpu/report.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
