#!/usr/bin/env python3
"""What a disk tier is worth: more shared prefixes than memory holds, with a disk and without.

    disk_kv.py --folio target/release/folio --model DIR --dir FOLDER_ON_THE_DISK [--rounds 3] [--out results.json]

Clients in a closed loop ask for `--groups` prefixes of `--shared` random tokens in turn, each with `--unique` tokens of its own, and take
`--output` tokens. The KV cache has room for a quarter of the prefixes, so in turn none is in memory when it is asked for again. Rounds
alternate: without a disk, with one; every server and every folder is new. What counts is the time to the first token
of every request but the first of its prefix.
"""

import argparse
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


def first_token_s(address, prompt, output):
    connection = http.client.HTTPConnection(address, timeout=900)
    body = {"model": "m", "prompt": prompt, "max_tokens": output, "temperature": 0, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    first, text = None, b""
    while line := answer.readline():
        text += line
        if first is None and line.startswith(b"data: {"):
            first = time.perf_counter() - began
    assert answer.status == 200 and b"[DONE]" in text, text[:300]
    return first


def load(a, address, seed):
    rng = random.Random(seed)
    ids = lambda count: [rng.randrange(1000, 30000) for _ in range(count)]
    prefixes = [ids(a.shared) for _ in range(a.groups)]
    jobs = queue.Queue()
    for at in range(a.requests):
        jobs.put((at, prefixes[at % a.groups] + ids(a.unique)))
    taken, began = {}, time.perf_counter()

    def work():
        while True:
            try:
                at, prompt = jobs.get_nowait()
            except queue.Empty:
                return
            taken[at] = first_token_s(address, prompt, a.output)

    threads = [threading.Thread(target=work) for _ in range(a.clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(taken) == a.requests, "a request failed"
    again = sorted(taken[at] for at in taken if at >= a.groups)
    return {"seconds": time.perf_counter() - began, "first": statistics.median(taken[at] for at in range(a.groups)),
            "again_p50": statistics.median(again), "again_p99": again[int(0.99 * (len(again) - 1))], "again": again}


def once(a, with_disk, seed):
    folder = tempfile.mkdtemp(dir=a.dir)
    flags = ["--served-model-name", "m", "--device", "cpu", "--threads", str(a.threads), "--max-model-len", str(a.shared + a.unique + a.output + 64),
             "--kv-cache-memory", a.kv, "--max-num-seqs", str(max(a.clients, 4)), *a.folio_args.split()]
    if with_disk:
        flags += ["--disk-kv", folder, "--disk-kv-size", a.size]
    try:
        with Server(a.folio, a.model, flags) as server:
            run = load(a, server.address, seed)
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
    parser.add_argument("--size", default="16GiB")
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
        pair = {name: once(a, with_disk, seed) for name, with_disk in (("without", False), ("with", True))}
        result["rounds"].append(pair)
        line = lambda run: f"first {run['first']:.3f} s, again p50 {run['again_p50']:.3f} s, p99 {run['again_p99']:.3f} s, all {run['seconds']:.1f} s"
        print(f"without {line(pair['without'])}\nwith    {line(pair['with'])}", flush=True)
        if a.out:
            save(a.out, result)
    ratios = [pair["without"]["again_p50"] / pair["with"]["again_p50"] for pair in result["rounds"]]
    print(f"time to the first token of what came again: {statistics.median(ratios):.1f} times less with the disk ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
