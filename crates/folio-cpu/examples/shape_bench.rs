//! Speed of a Llama-1B shape with random weights, straight through the `Backend` trait, as fractions of what the machine
//! can do.
//!
//! `cargo run --release -p folio-cpu --example shape_bench [-- prefill|decode|x1|x8|x32|deep|limits|bf16|q8_0|uint4x128|... ...]`

use std::time::Instant;

use folio_cpu::machine::Machine;
use folio_cpu::{CpuBackend, CpuOptions};
use folio_model::backend::{Backend, Batch, BlockCopy, DType, KvFormat, KvLayout, Span, TensorView};
use folio_model::program::{
    Activation, AttentionSpec, Buf, Head, MatrixId, Op, Program, Rope, RopeId, VectorId,
};
use folio_model::quant::{BlockFormat, Encoding};

const LAYERS: usize = 16;
const HIDDEN: usize = 2048;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const FFN: usize = 8192;
const VOCAB: usize = 128_256;
const BLOCK: usize = 16;
const MAX_POSITION: usize = 9216;
const MAX_ROWS: usize = 512;

/// Parameters of all matrices a token passes through without the head, and of the head.
const BODY: usize =
    LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HIDDEN * HIDDEN + 3 * HIDDEN * FFN);
const HEAD: usize = HIDDEN * VOCAB;
/// K and V of one token.
const KV_BYTES: usize = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2;

struct Bench {
    backend: CpuBackend,
    random: u64,
    supply: Vec<u8>,
    encoding: Encoding,
}

impl Bench {
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// A matrix cut out of one supply of random numbers: speed does not depend on them.
    fn matrix(&mut self, rows: usize, cols: usize) -> MatrixId {
        if self.supply.is_empty() {
            let bytes = self.encoding.bytes(HEAD).expect("whole blocks");
            self.supply.reserve(bytes + 8);
            while self.supply.len() < bytes {
                let mut word = self.next();
                if self.encoding.plain().is_some() {
                    // Magnitudes of about 2^-7 to 2^-6 with random signs and mantissas.
                    let (exponent, rest) = match self.encoding {
                        Encoding::Plain(DType::BF16) => (0x3c00, 0x80ff),
                        _ => (0x2000, 0x87ff),
                    };
                    let rest: u64 = rest * 0x0001_0001_0001_0001;
                    word = (word & rest) | (exponent * 0x0001_0001_0001_0001);
                }
                self.supply.extend(word.to_le_bytes());
            }
            self.small_scales();
        }
        let bytes = &self.supply[..self.encoding.bytes(rows * cols).expect("whole blocks")];
        let view = TensorView { encoding: self.encoding, shape: &[rows, cols], bytes, order: None };
        self.backend.load_matrix("random", &[view]).expect("a matrix")
    }

    /// Random codes are welcome, random scales are not.
    fn small_scales(&mut self) {
        let Encoding::Block(format) = self.encoding else { return };
        let at: &[usize] = match format {
            BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4_K | BlockFormat::Q5_K => &[0, 2],
            BlockFormat::Q2_K => &[80, 82],
            BlockFormat::Q3_K => &[108],
            BlockFormat::Q6_K => &[208],
            BlockFormat::TQ1_0 => &[52],
            BlockFormat::TQ2_0 => &[64],
            BlockFormat::NVFP4 => {
                // 2^-6, which is halved.
                self.supply.chunks_exact_mut(format.bytes()).for_each(|block| block[..4].fill(8));
                return;
            }
            _ if format.ggml_type().is_none() => {
                for block in self.supply.chunks_exact_mut(format.bytes()) {
                    // Zeros are at most 16; 0x7f is no number of FP8.
                    let limit = if matches!(format, BlockFormat::Fp8x32 | BlockFormat::Fp8x128) {
                        0xfe
                    } else {
                        0xff
                    };
                    block[4..].iter_mut().for_each(|code| *code &= limit);
                    block[4] &= if matches!(format, BlockFormat::Uint4x32 | BlockFormat::Uint4x128) {
                        15
                    } else {
                        limit
                    };
                    let scales = if format == BlockFormat::Fp4x16 { 2 } else { 1 };
                    block[..4 * scales].copy_from_slice(&2f32.powi(-11).to_le_bytes().repeat(scales));
                }
                return;
            }
            _ => &[0],
        };
        for block in self.supply.chunks_exact_mut(format.bytes()) {
            for &at in at {
                // An f16 of 2^-11 to 2^-10; the exponent of MXFP4 is its second byte.
                block[at + 1] = 0x10 | (block[at + 1] & 0x83);
            }
        }
    }

    fn ones(&mut self, len: usize) -> VectorId {
        let bytes: Vec<u8> = (0..len).flat_map(|_| 1f32.to_le_bytes()).collect();
        let view =
            TensorView { encoding: Encoding::Plain(DType::F32), shape: &[len], bytes: &bytes, order: None };
        self.backend.load_vector("ones", &[view]).expect("a vector")
    }

    fn load(&mut self) {
        let qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
        let [x, normed, qkv_buf, attended, inner] = [0, 1, 2, 3, 4].map(Buf);
        let norm = self.ones(HIDDEN);
        let table = self.matrix(VOCAB, HIDDEN);
        let mut body = vec![Op::Embed { table, out: x }];
        let mut attention = Vec::new();
        for layer in 0..LAYERS {
            attention.push(AttentionSpec {
                group: 0,
                layer: layer as u32,
                heads: HEADS,
                kv_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                scale: 0.125,
                softcap: None,
                window: None,
                chunked: false,
                temper: None,
                sinks: None,
                rope: Some(RopeId(0)),
                q_norm: None,
                own_kv: true,
                k_norm: None,
                v_norm: None,
                norm_last: false,
                norm_eps: 0.0,
            });
            let mut linear = |rows, cols, x, out, add| Op::Linear {
                x,
                weight: self.matrix(rows, cols),
                bias: None,
                out,
                add,
            };
            let activation = Activation::Silu;
            body.extend([
                Op::RmsNorm { x, weight: norm, eps: 1e-5, out: normed },
                linear(qkv, HIDDEN, normed, qkv_buf, false),
                Op::WriteKv { qkv: qkv_buf, spec: layer },
                Op::Attention { qkv: qkv_buf, spec: layer, out: attended },
                linear(HIDDEN, HIDDEN, attended, x, true),
                Op::RmsNorm { x, weight: norm, eps: 1e-5, out: normed },
            ]);
            let weight = self.matrix(2 * FFN, HIDDEN);
            body.push(Op::GatedLinear { x: normed, weight, bias: None, activation, out: inner });
            let weight = self.matrix(HIDDEN, FFN);
            body.push(Op::Linear { x: inner, weight, bias: None, out: x, add: true });
        }
        let head = Head { x, norm, eps: 1e-5, matrix: table, vocab: VOCAB, softcap: None };
        let inv_freq = (0..HEAD_DIM / 2).map(|i| 5e5f32.powf(-(i as f32) / 32.0)).collect();
        let program = Program {
            buffers: vec![HIDDEN, HIDDEN, qkv, HIDDEN, FFN],
            ropes: vec![Rope { inv_freq, scale: 1.0, axes: Vec::new() }],
            attention,
            body,
            head,
            ..Program::default()
        };
        self.backend.load_program(program, MAX_ROWS, 32, MAX_POSITION).expect("a program");
        let layout = KvLayout::full(LAYERS, KV_HEADS, HEAD_DIM, KvFormat::F16, BLOCK);
        self.backend.allocate_cache(&layout, &[MAX_POSITION / BLOCK]).expect("a cache");
    }

    /// Seconds of one step of `rows` rows for each of `sequences` sequences at `position`.
    fn step(&mut self, sequences: usize, position: usize, rows: usize) -> f64 {
        let mut batch = Batch::default();
        let per_sequence = MAX_POSITION / BLOCK / sequences;
        let length = (position + rows).div_ceil(BLOCK);
        assert!(length <= per_sequence);
        for s in 0..sequences {
            batch.spans.push(Span {
                first_row: batch.tokens.len() as u32,
                rows: rows as u32,
                first_position: position as u32,
                slot: s as u32,
                tentative_from: u32::MAX,
            });
            for _ in 0..rows {
                let token = self.next() as u32 % VOCAB as u32;
                batch.tokens.push(token);
            }
            batch.edit_table(s as u32, 0, 0, (0..length).map(|i| (s * per_sequence + i) as u32));
            batch.logit_rows.push(batch.tokens.len() as u32 - 1);
        }
        let start = Instant::now();
        self.backend.forward(&batch).expect("a step");
        start.elapsed().as_secs_f64()
    }

    /// Writes every block, so that reads go to memory and not to one page of zeros.
    fn touch_cache(&mut self) {
        self.step(1, 0, BLOCK);
        let copies = (1..(MAX_POSITION / BLOCK) as u32).map(|to| BlockCopy {
            group: 0,
            from: 0,
            to,
            tokens: BLOCK as u32,
        });
        let batch = Batch { copies: copies.collect(), ..Batch::default() };
        self.backend.forward(&batch).expect("copies");
    }

    /// Of the kind of number that the weights are multiplied as.
    fn multiply_rate(&self, machine: &Machine) -> f64 {
        match self.encoding {
            Encoding::Plain(_) | Encoding::Block(BlockFormat::Fp8x32 | BlockFormat::Fp8x128) => {
                machine.f32_flop_per_s
            }
            Encoding::Block(_) => machine.int8_op_per_s,
        }
    }

    fn prefill(&mut self, machine: &Machine) {
        self.step(1, 0, 64);
        let mut best = f64::MAX;
        for _ in 0..8 {
            best = best.min(self.step(1, 0, 512));
        }
        let flop = 2.0 * (BODY * 512 + HEAD) as f64 + 4.0 * (HEADS * HEAD_DIM * LAYERS * 512 * 256) as f64;
        println!(
            "prefill 512        {:7.2} t/s   {:5.1} % of the multiply rate",
            512.0 / best,
            100.0 * flop / best / self.multiply_rate(machine)
        );
    }

    fn decode(&mut self, machine: &Machine, sequences: usize, depth: usize, steps: usize) {
        self.step(sequences, depth, 1);
        let times: Vec<f64> = (0..steps).map(|i| self.step(sequences, depth + i, 1)).collect();
        let mean = times.iter().sum::<f64>() / steps as f64;
        let best = times.iter().copied().fold(f64::MAX, f64::min);
        let weights = self.encoding.bytes_per_value() * (BODY + HEAD) as f64;
        let bytes = weights + (sequences * depth * KV_BYTES) as f64;
        let flop = 2.0 * (sequences * (BODY + HEAD + 2 * HEADS * HEAD_DIM * LAYERS * depth)) as f64;
        println!(
            "decode {sequences:2} at {depth:5}  {:7.2} t/s   {:5.1} % of the bandwidth, {:5.1} % of the multiply rate \
             (best step {:.2} t/s, {:.1} %, {:.1} %)",
            sequences as f64 / mean,
            100.0 * bytes / mean / machine.read_bytes_per_s,
            100.0 * flop / mean / self.multiply_rate(machine),
            sequences as f64 / best,
            100.0 * bytes / best / machine.read_bytes_per_s,
            100.0 * flop / best / self.multiply_rate(machine),
        );
    }
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let parts = ["prefill", "decode", "x1", "x8", "x32", "deep"];
    let all = !wanted.iter().any(|w| parts.contains(&w.as_str()));
    let want = |name: &str| all || wanted.iter().any(|w| w == name);
    let mut machine = Machine::measure(None, None).expect("a measurement");
    println!(
        "{} threads, {}: reads {:.1} GB/s, multiplies {:.0} GFLOP/s in f32, {:.0} Gop/s in int8",
        machine.threads,
        machine.isa.name(),
        machine.read_bytes_per_s / 1e9,
        machine.f32_flop_per_s / 1e9,
        machine.int8_op_per_s / 1e9
    );
    if wanted == ["limits"] {
        return;
    }
    let named =
        |name: &str| BlockFormat::ALL.into_iter().find(|f| format!("{f:?}").eq_ignore_ascii_case(name));
    let encoding = wanted.iter().find_map(|name| match name.as_str() {
        "f16" => Some(Encoding::Plain(DType::F16)),
        "bf16" => Some(Encoding::Plain(DType::BF16)),
        name => named(name).map(Encoding::Block),
    });
    let encoding = encoding.unwrap_or(Encoding::Plain(DType::BF16));
    println!("weights: {encoding}");
    let backend = CpuBackend::new(CpuOptions::default()).expect("a backend");
    let mut bench = Bench { backend, random: 0x9e37_79b9_7f4a_7c15, supply: Vec::new(), encoding };
    let start = Instant::now();
    bench.load();
    println!("loaded in {:.1} s", start.elapsed().as_secs_f64());
    // From here on the limit is that of the memory in which the weights lie.
    machine.read_bytes_per_s = bench.backend.weight_read_rate().expect("a measurement");
    println!("the weights themselves can be read at {:.1} GB/s", machine.read_bytes_per_s / 1e9);
    if want("prefill") {
        bench.prefill(&machine);
    }
    for (name, sequences, steps) in [("x1", 1, 24), ("x8", 8, 16), ("x32", 32, 12)] {
        if want("decode") || want(name) {
            bench.decode(&machine, sequences, 128, steps);
        }
    }
    if want("deep") {
        bench.touch_cache();
        bench.decode(&machine, 1, 8192, 12);
    }
}
