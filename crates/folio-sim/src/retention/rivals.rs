//! Policies to compare with. They are here to be measured, not to be fast: each operation is O(log blocks).

use std::collections::{BTreeSet, HashSet, VecDeque};

use folio_kv::{BlockHash, BlockId, BlockMeta, EvictionPolicy};

/// What a rank is made of.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RivalRecord {
    /// When it was inserted and last freed, in events.
    inserted: u64,
    freed: u64,
    hits: u32,
}

type Rank = (u64, u64);

/// First in, first out.
pub(super) fn fifo(record: &RivalRecord) -> Rank {
    (record.inserted, 0)
}

/// Least often found, then least recently used.
pub(super) fn lfu(record: &RivalRecord) -> Rank {
    (record.hits.into(), record.freed)
}

/// Gives up the freed, childless block of the lowest rank.
pub(super) struct Ranked {
    rank: fn(&RivalRecord) -> Rank,
    records: Vec<RivalRecord>,
    freed: Vec<bool>,
    leaves: BTreeSet<(Rank, u32)>,
    now: u64,
}

impl Ranked {
    pub fn new(rank: fn(&RivalRecord) -> Rank) -> Self {
        Self { rank, records: Vec::new(), freed: Vec::new(), leaves: BTreeSet::new(), now: 0 }
    }

    fn key(&self, block: BlockId) -> (Rank, u32) {
        ((self.rank)(&self.records[block.0 as usize]), block.0)
    }
}

impl EvictionPolicy for Ranked {
    fn resize(&mut self, blocks: u32) {
        self.records = vec![RivalRecord::default(); blocks as usize];
        self.freed = vec![false; blocks as usize];
    }

    fn on_insert(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.now += 1;
        self.records[block.0 as usize] = RivalRecord { inserted: self.now, ..RivalRecord::default() };
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        self.now += 1;
        let record = &mut self.records[block.0 as usize];
        record.freed = self.now;
        record.hits = meta.hits;
        self.freed[block.0 as usize] = true;
        if meta.children == 0 {
            self.leaves.insert(self.key(block));
        }
    }

    fn on_use(&mut self, block: BlockId, meta: &BlockMeta) {
        self.on_remove(block, meta);
    }

    fn on_leaf(&mut self, block: BlockId, _meta: &BlockMeta) {
        if self.freed[block.0 as usize] {
            self.leaves.insert(self.key(block));
        }
    }

    fn on_remove(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.leaves.remove(&self.key(block));
        self.freed[block.0 as usize] = false;
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.leaves.first().map(|(_, block)| BlockId(*block))
    }
}

/// S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth for newcomers, a main queue for what was found twice there,
/// and a memory of what left the small one.
#[derive(Default)]
pub(super) struct S3Fifo {
    entries: Vec<RivalEntry>,
    /// Freed leaves of the small and of the main queue, in order.
    leaves: [BTreeSet<(u64, u32)>; 2],
    /// Blocks of each queue, freed or not.
    lengths: [u32; 2],
    ghosts: HashSet<BlockHash>,
    ghost_order: VecDeque<BlockHash>,
    now: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct RivalEntry {
    queue: usize,
    order: u64,
    frequency: u8,
    freed: bool,
    leaf: bool,
    hits: u32,
}

const SMALL: usize = 0;
const MAIN: usize = 1;
const FREQUENCY_MOST: u8 = 3;

impl S3Fifo {
    /// Takes the block out of its queue's leaves, changes it, and puts it back if it still belongs there.
    fn change(&mut self, block: u32, change: impl FnOnce(&mut RivalEntry)) {
        let entry = &mut self.entries[block as usize];
        self.leaves[entry.queue].remove(&(entry.order, block));
        let before = entry.queue;
        change(entry);
        if entry.queue != before {
            self.lengths[before] -= 1;
            self.lengths[entry.queue] += 1;
        }
        if entry.freed && entry.leaf {
            self.leaves[entry.queue].insert((entry.order, block));
        }
    }

    fn again(&mut self, block: u32, queue: usize, frequency: u8) {
        self.now += 1;
        let order = self.now;
        self.change(block, |entry| *entry = RivalEntry { queue, order, frequency, ..*entry });
    }
}

impl EvictionPolicy for S3Fifo {
    fn resize(&mut self, blocks: u32) {
        self.entries = vec![RivalEntry::default(); blocks as usize];
    }

    fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        self.now += 1;
        let known = meta.hash.is_some_and(|hash| self.ghosts.remove(&hash));
        let queue = if known { MAIN } else { SMALL };
        self.lengths[queue] += 1;
        self.entries[block.0 as usize] = RivalEntry { queue, order: self.now, ..RivalEntry::default() };
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        self.change(block.0, |entry| {
            let found = meta.hits.saturating_sub(entry.hits).min(FREQUENCY_MOST.into()) as u8;
            entry.frequency = (entry.frequency + found).min(FREQUENCY_MOST);
            entry.hits = meta.hits;
            entry.freed = true;
            entry.leaf = meta.children == 0;
        });
    }

    fn on_use(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.change(block.0, |entry| entry.freed = false);
    }

    fn on_leaf(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.change(block.0, |entry| entry.leaf = true);
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.change(block.0, |entry| entry.freed = false);
        let queue = self.entries[block.0 as usize].queue;
        self.lengths[queue] -= 1;
        let Some(hash) = meta.hash.filter(|_| queue == SMALL) else { return };
        if self.ghosts.insert(hash) {
            self.ghost_order.push_back(hash);
        }
        while self.ghost_order.len() > self.entries.len() {
            if let Some(old) = self.ghost_order.pop_front() {
                self.ghosts.remove(&old);
            }
        }
    }

    fn victim(&mut self) -> Option<BlockId> {
        // Every round lowers a frequency or moves a block to the main queue, so it ends.
        loop {
            let small = self.leaves[SMALL].first().copied();
            let main = self.leaves[MAIN].first().copied();
            let crowded = self.lengths[SMALL] * 10 >= self.entries.len() as u32;
            let (queue, block) = match (small, main) {
                (Some((_, block)), _) if crowded || main.is_none() => (SMALL, block),
                (_, Some((_, block))) => (MAIN, block),
                (Some((_, block)), None) => (SMALL, block),
                (None, None) => return None,
            };
            let frequency = self.entries[block as usize].frequency;
            match queue {
                SMALL if frequency > 1 => self.again(block, MAIN, 0),
                MAIN if frequency > 0 => self.again(block, MAIN, frequency - 1),
                _ => return Some(BlockId(block)),
            }
        }
    }
}
