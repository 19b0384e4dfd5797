//! What a segment's blocks are worth: which one goes, and what of it is written again.
//!
//! A block is worth 1 when it is written or got, and half as much each time that pages of half the store were written and got since. A
//! segment is worth the sum over its blocks that can be found, which is kept up at each use: both fade alike, so nothing is added up anew.
//!
//! Memory: 16 bytes a block.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::index::Fingerprint;
use crate::io::PAGE;

/// Of a half-life.
const TICKS: u64 = 1024;
/// That have passed when a store is opened: what comes from elsewhere is that old.
const HALF_LIVES_BEFORE: u64 = 8;

/// The clock by which blocks fade: pages that were written and got.
pub struct UseClock {
    pages: AtomicU64,
    pages_per_tick: u64,
    /// In ticks.
    half_life: f64,
}

/// A time of this clock.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub tick: u32,
    half_life: f64,
}

impl Now {
    /// Of a block that was used last at `tick`; of what was worth 1 then.
    fn worth_of(self, tick: u32) -> f64 {
        (-f64::from(self.tick.saturating_sub(tick)) / self.half_life).exp2()
    }
}

impl UseClock {
    /// Of a store of so many bytes.
    pub fn new(bytes: u64) -> Self {
        let half_life = (bytes / PAGE as u64 / 2).max(1);
        let pages_per_tick = half_life.div_ceil(TICKS);
        let pages = AtomicU64::new(half_life * HALF_LIVES_BEFORE);
        Self { pages, pages_per_tick, half_life: half_life as f64 / pages_per_tick as f64 }
    }

    pub fn now(&self) -> Now {
        self.at(self.pages.load(Relaxed))
    }

    /// So many more were written or got.
    pub fn pass(&self, pages: u64) -> Now {
        self.at(self.pages.fetch_add(pages, Relaxed) + pages)
    }

    fn at(&self, pages: u64) -> Now {
        let tick = u32::try_from(pages / self.pages_per_tick).unwrap_or(u32::MAX);
        Now { tick, half_life: self.half_life }
    }
}

/// A block of a segment.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub fingerprint: Fingerprint,
    /// Of its record.
    pub page: u32,
    /// When it was written or got last; 0: it cannot be found any more.
    pub used: u32,
}

/// The blocks of a segment.
#[derive(Debug)]
pub struct Worth {
    /// By page.
    blocks: Vec<Held>,
    /// Of those that can be found: how many, and what they were worth at `tick`.
    live: u32,
    sum: f64,
    tick: u32,
}

impl Worth {
    /// Of a segment without blocks. Those that it is found to have later were used last at `tick`.
    pub fn new(tick: u32) -> Self {
        Self { blocks: Vec::new(), live: 0, sum: 0.0, tick }
    }

    pub fn tick(&self) -> u32 {
        self.tick
    }

    pub fn blocks(&self) -> &[Held] {
        &self.blocks
    }

    /// How many can be found, and what they are worth together.
    pub fn sum(&self, now: Now) -> (u32, f64) {
        (self.live, self.sum * now.worth_of(self.tick))
    }

    fn change(&mut self, now: Now, by: f64) {
        self.sum = (self.sum * now.worth_of(self.tick) + by).max(0.0);
        self.tick = self.tick.max(now.tick);
    }

    fn at(&self, page: u32) -> Option<usize> {
        let at = self.blocks.binary_search_by_key(&page, |held| held.page).ok()?;
        (self.blocks[at].used > 0).then_some(at)
    }

    pub fn add(&mut self, held: Held, now: Now) {
        let at = self.blocks.partition_point(|before| before.page < held.page);
        self.blocks.insert(at, held);
        self.live += 1;
        self.change(now, now.worth_of(held.used));
    }

    /// Somebody got it.
    pub fn touch(&mut self, page: u32, now: Now) {
        if let Some(at) = self.at(page) {
            let before = std::mem::replace(&mut self.blocks[at].used, now.tick);
            self.change(now, now.worth_of(now.tick) - now.worth_of(before));
        }
    }

    /// It cannot be found any more.
    pub fn forget(&mut self, page: u32, now: Now) {
        if let Some(at) = self.at(page) {
            let before = std::mem::take(&mut self.blocks[at].used);
            self.live -= 1;
            self.change(now, -now.worth_of(before));
        }
    }

    /// No more come.
    pub fn end(&mut self) {
        self.blocks.shrink_to_fit();
    }

    /// Those that are worth more than so much, the most first.
    pub fn above(&self, worth: f64, now: Now) -> Vec<Held> {
        let is_above = |held: &&Held| held.used > 0 && now.worth_of(held.used) > worth;
        let mut above: Vec<Held> = self.blocks.iter().filter(is_above).copied().collect();
        above.sort_by_key(|held| (std::cmp::Reverse(held.used), held.page));
        above
    }
}

#[cfg(test)]
mod tests {
    use folio_kv::BlockHash;

    use super::*;
    use crate::types::BlockKey;

    /// Whatever is used and forgotten in whatever order, the sum is that over all blocks.
    #[test]
    fn the_sum_is_kept_up() {
        let clock = UseClock::new(1 << 20);
        let mut worth = Worth::new(clock.now().tick);
        let mut used: Vec<Option<u32>> = Vec::new();
        let mut seed = 3u64;
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let now = clock.pass(seed >> 60);
            let block = (seed >> 40) as usize % (used.len() + 1);
            match seed >> 33 & 3 {
                0 => {
                    let key = BlockKey { hash: BlockHash([block as u8; 32]), group: 0 };
                    let page = used.len() as u32;
                    worth.add(Held { fingerprint: (&key).into(), page, used: now.tick }, now);
                    used.push(Some(now.tick));
                }
                1 => {
                    worth.forget(block as u32, now);
                    used.get_mut(block).into_iter().for_each(|used| *used = None);
                }
                _ => {
                    worth.touch(block as u32, now);
                    used.get_mut(block).into_iter().flatten().for_each(|used| *used = now.tick);
                }
            }
            let all: Vec<u32> = used.iter().flatten().copied().collect();
            let expected: f64 = all.iter().map(|used| now.worth_of(*used)).sum();
            let (live, sum) = worth.sum(now);
            assert!(live as usize == all.len() && (sum - expected).abs() < 1e-6, "{sum}, not {expected}");
        }
        let half = clock.pass((1 << 20) / PAGE as u64 / 2).tick;
        assert_eq!(clock.now().worth_of(half), 1.0);
        clock.pass((1 << 20) / PAGE as u64 / 2);
        assert_eq!(clock.now().worth_of(half), 0.5);
    }
}
