"""Time from process start to the first streamed token over HTTP, and resident memory afterwards.

    python3 tools/bench/start_time.py target/release/folio MODEL [MODEL ...] [--runs 5] [--flags "--quantize q8"] [--out F]

Each run starts `folio serve MODEL`, connects as soon as the port is open, streams one completion, and stops the server.
One `folio run` goes before, which keeps the packed form. Times are wall clock from just before the process is spawned;
beside them is the processor time used until then. Needs nothing but Python's standard library.
"""

import argparse
import http.client
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

PROMPT = "The capital of France is"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def memory(pid):
    """VmRSS, RssAnon, RssFile in MiB; pages of huge mappings are in the first two."""
    with open(f"/proc/{pid}/status") as f:
        fields = dict(line.split(":", 1) for line in f if ":" in line)
    return {k: int(fields[k].split()[0]) // 1024 for k in ("VmRSS", "RssAnon", "RssFile")}


def cpu_seconds(pid):
    """Processor time of all threads so far: what a busy machine stretches, but does not change much."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return round((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 2)


def one(binary, model, flags, env):
    port = free_port()
    log = tempfile.TemporaryFile("w+")
    command = [binary, "serve", model, "--port", str(port), *flags]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        while True:
            try:
                link = socket.create_connection(("127.0.0.1", port), timeout=600)
                break
            except ConnectionRefusedError:
                if server.poll() is not None:
                    log.seek(0)
                    sys.exit(f"the server ended: {log.read()}")
                time.sleep(0.002)
        listening = time.perf_counter() - start
        loaded, loaded_cpu = memory(server.pid), cpu_seconds(server.pid)
        http_link = http.client.HTTPConnection("127.0.0.1", port)
        http_link.sock = link
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True,
                           "ignore_eos": True})
        http_link.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = http_link.getresponse()
        if response.status != 200:
            sys.exit(f"{response.status}: {response.read()[:400]}")
        line = response.readline()
        while line and not (line.startswith(b"data: {") and json.loads(line[6:])["choices"]):
            line = response.readline()
        first = time.perf_counter() - start
        first_cpu = cpu_seconds(server.pid)
        response.read()
        return {"listening_s": round(listening, 3), "first_token_s": round(first, 3), "listening_cpu_s": loaded_cpu,
                "first_token_cpu_s": first_cpu, "loaded_mib": loaded, "served_mib": memory(server.pid)}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        log.seek(0)
        one.log = log.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--flags", default="")
    parser.add_argument("--note", default="")
    parser.add_argument("--out")
    parser.add_argument("--log", action="store_true", help="print what the last server wrote")
    args = parser.parse_args()
    flags = ["--served-model-name", "m", *args.flags.split()]
    passed = ("FOLIO_ISA", "FOLIO_LOG", "FOLIO_PACKED_CACHE")
    env = {k: v for k, v in os.environ.items() if not k.startswith("FOLIO_") or k in passed}
    results = []
    for model in args.models:
        start = time.perf_counter()
        subprocess.run([args.binary, "run", model, "Hello", "--raw", "--max-tokens", "1", *args.flags.split()], env=env,
                       check=True, capture_output=True)
        before = round(time.perf_counter() - start, 2)
        runs = [one(args.binary, model, flags, env) for _ in range(args.runs)]
        entry = {"model": os.path.basename(model.rstrip("/")), "flags": args.flags, "folio_run_before_s": before, "runs": runs,
                 "median_listening_s": statistics.median(r["listening_s"] for r in runs),
                 "median_first_token_s": statistics.median(r["first_token_s"] for r in runs),
                 "median_first_token_cpu_s": statistics.median(r["first_token_cpu_s"] for r in runs)}
        results.append(entry)
        print(f"{entry['model']} {args.flags}: listening {entry['median_listening_s']:.3f} s, first token "
              f"{entry['median_first_token_s']:.3f} s ({entry['median_first_token_cpu_s']} s of processor time), "
              f"{runs[-1]['served_mib']}")
        if args.log:
            print(one.log)
    if args.out:
        cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
        with open(args.out, "w") as f:
            json.dump({"what": "process start to the first streamed token", "cpu": cpu, "cpus": os.cpu_count(),
                       "kernel": platform.release(), "load_average": os.getloadavg(), "note": args.note, "results": results}, f, indent=1)
            f.write("\n")


main()
