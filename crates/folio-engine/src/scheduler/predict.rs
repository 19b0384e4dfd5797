//! How many tokens a sequence will still generate.
//!
//! Owns: what the lengths of past outputs say about those to come. Must never: be needed for correctness; a wrong guess
//! costs a preemption or some idle blocks.
//!
//! The lengths make a survival curve: the chance that an output is longer than so many tokens. Each bucket of lengths has a
//! hazard, the share of the outputs that got so far and ended there (the product-limit estimate of Kaplan and Meier, "Nonparametric
//! Estimation from Incomplete Observations", 1958). An output that was cut by its own max_tokens got so far and did not end: it
//! counts among the former and not among the latter, so short limits do not make outputs look short. So does an output that is
//! still running, or the short ones, which end first, would be all that is known of a burst.
//!
//! Every bucket has seen one more output that would be as long again as it already is with a chance of one half. So there is
//! an answer beyond the longest output seen, and nothing is ever certain. Before enough outputs were seen everything is assumed to go on to
//! max_tokens. Old counts fade.
//!
//! Cost: O(1) per question, O(running + buckets) to bring the curve up to date.

/// Four buckets per octave, 0, 1, 2, ... 8, 10, 12, 14, 16, 20, ..., up to 2^21.
pub(super) const BUCKETS: usize = 80;
const OBSERVATIONS_MIN: u32 = 32;
/// Counts are halved beyond this, so that a change of traffic is noticed within some hundreds of outputs.
const OBSERVATIONS_MAX: u32 = 2048;
/// An output of which nothing is known is longer than this with a chance of one half.
const UNKNOWN: f64 = 16.0;

#[derive(Clone, Debug)]
pub(crate) struct OutputLengths {
    /// Outputs that ended in a bucket by themselves, and those that were cut there.
    ended: [u32; BUCKETS],
    cut: [u32; BUCKETS],
    observations: u32,
    /// Chance to be longer than where a bucket starts, and the integral of that from 0.
    alive: [f64; BUCKETS + 1],
    lived: [f64; BUCKETS + 1],
}

pub(super) fn bucket(length: u32) -> usize {
    if length < 4 {
        return length as usize;
    }
    let octave = length.ilog2();
    let quarter = (length >> (octave - 2)) & 3;
    ((4 * octave + quarter) as usize - 4).min(BUCKETS - 1)
}

/// The least length in a bucket.
pub(super) fn start(bucket: usize) -> u32 {
    if bucket < 8 {
        return bucket as u32;
    }
    let octave = (bucket as u32 + 4) / 4;
    (1 << octave) + ((bucket as u32 % 4) << (octave - 2))
}

impl Default for OutputLengths {
    fn default() -> Self {
        Self {
            ended: [0; BUCKETS],
            cut: [0; BUCKETS],
            observations: 0,
            alive: [1.0; BUCKETS + 1],
            lived: [0.0; BUCKETS + 1],
        }
    }
}

impl OutputLengths {
    /// `cut`: it reached its own limit, and would have gone on.
    pub fn observe(&mut self, length: u32, cut: bool) {
        let counts = if cut { &mut self.cut } else { &mut self.ended };
        counts[bucket(length)] += 1;
        self.observations += 1;
        if self.observations > OBSERVATIONS_MAX {
            self.ended.iter_mut().chain(&mut self.cut).for_each(|count| *count /= 2);
            self.observations = self.ended.iter().chain(&self.cut).sum();
        }
    }

    /// Brings the curve up to date; the other functions read it. `running`: what running outputs have come to.
    pub fn refresh(&mut self, running: impl Iterator<Item = u32>) {
        let mut cut = self.cut;
        // Those that got to the start of a bucket.
        let mut reached = self.observations;
        for length in running.filter(|length| *length > 0) {
            cut[bucket(length)] += 1;
            reached += 1;
        }
        let mut reached = f64::from(reached);
        for (at, cut) in cut.into_iter().enumerate() {
            let (from, to) = (f64::from(start(at)), f64::from(start(at + 1)));
            let (ended, cut) = (f64::from(self.ended[at]), f64::from(cut));
            let unknown = (to - from) / (to + UNKNOWN);
            // Who was cut there was at risk for half of it, as the actuaries say.
            let hazard = (ended + unknown) / (reached - cut / 2.0 + 1.0);
            self.alive[at + 1] = self.alive[at] * (1.0 - hazard);
            self.lived[at + 1] = self.lived[at] + (to - from) * (self.alive[at] + self.alive[at + 1]) / 2.0;
            reached -= ended + cut;
        }
    }

    fn knows(&self) -> bool {
        self.observations >= OBSERVATIONS_MIN
    }

    /// The curve and its integral at `length`: bucket by bucket a line.
    fn at(&self, length: u32) -> (f64, f64) {
        let bucket = bucket(length);
        let (from, to) = (start(bucket), start(bucket + 1));
        let part = (f64::from(length - from) / f64::from(to - from)).min(1.0);
        let alive = self.alive[bucket] + part * (self.alive[bucket + 1] - self.alive[bucket]);
        (alive, self.lived[bucket] + f64::from(length - from) * (self.alive[bucket] + alive) / 2.0)
    }

    /// Chance that an output that has `generated` tokens gets `more`, 0 to 1.
    pub fn chance(&self, generated: u32, more: u32) -> f64 {
        if !self.knows() {
            return 1.0;
        }
        (self.at(generated.saturating_add(more)).0 / self.at(generated).0).min(1.0)
    }

    /// Mean of the tokens still to come after `generated`, at most `limit`, at least 1 (0 when the limit is 0).
    pub fn remaining(&self, generated: u32, limit: u32) -> u32 {
        if !self.knows() {
            return limit;
        }
        let ((alive, before), (_, after)) = (self.at(generated), self.at(generated.saturating_add(limit)));
        (((after - before) / alive).ceil() as u32).min(limit).max(limit.min(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lengths: impl IntoIterator<Item = (u32, bool)>) -> OutputLengths {
        let mut seen = OutputLengths::default();
        lengths.into_iter().for_each(|(length, cut)| seen.observe(length, cut));
        seen.refresh(std::iter::empty());
        seen
    }

    #[test]
    fn buckets_are_ascending_and_bounded() {
        let mut last = 0;
        for length in 0..100_000 {
            let at = bucket(length);
            assert!(at >= last && at <= last + 1, "length {length}");
            assert!((start(at)..start(at + 1)).contains(&length), "length {length}");
            last = at;
        }
        assert_eq!(bucket(u32::MAX), BUCKETS - 1);
    }

    #[test]
    fn knows_nothing_at_first_and_learns_the_mean() {
        let lengths = OutputLengths::default();
        assert_eq!((lengths.remaining(0, 500), lengths.chance(0, 499)), (500, 1.0));
        let lengths = of((0..400).map(|_| (100, false)));
        let near = |value: u32, wanted: u32| value.abs_diff(wanted) <= wanted / 10;
        assert!(near(lengths.remaining(0, 500), 102), "{}", lengths.remaining(0, 500));
        assert!(near(lengths.remaining(40, 500), 62), "{}", lengths.remaining(40, 500));
        assert!(lengths.chance(0, 95) > 0.9 && lengths.chance(0, 112) < 0.05);
        assert_eq!(lengths.remaining(0, 7), 7, "never more than max_tokens allows");
        assert_eq!(lengths.remaining(5, 0), 0);
    }

    #[test]
    fn beyond_what_was_seen_it_is_as_long_again_or_not() {
        let lengths = of((0..400).map(|_| (100, false)));
        let chance = lengths.chance(400, 400);
        assert!((0.4..0.6).contains(&chance), "{chance}");
    }

    #[test]
    fn short_limits_do_not_make_outputs_look_short() {
        // Half may generate 10 tokens and would go on; the others end at 200.
        let lengths = of((0..600).map(|i| if i % 2 == 0 { (10, true) } else { (200, false) }));
        assert!(lengths.chance(0, 150) > 0.9, "{}", lengths.chance(0, 150));
        assert!(lengths.remaining(0, 1000) > 180, "{}", lengths.remaining(0, 1000));
        let taken = of((0..600).map(|i| (if i % 2 == 0 { 10 } else { 200 }, false)));
        assert!(taken.remaining(0, 1000) < 120, "control: {}", taken.remaining(0, 1000));
    }

    #[test]
    fn what_still_runs_counts_among_the_long() {
        // A burst: half of it ended after 20 tokens, the others have come to 100.
        let mut lengths = of((0..50).map(|_| (20, false)));
        assert!(lengths.chance(0, 60) < 0.1, "control: {}", lengths.chance(0, 60));
        lengths.refresh((0..50).map(|_| 100));
        assert!((0.4..0.6).contains(&lengths.chance(0, 60)), "{}", lengths.chance(0, 60));
    }

    #[test]
    fn forgets_old_traffic() {
        let lengths = of((0..1000).map(|_| (1000, false)).chain((0..20_000).map(|_| (10, false))));
        assert!(lengths.remaining(0, 10_000) < 40, "got {}", lengths.remaining(0, 10_000));
    }
}
