#!/usr/bin/env python3
"""Folio and llama.cpp on the same machine, in turn, so that both meet the same noise.

    side_by_side.py --folio target/release/folio --model DIR --gguf FILE --llama-python PYTHON --llama-bench SCRIPT \
        [--rounds 3] [--depth 128] [--batch 1,8,32] [--prompt 512] [--gen 16] [--out results.json]

`DIR` is a Hugging Face folder and `FILE` the same weights for llama.cpp; `PYTHON` an interpreter with llama-cpp-python; `SCRIPT`
prints llama.cpp's rates as JSON (keys `pp512`, `B1`, `B8`, ...). Each round runs one after the other. Prints medians, the ratio, and
the share of the limits that `folio bench engine` measured in the same process; writes every raw figure to --out.
"""

import argparse
import json
import statistics
import subprocess


def folio(a):
    command = [a.folio, "bench", "engine", a.model, "--json", "--prefill", str(a.prompt), "--batch", a.batch,
               "--depth", str(a.depth), "--decode", str(a.gen), "--repeat", "1", "--threads", str(a.threads)] + a.folio_args.split()
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def llama(a):
    command = [a.llama_python, a.llama_bench, a.gguf, "--json", "--batch", a.batch, "--depth", str(a.depth),
               "--prompt", str(a.prompt), "--gen", str(a.gen), "--threads", str(a.threads)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def rows(a, ours, theirs):
    """(what, folio t/s, llama.cpp t/s, share of the limit) of one round."""
    prefill = ours["prefill"][0]
    yield f"prefill {a.prompt}", prefill["tokens_per_s"], theirs[f"pp{a.prompt}"], prefill["share_of_limit"]
    for figure in ours["decode"]:
        peer = theirs[f"B{figure['batch']}"]["decode"]
        yield f"decode x{figure['batch']} at {a.depth}", figure["tokens_per_s"], peer, figure["share_of_limit"]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folio", "model", "gguf", "llama-python", "llama-bench"):
        ap.add_argument(f"--{name}", required=True)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--depth", type=int, default=128)
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--gen", type=int, default=16)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--batch", default="1,8,32")
    ap.add_argument("--folio-args", default="")
    ap.add_argument("--out")
    a = ap.parse_args()
    rounds = []
    for number in range(a.rounds):
        ours, theirs = folio(a), llama(a)
        theirs.pop("model", None)
        rounds.append({"folio": ours, "llama.cpp": theirs})
        if a.out:  # after every round: an interrupted run keeps what it measured
            names = ("rounds", "depth", "prompt", "gen", "threads", "batch")
            with open(a.out, "w") as out:
                json.dump({"arguments": {k: getattr(a, k) for k in names}, "rounds": rounds}, out, indent=1)
        for what, f, l, share in rows(a, ours, theirs):
            print(f"round {number + 1}  {what:22} folio {f:7.1f}  llama.cpp {l:7.1f}  {f / l:5.2f}x  {share:4.0%} of the limit", flush=True)
    print(f"\nmedians of {a.rounds}; read {statistics.median(r['folio']['read_bytes_per_s'] for r in rounds) / 1e9:.1f} GB/s, "
          f"FMA {statistics.median(r['folio']['f32_flop_per_s'] for r in rounds) / 1e9:.0f} GFLOP/s measured in the same runs\n")
    print("| | Folio t/s | llama.cpp t/s | ratio | share of the limit |\n|---|---|---|---|---|")
    table = zip(*(list(rows(a, r["folio"], r["llama.cpp"])) for r in rounds))
    for cell in table:
        f, l, share = (statistics.median(row[i] for row in cell) for i in (1, 2, 3))
        ratio = statistics.median(row[1] / row[2] for row in cell)
        print(f"| {cell[0][0]} | {f:.1f} | {l:.1f} | {ratio:.2f} | {share:.0%} |")


if __name__ == "__main__":
    main()
