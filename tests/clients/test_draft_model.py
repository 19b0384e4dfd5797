"""A draft model beside the model, and a disk behind both: OpenAI's SDK gets the same tokens with and without."""

from conftest import client_of

ASKS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 3, "n": 2, "frequency_penalty": 0.5},
    {"temperature": 0, "response_format": {"type": "json_object"}},
]


def answers(server):
    client = client_of(server)
    told = []
    for number, more in enumerate(ASKS * 2):
        messages = [{"role": "user", "content": f"Tell me a story about a fox and {number % len(ASKS)} hens."}]
        answer = client.chat.completions.create(
            model="folio-demo", messages=messages, max_tokens=80, logprobs=True, top_logprobs=2, **more
        )
        told.append([(choice.message.content, [(t.token, t.logprob) for t in choice.logprobs.content]) for choice in answer.choices])
    return told


def total(server, name):
    return sum(value for (metric, _), value in server.metrics().items() if metric == name)


def test_a_draft_model_changes_no_token_and_no_log_probability(serve, tmp_path):
    plain = answers(serve())
    small = ["--kv-cache-memory", "8MiB", "--max-model-len", "1024", "--max-num-seqs", "4"]
    drafted = serve("--draft-model", "demo", "--disk-kv", str(tmp_path), "--disk-kv-size", "64MiB", *small)
    assert answers(drafted) == plain
    drafts, right = (total(drafted, f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
    assert 0 < right <= drafts


def test_metrics_are_by_drafter(serve):
    server = serve("--speculate", "ngram")
    text = "The fox ran into the wood. " * 6
    client_of(server).completions.create(model="folio-demo", prompt=text, max_tokens=40, temperature=0, extra_body={"ignore_eos": True})
    drafts = {dict(labels)["drafter"]: value for (name, labels), value in server.metrics().items() if name == "vllm:spec_decode_num_draft_tokens_total"}
    assert drafts["ngram"] > 0 and drafts["suffix"] == drafts["model"] == 0


def test_a_request_may_do_without(serve):
    server = serve("--draft-model", "demo")
    client = client_of(server)
    ask = {"model": "folio-demo", "messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 40}
    off = client.chat.completions.create(extra_body={"speculative.n_max": 0}, **ask)
    assert off.usage.completion_tokens_details is None
    assert total(server, "vllm:spec_decode_num_draft_tokens_total") == 0
    # A draft model that costs as much as the model pays for nobody, and reads few of the requests behind this one.
    on = client.chat.completions.create(seed=1, extra_body={"speculative.n_max": 16}, **ask)
    details = on.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    assert client.chat.completions.create(seed=2, **ask).usage.completion_tokens_details is None
