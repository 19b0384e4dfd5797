//! What feeds forward in a layer, as operations: one part, a mixture of experts, both, and what a layer makes of the values it is given.
//!
//! Owns: their order. Must never: add to the residual stream but what a shared expert says.

use super::{Buffers, InputBuffers, SharedBuffers};
use crate::config::{Config, Experts};
use crate::family::Choice;
use crate::program::{Buf, ExpertsSpec, MatrixId, Op, Program, VectorId};
use crate::weights::{FeedForward, Inputs, LayerInput};

/// All of the feed-forward part of a layer but its last operation, which is given back as a function of where it writes.
pub(super) fn feed_forward(
    config: &Config,
    experts: Option<Experts>,
    weights: &FeedForward<MatrixId, VectorId>,
    index: usize,
    program: &mut Program,
    buffers: &Buffers,
) -> impl Fn(Buf, bool) -> Op + use<> {
    let &FeedForward { router, router_bias, experts_in, experts_out, .. } = weights;
    let &FeedForward { gate_up, gate_up_bias, xielu, down, down_bias, .. } = weights;
    let &Buffers { normed: x, logits, experts: [narrow, sum], .. } = buffers;
    let inner = if experts.is_some() { x } else { buffers.inner.get(config.dense_width(index)) };
    let activation = config.activation;
    let spec = program.experts.len();
    let mixture = router.zip(experts);
    let gated =
        mixture.is_some() && config.family.mixture.is_some_and(|mixture| mixture.choice == Choice::Top);
    let read = if gated { narrow } else { x };
    match (mixture, xielu) {
        (None, Some(weight)) => program.body.extend([
            Op::Linear { x, weight: gate_up, bias: gate_up_bias, out: inner, add: false },
            Op::XIelu { x: inner, weight },
        ]),
        (None, None) => {
            program.body.push(Op::GatedLinear {
                x,
                weight: gate_up,
                bias: gate_up_bias,
                activation,
                out: inner,
            });
        }
        (Some((router, experts)), _) => {
            program.body.push(Op::Linear { x, weight: router, bias: router_bias, out: logits, add: false });
            program.experts.push(experts_spec(config, experts, weights));
            program.body.extend(gated.then_some(Op::TopGate { x, logits, out: narrow }));
            program.body.extend(experts_in.into_iter().flat_map(|weight| {
                let linear = Op::Linear { x, weight, bias: None, out: narrow, add: false };
                [linear, Op::Experts { x: narrow, logits, spec, out: sum, add: false }]
            }));
        }
    }
    move |out, add| match (mixture, experts_out) {
        (None, _) => Op::Linear { x: inner, weight: down, bias: down_bias, out, add },
        (Some(_), Some(weight)) => Op::Linear { x: sum, weight, bias: None, out, add },
        (Some(_), None) => Op::Experts { x: read, logits, spec, out, add },
    }
}

fn experts_spec(config: &Config, experts: Experts, weights: &FeedForward<MatrixId, VectorId>) -> ExpertsSpec {
    let Experts { count, chosen, routing, groups, scale, sum_eps, .. } = experts;
    let &FeedForward { choice_bias, gate_up, gate_up_bias, down, down_bias, .. } = weights;
    ExpertsSpec {
        count,
        chosen,
        routing,
        choice_bias,
        groups,
        sum_eps,
        scale: scale as f32,
        scales: weights.expert_scales,
        inner: config.intermediate,
        activation: config.activation,
        gate_up,
        gate_up_bias,
        down,
        down_bias,
    }
}

/// What a mixture of experts and a part that speaks for every token say of the residual stream `x`, each through norms of its own, is in
/// `branch` behind this. The latter reads what is normalized already.
pub(super) fn experts_beside(
    config: &Config,
    index: usize,
    weights: &FeedForward<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &Buffers,
    [x, branch]: [Buf; 2],
    eps: f32,
) {
    let &Buffers { normed, logits, experts: [_, sum], shared: SharedBuffers { inner, .. }, .. } = buffers;
    let shared = weights.shared_gate_up.zip(weights.shared_down).zip(weights.shared_post_norm);
    let norms = weights.router_norm.zip(weights.experts_norm).zip(weights.experts_post_norm);
    let mixture = weights.router.zip(config.experts_of(index));
    let (
        Some(((gate_up, down), shared_norm)),
        Some(((router_norm, norm), post_norm)),
        Some((router, experts)),
    ) = (shared, norms, mixture)
    else {
        return;
    };
    let (activation, spec) = (config.activation, program.experts.len());
    program.experts.push(experts_spec(config, experts, weights));
    let linear = |x, weight, bias, out| Op::Linear { x, weight, bias, out, add: false };
    let normalize = |x, weight, out| Op::RmsNorm { x, weight, eps, out };
    program.body.extend([
        Op::GatedLinear { x: normed, weight: gate_up, bias: None, activation, out: inner },
        linear(inner, down, None, branch),
        normalize(branch, shared_norm, branch),
        normalize(x, router_norm, normed),
        linear(normed, router, weights.router_bias, logits),
        normalize(x, norm, normed),
        Op::Experts { x: normed, logits, spec, out: sum, add: false },
        Op::AddRmsNorm { x: sum, weight: post_norm, eps, out: branch, times: None },
    ]);
}

/// What all layers are given of a token: its row of a table, and what is made of its embedding `x`, through a norm. `by` multiplies the
/// former.
pub(super) fn layer_inputs(
    config: &Config,
    weights: &Inputs<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &Buffers,
    x: Buf,
    by: f32,
) {
    let &InputBuffers { given, projected, .. } = &buffers.inputs;
    // The projection is of `x` divided by the root of its width, which a norm takes out again, but for its epsilon.
    let (eps, parts) = (config.eps * config.hidden as f32, config.layers);
    program.body.extend([
        Op::Embed { table: weights.embed, out: given },
        Op::Scale { x: given, by },
        Op::Linear { x, weight: weights.projection, bias: None, out: projected, add: false },
        Op::NormPart { x: projected, first: 0, weight: weights.norm, eps, parts },
        Op::Add { x: projected, out: given },
    ]);
}

/// What a layer makes of the values that it is given and of the residual stream `x` is in `branch` behind this.
pub(super) fn add_input(
    config: &Config,
    index: usize,
    weights: &LayerInput<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &Buffers,
    [x, branch]: [Buf; 2],
) {
    let &InputBuffers { given, gate, .. } = &buffers.inputs;
    let first = index * config.layer_input.unwrap_or(0);
    program.body.extend([
        Op::Linear { x, weight: weights.gate, bias: None, out: gate, add: false },
        Op::Gate { x: gate, by: given, first, activation: config.activation },
        Op::Linear { x: gate, weight: weights.projection, bias: None, out: branch, add: false },
    ]);
}

/// Adds what the shared expert says, as strongly as it is to, if there is one. No family has one and a norm behind the feed-forward part.
pub(super) fn shared_expert(
    config: &Config,
    weights: &FeedForward<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &Buffers,
    out: Buf,
) {
    let &FeedForward { shared_gate_up, shared_down, shared_gate, .. } = weights;
    let (x, &SharedBuffers { inner, gate }) = (buffers.normed, &buffers.shared);
    let Some((gate_up, down)) = shared_gate_up.zip(shared_down) else { return };
    let activation = config.activation;
    program.body.push(Op::GatedLinear { x, weight: gate_up, bias: None, activation, out: inner });
    program.body.extend(shared_gate.into_iter().flat_map(|weight| {
        let strength = Op::Linear { x, weight, bias: None, out: gate, add: false };
        [strength, Op::SigmoidGate { x: inner, gate }]
    }));
    program.body.push(Op::Linear { x: inner, weight: down, bias: None, out, add: true });
}
