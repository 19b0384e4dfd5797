"""Frameworks on top of OpenAI's SDK, pointed at a Folio server as their users would: instructor, LangChain, LiteLLM."""

import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no network

import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from folio_server import Server  # noqa: E402

TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools.jinja")
QUESTION = "Who are you?"


class Pet(BaseModel):
    """A pet."""

    # Or a small model goes on with fields of its own.
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


@pytest.fixture(scope="module")
def server():
    server = Server("--chat-template", TEMPLATE, "--tool-call-parser", "harmony")
    yield server
    assert server.stop() == 0, "".join(server.log)


@pytest.fixture
def model(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none").models.list().data[0].id


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_instructor_gets_its_model(server, model, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=server.url + "/v1", api_key="none"), mode=mode)
    pet = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], response_model=Pet, max_tokens=300, max_retries=0
    )
    assert isinstance(pet, Pet)


def chat(server, model, **params):
    return ChatOpenAI(model=model, base_url=server.url + "/v1", api_key="none", max_retries=0, stream_usage=True, **{"max_tokens": 24, "temperature": 0, **params})


def test_langchain_talks_and_streams(server, model):
    llm = chat(server, model)
    messages = [SystemMessage("Be kind."), HumanMessage(QUESTION)]
    answer = llm.invoke(messages)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    chunks = list(llm.stream(messages))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == answer.usage_metadata["output_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchains_structured_output(server, model, method):
    llm = chat(server, model, max_tokens=300)
    strict = {"strict": True} if method == "function_calling" else {}
    assert isinstance(llm.with_structured_output(Pet, method=method, **strict).invoke(QUESTION), Pet)


def test_langchain_over_responses(server, model):
    answer = chat(server, model, use_responses_api=True).invoke(QUESTION)
    assert answer.text if isinstance(answer.text, str) else answer.text()


def test_litellm_talks_and_streams(server, model):
    ask = dict(
        model="openai/" + model, api_base=server.url + "/v1", api_key="none", max_tokens=24, temperature=0,
        messages=[{"role": "user", "content": QUESTION}],
    )
    answer = litellm.completion(**ask)
    text = answer.choices[0].message.content
    assert text and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)) == text


def test_litellm_maps_a_refusal(server, model):
    with pytest.raises(litellm.BadRequestError) as refused:
        litellm.completion(
            model="openai/" + model, api_base=server.url + "/v1", api_key="none", messages=[{"role": "user", "content": "x"}],
            temperature=9, max_retries=0,
        )
    assert "temperature" in str(refused.value)


def test_litellm_speaks_anthropics_api_to_it(server, model):
    answer = litellm.completion(
        model="anthropic/" + model, api_base=server.url, api_key="none", max_tokens=24, messages=[{"role": "user", "content": QUESTION}]
    )
    assert answer.choices[0].message.content
