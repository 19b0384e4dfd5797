//! How much of the pool running sequences will hold at once, as far as it can be foreseen.
//!
//! Owns: the forecast that admission is decided by. Must never: be needed for correctness.
//!
//! A sequence needs most when it ends, and then it needs nothing. So what a pool must hold is not the sum of everybody's most (they
//! do not end together) but the most, over the time to come, of the sum. Time is counted in steps, of which each gives a
//! sequence one token. `t` steps from now a sequence that has `g` tokens is alive with the chance that [`OutputLengths`] has
//! learned for `g + t` tokens given `g`, and holds its own blocks of now and those for `t` tokens more; or it is not, and holds
//! none of its own. (What it shares is not counted: it stays held.) Sequences end independently, so the sum has a mean and a variance, and
//!
//! ```text
//! most over t of  mean(t) + z * sqrt(variance(t))
//! ```
//!
//! is rarely exceeded. How large `z` must be for that is learned too ([`Doubt`]). Times are the starts of the buckets of lengths; between two of them the chance is that of the first and
//! the blocks are those of the second, which is never too little.
//!
//! Only group 0 of an undivided pool is looked at in this way. A window group's need hardly grows and ends with the window, and
//! what a tenant gives back in a divided pool may stay its own: there it is the sum of what each is predicted to take.
//!
//! Cost: O(running * buckets up to the longest limit) per step in which somebody waits, O(buckets) per candidate.

use folio_kv::GroupCounts;

use super::predict::{BUCKETS, OutputLengths, start};

/// What one sequence holds and may come to hold, in blocks of group 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding {
    /// It frees so many when it ends.
    pub own: u32,
    /// Positions that its blocks, own and shared, have room for.
    pub capacity: u32,
    /// Tokens it knows, has generated, and may still generate.
    pub known: u32,
    pub generated: u32,
    pub limit: u32,
    pub block_tokens: u32,
}

/// See the module documentation. Empty: nobody runs.
#[derive(Clone, Debug)]
pub(super) struct Outlook {
    mean: [f64; BUCKETS],
    variance: [f64; BUCKETS],
    /// Blocks of their own that those who were added hold: with what is available, all there is to divide.
    pub own: u32,
    /// Blocks they are predicted to take, each by itself.
    pub promised: GroupCounts,
}

impl Default for Outlook {
    fn default() -> Self {
        Self { mean: [0.0; BUCKETS], variance: [0.0; BUCKETS], own: 0, promised: GroupCounts::default() }
    }
}

impl Holding {
    /// Chance and blocks at each time until its limit.
    fn course(self, lengths: &OutputLengths) -> impl Iterator<Item = (f64, f64)> {
        let times = (0..BUCKETS).map(|at| (start(at), start(at + 1)));
        times.take_while(move |(from, _)| *from <= self.limit).map(move |(from, to)| {
            let positions = self.known + to.min(self.limit);
            let more = positions.saturating_sub(self.capacity).div_ceil(self.block_tokens);
            (lengths.chance(self.generated, from), f64::from(self.own + more))
        })
    }
}

impl Outlook {
    pub fn add(&mut self, holding: Holding, lengths: &OutputLengths) {
        for (at, (chance, blocks)) in holding.course(lengths).enumerate() {
            self.mean[at] += chance * blocks;
            self.variance[at] += chance * (1.0 - chance) * blocks * blocks;
        }
        self.own += holding.own;
    }

    /// Blocks that are enough for all who were added and `candidate` too, with `z` standard deviations of doubt.
    pub fn most_with(&self, candidate: Holding, lengths: &OutputLengths, z: f64) -> u32 {
        let mut course = candidate.course(lengths);
        let most = self.mean.iter().zip(&self.variance).map(|(mean, variance)| {
            let (chance, blocks) = course.next().unwrap_or((0.0, 0.0));
            let variance = variance + chance * (1.0 - chance) * blocks * blocks;
            mean + chance * blocks + z * variance.sqrt()
        });
        most.fold(0.0, f64::max).ceil() as u32
    }
}

impl Outlook {
    /// Blocks that are enough for all who were added.
    pub fn most(&self, z: f64) -> u32 {
        let most = self.mean.iter().zip(&self.variance).map(|(mean, variance)| mean + z * variance.sqrt());
        most.fold(0.0, f64::max).ceil() as u32
    }
}

/// How many standard deviations of doubt admission leaves room for, so that what it expects is wrong as often as
/// [`SchedulerConfig::preemption_target_permille`] says.
///
/// A preemption for want of blocks raises it, a sequence that ends without one lowers it, in the ratio that balances at the
/// target (Robbins and Monro 1951; as in Gibbs and Candes, "Adaptive Conformal Inference Under Distribution Shift", 2021). So
/// among `n` sequences the share that is preempted differs from the target by no more than `(most - least + STEP) / (STEP * n)`,
/// whatever the traffic, as long as the most doubt is enough to be right and the least is not always.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    z: f64,
    target: f64,
}

impl Doubt {
    /// One wrong guess in a hundred, if outputs were independent and sums normal: where to begin.
    const FIRST: f64 = 2.326;
    const MOST: f64 = 4.0;
    const STEP: f64 = 0.5;

    pub fn new(target_permille: u32) -> Self {
        Self { z: Self::FIRST, target: f64::from(target_permille) / 1000.0 }
    }

    pub fn z(self) -> f64 {
        self.z
    }

    /// A sequence that was admitted lost its blocks for want of blocks, or it ended while the pool was contended.
    pub fn learn(&mut self, preempted: bool) {
        let error = f64::from(u8::from(preempted)) - self.target;
        self.z = (self.z + Self::STEP * error).clamp(0.0, Self::MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(of: impl Iterator<Item = u32>) -> OutputLengths {
        let mut lengths = OutputLengths::default();
        of.for_each(|length| lengths.observe(length, false));
        lengths.refresh(std::iter::empty());
        lengths
    }

    fn holding(own: u32, known: u32, generated: u32, limit: u32) -> Holding {
        Holding { own, capacity: own * 4, known, generated, limit, block_tokens: 4 }
    }

    #[test]
    fn doubt_settles_where_guesses_are_wrong_as_often_as_wanted() {
        for target in [5, 20, 100] {
            let mut doubt = Doubt::new(target);
            let (mut state, mut wrong) = (1u64, 0);
            const N: u32 = 20_000;
            for _ in 0..N {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let luck = (state >> 40) as f64 / f64::from(1 << 24);
                // Rarely wrong when much is left free.
                let preempted = luck < 0.5 * (-2.0 * doubt.z()).exp();
                doubt.learn(preempted);
                wrong += u32::from(preempted);
            }
            let share = f64::from(wrong) / f64::from(N);
            let wanted = f64::from(target) / 1000.0;
            assert!((share - wanted).abs() <= 4.5 / (0.5 * f64::from(N)), "{share}, {wanted} was wanted");
        }
    }

    #[test]
    fn what_is_known_to_end_makes_room_for_what_grows() {
        // Nothing learned, so limits are what counts: one ends after 8 tokens, the other grows to 100 more.
        let unknown = OutputLengths::default();
        let mut outlook = Outlook::default();
        outlook.add(holding(40, 160, 1, 8), &unknown);
        let most = outlook.most_with(holding(0, 20, 0, 100), &unknown, 2.3);
        // Together until the first ends: 40 + 2 and 5 + 2 (and up to two tokens too many); later 5 + 25 for the second alone.
        assert!((49..=52).contains(&most), "{most}, the sum of what each needs most is {}", 42 + 30);
        let alone = Outlook::default().most_with(holding(0, 20, 0, 100), &unknown, 2.3);
        assert_eq!(alone, 30);
    }

    #[test]
    fn doubt_makes_it_more_and_certainty_does_not() {
        let spread = lengths((0..500).map(|i| 1 + (i * 37) % 200));
        let mut outlook = Outlook::default();
        for generated in [0, 20, 50, 90, 120] {
            outlook.add(holding(30, 120, generated, 1000), &spread);
        }
        let with = |z| outlook.most_with(holding(0, 100, 0, 1000), &spread, z);
        assert!(with(0.0) < with(1.0) && with(1.0) < with(3.0), "{} {} {}", with(0.0), with(1.0), with(3.0));
        // At once everybody is there.
        assert!(with(0.0) >= 5 * 30 + 25);
        let unknown = OutputLengths::default();
        let sure = |z| outlook_of(&unknown).most_with(holding(0, 100, 0, 10), &unknown, z);
        assert_eq!(sure(0.0), sure(3.0));
    }

    fn outlook_of(lengths: &OutputLengths) -> Outlook {
        let mut outlook = Outlook::default();
        outlook.add(holding(30, 120, 5, 60), lengths);
        outlook
    }
}
