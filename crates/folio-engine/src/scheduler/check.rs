//! The scheduler's invariants, verified in full. For tests and the simulator; changes nothing.

use folio_kv::{BlockTable, KvCache, TenantId, Ticket};

use super::Scheduler;
use crate::plan::SequenceId;
use crate::request::{AdapterId, Micros, RequestId};
use crate::sequence::{Running, Sequence, Slot};
use crate::stats::PerReason;

impl Scheduler {
    /// What does not hold, in words, or nothing. Valid whenever nothing is being planned or committed.
    /// O(everything).
    pub fn check(&self, cache: &KvCache) -> Result<(), String> {
        self.check_beside(cache, [])
    }

    /// The same where others have tables, too.
    pub fn check_beside<'a>(
        &'a self,
        cache: &KvCache,
        others: impl IntoIterator<Item = &'a BlockTable>,
    ) -> Result<(), String> {
        let tables: Vec<&BlockTable> = self.tables().map(|(_, _, table)| table).chain(others).collect();
        cache.check(&tables).map_err(|violation| violation.to_string())?;
        let total = self.sequences.len();
        let outside = self.sequences.iter().filter(|s| !s.is_running() && s.suspension().is_some()).count();
        if total != self.running.len() + self.waiting.len() + outside {
            let (running, waiting) = (self.running.len(), self.waiting.len());
            return Err(format!(
                "{total} sequences, {running} run, {waiting} wait and {outside} are suspended"
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
            self.check_running(cache, *slot)?;
        }
        self.check_waits()?;
        let used = self.all_running().map(|running| running.table_slot);
        let mut slots: Vec<u32> = used.chain(self.table_slots.iter().copied()).collect();
        slots.sort_unstable();
        if !slots.iter().copied().eq(0..slots.len() as u32) {
            return Err(format!("slots of block tables are shared or lost: {slots:?}"));
        }
        if self.all_running().filter(|running| running.preempted).count() as u32 != self.preempting {
            return Err(format!("{} victims wait for their last commit, others are marked", self.preempting));
        }
        let reserved = self.all_running().filter(|running| running.reserved.is_some()).count();
        if self.config.guarantee_completion
            && (reserved < self.running.len() || self.counters.preemptions > 0)
        {
            let (running, preemptions) = (self.running.len(), self.counters.preemptions);
            return Err(format!(
                "completion is guaranteed, but {reserved} of {running} have a reservation and {preemptions} were preempted"
            ));
        }
        let mut sum = folio_kv::GroupCounts::default();
        self.all_running().filter_map(|running| running.reserved).for_each(|blocks| sum += blocks);
        if (sum, reserved as u32) != self.reservations.blocks() {
            return Err(format!(
                "{reserved} reservations of {sum} blocks, {:?} counted",
                self.reservations.blocks()
            ));
        }
        let adapters = self.reservations.adapters();
        let uses = |(adapter, count): (&AdapterId, &u32)| {
            let of = |(_, slot): &&(_, Slot)| self.sequences[*slot].request.adapter_id() == Some(*adapter);
            self.running.iter().filter(of).count() as u32 == *count
        };
        let used = self.running.iter().filter_map(|(_, slot)| self.sequences[*slot].request.adapter_id());
        let users: u32 = adapters.values().sum();
        if used.count() as u32 != users
            || !adapters.iter().all(uses)
            || adapters.len() as u32 > self.config.max_adapters
        {
            return Err(format!("{adapters:?} are used, at most {}", self.config.max_adapters));
        }
        for sequence in self.sequences.iter() {
            let mut tickets = sequence.table().into_iter().flat_map(|table| table.tickets());
            let knows = |own: &Ticket| self.loads.get(own).map(|load| load.owner.0) == Some(sequence.id());
            if let Some(ticket) = tickets.find(|own| !knows(own)) {
                return Err(format!("{ticket:?} does not know that {:?} waits for it", sequence.id()));
            }
        }
        self.check_prefetches()?;
        if self.running.len() as u32 > self.config.max_num_seqs {
            return Err(format!(
                "{} sequences run, the limit is {}",
                self.running.len(),
                self.config.max_num_seqs
            ));
        }
        self.check_requests()
    }

    /// Who waits is counted by what it waits for, and has its deadline if that is outside.
    fn check_waits(&self) -> Result<(), String> {
        let mut counts = PerReason::default();
        for sequence in self.sequences.iter() {
            let waits = sequence.waiting().map(|waiting| waiting.wait).or(sequence.suspension());
            waits.into_iter().for_each(|wait| counts[wait.reason] += 1);
        }
        if counts != self.waiting.counts() {
            return Err(format!("{counts:?} wait, {:?} are counted", self.waiting.counts()));
        }
        if let Some(slot) = self.waiting.iter().find(|slot| self.sequences[*slot].is_running()) {
            return Err(format!("{:?} is in the queue and runs", self.sequences[slot].id()));
        }
        let outside = self.sequences.iter().filter(|sequence| sequence.suspension().is_some()).count();
        let has_deadline = |(until, id, slot): &(Micros, SequenceId, Slot)| {
            let wait = self.sequences.lives(*id, *slot).then(|| self.sequences[*slot].suspension()).flatten();
            wait.is_some_and(|wait| wait.until(&self.config) == *until)
        };
        match outside == self.suspended.len() && self.suspended.iter().all(has_deadline) {
            true => Ok(()),
            false => Err(format!("{outside} are suspended, their deadlines are {:?}", self.suspended)),
        }
    }

    /// Its progress is that of the steps under way, and it has what was set aside for it.
    fn check_running(&self, cache: &KvCache, slot: Slot) -> Result<(), String> {
        let sequence = &self.sequences[slot];
        let fail = |what: &str| Err(format!("{:?} {what}", sequence.id()));
        let Some(running) = sequence.running() else { return fail("is in the running list and waits") };
        let (mut steps, mut rows, mut pending, mut drafts) = (0, 0, 0, 0);
        for planned in self.ring.begun.iter().flat_map(|begun| &begun.planned) {
            if planned.id == sequence.id() {
                steps += 1;
                rows += planned.rows;
                pending += u32::from(planned.names);
                drafts += planned.drafts;
            }
        }
        if (running.begun_steps, running.pending, running.granted) != (steps, pending, 0) {
            return fail("counts other steps under way than there are");
        }
        if running.scheduled != running.table.computed() + rows
            || running.scheduled > running.table.capacity()
        {
            return fail("is scheduled further than its rows or its blocks reach");
        }
        if running.scheduled > sequence.known() + running.pending + drafts {
            return fail("is scheduled beyond what is known and pending");
        }
        if running.never_ran() && steps == 0 {
            return fail("was attached and never ran");
        }
        let missing = self.missing(cache, slot, sequence.final_positions());
        if running.reserved.is_some_and(|reserved| !missing.fits(reserved)) {
            return fail(&format!("needs {missing}, {:?} is set aside for it", running.reserved));
        }
        Ok(())
    }

    /// Every block table there is, and whose it is.
    pub fn tables(&self) -> impl Iterator<Item = (RequestId, TenantId, &BlockTable)> {
        self.sequences.iter().filter_map(|sequence| {
            sequence.table().map(|table| (sequence.request_id, sequence.tenant, table))
        })
    }

    /// Running sequences that lack one token and are part of no unfinished step: each belongs into the next plan, unless it is
    /// cancelled or preempted. (With a reservation a stall of a step is possible.)
    pub fn one_token_short(&self) -> impl Iterator<Item = SequenceId> {
        let running = self.running.iter().map(|(_, slot)| &self.sequences[*slot]);
        let short = |sequence: &&Sequence| {
            let held = sequence.has_reservation() || sequence.suspension().is_some();
            sequence.remaining() == 1 && !held && !sequence.is_under_way()
        };
        running.filter(short).map(|sequence| sequence.id())
    }

    fn check_requests(&self) -> Result<(), String> {
        for sequence in self.sequences.iter() {
            if sequence.computed() >= sequence.known() {
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
        let members: usize = self.requests.values().map(|state| state.members.len()).sum();
        if members != self.sequences.iter().count() {
            return Err(format!("{members} members for {} sequences", self.sequences.iter().count()));
        }
        if self.requests.is_empty()
            && (self.shared_prefixes.len() != 0 || !self.deadlines.is_empty() || self.queued.requests != 0)
        {
            return Err("something is left of requests that ended".into());
        }
        Ok(())
    }
}

impl std::fmt::Debug for Scheduler {
    /// One line per sequence: what a person needs to see why nothing moves.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        writeln!(f, "step {}, {running} running, {waiting} waiting", self.next_step())?;
        for s in self.sequences.iter() {
            let (id, request, rank, known, last) =
                (s.id(), s.request.id, s.rank, s.known(), s.final_positions());
            write!(f, "  {id:?} of {request:?} class {} priority {}: ", rank.class, rank.priority)?;
            write!(f, "{} of {known} known computed, up to {last}, ", s.computed())?;
            match (s.running(), s.waiting()) {
                (Some(r), _) => {
                    let Running { scheduled, begun_steps, reserved, preempted, .. } = r;
                    let blocks = r.table.blocks().len();
                    write!(f, "{blocks} blocks, {scheduled} scheduled in {begun_steps} steps, ")?;
                    write!(f, "reserved {reserved:?}, victim {preempted}, suspended {:?}", r.suspended)?;
                }
                (_, Some(w)) => write!(f, "{:?}, passed {}", w.wait, w.bypassed)?,
                _ => {}
            }
            writeln!(f, ", preempted {}", s.timing.preemptions)?;
        }
        Ok(())
    }
}
