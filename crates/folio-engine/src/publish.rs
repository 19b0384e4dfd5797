//! Writes the snapshot that everybody else reads.
//!
//! Two snapshots take turns, and two lists of tenants in them: one is being read, the other is written in place and then swapped in under a lock held for
//! a pointer's exchange. A reader that keeps an old snapshot costs one allocation, nothing more.

use std::sync::{Arc, PoisonError};

use folio_kv::{Holdings, KvCache, TenantId};

use crate::handle::Shared;
use crate::progress::Progress;
use crate::request::Micros;
use crate::scheduler::Scheduler;
use crate::stats::{Counters, EngineStats};

/// Figures per tenant cost O(tenants), so they are refreshed once in so many steps, and whenever the engine falls idle.
const TENANT_STEPS: u64 = 32;
/// Each step keeps this share of the rate's memory: half of it is gone after some 35 steps.
const RATE_MEMORY: f64 = 0.98;

pub(crate) struct Publisher {
    shared: Arc<Shared>,
    /// The figures as last published; `spare` is the memory they will be written to next.
    latest: EngineStats,
    spare: Arc<EngineStats>,
    /// The memory that figures of tenants will be written to next.
    spare_tenants: Arc<Vec<(TenantId, Holdings)>>,
    progress: Progress,
    steps: u64,
    rate_tokens: f64,
    rate_us: f64,
}

impl Publisher {
    pub fn new(shared: Arc<Shared>) -> Self {
        let latest = (**shared.stats.lock().unwrap_or_else(PoisonError::into_inner)).clone();
        let (spare, progress) = (Arc::new(latest.clone()), Progress::default());
        let spare_tenants = Arc::default();
        Self { shared, spare, spare_tenants, latest, progress, steps: 0, rate_tokens: 0.0, rate_us: 0.0 }
    }

    /// Work arrived at an engine that had none.
    pub fn busy(&mut self, now: Micros) {
        if !self.latest.busy {
            self.latest.busy = true;
            self.latest.busy_since = now;
            self.swap_in();
        }
    }

    pub fn idle(&mut self) {
        self.latest.busy = false;
        self.latest.running = 0;
        self.latest.waiting = Default::default();
        self.latest.queued_requests = 0;
        self.latest.queued_tokens = 0;
        self.latest.adapters.clear();
        self.swap_in();
    }

    pub fn unhealthy(&mut self, reason: Arc<str>) {
        self.latest.unhealthy = Some(reason);
        self.swap_in();
    }

    pub fn is_unhealthy(&self) -> bool {
        self.latest.unhealthy.is_some()
    }

    /// A step was committed. How many have failed since anything was computed.
    pub fn committed(&mut self, counters: &Counters, now: Micros) -> u32 {
        if self.progress.committed(counters) {
            self.latest.last_progress = now;
        }
        self.progress.failures
    }

    pub fn step(&mut self, scheduler: &Scheduler, cache: &mut KvCache, began: Micros, now: Micros) {
        self.steps += 1;
        scheduler.report(cache, &mut self.latest);
        self.latest.last_step_us = now.0.saturating_sub(began.0);
        let prompt_tokens = self.latest.last_step_tokens - self.latest.last_step_decodes;
        if prompt_tokens > 0 {
            self.rate_tokens = self.rate_tokens * RATE_MEMORY + f64::from(prompt_tokens);
            self.rate_us = self.rate_us * RATE_MEMORY + self.latest.last_step_us as f64;
            self.latest.prefill_tokens_per_s = self.rate_tokens / self.rate_us.max(1.0) * 1e6;
        }
        match self.steps.is_multiple_of(TENANT_STEPS) || !scheduler.has_work() {
            true => self.swap_in_tenants(cache),
            false => self.swap_in(),
        }
    }

    /// The snapshot with the figures of tenants. What the cache forgets in the same moment becomes their past, unless that is being
    /// read: then it is forgotten another time. So whoever reads both finds everything once.
    fn swap_in_tenants(&mut self, cache: &mut KvCache) {
        let shared = self.shared.clone();
        let past = shared.past.try_lock().ok();
        let past = past.map(|mut past| {
            cache.retire_tenants(|tenant, _, held| {
                past.entry(tenant).or_default().carry(held);
                self.latest.retired.carry(held);
            });
            past
        });
        let tenants = Arc::make_mut(&mut self.spare_tenants);
        tenants.clear();
        tenants.extend(cache.tenants().map(|(tenant, _)| (tenant, cache.holdings(tenant))));
        tenants.sort_unstable_by_key(|(tenant, _)| *tenant);
        std::mem::swap(&mut self.latest.tenants, &mut self.spare_tenants);
        self.swap_in();
        drop(past);
    }

    fn swap_in(&mut self) {
        match Arc::get_mut(&mut self.spare) {
            Some(spare) => spare.clone_from(&self.latest),
            None => self.spare = Arc::new(self.latest.clone()),
        }
        let mut current = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *current, &mut self.spare);
    }
}
