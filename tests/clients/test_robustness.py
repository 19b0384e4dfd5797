"""Clients that misbehave: what others get stays the same, and the server stays small."""

import os
import resource
import socket
import threading
import time

import pytest

from conftest import client_of

IDLE = 10_000


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server):
    return socket.create_connection(address(server), timeout=30)


def answers(client, model):
    """What four prompts get, and in what time the slowest."""
    begun = time.monotonic()
    texts = []
    for n in range(4):
        made = client.completions.create(model=model, prompt=f"Once upon a time {n}", max_tokens=24, seed=n, temperature=1)
        texts.append(made.choices[0].text)
    return texts, time.monotonic() - begun


@pytest.fixture
def files():
    """As many open files as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_idle_connections(serve, files):
    if files != resource.RLIM_INFINITY and files < IDLE + 1000:
        pytest.skip(f"SKIPPED: this process may open {files} files, fewer than {IDLE} connections need")
    server = serve()
    client = client_of(server)
    model = client.models.list().data[0].id
    expected, _ = answers(client, model)
    before = server.rss_bytes()
    idle = []
    for n in range(IDLE):
        one = connect(server)
        if n % 2:
            one.sendall(b"GET /v1/models HT")
        idle.append(one)
    got, took = answers(client, model)
    grown = server.rss_bytes() - before
    print(f"{IDLE} idle connections: {grown / IDLE / 1024:.1f} KiB each, four answers in {took:.2f} s")
    assert got == expected
    assert server.metric("folio:connections") >= IDLE
    assert grown < IDLE * 48 * 1024, f"{grown} bytes"
    for one in idle:
        one.close()
    assert server.stop() == 0


def test_floods_slow_writers_and_silent_readers_change_nothing_for_others(serve):
    server = serve()
    client = client_of(server)
    model = client.models.list().data[0].id
    expected, _ = answers(client, model)
    before = server.rss_bytes()
    stop = threading.Event()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

    def flood():
        while not stop.is_set():
            try:
                with connect(server) as one:
                    one.sendall(b"GET / HTTP/1.1\r\n" + b"x-flood: y\r\n" * 50_000)
                    one.recv(4096)
            except OSError:
                pass

    def dribble():
        with connect(server) as one:
            one.sendall(head + b"content-length: 1000\r\n\r\n")
            while not stop.wait(0.02):
                one.sendall(b" ")

    def oversize():
        while not stop.is_set():
            try:
                with connect(server) as one:
                    one.sendall(head + b"content-length: 100000000000\r\n\r\n" + b"x" * 65536)
                    assert b" 413 " in one.recv(4096)
            except OSError:
                pass

    def silent():
        body = b'{"prompt": "Once", "max_tokens": 200, "stream": true, "ignore_eos": true}'
        while not stop.is_set():
            with connect(server) as one:
                one.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                stop.wait(0.5)

    def rubbish():
        while not stop.is_set():
            try:
                with connect(server) as one:
                    one.sendall(os.urandom(4096))
                    one.recv(4096)
            except OSError:
                pass

    threads = [threading.Thread(target=work) for work in [flood, dribble, dribble, oversize, silent, silent, rubbish]]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert answers(client, model)[0] == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    grown = server.rss_bytes() - before
    print(f"{grown / 2**20:.1f} MiB more than before")
    assert grown < 128 << 20
    server.wait_idle()
    assert server.stop() == 0
