//! Which blocks' time to live has passed.
//!
//! Owns: an order by expiry, to the microsecond. Must never: read a clock. A radix heap (Ahuja, Mehlhorn, Orlin, Tarjan
//! 1990): a block is in the bucket of the highest bit in which its expiry differs from the present. As time advances a
//! block only ever moves to a lower bucket, so it is moved at most 64 times: amortized O(1), and nothing is allocated.

use super::lists::Lists;

const BUCKETS: usize = 65;

#[derive(Debug)]
pub(super) struct Due {
    now: u64,
    expires: Vec<u64>,
    buckets: Lists,
}

impl Due {
    pub fn new(blocks: u32) -> Self {
        Self { now: 0, expires: vec![0; blocks as usize], buckets: Lists::new(blocks, BUCKETS) }
    }

    pub fn now(&self) -> u64 {
        self.now
    }

    /// When the block expires, if it ever does and has not been handed out by [`Due::next`].
    pub fn expires(&self, block: u32) -> Option<u64> {
        self.buckets.list_of(block).map(|_| self.expires[block as usize])
    }

    /// Replaces what was set before.
    pub fn set(&mut self, block: u32, expires: u64) {
        self.buckets.remove(block);
        self.expires[block as usize] = expires;
        self.buckets.push_youngest(self.bucket(expires), block);
    }

    pub fn clear(&mut self, block: u32) {
        self.buckets.remove(block);
    }

    /// 0: due.
    fn bucket(&self, expires: u64) -> usize {
        if expires <= self.now { 0 } else { 64 - (expires ^ self.now).leading_zeros() as usize }
    }

    /// Time never goes back: an earlier `now` changes nothing.
    pub fn advance(&mut self, now: u64) {
        let highest = 64 - (now ^ self.now).leading_zeros() as usize;
        if now <= self.now {
            return;
        }
        self.now = now;
        // What lies in lower buckets has passed, what lies in this one may have; above nothing changes.
        while let Some(bucket) = self.buckets.first_occupied(1, highest + 1) {
            while let Some(block) = self.buckets.oldest(bucket) {
                self.buckets.remove(block);
                let to = self.bucket(self.expires[block as usize]);
                debug_assert!(to < bucket, "a block moves down or has expired");
                self.buckets.push_youngest(to, block);
            }
            if bucket == highest {
                break;
            }
        }
    }

    /// Takes out one block whose time has passed.
    pub fn next(&mut self) -> Option<u32> {
        let block = self.buckets.oldest(0)?;
        self.buckets.remove(block);
        Some(block)
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
        let mut due = Due::new(50);
        let mut expires = [None; 50];
        let mut now = 0;
        for _ in 0..3000 {
            match random(3) {
                0 => {
                    let bits = random(30);
                    let (block, at) = (random(50) as u32, now + 1 + random(1 << bits));
                    due.set(block, at);
                    expires[block as usize] = Some(at);
                }
                1 => {
                    let block = random(50) as u32;
                    due.clear(block);
                    expires[block as usize] = None;
                }
                _ => {
                    let bits = random(30);
                    now += random(1 << bits);
                    due.advance(now);
                    let mut passed: Vec<u32> = std::iter::from_fn(|| due.next()).collect();
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
        }
    }
}
