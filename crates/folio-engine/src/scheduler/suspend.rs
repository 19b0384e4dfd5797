//! Sequences that wait for something outside the steps: a mask, KV of another tier or engine, the weights of an adapter.
//!
//! Owns: who is suspended, and until when. Must never: hold up anybody else.
//!
//! A suspended sequence gets no rows, in whichever state it is; rows of it that are under way are committed. It keeps what it holds as
//! long as nobody else needs it. A report ends that ([`Scheduler::resume`]; of a mask, the guide's own word), or its deadline
//! ([`WaitingFor::until`]): then it is computed without what it waited for, or ends with an error where that cannot be.
//!
//! Cost: O(log suspended) each time, and per plan a look at every guide that is late.

use folio_kv::KvCache;

use super::Scheduler;
use crate::request::{Micros, RequestId};
use crate::sequence::{Slot, State, Wait};
use crate::stats::WaitingFor;

impl Scheduler {
    /// Sequences of `request` get no rows until it is resumed. Those that wait for something outside already go on with that alone.
    pub fn suspend(&mut self, request: RequestId, reason: WaitingFor, now: Micros) {
        debug_assert!(reason.is_outside(), "{reason:?} ends with the progress of others");
        self.now = now;
        let members = self.requests.get(&request).map(|state| state.members.clone());
        members.into_iter().flatten().for_each(|slot| self.suspend_sequence(slot, reason));
    }

    /// What `request` waited for is there, or will never be. Nothing happens if it does not wait for that any more, or for a transfer,
    /// which reports by itself ([`Scheduler::end_load`]).
    pub fn resume(&mut self, request: RequestId, reason: WaitingFor, now: Micros) {
        self.now = now;
        let members = self.requests.get(&request).map(|state| state.members.clone());
        for slot in members.into_iter().flatten() {
            let sequence = &self.sequences[slot];
            let loads = sequence.running().is_some_and(|running| running.table.has_transfers());
            let waits = sequence.suspension().is_some_and(|wait| wait.reason == reason);
            if waits && !(loads && reason == WaitingFor::TierLoad) {
                self.resume_sequence(slot);
            }
        }
    }

    /// Sequences that wait for something outside.
    pub fn suspended(&self) -> usize {
        self.suspended.len()
    }

    pub(super) fn suspend_sequence(&mut self, slot: Slot, reason: WaitingFor) {
        let wait = Wait { reason, since: self.now };
        let sequence = &mut self.sequences[slot];
        if sequence.suspension().is_some() {
            return;
        }
        self.suspended.insert((wait.until(&self.config), sequence.id(), slot));
        match &mut sequence.state {
            State::Waiting(_) => self.wait_for(slot, reason),
            State::Running(running) => {
                running.suspended = Some(wait);
                if reason != WaitingFor::TierLoad {
                    // Nobody waits for a prefix that may not come. What a tier does not bring is computed.
                    self.shared_prefixes.withdraw(slot, &sequence.hashes, &mut running.announced);
                }
                self.waiting.changes(None, Some(reason));
                self.counters.waits[reason] += 1;
            }
        }
    }

    pub(super) fn resume_sequence(&mut self, slot: Slot) {
        self.forget_suspension(slot);
        match &mut self.sequences[slot].state {
            State::Waiting(_) => self.wait_for(slot, WaitingFor::Turn),
            State::Running(running) => {
                if let Some(wait) = running.suspended.take() {
                    self.waiting.changes(Some(wait.reason), None);
                    self.waited(slot, wait);
                    self.wait_for_load(slot);
                }
            }
        }
    }

    /// It has no deadline any more: it goes on, or ends.
    pub(super) fn forget_suspension(&mut self, slot: Slot) {
        let sequence = &self.sequences[slot];
        if let Some(wait) = sequence.suspension() {
            self.suspended.remove(&(wait.until(&self.config), sequence.id(), slot));
        }
    }

    /// Resumes whose mask is there, and ends waits that are overdue.
    pub(super) fn wake(&mut self, cache: &mut KvCache) {
        if self.suspended.is_empty() {
            return;
        }
        let mut ready = std::mem::take(&mut self.step.order);
        ready.clear();
        ready.extend(self.suspended.iter().map(|(.., slot)| *slot).filter(|slot| {
            let sequence = &self.sequences[*slot];
            let late = sequence.suspension().is_some_and(|wait| wait.reason == WaitingFor::Grammar);
            late && sequence.guide.as_ref().is_none_or(|guide| guide.0.is_ready(&[]))
        }));
        ready.drain(..).for_each(|slot| self.resume_sequence(slot));
        self.step.order = ready;
        while let Some((until, _, slot)) = self.suspended.first().copied()
            && until < self.now
        {
            self.expire(cache, slot);
        }
    }

    fn expire(&mut self, cache: &mut KvCache, slot: Slot) {
        let Some(wait) = self.sequences[slot].suspension() else { return };
        let s = wait.until(&self.config).0.saturating_sub(wait.since.0) as f64 / 1e6;
        let error = match wait.reason {
            WaitingFor::Grammar => {
                let name =
                    self.sequences[slot].params.rules.as_ref().map_or("its grammar", |rules| rules.0.name());
                format!(
                    "what '{name}' allows next was not known within {s} s: the grammar is too slow, or the machine too busy"
                )
            }
            WaitingFor::Adapter => format!("the weights of its adapter were not loaded within {s} s"),
            reason => {
                // Computed here.
                if reason == WaitingFor::TierLoad && self.sequences[slot].is_running() {
                    self.drop_loads(cache, slot);
                }
                return self.resume_sequence(slot);
            }
        };
        self.expired(wait);
        self.end_with_error(cache, slot, error);
    }

    /// A wait is over.
    pub(super) fn waited(&mut self, slot: Slot, wait: Wait) {
        self.expired(wait);
        let us = self.now.0.saturating_sub(wait.since.0);
        self.sequences[slot].timing.waited_us[wait.reason] += us;
    }

    fn expired(&mut self, wait: Wait) {
        self.counters.waits_expired[wait.reason] += u64::from(wait.is_over(self.now, &self.config));
    }
}
