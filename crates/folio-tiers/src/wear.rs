//! How much is written: at most so many bytes in any 24 hours.

use std::time::{Duration, Instant};

/// One more than a day has: of the oldest hour a part lies within the last 24.
const HOURS: usize = 25;
const HOUR: Duration = Duration::from_secs(3600);

pub struct Wear {
    per_day: Option<u64>,
    since: Instant,
    /// Bytes by hour since `since`, the last of them `hour`.
    hours: [u64; HOURS],
    hour: u64,
}

impl Wear {
    pub fn new(per_day: Option<u64>) -> Self {
        Self { per_day, since: Instant::now(), hours: [0; HOURS], hour: 0 }
    }

    /// What was written before the start.
    pub fn before(&mut self, age: Duration, bytes: u64) {
        let hours = (age.as_secs() / HOUR.as_secs()) as usize;
        if hours < HOURS {
            self.hours[(HOURS - hours) % HOURS] += bytes;
        }
    }

    /// Whether so much may be written now; then it counts.
    pub fn take(&mut self, bytes: u64) -> bool {
        self.take_at(self.since.elapsed(), bytes)
    }

    fn take_at(&mut self, now: Duration, bytes: u64) -> bool {
        let Some(most) = self.per_day else { return true };
        let now = now.as_secs() / HOUR.as_secs();
        for hour in (self.hour + 1..=now).take(HOURS) {
            self.hours[hour as usize % HOURS] = 0;
        }
        self.hour = self.hour.max(now);
        let fits = self.hours.iter().sum::<u64>() + bytes <= most;
        if fits {
            self.hours[self.hour as usize % HOURS] += bytes;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In no 24 hours is more written than may be, and what was written before the start counts.
    #[test]
    fn a_day_has_its_bytes() {
        let most = 1000;
        let mut wear = Wear::new(Some(most));
        wear.before(HOUR * 3, 300);
        wear.before(HOUR * 30, 9999);
        // Times since three hours before the start.
        let mut written = vec![(Duration::ZERO, 300)];
        let mut seed = 1u64;
        let mut now = Duration::ZERO;
        for _ in 0..5000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            now += Duration::from_secs(seed >> 40 & 0x7ff);
            let bytes = seed >> 33 & 0x7f;
            if wear.take_at(now, bytes) {
                written.push((now + HOUR * 3, bytes));
            }
            let recent = written.iter().filter(|(at, _)| *at + HOUR * 24 > now + HOUR * 3);
            let day: u64 = recent.map(|(_, bytes)| bytes).sum();
            assert!(day <= most, "{day} at {now:?}");
        }
        let all: u64 = written.iter().map(|(_, bytes)| bytes).sum();
        assert!(all as f64 > 0.8 * most as f64 * now.as_secs_f64() / 86400.0, "{all} is too little");
        assert!(wear.take_at(now + HOUR * 1000, most), "a long pause gives all of a day back");
        assert!(!wear.take_at(now + HOUR * 1000, 1));
    }
}
