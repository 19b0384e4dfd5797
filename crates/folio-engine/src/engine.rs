//! The step loop, on one thread that owns all mutable state.
//!
//! Owns: the order of things. Must never: decide who runs (the scheduler), compute (the executor), or wait for whoever
//! reads the events. It parks while there is no work and never spins.
//!
//! What can go wrong, and what happens then:
//! - the executor returns an error: every request of that step gets `Finished { Error }`, the rest goes on;
//! - it returns nothing else ([`FAILURES_MAX`] steps in a row): every request ends with an error, nothing new is accepted, and the engine
//!   reports itself unhealthy;
//! - the executor panics: its memory can no longer be trusted; every request ends with an error, nothing new is
//!   accepted, and the engine reports itself unhealthy;
//! - the loop itself panics: the same, from a handler outside the loop;
//! - a sink is gone or panics: its request is cancelled, its blocks are free before the next step is planned.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use folio_kv::{KvCache, TenantId, TierId};
use rustc_hash::FxHashMap;

use crate::adapters::{AdapterLoader, AdapterOrder, AdapterReport};
use crate::clock::Clock;
use crate::config::{ConfigError, SchedulerConfig};
use crate::drafting::Drafters;
use crate::feed::EventFeed;
use crate::handle::{EngineHandle, Shared};
use crate::mailbox::{Incoming, Mailbox, Phase, Queued};
use crate::outbox::Outbox;
use crate::plan::{Executor, ExecutorError, StepOutput, StepPlan};
use crate::progress::FAILURES_MAX;
use crate::publish::Publisher;
use crate::request::Micros;
use crate::scheduler::Scheduler;
use crate::stats::EngineStats;
use crate::tier::{Report, TIERS_MAX, Tier, TransferOrder};
use crate::turn::{StepDriver, order_transfers, turn};

/// Nothing can be computed although something waits: look again after this long, twice as long each time up to the second. Soon at
/// first, because a mask that was late is there soon.
const STALL: (Duration, Duration) = (Duration::from_micros(64), Duration::from_millis(1));

/// What an engine is made of.
pub struct EngineParts {
    pub config: SchedulerConfig,
    pub cache: KvCache,
    pub executor: Box<dyn Executor>,
    pub clock: Arc<dyn Clock>,
    /// Size of the vocabulary: token ids at or above it are refused.
    pub vocab: u32,
    /// Keep KV off the device, the nearest first; at most [`TIERS_MAX`].
    pub tiers: Vec<Arc<dyn Tier>>,
    /// Where what becomes of the cache's content is told.
    pub events: Option<Arc<EventFeed>>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0} tiers off the device are too many: there can be {TIERS_MAX}")]
    Tiers(usize),
    #[error("the engine's thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// Starts the engine on its own thread.
pub fn start(parts: EngineParts) -> Result<EngineHandle, StartError> {
    let config = parts.config;
    if parts.tiers.len() > TIERS_MAX {
        return Err(StartError::Tiers(parts.tiers.len()));
    }
    let preempted_in = parts.tiers.iter().position(|tier| tier.swaps());
    let scheduler = Scheduler::new(config.clone())?
        .with_overlap(parts.executor.depth(), parts.executor.lag())
        .with_drafter(parts.executor.drafter())
        .with_vocab(parts.vocab)
        .with_tiers(parts.tiers.iter().map(|tier| tier.chunk_blocks()))
        .swapping_to(preempted_in.map(|at| TierId(at as u8)));
    let limit = Queued { requests: config.max_queued_requests, tokens: config.max_queued_tokens };
    let kv = *parts.cache.config();
    let mut cache = parts.cache;
    cache.set_pin_limits(config.pin_limits(&kv));
    let shared = Arc::new(Shared {
        quota_tokens: quota_tokens(&cache),
        cache_tokens: cache.positions_max(config.max_num_batched_tokens),
        config,
        vocab: parts.vocab,
        embeddings: parts.executor.embedding_input(),
        block_tokens: kv.block_tokens,
        mailbox: Arc::new(Mailbox::new(limit)),
        tiers: parts.tiers.clone(),
        past: Mutex::default(),
        stats: Mutex::new(Arc::new(EngineStats {
            work: *scheduler.work(),
            cache: cache.stats(),
            ..EngineStats::default()
        })),
        clock: parts.clock.clone(),
        next_id: AtomicU64::new(1),
    });
    for tier in &parts.tiers {
        let mailbox = shared.mailbox.clone();
        let reports = Box::new(move |report| mailbox.report_transfer(report));
        tier.start(reports, parts.clock.clone(), parts.events.as_ref());
    }
    if let Some(feed) = &parts.events {
        feed.open(&mut cache);
    }
    let loads = shared.config.max_adapters > 0;
    let executor = Guarded {
        loader: loads.then(|| AdapterLoader::start(shared.mailbox.clone())).transpose()?,
        begun: VecDeque::with_capacity(parts.executor.depth()),
        executor: parts.executor,
        clock: parts.clock,
        tiers: parts.tiers,
        computed: false,
        broken: None,
        last_error: None,
        events: parts.events,
    };
    let mut engine = Engine {
        mailbox: shared.mailbox.clone(),
        scheduler,
        cache,
        executor,
        drafters: Drafters::default(),
        incoming: Incoming::default(),
        outbox: Outbox::default(),
        publisher: Publisher::new(shared.clone()),
        stall: STALL.0,
    };
    let thread = std::thread::Builder::new().name("folio-engine".into()).spawn(move || engine.live())?;
    Ok(EngineHandle::new(shared, thread))
}

/// What one request of a tenant may need.
fn quota_tokens(cache: &KvCache) -> (FxHashMap<TenantId, u64>, u64) {
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(cache.config().block_tokens);
    let (each, others) = cache.quota_limits();
    (each.into_iter().map(|(tenant, blocks)| (tenant, tokens(blocks))).collect(), tokens(others))
}

struct Engine {
    mailbox: Arc<Mailbox>,
    scheduler: Scheduler,
    cache: KvCache,
    executor: Guarded,
    drafters: Drafters,
    incoming: Incoming,
    outbox: Outbox,
    publisher: Publisher,
    /// How long it sleeps where something waits and nothing can be computed.
    stall: Duration,
}

impl Engine {
    fn run(&mut self) {
        while self.receive() {
            let now = self.executor.clock.now();
            self.answer_commands(now);
            self.take_reports(now);
            let (requests, cancellations) = self.incoming.drain();
            let requests = requests.inspect(|(request, _)| self.drafters.open(request));
            self.scheduler.admit(requests, cancellations, now);
            self.drafters.propose(&mut self.scheduler);
            let events = turn(&mut self.scheduler, &mut self.cache, &mut self.executor);
            self.drafters.follow(events);
            self.outbox.deliver(events, &mut self.incoming.cancellations);
            self.executor.tell_events(&mut self.cache);
            self.publish(now);
        }
    }

    /// At its end all that waits to be stored is ordered.
    fn store_all(&mut self) {
        self.scheduler.store_all(&mut self.cache);
        let now = self.executor.clock.now();
        order_transfers(&mut self.scheduler, &mut self.cache, &mut self.executor, now);
    }

    /// Transfers that ended, and weights that were read.
    fn take_reports(&mut self, now: Micros) {
        for report in self.incoming.reports.drain(..) {
            match report {
                Report::Loaded { tier, ticket, verified, bytes, us } => {
                    self.scheduler.loaded(tier, verified, bytes, us);
                    self.scheduler.end_load(&mut self.cache, ticket, verified, now);
                }
                Report::Cancelled { ticket } => {
                    self.scheduler.end_load(&mut self.cache, ticket, false, now);
                }
                Report::Read { lease, kept } => {
                    self.scheduler.end_store(&mut self.cache, lease, kept, now);
                }
            }
        }
        for report in self.incoming.adapters.drain(..) {
            self.scheduler.adapter_read(&mut self.cache, report, now);
        }
    }

    /// Answers what was asked of the cache.
    fn answer_commands(&mut self, now: Micros) {
        if self.incoming.commands.is_empty() {
            return;
        }
        self.cache.advance(now.0);
        for (command, reply) in self.incoming.commands.drain(..) {
            reply(self.scheduler.command(&mut self.cache, command));
        }
    }

    /// Takes what arrived, parking while there is nothing to do. `false`: the engine's life is over.
    fn receive(&mut self) -> bool {
        let idle = !self.scheduler.under_way() && !std::mem::take(&mut self.executor.computed);
        self.stall = if idle { (2 * self.stall).min(STALL.1) } else { STALL.0 / 2 };
        // Where nothing can be computed but something waits, a deadline may pass.
        let patience = if idle { self.stall } else { Duration::ZERO };
        let patience = (self.scheduler.has_work() || self.cache.tells_anew()).then_some(patience);
        let phase = self.mailbox.receive(&mut self.incoming, patience);
        self.outbox.open(&mut self.incoming);
        let more = self.scheduler.has_work() || !self.incoming.requests.is_empty();
        if more {
            self.publisher.busy(self.executor.clock.now());
        }
        match phase {
            Phase::Open => true,
            Phase::Draining => more,
            Phase::Stopping => {
                self.end_all("the engine is shutting down");
                false
            }
        }
    }

    fn publish(&mut self, step_began: Micros) {
        let failures = self.publisher.committed(self.scheduler.counters(), self.executor.clock.now());
        let hopeless = || (failures >= FAILURES_MAX).then(|| self.executor.failing(failures));
        if let Some(reason) = self.executor.broken.clone().or_else(hopeless)
            && !self.publisher.is_unhealthy()
        {
            self.declare_unhealthy(&reason);
            self.end_all(&reason);
        }
        self.mailbox.report(self.scheduler.queued());
        self.publisher.step(&self.scheduler, &mut self.cache, step_began, self.executor.clock.now());
    }

    /// Nothing is accepted any more; what was posted before is taken.
    fn declare_unhealthy(&mut self, reason: &Arc<str>) {
        tracing::error!(%reason, "the engine cannot go on");
        self.mailbox.set_unhealthy(reason.clone());
        self.publisher.unhealthy(reason.clone());
        self.mailbox.receive(&mut self.incoming, Some(Duration::ZERO));
        self.outbox.open(&mut self.incoming);
    }

    fn end_all(&mut self, reason: &str) {
        self.drafters.clear();
        let now = self.executor.clock.now();
        let (requests, cancellations) = self.incoming.drain();
        self.scheduler.admit(requests, cancellations, now);
        let events = self.scheduler.fail_all(&mut self.cache, reason, now);
        self.outbox.deliver(events, &mut self.incoming.cancellations);
        self.incoming.cancellations.clear();
    }

    /// The loop, and what is left to do when it ends in a panic: nobody may wait for ever.
    fn live(&mut self) {
        let lived = catch_unwind(AssertUnwindSafe(|| {
            self.run();
            self.store_all();
        }));
        if let Err(panic) = lived {
            let reason: Arc<str> = format!("the engine panicked: {}", message(&*panic)).into();
            self.declare_unhealthy(&reason);
            self.outbox.fail_all(&reason, self.executor.clock.now());
        }
        self.executor.events.iter().for_each(|feed| feed.close());
        self.mailbox.report(Queued::default());
        self.incoming.commands.clear();
        self.mailbox.forget_commands();
        self.publisher.idle();
    }
}

/// The executor, with its panics caught, and what else surrounds the scheduler.
struct Guarded {
    executor: Box<dyn Executor>,
    clock: Arc<dyn Clock>,
    tiers: Vec<Arc<dyn Tier>>,
    /// Of an engine that serves adapters.
    loader: Option<AdapterLoader>,
    /// In order, what is to be finished: its step, and why it could not be begun.
    begun: VecDeque<(u64, Option<ExecutorError>)>,
    /// A step was finished since this was asked.
    computed: bool,
    /// It panicked; it is never called again.
    broken: Option<Arc<str>>,
    last_error: Option<ExecutorError>,
    events: Option<Arc<EventFeed>>,
}

impl StepDriver for Guarded {
    fn now(&mut self) -> Micros {
        self.clock.now()
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, cache: &mut KvCache) {
        // What the step overwrites is told to be gone before it may begin.
        self.tell_events(cache);
        let begun = guard(&mut self.executor, &mut self.broken, plan.step, |executor| executor.begin(plan));
        self.begun.push_back((plan.step, begun.err()));
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        self.computed = true;
        let finished = match self.begun.pop_front() {
            Some((step, None)) => {
                guard(&mut self.executor, &mut self.broken, step, |executor| executor.finish())
            }
            Some((_, Some(error))) => Err(error),
            None => Err(ExecutorError { step: 0, reason: "no step was begun".into() }),
        };
        let output = finished.inspect_err(|error| self.last_error = Some(error.clone()));
        (self.clock.now(), output)
    }

    fn order(&mut self, order: TransferOrder) -> bool {
        self.tiers[usize::from(order.tier().0)].order(order)
    }

    fn order_adapter(&mut self, order: AdapterOrder) -> Option<AdapterReport> {
        self.loader.as_ref()?.order(order);
        None
    }
}

impl Guarded {
    fn tell_events(&self, cache: &mut KvCache) {
        if let Some(feed) = &self.events {
            feed.put(cache);
        }
    }

    /// Why `failures` steps in a row are too many.
    fn failing(&self, failures: u32) -> Arc<str> {
        let last = self.last_error.as_ref().map_or_else(String::new, |error| format!(", the last: {error}"));
        format!("{failures} steps in a row failed{last}").into()
    }
}

/// Calls the executor unless it is broken; it is when this call panics.
fn guard<'a, T>(
    executor: &'a mut Box<dyn Executor>,
    broken: &mut Option<Arc<str>>,
    step: u64,
    call: impl FnOnce(&'a mut dyn Executor) -> Result<T, ExecutorError>,
) -> Result<T, ExecutorError> {
    if let Some(reason) = broken {
        return Err(ExecutorError { step, reason: reason.to_string() });
    }
    let call = AssertUnwindSafe(|| call(&mut **executor));
    catch_unwind(call).unwrap_or_else(|panic| {
        let reason = format!("the executor panicked: {}", message(&*panic));
        *broken = Some(reason.as_str().into());
        Err(ExecutorError { step, reason })
    })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
