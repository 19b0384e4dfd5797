//! Weight matrices in the order the kernels read them.
//!
//! Owns: [`PackedMatrix`], packing, row lookup. Must never: change a value (packing is a permutation plus zero padding).
//!
//! # Layout
//!
//! Rows are cut into panels of 16, columns into pairs; rows and columns are padded with zeros to whole ones. A panel is
//! `[pair][32 values]`, panels follow each other:
//!
//! - bf16: 16 dwords `{row r: even column, odd column}`. A shift gives the even columns of 16 rows, a mask the odd ones.
//! - f16, f32: 16 values of the even column, then 16 of the odd one.
//!
//! So in every type 32 consecutive values are the next two columns of 16 rows, lanes are output rows, and no sum across
//! lanes is ever needed. Cost: one streaming pass at load; a lookup of one row touches one cache line per pair.

use folio_model::backend::{DType, TensorView};
use half::{bf16, f16};

use crate::error::CpuError;
use crate::memory::HugeBuffer;
use crate::pool::{Claims, Pool};
use crate::simd::LANES;

/// A matrix `[rows, cols]` in panels.
#[derive(Debug)]
pub(crate) struct PackedMatrix {
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    memory: HugeBuffer,
}

/// Values of one pair of columns of a panel.
pub(crate) const PAIR: usize = 2 * LANES;

/// Panels packed per claim.
const PANELS_PER_CLAIM: usize = 8;

impl PackedMatrix {
    /// Packs `parts`, stacked along rows. The caller checked that they have this dtype and one number of columns, and that
    /// `bytes` is as long as the shape says.
    pub(crate) fn pack(dtype: DType, parts: &[TensorView<'_>], pool: &mut Pool) -> Result<Self, CpuError> {
        let rows = parts.iter().map(|p| p.shape[0]).sum();
        let cols = parts[0].shape[1];
        let mut matrix = Self { dtype, rows, cols, memory: HugeBuffer::zeroed(0)? };
        matrix.memory = HugeBuffer::zeroed(matrix.panels() * matrix.panel_bytes())?;
        let claims = Claims::default();
        let target = &matrix;
        pool.run(&|_| {
            while let Some(panels) = claims.next(target.panels(), PANELS_PER_CLAIM) {
                for panel in panels {
                    target.pack_panel(parts, panel);
                }
            }
        })?;
        Ok(matrix)
    }

    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub(crate) fn pairs(&self) -> usize {
        self.cols.div_ceil(2)
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        self.pairs() * PAIR * self.dtype.size()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Start of a panel; the panels after it follow.
    pub(crate) fn panel(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.panels());
        self.memory.ptr().wrapping_add(panel * self.panel_bytes())
    }

    /// Position of a value inside its panel.
    fn offset(&self, lane: usize, col: usize) -> usize {
        let (pair, odd) = (col / 2, col % 2);
        match self.dtype {
            DType::BF16 => pair * PAIR + lane * 2 + odd,
            DType::F16 | DType::F32 => pair * PAIR + odd * LANES + lane,
        }
    }

    fn pack_panel(&self, parts: &[TensorView<'_>], panel: usize) {
        match self.dtype.size() {
            2 => self.pack_values::<2>(parts, panel),
            _ => self.pack_values::<4>(parts, panel),
        }
    }

    /// Values of `N` bytes. Writes a panel in the order of its memory.
    fn pack_values<const N: usize>(&self, parts: &[TensorView<'_>], panel: usize) {
        let to = self.panel(panel).cast_mut().cast::<[u8; N]>();
        let last = self.rows.min((panel + 1) * LANES);
        let mut sources: [&[[u8; N]]; LANES] = [&[]; LANES];
        for (source, row) in sources.iter_mut().zip(panel * LANES..last) {
            *source = source_row(parts, row, self.cols * N).as_chunks().0;
        }
        for col in 0..self.cols {
            for (lane, source) in sources.iter().enumerate().take(last - panel * LANES) {
                // SAFETY: `offset` is below `pairs * 32` for a column of the matrix, so the write stays inside this panel,
                // which one worker owns by its claim.
                unsafe { to.add(self.offset(lane, col)).write(source[col]) }
            }
        }
    }

    /// Writes row `row` to `out` as f32.
    pub(crate) fn lookup(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        let panel = self.panel(row / LANES);
        let lane = row % LANES;
        for (col, x) in out.iter_mut().enumerate() {
            let at = self.offset(lane, col);
            // SAFETY: the row and the column are inside the matrix, so the value is inside the panel; panels are aligned.
            *x = unsafe {
                match self.dtype {
                    DType::BF16 => bf16::from_bits(*panel.cast::<u16>().add(at)).to_f32(),
                    DType::F16 => f16::from_bits(*panel.cast::<u16>().add(at)).to_f32(),
                    DType::F32 => *panel.cast::<f32>().add(at),
                }
            };
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

#[cfg(test)]
mod tests {
    use folio_model::quant::Encoding;

    use super::*;

    #[test]
    fn every_row_is_found_again_in_every_dtype_and_shape() {
        let mut pool = Pool::new(2).expect("pool");
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
                    TensorView { encoding: Encoding::Plain(dtype), shape: &shapes[0], bytes: a },
                    TensorView { encoding: Encoding::Plain(dtype), shape: &shapes[1], bytes: b },
                ];
                let parts = if second == 0 { &parts[..1] } else { &parts[..] };
                let packed = PackedMatrix::pack(dtype, parts, &mut pool).expect("packed");
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
