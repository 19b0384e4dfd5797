"""The committed raw results as cells: what a table or a plot shows, wherever it was measured.

A cell is (shape, format, what), such as ("llama-1b", "Q8_0", "decode x8 at 128"). Of several files that hold one the newest counts, by its
name, which begins with the date. Files from before `kind` was written are understood too, and count as older than all others.
"""

import glob
import json
import os
import statistics

HERE = os.path.dirname(os.path.abspath(__file__))
FORMATS = ["bf16", "Q8_0", "Q4_0"]
# layers, hidden, width of q, width of k and v together, intermediate, vocabulary; embeddings are tied in all.
SHAPES = {
    "llama-1b": (16, 2048, 2048, 1024, 8192, 128256),
    "qwen3-0.6b": (28, 1024, 2048, 2048, 3072, 151936),
    "qwen2.5-0.5b": (24, 896, 896, 256, 4864, 151936),
    "smol-135m": (30, 576, 576, 384, 1536, 49152),
}


def body(shape):
    layers, hidden, q, kv, inner, _ = SHAPES[shape]
    return layers * (hidden * (q + kv) + q * hidden + 3 * hidden * inner)


def head(shape):
    return SHAPES[shape][1] * SHAPES[shape][5]


def cost(shape, weight_bytes, what):
    """Bytes and multiply-adds per token."""
    layers, _, q, kv, _, _ = SHAPES[shape]
    if what.startswith("prefill"):
        tokens = int(what.split()[1])
        return weight_bytes / tokens, body(shape) + head(shape) / tokens + 2 * q * layers * (tokens + 1) / 2
    batch, depth = (int(word.strip("x")) for word in what.split()[1::2])
    return weight_bytes / batch + depth * 2 * layers * kv, body(shape) + head(shape) + depth * 2 * q * layers


def with_int8(shape, run):
    """Earlier runs did not write the byte rate, but their limit of a prompt of quantized weights was made with it."""
    prefill = next((f for f in run["prefill"] if f["tokens"] == 512 and f["limited_by"] == "multiplications"), None)
    if "int8_op_per_s" in run or prefill is None or run["weight_bytes"] > 1.9 * (body(shape) + head(shape)):
        return run
    weights = body(shape) + head(shape) / 512
    attention = cost(shape, 0, "prefill 512")[1] - weights
    seconds = 1 / prefill["limit_tokens_per_s"] - 2 * attention / run["f32_flop_per_s"]
    return dict(run, int8_op_per_s=2 * weights / seconds)


class Cell:
    """Measured pairs of one cell; shares only where Folio's process measured its limits too."""

    def __init__(self, ours, theirs, shares=(), by=(), limits=()):
        self.ours, self.theirs, self.shares, self.by, self.limits = ours, theirs, list(shares), list(by), list(limits)

    def ratios(self):
        return [f / l for f, l in zip(self.ours, self.theirs)]

    def ratio(self):
        return statistics.median(self.ratios())

    def share(self):
        """Of the limit; nothing where that was not measured."""
        return statistics.median(self.shares) if self.shares else None


def normal(name):
    return {"q8_0": "Q8_0", "q4_0": "Q4_0"}.get(name.lower(), "bf16" if name.lower() in ("bf16", "f16") else name)


class Results:
    def __init__(self, folder=os.path.join(HERE, "results")):
        self.cells, self.folio, self.files, self.latest = {}, {}, {}, {}
        # Of start_time.py, in the order of their names.
        self.starts = []
        # Of front_end.py, server_threads.py and neighbour.py: the newest file of each kind, of front_end.py by the time of a step.
        self.server = {}
        loaded = []
        for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
            with open(path, encoding="utf-8") as file:
                name, data = os.path.basename(path), json.load(file)
            if not isinstance(data, dict):
                continue
            if data.get("kind") in ("isolation", "schemas"):
                continue  # docs/kv-cache.md's, docs/api.md's
            if data.get("kind") in ("front-end", "server-threads", "neighbour"):
                self.server[data["kind"], data["arguments"].get("step_us")] = (name, data)
            elif "kind" in data or "rounds" in data:
                loaded.append(("kind" in data, name, data))
            elif "first streamed token" in data.get("what", ""):
                self.starts.append((name, data))
        for _, name, data in sorted(loaded, key=lambda item: item[:2]):
            kind = data.get("kind", "side_by_side")
            if kind == "side_by_side":
                self.side_by_side(name, data)
            elif kind == "depth":
                self.depth(name, data)
            else:
                self.latest[(kind, data.get("shape"), data.get("format"))] = (name, data)

    def put(self, key, cell, name):
        self.cells[key], self.files[key] = cell, name

    def side_by_side(self, name, data):
        rounds = data["rounds"]
        if not rounds:
            return
        model = rounds[0]["folio"]["model"]
        shape = data.get("shape") or next(s for s in sorted(SHAPES, key=len, reverse=True) if model.startswith(s))
        suffix = model[len(shape):].strip(".")
        format_ = normal(data.get("format") or suffix or "bf16")
        for r in rounds:
            self.folio.setdefault((shape, format_), []).append(with_int8(shape, r["folio"]))
        for i, figure in enumerate(rounds[0]["folio"]["prefill"]):
            peer = f"pp{figure['tokens']}"
            if figure["tokens"] == 512 and peer in rounds[0]["llama.cpp"]:
                self.pairs(name, (shape, format_, "prefill 512"), [(r["folio"]["prefill"][i], r["llama.cpp"][peer]) for r in rounds])
        for i, figure in enumerate(rounds[0]["folio"]["decode"]):
            peer = f"B{figure['batch']}"
            what = f"decode x{figure['batch']} at {figure['tokens']}"
            self.pairs(name, (shape, format_, what), [(r["folio"]["decode"][i], r["llama.cpp"][peer]["decode"]) for r in rounds])

    def pairs(self, name, key, pairs):
        self.put(key, Cell([f["tokens_per_s"] for f, _ in pairs], [l for _, l in pairs], [f["share_of_limit"] for f, _ in pairs],
                           [f["limited_by"] for f, _ in pairs], [f["limit_tokens_per_s"] for f, _ in pairs]), name)

    def depth(self, name, data):
        key = (data["shape"], normal(data["format"]), f"decode x1 at {data['arguments']['depth']}")
        rate = lambda engine: [pair[engine]["tokens_per_s"] for pair in data["pairs"]]
        if data["pairs"]:
            self.put(key, Cell(rate("folio"), rate("llama.cpp")), name)

    def median(self, shape, format_, field):
        """Of what every Folio process of that model measured itself; None if none did."""
        values = [f[field] for f in self.folio.get((shape, format_), []) if field in f]
        return statistics.median(values) if values else None

    def of(self, kind):
        """(shape, format) -> newest (file, data) of that kind."""
        return {key[1:]: value for key, value in self.latest.items() if key[0] == kind}
