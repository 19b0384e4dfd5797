//! What the scheduler reports.

use folio_kv::KvCache;

use super::Scheduler;
use crate::request::Micros;
use crate::sequence::Wait;
use crate::stats::{Counters, EngineStats, PREFILL_TOKENS};
use crate::work::Work;

impl Scheduler {
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What time has passed with.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Tokens of the last committed step, and how many of them were decodes.
    pub fn last_step(&self) -> (u32, u32) {
        self.last_step
    }

    /// Microseconds that a row of a prompt takes, and each position that it sees, as measured; 0 before the first.
    pub fn row_us(&self) -> (f64, f64) {
        self.costs.line()
    }

    /// Writes everything the scheduler knows into `stats`.
    pub(crate) fn report(&self, cache: &KvCache, stats: &mut EngineStats) {
        stats.queued_requests = self.queued.requests;
        stats.queued_tokens = self.queued.tokens;
        stats.waiting = self.waiting.counts;
        stats.running = self.sequences.len() as u32 - stats.waiting.total();
        stats.waits_until = if self.is_idle() { self.waits_until() } else { None };
        stats.counters = self.counters;
        stats.work = self.work;
        stats.load_costs = self.costs.load_costs();
        stats.prefill_us = self.costs.computing(0..PREFILL_TOKENS);
        stats.row_us = self.row_us();
        stats.cache = cache.stats();
        stats.adapters.clear();
        stats.adapters.extend(self.adapters.in_use.keys());
        let (resident, bytes) = self.adapters.size();
        (stats.resident_adapters, stats.adapter_bytes) = (resident as u32, bytes);
        stats.max_adapters = self.config.max_adapters;
        (stats.last_step_tokens, stats.last_step_decodes) = self.last_step();
        stats.busy = self.has_work();
    }

    /// Nothing is under way, and the last plan had nothing to compute.
    fn is_idle(&self) -> bool {
        !self.under_way() && self.step.granted == 0
    }

    /// The first moment at which somebody has waited for as long as that is legitimate. O(waiting), while nothing is computed.
    fn waits_until(&self) -> Option<Micros> {
        let waiting = self.waiting.iter().filter_map(|slot| self.sequences[slot].waiting());
        let until = |wait: Wait| wait.reason.until(wait.since, &self.config).unwrap_or(wait.since);
        let queued = waiting.map(|waiting| until(waiting.wait)).min();
        queued.into_iter().chain(self.suspended.first().map(|(until, ..)| *until)).min()
    }
}
