//! A mixture of experts, row by row.

use super::{ReferenceBackend, dot, gated};
use crate::program::{Buf, ExpertsSpec, Routing};

impl ReferenceBackend {
    /// What the chosen experts of every row add up to.
    pub(super) fn experts(&self, x: Buf, logits: Buf, spec: &ExpertsSpec) -> Vec<f32> {
        let width = self.program.buffers[x.0 as usize];
        let rows = self.buffers[x.0 as usize].chunks(width);
        let rows = rows.zip(self.buffers[logits.0 as usize].chunks(spec.count));
        rows.flat_map(|(x, logits)| self.mixture(x, logits, spec)).collect()
    }

    fn mixture(&self, x: &[f32], logits: &[f32], spec: &ExpertsSpec) -> Vec<f32> {
        let mut sums = vec![0.0f64; self.matrix(spec.down).rows / spec.count];
        let bias = spec.choice_bias.map(|bias| self.vector(bias));
        let scales = spec.scales.map(|scales| self.vector(scales));
        for (expert, weight) in chosen(logits, bias, spec) {
            let weight = scales.map_or(weight, |scales| weight * f64::from(scales[expert]));
            for (sum, value) in sums.iter_mut().zip(self.expert(expert, x, spec)) {
                *sum += weight * value;
            }
        }
        sums.into_iter().map(|sum| sum as f32).collect()
    }

    fn expert(&self, expert: usize, x: &[f32], spec: &ExpertsSpec) -> Vec<f64> {
        let (gate_up, down) = (self.matrix(spec.gate_up), self.matrix(spec.down));
        let bias = |bias: Option<_>, row: usize| bias.map_or(0.0, |bias| f64::from(self.vector(bias)[row]));
        let inner: Vec<f32> = (expert * spec.inner..(expert + 1) * spec.inner)
            .map(|gate| {
                let value = |row| (dot(gate_up.row(row), x) + bias(spec.gate_up_bias, row)) as f32;
                let up = (spec.activation.inputs() - 1) * spec.count * spec.inner + gate;
                gated(spec.activation, value(gate), value(up))
            })
            .collect();
        let width = down.rows / spec.count;
        (expert * width..(expert + 1) * width)
            .map(|row| dot(down.row(row), &inner) + bias(spec.down_bias, row))
            .collect()
    }
}

/// The experts of a row and their weights, largest score first.
fn chosen(logits: &[f32], bias: Option<&[f32]>, spec: &ExpertsSpec) -> Vec<(usize, f64)> {
    let sigmoid = |expert: usize| 1.0 / (1.0 + (-f64::from(logits[expert])).exp());
    let exp_of = |expert: usize| f64::from(logits[expert]).exp();
    let all: f64 = (0..logits.len()).map(exp_of).sum();
    let share = |expert: usize| exp_of(expert) / all;
    let score = |expert: usize| {
        let own = match spec.routing {
            Routing::Sigmoid | Routing::SigmoidAmongChosen => sigmoid(expert),
            Routing::SharesAmongChosen => share(expert),
            Routing::AmongChosen | Routing::AmongAll => f64::from(logits[expert]),
        };
        own + bias.map_or(0.0, |bias| f64::from(bias[expert]))
    };
    let scores: Vec<f64> = (0..logits.len()).map(score).collect();
    let kept = spec.groups.map(|groups| {
        let of_group = scores.chunks(spec.count / groups.count).map(|scores| {
            let mut scores = scores.to_vec();
            scores.sort_by(|a, b| b.total_cmp(a));
            scores.iter().take(if groups.by_two { 2 } else { 1 }).sum()
        });
        largest(&of_group.collect::<Vec<f64>>(), (0..groups.count).collect(), groups.kept)
    });
    let in_kept = |expert: &usize| match (spec.groups, &kept) {
        (Some(groups), Some(kept)) => kept.contains(&(expert / (spec.count / groups.count))),
        _ => true,
    };
    let picked = largest(&scores, (0..logits.len()).filter(in_kept).collect(), spec.chosen);
    let exp = |expert: usize| f64::from(logits[expert] - logits[picked[0]]).exp();
    let weight = |expert: usize| if spec.routing.is_sigmoid() { sigmoid(expert) } else { exp(expert) };
    let among_chosen = || picked.iter().map(|expert| weight(*expert)).sum::<f64>();
    let divisor = match spec.routing {
        Routing::AmongChosen => among_chosen(),
        Routing::AmongAll => (0..logits.len()).map(exp).sum(),
        Routing::Sigmoid => 1.0,
        Routing::SigmoidAmongChosen => among_chosen() + f64::from(spec.sum_eps),
        Routing::SharesAmongChosen => among_chosen(),
    };
    let scale = f64::from(spec.scale);
    picked.iter().map(|expert| (*expert, weight(*expert) / divisor * scale)).collect()
}

/// Those of the largest scores among the `left`, which ascend: of equal ones the first.
fn largest(scores: &[f64], mut left: Vec<usize>, count: usize) -> Vec<usize> {
    let mut picked = Vec::with_capacity(count);
    for _ in 0..count {
        let larger = |best: usize, at: usize| if scores[left[at]] > scores[left[best]] { at } else { best };
        picked.push(left.remove((0..left.len()).fold(0, larger)));
    }
    picked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Activation, MatrixId};

    fn spec(chosen: usize, routing: Routing) -> ExpertsSpec {
        ExpertsSpec {
            count: 4,
            chosen,
            routing,
            choice_bias: None,
            groups: None,
            sum_eps: 0.0,
            scale: 1.0,
            scales: None,
            inner: 1,
            activation: Activation::Silu,
            gate_up: MatrixId(0),
            gate_up_bias: None,
            down: MatrixId(1),
            down_bias: None,
        }
    }

    #[test]
    fn the_largest_are_chosen_and_of_equal_ones_the_first() {
        let logits = [1.0, 3.0, 1.0, 3.0];
        let experts = |count| {
            chosen(&logits, None, &spec(count, Routing::AmongChosen)).iter().map(|c| c.0).collect::<Vec<_>>()
        };
        assert_eq!(experts(1), [1]);
        assert_eq!(experts(3), [1, 3, 0]);
        assert_eq!(experts(4), [1, 3, 0, 2]);
    }

    #[test]
    fn weights_are_shares_of_the_chosen_or_of_all() {
        let logits = [0.0, 2f32.ln(), 0.0, 4f32.ln()];
        let weights =
            |routing| chosen(&logits, None, &spec(2, routing)).iter().map(|c| c.1).collect::<Vec<f64>>();
        let near = |found: Vec<f64>, wanted: [f64; 2]| {
            assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
        };
        near(weights(Routing::AmongChosen), [4.0 / 6.0, 2.0 / 6.0]);
        near(weights(Routing::AmongAll), [4.0 / 8.0, 2.0 / 8.0]);
    }
}
