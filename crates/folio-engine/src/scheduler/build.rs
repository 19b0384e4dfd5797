//! The plan's memory: each sequence keeps its own entry and lends it to the plan for one step.
//!
//! A block table in the plan is brought up to date from the first block the last step wrote to; everything before is
//! immutable, but for what a window left behind since. So a decode costs a few words per step, whatever its context.

use super::Scheduler;
use folio_kv::{BlockId, HOLE};

use crate::plan::{SamplePlan, SequencePlan, Want};
use crate::request::Pooling;
use crate::sequence::{Sequence, choice_seed};

impl Scheduler {
    /// Fills the plan from what was granted.
    pub(super) fn build(&mut self) {
        debug_assert!(self.plan.sequences.is_empty(), "commit takes the entries back");
        for (_, slot) in &self.running {
            let sequence = &mut self.sequences[*slot];
            if sequence.granted == 0 {
                continue;
            }
            let mut entry = std::mem::replace(&mut sequence.plan, lent());
            fill(&mut entry, sequence);
            let ends = sequence.computed + sequence.granted == sequence.tokens.len() as u32;
            if let Some(pooling) = sequence.pooling {
                pool(&mut entry, sequence, pooling, ends);
            } else if ends {
                match self.groups.get(&sequence.request) {
                    Some(group) if !sequence.born => {
                        sample_choices(&mut entry, sequence, group.seed, &group.unborn)
                    }
                    _ => {
                        let spec = sequence.sample_spec(sequence.seed);
                        entry.samples.push(SamplePlan { row: sequence.granted - 1, want: Want::Token(spec) });
                    }
                }
            }
            self.plan.sequences.push(entry);
            self.planned.push((sequence.id(), *slot));
        }
        self.last_tokens = self.scratch.granted;
    }
}

/// What is left in the sequence while the plan holds its entry; allocates nothing.
fn lent() -> SequencePlan {
    SequencePlan {
        id: crate::plan::SequenceId(0),
        first_position: 0,
        tokens: Vec::new(),
        block_tables: Vec::new(),
        samples: Vec::new(),
    }
}

fn fill(entry: &mut SequencePlan, sequence: &mut Sequence) {
    let (from, to) = (sequence.computed, sequence.computed + sequence.granted);
    entry.id = sequence.id();
    entry.first_position = from;
    entry.tokens.clear();
    entry.tokens.extend_from_slice(&sequence.tokens[from as usize..to as usize]);
    entry.samples.clear();
    fill_tables(entry, sequence);
    if let Some(top) = sequence.score_top {
        for position in from.max(sequence.scored)..to.min(sequence.prompt_len - 1) {
            let next = sequence.tokens[position as usize + 1];
            entry.samples.push(SamplePlan { row: position - from, want: Want::Score { next, top } });
        }
    }
}

/// Brings the block tables up to date.
pub(super) fn fill_tables(entry: &mut SequencePlan, sequence: &mut Sequence) {
    let Some(table) = &sequence.table else { return };
    entry.block_tables.resize_with(table.groups(), Vec::new);
    for (group, blocks) in entry.block_tables.iter_mut().enumerate() {
        if blocks.capacity() == 0 {
            // For the longest possible output, so that a decode never allocates here.
            let block_tokens = table.capacity() / table.blocks().len().max(1) as u32;
            blocks.reserve(sequence.final_positions().div_ceil(block_tokens.max(1)) as usize);
        }
        sync(blocks, table.group(group), sequence.synced as usize);
    }
    sequence.synced = u32::MAX;
}

/// Brings a block table of the plan up to date: what lies behind the window now, and everything from entry `synced` on.
fn sync(planned: &mut Vec<u32>, blocks: &[BlockId], synced: usize) {
    planned.truncate(synced);
    // Holes only ever grow, from the front: new ones lie between the old ones and the first block that is held.
    let holes = blocks[..planned.len()].partition_point(|block| *block == HOLE);
    planned[..holes].iter_mut().rev().take_while(|entry| **entry != HOLE.0).for_each(|entry| *entry = HOLE.0);
    planned.extend(blocks[planned.len()..].iter().map(|block| block.0));
    debug_assert!(planned.iter().zip(blocks).all(|(planned, block)| *planned == block.0));
}

/// What is wanted of the rows of this step for the vector that its prompt becomes.
fn pool(entry: &mut SequencePlan, sequence: &Sequence, pooling: Pooling, ends: bool) {
    let row = sequence.granted - 1;
    let want = match pooling {
        Pooling::Last if ends => Want::Hidden,
        Pooling::Last => return,
        Pooling::Mean => {
            // Computed again after a preemption, some rows are part of the sum already.
            let first = sequence.scored.saturating_sub(sequence.computed);
            if first > row {
                return;
            }
            Want::HiddenSum { first, before: sequence.hidden_sum.clone() }
        }
    };
    entry.samples.push(SamplePlan { row, want });
}

/// Every choice draws its first token from the last row of the prompt.
fn sample_choices(entry: &mut SequencePlan, sequence: &Sequence, seed: u64, unborn: &[u32]) {
    if sequence.params.max_tokens == 0 {
        return;
    }
    for choice in unborn {
        let spec = sequence.sample_spec(choice_seed(seed, *choice));
        entry.samples.push(SamplePlan { row: sequence.granted - 1, want: Want::Token(spec) });
    }
}
