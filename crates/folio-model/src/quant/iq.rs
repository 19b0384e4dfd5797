//! ggml's i-quants of 256 values: each eight of them are a point of a grid, or two of four, with their signs. And its ternary formats, whose
//! values are digits.
//!
//! Owns: what a block of each says, in one shape: `x = d * unit * scale * value`, an exact product but for f16s beyond any
//! model's. Codes name a value of the format's sixteen: three bits of a coordinate, and its sign above them. Of IQ1 the sign is that
//! of the eighth by which values are off the grid.

mod grids;

use super::BlockFormat;

/// One block.
pub struct IqBlock {
    /// f16 bits.
    pub d: u16,
    /// Of every 16 values, odd. Formats with one per 32 have it twice; 1 in those that have none.
    pub scales: [i8; 16],
    /// Indices of [`IqValues::values`].
    pub codes: [u8; 256],
}

/// What the codes of a format stand for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IqValues {
    pub values: [i8; 16],
    /// What one of them is in units of `d * scale`.
    pub unit: f32,
}

const fn both_signs(sizes: [i8; 8]) -> [i8; 16] {
    let mut values = [0; 16];
    let mut i = 0;
    while i < 8 {
        (values[i], values[i + 8]) = (sizes[i], -sizes[i]);
        i += 1;
    }
    values
}

/// Of IQ2_XXS, IQ2_XS and IQ2_S.
pub const IQ2_VALUES: IqValues = IqValues { values: both_signs([8, 25, 43, 0, 0, 0, 0, 0]), unit: 0.125 };
/// Halves of ggml's 4, 12, 20, ...
pub const IQ3_XXS_VALUES: IqValues =
    IqValues { values: both_signs([2, 6, 10, 14, 18, 22, 26, 31]), unit: 0.5 };
pub const IQ3_S_VALUES: IqValues = IqValues { values: both_signs([1, 3, 5, 7, 9, 11, 13, 15]), unit: 1.0 };
/// Of IQ1_S and IQ1_M: eighths of -1, 0 and 1, and an eighth more or less.
pub const IQ1_VALUES: IqValues =
    IqValues { values: [-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0], unit: 0.125 };

/// Of TQ1_0 and TQ2_0. A fourth code has only the latter, and nobody writes it.
pub const TERNARY_VALUES: IqValues =
    IqValues { values: [-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], unit: 1.0 };

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// Seven signs; the eighth makes an even number of them.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// `N` coordinates of `BITS` bits.
fn point<const N: usize, const BITS: usize>(packed: u16) -> [u8; N] {
    std::array::from_fn(|i| (packed >> (BITS * i)) as u8 & ((1 << BITS) - 1))
}

fn two_points(grid: &[u16], first: usize, second: usize) -> [u8; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (point::<4, 3>(grid[first]), point::<4, 3>(grid[second]));
    [a, b, c, d, e, f, g, h]
}

/// Digit `i` of TQ1_0. A byte is a fraction of 256, and its first digit what is whole of three times it.
fn base_3(block: &[u8], i: usize) -> u8 {
    // 32 bytes of five digits, 16 of five, 4 of four; digits of a place lie side by side.
    let (bytes, width, i) = match i {
        0..160 => (&block[..32], 32, i),
        160..240 => (&block[32..48], 16, i - 160),
        _ => (&block[48..52], 4, i - 240),
    };
    let rest = bytes[i % width].wrapping_mul([1, 3, 9, 27, 81][i / width]);
    ((u16::from(rest) * 3) >> 8) as u8
}

impl BlockFormat {
    /// What the codes of an i-quant of 256 values or of a ternary format stand for; `None` for all other formats.
    pub const fn iq_values(self) -> Option<IqValues> {
        match self {
            BlockFormat::IQ2_XXS | BlockFormat::IQ2_XS | BlockFormat::IQ2_S => Some(IQ2_VALUES),
            BlockFormat::IQ3_XXS => Some(IQ3_XXS_VALUES),
            BlockFormat::IQ3_S => Some(IQ3_S_VALUES),
            BlockFormat::IQ1_S | BlockFormat::IQ1_M => Some(IQ1_VALUES),
            BlockFormat::TQ1_0 | BlockFormat::TQ2_0 => Some(TERNARY_VALUES),
            _ => None,
        }
    }
}

impl IqBlock {
    /// Reads a block of a format that has [`BlockFormat::iq_values`]. Panics for others, and where it is not whole.
    pub fn read(format: BlockFormat, block: &[u8]) -> Self {
        let b = &block[..format.bytes()];
        match format {
            BlockFormat::TQ1_0 => return Self::ternary(u16_at(b, 52), |i| base_3(b, i)),
            BlockFormat::TQ2_0 => {
                return Self::ternary(u16_at(b, 64), |i| {
                    b[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3
                });
            }
            _ => {}
        }
        let nibble = |at: usize, i: usize| b[at + i / 2] >> (4 * (i % 2)) & 15;
        let scale = |run: usize| match format {
            BlockFormat::IQ2_XXS => (u32_at(b, 6 + 8 * (run / 2)) >> 28) as u8,
            BlockFormat::IQ2_XS => nibble(66, run),
            BlockFormat::IQ2_S => nibble(74, run),
            BlockFormat::IQ3_XXS => (u32_at(b, 66 + 4 * (run / 2)) >> 28) as u8,
            BlockFormat::IQ3_S => nibble(106, run / 2),
            BlockFormat::IQ1_S => (u16_at(b, 34 + 2 * (run / 2)) >> 12 & 7) as u8,
            BlockFormat::IQ1_M => (u16_at(b, 48 + 2 * (run / 4)) >> (3 * (run % 4)) & 7) as u8,
            _ => panic!("{format:?} has no grid"),
        };
        // The coordinates of eight values and their signs.
        let eight = |i: usize| -> ([u8; 8], u8) {
            let (group, at) = (i / 4, i % 4);
            match format {
                BlockFormat::IQ2_XXS => {
                    let signs = even_signs(u32_at(b, 6 + 8 * group) >> (7 * at));
                    (point::<8, 2>(grids::IQ2_XXS[usize::from(b[2 + 8 * group + at])]), signs)
                }
                BlockFormat::IQ2_XS => {
                    let q = u16_at(b, 2 + 2 * i);
                    (point::<8, 2>(grids::IQ2_XS[usize::from(q & 511)]), even_signs(u32::from(q >> 9)))
                }
                BlockFormat::IQ2_S => {
                    let high = usize::from(b[66 + group] >> (2 * at) & 3);
                    (point::<8, 2>(grids::IQ2_S[usize::from(b[2 + i]) | high << 8]), b[34 + i])
                }
                BlockFormat::IQ3_XXS => {
                    let [first, second] = [b[2 + 2 * i], b[3 + 2 * i]].map(usize::from);
                    let signs = even_signs(u32_at(b, 66 + 4 * group) >> (7 * at));
                    (two_points(&grids::IQ3_XXS, first, second), signs)
                }
                BlockFormat::IQ3_S => {
                    let index =
                        |k: usize| usize::from(b[2 + k]) | usize::from(b[66 + k / 8] >> (k % 8) & 1) << 8;
                    (two_points(&grids::IQ3_S, index(2 * i), index(2 * i + 1)), b[74 + i])
                }
                BlockFormat::IQ1_S => {
                    let high = u16_at(b, 34 + 2 * group);
                    let index = usize::from(b[2 + i]) | usize::from(high >> (3 * at) & 7) << 8;
                    (point::<8, 2>(grids::IQ1[index]), if high >> 15 == 1 { 255 } else { 0 })
                }
                _ => {
                    let high = nibble(32, i);
                    let index = usize::from(b[i]) | usize::from(high & 7) << 8;
                    (point::<8, 2>(grids::IQ1[index]), if high >> 3 == 1 { 255 } else { 0 })
                }
            }
        };
        let d = match format {
            // Four bits in each of the words of scales.
            BlockFormat::IQ1_M => (0..4).fold(0, |d, word| d | u16_at(b, 48 + 2 * word) >> 12 << (4 * word)),
            _ => u16_at(b, 0),
        };
        let scales = std::array::from_fn(|run| 2 * scale(run) as i8 + 1);
        let mut codes = [0; 256];
        for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
            let (point, signs) = eight(i);
            for (j, code) in codes.iter_mut().enumerate() {
                *code = point[j] | (signs >> j & 1) << 3;
            }
        }
        Self { d, scales, codes }
    }

    fn ternary(d: u16, code: impl Fn(usize) -> u8) -> Self {
        Self { d, scales: [1; 16], codes: std::array::from_fn(code) }
    }
}
