//! Attention over the paged cache: against f64 over what the cache gives back, and bit for bit the same however a step is cut.

use folio_cuda::Meta;
use folio_cuda::attention::{Attention, AttentionPlan, TileBounds, attend};
use folio_cuda::kv::{KvPool, Queries};
use folio_emulator::Order;
use folio_model::backend::{GroupKind, HOLE, KvFormat, KvGroup};
use folio_model::kv_format::{decode, encode, rotate, stored};
use folio_model::program::{AttentionSpec, VectorId};
use half::{bf16, f16};

use crate::kv::{bytes_of_format, spec};
use crate::support::{Device, Random, Rows, device, metadata};

/// A model's layer and what its sequences hold: everything follows from the seed, a sequence's number and a position.
#[derive(Clone)]
struct Case {
    spec: AttentionSpec,
    format: KvFormat,
    block_tokens: usize,
    sinks: Option<Vec<f32>>,
    /// A position with a value of V (or else of K) that is no number.
    broken: Option<(usize, bool)>,
}

/// Rows of one sequence in a step.
#[derive(Clone, Copy)]
struct Part {
    sequence: usize,
    first_position: usize,
    rows: usize,
}

/// How a step is computed.
#[derive(Clone, Copy)]
struct How {
    tile_tokens: usize,
    split: bool,
    /// Tells in which order blocks were given out.
    seed: u64,
    order: Order,
}

const WALK: How = How { tile_tokens: 16, split: false, seed: 1, order: Order::Ascending };

fn case(format: KvFormat, heads: usize, kv_heads: usize, head_dim: usize) -> Case {
    Case { spec: spec(heads, kv_heads, head_dim), format, block_tokens: 16, sinks: None, broken: None }
}

impl Case {
    fn random(&self, sequence: usize, position: usize, what: u64) -> Random {
        let mut random = Random::new((sequence as u64) << 40 | (position as u64) << 8 | what);
        random.word();
        random
    }

    /// K or V of a position, `[kv_heads, head_dim]`.
    fn cached(&self, sequence: usize, position: usize, value: bool) -> Vec<f32> {
        let mut random = self.random(sequence, position, u64::from(value));
        let mut x = random.vector(self.spec.kv_heads * self.spec.head_dim, 1.5);
        if self.broken == Some((position, value)) {
            // A key that is infinite may have no weight at all.
            x[3] = if value { f32::NEG_INFINITY } else { f32::NAN };
        }
        x
    }

    /// Queries as the kernels get them: rounded, of an int4 cache rotated.
    fn queries(&self, sequence: usize, position: usize) -> Vec<f32> {
        let mut q = self.random(sequence, position, 2).vector(self.spec.heads * self.spec.head_dim, 2.0);
        if self.format == KvFormat::Int4 {
            q.chunks_mut(self.spec.head_dim).for_each(rotate);
        }
        q.iter().map(|q| self.rounded(*q)).collect()
    }

    fn rounded(&self, q: f32) -> f32 {
        match self.format {
            KvFormat::F32 => q,
            KvFormat::F16 => f16::from_f32(q).to_f32(),
            _ => bf16::from_f32(q).to_f32(),
        }
    }

    /// What the cache gives back, of int4 still rotated.
    fn read_back(&self, x: &[f32]) -> Vec<f32> {
        match self.format {
            KvFormat::Int4 => decode(self.format, &encode(self.format, x)),
            _ => stored(self.format, x),
        }
    }

    /// The definition, in f64: the result of a row, and what a relative error of 1 in every weight would make of it.
    fn expected(&self, sequence: usize, position: usize) -> Vec<(f64, f64)> {
        let (spec, dim) = (&self.spec, self.spec.head_dim);
        let q = self.queries(sequence, position);
        let first = spec.first_position(position);
        let past = |value| (first..=position).map(move |position| self.cached(sequence, position, value));
        let (keys, values): (Vec<_>, Vec<_>) = (past(false).collect(), past(true).collect());
        let mut out = Vec::new();
        for (head, q) in q.chunks(dim).enumerate() {
            let at = head / (spec.heads / spec.kv_heads) * dim;
            let scores = keys.iter().map(|k| {
                let k = self.read_back(&k[at..at + dim]);
                let dot: f64 = q.iter().zip(&k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let score = dot * f64::from(spec.scale);
                spec.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            });
            let scores: Vec<f64> = scores.collect();
            let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let (mut sum, mut row, mut size) = ((sink - max).exp(), vec![0.0f32; dim], 0.0);
            let mut exact = vec![0.0f64; dim];
            for (score, v) in scores.iter().zip(&values) {
                let weight = (score - max).exp();
                sum += weight;
                for (exact, v) in exact.iter_mut().zip(self.read_back(&v[at..at + dim])) {
                    *exact += weight * f64::from(v);
                    size += weight * f64::from(v.abs()) / dim as f64;
                }
            }
            row.iter_mut().zip(&exact).for_each(|(row, exact)| *row = (exact / sum) as f32);
            if self.format == KvFormat::Int4 {
                rotate(&mut row);
            }
            out.extend(row.iter().map(|row| (f64::from(*row), size / sum)));
        }
        out
    }

    /// Runs a step and gives the rows, `[rows, heads * head_dim]`. The cache holds what each sequence has up to the end of its
    /// part and, in the rest of its blocks and in all others, NaN.
    fn run(&self, parts: &[Part], how: How) -> Option<Vec<f32>> {
        let module = match self.format {
            KvFormat::F32 => "attention",
            KvFormat::F16 => "attention_f16",
            KvFormat::BF16 => "attention_bf16",
            KvFormat::Int8 => "attention_int8",
            KvFormat::Fp8 => "attention_fp8",
            KvFormat::Int4 => "attention_int4",
        };
        let mut device = device(&["attention", module], how.order)?;
        let (pool, spans) = self.fill(&mut device, parts, how.seed);
        let words = metadata(&mut device, &spans, self.block_tokens, how.tile_tokens);
        let meta = Meta(device.words(&words));
        let queries = self.upload_queries(&mut device, parts);
        let mut spec = self.spec.clone();
        let sinks = self.sinks.as_ref().map(|sinks| device.floats(sinks));
        spec.sinks = sinks.map(|_| VectorId(0));
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        let out = device.planes(rows, spec.heads * spec.head_dim);
        let tiles: usize = parts.iter().map(|part| part.rows.div_ceil(how.tile_tokens)).sum();
        let last = parts.iter().map(|part| part.first_position + part.rows).max().unwrap();
        let bounds = TileBounds {
            tiles: tiles as u32 + 1,
            tile_tokens: how.tile_tokens as u32,
            rows: rows as u32 + 1,
            positions: last as u32,
        };
        let plan = match how.split {
            true => AttentionPlan::splitting(&spec, &bounds),
            false => AttentionPlan::walking(),
        };
        let workspace = device.driver.allocate(plan.workspace_bytes.max(1)).unwrap();
        let work = Attention { queries, pool: &pool, sinks, out: &out, bounds, plan, workspace };
        attend(&mut *device.driver, meta, &spec, &work).unwrap();
        let found = device.f32_rows(&out, rows);
        device.check_bf16(&out, rows);
        Some(found)
    }

    /// A pool in which layer 1 holds the sequences, and the block tables.
    fn fill(&self, device: &mut Device, parts: &[Part], seed: u64) -> (KvPool, Vec<Rows>) {
        let (spec, tokens) = (&self.spec, self.block_tokens);
        let last = |part: &Part| part.first_position + part.rows;
        let blocks_len = parts.iter().map(|part| last(part).div_ceil(tokens)).max().unwrap() + 1;
        let blocks = parts.len() * blocks_len;
        let formats = vec![KvFormat::Int8, self.format];
        let group = KvGroup {
            kind: GroupKind::Full,
            block_tokens: tokens,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            formats: if spec.layer == 0 { vec![self.format] } else { formats },
        };
        let start = (spec.group as usize * blocks_len) as u32;
        let pool = KvPool::allocate(&mut *device.driver, &group, start, blocks).unwrap();
        let mut bytes = vec![0xff; pool.bytes() as usize];
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        let mut random = Random::new(seed);
        let mut spans = Vec::new();
        for part in parts {
            let first = spec.first_position(part.first_position);
            let table = (0..blocks_len).map(|block| {
                match (block + 1) * tokens <= first || block * tokens >= last(part) {
                    // Behind the window, or never needed.
                    true => HOLE,
                    false => free.swap_remove(random.word() as usize % free.len()),
                }
            });
            let table: Vec<u32> = table.collect();
            for position in first..last(part) {
                let block = table[position / tokens];
                self.write(&pool, &mut bytes, block, position % tokens, part.sequence, position);
            }
            let other = vec![HOLE; blocks_len];
            let tables = if spec.group == 0 { vec![table] } else { vec![other, table] };
            spans.push(Rows { first_position: part.first_position, rows: part.rows, tables });
        }
        device.driver.upload(pool.base, &bytes).unwrap();
        (pool, spans)
    }

    fn write(
        &self,
        pool: &KvPool,
        bytes: &mut [u8],
        block: u32,
        token: usize,
        sequence: usize,
        position: usize,
    ) {
        let (dim, tokens) = (self.spec.head_dim, self.block_tokens);
        let code = self.format.code_bytes(dim);
        let plane = self.spec.kv_heads * tokens;
        let offset = pool.layers[self.spec.layer as usize].offset;
        let layer = &mut bytes[(u64::from(block) * pool.block_bytes + offset) as usize..];
        for (value, start) in [(false, 0), (true, plane)] {
            for (head, x) in self.cached(sequence, position, value).chunks(dim).enumerate() {
                let (index, encoded) = (start + head * tokens + token, bytes_of_format(self.format, x));
                layer[index * code..(index + 1) * code].copy_from_slice(&encoded[..code]);
                if self.format.is_scaled() {
                    layer[2 * plane * code + 2 * index..][..2].copy_from_slice(&encoded[code..]);
                }
            }
        }
    }

    fn upload_queries(&self, device: &mut Device, parts: &[Part]) -> Queries {
        let (dim, stride) = (self.spec.head_dim, Queries::stride(self.spec.head_dim as u32) as usize);
        let mut bytes = Vec::new();
        let plain = match self.format {
            KvFormat::F32 | KvFormat::F16 => self.format,
            _ => KvFormat::BF16,
        };
        for part in parts {
            for position in part.first_position..part.first_position + part.rows {
                for head in self.queries(part.sequence, position).chunks(dim) {
                    let mut padded = head.to_vec();
                    padded.resize(stride, 0.0);
                    bytes.extend(bytes_of_format(plain, &padded));
                }
            }
        }
        Queries(device.bytes(&bytes))
    }

    /// Every row of a step is near its definition.
    fn check(&self, parts: &[Part], how: How) {
        let Some(found) = self.run(parts, how) else { return };
        // p is rounded before it meets V; the rest is f32.
        let error = match self.format {
            KvFormat::F32 => 4e-6,
            KvFormat::F16 => 6e-4,
            _ => 4.5e-3,
        };
        let rows = parts.iter().flat_map(|part| {
            (0..part.rows).flat_map(|row| self.expected(part.sequence, part.first_position + row))
        });
        for (i, (found, (want, size))) in found.iter().zip(rows).enumerate() {
            let width = self.spec.heads * self.spec.head_dim;
            let what = || format!("{} {:?}: row {}, value {}", self.format, self.spec, i / width, i % width);
            assert!(
                (f64::from(*found) - want).abs() <= error * size + 1e-6,
                "{}: {found}, not {want}",
                what()
            );
        }
    }
}

fn part(sequence: usize, first_position: usize, rows: usize) -> Part {
    Part { sequence, first_position, rows }
}

#[test]
fn every_format_and_head_dim() {
    for format in KvFormat::ALL {
        for dim in [16, 64, 80, 96, 128, 256] {
            let mut case = case(format, 4, 2, dim);
            case.spec.layer = 1;
            case.check(&[part(0, 40, 3), part(1, 0, 1), part(2, 70, 12)], WALK);
        }
    }
    // Heads that no load of 16 bytes fits.
    for (format, dim) in
        [(KvFormat::Fp8, 18), (KvFormat::F16, 10), (KvFormat::Int8, 36), (KvFormat::Int4, 24)]
    {
        case(format, 2, 1, dim).check(&[part(0, 20, 2)], WALK);
    }
}

#[test]
fn groups_of_any_size() {
    for (heads, kv_heads) in [(1, 1), (4, 2), (4, 1), (7, 1), (16, 2), (16, 1), (20, 1)] {
        for format in [KvFormat::BF16, KvFormat::Int8, KvFormat::F32] {
            let case = case(format, heads, kv_heads, 16);
            case.check(&[part(0, 9, 1), part(1, 60, 18)], WALK);
            case.check(&[part(0, 300, 1), part(1, 255, 2)], How { split: true, tile_tokens: 2, ..WALK });
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_size_of_blocks() {
    let parts = [part(0, 0, 5), part(1, 90, 20), part(2, 520, 1)];
    for format in KvFormat::ALL {
        for window in [None, Some(70)] {
            let bits = |block_tokens| {
                let mut case = case(format, 4, 2, 32);
                (case.spec.group, case.spec.window, case.block_tokens) = (1, window, block_tokens);
                let [walked, split] = [WALK, How { split: true, ..WALK }].map(|how| case.run(&parts, how));
                [walked, split].into_iter().flatten().flatten().map(f32::to_bits).collect::<Vec<_>>()
            };
            let expected = bits(16);
            for block_tokens in [8, 32, 64] {
                assert_eq!(bits(block_tokens), expected, "{format}, {window:?}: blocks of {block_tokens}");
            }
        }
    }
}

#[test]
fn windows_soft_caps_and_sinks() {
    for format in [KvFormat::BF16, KvFormat::Int4, KvFormat::F32, KvFormat::Fp8] {
        let mut case = case(format, 4, 2, 32);
        case.spec.group = 1;
        case.block_tokens = 24;
        case.sinks = Some(vec![0.5, -2.0, 4.0, 0.0]);
        case.check(&[part(0, 3, 4), part(1, 30, 2)], WALK);
        for window in [1, 7, 64, 100, 300] {
            case.spec.window = Some(window);
            let parts = [part(0, 0, 1), part(1, 90, 20), part(2, 290, 1), part(3, 520, 1)];
            case.check(&parts, WALK);
            case.check(&parts, How { split: true, ..WALK });
        }
        case.spec.softcap = Some(2.0);
        case.spec.scale = 1.0;
        case.check(&[part(0, 3, 4), part(1, 70, 2)], WALK);
    }
}

/// The rows of one sequence from `first`, computed in parts of `rows` rows, a step each.
fn in_parts(case: &Case, first: usize, last: usize, rows: usize, how: How) -> Option<Vec<u32>> {
    let mut found = Vec::new();
    for start in (first..last).step_by(rows) {
        found.extend(case.run(&[part(0, start, rows.min(last - start))], how)?);
    }
    Some(found.into_iter().map(f32::to_bits).collect())
}

#[test]
fn a_row_has_the_same_bits_however_a_step_is_cut() {
    let (first, last) = (240, 320);
    for format in KvFormat::ALL {
        let mut case = case(format, 4, 2, 32);
        if format == KvFormat::Fp8 {
            case.spec.window = Some(70);
        }
        let Some(want) = in_parts(&case, first, last, 80, WALK) else { return };
        let width = case.spec.heads * case.spec.head_dim;
        for (rows, how) in [
            (64, How { tile_tokens: 5, ..WALK }),
            (16, How { seed: 2, order: Order::Descending, ..WALK }),
            (16, How { tile_tokens: 3, split: true, order: Order::Shuffled { seed: 5 }, ..WALK }),
        ] {
            let found = in_parts(&case, first, last, rows, how).unwrap();
            assert!(found == want, "{format}: in parts of {rows} rows");
        }
        // One row at a time, beside other sequences or not.
        for (position, split) in
            [(240, false), (255, true), (256, true), (257, false), (303, true), (319, true)]
        {
            let how = How { split, seed: position as u64, ..WALK };
            let found = case.run(&[part(4, 10, 3), part(0, position, 1), part(5, 500, 1)], how).unwrap();
            let found: Vec<u32> = found[3 * width..4 * width].iter().map(|x| x.to_bits()).collect();
            let at = (position - first) * width;
            assert!(found == want[at..at + width], "{format}: position {position} alone, split: {split}");
        }
    }
}

#[test]
fn what_is_no_number_reaches_the_rows_that_attend_to_it_and_no_others() {
    for format in KvFormat::ALL {
        for value in [false, true] {
            // Positions 60 to 75 are one tile; one kv head is broken at 66, and those that do not attend to it have their own bits.
            let mut case = case(format, 8, 2, 16);
            case.spec.window = Some(5);
            let Some(want) = case.run(&[part(0, 60, 16)], WALK) else { return };
            case.broken = Some((66, value));
            for (rows, how) in [(16, WALK), (1, How { split: true, ..WALK })] {
                let found = in_parts(&case, 60, 76, rows, how).unwrap();
                for (i, (found, want)) in found.chunks(16).zip(want.chunks(16)).enumerate() {
                    let (position, head) = (60 + i / 8, i % 8);
                    let attends = (66..71).contains(&position) && head < 4;
                    let what =
                        || format!("{format}, value {value}, in {rows}: position {position}, head {head}");
                    let finite = found.iter().all(|x| f32::from_bits(*x).is_finite());
                    assert_eq!(finite, !attends, "{}", what());
                    assert!(attends || found.iter().zip(want).all(|(a, b)| *a == b.to_bits()), "{}", what());
                }
            }
        }
    }
}

#[test]
fn a_plan_splits_where_blocks_are_few() {
    let mut spec = spec(32, 8, 128);
    let info = folio_cuda::DeviceInfo {
        name: String::new(),
        arch: 90,
        multiprocessors: 132,
        memory_bytes: 80 << 30,
        shared_bytes: 227 << 10,
    };
    let bounds = |tiles, positions| TileBounds { tiles, tile_tokens: 1, rows: tiles, positions };
    let plan = AttentionPlan::new(&info, &spec, &bounds(4, 8192), 1 << 30);
    assert_eq!((plan.split, plan.workspace_bytes), (32, 4 * 8 * 32 * 4 * 4 * 130));
    assert_eq!(AttentionPlan::new(&info, &spec, &bounds(4, 256), 1 << 30), AttentionPlan::walking());
    assert_eq!(AttentionPlan::new(&info, &spec, &bounds(256, 8192), 1 << 30), AttentionPlan::walking());
    assert_eq!(AttentionPlan::new(&info, &spec, &bounds(4, 8192), 1 << 20), AttentionPlan::walking());
    spec.window = Some(1024);
    assert_eq!(AttentionPlan::new(&info, &spec, &bounds(4, 8192), 1 << 30).split, 6);
}
