//! What the memory of a draft model must hold behind its passes, and behind a run.
//!
//! Owns: how far it computed each sequence, and counts of what it went on from. Must never: know why something is computed when it is.

use std::collections::HashMap;

use folio_engine::Scheduler;
use folio_engine::plan::{DraftPlan, SequenceId, SequencePlan, StepPlan};
use folio_kv::{BlockTable, GroupConfig, HOLE, Layout};
use folio_model::backend::Span;

use crate::memory::{GroupMemory, Memory};
use crate::oracle::contents;
use crate::report::DrafterCounts;
use crate::scenario::Scenario;
use crate::transfers::content_of;

/// See the module documentation.
pub(crate) struct DrafterChecks {
    memory: Memory,
    /// Of each sequence, the positions behind the known tokens of its last pass, and behind its drafts that were computed.
    computed: HashMap<SequenceId, (u32, u32)>,
    pub counts: DrafterCounts,
}

impl DrafterChecks {
    pub fn new(memory: Memory) -> Self {
        Self { memory, computed: HashMap::new(), counts: DrafterCounts::default() }
    }

    /// The passes before a step are over. Of each sequence that they were about its blocks hold, up to where the known tokens end, what these make:
    /// K and V of every position, and the states that it goes on from. So it went on from those of these very tokens, too.
    pub fn check(
        &mut self,
        plan: &StepPlan,
        scheduler: &Scheduler,
        scenario: &Scenario,
    ) -> Result<(), String> {
        let Some(layers) = &scenario.drafter else { return Ok(()) };
        let first = 1 + scenario.model_groups().len();
        for sequence in plan.sequences.iter().filter(|sequence| !sequence.drafter.tokens.is_empty()) {
            let DraftPlan { first_position, tokens, .. } = &sequence.drafter;
            let end = *first_position as usize + tokens.len();
            let known = scheduler.known_tokens(sequence.id);
            if known.get(*first_position as usize..end) != Some(&tokens[..]) {
                return Err(format!("the drafter computes tokens that are not known: {sequence:?}"));
            }
            let contents = contents(&known_to_drafter(&known[..end], scenario), layers);
            for (group, (memory, content)) in self.memory.groups().iter().zip(&contents).enumerate() {
                let table = &sequence.block_tables[first + group];
                if let Some(position) = wrong_position(sequence, table, memory, content) {
                    return Err(format!(
                        "group {group} of the drafter does not hold position {position}: {sequence:?}"
                    ));
                }
            }
            self.count(sequence, layers);
        }
        Ok(())
    }

    /// What a table that was just attached has of the drafter's full blocks is what its tokens make.
    pub fn check_found(
        &mut self,
        table: &BlockTable,
        tokens: &[u32],
        scenario: &Scenario,
    ) -> Result<(), String> {
        let Some(layers) = &scenario.drafter else { return Ok(()) };
        let (first, written) = (1 + scenario.model_groups().len(), table.written());
        let contents = contents(&known_to_drafter(&tokens[..written as usize], scenario), layers);
        for (group, (memory, content)) in self.memory.groups().iter().zip(&contents).enumerate() {
            let full =
                table.group(first + group).iter().take((written / memory.config.block_tokens) as usize);
            for (index, block) in (0..).zip(full).filter(|(_, block)| **block != HOLE) {
                if memory.block(block.0) != content_of(&memory.config, content, index) {
                    return Err(format!(
                        "block {index} of group {group} of the drafter, {block:?}, is wrong"
                    ));
                }
                self.counts.found_blocks += 1;
            }
        }
        Ok(())
    }

    fn count(&mut self, sequence: &SequencePlan, layers: &[GroupConfig]) {
        let DraftPlan { first_position, tokens, drafts, .. } = &sequence.drafter;
        let end = first_position + tokens.len() as u32;
        let before = self.computed.insert(sequence.id, (end, end + drafts.saturating_sub(1)));
        if *first_position == 0 {
            return;
        }
        let counts = &mut self.counts;
        counts.windows += u64::from(layers.iter().any(|layer| layer.layout != Layout::State));
        if layers.iter().any(|layer| layer.layout == Layout::State) {
            counts.states += 1;
            counts.others_states += u64::from(before.is_none());
            let (end, drafted) = before.unwrap_or((u32::MAX, 0));
            counts.drafts_states += u64::from(*first_position > end);
            counts.taken_back += u64::from(*first_position < drafted);
        }
    }
}

/// Tokens as the drafter is given them.
fn known_to_drafter(tokens: &[u32], scenario: &Scenario) -> Vec<u32> {
    let vocab = scenario.drafter_vocab();
    tokens.iter().map(|token| if *token < vocab { *token } else { 0 }).collect()
}

/// The first position of which a group does not hold what it should.
fn wrong_position(
    sequence: &SequencePlan,
    table: &[u32],
    memory: &GroupMemory,
    content: &[u64],
) -> Option<u32> {
    let (size, end) = (memory.config.block_tokens, content.len() as u32);
    let is_held = |entry: &u32| table.get(*entry as usize).is_some_and(|block| *block != HOLE.0);
    let is_right = |entry: u32, within: u32, position: u32| {
        let cells = is_held(&entry).then(|| memory.block(table[entry as usize]));
        cells.is_some_and(|cells| cells[within as usize] == content[position as usize])
    };
    if memory.config.layout != Layout::State {
        return (0..end).find(|position| !is_right(position / size, position % size, *position));
    }
    let tentative_from = sequence.tentative_from().unwrap_or(u32::MAX);
    let span = Span { first_row: 0, rows: 0, first_position: 0, slot: 0, tentative_from };
    // It may have been written over since, but was there.
    let before = sequence.drafter.first_position.checked_sub(1);
    if let Some(before) = before.filter(|before| !is_held(&span.state_entry(*before, size))) {
        return Some(before);
    }
    // What is still held of full blocks is published, or will be.
    let full = (0..end.min(tentative_from) / size).filter(is_held);
    let full = full.map(|entry| (entry, (entry + 1) * size - 1));
    let last = (span.state_entry(end - 1, size), end - 1);
    let wrong = full.chain([last]).find(|(entry, position)| !is_right(*entry, 0, *position));
    wrong.map(|(_, position)| position)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_another_position_is_wrong() {
        let (layout, blocks, block_tokens) = (Layout::State, 6, 4);
        let config = GroupConfig { layout, blocks, block_tokens, bytes_per_block: 1, optional: true };
        let tokens: Vec<u32> = (0..10).collect();
        let content = contents(&tokens, &[config]).swap_remove(1);
        // Rows 8 and 9 may be taken back: each has a block of its own.
        let (tokens, tentative) = (tokens[8..].iter().copied().collect(), 2);
        let sequence =
            SequencePlan { first_position: 8, tokens, tentative, ..SequencePlan::empty(SequenceId(1)) };
        let (table, left) = ([5, 3, 1, 0], [HOLE.0, HOLE.0, 1, 0]);
        let mut memory = GroupMemory::new(config);
        for (block, position) in table.into_iter().zip([3, 7, 8, 9]) {
            memory.block_mut(block)[0] = content[position];
        }
        let wrong = |memory: &GroupMemory, table: &[u32]| wrong_position(&sequence, table, memory, &content);
        assert_eq!((wrong(&memory, &table), wrong(&memory, &left)), (None, None));
        assert_eq!(wrong(&memory, &[5, 3, 1, HOLE.0]), Some(9), "it went on without its state");
        let drafter = DraftPlan { first_position: 8, ..DraftPlan::default() };
        let goes_on = SequencePlan { drafter, ..sequence.clone() };
        let wrong_of_it = |table: &[u32]| wrong_position(&goes_on, table, &memory, &content);
        assert_eq!((wrong_of_it(&table), wrong_of_it(&left)), (None, Some(7)));
        memory.block_mut(3)[0] = content[6];
        assert_eq!((wrong(&memory, &table), wrong(&memory, &left)), (Some(7), None));
        memory.block_mut(0)[0] = content[8];
        assert_eq!(wrong(&memory, &left), Some(9));
    }
}
