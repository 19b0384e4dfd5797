//! What the scheduler reports. Reads only.

use folio_kv::KvCache;

use super::Scheduler;
use crate::sequence::State;
use crate::stats::{Counters, EngineStats, TenantFigures};

impl Scheduler {
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Tokens of the last planned step, and how many of them were decodes.
    pub fn last_step(&self) -> (u32, u32) {
        (self.last_tokens, self.last_decodes)
    }

    /// Writes everything the scheduler knows into `stats`. `tenants`: refresh those figures too, O(sequences + tenants).
    pub(crate) fn report(&self, cache: &KvCache, stats: &mut EngineStats, tenants: bool) {
        stats.queued_requests = self.queued.requests;
        stats.queued_tokens = self.queued.tokens;
        stats.running = self.running.len() as u32;
        stats.waiting = Default::default();
        stats.waits_until = None;
        let nothing = !self.under_way() && self.last_tokens == 0;
        for slot in self.waiting.iter() {
            if let State::Waiting { reason, since } = self.sequences[slot].state {
                stats.waiting.add(reason);
                let until = reason.until(since, &self.config).unwrap_or(since);
                if nothing && stats.waits_until.is_none_or(|first| until < first) {
                    stats.waits_until = Some(until);
                }
            }
        }
        stats.counters = self.counters;
        stats.cache = cache.stats();
        stats.last_step_tokens = self.last_tokens;
        stats.last_step_decodes = self.last_decodes;
        stats.busy = self.has_work();
        if tenants {
            self.report_tenants(cache, stats);
        }
    }

    fn report_tenants(&self, cache: &KvCache, stats: &mut EngineStats) {
        let mut tenants: Vec<TenantFigures> = self.tenants.values().copied().collect();
        tenants.sort_unstable_by_key(|figures| figures.tenant);
        for figures in &mut tenants {
            figures.cache = cache.tenant_stats(figures.tenant);
            figures.kv = cache.holdings(figures.tenant);
        }
        for sequence in self.sequences.iter() {
            let at = tenants.binary_search_by_key(&sequence.tenant, |figures| figures.tenant);
            if let Ok(at) = at {
                let figures = &mut tenants[at];
                let count = if sequence.is_running() { &mut figures.running } else { &mut figures.waiting };
                *count += 1;
            }
        }
        stats.tenants = tenants.into();
    }
}
