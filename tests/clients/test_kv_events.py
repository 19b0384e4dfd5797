"""KV events: what a router that speaks vLLM's wire format knows is what the engine holds, block for block."""

import json
import os
import random
import re
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request

import msgspec
import pytest
import zmq

REQUESTS = int(os.environ.get("FOLIO_KV_EVENTS_REQUESTS", "150"))
# Room for three prompts and host memory for what is preempted, so that everything happens to blocks that can.
SMALL = ["--device", "cpu", "--kv-cache-memory", "3MiB", "--host-kv-memory", "2MiB", "--max-num-seqs", "6"]
END = (1 << 64) - 1


# In the wire's own field order, as a consumer of vLLM's declares them.
class Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(EventBatch)


class Router:
    """Subscribes, throws some messages away, asks for them again, and keeps {(hash, medium): (parent, tokens)}."""

    def __init__(self, server, lose=0.0, seed=1):
        log = "".join(server.log)
        self.endpoint, self.replay_endpoint = re.search(r"KV events +(tcp://\S+), replay (tcp://\S+)", log).groups()
        self.rng, self.lose = random.Random(seed), lose
        self.held, self.next, self.lost, self.counts, self.salts = {}, 0, 0, {}, set()
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(self.endpoint)

    def close(self):
        self.context.destroy(linger=0)

    def replay(self, start):
        """[(number, payload)] of what is still there from `start` on."""
        socket = self.context.socket(zmq.DEALER)
        socket.connect(self.replay_endpoint)
        socket.send_multipart([b"", struct.pack(">Q", start)])
        replies = []
        while True:
            assert socket.poll(10_000), "no reply"
            empty, topic, number, payload = socket.recv_multipart()
            assert (empty, topic) == (b"", b"")
            (number,) = struct.unpack(">Q", number)
            if number == END:
                socket.close()
                return replies
            replies.append((number, payload))

    def catch_up(self, until):
        """Everything before message `until`, from the replay socket."""
        for number, payload in self.replay(self.next):
            if number >= until:
                break
            assert number == self.next, "a gap in a replay"
            self.apply(payload)
        assert self.next >= until, (self.next, until)

    def follow(self, end, seconds=30):
        """Reads until it knows everything before message `end`."""
        limit = time.monotonic() + seconds
        while self.next < end:
            assert time.monotonic() < limit, (self.next, end)
            if not self.sub.poll(200):
                # The last ones were thrown away.
                self.catch_up(end)
                continue
            topic, number, payload = self.sub.recv_multipart()
            (number,) = struct.unpack(">Q", number)
            assert topic == b""
            if number < self.next:
                continue
            if self.rng.random() < self.lose:
                self.lost += 1
                continue
            if number > self.next:
                self.catch_up(number)
            if number == self.next:
                self.apply(payload)

    def apply(self, payload):
        batch = DECODER.decode(payload)
        assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 600
        for event in batch.events:
            name = type(event).__name__
            if isinstance(event, BlockStored):
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
                assert event.lora_id is None and event.lora_name is None
                self.salts.update(key[0] for key in event.extra_keys or [] if key)
                parent = event.parent_block_hash
                for at, block in enumerate(event.block_hashes):
                    there = parent is None or any((parent, medium) in self.held for medium in ("GPU", "CPU"))
                    assert there, "a block before its parent"
                    assert (block, event.medium) not in self.held, "a block twice"
                    self.held[block, event.medium] = (parent, event.token_ids[at * size : (at + 1) * size])
                    parent = block
                    self.counts[name, event.medium] = self.counts.get((name, event.medium), 0) + 1
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.held[block, event.medium]
                    self.counts[name, event.medium] = self.counts.get((name, event.medium), 0) + 1
            else:
                self.held.clear()
                self.counts[name] = self.counts.get(name, 0) + 1
        self.next += 1


def admin(server, path, method="GET"):
    request = urllib.request.Request(server.admin + path, b"" if method == "POST" else None, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def engine_holds(server):
    """What the engine itself says it holds, when nothing happens any more, and the number of the next message."""
    server.wait_idle()
    before = None
    while True:
        after = admin(server, "/kv_events")["next_message"]
        blocks = admin(server, "/kv_events/blocks")["data"]
        if after == before:
            return {(of["hash"], of["medium"]): (of["parent"], of["token_ids"]) for of in blocks}, after
        before = after
        time.sleep(0.3)


def start(serve, *more, **config):
    config = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "tenants": "*",
        **config,
    }
    return serve(*SMALL, "--admin-listen", "127.0.0.1:0", "--kv-events-config", json.dumps(config), *more)


def ask(server, rng, key="none", max_tokens=None):
    topic = rng.randrange(8)
    words = random.Random(topic)
    shared = " ".join(f"Box {words.randrange(1000)} holds tea." for _ in range(rng.randrange(1, 90)))
    prompt = f"{shared} {rng.randrange(10**6)} " * rng.randrange(1, 2)
    body = {"model": "folio-demo", "prompt": prompt, "max_tokens": max_tokens or rng.choice((1, 20, 150)), "ignore_eos": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())["usage"]


def run(server, requests, seed, keys=("none",), threads=8):
    """Random prompts, several at once."""
    failures = []

    def client(number):
        rng = random.Random((seed, number).__hash__())
        try:
            for _ in range(requests // threads):
                ask(server, rng, rng.choice(keys))
                if rng.random() < 0.03:
                    admin(server, "/reset_prefix_cache", "POST")
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(threads)]
    [thread.start() for thread in clients]
    [thread.join() for thread in clients]
    assert not failures, (failures, "".join(server.log)[-4000:])
    # The last may have been a reset.
    ask(server, random.Random(seed), keys[0])


def test_after_a_long_random_run_a_router_knows_what_the_engine_holds_block_for_block(serve):
    server = start(serve)
    routers = [Router(server), Router(server, lose=0.2, seed=2)]
    for round in range(3):
        run(server, REQUESTS // 3, round)
        held, end = engine_holds(server)
        assert held, "nothing is cached"
        for router in routers:
            router.follow(end)
            assert router.held == held
    careful, careless = routers
    assert careful.lost == 0 and careless.lost > 20, careless.lost
    assert careful.counts == careless.counts
    for name in ("BlockStored", "BlockRemoved"):
        assert careful.counts[name, "GPU"] > 500, careful.counts
        assert (name, "CPU") not in careful.counts, "what a tier keeps is not told"
    assert server.metric("folio:kv_events_dropped_total") == 0
    assert server.metric("folio:kv_events_lost_total") == 0
    assert server.metric("folio:kv_events_subscribers") == 2
    assert server.metric("folio:kv_events_messages_total") == end
    for event in ("stored", "removed"):
        told = sum(n for (name, *_), n in careful.counts.items() if name == "Block" + event.capitalize())
        assert server.metric("folio:kv_events_published_total", event=event) == told
    [router.close() for router in routers]


def test_a_router_that_comes_late_is_told_all_of_it_on_demand(serve):
    server = start(serve, buffer_steps=4)
    run(server, 40, 5)
    held, end = engine_holds(server)
    router = Router(server)
    kept = router.replay(0)
    assert [number for number, _ in kept] == list(range(end - 4, end)), "what was given up is not repeated"
    assert router.replay(end) == [] and router.replay(END - 1) == []
    while server.metric("folio:kv_events_subscribers") < 1 or admin(server, "/kv_events")["subscribers"][0]["late"] is None:
        time.sleep(0.02)
    router.next = end
    assert admin(server, "/kv_events/republish", "POST")
    held, end = engine_holds(server)
    router.follow(end)
    assert router.held == held
    router.close()
    assert server.stop() == 0


def test_a_restart_clears_what_was_told_before(serve):
    server = start(serve)
    router = Router(server)
    run(server, 16, 9)
    _, end = engine_holds(server)
    router.follow(end)
    assert router.held
    assert server.stop() == 0
    router.follow(end + 1)
    assert not router.held, "the end is told"
    again = Router(start(serve))
    ((number, payload),) = again.replay(0)
    assert number == 0 and [type(of) for of in DECODER.decode(payload).events] == [AllBlocksCleared]
    router.close()
    again.close()


def test_only_those_tenants_are_told_whom_the_operator_named(serve):
    keys = ["--api-key", "alpha", "--api-key", "beta"]
    server = start(serve, *keys, tenants=["key:1"], tenant_extra_keys=True)
    # Metrics and health ask for no key here.
    router = Router(server)
    rng = random.Random(4)
    secret = [ask(server, rng, "beta", max_tokens=1) for _ in range(3)]
    told = [ask(server, rng, "alpha", max_tokens=1) for _ in range(2)]
    assert all(usage["prompt_tokens"] > 0 for usage in secret + told)
    held, end = engine_holds(server)
    router.follow(end)
    assert router.held == held and held
    assert router.salts == {"key:1"}
    blocks = sum(usage["prompt_tokens"] // 16 for usage in told)
    assert len(held) <= blocks + 2
    router.close()


def refused(*args):
    result = subprocess.run([os.environ["FOLIO_BIN"], "serve", "--port", "0", *args], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    return result.stderr


@pytest.mark.parametrize(
    "config, word",
    [
        ({}, '"tenants"'),
        ({"tenants": "*", "endpoint": "tcp://*:5557"}, "allow_remote"),
        ({"tenants": "*", "replay_endpoint": "tcp://0.0.0.0:5558"}, "allow_remote"),
        ({"tenants": "*", "buffer_step": 3}, "buffer_step"),
        ({"tenants": ["nobody"]}, "nobody"),
    ],
)
def test_what_would_let_prompts_out_unasked_is_refused_with_a_sentence(config, word):
    said = refused("--kv-events-config", json.dumps({"enable_kv_cache_events": True, **config}))
    assert "--kv-events-config" in said and word in said, said


def test_an_endpoint_alone_turns_nothing_on(serve):
    assert "enable_kv_cache_events" in refused("--kv-events-endpoint", "tcp://127.0.0.1:0")
    server = serve(*SMALL, "--admin-listen", "127.0.0.1:0")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        admin(server, "/kv_events/blocks")


def test_what_an_operator_sees_no_tenant_sees(serve):
    server = start(serve, "--admin-key", "root", "--api-key", "alpha")
    for path in ("/kv_events", "/kv_events/blocks"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            admin(server, path)
        request = urllib.request.Request(server.url + path, headers={"authorization": "Bearer alpha"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=30)


def test_maps_and_old_replies_are_a_switch(serve):
    server = start(serve, event_format="map", int_block_hashes=False, replay_topic=False, topic="kv@folio")
    ask(server, random.Random(1))
    server.wait_idle()
    end = admin(server, "/kv_events")["next_message"]
    _, replay = re.search(r"KV events +(tcp://\S+), replay (tcp://\S+)", "".join(server.log)).groups()
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(replay)
    socket.send(struct.pack(">Q", end - 1))
    assert socket.poll(10_000)
    number, payload = socket.recv_multipart()
    assert struct.unpack(">Q", number) == (end - 1,)
    _, (event, *_), _ = msgspec.msgpack.decode(payload)
    assert event["type"] == "BlockStored" and event["medium"] == "GPU" and event["block_size"] == 16
    assert all(len(of) == 32 for of in event["block_hashes"])
    context.destroy(linger=0)
