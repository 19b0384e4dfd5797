"""Makes what llama.cpp's named pre-tokenizers do to a few texts: token ids under one small vocabulary.

    python tools/make_pre_tokens.py

Writes crates/folio-text/tests/gguf_pre.json. Needs llama-cpp-python. Deterministic.
"""

import json
import struct
import tempfile
from pathlib import Path

from llama_cpp import Llama

OUT = Path(__file__).resolve().parent.parent / "crates/folio-text/tests/gguf_pre.json"
NAMES = ["llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "qwen35", "tekken", "gpt-4o", "seed-coder", "deepseek-v3",
         "deepseek-coder", "smollm", "gpt-2"]
TEXTS = [
    "It's I'm you'LL we'd 12345678 3.14159 x=y*2; foo_bar(baz) // comment\n\n  indented\tline\r\nnext",
    "ÀÉÎõü ñandú Straße ΑΒΓ αβγ Привет мир",
    "日本語のテキスト 漢字かな交じり文。한국어 텍스트",
    "emoji 😀😀 👩‍👩‍👧 end",
    "CamelCaseWords andHTTPServer URLs http://a.b/c?d=e&f",
    "   leading and trailing   ",
    "a/b/c\n/d\n",
    "end.\n\nNext!\n",
    "हिन्दी पाठ ไทย ภาษา",
    "1,234,567.89 $5 50% #tag @user ½ ² Ⅷ",
    "don't can't won't I'D HE'S\u00a0non-breaking spaces",
]


def alphabet():
    """GPT-2's character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def vocabulary_of_pairs():
    """Merges of every two neighbouring bytes of the texts and no more: wherever a text is cut, the pairs after it shift.
    Two words are tokens that no merges make."""
    letters = alphabet()
    words = [[letters[byte] for byte in text.encode()] for text in TEXTS]
    pairs = dict.fromkeys(pair for word in words for pair in zip(word, word[1:]))
    tokens = [*letters.values(), *(left + right for left, right in pairs), "\u0120andHTTPServer", "\u0120URLs"]
    return tokens, [f"{left} {right}" for left, right in pairs]


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def vocabulary(pre, tokens, merges):
    """A GGUF file of nothing else."""
    text = lambda key, value: string(key) + struct.pack("<I", 8) + string(value)
    texts = lambda key, values: string(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(string, values))
    keys = [text("general.architecture", "llama"), text("tokenizer.ggml.model", "gpt2"), text("tokenizer.ggml.pre", pre),
            texts("tokenizer.ggml.tokens", tokens), texts("tokenizer.ggml.merges", merges)]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys)


def main():
    tokens, merges = vocabulary_of_pairs()
    ids = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        for name in NAMES:
            path.write_bytes(vocabulary(name, tokens, merges))
            model = Llama(str(path), vocab_only=True, verbose=False)
            ids[name] = [model.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS]
    part = lambda key, value: f'"{key}": {json.dumps(value, ensure_ascii=False)}'
    lines = ",\n".join("  " + part(name, value) for name, value in ids.items())
    head = ",\n".join([part("made_by", "tools/make_pre_tokens.py"), part("texts", TEXTS), part("tokens", tokens),
                       part("merges", merges)])
    OUT.write_text(f'{{{head},\n"ids": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
