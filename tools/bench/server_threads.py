#!/usr/bin/env python3
"""Which numbers of threads serve best: `--http-threads` and `--text-threads`, in turn on the built-in model.

    server_threads.py --folio target/release/folio [--rounds 3] [--out results.json]

Every round starts a server for each pair of numbers, in an order that is drawn, and sends it the same load (`folio bench serve`, a closed loop of
chats that are long enough not to be read on the event loop). The engine has a thread for each processor, as by default.
"""

import argparse
import json
import random
import statistics
import subprocess

from common import Server, cpu_seconds, folio_version, machine, now, save

PAIRS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
FIGURES = [("requests/s", lambda r: r["load"]["completed"] / r["load"]["elapsed_s"]), ("TTFT p50, ms", lambda r: r["load"]["ttft_ms"]["p50"]),
           ("TTFT p99", lambda r: r["load"]["ttft_ms"]["p99"]), ("inter-token p99", lambda r: r["load"]["itl_ms"]["p99"]),
           ("server's CPU per request, ms", lambda r: 1000 * r["cpu_s"] / r["load"]["completed"])]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--requests", type=int, default=400)
    ap.add_argument("--concurrency", type=int, default=16)
    ap.add_argument("--input-len", type=int, default=512)
    ap.add_argument("--output-len", type=int, default=16)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out")
    a = ap.parse_args()
    result = {"kind": "server-threads", "machine": machine(), "folio": folio_version(a.folio), "began": now(),
              "arguments": {k: getattr(a, k) for k in ("rounds", "requests", "concurrency", "input_len", "output_len", "seed")}, "runs": []}
    rng = random.Random(a.seed)
    for number in range(a.rounds):
        for http, text in rng.sample(PAIRS, len(PAIRS)):
            with Server(a.folio, "demo", ["--http-threads", str(http), "--text-threads", str(text)]) as server:
                command = [a.folio, "bench", "serve", "--url", f"http://{server.address}", "--json", "--endpoint", "chat", "--requests",
                           str(a.requests), "--concurrency", str(a.concurrency), "--input-len", str(a.input_len), "--output-len", str(a.output_len)]
                before = cpu_seconds(server.pid)
                load = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                result["runs"].append({"round": number, "http": http, "text": text, "load": load, "cpu_s": cpu_seconds(server.pid) - before})
            if a.out:
                save(a.out, result)
    print(table(result))


def table(result):
    """Medians over the rounds."""
    lines = ["| `--http-threads` | `--text-threads` | " + " | ".join(name for name, _ in FIGURES) + " |", "|---|---|" + "---|" * len(FIGURES)]
    for http, text in PAIRS:
        runs = [run for run in result["runs"] if (run["http"], run["text"]) == (http, text)]
        values = [[figure(run) for run in runs] for _, figure in FIGURES]
        cells = [f"{statistics.median(v):,.1f} ({min(v):,.1f}..{max(v):,.1f})" for v in values]
        lines.append(f"| {http} | {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
