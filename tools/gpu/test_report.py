"""What report.py makes of what verify.sh writes."""

import json
import pathlib
import tempfile
import unittest

import report


def row(batch, tokens, share):
    return {"batch": batch, "tokens": tokens, "tokens_per_s": 100.0, "min_tokens_per_s": 90, "max_tokens_per_s": 110,
            "limit_tokens_per_s": 150, "limited_by": "bytes", "share_of_limit": share}


FILES = {
    "engine-BF16": {"prefill": [row(1, 512, 0.6), row(1, 4096, 0.6)], "decode": [row(1, 1024, 0.7)]},
    "link": {"gpu": {"upload_bytes_per_s": 52e9, "download_bytes_per_s": 49e9, "read_bytes_per_s": 3.1e12, "matrix_flop_per_s": 6e14}},
    "serve-1000": {"requests": 256, "completed": 256, "elapsed_s": 33.2, "output_tokens_per_s": 7700.0,
                   "ttft_ms": {"p50": 1000, "p99": 5000}, "itl_ms": {"p50": 30, "p99": 50}},
}


class Pages(unittest.TestCase):
    def run_of(self, files):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for name, figures in files.items():
                (folder / f"{name}.json").write_text(json.dumps(figures))
            (folder / "device.csv").write_text("name, driver\nNVIDIA H100, 570, 81559 MiB, 1980 MHz, 2619 MHz, 5, 16\n")
            (folder / "tests.txt").write_text("families: passed in 3 s: ok\nbitwise: FAILED in 9 s: no\n")
            return report.load(folder)

    def test_what_was_measured_is_shown_with_what_was_wanted(self):
        page = report.page([("h100", self.run_of(FILES))])
        self.assertIn("| prefill 4,096, bf16 | 100 (90..110) | 150 (bytes) | 60% | 55%: reached |", page)
        self.assertIn("75%: **missed**", page)
        self.assertIn("1,000 out, bf16: **7,700** output tokens per s; 256 of 256", page)
        self.assertIn("of 63.0 that the link has (PCIe 5 x16): 78%, wanted 80%: **missed**", page)
        self.assertIn("bitwise suite: batches, chunks, hits, preemption, copies to the host: **failed**", page)

    def test_what_was_not_is_listed_by_name_with_its_command(self):
        missing = report.page([("h100", self.run_of(FILES))]).split("## Not measured")[1]
        for line in ("decode x64, depth 1,024, bf16 (wanted: 60% of the limit) (`tools/gpu/verify.sh RESULTS engine`)",
                     "100 out, bf16 (`tools/gpu/verify.sh RESULTS serve`)", "(`tools/gpu/verify.sh RESULTS cublaslt`)",
                     "(`tools/gpu/verify.sh RESULTS peers`)", "the limits of the device (`tools/gpu/verify.sh RESULTS tests`)"):
            self.assertIn(line, missing)
        self.assertNotIn("80 % of the link", missing)
        self.assertIn("80 % of the link", report.page([]))


if __name__ == "__main__":
    unittest.main()
