"""python3 -m unittest discover tools/bench: docs/security.md has the figures of the committed results."""

import os
import unittest

import neighbour
from results import HERE, Results


class Document(unittest.TestCase):
    def test_the_table_is_what_was_measured(self):
        name, data = Results().server["neighbour", None]
        with open(os.path.join(HERE, "..", "..", "docs", "security.md"), encoding="utf-8") as file:
            page = file.read()
        self.assertIn(neighbour.table(data), page)
        self.assertIn(name, page)

    def test_a_cell_beside_which_others_worked_is_measured_again(self):
        cells = iter([{"others_cpus": 0.9}, {"others_cpus": 0.04}, {"others_cpus": 0.0}])
        self.assertEqual(neighbour.undisturbed(lambda: next(cells))["others_cpus"], 0.04)
        cells = iter([{"others_cpus": 0.9 - 0.01 * at} for at in range(neighbour.TRIES + 1)])
        self.assertEqual(neighbour.undisturbed(lambda: next(cells))["others_cpus"], 0.9 - 0.01 * (neighbour.TRIES - 1))


if __name__ == "__main__":
    unittest.main()
