//! How fast a model can get on a machine: bytes and multiplications per token against the measured rates.
//!
//! Decoding reads every weight once per step and the KV of every sequence; a prompt multiplies every weight of the layers
//! with every token. Of a mixture of experts a step reads those that its tokens choose: as many as if they chose at random,
//! independently. Whichever of bytes and multiplications takes longer is the limit. Owns that arithmetic; must never
//! measure.

use folio_cpu::machine::Machine;
use folio_model::backend::{DType, GroupKind, KvGroup, KvLayout};
use folio_model::config::{Feed, Mixer};
use folio_model::{Config, LoadedModel};
use folio_server::why::{StepNeeds, StepShape};
use serde::Serialize;

/// What a model costs, from its configuration.
#[derive(Clone, Debug)]
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
    kept: Vec<Kept>,
}

/// What the layers of a cache group keep, and do with it.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// Positions that a query sees; `None`: all.
    window: Option<f64>,
    bytes_per_token: f64,
    /// Multiply-adds of attention for one query and one key.
    attention: f64,
    /// Of a sequence's state, which is read and written.
    state_bytes: f64,
}

impl Costs {
    /// `weight_bytes`: what the backend holds.
    pub fn of(model: &LoadedModel, weight_bytes: u64) -> Self {
        Self::new(&model.config, &model.kv_layout, model.parameters, weight_bytes)
    }

    /// The same of a model that nobody has loaded.
    pub fn new(config: &Config, layout: &KvLayout, parameters: u64, weight_bytes: u64) -> Self {
        let bytes_per_weight = weight_bytes as f64 / parameters as f64;
        let hidden = config.hidden as f64;
        let [attention, of_key] = config.attention_costs();
        let matrices = 1.0 + config.activation.inputs() as f64;
        let part = |width: usize| matrices * hidden * width as f64;
        let layers = config.mixers.iter().filter(|mixer| **mixer != Mixer::Nothing).count() as f64;
        let dense = (0..config.layers).filter(|layer| config.feeds[*layer] == Feed::Dense);
        let dense: f64 = dense.map(|layer| part(config.dense_width(layer))).sum();
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
            body: layers * attention + dense + sparse * of_experts,
            experts: sparse * expert * count,
            share,
            head: config.vocab as f64 * hidden,
            bytes_per_weight,
            // No plain type is smaller.
            quantized: bytes_per_weight < DType::F16.size() as f64 * 0.95,
            kept: layout.groups.iter().map(|group| Kept::of(group, of_key)).collect(),
        }
    }

    /// Decoding `batch` sequences of `depth` tokens, all in one step.
    pub fn decode(&self, machine: &Machine, batch: f64, depth: f64) -> Limit {
        let seen = batch * depth;
        let shape = StepShape {
            rows: batch,
            sequences: batch,
            logit_rows: batch,
            kv_positions: seen,
            attention: seen,
        };
        self.slower(machine, batch, self.step(&shape))
    }

    /// What one step needs. Of layers with a window each sequence is taken to be as long as all of the step are in the mean.
    pub fn step(&self, shape: &StepShape) -> StepNeeds {
        let StepShape { rows, logit_rows, .. } = *shape;
        let mut demand = StepNeeds {
            bytes: self.weights_of(rows),
            weights: rows * self.body + logit_rows * self.head,
            attention: 0.0,
        };
        for kept in &self.kept {
            kept.add(shape, &mut demand);
        }
        demand
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
    pub fn weights_of(&self, tokens: f64) -> f64 {
        let chosen = 1.0 - (1.0 - self.share).powf(tokens);
        (self.body + self.head + self.experts * (chosen - self.share)) * self.bytes_per_weight
    }

    /// A prompt of `tokens`: only its last token needs logits.
    pub fn prefill(&self, machine: &Machine, tokens: f64) -> Limit {
        let attention = tokens * (tokens + 1.0) / 2.0;
        let shape = StepShape { rows: tokens, sequences: 1.0, logit_rows: 1.0, kv_positions: 0.0, attention };
        self.slower(machine, tokens, self.step(&shape))
    }

    /// Multiplications with quantized weights are of bytes, those of attention always f32.
    fn slower(&self, machine: &Machine, tokens: f64, step: StepNeeds) -> Limit {
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

impl Kept {
    fn of(group: &KvGroup, of_key: f64) -> Self {
        let window = match group.kind {
            GroupKind::Window { tokens } => Some(f64::from(tokens)),
            GroupKind::Full | GroupKind::Latent { .. } | GroupKind::State { .. } => None,
        };
        let is_state = group.state_values().is_some();
        Self {
            window,
            bytes_per_token: group.bytes_per_token() as f64,
            attention: if is_state { 0.0 } else { of_key * group.layers() as f64 },
            state_bytes: if is_state { group.bytes_per_block() as f64 } else { 0.0 },
        }
    }

    fn add(&self, shape: &StepShape, demand: &mut StepNeeds) {
        let StepShape { rows, sequences, mut kv_positions, mut attention, .. } = *shape;
        if let Some(window) = self.window {
            // What the first of its rows sees, and the rows behind it.
            kv_positions = kv_positions.min(sequences * window + rows);
            attention = attention.min(rows * window);
        }
        demand.bytes += kv_positions * self.bytes_per_token + 2.0 * sequences * self.state_bytes;
        demand.attention += attention * self.attention;
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
            kept: vec![Kept { window: None, bytes_per_token: 10.0, attention: 4.0, state_bytes: 0.0 }],
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

    #[test]
    fn windows_and_states_need_no_more_than_they_hold() {
        let windowed = Kept { window: Some(50.0), bytes_per_token: 3.0, attention: 2.0, state_bytes: 0.0 };
        let state = Kept { window: None, bytes_per_token: 0.0, attention: 0.0, state_bytes: 7.0 };
        let costs = Costs { kept: [costs().kept, vec![windowed, state]].concat(), ..costs() };
        // Two sequences at 100: one row each.
        let shape =
            StepShape { rows: 2.0, sequences: 2.0, logit_rows: 2.0, kv_positions: 200.0, attention: 200.0 };
        let demand = costs.step(&shape);
        assert_eq!(demand.bytes, 2000.0 + 200.0 * 10.0 + 102.0 * 3.0 + 2.0 * 2.0 * 7.0);
        assert_eq!(demand.attention, 200.0 * 4.0 + 100.0 * 2.0);
    }
}
