//! Where preempted sequences are swapped to: the tier that is memory, if there is one.
//!
//! Owns: the choice between that and computing again, by measured cost (`costs`), and what the tier is still reading. Must never: matter for
//! what is generated: without any tier everything is computed again, and the same bits come out.
//!
//! What a victim computed is content like any other: its full blocks stay in the prefix cache until they are taken. At the preemption two
//! costs are compared: to store what only the victim holds and, as far as it will not survive in the prefix cache, to load it again; and to compute
//! again what will not survive. If it pays they are stored as at a sequence's end, under a lease, and the victim's hashes learn
//! that the tier has them ([`BlockHashes::add_stored`](folio_kv::BlockHashes::add_stored)). When it is admitted again it is looked up and loaded like
//! everybody else (`loads`); what neither has, and less than a block, is computed.
//!
//! Until the tier has read them the blocks are its. They count as coming (`preemption`), and nobody is admitted, as with a victim whose last step
//! is under way. That lasts as long as a copy in memory does, and [`LEASE_US`] at most: whoever wants blocks waits for no tier that has died, and
//! what that cost is counted against the next.

use std::ops::Range;

use folio_kv::{GroupCounts, KvCache, Lease, TierId};

use super::Scheduler;
use super::loads::{chunk_end, load_size};
use crate::plan::SequenceId;
use crate::request::Micros;
use crate::sequence::Slot;
use crate::tier::StoreOrder;

/// How long others wait at most until a tier has read what a preempted sequence gave up.
const LEASE_US: u64 = 500_000;

/// What a tier is still reading of a preempted sequence.
pub(super) struct Leaving {
    lease: Lease,
    /// [`LEASE_US`] behind its order.
    until: Micros,
    owner: (SequenceId, Slot),
    tier: TierId,
    /// Of group 0; and the bytes of what of them was its alone.
    blocks: Range<u32>,
    bytes: u64,
    /// What is anybody's afterwards.
    releases: GroupCounts,
}

impl Scheduler {
    /// Has stored what `victim` is about to lose, if that is cheaper than to compute it again. Returns the positions at stake.
    pub(super) fn swap_out(&mut self, cache: &mut KvCache, victim: Slot) -> (u32, u32) {
        let (sequence, size) = (&self.sequences[victim], cache.config().block_tokens);
        // Where nothing was computed since it came, what it has is what it had.
        let running = sequence.running().filter(|running| running.fresh.is_none());
        let (Some(tier), Some(running)) = (self.transfers.swap, running) else { return (0, 0) };
        let (table, id) = (&running.table, sequence.id());
        let (root, releases) = (table.root(), cache.exclusive_blocks(table));
        let own = root.declared_blocks();
        let to = chunk_end(cache, self.transfers.chunk(tier), table.published_blocks() * size) / size;
        let shared = (table.capacity() / size).saturating_sub(releases[0]).max(own);
        if shared >= to {
            return (0, 0);
        }
        let at_stake = (shared * size, to * size);
        let load = load_size(cache, shared..to);
        if !self.costs.swapping_pays(tier, load, at_stake.0..at_stake.1) {
            return at_stake;
        }
        let until = Micros(self.now.0 + LEASE_US);
        let (lease, contents) = cache.lease_table(table, (own, to * size), until.0);
        // What a window slid over meanwhile may be gone; then nobody could go on from there.
        if contents.len() as u32 != cache.contents_at(own, to) {
            cache.end_lease(lease);
            return at_stake;
        }
        self.counters.preemptions_swapped += 1;
        self.transfers.leaving.push(Leaving {
            lease,
            until,
            owner: (id, victim),
            tier,
            blocks: own..to,
            bytes: load.bytes,
            releases,
        });
        let lineage = cache.lineage(&contents);
        self.transfers.stores.push(StoreOrder { tier, lease, until, root, contents, lineage });
        at_stake
    }

    /// What is anybody's when tiers have read it.
    pub(super) fn leaving(&self) -> GroupCounts {
        self.transfers.leaving.iter().fold(GroupCounts::default(), |sum, leaving| sum + leaving.releases)
    }

    /// Nothing is read under a lease any more, and of its contents the first `kept` are kept. Whether it held all the time.
    pub fn end_store(&mut self, cache: &mut KvCache, lease: Lease, kept: u32, now: Micros) -> bool {
        self.now = now;
        let held = cache.end_lease(lease);
        self.end_piece(cache, lease, kept);
        let leaving = &mut self.transfers.leaving;
        let Some(at) = leaving.iter().position(|leaving| leaving.lease == lease) else { return held };
        let Leaving { owner: (id, slot), tier, blocks, bytes, until, .. } = leaving.remove(at);
        if kept == 0 {
            return held;
        }
        self.costs.swapped(bytes, (now.0 + LEASE_US).saturating_sub(until.0) as f64);
        // Of windows what is read at the end was kept last.
        let is_of_use = cache.needed_groups() == 1 || kept == cache.contents_at(blocks.start, blocks.end);
        if is_of_use && self.sequences.lives(id, slot) {
            let end = blocks.end.min(blocks.start + kept);
            self.sequences[slot].hashes.add_stored(tier, blocks.start..end);
        }
        held
    }

    /// Forgets what was not read in time: nobody waits for it any more.
    pub(super) fn forget_late_stores(&mut self) {
        let now = self.now;
        let late = self.transfers.leaving.extract_if(.., |leaving| leaving.until <= now);
        for Leaving { bytes, .. } in late {
            self.costs.swapped(bytes, LEASE_US as f64);
        }
    }

    /// The sequence comes back: remembers how much of what it gave up was still cached.
    pub(super) fn learn_survival(&mut self, found: u32, (from, to): (u32, u32)) {
        if from < to {
            self.costs.survived(found.clamp(from, to) - from, to - from);
        }
    }
}
