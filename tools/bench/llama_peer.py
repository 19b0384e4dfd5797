#!/usr/bin/env python3
"""llama.cpp through llama-cpp-python, for figures beside Folio's on the same machine.

    python llama_peer.py MODEL.gguf --json [--threads 2] [--prompt 512] [--gen 16] [--batch 1,8,32] [--depth 128]
        one JSON object: prefill t/s (`pp512`) and decode t/s of several batch sizes (`B1`, `B8`, ...)
    python llama_peer.py MODEL.gguf --serve --depth 8192
        reads a prompt of that depth once, then answers each line `decode N` with the rate of N tokens decoded there;
        what was decoded is taken out of the cache again, so that every answer is about the same depth
    python llama_peer.py MODEL.gguf --logits TOKENS.json OUT.f32 --context 512
        logits of the second half of every window, as `folio bench kl` scores it, for the comparison in kl.py

Random tokens, KV in f16, llama.cpp's own defaults otherwise. Needs llama-cpp-python.
"""

import argparse
import ctypes
import json
import os
import random
import sys
import time

import llama_cpp as L


class Peer:
    def __init__(self, a, n_ctx, sequences, batch=2048):
        L.llama_backend_init()
        self.quiet = L.llama_log_callback(lambda level, text, data: None)
        L.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = L.llama_model_load_from_file(a.model.encode(), L.llama_model_default_params())
        assert self.model, "could not load " + a.model
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        params = L.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, batch, min(batch, 512), sequences
        params.n_threads = params.n_threads_batch = a.threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self.n_batch = batch
        self.context = L.llama_init_from_model(self.model, params)
        assert self.context, "could not make a context"
        self.random = random.Random(0)

    def token(self):
        return self.random.randrange(min(100, self.vocab // 4), max(self.vocab - 300, self.vocab // 2))

    def decode(self, rows):
        """rows: (token, position, sequence, wants logits)."""
        for at in range(0, len(rows), self.n_batch):
            part = rows[at:at + self.n_batch]
            batch = L.llama_batch_init(len(part), 0, 1)
            for i, (token, position, sequence, wants) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, wants
            batch.n_tokens = len(part)
            assert L.llama_decode(self.context, batch) == 0, "llama_decode failed"
            L.llama_synchronize(self.context)
            L.llama_batch_free(batch)

    def clear(self):
        L.llama_memory_clear(L.llama_get_memory(self.context), True)

    def prompt(self, tokens, sequence=0):
        return [(self.token(), i, sequence, i == tokens - 1) for i in range(tokens)]

    def steps(self, sequences, depth, count):
        """Seconds of `count` steps that decode a token of every sequence."""
        start = time.perf_counter()
        for k in range(count):
            self.decode([(self.token(), depth + k, s, True) for s in range(sequences)])
        return time.perf_counter() - start


def rates(a):
    sizes = [int(b) for b in a.batch.split(",")]
    peer = Peer(a, max(a.prompt, max(sizes) * (a.depth + a.gen + 1)), max(sizes))
    peer.decode(peer.prompt(16))
    peer.clear()
    out = {"threads": a.threads, "version": version()}
    start = time.perf_counter()
    peer.decode(peer.prompt(a.prompt))
    out[f"pp{a.prompt}"] = a.prompt / (time.perf_counter() - start)
    for n in sizes:
        peer.clear()
        start = time.perf_counter()
        peer.decode([row for s in range(n) for row in peer.prompt(a.depth, s)])
        prefill = n * a.depth / (time.perf_counter() - start)
        out[f"B{n}"] = {"prefill": prefill, "decode": n * a.gen / peer.steps(n, a.depth, a.gen)}
    print(json.dumps(out))


def serve(a):
    peer = Peer(a, a.depth + 256, 1)
    start = time.perf_counter()
    peer.decode(peer.prompt(a.depth))
    say = lambda **fields: print(json.dumps(fields), flush=True)
    say(ready=True, version=version(), prefill=a.depth / (time.perf_counter() - start))
    for line in sys.stdin:
        word, count = line.split()
        assert word == "decode", line
        peer.steps(1, a.depth, 1)  # wakes the threads up
        seconds = peer.steps(1, a.depth + 1, int(count))
        assert L.llama_memory_seq_rm(L.llama_get_memory(peer.context), 0, a.depth, -1)
        say(decode=int(count) / seconds)


def logits(a):
    import numpy as np

    tokens, out = json.load(open(a.logits[0])), open(a.logits[1], "wb")
    peer = Peer(a, a.context, 1, batch=a.context)
    first = a.context // 2
    for start in range(0, len(tokens) - a.context + 1, a.context):
        window = tokens[start:start + a.context]
        peer.clear()
        peer.decode([(t, i, 0, i >= first) for i, t in enumerate(window[:-1])])
        for i in range(first, a.context - 1):
            row = L.llama_get_logits_ith(peer.context, i)
            out.write(np.ctypeslib.as_array(row, (peer.vocab,)).astype(np.float32).tobytes())
    print(json.dumps({"vocab": peer.vocab, "version": version()}))


def version():
    try:
        commit = L.llama_build_info().decode() if hasattr(L, "llama_build_info") else ""
    except Exception:
        commit = ""
    return f"llama-cpp-python {L.__version__} {commit}".strip()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--gen", type=int, default=16)
    ap.add_argument("--batch", default="1,8,32")
    ap.add_argument("--depth", type=int, default=128)
    ap.add_argument("--context", type=int, default=512)
    ap.add_argument("--json", action="store_true", help="rates; the default")
    ap.add_argument("--serve", action="store_true")
    ap.add_argument("--logits", nargs=2, metavar=("TOKENS", "OUT"))
    a = ap.parse_args()
    serve(a) if a.serve else logits(a) if a.logits else rates(a)


if __name__ == "__main__":
    main()
