//! How long a step takes, in virtual time.

use folio_engine::{StepPlan, StepWork};

/// What decides how long a step takes: its rows, what they see, and how many sequences they are of.
pub trait StepTime {
    /// Microseconds for a step that computes `work`.
    fn us(&self, work: &StepWork) -> f64;

    /// Whole microseconds for the plan, at least one.
    fn step(&self, plan: &StepPlan) -> u64 {
        (self.us(&StepWork::of(plan)).round() as u64).max(1)
    }
}

/// A line: a step costs a constant (the weights are read once), plus its tokens, plus the context they attend to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    pub step_us: f64,
    pub token_us: f64,
    /// Per token and thousand positions of its context.
    pub context_us_per_1k: f64,
}

impl CostModel {
    /// About a 1B model in bf16 on two cores: 90 ms per step of weight reading, 11 ms per prompt token.
    pub const CPU_1B: CostModel =
        CostModel { step_us: 90_000.0, token_us: 11_000.0, context_us_per_1k: 1_200.0 };
}

impl StepTime for CostModel {
    fn us(&self, work: &StepWork) -> f64 {
        self.step_us
            + self.token_us * work.rows() as f64
            + self.context_us_per_1k * work.attention as f64 / 1000.0
    }
}
