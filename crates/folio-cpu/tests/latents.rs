//! Latent attention: near what the reference computes, and of the same bits however a prompt is cut, whoever else is in the batch, on any
//! instruction set and any number of threads.

mod common;

use common::{Random, assert_same_bits, encode, isas};
use folio_cpu::{CpuBackend, CpuOptions, Isa};
use folio_model::backend::{
    Backend, Batch, BlockCopy, DType, GroupKind, KvFormat, KvGroup, KvLayout, Span, TensorView,
};
use folio_model::program::{Buf, Head, LatentSpec, MatrixId, Op, Program, Rope, RopeId, VectorId};
use folio_model::quant::Encoding;
use folio_model::reference::ReferenceBackend;

const HIDDEN: usize = 24;
const VOCAB: usize = 61;
const BLOCKS: usize = 60;
const TOKENS: usize = 16;
const LAYERS: usize = 2;
const FORMATS: [KvFormat; 3] = [KvFormat::F32, KvFormat::F16, KvFormat::BF16];

/// Sizes of a latent attention.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: usize,
    rank: usize,
    nope: usize,
    rope: usize,
    value: usize,
    neighbours: bool,
}

const fn sizes([heads, rank, nope, rope, value]: [usize; 5], neighbours: bool) -> Sizes {
    Sizes { heads, rank, nope, rope, value, neighbours }
}

const SIZES: [Sizes; 6] = [
    sizes([1, 2, 1, 2, 1], true),
    sizes([4, 20, 10, 8, 14], true),
    sizes([3, 32, 16, 16, 17], false),
    sizes([7, 34, 5, 6, 40], true),
    // More heads than rows of a tile.
    sizes([70, 16, 4, 4, 3], true),
    // Of DeepSeek, but for the number of heads.
    sizes([2, 512, 128, 64, 128], true),
];

impl Sizes {
    /// Loads some random layers and a cache.
    fn load<B: Backend>(&self, backend: &mut B, format: KvFormat) {
        let &Sizes { heads, rank, nope, rope, value, neighbours } = self;
        let key = rank + rope;
        let mut random = Random(0x1a7e);
        let mut matrix = |backend: &mut B, rows: usize, cols: usize| -> MatrixId {
            let scale = (3.0 / cols as f32).sqrt();
            let bytes = encode(DType::F32, (0..rows * cols).map(|_| random.unit() * scale));
            backend.load_matrix("m", &[view(&[rows, cols], &bytes)]).expect("a matrix")
        };
        let mut others = Random(0x7ec7);
        let mut norm = |backend: &mut B, len: usize| -> VectorId {
            let bytes = encode(DType::F32, (0..len).map(|_| 1.0 + 0.2 * others.unit()));
            backend.load_vector("v", &[view(&[len], &bytes)]).expect("a vector")
        };
        let [x, normed, q, latent, queries, mixed, attended] = [0, 1, 2, 3, 4, 5, 6].map(Buf);
        let widths = [HIDDEN, HIDDEN, heads * (nope + rope), key, heads * key, heads * rank, heads * value];
        let inv_freq = (0..rope / 2).map(|i| 0.7f32.powi(i as i32)).collect();
        let mut program = Program {
            buffers: widths.to_vec(),
            ropes: vec![Rope { inv_freq, scale: 1.1, axes: Vec::new() }],
            ..Program::default()
        };
        let table = matrix(backend, VOCAB, HIDDEN);
        program.body.push(Op::Embed { table, out: x });
        for spec in 0..LAYERS {
            program.latent.push(LatentSpec {
                group: 0,
                layer: spec as u32,
                heads,
                rank,
                rope_dim: rope,
                nope_dim: nope,
                scale: 1.5 / ((nope + rope) as f32).sqrt(),
                rope: RopeId(0),
                neighbours,
                norm: norm(backend, rank),
                norm_eps: 1e-6,
            });
            let linear = |x, weight, out, add| Op::Linear { x, weight, bias: None, out, add };
            program.body.extend([
                Op::RmsNorm { x, weight: norm(backend, HIDDEN), eps: 1e-6, out: normed },
                linear(normed, matrix(backend, heads * (nope + rope), HIDDEN), q, false),
                linear(normed, matrix(backend, key, HIDDEN), latent, false),
                Op::HeadLinear { x: q, weight: matrix(backend, heads * rank, nope), heads, out: queries },
                Op::WriteLatent { q, latent, spec, queries },
                Op::LatentAttention { queries, spec, out: mixed },
                Op::HeadLinear {
                    x: mixed,
                    weight: matrix(backend, heads * value, rank),
                    heads,
                    out: attended,
                },
                linear(attended, matrix(backend, HIDDEN, heads * value), x, true),
            ]);
        }
        let norm = norm(backend, HIDDEN);
        program.head = Head { x, norm, eps: 1e-6, matrix: table, vocab: VOCAB, softcap: None };
        backend.load_program(program, 700, 700, 700).expect("a program");
        backend.allocate_cache(&layout(rank, key, format), &[BLOCKS]).expect("a cache");
    }

    fn cpu(&self, threads: usize, isa: Isa, format: KvFormat) -> CpuBackend {
        let options = CpuOptions { threads: Some(threads), isa: Some(isa) };
        let mut backend = CpuBackend::new(options).expect("a backend");
        self.load(&mut backend, format);
        backend
    }
}

fn layout(rank: usize, key: usize, format: KvFormat) -> KvLayout {
    let kind = GroupKind::Latent { rank: rank as u32 };
    let formats = vec![format; LAYERS];
    KvLayout { groups: vec![KvGroup { kind, block_tokens: TOKENS, kv_heads: 1, head_dim: key, formats }] }
}

fn view<'a>(shape: &'a [usize], bytes: &'a [u8]) -> TensorView<'a> {
    TensorView { encoding: Encoding::Plain(DType::F32), shape, bytes, order: None }
}

fn tokens(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    (0..len).map(|_| random.below(VOCAB) as u32).collect()
}

/// Rows `first ..` of a sequence, and its blocks.
#[derive(Clone)]
struct Part<'a> {
    first: usize,
    tokens: &'a [u32],
    blocks: Vec<u32>,
}

fn part(first: usize, tokens: &[u32], from: u32) -> Part<'_> {
    let count = (first + tokens.len()).div_ceil(TOKENS) as u32;
    // Out of order, and not side by side.
    Part { first, tokens, blocks: (0..count).map(|i| (from + 7 * i) % BLOCKS as u32).collect() }
}

fn batch(parts: &[Part<'_>], copies: &[BlockCopy]) -> Batch {
    let mut batch = Batch { copies: copies.to_vec(), ..Batch::default() };
    for (slot, part) in (0..).zip(parts) {
        batch.spans.push(Span {
            first_row: batch.tokens.len() as u32,
            rows: part.tokens.len() as u32,
            first_position: part.first as u32,
            slot,
            tentative_from: u32::MAX,
        });
        batch.tokens.extend(part.tokens);
        batch.edit_table(slot, 0, 0, part.blocks.iter().copied());
    }
    batch.logit_rows.extend(0..batch.tokens.len() as u32);
    batch
}

fn run<B: Backend>(backend: &mut B, parts: &[Part<'_>]) -> Vec<f32> {
    backend.forward(&batch(parts, &[])).expect("a step").to_vec()
}

fn in_chunks<B: Backend>(backend: &mut B, tokens: &[u32], chunk: usize, from: u32) -> Vec<f32> {
    let chunks = tokens.chunks(chunk).enumerate();
    chunks.flat_map(|(i, tokens)| run(backend, &[part(i * chunk, tokens, from)])).collect()
}

#[test]
fn latents_of_all_sizes_and_formats_agree_with_the_reference() {
    for sizes in SIZES {
        for format in FORMATS {
            let text = tokens(1, 53);
            let mut reference = ReferenceBackend::new();
            sizes.load(&mut reference, format);
            let expected = run(&mut reference, &[part(0, &text, 3)]);
            let parts = in_chunks(&mut reference, &text, 7, 9);
            assert_same_bits("the reference in chunks", &parts, &expected, VOCAB);
            let found = run(&mut sizes.cpu(2, Isa::best(), format), &[part(0, &text, 3)]);
            let scale = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
            // A value on the border of two of the format's may become either.
            let tolerance = if format == KvFormat::F32 { 2e-5 } else { 2e-2 };
            for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                let row = i / VOCAB;
                assert!((a - b).abs() <= tolerance * scale, "{sizes:?}, {format}: row {row} is {a}, not {b}");
            }
        }
    }
}

#[test]
fn chunks_threads_and_instruction_sets_do_not_touch_a_bit() {
    for sizes in SIZES {
        for format in FORMATS {
            let text = tokens(2, 70);
            let whole = run(&mut sizes.cpu(1, Isa::Scalar, format), &[part(0, &text, 0)]);
            for isa in isas() {
                for threads in [1, 3] {
                    let mut backend = sizes.cpu(threads, isa, format);
                    for chunk in [1, 3, 16, 19, 70] {
                        let found = in_chunks(&mut backend, &text, chunk, 11);
                        let what =
                            format!("{sizes:?}, {format}, {isa:?}, {threads} threads, chunks of {chunk}");
                        assert_same_bits(&what, &found, &whole, VOCAB);
                    }
                }
            }
        }
    }
}

/// Partial results of several chunks of positions are merged, by one worker or by many.
#[test]
fn long_texts_are_the_same_bits_in_pieces() {
    for sizes in [SIZES[1], SIZES[4]] {
        let text = tokens(3, 600);
        let whole = run(&mut sizes.cpu(1, Isa::best(), KvFormat::F16), &[part(0, &text, 0)]);
        for threads in [1, 2, 3] {
            let mut backend = sizes.cpu(threads, Isa::best(), KvFormat::F16);
            for chunk in [333, 599] {
                let found = in_chunks(&mut backend, &text, chunk, 5);
                assert_same_bits(&format!("{sizes:?}, chunks of {chunk}"), &found, &whole, VOCAB);
            }
        }
    }
}

#[test]
fn neighbours_do_not_touch_a_bit() {
    for sizes in SIZES {
        let texts: Vec<Vec<u32>> = (0..5).map(|i| tokens(10 + i, 5 + 9 * i as usize)).collect();
        let mut backend = sizes.cpu(3, Isa::best(), KvFormat::BF16);
        let alone: Vec<Vec<f32>> = texts.iter().map(|text| run(&mut backend, &[part(0, text, 0)])).collect();
        let all: Vec<Part<'_>> = (0..).zip(&texts).map(|(i, text)| part(0, text, i)).collect();
        assert_same_bits(&format!("{sizes:?}"), &run(&mut backend, &all), &alone.concat(), VOCAB);
    }
}

/// What a block held before, and what lies behind the positions that a copy takes, is never seen.
#[test]
fn copies_hold_what_was_copied_and_stale_latents_are_never_seen() {
    for sizes in SIZES {
        for format in FORMATS {
            let text = tokens(4, 60);
            let mut backend = sizes.cpu(2, Isa::best(), format);
            // Every block holds something else, not finite where it can.
            for block in 0..BLOCKS as u32 {
                let bytes = backend.block_memory().expect("memory").block_bytes(0);
                backend.block_memory().expect("memory").write(0, block, &vec![0xff; bytes]);
            }
            let whole = run(&mut backend, &[part(0, &text, 0)]);
            assert!(whole.iter().all(|value| value.is_finite()), "{sizes:?}, {format}");
            for kept in [21, 29, 45] {
                let own = part(kept, &text[kept..], 0);
                let mut blocks = own.blocks.clone();
                let entry = kept / TOKENS;
                (entry..blocks.len()).for_each(|entry| blocks[entry] = 50 + entry as u32);
                let tokens = (kept % TOKENS) as u32;
                let copies = [BlockCopy { group: 0, from: own.blocks[entry], to: blocks[entry], tokens }];
                let fork = [Part { blocks, ..own }];
                let found = backend.forward(&batch(&fork, &copies)).expect("a step").to_vec();
                assert_same_bits(&format!("behind {kept}"), &found, &whole[kept * VOCAB..], VOCAB);
            }
        }
    }
}

/// Layouts that no latents fit in, of either backend.
#[test]
fn layouts_that_do_not_fit_are_refused() {
    let sizes = SIZES[1];
    let (mut cpu, mut reference) = (sizes.cpu(1, Isa::best(), KvFormat::F32), ReferenceBackend::new());
    sizes.load(&mut reference, KvFormat::F32);
    let backends: [&mut dyn Backend; 2] = [&mut cpu, &mut reference];
    for backend in backends {
        for (rank, key) in [(18, 28), (20, 30)] {
            let error = backend.allocate_cache(&layout(rank, key, KvFormat::F32), &[8]).expect_err("refused");
            assert!(error.to_string().contains("fit"), "{error}");
        }
        let mut full = layout(20, 28, KvFormat::F32);
        full.groups[0].kind = GroupKind::Full;
        assert!(backend.allocate_cache(&full, &[8]).is_err());
    }
    let error = cpu.allocate_cache(&layout(20, 28, KvFormat::Int8), &[8]).expect_err("refused").to_string();
    assert!(error.contains("not in int8"), "{error}");
    let mut second = layout(20, 28, KvFormat::F32);
    second.groups.insert(0, KvLayout::full(0, 1, 2, KvFormat::F32, TOKENS).groups.remove(0));
    let error = cpu.allocate_cache(&second, &[8, 8]).expect_err("refused").to_string();
    assert!(error.contains("Latent"), "{error}");
}
