//! A quantized matrix as it lies in its tensors, and its bytes in a block format.
//!
//! Invariant: the pieces of a [`Matrix`] have the elements and shapes that its packing asks for, so making it reads nothing
//! outside of them. What only the values can tell (codes that are not numbers, groups that do not fill blocks, zero points
//! of another scheme than stated) is found while making it and refused by the tensor's name.

use std::ops::Range;

use super::piece::Piece;
use super::unpack;
use crate::checkpoint::experts::Every;
use crate::checkpoint::shards::Shard;
use crate::error::Result;
use crate::quant::BlockFormat;

/// Rows unpacked at a time: whole words of every packing, and few enough to stay in a cache.
const ROWS: usize = 64;
/// A larger scale would not leave room for the value of a code.
const SCALE_LIMIT: f32 = (1u128 << 120) as f32;

#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// `[rows, columns]`
    pub shape: [usize; 2],
    pub format: BlockFormat,
    pub codes: Codes,
    pub scales: Scales,
    pub whole: Option<Whole>,
    pub zeros: Zeros,
    /// Columns that share a scale; all of them where a row has one.
    pub group: usize,
    /// The group of each column, where they need not be neighbours (act-order).
    pub groups: Option<Piece>,
    /// Which of the stored rows the matrix has.
    pub every: Every,
    /// Tensors that belong to the matrix and change nothing.
    pub unused: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Codes {
    pub piece: Piece,
    pub packing: Packing,
}

/// How codes are packed; see [`unpack`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    Awq,
    /// Words of this many bits a code, down the columns. Codes of 8 bits are 128 too large.
    Down(u32),
    /// Likewise of 2 or 3 bits; with `more` they are codes of 4 bits.
    DownFew {
        bits: u32,
        more: u8,
    },
    /// Rows of nibbles; bytes of a row.
    Nibbles(usize),
    /// Rows of bytes; bytes of a row.
    Bytes(usize),
    /// Likewise, 128 too large.
    Raised(usize),
    /// Bytes, the columns of one row after another: of each of so many matrices all stored rows.
    Turned {
        experts: usize,
    },
}

/// Scale of stored row `r` and group `g`: value `r / row_div * row_stride + g * group_stride`.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    pub piece: Piece,
    pub row_div: usize,
    pub row_stride: usize,
    pub group_stride: usize,
}

/// One number for all scales of a matrix (NVFP4).
#[derive(Clone, Debug, PartialEq)]
pub enum Whole {
    Multiplies(Piece),
    Divides(Piece),
}

impl Whole {
    fn piece(&self) -> &Piece {
        match self {
            Whole::Multiplies(piece) | Whole::Divides(piece) => piece,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Zeros {
    /// The format's own, or none.
    Implied,
    /// Words `[groups, rows / 8]` in AWQ's order of nibbles.
    Awq(Piece),
    /// Words `[groups, rows * bits / 32]`; `more` is added to each, modulo their range.
    Along { piece: Piece, bits: u32, more: u8 },
    /// Words `[rows / 8, groups]` of neighbouring rows.
    Down(Piece),
    /// Words `[groups, rows * bits / 32]`, which must all say the same, one of `allowed`.
    Middle { piece: Piece, bits: u32, allowed: &'static [u8] },
}

/// A matrix in a block format.
pub struct Made {
    pub bytes: Vec<u8>,
    /// As in [`crate::backend::TensorView::order`].
    pub order: Option<Vec<u32>>,
}

/// Scales as the blocks hold them.
enum Factors {
    Floats(Vec<f32>),
    /// Exponents of MXFP4.
    Exponents(Vec<u8>),
}

impl Matrix {
    /// All tensors the matrix is made of.
    pub fn pieces(&self) -> impl Iterator<Item = &Piece> {
        let zeros = match &self.zeros {
            Zeros::Implied => None,
            Zeros::Awq(piece) | Zeros::Down(piece) => Some(piece),
            Zeros::Along { piece, .. } | Zeros::Middle { piece, .. } => Some(piece),
        };
        [&self.codes.piece, &self.scales.piece]
            .into_iter()
            .chain(self.whole.as_ref().map(Whole::piece))
            .chain(zeros)
            .chain(&self.groups)
            .chain(&self.unused)
    }

    /// The bytes in [`Matrix::format`]. Errors name the tensor whose values cannot be held.
    pub fn make(&self, shards: &[Shard]) -> Result<Made> {
        let [rows, cols] = self.shape;
        let (order, group_of) = self.order(shards)?;
        let factors = self.factors(shards)?;
        let zeros = self.zeros(shards)?;
        let packed = self.codes.piece.bytes(shards)?;
        let values = self.format.values();
        // Several only where groups are smaller than blocks.
        let scales_of_block = (values / self.group).max(1);
        let mut bytes = Vec::with_capacity(rows * (cols / values) * self.format.bytes());
        let mut codes = vec![0; ROWS.min(rows) * cols];
        let mut gathered = vec![0; cols];
        for run in self.runs() {
            let codes = &mut codes[..run.len() * cols];
            self.unpack(packed, run.clone(), codes);
            for (row, codes) in run.zip(codes.chunks_exact(cols)) {
                let codes = match &order {
                    None => codes,
                    Some(order) => {
                        for (code, column) in gathered.iter_mut().zip(order) {
                            *code = codes[*column as usize];
                        }
                        &gathered
                    }
                };
                if self.codes_not_numbers(codes) {
                    return Err(self.codes.piece.problem(shards, format!("holds NaN in row {row}")));
                }
                for (codes, group) in codes.chunks_exact(values).zip(&group_of) {
                    let at =
                        row / self.scales.row_div * self.scales.row_stride + group * self.scales.group_stride;
                    match &factors {
                        Factors::Floats(scales) => {
                            let scales = &scales[at..at + scales_of_block];
                            bytes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
                        }
                        Factors::Exponents(exponents) => bytes.push(exponents[at]),
                    }
                    if let Some(zeros) = &zeros {
                        bytes.push(zeros[group * rows + row]);
                    }
                    match self.codes.packing {
                        Packing::Awq | Packing::Down(4) | Packing::DownFew { .. } | Packing::Nibbles(_) => {
                            unpack::pair_nibbles(codes, &mut bytes);
                        }
                        Packing::Bytes(_) | Packing::Turned { .. } => bytes.extend_from_slice(codes),
                        Packing::Down(_) | Packing::Raised(_) => {
                            bytes.extend(codes.iter().map(|code| code ^ 0x80))
                        }
                    }
                }
            }
        }
        Ok(Made { bytes, order })
    }

    /// Stored rows that the matrix has, as many together as are unpacked at a time.
    fn runs(&self) -> Vec<Range<usize>> {
        let (rows, Every { first, step, .. }) = (self.shape[0], self.every);
        let Packing::Turned { experts } = self.codes.packing else {
            // Rows between those that are wanted are not unpacked.
            let (together, stored) = (if step == 1 { ROWS } else { 1 }, rows * step);
            let starts = (first..stored).step_by(together.max(step));
            return starts.map(|start| start..stored.min(start + together)).collect();
        };
        // One kind of rows after another, expert by expert.
        let each = rows / experts;
        let of_expert = |expert: usize| {
            let start = (expert * step + first) * each;
            let starts = (start..start + each).step_by(ROWS);
            starts.map(move |at| at..(at + ROWS).min(start + each))
        };
        (0..experts).flat_map(of_expert).collect()
    }

    fn unpack(&self, packed: &[u8], rows: Range<usize>, codes: &mut [u8]) {
        let [total, cols] = self.shape;
        match self.codes.packing {
            Packing::Turned { experts } => {
                unpack::turned(packed, total / experts * self.every.step, cols, rows, codes);
            }
            Packing::Awq => unpack::awq(packed, total, cols, rows, codes),
            Packing::Down(bits) => unpack::down(packed, bits, total, cols, rows, codes),
            Packing::DownFew { bits, more } => {
                unpack::down_few(packed, bits, more, total, cols, rows, codes);
            }
            Packing::Nibbles(row_bytes) => unpack::nibbles(packed, row_bytes, cols, rows, codes),
            Packing::Bytes(row_bytes) | Packing::Raised(row_bytes) => {
                unpack::bytes(packed, row_bytes, cols, rows, codes);
            }
        }
    }

    fn codes_not_numbers(&self, codes: &[u8]) -> bool {
        let fp8 = matches!(self.format, BlockFormat::Fp8x32 | BlockFormat::Fp8x128);
        fp8 && codes.iter().any(|code| code & 0x7f == 0x7f)
    }

    /// The order of the columns, unless it is the model's, and the group of each block.
    fn order(&self, shards: &[Shard]) -> Result<(Option<Vec<u32>>, Vec<usize>)> {
        let (cols, values) = (self.shape[1], self.format.values());
        let plain = || (None, (0..cols / values).map(|block| block * values / self.group).collect());
        let Some(piece) = &self.groups else { return Ok(plain()) };
        let count = cols.div_ceil(self.group);
        let stored: Vec<i32> = piece.integers(shards)?.collect();
        // compressed-tensors writes -1 everywhere where it did not reorder.
        if stored.iter().all(|group| *group == -1) {
            return Ok(plain());
        }
        let mut groups = Vec::with_capacity(cols);
        for (column, group) in stored.into_iter().enumerate() {
            match usize::try_from(group) {
                Ok(group) if group < count => groups.push(group),
                _ => {
                    let problem = format!("gives column {column} the group {group}; there are {count}");
                    return Err(piece.problem(shards, problem));
                }
            }
        }
        if groups.iter().enumerate().all(|(column, group)| *group == column / self.group) {
            return Ok(plain());
        }
        let mut order: Vec<u32> = (0..cols as u32).collect();
        order.sort_by_key(|column| groups[*column as usize]);
        let group_at = |at: usize| groups[order[at] as usize];
        let mut group_of = Vec::with_capacity(cols / values);
        for first in (0..cols).step_by(values) {
            // Sorted, so the ends of a block are its extremes.
            if group_at(first) != group_at(first + values - 1) {
                let problem = format!(
                    "gives group {} a number of columns that is no multiple of {values}",
                    group_at(first)
                );
                return Err(piece.problem(shards, problem));
            }
            group_of.push(group_at(first));
        }
        Ok((Some(order), group_of))
    }

    fn factors(&self, shards: &[Shard]) -> Result<Factors> {
        let piece = &self.scales.piece;
        if self.format == BlockFormat::MXFP4 {
            let exponents = piece.bytes(shards)?.to_vec();
            return match exponents.contains(&255) {
                true => Err(piece.problem(shards, "holds a scale that is NaN (exponent 255)")),
                false => Ok(Factors::Exponents(exponents)),
            };
        }
        let mut scales = piece.floats(shards)?;
        if let Some(whole) = &self.whole {
            // There is one.
            for number in whole.piece().floats(shards)? {
                scales.iter_mut().for_each(|scale| match whole {
                    Whole::Multiplies(_) => *scale *= number,
                    Whole::Divides(_) => *scale /= number,
                });
            }
        }
        if let Some(scale) = scales.iter().find(|scale| scale.is_nan() || scale.abs() >= SCALE_LIMIT) {
            return Err(piece.problem(shards, format!("holds the scale {scale}, which no weight can have")));
        }
        match self.format {
            BlockFormat::Fp4x16 => self.halved(scales, shards),
            _ => Ok(Factors::Floats(scales)),
        }
    }

    /// Of codes that stand for twice their values.
    fn halved(&self, mut scales: Vec<f32>, shards: &[Shard]) -> Result<Factors> {
        for scale in &mut scales {
            let half = *scale * 0.5;
            if half * 2.0 != *scale {
                let problem = format!("makes the scale {scale:e}, which is too small to be halved exactly");
                return Err(self.scales.piece.problem(shards, problem));
            }
            *scale = half;
        }
        Ok(Factors::Floats(scales))
    }

    /// Zero points `[groups, rows]`, where the blocks have them.
    fn zeros(&self, shards: &[Shard]) -> Result<Option<Vec<u8>>> {
        let [rows, cols] = self.shape;
        let count = cols.div_ceil(self.group);
        let mut zeros = vec![0; rows * count];
        match &self.zeros {
            Zeros::Implied => return Ok(None),
            Zeros::Awq(piece) => {
                let mut columns = vec![0; rows * count];
                unpack::awq(piece.bytes(shards)?, rows, count, 0..rows, &mut columns);
                for (i, zero) in columns.into_iter().enumerate() {
                    zeros[i % count * rows + i / count] = zero;
                }
            }
            Zeros::Along { piece, bits, more } => {
                let bytes = piece.bytes(shards)?;
                let largest = 0xff_u8 >> (8 - *bits);
                for (at, zero) in zeros.iter_mut().enumerate() {
                    *zero = (unpack::code_at(bytes, *bits, at) + more) & largest;
                }
            }
            Zeros::Down(piece) => {
                let words: Vec<i32> = piece.integers(shards)?.collect();
                for (i, zero) in zeros.iter_mut().enumerate() {
                    let (group, row) = (i / rows, i % rows);
                    *zero = (words[row / 8 * count + group] >> (4 * (row % 8)) & 15) as u8;
                }
            }
            Zeros::Middle { piece, bits, allowed } => {
                let bytes = piece.bytes(shards)?;
                let uniform =
                    |zero: &u8| (0..rows * count).all(|at| unpack::code_at(bytes, *bits, at) == *zero);
                return match allowed.iter().any(uniform) {
                    true => Ok(None),
                    false => Err(piece.problem(
                        shards,
                        format!(
                            "holds zero points of an asymmetric quantization; with {bits} bits and as `sym` says they are \
                             all {}",
                            allowed.iter().map(u8::to_string).collect::<Vec<_>>().join(" or all ")
                        ),
                    )),
                };
            }
        }
        Ok(Some(zeros))
    }
}
