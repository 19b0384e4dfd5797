//! config.json, parsed into everything the decoder needs.
//!
//! Owns: reading a checkpoint's configuration of today's and yesterday's style (`rope_parameters` or `rope_theta` +
//! `rope_scaling`), filling what it leaves out from the family's row. Must never: look at a weight, or believe what is
//! said about their dtype (the tensors themselves decide; how quantized ones are packed is told here). Invariant: a [`Config`] that exists describes a decoder Folio
//! can run; sizes are bounded so that products of two or three of them cannot overflow.

use serde_json::Value;

use crate::checkpoint::json::{Fields, parse_object};
use crate::checkpoint::quantized::Quantization;
use crate::error::{ModelError, Result};
use crate::family::{Bias, FAMILIES, Family, KvHeadsDefault, Window, supported_list};
use crate::rope::RopeConfig;

const WIDTH_MAX: usize = 1 << 20;
const LAYERS_MAX: usize = 1 << 12;
const VOCAB_MAX: usize = 1 << 24;
const POSITION_MAX: usize = 1 << 28;

/// The decoder of one checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub family: Family,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f32,
    /// The embedding table is also the output matrix.
    pub tied: bool,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// One entry per layer: whether q and k are rotated.
    pub rotated: Vec<bool>,
    pub rope: RopeConfig,
    /// Length of the shortest attention window of any layer: up to it, attention is full attention.
    pub window: Option<usize>,
    /// `max_position_embeddings`.
    pub max_position: usize,
    /// How the tensors of its safetensors files are quantized, if they are.
    pub quantization: Option<Quantization>,
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
        refuse_unsupported(fields)?;

        let heads = fields.size("num_attention_heads", WIDTH_MAX)?;
        let hidden = fields.size("hidden_size", WIDTH_MAX)?;
        let layers = fields.size("num_hidden_layers", LAYERS_MAX)?;
        let head_dim = head_dim(fields, family, hidden, heads)?;
        let kv_heads = kv_heads(fields, family, heads)?;
        let max_position =
            fields.size_opt("max_position_embeddings", POSITION_MAX)?.unwrap_or(family.max_position);
        let bias = |rule| match rule {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Config(name) => Ok::<_, ModelError>(fields.flag(name)?.unwrap_or(false)),
        };
        let rotated = rotated_layers(fields, family, layers)?;
        Ok(Self {
            vocab: fields.size("vocab_size", VOCAB_MAX)?,
            hidden,
            intermediate: fields.size("intermediate_size", WIDTH_MAX)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            eps: fields.positive_opt("rms_norm_eps")?.unwrap_or(family.rms_norm_eps) as f32,
            tied: fields.flag("tie_word_embeddings")?.unwrap_or(family.tied),
            qkv_bias: bias(family.qkv_bias)?,
            o_bias: bias(family.o_bias)?,
            mlp_bias: bias(family.mlp_bias)?,
            window: window(fields, family, layers, &rotated)?,
            rope: RopeConfig::parse(fields, family, head_dim, max_position)?,
            rotated,
            max_position,
            quantization: Quantization::parse(fields)?,
            family: *family,
        })
    }

    /// Rows of the stacked q, k and v projections.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of the attention output before o_proj; differs from `hidden` in some families.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
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

fn refuse_unsupported(fields: Fields<'_>) -> Result<()> {
    match fields.text("hidden_act")?.filter(|name| *name != "silu" && *name != "swish") {
        Some(activation) => Err(ModelError::Unsupported {
            file: fields.file().to_owned(),
            what: format!("activation `{activation}` (field `hidden_act`)"),
            supported: "supported: silu".to_owned(),
        }),
        None => Ok(()),
    }
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

fn rotated_layers(fields: Fields<'_>, family: &Family, layers: usize) -> Result<Vec<bool>> {
    if !family.nope_layers {
        return Ok(vec![true; layers]);
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

/// The window that limits some layer, if any does.
fn window(fields: Fields<'_>, family: &Family, layers: usize, rotated: &[bool]) -> Result<Option<usize>> {
    let stated = fields.size_opt("sliding_window", POSITION_MAX)?;
    let window = match family.window {
        Window::Never => None,
        Window::Field { .. } if fields.is_null("sliding_window") => None,
        Window::Field { absent } => stated.or(absent),
        Window::Switched if fields.flag("use_sliding_window")?.unwrap_or(false) => stated.or(Some(4096)),
        Window::Switched => None,
    };
    let types = layer_types(fields, layers)?;
    let limited = match (&types, family.window) {
        (Some(types), _) => types.iter().any(|sliding| *sliding),
        (None, Window::Switched) if family.nope_layers => rotated.iter().any(|rotated| !rotated),
        (None, Window::Switched) => fields.size_opt("max_window_layers", LAYERS_MAX)?.unwrap_or(28) < layers,
        (None, _) => true,
    };
    match (window, types) {
        (None, Some(types)) if types.iter().any(|sliding| *sliding) => {
            Err(fields.problem("layer_types", "asks for sliding attention but no sliding_window is set"))
        }
        _ => Ok(window.filter(|_| limited)),
    }
}

/// For each layer, whether `layer_types` calls it sliding.
fn layer_types(fields: Fields<'_>, layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(list) = fields.list("layer_types")? else { return Ok(None) };
    let mut types = Vec::with_capacity(list.len().min(layers));
    for value in list {
        match value.as_str() {
            Some("full_attention") => types.push(false),
            Some("sliding_attention") => types.push(true),
            _ => {
                return Err(ModelError::Unsupported {
                    file: fields.file().to_owned(),
                    what: format!("layer type {value} (field `layer_types`)"),
                    supported: "supported: full_attention, sliding_attention".to_owned(),
                });
            }
        }
    }
    if types.len() != layers {
        return Err(fields.problem("layer_types", format!("names {} layers, expected {layers}", types.len())));
    }
    Ok(Some(types))
}
