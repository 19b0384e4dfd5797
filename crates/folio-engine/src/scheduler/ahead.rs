//! The plan of step n + 1 while step n runs, so that a device never waits for the host.
//!
//! Owns: when that can be done, and the commit of a step that another was planned behind. Must never: guess. Only the steady state of
//! decoding is planned ahead: every running sequence computed its one lacking token in step n and lacks one again, so all that is not
//! known of step n + 1 is which tokens those are, and the device knows ([`CHOSEN`]). Whatever needs a decision (somebody arrives who could
//! be admitted, is cancelled or overdue, must be preempted, copied or restored, follows rules or counts its tokens) waits for an
//! ordinary plan, made when no step runs. So the rest of the scheduler has one truth: [`Scheduler::plan`] is never called while a step
//! runs.
//!
//! A sequence that ends with its last permitted token in step n is left out of step n + 1. That a stop token ended one is known
//! only at the commit of n; its row of step n + 1, an orphan, is computed for nothing and its answer dropped. What it held is
//! given back at that commit, while the row is still to be written, and nobody can see it:
//! - Whoever is given those blocks gets them in a later plan, and the device works in order: the orphan's row is written before.
//! - A block that is in the index, or was kept as a tail to be copied from, counts positions before the orphan's, which lies behind all
//!   that were committed; the rest of a block is nobody's content. Nothing of step n + 1 is published for it, because what
//!   is published is what `commit` finds alive.
//! - A block that gave way at the commit of n to one of equal content was in the tables of step n + 1; it keeps its bytes until a
//!   later step writes, so that step reads the same. So do blocks that left a window at that commit.
//! - A block that an orphan writes was the sequence's own since it grew: it is shared with nobody (`KvCache::grow`).
//!
//! Commands to the cache ([`Scheduler::command`]) are carried out between two commits also while a step is under way. They touch what is
//! published or idle; what the step under way reads is held by its sequences, or was an orphan's, of which the above is true.
//!
//! Who waits is looked at in ordinary plans alone. While nobody arrives and nobody ends, what kept it out goes on to: so steps are planned
//! ahead beside a queue, but only so many in a row ([`IN_A_ROW`]), because what is predicted of those who run changes as they go on.
//!
//! The entries of plan n become those of plan n + 1 in place: the executor has taken from a begun plan what it needs.
//!
//! Cost: O(running) for one look and one pass; allocates nothing.

use folio_kv::{GroupCounts, KvCache};

use super::Scheduler;
use super::build::fill_tables;
use super::commit::{answers, take_back};
use super::costs::Computed;
use crate::plan::{CHOSEN, ExecutorError, SampleSpec, SequenceId, SequencePlan, StepOutput, StepPlan, Want};
use crate::request::Micros;
use crate::sequence::{Sequence, Slot};

/// Most steps that are planned ahead before somebody who could have a place is looked at again.
const IN_A_ROW: u32 = 16;

/// What came to pass since the last ordinary plan.
#[derive(Default)]
pub(super) struct Since {
    /// Somebody arrived or ended, or the cache was told something.
    pub changed: bool,
    /// Steps were planned ahead.
    pub ahead: u32,
}

/// A step that another was planned behind: what is left to know of it. Every sequence in it computes one row and wants one token.
#[derive(Default)]
pub(super) struct Behind {
    step: u64,
    planned: Vec<(SequenceId, Slot)>,
    /// It is still to be committed.
    waits: bool,
}

impl Scheduler {
    /// Whether a step is planned and not committed.
    pub fn under_way(&self) -> bool {
        !self.planned.is_empty()
    }

    /// The plan of the step after the one that was planned last and begun, if that one alone is not committed and nothing that it
    /// could bring asks for a decision but the end of a sequence. The commit that follows is of the step before.
    pub fn ahead(&mut self, cache: &mut KvCache, now: Micros) -> Option<&StepPlan> {
        if self.behind.waits || !self.is_steady(now) || !self.make_room_ahead(cache) {
            return None;
        }
        self.now = now;
        cache.advance(now.0);
        self.counters.steps_ahead += 1;
        self.since.ahead += 1;
        self.behind.waits = true;
        self.behind.step = self.step;
        std::mem::swap(&mut self.behind.planned, &mut self.planned);
        self.step += 1;
        self.plan.step = self.step;
        self.planned.clear();
        for row in 0..self.behind.planned.len() {
            let (id, slot) = self.behind.planned[row];
            let at = self.planned.len();
            if !self.sequences.lives(id, slot) {
                continue;
            }
            if self.is_last(&self.sequences[slot]) {
                take_back(&mut self.sequences[slot], &mut self.plan.sequences[row]);
                continue;
            }
            let entry = &mut self.plan.sequences[row];
            next_row(entry, &mut self.sequences[slot], row);
            self.plan.sequences.swap(at, row);
            self.planned.push((id, slot));
        }
        self.plan.sequences.truncate(self.planned.len());
        self.scratch.granted = self.planned.len() as u32;
        Some(&self.plan)
    }

    /// Blocks may be there for somebody who waits, though nobody ended.
    pub(crate) fn cache_changes(&mut self) {
        self.since.changed = true;
    }

    /// Nothing but tokens is to come of the step that runs, and nothing else is to be done before the next.
    fn is_steady(&self, now: Micros) -> bool {
        let plan = &self.plan;
        let moves = !plan.copies.is_empty() || !plan.swap_ins.is_empty() || !plan.swap_outs.is_empty();
        let overdue = self.deadlines.first().is_some_and(|(deadline, _)| *deadline <= now);
        if moves || overdue || self.scratch.preempted || !self.cancelled.is_empty() {
            return false;
        }
        let (mut alive, mut last) = (0, 0);
        for (entry, (id, slot)) in plan.sequences.iter().zip(&self.planned) {
            if !self.sequences.lives(*id, *slot) {
                continue;
            }
            let sequence = &self.sequences[*slot];
            if !is_plain(entry, sequence) {
                return false;
            }
            alive += 1;
            last += usize::from(self.is_last(sequence));
        }
        // Who ends leaves a place, and perhaps blocks, to somebody who waits.
        let looks = || self.since.changed || self.since.ahead >= IN_A_ROW;
        let admits = self.waiting.len() > 0 && (last > 0 || (self.admission_possible() && looks()));
        alive == self.running.len() && last < alive && !admits
    }

    /// Whether the token that it gets from the step that runs is the last it may have.
    fn is_last(&self, sequence: &Sequence) -> bool {
        self.is_full(sequence, sequence.generated() + 1)
    }

    /// Gives everybody who goes on room for the row after the one that is being computed, if that takes no more than what anybody may
    /// take now. Room that was made and is not used is used in the next plan.
    fn make_room_ahead(&mut self, cache: &mut KvCache) -> bool {
        let mut needed = GroupCounts::default();
        for at in 0..self.planned.len() {
            needed += self.needed_ahead(cache, at).1;
        }
        if needed.is_zero() {
            return true;
        }
        for at in 0..self.planned.len() {
            let (slot, own) = self.needed_ahead(cache, at);
            if own.is_zero() {
                continue;
            }
            let available = cache.available_to(self.sequences[slot].root.tenant);
            if !needed.fits(self.unreserved(cache, available, Some(slot))) {
                return false;
            }
        }
        for at in 0..self.planned.len() {
            let (slot, own) = self.needed_ahead(cache, at);
            if own.is_zero() {
                continue;
            }
            let positions = self.sequences[slot].tokens.len() as u32 + 1;
            if !self.grow(cache, slot, positions) {
                return false;
            }
        }
        true
    }

    /// Blocks that a planned sequence lacks for the row after the one that is being computed; none where it has no such row.
    fn needed_ahead(&self, cache: &KvCache, at: usize) -> (Slot, GroupCounts) {
        let (id, slot) = self.planned[at];
        let sequence = self.sequences.lives(id, slot).then(|| &self.sequences[slot]);
        let table = sequence.filter(|sequence| !self.is_last(sequence)).and_then(|sequence| {
            sequence.table.as_ref().map(|table| cache.needed(table, sequence.tokens.len() as u32 + 1))
        });
        (slot, table.unwrap_or_default())
    }

    /// Applies the result of the step before the planned one, if it is still to be applied: `Err` gives the result back.
    pub(super) fn commit_behind<'a>(
        &mut self,
        cache: &mut KvCache,
        result: Result<&'a StepOutput, ExecutorError>,
    ) -> Result<(), Result<&'a StepOutput, ExecutorError>> {
        if !std::mem::take(&mut self.behind.waits) {
            return Err(result);
        }
        let planned = std::mem::take(&mut self.behind.planned);
        let count = planned.len() as u32;
        self.counters.steps += 1;
        match result.and_then(|output| answers(output, self.behind.step, planned.len())) {
            Ok(output) => {
                self.learn_costs(Computed { decodes: count, ..Computed::default() }, output.swap_times);
                for ((id, slot), answer) in planned.iter().zip(&output.samples) {
                    if self.sequences.lives(*id, *slot) {
                        self.advance(cache, *slot, 1, 0, std::slice::from_ref(answer));
                    }
                }
            }
            Err(error) => self.fail_sequences(cache, &planned, &error),
        }
        self.behind.planned = planned;
        (self.last_tokens, self.last_decodes) = (count, count);
        // The step behind it began when this one ended, not when it was planned.
        self.planned_at = self.now;
        Ok(())
    }
}

/// One row, of which a token is wanted that depends on nothing but its logits and its position.
fn is_plain(entry: &SequencePlan, sequence: &Sequence) -> bool {
    let [sample] = &entry.samples[..] else { return false };
    let free = match &sample.want {
        Want::Token(spec) => spec.history.is_none() && spec.guide.is_none(),
        _ => false,
    };
    free && entry.tokens.len() == 1 && sequence.born && !sequence.fresh
}

/// Makes of the entry for the row that is being computed, the `row`-th of its step, the entry for the one after it.
fn next_row(entry: &mut SequencePlan, sequence: &mut Sequence, row: usize) {
    entry.first_position += 1;
    entry.tokens[0] = CHOSEN | row as u32;
    if let Want::Token(SampleSpec { position, forbid_stop, .. }) = &mut entry.samples[0].want {
        *position += 1;
        *forbid_stop = sequence.generated() + 1 < sequence.params.min_tokens;
    }
    fill_tables(entry, sequence);
}
