//! From a GGUF file's metadata to the same [`Config`] that a config.json gives.
//!
//! Owns: which key means which field, and what a file of this format implies (a table of architectures; no `output.weight`
//! means a tied one). Must never: serve a key that would change the arithmetic and is not understood. The keys are written
//! as the text of a config.json and parsed by the one parser there is, so that every check is made once; its errors name
//! the GGUF keys.

use serde_json::{Map, Value as Json, json};

use super::architecture::{self, ARCHITECTURES, Architecture, neutral_of};
use super::names::{Names, ROPE_FREQS, ROPE_LONG, ROPE_SHORT};
use super::vocabulary::Vocabulary;
use super::{Metadata, TensorInfo, Value};
use crate::backend::DType;
use crate::checkpoint::generation::GenerationConfig;
use crate::checkpoint::json::Fields;
use crate::config::{Config, Mixer, rotated_layers};
use crate::error::{ModelError, Result};
use crate::family::{Bias, DeltaTensors, ExpertTensors, Rotated, Shared, Window};
use crate::quant::Encoding;
use crate::rope::RopeScaling;

/// Keys (after the architecture's name) that mean another decoder unless they have one of these values.
const NEUTRAL: &[(&str, &[f64])] = &[
    ("attention.clamp_kqv", &[0.0]),
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.temperature_scale", &[0.0]),
    ("attention.temperature_length", &[0.0]),
    ("rope.scaling.alpha", &[0.0]),
    ("rope.scaling.yarn_ext_factor", &[1.0]),
];

/// The same, where the family has no latents, no mixture of experts, and no soft caps.
const NEUTRAL_KEYS: &[(&str, &[f64])] = &[
    ("attention.q_lora_rank", &[0.0]),
    ("attention.kv_lora_rank", &[0.0]),
    ("rope.scaling.yarn_log_multiplier", &[0.0]),
];
const NEUTRAL_DENSE: &[(&str, &[f64])] = &[("expert_count", &[0.0]), ("expert_used_count", &[0.0])];
const NEUTRAL_UNCAPPED: &[(&str, &[f64])] =
    &[("attn_logit_softcapping", &[0.0]), ("final_logit_softcapping", &[0.0])];
/// The same, where the family has no multipliers.
const NEUTRAL_UNSCALED: &[(&str, &[f64])] =
    &[("residual_scale", &[0.0, 1.0]), ("embedding_scale", &[0.0, 1.0]), ("attention.scale", &[0.0])];
/// The same, where layers keep K and V of their own and are given nothing beside the residual stream.
const NEUTRAL_OWN: &[(&str, &[f64])] =
    &[("attention.shared_kv_layers", &[0.0]), ("embedding_length_per_layer_input", &[0.0])];
/// The same, where logits are not scaled either.
const NEUTRAL_LOGITS: &[(&str, &[f64])] = &[("logit_scale", &[0.0, 1.0])];

/// How many frequencies of a rotation are of each axis.
const SECTIONS: &str = "rope.dimension_sections";

/// What the metadata says.
pub struct Described {
    pub config: Config,
    /// The equivalent config.json: part of the model's digest.
    pub text: Vec<u8>,
    pub generation: GenerationConfig,
    pub names: Names,
}

/// Finds a stored tensor by its name in the file.
pub type Find<'a> = &'a dyn Fn(&str) -> Option<(&'a TensorInfo, &'a [u8])>;

/// Reads the decoder's configuration. `find` looks a stored tensor up in all files of the model.
pub fn describe<'a>(metadata: Metadata<'a>, find: Find<'a>) -> Result<Described> {
    let Some(name) = metadata.text("general.architecture")? else {
        return Err(metadata.problem("general.architecture", "is missing: it names the model family"));
    };
    let mut found = None;
    for architecture in ARCHITECTURES.iter().filter(|architecture| architecture.name == name) {
        let holds = match architecture.when {
            Some((suffix, least)) => {
                metadata.number(&format!("{name}.{suffix}"))?.is_some_and(|value| value >= least)
            }
            None => true,
        };
        found = Some(architecture).filter(|_| holds).or(found);
    }
    let Some(architecture) = found else {
        return Err(ModelError::Family {
            file: metadata.file().to_owned(),
            family: name.chars().take(60).collect(),
            supported: architecture::names(),
        });
    };
    let reader = Reader { metadata, architecture, find };
    reader.refuse_unsupported()?;
    let vocabulary = Vocabulary::read(metadata)?;
    let map = reader.fields(vocabulary.as_ref())?;
    let aliases = reader.aliases();
    let mut config = Config::from_fields(Fields::new(metadata.file(), &map).with_names(&aliases))?;
    reader.complete(&mut config)?;
    let names = Names::of(&config, architecture.interleaved);
    if names.interleaved && config.rope.rotary_dim != config.head_dim {
        let key = reader.key("rope.dimension_count");
        let problem = format!("is {}, expected all {} dimensions", config.rope.rotary_dim, config.head_dim);
        return Err(metadata.problem(&key, problem));
    }
    let generation = generation(metadata, vocabulary.as_ref())?;
    Ok(Described { config, text: Json::Object(map).to_string().into_bytes(), generation, names })
}

/// (field of config.json, key after the architecture's name)
const INTEGERS: &[(&str, &str)] = &[
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("intermediate_size", "feed_forward_length"),
    ("max_position_embeddings", "context_length"),
];

pub(super) struct Reader<'a> {
    pub(super) metadata: Metadata<'a>,
    pub(super) architecture: &'static Architecture,
    pub(super) find: Find<'a>,
}

impl Reader<'_> {
    pub(super) fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.architecture.name)
    }

    pub(super) fn number(&self, suffix: &str) -> Result<Option<f64>> {
        self.metadata.number(&self.key(suffix))
    }

    pub(super) fn missing(&self, suffix: &str) -> ModelError {
        self.metadata.problem(&self.key(suffix), "is missing")
    }

    /// An integer, or a list of one per layer that are all the same.
    pub(super) fn integer(&self, suffix: &str) -> Result<Option<u64>> {
        let key = self.key(suffix);
        if !self.metadata.is_array(&key) {
            return self.metadata.integer(&key);
        }
        let list = self.metadata.numbers(&key)?.unwrap_or_default();
        match list.first() {
            Some(first) if list.iter().all(|number| number == first) && *first >= 0.0 => {
                Ok(Some(*first as u64))
            }
            _ => Err(self.metadata.problem(&key, "differs from layer to layer, which is not supported")),
        }
    }

    pub(super) fn unsupported(&self, what: String, supported: &str) -> ModelError {
        ModelError::Unsupported {
            file: self.metadata.file().to_owned(),
            what,
            supported: format!("supported: {supported}"),
        }
    }

    fn refuse_unsupported(&self) -> Result<()> {
        let family = self.architecture.family();
        let experts = match &family.mixture {
            Some(mixture) => neutral_of(mixture),
            None => NEUTRAL_DENSE.to_vec(),
        };
        let keys = if family.latent { &[] } else { NEUTRAL_KEYS };
        let scaled = family.multipliers || family.logit_scale.is_some();
        let logits = if scaled { &[] } else { NEUTRAL_LOGITS };
        let caps = if family.softcaps.is_some() { &[] } else { NEUTRAL_UNCAPPED };
        let scales = if family.multipliers { &[] } else { NEUTRAL_UNSCALED };
        let own = if family.shares_kv && family.layer_inputs { &[] } else { NEUTRAL_OWN };
        let dense = NEUTRAL.iter().chain(keys).chain(logits).chain(caps).chain(scales).chain(own);
        for (suffix, neutral) in dense.chain(&experts) {
            if let Some(found) = self.number(suffix)?.filter(|found| !neutral.contains(found)) {
                let what = format!("`{}` = {found}", self.key(suffix));
                return Err(self.unsupported(what, "decoders without it"));
            }
        }
        // Elsewhere it says where a scaled rotation comes from.
        let finetuned = self.metadata.flag(&self.key("rope.scaling.finetuned"))?;
        if finetuned == Some(false) && family.multipliers && family.rotated != Rotated::Stated {
            let what = format!("`{}` = false", self.key("rope.scaling.finetuned"));
            return Err(self.unsupported(what, "attention with a rotation"));
        }
        if self.metadata.flag(&self.key("attention.causal"))? == Some(false) {
            let what = format!("`{}` = false", self.key("attention.causal"));
            return Err(self.unsupported(what, "causal attention"));
        }
        Ok(())
    }

    /// The fields of the equivalent config.json.
    fn fields(&self, vocabulary: Option<&Vocabulary<'_>>) -> Result<Map<String, Json>> {
        let mut map = Map::new();
        map.insert("model_type".into(), json!(self.architecture.model_type));
        for (field, suffix) in INTEGERS {
            let value = match *suffix {
                // That of those layers that feed forward.
                "feed_forward_length" if self.architecture.family().single => {
                    let widths = self.numbers_of_layers(suffix)?;
                    Some(widths.into_iter().fold(0.0, f64::max) as u64)
                }
                "feed_forward_length" if self.architecture.family().shares_kv => self.own_width()?,
                _ => self.integer(suffix)?,
            };
            map.insert((*field).into(), json!(value.ok_or_else(|| self.missing(suffix))?));
        }
        // Layers that propose drafts are counted there, and lie behind the others.
        let drafting = self.integer("nextn_predict_layers")?.unwrap_or(0);
        if let Some(blocks) = map["num_hidden_layers"].as_u64().filter(|_| drafting > 0) {
            let Some(layers) = blocks.checked_sub(drafting).filter(|layers| *layers > 0) else {
                let problem = format!("is {drafting} of block_count = {blocks}");
                return Err(self.metadata.problem(&self.key("nextn_predict_layers"), problem));
            };
            map.insert("num_hidden_layers".into(), json!(layers));
        }
        let family = self.architecture.family();
        let (hidden, heads) = (map["hidden_size"].as_u64(), map["num_attention_heads"].as_u64());
        let kv_heads = match family {
            family if family.latent => heads,
            family if family.full_heads => self.kv_heads_of(true)?.or(self.kv_heads_of(false)?),
            family if family.short_conv || family.mamba.is_some() => {
                let heads = self.numbers_of_layers("attention.head_count_kv")?;
                let mut some = heads.iter().filter(|heads| **heads != 0.0);
                let first = some.next().copied();
                if some.any(|heads| Some(*heads) != first) {
                    let key = self.key("attention.head_count_kv");
                    return Err(self.metadata.problem(&key, "differs between layers that attend"));
                }
                first.map(|first| first as u64)
            }
            _ => self.integer("attention.head_count_kv")?.or(heads),
        };
        map.insert("num_key_value_heads".into(), json!(kv_heads));
        let even = hidden.zip(heads).and_then(|(hidden, heads)| hidden.checked_div(heads));
        let all_dim = self.integer("attention.key_length")?.or(even).unwrap_or(0);
        let head_dim = match family.full_heads {
            true => self.integer(self.head_key())?.ok_or_else(|| self.missing(self.head_key()))?,
            false => all_dim,
        };
        map.insert("head_dim".into(), json!(head_dim));
        for (suffix, dim) in [("attention.value_length", all_dim), ("attention.value_length_swa", head_dim)] {
            let value_dim = self.integer(suffix)?.filter(|_| !family.latent);
            if let Some(value_dim) = value_dim.filter(|value_dim| *value_dim != dim) {
                let what = format!("`{}` = {value_dim} beside keys of {dim}", self.key(suffix));
                return Err(self.unsupported(what, "keys and values of one length"));
            }
        }
        let eps = self.number(self.eps_key())?.ok_or_else(|| self.missing(self.eps_key()))?;
        map.insert(family.eps_field.into(), json!(eps));
        map.insert("rope_theta".into(), json!(self.number("rope.freq_base")?.unwrap_or(10_000.0)));
        let rotated = self.integer("rope.dimension_count")?.unwrap_or(all_dim);
        if !family.latent && family.rotated != Rotated::Never {
            // Half a dimension more, so that rounding down gives exactly `rotated`.
            let part = if rotated == all_dim { 1.0 } else { (rotated as f64 + 0.5) / all_dim as f64 };
            map.insert("partial_rotary_factor".into(), json!(part));
        }
        let mut scaling = self.scaling()?;
        if let Some(sections) = self.sections()? {
            let rope = scaling.get_or_insert_with(|| json!({"rope_type": "default"}));
            rope["mrope_section"] = sections;
            rope["mrope_interleaved"] = json!(self.architecture.mrope_interleaved);
        }
        if let Some(scaling) = scaling {
            map.insert("rope_scaling".into(), scaling);
        }
        let vocab = match vocabulary {
            Some(vocabulary) => Some(vocabulary.tokens.len() as u64),
            None => self.integer("vocab_size")?,
        };
        map.insert("vocab_size".into(), json!(vocab.ok_or_else(|| self.missing("vocab_size"))?));
        map.insert("tie_word_embeddings".into(), json!((self.find)("output.weight").is_none()));
        self.own_fields(&mut map)?;
        Ok(map)
    }

    /// What a field of [`Reader::fields`] is called in the file.
    fn aliases(&self) -> Vec<(&'static str, String)> {
        let mut aliases: Vec<_> = INTEGERS.iter().map(|(field, suffix)| (*field, self.key(suffix))).collect();
        for (field, suffix) in [
            ("num_key_value_heads", "attention.head_count_kv"),
            ("head_dim", self.head_key()),
            ("global_head_dim", "attention.key_length"),
            ("num_global_key_value_heads", "attention.head_count_kv"),
            ("num_kv_shared_layers", "attention.shared_kv_layers"),
            ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
            (self.architecture.family().eps_field, self.eps_key()),
            ("rope_theta", "rope.freq_base"),
            ("partial_rotary_factor", "rope.dimension_count"),
            ("rope_scaling", "rope.scaling.type"),
            ("rope_scaling.factor", "rope.scaling.factor"),
            ("rope_scaling.mrope_section", SECTIONS),
            ("rope_local_base_freq", "rope.freq_base_swa"),
            ("sliding_window", "attention.sliding_window"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("attention_multiplier", "attention.scale"),
            ("logits_scaling", "logit_scale"),
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("logit_scale", "logit_scale"),
            ("routed_scaling_factor", "expert_weights_scale"),
            ("n_group", "expert_group_count"),
            ("topk_group", "expert_group_used_count"),
            ("conv_L_cache", "shortconv.l_cache"),
            ("mamba_n_heads", "ssm.time_step_rank"),
            ("mamba_d_head", "ssm.inner_size"),
            ("mamba_n_groups", "ssm.group_count"),
            ("mamba_d_state", "ssm.state_size"),
            ("mamba_d_conv", "ssm.conv_kernel"),
            ("mamba_num_heads", "ssm.time_step_rank"),
            ("mamba_head_dim", "ssm.inner_size"),
            ("n_groups", "ssm.group_count"),
            ("ssm_state_size", "ssm.state_size"),
            ("conv_kernel", "ssm.conv_kernel"),
            ("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
            ("moe_latent_size", "moe_latent_size"),
            ("shared_intermediate_size", "expert_shared_feed_forward_length"),
            ("linear_num_key_heads", "ssm.group_count"),
            ("linear_num_value_heads", "ssm.time_step_rank"),
            ("linear_key_head_dim", "ssm.state_size"),
            ("linear_value_head_dim", "ssm.inner_size"),
            ("linear_conv_kernel_dim", "ssm.conv_kernel"),
            ("q_lora_rank", "attention.q_lora_rank"),
            ("kv_lora_rank", "attention.kv_lora_rank"),
            ("qk_nope_head_dim", "attention.key_length_mla"),
            ("qk_rope_head_dim", "rope.dimension_count"),
            ("v_head_dim", "attention.value_length_mla"),
            ("rope_scaling.original_max_position_embeddings", "rope.scaling.original_context_length"),
        ] {
            aliases.push((field, self.key(suffix)));
        }
        aliases.push(("rope_scaling.long_factor", ROPE_LONG.to_owned()));
        aliases.push(("rope_scaling.short_factor", ROPE_SHORT.to_owned()));
        aliases.push(("vocab_size", "tokenizer.ggml.tokens".to_owned()));
        aliases
    }

    /// Of the width of heads, or of those of layers with a window, where these have others.
    fn head_key(&self) -> &'static str {
        match self.architecture.family().full_heads {
            true => "attention.key_length_swa",
            false => "attention.key_length",
        }
    }

    /// Of norms.
    fn eps_key(&self) -> &'static str {
        match self.architecture.family().centered {
            true => "attention.layer_norm_epsilon",
            false => "attention.layer_norm_rms_epsilon",
        }
    }

    /// One number per layer.
    pub(super) fn numbers_of_layers(&self, suffix: &str) -> Result<Vec<f64>> {
        let blocks = self.integer("block_count")?.unwrap_or(0);
        let list = self.metadata.numbers(&self.key(suffix))?.ok_or_else(|| self.missing(suffix))?;
        if list.len() as u64 != blocks {
            let problem = format!("has {} entries for {blocks} layers", list.len());
            return Err(self.metadata.problem(&self.key(suffix), problem));
        }
        Ok(list)
    }

    /// The axes of M-RoPE: how many frequencies are of time, of height and of width. The converter adds a 0, for an axis that no
    /// language model has; all of them are 0 where there is one position for a token.
    fn sections(&self) -> Result<Option<Json>> {
        let key = self.key(SECTIONS);
        let Some(list) = self.metadata.numbers(&key)? else { return Ok(None) };
        let (axes, others) = list.split_at(list.len().min(3));
        if let Some(more) = others.iter().find(|more| **more != 0.0) {
            let problem =
                format!("gives {more} frequencies to a fourth axis; there are time, height and width");
            return Err(self.metadata.problem(&key, problem));
        }
        if axes.iter().all(|size| *size == 0.0) {
            return Ok(None);
        }
        // What is no number of frequencies is refused with the rest of the rotation.
        let whole =
            |size: &f64| if *size >= 0.0 && size.fract() == 0.0 { json!(*size as u64) } else { json!(size) };
        Ok(Some(axes.iter().map(whole).collect()))
    }

    fn scaling(&self) -> Result<Option<Json>> {
        let original = self.integer("rope.scaling.original_context_length")?;
        let attention = self.number("rope.scaling.attn_factor")?;
        if let (Some(long), Some(short)) = (self.factors(ROPE_LONG)?, self.factors(ROPE_SHORT)?) {
            return Ok(Some(json!({
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original.ok_or_else(|| {
                    self.missing("rope.scaling.original_context_length")
                })?,
                "attention_factor": attention.unwrap_or(1.0),
            })));
        }
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        let factor = factor.filter(|factor| *factor != 0.0);
        let kind = self.metadata.text(&self.key("rope.scaling.type"))?;
        match (kind.unwrap_or("linear"), factor) {
            ("none", _) | ("linear", None) => Ok(None),
            ("linear", Some(factor)) => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
            ("yarn", Some(factor)) => {
                let own = self.number("rope.scaling.yarn_attn_factor")?.or(attention).unwrap_or(1.0);
                let mut scaling = json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "truncate": !self.architecture.yarn_unrounded,
                    "original_max_position_embeddings": original,
                    "attention_factor": own * if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 },
                });
                if self.architecture.family().latent
                    && let Some(weight) = self.number("rope.scaling.yarn_log_multiplier")?
                {
                    // A tenth of `mscale_all_dim`; cosines and sines are scaled by a quotient that is one.
                    scaling["mscale_all_dim"] = json!(10.0 * weight);
                    scaling["attention_factor"] = json!(1.0);
                }
                for (field, suffix) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                    if let Some(beta) = self.number(&format!("rope.scaling.{suffix}"))? {
                        scaling[field] = json!(beta);
                    }
                }
                Ok(Some(scaling))
            }
            (kind, factor) => {
                let kind: String = kind.chars().take(60).collect();
                let what = format!("rope scaling `{kind}` with factor {factor:?} and no tensor of factors");
                Err(self.unsupported(what, "linear, yarn, and factors in rope_freqs or rope_factors_*"))
            }
        }
    }

    /// A small vector of f32 that belongs to the configuration.
    fn factors(&self, tensor: &str) -> Result<Option<Vec<f64>>> {
        let Some((info, bytes)) = (self.find)(tensor) else { return Ok(None) };
        if info.encoding != Ok(Encoding::Plain(DType::F32)) || info.shape.len() != 1 {
            return Err(self.unsupported(format!("tensor `{tensor}` as it is"), "a vector of F32"));
        }
        let factors: Vec<f64> =
            bytes.as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect();
        if factors.iter().any(|factor| !factor.is_finite() || *factor <= 0.0) {
            return Err(self.metadata.problem(tensor, "must hold only numbers above 0"));
        }
        Ok(Some(factors))
    }

    /// What a config.json cannot say: what is known from which tensors there are.
    fn complete(&self, config: &mut Config) -> Result<()> {
        let factors = self.factors(ROPE_FREQS)?;
        if factors.is_none() && config.family.full_heads {
            let problem = "is missing: it says which dimensions of layers without a window are rotated";
            return Err(self.metadata.problem(ROPE_FREQS, problem));
        }
        if let Some(factors) = factors {
            if config.rope.scaling != RopeScaling::None {
                let what = format!("rope scaling beside the tensor `{ROPE_FREQS}`");
                return Err(self.unsupported(what, "one or the other"));
            }
            if factors.len() != config.rope.rotary_dim / 2 {
                let expected = config.rope.rotary_dim / 2;
                let problem = format!("holds {} factors, expected {expected}", factors.len());
                return Err(self.metadata.problem(ROPE_FREQS, problem));
            }
            config.rope.scaling = RopeScaling::Factors { factors };
            if config.rope.table(0).inv_freq.iter().any(|freq| !freq.is_finite()) {
                return Err(self.metadata.problem(ROPE_FREQS, "gives frequencies that are not finite"));
            }
        }
        let window =
            self.integer("attention.sliding_window")?.filter(|window| *window > 0 && !config.chunked);
        if let Some(window) = window {
            let window = usize::try_from(window).unwrap_or(usize::MAX);
            let sliding = self.sliding_layers(config)?;
            config.windows = sliding.into_iter().map(|sliding| sliding.then_some(window)).collect();
            let listed = std::mem::take(&mut config.rotated);
            config.rotated = rotated_layers(&config.family, listed, &config.windows);
        }
        if let Err(problem) = config.check_sources() {
            return Err(self.metadata.problem(&self.key("attention.shared_kv_layers"), problem));
        }
        // What is added to one is stored with the one, and experts are stacked.
        config.norm_offset = 0.0;
        config.family.layer_scale &= (self.find)("blk.0.layer_output_scale.weight").is_some();
        if let Some(mixture) = &mut config.family.mixture {
            mixture.stored = match (self.find)("blk.0.ffn_gate_up_exps.weight") {
                Some(_) => ExpertTensors::Halves,
                None => ExpertTensors::Stacked,
            };
            if let Shared::Halves(width) = mixture.shared {
                mixture.shared = Shared::Width(width);
            }
        }
        if let Some(stored) = &mut config.family.delta {
            *stored = match stored {
                DeltaTensors::ByKeyHead => DeltaTensors::GgmlByKeyHead,
                _ => DeltaTensors::GgmlEach,
            };
        }
        if let Some(fields) = &mut config.family.mamba {
            fields.decay_as_is = true;
        }
        let has = |tensor: &str| (self.find)(tensor).is_some();
        let optional = |rule: Bias| matches!(rule, Bias::Config(_));
        if optional(config.family.qkv_bias) {
            config.qkv_bias = has("blk.0.attn_q.bias");
        }
        if optional(config.family.o_bias) {
            config.o_bias = has("blk.0.attn_output.bias");
        }
        if optional(config.family.mlp_bias) {
            config.mlp_bias = has("blk.0.ffn_down.bias");
        }
        for mixer in &mut config.mixers {
            match mixer {
                // Files of before April 2025 have them together.
                Mixer::Latent(latent) => latent.apart = !has("blk.0.attn_kv_b.weight"),
                Mixer::Delta(net) => net.tiled = self.architecture.tiled,
                Mixer::Attention | Mixer::Conv(_) | Mixer::Mamba(_) | Mixer::Nothing => {}
            }
        }
        Ok(())
    }
}

impl Reader<'_> {
    /// Which layers have the window: as a list or a period says, else as in the family.
    fn sliding_layers(&self, config: &Config) -> Result<Vec<bool>> {
        let key = self.key("attention.sliding_window_pattern");
        let every = match config.family.window {
            Window::Pattern { every, .. } => Some(every as u64),
            _ => None,
        };
        if self.metadata.is_array(&key) {
            let list = self.metadata.flags(&key)?.unwrap_or_default();
            if list.len() != config.layers {
                let problem = format!("has {} entries for {} layers", list.len(), config.layers);
                return Err(self.metadata.problem(&key, problem));
            }
            return Ok(list);
        }
        let every = self.metadata.integer(&key)?.or(every);
        Ok((1..=config.layers as u64)
            .map(|layer| every.is_none_or(|every| layer.checked_rem(every) != Some(0)))
            .collect())
    }
}

fn generation(metadata: Metadata<'_>, vocabulary: Option<&Vocabulary<'_>>) -> Result<GenerationConfig> {
    let sampling = |name: &str| metadata.number(&format!("general.sampling.{name}"));
    let float = |number: Option<f64>| number.map(|number| number as f32);
    let ids = vocabulary.map(|vocabulary| &vocabulary.ids);
    Ok(GenerationConfig {
        eos_token_ids: ids.map(|ids| ids.ends.clone()).unwrap_or_default(),
        bos_token_id: ids.and_then(|ids| ids.bos),
        temperature: float(sampling("temp")?),
        top_k: sampling("top_k")?.map(|number| number.max(0.0) as u32),
        top_p: float(sampling("top_p")?),
        min_p: float(sampling("min_p")?),
        repetition_penalty: float(sampling("penalty_repeat")?),
        ..GenerationConfig::default()
    })
}

impl Reader<'_> {
    pub(super) fn is_list(&self, suffix: &str) -> bool {
        self.metadata.is_array(&self.key(suffix))
    }
}

impl Metadata<'_> {
    fn is_array(&self, key: &str) -> bool {
        matches!(self.value(key), Some(Value::Array(_)))
    }
}
