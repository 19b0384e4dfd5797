//! One group of the reference backend's paged KV cache: f32 numbers that went through the cache's format once.

use crate::backend::{BlockCopy, KvGroup};
use crate::kv_format::stored;
use crate::program::StatePlace;

/// `(layer, block, token in block, kv head)`
pub type At = (usize, usize, usize, usize);

pub struct Cache {
    pub group: KvGroup,
    pub block_tokens: usize,
    pub blocks: usize,
    /// `[block, token, layer, kv head, head_dim]`; of states `[block, layer, value]`, and of those and latents no values.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    pub fn new(group: KvGroup, blocks: usize) -> Self {
        let block_tokens = group.block_tokens;
        let block = block_tokens * group.layers() * group.kv_heads * group.head_dim;
        let state = group.state_values().map_or(block, |values| group.layers() * values);
        let values = if group.is_latent() { 0 } else { block };
        let (keys, values) = (vec![0.0; blocks * state], vec![0.0; blocks * values]);
        Self { group, block_tokens, blocks, keys, values }
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

    pub fn write_latent(&mut self, layer: usize, block: usize, token: usize, latent: &[f32]) {
        let start = self.offset((layer, block, token, 0));
        let latent = stored(self.group.formats[layer], latent);
        self.keys[start..start + latent.len()].copy_from_slice(&latent);
    }

    pub fn key(&self, at: At) -> &[f32] {
        let start = self.offset(at);
        &self.keys[start..start + self.group.head_dim]
    }

    pub fn value(&self, at: At) -> &[f32] {
        let start = self.offset(at);
        &self.values[start..start + self.group.head_dim]
    }

    /// A part of a layer's state in block `to`, where it becomes that of block `from` first; without such, zeros.
    pub fn carry(&mut self, place: StatePlace, values: usize, from: Option<usize>, to: usize) -> &mut [f32] {
        let all = self.group.state_values().unwrap_or(0);
        let start = |block: usize| (block * self.group.layers() + place.layer as usize) * all + place.offset;
        let own = start(to)..start(to) + values;
        match from {
            Some(from) => self.keys.copy_within(start(from)..start(from) + values, own.start),
            None => self.keys[own.clone()].fill(0.0),
        }
        &mut self.keys[own]
    }

    pub fn copy(&mut self, copy: &BlockCopy) {
        if let Some(values) = self.group.state_values() {
            let block = self.group.layers() * values;
            let from = copy.from as usize * block;
            return self.keys.copy_within(from..from + block, copy.to as usize * block);
        }
        let token = self.group.layers() * self.group.kv_heads * self.group.head_dim;
        let block = token * self.block_tokens;
        let (from, to, size) =
            (copy.from as usize * block, copy.to as usize * block, copy.tokens as usize * token);
        self.keys.copy_within(from..from + size, to);
        if !self.group.is_latent() {
            self.values.copy_within(from..from + size, to);
        }
    }

    fn offset(&self, (layer, block, token, head): At) -> usize {
        let KvGroup { kv_heads, head_dim, .. } = self.group;
        (((block * self.block_tokens + token) * self.group.layers() + layer) * kv_heads + head) * head_dim
    }
}
