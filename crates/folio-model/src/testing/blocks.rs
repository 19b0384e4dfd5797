//! Values to Folio's own block formats, by rounding to the nearest: so that tests have models in them.

use crate::quant::{BlockFormat, MXFP4_VALUES, e4m3_in_256ths};

/// The blocks of whole rows of `values`. Panics for ggml's formats, and where values are not whole blocks.
pub fn encode(format: BlockFormat, values: &[f32]) -> Vec<u8> {
    assert!(format.ggml_type().is_none() && values.len().is_multiple_of(format.values()), "{format:?}");
    let magnitudes: Vec<f32> = (0..0x7f).map(|code| e4m3_in_256ths(code).to_f32() * 256.0).collect();
    let mut bytes = Vec::new();
    for values in values.chunks_exact(format.values()) {
        let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let least = values.iter().fold(0f32, |least, x| least.min(*x));
        let most = values.iter().fold(0f32, |most, x| most.max(*x));
        match format {
            BlockFormat::Int4x32 | BlockFormat::Int4x128 => {
                let d = put_scale(&mut bytes, largest / 7.0);
                nibbles(&mut bytes, values, |x| (x / d).round() + 8.0);
            }
            BlockFormat::Uint4x32 | BlockFormat::Uint4x128 => {
                let d = put_scale(&mut bytes, (most - least) / 15.0);
                let zero = (-least / d).round();
                bytes.push(zero as u8);
                nibbles(&mut bytes, values, |x| (x / d).round() + zero);
            }
            BlockFormat::Int8x32 | BlockFormat::Int8x128 => {
                let d = put_scale(&mut bytes, largest / 127.0);
                bytes.extend(values.iter().map(|x| (x / d).round() as i8 as u8));
            }
            BlockFormat::Fp4x16 => {
                let d = [&values[..16], &values[16..]].map(|half| {
                    let largest = half.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                    put_scale(&mut bytes, largest / 12.0)
                });
                let nearest = |i: usize| {
                    let off = |code: &usize| (values[i] / d[i / 16] - f32::from(MXFP4_VALUES[*code])).abs();
                    (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0) as u8
                };
                bytes.extend((0..16).map(|i| nearest(i) | nearest(i + 16) << 4));
            }
            _ => {
                let d = put_scale(&mut bytes, largest / 448.0);
                bytes.extend(values.iter().map(|x| {
                    let above = magnitudes.partition_point(|m| *m < x.abs() / d).clamp(1, 0x7e);
                    let (low, high) = (magnitudes[above - 1], magnitudes[above]);
                    let nearest = if x.abs() / d - low < high - x.abs() / d { above - 1 } else { above };
                    nearest as u8 | if *x < 0.0 { 0x80 } else { 0 }
                }));
            }
        }
    }
    bytes
}

/// A scale as checkpoints have them, a bf16. Zero becomes one.
fn put_scale(bytes: &mut Vec<u8>, d: f32) -> f32 {
    let d = if d == 0.0 { 1.0 } else { half::bf16::from_f32(d).to_f32() };
    bytes.extend(d.to_le_bytes());
    d
}

fn nibbles(bytes: &mut Vec<u8>, values: &[f32], code: impl Fn(f32) -> f32) {
    let code = |x: f32| code(x).clamp(0.0, 15.0) as u8;
    for run in values.chunks_exact(32) {
        bytes.extend((0..16).map(|i| code(run[i]) | code(run[i + 16]) << 4));
    }
}

/// An order of columns that leaves few in place.
pub fn order(cols: usize) -> Vec<u32> {
    let step = [37, 31, 29, 1].into_iter().find(|step| !cols.is_multiple_of(*step)).unwrap_or(1);
    (0..cols).map(|j| ((step * j + 11) % cols) as u32).collect()
}

/// The columns of whole rows of `values`, stored in `order`.
pub fn stored_in(order: &[u32], values: &[f32]) -> Vec<f32> {
    values
        .chunks_exact(order.len())
        .flat_map(|row| order.iter().map(|column| row[*column as usize]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_nearly() {
        let values: Vec<f32> = (0..256).map(|i| ((i * 89) % 256) as f32 / 100.0 - 1.2).collect();
        for format in BlockFormat::ALL.into_iter().filter(|format| format.ggml_type().is_none()) {
            let mut decoded = vec![0.0; 256];
            format.decode(&encode(format, &values), &mut decoded);
            let worst = values.iter().zip(&decoded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 0.25, "{format:?}: {worst}");
        }
        let mut sorted = order(96);
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..96));
    }
}
