"""KV on a disk: it is there after a restart, for its tenant alone, and a process that is killed leaves nothing wrong behind."""

import json
import os
import random
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from folio_server import Server
from kv_router import Router, config_of, engine_holds, knows
from test_eagle import HEAD

# Room for three prompts, so that most of what is asked again is no longer in memory.
SMALL = ["--device", "cpu", "--kv-cache-memory", "3MiB", "--max-num-seqs", "4"]
KILLS = int(os.environ.get("FOLIO_KILLS", "20"))


def prompt(number):
    rng = random.Random(number)
    return " ".join(f"Box {rng.randrange(1000)} holds {rng.choice(('tea', 'salt', 'a kite'))}." for _ in range(90))


def ask(server, number, key="none", max_tokens=12):
    """(token ids, cached tokens of the prompt)"""
    body = {"model": "folio-demo", "prompt": prompt(number), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read())
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def disk(folder, *more):
    return ["--disk-kv", str(folder), "--disk-kv-size", "64MiB", *SMALL, *more]


def stored(server, blocks, seconds=20):
    """Waits until so many blocks were stored since the start."""
    end = time.monotonic() + seconds
    while server.metric("folio:tier_blocks_total", tier="disk", event="stored") < blocks:
        assert time.monotonic() < end, server.get("/metrics")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def answers():
    """What each prompt is answered without any disk."""
    server = Server(*SMALL)
    yield {number: ask(server, number)[0] for number in range(8)}
    server.stop()


def test_it_is_there_when_memory_is_not_and_after_a_restart(serve, tmp_path, answers):
    server = serve(*disk(tmp_path))
    for number in range(8):
        tokens, cached = ask(server, number)
        assert tokens == answers[number] and cached < 16, number
    stored(server, 8 * 50)
    for number in range(8):
        tokens, cached = ask(server, number)
        assert tokens == answers[number] and cached > 800, number
    assert server.metric("vllm:external_prefix_cache_hits_total") > 6 * 800
    disk_hits = json.loads(server.get("/v1/why"))["cache"]["tiers"]["disk"]
    assert disk_hits["loaded_tokens"] > 6 * 800 and 0.2 < disk_hits["hit_share"] < 1
    assert server.metric("folio:tier_loads_total", tier="disk", outcome="failed") == 0
    assert server.stop() == 0
    again = serve(*disk(tmp_path))
    # It answers before it knows what the folder has.
    end = time.monotonic() + 20
    while again.metric("folio:tier_blocks", tier="disk") < 8 * 50 and time.monotonic() < end:
        time.sleep(0.02)
    for number in range(8):
        tokens, cached = ask(again, number)
        assert tokens == answers[number] and cached > 800, number


def test_a_drafter_comes_changes_and_goes_and_nothing_that_is_kept_is_lost(serve, tmp_path, answers):
    for number, drafter in enumerate(([], ["--draft-model", HEAD], ["--draft-model", "demo"], [])):
        server = serve("--disk-kv", str(tmp_path), "--disk-kv-size", "64MiB", "--kv-cache-memory", "12MiB", *drafter)
        end = time.monotonic() + 20
        while server.metric("folio:tier_blocks", tier="disk") < number * 50 and time.monotonic() < end:
            time.sleep(0.02)
        for before in range(number):
            tokens, cached = ask(server, before)
            assert tokens == answers[before] and cached > 800, (drafter, before, cached)
        assert ask(server, number)[0] == answers[number]
        stored(server, 50)
        assert server.stop() == 0


def test_it_is_its_tenants_alone(serve, tmp_path, answers):
    keys = ["--api-key", "alpha", "--api-key", "beta"]
    server = serve(*disk(tmp_path, *keys))
    assert ask(server, 1, "alpha") == (answers[1], 0)
    stored(server, 50)
    assert ask(server, 1, "beta") == (answers[1], 0)
    assert server.stop() == 0
    # In another order, and so with other numbers.
    again = serve(*disk(tmp_path, "--api-key", "gamma", "--api-key", "beta", "--api-key", "alpha"))
    assert ask(again, 1, "gamma") == (answers[1], 0)
    while again.metric("folio:tier_blocks", tier="disk") < 50:
        time.sleep(0.02)
    assert ask(again, 1, "alpha")[1] > 800
    assert again.stop() == 0
    # Without the keyring it is noise.
    (tmp_path / "keyring").unlink()
    assert ask(serve(*disk(tmp_path, *keys)), 1, "alpha") == (answers[1], 0)


def test_nothing_of_a_prompt_is_readable_on_it(serve, tmp_path):
    server = serve(*disk(tmp_path))
    ask(server, 2)
    stored(server, 50)
    assert server.stop() == 0
    files = [file for file in Path(tmp_path).iterdir() if file.is_file()]
    for file in files:
        assert file.stat().st_mode & 0o077 == 0, f"{file.name} is for others to read"
    data = max(files, key=lambda file: file.stat().st_size).read_bytes()
    assert len(data) > 500_000
    # But for what fills up pages, what is sealed has no more zeros than chance.
    sealed = re.sub(rb"\0{256,}", b"", data[8192 : 8192 + 200_000])
    assert len(sealed) > 100_000 and sealed.count(0) < len(sealed) // 100


def test_damage_is_computed_again(serve, tmp_path, answers):
    server = serve(*disk(tmp_path))
    for number in range(8):
        ask(server, number)
    stored(server, 8 * 50)
    assert server.stop() == 0
    rng = random.Random(5)
    for file in Path(tmp_path).iterdir():
        if file.is_file() and file.stat().st_size > 8192:
            with open(file, "r+b") as bytes_of:
                for _ in range(40):
                    at = rng.randrange(file.stat().st_size)
                    bytes_of.seek(at)
                    was = bytes_of.read(1)[0]
                    bytes_of.seek(at)
                    bytes_of.write(bytes([was ^ (1 << rng.randrange(8))]))
    again = serve(*disk(tmp_path))
    for number in range(8):
        assert ask(again, number)[0] == answers[number]
    assert again.stop() == 0


def all_is_told(server, seconds=30):
    """How many blocks a router knows of the disk, once it knows all that the server says it holds."""
    router, end = Router(server), time.monotonic() + seconds
    while True:
        held, message = engine_holds(server)
        router.follow(message)
        right, why = knows(router, held)
        if right:
            router.close()
            return sum(medium == "STORAGE" for _, medium in router.held)
        assert time.monotonic() < end, why


def test_killed_at_any_time_it_serves_no_wrong_token_and_loses_nothing_that_was_stored(tmp_path, answers):
    rng = random.Random(9)
    kept = 0
    for turn in range(KILLS):
        server = Server(*disk(tmp_path, *config_of()))
        failures = []

        def work(seed):
            mine = random.Random(seed)
            try:
                while True:
                    number = mine.randrange(8)
                    tokens, _ = ask(server, number)
                    if tokens != answers[number]:
                        failures.append((turn, number, tokens))
            except (OSError, urllib.error.URLError, ConnectionError, json.JSONDecodeError):
                pass
            except Exception as error:  # a cut answer
                if "IncompleteRead" not in repr(error) and "RemoteDisconnected" not in repr(error):
                    failures.append((turn, repr(error)))

        # What was acknowledged by the last process is found by this one.
        found = server.metric("folio:tier_blocks", tier="disk")
        end = time.monotonic() + 20
        while found < kept and time.monotonic() < end:
            time.sleep(0.05)
            found = server.metric("folio:tier_blocks", tier="disk")
        assert found >= kept, f"turn {turn}: {kept} blocks were stored, {found} are found"
        told = all_is_told(server)
        assert told >= found, f"turn {turn}: {found} blocks are found and {told} were told"
        threads = [threading.Thread(target=work, args=(100 * turn + at,)) for at in range(4)]
        [thread.start() for thread in threads]
        time.sleep(rng.random() * 0.8)
        kept = server.metric("folio:tier_blocks", tier="disk")
        server.process.kill()
        server.process.wait()
        [thread.join() for thread in threads]
        assert not failures, failures[:3]
    assert kept > 300, "so much was stored before the last one was killed"


def refused(*args):
    run = subprocess.run([os.environ["FOLIO_BIN"], "serve", "--port", "0", *args], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    return run.stderr


def test_what_cannot_be_is_refused_by_a_sentence(serve, tmp_path):
    serve(*disk(tmp_path / "one"))
    error = refused(*disk(tmp_path / "one"))
    assert "another process" in error and "one" in error
    (tmp_path / "file").write_text("no folder")
    assert "file" in refused(*disk(tmp_path / "file"))
    assert "--disk-kv-size" in refused("--disk-kv", str(tmp_path / "two"), "--disk-kv-size", "many")
    keyring = tmp_path / "ring"
    keyring.write_text("nothing")
    keyring.chmod(0o600)
    assert "keyring" in refused(*disk(tmp_path / "three", "--keyring", str(keyring)))
    keyring.chmod(0o644)
    assert "chmod 600" in refused(*disk(tmp_path / "three", "--keyring", str(keyring)))


def cache(*args):
    return subprocess.run([os.environ["FOLIO_BIN"], "cache", *map(str, args)], capture_output=True, text=True, timeout=60)


def test_what_was_kept_moves_to_another_machine_as_one_file(serve, tmp_path, answers):
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "kv"
    server = serve(*disk(here))
    for number in range(3):
        ask(server, number)
    stored(server, 3 * 50)
    busy = cache("export", "--disk-kv", here, file)
    assert busy.returncode != 0 and "another process" in busy.stderr and not file.exists()
    assert server.stop() == 0
    done = cache("export", "--disk-kv", here, file)
    assert done.returncode == 0 and "wrote" in done.stdout, done
    assert cache("export", "--disk-kv", here, file).returncode != 0, "nothing is written over"
    # Cut short it is refused by a sentence, and the folder is as it was.
    cut = tmp_path / "cut"
    cut.write_bytes(file.read_bytes()[:-100])
    error = cache("import", "--disk-kv", there, cut)
    assert error.returncode != 0 and "cut short" in error.stderr and "panicked" not in error.stderr
    damaged = bytearray(file.read_bytes())
    damaged[4096 + 300] ^= 1  # of the first block
    cut.write_bytes(damaged)
    error = cache("import", "--disk-kv", there, cut)
    assert error.returncode != 0 and "is damaged" in error.stderr and not list(there.glob("*.segment"))
    done = cache("import", "--disk-kv", there, "--disk-kv-size", "64MiB", file)
    assert done.returncode == 0 and "stored" in done.stdout, done
    ring = ["--keyring", str(here / "keyring")]
    other = serve(*disk(there, *ring))
    end = time.monotonic() + 20
    while other.metric("folio:tier_blocks", tier="disk") < 3 * 50 and time.monotonic() < end:
        time.sleep(0.02)
    for number in range(3):
        tokens, cached = ask(other, number)
        assert tokens == answers[number] and cached > 800, (number, cached)
    assert other.stop() == 0
    # Without the keyring it is noise.
    assert ask(serve(*disk(there)), 1) == (answers[1], 0)


def test_one_tenant_moves_without_the_others(serve, tmp_path, answers):
    here, there, file, keys = tmp_path / "here", tmp_path / "there", tmp_path / "kv", tmp_path / "keys"

    def key(tenant):
        made = [os.environ["FOLIO_BIN"], "keys", "create", "--keys", str(keys), "--tenant", tenant]
        return subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()

    alpha, beta = key("alpha"), key("beta")
    server = serve(*disk(here, "--keys", str(keys)))
    for number, of in enumerate((alpha, beta, alpha)):
        ask(server, number, of)
    stored(server, 3 * 50)
    assert server.stop() == 0
    assert "knows nobody" in cache("export", "--disk-kv", here, "--tenant", "gamma", file).stderr
    done = cache("export", "--disk-kv", here, "--tenant", "alpha", file)
    assert done.returncode == 0, done
    assert cache("import", "--disk-kv", there, "--disk-kv-size", "64MiB", file).returncode == 0
    other = serve(*disk(there, "--keyring", str(here / "keyring"), "--keys", str(keys)))
    end = time.monotonic() + 20
    while other.metric("folio:tier_blocks", tier="disk") < 2 * 50 and time.monotonic() < end:
        time.sleep(0.02)
    cached = [ask(other, number, of)[1] for number, of in enumerate((alpha, beta, alpha))]
    assert cached[0] > 800 and cached[1] == 0 and cached[2] > 800, cached


def folio(*args):
    run = subprocess.run([os.environ["FOLIO_BIN"], *map(str, args)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_what_is_forgotten_is_gone_and_what_has_new_keys_stays(serve, tmp_path, answers):
    folder, keys, key = tmp_path / "kv", tmp_path / "keys", tmp_path / "key"
    alpha, beta = (folio("keys", "create", "--keys", keys, "--tenant", tenant) for tenant in ("alpha", "beta"))
    server = serve(*disk(folder, "--keys", str(keys)))
    ask(server, 1, alpha)
    ask(server, 2, beta)
    stored(server, 2 * 50)
    assert server.stop() == 0
    # An operator's key around the keyring, another API key of one tenant, and no secret of the other.
    key.write_text("ab" * 32)
    key.chmod(0o600)
    keyring = ["--keyring", folder / "keyring"]
    folio("keys", "wrap", *keyring, "--to", key)
    assert "--keyring-key" in refused(*disk(folder, "--keys", str(keys)))
    folio("keys", "forget", *keyring, "--keyring-key", key, "beta")
    renewed = folio("keys", "create", "--keys", keys, "--tenant", "alpha")
    folio("keys", "revoke", "--keys", keys, alpha)
    again = serve(*disk(folder, "--keys", str(keys), "--keyring-key", str(key)))
    end = time.monotonic() + 20
    while again.metric("folio:tier_blocks", tier="disk") < 2 * 50 and time.monotonic() < end:
        time.sleep(0.02)
    tokens, cached = ask(again, 1, renewed)
    assert tokens == answers[1] and cached > 800
    assert ask(again, 2, beta) == (answers[2], 0)
