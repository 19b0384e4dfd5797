//! Matrix products: `out = W.x (+ bias) (+ out)` for any number of tokens.
//!
//! Owns: packing of activations, the register tile, the split of rows over workers. Must never: let the number of tokens,
//! the tile or the worker touch a bit of a result.
//!
//! Invariant (promise 1): an output value starts at zero and takes one fused multiply-add per column, in ascending order,
//! in one lane; then the bias is added, then the residual. A chain that is interrupted (columns are walked in slabs so that
//! both operands stay in cache) is stored and taken up again as f32, which is exact.
//!
//! Cost: every weight byte is read once per [`TOKEN_BLOCK`] tokens. Activations are transposed into groups of up to
//! `S::TOKENS` tokens, `[column][token]`, so that the tile reads them in order.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use folio_model::backend::DType;

use crate::memory::Rows;
use crate::packed::{PAIR, PackedMatrix};
use crate::pool::Claims;
use crate::simd::{Isa, LANES, Simd, Task, dispatch};

/// Tokens whose activations stay in the second-level cache while a slab of weights passes.
pub(crate) const TOKEN_BLOCK: usize = 96;
/// Column pairs per slab when there are several token groups.
const SLAB_PAIRS: usize = 256;
/// How far ahead a stream of weights is asked for. Further is slower: prefetchers of the machine already run far ahead.
const AHEAD_BYTES: usize = 256;
/// Panels of one claim when weights are streamed once (decode), by bytes.
const STREAM_BYTES: usize = 512 << 10;
/// Panels of one claim in a product of several token groups; also the height of the scratch.
pub(crate) const BLOCK_PANELS: usize = 16;

/// f32 values of a worker's scratch.
pub(crate) const SCRATCH: usize = TOKEN_BLOCK * BLOCK_PANELS * LANES;

/// One product, as every worker sees it.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'a> {
    pub(crate) weight: &'a PackedMatrix,
    /// `rows` padded to whole panels.
    pub(crate) bias: Option<&'a [f32]>,
    /// Activations from [`pack_tokens`].
    pub(crate) x: *const f32,
    pub(crate) tokens: usize,
    pub(crate) out: Rows,
    /// Add to what `out` holds.
    pub(crate) add: bool,
}

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

/// Groups of tokens, as even as they can be: group `i` is tokens `start(i)..start(i + 1)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups {
    tokens: usize,
    pub(crate) count: usize,
}

impl Groups {
    pub(crate) fn new(tokens: usize, limit: usize) -> Self {
        Self { tokens, count: tokens.div_ceil(limit) }
    }

    pub(crate) fn start(&self, group: usize) -> usize {
        self.tokens * group / self.count
    }
}

/// f32 values that packed activations of `tokens` tokens take.
pub(crate) fn packed_values(tokens: usize, cols: usize) -> usize {
    tokens * cols.next_multiple_of(2)
}

/// Transposes group `group` of `x` into `[column][token]`, columns padded to a pair. Groups follow each other.
///
/// # Safety
/// `x` has the rows of `groups` with at least `cols` values; `to` has room for [`packed_values`]; nobody else touches this
/// group's part of `to`.
pub(crate) unsafe fn pack_tokens(x: Rows, cols: usize, groups: Groups, group: usize, to: *mut f32) {
    let (first, last) = (groups.start(group), groups.start(group + 1));
    let size = last - first;
    let padded = cols.next_multiple_of(2);
    // SAFETY: the contract of this function; indices stay below `size * padded` from the group's start.
    unsafe {
        let to = to.add(first * padded);
        for t in 0..size {
            let from = x.row(first + t).cast_const();
            for k in 0..cols {
                *to.add(k * size + t) = *from.add(k);
            }
            if padded > cols {
                *to.add(cols * size + t) = 0.0;
            }
        }
    }
}

/// How a weight type becomes f32: two columns of 16 rows at a time.
trait Weight {
    const BYTES: usize;
    /// # Safety
    /// `p` is readable for one pair.
    unsafe fn pair<S: Simd>(p: *const u8) -> (S::V, S::V);
}

struct Bf16;
struct F16;
struct F32;

impl Weight for Bf16 {
    const BYTES: usize = 2 * PAIR;
    #[inline(always)]
    unsafe fn pair<S: Simd>(p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 32 values.
        unsafe { S::bf16_pairs(p.cast()) }
    }
}

impl Weight for F16 {
    const BYTES: usize = 2 * PAIR;
    #[inline(always)]
    unsafe fn pair<S: Simd>(p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 32 values.
        unsafe { (S::f16(p.cast()), S::f16(p.add(PAIR).cast())) }
    }
}

impl Weight for F32 {
    const BYTES: usize = 4 * PAIR;
    #[inline(always)]
    unsafe fn pair<S: Simd>(p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 32 values.
        unsafe { (S::load(p.cast()), S::load(p.add(2 * PAIR).cast())) }
    }
}

/// What happens to the accumulators after a slab.
#[derive(Clone, Copy)]
enum Finish<'a> {
    /// More columns follow: store to the scratch.
    Keep,
    /// Bias, residual, output.
    Write { out: Rows, first_token: usize, first_row: usize, bias: Option<&'a [f32]>, add: bool },
}

/// `P` panels times `M` tokens over one slab of columns.
struct Tile<'a, W, const P: usize, const M: usize> {
    /// Slab of the first panel; the others are `panel_bytes` further each.
    weight: *const u8,
    panel_bytes: usize,
    /// `[column][M]`
    x: *const f32,
    pairs: usize,
    /// What to ask for meanwhile, laid out like the slab.
    next: *const u8,
    /// Accumulators of slabs before this one, `[M][scratch_stride]`; null at the first.
    resume: *const f32,
    scratch: *mut f32,
    scratch_stride: usize,
    finish: Finish<'a>,
    /// Rows of the matrix: lanes past it are not stored.
    rows: usize,
    dtype: std::marker::PhantomData<W>,
}

impl<W: Weight, const P: usize, const M: usize> Task for Tile<'_, W, P, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut acc = [[S::splat(0.0); M]; P];
        // SAFETY: `Linear::panels` passes slabs inside the packed matrix, activations packed for `M` tokens, and scratch
        // and output rows that this worker alone owns.
        unsafe {
            if !self.resume.is_null() {
                for (p, panel) in acc.iter_mut().enumerate() {
                    for (t, a) in panel.iter_mut().enumerate() {
                        *a = S::load(self.resume.add(t * self.scratch_stride + p * LANES));
                    }
                }
            }
            let mut w = self.weight;
            let mut x = self.x;
            let mut next = self.next;
            for _ in 0..self.pairs {
                if M == 1 {
                    // Panel after panel: few registers are live at once, the chains of the panels hide the latency.
                    let (b, c) = (S::splat(*x), S::splat(*x.add(1)));
                    for (p, acc) in acc.iter_mut().enumerate() {
                        let (even, odd) = W::pair::<S>(w.wrapping_add(p * self.panel_bytes));
                        S::prefetch(next.wrapping_add(p * self.panel_bytes));
                        acc[0] = S::fma(odd, c, S::fma(even, b, acc[0]));
                    }
                } else {
                    let mut pair = [(S::splat(0.0), S::splat(0.0)); P];
                    for (p, v) in pair.iter_mut().enumerate() {
                        *v = W::pair::<S>(w.wrapping_add(p * self.panel_bytes));
                        S::prefetch(next.wrapping_add(p * self.panel_bytes));
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
            self.finish::<S>(acc);
        }
    }
}

impl<W, const P: usize, const M: usize> Tile<'_, W, P, M> {
    /// # Safety
    /// As in `run`.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, acc: [[S::V; M]; P]) {
        for (p, panel) in acc.into_iter().enumerate() {
            for (t, mut v) in panel.into_iter().enumerate() {
                // SAFETY: the contract of this function.
                unsafe {
                    match self.finish {
                        Finish::Keep => S::store(self.scratch.add(t * self.scratch_stride + p * LANES), v),
                        Finish::Write { out, first_token, first_row, bias, add } => {
                            let row = first_row + p * LANES;
                            let valid = (self.rows - row).min(LANES);
                            let to = out.row(first_token + t).add(row);
                            if let Some(bias) = bias {
                                v = S::add(v, S::load(bias.as_ptr().add(row)));
                            }
                            if add {
                                v = S::add(v, S::load_part(to, valid));
                            }
                            if valid == LANES {
                                S::store(to, v);
                            } else {
                                S::store_part(to, valid, v);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Part of a product: panels, columns and one token group.
struct Part {
    /// Slab of the first panel.
    weight: *const u8,
    /// Panel 0 of what is needed next.
    next: *const u8,
    panel: usize,
    panels: usize,
    first_pair: usize,
    pairs: usize,
    group: usize,
    last: bool,
    /// Token 0 and panel 0 of this scratch.
    scratch: *mut f32,
    scratch_stride: usize,
}

impl Linear<'_> {
    /// Computes panels as they are claimed. Every worker calls this with the same arguments but its own `scratch` of
    /// [`SCRATCH`] values.
    ///
    /// # Safety
    /// `x` holds [`packed_values`] of `tokens` tokens packed with this `isa`; `out` has `tokens` rows of at least
    /// `weight.rows` values; nobody else writes `out` or `x` until a barrier.
    pub(crate) unsafe fn run(&self, isa: Isa, claims: &Claims, scratch: *mut f32) {
        let groups = Groups::new(self.tokens, group_limit(isa));
        let panels = self.weight.panels();
        if groups.count == 1 {
            let size = (STREAM_BYTES / self.weight.panel_bytes().max(1)).clamp(4, 64).next_multiple_of(4);
            while let Some(range) = claims.next(panels, size) {
                let part = Part {
                    weight: self.weight.panel(range.start),
                    next: self.weight.panel(range.start).wrapping_add(AHEAD_BYTES),
                    panel: range.start,
                    panels: range.len(),
                    first_pair: 0,
                    pairs: self.weight.pairs(),
                    group: 0,
                    last: true,
                    scratch,
                    scratch_stride: 0,
                };
                // SAFETY: the contract of this function; the claim gives these output rows to this worker.
                unsafe { self.part(isa, groups, &part) };
            }
            return;
        }
        while let Some(range) = claims.next(panels, BLOCK_PANELS) {
            let mut first = 0;
            while first < groups.count {
                let start = groups.start(first);
                let last =
                    (first + 1..=groups.count).take_while(|&g| groups.start(g) - start <= TOKEN_BLOCK).last();
                let last = last.unwrap_or(first + 1);
                // SAFETY: as above.
                unsafe { self.block(isa, groups, first..last, range.clone(), scratch) };
                first = last;
            }
        }
    }

    /// A block of panels times a block of token groups, slab after slab of columns.
    ///
    /// # Safety
    /// The contract of [`Linear::run`].
    unsafe fn block(
        &self,
        isa: Isa,
        groups: Groups,
        token_groups: std::ops::Range<usize>,
        panels: std::ops::Range<usize>,
        scratch: *mut f32,
    ) {
        let pairs = self.weight.pairs();
        let stride = panels.len() * LANES;
        let wide = if isa == Isa::Avx512 { 2 } else { 1 };
        let start = groups.start(token_groups.start);
        for first_pair in (0..pairs).step_by(SLAB_PAIRS) {
            let slab = SLAB_PAIRS.min(pairs - first_pair);
            for panel in panels.clone().step_by(wide) {
                let count = wide.min(panels.end - panel);
                let pair_bytes = PAIR * self.weight.dtype.size();
                let from = self.weight.panel(panel).wrapping_add(first_pair * pair_bytes);
                let next = if panel + count < panels.end {
                    from.wrapping_add(count * self.weight.panel_bytes())
                } else {
                    self.weight.panel(panels.start).wrapping_add((first_pair + slab) * pair_bytes)
                };
                for group in token_groups.clone() {
                    let part = Part {
                        weight: from,
                        next: if group == token_groups.start { next } else { from },
                        panel,
                        panels: wide.min(panels.end - panel),
                        first_pair,
                        pairs: slab,
                        group,
                        last: first_pair + slab == pairs,
                        scratch: scratch.wrapping_add(
                            (groups.start(group) - start) * stride + (panel - panels.start) * LANES,
                        ),
                        scratch_stride: stride,
                    };
                    // SAFETY: the contract of `run`; the block has at most `TOKEN_BLOCK` tokens and `BLOCK_PANELS` panels,
                    // which is what the scratch holds.
                    unsafe { self.part(isa, groups, &part) };
                }
            }
        }
    }

    /// One slab of columns of one part, by the type of the weights.
    ///
    /// # Safety
    /// The contract of [`Linear::run`].
    unsafe fn part(&self, isa: Isa, groups: Groups, part: &Part) {
        // SAFETY: the contract of `run`.
        unsafe {
            match self.weight.dtype {
                DType::BF16 => self.typed::<Bf16>(isa, groups, part),
                DType::F16 => self.typed::<F16>(isa, groups, part),
                DType::F32 => self.typed::<F32>(isa, groups, part),
            }
        }
    }

    unsafe fn typed<W: Weight>(&self, isa: Isa, groups: Groups, part: &Part) {
        let size = groups.start(part.group + 1) - groups.start(part.group);
        let wide = isa == Isa::Avx512;
        // SAFETY: the contract of `run`; `M` is the size of the group.
        unsafe {
            match size {
                1 => self.panels::<W, 4, 1>(isa, groups, part),
                2 if wide => self.panels::<W, 4, 2>(isa, groups, part),
                2 => self.panels::<W, 2, 2>(isa, groups, part),
                3 if wide => self.panels::<W, 4, 3>(isa, groups, part),
                3 => self.panels::<W, 2, 3>(isa, groups, part),
                4 if wide => self.panels::<W, 2, 4>(isa, groups, part),
                4 => self.panels::<W, 1, 4>(isa, groups, part),
                5 if wide => self.panels::<W, 2, 5>(isa, groups, part),
                5 => self.panels::<W, 1, 5>(isa, groups, part),
                6 if wide => self.panels::<W, 2, 6>(isa, groups, part),
                6 => self.panels::<W, 1, 6>(isa, groups, part),
                7 => self.panels::<W, 2, 7>(isa, groups, part),
                8 => self.panels::<W, 2, 8>(isa, groups, part),
                9 => self.panels::<W, 2, 9>(isa, groups, part),
                10 => self.panels::<W, 2, 10>(isa, groups, part),
                11 => self.panels::<W, 2, 11>(isa, groups, part),
                12 => self.panels::<W, 2, 12>(isa, groups, part),
                _ => unreachable!("groups have 1 to {} tokens", group_limit(isa)),
            }
        }
    }

    /// Tiles of `P` panels, then single panels.
    unsafe fn panels<W: Weight, const P: usize, const M: usize>(
        &self,
        isa: Isa,
        groups: Groups,
        part: &Part,
    ) {
        let mut done = 0;
        while part.panels - done >= P {
            dispatch(isa, self.tile::<W, P, M>(groups, part, done));
            done += P;
        }
        while done < part.panels {
            dispatch(isa, self.tile::<W, 1, M>(groups, part, done));
            done += 1;
        }
    }

    /// The tile at panel `done` of the part.
    fn tile<W: Weight, const P: usize, const M: usize>(
        &self,
        groups: Groups,
        part: &Part,
        done: usize,
    ) -> Tile<'_, W, P, M> {
        let first_token = groups.start(part.group);
        let scratch = part.scratch.wrapping_add(done * LANES);
        let finish = if part.last {
            let first_row = (part.panel + done) * LANES;
            Finish::Write { out: self.out, first_token, first_row, bias: self.bias, add: self.add }
        } else {
            Finish::Keep
        };
        Tile {
            weight: part.weight.wrapping_add(done * self.weight.panel_bytes()),
            panel_bytes: self.weight.panel_bytes(),
            next: part.next.wrapping_add(done * self.weight.panel_bytes()),
            x: self.x.wrapping_add(first_token * self.weight.pairs() * 2 + part.first_pair * 2 * M),
            pairs: part.pairs,
            resume: if part.first_pair == 0 { std::ptr::null() } else { scratch },
            scratch,
            scratch_stride: part.scratch_stride,
            finish,
            rows: self.weight.rows,
            dtype: std::marker::PhantomData,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Floats;
    use crate::pool::Pool;
    use folio_model::backend::TensorView;
    use folio_model::quant::Encoding;
    use half::{bf16, f16};

    struct Case {
        dtype: DType,
        rows: usize,
        cols: usize,
        tokens: usize,
        add: bool,
    }

    fn value(i: usize) -> f32 {
        ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0
    }

    fn encode(dtype: DType, x: f32) -> (Vec<u8>, f32) {
        match dtype {
            DType::F32 => (x.to_le_bytes().to_vec(), x),
            DType::F16 => (f16::from_f32(x).to_le_bytes().to_vec(), f16::from_f32(x).to_f32()),
            DType::BF16 => (bf16::from_f32(x).to_le_bytes().to_vec(), bf16::from_f32(x).to_f32()),
        }
    }

    /// The chain itself, and the same sum in f64.
    fn oracle(case: &Case, weights: &[f32], bias: &[f32]) -> (Vec<f32>, Vec<f64>) {
        let mut exact = Vec::new();
        let mut chain = Vec::new();
        for t in 0..case.tokens {
            for r in 0..case.rows {
                let (mut acc, mut sum) = (0f32, 0f64);
                for k in 0..case.cols {
                    let (w, x) = (weights[r * case.cols + k], value(t * case.cols + k + 5));
                    acc = w.mul_add(x, acc);
                    sum += f64::from(w) * f64::from(x);
                }
                let old = if case.add { value(t * case.rows + r + 3) } else { 0.0 };
                let biased = acc + bias[r];
                chain.push(if case.add { biased + old } else { biased });
                exact.push(sum + f64::from(bias[r]) + f64::from(old));
            }
        }
        (chain, exact)
    }

    fn compute(case: &Case, isa: Isa, weight: &PackedMatrix, bias: &[f32], pool: &mut Pool) -> Vec<f32> {
        let x = Floats::zeroed(case.tokens, case.cols).expect("memory");
        let out = Floats::dense(case.tokens, case.rows).expect("memory");
        let packed = Floats::dense(1, packed_values(case.tokens, case.cols)).expect("memory");
        let scratch: Vec<Floats> =
            (0..pool.count()).map(|_| Floats::dense(1, SCRATCH).expect("memory")).collect();
        for t in 0..case.tokens {
            for k in 0..case.cols {
                // SAFETY: inside the row.
                unsafe { *x.view().row(t).add(k) = value(t * case.cols + k + 5) };
            }
            for r in 0..case.rows {
                // SAFETY: inside the row.
                unsafe { *out.view().row(t).add(r) = value(t * case.rows + r + 3) };
            }
        }
        let groups = Groups::new(case.tokens, group_limit(isa));
        for group in 0..groups.count {
            // SAFETY: sized just above; nobody else is here.
            unsafe { pack_tokens(x.view(), case.cols, groups, group, packed.view().row(0)) };
        }
        let (x, out_rows) = (packed.view(), out.view());
        let claims = Claims::default();
        pool.run(&|w| {
            let x = x.row(0).cast_const();
            let linear =
                Linear { weight, bias: Some(bias), x, tokens: case.tokens, out: out_rows, add: case.add };
            // SAFETY: packed with this `isa`; every worker has its own scratch.
            unsafe { linear.run(isa, &claims, scratch[w.index()].view().row(0)) };
        })
        .expect("no panic");
        out.as_slice(case.tokens * case.rows).to_vec()
    }

    fn check(case: &Case, pool: &mut Pool) {
        let (mut bytes, mut weights) = (Vec::new(), Vec::new());
        for i in 0..case.rows * case.cols {
            let (b, w) = encode(case.dtype, value(i));
            bytes.extend(b);
            weights.push(w);
        }
        let shape = [case.rows, case.cols];
        let view = TensorView { encoding: Encoding::Plain(case.dtype), shape: &shape, bytes: &bytes };
        let weight = PackedMatrix::pack(case.dtype, &[view], pool).expect("packed");
        let mut bias: Vec<f32> = (0..case.rows).map(|r| value(r + 77)).collect();
        bias.resize(case.rows.next_multiple_of(LANES), 0.0);
        let (chain, exact) = oracle(case, &weights, &bias);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let got = compute(case, isa, &weight, &bias, pool);
            for (i, (got, want)) in got.iter().zip(&chain).enumerate() {
                let (t, r) = (i / case.rows, i % case.rows);
                let Case { dtype, rows, cols, tokens, add } = case;
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{isa:?} {dtype:?} [{rows}, {cols}] x {tokens} add {add}: token {t} row {r}: {got} is not {want}"
                );
                assert!((f64::from(*got) - exact[i]).abs() <= 1e-6 * (*cols as f64 + 4.0));
            }
        }
    }

    #[test]
    fn every_shape_type_and_set_is_the_one_chain() {
        let mut pool = Pool::new(2).expect("pool");
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (rows, cols) in [(1, 1), (16, 2), (17, 7), (90, 33), (130, 64)] {
                for tokens in 1..=33 {
                    check(&Case { dtype, rows, cols, tokens, add: tokens % 2 == 0 }, &mut pool);
                }
            }
        }
    }

    #[test]
    fn chains_interrupted_by_slabs_and_token_blocks_are_exact() {
        let mut pool = Pool::new(2).expect("pool");
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            check(&Case { dtype, rows: 300, cols: 1101, tokens: 14, add: true }, &mut pool);
            check(&Case { dtype, rows: 35, cols: 515, tokens: 2 * TOKEN_BLOCK + 5, add: false }, &mut pool);
        }
    }
}
