//! How often a drafter says what its model says in the model's own answers: all of the time where it is given what it was made for, and hardly
//! ever otherwise.

use folio_engine::ModelExecutor;
use folio_engine::plan::StepOutput;
use folio_sim::{FEATURES, HeadBackend, SimBackend};

use super::*;

const VOCAB: usize = 1000;
const ROWS: u32 = 64;
const ANSWER: u32 = 20;

/// Two prompts.
fn questions() -> Questions {
    let prompt = |tokens: u32, by: u32| (0..tokens).map(|at| at * by % VOCAB as u32).collect();
    Questions { prompts: vec![prompt(9, 37), prompt(6, 91)], answer_tokens: ANSWER, ends: Vec::new() }
}

/// Places of both answers: of each the tokens, and what comes behind the last.
const PLACES: u32 = 2 * (ANSWER + 1);

fn model() -> ModelExecutor {
    ModelExecutor::new(Box::new(SimBackend::new(VOCAB, 32, 4, 64, 16)), VOCAB, ROWS as usize, 16)
        .with_groups(1)
}

fn head() -> ModelExecutor {
    ModelExecutor::new(Box::new(HeadBackend::new(VOCAB, 32, 4, 64)), VOCAB, ROWS as usize, 16)
}

/// Pools of so many blocks of four tokens.
fn agree(
    model: &mut dyn Executor,
    drafter: &mut dyn Executor,
    reads: Reads,
    blocks: u32,
    vocab: u32,
) -> Agreement {
    ask(model, drafter, reads, blocks, vocab, &questions(), &mut || true)
}

fn ask(
    model: &mut dyn Executor,
    drafter: &mut dyn Executor,
    reads: Reads,
    blocks: u32,
    vocab: u32,
    questions: &Questions,
    goes_on: &mut dyn FnMut() -> bool,
) -> Agreement {
    let as_drafter = DrafterModel { group: 1, groups: 1, block_tokens: 4, positions: 100, reads };
    let pools = [PoolShape { block_tokens: 4, blocks }; 2];
    let room = AgreementLimits { pools: &pools, rows: ROWS, vocab };
    agreement(model, drafter, as_drafter, room, questions, goes_on).expect("both compute")
}

const FEATURES_OF_MODEL: Reads = Reads::Features { width: FEATURES };

#[test]
fn what_fits_says_the_same_everywhere() {
    let all = VOCAB as u32;
    let found = agree(&mut model(), &mut model(), Reads::Tokens, 32, all);
    assert_eq!(found, Agreement { places: PLACES, same: PLACES });
    assert_eq!((found.share(), found.tokens_per_step(3)), (1.0, 4.0));
    let found = agree(&mut model(), &mut head(), FEATURES_OF_MODEL, 32, all);
    assert_eq!(found, Agreement { places: PLACES, same: PLACES });
    // Where there is less room, answers are shorter, and what has no answer is not asked.
    let found = agree(&mut model(), &mut head(), FEATURES_OF_MODEL, 3, all);
    assert_eq!(found, Agreement { places: (12 - 9 + 1) + (12 - 6 + 1), same: 11 });
    let found = agree(&mut model(), &mut head(), FEATURES_OF_MODEL, 2, all);
    assert_eq!(found, Agreement { places: 8 - 6 + 1, same: 3 });
    assert_eq!(agree(&mut model(), &mut head(), FEATURES_OF_MODEL, 0, all), Agreement::default());
}

#[test]
fn an_answer_ends_where_the_model_ends_it_or_time_does() {
    let places = |questions: &Questions, goes_on: &mut dyn FnMut() -> bool| {
        let found = ask(&mut model(), &mut head(), FEATURES_OF_MODEL, 32, VOCAB as u32, questions, goes_on);
        assert_eq!(found.same, found.places);
        found.places
    };
    // Asked once for each token: four of the first answer, one of the second.
    let mut left = 4;
    let mut goes_on = || {
        left -= 1;
        left > 0
    };
    assert_eq!(places(&questions(), &mut goes_on), (4 + 1) + (1 + 1));
    // Ended by whatever is said, neither has a token; the place of the end counts.
    let ends = (0..VOCAB as u32).collect();
    assert_eq!(places(&Questions { ends, ..questions() }, &mut || true), 2);
    assert_eq!(places(&Questions { prompts: Vec::new(), ..questions() }, &mut || true), 0);
}

/// A model whose features are those of other rows.
struct Shuffled {
    model: ModelExecutor,
    output: StepOutput,
}

impl Executor for Shuffled {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.model.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        self.output = self.model.finish()?.clone();
        if !self.output.features.is_empty() {
            self.output.features.rotate_left(FEATURES);
        }
        Ok(&self.output)
    }
}

#[test]
fn what_does_not_fit_hardly_ever_does() {
    let mut shuffled = Shuffled { model: model(), output: StepOutput::default() };
    let found = agree(&mut shuffled, &mut head(), FEATURES_OF_MODEL, 32, VOCAB as u32);
    assert!(found.places == PLACES && found.share() < 0.1, "{found:?}");
    // Most tokens are none of the drafter's.
    let found = agree(&mut model(), &mut model(), Reads::Tokens, 32, 30);
    assert!(found.places == PLACES && found.share() < 0.3, "{found:?}");
}
