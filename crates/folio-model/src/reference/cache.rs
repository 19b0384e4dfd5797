//! The paged KV cache of the reference backend: f32 numbers that went through the cache's dtype once.

use crate::backend::{BlockCopy, DType, KvLayout};

/// `(layer, block, token in block, kv head)`
pub type At = (usize, usize, usize, usize);

pub struct Cache {
    pub layout: KvLayout,
    pub blocks: usize,
    /// `[block, token, layer, kv head, head_dim]`
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    pub fn new(layout: KvLayout, blocks: usize) -> Self {
        let size = blocks * layout.block_tokens * layout.layers * layout.kv_heads * layout.head_dim;
        Self { layout, blocks, keys: vec![0.0; size], values: vec![0.0; size] }
    }

    pub fn write(&mut self, layer: usize, block: usize, token: usize, k: &[f32], v: &[f32]) {
        let start = self.offset((layer, block, token, 0));
        for (i, (k, v)) in k.iter().zip(v).enumerate() {
            self.keys[start + i] = round(self.layout.dtype, *k);
            self.values[start + i] = round(self.layout.dtype, *v);
        }
    }

    pub fn key(&self, at: At) -> &[f32] {
        let start = self.offset(at);
        &self.keys[start..start + self.layout.head_dim]
    }

    pub fn value(&self, at: At) -> &[f32] {
        let start = self.offset(at);
        &self.values[start..start + self.layout.head_dim]
    }

    pub fn copy(&mut self, copy: &BlockCopy) {
        let token = self.layout.layers * self.layout.kv_heads * self.layout.head_dim;
        let block = token * self.layout.block_tokens;
        let (from, to, size) =
            (copy.from as usize * block, copy.to as usize * block, copy.tokens as usize * token);
        self.keys.copy_within(from..from + size, to);
        self.values.copy_within(from..from + size, to);
    }

    fn offset(&self, (layer, block, token, head): At) -> usize {
        let KvLayout { layers, kv_heads, head_dim, block_tokens, .. } = self.layout;
        (((block * block_tokens + token) * layers + layer) * kv_heads + head) * head_dim
    }
}

fn round(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::F16 => half::f16::from_f32(value).to_f32(),
        DType::BF16 => half::bf16::from_f32(value).to_f32(),
    }
}
