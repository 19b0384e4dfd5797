#!/usr/bin/env python3
"""What PyTorch and transformers do on this machine's device with a model of the same shape and random bf16 weights: JSON on standard output.

    python3 tools/gpu/peers.py tools/gpu/shapes/llama-3.1-8b

Matrix and copy rates, a prompt of 4,096 tokens, decoding with the static cache and SDPA at batch 1, 8 and 64, and transformers' continuous
batching at 256 requests. What fails is named under "failed" and the rest is measured all the same.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import transformers


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", help="folder with a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--matrix", type=int, default=8192)
    return parser.parse_args()


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(device, run, repeat=5):
    """Median seconds of `run`, after two that do not count."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeat):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rates(args):
    """A matrix product and a copy, as the limits that the figures are shares of."""
    n = args.matrix
    a = torch.randn(n, n, device=args.device, dtype=torch.bfloat16)
    b = torch.randn(n, n, device=args.device, dtype=torch.bfloat16)
    product = seconds(args.device, lambda: torch.mm(a, b))
    copied = torch.empty_like(a)
    copy = seconds(args.device, lambda: copied.copy_(a))
    return {"matrix_flop_per_s": 2 * n**3 / product, "copy_bytes_per_s": 2 * a.nbytes / copy}


@torch.inference_mode()
def prefill(model, args):
    tokens = torch.randint(0, model.config.vocab_size, (1, args.prompt), device=args.device)
    taken = seconds(args.device, lambda: model(tokens, use_cache=False, logits_to_keep=1), 3)
    return {"tokens": args.prompt, "tokens_per_s": args.prompt / taken}


@torch.inference_mode()
def decode(model, args, batch):
    """Tokens per second of `batch` sequences decoding from `depth` on: SDPA over a static cache, one forward pass a token."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=args.depth + args.decode + 8)
    tokens = torch.randint(0, model.config.vocab_size, (batch, args.depth), device=args.device)
    for row in range(0, args.depth, 512):
        part = tokens[:, row : row + 512]
        at = torch.arange(row, row + part.shape[1], device=args.device)
        out = model(part, past_key_values=cache, cache_position=at, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    times = []
    for step in range(args.decode):
        synchronize(args.device)
        start = time.perf_counter()
        at = torch.tensor([args.depth + step], device=args.device)
        out = model(token, past_key_values=cache, cache_position=at)
        token = out.logits[:, -1:].argmax(-1)
        synchronize(args.device)
        times.append(time.perf_counter() - start)
    return {"batch": batch, "depth": args.depth, "tokens_per_s": batch / statistics.median(times[8:])}


@torch.inference_mode()
def continuous(model, args):
    """transformers' continuous batching: all requests at once, 1,000 tokens in and 100 out each."""
    inputs = [torch.randint(0, model.config.vocab_size, (1000,)).tolist() for _ in range(args.requests)]
    config = transformers.GenerationConfig(
        max_new_tokens=100, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
    )
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=inputs, generation_config=config)
    taken = time.perf_counter() - start
    made = sum(len(output.generated_tokens) for output in outputs.values())
    if made == 0:
        raise RuntimeError(next((str(output.error) for output in outputs.values() if output.error), "no tokens"))
    return {"requests": args.requests, "output_tokens": made, "output_tokens_per_s": made / taken, "seconds": taken}


def main():
    args = parse()
    report = {"torch": torch.__version__, "transformers": transformers.__version__, "failed": {}}
    if args.device.startswith("cuda"):
        report["device"] = torch.cuda.get_device_name()

    def measure(name, run):
        try:
            report[name] = run()
        except Exception as error:  # What one peer cannot do is no reason to lose the others' figures.
            report["failed"][name] = f"{type(error).__name__}: {error}"[:500]
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
        print(name, file=sys.stderr)

    measure("rates", lambda: rates(args))
    config = transformers.AutoConfig.from_pretrained(args.shape)
    config._attn_implementation = "sdpa"
    with torch.device(args.device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        torch.set_default_dtype(torch.float32)
    measure("prefill", lambda: prefill(model, args))
    measure("decode", lambda: [decode(model, args, batch) for batch in args.batch])
    measure("continuous", lambda: continuous(model, args))
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
