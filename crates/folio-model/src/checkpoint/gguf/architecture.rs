//! llama.cpp's architectures that are families of ours, and what each means without a key saying so.
//!
//! Owns: that table, and the fields of a config.json that only some architectures have (experts, soft caps, the scale of queries,
//! windows and rotations of their own). Sources: llama.cpp, `src/models/*.cpp` and `conversion/*.py`.

use serde_json::{Map, Value as Json, json};

use super::config::Reader;
use crate::error::Result;
use crate::family::{FAMILIES, Family, Mixture, Window};

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
    /// Bounds of YaRN's ramp are not rounded, which no key says.
    pub yarn_unrounded: bool,
}

const LLAMA: Architecture = Architecture {
    name: "llama",
    model_type: "llama",
    interleaved: true,
    wide_queries: None,
    window_needs_key: false,
    yarn_unrounded: false,
};

const fn plain(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture { name, model_type, interleaved: false, ..LLAMA }
}

/// Of two rows of one name the second is meant where there are experts.
pub const ARCHITECTURES: &[Architecture] = &[
    LLAMA,
    Architecture { model_type: "mixtral", ..LLAMA },
    plain("qwen2", "qwen2"),
    plain("qwen3", "qwen3"),
    plain("qwen3moe", "qwen3_moe"),
    Architecture { name: "smollm3", model_type: "smollm3", ..LLAMA },
    Architecture { name: "granite", model_type: "granite", ..LLAMA },
    Architecture { name: "ernie4_5", model_type: "ernie4_5", ..LLAMA },
    plain("seed_oss", "seed_oss"),
    Architecture { window_needs_key: true, ..plain("exaone4", "exaone4") },
    plain("phi3", "phi3"),
    Architecture { wide_queries: Some(46), ..plain("gemma2", "gemma2") },
    Architecture { wide_queries: Some(62), window_needs_key: true, ..plain("gemma3", "gemma3_text") },
    Architecture { yarn_unrounded: true, ..plain("gpt-oss", "gpt_oss") },
];

/// Whether files of this architecture can be served.
pub(crate) fn knows(architecture: &str) -> bool {
    ARCHITECTURES.iter().any(|known| known.name == architecture)
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

/// Keys (after the architecture's name) of a mixture of experts, which mean another decoder unless they have one of these values.
pub const NEUTRAL_EXPERTS: &[(&str, &[f64])] = &[
    ("expert_shared_count", &[0.0]),
    ("expert_shared_feed_forward_length", &[0.0]),
    ("expert_group_count", &[0.0, 1.0]),
    ("expert_weights_scale", &[0.0, 1.0]),
    // Softmax over all logits, or over those of the chosen.
    ("expert_gating_func", &[0.0, 1.0, 3.0]),
    ("leading_dense_block_count", &[0.0]),
];

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
        if family.query_scalar.is_some() {
            let size = |field: &str| map[field].as_u64().unwrap_or(0);
            let wide = self.architecture.wide_queries == Some(size("num_hidden_layers"));
            let even = size("hidden_size").checked_div(size("num_attention_heads"));
            let scalar = if wide { even.unwrap_or(0) } else { size("head_dim") };
            map.insert("query_pre_attn_scalar".into(), json!(scalar));
        }
        let local = self.number("rope.freq_base_swa")?;
        match (family.local_rope_theta, local) {
            (Some(_), Some(theta)) => drop(map.insert("rope_local_base_freq".into(), json!(theta))),
            (None, Some(theta)) if map["rope_theta"] != json!(theta) => {
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
        family.mixture.map_or(Ok(()), |mixture| self.experts(&mixture, map))
    }

    fn experts(&self, mixture: &Mixture, map: &mut Map<String, Json>) -> Result<()> {
        let needed = |suffix: &str| self.integer(suffix)?.ok_or_else(|| self.missing(suffix));
        map.insert("num_local_experts".into(), json!(needed("expert_count")?));
        map.insert("num_experts_per_tok".into(), json!(needed("expert_used_count")?));
        if let Some(inner) = self.integer("expert_feed_forward_length")? {
            map.insert(mixture.inner.into(), json!(inner));
        }
        if let Some((field, _)) = mixture.normalized {
            let normalized = self.metadata.flag(&self.key("expert_weights_norm"))?;
            map.insert(field.into(), json!(normalized.unwrap_or(true)));
        }
        Ok(())
    }
}
