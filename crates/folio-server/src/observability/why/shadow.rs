//! What a cache of any size would have hit, by a sample of what was asked for.
//!
//! Owns: a bounded sample of block hashes and how long ago each was asked for. Must never: be on the engine's thread, or see a token.
//!
//! SHARDS (Waldspurger et al., FAST 2015): a hash is followed if it is below a threshold, so whoever is followed is followed always, and any
//! share of all hashes is as good as another. Between two times that a block is asked for, the number of others that were asked for is its
//! distance: a cache that holds the last `n` blocks hits it if that is less than `n`. With fewer hashes than there is room for all are
//! followed and distances are exact; beyond, the threshold falls and what is above it is dropped (their fixed-size variant).
//!
//! Old times count less ([`ShadowIndex::age`]). Cost: O(log sampled) for a hash that is followed, a comparison for others. Memory:
//! `ShadowIndex::bytes_max`.

use std::collections::{BinaryHeap, HashMap};

use folio_kv::BlockHash;

/// Parts of a doubling of distances that are told apart.
const OF_DOUBLING: usize = 8;
const ENTRIES: usize = 40 * OF_DOUBLING;

/// See the module documentation.
pub(super) struct ShadowIndex {
    sampled_max: usize,
    /// Hashes up to this are followed.
    threshold: u64,
    /// Followed hashes: the place of the last time in `times`.
    last: HashMap<u64, u32>,
    /// The same hashes, the largest first.
    largest: BinaryHeap<u64>,
    /// A Fenwick tree: 1 at the last time of each followed hash.
    times: Vec<u32>,
    next: u32,
    /// Blocks that were asked for again, by distance; all that those that are followed stand for, and all that were asked for.
    again: Vec<f64>,
    followed: f64,
    asked: f64,
    /// Blocks that a cache without bounds would have hit, and those that were found.
    hits: f64,
    found: f64,
}

impl ShadowIndex {
    /// Follows so many hashes at most.
    pub fn new(sampled_max: usize) -> Self {
        let sampled_max = sampled_max.max(1);
        Self {
            sampled_max,
            threshold: u64::MAX,
            last: HashMap::default(),
            largest: BinaryHeap::new(),
            times: vec![0; 4 * sampled_max + 1],
            next: 0,
            again: vec![0.0; ENTRIES],
            followed: 0.0,
            asked: 0.0,
            hits: 0.0,
            found: 0.0,
        }
    }

    /// Bytes that it may take at most. A table of hashes has up to twice as many places as hashes, each with a byte of its own, and while it grows there is the one before, too.
    #[cfg(test)]
    pub fn bytes_max(sampled_max: usize) -> usize {
        let most = (sampled_max + 1).next_power_of_two();
        let table = 2 * most * (size_of::<(u64, u32)>() + 1) * 3 / 2;
        let times = (4 * sampled_max + 1) * size_of::<u32>();
        table / 2 + most * size_of::<u64>() + times + ENTRIES * size_of::<f64>()
    }

    /// These blocks were asked for in order, of which the first `found` were found somewhere.
    pub fn ask<'a>(&mut self, hashes: impl Iterator<Item = &'a BlockHash>, found: usize) {
        for (at, hash) in hashes.enumerate() {
            self.asked += 1.0;
            self.found += if at < found { 1.0 } else { 0.0 };
            let key = key(hash);
            if key > self.threshold {
                continue;
            }
            let weight = self.weight();
            self.followed += weight;
            match self.touch(key) {
                Some(distance) => {
                    self.hits += weight;
                    self.again[entry(f64::from(distance) * weight)] += weight;
                }
                // Not among those that were asked for or computed here, such as what a tier kept of an earlier time.
                None if at < found => {
                    self.hits += weight;
                    self.again[0] += weight;
                }
                None => {}
            }
        }
    }

    /// These blocks are there, though nobody asked for them: they were generated.
    pub fn computed<'a>(&mut self, hashes: impl Iterator<Item = &'a BlockHash>) {
        for key in hashes.map(key).filter(|key| *key <= self.threshold).collect::<Vec<_>>() {
            self.touch(key);
        }
    }

    /// What was asked for until now counts so much less.
    pub fn age(&mut self, factor: f64) {
        self.again.iter_mut().for_each(|count| *count *= factor);
        self.followed *= factor;
        self.asked *= factor;
        self.hits *= factor;
        self.found *= factor;
    }

    /// Blocks that were asked for, old ones counting less.
    pub fn asked(&self) -> f64 {
        self.asked
    }

    /// Share of what was asked for that was found. `None`: nothing was asked for.
    pub fn found(&self) -> Option<f64> {
        (self.asked > 0.0).then(|| self.found / self.asked)
    }

    /// Share of what was asked for that a cache without bounds would have hit. `None`: nothing was asked for.
    pub fn unbounded(&self) -> Option<f64> {
        self.share(self.hits)
    }

    /// Share of what was asked for that a cache of the last `blocks` blocks would have hit.
    pub fn hits_with(&self, blocks: f64) -> Option<f64> {
        let at = entry(blocks);
        let whole: f64 = self.again[..at].iter().sum();
        let (from, to) = (first_of(at), first_of(at + 1));
        let part = self.again[at] * ((blocks - from) / (to - from)).clamp(0.0, 1.0);
        self.share(whole + part)
    }

    /// Of what was asked for. What those that are followed stand for is more or less than that by the few that are asked for all the time,
    /// which any cache hits (the paper's adjustment).
    fn share(&self, hits: f64) -> Option<f64> {
        (self.asked > 0.0).then(|| ((hits + self.asked - self.followed) / self.asked).clamp(0.0, 1.0))
    }

    /// Blocks for each that is followed.
    fn weight(&self) -> f64 {
        (u64::MAX as f64) / (self.threshold as f64)
    }

    /// Asked for now. Others that were asked for since the last time, of those that are followed.
    fn touch(&mut self, key: u64) -> Option<u32> {
        if self.next as usize == self.times.len() - 1 {
            self.renumber();
        }
        let now = self.next;
        self.next += 1;
        let before = self.last.insert(key, now);
        let distance = before.map(|before| {
            let distance = self.last.len() as u32 - self.up_to(before);
            self.add(before, u32::MAX);
            distance
        });
        self.add(now, 1);
        if before.is_none() {
            self.largest.push(key);
            if self.last.len() > self.sampled_max {
                self.shrink();
            }
        }
        distance
    }

    /// Drops the largest hash, and follows only what is below it.
    fn shrink(&mut self) {
        let Some(largest) = self.largest.pop() else { return };
        self.threshold = largest.saturating_sub(1).max(1);
        if let Some(time) = self.last.remove(&largest) {
            self.add(time, u32::MAX);
        }
    }

    /// Times from 0 on, in the same order.
    fn renumber(&mut self) {
        let mut order: Vec<(u32, u64)> = self.last.iter().map(|(key, time)| (*time, *key)).collect();
        order.sort_unstable();
        self.times.fill(0);
        self.next = 0;
        for (_, key) in order {
            self.last.insert(key, self.next);
            self.add(self.next, 1);
            self.next += 1;
        }
    }

    /// Adds to the count at `time`, modulo 2^32.
    fn add(&mut self, time: u32, count: u32) {
        let mut at = time as usize + 1;
        while at < self.times.len() {
            self.times[at] = self.times[at].wrapping_add(count);
            at += at & at.wrapping_neg();
        }
    }

    /// Followed hashes whose last time is up to `time`.
    fn up_to(&self, time: u32) -> u32 {
        let (mut at, mut sum) = (time as usize + 1, 0u32);
        while at > 0 {
            sum = sum.wrapping_add(self.times[at]);
            at -= at & at.wrapping_neg();
        }
        sum
    }
}

fn key(hash: &BlockHash) -> u64 {
    u64::from_le_bytes(hash.0[..8].try_into().expect("a hash has 32 bytes"))
}

/// Where a distance is counted: each below 8 by itself, then parts of doublings.
fn entry(distance: f64) -> usize {
    let distance = distance.max(0.0) as u64;
    if distance < OF_DOUBLING as u64 {
        return distance as usize;
    }
    let doublings = (distance / OF_DOUBLING as u64).ilog2();
    let within = (distance >> doublings) as usize - OF_DOUBLING;
    ((1 + doublings as usize) * OF_DOUBLING + within).min(ENTRIES - 1)
}

/// The least distance of an entry.
fn first_of(entry: usize) -> f64 {
    if entry < OF_DOUBLING {
        return entry as f64;
    }
    let (doublings, within) = (entry / OF_DOUBLING - 1, entry % OF_DOUBLING);
    (OF_DOUBLING + within) as f64 * (doublings as f64).exp2()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn hash(number: u64) -> BlockHash {
        BlockHash(*blake3::hash(&number.to_le_bytes()).as_bytes())
    }

    /// Skewed numbers below `most`, the same every time.
    fn skewed(most: u64) -> impl FnMut() -> u64 {
        let mut state = 1u64;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let share = (state >> 11) as f64 / (1u64 << 53) as f64;
            (share.powi(3) * most as f64) as u64
        }
    }

    /// Share of hits of a real cache of the last `size` blocks.
    fn lru(size: usize, asked: &[u64]) -> f64 {
        let (mut cache, mut hits) = (VecDeque::new(), 0);
        for number in asked {
            if let Some(at) = cache.iter().position(|other| other == number) {
                cache.remove(at);
                hits += 1;
            } else if cache.len() == size {
                cache.pop_front();
            }
            cache.push_back(*number);
        }
        f64::from(hits) / asked.len() as f64
    }

    #[test]
    fn entries_are_in_order_and_without_gaps() {
        for distance in 0..100_000u64 {
            let at = entry(distance as f64);
            assert!(first_of(at) <= distance as f64 && (distance as f64) < first_of(at + 1), "{distance}");
        }
    }

    #[test]
    fn it_tells_what_caches_of_all_sizes_hit_with_all_blocks_or_a_sample_of_them() {
        let mut next = skewed(4000);
        let asked: Vec<u64> = (0..40_000).map(|_| next()).collect();
        for (sampled, off) in [(8192, 0.01), (1000, 0.04)] {
            let mut index = ShadowIndex::new(sampled);
            asked.iter().for_each(|number| index.ask([hash(*number)].iter(), 0));
            for size in [100, 500, 2000] {
                let (wanted, found) = (lru(size, &asked), index.hits_with(size as f64).unwrap());
                assert!(
                    (wanted - found).abs() < off,
                    "{size} blocks, {sampled} followed: {found}, {wanted} was wanted"
                );
            }
            let distinct = asked.iter().collect::<std::collections::BTreeSet<_>>().len();
            let wanted = 1.0 - distinct as f64 / asked.len() as f64;
            assert!((index.unbounded().unwrap() - wanted).abs() < off, "{sampled}");
            assert!(index.last.len() <= sampled && index.largest.len() == index.last.len());
        }
    }

    #[test]
    fn it_takes_no_more_memory_than_it_says_and_that_is_little() {
        const SAMPLED: usize = 1 << 17;
        let mut index = ShadowIndex::new(SAMPLED);
        (0..3 * SAMPLED as u64).for_each(|number| index.ask([hash(number)].iter(), 0));
        assert_eq!(index.last.len(), SAMPLED);
        let table = (index.last.capacity() * 8 / 7).next_power_of_two() * (size_of::<(u64, u32)>() + 1);
        let bytes = table
            + index.largest.capacity() * size_of::<u64>()
            + index.times.capacity() * size_of::<u32>()
            + index.again.capacity() * size_of::<f64>();
        assert!(bytes <= ShadowIndex::bytes_max(SAMPLED), "{bytes}");
        assert!(ShadowIndex::bytes_max(SAMPLED) <= 16 << 20, "{}", ShadowIndex::bytes_max(SAMPLED));
        assert!(index.unbounded().unwrap() < 0.02, "{:?}", index.unbounded());
    }

    #[test]
    fn what_was_generated_is_hit_and_not_asked_for_and_old_times_count_less() {
        let mut index = ShadowIndex::new(64);
        let blocks: Vec<BlockHash> = (0..4).map(hash).collect();
        index.ask(blocks[..2].iter(), 0);
        index.computed(blocks[2..].iter());
        index.age(0.0);
        index.ask(blocks.iter(), 2);
        assert_eq!((index.asked(), index.unbounded()), (4.0, Some(1.0)));
        index.ask([hash(9), hash(10)].iter(), 1);
        assert_eq!(index.unbounded(), Some(5.0 / 6.0), "what was found somewhere is a hit");
    }
}
