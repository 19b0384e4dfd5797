//! Operations on one row at a time: norm, rotation, SiLU.
//!
//! Must never: look at a second row. Sums go over 16 lanes and the fixed tree; everything else is element by element, where
//! every instruction set rounds alike.

use crate::simd::{LANES, Simd, Task, exp};

/// `out = (x / sqrt(mean(x^2) + eps)) * weight`; `out` may be `x`.
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
        let mut squares = S::splat(0.0);
        // SAFETY: who makes the task promises `width` values behind `x` and `out`, and whole vectors behind `weight`.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let v = S::load(self.x.add(i));
                squares = S::fma(v, v, squares);
            }
            if rest > 0 {
                let v = S::load_part(self.x.add(whole), rest);
                squares = S::fma(v, v, squares);
            }
            let inverse = S::splat(1.0 / (S::sum(squares) / self.width as f32 + self.eps).sqrt());
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

/// `out = gate / (1 + e^-gate) * up` over `count` values.
#[derive(Clone, Copy)]
pub(crate) struct SiluMul {
    pub(crate) gate: *const f32,
    pub(crate) up: *const f32,
    pub(crate) out: *mut f32,
    pub(crate) count: usize,
}

#[inline(always)]
fn silu_mul<S: Simd>(gate: S::V, up: S::V) -> S::V {
    let one = S::splat(1.0);
    let e = exp::<S>(S::sub(S::splat(0.0), gate));
    S::mul(S::div(gate, S::add(one, e)), up)
}

impl Task for SiluMul {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let whole = self.count / LANES * LANES;
        let rest = self.count - whole;
        // SAFETY: who makes the task promises `count` values behind each pointer.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let v = silu_mul::<S>(S::load(self.gate.add(i)), S::load(self.up.add(i)));
                S::store(self.out.add(i), v);
            }
            if rest > 0 {
                let gate = S::load_part(self.gate.add(whole), rest);
                let v = silu_mul::<S>(gate, S::load_part(self.up.add(whole), rest));
                S::store_part(self.out.add(whole), rest, v);
            }
        }
    }
}

/// Cosines, then sines, of one position: `[2 * inv_freq.len()]`.
///
/// Angle, cosine and sine are computed in f64 and rounded once. A function of the position alone.
pub(crate) fn rotary_table(position: usize, inv_freq: &[f32], scale: f32, out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(inv_freq.len());
    for ((c, s), f) in cos.iter_mut().zip(sin).zip(inv_freq) {
        let angle = position as f64 * f64::from(*f);
        *c = (angle.cos() * f64::from(scale)) as f32;
        *s = (angle.sin() * f64::from(scale)) as f32;
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
