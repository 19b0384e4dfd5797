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
from kv_router import DECODER, END, MEDIA, AllBlocksCleared, Router, admin, config_of, engine_holds, knows

REQUESTS = int(os.environ.get("FOLIO_KV_EVENTS_REQUESTS", "150"))
# Room for three prompts and host memory for what is preempted, so that everything happens to blocks that can.
SMALL = ["--device", "cpu", "--kv-cache-memory", "3MiB", "--host-kv-memory", "2MiB", "--max-num-seqs", "6"]
# Room for a few prompts more.
DISK = "8MiB"


def start(serve, *more, **config):
    return serve(*SMALL, *config_of(**config), *more)


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


def test_after_a_long_random_run_a_router_knows_what_the_engine_holds_block_for_block(serve, tmp_path):
    server = start(serve, "--disk-kv", str(tmp_path), "--disk-kv-size", DISK)
    routers = [Router(server), Router(server, lose=0.2, seed=2)]
    for round in range(3):
        run(server, REQUESTS // 3, round)
        held, end = engine_holds(server)
        assert held, "nothing is cached"
        for router in routers:
            router.follow(end)
            right, why = knows(router, held)
            assert right, why
    careful, careless = routers
    assert careful.held == careless.held
    assert careful.lost == 0 and careless.lost > 20, careless.lost
    assert careful.counts == careless.counts
    for name in ("BlockStored", "BlockRemoved"):
        for medium in MEDIA:
            assert careful.counts[name, medium] > 500, (name, medium, careful.counts)
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
    right, why = knows(router, held)
    assert right, why
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


@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_after_a_restart_what_a_disk_kept_is_told_with_its_tokens(serve, tmp_path, ending):
    disk = ["--disk-kv", str(tmp_path), "--disk-kv-size", "64MiB", "--api-key", "alpha", "--api-key", "beta"]
    server = start(serve, *disk)
    run(server, 32, 11, keys=("alpha", "beta"))
    held, _ = engine_holds(server)
    kept = {key: value for key, value in held.items() if key[1] == "STORAGE"}
    assert len(kept) > 100
    if ending == "stopped":
        assert server.stop() == 0
    else:
        server.process.kill()
        server.process.wait()
    # Of one of them alone, under the name it has now.
    again = start(serve, *disk, tenants=["key:1"])
    router = Router(again)
    limit = time.monotonic() + 60
    while True:
        # No request came; the numbers of messages say when all is told.
        on_disk, end = engine_holds(again)
        router.follow(end)
        right, why = knows(router, on_disk)
        if right and router.held:
            break
        assert time.monotonic() < limit, why
    assert router.counts["AllBlocksCleared"] == 1 and {medium for _, medium in router.held} == {"STORAGE"}
    assert all(kept[key] == value for key, value in router.held.items()), "with the tokens and parents that they had"
    others = len(kept) - len(on_disk)
    assert 0 < len(on_disk) < len(kept), others
    ask(again, random.Random(3), "alpha")
    ask(again, random.Random(3), "beta")
    held, end = engine_holds(again)
    router.follow(end)
    right, why = knows(router, held)
    assert right, why
    router.close()


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
    for medium in {medium for _, medium in held}:
        assert sum(of == medium for _, of in held) <= blocks + 2, medium
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
    assert event["type"] == "BlockStored" and event["medium"] in ("GPU", "CPU") and event["block_size"] == 16
    assert all(len(of) == 32 for of in event["block_hashes"])
    context.destroy(linger=0)
