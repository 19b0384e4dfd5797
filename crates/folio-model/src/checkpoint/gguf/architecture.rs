//! llama.cpp's architectures that are families of ours, and what each means without a key saying so.
//!
//! Owns: that table, and the fields of a config.json that only some architectures have (experts, soft caps, the scale of queries,
//! windows and rotations of their own). Sources: llama.cpp, `src/models/*.cpp` and `conversion/*.py`.

use serde_json::{Map, Value as Json, json};

use super::config::Reader;
use crate::error::Result;
use crate::family::{
    Choice, FAMILIES, Family, LocalRope, MambaFields, Mixture, QkNorm, Rotated, Shared, Window,
};

/// An architecture of llama.cpp that is a family of ours.
pub struct Architecture {
    pub name: &'static str,
    pub model_type: &'static str,
    /// llama.cpp rotates neighbouring dimensions, so the converter reorders the rows of q and k.
    pub interleaved: bool,
    /// Number of layers of the one model whose queries are scaled by hidden_size / heads and not by head_dim.
    pub wide_queries: Option<u64>,
    /// No layer has a window where no key gives its size; elsewhere that is the family's default.
    pub window_needs_key: bool,
    /// Of several rows of one name the last is meant whose key has at least this value.
    pub when: Option<(&'static str, f64)>,
    /// What it means that no key says whether weights of the chosen experts add up to one.
    pub weights_normalized: bool,
    /// Value heads of a delta net lie one after another of each key head in turn.
    pub tiled: bool,
    /// Bounds of YaRN's ramp are not rounded, which no key says.
    pub yarn_unrounded: bool,
    /// Frequencies of the axes of M-RoPE take turns (`mrope_interleaved`), which no key says.
    pub mrope_interleaved: bool,
}

const LLAMA: Architecture = Architecture {
    name: "llama",
    model_type: "llama",
    interleaved: true,
    wide_queries: None,
    window_needs_key: false,
    when: None,
    weights_normalized: true,
    tiled: false,
    yarn_unrounded: false,
    mrope_interleaved: false,
};

const SOME_EXPERTS: Option<(&str, f64)> = Some(("expert_count", 1.0));

const fn plain(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture { name, model_type, interleaved: false, ..LLAMA }
}

/// See [`Architecture::when`].
pub const ARCHITECTURES: &[Architecture] = &[
    LLAMA,
    Architecture { model_type: "mixtral", when: SOME_EXPERTS, ..LLAMA },
    Architecture { name: "llama4", model_type: "llama4_text", ..LLAMA },
    plain("qwen2", "qwen2"),
    plain("qwen3", "qwen3"),
    plain("qwen3moe", "qwen3_moe"),
    // Their text parts. What a tower computes is in a file of its own.
    plain("qwen2vl", "qwen2"),
    Architecture { mrope_interleaved: true, ..plain("qwen3vl", "qwen3") },
    Architecture { mrope_interleaved: true, ..plain("qwen3vlmoe", "qwen3_moe") },
    Architecture { name: "smollm3", model_type: "smollm3", ..LLAMA },
    plain("glm4moe", "glm4_moe"),
    Architecture { weights_normalized: false, ..plain("deepseek2", "deepseek_v2") },
    Architecture {
        weights_normalized: false,
        when: Some(("expert_gating_func", 2.0)),
        ..plain("deepseek2", "deepseek_v3")
    },
    plain("qwen3next", "qwen3_next"),
    Architecture { tiled: true, mrope_interleaved: true, ..plain("qwen35", "qwen3_5_text") },
    Architecture { tiled: true, mrope_interleaved: true, ..plain("qwen35moe", "qwen3_5_moe_text") },
    plain("olmo2", "olmo2"),
    Architecture { when: Some(("attention.sliding_window", 1.0)), ..plain("olmo2", "olmo3") },
    plain("minimax-m2", "minimax_m2"),
    Architecture { name: "granite", model_type: "granite", ..LLAMA },
    Architecture { name: "granitemoe", model_type: "granitemoe", ..LLAMA },
    Architecture {
        name: "granitemoe",
        model_type: "granitemoeshared",
        when: Some(("expert_shared_feed_forward_length", 1.0)),
        ..LLAMA
    },
    Architecture { name: "granitehybrid", model_type: "granitemoehybrid", ..LLAMA },
    plain("nemotron_h", "nemotron_h"),
    plain("nemotron_h_moe", "nemotron_h"),
    Architecture { name: "cohere2", model_type: "cohere2", ..LLAMA },
    plain("hunyuan-dense", "hunyuan_v1_dense"),
    plain("hunyuan-moe", "hunyuan_v1_moe"),
    plain("lfm2", "lfm2"),
    plain("lfm2moe", "lfm2_moe"),
    Architecture { name: "ernie4_5", model_type: "ernie4_5", ..LLAMA },
    Architecture { name: "ernie4_5-moe", model_type: "ernie4_5_moe", ..LLAMA },
    plain("seed_oss", "seed_oss"),
    Architecture { window_needs_key: true, ..plain("exaone4", "exaone4") },
    plain("phi3", "phi3"),
    Architecture { wide_queries: Some(46), ..plain("gemma2", "gemma2") },
    Architecture { wide_queries: Some(62), window_needs_key: true, ..plain("gemma3", "gemma3_text") },
    plain("gemma4", "gemma4_text"),
    Architecture { yarn_unrounded: true, ..plain("gpt-oss", "gpt_oss") },
];

/// Whether files of this architecture can be served.
pub(crate) fn knows(architecture: &str) -> bool {
    ARCHITECTURES.iter().any(|known| known.name == architecture)
}

/// What an architecture of this name means where it is one of a family.
pub(crate) fn of_family(name: &str, model_type: &str) -> Option<&'static Architecture> {
    // Converters drop what wraps the text part, and know no difference between these.
    let model_type = match model_type {
        "mistral" | "mistral3" => "llama",
        "kimi_k2" => "deepseek_v3",
        "llama4" => "llama4_text",
        "gemma3" => "gemma3_text",
        "gemma4" => "gemma4_text",
        "qwen3_5" => "qwen3_5_text",
        "qwen3_5_moe" => "qwen3_5_moe_text",
        other => other,
    };
    ARCHITECTURES.iter().find(|known| known.name == name && known.model_type == model_type)
}

/// `llama, qwen2, ...`
pub fn names() -> String {
    let mut names: Vec<_> = ARCHITECTURES.iter().map(|known| known.name).collect();
    names.dedup();
    names.join(", ")
}

impl Architecture {
    pub fn family(&self) -> &'static Family {
        let found = FAMILIES.iter().find(|family| family.model_type == self.model_type);
        found.expect("every architecture is a family")
    }
}

const NEUTRAL_INTERLEAVED: &[(&str, &[f64])] = &[("interleave_moe_layer_step", &[0.0, 1.0])];

/// Keys (after the architecture's name) of a mixture of experts that mean another decoder unless they have one of these values, where the
/// family's row has nothing of this kind.
const NEUTRAL_SHARED: &[(&str, &[f64])] =
    &[("expert_shared_count", &[0.0]), ("expert_shared_feed_forward_length", &[0.0])];
const NEUTRAL_GROUPS: &[(&str, &[f64])] = &[("expert_group_count", &[0.0, 1.0])];
const NEUTRAL_SCALE: &[(&str, &[f64])] = &[("expert_weights_scale", &[0.0, 1.0])];
const NEUTRAL_LATENT: &[(&str, &[f64])] = &[("moe_latent_size", &[0.0])];
const NEUTRAL_DENSE: &[(&str, &[f64])] = &[("leading_dense_block_count", &[0.0])];
/// Softmax over all logits, or over those of the chosen.
const BY_LOGITS: &[(&str, &[f64])] = &[("expert_gating_func", &[0.0, 1.0, 3.0])];
const BY_SIGMOIDS: &[(&str, &[f64])] = &[("expert_gating_func", &[0.0, 2.0])];

/// What a mixture of experts does not take.
pub fn neutral_of(mixture: &Mixture) -> Vec<(&'static str, &'static [f64])> {
    let by_sigmoids = matches!(mixture.choice, Choice::BiasedSigmoids { .. });
    let grouped = by_sigmoids || mixture.choice == Choice::GroupedLogits;
    let top = mixture.choice == Choice::Top;
    let mut neutral = if by_sigmoids || top { BY_SIGMOIDS.to_vec() } else { BY_LOGITS.to_vec() };
    for (has, keys) in [
        (mixture.interleaved, NEUTRAL_INTERLEAVED),
        (mixture.shared != Shared::Never, NEUTRAL_SHARED),
        (grouped, NEUTRAL_GROUPS),
        (mixture.scale.is_some(), NEUTRAL_SCALE),
        (mixture.latent.is_some(), NEUTRAL_LATENT),
        (mixture.dense.is_some(), NEUTRAL_DENSE),
    ] {
        neutral.extend(keys.iter().filter(|_| !has));
    }
    neutral
}

impl Reader<'_> {
    /// What this architecture adds to the fields of a config.json, which has the others.
    pub(super) fn own_fields(&self, map: &mut Map<String, Json>) -> Result<()> {
        let family = self.architecture.family();
        if family.softcaps.is_some() {
            for (field, suffix) in [
                ("attn_logit_softcapping", "attn_logit_softcapping"),
                ("final_logit_softcapping", "final_logit_softcapping"),
            ] {
                if let Some(cap) = self.number(suffix)? {
                    map.insert(field.into(), if cap == 0.0 { Json::Null } else { json!(cap) });
                }
            }
        }
        if family.multipliers {
            for (field, suffix) in [
                ("embedding_multiplier", "embedding_scale"),
                ("residual_multiplier", "residual_scale"),
                ("attention_multiplier", "attention.scale"),
                ("logits_scaling", "logit_scale"),
            ] {
                if let Some(number) = self.number(suffix)?.filter(|number| *number != 0.0) {
                    map.insert(field.into(), json!(number));
                }
            }
            let head_dim = map["head_dim"].as_f64().unwrap_or(1.0);
            map.entry("attention_multiplier").or_insert(json!(head_dim.powf(-0.5)));
        }
        if family.query_scalar.is_some() && family.attention_scale.is_none() {
            let size = |field: &str| map[field].as_u64().unwrap_or(0);
            let wide = self.architecture.wide_queries == Some(size("num_hidden_layers"));
            let even = size("hidden_size").checked_div(size("num_attention_heads"));
            let scalar = if wide { even.unwrap_or(0) } else { size("head_dim") };
            map.insert("query_pre_attn_scalar".into(), json!(scalar));
        }
        let local = self.number("rope.freq_base_swa")?;
        match (family.local_rope, local) {
            (Some(LocalRope::Own(_)), Some(theta)) => {
                drop(map.insert("rope_local_base_freq".into(), json!(theta)))
            }
            (_, Some(theta)) if map["rope_theta"] != json!(theta) => {
                let what = format!("`{}` = {theta}", self.key("rope.freq_base_swa"));
                return Err(self.unsupported(what, "one rotation for all layers"));
            }
            _ => {}
        }
        if let Window::Pattern { .. } = family.window {
            match self.integer("attention.sliding_window")? {
                Some(window) if window > 0 => drop(map.insert("sliding_window".into(), json!(window))),
                None if !self.architecture.window_needs_key => {}
                _ => drop(map.insert("sliding_window".into(), Json::Null)),
            }
        }
        if family.logit_scale.is_some() {
            let scale = self.number("logit_scale")?.ok_or_else(|| self.missing("logit_scale"))?;
            map.insert("logit_scale".into(), json!(scale));
        }
        if let QkNorm::Unweighted(field) = family.qk_norm {
            // As llama.cpp tells Scout from Maverick.
            map.insert(field.into(), json!(self.integer("expert_count")? != Some(128)));
        }
        if let Window::Chunked { absent } = family.window
            && let Some(window) = self.integer("attention.sliding_window")?.filter(|w| *w != absent as u64)
        {
            let what = format!("`{}` = {window}", self.key("attention.sliding_window"));
            return Err(self.unsupported(what, &format!("chunks of {absent} positions")));
        }
        if let QkNorm::Stated(field) = family.qk_norm {
            map.insert(field.into(), json!((self.find)("blk.0.attn_q_norm.weight").is_some()));
        }
        if family.short_conv {
            self.short_conv(map)?;
        }
        if family.delta.is_some() {
            self.delta_net(map)?;
        }
        if let Some(names) = &family.mamba {
            self.mamba(names, map)?;
        }
        if family.rotated == Rotated::Stated {
            // Granite's converter says by it whether anything is rotated.
            let rotated = self.metadata.flag(&self.key("rope.scaling.finetuned"))?.unwrap_or(true);
            map.insert("position_embedding_type".into(), json!(if rotated { "rope" } else { "nope" }));
        }
        if family.latent {
            self.latent(map)?;
        }
        if family.full_heads {
            self.own_layers(map)?;
        }
        family.mixture.map_or(Ok(()), |mixture| self.experts(&mixture, map))
    }

    fn experts(&self, mixture: &Mixture, map: &mut Map<String, Json>) -> Result<()> {
        let needed = |suffix: &str| self.integer(suffix)?.ok_or_else(|| self.missing(suffix));
        if let Some(switch) = mixture.switch {
            let on = self.integer("expert_count")?.is_some_and(|count| count > 0);
            map.insert(switch.into(), json!(on));
            if !on {
                return Ok(());
            }
        }
        if let (true, Shared::Halves(field)) = (mixture.optional, mixture.shared)
            && self.integer("expert_count")?.is_none_or(|count| count == 0)
        {
            map.insert("num_local_experts".into(), json!(0));
            map.insert(field.into(), map["intermediate_size"].clone());
            return Ok(());
        }
        let is_moe = |types: &Json| types.as_array().is_some_and(|types| types.contains(&json!("moe")));
        if map.get("layers_block_type").is_some_and(|types| !is_moe(types)) {
            return Ok(());
        }
        map.insert("num_local_experts".into(), json!(needed("expert_count")?));
        map.insert("num_experts_per_tok".into(), json!(needed("expert_used_count")?));
        if mixture.interleaved {
            map.insert(mixture.dense_inner.into(), map["intermediate_size"].clone());
            let every = self.integer("interleave_moe_layer_step")?.filter(|every| *every > 0);
            map.insert("interleave_moe_layer_step".into(), json!(every));
        }
        if let Some(inner) = self.integer("expert_feed_forward_length")? {
            map.insert(mixture.inner.into(), json!(inner));
        }
        if let Some((field, _)) = mixture.normalized {
            let normalized = self.metadata.flag(&self.key("expert_weights_norm"))?;
            map.insert(field.into(), json!(normalized.unwrap_or(self.architecture.weights_normalized)));
        }
        if let Some(field) = mixture.latent {
            map.insert(field.into(), json!(self.integer("moe_latent_size")?));
        }
        if mixture.scale.is_some() {
            let scale = self.number("expert_weights_scale")?.filter(|scale| *scale != 0.0);
            map.insert("routed_scaling_factor".into(), json!(scale.unwrap_or(1.0)));
        }
        if let Some((field, _)) = mixture.dense {
            let dense = self.integer("leading_dense_block_count")?;
            map.insert(field.into(), json!(dense.unwrap_or(0)));
        }
        match mixture.shared {
            Shared::Never => {}
            // As wide as the others, or as the part that feeds forward elsewhere.
            Shared::Width(field) if field == mixture.inner => {}
            Shared::Beside(_) => {}
            Shared::Gated(field) | Shared::Halves(field) | Shared::Width(field) => {
                let width = self.integer("expert_shared_feed_forward_length")?;
                map.insert(field.into(), json!(width));
            }
            Shared::Counted { field, .. } => {
                map.insert(field.into(), json!(self.integer("expert_shared_count")?));
            }
        }
        let groups = self.integer("expert_group_count")?.filter(|groups| *groups > 1);
        let kept = self.integer("expert_group_used_count")?.filter(|kept| *kept > 0);
        match (mixture.choice, groups) {
            (Choice::GroupedLogits, Some(_)) => {
                map.insert("topk_method".into(), json!("group_limited_greedy"));
            }
            (Choice::BiasedSigmoids { .. } | Choice::GroupedLogits, _) => {}
            (Choice::Logits | Choice::BiasedShares | Choice::Top, _) => return Ok(()),
        }
        map.insert("n_group".into(), json!(groups.unwrap_or(1)));
        map.insert("topk_group".into(), json!(kept.or(groups).unwrap_or(1)));
        Ok(())
    }

    /// What layers of Gemma 4 have that is not the same in all of them.
    fn own_layers(&self, map: &mut Map<String, Json>) -> Result<()> {
        let needed = |suffix: &str| self.integer(suffix)?.ok_or_else(|| self.missing(suffix));
        let turned = self.integer("rope.dimension_count_swa")?;
        if let Some(turned) = turned.filter(|turned| map["head_dim"].as_u64() != Some(*turned)) {
            let what = format!("`{}` = {turned}", self.key("rope.dimension_count_swa"));
            return Err(self.unsupported(what, "whole heads of layers with a window"));
        }
        let local = self.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
        let mut full = map.remove("rope_scaling").unwrap_or(json!({"rope_type": "default"}));
        full["rope_theta"] = map["rope_theta"].clone();
        let sliding = json!({"rope_type": "default", "rope_theta": local});
        map.insert("rope_parameters".into(), json!({"full_attention": full, "sliding_attention": sliding}));
        map.insert("global_head_dim".into(), json!(needed("attention.key_length")?));
        map.insert("num_global_key_value_heads".into(), json!(self.kv_heads_of(false)?));
        let sliding = self.metadata.flags(&self.key("attention.sliding_window_pattern"))?.unwrap_or_default();
        if !sliding.is_empty() {
            let layers = map["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
            let name = |sliding: &bool| if *sliding { "sliding_attention" } else { "full_attention" };
            map.insert("layer_types".into(), sliding.iter().take(layers).map(name).collect());
        }
        let full = sliding.iter().position(|sliding| !sliding);
        let keys_alone = |layer| (self.find)(&format!("blk.{layer}.attn_v.weight")).is_none();
        map.insert("attention_k_eq_v".into(), json!(full.is_some_and(keys_alone)));
        let sharing = self.integer("attention.shared_kv_layers")?.unwrap_or(0);
        map.insert("num_kv_shared_layers".into(), json!(sharing));
        map.insert("use_double_wide_mlp".into(), json!(self.widths()?.1));
        let given = self.integer("embedding_length_per_layer_input")?.unwrap_or(0);
        map.insert("hidden_size_per_layer_input".into(), json!(given));
        map.insert("vocab_size_per_layer_input".into(), map["vocab_size"].clone());
        Ok(())
    }

    /// Heads of K and V of layers with a window, or of those without.
    pub(super) fn kv_heads_of(&self, windowed: bool) -> Result<Option<u64>> {
        let key = self.key("attention.head_count_kv");
        if !self.is_list("attention.head_count_kv") {
            return self.integer("attention.head_count_kv");
        }
        let heads = self.numbers_of_layers("attention.head_count_kv")?;
        let pattern = self.metadata.flags(&self.key("attention.sliding_window_pattern"))?.unwrap_or_default();
        if pattern.len() != heads.len() {
            let problem =
                format!("has {} entries, for {} layers with or without a window", heads.len(), pattern.len());
            return Err(self.metadata.problem(&key, problem));
        }
        let mut of_kind = heads.iter().zip(&pattern).filter(|(_, sliding)| **sliding == windowed);
        let first = of_kind.next().map(|(heads, _)| *heads);
        match of_kind.find(|(heads, _)| Some(**heads) != first) {
            None => Ok(first.map(|heads| heads as u64)),
            Some(_) => Err(self.metadata.problem(&key, "differs between layers of one kind")),
        }
    }

    /// Width of the feed-forward part of layers with K and V of their own.
    pub(super) fn own_width(&self) -> Result<Option<u64>> {
        if !self.is_list("feed_forward_length") {
            return self.integer("feed_forward_length");
        }
        Ok(Some(self.widths()?.0))
    }

    /// The same, and whether it is twice as wide in the others.
    fn widths(&self) -> Result<(u64, bool)> {
        if !self.is_list("feed_forward_length") {
            return Ok((0, false));
        }
        let widths = self.numbers_of_layers("feed_forward_length")?;
        let sharing = self.integer("attention.shared_kv_layers")?.unwrap_or(0) as usize;
        let (own, others) = widths.split_at(widths.len().saturating_sub(sharing));
        let (first, last) = (own.first().copied().unwrap_or(0.0), others.last().copied());
        let wide = last.is_some_and(|last| last == 2.0 * first);
        let other = if wide { 2.0 * first } else { first };
        match own.iter().all(|width| *width == first) && others.iter().all(|width| *width == other) {
            true => Ok((first as u64, wide)),
            false => {
                let problem = "is neither the same in all layers nor twice that in those that share K and V";
                Err(self.metadata.problem(&self.key("feed_forward_length"), problem))
            }
        }
    }

    /// Layers without heads of K and V are short convolutions.
    fn short_conv(&self, map: &mut Map<String, Json>) -> Result<()> {
        let heads = self.numbers_of_layers("attention.head_count_kv")?;
        let types = heads.iter().map(|heads| if *heads == 0.0 { "conv" } else { "full_attention" });
        map.insert("layer_types".into(), types.collect());
        let taps = self.integer("shortconv.l_cache")?.ok_or_else(|| self.missing("shortconv.l_cache"))?;
        map.insert("conv_L_cache".into(), json!(taps));
        map.insert("block_auto_adjust_ff_dim".into(), json!(false));
        Ok(())
    }

    fn delta_net(&self, map: &mut Map<String, Json>) -> Result<()> {
        let needed = |suffix: &str| self.integer(suffix)?.ok_or_else(|| self.missing(suffix));
        let (heads, values) = (needed("ssm.time_step_rank")?, needed("ssm.inner_size")?);
        if heads == 0 || !values.is_multiple_of(heads) {
            let problem = format!("is {values}, not a multiple of ssm.time_step_rank = {heads}");
            return Err(self.metadata.problem(&self.key("ssm.inner_size"), problem));
        }
        for (field, value) in [
            ("linear_num_key_heads", needed("ssm.group_count")?),
            ("linear_num_value_heads", heads),
            ("linear_key_head_dim", needed("ssm.state_size")?),
            ("linear_value_head_dim", values / heads),
            ("linear_conv_kernel_dim", needed("ssm.conv_kernel")?),
        ] {
            map.insert(field.into(), json!(value));
        }
        if let Some(every) = self.integer("full_attention_interval")? {
            map.insert("full_attention_interval".into(), json!(every));
        }
        if let Some(recurrent) = self.metadata.flags(&self.key("attention.recurrent_layers"))? {
            let layers = map["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
            let name = |recurrent: &bool| if *recurrent { "linear_attention" } else { "full_attention" };
            // Those behind the last one, which propose drafts, may be among them.
            map.insert("layer_types".into(), recurrent.iter().take(layers).map(name).collect());
        }
        Ok(())
    }

    /// Layers without heads of K and V are Mamba-2.
    fn mamba(&self, names: &MambaFields, map: &mut Map<String, Json>) -> Result<()> {
        let needed = |suffix: &str| self.integer(suffix)?.ok_or_else(|| self.missing(suffix));
        let (heads, values) = (needed("ssm.time_step_rank")?, needed("ssm.inner_size")?);
        if heads == 0 || !values.is_multiple_of(heads) {
            let problem = format!("is {values}, not a multiple of ssm.time_step_rank = {heads}");
            return Err(self.metadata.problem(&self.key("ssm.inner_size"), problem));
        }
        let types = self.numbers_of_layers("attention.head_count_kv")?;
        let biased = |layer| (self.find)(&format!("blk.{layer}.ssm_conv1d.bias")).is_some();
        let biased = (0..types.len()).any(biased);
        map.insert(names.bias.into(), json!(biased));
        for (field, value) in [
            (names.heads.0, heads),
            (names.head_dim.0, values / heads),
            (names.groups.0, needed("ssm.group_count")?),
            (names.state_dim.0, needed("ssm.state_size")?),
            (names.taps.0, needed("ssm.conv_kernel")?),
        ] {
            map.insert(field.into(), json!(value));
        }
        let layers = map["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
        let types = types.iter().take(layers).map(|heads| if *heads == 0.0 { "mamba" } else { "attention" });
        if !self.architecture.family().single {
            map.insert("layer_types".into(), types.collect());
            return Ok(());
        }
        // Layers with a width that feeds forward do nothing else.
        let widths = self.numbers_of_layers("feed_forward_length")?;
        let routed = |layer| (self.find)(&format!("blk.{layer}.ffn_gate_inp.weight")).is_some();
        let part = |(layer, (kind, width)): (usize, (&'static str, &f64))| match kind {
            "mamba" if *width > 0.0 && routed(layer) => "moe",
            "mamba" if *width > 0.0 => "mlp",
            kind => kind,
        };
        map.insert("layers_block_type".into(), types.zip(&widths).enumerate().map(part).collect());
        Ok(())
    }

    /// Sizes of latent attention, which llama.cpp describes as attention of one head of K and V.
    fn latent(&self, map: &mut Map<String, Json>) -> Result<()> {
        let needed = |suffix: &str| self.integer(suffix)?.ok_or_else(|| self.missing(suffix));
        let (key, rotated) = (needed("attention.key_length_mla")?, needed("rope.dimension_count")?);
        let Some(nope) = key.checked_sub(rotated) else {
            let problem = format!("is {key}, less than rope.dimension_count = {rotated}");
            return Err(self.metadata.problem(&self.key("attention.key_length_mla"), problem));
        };
        let q_rank = self.integer("attention.q_lora_rank")?.filter(|rank| *rank > 0);
        map.insert("q_lora_rank".into(), json!(q_rank));
        for (field, value) in [
            ("kv_lora_rank", needed("attention.kv_lora_rank")?),
            ("qk_nope_head_dim", nope),
            ("qk_rope_head_dim", rotated),
            ("v_head_dim", needed("attention.value_length_mla")?),
        ] {
            map.insert(field.into(), json!(value));
        }
        Ok(())
    }
}
