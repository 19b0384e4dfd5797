"""A router that speaks vLLM's KV events: what it knows from messages alone, to be compared with what the engine holds."""

import json
import random
import re
import struct
import time
import urllib.request

import msgspec
import zmq

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
MEDIA = ("GPU", "CPU", "STORAGE")


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

    def read(self):
        """One message, and those lost before it; false where none comes."""
        if not self.sub.poll(200):
            return False
        topic, number, payload = self.sub.recv_multipart()
        (number,) = struct.unpack(">Q", number)
        assert topic == b""
        if number < self.next:
            return True
        if self.rng.random() < self.lose:
            self.lost += 1
            return True
        if number > self.next:
            self.catch_up(number)
        if number == self.next:
            self.apply(payload)
        return True

    def follow(self, end, seconds=30):
        """Reads until it knows everything before message `end`."""
        limit = time.monotonic() + seconds
        while self.next < end:
            assert time.monotonic() < limit, (self.next, end)
            if not self.read():
                # The last ones were thrown away.
                self.catch_up(end)

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
                    there = parent is None or any((parent, medium) in self.held for medium in MEDIA)
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


def found_from_the_beginning(held):
    """Of what is held, what a prompt's beginning leads to: a tier may hold more, which waits for what stands before it."""
    reached, new = set(), {block for (block, _), (parent, _) in held.items() if parent is None}
    children = {}
    for (block, _), (parent, _) in held.items():
        children.setdefault(parent, set()).add(block)
    while new:
        reached |= new
        new = set().union(*(children.get(block, ()) for block in new)) - reached
    return {key: value for key, value in held.items() if key[0] in reached}


def knows(router, held):
    """All that a prompt leads to, and nothing that is not there."""
    reached = found_from_the_beginning(held)
    missing = {key for key in reached if router.held.get(key) != reached[key]}
    invented = {key for key in router.held if held.get(key) != router.held[key]}
    return not missing and not invented, (len(held), len(reached), sorted(missing)[:3], sorted(invented)[:3])


def config_of(**config):
    config = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "tenants": "*",
        **config,
    }
    return ["--admin-listen", "127.0.0.1:0", "--kv-events-config", json.dumps(config)]
