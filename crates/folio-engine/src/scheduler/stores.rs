//! What tiers are given of sequences: in pieces, as much at a time as may be held up.
//!
//! Owns: what waits to be stored, and what is being read of it. Must never: hold up more of the cache than it may
//! ([`max_store_bytes`](crate::SchedulerConfig::max_store_bytes), each tier), or hold what only waits.
//!
//! At a sequence's end what each tier lacks of it and is worth it ([`KvCache::worth_storing`]) is stored there: so what a far tier had is near from
//! then on. Of windows and states only what is read at an end is stored, so where there are such also at the end of the prompt.
//!
//! A tier reads under a lease. Whoever holds a block holds all of its chain before it, so what is held up for a sequence is the chain up to
//! the end of its last piece that is being read. Sequences take turns in the order in which they ended, from their beginnings on. What
//! waits is held by nobody: it is cached like everything else, the next piece is what is still there when its turn comes, and what is gone is not
//! stored. Of what a tier did not keep nothing that follows is given to it.
//!
//! Cost: O(blocks before its end) a piece, of which a chain has few: a piece is a quarter of what may be held up. While the sequence runs,
//! as it does when its first piece is ordered, its table has the blocks; for what is ordered later they are looked up.

use std::ops::Range;

use folio_kv::{BlockHashes, BlockTable, KvCache, Lease, TierId};
use smallvec::SmallVec;

use super::Scheduler;
use super::loads::chunk_end;
use crate::plan::SequenceId;
use crate::request::Micros;
use crate::sequence::Slot;
use crate::tier::{CHUNK_BLOCKS_MAX, StoreOrder, TIERS_MAX};

/// How long a tier may read what it stores: what it has not by then it does not get, and so long at most is the memory not others'.
const LEASE_US: u64 = 3_000_000;

/// What a tier is to be given of a sequence, which may have ended.
pub(super) struct Storing {
    tier: TierId,
    owner: (SequenceId, Slot),
    /// Of its table.
    hashes: BlockHashes,
    /// Blocks of group 0 that are not ordered yet.
    left: Range<u32>,
    /// What is being read, with the contents of each piece.
    pieces: SmallVec<[(Lease, u32); 4]>,
    /// Of the chain up to the last of them.
    held_bytes: u64,
}

impl Scheduler {
    /// What each tier lacks of a sequence up to position `end` is to be stored.
    pub(super) fn store(&mut self, cache: &mut KvCache, slot: Slot, end: u32) {
        let sequence = &self.sequences[slot];
        let Some(running) = sequence.running() else { return };
        let (table, size) = (&running.table, cache.config().block_tokens);
        let (hashes, owner) = (table.hashes(), (sequence.id(), slot));
        let own = hashes.declared_blocks();
        let end = end.min(table.published_blocks() * size);
        let stored_to = |tier| sequence.hashes.stored_from(tier, own).unwrap_or(own);
        let Some(first) = self.transfers.tiers().map(|(tier, _)| stored_to(tier)).min() else { return };
        // Once for all tiers, unless one of them ends before that.
        let worth_at_all = cache.worth_storing(table, first, end / size);
        let (mut unstored, mut missed) = (0, 0);
        for at in 0..self.transfers.chunks.len() {
            let (tier, chunk) = (TierId(at as u8), self.transfers.chunks[at]);
            let from = stored_to(tier);
            let to = chunk_end(cache, chunk, end);
            let worth = match worth_at_all * size <= to {
                true => worth_at_all.max(from),
                false => cache.worth_storing(table, from, to / size),
            };
            // Of windows and states only what is read at the end is there.
            let whole = worth > from && cache.needed_groups() > 1;
            let worth = if whole { to } else { to.min(worth.next_multiple_of(chunk) * size) };
            unstored += (to.max(from * size) - worth.max(from * size)) / size;
            let left = from..worth / size;
            let waiting = self.transfers.storing.iter().filter(|other| other.tier == tier);
            let waiting: u32 = waiting.map(|other| other.left.len() as u32).sum();
            // More than the cache holds is not there when its turn comes.
            if waiting + left.len() as u32 > cache.config().blocks {
                missed += left.len();
            } else if !left.is_empty() {
                let (hashes, pieces) = (hashes.clone(), SmallVec::new());
                let storing = Storing { tier, owner, hashes, left, pieces, held_bytes: 0 };
                self.transfers.storing.push(storing);
            }
        }
        self.counters.unstored_blocks += u64::from(unstored);
        self.counters.missed_blocks += missed as u64;
        self.order_stores(cache, Micros(self.now.0 + LEASE_US));
    }

    /// Nobody needs blocks any more: all that waits is ordered.
    pub(crate) fn store_all(&mut self, cache: &mut KvCache) {
        self.config.max_store_bytes = u64::MAX;
        self.order_stores(cache, Micros(u64::MAX));
    }

    /// A tier has read a piece, if it is one, and kept so many of its contents.
    pub(super) fn end_piece(&mut self, cache: &mut KvCache, lease: Lease, kept: u32) {
        let ends = |storing: &mut Storing| {
            let at = storing.pieces.iter().position(|(own, _)| *own == lease)?;
            let (_, contents) = storing.pieces.remove(at);
            if storing.pieces.is_empty() {
                storing.held_bytes = 0;
            }
            let missed = if kept < contents { storing.left.len() } else { 0 };
            storing.left.end -= missed as u32;
            Some(missed)
        };
        if let Some(missed) = self.transfers.storing.iter_mut().find_map(ends) {
            self.counters.missed_blocks += missed as u64;
            self.order_stores(cache, Micros(self.now.0 + LEASE_US));
        }
    }

    /// Orders what there is room for.
    fn order_stores(&mut self, cache: &mut KvCache, until: Micros) {
        let max_bytes = self.config.max_store_bytes;
        let mut held = [0; TIERS_MAX];
        for storing in &self.transfers.storing {
            held[usize::from(storing.tier.0)] += storing.held_bytes;
        }
        // Whose turn it is next waits for room.
        let mut full = [false; TIERS_MAX];
        let mut all = std::mem::take(&mut self.transfers.storing);
        for storing in &mut all {
            let tier = usize::from(storing.tier.0);
            while !full[tier] && !storing.left.is_empty() {
                let to = self.piece_end(cache, &storing.left);
                let (bytes, others) = (cache.load_bytes(to), held[tier] - storing.held_bytes);
                if others + bytes > max_bytes && (others > 0 || !storing.pieces.is_empty()) {
                    full[tier] = true;
                } else if self.order_piece(cache, storing, to, until) {
                    (held[tier], storing.held_bytes) = (others + bytes, bytes);
                }
            }
        }
        all.retain(|storing| !storing.left.is_empty() || !storing.pieces.is_empty());
        self.transfers.storing = all;
    }

    /// Where the next piece ends: where runs of [`CHUNK_BLOCKS_MAX`] blocks do, or with all of it.
    fn piece_end(&self, cache: &KvCache, left: &Range<u32>) -> u32 {
        if cache.needed_groups() > 1 {
            return left.end;
        }
        let most = self.config.max_store_bytes / 4 / cache.load_bytes(1).max(1);
        let runs = (most / u64::from(CHUNK_BLOCKS_MAX)).max(1);
        let piece = runs.saturating_mul(CHUNK_BLOCKS_MAX.into());
        let end = (u64::from(left.start) / piece + 1).saturating_mul(piece);
        end.min(left.end.into()) as u32
    }

    /// The table that has the first `to` blocks of what is stored, if there is one.
    fn table_of(&self, storing: &Storing, to: u32) -> Option<&BlockTable> {
        let (id, slot) = storing.owner;
        let running = self.sequences.lives(id, slot).then(|| self.sequences[slot].running())??;
        let table = &running.table;
        let is_its = table.hashes().declared_blocks() == storing.hashes.declared_blocks();
        (is_its && table.published_blocks() >= to).then_some(table)
    }

    /// Orders blocks up to `to`. `false`: none of them is there any more.
    fn order_piece(&mut self, cache: &mut KvCache, storing: &mut Storing, to: u32, until: Micros) -> bool {
        let (size, from, tier) = (cache.config().block_tokens, storing.left.start, storing.tier);
        let (lease, mut contents) = match self.table_of(storing, to) {
            Some(table) => cache.lease_table(table, (from, to * size), until.0),
            None => cache.lease(&storing.hashes, (from, to * size), until.0),
        };
        let there = from + contents.iter().filter(|content| content.group == 0).count() as u32;
        storing.left.start = to;
        if there < to {
            // What follows is gone as well, and so is an end behind which anything could go on.
            let chunk = self.transfers.chunk(tier);
            let end =
                if cache.needed_groups() > 1 { from } else { chunk_end(cache, chunk, there * size) / size };
            contents.truncate(end.saturating_sub(from) as usize);
            self.counters.missed_blocks += u64::from(storing.left.end - end.max(from));
            storing.left.start = storing.left.end;
        }
        if contents.is_empty() {
            cache.end_lease(lease);
            return false;
        }
        storing.pieces.push((lease, contents.len() as u32));
        let lineage = cache.lineage(&contents);
        let root = storing.hashes.chain_root();
        self.transfers.stores.push(StoreOrder { tier, lease, until, root, contents, lineage });
        true
    }
}
