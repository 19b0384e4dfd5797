//! What the executor chooses of a step with drafts.

use folio_engine::plan::{ExecutorError, Sampled};
use folio_engine::{
    Event, Executor, Micros, ModelExecutor, RequestId, SamplingParams, Scheduler, SchedulerConfig,
    StepDriver, StepOutput, StepPlan, turn,
};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_sim::SimBackend;
use folio_sim::scenario::request;

const VOCAB: u32 = 29;

/// A step every millisecond, and of those with drafts: how many, and what was chosen.
struct Steps {
    executor: ModelExecutor,
    now: Micros,
    drafts: u32,
    seen: Vec<(u32, Vec<Sampled>)>,
}

impl StepDriver for Steps {
    fn now(&mut self) -> Micros {
        self.now.0 += 1000;
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, _: &mut KvCache) {
        self.drafts = plan.sequences[0].drafts;
        self.executor.begin(plan).expect("it begins");
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        let output = self.executor.finish().expect("it was computed");
        self.seen.push((self.drafts, output.samples.clone()));
        (self.now, Ok(output))
    }
}

/// An answer, and its steps. Where it is known, two right drafts, a wrong one and two right ones are proposed in each.
fn run(samples: bool, presence_penalty: f32, known: Option<&[u32]>) -> (Vec<u32>, Vec<(u32, Vec<Sampled>)>) {
    let backend = SimBackend::new(VOCAB as usize, 64, 16, 64, 32);
    let backend = if samples { backend.with_sampling() } else { backend };
    let executor = ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 32);
    let geometry = CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: 1 };
    let mut cache = KvCache::new(geometry, default_policy(0.01));
    let mut scheduler = Scheduler::new(SchedulerConfig::default()).expect("valid limits").with_vocab(VOCAB);
    let mut ask = request(1, &[1, 2, 3], 80);
    ask.sampling = SamplingParams { presence_penalty, ..ask.sampling };
    scheduler.admit([ask.hashed(16)], [], Micros(0));
    let mut driver = Steps { executor, now: Micros(0), drafts: 0, seen: Vec::new() };
    let mut said: Vec<u32> = Vec::new();
    while scheduler.has_work() {
        let rest = known.and_then(|known| known.get(said.len()..)).unwrap_or_default();
        let drafts: Vec<u32> =
            (0..).zip(rest).map(|(at, token)| (token + u32::from(at == 2)) % VOCAB).take(5).collect();
        scheduler.propose(RequestId(1), 0, &drafts);
        said.extend(turn(&mut scheduler, &mut cache, &mut driver).drain(..).filter_map(|(_, event)| {
            match event {
                Event::Token { token, .. } => Some(token.id),
                _ => None,
            }
        }));
    }
    (said, driver.seen)
}

#[test]
fn nothing_is_chosen_behind_a_wrong_draft() {
    // Penalties are the host's on a device, too, behind drafts.
    for (samples, penalty) in [(false, 0.0), (false, 0.5), (true, 0.5)] {
        let (known, _) = run(samples, penalty, None);
        let (said, steps) = run(samples, penalty, Some(&known));
        assert_eq!((said.len(), &said), (80, &known));
        let all: Vec<_> = steps.iter().filter(|(drafts, _)| *drafts == 5).collect();
        assert!(!all.is_empty(), "{steps:?}");
        for (_, chosen) in all {
            let is_chosen: Vec<bool> =
                chosen.iter().map(|sampled| matches!(sampled, Sampled::Token { .. })).collect();
            assert_eq!(
                is_chosen,
                [true, true, true, false, false, false],
                "a device that samples: {samples}"
            );
        }
    }
}
