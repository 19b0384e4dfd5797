//! Weights in the order in which lanes load them.
//!
//! Owns: the packed form. Rows are cut in tiles of 16, columns in instructions of 16; what lane `4g + c` needs of both is contiguous:
//! of rows `g` and `g + 8` the columns `4c..4c + 4` of one instruction (16-bit weights), of two (bytes) or of four (nibbles), 16 bytes
//! in all, lane after lane, then the next columns, then the next tile. Rows and columns that do not exist are zero. Must never:
//! change a value.

use folio_model::backend::{DType, TensorView};
use folio_model::quant::{BlockFormat, Encoding};

use super::unpack::{Codes, Numbers, WeightLayout, unpack};

pub const TILE: usize = 16;
/// Bytes of one load of a warp.
const LOAD: usize = 512;

/// One segment's packed bytes, or those of some of its tiles.
#[derive(Default)]
pub struct Packed {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    pub minimums: Vec<f32>,
}

/// Columns as instructions see them: padded to two of 16.
pub fn ktiles(cols: usize) -> usize {
    cols.next_multiple_of(32) / 16
}

/// Instructions that one load covers.
pub fn covers(codes: Codes) -> usize {
    match codes {
        Codes::Eight | Codes::Fp8 => 2,
        Codes::Four { .. } | Codes::Mx4 | Codes::Iq4 => 4,
    }
}

/// `[column][row, padded to 32]` of f32.
pub fn f32_columns(rows: &[&[u8]], cols: usize, order: Option<&[u32]>) -> Vec<u8> {
    let padded = rows.len().next_multiple_of(32);
    let mut out = vec![0; 4 * cols * padded];
    for (r, row) in rows.iter().enumerate() {
        for (j, value) in row.as_chunks::<4>().0.iter().enumerate() {
            let column = order.map_or(j, |order| order[j] as usize);
            out[4 * (column * padded + r)..][..4].copy_from_slice(value);
        }
    }
    out
}

/// 16-bit weights, up to 16 rows to a tile.
pub fn sixteen(rows: &[&[u8]], cols: usize, order: Option<&[u32]>) -> Packed {
    let ktiles = ktiles(cols);
    let mut codes = vec![0; rows.len().div_ceil(TILE) * ktiles * LOAD];
    for (r, row) in rows.iter().enumerate() {
        for (j, value) in row.as_chunks::<2>().0.iter().enumerate() {
            let column = order.map_or(j, |order| order[j] as usize);
            let FragmentPlace { tile, ktile, lane, half, j } = FragmentPlace::of(r, column);
            let load = (tile * ktiles + ktile) * LOAD + 16 * lane;
            codes[load + 4 * (half + j / 2 * 2) + 2 * (j % 2)..][..2].copy_from_slice(value);
        }
    }
    Packed { codes, ..Packed::default() }
}

/// Rows of blocks; formats may differ, layouts not.
pub fn blocks(rows: &[(BlockFormat, &[u8])], cols: usize, layout: WeightLayout) -> Packed {
    let (tiles, groups, covers) = (rows.len().div_ceil(TILE), cols / layout.group, covers(layout.codes));
    let loads = ktiles(cols).div_ceil(covers);
    let mut packed = Packed {
        codes: vec![0; tiles * loads * LOAD],
        scales: vec![0.0; tiles * groups * TILE],
        minimums: vec![0.0; if layout.minimums { tiles * groups * TILE } else { 0 }],
    };
    let (mut codes, mut scales, mut minimums) = (vec![0; cols], vec![0.0; groups], vec![0.0; groups]);
    for (r, (format, bytes)) in rows.iter().enumerate() {
        let (values, per_block) = (format.values(), format.values() / layout.group);
        for (i, block) in bytes.chunks_exact(format.bytes()).enumerate() {
            let mut numbers = Numbers {
                codes: &mut codes[i * values..][..values],
                scales: &mut scales[i * per_block..][..per_block],
                minimums: &mut minimums[i * per_block..][..per_block],
            };
            unpack(*format, block, &mut numbers);
        }
        for group in 0..groups {
            let at = (r / TILE * groups + group) * TILE + r % TILE;
            packed.scales[at] = scales[group];
            if layout.minimums {
                packed.minimums[at] = minimums[group];
            }
        }
        for (column, code) in codes.iter().enumerate() {
            let FragmentPlace { tile, ktile, lane, half, j } = FragmentPlace::of(r, column);
            let load = (tile * loads + ktile / covers) * LOAD + 16 * lane;
            match covers {
                2 => packed.codes[load + 4 * (ktile % 2 * 2 + half) + j] = *code,
                _ => {
                    let bit = 16 * (j % 2) + 4 * (half + j / 2 * 2);
                    packed.codes[load + 4 * (ktile % 4) + bit / 8] |= code << (bit % 8);
                }
            }
        }
    }
    packed
}

/// Where weight (row, column) lies; as in `product.cuh`.
struct FragmentPlace {
    tile: usize,
    ktile: usize,
    lane: usize,
    /// Of the two rows of a lane.
    half: usize,
    /// Of the four columns of a lane.
    j: usize,
}

impl FragmentPlace {
    fn of(row: usize, column: usize) -> Self {
        Self {
            tile: row / TILE,
            ktile: column / 16,
            lane: row % 8 * 4 + column % 16 / 4,
            half: row % TILE / 8,
            j: column % 4,
        }
    }
}

/// The bytes of each row of a tensor.
pub fn rows_of<'a>(part: &TensorView<'a>) -> Vec<&'a [u8]> {
    let bytes = row_bytes(part);
    match bytes {
        0 => Vec::new(),
        bytes => part.bytes.chunks_exact(bytes).collect(),
    }
}

fn row_bytes(part: &TensorView<'_>) -> usize {
    match part.encoding {
        Encoding::Plain(DType::F32) => 4 * part.shape[1],
        Encoding::Plain(_) => 2 * part.shape[1],
        Encoding::Block(format) => part.shape[1] / format.values() * format.bytes(),
    }
}
