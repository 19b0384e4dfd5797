//! Replays traffic through the real scheduler and cache in virtual time, and reports what it cost.
//!
//! Owns: playing clients and device. Must never: schedule, evict, or find anything by itself.
//!
//! The scheduler is not told how long an output will be: requests ask for their own `max_tokens` or all for the same, and the modelled
//! device ends them where the trace does. Cost: O(steps x sequences), and a hash for each block of a prompt.

use std::sync::Arc;

use folio_engine::plan::{ExecutorError, Sampled, StepOutput, StepPlan, Want};
use folio_engine::request::{Event, Request, RequestId, SamplingParams, Timing};
use folio_engine::{
    DRAFTS_MAX, Drafter, Drafters, FinishReason, Micros, Scheduler, SchedulerConfig, Speculation, StepDriver,
    TransferOrder, Work, turn,
};
use folio_kv::{CacheConfig, GroupConfig, KvCache, LruLeafFirst, TenantId};

use crate::cost::StepTime;
use crate::replay_tier::ReplayTier;
pub use crate::replay_tier::TierConfig;
use crate::retention::Policy;
use crate::rng::Rng;
use crate::scenario::root;
use crate::trace::{TraceRequest, VOCAB, token};

/// Ends an answer.
const STOP: u32 = 0;

/// Drafts that a host drafter proposes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftConfig {
    /// Tokens proposed for a step, of which the scheduler verifies as many as pay.
    pub tokens: u32,
    /// How probable each is, if those before it are right.
    pub right: f64,
}

/// The machine a trace is replayed on.
#[derive(Clone, Debug)]
pub struct ReplayConfig<C> {
    pub scheduler: SchedulerConfig,
    pub cache: CacheConfig,
    /// Cache groups behind the first, with their pools.
    pub groups: Vec<GroupConfig>,
    /// Who is evicted: not [`Policy::Min`], which has to know the future.
    pub policy: Policy,
    /// See [`folio_kv::default_policy`].
    pub depth_cost: f64,
    pub cost: C,
    /// What a request asks for that says nothing of it; outputs longer than this are cut.
    pub max_tokens: u32,
    pub drafts: Option<DraftConfig>,
    /// Drafts that the engine's own drafter finds in what was said: [`Drafter::Ngram`] or [`Drafter::Suffix`], where answers are known.
    pub drafter: Option<Drafter>,
    pub tier: Option<TierConfig>,
}

impl<C> ReplayConfig<C> {
    /// One cache group, the least recently used leaf is evicted, nothing is drafted, and there is no tier.
    pub fn new(scheduler: SchedulerConfig, cache: CacheConfig, cost: C, max_tokens: u32) -> Self {
        Self {
            scheduler,
            cache,
            groups: Vec::new(),
            policy: Policy::Lru,
            depth_cost: 0.0,
            cost,
            max_tokens,
            drafts: None,
            drafter: None,
            tier: None,
        }
    }
}

/// What a replay cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TraceReport {
    pub requests: u64,
    /// Requests the machine could never hold.
    pub refused: u64,
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
    /// Share of the requests that were preempted at least once.
    pub preempted: f64,
    /// Sequences preempted per request, and tokens computed again per token computed.
    pub preemption_rate: f64,
    pub recompute_rate: f64,
    /// Share of all block slots ever allocated that was never written.
    pub waste: f64,
    /// Mean share of the pool held by sequences while something runs, and while somebody waits for blocks.
    pub occupancy: f64,
    pub occupancy_full: f64,
    /// Steps in which somebody waited for blocks.
    pub full_steps: u64,
    pub seconds: f64,
    pub ttft_s_p50: f64,
    pub ttft_s_p99: f64,
    /// Time per token after the first, and from arrival to the end.
    pub tpot_s_p50: f64,
    pub tpot_s_p99: f64,
    pub e2e_s_p50: f64,
    pub e2e_s_p99: f64,
}

/// What became of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Served {
    pub arrived: Micros,
    pub first_token: Micros,
    pub finished: Micros,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub preemptions: u32,
}

impl Served {
    /// From arrival to the first token.
    pub fn ttft_s(&self) -> f64 {
        seconds(self.arrived, self.first_token)
    }

    /// Mean time of a token after the first; `None`: there is none.
    pub fn tpot_s(&self) -> Option<f64> {
        let more = self.output_tokens.checked_sub(1).filter(|more| *more > 0)?;
        Some(seconds(self.first_token, self.finished) / f64::from(more))
    }

    pub fn e2e_s(&self) -> f64 {
        seconds(self.arrived, self.finished)
    }
}

/// A replay in full.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    pub report: TraceReport,
    /// In the order of the trace; `None`: refused, or ended without a token.
    pub served: Vec<Option<Served>>,
    /// Tokens generated up to the end of each step in which there were some.
    pub generated: Vec<(Micros, u64)>,
    /// What the time passed with, and what a row of a prompt took at the end ([`Scheduler::row_us`]).
    pub work: Work,
    pub row_us: (f64, f64),
}

fn seconds(from: Micros, to: Micros) -> f64 {
    to.0.saturating_sub(from.0) as f64 / 1e6
}

struct TraceDevice<'a, C> {
    requests: &'a [TraceRequest],
    cost: &'a C,
    now: Micros,
    output: StepOutput,
    tier: Option<ReplayTier>,
}

impl<C: StepTime> StepDriver for TraceDevice<'_, C> {
    fn now(&mut self) -> Micros {
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, _: &mut KvCache) {
        self.now.0 += self.cost.step(plan);
        self.output.step = plan.step;
        self.output.samples.clear();
        for sample in plan.sequences.iter().flat_map(|sequence| &sequence.samples) {
            let Want::Token(spec) = &sample.want else { continue };
            // A request's seed is its number in the trace.
            let seed = spec.params.seed as usize;
            let id = answer(seed, &self.requests[seed], spec.position);
            self.output.samples.push(Sampled::Token { id, logprobs: None });
        }
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        (self.now, Ok(&self.output))
    }

    fn order(&mut self, order: TransferOrder) -> bool {
        let now = self.now;
        self.tier.as_mut().is_some_and(|tier| tier.order(order, now))
    }
}

/// What a request says at a position.
fn answer(seed: usize, request: &TraceRequest, position: u32) -> u32 {
    let index = position - request.prompt.len() as u32;
    match request.answer.get(index as usize) {
        _ if index + 1 >= request.output => STOP,
        Some(known) => *known,
        None => token(u64::MAX - seed as u64, u64::from(position)),
    }
}

/// Runs all requests to their end. Arrivals are as recorded, steps take what the cost model says.
pub fn replay<C: StepTime>(
    requests: &[TraceRequest],
    config: &ReplayConfig<C>,
) -> Result<TraceReport, folio_engine::ConfigError> {
    Ok(replay_in_full(requests, config)?.report)
}

/// The same, with what became of each request.
pub fn replay_in_full<C: StepTime>(
    requests: &[TraceRequest],
    config: &ReplayConfig<C>,
) -> Result<Replay, folio_engine::ConfigError> {
    let mut scheduler = Scheduler::new(config.scheduler.clone())?;
    let policy = config.policy.online(config.depth_cost).unwrap_or_else(|| Box::new(LruLeafFirst::new()));
    let mut cache = KvCache::with_groups(config.cache, &config.groups, policy);
    let block_bytes = std::iter::once(config.cache.bytes_per_block);
    let block_bytes = block_bytes.chain(config.groups.iter().map(|group| group.bytes_per_block));
    let tier = config.tier.map(|tier| ReplayTier::new(tier, block_bytes.collect()));
    if tier.is_some() {
        scheduler = scheduler.with_tiers([1]).swapping_to(Some(ReplayTier::ID));
    }
    let device =
        TraceDevice { requests, cost: &config.cost, now: Micros(0), output: StepOutput::default(), tier };
    let mut run = Run {
        requests,
        device,
        replay: Replay { served: vec![None; requests.len()], ..Replay::default() },
        drafter: config.drafts.map(|drafts| (drafts, Rng::new(0xd4af))),
        answering: Vec::new(),
    };
    let mut drafters = Drafters::default();
    let (mut occupancy, mut now) = (0.0, Micros(0));
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|index| requests[*index].arrives);
    let mut waiting = order.into_iter().peekable();
    let block_tokens = config.cache.block_tokens;
    loop {
        if !scheduler.has_work() {
            match waiting.peek() {
                Some(next) => now = now.max(requests[*next].arrives),
                None => break,
            }
        }
        while let Some(index) = waiting.next_if(|index| requests[*index].arrives <= now) {
            match build(index, &requests[index], config) {
                Some(request) => {
                    drafters.open(&request);
                    let (request, hashes) = request.hashed(block_tokens);
                    let stored = run.device.tier.as_ref().map(|tier| tier.find(&hashes, &request.prompt));
                    let hashes = hashes.with_stored(stored.into_iter().collect());
                    scheduler.admit([(request, hashes)], [], now);
                }
                None => run.replay.report.refused += 1,
            }
        }
        cache.advance(now.0);
        run.draft(&mut scheduler);
        drafters.propose(&mut scheduler);
        run.device.now = now;
        let events = turn(&mut scheduler, &mut cache, &mut run.device);
        drafters.follow(events);
        run.take(events);
        let stepped = run.device.now > now;
        now = Micros(now.0 + 1).max(run.device.now);
        if let Some(tier) = &mut run.device.tier {
            // Who waits for the tier alone waits until it is done.
            if !stepped && let Some(done) = tier.next_done() {
                let arrives = waiting.peek().map_or(done, |index| requests[*index].arrives);
                now = now.max(done.min(arrives));
            }
            tier.carry(&mut scheduler, &mut cache, now);
        }
        let held = f64::from(cache.stats().active_blocks) / f64::from(config.cache.blocks.max(1));
        occupancy += held;
        if scheduler.contended() {
            run.replay.report.occupancy_full += held;
            run.replay.report.full_steps += 1;
        }
    }
    let mut replay = run.replay;
    replay.report.sum_up(&scheduler, &cache, occupancy);
    (replay.work, replay.row_us) = (*scheduler.work(), scheduler.row_us());
    replay.report.seconds = now.0 as f64 / 1e6;
    let served = || replay.served.iter().flatten();
    let preempted = served().filter(|request| request.preemptions > 0).count();
    replay.report.preempted = preempted as f64 / replay.report.requests.max(1) as f64;
    [replay.report.ttft_s_p50, replay.report.ttft_s_p99] = quantiles(served().map(Served::ttft_s));
    [replay.report.tpot_s_p50, replay.report.tpot_s_p99] = quantiles(served().filter_map(Served::tpot_s));
    [replay.report.e2e_s_p50, replay.report.e2e_s_p99] = quantiles(served().map(Served::e2e_s));
    Ok(replay)
}

struct Run<'a, C> {
    requests: &'a [TraceRequest],
    device: TraceDevice<'a, C>,
    replay: Replay,
    drafter: Option<(DraftConfig, Rng)>,
    /// Those that have a token and did not end.
    answering: Vec<usize>,
}

impl<C> Run<'_, C> {
    fn take(&mut self, events: &mut Vec<(RequestId, Event)>) {
        let mut tokens = 0;
        for (id, event) in events.drain(..) {
            let index = id.0 as usize - 1;
            match event {
                Event::Prompt { cached_tokens, .. } => {
                    self.replay.served[index].get_or_insert_default().cached_tokens = cached_tokens;
                }
                Event::Token { .. } => {
                    tokens += 1;
                    let served = self.replay.served[index].get_or_insert_default();
                    served.output_tokens += 1;
                    if served.output_tokens == 1 {
                        self.answering.push(index);
                    }
                }
                Event::Pooled { .. } => {}
                Event::Finished { reason, timing, .. } => {
                    self.answering.retain(|of| *of != index);
                    self.end(index, reason, &timing);
                }
            }
        }
        if tokens > 0 {
            let before = self.replay.generated.last().map_or(0, |(_, count)| *count);
            self.replay.generated.push((self.device.now, before + tokens));
        }
    }

    fn end(&mut self, index: usize, reason: FinishReason, timing: &Timing) {
        let served = &mut self.replay.served[index];
        if !matches!(reason, FinishReason::Stop | FinishReason::Length) {
            *served = None;
        }
        if let Some(served) = served {
            // The scheduler sees it at the end of the step that was under way.
            (served.arrived, served.first_token) = (self.requests[index].arrives, timing.first_token);
            (served.finished, served.preemptions) = (timing.finished, timing.preemptions);
        }
    }

    /// Says what may come next, more or less rightly.
    fn draft(&mut self, scheduler: &mut Scheduler) {
        let Some((config, random)) = &mut self.drafter else { return };
        for index in &self.answering {
            let (request, id) = (&self.requests[*index], RequestId(*index as u64 + 1));
            let Some(served) = &self.replay.served[*index] else { continue };
            if !scheduler.wants_drafts(id, 0) {
                continue;
            }
            let next = request.prompt.len() as u32 + served.output_tokens;
            let tokens = config.tokens.min(request.output.saturating_sub(served.output_tokens + 1));
            let drafts: Vec<u32> = (next..next + tokens)
                .map(|position| {
                    let right = answer(*index, request, position);
                    match random.unit() < config.right {
                        true => right,
                        false => 1 + right % (VOCAB as u32 - 1),
                    }
                })
                .collect();
            scheduler.propose(id, 0, &drafts);
        }
    }
}

impl TraceReport {
    fn sum_up(&mut self, scheduler: &Scheduler, cache: &KvCache, occupancy: f64) {
        let counters = scheduler.counters();
        self.requests = counters.requests_received;
        self.steps = counters.steps;
        self.prompt_tokens = counters.prompt_tokens;
        self.cached_tokens = counters.cached_prompt_tokens;
        self.generated_tokens = counters.generation_tokens;
        self.preemptions = counters.preemptions;
        self.preemption_rate = counters.preemptions as f64 / counters.requests_received.max(1) as f64;
        self.recompute_rate = counters.recomputed_tokens as f64 / counters.iteration_tokens.max(1) as f64;
        self.waste = cache.stats().lifetime_waste();
        self.occupancy = occupancy / counters.steps.max(1) as f64;
        self.occupancy_full /= self.full_steps.max(1) as f64;
    }
}

/// The median and the 99th percentile.
fn quantiles(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [0.5, 0.99]
        .map(|q| values.get((values.len().saturating_sub(1) as f64 * q) as usize).copied().unwrap_or(0.0))
}

/// The request as the engine would accept it, or nothing if it could never run.
fn build<C>(index: usize, request: &TraceRequest, config: &ReplayConfig<C>) -> Option<Request> {
    let prompt = request.prompt.len() as u64;
    let pool = u64::from(config.cache.blocks) * u64::from(config.cache.block_tokens);
    let room =
        u64::from(config.scheduler.max_model_len).min(pool).checked_sub(prompt).filter(|room| *room > 0)?;
    let max_tokens = request.max_tokens.unwrap_or(config.max_tokens);
    let mut sampling = SamplingParams::greedy(u64::from(max_tokens).min(room) as u32);
    sampling.seed = index as u64;
    sampling.stop_token_ids = Arc::new([STOP]);
    let id = RequestId(index as u64 + 1);
    // One cache for all: a recording has other tokens for what another tenant's cache had.
    let speculation =
        config.drafter.map(|drafter| Speculation::new(drafter, DRAFTS_MAX, &request.prompt, &[]));
    let request = Request::new(id, request.tenant, root(TenantId(0)), request.prompt.clone(), sampling);
    Some(Request { speculation, ..request })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CostModel;
    use crate::trace::mooncake;

    #[test]
    fn a_replay_gives_every_request_its_recorded_length() {
        let json: String = (0..40)
            .map(|i| {
                let (at, length, output) = (i * 10, 600 + i * 3, 1 + i % 30);
                format!("{{\"timestamp\":{at},\"input_length\":{length},\"output_length\":{output},\"hash_ids\":[1,{}]}}\n", i + 2)
            })
            .collect();
        let requests = mooncake(json.as_bytes(), 100).expect("valid");
        let cache = CacheConfig { blocks: 400, block_tokens: 16, bytes_per_block: 1 };
        let config = ReplayConfig::new(SchedulerConfig::default(), cache, CostModel::CPU_1B, 200);
        let report = replay(&requests, &config).expect("valid limits");
        assert_eq!(report.requests, 40);
        assert_eq!(report.generated_tokens, requests.iter().map(|r| u64::from(r.output)).sum::<u64>());
        assert_eq!(report.cached_tokens, 39 * 512, "the common first block is computed once");
        assert!(report.occupancy > 0.0 && report.occupancy <= 1.0);
    }

    /// `kinds` prompts of 40 blocks, over and over, one after another.
    fn again(kinds: u64, requests: u64, output: u32) -> Vec<TraceRequest> {
        let request = |index: u64| TraceRequest {
            arrives: Micros(index * 60_000_000),
            tenant: TenantId(0),
            prompt: (0..640).map(|at| token(index % kinds, at)).collect(),
            output,
            max_tokens: None,
            answer: Arc::default(),
        };
        (0..requests).map(request).collect()
    }

    fn config(blocks: u32) -> ReplayConfig<CostModel> {
        let cache = CacheConfig { blocks, block_tokens: 16, bytes_per_block: 1 << 20 };
        ReplayConfig::new(SchedulerConfig::default(), cache, CostModel::CPU_1B, 200)
    }

    #[test]
    fn what_became_of_each_request_adds_up() {
        let requests = again(2, 6, 5);
        let replay = replay_in_full(&requests, &config(400)).expect("valid limits");
        let served: Vec<Served> = replay.served.iter().map(|served| served.expect("it ran")).collect();
        assert!(served.iter().all(|served| served.output_tokens == 5));
        let cached: Vec<u32> = served.iter().map(|served| served.cached_tokens).collect();
        // The last token of a prompt is computed.
        assert_eq!(cached, [0, 0, 639, 639, 639, 639]);
        assert_eq!(replay.generated.last().map(|(_, tokens)| *tokens), Some(30));
        assert!(served[2].ttft_s() < served[0].ttft_s(), "a hit is sooner there");
        assert_eq!(served[1].arrived, requests[1].arrives);
    }

    #[test]
    fn right_drafts_take_fewer_steps_and_wrong_ones_none_less() {
        let requests = again(1, 1, 150);
        let steps = |right: f64| {
            let drafts = Some(DraftConfig { tokens: 3, right });
            let report = replay(&requests, &ReplayConfig { drafts, ..config(400) }).expect("valid limits");
            assert_eq!(report.generated_tokens, 150);
            report.steps
        };
        let without = replay(&requests, &config(400)).expect("valid limits").steps;
        assert_eq!(steps(0.0), without);
        // 4 tokens in a step, once steps of several rows have been measured.
        assert!(steps(1.0) < without / 2, "{} of {without}", steps(1.0));
    }

    #[test]
    fn a_tier_brings_back_what_the_cache_gave_up() {
        // Four prompts in room for two.
        let requests = again(4, 24, 3);
        let cached = |tier| {
            let report = replay(&requests, &ReplayConfig { tier, ..config(100) }).expect("valid limits");
            assert_eq!(report.requests, 24);
            report.cached_tokens
        };
        let fast = TierConfig { bytes: 1 << 30, bytes_per_s: 10e9 };
        assert_eq!(cached(None), 0, "the least recently used goes");
        assert!(cached(Some(fast)) > 15 * 600, "{}", cached(Some(fast)));
        let small = TierConfig { bytes: 1 << 20, ..fast };
        assert!(cached(Some(small)) < 640, "room for a block");
    }
}
