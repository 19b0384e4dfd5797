//! Operations on one row at a time: norm, rotation, gates.
//!
//! Must never: look at a second row. Sums go over 16 lanes and the fixed tree; everything else is element by element, where
//! every instruction set rounds alike.

use folio_model::program::{Activation, Rope};

use crate::simd::{LANES, Simd, Task, exp, tanh};

/// `1 / sqrt(mean(x^2) + eps)`
#[derive(Clone, Copy)]
pub(crate) struct InverseRms {
    pub(crate) x: *const f32,
    pub(crate) eps: f32,
    pub(crate) width: usize,
}

impl Task for InverseRms {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        let whole = self.width / LANES * LANES;
        let rest = self.width - whole;
        let mut squares = S::splat(0.0);
        // SAFETY: who makes the task promises `width` values behind `x`.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let v = S::load(self.x.add(i));
                squares = S::fma(v, v, squares);
            }
            if rest > 0 {
                let v = S::load_part(self.x.add(whole), rest);
                squares = S::fma(v, v, squares);
            }
        }
        1.0 / (S::sum(squares) / self.width as f32 + self.eps).sqrt()
    }
}

/// `out = (x * InverseRms) * weight`, in this order, wherever a norm is computed; `out` may be `x`.
#[derive(Clone, Copy)]
pub(crate) struct RmsNorm {
    pub(crate) x: *const f32,
    /// Padded to whole vectors.
    pub(crate) weight: *const f32,
    pub(crate) eps: f32,
    pub(crate) width: usize,
    pub(crate) out: *mut f32,
}

impl Task for RmsNorm {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let whole = self.width / LANES * LANES;
        let rest = self.width - whole;
        let inverse = S::splat(InverseRms { x: self.x, eps: self.eps, width: self.width }.run::<S>());
        // SAFETY: who makes the task promises `width` values behind `x` and `out`, and whole vectors behind `weight`.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let v = S::mul(S::load(self.x.add(i)), inverse);
                S::store(self.out.add(i), S::mul(v, S::load(self.weight.add(i))));
            }
            if rest > 0 {
                let v = S::mul(S::load_part(self.x.add(whole), rest), inverse);
                S::store_part(self.out.add(whole), rest, S::mul(v, S::load(self.weight.add(whole))));
            }
        }
    }
}

/// A norm in place, of a part whose weight is no whole vectors.
pub(crate) struct NormPart<'a> {
    pub(crate) x: *mut f32,
    /// As long as the part.
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
}

impl Task for NormPart<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, weight, eps } = self;
        let inverse = S::splat(InverseRms { x, eps, width: weight.len() }.run::<S>());
        for i in (0..weight.len()).step_by(LANES) {
            let n = LANES.min(weight.len() - i);
            // SAFETY: who makes the task promises as many values behind `x` as the weight has.
            unsafe {
                let v = S::mul(S::load_part(x.add(i), n), inverse);
                S::store_part(x.add(i), n, S::mul(v, S::load_part(weight.as_ptr().add(i), n)));
            }
        }
    }
}

/// `out = x * sigmoid(l)` of the largest logit.
pub(crate) struct TopGate {
    pub(crate) x: *const f32,
    pub(crate) width: usize,
    pub(crate) logits: *const f32,
    pub(crate) count: usize,
    pub(crate) out: *mut f32,
}

impl Task for TopGate {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, width, logits, count, out } = self;
        // SAFETY: who makes the task promises `count` logits, and `width` values of either row, the latter its own.
        unsafe {
            let logits = std::slice::from_raw_parts(logits, count);
            let top =
                logits.iter().fold(f32::NEG_INFINITY, |top, logit| if *logit > top { *logit } else { top });
            let one = S::splat(1.0);
            let by = S::div(one, S::add(one, exp::<S>(S::splat(-top))));
            for i in (0..width).step_by(LANES) {
                let n = LANES.min(width - i);
                S::store_part(out.add(i), n, S::mul(S::load_part(x.add(i), n), by));
            }
        }
    }
}

/// `out = x - mean(x)`; `out` may be `x`.
pub(crate) struct Center {
    pub(crate) x: *const f32,
    pub(crate) width: usize,
    pub(crate) out: *mut f32,
}

impl Task for Center {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { x, width, out } = self;
        let mut sum = S::splat(0.0);
        // SAFETY: who makes the task promises `width` values behind `x` and `out`.
        unsafe {
            for i in (0..width).step_by(LANES) {
                sum = S::add(sum, S::load_part(x.add(i), LANES.min(width - i)));
            }
            let mean = S::splat(S::sum(sum) / width as f32);
            for i in (0..width).step_by(LANES) {
                let n = LANES.min(width - i);
                S::store_part(out.add(i), n, S::sub(S::load_part(x.add(i), n), mean));
            }
        }
    }
}

/// `x *= by`
pub(crate) struct Multiply {
    pub(crate) x: *mut f32,
    pub(crate) by: *const f32,
    pub(crate) width: usize,
}

impl Task for Multiply {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for i in (0..self.width).step_by(LANES) {
            let n = LANES.min(self.width - i);
            // SAFETY: who makes the task promises `width` values behind both.
            unsafe {
                let (x, by) = (S::load_part(self.x.add(i), n), S::load_part(self.by.add(i), n));
                S::store_part(self.x.add(i), n, S::mul(x, by));
            }
        }
    }
}

/// `out = activation(gate, up)`; `out` may be either.
pub(crate) struct Gate {
    pub(crate) activation: Activation,
    pub(crate) gate: *const f32,
    pub(crate) up: *const f32,
    pub(crate) out: *mut f32,
    pub(crate) width: usize,
}

impl Task for Gate {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for i in (0..self.width).step_by(LANES) {
            let n = LANES.min(self.width - i);
            // SAFETY: who makes the task promises `width` values behind all three.
            unsafe {
                let (gate, up) = (S::load_part(self.gate.add(i), n), S::load_part(self.up.add(i), n));
                S::store_part(self.out.add(i), n, gated::<S>(self.activation, gate, up));
            }
        }
    }
}

/// What xIELU is made of: factors above and below 0, the slope in 0, and where the exponential stops growing.
#[derive(Clone, Copy)]
pub(crate) struct Curve {
    above: f32,
    below: f32,
    beta: f32,
    eps: f32,
}

/// [`Op::XIelu`](folio_model::program::Op::XIelu) of a row.
pub(crate) struct XIelu {
    pub(crate) curve: Curve,
    pub(crate) x: *mut f32,
    pub(crate) width: usize,
}

impl XIelu {
    /// `weight` is `[alpha_p, alpha_n, beta, eps]`.
    pub(crate) fn curve(weight: &[f32]) -> Curve {
        let softplus = |x: f32| {
            let x = f64::from(x);
            (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
        };
        let [beta, eps] = [weight[2], weight[3]];
        Curve { above: softplus(weight[0]), below: beta + softplus(weight[1]), beta, eps }
    }
}

impl Task for XIelu {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Curve { above, below, beta, eps } = self.curve;
        let [above, below, beta, eps] = [above, below, beta, eps].map(|value| S::splat(value));
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        for i in (0..self.width).step_by(LANES) {
            let n = LANES.min(self.width - i);
            // SAFETY: who makes the task promises `width` values behind `x`.
            unsafe {
                let x = S::load_part(self.x.add(i), n);
                let square = S::mul(above, S::mul(x, x));
                let grown = S::sub(exp::<S>(S::select_lt(x, eps, x, eps)), one);
                let bent = S::mul(below, S::sub(grown, x));
                S::store_part(self.x.add(i), n, S::fma(beta, x, S::select_lt(zero, x, square, bent)));
            }
        }
    }
}

/// `x = cap * tanh(x / cap)` over `count` values.
pub(crate) struct Softcap {
    pub(crate) cap: f32,
    pub(crate) x: *mut f32,
    pub(crate) count: usize,
}

impl Task for Softcap {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let cap = S::splat(self.cap);
        for i in (0..self.count).step_by(LANES) {
            let valid = LANES.min(self.count - i);
            // SAFETY: who makes the task promises `count` values behind `x`.
            unsafe {
                let v = S::load_part(self.x.add(i), valid);
                S::store_part(self.x.add(i), valid, S::mul(cap, tanh::<S>(S::div(v, cap))));
            }
        }
    }
}

/// `activation(gate, up)`, lane by lane. Where there is no gate both are the same.
///
/// GELU is `gate / (1 + e^-2u)` of `u = sqrt(2 / pi) * (gate + 0.044715 * gate^3)`: no sum that cancels.
#[inline(always)]
pub(crate) fn gated<S: Simd>(activation: Activation, gate: S::V, up: S::V) -> S::V {
    let one = S::splat(1.0);
    let (gate, power, up) = match activation {
        Activation::Silu => (gate, gate, up),
        Activation::GeluTanh => {
            let square = S::mul(gate, gate);
            let power = S::mul(gate, S::fma(square, S::splat(0.071_354_814), S::splat(1.595_769)));
            (gate, power, up)
        }
        Activation::SwigluOai { alpha, limit } => {
            let (low, high) = (S::splat(-limit), S::splat(limit));
            // The order of operands keeps a NaN.
            let gate = S::select_lt(high, gate, high, gate);
            let up = S::select_lt(up, low, low, S::select_lt(high, up, high, up));
            (gate, S::mul(S::splat(alpha), gate), S::add(up, one))
        }
        Activation::ReluSquared => {
            let zero = S::splat(0.0);
            // The order of operands keeps a NaN.
            return S::mul(S::select_lt(gate, zero, zero, gate), up);
        }
    };
    let e = exp::<S>(S::sub(S::splat(0.0), power));
    S::mul(S::div(gate, S::add(one, e)), up)
}

/// Cosines, then sines, of a row's positions on three axes: `[2 * rope.inv_freq.len()]`.
///
/// Angle, cosine and sine are computed in f64 and rounded once. A function of the positions alone.
pub(crate) fn rotary_table(positions: [u32; 3], rope: &Rope, out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(rope.inv_freq.len());
    let axes = rope.axes.iter().copied().chain(std::iter::repeat(0));
    for (((c, s), f), axis) in cos.iter_mut().zip(sin).zip(&rope.inv_freq).zip(axes) {
        let angle = f64::from(positions[usize::from(axis)]) * f64::from(*f);
        *c = (angle.cos() * f64::from(rope.scale)) as f32;
        *s = (angle.sin() * f64::from(rope.scale)) as f32;
    }
}

/// Rotates `(x[i], x[i + half])` for each `i < half`, where `table` is what [`rotary_table`] wrote.
pub(crate) fn rotate(head: &mut [f32], table: &[f32]) {
    let half = table.len() / 2;
    let (cos, sin) = table.split_at(half);
    let (low, rest) = head.split_at_mut(half);
    for i in 0..half {
        let (a, b) = (low[i], rest[i]);
        low[i] = a * cos[i] - b * sin[i];
        rest[i] = b * cos[i] + a * sin[i];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, dispatch};

    fn inputs(n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|i| (((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0) * scale).collect()
    }

    /// Results of every instruction set must have the bits of the first.
    fn agree(what: &str, run: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
        let scalar = run(Isa::Scalar);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (i, (a, b)) in run(isa).iter().zip(&scalar).enumerate() {
                assert_eq!(a.to_bits(), b.to_bits(), "{what} {isa:?} value {i}: {a} is not {b}");
            }
        }
        scalar
    }

    #[test]
    fn norm_is_the_same_everywhere_and_right() {
        for width in [1, 8, 15, 16, 17, 80, 576, 2048] {
            let x = inputs(width, 3.0);
            let mut weight = inputs(width, 1.0);
            weight.resize(width.next_multiple_of(LANES), 0.0);
            let got = agree(&format!("norm of {width}"), |isa| {
                let mut out = vec![0.0; width];
                let (x, weight, out_at) = (x.as_ptr(), weight.as_ptr(), out.as_mut_ptr());
                dispatch(isa, RmsNorm { x, weight, eps: 1e-5, width, out: out_at });
                out
            });
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
            for i in 0..width {
                let want = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                assert!((f64::from(got[i]) - want).abs() <= 1e-6 * (1.0 + want.abs()), "width {width}");
            }
        }
    }

    struct Gated<'a>(Activation, &'a [f32], &'a [f32]);

    impl Task for Gated<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self) -> Vec<f32> {
            let Self(activation, gates, ups) = self;
            let mut out = vec![0.0; gates.len()];
            for i in (0..gates.len()).step_by(LANES) {
                // SAFETY: callers pass whole vectors of both.
                unsafe {
                    let (gate, up) = (S::load(gates.as_ptr().add(i)), S::load(ups.as_ptr().add(i)));
                    S::store(out.as_mut_ptr().add(i), gated::<S>(activation, gate, up));
                }
            }
            out
        }
    }

    #[test]
    fn gates_are_the_same_everywhere_and_right() {
        let (gate, up) = (inputs(1008, 95.0), inputs(1008, 2.0));
        let oai = Activation::SwigluOai { alpha: 1.702, limit: 7.0 };
        for activation in [Activation::Silu, Activation::GeluTanh, oai, Activation::ReluSquared] {
            let got = agree(&format!("{activation:?}"), |isa| dispatch(isa, Gated(activation, &gate, &up)));
            for i in 0..gate.len() {
                let (g, u) = (f64::from(gate[i]), f64::from(up[i]));
                let want = match activation {
                    Activation::Silu => g / (1.0 + (-g).exp()) * u,
                    Activation::GeluTanh => {
                        let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
                        0.5 * g * (1.0 + inner.tanh()) * u
                    }
                    Activation::SwigluOai { alpha, limit } => {
                        let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                        let (g, u) = (g.min(limit), u.clamp(-limit, limit));
                        g / (1.0 + (-alpha * g).exp()) * (u + 1.0)
                    }
                    Activation::ReluSquared => g.max(0.0) * u,
                };
                assert!((f64::from(got[i]) - want).abs() <= 1e-6 * (1.0 + want.abs()), "{g}: {}", got[i]);
            }
        }
    }

    #[test]
    fn rows_are_centered_and_multiplied_the_same_everywhere() {
        for width in [1, 15, 16, 33, 576] {
            let (x, by) = (inputs(width, 3.0), inputs(width, 0.7));
            let got = agree(&format!("center of {width}"), |isa| {
                let mut out = vec![0.0; width];
                dispatch(isa, Center { x: x.as_ptr(), width, out: out.as_mut_ptr() });
                dispatch(isa, Multiply { x: out.as_mut_ptr(), by: by.as_ptr(), width });
                out
            });
            let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / width as f64;
            for i in 0..width {
                let want = (f64::from(x[i]) - mean) * f64::from(by[i]);
                assert!((f64::from(got[i]) - want).abs() <= 2e-6, "width {width}: {} is not {want}", got[i]);
            }
        }
    }

    #[test]
    fn xielu_is_the_same_everywhere_and_right() {
        let (x, weight) = (inputs(1009, 20.0), [0.4f32, -0.7, 0.5, -1e-6]);
        let got = agree("xIELU", |isa| {
            let mut out = x.clone();
            let (width, curve) = (out.len(), XIelu::curve(&weight));
            dispatch(isa, XIelu { curve, x: out.as_mut_ptr(), width });
            out
        });
        let softplus = |x: f32| f64::from(x).exp().ln_1p();
        for (x, got) in x.iter().zip(&got) {
            let x = f64::from(*x);
            let want = match x > 0.0 {
                true => softplus(0.4) * x * x + 0.5 * x,
                false => (0.5 + softplus(-0.7)) * (x.min(-1e-6).exp_m1() - x) + 0.5 * x,
            };
            assert!((f64::from(*got) - want).abs() <= 1e-6 * (1.0 + want.abs()), "{x}: {got} is not {want}");
        }
    }

    struct Exp(Vec<f32>);

    impl Task for Exp {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(mut self) -> Vec<f32> {
            for v in self.0.as_chunks_mut::<LANES>().0 {
                // SAFETY: 16 values.
                unsafe { S::store(v.as_mut_ptr(), exp::<S>(S::load(v.as_ptr()))) }
            }
            self.0
        }
    }

    #[test]
    fn exp_is_the_same_everywhere_accurate_and_exact_at_its_corners() {
        let mut x: Vec<f32> = (0..16_000).map(|i| i as f32 * 0.0109 - 86.9).collect();
        x.extend([0.0, -0.0, f32::NEG_INFINITY, -87.5, f32::NAN, f32::INFINITY, 88.0, -1e30]);
        x.resize(x.len().next_multiple_of(LANES), 1.0);
        let got = agree("exp", |isa| {
            dispatch(isa, Exp(x.clone())).iter().map(|e| if e.is_nan() { -1.0 } else { *e }).collect()
        });
        for (x, e) in x.iter().zip(&got).take(16_000) {
            let want = f64::from(*x).exp();
            assert!((f64::from(*e) - want).abs() <= 2.5e-7 * want, "exp({x}) = {e}");
        }
        let corners = &got[16_000..16_008];
        assert_eq!(&corners[..5], &[1.0, 1.0, 0.0, 0.0, -1.0], "the fifth is NaN");
        assert!(corners[5].is_finite() && corners[7] == 0.0);
    }

    struct Tanh(Vec<f32>);

    impl Task for Tanh {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(mut self) -> Vec<f32> {
            for v in self.0.as_chunks_mut::<LANES>().0 {
                // SAFETY: 16 values.
                unsafe { S::store(v.as_mut_ptr(), tanh::<S>(S::load(v.as_ptr()))) }
            }
            self.0
        }
    }

    #[test]
    fn tanh_is_the_same_everywhere_and_accurate() {
        let mut x: Vec<f32> = (0..16_000).map(|i| i as f32 * 0.00125 - 10.0).collect();
        x.extend([0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 1e-20, -1e30, 1e30, -0.625]);
        x.resize(x.len().next_multiple_of(LANES), 1.0);
        let got = agree("tanh", |isa| {
            dispatch(isa, Tanh(x.clone())).iter().map(|t| if t.is_nan() { -9.0 } else { *t }).collect()
        });
        for (x, t) in x.iter().zip(&got).filter(|(x, _)| !x.is_nan()) {
            let want = f64::from(*x).tanh();
            assert!((f64::from(*t) - want).abs() <= 2e-7 * want.abs().max(1e-20), "tanh({x}) = {t}");
        }
        assert_eq!(&got[16_000..16_004], &[0.0, -1.0, 1.0, -9.0], "the fourth is NaN");
    }

    #[test]
    fn rotation_keeps_lengths_and_turns_by_the_angle() {
        let mut table = vec![0.0; 4];
        let rope = Rope { inv_freq: vec![1.0, 0.5], scale: 1.0, axes: Vec::new() };
        rotary_table([3; 3], &rope, &mut table);
        let mut head = [1.0, 0.0, 0.0, 1.0, 9.0];
        rotate(&mut head, &table);
        let want = [3f32.cos(), -(1.5f32.sin()), 3f32.sin(), 1.5f32.cos(), 9.0];
        for (got, want) in head.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{head:?}");
        }
    }

    #[test]
    fn each_frequency_turns_by_the_position_on_its_axis() {
        let inv_freq: Vec<f32> = (0..6).map(|i| 0.5f32.powi(i)).collect();
        let plain = Rope { inv_freq: inv_freq.clone(), scale: 1.5, axes: Vec::new() };
        let axes = Rope { axes: vec![0, 1, 2, 0, 1, 0], ..plain.clone() };
        let table = |rope: &Rope, positions| {
            let mut out = vec![0.0; 12];
            rotary_table(positions, rope, &mut out);
            out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(table(&axes, [41; 3]), table(&plain, [41; 3]), "text is where it was");
        let (mixed, of) = (table(&axes, [9, 100, 7]), [9, 100, 7].map(|at| table(&plain, [at; 3])));
        for (i, axis) in axes.axes.iter().enumerate() {
            let of = &of[usize::from(*axis)];
            assert_eq!((mixed[i], mixed[i + 6]), (of[i], of[i + 6]), "frequency {i}");
        }
    }
}
