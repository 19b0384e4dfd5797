"""KV in memory beside the cache: what ended or was preempted is loaded from there, for its tenant alone, and the tokens are those without it."""

import os
import subprocess
import threading
import time

import pytest
from folio_server import Server
from test_disk_kv import SMALL, ask

HOST = ["--host-kv-memory", "64MiB", *SMALL]


@pytest.fixture(scope="module")
def answers():
    """What each prompt is answered without any tier."""
    server = Server(*SMALL)
    yield {number: ask(server, number)[0] for number in range(8)}
    server.stop()


def stored(server, blocks, seconds=20):
    end = time.monotonic() + seconds
    while server.metric("folio:tier_blocks_total", tier="host", event="stored") < blocks:
        assert time.monotonic() < end, server.get("/metrics")
        time.sleep(0.02)


def test_it_is_there_when_the_cache_is_not(serve, answers):
    server = serve(*HOST)
    for number in range(8):
        tokens, cached = ask(server, number)
        assert tokens == answers[number] and cached < 16, number
    stored(server, 8 * 50)
    for number in range(8):
        tokens, cached = ask(server, number)
        assert tokens == answers[number] and cached > 800, number
    assert server.metric("folio:tier_loads_total", tier="host", outcome="failed") == 0
    assert server.metric("folio:tier_bytes", tier="host", state="limit") == 64 << 20
    ready, used = (server.metric("folio:tier_bytes", tier="host", state=state) for state in ("ready", "used"))
    assert used <= ready <= 64 << 20 and ready > 60 << 20, "set aside from the start"


def test_it_is_its_tenants_alone(serve, answers):
    server = serve(*HOST, "--api-key", "alpha", "--api-key", "beta")
    assert ask(server, 1, "alpha") == (answers[1], 0)
    stored(server, 50)
    for number in range(2, 8):
        ask(server, number, "beta")
    tokens, cached = ask(server, 1, "beta")
    assert tokens == answers[1] and cached < 16, "of its own at most"
    assert ask(server, 1, "alpha")[1] > 800


def test_what_came_from_a_disk_is_in_memory_from_then_on(serve, tmp_path, answers):
    both = ["--disk-kv", str(tmp_path), "--disk-kv-size", "64MiB", *HOST]
    server = serve(*both)
    for number in range(8):
        ask(server, number)
    assert server.stop() == 0
    again = serve(*both)
    end = time.monotonic() + 20
    while again.metric("folio:tier_blocks", tier="disk") < 8 * 50:
        assert time.monotonic() < end, again.get("/metrics")
        time.sleep(0.02)
    loaded = []
    for _ in range(2):
        for number in range(8):
            tokens, cached = ask(again, number)
            assert tokens == answers[number] and cached > 800, number
        stored(again, 8 * 50)
        loaded.append([again.metric("folio:tier_loads_total", tier=tier, outcome="loaded") for tier in ("host", "disk")])
    assert loaded[0][1] >= 8, "memory had none of it"
    assert loaded[1][0] >= loaded[0][0] + 6 and loaded[1][1] <= loaded[0][1] + 2, loaded


def test_preempted_requests_go_on_from_it(serve):
    """Answers that outgrow the cache together: whoever loses its blocks has the tokens it has alone. With drafts they would end too soon to meet:
    each was said before."""
    server = serve(*HOST, "--speculate", "off")
    alone = {number: ask(server, number, max_tokens=400)[0] for number in range(2)}
    told = {}

    def one(number):
        told[number] = ask(server, number, max_tokens=400)[0]

    for _ in range(4):
        threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert told == alone
        if server.metric("folio:preemptions_total", mode="tier"):
            return
    pytest.fail(server.get("/metrics"))


def test_the_start_says_what_serves_better_and_what_is_gone(serve):
    server = serve(*HOST)
    assert "added to --kv-cache-memory serves better" in "".join(server.log)
    folio = os.environ["FOLIO_BIN"]
    refused = subprocess.run([folio, "serve", "--swap-space", "1GiB"], capture_output=True, text=True, timeout=20)
    assert refused.returncode != 0 and "--host-kv-memory" in refused.stderr
    refused = subprocess.run([folio, "serve", "--host-kv-memory", "4"], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "hold no block" in refused.stderr
