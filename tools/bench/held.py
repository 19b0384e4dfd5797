#!/usr/bin/env python3
"""A model held to less memory than its weights take: whether it says the same, and what that costs.

    python random_gguf.py deepseek-v2-lite mixture.gguf --vocab ggml-vocab-NAME.gguf.gz --layers 24
    python held.py --folio PATH --model mixture.gguf --to 5000000000 [--prompts 4] [--prompt 64] [--gen 16] [--out results.json]

`folio serve` answers the same prompts of random tokens, greedily, one after the other: once with all memory, once in a memory cgroup (of the first
version, which must be writable) with a limit of `--to` bytes for everything that it touches, its packed weights in the page cache among it. These leave the page cache before, so that
the limited process is charged for them. Says whether the tokens are the same, and per generated token the page faults, those that read from the disk
apart, and the time. `FOLIO_PACKED_CACHE` names the folder of packed weights, which should be on a disk. Standard library only.
"""

import argparse
import json
import os
import random
import statistics
import time

from common import Server, folio_version, machine, now, resident, save

CGROUP = "/sys/fs/cgroup/memory/folio-held"


def forget(folder):
    """Takes the files of a folder out of the page cache."""
    os.sync()
    for name in os.listdir(folder):
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def faults(pid):
    """Page faults so far: served from memory, and read from a disk."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return int(fields[7]), int(fields[9])


def tokens(server, model, prompt, gen):
    body = {"model": model, "prompt": prompt, "max_tokens": gen, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    logprobs = [choice["logprobs"] for chunk in server.stream(body) for choice in chunk.get("choices", []) if choice.get("logprobs")]
    # With what each is worth: pieces that look alike, and logits that differ in a bit, are told apart.
    return [pair for of in logprobs for pair in zip(of["tokens"], of["token_logprobs"])]


def limit(cgroup, to):
    for name, value in (("limit_in_bytes", to), ("max_usage_in_bytes", 0)):
        with open(f"{cgroup}/memory.{name}", "w") as f:
            f.write(str(value))


def answers(a, prompts, cgroup=None):
    flags = ["--threads", str(a.threads), "--max-model-len", str(a.prompt + a.gen + 64), "--max-num-seqs", "1", "--kv-cache-memory", "256MiB"]
    forget(os.environ["FOLIO_PACKED_CACHE"])
    start = time.perf_counter()
    with Server(a.folio, a.model, flags, cgroup=cgroup) as server:
        result = {"at": now(), "start_s": time.perf_counter() - start, "start_faults": faults(server.pid), "texts": [], "of_prompts": []}
        if cgroup:
            limit(cgroup, a.to)
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        for prompt in prompts:
            figures, before, start = {}, faults(server.pid), time.perf_counter()
            # The prompt, and its first token; then all of them, of which the prompt is found in the cache.
            for what, gen in (("prompt", 1), ("generated", a.gen)):
                text = tokens(server, model, prompt, gen)
                after, end = faults(server.pid), time.perf_counter()
                figures[what] = {"seconds": end - start, "minor": after[0] - before[0], "major": after[1] - before[1], "resident": resident(server.pid)["VmRSS"]}
                assert len(text) == gen, text
                before, start = after, end
            result["texts"].append(text)
            result["of_prompts"].append(figures)
    return result


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--to", type=int, required=True, help="bytes")
    ap.add_argument("--prompts", type=int, default=4)
    ap.add_argument("--prompt", type=int, default=64)
    ap.add_argument("--gen", type=int, default=16)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--out")
    a = ap.parse_args()
    arguments = {key: value for key, value in vars(a).items() if key not in ("out", "folio", "model")}
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 30000) for _ in range(a.prompt)] for _ in range(a.prompts)]
    result = {"arguments": arguments, "machine": machine(), "folio": folio_version(a.folio), "model_bytes": os.path.getsize(a.model)}
    result["free"] = answers(a, prompts)
    os.makedirs(CGROUP, exist_ok=True)
    try:
        result["held"] = answers(a, prompts, cgroup=CGROUP)
        with open(f"{CGROUP}/memory.max_usage_in_bytes") as f:
            result["held"]["most_bytes"] = int(f.read())
    finally:
        os.rmdir(CGROUP)
    result["same"] = result["free"]["texts"] == result["held"]["texts"]
    if a.out:
        save(a.out, result)
    for name in ("free", "held"):
        of = result[name]
        print(f"{name}: ready after {of['start_s']:.1f} s, {of['start_faults'][0]} + {of['start_faults'][1]} faults; most resident {max(p['generated']['resident'] for p in of['of_prompts']) / 1e9:.2f} GB")
        for what, count in (("prompt", a.prompt), ("generated", a.gen)):
            per = lambda key: statistics.median(p[what][key] / count for p in of["of_prompts"])
            print(f"  {what}: {per('seconds') * 1e3:.1f} ms a token, {per('minor'):.1f} page faults from memory and {per('major'):.1f} from the disk")
    print(f"the limited one never held more than {result['held']['most_bytes'] / 1e9:.2f} GB; tokens and their probabilities are "
          + ("the same" if result["same"] else "NOT the same"))
    raise SystemExit(0 if result["same"] else 1)


if __name__ == "__main__":
    main()
