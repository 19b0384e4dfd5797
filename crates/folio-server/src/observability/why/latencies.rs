//! How long requests of the last minute took, as percentiles.
//!
//! Owns: counts by time, in slices of ten seconds. Must never: grow. Every eighth of an octave is counted by itself, so a percentile is told to within
//! a tenth of itself. Cost: a request is a short lock and a few additions; a report adds up some 1,000 counts of each figure. Memory: under
//! 32 KiB.

use folio_engine::Micros;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use super::config::{SLICE_US, SLICES, seconds, window_from};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Latency {
    /// From a request's arrival to its first token.
    FirstToken,
    /// Of a choice: from its first token to its last, divided by the tokens behind the first.
    PerOutputToken,
    /// Of a choice, in the engine's queue.
    Queue,
    /// Of a choice, in the engine.
    Total,
}

impl Latency {
    const ALL: [Self; 4] = [Self::FirstToken, Self::PerOutputToken, Self::Queue, Self::Total];

    fn name(self) -> &'static str {
        match self {
            Self::FirstToken => "time_to_first_token_s",
            Self::PerOutputToken => "time_per_output_token_s",
            Self::Queue => "queue_s",
            Self::Total => "total_s",
        }
    }
}

const PERCENTILES: [(&str, f64); 3] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)];
/// Counts of an octave.
const PARTS: f64 = 8.0;
/// From a microsecond to an hour and a half; what is beyond counts as that.
const COUNTS: usize = 33 * PARTS as usize;

/// Ten seconds.
#[derive(Clone)]
struct LatencySlice {
    /// Since the start.
    number: u64,
    counts: [[u32; COUNTS]; Latency::ALL.len()],
}

impl LatencySlice {
    fn new(number: u64) -> Self {
        Self { number, counts: [[0; COUNTS]; Latency::ALL.len()] }
    }
}

/// See the module documentation.
pub(super) struct Latencies(Mutex<Vec<LatencySlice>>);

impl Default for Latencies {
    fn default() -> Self {
        Self(Mutex::new(vec![LatencySlice::new(0); SLICES]))
    }
}

/// Where a time is counted.
fn place(us: f64) -> usize {
    ((us.max(1.0).log2() * PARTS) as usize).min(COUNTS - 1)
}

/// The middle of what is counted there, microseconds.
fn middle(place: usize) -> f64 {
    ((place as f64 + 0.5) / PARTS).exp2()
}

impl Latencies {
    pub fn count(&self, now: Micros, latency: Latency, us: f64) {
        let slice = now.0 / SLICE_US;
        let mut slices = self.0.lock();
        let kept = &mut slices[slice as usize % SLICES];
        if kept.number != slice {
            *kept = LatencySlice::new(slice);
        }
        let count = &mut kept.counts[latency as usize][place(us)];
        *count = count.saturating_add(1);
    }

    /// Since [`window_from`]: of each figure its percentiles in seconds, and of how many.
    pub fn report(&self, now: Micros) -> Value {
        let (first, last) = (window_from(now).0 / SLICE_US, now.0 / SLICE_US);
        let mut sums = [[0u64; COUNTS]; Latency::ALL.len()];
        let within = |kept: &&LatencySlice| (first..=last).contains(&kept.number);
        for LatencySlice { counts, .. } in self.0.lock().iter().filter(within) {
            for (sums, counts) in sums.iter_mut().zip(counts) {
                sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += u64::from(*count));
            }
        }
        let told =
            Latency::ALL.map(|latency| (latency.name().to_owned(), percentiles(&sums[latency as usize])));
        told.into_iter().collect::<Map<String, Value>>().into()
    }
}

fn percentiles(counts: &[u64; COUNTS]) -> Value {
    let all: u64 = counts.iter().sum();
    let mut told = json!({"count": all});
    for (name, share) in PERCENTILES {
        let (mut left, rank) = (0, (share * all as f64).ceil().max(1.0) as u64);
        let place = counts.iter().position(|count| {
            left += count;
            left >= rank
        });
        told[name] = json!(place.map(|place| seconds(middle(place))));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_last_minute_and_within_a_tenth() {
        let latencies = Latencies::default();
        let none = latencies.report(Micros(5));
        assert_eq!(none["queue_s"], json!({"count": 0, "p50": null, "p90": null, "p99": null}));
        let now = |s: u64| Micros(s * 1_000_000);
        for ms in 1..=1000 {
            latencies.count(now(100), Latency::FirstToken, f64::from(ms) * 1000.0);
        }
        latencies.count(now(130), Latency::Total, 0.0);
        latencies.count(now(130), Latency::Total, f64::MAX);
        let told = latencies.report(now(149));
        let first = &told["time_to_first_token_s"];
        assert_eq!(first["count"], 1000);
        for (name, expected) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)] {
            let told = first[name].as_f64().unwrap();
            assert!((told / expected - 1.0).abs() < 0.1, "{name}: {told}");
        }
        assert!(
            told["total_s"]["p50"].as_f64().unwrap() < 2e-6
                && told["total_s"]["p99"].as_f64().unwrap() > 4000.0
        );
        assert_eq!(latencies.report(now(160))["time_to_first_token_s"]["count"], 0, "it was long ago");
        latencies.count(now(160), Latency::FirstToken, 1.0);
        assert_eq!(latencies.report(now(160))["time_to_first_token_s"]["count"], 1, "the slice begins anew");
    }
}
