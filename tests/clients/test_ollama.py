"""Ollama's own SDK for Python, as its users write it."""

import asyncio
import json
import math
import os
import re
import subprocess
import urllib.request

import ollama
import pytest

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"temperature": 0, "num_predict": 16}


@pytest.fixture
def sdk(server):
    return ollama.Client(host=server.url, timeout=300)


@pytest.fixture
def name(sdk):
    return sdk.list().models[0].model


def get_weather(city: str) -> str:
    """
    Current weather

    Args:
      city: Name of the city
    """
    return f"sunny in {city}"


def test_a_chat_whole_and_streamed_says_the_same_as_openais(sdk, name, client, model):
    whole = sdk.chat(name, MESSAGES, options=GREEDY)
    assert whole.done and whole.done_reason in ("stop", "length") and whole.message.role == "assistant"
    parts = list(sdk.chat(name, MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    end = parts[-1]
    other = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=16)
    assert other.choices[0].message.content == whole.message.content
    for told in (whole, end):
        assert told.eval_count == other.usage.completion_tokens
        assert told.prompt_eval_count == other.usage.prompt_tokens
        assert told.total_duration >= told.prompt_eval_duration + told.eval_duration > 0
        assert told.created_at.endswith("Z") and told.load_duration == 0


def test_a_conversation_goes_on(sdk, name):
    first = sdk.chat(name, MESSAGES, options=GREEDY)
    again = [*MESSAGES, first.message, {"role": "user", "content": "And then?"}]
    assert sdk.chat(name, again, options=GREEDY, keep_alive="5m").prompt_eval_count > first.prompt_eval_count


def test_options_are_those_of_the_sdk(sdk, name):
    drawn = [sdk.chat(name, MESSAGES, options=ollama.Options(seed=7, temperature=1.0, top_k=50, top_p=0.9, num_predict=12)) for _ in range(2)]
    assert drawn[0].message.content == drawn[1].message.content and drawn[0].eval_count <= 12
    story = sdk.generate(name, "Once upon a time", raw=True, options={"temperature": 0, "num_predict": 24}).response
    stop = story[4:8]
    cut = sdk.generate(name, "Once upon a time", raw=True, options={"temperature": 0, "num_predict": 24, "stop": [stop]})
    assert cut.response == story[: story.index(stop)] and cut.done_reason == "stop"
    hints = ollama.Options(num_ctx=2048, num_gpu=-1, num_thread=2, use_mmap=True, num_keep=4, low_vram=False, **GREEDY)
    assert sdk.chat(name, MESSAGES, options=hints).message.content == sdk.chat(name, MESSAGES, options=GREEDY).message.content


def test_a_generation_whole_and_streamed(sdk, name):
    whole = sdk.generate(name, "A hen", system="Be brief.", options=GREEDY)
    parts = list(sdk.generate(name, "A hen", system="Be brief.", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert whole.context is None and parts[-1].eval_count == whole.eval_count
    scored = sdk.generate(name, "A hen", options=GREEDY, logprobs=True, top_logprobs=2)
    assert len(scored.logprobs) == scored.eval_count and len(scored.logprobs[0].top_logprobs) == 2
    assert scored.logprobs[0].logprob <= 0


def test_a_model_that_marks_no_reasoning_answers_as_it_is_when_asked_to_think(sdk, name):
    assert "thinking" not in sdk.show(name).capabilities
    chat = sdk.chat(name, MESSAGES, options=GREEDY)
    text = sdk.generate(name, "A hen", options=GREEDY)
    for think in (True, False, "low"):
        whole = sdk.chat(name, MESSAGES, options=GREEDY, think=think)
        assert whole.message.content == chat.message.content and not whole.message.thinking
        parts = list(sdk.chat(name, MESSAGES, options=GREEDY, think=think, stream=True))
        assert "".join(part.message.content for part in parts) == chat.message.content
        assert not any(part.message.thinking for part in parts)
        made = sdk.generate(name, "A hen", options=GREEDY, think=think)
        assert made.response == text.response and not made.thinking
    # There is no template that could be told.
    with pytest.raises(ollama.ResponseError, match="'think' is for the chat template") as refused:
        sdk.generate(name, "A hen", raw=True, think=True)
    assert refused.value.status_code == 400


def test_nothing_asked_is_loading(sdk, name):
    assert sdk.generate(name).done_reason == "load"
    assert sdk.chat(name, [], keep_alive=-1).done_reason == "load"
    (only,) = sdk.generate(name, stream=True)
    assert only.done and only.done_reason == "load"


def test_an_answer_of_a_schema(sdk, name):
    import pydantic

    class Person(pydantic.BaseModel, extra="forbid"):
        name: str = pydantic.Field(max_length=12)
        age: int = pydantic.Field(ge=0, le=150)

    options = {"num_predict": 200, "seed": 1, "temperature": 0.5}
    made = sdk.chat(name, MESSAGES, format=Person.model_json_schema(), options=options)
    assert 0 <= Person.model_validate_json(made.message.content).age <= 150
    begun = sdk.chat(name, MESSAGES, format="json", options={**options, "num_predict": 4})
    assert begun.message.content.lstrip().startswith("{")


def test_a_function_is_called_and_answered(sdk, name):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"temperature": 0, "num_predict": 60}
    for made in (
        sdk.chat(name, question, tools=[get_weather], options=options),
        next(part for part in sdk.chat(name, question, tools=[get_weather], options=options, stream=True) if part.message.tool_calls),
    ):
        (call,) = made.message.tool_calls
        assert call.function.name == "get_weather" and isinstance(call.function.arguments["city"], str)
    result = {"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)}
    again = sdk.chat(name, [*question, made.message, result], tools=[get_weather], options=options)
    assert again.done and again.prompt_eval_count > 0


def test_vectors_are_those_of_openais(sdk, name, client, model):
    texts = ["a fox", "a hen"]
    made = sdk.embed(name, texts)
    told = client.embeddings.create(model=model, input=texts, encoding_format="float")
    for vector, other in zip(made.embeddings, told.data):
        assert vector == pytest.approx(other.embedding, abs=1e-7) and abs(math.hypot(*vector) - 1) < 1e-5
    assert made.prompt_eval_count == told.usage.prompt_tokens
    assert sdk.embeddings(name, "a hen").embedding == made.embeddings[1]
    assert len(sdk.embed(name, "a fox", dimensions=8).embeddings[0]) == 8


def test_what_is_served_is_listed_and_shown(sdk, name, server):
    (listed,) = sdk.list().models
    assert listed.model.endswith(":latest") and listed.size > 0 and len(listed.digest) == 64
    (running,) = sdk.ps().models
    assert running.context_length > 0 and running.digest == listed.digest
    shown = sdk.show(name)
    assert {"completion", "tools"} <= set(shown.capabilities)
    family = shown.details.family
    assert shown.modelinfo["general.architecture"] == family
    assert shown.modelinfo[f"{family}.context_length"] == running.context_length
    assert "messages" in shown.template
    # The SDK has no call for it, and Ollama's own programs read it before anything else.
    with urllib.request.urlopen(f"{server.url}/api/version", timeout=30) as answer:
        assert re.fullmatch(r"\d+\.\d+\.\d+", json.load(answer)["version"])
    for path in ("/", "/api/version"):
        probe = urllib.request.Request(server.url + path, method="HEAD")
        assert urllib.request.urlopen(probe, timeout=30).status == 200


def test_models_come_and_go_elsewhere(sdk, name):
    assert sdk.pull(name).status == "success"
    assert [step.status for step in sdk.pull(name, stream=True)][-1] == "success"
    for ask in (lambda: sdk.pull("llama3.2"), lambda: list(sdk.pull("llama3.2", stream=True))):
        with pytest.raises(ollama.ResponseError, match="folio pull") as refused:
            ask()
        assert refused.value.status_code == 404
    for delete in (name, "llama3.2"):
        with pytest.raises(ollama.ResponseError) as refused:
            sdk.delete(delete)
        assert refused.value.status_code == 403


def test_pulling_tells_lines_and_only_an_operator_is_told_how_to_delete(server, name, serve, tmp_path):
    def pull(body):
        ask = urllib.request.Request(f"{server.url}/api/pull", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(ask, timeout=30) as answer:
            return answer.headers["content-type"], [json.loads(line) for line in answer.read().splitlines()]

    kind, steps = pull({"model": name})
    assert kind == "application/x-ndjson" and [step["status"] for step in steps] == ["pulling manifest", "success"]
    kind, steps = pull({"model": name, "stream": False})
    assert kind.startswith("application/json") and steps == [{"status": "success"}]

    keys = tmp_path / "keys.redb"
    create = [os.environ["FOLIO_BIN"], "keys", "create", "--keys", str(keys), "--tenant", "acme", "--scope"]
    said = [subprocess.run([*create, scope], capture_output=True, check=True, text=True).stdout.strip() for scope in ("generate", "generate,admin")]
    keyed = serve("--keys", str(keys))
    user, operator = (ollama.Client(host=keyed.url, headers={"Authorization": f"Bearer {key}"}) for key in said)
    with pytest.raises(ollama.ResponseError) as refused:
        ollama.Client(host=keyed.url).pull(name)
    assert refused.value.status_code == 401
    assert user.pull(name).status == "success"
    with pytest.raises(ollama.ResponseError) as refused:
        user.delete(name)
    assert refused.value.status_code == 403
    with pytest.raises(ollama.ResponseError, match="folio rm") as refused:
        operator.delete(name)
    assert refused.value.status_code == 400


def test_errors_are_the_sdks(sdk, name, serve):
    for wrong, status, said in [
        (lambda: sdk.chat("nobody", MESSAGES), 404, "nobody"),
        (lambda: list(sdk.chat("nobody", MESSAGES, stream=True)), 404, "nobody"),
        (lambda: sdk.chat(name, MESSAGES, options={"mirostat": 2}), 400, "options.mirostat"),
        (lambda: sdk.chat(name, MESSAGES, options={"temprature": 2}), 400, "temperature"),
        (lambda: sdk.chat(name, [{**MESSAGES[0], "images": [b"no image"]}]), 400, "messages\\[0\\].images"),
        (lambda: sdk.generate(name, "x", template="{{ .Prompt }}"), 400, "template"),
        (lambda: sdk.generate(name, "x", suffix="y"), 400, "suffix"),
        (lambda: sdk.chat(name, [{"role": "user", "content": "word " * 100_000}]), 400, "context length"),
    ]:
        with pytest.raises(ollama.ResponseError, match=said) as refused:
            wrong()
        assert refused.value.status_code == status
    keyed = serve("--api-key", "right")
    with pytest.raises(ollama.ResponseError) as refused:
        ollama.Client(host=keyed.url).chat(name, MESSAGES)
    assert refused.value.status_code == 401
    right = ollama.Client(host=keyed.url, headers={"Authorization": "Bearer right"})
    assert right.chat(name, MESSAGES, options=GREEDY).done


def test_many_at_once(server, name):
    async def ask(seed):
        sdk, options = ollama.AsyncClient(host=server.url), {"seed": seed, "temperature": 1, "num_predict": 12}
        whole = await sdk.chat(name, MESSAGES, options=options)
        parts = [part.message.content async for part in await sdk.chat(name, MESSAGES, options=options, stream=True)]
        assert "".join(parts) == whole.message.content

    async def all_of_them():
        await asyncio.gather(*(ask(seed) for seed in range(12)))

    asyncio.run(all_of_them())


def test_a_stream_that_is_left_ends(server, sdk, name):
    for _ in sdk.chat(name, MESSAGES, stream=True, options={"num_predict": 400}):
        break
    sdk.close()
    server.wait_idle()


def test_usage_adds_up(server, sdk, name):
    server.wait_idle()
    before = server.metric("vllm:prompt_tokens_total"), server.metric("vllm:generation_tokens_total")
    told = [sdk.chat(name, MESSAGES, options=GREEDY), list(sdk.generate(name, "x", options=GREEDY, stream=True))[-1]]
    server.wait_idle()
    after = server.metric("vllm:prompt_tokens_total"), server.metric("vllm:generation_tokens_total")
    assert after[0] - before[0] == sum(one.prompt_eval_count for one in told)
    assert after[1] - before[1] == sum(one.eval_count for one in told)
