//! Who gets how much of a step's token budget.
//!
//! Owns: the division of one budget. Must never: look past the bounded head of the waiting queue.
//!
//! 1. Every running sequence that lacks one token gets it (decodes, and prompts found in the cache but for the last
//!    token), and its drafts where nobody is short of blocks. Where a choice can be used only some steps later (`lag`), decodes
//!    are spread over that many steps.
//! 2. Prompts get the rest; while somebody decodes, at most `max_prefill_tokens_while_decoding`, because everybody who
//!    streams waits for the end of the step.
//!    - Half goes to the oldest, of the best class, of the tenant that is behind the others there (`fair`), so
//!      everybody's turn comes.
//!    - Half goes to the shortest remaining of each tenant's best priority, tenants taking turns, so nobody sits behind a huge
//!      prompt. What is left over goes to the oldest.
//!
//! Where a prompt leaves what others began with within a block of states, a step of it ends there, and the next begins behind its commit: its
//! state is kept (`BlockTable::branch`).
//!
//! Starvation freedom: the oldest advances in every step until it is done or its tenant is no longer behind; whoever is
//! passed gets nothing until then and its tenant falls behind. If the oldest waits for a prefix, its producer takes its
//! place. If it waits for blocks, see `admission` (bypasses are counted).

use folio_kv::{GroupCounts, KvCache, TenantId};

use super::Scheduler;
use super::admission::Headroom;
use super::context_times::Context;
use super::drafts::{Drafts, PossibleDraft};
use super::fair::Head;
use super::preemption::Allocation;
use super::tenant_rates::TenantRates;
use crate::plan::{SequencePlan, StepPlan};
use crate::sequence::{Rank, Running, Slot};
use crate::stats::WaitingFor;

/// Waiting sequences that are looked at in one step, and those among them that may be skipped because they wait for a
/// prefix.
const SCAN_MAX: usize = 64;
const SCAN_SHARED_MAX: usize = 256;

/// The step being planned: the plan, and memory and figures for making it.
#[derive(Default)]
pub(super) struct Step {
    pub plan: StepPlan,
    /// Plans made so far, those without sequences included.
    pub plans: u64,
    /// Entries of plans by table slot, kept for their memory and their block tables; `None` while the plan has it.
    pub entries: Vec<Option<Box<SequencePlan>>>,
    /// Somebody who runs may have a history.
    pub has_histories: bool,
    /// The table slots of the plan's entries.
    pub table_slots: Vec<u32>,
    /// Whose table each of the plan's copies serves.
    pub copy_owners: Vec<Slot>,
    /// Slots in some order, for whoever needs a list.
    pub order: Vec<Slot>,
    pub heads: Vec<Head>,
    candidates: Vec<Candidate>,
    /// Did not fit in this step; known until the next is planned.
    pub refused: Vec<Slot>,
    /// Blocks were what one of them lacked.
    pub contended: bool,
    /// Tokens granted so far, and how many of them to decodes.
    pub granted: u32,
    pub decodes: u32,
    /// Somebody lost its blocks in this step: nobody is admitted any more.
    pub preempted: bool,
    /// Who gets drafts, and, to decide that, all that there could be.
    pub drafters: Vec<Drafts>,
    pub possible: Vec<PossibleDraft>,
    pub tenants: TenantRates,
    /// Blocks that running sequences lack for what they know and their next tokens, once somebody asked.
    pub growth: Option<GroupCounts>,
    /// What a row of each running sequence sees, once somebody asked.
    pub seen: Option<Context>,
}

impl Step {
    /// `slot` gave its blocks up: whoever gets them writes them itself.
    pub fn forget(&mut self, slot: Slot) {
        let mut owner = self.copy_owners.iter();
        self.plan.copies.retain(|_| owner.next() != Some(&slot));
        self.copy_owners.retain(|owner| *owner != slot);
    }
}

/// Who comes first: class, virtual time of the tenant, and of those rank.
pub(super) type QueueOrder = (i32, u64, TenantId, Rank);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    class: i32,
    /// Virtual time of its tenant when those before it have got what they want.
    virtual_time: u64,
    tenant: TenantId,
    priority: i32,
    remaining: u32,
    rank: Rank,
    slot: Slot,
}

impl Scheduler {
    /// To every running sequence that lacks one token; notes those that lack more.
    pub(super) fn grant_decodes(&mut self, cache: &mut KvCache) -> u32 {
        self.step.granted = 0;
        self.step.preempted = false;
        (self.step.growth, self.step.seen) = (None, None);
        self.step.plans += 1;
        match self.running.is_empty() {
            true => self.headroom = Headroom::new(),
            false => self.headroom.step(self.contended()),
        }
        let (step, mut cohort) = (self.next_step(), self.cohort());
        self.step.candidates.clear();
        let mut at = 0;
        while let Some((rank, slot)) = self.running.get(at).copied() {
            at += 1;
            let sequence = &self.sequences[slot];
            match sequence.ready(step, self.ring.lag) {
                0 => continue,
                1 if cohort == 0 => continue,
                1 => {}
                rows => {
                    let candidate = self.candidate(slot, rows);
                    self.step.candidates.push(candidate);
                    continue;
                }
            }
            let from = sequence.running().map_or(0, |running| running.scheduled);
            match self.allocate(cache, slot, from + 1) {
                Allocation::Made => {
                    self.grant(slot, 1);
                    cohort -= 1;
                }
                // A reservation is never broken, so this is a stall of one step at most.
                Allocation::Refused if self.sequences[slot].has_reservation() => {}
                Allocation::Refused => self.preempt(cache, slot),
                Allocation::Later => {}
            }
            if self.step.preempted {
                at = self.running.partition_point(|(other, _)| *other <= rank);
            }
        }
        let drafters = std::mem::take(&mut self.step.drafters);
        drafters.iter().for_each(|drafts| self.grant_drafts(cache, drafts.slot, drafts.granted));
        self.step.drafters = drafters;
        self.step.decodes = self.step.granted;
        self.step.granted
    }

    /// Decodes of one step, where a choice can be used only some steps later.
    fn cohort(&self) -> usize {
        if self.ring.lag == 1 {
            return usize::MAX;
        }
        let decodes = self.running.iter().filter(|(_, slot)| self.sequences[*slot].decodes()).count();
        decodes.div_ceil(self.ring.lag as usize)
    }

    pub(super) fn grant_prompts(&mut self, cache: &mut KvCache, decodes: u32) {
        let mut budget = self.config.max_num_batched_tokens.saturating_sub(self.step.granted);
        if decodes > 0 {
            budget = budget.min(self.config.max_prefill_tokens_while_decoding);
        }
        let mut candidates = std::mem::take(&mut self.step.candidates);
        // Some may have given their blocks to a decode.
        candidates.retain(|candidate| self.sequences[candidate.slot].ready(0, 0) > 1);
        self.step.refused.clear();
        self.step.contended = false;
        let oldest = self.collect(cache, &mut candidates);
        if let Some(oldest) = oldest {
            let rivals =
                candidates.iter().filter(|c| c.slot != oldest.slot && c.class == oldest.class).count();
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
        self.step.candidates = candidates;
        self.step.decodes = decodes.min(self.step.granted);
    }

    /// Adds the heads of the queue to the running ones with a prompt to compute. Returns whose turn it is.
    fn collect(&mut self, cache: &KvCache, candidates: &mut Vec<Candidate>) -> Option<Candidate> {
        let mut oldest = candidates.iter().map(|c| (self.queue_order(c.slot), *c)).min();
        if self.admission_possible() {
            let heads = self.take_heads();
            self.collect_waiting(cache, &heads, candidates, &mut oldest);
            self.step.heads = heads;
        }
        self.order(candidates);
        oldest.map(|(_, c)| c)
    }

    /// Who is at the head of the queue, whose turn it is first. Goes back to the step.
    pub(super) fn take_heads(&mut self) -> Vec<Head> {
        let mut heads = std::mem::take(&mut self.step.heads);
        self.waiting.fair.heads(&mut heads);
        heads.truncate(SCAN_MAX);
        heads
    }

    /// Looks at the head of every tenant's queue, until somebody is found that was passed too often.
    fn collect_waiting(
        &mut self,
        cache: &KvCache,
        heads: &[Head],
        candidates: &mut Vec<Candidate>,
        oldest: &mut Option<(QueueOrder, Candidate)>,
    ) {
        let (scan, scan_shared) = (SCAN_MAX / heads.len().max(1), SCAN_SHARED_MAX / heads.len().max(1));
        let mut behind: Option<Head> = None;
        // Somebody was passed too often by others with adapters.
        let mut adapters_wait = false;
        let mut order = std::mem::take(&mut self.step.order);
        'heads: for head in heads {
            let ahead = |behind: Head| {
                behind.class == head.class && head.time > behind.time.saturating_add(self.waiting.fair.slack)
            };
            if behind.is_some_and(ahead) {
                continue;
            }
            order.clear();
            order.extend(self.waiting.of(head.class, head.tenant).take(scan + scan_shared));
            let mut looked_at = 0;
            for slot in &order {
                if adapters_wait && self.sequences[*slot].request.adapter.is_some() {
                    continue;
                }
                if let Some(producer) = self.still_shared(*slot) {
                    // Its producer works for it, with its rank.
                    let order = self.queue_order(*slot);
                    let producer = candidates.iter().find(|c| c.slot == producer).copied();
                    *oldest = (*oldest).into_iter().chain(producer.map(|producer| (order, producer))).min();
                    continue;
                }
                let new = self.waiting_candidate(cache, *slot);
                candidates.push(new);
                *oldest = (*oldest).into_iter().chain([(self.queue_order(*slot), new)]).min();
                let waiting = self.sequences[*slot].waiting();
                let (bypassed, lacks_adapter) =
                    waiting.map_or((0, false), |waiting| (waiting.bypassed, waiting.lacks_adapter));
                let first = behind.is_none_or(|behind| behind.class != head.class);
                if first && !lacks_adapter && !self.waiting.fair.is_limited_by_quota(*head) {
                    behind = Some(*head);
                }
                looked_at += 1;
                if bypassed >= self.config.max_bypasses {
                    if !lacks_adapter {
                        break 'heads;
                    }
                    adapters_wait = true;
                }
                // None of its tenant goes before who was preempted.
                if looked_at == scan || self.sequences[*slot].timing.preemptions > 0 {
                    break;
                }
            }
        }
        self.step.order = order;
    }

    fn waiting_candidate(&mut self, cache: &KvCache, slot: Slot) -> Candidate {
        if let Some(waiting) = self.sequences[slot].waiting_mut()
            && waiting.wait.reason == WaitingFor::SharedPrefix
        {
            // What it waited for is there now, or never will be.
            waiting.found = None;
        }
        self.look_up(cache, slot);
        let sequence = &self.sequences[slot];
        let found = sequence.waiting().map_or(0, |waiting| waiting.lookup().positions());
        let remaining = sequence.known().saturating_sub(found.min(sequence.attachable()));
        self.candidate(slot, remaining)
    }

    fn candidate(&self, slot: Slot, remaining: u32) -> Candidate {
        let sequence = &self.sequences[slot];
        let (rank, tenant) = (sequence.rank, sequence.tenant);
        let virtual_time = self.waiting.fair.time(rank.class, tenant);
        Candidate { class: rank.class, virtual_time, tenant, priority: rank.priority, remaining, rank, slot }
    }

    /// Class, then the tenant that is behind, then the tenant's own order.
    pub(super) fn queue_order(&self, slot: Slot) -> QueueOrder {
        let sequence = &self.sequences[slot];
        let (rank, tenant) = (sequence.rank, sequence.tenant);
        (rank.class, self.waiting.fair.time(rank.class, tenant), tenant, rank)
    }

    /// A tenant's best priority first, of those the shortest, tenants taking turns: each moves ahead by what it is about to get.
    fn order(&self, candidates: &mut [Candidate]) {
        candidates.sort_unstable_by_key(|c| (c.class, c.tenant, c.priority, c.remaining, c.rank));
        let mut ahead = 0;
        for at in 0..candidates.len() {
            let same = |other: &Candidate| {
                (other.class, other.tenant) == (candidates[at].class, candidates[at].tenant)
            };
            if at > 0 && !same(&candidates[at - 1]) {
                ahead = 0;
            }
            let Candidate { class, tenant, remaining, .. } = candidates[at];
            candidates[at].virtual_time += ahead;
            ahead += self.waiting.fair.cost(class, tenant, remaining);
        }
        candidates.sort_unstable();
    }

    /// Gives `slot` up to `tokens` more, admitting it first if it waits. Returns what it got.
    fn grant_prompt(&mut self, cache: &mut KvCache, slot: Slot, tokens: u32) -> u32 {
        if tokens == 0 || (!self.sequences[slot].is_running() && !self.try_admit(cache, slot)) {
            return 0;
        }
        let sequence = &self.sequences[slot];
        let Some(running) = sequence.running() else { return 0 };
        let from = running.scheduled + running.granted;
        let mut to = (from + tokens).min(sequence.known()).min(running.table.computable());
        // A reservation has no block for a copy.
        if let Some(branch) = running.table.branch().filter(|_| running.reserved.is_none()) {
            // What is behind it comes when the state there is kept.
            to = to.min(branch.max(from));
        }
        let before = cache.available();
        let to = match self.allocate(cache, slot, to) {
            Allocation::Made => to,
            Allocation::Later | Allocation::Refused => self.allocate_some(cache, slot, to),
        };
        self.took(slot, before.saturating_sub(cache.available()));
        let got = to.saturating_sub(from);
        self.grant(slot, got);
        let unused = |running: &Running| running.never_ran() && running.granted + running.begun_steps == 0;
        if self.sequences[slot].running().is_some_and(unused) {
            // A table that is not run in the step it was attached in would miss its copy.
            self.back_to_queue(cache, slot, (0, 0));
        }
        got
    }

    /// As many positions as fit without preempting anybody.
    fn allocate_some(&mut self, cache: &mut KvCache, slot: Slot, wanted: u32) -> u32 {
        let sequence = &self.sequences[slot];
        let Some(running) = sequence.running().filter(|running| !running.preempted) else { return 0 };
        let own = (running.begun_steps == 0).then_some(slot);
        let spare = self.spare(cache, sequence.owner(), own);
        let table = &running.table;
        let blocks = spare.least(cache.groups());
        let mut to = wanted.min(table.capacity() + blocks * cache.config().block_tokens);
        // A shared tail costs one block more.
        if !cache.needed(table, to).fits(spare) {
            to = to.saturating_sub(cache.config().block_tokens);
        }
        let fits = cache.needed(table, to).fits(spare) && self.grow(cache, slot, to);
        if fits { to } else { 0 }
    }

    pub(super) fn grant(&mut self, slot: Slot, tokens: u32) {
        if let Some(running) = self.sequences[slot].running_mut() {
            running.granted += tokens;
            self.step.granted += tokens;
        }
    }

    /// The producer of the prefix that `slot` waits for, if it still must.
    fn still_shared(&mut self, slot: Slot) -> Option<Slot> {
        let sequence = &self.sequences[slot];
        let waiting = sequence.waiting()?;
        let wait = waiting.wait;
        if wait.reason != WaitingFor::SharedPrefix || wait.is_over(self.now, &self.config) {
            return None;
        }
        self.shared_prefixes.producer(sequence.hashes.get(waiting.awaited_block)?)
    }
}
