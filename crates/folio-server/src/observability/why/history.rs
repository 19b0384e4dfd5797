//! Samples of the engine's snapshot, of the last minutes.

use std::collections::VecDeque;

use folio_engine::{EngineStats, Micros, PerReason, TIERS_MAX, WaitingFor, Work};
use folio_kv::CacheStats;

/// Two minutes, at four a second.
const SAMPLES_MAX: usize = 480;

/// What is kept of a snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    pub at: Micros,
    pub work: Work,
    pub running: u32,
    pub waiting: PerReason<u32>,
    pub waits: PerReason<u64>,
    pub queued_requests: u32,
    pub queued_tokens: u64,
    pub preemptions: u64,
    pub recomputed_tokens: u64,
    pub loaded_tokens: u64,
    pub tier_tokens: [u64; TIERS_MAX],
    pub drafts: (u64, u64),
    pub steps_ahead: u64,
    /// Microseconds of a prompt's row, and for each position that it sees.
    pub row_us: (f64, f64),
    pub cache: CacheStats,
}

impl Sample {
    pub(super) fn of(stats: &EngineStats, now: Micros) -> Self {
        let counters = &stats.counters;
        let work = stats.work.at(now);
        Self {
            at: now,
            work,
            running: stats.running,
            waiting: stats.waiting,
            waits: counters.waits,
            queued_requests: stats.queued_requests,
            queued_tokens: stats.queued_tokens,
            preemptions: counters.preemptions,
            recomputed_tokens: counters.recomputed_tokens,
            loaded_tokens: counters.loaded_tokens,
            tier_tokens: counters.tier_tokens,
            drafts: counters.draft_tokens(),
            steps_ahead: counters.steps_ahead,
            row_us: stats.row_us,
            cache: stats.cache,
        }
    }
}

#[derive(Default)]
pub(super) struct SampleHistory(VecDeque<Sample>);

impl SampleHistory {
    pub fn push(&mut self, sample: Sample) {
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    /// All samples that are kept, the oldest first.
    pub fn all(&self) -> impl Iterator<Item = &Sample> {
        self.0.iter()
    }

    /// The last sample up to then; before the first, the start of everything.
    pub fn at(&self, from: Micros) -> Sample {
        let after = self.0.partition_point(|sample| sample.at <= from);
        after.checked_sub(1).map(|last| self.0[last]).unwrap_or_default()
    }

    /// How many waited, by reason, in the mean of the samples since then.
    pub fn mean_waiting(&self, from: Micros, last: &Sample) -> Vec<(WaitingFor, f64)> {
        let after = self.0.partition_point(|sample| sample.at < from);
        let samples = || self.0.range(after..).chain(std::iter::once(last));
        let count = samples().count() as f64;
        let mean = |reason| samples().map(|sample| f64::from(sample.waiting[reason])).sum::<f64>() / count;
        WaitingFor::ALL.into_iter().map(|reason| (reason, mean(reason))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_begins_at_the_last_sample_before_it() {
        let mut history = SampleHistory::default();
        assert_eq!(history.at(Micros(5)).at, Micros(0));
        for at in 1..=1000 {
            history.push(Sample { at: Micros(at * 250), ..Sample::default() });
        }
        assert_eq!(history.0.len(), SAMPLES_MAX);
        assert_eq!(history.at(Micros(240_100)).at, Micros(240_000));
        assert_eq!(history.at(Micros(1)).at, Micros(0), "what was let go of");
        let mut last = Sample { at: Micros(250_100), ..Sample::default() };
        last.waiting[WaitingFor::Blocks] = 4;
        let mean = history.mean_waiting(Micros(249_500), &last);
        assert_eq!(
            mean[WaitingFor::Blocks as usize],
            (WaitingFor::Blocks, 1.0),
            "three that had none, and the last"
        );
    }
}
