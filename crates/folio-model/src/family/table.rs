//! The rows.

use super::{
    Bias, Choice, DeltaTensors, ExpertTensors, Family, Fusion, Gate, KvHeadsDefault, LocalRope, MambaFields,
    Mixture, Norms, Pairs, QkNorm, Rotated, Shared, Softcaps, Window,
};

const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    models: "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; TinyLlama; and others that kept the architecture",
    notes: "llama3, linear and YaRN rope scaling, tied embeddings, optional biases",
    fusion: Fusion::Split,
    qkv_bias: Bias::Config("attention_bias"),
    o_bias: Bias::Config("attention_bias"),
    mlp_bias: Bias::Config("mlp_bias"),
    qk_norm: QkNorm::Never,
    value_norm: false,
    full_heads: false,
    shares_kv: false,
    layer_inputs: false,
    layer_scale: false,
    output_gate: false,
    latent: false,
    delta: None,
    short_conv: false,
    mamba: None,
    single: false,
    window: Window::Never,
    sinks: false,
    tempered: false,
    gate: Gate::Silu,
    mixture: None,
    nested: None,
    norm_plus_one: false,
    norms: Norms::Before,
    centered: false,
    eps_field: "rms_norm_eps",
    scaled_embedding: false,
    multipliers: false,
    logit_scale: None,
    query_scalar: None,
    attention_scale: None,
    softcaps: None,
    local_rope: None,
    rotated: Rotated::All,
    pairs: Pairs::Halves,
    adjusted_width: false,
    renamed: &[],
    heads: None,
    vocab: None,
    kv_heads: KvHeadsDefault::SameAsQuery,
    head_dim: None,
    tied: false,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    partial_rotary: 1.0,
    rotary_dim: None,
    rope_stated: false,
    max_position: 2048,
};

/// The text part of Llama 4.
const LLAMA4: Family = Family {
    model_type: "llama4_text",
    architecture: "Llama4ForCausalLM",
    models: "Llama 4 (text)",
    notes: "attention in chunks on layers that rotate, in full on every fourth, which does not; a mixture of experts in every layer or every other; on the CPU",
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Unweighted("use_qk_norm"),
    window: Window::Chunked { absent: 8192 },
    tempered: true,
    mixture: Some(Mixture {
        count: 16,
        chosen: 1,
        router: "mlp.router",
        stored: ExpertTensors::TurnedHalves,
        choice: Choice::Top,
        shared: Shared::Width("intermediate_size"),
        dense_inner: "intermediate_size_mlp",
        interleaved: true,
        ..PLAIN_EXPERTS
    }),
    rotated: Rotated::Listed,
    pairs: Pairs::Neighbours,
    renamed: &[(".feed_forward.shared_expert.", ".mlp.shared_experts."), (".feed_forward.", ".mlp.")],
    kv_heads: KvHeadsDefault::Fixed(8),
    head_dim: Some(128),
    rms_norm_eps: 1e-5,
    rope_theta: 500_000.0,
    max_position: 131_072,
    ..LLAMA
};

const MISTRAL: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    models: "Mistral 7B, Mistral Nemo, Mistral Small (text)",
    notes: "sliding window",
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: Window::Field { absent: Some(4096) },
    kv_heads: KvHeadsDefault::Fixed(8),
    max_position: 4096 * 32,
    ..LLAMA
};

const GEMMA2: Family = Family {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    models: "Gemma 2",
    notes: "a sliding window on every other layer, soft caps on attention and logits, four norms a layer",
    mlp_bias: Bias::Never,
    window: Window::Pattern { absent: 4096, every: 2 },
    gate: Gate::GeluTanh,
    norm_plus_one: true,
    norms: Norms::Around,
    scaled_embedding: true,
    query_scalar: Some(256.0),
    softcaps: Some(Softcaps { attention: Some(50.0), logits: Some(30.0) }),
    heads: Some(8),
    vocab: Some(256_000),
    kv_heads: KvHeadsDefault::Fixed(4),
    head_dim: Some(256),
    tied: true,
    max_position: 8192,
    ..LLAMA
};

const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    models: "Gemma 3 (text)",
    notes: "a sliding window on five of six layers with a rotation of their own, norm of q and k, four norms a layer",
    qk_norm: QkNorm::Heads,
    window: Window::Pattern { absent: 4096, every: 6 },
    softcaps: Some(Softcaps { attention: None, logits: None }),
    local_rope: Some(LocalRope::Own(10_000.0)),
    vocab: Some(262_208),
    rope_theta: 1_000_000.0,
    max_position: 131_072,
    ..GEMMA2
};

/// The text part of Gemma 4.
const GEMMA4: Family = Family {
    model_type: "gemma4_text",
    architecture: "Gemma4ForCausalLM",
    models: "Gemma 4 (text)",
    notes: "a sliding window on most layers, heads of another size on the others, a quarter of which is rotated; norm of q, k and v; in small ones, layers that read the K and V of others and are given values of each token; in one, a mixture of experts beside the feed-forward part; on the CPU",
    qkv_bias: Bias::Config("attention_bias"),
    o_bias: Bias::Config("attention_bias"),
    value_norm: true,
    full_heads: true,
    shares_kv: true,
    layer_inputs: true,
    layer_scale: true,
    window: Window::Pattern { absent: 512, every: 6 },
    mixture: Some(Mixture {
        inner: "moe_intermediate_size",
        router: "router.proj",
        stored: ExpertTensors::Halves,
        switch: Some("enable_moe_block"),
        shared: Shared::Beside("intermediate_size"),
        ..PLAIN_EXPERTS
    }),
    norm_plus_one: false,
    query_scalar: None,
    attention_scale: Some(1.0),
    renamed: &[(".experts.", ".mlp.experts.")],
    vocab: Some(262_144),
    rope_stated: true,
    ..GEMMA3
};

/// What the hybrids of Qwen have in common.
const QWEN_HYBRID: Family = Family {
    model_type: "qwen3_5_text",
    architecture: "Qwen3_5ForCausalLM",
    models: "Qwen3.5, Qwen3.6 (dense, text)",
    notes: "three of four layers are gated delta nets, the others gated attention; on the CPU",
    delta: Some(DeltaTensors::Each),
    mlp_bias: Bias::Never,
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    qk_norm: QkNorm::Heads,
    output_gate: true,
    norm_plus_one: true,
    kv_heads: KvHeadsDefault::Fixed(2),
    head_dim: Some(256),
    partial_rotary: 0.25,
    max_position: 32_768,
    ..LLAMA
};

/// Experts in every layer, chosen by their logits, and no other.
const PLAIN_EXPERTS: Mixture = Mixture {
    count: 8,
    chosen: 2,
    inner: "intermediate_size",
    normalized: None,
    router: "mlp.gate",
    stored: ExpertTensors::Each,
    optional: false,
    switch: None,
    choice: Choice::Logits,
    scale: None,
    sum_eps: 0.0,
    shared: Shared::Never,
    latent: None,
    dense: None,
    dense_inner: "intermediate_size",
    interleaved: false,
};

const QWEN_HYBRID_EXPERTS: Mixture = Mixture {
    count: 256,
    chosen: 8,
    inner: "moe_intermediate_size",
    stored: ExpertTensors::Halves,
    shared: Shared::Gated("shared_expert_intermediate_size"),
    ..PLAIN_EXPERTS
};

/// What the families of DeepSeek's third version have in common.
const DEEPSEEK: Family = Family {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    models: "DeepSeek-V3, V3.1, R1",
    notes: "latent attention, a mixture of experts in groups behind the first layers and one that speaks for every token; on the CPU",
    qkv_bias: Bias::Config("attention_bias"),
    o_bias: Bias::Config("attention_bias"),
    mlp_bias: Bias::Never,
    latent: true,
    mixture: Some(DEEPSEEK_EXPERTS),
    max_position: 4096,
    ..LLAMA
};

/// What DeepSeek calls the number of layers without experts.
const FIRST_K_DENSE: &str = "first_k_dense_replace";

const DEEPSEEK_EXPERTS: Mixture = Mixture {
    count: 256,
    chosen: 8,
    inner: "moe_intermediate_size",
    normalized: Some(("norm_topk_prob", true)),
    router: "mlp.gate",
    stored: ExpertTensors::Each,
    optional: false,
    switch: None,
    choice: Choice::BiasedSigmoids { groups: 8, kept: 4 },
    scale: Some(2.5),
    sum_eps: 1e-20,
    shared: Shared::Counted { field: "n_shared_experts", absent: 1 },
    latent: None,
    dense: Some((FIRST_K_DENSE, 3)),
    dense_inner: "intermediate_size",
    interleaved: false,
};

/// Dense ERNIE 4.5.
const ERNIE: Family = Family {
    model_type: "ernie4_5",
    architecture: "Ernie4_5ForCausalLM",
    models: "ERNIE 4.5 0.3B",
    notes: "rotates neighbouring dimensions",
    qkv_bias: Bias::Config("use_bias"),
    o_bias: Bias::Config("use_bias"),
    mlp_bias: Bias::Config("use_bias"),
    pairs: Pairs::Neighbours,
    kv_heads: KvHeadsDefault::Fixed(2),
    head_dim: Some(128),
    tied: true,
    rms_norm_eps: 1e-5,
    rope_theta: 500_000.0,
    max_position: 131_072,
    ..LLAMA
};

const GRANITE: Family = Family {
    model_type: "granite",
    architecture: "GraniteForCausalLM",
    models: "Granite 3.0, 3.1, 3.2, 3.3",
    notes: "factors on embeddings, residuals, attention and logits",
    multipliers: true,
    ..LLAMA
};

const GRANITE_EXPERTS: Mixture = Mixture { stored: ExpertTensors::Halves, ..PLAIN_EXPERTS };

const GRANITE_EXPERTS_NAMES: &[(&str, &str)] = &[
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.experts.", ".mlp.experts."),
    (".shared_mlp.input_linear.", ".mlp.shared_experts.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.shared_experts.down_proj."),
];

const OLMO2: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    models: "OLMo 2 1B, 7B, 13B, 32B",
    notes: "norms behind both parts of a layer and none before, norm of all of q and of all of k; on the CPU",
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Rows,
    norms: Norms::After,
    rms_norm_eps: 1e-5,
    ..LLAMA
};

const HUNYUAN: Family = Family {
    model_type: "hunyuan_v1_dense",
    architecture: "HunYuanDenseV1ForCausalLM",
    models: "Hunyuan 0.5B, 1.8B, 4B, 7B; Hunyuan-MT",
    notes: "norm of q and k behind the rotation, whose base is stretched; on the CPU",
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Rotated,
    renamed: &[
        (".query_layernorm.", ".q_norm."),
        (".key_layernorm.", ".k_norm."),
        (".mlp.gate.wg.", ".mlp.gate."),
        (".mlp.shared_mlp.", ".mlp.shared_experts."),
    ],
    rms_norm_eps: 1e-5,
    ..LLAMA
};

const LFM2: Family = Family {
    model_type: "lfm2",
    architecture: "Lfm2ForCausalLM",
    models: "LFM2 350M, 700M, 1.2B, 2.6B",
    notes: "most layers are short convolutions, the others attention with norm of q and k; on the CPU",
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Heads,
    short_conv: true,
    eps_field: "norm_eps",
    adjusted_width: true,
    renamed: &[
        (".operator_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        ("model.embedding_norm.", "model.norm."),
        (".self_attn.out_proj.", ".self_attn.o_proj."),
        (".self_attn.q_layernorm.", ".self_attn.q_norm."),
        (".self_attn.k_layernorm.", ".self_attn.k_norm."),
        (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".feed_forward.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
    ],
    kv_heads: KvHeadsDefault::Fixed(8),
    tied: true,
    rms_norm_eps: 1e-5,
    rope_theta: 1_000_000.0,
    max_position: 128_000,
    ..LLAMA
};

/// Every family Folio serves.
pub const FAMILIES: &[Family] = &[
    LLAMA,
    LLAMA4,
    Family {
        model_type: "llama4",
        architecture: "Llama4ForConditionalGeneration",
        models: "Llama 4 Scout, Maverick",
        notes: "the text part; images are not served",
        nested: Some(("text_config", "llama4_text")),
        ..LLAMA4
    },
    MISTRAL,
    Family {
        model_type: "mistral3",
        architecture: "Mistral3ForConditionalGeneration",
        models: "Mistral Small 3.1, 3.2; Devstral, Magistral",
        notes: "the text part; images are not served",
        nested: Some(("text_config", "mistral")),
        ..MISTRAL
    },
    Family {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        models: "Mixtral 8x7B, 8x22B",
        notes: "a mixture of experts in every layer",
        window: Window::Field { absent: None },
        mixture: Some(PLAIN_EXPERTS),
        renamed: &[
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w3.", ".up_proj."),
            (".w2.", ".down_proj."),
        ],
        rms_norm_eps: 1e-5,
        rope_theta: 1_000_000.0,
        ..MISTRAL
    },
    Family {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        models: "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
        notes: "bias on q, k and v; sliding window where `use_sliding_window` says so",
        qkv_bias: Bias::Always,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: Window::Switched,
        kv_heads: KvHeadsDefault::Fixed(32),
        max_position: 32_768,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        models: "Qwen3 (dense)",
        notes: "RMS norm of every q and k head before the rotation",
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Heads,
        window: Window::Switched,
        kv_heads: KvHeadsDefault::Fixed(32),
        head_dim: Some(128),
        max_position: 32_768,
        ..LLAMA
    },
    Family {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        models: "Qwen3 (mixture of experts: 30B-A3B, 235B-A22B, Coder)",
        notes: "as qwen3, with a mixture of experts in every layer",
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Heads,
        window: Window::SwitchedForAll,
        mixture: Some(Mixture {
            count: 128,
            chosen: 8,
            inner: "moe_intermediate_size",
            normalized: Some(("norm_topk_prob", false)),
            ..PLAIN_EXPERTS
        }),
        kv_heads: KvHeadsDefault::Fixed(4),
        max_position: 32_768,
        ..LLAMA
    },
    Family {
        model_type: "qwen3_next",
        architecture: "Qwen3NextForCausalLM",
        models: "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
        notes: "as qwen3_5, with a mixture of experts and one that speaks for every token",
        delta: Some(DeltaTensors::ByKeyHead),
        mixture: Some(Mixture {
            count: 512,
            chosen: 10,
            normalized: Some(("norm_topk_prob", true)),
            stored: ExpertTensors::Each,
            ..QWEN_HYBRID_EXPERTS
        }),
        ..QWEN_HYBRID
    },
    QWEN_HYBRID,
    Family {
        model_type: "qwen3_5",
        architecture: "Qwen3_5ForConditionalGeneration",
        models: "Qwen3.5, Qwen3.6 (dense: 0.8B to 27B)",
        notes: "the text part; images are not served",
        nested: Some(("text_config", "qwen3_5_text")),
        ..QWEN_HYBRID
    },
    Family {
        model_type: "qwen3_5_moe_text",
        architecture: "Qwen3_5MoeForCausalLM",
        models: "Qwen3.5, Qwen3.6 (mixture of experts, text)",
        notes: "as qwen3_5, with a mixture of experts and one that speaks for every token",
        mixture: Some(QWEN_HYBRID_EXPERTS),
        ..QWEN_HYBRID
    },
    Family {
        model_type: "qwen3_5_moe",
        architecture: "Qwen3_5MoeForConditionalGeneration",
        models: "Qwen3.5, Qwen3.6 (mixture of experts: 35B-A3B to 397B-A17B)",
        notes: "likewise the text part; images are not served",
        nested: Some(("text_config", "qwen3_5_moe_text")),
        mixture: Some(QWEN_HYBRID_EXPERTS),
        ..QWEN_HYBRID
    },
    Family {
        model_type: "deepseek_v2",
        architecture: "DeepseekV2ForCausalLM",
        models: "DeepSeek-V2, V2-Lite, V2.5, Coder-V2",
        notes: "as deepseek_v3, with experts chosen by their logits",
        mixture: Some(Mixture {
            count: 64,
            normalized: Some(("norm_topk_prob", false)),
            choice: Choice::GroupedLogits,
            scale: Some(1.0),
            shared: Shared::Counted { field: "n_shared_experts", absent: 2 },
            dense: Some((FIRST_K_DENSE, 0)),
            ..DEEPSEEK_EXPERTS
        }),
        max_position: 2048,
        ..DEEPSEEK
    },
    DEEPSEEK,
    Family {
        model_type: "kimi_k2",
        models: "Kimi K2 (Instruct, Thinking)",
        notes: "as deepseek_v3",
        ..DEEPSEEK
    },
    Family {
        model_type: "glm4_moe_lite",
        architecture: "Glm4MoeLiteForCausalLM",
        models: "GLM-4.7-Flash",
        notes: "as deepseek_v3",
        mixture: Some(Mixture {
            count: 64,
            chosen: 4,
            choice: Choice::BiasedSigmoids { groups: 1, kept: 1 },
            scale: Some(1.8),
            dense: Some((FIRST_K_DENSE, 1)),
            ..DEEPSEEK_EXPERTS
        }),
        rms_norm_eps: 1e-5,
        max_position: 202_752,
        ..DEEPSEEK
    },
    Family {
        model_type: "glm4_moe",
        architecture: "Glm4MoeForCausalLM",
        models: "GLM-4.5, GLM-4.5-Air, GLM-4.6",
        notes: "half of a head is rotated; a mixture of experts behind the first layers and one that speaks for every token; on the CPU",
        qkv_bias: Bias::Config("attention_bias"),
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Stated("use_qk_norm"),
        mixture: Some(Mixture {
            count: 128,
            choice: Choice::BiasedSigmoids { groups: 1, kept: 1 },
            scale: Some(1.0),
            dense: Some((FIRST_K_DENSE, 1)),
            ..DEEPSEEK_EXPERTS
        }),
        kv_heads: KvHeadsDefault::Fixed(8),
        rms_norm_eps: 1e-5,
        partial_rotary: 0.5,
        max_position: 131_072,
        ..LLAMA
    },
    OLMO2,
    Family {
        model_type: "olmo3",
        architecture: "Olmo3ForCausalLM",
        models: "OLMo 3 7B, 32B",
        notes: "as olmo2, with a sliding window on three of four layers, whose rotation is not scaled; on the CPU",
        window: Window::Pattern { absent: 4096, every: 4 },
        local_rope: Some(LocalRope::Unscaled),
        rope_theta: 500_000.0,
        ..OLMO2
    },
    Family {
        model_type: "minimax_m2",
        architecture: "MiniMaxM2ForCausalLM",
        models: "MiniMax-M2, M2.1",
        notes: "norm of all of q and of all of k, partial rotation, a mixture of experts in every layer; on the CPU",
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Rows,
        mixture: Some(Mixture {
            count: 256,
            chosen: 8,
            choice: Choice::BiasedSigmoids { groups: 1, kept: 1 },
            ..PLAIN_EXPERTS
        }),
        renamed: &[
            (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w3.", ".up_proj."),
            (".w2.", ".down_proj."),
        ],
        kv_heads: KvHeadsDefault::Fixed(8),
        head_dim: Some(128),
        rope_theta: 5_000_000.0,
        rotary_dim: Some("rotary_dim"),
        max_position: 196_608,
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        models: "SmolLM3",
        notes: "no rotation on every fourth layer",
        window: Window::Switched,
        rotated: Rotated::Listed,
        kv_heads: KvHeadsDefault::Fixed(4),
        tied: true,
        rope_theta: 2_000_000.0,
        max_position: 32_768,
        ..LLAMA
    },
    Family {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        models: "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        notes: "fused projections, partial rotation, sliding window; LongRoPE factors are fixed for a server by its max_model_len",
        fusion: Fusion::Fused,
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        window: Window::Field { absent: None },
        rms_norm_eps: 1e-5,
        max_position: 4096,
        ..LLAMA
    },
    GRANITE,
    Family {
        model_type: "granitemoe",
        architecture: "GraniteMoeForCausalLM",
        models: "Granite 3.0, 3.1 (mixture of experts: 1B-A400M, 3B-A800M)",
        notes: "as granite, with a mixture of experts in every layer",
        mlp_bias: Bias::Never,
        mixture: Some(GRANITE_EXPERTS),
        renamed: GRANITE_EXPERTS_NAMES,
        ..GRANITE
    },
    Family {
        model_type: "granitemoeshared",
        architecture: "GraniteMoeSharedForCausalLM",
        models: "Granite with a mixture of experts and one that speaks for every token",
        notes: "as granitemoe",
        mlp_bias: Bias::Never,
        mixture: Some(Mixture { shared: Shared::Halves("shared_intermediate_size"), ..GRANITE_EXPERTS }),
        renamed: GRANITE_EXPERTS_NAMES,
        ..GRANITE
    },
    Family {
        model_type: "granitemoehybrid",
        architecture: "GraniteMoeHybridForCausalLM",
        models: "Granite 4.0 (H-Small, H-Tiny, H-Micro, H-1B, H-350M; Micro, 1B, 350M)",
        notes: "as granite; in those called H most layers are Mamba-2, the others attention without a rotation; on the CPU",
        mlp_bias: Bias::Never,
        mamba: Some(MambaFields {
            heads: ("mamba_n_heads", 128),
            head_dim: ("mamba_d_head", None),
            groups: ("mamba_n_groups", 1),
            state_dim: ("mamba_d_state", 256),
            taps: ("mamba_d_conv", 4),
            bias: "mamba_conv_bias",
            fixed: &[("mamba_proj_bias", false), ("mamba_rms_norm", true), ("mamba_norm_before_gate", false)],
            decay_as_is: false,
        }),
        mixture: Some(Mixture {
            shared: Shared::Halves("shared_intermediate_size"),
            optional: true,
            ..GRANITE_EXPERTS
        }),
        rotated: Rotated::Stated,
        renamed: &[
            (".mamba.norm.", ".mamba.gated_norm."),
            (".block_sparse_moe.router.layer.", ".mlp.gate."),
            (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
            (".block_sparse_moe.experts.", ".mlp.experts."),
            (".shared_mlp.input_linear.", ".mlp.shared_experts.gate_up_proj."),
            (".shared_mlp.output_linear.", ".mlp.shared_experts.down_proj."),
        ],
        ..GRANITE
    },
    Family {
        model_type: "nemotron_h",
        architecture: "NemotronHForCausalLM",
        models: "Nemotron 3 (Nano, Super), Nemotron Nano 2, Nemotron-H",
        notes: "every layer is Mamba-2, attention without a rotation, a feed-forward part or a mixture of experts; squared ReLU instead of a gate; on the CPU",
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        mamba: Some(MambaFields {
            heads: ("mamba_num_heads", 128),
            head_dim: ("mamba_head_dim", Some(64)),
            groups: ("n_groups", 8),
            state_dim: ("ssm_state_size", 128),
            taps: ("conv_kernel", 4),
            bias: "use_conv_bias",
            fixed: &[("use_bias", false), ("mamba_proj_bias", false)],
            decay_as_is: false,
        }),
        single: true,
        gate: Gate::ReluSquared,
        mixture: Some(Mixture {
            inner: "moe_intermediate_size",
            normalized: Some(("norm_topk_prob", true)),
            choice: Choice::BiasedSigmoids { groups: 1, kept: 1 },
            scale: Some(1.0),
            sum_eps: 1e-20,
            shared: Shared::Width("moe_shared_expert_intermediate_size"),
            latent: Some("moe_latent_size"),
            ..PLAIN_EXPERTS
        }),
        eps_field: "layer_norm_epsilon",
        rotated: Rotated::Never,
        renamed: &[
            ("backbone.", "model."),
            ("model.embeddings.", "model.embed_tokens."),
            (".mixer.norm.", ".mamba.gated_norm."),
            (".norm.", ".input_layernorm."),
            ("model.norm_f.", "model.norm."),
            (".mixer.q_proj.", ".self_attn.q_proj."),
            (".mixer.k_proj.", ".self_attn.k_proj."),
            (".mixer.v_proj.", ".self_attn.v_proj."),
            (".mixer.o_proj.", ".self_attn.o_proj."),
            (".mixer.up_proj.", ".mlp.up_proj."),
            (".mixer.down_proj.", ".mlp.down_proj."),
            (".mixer.gate.", ".mlp.gate."),
            (".mixer.experts.", ".mlp.experts."),
            (".mixer.shared_experts.", ".mlp.shared_experts."),
            (".mixer.fc1_latent_proj.", ".mlp.fc1_latent_proj."),
            (".mixer.fc2_latent_proj.", ".mlp.fc2_latent_proj."),
            (".mixer.", ".mamba."),
        ],
        kv_heads: KvHeadsDefault::Fixed(8),
        head_dim: Some(128),
        rms_norm_eps: 1e-5,
        max_position: 4096,
        ..LLAMA
    },
    Family {
        model_type: "cohere2",
        architecture: "Cohere2ForCausalLM",
        models: "Command R7B, Command A, Aya (Cohere 2)",
        notes: "a layer norm before both parts of a layer, which read the same; a sliding window on three of four layers, which alone are rotated; on the CPU",
        mlp_bias: Bias::Never,
        window: Window::Pattern { absent: 4096, every: 4 },
        norms: Norms::Once,
        centered: true,
        eps_field: "layer_norm_eps",
        logit_scale: Some(0.0625),
        rotated: Rotated::Windowed,
        pairs: Pairs::Neighbours,
        tied: true,
        rms_norm_eps: 1e-5,
        max_position: 8192,
        ..LLAMA
    },
    Family {
        model_type: "apertus",
        architecture: "ApertusForCausalLM",
        models: "Apertus 8B, 70B",
        notes: "norm of q and k, xIELU instead of a gate; on the CPU",
        o_bias: Bias::Config("attention_bias"),
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Heads,
        gate: Gate::XIelu,
        renamed: &[
            (".attention_layernorm.", ".input_layernorm."),
            (".feedforward_layernorm.", ".post_attention_layernorm."),
        ],
        rms_norm_eps: 1e-5,
        rope_theta: 12_000_000.0,
        rope_stated: true,
        max_position: 65_536,
        ..LLAMA
    },
    HUNYUAN,
    Family {
        model_type: "hunyuan_v1_moe",
        architecture: "HunYuanMoEV1ForCausalLM",
        models: "Hunyuan-A13B",
        notes: "as hunyuan_v1_dense, with a mixture of experts in every layer and one that speaks for every token",
        mixture: Some(Mixture {
            count: 1,
            chosen: 1,
            shared: Shared::Counted { field: "num_shared_expert", absent: 1 },
            ..PLAIN_EXPERTS
        }),
        ..HUNYUAN
    },
    LFM2,
    Family {
        model_type: "lfm2_moe",
        architecture: "Lfm2MoeForCausalLM",
        models: "LFM2-8B-A1B, LFM2-24B-A2B",
        notes: "as lfm2, with a mixture of experts behind the first layers",
        mixture: Some(Mixture {
            count: 32,
            chosen: 4,
            inner: "moe_intermediate_size",
            normalized: Some(("norm_topk_prob", true)),
            choice: Choice::BiasedSigmoids { groups: 1, kept: 1 },
            scale: Some(1.0),
            sum_eps: 1e-6,
            dense: Some(("num_dense_layers", 2)),
            ..PLAIN_EXPERTS
        }),
        adjusted_width: false,
        ..LFM2
    },
    Family {
        model_type: "seed_oss",
        architecture: "SeedOssForCausalLM",
        models: "Seed-OSS 36B",
        notes: "biases on q, k and v, and on what attention gives, each by its own field",
        o_bias: Bias::Config("attention_out_bias"),
        kv_heads: KvHeadsDefault::Fixed(8),
        head_dim: Some(128),
        max_position: 524_288,
        ..LLAMA
    },
    Family {
        model_type: "exaone4",
        architecture: "Exaone4ForCausalLM",
        models: "EXAONE 4.0 1.2B, 32B",
        notes: "norms behind both parts of a layer and none before, norm of q and k; where some layers have a sliding window, only they are rotated",
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Heads,
        norms: Norms::After,
        window: Window::Pattern { absent: 4096, every: 4 },
        rotated: Rotated::Windowed,
        rms_norm_eps: 1e-5,
        ..LLAMA
    },
    ERNIE,
    Family {
        model_type: "ernie4_5_moe",
        architecture: "Ernie4_5_MoeForCausalLM",
        models: "ERNIE 4.5 21B-A3B, 300B-A47B",
        notes: "as ernie4_5, with a mixture of experts behind the first layers and one that speaks for every token; on the CPU",
        mixture: Some(Mixture {
            count: 64,
            chosen: 6,
            inner: "moe_intermediate_size",
            choice: Choice::BiasedShares,
            shared: Shared::Counted { field: "moe_num_shared_experts", absent: 2 },
            dense: Some(("moe_layer_start_index", 1)),
            ..PLAIN_EXPERTS
        }),
        renamed: &[(".mlp.moe_statics.", ".mlp.gate.")],
        kv_heads: KvHeadsDefault::Fixed(4),
        head_dim: None,
        ..ERNIE
    },
    GEMMA2,
    GEMMA3,
    Family {
        model_type: "gemma3",
        architecture: "Gemma3ForConditionalGeneration",
        models: "Gemma 3 (multimodal checkpoints)",
        notes: "the text part; images are not served",
        nested: Some(("text_config", "gemma3_text")),
        ..GEMMA3
    },
    GEMMA4,
    Family {
        model_type: "gemma4",
        architecture: "Gemma4ForConditionalGeneration",
        models: "Gemma 4 E2B, E4B, 31B, 26B-A4B",
        notes: "the text part; images and sounds are not served",
        nested: Some(("text_config", "gemma4_text")),
        ..GEMMA4
    },
    Family {
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        models: "gpt-oss-20b, gpt-oss-120b",
        notes: "mixture of experts in MXFP4 or unquantized, attention sinks, a sliding window on every other layer",
        qkv_bias: Bias::Always,
        o_bias: Bias::Always,
        mlp_bias: Bias::Always,
        window: Window::Pattern { absent: 128, every: 2 },
        sinks: true,
        gate: Gate::Clamped,
        mixture: Some(Mixture {
            count: 128,
            chosen: 4,
            router: "mlp.router",
            stored: ExpertTensors::Stacked,
            ..PLAIN_EXPERTS
        }),
        kv_heads: KvHeadsDefault::Fixed(8),
        head_dim: Some(64),
        rms_norm_eps: 1e-5,
        rope_theta: 150_000.0,
        rope_stated: true,
        max_position: 131_072,
        ..LLAMA
    },
];
