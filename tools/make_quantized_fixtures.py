"""Makes the tiny quantized safetensors checkpoints: one for each way of quantizing that Folio loads.

For each: random weights quantized and packed as the public definitions say (AutoAWQ, AutoGPTQ and GPTQModel, compressed-tensors,
ModelOpt, transformers' fine-grained FP8), and what transformers computes in float32 from the *dequantized* weights: logits at some
positions and greedy tokens, as in make_fixtures.py. `expected.json` also has the SHA-256 of the dequantized values of every
quantized matrix, little-endian float32: decoding is exact, so there is nothing to tolerate. Dequantizing starts again from the
packed tensors, by its own code, and for compressed-tensors by that package too where it is installed.

    python tools/make_quantized_fixtures.py [name ...]

Needs torch, transformers >= 5 and safetensors. Writes crates/folio-model/tests/quantized/<name>/. Deterministic.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import make_fixtures as plain
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

try:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
except ImportError:
    BaseCompressor = None

ROOT = Path(__file__).resolve().parent.parent / "crates/folio-model/tests/quantized"
plain.STEPS = 24
plain.MARGIN = 0.004
DISTINCT = 10
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_int32(words):
    """int64 words of 32 bits as torch.int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack(codes, bits, dim):
    """Neighbours along `dim` into words, the first in the lowest bits."""
    codes = codes.to(torch.int64).movedim(dim, -1)
    each = 32 // bits
    short = -codes.shape[-1] % each
    codes = torch.nn.functional.pad(codes, (0, short)).unflatten(-1, (-1, each))
    words = (codes << (bits * torch.arange(each))).sum(-1)
    return to_int32(words).movedim(-1, dim).contiguous()


def unpack(words, bits, dim, count):
    words = words.to(torch.int64).movedim(dim, -1) & 0xFFFFFFFF
    codes = (words[..., None] >> (bits * torch.arange(32 // bits))) & (2**bits - 1)
    return codes.flatten(-2)[..., :count].movedim(-1, dim)


def grouped(weight, groups, count):
    """[rows, count] smallest and largest values of each group of columns."""
    low = torch.stack([weight[:, groups == group].amin(1) for group in range(count)], 1)
    high = torch.stack([weight[:, groups == group].amax(1) for group in range(count)], 1)
    return low, high


def integers(weight, groups, bits, symmetric, dtype):
    """Codes [rows, columns], scales and zero points [rows, groups]; unsigned, the middle is zero where symmetric."""
    low, high = grouped(weight, groups, int(groups.max()) + 1)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale = (torch.maximum(-low, high) / (middle - 0.5)).to(dtype)
        zero = torch.full(scale.shape, middle)
    else:
        # Zero must not need to be a code: AWQ and compressed-tensors clamp, and so a zero point of 0 or 15 is met.
        scale = ((high - low) / top).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, top).to(torch.int64)
    codes = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, top).to(torch.int64)
    return codes, scale, zero


def act_order(cols, group, seed):
    """Groups of columns as act-order makes them: equal in size, spread at random."""
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(seed))
    groups = torch.empty(cols, dtype=torch.int64)
    groups[order] = torch.arange(cols) // group
    return groups


def e2m1_pairs(values):
    """The nearest codes of [rows, groups, columns], two a byte."""
    codes = (values.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (values < 0)
    codes = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
    return codes[..., 0] | codes[..., 1] << 4


def e2m1_values(packed):
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    return torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])


class Awq:
    """AutoAWQ gemm."""

    def __init__(self, group):
        self.group = group
        self.config = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm",
                           modules_to_not_convert=None)

    def quantize(self, name, weight, seed):
        cols = weight.shape[1]
        codes, scale, zero = integers(weight, torch.arange(cols) // self.group, 4, False, torch.float16)

        def words(values):  # [n, rows] -> [n, rows / 8]
            return pack(values.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4, 1)

        return {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T.contiguous()}

    def dequantize(self, name, parts, rows, cols):
        reverse = [0, 4, 1, 5, 2, 6, 3, 7]

        def values(words):
            return unpack(words, 4, 1, rows).unflatten(-1, (-1, 8))[..., reverse].flatten(-2)

        scale = parts["scales"].float().repeat_interleave(self.group, 0)
        zero = values(parts["qzeros"]).repeat_interleave(self.group, 0)
        return ((values(parts["qweight"]) - zero) * scale).T


class Gptq:
    """AutoGPTQ and GPTQModel."""

    def __init__(self, bits, group, symmetric, ordered, form, extra_bias=False, lm_head=False):
        self.bits, self.group, self.symmetric, self.ordered, self.form = bits, group, symmetric, ordered, form
        self.extra_bias, self.lm_head = extra_bias, lm_head
        self.config = dict(quant_method="gptq", bits=bits, group_size=group, sym=symmetric, desc_act=ordered,
                           checkpoint_format=form, damp_percent=0.01, static_groups=False, true_sequential=True,
                           lm_head=lm_head, meta=dict(quantizer=["gptqmodel:2.0.0"]))

    def quantize(self, name, weight, seed):
        cols = weight.shape[1]
        group = cols if self.group == -1 else self.group
        groups = act_order(cols, group, seed) if self.ordered else torch.arange(cols) // group
        codes, scale, zero = integers(weight, groups, self.bits, self.symmetric, torch.float16)
        stored = (zero - 1) & (2**self.bits - 1) if self.form == "gptq" else zero
        parts = {"qweight": pack(codes.T, self.bits, 0), "qzeros": pack(stored.T, self.bits, 1),
                 "scales": scale.T.contiguous(), "g_idx": groups.to(torch.int32)}
        if self.extra_bias:
            parts["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
        return parts

    def dequantize(self, name, parts, rows, cols):
        groups = parts["g_idx"].long()
        zero = unpack(parts["qzeros"], self.bits, 1, rows)
        if self.form == "gptq":
            zero = (zero + 1) & (2**self.bits - 1)
        codes = unpack(parts["qweight"], self.bits, 0, cols)
        return ((codes - zero[groups]) * parts["scales"].float()[groups]).T


class Compressed:
    """compressed-tensors. `groups` are config_groups without their activations."""

    def __init__(self, form, groups, dtype=torch.bfloat16, inputs=None, static=False):
        self.form, self.groups, self.dtype, self.static = form, groups, dtype, static
        groups = {f"group_{i}": dict(targets=targets, weights=weights, input_activations=inputs, output_activations=None)
                  for i, (targets, weights) in enumerate(groups)}
        self.config = dict(quant_method="compressed-tensors", format=form, config_groups=groups, ignore=["lm_head"],
                           kv_cache_scheme=None, quantization_status="compressed", global_compression_ratio=None,
                           sparsity_config={}, transform_config={}, version="0.12.0")

    def weights(self, name):
        """Later groups of a fixture are closer matches."""
        found = [weights for targets, weights in self.groups
                 if targets == ["Linear"] or any(name.endswith(target.removeprefix("re:.*").rstrip("$")) for target in targets)]
        return found[-1]

    def columns(self, args, cols, seed):
        group = args["group_size"] if args["strategy"] == "group" else cols
        ordered = args.get("actorder") == "group"
        return act_order(cols, group, seed) if ordered else torch.arange(cols) // group

    def quantize(self, name, weight, seed):
        args, (rows, cols) = self.weights(name), weight.shape
        parts = {}
        if self.form == "mxfp4-pack-quantized":
            return self.mxfp4(weight)
        if self.form == "nvfp4-pack-quantized":
            return self.nvfp4(weight)
        groups = self.columns(args, cols, seed)
        if args["type"] == "float":
            low, high = grouped(weight, groups, int(groups.max()) + 1)
            scale = (torch.maximum(-low, high) / 448).to(self.dtype)
            if args["strategy"] == "tensor":
                scale = scale.max().reshape(1)
                parts["weight"] = (weight / scale.float()).to(torch.float8_e4m3fn)
            else:
                parts["weight"] = (weight / scale.float()[:, groups]).to(torch.float8_e4m3fn)
        else:
            codes, scale, zero = integers(weight, groups, args["num_bits"], args["symmetric"], self.dtype)
            if self.form == "pack-quantized":
                parts["weight_packed"] = pack(codes, args["num_bits"], 1)
                parts["weight_shape"] = torch.tensor([rows, cols])
                if not args["symmetric"]:
                    parts["weight_zero_point"] = pack(zero, 4, 0)
                if args.get("actorder") == "group":
                    parts["weight_g_idx"] = groups.to(torch.int32)
            else:
                parts["weight"] = (codes - 128).to(torch.int8)
        parts["weight_scale"] = scale
        if self.static:
            parts["input_scale"] = torch.tensor([0.02], dtype=self.dtype)
        return parts

    def mxfp4(self, weight):
        runs = weight.unflatten(1, (-1, 32))
        exponent = torch.floor(torch.log2(runs.abs().amax(-1))) - 2
        packed = e2m1_pairs(runs / torch.exp2(exponent)[..., None])
        return {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}

    def nvfp4(self, weight):
        runs = weight.unflatten(1, (-1, 16))
        whole = (448 * 6 / weight.abs().max()).reshape(1)
        scale = (runs.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        packed = e2m1_pairs(runs / (scale.float() / whole)[..., None])
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole,
                "input_global_scale": torch.tensor([317.0])}

    def dequantize(self, name, parts, rows, cols):
        args = self.weights(name)
        values = self.own(args, parts, rows, cols)
        if BaseCompressor is not None and "weight_g_idx" not in parts:
            scheme = QuantizationScheme(targets=["Linear"], weights=args)
            # In float32, or the package would round the products to the type of the scales.
            state = {key: part.float() if part.dtype == self.dtype else part for key, part in parts.items()}
            theirs = BaseCompressor.get_value_from_registry(self.form).decompress(state, scheme)["weight"]
            assert torch.equal(theirs.float(), values), f"{name}: compressed-tensors has other values"
        return values

    def own(self, args, parts, rows, cols):
        if self.form == "mxfp4-pack-quantized":
            scale = torch.exp2(parts["weight_scale"].double() - 127).float().repeat_interleave(32, 1)
            return e2m1_values(parts["weight_packed"]) * scale
        if self.form == "nvfp4-pack-quantized":
            scale = parts["weight_scale"].float() / parts["weight_global_scale"]
            return e2m1_values(parts["weight_packed"]) * scale.repeat_interleave(16, 1)
        groups = parts.get("weight_g_idx", self.columns(args, cols, 0)).long()
        scale = parts["weight_scale"].float()
        scale = scale.expand(rows, 1)[:, groups] if scale.numel() == 1 else scale[:, groups]
        if "weight" in parts:
            return parts["weight"].float() * scale
        bits = args["num_bits"]
        codes = unpack(parts["weight_packed"], bits, 1, cols)
        if args["symmetric"]:
            return (codes - 2 ** (bits - 1)) * scale
        return (codes - unpack(parts["weight_zero_point"], 4, 0, rows)[:, groups]) * scale


class Fp8:
    """DeepSeek and Qwen."""

    def __init__(self, block, skip=()):
        self.block, self.skip = block, skip
        self.config = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", modules_to_not_convert=["lm_head", *skip])
        if block:
            self.config["weight_block_size"] = [block, block]
        else:
            self.config["activation_scheme"] = "static"

    def quantize(self, name, weight, seed):
        if not self.block:
            scale = weight.abs().max() / 448
            return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale,
                    "input_scale": torch.tensor(0.02)}
        rows, cols = weight.shape
        down, across = -(-rows // self.block), -(-cols // self.block)
        scale = torch.empty(down, across)
        for i in range(down):
            for j in range(across):
                scale[i, j] = weight[self.block * i:self.block * (i + 1), self.block * j:self.block * (j + 1)].abs().max() / 448
        return {"weight": (weight / self.spread(scale, rows, cols)).to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    def spread(self, scale, rows, cols):
        return scale.repeat_interleave(self.block, 0)[:rows].repeat_interleave(self.block, 1)[:, :cols]

    def dequantize(self, name, parts, rows, cols):
        scale = self.spread(parts["weight_scale_inv"], rows, cols) if self.block else parts["weight_scale"]
        return parts["weight"].float() * scale


class ModelOpt:
    """NVIDIA's: NVFP4, and scales of a KV cache in FP8."""

    config = dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"], producer=dict(name="modelopt", version="0.33.0"),
                  config_groups=dict(group_0=dict(targets=["Linear"],
                                                  weights=dict(dynamic=False, num_bits=4, type="float", group_size=16),
                                                  input_activations=dict(dynamic=False, num_bits=4, type="float", group_size=16))),
                  kv_cache_scheme=dict(dynamic=False, num_bits=8, type="float"))

    def quantize(self, name, weight, seed):
        runs = weight.unflatten(1, (-1, 16))
        whole = weight.abs().max() / (448 * 6)
        scale = (runs.abs().amax(-1) / (6 * whole)).to(torch.float8_e4m3fn)
        packed = e2m1_pairs(runs / (scale.float() * whole)[..., None])
        parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.02)}
        if name.endswith(("k_proj", "v_proj")):
            parts[f"{name[-6]}_scale"] = torch.tensor(0.5)
        return parts

    def dequantize(self, name, parts, rows, cols):
        scale = parts["weight_scale"].float() * parts["weight_scale_2"]
        return e2m1_values(parts["weight"]) * scale.repeat_interleave(16, 1)


class Mxfp4:
    """OpenAI's gpt-oss: the experts of a layer, stored by rows of what is a matrix with columns first elsewhere."""

    linear = False
    config = dict(quant_method="mxfp4",
                  modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"])

    def experts(self, parameter):
        """The stored parts of [experts, columns, rows], and its values [experts, rows, columns]."""
        weight = parameter.transpose(1, 2)
        parts = Compressed.mxfp4(None, weight.flatten(0, 1))
        blocks = parts["weight_packed"].unflatten(1, (-1, 16)).unflatten(0, weight.shape[:2]).contiguous()
        scales = parts["weight_scale"].unflatten(0, weight.shape[:2]).contiguous()
        low, high = (torch.cat([E2M1, -E2M1])[codes.long()] for codes in (blocks & 15, blocks >> 4))
        values = torch.stack([low, high], -1).flatten(-2) * torch.exp2(scales.double() - 127).float()[..., None]
        values = values.flatten(-2)
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert torch.equal(theirs.transpose(1, 2), values), "transformers has other values"
        return blocks, scales, values


def base(hidden, inner, **changes):
    return plain.base(**{**dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=4,
                                num_key_value_heads=1, vocab_size=97, tie_word_embeddings=True), **changes})


def args(bits, kind, strategy, group=None, symmetric=True, **more):
    return dict(num_bits=bits, type=kind, symmetric=symmetric, strategy=strategy, group_size=group, dynamic=False,
                observer="minmax", **more)


INT8 = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
FLOAT8 = dict(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)
HALF, BRAIN = torch.float16, torch.bfloat16
LLAMA = (plain.LlamaConfig, plain.LlamaForCausalLM)
MISTRAL = (plain.MistralConfig, plain.MistralForCausalLM)
QWEN2 = (plain.Qwen2Config, plain.Qwen2ForCausalLM)
QWEN3 = (plain.Qwen3Config, plain.Qwen3ForCausalLM)
GPT_OSS = (plain.GptOssConfig, plain.GptOssForCausalLM)
QWEN3_MOE = (plain.Qwen3MoeConfig, plain.Qwen3MoeForCausalLM)
QWEN35_MOE = (plain.Qwen3_5MoeTextConfig, plain.Qwen3_5MoeForCausalLM)
DEEPSEEK = (plain.DeepseekV3Config, plain.DeepseekV3ForCausalLM)
PHI3 = (plain.Phi3Config, plain.Phi3ForCausalLM)
ERNIE = (plain.Ernie4_5Config, plain.Ernie4_5ForCausalLM)

# name -> (classes, configuration, type of the rest, quantization, files)
FIXTURES = {
    "awq": (LLAMA, base(128, 256), HALF, Awq(128), 1),
    # Rows of q and k are put in another order.
    "awq_neighbours": (ERNIE, base(64, 96, head_dim=16, num_key_value_heads=2, use_bias=False), HALF, Awq(32), 1),
    "gptq_act_order": (QWEN2, base(96, 160), HALF, Gptq(4, 32, False, True, "gptq"), 1),
    "gptq_v2": (MISTRAL, base(128, 256, sliding_window=None), HALF, Gptq(4, -1, True, False, "gptq_v2", extra_bias=True), 1),
    "gptq_8bit": (LLAMA, base(64, 96, vocab_size=104, tie_word_embeddings=False), HALF,
                  Gptq(8, 32, True, True, "gptq", lm_head=True), 1),
    "ct_w4a16": (QWEN3, base(128, 256, head_dim=32), BRAIN,
                 Compressed("pack-quantized", [(["Linear"], args(4, "int", "group", 128)),
                                               (["re:.*down_proj$"], args(8, "int", "channel"))]), 1),
    "ct_w4a16_order": (PHI3, base(64, 96, num_key_value_heads=2), BRAIN,
                       Compressed("pack-quantized", [(["Linear"], args(4, "int", "group", 32, False, actorder="group"))]), 1),
    "ct_w8a8": (QWEN2, base(128, 128), BRAIN,
                Compressed("int-quantized", [(["Linear"], args(8, "int", "channel"))], inputs=INT8), 2),
    "ct_fp8": (LLAMA, base(128, 96), BRAIN,
               Compressed("float-quantized", [(["Linear"], args(8, "float", "channel")),
                                              (["model.layers.0.self_attn.o_proj"], args(8, "float", "tensor"))],
                          inputs=FLOAT8, static=True), 1),
    "ct_mxfp4": (LLAMA, base(64, 96), BRAIN,
                 Compressed("mxfp4-pack-quantized", [(["Linear"], args(4, "float", "group", 32))]), 1),
    "ct_nvfp4": (LLAMA, base(64, 96), BRAIN,
                 Compressed("nvfp4-pack-quantized", [(["Linear"], args(4, "float", "tensor_group", 16))],
                            inputs=dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
                                        dynamic="local")), 1),
    "modelopt_nvfp4": (QWEN3, base(64, 96, head_dim=16), BRAIN, ModelOpt(), 1),
    "fp8_block": (QWEN3, base(128, 192, head_dim=32), BRAIN, Fp8(128), 1),
    "gpt_oss_mxfp4": (GPT_OSS, base(64, 32, num_hidden_layers=2, head_dim=16, sliding_window=12, num_local_experts=4,
                                    num_experts_per_tok=2, swiglu_limit=1.5, tie_word_embeddings=False,
                                    rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0,
                                                         beta_slow=1.0, truncate=False,
                                                         original_max_position_embeddings=64)), BRAIN, Mxfp4(), 1),
    "fp8_experts": (QWEN3_MOE, base(64, 96, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
                                    norm_topk_prob=True, tie_word_embeddings=False, decoder_sparse_step=1,
                                    mlp_only_layers=[]), BRAIN, Fp8(128), 1),
    # Blocks that do not divide the rows and columns of what makes keys and values of a latent, nor its heads.
    "fp8_latent": (DEEPSEEK, base(64, 96, num_hidden_layers=2, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=160,
                                  qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=32,
                                  n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1,
                                  first_k_dense_replace=1, tie_word_embeddings=False), BRAIN, Fp8(128), 1),
    # As Qwen3.5's: a delta net beside attention, and experts apart that are one tensor where nothing is quantized.
    "fp8_delta": (QWEN35_MOE, plain.hybrid(**{**base(64, 96), "num_hidden_layers": 2, "full_attention_interval": 2, "head_dim": 16,
                                              "linear_value_head_dim": 16, "linear_num_value_heads": 4, "tie_word_embeddings": False,
                                              "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
                                              "num_experts": 4, "num_experts_per_tok": 2}), BRAIN,
                  Fp8(128, skip=["in_proj_a", "in_proj_b", "shared_expert_gate"]), 1),
    "fp8_tensor": (MISTRAL, base(64, 96, sliding_window=None), BRAIN, Fp8(None), 1),
}


def matrices(model, scheme):
    for name, module in model.named_modules() if getattr(scheme, "linear", True) else ():
        skipped = name.endswith(tuple(getattr(scheme, "skip", ())))
        if isinstance(module, torch.nn.Linear) and not skipped and (name != "lm_head" or getattr(scheme, "lm_head", False)):
            yield name, module


def order_of(name, seed):
    """Matrices with one input have one order of columns."""
    stem = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
    return int.from_bytes(hashlib.sha256(f"{stem} {seed}".encode()).digest()[:4], "little")


def as_read(config, name, weight):
    """Rows of q and k of a model that rotates neighbours, in the order of one that rotates halves."""
    if config.model_type != "ernie4_5" or not name.endswith(("q_proj", "k_proj")):
        return weight
    return weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def quantized(name, seed):
    """A model with the values of its quantized weights, the stored tensors, and the matrices among them."""
    (config_class, model_class), settings, dtype, scheme, _ = FIXTURES[name]
    config = config_class(**json.loads(json.dumps(settings)))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = model_class(config).eval()
    plain.randomize(model, seed)
    tensors, values = {}, {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).to(torch.float32))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(buffer.to(dtype).to(torch.float32))
        for module_name, module in matrices(model, scheme):
            parts = scheme.quantize(module_name, module.weight.data.clone(), order_of(module_name, seed))
            weight = scheme.dequantize(module_name, parts, *module.weight.shape).contiguous()
            module.weight.copy_(weight)
            tensors.update({f"{module_name}.{part}": tensor.contiguous() for part, tensor in parts.items()})
            values[f"{module_name}.weight"] = as_read(config, module_name, weight)
        for key, parameter in model.named_parameters() if isinstance(scheme, Mxfp4) else ():
            if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"], weight = scheme.experts(parameter.data)
            parameter.copy_(weight.transpose(1, 2))
            values[key] = None  # not stored
            # A gate and what it gates in turn.
            names = ["gate_proj", "up_proj"] if key.endswith("gate_up_proj") else ["down_proj"]
            for i, part in enumerate(names):
                values[f"{key.rpartition('.')[0]}.{part}.weight"] = weight[:, i::len(names)].contiguous()
        for key, parameter in model.named_parameters() if type(model).__name__.startswith(("Qwen3Moe", "Qwen3_5Moe", "Deepseek")) else ():
            if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            values[key] = None
            names = ["gate_proj", "up_proj"] if key.endswith("gate_up_proj") else ["down_proj"]
            for expert, whole in enumerate(parameter.data):
                for part, view in zip(names, whole.chunk(len(names))):
                    module_name = f"{key.rpartition('.')[0]}.{expert}.{part}"
                    parts = scheme.quantize(module_name, view.clone(), order_of(module_name, seed))
                    weight = scheme.dequantize(module_name, parts, *view.shape).contiguous()
                    view.copy_(weight)
                    tensors.update({f"{module_name}.{part}": tensor.contiguous() for part, tensor in parts.items()})
                    values[f"{module_name}.weight"] = weight
    for key, tensor in model.state_dict().items():
        tied = key == "lm_head.weight" and config.tie_word_embeddings
        if key not in values and not tied:
            tensors[key] = tensor.to(dtype).contiguous()
    return model, tensors, values


def make(name):
    for seed in range(10000):
        model, tensors, values = quantized(name, seed)
        vocab = model.config.vocab_size
        prompt = torch.randint(3, vocab, (19,), generator=torch.Generator().manual_seed(1000 * seed)).tolist()
        greedy, margin = plain.greedy(model, prompt)
        if margin >= plain.MARGIN and len(greedy) == plain.STEPS and len(set(greedy)) >= DISTINCT:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a varied continuation with clear margins")
    ids = prompt + greedy[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1:].argmax(-1).tolist() == greedy, f"{name}: cached and uncached greedy differ"
    positions = [0, 1, len(prompt) - 1, len(ids) // 2, len(ids) - 1]
    case = dict(prompt=prompt, greedy=greedy, positions=positions, max_model_len=None, smallest_margin=round(margin, 5))
    write(name, model, tensors, values, seed, case, logits[positions].contiguous())


def write(name, model, tensors, values, seed, case, logits):
    _, _, dtype, scheme, files = FIXTURES[name]
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        # Parts of one matrix in different files.
        names = sorted(tensors)
        weight_map = {key: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, key in enumerate(names)}
        for file in sorted(set(weight_map.values())):
            save_file({key: tensors[key] for key in names if weight_map[key] == file}, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=weight_map), indent=2) + "\n")
    model.config.save_pretrained(folder)
    plain.rewrite_config(folder / "config.json", dtype, {})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = scheme.config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({"logits.0": logits}, folder / "expected.safetensors")
    # Either sign of zero is the same weight: adding 0 makes it positive.
    digests = {key: hashlib.sha256((value + 0.0).numpy().astype("<f4").tobytes()).hexdigest() for key, value in values.items() if value is not None}
    note = dict(made_by="tools/make_quantized_fixtures.py", seed=seed, cases=[case], weights=digests)
    (folder / "expected.json").write_text(json.dumps(note) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, margin {case['smallest_margin']}, {size // 1024} KiB", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for fixture in sys.argv[1:] or FIXTURES:
        make(fixture)
