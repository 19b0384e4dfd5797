//! Budgets that refill steadily, and what refusals have of one.

use std::time::{Duration, Instant};

/// Refusals of a minute that wait for nothing.
const REFUSALS_PER_MINUTE: f64 = 6000.0;
/// Those that wait, each for its turn; 100 wait for a second, and nobody for longer.
const REFUSALS_WAITING: f64 = 100.0;

/// A budget that refills steadily up to one minute's worth.
#[derive(Debug)]
pub struct Bucket {
    pub per_minute: f64,
    pub left: f64,
    at: Instant,
}

impl Bucket {
    pub fn new(per_minute: f64, now: Instant) -> Self {
        Self { per_minute, left: per_minute, at: now }
    }

    pub fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.left = (self.left + passed * self.per_minute / 60.0).min(self.per_minute);
        self.at = self.at.max(now);
    }

    /// How long until `amount` is there, after [`Bucket::refill`].
    pub fn wait(&self, amount: f64) -> Duration {
        let missing = (amount - self.left).max(0.0);
        Duration::from_secs_f64((missing * 60.0 / self.per_minute).min(86_400.0))
    }

    pub fn back(&mut self, amount: f64) {
        self.left = (self.left + amount).min(self.per_minute);
    }
}

/// How fast whoever is refused is told so: who comes again at once, without end, would take a processor.
#[derive(Debug)]
pub struct Refusals(Bucket);

impl Refusals {
    pub fn new(now: Instant) -> Self {
        Self(Bucket::new(REFUSALS_PER_MINUTE, now))
    }

    /// How long this one waits.
    pub fn delay(&mut self, now: Instant) -> Option<Duration> {
        let Self(bucket) = self;
        bucket.refill(now);
        bucket.left = (bucket.left - 1.0).max(-REFUSALS_WAITING);
        Some(bucket.wait(0.0)).filter(|delay| !delay.is_zero())
    }
}
