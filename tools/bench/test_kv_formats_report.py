"""What the page on formats of the KV cache makes of results."""

import json
import os
import tempfile
import unittest

import kv_formats_report


def row(name, difference, error=0.001, right=9):
    count = {"asked": 10, "right": right, "same": right}
    return {"format": name, "bytes_per_token": 100,
            "loss": {"nll": 2.0 + difference, "nll_error": 0.01, "difference": difference, "difference_error": error, "kl": abs(difference), "same_top": 0.99},
            "retrieval": {"by_distance": {"1000": count, "50": count}, "all": {"asked": 20, "right": 2 * right, "same": 2 * right}}}


def results(*rows, name="2026-01-01-demo.json", speed=None):
    quality = {"model": "demo", "weights": "BF16", "head_dim": 32, "context": 512, "positions": 1000, "formats": list(rows)}
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, name), "w") as out:
            json.dump({"quality": quality, "speed": speed} if speed else {"quality": quality}, out)
        return kv_formats_report.Results(folder)


class Page(unittest.TestCase):
    def test_a_difference_is_weighed_against_the_noise_of_rounding_and_of_the_text(self):
        rows = [row("f16", 0.0), row("bf16", -0.002), row("int8", 0.0015, 0.0001), row("fp8", 0.004, 0.003), row("int4", 0.05, 0.002)]
        quality = results(*rows).quality["demo"][1]
        words = [kv_formats_report.verdict(each, quality) for each in rows]
        self.assertEqual(words, ["", "", "within the noise of 16 bits", "not told from f16 by this text", "**+2.50 %**"])

    def test_distances_are_in_the_order_of_numbers(self):
        text = kv_formats_report.retrieval(results(row("f16", 0.0), row("int8", 0.1, right=8)))
        self.assertIn("| KV | 50 | 1000 | all |", text)
        self.assertIn("| int8 | 80% | 80% | **80.0%** | 80.0% |", text)

    def test_what_was_not_measured_is_said(self):
        with tempfile.TemporaryDirectory() as folder:
            nothing = kv_formats_report.Results(folder)
        self.assertEqual(kv_formats_report.speed(nothing), "Not measured yet.")
        self.assertIsNone(kv_formats_report.curve(nothing))
        self.assertIn("Not measured yet.", kv_formats_report.page(nothing))

    def test_the_plot_has_every_format(self):
        svg = kv_formats_report.curve(results(row("f16", 0.0), row("int8", 0.001), row("int4", 0.05, right=7)))
        for word in ("f16", "int8", "int4", "1e-"):
            self.assertIn(word, svg)


if __name__ == "__main__":
    unittest.main()
