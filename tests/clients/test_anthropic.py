"""Anthropic's own SDK, unchanged, against a running folio."""

import asyncio
import json
import os

import anthropic
import pytest

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"extra_body": {"temperature": 0}}
TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tools.jinja")
WEATHER = {
    "name": "get_weather",
    "description": "Current weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NAMED = {"type": "tool", "name": "get_weather"}


def client_of(server, key="none", cls=anthropic.Anthropic, **options):
    return cls(base_url=server.url, api_key=key, **{"max_retries": 0, "timeout": 300, **options})


@pytest.fixture
def client(server):
    return client_of(server)


def ask(client, model, messages=STORY, **params):
    return client.messages.create(model=model, messages=messages, **{"max_tokens": 24, **params})


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_models(client, model):
    page = client.models.list()
    assert page.data[0].id == model and page.data[0].type == "model" and page.data[0].created_at.year > 2000
    assert client.models.retrieve(model).max_input_tokens > 0
    with pytest.raises(anthropic.NotFoundError) as error:
        client.models.retrieve("claude-99")
    assert error.value.type == "not_found_error"


def test_a_message(client, model):
    reply = ask(client, model, system=[{"type": "text", "text": "You tell short stories."}])
    assert reply.id.startswith("msg_") and reply.type == "message" and reply.role == "assistant" and reply.model == model
    (block,) = reply.content
    assert block.type == "text" and block.text
    assert reply.stop_reason in ("end_turn", "max_tokens") and reply.stop_sequence is None
    assert 1 <= reply.usage.output_tokens <= 24
    # What the SDK sends back as history is accepted.
    again = ask(client, model, [*STORY, reply.to_param(), {"role": "user", "content": "Go on."}])
    assert prompt_tokens(again.usage) > prompt_tokens(reply.usage)


def test_streaming_equals_the_whole(client, model):
    whole = ask(client, model, **GREEDY)
    with client.messages.stream(model=model, messages=STORY, max_tokens=24, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    events = [event.type for event in ask(client, model, stream=True, **GREEDY)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}


def test_many_at_once_with_the_async_client(server, model):
    prompts = [[{"role": "user", "content": f"My name is {name}."}] for name in ("Ann", "Bo", "Cleo", "Dan", "Eve", "Fay")]
    alone = [ask(client_of(server), model, prompt, **GREEDY).content[0].text for prompt in prompts]

    async def one(client, prompt):
        async with client.messages.stream(model=model, messages=prompt, max_tokens=24, **GREEDY) as stream:
            return (await stream.get_final_message()).content[0].text

    async def crowd():
        async with client_of(server, cls=anthropic.AsyncAnthropic) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(crowd()) == alone


def test_stop_sequences(client, model):
    free = ask(client, model, **GREEDY).content[0].text
    stop = free[8:11]
    cut = ask(client, model, stop_sequences=[stop], **GREEDY)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == free[: free.find(stop)]


def test_an_answer_that_was_begun(client, model):
    begun = [*STORY, {"role": "assistant", "content": "Once upon a time, the fox"}]
    assert ask(client, model, begun, **GREEDY).content[0].text.startswith((" ", ",", "'", "."))


@pytest.mark.parametrize(
    "params, param",
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "x"}, "container"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 2048}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
         "messages[0].content[0].image"),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "forever"}}]}, "system[0].cache_control.type"),
    ],
)
def test_bad_requests_name_their_parameter(client, model, params, param):
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, model, **params)
    assert error.value.type == "invalid_request_error"
    assert param in error.value.api_message
    assert error.value.request_id and error.value.body["request_id"] == error.value.request_id


def test_the_vendors_names_and_what_an_operator_lets_pass(serve):
    server = serve("--served-model-name", "claude-*,small", "--unknown-fields", "warn", "--accept-hint", "mood")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = {"messages": STORY, "max_tokens": 4}
    assert client.messages.create(model="claude-opus-5-5", **message).model == "small"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="gpt-5", **message)
    extra = {"mood": 1, "weather": 2}
    response = client.messages.with_raw_response.create(model="small", extra_body=extra, **message)
    assert response.headers["x-folio-ignored-fields"] == "weather"
    assert server.metric("folio:ignored_fields_total") == 1
    only_patterns = serve("--served-model-name", "claude-*")
    client = anthropic.Anthropic(base_url=only_patterns.url, api_key="none", max_retries=0)
    named = client.messages.create(model="claude-haiku-4-5", **message).model
    assert [model.id for model in client.models.list()] == [named] and "*" not in named
    with pytest.raises(RuntimeError, match="--accept-hint tools"):
        serve("--accept-hint", "tools")


def test_other_errors(serve, client, model):
    with pytest.raises(anthropic.NotFoundError) as error:
        ask(client, "claude-99")
    assert error.value.type == "not_found_error" and "claude-99" in error.value.api_message
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, model, [{"role": "user", "content": "fox " * 20000}])
    assert error.value.error_code == "context_length_exceeded"
    server = serve("--api-key", "key-one", "--api-key", "key-two")
    with pytest.raises(anthropic.AuthenticationError) as error:
        ask(client_of(server, "wrong"), model)
    assert error.value.type == "authentication_error"
    one, two = client_of(server, "key-one"), client_of(server, None, auth_token="key-two")
    long = [{"role": "user", "content": "Remember this. " * 20 + "What did I say?"}]
    read = [ask(who, model, long, max_tokens=1).usage.cache_read_input_tokens for who in (one, one, two)]
    assert read[0] == read[2] == 0 < read[1], "a tenant finds what it cached, another does not"


def test_tokens_are_counted(client, model):
    params = {"model": model, "messages": STORY, "system": "You tell short stories."}
    count = client.messages.count_tokens(**params).input_tokens
    assert count == prompt_tokens(client.messages.create(max_tokens=1, **params).usage)


def test_breakpoints_tell_what_was_cached(serve):
    server = serve()
    client = client_of(server)
    model = client.models.list().data[0].id
    system = [{"type": "text", "text": "You know all about foxes. " * 30, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

    def usage(text, **params):
        return ask(client, model, [{"role": "user", "content": text}], system=system, max_tokens=1, **params).usage

    first = usage("How do they sleep?")
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens > first.input_tokens > 0
    assert first.cache_creation.ephemeral_5m_input_tokens == 0
    again = usage("What do they eat?")
    assert again.cache_read_input_tokens > 0
    # Found by whole blocks: less than one is computed again.
    assert again.cache_read_input_tokens + again.cache_creation_input_tokens == first.cache_creation_input_tokens
    automatic = usage("What do they eat?", cache_control={"type": "ephemeral"})
    assert automatic.cache_creation.ephemeral_1h_input_tokens == 0
    assert automatic.input_tokens < again.input_tokens
    # Warming computes the prompt and says nothing.
    silent = ask(client, model, system=system, max_tokens=0)
    assert silent.content == [] and silent.usage.output_tokens == 0


@pytest.fixture
def tool_client(serve):
    return client_of(serve("--chat-template", TEMPLATE, "--tool-call-parser", "harmony"))


def test_a_tool_is_used(tool_client):
    model = tool_client.models.list().data[0].id
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    params = {"model": model, "tools": [WEATHER], "max_tokens": 12, **GREEDY}
    whole = tool_client.messages.create(messages=question, tool_choice=NAMED, **params)
    (call,) = whole.content
    assert call.type == "tool_use" and call.id.startswith("toolu_") and call.name == "get_weather"
    # A model that does not know this format may say what is no JSON, which is told as it is.
    said = call.input.get("INVALID_JSON")
    pieces, kinds = "", []
    for event in tool_client.messages.create(messages=question, tool_choice=NAMED, stream=True, **params):
        kinds.append(event.type)
        if event.type == "content_block_delta":
            assert event.delta.type == "input_json_delta"
            pieces += event.delta.partial_json
    assert pieces == said if said is not None else json.loads(pieces) == call.input
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    # The SDK's own message goes back with the result.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*question, whole.to_param(), {"role": "user", "content": [result]}]
    again = tool_client.messages.create(messages=history, tool_choice={"type": "none"}, **params)
    assert all(block.type == "text" for block in again.content)


@pytest.mark.skipif(bool(os.environ.get("FOLIO_CLIENTS_ARGS")), reason="SKIPPED: not the built-in model")
def test_the_built_in_model_uses_a_tool(client, model):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    params = {"model": model, "tools": [WEATHER], "max_tokens": 100, **GREEDY}
    for choice in ({"type": "auto"}, {"type": "any"}, NAMED):
        with client.messages.stream(messages=question, tool_choice=choice, **params) as stream:
            whole = stream.get_final_message()
        (call,) = whole.content
        assert whole.stop_reason == "tool_use" and call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"}), choice
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*question, whole.to_param(), {"role": "user", "content": [result]}]
    (told,) = client.messages.create(messages=history, **params).content
    assert told.type == "text" and "sunny" in told.text


def test_a_full_queue_is_a_rate_limit_error(serve):
    server = serve("--max-num-seqs", "1", "--max-queued-requests", "1")
    model = client_of(server).models.list().data[0].id

    async def crowd():
        async with client_of(server, cls=anthropic.AsyncAnthropic) as client:
            # A long answer each, so that they wait for each other.
            asks = [client.messages.create(model=model, messages=STORY, max_tokens=200) for _ in range(12)]
            return await asyncio.gather(*asks, return_exceptions=True)

    outcomes = asyncio.run(crowd())
    refused = [error for error in outcomes if isinstance(error, anthropic.RateLimitError)]
    assert refused and len(refused) < 12
    for error in refused:
        assert error.type == "rate_limit_error" and 1 <= int(error.response.headers["retry-after"]) <= 120
    server.wait_idle()
