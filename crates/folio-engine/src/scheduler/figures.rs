//! What the scheduler reports, and the totals of tenants that the cache forgot.

use folio_kv::KvCache;

use super::Scheduler;
use crate::request::Micros;
use crate::sequence::Wait;
use crate::stats::{Counters, EngineStats, TenantFigures};

impl Scheduler {
    /// Forgets tenants that hold no memory; what they were counted until now goes on in their figures. Between two steps.
    pub(crate) fn retire_tenants(&mut self, cache: &mut KvCache) {
        cache.retire_tenants(|tenant, stats, holdings| {
            let figures = self.tenants.entry(tenant).or_default();
            figures.tenant = tenant;
            figures.cache.carry(stats);
            figures.kv.carry(holdings);
        });
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Tokens of the last committed step, and how many of them were decodes.
    pub fn last_step(&self) -> (u32, u32) {
        self.last_step
    }

    /// Writes everything the scheduler knows into `stats`. `tenants`: refresh those figures too, O(sequences + tenants).
    pub(crate) fn report(&self, cache: &KvCache, stats: &mut EngineStats, tenants: bool) {
        stats.queued_requests = self.queued.requests;
        stats.queued_tokens = self.queued.tokens;
        stats.waiting = self.waiting.counts();
        stats.running = self.sequences.len() as u32 - stats.waiting.total();
        stats.waits_until = if self.is_idle() { self.waits_until() } else { None };
        stats.counters = self.counters;
        stats.cache = cache.stats();
        (stats.last_step_tokens, stats.last_step_decodes) = self.last_step;
        stats.busy = self.has_work();
        if tenants {
            self.report_tenants(cache, stats);
        }
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

    fn report_tenants(&self, cache: &KvCache, stats: &mut EngineStats) {
        let mut tenants: Vec<TenantFigures> = self.tenants.values().copied().collect();
        tenants.sort_unstable_by_key(|figures| figures.tenant);
        for figures in &mut tenants {
            // What was counted before the cache forgot the tenant, and since.
            let (mut stats, mut holdings) =
                (cache.tenant_stats(figures.tenant), cache.holdings(figures.tenant));
            stats.carry(&figures.cache);
            holdings.carry(&figures.kv);
            (figures.cache, figures.kv) = (stats, holdings);
        }
        for sequence in self.sequences.iter() {
            let at = tenants.binary_search_by_key(&sequence.tenant(), |figures| figures.tenant);
            if let Ok(at) = at {
                let figures = &mut tenants[at];
                let computed = sequence.is_running() && sequence.suspension().is_none();
                let count = if computed { &mut figures.running } else { &mut figures.waiting };
                *count += 1;
            }
        }
        stats.tenants = tenants.into();
    }
}
