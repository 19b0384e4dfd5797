"""Tools and reasoning through OpenAI's SDK. The built-in model was not trained to call tools; a call that must be made is begun
for it in the prompt, and in gpt-oss's format all it then says are the arguments. So everything but the arguments is certain."""

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


def test_what_cannot_be_kept_to_is_refused(serve, client):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client_of(serve("--chat-template", TEMPLATE, "--tool-call-parser", "pythonic")), tools=[strict])
    assert error.value.param == "tools[0].function.strict"
    if os.environ.get("FOLIO_CLIENTS_ARGS"):
        return
    # The built-in model's own template shows no tools.
    with pytest.raises(openai.BadRequestError) as error:
        ask(client)
    assert error.value.param == "tools" and "--chat-template" in error.value.message
