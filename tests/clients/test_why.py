"""What a running server is asked by `folio doctor --url` and `folio trace record`."""

import json
import os
import subprocess
import threading

from conftest import client_of


def folio(*arguments):
    return subprocess.run([os.environ["FOLIO_BIN"], *arguments], capture_output=True, text=True, timeout=120)


def test_doctor_tells_what_a_server_says(server, client, model):
    answer = client.completions.with_raw_response.create(model=model, prompt="Once upon a time", max_tokens=8)
    request = answer.headers["x-request-id"]
    words = folio("doctor", "--url", server.url)
    assert words.returncode == 0, words.stderr
    for part in ("machine:", "time ", "batch ", "queue ", "served ", "first token in time (chat 0.5 s, completions 0.1 s)", "cache "):
        assert part in words.stdout, (part, words.stdout)
    told = json.loads(folio("doctor", "--url", server.url, "--json").stdout)
    assert told["object"] == "why" and told["of"] == "machine" and told["served"]["requests"] >= 1
    one = folio("doctor", "--url", server.url, "--request", request)
    assert one.returncode == 0 and f"{request} (completion): length" in one.stdout and "8 of output" in one.stdout, one
    unknown = folio("doctor", "--url", server.url, "--request", "nobody")
    assert unknown.returncode == 1 and "No request of this id is known" in unknown.stderr
    gone = folio("doctor", "--url", "http://127.0.0.1:9")
    assert gone.returncode == 1 and "127.0.0.1:9" in gone.stderr


def test_a_trace_is_recorded_and_run_again(serve, tmp_path):
    server, file = serve(), tmp_path / "trace.json"
    model = client_of(server).models.list().data[0].id
    ended = threading.Event()

    def ask():
        client = client_of(server)
        while not ended.is_set():
            client.completions.create(model=model, prompt="There was once a story that began", max_tokens=6)

    asking = threading.Thread(target=ask)
    asking.start()
    recorded = folio("trace", "record", "--url", server.url, "--seconds", "2", "--out", str(file))
    ended.set()
    asking.join()
    assert recorded.returncode == 0 and "requests and" in recorded.stderr, recorded
    trace = json.loads(file.read_text())
    asked = [event["args"] for event in trace["traceEvents"] if event.get("cat") == "folio.request"]
    assert asked and all(one["output_tokens"] == 6 for one in asked)
    again = folio("trace", "replay", str(file), "--json")
    assert again.returncode == 0, again.stderr
    replayed = json.loads(again.stdout)
    assert replayed["recorded"]["requests"] == len(asked) == replayed["simulated"][0]["requests"]
