//! How near steps come to what the machine can do.
//!
//! A step reads weights and KV, and multiplies. At the machine's measured rates each takes a time; the larger is the least that the step can
//! take, and both are told as shares of the time that it took.

use std::sync::Arc;

use folio_engine::StepWork;
use serde_json::{Value, json};

/// What the steps of a model need.
pub trait StepCosts: Send + Sync {
    fn demand(&self, step: &StepShape) -> StepNeeds;
}

/// One step, or the mean of several.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepShape {
    pub rows: f64,
    pub sequences: f64,
    pub logit_rows: f64,
    /// Positions whose KV is read.
    pub kv_positions: f64,
    /// Pairs of a row and a position that it sees.
    pub attention: f64,
}

impl StepShape {
    /// The mean of at least one step.
    pub fn mean(work: &StepWork) -> Self {
        let each = |of: u64| of as f64 / work.steps as f64;
        Self {
            rows: each(work.rows()),
            sequences: each(work.sequences),
            logit_rows: each(work.logit_rows),
            kv_positions: each(work.kv_positions),
            attention: each(work.attention),
        }
    }
}

/// What a step needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepNeeds {
    pub bytes: f64,
    /// Multiply-adds with weights, and of attention.
    pub weights: f64,
    pub attention: f64,
}

/// What the machine can do, as measured. A multiply-add counts as two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    pub read_bytes_per_s: f64,
    /// Of multiplications with weights in the form that they are in, and of attention.
    pub weight_op_per_s: f64,
    pub attention_op_per_s: f64,
    /// Copies between what the cache is in and memory beside it.
    pub copy_bytes_per_s: f64,
}

/// Both.
#[derive(Clone)]
pub struct Roofline {
    pub costs: Arc<dyn StepCosts>,
    pub rates: Rates,
}

/// Shares of the machine's limits that steps reached, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reached {
    pub bandwidth: f64,
    pub arithmetic: f64,
}

impl Roofline {
    /// `None`: no step.
    pub(super) fn reached(&self, work: &StepWork, us: u64) -> Option<Reached> {
        if work.steps == 0 || us == 0 {
            return None;
        }
        let demand = self.costs.demand(&StepShape::mean(work));
        let seconds = us as f64 / 1e6 / work.steps as f64;
        let rates = &self.rates;
        let multiplying =
            2.0 * demand.weights / rates.weight_op_per_s + 2.0 * demand.attention / rates.attention_op_per_s;
        Some(Reached {
            bandwidth: demand.bytes / rates.read_bytes_per_s / seconds,
            arithmetic: multiplying / seconds,
        })
    }

    pub(super) fn machine(&self) -> Value {
        let Rates { read_bytes_per_s, weight_op_per_s, attention_op_per_s, copy_bytes_per_s } = self.rates;
        json!({
            "read_bytes_per_s": read_bytes_per_s,
            "weight_op_per_s": weight_op_per_s,
            "attention_op_per_s": attention_op_per_s,
            "copy_bytes_per_s": copy_bytes_per_s,
        })
    }
}

impl Reached {
    pub fn json(self) -> Value {
        let by = if self.bandwidth >= self.arithmetic { "bandwidth" } else { "arithmetic" };
        json!({"bandwidth": self.bandwidth, "arithmetic": self.arithmetic, "limited_by": by})
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// 1000 bytes of weights, 1000 multiply-adds a row, 10 bytes a position.
    pub struct Plain;

    impl StepCosts for Plain {
        fn demand(&self, step: &StepShape) -> StepNeeds {
            StepNeeds {
                bytes: 1000.0 + 10.0 * step.kv_positions,
                weights: 1000.0 * step.rows,
                attention: step.attention,
            }
        }
    }

    #[test]
    fn shares_are_of_the_time_that_was_taken() {
        let rates = Rates {
            read_bytes_per_s: 1e6,
            weight_op_per_s: 1e6,
            attention_op_per_s: 1e6,
            copy_bytes_per_s: 1e6,
        };
        let roofline = Roofline { costs: Arc::new(Plain), rates };
        assert_eq!(roofline.reached(&StepWork::default(), 100), None);
        // 2000 bytes and a row: 2 ms for each step, which took 4.
        let decodes = StepWork { steps: 10, decode_rows: 10, kv_positions: 1000, ..StepWork::default() };
        let reached = roofline.reached(&decodes, 40_000).unwrap();
        assert_eq!((reached.bandwidth, reached.arithmetic), (0.5, 0.5));
        let prompts = StepWork { steps: 1, prompt_rows: 8, attention: 500, ..StepWork::default() };
        let reached = roofline.reached(&prompts, 34_000).unwrap();
        assert_eq!(reached.arithmetic, 0.5);
        assert_eq!(reached.json()["limited_by"], "arithmetic");
    }
}
