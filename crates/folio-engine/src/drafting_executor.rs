//! An executor with a second model that proposes drafts.
//!
//! Owns: the drafter's passes before a step. Must never: change a token: what it proposes is verified like any draft, and a drafter
//! that fails proposes nonsense from then on, while the step goes on.
//!
//! Before a step the drafter computes the known tokens that its KV lacks ([`crate::plan::DraftPlan`]), and from the last of them proposes token
//! by token, one pass for all sequences each. It draws as the model itself will draw: with the parameters, the seed and the
//! position of the sample that its draft is held against ("coupled" drafts: Daliri, Musco and Suresh, *Coupling without
//! Communication and Drafter-Invariant Speculative Decoding*, 2024), or sharper ([`DraftingExecutor::at_temperature`]). So at temperature 0
//! it is greedy, and above it its draws are right about as often as two distributions agree. Penalties count its drafts, and what a guide
//! forbids it does not draw, as far as the guide knows that in time.
//!
//! A drafter that reads the model's features ([`Reads::Features`]) gets those of the position before each token: the model's, which are
//! kept here by table slot from the step that computed them until the drafter has, and behind them its own ([`features`]).
//!
//! Its KV and its states are groups of the cache, the last of a plan, and optional. Blocks of them that are to be copied are copied before it
//! computes next: nobody else reads or writes them. Rows of its drafts leave their states where the model's rows of them do, each in a block
//! of its own, so that the commit of the step keeps those of drafts that were right.

mod features;

use std::sync::Arc;

use folio_kv::BlockCopy;
use folio_model::program::EmbeddingInput;
use smallvec::SmallVec;

use crate::guide::{Guide, GuideRef, Restricted};
use crate::plan::{
    DrafterModel, Executor, ExecutorError, Reads, SamplePlan, SampleSpec, Sampled, SequenceId, SequencePlan,
    StepOutput, StepPlan, TableChange, Want,
};
use crate::request::SamplingParams;
use features::Features;

/// See the module documentation.
pub struct DraftingExecutor<M, D> {
    model: M,
    drafter: D,
    as_drafter: DrafterModel,
    vocab: u32,
    /// What of a sequence's temperature its drafts are drawn at.
    temperature: f32,
    /// Its pass, and which of the step's sequences each entry is of.
    pass: StepPlan,
    of: Vec<Of>,
    /// Entries by table slot, kept for their memory and for the block tables that the drafter knows.
    entries: Vec<Option<Box<SequencePlan>>>,
    /// Of the step being begun, by place.
    drafts: Vec<u32>,
    features: Features,
    /// It failed and is not asked any more.
    broken: bool,
}

/// Whose an entry of a pass is: a sequence of the step; and which of the features that the pass gave are its.
#[derive(Clone, Copy)]
struct Of {
    sequence: usize,
    features: usize,
}

impl<M: Executor, D: Executor> DraftingExecutor<M, D> {
    /// `model` has the cache groups before `as_drafter.group` ([`crate::ModelExecutor::with_groups`]), and gives features where the drafter
    /// reads them. `drafter` has those from there on ([`DrafterModel::cache_groups`]), and `vocab` tokens; what is unknown to it is token 0.
    ///
    /// # Panics
    ///
    /// If it reads features and has more than one group: a context that begins anew begins with a block of that one, and a state has none.
    pub fn new(model: M, drafter: D, as_drafter: DrafterModel, vocab: u32) -> Self {
        let is_head = as_drafter.reads != Reads::Tokens;
        assert!(
            !is_head || as_drafter.groups == 1,
            "a head keeps K and V of all positions, and nothing else"
        );
        Self {
            model,
            drafter,
            as_drafter,
            vocab,
            temperature: 1.0,
            pass: StepPlan::default(),
            of: Vec::new(),
            entries: Vec::new(),
            drafts: Vec::new(),
            features: Features::new(as_drafter.reads),
            broken: false,
        }
    }

    /// Drafts are drawn at this share of their sequence's temperature. With the same noise a drafter that is sharper says what the model says more
    /// often than at the model's own temperature, as long as it is not the same model (`tools/bench/draft_acceptance.py`).
    pub fn at_temperature(self, share: f32) -> Self {
        Self { temperature: share, ..self }
    }

    /// All passes of a step.
    fn propose(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        for (index, sequence) in plan.sequences.iter().enumerate() {
            if !sequence.drafter.tokens.is_empty() {
                self.add(index, sequence);
            }
        }
        let mut proposed = 0;
        while !self.pass.sequences.is_empty() {
            self.pass.step += 1;
            let output = self.drafter.execute(&self.pass)?;
            let (mut samples, mut given) = (output.samples.iter(), 0);
            self.features.passed(&output.features);
            self.pass.copies.clear();
            for (entry, of) in self.pass.sequences.iter_mut().zip(&mut self.of) {
                (entry.since, entry.first_position) = (self.pass.step, entry.end());
                entry.changes.clear();
                of.features = given;
                given += entry.features as usize;
                let sequence = &plan.sequences[of.sequence];
                if sequence.drafter.drafts > proposed {
                    let draft = match samples.next() {
                        Some(Sampled::Token { id, .. }) => *id,
                        _ => 0,
                    };
                    self.drafts[(sequence.drafter.first_place + proposed) as usize] = draft;
                    // The next pass computes it, and draws the one behind it.
                    entry.tokens.clear();
                    entry.tokens.push(draft);
                    entry.tentative += 1;
                    let first = sequence.drafter.first_place as usize;
                    let drafts = &self.drafts[first..=first + proposed as usize];
                    expect(sequence, drafts);
                    let before = entry.samples.pop();
                    entry.samples.extend(match sequence.drafter.drafts > proposed + 1 {
                        true => sample(0, sequence, drafts, before, self.temperature),
                        false => before.map(parameters),
                    });
                    entry.features = self.features.wanted(sequence.drafter.drafts, proposed + 1);
                }
            }
            proposed += 1;
            self.keep(plan, proposed);
            let own = self.of.iter().map(|of| of.features);
            self.features.feed_own(own, &mut self.pass.features);
        }
        Ok(())
    }

    /// Before the passes: places for their drafts, and what is to be copied.
    fn prepare(&mut self, plan: &StepPlan) {
        let places: u32 = plan.sequences.iter().map(|sequence| sequence.drafter.drafts).sum();
        self.drafts.clear();
        self.drafts.resize(places as usize, 0);
        self.pass.features.clear();
        let first = self.as_drafter.group as u32;
        let own = plan.copies.iter().filter(|copy| copy.group >= first);
        self.pass.copies.extend(own.map(|copy| BlockCopy { group: copy.group - first, ..*copy }));
    }

    /// A sequence's entry in the first pass.
    fn add(&mut self, index: usize, sequence: &SequencePlan) {
        let slot = sequence.table_slot as usize;
        if slot >= self.entries.len() {
            self.entries.resize_with(slot + 1, || None);
        }
        let entry = self.entries[slot].take();
        let mut entry = entry.unwrap_or_else(|| Box::new(SequencePlan::empty(SequenceId(0))));
        if entry.id != sequence.id {
            *entry = SequencePlan {
                id: sequence.id,
                table_slot: sequence.table_slot,
                block_tables: std::mem::take(&mut entry.block_tables),
                ..SequencePlan::empty(sequence.id)
            };
            entry.block_tables.iter_mut().for_each(Vec::clear);
        }
        entry.changes.clear();
        let before = (sequence.drafter.context / self.as_drafter.block_tokens) as usize;
        for (at, group) in self.as_drafter.cache_groups().enumerate() {
            if at == entry.block_tables.len() {
                entry.block_tables.push(Vec::new());
            }
            let (known, new) = (&mut entry.block_tables[at], &sequence.block_tables[group][before..]);
            // Whatever was before a drafter's place in a table may have given way to a block of equal content.
            let same = known.iter().zip(new).take_while(|(known, new)| known == new).count();
            known.truncate(same);
            known.extend_from_slice(&new[same..]);
            entry.changes.push(TableChange { from: same as u32, ..TableChange::default() });
        }
        entry.first_position = sequence.drafter.first_position - sequence.drafter.context;
        entry.tokens.clear();
        let unknown = |token: u32| if token < self.vocab { token } else { 0 };
        entry.tokens.extend(sequence.drafter.tokens.iter().copied().map(unknown));
        let end = sequence.drafter.first_position + entry.tokens.len() as u32;
        entry.tentative = sequence.tentative_from().map_or(0, |from| end.saturating_sub(from));
        let before = entry.samples.pop();
        if sequence.drafter.drafts > 0 {
            let row = entry.tokens.len() as u32 - 1;
            entry.samples.extend(sample(row, sequence, &[], before, self.temperature));
        }
        entry.features = self.features.wanted(sequence.drafter.drafts, 0);
        self.features.feed(sequence, &mut self.pass.features);
        self.pass.sequences.push(entry);
        self.of.push(Of { sequence: index, features: 0 });
    }

    /// Entries of which the next pass computes nothing go back to where they are kept.
    fn keep(&mut self, plan: &StepPlan, proposed: u32) {
        let mut at = 0;
        while let Some(of) = self.of.get(at) {
            if plan.sequences[of.sequence].drafter.drafts > proposed {
                at += 1;
                continue;
            }
            self.of.swap_remove(at);
            let entry = self.pass.sequences.swap_remove(at);
            let slot = entry.table_slot as usize;
            self.entries[slot] = Some(entry);
        }
    }

    fn give_up(&mut self, error: &ExecutorError) {
        tracing::error!(%error, "the model for drafts failed and proposes nothing any more");
        self.broken = true;
        self.pass = StepPlan::default();
        self.of.clear();
        self.features.clear();
    }
}

impl<M: Executor, D: Executor> Executor for DraftingExecutor<M, D> {
    fn depth(&self) -> usize {
        self.model.depth()
    }

    fn lag(&self) -> usize {
        self.model.lag()
    }

    fn drafter(&self) -> Option<DrafterModel> {
        Some(self.as_drafter)
    }

    /// The drafter reads the placeholders.
    fn embedding_input(&self) -> Option<EmbeddingInput> {
        self.model.embedding_input()
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.prepare(plan);
        if !self.broken
            && let Err(error) = self.propose(plan)
        {
            self.give_up(&error);
        }
        self.model.begin_with_drafts(plan, &self.drafts)?;
        self.features.begun(plan);
        Ok(())
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        let finished = self.model.finish();
        let given: &[f32] = match &finished {
            Ok(output) if !self.broken => &output.features,
            _ => &[],
        };
        self.features.finished(given);
        finished
    }
}

/// Whoever may draw behind drafts only what a guide allows is told what they are.
fn expect(sequence: &SequencePlan, drafts: &[u32]) {
    if let Some(SamplePlan { want: Want::Token(SampleSpec { guide: Some(guide), .. }), .. }) =
        sequence.samples.first()
    {
        guide.0.expect(drafts);
    }
}

/// The token behind row `row`, as the model is to draw its own behind `drafts`, but at a `share` of the temperature. `before`: the sample
/// before it, of the same sequence.
fn sample(
    row: u32,
    sequence: &SequencePlan,
    drafts: &[u32],
    before: Option<SamplePlan>,
    share: f32,
) -> Option<SamplePlan> {
    let Want::Token(spec) = &sequence.samples.get(drafts.len())?.want else { return None };
    let (params, counted) = match before {
        Some(SamplePlan { want: Want::Token(before), .. }) => (before.params, before.history),
        _ if share == 1.0 || spec.params.temperature == 0.0 => (spec.params.clone(), None),
        _ => {
            let temperature = share * spec.params.temperature;
            (Arc::new(SamplingParams { temperature, ..(*spec.params).clone() }), None)
        }
    };
    let mut history = spec.history.clone();
    if let (Some(history), Some(draft)) = (&mut history, drafts.last()) {
        // Copied once a step: it is the scheduler's, too.
        *history = counted.unwrap_or_else(|| history.clone());
        Arc::make_mut(history).push(*draft);
    }
    let behind = |guide: &GuideRef| Behind { guide: guide.clone(), drafts: drafts.into() };
    let guide = spec.guide.as_ref().map(|guide| GuideRef(Arc::new(behind(guide))));
    let SampleSpec { seed, position, forbid_stop, .. } = *spec;
    let spec = SampleSpec { params, seed, position, history, forbid_stop, guide };
    Some(SamplePlan { row, want: Want::Token(spec) })
}

/// A sample that keeps its parameters for the next step, and nothing of this one.
fn parameters(mut sample: SamplePlan) -> SamplePlan {
    if let Want::Token(spec) = &mut sample.want {
        (spec.history, spec.guide) = (None, None);
    }
    sample
}

/// What a guide allows behind drafts; where it does not know that yet, or ends the answer, anything.
struct Behind {
    guide: GuideRef,
    drafts: SmallVec<[u32; 16]>,
}

impl Guide for Behind {
    fn advance(&self, _: u32) {}

    fn restrict(&self, _: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        if self.guide.0.is_ready(&self.drafts) {
            let _ends = self.guide.0.restrict(&self.drafts, logits);
        }
        Ok(Restricted::Applied)
    }
}
