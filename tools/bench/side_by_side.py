#!/usr/bin/env python3
"""Folio and llama.cpp on the same machine, in turn, so that both meet the same noise.

    side_by_side.py --folio target/release/folio --model DIR --gguf FILE --llama-python PYTHON
        [--rounds 5] [--depth 128] [--batch 1,8,32] [--prompt 512] [--gen 16] [--out results.json]
    side_by_side.py --folio target/release/folio --model DIR --peer 'NAME=COMMAND' [--peer ...] [as above]

`DIR` is a Hugging Face folder (or the same GGUF file) and `FILE` the same weights for llama.cpp; `PYTHON` an interpreter with
llama-cpp-python. Each round runs one after the other, and which of them is first changes from round to round. Prints medians, the
ratio, and the share of the limits that `folio bench engine` measured in the same process; writes every raw figure to --out, after
every round. Run again with the same --out to go on where it stopped.

`--peer` is any other engine: `COMMAND`, to which --batch, --depth, --prompt, --gen and --threads are added, prints the JSON of ik_peer.py and
openvino_peer.py. Several may be given, and a round runs each of them; the order turns by one from round to round.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys

from common import folio_version, machine, now, resume, save

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama_peer.py")
ARGUMENTS = ("rounds", "depth", "prompt", "gen", "threads", "batch")


def output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\nexit code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def folio(a):
    return output([a.folio, "bench", "engine", a.model, "--json", "--prefill", str(a.prompt), "--batch", a.batch, "--depth", str(a.depth),
                   "--decode", str(a.gen), "--repeat", "1", "--threads", str(a.threads)] + a.folio_args.split())


def flags(a):
    return ["--batch", a.batch, "--depth", str(a.depth), "--prompt", str(a.prompt), "--gen", str(a.gen), "--threads", str(a.threads)]


def llama(a):
    answer = output([a.llama_python, a.llama_bench, a.gguf, "--json", *flags(a)])
    answer.pop("model", None)
    return answer


def peers(a):
    """name -> how to measure it."""
    named = dict(text.split("=", 1) for text in a.peer)
    engines = {name: lambda a, command=command: output(shlex.split(command) + flags(a)) for name, command in named.items()}
    return engines or {"llama.cpp": llama}


def rows(arguments, ours, theirs):
    """(what, folio t/s, the peer's t/s, share of the limit) of one round."""
    prefill, prompt, depth = ours["prefill"][0], arguments["prompt"], arguments["depth"]
    yield f"prefill {prompt}", prefill["tokens_per_s"], theirs[f"pp{prompt}"], prefill["share_of_limit"]
    for figure in ours["decode"]:
        peer = theirs[f"B{figure['batch']}"]["decode"]
        yield f"decode x{figure['batch']} at {depth}", figure["tokens_per_s"], peer, figure["share_of_limit"]


def turned(names, number):
    """Who is measured when: everybody is first once in as many rounds as there are engines."""
    names = sorted(names)
    return names[number % len(names):] + names[:number % len(names)]


def measure(a, number):
    engines = {"folio": folio, **peers(a)}
    return {"at": now(), **{name: engines[name](a) for name in turned(engines, number)}}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folio", "model"):
        ap.add_argument(f"--{name}", required=True)
    for name in ("gguf", "llama-python"):
        ap.add_argument(f"--{name}", help="for llama.cpp, where no --peer is named")
    ap.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another engine than llama.cpp; may be repeated")
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
    if bool(a.peer) == bool(a.gguf or a.llama_python) or bool(a.gguf) != bool(a.llama_python):
        ap.error("name either --peer, or for llama.cpp both of --gguf and --llama-python")
    names = list(peers(a))
    arguments = {**{k: getattr(a, k) for k in ARGUMENTS}, **({"peers": names} if a.peer else {})}
    result = resume(a.out, arguments) or {"rounds": []}
    shape = a.shape or os.path.basename(a.model.rstrip("/")).split(".")[0]
    result = {"kind": "peers" if a.peer else "side_by_side", "shape": shape, "format": a.format, "arguments": arguments, "folio_args": a.folio_args,
              "files": [os.path.basename(f.rstrip("/")) for f in (a.model, a.gguf) if f], "machine": machine(),
              "versions": result.get("versions", []), "rounds": result["rounds"]}
    rounds = result["rounds"]
    while len(rounds) < a.rounds:
        rounds.append(measure(a, len(rounds)))
        versions = {"folio": folio_version(a.folio), **{name: rounds[-1][name].get("version", "unknown") for name in names}}
        if versions not in result["versions"]:
            result["versions"].append(versions)
        if a.out:
            save(a.out, result)
        for name in names:
            for what, f, l, share in rows(arguments, rounds[-1]["folio"], rounds[-1][name]):
                print(f"round {len(rounds)}  {what:22} folio {f:7.1f}  {name} {l:7.1f}  {f / l:5.2f}x  {share:4.0%} of the limit", flush=True)
    middle = lambda name: statistics.median(r["folio"][name] for r in rounds)
    print(f"\nmedians of {len(rounds)}; read {middle('read_bytes_per_s') / 1e9:.1f} GB/s, "
          f"FMA {middle('f32_flop_per_s') / 1e9:.0f} GFLOP/s measured in the same runs\n")
    for name in names:
        print(f"| | Folio t/s | {name} t/s | ratio | share of the limit |\n|---|---|---|---|---|")
        for cell in zip(*(list(rows(arguments, r["folio"], r[name])) for r in rounds)):
            f, l, share = (statistics.median(row[i] for row in cell) for i in (1, 2, 3))
            ratio = statistics.median(row[1] / row[2] for row in cell)
            print(f"| {cell[0][0]} | {f:.1f} | {l:.1f} | {ratio:.2f} | {share:.0%} |")


if __name__ == "__main__":
    main()
