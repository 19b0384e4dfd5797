"""What is read from ptxas' log, and the page that is made of it."""

import pathlib
import tempfile
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

    def test_what_is_kept_is_not_compiled_again_but_at_a_check_for_one_architecture(self):
        class Compiler:
            version, compiled = "12.8", []

            def compile(self, name, source, arch):
                self.compiled.append(arch)
                return LOG

        with tempfile.TemporaryDirectory() as folder:
            module = pathlib.Path(folder) / "some.cu"
            module.write_text("source")
            module.with_suffix(".txt").write_text("first second")
            compiler = Compiler()

            def run(kept, check):
                compiler.compiled.clear()
                made = compile_kernels.compile_all(compiler, module.parent, kept, check)
                return made, sorted(compiler.compiled)

            (table, kept), compiled = run({}, False)
            self.assertEqual((len(kept), compiled), (3, [80, 90, 100]))
            self.assertEqual(run(kept, False), ((table, kept), []))
            self.assertEqual(run(kept, True), ((table, kept), [90]))
            other = {digest: {**needs, "second": [17, 0, 0, 0, 0]} for digest, needs in kept.items()}
            with self.assertRaisesRegex(SystemExit, "kernels.json has"):
                run(other, True)
            module.write_text("another source")
            self.assertEqual(run(kept, True)[1], [80, 90, 100])


if __name__ == "__main__":
    unittest.main()
