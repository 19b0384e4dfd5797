//! Rules for answers whose every next step hangs on all tokens before it: whoever follows them with a token lost, doubled or of
//! somebody else's answer allows other tokens than the oracle.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use folio_engine::{Guide, Restricted, Rules};

use crate::rng::mix;

/// Two tokens of three may come next, by a hash of the answer so far.
#[derive(Clone, Debug, Default)]
pub struct HashRules {
    pub seed: u64,
    /// Some answers cannot be gone on with at all.
    pub ends: bool,
    /// What may come next is known for some answers only some time after the last token, and for some never.
    pub late: Option<Late>,
}

/// How late masks are.
#[derive(Clone, Debug)]
pub struct Late {
    /// Virtual time in microseconds; `None`: masks are there at once, and an answer whose mask would never be there ends.
    pub clock: Option<Arc<AtomicU64>>,
    /// Longest time to a mask, but for one in so many answers, where it never comes; 0: it always does.
    pub longest_us: u64,
    pub never_one_in: u64,
}

struct HashGuide {
    rules: HashRules,
    /// Hash of the answer, and when it was last gone on with.
    state: Mutex<(u64, u64)>,
}

impl HashRules {
    /// The same, with every mask in time.
    pub fn punctual(&self) -> Self {
        Self { late: self.late.clone().map(|late| Late { clock: None, ..late }), ..self.clone() }
    }

    fn now(&self) -> u64 {
        let clock = self.late.as_ref().and_then(|late| late.clock.as_ref());
        clock.map_or(0, |clock| clock.load(Ordering::Relaxed))
    }

    /// When what may come behind the answer `state` is known that was said at `said`; `None`: never.
    fn known(&self, state: u64, said: u64) -> Option<u64> {
        let Some(Late { clock, longest_us, never_one_in }) = &self.late else { return Some(said) };
        let draw = mix(state ^ 0x1a7e);
        if *never_one_in > 0 && draw.is_multiple_of(*never_one_in) {
            return None;
        }
        let late = clock.is_some() && draw.is_multiple_of(3);
        Some(said + if late { draw / 3 % longest_us.max(&1) } else { 0 })
    }
}

impl Rules for HashRules {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        let guide = HashGuide { state: Mutex::new((mix(self.seed), self.now())), rules: self.clone() };
        chosen.iter().for_each(|token| guide.advance(*token));
        Arc::new(guide)
    }

    fn name(&self) -> &str {
        "hash"
    }
}

impl HashGuide {
    fn state(&self) -> (u64, u64) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn behind(&self, drafts: &[u32]) -> (u64, u64) {
        let (confirmed, said) = self.state();
        (drafts.iter().fold(confirmed, |state, token| mix(state ^ u64::from(*token))), said)
    }
}

impl Guide for HashGuide {
    fn advance(&self, token: u32) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = (mix(state.0 ^ u64::from(token)), self.rules.now());
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        let (state, said) = self.behind(drafts);
        let punctual = self.rules.late.as_ref().is_none_or(|late| late.clock.is_none());
        match self.rules.known(state, said) {
            None if punctual => return Err("what may come next is never known".into()),
            Some(known) if known <= self.rules.now() => {}
            _ => return Ok(Restricted::Late),
        }
        if self.rules.ends && state.is_multiple_of(101) {
            return Err("an answer that cannot be gone on with".into());
        }
        for (token, logit) in logits.iter_mut().enumerate() {
            if mix(state ^ !(token as u64)).is_multiple_of(3) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(Restricted::Applied)
    }

    /// Behind some answers, tokens which may be forbidden, and too few or too many of what was proposed are said to be its own.
    fn draft(&self, drafts: &mut Vec<u32>) -> usize {
        let (state, _) = self.state();
        match mix(state ^ 0xf0ce) % 6 {
            0 => drafts.truncate(1),
            1 | 2 => {
                drafts.clear();
                drafts.extend((1..=3).map(|at| (mix(state ^ at) % 29) as u32));
                return 3;
            }
            3 => return 2,
            _ => {}
        }
        0
    }

    fn is_ready(&self, drafts: &[u32]) -> bool {
        let (state, said) = self.behind(drafts);
        self.rules.known(state, said).is_some_and(|known| known <= self.rules.now())
    }
}
