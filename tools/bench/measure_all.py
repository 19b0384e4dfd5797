#!/usr/bin/env python3
"""Every measurement behind docs/performance.md, in order of importance. Goes on where it stopped; run report.py afterwards.

    measure_all.py --folio target/release/folio --models FOLDER --llama-python PYTHON [--only TEXT]... [--pairs 5] [--date D] [--list]

`FOLDER` holds, for each shape, NAME/ (a Hugging Face folder in bf16), NAME.f16.gguf, NAME.q8_0.gguf and NAME.q4_0.gguf (quantize.py makes the
last two); what is missing is left out and named. `--kl FOLDER`: also what kl.py measures, of the models of tools/kl_models.py.
The machine must do nothing else: the load average is shown before each part. Give the same --date to go on with an earlier day's files.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time

from common import folio_version, machine, save
from results import HERE, SHAPES

# (shape, format, suffix of Folio's file, of llama.cpp's)
LLAMA = [("llama-1b", "Q8_0", ".q8_0.gguf", ".q8_0.gguf"), ("llama-1b", "Q4_0", ".q4_0.gguf", ".q4_0.gguf"), ("llama-1b", "bf16", "", ".f16.gguf")]
SMALL = [(shape, *rest) for shape in ("smol-135m", "qwen2.5-0.5b", "qwen3-0.6b") for _, *rest in LLAMA]


def plan(a):
    """(name, command, minutes it takes about, files it needs)."""
    python, script = sys.executable, lambda name: os.path.join(HERE, name)
    out = lambda *words: os.path.join(a.results, "-".join([a.date, *words]).lower() + ".json")
    def common(shape, format_, ours, theirs):
        model, gguf = (os.path.join(a.models, shape + suffix) for suffix in (ours, theirs))
        return ["--folio", a.folio, "--model", model, "--gguf", gguf, "--llama-python", a.llama_python, "--shape", shape, "--format", format_], [model, gguf]
    def side_by_side(case, minutes, pairs=a.pairs):
        flags, files = common(*case)
        command = [python, script("side_by_side.py"), *flags, "--rounds", str(pairs), "--out", out("pairs", case[0], case[1])]
        return f"pairs {case[0]} {case[1]}", command, minutes * pairs, files
    def depth(case, minutes):
        flags, files = common(*case)
        target = out("depth", case[0], case[1])
        return f"depth {case[0]} {case[1]}", [python, script("depth.py"), *flags, "--pairs", str(max(a.pairs, 5)), "--out", target], minutes, files
    q4 = os.path.join(a.models, "llama-1b.q4_0.gguf")
    yield "doctor", None, 0.1, []
    for case in LLAMA[:2]:
        yield side_by_side(case, 1.6)
    yield "load llama-1b Q4_0", [python, script("serve_load.py"), "--folio", a.folio, "--model", q4, "--shape", "llama-1b", "--format", "Q4_0", "--runs",
                                 "3", "--out", out("load", "llama-1b", "q4_0")], 3, [q4]
    for case in LLAMA[:2]:
        yield depth(case, 4)
    for case in SMALL:
        yield side_by_side(case, {"smol-135m": 0.2, "qwen2.5-0.5b": 0.8, "qwen3-0.6b": 0.9}[case[0]], min(a.pairs, 3))
    yield side_by_side(LLAMA[2], 2.7)
    yield depth(LLAMA[2], 6)
    if a.kl:
        yield "kl", [a.llama_python, script("kl.py"), "--folio", a.folio, "--models", a.kl, "--out", out("kl")], 4, [a.kl]


def doctor(a):
    report = json.loads(subprocess.run([a.folio, "doctor", "--json"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    versions = [{"folio": folio_version(a.folio)}]
    save(os.path.join(a.results, f"{a.date}-doctor.json"), {"kind": "doctor", "machine": machine(), "versions": versions, "report": report})


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folio", "models", "llama-python"):
        ap.add_argument(f"--{name}", required=True)
    ap.add_argument("--results", default=os.path.join(HERE, "results"))
    ap.add_argument("--pairs", type=int, default=5)
    ap.add_argument("--kl")
    ap.add_argument("--only", action="append", help="parts whose name contains this; may be repeated")
    ap.add_argument("--date", default=datetime.date.today().isoformat())
    ap.add_argument("--list", action="store_true", help="say what would be measured, and how long it takes about")
    a = ap.parse_args()
    parts = [part for part in plan(a) if not a.only or any(text.lower() in part[0].lower() for text in a.only)]
    unknown = sorted({os.path.basename(name) for *_, files in parts for name in files if not os.path.exists(name)})
    if unknown:
        print("not there, and left out: " + ", ".join(unknown))
    parts = [part for part in parts if all(map(os.path.exists, part[3]))]
    assert all(part[0].split()[1] in SHAPES for part in parts if len(part[0].split()) > 1)
    failed = []
    for name, command, minutes, _ in parts:
        print(f"== {name}: about {minutes:.1f} min; load average {os.getloadavg()[0]:.2f}", flush=True)
        if a.list:
            continue
        start = time.monotonic()
        try:
            doctor(a) if command is None else subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name}: exit code {error.returncode}")
        print(f"   took {(time.monotonic() - start) / 60:.1f} min", flush=True)
    print(f"{sum(part[2] for part in parts):.0f} minutes in all" if a.list else "done")
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
