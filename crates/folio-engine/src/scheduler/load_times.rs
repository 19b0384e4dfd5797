//! What a load from a tier takes over its bytes, as measured.
//!
//! Owns: the estimate, of one tier. Must never: read a clock, or be needed for correctness.
//!
//! A load takes `latency + bytes / bandwidth`. The two are the least-squares solution over past loads, old ones fading, in which an error
//! counts by its share of the bytes: what loads differ by grows with them. So small loads tell the latency, large ones the bandwidth.
//!
//! Loads of one size do not tell them apart. Then a smaller one is taken to last as much less as it is smaller, and a larger one no longer:
//! either is tried where that pays, and what it took is known from then on.

use crate::stats::LoadCost;

/// What a load keeps of the weight of those before.
const LOADS: f64 = 0.9;
/// A load counts for so many times of what those before took at most: one that hung says little of the next.
const HUNG: f64 = 4.0;
/// Loads are of one size where what they differ by is, squared, less than this part.
const ONE_SIZE: f64 = 0.01;

/// See the module documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LoadTimes {
    /// Sums over loads: how many there were, of `1 / bytes`, of its square, of `us / bytes`, and of `us / bytes²`.
    loads: f64,
    inverse: f64,
    inverse_squared: f64,
    us: f64,
    us_inverse: f64,
}

impl LoadTimes {
    /// A load of so many bytes, which are not zero, took `us`.
    pub fn add(&mut self, bytes: f64, us: f64) {
        // Of none that took no time at all.
        let us = if self.is_known() { us.min(HUNG * self.us_at_most(bytes).max(1.0)) } else { us };
        let (inverse, rate) = (1.0 / bytes, us / bytes);
        for (sum, more) in [
            (&mut self.loads, 1.0),
            (&mut self.inverse, inverse),
            (&mut self.inverse_squared, inverse * inverse),
            (&mut self.us, rate),
            (&mut self.us_inverse, rate * inverse),
        ] {
            *sum = *sum * LOADS + more;
        }
    }

    pub fn is_known(&self) -> bool {
        self.loads > 0.0
    }

    /// What a load of so many bytes takes, microseconds. Of a tier that is known.
    pub fn us(&self, bytes: f64) -> f64 {
        self.line().map_or_else(|| self.rate() * bytes.min(self.size()), |cost| cost.us(bytes))
    }

    /// The same where it is expected to take long: no less than one of those before.
    fn us_at_most(&self, bytes: f64) -> f64 {
        let bytes = bytes.max(self.size());
        self.line().map_or_else(|| self.rate() * bytes, |cost| cost.us(bytes))
    }

    /// The estimate; `None`: nothing was loaded. Where loads of one size were, all of what they took is the bandwidth's.
    pub fn cost(&self) -> Option<LoadCost> {
        self.is_known().then(|| self.line().unwrap_or(LoadCost { latency_us: 0.0, us_per_byte: self.rate() }))
    }

    /// Microseconds per byte, and bytes, in the mean: the line goes through both.
    fn rate(&self) -> f64 {
        self.us / self.loads
    }

    fn size(&self) -> f64 {
        self.loads / self.inverse
    }

    /// `None`: loads were of one size.
    fn line(&self) -> Option<LoadCost> {
        let (n, u, uu) = (self.loads, self.inverse, self.inverse_squared);
        let determinant = n * uu - u * u;
        if determinant <= ONE_SIZE * n * uu {
            return None;
        }
        let latency_us = (n * self.us_inverse - u * self.us) / determinant;
        let us_per_byte = (uu * self.us - u * self.us_inverse) / determinant;
        Some(if latency_us < 0.0 {
            LoadCost { latency_us: 0.0, us_per_byte: self.rate() }
        } else if us_per_byte < 0.0 {
            LoadCost { latency_us: self.us_inverse / uu, us_per_byte: 0.0 }
        } else {
            LoadCost { latency_us, us_per_byte }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a tier that was loaded from as often as told.
    fn measured(loads: &[(f64, u32)], us: impl Fn(f64) -> f64) -> LoadTimes {
        let mut times = LoadTimes::default();
        for (bytes, count) in loads {
            (0..*count).for_each(|_| times.add(*bytes, us(*bytes)));
        }
        times
    }

    fn near(is: f64, wanted: f64) {
        assert!((is - wanted).abs() <= 0.01 * wanted, "{is}, {wanted} was wanted");
    }

    #[test]
    fn small_and_large_loads_tell_latency_and_bandwidth() {
        let us = |bytes: f64| 5000.0 + bytes / 1000.0;
        for loads in [[(1e5, 1), (1e8, 1)], [(1e8, 20), (1e5, 1)], [(1e5, 20), (1e8, 3)]] {
            let times = measured(&loads, us);
            [1e4, 1e6, 1e9].into_iter().for_each(|bytes| near(times.us(bytes), us(bytes)));
            let cost = times.cost().unwrap();
            near(cost.latency_us, 5000.0);
            near(cost.us_per_byte, 0.001);
        }
    }

    #[test]
    fn where_there_is_no_latency_every_byte_takes_the_same() {
        let times = measured(&[(1e6, 5), (4e6, 5)], |bytes| bytes / 1000.0);
        near(times.us(1e8), 1e5);
        near(times.us(1e4), 10.0);
        // What differs by chance makes none of less than zero.
        let times = measured(&[(1e6, 5), (4e6, 5)], |bytes| bytes / 1000.0 - 100.0);
        assert_eq!(times.cost().unwrap().latency_us, 0.0);
    }

    #[test]
    fn of_one_size_others_are_tried() {
        let mut times = measured(&[(1e6, 3)], |_| 2000.0);
        near(times.us(1e5), 200.0);
        near(times.us(1e6), 2000.0);
        near(times.us(1e8), 2000.0);
        times.add(2e6, 4000.0);
        near(times.us(1e8), 200_000.0);
        assert_eq!(LoadTimes::default().cost(), None);
    }

    #[test]
    fn one_that_hung_says_little_and_what_became_slow_is_found_out() {
        let us = |bytes: f64| 1000.0 + bytes / 1000.0;
        for size in [1e5, 1e7] {
            let mut times = measured(&[(1e5, 10), (1e7, 10)], us);
            times.add(size, 5e6);
            let slower = times.us(1e7) / us(1e7);
            assert!((0.9..1.6).contains(&slower), "{slower}");
        }
        let mut times = measured(&[(1e5, 10), (1e7, 10)], us);
        (0..60).for_each(|_| times.add(1e7, 5e6));
        assert!(times.us(1e7) > 4e6, "{}", times.us(1e7));
    }
}
