//! Weight matrices in the order the kernels read them.
//!
//! Owns: [`PackedMatrix`], packing, row lookup. Must never: change a value (packing is a permutation plus zero padding).
//! A matrix is a list of segments, because GGUF files stack rows of different block formats; plain matrices have one.
//!
//! # Layout of plain weights (of quantized ones: see `quant`, of FP8: see `fp8`)
//!
//! Rows are cut into panels of 16, columns into pairs; rows and columns are padded with zeros to whole ones. A panel is
//! `[pair][32 values]`, panels follow each other:
//!
//! - bf16: 16 dwords `{row r: even column, odd column}`. A shift gives the even columns of 16 rows, a mask the odd ones.
//! - f16, f32: 16 values of the even column, then 16 of the odd one.
//!
//! So in every type 32 consecutive values are the next two columns of 16 rows, lanes are output rows, and no sum across
//! lanes is ever needed. Cost: one streaming pass at load; a lookup of one row touches one cache line per pair.

use std::ops::Range;
use std::sync::Arc;

use folio_model::backend::{DType, TensorView};
use folio_model::quant::{BlockFormat, Encoding};
use half::{bf16, f16};

use crate::error::CpuError;
use crate::fp8;
use crate::memory::HugeBuffer;
use crate::plain::{Float, Kind};
use crate::pool::{Claims, ThreadPool};
use crate::quant::pack::{PackRecord, ReadRow, Size};
use crate::quant::quantize::{Quantize, QuantizeBlock};
use crate::quant::with_form;
use crate::simd::dot::{self, COLUMNS};
use crate::simd::{Isa, LANES};

/// A matrix `[rows, cols]`. A clone shares the memory.
#[derive(Clone, Debug)]
pub(crate) struct PackedMatrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// One after the other, each of one encoding.
    pub(crate) segments: Vec<Segment>,
    /// Packed column `j` is the model's column `order[j]`; `None` where that is `j`. Activations are packed in this order
    /// (see `groups`).
    pub(crate) order: Option<Box<[u32]>>,
}

/// Consecutive rows of a matrix in panels.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) encoding: Encoding,
    pub(crate) rows: usize,
    /// Row of the matrix that is row 0 here.
    pub(crate) first_row: usize,
    cols: usize,
    pub(crate) memory: Arc<HugeBuffer>,
}

/// Plain weights are quantized while they are packed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantizeWith {
    pub(crate) to: Quantize,
    pub(crate) isa: Isa,
}

/// Values of one pair of columns of a panel.
pub(crate) const PAIR: usize = 2 * LANES;

/// Columns of a step at most.
const STEP_COLS_MAX: usize = 256;

/// Panels packed per claim.
const PANELS_PER_CLAIM: usize = 8;
/// There is memory for whole multiples of this many panels: tiles of several panels may read past the last.
pub(crate) const PANEL_MULTIPLE: usize = 4;

impl PackedMatrix {
    /// Packs `parts`, stacked along rows. The caller checked that they have one number of columns, and that `bytes` is as
    /// long as the shape says. With `quantize`, the parts are plain and their columns whole blocks.
    pub(crate) fn pack(
        parts: &[TensorView<'_>],
        quantize: Option<QuantizeWith>,
        pool: &mut ThreadPool,
    ) -> Result<Self, CpuError> {
        let order = parts[0].order.map(Box::from);
        let mut matrix = Self { rows: 0, cols: parts[0].shape[1], segments: Vec::new(), order };
        for parts in parts.chunk_by(|a, b| a.encoding == b.encoding) {
            let segment = Segment::pack(parts, quantize, matrix.rows, pool)?;
            matrix.rows += segment.rows;
            matrix.segments.push(segment);
        }
        Ok(matrix)
    }

    /// The rows of a range, segment by segment, counted from the segment's own first row.
    pub(crate) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (&Segment, Range<usize>)> {
        self.segments.iter().filter_map(move |segment| {
            let first = segment.first_row;
            let (from, to) = (range.start.max(first), range.end.min(first + segment.rows));
            (from < to).then(|| (segment, from - first..to - first))
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.memory.len()).sum()
    }

    /// Writes row `row` to `out` as f32, in the model's order.
    pub(crate) fn lookup(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        let holds = |segment: &&Segment| row < segment.first_row + segment.rows;
        let Some(segment) = self.segments.iter().find(holds) else { return };
        let row = row - segment.first_row;
        let steps = segment.step_cols();
        let Some(order) = &self.order else {
            for (step, out) in out.chunks_mut(steps).enumerate() {
                segment.lookup(row, step, out);
            }
            return;
        };
        let mut values = [0f32; STEP_COLS_MAX];
        for (step, columns) in order.chunks(steps).enumerate() {
            let values = &mut values[..columns.len()];
            segment.lookup(row, step, values);
            for (column, value) in columns.iter().zip(values) {
                out[*column as usize] = *value;
            }
        }
    }
}

impl Segment {
    fn pack(
        parts: &[TensorView<'_>],
        quantize: Option<QuantizeWith>,
        first_row: usize,
        pool: &mut ThreadPool,
    ) -> Result<Self, CpuError> {
        let rows = parts.iter().map(|p| p.shape[0]).sum();
        let cols = parts[0].shape[1];
        let encoding = quantize.map_or(parts[0].encoding, |with| Encoding::Block(with.to.format()));
        let bytes = Self::memory_bytes(encoding, rows, cols).unwrap_or(usize::MAX);
        let segment = Self::new(encoding, rows, first_row, cols, HugeBuffer::zeroed(bytes)?);
        let claims = Claims::default();
        let target = &segment;
        pool.run(&|_| {
            while let Some(panels) = claims.next(target.panels(), PANELS_PER_CLAIM) {
                for panel in panels {
                    target.pack_panel(parts, quantize, panel);
                }
            }
        })?;
        Ok(segment)
    }

    /// Rows from `first_row` on whose panels are in `memory`, of [`Segment::memory_bytes`].
    pub(crate) fn new(
        encoding: Encoding,
        rows: usize,
        first_row: usize,
        cols: usize,
        memory: HugeBuffer,
    ) -> Self {
        Self { encoding, rows, first_row, cols, memory: Arc::new(memory) }
    }

    /// Bytes of the panels; `None` where columns are not whole blocks, or the bytes cannot be counted.
    pub(crate) fn memory_bytes(encoding: Encoding, rows: usize, cols: usize) -> Option<usize> {
        encoding.bytes(cols)?;
        let (step_bytes, step_cols) = step(encoding);
        let panels = rows.div_ceil(LANES).next_multiple_of(PANEL_MULTIPLE);
        cols.div_ceil(step_cols).checked_mul(step_bytes)?.checked_mul(panels)
    }

    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Steps of a panel: pairs of columns, or records.
    pub(crate) fn steps(&self) -> usize {
        self.cols.div_ceil(self.step_cols())
    }

    pub(crate) fn step_cols(&self) -> usize {
        step(self.encoding).1
    }

    pub(crate) fn step_bytes(&self) -> usize {
        step(self.encoding).0
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        self.steps() * self.step_bytes()
    }

    /// Start of a panel; the panels after it follow.
    pub(crate) fn panel(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.panels());
        self.memory.ptr().wrapping_add(panel * self.panel_bytes())
    }

    fn pack_panel(&self, parts: &[TensorView<'_>], quantize: Option<QuantizeWith>, panel: usize) {
        let last = self.rows.min((panel + 1) * LANES);
        let stored = parts[0].encoding;
        let row_bytes = stored.bytes(self.cols).unwrap_or(0);
        let mut sources: [&[u8]; LANES] = [&[]; LANES];
        for (source, row) in sources.iter_mut().zip(panel * LANES..last) {
            *source = source_row(parts, row, row_bytes);
        }
        match (stored, quantize) {
            (Encoding::Plain(dtype), Some(with)) => self.pack_quantized(dtype, with, panel, sources),
            (Encoding::Plain(dtype), None) if dtype.size() == 2 => {
                self.pack_values::<2>(dtype, panel, sources)
            }
            (Encoding::Plain(dtype), None) => self.pack_values::<4>(dtype, panel, sources),
            (Encoding::Block(format), _) => self.pack_records(format, panel, sources),
        }
    }

    /// Quantizes plain rows block by block.
    fn pack_quantized(&self, dtype: DType, with: QuantizeWith, panel: usize, sources: [&[u8]; LANES]) {
        let format = with.to.format();
        let mut blocks = [[0u8; 64]; LANES];
        for step in 0..self.steps() {
            for (block, source) in blocks.iter_mut().zip(&sources).filter(|(_, source)| !source.is_empty()) {
                let bytes = COLUMNS * dtype.size();
                let values = block_to_f32(dtype, &source[step * bytes..][..bytes]);
                let block = &mut block[..format.bytes()];
                dot::dispatch(with.isa, QuantizeBlock { to: with.to, values: &values, block });
            }
            let mut rows: [&[u8]; LANES] = [&[]; LANES];
            for (row, (block, source)) in rows.iter_mut().zip(blocks.iter().zip(&sources)) {
                if !source.is_empty() {
                    *row = &block[..format.bytes()];
                }
            }
            let record = self.record_mut(panel, step);
            with_form(format, PackRecord { format, rows, record });
        }
    }

    /// The record, for the one worker whose claim holds the panel.
    #[allow(clippy::mut_from_ref, reason = "packing hands out disjoint records of memory behind a pointer")]
    fn record_mut(&self, panel: usize, step: usize) -> &mut [u8] {
        // SAFETY: the record is inside the panel; packing gives a panel to one worker, who holds one record at a time.
        unsafe { std::slice::from_raw_parts_mut(self.record(panel, step).cast_mut(), self.step_bytes()) }
    }

    /// Values of `N` bytes. Writes a panel in the order of its memory.
    fn pack_values<const N: usize>(&self, dtype: DType, panel: usize, sources: [&[u8]; LANES]) {
        let to = self.panel(panel).cast_mut().cast::<[u8; N]>();
        let sources = sources.map(|source| source.as_chunks::<N>().0);
        for col in 0..self.cols {
            for (lane, source) in sources.iter().enumerate().filter(|(_, source)| !source.is_empty()) {
                // SAFETY: `offset` is below `pairs * 32` for a column of the matrix, so the write stays inside this panel,
                // which one worker owns by its claim.
                unsafe { to.add(offset(dtype, lane, col)).write(source[col]) }
            }
        }
    }

    fn pack_records(&self, format: BlockFormat, panel: usize, sources: [&[u8]; LANES]) {
        for step in 0..self.steps() {
            let record = self.record_mut(panel, step);
            let block = step * format.bytes()..(step + 1) * format.bytes();
            let rows = sources.map(|source| source.get(block.clone()).unwrap_or(&[]));
            match Kind::of(self.encoding) {
                Kind::Floats(_) => fp8::pack(rows, record),
                Kind::Integers(format) => with_form(format, PackRecord { format, rows, record }),
            }
        }
    }

    fn record(&self, panel: usize, step: usize) -> *const u8 {
        self.panel(panel).wrapping_add(step * self.step_bytes())
    }

    /// The values of a row in one step, of which the last may have fewer columns.
    fn lookup(&self, row: usize, step: usize, out: &mut [f32]) {
        let (panel, lane) = (row / LANES, row % LANES);
        let at = self.record(panel, step);
        match Kind::of(self.encoding) {
            Kind::Floats(Float::Plain(dtype)) => {
                for (col, x) in out.iter_mut().enumerate() {
                    // SAFETY: the row and the column are inside the matrix, so the value is inside the step.
                    *x = unsafe { plain_value(dtype, at, offset(dtype, lane, col)) };
                }
            }
            kind => {
                // SAFETY: the record is inside the panel, and nobody writes after packing.
                let record = unsafe { std::slice::from_raw_parts(at, self.step_bytes()) };
                match kind {
                    Kind::Floats(_) => fp8::read(record, lane, out),
                    Kind::Integers(format) => with_form(format, ReadRow { record, row: lane, out }),
                }
            }
        }
    }
}

/// Bytes that a weight of this encoding takes when it is packed, scales included.
pub fn packed_bytes_per_value(encoding: Encoding) -> f64 {
    let (bytes, columns) = step(encoding);
    bytes as f64 / (LANES * columns) as f64
}

/// Bytes and columns of a step of a panel.
fn step(encoding: Encoding) -> (usize, usize) {
    match Kind::of(encoding) {
        Kind::Floats(float) => float.step(),
        Kind::Integers(format) => with_form(format, Size),
    }
}

/// Position of a value inside its panel.
fn offset(dtype: DType, lane: usize, col: usize) -> usize {
    let (pair, odd) = (col / 2, col % 2);
    match dtype {
        DType::BF16 => pair * PAIR + lane * 2 + odd,
        DType::F16 | DType::F32 => pair * PAIR + odd * LANES + lane,
    }
}

/// # Safety
/// Value `at` is inside the panel, which is aligned.
unsafe fn plain_value(dtype: DType, panel: *const u8, at: usize) -> f32 {
    // SAFETY: the contract of this function.
    unsafe {
        match dtype {
            DType::BF16 => bf16::from_bits(*panel.cast::<u16>().add(at)).to_f32(),
            DType::F16 => f16::from_bits(*panel.cast::<u16>().add(at)).to_f32(),
            DType::F32 => *panel.cast::<f32>().add(at),
        }
    }
}

/// Bytes of row `row` of the stacked parts.
fn source_row<'a>(parts: &[TensorView<'a>], mut row: usize, row_bytes: usize) -> &'a [u8] {
    for part in parts {
        if row < part.shape[0] {
            return &part.bytes[row * row_bytes..(row + 1) * row_bytes];
        }
        row -= part.shape[0];
    }
    unreachable!("a panel holds rows of the matrix only")
}

/// Converts 32 checkpoint values to f32.
fn block_to_f32(dtype: DType, bytes: &[u8]) -> [f32; 32] {
    std::array::from_fn(|i| folio_model::check::to_f32(dtype, &bytes[i * dtype.size()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_again_in_every_dtype_and_shape() {
        let mut pool = ThreadPool::new(2).expect("pool");
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (first, second, cols) in [(1, 0, 1), (16, 0, 2), (5, 30, 7), (33, 16, 64)] {
                let value = |i: usize| (i % 200) as f32 * 0.5 - 50.0;
                let bytes: Vec<u8> = (0..(first + second) * cols)
                    .flat_map(|i| match dtype {
                        DType::F32 => value(i).to_le_bytes().to_vec(),
                        DType::F16 => f16::from_f32(value(i)).to_le_bytes().to_vec(),
                        DType::BF16 => bf16::from_f32(value(i)).to_le_bytes().to_vec(),
                    })
                    .collect();
                let (a, b) = bytes.split_at(first * cols * dtype.size());
                let shapes = [[first, cols], [second, cols]];
                let parts = [
                    TensorView { encoding: Encoding::Plain(dtype), shape: &shapes[0], bytes: a, order: None },
                    TensorView { encoding: Encoding::Plain(dtype), shape: &shapes[1], bytes: b, order: None },
                ];
                let parts = if second == 0 { &parts[..1] } else { &parts[..] };
                let packed = PackedMatrix::pack(parts, None, &mut pool).expect("packed");
                let mut row = vec![0.0; cols];
                for r in 0..first + second {
                    packed.lookup(r, &mut row);
                    let expected: Vec<f32> = (0..cols).map(|c| value(r * cols + c)).collect();
                    assert_eq!(row, expected, "{dtype:?} row {r}");
                }
            }
        }
    }
}
