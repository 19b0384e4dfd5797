//! The executor on a backend that says the same token everywhere: what is chosen of a step with drafts.

use folio_engine::plan::{ExecutorError, Sampled};
use folio_engine::{
    Executor, Micros, ModelExecutor, RequestId, SamplingParams, Scheduler, SchedulerConfig, StepDriver,
    StepOutput, StepPlan, turn,
};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_model::backend::{Backend, BackendError, Batch, KvLayout, TensorView};
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::sampling::{Choice, Outcome, SampleRow};
use folio_sim::scenario::request;

const VOCAB: usize = 16;
const SAID: u32 = 7;
const PROMPT: [u32; 3] = [1, 2, 3];

struct Same {
    /// It can sample, and leaves to the host what it is told to.
    samples: bool,
    logits: Vec<f32>,
    outcomes: Vec<Outcome>,
}

impl Backend for Same {
    fn name(&self) -> String {
        "same".to_owned()
    }

    fn numerics(&self) -> String {
        self.name()
    }

    fn load_matrix(&mut self, _: &str, _: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        Ok(MatrixId(0))
    }

    fn load_vector(&mut self, _: &str, _: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        Ok(VectorId(0))
    }

    fn load_program(&mut self, _: Program, _: usize, _: usize, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn allocate_cache(&mut self, _: &KvLayout, _: &[usize]) -> Result<(), BackendError> {
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        Ok(&self.logits[..batch.logit_rows.len() * VOCAB])
    }

    fn samples(&self) -> Option<u32> {
        self.samples.then_some(0)
    }

    fn begin_and_sample(
        &mut self,
        _: &Batch,
        rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    ) -> Result<(), BackendError> {
        self.outcomes.extend(rows.map(|row| match row.choice {
            Choice::Logits => Outcome::Logits,
            _ => Outcome::Token { id: SAID, logprobs: None },
        }));
        Ok(())
    }

    fn finish_sampled(&mut self, outcomes: &mut Vec<Outcome>) -> Result<(), BackendError> {
        outcomes.append(&mut self.outcomes);
        Ok(())
    }

    fn sampled_logits(&self, _: u32) -> &[f32] {
        &self.logits[..VOCAB]
    }

    fn hidden(&self, _: u32) -> &[f32] {
        &[]
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

/// A step every millisecond, and of those with drafts: the drafts, and what was chosen.
struct Steps {
    executor: ModelExecutor,
    now: Micros,
    drafts: Vec<u32>,
    seen: Vec<(Vec<u32>, Vec<Sampled>)>,
}

impl StepDriver for Steps {
    fn now(&mut self) -> Micros {
        self.now.0 += 1000;
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, _: &mut KvCache) {
        let sequence = &plan.sequences[0];
        let known = sequence.tokens.len() - sequence.drafts as usize;
        self.drafts = sequence.tokens[known..].to_vec();
        self.executor.begin(plan).expect("it begins");
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        let output = self.executor.finish().expect("it was computed");
        if !self.drafts.is_empty() {
            self.seen.push((self.drafts.clone(), output.samples.clone()));
        }
        (self.now, Ok(output))
    }
}

#[test]
fn nothing_is_chosen_behind_a_wrong_draft() {
    let row = (0..VOCAB as u32).map(|id| if id == SAID { 1.0 } else { 0.0 });
    let logits: Vec<f32> = row.cycle().take(32 * VOCAB).collect();
    // Penalties are the host's on a device, too, behind drafts.
    for (samples, penalty) in [(false, 0.0), (false, 0.5), (true, 0.5)] {
        let backend = Same { samples, logits: logits.clone(), outcomes: Vec::new() };
        let executor = ModelExecutor::new(Box::new(backend), VOCAB, 64, 32);
        let geometry = CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: 1 };
        let mut cache = KvCache::new(geometry, default_policy(0.01));
        let mut scheduler =
            Scheduler::new(SchedulerConfig::default()).expect("valid limits").with_vocab(VOCAB as u32);
        let mut ask = request(1, &PROMPT, 40);
        ask.sampling = SamplingParams { temperature: 0.0, presence_penalty: penalty, ..ask.sampling };
        scheduler.admit([ask.hashed(16)], [], Micros(0));
        let mut driver = Steps { executor, now: Micros(0), drafts: Vec::new(), seen: Vec::new() };
        for _ in 0..60 {
            scheduler.propose(RequestId(1), 0, &[SAID, SAID, SAID + 1, SAID, SAID]);
            turn(&mut scheduler, &mut cache, &mut driver).clear();
        }
        let all = driver.seen.iter().filter(|(drafts, _)| drafts.len() == 5);
        assert!(all.clone().count() > 0, "{:?}", driver.seen);
        for (_, chosen) in all {
            let tokens: Vec<Option<u32>> = chosen
                .iter()
                .map(|sampled| match sampled {
                    Sampled::Token { id, .. } => Some(*id),
                    _ => None,
                })
                .collect();
            let said = Some(SAID);
            assert_eq!(tokens, [said, said, said, None, None, None], "a device that samples: {samples}");
        }
    }
}
