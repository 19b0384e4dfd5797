#!/usr/bin/env python3
"""Quantized copies of a 16-bit GGUF file, by llama.cpp, every matrix in the same format (`--pure`).

    python quantize.py MODEL.f16.gguf q8_0 q4_0        writes MODEL.q8_0.gguf and MODEL.q4_0.gguf

Needs llama-cpp-python. A file that is there already is left alone.
"""

import os
import sys

import llama_cpp as L


def main():
    source, formats = sys.argv[1], sys.argv[2:]
    if not formats or ".f16." not in source:
        sys.exit(__doc__)
    L.llama_backend_init()
    for name in formats:
        out = source.replace(".f16.", f".{name}.")
        if os.path.exists(out):
            continue
        params = L.llama_model_quantize_default_params()
        params.ftype = getattr(L, "LLAMA_FTYPE_MOSTLY_" + name.upper())
        params.pure = True
        params.nthread = os.cpu_count()
        if L.llama_model_quantize(source.encode(), (out + ".part").encode(), params) != 0:
            sys.exit(f"could not make {out}")
        os.rename(out + ".part", out)
        print(out, os.path.getsize(out))


if __name__ == "__main__":
    main()
