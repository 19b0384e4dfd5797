"""Adapters (LoRA) of the built-in model: each is a model of its own for who asks, beside others in the same batch."""

import json
import random
import shutil
import struct
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from conftest import client_of

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM = 192, 768, 4, 6, 2, 32
SHAPES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}
PROMPTS = ["Once upon a time there was a", "The little dog wanted to", "In the morning the children"]


def write_adapter(folder, seed, rank=4, names=tuple(SHAPES), **fields):
    """A PEFT folder of random numbers, as strong as an adapter that changes what is said."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    header, data = {}, b""
    for layer in range(LAYERS):
        for name in names:
            out, inner = SHAPES[name]
            for part, shape in (("A", (rank, inner)), ("B", (out, rank))):
                values = [draw.gauss(0, 0.1) for _ in range(shape[0] * shape[1])]
                start = len(data)
                data += struct.pack(f"<{len(values)}f", *values)
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def said(client, model, prompt):
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0, logprobs=0)
    assert answer.model == model
    return answer.choices[0].text, answer.choices[0].logprobs.token_logprobs


def admin(server, route, **body):
    request = urllib.request.Request(server.admin + route, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def adapted(serve, tmp_path):
    first = write_adapter(tmp_path / "start" / "first", 1)
    write_adapter(tmp_path / "dir" / "second", 2, rank=20, names=("self_attn.q_proj", "mlp.down_proj"))
    return serve("--lora", f"first={first}", "--lora-dir", str(tmp_path / "dir"), "--admin-listen", "127.0.0.1:0",
                 "--speculate", "suffix")


def test_each_is_a_model_beside_the_others(adapted):
    client = client_of(adapted)
    base = client.models.list().data[0].id
    assert admin(adapted, "/v1/load_lora_adapter", lora_name="second", lora_path="second") == (
        200, "Success: LoRA adapter 'second' added successfully.")
    cards = {card.id: card for card in client.models.list().data}
    assert set(cards) == {base, "first", "second"}
    assert (cards["first"].parent, cards["second"].lora_rank, cards[base].parent) == (base, 20, None)
    assert client.models.retrieve("second").parent == base
    asked = [(model, prompt) for prompt in PROMPTS for model in (base, "first", "second")]
    alone = [said(client, *one) for one in asked]
    for at in range(0, len(asked), 3):
        assert len({text for text, _ in alone[at:at + 3]}) == 3, "an adapter changes nothing"
    # All of them together, again and again, in other orders: the same bits.
    for seed in range(3):
        order = list(range(len(asked)))
        random.Random(seed).shuffle(order)
        with ThreadPoolExecutor(len(order)) as pool:
            answers = list(pool.map(lambda at: said(client, *asked[at]), order))
        assert answers == [alone[at] for at in order]
    with pytest.raises(openai.NotFoundError):
        said(client, "third", PROMPTS[0])
    # Every API takes the name.
    chat = client.chat.completions.create(model="first", messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
    assert chat.model == "first"
    assert client.responses.create(model="first", input="Hello", max_output_tokens=4).model == "first"
    vectors = [client.embeddings.create(model=model, input="a dog").data[0].embedding for model in (base, "first")]
    assert vectors[0] != vectors[1]
    metric = [line for line in adapted.get("/metrics").splitlines() if line.startswith("vllm:lora_requests_info")]
    assert len(metric) == 1 and 'max_lora="8"' in metric[0]


def test_what_is_cached_is_the_adapters_own(adapted, tmp_path):
    client = client_of(adapted)
    base = client.models.list().data[0].id
    prompt = "The quick brown fox jumps over the lazy dog. " * 8

    def cached(model):
        usage = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0).usage
        return usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0

    assert [cached(base), cached("first"), cached("first") > 16, cached(base) > 16] == [0, 0, True, True]
    # The same weights under another name are the same.
    again = write_adapter(tmp_path / "dir" / "again", 1)
    assert admin(adapted, "/v1/load_lora_adapter", lora_name="again", lora_path=str(again))[0] == 200
    assert cached("again") > 16
    # Other weights under a name that was in use find nothing of the old ones'.
    before = said(client, "again", PROMPTS[0])
    write_adapter(tmp_path / "dir" / "other", 3)
    status, text = admin(adapted, "/v1/load_lora_adapter", lora_name="again", lora_path="other")
    assert status == 400 and "already been loaded" in text
    assert admin(adapted, "/v1/load_lora_adapter", lora_name="again", lora_path="other", load_inplace=True)[0] == 200
    assert cached("again") == 0
    assert said(client, "again", PROMPTS[0]) != before
    assert said(client, "first", PROMPTS[0]) == before


def test_one_that_goes_ends_nobody(adapted):
    client = client_of(adapted)
    whole = client.completions.create(model="first", prompt=PROMPTS[0], max_tokens=120, temperature=0,
                                      extra_body={"ignore_eos": True}).choices[0].text
    stream = client.completions.create(model="first", prompt=PROMPTS[0], max_tokens=120, temperature=0, stream=True,
                                       extra_body={"ignore_eos": True})
    text = next(iter(stream)).choices[0].text
    assert admin(adapted, "/v1/unload_lora_adapter", lora_name="first")[0] == 200
    text += "".join(event.choices[0].text for event in stream if event.choices)
    assert text == whole
    with pytest.raises(openai.NotFoundError):
        said(client, "first", PROMPTS[0])
    assert admin(adapted, "/v1/unload_lora_adapter", lora_name="first")[0] == 404


def test_what_an_operator_may_not_load(adapted, tmp_path):
    outside = write_adapter(tmp_path / "outside", 4)
    (tmp_path / "dir" / "link").symlink_to(outside)
    wide = write_adapter(tmp_path / "dir" / "wide", 5, rank=65, names=("self_attn.k_proj",))
    base = client_of(adapted).models.list().data[0].id
    for body, status, words in [
        ({"lora_name": "x"}, 400, "must be provided"),
        ({"lora_name": "x", "lora_path": str(outside)}, 404, "No adapter found"),
        ({"lora_name": "x", "lora_path": "../outside"}, 404, "No adapter found"),
        ({"lora_name": "x", "lora_path": "link"}, 404, "No adapter found"),
        ({"lora_name": "x", "lora_path": "."}, 404, "No adapter found"),
        ({"lora_name": "x", "lora_path": "nothing"}, 404, "No adapter found"),
        ({"lora_name": "a,b", "lora_path": "second"}, 400, "letters, digits"),
        ({"lora_name": "", "lora_path": "second"}, 400, "letters, digits"),
        ({"lora_name": base, "lora_path": "second"}, 400, "the model itself"),
        ({"lora_name": "first", "lora_path": "second"}, 400, "already been loaded"),
        ({"lora_name": "x", "lora_path": str(wide)}, 400, "rank 65, more than the 64"),
        ({"lora_name": "x", "lora_path": "second", "more": 1}, 400, "more"),
    ]:
        found, text = admin(adapted, "/v1/load_lora_adapter", **body)
        assert found == status and words in text, (body, found, text)
    # Not at the port that strangers reach.
    request = urllib.request.Request(adapted.url + "/v1/load_lora_adapter", b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 404


def test_those_that_come_and_go_say_what_they_say(serve, tmp_path):
    names = ("self_attn.q_proj", "mlp.down_proj")
    folders = {name: write_adapter(tmp_path / name, seed, names=names) for seed, name in enumerate(("a", "b", "c"))}
    flags = [flag for name, folder in folders.items() for flag in ("--lora", f"{name}={folder}")]
    asked = [(name, prompt) for prompt in PROMPTS for name in folders] * 2
    random.Random(1).shuffle(asked)

    def answers(*more):
        server = serve(*flags, *more)
        client = client_of(server)
        with ThreadPoolExecutor(len(asked)) as pool:
            return server, client, list(pool.map(lambda one: said(client, *one), asked))

    server, client, found = answers("--max-cpu-loras", "1")
    assert found == answers()[2]
    assert len({str(one) for one in found}) == len(asked) // 2, "adapters change nothing"
    assert server.metric("folio:adapters_resident") == 1
    assert server.metric("folio:adapter_evictions_total") >= 2
    assert server.metric("folio:adapter_loads_total", outcome="loaded") >= 2
    assert [card.id for card in client.models.list().data][1:] == list(folders)
    # What is read again is what got the name, or nothing.
    before = {name: said(client, name, PROMPTS[0]) for name in folders}
    write_adapter(folders["a"], 9, names=names)
    shutil.rmtree(folders["b"])
    for name, words in [("a", "not those that it was loaded with"), ("b", "cannot be read any more")]:
        with pytest.raises(openai.InternalServerError, match=words):
            said(client, name, PROMPTS[0])
        assert said(client, "c", PROMPTS[0]) == before["c"]
    write_adapter(folders["a"], 0, names=names)
    assert said(client, "a", PROMPTS[0]) == before["a"]
