"""/v1/files and /v1/batches through OpenAI's own client."""

import io
import json
import time

import openai
import pytest
from conftest import client_of


def lines(url, bodies):
    requests = ({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies))
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def begin(client, url, bodies, **more):
    file = client.files.create(file=("in.jsonl", io.BytesIO(lines(url, bodies))), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **more)


def wait(client, batch, until=("completed", "failed", "cancelled", "expired"), seconds=240):
    end = time.monotonic() + seconds
    while batch.status not in until:
        assert time.monotonic() < end, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client, file_id):
    text = client.files.content(file_id).text
    return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


def test_chats_are_answered_as_if_they_were_sent(client, model):
    asked = [
        {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12}
        for text in ("Tell me a story.", "What is 2 + 2?", "Name a colour.")
    ]
    batch = begin(client, "/v1/chat/completions", asked + [{"model": "another", "messages": []}], metadata={"of": "test"})
    assert batch.object == "batch" and batch.metadata == {"of": "test"}
    batch = wait(client, batch)
    assert batch.status == "completed", batch
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 3, 1)
    done = results(client, batch.output_file_id)
    for i, body in enumerate(asked):
        direct = client.chat.completions.create(**body)
        assert done[f"r{i}"]["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    failed = results(client, batch.error_file_id)["r3"]
    assert failed["response"]["status_code"] == 404 and failed["response"]["body"]["error"]["code"] == "model_not_found"
    assert batch.usage.total_tokens == sum(line["response"]["body"]["usage"]["total_tokens"] for line in done.values())


@pytest.mark.parametrize(
    "url, body",
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}),
        ("/v1/embeddings", {"input": "Once"}),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 4}),
    ],
)
def test_every_endpoint(client, url, body):
    batch = wait(client, begin(client, url, [body] * 3))
    assert batch.status == "completed" and batch.request_counts.completed == 3, batch
    assert all(line["response"]["status_code"] == 200 for line in results(client, batch.output_file_id).values())


def test_files(client):
    file = client.files.create(
        file=("mine.jsonl", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.purpose, file.expires_at - file.created_at) == (3, "mine.jsonl", "batch", 3600)
    assert client.files.retrieve(file.id) == file
    assert file.id in [listed.id for listed in client.files.list(purpose="batch")]
    assert client.files.content(file.id).content == b"{}\n"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"x", purpose="fine-tune")


def test_a_damaged_file_is_told_by_line(client):
    file = client.files.create(file=("in.jsonl", b"{}\nnot json\n"), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    batch = wait(client, batch)
    assert batch.status == "failed" and [error.line for error in batch.errors.data] == [1, 2]


def test_cancel_and_interactive_requests_in_between(client, server, model):
    story = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
    batch = begin(client, "/v1/completions", [story] * 100)
    batch = wait(client, batch, ("in_progress", "completed"))
    # Somebody who waits is served at once.
    reply = client.completions.create(model=model, prompt="Hello", max_tokens=4)
    assert reply.usage.completion_tokens > 0
    batch = client.batches.cancel(batch.id)
    assert batch.status in ("cancelling", "cancelled")
    batch = wait(client, batch)
    assert batch.status == "cancelled"
    told = len(results(client, batch.error_file_id)) + (len(results(client, batch.output_file_id)) if batch.output_file_id else 0)
    assert told == 100, "every line has one result"
    assert batch.id in [listed.id for listed in client.batches.list(limit=5)]
    server.wait_idle()


def test_tenants_are_walls(serve):
    server = serve("--api-key", "alpha,beta")
    alpha, beta = client_of(server, "alpha"), client_of(server, "beta")
    batch = wait(alpha, begin(alpha, "/v1/embeddings", [{"input": "mine"}]))
    for ask in (
        lambda: beta.batches.retrieve(batch.id),
        lambda: beta.batches.cancel(batch.id),
        lambda: beta.files.content(batch.output_file_id),
        lambda: beta.files.delete(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert list(beta.files.list()) == [] and list(beta.batches.list()) == []


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_batch_goes_on_behind_a_restart(serve, tmp_path, end):
    folder = str(tmp_path / "batches")
    server = serve("--batch-dir", folder, "--api-key", "alpha", "--batch-concurrency", "2")
    client = client_of(server, "alpha")
    story = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
    batch = begin(client, "/v1/completions", [story] * 40)
    while client.batches.retrieve(batch.id).request_counts.completed < 3:
        time.sleep(0.05)
    if end == "killed":
        server.process.kill()
        server.process.wait()
    else:
        # Lines that run are finished, no other is begun.
        assert server.stop() == 0, "".join(server.log)
    server = serve("--batch-dir", folder, "--api-key", "alpha")
    client = client_of(server, "alpha")
    batch = wait(client, client.batches.retrieve(batch.id))
    assert batch.status == "completed" and batch.request_counts.completed == 40, batch
    assert len(results(client, batch.output_file_id)) == 40
    assert server.metric("vllm:request_success_total", finished_reason="length") < 40, "what was done is not done again"
