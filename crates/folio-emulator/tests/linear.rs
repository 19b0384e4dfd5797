//! Products and embeddings on the emulator, against f64 over the exactly decoded weights.

mod common;

use common::{device, down_f32, up, value};
use folio_cuda::linear::{self, DeviceMatrix, Output, Scratch};
use folio_cuda::{Driver, Meta, Planes, RowBound};
use folio_emulator::{Order, available};
use folio_model::backend::{DType, TensorView};
use folio_model::dummy;
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::testing::blocks;
use half::{bf16, f16};

const MODULES: &[&str] = &["linear_plain", "linear_eight", "linear_four"];

/// Bytes that look random.
struct Bytes(u32);

impl Bytes {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 24) as u8
    }
}

/// Rows of one encoding: their bytes, and their values as stored.
struct Stored {
    encoding: Encoding,
    shape: [usize; 2],
    bytes: Vec<u8>,
    values: Vec<f32>,
}

impl Stored {
    fn new(encoding: Encoding, rows: usize, cols: usize) -> Self {
        let count = rows * cols;
        let (mut bytes, mut values) = (Vec::new(), vec![0.0; count]);
        match encoding {
            Encoding::Block(format) => {
                let mut random = Bytes(count as u32 + 1);
                for _ in 0..count / format.values() {
                    let mut block: Vec<u8> = (0..format.bytes()).map(|_| random.byte()).collect();
                    tame(format, &mut block, &mut random);
                    bytes.extend(block);
                }
                format.decode(&bytes, &mut values);
            }
            Encoding::Plain(dtype) => {
                for (i, x) in values.iter_mut().enumerate() {
                    *x = value(3 * i + 1) * 10f32.powi(i as i32 % 5 - 2);
                    let (stored, exact) = plain(dtype, *x);
                    bytes.extend(stored);
                    *x = exact;
                }
            }
        }
        Self { encoding, shape: [rows, cols], bytes, values }
    }

    fn view<'a>(&'a self, order: Option<&'a [u32]>) -> TensorView<'a> {
        TensorView { encoding: self.encoding, shape: &self.shape, bytes: &self.bytes, order }
    }
}

fn plain(dtype: DType, x: f32) -> (Vec<u8>, f32) {
    match dtype {
        DType::F32 => (x.to_le_bytes().to_vec(), x),
        DType::F16 => (f16::from_f32(x).to_le_bytes().to_vec(), f16::from_f32(x).to_f32()),
        DType::BF16 => (bf16::from_f32(x).to_le_bytes().to_vec(), bf16::from_f32(x).to_f32()),
    }
}

/// Scales that models have, in the place of random bytes.
fn tame(format: BlockFormat, block: &mut [u8], random: &mut Bytes) {
    let mut scale = |at: usize, block: &mut [u8]| {
        let x = f32::from(random.byte()) / 4096.0 + 0.001;
        block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
    };
    match format {
        BlockFormat::Q4_0
        | BlockFormat::Q5_0
        | BlockFormat::Q8_0
        | BlockFormat::IQ4_NL
        | BlockFormat::IQ4_XS
        | BlockFormat::IQ2_XXS
        | BlockFormat::IQ2_XS
        | BlockFormat::IQ2_S
        | BlockFormat::IQ3_XXS
        | BlockFormat::IQ3_S
        | BlockFormat::IQ1_S => {
            scale(0, block);
        }
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4_K | BlockFormat::Q5_K => {
            scale(0, block);
            scale(2, block);
        }
        BlockFormat::Q2_K => {
            scale(80, block);
            scale(82, block);
        }
        BlockFormat::Q3_K => scale(108, block),
        BlockFormat::Q6_K => scale(208, block),
        BlockFormat::TQ1_0 => scale(52, block),
        BlockFormat::TQ2_0 => scale(64, block),
        BlockFormat::MXFP4 => block[0] = 120 + block[0] % 8,
        BlockFormat::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale = 0x10 + *scale % 32),
        BlockFormat::IQ1_M => {
            // Four bits of the scale in each of four words.
            for (word, bits) in [0u8, 0, 4, 2].into_iter().enumerate() {
                block[49 + 2 * word] = block[49 + 2 * word] & 15 | bits << 4;
            }
        }
        _ => {
            let scales = if format == BlockFormat::Fp4x16 { &mut block[..8] } else { &mut block[..4] };
            for scale in scales.as_chunks_mut::<4>().0 {
                *scale = ((f32::from(random.byte()) - 100.0) / 1000.0).to_le_bytes();
            }
            if matches!(format, BlockFormat::Uint4x32 | BlockFormat::Uint4x128) {
                block[4] %= 17;
            }
            let fp8 = matches!(format, BlockFormat::Fp8x32 | BlockFormat::Fp8x128);
            // NaN has a test of its own.
            block[4..].iter_mut().filter(|code| fp8 && **code & 0x7f == 0x7f).for_each(|code| *code = 0x38);
        }
    }
}

/// A matrix of stacked parts, its values where the model has them, and a device that holds it.
struct Case {
    device: Box<dyn Driver>,
    matrix: DeviceMatrix,
    values: Vec<f32>,
    rows: usize,
    cols: usize,
}

impl Case {
    fn new(order: Order, parts: &[Stored], columns: Option<&[u32]>) -> Self {
        let mut device = device(order, MODULES);
        let views: Vec<TensorView<'_>> = parts.iter().map(|part| part.view(columns)).collect();
        folio_model::check::parts("a", &views, 2, linear::stack).unwrap();
        let matrix = linear::load(&mut *device, "a", &views).unwrap();
        let cols = matrix.cols;
        let mut values: Vec<f32> = parts.iter().flat_map(|part| part.values.iter().copied()).collect();
        if let Some(columns) = columns {
            for row in values.chunks_mut(cols) {
                let stored = row.to_vec();
                columns.iter().zip(stored).for_each(|(column, value)| row[*column as usize] = value);
            }
        }
        Self { rows: matrix.rows, cols, device, matrix, values }
    }

    fn of(encoding: Encoding, rows: usize, cols: usize) -> Self {
        Self::new(Order::Ascending, &[Stored::new(encoding, rows, cols)], None)
    }

    fn x(&self, token: usize, column: usize) -> f32 {
        let x = value(token * 31 + column * 7 + 5) * if column.is_multiple_of(11) { 4.0 } else { 1.0 };
        if self.matrix.reads_floats() { x } else { bf16::from_f32(x).to_f32() }
    }

    /// Rows `tokens` of the batch, in whichever plane is read; the other does not exist.
    fn planes(&mut self, tokens: &[usize]) -> Planes {
        let (cols, stride) = (self.cols, self.cols.next_multiple_of(32));
        let width = cols as u32;
        let at = |column: usize, token: usize| if column < cols { self.x(token, column) } else { 0.0 };
        let values: Vec<f32> = tokens
            .iter()
            .flat_map(|token| (0..stride).map(move |column| (column, *token)))
            .map(|(c, t)| at(c, t))
            .collect();
        if self.matrix.reads_floats() {
            let f32 = Some(up(&mut *self.device, &values, f32::to_le_bytes));
            return Planes { width, f32, f32_stride: stride as u32, ..Planes::default() };
        }
        let bf16 = Some(up(&mut *self.device, &values, |x: f32| bf16::from_f32(x).to_le_bytes()));
        Planes { width, bf16, bf16_stride: stride as u32, ..Planes::default() }
    }

    /// Outputs `[tokens, rows]` of a launch made for `bound` rows.
    fn product(&mut self, tokens: &[usize], bound: usize, bias: bool, add: bool) -> Vec<f32> {
        let x = self.planes(tokens);
        let stride = self.rows + 3;
        let meta = Meta(up(&mut *self.device, &[0, 0, tokens.len() as u32], u32::to_le_bytes));
        let old: Vec<f32> =
            (0..tokens.len() * stride).map(|i| self.old(tokens[i / stride], i % stride)).collect();
        let out = up(&mut *self.device, &old, f32::to_le_bytes);
        let bias_of: Vec<f32> = (0..self.rows).map(bias_value).collect();
        let bias_at = up(&mut *self.device, &bias_of, f32::to_le_bytes);
        linear::product(
            &mut *self.device,
            meta,
            RowBound { bound: bound as u32, count_word: 2 },
            &x,
            &self.matrix,
            bias.then_some(bias_at),
            Output { at: out, stride: stride as u32, add },
            &Scratch::default(),
        )
        .unwrap();
        let found = down_f32(&mut *self.device, out, tokens.len() * stride);
        for ptr in [meta.0, out, bias_at, x.f32.or(x.bf16).unwrap()] {
            self.device.free(ptr).unwrap();
        }
        for (found, old) in found.chunks(stride).zip(old.chunks(stride)) {
            assert_eq!(found[self.rows..], old[self.rows..], "something was written behind a row");
        }
        found.chunks(stride).flat_map(|row| row[..self.rows].iter().copied()).collect()
    }

    fn old(&self, token: usize, row: usize) -> f32 {
        value(token * 17 + row)
    }

    fn check(&mut self, tokens: usize, bias: bool, add: bool, what: &str) {
        let list: Vec<usize> = (0..tokens).collect();
        let found = self.product(&list, tokens, bias, add);
        for (i, found) in found.iter().enumerate() {
            let (token, row) = (i / self.rows, i % self.rows);
            let weights = &self.values[row * self.cols..][..self.cols];
            let (mut want, mut size) = (0.0f64, 0.0f64);
            for (column, weight) in weights.iter().enumerate() {
                let term = f64::from(*weight) * f64::from(self.x(token, column));
                want += term;
                size += term.abs();
            }
            let more = [(bias, bias_value(row)), (add, self.old(token, row))];
            more.iter().filter(|(given, _)| *given).for_each(|(_, more)| want += f64::from(*more));
            let error = (f64::from(*found) - want).abs();
            assert!(
                error <= 1e-5 * size + 1e-6,
                "{what}: token {token} row {row}: {found}, not {want} ({size})"
            );
        }
    }
}

fn bias_value(row: usize) -> f32 {
    value(row + 77)
}

const PLAIN: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn products_of_plain_weights() {
    if !available() {
        return;
    }
    for dtype in PLAIN {
        for (rows, cols, tokens) in
            [(16, 32, 1), (37, 50, 5), (5, 7, 9), (130, 200, 70), (129, 1, 33), (48, 320, 130)]
        {
            let mut case = Case::of(Encoding::Plain(dtype), rows, cols);
            let what = format!("{dtype:?} {rows}x{cols} {tokens}");
            case.check(tokens, false, false, &what);
            case.check(tokens, true, true, &what);
        }
    }
}

#[test]
fn products_of_blocks() {
    if !available() {
        return;
    }
    for format in BlockFormat::ALL {
        let mut widths = vec![format.values(), 3 * format.values()];
        widths.extend((format.values() == 32).then_some(352));
        for (i, cols) in widths.into_iter().enumerate() {
            let rows = [16, 37, 130][i];
            let mut case = Case::of(Encoding::Block(format), rows, cols);
            for tokens in [3, 20, 70] {
                case.check(tokens, tokens == 3, tokens == 20, &format!("{format:?} {rows}x{cols} {tokens}"));
            }
        }
    }
}

/// The bits of a row do not depend on how many others there are, on the kernel that takes them, or on the order of threads.
#[test]
fn a_row_is_the_same_alone_and_among_others() {
    if !available() {
        return;
    }
    let formats = [
        BlockFormat::Q4_K,
        BlockFormat::Q6_K,
        BlockFormat::Q2_K,
        BlockFormat::Q8_0,
        BlockFormat::Q5_1,
        BlockFormat::Int4x128,
        BlockFormat::Uint4x128,
        BlockFormat::Fp8x128,
        BlockFormat::MXFP4,
        BlockFormat::IQ4_XS,
        BlockFormat::Int8x128,
    ];
    let encodings = PLAIN.into_iter().map(Encoding::Plain).chain(formats.map(Encoding::Block));
    for encoding in encodings {
        let stored = [Stored::new(encoding, 50, 768)];
        let mut cases = Order::SEVERAL.map(|order| Case::new(order, &stored, None));
        let alone: Vec<f32> = (0..130).flat_map(|token| cases[0].product(&[token], 1, true, true)).collect();
        for tokens in [2, 3, 7, 8, 9, 31, 64, 65, 130] {
            // Every other one, so that a row stands elsewhere in its tile, and a bound of its own.
            let list: Vec<usize> = (0..tokens).map(|i| i * 7 % 130).collect();
            for (case, bound) in cases.iter_mut().zip([tokens, tokens, 150]) {
                let found = case.product(&list, bound, true, true);
                for (token, found) in list.iter().zip(found.chunks(50)) {
                    let want = &alone[50 * token..][..50];
                    let same = found.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{encoding} {tokens} {token}");
                }
            }
        }
    }
}

/// However a product is divided. What a launch may be for decides that, not what comes.
#[test]
fn every_division_gives_the_same_bits() {
    if !available() {
        return;
    }
    let formats =
        [BlockFormat::Q4_K, BlockFormat::Q6_K, BlockFormat::Q8_0, BlockFormat::MXFP4, BlockFormat::IQ4_XS];
    let encodings = [DType::BF16, DType::F16].map(Encoding::Plain).into_iter();
    for encoding in encodings.chain(formats.map(Encoding::Block)) {
        let mut case = Case::of(encoding, 120, 768);
        let tokens: Vec<usize> = (0..300).collect();
        let alone: Vec<f32> =
            [0, 63, 64, 299].iter().flat_map(|t| case.product(&[*t], 1, true, true)).collect();
        let multiprocessors = case.device.info().multiprocessors as usize;
        // 64, 128 and 256 rows of the batch to a block.
        for bound in [300, 128 * multiprocessors, 256 * multiprocessors] {
            let found = case.product(&tokens, bound.max(300), true, true);
            for (token, want) in [0, 63, 64, 299].iter().zip(alone.chunks(120)) {
                let same =
                    found[120 * token..][..120].iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{encoding} {bound} {token}");
            }
            if bound == 300 {
                continue;
            }
            let few = case.product(&tokens[..70], bound, true, true);
            assert!(few.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()), "{encoding} {bound}");
        }
    }
}

#[test]
fn parts_stack_and_formats_mix() {
    if !available() {
        return;
    }
    let of = |format, rows| Stored::new(Encoding::Block(format), rows, 256);
    let parts = [
        of(BlockFormat::Q4_K, 20),
        of(BlockFormat::Q4_K, 9),
        of(BlockFormat::Q6_K, 11),
        of(BlockFormat::Q4_1, 33),
    ];
    let mut case = Case::new(Order::Ascending, &parts, None);
    case.check(5, true, true, "mixed blocks");
    case.check(100, true, false, "mixed blocks");
    let plain = |rows| Stored::new(Encoding::Plain(DType::BF16), rows, 40);
    let mut case = Case::new(Order::Ascending, &[plain(20), plain(3)], None);
    case.check(5, true, true, "stacked bf16");
    let (q4, bf16) = (Encoding::Block(BlockFormat::Q4_0), Encoding::Plain(DType::BF16));
    assert!(!linear::stack(q4, bf16) && !linear::stack(bf16, Encoding::Plain(DType::F16)));
}

#[test]
fn columns_stored_in_an_order_of_their_own() {
    if !available() {
        return;
    }
    let columns = blocks::order(256);
    let encodings = PLAIN.map(Encoding::Plain).into_iter();
    for encoding in encodings.chain([BlockFormat::Int4x128, BlockFormat::Int8x32].map(Encoding::Block)) {
        let mut case = Case::new(Order::Ascending, &[Stored::new(encoding, 20, 256)], Some(&columns));
        for tokens in [1, 20, 70] {
            case.check(tokens, false, false, &format!("{encoding} in order"));
        }
        embedded(&mut case, &[3, 19]);
    }
}

/// Embeds tokens and compares with the exact values, in both planes and in each alone.
fn embedded(case: &mut Case, tokens: &[u32]) {
    let (cols, stride) = (case.cols, case.cols.next_multiple_of(32));
    let mut words = vec![0u32; 32];
    (words[0], words[8]) = (tokens.len() as u32, 32);
    words.extend(tokens);
    let meta = Meta(up(&mut *case.device, &words, u32::to_le_bytes));
    let rows = RowBound { bound: tokens.len() as u32 + 2, count_word: 0 };
    for (with_f32, with_bf16) in [(true, true), (true, false), (false, true)] {
        let floats = case.device.allocate((4 * tokens.len() * stride) as u64).unwrap();
        let halves = case.device.allocate((2 * tokens.len() * stride) as u64).unwrap();
        let out = Planes {
            width: cols as u32,
            f32: with_f32.then_some(floats),
            f32_stride: stride as u32,
            bf16: with_bf16.then_some(halves),
            bf16_stride: stride as u32,
        };
        linear::embed(&mut *case.device, meta, rows, &case.matrix, &out).unwrap();
        let floats = down_f32(&mut *case.device, floats, tokens.len() * stride);
        let mut bytes = vec![0; 2 * tokens.len() * stride];
        case.device.download(halves, &mut bytes).unwrap();
        let halves: Vec<bf16> = bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect();
        for (i, token) in tokens.iter().enumerate() {
            let want = &case.values[*token as usize * cols..][..cols];
            if with_f32 {
                assert_eq!(floats[i * stride..][..cols], *want, "token {token}");
            }
            if with_bf16 {
                let want = want.iter().map(|x| bf16::from_f32(*x)).chain((cols..stride).map(|_| bf16::ZERO));
                assert!(want.eq(halves[i * stride..][..stride].iter().copied()), "token {token}");
            }
        }
    }
}

#[test]
fn embeddings_are_the_exact_rows_of_the_table() {
    if !available() {
        return;
    }
    let encodings = PLAIN.map(Encoding::Plain).into_iter();
    for encoding in encodings.chain(BlockFormat::ALL.map(Encoding::Block)) {
        let cols = match encoding {
            Encoding::Plain(_) => 41,
            Encoding::Block(format) => {
                2 * format.values().max(32) + if format.values() == 32 { 32 } else { 0 }
            }
        };
        let mut case = Case::of(encoding, 37, cols);
        embedded(&mut case, &[0, 36, 9, 17, 9, 23]);
    }
    let of = |format, rows| Stored::new(Encoding::Block(format), rows, 256);
    let mut mixed =
        Case::new(Order::Ascending, &[of(BlockFormat::Q4_K, 20), of(BlockFormat::Q6_K, 11)], None);
    embedded(&mut mixed, &[19, 20, 30, 0]);
}

/// A NaN among e4m3 codes reaches every product with its row, and no other.
#[test]
fn a_nan_stays_a_nan() {
    if !available() {
        return;
    }
    let mut stored = Stored::new(Encoding::Block(BlockFormat::Fp8x32), 20, 64);
    stored.bytes[36 * 2 * 5 + 4 + 7] = 0x7f;
    let mut case = Case::new(Order::Ascending, &[stored], None);
    for (row, value) in case.product(&[1], 1, false, false).iter().enumerate() {
        assert_eq!(value.is_nan(), row == 5);
    }
}

/// What the device makes up where it lies is what the host makes, packs and copies: every value, and every bit of a product.
#[test]
fn weights_made_up_on_the_device_are_those_made_up_on_the_host() {
    if !available() {
        return;
    }
    for encoding in dummy::ENCODINGS {
        let shapes = match encoding {
            Encoding::Plain(_) => [[37, 50], [16, 96]],
            Encoding::Block(format) => [[37, 3 * format.values()], [48, 256]],
        };
        for shape in shapes {
            let [rows, cols] = shape;
            let bytes = dummy::values(encoding, rows * encoding.bytes(cols).unwrap());
            let view = TensorView { encoding, shape: &shape, bytes: &bytes, order: None };
            let of = |on_device: bool| {
                let mut device = device(Order::Ascending, MODULES);
                let matrix = match on_device {
                    true => linear::make_up(&mut *device, "a", encoding, shape).unwrap().expect("it is made"),
                    false => linear::load(&mut *device, "a", &[view]).unwrap(),
                };
                Case { rows, cols, device, matrix, values: decoded(encoding, &bytes) }
            };
            let (mut made, mut loaded) = (of(true), of(false));
            assert_eq!(made.matrix.bytes, loaded.matrix.bytes, "{encoding}");
            embedded(&mut made, &(0..rows as u32).collect::<Vec<_>>());
            let bits = |case: &mut Case| -> Vec<u32> {
                case.product(&[0, 4, 2], 3, false, false).iter().map(|value| value.to_bits()).collect()
            };
            assert_eq!(bits(&mut made), bits(&mut loaded), "{encoding} {shape:?}");
        }
    }
    let mut device = device(Order::Ascending, &[]);
    let q6 = Encoding::Block(BlockFormat::Q6_K);
    assert!(linear::make_up(&mut *device, "a", q6, [16, 256]).unwrap().is_none(), "nobody makes it up");
}

fn decoded(encoding: Encoding, bytes: &[u8]) -> Vec<f32> {
    match encoding {
        Encoding::Block(format) => {
            let mut values = vec![0.0; bytes.len() / format.bytes() * format.values()];
            format.decode(bytes, &mut values);
            values
        }
        Encoding::Plain(dtype) => {
            bytes.chunks_exact(dtype.size()).map(|bytes| folio_model::check::to_f32(dtype, bytes)).collect()
        }
    }
}
