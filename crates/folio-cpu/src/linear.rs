//! Matrix products for any number of tokens: `W.x + bias`, perhaps added to the output, perhaps half of it gating the other.
//!
//! Owns: the split of rows over workers, slabs of columns, what happens to a tile's results. Must never: let the number of
//! tokens, the tile or the worker touch a bit of a result.
//!
//! Invariant (promise 1): an output value starts at zero and takes the columns in ascending order, in one lane: one fused
//! multiply-add per column with plain weights (`plain`), one per block of columns with quantized ones (`quant`). Then the
//! bias is added, what an adapter adds ([`Deltas`]), then what [`Then`] says. A chain that is interrupted (columns are walked in slabs so that both operands stay in
//! cache) is stored and taken up again as f32, which is exact.
//!
//! Gates and what they gate are rows far apart in the matrix. A worker takes the same rows of both, gates first, and leaves
//! them in the output until it has the rest: no buffer holds both, and nobody waits between them.
//!
//! Cost: every weight byte is read once per [`TOKEN_BLOCK`] tokens; where rows are cut inside a panel, its bytes once more.

use std::ops::Range;

use folio_model::program::Activation;

use crate::adapters::Deltas;
use crate::ahead::Ahead;
use crate::groups::Groups;
use crate::memory::Rows;
use crate::packed::{PANEL_MULTIPLE, PackedMatrix, Segment};
use crate::plain::{self, Kind};
use crate::pool::Claims;
use crate::quant::{tile, with_form};
use crate::rows::gated;
use crate::simd::dot::{COLUMNS, LIFTED_BYTES};
use crate::simd::unrolled;
use crate::simd::{Isa, LANES, Simd, Task, dispatch};

/// Tokens whose activations stay in the second-level cache while a slab of weights passes.
pub(crate) const TOKEN_BLOCK: usize = 96;
/// Columns per slab when there are several token groups, by whether weights are integers: those are smaller, and so are
/// their activations.
const SLAB_COLS: [usize; 2] = [512, 2048];
/// Rows of the largest tile of panels: claims are cut at multiples of this.
pub(crate) const TILE_ROWS: usize = PANEL_MULTIPLE * LANES;
/// Rows of one claim in a product of several token groups.
pub(crate) const BLOCK_ROWS: usize = 16 * LANES;

/// f32 values of accumulators between slabs: claimed rows may begin inside a tile and end inside a panel.
const ACCUMULATORS: usize = TOKEN_BLOCK * (BLOCK_ROWS + TILE_ROWS + LANES);
/// Panels of weights that every group of tokens passes before the next ones: those of integers.
const PANELS: usize = 4;
/// f32 values that a slab of lifted codes takes.
const LIFTED: usize = PANELS * SLAB_COLS[1] / COLUMNS * LIFTED_BYTES / size_of::<f32>();

/// f32 values of a worker's scratch.
pub(crate) const SCRATCH: usize = ACCUMULATORS + LIFTED;

/// What becomes of an accumulator with its bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Then {
    /// It is the output.
    Store,
    /// It is added to the output (the residual stream).
    Add,
    /// Rows are gates, then as many rows that they gate; or, where the activation has no gate, only what it is of.
    Gate(Activation),
}

/// One product, as every worker sees it.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'a> {
    pub(crate) isa: Isa,
    pub(crate) ahead: Ahead,
    pub(crate) weight: &'a PackedMatrix,
    /// At least `rows` values.
    pub(crate) bias: Option<&'a [f32]>,
    /// Activations from [`Groups::pack`].
    pub(crate) x: *const u8,
    pub(crate) groups: Groups<'a>,
    pub(crate) out: Rows,
    pub(crate) then: Then,
    /// What adapters add to it.
    pub(crate) deltas: Option<&'a Deltas<'a>>,
}

/// How workers share a product.
#[derive(Clone, Copy)]
pub(crate) struct Share<'a> {
    pub(crate) claims: &'a Claims,
    pub(crate) workers: usize,
    /// Rows that one worker computes together: a multiple of [`TILE_ROWS`], at most [`BLOCK_ROWS`].
    pub(crate) unit: usize,
}

/// The least multiple of [`TILE_ROWS`] that is whole heads, if workers can take that many rows at a time.
pub(crate) fn rows_of_heads(head_dim: usize) -> Option<usize> {
    (TILE_ROWS..=BLOCK_ROWS).step_by(TILE_ROWS).find(|rows| rows.is_multiple_of(head_dim))
}

/// Consecutive rows of a product and where they go.
#[derive(Clone, Copy)]
struct Target {
    /// Row of the matrix that column 0 of the output gets.
    first_row: usize,
    how: How,
}

#[derive(Clone, Copy)]
enum How {
    Store,
    Add,
    /// The output holds the gates.
    Gated(Activation),
    /// There are no gates.
    Activated(Activation),
}

/// What happens to the accumulators after a slab.
#[derive(Clone, Copy)]
enum Finish<'a> {
    /// More columns follow: store to the scratch.
    Keep,
    /// Bias, and to the output. `row` is the row of the matrix that is lane 0 of panel 0.
    Write {
        out: Rows,
        first_token: usize,
        row: usize,
        bias: Option<&'a [f32]>,
        deltas: Option<&'a Deltas<'a>>,
        target: Target,
    },
}

/// Where the accumulators of a part come from and go to.
#[derive(Clone, Copy)]
pub(crate) struct Output<'a> {
    isa: Isa,
    /// Accumulators of slabs before this one, `[token][scratch_stride]`; null at the first.
    resume: *const f32,
    scratch: *mut f32,
    scratch_stride: usize,
    finish: Finish<'a>,
    /// Rows of the part; lanes and panels past them are not stored.
    rows: usize,
    /// Lanes before its first row, likewise.
    before: usize,
    /// Tokens of the group; slots past them are not stored.
    tokens: usize,
}

impl Output<'_> {
    /// From a later panel on.
    #[inline(always)]
    pub(crate) fn skip(mut self, rows: usize) -> Self {
        self.rows -= rows;
        self.before = self.before.saturating_sub(rows);
        self.scratch = self.scratch.wrapping_add(rows);
        if !self.resume.is_null() {
            self.resume = self.resume.wrapping_add(rows);
        }
        if let Finish::Write { row, .. } = &mut self.finish {
            *row += rows;
        }
        self
    }

    /// Takes up the accumulators of panel `p`.
    ///
    /// # Safety
    /// The scratch is this worker's and was written by the slab before.
    #[inline(always)]
    pub(crate) unsafe fn resume<S: Simd, const M: usize>(&self, p: usize, acc: &mut [S::V; M]) {
        if self.resume.is_null() {
            return;
        }
        unrolled!(M, t, {
            if t < self.tokens {
                // SAFETY: the contract of this function.
                acc[t] = unsafe { S::load(self.resume.add(t * self.scratch_stride + p * LANES)) };
            }
        });
    }

    /// Puts the accumulators of panel `p` away.
    ///
    /// # Safety
    /// The scratch and these rows of the output are this worker's.
    #[inline(always)]
    pub(crate) unsafe fn finish<S: Simd, const M: usize>(&self, p: usize, acc: [S::V; M]) {
        if p * LANES >= self.rows || (p + 1) * LANES <= self.before {
            return;
        }
        let mut last = [[0f32; LANES]; M];
        let (to, stride) = match self.finish {
            Finish::Keep => (self.scratch.wrapping_add(p * LANES), self.scratch_stride),
            Finish::Write { .. } => (last.as_mut_ptr().cast(), LANES),
        };
        unrolled!(M, t, {
            if t < self.tokens {
                // SAFETY: the contract of this function.
                unsafe { S::store(to.add(t * stride), acc[t]) };
            }
        });
        if let Finish::Write { .. } = self.finish {
            dispatch(self.isa, Write { output: *self, panel: p, values: last.as_ptr().cast() });
        }
    }
}

/// Bias, residual and output of a panel; its own call, so that it is compiled once and not in every tile.
struct Write<'a> {
    output: Output<'a>,
    panel: usize,
    /// `[tokens][16]`
    values: *const f32,
}

impl Task for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Output { finish, rows, before, tokens, .. } = self.output;
        let Finish::Write { out, first_token, row, bias, deltas, target } = finish else { return };
        let first_lane = before.saturating_sub(self.panel * LANES);
        let row = row + self.panel * LANES + first_lane;
        let count = (rows - self.panel * LANES).min(LANES) - first_lane;
        for t in 0..tokens {
            // SAFETY: `Output::finish` passes the values, and promises the rows; a bias is as long as the matrix has rows.
            unsafe {
                let mut v = S::load_part(self.values.add(t * LANES + first_lane), count);
                let to = out.row(first_token + t).add(row - target.first_row);
                if let Some(bias) = bias {
                    v = S::add(v, S::load_part(bias.as_ptr().add(row), count));
                }
                if let Some(deltas) = deltas {
                    v = deltas.add::<S>(first_token + t, row, count, v);
                }
                match target.how {
                    How::Store => (),
                    How::Add => v = S::add(v, S::load_part(to, count)),
                    How::Gated(activation) => v = gated::<S>(activation, S::load_part(to, count), v),
                    How::Activated(activation) => v = gated::<S>(activation, v, v),
                }
                if count == LANES {
                    S::store(to, v);
                } else {
                    S::store_part(to, count, v);
                }
            }
        }
    }
}

/// Part of a product: panels of a segment, steps of columns (pairs or records), one token group.
struct Part<'a> {
    segment: &'a Segment,
    /// Rows of the segment that are wanted; the panels may reach past them on both sides.
    rows: Range<usize>,
    target: Target,
    panel: usize,
    panels: usize,
    first_step: usize,
    steps: usize,
    group: usize,
    /// Its codes as [`tile::Lift`] left them; null for nothing.
    lifted: *const u8,
    /// What is needed next, laid out like the first panel's steps.
    next: *const u8,
    /// Token 0 and panel 0 of this scratch.
    scratch: *mut f32,
    scratch_stride: usize,
}

impl Linear<'_> {
    /// Computes rows as they are claimed, and says which are `done`. Every worker calls this with the same arguments but its
    /// own `scratch` of [`SCRATCH`] values, which a product of one group leaves alone.
    ///
    /// # Safety
    /// `x` holds what [`Groups::pack`] wrote with this `isa`, or one row if [`Groups::packed_already`]; `out` has the tokens
    /// as rows of at least `weight.rows` values, or half of them where they are gated; nobody else writes `out` or `x` until
    /// a barrier.
    pub(crate) unsafe fn run(&self, share: Share<'_>, scratch: *mut f32, mut done: impl FnMut(Range<usize>)) {
        let inputs = match self.then {
            Then::Gate(activation) => activation.inputs(),
            Then::Store | Then::Add => 1,
        };
        let outputs = self.weight.rows / inputs;
        // What is streamed once is claimed in large pieces: those of half a MiB cost decoding 7 % in fast memory.
        let most = if self.groups.count == 1 { outputs } else { BLOCK_ROWS };
        let Share { claims, workers, unit } = share;
        while let Some(rows) = claims.next_shrinking(outputs, unit..most, workers) {
            // SAFETY: the contract of this function; the claim gives these outputs to this worker.
            unsafe { self.outputs(rows.clone(), 0, scratch) };
            done(rows);
        }
    }

    /// Computes some of the outputs, at most [`BLOCK_ROWS`] with several groups. Output `first` goes to column 0.
    ///
    /// # Safety
    /// The contract of [`Linear::run`], but that rows of `out` need hold no more than these outputs; nobody else writes them.
    pub(crate) unsafe fn outputs(&self, rows: Range<usize>, first: usize, scratch: *mut f32) {
        let target = |first_row, how| Target { first_row, how };
        // SAFETY: the contract of this function.
        unsafe {
            match self.then {
                Then::Store => self.rows(rows, target(first, How::Store), scratch),
                Then::Add => self.rows(rows, target(first, How::Add), scratch),
                Then::Gate(activation) if activation.inputs() == 1 => {
                    self.rows(rows, target(first, How::Activated(activation)), scratch);
                }
                Then::Gate(activation) => {
                    let half = self.weight.rows / 2;
                    self.rows(rows.clone(), target(first, How::Store), scratch);
                    let gated = rows.start + half..rows.end + half;
                    self.rows(gated, target(half + first, How::Gated(activation)), scratch);
                }
            }
        }
    }

    /// # Safety
    /// The contract of [`Linear::run`]; nobody else writes these outputs.
    unsafe fn rows(&self, rows: Range<usize>, target: Target, scratch: *mut f32) {
        for (segment, rows) in self.weight.pieces(rows) {
            // SAFETY: the contract of this function.
            unsafe {
                if self.groups.count == 1 {
                    self.stream(segment, rows, target, scratch);
                } else {
                    self.blocks(segment, rows, target, scratch);
                }
            }
        }
    }

    /// Rows times the one group, once through memory.
    ///
    /// # Safety
    /// The contract of [`Linear::run`].
    unsafe fn stream(&self, segment: &Segment, rows: Range<usize>, target: Target, scratch: *mut f32) {
        let panels = panels(&rows);
        let from = segment.panel(panels.start);
        let ahead = self.ahead;
        let next = match (self.groups.start(1), Kind::of(segment.encoding)) {
            (1, Kind::Integers(format)) if tile::reads_one_stream(format, ahead) => match ahead.one_stream {
                Some(bytes) => from.wrapping_add(bytes),
                None => std::ptr::null(),
            },
            (1, _) => from.wrapping_add(ahead.streams),
            _ => from.wrapping_add(ahead.several_tokens),
        };
        let part = Part {
            segment,
            rows,
            target,
            panel: panels.start,
            panels: panels.len(),
            first_step: 0,
            steps: segment.steps(),
            group: 0,
            lifted: std::ptr::null(),
            next,
            scratch,
            scratch_stride: 0,
        };
        // SAFETY: the contract of this function.
        unsafe { self.part(&part) };
    }

    /// Rows times all groups, as many tokens at a time as the scratch holds.
    ///
    /// # Safety
    /// The contract of [`Linear::run`].
    unsafe fn blocks(&self, segment: &Segment, rows: Range<usize>, target: Target, scratch: *mut f32) {
        let groups = self.groups;
        let mut first = 0;
        while first < groups.count {
            let start = groups.start(first);
            let last =
                (first + 1..=groups.count).take_while(|&g| groups.start(g) - start <= TOKEN_BLOCK).last();
            let last = last.unwrap_or(first + 1);
            // SAFETY: the contract of this function.
            unsafe { self.block(segment, first..last, rows.clone(), target, scratch) };
            first = last;
        }
    }

    /// A block of rows times a block of token groups, slab after slab of columns.
    ///
    /// # Safety
    /// The contract of [`Linear::run`].
    unsafe fn block(
        &self,
        segment: &Segment,
        token_groups: Range<usize>,
        rows: Range<usize>,
        target: Target,
        scratch: *mut f32,
    ) {
        let panels = panels(&rows);
        let steps = segment.steps();
        let stride = panels.len() * LANES;
        let integers = match Kind::of(segment.encoding) {
            Kind::Integers(format) => Some(format),
            Kind::Floats(_) => None,
        };
        let wide = match integers {
            Some(_) => PANELS,
            None if self.isa.is_wide() => 2,
            None => 1,
        };
        // What several groups of the largest tile read is lifted once.
        let full = self.groups.layout().is_some_and(|layout| layout.slots == tile::MOST_SLOTS);
        let lifts =
            integers.filter(|&f| full && token_groups.len() > 1 && tile::Needs::of(self.isa, f).lifts);
        let lifted: *mut u8 = scratch.wrapping_add(ACCUMULATORS).cast();
        let start = self.groups.start(token_groups.start);
        let slab = (SLAB_COLS[usize::from(integers.is_some())] / segment.step_cols()).max(1);
        for first_step in (0..steps).step_by(slab) {
            let slab = slab.min(steps - first_step);
            for panel in panels.clone().step_by(wide) {
                let count = wide.min(panels.end - panel);
                let from = segment.panel(panel).wrapping_add(first_step * segment.step_bytes());
                let next = if panel + count < panels.end {
                    from.wrapping_add(count * segment.panel_bytes())
                } else {
                    segment.panel(panels.start).wrapping_add((first_step + slab) * segment.step_bytes())
                };
                if let Some(format) = lifts {
                    let (isa, panel_bytes, records) = (self.isa, segment.panel_bytes(), slab);
                    with_form(
                        format,
                        &tile::Lift { isa, weight: from, panel_bytes, panels: count, records, to: lifted },
                    );
                }
                for group in token_groups.clone() {
                    let part = Part {
                        segment,
                        rows: rows.clone(),
                        target,
                        panel,
                        panels: count,
                        first_step,
                        steps: slab,
                        group,
                        lifted: if lifts.is_some() { lifted } else { std::ptr::null() },
                        next: if group == token_groups.start { next } else { from },
                        scratch: scratch.wrapping_add(
                            (self.groups.start(group) - start) * stride + (panel - panels.start) * LANES,
                        ),
                        scratch_stride: stride,
                    };
                    // SAFETY: the contract of `run`; the block has at most `TOKEN_BLOCK` tokens and the panels of
                    // `BLOCK_ROWS` rows, which is what the scratch holds.
                    unsafe { self.part(&part) };
                }
            }
        }
    }

    /// One slab of columns of one part, by the type of the weights.
    ///
    /// # Safety
    /// The contract of [`Linear::run`].
    unsafe fn part(&self, part: &Part<'_>) {
        let &Part { segment, panel, panels, first_step, steps, group, lifted, next, .. } = part;
        let isa = self.isa;
        let weight = segment.panel(panel).wrapping_add(first_step * segment.step_bytes());
        let panel_bytes = segment.panel_bytes();
        let output = self.output(part);
        let x = self.x.wrapping_add(self.groups.offset(group));
        match (Kind::of(segment.encoding), self.groups.layout()) {
            (Kind::Integers(format), Some(layout)) => {
                let x = x.wrapping_add(first_step * segment.step_cols() / COLUMNS * layout.block_bytes());
                let (records, streamed) = (steps, self.groups.count == 1);
                let part = tile::Part {
                    isa,
                    ahead: self.ahead,
                    weight,
                    lifted,
                    next,
                    panel_bytes,
                    panels,
                    streamed,
                    records,
                    x,
                    layout,
                    output,
                };
                with_form(format, &part);
            }
            (Kind::Floats(float), _) => {
                let tokens = output.tokens;
                let x = x.cast::<f32>().wrapping_add(segment.step_cols() * first_step * tokens);
                let weights = plain::Weights { float, slab: weight, next, panel_bytes, panels, steps };
                // SAFETY: the contract of this function.
                unsafe { plain::Part { isa, weights, x, tokens, output }.run() };
            }
            (Kind::Integers(_), None) => unreachable!("groups of a quantized matrix have a layout"),
        }
    }

    fn output(&self, part: &Part<'_>) -> Output<'_> {
        let first_token = self.groups.start(part.group);
        let first = part.panel * LANES;
        let finish = if part.first_step + part.steps == part.segment.steps() {
            let row = part.segment.first_row + first;
            let (bias, deltas) = (self.bias, self.deltas);
            Finish::Write { out: self.out, first_token, row, bias, deltas, target: part.target }
        } else {
            Finish::Keep
        };
        Output {
            isa: self.isa,
            resume: if part.first_step == 0 { std::ptr::null() } else { part.scratch },
            scratch: part.scratch,
            scratch_stride: part.scratch_stride,
            finish,
            rows: (part.rows.end - first).min(part.panels * LANES),
            before: part.rows.start.saturating_sub(first),
            tokens: self.groups.start(part.group + 1) - first_token,
        }
    }
}

/// Panels that hold rows of a segment, and those before them in the same tile: there is memory for whole tiles only.
fn panels(rows: &Range<usize>) -> Range<usize> {
    rows.start / TILE_ROWS * PANEL_MULTIPLE..rows.end.div_ceil(LANES)
}

#[cfg(test)]
mod tests;
