"""Several models at one address: started when they are asked for, stopped when nobody asks, never more than fit."""

import json
import os
import pathlib
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import anthropic
import ollama
import openai
import pytest

from conftest import client_of

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("FOLIO_CLIENTS_ARGS")), reason="a model of the command line is no model of a file")

DEMO = pathlib.Path(__file__).resolve().parents[2] / "crates/folio/assets/demo"
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
TWO = """
max-model-len = 512
kv-cache-memory = "8MiB"
models-memory = "{memory}"
{settings}
[[models]]
name = "left"
served-model-name = ["gpt-*", "org/left"]
{left}
[[models]]
name = "right"
{right}
{tables}
"""


@pytest.fixture
def several(serve, tmp_path):
    """Starts a server of two models, which both fit unless `memory` says otherwise."""

    def start(*args, memory="1GiB", settings="", left="", right="", tables=""):
        path = tmp_path / "folio.toml"
        path.write_text(TWO.format(memory=memory, settings=settings, left=left, right=right, tables=tables))
        return serve("--config", str(path), *args)

    return start


def children(pid):
    """Processes that live, zombies among them."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append((int(stat.parent.name), fields[0]))
    return found


def until(holds, what, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(0.02)


def pid_of(server, name):
    """The process of a model that is loaded."""
    for pid, _ in children(server.process.pid):
        line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if name.encode() == line[line.index(b"--only-model") + 1]:
            return pid
    raise AssertionError(f"{name} has no process")


def said(server, model, key="none", **more):
    arguments = {"max_tokens": 24, "temperature": 0, **more}
    answer = client_of(server, key).chat.completions.create(model=model, messages=MESSAGES, **arguments)
    return answer.model, answer.choices[0].message.content


def states(server):
    return json.loads(server.get("/health"))["models"]


def figure(server, name, model=None):
    """The router's, of one model or the sum of all."""
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(name)]
    assert lines, name
    return sum(float(line.split()[-1]) for line in lines if model is None or f'"{model}"' in line)


def starts(server, model=None):
    return figure(server, "folio:model_starts_total", model)


def loaded(server):
    return [name for name, state in states(server).items() if state == "ready"]


def refused(server, path, body, headers=None):
    """`body`: `None` is a GET."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json", **(headers or {})})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    return error.value.code, error.value.read().decode(), error.value.headers


def test_models_are_started_on_demand_and_say_what_they_say_alone(several, server, model):
    alone = said(server, model)[1]
    both = several()
    client = client_of(both)
    assert [card.id for card in client.models.list()] == ["left", "org/left", "right"]
    assert client.models.retrieve("gpt-5").root == "left"
    assert children(both.process.pid) == [], "nothing is started before it is asked for"
    assert states(both) == {"left": "stopped", "right": "stopped"}
    # A name, an alias and a pattern are one model; the other is another process.
    for asked, name in [("left", "left"), ("org/left", "left"), ("gpt-4o-mini", "left")]:
        assert said(both, asked) == (name, alone)
    assert (loaded(both), len(children(both.process.pid))) == (["left"], 1)
    assert said(both, "right") == ("right", alone)
    assert (loaded(both), len(children(both.process.pid))) == (["left", "right"], 2)
    assert starts(both) == 2
    # Every API, streamed and whole.
    stream = client.chat.completions.create(model="right", messages=MESSAGES, max_tokens=24, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == alone
    claude = anthropic.Anthropic(base_url=both.url, api_key="none", max_retries=0)
    message = claude.messages.create(model="left", messages=MESSAGES, max_tokens=24, extra_body={"temperature": 0})
    assert (message.model, message.content[0].text) == ("left", alone)
    assert {card.id for card in claude.models.list()} == {"left", "org/left", "right"}
    sdk = ollama.Client(host=both.url)
    options = {"temperature": 0, "num_predict": 24}
    assert sdk.chat("left:latest", MESSAGES, options=options).message.content == alone
    parts = list(sdk.chat("right", MESSAGES, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == alone and parts[-1].done
    assert {card.model for card in sdk.list().models} == {"left:latest", "org/left:latest", "right:latest"}
    assert {card.model for card in sdk.ps().models} == {"left:latest", "right:latest"}
    assert "completion" in sdk.show("left").capabilities and sdk.pull("right").status == "success"
    assert len(client.embeddings.create(model="left", input="a fox").data[0].embedding) == 192
    first = client.responses.create(model="left", input="A fox", max_output_tokens=4)
    again = client.responses.create(model="left", input="And?", max_output_tokens=4, previous_response_id=first.id)
    assert client.responses.retrieve(again.id).previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="unloaded"):
        client.responses.retrieve(first.id)
    # What is told of all.
    metrics = both.get("/metrics")
    for name in ("left", "right"):
        assert f'vllm:prompt_tokens_total{{model_name="{name}"}}' in metrics
        assert f'folio:model_loaded{{model_name="{name}"}} 1' in metrics
    assert metrics.count("# TYPE vllm:prompt_tokens_total") == 1
    assert set(json.loads(both.get("/v1/why"))["models"]) == {"left", "right"}
    assert "requests" in both.get("/v1/usage?model=left")
    assert refused(both, "/tokenize", {"prompt": "x"})[0] == 400
    assert both.post("/tokenize", {"model": "right", "prompt": "a fox"})["count"] > 0
    assert both.stop() == 0


def test_an_idle_model_goes_and_comes_back(several):
    server = several(settings='keep-alive = "0.2s"', right='keep-alive = -1')
    before = said(server, "left")
    said(server, "right")
    until(lambda: loaded(server) == ["right"], "unloading left")
    until(lambda: len(children(server.process.pid)) == 1, "its process's end")
    assert said(server, "left") == before
    assert starts(server, "left") == 2 and starts(server, "right") == 1
    # Looking on keeps nothing loaded.
    until(lambda: server.get("/metrics") and json.loads(server.get("/v1/why")) and loaded(server) == ["right"], "that again")
    cards = json.loads(server.get("/api/ps"))["models"]
    assert [(card["model"], card["expires_at"][:4]) for card in cards] == [("right:latest", "9999")]


def test_a_live_page_keeps_no_model_loaded(several):
    server = several(settings='keep-alive = "1s"', right="keep-alive = -1")
    said(server, "left")
    with urllib.request.urlopen(server.url + "/v1/why/live?model=left", timeout=30) as page:
        assert page.readline() == b"event: hello\n"
        until(lambda: "left" not in loaded(server), "it goes")
        # The process has ended, and so has what it told.
        page.read()
    assert refused(server, "/v1/why/live?model=left", None)[0] == 404


def test_ollamas_keep_alive_is_the_models_time(several):
    server = several(settings="keep-alive = -1")
    sdk = ollama.Client(host=server.url)
    assert sdk.generate("left", keep_alive=0).done_reason == "unload"
    assert starts(server) == 0, "nothing is loaded to be unloaded"
    assert sdk.generate("left").done_reason == "load"
    assert loaded(server) == ["left"]
    sdk.chat("left", MESSAGES, options={"num_predict": 2}, keep_alive="0s")
    until(lambda: loaded(server) == [], "unloading behind a request")
    sdk.chat("left", MESSAGES, options={"num_predict": 2})
    assert sdk.generate("left", keep_alive=0).done_reason == "unload"
    until(lambda: loaded(server) == [], "unloading")
    assert refused(server, "/api/generate", {"model": "left", "keep_alive": "soon"})[0] == 400


def test_where_keys_are_asked_for_nobody_unloads_what_others_use(several):
    server = several("--api-key", "one", "--api-key", "two", settings="keep-alive = -1")
    said(server, "left", key="one")
    body = {"model": "left", "keep_alive": 0}
    request = urllib.request.Request(server.url + "/api/generate", json.dumps(body).encode(),
                                     {"content-type": "application/json", "authorization": "Bearer two"})
    with urllib.request.urlopen(request) as answer:
        assert json.loads(answer.read())["done_reason"] == "load"
    assert loaded(server) == ["left"]


def test_what_does_not_fit_makes_the_one_used_least_recently_go(several):
    server = several(memory="24MiB")
    for name in ("left", "right", "left"):
        said(server, name)
        assert loaded(server) == [name]
        assert len(children(server.process.pid)) == 1
    # One that is busy is waited for, and loses nothing.
    client = client_of(server)
    stream = client.chat.completions.create(model="left", messages=MESSAGES, stream=True, temperature=0, max_tokens=300,
                                            extra_body={"ignore_eos": True, "return_token_ids": True})
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(said, server, "right")
        ids = [id for chunk in stream for choice in chunk.choices for id in getattr(choice, "token_ids", None) or []]
        assert len(ids) == 300 and other.result(60)[0] == "right"
    # Both in turn, by many at once: nobody is refused, and there is never more than one.
    most, over = [0], threading.Event()

    def watch():
        while not over.is_set():
            most[0] = max(most[0], len(children(server.process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda at: said(server, ("left", "right")[at % 2], max_tokens=4)[0], range(6)))
    over.set()
    watcher.join()
    assert answers == ["left", "right"] * 3 and most[0] == 1


def test_who_waits_too_long_for_room_is_told_both_numbers(several):
    server = several(memory="24MiB", settings="model-wait-timeout = 1\nmodel-wait-requests = 1")
    client = client_of(server)
    stream = client.chat.completions.create(model="left", messages=MESSAGES, stream=True, max_tokens=480,
                                            extra_body={"ignore_eos": True})
    next(stream)
    # As long as the stream is not read to its end it is not over: its process is stopped meanwhile.
    pid = pid_of(server, "left")
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(refused, server, "/v1/completions", {"model": "right", "prompt": "a"}) for _ in range(2)]
            answers = sorted((answer.result(60) for answer in asked), key=lambda answer: "no more may" in answer[1])
    finally:
        os.kill(pid, signal.SIGCONT)
    for status, text, headers in answers:
        assert status == 503 and int(headers["retry-after"]) >= 1, text
    assert f"of the {24 << 20} for all models" in answers[0][1] and "1 of your requests" in answers[1][1], answers
    stream.close()

    def answers():
        try:
            return said(server, "right")[0] == "right"
        except openai.InternalServerError:
            return False

    until(answers, "room")


def test_a_model_that_never_fits_is_refused_at_the_start(several):
    with pytest.raises(RuntimeError) as error:
        several(memory="24MiB", left='kv-cache-memory = "64MiB"')
    assert "'left' needs" in str(error.value) and "24.0 MiB" in str(error.value), error.value


def test_a_crash_is_told_to_every_stream_and_the_next_request_starts_anew(several):
    server = several()
    client, sdk = client_of(server), ollama.Client(host=server.url)
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    long = {"ignore_eos": True}
    before = said(server, "left")
    said(server, "right")
    chat = client.chat.completions.create(model="left", messages=MESSAGES, stream=True, max_tokens=400, extra_body=long)
    messages = claude.messages.create(model="left", messages=MESSAGES, stream=True, max_tokens=400)
    lines = sdk.chat("left", MESSAGES, stream=True, options={"num_predict": 400})
    other = client.chat.completions.create(model="right", messages=MESSAGES, stream=True, max_tokens=100, extra_body=long)
    for stream in (chat, messages, lines, other):
        next(iter(stream))
    os.kill(pid_of(server, "left"), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="process ended in the middle"):
        list(chat)
    with pytest.raises(anthropic.APIStatusError, match="process ended in the middle"):
        list(messages)
    with pytest.raises(ollama.ResponseError, match="process ended in the middle"):
        list(lines)
    assert [chunk.choices[0].finish_reason for chunk in other if chunk.choices][-1] == "length", "others go on"
    until(lambda: len(children(server.process.pid)) == 1, "the end of the zombie")
    assert said(server, "left") == before
    assert starts(server, "left") == 2 and starts(server, "right") == 1


def test_a_start_that_fails_says_why_and_is_tried_again(several, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    server = several(left=f'model = "{folder}"\npacked-cache = "off"')
    shutil.move(folder / "tokenizer.json", tmp_path / "away")
    status, text, headers = refused(server, "/v1/completions", {"model": "left", "prompt": "a"})
    assert status == 503 and int(headers["retry-after"]) >= 1
    assert "'left' could not be loaded" in text and "tokenizer.json" in text, text
    status, again, _ = refused(server, "/v1/completions", {"model": "left", "prompt": "a"})
    assert (status, starts(server, "left")) == (503, 1) and "tokenizer.json" in again, "it is left alone for a while"
    assert said(server, "right")[0] == "right"
    shutil.move(tmp_path / "away", folder / "tokenizer.json")
    time.sleep(int(headers["retry-after"]))
    assert said(server, "left")[0] == "left"
    assert children(server.process.pid) and all(state != "Z" for _, state in children(server.process.pid))


def test_nothing_is_started_for_whom_nothing_is_due(several):
    server = several("--api-key", "good", settings='max-body = "64KiB"')
    good = {"authorization": "Bearer good"}
    chat = {"model": "left", "messages": MESSAGES}
    for path, body, headers, status, words in [
        ("/v1/chat/completions", chat, {}, 401, "API key"),
        ("/v1/chat/completions", chat, {"authorization": "Bearer bad"}, 401, "Incorrect"),
        ("/v1/chat/completions", {**chat, "model": "middle"}, good, 404, "'middle'"),
        ("/v1/chat/completions", {"messages": MESSAGES}, good, 400, "'model' is required"),
        ("/v1/chat/completions", {**chat, "model": ["left"]}, good, 400, "expected"),
        ("/v1/chat/completions", b'{"model": "left", "model": "right"}', good, 400, "duplicate"),
        ("/v1/chat/completions", b'{"model": "left", "messages": [', good, 400, "cannot be read"),
        ("/v1/chat/completions", {**chat, "padding": "x" * (64 << 10)}, good, 413, "65536"),
        ("/v1/chat/completions", chat, {**good, "content-type": "text/plain"}, 415, "content type"),
        ("/v1/messages", {**chat, "model": "middle", "max_tokens": 1}, good, 404, "not_found_error"),
        ("/api/chat", {**chat, "model": "middle"}, good, 404, "middle"),
        ("/v1/responses", {"model": "left", "input": "a", "background": True}, good, 400, "background"),
        ("/v1/files", b"", good, 400, "Files and batches"),
        ("/v1/batches", {"input_file_id": "x"}, good, 400, "Files and batches"),
        ("/v1/nowhere", chat, good, 404, "Unknown request URL"),
    ]:
        found, text, _ = refused(server, path, body, headers)
        assert found == status and words in text, (path, found, text)
    assert starts(server) == 0 and children(server.process.pid) == []
    # What a client says of itself is nobody's word, and what belongs to a connection ends with it.
    headers = {**good, "x-folio-peer": "9.9.9.9:9", "connection": "close, x-hop", "x-hop": "1", "x-request-id": "mine"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps({**chat, "max_tokens": 1}).encode(),
                                     {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["x-request-id"] == "mine" and len(answer.headers.get_all("x-request-id")) == 1


def test_a_tenants_limit_is_one_for_all_models(several):
    tables = '[[tenants]]\nname = "small"\nkeys = ["small"]\nlimits = {requests_per_minute = 2}\n'
    server = several(tables=tables)
    assert [said(server, name, key="small")[0] for name in ("left", "right")] == ["left", "right"]
    for name in ("left", "right"):
        with pytest.raises(openai.RateLimitError, match="2 requests per minute"):
            said(server, name, key="small")


def test_many_first_requests_start_one_process(several):
    server = several()
    with ThreadPoolExecutor(24) as pool:
        answers = set(pool.map(lambda _: said(server, "left", max_tokens=4), range(24)))
    assert len(answers) == 1 and starts(server, "left") == 1


def test_a_client_that_leaves_during_the_start_leaves_nothing_behind(several):
    server = several()
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "left", "messages": MESSAGES, "max_tokens": 400}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    clients = [socket.create_connection((host, int(port))) for _ in range(8)]
    for one in clients:
        one.sendall(head.encode() + body)
    until(lambda: states(server)["left"] != "stopped", "the start")
    for one in clients:
        one.close()
    until(lambda: loaded(server) == ["left"], "the end of the start")
    until(lambda: figure(server, "folio:models_requests_waiting") == 0, "an empty line")
    until(lambda: figure(server, "folio:model_requests_running") == 0, "an idle process")
    server.wait_idle()
    assert said(server, "left")[0] == "left" and starts(server, "left") == 1
    # And one that leaves a stream cancels it there.
    stream = client_of(server).chat.completions.create(model="left", messages=MESSAGES, stream=True, max_tokens=480,
                                                       extra_body={"ignore_eos": True})
    next(stream)
    stream.close()
    server.wait_idle()


@pytest.mark.parametrize("supervised", [False, True])
def test_sigterm_drains_all_models(several, supervised):
    server = several()
    client = client_of(server)
    long = {"max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    streams = [client.chat.completions.create(model=name, messages=MESSAGES, stream=True, **long) for name in ("left", "right")]
    for stream in streams:
        next(stream)
    pids = [pid for pid, _ in children(server.process.pid)]
    assert len(pids) == 2
    server.terminate()
    # As systemd does, which tells every process of a service.
    for pid in pids if supervised else []:
        os.kill(pid, signal.SIGTERM)

    def drains():
        """New requests are refused, from when the signal was taken until all that ran has ended, which may be soon."""
        try:
            server.post("/v1/completions", {"model": "left", "prompt": "a", "max_tokens": 1})
            return False
        except urllib.error.HTTPError as refused:
            assert refused.code == 503
        except (urllib.error.URLError, ConnectionError):
            pass
        return True

    until(drains, "the drain")
    for stream in streams:
        ids = [id for chunk in stream for choice in chunk.choices for id in getattr(choice, "token_ids", None) or []]
        assert len(ids) == 300, "what runs ends as it should"
    assert server.process.wait(60) == 0
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


def test_processes_end_with_a_router_that_is_killed(several):
    server = several()
    said(server, "left")
    pids = [pid for pid, _ in children(server.process.pid)]
    server.process.kill()
    server.process.wait()
    until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids), "their end")


def test_operators_look_at_one_model_or_all(several):
    server = several("--admin-listen", "127.0.0.1:0", "--admin-key", "root", "--tenant-metrics")
    said(server, "left")

    def ask(path, key="root", method="GET"):
        request = urllib.request.Request(server.admin + path, method=method, headers={"authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert ask("/metrics", key="other")[0] == 401
    status, page = ask("/metrics")
    assert status == 200 and 'model_name="left"' in page and 'folio:model_loaded{model_name="right"} 0' in page
    assert ask("/v1/why?model=left")[0] == 200
    assert ask("/v1/why")[0] == 400
    assert ask("/v1/why?model=right") [0] == 404, "it is not loaded for that"
    assert '"freed_blocks"' in ask("/reset_prefix_cache?model=left", method="POST")[1]
    assert starts(server) == 1
