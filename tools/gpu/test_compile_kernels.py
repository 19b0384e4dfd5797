"""What is read from ptxas' log, and the page that is made of it."""

import unittest

import compile_kernels

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    120 bytes stack frame, 192 bytes spill stores, 384 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem, 120 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
"""


class Logs(unittest.TestCase):
    def test_needs(self):
        self.assertEqual(compile_kernels.needs(LOG), {"first": (255, 4096, 192, 384, 120), "second": (16, 0, 0, 0, 0)})

    def test_page(self):
        needs = compile_kernels.needs(LOG)
        less = (200, 4096, 0, 0, 0)
        page = compile_kernels.page("12.8", {"some": {"first": [needs["first"], less, less], "second": [needs["second"]] * 3}})
        self.assertIn("2 kernels in 1 modules; 1 of them spill.", page)
        self.assertIn("| first | 255 / 200 / 200 | 4096 | 576 / 0 / 0 | 120 / 0 / 0 |", page)
        self.assertIn("| second | 16 / 16 / 16 | 0 | 0 | 0 |", page)


if __name__ == "__main__":
    unittest.main()
