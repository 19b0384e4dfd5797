//! Drives the real scheduler and cache through a [`Scenario`] in virtual time, and checks everything after every step.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use folio_engine::plan::{ExecutorError, HOLE, StepOutput, StepPlan};
use folio_engine::request::{Event, RequestId};
use folio_engine::{
    CacheCommand, CancelRequest, Driver, Executor, FinishReason, Micros, ModelExecutor, PerReason, Scheduler,
    WaitingFor, turn,
};
use folio_kv::{EvictionPolicy, KvCache, LruLeafFirst, TenantId, default_policy};

use crate::backend::SimBackend;
use crate::cost::CostModel;
use crate::keeping;
use crate::oracle::{Expectation, expect};
use crate::pipeline::Pipeline;
use crate::plan_checks::check_plan;
use crate::rng::Rng;
use crate::scenario::{Behaviour, Client, DECLARED, Scenario};

/// What only reports end.
const OUTSIDE: [WaitingFor; 3] = [WaitingFor::TierLoad, WaitingFor::RemotePrefill, WaitingFor::Adapter];

/// What happened in a run, for statistics over many of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub steps: u64,
    pub requests: u64,
    pub tokens: u64,
    pub preemptions: u64,
    /// Of those, with a copy in the swap space; bytes that came back from there, and copies that were never used.
    pub swapped: u64,
    pub swapped_in_bytes: u64,
    /// Blocks loaded from a copy of another sequence, by its content.
    pub found_in_host: u64,
    pub recomputed_tokens: u64,
    pub cached_tokens: u64,
    /// Times sequences began to wait, by reason, and waits that ended at their deadline.
    pub waits: PerReason<u64>,
    pub waits_expired: PerReason<u64>,
    /// Rows whose mask was late, and reports of requests that had ended.
    pub late_rows: u64,
    pub late_reports: u64,
    pub copies: u64,
    /// Worlds with window groups; blocks evicted from those, and prompt tokens lost because of that.
    pub windowed: u64,
    pub window_evictions: u64,
    pub window_miss_tokens: u64,
    pub forks: u64,
    pub stopped: u64,
    /// Vectors delivered, and those of requests that were preempted on the way.
    pub pooled: u64,
    pub pooled_preempted: u64,
    pub length: u64,
    pub cancelled: u64,
    pub deadline: u64,
    pub errors: u64,
    /// Blocks that an operator shares in tables of others, summed over steps and groups.
    pub declared_blocks: u64,
    /// Pinned prefixes, summed over the steps.
    pub pins: u64,
    pub evictions: u64,
    /// Drafts verified, and those that were right.
    pub drafts: u64,
    pub accepted_drafts: u64,
    /// Steps planned behind others; rows whose sequence had ended meanwhile, and steps that failed with others behind them.
    pub ahead: u64,
    pub orphans: u64,
    pub behind_failures: u64,
}

impl Report {
    pub fn add(&mut self, other: &Report) {
        self.steps += other.steps;
        self.requests += other.requests;
        self.tokens += other.tokens;
        self.preemptions += other.preemptions;
        self.swapped += other.swapped;
        self.swapped_in_bytes += other.swapped_in_bytes;
        self.found_in_host += other.found_in_host;
        self.recomputed_tokens += other.recomputed_tokens;
        self.cached_tokens += other.cached_tokens;
        for reason in WaitingFor::ALL {
            self.waits[reason] += other.waits[reason];
            self.waits_expired[reason] += other.waits_expired[reason];
        }
        self.late_rows += other.late_rows;
        self.late_reports += other.late_reports;
        self.copies += other.copies;
        self.windowed += other.windowed;
        self.window_evictions += other.window_evictions;
        self.window_miss_tokens += other.window_miss_tokens;
        self.forks += other.forks;
        self.stopped += other.stopped;
        self.pooled += other.pooled;
        self.pooled_preempted += other.pooled_preempted;
        self.length += other.length;
        self.cancelled += other.cancelled;
        self.deadline += other.deadline;
        self.errors += other.errors;
        self.declared_blocks += other.declared_blocks;
        self.pins += other.pins;
        self.evictions += other.evictions;
        self.ahead += other.ahead;
        self.orphans += other.orphans;
        self.behind_failures += other.behind_failures;
        self.drafts += other.drafts;
        self.accepted_drafts += other.accepted_drafts;
    }
}

/// Runs the world of `seed` to its end. The error says what went wrong and how to see it again.
pub fn run_seed(seed: u64) -> Result<Report, String> {
    Simulator::new(Scenario::from_seed(seed)).run().map_err(|what| {
        format!("seed {seed}: {what}\nreproduce: FOLIO_SIM_SEED={seed} cargo test -p folio-sim one_seed -- --nocapture")
    })
}

/// What a client has seen.
struct Reader {
    client: Client,
    expectation: Option<Expectation>,
    events: u32,
    buffered: u32,
    prompt_seen: bool,
    pooled: bool,
    tokens: Vec<Vec<(u32, Option<folio_engine::request::TokenLogprobs>)>>,
    finished: Vec<Option<FinishReason>>,
    /// The step in which it asked to be cancelled, or was found gone.
    left: Option<u64>,
    ended_choice: Option<u32>,
    deaf: bool,
    /// Its sequences were part of a step that failed.
    struck: bool,
    /// Since when it waits for its adapter.
    adapter: Option<Micros>,
}

/// A step that was begun and not committed.
struct Flight {
    plan: StepPlan,
    /// The step of the simulation in which it was planned, and when that was.
    planned: (u64, Micros),
    /// It fails: `Some(true)` before anything is computed, `Some(false)` when all is.
    fails: Option<bool>,
}

/// The device, and what is known of its memory.
struct World {
    scenario: Scenario,
    executor: Box<dyn Executor>,
    rng: Rng,
    cost: CostModel,
    now: Micros,
    steps: u64,
    flights: VecDeque<Flight>,
    /// The tenant that last held a block, and so wrote what is in it: `[group][block]`.
    wrote: Vec<Vec<Option<TenantId>>>,
    /// The request whose block was last copied to a slot: `[group][slot]`.
    swapped: Vec<Vec<Option<(RequestId, TenantId)>>>,
    found_in_host: u64,
    /// The step that was finished last: when it was planned, and whether it failed.
    finished: Option<((u64, Micros), bool)>,
    behind_failures: u64,
    /// The first thing that was wrong.
    wrong: Result<(), String>,
    trace: bool,
}

impl Driver for World {
    fn now(&mut self) -> Micros {
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, scheduler: &Scheduler, cache: &KvCache) {
        if self.wrong.is_ok() {
            self.wrong = self.check(plan, scheduler, cache);
        }
        let fails = self.scenario.fails_one_in > 0 && self.rng.one_in(self.scenario.fails_one_in);
        // What follows a step needs its tokens, so one that others may follow is computed.
        let fails = fails.then(|| self.rng.one_in(2) && self.scenario.depth == 1);
        if fails != Some(true)
            && let Err(error) = self.executor.begin(plan)
            && self.wrong.is_ok()
        {
            self.wrong = Err(error.to_string());
        }
        self.flights.push_back(Flight { plan: plan.clone(), planned: (self.steps, self.now), fails });
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        let Flight { plan, planned, fails } = self.flights.pop_front().expect("a step is under way");
        let swaps = plan.swap_outs.len() + plan.swap_ins.len();
        self.pass(self.cost.step(&plan) + (swaps as f64 * self.scenario.swap_us) as u64);
        self.finished = Some((planned, fails.is_some()));
        self.behind_failures += u64::from(fails.is_some() && !self.flights.is_empty());
        let failed = || Err(ExecutorError { step: plan.step, reason: "injected".into() });
        if fails == Some(true) {
            return (self.now, failed());
        }
        match self.executor.finish() {
            _ if fails.is_some() => (self.now, failed()),
            Ok(output) => (self.now, Ok(output)),
            Err(error) => {
                self.wrong = Err(error.to_string());
                (self.now, Err(error))
            }
        }
    }
}

impl World {
    fn pass(&mut self, us: u64) {
        self.now.0 += us;
        self.scenario.clock.store(self.now.0, Ordering::Relaxed);
    }

    fn check(&mut self, plan: &StepPlan, scheduler: &Scheduler, cache: &KvCache) -> Result<(), String> {
        if self.trace {
            println!("{plan:?}");
        }
        check_plan(plan, self.flights.iter().map(|flight| &flight.plan), &self.scenario)?;
        self.check_swap_outs(plan, scheduler)?;
        self.check_copies(plan, scheduler)?;
        self.check_swap_ins(plan, scheduler)?;
        scheduler.check(cache)?;
        let spread = self.scenario.lag > 1 || scheduler.is_preempting();
        match scheduler.one_token_short().next().filter(|_| !spread) {
            Some(id) => Err(format!("{id:?} lacks one token, holds blocks, and was left out")),
            None => Ok(()),
        }
    }

    /// What is copied out was written by the tenant whose copy it becomes.
    fn check_swap_outs(&mut self, plan: &StepPlan, scheduler: &Scheduler) -> Result<(), String> {
        for swap in &plan.swap_outs {
            let group = swap.group as usize;
            let owner = scheduler.swapped().find(|(_, swapped)| swapped.slots(group).contains(&swap.slot));
            let Some((request, copy)) = owner else {
                return Err(format!("{swap:?} is part of no copy"));
            };
            if self.wrote[group][swap.block.0 as usize] != Some(copy.tenant()) {
                return Err(format!("{swap:?} copies a block of another tenant than {:?}", copy.tenant()));
            }
            self.swapped[group][swap.slot as usize] = Some((request, copy.tenant()));
        }
        Ok(())
    }

    /// What comes back goes to a block of one sequence, of the tenant it was copied from.
    fn check_swap_ins(&mut self, plan: &StepPlan, scheduler: &Scheduler) -> Result<(), String> {
        for swap in &plan.swap_ins {
            let group = swap.group as usize;
            let holders =
                || scheduler.tables().filter(|(_, _, table)| table.group(group).contains(&swap.block));
            let holder = holders().next().map(|(request, tenant, _)| (request, tenant));
            let runs =
                plan.sequences.iter().any(|sequence| sequence.block_tables[group].contains(&swap.block.0));
            let from = self.swapped[group][swap.slot as usize];
            let tenant = |of: Option<(RequestId, TenantId)>| of.map(|(_, tenant)| tenant);
            if !runs || holder.is_none() || tenant(holder) != tenant(from) || holders().count() != 1 {
                return Err(format!("{swap:?} goes to {holder:?} and came from {from:?}"));
            }
            self.found_in_host += u64::from(holder != from);
        }
        Ok(())
    }

    /// A copy goes to a block of a sequence that runs in this step, and stays within its tenant.
    fn check_copies(&mut self, plan: &StepPlan, scheduler: &Scheduler) -> Result<(), String> {
        for copy in &plan.copies {
            let group = copy.group as usize;
            let runs =
                plan.sequences.iter().any(|sequence| sequence.block_tables[group].contains(&copy.to.0));
            let owner = scheduler.tables().find(|(_, _, table)| table.group(group).contains(&copy.to));
            let to = owner.map(|(_, tenant, _)| tenant);
            let from = self.wrote[group][copy.from.0 as usize];
            // The beginning of a larger block may be what is declared, and its end the reader's own.
            let shared = from == Some(DECLARED) && group > 0;
            if copy.from == copy.to || copy.tokens == 0 || !runs || (from != to && !shared) {
                return Err(format!("{copy:?} serves nobody, or crosses tenants"));
            }
        }
        // From here on the step writes.
        for (group, wrote) in self.wrote.iter_mut().enumerate() {
            for (_, tenant, table) in scheduler.tables() {
                // What is shared was written by its owner.
                let shared = shared_blocks_of(table, group);
                let held = table.group(group).iter().skip(shared).filter(|block| **block != HOLE);
                held.for_each(|block| wrote[block.0 as usize] = Some(tenant));
            }
        }
        Ok(())
    }
}

/// Leading blocks of a group that hold nothing but what is declared.
fn shared_blocks_of(table: &folio_kv::BlockTable, group: usize) -> usize {
    (table.root().declared_blocks() * table.block_tokens(0) / table.block_tokens(group)) as usize
}

/// See the module documentation.
pub struct Simulator {
    scheduler: Scheduler,
    cache: KvCache,
    world: World,
    keeping: Rng,
    preempting: Rng,
    drafting: Rng,
    waiting: Rng,
    /// When who is told that what it waits for is there.
    reports: Vec<(Micros, RequestId, WaitingFor)>,
    arriving: VecDeque<Client>,
    readers: Vec<Reader>,
    cancellations: Vec<CancelRequest>,
    idle_turns: u32,
    report: Report,
}

impl Simulator {
    pub fn new(scenario: Scenario) -> Self {
        let (blocks, block_tokens) = (scenario.cache.blocks as usize, scenario.cache.block_tokens as usize);
        let (vocab, rows) = (scenario.vocab as usize, scenario.max_rows);
        let backend = SimBackend::new(vocab, blocks, block_tokens, rows, scenario.max_logit_rows)
            .with_groups(&scenario.windows);
        let slots: Vec<u32> = (0..=scenario.windows.len()).map(|group| scenario.swap_slots[group]).collect();
        let backend = backend.with_swap(&slots, scenario.swap_us);
        let backend = if scenario.samples { backend.with_sampling() } else { backend };
        let policy: Box<dyn EvictionPolicy> = match scenario.seed % 2 {
            0 => Box::new(LruLeafFirst::new()),
            _ => default_policy(0.01),
        };
        let mut cache = KvCache::with_groups(scenario.cache, &scenario.windows, policy);
        cache.set_quotas(&scenario.quotas).expect("scenarios have quotas that can be");
        cache.set_pin_limits(scenario.pins);
        cache.set_swap_space(scenario.swap_slots);
        let pools = cache.pools();
        let executor = ModelExecutor::new(Box::new(backend), vocab, rows, scenario.max_logit_rows);
        let executor: Box<dyn Executor> = match scenario.samples {
            true => Box::new(executor),
            false => Box::new(Pipeline::new(executor, scenario.depth, scenario.lag)),
        };
        let scheduler = Scheduler::new(scenario.config.clone()).expect("scenarios have valid limits");
        Self {
            scheduler: scheduler.with_overlap(executor.depth(), executor.lag()),
            keeping: Rng::new(scenario.seed ^ 0x9e7b),
            preempting: Rng::new(scenario.seed ^ 0x93ee),
            drafting: Rng::new(scenario.seed ^ 0xd4af),
            waiting: Rng::new(scenario.seed ^ 0x3a17),
            reports: Vec::new(),
            arriving: scenario.clients.iter().cloned().collect(),
            readers: Vec::new(),
            cancellations: Vec::new(),
            world: World {
                rng: Rng::new(scenario.seed ^ 0xfa01),
                executor,
                cost: CostModel { step_us: 1000.0, token_us: 200.0, context_us_per_1k: 100.0 },
                now: Micros(0),
                steps: 0,
                flights: VecDeque::new(),
                wrote: (0..cache.groups()).map(|group| vec![None; pools[group] as usize]).collect(),
                swapped: slots.iter().map(|slots| vec![None; *slots as usize]).collect(),
                finished: None,
                behind_failures: 0,
                found_in_host: 0,
                wrong: Ok(()),
                trace: false,
                scenario,
            },
            cache,
            idle_turns: 0,
            report: Report::default(),
        }
    }

    /// Prints every plan.
    pub fn traced(mut self) -> Self {
        self.world.trace = true;
        self
    }

    /// To the end of the last request.
    pub fn run(mut self) -> Result<Report, String> {
        let limit = self.step_limit();
        while self.scheduler.has_work() || !self.arriving.is_empty() {
            let counters = self.scheduler.counters();
            if counters.steps > limit + counters.late_rows {
                return Err(format!("not finished after {limit} steps: starvation or livelock"));
            }
            self.step()?;
        }
        self.check_end()?;
        let counters = self.scheduler.counters();
        let cache = self.cache.stats();
        self.report.requests = self.readers.len() as u64;
        self.report.tokens = counters.generation_tokens;
        self.report.preemptions = counters.preemptions;
        self.report.swapped = counters.preemptions_swapped;
        self.report.swapped_in_bytes = counters.swapped_in_bytes;
        self.report.recomputed_tokens = counters.recomputed_tokens;
        self.report.cached_tokens = counters.cached_prompt_tokens;
        self.report.waits = counters.waits;
        self.report.waits_expired = counters.waits_expired;
        self.report.late_rows = counters.late_rows;
        self.report.copies = cache.copies;
        self.report.evictions = cache.evictions;
        self.report.ahead = counters.steps_ahead;
        self.report.orphans = counters.orphan_rows;
        self.report.behind_failures = self.world.behind_failures;
        self.report.found_in_host = self.world.found_in_host;
        self.report.drafts = counters.draft_tokens;
        self.report.accepted_drafts = counters.accepted_draft_tokens;
        self.report.windowed = u64::from(!cache.windows().is_empty());
        self.report.window_evictions = cache.windows().iter().map(|window| window.evictions).sum();
        self.report.window_miss_tokens = cache.window_miss_tokens;
        self.report.stopped = counters.finished_stop;
        self.report.length = counters.finished_length;
        self.report.cancelled = counters.finished_cancelled;
        self.report.deadline = counters.finished_deadline;
        self.report.errors = counters.finished_error;
        Ok(self.report)
    }

    /// Every token could be computed alone, in a step of its own, as often as its sequence may be preempted.
    fn step_limit(&self) -> u64 {
        let tokens = self.world.scenario.clients.iter().map(|client| {
            let request = &client.request;
            (request.prompt.len() as u64 + u64::from(request.sampling.max_tokens)) * u64::from(request.n)
        });
        tokens.sum::<u64>() * u64::from(self.world.scenario.config.max_preemptions + 2) + 100
    }

    fn step(&mut self) -> Result<(), String> {
        self.report.steps += 1;
        self.world.steps = self.report.steps;
        let arrived = self.arrive();
        let now = self.world.now;
        let cancellations = std::mem::take(&mut self.cancellations);
        let block_tokens = self.cache.config().block_tokens;
        let arrived = arrived.into_iter().map(|request| request.hashed(block_tokens));
        self.scheduler.admit(arrived, cancellations, now);
        self.cache.advance(now.0);
        let scenario = &self.world.scenario;
        keeping::command(&mut self.keeping, &mut self.scheduler, &mut self.cache, &scenario.clients)?;
        self.report.pins += keeping::check(&self.cache, scenario.pins)?;
        if scenario.preempts_one_in > 0 && self.preempting.one_in(scenario.preempts_one_in) {
            self.scheduler.preempt_all(&mut self.cache);
            if self.preempting.one_in(2) {
                // What was given up does not survive.
                self.scheduler.command(&mut self.cache, CacheCommand::Clear { tenant: None });
            }
        }
        self.draft();
        self.wait();
        let events = std::mem::take(turn(&mut self.scheduler, &mut self.cache, &mut self.world));
        std::mem::replace(&mut self.world.wrong, Ok(()))?;
        let (tokens, decodes) = self.scheduler.last_step();
        let config = &self.world.scenario.config;
        if decodes > 0 && tokens - decodes > config.max_prefill_tokens_while_decoding {
            return Err(format!("{} prompt tokens beside {decodes} decodes", tokens - decodes));
        }
        let finished = self.world.finished.take();
        // Time passes while somebody waits for it.
        self.world.pass(if finished.is_none() { 1000 } else { 0 });
        let got_on = finished.is_some() || !events.is_empty() || self.scheduler.suspended() > 0;
        self.idle_turns = if got_on { 0 } else { self.idle_turns + 1 };
        if self.idle_turns > 2 {
            let (scheduler, cache) = (&self.scheduler, self.cache.stats());
            return Err(format!("nothing is computed although something waits\n{scheduler:?}{cache:?}"));
        }
        let (planned, failed) = finished.unwrap_or(((self.report.steps, now), false));
        for (id, event) in events {
            self.deliver(id, event, failed, planned)?;
        }
        self.clients_act();
        self.scheduler.check(&self.cache)?;
        self.check_tenants()
    }

    /// Some request begins to wait for something outside; what others waited for is there, be it late or after their end.
    fn wait(&mut self) {
        let now = self.world.now;
        for (_, id, reason) in self.reports.extract_if(.., |(at, ..)| *at <= now) {
            let reader = self.readers.iter_mut().find(|reader| reader.client.request.id == id);
            let Some(reader) = reader else { continue };
            self.report.late_reports += u64::from(reader.finished.iter().all(Option::is_some));
            if reason == WaitingFor::Adapter {
                reader.adapter = None;
            }
            self.scheduler.resume(id, reason, now);
        }
        let one_in = self.world.scenario.waits_one_in;
        if one_in == 0 || !self.waiting.one_in(one_in) {
            return;
        }
        let living = self.readers.iter_mut().filter(|reader| reader.finished.contains(&None));
        let mut living: Vec<&mut Reader> = living.collect();
        if living.is_empty() {
            return;
        }
        let reader = living.swap_remove(self.waiting.range(0, living.len() as u64 - 1) as usize);
        let (id, reason) = (reader.client.request.id, *self.waiting.pick(&OUTSIDE));
        self.scheduler.suspend(id, reason, now);
        if reason == WaitingFor::Adapter {
            reader.adapter.get_or_insert(now);
        }
        if !self.waiting.one_in(4) {
            self.reports.push((Micros(now.0 + self.waiting.skewed(1, 300_000)), id, reason));
        }
    }

    /// Says what some choices may say next, more or less rightly.
    fn draft(&mut self) {
        let percent = self.world.scenario.drafts;
        if percent == 0 {
            return;
        }
        let vocab = u64::from(self.world.scenario.vocab);
        for reader in &self.readers {
            let Some(expected) = &reader.expectation else { continue };
            for (choice, answer) in expected.choices.iter().enumerate() {
                if reader.finished[choice].is_some() || self.drafting.one_in(3) {
                    continue;
                }
                let rest = answer.tokens.iter().skip(reader.tokens[choice].len());
                let count = self.drafting.range(1, 5) as usize;
                let drafts: Vec<u32> = rest
                    .take(count)
                    .map(|(token, _)| match self.drafting.range(1, 100) <= percent {
                        true => *token,
                        false => self.drafting.range(0, vocab - 1) as u32,
                    })
                    .collect();
                self.scheduler.propose(reader.client.request.id, choice as u32, &drafts);
            }
        }
    }

    fn arrive(&mut self) -> Vec<folio_engine::Request> {
        if !self.scheduler.has_work()
            && let Some(next) = self.arriving.front()
        {
            self.world.pass(next.arrives.0.saturating_sub(self.world.now.0));
        }
        let mut requests = Vec::new();
        while let Some(client) = self.arriving.pop_front_if(|client| client.arrives <= self.world.now) {
            requests.push(client.request.clone());
            let n = client.request.n as usize;
            self.report.forks += n as u64 - 1;
            self.readers.push(Reader {
                client,
                expectation: None,
                events: 0,
                buffered: 0,
                prompt_seen: false,
                pooled: false,
                tokens: vec![Vec::new(); n],
                finished: vec![None; n],
                left: None,
                ended_choice: None,
                deaf: false,
                struck: false,
                adapter: None,
            });
        }
        requests
    }

    /// `planned`: the step whose event it is, and when.
    fn deliver(
        &mut self,
        id: RequestId,
        event: Event,
        failed: bool,
        planned: (u64, Micros),
    ) -> Result<(), String> {
        let now = self.world.now;
        let (vocab, max_model_len) =
            (self.world.scenario.vocab as usize, self.world.scenario.config.max_model_len);
        let reader = self.readers.iter_mut().find(|reader| reader.client.request.id == id);
        let reader = reader.ok_or_else(|| format!("an event for {id:?}, which never arrived"))?;
        reader.struck |= failed;
        let adapter_us = self.world.scenario.config.adapter_wait_us_max;
        let unloaded = reader.adapter.is_some_and(|since| since.0 + adapter_us < now.0);
        let windows: Vec<u32> =
            self.world.scenario.windows.iter().filter_map(|group| group.layout.reach()).collect();
        let expectation = reader.expectation.take();
        let expectation =
            expectation.unwrap_or_else(|| expect(&reader.client.alone(), vocab, max_model_len, &windows));
        let taken = reader.take(&event, &expectation, now, unloaded);
        if let Event::Finished { reason: FinishReason::Stop, timing, .. } = &event
            && reader.pooled
        {
            self.report.pooled += 1;
            self.report.pooled_preempted += u64::from(timing.preemptions > 0);
        }
        reader.expectation = Some(expectation);
        let late = reader.left.is_some_and(|left| left < planned.0)
            || reader.client.request.deadline.is_some_and(|deadline| deadline <= planned.1);
        if late && !matches!(event, Event::Finished { .. }) {
            return Err(format!("{id:?} was cancelled or overdue before the step and got {event:?}"));
        }
        taken.map_err(|what| format!("{id:?}: {what}, event {event:?}"))?;
        if reader.answers() {
            return Ok(());
        }
        if !reader.deaf {
            reader.deaf = true;
            reader.left.get_or_insert(self.report.steps);
            self.cancellations.push(CancelRequest { request: id, choice: None });
        }
        Ok(())
    }

    /// Cancellations that are due, and slow readers reading.
    fn clients_act(&mut self) {
        let now = self.world.now;
        for reader in &mut self.readers {
            reader.buffered = reader.buffered.saturating_sub(1);
            let id = reader.client.request.id;
            let cancels = match reader.client.behaviour {
                Behaviour::CancelsAt(at) => at <= now,
                Behaviour::CancelsAfter(events) => reader.events >= events,
                _ => false,
            };
            if cancels && reader.left.is_none() {
                reader.left.get_or_insert(self.report.steps);
                self.cancellations.push(CancelRequest { request: id, choice: None });
            }
            if let Behaviour::EndsChoiceAfter { events, choice } = reader.client.behaviour
                && reader.events >= events
                && reader.ended_choice.is_none()
            {
                reader.ended_choice = Some(choice);
                self.cancellations.push(CancelRequest { request: id, choice: Some(choice) });
            }
        }
    }

    /// No block is held by two tenants.
    fn check_tenants(&mut self) -> Result<(), String> {
        let mut declared_blocks = 0;
        for (group, blocks) in self.world.wrote.iter().map(Vec::len).enumerate() {
            let mut holder: Vec<Option<TenantId>> = vec![None; blocks];
            for (request, tenant, table) in self.scheduler.tables() {
                let shared = shared_blocks_of(table, group);
                declared_blocks += shared as u64;
                for (index, block) in table.group(group).iter().enumerate() {
                    if *block == HOLE {
                        continue;
                    }
                    let tenant = if index < shared { DECLARED } else { tenant };
                    let holder = &mut holder[block.0 as usize];
                    if holder.is_some_and(|other| other != tenant) {
                        return Err(format!(
                            "group {group}: {block:?} belongs to {tenant:?} ({request:?}) and {holder:?}"
                        ));
                    }
                    *holder = Some(tenant);
                }
            }
        }
        self.report.declared_blocks += declared_blocks;
        Ok(())
    }

    fn check_end(&self) -> Result<(), String> {
        for reader in &self.readers {
            if let Some(choice) = reader.finished.iter().position(Option::is_none) {
                return Err(format!("{:?} choice {choice} was never finished", reader.client.request.id));
            }
        }
        let stats = self.cache.stats();
        if stats.active_blocks != stats.pinned_blocks
            || stats.windows().iter().any(|window| window.active_blocks != 0)
        {
            return Err(format!("{} blocks are still held at the end", stats.active_blocks));
        }
        if stats.swapped_bytes != 0 {
            return Err(format!("{} bytes are still swapped out at the end", stats.swapped_bytes));
        }
        let delivered: usize = self.readers.iter().flat_map(|reader| &reader.tokens).map(Vec::len).sum();
        if delivered as u64 != self.scheduler.counters().generation_tokens {
            return Err("delivered tokens and the counter differ".into());
        }
        Ok(())
    }
}

impl Reader {
    /// Whether the client still listens, after an event was put before it.
    fn answers(&mut self) -> bool {
        if self.deaf {
            return false;
        }
        self.events += 1;
        self.buffered += 1;
        match self.client.behaviour {
            Behaviour::VanishesAfter(events) => self.events <= events,
            Behaviour::Slow { capacity } => self.buffered <= capacity,
            _ => true,
        }
    }

    /// `unloaded`: its adapter was not loaded in time.
    fn take(
        &mut self,
        event: &Event,
        expected: &Expectation,
        now: Micros,
        unloaded: bool,
    ) -> Result<(), String> {
        match event {
            Event::Prompt { cached_tokens, prompt_logprobs, .. } => {
                if std::mem::replace(&mut self.prompt_seen, true) || self.tokens.iter().any(|t| !t.is_empty())
                {
                    return Err("the prompt was reported twice or late".into());
                }
                if *cached_tokens as usize >= self.client.request.prompt.len() {
                    return Err("the whole prompt is said to be cached".into());
                }
                if *prompt_logprobs != expected.prompt_logprobs {
                    return Err(format!("prompt logprobs differ from {:?}", expected.prompt_logprobs));
                }
            }
            Event::Token { choice, token } => {
                let choice = *choice as usize;
                if self.finished[choice].is_some() || !self.prompt_seen {
                    return Err("a token out of turn".into());
                }
                let at = self.tokens[choice].len();
                let want = expected.choices[choice].tokens.get(at);
                if want != Some(&(token.id, token.logprobs.clone())) {
                    return Err(format!("token {at} differs: alone it was {want:?}"));
                }
                self.tokens[choice].push((token.id, token.logprobs.clone()));
            }
            Event::Pooled { vector } => {
                if !self.prompt_seen || std::mem::replace(&mut self.pooled, true) {
                    return Err("a vector twice or before its prompt".into());
                }
                if Some(vector) != expected.pooled.as_ref() {
                    return Err(format!("the vector differs: alone it was {:?}", expected.pooled));
                }
            }
            Event::Finished { choice, reason, stop_token, .. } => {
                let choice = *choice as usize;
                if self.finished[choice].replace(*reason).is_some() {
                    return Err("finished twice".into());
                }
                let fine = unloaded && *reason == FinishReason::Error;
                if !fine {
                    self.check_reason(choice, *reason, *stop_token, expected, now)?;
                }
            }
        }
        Ok(())
    }

    fn check_reason(
        &self,
        choice: usize,
        reason: FinishReason,
        stop_token: Option<u32>,
        expected: &Expectation,
        now: Micros,
    ) -> Result<(), String> {
        let answer = &expected.choices[choice];
        let last = self.tokens[choice].last().map(|(token, _)| *token);
        let fine = match reason {
            FinishReason::Stop | FinishReason::Length => {
                let stop = (reason == FinishReason::Stop).then_some(last).flatten();
                answer.reason == reason
                    && answer.tokens.len() == self.tokens[choice].len()
                    && expected.pooled.is_some() == self.pooled
                    && stop == stop_token
            }
            FinishReason::Cancelled => self.left.is_some() || self.ended_choice == Some(choice as u32),
            FinishReason::Deadline => self.client.request.deadline.is_some_and(|deadline| deadline <= now),
            FinishReason::Error => self.struck || answer.reason == FinishReason::Error,
        };
        if fine {
            Ok(())
        } else {
            Err(format!("finished for the wrong reason; alone it was {:?}", answer.reason))
        }
    }
}
