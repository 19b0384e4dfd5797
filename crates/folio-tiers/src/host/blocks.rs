//! Which blocks are in memory, by key, and in which order they go.
//!
//! Owns: their records, the table that finds these, and the orders of last use: one of each class, and one of each tenant's priorities. Must
//! never: read a clock, touch a block's bytes, or tell anybody.
//!
//! A record is named by its place in a slab, and stays there. Those of a bucket of the table are a list through the records, as are those of
//! an order.
//!
//! Cost: O(1) a block, O(log blocks) where it expires. With more blocks than buckets these are doubled: O(blocks).
//!
//! Memory: 88 bytes a block, and 4 to 8 in the table. More only of those that expire, and of lineages.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use folio_kv::{BlockHash, TenantId};
use folio_model::backend::HostBuffer;
use rustc_hash::FxHashMap;

use crate::types::{BlockKey, Class};

const NONE: u32 = u32::MAX;
/// Records that are made together.
const PART: u32 = 256;

/// The block before one, and its tokens.
pub(super) type ParentAndTokens = (Option<BlockHash>, Box<[u32]>);

/// A block that comes or goes.
pub(super) struct Block {
    pub tenant: TenantId,
    pub priority: u8,
    /// 0: never.
    pub expires_s: u32,
    pub bytes: Arc<dyn HostBuffer>,
    /// Of group 0, where somebody is told.
    pub lineage: Option<ParentAndTokens>,
}

/// What is kept of a block, or room for that.
pub(super) struct Record {
    pub key: BlockKey,
    pub tenant: TenantId,
    /// `None`: there is no block.
    pub bytes: Option<Arc<dyn HostBuffer>>,
    priority: u8,
    expires_s: u32,
    /// When it was last wanted, in wants.
    used: u64,
    /// The next of its bucket, or without a block.
    next: u32,
    in_class: Links,
    of_tenant: Links,
}

const _: () = assert!(size_of::<Record>() == 88);

impl Record {
    fn without_block(next: u32) -> Self {
        Self {
            key: BlockKey { hash: BlockHash([0; 32]), group: 0 },
            tenant: TenantId(0),
            bytes: None,
            priority: 0,
            expires_s: 0,
            used: 0,
            next,
            in_class: Links::NONE,
            of_tenant: Links::NONE,
        }
    }
}

/// A record's neighbours in an order.
#[derive(Clone, Copy)]
struct Links {
    older: u32,
    younger: u32,
}

impl Links {
    const NONE: Self = Self { older: NONE, younger: NONE };
}

/// The ends of an order.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Ends {
    oldest: u32,
    youngest: u32,
}

impl Ends {
    const EMPTY: Self = Self { oldest: NONE, youngest: NONE };
}

#[derive(Clone, Copy)]
enum Order {
    InClass,
    OfTenant,
}

/// All records, [`PART`] in each part.
#[derive(Default)]
struct Records(Vec<Box<[Record]>>);

impl Index<u32> for Records {
    type Output = Record;

    fn index(&self, at: u32) -> &Record {
        &self.0[(at / PART) as usize][(at % PART) as usize]
    }
}

impl IndexMut<u32> for Records {
    fn index_mut(&mut self, at: u32) -> &mut Record {
        &mut self.0[(at / PART) as usize][(at % PART) as usize]
    }
}

impl Records {
    fn links(&mut self, order: Order, at: u32) -> &mut Links {
        let record = &mut self[at];
        match order {
            Order::InClass => &mut record.in_class,
            Order::OfTenant => &mut record.of_tenant,
        }
    }

    /// It is the youngest of an order in which it is not.
    fn link(&mut self, order: Order, ends: &mut Ends, at: u32) {
        *self.links(order, at) = Links { older: ends.youngest, younger: NONE };
        match ends.youngest {
            NONE => ends.oldest = at,
            before => self.links(order, before).younger = at,
        }
        ends.youngest = at;
    }

    fn unlink(&mut self, order: Order, ends: &mut Ends, at: u32) {
        let Links { older, younger } = *self.links(order, at);
        match older {
            NONE => ends.oldest = younger,
            older => self.links(order, older).younger = younger,
        }
        match younger {
            NONE => ends.youngest = older,
            younger => self.links(order, younger).older = older,
        }
    }
}

/// See the module documentation.
pub(super) struct Blocks {
    records: Records,
    /// The first record without a block.
    free: u32,
    len: u32,
    /// The first record of each; a power of two of them, at least as many as blocks.
    buckets: Box<[u32]>,
    of_classes: [Ends; Class::ALL.len()],
    /// Of each tenant by priority, none of them empty.
    of_tenants: FxHashMap<TenantId, Vec<(u8, Ends)>>,
    /// By when they expire.
    ends: BTreeSet<(u32, u32)>,
    lineages: FxHashMap<u32, ParentAndTokens>,
    /// Wants so far.
    wants: u64,
}

impl Default for Blocks {
    fn default() -> Self {
        Self {
            records: Records::default(),
            free: NONE,
            len: 0,
            buckets: Box::new([NONE]),
            of_classes: [Ends::EMPTY; Class::ALL.len()],
            of_tenants: FxHashMap::default(),
            ends: BTreeSet::new(),
            lineages: FxHashMap::default(),
            wants: 0,
        }
    }
}

impl Index<u32> for Blocks {
    type Output = Record;

    fn index(&self, at: u32) -> &Record {
        &self.records[at]
    }
}

impl Blocks {
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Of all blocks, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &BlockKey> {
        let records = self.records.0.iter().flat_map(|part| part.iter());
        records.filter(|record| record.bytes.is_some()).map(|record| &record.key)
    }

    pub fn lineage(&self, at: u32) -> Option<&ParentAndTokens> {
        self.lineages.get(&at)
    }

    /// Hashes are keyed, so nobody chooses their buckets.
    fn bucket(&self, key: &BlockKey) -> usize {
        let word = u64::from_le_bytes(std::array::from_fn(|at| key.hash.0[at]));
        word.wrapping_add(key.group.into()) as usize & (self.buckets.len() - 1)
    }

    /// The record before it in its bucket, and its own; [`NONE`]: there is none.
    fn look_up(&self, key: &BlockKey) -> (u32, u32) {
        let (mut before, mut at) = (NONE, self.buckets[self.bucket(key)]);
        while at != NONE && self.records[at].key != *key {
            (before, at) = (at, self.records[at].next);
        }
        (before, at)
    }

    pub fn find(&self, key: &BlockKey) -> Option<u32> {
        let (_, at) = self.look_up(key);
        (at != NONE).then_some(at)
    }

    /// A block that is not there, and is wanted now.
    pub fn insert(&mut self, key: BlockKey, block: Block) -> u32 {
        debug_assert!(self.find(&key).is_none());
        if self.len as usize == self.buckets.len() {
            self.double_buckets();
        }
        if self.free == NONE {
            self.make_records();
        }
        let (at, bucket) = (self.free, self.bucket(&key));
        let Block { tenant, priority, expires_s, bytes, lineage } = block;
        let record = Record {
            key,
            tenant,
            bytes: Some(bytes),
            priority,
            expires_s,
            ..Record::without_block(self.buckets[bucket])
        };
        self.free = std::mem::replace(&mut self.records[at], record).next;
        self.buckets[bucket] = at;
        self.len += 1;
        if expires_s != 0 {
            self.ends.insert((expires_s, at));
        }
        if let Some(lineage) = lineage {
            self.lineages.insert(at, lineage);
        }
        self.link(at);
        at
    }

    pub fn remove(&mut self, key: &BlockKey) -> Option<Block> {
        let (before, at) = self.look_up(key);
        if at == NONE {
            return None;
        }
        self.unlink(at);
        let free = Record::without_block(std::mem::replace(&mut self.free, at));
        let Record { tenant, bytes, priority, expires_s, next, .. } =
            std::mem::replace(&mut self.records[at], free);
        match before {
            NONE => {
                let bucket = self.bucket(key);
                self.buckets[bucket] = next;
            }
            before => self.records[before].next = next,
        }
        self.len -= 1;
        self.ends.remove(&(expires_s, at));
        let lineage = self.lineages.remove(&at);
        Some(Block { tenant, priority, expires_s, bytes: bytes?, lineage })
    }

    /// When the next want is.
    pub fn next_want(&self) -> u64 {
        self.wants + 1
    }

    /// It is wanted now.
    pub fn want(&mut self, at: u32) {
        self.unlink(at);
        self.link(at);
    }

    /// The stronger of what is wanted, now, and what holds.
    pub fn strengthen(&mut self, at: u32, priority: u8, expires_s: u32) {
        let Record { priority: own, expires_s: end, .. } = self.records[at];
        let later = if end == 0 || expires_s == 0 { 0 } else { end.max(expires_s) };
        if later != end {
            self.ends.remove(&(end, at));
            self.records[at].expires_s = later;
            if later != 0 {
                self.ends.insert((later, at));
            }
        }
        if priority > own {
            self.unlink(at);
            self.records[at].priority = priority;
            self.link(at);
        }
    }

    /// Whose turn it is, the one of the lowest class that was not wanted for the longest; and which goes for it: of that tenant's of the
    /// lowest priority the one that was not. `None`: either was wanted `since` then.
    pub fn next_to_go(&self, since: u64) -> Option<(u32, u32)> {
        let is_before = |at: &u32| self.records[*at].used < since;
        let oldest = self.of_classes.iter().map(|ends| ends.oldest).find(|at| *at != NONE)?;
        let of_tenant = self.of_tenants.get(&self.records[oldest].tenant)?;
        let weakest = of_tenant.first().map(|(_, ends)| ends.oldest)?;
        Some((oldest, weakest)).filter(|(oldest, weakest)| is_before(oldest) && is_before(weakest))
    }

    /// What expires first, and when.
    pub fn first_end(&self) -> Option<(u32, BlockKey)> {
        self.ends.first().map(|(end, at)| (*end, self.records[*at].key))
    }

    /// It is wanted now, and stands in no order.
    fn link(&mut self, at: u32) {
        self.wants += 1;
        self.records[at].used = self.wants;
        let Record { tenant, priority, .. } = self.records[at];
        let of_class = &mut self.of_classes[Class::of(priority) as usize];
        self.records.link(Order::InClass, of_class, at);
        let of_tenant = self.of_tenants.entry(tenant).or_default();
        let place = of_tenant.partition_point(|(other, _)| *other < priority);
        if of_tenant.get(place).is_none_or(|(other, _)| *other != priority) {
            of_tenant.insert(place, (priority, Ends::EMPTY));
        }
        self.records.link(Order::OfTenant, &mut of_tenant[place].1, at);
    }

    fn unlink(&mut self, at: u32) {
        let Record { tenant, priority, .. } = self.records[at];
        let of_class = &mut self.of_classes[Class::of(priority) as usize];
        self.records.unlink(Order::InClass, of_class, at);
        let Entry::Occupied(mut of_tenant) = self.of_tenants.entry(tenant) else { return };
        let priorities = of_tenant.get_mut();
        let place = priorities.partition_point(|(other, _)| *other < priority);
        self.records.unlink(Order::OfTenant, &mut priorities[place].1, at);
        if priorities[place].1 == Ends::EMPTY {
            priorities.remove(place);
            if priorities.is_empty() {
                of_tenant.remove();
            }
        }
    }

    fn make_records(&mut self) {
        let first = self.records.0.len() as u32 * PART;
        let last = first + PART - 1;
        let record = |at: u32| Record::without_block(if at < last { at + 1 } else { NONE });
        self.records.0.push((first..=last).map(record).collect());
        self.free = first;
    }

    fn double_buckets(&mut self) {
        let buckets = vec![NONE; 2 * self.buckets.len()].into();
        for first in std::mem::replace(&mut self.buckets, buckets) {
            let mut at = first;
            while at != NONE {
                let bucket = self.bucket(&self.records[at].key);
                let next = std::mem::replace(&mut self.records[at].next, self.buckets[bucket]);
                self.buckets[bucket] = at;
                at = next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(of: u64, spread: u64) -> BlockKey {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&(of % spread).to_le_bytes());
        hash[8..16].copy_from_slice(&of.to_le_bytes());
        BlockKey { hash: BlockHash(hash), group: (of % 3) as u8 }
    }

    fn block(tenant: u32, priority: u8, expires_s: u32) -> Block {
        let bytes: Arc<dyn HostBuffer> = Arc::new(vec![0u8; 1]);
        Block { tenant: TenantId(tenant), priority, expires_s, bytes, lineage: None }
    }

    /// The same, gone through for each answer.
    #[derive(Default)]
    struct Plain {
        blocks: Vec<(BlockKey, TenantId, u8, u32, u64)>,
        wants: u64,
    }

    impl Plain {
        fn want(&mut self, at: usize) {
            self.wants += 1;
            self.blocks[at].4 = self.wants;
        }

        fn next_to_go(&self, since: u64) -> Option<(BlockKey, BlockKey)> {
            let oldest =
                self.blocks.iter().min_by_key(|(.., priority, _, used)| (Class::of(*priority), *used))?;
            let of_tenant = self.blocks.iter().filter(|block| block.1 == oldest.1);
            let weakest = of_tenant.min_by_key(|(.., priority, _, used)| (*priority, *used))?;
            (oldest.4 < since && weakest.4 < since).then_some((oldest.0, weakest.0))
        }
    }

    #[test]
    fn they_are_found_and_go_in_order_whatever_happens_to_them() {
        let mut word = 1u64;
        let mut random = move |most: u64| {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (word >> 33) % most
        };
        for spread in [1, 5, 1 << 40] {
            let (mut blocks, mut plain) = (Blocks::default(), Plain::default());
            for _ in 0..4000 {
                let key = key(random(400), spread);
                let (tenant, priority, expires_s) =
                    (random(3) as u32, [10, 50, 50, 70, 101][random(5) as usize], random(3) as u32 * 7);
                let known = plain.blocks.iter().position(|(other, ..)| *other == key);
                assert_eq!(blocks.find(&key).is_some(), known.is_some());
                match (blocks.find(&key).zip(known), random(6)) {
                    (None, _) => {
                        blocks.insert(key, block(tenant, priority, expires_s));
                        plain.blocks.push((key, TenantId(tenant), priority, expires_s, 0));
                        plain.want(plain.blocks.len() - 1);
                    }
                    (Some((_, known)), 0..2) => {
                        let gone = blocks.remove(&key).expect("it was found");
                        let (_, tenant, priority, expires_s, _) = plain.blocks.remove(known);
                        assert_eq!(
                            (gone.tenant, gone.priority, gone.expires_s),
                            (tenant, priority, expires_s)
                        );
                    }
                    (Some((at, known)), 2..4) => {
                        blocks.want(at);
                        plain.want(known);
                    }
                    (Some((at, known)), _) => {
                        blocks.strengthen(at, priority, expires_s);
                        let (_, _, own, end, _) = &mut plain.blocks[known];
                        *end = if *end == 0 || expires_s == 0 { 0 } else { expires_s.max(*end) };
                        if priority > *own {
                            *own = priority;
                            plain.want(known);
                        }
                    }
                }
                let since = (plain.wants + 1).saturating_sub(random(3) * random(200));
                let goes = blocks.next_to_go(since);
                let goes = goes.map(|(oldest, weakest)| (blocks[oldest].key, blocks[weakest].key));
                assert_eq!(goes, plain.next_to_go(since));
                let ends = plain.blocks.iter().map(|(.., end, _)| *end).filter(|end| *end != 0);
                assert_eq!(blocks.first_end().map(|(end, _)| end), ends.min());
                assert_eq!(
                    (blocks.len() as usize, blocks.keys().count()),
                    (plain.blocks.len(), plain.blocks.len())
                );
            }
            for (key, ..) in plain.blocks {
                blocks.remove(&key).expect("it was there");
            }
            let (empty, ends) = (blocks.of_tenants.is_empty() && blocks.ends.is_empty(), blocks.of_classes);
            assert!(empty && blocks.len() == 0 && ends.iter().all(|ends| *ends == Ends::EMPTY));
        }
    }

    #[test]
    fn a_block_takes_less_than_a_hundred_bytes() {
        for len in [16_384, 16_385, 20_000] {
            let mut blocks = Blocks::default();
            for of in 0..len {
                blocks.insert(key(of, u64::MAX), block(1, 50, 0));
            }
            let records: usize = blocks.records.0.iter().map(|part| size_of_val(&**part)).sum();
            let bytes = records + size_of_val(&*blocks.buckets);
            assert!(bytes as u64 <= 100 * len, "{} bytes each", bytes as f64 / len as f64);
        }
    }
}
