#!/usr/bin/env python3
"""Can one tenant see in the time to the first token what another has cached? Measured on a real `folio serve`, with a stated power.

    isolation.py --folio target/release/folio [--model FILE_OR_DIR] [--pairs 200] [--out results.json]

Every round makes a new text and asks three times for it, with two keys, in streams whose first token is timed:

    A asks (fills the cache)        B asks for the same text: *repeat*        B asks for a text nobody ever asked for: *cold*

The last two come in an order that is drawn for each round. Repeat and cold must be one distribution: a permutation test over the signs of the
paired differences of the logarithms (so exact whatever the distribution) must not reject at --alpha. Its power is stated: the smallest
difference that it would find in 90 of 100 such experiments, from the spread of these very pairs. The positive control, measured in the same rounds:
A asks again (*hit*), which must be found faster than cold by the same test. Fails (exit 1) if B's repeats differ, if a control is not found,
if the smallest detectable difference is larger than --resolve, or if a cached token was reported across tenants (that is, more than another prompt of B's own began with).

With tiers: `--folio-args '--kv-cache-memory SIZE --host-kv-memory 1GiB'` (or `--disk-kv FOLDER`, `--remote-kv URL --keyring FILE`), where SIZE holds two of
these prompts and no more, so that A's own repeat comes from the tier.

Run it on a machine that does nothing else. Standard library only.
"""

import argparse
import http.client
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time

from common import Server, folio_version, machine, now, save

KEYS = {"A": "isolation-key-a", "B": "isolation-key-b"}


def ask(connection, key, prompt):
    """Seconds to the first token, and cached tokens as the server reports them."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[key]}"}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"HTTP {answer.status}: {answer.read().decode()[:500]}")
    first, cached = None, None
    for line in answer:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        if first is None:
            first = time.perf_counter() - start
        usage = json.loads(line[6:]).get("usage")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if first is None or cached is None:
        raise SystemExit("the stream had no token or no usage")
    return first, cached


def permutation(differences, draws, rng):
    """Chance that signs drawn at random make a mean at least as far from 0: two-sided, with the data themselves as one draw."""
    observed = abs(sum(differences))
    beyond = sum(abs(sum(d if rng.random() < 0.5 else -d for d in differences)) >= observed - 1e-15 for _ in range(draws))
    return (beyond + 1) / (draws + 1)


def detectable(differences, alpha, power=0.9):
    """Smallest mean difference that a two-sided test at alpha finds with that power, as a share: exp(log difference) - 1."""
    normal = statistics.NormalDist()
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return math.expm1((normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)) * error)


def compare(rounds, what, against, a, rng):
    differences = [math.log(r[what]["ttft_s"] / r[against]["ttft_s"]) for r in rounds]
    mean = statistics.fmean(differences)
    return {"what": what, "against": against, "pairs": len(differences), "mean_difference": math.expm1(mean),
            "p_value": permutation(differences, a.draws, rng), "detectable_difference": detectable(differences, a.alpha)}


def own_tokens(prompt, asked):
    """Tokens of a prompt that B may find, because a prompt of its own began with them: by chance one, rarely two."""
    common = lambda other: next((i for i, (x, y) in enumerate(zip(prompt, other)) if x != y), min(len(prompt), len(other)))
    return max(map(common, asked), default=0)


def measure(a, address, rng):
    connection = http.client.HTTPConnection(address, timeout=600)
    low, high = map(int, a.ids.split(".."))
    text = lambda: [rng.randrange(low, high) for _ in range(a.tokens)]
    rounds, asked = [], []
    for index in range(a.warmup + a.pairs):
        shared, fresh = text(), text()
        row = {}
        order = ["repeat", "cold"]
        rng.shuffle(order)
        # A before and after, so that `hit` is never nearer in time to the first request than the two that are compared.
        ask(connection, "A", shared)
        for name in order:
            prompt = shared if name == "repeat" else fresh
            ttft, cached = ask(connection, "B", prompt)
            row[name] = {"ttft_s": ttft, "cached_tokens": cached, "own_tokens": own_tokens(prompt, asked)}
            asked.append(prompt)
        ttft, cached = ask(connection, "A", shared)
        row["hit"] = {"ttft_s": ttft, "cached_tokens": cached}
        row["first"] = order[0]
        if index >= a.warmup:
            rounds.append(row)
            if sys.stderr.isatty():
                print(f"\r{len(rounds)}/{a.pairs}", end="", file=sys.stderr)
    return rounds


def judge(rounds, a, rng):
    """What was found, and every reason to fail."""
    same = compare(rounds, "repeat", "cold", a, rng)
    control = compare(rounds, "hit", "cold", a, rng)
    faults = []
    if any(r[name]["cached_tokens"] > r[name].get("own_tokens", 0) for r in rounds for name in ("repeat", "cold")):
        faults.append("the other tenant's request reported cached tokens")
    if any(r["hit"]["cached_tokens"] == 0 for r in rounds):
        faults.append("the same tenant's repeat found nothing: no control")
    if same["p_value"] < a.alpha:
        faults.append(f"a repeat across tenants differs from a cold request (p = {same['p_value']:.4f})")
    if control["p_value"] >= a.alpha or control["mean_difference"] >= 0:
        faults.append("the same tenant's hits were not found to be faster: the test sees nothing")
    if same["detectable_difference"] > a.resolve:
        faults.append(f"a difference under {same['detectable_difference']:.1%} would not be found; {a.resolve:.0%} is asked for: more --pairs, a quieter machine")
    return same, control, faults


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--folio", required=True)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--pairs", type=int, default=200)
    ap.add_argument("--warmup", type=int, default=10, help="rounds before that are not counted")
    ap.add_argument("--tokens", type=int, default=384, help="of each prompt")
    ap.add_argument("--ids", default="300..1000", help="token ids of random prompts, from..to")
    ap.add_argument("--alpha", type=float, default=0.01)
    ap.add_argument("--resolve", type=float, default=0.05, help="largest difference that may go unnoticed, as a share of a cold TTFT")
    ap.add_argument("--draws", type=int, default=20000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--folio-args", default="", help="more of the server's flags, such as a tier: '--kv-cache-memory 24MiB --host-kv-memory 256MiB'")
    ap.add_argument("--out")
    a = ap.parse_args()
    rng = random.Random(a.seed)
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("".join(f"{key}\n" for key in KEYS.values()))
        keys.flush()
        with Server(a.folio, a.model, ["--threads", str(a.threads), "--api-key-file", keys.name, "--served-model-name", "m", *a.folio_args.split()]) as server:
            rounds = measure(a, server.address, rng)
    same, control, faults = judge(rounds, a, rng)
    median = lambda name: 1e3 * statistics.median(r[name]["ttft_s"] for r in rounds)
    print(f"\rTTFT, median: cold {median('cold'):.2f} ms, repeat across tenants {median('repeat'):.2f} ms, repeat of one tenant {median('hit'):.2f} ms")
    for found in (same, control):
        print(f"{found['what']} against {found['against']}: {found['mean_difference']:+.2%} (p = {found['p_value']:.4f}, {found['pairs']} pairs; "
              f"at alpha {a.alpha:g} a difference of {found['detectable_difference']:.2%} is found with a power of 90 %)")
    if a.out:
        arguments = {k: getattr(a, k) for k in ("model", "pairs", "warmup", "tokens", "ids", "alpha", "resolve", "draws", "seed", "threads", "folio_args")}
        # Microseconds: more digits are noise.
        short = [{n: (r[n] if n == "first" else {"ttft_us": round(1e6 * r[n]["ttft_s"]), "cached_tokens": r[n]["cached_tokens"], **({"own_tokens": r[n]["own_tokens"]} if "own_tokens" in r[n] else {})}) for n in r} for r in rounds]
        save(a.out, {"kind": "isolation", "at": now(), "arguments": arguments, "machine": machine(), "versions": [{"folio": folio_version(a.folio)}],
                     "repeat_against_cold": same, "hit_against_cold": control, "faults": faults, "rounds": short})
    for fault in faults:
        print(f"FAILED: {fault}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
