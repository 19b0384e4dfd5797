//! What the scheduler reports.

use folio_kv::KvCache;

use super::Scheduler;
use crate::request::Micros;
use crate::stats::{Counters, EngineStats};

impl Scheduler {
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Tokens of the last committed step, and how many of them were decodes.
    pub fn last_step(&self) -> (u32, u32) {
        self.last_step
    }

    /// Writes everything the scheduler knows into `stats`.
    pub(crate) fn report(&self, cache: &KvCache, stats: &mut EngineStats) {
        stats.queued_requests = self.queued.requests;
        stats.queued_tokens = self.queued.tokens;
        stats.running = self.running.len() as u32;
        stats.waiting = self.waiting.counts();
        stats.waits_until = if self.is_idle() { self.waits_until() } else { None };
        stats.counters = self.counters;
        stats.cache = cache.stats();
        (stats.last_step_tokens, stats.last_step_decodes) = self.last_step;
        stats.busy = self.has_work();
    }

    /// Nothing is under way, and the last plan had nothing to compute.
    fn is_idle(&self) -> bool {
        !self.under_way() && self.step.granted == 0
    }

    /// The first moment at which somebody has waited for as long as that is legitimate. O(waiting), while nothing is computed.
    fn waits_until(&self) -> Option<Micros> {
        let waiting = self.waiting.iter().filter_map(|slot| self.sequences[slot].waiting());
        waiting
            .map(|waiting| waiting.reason.until(waiting.since, &self.config).unwrap_or(waiting.since))
            .min()
    }
}
