//! The table of model families: what each one does differently from the one decoder.
//!
//! Owns: what a row can say; the rows are in `table`. It has defaults that a config.json may leave out (they are transformers' own), which projections carry a bias, what is
//! fused in the file. Must never: compute anything, or grow a copy of the forward pass. A new family of this kind is a
//! new row.

mod table;

pub use table::FAMILIES;

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
    /// One before both, which read the same.
    Once,
}

/// Which values of q and k are normalized together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    Never,
    /// Those of a head, before the rotation.
    Heads,
    /// Likewise, where the named boolean of config.json says so.
    Stated(&'static str),
    /// Those of a head, behind the rotation.
    Rotated,
    /// Those of all heads, before the rotation.
    Rows,
    /// Those of a head of layers that rotate, behind the rotation and without a weight, where the named boolean of config.json, true when
    /// absent, says so.
    Unweighted(&'static str),
}

/// A rotary embedding that layers with a window have for themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LocalRope {
    /// Of this base by default.
    Own(f64),
    /// Of the base that the others have, and not scaled as theirs.
    Unscaled,
}

/// Which layers rotate q and k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotated {
    All,
    /// As `no_rope_layers` and `no_rope_layer_interval` say.
    Listed,
    /// Those with a window; all, where none has one.
    Windowed,
    /// All, where `position_embedding_type` is rope; none otherwise.
    Stated,
    Never,
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
    /// `attention_chunk_size`, unless null, on layers that rotate: it begins where a run of as many positions does.
    Chunked { absent: usize },
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
    /// There is no gate: `hidden_act` must be xielu.
    XIelu,
    /// There is no gate: `mlp_hidden_act` must be relu2.
    ReluSquared,
}

/// What a family calls its mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Default of `num_local_experts`, which families call otherwise (`config/experts`).
    pub count: usize,
    /// Default of `num_experts_per_tok`, likewise.
    pub chosen: usize,
    /// The field with the width of an expert.
    pub inner: &'static str,
    /// The boolean that says that the weights of the chosen add up to one, and its default; `None`: they always do.
    pub normalized: Option<(&'static str, bool)>,
    /// The linear layer whose outputs are the experts' logits.
    pub router: &'static str,
    pub stored: ExpertTensors,
    /// There may be none of them: layers have the one that speaks for every token alone.
    pub optional: bool,
    /// The boolean that says that there are any, false when absent; `None`: there always are.
    pub switch: Option<&'static str>,
    pub choice: Choice,
    /// Default of `routed_scaling_factor`, which multiplies the weights of the chosen; `None`: there is no such factor.
    pub scale: Option<f64>,
    /// Added to the sum by which the weights of the chosen are divided.
    pub sum_eps: f32,
    pub shared: Shared,
    /// The field with the width of what experts read and write, if it is not that of the residual stream: it is made of that, and what
    /// they add up to is made that wide again.
    pub latent: Option<&'static str>,
    /// The field with the number of layers before the first that has experts, and its default; `None`: every layer has.
    pub dense: Option<(&'static str, usize)>,
    /// The field with the width of layers without.
    pub dense_inner: &'static str,
    /// Those that `moe_layers` lists have experts, or every `interleave_moe_layer_step`-th.
    pub interleaved: bool,
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
    /// Shares of all experts and a bias.
    BiasedShares,
    /// The one of the largest logit, whose sigmoid multiplies what the expert reads.
    Top,
}

/// The expert that speaks for every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    Never,
    /// As strongly as a gate of its own says. The field with its width.
    Gated(&'static str),
    /// Of the width that the field says, if it is there and not 0; its gates and what they gate are one tensor.
    Halves(&'static str),
    /// Likewise in two tensors.
    Width(&'static str),
    /// The part that feeds forward in layers without experts, of the width that the field says: it and the experts have norms of their own,
    /// and so has the router, which weights each expert's say by a number of its own, too.
    Beside(&'static str),
    /// As wide as so many others: the field that says how many, and its default.
    Counted {
        field: &'static str,
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
    /// Likewise, with columns before rows (`checkpoint/experts`).
    TurnedHalves,
}

/// How the projections of a gated delta net lie in safetensors files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaTensors {
    /// `in_proj_qkvz` and `in_proj_ba`, the rows of each key head together (`checkpoint/picked`).
    ByKeyHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.
    Each,
    /// As GGUF files have them: `in_proj_qkv`, `in_proj_z`, and `in_proj_ba` with the rows of each key head together, or
    /// `in_proj_b` and `in_proj_a`; the decay is stored as what it is.
    GgmlByKeyHead,
    GgmlEach,
}

/// What a family calls the sizes of its Mamba-2 layers, with their defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MambaFields {
    pub heads: (&'static str, usize),
    /// `None`: `hidden_size` times `mamba_expand` (2 when absent), in as many heads.
    pub head_dim: (&'static str, Option<usize>),
    pub groups: (&'static str, usize),
    pub state_dim: (&'static str, usize),
    pub taps: (&'static str, usize),
    /// The boolean that says that the convolution has a bias, true when absent.
    pub bias: &'static str,
    /// Booleans, and what they must say if they are there.
    pub fixed: &'static [(&'static str, bool)],
    /// The decay is stored as what it is, as GGUF files have it, and not as the logarithm of what is subtracted.
    pub decay_as_is: bool,
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
    /// RMS norm of q and k.
    pub qk_norm: QkNorm,
    /// RMS norm of each head of v, without a weight.
    pub value_norm: bool,
    /// Layers without a window have heads of their own (`global_head_dim`, `num_global_key_value_heads`; or `per_layer_config`), and where
    /// `attention_k_eq_v` says so, values that are made of what keys are made of.
    pub full_heads: bool,
    /// The last `num_kv_shared_layers` layers read the K and V of a layer before them; where `use_double_wide_mlp` says so, their
    /// feed-forward part is twice as wide.
    pub shares_kv: bool,
    /// Each layer is given `hidden_size_per_layer_input` values of a token, unless that is 0.
    pub layer_inputs: bool,
    /// The residual stream is multiplied by a number of each layer behind it.
    pub layer_scale: bool,
    /// What a query head attends to is multiplied by the sigmoid of a gate, whose rows follow the head's in q_proj.
    pub output_gate: bool,
    /// Every layer has latent attention, which rotates neighbouring dimensions unless `rope_interleave` is false.
    pub latent: bool,
    /// Layers that `layer_types` calls `linear_attention`, or all but every `full_attention_interval`-th, have a gated delta net in
    /// attention's place.
    pub delta: Option<DeltaTensors>,
    /// Layers that `layer_types` calls `conv`, or all that `full_attn_idxs` does not list, have a short convolution in attention's place.
    pub short_conv: bool,
    /// Layers that `layer_types` calls `mamba`, or `linear_attention`, have a Mamba-2 mixer in attention's place.
    pub mamba: Option<MambaFields>,
    /// Every layer is one part and no more, as `layers_block_type` or `hybrid_override_pattern` says: Mamba-2, attention, a feed-forward part or
    /// a mixture of experts.
    pub single: bool,
    pub window: Window,
    /// A logit per query head that attends to nothing.
    pub sinks: bool,
    /// Queries of layers that do not rotate are multiplied by what grows with the position, unless `attn_temperature_tuning` is false.
    pub tempered: bool,
    pub gate: Gate,
    /// Instead of one feed-forward part in every layer.
    pub mixture: Option<Mixture>,
    /// The object of config.json that describes the decoder, in a family with other parts (which are not served), and the `model_type` it
    /// may state.
    pub nested: Option<(&'static str, &'static str)>,
    /// Norm weights are stored as what is added to one.
    pub norm_plus_one: bool,
    pub norms: Norms,
    /// Norms of what layers read, and the last one, subtract the mean: they are layer norms without a bias.
    pub centered: bool,
    /// The field with the epsilon of norms.
    pub eps_field: &'static str,
    /// Embeddings are multiplied by the root of their width.
    pub scaled_embedding: bool,
    /// `embedding_multiplier`, `residual_multiplier`, `attention_multiplier` and `logits_scaling` are honoured; 1 when absent.
    pub multipliers: bool,
    /// Default of `logit_scale`, which logits are multiplied by; `None`: there is no such field.
    pub logit_scale: Option<f64>,
    /// Queries are scaled by the root of `query_pre_attn_scalar` (this is its default) and not of head_dim.
    pub query_scalar: Option<f64>,
    /// What products of queries and keys are multiplied by, whatever their size.
    pub attention_scale: Option<f64>,
    pub softcaps: Option<Softcaps>,
    pub local_rope: Option<LocalRope>,
    pub rotated: Rotated,
    pub pairs: Pairs,
    /// The width of the feed-forward part is made from `intermediate_size`, or `block_ff_dim`, unless `block_auto_adjust_ff_dim` is false.
    pub adjusted_width: bool,
    /// Parts of the names of tensors, as stored and as the decoder calls them, one after another.
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
    /// The field that says how many are, where `partial_rotary_factor` does not.
    pub rotary_dim: Option<&'static str>,
    /// config.json must say how the rotary embedding is scaled: what is assumed otherwise is not the plain one.
    pub rope_stated: bool,
    pub max_position: usize,
}

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
