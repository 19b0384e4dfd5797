//! Which tensor of a GGUF file is which tensor of the decoder, and in which order its rows lie.

use std::borrow::Cow;

use crate::config::Config;
use crate::family::{ExpertTensors, Family, Fusion, Norms, Shared};

/// Order of the rows of a stored matrix or vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    AsStored,
    /// The decoder rotates dimension `i` of a head with dimension `i + half`; llama.cpp's `llama` architecture rotates
    /// neighbours, so its q and k hold each head's rows as 0, half, 1, half + 1, ... Blocks run along columns, so moving
    /// whole rows changes no value.
    Interleaved {
        heads: usize,
    },
}

impl RowOrder {
    /// Whether a tensor of this many rows can be in this order.
    pub fn fits(self, rows: usize) -> bool {
        match self {
            RowOrder::AsStored => true,
            RowOrder::Interleaved { heads } => heads > 0 && rows > 0 && rows.is_multiple_of(2 * heads),
        }
    }

    /// The rows of `stored` as the decoder expects them; there are `rows`, which must fit ([`RowOrder::fits`]).
    pub fn arranged(self, stored: &[u8], rows: usize) -> Cow<'_, [u8]> {
        let RowOrder::Interleaved { heads } = self else { return Cow::Borrowed(stored) };
        assert!(self.fits(rows), "{rows} rows in {heads} heads");
        let (row_bytes, half) = (stored.len() / rows, rows / heads / 2);
        let mut arranged = Vec::with_capacity(stored.len());
        for head in 0..heads {
            for part in 0..2 {
                for i in 0..half {
                    let row = head * 2 * half + 2 * i + part;
                    arranged.extend_from_slice(&stored[row * row_bytes..(row + 1) * row_bytes]);
                }
            }
        }
        Cow::Owned(arranged)
    }
}

/// What the names depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// q, k and v are one tensor, and so are gate and up.
    pub fused: bool,
    /// q and k are stored in the order of a rotation of neighbours.
    pub interleaved: bool,
    pub heads: usize,
    pub kv_heads: usize,
    /// There are norms behind the two parts of a layer, besides those before them.
    pub post_norms: bool,
    /// The decoder's name of the router of a mixture of experts.
    pub router: Option<&'static str>,
    /// Gates of experts and what they gate are one tensor.
    pub halves: bool,
    /// What only some families have ([`own`]).
    pub own: [Parts; 2],
}

/// Stored parts of a layer and what the decoder calls them; or whole names, which have no part.
pub type Parts = &'static [(&'static str, &'static str)];

const LATENT: Parts = &[
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
];

const DELTA: Parts = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

const MAMBA: Parts = &[
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_dt.bias", "mamba.dt_bias"),
    ("ssm_a", "mamba.A_log"),
    ("ssm_d", "mamba.D"),
    ("ssm_norm", "mamba.gated_norm"),
    ("ssm_out", "mamba.out_proj"),
];

const SHORT_CONV: Parts = &[
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.out_proj", "conv.out_proj"),
    ("token_embd_norm.weight", "model.norm.weight"),
];

/// Of Gemma 4.
const OWN_LAYERS: Parts = &[
    ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("layer_output_scale.weight", "layer_scalar"),
];

/// Experts beside the part that feeds forward elsewhere. What both are made of may be one tensor, each expert's gates and then what they
/// gate.
const BESIDE: Parts = &[
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
];

const SHARED: Parts = &[
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

const SHARED_GATED: Parts = &[
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// What a family has instead of attention, and the expert that speaks for every token.
fn own(family: &Family) -> [Parts; 2] {
    let mixer = match family {
        family if family.latent => LATENT,
        family if family.delta.is_some() => DELTA,
        family if family.mamba.is_some() => MAMBA,
        family if family.short_conv => SHORT_CONV,
        family if family.layer_inputs => OWN_LAYERS,
        _ => &[],
    };
    let shared = match family.mixture.map(|mixture| mixture.shared) {
        None | Some(Shared::Never) => &[],
        Some(Shared::Gated(_)) => SHARED_GATED,
        Some(Shared::Beside(_)) => BESIDE,
        Some(_) => SHARED,
    };
    [mixer, shared]
}

/// Rotary factors: read with the configuration, no part of the decoder's weights.
pub const ROPE_FREQS: &str = "rope_freqs.weight";
pub const ROPE_LONG: &str = "rope_factors_long.weight";
pub const ROPE_SHORT: &str = "rope_factors_short.weight";

impl Names {
    /// Of a decoder's files.
    pub fn of(config: &Config, interleaved: bool) -> Self {
        Self {
            fused: config.family.fusion == Fusion::Fused,
            interleaved,
            heads: config.heads,
            kv_heads: config.kv_heads,
            post_norms: config.family.norms == Norms::Around,
            router: config.family.mixture.map(|mixture| mixture.router),
            halves: config.family.mixture.is_some_and(|mixture| mixture.stored == ExpertTensors::Halves),
            own: own(&config.family),
        }
    }

    /// The decoder's name of a stored tensor. One that the decoder does not have keeps its own name behind its layer's
    /// prefix, so that it is seen as part of the layer and refused.
    pub fn decoder_name(&self, stored: &str) -> String {
        match stored {
            "token_embd.weight" => return "model.embed_tokens.weight".to_owned(),
            "output_norm.weight" => return "model.norm.weight".to_owned(),
            "output.weight" => return "lm_head.weight".to_owned(),
            "output.scale" => return "lm_head.scale".to_owned(),
            "output.input_scale" => return "lm_head.input_scale".to_owned(),
            _ => {}
        }
        let known = |name: &str| {
            let mut own = self.own.into_iter().flatten();
            own.find(|(stored, _)| *stored == name).map(|(_, ours)| *ours)
        };
        if let Some(name) = known(stored) {
            return name.to_owned();
        }
        let Some((layer, rest)) = stored.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            return stored.to_owned();
        };
        if let Some(name) = known(rest) {
            return format!("model.layers.{layer}.{name}");
        }
        if let Some(router) = self.router.filter(|_| rest == "exp_probs_b.bias") {
            return format!("model.layers.{layer}.{router}.e_score_correction_bias");
        }
        let (part, leaf) = rest.rsplit_once('.').unwrap_or((rest, ""));
        if let Some(part) = known(part) {
            return format!("model.layers.{layer}.{part}.{leaf}");
        }
        let part = match part {
            "attn_norm" => "input_layernorm",
            "ffn_norm" if self.post_norms => "pre_feedforward_layernorm",
            "ffn_norm" => "post_attention_layernorm",
            // Before the feed-forward part or behind attention: other decoders call it the same.
            "post_attention_norm" => "post_attention_layernorm",
            "post_ffw_norm" => "post_feedforward_layernorm",
            "attn_sinks" if leaf == "weight" => return format!("model.layers.{layer}.self_attn.sinks"),
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_qkv" if self.fused => "self_attn.qkv_proj",
            "attn_output" => "self_attn.o_proj",
            "attn_q_norm" => "self_attn.q_norm",
            "attn_k_norm" => "self_attn.k_norm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" if self.fused => "mlp.gate_up_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            "ffn_latent_down" => "mlp.fc1_latent_proj",
            "ffn_latent_up" => "mlp.fc2_latent_proj",
            // Of the layer behind the last one: a head that drafts, as DeepSeek names it.
            "nextn.eh_proj" => "eh_proj",
            "nextn.enorm" => "enorm",
            "nextn.hnorm" => "hnorm",
            "nextn.embed_tokens" => "embed_tokens",
            "nextn.shared_head_head" => "shared_head.head",
            "nextn.shared_head_norm" => "shared_head.norm",
            other => match (self.router, other) {
                (Some(router), "ffn_gate_inp") => router,
                (Some(_), "ffn_gate_exps") => "mlp.experts.gate_proj",
                (Some(_), "ffn_up_exps") => "mlp.experts.up_proj",
                (Some(_), "ffn_down_exps") if self.halves && leaf == "weight" => {
                    return format!("model.layers.{layer}.mlp.experts.down_proj");
                }
                (Some(_), "ffn_down_exps") => "mlp.experts.down_proj",
                (_, other) => other,
            },
        };
        format!("model.layers.{layer}.{part}.{leaf}")
    }

    /// Shape of the tensor that the decoder calls `name`: experts follow each other, and so do heads; sizes of one are put back.
    pub fn shape(&self, name: &str, stored: &[usize]) -> Vec<usize> {
        match *stored {
            [channels, taps] if name.ends_with(".conv1d.weight") || name.ends_with(".conv.conv.weight") => {
                return vec![channels, 1, taps];
            }
            // One column for each head; one row for each group.
            [heads, 1] if name.ends_with(".mamba.A_log") || name.ends_with(".mamba.D") => return vec![heads],
            [groups, each] if name.ends_with(".mamba.gated_norm.weight") => {
                return vec![groups.saturating_mul(each)];
            }
            // Not joined.
            [_, _, _] if self.halves && name.ends_with("_proj") => return stored.to_vec(),
            [columns] if name.ends_with(".shared_expert_gate.weight") => return vec![1, columns],
            _ => {}
        }
        let together = [".mlp.experts.", ".self_attn.k_b_proj.", ".self_attn.v_b_proj."];
        let experts = together.iter().any(|part| name.contains(part));
        let kept = usize::from(!name.ends_with(".bias"));
        match stored.len().checked_sub(1 + kept) {
            Some(joined @ 1..) if experts => {
                let rows = stored[..=joined].iter().product();
                std::iter::once(rows).chain(stored[joined + 1..].iter().copied()).collect()
            }
            _ => stored.to_vec(),
        }
    }

    /// Order of the rows of the tensor that the decoder calls `name`.
    pub fn order(&self, name: &str) -> RowOrder {
        let of = |part: &str| name.contains(part);
        match self.interleaved {
            true if of(".self_attn.q_proj.") => RowOrder::Interleaved { heads: self.heads },
            true if of(".self_attn.k_proj.") => RowOrder::Interleaved { heads: self.kv_heads },
            _ => RowOrder::AsStored,
        }
    }
}

/// Whether a tensor outside of all layers is read with the configuration.
pub fn is_rotary(stored: &str) -> bool {
    [ROPE_FREQS, ROPE_LONG, ROPE_SHORT].contains(&stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_are_put_back_into_halves() {
        // Two heads of four dimensions; a row is its number as bf16-sized bytes.
        let stored: Vec<u8> = [0u8, 2, 1, 3, 4, 6, 5, 7].iter().flat_map(|row| [*row, 100]).collect();
        let order = RowOrder::Interleaved { heads: 2 };
        let arranged = order.arranged(&stored, 8);
        let rows: Vec<u8> = arranged.iter().step_by(2).copied().collect();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(arranged.len(), stored.len());
        assert_eq!(RowOrder::AsStored.arranged(&stored, 8), stored);
        assert!(!order.fits(7) && !order.fits(0) && order.fits(12) && RowOrder::AsStored.fits(7));
    }

    #[test]
    fn what_the_decoder_lacks_stays_visible() {
        let names = Names {
            fused: false,
            interleaved: true,
            heads: 2,
            kv_heads: 1,
            post_norms: false,
            router: None,
            halves: false,
            own: [&[]; 2],
        };
        assert_eq!(names.decoder_name("blk.3.attn_q.bias"), "model.layers.3.self_attn.q_proj.bias");
        assert_eq!(names.decoder_name("blk.3.ffn_gate_exps.weight"), "model.layers.3.ffn_gate_exps.weight");
        assert_eq!(names.decoder_name("blk.3.attn_qkv.weight"), "model.layers.3.attn_qkv.weight");
        assert_eq!(names.decoder_name("position_embd.weight"), "position_embd.weight");
        assert_eq!(names.order("model.layers.0.self_attn.k_proj.weight"), RowOrder::Interleaved { heads: 1 });
        assert_eq!(names.order("model.layers.0.self_attn.v_proj.weight"), RowOrder::AsStored);
    }

    #[test]
    fn experts_follow_each_other() {
        let names = Names {
            fused: false,
            interleaved: false,
            heads: 2,
            kv_heads: 1,
            post_norms: false,
            router: Some("mlp.gate"),
            halves: false,
            own: [&[]; 2],
        };
        let weight = names.decoder_name("blk.3.ffn_gate_exps.weight");
        assert_eq!(weight, "model.layers.3.mlp.experts.gate_proj.weight");
        assert_eq!(names.shape(&weight, &[4, 3, 2]), [12, 2]);
        assert_eq!(names.shape(&weight, &[4, 3]), [4, 3]);
        let bias = names.decoder_name("blk.3.ffn_down_exps.bias");
        assert_eq!((names.shape(&bias, &[4, 3]), names.shape(&bias, &[4])), (vec![12], vec![4]));
        let router = names.decoder_name("blk.3.ffn_gate_inp.weight");
        assert_eq!((names.shape(&router, &[4, 2]), &*router), (vec![4, 2], "model.layers.3.mlp.gate.weight"));
    }
}
