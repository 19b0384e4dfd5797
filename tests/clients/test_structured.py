"""Structured output through the official SDKs. What the small model says is nonsense now and then; its form never is."""

import json
import os
import tarfile
from typing import Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "Who are you?"}]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["cat", "dog"]}, "weight": {"type": "number"}},
    "required": ["name", "kind", "weight"],
    "additionalProperties": False,
}


def model_of(client):
    return client.models.list().data[0].id


def test_parse_of_the_sdk(client):
    for seed in range(4):
        answer = client.chat.completions.parse(
            model=model_of(client), messages=QUESTION, response_format=Person, max_tokens=300, seed=seed, temperature=1.2
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(message.parsed, Person) and message.refusal is None


def test_a_stream_is_the_whole_answer(client):
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    ask = dict(model=model_of(client), messages=QUESTION, response_format=form, max_tokens=200, seed=7)
    whole = client.chat.completions.create(**ask).choices[0].message.content
    text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True) if c.choices)
    assert text == whole
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "form, fits",
    [
        ({"choice": ["positive", "negative"]}, lambda text: text in ("positive", "negative")),
        ({"regex": r"[a-z]{3,8}@[a-z]{2,5}\.com"}, lambda text: text.endswith(".com") and "@" in text),
        ({"grammar": 'root ::= "SELECT " column\ncolumn ::= "a" | "b"'}, lambda text: text in ("SELECT a", "SELECT b")),
        ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ],
)
def test_structured_outputs_of_vllm(client, form, fits):
    answer = client.chat.completions.create(
        model=model_of(client), messages=QUESTION, max_tokens=200, extra_body={"structured_outputs": form}
    )
    assert answer.choices[0].finish_reason == "stop" and fits(answer.choices[0].message.content)


def test_anthropics_format(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = client.messages.create(
        model=client.models.list().data[0].id,
        max_tokens=200,
        messages=QUESTION,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert message.stop_reason == "end_turn"
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)


def test_what_cannot_be_enforced_is_named(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model_of(client), messages=QUESTION, response_format=form)
    assert "uniqueItems" in refused.value.message and refused.value.param == "response_format.json_schema.schema"


def test_schemas_from_the_wild(client):
    """Every tenth of a collection, where it is at hand: all answers that end are valid."""
    data = os.environ.get("FOLIO_TEST_DATA", os.path.join(os.path.dirname(__file__), "..", "..", "..", "shared", "data"))
    archive = os.path.join(data, "jsonschema-maskbench", "sample_a.tar.gz")
    if not os.path.exists(archive):
        pytest.skip(f"no {archive}: schemas from the wild are NOT tested")
    taken, ended = 0, 0
    with tarfile.open(archive) as tar:
        files = sorted((m for m in tar.getmembers() if m.name.endswith(".json")), key=lambda m: m.name)
        for index, member in enumerate(files[::10]):
            schema = json.load(tar.extractfile(member))["schema"]
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            try:
                answer = client.chat.completions.create(
                    model=model_of(client), messages=QUESTION, response_format=form, max_tokens=150, seed=index, temperature=1
                )
            except openai.BadRequestError as refused:
                assert refused.param.startswith("response_format"), refused
                continue
            taken += 1
            choice = answer.choices[0]
            if choice.finish_reason == "stop":
                ended += 1
                jsonschema.validate(json.loads(choice.message.content), schema, format_checker=jsonschema.FormatChecker())
    print(f"{taken} schemas taken, {ended} answers ended")
    assert taken > 50 and ended > 10
