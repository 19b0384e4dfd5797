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


if __name__ == "__main__":
    unittest.main()
