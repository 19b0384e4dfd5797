//! Norms, scaling, activations and soft caps, in f64 beside them.

use folio_cuda::planes::word;
use folio_cuda::rows::{Listed, Norm, add_norm, gate, norm, norm_listed, scale, softcap};
use folio_cuda::{Planes, RowBound};
use folio_emulator::Order;
use folio_model::program::Activation;

use crate::support::{Device, Random, device, rows_only};

const WIDTHS: [usize; 6] = [8, 33, 80, 576, 1024, 3000];

fn bound(bound: u32) -> RowBound {
    RowBound { bound, count_word: word::ROWS }
}

fn close(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= 2e-6 * want.abs() + 1e-7, "{what}: value {i} is {got}, not {want}");
    }
}

fn normed(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let square: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
    let inverse = (square / x.len() as f64 + f64::from(eps)).sqrt().recip();
    x.iter().zip(weight).map(|(x, w)| f64::from(*x) * inverse * f64::from(*w)).collect()
}

#[test]
fn norms_are_right_and_the_same_in_any_company() {
    let Some(mut device) = device(&["rows"], Order::Ascending) else { return };
    for width in WIDTHS {
        let mut random = Random::new(width as u64);
        let (x, weight) = (random.vector(5 * width, 3.0), random.vector(width, 1.0));
        let want: Vec<f64> = x.chunks(width).flat_map(|row| normed(row, &weight, 1e-5)).collect();
        let of = Norm { weight: device.floats(&weight), eps: 1e-5 };
        let from = device.plane_of(width, &x);
        let (out, meta) = (device.planes(7, width), rows_only(&mut device, 5, &[]));
        norm(&mut *device.driver, meta, bound(7), &from, of, &out).unwrap();
        let got = device.f32_rows(&out, 7);
        close("norm", &got[..5 * width], &want);
        assert!(got[5 * width..].iter().all(|x| x.is_nan()), "rows beyond the count stay as they are");
        device.check_bf16(&out, 5);

        for (row, x) in x.chunks(width).enumerate() {
            let (from, meta) = (device.plane_of(width, x), rows_only(&mut device, 1, &[]));
            norm(&mut *device.driver, meta, bound(1), &from, of, &from).unwrap();
            let alone = device.f32_rows(&from, 1);
            assert!(same(&alone, &got[row * width..(row + 1) * width]), "alone and in place, width {width}");
        }
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn listed_rows_are_normalized_into_a_compact_plane() {
    let Some(mut device) = device(&["rows"], Order::Descending) else { return };
    let (width, mut random) = (80, Random::new(3));
    let (x, weight) = (random.vector(6 * width, 2.0), random.vector(width, 1.0));
    let (from, weights) = (device.plane_of(width, &x), device.floats(&weight));
    let (out, meta) = (device.planes(4, width), rows_only(&mut device, 6, &[1, 4, 5]));
    let of = Norm { weight: weights, eps: 1e-6 };
    norm_listed(&mut *device.driver, meta, Listed::Logits(4), &from, of, &out).unwrap();
    let want: Vec<f64> =
        [1, 4, 5].iter().flat_map(|row| normed(&x[row * width..][..width], &weight, 1e-6)).collect();
    close("listed", &device.f32_rows(&out, 3), &want);
    device.check_bf16(&out, 3);
}

#[test]
fn a_norm_is_added_to_the_residual_stream() {
    let Some(mut device) = device(&["rows"], Order::Shuffled { seed: 1 }) else { return };
    for width in WIDTHS {
        let mut random = Random::new(7);
        let (x, weight, stream) =
            (random.vector(2 * width, 2.0), random.vector(width, 1.0), random.vector(2 * width, 4.0));
        let mut out = device.plane_of(width, &stream);
        (out.bf16, out.bf16_stride) = (device.planes(2, width).bf16, out.f32_stride);
        let (from, meta) = (device.plane_of(width, &x), rows_only(&mut device, 2, &[]));
        let of = Norm { weight: device.floats(&weight), eps: 1e-5 };
        add_norm(&mut *device.driver, meta, bound(2), &from, of, &out).unwrap();
        let added = x.chunks(width).flat_map(|row| normed(row, &weight, 1e-5));
        let want: Vec<f64> = added.zip(&stream).map(|(added, stream)| added + f64::from(*stream)).collect();
        let got = device.f32_rows(&out, 2);
        let worst =
            got.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max);
        assert!(worst < 2e-6, "width {width}: off by {worst}");
        device.check_bf16(&out, 2);
    }
}

fn scaled(device: &mut Device, values: &[f32], by: f32) -> Planes {
    let mut x = device.plane_of(values.len(), values);
    (x.bf16, x.bf16_stride) = (device.planes(1, values.len()).bf16, x.f32_stride);
    let meta = rows_only(device, 1, &[]);
    scale(&mut *device.driver, meta, bound(1), &x, by).unwrap();
    x
}

#[test]
fn scales_and_soft_caps() {
    let Some(mut device) = device(&["rows"], Order::Ascending) else { return };
    let values = Random::new(5).vector(700, 90.0);
    let x = scaled(&mut device, &values, 0.3);
    let want: Vec<f32> = values.iter().map(|x| x * 0.3).collect();
    assert!(same(&device.f32_rows(&x, 1), &want));
    device.check_bf16(&x, 1);

    let x = device.plane_of(700, &values);
    let meta = rows_only(&mut device, 1, &[]);
    softcap(&mut *device.driver, meta, bound(1), &x, 30.0).unwrap();
    let want: Vec<f64> = values.iter().map(|x| 30.0 * (f64::from(*x) / 30.0).tanh()).collect();
    close("softcap", &device.f32_rows(&x, 1), &want);
}

#[test]
fn activations_gate() {
    let Some(mut device) = device(&["rows"], Order::Ascending) else { return };
    let activations =
        [Activation::Silu, Activation::GeluTanh, Activation::SwigluOai { alpha: 1.702, limit: 7.0 }];
    for (activation, width) in activations.into_iter().zip([40, 65, 600]) {
        let mut both = Random::new(11).vector(3 * 2 * width, 9.0);
        both[0] = f32::NAN;
        both[1] = -300.0;
        both[width + 2] = f32::NAN;
        let (from, out) = (device.plane_of(2 * width, &both), device.planes(3, width));
        let meta = rows_only(&mut device, 3, &[]);
        gate(&mut *device.driver, meta, bound(3), &from, activation, &out).unwrap();
        let got = device.f32_rows(&out, 3);
        assert!(got[0].is_nan() && got[2].is_nan(), "what is no number is not hidden");
        let want = both.chunks(2 * width).flat_map(|row| {
            let (gate, up) = row.split_at(width);
            gate.iter().zip(up).map(|(gate, up)| gated(activation, f64::from(*gate), f64::from(*up)))
        });
        let want: Vec<f64> = want.collect();
        close("gate", &got[3..], &want[3..]);
        assert!(got[1].abs() < 1e-20);
        device.check_bf16(&out, 3);
    }
}

fn gated(activation: Activation, gate: f64, up: f64) -> f64 {
    match activation {
        Activation::Silu => gate / (1.0 + (-gate).exp()) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            // 1 + tanh(x) without what cancels.
            gate / (1.0 + (-2.0 * inner).exp()) * up
        }
        Activation::ReluSquared => gate.max(0.0) * up,
        Activation::SwigluOai { alpha, limit } => {
            let (gate, up) = (gate.min(f64::from(limit)), up.clamp(-f64::from(limit), f64::from(limit)));
            gate / (1.0 + (-f64::from(alpha) * gate).exp()) * (up + 1.0)
        }
    }
}
