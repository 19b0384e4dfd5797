"""The built-in model answers generated questions over the API as well as it is said to."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from conftest import client_of

GENERATOR = Path(__file__).parents[2] / "tools" / "demo_model" / "generate.py"
EVALUATION = GENERATOR.with_name("eval.json")
# The cache holds 16-bit keys and values and the evaluation 32-bit ones, so a tie may fall the other way.
ROUNDING = 0.04
# What the built-in model must reach at any distance: it is shown to strangers, and lossy caches are measured with it.
RETRIEVAL = 0.9

pytestmark = pytest.mark.skipif(bool(os.environ.get("FOLIO_CLIENTS_ARGS")), reason="SKIPPED: not the built-in model")


def questions(evaluation, args, n):
    """The very questions of the evaluation."""
    command = [sys.executable, str(GENERATOR), "--jsonl", "--seed", str(evaluation["seed"]), "--n", str(n), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=GENERATOR.parent)
    return [json.loads(line) for line in done.stdout.splitlines()]


def right(reply, question):
    """As tools/demo_model/evaluate.py judges."""
    answer = question["answer"]
    if question["kind"] in ("arithmetic", "word_problem"):
        numbers = re.findall(r"\d+", reply)
        return bool(numbers) and numbers[-1] == answer
    return re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", reply) is not None


def score(server, asked):
    async def one(client, model, question):
        reply = await client.chat.completions.create(
            model=model, messages=question["messages"], temperature=0, max_tokens=80
        )
        return right(reply.choices[0].message.content, question)

    async def all_of_them():
        async with client_of(server, cls=openai.AsyncOpenAI) as client:
            model = (await client.models.list()).data[0].id
            return await asyncio.gather(*(one(client, model, question) for question in asked))

    return sum(asyncio.run(all_of_them())) / len(asked)


@pytest.mark.parametrize("distance", ["50", "100", "250", "500", "1000", "1500"])
def test_facts_told_earlier(server, distance):
    got = compare(server, ["--kind", "retrieval", "--distance", distance], lambda evaluation: evaluation["retrieval"][distance])
    assert got >= RETRIEVAL


@pytest.mark.parametrize("kind", ["arithmetic", "word_problem"])
def test_sums(server, kind):
    compare(server, ["--kind", kind], lambda evaluation: evaluation["tasks"][kind])


def compare(server, args, of):
    """Served over the API, the weights answer as well as they did in the framework that trained them."""
    evaluation = json.loads(EVALUATION.read_text())
    expected = of(evaluation)
    got = score(server, questions(evaluation, args, expected["n"]))
    print(f"{' '.join(args)}: {got:.0%}, evaluated {expected['accuracy']:.0%}")
    assert abs(got - expected["accuracy"]) <= ROUNDING
    return got
