//! Rules for answers whose every next step hangs on all tokens before it: whoever follows them with a token lost, doubled or of
//! somebody else's answer allows other tokens than the oracle.

use std::sync::{Arc, Mutex, PoisonError};

use folio_engine::{Guide, Rules};

use crate::rng::mix;

/// Two tokens of three may come next, by a hash of the answer so far.
pub struct HashRules {
    pub seed: u64,
    /// Some answers cannot be gone on with at all.
    pub ends: bool,
}

struct HashGuide {
    state: Mutex<u64>,
    ends: bool,
}

impl Rules for HashRules {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        let guide = HashGuide { state: Mutex::new(mix(self.seed)), ends: self.ends };
        chosen.iter().for_each(|token| guide.advance(*token));
        Arc::new(guide)
    }
}

impl Guide for HashGuide {
    fn advance(&self, token: u32) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = mix(*state ^ u64::from(token));
    }

    fn restrict(&self, logits: &mut [f32]) -> Result<(), String> {
        let state = *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.ends && state.is_multiple_of(101) {
            return Err("an answer that cannot be gone on with".into());
        }
        for (token, logit) in logits.iter_mut().enumerate() {
            if mix(state ^ !(token as u64)).is_multiple_of(3) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}
