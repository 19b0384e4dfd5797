#!/usr/bin/env python3
"""GGUF files of random weights in real shapes, in the types of Q4_K_M, for speed and memory beside llama.cpp.

    python random_gguf.py SHAPE OUT.gguf --vocab ggml-vocab-NAME.gguf[.gz] [--layers N]

Blocks are random bytes with scales that give weights a deviation of 0.02; numbers that are not quantized (norms, routers, what a recurrence needs)
are drawn in the ranges that trained ones have. So only speed, memory and the agreement of engines mean anything. The tokenizer is that of
another GGUF file, and with it the size of the vocabulary. `--layers` cuts a model to what memory holds. Needs gguf and numpy.
"""

import argparse
import gzip
import shutil
import tempfile

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

DEVIATION = 0.02


class File:
    """Tensors as they are made; shapes are those of a framework, rows first."""

    def __init__(self, path, arch, layers, seed=0):
        self.w = gguf.GGUFWriter(path, arch)
        self.arch, self.layers, self.random = arch, layers, np.random.default_rng(seed)
        self.w.add_block_count(layers)
        self.w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)

    def keys(self, **values):
        """`a__b` is the key `ARCH.a.b`."""
        for name, value in values.items():
            key = f"{self.arch}." + name.replace("__", ".")
            if isinstance(value, bool):
                self.w.add_bool(key, value)
            elif isinstance(value, int):
                self.w.add_uint32(key, value)
            elif isinstance(value, float):
                self.w.add_float32(key, value)
            elif isinstance(value, str):
                self.w.add_string(key, value)
            else:
                self.w.add_array(key, value)

    def numbers(self, name, *shape, low=-DEVIATION, high=DEVIATION):
        self.w.add_tensor(name, self.random.uniform(low, high, shape).astype(np.float32))

    def norm(self, name, width):
        self.numbers(name + ".weight", width, low=0.9, high=1.1)

    def weights(self, name, *shape, more=False):
        """Q4_K, or Q6_K where Q4_K_M keeps more; where a row is not whole blocks of these, what llama.cpp takes instead."""
        kind = (Q.Q6_K if more else Q.Q4_K) if shape[-1] % 256 == 0 else (Q.Q8_0 if more else Q.Q5_0)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = self.random.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
        # Where a block's f16 scales are, and which make its values deviate by DEVIATION, for the codes are uniform.
        scales = {Q.Q4_K: {0: DEVIATION / 150, 2: DEVIATION / 20}, Q.Q6_K: {208: DEVIATION / 1370}, Q.Q5_0: {0: DEVIATION / 9.2}, Q.Q8_0: {0: DEVIATION / 74}}
        for at, scale in scales[kind].items():
            blocks[:, at:at + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
        self.w.add_tensor(name + ".weight", blocks.reshape(*shape[:-1], shape[-1] // block * size), raw_dtype=kind)

    def more(self, layer):
        """Whether Q4_K_M keeps more of this layer's values and down projections."""
        n = self.layers
        return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2

    def vocabulary(self, path):
        with tempfile.NamedTemporaryFile(suffix=".gguf") as plain:
            if path.endswith(".gz"):
                with gzip.open(path) as packed:
                    shutil.copyfileobj(packed, plain)
                plain.flush()
                path = plain.name
            for field in gguf.GGUFReader(path).fields.values():
                if field.name.startswith("tokenizer."):
                    kind = field.types[0]
                    self.w.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
                    if field.name == "tokenizer.ggml.tokens":
                        self.vocab = len(field.contents())
        self.keys(vocab_size=self.vocab)

    def ends(self, hidden, tied):
        self.weights("token_embd", self.vocab, hidden, more=tied)
        self.norm("output_norm", hidden)
        if not tied:
            self.weights("output", self.vocab, hidden, more=True)

    def feed_forward(self, at, hidden, width, more, suffix=""):
        for name in ("gate", "up"):
            self.weights(f"{at}.ffn_{name}{suffix}", width, hidden)
        self.weights(f"{at}.ffn_down{suffix}", hidden, width, more=more)

    def experts(self, at, hidden, width, experts, more):
        self.numbers(f"{at}.ffn_gate_inp.weight", experts, hidden)
        for name in ("gate", "up"):
            self.weights(f"{at}.ffn_{name}_exps", experts, width, hidden)
        self.weights(f"{at}.ffn_down_exps", experts, hidden, width, more=more)

    def attention(self, at, hidden, queries, keys, head, more):
        self.weights(f"{at}.attn_q", queries * head, hidden)
        self.weights(f"{at}.attn_k", keys * head, hidden)
        self.weights(f"{at}.attn_v", keys * head, hidden, more=more)

    def close(self):
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()


def qwen35_4b(f):
    """Qwen3.5-4B: three of four layers are gated delta nets."""
    qwen35(f, hidden=2560, heads=16, kv=4, width=9216, value_heads=32)


def qwen35_08b(f):
    """Qwen3.5-0.8B, likewise."""
    qwen35(f, hidden=1024, heads=8, kv=2, width=3584, value_heads=16)


def qwen35(f, hidden, heads, kv, width, value_heads):
    head, key_heads, state = 256, 16, 128
    f.keys(context_length=262144, embedding_length=hidden, feed_forward_length=width, attention__head_count=heads, attention__head_count_kv=kv,
           attention__key_length=head, attention__value_length=head, attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e7,
           rope__dimension_count=64, rope__dimension_sections=[11, 11, 10, 0], ssm__conv_kernel=4, ssm__inner_size=value_heads * state,
           ssm__state_size=state, ssm__time_step_rank=value_heads, ssm__group_count=key_heads, full_attention_interval=4)
    f.ends(hidden, tied=True)
    for layer in range(f.layers):
        at, more = f"blk.{layer}", f.more(layer)
        f.norm(f"{at}.attn_norm", hidden)
        if layer % 4 == 3:
            f.attention(at, hidden, 2 * heads, kv, head, more)
            f.weights(f"{at}.attn_output", hidden, heads * head)
            f.norm(f"{at}.attn_q_norm", head)
            f.norm(f"{at}.attn_k_norm", head)
        else:
            channels = (2 * key_heads + value_heads) * state
            f.weights(f"{at}.attn_qkv", channels, hidden, more=more)
            f.weights(f"{at}.attn_gate", value_heads * state, hidden)
            f.numbers(f"{at}.ssm_conv1d.weight", channels, 4, low=-0.5, high=0.5)
            f.numbers(f"{at}.ssm_dt.bias", value_heads, low=-4, high=1)
            f.numbers(f"{at}.ssm_a", value_heads, low=-8, high=-0.1)
            f.weights(f"{at}.ssm_beta", value_heads, hidden)
            f.weights(f"{at}.ssm_alpha", value_heads, hidden)
            f.norm(f"{at}.ssm_norm", state)
            f.weights(f"{at}.ssm_out", hidden, value_heads * state)
        f.norm(f"{at}.post_attention_norm", hidden)
        f.feed_forward(at, hidden, width, more)


def deepseek_v2_lite(f):
    """DeepSeek-V2-Lite: latent attention, one dense layer, then 64 experts of which 6, and 2 shared."""
    hidden, heads, latent, rope, nope, value, experts, width = 2048, 16, 512, 64, 128, 128, 64, 1408
    f.keys(context_length=163840, embedding_length=hidden, feed_forward_length=10944, attention__head_count=heads, attention__head_count_kv=1,
           attention__key_length=latent + rope, attention__value_length=latent, attention__key_length_mla=nope + rope, attention__value_length_mla=value,
           # llama.cpp wants to be told that there is no such rank where the number of layers is not Lite's.
           attention__q_lora_rank=0, attention__kv_lora_rank=latent, attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e4, rope__dimension_count=rope,
           rope__scaling__type="yarn", rope__scaling__factor=40.0, rope__scaling__original_context_length=4096, rope__scaling__yarn_log_multiplier=0.0707,
           leading_dense_block_count=1, expert_count=experts, expert_used_count=6, expert_shared_count=2, expert_feed_forward_length=width,
           expert_weights_scale=1.0, expert_weights_norm=False, expert_gating_func=1)
    f.ends(hidden, tied=False)
    for layer in range(f.layers):
        at, more = f"blk.{layer}", f.more(layer)
        f.norm(f"{at}.attn_norm", hidden)
        f.weights(f"{at}.attn_q", heads * (nope + rope), hidden)
        f.weights(f"{at}.attn_kv_a_mqa", latent + rope, hidden)
        f.norm(f"{at}.attn_kv_a_norm", latent)
        f.weights(f"{at}.attn_k_b", heads, latent, nope)
        f.weights(f"{at}.attn_v_b", heads, value, latent)
        f.weights(f"{at}.attn_output", hidden, heads * value)
        f.norm(f"{at}.ffn_norm", hidden)
        if layer == 0:
            f.feed_forward(at, hidden, 10944, more)
        else:
            f.experts(at, hidden, width, experts, more)
            f.feed_forward(at, hidden, 2 * width, more, "_shexp")


def llama_3_2_1b(f):
    """Llama-3.2-1B: dense."""
    hidden, heads, kv, head, width = 2048, 32, 8, 64, 8192
    f.keys(context_length=131072, embedding_length=hidden, feed_forward_length=width, attention__head_count=heads, attention__head_count_kv=kv,
           attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=5e5, rope__dimension_count=head)
    f.ends(hidden, tied=True)
    for layer in range(f.layers):
        at, more = f"blk.{layer}", f.more(layer)
        f.norm(f"{at}.attn_norm", hidden)
        f.attention(at, hidden, heads, kv, head, more)
        f.weights(f"{at}.attn_output", hidden, heads * head)
        f.norm(f"{at}.ffn_norm", hidden)
        f.feed_forward(at, hidden, width, more)


def mixtral_8x7b(f):
    """Mixtral-8x7B: 2 of 8 experts."""
    hidden, heads, kv, head = 4096, 32, 8, 128
    f.keys(context_length=32768, embedding_length=hidden, feed_forward_length=14336, attention__head_count=heads, attention__head_count_kv=kv,
           attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=1e6, rope__dimension_count=head, expert_count=8, expert_used_count=2)
    f.ends(hidden, tied=False)
    for layer in range(f.layers):
        at, more = f"blk.{layer}", f.more(layer)
        f.norm(f"{at}.attn_norm", hidden)
        f.attention(at, hidden, heads, kv, head, more)
        f.weights(f"{at}.attn_output", hidden, heads * head)
        f.norm(f"{at}.ffn_norm", hidden)
        f.experts(at, hidden, 14336, 8, more)


def granite_4_h_tiny(f):
    """Granite-4.0-H-Tiny: nine of ten layers are Mamba-2; 6 of 64 experts and a shared one in each."""
    hidden, heads, kv, head, inner, state, groups, ssm_heads, experts = 1536, 12, 4, 128, 3072, 128, 1, 48, 64
    attends = [layer % 10 == 5 for layer in range(f.layers)]
    f.keys(context_length=1048576, embedding_length=hidden, feed_forward_length=512, attention__head_count=heads,
           attention__head_count_kv=[kv if here else 0 for here in attends], attention__layer_norm_rms_epsilon=1e-5, attention__scale=0.0078125,
           embedding_scale=12.0, residual_scale=0.22, logit_scale=6.0, rope__freq_base=1e4, rope__dimension_count=head, rope__scaling__finetuned=False,
           ssm__conv_kernel=4, ssm__inner_size=inner, ssm__state_size=state, ssm__time_step_rank=ssm_heads, ssm__group_count=groups,
           expert_count=experts, expert_used_count=6, expert_shared_feed_forward_length=1024)
    f.ends(hidden, tied=True)
    for layer, attention in enumerate(attends):
        at, more = f"blk.{layer}", f.more(layer)
        f.norm(f"{at}.attn_norm", hidden)
        if attention:
            f.attention(at, hidden, heads, kv, head, more)
            f.weights(f"{at}.attn_output", hidden, heads * head)
        else:
            channels = inner + 2 * groups * state
            f.weights(f"{at}.ssm_in", inner + channels + ssm_heads, hidden)
            f.numbers(f"{at}.ssm_conv1d.weight", channels, 4, low=-0.5, high=0.5)
            f.numbers(f"{at}.ssm_conv1d.bias", channels)
            f.numbers(f"{at}.ssm_dt.bias", ssm_heads, low=-4, high=1)
            f.numbers(f"{at}.ssm_a", ssm_heads, 1, low=-8, high=-0.1)
            f.numbers(f"{at}.ssm_d", ssm_heads, 1, low=0.5, high=1.5)
            f.numbers(f"{at}.ssm_norm.weight", groups, inner // groups, low=0.9, high=1.1)
            f.weights(f"{at}.ssm_out", hidden, inner)
        f.norm(f"{at}.ffn_norm", hidden)
        f.experts(at, hidden, 512, experts, more)
        f.feed_forward(at, hidden, 1024, more, "_shexp")


# name: (what writes it, architecture, layers of the real one)
SHAPES = {
    "qwen3.5-4b": (qwen35_4b, "qwen35", 32),
    "qwen3.5-0.8b": (qwen35_08b, "qwen35", 24),
    "deepseek-v2-lite": (deepseek_v2_lite, "deepseek2", 27),
    "llama-3.2-1b": (llama_3_2_1b, "llama", 16),
    "mixtral-8x7b": (mixtral_8x7b, "llama", 32),
    "granite-4-h-tiny": (granite_4_h_tiny, "granitehybrid", 40),
}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("shape", choices=SHAPES)
    ap.add_argument("out")
    ap.add_argument("--vocab", required=True)
    ap.add_argument("--layers", type=int)
    a = ap.parse_args()
    write, arch, layers = SHAPES[a.shape]
    f = File(a.out, arch, a.layers or layers)
    f.vocabulary(a.vocab)
    write(f)
    f.close()


if __name__ == "__main__":
    main()
