//! Who runs, on which tokens, in which blocks: a pure state machine.
//!
//! Owns: every sequence from admission to its last event. Must never: read a clock, do I/O, use randomness, or see a
//! tensor. Time, requests and results are passed in; plans and events come out.
//!
//! A step is [`Scheduler::plan`], then the executor, then [`Scheduler::commit`]; as many may be under way as the executor allows
//! ([`Scheduler::with_overlap`]), and they are committed in order. Between plans a sequence either holds blocks (`running`) or
//! holds none (`waiting`), and in either it may be suspended; nothing else exists, in particular no prefill or decode phase.
//!
//! | file | noun |
//! |---|---|
//! | `adapters` | whose weights are in memory? |
//! | `admission` | may this sequence get blocks now? |
//! | `queue`, `fair` | who waits, and which tenant's turn it is |
//! | `budget` | who gets how much of a step's token budget |
//! | `drafts` | how many drafts are verified, and what the drafter's model computes |
//! | `tenant_rates` | by how much drafts of one tenant may slow the others |
//! | `shared_prefixes` | prefixes that are being computed right now |
//! | `room` | the ledger of reservations: what is left for whom |
//! | `preemption` | who loses its blocks |
//! | `suspend` | who waits for something outside the steps |
//! | `loads` | blocks that are filled from outside the steps, or read there |
//! | `prefetch` | whose loads begin while they wait in the queue |
//! | `swap`, `costs` | what of a preempted sequence is swapped to a tier, because computing it again would cost more |
//! | `load_times`, `row_times`, `context_times` | what a load takes over its bytes, a step over its rows, and what contexts add |
//! | `build` | the plan's entries; what is remembered of a step until its commit |
//! | `commit` | what a result changes |
//! | `requests` | the choices of one request |
//! | `figures` | what is reported |
//!
//! # Steps under way
//!
//! No step is planned on a guess that can change a token. Behind an unfinished step a sequence goes on with tokens that are known,
//! or with the one token that it chooses, named by its place ([`crate::plan::PLACEHOLDER`]). Whatever depends on that token otherwise
//! (a guide, a history of penalties, the choices of one request, a running sum, a draft) sits out until its commit; everybody
//! else overlaps. Rows behind an unfinished step of their sequence take blocks that are free for anybody, and preempt nobody.
//!
//! A sequence may end while later steps with rows of it are under way: a stop token, a cancellation, a failed step. Those rows are
//! orphans, computed for nothing, their answers dropped. What the sequence held is released at once, while the rows are still to
//! be written, and nobody can see it, however many steps there are:
//! - Whoever is given those blocks gets them in a later plan, and steps run in order: the orphan's row is written before.
//! - A block that is in the index, or was kept as a tail to be copied from, counts positions before the orphan's, which lies
//!   behind all that were committed; the rest of a block is nobody's content. Nothing is published for an orphan, because
//!   what is published is what `commit` finds alive.
//! - A block that gave way at a commit to one of equal content was in the tables of later steps; it keeps its bytes until a step
//!   behind those writes. So do blocks that left a window at that commit, and sources of copies that are under way.
//! - A block that an orphan writes was the sequence's own since it grew: it is shared with nobody (`KvCache::grow`).
//! - A state is overwritten by the row behind it. What an orphan overwrote is not kept (`BlockTable::set_overwritten`); rows that may be
//!   taken back write blocks of their own, and are alone under way.
//! - Readers outside read what was committed; what transfers write nobody uses before their report (`loads`).
//!
//! A victim that is under way gets no further rows and is preempted at its last commit; who wanted its blocks waits for that, and
//! nobody else does.
//!
//! Invariants, checked by [`Scheduler::check`]: `running` and `waiting` are disjoint and hold every sequence; granted tokens never
//! exceed the budget; every request in `requests` still owes at least one `Finished`.
//!
//! Cost: O(running) per step plus a bounded look at the waiting queue; nothing is proportional to context length except
//! what grows with it once (hashing a prompt, releasing a table). After warm-up a step allocates nothing unless a
//! request arrives, forks or ends.

mod adapters;
mod admission;
mod budget;
mod build;
mod check;
mod commit;
mod context_times;
mod costs;
mod drafts;
mod fair;
mod figures;
mod load_times;
mod loads;
mod preemption;
mod prefetch;
mod queue;
mod requests;
mod room;
mod row_times;
mod shared_prefixes;
mod stores;
mod suspend;
mod swap;
mod tenant_rates;

use std::collections::{BTreeSet, VecDeque};

use folio_kv::{BlockHashes, BlockTable, KvCache, Ticket, TierId};
use rustc_hash::FxHashMap;

use crate::acceptance::DrafterRecords;
use crate::config::{ConfigError, SchedulerConfig};
use crate::mailbox::CancelRequest;
use crate::plan::{DrafterModel, PLACEHOLDER, SequenceId, StepPlan};
use crate::request::{Event, Micros, Request, RequestId};
use crate::sequence::{Fresh, Rank, Running, Sequences, Slot, State};
use crate::stats::Counters;
use crate::tier::{CHUNK_BLOCKS_MAX, TIERS_MAX};
use crate::work::{Activity, Work};
use adapters::ResidentAdapters;
use admission::Headroom;
use budget::Step;
use build::Ring;
use costs::Costs;
use loads::{OpenTransfer, Transfers};
use prefetch::Prefetches;
use queue::Queue;
use requests::RequestState;
use room::Reservations;
use shared_prefixes::SharedPrefixes;

/// See the module documentation.
pub struct Scheduler {
    config: SchedulerConfig,
    sequences: Sequences,
    requests: FxHashMap<RequestId, RequestState>,
    /// Sequences that hold blocks, best rank first.
    running: Vec<(Rank, Slot)>,
    /// Free ones, see [`crate::plan::SequencePlan::table_slot`].
    table_slots: Vec<u32>,
    /// Sequences that hold none.
    waiting: Queue,
    deadlines: BTreeSet<(Micros, RequestId)>,
    /// Sequences that wait for something outside, by when that ends at the latest.
    suspended: BTreeSet<(Micros, SequenceId, Slot)>,
    cancelled: Vec<CancelRequest>,
    shared_prefixes: SharedPrefixes,
    /// Transfers from outside that have not reported.
    loads: FxHashMap<Ticket, OpenTransfer>,
    transfers: Transfers,
    prefetches: Prefetches,
    reservations: Reservations,
    adapters: ResidentAdapters,
    /// Victims that wait for their last commit.
    preempting: u32,
    headroom: Headroom,
    costs: Costs,
    drafter: Option<DrafterModel>,
    draft_records: DrafterRecords,
    vocab: u32,
    /// The step being planned.
    step: Step,
    /// Steps that were begun and are not committed.
    ring: Ring,
    events: Vec<(RequestId, Event)>,
    counters: Counters,
    work: Work,
    queued: crate::mailbox::Queued,
    /// Of the last one.
    sequence_id: u64,
    now: Micros,
    /// Tokens and decodes of the last step that was committed.
    last_step: (u32, u32),
}

impl Scheduler {
    /// For an executor with one step under way.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let waiting = Queue::new(&config);
        Ok(Self {
            config,
            sequences: Sequences::default(),
            requests: FxHashMap::default(),
            running: Vec::new(),
            table_slots: Vec::new(),
            waiting,
            deadlines: BTreeSet::new(),
            suspended: BTreeSet::new(),
            cancelled: Vec::new(),
            shared_prefixes: SharedPrefixes::default(),
            loads: FxHashMap::default(),
            transfers: Transfers::default(),
            prefetches: Prefetches::default(),
            reservations: Reservations::default(),
            adapters: ResidentAdapters::default(),
            preempting: 0,
            headroom: Headroom::new(),
            costs: Costs::default(),
            drafter: None,
            draft_records: DrafterRecords::default(),
            vocab: PLACEHOLDER,
            step: Step::default(),
            ring: Ring { depth: 1, lag: 1, begun: VecDeque::new(), spare: Vec::new() },
            events: Vec::new(),
            counters: Counters::default(),
            work: Work::idle(),
            queued: Default::default(),
            sequence_id: 0,
            now: Micros(0),
            last_step: (0, 0),
        })
    }

    /// What the executor declares ([`crate::Executor::depth`], [`crate::Executor::lag`]). Before the first plan.
    pub fn with_overlap(mut self, depth: usize, lag: usize) -> Self {
        (self.ring.depth, self.ring.lag) = (depth.max(1), lag.max(1) as u64);
        self
    }

    /// The executor has a model for drafts ([`crate::Executor::drafter`]).
    pub fn with_drafter(mut self, drafter: Option<DrafterModel>) -> Self {
        self.drafter = drafter;
        self
    }

    /// The model has so many tokens: drafts end where one is none of them.
    pub fn with_vocab(mut self, vocab: u32) -> Self {
        self.vocab = vocab.min(PLACEHOLDER);
        self
    }

    /// Tiers keep what the device cannot, the nearest first, each so many blocks together ([`crate::Tier::chunk_blocks`]): see `loads`.
    pub fn with_tiers(mut self, chunk_blocks: impl IntoIterator<Item = u32>) -> Self {
        let chunks = chunk_blocks.into_iter().take(TIERS_MAX);
        self.transfers.chunks = chunks.map(|blocks| blocks.clamp(1, CHUNK_BLOCKS_MAX)).collect();
        self
    }

    /// The tier that keeps what preempted sequences computed ([`crate::Tier::swaps`]): see `swap`.
    pub fn swapping_to(mut self, tier: Option<TierId>) -> Self {
        self.transfers.swap = tier;
        self
    }

    /// Takes in what arrived since the last step. Requests were already checked against the limits
    /// ([`crate::EngineHandle::submit`]), and hashed ([`Request::hashed`]). A cancellation of something that has already ended is
    /// ignored.
    pub fn admit(
        &mut self,
        requests: impl IntoIterator<Item = (Request, BlockHashes)>,
        cancellations: impl IntoIterator<Item = CancelRequest>,
        now: Micros,
    ) {
        for (request, hashes) in requests {
            self.accept(request, hashes, now);
        }
        self.cancelled.extend(cancellations);
    }

    /// Whether another step may be begun before the oldest is committed.
    pub fn has_room(&self) -> bool {
        self.ring.begun.len() < self.ring.depth
    }

    /// Whether a step is begun and not committed.
    pub fn under_way(&self) -> bool {
        !self.ring.begun.is_empty()
    }

    /// Decides the next step, which is under way from then on if it has sequences. Blocks of whatever was cancelled or is overdue
    /// are free before anything is decided.
    ///
    /// 1. Every running sequence that lacks one token gets it: decodes never wait for prompts.
    /// 2. The rest of the budget goes to prompts (see `budget`), those of waiting sequences included (see `admission`).
    /// 3. Of those who wait on, some are loaded meanwhile (see `prefetch`).
    pub fn plan(&mut self, cache: &mut KvCache, now: Micros) -> &StepPlan {
        debug_assert!(self.has_room(), "no more steps may be under way");
        self.now = now;
        self.work.pass(now);
        cache.advance(now.0);
        self.recycle();
        self.forget_late_stores();
        self.reap(cache);
        if self.decide_drafts() {
            let decodes = self.grant_decodes(cache);
            self.grant_prompts(cache, decodes);
            self.prefetch(cache);
        } else {
            self.step.granted = 0;
        }
        self.build();
        self.rest();
        &self.step.plan
    }

    /// What time passes with from here on, if no step is under way. Between a step and the next it is the next's.
    fn rest(&mut self) {
        let stuck = self.step.granted == 0;
        self.work.begin(match self.under_way() {
            true => None,
            false if self.requests.is_empty() => Some(Activity::Idle),
            false => stuck.then_some(Activity::Waiting),
        });
    }

    /// Whether a victim still waits for its last commit, or for a tier to have read what it gave up.
    pub fn is_preempting(&self) -> bool {
        self.preempting > 0 || !self.transfers.leaving.is_empty()
    }

    /// Number of the step being planned.
    fn next_step(&self) -> u64 {
        self.counters.steps + self.ring.begun.len() as u64 + 1
    }

    /// The plan that was made last.
    pub fn planned(&self) -> &StepPlan {
        &self.step.plan
    }

    /// What is to be told, in order per request; whoever tells it drains it.
    pub fn events(&mut self) -> &mut Vec<(RequestId, Event)> {
        &mut self.events
    }

    /// Something holds or wants blocks, an event is owed, or a step is not committed.
    pub fn has_work(&self) -> bool {
        self.under_way() || !self.requests.is_empty() || !self.cancelled.is_empty() || !self.events.is_empty()
    }

    /// Ends every request, as when the engine stops.
    pub fn fail_all(
        &mut self,
        cache: &mut KvCache,
        error: &str,
        now: Micros,
    ) -> &mut Vec<(RequestId, Event)> {
        self.now = now;
        cache.advance(now.0);
        self.recycle();
        let mut ids: Vec<RequestId> = self.requests.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.end_request(cache, id, crate::request::FinishReason::Error, Some(error.into()));
        }
        &mut self.events
    }

    /// Whether somebody was refused blocks in the last planned step.
    pub fn contended(&self) -> bool {
        self.step.contended
    }

    /// Requests that were never scheduled, for the queue limits.
    pub(crate) fn queued(&self) -> crate::mailbox::Queued {
        self.queued
    }

    fn new_sequence_id(&mut self) -> SequenceId {
        self.sequence_id += 1;
        SequenceId(self.sequence_id)
    }

    /// A waiting sequence runs from now on, with this table.
    fn start_running(
        &mut self,
        cache: &mut KvCache,
        slot: Slot,
        mut table: BlockTable,
        fresh: Option<Fresh>,
    ) {
        // Where none is free, those below the number of sequences that run are all in use.
        let table_slot = self.table_slots.pop().unwrap_or(self.running.len() as u32);
        let reserve = self.must_reserve(slot);
        let sequence = &mut self.sequences[slot];
        table.reserve(sequence.final_positions());
        let adapter = sequence.request.adapter_id();
        let adapter = adapter.map(|id| self.adapters.begin_use(id).expect("who is admitted has its weights"));
        let running = Running { table_slot, adapter, ..Running::new(table, sequence.tentative(), fresh) };
        let before = std::mem::replace(&mut sequence.state, State::Running(running));
        if let State::Waiting(waiting) = before {
            self.waiting.remove(sequence, slot, waiting.wait.reason);
        }
        self.step.has_histories |= sequence.history.is_some();
        self.start_drafter(cache, slot);
        let sequence = &self.sequences[slot];
        if let Some(seen) = &mut self.step.seen {
            seen.add(sequence.known().saturating_sub(1), 1);
        }
        let rank = sequence.rank;
        let at = self.running.partition_point(|(other, _)| *other < rank);
        self.running.insert(at, (rank, slot));
        if reserve {
            self.reserve(cache, slot);
        }
    }

    /// In the order of rank.
    fn all_running(&self) -> impl Iterator<Item = &Running> {
        self.running.iter().filter_map(|(_, slot)| self.sequences[*slot].running())
    }

    fn stop_running(&mut self, slot: Slot) {
        let rank = self.sequences[slot].rank;
        if let Ok(at) = self.running.binary_search_by_key(&rank, |(other, _)| *other) {
            self.running.remove(at);
            self.step.seen = None;
            let adapter = self.sequences[slot].request.adapter_id();
            adapter.into_iter().for_each(|id| self.adapters.end_use(id));
        }
    }
}
