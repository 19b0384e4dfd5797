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
//! Ages are cut into buckets, four to an octave. While a class has few counts at an age, its chance leans on that of its
//! kind (the classes with as many uses before), and the kind's on that of all. Cost: counting O(1); `update` O(buckets)
//! per class, about 1,000 operations each, besides one for every life that is passed to it.

/// Four buckets to an octave, up to 2^32 blocks.
pub(super) const BUCKETS: usize = 128;

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

/// Lives given up as lost from which on they say what does not come back: fewer are the first minutes of a small pool.
const LOST_LEAST: f64 = 4096.0;

type Counts = [f64; BUCKETS];

/// Lives of every class, and the index made of them. Class `kind * each + of_kind`.
#[derive(Debug)]
pub(super) struct Lives {
    /// Classes of a kind.
    each: usize,
    /// Lives at an age from which on a class speaks more for itself than its kind does.
    prior: f64,
    /// What old counts keep with every update, so that the policy follows the traffic.
    fade: f64,
    /// Lives that ended by a use at this age.
    used: Box<[Counts]>,
    /// Lives no longer followed at this age.
    lost: Box<[Counts]>,
    /// Of `update`: lives that were watched through a bucket.
    watched: Box<[Counts]>,
    index: Box<[Counts]>,
    /// The chance that a life ends by a use at all.
    returns: Box<[f64]>,
}

/// Adds up a column of counts.
fn add(sum: &mut Counts, counts: &Counts) {
    for (sum, count) in sum.iter_mut().zip(counts) {
        *sum += count;
    }
}

impl Lives {
    /// Before anything is known, younger is better.
    pub fn new(kinds: usize, each: usize, prior: f64, fade: f64) -> Self {
        let counts = |value: Counts| vec![value; kinds * each].into_boxed_slice();
        Self {
            each,
            prior,
            fade,
            used: counts([0.0; BUCKETS]),
            lost: counts([0.0; BUCKETS]),
            watched: counts([0.0; BUCKETS]),
            index: counts(std::array::from_fn(|bucket| 1.0 / (1.0 + start(bucket)))),
            returns: vec![1.0; kinds * each].into_boxed_slice(),
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

    /// The chance that a life of this class ends by a use, while it is followed; 1 before anything is known.
    pub fn returns(&self, class: usize) -> f64 {
        self.returns[class]
    }

    /// Makes the index anew. `going_on`: class and age of lives that have not ended, and how many lives each stands for.
    pub fn update(&mut self, going_on: impl Iterator<Item = (usize, u64, f64)>) {
        self.watch(going_on);
        let mut all = ([0.0; BUCKETS], [0.0; BUCKETS]);
        for (used, watched) in self.used.iter().zip(&*self.watched) {
            add(&mut all.0, used);
            add(&mut all.1, watched);
        }
        let all: Counts = std::array::from_fn(|bucket| (all.0[bucket] + 0.1) / (all.1[bucket] + 2.0));
        let prior = self.prior;
        let leaning = |(used, watched): (&Counts, &Counts), on: &Counts| -> Counts {
            std::array::from_fn(|bucket| (used[bucket] + prior * on[bucket]) / (watched[bucket] + prior))
        };
        let classes = self.used.chunks(self.each).zip(self.watched.chunks(self.each));
        for ((used, watched), index) in classes.zip(self.index.chunks_mut(self.each)) {
            let mut kind = ([0.0; BUCKETS], [0.0; BUCKETS]);
            used.iter().for_each(|counts| add(&mut kind.0, counts));
            watched.iter().for_each(|counts| add(&mut kind.1, counts));
            let kind = leaning((&kind.0, &kind.1), &all);
            for (class, index) in used.iter().zip(watched).zip(index) {
                *index = gittins(&leaning(class, &kind));
            }
        }
        self.count_returns();
        for counts in self.used.iter_mut().chain(self.lost.iter_mut()).flatten() {
            *counts *= self.fade;
        }
    }

    /// Of lives that ended, the shares that did by a use. While little was given up as lost, nothing is known of what does not
    /// come back.
    fn count_returns(&mut self) {
        let sums = |counts: &[Counts]| counts.iter().flatten().sum::<f64>();
        let prior = self.prior;
        let leaning = |used: &[Counts], lost: &[Counts], on: f64| {
            (sums(used) + prior * on) / (sums(used) + sums(lost) + prior)
        };
        if sums(&self.lost) < LOST_LEAST {
            return self.returns.fill(1.0);
        }
        let all = leaning(&self.used, &self.lost, 1.0);
        let classes = self.used.chunks(self.each).zip(self.lost.chunks(self.each));
        for ((used, lost), returns) in classes.zip(self.returns.chunks_mut(self.each)) {
            let kind = leaning(used, lost, all);
            for (class, returns) in returns.iter_mut().enumerate() {
                *returns = leaning(&used[class..=class], &lost[class..=class], kind);
            }
        }
    }

    /// Lives that were watched through a bucket: those that ended or were lost later, half of those that stopped in it.
    fn watch(&mut self, going_on: impl Iterator<Item = (usize, u64, f64)>) {
        let watched = &mut self.watched;
        watched.copy_from_slice(&self.lost);
        for (class, age, lives) in going_on {
            watched[class][bucket(age)] += lives;
        }
        for (watched, used) in watched.iter_mut().zip(&*self.used) {
            let mut later = 0.0;
            for (watched, used) in watched.iter_mut().zip(used).rev() {
                let stopped = *watched;
                *watched = later + stopped / 2.0 + used;
                later += stopped + used;
            }
        }
    }
}

/// A stretch of patience, given that its beginning was reached.
#[derive(Clone, Copy)]
struct Stretch {
    wanted: f64,
    time: f64,
    /// Chance to be neither wanted nor given up at its end.
    alive: f64,
}

/// `chance[b]`: that a life which reached bucket `b` ends in it.
///
/// The best patience from a bucket on ends where the chance per time falls below what it was so far. So from the last
/// bucket back, each takes over the stretches after it as long as they are better than itself: O(buckets).
fn gittins(chance: &Counts) -> Counts {
    let mut index = [0.0; BUCKETS];
    let mut ahead = [Stretch { wanted: 0.0, time: 0.0, alive: 0.0 }; BUCKETS];
    let mut stretches = 0usize;
    for (bucket, chance) in chance.iter().enumerate().rev() {
        let time = (start(bucket + 1) - start(bucket)) * (1.0 - chance / 2.0);
        let mut now = Stretch { wanted: *chance, time, alive: 1.0 - chance };
        while let Some(next) = stretches.checked_sub(1).map(|top| ahead[top])
            && next.wanted * now.time > now.wanted * next.time
        {
            now = Stretch {
                wanted: now.wanted + now.alive * next.wanted,
                time: now.time + now.alive * next.time,
                alive: now.alive * next.alive,
            };
            stretches -= 1;
        }
        index[bucket] = now.wanted / now.time;
        ahead[stretches] = now;
        stretches += 1;
    }
    index
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
        let mut lives = Lives::new(1, 2, 32.0, 0.98);
        // Class 0 is wanted again after about 1,000 blocks in half of all cases, class 1 never.
        let ended = |lives: &mut Lives, times: usize| {
            for _ in 0..times {
                lives.used(0, 1000);
                lives.lost(0, 100_000);
                lives.lost(1, 100_000);
                lives.lost(1, 100_000);
            }
            lives.update(std::iter::empty());
        };
        ended(&mut lives, 500);
        let index = |class, age| lives.index(class, age);
        assert!(index(0, 900) > 3.0 * index(0, 10), "the pause is nearly over");
        assert!(index(0, 10) > 3.0 * index(0, 5000), "the pause is long over");
        assert!(index(0, 10) > 10.0 * index(1, 10), "nobody wants the other class");
        assert_eq!([0, 1].map(|class| lives.returns(class)), [1.0; 2], "1,500 lost lives say little");
        ended(&mut lives, 1500);
        let returns = [0, 1].map(|class| lives.returns(class));
        assert!(
            (0.4..0.6).contains(&returns[0]) && returns[1] < 0.1,
            "half of one, none of the other: {returns:?}"
        );
    }

    #[test]
    fn the_index_is_the_best_ratio_over_all_patience() {
        // By the definition: every bucket to start from, every bucket to stop after.
        let by_definition = |chance: &Counts, from: usize| {
            let (mut alive, mut wanted, mut time, mut best) = (1.0, 0.0, 0.0, 0.0f64);
            for (bucket, chance) in chance.iter().enumerate().skip(from) {
                let ends = alive * chance;
                time += (start(bucket + 1) - start(bucket)) * (alive - ends / 2.0);
                wanted += ends;
                alive -= ends;
                best = best.max(wanted / time);
            }
            best
        };
        for seed in 1..50u64 {
            let mut state = seed;
            let chance: Counts = std::array::from_fn(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let draw = (state >> 40) as f64 / (1u64 << 24) as f64;
                if seed % 3 == 0 { draw } else { draw.powi(6) }
            });
            for (from, index) in gittins(&chance).into_iter().enumerate() {
                let best = by_definition(&chance, from);
                assert!((index - best).abs() <= 1e-9 * best, "seed {seed}, from {from}: {index}, not {best}");
            }
        }
    }

    #[test]
    fn a_class_without_counts_is_like_its_kind() {
        let mut lives = Lives::new(2, 2, 32.0, 0.98);
        for _ in 0..500 {
            lives.used(0, 100);
            lives.lost(2, 100_000);
        }
        lives.update(std::iter::empty());
        assert!(lives.index(1, 10) > 5.0 * lives.index(3, 10), "the other class of each kind decides");
        assert!(lives.index(0, 10) > lives.index(1, 10), "its own counts say more");
    }

    #[test]
    fn lives_that_go_on_count_as_watched_so_far() {
        let mut few = Lives::new(1, 1, 32.0, 0.98);
        let mut many = Lives::new(1, 1, 32.0, 0.98);
        (0..20).for_each(|_| few.used(0, 50));
        (0..20).for_each(|_| many.used(0, 50));
        few.update(std::iter::empty());
        many.update(std::iter::once((0, 80, 2000.0)));
        assert!(many.index(0, 10) < few.index(0, 10) / 10.0);
    }
}
