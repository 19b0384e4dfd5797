//! Time as an input. Only the thread at the outermost edge of the engine asks; the scheduler is told.

use std::time::Instant;

use crate::request::Micros;

/// Where the engine's time comes from.
pub trait Clock: Send + Sync {
    /// Never goes backwards.
    fn now(&self) -> Micros;
}

/// Monotonic time since it was made.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Micros {
        Micros(self.0.elapsed().as_micros() as u64)
    }
}
