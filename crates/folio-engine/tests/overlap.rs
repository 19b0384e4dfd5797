//! Several steps under way: who overlaps, who sits out, and what becomes of those who end or give way meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use folio_engine::plan::{ExecutorError, PLACEHOLDER, Sampled, StepOutput, StepPlan, Want};
use folio_engine::request::{Event, Request, RequestId};
use folio_engine::{
    Executor, FinishReason, Guide, Micros, ModelExecutor, Restricted, Rules, RulesRef, Scheduler,
    SchedulerConfig, StepDriver, turn,
};
use folio_kv::{CacheConfig, KvCache, LruLeafFirst};
use folio_sim::rules::HashRules;
use folio_sim::scenario::{request, text};
use folio_sim::{Machine, SimBackend};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_prefill_tokens_while_decoding: 16,
        max_model_len: 256,
        watermark_permille: 0,
        ..SchedulerConfig::default()
    }
}

fn plain(id: u64, max_tokens: u32) -> Request {
    request(id, &text(id as u32, 5), max_tokens)
}

fn ahead(machine: &Machine) -> u64 {
    machine.scheduler.counters().steps_ahead
}

/// Until two steps are under way.
fn overlapping(machine: &mut Machine) {
    for _ in 0..10 {
        machine.step();
        if machine.scheduler.under_way() {
            return;
        }
    }
    panic!("nothing overlaps:\n{:?}", machine.scheduler);
}

#[test]
fn whoever_decodes_overlaps_and_says_what_it_says_alone() {
    let requests: Vec<Request> = (1..=3).map(|id| plain(id, 10 + 7 * id as u32)).collect();
    let mut steps = Vec::new();
    for samples in [false, true] {
        let mut machine = Machine::new(config(), 100, 4);
        if samples {
            machine = machine.with_sampling();
        }
        requests.iter().for_each(|request| machine.submit(request.clone()));
        machine.run();
        requests.iter().for_each(|request| machine.assert_as_alone(request));
        let counters = machine.scheduler.counters();
        assert_eq!(counters.steps_ahead > counters.steps - 2, samples, "{counters:?}");
        assert_eq!(counters.orphan_rows, 0, "a known end costs no row");
        steps.push((counters.iteration_tokens, counters.generation_tokens));
    }
    assert_eq!(steps[0], steps[1]);
}

#[test]
fn a_stop_token_leaves_an_orphan_behind_and_nothing_else() {
    let mut other = plain(1, 40);
    let mut stopped = plain(2, 40);
    let alone = Machine::new(config(), 100, 4).alone(&stopped);
    let (at, token) = (9, alone.choices[0].tokens[9].0);
    // The first time that it is said.
    let at = alone.choices[0].tokens[..at].iter().position(|(other, _)| *other == token).unwrap_or(at);
    stopped.sampling.eos_token_ids = Arc::new([token]);
    other.sampling.seed = 5;
    let mut machine = Machine::new(config(), 100, 4).with_sampling();
    machine.submit(other.clone());
    machine.submit(stopped.clone());
    while machine.finished(2).is_empty() {
        machine.step();
    }
    assert_eq!(machine.tokens(2, 0).len(), at + 1);
    assert_eq!(machine.finished(2), [(0, FinishReason::Stop)]);
    assert!(machine.scheduler.under_way(), "its row of the next step is being computed");
    let planned = machine.plans().last().expect("a plan").sequences.len();
    assert_eq!((planned, machine.scheduler.tables().count()), (2, 1), "and holds nothing any more");
    // Whoever comes now gets its slot and perhaps its blocks.
    let third = plain(3, 20);
    machine.submit(third.clone());
    machine.run();
    [&other, &stopped, &third].into_iter().for_each(|request| machine.assert_as_alone(request));
    assert_eq!(machine.cache.stats().active_blocks, 0);
    // What it said is found again, as far as it was said.
    let mut longer = plain(4, 4);
    let said = machine.tokens(2, 0);
    longer.prompt = stopped.prompt.iter().copied().chain(said.iter().copied()).chain([1, 2]).collect();
    machine.submit(longer.clone());
    machine.run();
    machine.assert_as_alone(&longer);
    assert_eq!(machine.cached_tokens(4), Some(5 + said.len() as u32 - 1));
}

#[test]
fn the_last_sequence_ends_and_the_orphan_is_still_waited_for() {
    let mut machine = Machine::new(config(), 100, 4).with_sampling();
    let mut stopped = plain(1, 40);
    let alone = machine.alone(&stopped);
    stopped.sampling.eos_token_ids = Arc::new([alone.choices[0].tokens[6].0]);
    machine.submit(stopped.clone());
    while machine.finished(1).is_empty() {
        machine.step();
    }
    assert!(machine.scheduler.under_way() && machine.scheduler.has_work());
    machine.step();
    assert!(!machine.scheduler.under_way() && !machine.scheduler.has_work());
    machine.assert_as_alone(&stopped);
}

#[test]
fn arrivals_prompts_and_cancellations_overlap_too() {
    let mut machine = Machine::new(config(), 100, 4).with_sampling();
    let first = plain(1, 60);
    machine.submit(first.clone());
    overlapping(&mut machine);
    let before = ahead(&machine);
    let mut long = request(2, &text(2, 60), 8);
    long.n = 3;
    machine.submit(long.clone());
    machine.submit(plain(3, 50));
    for _ in 0..6 {
        machine.step();
        assert!(machine.scheduler.under_way(), "a step runs while the next is decided");
    }
    machine.cancel(3);
    machine.step();
    assert_eq!(machine.finished(3), [(0, FinishReason::Cancelled)], "at once, with its row under way");
    assert!(machine.scheduler.under_way());
    machine.run();
    [&first, &long].into_iter().for_each(|request| machine.assert_as_alone(request));
    let counters = machine.scheduler.counters();
    assert!(ahead(&machine) - before > 50 && counters.orphan_rows > 0, "{counters:?}");
    assert_eq!(machine.cache.stats().active_blocks, 0);
}

/// Whoever needs the last token for more than its place waits for it; the others do not wait for that one, where what lies between two steps
/// takes longer than a row that is missing in every other one.
#[test]
fn who_depends_on_its_tokens_sits_out_alone() {
    type Change = fn(&mut Request);
    let changes: [(&str, Change); 2] = [
        ("a penalty", |request| request.sampling.repetition_penalty = 1.2),
        ("rules", |request| {
            request.sampling.rules = Some(RulesRef(Arc::new(HashRules { seed: 3, ..HashRules::default() })));
        }),
    ];
    for (what, change) in changes {
        for (depth, lag) in [(2, 1), (4, 1), (4, 3)] {
            let machine = Machine::new(config(), 100, 4).with_pipeline(depth, lag);
            let mut machine = machine.with_time_between_steps(1000);
            let (one, mut other) = (plain(1, 60), plain(2, 30));
            change(&mut other);
            machine.submit(one.clone());
            machine.submit(other.clone());
            machine.run();
            machine.assert_as_alone(&one);
            machine.assert_as_alone(&other);
            let follows = |id: u64| {
                let entries = machine.plans().iter().flat_map(|plan| &plan.sequences);
                entries.filter(|entry| entry.id.0 == id && entry.follows.is_some()).count()
            };
            assert_eq!(follows(2), 0, "{what}");
            // But for the steps that find out what takes longer, and those that have tokens which the rules leave alone.
            assert!(lag > 1 || follows(1) >= 40, "{what}: {} rows of the other", follows(1));
        }
    }
}

/// Rules whose mask is there once that is said.
#[derive(Clone, Default)]
struct Told(Arc<AtomicBool>);

impl Rules for Told {
    fn guide(&self, _: &[u32]) -> Arc<dyn Guide> {
        Arc::new(self.clone())
    }

    fn name(&self) -> &str {
        "told"
    }
}

impl Guide for Told {
    fn advance(&self, _: u32) {}

    fn restrict(&self, _: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        if !self.0.load(Ordering::Relaxed) {
            return Ok(Restricted::Late);
        }
        logits[3..].fill(f32::NEG_INFINITY);
        Ok(Restricted::Applied)
    }
}

/// Whose masks are there when a step is over, and not while the next is planned.
struct Masked {
    executor: ModelExecutor,
    told: Told,
    now: Micros,
    /// Steps that were begun while one with rows of request 2 was under way.
    behind: u32,
    guided_under_way: bool,
}

impl StepDriver for Masked {
    fn now(&mut self) -> Micros {
        self.told.0.store(false, Ordering::Relaxed);
        self.now.0 += 1000;
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, _: &mut KvCache) {
        self.executor.begin(plan).expect("a step");
        self.behind += u32::from(self.guided_under_way);
        self.guided_under_way = plan.sequences.iter().any(|sequence| sequence.id.0 == 2);
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        self.told.0.store(true, Ordering::Relaxed);
        (self.now, self.executor.finish())
    }
}

/// On a device that chooses for all others a mask is needed when its step is over, and the next step runs meanwhile.
#[test]
fn a_mask_that_comes_while_the_next_step_runs_is_in_time_and_nobody_waits_for_it() {
    let kv = CacheConfig { blocks: 100, block_tokens: 4, bytes_per_block: 1 };
    let mut cache = KvCache::new(kv, Box::new(LruLeafFirst::new()));
    let mut scheduler = Scheduler::new(config()).expect("valid limits").with_overlap(2, 1);
    let backend = SimBackend::new(29, 100, 4, 64, 64).with_sampling();
    let executor = ModelExecutor::new(Box::new(backend), 29, 64, 64);
    let (told, mut guided) = (Told::default(), plain(2, 12));
    guided.sampling.rules = Some(RulesRef(Arc::new(told.clone())));
    let requests = [plain(1, 40), guided].map(|request| request.hashed(4));
    scheduler.admit(requests, [], Micros(0));
    let mut driver = Masked { executor, told, now: Micros(0), behind: 0, guided_under_way: false };
    let mut said = [0; 3];
    for _ in 1..40 {
        for (id, event) in turn(&mut scheduler, &mut cache, &mut driver).drain(..) {
            if let Event::Token { token, .. } = event {
                said[id.0 as usize] += 1;
                assert!(id.0 != 2 || token.id < 3, "the mask binds");
            }
        }
    }
    let (counters, behind) = (scheduler.counters(), driver.behind);
    assert_eq!((counters.late_rows, said[2]), (0, 12), "{counters:?}");
    assert!(behind >= 8 && said[1] > 35, "{behind} steps were begun while its own ran, {said:?}");
}

/// What a device cannot choose is computed when the steps before it have their answers, and changes nothing.
#[test]
fn a_step_that_the_device_cannot_answer_waits_for_those_before_it() {
    let mut machine = Machine::new(config(), 100, 4).with_sampling();
    let mut other = plain(2, 30);
    other.sampling.logprobs = Some(3);
    machine.submit(plain(1, 30));
    machine.submit(other.clone());
    machine.run();
    machine.assert_as_alone(&plain(1, 30));
    machine.assert_as_alone(&other);
}

#[test]
fn a_victim_under_way_gives_way_at_its_last_commit() {
    for (depth, lag) in [(2, 1), (4, 1), (4, 3)] {
        // All are admitted, and all do not fit.
        let config = SchedulerConfig { headroom_tokens: 0, ..config() };
        let mut machine = Machine::new(config, 24, 4).with_pipeline(depth, lag);
        let requests: Vec<Request> = (1..=3).map(|id| request(id, &text(id as u32, 20), 60)).collect();
        requests.iter().for_each(|request| machine.submit(request.clone()));
        machine.run();
        requests.iter().for_each(|request| machine.assert_as_alone(request));
        assert!(machine.scheduler.counters().preemptions > 0, "the pool is too large for this test");
        assert!(ahead(&machine) > 0);
    }
}

/// In a pipeline of three stages a choice is used three steps later: decodes are spread over as many steps.
#[test]
fn decodes_form_as_many_cohorts_as_a_choice_takes_steps() {
    let mut machine =
        Machine::new(SchedulerConfig { max_num_seqs: 6, ..config() }, 200, 4).with_pipeline(4, 3);
    let requests: Vec<Request> = (1..=6).map(|id| plain(id, 40)).collect();
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    let sizes: Vec<usize> = machine.plans().iter().map(|plan| plan.sequences.len()).collect();
    let steady = &sizes[20..80];
    assert!(steady.iter().all(|size| *size == 2), "six sequences in steps of two: {sizes:?}");
}

#[test]
fn drafts_are_confirmed_as_far_as_they_are_what_is_chosen() {
    let settings = [(1, 1), (2, 1), (4, 1), (4, 3)].into_iter();
    for ((depth, lag), ruled) in settings.flat_map(|setting| [(setting, false), (setting, true)]) {
        for right in 0..=4 {
            let mut machine = Machine::new(config(), 100, 4).with_pipeline(depth, lag);
            let (mut drafted, other) = (plain(1, 40), plain(2, 40));
            let rules = HashRules { seed: 3, ..HashRules::default() };
            drafted.sampling.rules = ruled.then(|| RulesRef(Arc::new(rules)));
            machine.submit(drafted.clone());
            machine.submit(other.clone());
            let alone: Vec<u32> =
                machine.alone(&drafted).choices[0].tokens.iter().map(|(token, _)| *token).collect();
            while machine.finished(1).is_empty() {
                let said = machine.tokens(1, 0).len();
                let mut drafts: Vec<u32> = alone[said..].iter().copied().take(4).collect();
                drafts.iter_mut().skip(right).for_each(|draft| *draft = (*draft + 1) % 29);
                machine.scheduler.propose(drafted.id, 0, &drafts);
                machine.step();
            }
            machine.run();
            machine.assert_as_alone(&drafted);
            machine.assert_as_alone(&other);
            let counters = machine.scheduler.counters();
            let (drafts, accepted) = counters.draft_tokens();
            assert!(
                drafts > 0 && (accepted == 0) == (right == 0),
                "{depth} {lag} {right}: {accepted} of {drafts}"
            );
            assert!(right < 4 || accepted == drafts, "all were right");
            assert_eq!(machine.cache.stats().active_blocks, 0);
        }
    }
}

/// A scheduler by hand: what a device would choose is said by the test.
struct ByHand {
    scheduler: Scheduler,
    cache: KvCache,
}

impl ByHand {
    /// Two requests whose prompts are computed.
    fn new() -> Self {
        let cache = CacheConfig { blocks: 50, block_tokens: 4, bytes_per_block: 1 };
        let cache = KvCache::new(cache, Box::new(LruLeafFirst::new()));
        let mut scheduler = Scheduler::new(config()).expect("limits").with_overlap(2, 1);
        let mut second = plain(2, 3);
        second.sampling.min_tokens = 3;
        second.sampling.temperature = 1.0;
        scheduler.admit([plain(1, 20), second].map(|request| request.hashed(4)), [], Micros(0));
        let mut this = Self { scheduler, cache };
        let plan = this.plan();
        this.commit(plan.step, 2);
        this
    }

    fn plan(&mut self) -> StepPlan {
        self.scheduler.plan(&mut self.cache, Micros(10)).clone()
    }

    fn ahead(&mut self) -> Option<StepPlan> {
        let room = self.scheduler.has_room();
        room.then(|| self.plan()).filter(|plan| !plan.sequences.is_empty())
    }

    fn commit(&mut self, step: u64, tokens: usize) -> Vec<(RequestId, Event)> {
        let samples = vec![Sampled::Token { id: 3, logprobs: None }; tokens];
        let output = StepOutput { step, samples, ..StepOutput::default() };
        let events = std::mem::take(self.scheduler.commit(&mut self.cache, Ok(&output), Micros(20)));
        self.scheduler.check(&self.cache).expect("the books balance");
        events
    }

    fn fail(&mut self, step: u64) -> Vec<(RequestId, Event)> {
        let error = ExecutorError { step, reason: "told to".into() };
        let events = std::mem::take(self.scheduler.commit(&mut self.cache, Err(error), Micros(20)));
        self.scheduler.check(&self.cache).expect("the books balance");
        events
    }
}

#[test]
fn an_entry_moves_on_by_one_row_that_follows_its_sample() {
    let mut hand = ByHand::new();
    let plan = hand.plan();
    let next = hand.ahead().expect("both decode");
    hand.scheduler.check(&hand.cache).expect("the books balance");
    assert!(hand.ahead().is_none(), "two are under way");
    assert_eq!((next.step, next.sequences.len()), (plan.step + 1, 2));
    for (row, (before, after)) in plan.sequences.iter().zip(&next.sequences).enumerate() {
        assert_eq!((after.id, &after.tokens[..]), (before.id, &[PLACEHOLDER | row as u32][..]));
        assert_eq!(after.first_position, before.first_position + 1);
        let spec = |sequence: &folio_engine::plan::SequencePlan| match &sequence.samples[..] {
            [sample] => match &sample.want {
                Want::Token(spec) => spec.clone(),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        };
        let (before, after) = (spec(before), spec(after));
        assert_eq!((after.seed, after.position), (before.seed, before.position + 1));
        // The second may not stop before its third token; plan n is of its second.
        assert_eq!((before.forbid_stop, after.forbid_stop), (row == 1, row == 1));
    }
    assert_eq!(hand.commit(plan.step, 2).len(), 2);
    let third = hand.ahead().expect("both decode");
    assert_eq!(third.sequences.len(), 1, "the second gets its last token in the step that runs");
    let [sample] = &third.sequences[0].samples[..] else { panic!("one sample") };
    assert!(matches!(&sample.want, Want::Token(spec) if !spec.forbid_stop));
    let ended = hand.commit(next.step, 2);
    assert!(ended.iter().any(
        |(id, event)| id.0 == 2 && matches!(event, Event::Finished { reason: FinishReason::Length, .. })
    ));
    assert_eq!(hand.commit(third.step, 1).len(), 1);
    assert_eq!(hand.scheduler.counters().steps, 4);
    assert_eq!(hand.plan().sequences[0].first_position, third.sequences[0].first_position + 1);
}

#[test]
fn a_step_behind_one_that_failed_finds_nobody() {
    let mut hand = ByHand::new();
    let plan = hand.plan();
    let next = hand.ahead().expect("both decode");
    let events = hand.fail(plan.step);
    assert_eq!(events.len(), 2);
    assert!(
        events.iter().all(|(_, event)| matches!(event, Event::Finished { reason: FinishReason::Error, .. }))
    );
    assert_eq!((hand.cache.stats().active_blocks, hand.scheduler.under_way()), (0, true));
    // Others get the slots of those who ended; the step that is still under way is not theirs.
    let more = [plain(3, 5), plain(4, 5)].map(|request| request.hashed(hand.cache.config().block_tokens));
    hand.scheduler.admit(more, [], Micros(20));
    assert_eq!(hand.commit(next.step, 2), []);
    let plan = hand.plan();
    assert_eq!(plan.sequences.iter().map(|entry| entry.tokens.len()).collect::<Vec<_>>(), [5, 5]);
    hand.commit(plan.step, 2);
    assert_eq!(hand.scheduler.counters().executor_failures, 1);
    assert_eq!(hand.scheduler.counters().generation_tokens, 4);
}

#[test]
fn an_answer_of_another_length_or_step_fails_the_step_it_was_for() {
    for (step, count) in [(1, 2), (0, 1)] {
        let mut hand = ByHand::new();
        let plan = hand.plan();
        let next = hand.ahead().expect("both decode");
        let events = hand.commit(plan.step + step, count);
        assert!(events.iter().all(|(_, event)| matches!(event, Event::Finished { error: Some(_), .. })));
        hand.fail(next.step);
        assert!(!hand.scheduler.has_work());
    }
}
