//! What is stored is what `folio_model::kv_format` defines, wherever it lies.

use folio_model::backend::{BlockCopy, GroupKind, KvFormat, KvGroup};
use folio_model::kv_format::{Encoded, LEVELS, decode, encode};

use super::*;

const BLOCK: usize = 16;

fn cache(head_dim: usize, formats: &[KvFormat]) -> KvPages {
    let formats = formats.to_vec();
    let group = KvGroup { kind: GroupKind::Full, block_tokens: BLOCK, kv_heads: 2, head_dim, formats };
    KvPages::new(group, 3).expect("memory")
}

fn vector(head_dim: usize, seed: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..head_dim).map(|d| ((seed * 131 + d * 71) as f32).sin() * 3.0).collect();
    x[seed % head_dim] *= 7.0;
    x
}

/// Bytes of a plane and bf16 scales, read one by one.
struct Page<'a>(&'a KvPages, u32, u32, usize);

impl Page<'_> {
    fn byte(&self, at: usize) -> u8 {
        // SAFETY: tests ask for bytes of the page.
        unsafe { *self.0.page(self.1, self.2, self.3).add(at) }
    }
    fn half(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.byte(at), self.byte(at + 1)])
    }
    fn scale(&self, which: usize, token: usize) -> bf16 {
        let at = 2 * self.0.plane_bytes(self.2) + (which * BLOCK + token) * SCALE_BYTES;
        bf16::from_bits(self.half(at))
    }
    /// Codes of a key and of a value, from the description of the layout.
    fn codes(&self, token: usize) -> [Vec<u8>; 2] {
        let (dim, format) = (self.0.group.head_dim, self.0.format(self.2));
        let (group, lane, plane) = (token / 8, token % 8, self.0.plane_bytes(self.2));
        let key = |d: usize| match format {
            KvFormat::Int4 => {
                let byte = self.byte(group * 8 * dim / 2 + d / 4 * 16 + lane * 2 + d % 2);
                if d % 4 < 2 { byte & 15 } else { byte >> 4 }
            }
            _ => self.byte(group * 8 * dim + d / 2 * 16 + lane * 2 + d % 2),
        };
        let value = |d: usize| match format {
            KvFormat::Int4 => {
                let half = (dim - d / 32 * 32).min(32) / 2;
                let byte = d / 32 * 16 + d % 32 % half;
                let byte = self.byte(plane + token / 2 * dim + byte * 2 + token % 2);
                if d % 32 < half { byte & 15 } else { byte >> 4 }
            }
            KvFormat::Int8 => self.byte(plane + token / 2 * 2 * dim + 2 * d + token % 2),
            _ => self.byte(plane + token * dim + d),
        };
        [(0..dim).map(key).collect(), (0..dim).map(value).collect()]
    }
}

fn check(page: &Page<'_>, token: usize, format: KvFormat, seed: usize) {
    let codes = page.codes(token);
    for (which, codes) in codes.into_iter().enumerate() {
        let expected = encode(format, &vector(page.0.group.head_dim, seed + which));
        let got = Encoded { scale: page.scale(which, token), codes };
        assert_eq!(got, expected, "{format} token {token} which {which}");
    }
}

const SCALED: [KvFormat; 3] = [KvFormat::Int8, KvFormat::Fp8, KvFormat::Int4];

#[test]
fn codes_and_scales_are_those_of_the_definition() {
    for head_dim in [8, 16, 24, 64, 80, 96, 128] {
        // Layers of different formats: pages have different sizes.
        let cache = cache(head_dim, &[SCALED[0], SCALED[1], KvFormat::F32, SCALED[2]]);
        let seed = |layer: usize, head: usize, token: usize| 1000 * layer + 100 * head + 3 * token;
        for layer in 0..4 {
            for head in 0..2 {
                for token in 0..BLOCK {
                    let (k, v) = (seed(layer, head, token), seed(layer, head, token) + 1);
                    let (k, v) = (vector(head_dim, k), vector(head_dim, v));
                    // SAFETY: in range; nobody else is here.
                    unsafe {
                        cache.write(Half::Key, 1, layer as u32, head, token, &k);
                        cache.write(Half::Value, 1, layer as u32, head, token, &v);
                    }
                }
            }
        }
        for (layer, format) in [(0, SCALED[0]), (1, SCALED[1]), (3, SCALED[2])] {
            for head in 0..2 {
                for token in 0..BLOCK {
                    let page = Page(&cache, 1, layer as u32, head);
                    check(&page, token, format, seed(layer, head, token));
                }
            }
        }
        let copy = BlockCopy { group: 0, from: 1, to: 2, tokens: 11 };
        for (layer, format) in [(0, SCALED[0]), (1, SCALED[1]), (3, SCALED[2])] {
            // SAFETY: in range; nobody else is here.
            unsafe { cache.copy_layer(copy, layer as u32) };
            for token in 0..11 {
                check(&Page(&cache, 2, layer as u32, 1), token, format, seed(layer, 1, token));
            }
            assert_eq!(Page(&cache, 2, layer as u32, 1).scale(0, 11), bf16::ZERO, "not copied");
        }
    }
}

#[test]
fn odd_vectors_are_those_of_the_definition() {
    let mut vectors = vec![vec![0.0; 32], vec![-0.0; 32], vec![1e-17; 32], vec![5e-15; 32], vec![2e38; 32]];
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let mut x = vector(32, 4);
        x[9] = odd;
        vectors.push(x);
    }
    for seed in 0..300 {
        vectors.push(vector(32, seed).iter().map(|x| x * (seed as f32 * 0.2 - 30.0).exp2()).collect());
    }
    for x in &vectors {
        for format in SCALED {
            let mut codes = vec![9; x.len()];
            let scale = bf16::from_bits(encode::encode(format, x, &mut codes));
            let expected = encode(format, x);
            assert_eq!(scale.to_bits(), expected.scale.to_bits(), "{format} {x:?}");
            assert_eq!(codes, expected.codes, "{format} {x:?}");
        }
    }
}

#[test]
fn every_code_of_e4m3_is_met() {
    let codes: Vec<u8> = (0..=0x7eu8).chain(0x80..=0xfe).collect();
    for chunk in codes.chunks(31) {
        let mut whole = chunk.to_vec();
        whole.push(0x7e);
        let x = decode(KvFormat::Fp8, &Encoded { scale: bf16::ONE, codes: whole.clone() });
        let mut got = vec![0; whole.len()];
        let scale = encode::encode(KvFormat::Fp8, &x, &mut got);
        assert_eq!((scale, got), (bf16::ONE.to_bits(), whole));
    }
    assert_eq!(LEVELS.map(i32::from).iter().sum::<i32>(), 0);
}
