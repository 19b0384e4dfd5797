"""python3 -m unittest discover tools/bench: what tables and plots make of results, and that a stopped measurement goes on."""

import json
import os
import sys
import tempfile
import unittest

import common
import ik_peer
import plots
import report
import side_by_side
from results import Results, body, cost, head


def figure(rate, batch=1, tokens=128, limit=20.0, by="bytes"):
    return {"batch": batch, "tokens": tokens, "tokens_per_s": rate, "limit_tokens_per_s": limit, "limited_by": by, "share_of_limit": rate / limit}


def round_of(ours, theirs):
    folio = {"model": "llama-1b.q8_0", "weight_bytes": 1.3e9, "read_bytes_per_s": 36e9, "f32_flop_per_s": 2e11, "int8_op_per_s": 9e11,
             "prefill": [figure(4 * ours, tokens=512, limit=400.0, by="multiplications")],
             "decode": [figure(ours), figure(2 * ours, 8), figure(3 * ours, 32)]}
    return {"folio": folio, "llama.cpp": {"pp512": theirs, "B1": {"decode": theirs}, "B8": {"decode": theirs}, "B32": {"decode": theirs}}}


class Folder:
    def __init__(self, **files):
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                with open(os.path.join(folder, name.replace("_", "-") + ".json"), "w") as out:
                    json.dump(data, out)
            self.results = Results(folder)


class Tables(unittest.TestCase):
    def test_the_newest_file_counts_cell_by_cell(self):
        old = {"rounds": [round_of(10, 5)]}  # as written before there was a kind
        new = {"kind": "side_by_side", "shape": "llama-1b", "format": "Q8_0", "rounds": [round_of(20, 10), round_of(30, 10), round_of(40, 10)]}
        depth = {"kind": "depth", "shape": "llama-1b", "format": "Q8_0", "arguments": {"depth": 8192},
                 "pairs": [{"folio": {"tokens_per_s": 9.0}, "llama.cpp": {"tokens_per_s": 3.0}}]}
        cells = Folder(z_old=old, a_new=new, b_depth=depth).results.cells
        self.assertEqual(cells[("llama-1b", "Q8_0", "decode x1 at 128")].ratios(), [2.0, 3.0, 4.0])
        self.assertEqual(cells[("llama-1b", "Q8_0", "decode x1 at 8192")].ratio(), 3.0)

    def test_targets_are_judged_by_the_median_of_pairs(self):
        rounds = [round_of(20, 10), round_of(30, 10), round_of(11, 10)]
        text = report.pairs(Folder(a={"kind": "side_by_side", "shape": "llama-1b", "format": "Q8_0", "rounds": rounds}).results, "llama-1b", "Q8_0")
        self.assertIn("| decode alone, depth 128 | 20.0 (11.0..30.0) | 10.0 (10.0..10.0) | **2.00** (1.10..3.00) | 1.15x: reached; 92%: reached | 100% of bandwidth | 3 |", text)
        slow = Folder(a={"kind": "side_by_side", "shape": "llama-1b", "format": "Q4_0", "rounds": [round_of(10, 10)]}).results
        self.assertIn("1.15x: **missed**", report.pairs(slow, "llama-1b", "Q4_0"))
        self.assertEqual(report.pairs(slow, "llama-1b", "bf16"), "Not measured yet.")

    def test_every_target_is_a_row_and_what_is_missed_is_bold(self):
        rounds = [round_of(20, 10), round_of(18, 10)]
        text = report.targets(Folder(a={"kind": "side_by_side", "shape": "llama-1b", "format": "Q8_0", "rounds": rounds}).results)
        line = next(line for line in text.splitlines() if line.startswith("| Q8_0, decode alone, depth 128 | 1.15 and 92% |"))
        column = [name for name, _ in report.MACHINES].index("Zen 4")
        self.assertEqual(line.split(" | ")[2 + column], "1.90, 95.0 %")
        self.assertTrue(all(line.split(" | ")[2:]), "the machines whose results are committed")
        slow = report.targets(Folder(a={"kind": "side_by_side", "shape": "llama-1b", "format": "Q8_0", "rounds": [round_of(11, 10)]}).results)
        line = next(line for line in slow.splitlines() if line.startswith("| Q8_0, decode alone, depth 128 |"))
        self.assertEqual(line.split(" | ")[2 + column], "**1.10**, **55.0 %**")
        self.assertEqual(len(text.splitlines()), 2 + 2 * len(report.ORDER))

    def test_other_engines_stand_beside_each_other_and_who_is_faster_is_named(self):
        def round_(ours, ik, openvino):
            rates = lambda rate: {"pp512": rate, "B1": {"decode": rate}, "B8": {"decode": rate}, "B32": {"decode": rate}}
            return {"folio": round_of(ours, 1)["folio"], "ik": rates(ik), "openvino": rates(openvino)}
        data = {"kind": "peers", "shape": "llama-1b", "format": "Q8_0", "versions": [{"folio": "f 1", "ik": "k 2"}],
                "arguments": {"prompt": 512, "depth": 128, "peers": ["ik", "openvino"]}, "rounds": [round_(10, 5, 20), round_(12, 4, 8), round_(14, 7, 28)]}
        results = Folder(a=data).results
        text = report.peers(results, "llama-1b", "Q8_0")
        self.assertIn("|  | Folio t/s | share of the limit | ik t/s | ratio | openvino t/s | ratio |", text)
        self.assertIn("| decode alone, depth 128 | 12.0 (10.0..14.0) | 60% of bandwidth | 5.0 (4.0..7.0) | **2.00** (2.00..3.00) | 20.0 (8.0..28.0) | **0.50** (0.50..1.50) |", text)
        self.assertTrue(text.endswith("From `a.json`, 3 rounds; f 1; k 2. Folio is slower: decode alone, depth 128 than openvino (0.50)."))
        self.assertEqual(report.peers(results, "llama-1b", "Q4_0"), "Not measured yet.")
        self.assertEqual(results.cells, {})  # none of it is taken for llama.cpp's

    def test_a_table_of_ik_llama_is_read(self):
        text = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |\n|-------|---|\n" \
               "|   128 |     16 |    8 |   1152 |    5.000 |   204.80 |    2.000 |    64.00 |    7.000 |   164.57 |\nllama_print_timings: 1 | 2\n"
        self.assertEqual(ik_peer.table(text), {(128, 8): (204.8, 64.0)})

    def test_everybody_is_first_in_turn(self):
        orders = [side_by_side.turned({"folio": 0, "b": 0, "c": 0}, number) for number in range(3)]
        self.assertEqual([order[0] for order in orders], ["b", "c", "folio"])
        self.assertTrue(all(sorted(order) == ["b", "c", "folio"] for order in orders))

    def test_small_shapes_name_every_cell_that_is_slower(self):
        both = {"kind": "side_by_side", "shape": "smol-135m", "format": "Q8_0", "rounds": [round_of(10, 15)]}
        text = report.small(Folder(a=both).results)
        self.assertIn("Slower than llama.cpp: smol-135m Q8_0 decode alone, depth 128 (0.67).", text)

    def test_a_load_says_what_was_missed(self):
        times = lambda p50, p99: {"p50": p50, "p99": p99}
        load = {"elapsed_s": 60.0, "output_tokens_per_s": 50.0, "ttft_ms": times(2000, 30000), "itl_ms": times(100, 400), "requests": 64, "completed": 63}
        data = {"kind": "load", "shape": "llama-1b", "format": "Q4_0", "runs": [{"load": load, "over": 0.05}],
                "arguments": dict(requests=64, clients=16, groups=4, shared=512, unique=64, output=48)}
        text = report.load(Folder(a=data).results)
        self.assertIn("| all 64 requests | 60.00 s | at most 67 s: reached | 268 s |", text)
        self.assertIn("| TTFT, p99 | 30.00 s | at most 24 s: **missed** | 121 s |", text)
        self.assertIn("| failed | 1 | at most 0: **missed** | 2 |", text)


    def test_a_start_is_told_with_and_without_processor_time(self):
        run = {"listening_s": 0.3, "first_token_s": 0.5, "served_mib": {"VmRSS": 700}}
        entry = {"model": "m.gguf", "flags": "", "runs": [run, dict(run, first_token_s=0.7, first_token_cpu_s=0.1)]}
        text = report.start(Folder(a={"what": "process start to the first streamed token", "note": "quiet", "results": [entry]}).results)
        self.assertIn("| m.gguf | 0.30 (0.30..0.30) | 0.60 (0.50..0.70) | 0.10 | 700 MiB |", text)
        self.assertIn("From `a.json`. Quiet.", text)


class Plots(unittest.TestCase):
    def test_costs_are_those_of_the_shape(self):
        self.assertEqual((body("llama-1b"), head("llama-1b")), (973078528, 262668288))
        size, work = cost("llama-1b", 800.0, "decode x8 at 128")
        self.assertEqual((size, work), (100.0 + 128 * 32768, 973078528 + 262668288 + 128 * 65536))
        self.assertEqual(cost("llama-1b", 512.0, "prefill 512")[0], 1.0)

    def test_the_same_results_are_the_same_bytes_and_none_are_no_plot(self):
        results = Folder(a={"kind": "side_by_side", "shape": "llama-1b", "format": "Q8_0", "rounds": [round_of(20, 10)]}).results
        for plot in (plots.roofline, plots.scaling):
            self.assertTrue(plot(results).startswith("<svg") and plot(results) == plot(results))
            self.assertIsNone(plot(Folder().results))


class Resume(unittest.TestCase):
    def test_what_was_measured_stays_unless_the_arguments_differ(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.json")
            self.assertIsNone(common.resume(path, {"depth": 1}))
            common.save(path, {"arguments": {"depth": 1, "rounds": 3}, "rounds": [1]})
            self.assertEqual(common.resume(path, {"depth": 1, "rounds": 9})["rounds"], [1])
            with self.assertRaises(SystemExit):
                common.resume(path, {"depth": 2})

    def test_a_peer_that_fails_says_why(self):
        script = "import sys; print('[1]'); sys.exit(len(sys.argv) > 1 and 'no such model')"
        self.assertEqual(side_by_side.output([sys.executable, "-c", script]), [1])
        with self.assertRaisesRegex(SystemExit, "(?s)exit code 1.*no such model"):
            side_by_side.output([sys.executable, "-c", script, "fail"])


if __name__ == "__main__":
    unittest.main()
