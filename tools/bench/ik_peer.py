#!/usr/bin/env python3
"""ik_llama.cpp, or llama.cpp, through its own llama-batched-bench, for figures beside Folio's on the same machine.

    python ik_peer.py PROGRAM MODEL.gguf [--threads 2] [--prompt 512] [--gen 16] [--batch 1,8,32] [--depth 128] [--name llama.cpp] [--version TEXT] [--args "-rtr"]
        one JSON object as llama_peer.py prints it: prefill t/s (`pp512`) and decode t/s of several batch sizes (`B1`, `B8`, ...)

`PROGRAM` is the llama-batched-bench of a build for this machine. One token of the vocabulary over and over (the program's own
choice), KV in f16, flash attention on, its own defaults otherwise; `--args` adds options, such as `-rtr`, which packs weights anew at the start.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys


def table(text):
    """(prompt, sequences) -> (prefill t/s, decode t/s), of the rows | PP | TG | B | N_KV | T_PP | S_PP | T_TG | S_TG | T | S |."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 10 and cells[0].isdigit():
            rows[int(cells[0]), int(cells[2])] = float(cells[5]), float(cells[7])
    return rows


def run(a, prompt, gen, sizes):
    cells = max(sizes) * (prompt + gen)
    command = [a.program, "-m", a.model, "-c", str(max(cells, 512)), "-b", "2048", "-ub", "512", "-t", str(a.threads), "-fa", "on", "-npp", str(prompt),
               "-ntg", str(gen), "-npl", ",".join(map(str, sizes)), *shlex.split(a.args)]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = table(done.stdout + "\n" + done.stderr)
    missing = [n for n in sizes if (prompt, n) not in rows]
    if done.returncode or missing:
        sys.exit(f"{' '.join(command)}\nexit code {done.returncode}, no row for {missing}:\n{done.stderr[-2000:]}")
    return rows


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("program")
    ap.add_argument("model")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--gen", type=int, default=16)
    ap.add_argument("--batch", default="1,8,32")
    ap.add_argument("--depth", type=int, default=128)
    ap.add_argument("--name", default="ik_llama.cpp")
    ap.add_argument("--version", default="unknown", help="of the build, such as a commit; the program does not know it")
    ap.add_argument("--args", default="", help="further options of the program")
    a = ap.parse_args()
    out = {"threads": a.threads, "version": f"{a.name} {a.version} {a.args}".strip()}
    out[f"pp{a.prompt}"] = run(a, a.prompt, 1, [1])[a.prompt, 1][0]
    sizes = [int(b) for b in a.batch.split(",")]
    for (_, n), (prefill, decode) in sorted(run(a, a.depth, a.gen, sizes).items()):
        out[f"B{n}"] = {"prefill": prefill, "decode": decode}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
