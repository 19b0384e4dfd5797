//! Operations that know of the positions before them through a state, and the gates that come with them.

use super::{ReferenceBackend, Result, checks, dot, rms_norm, rows_of, silu};
use crate::backend::{Batch, Span};
use crate::program::{ConvolutionSpec, DeltaSpec, STATE_COLUMNS, StatePlace, StateSpaceSpec, VectorId};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

impl ReferenceBackend {
    /// The state of an operation for the row at `position`: that behind the position before, in the block of this one.
    fn state(
        &mut self,
        place: StatePlace,
        values: usize,
        span: &Span,
        position: usize,
    ) -> Result<&mut [f32]> {
        let group = place.group as usize;
        let cache = self.caches.get_mut(group).ok_or_else(checks::no_cache)?;
        let table = &self.tables[&(span.slot, group)];
        let entry = |position: usize| span.state_entry(position as u32, cache.block_tokens as u32);
        let block = |position: usize| table[entry(position) as usize] as usize;
        let (before, own) = (position.checked_sub(1).map(block), block(position));
        Ok(cache.carry(place, values, before, own))
    }

    pub(super) fn convolve(&mut self, x: usize, spec: usize, batch: &Batch) -> Result<()> {
        let ConvolutionSpec { state, channels, taps, silu: through, weight, bias } =
            self.program.convolutions[spec];
        let weight = self.vector(weight).to_vec();
        let bias = bias.map(|bias| self.vector(bias).to_vec());
        for span in &batch.spans {
            for (row, position) in rows_of(span) {
                let inputs = self.buffers[x][row * channels..][..channels].to_vec();
                let kept = ConvolutionSpec::state_values(channels, taps);
                let columns = self.state(state, kept, span, position)?;
                let mut sums = match &bias {
                    Some(bias) => bias.iter().map(|value| f64::from(*value)).collect(),
                    None => vec![0.0; channels],
                };
                for back in (1..taps).rev().filter(|back| *back <= position) {
                    let column = &columns[(position - back) % (taps - 1) * channels..][..channels];
                    let weight = &weight[(taps - 1 - back) * channels..][..channels];
                    let products = column.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w));
                    sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
                }
                let own = &weight[(taps - 1) * channels..];
                for ((sum, x), w) in sums.iter_mut().zip(&inputs).zip(own) {
                    *sum += f64::from(*x) * f64::from(*w);
                }
                columns[position % (taps - 1) * channels..][..channels].copy_from_slice(&inputs);
                let out = &mut self.buffers[x][row * channels..][..channels];
                out.iter_mut().zip(sums).for_each(|(out, sum)| {
                    *out = if through { silu(sum) } else { sum } as f32;
                });
            }
        }
        Ok(())
    }

    pub(super) fn state_space(
        &mut self,
        [xbc, steps, out]: [usize; 3],
        spec: usize,
        batch: &Batch,
    ) -> Result<()> {
        let spec = self.program.state_spaces[spec];
        let StateSpaceSpec { heads, head_dim, groups, state_dim, .. } = spec;
        let [decay, step_bias, skip] =
            [spec.decay, spec.step_bias, spec.skip].map(|vector| self.vector(vector).to_vec());
        let (width, values) = (spec.width(), heads * head_dim);
        let mut outputs = vec![0.0; batch.tokens.len() * values];
        for span in &batch.spans {
            for (row, position) in rows_of(span) {
                let xbc = self.buffers[xbc][row * width..][..width].to_vec();
                let steps = self.buffers[steps][row * heads..][..heads].to_vec();
                let state = self.state(spec.state, spec.state_values(), span, position)?;
                for head in 0..heads {
                    let step = softplus(f64::from(steps[head]) + f64::from(step_bias[head]));
                    let kept = (f64::from(decay[head]) * step).exp();
                    let group = head * groups / heads;
                    let b = &xbc[values + group * state_dim..][..state_dim];
                    let c = &xbc[values + (groups + group) * state_dim..][..state_dim];
                    let state = &mut state[head * DeltaSpec::head_values(state_dim, head_dim)..];
                    for at in 0..head_dim {
                        let x = f64::from(xbc[head * head_dim + at]);
                        let mut sum = f64::from(skip[head]) * x;
                        for i in 0..state_dim {
                            let place =
                                (at / STATE_COLUMNS * state_dim + i) * STATE_COLUMNS + at % STATE_COLUMNS;
                            let value = kept * f64::from(state[place]) + step * x * f64::from(b[i]);
                            state[place] = value as f32;
                            sum += value * f64::from(c[i]);
                        }
                        outputs[row * values + head * head_dim + at] = sum as f32;
                    }
                }
            }
        }
        self.buffers[out] = outputs;
        Ok(())
    }

    pub(super) fn delta_rule(
        &mut self,
        [qkv, gates, out]: [usize; 3],
        spec: usize,
        batch: &Batch,
    ) -> Result<()> {
        let spec = self.program.delta[spec];
        let DeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } = spec;
        let (decay, step_bias) = (self.vector(spec.decay).to_vec(), self.vector(spec.step_bias).to_vec());
        let (width, keys) = (spec.qkv_width(), key_heads * key_dim);
        let mut outputs = vec![0.0; batch.tokens.len() * value_heads * value_dim];
        for span in &batch.spans {
            for (row, position) in rows_of(span) {
                let qkv = self.buffers[qkv][row * width..][..width].to_vec();
                let gates = self.buffers[gates][row * 2 * value_heads..][..2 * value_heads].to_vec();
                let states = self.state(spec.state, spec.state_values(), span, position)?;
                let states = states.chunks_mut(DeltaSpec::head_values(key_dim, value_dim));
                let outputs = outputs[row * value_heads * value_dim..].chunks_mut(value_dim);
                for (head, (state, out)) in states.zip(outputs).enumerate() {
                    let of = |start: usize| {
                        let key_head = spec.key_head(head);
                        let x = &qkv[start + key_head * key_dim..][..key_dim];
                        let inverse = (dot(x, x) + f64::from(DeltaSpec::EPS)).sqrt().recip();
                        x.iter().map(|x| f64::from(*x) * inverse).collect::<Vec<f64>>()
                    };
                    let (mut q, k) = (of(0), of(keys));
                    q.iter_mut().for_each(|q| *q /= (key_dim as f64).sqrt());
                    let v = &qkv[2 * keys + head * value_dim..][..value_dim];
                    let learns = sigmoid(f64::from(gates[head]));
                    let step = softplus(f64::from(gates[value_heads + head]) + f64::from(step_bias[head]));
                    let kept = (f64::from(decay[head]) * step).exp();
                    for (column, (out, v)) in out.iter_mut().zip(v).enumerate() {
                        let at = |i: usize| {
                            (column / STATE_COLUMNS * key_dim + i) * STATE_COLUMNS + column % STATE_COLUMNS
                        };
                        let known: f64 = (0..key_dim).map(|i| kept * f64::from(state[at(i)]) * k[i]).sum();
                        let learned = learns * (f64::from(*v) - known);
                        for i in 0..key_dim {
                            state[at(i)] = (kept * f64::from(state[at(i)]) + k[i] * learned) as f32;
                        }
                        *out = (0..key_dim).map(|i| f64::from(state[at(i)]) * q[i]).sum::<f64>() as f32;
                    }
                }
            }
        }
        self.buffers[out] = outputs;
        Ok(())
    }

    pub(super) fn gated_rms_norm(&mut self, x: usize, gate: usize, weight: VectorId, eps: f32) {
        let weight = self.vector(weight).to_vec();
        let gates = self.buffers[gate].chunks(weight.len());
        let rows: Vec<f32> = self.buffers[x]
            .chunks(weight.len())
            .zip(gates)
            .flat_map(|(head, gates)| {
                let normed = rms_norm(head, &weight, eps).into_iter().zip(gates);
                normed.map(|(x, gate)| (f64::from(x) * silu(f64::from(*gate))) as f32).collect::<Vec<_>>()
            })
            .collect();
        self.buffers[x] = rows;
    }

    /// `each` values of `x` to one of the gate.
    pub(super) fn sigmoid_gate(&mut self, x: usize, gate: usize, each: usize) {
        let gates = std::mem::take(&mut self.buffers[gate]);
        for (values, gate) in self.buffers[x].chunks_mut(each).zip(&gates) {
            let by = sigmoid(f64::from(*gate));
            values.iter_mut().for_each(|value| *value = (f64::from(*value) * by) as f32);
        }
        self.buffers[gate] = gates;
    }
}
