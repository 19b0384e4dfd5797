//! The device of a simulated world, and what is known of its memory.
//!
//! Owns: time, the steps under way, who wrote which block last, and the checks of every plan. Must never: change what is planned.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use folio_engine::plan::{ExecutorError, HOLE, StepOutput, StepPlan};
use folio_engine::{
    AdapterId, AdapterOrder, AdapterReport, DrafterModel, DraftingExecutor, Executor, Micros, ModelExecutor,
    Reads, Scheduler, StepDriver, TransferOrder,
};
use folio_kv::{CacheConfig, GroupConfig, KvCache, TenantId};
use folio_model::backend::Backend;

use crate::backend::{FEATURES, SimBackend};
use crate::cost::{CostModel, StepTime};
use crate::drafter_checks::DrafterChecks;
use crate::head::HeadBackend;
use crate::pipeline::Pipeline;
use crate::plan_checks::{check_drafts, check_plan};
use crate::report::RunReport;
use crate::rng::Rng;
use crate::scenario::{DECLARED, Scenario};
use crate::transfers::Transfers;

/// A step that was begun and not committed.
pub(crate) struct Flight {
    plan: StepPlan,
    /// The step of the simulation in which it was planned, and when that was.
    planned: (u64, Micros),
    /// It fails: `Some(true)` before anything is computed, `Some(false)` when all is.
    fails: Option<bool>,
}

/// The device, and what is known of its memory.
pub(crate) struct World {
    pub scenario: Scenario,
    pub executor: Box<dyn Executor>,
    pub rng: Rng,
    pub cost: CostModel,
    pub now: Micros,
    pub steps: u64,
    pub flights: VecDeque<Flight>,
    /// The tenant that last held a block, and so wrote what is in it: `[group][block]`.
    pub wrote: Vec<Vec<Option<TenantId>>>,
    /// What tiers were asked for in this turn.
    pub orders: Vec<TransferOrder>,
    /// Adapters whose weights are being read, and until when.
    pub reads: Vec<(Micros, AdapterId)>,
    reading: Rng,
    /// A tier refused to store behind the last plan: who waited for it to read is left out of that step.
    refused: bool,
    /// The step that was finished last: when it was planned, and whether it failed.
    pub finished: Option<((u64, Micros), bool)>,
    pub behind_failures: u64,
    /// Of drafts of a model that is the same.
    pub right_drafts: u64,
    /// Of a draft model.
    pub drafter: Option<DrafterChecks>,
    /// The first thing that was wrong.
    pub wrong: Result<(), String>,
    pub trace: bool,
    pub transfers: Transfers,
}

impl World {
    pub fn new(scenario: Scenario, cache: &KvCache) -> Self {
        let Scenario {
            cache: CacheConfig { blocks, block_tokens, .. }, vocab, max_rows, max_logit_rows, ..
        } = scenario;
        let rows = max_rows;
        let backend =
            SimBackend::new(vocab as usize, blocks as usize, block_tokens as usize, rows, max_logit_rows)
                .with_groups(scenario.model_groups());
        let backend = if scenario.samples { backend.with_sampling() } else { backend };
        let transfers = Transfers::new(backend.memory(), &scenario);
        let executor = ModelExecutor::new(Box::new(backend), vocab as usize, rows, max_logit_rows);
        let (executor, drafter): (Box<dyn Executor>, _) = match (&scenario.drafter, scenario.samples) {
            (Some(layers), _) => {
                let (executor, checks) = with_drafter(executor, &scenario, layers);
                (Box::new(executor), checks)
            }
            (None, true) => (Box::new(executor), None),
            (None, false) => (Box::new(Pipeline::new(executor, scenario.depth, scenario.lag)), None),
        };
        let pools = cache.pools();
        Self {
            rng: Rng::new(scenario.seed ^ 0xfa01),
            executor,
            cost: CostModel { step_us: 1000.0, token_us: 200.0, context_us_per_1k: 100.0 },
            now: Micros(0),
            steps: 0,
            flights: VecDeque::new(),
            wrote: (0..cache.groups()).map(|group| vec![None; pools[group] as usize]).collect(),
            orders: Vec::new(),
            reads: Vec::new(),
            reading: Rng::new(scenario.seed ^ 0x4ead),
            refused: false,
            finished: None,
            behind_failures: 0,
            right_drafts: 0,
            drafter,
            wrong: Ok(()),
            trace: false,
            transfers,
            scenario,
        }
    }
}

impl World {
    /// The engine's process died: nothing is on the device of the new one, whose cache is `cache`, and nothing is under way. Time goes on, and
    /// tiers have what they had stored.
    pub fn restart(&mut self, cache: &KvCache, crashing: &mut Rng, report: &mut RunReport) {
        let after = Self::new(self.scenario.clone(), cache);
        let before = std::mem::replace(self, after);
        (self.rng, self.reading, self.trace) = (before.rng, before.reading, before.trace);
        (self.now, self.steps) = (before.now, before.steps);
        (self.behind_failures, self.right_drafts) = (before.behind_failures, before.right_drafts);
        if let (Some(drafter), Some(before)) = (&mut self.drafter, before.drafter) {
            drafter.counts = before.counts;
        }
        self.transfers.restart(before.transfers, crashing, report);
    }
}

/// With a model that is the same but for its groups, or in some worlds for its vocabulary or what it says; in others with a head.
fn with_drafter(
    model: ModelExecutor,
    scenario: &Scenario,
    layers: &[GroupConfig],
) -> (DraftingExecutor<ModelExecutor, ModelExecutor>, Option<DrafterChecks>) {
    let Scenario { cache, vocab, max_rows, max_logit_rows, groups, .. } = scenario;
    let before = scenario.model_groups().len();
    let (group, blocks) = (1 + before, groups[before].blocks as usize);
    let block_tokens = cache.block_tokens as usize;
    let as_drafter = |positions, reads| DrafterModel {
        group,
        groups: 1 + layers.len(),
        block_tokens: cache.block_tokens,
        positions,
        reads,
    };
    let model = model.with_groups(group);
    let executor = |backend: Box<dyn Backend>, vocab: u32| {
        ModelExecutor::new(backend, vocab as usize, *max_rows, *max_logit_rows)
    };
    if scenario.has_head() {
        let backend = HeadBackend::new(*vocab as usize, blocks, block_tokens, *max_rows).strict();
        let as_head = as_drafter(u32::MAX, Reads::Features { width: FEATURES });
        return (DraftingExecutor::new(model, executor(Box::new(backend), *vocab), as_head, *vocab), None);
    }
    let vocab = scenario.drafter_vocab();
    let backend = SimBackend::new(vocab as usize, blocks, block_tokens, *max_rows, *max_logit_rows)
        .with_groups(layers)
        .strict();
    let backend = if scenario.samples { backend.with_sampling() } else { backend };
    let backend = if scenario.drafter_errs() { backend.erring() } else { backend };
    let checks = DrafterChecks::new(backend.memory());
    // A context that it cannot see to its end, now and then.
    let positions = if scenario.seed.is_multiple_of(7) { 60 } else { u32::MAX };
    let as_model = as_drafter(positions, Reads::Tokens);
    (DraftingExecutor::new(model, executor(Box::new(backend), vocab), as_model, vocab), Some(checks))
}

impl StepDriver for World {
    fn now(&mut self) -> Micros {
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, scheduler: &Scheduler, cache: &mut KvCache) {
        if self.wrong.is_ok() {
            self.wrong = self.check(plan, scheduler, cache);
        }
        let fails = self.scenario.fails_one_in > 0 && self.rng.one_in(self.scenario.fails_one_in);
        // What follows a step needs its tokens, so one that others may follow is computed.
        let fails = fails.then(|| self.rng.one_in(2) && self.scenario.depth == 1);
        if fails != Some(true) {
            let begun = self.executor.begin(plan).map_err(|error| error.to_string());
            let checked = match (&mut self.drafter, begun) {
                (Some(drafter), Ok(())) => drafter.check(plan, scheduler, &self.scenario),
                (_, begun) => begun,
            };
            if self.wrong.is_ok() {
                self.wrong = checked;
            }
        }
        self.flights.push_back(Flight { plan: plan.clone(), planned: (self.steps, self.now), fails });
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        let Flight { plan, planned, fails } = self.flights.pop_front().expect("a step is under way");
        self.transfers.step_ends(plan.step);
        self.pass(self.cost.step(&plan));
        self.finished = Some((planned, fails.is_some()));
        self.behind_failures += u64::from(fails.is_some() && !self.flights.is_empty());
        let failed = || Err(ExecutorError { step: plan.step, reason: "injected".into() });
        if fails == Some(true) {
            return (self.now, failed());
        }
        match self.executor.finish() {
            _ if fails.is_some() => (self.now, failed()),
            Ok(output) => {
                if self.wrong.is_ok() {
                    self.wrong = check_drafts(&plan, output, &self.scenario, &mut self.right_drafts);
                }
                (self.now, Ok(output))
            }
            Err(error) => {
                self.wrong = Err(error.to_string());
                (self.now, Err(error))
            }
        }
    }

    fn order(&mut self, order: TransferOrder) -> bool {
        // A tier may have too much to store already.
        let takes = matches!(order, TransferOrder::Load(_)) || !self.rng.one_in(8);
        self.orders.extend(Some(order).filter(|_| takes));
        self.refused |= !takes;
        takes
    }

    fn order_adapter(&mut self, order: AdapterOrder) -> Option<AdapterReport> {
        if let AdapterOrder::Read(adapter) = order {
            self.reads.push((Micros(self.now.0 + self.reading.skewed(1, 100_000)), adapter.id));
        }
        None
    }
}

impl World {
    pub fn pass(&mut self, us: u64) {
        self.now.0 += us;
        self.scenario.clock.store(self.now.0, Ordering::Relaxed);
    }

    fn check(&mut self, plan: &StepPlan, scheduler: &Scheduler, cache: &KvCache) -> Result<(), String> {
        if self.trace {
            println!("{plan:?}");
        }
        check_plan(plan, self.flights.iter().map(|flight| &flight.plan), &self.scenario)?;
        self.check_copies(plan, scheduler)?;
        self.transfers.step_begun(plan)?;
        scheduler.check_beside(cache, self.transfers.tables())?;
        let refused = std::mem::take(&mut self.refused);
        let spread = self.scenario.lag > 1 || scheduler.is_preempting() || refused;
        match scheduler.one_token_short().next().filter(|_| !spread) {
            Some(id) => Err(format!("{id:?} lacks one token, holds blocks, and was left out")),
            None => Ok(()),
        }
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
pub(crate) fn shared_blocks_of(table: &folio_kv::BlockTable, group: usize) -> usize {
    (table.root().declared_blocks() * table.block_tokens(0) / table.block_tokens(group)) as usize
}
