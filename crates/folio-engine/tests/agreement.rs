//! How often a drafter says what its model says: all of the time where it is given what it was made for, and hardly ever otherwise.

use folio_engine::drafting_executor::{Agreement, Pool, agreement};
use folio_engine::plan::{ExecutorError, StepOutput, StepPlan};
use folio_engine::{DrafterModel, Executor, ModelExecutor, Reads};
use folio_sim::{FEATURES, HeadBackend, SimBackend};

const VOCAB: usize = 1000;
const TEXT: u32 = 40;

fn text() -> Vec<u32> {
    (0..TEXT).map(|at| at * 37 % VOCAB as u32).collect()
}

fn model() -> ModelExecutor {
    ModelExecutor::new(Box::new(SimBackend::new(VOCAB, 32, 4, 64, 16)), VOCAB, 64, 16).with_groups(1)
}

fn head() -> ModelExecutor {
    ModelExecutor::new(Box::new(HeadBackend::new(VOCAB, 32, 4, 64)), VOCAB, 64, 16)
}

/// Pools of so many blocks of four tokens.
fn agree(
    model: &mut dyn Executor,
    drafter: &mut dyn Executor,
    reads: Reads,
    blocks: u32,
    vocab: u32,
) -> Agreement {
    let as_drafter = DrafterModel { group: 1, block_tokens: 4, positions: 100, reads };
    let pools = [Pool { block_tokens: 4, blocks }; 2];
    agreement(model, drafter, as_drafter, &pools, vocab, &text()).expect("both compute")
}

const FEATURES_OF_MODEL: Reads = Reads::Features { width: FEATURES };

#[test]
fn what_fits_says_the_same_everywhere() {
    let all = VOCAB as u32;
    let found = agree(&mut model(), &mut model(), Reads::Tokens, 32, all);
    assert_eq!(found, Agreement { places: TEXT, same: TEXT });
    assert_eq!((found.share(), found.tokens_per_step(3)), (1.0, 4.0));
    // A head's first row is of the second token.
    let found = agree(&mut model(), &mut head(), FEATURES_OF_MODEL, 32, all);
    assert_eq!(found, Agreement { places: TEXT - 1, same: TEXT - 1 });
    // Where there is less room, fewer places are looked at.
    let found = agree(&mut model(), &mut head(), FEATURES_OF_MODEL, 3, all);
    assert_eq!(found, Agreement { places: 11, same: 11 });
    assert_eq!(agree(&mut model(), &mut head(), FEATURES_OF_MODEL, 0, all), Agreement::default());
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
        self.output.features.rotate_left(FEATURES);
        Ok(&self.output)
    }
}

#[test]
fn what_does_not_fit_hardly_ever_does() {
    let mut shuffled = Shuffled { model: model(), output: StepOutput::default() };
    let found = agree(&mut shuffled, &mut head(), FEATURES_OF_MODEL, 32, VOCAB as u32);
    assert!(found.places == TEXT - 1 && found.share() < 0.1, "{found:?}");
    // Most of the text's tokens are none of the drafter's.
    let found = agree(&mut model(), &mut model(), Reads::Tokens, 32, 30);
    assert!(found.places == TEXT && found.share() < 0.3, "{found:?}");
}
