#!/usr/bin/env python3
"""Conversations of a model with recurrent layers that begin alike and then go apart: what is kept of their states, beside llama.cpp's checkpoints.

    python random_gguf.py qwen3.5-0.8b hybrid.gguf --vocab ggml-vocab-qwen2.gguf.gz --layers 8
    python hybrid_conversations.py --folio PATH --llama-server PATH --model hybrid.gguf --kv SIZE [--rounds 3] [--out results.json]

`--conversations` users share a beginning of `--shared` random tokens. In each turn every one of them, one after the other, adds `--unique` tokens of
its own and takes `--output`, so that a conversation comes back after all others had their turn. `--kv` is what Folio's cache may take: K and V
of all, and states of half of the conversations. llama.cpp gets as many slots as that, each with its context and its checkpoints: by its own defaults
(32 checkpoints a slot, and up to 8 GiB of prompts beside the slots), and without those 8 GiB. Timed by the client: the time to the first token
of each turn, those of the first turn apart, of which the very first computes what all share. One server at a time. Standard library only.
"""

import argparse
import http.client
import json
import random
import statistics
import time

from common import Server, folio_version, machine, now, resume, save
from llama_speculation import Llama


def ask(address, prompt, output):
    """Seconds to the first token, and the text."""
    connection = http.client.HTTPConnection(address, timeout=900)
    body = {"model": "m", "prompt": prompt, "max_tokens": output, "temperature": 0, "stream": True, "ignore_eos": True}
    began, first = time.perf_counter(), None
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"HTTP {answer.status}: {answer.read().decode()[:500]}")
    for line in answer:
        if line.startswith(b"data: {") and first is None and json.loads(line[6:]).get("choices"):
            first = time.perf_counter() - began
    return first


def load(a, address, seed):
    rng = random.Random(seed)
    ids = lambda count: [rng.randrange(1000, 30000) for _ in range(count)]
    shared, turns = ids(a.shared), []
    history = [list(shared) for _ in range(a.conversations)]
    for _ in range(a.turns):
        turn = []
        for own in history:
            # What was answered is left out: a history is the same for every engine.
            own += ids(a.unique)
            turn.append(ask(address, own, a.output))
        turns.append(turn)
    return {"at": now(), "first": turns[0][0], "begins": turns[0][1:], "again": [first for turn in turns[1:] for first in turn]}


def engines(a):
    context = a.shared + a.turns * (a.unique + a.output) + 64
    slots = a.conversations // 2
    folio = ["--served-model-name", "m", "--threads", str(a.threads), "--max-model-len", str(context), "--kv-cache-memory", a.kv, *a.folio_args.split()]
    llama = ["-np", str(slots), "-c", str(slots * context), "--no-kv-unified", "-fa", "on"]
    return {
        "folio": lambda: Server(a.folio, a.model, folio),
        "llama.cpp": lambda: Llama(a.llama_server, a.model, a.port, a.threads, llama),
        "llama.cpp, slots alone": lambda: Llama(a.llama_server, a.model, a.port, a.threads, [*llama, "--cache-ram", "0"]),
    }


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--llama-server", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--kv", required=True)
    ap.add_argument("--conversations", type=int, default=16)
    ap.add_argument("--turns", type=int, default=4)
    ap.add_argument("--shared", type=int, default=6144)
    ap.add_argument("--unique", type=int, default=100)
    ap.add_argument("--output", type=int, default=4)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--port", type=int, default=8099)
    ap.add_argument("--folio-args", default="")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--out")
    a = ap.parse_args()
    arguments = {key: value for key, value in vars(a).items() if key not in ("out", "folio", "llama_server", "model", "port")}
    result = resume(a.out, arguments) or {"arguments": arguments, "machine": machine(), "folio": folio_version(a.folio), "rounds": []}
    while len(result["rounds"]) < a.rounds:
        done = {}
        for name, start in engines(a).items():
            with start() as server:
                done[name] = load(a, server.address, len(result["rounds"]))
                if name == "folio":
                    done[name]["log"] = [line for line in server.log.splitlines() if "KV cache" in line or "states" in line]
            again = done[name]["again"]
            print(f"{name:>24} first {done[name]['first']:.2f} s, begins p50 {statistics.median(done[name]['begins']):.3f} s, "
                  f"again p50 {statistics.median(again):.3f} s, most {max(again):.3f} s", flush=True)
        result["rounds"].append(done)
        if a.out:
            save(a.out, result)
    for name in list(engines(a))[1:]:
        for what in ("begins", "again"):
            ratios = [statistics.median(r[name][what]) / statistics.median(r["folio"][what]) for r in result["rounds"]]
            print(f"{what}: folio's time to the first token is {statistics.median(ratios):.1f} times shorter than {name}'s ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
