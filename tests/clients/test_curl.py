"""What a person with curl meets."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="SKIPPED: curl is not installed")
JSON = ["-H", "content-type: application/json"]


def curl(server, path, *args, stdin=None):
    """(status, body)"""
    command = ["curl", "-sS", "--max-time", "120", "-w", "\n%{http_code}", *args, server.url + path]
    done = subprocess.run(command, input=stdin, capture_output=True, check=True)
    body, status = done.stdout.decode().rsplit("\n", 1)
    return int(status), body


def error(reply):
    status, body = reply
    return status, json.loads(body)["error"]


def test_the_line_on_the_front_page_works(server):
    status, page = curl(server, "/")
    assert status == 200
    line = next(line.strip() for line in page.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(line, shell=True, capture_output=True, check=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_errors(server):
    chat = "/v1/chat/completions"
    status, bad = error(curl(server, chat, *JSON, "-d", '{"messages": [\n{"role": user}]}'))
    assert status == 400 and "line 2 column 10" in bad["message"]
    status, missing = error(curl(server, chat, *JSON, "-d", "{}"))
    assert (status, missing["param"]) == (400, "messages")
    assert error(curl(server, "/v1/nowhere"))[0] == 404
    assert error(curl(server, chat, *JSON, "-d", '{"model": "gpt-99", "messages": []}'))[0] == 404
    assert error(curl(server, chat))[0] == 405
    status, form = error(curl(server, chat, "-d", "{}"))
    assert status == 415 and "application/json" in form["message"]
    status, large = error(curl(server, chat, *JSON, "--data-binary", "@-", stdin=b"x" * (9 << 20)))
    assert status == 413 and str(8 << 20) in large["message"]
    chunked = [*JSON, "-H", "transfer-encoding: chunked", "--data-binary", "@-"]
    assert error(curl(server, chat, *chunked, stdin=b"x" * (9 << 20)))[0] == 413


def test_a_stream(server):
    body = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True, "max_tokens": 8}
    status, text = curl(server, "/v1/chat/completions", "-N", *JSON, "-d", json.dumps(body))
    # A comment may come first: the sign of life that leaves once the engine has accepted.
    events = [line for line in text.splitlines() if line and not line.startswith(":")]
    assert status == 200 and all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


def test_headers(server):
    command = ["curl", "-sS", "-D", "-", "-o", "/dev/null", "-H", "x-request-id: mine-7", server.url + "/metrics"]
    head = subprocess.run(command, capture_output=True, check=True).stdout.decode().lower()
    assert "x-request-id: mine-7" in head
    assert "content-type: text/plain; version=0.0.4; charset=utf-8" in head
