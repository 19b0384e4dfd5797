//! Speed of attention over a deep cache, in each format.
//!
//! Owns: a decoder that is nothing but attention, and the measurement: one sequence decodes at a fixed depth, formats take turns
//! in every round, and the median of the rounds counts. Must never: measure anything but steps (filling the cache is not).

use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use folio_cpu::{CpuBackend, CpuOptions};
use folio_model::backend::{Backend, Batch, BlockCopy, DType, KvFormat, KvLayout, Span, TensorView};
use folio_model::program::{AttentionSpec, Buf, Head, MatrixId, Op, Program};
use folio_model::quant::Encoding;
use serde::Serialize;

use super::{name, render};
use crate::bench::stats::{Random, median};
use crate::cli::BenchKvArgs;
use crate::progress::Bar;

const BLOCK: usize = 16;
/// Of the decoder: so small that its products take no time.
const HIDDEN: usize = 32;
/// Different tokens in the cache; blocks beyond repeat them, in memory of their own.
const FILLED: usize = 128;
/// Layers, each with a cache of its own: together more than the caches of a processor.
const LAYERS: usize = 8;
/// Steps of one format before the next has its turn.
const STEPS: usize = 4;
const ROUNDS: usize = 15;

/// Heads of an attention layer: "32x8x64" are 32 query heads over 8 KV heads of 64 dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Vec<usize> = text.split('x').map_while(|part| part.parse().ok()).collect();
        match numbers[..] {
            [heads, kv_heads, head_dim]
                if heads.min(kv_heads).min(head_dim) > 0
                    && heads.is_multiple_of(kv_heads)
                    && text.split('x').count() == 3 =>
            {
                Ok(Self { heads, kv_heads, head_dim })
            }
            _ => Err(format!("`{text}` is not HEADSxKV_HEADSxHEAD_DIM, such as 32x8x64")),
        }
    }
}

/// What was measured for one shape. f16 is the first format.
#[derive(Debug, Serialize)]
pub(super) struct Speeds {
    shape: Shape,
    depth: usize,
    layers: usize,
    backend: String,
    threads: usize,
    formats: Vec<Speed>,
}

#[derive(Debug, Serialize)]
struct Speed {
    format: String,
    /// Of K and V of the sequence in one layer.
    bytes: usize,
    /// Of one step in one layer: median of the rounds, and the least.
    us: f64,
    us_min: f64,
    /// Times as fast as f16: the median over the rounds of the quotients inside a round, which drift does not touch.
    against_f16: f64,
    bytes_per_s: f64,
}

impl Speeds {
    pub(super) fn table(&self) -> String {
        let Shape { heads, kv_heads, head_dim } = self.shape;
        let title = format!(
            "attention at depth {}, {heads} heads over {kv_heads} of {head_dim}, {} threads on {}\n",
            self.depth, self.threads, self.backend
        );
        let rows: Vec<Vec<String>> = self
            .formats
            .iter()
            .map(|speed| {
                vec![
                    speed.format.clone(),
                    format!("{:.1}", speed.us),
                    format!("{:.1}", speed.us_min),
                    format!("{:.2}", speed.against_f16),
                    format!("{:.1}", speed.bytes_per_s / 1e9),
                ]
            })
            .collect();
        title + &render(&["KV", "us a layer", "least", "f16 = 1", "GB/s"], &rows)
    }
}

pub(super) fn measure(args: &BenchKvArgs, depth: usize) -> Result<Vec<Speeds>> {
    let asked: Vec<KvFormat> = args.format.iter().filter_map(|format| format.format()).collect();
    args.shape.iter().map(|shape| measure_shape(args, *shape, depth, &asked)).collect()
}

fn measure_shape(args: &BenchKvArgs, shape: Shape, depth: usize, asked: &[KvFormat]) -> Result<Speeds> {
    let mut formats = vec![KvFormat::F16];
    formats.extend(asked.iter().filter(|format| **format != KvFormat::F16));
    if let Some(reason) = formats.iter().find_map(|format| format.refusal(shape.head_dim)) {
        bail!("{reason}; leave it out with --format");
    }
    let mut sides = Vec::new();
    for format in &formats {
        let side = Side::new(args, shape, depth, *format);
        sides.push(side.with_context(|| format!("{format} for {shape:?}"))?);
    }
    let bar = Bar::items("rounds", ROUNDS as u64);
    // [format][round]
    let mut times = vec![Vec::new(); sides.len()];
    for round in 0..=ROUNDS {
        bar.advance("");
        for (side, times) in sides.iter_mut().zip(&mut times) {
            let us = side.steps()?;
            // The first round warms up.
            if round > 0 {
                times.push(us);
            }
        }
    }
    bar.finish();
    let rows = formats.iter().zip(&times).map(|(format, taken)| {
        let us = median(taken.clone());
        let bytes = 2 * shape.kv_heads * depth * format.bytes_per_head(shape.head_dim);
        Speed {
            format: name(*format),
            bytes,
            us,
            us_min: taken.iter().copied().fold(f64::INFINITY, f64::min),
            against_f16: median(times[0].iter().zip(taken).map(|(base, us)| base / us).collect()),
            bytes_per_s: bytes as f64 / us * 1e6,
        }
    });
    Ok(Speeds {
        shape,
        depth,
        layers: LAYERS,
        backend: sides[0].backend.name(),
        threads: sides[0].backend.threads(),
        formats: rows.collect(),
    })
}

/// One format: a backend whose cache is full to the depth.
struct Side {
    backend: CpuBackend,
    batch: Batch,
}

impl Side {
    fn new(args: &BenchKvArgs, shape: Shape, depth: usize, format: KvFormat) -> Result<Self> {
        let threads = args.threads.map(|n| n as usize);
        let mut backend = CpuBackend::new(CpuOptions { threads, isa: None })?;
        let program = program(&mut backend, shape)?;
        backend.load_program(program, FILLED, 1, depth)?;
        let layout = KvLayout::full(LAYERS, shape.kv_heads, shape.head_dim, format, BLOCK);
        let blocks = depth.div_ceil(BLOCK).max(FILLED / BLOCK);
        backend.allocate_cache(&layout, &[blocks])?;
        let span = |rows: usize, first_position: usize| Span {
            first_row: 0,
            rows: rows as u32,
            first_position: first_position as u32,
            slot: 0,
            tentative_from: u32::MAX,
        };
        let rows = FILLED.min(depth);
        let mut batch = Batch {
            tokens: (0..rows as u32).collect(),
            spans: vec![span(rows, 0)],
            logit_rows: vec![0],
            ..Batch::default()
        };
        batch.edit_table(0, 0, 0, 0..depth.div_ceil(BLOCK) as u32);
        backend.forward(&batch)?;
        batch.edits.clear();
        let filled = (rows / BLOCK).max(1);
        batch.copies = (filled..blocks).map(|to| copy(to % filled, to)).collect();
        batch.tokens = vec![0];
        batch.spans = vec![span(1, depth - 1)];
        backend.forward(&batch)?;
        batch.copies.clear();
        Ok(Self { backend, batch })
    }

    /// Microseconds of one layer of one step.
    fn steps(&mut self) -> Result<f64> {
        let began = Instant::now();
        for _ in 0..STEPS {
            self.backend.forward(&self.batch)?;
        }
        Ok(began.elapsed().as_secs_f64() * 1e6 / (STEPS * LAYERS) as f64)
    }
}

fn copy(from: usize, to: usize) -> BlockCopy {
    BlockCopy { group: 0, from: from as u32, to: to as u32, tokens: BLOCK as u32 }
}

/// Layers of attention over what one small matrix makes of a token.
fn program(backend: &mut CpuBackend, shape: Shape) -> Result<Program> {
    let Shape { heads, kv_heads, head_dim } = shape;
    let qkv = (heads + 2 * kv_heads) * head_dim;
    let mut random = Random::new(7);
    let mut matrix = |rows: usize, cols: usize| -> Result<MatrixId> {
        // In -1..1; so products with a row of such numbers are a few units large.
        let mut unit = || (random.draw() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let bytes: Vec<u8> = (0..rows * cols).flat_map(|_| unit().to_le_bytes()).collect();
        let encoding = Encoding::Plain(DType::F32);
        let view = TensorView { encoding, shape: &[rows, cols], bytes: &bytes, order: None };
        Ok(backend.load_matrix("attention alone", &[view])?)
    };
    let (embed, project) = (matrix(FILLED, HIDDEN)?, matrix(qkv, HIDDEN)?);
    let ones: Vec<u8> = (0..HIDDEN).flat_map(|_| 1f32.to_le_bytes()).collect();
    let view =
        TensorView { encoding: Encoding::Plain(DType::F32), shape: &[HIDDEN], bytes: &ones, order: None };
    let norm = backend.load_vector("attention alone", &[view])?;
    let [x, qkv_buf, out] = [0, 1, 2].map(Buf);
    let mut body = vec![
        Op::Embed { table: embed, out: x },
        Op::Linear { x, weight: project, bias: None, out: qkv_buf, add: false },
    ];
    let mut attention = Vec::new();
    for layer in 0..LAYERS {
        attention.push(AttentionSpec {
            group: 0,
            layer: layer as u32,
            heads,
            kv_heads,
            head_dim,
            scale: (head_dim as f32).powf(-0.5),
            softcap: None,
            window: None,
            chunked: false,
            temper: None,
            sinks: None,
            rope: None,
            q_norm: None,
            own_kv: true,
            k_norm: None,
            v_norm: None,
            norm_last: false,
            norm_eps: 1e-6,
        });
        body.push(Op::WriteKv { qkv: qkv_buf, spec: layer });
        body.push(Op::Attention { qkv: qkv_buf, spec: layer, out });
    }
    let head = Head { x, norm, eps: 1e-6, matrix: embed, vocab: FILLED, softcap: None };
    let buffers = vec![HIDDEN, qkv, heads * head_dim];
    Ok(Program { buffers, attention, body, head, ..Program::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_parsed_strictly() {
        assert_eq!("32x8x64".parse(), Ok(Shape { heads: 32, kv_heads: 8, head_dim: 64 }));
        for wrong in ["", "32", "32x8", "32x8x", "32x8x64x2", "32x7x64", "0x1x8", "8x0x8", "ax8x64", "8x8x0"]
        {
            assert!(wrong.parse::<Shape>().is_err(), "{wrong}");
        }
    }
}
