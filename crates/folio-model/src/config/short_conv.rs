//! Short convolutions in attention's place: which layers have them, and the width of what stands behind.

use super::{LayerType, Mixer, TAPS_MAX, WIDTH_MAX, unsupported};
use crate::checkpoint::json::Fields;
use crate::error::Result;
use crate::program::ConvolutionSpec;

/// A gated convolution over positions, each of the values of a row by itself (LFM2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConv {
    /// As many as a row has values.
    pub channels: usize,
    /// Positions that it sees.
    pub taps: usize,
}

impl ShortConv {
    /// Values of its state.
    pub fn state_values(&self) -> usize {
        ConvolutionSpec::state_values(self.channels, self.taps)
    }

    /// The mixer of each layer.
    pub(super) fn mixers(
        fields: Fields<'_>,
        types: Option<&[LayerType]>,
        layers: usize,
    ) -> Result<Vec<Mixer>> {
        if fields.flag("conv_bias")? == Some(true) {
            let what = "short convolutions with biases (field `conv_bias`)".to_owned();
            return Err(unsupported(fields, what, "convolutions without"));
        }
        let taps = fields.size_opt("conv_L_cache", TAPS_MAX)?.unwrap_or(3);
        if taps < 2 {
            return Err(fields.problem("conv_L_cache", format!("is {taps}, expected 2 to {TAPS_MAX}")));
        }
        let conv = Mixer::Conv(Self { channels: fields.size("hidden_size", WIDTH_MAX)?, taps });
        let of = |is_conv: bool| if is_conv { conv } else { Mixer::Attention };
        if let Some(types) = types {
            return Ok(types.iter().map(|kind| of(*kind == LayerType::Conv)).collect());
        }
        let Some(list) = fields.list("full_attn_idxs")? else { return Ok(vec![Mixer::Attention; layers]) };
        let mut mixers = vec![conv; layers];
        for value in list {
            let at = value.as_u64().and_then(|at| mixers.get_mut(usize::try_from(at).ok()?));
            let problem = || fields.problem("full_attn_idxs", format!("names layer {value} of {layers}"));
            *at.ok_or_else(problem)? = Mixer::Attention;
        }
        Ok(mixers)
    }
}

/// Width of the feed-forward part of LFM2: two thirds of what is stated, times a factor, rounded up to a multiple.
pub(super) fn adjusted_width(fields: Fields<'_>) -> Result<usize> {
    let stated = match fields.size_opt("block_ff_dim", WIDTH_MAX)? {
        Some(stated) => stated,
        None => fields.size("intermediate_size", WIDTH_MAX)?,
    };
    if !fields.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(stated);
    }
    let factor = fields.positive_opt("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = fields.size_opt("block_multiple_of", WIDTH_MAX)?.unwrap_or(256);
    let width = ((2.0 * stated as f64 / 3.0).floor() * factor) as usize;
    let width = width.max(1).checked_next_multiple_of(multiple).filter(|width| *width <= WIDTH_MAX);
    width.ok_or_else(|| {
        fields.problem("block_ffn_dim_multiplier", format!("gives a width of more than {WIDTH_MAX}"))
    })
}
