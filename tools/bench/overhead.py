#!/usr/bin/env python3
"""What requests take beyond their time in the engine, at a fixed rate of requests.

    overhead.py --folio target/release/folio [--model demo] [--rate 200] [--seconds 30] [--runs 5] [--out results.json]

Serves a model with one engine thread, sends it chat or completion requests with Poisson arrivals (`folio bench serve`, on the same
machine), and reads `folio:request_overhead_seconds`: from a request's arrival to its last byte, less the time between the engine's taking
and ending it. So rendering, tokenizing, detokenizing, JSON, and every wait for the server's thread are in it; reading the body from a client that
sends slowly is not. Quantiles are read off the histogram, interpolated within a bucket.
"""

import argparse
import json
import re
import subprocess

from common import Server, folio_version, machine, now, save

METRIC = "folio:request_overhead_seconds"


def histogram(text):
    """[(edge, requests at or below it)]"""
    edges = re.findall(rf'{METRIC}_bucket{{[^}}]*le="([^"]+)"[^}}]*}} (\d+)', text)
    return [(float("inf") if edge == "+Inf" else float(edge), int(count)) for edge, count in edges]


def quantile(cells, q):
    wanted = q * cells[-1][1]
    low, below = 0.0, 0
    for edge, count in cells:
        if count >= wanted:
            return edge if edge == float("inf") else low + (edge - low) * (wanted - below) / max(1, count - below)
        low, below = edge, count
    return low


def run(arguments, endpoint):
    with Server(arguments.folio, arguments.model, ["--threads", "1"]) as server:
        command = [
            arguments.folio, "bench", "serve", "--url", f"http://{server.address}", "--rate", str(arguments.rate), "--endpoint", endpoint,
            "--requests", str(int(arguments.rate * arguments.seconds)), "--input-len", str(arguments.input_len), "--output-len", str(arguments.output_len), "--json",
        ]
        # Warm-up: the same for a fifth of the time.
        warm = command.copy()
        warm[command.index("--requests") + 1] = str(int(arguments.rate * arguments.seconds / 5))
        subprocess.run(warm, check=True, capture_output=True)
        before = histogram(server.get("/metrics"))
        load = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        after = histogram(server.get("/metrics"))
    cells = [(edge, count - earlier) for (edge, count), (_, earlier) in zip(after, before)]
    within = {edge: count for edge, count in cells}
    return {
        "endpoint": endpoint, "requests": cells[-1][1], "within_2_ms": within[0.002] / cells[-1][1],
        "ms": {name: 1000 * quantile(cells, q) for name, q in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)]},
        "histogram": [(edge if edge != float("inf") else None, count) for edge, count in cells], "load": load,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folio", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    results = {"what": "overhead", "machine": machine(), "folio": folio_version(arguments.folio), "began": now(), "rate": arguments.rate, "tokens": [arguments.input_len, arguments.output_len], "runs": []}
    for _ in range(arguments.runs):
        for endpoint in ["completions", "chat"]:
            result = run(arguments, endpoint)
            results["runs"].append(result)
            print(endpoint, result["requests"], {name: round(ms, 2) for name, ms in result["ms"].items()}, f"{100 * result['within_2_ms']:.2f} % within 2 ms", flush=True)
            if arguments.out:
                save(arguments.out, results)


if __name__ == "__main__":
    main()
