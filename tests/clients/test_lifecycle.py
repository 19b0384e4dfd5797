"""SIGTERM drains, a second one stops."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from conftest import client_of

LONG = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def start_stream(server):
    client = client_of(server)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Tell me a long story."}]
    stream = client.chat.completions.create(model=model, messages=messages, stream=True, **LONG)
    first = next(stream)
    assert first.choices[0].delta.role == "assistant"
    return client, model, stream


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(serve):
    server = serve()
    client, model, stream = start_stream(server)
    server.terminate()
    with pytest.raises(openai.InternalServerError) as refused:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "?"}], max_tokens=1)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    ids, finish = [], None
    for chunk in stream:
        for choice in chunk.choices:
            ids += getattr(choice, "token_ids", None) or []
            finish = choice.finish_reason or finish
    assert (len(ids), finish) == (400, "length"), "the running stream got all of its tokens"
    assert server.process.wait(60) == 0


@pytest.mark.parametrize("threads", [2, 4])
def test_an_event_loop_of_several_threads_serves_as_one_does(serve, threads):
    server = serve("--http-threads", str(threads))
    client = client_of(server)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Tell me a story."}]

    def whole():
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
        return answer.choices[0].message.content

    def streamed():
        chunks = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, stream=True)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    alone = whole()
    with ThreadPoolExecutor(16) as pool:
        said = [pool.submit(ask) for _ in range(16) for ask in (whole, streamed)]
        assert {answer.result() for answer in said} == {alone}
    end = time.monotonic() + 30
    while not server.metric("folio:event_loop_lag_seconds_count"):
        assert time.monotonic() < end, "the event loop's lag is not measured"


def test_a_second_sigterm_stops_at_once(serve):
    server = serve()
    _, _, stream = start_stream(server)
    ended = threading.Event()

    def read():
        try:
            for _ in stream:
                pass
        except openai.APIError:
            pass
        except Exception as error:  # the transport's own errors: the connection was cut
            assert "peer" in str(error) or "closed" in str(error) or "incomplete" in str(error), error
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    server.terminate()
    time.sleep(0.1)
    server.terminate()
    server.process.wait(30)
    assert ended.wait(30)
