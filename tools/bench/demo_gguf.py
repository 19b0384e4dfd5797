#!/usr/bin/env python3
"""The built-in model as a GGUF file in 16 bits, for llama.cpp beside Folio on the same weights.

    python demo_gguf.py OUT.f16.gguf [LAYERS]

LAYERS: only the first so many, with norm and embeddings: a draft model, which was trained for nothing of the kind and is right now and then.
Needs gguf and numpy. Names and shapes are those of a llama, rows of q and k in llama.cpp's order; the tokenizer splits words as Qwen2's does.
"""

import json
import os
import sys

import gguf
import numpy as np

DEMO = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "crates", "folio", "assets", "demo"))
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def read(name):
    return json.load(open(os.path.join(DEMO, name)))


def tensors():
    """Name and values of each, in 32 bits."""
    with open(os.path.join(DEMO, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", (name, entry["dtype"])
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(data[begin:end], dtype=np.uint16).astype(np.uint32) << 16
        yield name, bits.view(np.float32).reshape(entry["shape"])


def stored(name):
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    part, leaf = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{leaf}"


def main():
    config, tokenizer, about = read("config.json"), read("tokenizer.json"), read("tokenizer_config.json")
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else config["num_hidden_layers"]
    w = gguf.GGUFWriter(sys.argv[1], "llama")
    w.add_name("folio-demo")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(layers)
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for add in (w.add_key_length, w.add_value_length, w.add_rope_dimension_count):
        add(config["head_dim"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_vocab_size(config["vocab_size"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)

    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    assert [id for _, id in vocab] == list(range(config["vocab_size"]))
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([text for text, _ in vocab])
    w.add_token_types([kinds[added[id]["special"]] if id in added else gguf.TokenType.NORMAL for _, id in vocab])
    w.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    w.add_bos_token_id(config["bos_token_id"])
    w.add_eos_token_id(config["eos_token_id"])
    w.add_add_bos_token(about["add_bos_token"])
    w.add_chat_template(about["chat_template"])

    for name, values in tensors():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers:
            continue
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                # From halves to neighbours.
                values = values.reshape(config[heads], 2, config["head_dim"] // 2, -1).swapaxes(1, 2).reshape(values.shape)
        w.add_tensor(stored(name), values.astype(np.float16 if values.ndim > 1 else np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
