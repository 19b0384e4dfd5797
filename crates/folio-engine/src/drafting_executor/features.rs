//! What a drafter reads beside tokens: features of the model's rows, and of its own.
//!
//! Owns: the model's from the step that computed them until the drafter has computed their rows, by table slot. Must never: fail; features
//! that there are none of are zeros, which costs drafts and nothing else.
//!
//! The scheduler has the drafter compute rows before they are many ([`crate::plan::DraftPlan`]): what is kept is a chunk of a prompt for each
//! step under way, and a few rows of every other sequence.

use std::collections::VecDeque;

use crate::plan::{Reads, SequenceId, SequencePlan, StepPlan};

/// See the module documentation. Of a drafter that reads tokens alone it is always empty.
pub(super) struct Features {
    /// Values of a row; 0: none are read.
    width: usize,
    /// By table slot.
    kept: Vec<Kept>,
    /// What steps under way will give, oldest first; and memory for others.
    begun: VecDeque<Vec<Rows>>,
    spare: Vec<Vec<Rows>>,
    /// What the drafter's last pass gave.
    own: Vec<f32>,
}

/// Of consecutive positions of a sequence.
#[derive(Default)]
struct Kept {
    of: Option<SequenceId>,
    first: u32,
    /// `[positions, width]`
    values: VecDeque<f32>,
}

/// The rows of a sequence in a step, all of whose features are wanted.
struct Rows {
    slot: u32,
    of: SequenceId,
    first: u32,
    count: u32,
}

impl Features {
    pub fn new(reads: Reads) -> Self {
        let width = match reads {
            Reads::Tokens => 0,
            Reads::Features { width } => width,
        };
        Self { width, kept: Vec::new(), begun: VecDeque::new(), spare: Vec::new(), own: Vec::new() }
    }

    pub fn clear(&mut self) {
        self.kept.clear();
        self.own.clear();
    }

    /// How many rows' features pass `pass` is to give of a sequence with so many drafts: the last one's, where another pass comes behind.
    pub fn wanted(&self, drafts: u32, pass: u32) -> u32 {
        u32::from(self.width > 0 && drafts > pass + 1)
    }

    /// What the rows of a sequence's draft plan are given. What is before the last of them is not asked for again.
    pub fn feed(&mut self, sequence: &SequencePlan, into: &mut Vec<f32>) {
        if self.width == 0 {
            return;
        }
        let plan = &sequence.drafter;
        let end = plan.first_position + plan.tokens.len() as u32;
        let kept =
            self.kept.get_mut(sequence.table_slot as usize).filter(|kept| kept.of == Some(sequence.id));
        let Some(kept) = kept else {
            into.resize(into.len() + plan.tokens.len() * self.width, 0.0);
            return;
        };
        for position in plan.first_position..end {
            let row = position.checked_sub(kept.first).map(|at| at as usize * self.width);
            match row.filter(|row| row + self.width <= kept.values.len()) {
                Some(row) => into.extend(kept.values.range(row..row + self.width)),
                None => into.resize(into.len() + self.width, 0.0),
            }
        }
        let done = (end - 1).saturating_sub(kept.first) as usize * self.width;
        let done = done.min(kept.values.len());
        kept.values.drain(..done);
        kept.first += (done / self.width) as u32;
    }

    /// The drafter's own features, of its last pass.
    pub fn passed(&mut self, features: &[f32]) {
        self.own.clear();
        self.own.extend_from_slice(features);
    }

    /// What the next pass is given: these rows of the last pass's features, in order.
    pub fn feed_own(&self, rows: impl Iterator<Item = usize>, into: &mut Vec<f32>) {
        into.clear();
        if self.width > 0 {
            into.extend(rows.flat_map(|row| &self.own[row * self.width..][..self.width]));
        }
    }

    /// A step of the model was begun.
    pub fn begun(&mut self, plan: &StepPlan) {
        let mut rows = self.spare.pop().unwrap_or_default();
        let wanted = plan.sequences.iter().filter(|sequence| sequence.features > 0);
        rows.extend(wanted.map(|sequence| Rows {
            slot: sequence.table_slot,
            of: sequence.id,
            first: sequence.end() - sequence.features,
            count: sequence.features,
        }));
        self.begun.push_back(rows);
    }

    /// The oldest step of the model is over and gave this, or nothing. Behind it nothing is known any more: rows there were taken back.
    pub fn finished(&mut self, features: &[f32]) {
        let Some(mut step) = self.begun.pop_front() else { return };
        let mut at = 0;
        for rows in step.drain(..) {
            let values = rows.count as usize * self.width;
            let Some(given) = features.get(at..at + values) else { break };
            at += values;
            let slot = rows.slot as usize;
            if slot >= self.kept.len() {
                self.kept.resize_with(slot + 1, Kept::default);
            }
            let (kept, width) = (&mut self.kept[slot], self.width);
            let end = kept.first + (kept.values.len() / width) as u32;
            if kept.of != Some(rows.of) || !(kept.first..=end).contains(&rows.first) {
                kept.values.clear();
                (kept.of, kept.first) = (Some(rows.of), rows.first);
            }
            kept.values.truncate((rows.first - kept.first) as usize * width);
            kept.values.extend(given);
        }
        self.spare.push(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::DraftPlan;

    fn features() -> Features {
        Features::new(Reads::Features { width: 2 })
    }

    /// A step of sequence `id` in table slot 1, of rows `first ..`, whose features are `values` each twice.
    fn step(features: &mut Features, id: u64, first: u32, values: &[f32]) {
        let mut sequence = SequencePlan::empty(SequenceId(id));
        (sequence.table_slot, sequence.first_position) = (1, first);
        sequence.tokens.resize(values.len(), 0);
        sequence.features = values.len() as u32;
        features.begun(&StepPlan { sequences: vec![Box::new(sequence)], ..StepPlan::default() });
        let given: Vec<f32> = values.iter().flat_map(|value| [*value; 2]).collect();
        features.finished(&given);
    }

    /// What the rows of `first .. end` are given, one of each pair.
    fn fed(features: &mut Features, id: u64, first: u32, end: u32) -> Vec<f32> {
        let mut sequence = SequencePlan::empty(SequenceId(id));
        sequence.table_slot = 1;
        let tokens = (first..end).collect();
        sequence.drafter = DraftPlan { first_position: first, tokens, ..DraftPlan::default() };
        let mut into = Vec::new();
        features.feed(&sequence, &mut into);
        assert!(into.chunks(2).all(|pair| pair[0] == pair[1]) && into.len() == 2 * (end - first) as usize);
        into.chunks(2).map(|pair| pair[0]).collect()
    }

    #[test]
    fn what_steps_gave_is_kept_until_it_is_read() {
        let mut features = features();
        step(&mut features, 7, 4, &[4.0, 5.0, 6.0]);
        step(&mut features, 7, 7, &[7.0]);
        assert_eq!(fed(&mut features, 7, 4, 6), [4.0, 5.0]);
        assert_eq!(fed(&mut features, 7, 5, 8), [5.0, 6.0, 7.0], "the last that was read may be read again");
        assert_eq!(fed(&mut features, 7, 5, 9), [0.0, 0.0, 7.0, 0.0], "what is not there is zeros");
    }

    #[test]
    fn rows_that_were_taken_back_are_replaced() {
        let mut features = features();
        step(&mut features, 7, 4, &[4.0, 5.0, 6.0]);
        step(&mut features, 7, 5, &[5.5]);
        assert_eq!(fed(&mut features, 7, 4, 7), [4.0, 5.5, 0.0]);
    }

    #[test]
    fn another_sequence_or_a_gap_begins_anew() {
        let mut features = features();
        step(&mut features, 7, 4, &[4.0]);
        step(&mut features, 8, 5, &[5.0]);
        assert_eq!(fed(&mut features, 7, 4, 5), [0.0]);
        step(&mut features, 8, 9, &[9.0]);
        assert_eq!(fed(&mut features, 8, 5, 10), [0.0, 0.0, 0.0, 0.0, 9.0]);
        step(&mut features, 8, 2, &[2.0]);
        assert_eq!(fed(&mut features, 8, 2, 4), [2.0, 0.0]);
    }

    #[test]
    fn a_pass_is_fed_with_what_the_last_one_gave() {
        let mut features = features();
        features.passed(&[1.0, 1.5, 2.0, 2.5, 3.0, 3.5]);
        let mut into = vec![9.0];
        features.feed_own([2, 0].into_iter(), &mut into);
        assert_eq!(into, [3.0, 3.5, 1.0, 1.5]);
        assert_eq!((features.wanted(3, 0), features.wanted(3, 1), features.wanted(3, 2)), (1, 1, 0));
    }
}
