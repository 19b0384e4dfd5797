//! Why serving is as fast as it is, and what it costs: what is behind `GET /v1/why`.
//!
//! Owns: samples of the engine's snapshot of the last minutes, and what each tenant's requests took. Must never: ask the engine for more
//! than its snapshot, or tell a tenant about another.
//!
//! Two sources, as for metrics. The engine's snapshot has figures that only grow; one sample of it every [`SAMPLED_EVERY`] is kept, and a
//! report is the difference of two. What falls to whom comes with the engine's events, which say what each took of its steps
//! (`folio_engine::Work`); it is added up by tenant where they are followed. What prompts have in common is looked at by a thread (`prompts`).
//!
//! Cost: a sample copies a few hundred bytes; an event is a short lock of its tenant's account. Reports are O(samples + accounts), and a look at the prefixes
//! that are followed (`repeated`), at most 8,192.

mod account;
mod advice;
mod breaks;
mod config;
mod history;
mod kind;
mod latencies;
mod lookups;
mod moments;
mod prompts;
mod repeated;
mod report;
mod roofline;
mod shadow;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use folio_kv::TenantId;
use parking_lot::Mutex;
use serde_json::Value;

use crate::engine::Engine;
use crate::observability::recording::Recorder;
use crate::observability::traces::Traces;
use crate::tenancy::tenant::Tenant;
use account::{Account, RecordParts};
pub(crate) use account::{RequestRecord, SubmittedRequest};
pub use config::{Targets, WhyConfig};
pub(crate) use history::Sample;
use history::SampleHistory;
pub(crate) use kind::RequestKind;
use latencies::Latencies;
pub(crate) use moments::MOMENT;
use moments::moment;
use prompts::Prompts;
use report::WhyReport;
pub use roofline::{Rates, Roofline, StepCosts, StepNeeds, StepShape};

/// Between two samples of the engine's snapshot.
pub(crate) const SAMPLED_EVERY: Duration = Duration::from_millis(250);

/// See the module documentation.
pub(crate) struct Why {
    engine: Arc<dyn Engine>,
    config: WhyConfig,
    history: Mutex<SampleHistory>,
    /// Of the longest sequence.
    context_tokens: u32,
    prompts: Arc<Prompts>,
    latencies: Arc<Latencies>,
    traces: Option<Arc<Traces>>,
    recorder: Arc<Recorder>,
    accounts: Mutex<HashMap<TenantId, Arc<Account>>>,
}

impl Why {
    /// `context_tokens`: of the longest sequence. `traces` and `recorder`: where a request's record goes at its end.
    pub fn new(
        engine: Arc<dyn Engine>,
        context_tokens: u32,
        config: WhyConfig,
        traces: Option<Arc<Traces>>,
        recorder: Arc<Recorder>,
    ) -> Self {
        Self {
            engine,
            config,
            context_tokens,
            history: Mutex::default(),
            prompts: Arc::new(Prompts::new()),
            latencies: Arc::default(),
            traces,
            recorder,
            accounts: Mutex::default(),
        }
    }

    /// Keeps a sample of the engine's snapshot.
    pub fn sample(&self) {
        let sample = self.now();
        self.history.lock().push(sample);
    }

    /// The engine's snapshot of now.
    pub fn now(&self) -> Sample {
        Sample::of(&self.engine.stats(), self.engine.now())
    }

    /// What passed since `before`, in the order of [`MOMENT`]; `before` is now from then on. `None`: no time is counted yet.
    pub fn moment(&self, before: &mut Sample) -> Option<Value> {
        let now = self.now();
        let moment = moment(before, &now)?;
        *before = now;
        Some(moment)
    }

    /// The same of the last minutes, the oldest first.
    pub fn moments(&self) -> Vec<Value> {
        let history = self.history.lock();
        let mut samples = history.all();
        let Some(mut before) = samples.next() else { return Vec::new() };
        let mut told = Vec::with_capacity(samples.size_hint().0);
        for now in samples {
            if let Some(moment) = moment(before, now) {
                told.push(moment);
                before = now;
            }
        }
        told
    }

    /// A request of a tenant begins: where what becomes of it is written.
    pub fn begin(&self, tenant: &Tenant, request: SubmittedRequest<'_>) -> RequestRecord {
        let target = self.config.targets.of(request.asked);
        let parts = RecordParts {
            account: self.account(tenant),
            engine: self.engine.clone(),
            prompts: self.prompts.clone(),
            latencies: self.latencies.clone(),
            traces: self.traces.clone(),
            recorder: self.recorder.clone(),
        };
        RequestRecord::new(parts, request, target)
    }

    /// A prefix was computed for a tenant without an answer. `us`: of steps, and of that to read what was cached.
    pub fn prefix(&self, tenant: &Tenant, tokens: u64, cached: u64, us: (f32, f32)) {
        self.account(tenant).computed(self.engine.now(), tokens, cached, us);
    }

    fn account(&self, tenant: &Tenant) -> Arc<Account> {
        let mut accounts = self.accounts.lock();
        accounts.entry(tenant.id).or_insert_with(|| Arc::new(Account::new(tenant))).clone()
    }

    /// Tenants that are no more.
    pub fn forget(&self, gone: &HashSet<TenantId>) {
        self.accounts.lock().retain(|id, _| !gone.contains(id));
        self.prompts.forget(gone);
    }

    /// What became of a request, by its id: of one tenant, or of whichever has it; of several the last.
    pub fn request(&self, tenant: Option<TenantId>, id: &str) -> Option<Value> {
        self.accounts(tenant)
            .iter()
            .filter_map(|account| account.find(id))
            .max_by_key(|found| found.0)
            .map(|found| found.1)
    }

    fn accounts(&self, tenant: Option<TenantId>) -> Vec<Arc<Account>> {
        let accounts = self.accounts.lock();
        match tenant {
            Some(tenant) => accounts.get(&tenant).cloned().into_iter().collect(),
            None => {
                let mut all: Vec<_> = accounts.values().cloned().collect();
                all.sort_by(|one, other| one.name.cmp(&other.name));
                all
            }
        }
    }

    /// The last minute of a tenant alone: its part, and nobody else's.
    pub fn tenant(&self, tenant: &Tenant) -> Value {
        self.report(self.accounts(Some(tenant.id)))
            .of_tenant(&self.account(tenant), self.engine.holdings(tenant.cache))
    }

    /// The last minute of the machine and of everybody on it. `caches`: what each cache is called.
    pub fn machine(&self, caches: &[(&'static str, String, TenantId)]) -> Value {
        self.report(self.accounts(None)).of_machine(caches)
    }

    fn report(&self, accounts: Vec<Arc<Account>>) -> WhyReport<'_> {
        let end = self.now();
        let from = config::window_from(end.at);
        let history = self.history.lock();
        WhyReport {
            engine: &*self.engine,
            config: &self.config,
            context_tokens: self.context_tokens,
            prompts: &self.prompts,
            latencies: &self.latencies,
            waiting: history.mean_waiting(from, &end),
            begin: history.at(from),
            end,
            accounts,
        }
    }
}
