"""Makes the tiny random checkpoints that every model family is checked against.

For each family: a checkpoint as transformers writes it (config.json, generation_config.json, safetensors in bf16, f16 or
f32) and what transformers computes from the *stored* weights in float32: logits at some positions and 64 greedy tokens.
A seed is searched for whose greedy continuation is varied and never a near tie, so that a backend with other rounding
still has to give the same tokens.

    python tools/make_fixtures.py [family ...]
    python tools/make_fixtures.py --hidden [family ...]     adds vectors to the fixtures there are

Needs torch, transformers >= 5 and safetensors. Writes crates/folio-model/tests/fixtures/<family>/. Deterministic.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent / "crates/folio-model/tests/fixtures"
STEPS = 64
# Smallest gap between the best two logits of a greedy step, relative to the largest logit.
MARGIN = 0.01
# The same for families whose fixtures take long to search for: still twenty times what logits may differ by.
SMALL_MARGIN = 0.002
DISTINCT = 24

VOCAB = 199  # a prime: nothing divides it
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    use_cache=True,
)


def base(**changes):
    return {**BASE, **changes}


def hybrid(**changes):
    """Gated delta nets of which no two sizes are the same, gated attention that rotates a quarter of a head."""
    return base(**{**dict(num_key_value_heads=2, hidden_size=32, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False,
                          linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=20,
                          linear_conv_kernel_dim=4,
                          rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)), **changes})


def latent(**changes):
    """Latent attention of which no two sizes are the same."""
    return base(**{**dict(num_key_value_heads=4, hidden_size=40, num_hidden_layers=3, intermediate_size=56, rms_norm_eps=1e-6,
                          tie_word_embeddings=False, q_lora_rank=28, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8,
                          v_head_dim=14, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
                          first_k_dense_replace=1, routed_scaling_factor=2.5), **changes})


def with_eps(name, **changes):
    """The epsilon of norms under another name."""
    settings = base(**changes)
    settings[name] = settings.pop("rms_norm_eps")
    return settings


def nemotron(pattern, **changes):
    """Mamba-2 of which no two sizes are the same. `pattern` says what each layer is."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    settings = with_eps("layer_norm_epsilon", **{**dict(num_key_value_heads=2, hidden_size=40, head_dim=12, intermediate_size=56,
                                                        layers_block_type=[names[part] for part in pattern], mamba_num_heads=6,
                                                        mamba_head_dim=20, ssm_state_size=12, n_groups=3, conv_kernel=4,
                                                        tie_word_embeddings=False), **changes})
    settings.pop("num_hidden_layers")
    return settings


def llama4(**changes):
    """Scores that grow from position to position on layers without a rotation."""
    return base(**{**dict(num_key_value_heads=2, hidden_size=40, head_dim=12, intermediate_size=20, intermediate_size_mlp=56,
                          num_experts_per_tok=1, floor_scale=6, attn_scale=0.2, tie_word_embeddings=False), **changes})


def gemma4(kinds, **changes):
    """Heads of two sizes. `kinds` says which layers have a window (S) and which attend to everything (F)."""
    names = {"S": "sliding_attention", "F": "full_attention"}
    return base(**{**dict(num_key_value_heads=2, hidden_size=40, intermediate_size=56, head_dim=12, global_head_dim=24,
                          num_hidden_layers=len(kinds), layer_types=[names[kind] for kind in kinds], sliding_window=11,
                          rms_norm_eps=1e-6, hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB,
                          final_logit_softcapping=2.5, tie_word_embeddings=True,
                          rope_parameters=dict(
                              full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1000.0),
                              sliding_attention=dict(rope_type="default", rope_theta=10000.0))), **changes})


MIXTURE = dict(moe_intermediate_size=20, shared_expert_intermediate_size=28, num_experts=6, num_experts_per_tok=2)
TINY_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, spatial_merge_size=1,
                   temporal_patch_size=1, out_hidden_size=32, num_position_embeddings=4)

PHI4_HALF = 6  # rotated pairs: head_dim 16 * 0.75 / 2

# name -> (config class, model class, configuration, dtype, options)
#   old: config.json in the style of transformers 4
#   rename: fields that were called otherwise in transformers 4
#   drop: fields removed from config.json, because checkpoints in the wild lack them
#   extra: fields added to config.json
#   shard: largest shard, when the checkpoint is to be sharded
#   stacked: experts are stored as in the released checkpoints, all in one tensor; transformers writes them apart
#   cases: (prompt length, max_model_len given to Folio or None)
FAMILIES = {
    "llama2": (LlamaConfig, LlamaForCausalLM, base(), torch.float32,
               dict(old=True, drop=["head_dim", "num_key_value_heads", "tie_word_embeddings"])),
    "llama3": (LlamaConfig, LlamaForCausalLM,
               base(num_key_value_heads=2, hidden_size=64, tie_word_embeddings=True, eos_token_id=[2, 5, 7],
                    rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                         high_freq_factor=4.0, original_max_position_embeddings=32)),
               torch.bfloat16, dict(old=True, drop=["head_dim"])),
    "llama_bias": (LlamaConfig, LlamaForCausalLM,
                   base(num_key_value_heads=1, attention_bias=True, mlp_bias=True,
                        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
                   torch.float16, dict(old=True)),
    "mistral": (MistralConfig, MistralForCausalLM,
                base(num_key_value_heads=2, head_dim=20, sliding_window=20, rope_theta=1000000.0), torch.bfloat16,
                dict(cases=[(70, None)])),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM,
              base(num_key_value_heads=2, rope_theta=1000000.0, rms_norm_eps=1e-6), torch.float16, dict(shard="60KB")),
    "qwen2_yarn": (Qwen2Config, Qwen2ForCausalLM,
                   base(num_key_value_heads=4, hidden_size=64, tie_word_embeddings=True, num_hidden_layers=1,
                        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                             original_max_position_embeddings=64)),
                   torch.float32, dict(old=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM,
              base(num_key_value_heads=1, num_attention_heads=3, head_dim=32, rope_theta=1000000.0, rms_norm_eps=1e-6,
                   tie_word_embeddings=True), torch.bfloat16, {}),
    "qwen3_window": (Qwen3Config, Qwen3ForCausalLM,
                     base(num_key_value_heads=2, head_dim=16, num_hidden_layers=3, rms_norm_eps=1e-6,
                          use_sliding_window=True, sliding_window=9, max_window_layers=1), torch.float16,
                     dict(cases=[(64, None)], drop=["layer_types"])),
    "smollm2": (LlamaConfig, LlamaForCausalLM,
                base(num_key_value_heads=1, num_attention_heads=3, hidden_size=72, rope_theta=130000.0,
                     tie_word_embeddings=True), torch.bfloat16, {}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM,
                base(num_key_value_heads=1, num_hidden_layers=5, rope_theta=5000000.0, intermediate_size=72),
                torch.float16, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM,
             base(num_key_value_heads=2, hidden_size=64, partial_rotary_factor=0.5, rope_theta=10000.0), torch.float16,
             dict(old=True)),
    "phi4_mini": (Phi3Config, Phi3ForCausalLM,
                  base(num_key_value_heads=2, hidden_size=64, tie_word_embeddings=True,
                       original_max_position_embeddings=96, sliding_window=262144,
                       rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                                            original_max_position_embeddings=96,
                                            short_factor=[1.0 + 0.05 * i for i in range(PHI4_HALF)],
                                            long_factor=[1.0 + 0.9 * i for i in range(PHI4_HALF)])),
                  torch.bfloat16, dict(cases=[(100, None), (23, 96)])),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM,
               base(num_key_value_heads=2, hidden_size=56, head_dim=16, num_hidden_layers=4, intermediate_size=72,
                    query_pre_attn_scalar=24, sliding_window=12, attn_logit_softcapping=4.0, final_logit_softcapping=2.5),
               torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(70, None)], drop=["layer_types", "tie_word_embeddings"])),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM,
                    base(num_key_value_heads=1, hidden_size=56, head_dim=16, num_hidden_layers=4, intermediate_size=72,
                         query_pre_attn_scalar=24, sliding_window=17,
                         layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
                         rope_parameters=dict(
                             full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                             sliding_attention=dict(rope_type="default", rope_theta=10000.0))),
                    torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(75, None)])),
    # The text part of a multimodal checkpoint, in the style of the first ones on the hub.
    "gemma3": (Gemma3Config, Gemma3ForConditionalGeneration,
               dict(text_config=base(num_key_value_heads=4, num_attention_heads=8, hidden_size=40, head_dim=8,
                                     num_hidden_layers=3, intermediate_size=64, query_pre_attn_scalar=8, sliding_window=11,
                                     sliding_window_pattern=2,
                                     rope_parameters=dict(
                                         full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                                         sliding_attention=dict(rope_type="default", rope_theta=10000.0))),
                    vision_config=dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=16,
                                       num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4),
                    mm_tokens_per_image=4, image_token_index=190, boi_token_index=191, eoi_token_index=192,
                    bos_token_id=1, eos_token_id=2, pad_token_id=0),
               torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(66, None)], nested=True)),
    # As Gemma 4 31B, in the style of the released checkpoints: values are made of what keys are made of.
    "gemma4_text": (Gemma4TextConfig, Gemma4ForCausalLM,
                    gemma4("SFSF", num_global_key_value_heads=1, attention_k_eq_v=True),
                    torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(70, None)], drop=["per_layer_config"],
                                         extra=dict(global_head_dim=24, num_global_key_value_heads=1))),
    # As E2B and E4B: the last three layers read the K and V of others, and every layer is given values of each token.
    "gemma4": (Gemma4Config, Gemma4ForConditionalGeneration,
               dict(text_config=gemma4("SSFSSF", num_key_value_heads=1, hidden_size=32, head_dim=8, global_head_dim=16,
                                       intermediate_size=40, sliding_window=9, num_kv_shared_layers=3, use_double_wide_mlp=True,
                                       hidden_size_per_layer_input=6),
                    vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                       num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=16),
                    audio_config=None, image_token_id=190, video_token_id=191, boi_token_id=192, eoi_token_id=193,
                    audio_token_id=194, boa_token_id=195, eoa_token_index=196),
               torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(60, None)])),
    # As 26B-A4B: a mixture of experts beside the feed-forward part.
    "gemma4_moe": (Gemma4TextConfig, Gemma4ForCausalLM,
                   gemma4("SSF", num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size=32, intermediate_size=28,
                          enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=20),
                   torch.float16, dict(margin=SMALL_MARGIN, cases=[(40, None)])),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM,
                base(num_key_value_heads=2, hidden_size=32, head_dim=16, num_hidden_layers=3, intermediate_size=24,
                     sliding_window=10, num_local_experts=6, num_experts_per_tok=2, swiglu_limit=1.5,
                     tie_word_embeddings=False,
                     rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                          truncate=False, original_max_position_embeddings=64)),
                torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(72, None)], old=True)),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM,
                  base(num_key_value_heads=2, hidden_size=32, head_dim=16, num_hidden_layers=2, moe_intermediate_size=20,
                       intermediate_size=72, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, rms_norm_eps=1e-6,
                       rope_theta=1000000.0, tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[]),
                  torch.bfloat16, dict(margin=SMALL_MARGIN)),
    "mixtral": (MixtralConfig, MixtralForCausalLM,
                base(num_key_value_heads=2, hidden_size=32, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2,
                     rope_theta=1000000.0, tie_word_embeddings=False),
                torch.bfloat16, dict(margin=SMALL_MARGIN, old=True)),
    "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration,
                 dict(text_config=dict(model_type="mistral", **base(num_key_value_heads=1, hidden_size=40, head_dim=12,
                                                                    intermediate_size=64, sliding_window=None,
                                                                    rope_theta=1000000.0, tie_word_embeddings=False)),
                      vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, image_size=8, patch_size=4),
                      image_token_index=190, tie_word_embeddings=False),
                 torch.bfloat16, {}),
    "granite": (GraniteConfig, GraniteForCausalLM,
                base(num_key_value_heads=2, hidden_size=40, intermediate_size=64, num_hidden_layers=3, embedding_multiplier=0.375,
                     residual_multiplier=0.75, attention_multiplier=0.2, logits_scaling=6.0, tie_word_embeddings=True),
                torch.bfloat16, dict(margin=SMALL_MARGIN)),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM,
                 base(num_key_value_heads=2, hidden_size=40, head_dim=16, intermediate_size=64, attention_bias=True,
                      attention_out_bias=False, mlp_bias=False, tie_word_embeddings=False, rope_theta=1e7),
                 torch.bfloat16, {}),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM,
                base(num_key_value_heads=2, hidden_size=40, head_dim=12, intermediate_size=64, num_hidden_layers=4,
                     sliding_window=11, sliding_window_pattern=4, tie_word_embeddings=False),
                torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(60, None)])),
    # Without a window every layer is rotated.
    "exaone4_small": (Exaone4Config, Exaone4ForCausalLM,
                      base(num_key_value_heads=2, hidden_size=40, head_dim=12, intermediate_size=64, num_hidden_layers=2,
                           sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=False),
                      torch.float16, dict(margin=SMALL_MARGIN)),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM,
                 base(num_key_value_heads=2, hidden_size=40, head_dim=12, intermediate_size=64, use_bias=True,
                      tie_word_embeddings=True, rope_theta=500000.0),
                 torch.bfloat16, {}),
    # The weights of the chosen do not add up to one.
    "qwen3_moe_shares": (Qwen3MoeConfig, Qwen3MoeForCausalLM,
                         base(num_key_value_heads=1, hidden_size=24, head_dim=16, num_hidden_layers=1, moe_intermediate_size=16,
                              intermediate_size=72, num_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-6,
                              tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[]),
                         torch.float16, dict(margin=SMALL_MARGIN, drop=["norm_topk_prob", "mlp_only_layers"],
                                             rename=dict(num_local_experts="num_experts"))),
    # With a shared expert.
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM,
                   hybrid(num_hidden_layers=4, intermediate_size=72, norm_topk_prob=True,
                          layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"], **MIXTURE),
                   torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(70, None)])),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM,
                     hybrid(num_hidden_layers=4, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=16,
                            linear_value_head_dim=10, linear_conv_kernel_dim=3, tie_word_embeddings=True), torch.float16,
                     dict(margin=SMALL_MARGIN, drop=["layer_types"])),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration,
                dict(text_config=hybrid(num_hidden_layers=2, full_attention_interval=2), vision_config=TINY_VISION,
                     image_token_id=190, video_token_id=191, vision_start_token_id=192, vision_end_token_id=193,
                     tie_word_embeddings=False),
                torch.bfloat16, dict(margin=SMALL_MARGIN)),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM,
                         hybrid(num_hidden_layers=2, full_attention_interval=2, **MIXTURE), torch.float16,
                         dict(margin=SMALL_MARGIN, stacked=True)),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration,
                    dict(text_config=hybrid(num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"], **MIXTURE),
                         vision_config=TINY_VISION, image_token_id=190, video_token_id=191, vision_start_token_id=192,
                         vision_end_token_id=193, tie_word_embeddings=False),
                    torch.bfloat16, dict(margin=SMALL_MARGIN, stacked=True)),
    # YaRN with both of its scales, as in V3; half of the groups are dropped.
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM,
                    latent(n_group=4, topk_group=2, norm_topk_prob=True,
                           rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                                mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64)),
                    torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(70, None)], old=True, drop=["head_dim"])),
    # Biases, halves of a head rotated together, sigmoids that are not divided by their sum, and the factor of cosines and sines.
    "deepseek_v3_bias": (DeepseekV3Config, DeepseekV3ForCausalLM,
                         latent(num_hidden_layers=2, first_k_dense_replace=0, n_group=2, topk_group=1, norm_topk_prob=False,
                                attention_bias=True, rope_interleave=False, num_experts_per_tok=2,
                                rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=0.9,
                                                     mscale_all_dim=0.6, original_max_position_embeddings=64)),
                         torch.float16, dict(margin=SMALL_MARGIN)),
    # As V2-Lite: queries are not compressed, no groups.
    "deepseek_v2_lite": (DeepseekV2Config, DeepseekV2ForCausalLM,
                         latent(num_hidden_layers=2, q_lora_rank=None, n_shared_experts=2, routed_scaling_factor=1.0,
                                topk_method="greedy",
                                rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                                     mscale=0.707, mscale_all_dim=0.707, original_max_position_embeddings=64)),
                         torch.bfloat16, dict(margin=SMALL_MARGIN, old=True, drop=["head_dim"])),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM,
                    latent(num_hidden_layers=2, n_shared_experts=2, routed_scaling_factor=1.6,
                           topk_method="group_limited_greedy", n_group=4, topk_group=2),
                    torch.float16, dict(margin=SMALL_MARGIN)),
    # DeepSeek's third version under another name; no groups.
    "kimi_k2": (DeepseekV3Config, DeepseekV3ForCausalLM,
                latent(num_hidden_layers=2, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827,
                       rope_parameters=dict(rope_type="yarn", rope_theta=50000.0, factor=8.0, beta_fast=1.0, beta_slow=1.0,
                                            mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=32)),
                torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(60, None)], old=True, drop=["head_dim"], model_type="kimi_k2")),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM,
                      latent(num_hidden_layers=3, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.8,
                             rms_norm_eps=1e-5, v_head_dim=18, num_attention_heads=5, num_key_value_heads=5,
                             mlp_layer_types=["dense", "sparse", "sparse"],
                             rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
                      torch.bfloat16, dict(margin=SMALL_MARGIN)),
    # As GLM-4.5: attention over whole heads, of which half is rotated.
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM,
                 base(num_key_value_heads=2, hidden_size=40, head_dim=16, num_hidden_layers=3, intermediate_size=56,
                      attention_bias=True, use_qk_norm=True, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=3,
                      n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True,
                      routed_scaling_factor=2.5, tie_word_embeddings=False,
                      rope_parameters=dict(rope_type="default", rope_theta=1000000.0, partial_rotary_factor=0.5)),
                 torch.bfloat16, dict(margin=SMALL_MARGIN, old=True)),
    # As GLM-4.5-Air: no norm of q and k.
    "glm4_moe_air": (Glm4MoeConfig, Glm4MoeForCausalLM,
                     base(num_key_value_heads=1, hidden_size=32, head_dim=16, num_hidden_layers=2, intermediate_size=56,
                          attention_bias=True, use_qk_norm=False, moe_intermediate_size=20, n_routed_experts=6,
                          num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.0,
                          tie_word_embeddings=False),
                     torch.float16, dict(margin=SMALL_MARGIN)),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM,
              base(num_key_value_heads=2, hidden_size=40, intermediate_size=64, rms_norm_eps=1e-6, rope_theta=500000.0,
                   tie_word_embeddings=False), torch.bfloat16, dict(old=True)),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM,
              base(num_key_value_heads=2, hidden_size=40, intermediate_size=64, num_hidden_layers=4, rms_norm_eps=1e-6,
                   sliding_window=13, tie_word_embeddings=False,
                   rope_parameters=dict(
                       full_attention=dict(rope_type="yarn", rope_theta=500000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
                                           attention_factor=1.2079441541679836, original_max_position_embeddings=32),
                       sliding_attention=dict(rope_type="default", rope_theta=500000.0))),
              torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(70, None)])),
    "granitemoe": (GraniteMoeConfig, GraniteMoeForCausalLM,
                   base(num_key_value_heads=2, hidden_size=32, intermediate_size=20, num_local_experts=6, num_experts_per_tok=2,
                        embedding_multiplier=0.375, residual_multiplier=0.75, attention_multiplier=0.2, logits_scaling=6.0,
                        rms_norm_eps=1e-6, tie_word_embeddings=True),
                   torch.bfloat16, dict(margin=SMALL_MARGIN)),
    "granitemoeshared": (GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM,
                         base(num_key_value_heads=2, hidden_size=32, intermediate_size=20, num_local_experts=5,
                              num_experts_per_tok=2, shared_intermediate_size=28, embedding_multiplier=0.375,
                              residual_multiplier=0.75, attention_multiplier=0.2, logits_scaling=6.0, rms_norm_eps=1e-6,
                              tie_word_embeddings=True),
                         torch.bfloat16, dict(margin=SMALL_MARGIN)),
    # As Granite 4.0-H: Mamba-2 layers of which no two sizes are the same, attention without a rotation.
    "granite4_h": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM,
                   base(num_key_value_heads=2, hidden_size=40, intermediate_size=20, num_hidden_layers=4, num_local_experts=6,
                        num_experts_per_tok=2, shared_intermediate_size=28, embedding_multiplier=0.375, residual_multiplier=0.75,
                        attention_multiplier=0.2, logits_scaling=6.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
                        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
                        position_embedding_type="nope", mamba_n_heads=4, mamba_d_head=20, mamba_d_state=12, mamba_n_groups=2,
                        mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False),
                   torch.bfloat16, dict(margin=SMALL_MARGIN, drop=["time_step_limit"])),
    # As the dense ones of Granite 4.0: attention with a rotation, and what is the shared expert elsewhere.
    "granite4": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM,
                 base(num_key_value_heads=2, hidden_size=40, intermediate_size=20, num_hidden_layers=2, num_local_experts=0,
                      num_experts_per_tok=0, shared_intermediate_size=64, embedding_multiplier=0.375, residual_multiplier=0.75,
                      attention_multiplier=0.2, logits_scaling=6.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
                      layer_types=["full_attention"] * 2, position_embedding_type="rope", mamba_n_heads=4),
                 torch.bfloat16, dict(margin=SMALL_MARGIN, drop=["time_step_limit"])),
    # Each layer one part; as Nemotron 3 Nano, with a feed-forward part without experts besides.
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM,
                   nemotron("MEM*-E", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
                            moe_shared_expert_intermediate_size=28, routed_scaling_factor=2.5),
                   torch.bfloat16, dict(margin=SMALL_MARGIN)),
    # As Nemotron 3 Super: experts read and write less than the residual stream.
    "nemotron_h_latent": (NemotronHConfig, NemotronHForCausalLM,
                          nemotron("ME*E", n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, moe_latent_size=24,
                                   moe_shared_expert_intermediate_size=28),
                          torch.bfloat16, dict(margin=SMALL_MARGIN, drop=["time_step_limit"])),
    # As Nemotron-H and Nemotron Nano 2, with the fields that these have.
    "nemotron_h_dense": (NemotronHConfig, NemotronHForCausalLM, nemotron("M-*-M", n_groups=1, mamba_num_heads=5, mamba_head_dim=18),
                         torch.float16, dict(margin=SMALL_MARGIN, drop=["layers_block_type", "layer_types", "n_routed_experts"],
                                             extra=dict(hybrid_override_pattern="M-*-M", num_hidden_layers=5))),
    # As Scout: experts in every layer. Chunks that are no whole steps of anything.
    "llama4_text": (Llama4TextConfig, Llama4ForCausalLM,
                    llama4(num_hidden_layers=4, num_local_experts=6, attention_chunk_size=11,
                           rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                                high_freq_factor=4.0, original_max_position_embeddings=32)),
                    torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(60, None)])),
    # As Maverick: experts in every other layer, no norm of q and k.
    "llama4": (Llama4Config, Llama4ForConditionalGeneration,
               dict(text_config=dict(model_type="llama4_text",
                                     **llama4(num_hidden_layers=4, num_local_experts=5, attention_chunk_size=32,
                                              interleave_moe_layer_step=2, use_qk_norm=False)),
                    vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                                       patch_size=4, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
                                       pixel_shuffle_ratio=0.5)),
               torch.bfloat16, dict(margin=SMALL_MARGIN)),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM,
                   base(num_key_value_heads=2, hidden_size=32, head_dim=12, intermediate_size=20, num_local_experts=8,
                        num_experts_per_tok=3, rms_norm_eps=1e-6, rotary_dim=6, rope_theta=5000000.0, tie_word_embeddings=False),
                   torch.bfloat16, dict(margin=SMALL_MARGIN, drop=["rope_parameters"], extra=dict(rope_theta=5000000.0))),
    "ernie4_5_moe": (Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM,
                     base(num_key_value_heads=2, hidden_size=32, intermediate_size=56, num_hidden_layers=3,
                          moe_intermediate_size=20, moe_k=3, moe_num_experts=8, moe_num_shared_experts=2, moe_layer_start_index=1,
                          use_bias=False, tie_word_embeddings=True, rope_theta=500000.0),
                     torch.bfloat16, dict(margin=SMALL_MARGIN)),
    "hunyuan_v1_dense": (HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM,
                         base(num_key_value_heads=2, hidden_size=40, head_dim=12, intermediate_size=64, tie_word_embeddings=True,
                              rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, alpha=50.0, factor=1.0)),
                         torch.bfloat16, dict(margin=SMALL_MARGIN, old=True)),
    "hunyuan_v1_moe": (HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM,
                       base(num_key_value_heads=2, hidden_size=32, head_dim=12, intermediate_size=20, num_experts=6, moe_topk=[2, 2],
                            tie_word_embeddings=True,
                            rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, alpha=50.0, factor=1.0)),
                       torch.bfloat16, dict(margin=SMALL_MARGIN, old=True)),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM,
                with_eps("layer_norm_eps", num_key_value_heads=2, hidden_size=48, intermediate_size=64, num_hidden_layers=4,
                         sliding_window=13, logit_scale=0.25, rope_theta=50000.0, tie_word_embeddings=True),
                torch.bfloat16, dict(margin=SMALL_MARGIN, cases=[(60, None)])),
    "apertus": (ApertusConfig, ApertusForCausalLM,
                base(num_key_value_heads=2, hidden_size=40, intermediate_size=64, tie_word_embeddings=False,
                     rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                          high_freq_factor=4.0, original_max_position_embeddings=32)),
                torch.bfloat16, dict(margin=SMALL_MARGIN)),
    # Three convolutions and two layers of attention; the width of the feed-forward part is made from another.
    "lfm2": (Lfm2Config, Lfm2ForCausalLM,
             with_eps("norm_eps", num_key_value_heads=2, hidden_size=40, intermediate_size=100, num_hidden_layers=5,
                      layer_types=["conv", "conv", "full_attention", "conv", "full_attention"], block_multiple_of=16,
                      block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, tie_word_embeddings=True,
                      rope_theta=1000000.0),
             torch.bfloat16, dict(margin=SMALL_MARGIN)),
    "lfm2_moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM,
                 with_eps("norm_eps", num_key_value_heads=2, hidden_size=32, intermediate_size=56, num_hidden_layers=4,
                          layer_types=["conv", "full_attention", "conv", "conv"], num_dense_layers=1, moe_intermediate_size=20,
                          num_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5, tie_word_embeddings=True,
                          rope_theta=1000000.0),
                 torch.bfloat16, dict(margin=SMALL_MARGIN)),
}


def randomize(model, seed):
    """Weights large enough that the continuation is lively, norms and biases that would be missed if left out."""
    generator = torch.Generator().manual_seed(seed)
    gemma4 = type(model).__name__.startswith("Gemma4")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if gemma4 and name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1.0 + 0.3 * noise)
            elif gemma4 and name.endswith("router.proj.weight"):
                # What it reads is divided by the root of the width.
                parameter.copy_(1.6 * noise)
            elif "Gemma" in type(model).__name__ and name.endswith(("model.norm.weight", "language_model.norm.weight")):
                # Of either sign: with a tied matrix the last token would only be repeated otherwise.
                parameter.copy_(noise - 1.0)
            elif "norm" in name:
                # Gemma stores what is added to one, and so do the hybrids of Qwen but for the norm of a delta net.
                hybrid = type(model).__name__.startswith(("Qwen3Next", "Qwen3_5")) and not name.endswith("linear_attn.norm.weight")
                gemma = "Gemma" in type(model).__name__ and not gemma4
                parameter.copy_(0.2 * noise if gemma or hybrid else 1.0 + 0.2 * noise)
            elif name.endswith("A_log"):
                # States that last from two tokens to many.
                parameter.copy_(noise - 1.5)
            elif name.endswith(("conv1d.weight", "conv.conv.weight")):
                parameter.copy_(0.8 * noise)
            elif name.endswith(".D"):
                parameter.copy_(1.0 + 0.5 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(1.0 + noise)
            elif name.endswith("e_score_correction_bias"):
                # Added to shares of one.
                parameter.copy_(0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith(("alpha_p", "alpha_n")):
                parameter.copy_(0.5 * noise)
            elif "shared_experts" in name:
                parameter.copy_(noise * (1.6 / parameter.shape[1] ** 0.5))
            elif "experts" in name:
                # gpt-oss has columns before rows.
                rows_first = type(model).__name__.startswith(
                    ("Qwen3", "Deepseek", "Glm4", "GraniteMoe", "MiniMax", "Ernie", "HunYuan", "Lfm2", "NemotronH", "Gemma4"))
                columns = parameter.shape[2 if rows_first else 1]
                parameter.copy_(noise * (1.6 / columns ** 0.5))
            elif hasattr(model.config, "text_config") and "language_model" not in name:
                parameter.copy_(0.1 * noise)
            elif "embed_tokens" in name and "Gemma" in type(model).__name__:
                # Scaled by the root of the width.
                parameter.copy_(0.25 * noise)
            elif "embed_tokens" in name or "model.embeddings" in name or "lm_head" in name:
                parameter.copy_(0.6 * noise)
            else:
                parameter.copy_(noise * (1.6 / parameter.shape[1] ** 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                # Below zero for some experts, so that what a router puts in the place of those that are dropped shows.
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator) - 0.5)
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.2 * torch.randn(buffer.shape, generator=generator))


def greedy(model, prompt, smallest=MARGIN):
    """Greedy tokens, and the smallest relative margin."""
    ids, margin = list(prompt), 1.0
    with torch.no_grad():
        past = None
        step = torch.tensor([ids])
        for _ in range(STEPS):
            out = model(step, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1]
            top = logits.topk(2)
            margin = min(margin, float((top.values[0] - top.values[1]) / logits.abs().max()))
            if margin < smallest:
                return ids[len(prompt):], margin
            ids.append(int(top.indices[0]))
            step = torch.tensor([[ids[-1]]])
    return ids[len(prompt):], margin


def make(name):
    config_class, model_class, settings, dtype, options = FAMILIES[name]
    cases = options.get("cases", [(23, None)])
    smallest = options.get("margin", MARGIN)
    for seed in range(10000):
        config = config_class(**json.loads(json.dumps(settings)))
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        model = model_class(config).eval()
        randomize(model, seed)
        # What is stored decides: round once, compute in float32 from the rounded weights. Not `model.to(dtype)`, which
        # would round the rotary frequencies too.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype).to(torch.float32))
            for part, buffer in model.named_buffers():
                if part.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                    buffer.copy_(buffer.to(dtype).to(torch.float32))
            # A model that runs in its own type scales embeddings by a number of that type.
            for module in model.modules():
                if hasattr(module, "embed_scale"):
                    module.embed_scale.copy_(module.embed_scale.to(dtype).to(torch.float32))
        found = []
        for case, (length, max_model_len) in enumerate(cases):
            generator = torch.Generator().manual_seed(1000 * seed + case)
            prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            tokens, margin = greedy(model, prompt, smallest)
            if margin < smallest or len(set(tokens)) < DISTINCT:
                break
            found.append((prompt, tokens, margin, max_model_len))
        else:
            write(name, model, dtype, options, found, seed)
            return
    raise SystemExit(f"{name}: no seed gives a varied continuation with clear margins")


def write(name, model, dtype, options, found, seed):
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    expected, tensors = [], {}
    for case, (prompt, tokens, margin, max_model_len) in enumerate(found):
        ids = prompt + tokens[:-1]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        predicted = logits[len(prompt) - 1:].argmax(-1).tolist()
        assert predicted == tokens, f"{name}: cached and uncached greedy differ"
        positions = sorted({0, 1, len(prompt) - 1, len(ids) - 1, *range(4, len(ids), 9)})
        tensors[f"logits.{case}"] = logits[positions].contiguous()
        expected.append(dict(prompt=prompt, greedy=tokens, positions=positions, max_model_len=max_model_len,
                             smallest_margin=round(margin, 5)))
    model.to(dtype).save_pretrained(folder, max_shard_size=options.get("shard", "5GB"))
    rewrite_config(folder / "config.json", dtype, options)
    if options.get("stacked"):
        stack_experts(folder / "model.safetensors")
    save_file(tensors, folder / "expected.safetensors")
    note = dict(made_by="tools/make_fixtures.py", seed=seed, cases=expected)
    (folder / "expected.json").write_text(json.dumps(note) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, margins {[case['smallest_margin'] for case in expected]}, {size // 1024} KiB")


def stack_experts(path):
    """Of each layer, `experts.gate_up_proj` [experts, 2 * inner, hidden], gates first, and `experts.down_proj`."""
    tensors = load_file(path)
    for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{layer}.experts.") and name.endswith("up_proj.weight") for name in tensors)
        take = lambda part: torch.stack([tensors.pop(f"{layer}.experts.{e}.{part}.weight") for e in range(count)])
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([take("gate_proj"), take("up_proj")], 1).contiguous()
        tensors[f"{layer}.experts.down_proj"] = take("down_proj").contiguous()
    save_file(tensors, path, metadata=dict(format="pt"))


def rewrite_config(path, dtype, options):
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("transformers_version", None)
    if options.get("nested"):
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope["full_attention"]["rope_theta"]
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        text["rope_scaling"] = dict(rope_type="linear", factor=rope["full_attention"]["factor"])
        text["sliding_window_pattern"] = text.pop("_sliding_window_pattern", 2)
        # What the first checkpoints leave to the family's defaults.
        for field in ["layer_types", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"]:
            text.pop(field, None)
    if options.get("old"):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        partial = rope.pop("partial_rotary_factor", None)
        if partial is not None:
            config["partial_rotary_factor"] = partial
        kind = rope.get("rope_type", "default")
        # Linear scaling predates the name "rope_type".
        if kind == "linear":
            rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
    config["model_type"] = options.get("model_type", config["model_type"])
    for field, before in options.get("rename", {}).items():
        config[before] = config.pop(field)
    for field in options.get("drop", []):
        config.pop(field, None)
    config.update(options.get("extra", {}))
    path.write_text(json.dumps(config, indent=2) + "\n")


def add_hidden(folder):
    """Adds `hidden.N` [2, hidden] to what is expected: of each prompt's hidden states after the final norm the last, and
    their mean, both of length one. The weights are those that are stored, computed in float32."""
    path = folder / "expected.safetensors"
    expected = json.loads((folder / "expected.json").read_text())
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("hidden.")}
    config = json.loads((folder / "config.json").read_text())
    nested, dtype = "text_config" in config, getattr(torch, config.get("dtype") or config["torch_dtype"])
    kind, settings = AutoModelForCausalLM, {}
    if nested:
        kind = getattr(transformers, config["architectures"][0])
    if config["model_type"] == "kimi_k2":
        # transformers knows it by the name of its class only.
        kind = DeepseekV3ForCausalLM
        settings["config"] = DeepseekV3Config.from_dict({**config, "model_type": "deepseek_v3"})
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **settings).eval()
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "embed_scale"):
                module.embed_scale.copy_(module.embed_scale.to(dtype).to(torch.float32))
    for case, entry in enumerate(expected["cases"]):
        with torch.no_grad():
            # Llama 4 has a whole model of its text.
            whole = nested and not hasattr(model, "model")
            inner = model.language_model.model if whole else model.model.language_model if nested else model.model
            rows = inner(torch.tensor([entry["prompt"]]), use_cache=False).last_hidden_state[0].to(torch.float64)
        pooled = torch.stack([rows[-1], rows.mean(0)])
        tensors[f"hidden.{case}"] = torch.nn.functional.normalize(pooled, dim=-1).to(torch.float32).contiguous()
    save_file(tensors, path)
    print(f"{folder.name}: {[tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith('hidden.')]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Llama 4 without an image looks for it (transformers 5.24).
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    if sys.argv[1:2] == ["--hidden"]:
        for name in sys.argv[2:] or sorted(folder.name for folder in ROOT.iterdir()):
            add_hidden(ROOT / name)
        sys.exit()
    for family in sys.argv[1:] or FAMILIES:
        make(family)
