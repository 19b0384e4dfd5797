//! Records of FP8 weights: 32 or 128 columns of 16 rows that have a scale each.
//!
//! Owns: the bytes of a record, and what they mean. Must never: round but once. A weight has exactly the value that
//! `BlockFormat::decode` gives it: the code as an f16, which is the value over 256, times 256 scales.
//!
//! A record is `256 * d` as 16 x f32, then pairs of columns: 16 words `{row r: even column, odd column}`. A block with a code
//! that is no number has a scale that is none: checkpoints with such codes are refused where they are read.

use folio_model::quant::e4m3_in_256ths;

use crate::simd::LANES;

/// Bytes before the pairs.
pub(crate) const HEAD: usize = 4 * LANES;
/// Bytes of a pair of columns.
pub(crate) const PAIR_BYTES: usize = 2 * LANES;

/// Bytes of a record.
pub(crate) const fn record_bytes(columns: usize) -> usize {
    HEAD + columns / 2 * PAIR_BYTES
}

fn code_at(row: usize, column: usize) -> usize {
    HEAD + column / 2 * PAIR_BYTES + 2 * row + column % 2
}

/// Writes the blocks of up to 16 rows, empty past the last, into one zeroed record.
pub(crate) fn pack(rows: [&[u8]; LANES], record: &mut [u8]) {
    for (row, block) in rows.into_iter().enumerate() {
        let Some((d, codes)) = block.split_first_chunk() else { continue };
        assert!(record.len() == record_bytes(codes.len()));
        let numbers = codes.iter().all(|code| code & 0x7f != 0x7f);
        let d = if numbers { f32::from_le_bytes(*d) * 256.0 } else { f32::NAN };
        record[4 * row..][..4].copy_from_slice(&d.to_le_bytes());
        for (column, code) in codes.iter().enumerate() {
            record[code_at(row, column)] = *code;
        }
    }
}

/// Values of one row of a record.
pub(crate) fn read(record: &[u8], row: usize, out: &mut [f32]) {
    assert!(record.len() == record_bytes(out.len()) && row < LANES);
    let d = f32::from_le_bytes(std::array::from_fn(|i| record[4 * row + i]));
    for (column, x) in out.iter_mut().enumerate() {
        *x = d * e4m3_in_256ths(record[code_at(row, column)]).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use folio_model::quant::BlockFormat;

    use super::*;
    use crate::quant::pack::tests::random_blocks;

    #[test]
    fn records_have_the_values_of_the_blocks() {
        for (format, columns) in [(BlockFormat::Fp8x32, 32), (BlockFormat::Fp8x128, 128)] {
            let source = random_blocks(format, LANES, 3);
            let blocks: Vec<&[u8]> = source.chunks_exact(format.bytes()).collect();
            let mut record = vec![0; record_bytes(columns)];
            pack(std::array::from_fn(|row| if row == 5 { &[][..] } else { blocks[row] }), &mut record);
            for (row, block) in blocks.iter().enumerate() {
                let (mut want, mut got) = (vec![0.0; columns], vec![9.0; columns]);
                if row != 5 {
                    format.decode(block, &mut want);
                }
                read(&record, row, &mut got);
                assert_eq!(got, want, "{format:?} row {row}");
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        let mut blocks = [[0x30u8; 36]; LANES];
        for (block, d) in blocks.iter_mut().zip([1.0, f32::NAN, f32::INFINITY, 1.0f32]) {
            block[..4].copy_from_slice(&d.to_le_bytes());
        }
        blocks[3][20] = 0xff;
        let mut record = vec![0; record_bytes(32)];
        pack(std::array::from_fn(|row| &blocks[row][..]), &mut record);
        let mut out = [9.0; 32];
        let mut finite = |row| {
            read(&record, row, &mut out);
            out.iter().all(|x| x.is_finite())
        };
        assert_eq!([0, 1, 2, 3].map(&mut finite), [true, false, false, false]);
    }
}
