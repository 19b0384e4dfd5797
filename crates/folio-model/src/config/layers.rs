//! What layers have that is not the same in all of them: sizes of heads, K and V that are another layer's, widths.

use super::{Config, LAYERS_MAX, WIDTH_MAX, unsupported};
use crate::checkpoint::json::Fields;
use crate::error::{ModelError, Result};
use crate::family::Family;

/// Heads of a layer: how many of K and V, and how wide they and those of q are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSizes {
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl HeadSizes {
    /// Width of all heads of K, and of those of V.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Of layers without a window, where they are others than `most`; `windows` has one entry per layer.
    pub(super) fn of_full_layers(
        fields: Fields<'_>,
        heads: usize,
        most: Self,
        windows: &[Option<usize>],
    ) -> Result<Option<Self>> {
        let full = match fields.object("per_layer_config", "per_layer_config.")? {
            Some(listed) => Self::listed(fields, listed, most, windows)?,
            None => {
                let keys_are_values = fields.flag("attention_k_eq_v")?.unwrap_or(false);
                let kv_heads = fields.size_opt("num_global_key_value_heads", WIDTH_MAX)?;
                Self {
                    kv_heads: kv_heads.filter(|_| keys_are_values).unwrap_or(most.kv_heads),
                    head_dim: fields.size_opt("global_head_dim", WIDTH_MAX)?.unwrap_or(512),
                }
            }
        };
        let Self { kv_heads, head_dim } = full;
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("is {kv_heads}, which does not divide num_attention_heads = {heads}");
            return Err(fields.problem("num_global_key_value_heads", problem));
        }
        if !head_dim.is_multiple_of(2) || head_dim.saturating_mul(heads) > WIDTH_MAX {
            let problem = format!(
                "is {head_dim}, expected an even number, and {heads} heads of at most {WIDTH_MAX} values"
            );
            return Err(fields.problem("global_head_dim", problem));
        }
        Ok(Some(full).filter(|full| *full != most))
    }

    /// As transformers 5 writes it: for some layers what they have else than `most`.
    fn listed(fields: Fields<'_>, listed: Fields<'_>, most: Self, windows: &[Option<usize>]) -> Result<Self> {
        let refused =
            |what: String| unsupported(fields, what, "heads of layers without a window that are alike");
        let mut sizes = vec![most; windows.len()];
        for (layer, _) in listed.entries() {
            let Some(of_layer) = layer.parse().ok().and_then(|layer: usize| sizes.get_mut(layer)) else {
                return Err(listed.problem(layer, format!("is none of {} layers", windows.len())));
            };
            let Some(own) = listed.object(layer, "per_layer_config.")? else { continue };
            if let Some((field, _)) =
                own.entries().find(|(field, _)| !["head_dim", "num_key_value_heads"].contains(field))
            {
                return Err(refused(format!("field `{field}` of layer {layer} (field `per_layer_config`)")));
            }
            *of_layer = Self {
                kv_heads: own.size_opt("num_key_value_heads", WIDTH_MAX)?.unwrap_or(most.kv_heads),
                head_dim: own.size_opt("head_dim", WIDTH_MAX)?.unwrap_or(most.head_dim),
            };
        }
        let full = sizes.iter().zip(windows).find(|(_, window)| window.is_none());
        let full = full.map_or(most, |(sizes, _)| *sizes);
        let expected = |window: &Option<usize>| if window.is_some() { most } else { full };
        match (0..).zip(sizes.iter().zip(windows)).find(|(_, (sizes, window))| **sizes != expected(window)) {
            None => Ok(full),
            Some((layer, _)) => {
                let layer: usize = layer;
                Err(refused(format!("other heads in layer {layer} (field `per_layer_config`)")))
            }
        }
    }
}

/// How many of the last layers read the K and V of others, and whether their feed-forward part is twice as wide.
pub(super) fn sharing(fields: Fields<'_>, family: &Family) -> Result<(usize, bool)> {
    if !family.shares_kv {
        return Ok((0, false));
    }
    let layers = fields.integer_opt("num_kv_shared_layers", LAYERS_MAX)?.unwrap_or(0);
    Ok((layers, fields.flag("use_double_wide_mlp")?.unwrap_or(false)))
}

/// Values that each layer is given of a token.
pub(super) fn layer_input(
    fields: Fields<'_>,
    family: &Family,
    layers: usize,
    vocab: usize,
) -> Result<Option<usize>> {
    if !family.layer_inputs {
        return Ok(None);
    }
    const WIDTH: &str = "hidden_size_per_layer_input";
    let absent = if fields.is_null(WIDTH) { 0 } else { 256 };
    let width = fields.integer_opt(WIDTH, WIDTH_MAX / layers)?.unwrap_or(absent);
    if width == 0 {
        return Ok(None);
    }
    match fields.size_opt("vocab_size_per_layer_input", super::VOCAB_MAX)?.filter(|rows| *rows != vocab) {
        None => Ok(Some(width)),
        Some(rows) => {
            let what = format!(
                "values of each layer for {rows} of {vocab} tokens (field `vocab_size_per_layer_input`)"
            );
            Err(unsupported(fields, what, "values for every token"))
        }
    }
}

impl Config {
    /// Heads of a layer that attends.
    pub fn head_sizes(&self, layer: usize) -> HeadSizes {
        let most = HeadSizes { kv_heads: self.kv_heads, head_dim: self.head_dim };
        self.full_heads.filter(|_| self.windows[layer].is_none()).unwrap_or(most)
    }

    /// Width of the attention output before o_proj; differs from `hidden` in some families.
    pub fn q_width(&self, layer: usize) -> usize {
        self.heads * self.head_sizes(layer).head_dim
    }

    /// Rows of the stacked projections of a layer that attends: q, and k and v where it has its own.
    pub fn qkv_width(&self, layer: usize) -> usize {
        let kv = if self.kv_source(layer) == layer { self.head_sizes(layer).kv_width() } else { 0 };
        self.q_width(layer) + 2 * kv
    }

    /// The layer whose K and V a layer reads: itself, or of the layers before those that share the last one with a window as it has, or none
    /// as it.
    pub fn kv_source(&self, layer: usize) -> usize {
        let own = self.layers.saturating_sub(self.sharing_layers);
        if layer < own {
            return layer;
        }
        let kind = |layer: usize| self.windows[layer].is_some();
        (0..own).rev().find(|before| kind(*before) == kind(layer)).unwrap_or(layer)
    }

    /// Whether values of a layer are made of what its keys are made of.
    pub fn keys_are_values(&self, layer: usize) -> bool {
        self.full_keys_are_values && self.windows[layer].is_none()
    }

    /// Width of the feed-forward part of a layer without experts.
    pub fn dense_width(&self, layer: usize) -> usize {
        let width = self.experts.map_or(self.intermediate, |experts| experts.dense_width);
        if self.double_wide && self.kv_source(layer) != layer { 2 * width } else { width }
    }

    /// Every layer that shares K and V has a layer that keeps them.
    pub(crate) fn check_sources(&self) -> std::result::Result<(), String> {
        let own = self.layers.saturating_sub(self.sharing_layers);
        match (own..self.layers).find(|layer| self.kv_source(*layer) == *layer) {
            None => Ok(()),
            Some(layer) => Err(format!(
                "is {} of {} layers: no layer before them keeps K and V as layer {layer} reads them",
                self.sharing_layers, self.layers
            )),
        }
    }
}

/// transformers lets the last layer attend to everything, whatever a list says.
pub(super) fn refuse_last_window(fields: Fields<'_>, family: &Family) -> Result<()> {
    let last = fields.list("layer_types")?.and_then(|types| types.last()).and_then(|last| last.as_str());
    match last {
        Some("sliding_attention") if family.full_heads => {
            let what = "a window on the last layer (field `layer_types`)".to_owned();
            Err::<(), ModelError>(unsupported(fields, what, "full_attention on the last layer"))
        }
        _ => Ok(()),
    }
}
