//! The time of day, by which what is kept expires.
//!
//! Owns: that it only goes forward, whatever a machine's clock does: where that is set back, time goes on from where it was, so nothing that has
//! expired is found again. Must never: be used to measure how long something takes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Seconds since 1970 by somebody's clock, which may step.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl WallClock {
    pub fn new(now_s: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now_s))
    }
}

impl Default for WallClock {
    /// The machine's.
    fn default() -> Self {
        Self::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
    }
}

impl std::fmt::Debug for WallClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WallClock")
    }
}

/// A clock that never goes back.
pub(crate) struct Forward {
    clock: WallClock,
    /// The latest time that was told, and when that was.
    latest: Mutex<(u64, Instant)>,
}

impl Forward {
    /// `floor_s`: a time that has passed.
    pub fn new(clock: WallClock, floor_s: u64) -> Self {
        Self { clock, latest: Mutex::new((floor_s, Instant::now())) }
    }

    /// Seconds since 1970.
    pub fn now_s(&self) -> u64 {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (self.clock.0)().max(latest.0 + latest.1.elapsed().as_secs());
        if now > latest.0 {
            *latest = (now, Instant::now());
        }
        now
    }

    /// A time that has passed elsewhere.
    pub fn pass(&self, time_s: u64) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if time_s > latest.0 {
            *latest = (time_s, Instant::now());
        }
    }

    /// Behind what is stored now and wanted for so long. What never expires has no time, and what ends beyond 2106 neither.
    pub fn expires_s(&self, ttl: Option<Duration>) -> Option<u32> {
        // A part of a second is one.
        let ttl = ttl?.as_millis().div_ceil(1000);
        u32::try_from(u128::from(self.now_s()).saturating_add(ttl)).ok()
    }

    pub fn is_over(&self, expires_s: u32) -> bool {
        expires_s != 0 && u64::from(expires_s) <= self.now_s()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    #[test]
    fn a_clock_that_is_set_back_does_not_go_back() {
        let time = Arc::new(AtomicU64::new(1000));
        let shown = time.clone();
        let clock = Forward::new(WallClock::new(move || shown.load(Relaxed)), 0);
        let end = clock.expires_s(Some(Duration::from_millis(9500))).expect("a time");
        assert_eq!(end, 1010);
        assert_eq!((clock.expires_s(None), clock.expires_s(Some(Duration::MAX))), (None, None));
        assert!(!clock.is_over(end) && !clock.is_over(0));
        time.store(1010, Relaxed);
        assert!(clock.is_over(end));
        time.store(5, Relaxed);
        assert!(clock.is_over(end) && clock.now_s() >= 1010);
        let later = Forward::new(WallClock::new(|| 5), 1010);
        assert!(later.is_over(end), "nor does the next process");
    }
}
