//! One group of the reference backend's paged KV cache: f32 numbers that went through the cache's format once.

use crate::backend::{BlockCopy, KvGroup};
use crate::kv_format::stored;

/// `(layer, block, token in block, kv head)`
pub type At = (usize, usize, usize, usize);

pub struct Cache {
    pub group: KvGroup,
    pub block_tokens: usize,
    pub blocks: usize,
    /// `[block, token, layer, kv head, head_dim]`
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    pub fn new(group: KvGroup, blocks: usize) -> Self {
        let block_tokens = group.block_tokens;
        let size = blocks * block_tokens * group.layers() * group.kv_heads * group.head_dim;
        Self { group, block_tokens, blocks, keys: vec![0.0; size], values: vec![0.0; size] }
    }

    pub fn write(&mut self, layer: usize, block: usize, token: usize, k: &[f32], v: &[f32]) {
        let (start, format, dim) =
            (self.offset((layer, block, token, 0)), self.group.formats[layer], self.group.head_dim);
        for (i, (k, v)) in k.chunks(dim).zip(v.chunks(dim)).enumerate() {
            let at = start + i * dim..start + (i + 1) * dim;
            self.keys[at.clone()].copy_from_slice(&stored(format, k));
            self.values[at].copy_from_slice(&stored(format, v));
        }
    }

    pub fn key(&self, at: At) -> &[f32] {
        let start = self.offset(at);
        &self.keys[start..start + self.group.head_dim]
    }

    pub fn value(&self, at: At) -> &[f32] {
        let start = self.offset(at);
        &self.values[start..start + self.group.head_dim]
    }

    pub fn copy(&mut self, copy: &BlockCopy) {
        let token = self.group.layers() * self.group.kv_heads * self.group.head_dim;
        let block = token * self.block_tokens;
        let (from, to, size) =
            (copy.from as usize * block, copy.to as usize * block, copy.tokens as usize * token);
        self.keys.copy_within(from..from + size, to);
        self.values.copy_within(from..from + size, to);
    }

    fn offset(&self, (layer, block, token, head): At) -> usize {
        let KvGroup { kv_heads, head_dim, .. } = self.group;
        (((block * self.block_tokens + token) * self.group.layers() + layer) * kv_heads + head) * head_dim
    }
}
