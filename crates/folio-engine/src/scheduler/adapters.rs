//! Whose weights are in memory, and whose are to come.
//!
//! Owns: which adapters are resident or being read, how many running sequences use each, and the limits of both. Must never: read weights,
//! or take those of a sequence that runs.
//!
//! A running sequence has the weights of its adapter ([`Running::adapter`](crate::sequence::Running)). Who is next and has an adapter that
//! is not in memory waits for that outside the queue ([`WaitingFor::Adapter`]), and nobody waits with it. Where there is no room, adapters go
//! that no running sequence uses, the least recently used first, but for those that somebody wants who comes before: so the first in the
//! queue gets what it needs, and no two take each other's by turns.
//!
//! Where too many are in use it waits in the queue, for the end of the last who uses one of them. Those without an adapter do not make that
//! longer, and neither are counted nor held up. Of those with one `max_bypasses` may pass it; then none behind it is admitted (`budget`)
//! until it has its weights.
//!
//! Cost: O(log resident) where a sequence begins or ends to run, and for weights that are to be read a look at those that are idle.

use std::collections::BTreeSet;
use std::sync::Arc;

use folio_kv::KvCache;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::Scheduler;
use crate::adapters::{Adapter, AdapterId, AdapterOrder, AdapterReport, ResidentAdapter};
use crate::plan::SequenceId;
use crate::request::Micros;
use crate::sequence::Slot;
use crate::stats::WaitingFor;

/// Adapters in memory, and those that are being read.
#[derive(Default)]
pub(super) struct ResidentAdapters {
    by_id: FxHashMap<AdapterId, AdapterState>,
    /// In memory, and used by no running sequence; the least recently used first.
    idle: BTreeSet<(u64, AdapterId)>,
    /// Those that running sequences use, and how many do.
    pub in_use: FxHashMap<AdapterId, u32>,
    /// Of all.
    bytes: u64,
    /// Times that one became idle.
    last_idle: u64,
    orders: Vec<AdapterOrder>,
}

struct AdapterState {
    /// `None`: they are being read.
    weights: Option<Arc<Adapter>>,
    bytes: u64,
    /// The number under which it is idle, or was.
    idle: u64,
    /// Who waits to run with it, and comes first of those who were looked at; it may have ended.
    wanted_by: Option<(SequenceId, Slot)>,
}

impl ResidentAdapters {
    /// How many there are, and their bytes.
    pub fn size(&self) -> (usize, u64) {
        (self.by_id.len(), self.bytes)
    }

    /// A running sequence uses it from now on. `None`: its weights are not in memory.
    pub fn begin_use(&mut self, id: AdapterId) -> Option<ResidentAdapter> {
        let resident = self.by_id.get(&id)?;
        let weights = resident.weights.clone()?;
        self.idle.remove(&(resident.idle, id));
        *self.in_use.entry(id).or_default() += 1;
        Some(ResidentAdapter { id, weights })
    }

    /// A running sequence uses it no more.
    pub fn end_use(&mut self, id: AdapterId) {
        let Some(users) = self.in_use.get_mut(&id) else { return };
        *users -= 1;
        if *users == 0 {
            self.in_use.remove(&id);
            self.rest(id);
        }
    }

    /// No running sequence uses it.
    fn rest(&mut self, id: AdapterId) {
        let Some(resident) = self.by_id.get_mut(&id) else { return };
        self.last_idle += 1;
        resident.idle = self.last_idle;
        self.idle.insert((self.last_idle, id));
    }

    fn insert(&mut self, id: AdapterId, weights: Option<Arc<Adapter>>, bytes: u64) {
        self.bytes += bytes;
        let is_there = weights.is_some();
        self.by_id.insert(id, AdapterState { weights, bytes, idle: 0, wanted_by: None });
        if is_there {
            self.rest(id);
        }
    }

    fn remove(&mut self, id: AdapterId) {
        let Some(resident) = self.by_id.remove(&id) else { return };
        self.idle.remove(&(resident.idle, id));
        self.bytes -= resident.bytes;
        self.orders.extend(resident.weights.map(AdapterOrder::Free));
    }

    fn is_being_read(&self, id: AdapterId) -> bool {
        self.by_id.get(&id).is_some_and(|resident| resident.weights.is_none())
    }
}

impl Scheduler {
    /// What is to be read and freed outside the steps. Each read ends with [`Scheduler::adapter_read`].
    pub fn adapter_orders(&mut self) -> Vec<AdapterOrder> {
        std::mem::take(&mut self.adapters.orders)
    }

    /// Weights were read, or could not be: who waits for them goes on, or ends with the error. Weights that were not ordered are kept where
    /// there is room beside all others.
    pub fn adapter_read(&mut self, cache: &mut KvCache, report: AdapterReport, now: Micros) {
        self.now = now;
        let AdapterReport { id, weights } = report;
        if !self.adapters.is_being_read(id) {
            return weights.into_iter().for_each(|weights| self.keep_adapter(id, weights));
        }
        self.counters.adapter_loads += 1;
        let error = match weights {
            Ok(weights) => {
                if let Some(resident) = self.adapters.by_id.get_mut(&id) {
                    resident.weights = Some(weights);
                }
                self.adapters.rest(id);
                None
            }
            Err(error) => {
                self.counters.failed_adapter_loads += 1;
                self.adapters.remove(id);
                Some(error)
            }
        };
        let mut waiting = std::mem::take(&mut self.step.order);
        waiting.clear();
        waiting.extend(self.suspended.iter().map(|(.., slot)| *slot).filter(|slot| {
            let sequence = &self.sequences[*slot];
            let waits = sequence.suspension().is_some_and(|wait| wait.reason == WaitingFor::Adapter);
            waits && sequence.request.adapter_id() == Some(id)
        }));
        for slot in waiting.drain(..) {
            match &error {
                None => self.resume_sequence(slot),
                Some(error) => self.end_with_error(cache, slot, error.as_str()),
            }
        }
        self.step.order = waiting;
    }

    fn keep_adapter(&mut self, id: AdapterId, weights: Arc<Adapter>) {
        let bytes = weights.bytes() as u64;
        let (count, held) = self.adapters.size();
        if !self.adapters.by_id.contains_key(&id) && self.adapter_fits(count, held, bytes) {
            self.adapters.insert(id, Some(weights), bytes);
        } else {
            self.adapters.orders.push(AdapterOrder::Free(weights));
        }
    }

    /// Whether another of so many bytes may be in memory beside so many.
    fn adapter_fits(&self, count: usize, held: u64, bytes: u64) -> bool {
        count < self.config.max_resident_adapters as usize
            && held.saturating_add(bytes) <= self.config.max_adapter_bytes
    }

    /// Whether a sequence that does not run lacks the weights of its adapter: then it waits for them, or in the queue for room.
    pub(super) fn waits_for_adapter(&mut self, slot: Slot) -> bool {
        let Some(id) = self.sequences[slot].request.adapter_id() else { return false };
        if !self.adapters.by_id.contains_key(&id) && !self.order_adapter(slot) {
            self.refuse(slot, WaitingFor::Turn);
            return true;
        }
        if !self.is_wanted_before(id, slot) {
            let by = Some((self.sequences[slot].id(), slot));
            self.adapters.by_id.get_mut(&id).into_iter().for_each(|resident| resident.wanted_by = by);
        }
        if let Some(waiting) = self.sequences[slot].waiting_mut() {
            waiting.lacks_adapter = false;
        }
        let waits = self.adapters.is_being_read(id);
        if waits {
            self.suspend_sequence(slot, WaitingFor::Adapter);
        }
        waits
    }

    /// Has the weights of its adapter read, in the place of others that are idle if it takes those. `false`: there is no room, and
    /// nothing changes.
    fn order_adapter(&mut self, slot: Slot) -> bool {
        let Some(adapter) = self.sequences[slot].request.adapter.clone() else { return false };
        let (id, bytes) = (adapter.id, adapter.source.bytes());
        let (mut count, mut held) = self.adapters.size();
        let mut going: SmallVec<[AdapterId; 4]> = SmallVec::new();
        for (_, idle) in &self.adapters.idle {
            if self.adapter_fits(count, held, bytes) {
                break;
            }
            if !self.is_wanted_before(*idle, slot) {
                (count, held) = (count - 1, held - self.adapters.by_id[idle].bytes);
                going.push(*idle);
            }
        }
        if !self.adapter_fits(count, held, bytes) {
            return false;
        }
        self.counters.adapter_evictions += going.len() as u64;
        going.into_iter().for_each(|idle| self.adapters.remove(idle));
        self.adapters.insert(id, None, bytes);
        self.adapters.orders.push(AdapterOrder::Read(adapter));
        true
    }

    /// Whether somebody who comes before waits to run with this adapter.
    fn is_wanted_before(&self, id: AdapterId, slot: Slot) -> bool {
        let wanted_by = self.adapters.by_id.get(&id).and_then(|resident| resident.wanted_by);
        wanted_by.is_some_and(|(other, at)| {
            // Who waits for something else outside does not come next.
            let waits = |reason: WaitingFor| !reason.is_outside() || reason == WaitingFor::Adapter;
            self.sequences.lives(other, at)
                && self.sequences[at].waiting().is_some_and(|waiting| waits(waiting.wait.reason))
                && self.queue_order(at) < self.queue_order(slot)
        })
    }

    /// For `check`: what is held is counted, within the limits, and what running sequences have.
    pub(super) fn check_adapters(&self) -> Result<(), String> {
        let ResidentAdapters { by_id, idle, in_use, bytes, .. } = &self.adapters;
        let mut used: FxHashMap<AdapterId, u32> = FxHashMap::default();
        for adapter in self.running.iter().filter_map(|(_, slot)| self.sequences[*slot].request.adapter_id())
        {
            *used.entry(adapter).or_default() += 1;
        }
        if used != *in_use || used.len() as u32 > self.config.max_adapters {
            let most = self.config.max_adapters;
            return Err(format!("{used:?} adapters are used, {in_use:?} counted, at most {most}"));
        }
        let held: u64 = by_id.values().map(|resident| resident.bytes).sum();
        let limits = (self.config.max_resident_adapters, self.config.max_adapter_bytes);
        if held != *bytes || by_id.len() > limits.0 as usize || held > limits.1 {
            let count = by_id.len();
            return Err(format!(
                "{count} adapters of {held} bytes are held, {bytes} counted, at most {limits:?}"
            ));
        }
        let is_idle = |id: &AdapterId, of: &AdapterState| of.weights.is_some() && !in_use.contains_key(id);
        let at_rest = by_id.iter().filter(|(id, of)| is_idle(id, of));
        let known = at_rest.clone().all(|(id, of)| idle.contains(&(of.idle, *id)));
        if !known || at_rest.count() != idle.len() {
            return Err(format!("others than {idle:?} are idle"));
        }
        for running in self.all_running() {
            let Some(ResidentAdapter { id, weights }) = &running.adapter else { continue };
            let own = by_id.get(id).and_then(|of| of.weights.as_ref());
            if own.is_none_or(|own| !Arc::ptr_eq(own, weights)) {
                return Err(format!("{id:?} runs and is not in memory"));
            }
        }
        Ok(())
    }
}
