"""/v1/embeddings through OpenAI's own client."""

import base64
import math
import struct

import openai
import pytest
from conftest import client_of

TEXTS = ["The fox sleeps in the barn.", "A train leaves at seven.", "x"]


def close(a, b):
    return len(a) == len(b) and all(abs(x - y) < 1e-6 for x, y in zip(a, b))


def test_the_default_of_the_sdk_is_base64_and_equals_floats(client, model):
    # The SDK asks for base64 when nothing is said and decodes it itself.
    reply = client.embeddings.create(model=model, input=TEXTS)
    floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert [item.index for item in reply.data] == [0, 1, 2]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    for decoded, told in zip(reply.data, floats.data):
        assert list(decoded.embedding) == pytest.approx(told.embedding, abs=1e-9)
        assert abs(math.hypot(*told.embedding) - 1) < 1e-5
    raw = client.embeddings.create(model=model, input=TEXTS[0], encoding_format="base64").data[0].embedding
    told = floats.data[0].embedding
    assert close(struct.unpack(f"<{len(told)}f", base64.b64decode(raw)), told)


def test_a_text_and_its_token_ids_are_the_same(client, server, model):
    ids = server.post("/tokenize", {"prompt": TEXTS[0], "add_special_tokens": True})["tokens"]
    answers = [client.embeddings.create(model=model, input=given) for given in (TEXTS[0], ids, [ids, ids])]
    vectors = [list(item.embedding) for answer in answers for item in answer.data]
    assert len(vectors) == 4 and all(vector == vectors[0] for vector in vectors)
    assert answers[2].usage.prompt_tokens == 2 * len(ids)


def test_dimensions_are_the_first_values_normalized(client, model):
    whole = client.embeddings.create(model=model, input=TEXTS[1]).data[0].embedding
    short = client.embeddings.create(model=model, input=TEXTS[1], dimensions=8).data[0].embedding
    length = math.hypot(*whole[:8])
    assert close(short, [value / length for value in whole[:8]])


def test_alone_or_in_company_the_bits_are_the_same(client, model):
    alone = [list(client.embeddings.create(model=model, input=text).data[0].embedding) for text in TEXTS]
    together = client.embeddings.create(model=model, input=TEXTS * 40)
    assert [list(item.embedding) for item in together.data] == alone * 40


def test_mean(serve):
    client = client_of(serve("--pooling", "mean"))
    model = client.models.list().data[0].id
    a, b = (list(client.embeddings.create(model=model, input=TEXTS[0]).data[0].embedding) for _ in range(2))
    assert a == b and abs(math.hypot(*a) - 1) < 1e-5


@pytest.mark.parametrize(
    "wrong, param",
    [
        (dict(input=""), "input"),
        (dict(input=[]), "input"),
        (dict(input=["a", ""]), "input"),
        (dict(input=[10**9]), "input"),
        (dict(input="a", dimensions=10**6), "dimensions"),
        (dict(input="a", encoding_format="hex"), "encoding_format"),
        (dict(input="a", extra_body={"temperature": 1}), "temperature"),
        (dict(input="word " * 200_000), "input"),
    ],
)
def test_what_is_refused(client, model, wrong, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(**{"model": model, **wrong})
    assert refused.value.param == param, refused.value


def test_usage_adds_up(server, client, model):
    before = server.metric("vllm:prompt_tokens_total")
    told = client.embeddings.create(model=model, input=TEXTS).usage.prompt_tokens
    server.wait_idle()
    assert server.metric("vllm:prompt_tokens_total") == before + told
