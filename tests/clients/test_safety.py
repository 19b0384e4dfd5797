"""Rules and a callout around a real server: what the official clients see of what was denied, replaced and annotated."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import openai
import pytest

from conftest import client_of

ASK = [{"role": "user", "content": "Tell me a story about a fox."}]


def declared(tmp_path, **content):
    file = tmp_path / "safety.json"
    file.write_text(json.dumps(content))
    return ["--safety", str(file)]


def create(client, **more):
    return client.chat.completions.create(model=client.models.list().data[0].id, messages=ASK, temperature=0, max_tokens=60, **more)


@pytest.fixture(scope="module")
def story(server):
    """What the model says to ASK when nobody listens in."""
    text = create(client_of(server)).choices[0].message.content
    assert len(text) > 60, text
    return text


def streamed(client, **more):
    text, reason = "", None
    for chunk in create(client, stream=True, **more):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
    return text, reason


def test_a_forbidden_passage_is_never_seen(serve, story, tmp_path):
    forbidden = story[20:40]
    server = serve(*declared(tmp_path, rules=[{"name": "passage", "strings": [forbidden], "action": "deny"}]))
    client = client_of(server)
    choice = create(client).choices[0]
    assert choice.finish_reason == "content_filter"
    assert choice.message.content == story[: story.index(forbidden)]
    assert streamed(client) == (choice.message.content, "content_filter")
    assert server.metric("folio:safety_verdicts_total", stage="output", by="passage", action="deny") == 2
    server.wait_idle()

    denied = client.responses.create(model=client.models.list().data[0].id, input=ASK, temperature=0, max_output_tokens=60)
    assert denied.status == "incomplete" and denied.incomplete_details.reason == "content_filter"
    assert denied.output_text == choice.message.content

    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    model = claude.models.list().data[0].id
    message = claude.messages.create(model=model, messages=ASK, max_tokens=60, extra_body={"temperature": 0})
    assert message.stop_reason == "refusal" and message.content[0].text == choice.message.content
    with claude.messages.stream(model=model, messages=ASK, max_tokens=60, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == choice.message.content
        assert stream.get_final_message().stop_reason == "refusal"


def test_a_forbidden_prompt_is_answered_without_the_model(serve, tmp_path):
    server = serve(*declared(tmp_path, rules=[{"name": "fox", "regexes": ["(?i)f.x"], "on": "input", "action": "deny"}]))
    client = client_of(server)
    answer = create(client, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["content_filter"] * 2
    assert [choice.message.content for choice in answer.choices] == ["", ""]
    assert answer.usage.total_tokens == 0
    assert streamed(client) == ("", "content_filter")
    assert server.metric("vllm:prompt_tokens_total") == 0


def test_a_passage_is_replaced(serve, story, tmp_path):
    rule = {"name": "passage", "strings": [story[20:40]], "action": "redact", "replacement": "***"}
    client = client_of(serve(*declared(tmp_path, rules=[rule])))
    expected = story.replace(story[20:40], "***")
    assert create(client).choices[0].message.content == expected
    assert streamed(client)[0] == expected


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((question, self.headers["x-judge"]))
        body = json.dumps(self.server.verdict(question)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge():
    service = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    service.asked, service.verdict = [], lambda _: {"action": "allow"}
    threading.Thread(target=service.serve_forever, daemon=True).start()
    yield service
    service.shutdown()


def test_a_callout_judges_both_sides(serve, story, judge, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "sesame")
    callout = {"url": f"http://127.0.0.1:{judge.server_port}/", "on_failure": "closed", "timeout_ms": 20000}
    callout |= {"secret_env": "JUDGE_TOKEN", "secret_header": "x-judge"}
    server = serve(*declared(tmp_path, callout=callout))
    client = client_of(server)
    assert create(client).choices[0].message.content == story
    (before, secret), (after, _) = judge.asked
    assert secret == "sesame" and "sesame" not in "".join(server.log)
    assert before["messages"] == ASK and before["stage"] == "input"
    assert after["text"] == story and after["request_id"] == before["request_id"]

    note = {"annotations": {"risk": 0.25}}
    judge.verdict = lambda question: {"action": "annotate", **note} if question["stage"] == "output" else {"action": "allow"}
    choice = create(client).choices[0]
    assert choice.model_extra["safety"] == {"output": {"action": "annotate", **note}}

    judge.verdict = lambda question: {"action": "deny"} if question["stage"] == "output" else {"action": "allow"}
    assert streamed(client) == ("", "content_filter")

    # A verdict that is none, and the callout fails closed.
    judge.verdict = lambda _: {"action": "perhaps"}
    with pytest.raises(openai.InternalServerError) as refused:
        create(client)
    assert refused.value.status_code == 503
