//! How many tokens a sequence will still generate.
//!
//! Owns: a decaying histogram of the lengths of finished outputs. Must never: be needed for correctness; a wrong guess
//! costs a preemption or some idle blocks.
//!
//! Given that a sequence has generated `g` tokens, its length is taken as the mean of the observed lengths above `g`.
//! The mean and not a quantile, because what admission needs is the *sum* over all running sequences. Before enough
//! outputs were seen, and in the guaranteed mode, the answer is max_tokens.
//!
//! Cost: O(1) per question, O(buckets) after a new observation.

/// Two buckets per octave: 0, 1, 2, 3, 4, 6, 8, 12, ... up to 2^20 and above.
const BUCKETS: usize = 42;
const OBSERVATIONS_MIN: u32 = 32;
/// Counts are halved beyond this, so that a change of traffic is noticed within some hundreds of outputs.
const OBSERVATIONS_MAX: u32 = 1024;

#[derive(Clone, Debug)]
pub(crate) struct OutputLengths {
    counts: [u32; BUCKETS],
    sums: [u64; BUCKETS],
    observations: u32,
    /// Mean of the observed lengths in bucket `i` and above; 0: none.
    mean_above: [u32; BUCKETS],
    stale: bool,
    guarantee: bool,
}

fn bucket(length: u32) -> usize {
    if length < 2 {
        return length as usize;
    }
    let octave = length.ilog2();
    let upper_half = (length >> (octave - 1)) & 1;
    ((2 * octave + upper_half) as usize).min(BUCKETS - 1)
}

impl OutputLengths {
    pub fn new(guarantee: bool) -> Self {
        Self {
            counts: [0; BUCKETS],
            sums: [0; BUCKETS],
            observations: 0,
            mean_above: [0; BUCKETS],
            stale: false,
            guarantee,
        }
    }

    pub fn observe(&mut self, length: u32) {
        let at = bucket(length);
        self.counts[at] += 1;
        self.sums[at] += u64::from(length);
        self.observations += 1;
        if self.observations > OBSERVATIONS_MAX {
            for (count, sum) in self.counts.iter_mut().zip(&mut self.sums) {
                // Both are scaled alike, so that the mean of a bucket stays what it was.
                let half = *count / 2;
                *sum = if *count == 0 { 0 } else { *sum * u64::from(half) / u64::from(*count) };
                *count = half;
            }
            self.observations = self.counts.iter().sum();
        }
        self.stale = true;
    }

    fn refresh(&mut self) {
        let (mut count, mut sum) = (0u64, 0u64);
        for at in (0..BUCKETS).rev() {
            count += u64::from(self.counts[at]);
            sum += self.sums[at];
            self.mean_above[at] = if count == 0 { 0 } else { sum.div_ceil(count) as u32 };
        }
        self.stale = false;
    }

    /// Tokens still to come after `generated`, at most `limit`, at least 1 (0 when the limit is 0).
    pub fn remaining(&mut self, generated: u32, limit: u32) -> u32 {
        if self.guarantee || self.observations < OBSERVATIONS_MIN {
            return limit;
        }
        if self.stale {
            self.refresh();
        }
        let mean = self.mean_above[(bucket(generated) + 1).min(BUCKETS - 1)];
        // Longer than anything seen: as long again as it already is.
        let expected = if mean > generated { mean - generated } else { generated.max(16) };
        expected.min(limit).max(limit.min(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_ascending_and_bounded() {
        let mut last = 0;
        for length in 0..100_000 {
            let at = bucket(length);
            assert!(at >= last && at <= last + 1, "length {length}");
            last = at;
        }
        assert_eq!(bucket(u32::MAX), BUCKETS - 1);
    }

    #[test]
    fn knows_nothing_at_first_and_learns_the_mean() {
        let mut lengths = OutputLengths::new(false);
        assert_eq!(lengths.remaining(0, 500), 500);
        for _ in 0..100 {
            lengths.observe(100);
        }
        assert_eq!(lengths.remaining(0, 500), 100);
        assert_eq!(lengths.remaining(40, 500), 60);
        assert_eq!(lengths.remaining(0, 7), 7, "never more than max_tokens allows");
        assert_eq!(lengths.remaining(300, 500), 300, "longer than anything seen: as long again");
        assert_eq!(lengths.remaining(5, 0), 0);
    }

    #[test]
    fn forgets_old_traffic() {
        let mut lengths = OutputLengths::new(false);
        for _ in 0..1000 {
            lengths.observe(1000);
        }
        for _ in 0..5000 {
            lengths.observe(10);
        }
        assert!(lengths.remaining(0, 10_000) < 40, "got {}", lengths.remaining(0, 10_000));
    }

    #[test]
    fn the_guaranteed_mode_always_assumes_the_worst() {
        let mut lengths = OutputLengths::new(true);
        for _ in 0..100 {
            lengths.observe(3);
        }
        assert_eq!(lengths.remaining(0, 400), 400);
    }
}
