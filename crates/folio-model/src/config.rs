//! config.json, parsed into everything the decoder needs.
//!
//! Owns: reading a checkpoint's configuration of today's and yesterday's style (`rope_parameters` or `rope_theta` +
//! `rope_scaling`), filling what it leaves out from the family's row. Must never: look at a weight, or believe what is
//! said about their dtype (the tensors themselves decide; how quantized ones are packed is told here). Invariant: a [`Config`] that exists describes a decoder Folio
//! can run; sizes are bounded so that products of two or three of them cannot overflow.

mod blocks;
mod experts;
mod latent;
mod layers;
mod mamba;
mod short_conv;

pub use experts::Experts;
pub use latent::Latent;
pub use layers::HeadSizes;
pub use mamba::Mamba;
use serde_json::Value;
pub use short_conv::ShortConv;

use crate::checkpoint::json::{Fields, parse_object};
use crate::checkpoint::quantized::Quantization;
use crate::error::{ModelError, Result};
use crate::family::{
    Bias, FAMILIES, Family, Gate, KvHeadsDefault, LocalRope, QkNorm, Rotated, Softcaps, Window,
    supported_list,
};
use crate::program::{Activation, ConvolutionSpec, DeltaSpec, Temper};
use crate::rope::{RopeConfig, RopePart};

const WIDTH_MAX: usize = 1 << 20;
const LAYERS_MAX: usize = 1 << 12;
const VOCAB_MAX: usize = 1 << 24;
const POSITION_MAX: usize = 1 << 28;
/// Positions that a convolution sees.
const TAPS_MAX: usize = 16;
/// Values of the states of all heads of a layer; those of Qwen3.5-27B have 786,432.
const STATE_MAX: usize = 1 << 26;

/// The decoder of one checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub family: Family,
    pub vocab: usize,
    pub hidden: usize,
    /// Width of the feed-forward part, or of one expert of it.
    pub intermediate: usize,
    pub experts: Option<Experts>,
    pub layers: usize,
    pub heads: usize,
    /// Of layers with a window, where others have heads of their own.
    pub kv_heads: usize,
    /// Likewise, of a query and a key, as they are projected.
    pub head_dim: usize,
    /// Heads of layers without a window, where they are others.
    pub full_heads: Option<HeadSizes>,
    /// Values of layers without a window are made of what their keys are made of.
    pub full_keys_are_values: bool,
    /// How many of the last layers read the K and V of a layer before them.
    pub sharing_layers: usize,
    /// The feed-forward part of those is twice as wide.
    pub double_wide: bool,
    /// Values that each layer is given of a token.
    pub layer_input: Option<usize>,
    pub eps: f32,
    /// The embedding table is also the output matrix.
    pub tied: bool,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Never [`QkNorm::Stated`].
    pub qk_norm: QkNorm,
    /// One entry per layer.
    pub mixers: Vec<Mixer>,
    /// One entry per layer.
    pub feeds: Vec<Feed>,
    /// One entry per layer: whether q and k are rotated.
    pub rotated: Vec<bool>,
    pub rope: RopeConfig,
    /// Rotary embedding of layers with a window, where it is another.
    pub local_rope: Option<RopeConfig>,
    /// One entry per layer: how many positions, its own among them, a token attends to. `None`: all before it.
    pub windows: Vec<Option<usize>>,
    /// Windows begin where a run of as many positions does.
    pub chunked: bool,
    /// What queries of layers that do not rotate are multiplied by.
    pub temper: Option<Temper>,
    /// Multiplies q.k.
    pub attention_scale: f64,
    /// `cap * tanh(x / cap)` of what q.k is scaled to.
    pub attention_softcap: Option<f32>,
    /// The same of logits.
    pub logit_softcap: Option<f32>,
    pub activation: Activation,
    pub embedding_scale: Option<EmbeddingScale>,
    /// What is multiplied with everything that a layer adds to the residual stream (Granite).
    pub residual_scale: f64,
    /// Logits are divided by this (Granite; Cohere multiplies them).
    pub logit_divisor: f64,
    /// What is added to the weights of norms.
    pub norm_offset: f32,
    /// `max_position_embeddings`.
    pub max_position: usize,
    /// How the tensors of its safetensors files are quantized, if they are.
    pub quantization: Option<Quantization>,
}

/// What mixes the positions of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    Attention,
    Latent(Latent),
    Delta(DeltaNet),
    Conv(ShortConv),
    Mamba(Mamba),
    /// The layer is a feed-forward part alone.
    Nothing,
}

/// What feeds forward in a layer, behind its mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// One part.
    Dense,
    /// A mixture of experts.
    Experts,
    /// The layer is a mixer alone.
    Nothing,
}

/// Sizes of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNet {
    pub key_heads: usize,
    /// A multiple of `key_heads`.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Positions that its convolution sees.
    pub taps: usize,
    /// As [`DeltaSpec::tiled`].
    pub tiled: bool,
}

impl DeltaNet {
    /// Width of q, k and v side by side.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Values of its state: of the convolution, and behind that of the heads.
    pub fn state_values(&self) -> usize {
        let head = DeltaSpec::head_values(self.key_dim, self.value_dim);
        ConvolutionSpec::state_values(self.channels(), self.taps) + self.value_heads * head
    }
}

/// What embeddings are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EmbeddingScale {
    /// The root of their width, in their own type (Gemma).
    RootOfWidth,
    Number(f64),
}

impl Config {
    /// Parses the text of `file` (usually "config.json").
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self> {
        let map = parse_object(file, bytes)?;
        Self::from_fields(Fields::new(file, &map))
    }

    /// Reads the fields of a config.json, wherever they come from.
    pub fn from_fields(fields: Fields<'_>) -> Result<Self> {
        let family = find_family(fields)?;
        let outer = fields;
        let fields = match family.nested {
            Some((name, model_type)) => decoder_fields(fields, name, model_type)?,
            None => fields,
        };
        refuse_unsupported(fields, family)?;

        let heads = or_default(fields, "num_attention_heads", WIDTH_MAX, family.heads)?;
        let hidden = fields.size("hidden_size", WIDTH_MAX)?;
        let blocks = family.single.then(|| blocks::blocks(fields)).transpose()?;
        let layers = match &blocks {
            Some((types, _)) => types.len(),
            None => fields.size("num_hidden_layers", LAYERS_MAX)?,
        };
        let latent = family.latent.then(|| Latent::parse(fields, heads)).transpose()?;
        let head_dim = match latent {
            Some(latent) => latent.query_dim(),
            None => head_dim(fields, family, hidden, heads)?,
        };
        let kv_heads = kv_heads(fields, family, heads)?;
        layers::refuse_last_window(fields, family)?;
        let max_position =
            fields.size_opt("max_position_embeddings", POSITION_MAX)?.unwrap_or(family.max_position);
        let bias = |rule| match rule {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Config(name) => Ok::<_, ModelError>(fields.flag(name)?.unwrap_or(false)),
        };
        let listed = listed_rotations(fields, family, layers)?;
        let no_experts = match &blocks {
            Some((_, feeds)) => Some("intermediate_size").filter(|_| !feeds.contains(&Feed::Experts)),
            None => match &family.mixture {
                Some(mixture) => Experts::absent(fields, mixture)?,
                None => None,
            },
        };
        let mixture = family.mixture.filter(|_| no_experts.is_none());
        let (types, feeds) = match (blocks, &mixture) {
            (Some((types, feeds)), _) => (Some(types), feeds),
            (None, Some(mixture)) => {
                (layer_types(fields, family, layers)?, experts::feeds(fields, mixture, layers)?)
            }
            (None, None) => (layer_types(fields, family, layers)?, vec![Feed::Dense; layers]),
        };
        let windows = windows(fields, family, types.as_deref(), &listed)?;
        let rotated = rotated_layers(family, listed, &windows);
        let most = HeadSizes { kv_heads, head_dim };
        let full_heads = match family.full_heads {
            true => HeadSizes::of_full_layers(fields, heads, most, &windows)?,
            false => None,
        };
        let (sharing_layers, double_wide) = layers::sharing(fields, family)?;
        let vocab = or_default(fields, "vocab_size", VOCAB_MAX, family.vocab)?;
        let multiplier = |name: &str| match family.multipliers {
            true => Ok::<_, ModelError>(fields.positive_opt(name)?.unwrap_or(1.0)),
            false => Ok(1.0),
        };
        let query_scalar = match family.query_scalar {
            Some(default) => fields.positive_opt("query_pre_attn_scalar")?.unwrap_or(default),
            None => head_dim as f64,
        };
        let softcap = |name: &str, default: fn(&Softcaps) -> Option<f64>| match &family.softcaps {
            Some(_) if fields.is_null(name) => Ok::<_, ModelError>(None),
            Some(softcaps) => Ok(fields.positive_opt(name)?.or(default(softcaps)).map(|cap| cap as f32)),
            None => Ok(None),
        };
        let rotated_dim = latent.map_or(head_dim, |latent| latent.rope_dim);
        let rope = |part, theta, dim| RopeConfig::parse(fields, family, part, theta, dim, max_position);
        let local_rope = family.local_rope.map(|of| match of {
            LocalRope::Own(theta) => rope(Some(RopePart::Local), theta, rotated_dim),
            LocalRope::Unscaled => rope(Some(RopePart::Local), family.rope_theta, rotated_dim),
        });
        let local_rope = local_rope.transpose()?;
        if family.rope_stated && fields.value("rope_parameters").or(fields.value("rope_scaling")).is_none() {
            return Err(fields.problem("rope_scaling", "is missing, and so is rope_parameters"));
        }
        let part = local_rope.is_some().then_some(RopePart::Global);
        let rotated_dim = full_heads.map_or(rotated_dim, |full| full.head_dim);
        let rope = rope(part, family.rope_theta, rotated_dim)?;
        if latent.is_some() && rope.rotary_dim != rotated_dim {
            let problem =
                format!("asks for {} of qk_rope_head_dim = {rotated_dim} dimensions", rope.rotary_dim);
            return Err(fields.problem("partial_rotary_factor", problem));
        }
        let config = Self {
            vocab,
            hidden,
            intermediate: match (no_experts, &mixture) {
                (Some(width), _) => fields.size(width, WIDTH_MAX)?,
                (None, Some(mixture)) => fields.size(mixture.inner, WIDTH_MAX)?,
                (None, None) if family.adjusted_width => short_conv::adjusted_width(fields)?,
                (None, None) => fields.size("intermediate_size", WIDTH_MAX)?,
            },
            experts: mixture.map(|mixture| Experts::parse(fields, &mixture, hidden, &feeds)).transpose()?,
            feeds,
            layers,
            heads,
            kv_heads,
            head_dim,
            full_heads,
            full_keys_are_values: family.full_heads && fields.flag("attention_k_eq_v")?.unwrap_or(false),
            sharing_layers,
            double_wide,
            layer_input: layers::layer_input(fields, family, layers, vocab)?,
            eps: fields.positive_opt(family.eps_field)?.unwrap_or(family.rms_norm_eps) as f32,
            tied: match (
                fields.flag("tie_embedding")?.filter(|_| family.short_conv),
                fields.flag("tie_word_embeddings")?,
            ) {
                (Some(tied), _) | (None, Some(tied)) => tied,
                (None, None) => outer.flag("tie_word_embeddings")?.unwrap_or(family.tied),
            },
            qkv_bias: bias(family.qkv_bias)?,
            o_bias: bias(family.o_bias)?,
            mlp_bias: bias(family.mlp_bias)?,
            qk_norm: match family.qk_norm {
                QkNorm::Stated(name) if fields.flag(name)?.unwrap_or(false) => QkNorm::Heads,
                QkNorm::Stated(_) => QkNorm::Never,
                QkNorm::Unweighted(name) if !fields.flag(name)?.unwrap_or(true) => QkNorm::Never,
                stated => stated,
            },
            windows,
            chunked: matches!(family.window, Window::Chunked { .. }),
            temper: match family.tempered && fields.flag("attn_temperature_tuning")?.unwrap_or(true) {
                true => Some(Temper {
                    scale: fields.positive_opt("attn_scale")?.unwrap_or(0.1),
                    every: fields.size_opt("floor_scale", POSITION_MAX)?.unwrap_or(8192) as u32,
                }),
                false => None,
            },
            mixers: match latent {
                Some(latent) => vec![Mixer::Latent(latent); layers],
                None => mixers(fields, family, types.as_deref(), layers)?,
            },
            attention_scale: match (family.multipliers, family.attention_scale) {
                (true, _) => multiplier("attention_multiplier")?,
                (false, Some(scale)) => scale,
                (false, None) if latent.is_some() => query_scalar.powf(-0.5) * rope.query_factor(),
                (false, None) => query_scalar.powf(-0.5),
            },
            attention_softcap: softcap("attn_logit_softcapping", |softcaps| softcaps.attention)?,
            logit_softcap: softcap("final_logit_softcapping", |softcaps| softcaps.logits)?,
            activation: activation(fields, family)?,
            embedding_scale: match (family.scaled_embedding, multiplier("embedding_multiplier")?) {
                (true, _) => Some(EmbeddingScale::RootOfWidth),
                (false, 1.0) => None,
                (false, by) => Some(EmbeddingScale::Number(by)),
            },
            residual_scale: multiplier("residual_multiplier")?,
            logit_divisor: match family.logit_scale {
                Some(absent) => 1.0 / fields.positive_opt("logit_scale")?.unwrap_or(absent),
                None => multiplier("logits_scaling")?,
            },
            norm_offset: if family.norm_plus_one { 1.0 } else { 0.0 },
            rope,
            local_rope,
            rotated,
            max_position,
            quantization: Quantization::parse(outer, family)?,
            family: *family,
        };
        config.check_sources().map_err(|problem| fields.problem("num_kv_shared_layers", problem))?;
        Ok(config)
    }

    /// The mixture of experts of a layer, where it has one.
    pub fn experts_of(&self, layer: usize) -> Option<Experts> {
        self.experts.filter(|_| self.feeds[layer] == Feed::Experts)
    }

    /// Layers with one feed-forward part.
    pub fn dense_layers(&self) -> usize {
        self.feeds.iter().filter(|feed| **feed == Feed::Dense).count()
    }

    /// Weights of what mixes positions in a layer that attends to all of them, and multiply-adds of a query with one key and its value; of
    /// layers that differ, the mean.
    pub fn attention_costs(&self) -> [f64; 2] {
        let latent = self.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Latent(latent) => Some(latent),
            Mixer::Attention | Mixer::Delta(_) | Mixer::Conv(_) | Mixer::Mamba(_) | Mixer::Nothing => None,
        });
        match latent {
            Some(latent) => latent.costs(self.hidden, self.heads),
            None => {
                let mean = |width: &dyn Fn(usize) -> usize| {
                    (0..self.layers).map(width).sum::<usize>() as f64 / self.layers as f64
                };
                let q = mean(&|layer| self.q_width(layer));
                [self.hidden as f64 * (mean(&|layer| self.qkv_width(layer)) + q), 2.0 * q]
            }
        }
    }
}

fn find_family(fields: Fields<'_>) -> Result<&'static Family> {
    let architecture = fields.list("architectures")?.and_then(|list| list.first()).and_then(Value::as_str);
    let Some(name) = fields.text("model_type")?.or(architecture) else {
        return Err(fields.problem("model_type", "is missing: it names the model family"));
    };
    let family = FAMILIES.iter().find(|family| family.model_type == name || family.architecture == name);
    let unsupported = |name: &str| ModelError::Family {
        file: fields.file().to_owned(),
        family: name.chars().take(60).collect(),
        supported: supported_list(),
    };
    let family = family.ok_or_else(|| unsupported(name))?;
    // The same model_type is also used for reward models, classifiers and embedders, which have no output matrix.
    match architecture {
        Some(architecture) if architecture != family.architecture => Err(unsupported(architecture)),
        _ => Ok(family),
    }
}

/// The object that describes the decoder, which is of type `model_type`.
fn decoder_fields<'a>(fields: Fields<'a>, name: &'static str, model_type: &str) -> Result<Fields<'a>> {
    let path = match name {
        "text_config" => "text_config.",
        _ => "",
    };
    let inner = fields.object(name, path)?;
    let inner = inner.ok_or_else(|| fields.problem(name, "is missing: it describes the decoder"))?;
    match inner.text("model_type")? {
        Some(other) if other != model_type => {
            let other: String = other.chars().take(60).collect();
            Err(unsupported(
                fields,
                format!("a decoder of type `{other}` (field `{path}model_type`)"),
                model_type,
            ))
        }
        _ => Ok(inner),
    }
}

fn or_default(fields: Fields<'_>, name: &str, max: usize, default: Option<usize>) -> Result<usize> {
    match default {
        Some(default) => Ok(fields.size_opt(name, max)?.unwrap_or(default)),
        None => fields.size(name, max),
    }
}

fn unsupported(fields: Fields<'_>, what: String, supported: &str) -> ModelError {
    let supported = format!("supported: {supported}");
    ModelError::Unsupported { file: fields.file().to_owned(), what, supported }
}

fn refuse_unsupported(fields: Fields<'_>, family: &Family) -> Result<()> {
    if family.output_gate && fields.flag("attn_output_gate")? == Some(false) {
        let what = "attention without a gate of its output (field `attn_output_gate`)".to_owned();
        return Err(unsupported(fields, what, "gated attention"));
    }
    match fields.value("use_bidirectional_attention") {
        // Among the tokens of an image, which are not served.
        Some(Value::String(whose)) if whose == "vision" => Ok(()),
        Some(Value::Bool(false)) | None => Ok(()),
        Some(_) => {
            let what = "attention to later tokens (field `use_bidirectional_attention`)".to_owned();
            Err(unsupported(fields, what, "causal attention"))
        }
    }
}

fn activation(fields: Fields<'_>, family: &Family) -> Result<Activation> {
    let (field, names): (_, &[&str]) = match family.gate {
        Gate::GeluTanh => ("hidden_activation", &["gelu_pytorch_tanh"]),
        Gate::Silu | Gate::Clamped if family.short_conv => return Ok(Activation::Silu),
        Gate::Silu | Gate::Clamped => ("hidden_act", &["silu", "swish"]),
        Gate::XIelu => ("hidden_act", &["xielu"]),
        Gate::ReluSquared => ("mlp_hidden_act", &["relu2"]),
    };
    if let Some(name) = fields.text(field)?.filter(|name| !names.contains(name)) {
        let name: String = name.chars().take(60).collect();
        return Err(unsupported(fields, format!("activation `{name}` (field `{field}`)"), names[0]));
    }
    Ok(match family.gate {
        // Of nothing, where there is no gate.
        Gate::Silu | Gate::XIelu => Activation::Silu,
        Gate::GeluTanh => Activation::GeluTanh,
        Gate::ReluSquared => Activation::ReluSquared,
        Gate::Clamped => Activation::SwigluOai {
            alpha: fields.positive_opt("swiglu_alpha")?.unwrap_or(1.702) as f32,
            limit: fields.positive_opt("swiglu_limit")?.unwrap_or(7.0) as f32,
        },
    })
}

fn head_dim(fields: Fields<'_>, family: &Family, hidden: usize, heads: usize) -> Result<usize> {
    let head_dim = match fields.size_opt("head_dim", WIDTH_MAX)?.or(family.head_dim) {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let problem = format!(
                "is {hidden}, not a multiple of num_attention_heads = {heads}, and head_dim is absent"
            );
            return Err(fields.problem("hidden_size", problem));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(fields.problem("head_dim", format!("is {head_dim}, expected an even number")));
    }
    if head_dim.saturating_mul(heads) > WIDTH_MAX {
        return Err(fields.problem("head_dim", format!("times num_attention_heads exceeds {WIDTH_MAX}")));
    }
    Ok(head_dim)
}

fn kv_heads(fields: Fields<'_>, family: &Family, heads: usize) -> Result<usize> {
    let stated = fields.size_opt("num_key_value_heads", WIDTH_MAX)?;
    let kv_heads = match (stated, family.kv_heads) {
        (Some(kv_heads), _) => kv_heads,
        (None, KvHeadsDefault::Fixed(kv_heads)) if !fields.is_null("num_key_value_heads") => kv_heads,
        (None, _) => heads,
    };
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("is {kv_heads}, which does not divide num_attention_heads = {heads}");
        return Err(fields.problem("num_key_value_heads", problem));
    }
    Ok(kv_heads)
}

/// Which layers rotate q and k: those in `listed`, or those with a window.
pub(crate) fn rotated_layers(family: &Family, listed: Vec<bool>, windows: &[Option<usize>]) -> Vec<bool> {
    match family.rotated {
        Rotated::Windowed if windows.iter().any(Option::is_some) => {
            windows.iter().map(Option::is_some).collect()
        }
        Rotated::All | Rotated::Listed | Rotated::Windowed | Rotated::Stated | Rotated::Never => listed,
    }
}

/// Which layers rotate q and k by their place alone.
fn listed_rotations(fields: Fields<'_>, family: &Family, layers: usize) -> Result<Vec<bool>> {
    if family.rotated == Rotated::Stated {
        let rotated = fields.text("position_embedding_type")? == Some("rope");
        return Ok(vec![rotated; layers]);
    }
    if family.rotated != Rotated::Listed {
        return Ok(vec![family.rotated != Rotated::Never; layers]);
    }
    if let Some(list) = fields.list("no_rope_layers")? {
        // Despite its name, 1 means "rotated".
        let flags: Option<Vec<bool>> = list
            .iter()
            .take(layers)
            .map(|value| match value.as_u64() {
                Some(0) => Some(false),
                Some(1) => Some(true),
                _ => value.as_bool(),
            })
            .collect();
        return match flags {
            Some(flags) if flags.len() == layers => Ok(flags),
            _ => {
                Err(fields
                    .problem("no_rope_layers", format!("must hold 0 or 1 for each of the {layers} layers")))
            }
        };
    }
    let interval = fields.size_opt("no_rope_layer_interval", LAYERS_MAX)?.unwrap_or(4);
    Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
}

/// The mixer of each layer.
fn mixers(
    fields: Fields<'_>,
    family: &Family,
    types: Option<&[LayerType]>,
    layers: usize,
) -> Result<Vec<Mixer>> {
    if let Some(names) = &family.mamba {
        return Mamba::mixers(fields, names, types, layers);
    }
    if family.short_conv {
        return ShortConv::mixers(fields, types, layers);
    }
    if family.delta.is_none() {
        return Ok(vec![Mixer::Attention; layers]);
    }
    let net = delta_net(fields)?;
    let every = fields.size_opt("full_attention_interval", LAYERS_MAX)?.unwrap_or(4);
    let has_net = |layer: usize| match types {
        Some(types) => types[layer] == LayerType::Linear,
        None => !(layer + 1).is_multiple_of(every),
    };
    Ok((0..layers).map(|layer| if has_net(layer) { Mixer::Delta(net) } else { Mixer::Attention }).collect())
}

fn delta_net(fields: Fields<'_>) -> Result<DeltaNet> {
    let size = |name, max, absent| Ok::<_, ModelError>(fields.size_opt(name, max)?.unwrap_or(absent));
    let net = DeltaNet {
        key_heads: size("linear_num_key_heads", WIDTH_MAX, 16)?,
        value_heads: size("linear_num_value_heads", WIDTH_MAX, 32)?,
        key_dim: size("linear_key_head_dim", WIDTH_MAX, 128)?,
        value_dim: size("linear_value_head_dim", WIDTH_MAX, 128)?,
        taps: size("linear_conv_kernel_dim", TAPS_MAX, 4)?,
        tiled: false,
    };
    let DeltaNet { key_heads, value_heads, key_dim, value_dim, taps, .. } = net;
    if !value_heads.is_multiple_of(key_heads) {
        let problem = format!("is {value_heads}, not a multiple of linear_num_key_heads = {key_heads}");
        return Err(fields.problem("linear_num_value_heads", problem));
    }
    if taps < 2 {
        return Err(fields.problem("linear_conv_kernel_dim", format!("is {taps}, expected 2 to {TAPS_MAX}")));
    }
    if key_heads * key_dim > WIDTH_MAX || value_heads * value_dim > WIDTH_MAX {
        return Err(
            fields.problem("linear_value_head_dim", format!("and heads give more than {WIDTH_MAX} channels"))
        );
    }
    if value_heads * value_dim * key_dim > STATE_MAX {
        let problem = format!(
            "is {value_dim}, with {value_heads} heads and linear_key_head_dim = {key_dim}: a state of more than {STATE_MAX} values"
        );
        return Err(fields.problem("linear_value_head_dim", problem));
    }
    Ok(net)
}

/// The window of each layer.
fn windows(
    fields: Fields<'_>,
    family: &Family,
    types: Option<&[LayerType]>,
    rotated: &[bool],
) -> Result<Vec<Option<usize>>> {
    let layers = rotated.len();
    let stated = fields.size_opt("sliding_window", POSITION_MAX)?;
    if let Window::Chunked { absent } = family.window {
        let size = fields.size_opt("attention_chunk_size", POSITION_MAX)?.unwrap_or(absent);
        let size = Some(size).filter(|_| !fields.is_null("attention_chunk_size"));
        let chunked = (0..layers).map(|layer| match types {
            Some(types) => types[layer] == LayerType::Sliding,
            None => rotated[layer],
        });
        return Ok(chunked.map(|chunked| size.filter(|_| chunked)).collect());
    }
    let window = match family.window {
        Window::Never | Window::Chunked { .. } => None,
        Window::Field { .. } | Window::Pattern { .. } if fields.is_null("sliding_window") => None,
        Window::Field { absent } => stated.or(absent),
        Window::Pattern { absent, .. } => stated.or(Some(absent)),
        Window::Switched | Window::SwitchedForAll => {
            let on = fields.flag("use_sliding_window")?.unwrap_or(false);
            stated.or(Some(4096)).filter(|_| on)
        }
    };
    let sliding: Vec<bool> = match (types, family.window) {
        (Some(types), _) => types.iter().map(|kind| *kind == LayerType::Sliding).collect(),
        // Not the other way round: it is the layers without a rotation that have the window.
        (None, Window::Switched) if family.rotated == Rotated::Listed => {
            rotated.iter().map(|rotated| !rotated).collect()
        }
        (None, Window::Switched) => {
            let first = fields.integer_opt("max_window_layers", LAYERS_MAX)?.unwrap_or(28);
            (0..layers).map(|layer| layer >= first).collect()
        }
        (None, Window::Pattern { every, .. }) => {
            let every = match fields.size_opt("sliding_window_pattern", LAYERS_MAX)? {
                Some(every) => every,
                None => fields.size_opt("_sliding_window_pattern", LAYERS_MAX)?.unwrap_or(every),
            };
            (1..=layers).map(|layer| !layer.is_multiple_of(every)).collect()
        }
        // No window, then, or one for all.
        (None, Window::Never | Window::Chunked { .. } | Window::Field { .. } | Window::SwitchedForAll) => {
            vec![window.is_some(); layers]
        }
    };
    match window {
        None if fields.value("layer_types").is_some() && sliding.contains(&true) => {
            Err(fields.problem("layer_types", "asks for sliding attention but no sliding_window is set"))
        }
        _ => Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect()),
    }
}

/// What `layer_types` calls a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerType {
    Full,
    Sliding,
    Linear,
    Conv,
    /// There is no mixer.
    Nothing,
}

fn layer_types(fields: Fields<'_>, family: &Family, layers: usize) -> Result<Option<Vec<LayerType>>> {
    let Some(list) = fields.list("layer_types")? else { return Ok(None) };
    let mut types = Vec::with_capacity(list.len().min(layers));
    for value in list {
        types.push(match value.as_str() {
            Some("full_attention") => LayerType::Full,
            Some("chunked_attention") if matches!(family.window, Window::Chunked { .. }) => {
                LayerType::Sliding
            }
            Some("sliding_attention") if !matches!(family.window, Window::Chunked { .. }) => {
                LayerType::Sliding
            }
            Some("linear_attention") if family.delta.is_some() => LayerType::Linear,
            Some("conv") if family.short_conv => LayerType::Conv,
            Some("mamba" | "linear_attention") if family.mamba.is_some() => LayerType::Linear,
            Some("attention") if family.mamba.is_some() => LayerType::Full,
            _ => {
                let what = format!("layer type {value} (field `layer_types`)");
                let supported = match family.delta {
                    None if family.short_conv => "full_attention, conv",
                    None if family.mamba.is_some() => "attention, mamba",
                    None if matches!(family.window, Window::Chunked { .. }) => {
                        "full_attention, chunked_attention"
                    }
                    None => "full_attention, sliding_attention",
                    Some(_) => "full_attention, linear_attention",
                };
                return Err(unsupported(fields, what, supported));
            }
        });
    }
    if types.len() != layers {
        return Err(fields.problem("layer_types", format!("names {} layers, expected {layers}", types.len())));
    }
    Ok(Some(types))
}
