//! Figures over samples.

use serde::Serialize;

/// Mean and percentiles of one kind of measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Summary {
    /// Zeros when there are no samples.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.retain(|sample| sample.is_finite());
        if samples.is_empty() {
            return Self::default();
        }
        samples.sort_by(f64::total_cmp);
        Self {
            count: samples.len(),
            mean: samples.iter().sum::<f64>() / samples.len() as f64,
            p50: percentile(&samples, 50.0),
            p90: percentile(&samples, 90.0),
            p99: percentile(&samples, 99.0),
            max: samples[samples.len() - 1],
        }
    }
}

/// Linear interpolation between the closest ranks, as numpy does. `sorted` is not empty.
fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let (low, part) = (rank.floor() as usize, rank.fract());
    let high = (low + 1).min(sorted.len() - 1);
    sorted[low] + (sorted[high] - sorted[low]) * part
}

/// The middle of a few repetitions.
pub fn median(samples: Vec<f64>) -> f64 {
    Summary::of(samples).p50
}

/// Bounds between which the median lies with 95 % confidence: percentiles of the medians of 2,000 draws with replacement (bootstrap).
pub fn median_interval(samples: &[f64]) -> (f64, f64) {
    let (mut random, count) = (Random::new(0), samples.len());
    let mut medians: Vec<f64> = (0..if count > 0 { 2000 } else { 0 })
        .map(|_| median((0..count).map(|_| samples[random.below(count as u64) as usize]).collect()))
        .collect();
    medians.sort_by(f64::total_cmp);
    match medians.is_empty() {
        true => (0.0, 0.0),
        false => (percentile(&medians, 2.5), percentile(&medians, 97.5)),
    }
}

/// A generator of its own (splitmix64), so that a seed gives the same load on every machine and in every version.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `0..n`; `n` is at least 1.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(n)) >> 64) as u64
    }

    /// In `(0, 1]`.
    pub fn unit(&mut self) -> f64 {
        ((self.draw() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Seconds until the next arrival of a Poisson process with `rate` a second.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        -self.unit().ln() / rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_numpys() {
        let summary = Summary::of((1..=10).rev().map(f64::from).collect());
        assert_eq!((summary.count, summary.mean, summary.p50, summary.max), (10, 5.5, 5.5, 10.0));
        assert!((summary.p90 - 9.1).abs() < 1e-12 && (summary.p99 - 9.91).abs() < 1e-12);
        assert_eq!(Summary::of(vec![]), Summary::default());
        assert_eq!(Summary::of(vec![3.0, f64::NAN]).p99, 3.0);
    }

    #[test]
    fn the_interval_of_a_median_is_narrower_than_the_range() {
        let samples: Vec<f64> = (0..41).map(f64::from).collect();
        let (low, high) = median_interval(&samples);
        assert!((10.0..18.0).contains(&low) && (22.0..30.0).contains(&high), "{low} {high}");
        assert_eq!(median_interval(&[3.0]), (3.0, 3.0));
        assert_eq!(median_interval(&[1.0, 2.0, 9.0]), (1.0, 9.0));
        assert_eq!(median_interval(&[]), (0.0, 0.0));
    }

    #[test]
    fn arrivals_have_the_rate_asked_for() {
        let mut random = Random::new(1);
        let total: f64 = (0..20_000).map(|_| random.exponential(4.0)).sum();
        assert!((total / 20_000.0 - 0.25).abs() < 0.01, "{total}");
        assert!((0..1000).all(|_| random.below(7) < 7));
    }
}
