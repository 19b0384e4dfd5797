//! The scheduler's invariants, verified in full. For tests and the simulator; changes nothing.

use folio_kv::{BlockTable, GroupCounts, KvCache, TenantId, Ticket};

use super::Scheduler;
use crate::plan::SequenceId;
use crate::request::{Micros, RequestId};
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
        cache.check(&tables)?;
        let (total, running, waiting) = (self.sequences.len(), self.running.len(), self.waiting.len());
        let outside = self.sequences.iter().filter(|s| !s.is_running() && s.suspension().is_some()).count();
        ensure(total == running + waiting + outside, || {
            format!("{total} sequences, {running} run, {waiting} wait and {outside} are suspended")
        })?;
        let counted = self.waiting.fair.counted();
        ensure(counted == (waiting, total), || {
            format!("{counted:?} sequences wait and live in the tenants' accounts, not {total}")
        })?;
        ensure(self.running.is_sorted_by(|a, b| a.0 < b.0), || "the running list is out of order".into())?;
        ensure(running as u32 <= self.config.max_num_seqs, || {
            format!("{running} sequences run, the limit is {}", self.config.max_num_seqs)
        })?;
        self.running.iter().try_for_each(|(_, slot)| self.check_running(cache, *slot))?;
        self.check_waits()?;
        let used = self.all_running().map(|running| running.table_slot);
        let mut slots: Vec<u32> = used.chain(self.table_slots.iter().copied()).collect();
        slots.sort_unstable();
        ensure(slots.iter().copied().eq(0..slots.len() as u32), || {
            format!("slots of block tables are shared or lost: {slots:?}")
        })?;
        let victims = self.all_running().filter(|running| running.preempted).count() as u32;
        ensure(victims == self.preempting, || {
            format!("{victims} victims wait for their last commit, {} are counted", self.preempting)
        })?;
        self.check_reservations()?;
        self.check_adapters()?;
        for sequence in self.sequences.iter() {
            let mut tickets = sequence.table().into_iter().flat_map(|table| table.tickets());
            let knows = |own: &Ticket| self.loads.get(own).map(|load| load.owner.0) == Some(sequence.id());
            let unknown = tickets.find(|own| !knows(own));
            ensure(unknown.is_none(), || {
                format!("{unknown:?} does not know that {:?} waits for it", sequence.id())
            })?;
        }
        self.check_prefetches()?;
        self.check_requests()
    }

    /// What is set aside for those who run is counted.
    fn check_reservations(&self) -> Result<(), String> {
        let (running, preemptions) = (self.running.len(), self.counters.preemptions);
        let reserved = self.all_running().filter_map(|running| running.reserved);
        let (reserved, sum) = reserved.fold((0, GroupCounts::default()), |(count, mut sum), blocks| {
            sum += blocks;
            (count + 1, sum)
        });
        ensure(
            !self.config.guarantee_completion || (reserved as usize == running && preemptions == 0),
            || {
                format!(
                    "completion is guaranteed: {reserved} of {running} have a reservation, {preemptions} were preempted"
                )
            },
        )?;
        let counted = self.reservations.blocks();
        ensure((sum, reserved) == counted, || {
            format!("{reserved} reservations of {sum} blocks, {counted:?} counted")
        })
    }

    /// Who waits is counted by what it waits for, and has its deadline if that is outside.
    fn check_waits(&self) -> Result<(), String> {
        let mut counts = PerReason::default();
        for sequence in self.sequences.iter() {
            let waits = sequence.waiting().map(|waiting| waiting.wait).or(sequence.suspension());
            waits.into_iter().for_each(|wait| counts[wait.reason] += 1);
        }
        let counted = self.waiting.counts;
        ensure(counts == counted, || format!("{counts:?} wait, {counted:?} are counted"))?;
        let mut queued = self.waiting.iter().map(|slot| &self.sequences[slot]);
        queued.try_for_each(|sequence| {
            ensure(!sequence.is_running(), || format!("{:?} is in the queue and runs", sequence.id()))
        })?;
        let outside = self.sequences.iter().filter(|sequence| sequence.suspension().is_some()).count();
        let has_deadline = |(until, id, slot): &(Micros, SequenceId, Slot)| {
            let wait = self.sequences.lives(*id, *slot).then(|| self.sequences[*slot].suspension()).flatten();
            wait.is_some_and(|wait| wait.until(&self.config) == *until)
        };
        ensure(outside == self.suspended.len() && self.suspended.iter().all(has_deadline), || {
            format!("{outside} are suspended, their deadlines are {:?}", self.suspended)
        })
    }

    /// Its progress is that of the steps under way, and it has what was set aside for it.
    fn check_running(&self, cache: &KvCache, slot: Slot) -> Result<(), String> {
        let sequence = &self.sequences[slot];
        let holds = |holds: bool, what: &str| ensure(holds, || format!("{:?} {what}", sequence.id()));
        let Some(running) = sequence.running() else {
            return holds(false, "is in the running list and waits");
        };
        let (mut steps, mut rows, mut pending, mut drafts) = (0, 0, 0, 0);
        for planned in self.ring.begun.iter().flat_map(|begun| &begun.planned) {
            if planned.id == sequence.id() {
                steps += 1;
                rows += planned.rows;
                pending += u32::from(planned.names);
                drafts += planned.drafts;
            }
        }
        let (scheduled, known) = (running.scheduled, sequence.known());
        let counted = (running.begun_steps, running.pending, running.granted);
        holds(counted == (steps, pending, 0), "counts other steps under way than there are")?;
        let reached = running.table.computed() + rows;
        holds(
            scheduled == reached && scheduled <= running.table.capacity(),
            "is scheduled further than its rows or its blocks reach",
        )?;
        holds(
            scheduled <= known + running.pending + drafts,
            "is scheduled beyond what is known and pending",
        )?;
        holds(!running.never_ran() || steps > 0, "was attached and never ran")?;
        let missing = self.missing(cache, slot, sequence.final_positions());
        let is_enough = running.reserved.is_none_or(|reserved| missing.fits(reserved));
        ensure(is_enough, || {
            format!("{:?} needs {missing}, {:?} is set aside for it", sequence.id(), running.reserved)
        })
    }

    /// Every block table there is, and whose it is.
    pub fn tables(&self) -> impl Iterator<Item = (RequestId, TenantId, &BlockTable)> {
        self.sequences.iter().filter_map(|sequence| {
            sequence.table().map(|table| (sequence.request_id, sequence.tenant, table))
        })
    }

    /// All known tokens of a sequence; none where it has ended.
    pub fn known_tokens(&self, id: SequenceId) -> &[u32] {
        let sequence = self.sequences.iter().find(|sequence| sequence.id() == id);
        sequence.map_or(&[], |sequence| sequence.tokens.as_slice())
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
            let (id, preemptions) = (sequence.id(), sequence.timing.preemptions);
            ensure(sequence.computed() < sequence.known(), || format!("{id:?} has nothing left to compute"))?;
            ensure(preemptions <= self.config.max_preemptions, || {
                format!("{id:?} was preempted {preemptions} times")
            })?;
        }
        let members: usize = self.requests.values().map(|state| state.members.len()).sum();
        let sequences = self.sequences.iter().count();
        ensure(members == sequences, || format!("{members} members for {sequences} sequences"))?;
        let nothing =
            self.shared_prefixes.len() == 0 && self.deadlines.is_empty() && self.queued.requests == 0;
        ensure(nothing || !self.requests.is_empty(), || "something is left of requests that ended".into())
    }
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
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
