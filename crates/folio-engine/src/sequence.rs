//! One choice of one request: known tokens, and `computed` of them chasing the rest.
//!
//! Owns: the tokens and the block table of a choice. Must never: know the queue it stands in or the step it is part of.
//!
//! Invariants: `computed < tokens.len()` between steps (the last known token is always still to compute);
//! `table.is_some()` exactly while `state` is `Running`; `computed == 0` without a table.
//!
//! There are no phases. A prompt, a prefix hit, a decode and a resume after preemption differ only in how far `computed`
//! lags behind.

use std::sync::Arc;

use folio_kv::{BlockHash, BlockTable, GroupCounts, KvCache, Lookup, Root, Swapped, TenantId};

use crate::guide::GuideRef;
use crate::plan::{SampleSpec, SequenceId, SequencePlan, TokenHistory};
use crate::request::{Micros, Pooling, RequestId, RetentionRange, SamplingParams, Timing};
use crate::stats::WaitingFor;

/// Index into [`Sequences`]. Reused after a sequence ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot(pub u32);

/// Who comes first: lower priority value, then earlier arrival. Unique per sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub priority: i32,
    pub arrival: u64,
    pub id: SequenceId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Holds no blocks.
    Waiting { reason: WaitingFor, since: Micros },
    /// Holds blocks and is considered in every step.
    Running,
}

pub(crate) struct Sequence {
    pub rank: Rank,
    pub request: RequestId,
    pub tenant: TenantId,
    pub root: Root,
    /// Which choice this is. Before the prompt is computed it stands for all of them (`born` is false).
    pub choice: u32,
    pub born: bool,
    pub params: Arc<SamplingParams>,
    pub seed: u64,
    pub history: Option<Arc<TokenHistory>>,
    /// What it may say next, where `params.rules` restrict it.
    pub guide: Option<GuideRef>,
    /// Prompt, then generated tokens.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    pub computed: u32,
    pub table: Option<BlockTable>,
    pub state: State,
    /// Alternatives per prompt position, when the prompt's own logprobs are wanted.
    pub score_top: Option<u32>,
    pub pooling: Option<Pooling>,
    /// Of the hidden states of the first `scored` rows, for their mean.
    pub hidden_sum: Option<Arc<[f64]>>,
    pub retention: Arc<[RetentionRange]>,
    /// Prompt rows whose logprobs, or hidden states for a mean, were obtained. Rows below need no recomputation, rows above must not be skipped.
    pub scored: u32,
    pub timing: Timing,
    /// Every block it may ever need is set aside, and it is no victim any more.
    pub reserved: bool,
    /// Others that were admitted while this one waited for blocks.
    pub bypassed: u32,
    /// Most positions ever computed: computing below it again is the price of preemption.
    pub high_water: u32,
    /// Hashes of the prompt's full blocks.
    pub hashes: Vec<BlockHash>,
    /// How many of them are of blocks that an operator shares; `None` before they were computed.
    pub hashes_shared: Option<u32>,
    /// Blocks `announced.0 .. announced.1` are registered as being computed by this sequence.
    pub announced: (u32, u32),
    /// While waiting for a shared prefix: the last block of it.
    pub awaited_block: u32,
    /// What the cache held of it at `looked_up_step`.
    pub lookup: Lookup,
    pub looked_up_step: u64,
    /// Positions that the cache alone had of it then.
    pub found: u32,
    /// While it waits after a preemption, and until it has run again: its copy in host memory.
    pub swapped: Option<Swapped>,
    /// The step that makes the copy has not run.
    pub swap_pending: bool,
    /// `lookup` is of the copy, which is to be used.
    pub restores: bool,
    /// Positions that its last preemption put at stake.
    pub at_stake: (u32, u32),
    /// Tokens to compute in the step being planned.
    pub granted: u32,
    /// The table was attached in the step being planned: nothing was computed with it.
    pub fresh: bool,
    /// This sequence's entry in the plan, kept between steps for its memory.
    pub plan: SequencePlan,
    /// Leading entries of the plan's block tables that are known to be right, or to have become holes since. All are when they were just
    /// written; each commit since then changed some.
    pub synced: u32,
}

impl Sequence {
    pub fn empty_plan(id: SequenceId) -> SequencePlan {
        SequencePlan {
            id,
            first_position: 0,
            tokens: Vec::new(),
            block_tables: vec![Vec::new()],
            samples: Vec::new(),
        }
    }

    pub fn id(&self) -> SequenceId {
        self.rank.id
    }

    /// Known tokens that are not computed.
    pub fn remaining(&self) -> u32 {
        self.tokens.len() as u32 - self.computed
    }

    pub fn generated(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_len
    }

    /// Positions whose KV is needed when it ends at max_tokens: the last token is never computed.
    pub fn final_positions(&self) -> u32 {
        (self.prompt_len + self.params.max_tokens).saturating_sub(1).max(self.prompt_len)
    }

    /// Known tokens that may come from the cache: the last one is needed for its logits, and rows of which something is
    /// wanted are computed.
    pub fn attachable(&self) -> u32 {
        let all_but_last = self.tokens.len() as u32 - 1;
        match self.wants_rows() {
            true => all_but_last.min(self.scored),
            false => all_but_last,
        }
    }

    /// Something is wanted of every row of the prompt.
    pub fn wants_rows(&self) -> bool {
        self.score_top.is_some() || self.pooling == Some(Pooling::Mean)
    }

    pub fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// Most of its tokens that one step can still compute, of `budget`.
    pub fn chunk_max(&self, budget: u32) -> u32 {
        budget.min(self.remaining().max(1))
    }

    /// Blocks it will still take until `positions`; none without a table.
    pub fn blocks_missing(&self, cache: &KvCache, positions: u32, budget: u32) -> GroupCounts {
        let table = self.table.as_ref();
        table.map_or_else(GroupCounts::default, |table| {
            cache.missing(table, positions, self.chunk_max(budget))
        })
    }

    /// How to choose the token at the end of what is known, for `choice` with `seed`.
    pub fn sample_spec(&self, seed: u64) -> SampleSpec {
        SampleSpec {
            params: self.params.clone(),
            seed,
            position: self.tokens.len() as u32,
            history: self.history.clone(),
            forbid_stop: self.generated() < self.params.min_tokens,
            guide: self.guide.clone(),
        }
    }

    pub fn push_token(&mut self, token: u32) {
        self.tokens.push(token);
        if let Some(history) = &mut self.history {
            Arc::make_mut(history).push(token);
        }
    }

    /// Tells the guide of the last token. Only where another is wanted.
    pub fn follow(&mut self) {
        let Some(rules) = &self.params.rules else { return };
        match (&self.guide, self.tokens.last()) {
            (Some(guide), Some(token)) => guide.0.advance(*token),
            _ => self.guide = Some(GuideRef(rules.0.guide(&self.tokens[self.prompt_len as usize..]))),
        }
    }
}

/// Seed of choice `choice`: distinct choices draw from unrelated streams.
pub fn choice_seed(seed: u64, choice: u32) -> u64 {
    let mut z = seed ^ u64::from(choice).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// All living sequences.
#[derive(Default)]
pub(crate) struct Sequences {
    slots: Vec<Option<Box<Sequence>>>,
    free: Vec<Slot>,
}

impl Sequences {
    pub fn insert(&mut self, sequence: Box<Sequence>) -> Slot {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot.0 as usize] = Some(sequence);
                slot
            }
            None => {
                self.slots.push(Some(sequence));
                Slot(self.slots.len() as u32 - 1)
            }
        }
    }

    pub fn remove(&mut self, slot: Slot) -> Option<Box<Sequence>> {
        let sequence = self.slots[slot.0 as usize].take();
        if sequence.is_some() {
            self.free.push(slot);
        }
        sequence
    }

    /// Whether this sequence is still in that slot.
    pub fn lives(&self, id: SequenceId, slot: Slot) -> bool {
        self.slots[slot.0 as usize].as_ref().is_some_and(|sequence| sequence.id() == id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().flatten().map(|sequence| &**sequence)
    }
}

impl std::ops::Index<Slot> for Sequences {
    type Output = Sequence;
    /// Slots are handed out by `insert` and held only while the sequence lives.
    fn index(&self, slot: Slot) -> &Sequence {
        self.slots[slot.0 as usize].as_deref().expect("a slot outlived its sequence")
    }
}

impl std::ops::IndexMut<Slot> for Sequences {
    fn index_mut(&mut self, slot: Slot) -> &mut Sequence {
        self.slots[slot.0 as usize].as_deref_mut().expect("a slot outlived its sequence")
    }
}
