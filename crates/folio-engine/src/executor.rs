//! The real executor: a plan becomes batches for a [`Backend`], logits become tokens, hidden states are pooled.
//!
//! Owns: the translation. A backend that leaves sampling to it lends the threads that it computes with: each samples
//! the next sequence that nobody has, its rows in order ([`Backend::forward_and`]). A backend that samples by itself is asked for tokens instead of logits (`on_device`); the
//! tokens are the same. Must never: decide anything; what it computes is a function of the plan and
//! the cached bits.
//!
//! A step that a sampling backend answers in one pass is begun there and goes on while the next is planned and begun: the tokens it chooses may
//! be named in the next batch, and what is chosen here is kept until its logits are there. Every other step waits for those before it
//! and has its answers when it is begun.
//!
//! A step is one forward pass, unless it wants more rows of logits than the backend has room for (prompt logprobs):
//! then it is split, between sequences where possible and within a sequence where not. Splitting changes no bit, because
//! rows do not depend on which batch they are in.
//!
//! Features of rows, where a plan wants them, come with the step's answers, so such a step is not left to the backend. A model that can say some
//! of another's tokens only ([`ModelExecutor::with_token_ids`]) is sampled here, from logits in which the others' are impossible.
//!
//! The backend keeps block tables from step to step, and is told what of them changed. A plan has them whole and says what changed
//! since which step; where that is not what the backend has (a step failed, or was never begun) it is told everything.
//!
//! Cost outside the backend: a copy of the plan's tokens and of what changed in block tables, and the sampler. Allocates nothing once
//! its buffers have grown.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use folio_model::backend::{Backend, Batch, BlockCopy, PLACEHOLDER, Span};
use folio_model::program::EmbeddingInput;
use folio_model::sampling::Outcome;

use crate::on_device::{ChosenHere, ask, chosen_here, rows, sampled};
use crate::on_host::{Here, SampledHere, SomeTokens, by_sequence, named, sample_reached};
use crate::plan::{
    Executor, ExecutorError, SamplePlan, Sampled, SequenceId, SequencePlan, StepOutput, StepPlan, Want,
};
use crate::sampler::Sampler;

/// Runs plans on a backend. See the module documentation.
pub struct ModelExecutor {
    backend: Box<dyn Backend>,
    vocab: usize,
    max_rows: usize,
    max_logit_rows: usize,
    batch: Batch,
    /// Of each slot, whose block tables the backend has, and of which step; those of this one are in the batch or were.
    tables: Vec<(SequenceId, u64)>,
    /// What the rows of logits, and the hidden rows, of `batch` are for, in the order of the plan.
    served: Vec<Served>,
    /// The sequences of `served`, where they are sampled here.
    sampled: Vec<SampledHere>,
    /// What a backend that samples is asked, as [`ask`] finds it.
    asked: Vec<Served>,
    /// Of the hidden states of a sequence's rows so far, where a flush came in between them.
    sum: Option<Vec<f64>>,
    outcomes: Vec<Outcome>,
    /// Answers of a pass that was computed on a backend which samples.
    answers: Vec<Sampled>,
    /// Of the step being computed, or the one that was finished last.
    output: StepOutput,
    /// In order, at most `depth`.
    begun: VecDeque<Begun>,
    spare: Vec<StepOutput>,
    spare_here: Vec<Vec<ChosenHere>>,
    /// Cache groups that this model has, the first of those of a plan; the others are a drafter's.
    groups: usize,
    /// What the drafts are that the plan being begun names by place.
    drafts: Vec<u32>,
    /// Rows of the plan that were added so far, and the features that each is given.
    rows: usize,
    width: usize,
    some_tokens: Option<SomeTokens>,
}

/// A step that was begun and not finished.
struct Begun {
    step: u64,
    /// So many answers are still to come from the backend; `None`: all are in `output`.
    rows: Option<usize>,
    /// What is chosen of them here.
    here: Vec<ChosenHere>,
    output: StepOutput,
    failed: Option<ExecutorError>,
}

/// New block table entries of a step that memory is set aside for: a million tokens of context at 16 tokens a block.
const TABLE_ENTRIES: usize = 1 << 16;
/// Block tables that change in one step, likewise.
const TABLE_EDITS: usize = 1 << 10;

/// Has no block tables.
const NOBODY: (SequenceId, u64) = (SequenceId(0), 0);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Served {
    pub(crate) sequence: u32,
    pub(crate) first_sample: u32,
    pub(crate) samples: u32,
    /// So many hidden rows; 0: a row of logits.
    pub(crate) hidden: u32,
}

impl Served {
    /// What is wanted of the row, in the plan.
    pub(crate) fn wants<'a>(&self, plan: &'a StepPlan) -> &'a [SamplePlan] {
        let from = self.first_sample as usize;
        &plan.sequences[self.sequence as usize].samples[from..from + self.samples as usize]
    }

    /// The first of it.
    pub(crate) fn want<'a>(&self, plan: &'a StepPlan) -> &'a Want {
        &self.wants(plan)[0].want
    }
}

impl ModelExecutor {
    /// `backend` has its program, sized for `max_rows` rows and `max_logit_rows` rows of logits, and its cache.
    pub fn new(backend: Box<dyn Backend>, vocab: usize, max_rows: usize, max_logit_rows: usize) -> Self {
        Self {
            backend,
            vocab,
            max_rows: max_rows.max(1),
            max_logit_rows: max_logit_rows.max(1),
            batch: Batch {
                blocks: Vec::with_capacity(TABLE_ENTRIES),
                edits: Vec::with_capacity(TABLE_EDITS),
                ..Batch::default()
            },
            tables: Vec::new(),
            served: Vec::new(),
            sampled: Vec::new(),
            asked: Vec::new(),
            sum: None,
            outcomes: Vec::new(),
            answers: Vec::new(),
            output: StepOutput::default(),
            begun: VecDeque::with_capacity(2),
            spare: Vec::with_capacity(2),
            spare_here: Vec::with_capacity(2),
            groups: usize::MAX,
            drafts: Vec::new(),
            rows: 0,
            width: 0,
            some_tokens: None,
        }
    }

    /// Its logits are of these tokens, of `vocab` there are. Each is below that.
    pub fn with_token_ids(mut self, ids: Arc<[u32]>, vocab: usize) -> Self {
        self.some_tokens = Some(SomeTokens { ids, vocab });
        self
    }

    /// Of the cache groups of a plan it has so many, the first; the others are somebody else's.
    pub fn with_groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// Adds rows `first..` of a sequence, as many as fit. Returns the row after the last that was added.
    fn add(&mut self, step: &StepPlan, index: usize, first: usize, samples: &mut usize) -> usize {
        let plan = &*step.sequences[index];
        let mut last = plan.tokens.len().min(first + self.max_rows - self.batch.tokens.len());
        let base = self.batch.tokens.len();
        if let Some(sample) = plan.samples.get(*samples)
            && self.add_hidden(index, sample, *samples, first..last)
        {
            *samples += 1;
        }
        while let Some(sample) = plan.samples.get(*samples) {
            let row = sample.row as usize;
            if row >= last {
                break;
            }
            if self.batch.logit_rows.len() == self.max_logit_rows {
                last = row;
                break;
            }
            let same = plan.samples[*samples..].iter().take_while(|other| other.row == sample.row).count();
            self.batch.logit_rows.push((base + row - first) as u32);
            self.served.push(Served {
                sequence: index as u32,
                first_sample: *samples as u32,
                samples: same as u32,
                hidden: 0,
            });
            *samples += same;
        }
        if last > first {
            self.edit_tables(step.step, plan);
            let adapter = plan.adapter.as_ref().map(|adapter| adapter.weights.clone());
            if adapter.is_some() || !self.batch.adapters.is_empty() {
                self.batch.adapters.resize(self.batch.spans.len(), None);
                self.batch.adapters.push(adapter);
            }
            self.batch.spans.push(Span {
                first_row: base as u32,
                rows: (last - first) as u32,
                first_position: plan.first_position + first as u32,
                slot: plan.table_slot,
                tentative_from: plan.tentative_from().unwrap_or(u32::MAX),
            });
            for token in &plan.tokens[first..last] {
                let token = self.token(plan, *token);
                self.batch.tokens.push(token);
            }
            plan.give(first..last, base, &mut self.batch);
            let given = self.rows * self.width..(self.rows + last - first) * self.width;
            self.batch.features.extend_from_slice(&step.features[given]);
            self.rows += last - first;
            let wanted = (plan.tokens.len() - plan.features as usize).max(first)..last;
            self.batch.feature_rows.extend(wanted.map(|row| (base + row - first) as u32));
        }
        last
    }

    /// Has the backend's block tables of a sequence be those of the plan: what changed where it has those of the plan before, else all.
    fn edit_tables(&mut self, step: u64, plan: &SequencePlan) {
        let slot = plan.table_slot as usize;
        if slot >= self.tables.len() {
            self.tables.resize(slot + 1, NOBODY);
        }
        let had = std::mem::replace(&mut self.tables[slot], (plan.id, step));
        if had == (plan.id, step) {
            return;
        }
        let follows = had == (plan.id, plan.since);
        if follows && plan.changes.is_empty() {
            return;
        }
        for (group, table) in (0..).zip(plan.block_tables.iter().take(self.groups)) {
            let change = plan.changes.get(group as usize).filter(|_| follows).copied().unwrap_or_default();
            if (change.from as usize) < table.len() {
                let new = &table[change.from as usize..];
                self.batch.edit_table(plan.table_slot, group, change.from, new.iter().copied());
            }
            if change.holes > 0 {
                let holes = change.first_hole as usize..(change.first_hole + change.holes) as usize;
                let new = table[holes].iter().copied();
                self.batch.edit_table(plan.table_slot, group, change.first_hole, new);
                self.batch.edits.last_mut().expect("it was just put there").len = table.len() as u32;
            }
        }
    }

    /// The backend's block tables may be anything.
    fn lose_tables(&mut self) {
        self.tables.clear();
        self.batch.clear();
    }

    /// Hidden states of the rows in `pass` that sample `at` of a sequence wants. Whether that answers it.
    fn add_hidden(&mut self, index: usize, sample: &SamplePlan, at: usize, pass: Range<usize>) -> bool {
        let row = sample.row as usize;
        let from = match sample.want {
            Want::Hidden => row,
            Want::HiddenSum { first, .. } => first as usize,
            Want::Token(_) | Want::Score { .. } => return false,
        };
        let rows = from.max(pass.start)..(row + 1).min(pass.end);
        if rows.is_empty() {
            return false;
        }
        let (base, answered) = (self.batch.tokens.len(), pass.contains(&row));
        self.served.push(Served {
            sequence: index as u32,
            first_sample: at as u32,
            samples: answered.into(),
            hidden: rows.len() as u32,
        });
        self.batch.hidden_rows.extend(rows.map(|row| (base + row - pass.start) as u32));
        answered
    }

    /// Begins the batch on a backend that samples. Returns what is chosen here of it.
    fn begin_asked(&mut self, plan: &StepPlan) -> Result<Vec<ChosenHere>, ExecutorError> {
        let mut here = self.spare_here.pop().unwrap_or_default();
        here.clear();
        here.extend(chosen_here(plan, &self.asked, |drafts| named(drafts, &self.drafts)));
        let begun = self.backend.begin_and_sample(&self.batch, &mut rows(plan, &self.asked));
        begun.map(|()| here).map_err(|error| {
            self.lose_tables();
            ExecutorError { step: plan.step, reason: error.to_string() }
        })
    }

    /// Gets the answers of all steps under way, so that another can be computed here and now.
    fn drain(&mut self) {
        let mut begun = std::mem::take(&mut self.begun);
        begun.iter_mut().for_each(|begun| self.complete(begun));
        self.begun = begun;
    }

    /// A step gets its answers, where the backend still has them.
    fn complete(&mut self, begun: &mut Begun) {
        if let Some(rows) = begun.rows.take() {
            let answered = self.take_answers(begun.step, rows, &mut begun.here, &mut begun.output.samples);
            begun.failed = answered.err();
        }
    }

    /// A token of a plan; one that a step with its answers chose is put in its place, that of a step that runs stays named.
    fn token(&self, sequence: &SequencePlan, token: u32) -> u32 {
        if sequence.follows.is_none() && token & PLACEHOLDER != 0 {
            return self.drafts.get((token & !PLACEHOLDER) as usize).copied().unwrap_or(0);
        }
        let before = sequence.follows.and_then(|step| self.begun.iter().find(|begun| begun.step == step));
        match before.filter(|before| before.rows.is_none()) {
            None => token,
            Some(before) => match before.output.samples.get((token & !PLACEHOLDER) as usize) {
                Some(Sampled::Token { id, .. }) => *id,
                // Its sequence ends with the step it follows, and nobody reads the answer.
                _ => 0,
            },
        }
    }

    /// What the backend samples, if it can sample for this model.
    fn samples(&self) -> Option<u32> {
        self.backend.samples().filter(|_| self.some_tokens.is_none())
    }

    /// An empty batch with what is to be copied.
    fn prepare(&mut self, plan: &StepPlan) {
        self.batch.clear_rows();
        self.rows = 0;
        self.width = match plan.features.len() {
            0 => 0,
            values => {
                values / plan.sequences.iter().map(|sequence| sequence.tokens.len()).sum::<usize>().max(1)
            }
        };
        self.served.clear();
        self.sum = None;
        let copies = plan.copies.iter().filter(|copy| (copy.group as usize) < self.groups);
        self.batch.copies.extend(copies.map(|c| BlockCopy {
            group: c.group,
            from: c.from.0,
            to: c.to.0,
            tokens: c.tokens,
        }));
    }

    /// Begins the step on a device that chooses all its tokens in one pass. `None`: it is no such step, or this is no such device.
    fn begin_on_device(&mut self, plan: &StepPlan) -> Result<Option<Begun>, ExecutorError> {
        let Some(most) = self.samples() else { return Ok(None) };
        self.prepare(plan);
        for (index, sequence) in plan.sequences.iter().enumerate() {
            if self.add(plan, index, 0, &mut 0) < sequence.tokens.len() {
                return Ok(None);
            }
        }
        // Hidden states and features it does not answer.
        let answered = self.batch.hidden_rows.is_empty() && self.batch.feature_rows.is_empty();
        if !answered || !ask(plan, &self.served, most, &mut self.asked) {
            return Ok(None);
        }
        let here = self.begin_asked(plan)?;
        self.batch.clear();
        let mut output = self.spare.pop().unwrap_or_default();
        output.samples.clear();
        output.features.clear();
        output.drafts.clone_from(&self.drafts);
        Ok(Some(Begun { step: plan.step, rows: Some(self.asked.len()), here, output, failed: None }))
    }

    /// Computes the step, in as many passes as it takes, when those before it have their answers.
    fn compute(&mut self, plan: &StepPlan) -> Result<Begun, ExecutorError> {
        self.drain();
        self.prepare(plan);
        self.output.samples.clear();
        self.output.features.clear();
        for (index, sequence) in plan.sequences.iter().enumerate() {
            let (mut row, mut samples) = (0, 0);
            loop {
                row = self.add(plan, index, row, &mut samples);
                if row == sequence.tokens.len() {
                    break;
                }
                // Full: compute what there is, so that the rest finds these positions in the cache.
                self.flush(plan)?;
            }
        }
        self.flush(plan)?;
        self.output.drafts.clone_from(&self.drafts);
        let output = std::mem::replace(&mut self.output, self.spare.pop().unwrap_or_default());
        Ok(Begun { step: plan.step, rows: None, here: Vec::new(), output, failed: None })
    }

    /// Computes the batch and answers what it serves.
    fn flush(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let answered = self.output.samples.len();
        match self.samples() {
            Some(most) if ask(plan, &self.served, most, &mut self.asked) => self.sample_on_device(plan)?,
            _ => self.sample_here(plan)?,
        }
        for row in &self.batch.feature_rows {
            self.output.features.extend_from_slice(self.backend.features(*row));
        }
        if !self.batch.hidden_rows.is_empty() {
            self.answer_hidden(plan, answered);
        }
        self.batch.clear();
        self.served.clear();
        Ok(())
    }

    /// The backend computes the batch and chooses.
    fn sample_on_device(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let (mut here, mut answers) = (self.begin_asked(plan)?, std::mem::take(&mut self.answers));
        let answered = self.take_answers(plan.step, self.asked.len(), &mut here, &mut answers);
        let mut all = answers.drain(..);
        for served in &self.served {
            let samples = served.samples as usize;
            match served.hidden {
                0 => self.output.samples.extend(all.by_ref().take(samples)),
                // Its place; the backend is asked for it last.
                _ => self.output.samples.extend((0..samples).map(|_| Sampled::Hidden(Vec::new()))),
            }
        }
        drop(all);
        self.spare_here.push(here);
        self.answers = answers;
        answered
    }

    /// Waits for the oldest step of the backend and adds its answers: what the backend chose for so many rows, and what is chosen `here`.
    fn take_answers(
        &mut self,
        step: u64,
        rows: usize,
        here: &mut Vec<ChosenHere>,
        answers: &mut Vec<Sampled>,
    ) -> Result<(), ExecutorError> {
        self.outcomes.clear();
        if let Err(error) = self.backend.finish_sampled(&mut self.outcomes) {
            self.lose_tables();
            return Err(ExecutorError { step, reason: error.to_string() });
        }
        if self.outcomes.len() != rows {
            let reason = format!("the backend answered {} rows of {rows}", self.outcomes.len());
            return Err(ExecutorError { step, reason });
        }
        let mut here = here.drain(..).peekable();
        for (row, outcome) in (0..).zip(self.outcomes.drain(..)) {
            if outcome != Outcome::Logits {
                answers.push(sampled(outcome));
                continue;
            }
            if let Some(it) = here.next_if(|it| it.row == row) {
                let logits = self.backend.sampled_logits(row);
                let answer = Sampler::of_thread(|sampler| {
                    sample_reached(sampler, answers.last(), &it.drafts, logits, &it.spec)
                });
                answers.push(answer);
            }
        }
        Ok(())
    }

    /// The backend computes the batch, and its threads choose.
    fn sample_here(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let sequences = by_sequence(&self.served, &mut self.sampled);
        let here = Here {
            plan,
            served: &self.served,
            vocab: self.vocab,
            some_tokens: self.some_tokens.as_ref(),
            drafts: &self.drafts,
        };
        let (sampled, before) = (&self.sampled[..sequences], self.output.samples.last());
        let (rows, odd) = (self.batch.logit_rows.len(), OnceLock::new());
        let done = self.backend.forward_and(&self.batch, sequences, &|index, logits| {
            if logits.len() == rows * here.vocab {
                // A sequence may have begun in the pass before; only the first may.
                here.sample(&sampled[index], before.filter(|_| index == 0), logits);
            } else {
                let _ = odd.set(logits.len());
            }
        });
        let failed = |reason: String| ExecutorError { step: plan.step, reason };
        if let Err(error) = done {
            self.lose_tables();
            return Err(failed(error.to_string()));
        }
        if let Some(logits) = odd.get() {
            let reason = format!("the backend returned {logits} logits for {rows} rows of {}", self.vocab);
            return Err(failed(reason));
        }
        for sampled in &mut self.sampled[..sequences] {
            self.output.samples.append(sampled.answers());
        }
        Ok(())
    }

    /// Puts hidden states in their places among the answers from `at` on.
    fn answer_hidden(&mut self, plan: &StepPlan, mut at: usize) {
        let mut wanted = self.batch.hidden_rows.iter();
        for served in &self.served {
            let rows = wanted.by_ref().take(served.hidden as usize);
            let sample = &plan.sequences[served.sequence as usize].samples[served.first_sample as usize];
            let answer = match &sample.want {
                Want::Hidden => rows.last().map(|row| {
                    let row = self.backend.hidden(*row).to_vec();
                    if row.iter().all(|value| value.is_finite()) {
                        Sampled::Hidden(row)
                    } else {
                        not_numbers()
                    }
                }),
                Want::HiddenSum { before, .. } => {
                    let mut sum = self
                        .sum
                        .take()
                        .or_else(|| before.as_deref().map(<[f64]>::to_vec))
                        .unwrap_or_default();
                    for row in rows {
                        let row = self.backend.hidden(*row);
                        sum.resize(row.len(), 0.0);
                        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                    }
                    match served.samples {
                        // The rest of the rows is in the next pass.
                        0 => {
                            self.sum = Some(sum);
                            None
                        }
                        _ if sum.iter().all(|value| value.is_finite()) => Some(Sampled::HiddenSum(sum)),
                        _ => Some(not_numbers()),
                    }
                }
                Want::Token(_) | Want::Score { .. } => None,
            };
            if let (Some(answer), Some(place)) = (answer, self.output.samples.get_mut(at)) {
                *place = answer;
            }
            at += served.samples as usize;
        }
    }
}

fn not_numbers() -> Sampled {
    Sampled::Failed(Cow::Borrowed("its hidden states are not numbers"))
}

impl Executor for ModelExecutor {
    fn embedding_input(&self) -> Option<EmbeddingInput> {
        self.backend.embedding_input()
    }

    fn depth(&self) -> usize {
        if self.samples().is_some() { 2 } else { 1 }
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        if self.begun.len() == self.depth() {
            let reason = "as many steps are under way as may be".to_owned();
            return Err(ExecutorError { step: plan.step, reason });
        }
        let lost = |step: &u64| self.begun.iter().all(|begun| begun.step != *step);
        if let Some(step) = plan.sequences.iter().filter_map(|sequence| sequence.follows).find(lost) {
            let reason = format!("it follows step {step}, which was not begun");
            return Err(ExecutorError { step: plan.step, reason });
        }
        let begun = match self.begin_on_device(plan)? {
            Some(begun) => begun,
            None => self.compute(plan)?,
        };
        self.begun.push_back(begun);
        Ok(())
    }

    fn begin_with_drafts(&mut self, plan: &StepPlan, drafts: &[u32]) -> Result<(), ExecutorError> {
        let unknown = |draft: u32| if (draft as usize) < self.vocab { draft } else { 0 };
        self.drafts.clear();
        self.drafts.extend(drafts.iter().copied().map(unknown));
        self.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        let Some(mut begun) = self.begun.pop_front() else {
            return Err(ExecutorError { step: 0, reason: "no step was begun".to_owned() });
        };
        self.complete(&mut begun);
        let Begun { step, here, output, failed, .. } = begun;
        self.spare.push(std::mem::replace(&mut self.output, output));
        self.output.step = step;
        if here.capacity() > 0 {
            self.spare_here.push(here);
        }
        failed.map_or(Ok(&self.output), Err)
    }
}
