#!/usr/bin/env python3
"""OpenVINO GenAI's continuous batching, for figures beside Folio's on the same machine.

    python openvino_peer.py MODEL [--threads 2] [--prompt 512] [--gen 16] [--batch 1,8,32] [--depth 128] [--cache FOLDER]
        one JSON object as llama_peer.py prints it: prefill t/s (`pp512`) and decode t/s of several batch sizes (`B1`, `B8`, ...)
    python openvino_peer.py FILE.f16.gguf --convert int8|int4 FOLDER
        writes the model with OpenVINO's own compression of weights: 8 bits per output channel, or 4 bits per 128 of a row

`MODEL` is a GGUF file (with `general.file_type`, which OpenVINO wants) or a folder that --convert wrote. Random tokens, greedy, no cache of
prefixes, prompts in one step; OpenVINO's own defaults otherwise, which are KV in 8 bits and arithmetic in bfloat16 where the processor has it.
Needs openvino-genai, and nncf to convert.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time

import numpy
import openvino
import openvino_genai as G


@contextlib.contextmanager
def silent():
    """OpenVINO prints the properties of what it compiled to stdout, where the answer goes."""
    sys.stdout.flush()
    real, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(real, 1)
        os.close(real), os.close(null)


class Peer:
    def __init__(self, a, rows):
        """`rows`: the most tokens that one step reads, and that the cache holds."""
        config = G.SchedulerConfig()
        config.max_num_batched_tokens, config.max_num_seqs, config.enable_prefix_caching = rows, 256, False
        config.num_kv_blocks = 2 * rows // 16
        properties = {"INFERENCE_NUM_THREADS": a.threads, **({"CACHE_DIR": a.cache} if a.cache else {}),
                      **({"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if a.f32 else {})}
        self.pipeline = G.ContinuousBatchingPipeline(a.model, G.Tokenizer(a.model), config, "CPU", **properties)
        self.random, self.requests, self.handles = random.Random(0), 0, []

    def begin(self, sequences, tokens, new):
        """Requests of random prompts that each generate `new` tokens; nothing is computed yet."""
        config = G.GenerationConfig(max_new_tokens=new, ignore_eos=True, apply_chat_template=False)
        for _ in range(sequences):
            ids = numpy.array([[self.random.randrange(100, 40000) for _ in range(tokens)]], dtype=numpy.int64)
            self.handles.append(self.pipeline.add_request(self.requests, openvino.Tensor(ids), config))
            self.requests += 1

    def steps(self, count):
        """Seconds of `count` steps."""
        start = time.perf_counter()
        for _ in range(count):
            self.pipeline.step()
        return time.perf_counter() - start

    def end(self, new):
        """Every request made the tokens it was asked for, so that no step was for nothing."""
        assert not self.pipeline.has_non_finished_requests(), "steps did not generate one token of every sequence"
        for handle in self.handles:
            made = sum(len(output.generated_ids) for output in handle.read_all())
            assert made == new, f"{made} tokens generated, not {new}"
        self.handles = []


def rates(a):
    sizes = [int(b) for b in a.batch.split(",")]
    with silent():
        peer = Peer(a, max(a.prompt, max(sizes) * (a.depth + a.gen + 16)))
        peer.begin(1, 16, 2), peer.steps(2), peer.end(2)
    out = {"threads": a.threads, "version": f"openvino-genai {G.__version__}"}
    peer.begin(1, a.prompt, 1)
    out[f"pp{a.prompt}"] = a.prompt / peer.steps(1)
    peer.end(1)
    for n in sizes:
        peer.begin(n, a.depth, a.gen + 1)
        prefill = n * a.depth / peer.steps(1)
        out[f"B{n}"] = {"prefill": prefill, "decode": n * a.gen / peer.steps(a.gen)}
        peer.end(a.gen + 1)
    print(json.dumps(out))


def convert(a):
    import nncf

    kind, folder = a.convert
    os.makedirs(folder, exist_ok=True)
    link = os.path.join(folder, "model.gguf")
    os.symlink(os.path.abspath(a.model), link)
    with silent():  # writes openvino_model.xml, in 16 bits, and the tokenizer beside the file it was given
        G.LLMPipeline(link, "CPU", enable_save_ov_model=True)
    os.remove(link)
    path = os.path.join(folder, "openvino_model.xml")
    model = openvino.Core().read_model(path)
    modes = {"int8": dict(mode=nncf.CompressWeightsMode.INT8_SYM),
             "int4": dict(mode=nncf.CompressWeightsMode.INT4_SYM, group_size=128, ratio=1.0)}
    small = nncf.compress_weights(model, **modes[kind])
    openvino.save_model(small, path + ".small.xml", compress_to_fp16=False)
    del model, small
    for name in (".xml", ".bin"):
        os.replace(path + ".small" + name, path[:-len(".xml")] + name)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--gen", type=int, default=16)
    ap.add_argument("--batch", default="1,8,32")
    ap.add_argument("--depth", type=int, default=128)
    ap.add_argument("--cache", help="folder for what OpenVINO compiles, so that a later start is quicker")
    ap.add_argument("--f32", action="store_true", help="what OpenVINO does on a processor without VNNI: for ONEDNN_MAX_CPU_ISA=AVX2, which its own choice does not look at")
    ap.add_argument("--convert", nargs=2, metavar=("KIND", "FOLDER"))
    a = ap.parse_args()
    convert(a) if a.convert else rates(a)


if __name__ == "__main__":
    main()
