#!/usr/bin/env python3
"""How far e4m3 is from a Gaussian vector, by how its scale is chosen: what docs/kv-formats.md says about fp8. Standard library only, a minute.

    python3 tools/bench/e4m3_error.py
"""

import bisect
import math
import random

DIM, VECTORS = 64, 400
LEVELS = sorted({m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0})
MIDDLES = [(a + b) / 2 for a, b in zip(LEVELS, LEVELS[1:])]


def e4m3(x, scale):
    return [math.copysign(LEVELS[bisect.bisect_left(MIDDLES, abs(v) / scale)] * scale, v) for v in x]


def int8(x):
    scale = max(map(abs, x)) / 127
    return [round(v / scale) * scale for v in x]


def squares(x, y):
    return sum((a - b) ** 2 for a, b in zip(x, y))


def best_of(count):
    """The best of `count` scales in the octave above the smallest that fits."""
    def stored(x):
        least = max(map(abs, x)) / 448
        return min((e4m3(x, least * 2 ** (k / count)) for k in range(count)), key=lambda y: squares(x, y))
    return stored


def rotated(x):
    """Walsh-Hadamard."""
    x, distance = list(x), 1
    while distance < len(x):
        for i in range(len(x)):
            if not i & distance:
                x[i], x[i + distance] = x[i] + x[i + distance], x[i] - x[i + distance]
        distance *= 2
    return [v / math.sqrt(len(x)) for v in x]


def main():
    rng = random.Random(1)
    vectors = [[rng.gauss(0, 1) for _ in range(DIM)] for _ in range(VECTORS)]
    ways = {"e4m3, largest / 448": best_of(1), "e4m3, best of 8 scales": best_of(8), "e4m3, best of 32 scales": best_of(32),
            "e4m3, rotated": lambda x: rotated(best_of(1)(rotated(x))), "int8, largest / 127": int8}
    total = sum(v * v for x in vectors for v in x)
    for name, stored in ways.items():
        print(f"{name:24} {100 * math.sqrt(sum(squares(x, stored(x)) for x in vectors) / total):.2f} %")


if __name__ == "__main__":
    main()
