//! Weights that are floats, and the register tile of products with them: `P` panels times `M` tokens over a slab of column
//! pairs.
//!
//! Owns: which encodings are floats ([`Kind`]), how they become f32, and the order of multiply-adds inside a tile. Activations
//! are `[column][token]`, as they are: FP8 weights round nothing but themselves.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use folio_model::backend::DType;
use folio_model::quant::{BlockFormat, Encoding};

use crate::fp8;
use crate::linear::Output;
use crate::packed::PAIR;
use crate::simd::{Isa, LANES, Simd, Task, dispatch};

/// Most tokens of a register tile.
pub(crate) fn group_limit(isa: Isa) -> usize {
    struct Limit;
    impl Task for Limit {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self) -> usize {
            S::TOKENS
        }
    }
    dispatch(isa, Limit)
}

/// Which arithmetic multiplies an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Floats(Float),
    /// See `quant`.
    Integers(BlockFormat),
}

/// How floats are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    Plain(DType),
    /// See [`fp8`].
    Fp8 {
        columns: usize,
    },
}

impl Kind {
    pub(crate) fn of(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Plain(dtype) => Kind::Floats(Float::Plain(dtype)),
            Encoding::Block(format @ (BlockFormat::Fp8x32 | BlockFormat::Fp8x128)) => {
                Kind::Floats(Float::Fp8 { columns: format.values() })
            }
            Encoding::Block(format) => Kind::Integers(format),
        }
    }
}

impl Float {
    /// Bytes and columns of a step of a panel: a pair of columns, or a record.
    pub(crate) fn step(self) -> (usize, usize) {
        match self {
            Float::Plain(dtype) => (PAIR * dtype.size(), 2),
            Float::Fp8 { columns } => (fp8::record_bytes(columns), columns),
        }
    }
}

/// How a weight type becomes f32: two columns of 16 rows at a time.
trait Weight {
    /// Bytes of a step besides its pairs, and of a pair.
    const HEAD: usize = 0;
    const BYTES: usize;
    /// The pair at `p` of the step at `step`.
    ///
    /// # Safety
    /// `p` is readable for one pair, `step` for its head.
    unsafe fn pair<S: Simd>(step: *const u8, p: *const u8) -> (S::V, S::V);
}

struct Bf16;
struct F16;
struct F32;
struct Fp8;

impl Weight for Fp8 {
    const HEAD: usize = fp8::HEAD;
    const BYTES: usize = fp8::PAIR_BYTES;
    #[inline(always)]
    unsafe fn pair<S: Simd>(step: *const u8, p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 32 codes, and 16 scales at the start of the step.
        unsafe {
            let (even, odd) = S::e4m3_pairs(p);
            let d = S::load(step.cast());
            (S::mul(d, even), S::mul(d, odd))
        }
    }
}

impl Weight for Bf16 {
    const BYTES: usize = 2 * PAIR;
    #[inline(always)]
    unsafe fn pair<S: Simd>(_: *const u8, p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 32 values.
        unsafe { S::bf16_pairs(p.cast()) }
    }
}

impl Weight for F16 {
    const BYTES: usize = 2 * PAIR;
    #[inline(always)]
    unsafe fn pair<S: Simd>(_: *const u8, p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 32 values.
        unsafe { (S::f16(p.cast()), S::f16(p.add(PAIR).cast())) }
    }
}

impl Weight for F32 {
    const BYTES: usize = 4 * PAIR;
    #[inline(always)]
    unsafe fn pair<S: Simd>(_: *const u8, p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 32 values.
        unsafe { (S::load(p.cast()), S::load(p.add(2 * PAIR).cast())) }
    }
}

/// A slab of columns of panels side by side.
pub(crate) struct Weights {
    pub(crate) float: Float,
    /// Slab of the first panel; the others are `panel_bytes` further each.
    pub(crate) slab: *const u8,
    /// What to ask for meanwhile, laid out like the slab.
    pub(crate) next: *const u8,
    pub(crate) panel_bytes: usize,
    pub(crate) panels: usize,
    /// Pairs of columns, or records.
    pub(crate) steps: usize,
}

/// Weights and one group of tokens.
pub(crate) struct Part<'a> {
    pub(crate) isa: Isa,
    pub(crate) weights: Weights,
    /// `[column][tokens]`
    pub(crate) x: *const f32,
    pub(crate) tokens: usize,
    /// Of the first panel.
    pub(crate) output: Output<'a>,
}

impl Part<'_> {
    /// Computes the part.
    ///
    /// # Safety
    /// Weights, activations and output rows are as the fields say, and the output is this worker's.
    pub(crate) unsafe fn run(&self) {
        match self.weights.float {
            Float::Plain(DType::BF16) => self.typed::<Bf16>(),
            Float::Plain(DType::F16) => self.typed::<F16>(),
            Float::Plain(DType::F32) => self.typed::<F32>(),
            Float::Fp8 { .. } => self.typed::<Fp8>(),
        }
    }

    fn typed<W: Weight>(&self) {
        let wide = self.isa.is_wide();
        match self.tokens {
            1 => self.tiles::<W, 4, 1>(),
            2 if wide => self.tiles::<W, 4, 2>(),
            2 => self.tiles::<W, 2, 2>(),
            3 if wide => self.tiles::<W, 4, 3>(),
            3 => self.tiles::<W, 2, 3>(),
            4 if wide => self.tiles::<W, 2, 4>(),
            4 => self.tiles::<W, 1, 4>(),
            5 if wide => self.tiles::<W, 2, 5>(),
            5 => self.tiles::<W, 1, 5>(),
            6 if wide => self.tiles::<W, 2, 6>(),
            6 => self.tiles::<W, 1, 6>(),
            7 => self.tiles::<W, 2, 7>(),
            8 => self.tiles::<W, 2, 8>(),
            9 => self.tiles::<W, 2, 9>(),
            10 => self.tiles::<W, 2, 10>(),
            11 => self.tiles::<W, 2, 11>(),
            12 => self.tiles::<W, 2, 12>(),
            _ => unreachable!("groups have 1 to {} tokens", group_limit(self.isa)),
        }
    }

    /// Tiles of `P` panels, then single panels.
    fn tiles<W: Weight, const P: usize, const M: usize>(&self) {
        let mut done = 0;
        while self.weights.panels - done >= P {
            dispatch(self.isa, Tile::<W, P, M> { part: self, done, dtype: std::marker::PhantomData });
            done += P;
        }
        while done < self.weights.panels {
            dispatch(self.isa, Tile::<W, 1, M> { part: self, done, dtype: std::marker::PhantomData });
            done += 1;
        }
    }
}

struct Tile<'a, W, const P: usize, const M: usize> {
    part: &'a Part<'a>,
    /// Panels before the tile.
    done: usize,
    dtype: std::marker::PhantomData<W>,
}

impl<W: Weight, const P: usize, const M: usize> Task for Tile<'_, W, P, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        if const { M > S::TOKENS } {
            unreachable!("no group has {M} tokens");
        }
        let part = self.part;
        let Weights { float, slab, next, panel_bytes, steps, .. } = part.weights;
        // Of one pair where there is no head, so that the inner loop vanishes.
        let pairs = if const { W::HEAD == 0 } { 1 } else { float.step().1 / 2 };
        let skip = self.done * panel_bytes;
        let output = part.output.skip(self.done * LANES);
        let mut acc = [[S::splat(0.0); M]; P];
        // SAFETY: the contract of `Part::run`.
        unsafe {
            for (p, acc) in acc.iter_mut().enumerate() {
                output.resume::<S, M>(p, acc);
            }
            let mut w = slab.wrapping_add(skip);
            let mut x = part.x;
            let mut next = next.wrapping_add(skip);
            for _ in 0..steps {
                let step = w;
                w = w.wrapping_add(W::HEAD);
                next = next.wrapping_add(W::HEAD);
                for _ in 0..pairs {
                    if M == 1 {
                        // Panel after panel: few registers are live at once, the chains of the panels hide the latency.
                        let (b, c) = (S::splat(*x), S::splat(*x.add(1)));
                        for (p, acc) in acc.iter_mut().enumerate() {
                            let panel = p * panel_bytes;
                            let (even, odd) = W::pair::<S>(step.wrapping_add(panel), w.wrapping_add(panel));
                            S::prefetch(next.wrapping_add(panel));
                            acc[0] = S::fma(odd, c, S::fma(even, b, acc[0]));
                        }
                    } else {
                        let mut pair = [(S::splat(0.0), S::splat(0.0)); P];
                        for (p, v) in pair.iter_mut().enumerate() {
                            let panel = p * panel_bytes;
                            *v = W::pair::<S>(step.wrapping_add(panel), w.wrapping_add(panel));
                            S::prefetch(next.wrapping_add(panel));
                        }
                        for t in 0..M {
                            let b = S::splat(*x.add(t));
                            for p in 0..P {
                                acc[p][t] = S::fma(pair[p].0, b, acc[p][t]);
                            }
                        }
                        for t in 0..M {
                            let b = S::splat(*x.add(M + t));
                            for p in 0..P {
                                acc[p][t] = S::fma(pair[p].1, b, acc[p][t]);
                            }
                        }
                    }
                    w = w.wrapping_add(W::BYTES);
                    x = x.wrapping_add(2 * M);
                    next = next.wrapping_add(W::BYTES);
                }
            }
            for (p, acc) in acc.into_iter().enumerate() {
                output.finish::<S, M>(p, acc);
            }
        }
    }
}
