//! Mixtures of experts on the emulator: against sums in f64, and the bits of a row alone and among others.

mod common;

use common::{device, down_f32, up, value};
use folio_cuda::experts::{self, Mixture};
use folio_cuda::linear::{self, DeviceMatrix, Output};
use folio_cuda::{Arg, Driver, Launch, Meta, Planes, RowBound};
use folio_emulator::{Order, available};
use folio_model::backend::{DType, TensorView};
use folio_model::program::{Activation, ExpertsSpec, MatrixId, Routing};
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::testing::blocks;
use half::{bf16, f16};

const MODULES: &[&str] = &["rows", "experts", "experts_plain", "experts_eight", "experts_four"];

/// Rows in one encoding, and their exact values.
fn stored(encoding: Encoding, rows: usize, cols: usize, seed: usize) -> (Vec<u8>, Vec<f32>) {
    let values: Vec<f32> = (0..rows * cols).map(|i| value(i * 3 + seed) * 0.2).collect();
    match encoding {
        Encoding::Block(format) => {
            let bytes = blocks::encode(format, &values);
            let mut exact = vec![0.0; values.len()];
            format.decode(&bytes, &mut exact);
            (bytes, exact)
        }
        Encoding::Plain(DType::F32) => (values.iter().flat_map(|x| x.to_le_bytes()).collect(), values),
        Encoding::Plain(DType::F16) => {
            let halves = values.iter().map(|x| f16::from_f32(*x));
            (halves.clone().flat_map(|x| x.to_le_bytes()).collect(), halves.map(f16::to_f32).collect())
        }
        Encoding::Plain(DType::BF16) => {
            let halves = values.iter().map(|x| bf16::from_f32(*x));
            (halves.clone().flat_map(|x| x.to_le_bytes()).collect(), halves.map(bf16::to_f32).collect())
        }
    }
}

struct Case {
    device: Box<dyn Driver>,
    spec: ExpertsSpec,
    hidden: usize,
    gate_up: DeviceMatrix,
    down: DeviceMatrix,
    weights: [Vec<f32>; 2],
    biases: [Vec<f32>; 2],
}

impl Case {
    fn new(
        order: Order,
        encoding: Encoding,
        (count, chosen, hidden, inner): (usize, usize, usize, usize),
        routing: Routing,
    ) -> Self {
        let mut device = device(order, MODULES);
        let spec = ExpertsSpec {
            count,
            chosen,
            routing,
            choice_bias: None,
            groups: None,
            sum_eps: 0.0,
            scale: 1.0,
            scales: None,
            inner,
            activation: Activation::Silu,
            gate_up: MatrixId(0),
            gate_up_bias: None,
            down: MatrixId(1),
            down_bias: None,
        };
        assert!(experts::refusal(&spec, 130).is_none());
        let mut load = |rows: usize, cols: usize, seed| {
            let (bytes, values) = stored(encoding, rows, cols, seed);
            let view = TensorView { encoding, shape: &[rows, cols], bytes: &bytes, order: None };
            (linear::load(&mut *device, "a", &[view]).unwrap(), values)
        };
        let (gate_up, first) = load(2 * count * inner, hidden, 1);
        let (down, second) = load(count * hidden, inner, 2);
        let biases = [2 * count * inner, count * hidden].map(|len| (0..len).map(|i| value(i + 9)).collect());
        Self { device, spec, hidden, gate_up, down, weights: [first, second], biases }
    }

    fn floats(&self) -> bool {
        self.gate_up.reads_floats()
    }

    fn x(&self, row: usize) -> Vec<f32> {
        let x = (0..self.hidden).map(|column| value(row * 41 + column * 7 + 5));
        x.map(|x| if self.floats() { x } else { bf16::from_f32(x).to_f32() }).collect()
    }

    /// Coarse, so that some are equal.
    fn logits(&self, row: usize) -> Vec<f32> {
        (0..self.spec.count).map(|expert| (value(row * 13 + expert * 29) * 8.0).round() / 4.0).collect()
    }

    fn old(&self, row: usize, column: usize) -> f32 {
        value(row * 17 + column)
    }

    /// `[rows, hidden]` of a launch made for `bound` rows.
    fn mix(&mut self, rows: &[usize], bound: usize, bias: bool, add: bool) -> Vec<f32> {
        let plane = |values: &mut dyn Iterator<Item = Vec<f32>>, stride: usize| -> Vec<f32> {
            values
                .flat_map(|mut row| {
                    row.resize(stride, f32::NAN);
                    row
                })
                .collect()
        };
        let stride = self.hidden.next_multiple_of(32);
        let x = plane(
            &mut rows.iter().map(|row| {
                let mut x = self.x(*row);
                x.resize(stride, 0.0);
                x
            }),
            stride,
        );
        let logits = plane(&mut rows.iter().map(|row| self.logits(*row)), self.spec.count + 3);
        let device = &mut *self.device;
        let meta = Meta(up(device, &[0, rows.len() as u32], u32::to_le_bytes));
        let x = match self.gate_up.reads_floats() {
            true => Planes {
                f32: Some(up(device, &x, f32::to_le_bytes)),
                f32_stride: stride as u32,
                ..Planes::default()
            },
            false => {
                let at = up(device, &x, |x: f32| bf16::from_f32(x).to_le_bytes());
                Planes { bf16: Some(at), bf16_stride: stride as u32, ..Planes::default() }
            }
        };
        let f32_stride = self.spec.count as u32 + 3;
        let logits =
            Planes { f32: Some(up(device, &logits, f32::to_le_bytes)), f32_stride, ..Planes::default() };
        let old: Vec<f32> =
            rows.iter().flat_map(|row| (0..self.hidden).map(|column| value(*row * 17 + column))).collect();
        let out = up(device, &old, f32::to_le_bytes);
        let biases = [0, 1].map(|i| bias.then(|| up(device, &self.biases[i], f32::to_le_bytes)));
        let bytes = experts::workspace_bytes(&self.spec, &self.gate_up, &self.down, bound);
        let workspace = device.allocate(bytes).unwrap();
        let mixture = Mixture {
            spec: &self.spec,
            gate_up: &self.gate_up,
            gate_up_bias: biases[0],
            down: &self.down,
            down_bias: biases[1],
            workspace,
        };
        let bound = RowBound { bound: bound as u32, count_word: 1 };
        let to = Output { at: out, stride: self.hidden as u32, add };
        experts::mix(device, meta, bound, (&x, &logits), &mixture, to).unwrap();
        let found = down_f32(device, out, rows.len() * self.hidden);
        device.free(workspace).unwrap();
        found
    }

    fn expected(&self, row: usize, bias: bool, add: bool) -> Vec<f64> {
        let (spec, logits, x) = (&self.spec, self.logits(row), self.x(row));
        let mut order: Vec<usize> = (0..spec.count).collect();
        // Zeros of both signs are equal.
        order.sort_by(|a, b| (logits[*b] + 0.0).total_cmp(&(logits[*a] + 0.0)).then(a.cmp(b)));
        let exp = |expert: usize| f64::from(logits[expert]).exp();
        let among = match spec.routing {
            Routing::AmongChosen => spec.chosen,
            _ => spec.count,
        };
        let sum: f64 = order[..among].iter().map(|expert| exp(*expert)).sum();
        let dot = |matrix: usize, row: usize, x: &[f32]| -> f64 {
            let weights = &self.weights[matrix][row * x.len()..][..x.len()];
            let sum: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            sum + if bias { f64::from(self.biases[matrix][row]) } else { 0.0 }
        };
        let mut out: Vec<f64> =
            (0..self.hidden).map(|column| if add { f64::from(self.old(row, column)) } else { 0.0 }).collect();
        for expert in &order[..spec.chosen] {
            let inner: Vec<f32> = (0..spec.inner)
                .map(|i| {
                    let gate = dot(0, expert * spec.inner + i, &x);
                    let up = dot(0, (spec.count + expert) * spec.inner + i, &x);
                    let gated = (gate / (1.0 + (-gate).exp()) * up) as f32;
                    if self.floats() { gated } else { bf16::from_f32(gated).to_f32() }
                })
                .collect();
            for (column, out) in out.iter_mut().enumerate() {
                *out += exp(*expert) / sum * dot(1, expert * self.hidden + column, &inner);
            }
        }
        out
    }

    fn check(&mut self, rows: usize, bias: bool, add: bool, what: &str) {
        let list: Vec<usize> = (0..rows).collect();
        let found = self.mix(&list, rows, bias, add);
        // What is a tie to the rounding of a gated value may go either way.
        let tolerance = if self.floats() { 1e-5 } else { 2e-3 };
        for (row, found) in found.chunks(self.hidden).enumerate() {
            for (found, want) in found.iter().zip(self.expected(row, bias, add)) {
                assert!(
                    (f64::from(*found) - want).abs() < tolerance * (1.0 + want.abs()),
                    "{what}, row {row}: {found}, not {want}"
                );
            }
        }
    }
}

fn encodings() -> impl Iterator<Item = Encoding> {
    let plain = [DType::F32, DType::F16, DType::BF16].map(Encoding::Plain);
    let blocks = [BlockFormat::Int4x32, BlockFormat::Uint4x32, BlockFormat::Int8x32, BlockFormat::Fp8x32];
    plain.into_iter().chain(blocks.map(Encoding::Block))
}

#[test]
fn a_mixture_is_the_sum_of_what_the_chosen_say() {
    if !available() {
        return;
    }
    for encoding in encodings() {
        let plain = matches!(encoding, Encoding::Plain(_));
        // Ranges of experts that begin inside of a tile, where columns need not be whole blocks.
        let sizes = if plain { (7, 3, 40, 24) } else { (7, 3, 64, 32) };
        for routing in [Routing::AmongChosen, Routing::AmongAll] {
            let mut case = Case::new(Order::Ascending, encoding, sizes, routing);
            let what = format!("{encoding} {routing:?}");
            case.check(5, true, true, &what);
            case.check(60, false, false, &what);
        }
    }
    let mut case =
        Case::new(Order::Ascending, Encoding::Plain(DType::F32), (70, 34, 32, 16), Routing::AmongChosen);
    case.check(3, true, false, "more experts and slots than lanes");
    let mut case =
        Case::new(Order::Ascending, Encoding::Plain(DType::BF16), (2, 2, 32, 160), Routing::AmongChosen);
    case.check(100, true, true, "many rows of one expert");
}

#[test]
fn a_row_is_the_same_alone_and_among_others() {
    if !available() {
        return;
    }
    for encoding in encodings() {
        let new = |order| Case::new(order, encoding, (6, 2, 96, 32), Routing::AmongChosen);
        let mut cases = [Order::Ascending, Order::Shuffled { seed: 5 }].map(new);
        let alone: Vec<f32> = (0..70).flat_map(|row| cases[0].mix(&[row], 1, true, true)).collect();
        for rows in [2, 9, 31, 70] {
            let list: Vec<usize> = (0..rows).map(|i| i * 9 % 70).collect();
            for (case, bound) in cases.iter_mut().zip([rows, 100]) {
                let found = case.mix(&list, bound, true, true);
                for (row, found) in list.iter().zip(found.chunks(96)) {
                    let want = &alone[96 * row..][..96];
                    let same = found.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{encoding} {rows} {row}");
                }
            }
        }
    }
}

/// A row of NaN is that row's trouble: it gets some experts, and nobody else notices.
#[test]
fn a_row_without_numbers_harms_no_other() {
    if !available() {
        return;
    }
    let mut device = device(Order::Ascending, MODULES);
    let logits: Vec<f32> = (0..20).map(|i| if i / 5 == 1 { f32::NAN } else { i as f32 }).collect();
    let (logits, meta) =
        (up(&mut *device, &logits, f32::to_le_bytes), up(&mut *device, &[4], u32::to_le_bytes));
    let [header, picks, weights] = [2, 8, 8].map(|words| device.allocate(4 * words).unwrap());
    let args = [
        Arg::Ptr(meta),
        Arg::U32(0),
        Arg::Ptr(logits),
        Arg::U32(5),
        Arg::U32(5),
        Arg::U32(2),
        Arg::U32(0),
        Arg::Ptr(header),
        Arg::Ptr(picks),
        Arg::Ptr(weights),
    ];
    device.launch(&Launch { kernel: "route", grid: [6, 1, 1], threads: 32, shared: 0, args: &args }).unwrap();
    let picks: Vec<u32> = down_f32(&mut *device, picks, 8).into_iter().map(f32::to_bits).collect();
    assert_eq!(picks, [4, 3, 0, 1, 4, 3, 4, 3]);
    let weights = down_f32(&mut *device, weights, 8);
    assert!(weights.iter().enumerate().all(|(i, weight)| weight.is_nan() == (i / 2 == 1)));
}
