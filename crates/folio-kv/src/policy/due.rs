//! Times to live: of the blocks that have one, when it passes.
//!
//! Owns: an order by expiry, to the microsecond. Must never: read a clock. A use moves a block's expiry and not its place in
//! the order; that is seen when its place comes up. So a use costs O(1), and a block is moved at most once for each time it
//! outlived. Memory only for blocks that have a time to live.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

#[derive(Clone, Copy, Debug)]
struct Life {
    ttl_us: u64,
    expires: u64,
    /// Its place in the order, never after `expires`.
    place: u64,
}

#[derive(Debug, Default)]
pub(super) struct Due {
    lives: FxHashMap<u32, Life>,
    order: BTreeSet<(u64, u32)>,
}

impl Due {
    /// When the block expires, if it ever does and has not been handed out by [`Due::next`].
    pub fn expires(&self, block: u32) -> Option<u64> {
        self.lives.get(&block).map(|life| life.expires)
    }

    pub fn ttl(&self, block: u32) -> Option<u64> {
        self.lives.get(&block).map(|life| life.ttl_us)
    }

    /// A time to live begins now, and replaces what was set before.
    pub fn set(&mut self, block: u32, ttl_us: u64, now: u64) {
        let expires = now.saturating_add(ttl_us.max(1));
        let life = self.lives.entry(block).or_insert(Life { ttl_us, expires, place: u64::MAX });
        (life.ttl_us, life.expires) = (ttl_us, expires);
        if expires < life.place {
            self.order.remove(&(life.place, block));
            life.place = expires;
            self.order.insert((expires, block));
        }
    }

    pub fn clear(&mut self, block: u32) {
        if let Some(life) = self.lives.remove(&block) {
            self.order.remove(&(life.place, block));
        }
    }

    /// Takes out one block whose time has passed. `looks` bounds the places that are looked at, and is counted down.
    pub fn next(&mut self, now: u64, looks: &mut u32) -> Option<u32> {
        while let Some(&(place, block)) = self.order.first().filter(|(place, _)| *place <= now) {
            *looks = looks.checked_sub(1)?;
            self.order.pop_first();
            let life = self.lives.get_mut(&block).filter(|life| life.expires > place.max(now));
            let Some(life) = life else {
                self.lives.remove(&block);
                return Some(block);
            };
            life.place = life.expires;
            self.order.insert((life.expires, block));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_expire_exactly_when_their_time_has_passed() {
        let mut word = 1u64;
        let mut random = move |most: u64| {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (word >> 33) % most
        };
        let mut due = Due::default();
        let mut expires = [None; 50];
        let mut now = 0;
        for _ in 0..3000 {
            match random(3) {
                0 => {
                    let bits = random(30);
                    let (block, ttl) = (random(50) as u32, 1 + random(1 << bits));
                    due.set(block, ttl, now);
                    expires[block as usize] = Some(now + ttl);
                }
                1 => {
                    let block = random(50) as u32;
                    due.clear(block);
                    expires[block as usize] = None;
                }
                _ => {
                    let bits = random(30);
                    now += random(1 << bits);
                    let mut passed: Vec<u32> = std::iter::from_fn(|| due.next(now, &mut 1000)).collect();
                    passed.sort_unstable();
                    let expected: Vec<u32> =
                        (0..50).filter(|b| expires[*b as usize].is_some_and(|at| at <= now)).collect();
                    assert_eq!(passed, expected);
                    expected.iter().for_each(|block| expires[*block as usize] = None);
                }
            }
            for block in 0..50 {
                assert_eq!(due.expires(block), expires[block as usize]);
            }
            assert_eq!(due.order.len(), due.lives.len(), "one place each");
        }
    }

    #[test]
    fn one_call_looks_at_no_more_than_it_may() {
        let mut due = Due::default();
        (0..10).for_each(|block| due.set(block, 5, 0));
        let mut looks = 4;
        assert_eq!(std::iter::from_fn(|| due.next(5, &mut looks)).count(), 4);
        assert_eq!(std::iter::from_fn(|| due.next(5, &mut 100)).count(), 6, "the rest the next time");
    }
}
