#!/usr/bin/env python3
"""KL divergence of each quantized model's predictions from its 16-bit form, in Folio and in llama.cpp, for the same files and tokens.

    python kl.py --folio target/release/folio --models FOLDER [--only NAME] [--out results.json]

`FOLDER` is what tools/kl_models.py made. Each engine is compared with itself on the 16-bit file, KV in f16 on all sides, with softmax
and sums in f64; the second half of each window is scored, as llama.cpp's `llama-perplexity --kl-divergence` does. Folio's figures
are those of `folio bench kl`, and also those of `--quantize q8|q4`, which quantizes the 16-bit file while loading. Run with an
interpreter that has llama-cpp-python and numpy. Goes on where it stopped.
"""

import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

from common import folio_version, now, save
from side_by_side import PEER


def folio(a, base, other, context, tokens, more=()):
    command = [a.folio, "bench", "kl", base] + ([other] if other else []) + ["--tokens", tokens, "--context", str(context), "--json",
               "--kv-cache-dtype", "f16", "--threads", str(a.threads), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout)


def llama_logits(a, model, context, tokens):
    """[positions, vocabulary] as f32, or why not."""
    with tempfile.NamedTemporaryFile() as out:
        done = subprocess.run([sys.executable, PEER, model, "--logits", tokens, out.name, "--context", str(context), "--threads",
                               str(a.threads)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1], None
        answer = json.loads(done.stdout)
        return np.fromfile(out.name, np.float32).reshape(-1, answer["vocab"]), answer["version"]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def compare(base, other, following):
    p, q = log_softmax(base), log_softmax(other)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    rows = np.arange(len(following))
    return {
        "positions": len(kl), "mean_kl": kl.mean(), "mean_kl_error": kl.std(ddof=1) / len(kl) ** 0.5, "median_kl": float(np.median(kl)),
        "p99_kl": float(np.percentile(kl, 99)), "max_kl": kl.max(), "same_top": float((base.argmax(1) == other.argmax(1)).mean()),
        "base": {"perplexity": float(np.exp(-p[rows, following].mean()))}, "model": {"perplexity": float(np.exp(-q[rows, following].mean()))},
    }


def measure(a, name, about, result):
    path = lambda kind: os.path.join(a.models, f"{name}.{kind}.gguf")
    tokens = os.path.join(a.models, f"{name}.tokens.json")
    ids, context = json.load(open(tokens)), about["context"]
    following = np.array([ids[w * context + i + 1] for w in range(len(ids) // context) for i in range(context // 2, context - 1)])
    base = None
    for kind in [*about["shares"], "--quantize q8", "--quantize q4"]:
        if any(row["model"] == name and row["format"] == kind for row in result["rows"]):
            continue
        row = {"model": name, "format": kind, "share": about["shares"].get(kind)}
        if kind.startswith("--"):
            row["folio"] = folio(a, path("f16"), None, context, tokens, kind.split())
        else:
            row["folio"] = folio(a, path("f16"), path(kind.lower()), context, tokens)
            if base is None:
                base, version = llama_logits(a, path("f16"), context, tokens)
                result["versions"]["llama.cpp"] = version
            other, _ = llama_logits(a, path(kind.lower()), context, tokens)
            ok = not isinstance(base, str) and not isinstance(other, str)
            row["llama.cpp"] = compare(base, other, following) if ok else {"error": base if isinstance(base, str) else other}
        result["rows"].append(row)
        if a.out:
            save(a.out, result)
        text = lambda side: side.get("error") or f"{side['mean_kl']:.6f} +- {side['mean_kl_error']:.6f}, top {side['same_top']:.2%}"
        print(f"{name:12} {kind:14} folio {text(row['folio'])}   llama.cpp {text(row['llama.cpp']) if 'llama.cpp' in row else '-'}", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--models", required=True)
    ap.add_argument("--threads", type=int, default=1, help="changes no bit of Folio's")
    ap.add_argument("--only")
    ap.add_argument("--out")
    a = ap.parse_args()
    result = {"kind": "kl", "at": now(), "versions": {"folio": folio_version(a.folio)}, "models": {}, "rows": []}
    if a.out and os.path.exists(a.out):
        result.update({k: v for k, v in json.load(open(a.out)).items() if k in ("models", "rows", "versions")})
    for file in sorted(glob.glob(os.path.join(a.models, "*.json"))):
        name = os.path.basename(file)[:-len(".json")]
        if name.endswith(".tokens") or a.only not in (None, name):
            continue
        about = json.load(open(file))
        result["models"][name] = about
        measure(a, name, about, result)


if __name__ == "__main__":
    main()
