//! Every kernel against its chain.

use folio_model::backend::{DType, TensorView};
use folio_model::quant::{BlockFormat, Encoding};
use half::{bf16, f16};

use super::*;
use crate::groups::Source;
use crate::memory::{Floats, HugeBuffer};
use crate::pool::ThreadPool;
use crate::quant::pack::tests::{integers, random_blocks};

struct Case {
    rows: usize,
    cols: usize,
    tokens: usize,
    add: bool,
}

fn value(i: usize) -> f32 {
    ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0
}

fn encode(dtype: DType, x: f32) -> (Vec<u8>, f32) {
    match dtype {
        DType::F32 => (x.to_le_bytes().to_vec(), x),
        DType::F16 => (f16::from_f32(x).to_le_bytes().to_vec(), f16::from_f32(x).to_f32()),
        DType::BF16 => (bf16::from_f32(x).to_le_bytes().to_vec(), bf16::from_f32(x).to_f32()),
    }
}

impl Case {
    fn x(&self, token: usize, col: usize) -> f32 {
        // Columns of very different size, and a block of zeros.
        value(token * self.cols + col + 5) * if col / 32 == 1 { 0.0 } else { 10f32.powi(col as i32 / 32 % 3) }
    }

    fn old(&self, token: usize, row: usize) -> f32 {
        value(token * self.rows + row + 3)
    }

    /// Bias and residual.
    fn finish(&self, token: usize, row: usize, acc: f32, bias: &[f32]) -> f32 {
        let biased = acc + bias[row];
        if self.add { biased + self.old(token, row) } else { biased }
    }

    fn bias(&self) -> Vec<f32> {
        (0..self.rows).map(|r| value(r + 77)).collect()
    }

    fn each<T>(&self, f: impl Fn(usize, usize) -> T) -> Vec<T> {
        (0..self.tokens * self.rows).map(|i| f(i / self.rows, i % self.rows)).collect()
    }
}

fn compute(case: &Case, isa: Isa, weight: &PackedMatrix, bias: &[f32], pool: &mut ThreadPool) -> Vec<f32> {
    compute_from(case, isa, weight, bias, &|t, k| case.x(t, k), pool)
}

/// With the activation of both halves of the rows.
fn compute_gated(
    case: &Case,
    isa: Isa,
    weight: &PackedMatrix,
    bias: &[f32],
    pool: &mut ThreadPool,
) -> Vec<f32> {
    let halved = Case { rows: case.rows / 2, ..*case };
    let then = Then::Gate(Activation::Silu);
    product(&halved, isa, weight, (bias, then), &|t, k| case.x(t, k), pool)
}

/// With activations `x(token, column)`.
fn compute_from(
    case: &Case,
    isa: Isa,
    weight: &PackedMatrix,
    bias: &[f32],
    x_of: &dyn Fn(usize, usize) -> f32,
    pool: &mut ThreadPool,
) -> Vec<f32> {
    let then = if case.add { Then::Add } else { Then::Store };
    product(case, isa, weight, (bias, then), x_of, pool)
}

/// Outputs of `case`, which has as many rows as they are wide: the same however a machine likes one token to be read.
fn product(
    case: &Case,
    isa: Isa,
    weight: &PackedMatrix,
    what: (&[f32], Then),
    x_of: &dyn Fn(usize, usize) -> f32,
    pool: &mut ThreadPool,
) -> Vec<f32> {
    let got = product_read(case, isa, Ahead::here(), weight, what, x_of, pool);
    if case.tokens == 1 {
        for ahead in Ahead::ALL {
            let other = product_read(case, isa, ahead, weight, what, x_of, pool);
            assert_bits(&format!("{ahead:?}"), case, &other, &got);
        }
    }
    got
}

#[allow(clippy::too_many_arguments, reason = "what a product is of")]
fn product_read(
    case: &Case,
    isa: Isa,
    ahead: Ahead,
    weight: &PackedMatrix,
    (bias, then): (&[f32], Then),
    x_of: &dyn Fn(usize, usize) -> f32,
    pool: &mut ThreadPool,
) -> Vec<f32> {
    let x = Floats::zeroed(case.tokens, case.cols).expect("memory");
    let out = Floats::dense(case.tokens, case.rows).expect("memory");
    let scratch: Vec<Floats> =
        (0..pool.count()).map(|_| Floats::dense(1, SCRATCH).expect("memory")).collect();
    for t in 0..case.tokens {
        for k in 0..case.cols {
            // SAFETY: inside the row.
            unsafe { *x.view().row(t).add(k) = x_of(t, k) };
        }
        for r in 0..case.rows {
            // SAFETY: inside the row.
            unsafe { *out.view().row(t).add(r) = case.old(t, r) };
        }
    }
    let groups = Groups::new(weight, isa, case.tokens);
    let packed = HugeBuffer::zeroed(groups.bytes()).expect("memory");
    let source = Source { rows: x.view(), picked: None, norm: None };
    let out_rows = out.view();
    let claims = Claims::default();
    pool.run(&|w| {
        let to = packed.ptr();
        // SAFETY: sized just above; every worker is here.
        unsafe { groups.pack(isa, w.split(), &source, to) };
        w.barrier();
        let (x, bias) = (to.cast_const(), Some(bias));
        let linear = Linear { isa, ahead, weight, bias, x, groups, out: out_rows, then, deltas: None };
        let share = Share { claims: &claims, workers: w.count(), unit: TILE_ROWS };
        // SAFETY: packed with this `isa`; every worker has its own scratch.
        unsafe { linear.run(share, scratch[w.index()].view().row(0), |_| ()) };
    })
    .expect("no panic");
    // SAFETY: the product is done.
    unsafe { out.view().dense(case.tokens) }.to_vec()
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

fn assert_bits(what: &str, case: &Case, got: &[f32], want: &[f32]) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let (t, r) = (i / case.rows, i % case.rows);
        let Case { rows, cols, tokens, add } = case;
        assert_eq!(
            got.to_bits(),
            want.to_bits(),
            "{what} [{rows}, {cols}] x {tokens} add {add}: token {t} row {r}: {got} is not {want}"
        );
    }
}

/// Weights that are floats: one chain over the columns.
fn check_floats(encoding: Encoding, case: &Case, pool: &mut ThreadPool) {
    let (mut bytes, mut weights) = (Vec::new(), Vec::new());
    match encoding {
        Encoding::Plain(dtype) => {
            for i in 0..case.rows * case.cols {
                let (b, w) = encode(dtype, value(i));
                bytes.extend(b);
                weights.push(w);
            }
        }
        Encoding::Block(format) => {
            bytes = random_blocks(format, case.rows * case.cols / format.values(), case.rows as u64);
            weights.resize(case.rows * case.cols, 0.0);
            format.decode(&bytes, &mut weights);
        }
    }
    let shape = [case.rows, case.cols];
    let view = TensorView { encoding, shape: &shape, bytes: &bytes, order: None };
    let weight = PackedMatrix::pack(&[view], None, pool).expect("packed");
    let mut row = vec![0.0; case.cols];
    for (r, want) in weights.chunks_exact(case.cols).enumerate() {
        weight.lookup(r, &mut row);
        assert_eq!(row, want, "{encoding} row {r}");
    }
    let bias = case.bias();
    let at = |row: usize, col: usize| weights[row * case.cols + col];
    let chain = case.each(|t, r| {
        let acc = (0..case.cols).fold(0f32, |acc, k| at(r, k).mul_add(case.x(t, k), acc));
        case.finish(t, r, acc, &bias)
    });
    let exact = case.each(|t, r| {
        let sum = (0..case.cols).map(|k| f64::from(at(r, k)) * f64::from(case.x(t, k))).sum::<f64>();
        sum + f64::from(case.finish(t, r, 0.0, &bias))
    });
    for isa in isas() {
        let got = compute(case, isa, &weight, &bias, pool);
        assert_bits(&format!("{isa:?} {encoding}"), case, &got, &chain);
        for (got, exact) in got.iter().zip(&exact) {
            assert!((f64::from(*got) - exact).abs() <= 1e-4 * (case.cols as f64 + 4.0));
        }
    }
}

#[test]
fn every_shape_type_and_set_is_the_one_chain() {
    let mut pool = ThreadPool::new(2).expect("pool");
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (rows, cols) in [(1, 1), (16, 2), (17, 7), (90, 33), (130, 64)] {
            for tokens in 1..=33 {
                check_floats(
                    Encoding::Plain(dtype),
                    &Case { rows, cols, tokens, add: tokens % 2 == 0 },
                    &mut pool,
                );
            }
        }
    }
}

#[test]
fn chains_interrupted_by_slabs_and_token_blocks_are_exact() {
    let mut pool = ThreadPool::new(2).expect("pool");
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        check_floats(
            Encoding::Plain(dtype),
            &Case { rows: 300, cols: 1101, tokens: 14, add: true },
            &mut pool,
        );
        check_floats(
            Encoding::Plain(dtype),
            &Case { rows: 35, cols: 515, tokens: 2 * TOKEN_BLOCK + 5, add: false },
            &mut pool,
        );
    }
}

const FP8: [BlockFormat; 2] = [BlockFormat::Fp8x32, BlockFormat::Fp8x128];

#[test]
fn fp8_weights_are_the_one_chain_too() {
    let mut pool = ThreadPool::new(2).expect("pool");
    for format in FP8 {
        let encoding = Encoding::Block(format);
        for tokens in 1..=33 {
            let case = Case { rows: 90, cols: 256, tokens, add: tokens % 2 == 0 };
            check_floats(encoding, &case, &mut pool);
        }
        check_floats(encoding, &Case { rows: 1, cols: 128, tokens: 2, add: true }, &mut pool);
        // Slabs of columns and blocks of tokens.
        check_floats(encoding, &Case { rows: 300, cols: 1152, tokens: 14, add: true }, &mut pool);
        let tokens = 2 * TOKEN_BLOCK + 5;
        check_floats(encoding, &Case { rows: 35, cols: 640, tokens, add: false }, &mut pool);
    }
}

/// All codes under all kinds of scales, also those whose values are subnormal.
#[test]
fn every_code_of_fp8_has_its_value_on_every_set() {
    let mut pool = ThreadPool::new(1).expect("pool");
    for d in [1.0f32, -0.0371, 1e-40, 3e-38, 1.2e36, 0.0] {
        let (mut bytes, mut want) = (Vec::new(), vec![0.0; 256 * 32]);
        for row in 0..=255u8 {
            bytes.extend(d.to_le_bytes());
            // One code in column 3, others than numbers left out.
            bytes.extend((0..32).map(|col| if col == 3 && row & 0x7f != 0x7f { row } else { 0 }));
        }
        BlockFormat::Fp8x32.decode(&bytes, &mut want);
        let encoding = Encoding::Block(BlockFormat::Fp8x32);
        let view = TensorView { encoding, shape: &[256, 32], bytes: &bytes, order: None };
        let weight = PackedMatrix::pack(&[view], None, &mut pool).expect("packed");
        let case = Case { rows: 256, cols: 32, tokens: 1, add: false };
        for isa in isas() {
            let zeros = vec![0.0; 256];
            let got = compute_from(&case, isa, &weight, &zeros, &|_, _| 1.0, &mut pool);
            for (row, got) in got.iter().enumerate() {
                assert_eq!(*got, want[32 * row + 3], "{isa:?} code {row:#x} scale {d}");
            }
        }
    }
}

/// The integers of 32 activations and what one is worth, as `quant::activations` promises.
fn rounded(case: &Case, token: usize, block: usize) -> ([i32; 32], f32) {
    let x: [f32; 32] = std::array::from_fn(|i| case.x(token, 32 * block + i));
    let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
    if amax < 1e-30 {
        return ([0; 32], 0.0);
    }
    (x.map(|x| (x * (127.0 / amax)).round_ties_even() as i32), amax / 127.0)
}

/// The chain of Q8_0 and Q4_0, from the bytes of a row.
fn chain_of(format: BlockFormat, row: &[u8], case: &Case, token: usize) -> f32 {
    let mut acc = 0f32;
    for (block, bytes) in row.chunks_exact(format.bytes()).enumerate() {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let (x, x_scale) = rounded(case, token, block);
        let q = |i: usize| match format {
            BlockFormat::Q8_0 => i32::from(bytes[2 + i] as i8),
            _ => i32::from(bytes[2 + i % 16] >> (4 * (i / 16)) & 15) - 8,
        };
        let sum: i32 = (0..32).map(|i| q(i) * x[i]).sum();
        acc = (sum as f32).mul_add(d * x_scale, acc);
    }
    acc
}

/// The sum of decoded weights and rounded activations, and of their magnitudes, in f64.
fn exact_of(format: BlockFormat, row: &[u8], case: &Case, token: usize) -> (f64, f64) {
    let mut weights = vec![0f32; case.cols];
    format.decode(row, &mut weights);
    let (mut sum, mut size) = (0f64, 0f64);
    for (block, weights) in weights.chunks_exact(32).enumerate() {
        let (x, scale) = rounded(case, token, block);
        for (w, x) in weights.iter().zip(x) {
            let product = f64::from(*w) * f64::from(x) * f64::from(scale);
            sum += product;
            size += product.abs();
        }
    }
    (sum, size)
}

/// Rows of the given formats, one after the other, against the chain, each other and the decoded values.
fn check_quantized(parts: &[(BlockFormat, usize)], case: &Case, pool: &mut ThreadPool) {
    assert_eq!(case.rows, parts.iter().map(|part| part.1).sum::<usize>());
    let stored: Vec<Vec<u8>> = parts
        .iter()
        .map(|(format, rows)| random_blocks(*format, rows * case.cols / format.values(), *rows as u64 + 3))
        .collect();
    let shapes: Vec<[usize; 2]> = parts.iter().map(|part| [part.1, case.cols]).collect();
    let views: Vec<TensorView<'_>> = (0..parts.len())
        .map(|i| TensorView {
            encoding: Encoding::Block(parts[i].0),
            shape: &shapes[i],
            bytes: &stored[i],
            order: None,
        })
        .collect();
    let weight = PackedMatrix::pack(&views, None, pool).expect("packed");
    let rows: Vec<(BlockFormat, &[u8])> = parts
        .iter()
        .zip(&stored)
        .flat_map(|((format, _), bytes)| {
            let row = case.cols / format.values() * format.bytes();
            bytes.chunks_exact(row).map(move |row| (*format, row))
        })
        .collect();
    let bias = case.bias();
    let scalar = compute(case, Isa::Scalar, &weight, &bias, pool);
    let what = format!("{parts:?}");
    for isa in isas().filter(|isa| *isa != Isa::Scalar) {
        assert_bits(&format!("{isa:?} {what}"), case, &compute(case, isa, &weight, &bias, pool), &scalar);
    }
    for (i, got) in scalar.iter().enumerate() {
        let (t, r) = (i / case.rows, i % case.rows);
        let (format, row) = rows[r];
        if matches!(format, BlockFormat::Q8_0 | BlockFormat::Q4_0) {
            let want = case.finish(t, r, chain_of(format, row, case, t), &bias);
            assert_eq!(got.to_bits(), want.to_bits(), "{what} token {t} row {r}: {got} is not {want}");
        }
        let (sum, size) = exact_of(format, row, case, t);
        let want = sum + f64::from(case.finish(t, r, 0.0, &bias));
        // Minima are taken out of sums several times as large.
        assert!((f64::from(*got) - want).abs() <= 1e-5 * (4.0 * size + 1.0), "{what} row {r}: {got}, {want}");
    }
}

#[test]
fn every_block_format_and_number_of_tokens_is_one_chain_on_every_set() {
    let mut pool = ThreadPool::new(2).expect("pool");
    for format in integers() {
        for tokens in (1..=17).chain([23, 33]) {
            let case = Case { rows: 35, cols: 256, tokens, add: tokens % 2 == 0 };
            check_quantized(&[(format, 35)], &case, &mut pool);
        }
        let few = Case { rows: 1, cols: format.values(), tokens: 2, add: true };
        check_quantized(&[(format, 1)], &few, &mut pool);
    }
}

#[test]
fn quantized_chains_interrupted_by_slabs_and_token_blocks_are_exact() {
    let mut pool = ThreadPool::new(2).expect("pool");
    for format in [BlockFormat::Q8_0, BlockFormat::Q4_0] {
        let case = Case { rows: 300, cols: SLAB_COLS[1] + 96, tokens: 19, add: true };
        check_quantized(&[(format, 300)], &case, &mut pool);
        let tokens = 2 * TOKEN_BLOCK + 5;
        check_quantized(&[(format, 35)], &Case { rows: 35, cols: 544, tokens, add: false }, &mut pool);
    }
    check_quantized(
        &[(BlockFormat::Q4_K, 20), (BlockFormat::Q6_K, 20)],
        &Case { rows: 40, cols: SLAB_COLS[1] + 256, tokens: TOKEN_BLOCK + 7, add: true },
        &mut pool,
    );
}

#[test]
fn rows_of_several_formats_make_one_matrix() {
    let mut pool = ThreadPool::new(3).expect("pool");
    let parts = [(BlockFormat::Q4_K, 70), (BlockFormat::Q6_K, 5), (BlockFormat::Q8_0, 33)];
    for tokens in [1, 2, 5, 16, 40] {
        check_quantized(&parts, &Case { rows: 108, cols: 512, tokens, add: tokens == 5 }, &mut pool);
    }
}

struct Gates<'a>(&'a [f32], &'a [f32]);

impl Task for Gates<'_> {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<S: Simd>(self) -> Vec<f32> {
        let one = |(gate, up): (&f32, &f32)| {
            S::max_lane(gated::<S>(Activation::Silu, S::splat(*gate), S::splat(*up)))
        };
        self.0.iter().zip(self.1).map(one).collect()
    }
}

/// Rows of gates that end inside a panel or a tile, matrices of two formats, one group of tokens and many.
#[test]
fn a_gated_product_has_the_bits_of_the_product_and_the_activation_of_its_halves() {
    let mut pool = ThreadPool::new(2).expect("pool");
    for (gates, cols) in [(72, 33), (5, 32), (64, 64), (300, 544)] {
        let shape = [gates, cols];
        for encoding in [
            [Encoding::Plain(DType::BF16); 2],
            [Encoding::Block(BlockFormat::Q4_0); 2],
            [BlockFormat::Q8_0, BlockFormat::Q4_0].map(Encoding::Block),
        ] {
            if encoding[0].bytes(cols).is_none() {
                continue;
            }
            let bytes = encoding.map(|encoding| match encoding {
                Encoding::Plain(dtype) => (0..gates * cols).flat_map(|i| encode(dtype, value(i)).0).collect(),
                Encoding::Block(format) => random_blocks(format, gates * cols / format.values(), 9),
            });
            let part =
                |i: usize| TensorView { encoding: encoding[i], shape: &shape, bytes: &bytes[i], order: None };
            let weight = PackedMatrix::pack(&[part(0), part(1)], None, &mut pool).expect("packed");
            for tokens in [1, 2, 7, 20, TOKEN_BLOCK + 7] {
                let case = Case { rows: 2 * gates, cols, tokens, add: false };
                let bias = case.bias();
                let both = compute(&case, Isa::Scalar, &weight, &bias, &mut pool);
                let want: Vec<f32> = both
                    .chunks_exact(2 * gates)
                    .flat_map(|row| dispatch(Isa::Scalar, Gates(&row[..gates], &row[gates..])))
                    .collect();
                for isa in isas() {
                    let got = compute_gated(&case, isa, &weight, &bias, &mut pool);
                    let what = format!("{isa:?} {encoding:?}, gated");
                    assert_bits(&what, &Case { rows: gates, ..case }, &got, &want);
                }
            }
        }
    }
}

/// Weights whose columns have an order of their own multiply the activations of that order, and nothing else changes.
#[test]
fn an_order_of_columns_is_an_order_of_activations() {
    let mut pool = ThreadPool::new(2).expect("pool");
    let plain = [DType::F32, DType::F16, DType::BF16].map(|dtype| (Encoding::Plain(dtype), [7, 64]));
    let blocks = BlockFormat::ALL.map(|format| (Encoding::Block(format), [256, 512]));
    for (encoding, widths) in plain.into_iter().chain(blocks) {
        for cols in widths {
            let shape = [35, cols];
            let bytes: Vec<u8> = match encoding {
                Encoding::Plain(dtype) => (0..35 * cols).flat_map(|i| encode(dtype, value(i)).0).collect(),
                Encoding::Block(format) => random_blocks(format, 35 * cols / format.values(), 5),
            };
            // 3 has no factor in common with any of the widths.
            let order: Vec<u32> = (0..cols).map(|j| ((3 * j + 2) % cols) as u32).collect();
            let view = |order| TensorView { encoding, shape: &shape, bytes: &bytes, order };
            let own = PackedMatrix::pack(&[view(Some(&order))], None, &mut pool).expect("packed");
            let stored = PackedMatrix::pack(&[view(None)], None, &mut pool).expect("packed");
            for tokens in (1..=9).chain([16, 17, 33]) {
                let case = Case { rows: 35, cols, tokens, add: tokens % 2 == 0 };
                let bias = case.bias();
                let gathered = |t: usize, j: usize| case.x(t, order[j] as usize);
                for isa in isas() {
                    let want = compute_from(&case, isa, &stored, &bias, &gathered, &mut pool);
                    let got = compute(&case, isa, &own, &bias, &mut pool);
                    assert_bits(&format!("{isa:?} {encoding}"), &case, &got, &want);
                    assert_ne!(got, compute(&case, isa, &stored, &bias, &mut pool), "the order matters");
                }
            }
            let (mut got, mut want) = (vec![0.0; cols], vec![0.0; cols]);
            for row in 0..35 {
                own.lookup(row, &mut got);
                stored.lookup(row, &mut want);
                assert!((0..cols).all(|j| got[order[j] as usize] == want[j]), "{encoding} row {row}");
            }
        }
    }
}
