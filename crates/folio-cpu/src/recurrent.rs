//! Operations that know of the positions before them through a state: causal convolutions and gated delta nets, with the norm and the
//! gates that come with them.
//!
//! Owns: one form for all rows, prompts and single tokens alike: position after position, each from the state behind the one before.
//! So a row has the same bits however its prompt is cut, and any position may be the end of a kept state. Must never: compute several
//! positions at once in another form.
//!
//! Work is divided by channels and by columns of the state matrices, each of which nobody else reads. A unit takes its columns through all
//! rows of a span, so that they stay in a core's cache.
//!
//! Invariants: sums run over 16 lanes and the fixed tree, or column by column over keys in two chains, those of even and of odd ones. What
//! is stored before position 0 is never read.

use std::ops::Range;

use folio_model::backend::Span;
use folio_model::program::{
    Activation, ConvolutionSpec, DeltaSpec, STATE_COLUMNS, StatePlace, StateSpaceSpec, VectorId,
};

use crate::memory::Rows;
use crate::pool::{Claims, Worker};
use crate::rows::{Gate, RmsNorm, gated};
use crate::simd::{LANES, Simd, Task, dispatch, exp, unrolled};
use crate::step::Step;

/// Column tiles of a state matrix that a unit of work takes.
const TILES: usize = 2;

const _: () = assert!(STATE_COLUMNS == LANES, "a tile's row is a vector");

/// Where the state before a row lies, if there is one, and where that behind it is to lie: perhaps the same place.
#[derive(Clone, Copy)]
struct States {
    before: Option<*const f32>,
    own: *mut f32,
}

/// `$body` for each key, which counts to chain 0 or 1 in turn. A chain that is chosen by a variable would be kept in memory.
macro_rules! in_two_chains {
    ($keys:expr, $i:ident, $chain:ident, $body:block) => {
        for pair in (0..$keys).step_by(2) {
            let ($i, $chain) = (pair, 0);
            $body
            if pair + 1 < $keys {
                let ($i, $chain) = (pair + 1, 1);
                $body
            }
        }
    };
}

/// Where the state before a row is read: of the first, zeros in its own place.
///
/// # Safety
/// `own` has as many vectors, which nobody else reads or writes.
#[inline(always)]
unsafe fn from_zero<S: Simd>(before: Option<*const f32>, own: *mut f32, vectors: usize) -> *const f32 {
    if let Some(before) = before {
        return before;
    }
    for i in 0..vectors {
        // SAFETY: the contract of this function.
        unsafe { S::store(own.add(i * LANES), S::splat(0.0)) };
    }
    own
}

impl Step<'_> {
    fn states(&self, span: &Span, place: StatePlace, position: u32) -> States {
        let cache = &self.caches[place.group as usize];
        let table = self.tables.table(span.slot, place.group as usize);
        let entry = |position: u32| span.state_entry(position, cache.group.block_tokens as u32) as usize;
        let before =
            position.checked_sub(1).map(|before| cache.state(table[entry(before)], place).cast_const());
        States { before, own: cache.state(table[entry(position)], place) }
    }

    /// [`Op::Convolve`](folio_model::program::Op::Convolve).
    pub(crate) fn convolve(&self, worker: &Worker<'_>, x: Rows, spec: &ConvolutionSpec) {
        let vectors = worker.share(spec.channels.div_ceil(LANES), 1);
        let channels = vectors.start * LANES..(vectors.end * LANES).min(spec.channels);
        if channels.is_empty() {
            return;
        }
        let weight = self.vector(spec.weight).as_ptr();
        let bias = spec.bias.map(|bias| self.vector(bias).as_ptr());
        for span in &self.batch.spans {
            for row in 0..span.rows {
                let position = span.first_position + row;
                let (states, position) = (self.states(span, spec.state, position), position as usize);
                let x = x.row((span.first_row + row) as usize);
                let channels = channels.clone();
                dispatch(self.isa, Convolve { x, weight, bias, states, position, spec: *spec, channels });
            }
        }
    }

    /// [`Op::DeltaRule`](folio_model::program::Op::DeltaRule).
    pub(crate) fn delta_rule(
        &self,
        worker: &Worker<'_>,
        [qkv, gates, out]: [Rows; 3],
        spec: &DeltaSpec,
        claims: &Claims,
    ) {
        for unit in worker.share(self.rows() * spec.key_heads, 1) {
            let (row, head) = (unit / spec.key_heads, unit % spec.key_heads);
            self.prepare_head(qkv.row(row), gates.row(row), spec, head);
        }
        worker.barrier();
        let tiles = spec.value_dim.div_ceil(STATE_COLUMNS);
        let groups = tiles.div_ceil(TILES);
        let units = self.batch.spans.len() * spec.value_heads * groups;
        while let Some(mut range) = claims.next(units, 1) {
            let unit = range.next().unwrap_or_default();
            let (rest, group) = (unit / groups, unit % groups);
            let span = &self.batch.spans[rest / spec.value_heads];
            let rows =
                DeltaRows { qkv, gates, out, spec, head: rest % spec.value_heads, tile: group * TILES };
            for row in 0..span.rows {
                let states = self.states(span, spec.state, span.first_position + row);
                let row = (span.first_row + row) as usize;
                match tiles - rows.tile {
                    1 => dispatch(self.isa, DeltaRow::<1> { rows: &rows, row, states }),
                    _ => dispatch(self.isa, DeltaRow::<TILES> { rows: &rows, row, states }),
                }
            }
        }
    }

    /// [`Op::StateSpace`](folio_model::program::Op::StateSpace).
    pub(crate) fn state_space(&self, [xbc, steps, out]: [Rows; 3], spec: &StateSpaceSpec, claims: &Claims) {
        let tiles = spec.head_dim.div_ceil(STATE_COLUMNS);
        let groups = tiles.div_ceil(TILES);
        let units = self.batch.spans.len() * spec.heads * groups;
        let (decay, step_bias, skip) =
            (self.vector(spec.decay), self.vector(spec.step_bias), self.vector(spec.skip));
        while let Some(mut range) = claims.next(units, 1) {
            let unit = range.next().unwrap_or_default();
            let (rest, group) = (unit / groups, unit % groups);
            let (span, head) = (&self.batch.spans[rest / spec.heads], rest % spec.heads);
            let rows = SpaceRows { xbc, out, spec, head, tile: group * TILES, skip: skip[head] };
            for row in 0..span.rows {
                let states = self.states(span, spec.state, span.first_position + row);
                let row = (span.first_row + row) as usize;
                // SAFETY: the row of steps has one for each head, and nobody writes them in this phase.
                let x = f64::from(unsafe { *steps.row(row).add(head) }) + f64::from(step_bias[head]);
                let step = x.max(0.0) + (-x.abs()).exp().ln_1p();
                let keeps = (f64::from(decay[head]) * step).exp() as f32;
                let step = step as f32;
                match tiles - rows.tile {
                    1 => dispatch(self.isa, SpaceRow::<1> { rows: &rows, row, states, step, keeps }),
                    _ => dispatch(self.isa, SpaceRow::<TILES> { rows: &rows, row, states, step, keeps }),
                }
            }
        }
    }

    /// q and k of a head get their lengths, and the gates of its value heads become what they mean: how much is learnt, what is kept.
    fn prepare_head(&self, qkv: *mut f32, gates: *mut f32, spec: &DeltaSpec, head: usize) {
        let &DeltaSpec { key_heads, value_heads, key_dim, .. } = spec;
        let q = qkv.wrapping_add(head * key_dim);
        let k = q.wrapping_add(key_heads * key_dim);
        dispatch(self.isa, Normalize { x: q, width: key_dim, scale: (key_dim as f32).sqrt().recip() });
        dispatch(self.isa, Normalize { x: k, width: key_dim, scale: 1.0 });
        let (decay, step_bias) = (self.vector(spec.decay), self.vector(spec.step_bias));
        let each = value_heads / key_heads;
        for at in 0..each {
            let head = if spec.tiled { at * key_heads + head } else { head * each + at };
            // SAFETY: the row of gates has two for each value head, and these are this worker's.
            let (learns, keeps) = unsafe { (&mut *gates.add(head), &mut *gates.add(value_heads + head)) };
            let x = f64::from(*keeps) + f64::from(step_bias[head]);
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            *keeps = (f64::from(decay[head]) * softplus).exp() as f32;
            *learns = (1.0 / (1.0 + (-f64::from(*learns)).exp())) as f32;
        }
    }

    /// [`Op::GatedRmsNorm`](folio_model::program::Op::GatedRmsNorm).
    pub(crate) fn gated_rms_norm(
        &self,
        worker: &Worker<'_>,
        x: Rows,
        gate: Rows,
        weight: VectorId,
        eps: f32,
    ) {
        let (width, weight) = (self.vectors[weight.0 as usize].0, self.vector(weight).as_ptr());
        let heads = x.width / width;
        for unit in worker.share(self.rows() * heads, 1) {
            let (row, at) = (unit / heads, unit % heads * width);
            let (x, gate) = (x.row(row).wrapping_add(at), gate.row(row).wrapping_add(at).cast_const());
            dispatch(self.isa, RmsNorm { x, weight, eps, width, out: x });
            let activation = Activation::Silu;
            dispatch(self.isa, Gate { activation, gate, up: x, out: x, width });
        }
    }

    /// [`Op::SigmoidGate`](folio_model::program::Op::SigmoidGate).
    pub(crate) fn sigmoid_gate(&self, worker: &Worker<'_>, x: Rows, gate: Rows) {
        for row in worker.share(self.rows(), 1) {
            let (width, gates) = (x.width, gate.width);
            dispatch(self.isa, SigmoidTimes { x: x.row(row), gate: gate.row(row), width, gates });
        }
    }
}

/// One position of some channels of a convolution, and perhaps SiLU.
struct Convolve {
    x: *mut f32,
    weight: *const f32,
    bias: Option<*const f32>,
    states: States,
    position: usize,
    spec: ConvolutionSpec,
    channels: Range<usize>,
}

impl Task for Convolve {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, weight, bias, states, position, spec, channels } = self;
        let ConvolutionSpec { channels: all, taps, silu, .. } = spec;
        let (kept, own) = (taps - 1, states.own);
        for c in channels.clone().step_by(LANES) {
            let n = LANES.min(channels.end - c);
            // SAFETY: a row, each tap's weights and each kept column have `all` values; the channels are this worker's, in every row and
            // every state.
            unsafe {
                let mut sum = match bias {
                    Some(bias) => S::load_part(bias.add(c), n),
                    None => S::splat(0.0),
                };
                for back in (1..taps).rev() {
                    let at = (position + taps * kept - back) % kept * all + c;
                    let column = match states.before {
                        Some(before) if back <= position => S::load_part(before.add(at), n),
                        _ => S::splat(0.0),
                    };
                    if !states.before.is_some_and(|before| std::ptr::eq(before, own)) {
                        S::store_part(own.add(at), n, column);
                    }
                    if back <= position {
                        let weight = S::load_part(weight.add((kept - back) * all + c), n);
                        sum = S::fma(column, weight, sum);
                    }
                }
                let input = S::load_part(x.add(c), n);
                sum = S::fma(input, S::load_part(weight.add(kept * all + c), n), sum);
                S::store_part(own.add(position % kept * all + c), n, input);
                let out = if silu { gated::<S>(Activation::Silu, sum, S::splat(1.0)) } else { sum };
                S::store_part(x.add(c), n, out);
            }
        }
    }
}

/// `x = x * scale / sqrt(sum(x^2) + eps)`
struct Normalize {
    x: *mut f32,
    width: usize,
    scale: f32,
}

impl Task for Normalize {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, width, scale } = self;
        let mut squares = S::splat(0.0);
        // SAFETY: who makes the task promises `width` values behind `x`.
        unsafe {
            for i in (0..width).step_by(LANES) {
                let v = S::load_part(x.add(i), LANES.min(width - i));
                squares = S::fma(v, v, squares);
            }
            let by = S::splat(scale / (S::sum(squares) + DeltaSpec::EPS).sqrt());
            for i in (0..width).step_by(LANES) {
                let n = LANES.min(width - i);
                S::store_part(x.add(i), n, S::mul(S::load_part(x.add(i), n), by));
            }
        }
    }
}

/// Some columns of the state of a head.
struct DeltaRows<'a> {
    qkv: Rows,
    gates: Rows,
    out: Rows,
    spec: &'a DeltaSpec,
    head: usize,
    /// The first of its tiles.
    tile: usize,
}

/// One position of `T` tiles of columns.
struct DeltaRow<'a, const T: usize> {
    rows: &'a DeltaRows<'a>,
    row: usize,
    states: States,
}

impl<const T: usize> Task for DeltaRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { rows: &DeltaRows { qkv, gates, out, spec, head, tile }, row, states } = self;
        let &DeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } = spec;
        let (keys, column) = (key_heads * key_dim, tile * LANES);
        let at = head * DeltaSpec::head_values(key_dim, value_dim) + column * key_dim;
        let own = states.own.wrapping_add(at);
        let before = states.before.map(|before| before.wrapping_add(at));
        let q = qkv.row(row).wrapping_add(spec.key_head(head) * key_dim).cast_const();
        let k = q.wrapping_add(keys);
        let v = qkv.row(row).wrapping_add(2 * keys + head * value_dim + column).cast_const();
        let out = out.row(row).wrapping_add(head * value_dim + column);
        // SAFETY: the buffers have the widths that `check` found to fit the spec, and the state has whole tiles; its columns and those of
        // the output are this worker's, and q, k, v and gates are written by nobody in this phase.
        unsafe {
            let (learns, keeps) = (*gates.row(row).add(head), *gates.row(row).add(value_heads + head));
            let (learns, keeps) = (S::splat(learns), S::splat(keeps));
            let before = from_zero::<S>(before, own, T * key_dim);
            let mut known = [[S::splat(0.0); T]; 2];
            in_two_chains!(key_dim, i, chain, {
                let k = S::splat(*k.add(i));
                unrolled!(T, t, {
                    let s = S::load(before.add((t * key_dim + i) * LANES));
                    known[chain][t] = S::fma(k, s, known[chain][t]);
                });
            });
            let mut learned = [S::splat(0.0); T];
            unrolled!(T, t, {
                let known = S::mul(keeps, S::add(known[0][t], known[1][t]));
                let v = S::load_part(v.add(t * LANES), LANES.min(value_dim - column - t * LANES));
                learned[t] = S::mul(learns, S::sub(v, known));
            });
            let mut sums = [[S::splat(0.0); T]; 2];
            in_two_chains!(key_dim, i, chain, {
                let (q, k) = (S::splat(*q.add(i)), S::splat(*k.add(i)));
                unrolled!(T, t, {
                    let at = (t * key_dim + i) * LANES;
                    let s = S::fma(k, learned[t], S::mul(keeps, S::load(before.add(at))));
                    S::store(own.add(at), s);
                    sums[chain][t] = S::fma(q, s, sums[chain][t]);
                });
            });
            unrolled!(T, t, {
                let n = LANES.min(value_dim - column - t * LANES);
                S::store_part(out.add(t * LANES), n, S::add(sums[0][t], sums[1][t]));
            });
        }
    }
}

/// Some columns of the state of a head of a state space.
struct SpaceRows<'a> {
    xbc: Rows,
    out: Rows,
    spec: &'a StateSpaceSpec,
    head: usize,
    /// The first of its tiles.
    tile: usize,
    skip: f32,
}

/// One position of `T` tiles of columns.
struct SpaceRow<'a, const T: usize> {
    rows: &'a SpaceRows<'a>,
    row: usize,
    states: States,
    step: f32,
    keeps: f32,
}

impl<const T: usize> Task for SpaceRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { rows: &SpaceRows { xbc, out, spec, head, tile, skip }, row, states, step, keeps } = self;
        let &StateSpaceSpec { heads, head_dim, groups, state_dim, .. } = spec;
        let column = tile * LANES;
        let at = head * DeltaSpec::head_values(state_dim, head_dim) + column * state_dim;
        let own = states.own.wrapping_add(at);
        let before = states.before.map(|before| before.wrapping_add(at));
        let x = xbc.row(row).wrapping_add(head * head_dim + column).cast_const();
        let group = head * groups / heads;
        let b = xbc.row(row).wrapping_add(heads * head_dim + group * state_dim).cast_const();
        let c = b.wrapping_add(groups * state_dim);
        let out = out.row(row).wrapping_add(head * head_dim + column);
        let valid = |t: usize| LANES.min(head_dim - column - t * LANES);
        // SAFETY: the buffers have the widths that `check` found to fit the spec, and the state has whole tiles; its columns and those of
        // the output are this worker's, and x, B and C are written by nobody in this phase.
        unsafe {
            let (step, keeps) = (S::splat(step), S::splat(keeps));
            let mut learned = [S::splat(0.0); T];
            unrolled!(T, t, {
                learned[t] = S::mul(step, S::load_part(x.add(t * LANES), valid(t)));
            });
            let before = from_zero::<S>(before, own, T * state_dim);
            let mut sums = [[S::splat(0.0); T]; 2];
            in_two_chains!(state_dim, i, chain, {
                let (b, c) = (S::splat(*b.add(i)), S::splat(*c.add(i)));
                unrolled!(T, t, {
                    let at = (t * state_dim + i) * LANES;
                    let s = S::fma(b, learned[t], S::mul(keeps, S::load(before.add(at))));
                    S::store(own.add(at), s);
                    sums[chain][t] = S::fma(c, s, sums[chain][t]);
                });
            });
            unrolled!(T, t, {
                let own = S::mul(S::splat(skip), S::load_part(x.add(t * LANES), valid(t)));
                S::store_part(out.add(t * LANES), valid(t), S::add(S::add(sums[0][t], sums[1][t]), own));
            });
        }
    }
}

/// `x *= sigmoid(gate)`, each of `gates` gates that of as many neighbours.
struct SigmoidTimes {
    x: *mut f32,
    gate: *const f32,
    width: usize,
    gates: usize,
}

impl Task for SigmoidTimes {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, gate, width, gates } = self;
        let (one, each) = (S::splat(1.0), width / gates);
        // SAFETY: who makes the task promises `width` values behind `x`, a multiple of `gates` behind `gate`.
        unsafe {
            if each == 1 {
                for i in (0..width).step_by(LANES) {
                    let n = LANES.min(width - i);
                    let gate = S::load_part(gate.add(i), n);
                    let below = S::add(one, exp::<S>(S::sub(S::splat(0.0), gate)));
                    S::store_part(x.add(i), n, S::div(S::load_part(x.add(i), n), below));
                }
                return;
            }
            for g in 0..gates {
                let below = S::add(one, exp::<S>(S::splat(-*gate.add(g))));
                let x = x.add(g * each);
                for i in (0..each).step_by(LANES) {
                    let n = LANES.min(each - i);
                    S::store_part(x.add(i), n, S::div(S::load_part(x.add(i), n), below));
                }
            }
        }
    }
}
