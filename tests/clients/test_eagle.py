"""An EAGLE-3 head beside the model: OpenAI's SDK gets the same tokens with and without, and most of its drafts of a story are right."""

from pathlib import Path

import anthropic
import pytest
from openai import APIStatusError

from conftest import client_of
from test_draft_model import ASKS, answers, total

HEAD = str(Path(__file__).parents[2] / "crates/folio/assets/demo-eagle3")


def test_a_head_changes_no_token_and_no_log_probability(serve, tmp_path):
    plain = answers(serve())
    small = ["--kv-cache-memory", "8MiB", "--max-model-len", "1024", "--max-num-seqs", "4"]
    drafted = serve("--draft-model", HEAD, "--disk-kv", str(tmp_path), "--disk-kv-size", "64MiB", *small)
    assert len(plain) == 2 * len(ASKS) and answers(drafted) == plain
    drafts, right = (total(drafted, f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
    assert 0 < right <= drafts


def test_drafts_of_what_it_was_trained_on_are_mostly_right(serve):
    server = serve("--speculate", "eagle3")
    client = client_of(server)
    of = lambda what: {dict(labels)["drafter"]: value for (name, labels), value in server.metrics().items() if name == f"vllm:spec_decode_num_{what}_total"}
    # How many are verified depends on what steps take here, and the more of them in a step, the fewer are right.
    for number in range(40):
        animal = ("fox", "cat", "horse", "dog")[number % 4]
        messages = [{"role": "user", "content": f"Tell me a story about a {animal}."}]
        few = {"speculative.n_max": 3}
        client.chat.completions.create(model="folio-demo", messages=messages, max_tokens=100, temperature=0, extra_body=few)
        drafts, right = of("draft_tokens"), of("accepted_tokens")
        if drafts["eagle3"] >= 60:
            break
    assert drafts["eagle3"] > 0 and drafts["model"] == 0
    assert right["eagle3"] > 0.4 * drafts["eagle3"], (right, drafts)
    assert 0 < of("drafts")["eagle3"] <= drafts["eagle3"] <= 3 * of("drafts")["eagle3"]
    place = lambda at: server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", drafter="eagle3", position=str(at))
    assert place(0) >= place(1) >= place(2) and place(0) + place(1) + place(2) == right["eagle3"]


def test_a_request_names_its_drafter_in_each_api(serve):
    server = serve("--speculate", "eagle3")
    openai, claude = client_of(server), anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    ask = [{"role": "user", "content": "Tell me a story about a fox."}]
    ways = [
        lambda more: openai.chat.completions.create(model="folio-demo", messages=ask, max_tokens=60, temperature=0, extra_body=more).choices[0].message.content,
        lambda more: openai.responses.create(model="folio-demo", input=ask, max_output_tokens=60, temperature=0, extra_body=more).output_text,
        lambda more: claude.messages.create(model="folio-demo", messages=ask, max_tokens=60, extra_body={"temperature": 0, **more}).content[0].text,
    ]
    of = lambda drafter: sum(
        value for (name, labels), value in server.metrics().items() if name == "vllm:spec_decode_num_draft_tokens_total" and dict(labels).get("drafter") == drafter
    )
    for say in ways:
        plain = say({"speculative.n_max": 0})
        before = of("eagle3"), of("suffix"), of("ngram")
        assert say({"speculative.type": "off"}) == plain and (of("eagle3"), of("suffix"), of("ngram")) == before
        assert say({"speculative.type": "suffix"}) == plain and say({"speculative.type": "ngram"}) == plain and of("eagle3") == before[0]
        assert say({"speculative.type": "eagle3"}) == plain
        with pytest.raises((APIStatusError, anthropic.APIStatusError), match="this server has suffix, ngram, eagle3, off, none"):
            say({"speculative.type": "mtp"})
    assert of("eagle3") > 0
