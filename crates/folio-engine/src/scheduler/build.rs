//! The plan's entries, and what is remembered of a step until its commit.
//!
//! The entry of a table slot is kept for its memory, and the plan has it until the next is made. A block table in an entry is
//! brought up to date from the first block that changed since; everything before is immutable, but for what a window left
//! behind since. So a decode costs a few words per step, whatever its context.

use std::collections::VecDeque;

use super::Scheduler;
use super::budget::Step;
use super::costs::{Computed, StepKind};
use super::drafts;
use folio_kv::{BlockId, HOLE};

use crate::plan::{PLACEHOLDER, SamplePlan, SequenceId, SequencePlan, TableChange, Want};
use crate::request::Pooling;
use crate::sequence::{Choice, Placeholder, Running, Sequence, Slot, choice_seed};
use crate::work::StepWork;

/// What a step has of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    pub id: SequenceId,
    pub slot: Slot,
    pub rows: u32,
    /// Its samples, the first `scores` of them of prompt tokens.
    pub samples: u32,
    pub scores: u32,
    /// The first `forced` of them its guide leaves alone.
    pub drafts: u32,
    pub forced: u32,
    /// Positions that the drafter's KV has behind it, without its drafts; 0: it computes nothing.
    pub drafter_end: u32,
    /// A later step may name the token that it chooses.
    pub names: bool,
}

/// Steps under way, oldest first, and the memory of others.
pub(super) struct Ring {
    /// Steps that may be under way, and steps between a choice and its use.
    pub depth: usize,
    pub lag: u64,
    pub begun: VecDeque<BegunStep>,
    pub spare: Vec<BegunStep>,
}

/// A step that was begun and is not committed.
#[derive(Default)]
pub(super) struct BegunStep {
    pub step: u64,
    pub planned: Vec<Planned>,
    pub computed: Computed,
    pub work: StepWork,
    /// Tokens that were granted as decodes.
    pub decodes: u32,
}

impl Scheduler {
    /// Takes the memory of the last plan back.
    pub(super) fn recycle(&mut self) {
        let step = &mut self.step;
        if !step.plan.sequences.is_empty() {
            for (entry, slot) in step.plan.sequences.drain(..).zip(step.table_slots.drain(..)) {
                step.entries[slot as usize] = Some(entry);
            }
        }
        step.plan.copies.clear();
        step.copy_owners.clear();
    }

    /// Fills the plan from what was granted, and remembers it as under way.
    pub(super) fn build(&mut self) {
        let step = self.next_step();
        self.step.plan.step = step;
        if self.step.granted == 0 {
            return;
        }
        let mut begun = self.ring.spare.pop().unwrap_or_default();
        begun.step = step;
        if self.goes_ahead() {
            begun.computed.kind = StepKind::Ahead;
        }
        self.update_histories();
        let (mut samples, mut places, mut spare) = (0, 0, self.config.max_prefill_tokens_while_decoding);
        for (_, slot) in &self.running {
            let sequence = &mut self.sequences[*slot];
            let Some(granted) = sequence.running().map(|running| running.granted).filter(|rows| *rows > 0)
            else {
                continue;
            };
            let mut prompt = match sequence.choice {
                Some(_) => None,
                None => self.requests.get_mut(&sequence.request_id),
            };
            if let Some(state) = prompt.as_mut().filter(|state| !state.scheduled) {
                state.scheduled = true;
                sequence.timing.scheduled = self.now;
                self.queued.requests -= 1;
                self.queued.tokens -= state.queued_tokens;
            }
            let mut entry = self.step.take_entry(sequence);
            let mut planned = fill(&mut entry, sequence, granted, step);
            planned.slot = *slot;
            if let Some(model) = self.drafter {
                planned.drafter_end = drafts::plan(&mut entry, sequence, model, &mut places, &mut spare);
            }
            let ends = entry.first_position + granted >= sequence.known();
            let single = match prompt {
                None => sequence.choice.filter(|choice| ends && sample_token(&mut entry, sequence, *choice)),
                Some(state) => sample_prompt(&mut entry, sequence, state, ends),
            };
            planned.names = single.is_some() && planned.drafts == 0 && sequence.can_be_followed();
            planned.samples = entry.samples.len() as u32;
            schedule(
                sequence,
                &planned,
                Placeholder { step, sample: samples + planned.samples.saturating_sub(1) },
            );
            samples += planned.samples;
            begun.count(&entry, &planned);
            self.step.table_slots.push(entry.table_slot);
            self.step.plan.sequences.push(entry);
            begun.planned.push(planned);
        }
        begun.decodes = self.step.decodes;
        self.counters.steps_ahead += u64::from(!self.ring.begun.is_empty());
        self.ring.begun.push_back(begun);
    }

    /// Histories by themselves: each is far away in memory, and here nothing else waits for it.
    fn update_histories(&mut self) {
        if !std::mem::take(&mut self.step.has_histories) {
            return;
        }
        for (_, slot) in &self.running {
            let sequence = &mut self.sequences[*slot];
            if sequence.history.is_some() {
                self.step.has_histories = true;
                // What the last plan shares with it is dropped, so that it is changed in place.
                let table_slot = sequence.running().map_or(usize::MAX, |running| running.table_slot as usize);
                let entry = self.step.entries.get_mut(table_slot).and_then(Option::as_mut);
                for sample in entry.into_iter().flat_map(|entry| &mut entry.samples) {
                    if let Want::Token(spec) = &mut sample.want {
                        spec.history = None;
                    }
                }
                sequence.update_history();
            }
        }
    }
}

impl Step {
    fn take_entry(&mut self, sequence: &Sequence) -> Box<SequencePlan> {
        let slot = sequence.running().map_or(0, |running| running.table_slot as usize);
        if slot >= self.entries.len() {
            // Some at once, so that they lie side by side.
            let entry = || Some(Box::new(SequencePlan::empty(SequenceId(0))));
            self.entries.resize_with((slot + 1).next_multiple_of(64), entry);
        }
        self.entries[slot].take().expect("a table slot is one sequence's")
    }
}

impl BegunStep {
    fn count(&mut self, entry: &SequencePlan, planned: &Planned) {
        let tokens = entry.tokens.len() as f64;
        let decodes = entry.decodes();
        self.work.steps = 1;
        self.work.count(entry.first_position, planned.rows, decodes);
        self.work.logit_rows += u64::from(planned.samples);
        if decodes {
            self.computed.decodes += 1;
            self.computed.drafts += entry.drafts;
            self.computed.context.add(entry.first_position, planned.rows);
            if !entry.drafter.tokens.is_empty() {
                self.computed.kind = StepKind::Drafting;
            }
        } else {
            self.computed.tokens += tokens;
            self.computed.positions += tokens * (f64::from(entry.first_position) + tokens / 2.0);
        }
    }

    /// Keeps the memory and nothing else.
    pub fn clear(mut self) -> Self {
        self.planned.clear();
        Self { planned: self.planned, ..Self::default() }
    }
}

/// The rows are under way.
fn schedule(sequence: &mut Sequence, planned: &Planned, place: Placeholder) {
    let Some(running) = sequence.running_mut() else { return };
    running.scheduled += planned.rows;
    running.begun_steps += 1;
    running.granted = 0;
    if planned.names {
        running.pending += 1;
        running.placeholder = place;
    }
}

fn fill(entry: &mut SequencePlan, sequence: &mut Sequence, granted: u32, step: u64) -> Planned {
    let (known, id) = (sequence.known(), sequence.id());
    let (from, placeholder) = sequence
        .running()
        .map_or((0, Placeholder::default()), |running| (running.scheduled, running.placeholder));
    let to = from + granted;
    if entry.id != id {
        // What does not change is not looked at again: it lies far away.
        (entry.id, entry.adapter) = (id, sequence.running().and_then(|running| running.adapter.clone()));
        entry.samples.clear();
    }
    // Those of a decode are changed in place ([`sample_token`]): their parameters lie elsewhere.
    let kept = matches!(entry.samples[..], [SamplePlan { want: Want::Token(_), .. }, ..]);
    if !kept || sequence.choice.is_none() || to < known {
        entry.samples.clear();
    }
    entry.first_position = from;
    entry.position_shift = sequence.position_shift;
    // The request lies far away, and only rows of a prompt need it.
    let of_prompt = from < sequence.prompt_len;
    entry.embeddings = if of_prompt { sequence.request.embeddings.clone() } else { None };
    entry.tokens.clear();
    entry.follows = None;
    entry.drafts = 0;
    let mut forced = 0;
    entry.drafter.clear();
    entry.features = 0;
    entry.tentative = 0;
    if from < known {
        entry.tokens.extend_from_slice(&sequence.tokens[from as usize..to.min(known) as usize]);
        entry.drafts = to.saturating_sub(known);
        entry.tokens.extend(sequence.drafts.drain(..).take(entry.drafts as usize));
        forced = std::mem::take(&mut sequence.forced).min(entry.drafts);
        // What the step's drafter proposes is named by `drafts::plan`.
        entry.tokens.resize((to - from) as usize, PLACEHOLDER);
    } else {
        entry.tokens.push(PLACEHOLDER | placeholder.sample);
        entry.follows = Some(placeholder.step);
    }
    if to >= known {
        entry.tentative = entry.drafts + sequence.tentative();
    }
    fill_tables(entry, sequence, step);
    let mut scores = 0;
    if sequence.choice.is_none()
        && let Some(top) = sequence.request.prompt_logprobs
    {
        for position in from.max(sequence.scored)..to.min(sequence.prompt_len - 1) {
            let next = sequence.tokens[position as usize + 1];
            entry.samples.push(SamplePlan { row: position - from, want: Want::Score { next, top } });
            scores += 1;
        }
    }
    let drafts = entry.drafts;
    let (slot, samples) = (Slot(0), scores);
    Planned { id, slot, rows: granted, samples, scores, drafts, forced, drafter_end: 0, names: false }
}

/// Brings the block tables up to date, and says what that changed.
fn fill_tables(entry: &mut SequencePlan, sequence: &mut Sequence, step: u64) {
    let Some(running) = sequence.running_mut() else { return };
    entry.table_slot = running.table_slot;
    entry.since = std::mem::replace(&mut running.planned, step);
    running.table.plan_tentative(entry.tentative_from());
    entry.changes.clear();
    let Some(changed) = running.table.take_changed() else { return };
    let positions = sequence.final_positions();
    let Some(Running { table, .. }) = sequence.running() else { return };
    entry.block_tables.resize_with(table.groups(), Vec::new);
    for (group, blocks) in entry.block_tables.iter_mut().enumerate() {
        // For the longest possible output, so that a decode never allocates here.
        let longest = positions.div_ceil(table.block_tokens(group)) as usize;
        blocks.reserve(longest.saturating_sub(blocks.len()));
        let from = changed / table.block_tokens(group);
        entry.changes.push(sync(blocks, table.group(group), from as usize));
    }
}

/// Brings a block table of the plan up to date: what lies behind the window now, and everything from entry `changed` on.
fn sync(planned: &mut Vec<u32>, blocks: &[BlockId], changed: usize) -> TableChange {
    let synced = changed.min(planned.len()).min(blocks.len());
    let same =
        planned[synced..].iter().zip(&blocks[synced..]).take_while(|(planned, block)| **planned == block.0);
    planned.truncate(synced + same.count());
    let from = planned.len();
    // Holes in front of what is held only ever grow: new ones lie between the old ones and the first block that is held.
    let end = match (blocks.first(), blocks[..from].iter().rposition(|block| *block != HOLE)) {
        (Some(&HOLE), Some(last)) => blocks[..last].partition_point(|block| *block == HOLE),
        // Of an optional group that got no more: before the holes behind.
        (Some(&HOLE), None) => planned.iter().rposition(|entry| *entry != HOLE.0).map_or(0, |last| last + 1),
        _ => 0,
    };
    let new = planned[..end].iter_mut().rev().take_while(|entry| **entry != HOLE.0);
    let holes = new.map(|entry| *entry = HOLE.0).count();
    planned.extend(blocks[from..].iter().map(|block| block.0));
    debug_assert!(planned.iter().zip(blocks).all(|(planned, block)| *planned == block.0));
    TableChange { from: from as u32, first_hole: (end - holes) as u32, holes: holes as u32 }
}

/// What is wanted of the rows of this step for the vector that its prompt becomes.
fn pool(entry: &mut SequencePlan, sequence: &Sequence, pooling: Pooling, ends: bool) {
    let row = entry.tokens.len() as u32 - 1;
    let want = match pooling {
        Pooling::Last if ends => Want::Hidden,
        Pooling::Last => return,
        Pooling::Mean => {
            // Computed again after a preemption, some rows are part of the sum already.
            let first = sequence.scored.saturating_sub(entry.first_position);
            if first > row {
                return;
            }
            Want::HiddenSum { first, before: sequence.hidden_sum.clone() }
        }
    };
    entry.samples.push(SamplePlan { row, want });
}

/// What is wanted of the rows of a prompt; of the last one every choice draws its first token. Returns the choice if there is but one.
fn sample_prompt(
    entry: &mut SequencePlan,
    sequence: &Sequence,
    state: &mut super::RequestState,
    ends: bool,
) -> Option<Choice> {
    if let Some(pooling) = sequence.request.pooling {
        pool(entry, sequence, pooling, ends);
        return None;
    }
    if !ends || sequence.params.max_tokens == 0 {
        return None;
    }
    state.sampled.clear();
    state.sampled.extend_from_slice(&state.unforked);
    let row = entry.tokens.len() as u32 - 1;
    let ahead = sequence.running().map_or(0, |running| running.pending);
    for choice in &state.unforked {
        let spec = sequence.sample_spec(choice_seed(state.seed, *choice), ahead);
        entry.samples.push(SamplePlan { row, want: Want::Token(spec) });
    }
    state.single()
}

/// The token behind the last row; behind a draft one for each row from the last known token on.
fn sample_token(entry: &mut SequencePlan, sequence: &Sequence, choice: Choice) -> bool {
    let Some(running) = sequence.running() else { return false };
    let first = entry.tokens.len() as u32 - 1 - entry.drafts;
    entry.samples.truncate(entry.drafts as usize + 1);
    for at in 0..=entry.drafts {
        let (row, ahead) = (first + at, running.pending + at);
        match entry.samples.get_mut(at as usize) {
            Some(SamplePlan { row: of, want: Want::Token(spec) }) => {
                (*of, spec.seed) = (row, choice.seed);
                sequence.update_spec(spec, ahead);
            }
            _ => {
                let want = Want::Token(sequence.sample_spec(choice.seed, ahead));
                entry.samples.push(SamplePlan { row, want });
            }
        }
    }
    true
}
