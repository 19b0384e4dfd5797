//! The figures that advice is computed from.

/// The largest tier.
#[derive(Clone, Copy, Debug)]
pub(super) struct TierRoom {
    pub name: &'static str,
    pub bytes: u64,
    /// It evicts what it has for what comes.
    pub is_full: bool,
}

/// What advice is computed from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence {
    /// Of the cache.
    pub blocks: u32,
    pub block_tokens: u32,
    pub block_bytes: u64,
    /// Blocks that evicted content had in the window; without any the cache is large enough.
    pub evictions: u64,
    /// Tokens of prompts that were computed in the window, and seconds of steps that they took.
    pub computed_tokens: u64,
    pub prompt_s: f64,
    /// How many times more tokens fit the same memory as int8; `None`: they are that small already, or that is not known.
    pub int8: Option<f64>,
    /// KV is kept beside the cache.
    pub has_tier: bool,
    /// `None`: there is none, or it is not known how much there is room for.
    pub tier: Option<TierRoom>,
    /// Sequences that lost their blocks in the window, and tokens that were computed again.
    pub preemptions: u64,
    pub recomputed_tokens: u64,
    /// Between the cache and memory beside it; `None`: not measured.
    pub copy_bytes_per_s: Option<f64>,
}

impl Evidence {
    /// Of the whole cache.
    pub fn bytes(&self) -> f64 {
        f64::from(self.blocks) * self.block_bytes as f64
    }

    /// Seconds that it takes to load so many tokens, and how that is known.
    pub fn loading(&self, tokens: f64) -> (f64, &'static str) {
        let bytes = tokens * self.block_bytes as f64 / f64::from(self.block_tokens.max(1));
        match self.copy_bytes_per_s {
            Some(rate) => (bytes / rate, "what loading takes is taken off"),
            None => (0.0, "loading it instead costs what copying costs, which was not measured"),
        }
    }
}
