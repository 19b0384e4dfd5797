"""python3 -m unittest discover tools/bench: what is compared beside llama.cpp, two servers at a time."""

import contextlib
import io
import signal
import sys
import unittest
from unittest import mock

import llama_speculation as measured


class Fake:
    """A server that answers at once."""

    alive, most, asked, standing = 0, 0, [], 0
    address = "nowhere"

    def __init__(self, *arguments):
        self.way = arguments[-1]
        self.process = self

    def send_signal(self, number):
        Fake.standing += {signal.SIGSTOP: 1, signal.SIGCONT: -1}[number]

    def __enter__(self):
        Fake.alive += 1
        Fake.most = max(Fake.most, Fake.alive)
        return self

    def __exit__(self, *_):
        Fake.alive -= 1

    def answer(self, prompt, tokens):
        if tokens == 8:
            assert Fake.standing == 1, "the other stands still"
            Fake.asked.append(self.way)
        return list(range(tokens)), 3, 2

    def drafts(self):
        return [0, 0]


class Pairs(unittest.TestCase):
    def test_each_way_is_compared_with_none_and_folios_with_llamas(self):
        compared = measured.pairs(measured.ways("draft.gguf"))
        self.assertEqual(len(compared), len(set(compared)))
        for way in measured.ways("draft.gguf"):
            if way[1] != "off":
                self.assertIn(((way[0], "off"), way), compared)
            if way[0] == "llama.cpp":
                self.assertIn((way, ("folio", "draft" if way[1] == "draft" else "suffix")), compared)
        self.assertFalse(any("draft" in way for pair in measured.pairs(measured.ways(None)) for way in pair))

    def test_two_servers_run_at_a_time_and_take_turns(self):
        Fake.asked.clear()
        arguments = "llama_speculation.py --llama-server l --folio f --model m --rounds 2 --tokens 8".split()
        out = io.StringIO()
        with (mock.patch.object(sys, "argv", arguments), mock.patch.object(measured, "Llama", Fake), mock.patch.object(measured, "Folio", Fake),
              mock.patch.object(measured, "post", lambda *_: {"tokens": [1, 2, 3]}), mock.patch.object(measured, "prompts", lambda _: {"story": "", "copy": ""}),
              mock.patch.object(measured.subprocess, "run", lambda *_, **__: mock.Mock(stderr="version")),
              contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO())):
            measured.main()
        self.assertEqual((Fake.alive, Fake.most, Fake.standing), (0, 2, 0))
        first, second = Fake.asked[:2]
        # Of the first pair: two rounds of two texts.
        self.assertEqual(Fake.asked[:8], [first, second, second, first, second, first, first, second])
        compared = measured.pairs(measured.ways(None))
        self.assertEqual(len(Fake.asked), 8 * len(compared))
        self.assertEqual(len(out.getvalue().splitlines()), 2 + 2 * len(compared))


if __name__ == "__main__":
    unittest.main()
