//! What mixes the positions of a layer, as operations: attention of either kind, and what keeps states.
//!
//! Owns: their order up to what a layer's last projection reads. Must never: add to the residual stream.

use super::{Buffers, ConvBuffers, DeltaBuffers, LatentBuffers, MambaBuffers, window};
use crate::config::{Config, DeltaNet, Latent, Mamba, ShortConv};
use crate::family::QkNorm;
use crate::program::{
    AttentionSpec, Buf, ConvolutionSpec, DeltaSpec, LatentSpec, MatrixId, Op, Program, RopeId, StatePlace,
    StateSpaceSpec, VectorId,
};
use crate::weights::{self, Attention, Conv, Delta, MixerWeights};

/// What mixes positions, up to what its last projection reads: that, the projection, and its bias.
pub(super) fn mix(
    config: &Config,
    index: usize,
    mixer: &MixerWeights<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &Buffers,
    place: Place,
    max_model_len: usize,
) -> (Buf, MatrixId, Option<VectorId>) {
    let x = buffers.normed;
    match mixer {
        MixerWeights::Attention(attention) => {
            attend(config, index, attention, program, buffers, place, max_model_len);
            (buffers.attended.get(config.q_width(index)), attention.o, attention.o_bias)
        }
        MixerWeights::Latent(sizes, latent) => {
            latent_attention(config, sizes, latent, program, &buffers.latent, x, place);
            (buffers.latent.attended, latent.o, latent.o_bias)
        }
        MixerWeights::Delta(net, delta) => {
            delta_net(net, config.eps, delta, program, &buffers.delta, x, place);
            (buffers.delta.out, delta.o, None)
        }
        MixerWeights::Conv(sizes, conv) => {
            short_conv(sizes, conv, program, &buffers.conv, x, place);
            (buffers.conv.x, conv.o, None)
        }
        MixerWeights::Mamba(sizes, mamba) => {
            state_space(sizes, config.eps, mamba, program, &buffers.mamba, x, place);
            (buffers.mamba.out, mamba.o, None)
        }
    }
}

/// A layer in its cache group.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub group: u32,
    pub layer: u32,
}

/// Attention, up to what its last projection reads.
fn attend(
    config: &Config,
    index: usize,
    weights: &Attention<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &Buffers,
    place: Place,
    max_model_len: usize,
) {
    let &Buffers { normed, gate, .. } = buffers;
    let qkv = buffers.qkv.get(config.qkv_width(index));
    let attended = buffers.attended.get(config.q_width(index));
    let sizes = config.head_sizes(index);
    let spec = program.attention.len();
    let rows = config.qk_norm == QkNorm::Rows;
    program.attention.push(AttentionSpec {
        group: place.group,
        layer: place.layer,
        heads: config.heads,
        kv_heads: sizes.kv_heads,
        head_dim: sizes.head_dim,
        scale: config.attention_scale as f32,
        softcap: config.attention_softcap,
        window: window(config, index, max_model_len),
        chunked: config.chunked,
        temper: config.temper.filter(|_| !config.rotated[index]),
        sinks: weights.sinks,
        rope: config.rotated[index].then_some(match &config.local_rope {
            Some(_) if config.windows[index].is_some() => RopeId(1),
            _ => RopeId(0),
        }),
        own_kv: config.kv_source(index) == index,
        q_norm: weights.q_norm.filter(|_| !rows),
        k_norm: weights.k_norm.filter(|_| !rows),
        v_norm: weights.v_norm,
        norm_last: matches!(config.qk_norm, QkNorm::Rotated | QkNorm::Unweighted(_)),
        norm_eps: config.eps,
    });
    program.body.push(Op::Linear {
        x: normed,
        weight: weights.qkv,
        bias: weights.qkv_bias,
        out: qkv,
        add: false,
    });
    let parts = [(0, weights.q_norm), (config.q_width(index), weights.k_norm)];
    program.body.extend(parts.into_iter().filter(|_| rows).filter_map(|(first, weight)| {
        Some(Op::NormPart { x: qkv, first, weight: weight?, eps: config.eps, parts: 1 })
    }));
    program.body.extend([Op::WriteKv { qkv, spec }, Op::Attention { qkv, spec, out: attended }]);
    if let Some(weight) = weights.gate {
        program.body.extend([
            Op::Linear { x: normed, weight, bias: None, out: gate, add: false },
            Op::SigmoidGate { x: attended, gate },
        ]);
    }
}

/// Latent attention, likewise, in its absorbed form.
fn latent_attention(
    config: &Config,
    sizes: &Latent,
    weights: &weights::Latent<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &LatentBuffers,
    x: Buf,
    place: Place,
) {
    let &LatentBuffers { q_down: [down, normed], q, latent, queries, mixed, attended } = buffers;
    let (spec, heads) = (program.latent.len(), config.heads);
    program.latent.push(LatentSpec {
        group: place.group,
        layer: place.layer,
        heads,
        rank: sizes.rank,
        rope_dim: sizes.rope_dim,
        nope_dim: sizes.nope_dim,
        scale: config.attention_scale as f32,
        rope: RopeId(0),
        neighbours: sizes.neighbours,
        norm: weights.kv_norm,
        norm_eps: Latent::EPS,
    });
    let linear = |x, weight, bias, out| Op::Linear { x, weight, bias, out, add: false };
    match weights.q_down.zip(weights.q_norm) {
        None => program.body.push(linear(x, weights.q, None, q)),
        Some((matrix, weight)) => program.body.extend([
            linear(x, matrix, weights.q_down_bias, down),
            Op::RmsNorm { x: down, weight, eps: Latent::EPS, out: normed },
            linear(normed, weights.q, None, q),
        ]),
    }
    program.body.extend([
        linear(x, weights.kv_down, weights.kv_down_bias, latent),
        Op::HeadLinear { x: q, weight: weights.absorb, heads, out: queries },
        Op::WriteLatent { q, latent, spec, queries },
        Op::LatentAttention { queries, spec, out: mixed },
        Op::HeadLinear { x: mixed, weight: weights.expand, heads, out: attended },
    ]);
}

/// A gated delta net, likewise.
fn delta_net(
    net: &DeltaNet,
    eps: f32,
    weights: &Delta<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &DeltaBuffers,
    x: Buf,
    place: Place,
) {
    let &DeltaBuffers { qkv, gates, z, out } = buffers;
    let state = |offset| StatePlace { group: place.group, layer: place.layer, offset };
    let (convolution, spec) = (program.convolutions.len(), program.delta.len());
    program.convolutions.push(ConvolutionSpec {
        state: state(0),
        channels: net.channels(),
        taps: net.taps,
        silu: true,
        weight: weights.taps,
        bias: None,
    });
    program.delta.push(DeltaSpec {
        state: state(ConvolutionSpec::state_values(net.channels(), net.taps)),
        key_heads: net.key_heads,
        value_heads: net.value_heads,
        tiled: net.tiled,
        key_dim: net.key_dim,
        value_dim: net.value_dim,
        decay: weights.decay,
        step_bias: weights.step_bias,
    });
    let linear = |weight, out| Op::Linear { x, weight, bias: None, out, add: false };
    program.body.extend([
        linear(weights.qkv, qkv),
        linear(weights.gates, gates),
        linear(weights.z, z),
        Op::Convolve { x: qkv, spec: convolution },
        Op::DeltaRule { qkv, gates, spec, out },
        Op::GatedRmsNorm { x: out, gate: z, weight: weights.norm, eps },
    ]);
}

/// A Mamba-2 mixer, likewise.
fn state_space(
    sizes: &Mamba,
    eps: f32,
    weights: &weights::Mamba<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &MambaBuffers,
    x: Buf,
    place: Place,
) {
    let &MambaBuffers { xbc, steps, z, out } = buffers;
    let state = |offset| StatePlace { group: place.group, layer: place.layer, offset };
    let (convolution, spec) = (program.convolutions.len(), program.state_spaces.len());
    program.convolutions.push(ConvolutionSpec {
        state: state(0),
        channels: sizes.channels(),
        taps: sizes.taps,
        silu: true,
        weight: weights.taps,
        bias: weights.bias,
    });
    program.state_spaces.push(StateSpaceSpec {
        state: state(ConvolutionSpec::state_values(sizes.channels(), sizes.taps)),
        heads: sizes.heads,
        head_dim: sizes.head_dim,
        groups: sizes.groups,
        state_dim: sizes.state_dim,
        decay: weights.decay,
        step_bias: weights.step_bias,
        skip: weights.skip,
    });
    let linear = |weight, out| Op::Linear { x, weight, bias: None, out, add: false };
    program.body.extend([
        linear(weights.xbc, xbc),
        linear(weights.steps, steps),
        linear(weights.z, z),
        Op::Convolve { x: xbc, spec: convolution },
        Op::StateSpace { xbc, steps, spec, out },
        Op::SiluGate { x: out, gate: z },
        Op::NormPart { x: out, first: 0, weight: weights.norm, eps, parts: sizes.groups },
    ]);
}

/// A short convolution, likewise.
fn short_conv(
    sizes: &ShortConv,
    weights: &Conv<MatrixId, VectorId>,
    program: &mut Program,
    buffers: &ConvBuffers,
    normed: Buf,
    place: Place,
) {
    let &ConvBuffers { before, behind, x } = buffers;
    let spec = program.convolutions.len();
    program.convolutions.push(ConvolutionSpec {
        state: StatePlace { group: place.group, layer: place.layer, offset: 0 },
        channels: sizes.channels,
        taps: sizes.taps,
        silu: false,
        weight: weights.taps,
        bias: None,
    });
    let linear = |weight, out| Op::Linear { x: normed, weight, bias: None, out, add: false };
    program.body.extend([
        linear(weights.before, before),
        linear(weights.behind, behind),
        linear(weights.x, x),
        Op::Multiply { x, by: before },
        Op::Convolve { x, spec },
        Op::Multiply { x, by: behind },
    ]);
}
