//! What is configured, and the units and the window that reports have.

use std::time::Duration;

use folio_engine::Micros;

use super::kind::RequestKind;
use super::roofline::Roofline;

/// A window is the slice of now and those before it.
pub(super) const SLICE_US: u64 = 10_000_000;
pub(super) const SLICES: usize = 6;

/// What an operator says that cannot be measured.
#[derive(Clone)]
pub struct WhyConfig {
    /// What this machine costs, in any currency. `None`: times are told and no prices.
    pub price_per_hour: Option<f64>,
    pub targets: Targets,
    /// How many times as many tokens the same memory holds as int8. `None`: KV is that small already, or that is not known.
    pub int8_times: Option<f64>,
    /// What steps need and what the machine can do; or why that is not known.
    pub roofline: Result<Roofline, String>,
}

impl Default for WhyConfig {
    fn default() -> Self {
        let none = "what the model's steps need is not known".to_owned();
        Self { price_per_hour: None, targets: Targets::default(), int8_times: None, roofline: Err(none) }
    }
}

/// Time to the first token within which a request counts as well served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Targets {
    pub chat: Duration,
    pub completion: Duration,
}

impl Default for Targets {
    /// Somebody waits for an answer; somebody writes on.
    fn default() -> Self {
        Self { chat: Duration::from_millis(500), completion: Duration::from_millis(100) }
    }
}

impl Targets {
    pub(super) fn of(&self, asked: RequestKind) -> Duration {
        match asked {
            RequestKind::Chat => self.chat,
            RequestKind::Completion => self.completion,
        }
    }
}

/// Microseconds as seconds.
pub(super) fn seconds(us: f64) -> f64 {
    us / 1e6
}

pub(super) fn since(from: Micros, to: Micros) -> u64 {
    to.0.saturating_sub(from.0)
}

/// Where the window of a report begins: 50 to 60 s before.
pub(super) fn window_from(now: Micros) -> Micros {
    Micros((now.0 / SLICE_US).saturating_sub(SLICES as u64 - 1) * SLICE_US)
}
