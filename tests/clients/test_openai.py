"""OpenAI's own SDK, unchanged, against a running folio."""

import asyncio
import json
import threading
import time

import openai
import pytest
from conftest import client_of

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"temperature": 0, "extra_body": {"return_token_ids": True}}


def chat(client, model, messages=STORY, **params):
    return client.chat.completions.create(model=model, messages=messages, **{"max_tokens": 24, **params})


def gather(stream):
    """(text, token ids, finish reason, usage) of a stream with one choice."""
    text, ids, finish, usage = "", [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
            finish = choice.finish_reason or finish
    return text, ids, finish, usage


def test_models(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-99")
    assert error.value.code == "model_not_found"


def test_a_chat(client, model):
    reply = chat(client, model)
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 1 <= reply.usage.completion_tokens <= 24
    # What the SDK sends back as history is accepted.
    again = chat(client, model, [*STORY, choice.message, {"role": "user", "content": "Go on."}])
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_streaming_equals_the_whole(client, model):
    whole = chat(client, model, **GREEDY)
    stream = chat(client, model, stream=True, stream_options={"include_usage": True}, **GREEDY)
    text, ids, finish, usage = gather(stream)
    assert text == whole.choices[0].message.content
    assert ids == whole.choices[0].token_ids
    assert finish == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens == len(ids)
    first = next(iter(chat(client, model, stream=True)))
    assert first.choices[0].delta.role == "assistant"


def test_the_sdks_own_stream_helper(client, model):
    with client.chat.completions.stream(model=model, messages=STORY, max_tokens=400, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = chat(client, model, max_tokens=400, temperature=0)
    assert final.choices[0].message.content == whole.choices[0].message.content


@pytest.mark.parametrize(
    "params, param",
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"extra_body": {"cache_salt": "x"}}, "cache_salt"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].image_url"),
    ],
)
def test_bad_requests_name_their_parameter(client, model, params, param):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model, **params)
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"
    assert param.split("[")[0] in error.value.message
    assert error.value.request_id


def test_a_prompt_that_is_too_long(client, model):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model, [{"role": "user", "content": "fox " * 20000}])
    assert error.value.code == "context_length_exceeded"


def test_keys_and_tenants(serve):
    server = serve("--api-key", "key-one", "--api-key", "key-two")
    with pytest.raises(openai.AuthenticationError) as error:
        client_of(server, "wrong").models.list()
    assert error.value.code == "invalid_api_key"
    one, two = client_of(server, "key-one"), client_of(server, "key-two")
    model = one.models.list().data[0].id
    long = [{"role": "user", "content": "Remember this. " * 20 + "What did I say?"}]

    def ask(client):
        reply = chat(client, model, long, max_tokens=4, temperature=0)
        return reply.usage.prompt_tokens_details.cached_tokens, reply.choices[0].message.content

    first, said = ask(one)
    hit, again = ask(one)
    other, same = ask(two)
    assert first == 0 and hit > 16 and other == 0, "a tenant finds what it cached, another does not"
    assert said == again == same
    assert server.metric("vllm:prompt_tokens_cached_total") == hit


def test_a_full_queue_is_a_rate_limit_error(serve):
    server = serve("--max-num-seqs", "1", "--max-queued-requests", "1")
    client = client_of(server)
    model = client.models.list().data[0].id
    outcomes = []

    def ask():
        try:
            chat(client, model, max_tokens=200, extra_body={"ignore_eos": True})
            outcomes.append("served")
        except openai.RateLimitError as error:
            assert 1 <= int(error.response.headers["retry-after"]) <= 120
            assert error.code == "queue_full"
            outcomes.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(12)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(outcomes) == 12 and "served" in outcomes and "refused" in outcomes, outcomes
    assert server.metric("vllm:admission_rejections_total", reason="queue_full") == outcomes.count("refused")
    # The SDK's own retries get everybody served in the end.
    patient = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=5, timeout=120)
    assert chat(patient, model, max_tokens=2).choices
    server.wait_idle()


def test_a_closed_stream_is_cancelled(server, client, model):
    server.wait_idle()
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    stream = chat(client, model, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    for index, _ in enumerate(stream):
        if index == 3:
            break
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    metrics = server.wait_idle(20)
    assert metrics["vllm:request_success_total", frozenset({("finished_reason", "abort")})] == before + 1


def test_thirty_two_streams_say_what_each_says_alone(server, model):
    prompts = [[{"role": "user", "content": f"My name is {name}. Tell me about a {thing}."}]
               for name in ("Ann", "Bo", "Cleo", "Dan", "Eve", "Fay", "Gus", "Hal")
               for thing in ("fox", "green house", "boat on the lake", "clock")]
    params = dict(GREEDY, max_tokens=40)
    solo = client_of(server)
    alone = [chat(solo, model, prompt, **params).choices[0].token_ids for prompt in prompts]

    async def one(client, prompt):
        ids = []
        stream = await client.chat.completions.create(model=model, messages=prompt, stream=True, **params)
        async for chunk in stream:
            for choice in chunk.choices:
                ids += getattr(choice, "token_ids", None) or []
        return ids

    async def crowd():
        async with client_of(server, cls=openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(crowd()) == alone
    assert len({tuple(ids) for ids in alone}) > 1, "the prompts are answered differently"


def test_logprobs(client, model):
    reply = chat(client, model, logprobs=True, top_logprobs=4, temperature=0, max_tokens=12)
    choice = reply.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == reply.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 4
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the best"
        assert entry.top_logprobs[0].logprob == entry.logprob
    spoken = entries[:-1] if choice.finish_reason == "stop" else entries
    assert b"".join(bytes(entry.bytes) for entry in spoken).decode() == choice.message.content


def test_n_and_seeds(client, model):
    params = {"n": 4, "temperature": 1.2, "seed": 11, "max_tokens": 20}
    texts = [choice.message.content for choice in chat(client, model, **params).choices]
    assert len(set(texts)) > 1, "choices of one request differ"
    assert texts == [choice.message.content for choice in chat(client, model, **params).choices], "a seed repeats them"
    assert texts != [choice.message.content for choice in chat(client, model, **{**params, "seed": 12}).choices]
    first = chat(client, model, **{**params, "n": 1}).choices[0].message.content
    assert first == texts[0], "the first choice does not depend on how many there are"


def test_stop(client, model):
    free = chat(client, model, temperature=0).choices[0].message.content
    stop = free[8:11]
    cut = chat(client, model, temperature=0, stop=[stop]).choices[0]
    assert cut.message.content == free[: free.find(stop)] and cut.finish_reason == "stop"
    text, _, finish, _ = gather(chat(client, model, temperature=0, stop=stop, stream=True))
    assert (text, finish) == (cut.message.content, "stop")


def test_metrics_are_the_sums_over_responses(server, client, model):
    names = ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total")
    before = server.wait_idle()
    sums = [0, 0, 0]
    for index in range(6):
        content = "The same beginning of a prompt, longer than one block of the cache. " * 3 + str(index)
        reply = chat(client, model, [{"role": "user", "content": content}], n=1 + index % 3, max_tokens=8)
        sums[0] += reply.usage.prompt_tokens
        sums[1] += reply.usage.prompt_tokens_details.cached_tokens
        sums[2] += reply.usage.completion_tokens
    after = server.metrics()
    assert [after[name, frozenset()] - before[name, frozenset()] for name in names] == sums
    assert sums[1] > 0


def test_completions(client, model):
    prompts = ["Once upon a time", "The red fox"]
    reply = client.completions.create(model=model, prompt=prompts, max_tokens=6, temperature=0, echo=True, logprobs=2)
    assert [choice.text.startswith(prompt) for choice, prompt in zip(reply.choices, prompts)] == [True, True]
    logprobs = reply.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and all(lp <= 0 for lp in logprobs.token_logprobs[1:])
    text = reply.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset):
        assert text.startswith(token, offset) or token.startswith("<|"), "offsets are into the text"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=model, prompt="a", suffix="b")
    assert error.value.param == "suffix"


def test_token_ids_as_a_prompt(server, client, model):
    ids = server.post("/tokenize", {"prompt": "Once upon a time"})["tokens"]
    by_ids = client.completions.create(model=model, prompt=ids, max_tokens=6, temperature=0)
    by_text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage.prompt_tokens == len(ids)
    assert "Once upon a time" in server.post("/detokenize", {"tokens": ids})["prompt"]


def test_health_and_version(server):
    assert json.loads(server.get("/health")) == {"status": "ok"}
    assert json.loads(server.get("/version"))["version"]
    started = time.time()
    assert "curl" in server.get("/") and time.time() - started < 60


def test_a_prediction_changes_no_token_and_is_told_of_in_usage(client, model):
    ask = dict(
        model=model,
        # Long enough that some drafts are verified, whatever rows cost here just now: at least one in 32 steps.
        messages=[{"role": "user", "content": "Tell me a story."}],
        temperature=0,
        max_tokens=200,
        extra_body={"speculative.n_max": 0},
    )
    plain = client.chat.completions.create(**ask)
    assert plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content
    ask["extra_body"] = {"speculative.n_max": 16}
    drafted = client.chat.completions.create(prediction={"type": "content", "content": text}, **ask)
    assert drafted.choices[0].message.content == text
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens
    details = drafted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
