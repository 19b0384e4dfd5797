"""Tools and reasoning through OpenAI's SDK. The built-in model calls tools in the format it was trained with. In gpt-oss's format, which it
does not know, a call that must be made is begun for it in the prompt, and all it then says are the arguments: everything but those is certain."""

import json
import os

import openai
import pytest
from conftest import client_of

TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tools.jinja")
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the current time in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate an expression",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
built_in = pytest.mark.skipif(bool(os.environ.get("FOLIO_CLIENTS_ARGS")), reason="SKIPPED: not the built-in model")


@pytest.fixture
def tool_client(serve):
    return client_of(serve("--chat-template", TEMPLATE, "--tool-call-parser", "harmony"))


def ask(client, **params):
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        **{"model": model, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 12, "temperature": 0, **params}
    )


def test_a_named_function_is_called(tool_client):
    whole = ask(tool_client, tool_choice=NAMED)
    message = whole.choices[0].message
    (call,) = message.tool_calls
    assert message.content is None and call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "get_weather" and call.function.arguments

    name, arguments, finish = "", "", None
    for chunk in ask(tool_client, tool_choice=NAMED, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or []:
                assert piece.index == 0
                name += piece.function.name or ""
                arguments += piece.function.arguments
    assert (name, arguments, finish) == ("get_weather", call.function.arguments, whole.choices[0].finish_reason)

    # The SDK's own message goes back with the result.
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = ask(tool_client, messages=[*QUESTION, message, answer], tool_choice="none")
    assert again.choices[0].message.tool_calls is None
    assert again.usage.prompt_tokens > 0


def test_a_strict_function_gets_what_its_schema_says(tool_client):
    cities = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
    strict = {"type": "function", "function": {**WEATHER["function"], "parameters": cities, "strict": True}}
    for seed in range(3):
        answer = ask(tool_client, tools=[strict], tool_choice="required", max_tokens=150, temperature=1, seed=seed)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_what_cannot_be_kept_to_is_refused(serve, tmp_path):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client_of(serve("--chat-template", TEMPLATE, "--tool-call-parser", "pythonic")), tools=[strict])
    assert error.value.param == "tools[0].function.strict"
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(openai.BadRequestError) as error:
        ask(client_of(serve("--chat-template", str(plain))))
    assert error.value.param == "tools" and "--chat-template" in error.value.message


@built_in
@pytest.mark.parametrize(
    ("question", "name", "arguments", "result"),
    [
        ("What time is it in Oslo?", "get_time", {"city": "Oslo"}, "14:35"),
        ("What is 384 * 27?", "calculate", {"expression": "384 * 27"}, "10368"),
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}, "sunny"),
    ],
)
def test_the_built_in_model_calls_and_reads_the_result(client, question, name, arguments, result):
    messages, tools = [{"role": "user", "content": question}], [TIME, CALCULATE, WEATHER]
    choice = ask(client, messages=messages, tools=tools, max_tokens=100).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)

    streamed = {"name": "", "arguments": ""}
    for chunk in ask(client, messages=messages, tools=tools, max_tokens=100, stream=True):
        for piece in [piece for choice in chunk.choices for piece in choice.delta.tool_calls or []]:
            streamed["name"] += piece.function.name or ""
            streamed["arguments"] += piece.function.arguments or ""
    assert streamed == {"name": name, "arguments": call.function.arguments}

    history = [*messages, choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    told = ask(client, messages=history, tools=tools, max_tokens=100).choices[0].message
    assert told.tool_calls is None and result in told.content


@built_in
def test_the_built_in_model_is_made_to_call_or_not(client):
    tools = [TIME, CALCULATE, WEATHER]
    hello = [{"role": "user", "content": "Hello!"}]
    assert ask(client, messages=hello, tools=tools, max_tokens=50).choices[0].message.tool_calls is None
    (call,) = ask(client, messages=hello, tools=tools, tool_choice=NAMED, max_tokens=150).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and list(json.loads(call.function.arguments)) == ["city"]
    (call,) = ask(client, tools=tools, tool_choice="required", max_tokens=150).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert ask(client, tools=tools, tool_choice="none", max_tokens=50).choices[0].message.tool_calls is None
