//! Latent attention: its sizes.

use super::{WIDTH_MAX, unsupported};
use crate::checkpoint::json::Fields;
use crate::error::Result;

/// Sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Values that queries are compressed to. `None`: they are not.
    pub q_rank: Option<usize>,
    /// Values of a latent.
    pub rank: usize,
    /// Values of a head's query and key that are not rotated, and that are.
    pub nope_dim: usize,
    pub rope_dim: usize,
    /// Values that a head attends to.
    pub value_dim: usize,
    /// Neighbouring dimensions are rotated together.
    pub neighbours: bool,
    /// What makes keys and what makes values of a latent are two tensors, the former transposed (GGUF).
    pub apart: bool,
}

impl Latent {
    /// Epsilon of the norms of what is compressed, in DeepSeek's own code and in transformers, whatever `rms_norm_eps` is.
    pub const EPS: f32 = 1e-6;

    pub(super) fn parse(fields: Fields<'_>, heads: usize) -> Result<Self> {
        for indexer in ["index_topk", "index_n_heads", "index_head_dim"] {
            if fields.value(indexer).is_some() {
                let what = format!("attention to tokens that an indexer picks (field `{indexer}`)");
                return Err(unsupported(fields, what, "attention to all tokens"));
            }
        }
        let size = |name| fields.size(name, WIDTH_MAX);
        let q_rank = match fields.is_null("q_lora_rank") {
            true => None,
            false => Some(size("q_lora_rank")?),
        };
        let latent = Self {
            q_rank,
            rank: size("kv_lora_rank")?,
            nope_dim: size("qk_nope_head_dim")?,
            rope_dim: size("qk_rope_head_dim")?,
            value_dim: size("v_head_dim")?,
            neighbours: fields.flag("rope_interleave")?.unwrap_or(true),
            apart: false,
        };
        let even = [("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rope_dim)];
        if let Some((name, value)) = even.into_iter().find(|(_, value)| !value.is_multiple_of(2)) {
            return Err(fields.problem(name, format!("is {value}, expected an even number")));
        }
        let widths = [
            ("kv_lora_rank", latent.key_dim()),
            ("qk_nope_head_dim", latent.query_dim()),
            ("v_head_dim", latent.value_dim),
        ];
        for (name, width) in widths {
            if width.saturating_mul(heads) > WIDTH_MAX {
                let problem = format!("gives heads of {width} values, {heads} of which exceed {WIDTH_MAX}");
                return Err(fields.problem(name, problem));
            }
        }
        // Its latents are expanded for every head, and each has a key of its own.
        match fields.size_opt("num_key_value_heads", WIDTH_MAX)?.filter(|stated| *stated != heads) {
            Some(stated) => {
                let problem =
                    format!("is {stated}, but latents are those of all {heads} num_attention_heads");
                Err(fields.problem("num_key_value_heads", problem))
            }
            None => Ok(latent),
        }
    }

    /// Values that are kept of a token.
    pub fn key_dim(&self) -> usize {
        self.rank + self.rope_dim
    }

    /// As [`Config::attention_costs`](super::Config::attention_costs).
    pub(super) fn costs(&self, hidden: usize, heads: usize) -> [f64; 2] {
        let queries = match self.q_rank {
            Some(rank) => rank * (hidden + heads * self.query_dim()),
            None => hidden * heads * self.query_dim(),
        };
        let of_head = self.rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden;
        let weights = queries + hidden * self.key_dim() + heads * of_head;
        [weights as f64, (heads * (self.key_dim() + self.rank)) as f64]
    }

    /// Values of a head's query.
    pub fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}
