//! The attention kernel: one chunk of positions for the rows of one tile.
//!
//! Owns: the arithmetic of a row. Must never: let a neighbour in the tile, or anything stored at a position the row does not
//! attend to, touch a bit.
//!
//! For each chunk, in steps of [`STEP`] keys: scores (one chain over the dimensions per key, times the scale), maximum,
//! rescale of sum and accumulator (always, also by one), exponentials, sum over the fixed tree, values (one chain over the
//! positions per dimension). A masked key is replaced by minus infinity *by position* before anything is derived from it,
//! and its value is never multiplied: the chain of a row ends at its own position. A step with no key for a row is skipped
//! for that row. So stale bytes, even NaN, are read at most into lanes that are thrown away.
//!
//! Prefill and decode run this same code; a tile only decides how many rows share one pass over K and V.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use folio_model::backend::KvFormat;

use crate::attention::Shape;
use crate::kv::{GROUP, KvCache};
use crate::memory::Rows;
use crate::simd::{Isa, LANES, Simd, Task, dispatch, exp, exp_one};

/// Positions per partial result, counted from position 0.
pub(crate) const CHUNK: usize = 256;
/// Keys per softmax step.
pub(crate) const STEP: usize = 32;
/// Rows that pass over a step of keys together.
const ROWS: usize = 6;

/// Consecutive query tokens of one sequence and one KV head. Row `r` is token `r / group`, query head
/// `kv_head * group + r % group`.
#[derive(Clone, Debug)]
pub(crate) struct Tile {
    pub(crate) first_row: usize,
    pub(crate) tokens: usize,
    pub(crate) first_position: usize,
    pub(crate) blocks_start: usize,
    pub(crate) blocks_len: usize,
    pub(crate) kv_head: usize,
}

/// Triples (maximum, sum, accumulator) of the rows of a tile. Accumulator rows are [`Shape::stride`] apart.
#[derive(Clone, Copy)]
pub(crate) struct Partial {
    pub(crate) max: *mut f32,
    pub(crate) sum: *mut f32,
    pub(crate) acc: *mut f32,
}

/// One attention operation, as every worker sees it.
///
/// Contract: `qkv` and `out` have a row for every row of the plan's tiles; `blocks` hold the tables that tiles name, with
/// every block in range and every position of a tile covered; K and V of those positions are written and nobody writes
/// them, or `qkv`, now.
#[derive(Clone, Copy)]
pub(crate) struct Attend<'a> {
    pub(crate) isa: Isa,
    pub(crate) shape: Shape,
    pub(crate) scale: f32,
    pub(crate) cache: &'a KvCache,
    /// The cache group: which of a sequence's block tables is meant.
    pub(crate) group: usize,
    pub(crate) layer: u32,
    pub(crate) blocks: &'a [u32],
    /// Queries first.
    pub(crate) qkv: Rows,
    pub(crate) out: Rows,
    pub(crate) partials: *mut f32,
}

// SAFETY: pointers to buffers that workers share by the contract above.
unsafe impl Sync for Attend<'_> {}

impl Attend<'_> {
    /// Rows of a tile in passes of up to [`ROWS`]: first row and number.
    fn passes(rows: usize) -> impl Iterator<Item = (usize, usize)> {
        let count = rows.div_ceil(ROWS);
        (0..count).map(move |i| {
            let first = rows * i / count;
            (first, rows * (i + 1) / count - first)
        })
    }

    /// Transposes the queries of each pass into `[dim][row]`.
    ///
    /// # Safety
    /// `to` has room for the rows of the tile; the contract of [`Attend`].
    pub(crate) unsafe fn pack_queries(&self, tile: &Tile, to: *mut f32) {
        let (group, dim) = (self.shape.group(), self.shape.head_dim);
        for (first, count) in Self::passes(tile.tokens * group) {
            for r in 0..count {
                let (token, head) = ((first + r) / group, tile.kv_head * group + (first + r) % group);
                // SAFETY: the contract of this function.
                unsafe {
                    let from = self.qkv.row(tile.first_row + token).add(head * dim);
                    for d in 0..dim {
                        *to.add(first * dim + d * count + r) = *from.add(d);
                    }
                }
            }
        }
    }

    /// Computes the triples of chunk `chunk` for the rows that attend to it. Others are left alone.
    ///
    /// # Safety
    /// The contract of [`Attend`]; `queries` from [`Self::pack_queries`]; `result` has room for the tile and is this
    /// worker's.
    pub(crate) unsafe fn chunk(&self, tile: &Tile, queries: *const f32, chunk: usize, result: Partial) {
        match self.cache.format(self.layer) {
            KvFormat::F32 => dispatch(self.isa, Chunk::<KvF32>::new(self, tile, queries, chunk, result)),
            KvFormat::F16 => dispatch(self.isa, Chunk::<KvF16>::new(self, tile, queries, chunk, result)),
            KvFormat::BF16 => dispatch(self.isa, Chunk::<KvBf16>::new(self, tile, queries, chunk, result)),
        }
    }

    /// Rows of the tile that attend to `position` or later: a suffix.
    fn first_row_at(&self, tile: &Tile, position: usize) -> usize {
        position.saturating_sub(tile.first_position).min(tile.tokens) * self.shape.group()
    }

    /// Merges the result of `chunk` (not the first) into the triples of the chunks before it.
    ///
    /// # Safety
    /// Both partials hold the tile; `whole` is this worker's.
    pub(crate) unsafe fn merge(&self, tile: &Tile, chunk: usize, whole: Partial, part: Partial) {
        let rows = self.first_row_at(tile, chunk * CHUNK)..tile.tokens * self.shape.group();
        let stride = self.shape.stride();
        dispatch(self.isa, Merge { rows, stride, whole, part });
    }

    /// Divides by the sums and writes the output rows.
    ///
    /// # Safety
    /// The contract of [`Attend`]; nobody else writes these heads of these rows.
    pub(crate) unsafe fn write(&self, tile: &Tile, whole: Partial) {
        let (group, dim) = (self.shape.group(), self.shape.head_dim);
        for r in 0..tile.tokens * group {
            let (token, head) = (r / group, tile.kv_head * group + r % group);
            // SAFETY: the contract of this function.
            unsafe {
                let sum = *whole.sum.add(r);
                let from = whole.acc.add(r * self.shape.stride());
                let to = self.out.row(tile.first_row + token).add(head * dim);
                for d in 0..dim {
                    *to.add(d) = *from.add(d) / sum;
                }
            }
        }
    }
}

struct Merge {
    rows: std::ops::Range<usize>,
    stride: usize,
    whole: Partial,
    part: Partial,
}

impl Task for Merge {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for r in self.rows.clone() {
            // SAFETY: the contract of `Attend::merge`.
            unsafe {
                let (m, n) = (*self.whole.max.add(r), *self.part.max.add(r));
                let max = if m > n { m } else { n };
                let (a, b) = (exp_one::<S>(m - max), exp_one::<S>(n - max));
                *self.whole.max.add(r) = max;
                *self.whole.sum.add(r) = (*self.whole.sum.add(r)).mul_add(a, *self.part.sum.add(r) * b);
                let (a, b) = (S::splat(a), S::splat(b));
                for d in (0..self.stride).step_by(LANES) {
                    let to = self.whole.acc.add(r * self.stride + d);
                    let from = self.part.acc.add(r * self.stride + d);
                    S::store(to, S::fma(S::load(to), a, S::mul(S::load(from), b)));
                }
            }
        }
    }
}

/// How a KV type becomes f32.
trait Kv {
    const SIZE: usize;
    /// Two dims of 16 tokens, from two groups of 8.
    /// # Safety
    /// Both are readable for 16 values.
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V);
    /// 16 dims of one token.
    /// # Safety
    /// `p` is readable for 16 values.
    unsafe fn values<S: Simd>(p: *const u8) -> S::V;
}

struct KvBf16;
struct KvF16;
struct KvF32;

impl Kv for KvBf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 16 values behind each.
        unsafe { S::bf16_pairs_halves(a.cast(), b.cast()) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: the caller promises 16 values.
        unsafe { S::bf16(p.cast()) }
    }
}

impl Kv for KvF16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 16 values behind each.
        unsafe { (S::f16_halves(a.cast(), b.cast()), S::f16_halves(a.add(16).cast(), b.add(16).cast())) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: the caller promises 16 values.
        unsafe { S::f16(p.cast()) }
    }
}

impl Kv for KvF32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 16 values behind each.
        unsafe { (S::load_halves(a.cast(), b.cast()), S::load_halves(a.add(32).cast(), b.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: the caller promises 16 values.
        unsafe { S::load(p.cast()) }
    }
}

/// Steps between asking for keys and values and using them.
const AHEAD: usize = 2;
/// Bytes of 16-bit keys of one pair of dims over a step.
const PAIR_BYTES: usize = 4 * STEP;
/// Groups of keys in a step.
const GROUPS: usize = STEP / GROUP;

/// Where the keys and values of one step lie.
struct Step {
    /// Absolute position of the first key.
    base: usize,
    keys: [*const u8; GROUPS],
    values: [*const u8; GROUPS],
    /// Of the step [`AHEAD`] of it, for prefetching; any address.
    next_keys: [*const u8; GROUPS],
    next_values: [*const u8; GROUPS],
}

struct Chunk<'a, K> {
    attend: &'a Attend<'a>,
    tile: &'a Tile,
    queries: *const f32,
    chunk: usize,
    result: Partial,
    dtype: std::marker::PhantomData<K>,
}

impl<'a, K: Kv> Chunk<'a, K> {
    fn new(
        attend: &'a Attend<'a>,
        tile: &'a Tile,
        queries: *const f32,
        chunk: usize,
        result: Partial,
    ) -> Self {
        Self { attend, tile, queries, chunk, result, dtype: std::marker::PhantomData }
    }

    /// Keys and values of the group at `position`. Past the end of the table, positions that every row masks, the last
    /// block is read instead.
    #[inline(always)]
    fn group(&self, position: usize) -> (*const u8, *const u8) {
        let (cache, tile) = (self.attend.cache, self.tile);
        let tokens = cache.block_tokens;
        let start = tile.blocks_start + self.attend.group * tile.blocks_len;
        let table = &self.attend.blocks[start..start + tile.blocks_len];
        let block = table[(position / tokens).min(table.len() - 1)];
        let page = cache.page(block, self.attend.layer, tile.kv_head).cast_const();
        let keys = page.wrapping_add(position % tokens * cache.group.head_dim * K::SIZE);
        (keys, keys.wrapping_add(cache.plane_bytes(self.attend.layer)))
    }

    #[inline(always)]
    fn step(&self, base: usize) -> Step {
        let nothing = [std::ptr::null(); GROUPS];
        let mut step =
            Step { base, keys: nothing, values: nothing, next_keys: nothing, next_values: nothing };
        for j in 0..GROUPS {
            (step.keys[j], step.values[j]) = self.group(base + j * GROUP);
            (step.next_keys[j], step.next_values[j]) = self.group(base + AHEAD * STEP + j * GROUP);
        }
        step
    }

    /// Keys of the step that row `row` attends to.
    #[inline(always)]
    fn valid(&self, row: usize, base: usize) -> usize {
        let position = self.tile.first_position + row / self.attend.shape.group();
        (position + 1).saturating_sub(base).min(STEP)
    }

    /// `R` rows from `first` over one step.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&self, step: &Step, first: usize) {
        let valid: [usize; R] = std::array::from_fn(|r| self.valid(first + r, step.base));
        if valid[R - 1] == 0 {
            return;
        }
        let mut p = [[0f32; STEP]; R];
        let mut factor = [1f32; R];
        // SAFETY: the contract of this function; `p` is one step wide.
        unsafe {
            self.scores::<S, R>(step, first, &mut p);
            for r in 0..R {
                if valid[r] > 0 {
                    factor[r] = self.softmax::<S>(&mut p[r], valid[r], first + r);
                }
            }
            let dim = self.attend.shape.head_dim;
            let mut d = 0;
            if S::WIDE {
                while R <= 4 && d + 4 * LANES <= dim {
                    self.weigh::<S, R, 4>(step, first, &p, &factor, &valid, d);
                    d += 4 * LANES;
                }
                while d + 2 * LANES <= dim {
                    self.weigh::<S, R, 2>(step, first, &p, &factor, &valid, d);
                    d += 2 * LANES;
                }
            }
            while d < dim {
                self.weigh::<S, R, 1>(step, first, &p, &factor, &valid, d);
                d += LANES;
            }
        }
    }

    /// Dot products of the step's keys, one chain over the dimensions each. Asks for keys [`AHEAD`] meanwhile.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn scores<S: Simd, const R: usize>(&self, step: &Step, first: usize, p: &mut [[f32; STEP]; R]) {
        if S::WIDE {
            // SAFETY: the contract of this function.
            unsafe { self.score_vectors::<S, R, 2>(step, first, p, 0) }
        } else {
            // SAFETY: the contract of this function.
            unsafe {
                self.score_vectors::<S, R, 1>(step, first, p, 0);
                self.score_vectors::<S, R, 1>(step, first, p, 1);
            }
        }
    }

    /// `N` vectors of keys from vector `j` of the step.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn score_vectors<S: Simd, const R: usize, const N: usize>(
        &self,
        step: &Step,
        first: usize,
        p: &mut [[f32; STEP]; R],
        j: usize,
    ) {
        let dim = self.attend.shape.head_dim;
        let mut acc = [[S::splat(0.0); N]; R];
        // SAFETY: each group holds `head_dim` dims of 8 tokens; queries are packed `[dim][R]` from `first * dim`.
        unsafe {
            let mut q = self.queries.add(first * dim);
            let mut at = 0;
            let (mut group, mut offset) = (0, 0);
            for _ in 0..dim / 2 {
                let mut pair = [(S::splat(0.0), S::splat(0.0)); N];
                for (n, v) in pair.iter_mut().enumerate() {
                    let g = 2 * (j + n);
                    *v = K::keys::<S>(step.keys[g].wrapping_add(at), step.keys[g + 1].wrapping_add(at));
                }
                if first == 0 && j == 0 {
                    // In the order of addresses, so that the machine's own prefetchers follow.
                    let ahead = step.next_keys[group].wrapping_add(offset);
                    for line in (0..PAIR_BYTES * K::SIZE / 2).step_by(64) {
                        S::prefetch(ahead.wrapping_add(line));
                    }
                    offset += PAIR_BYTES * K::SIZE / 2;
                    if offset >= GROUP * dim * K::SIZE {
                        (group, offset) = ((group + 1) % GROUPS, 0);
                    }
                }
                for r in 0..R {
                    let q = S::splat(*q.add(r));
                    for n in 0..N {
                        acc[r][n] = S::fma(pair[n].0, q, acc[r][n]);
                    }
                }
                for r in 0..R {
                    let q = S::splat(*q.add(R + r));
                    for n in 0..N {
                        acc[r][n] = S::fma(pair[n].1, q, acc[r][n]);
                    }
                }
                q = q.wrapping_add(2 * R);
                at += 2 * GROUP * K::SIZE;
            }
            for r in 0..R {
                for n in 0..N {
                    S::store(p[r].as_mut_ptr().add((j + n) * LANES), acc[r][n]);
                }
            }
        }
    }

    /// Scores of one row to weights; updates maximum and sum and gives the factor for the accumulator.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&self, p: &mut [f32; STEP], valid: usize, row: usize) -> f32 {
        let masked = S::splat(f32::NEG_INFINITY);
        let scale = S::splat(self.attend.scale);
        // SAFETY: `p` holds two vectors; the row is inside the partial.
        unsafe {
            let at = p.as_mut_ptr();
            let low = S::select_first(valid, S::mul(S::load(at), scale), masked);
            let high = S::mul(S::load(at.add(LANES)), scale);
            let high = S::select_first(valid.saturating_sub(LANES), high, masked);
            let (max, sum) = (self.result.max.add(row), self.result.sum.add(row));
            let old = *max;
            let step_max = S::max_lane(S::max(low, high));
            let new = if old > step_max { old } else { step_max };
            let factor = exp_one::<S>(old - new);
            let (low, high) = (exp::<S>(S::sub(low, S::splat(new))), exp::<S>(S::sub(high, S::splat(new))));
            S::store(at, low);
            S::store(at.add(LANES), high);
            *max = new;
            *sum = (*sum).mul_add(factor, S::sum(S::add(low, high)));
            factor
        }
    }

    /// Adds `D` vectors of dims from `d`: one chain over the row's own positions each.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn weigh<S: Simd, const R: usize, const D: usize>(
        &self,
        step: &Step,
        first: usize,
        p: &[[f32; STEP]; R],
        factor: &[f32; R],
        valid: &[usize; R],
        d: usize,
    ) {
        let dim = self.attend.shape.head_dim;
        let stride = self.attend.shape.stride();
        let mut acc = [[S::splat(0.0); D]; R];
        // SAFETY: the rows are inside the partial, whose rows are whole vectors. A vector of values that reaches past the
        // last dim reads the next token, page, or the slack behind the cache, into lanes that nobody uses.
        unsafe {
            let at = self.result.acc.add(first * stride + d);
            for r in 0..R {
                for i in 0..D {
                    acc[r][i] = S::mul(S::load(at.add(r * stride + i * LANES)), S::splat(factor[r]));
                }
            }
            // All rows attend to the keys that the first one does.
            for t in 0..valid[0] {
                let offset = (t % GROUP * dim + d) * K::SIZE;
                let from = step.values[t / GROUP].add(offset);
                if first == 0 {
                    for line in (0..D * LANES * K::SIZE).step_by(64) {
                        S::prefetch(step.next_values[t / GROUP].wrapping_add(offset + line));
                    }
                }
                for i in 0..D {
                    let v = K::values::<S>(from.add(i * LANES * K::SIZE));
                    for r in 0..R {
                        acc[r][i] = S::fma(v, S::splat(p[r][t]), acc[r][i]);
                    }
                }
            }
            for r in 0..R {
                for t in valid[0]..valid[r] {
                    let from = step.values[t / GROUP].add((t % GROUP * dim + d) * K::SIZE);
                    for i in 0..D {
                        let v = K::values::<S>(from.add(i * LANES * K::SIZE));
                        acc[r][i] = S::fma(v, S::splat(p[r][t]), acc[r][i]);
                    }
                }
                for i in 0..D {
                    S::store(at.add(r * stride + i * LANES), acc[r][i]);
                }
            }
        }
    }
}

impl<K: Kv> Task for Chunk<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let rows = self.tile.tokens * self.attend.shape.group();
        let stride = self.attend.shape.stride();
        let start = self.chunk * CHUNK;
        let end = (start + CHUNK).min(self.tile.first_position + self.tile.tokens);
        // SAFETY: the contract of `Attend::chunk`.
        unsafe {
            for r in self.attend.first_row_at(self.tile, start)..rows {
                *self.result.max.add(r) = f32::NEG_INFINITY;
                *self.result.sum.add(r) = 0.0;
                for d in (0..stride).step_by(LANES) {
                    S::store(self.result.acc.add(r * stride + d), S::splat(0.0));
                }
            }
            for base in (start..end).step_by(STEP) {
                let step = self.step(base);
                for (first, count) in Attend::passes(rows) {
                    match count {
                        1 => self.rows::<S, 1>(&step, first),
                        2 => self.rows::<S, 2>(&step, first),
                        3 => self.rows::<S, 3>(&step, first),
                        4 => self.rows::<S, 4>(&step, first),
                        5 => self.rows::<S, 5>(&step, first),
                        _ => self.rows::<S, ROWS>(&step, first),
                    }
                }
            }
        }
    }
}
