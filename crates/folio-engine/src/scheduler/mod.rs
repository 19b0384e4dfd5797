//! Who runs, on which tokens, in which blocks: a pure state machine.
//!
//! Owns: every sequence from admission to its last event. Must never: read a clock, do I/O, use randomness, or see a
//! tensor. Time, requests and results are passed in; plans and events come out.
//!
//! A step is [`Scheduler::plan`], then the executor, then [`Scheduler::commit`]. Between two steps a sequence either
//! holds blocks (`running`) or holds none (`waiting`); nothing else exists, in particular no prefill or decode phase. While
//! everybody decodes, [`Scheduler::ahead`] plans the next step before this one is committed.
//!
//! | file | noun |
//! |---|---|
//! | `admission` | may this sequence get blocks now? |
//! | `queue`, `fair` | who waits, and which tenant's turn it is |
//! | `share` | who gets how much of a step's token budget |
//! | `in_flight` | prefixes that are being computed right now |
//! | `preemption` | who loses its blocks |
//! | `swap`, `costs` | what of them is kept in host memory, because computing it again would cost more |
//! | `build` | the plan's memory |
//! | `ahead` | the next plan, while a step runs |
//! | `commit` | what a result changes |
//! | `group` | the choices of one request |
//! | `figures` | what is reported |
//!
//! Invariants, checked by [`Scheduler::check`]: `running` and `waiting` are disjoint and hold every sequence; a running
//! sequence has a table and a waiting one has none; granted tokens never exceed the budget; every request in `groups`
//! still owes at least one `Finished`.
//!
//! Cost: O(running) per step plus a bounded look at the waiting queue; nothing is proportional to context length except
//! what grows with it once (hashing a prompt, releasing a table). After warm-up a step allocates nothing unless a
//! request arrives, forks or ends.

mod admission;
mod ahead;
mod build;
mod check;
mod commit;
mod costs;
mod fair;
mod figures;
mod group;
mod in_flight;
mod preemption;
mod queue;
mod share;
mod swap;

use std::collections::BTreeSet;

use folio_kv::KvCache;
use rustc_hash::FxHashMap;

use crate::config::{ConfigError, SchedulerConfig};
use crate::mailbox::CancelRequest;
use crate::plan::{SequenceId, StepPlan};
use crate::request::{Event, Micros, Request, RequestId};
use crate::sequence::{Rank, Sequences, Slot};
use crate::stats::{Counters, TenantFigures};
use ahead::{Behind, Since};
use costs::Costs;
use group::Group;
use in_flight::InFlight;
use queue::Queue;

/// See the module documentation.
pub struct Scheduler {
    config: SchedulerConfig,
    sequences: Sequences,
    groups: FxHashMap<RequestId, Group>,
    /// Sequences that hold blocks, best rank first.
    running: Vec<(Rank, Slot)>,
    /// Sequences that hold none.
    waiting: Queue,
    deadlines: BTreeSet<(Micros, RequestId)>,
    cancelled: Vec<CancelRequest>,
    in_flight: InFlight,
    costs: Costs,
    plan: StepPlan,
    /// Whose entries `plan.sequences` holds, in the same order, until it is committed. A sequence that ended meanwhile may have left
    /// its slot to another.
    planned: Vec<(SequenceId, Slot)>,
    behind: Behind,
    since: Since,
    events: Vec<(RequestId, Event)>,
    counters: Counters,
    tenants: FxHashMap<folio_kv::TenantId, TenantFigures>,
    queued: crate::mailbox::Queued,
    next_sequence: u64,
    next_arrival: u64,
    /// Number of the step being planned.
    step: u64,
    now: Micros,
    /// When the step being run was planned, or the step before it ended.
    planned_at: Micros,
    scratch: share::Scratch,
    last_decodes: u32,
    last_tokens: u32,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let waiting = Queue::new(&config);
        Ok(Self {
            config,
            sequences: Sequences::default(),
            groups: FxHashMap::default(),
            running: Vec::new(),
            waiting,
            deadlines: BTreeSet::new(),
            cancelled: Vec::new(),
            in_flight: InFlight::default(),
            costs: Costs::default(),
            plan: StepPlan::default(),
            planned: Vec::new(),
            behind: Behind::default(),
            since: Since::default(),
            events: Vec::new(),
            counters: Counters::default(),
            tenants: FxHashMap::default(),
            queued: Default::default(),
            next_sequence: 0,
            next_arrival: 0,
            step: 0,
            now: Micros(0),
            planned_at: Micros(0),
            scratch: Default::default(),
            last_decodes: 0,
            last_tokens: 0,
        })
    }

    /// Takes in what arrived since the last step. Requests were already checked against the limits
    /// ([`crate::EngineHandle::submit`]). A cancellation of something that has already ended is ignored.
    pub fn admit(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        cancellations: impl IntoIterator<Item = CancelRequest>,
        now: Micros,
    ) {
        for request in requests {
            self.accept(request, now);
        }
        self.cancelled.extend(cancellations);
    }

    /// Decides the next step. Blocks of whatever was cancelled or is overdue are free before anything is decided.
    ///
    /// 1. Every running sequence that lacks one token gets it: decodes never wait for prompts.
    /// 2. The rest of the budget goes to prompts (see `share`), those of waiting sequences included (see `admission`).
    ///
    /// Every step planned before was committed.
    pub fn plan(&mut self, cache: &mut KvCache, now: Micros) -> &StepPlan {
        debug_assert!(!self.under_way(), "a step is under way");
        self.now = now;
        self.planned_at = now;
        self.since = Since::default();
        self.step += 1;
        cache.advance(now.0);
        self.plan.step = self.step;
        self.plan.copies.clear();
        self.scratch.copy_owners.clear();
        self.plan.swap_ins.clear();
        self.scratch.swap_in_owners.clear();
        self.reap(cache);
        let decodes = self.grant_decodes(cache);
        self.grant_prompts(cache, decodes);
        self.build();
        &self.plan
    }

    /// Something holds or wants blocks, an event is owed, or a step is not committed.
    pub fn has_work(&self) -> bool {
        self.under_way() || !self.groups.is_empty() || !self.cancelled.is_empty() || !self.events.is_empty()
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
        let mut ids: Vec<RequestId> = self.groups.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.end_request(cache, id, crate::request::FinishReason::Error, Some(error.into()));
        }
        &mut self.events
    }

    /// Whether somebody was refused blocks in the last planned step.
    pub fn contended(&self) -> bool {
        !self.scratch.refused.is_empty()
    }

    /// Requests that were never scheduled, for the queue limits.
    pub(crate) fn queued(&self) -> crate::mailbox::Queued {
        self.queued
    }

    fn new_sequence_id(&mut self) -> SequenceId {
        self.next_sequence += 1;
        SequenceId(self.next_sequence)
    }

    fn start_running(&mut self, slot: Slot) {
        let rank = self.sequences[slot].rank;
        let at = self.running.partition_point(|(other, _)| *other < rank);
        self.running.insert(at, (rank, slot));
    }

    fn stop_running(&mut self, slot: Slot) {
        let rank = self.sequences[slot].rank;
        if let Ok(at) = self.running.binary_search_by_key(&rank, |(other, _)| *other) {
            self.running.remove(at);
        }
    }
}
