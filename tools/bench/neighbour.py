#!/usr/bin/env python3
"""What an attacker at its limits does to another tenant's latency, in pairs: the victim alone, and the victim beside the attacker.

    neighbour.py --folio target/release/folio [--model demo] [--rounds 6] [--requests 300] [--out results.json]

One server, two keys. The victim sends completions of about 32 prompt tokens and 8 generated ones at a fixed rate on one kept connection. A round has it
alone and, for each attack, beside an attacker, in an order that is drawn; the attacker is a process of its own with as many connections as its tenant
may have requests at once, each sending its next request when it has its answer. Reported are the victim's p50 and p99 of all rounds and the ratio of
each round's p99 to that of the same round alone.

Clients stand for other machines and share this one's processors: the attacker's runs when nobody else wants one (SCHED_IDLE), the victim's before
everybody (SCHED_FIFO, where that is allowed), alone and beside. What sharing costs nevertheless is in two controls: a process that only computes, and an attacker
whose requests go to a second server. A cell during which other processes took more than a tenth of a processor is measured again. A run that was
stopped goes on where it was, with the same --out. Standard library only.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time

from common import Server, cpu_seconds, folio_version, machine, now, resume, save
from front_end import Connection

AT_ONCE = 4
TENANTS = {"tenants": [{"name": "attacker", "keys": ["bad"], "limits": {"max_concurrent_requests": AT_ONCE}},
                       {"name": "refused", "keys": ["worse"], "limits": {"requests_per_minute": 60}},
                       {"name": "victim", "keys": ["good"]}]}
# Stands for a number of as many digits, another in each request: what was tokenized before is kept.
NUMBER = "<number>"
ATTACKS = {
    "256 kB to tokenize": ("bad", "/tokenize", {"prompt": NUMBER + " a cat and some other words" * 9700}),
    "256 kB to tokenize, the same again": ("bad", "/tokenize", {"prompt": "a cat and some other words " * 9700}),
    "1 MB that is too long": ("bad", "/v1/completions", {"prompt": "a cat and some other words " * 38800, "max_tokens": 1}),
    "250,000 JSON values": ("bad", "/v1/completions", {"prompt": [[1] * 8] * 28000, "max_tokens": 1}),
    "64 tokens generated, streamed": ("bad", "/v1/completions", {"prompt": "the cat", "max_tokens": 64, "ignore_eos": True, "stream": True}),
    "beyond its rate": ("worse", "/v1/completions", {"prompt": "the cat", "max_tokens": 1}),
}
CONTROLS = {"control: a process that only computes": None, "control: 250,000 JSON values, to a second server": "250,000 JSON values"}
# Of a processor, taken by processes that do not belong here; and how often a cell is measured at most.
OTHERS, TRIES = 0.1, 20
VICTIM = {"prompt": "the cat sat on a mat and looked at the small bird in the old tree by the river near our house", "max_tokens": 8,
          "ignore_eos": True, "temperature": 0}


def message(host, key, path, body):
    body = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n")
    return head.encode() + body


class Any(Connection):
    """Takes refusals too."""
    accepted = (b"http/1.1 200", b"http/1.1 400", b"http/1.1 429")


def background():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def first():
    """Whether this process runs before all others from now on, though not what it starts."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True


def busy_seconds():
    """Of all processors so far, what the host took of them included."""
    user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in open("/proc/stat").readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def undisturbed(measure):
    """The first cell beside which nobody else worked, or the one with the least of it."""
    best = None
    for _ in range(TRIES):
        cell = measure()
        if best is None or cell["others_cpus"] < best["others_cpus"]:
            best = cell
        if best["others_cpus"] <= OTHERS:
            break
    return best


def computes(ended):
    background()
    while not ended.is_set():
        sum(range(10_000))


def attacker(host, data, ended, answered):
    background()
    import selectors
    selector = selectors.DefaultSelector()
    address = (host.split(":")[0], int(host.split(":")[1]))
    before, *behind = data.split(NUMBER.encode())
    numbers = itertools.count()
    another = lambda: before + b"".join(b"%0*d" % (len(NUMBER), next(numbers)) + rest for rest in behind)
    for _ in range(AT_ONCE):
        connection = Any(address)
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.send(another())
    while not ended.is_set():
        for key, _ in selector.select(0.1):
            if key.data.receive():
                answered.value += 1
                key.data.send(another())


def victim(host, data, requests, rate):
    connection = Connection((host.split(":")[0], int(host.split(":")[1])))
    begun, took = time.perf_counter(), []
    for at in range(requests):
        time.sleep(max(0.0, begun + at / rate - time.perf_counter()))
        sent = time.perf_counter()
        connection.send(data)
        while not connection.receive():
            pass
        took.append(1000 * (time.perf_counter() - sent))
    connection.socket.close()
    return took


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--rounds", type=int, default=6)
    ap.add_argument("--requests", type=int, default=1000)
    ap.add_argument("--rate", type=float, default=100)
    ap.add_argument("--folio-args", default="--threads 1")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out")
    a = ap.parse_args()
    arguments = {k: getattr(a, k) for k in ("rounds", "requests", "rate", "folio_args", "seed")}
    result = resume(a.out, arguments) or {"kind": "neighbour", "machine": machine(), "folio": folio_version(a.folio), "began": now(),
                                          "arguments": arguments, "at_once": AT_ONCE, "rounds": []}
    with tempfile.TemporaryDirectory() as folder:
        tenants = os.path.join(folder, "tenants.json")
        json.dump(TENANTS, open(tenants, "w"))
        flags = ["--tenants", tenants, *a.folio_args.split()]
        with Server(a.folio, a.model, flags) as server, Server(a.folio, a.model, flags) as second:
            host = server.address
            result["victim_first"] = first()
            asked = message(host, "good", "/v1/completions", VICTIM)
            victim(host, asked, 100, a.rate)
            for number in range(len(result["rounds"]), a.rounds):
                order = ["alone", *ATTACKS, *CONTROLS]
                random.Random(f"{a.seed} {number}").shuffle(order)
                result["rounds"].append({what: undisturbed(lambda: cell(a, server, second, what, asked)) for what in order})
                if a.out:
                    save(a.out, result)
    print(table(result))


def cell(a, server, second, what, asked):
    """The victim beside `what`."""
    attack, pids, process = CONTROLS.get(what, what), [server.pid, second.pid, os.getpid()], None
    ended, answered = multiprocessing.Event(), multiprocessing.Value("q", 0)
    if what != "alone":
        host = second.address if what in CONTROLS else server.address
        target = (computes, (ended,)) if attack is None else (attacker, (host, message(host, *ATTACKS[attack]), ended, answered))
        process = multiprocessing.Process(target=target[0], args=target[1])
        process.start()
        pids.append(process.pid)
        time.sleep(0.5)
    ours = lambda: sum(cpu_seconds(pid) for pid in pids)
    before, cpu, busy, own, began = answered.value, cpu_seconds(server.pid), busy_seconds(), ours(), time.monotonic()
    took = victim(server.address, asked, a.requests, a.rate)
    seconds = time.monotonic() - began
    others = (busy_seconds() - busy) - (ours() - own)
    out = {"ms": [round(ms, 3) for ms in took], "server_cpus": round((cpu_seconds(server.pid) - cpu) / seconds, 2),
           "others_cpus": round(others / seconds, 2), "answered_per_s": round((answered.value - before) / seconds, 1)}
    if process:
        ended.set()
        process.join()
    return out


def table(result):
    """For docs/security.md."""
    rounds = result["rounds"]
    lines = ["| attacker | its answers per s | victim's p50, ms | p99, ms | p99 beside / alone |", "|---|---|---|---|---|"]
    for what in [what for what in ["alone", *ATTACKS, *CONTROLS] if what in rounds[0]]:
        every = [ms for one in rounds for ms in one[what]["ms"]]
        ratios = [quantile(one[what]["ms"], 0.99) / quantile(one["alone"]["ms"], 0.99) for one in rounds]
        rate = "" if CONTROLS.get(what, what) in ("alone", None) else f"{statistics.median(one[what]['answered_per_s'] for one in rounds):,.0f}"
        ratio = "" if what == "alone" else f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        name = "none" if what == "alone" else what
        lines.append(f"| {name} | {rate} | {quantile(every, 0.5):.2f} | {quantile(every, 0.99):.2f} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
