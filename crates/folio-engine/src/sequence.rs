//! One choice of one request: known tokens, those that are scheduled, and those that are computed.
//!
//! Owns: the tokens of a choice, and what its state allows. Must never: know the queue it stands in or the step it is part of.
//!
//! Progress: `computed <= known` and `computed <= scheduled <= known + pending`. Planning moves `scheduled`, committing moves
//! `computed`. `pending` counts the tokens that unfinished steps will choose; each is named by its [`Placeholder`]. Between steps
//! the last known token is always still to compute.
//!
//! There are no phases. A prompt, a prefix hit, a decode, a resume after preemption and the verification of a draft differ only
//! in how far `scheduled` lags behind `known + pending`.
//!
//! | state | holds | leaves it by |
//! |---|---|---|
//! | [`Waiting`] | what was found of it, what is loaded of it ahead of its turn | admission, its end |
//! | [`Running`] | a block table, a reservation, rows under way | its end, preemption (with no rows under way) |
//!
//! In either it may be suspended ([`Sequence::suspension`]): it waits for something outside, and gets no rows until that ends.

use std::sync::Arc;

use folio_kv::{BlockHash, BlockHashes, BlockTable, GroupCounts, Growth, Lookup, TenantId};
use smallvec::SmallVec;

use crate::acceptance::{Acceptance, DraftSource};
use crate::adapters::ResidentAdapter;
use crate::config::SchedulerConfig;
use crate::drafting::Drafter;
use crate::guide::GuideRef;
use crate::plan::{SampleSpec, SequenceId, TokenHistory};
use crate::request::{Micros, Pooling, Request, RequestId, SamplingParams, Timing};
use crate::stats::WaitingFor;

/// Index into [`Sequences`]. Reused after a sequence ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot(pub u32);

/// Who comes first: the operator's class, then the caller's priority, then arrival; the lower is the better. Unique per sequence.
/// Between tenants priorities say nothing: see [`Sequence::outranks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub class: i32,
    pub priority: i32,
    /// The number of its request's first sequence; 0 once it was preempted.
    pub arrival: u64,
    pub id: SequenceId,
}

/// A token that an unfinished step chooses: the `sample`-th of `step`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placeholder {
    pub step: u64,
    pub sample: u32,
}

/// Which choice of its request a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub index: u32,
    pub seed: u64,
}

/// In the order of use: what every step looks at comes first and lies together, in `state`, too. A step of thousands of sequences waits
/// for memory and little else.
#[repr(C)]
pub(crate) struct Sequence {
    pub rank: Rank,
    /// `None`: the prompt is not computed, and it stands for all choices.
    pub choice: Option<Choice>,
    /// Of `request`, as is `tenant`.
    pub request_id: RequestId,
    /// Prompt, then generated tokens.
    pub tokens: Vec<u32>,
    pub tenant: TenantId,
    pub prompt_len: u32,
    /// Most tokens that it may generate, by `max_tokens` and by the model's context.
    pub generated_max: u32,
    /// Of `params`, as are `restricted` (by rules) and `stop_tokens` (of both kinds).
    pub min_tokens: u32,
    /// Most positions ever computed: computing below it again is the cost of preemption.
    pub high_water: u32,
    /// How far it stands behind its prompt's embeddings from its positions ([`crate::plan::SequencePlan::position_shift`]).
    pub position_shift: i32,
    /// Microseconds of steps that fall to it since its last event.
    pub us: f32,
    pub restricted: bool,
    pub stop_tokens: SmallVec<[u32; 4]>,
    pub history: Option<Arc<TokenHistory>>,
    /// What it may say next, where rules restrict it.
    pub guide: Option<GuideRef>,
    /// What it may be verified to say next, for the next plan.
    pub drafts: Vec<u32>,
    /// So many at their beginning are what its guide leaves alone: nearly certain, and no sign of how right others are.
    pub forced: u32,
    /// Most drafts of a step that a model may propose where there are no others.
    pub model_drafts: u32,
    pub state: State,
    /// What all choices have in common.
    pub request: Arc<Request>,
    pub params: Arc<SamplingParams>,
    /// Prompt rows whose logprobs, or hidden states for a mean, were obtained, and the sum of the latter. Rows below need no
    /// recomputation, rows above must not be skipped.
    pub scored: u32,
    pub hidden_sum: Option<Arc<[f64]>>,
    /// What identifies its content: of the prompt, and while it holds no blocks, of all that it knows. Whether it begins with what an operator
    /// declared is said by the last look at the cache.
    pub hashes: BlockHashes,
    pub timing: Timing,
    pub acceptance: Acceptance,
}

/// Sequences lie in one array: a box would be a cache miss in every step.
pub(crate) enum State {
    Waiting(Waiting),
    Running(Running),
}

/// Why somebody gets no rows, and since when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub reason: WaitingFor,
    pub since: Micros,
}

impl Wait {
    /// The last moment of it.
    pub fn until(&self, config: &SchedulerConfig) -> Micros {
        self.reason.until(self.since, config).unwrap_or(Micros(u64::MAX))
    }

    pub fn is_over(&self, now: Micros, config: &SchedulerConfig) -> bool {
        self.until(config) < now
    }
}

/// Holds no blocks.
pub(crate) struct Waiting {
    pub wait: Wait,
    /// While it waits for a shared prefix: the last block of it.
    pub awaited_block: u32,
    /// What the cache held of it when that was looked up.
    pub found: Option<Found>,
    /// After a preemption: the positions that were put at stake.
    pub at_stake: (u32, u32),
    /// Others that were admitted while this one waited for blocks, or for an adapter.
    pub bypassed: u32,
    /// When it was refused last it was because too many adapters were in use.
    pub lacks_adapter: bool,
    /// What tiers bring of it meanwhile; and up to which block that was tried, `u32::MAX` where it is not to be again.
    pub prefetch: Option<Prefetch>,
    pub prefetched: u32,
}

/// A load of a sequence that waits in the queue.
pub(crate) struct Prefetch {
    /// Its beginning that is on the device, and behind that what transfers write.
    pub table: BlockTable,
    /// Then it is given up.
    pub until: Micros,
    /// The first block that is loaded.
    pub first: BlockHash,
}

/// What a lookup told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// The plan it was looked up for.
    pub plan: u64,
    pub lookup: Lookup,
}

/// Holds blocks and is considered in every plan.
#[repr(C)]
pub(crate) struct Running {
    pub scheduled: u32,
    pub pending: u32,
    /// Of the last pending token.
    pub placeholder: Placeholder,
    /// Unfinished steps with rows of it.
    pub begun_steps: u32,
    /// Tokens to compute in the step being planned.
    pub granted: u32,
    /// See [`crate::plan::SequencePlan::table_slot`]; and the step that it was last planned for.
    pub table_slot: u32,
    pub planned: u64,
    /// No step with it was committed since it was attached.
    pub fresh: Option<Fresh>,
    /// It waits for something outside, with its blocks.
    pub suspended: Option<Wait>,
    /// It is preempted when its last unfinished step is committed, and gets no rows until then.
    pub preempted: bool,
    /// Blocks that it may still take, set aside for it; with a reservation it is no victim.
    pub reserved: Option<GroupCounts>,
    pub table: BlockTable,
    /// The one that its request names.
    pub adapter: Option<ResidentAdapter>,
    /// Positions that the drafter's KV has when the steps under way are over; and whether in the step being planned it computes some that
    /// it lacks.
    pub drafter_computed: u32,
    pub drafter_lags: bool,
    /// See [`crate::plan::DraftPlan::context`]; and the first position whose features are kept for it.
    pub drafter_context: u32,
    pub features_from: u32,
    /// Blocks `announced.0 .. announced.1` are registered as being computed by this sequence.
    pub announced: (u32, u32),
}

/// What became of a table that was attached and of which nothing was confirmed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fresh {
    /// It needs a step to be true: what it has may be to be copied.
    Attached,
    /// A step with it ran, and nothing of that could be confirmed; or it was attached to be loaded, and needs no step.
    Ran,
}

impl Waiting {
    pub fn new(reason: WaitingFor, since: Micros) -> Self {
        let wait = Wait { reason, since };
        Self {
            wait,
            awaited_block: 0,
            found: None,
            at_stake: (0, 0),
            bypassed: 0,
            lacks_adapter: false,
            prefetch: None,
            prefetched: 0,
        }
    }

    pub fn lookup(&self) -> Lookup {
        self.found.map(|found| found.lookup).unwrap_or_default()
    }
}

impl Running {
    /// `tentative`: see [`Sequence::tentative`].
    pub fn new(mut table: BlockTable, tentative: u32, fresh: Option<Fresh>) -> Self {
        table.set_tentative(tentative);
        Self {
            scheduled: table.computed(),
            drafter_computed: table.written(),
            drafter_lags: false,
            drafter_context: 0,
            features_from: 0,
            table,
            adapter: None,
            pending: 0,
            placeholder: Placeholder::default(),
            begun_steps: 0,
            granted: 0,
            reserved: None,
            announced: (0, 0),
            fresh,
            suspended: None,
            preempted: false,
            table_slot: 0,
            planned: 0,
        }
    }

    /// It was attached, and no step with it is over.
    pub fn never_ran(&self) -> bool {
        self.fresh == Some(Fresh::Attached)
    }
}

impl Sequence {
    pub fn id(&self) -> SequenceId {
        self.rank.id
    }

    /// Whose memory its blocks are.
    pub fn owner(&self) -> TenantId {
        self.hashes.root().tenant
    }

    /// Full blocks of its prompt.
    pub fn prompt_blocks(&self) -> u32 {
        self.prompt_len / self.hashes.block_tokens()
    }

    pub fn known(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub fn computed(&self) -> u32 {
        self.running().map_or(0, |running| running.table.computed())
    }

    /// Known tokens that are not computed.
    pub fn remaining(&self) -> u32 {
        self.known() - self.computed()
    }

    pub fn generated(&self) -> u32 {
        self.known() - self.prompt_len
    }

    pub fn running(&self) -> Option<&Running> {
        if let State::Running(running) = &self.state { Some(running) } else { None }
    }

    pub fn running_mut(&mut self) -> Option<&mut Running> {
        if let State::Running(running) = &mut self.state { Some(running) } else { None }
    }

    pub fn waiting(&self) -> Option<&Waiting> {
        if let State::Waiting(waiting) = &self.state { Some(waiting) } else { None }
    }

    pub fn waiting_mut(&mut self) -> Option<&mut Waiting> {
        if let State::Waiting(waiting) = &mut self.state { Some(waiting) } else { None }
    }

    /// Its block table: also while it waits, if something is loaded of it.
    pub fn table(&self) -> Option<&BlockTable> {
        match &self.state {
            State::Running(running) => Some(&running.table),
            State::Waiting(waiting) => waiting.prefetch.as_ref().map(|prefetch| &prefetch.table),
        }
    }

    pub fn table_mut(&mut self) -> Option<&mut BlockTable> {
        match &mut self.state {
            State::Running(running) => Some(&mut running.table),
            State::Waiting(waiting) => waiting.prefetch.as_mut().map(|prefetch| &mut prefetch.table),
        }
    }

    pub fn is_running(&self) -> bool {
        self.running().is_some()
    }

    /// What it waits for outside, if anything.
    pub fn suspension(&self) -> Option<Wait> {
        match &self.state {
            State::Running(running) => running.suspended,
            State::Waiting(waiting) => Some(waiting.wait).filter(|wait| wait.reason.is_outside()),
        }
    }

    /// Whether unfinished steps have rows of it.
    pub fn is_under_way(&self) -> bool {
        self.running().is_some_and(|running| running.begun_steps > 0)
    }

    pub fn has_reservation(&self) -> bool {
        self.running().is_some_and(|running| running.reserved.is_some())
    }

    /// Whether it goes before `other` however much it already got: by the operator's word, or by that of the tenant of both.
    pub fn outranks(&self, other: &Sequence) -> bool {
        let (mine, theirs) = (self.rank, other.rank);
        let same = mine.class == theirs.class && self.tenant == other.tenant;
        mine.class < theirs.class || (same && mine.priority < theirs.priority)
    }

    /// Rows that `step` can compute of it; what depends on an unfinished step in another way than by naming a token waits for its
    /// commit. See [`crate::Executor::lag`] for `lag`.
    pub fn ready(&self, step: u64, lag: u64) -> u32 {
        let ready = |running: &&Running| !running.preempted && running.suspended.is_none();
        let Some(running) = self.running().filter(ready) else { return 0 };
        if running.scheduled < self.known() {
            let sums = running.begun_steps > 0 && self.request.pooling == Some(Pooling::Mean);
            let end = self.known().min(running.table.computable());
            return if sums { 0 } else { end.saturating_sub(running.scheduled) };
        }
        // With drafts to verify it waits until it is known where they begin.
        let names =
            running.pending > 0 && step >= running.placeholder.step + lag && self.drafts_possible(step) == 0;
        u32::from(names && self.generated() + running.pending < self.generated_max)
    }

    /// Whether it computes one token a step, those under way included.
    pub fn decodes(&self) -> bool {
        let end = |running: &Running| self.known().min(running.table.computable());
        let goes_on = |running: &&Running| !running.preempted && running.suspended.is_none();
        self.running().filter(goes_on).is_some_and(|running| end(running) <= running.scheduled + 1)
    }

    /// Whether unfinished steps verify drafts of it, or else choose tokens that no later one can name.
    pub fn is_awaited(&self) -> bool {
        self.running().is_some_and(|running| running.begun_steps > 0 && running.pending == 0)
    }

    /// Whether the token after what it knows depends on nothing but its logits and its position, so that a later step can go on
    /// from it before it is known.
    pub fn can_be_followed(&self) -> bool {
        self.history.is_none() && self.guide.is_none()
    }

    /// Where its drafts come from.
    pub fn draft_source(&self, by_model: bool) -> DraftSource {
        let speculation = self.request.speculation.as_ref();
        let predicted = speculation.is_some_and(|speculation| !speculation.prediction().is_empty());
        match (by_model, predicted) {
            (true, _) => DraftSource::Model,
            (false, true) => DraftSource::Prediction,
            (false, false) => DraftSource::Text,
        }
    }

    /// Whose its drafts are.
    pub fn drafter(&self) -> Drafter {
        self.request.speculation.as_ref().map_or_else(Drafter::default, |speculation| speculation.drafter())
    }

    /// Drafts that this step of it may have.
    pub fn drafts_possible(&self, step: u64) -> u32 {
        match self.drafts.len() {
            0 if self.choice.is_some() && !self.acceptance.is_paused(step) => self.model_drafts,
            0 => 0,
            drafts => drafts as u32,
        }
    }

    /// Positions whose KV is needed when it ends at max_tokens: the last token is never computed.
    pub fn final_positions(&self) -> u32 {
        (self.prompt_len + self.params.max_tokens).saturating_sub(1).max(self.prompt_len)
    }

    /// Known tokens that may come from the cache: the last one is needed for its logits, and rows of which something is
    /// wanted are computed.
    pub fn attachable(&self) -> u32 {
        let all_but_last = self.known() - 1;
        match self.wants_rows() {
            true => all_but_last.min(self.scored),
            false => all_but_last,
        }
    }

    /// Something is wanted of every row of the prompt.
    pub fn wants_rows(&self) -> bool {
        self.request.prompt_logprobs.is_some() || self.request.pooling == Some(Pooling::Mean)
    }

    /// Rows of a step without drafts that may be taken back: the last, where its mask may be late.
    pub fn tentative(&self) -> u32 {
        self.restricted.into()
    }

    /// Up to `positions`, in steps of `budget` tokens, behind what is under way.
    pub fn growth(&self, positions: u32, budget: u32) -> Growth {
        let scheduled = self.running().map_or(0, |running| running.scheduled);
        let chunk = budget.min(self.known().saturating_sub(scheduled).max(1));
        Growth { positions, chunk, tentative: self.tentative() }
    }

    /// How to choose the token `ahead` positions behind what is known, for a choice with `seed`.
    pub fn sample_spec(&self, seed: u64, ahead: u32) -> SampleSpec {
        let params = self.params.clone();
        let mut spec =
            SampleSpec { params, seed, position: 0, history: None, forbid_stop: false, guide: None };
        self.update_spec(&mut spec, ahead);
        spec
    }

    /// The same, of a spec that was made for this sequence.
    pub fn update_spec(&self, spec: &mut SampleSpec, ahead: u32) {
        spec.position = self.known() + ahead;
        spec.history = self.history.clone();
        spec.forbid_stop = self.generated() + ahead < self.min_tokens;
        spec.guide = self.guide.clone();
    }

    pub fn push_token(&mut self, token: u32) {
        self.tokens.push(token);
        match self.drafts.first() {
            Some(draft) if *draft == token => {
                self.drafts.remove(0);
                self.forced = self.forced.saturating_sub(1);
            }
            _ => self.clear_drafts(),
        }
    }

    pub fn clear_drafts(&mut self) {
        self.drafts.clear();
        self.forced = 0;
    }

    /// Its history has all tokens that it knows. Where a plan is made, when no other has a share of it: then it is changed in place.
    pub fn update_history(&mut self) {
        if let Some(history) = &mut self.history
            && history.len() < self.tokens.len()
        {
            let history = Arc::make_mut(history);
            self.tokens[history.len()..].iter().for_each(|token| history.push(*token));
        }
    }

    /// Tells the guide of the last token. Only where another is wanted.
    pub fn follow(&mut self) {
        if !self.restricted {
            return;
        }
        let Some(rules) = &self.params.rules else { return };
        match (&self.guide, self.tokens.last()) {
            (Some(guide), Some(token)) => guide.0.advance(*token),
            _ => self.guide = Some(GuideRef(rules.0.guide(&self.tokens[self.request.prompt.len()..]))),
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
    slots: Vec<Option<Sequence>>,
    free: Vec<Slot>,
}

impl Sequences {
    pub fn insert(&mut self, sequence: Sequence) -> Slot {
        let slot = self.free.pop().unwrap_or(Slot(self.slots.len() as u32));
        if slot.0 as usize == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[slot.0 as usize] = Some(sequence);
        slot
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn remove(&mut self, slot: Slot) -> Option<Sequence> {
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
        self.slots.iter().flatten()
    }
}

impl std::ops::Index<Slot> for Sequences {
    type Output = Sequence;
    /// Slots are handed out by `insert` and held only while the sequence lives.
    fn index(&self, slot: Slot) -> &Sequence {
        self.slots[slot.0 as usize].as_ref().expect("a slot outlived its sequence")
    }
}

impl std::ops::IndexMut<Slot> for Sequences {
    fn index_mut(&mut self, slot: Slot) -> &mut Sequence {
        self.slots[slot.0 as usize].as_mut().expect("a slot outlived its sequence")
    }
}
