//! From a block format's bytes to records, and back to values.
//!
//! Owns: the bits of every block format that has a packed form. Must never: change a value (a test holds every format
//! against its `decode`). Cost: one pass at load.

use folio_model::quant::{BlockFormat, k_scale_min, q3_k_scale};

use super::{Form, FormTask};
use crate::simd::LANES;
use crate::simd::dot::{COLUMNS, Codes, VECTORS, lifted, put};

/// What a source block says about up to 256 columns, in a common shape.
struct Source {
    /// f16 bits.
    d: u16,
    /// f16 bits of the unit of minima, or of the minimum.
    min: u16,
    /// The exponent of MXFP4.
    exponent: u8,
    /// Per 16 columns, in units of `d` and `min`. Formats with one scale per 32 have it twice.
    scales: [i8; 16],
    minima: [i8; 16],
    /// As `put` takes them: unsigned below 8 bits, signed at 8.
    codes: [u8; 256],
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
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
        let mut s = Source { d: 0, min: 0, exponent: 0, scales: [0; 16], minima: [0; 16], codes: [0; 256] };
        match format {
            BlockFormat::Q8_0 => {
                s.d = u16_at(b, 0);
                s.codes[..32].copy_from_slice(&b[2..34]);
            }
            BlockFormat::Q4_0 | BlockFormat::IQ4_NL => {
                s.d = u16_at(b, 0);
                nibbles(&b[2..], &mut s.codes);
            }
            BlockFormat::Q4_1 => {
                (s.d, s.min) = (u16_at(b, 0), u16_at(b, 2));
                nibbles(&b[4..], &mut s.codes);
            }
            BlockFormat::Q5_0 => {
                s.d = u16_at(b, 0);
                nibbles(&b[6..], &mut s.codes);
                fifth(&b[2..6], &mut s.codes);
            }
            BlockFormat::Q5_1 => {
                (s.d, s.min) = (u16_at(b, 0), u16_at(b, 2));
                nibbles(&b[8..], &mut s.codes);
                fifth(&b[4..8], &mut s.codes);
            }
            BlockFormat::MXFP4 => {
                s.exponent = b[0];
                nibbles(&b[1..], &mut s.codes);
            }
            BlockFormat::Q2_K => s.read_q2_k(b),
            BlockFormat::Q3_K => s.read_q3_k(b),
            BlockFormat::Q4_K => s.read_k(b, &b[16..], None),
            BlockFormat::Q5_K => s.read_k(b, &b[48..], Some(&b[16..48])),
            BlockFormat::Q6_K => s.read_q6_k(b),
            BlockFormat::IQ4_XS => s.read_iq4_xs(b),
        }
        s
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
        (self.d, self.min) = (u16_at(b, 80), u16_at(b, 82));
        self.two_bits(&b[16..80]);
        self.scales = std::array::from_fn(|run| (b[run] & 15) as i8);
        self.minima = std::array::from_fn(|run| (b[run] >> 4) as i8);
    }

    fn read_q3_k(&mut self, b: &[u8]) {
        self.d = u16_at(b, 108);
        self.two_bits(&b[32..96]);
        for (i, code) in self.codes.iter_mut().enumerate() {
            let high = b[i % 32] >> (i / 32) & 1;
            // The value is the code of three bits minus 4; the packed one is 8 above the value.
            *code = (*code | high << 2) + 4;
        }
        for run in 0..16 {
            self.scales[run] = q3_k_scale(twelve(b, 96), run);
        }
    }

    fn read_k(&mut self, b: &[u8], qs: &[u8], high: Option<&[u8]>) {
        (self.d, self.min) = (u16_at(b, 0), u16_at(b, 2));
        for (run, codes) in self.codes.chunks_exact_mut(32).enumerate() {
            let (scale, minimum) = k_scale_min(twelve(b, 4), run);
            self.scales[2 * run..2 * run + 2].fill(scale as i8);
            self.minima[2 * run..2 * run + 2].fill(minimum as i8);
            for (i, code) in codes.iter_mut().enumerate() {
                let fifth = high.map_or(0, |high| high[i] >> run & 1);
                *code = qs[32 * (run / 2) + i] >> (4 * (run % 2)) & 15 | fifth << 4;
            }
        }
    }

    fn read_q6_k(&mut self, b: &[u8]) {
        self.d = u16_at(b, 208);
        let (low, high) = (&b[..128], &b[128..192]);
        for (i, code) in self.codes.iter_mut().enumerate() {
            let (part, quarter, at) = (i / 128, i % 128 / 32, i % 32);
            let low = low[64 * part + 32 * (quarter % 2) + at] >> (4 * (quarter / 2)) & 15;
            *code = low | (high[32 * part + at] >> (2 * quarter) & 3) << 4;
        }
        self.scales = std::array::from_fn(|run| b[192 + run] as i8);
    }

    fn read_iq4_xs(&mut self, b: &[u8]) {
        self.d = u16_at(b, 0);
        let high = u16_at(b, 2);
        for run in 0..8 {
            let scale = b[4 + run / 2] >> (4 * (run % 2)) & 15 | ((high >> (2 * run) & 3) as u8) << 4;
            self.scales[2 * run..2 * run + 2].fill(scale as i8 - 32);
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
            write_scales::<F>(self.record, row, &source);
            for block in 0..F::BLOCKS {
                let codes = &mut self.record[F::codes_at(block)..][..F::C::BYTES];
                for (column, code) in source.codes[COLUMNS * block..][..COLUMNS].iter().enumerate() {
                    put::<F::C>(codes, column / 4, 4 * row + column % 4, *code);
                }
            }
        }
    }
}

/// Bytes between the start of a record and the codes of its block: what [`Form`] says scales and minima are.
fn write_scales<F: Form>(record: &mut [u8], row: usize, source: &Source) {
    let mut f16_at = |at: usize, bits: u16| record[at + 2 * row..][..2].copy_from_slice(&bits.to_le_bytes());
    if F::BLOCKS == 1 {
        if F::codes_at(0) == LANES {
            record[row] = source.exponent;
            return;
        }
        f16_at(0, source.d);
        if F::MINIMA {
            f16_at(2 * LANES, source.min);
        }
        return;
    }
    f16_at(0, source.d);
    if F::MINIMA {
        f16_at(2 * LANES, source.min);
    }
    let parts = if F::HALVES { 2 } else { 1 };
    for block in 0..F::BLOCKS {
        let kinds = if F::MINIMA { 2 } else { 1 };
        let at = F::codes_at(block) - LANES * parts * kinds;
        for part in 0..parts {
            let scale = source.scales[2 * block + part];
            record[at + LANES * part + row] = scale as u8;
            if F::MINIMA {
                record[at + LANES * (parts + part) + row] = source.minima[2 * block + part] as u8;
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
    use half::f16;

    use super::*;
    use crate::quant::with_form;

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
            BlockFormat::MXFP4 => {
                block[0] = 118 + block[0] % 8;
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
    fn every_format_has_the_values_of_its_decoding() {
        for format in BlockFormat::ALL {
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
