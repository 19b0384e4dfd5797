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
# Two samples of 50 to 100 questions each differ by this much in less than one of fifty runs.
SAMPLING_ERROR = 0.2


def questions(*args):
    # Without a tokenizer the generator estimates distances from the text's length, and needs no package.
    command = [sys.executable, str(GENERATOR), "--jsonl", "--seed", "7", "--tokenizer", "none", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=GENERATOR.parent)
    return [json.loads(line) for line in done.stdout.splitlines()]


def right(reply, question):
    """As tools/demo_model/evaluate.py judges."""
    answer = question["answer"]
    if question["kind"] == "arithmetic":
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


@pytest.mark.skipif(bool(os.environ.get("FOLIO_CLIENTS_ARGS")), reason="SKIPPED: not the built-in model")
@pytest.mark.parametrize(
    "args, recorded",
    [
        (("--kind", "retrieval", "--distance", "100", "--n", "50"), ("retrieval", "100")),
        (("--kind", "retrieval", "--distance", "500", "--n", "50"), ("retrieval", "500")),
        (("--kind", "arithmetic", "--n", "50"), ("tasks", "arithmetic")),
        (("--kind", "word_problem", "--n", "50"), ("tasks", "word_problem")),
    ],
)
def test_questions(server, args, recorded):
    """Other questions of the same kinds, over the API: as good as the evaluation of the weights in the training framework."""
    results = json.loads(EVALUATION.read_text())
    expected = results[recorded[0]][recorded[1]]["accuracy"]
    got = score(server, questions(*args))
    print(f"{' '.join(args)}: {got:.0%}, evaluated {expected:.0%}")
    assert got >= expected - SAMPLING_ERROR
