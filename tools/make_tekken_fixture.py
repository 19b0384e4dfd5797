#!/usr/bin/env python3
"""A small tekken.json and the ids that mistral-common gives texts with it.

`python3 tools/make_tekken_fixture.py [FILE]`, with mistral-common. Writes `crates/folio-text/tests/tekken`: a vocabulary of pairs that are frequent in
the texts, and what is expected. With FILE, what is expected of that file goes to standard output. Deterministic.
"""
import base64
import collections
import json
import sys
from pathlib import Path

import regex
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

# Mistral's own.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
MERGES = 400
# No two tokens make these: they are found as whole words only.
WHOLE = [b" proposition", b" XYZZY", " 世界世界".encode()]
SPECIAL = 24
TEXTS = [
    "", " ", "  ", "a", "Hello, world!", "The quick brown fox jumps over the lazy dog.", "  leading and trailing  ", "don't we'LL I'M",
    "tabs\tand\nnew\r\nlines\n\n\n  x", "x = [i**2 for i in range(10)]  # squares", "    return self.value\n", "1234567890 3.14159 1,000,000",
    "HTTPServer parseXMLDocument snake_case camelCase", "naïve café Ünïcode ÄÖÜ ß", "Привет, мир! Ещё раз.", "你好，世界。这是一个测试", "こんにちは世界", "안녕하세요 세계",
    "नमस्ते दुनिया", "مرحبا بالعالم", "สวัสดีชาวโลก", "😀 👩‍👩‍👧‍👦 🇫🇷", "e\u0301 cafe\u0301", "\u00a0nbsp\u2003em", "https://example.com/a/b?c=d&e=f#g", "a/b\n/c //\n",
    "the the the thethethe", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "in ing ingin inging tion ation", "é" * 9, "!!!???...---===", "\u0000\u0001\u007f", "<s>x</s>", "[INST]x[/INST]",
    "Это предложение — пример; of mixed 语言 and 1 number.", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "#include <stdio.h>\nint main(void) { return 0; }\n",
]
# Nothing is learned of these.
OTHERS = ["a proposition, XYZZY of 世界世界, propositions", "Zażółć gęślą jaźń; Γειά σου", "fn main() { println!(\"{}\", 0xFF); }"]


def expected(path):
    tokenizer = Tekkenizer.from_file(path)
    return [[text, tokenizer.encode(text, bos=False, eos=False)] for text in TEXTS + OTHERS]


def vocabulary():
    """The bytes, and then what is joined of the most frequent neighbours in words."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in word.encode()] for text in TEXTS for word in regex.findall(PATTERN, text)]
    for _ in range(MERGES):
        pairs = collections.Counter(pair for word in words for pair in zip(word, word[1:]))
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if b"".join(pair) not in tokens:
            tokens.append(b"".join(pair))
        for word in words:
            at = 0
            while at + 1 < len(word):
                if (word[at], word[at + 1]) == pair:
                    word[at:at + 2] = [b"".join(pair)]
                at += 1
    return tokens + WHOLE


def main():
    if len(sys.argv) > 1:
        print(json.dumps({"cases": expected(sys.argv[1])}))
        return
    folder = Path(__file__).resolve().parent.parent / "crates/folio-text/tests/tekken"
    folder.mkdir(exist_ok=True)
    tokens = vocabulary()
    # A few more than the vocabulary's size takes, as in Mistral's.
    listed = tokens + [bytes([byte] * 9) for byte in range(8)]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for rank, token in enumerate(listed)]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(vocab), "default_vocab_size": len(tokens) + SPECIAL,
              "default_num_special_tokens": SPECIAL, "version": "v3"}
    path = folder / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocab}, separators=(",", ":")) + "\n")
    tokenizer = Tekkenizer.from_file(path)
    special = [tokenizer.id_to_piece(id) for id in range(SPECIAL)]
    note = {"made_by": "tools/make_tekken_fixture.py", "special": special, "cases": expected(path)}
    (folder / "expected.json").write_text(json.dumps(note, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
