//! What every plan must be, whatever the world.
//!
//! Owns: these checks, each a sentence about what is wrong. Must never: know what the scheduler had in mind.

use folio_engine::plan::{CHOSEN, HOLE, SequencePlan, StepPlan, Want};

use crate::scenario::Scenario;

/// One table per group, all of one length; holes exactly where no row of the step reads.
/// (Where the step was planned ahead: of the step before.)
fn check_tables(sequence: &SequencePlan, scenario: &Scenario, ahead: bool) -> Result<(), String> {
    let tables = &sequence.block_tables;
    let length = tables.first().map_or(0, Vec::len);
    if tables.len() != 1 + scenario.windows.len() || tables.iter().any(|table| table.len() != length) {
        return Err(format!("{:?} has tables of different lengths, or not one per group", sequence.id));
    }
    let windows = scenario.windows.iter().map(|window| (window.window_tokens, window.blocks));
    let groups = std::iter::once((u32::MAX, scenario.cache.blocks)).chain(windows);
    for (group, (window, blocks)) in groups.enumerate() {
        for (index, block) in tables[group].iter().enumerate() {
            let end = (index as u32 + 1) * scenario.cache.block_tokens;
            let behind = end + u32::from(ahead) <= (sequence.first_position + 1).saturating_sub(window);
            if behind != (*block == HOLE.0) || (!behind && *block >= blocks) {
                return Err(format!("{:?}: group {group}, entry {index} is {block}", sequence.id));
            }
        }
    }
    Ok(())
}

/// One row of some of the sequences of the step before, each behind its own row there.
pub(crate) fn check_ahead(before: &StepPlan, plan: &StepPlan) -> Result<(), String> {
    let moves = plan.copies.len() + plan.swap_ins.len() + plan.swap_outs.len();
    if plan.step != before.step + 1 || moves > 0 || plan.sequences.is_empty() {
        return Err(format!("step {} is planned behind step {}: {plan:?}", plan.step, before.step));
    }
    for sequence in &plan.sequences {
        let row = before.sequences.iter().position(|other| other.id == sequence.id);
        let follows = row.is_some_and(|row| {
            sequence.tokens == [CHOSEN | row as u32]
                && sequence.first_position == before.sequences[row].first_position + 1
        });
        if !follows {
            return Err(format!("{sequence:?} does not follow its row of {before:?}"));
        }
    }
    Ok(())
}

pub(crate) fn check_plan(plan: &StepPlan, scenario: &Scenario, ahead: bool) -> Result<(), String> {
    let config = &scenario.config;
    let tokens: usize = plan.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    if tokens > config.max_num_batched_tokens as usize {
        return Err(format!("{tokens} tokens exceed the budget of {}", config.max_num_batched_tokens));
    }
    for sequence in &plan.sequences {
        let end = sequence.first_position as usize + sequence.tokens.len();
        let table = sequence.block_tables.first().map_or(0, Vec::len);
        check_tables(sequence, scenario, ahead)?;
        if sequence.tokens.is_empty() || table * (scenario.cache.block_tokens as usize) < end {
            return Err(format!("{:?} computes nothing or beyond its blocks", sequence.id));
        }
        if !sequence.samples.is_sorted_by_key(|sample| sample.row) {
            return Err(format!("{:?} samples out of order", sequence.id));
        }
        for sample in &sequence.samples {
            if let Want::Token(spec) = &sample.want
                && (sample.row as usize + 1 != sequence.tokens.len() || spec.position as usize != end)
            {
                return Err(format!("{:?} samples a token at the wrong place", sequence.id));
            }
        }
    }
    Ok(())
}
