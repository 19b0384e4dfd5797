#!/usr/bin/env python3
"""Folio and llama.cpp on the same machine, in turn, so that both meet the same noise.

    side_by_side.py --folio target/release/folio --model DIR --gguf FILE --llama-python PYTHON
        [--rounds 5] [--depth 128] [--batch 1,8,32] [--prompt 512] [--gen 16] [--out results.json]

`DIR` is a Hugging Face folder (or the same GGUF file) and `FILE` the same weights for llama.cpp; `PYTHON` an interpreter with
llama-cpp-python. Each round runs one after the other, and which of them is first changes from round to round. Prints medians, the
ratio, and the share of the limits that `folio bench engine` measured in the same process; writes every raw figure to --out, after
every round. Run again with the same --out to go on where it stopped.
"""

import argparse
import json
import os
import statistics
import subprocess

from common import folio_version, machine, now, resume, save

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama_peer.py")
ARGUMENTS = ("rounds", "depth", "prompt", "gen", "threads", "batch")


def output(command):
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def folio(a):
    return output([a.folio, "bench", "engine", a.model, "--json", "--prefill", str(a.prompt), "--batch", a.batch, "--depth", str(a.depth),
                   "--decode", str(a.gen), "--repeat", "1", "--threads", str(a.threads)] + a.folio_args.split())


def llama(a):
    answer = output([a.llama_python, a.llama_bench, a.gguf, "--json", "--batch", a.batch, "--depth", str(a.depth), "--prompt", str(a.prompt),
                     "--gen", str(a.gen), "--threads", str(a.threads)])
    answer.pop("model", None)
    return answer


def rows(a, ours, theirs):
    """(what, folio t/s, llama.cpp t/s, share of the limit) of one round."""
    prefill = ours["prefill"][0]
    yield f"prefill {a.prompt}", prefill["tokens_per_s"], theirs[f"pp{a.prompt}"], prefill["share_of_limit"]
    for figure in ours["decode"]:
        peer = theirs[f"B{figure['batch']}"]["decode"]
        yield f"decode x{figure['batch']} at {a.depth}", figure["tokens_per_s"], peer, figure["share_of_limit"]


def measure(a, number):
    engines = {"folio": folio, "llama.cpp": llama}
    order = sorted(engines, reverse=number % 2 == 1)
    return {"at": now(), **{name: engines[name](a) for name in order}}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folio", "model", "gguf", "llama-python"):
        ap.add_argument(f"--{name}", required=True)
    ap.add_argument("--llama-bench", default=PEER, help="script that prints llama.cpp's rates as JSON")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--depth", type=int, default=128)
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--gen", type=int, default=16)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--batch", default="1,8,32")
    ap.add_argument("--folio-args", default="")
    ap.add_argument("--shape", help="name of the model in reports [default: from --model]")
    ap.add_argument("--format", help="of the weights, such as Q8_0, in reports")
    ap.add_argument("--out")
    a = ap.parse_args()
    arguments = {k: getattr(a, k) for k in ARGUMENTS}
    result = resume(a.out, arguments) or {"rounds": []}
    shape = a.shape or os.path.basename(a.model.rstrip("/")).split(".")[0]
    result = {"kind": "side_by_side", "shape": shape, "format": a.format, "arguments": arguments, "folio_args": a.folio_args,
              "files": [os.path.basename(f.rstrip("/")) for f in (a.model, a.gguf)], "machine": machine(),
              "versions": result.get("versions", []), "rounds": result["rounds"]}
    rounds = result["rounds"]
    while len(rounds) < a.rounds:
        rounds.append(measure(a, len(rounds)))
        versions = {"folio": folio_version(a.folio), "llama.cpp": rounds[-1]["llama.cpp"].get("version", "unknown")}
        if versions not in result["versions"]:
            result["versions"].append(versions)
        if a.out:
            save(a.out, result)
        for what, f, l, share in rows(a, rounds[-1]["folio"], rounds[-1]["llama.cpp"]):
            print(f"round {len(rounds)}  {what:22} folio {f:7.1f}  llama.cpp {l:7.1f}  {f / l:5.2f}x  {share:4.0%} of the limit", flush=True)
    middle = lambda name: statistics.median(r["folio"][name] for r in rounds)
    print(f"\nmedians of {len(rounds)}; read {middle('read_bytes_per_s') / 1e9:.1f} GB/s, "
          f"FMA {middle('f32_flop_per_s') / 1e9:.0f} GFLOP/s measured in the same runs\n")
    print("| | Folio t/s | llama.cpp t/s | ratio | share of the limit |\n|---|---|---|---|---|")
    for cell in zip(*(list(rows(a, r["folio"], r["llama.cpp"])) for r in rounds)):
        f, l, share = (statistics.median(row[i] for row in cell) for i in (1, 2, 3))
        ratio = statistics.median(row[1] / row[2] for row in cell)
        print(f"| {cell[0][0]} | {f:.1f} | {l:.1f} | {ratio:.2f} | {share:.0%} |")


if __name__ == "__main__":
    main()
