//! The values of a block, in plain loops: the definition that every packed form is tested against.

use half::f16;

use super::BlockFormat;

impl BlockFormat {
    /// Decodes whole blocks. Panics unless `bytes` is whole blocks and `out` has exactly their values.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len() / self.bytes() * self.values(), out.len());
        assert!(bytes.len().is_multiple_of(self.bytes()));
        let one = match self {
            BlockFormat::Q8_0 => q8_0,
            BlockFormat::Q4_0 => q4_0,
        };
        for (block, out) in bytes.chunks_exact(self.bytes()).zip(out.chunks_exact_mut(self.values())) {
            one(block, out);
        }
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    for (x, q) in out.iter_mut().zip(&block[2..]) {
        *x = d * f32::from(*q as i8);
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let (low, high) = out.split_at_mut(16);
    for ((a, b), byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *a = d * (f32::from(byte & 15) - 8.0);
        *b = d * (f32::from(byte >> 4) - 8.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_decodes_to_the_values_its_layout_says() {
        let mut q8 = f16::from_f32(0.5).to_le_bytes().to_vec();
        q8.extend((0..32).map(|i| (i * 7 - 100) as i8 as u8));
        let mut out = [0.0; 32];
        BlockFormat::Q8_0.decode(&q8, &mut out);
        assert_eq!(out, std::array::from_fn(|i| 0.5 * (i as f32 * 7.0 - 100.0)));

        let mut q4 = f16::from_f32(-0.25).to_le_bytes().to_vec();
        q4.extend((0..16).map(|i| (i | (15 - i) << 4) as u8));
        BlockFormat::Q4_0.decode(&q4, &mut out);
        assert_eq!(out[..16], std::array::from_fn::<f32, 16, _>(|i| -0.25 * (i as f32 - 8.0)));
        assert_eq!(out[16..], std::array::from_fn::<f32, 16, _>(|i| -0.25 * (7.0 - i as f32)));
    }
}
