//! Who gets how much of a step's token budget.
//!
//! Owns: the division of one budget. Must never: look past the bounded head of the waiting queue.
//!
//! 1. Every running sequence that lacks one token gets it (decodes, and prompts found in the cache but for the last
//!    token).
//! 2. Prompts get the rest; while somebody decodes, at most `max_prefill_tokens_while_decoding`, because everybody who
//!    streams waits for the end of the step.
//!    - Half goes to the oldest, of the best priority, of the tenant that is behind the others there (`fair`), so
//!      everybody's turn comes.
//!    - Half goes to the shortest remaining, tenants taking turns, so nobody sits behind a huge prompt. What is left over
//!      goes to the oldest.
//!
//! Starvation freedom: the oldest advances in every step until it is done or its tenant is no longer behind; whoever is
//! passed gets nothing until then and its tenant falls behind. If the oldest waits for a prefix, its leader takes its
//! place. If it waits for blocks, see `admission` (bypasses are counted).

use folio_kv::{GroupCounts, KvCache, TenantId};

use super::Scheduler;
use super::fair::Head;
use super::preemption::Room;
use crate::sequence::{Rank, Sequence, Slot, State};
use crate::stats::WaitingFor;

/// Waiting sequences that are looked at in one step, and those among them that may be skipped because they wait for a
/// prefix.
const SCAN_MAX: usize = 64;
const SCAN_SHARED_MAX: usize = 256;

/// Memory and figures of the step being planned.
#[derive(Default)]
pub(super) struct Scratch {
    order: Vec<Slot>,
    pub heads: Vec<Head>,
    candidates: Vec<Candidate>,
    /// Waited for blocks in this step; known until the next is planned.
    pub refused: Vec<Slot>,
    /// Whose table each of the plan's copies serves.
    pub copy_owners: Vec<Slot>,
    /// The same of its swaps.
    pub swap_out_owners: Vec<Slot>,
    pub swap_in_owners: Vec<Slot>,
    /// Tokens granted so far.
    pub granted: u32,
    /// Running sequences with a reservation.
    pub reserved: Vec<Slot>,
    /// Somebody lost its blocks in this step: nobody is admitted any more.
    pub preempted: bool,
    /// Blocks that running sequences lack for what they know and their next tokens, once somebody asked.
    pub growth: Option<GroupCounts>,
}

/// Who comes first: priority, virtual time of the tenant, rank.
pub(super) type Turn = (i32, u64, Rank);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    priority: i32,
    /// Virtual time of its tenant when those before it have got what they want.
    turn: u64,
    tenant: TenantId,
    remaining: u32,
    rank: Rank,
    slot: Slot,
}

impl Scheduler {
    pub(super) fn grant_decodes(&mut self, cache: &mut KvCache) -> u32 {
        self.scratch.granted = 0;
        self.scratch.preempted = false;
        self.scratch.growth = None;
        let mut order = std::mem::take(&mut self.scratch.order);
        order.clear();
        order.extend(self.running.iter().map(|(_, slot)| *slot));
        for slot in &order {
            let sequence = &self.sequences[*slot];
            if !sequence.is_running() || sequence.remaining() != 1 {
                continue;
            }
            let (positions, reserved) = (sequence.tokens.len() as u32, sequence.reserved);
            match self.make_room(cache, *slot, positions) {
                Room::Made => self.grant(*slot, 1),
                // A reservation is never broken, so this is a stall of one step at most.
                Room::None if reserved => {}
                Room::None => self.preempt(cache, *slot),
            }
        }
        self.scratch.order = order;
        self.scratch.granted
    }

    pub(super) fn grant_prompts(&mut self, cache: &mut KvCache, decodes: u32) {
        let mut budget = self.config.max_num_batched_tokens.saturating_sub(self.scratch.granted);
        if decodes > 0 {
            budget = budget.min(self.config.max_prefill_tokens_while_decoding);
        }
        let mut candidates = std::mem::take(&mut self.scratch.candidates);
        candidates.clear();
        self.scratch.refused.clear();
        let oldest = self.collect(cache, &mut candidates);
        if let Some(oldest) = oldest {
            let rivals =
                candidates.iter().filter(|c| c.slot != oldest.slot && c.priority == oldest.priority).count();
            let share = if rivals > 0 { budget.div_ceil(2) } else { budget };
            budget -= self.grant_prompt(cache, oldest.slot, share);
            for candidate in &candidates {
                if budget == 0 {
                    break;
                }
                if candidate.slot != oldest.slot {
                    budget -= self.grant_prompt(cache, candidate.slot, budget);
                }
            }
            if budget > 0 && self.sequences[oldest.slot].is_running() {
                self.grant_prompt(cache, oldest.slot, budget);
            }
        }
        self.scratch.candidates = candidates;
        self.last_decodes = decodes.min(self.scratch.granted);
    }

    /// Everybody with a prompt to compute: running ones and the heads of the queue. Returns whose turn it is.
    fn collect(&mut self, cache: &KvCache, candidates: &mut Vec<Candidate>) -> Option<Candidate> {
        for at in 0..self.running.len() {
            let slot = self.running[at].1;
            let sequence = &self.sequences[slot];
            if sequence.granted == 0 && sequence.remaining() > 1 {
                candidates.push(self.candidate(slot, sequence.remaining()));
            }
        }
        let mut oldest = candidates.iter().map(|c| (self.turn_of(c.slot), *c)).min();
        if self.admission_possible() {
            let mut heads = std::mem::take(&mut self.scratch.heads);
            self.waiting.fair.heads(&mut heads);
            heads.truncate(SCAN_MAX);
            self.collect_waiting(cache, &heads, candidates, &mut oldest);
            self.scratch.heads = heads;
        }
        self.order(candidates);
        oldest.map(|(_, c)| c)
    }

    /// Looks at the head of every tenant's queue, until somebody is found that was passed too often.
    fn collect_waiting(
        &mut self,
        cache: &KvCache,
        heads: &[Head],
        candidates: &mut Vec<Candidate>,
        oldest: &mut Option<(Turn, Candidate)>,
    ) {
        let (scan, scan_shared) = (SCAN_MAX / heads.len().max(1), SCAN_SHARED_MAX / heads.len().max(1));
        let mut behind: Option<Head> = None;
        let mut order = std::mem::take(&mut self.scratch.order);
        'heads: for head in heads {
            let ahead = |behind: Head| {
                behind.priority == head.priority
                    && head.time > behind.time.saturating_add(self.waiting.fair.slack())
            };
            if behind.is_some_and(ahead) {
                continue;
            }
            order.clear();
            order.extend(self.waiting.of(head.priority, head.tenant).take(scan + scan_shared));
            let mut looked_at = 0;
            for slot in &order {
                if let Some(leader) = self.still_shared(*slot) {
                    // Its leader works for it, with its rank.
                    let turn = self.turn_of(*slot);
                    let leader = candidates.iter().find(|c| c.slot == leader).copied();
                    *oldest = (*oldest).into_iter().chain(leader.map(|leader| (turn, leader))).min();
                    continue;
                }
                let new = self.waiting_candidate(cache, *slot);
                candidates.push(new);
                *oldest = (*oldest).into_iter().chain([(self.turn_of(*slot), new)]).min();
                let first = behind.is_none_or(|behind| behind.priority != head.priority);
                if first && !self.waiting.fair.is_capped(*head) {
                    behind = Some(*head);
                }
                looked_at += 1;
                if self.sequences[*slot].bypassed >= self.config.max_bypasses {
                    break 'heads;
                }
                if looked_at == scan {
                    break;
                }
            }
        }
        self.scratch.order = order;
    }

    fn waiting_candidate(&mut self, cache: &KvCache, slot: Slot) -> Candidate {
        if matches!(
            self.sequences[slot].state,
            State::Waiting { reason: WaitingFor::SharedPrefix { .. }, .. }
        ) {
            // What it waited for is there now, or never will be.
            self.sequences[slot].looked_up_step = 0;
        }
        self.look_up(cache, slot);
        let sequence = &self.sequences[slot];
        let found = sequence.lookup.full_blocks * cache.config().block_tokens + sequence.lookup.tail_tokens;
        let remaining = (sequence.tokens.len() as u32).saturating_sub(found.min(sequence.attachable()));
        self.candidate(slot, remaining)
    }

    fn candidate(&self, slot: Slot, remaining: u32) -> Candidate {
        let &Sequence { rank, tenant, .. } = &self.sequences[slot];
        let turn = self.waiting.fair.time(rank.priority, tenant);
        Candidate { priority: rank.priority, turn, tenant, remaining, rank, slot }
    }

    /// Priority, then the tenant that is behind, then arrival.
    pub(super) fn turn_of(&self, slot: Slot) -> Turn {
        let &Sequence { rank, tenant, .. } = &self.sequences[slot];
        (rank.priority, self.waiting.fair.time(rank.priority, tenant), rank)
    }

    /// Shortest first, tenants taking turns: each moves ahead by what it is about to get.
    fn order(&self, candidates: &mut [Candidate]) {
        candidates.sort_unstable_by_key(|c| (c.priority, c.tenant, c.remaining, c.rank));
        let mut ahead = 0;
        for at in 0..candidates.len() {
            let same = |other: &Candidate| {
                (other.priority, other.tenant) == (candidates[at].priority, candidates[at].tenant)
            };
            if at > 0 && !same(&candidates[at - 1]) {
                ahead = 0;
            }
            let Candidate { priority, tenant, remaining, .. } = candidates[at];
            candidates[at].turn += ahead;
            ahead += self.waiting.fair.cost(priority, tenant, remaining);
        }
        candidates.sort_unstable_by_key(|c| (c.priority, c.turn, c.remaining, c.rank));
    }

    /// Gives `slot` up to `tokens` more, admitting it first if it waits. Returns what it got.
    fn grant_prompt(&mut self, cache: &mut KvCache, slot: Slot, tokens: u32) -> u32 {
        if tokens == 0 || (!self.sequences[slot].is_running() && !self.try_admit(cache, slot)) {
            return 0;
        }
        let sequence = &self.sequences[slot];
        let from = sequence.computed + sequence.granted;
        let to = (from + tokens).min(sequence.tokens.len() as u32);
        let before = cache.available();
        let to = match self.make_room(cache, slot, to) {
            Room::Made => to,
            Room::None => self.make_some_room(cache, slot, to),
        };
        self.took(slot, before.saturating_sub(cache.available()));
        let got = to.saturating_sub(from);
        self.grant(slot, got);
        if self.sequences[slot].granted == 0 && self.sequences[slot].fresh {
            // A table that is not run in the step it was attached in would miss its copy.
            self.back_to_queue(cache, slot);
        }
        got
    }

    /// As many positions as fit without preempting anybody.
    fn make_some_room(&mut self, cache: &mut KvCache, slot: Slot, wanted: u32) -> u32 {
        let spare = self.unreserved(cache, cache.available_to(self.sequences[slot].root.tenant), Some(slot));
        let Some(table) = self.sequences[slot].table.as_mut() else { return 0 };
        let blocks = spare.least(cache.groups());
        let mut to = wanted.min(table.capacity() + blocks * cache.config().block_tokens);
        // A shared tail costs one block more.
        if !cache.needed(table, to).fits(spare) {
            to = to.saturating_sub(cache.config().block_tokens);
        }
        let fits = cache.needed(table, to).fits(spare) && self.grow(cache, slot, to);
        if fits { to } else { 0 }
    }

    fn grant(&mut self, slot: Slot, tokens: u32) {
        self.sequences[slot].granted += tokens;
        self.scratch.granted += tokens;
    }

    /// The leader `slot` waits for, if it still must.
    fn still_shared(&mut self, slot: Slot) -> Option<Slot> {
        let sequence = &self.sequences[slot];
        let State::Waiting { reason: WaitingFor::SharedPrefix { .. }, since } = sequence.state else {
            return None;
        };
        let waited = self.now.0.saturating_sub(since.0);
        if waited > self.config.shared_prefix_wait_us_max {
            return None;
        }
        self.in_flight.owner(&sequence.hashes[sequence.awaited_block as usize])
    }
}
