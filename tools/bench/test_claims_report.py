"""That what `folio bench claims` prints is kept and made a page of."""

import json
import os
import stat
import tempfile
import unittest

import claims_report

FIGURE = {"claim": "kv-cache", "of": "", "field": [5.2, 5.2], "unit": "s", "with": 0.5, "without": 2.0, "gain": 4.0, "gains": [3.5, 4.5], "note": "n"}
TOLD = {"model": "/somewhere/a-model", "device": "2 threads", "version": "0.1.0", "figures": [FIGURE], "formats": []}


class Measured(unittest.TestCase):
    def test_one_command_keeps_the_result_and_makes_the_page(self):
        with tempfile.TemporaryDirectory() as folder:
            folio = os.path.join(folder, "folio")
            with open(folio, "w") as file:
                # What it is asked is what it must be.
                file.write('#!/bin/sh\n[ "$1" = --version ] && echo folio 0.1.0 && exit\n'
                           '[ "$*" = "bench claims ./a-model --json --repeat 3" ] || exit 1\n' + f"cat <<'EOF'\n{json.dumps(TOLD)}\nEOF\n")
            os.chmod(folio, stat.S_IRWXU)
            results = os.path.join(folder, "claims")
            path = claims_report.measure(folio, "./a-model", ["--repeat", "3"], results)
            with open(path) as file:
                kept = json.load(file)
            self.assertEqual((kept["model"], kept["flags"], kept["figures"]), ("a-model", ["--repeat", "3"], [FIGURE]))
            self.assertTrue(kept["folio"].startswith("folio 0.1.0") and kept["machine"]["cpus"])
            self.assertIn("**4.00** (3.50 to 4.50)", claims_report.page(claims_report.read(results)))


if __name__ == "__main__":
    unittest.main()
