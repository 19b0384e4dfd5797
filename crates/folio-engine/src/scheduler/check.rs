//! The scheduler's invariants, verified in full. For tests and the simulator; changes nothing.

use folio_kv::{BlockTable, KvCache, TenantId};

use super::Scheduler;
use crate::plan::SequenceId;
use crate::request::RequestId;

impl Scheduler {
    /// What does not hold, in words, or nothing. Valid between steps, and while one that was planned ahead is under way.
    /// O(everything).
    pub fn check(&self, cache: &KvCache) -> Result<(), String> {
        let tables: Vec<&BlockTable> =
            self.sequences.iter().filter_map(|sequence| sequence.table.as_ref()).collect();
        cache.check(&tables).map_err(|violation| violation.to_string())?;
        let copies: Vec<_> = self.copies().map(|(_, copy)| copy).collect();
        cache.check_swapped(&copies).map_err(|violation| violation.to_string())?;
        let total = self.sequences.iter().count();
        if total != self.running.len() + self.waiting.len() {
            return Err(format!(
                "{total} sequences, {} run and {} wait",
                self.running.len(),
                self.waiting.len()
            ));
        }
        let counted = self.waiting.fair.counted();
        if counted != (self.waiting.len(), total) {
            return Err(format!("{counted:?} sequences wait and live in the tenants' accounts, not {total}"));
        }
        if !self.running.is_sorted_by(|a, b| a.0 < b.0) {
            return Err("the running list is out of order".into());
        }
        for (_, slot) in &self.running {
            let sequence = &self.sequences[*slot];
            // A step that was planned ahead is under way: one row of each of its sequences.
            let planned = self.planned.contains(&(sequence.id(), *slot));
            if !sequence.is_running() || sequence.table.is_none() || sequence.granted != u32::from(planned) {
                return Err(format!("{:?} is in the running list and not running", sequence.id()));
            }
            if sequence.swapped.is_some() {
                return Err(format!("{:?} runs and still has its copy", sequence.id()));
            }
            if sequence.table.as_ref().is_some_and(|table| table.computed() != sequence.computed) {
                return Err(format!("{:?} and its table disagree on what is computed", sequence.id()));
            }
        }
        for slot in self.waiting.iter() {
            let sequence = &self.sequences[slot];
            if sequence.is_running() || sequence.table.is_some() || sequence.computed != 0 {
                return Err(format!("{:?} waits and holds something", sequence.id()));
            }
        }
        let reserved = self.running.iter().filter(|(_, slot)| self.sequences[*slot].reserved).count();
        if self.config.guarantee_completion
            && (reserved < self.running.len() || self.counters.preemptions > 0)
        {
            let (running, preemptions) = (self.running.len(), self.counters.preemptions);
            return Err(format!(
                "completion is guaranteed, but {reserved} of {running} have a reservation and {preemptions} were preempted"
            ));
        }
        if reserved != self.scratch.reserved.len() {
            return Err(format!("{reserved} reservations, {} counted", self.scratch.reserved.len()));
        }
        if self.running.len() as u32 > self.config.max_num_seqs {
            return Err(format!(
                "{} sequences run, the limit is {}",
                self.running.len(),
                self.config.max_num_seqs
            ));
        }
        self.check_requests()
    }

    /// Every block table there is, and whose it is.
    pub fn tables(&self) -> impl Iterator<Item = (RequestId, TenantId, &BlockTable)> {
        self.sequences.iter().filter_map(|sequence| {
            sequence.table.as_ref().map(|table| (sequence.request, sequence.tenant, table))
        })
    }

    /// Running sequences that lack one token: each belongs into the next plan, unless it is cancelled or preempted. (With
    /// a reservation a stall of a step is possible.)
    pub fn one_token_short(&self) -> impl Iterator<Item = SequenceId> {
        let running = self.running.iter().map(|(_, slot)| &self.sequences[*slot]);
        running
            .filter(|sequence| sequence.remaining() == 1 && !sequence.reserved)
            .map(|sequence| sequence.id())
    }

    fn check_requests(&self) -> Result<(), String> {
        for sequence in self.sequences.iter() {
            if sequence.computed as usize >= sequence.tokens.len() {
                return Err(format!("{:?} has nothing left to compute", sequence.id()));
            }
            if sequence.timing.preemptions > self.config.max_preemptions {
                return Err(format!(
                    "{:?} was preempted {} times",
                    sequence.id(),
                    sequence.timing.preemptions
                ));
            }
        }
        let members: usize = self.groups.values().map(|group| group.members.len()).sum();
        if members != self.sequences.iter().count() {
            return Err(format!("{members} members for {} sequences", self.sequences.iter().count()));
        }
        if self.groups.is_empty()
            && (self.in_flight.len() != 0 || !self.deadlines.is_empty() || self.queued.requests != 0)
        {
            return Err("something is left of requests that ended".into());
        }
        Ok(())
    }
}

impl std::fmt::Debug for Scheduler {
    /// One line per sequence: what a person needs to see why nothing moves.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "step {}, {} running, {} waiting", self.step, self.running.len(), self.waiting.len())?;
        let order = self.running.iter().map(|(_, slot)| *slot).chain(self.waiting.iter());
        for slot in order {
            let s = &self.sequences[slot];
            writeln!(
                f,
                "  {:?} of {:?} priority {}: {} of {} known computed, {} blocks, up to {} positions, {:?}{}, preempted {}, passed {}",
                s.id(),
                s.request,
                s.rank.priority,
                s.computed,
                s.tokens.len(),
                s.table.as_ref().map_or(0, |table| table.blocks().len()),
                s.final_positions(),
                s.state,
                if s.reserved { " (reserved)" } else { "" },
                s.timing.preemptions,
                s.bypassed,
            )?;
        }
        Ok(())
    }
}
