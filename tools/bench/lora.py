#!/usr/bin/env python3
"""What adapters cost: tokens per second of a batch in which no, one, some or all sequences have an adapter of their own.

    lora.py --folio target/release/folio --model /models/llama-1b [--rank 16] [--sequences 32] [--rounds 5] [--folio-args "--quantize q8"] [--out results.json]

One server has all adapters (PEFT folders of random numbers, made by this script with numpy, every linear module of every layer). In each round the cells
come in turn: all sequences without an adapter, with 1, 8, and as many different ones as there are sequences. Decoding: short prompts, `--decode` tokens
each. Prefill: one prompt of `--prefill` tokens at a time, without and with an adapter. The figures are medians of rounds, and ratios to the cell without in the same round.
"""

import argparse
import json
import os
import shlex
import statistics
import struct
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy

from common import machine, now, save

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "clients"))
from folio_server import Server  # noqa: E402


def modules(config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner)}


def write_adapter(folder, config, rank, seed):
    draw, header, parts, at = numpy.random.default_rng(seed), {}, [], 0
    for layer in range(config["num_hidden_layers"]):
        for name, (out, inner) in modules(config).items():
            for part, shape in (("A", (rank, inner)), ("B", (out, rank))):
                values = draw.standard_normal(shape, dtype=numpy.float32) * 0.01
                # As bf16.
                data = (values.view(numpy.uint32) >> 16).astype(numpy.uint16).tobytes()
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"
                header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + len(data)]}
                parts.append(data)
                at += len(data)
    text = json.dumps(header).encode()
    os.makedirs(folder)
    with open(os.path.join(folder, "adapter_model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
    with open(os.path.join(folder, "adapter_config.json"), "w") as file:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": rank}, file)


def complete(url, model, prompt, tokens):
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        usage = json.loads(answer.read())["usage"]
    assert usage["completion_tokens"] == tokens, usage


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folio", required=True)
    parser.add_argument("--model", required=True, help="a folder of safetensors with config.json")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folio-args", default="--quantize q8")
    parser.add_argument("--out")
    args = parser.parse_args()
    os.environ["FOLIO_BIN"] = os.path.abspath(args.folio)
    config = json.load(open(os.path.join(args.model, "config.json")))
    vocab, serial = config["vocab_size"], [0]

    def prompt(length):
        serial[0] += 1
        return [(serial[0] * 7919 + i * 104729) % (vocab - 1000) + 10 for i in range(length)]

    with tempfile.TemporaryDirectory() as folder:
        names = [f"a{i}" for i in range(args.sequences)]
        for i, name in enumerate(names):
            write_adapter(os.path.join(folder, name), config, args.rank, i)
        lora = [part for name in names for part in ("--lora", f"{name}={os.path.join(folder, name)}")]
        server = Server(args.model, *lora, "--max-loras", str(args.sequences), "--max-lora-rank", str(args.rank),
                        "--max-num-seqs", str(args.sequences), "--speculate", "off", *shlex.split(args.folio_args))
        base = json.loads(server.get("/v1/models"))["data"][0]["id"]
        cells = {"none": [base], "1": names[:1], "8": names[:8], str(args.sequences): names}
        rates = {f"decode, {cell}": [] for cell in cells} | {"prefill, none": [], "prefill, 1": []}
        try:
            for _ in range(args.rounds):
                for cell, models in cells.items():
                    asked = [(models[i % len(models)], prompt(4)) for i in range(args.sequences)]
                    began = time.monotonic()
                    with ThreadPoolExecutor(args.sequences) as pool:
                        list(pool.map(lambda one: complete(server.url, *one, args.decode), asked))
                    rates[f"decode, {cell}"].append(args.sequences * args.decode / (time.monotonic() - began))
                for cell in ("none", "1"):
                    began = time.monotonic()
                    for _ in range(3):
                        complete(server.url, cells[cell][0], prompt(args.prefill), 1)
                    rates[f"prefill, {cell}"].append(3 * args.prefill / (time.monotonic() - began))
        finally:
            server.stop()
    figures = {}
    for cell, values in rates.items():
        of = rates["prefill, none" if cell.startswith("prefill") else "decode, none"]
        ratios = [a / b for a, b in zip(values, of)]
        figures[cell] = {"tokens_per_s": round(statistics.median(values), 1), "ratio": round(statistics.median(ratios), 3),
                         "ratios": [round(min(ratios), 3), round(max(ratios), 3)]}
        print(f"{cell:14} {figures[cell]['tokens_per_s']:8.1f} tokens/s  {figures[cell]['ratio']:.3f} of none ({figures[cell]['ratios'][0]:.3f} to {figures[cell]['ratios'][1]:.3f})")
    if args.out:
        save(args.out, {"made_at": now(), "machine": machine(), "args": vars(args) | {name: os.path.basename(getattr(args, name)) for name in ("folio", "model", "out")}, "figures": figures, "rates": rates})


if __name__ == "__main__":
    main()
