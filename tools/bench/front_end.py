#!/usr/bin/env python3
"""What a request costs the server beside the model: CPU of the server's process, and requests per second.

    front_end.py --server target/release/examples/front_end [--requests 20000] [--runs 3] [--out results.json]
    front_end.py --url http://127.0.0.1:8080 --pid PID [--out results.json]        another server, such as llama-server

The first starts the example `front_end`, whose executor computes next to nothing, with the built-in model's tokenizer and template. Requests of
32 prompt tokens and 8 generated ones go over 8 kept connections, each sending its next request when it has its answer. The client is this process;
the server's CPU is read before and after, of all its threads together and by the threads' names (Linux's schedstat, in nanoseconds).

Steps take a millisecond, so that each token of a stream is an event of its own and is written alone; --step-us 0 shows how many requests a second
are possible, where tokens that come together leave together.
"""

import argparse
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import time
import urllib.parse

from common import machine, now, save

HERE = os.path.dirname(os.path.abspath(__file__))
DEMO = os.path.normpath(os.path.join(HERE, "..", "..", "crates", "folio", "assets", "demo"))
KINDS = {
    "completions": ("/v1/completions", {"prompt": None}), "completions, streamed": ("/v1/completions", {"prompt": None, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": None}), "chat, streamed": ("/v1/chat/completions", {"messages": None, "stream": True}),
}
OUT = 8
WORDS = "the cat sat on a mat and looked at the small bird in the old tree by the river near our house".split()


def request(host, model, kind, words, number):
    """The bytes of one request, and no two alike."""
    path, fields = KINDS[kind]
    text = f"{number:06d} " + " ".join(WORDS[(number + i) % len(WORDS)] for i in range(words))
    body = dict(fields, model=model, max_tokens=OUT, temperature=0, ignore_eos=True)
    if "prompt" in body:
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    body = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Connection:
    """One request after the other on one socket."""
    accepted = (b"http/1.1 200",)

    def __init__(self, address):
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = bytearray()

    def send(self, data):
        self.data.clear()
        self.end = None
        self.socket.sendall(data)

    def receive(self):
        """Whether the answer is complete."""
        part = self.socket.recv(1 << 16)
        if not part:
            raise SystemExit(f"the server closed a connection after {bytes(self.data)!r}")
        self.data += part
        if self.end is None:
            at = self.data.find(b"\r\n\r\n")
            if at < 0:
                return False
            head = bytes(self.data[:at]).lower()
            if not head.startswith(self.accepted):
                raise SystemExit(f"not answered: {bytes(self.data)!r}")
            length = re.search(rb"content-length: (\d+)", head)
            self.end = at + 4 + int(length[1]) if length else b"\r\n0\r\n\r\n"
        return len(self.data) >= self.end if isinstance(self.end, int) else self.data.endswith(self.end)


def drive(address, requests, connections):
    """Sends all of them; the last answer."""
    selector = selectors.DefaultSelector()
    waiting = iter(requests)
    open_ = 0
    for _ in range(connections):
        connection = Connection(address)
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.send(next(waiting))
        open_ += 1
    last = b""
    while open_:
        for key, _ in selector.select():
            connection = key.data
            if not connection.receive():
                continue
            last = bytes(connection.data)
            following = next(waiting, None)
            if following is None:
                selector.unregister(connection.socket)
                connection.socket.close()
                open_ -= 1
            else:
                connection.send(following)
    return last


def cpu_ns(pid):
    """By the names of a process' threads."""
    out = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            name = open(f"/proc/{pid}/task/{task}/comm").read().strip()
            spent = int(open(f"/proc/{pid}/task/{task}/schedstat").read().split()[0])
        except OSError:
            continue
        out[name] = out.get(name, 0) + spent
    return out


def prompt_words(address, host, model, kind, wanted=32):
    """How many words make as many tokens."""
    plain = kind.split(",")[0]
    for words in range(1, wanted):
        last = drive(address, [request(host, model, plain, words, 123456)], 1).decode()
        tokens = int(re.search(r'"prompt_tokens":\s*(\d+)', last)[1])
        if tokens >= wanted:
            return words, tokens
    raise SystemExit("no text of 32 tokens")


def measure(a, pid, url, model):
    parts = urllib.parse.urlsplit(url)
    address, host = (parts.hostname, parts.port), parts.netloc
    out = {}
    for kind in KINDS:
        words, tokens = prompt_words(address, host, model, kind)
        make = lambda first, count: [request(host, model, kind, words, first + i) for i in range(count)]
        drive(address, make(500_000, max(a.connections, a.requests // 10)), a.connections)
        requests = make(0, a.requests)
        before, began = cpu_ns(pid), time.monotonic()
        last = drive(address, requests, a.connections)
        seconds, after = time.monotonic() - began, cpu_ns(pid)
        events = last.count(b"data: ")
        us = {name: (spent - before.get(name, 0)) / a.requests / 1e3 for name, spent in after.items()}
        us = {name: round(spent, 1) for name, spent in sorted(us.items()) if spent >= 0.05}
        out[kind] = {"requests": a.requests, "prompt_tokens": tokens, "events": events, "cpu_us": round(sum(us.values()), 1), "by_thread_us": us,
                     "requests_per_s": round(a.requests / seconds, 1)}
        print(f"{kind}: {out[kind]['cpu_us']} us of CPU a request, {out[kind]['requests_per_s']} requests/s; {events} events; {us}", flush=True)
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--server", help="the example front_end, built for release")
    ap.add_argument("--url")
    ap.add_argument("--pid", type=int)
    ap.add_argument("--model", default="modelled")
    ap.add_argument("--name", default="folio", help="of what is measured")
    ap.add_argument("--http-threads", type=int, default=1)
    ap.add_argument("--step-us", type=int, default=1000)
    ap.add_argument("--requests", type=int, default=20000)
    ap.add_argument("--connections", type=int, default=8)
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--out")
    a = ap.parse_args()
    if not a.server and not (a.url and a.pid):
        ap.error("--server, or --url and --pid")
    result = {"kind": "front-end", "name": a.name, "arguments": {k: getattr(a, k) for k in ("requests", "connections", "http_threads", "step_us")},
              "machine": machine(), "runs": []}
    for _ in range(a.runs):
        if not a.server:
            result["runs"].append({"at": now(), **measure(a, a.pid, a.url, a.model)})
        else:
            process = subprocess.Popen([a.server, "0", DEMO, str(a.http_threads), str(a.step_us)], stderr=subprocess.PIPE, text=True)
            try:
                url = process.stderr.readline().split()[-1]
                result["runs"].append({"at": now(), **measure(a, process.pid, url, a.model)})
            finally:
                process.terminate()
                process.wait()
        if a.out:
            save(a.out, result)
    for kind in KINDS:
        runs = [run[kind]["cpu_us"] for run in result["runs"]]
        print(f"{kind}: median {statistics.median(runs):.1f} us ({min(runs):.1f}..{max(runs):.1f})")


if __name__ == "__main__":
    main()
