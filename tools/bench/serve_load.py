#!/usr/bin/env python3
"""The load that decides: many clients with shared prefixes on one server, and what memory it then holds.

    serve_load.py --folio target/release/folio --model FILE_OR_DIR [--runs 3] [--out results.json]

Starts `folio serve`, runs `folio bench serve` against it (64 requests from 16 clients in a closed loop; each prompt is one of 4 shared
prefixes of 512 tokens and 64 tokens of its own, all random ids; 48 tokens out), and reads the server's resident memory. Each run is a
new server, so that nothing is cached before the first request. With --url and without --folio's server: --url http://HOST:PORT
measures a server that is already running, such as llama-server or `python -m llama_cpp.server`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess

from common import Server, folio_version, machine, now, resident, resume, save


def load(a, url):
    command = [a.folio, "bench", "serve", "--url", url, "--json", "--warmup", "0", "--requests", str(a.requests), "--concurrency",
               str(a.clients), "--shared-prefixes", str(a.groups), "--prefix-len", str(a.shared), "--input-len", str(a.unique),
               "--output-len", str(a.output), "--token-ids", a.ids, "--timeout", "900"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def weight_bytes(a):
    command = [a.folio, "doctor", a.model, "--json", "--threads", str(a.threads)]
    quantize = re.search(r"--quantize (\w+)", a.folio_args)
    command += ["--quantize", quantize[1]] if quantize else []
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    return report["model"]["weight_bytes"]


def kv_bytes(server):
    """The whole cache, and how much of it was ever written."""
    metrics = server.get("/metrics")
    info = re.search(r'vllm:cache_config_info\{([^}]*)\}', metrics)[1]
    field = lambda name: int(re.search(rf'{name}="(\d+)"', info)[1])
    cached = re.findall(r'folio:kv_cache_blocks\{[^}]*state="(?:cached|active)"[^}]*\} (\d+)', metrics)
    size = field("bytes_per_block")
    return {"pool": field("num_gpu_blocks") * size, "used": sum(map(int, cached)) * size}


def once(a):
    flags = ["--threads", str(a.threads), "--max-model-len", "4096", "--kv-cache-memory", a.kv] + a.folio_args.split()
    with Server(a.folio, a.model, flags) as server:
        before = resident(server.pid)
        report = load(a, f"http://{server.address}")
        return {"at": now(), "load": report, "resident_before": before, "resident": resident(server.pid), "kv": kv_bytes(server)}


def line(run):
    load = run["load"]
    failed = load["requests"] - load["completed"]
    text = (f"{load['elapsed_s']:.1f} s, {load['output_tokens_per_s']:.1f} output t/s, TTFT p50 {load['ttft_ms']['p50'] / 1e3:.2f} s, "
            f"p99 {load['ttft_ms']['p99'] / 1e3:.2f} s, inter-token p50 {load['itl_ms']['p50']:.0f} ms, p99 {load['itl_ms']['p99']:.0f} ms, "
            f"{failed} failed, {load['cached_tokens']} of {load['prompt_tokens']} prompt tokens cached")
    if "over" in run:
        text += f"; resident {run['resident']['VmRSS'] / 2**20:.0f} MiB, {run['over']:+.1%} of weights and KV"
    return text


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--model", help="what Folio serves")
    ap.add_argument("--url", help="a running server instead")
    ap.add_argument("--runs", type=int, default=3)
    for name, default in (("requests", 64), ("clients", 16), ("groups", 4), ("shared", 512), ("unique", 64), ("output", 48)):
        ap.add_argument(f"--{name}", type=int, default=default)
    ap.add_argument("--ids", default="1000..40000")
    ap.add_argument("--kv", default="1GiB", help="memory for Folio's cache")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--folio-args", default="")
    ap.add_argument("--shape")
    ap.add_argument("--format")
    ap.add_argument("--out")
    a = ap.parse_args()
    if a.url:
        print(line({"load": load(a, a.url)}))
        return
    if not a.model:
        ap.error("--model or --url")
    names = ("requests", "clients", "groups", "shared", "unique", "output", "ids", "kv", "threads")
    arguments = {k: getattr(a, k) for k in names}
    old = resume(a.out, arguments) or {"runs": []}
    shape = a.shape or os.path.basename(a.model.rstrip("/")).split(".")[0]
    result = {"kind": "load", "shape": shape, "format": a.format, "arguments": arguments, "folio_args": a.folio_args, "machine": machine(),
              "versions": [{"folio": folio_version(a.folio)}], "weight_bytes": weight_bytes(a), "runs": old["runs"]}
    while len(result["runs"]) < a.runs:
        run = once(a)
        # Pages of the cache that were never written are not resident, so only the written ones are counted.
        run["over"] = run["resident"]["VmRSS"] / (result["weight_bytes"] + run["kv"]["used"]) - 1
        result["runs"].append(run)
        if a.out:
            save(a.out, result)
        print(f"run {len(result['runs'])}: {line(run)}", flush=True)
    print(f"median time {statistics.median(run['load']['elapsed_s'] for run in result['runs']):.1f} s")


if __name__ == "__main__":
    main()
