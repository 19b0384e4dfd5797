//! Convolutions and gated delta nets: near what the reference computes, and of the same bits however a prompt is cut, whoever else is in
//! the batch, on any instruction set and any number of threads, from any state that was kept.

mod common;

use common::{Random, assert_same_bits, encode, isas};
use folio_cpu::{CpuBackend, CpuOptions, Isa};
use folio_model::backend::{
    Backend, Batch, BlockCopy, DType, GroupKind, HOLE, KvFormat, KvGroup, KvLayout, Span, TensorView,
};
use folio_model::program::{
    Buf, ConvolutionSpec, DeltaSpec, Head, MatrixId, Op, Program, StatePlace, StateSpaceSpec, VectorId,
};
use folio_model::quant::Encoding;
use folio_model::reference::ReferenceBackend;

const HIDDEN: usize = 24;
const VOCAB: usize = 61;
const BLOCKS: usize = 40;
/// Tokens of a block of the first group, and of states.
const TOKENS: [usize; 2] = [8, 16];
const LAYERS: usize = 2;

/// Sizes of a delta net and its convolution.
#[derive(Clone, Copy, Debug)]
struct Net {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    taps: usize,
}

const NETS: [Net; 6] = [
    Net { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1, taps: 2 },
    Net { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 20, taps: 4 },
    Net { key_heads: 3, value_heads: 3, key_dim: 17, value_dim: 33, taps: 3 },
    Net { key_heads: 1, value_heads: 5, key_dim: 40, value_dim: 16, taps: 5 },
    Net { key_heads: 2, value_heads: 2, key_dim: 16, value_dim: 63, taps: 2 },
    // Of Qwen3.5, but for the number of heads.
    Net { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128, taps: 4 },
];

impl Net {
    fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    fn state_values(&self) -> usize {
        ConvolutionSpec::state_values(self.channels(), self.taps)
            + 2 * self.value_heads * DeltaSpec::head_values(self.key_dim, self.value_dim)
    }

    /// Loads some random layers and a cache.
    fn load<B: Backend>(&self, backend: &mut B) {
        let &Net { key_heads, value_heads, key_dim, value_dim, taps } = self;
        let mut random = Random(0x57a7e);
        let values = value_heads * value_dim;
        let mut matrix = |backend: &mut B, rows: usize, cols: usize| -> MatrixId {
            let scale = (3.0 / cols as f32).sqrt();
            let bytes = encode(DType::F32, (0..rows * cols).map(|_| random.unit() * scale));
            backend.load_matrix("m", &[view(&[rows, cols], &bytes)]).expect("a matrix")
        };
        let mut others = Random(0x7ec7);
        let mut vector = |backend: &mut B, len: usize, around: f32, spread: f32| -> VectorId {
            let bytes = encode(DType::F32, (0..len).map(|_| around + spread * others.unit()));
            backend.load_vector("v", &[view(&[len], &bytes)]).expect("a vector")
        };
        let [x, normed, qkv, gates, z, out, xbc, steps, y] = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(Buf);
        let channels = self.channels();
        let buffers =
            vec![HIDDEN, HIDDEN, channels, 2 * value_heads, values, values, channels, value_heads, values];
        let mut program = Program { buffers, ..Program::default() };
        let table = matrix(backend, VOCAB, HIDDEN);
        program.body.push(Op::Embed { table, out: x });
        for layer in 0..LAYERS as u32 {
            let state = |offset| StatePlace { group: 1, layer, offset };
            program.convolutions.push(ConvolutionSpec {
                state: state(0),
                channels: self.channels(),
                taps,
                silu: taps % 2 == 0,
                bias: (taps > 2).then(|| vector(backend, self.channels(), 0.0, 0.5)),
                weight: vector(backend, taps * self.channels(), 0.0, 1.0),
            });
            program.delta.push(DeltaSpec {
                state: state(ConvolutionSpec::state_values(self.channels(), taps)),
                key_heads,
                value_heads,
                tiled: layer == 1,
                key_dim,
                value_dim,
                decay: vector(backend, value_heads, -0.3, 0.29),
                step_bias: vector(backend, value_heads, 0.0, 1.0),
            });
            let delta = program.delta[layer as usize];
            program.state_spaces.push(StateSpaceSpec {
                state: state(delta.state.offset + delta.state_values()),
                heads: value_heads,
                head_dim: value_dim,
                groups: key_heads,
                state_dim: key_dim,
                decay: vector(backend, value_heads, -0.3, 0.29),
                step_bias: vector(backend, value_heads, 0.0, 1.0),
                skip: vector(backend, value_heads, 1.0, 0.5),
            });
            let spec = layer as usize;
            let linear = |weight, out| Op::Linear { x: normed, weight, bias: None, out, add: false };
            program.body.extend([
                Op::RmsNorm { x, weight: vector(backend, HIDDEN, 1.0, 0.2), eps: 1e-6, out: normed },
                linear(matrix(backend, self.channels(), HIDDEN), qkv),
                linear(matrix(backend, 2 * value_heads, HIDDEN), gates),
                linear(matrix(backend, values, HIDDEN), z),
                Op::Convolve { x: qkv, spec },
                Op::DeltaRule { qkv, gates, spec, out },
                Op::GatedRmsNorm { x: out, gate: z, weight: vector(backend, value_dim, 1.0, 0.2), eps: 1e-6 },
                Op::SigmoidGate { x: out, gate: z },
                Op::Linear { x: out, weight: matrix(backend, HIDDEN, values), bias: None, out: x, add: true },
                linear(matrix(backend, channels, HIDDEN), xbc),
                linear(matrix(backend, value_heads, HIDDEN), steps),
                linear(matrix(backend, values, HIDDEN), z),
                Op::StateSpace { xbc, steps, spec, out: y },
                Op::SiluGate { x: y, gate: z },
                Op::NormPart {
                    x: y,
                    first: 0,
                    weight: vector(backend, values, 1.0, 0.2),
                    eps: 1e-6,
                    parts: value_heads,
                },
                Op::Linear { x: y, weight: matrix(backend, HIDDEN, values), bias: None, out: x, add: true },
            ]);
        }
        let norm = vector(backend, HIDDEN, 1.0, 0.2);
        program.head = Head { x, norm, eps: 1e-6, matrix: table, vocab: VOCAB, softcap: None };
        backend.load_program(program, 200, 200, 256).expect("a program");
        let group = |kind, block_tokens, layers| KvGroup {
            kind,
            block_tokens,
            kv_heads: 1,
            head_dim: 2,
            formats: vec![KvFormat::F32; layers],
        };
        let states = GroupKind::State { values: self.state_values() };
        let groups = vec![group(GroupKind::Full, TOKENS[0], 0), group(states, TOKENS[1], LAYERS)];
        backend.allocate_cache(&KvLayout { groups }, &[BLOCKS, BLOCKS]).expect("a cache");
    }

    fn cpu(&self, threads: usize, isa: Isa) -> CpuBackend {
        let options = CpuOptions { threads: Some(threads), isa: Some(isa) };
        let mut backend = CpuBackend::new(options).expect("a backend");
        self.load(&mut backend);
        backend
    }
}

fn view<'a>(shape: &'a [usize], bytes: &'a [u8]) -> TensorView<'a> {
    TensorView { encoding: Encoding::Plain(DType::F32), shape, bytes, order: None }
}

fn tokens(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    (0..len).map(|_| random.below(VOCAB) as u32).collect()
}

/// Rows `first ..` of a sequence, whose states lie in these blocks.
struct Part<'a> {
    first: usize,
    tokens: &'a [u32],
    states: &'a [u32],
    tentative_from: u32,
}

fn part<'a>(first: usize, tokens: &'a [u32], states: &'a [u32]) -> Part<'a> {
    Part { first, tokens, states, tentative_from: u32::MAX }
}

fn batch(parts: &[Part<'_>], copies: &[BlockCopy]) -> Batch {
    let mut batch = Batch { copies: copies.to_vec(), ..Batch::default() };
    for (slot, part) in (0..).zip(parts) {
        batch.spans.push(Span {
            first_row: batch.tokens.len() as u32,
            rows: part.tokens.len() as u32,
            first_position: part.first as u32,
            slot,
            tentative_from: part.tentative_from,
        });
        batch.tokens.extend(part.tokens);
        let blocks = (part.first + part.tokens.len()).div_ceil(TOKENS[0]) as u32;
        // Nothing is kept in the first group, but every block is somebody's.
        batch.edit_table(slot, 0, 0, (0..blocks).map(|block| (8 * slot + block) % BLOCKS as u32));
        batch.edit_table(slot, 1, 0, part.states.iter().copied());
    }
    batch.logit_rows.extend(0..batch.tokens.len() as u32);
    batch
}

fn run<B: Backend>(backend: &mut B, parts: &[Part<'_>]) -> Vec<f32> {
    backend.forward(&batch(parts, &[])).expect("a step").to_vec()
}

fn in_chunks<B: Backend>(backend: &mut B, tokens: &[u32], chunk: usize, states: &[u32]) -> Vec<f32> {
    let chunks = tokens.chunks(chunk).enumerate();
    chunks.flat_map(|(i, tokens)| run(backend, &[part(i * chunk, tokens, states)])).collect()
}

#[test]
fn nets_of_all_sizes_agree_with_the_reference() {
    for net in NETS {
        let text = tokens(1, 53);
        let mut reference = ReferenceBackend::new();
        net.load(&mut reference);
        let expected = run(&mut reference, &[part(0, &text, &[3, 1, 2, 0])]);
        let parts = in_chunks(&mut reference, &text, 7, &[5, 6, 4, 9]);
        assert_same_bits("the reference in chunks", &parts, &expected, VOCAB);
        let found = run(&mut net.cpu(2, Isa::best()), &[part(0, &text, &[3, 1, 2, 0])]);
        let scale = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= 2e-5 * scale, "{net:?}: row {} is {a}, not {b}", i / VOCAB);
        }
    }
}

#[test]
fn chunks_threads_and_instruction_sets_do_not_touch_a_bit() {
    for net in NETS {
        let text = tokens(2, 70);
        let whole = run(&mut net.cpu(1, Isa::Scalar), &[part(0, &text, &[0, 1, 2, 3, 4])]);
        for isa in isas() {
            for threads in [1, 2, 3] {
                let mut backend = net.cpu(threads, isa);
                for chunk in [1, 3, 16, 19, 70] {
                    let found = in_chunks(&mut backend, &text, chunk, &[9, 4, 7, 2, 11]);
                    let what = format!("{net:?}, {isa:?}, {threads} threads, chunks of {chunk}");
                    assert_same_bits(&what, &found, &whole, VOCAB);
                }
            }
        }
    }
}

#[test]
fn neighbours_do_not_touch_a_bit() {
    for net in NETS {
        let texts: Vec<Vec<u32>> = (0..5).map(|i| tokens(10 + i, 5 + 9 * i as usize)).collect();
        let mut backend = net.cpu(3, Isa::best());
        let tables: Vec<Vec<u32>> = (0..5).map(|i| (0..3).map(|entry| 3 * i + entry).collect()).collect();
        let alone: Vec<Vec<f32>> =
            texts.iter().map(|text| run(&mut backend, &[part(0, text, &tables[0])])).collect();
        let all: Vec<Part<'_>> =
            texts.iter().zip(&tables).map(|(text, table)| part(0, text, table)).collect();
        assert_same_bits(&format!("{net:?}"), &run(&mut backend, &all), &alone.concat(), VOCAB);
    }
}

/// A state behind a full block is not overwritten, a hole before it is not read, and what is copied is the whole state.
#[test]
fn any_kept_state_goes_on_to_the_same_bits() {
    let net = NETS[1];
    let text = tokens(3, 60);
    let mut backend = net.cpu(2, Isa::best());
    let whole = run(&mut backend, &[part(0, &text, &[0, 1, 2, 3])]);
    for kept in [16, 32, 48] {
        let mut table: Vec<u32> = vec![HOLE; kept / 16 - 1];
        table.push(kept as u32 / 16 - 1);
        table.extend((kept / 16..4).map(|entry| 20 + entry as u32));
        for _ in 0..2 {
            let found = run(&mut backend, &[part(kept, &text[kept..], &table)]);
            assert_same_bits(&format!("behind {kept}"), &found, &whole[kept * VOCAB..], VOCAB);
        }
    }
    // The state behind position 36 is copied, whatever number of tokens is named, and goes on in two ways.
    run(&mut backend, &[part(0, &text[..37], &[4, 5, 6])]);
    let copies = [BlockCopy { group: 1, from: 6, to: 30, tokens: 1 }];
    let fork = [part(37, &text[37..], &[4, 5, 30, 31])];
    let found = backend.forward(&batch(&fork, &copies)).expect("a step").to_vec();
    assert_same_bits("the fork", &found, &whole[37 * VOCAB..], VOCAB);
    let found = run(&mut backend, &[part(37, &text[37..], &[4, 5, 6, 7])]);
    assert_same_bits("the original", &found, &whole[37 * VOCAB..], VOCAB);
}

/// Whatever a block held, the first position begins with nothing.
#[test]
fn stale_states_are_never_seen() {
    let net = NETS[2];
    let text = tokens(4, 20);
    let mut backend = net.cpu(2, Isa::best());
    let fresh = run(&mut backend, &[part(0, &text, &[0, 1])]);
    run(&mut backend, &[part(0, &tokens(5, 64), &[3, 2, 1, 0])]);
    assert_same_bits("reused", &run(&mut backend, &[part(0, &text, &[1, 2])]), &fresh, VOCAB);
}

/// Rows that may be taken back leave their states behind those of the others, and any of them can be gone on from.
#[test]
fn rows_that_may_be_taken_back_leave_states_of_their_own() {
    for (first, tentative) in [(5, 3), (13, 6), (16, 4), (30, 5)] {
        for net in [NETS[1], NETS[3]] {
            let text = tokens(6, 60);
            let mut backend = net.cpu(2, Isa::best());
            let whole = run(&mut backend, &[part(0, &text, &[0, 1, 2, 3])]);
            let kept: Vec<u32> = (10..10 + (first as u32).div_ceil(16)).collect();
            run(&mut backend, &[part(0, &text[..first - 1], &kept)]);
            // One row is certain, the others are drafts; the last of them are wrong.
            let own: Vec<u32> = (20..20 + tentative as u32).collect();
            let table = [&kept[..], &own].concat();
            let mut rows = text[first - 1..first + tentative].to_vec();
            let right = tentative / 2;
            rows[1 + right..].iter_mut().for_each(|token| *token = (*token + 1) % VOCAB as u32);
            let drafts = [Part { tentative_from: first as u32, ..part(first - 1, &rows, &table) }];
            let found = run(&mut backend, &drafts);
            let until = (1 + right) * VOCAB;
            let expected = &whole[(first - 1) * VOCAB..][..until];
            assert_same_bits("the right drafts", &found[..until], expected, VOCAB);
            for good in 0..=right {
                let end = first + good;
                let mut table: Vec<u32> = vec![HOLE; (end - 1) / 16];
                table.push(if good == 0 { *kept.last().expect("some") } else { own[good - 1] });
                let next = (end + 1).div_ceil(16);
                table.resize(next, 35);
                // It is overwritten where the next position is in its block, so from a copy of it.
                let last = table[(end - 1) / 16];
                table[(end - 1) / 16] = 36;
                let copies = [BlockCopy { group: 1, from: last, to: 36, tokens: 16 }];
                let one = batch(&[part(end, &text[end..end + 1], &table)], &copies);
                let found = backend.forward(&one).expect("a step").to_vec();
                assert_same_bits(
                    &format!("behind {good} drafts"),
                    &found,
                    &whole[end * VOCAB..][..VOCAB],
                    VOCAB,
                );
            }
        }
    }
}

#[test]
fn tables_without_the_states_that_are_needed_are_refused() {
    let text = tokens(7, 40);
    let net = NETS[1];
    let (mut cpu, mut reference) = (net.cpu(1, Isa::best()), ReferenceBackend::new());
    net.load(&mut reference);
    let backends: [&mut dyn Backend; 2] = [&mut cpu, &mut reference];
    for backend in backends {
        let mut refusal = |parts: &[Part<'_>]| {
            let error = backend.forward(&batch(parts, &[])).expect_err("refused");
            error.to_string()
        };
        let said = refusal(&[part(0, &text, &[0, 1])]);
        assert!(said.contains("covers less than 40") || said.contains("too short"), "{said}");
        let said = refusal(&[part(16, &text[16..], &[HOLE, 1, 2])]);
        assert!(said.contains("hole"), "{said}");
        let said = refusal(&[part(20, &text[20..], &[HOLE, HOLE, 2])]);
        assert!(said.contains("hole"), "{said}");
        let drafts = |states| Part { tentative_from: 37, ..part(35, &text[35..], states) };
        let said = refusal(&[drafts(&[HOLE, HOLE, 2, 3, 4])]);
        assert!(said.contains("covers less than 40") || said.contains("too short"), "{said}");
    }
    let twice = batch(&[part(0, &text[..3], &[1]), part(0, &text[..3], &[1])], &[]);
    assert!(cpu.forward(&twice).expect_err("refused").to_string().contains("block 1 is written twice"));
    let twice = batch(&[Part { tentative_from: 1, ..part(0, &text[..3], &[1, 2, 2]) }], &[]);
    assert!(cpu.forward(&twice).expect_err("refused").to_string().contains("block 2 is written twice"));
}
