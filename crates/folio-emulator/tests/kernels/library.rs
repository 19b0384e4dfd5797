//! What stands around products of a library: rows as FP8, and what becomes of sums.

use folio_cuda::planes::word;
use folio_cuda::{Arg, DevicePtr, Launch};
use folio_emulator::Order;
use half::bf16;

use crate::support::{Device, Random, device, rows_only};

fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size =
        if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { size } else { -size }
}

/// The nearest code, even ones where two are as near, at most 448.
fn nearest(x: f32) -> u8 {
    let codes = (0..=0x7e).map(|code: u8| code | if x.is_sign_negative() { 0x80 } else { 0 });
    let distance = |code: &u8| (f64::from(e4m3(*code)) - f64::from(x)).abs();
    let least = codes.clone().map(|code| distance(&code)).fold(f64::INFINITY, f64::min);
    let mut near: Vec<u8> = codes.filter(|code| distance(code) == least).collect();
    near.sort_by_key(|code| code & 1);
    near[0]
}

/// Codes and scales of some rows of a batch whose bound is larger.
fn quantized(device: &mut Device, rows: &[Vec<u16>]) -> Vec<(Vec<u8>, f32)> {
    let (width, count) = (rows[0].len(), rows.len());
    let stride = width.next_multiple_of(32) + 32;
    let mut halves = Vec::new();
    for row in rows {
        halves.extend(row.iter().flat_map(|half| half.to_le_bytes()));
        halves.resize(halves.len() + 2 * (stride - width), 0xff);
    }
    let (x, meta) = (device.bytes(&halves), rows_only(device, count, &[]));
    let codes = device.bytes(&vec![0xaa; (count + 2) * width]);
    let scales = device.floats(&vec![f32::NAN; count + 2]);
    let head = [Arg::Ptr(meta.0), Arg::U32(word::ROWS), Arg::Ptr(x), Arg::U32(stride as u32)];
    let args = [&head[..], &[Arg::U32(width as u32), Arg::Ptr(codes), Arg::Ptr(scales)]].concat();
    let grid = [count as u32 + 2, 1, 1];
    let launch = Launch { kernel: "quantize_rows", grid, threads: 256, shared: 0, args: &args };
    device.driver.launch(&launch).unwrap();
    let (codes, scales) = (device.read(codes, (count + 2) * width), device.read_floats(scales, count + 2));
    assert!(
        codes[count * width..].iter().all(|code| *code == 0xaa),
        "rows beyond the count stay as they are"
    );
    assert!(scales[count..].iter().all(|scale| scale.is_nan()));
    codes.chunks(width).zip(scales).take(count).map(|(codes, scale)| (codes.to_vec(), scale)).collect()
}

#[test]
fn rows_become_the_nearest_codes_whatever_stands_beside_them() {
    let Some(mut device) = device(&["library"], Order::Ascending) else { return };
    for width in [16, 48, 1040] {
        let mut random = Random::new(width as u64);
        let mut rows: Vec<Vec<u16>> = (0..6)
            .map(|row| {
                let values = random.vector(width, 10f32.powi(row - 3)).into_iter().enumerate();
                // Neighbours so much smaller that their codes are subnormal.
                values
                    .map(|(i, x)| bf16::from_f32(if i % 3 == 0 { x / 30_000.0 } else { x }).to_bits())
                    .collect()
            })
            .collect();
        rows[1].fill(0);
        rows[2][5] = bf16::NAN.to_bits();
        let found = quantized(&mut device, &rows);
        for (index, (row, (codes, scale))) in rows.iter().zip(&found).enumerate() {
            let values: Vec<f32> = row.iter().map(|half| bf16::from_bits(*half).to_f32()).collect();
            let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            assert_eq!(*scale, if most == 0.0 { 1.0 } else { most / 448.0 });
            for (value, code) in values.iter().zip(codes) {
                let want = if value.is_nan() { 0x7f } else { nearest(value / scale) };
                assert_eq!(*code, want, "{value} of row {index}, {width} wide");
            }
            assert_eq!(quantized(&mut device, &rows[index..=index])[0], (codes.clone(), *scale), "alone");
        }
        assert!(found[0].0.iter().any(|code| code & 0x78 == 0 && code & 7 != 0), "some are subnormal");
    }
}

#[test]
fn sums_are_scaled_then_biased_then_added() {
    let Some(mut device) = device(&["library"], Order::Ascending) else { return };
    let (rows, n, bound) = (3usize, 300usize, 5usize);
    let mut random = Random::new(3);
    let sums = random.vector(bound * n, 5.0);
    let (row_scales, column_scales) = (random.vector(bound, 1.0), random.vector(n, 0.1));
    let (bias, old) = (random.vector(n, 1.0), random.vector(bound * (n + 20), 1.0));
    for (scaled, biased, add) in
        [(false, true, false), (false, false, true), (true, false, false), (true, true, true)]
    {
        let from = device.floats(&sums);
        let optional = |device: &mut Device, given: bool, values: &[f32]| match given {
            true => device.floats(values),
            false => DevicePtr::default(),
        };
        let (of_rows, of_columns) =
            (optional(&mut device, scaled, &row_scales), optional(&mut device, scaled, &column_scales));
        let bias_at = optional(&mut device, biased, &bias);
        // Where nothing is added, sums become what they stand for in place.
        let (to, stride) = if add { (device.floats(&old), n + 20) } else { (from, n) };
        let meta = rows_only(&mut device, rows, &[]);
        let head =
            [Arg::Ptr(meta.0), Arg::U32(word::ROWS), Arg::Ptr(from), Arg::U32(n as u32), Arg::U32(n as u32)];
        let middle = [Arg::Ptr(of_rows), Arg::Ptr(of_columns), Arg::Ptr(bias_at)];
        let args =
            [&head[..], &middle, &[Arg::Ptr(to), Arg::U32(stride as u32), Arg::U32(u32::from(add))]].concat();
        let grid = [bound as u32, n.div_ceil(256) as u32, 1];
        let launch = Launch { kernel: "finish_rows", grid, threads: 256, shared: 0, args: &args };
        device.driver.launch(&launch).unwrap();
        let found = device.read_floats(to, bound * stride);
        for (i, found) in found.iter().enumerate() {
            let (row, column) = (i / stride, i % stride);
            let before = if add { old[i] } else { sums[i] };
            if row >= rows || column >= n {
                assert_eq!(*found, before, "row {row}, column {column} is nobody's");
                continue;
            }
            let mut want = sums[row * n + column];
            want = if scaled { want * row_scales[row] * column_scales[column] } else { want };
            want = if biased { want + bias[column] } else { want };
            assert_eq!(*found, if add { before + want } else { want }, "row {row}, column {column}");
        }
    }
}
