//! One engine without threads or clock, stepped by hand: for tests of single behaviours.

use std::collections::BTreeMap;

use folio_engine::plan::{StepOutput, StepPlan};
use folio_engine::request::{Event, RequestId, Token};
use folio_engine::{
    CancelRequest, Executor, FinishReason, Micros, ModelExecutor, Request, Scheduler, SchedulerConfig,
};
use folio_kv::{CacheConfig, KvCache, WindowConfig, default_policy};

use crate::backend::SimBackend;
use crate::oracle::{Expectation, expect};

/// Vocabulary of the modelled backend in a [`Machine`].
pub const VOCAB: u32 = 29;

/// The real scheduler, cache and model executor over a [`SimBackend`].
pub struct Machine {
    pub scheduler: Scheduler,
    pub cache: KvCache,
    pub executor: ModelExecutor,
    pub now: Micros,
    /// All events so far.
    pub events: BTreeMap<RequestId, Vec<Event>>,
    /// All plans so far.
    pub plans: Vec<StepPlan>,
    pub max_model_len: u32,
    /// Blocks and tokens.
    windows: Vec<(u32, u32)>,
    rows: usize,
    cancellations: Vec<CancelRequest>,
    requests: Vec<Request>,
    samples: bool,
}

impl Machine {
    pub fn new(config: SchedulerConfig, blocks: u32, block_tokens: u32) -> Self {
        Self::with_windows(config, blocks, block_tokens, &[])
    }

    /// With a window group for each (blocks, window).
    pub fn with_windows(
        config: SchedulerConfig,
        blocks: u32,
        block_tokens: u32,
        windows: &[(u32, u32)],
    ) -> Self {
        let groups: Vec<WindowConfig> = windows
            .iter()
            .map(|(blocks, tokens)| WindowConfig {
                blocks: *blocks,
                window_tokens: *tokens,
                bytes_per_block: 1,
            })
            .collect();
        let rows = config.max_num_batched_tokens as usize;
        let backend = SimBackend::new(VOCAB as usize, blocks as usize, block_tokens as usize, rows, rows)
            .with_windows(windows.iter().copied());
        Self {
            max_model_len: config.max_model_len,
            scheduler: Scheduler::new(config).expect("the test's limits are valid"),
            cache: KvCache::with_windows(
                CacheConfig { blocks, block_tokens, bytes_per_block: 1 },
                &groups,
                default_policy(0.01),
            ),
            executor: ModelExecutor::new(Box::new(backend), VOCAB as usize, rows, rows),
            windows: windows.to_vec(),
            rows,
            now: Micros(0),
            events: BTreeMap::new(),
            plans: Vec::new(),
            cancellations: Vec::new(),
            requests: Vec::new(),
            samples: false,
        }
    }

    /// On a device that chooses tokens by itself, so that steps can be planned ahead. Before anything runs.
    pub fn with_sampling(mut self) -> Self {
        self.samples = true;
        self.with_swap(0, 0.0)
    }

    /// With so many slots of swap space in every group, and copies that take `us` microseconds a block.
    pub fn with_swap(mut self, slots: u32, us: f64) -> Self {
        let groups = self.cache.groups();
        self.cache.set_swap_space(folio_kv::GroupCounts::each(groups, |_| slots));
        let rows = self.rows;
        let config = *self.cache.config();
        let backend =
            SimBackend::new(VOCAB as usize, config.blocks as usize, config.block_tokens as usize, rows, rows)
                .with_windows(self.windows.iter().copied())
                .with_swap(&vec![slots; groups], us);
        let backend = if self.samples { backend.with_sampling() } else { backend };
        self.executor = ModelExecutor::new(Box::new(backend), VOCAB as usize, rows, rows);
        self
    }

    /// Arrives before the next step.
    pub fn submit(&mut self, request: Request) {
        self.requests.push(request);
    }

    /// Takes effect in the next step.
    pub fn cancel(&mut self, request: u64) {
        self.cancellations.push(CancelRequest { request: RequestId(request), choice: None });
    }

    /// One step, a millisecond long, with everything checked before and after. Where the next can be begun while it runs, that is
    /// the plan that is returned.
    pub fn step(&mut self) -> &StepPlan {
        self.scheduler.admit(self.requests.drain(..), self.cancellations.drain(..), self.now);
        let (mut empty, mut begun) = (None, Ok(()));
        if !self.scheduler.under_way() {
            let plan = self.scheduler.plan(&mut self.cache, self.now);
            self.plans.push(plan.clone());
            match plan.sequences.is_empty() {
                true => empty = Some(StepOutput { step: plan.step, ..Default::default() }),
                false => begun = self.executor.begin(plan),
            }
        }
        if self.executor.ahead()
            && let Some(plan) = self.scheduler.ahead(&mut self.cache, self.now)
        {
            self.plans.push(plan.clone());
            self.executor.begin(plan).expect("a step ahead is begun");
        }
        self.now.0 += 1000;
        let output = match (&empty, begun) {
            (Some(nothing), _) => Ok(nothing),
            (None, Ok(())) => self.executor.finish(),
            (None, Err(error)) => Err(error),
        };
        for (id, event) in self.scheduler.commit(&mut self.cache, output, self.now).drain(..) {
            self.events.entry(id).or_default().push(event);
        }
        if let Err(what) = self.scheduler.check(&self.cache) {
            panic!("after step {}: {what}", self.plans.len());
        }
        self.plans.last().expect("just pushed")
    }

    /// Until nothing is left to do.
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.scheduler.has_work() && self.requests.is_empty() {
                return;
            }
            self.step();
        }
        panic!("not finished:\n{:?}", self.scheduler);
    }

    pub fn tokens(&self, request: u64, choice: u32) -> Vec<u32> {
        let events = self.events.get(&RequestId(request)).into_iter().flatten();
        let token = |event: &Event| match event {
            Event::Token { choice: of, token: Token { id, .. } } if *of == choice => Some(*id),
            _ => None,
        };
        events.filter_map(token).collect()
    }

    pub fn finished(&self, request: u64) -> Vec<(u32, FinishReason)> {
        let events = self.events.get(&RequestId(request)).into_iter().flatten();
        let finished = |event: &Event| match event {
            Event::Finished { choice, reason, .. } => Some((*choice, *reason)),
            _ => None,
        };
        events.filter_map(finished).collect()
    }

    pub fn cached_tokens(&self, request: u64) -> Option<u32> {
        self.events.get(&RequestId(request)).into_iter().flatten().find_map(|event| match event {
            Event::Prompt { cached_tokens, .. } => Some(*cached_tokens),
            _ => None,
        })
    }

    /// Tokens computed in all steps.
    pub fn computed(&self) -> u64 {
        self.scheduler.counters().iteration_tokens
    }

    /// What `request` generates alone.
    pub fn alone(&self, request: &Request) -> Expectation {
        let windows: Vec<u32> = self.windows.iter().map(|(_, tokens)| *tokens).collect();
        expect(request, VOCAB as usize, self.max_model_len, &windows)
    }

    /// Panics unless every choice of `request` got exactly what it gets alone.
    pub fn assert_as_alone(&self, request: &Request) {
        for (choice, answer) in self.alone(request).choices.iter().enumerate() {
            let want: Vec<u32> = answer.tokens.iter().map(|(token, _)| *token).collect();
            assert_eq!(self.tokens(request.id.0, choice as u32), want, "{:?} choice {choice}", request.id);
            assert!(
                self.finished(request.id.0).contains(&(choice as u32, answer.reason)),
                "{:?} choice {choice} should end with {:?}",
                request.id,
                answer.reason
            );
        }
    }
}
