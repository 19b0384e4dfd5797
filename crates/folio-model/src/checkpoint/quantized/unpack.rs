//! Codes out of their packed words, some rows at a time.
//!
//! Every function fills `out`, `[rows, cols]` with one code a byte, for a range of the matrix's rows. They only move bits:
//! what a code means is said by the block format it goes into. Sources are named where they are read in this folder.
//! Panics where `packed` is shorter than its shape; the callers have checked it.

use std::ops::Range;

/// Where AWQ puts column `j` of eight in a word: the words hold columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up.
pub const AWQ_NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

fn word(packed: &[u8], at: usize) -> u32 {
    let bytes = packed[4 * at..].first_chunk().expect("four bytes of a word");
    u32::from_le_bytes(*bytes)
}

/// AWQ's `qweight`: words `[cols, total / 8]`, each eight neighbouring rows of one column. `total` and the range are whole
/// eights of rows.
pub fn awq(packed: &[u8], total: usize, cols: usize, rows: Range<usize>, out: &mut [u8]) {
    let words = total / 8;
    for col in 0..cols {
        for number in rows.start / 8..rows.end / 8 {
            let word = word(packed, col * words + number);
            let first = 8 * number - rows.start;
            for (i, nibble) in AWQ_NIBBLE.iter().enumerate() {
                out[(first + i) * cols + col] = (word >> (4 * nibble) & 15) as u8;
            }
        }
    }
}

/// GPTQ's `qweight`: words `[cols * bits / 32, total]` of 4 or 8 bits a code, each neighbouring columns of one row, the lowest
/// bits first.
pub fn down(packed: &[u8], bits: u32, total: usize, cols: usize, rows: Range<usize>, out: &mut [u8]) {
    let each = 32 / bits as usize;
    for number in 0..cols / each {
        for row in rows.clone() {
            let word = word(packed, number * total + row);
            let at = (row - rows.start) * cols + number * each;
            let out = &mut out[at..at + each];
            match bits {
                4 => out.copy_from_slice(&spread(word).to_le_bytes()),
                _ => out.copy_from_slice(&word.to_le_bytes()),
            }
        }
    }
}

/// Likewise of 2 or 3 bits: 32 neighbouring columns of a row are `bits` words, and a code may begin in one and end in the next.
/// `more` is added to each.
pub fn down_few(
    packed: &[u8],
    bits: u32,
    more: u8,
    total: usize,
    cols: usize,
    rows: Range<usize>,
    out: &mut [u8],
) {
    let mut run = Vec::with_capacity(4 * bits as usize);
    for number in 0..cols / 32 {
        for row in rows.clone() {
            run.clear();
            for at in 0..bits as usize {
                run.extend(word(packed, (number * bits as usize + at) * total + row).to_le_bytes());
            }
            let at = (row - rows.start) * cols + number * 32;
            for (i, code) in out[at..at + 32].iter_mut().enumerate() {
                *code = code_at(&run, bits, i) + more;
            }
        }
    }
}

/// The code `at` of a run of at most 8 bits each, the lowest bits first.
pub fn code_at(packed: &[u8], bits: u32, at: usize) -> u8 {
    let bit = at * bits as usize;
    let next = packed.get(bit / 8 + 1).copied().unwrap_or(0);
    let pair = u16::from_le_bytes([packed[bit / 8], next]);
    (pair >> (bit % 8)) as u8 & (0xff_u8 >> (8 - bits))
}

/// Eight nibbles as eight bytes, in order.
fn spread(word: u32) -> u64 {
    let pairs = (u64::from(word) | u64::from(word) << 16) & 0x0000_ffff_0000_ffff;
    let bytes = (pairs | pairs << 8) & 0x00ff_00ff_00ff_00ff;
    (bytes | bytes << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// compressed-tensors' `weight_packed` of 4 bits: rows of whole words, neighbouring columns from the lowest nibble up. Also
/// the pairs of MXFP4, whose rows are whole bytes.
pub fn nibbles(packed: &[u8], row_bytes: usize, cols: usize, rows: Range<usize>, out: &mut [u8]) {
    for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
        let packed = &packed[row * row_bytes..(row + 1) * row_bytes];
        for (pair, byte) in out.chunks_mut(2).zip(packed) {
            pair[0] = byte & 15;
            if let Some(high) = pair.get_mut(1) {
                *high = byte >> 4;
            }
        }
    }
}

/// One code a byte, of each of several matrices `[cols, total]`. The range lies in one of them; rows of all are counted on.
pub fn turned(packed: &[u8], total: usize, cols: usize, rows: Range<usize>, out: &mut [u8]) {
    let (matrix, first) = (rows.start / total, rows.start % total);
    for col in 0..cols {
        let from = (matrix * cols + col) * total + first;
        for (i, code) in packed[from..from + rows.len()].iter().enumerate() {
            out[i * cols + col] = *code;
        }
    }
}

/// One code a byte: rows of whole bytes, of which the first `cols` are codes.
pub fn bytes(packed: &[u8], row_bytes: usize, cols: usize, rows: Range<usize>, out: &mut [u8]) {
    for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
        out.copy_from_slice(&packed[row * row_bytes..][..cols]);
    }
}

/// 32 nibbles as block formats hold them: byte `i` has value `i` (low) and value `i + 16` (high).
pub fn pair_nibbles(codes: &[u8], out: &mut Vec<u8>) {
    for run in codes.chunks_exact(32) {
        let (low, high) = run.split_at(16);
        out.extend(low.iter().zip(high).map(|(low, high)| low & 15 | high << 4));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn awq_words_hold_even_rows_first() {
        // 16 rows, 2 columns; the code of (row, column) is (row + 5 * column) % 16.
        let code = |row: usize, col: usize| ((row + 5 * col) % 16) as u32;
        let mut packed = Vec::new();
        for col in 0..2 {
            for eight in 0..2 {
                let order = [0, 2, 4, 6, 1, 3, 5, 7];
                let word = (0..8).fold(0, |word, i| word | code(8 * eight + order[i], col) << (4 * i));
                packed.extend(word.to_le_bytes());
            }
        }
        let mut out = [0; 16];
        awq(&packed, 16, 2, 8..16, &mut out);
        let expected: Vec<u8> = (8..16).flat_map(|row| [code(row, 0) as u8, code(row, 1) as u8]).collect();
        assert_eq!(out[..], expected);
    }

    #[test]
    fn words_down_the_columns_hold_neighbours_from_the_lowest_bits_up() {
        // Two rows of 16 columns of 4 bits.
        let packed: Vec<u8> = [0x7654_3210u32, 0x0123_4567, 0xfedc_ba98, 0x89ab_cdef]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        let mut out = [0; 32];
        down(&packed, 4, 2, 16, 0..2, &mut out);
        assert_eq!(out[..16], std::array::from_fn::<u8, 16, _>(|i| i as u8));
        assert_eq!(out[16..], [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8]);
        // The same words as 8 bits: two rows of 8 columns.
        let mut out = [0; 8];
        down(&packed, 8, 2, 8, 1..2, &mut out);
        assert_eq!(out, [0x67, 0x45, 0x23, 0x01, 0xef, 0xcd, 0xab, 0x89]);
    }

    #[test]
    fn codes_of_three_bits_cross_words() {
        // Of two rows of 32 columns; the code of a column is (3 * column + row) % 8, and 1 is added.
        let code = |row: usize, col: usize| ((3 * col + row) % 8) as u128;
        let run = |row: usize| (0..32).fold(0u128, |bits, col| bits | code(row, col) << (3 * col));
        let runs = [run(0), run(1)];
        let packed: Vec<u8> = (0..3)
            .flat_map(|at| runs.map(|run| (run >> (32 * at)) as u32))
            .flat_map(u32::to_le_bytes)
            .collect();
        let mut out = [0; 32];
        down_few(&packed, 3, 1, 2, 32, 1..2, &mut out);
        assert_eq!(out, std::array::from_fn(|col| code(1, col) as u8 + 1));
        // As AutoGPTQ packs it: of the 11th code two bits end the first word, and one begins the second.
        assert_eq!(code_at(&[0, 0, 0, 0b0100_0000, 1, 0], 3, 10), 0b101);
        assert_eq!([0, 1].map(|at| code_at(&[0x12, 0xfe], 8, at)), [0x12, 0xfe]);
        assert_eq!([0, 1, 2, 3].map(|at| code_at(&[0b11_01_00_10], 2, at)), [2, 0, 1, 3]);
    }

    #[test]
    fn pairs_become_halves() {
        // MXFP4 and compressed-tensors have neighbours in a byte, block formats values 16 apart.
        let packed: Vec<u8> = (0..16).map(|i| (2 * i % 16) | ((2 * i + 1) % 16) << 4).collect();
        let mut codes = [0; 32];
        nibbles(&packed, 16, 32, 0..1, &mut codes);
        assert_eq!(codes, std::array::from_fn(|i| (i % 16) as u8));
        let mut halves = Vec::new();
        pair_nibbles(&codes, &mut halves);
        assert_eq!(halves, (0..16).map(|i| i | i << 4).collect::<Vec<u8>>());
        // Five columns in a row of eight nibbles.
        let mut codes = [0; 10];
        nibbles(&[0x21, 0x43, 0xf5, 0xff, 0x98, 0xba, 0xfc, 0xff], 4, 5, 0..2, &mut codes);
        assert_eq!(codes, [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]);
    }
}
