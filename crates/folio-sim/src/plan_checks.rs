//! What every plan must be, whatever the world.
//!
//! Owns: these checks, each a sentence about what is wrong. Must never: know what the scheduler had in mind.

use folio_engine::plan::{HOLE, PLACEHOLDER, Sampled, SequencePlan, StepOutput, StepPlan, Want};
use folio_kv::{GroupConfig, Layout};

use crate::scenario::Scenario;

/// One table per group, all for as many positions; holes only where no row of the step reads, and everywhere that the last commit left
/// behind. `computed`: positions that are committed.
fn check_tables(sequence: &SequencePlan, scenario: &Scenario, computed: u32) -> Result<(), String> {
    let tables = &sequence.block_tables;
    let positions = tables.first().map_or(0, Vec::len) as u32 * scenario.cache.block_tokens;
    let end = sequence.first_position + sequence.tokens.len() as u32;
    let right = |(config, table): (&GroupConfig, &Vec<u32>)| {
        let length = positions.div_ceil(config.block_tokens) as usize;
        match config.layout {
            // Blocks of rows that might have been taken back may be left.
            Layout::State => table.len() >= length.min(config.blocks_of(end, sequence.tentative) as usize),
            _ => table.len() == length,
        }
    };
    let first = scenario.cache.first_group();
    let groups = || std::iter::once(&first).chain(&scenario.groups);
    if tables.len() != groups().count() || !groups().zip(tables).all(right) {
        return Err(format!("{:?} has tables for different positions, or not one per group", sequence.id));
    }
    for (group, config) in groups().enumerate() {
        for (index, block) in tables[group].iter().enumerate() {
            let behind = (index as u32) < config.first_block(computed);
            let hole = *block == HOLE.0;
            // How far a drafter's states are is no part of a plan.
            let lags = config.optional && config.layout == Layout::State;
            if (behind && !hole && !lags)
                || (!behind && hole && !config.optional)
                || (!hole && *block >= config.blocks)
            {
                return Err(format!("{:?}: group {group}, entry {index} is {block}", sequence.id));
            }
        }
    }
    Ok(())
}

/// Rows behind those of unfinished steps: of known tokens, or the one that such a step chooses.
fn check_overlap<'a>(
    sequence: &SequencePlan,
    under_way: impl Iterator<Item = &'a StepPlan>,
    scenario: &Scenario,
    step: u64,
) -> Result<u32, String> {
    let mut computed = None;
    let mut next = None;
    for before in under_way {
        let Some(own) = before.sequences.iter().find(|other| other.id == sequence.id) else { continue };
        computed.get_or_insert(own.first_position);
        if own.drafts > 0 || next.is_some_and(|next| next != own.first_position) {
            return Err(format!("{sequence:?} is planned behind drafts, or its rows have gaps"));
        }
        next = Some(own.first_position + own.tokens.len() as u32);
        if sequence.follows == Some(before.step) {
            let earlier = before.sequences.iter().take_while(|other| other.id != own.id);
            let samples = earlier.map(|other| other.samples.len()).sum::<usize>() + own.samples.len();
            let token = PLACEHOLDER | (samples as u32 - 1);
            let lag = step - before.step;
            if sequence.tokens[..] != [token]
                || lag < scenario.lag as u64
                || next != Some(sequence.first_position)
            {
                return Err(format!("{sequence:?} does not follow its row of {before:?}"));
            }
        }
    }
    if next.is_some_and(|next| next != sequence.first_position) {
        return Err(format!("{sequence:?} does not go on where it is under way"));
    }
    Ok(computed.unwrap_or(sequence.first_position))
}

pub(crate) fn check_plan<'a>(
    plan: &StepPlan,
    under_way: impl Iterator<Item = &'a StepPlan> + Clone,
    scenario: &Scenario,
) -> Result<(), String> {
    let config = &scenario.config;
    let tokens: usize = plan.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    if tokens > config.max_num_batched_tokens as usize {
        return Err(format!("{tokens} tokens exceed the budget of {}", config.max_num_batched_tokens));
    }
    let mut adapters: Vec<_> =
        plan.sequences.iter().filter_map(|sequence| Some(sequence.adapter.as_ref()?.id)).collect();
    adapters.sort_unstable();
    adapters.dedup();
    if adapters.len() > config.max_adapters as usize {
        return Err(format!("{adapters:?} in one step, at most {}", config.max_adapters));
    }
    for sequence in &plan.sequences {
        let computed = check_overlap(sequence, under_way.clone(), scenario, plan.step)?;
        let end = sequence.first_position as usize + sequence.tokens.len();
        let table = sequence.block_tables.first().map_or(0, Vec::len);
        check_tables(sequence, scenario, computed)?;
        if sequence.tokens.is_empty() || table * (scenario.cache.block_tokens as usize) < end {
            return Err(format!("{:?} computes nothing or beyond its blocks", sequence.id));
        }
        if !sequence.samples.is_sorted_by_key(|sample| sample.row) {
            return Err(format!("{:?} samples out of order", sequence.id));
        }
        for sample in &sequence.samples {
            if let Want::Token(spec) = &sample.want
                && (((sample.row + 1 + sequence.drafts) as usize) < sequence.tokens.len()
                    || spec.position != sequence.first_position + sample.row + 1)
            {
                return Err(format!("{:?} samples a token at the wrong place", sequence.id));
            }
        }
    }
    Ok(())
}

/// A model that proposes what it would choose itself, and lacks nothing of what it reads, is right, unless it may not see what restricts the
/// choice. Counts its drafts.
pub(crate) fn check_drafts(
    plan: &StepPlan,
    output: &StepOutput,
    scenario: &Scenario,
    right: &mut u64,
) -> Result<(), String> {
    let same = scenario.drafter_is_right();
    let mut samples = output.samples.iter();
    for sequence in &plan.sequences {
        let answers: Vec<&Sampled> = samples.by_ref().take(sequence.samples.len()).collect();
        let first = sequence.drafter.first_place as usize;
        let drafts = output.drafts.get(first..first + sequence.drafter.drafts as usize);
        let Some(drafts) = drafts.filter(|_| same && sequence.adapter.is_none()) else { continue };
        for ((draft, answer), sample) in drafts.iter().zip(answers).zip(&sequence.samples) {
            let Want::Token(spec) = &sample.want else { continue };
            let Sampled::Token { id, .. } = answer else { break };
            if spec.guide.is_some() || spec.history.is_some() {
                break;
            }
            if id != draft {
                return Err(format!("{draft} was drafted where {id} is chosen: {sequence:?}"));
            }
            *right += 1;
        }
    }
    Ok(())
}
