//! Mamba-2 in attention's place: its sizes, and which layers have it.

use serde_json::Value;

use super::{LayerType, Mixer, STATE_MAX, TAPS_MAX, WIDTH_MAX, unsupported};
use crate::checkpoint::json::Fields;
use crate::error::{ModelError, Result};
use crate::family::MambaFields;
use crate::program::{ConvolutionSpec, DeltaSpec};

/// Sizes of a Mamba-2 mixer (Dao and Gu, arXiv:2405.21060).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mamba {
    pub heads: usize,
    pub head_dim: usize,
    /// Heads in as many groups read the same B and C.
    pub groups: usize,
    /// Values of B and of C.
    pub state_dim: usize,
    /// Positions that its convolution sees.
    pub taps: usize,
    /// The convolution has a bias.
    pub bias: bool,
}

impl Mamba {
    /// Values of all heads.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of x, B and C side by side.
    pub fn channels(&self) -> usize {
        self.width() + 2 * self.groups * self.state_dim
    }

    /// Values of its state: of the convolution, and behind that of the heads.
    pub fn state_values(&self) -> usize {
        let head = DeltaSpec::head_values(self.state_dim, self.head_dim);
        ConvolutionSpec::state_values(self.channels(), self.taps) + self.heads * head
    }

    /// The mixer of each layer.
    pub(super) fn mixers(
        fields: Fields<'_>,
        names: &MambaFields,
        types: Option<&[LayerType]>,
        layers: usize,
    ) -> Result<Vec<Mixer>> {
        let some = types.is_none_or(|types| types.contains(&LayerType::Linear));
        let mamba = some.then(|| Self::parse(fields, names)).transpose()?;
        let of = |kind: &LayerType| match (kind, mamba) {
            (LayerType::Linear, Some(mamba)) => Mixer::Mamba(mamba),
            (LayerType::Nothing, _) => Mixer::Nothing,
            _ => Mixer::Attention,
        };
        Ok(match types {
            Some(types) => types.iter().map(of).collect(),
            None => vec![of(&LayerType::Linear); layers],
        })
    }

    fn parse(fields: Fields<'_>, names: &MambaFields) -> Result<Self> {
        for &(field, served) in names.fixed {
            if fields.flag(field)?.is_some_and(|stated| stated != served) {
                let what = format!("Mamba-2 layers with `{field}` = {}", !served);
                return Err(unsupported(fields, what, &format!("{served}")));
            }
        }
        if let Some(other) = fields.text("mamba_hidden_act")?.filter(|name| *name != "silu") {
            let other: String = other.chars().take(60).collect();
            return Err(unsupported(
                fields,
                format!("activation `{other}` (field `mamba_hidden_act`)"),
                "silu",
            ));
        }
        refuse_limits(fields)?;
        let size = |(name, absent), most| Ok::<_, ModelError>(fields.size_opt(name, most)?.unwrap_or(absent));
        let heads = size(names.heads, WIDTH_MAX)?;
        let head_dim = match fields.value(names.head_dim.0).and_then(Value::as_str) {
            Some("auto") => None,
            _ => fields.size_opt(names.head_dim.0, WIDTH_MAX)?.or(names.head_dim.1),
        };
        let head_dim = match head_dim {
            Some(head_dim) => head_dim,
            None => fields.size("hidden_size", WIDTH_MAX)? * size(("mamba_expand", 2), WIDTH_MAX)? / heads,
        };
        let mamba = Self {
            heads,
            head_dim,
            groups: size(names.groups, WIDTH_MAX)?,
            state_dim: size(names.state_dim, WIDTH_MAX)?,
            taps: size(names.taps, TAPS_MAX)?,
            bias: fields.flag(names.bias)?.unwrap_or(true),
        };
        if !heads.is_multiple_of(mamba.groups) {
            let problem = format!("is {heads}, not a multiple of {} = {}", names.groups.0, mamba.groups);
            return Err(fields.problem(names.heads.0, problem));
        }
        if mamba.taps < 2 {
            let problem = format!("is {}, expected 2 to {TAPS_MAX}", mamba.taps);
            return Err(fields.problem(names.taps.0, problem));
        }
        let together = [mamba.width(), mamba.groups.saturating_mul(mamba.state_dim)];
        if head_dim == 0 || together.iter().any(|width| *width > WIDTH_MAX) {
            let problem = format!(
                "is {head_dim}, with {heads} heads and {} = {}: no channels or more than {WIDTH_MAX}",
                names.state_dim.0, mamba.state_dim
            );
            return Err(fields.problem(names.head_dim.0, problem));
        }
        if mamba.width().saturating_mul(mamba.state_dim) > STATE_MAX {
            let problem = format!("is {}: a state of more than {STATE_MAX} values", mamba.state_dim);
            return Err(fields.problem(names.state_dim.0, problem));
        }
        Ok(mamba)
    }
}

/// Steps are not held within limits: those that hold nothing, 0 and infinity (as transformers writes it), are none.
fn refuse_limits(fields: Fields<'_>) -> Result<()> {
    let Some(limits) = fields.list("time_step_limit")? else { return Ok(()) };
    let infinite = |value: &Value| value.get("__float__").and_then(Value::as_str) == Some("Infinity");
    match limits {
        [low, high] if low.as_f64() == Some(0.0) && infinite(high) => Ok(()),
        _ => {
            let what = "steps of Mamba-2 layers within limits (field `time_step_limit`)".to_owned();
            Err(unsupported(fields, what, "steps from 0 to infinity"))
        }
    }
}
