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
    "args, least",
    [
        (("--kind", "retrieval", "--distance", "500", "--n", "50"), 0.9),
        (("--kind", "arithmetic", "--n", "50"), 0.5),
    ],
)
def test_questions(server, args, least):
    got = score(server, questions(*args))
    print(f"{' '.join(args)}: {got:.0%}")
    assert got >= least
