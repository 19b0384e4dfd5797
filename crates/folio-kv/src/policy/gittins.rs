//! What a block of a certain class and age is worth, from how long blocks of that class were unused before they were wanted
//! again.
//!
//! Owns: counts of lives and the index made of them. Must never: know a block. A *life* is the time a block's content goes
//! unused, whether or not it stays cached; it ends when the content is wanted again. Time is counted in blocks freed.
//!
//! The index is Gittins': over all patience `t`, the best ratio of the chance to be wanted within `t` to the expected time
//! until then (or until patience ends). Keeping the blocks with the highest index earns the most hits per block of memory
//! and time, where lives are independent (Gittins 1979; used for caches by Beckmann and Sanchez 2017 in another form).
//! It rises with age where a pause between uses is usual and falls after that, so neither the oldest nor the youngest
//! block is always the right one to give up.
//!
//! Ages are cut into buckets, four to an octave. The chance of a class at an age leans on that of all classes while there
//! are few counts. Cost: counting O(1); `update` about 10,000 operations per class.

/// Four buckets to an octave, up to 2^32 blocks.
pub(super) const BUCKETS: usize = 128;
/// Lives of all classes together that weigh as much as one class's own.
const PRIOR: f64 = 8.0;
/// Old counts fade by this much with every update, so that the policy follows the traffic.
const FADE: f64 = 0.98;

pub(super) fn bucket(age: u64) -> usize {
    if age < 4 {
        return age as usize;
    }
    let octave = age.ilog2() as usize;
    (4 * (octave - 1) + (age >> (octave - 2) & 3) as usize).min(BUCKETS - 1)
}

/// Least age of a bucket.
fn start(bucket: usize) -> f64 {
    if bucket < 4 {
        return bucket as f64;
    }
    let (octave, quarter) = (bucket / 4 + 1, bucket % 4);
    (4 + quarter) as f64 * 2f64.powi(octave as i32 - 2)
}

type Counts = [f64; BUCKETS];

/// Lives of every class, and the index made of them.
#[derive(Debug)]
pub(super) struct Lives<const CLASSES: usize> {
    /// Lives that ended by a use at this age.
    used: Box<[Counts; CLASSES]>,
    /// Lives no longer followed at this age.
    lost: Box<[Counts; CLASSES]>,
    /// Of `update`: lives that were watched through a bucket.
    watched: Box<[Counts; CLASSES]>,
    index: Box<[Counts; CLASSES]>,
}

impl<const CLASSES: usize> Lives<CLASSES> {
    /// Before anything is known, younger is better.
    pub fn new() -> Self {
        let young = std::array::from_fn(|bucket| 1.0 / (1.0 + start(bucket)));
        Self {
            used: Box::new([[0.0; BUCKETS]; CLASSES]),
            lost: Box::new([[0.0; BUCKETS]; CLASSES]),
            watched: Box::new([[0.0; BUCKETS]; CLASSES]),
            index: Box::new([young; CLASSES]),
        }
    }

    pub fn used(&mut self, class: usize, age: u64) {
        self.used[class][bucket(age)] += 1.0;
    }

    pub fn lost(&mut self, class: usize, age: u64) {
        self.lost[class][bucket(age)] += 1.0;
    }

    pub fn index(&self, class: usize, age: u64) -> f64 {
        self.index[class][bucket(age)]
    }

    /// Makes the index anew. `going_on`: class and age of every life that has not ended.
    pub fn update(&mut self, going_on: impl Iterator<Item = (usize, u64)>) {
        // Lives that were watched through a bucket: those that ended or were lost later, half of those that stopped in it.
        let watched = &mut self.watched;
        watched.copy_from_slice(&*self.lost);
        for (class, age) in going_on {
            watched[class][bucket(age)] += 1.0;
        }
        let mut all = ([0.0; BUCKETS], [0.0; BUCKETS]);
        for (watched, used) in watched.iter_mut().zip(&*self.used) {
            let mut later = 0.0;
            for bucket in (0..BUCKETS).rev() {
                let (stopped, used) = (watched[bucket], used[bucket]);
                watched[bucket] = later + stopped / 2.0 + used;
                later += stopped + used;
                all.0[bucket] += used;
                all.1[bucket] += watched[bucket];
            }
        }
        for class in 0..CLASSES {
            let chance = std::array::from_fn(|bucket| {
                let usual = (all.0[bucket] + 0.1) / (all.1[bucket] + 2.0);
                (self.used[class][bucket] + PRIOR * usual) / (watched[class][bucket] + PRIOR)
            });
            self.index[class] = gittins(&chance);
        }
        for counts in self.used.iter_mut().chain(self.lost.iter_mut()).flatten() {
            *counts *= FADE;
        }
    }
}

/// `chance[b]`: that a life which reached bucket `b` ends in it.
fn gittins(chance: &Counts) -> Counts {
    std::array::from_fn(|from| {
        let (mut alive, mut wanted, mut time, mut best) = (1.0, 0.0, 0.0, 0.0f64);
        for (bucket, chance) in chance.iter().enumerate().skip(from) {
            let ends = alive * chance;
            time += (start(bucket + 1) - start(bucket)) * (alive - ends / 2.0);
            wanted += ends;
            alive -= ends;
            best = best.max(wanted / time);
        }
        best
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_tile_the_ages() {
        for age in (0..5000).chain([1 << 20, (1 << 20) + (1 << 18), u64::from(u32::MAX)]) {
            let bucket = bucket(age);
            assert!(start(bucket) <= age as f64 && (age as f64) < start(bucket + 1), "{age} in {bucket}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn a_block_in_a_usual_pause_is_worth_more_than_a_fresh_one_and_a_forgotten_one() {
        let mut lives = Lives::<2>::new();
        // Class 0 is wanted again after about 1,000 blocks in half of all cases, class 1 never.
        for _ in 0..500 {
            lives.used(0, 1000);
            lives.lost(0, 100_000);
            lives.lost(1, 100_000);
            lives.lost(1, 100_000);
        }
        lives.update(std::iter::empty());
        let index = |class, age| lives.index(class, age);
        assert!(index(0, 900) > 3.0 * index(0, 10), "the pause is nearly over");
        assert!(index(0, 10) > 3.0 * index(0, 5000), "the pause is long over");
        assert!(index(0, 10) > 10.0 * index(1, 10), "nobody wants the other class");
    }

    #[test]
    fn lives_that_go_on_count_as_watched_so_far() {
        let mut few = Lives::<1>::new();
        let mut many = Lives::<1>::new();
        (0..20).for_each(|_| few.used(0, 50));
        (0..20).for_each(|_| many.used(0, 50));
        few.update(std::iter::empty());
        many.update((0..2000).map(|_| (0, 80)));
        assert!(many.index(0, 10) < few.index(0, 10) / 10.0);
    }
}
