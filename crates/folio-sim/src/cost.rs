//! How long a step takes, in virtual time.

use folio_engine::StepPlan;

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

    /// Microseconds for the plan.
    pub fn step(&self, plan: &StepPlan) -> u64 {
        let mut us = self.step_us;
        for sequence in &plan.sequences {
            let tokens = sequence.tokens.len() as f64;
            let context = f64::from(sequence.first_position) + tokens / 2.0;
            us += tokens * (self.token_us + self.context_us_per_1k * context / 1000.0);
        }
        us as u64
    }
}
