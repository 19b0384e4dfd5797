//! The figures that advice is computed from.

use folio_engine::{Activity, StepWork};

/// The largest tier.
#[derive(Clone, Copy, Debug)]
pub struct TierRoom {
    pub name: &'static str,
    pub bytes: u64,
    /// It evicts what it has for what comes.
    pub is_full: bool,
}

/// What advice is computed from.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    /// Of the cache.
    pub blocks: u32,
    pub block_tokens: u32,
    pub block_bytes: u64,
    /// There are other groups, with blocks of other sizes.
    pub has_windows: bool,
    /// Blocks that evicted content had in the window; without any the cache is large enough.
    pub evictions: u64,
    /// Share of the slots of blocks given up in the window that was never written. `None`: there were none.
    pub waste: Option<f64>,
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
    pub steps: StepEvidence,
}

impl Evidence {
    /// Of the whole cache.
    pub fn bytes(&self) -> f64 {
        f64::from(self.blocks) * self.block_bytes as f64
    }

    /// Blocks of the largest tier.
    pub fn room_beside(&self) -> f64 {
        self.tier.map_or(0.0, |tier| tier.bytes as f64 / self.block_bytes.max(1) as f64)
    }

    /// Blocks whose content is found. A tier has what the cache has, too.
    pub fn room(&self) -> f64 {
        f64::from(self.blocks).max(self.room_beside())
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

/// What steps of the window took, and who waited for them.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepEvidence {
    /// Of all of them.
    pub seconds: f64,
    /// Steps of sequences that decode and no prompt, and microseconds that they took.
    pub decodes: StepWork,
    pub decodes_us: u64,
    /// Rows of sequences that decoded beside prompts.
    pub beside_prompts: u64,
    /// Microseconds that a row of a prompt takes, and each position that it sees; 0: not known yet.
    pub row_us: (f64, f64),
    /// Most sequences and tokens of a step.
    pub sequences_max: u32,
    pub tokens_max: u32,
    /// In the mean, requests that waited for their turn, and for blocks.
    pub waiting_for_turn: f64,
    pub waiting_for_blocks: f64,
    /// Drafts that were verified, and steps that were begun while the one before ran.
    pub draft_tokens: u64,
    pub ahead: u64,
}

/// Steps of sequences that decode and no prompt, in the mean.
#[derive(Clone, Copy, Debug)]
pub struct DecodeStep {
    pub sequences: f64,
    /// Of each sequence: its rows, and the positions that it has.
    pub rows: f64,
    pub positions: f64,
    /// Microseconds of the step, and at most of each row more.
    pub step_us: f64,
    pub row_us: f64,
}

/// Steps that must have been measured.
const STEPS: u64 = 64;

impl StepEvidence {
    /// `None`: few were measured, or it is not known what a row takes.
    pub fn decode(&self) -> Option<DecodeStep> {
        let decodes = &self.decodes;
        let (each, deep) = self.row_us;
        if decodes.steps < STEPS || decodes.decode_rows == 0 || each + deep <= 0.0 {
            return None;
        }
        let (steps, sequences) = (decodes.steps as f64, decodes.sequences as f64);
        let rows = decodes.decode_rows as f64;
        Some(DecodeStep {
            sequences: sequences / steps,
            rows: rows / sequences,
            positions: decodes.kv_positions as f64 / sequences,
            step_us: self.decodes_us as f64 / steps,
            row_us: each + deep * decodes.attention as f64 / rows,
        })
    }

    /// Of steps by what they computed, and microseconds that those took.
    pub fn of(steps: impl Fn(Activity) -> (StepWork, u64)) -> Self {
        let us: u64 = Activity::ALL[..Activity::STEPS].iter().map(|activity| steps(*activity).1).sum();
        let (decodes, decodes_us) = steps(Activity::Decode);
        let beside_prompts = steps(Activity::Mixed).0.decode_rows;
        Self { seconds: us as f64 / 1e6, decodes, decodes_us, beside_prompts, ..Self::default() }
    }
}
