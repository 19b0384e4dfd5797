//! The only way into the engine: a bounded queue of submissions and cancellations.
//!
//! Owns: the lock, the limits and the wake-up. Must never: look into a request beyond its size, or be held across a
//! step. Anyone may post; only the engine's thread receives.
//!
//! States: open -> draining (nothing new, the rest is finished) -> stopping (the rest is ended). They only move forward.
//! Queue limits cover a request from `post` until it is first scheduled: `in_mailbox` is what the engine has not taken
//! yet, `in_engine` is what it reported after its last step, and the sum is what `post` compares with the limit.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::vec::Drain;

use folio_kv::BlockHashes;

use crate::adapters::AdapterReport;
use crate::commands::{CacheCommand, CacheReply};
use crate::request::{EventSink, Micros, Request, RequestId};
use crate::tier::Report;

/// A request and where its events go.
pub(crate) struct Submission {
    pub request: Request,
    pub hashes: BlockHashes,
    pub sink: Box<dyn EventSink>,
}

/// Ends one choice, or all of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CancelRequest {
    pub request: RequestId,
    /// `None`: every choice.
    pub choice: Option<u32>,
}

/// Commands that may wait for the end of a step.
pub(crate) const COMMANDS_MAX: usize = 64;

/// What the engine takes out in one go; its memory is reused.
#[derive(Default)]
pub(crate) struct Incoming {
    pub submissions: Vec<Submission>,
    /// What the outbox made of the submissions: it keeps the sinks.
    pub requests: Vec<(Request, BlockHashes)>,
    pub cancellations: Vec<CancelRequest>,
    pub commands: Vec<(CacheCommand, CacheReply)>,
    pub reports: Vec<Report>,
    pub adapters: Vec<AdapterReport>,
}

impl Incoming {
    pub fn drain(&mut self) -> (Drain<'_, (Request, BlockHashes)>, Drain<'_, CancelRequest>) {
        (self.requests.drain(..), self.cancellations.drain(..))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    #[default]
    Open,
    Draining,
    Stopping,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Queued {
    pub requests: u32,
    pub tokens: u64,
}

#[derive(Default)]
struct MailboxState {
    incoming: Incoming,
    in_mailbox: Queued,
    in_engine: Queued,
    phase: Phase,
    unhealthy: Option<Arc<str>>,
    /// When the oldest submission that the engine has not taken was posted.
    oldest: Option<Micros>,
}

impl MailboxState {
    /// Why nothing is taken any more.
    fn closed(&self) -> Option<Refusal> {
        let unhealthy = self.unhealthy.clone().map(Refusal::Unhealthy);
        unhealthy.or_else(|| (self.phase != Phase::Open).then_some(Refusal::Closed))
    }

    fn queued(&self) -> Queued {
        Queued {
            requests: self.in_mailbox.requests + self.in_engine.requests,
            tokens: self.in_mailbox.tokens + self.in_engine.tokens,
        }
    }
}

pub(crate) enum Refusal {
    Full(Queued),
    Closed,
    Unhealthy(Arc<str>),
}

pub(crate) struct Mailbox {
    limit: Queued,
    state: Mutex<MailboxState>,
    posted: Condvar,
}

impl Mailbox {
    pub fn new(limit: Queued) -> Self {
        Self { limit, state: Mutex::default(), posted: Condvar::new() }
    }

    /// A panic while the lock is held cannot leave the state half changed: every critical section is a few moves.
    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request of so many tokens would be refused now: before anything is done for it.
    pub fn admits(&self, tokens: u64) -> Result<(), Refusal> {
        self.refusal(&self.lock(), tokens).map_or(Ok(()), Err)
    }

    fn refusal(&self, state: &MailboxState, tokens: u64) -> Option<Refusal> {
        let queued = state.queued();
        // One request is always taken into an empty queue, however long: it was already checked against the pool.
        let full = queued.requests >= self.limit.requests
            || (queued.requests > 0 && queued.tokens + tokens > self.limit.tokens);
        state.closed().or(full.then_some(Refusal::Full(queued)))
    }

    pub fn post(&self, submission: Submission, now: Micros) -> Result<(), Refusal> {
        let mut state = self.lock();
        let tokens = submission.request.queued_tokens();
        if let Some(refusal) = self.refusal(&state, tokens) {
            return Err(refusal);
        }
        state.in_mailbox.requests += 1;
        state.in_mailbox.tokens += tokens;
        state.oldest.get_or_insert(now);
        state.incoming.submissions.push(submission);
        drop(state);
        self.posted.notify_one();
        Ok(())
    }

    /// Dropping `reply` uncalled is the answer of an engine that has ended.
    pub fn command(&self, command: CacheCommand, reply: CacheReply) -> Result<(), Refusal> {
        let mut state = self.lock();
        if let Some(refusal) = state.closed() {
            return Err(refusal);
        }
        if state.incoming.commands.len() >= COMMANDS_MAX {
            return Err(Refusal::Full(Queued { requests: COMMANDS_MAX as u32, tokens: 0 }));
        }
        state.incoming.commands.push((command, reply));
        drop(state);
        self.posted.notify_one();
        Ok(())
    }

    /// Drops what will never be answered. Nothing can be posted any more.
    pub fn forget_commands(&self) {
        let commands = std::mem::take(&mut self.lock().incoming.commands);
        drop(commands);
    }

    /// Bounded by the number of living requests: a flag posts once, a choice is ended once by its reader.
    pub fn cancel(&self, cancel: CancelRequest) {
        self.lock().incoming.cancellations.push(cancel);
        self.posted.notify_one();
    }

    /// Bounded by the transfers that were asked for: each is reported once.
    pub fn report_transfer(&self, report: Report) {
        self.lock().incoming.reports.push(report);
        self.posted.notify_one();
    }

    /// Bounded by the adapters that are to be read, and by those that come with their weights.
    pub fn report_adapter(&self, report: AdapterReport) {
        self.lock().incoming.adapters.push(report);
        self.posted.notify_one();
    }

    /// Takes everything that was posted; while there is nothing it waits for so long, or until somebody posts.
    pub fn receive(&self, into: &mut Incoming, patience: Option<Duration>) -> Phase {
        let mut state = self.lock();
        let idle = |state: &mut MailboxState| {
            state.incoming.submissions.is_empty()
                && state.incoming.cancellations.is_empty()
                && state.incoming.commands.is_empty()
                && state.incoming.reports.is_empty()
                && state.incoming.adapters.is_empty()
                && state.phase == Phase::Open
        };
        state = match patience {
            Some(limit) if limit.is_zero() => state,
            Some(limit) => {
                self.posted.wait_timeout_while(state, limit, idle).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.posted.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner),
        };
        into.submissions.append(&mut state.incoming.submissions);
        into.cancellations.append(&mut state.incoming.cancellations);
        into.commands.append(&mut state.incoming.commands);
        into.reports.append(&mut state.incoming.reports);
        into.adapters.append(&mut state.incoming.adapters);
        state.oldest = None;
        let taken = std::mem::take(&mut state.in_mailbox);
        state.in_engine.requests += taken.requests;
        state.in_engine.tokens += taken.tokens;
        state.phase
    }

    /// What the engine holds that was never scheduled.
    pub fn report(&self, in_engine: Queued) {
        self.lock().in_engine = in_engine;
    }

    pub fn queued(&self) -> Queued {
        self.lock().queued()
    }

    /// When the oldest submission that the engine has not taken was posted.
    pub fn oldest(&self) -> Option<Micros> {
        self.lock().oldest
    }

    pub fn advance(&self, phase: Phase) {
        let mut state = self.lock();
        state.phase = state.phase.max(phase);
        drop(state);
        self.posted.notify_one();
    }

    pub fn set_unhealthy(&self, reason: Arc<str>) {
        self.lock().unhealthy = Some(reason);
    }
}
