//! The table of model families: what each one does differently from the one decoder.
//!
//! Owns: defaults that a config.json may leave out (they are transformers' own), which projections carry a bias, what is
//! fused in the file. Must never: compute anything, or grow a copy of the forward pass. A new family of this kind is a
//! new row.

/// Where the number of key/value heads comes from when config.json does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvHeadsDefault {
    /// As many as query heads: no grouping.
    SameAsQuery,
    Fixed(usize),
}

/// Whether a projection has a bias vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    Never,
    Always,
    /// As the named boolean of config.json says; false when absent.
    Config(&'static str),
}

/// Where a layer has norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the feed-forward part.
    Before,
    /// Of what either adds to the residual stream, too.
    Around,
    /// Of what either adds only.
    After,
}

/// Which layers rotate q and k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotated {
    All,
    /// As `no_rope_layers` and `no_rope_layer_interval` say.
    Listed,
    /// Those with a window; all, where none has one.
    Windowed,
}

/// How the dimensions of a head are rotated in pairs by the tensors as they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// `i` with `i + half`.
    Halves,
    /// `2 * i` with `2 * i + 1`: rows of q and k are put in the other order when they are read, which changes no product of q and k.
    Neighbours,
}

/// When the attention of some layers is limited to a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// The family has none.
    Never,
    /// `sliding_window`, unless null; the default when the field is absent.
    Field { absent: Option<usize> },
    /// `sliding_window`, but only when `use_sliding_window` is true.
    Switched,
    /// Likewise, and then on all layers, whatever `max_window_layers` says.
    SwitchedForAll,
    /// `sliding_window`, unless null, on all layers but every `every`-th (or every `sliding_window_pattern`-th).
    Pattern { absent: usize, every: usize },
}

/// What the feed-forward part does with a gate and the value it gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `hidden_act` must be silu.
    Silu,
    /// `hidden_activation` must be gelu_pytorch_tanh.
    GeluTanh,
    /// gpt-oss: clamped to `swiglu_limit`.
    Clamped,
}

/// What a family calls its mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Default of `num_local_experts`, also called `num_experts` or `n_routed_experts`.
    pub count: usize,
    /// Default of `num_experts_per_tok`.
    pub chosen: usize,
    /// The field with the width of an expert.
    pub inner: &'static str,
    /// The boolean that says that the weights of the chosen add up to one, and its default; `None`: they always do.
    pub normalized: Option<(&'static str, bool)>,
    /// The linear layer whose outputs are the experts' logits.
    pub router: &'static str,
    pub stored: ExpertTensors,
    pub choice: Choice,
    /// Default of `routed_scaling_factor`, which multiplies the weights of the chosen; `None`: there is no such factor.
    pub scale: Option<f64>,
    pub shared: Shared,
    /// Default of `first_k_dense_replace`, the number of layers before the first that has experts; `None`: every layer has.
    pub dense: Option<usize>,
}

/// What experts are chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Logits,
    /// Likewise, and where `topk_method` says so only those in the groups with the largest.
    GroupedLogits,
    /// Sigmoids of logits and a bias, in the groups whose two largest add up to most. Defaults of `n_group` and `topk_group`.
    BiasedSigmoids {
        groups: usize,
        kept: usize,
    },
}

/// The expert that speaks for every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    Never,
    /// As strongly as a gate of its own says. The field with its width.
    Gated(&'static str),
    /// As wide as so many others: the default of `n_shared_experts`.
    Counted {
        absent: usize,
    },
}

/// How the experts of a layer lie in safetensors files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertTensors {
    /// All in one tensor (`checkpoint/experts`).
    Stacked,
    /// As linear layers of their own.
    Each,
    /// All in one tensor, of each its gates and then what they gate.
    Halves,
}

/// How the projections of a gated delta net lie in safetensors files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaTensors {
    /// `in_proj_qkvz` and `in_proj_ba`, the rows of each key head together (`checkpoint/picked`).
    ByKeyHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.
    Each,
}

/// Defaults of `attn_logit_softcapping` and `final_logit_softcapping`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Softcaps {
    pub attention: Option<f64>,
    pub logits: Option<f64>,
}

/// How the weights of one layer lie in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// q_proj, k_proj, v_proj; gate_proj, up_proj.
    Split,
    /// qkv_proj; gate_up_proj.
    Fused,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// The class named in `architectures`, used when `model_type` is absent.
    pub architecture: &'static str,
    /// Checkpoints known under this family, for people.
    pub models: &'static str,
    /// What is special, for the table of supported models.
    pub notes: &'static str,
    pub fusion: Fusion,
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub mlp_bias: Bias,
    /// Per-head RMS norm of q and k before the rotation.
    pub qk_norm: bool,
    /// What a query head attends to is multiplied by the sigmoid of a gate, whose rows follow the head's in q_proj.
    pub output_gate: bool,
    /// Every layer has latent attention, which rotates neighbouring dimensions unless `rope_interleave` is false.
    pub latent: bool,
    /// Layers that `layer_types` calls `linear_attention`, or all but every `full_attention_interval`-th, have a gated delta net in
    /// attention's place.
    pub delta: Option<DeltaTensors>,
    pub window: Window,
    /// A logit per query head that attends to nothing.
    pub sinks: bool,
    pub gate: Gate,
    /// Instead of one feed-forward part in every layer.
    pub mixture: Option<Mixture>,
    /// The object of config.json that describes the decoder, in a family with other parts (which are not served), and the `model_type` it
    /// may state.
    pub nested: Option<(&'static str, &'static str)>,
    /// Norm weights are stored as what is added to one.
    pub norm_plus_one: bool,
    pub norms: Norms,
    /// Embeddings are multiplied by the root of their width.
    pub scaled_embedding: bool,
    /// `embedding_multiplier`, `residual_multiplier`, `attention_multiplier` and `logits_scaling` are honoured; 1 when absent.
    pub multipliers: bool,
    /// Queries are scaled by the root of `query_pre_attn_scalar` (this is its default) and not of head_dim.
    pub query_scalar: Option<f64>,
    pub softcaps: Option<Softcaps>,
    /// Layers with a window have a rotary embedding of their own, of this base by default.
    pub local_rope_theta: Option<f64>,
    pub rotated: Rotated,
    pub pairs: Pairs,
    /// Parts of the names of tensors, as stored and as the decoder calls them.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Default of `num_attention_heads` and `vocab_size`; `None`: they must be there.
    pub heads: Option<usize>,
    pub vocab: Option<usize>,
    pub kv_heads: KvHeadsDefault,
    /// `None`: hidden_size / num_attention_heads.
    pub head_dim: Option<usize>,
    pub tied: bool,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    /// Share of a head's dimensions that is rotated.
    pub partial_rotary: f64,
    /// config.json must say how the rotary embedding is scaled: what is assumed otherwise is not the plain one.
    pub rope_stated: bool,
    pub max_position: usize,
}

const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    models: "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; TinyLlama; and others that kept the architecture",
    notes: "llama3, linear and YaRN rope scaling, tied embeddings, optional biases",
    fusion: Fusion::Split,
    qkv_bias: Bias::Config("attention_bias"),
    o_bias: Bias::Config("attention_bias"),
    mlp_bias: Bias::Config("mlp_bias"),
    qk_norm: false,
    output_gate: false,
    latent: false,
    delta: None,
    window: Window::Never,
    sinks: false,
    gate: Gate::Silu,
    mixture: None,
    nested: None,
    norm_plus_one: false,
    norms: Norms::Before,
    scaled_embedding: false,
    multipliers: false,
    query_scalar: None,
    softcaps: None,
    local_rope_theta: None,
    rotated: Rotated::All,
    pairs: Pairs::Halves,
    renamed: &[],
    heads: None,
    vocab: None,
    kv_heads: KvHeadsDefault::SameAsQuery,
    head_dim: None,
    tied: false,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    partial_rotary: 1.0,
    rope_stated: false,
    max_position: 2048,
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
    qk_norm: true,
    window: Window::Pattern { absent: 4096, every: 6 },
    softcaps: Some(Softcaps { attention: None, logits: None }),
    local_rope_theta: Some(10_000.0),
    vocab: Some(262_208),
    rope_theta: 1_000_000.0,
    max_position: 131_072,
    ..GEMMA2
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
    qk_norm: true,
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
    choice: Choice::Logits,
    scale: None,
    shared: Shared::Never,
    dense: None,
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

const DEEPSEEK_EXPERTS: Mixture = Mixture {
    count: 256,
    chosen: 8,
    inner: "moe_intermediate_size",
    normalized: Some(("norm_topk_prob", true)),
    router: "mlp.gate",
    stored: ExpertTensors::Each,
    choice: Choice::BiasedSigmoids { groups: 8, kept: 4 },
    scale: Some(2.5),
    shared: Shared::Counted { absent: 1 },
    dense: Some(3),
};

/// Every family Folio serves.
pub const FAMILIES: &[Family] = &[
    LLAMA,
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
        qk_norm: true,
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
        qk_norm: true,
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
            shared: Shared::Counted { absent: 2 },
            dense: Some(0),
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
            dense: Some(1),
            ..DEEPSEEK_EXPERTS
        }),
        rms_norm_eps: 1e-5,
        max_position: 202_752,
        ..DEEPSEEK
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
    Family {
        model_type: "granite",
        architecture: "GraniteForCausalLM",
        models: "Granite 3.0, 3.1, 3.2, 3.3",
        notes: "factors on embeddings, residuals, attention and logits",
        multipliers: true,
        ..LLAMA
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
        qk_norm: true,
        norms: Norms::After,
        window: Window::Pattern { absent: 4096, every: 4 },
        rotated: Rotated::Windowed,
        rms_norm_eps: 1e-5,
        ..LLAMA
    },
    Family {
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

/// The table, for documentation and error messages.
pub fn supported_families() -> &'static [Family] {
    FAMILIES
}

/// `llama (Llama 2, ...), mistral (...)`: the tail of "not supported" sentences.
pub fn supported_list() -> String {
    FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ")
}

/// The table in Markdown, as it stands in the documentation.
pub fn supported_table() -> String {
    let mut table = String::from("| `model_type` | models | notes |\n|---|---|---|\n");
    for family in FAMILIES {
        table += &format!("| `{}` | {} | {} |\n", family.model_type, family.models, family.notes);
    }
    table
}
