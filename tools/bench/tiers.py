#!/usr/bin/env python3
"""What tiers are worth: more shared prefixes than the KV cache holds, without a tier, with one in host memory, with one on disk.

    tiers.py --folio target/release/folio --model DIR --kv 96MiB --dir FOLDER_ON_THE_DISK [--rounds 3] [--out results.json]

Clients in a closed loop ask for `--groups` prefixes of `--shared` random tokens in turn, each with `--unique` tokens of its own, and take
`--output` tokens. The KV cache has room for a quarter of the prefixes, so in turn none is in it when it is asked for again. In a round
each variant runs once; every server and every folder is new. What counts is the time to the first token of every request but the first of
its prefix (`--workload conversations`: of every turn but a user's first). The variant `whole` has a KV cache for all prefixes: what is
left there is the queue and the suffix, and a tier can only add to that the time to read the bytes.

What is asked of tiers, each with --folio, --model, --dir, --out and --rounds 10 (`--kv` is a quarter of `--groups` prefixes, `--whole` all of them):

    served load            --requests 640 --clients 4 --groups 64 --shared 4096 --output 8
    nothing comes again    --requests 161 --groups 160 --shared 1024 --variants without memory disk     (one more, for what came again)
    multi-round QA         --workload conversations --groups 20 --shared 4096 --turns 5
"""

import argparse
import functools
import http.client
import json
import queue
import random
import shutil
import statistics
import tempfile
import threading
import time

from common import Server, folio_version, machine, now, resume, save


def ask(address, prompt, output):
    """Seconds to the first token, and the tokens of the answer."""
    connection = http.client.HTTPConnection(address, timeout=900)
    body = {"model": "m", "prompt": prompt, "max_tokens": output, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()[:300]
    first, ids = None, []
    while line := answer.readline():
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            if got := choice.get("token_ids"):
                first = first or time.perf_counter() - began
                ids += got
    assert len(ids) == output, f"{len(ids)} tokens instead of {output}"
    return first, ids


def in_turn(jobs, workers):
    """Each of `workers` threads takes the next job when it is done with one."""
    waiting = queue.Queue()
    for job in jobs:
        waiting.put(job)

    def work():
        while True:
            try:
                waiting.get_nowait()()
            except queue.Empty:
                return

    threads = [threading.Thread(target=work) for _ in range(workers)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


def conversations(a, address, seed):
    """Multi-round question answering, in the shape of LMCache's benchmark: every user has a long document of his own and asks `--turns`
    questions about it; a turn's prompt is the document, the questions and the answers so far. A user asks, then pauses for as long as it
    takes the others to have their turn."""
    rng = random.Random(seed)
    ids = lambda count: [rng.randrange(1000, 30000) for _ in range(count)]
    history = [ids(a.shared) for _ in range(a.groups)]
    questions = [[ids(a.unique) for _ in range(a.groups)] for _ in range(a.turns)]
    firsts, began = [[] for _ in range(a.turns)], time.perf_counter()
    for turn in range(a.turns):

        def one(user, turn=turn):
            history[user] += questions[turn][user]
            first, answer = ask(address, history[user], a.output)
            history[user] += answer
            firsts[turn].append(first)

        in_turn([functools.partial(one, user) for user in range(a.groups)], a.clients)
        assert len(firsts[turn]) == a.groups, "a request failed"
    again = sorted(first for turn in firsts[1:] for first in turn)
    return {"seconds": time.perf_counter() - began, "first": statistics.median(firsts[0]), "again_p50": statistics.median(again),
            "again_p99": again[int(0.99 * (len(again) - 1))], "again": again}


def cycle(a, address, seed):
    """Prefixes in turn."""
    rng = random.Random(seed)
    ids = lambda count: [rng.randrange(1000, 30000) for _ in range(count)]
    prefixes, tails = [ids(a.shared) for _ in range(a.groups)], [ids(a.unique) for _ in range(a.requests)]
    taken, began = {}, time.perf_counter()

    def one(at):
        taken[at], _ = ask(address, prefixes[at % a.groups] + tails[at], a.output)

    in_turn([functools.partial(one, at) for at in range(a.requests)], a.clients)
    assert len(taken) == a.requests, "a request failed"
    again = sorted(taken[at] for at in taken if at >= a.groups)
    return {"seconds": time.perf_counter() - began, "first": statistics.median(taken[at] for at in range(a.groups)),
            "again_p50": statistics.median(again), "again_p99": again[int(0.99 * (len(again) - 1))], "again": again}


WORKLOADS = {"cycle": cycle, "conversations": conversations}
VARIANTS = {
    "without": lambda a, folder: ["--kv-cache-memory", a.kv],
    "memory": lambda a, folder: ["--kv-cache-memory", a.kv, "--host-kv-memory", a.size],
    "disk": lambda a, folder: ["--kv-cache-memory", a.kv, "--disk-kv", folder, "--disk-kv-size", a.size],
    "whole": lambda a, folder: ["--kv-cache-memory", a.whole],
}


def once(a, variant, seed):
    folder = tempfile.mkdtemp(dir=a.dir)
    flags = ["--served-model-name", "m", "--device", a.device, *(["--threads", str(a.threads)] if a.device == "cpu" else []), "--max-model-len", str(a.shared + a.turns * (a.unique + a.output) + 64),
             "--max-num-seqs", str(max(a.clients, 4)), *VARIANTS[variant](a, folder), *a.folio_args.split()]
    try:
        with Server(a.folio, a.model, flags) as server:
            run = WORKLOADS[a.workload](a, server.address, seed)
            page = server.get("/metrics")
            run["metrics"] = [line for line in page.splitlines() if line.startswith(("folio:tier", "vllm:external", "vllm:cache_config_info"))]
            run["log"] = server.log.splitlines()[:12]
        run["at"] = now()
        return run
    finally:
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folio", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--kv", required=True, help="memory of the KV cache: a quarter of all prefixes")
    parser.add_argument("--whole", default="640MiB", help="memory of the KV cache of the variant `whole`: room for all prefixes")
    parser.add_argument("--size", default="4GiB", help="what a tier may hold")
    parser.add_argument("--workload", choices=WORKLOADS, default="cycle")
    parser.add_argument("--turns", type=int, default=5, help="of every user in the workload `conversations`")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folio-args", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--unique", type=int, default=64)
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    a = parser.parse_args()
    arguments = {key: value for key, value in vars(a).items() if key not in ("out", "dir", "folio")}
    result = resume(a.out, arguments) or {"arguments": arguments, "machine": machine(), "folio": folio_version(a.folio), "rounds": []}
    while len(result["rounds"]) < a.rounds:
        seed = len(result["rounds"])
        result["rounds"].append({variant: once(a, variant, seed) for variant in a.variants})
        for variant, run in result["rounds"][-1].items():
            times = f"first {run['first']:.3f} s, again p50 {run['again_p50']:.3f} s, p99 {run['again_p99']:.3f} s, all {run['seconds']:.1f} s"
            print(f"{variant:>8} {times}", flush=True)
        if a.out:
            save(a.out, result)
    for variant in a.variants[1:]:
        for what, name in (("again_p50", "time to the first token of what came again"), ("seconds", "the whole load")):
            ratios = [run[a.variants[0]][what] / run[variant][what] for run in result["rounds"]]
            print(f"{variant}, {name}: {statistics.median(ratios):.2f} times less than {a.variants[0]} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
