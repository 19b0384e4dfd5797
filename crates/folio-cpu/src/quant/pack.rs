//! From a block format's bytes to records, and back to values.
//!
//! Owns: the bits of every block format that has a packed form. Must never: change a value (a test holds every format
//! against its `decode`). Cost: one pass at load.

use folio_model::quant::{BlockFormat, IqBlock, k_scale_min, nvfp4_scale_code, q3_k_scale};

use super::{Form, FormTask, Scales};
use crate::simd::LANES;
use crate::simd::dot::{COLUMNS, Codes, VECTORS, lifted, put};

/// What a source block says about up to 256 columns, in a common shape.
struct Source {
    scales: Scales,
    /// As `put` takes them: unsigned below 8 bits, signed at 8.
    codes: [u8; 256],
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(*bytes.first_chunk().expect("blocks are whole"))
}

fn twelve(bytes: &[u8], at: usize) -> &[u8; 12] {
    bytes[at..].first_chunk().expect("blocks are whole")
}

/// Sixteen bytes of two nibbles: values 0 to 15 low, 16 to 31 high.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (i, byte) in bytes[..16].iter().enumerate() {
        codes[i] = byte & 15;
        codes[i + 16] = byte >> 4;
    }
}

/// Bit `i` of four bytes is the fifth bit of value `i`.
fn fifth(bits: &[u8], codes: &mut [u8]) {
    for (i, code) in codes[..32].iter_mut().enumerate() {
        *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
    }
}

impl Source {
    fn read(format: BlockFormat, b: &[u8]) -> Self {
        let mut s = Source { scales: Scales::default(), codes: [0; 256] };
        match format {
            BlockFormat::Q8_0 => {
                s.scales.d = u16_at(b, 0);
                s.codes[..32].copy_from_slice(&b[2..34]);
            }
            BlockFormat::Q4_0 | BlockFormat::IQ4_NL => {
                s.scales.d = u16_at(b, 0);
                nibbles(&b[2..], &mut s.codes);
            }
            BlockFormat::Q4_1 => {
                (s.scales.d, s.scales.min) = (u16_at(b, 0), u16_at(b, 2));
                nibbles(&b[4..], &mut s.codes);
            }
            BlockFormat::Q5_0 => {
                s.scales.d = u16_at(b, 0);
                nibbles(&b[6..], &mut s.codes);
                fifth(&b[2..6], &mut s.codes);
            }
            BlockFormat::Q5_1 => {
                (s.scales.d, s.scales.min) = (u16_at(b, 0), u16_at(b, 2));
                nibbles(&b[8..], &mut s.codes);
                fifth(&b[4..8], &mut s.codes);
            }
            BlockFormat::MXFP4 => {
                s.scales.exponent = b[0];
                nibbles(&b[1..], &mut s.codes);
            }
            BlockFormat::Q2_K => s.read_q2_k(b),
            BlockFormat::Q3_K => s.read_q3_k(b),
            BlockFormat::Q4_K => s.read_k(b, &b[16..], None),
            BlockFormat::Q5_K => s.read_k(b, &b[48..], Some(&b[16..48])),
            BlockFormat::Q6_K => s.read_q6_k(b),
            BlockFormat::IQ4_XS => s.read_iq4_xs(b),
            BlockFormat::NVFP4 => s.read_nvfp4(b),
            BlockFormat::Int4x32 | BlockFormat::Int4x128 => s.read_nibbles(b, &b[4..]),
            BlockFormat::Uint4x32 | BlockFormat::Uint4x128 => {
                s.scales.zero = b[4];
                s.read_nibbles(b, &b[5..]);
            }
            BlockFormat::Int8x32 | BlockFormat::Int8x128 => {
                s.scales.d32[0] = u32_at(b);
                s.codes[..b.len() - 4].copy_from_slice(&b[4..]);
            }
            BlockFormat::Fp4x16 => {
                s.scales.d32 = [u32_at(b), u32_at(&b[4..])];
                nibbles(&b[8..], &mut s.codes);
            }
            BlockFormat::Fp8x32 | BlockFormat::Fp8x128 => unreachable!("FP8 is packed as floats"),
            _ => {
                let block = IqBlock::read(format, b);
                (s.scales.d, s.scales.scales, s.codes) = (block.d, block.scales, block.codes);
            }
        }
        s
    }

    fn read_nvfp4(&mut self, b: &[u8]) {
        let (scales, runs) = b.split_at(4);
        self.scales.e4m3 = std::array::from_fn(|i| nvfp4_scale_code(scales[i]));
        for (run, codes) in runs.chunks_exact(8).zip(self.codes.chunks_exact_mut(16)) {
            for (i, byte) in run.iter().enumerate() {
                (codes[i], codes[i + 8]) = (byte & 15, byte >> 4);
            }
        }
    }

    /// An f32, and runs of 32 nibbles.
    fn read_nibbles(&mut self, b: &[u8], runs: &[u8]) {
        self.scales.d32[0] = u32_at(b);
        for (run, codes) in runs.chunks_exact(16).zip(self.codes.chunks_exact_mut(32)) {
            nibbles(run, codes);
        }
    }

    /// Two bits of 256 values: run `i` of 16 values is bits `2 * (i % 8 / 2)..` of 16 bytes.
    fn two_bits(&mut self, qs: &[u8]) {
        for (run, codes) in self.codes.chunks_exact_mut(16).enumerate() {
            let from = &qs[32 * (run / 8) + 16 * (run % 2)..][..16];
            for (code, byte) in codes.iter_mut().zip(from) {
                *code = byte >> (2 * (run % 8 / 2)) & 3;
            }
        }
    }

    fn read_q2_k(&mut self, b: &[u8]) {
        (self.scales.d, self.scales.min) = (u16_at(b, 80), u16_at(b, 82));
        self.two_bits(&b[16..80]);
        self.scales.scales = std::array::from_fn(|run| (b[run] & 15) as i8);
        self.scales.minima = std::array::from_fn(|run| (b[run] >> 4) as i8);
    }

    fn read_q3_k(&mut self, b: &[u8]) {
        self.scales.d = u16_at(b, 108);
        self.two_bits(&b[32..96]);
        for (i, code) in self.codes.iter_mut().enumerate() {
            let high = b[i % 32] >> (i / 32) & 1;
            // The value is the code of three bits minus 4; the packed one is 8 above the value.
            *code = (*code | high << 2) + 4;
        }
        for run in 0..16 {
            self.scales.scales[run] = q3_k_scale(twelve(b, 96), run);
        }
    }

    fn read_k(&mut self, b: &[u8], qs: &[u8], high: Option<&[u8]>) {
        (self.scales.d, self.scales.min) = (u16_at(b, 0), u16_at(b, 2));
        for (run, codes) in self.codes.chunks_exact_mut(32).enumerate() {
            let (scale, minimum) = k_scale_min(twelve(b, 4), run);
            self.scales.scales[2 * run..2 * run + 2].fill(scale as i8);
            self.scales.minima[2 * run..2 * run + 2].fill(minimum as i8);
            for (i, code) in codes.iter_mut().enumerate() {
                let fifth = high.map_or(0, |high| high[i] >> run & 1);
                *code = qs[32 * (run / 2) + i] >> (4 * (run % 2)) & 15 | fifth << 4;
            }
        }
    }

    fn read_q6_k(&mut self, b: &[u8]) {
        self.scales.d = u16_at(b, 208);
        let (low, high) = (&b[..128], &b[128..192]);
        for (i, code) in self.codes.iter_mut().enumerate() {
            let (part, quarter, at) = (i / 128, i % 128 / 32, i % 32);
            let low = low[64 * part + 32 * (quarter % 2) + at] >> (4 * (quarter / 2)) & 15;
            *code = low | (high[32 * part + at] >> (2 * quarter) & 3) << 4;
        }
        self.scales.scales = std::array::from_fn(|run| b[192 + run] as i8);
    }

    fn read_iq4_xs(&mut self, b: &[u8]) {
        self.scales.d = u16_at(b, 0);
        let high = u16_at(b, 2);
        for run in 0..8 {
            let scale = b[4 + run / 2] >> (4 * (run % 2)) & 15 | ((high >> (2 * run) & 3) as u8) << 4;
            self.scales.scales[2 * run..2 * run + 2].fill(scale as i8 - 32);
            nibbles(&b[8 + 16 * run..], &mut self.codes[32 * run..]);
        }
    }
}

/// Writes the source blocks of up to 16 rows into one zeroed record.
pub(crate) struct PackRecord<'a> {
    pub(crate) format: BlockFormat,
    /// The block of each row; empty for rows past the last.
    pub(crate) rows: [&'a [u8]; LANES],
    pub(crate) record: &'a mut [u8],
}

impl FormTask for PackRecord<'_> {
    type Output = ();

    fn run<F: Form>(self) {
        for (row, bytes) in self.rows.iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
            let source = Source::read(self.format, bytes);
            F::put_scales(self.record, row, &source.scales);
            for block in 0..F::BLOCKS {
                let codes = &mut self.record[F::codes_at(block)..][..F::C::BYTES];
                for (column, code) in source.codes[COLUMNS * block..][..COLUMNS].iter().enumerate() {
                    put::<F::C>(codes, column / 4, 4 * row + column % 4, *code);
                }
            }
        }
    }
}

/// Values of one row of a record, with the roundings of `BlockFormat::decode`.
pub(crate) struct ReadRow<'a> {
    pub(crate) record: &'a [u8],
    pub(crate) row: usize,
    /// As many as the record has columns.
    pub(crate) out: &'a mut [f32],
}

impl FormTask for ReadRow<'_> {
    type Output = ();

    fn run<F: Form>(self) {
        assert!(self.record.len() == F::BYTES && self.out.len() == COLUMNS * F::BLOCKS && self.row < LANES);
        for (block, out) in self.out.chunks_exact_mut(COLUMNS).enumerate() {
            // SAFETY: the record is whole.
            let (scales, offsets) = unsafe {
                use crate::simd::Scalar;
                let record = self.record.as_ptr();
                (F::scales::<Scalar>(record, block), F::offsets::<Scalar>(record, block))
            };
            let codes = &self.record[F::codes_at(block)..][..F::C::BYTES];
            for (column, x) in out.iter_mut().enumerate() {
                // SAFETY: the codes of the block are whole.
                let code = unsafe { lifted::<F::C>(codes.as_ptr(), column / 4, 4 * self.row + column % 4) };
                let value = f32::from(i16::from(code) - i16::from(F::C::LIFT));
                let part = column / 16;
                let product = scales[part][self.row] * value;
                *x = if F::MINIMA { product + offsets[part][self.row] } else { product };
            }
        }
    }
}

/// Bytes of a record and columns of it.
pub(crate) struct Size;

impl FormTask for Size {
    type Output = (usize, usize);

    fn run<F: Form>(self) -> (usize, usize) {
        (F::BYTES, F::BLOCKS * COLUMNS)
    }
}

const _: () = assert!(COLUMNS == 4 * VECTORS);

#[cfg(test)]
pub(crate) mod tests {
    use folio_model::quant::Encoding;
    use half::f16;

    use super::*;
    use crate::plain::Kind;
    use crate::quant::with_form;

    /// The formats that are multiplied as integers.
    pub(crate) fn integers() -> impl Iterator<Item = BlockFormat> {
        let integers = |format: &BlockFormat| matches!(Kind::of(Encoding::Block(*format)), Kind::Integers(_));
        BlockFormat::ALL.into_iter().filter(integers)
    }

    /// Blocks with every bit in use and scales that are finite.
    pub(crate) fn random_blocks(format: BlockFormat, blocks: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let mut byte = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        let mut bytes: Vec<u8> = (0..blocks * format.bytes()).map(|_| byte()).collect();
        for block in bytes.chunks_exact_mut(format.bytes()) {
            sane(format, block);
        }
        bytes
    }

    /// Makes the floats of a block small numbers.
    fn sane(format: BlockFormat, block: &mut [u8]) {
        let floats: &[usize] = match format {
            BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4_K | BlockFormat::Q5_K => &[0, 2],
            BlockFormat::Q2_K => &[80, 82],
            BlockFormat::Q3_K => &[108],
            BlockFormat::Q6_K => &[208],
            BlockFormat::TQ1_0 => &[52],
            BlockFormat::TQ2_0 => &[64],
            // Its scales have no bits that are no number.
            BlockFormat::NVFP4 => &[],
            BlockFormat::MXFP4 => {
                block[0] = 118 + block[0] % 8;
                return;
            }
            BlockFormat::IQ1_M => {
                // Four bits of the scale in each of four words.
                for (word, bits) in [0u8, 0, 4, 2].into_iter().enumerate() {
                    block[49 + 2 * word] = block[49 + 2 * word] & 15 | bits << 4;
                }
                return;
            }
            _ if format.ggml_type().is_none() => {
                // Bits that no f16 has.
                let scales = if format == BlockFormat::Fp4x16 { &mut block[..8] } else { &mut block[..4] };
                for scale in scales.as_chunks_mut::<4>().0 {
                    let x = u32_at(scale) as f32 / u32::MAX as f32 * 0.02 - 0.01;
                    *scale = x.to_le_bytes();
                }
                if matches!(format, BlockFormat::Uint4x32 | BlockFormat::Uint4x128) {
                    block[4] %= 17;
                }
                if matches!(format, BlockFormat::Fp8x32 | BlockFormat::Fp8x128) {
                    // 0x7f is no number.
                    block[4..].iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code ^= 1);
                }
                return;
            }
            _ => &[0],
        };
        for &at in floats {
            let x = f32::from(u16_at(block, at)) / 65536.0 * 0.02 - 0.01;
            block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
        }
    }

    #[test]
    fn a_weight_takes_little_more_than_in_its_file() {
        for encoding in integers().map(Encoding::Block) {
            let stored = 8.0 * encoding.bytes_per_value();
            let more = 8.0 * crate::packed_bytes_per_value(encoding) - stored;
            let most = if stored < 4.0 { 3.0 } else { 0.15 };
            assert!((0.0..=most).contains(&more), "{encoding}: {more} bits more than {stored}");
        }
    }

    #[test]
    fn every_format_has_the_values_of_its_decoding() {
        for format in integers() {
            let (bytes, columns) = with_form(format, Size);
            let source = random_blocks(format, LANES, 7);
            let blocks: Vec<&[u8]> = source.chunks_exact(format.bytes()).collect();
            let mut record = vec![0; bytes];
            let rows = std::array::from_fn(|i| if i == 5 { &[][..] } else { blocks[i] });
            with_form(format, PackRecord { format, rows, record: &mut record });
            for (row, block) in blocks.iter().enumerate() {
                let (mut want, mut got) = (vec![0.0; columns], vec![9.0; columns]);
                if row != 5 {
                    format.decode(block, &mut want);
                }
                with_form(format, ReadRow { record: &record, row, out: &mut got });
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(got == want, "{format:?} row {row} column {i}: {got} is not {want}");
                }
            }
        }
    }
}
