//! What a change gains of the window.

use serde_json::{Value, json};

use super::evidence::Evidence;

/// Least share of what it is a part of that advice is given for.
const LEAST: f64 = 0.05;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gain {
    /// Share of the computed tokens of prompts that would not be computed, and seconds that loading them takes instead.
    Prompts { share: f64, load_s: f64 },
    /// The same of what would not be computed again, which is no token of a prompt, at the price of one.
    Recomputed { share: f64, load_s: f64 },
    /// Seconds of all steps.
    Steps { seconds: f64 },
}

impl Gain {
    /// Of prompts, nothing being loaded.
    pub fn of_prompts(share: f64) -> Self {
        Self::Prompts { share, load_s: 0.0 }
    }

    /// Of what it is a part of.
    pub fn share(self, evidence: &Evidence) -> f64 {
        match self {
            Self::Prompts { share, .. } | Self::Recomputed { share, .. } => share,
            Self::Steps { seconds } => seconds / evidence.steps.seconds.max(f64::MIN_POSITIVE),
        }
    }

    /// Of steps, less what loading takes.
    pub fn seconds(self, evidence: &Evidence) -> f64 {
        match self {
            Self::Prompts { share, load_s } | Self::Recomputed { share, load_s } => {
                share * evidence.prompt_s - load_s
            }
            Self::Steps { seconds } => seconds,
        }
    }

    pub fn is_enough(self, evidence: &Evidence) -> bool {
        let of = match self {
            Self::Prompts { .. } | Self::Recomputed { .. } => evidence.prompt_s,
            Self::Steps { .. } => evidence.steps.seconds,
        };
        self.share(evidence) >= LEAST && self.seconds(evidence) >= LEAST * of
    }

    pub fn json(self, evidence: &Evidence) -> Value {
        let (share, step_s) = (self.share(evidence), self.seconds(evidence));
        let tokens = share * evidence.computed_tokens as f64;
        match self {
            Self::Prompts { .. } => {
                json!({"prompt_tokens_share": share, "prompt_tokens": tokens, "step_s": step_s})
            }
            Self::Recomputed { .. } => json!({"recomputed_tokens": tokens, "step_s": step_s}),
            Self::Steps { .. } => json!({"step_s": step_s, "step_share": share}),
        }
    }
}
