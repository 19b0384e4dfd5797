"""python3 -m unittest discover tools/bench: the isolation test finds what is there, and nothing else."""

import argparse
import random
import unittest

import isolation


def rounds(leak, count=200, noise=0.1, cached=0, seed=3):
    """`leak`: by how much a repeat across tenants is faster than a cold request, as a share."""
    rng = random.Random(seed)
    def row(name):
        base = {"cold": 0.1, "repeat": 0.1 * (1 - leak), "hit": 0.01}[name]
        return {"ttft_s": base * rng.lognormvariate(0, noise), "cached_tokens": 384 if name == "hit" else cached if name == "repeat" else 0}
    return [{name: row(name) for name in ("repeat", "cold", "hit")} for _ in range(count)]


ARGUMENTS = argparse.Namespace(alpha=0.01, resolve=0.05, draws=400)


def faults(*args, **kwargs):
    return isolation.judge(rounds(*args, **kwargs), ARGUMENTS, random.Random(1))[2]


class Judging(unittest.TestCase):
    def test_no_difference_passes(self):
        self.assertEqual(faults(0.0), [])

    def test_a_leak_is_found(self):
        self.assertIn("differs from a cold request", "; ".join(faults(0.08)))

    def test_a_difference_of_the_stated_size_is_found_nine_times_in_ten(self):
        size = isolation.judge(rounds(0.0), ARGUMENTS, random.Random(1))[0]["detectable_difference"]
        found = sum(bool(faults(size, seed=seed)) for seed in range(40))
        self.assertGreaterEqual(found, 30)

    def test_too_little_power_is_a_fault(self):
        self.assertIn("would not be found", "; ".join(faults(0.0, count=20, noise=0.3)))

    def test_cached_tokens_across_tenants_are_a_fault(self):
        self.assertIn("reported cached tokens", "; ".join(faults(0.0, cached=16)))

    def test_without_hits_there_is_no_control(self):
        blind = [dict(row, hit=row["cold"]) for row in rounds(0.0)]
        self.assertIn("no control", "; ".join(isolation.judge(blind, ARGUMENTS, random.Random(1))[2]))


if __name__ == "__main__":
    unittest.main()
