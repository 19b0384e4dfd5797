#!/usr/bin/env python3
"""Structured output over schemas from the wild: what is taken, whether what is said is valid, and what following a schema costs.

    schemas.py --folio target/release/folio --model FOLDER --schemas sample_a.tar.gz [--every 1] [--max-tokens 200] [--out results.json]

Each file of the archive is `{"schema", "tests": [...]}` (jsonschemabench's MaskBench). Every schema is asked for once at temperature 1, from several
clients at once; give a model with random weights, so that nothing but the grammar makes an answer valid. Answers that end are checked by
python-jsonschema with its format checker; answers cut off by max_tokens are counted apart. Times are the server's own (/metrics).
Needs: pip install jsonschema.
"""

import argparse
import collections
import concurrent.futures
import json
import re
import tarfile
import urllib.error
import urllib.request

import jsonschema

from common import Server, folio_version, machine, now, save


def ask(server, schema, seed, max_tokens):
    body = {
        "messages": [{"role": "user", "content": "?"}], "max_tokens": max_tokens, "temperature": 1, "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    completion = {"prompt": "?", **{k: v for k, v in body.items() if k != "messages"}}
    request = urllib.request.Request(
        f"http://{server.address}/v1/completions", json.dumps(completion).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=900) as reply:
            return json.load(reply)["choices"][0], None
    except urllib.error.HTTPError as error:
        return None, (error.code, json.load(error)["error"]["message"])


def judge(schema, text):
    """None if valid; else why not."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    try:
        validator = jsonschema.validators.validator_for(schema)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
    except jsonschema.ValidationError as error:
        return f"{'/'.join(map(str, error.absolute_schema_path))}: {error.message}"[:300]
    except Exception as error:  # The checker cannot read the schema (a reference it cannot find).
        return f"not checked: {type(error).__name__}"
    return None


def histogram(metrics, name):
    edges = [(float(e), int(c)) for e, c in re.findall(rf'{name}_bucket{{[^}}]*le="([0-9.e+-]+)"[^}}]*}} (\d+)', metrics)]
    count = int(re.search(rf"{name}_count{{[^}}]*}} (\d+)", metrics)[1])
    total = float(re.search(rf"{name}_sum{{[^}}]*}} ([0-9.e+-]+)", metrics)[1])
    at = lambda share: next((edge for edge, seen in edges if seen >= share * count), None)
    return {"count": count, "mean_s": total / count if count else 0, "p50_at_most_s": at(0.5), "p99_at_most_s": at(0.99), "buckets": edges}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folio", "model", "schemas"):
        ap.add_argument(f"--{name}", required=True)
    ap.add_argument("--every", type=int, default=1)
    ap.add_argument("--max-tokens", type=int, default=200)
    ap.add_argument("--clients", type=int, default=16)
    ap.add_argument("--folio-args", default="")
    ap.add_argument("--out")
    a = ap.parse_args()
    with tarfile.open(a.schemas) as tar:
        members = sorted((m for m in tar.getmembers() if m.name.endswith(".json")), key=lambda m: m.name)[:: a.every]
        cases = [(m.name, json.load(tar.extractfile(m))["schema"]) for m in members]
    results = []
    with Server(a.folio, a.model, ["--max-model-len", "2048"] + a.folio_args.split()) as server:
        with concurrent.futures.ThreadPoolExecutor(a.clients) as pool:
            asked = [pool.submit(ask, server, schema, index, a.max_tokens) for index, (_, schema) in enumerate(cases)]
            for (name, schema), future in zip(cases, asked):
                choice, refused = future.result()
                if refused:
                    results.append({"name": name, "outcome": "refused" if refused[0] == 400 else "failed", "why": refused[1][:300]})
                elif choice["finish_reason"] == "length":
                    results.append({"name": name, "outcome": "cut"})
                else:
                    why = judge(schema, choice["text"])
                    outcome = "valid" if why is None else "unchecked" if why.startswith("not checked") else "invalid"
                    results.append({"name": name, "outcome": outcome, **({"why": why, "text": choice["text"][:300]} if why else {})})
        metrics = server.get("/metrics")
    outcomes = collections.Counter(result["outcome"] for result in results)
    times = {name: histogram(metrics, f"folio:grammar_{name}_seconds") for name in ("compile", "mask", "wait")}
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()), f"of {len(results)} schemas")
    for name, figures in times.items():
        print(f"{name}: {figures['count']}, mean {figures['mean_s'] * 1e3:.3f} ms, p50 at most {figures['p50_at_most_s']}, p99 at most {figures['p99_at_most_s']} s")
    for result in results:
        if result["outcome"] in ("invalid", "failed"):
            print(result)
    if a.out:
        rest = [result for result in results if result["outcome"] not in ("valid", "cut")]
        save(a.out, {"kind": "schemas", "at": now(), "machine": machine(), "versions": [{"folio": folio_version(a.folio)}], "model": a.model.rstrip("/").split("/")[-1],
                     "max_tokens": a.max_tokens, "clients": a.clients, "schemas": len(results), "outcomes": outcomes, "times": times, "rest": rest})


if __name__ == "__main__":
    main()
