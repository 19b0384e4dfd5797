//! The KV write: the bytes of `kv_format`, and queries as attention reads them.

use folio_cuda::kv::{KvPool, KvWrite, Queries, RopeOnDevice, rope_table, write_kv};
use folio_cuda::planes::word;
use folio_cuda::{Meta, RowBound};
use folio_emulator::Order;
use folio_model::backend::{GroupKind, KvFormat, KvGroup};
use folio_model::kv_format::{encode, rotate, stored};
use folio_model::program::{AttentionSpec, RopeId, VectorId};
use half::{bf16, f16};

use crate::support::{Device, Random, Rows, device, metadata};

const BLOCK_TOKENS: usize = 16;
const FIRST: usize = 21;

pub fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec {
        group: 0,
        layer: 0,
        heads,
        kv_heads,
        head_dim,
        scale: (head_dim as f32).sqrt().recip(),
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
    }
}

/// A pool of one group with two layers, the second in `format`; its bytes are NaN.
fn pool(device: &mut Device, format: KvFormat, kv_heads: usize, head_dim: usize, blocks: usize) -> KvPool {
    let formats = vec![KvFormat::F16, format];
    let group = KvGroup { kind: GroupKind::Full, block_tokens: BLOCK_TOKENS, kv_heads, head_dim, formats };
    let pool = KvPool::allocate(&mut *device.driver, &group, 0, blocks).unwrap();
    device.driver.upload(pool.base, &vec![0xff; pool.bytes() as usize]).unwrap();
    pool
}

/// K and V bytes of one token of one head, scales behind them.
fn bytes_of(pool: &KvPool, bytes: &[u8], block: usize, token: usize, head: usize) -> [Vec<u8>; 2] {
    let (place, dim) = (pool.layers[1], pool.head_dim as usize);
    let code = place.format.code_bytes(dim);
    let plane = pool.kv_heads as usize * BLOCK_TOKENS;
    let layer = &bytes[block * pool.block_bytes as usize + place.offset as usize..];
    [0, plane].map(|start| {
        let index = start + head * BLOCK_TOKENS + token;
        let mut found = layer[index * code..(index + 1) * code].to_vec();
        if place.format.is_scaled() {
            found.extend(&layer[2 * plane * code + 2 * index..][..2]);
        }
        found
    })
}

/// The same bytes from the definition.
pub fn bytes_of_format(format: KvFormat, x: &[f32]) -> Vec<u8> {
    match format {
        KvFormat::F32 => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        KvFormat::F16 => x.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        KvFormat::BF16 => x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        KvFormat::Int8 | KvFormat::Fp8 | KvFormat::Int4 => {
            let encoded = encode(format, x);
            let mut bytes = encoded.codes.clone();
            if format == KvFormat::Int4 {
                bytes = encoded.codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
            }
            bytes.extend(encoded.scale.to_le_bytes());
            bytes
        }
    }
}

/// Head vectors of many kinds: ordinary, with outliers, tiny, nothing, no number.
fn vectors(random: &mut Random, heads: usize, dim: usize) -> Vec<f32> {
    (0..heads)
        .flat_map(|head| {
            let mut x = random.vector(dim, [1.0, 1e-4, 300.0, 1e-14][head % 4]);
            match head % 11 {
                3 => x.fill(0.0),
                4 => x[dim / 2] = f32::NAN,
                5 => x.fill(1e-17),
                6 => x[0] = f32::INFINITY,
                7 => x[dim - 1] *= 60.0,
                8 => x.iter_mut().for_each(|x| *x = -x.abs().round()),
                _ => {}
            }
            x
        })
        .collect()
}

/// Rows at positions [`FIRST`] and on, whose blocks are in no order.
fn step(device: &mut Device, rows: usize) -> (Meta, Vec<u32>) {
    let table = vec![5, 2, 4, 1, 3];
    let spans = [Rows { first_position: FIRST, rows, tables: vec![table.clone()] }];
    let words = metadata(device, &spans, BLOCK_TOKENS, 16);
    (Meta(device.words(&words)), table)
}

const BOUND: RowBound = RowBound { bound: 40, count_word: word::ROWS };

#[test]
fn what_is_written_is_what_the_format_says() {
    let Some(mut device) = device(&["kv"], Order::Shuffled { seed: 3 }) else { return };
    let (heads, kv_heads, rows) = (3, 3, 30);
    for format in KvFormat::ALL {
        for dim in [16, 24, 64, 80, 128, 256] {
            let mut spec = spec(heads, kv_heads, dim);
            spec.layer = 1;
            let width = (heads + 2 * kv_heads) * dim;
            let mut random = Random::new(dim as u64);
            let x: Vec<f32> =
                (0..rows).flat_map(|_| vectors(&mut random, heads + 2 * kv_heads, dim)).collect();
            let x: Vec<f32> = (0..rows)
                .flat_map(|row| {
                    // Every kind of vector in every place.
                    let heads: Vec<&[f32]> = x[row * width..(row + 1) * width].chunks(dim).collect();
                    (0..heads.len())
                        .flat_map(|i| heads[(i + row) % heads.len()].to_vec())
                        .collect::<Vec<f32>>()
                })
                .collect();
            let pool = pool(&mut device, format, kv_heads, dim, 6);
            let (meta, table) = step(&mut device, rows);
            let qkv = device.plane_of(width, &x);
            let queries = Queries(device.driver.allocate(Queries::bytes(format, rows, heads, dim)).unwrap());
            let write = KvWrite { qkv: &qkv, rope: None, q_norm: None, k_norm: None, pool: &pool, queries };
            write_kv(&mut *device.driver, meta, BOUND, &spec, &write).unwrap();
            let bytes = device.read(pool.base, pool.bytes() as usize);
            let mut untouched = bytes.clone();
            for row in 0..rows {
                let (block, token) =
                    (table[(FIRST + row) / BLOCK_TOKENS] as usize, (FIRST + row) % BLOCK_TOKENS);
                for head in 0..kv_heads {
                    let found = bytes_of(&pool, &bytes, block, token, head);
                    for (half, found) in found.iter().enumerate() {
                        let from = row * width + (heads + half * kv_heads + head) * dim;
                        let want = bytes_of_format(format, &x[from..from + dim]);
                        if !(format.is_scaled()) && x[from..from + dim].iter().any(|x| x.is_nan()) {
                            continue;
                        }
                        assert_eq!(found, &want, "{format} {dim}: row {row}, head {head}, half {half}");
                    }
                }
            }
            // The other layer, and blocks and tokens that are nobody's.
            let (layer, dims) = (pool.layers[1], pool.layers[1].format.bytes_per_head(dim));
            for row in 0..rows {
                let block = table[(FIRST + row) / BLOCK_TOKENS] as usize * pool.block_bytes as usize;
                let start = block + layer.offset as usize;
                untouched[start..start + 2 * kv_heads * BLOCK_TOKENS * dims].fill(0xff);
            }
            assert!(untouched.iter().all(|byte| *byte == 0xff), "{format} {dim}: other bytes were written");
            check_queries(&mut device, format, queries, &x, (rows, heads, dim, width));
        }
    }
}

fn check_queries(
    device: &mut Device,
    format: KvFormat,
    queries: Queries,
    x: &[f32],
    (rows, heads, dim, width): (usize, usize, usize, usize),
) {
    let stride = Queries::stride(dim as u32) as usize;
    let bytes = device.read(queries.0, Queries::bytes(format, rows, heads, dim) as usize);
    let one = bytes.len() / (rows * heads);
    for (i, found) in bytes.chunks(one).enumerate() {
        let from = i / heads * width + i % heads * dim;
        let mut want = x[from..from + dim].to_vec();
        if want.iter().any(|x| !x.is_finite()) {
            continue;
        }
        if format == KvFormat::Int4 {
            rotate(&mut want);
        }
        want.resize(stride, 0.0);
        let plain = match format {
            KvFormat::F32 | KvFormat::F16 => format,
            _ => KvFormat::BF16,
        };
        assert_eq!(found, bytes_of_format(plain, &want), "{format} {dim}: query {i}");
    }
}

#[test]
fn q_and_k_are_normalized_and_rotated() {
    let Some(mut device) = device(&["kv"], Order::Descending) else { return };
    let (heads, kv_heads, dim, rows) = (4, 2, 48, 9);
    // All pairs, some of them, and none; with a scale and with norms or without.
    for (pairs, scale, normed) in [(24, 1.0, false), (8, 1.3, true), (0, 1.0, true), (24, 0.7, true)] {
        let mut spec = spec(heads, kv_heads, dim);
        let mut random = Random::new(pairs as u64 + 1);
        let width = (heads + 2 * kv_heads) * dim;
        let x = random.vector(rows * width, 3.0);
        let (q_norm, k_norm) = (random.vector(dim, 1.0), random.vector(dim, 1.0));
        let inv_freq: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / pairs as f32)).collect();
        spec.layer = 1;
        spec.norm_eps = 1e-3;
        let on_device = normed.then(|| [&q_norm, &k_norm].map(|norm| device.floats(norm)));
        (spec.q_norm, spec.k_norm) = (on_device.map(|_| VectorId(0)), on_device.map(|_| VectorId(1)));
        spec.rope = (pairs > 0).then_some(RopeId(0));
        let (meta, table) = step(&mut device, rows);
        let rope = RopeOnDevice {
            inv_freq: device.floats(&inv_freq),
            pairs: pairs as u32,
            scale,
            table: device.driver.allocate((rows * 2 * pairs * 4).max(1) as u64).unwrap(),
        };
        if pairs > 0 {
            rope_table(&mut *device.driver, meta, BOUND, &rope).unwrap();
        }
        let pool = pool(&mut device, KvFormat::F32, kv_heads, dim, 6);
        let qkv = device.plane_of(width, &x);
        let bytes = Queries::bytes(KvFormat::F32, rows, heads, dim);
        let queries = Queries(device.driver.allocate(bytes).unwrap());
        let write = KvWrite {
            qkv: &qkv,
            rope: (pairs > 0).then_some(&rope),
            q_norm: on_device.map(|norms| norms[0]),
            k_norm: on_device.map(|norms| norms[1]),
            pool: &pool,
            queries,
        };
        write_kv(&mut *device.driver, meta, BOUND, &spec, &write).unwrap();
        let q = device.read_floats(queries.0, rows * heads * dim);
        let bytes = device.read(pool.base, pool.bytes() as usize);
        for row in 0..rows {
            let position = FIRST + row;
            let expected = |i: usize| {
                let head = &x[row * width + i * dim..][..dim];
                let norm = if i < heads { &q_norm } else { &k_norm };
                turned(head, normed.then_some((norm, spec.norm_eps)), &inv_freq, scale, position)
            };
            for head in 0..heads {
                near(&q[(row * heads + head) * dim..][..dim], &expected(head));
            }
            for head in 0..kv_heads {
                let block = table[position / BLOCK_TOKENS] as usize;
                let [k, v] = bytes_of(&pool, &bytes, block, position % BLOCK_TOKENS, head);
                let k: Vec<f32> = k.as_chunks().0.iter().map(|k| f32::from_le_bytes(*k)).collect();
                near(&k, &expected(heads + head));
                let from = row * width + (heads + kv_heads + head) * dim;
                assert_eq!(v, bytes_of_format(KvFormat::F32, &stored(KvFormat::F32, &x[from..from + dim])));
            }
        }
    }
}

/// A head as the reference has it, in f64.
fn turned(
    head: &[f32],
    norm: Option<(&Vec<f32>, f32)>,
    inv_freq: &[f32],
    scale: f32,
    position: usize,
) -> Vec<f64> {
    let mut x: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
    if let Some((weight, eps)) = norm {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let inverse = (mean + f64::from(eps)).sqrt().recip();
        x.iter_mut().zip(weight).for_each(|(x, weight)| *x *= inverse * f64::from(*weight));
    }
    for (i, freq) in inv_freq.iter().enumerate() {
        let (sin, cos) = (position as f64 * f64::from(*freq)).sin_cos();
        let (a, b) = (x[i], x[i + inv_freq.len()]);
        x[i] = (a * cos - b * sin) * f64::from(scale);
        x[i + inv_freq.len()] = (b * cos + a * sin) * f64::from(scale);
    }
    x
}

fn near(got: &[f32], want: &[f64]) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() < 2e-6, "dim {i}: {got}, not {want}");
    }
}

#[test]
fn blocks_are_copied_whole() {
    let Some(mut device) = device(&[], Order::Ascending) else { return };
    let pool = pool(&mut device, KvFormat::Int8, 2, 16, 4);
    let one: Vec<u8> = (0..pool.block_bytes).map(|i| i as u8).collect();
    device.driver.upload(pool.block(3), &one).unwrap();
    pool.copy(&mut *device.driver, 3, 1).unwrap();
    pool.copy(&mut *device.driver, 1, 1).unwrap();
    let found = device.read(pool.base, pool.bytes() as usize);
    let blocks: Vec<&[u8]> = found.chunks(pool.block_bytes as usize).collect();
    assert!(blocks[1] == one && blocks[3] == one);
    assert!([0, 2].iter().all(|block| blocks[*block].iter().all(|byte| *byte == 0xff)));
    let formats = [KvFormat::F16, KvFormat::Int8];
    let bytes: usize = formats.iter().map(|format| format.bytes_per_head(16)).sum();
    assert_eq!(pool.block_bytes as usize, 2 * 2 * BLOCK_TOKENS * bytes);
}
