#!/usr/bin/env python3
"""Decoding alone at a great depth, Folio and llama.cpp in turn, without reading the prompt again for every pair.

    depth.py --folio target/release/folio --model FILE_OR_DIR --gguf FILE --llama-python PYTHON [--depth 8192] [--pairs 7] [--gen 32]
        [--out results.json]

Both engines are resident, each reads its prompt once, and then each decodes a few tokens in turn: Folio over HTTP with the prompt found
in its cache, llama.cpp in its process, which takes the decoded tokens out of its cache again. While one is timed the other only
waits: the CPU time it used is written down. Folio's rate is that of the tokens after the first, as a client sees them arrive.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time

from common import Server, cpu_seconds, folio_version, machine, now, resume, save
from side_by_side import PEER


class Folio:
    name = "folio"

    def __init__(self, a):
        flags = ["--threads", str(a.threads), "--max-model-len", str(a.depth + 256), "--max-num-seqs", "1", "--kv-cache-share", "0.2"]
        self.server = Server(a.folio, a.model, flags + a.folio_args.split())
        model = json.loads(self.server.get("/v1/models"))["data"][0]["id"]
        rng = random.Random(0)
        self.body = {"model": model, "prompt": [rng.randrange(*a.ids) for _ in range(a.depth)], "temperature": 0, "ignore_eos": True}
        self.prefill = a.depth / self.times(1)[0]

    def times(self, tokens):
        """Seconds to each token, of the chunks that carry one."""
        start, times, usage = time.perf_counter(), [], None
        for chunk in self.server.stream(dict(self.body, max_tokens=tokens, logprobs=0, stream_options={"include_usage": True})):
            at = time.perf_counter() - start
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                times += [at] * len((choice.get("logprobs") or {}).get("tokens", []))
        assert len(times) == tokens == usage["completion_tokens"], (len(times), usage)
        self.cached = usage["prompt_tokens_details"]["cached_tokens"]
        return times

    def decode(self, tokens):
        times = self.times(tokens + 1)
        assert self.cached >= len(self.body["prompt"]) - 64, f"only {self.cached} tokens of the prompt were cached"
        return tokens / (times[-1] - times[0])

    @property
    def pid(self):
        return self.server.pid

    def close(self):
        self.server.__exit__()


class Llama:
    name = "llama.cpp"

    def __init__(self, a):
        command = [a.llama_python, PEER, a.gguf, "--serve", "--depth", str(a.depth), "--threads", str(a.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        ready = json.loads(self.process.stdout.readline() or "{}")
        assert ready.get("ready"), "the script for llama.cpp ended"
        self.prefill, self.version = ready["prefill"], ready["version"]

    def decode(self, tokens):
        self.process.stdin.write(f"decode {tokens}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["decode"]

    @property
    def pid(self):
        return self.process.pid

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def pair(engines, number, gen):
    result = {"at": now()}
    for name in sorted(engines, reverse=number % 2 == 1):
        (other,) = (e for n, e in engines.items() if n != name)
        before, start = cpu_seconds(other.pid), time.perf_counter()
        rate = engines[name].decode(gen)
        idle = (cpu_seconds(other.pid) - before) / (time.perf_counter() - start)
        result[name] = {"tokens_per_s": rate, "cpus_used_by_the_other": round(idle, 3)}
    return result


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folio", "model", "gguf", "llama-python"):
        ap.add_argument(f"--{name}", required=True)
    ap.add_argument("--depth", type=int, default=8192)
    ap.add_argument("--pairs", type=int, default=7)
    ap.add_argument("--gen", type=int, default=32)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--ids", default="1000..40000", help="token ids of the prompt")
    ap.add_argument("--folio-args", default="")
    ap.add_argument("--shape")
    ap.add_argument("--format")
    ap.add_argument("--out")
    a = ap.parse_args()
    a.ids = tuple(int(end) for end in a.ids.split(".."))
    arguments = {k: getattr(a, k) for k in ("depth", "gen", "threads")}
    old = resume(a.out, arguments) or {"pairs": []}
    shape = a.shape or os.path.basename(a.model.rstrip("/")).split(".")[0]
    result = {"kind": "depth", "shape": shape, "format": a.format, "arguments": arguments, "folio_args": a.folio_args, "machine": machine(),
              "prefill": old.get("prefill", []), "pairs": old["pairs"]}
    if len(result["pairs"]) >= a.pairs:
        print("nothing left to measure")
        return
    print("reading the prompt in both ...", flush=True)
    engines = {}
    try:
        for engine in (Folio, Llama):
            engines[engine.name] = engine(a)
            print(f"{engine.name}: prefill of {a.depth} at {engines[engine.name].prefill:.1f} t/s", flush=True)
        result["prefill"].append({name: engine.prefill for name, engine in engines.items()})
        result["versions"] = [{"folio": folio_version(a.folio), "llama.cpp": engines["llama.cpp"].version}]
        pair(engines, 0, 4)  # not counted
        while len(result["pairs"]) < a.pairs:
            result["pairs"].append(pair(engines, len(result["pairs"]), a.gen))
            if a.out:
                save(a.out, result)
            f, l = (result["pairs"][-1][name] for name in ("folio", "llama.cpp"))
            print(f"pair {len(result['pairs'])}  folio {f['tokens_per_s']:6.2f}  llama.cpp {l['tokens_per_s']:6.2f}  "
                  f"{f['tokens_per_s'] / l['tokens_per_s']:5.2f}x   (the waiting one used {f['cpus_used_by_the_other']} and "
                  f"{l['cpus_used_by_the_other']} CPUs)", flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    ratio = [p["folio"]["tokens_per_s"] / p["llama.cpp"]["tokens_per_s"] for p in result["pairs"]]
    print(f"\nmedian of {len(ratio)} pairs: {statistics.median(ratio):.2f}x ({min(ratio):.2f} to {max(ratio):.2f})")


if __name__ == "__main__":
    main()
