//! How fast a model can get on a machine: bytes and multiplications per token against the measured rates.
//!
//! Decoding reads every weight once per step and the KV of every sequence; a prompt multiplies every weight of the layers
//! with every token. Of a mixture of experts a step reads those that its tokens choose: as many as if they chose at random,
//! independently. Whichever of bytes and multiplications takes longer is the limit. Owns that arithmetic; must never
//! measure.

use folio_cpu::machine::Machine;
use folio_model::LoadedModel;
use folio_model::backend::DType;
use folio_model::config::{Feed, Mixer};
use folio_server::why::Demand;
use serde::Serialize;

/// What a model costs, from its configuration.
pub struct Costs {
    /// Weights of all layers that a token is multiplied with, and of the output matrix.
    body: f64,
    head: f64,
    /// Weights of all experts, and the share of them that a token chooses.
    experts: f64,
    share: f64,
    bytes_per_weight: f64,
    /// Weights are multiplied as integers.
    quantized: bool,
    kv_bytes_per_token: f64,
    /// Multiply-adds of attention for one query and one key.
    attention: f64,
}

impl Costs {
    /// `weight_bytes`: what the backend holds.
    pub fn of(model: &LoadedModel, weight_bytes: u64) -> Self {
        let bytes_per_weight = weight_bytes as f64 / model.parameters as f64;
        let config = &model.config;
        let hidden = config.hidden as f64;
        let [attention, of_key] = config.attention_costs();
        let matrices = 1.0 + config.activation.inputs() as f64;
        let part = |width: usize| matrices * hidden * width as f64;
        let layers = config.mixers.iter().filter(|mixer| **mixer != Mixer::Nothing).count() as f64;
        let dense = config.dense_layers() as f64;
        let sparse = config.feeds.iter().filter(|feed| **feed == Feed::Experts).count() as f64;
        let narrow = config.experts.and_then(|experts| experts.latent).unwrap_or(config.hidden) as f64;
        let expert = matrices * narrow * config.intermediate as f64;
        let of_experts = config
            .experts
            .map_or(0.0, |experts| expert * experts.chosen as f64 + part(experts.shared.unwrap_or(0)));
        let (count, share) = config.experts.map_or((0.0, 0.0), |experts| {
            (experts.count as f64, experts.chosen as f64 / experts.count as f64)
        });
        Self {
            body: layers * attention + dense * part(config.dense_width()) + sparse * of_experts,
            experts: sparse * expert * count,
            share,
            head: config.vocab as f64 * hidden,
            bytes_per_weight,
            // No plain type is smaller.
            quantized: bytes_per_weight < DType::F16.size() as f64 * 0.95,
            kv_bytes_per_token: model.kv_layout.bytes_per_token() as f64,
            attention: of_key * layers,
        }
    }

    /// Decoding `batch` sequences of `depth` tokens, all in one step.
    pub fn decode(&self, machine: &Machine, batch: f64, depth: f64) -> Limit {
        self.slower(machine, batch, self.step(batch, batch, batch * depth, batch * depth))
    }

    /// What one step needs.
    pub fn step(&self, rows: f64, logit_rows: f64, kv_positions: f64, attention: f64) -> Demand {
        Demand {
            bytes: self.weights_of(rows) + kv_positions * self.kv_bytes_per_token,
            weights: rows * self.body + logit_rows * self.head,
            attention: attention * self.attention,
        }
    }

    /// Whether weights are multiplied as integers.
    pub fn quantized(&self) -> bool {
        self.quantized
    }

    /// Bytes of the weights that a decoded token needs.
    pub fn weights(&self) -> f64 {
        self.weights_of(1.0)
    }

    /// The same of a step of some tokens.
    fn weights_of(&self, tokens: f64) -> f64 {
        let chosen = 1.0 - (1.0 - self.share).powf(tokens);
        (self.body + self.head + self.experts * (chosen - self.share)) * self.bytes_per_weight
    }

    /// A prompt of `tokens`: only its last token needs logits.
    pub fn prefill(&self, machine: &Machine, tokens: f64) -> Limit {
        self.slower(machine, tokens, self.step(tokens, 1.0, 0.0, tokens * (tokens + 1.0) / 2.0))
    }

    /// Multiplications with quantized weights are of bytes, those of attention always f32.
    fn slower(&self, machine: &Machine, tokens: f64, step: Demand) -> Limit {
        let rate = if self.quantized { machine.int8_op_per_s } else { machine.f32_flop_per_s };
        let reading = step.bytes / machine.read_bytes_per_s;
        let multiplying = 2.0 * step.weights / rate + 2.0 * step.attention / machine.f32_flop_per_s;
        let (seconds, by) =
            if reading > multiplying { (reading, "bytes") } else { (multiplying, "multiplications") };
        Limit {
            tokens_per_s: tokens / seconds,
            by,
            bytes_per_token: step.bytes / tokens,
            multiply_adds_per_token: (step.weights + step.attention) / tokens,
        }
    }
}

/// Nothing that needs these bytes and multiplications is faster at the measured rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Limit {
    pub tokens_per_s: f64,
    /// "bytes" or "multiplications".
    pub by: &'static str,
    pub bytes_per_token: f64,
    pub multiply_adds_per_token: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> Costs {
        Costs {
            body: 900.0,
            head: 100.0,
            experts: 0.0,
            share: 0.0,
            bytes_per_weight: 2.0,
            quantized: false,
            kv_bytes_per_token: 10.0,
            attention: 4.0,
        }
    }

    fn machine(read_bytes_per_s: f64, f32_flop_per_s: f64) -> Machine {
        let isa = folio_cpu::Isa::from_env().expect("an instruction set");
        Machine { threads: 1, isa, read_bytes_per_s, f32_flop_per_s, int8_op_per_s: 4.0 * f32_flop_per_s }
    }

    #[test]
    fn one_sequence_is_limited_by_bytes_and_many_by_multiplications() {
        let machine = machine(1000.0, 10_000.0);
        // 2000 bytes of weights and 1000 of KV.
        let one = costs().decode(&machine, 1.0, 100.0);
        assert_eq!((one.tokens_per_s, one.by), (1.0 / 3.0, "bytes"));
        assert_eq!((one.bytes_per_token, one.multiply_adds_per_token), (3000.0, 1400.0));
        let many = costs().decode(&machine, 64.0, 0.0);
        assert_eq!((many.tokens_per_s, many.by), (5.0, "multiplications"));
        assert_eq!(many.bytes_per_token, 2000.0 / 64.0);
    }

    #[test]
    fn quantized_weights_are_multiplied_at_the_integer_rate_and_attention_is_not() {
        let quantized = Costs { quantized: true, ..costs() };
        let limit = quantized.decode(&machine(1e9, 10_000.0), 64.0, 100.0);
        let seconds = 2.0 * 64.0 * 1000.0 / 40_000.0 + 2.0 * 64.0 * 400.0 / 10_000.0;
        assert_eq!(limit.tokens_per_s, 64.0 / seconds);
    }

    #[test]
    fn a_step_reads_the_experts_that_its_tokens_choose() {
        // A quarter of 800 for each token, and 700 besides.
        let mixture = Costs { experts: 800.0, share: 0.25, ..costs() };
        assert_eq!(mixture.weights(), 2000.0);
        let two = mixture.decode(&machine(1000.0, 1e9), 2.0, 0.0);
        assert_eq!(two.bytes_per_token, 2.0 * (800.0 + 800.0 * (1.0 - 0.75 * 0.75)) / 2.0);
        assert_eq!(two.multiply_adds_per_token, 1000.0);
        assert!((mixture.weights_of(1000.0) - 2.0 * 1600.0).abs() < 1e-6, "all of them");
    }

    #[test]
    fn a_prompt_needs_logits_once_and_attention_in_a_triangle() {
        let limit = costs().prefill(&machine(1e9, 2.0), 3.0);
        assert_eq!(limit.tokens_per_s, 3.0 / (3.0 * 900.0 + 100.0 + 6.0 * 4.0));
    }
}
