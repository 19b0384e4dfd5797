#!/usr/bin/env python3
"""Folio's drafts beside llama.cpp's on the same weights, prompts and machine, in turn.

    python demo_gguf.py demo.f16.gguf; python demo_gguf.py draft.f16.gguf 2
    python llama_speculation.py --llama-server PATH --folio PATH --model demo.f16.gguf [--draft draft.f16.gguf] [--rounds 5] [--out results.json]

llama-server is built from the llama.cpp in the source archive of PyPI's llama-cpp-python (vendor/llama.cpp, target llama-server). Two servers run at a
time, the pair that is compared: each engine without drafts and with each of its drafters (llama.cpp's --spec-type, Folio's --speculate), Folio's suffix drafts
beside each of llama.cpp's, and both engines' draft models. Both are asked each prompt, one after the other; who is first changes with each. All are greedy and
get the same token ids, and the server that is not asked stands still (llama.cpp's threads go on waiting for work without sleeping for a while, and would
take a processor from the other); a prompt is asked once of each server, so that no answer was said before, after a request for one token that has it computed and kept.
Timed is the whole second request, by the client. Printed: medians over rounds of tokens per second, of the ratio second / first, and of drafts that were right.

Texts, all within the context of 2,048 tokens: `copy` and `facts` (a text to be said again, alone and in a conversation that has it), `edit` (a file to be given back; the built-in model does not edit, it copies), `quote`
(questions whose answers stand in the text), `agent` (a session that reads a part of a source of this repository again after each change), `story` (nothing to find
but what the answer repeats itself).
"""

import argparse
import http.client
import json
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time

from common import Server, folio_version, machine, now, save

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LLAMA_TYPES = ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"]
FOLIO_TYPES = ["suffix", "ngram"]
sys.path.insert(0, str(ROOT / "tools/demo_model"))


class Llama:
    """`llama-server` on a port, stopped at the end of a `with`."""

    def __init__(self, binary, model, port, threads, flags=()):
        self.address = f"127.0.0.1:{port}"
        command = [binary, "-m", model, "--port", str(port), "-t", str(threads), "--no-webui", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if "listening on http" in line:
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended:\n{''.join(self.log[-20:])}")
        # What it goes on to say must not fill the pipe.
        subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=30)

    def answer(self, prompt, tokens):
        body = post(self.address, "/completion", dict(prompt=prompt, n_predict=tokens, temperature=0, cache_prompt=True, return_tokens=True, ignore_eos=True))
        timings = body["timings"]
        return body["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


class Folio(Server):
    counts = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")

    def drafts(self):
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)) for name in self.counts]

    def answer(self, prompt, tokens):
        body = post(self.address, "/v1/completions", dict(prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, return_token_ids=True))
        return body["choices"][0].get("token_ids") or body["choices"][0]["text"], 0, 0


def post(address, path, body):
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    if answer.status != 200:
        raise SystemExit(f"{path}: HTTP {answer.status}: {text[:500]}")
    connection.close()
    return json.loads(text)


def asked(*texts):
    """A conversation as the built-in model reads it; the user begins, and both speak in turn."""
    turns = "".join(f"<|{('user', 'assistant')[at % 2]}|>{text}<|end|>" for at, text in enumerate(texts))
    return "<|begin|>" + turns + "<|assistant|>"


def prompts(round_):
    """Of each kind one, other ones in each round."""
    from generate import example
    from tasks import sentence
    from words import ANIMALS

    rng = random.Random(f"speculation/{round_}")
    lines = [sentence(rng) for _ in range(12)]
    sources = [text for path in sorted((ROOT / "crates/folio-engine/src").rglob("*.rs")) if len(text := path.read_text()) > 4000]
    source = sources[round_ % len(sources)]
    file = source[:1400]
    told = [rng.choice(["Okay, I will remember that.", "Got it."]) for _ in range(4)]
    facts = [" ".join(sentence(rng) for _ in range(4)) for _ in told]
    part = source[2000:2600]
    reads = [text for step in range(3) for text in (f"I read part_{round_}.rs again.", part.replace("let ", f"let part_{step}_", 1))]
    item = example(rng, "story_question", 0, len)
    return {
        "copy": asked("Repeat after me: " + " ".join(lines)),
        "edit": asked("Copy this exactly: " + file),
        "quote": asked(*[m["content"] for m in item["messages"] if m["role"] != "system"][-3:]),
        "agent": asked("Find out why the test fails, and mend it.", *reads),
        "facts": asked(*[text for pair in zip(facts, told) for text in pair], "Repeat after me: " + facts[0]),
        "story": asked(f"Tell me a story about a {rng.choice(ANIMALS)}."),
    }


def ask(server, other, prompt, tokens):
    other.process.send_signal(signal.SIGSTOP)
    try:
        return ask_alone(server, prompt, tokens)
    finally:
        other.process.send_signal(signal.SIGCONT)


def ask_alone(server, prompt, tokens):
    server.answer(prompt, 1)
    before = server.drafts() if isinstance(server, Folio) else None
    began = time.perf_counter()
    said, drafts, right = server.answer(prompt, tokens)
    seconds = time.perf_counter() - began
    if before:
        drafts, right = (after - earlier for earlier, after in zip(before, server.drafts()))
    return {"tokens_per_s": tokens / seconds, "drafts": drafts, "right": right, "said": said}


def ways(draft):
    """How each engine may draft: its flags. llama.cpp's threads wait for each other without sleeping, those of the model and of its draft model at
    the same time: on two processors two each make 7 tokens a second, one each 530, which is what it gets here."""
    llama = {"off": [], **{kind: ["--spec-type", kind] for kind in LLAMA_TYPES}}
    folio = {"off": ["--speculate", "off"], **{kind: ["--speculate", kind] for kind in FOLIO_TYPES}}
    if draft:
        llama["draft"] = ["--spec-type", "draft-simple", "-md", draft, "-t", "1", "-td", "1"]
        folio["draft"] = ["--draft-model", draft]
    return {("llama.cpp", name): flags for name, flags in llama.items()} | {("folio", name): flags for name, flags in folio.items()}


def pairs(all_ways):
    """What is compared, the first being what the second is measured by."""
    own = [((engine, "off"), (engine, name)) for engine, name in all_ways if name != "off"]
    beside = [(way, ("folio", "suffix")) for way in all_ways if way[0] == "llama.cpp" and way[1] != "draft"]
    drafts = [(("llama.cpp", "draft"), ("folio", "draft"))] if ("folio", "draft") in all_ways else []
    return own + beside + drafts


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--llama-server", required=True)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--draft")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--tokens", type=int, default=256)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--port", type=int, default=18230)
    ap.add_argument("--only", default="", help="pairs whose second is this, such as 'folio draft'")
    ap.add_argument("--out")
    a = ap.parse_args()
    all_ways = ways(a.draft)
    compared = [pair for pair in pairs(all_ways) if a.only in ("", " ".join(pair[1]))]

    if not compared:
        ap.error(f"--only {a.only}: there is no such pair; their seconds are {', '.join(sorted({' '.join(pair[1]) for pair in pairs(all_ways)}))}")

    def start(way, port):
        if way[0] == "llama.cpp":
            return Llama(a.llama_server, a.model, port, a.threads, ["-np", "1", "-c", "2048", *all_ways[way]])
        return Folio(a.folio, a.model, ["--threads", str(a.threads), "--max-num-seqs", "1", "--kv-cache-memory", "64MiB", *all_ways[way]])

    with start(("folio", "off"), a.port) as server:
        ids = lambda text: post(server.address, "/tokenize", dict(prompt=text, add_special_tokens=False))["tokens"][-(2040 - a.tokens):]
        asked_of_all = [{kind: ids(text) for kind, text in prompts(round_).items()} for round_ in range(a.rounds)]
    rows = []
    for number, pair in enumerate(compared):
        with start(pair[0], a.port) as first, start(pair[1], a.port + 1) as second:
            servers = list(zip(pair, (first, second)))
            for _, server in servers:
                server.answer(asked_of_all[0]["story"][:8], 16)
            for round_, texts in enumerate(asked_of_all):
                for at, (kind, prompt) in enumerate(texts.items()):
                    turns = servers if (round_ + at) % 2 == 0 else servers[::-1]
                    for (way, server), (_, other) in zip(turns, turns[::-1]):
                        rows.append(dict(pair=number, round=round_, text=kind, prompt_tokens=len(prompt), engine=way[0], drafter=way[1],
                                         **ask(server, other, prompt, a.tokens)))
        print(f"{' '.join(pair[0])} and {' '.join(pair[1])}", file=sys.stderr, flush=True)
    version = subprocess.run([a.llama_server, "--version"], capture_output=True, text=True).stderr.strip().splitlines()
    report(rows, compared)
    if a.out:
        for row in rows:
            row.pop("said")
        save(a.out, {"kind": "llama-speculation", "when": now(), "machine": machine(), "folio": folio_version(a.folio), "llama": version[:2],
                     "arguments": {"tokens": a.tokens, "rounds": a.rounds, "threads": a.threads}, "rows": rows})


def report(rows, compared):
    of = lambda **want: [row for row in rows if all(row[name] == value for name, value in want.items())]
    speed = lambda some: statistics.median(row["tokens_per_s"] for row in some)
    right = lambda some: f"{sum(row['right'] for row in some):.0f} of {sum(row['drafts'] for row in some):.0f}"
    print("| text | first | tokens/s | right of drafts | second | tokens/s | right of drafts | second / first (range) | same tokens |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in dict.fromkeys(row["text"] for row in rows):
        for number, pair in enumerate(compared):
            first, second = [of(text=kind, pair=number, engine=engine, drafter=drafter) for engine, drafter in pair]
            ratios = [mine["tokens_per_s"] / theirs["tokens_per_s"] for mine, theirs in zip(second, first)]
            same = sum(mine["said"] == theirs["said"] for mine, theirs in zip(second, first))
            print(f"| {kind} | {' '.join(pair[0])} | {speed(first):.0f} | {right(first)} | {' '.join(pair[1])} | {speed(second):.0f} | {right(second)} | "
                  f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) | {same} of {len(first)} |")


if __name__ == "__main__":
    main()
