//! Rotary embeddings: from a configuration to the inverse frequencies of one table.
//!
//! Owns: the scaling variants (default, linear, llama3, YaRN, LongRoPE, given factors), and the axes of M-RoPE. Everything is computed in f64 and rounded once.
//! Sources: transformers' `modeling_rope_utils.py`; Llama 3.1's reference code; YaRN, arXiv:2309.00071; LongRoPE,
//! arXiv:2402.13753. Must never: depend on a request. LongRoPE's two factor sets would otherwise switch with the length
//! of a sequence, so that tokens already cached would be wrong from one step to the next; here the server's
//! `max_model_len` decides once.

use std::f64::consts::PI;

use crate::checkpoint::json::Fields;
use crate::error::{ModelError, Result};
use crate::family::{Family, LocalRope};
use crate::program::Rope;

const POSITION_MAX: usize = 1 << 28;

/// How positions become angles.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    /// Leading dimensions of each head that are rotated; even.
    pub rotary_dim: usize,
    pub scaling: RopeScaling,
    /// How many frequencies are those of time, of height and of width, where tokens of images have positions on three axes (M-RoPE).
    /// `None`: there is one axis.
    pub sections: Option<Sections>,
}

/// Which frequencies turn by which of three positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// `mrope_section`: frequencies of time, height and width.
    pub frequencies: [usize; 3],
    /// `mrope_interleaved`: they take turns, until those of an axis are used up; what is left is of time (Qwen3-VL, Qwen3.5). Else one
    /// axis comes behind the other (Qwen2-VL).
    pub interleaved: bool,
}

impl Sections {
    /// The axis of each of `pairs` frequencies.
    fn axes(&self, pairs: usize) -> Vec<u8> {
        let [time, height, width] = self.frequencies;
        let axis = |at: usize| match (self.interleaved, at % 3) {
            (true, 1) if at < 3 * height => 1,
            (true, 2) if at < 3 * width => 2,
            (true, _) => 0,
            (false, _) => u8::from(at >= time) + u8::from(at >= time + height),
        };
        (0..pairs).map(axis).collect()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: f64,
    },
    Yarn(Yarn),
    LongRope {
        short_factor: Vec<f64>,
        long_factor: Vec<f64>,
        original_max_position: usize,
        attention_factor: f64,
    },
    /// Of the frequencies of whole heads the first ones, `1 / factor` of each; others are zero (Gemma 4).
    Proportional {
        pairs: usize,
        factor: f64,
    },
    /// The base is stretched by `alpha^(dim / (dim - 2))` (Hunyuan).
    NtkAlpha {
        alpha: f64,
    },
    /// A divisor for each frequency, as a GGUF file carries llama3's.
    Factors {
        factors: Vec<f64>,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original_max_position: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// Bounds of the ramp are rounded to whole dimensions.
    pub truncate: bool,
    pub attention_factor: f64,
    /// `mscale_all_dim`: latent attention has a factor of its own for products of queries and keys.
    pub all_dim: Option<f64>,
}

/// Which layers a rotary embedding is for, in a family that has two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePart {
    /// Those without a window.
    Global,
    /// Those with one: `rope_parameters.sliding_attention`, or before `rope_local_base_freq` and no scaling.
    Local,
}

impl RopeConfig {
    /// Reads `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling` and `partial_rotary_factor` (before). `theta` is
    /// the default of the base.
    pub fn parse(
        config: Fields<'_>,
        family: &Family,
        part: Option<RopePart>,
        theta: f64,
        head_dim: usize,
        max_position: usize,
    ) -> Result<Self> {
        if let (Some(_), Some(nested)) = (part, config.object("rope_parameters", "rope_parameters.")?)
            && nested.first_object().is_none()
        {
            let problem = "has no object for `full_attention` and `sliding_attention`";
            return Err(config.problem("rope_parameters", problem));
        }
        let (nested, theta_name) = match (part, config.object("rope_parameters", "rope_parameters.")?) {
            (None, Some(nested)) => (Some(nested), "rope_theta"),
            (Some(RopePart::Global), Some(nested)) => {
                (nested.object("full_attention", "rope_parameters.full_attention.")?, "rope_theta")
            }
            (Some(RopePart::Local), Some(nested)) => {
                (nested.object("sliding_attention", "rope_parameters.sliding_attention.")?, "rope_theta")
            }
            (Some(RopePart::Local), None) => match family.local_rope {
                Some(LocalRope::Unscaled) => (None, "rope_theta"),
                _ => (None, "rope_local_base_freq"),
            },
            (_, None) => (config.object("rope_scaling", "rope_scaling.")?, "rope_theta"),
        };
        if let Some(name) = nested.and_then(|nested| nested.first_object()) {
            return Err(ModelError::Unsupported {
                file: config.file().to_owned(),
                what: format!("a rotary embedding of its own for `{name}` layers (field `rope_parameters`)"),
                supported: "supported: one for all layers".to_owned(),
            });
        }
        let number = |name: &str| -> Result<Option<f64>> {
            let inner = nested.map(|nested| nested.positive_opt(name)).transpose()?.flatten();
            Ok(inner.or(config.positive_opt(name)?))
        };
        let theta = number(theta_name)?.unwrap_or(theta);
        let stated = number("partial_rotary_factor")?;
        let own = family.rotary_dim.filter(|_| stated.is_none());
        let own = own.map(|name| config.size_opt(name, head_dim)).transpose()?.flatten();
        let kind = nested.map(|nested| nested.text("rope_type")).transpose()?.flatten();
        // Dimensions of a head that are not rotated have a frequency, too: none.
        let proportional = kind == Some("proportional");
        let partial = stated.unwrap_or(if proportional { 1.0 } else { family.partial_rotary });
        let share = if proportional { 1.0 } else { partial };
        let rotary_dim = own.unwrap_or((head_dim as f64 * share) as usize);
        if partial > 1.0 || rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
            let problem = format!("is {partial}: {rotary_dim} of {head_dim} dimensions cannot be rotated");
            return Err(config.problem("partial_rotary_factor", problem));
        }
        let scaling = match nested {
            Some(nested) if proportional => RopeScaling::Proportional {
                pairs: (partial * head_dim as f64 / 2.0) as usize,
                factor: nested.positive_opt("factor")?.unwrap_or(1.0),
            },
            Some(nested) => parse_scaling(config, nested, family, rotary_dim, max_position)?,
            None => RopeScaling::None,
        };
        let sections = nested.map(|nested| parse_sections(nested, rotary_dim / 2)).transpose()?.flatten();
        let rope = Self { theta, rotary_dim, scaling, sections };
        // Whatever the server's length is; only LongRoPE has two tables.
        for table in [rope.table(0), rope.table(usize::MAX)] {
            if !table.inv_freq.iter().chain([&table.scale]).all(|value| value.is_finite()) {
                let problem =
                    format!("is {theta}: with the scaling given, the rotary frequencies are not finite");
                return Err(config.problem("rope_theta", problem));
            }
        }
        Ok(rope)
    }

    /// What latent attention multiplies products of queries and keys by, beside the root of their size (DeepSeek-V2's code: `mscale`
    /// squared).
    pub fn query_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn(Yarn { factor, all_dim: Some(weight), .. }) => mscale(*factor, *weight).powi(2),
            _ => 1.0,
        }
    }

    /// The table for a server whose sequences are at most `max_model_len` tokens long.
    pub fn table(&self, max_model_len: usize) -> Rope {
        let dim = self.rotary_dim as f64;
        let base: Vec<f64> =
            (0..self.rotary_dim / 2).map(|i| self.theta.powf(-(2.0 * i as f64) / dim)).collect();
        let (inv_freq, scale): (Vec<f64>, f64) = match &self.scaling {
            RopeScaling::None => (base, 1.0),
            RopeScaling::Linear { factor } => (base.iter().map(|freq| freq / factor).collect(), 1.0),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let scale = |freq: &f64| {
                    llama3(*freq, *factor, *low_freq_factor, *high_freq_factor, *original_max_position)
                };
                (base.iter().map(scale).collect(), 1.0)
            }
            RopeScaling::Yarn(yarn) => (yarn.scale(&base, self.theta, dim), yarn.attention_factor),
            RopeScaling::LongRope { short_factor, long_factor, original_max_position, attention_factor } => {
                let factors = if max_model_len > *original_max_position { long_factor } else { short_factor };
                (base.iter().zip(factors).map(|(freq, factor)| freq / factor).collect(), *attention_factor)
            }
            RopeScaling::Proportional { pairs, factor } => {
                let rest = std::iter::repeat(0.0);
                let freqs = base.iter().take(*pairs).map(|freq| freq / factor).chain(rest);
                (freqs.take(base.len()).collect(), 1.0)
            }
            RopeScaling::NtkAlpha { alpha } => {
                let theta = self.theta * alpha.powf(dim / (dim - 2.0));
                let stretched = (0..self.rotary_dim / 2).map(|i| theta.powf(-(2.0 * i as f64) / dim));
                (stretched.collect(), 1.0)
            }
            RopeScaling::Factors { factors } => {
                (base.iter().zip(factors).map(|(freq, factor)| freq / factor).collect(), 1.0)
            }
        };
        let axes = self.sections.map_or_else(Vec::new, |sections| sections.axes(inv_freq.len()));
        Rope { inv_freq: inv_freq.into_iter().map(|freq| freq as f32).collect(), scale: scale as f32, axes }
    }
}

/// Long waves are slowed by `factor`, short ones kept, those between interpolated.
fn llama3(freq: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * PI / freq;
    if wavelength < original / high {
        freq
    } else if wavelength > original / low {
        freq / factor
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * freq / factor + smooth * freq
    }
}

impl Yarn {
    fn scale(&self, base: &[f64], theta: f64, dim: f64) -> Vec<f64> {
        let dimension = |rotations: f64| {
            dim * (self.original_max_position / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (dimension(self.beta_fast), dimension(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let low = low.max(0.0);
        let mut high = high.min(dim - 1.0);
        if low == high {
            high += 0.001;
        }
        let blend = |(i, freq): (usize, &f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            freq / self.factor * ramp + freq * (1.0 - ramp)
        };
        base.iter().enumerate().map(blend).collect()
    }
}

fn parse_scaling(
    config: Fields<'_>,
    nested: Fields<'_>,
    family: &Family,
    rotary_dim: usize,
    max_position: usize,
) -> Result<RopeScaling> {
    let kind = nested.text("rope_type")?.or(nested.text("type")?).unwrap_or("default");
    // transformers reads Phi-3's early "su" and "yarn" as LongRoPE.
    let kind = match kind {
        "su" | "yarn" if family.model_type == "phi3" => "longrope",
        kind => kind,
    };
    // The outer field wins, as in transformers (Phi-3 keeps it there).
    let original = match config.size_opt("original_max_position_embeddings", POSITION_MAX)? {
        Some(original) => Some(original),
        None => nested.size_opt("original_max_position_embeddings", POSITION_MAX)?,
    };
    match kind {
        // What `mrope` names is in `mrope_section`.
        "default" | "mrope" => Ok(RopeScaling::None),
        "dynamic" if nested.value("alpha").is_some() => {
            Ok(RopeScaling::NtkAlpha { alpha: nested.positive("alpha")? })
        }
        "linear" => Ok(RopeScaling::Linear { factor: nested.positive("factor")? }),
        "llama3" => {
            let scaling = RopeScaling::Llama3 {
                factor: nested.positive("factor")?,
                low_freq_factor: nested.positive("low_freq_factor")?,
                high_freq_factor: nested.positive("high_freq_factor")?,
                original_max_position: original.unwrap_or(max_position) as f64,
            };
            match scaling {
                RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } if high <= low => {
                    Err(nested.problem(
                        "high_freq_factor",
                        format!("is {high}, expected more than low_freq_factor = {low}"),
                    ))
                }
                scaling => Ok(scaling),
            }
        }
        "yarn" => parse_yarn(nested, original.unwrap_or(max_position)),
        "longrope" => parse_longrope(nested, original.unwrap_or(4096), rotary_dim, max_position),
        other => Err(ModelError::Unsupported {
            file: config.file().to_owned(),
            what: format!("rope scaling `{}`", other.chars().take(60).collect::<String>()),
            supported: "supported: default, linear, llama3, yarn, longrope, proportional".to_owned(),
        }),
    }
}

/// Of `pairs` frequencies.
fn parse_sections(nested: Fields<'_>, pairs: usize) -> Result<Option<Sections>> {
    let Some(list) = nested.list("mrope_section")? else { return Ok(None) };
    let size = |value: &serde_json::Value| {
        value.as_u64().filter(|size| *size <= POSITION_MAX as u64).map(|size| size as usize)
    };
    let sizes: Option<Vec<usize>> = list.iter().map(size).collect();
    let Some(Ok(frequencies)) = sizes.map(<[usize; 3]>::try_from) else {
        return Err(nested.problem("mrope_section", "must hold three numbers: of time, height and width"));
    };
    let interleaved = nested.flag("mrope_interleaved")?.unwrap_or(false);
    let sum: usize = frequencies.iter().sum();
    // Of those that take turns some may be left, or more be named than there are.
    if sum != pairs && !interleaved {
        let problem = format!("is {frequencies:?}, {sum} frequencies of {pairs}");
        return Err(nested.problem("mrope_section", problem));
    }
    Ok(Some(Sections { frequencies, interleaved }))
}

fn parse_yarn(nested: Fields<'_>, original: usize) -> Result<RopeScaling> {
    let factor = nested.positive("factor")?;
    let all_dim = nested.positive_opt("mscale_all_dim")?;
    let attention_factor = match nested.positive_opt("attention_factor")? {
        Some(attention_factor) => attention_factor,
        None => match (nested.positive_opt("mscale")?, all_dim) {
            (Some(one), Some(all)) => mscale(factor, one) / mscale(factor, all),
            _ => mscale(factor, 1.0),
        },
    };
    Ok(RopeScaling::Yarn(Yarn {
        factor,
        original_max_position: original as f64,
        beta_fast: nested.positive_opt("beta_fast")?.unwrap_or(32.0),
        beta_slow: nested.positive_opt("beta_slow")?.unwrap_or(1.0),
        truncate: nested.flag("truncate")?.unwrap_or(true),
        attention_factor,
        all_dim,
    }))
}

fn mscale(scale: f64, weight: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * weight * scale.ln() + 1.0 }
}

fn parse_longrope(
    nested: Fields<'_>,
    original: usize,
    rotary_dim: usize,
    max_position: usize,
) -> Result<RopeScaling> {
    let factors = |name: &str| -> Result<Vec<f64>> {
        let factors = nested.positive_list(name)?.ok_or_else(|| nested.problem(name, "is missing"))?;
        if factors.len() != rotary_dim / 2 {
            let problem = format!("holds {} factors, expected {}", factors.len(), rotary_dim / 2);
            return Err(nested.problem(name, problem));
        }
        Ok(factors)
    };
    let factor = nested.positive_opt("factor")?.unwrap_or(max_position as f64 / original as f64);
    let attention_factor = match nested.positive_opt("attention_factor")? {
        Some(attention_factor) => attention_factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::LongRope {
        short_factor: factors("short_factor")?,
        long_factor: factors("long_factor")?,
        original_max_position: original,
        attention_factor,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those of Qwen2.5-VL and of Qwen3-VL and 3.5, by transformers' `apply_multimodal_rotary_pos_emb` and `apply_interleaved_mrope`.
    #[test]
    fn axes_follow_each_other_or_take_turns() {
        let axes = |frequencies, interleaved, pairs| Sections { frequencies, interleaved }.axes(pairs);
        let expected = [vec![0; 16], vec![1; 24], vec![2; 24]].concat();
        assert_eq!(axes([16, 24, 24], false, 64), expected);
        let mut expected = vec![0; 32];
        (1..33).step_by(3).for_each(|at| expected[at] = 1);
        (2..30).step_by(3).for_each(|at| expected[at] = 2);
        assert_eq!(axes([11, 11, 10], true, 32), expected);
        assert_eq!(axes([24, 20, 20], true, 64)[58..], [1, 2, 0, 0, 0, 0], "what is left is of time");
    }
}
