//! Whether the engine gets on: what a committed step says of it.
//!
//! Owns: what counts as progress, and how many steps failed in a row. Must never: count turns of the loop, which come and go whether or
//! not anything is computed. Told once per commit, so it holds for any number of steps under way. Cost: a few comparisons per step.
//!
//! Progress is a token computed, or a choice that ended otherwise than by the executor's failure. Nothing is owed while nothing waits, and
//! while all that waits does so within a limit of its own ([`WaitingFor::until`](crate::WaitingFor::until)).

use crate::request::FinishReason;
use crate::stats::Counters;

/// So many steps that fail one after the other, with nothing computed in between, and the engine gives up: what has failed so often will
/// fail again. More than may be under way at once, which a single fault of a device can end together.
pub const FAILURES_MAX: u32 = 8;

/// See the module documentation.
#[derive(Default)]
pub(crate) struct Progress {
    before: Counters,
    /// Steps that failed since something was computed.
    pub failures: u32,
}

impl Progress {
    /// After a commit: whether it got anybody on.
    pub fn committed(&mut self, counters: &Counters) -> bool {
        let before = std::mem::replace(&mut self.before, *counters);
        let computed = counters.iteration_tokens > before.iteration_tokens;
        let failed = counters.executor_failures > before.executor_failures;
        if failed {
            self.failures += 1;
        } else if computed {
            self.failures = 0;
        }
        // With a step that failed, errors are the executor's.
        let ended = |counters: &Counters| {
            let errors = if failed { counters.finished[FinishReason::Error as usize] } else { 0 };
            counters.finished.iter().sum::<u64>() - errors
        };
        computed || ended(counters) > ended(&before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(change: impl Fn(&mut Counters)) -> impl FnMut(&mut Progress, &mut Counters) -> bool {
        move |progress, counters| {
            change(counters);
            progress.committed(counters)
        }
    }

    #[test]
    fn a_turn_that_computes_nothing_is_no_progress() {
        let (mut progress, mut counters) = (Progress::default(), Counters::default());
        assert!(!after(|_| {})(&mut progress, &mut counters));
        assert!(after(|counters| counters.iteration_tokens += 3)(&mut progress, &mut counters));
        assert!(!after(|counters| counters.steps += 1)(&mut progress, &mut counters));
        for reason in 0..counters.finished.len() {
            assert!(after(|counters| counters.finished[reason] += 1)(&mut progress, &mut counters));
        }
    }

    #[test]
    fn what_the_executor_ends_is_no_progress_and_only_tokens_make_up_for_it() {
        let (mut progress, mut counters) = (Progress::default(), Counters::default());
        let mut fail = after(|counters| {
            counters.executor_failures += 1;
            counters.finished[FinishReason::Error as usize] += 2;
        });
        let mut cancel = after(|counters| counters.finished[FinishReason::Cancelled as usize] += 1);
        for failures in 1..5 {
            assert!(!fail(&mut progress, &mut counters));
            assert!(cancel(&mut progress, &mut counters));
            assert_eq!(progress.failures, failures);
        }
        assert!(after(|counters| counters.iteration_tokens += 1)(&mut progress, &mut counters));
        assert_eq!(progress.failures, 0);
    }
}
