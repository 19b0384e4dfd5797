//! Writing GGUF files byte by byte, sound ones and others, and every safetensors fixture as GGUF.

mod others;

use std::collections::BTreeMap;

use half::{bf16, f16};

use super::fixture;
use crate::backend::DType;
use crate::checkpoint::Checkpoint;
use crate::config::{Config, EmbeddingScale, Experts, Feed, Mixer};
use crate::family::{ExpertTensors, Mixture, Norms, Shared};
use crate::program::Routing;
use crate::rope::{RopeScaling, Sections};
use crate::weights::{TensorSpec, WeightSpec, weight_specs};

/// A file in the making; nothing is checked.
#[derive(Clone, Default)]
pub struct Writer {
    pub version: u32,
    pub keys: Vec<u8>,
    pub key_count: u64,
    /// (name, sizes with columns first, type number, bytes)
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

pub fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

impl Writer {
    pub fn new(architecture: &str) -> Self {
        Writer { version: 3, ..Writer::default() }.text("general.architecture", architecture)
    }

    /// A key with its type number and value as they are.
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.extend(string(key.as_bytes()));
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(value);
        self.key_count += 1;
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value.as_bytes()))
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn flag(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[value.into()])
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let mut bytes = [&8u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        bytes.extend(values.iter().flat_map(|value| string(value.as_bytes())));
        self.raw(key, 9, &bytes)
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let mut bytes = [&5u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.raw(key, 9, &bytes)
    }

    pub fn flags(self, key: &str, values: &[bool]) -> Self {
        let mut bytes = [&7u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        bytes.extend(values.iter().map(|value| u8::from(*value)));
        self.raw(key, 9, &bytes)
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let mut bytes = [&6u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.raw(key, 9, &bytes)
    }

    /// `shape` has rows first.
    pub fn tensor(mut self, name: &str, shape: &[usize], kind: u32, bytes: &[u8]) -> Self {
        let sizes = shape.iter().rev().map(|size| *size as u64).collect();
        self.tensors.push((name.to_owned(), sizes, kind, bytes.to_vec()));
        self
    }

    fn edit(mut self, name: &str, edit: impl FnOnce(&mut Vec<u64>, &mut u32, &mut Vec<u8>)) -> Self {
        let tensor = self.tensors.iter_mut().find(|(found, ..)| found == name);
        let (_, sizes, kind, bytes) = tensor.expect("the tensor is there");
        edit(sizes, kind, bytes);
        self
    }

    /// Gives a tensor another type number, whatever its bytes.
    pub fn retype(self, name: &str, number: u32) -> Self {
        self.edit(name, |_, kind, _| *kind = number)
    }

    /// Gives a tensor another shape, rows first, whatever its bytes.
    pub fn reshape(self, name: &str, shape: &[usize]) -> Self {
        self.edit(name, |sizes, _, _| *sizes = shape.iter().rev().map(|size| *size as u64).collect())
    }

    /// Every BF16 tensor as F32.
    pub fn widen(&mut self) {
        for (_, _, kind, bytes) in &mut self.tensors {
            if *kind == 30 {
                *kind = 0;
                *bytes = bytes.as_chunks::<2>().0.iter().flat_map(|half| [0, 0, half[0], half[1]]).collect();
            }
        }
    }

    /// The tensors spread over `count` files, the metadata in the first, as llama.cpp's gguf-split does.
    pub fn split(mut self, count: usize) -> Vec<Writer> {
        let tensors = std::mem::take(&mut self.tensors);
        let (total, each) = (tensors.len() as u32, tensors.len().div_ceil(count));
        let part = |number: usize| {
            let first = if number == 0 { self.clone() } else { Writer { version: 3, ..Writer::default() } };
            let mut part = first
                .raw("split.no", 2, &(number as u16).to_le_bytes())
                .raw("split.count", 2, &(count as u16).to_le_bytes())
                .raw("split.tensors.count", 5, &total.to_le_bytes());
            part.tensors = tensors.iter().skip(number * each).take(each).cloned().collect();
            part
        };
        (0..count).map(part).collect()
    }

    pub fn finish(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend(self.key_count.to_le_bytes());
        file.extend(&self.keys);
        let mut data = Vec::new();
        for (name, sizes, kind, bytes) in &self.tensors {
            file.extend(string(name.as_bytes()));
            file.extend((sizes.len() as u32).to_le_bytes());
            file.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }
}

/// The metadata of a fixture, written as llama.cpp's converter does.
pub fn metadata_of(checkpoint: &Checkpoint) -> Writer {
    let config = checkpoint.config();
    let architecture = match config.family.model_type {
        "mistral" | "mistral3" | "mixtral" => "llama",
        "llama4_text" => "llama4",
        "qwen3_moe" => "qwen3moe",
        "gemma3_text" => "gemma3",
        "gemma4_text" => "gemma4",
        "gpt_oss" => "gpt-oss",
        "glm4_moe" => "glm4moe",
        "olmo3" => "olmo2",
        "minimax_m2" => "minimax-m2",
        "granitemoeshared" => "granitemoe",
        "granitemoehybrid" if config.mixers.iter().all(|mixer| *mixer == Mixer::Attention) => "granite",
        "granitemoehybrid" => "granitehybrid",
        "nemotron_h" if config.experts.is_some() => "nemotron_h_moe",
        "hunyuan_v1_dense" => "hunyuan-dense",
        "hunyuan_v1_moe" => "hunyuan-moe",
        "lfm2_moe" => "lfm2moe",
        "ernie4_5_moe" => "ernie4_5-moe",
        "deepseek_v2" | "deepseek_v3" | "kimi_k2" | "glm4_moe_lite" => "deepseek2",
        "qwen3_next" => "qwen3next",
        "qwen3_5" | "qwen3_5_text" => "qwen35",
        "qwen3_5_moe" | "qwen3_5_moe_text" => "qwen35moe",
        other => other,
    };
    let key = |suffix: &str| format!("{architecture}.{suffix}");
    // A layer may be as wide as two others.
    let dense_of = |layer: usize| match (config.dense_layers(), config.family.mixture) {
        (0, Some(Mixture { shared: Shared::Beside(_), .. })) => {
            config.experts.and_then(|experts| experts.shared).unwrap_or(0)
        }
        (0, _) => config.intermediate,
        _ => config.dense_width(layer),
    };
    let dense = dense_of(0);
    let eps = match config.family.centered {
        true => "attention.layer_norm_epsilon",
        false => "attention.layer_norm_rms_epsilon",
    };
    // Stretched when it is written.
    let theta = match config.rope.scaling {
        RopeScaling::NtkAlpha { alpha } => {
            let dim = config.rope.rotary_dim as f64;
            config.rope.theta * alpha.powf(dim / (dim - 2.0))
        }
        _ => config.rope.theta,
    };
    let mut writer = Writer::new(architecture)
        .u32(&key("embedding_length"), config.hidden as u32)
        .u32(&key("block_count"), config.layers as u32)
        .u32(&key("attention.head_count"), config.heads as u32)
        .u32(&key("context_length"), config.max_position as u32)
        .u32(&key("vocab_size"), config.vocab as u32)
        .u32(&key("rope.dimension_count"), config.rope.rotary_dim as u32)
        .f32(&key("rope.freq_base"), theta as f32)
        .f32(&key(eps), config.eps);
    writer = match config.family.single {
        false if config.double_wide => {
            let widths: Vec<i32> = (0..config.layers).map(|layer| dense_of(layer) as i32).collect();
            writer.i32s(&key("feed_forward_length"), &widths)
        }
        false => writer.u32(&key("feed_forward_length"), dense as u32),
        true => {
            let width = |feed: &Feed| if *feed == Feed::Nothing { 0 } else { dense as i32 };
            let widths: Vec<i32> = config.feeds.iter().map(width).collect();
            writer.i32s(&key("feed_forward_length"), &widths)
        }
    };
    writer = mixers(config, writer, &key);
    if let Some(experts) = config.experts {
        writer = writer
            .u32(&key("expert_count"), experts.count as u32)
            .u32(&key("expert_used_count"), experts.chosen as u32)
            .u32(&key("expert_feed_forward_length"), config.intermediate as u32);
        let shares = matches!(experts.routing, Routing::AmongAll | Routing::Sigmoid);
        if shares || architecture == "deepseek2" {
            writer = writer.flag(&key("expert_weights_norm"), !shares);
        }
        writer = experts_of(config, &experts, writer, &key);
    }
    if config.family.logit_scale.is_some() {
        writer = writer.f32(&key("logit_scale"), (1.0 / config.logit_divisor) as f32);
    }
    if config.family.multipliers {
        let Some(EmbeddingScale::Number(embedding)) = config.embedding_scale else {
            panic!("a fixture with multipliers has all of them")
        };
        writer = writer
            .f32(&key("embedding_scale"), embedding as f32)
            .f32(&key("residual_scale"), config.residual_scale as f32)
            .f32(&key("attention.scale"), config.attention_scale as f32)
            .f32(&key("logit_scale"), config.logit_divisor as f32);
    }
    for (suffix, cap) in [
        ("attn_logit_softcapping", config.attention_softcap),
        ("final_logit_softcapping", config.logit_softcap),
    ] {
        writer = cap.into_iter().fold(writer, |writer, cap| writer.f32(&key(suffix), cap));
    }
    if let Some(window) = config.windows.iter().flatten().next().filter(|_| !config.chunked) {
        writer = writer.u32(&key("attention.sliding_window"), *window as u32);
        if config.windows.contains(&None) {
            let sliding: Vec<i32> = config.windows.iter().map(|window| window.is_some().into()).collect();
            writer = writer.i32s(&key("attention.sliding_window_pattern"), &sliding);
        }
    }
    if let Some(Sections { frequencies, .. }) = config.rope.sections {
        let [time, height, width] = frequencies.map(|size| size as i32);
        writer = writer.i32s(&key("rope.dimension_sections"), &[time, height, width, 0]);
    }
    let base = |i: usize| config.rope.theta.powf(-(2.0 * i as f64) / config.rope.rotary_dim as f64);
    let vector = |values: &[f64]| values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect::<Vec<u8>>();
    match &config.rope.scaling {
        RopeScaling::None | RopeScaling::Factors { .. } | RopeScaling::NtkAlpha { .. } => writer,
        RopeScaling::Proportional { pairs, .. } => {
            let factor = |pair: usize| if pair < *pairs { 1.0 } else { 1e30 };
            let factors: Vec<f64> = (0..config.rope.rotary_dim / 2).map(factor).collect();
            writer.tensor("rope_freqs.weight", &[factors.len()], 0, &vector(&factors))
        }
        RopeScaling::Linear { factor } => {
            writer.text(&key("rope.scaling.type"), "linear").f32(&key("rope.scaling.factor"), *factor as f32)
        }
        RopeScaling::Llama3 { .. } => {
            let table = config.rope.table(0);
            let factors: Vec<f64> =
                table.inv_freq.iter().enumerate().map(|(i, freq)| base(i) / f64::from(*freq)).collect();
            writer.tensor("rope_freqs.weight", &[factors.len()], 0, &vector(&factors))
        }
        RopeScaling::Yarn(yarn) if config.family.latent => writer
            .text(&key("rope.scaling.type"), "yarn")
            .f32(&key("rope.scaling.factor"), yarn.factor as f32)
            .u32(&key("rope.scaling.original_context_length"), yarn.original_max_position as u32)
            .f32(&key("rope.scaling.yarn_log_multiplier"), (0.1 * yarn.all_dim.unwrap_or(0.0)) as f32)
            .f32(&key("rope.scaling.yarn_beta_fast"), yarn.beta_fast as f32)
            .f32(&key("rope.scaling.yarn_beta_slow"), yarn.beta_slow as f32),
        RopeScaling::Yarn(yarn) => writer
            .text(&key("rope.scaling.type"), "yarn")
            .f32(&key("rope.scaling.factor"), yarn.factor as f32)
            .u32(&key("rope.scaling.original_context_length"), yarn.original_max_position as u32)
            .f32(
                &key("rope.scaling.yarn_attn_factor"),
                (yarn.attention_factor / (0.1 * yarn.factor.ln() + 1.0)) as f32,
            )
            .f32(&key("rope.scaling.yarn_beta_fast"), yarn.beta_fast as f32)
            .f32(&key("rope.scaling.yarn_beta_slow"), yarn.beta_slow as f32),
        RopeScaling::LongRope { short_factor, long_factor, original_max_position, attention_factor } => {
            writer
                .u32(&key("rope.scaling.original_context_length"), *original_max_position as u32)
                .f32(&key("rope.scaling.attn_factor"), *attention_factor as f32)
                .tensor("rope_factors_long.weight", &[long_factor.len()], 0, &vector(long_factor))
                .tensor("rope_factors_short.weight", &[short_factor.len()], 0, &vector(short_factor))
        }
    }
}

/// Heads that are not the same in all layers, and what else layers have of their own.
fn own_layers(config: &Config, writer: Writer, key: &impl Fn(&str) -> String) -> Writer {
    let full = config.full_heads.map_or(config.head_dim, |full| full.head_dim);
    let kv_heads: Vec<i32> =
        (0..config.layers).map(|layer| config.head_sizes(layer).kv_heads as i32).collect();
    let local = config.local_rope.as_ref().expect("layers with a window have a rotation of their own");
    writer
        .i32s(&key("attention.head_count_kv"), &kv_heads)
        .u32(&key("attention.key_length"), full as u32)
        .u32(&key("attention.value_length"), full as u32)
        .u32(&key("attention.key_length_swa"), config.head_dim as u32)
        .u32(&key("attention.value_length_swa"), config.head_dim as u32)
        .u32(&key("attention.shared_kv_layers"), config.sharing_layers as u32)
        .u32(&key("embedding_length_per_layer_input"), config.layer_input.unwrap_or(0) as u32)
        .u32(&key("rope.dimension_count_swa"), local.rotary_dim as u32)
        .f32(&key("rope.freq_base_swa"), local.theta as f32)
}

/// What attends, or keeps states.
fn mixers(config: &Config, writer: Writer, key: &impl Fn(&str) -> String) -> Writer {
    let heads = |writer: Writer| {
        writer
            .u32(&key("attention.head_count_kv"), config.kv_heads as u32)
            .u32(&key("attention.key_length"), config.head_dim as u32)
            .u32(&key("attention.value_length"), config.head_dim as u32)
    };
    let heads = |writer: Writer| {
        if config.family.full_heads { own_layers(config, writer, key) } else { heads(writer) }
    };
    let attends = |mixer: &Mixer| *mixer == Mixer::Attention;
    let other = config.mixers.iter().find(|mixer| !attends(mixer) && **mixer != Mixer::Nothing);
    match other {
        None | Some(Mixer::Attention | Mixer::Nothing) => heads(writer),
        Some(Mixer::Mamba(mamba)) => {
            let of = |mixer| if attends(mixer) { config.kv_heads as i32 } else { 0 };
            let kv_heads: Vec<i32> = config.mixers.iter().map(of).collect();
            writer
                .i32s(&key("attention.head_count_kv"), &kv_heads)
                .u32(&key("ssm.conv_kernel"), mamba.taps as u32)
                .u32(&key("ssm.state_size"), mamba.state_dim as u32)
                .u32(&key("ssm.group_count"), mamba.groups as u32)
                .u32(&key("ssm.time_step_rank"), mamba.heads as u32)
                .u32(&key("ssm.inner_size"), mamba.width() as u32)
                .flag(&key("rope.scaling.finetuned"), config.rotated.contains(&true))
                .u32(&key("attention.key_length"), config.head_dim as u32)
                .u32(&key("attention.value_length"), config.head_dim as u32)
        }
        Some(Mixer::Latent(latent)) => {
            let q_rank = latent.q_rank.unwrap_or(0) as u32;
            writer
                .u32(&key("attention.head_count_kv"), 1)
                .u32(&key("attention.key_length"), latent.key_dim() as u32)
                .u32(&key("attention.value_length"), latent.rank as u32)
                .u32(&key("attention.key_length_mla"), latent.query_dim() as u32)
                .u32(&key("attention.value_length_mla"), latent.value_dim as u32)
                .u32(&key("attention.kv_lora_rank"), latent.rank as u32)
                .u32(&key("attention.q_lora_rank"), q_rank)
        }
        Some(Mixer::Conv(conv)) => {
            let of = |mixer| if attends(mixer) { config.kv_heads as i32 } else { 0 };
            let kv_heads: Vec<i32> = config.mixers.iter().map(of).collect();
            writer
                .i32s(&key("attention.head_count_kv"), &kv_heads)
                .u32(&key("shortconv.l_cache"), conv.taps as u32)
        }
        Some(Mixer::Delta(net)) => {
            let recurrent: Vec<bool> = config.mixers.iter().map(|mixer| !attends(mixer)).collect();
            heads(writer)
                .u32(&key("ssm.conv_kernel"), net.taps as u32)
                .u32(&key("ssm.state_size"), net.key_dim as u32)
                .u32(&key("ssm.group_count"), net.key_heads as u32)
                .u32(&key("ssm.time_step_rank"), net.value_heads as u32)
                .u32(&key("ssm.inner_size"), (net.value_heads * net.value_dim) as u32)
                .flags(&key("attention.recurrent_layers"), &recurrent)
        }
    }
}

/// What few mixtures of experts have.
fn experts_of(config: &Config, experts: &Experts, writer: Writer, key: &impl Fn(&str) -> String) -> Writer {
    let Some(mixture) = config.family.mixture else { return writer };
    let mut writer = writer;
    if mixture.dense.is_some() {
        writer = writer.u32(&key("leading_dense_block_count"), config.dense_layers() as u32);
    }
    if mixture.interleaved {
        let first = config.feeds.iter().position(|feed| *feed == Feed::Experts).unwrap_or(0);
        writer = writer.u32(&key("interleave_moe_layer_step"), first as u32 + 1);
    }
    if let Some(latent) = experts.latent {
        writer = writer.u32(&key("moe_latent_size"), latent as u32);
    }
    if mixture.scale.is_some() {
        writer = writer.f32(&key("expert_weights_scale"), experts.scale as f32);
    }
    if experts.routing.is_sigmoid() {
        writer = writer.u32(&key("expert_gating_func"), 2);
    }
    if let Some(groups) = experts.groups {
        writer = writer
            .u32(&key("expert_group_count"), groups.count as u32)
            .u32(&key("expert_group_used_count"), groups.kept as u32);
    }
    match (mixture.shared, experts.shared) {
        (_, None) | (Shared::Never | Shared::Beside(_), _) => writer,
        (Shared::Counted { .. }, Some(width)) => {
            writer.u32(&key("expert_shared_count"), (width / config.intermediate) as u32)
        }
        (_, Some(width)) => writer.u32(&key("expert_shared_feed_forward_length"), width as u32),
    }
}

/// A fixture as its file would be; see [`gguf_of`].
pub fn as_gguf(name: &str) -> Writer {
    gguf_of(&Checkpoint::open(fixture(name)).unwrap_or_else(|error| panic!("{error}")))
}

/// A checkpoint's tensors under llama.cpp's names, q and k of the `llama` architectures in its order. What its converter leaves out,
/// because all models of an architecture have it, is left out.
pub fn gguf_of(checkpoint: &Checkpoint) -> Writer {
    let config = checkpoint.config();
    let mut writer = metadata_of(checkpoint);
    let names: BTreeMap<&str, &str> = [
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.fc1_latent_proj", "ffn_latent_down"),
        ("mlp.fc2_latent_proj", "ffn_latent_up"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("mlp.router", "ffn_gate_inp"),
        ("mlp.gate", "ffn_gate_inp"),
        ("mlp.experts.gate_proj", "ffn_gate_exps"),
        ("mlp.experts.up_proj", "ffn_up_exps"),
        ("mlp.experts.down_proj", "ffn_down_exps"),
        ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
        ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ("self_attn.q_a_proj", "attn_q_a"),
        ("self_attn.q_a_layernorm", "attn_q_a_norm"),
        ("self_attn.q_b_proj", "attn_q_b"),
        ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        ("router", "ffn_gate_inp"),
        ("router.proj", "ffn_gate_inp"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
        ("post_per_layer_input_norm", "post_norm"),
        ("conv.in_proj", "shortconv.in_proj"),
        ("conv.out_proj", "shortconv.out_proj"),
    ]
    .into();
    let mut stacked: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let interleaved = [
        "llama",
        "llama4",
        "llama4_text",
        "mistral",
        "mistral3",
        "mixtral",
        "smollm3",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "granitemoehybrid",
        "cohere2",
        "ernie4_5",
        "ernie4_5_moe",
    ]
    .contains(&config.family.model_type);
    for weight in weight_specs(config).iter() {
        match others::stored(checkpoint, weight) {
            Some(tensors) => {
                for (name, shape, kind, bytes) in tensors {
                    writer = writer.tensor(&name, &shape, kind, &bytes);
                }
            }
            None => writer = parts_of(checkpoint, weight, writer, &names, &mut stacked, interleaved),
        }
    }
    writer
}

/// The tensors of a weight that has nothing but names of its own.
fn parts_of(
    checkpoint: &Checkpoint,
    weight: &WeightSpec,
    mut writer: Writer,
    names: &BTreeMap<&str, &str>,
    stacked: &mut BTreeMap<String, Vec<u8>>,
    interleaved: bool,
) -> Writer {
    let config = checkpoint.config();
    for spec in &weight.parts {
        let TensorSpec { name, shape, .. } = spec;
        let tensor = checkpoint.tensor(spec).unwrap_or_else(|error| panic!("{error}"));
        let values = tensor.read().unwrap_or_else(|error| panic!("{error}"));
        let mut bytes = values.bytes.into_owned();
        let stored = match name.as_str() {
            "model.embed_tokens.weight" => "token_embd.weight".to_owned(),
            "model.norm.weight" if config.family.short_conv => "token_embd_norm.weight".to_owned(),
            "model.norm.weight" => "output_norm.weight".to_owned(),
            "lm_head.weight" => "output.weight".to_owned(),
            "model.embed_tokens_per_layer.weight" => "per_layer_token_embd.weight".to_owned(),
            "model.per_layer_model_projection.weight" => "per_layer_model_proj.weight".to_owned(),
            "model.per_layer_projection_norm.weight" => "per_layer_proj_norm.weight".to_owned(),
            other => {
                let (layer, rest) = other["model.layers.".len()..].split_once('.').expect("a layer");
                let rest = if rest == "self_attn.sinks" { "attn_sinks.weight" } else { rest };
                let (part, leaf) = rest.rsplit_once('.').expect("a layer");
                let (part, expert) = one_expert(part);
                let heads = match &*part {
                    "self_attn.q_proj" => config.heads,
                    "self_attn.k_proj" => config.kv_heads,
                    _ => 0,
                };
                if interleaved && heads > 0 {
                    bytes = interleave(&bytes, shape[0], heads);
                }
                let behind = matches!(config.family.norms, Norms::Around | Norms::After)
                    || config.family.sinks
                    || config.family.delta.is_some()
                    || ["seed_oss", "glm4_moe"].contains(&config.family.model_type);
                let part = match &*part {
                    "post_attention_layernorm" if behind => "post_attention_norm",
                    "attn_sinks" => "attn_sinks",
                    part => names[part],
                };
                let stored = format!("blk.{layer}.{part}.{leaf}");
                if let Some(expert) = expert {
                    // The first of them is named; the last has all.
                    let all = stacked.entry(stored.clone()).or_default();
                    all.extend(&bytes);
                    if expert + 1 < config.experts.map_or(0, |experts| experts.count) {
                        continue;
                    }
                    bytes = std::mem::take(all);
                }
                stored
            }
        };
        // What is read twice is there once.
        if writer.tensors.iter().any(|(name, ..)| *name == stored) {
            continue;
        }
        let dtype = tensor.encoding.plain().expect("fixtures are plain");
        let kind = match dtype {
            // llama.cpp wants vectors in F32.
            _ if shape.len() == 1 => {
                bytes = widened(&bytes, dtype);
                // Gemma's norms are stored as what is added to one; llama.cpp wants the sum.
                if stored.ends_with("norm.weight") && config.norm_offset != 0.0 {
                    let raised =
                        |value: &[u8; 4]| (f32::from_le_bytes(*value) + config.norm_offset).to_le_bytes();
                    bytes = bytes.as_chunks().0.iter().flat_map(raised).collect();
                }
                0
            }
            DType::F32 => 0,
            DType::F16 => 1,
            DType::BF16 => 30,
        };
        let shape = match config.experts {
            Some(Experts { count, .. }) if stored.contains("_exps.") => {
                let each = config.family.mixture.is_some_and(|m| m.stored == ExpertTensors::Each);
                let rows = if each { shape[0] } else { shape[0] / count };
                std::iter::once(count).chain([rows]).chain(shape[1..].iter().copied()).collect()
            }
            _ => shape.clone(),
        };
        writer = writer.tensor(&stored, &shape, kind, &bytes);
    }
    writer
}

/// `mlp.experts.3.up_proj` as `mlp.experts.up_proj` and 3.
fn one_expert(part: &str) -> (String, Option<usize>) {
    let inner = part.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.'));
    match inner.and_then(|(number, name)| Some((name, number.parse().ok()?))) {
        Some((name, number)) => (format!("mlp.experts.{name}"), Some(number)),
        None => (part.to_owned(), None),
    }
}

fn widened(bytes: &[u8], dtype: DType) -> Vec<u8> {
    let halves = bytes.as_chunks().0.iter();
    match dtype {
        DType::F32 => bytes.to_vec(),
        DType::F16 => halves.flat_map(|half| f16::from_le_bytes(*half).to_f32().to_le_bytes()).collect(),
        DType::BF16 => halves.flat_map(|half| bf16::from_le_bytes(*half).to_f32().to_le_bytes()).collect(),
    }
}

fn interleave(bytes: &[u8], rows: usize, heads: usize) -> Vec<u8> {
    let (row, half) = (bytes.len() / rows, rows / heads / 2);
    let order = (0..heads)
        .flat_map(|head| (0..half).flat_map(move |i| [0, half].map(|part| head * 2 * half + part + i)));
    order.flat_map(|r| bytes[r * row..(r + 1) * row].to_vec()).collect()
}
