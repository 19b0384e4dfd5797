"""Draws loss.png from loss.csv.

    python plot.py loss.csv loss.png
"""

import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def smooth(values, keep=0.85):
    out, last = [], None
    for v in values:
        last = v if last is None else keep * last + (1 - keep) * v
        out.append(last)
    return out


def main(source, target):
    rows = list(csv.DictReader(open(source)))
    tokens = [int(r["tokens"]) / 1e6 for r in rows]
    phases = [r["phase"] for r in rows]
    fig, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    for axis, key, label in ((axes[0], "loss", "weighted loss"), (axes[1], "accuracy", "tokens of replies right")):
        start = 0
        for i in range(1, len(rows) + 1):
            if i == len(rows) or phases[i] != phases[start]:
                x, y = tokens[start:i], [float(r[key]) for r in rows[start:i]]
                line = axis.plot(x, y, alpha=0.25)[0]
                axis.plot(x, smooth(y), color=line.get_color(), label=phases[start])
                start = i
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[1].set_xlabel("million tokens")
    axes[0].set_yscale("log")
    fig.legend(*axes[0].get_legend_handles_labels(), title="phase", loc="center right")
    axes[0].set_title("Training of the built-in model")
    fig.tight_layout(rect=(0, 0, 0.83, 1))
    fig.savefig(target, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
