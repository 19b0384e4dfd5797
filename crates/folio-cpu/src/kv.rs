//! KV bytes of one cache group on the host.
//!
//! Owns: where the K and V of a position lie, writing one position, copying positions between blocks. Must never: know which
//! sequence a block belongs to.
//!
//! # Layout
//!
//! A block is contiguous: `[layer][kv head]` pages, of a size that the layer's format decides. A page is the K plane, then the V
//! plane of `block_tokens` tokens:
//!
//! - K: groups of 8 tokens, lanes = tokens. bf16: `[dim pair][token]{even dim, odd dim}`, one dword per pair and token.
//!   f16, f32: `[dim][token]`. Either way two dims of 8 tokens are 16 consecutive values.
//! - V: `[token][dim]`.
//!
//! Invariant: nothing a reader computes depends on a position it does not attend to. Blocks are zeroed when the cache is
//! made and not when they are reused, so readers mask by position, never by value.

use folio_model::backend::{BlockCopy, KvFormat, KvGroup};
use half::{bf16, f16};

use crate::error::CpuError;
use crate::memory::HugeBuffer;

/// Tokens of a K group.
pub(crate) const GROUP: usize = 8;

#[derive(Debug)]
pub(crate) struct KvCache {
    pub(crate) group: KvGroup,
    pub(crate) block_tokens: usize,
    pub(crate) blocks: usize,
    /// Where the pages of each layer begin inside a block, in bytes.
    layers: Vec<usize>,
    block_bytes: usize,
    memory: HugeBuffer,
}

impl KvCache {
    /// `blocks` zeroed blocks. The caller checked the layout: even `head_dim`, `block_tokens` a multiple of [`GROUP`].
    pub(crate) fn new(group: KvGroup, block_tokens: usize, blocks: usize) -> Result<Self, CpuError> {
        let mut block_bytes = 0;
        let starts = group.formats.iter().map(|format| {
            let start = block_bytes;
            block_bytes += 2 * group.kv_heads * block_tokens * format.bytes_per_head(group.head_dim);
            start
        });
        let layers = starts.collect();
        let memory = HugeBuffer::zeroed(block_bytes.saturating_mul(blocks))?;
        Ok(Self { group, block_tokens, blocks, layers, block_bytes, memory })
    }

    #[inline(always)]
    pub(crate) fn format(&self, layer: u32) -> KvFormat {
        self.group.formats[layer as usize]
    }

    /// Bytes of the K plane, and of the V plane, of a page of this layer.
    #[inline(always)]
    pub(crate) fn plane_bytes(&self, layer: u32) -> usize {
        self.block_tokens * self.format(layer).bytes_per_head(self.group.head_dim)
    }

    /// Start of the page: K, and V [`Self::plane_bytes`] further.
    #[inline(always)]
    pub(crate) fn page(&self, block: u32, layer: u32, head: usize) -> *mut u8 {
        debug_assert!((block as usize) < self.blocks && head < self.group.kv_heads);
        let pages = block as usize * self.block_bytes + self.layers[layer as usize];
        self.memory.ptr().wrapping_add(pages + head * 2 * self.plane_bytes(layer))
    }

    /// Position of `(token, dim)` in a K plane of this format, in values.
    fn key_at(&self, format: KvFormat, token: usize, dim: usize) -> usize {
        let group = token / GROUP * GROUP * self.group.head_dim;
        let lane = token % GROUP;
        match format {
            KvFormat::BF16 => group + dim / 2 * 2 * GROUP + lane * 2 + dim % 2,
            KvFormat::F16 | KvFormat::F32 => group + dim * GROUP + lane,
        }
    }

    /// Stores K and V of one position, rounded to the cache's type.
    ///
    /// # Safety
    /// `block` and `layer` are in range, `token < block_tokens`, and nobody else touches this position of this page.
    pub(crate) unsafe fn write(
        &self,
        block: u32,
        layer: u32,
        head: usize,
        token: usize,
        k: &[f32],
        v: &[f32],
    ) {
        let (dim, format) = (self.group.head_dim, self.format(layer));
        debug_assert!(k.len() == dim && v.len() == dim && token < self.block_tokens);
        let keys = self.page(block, layer, head);
        let values = keys.wrapping_add(self.plane_bytes(layer));
        for d in 0..dim {
            let (key, value) = (self.key_at(format, token, d), token * dim + d);
            // SAFETY: both positions are inside their planes; the caller promises that no one else touches them.
            unsafe {
                match format {
                    KvFormat::F32 => {
                        *keys.cast::<f32>().add(key) = k[d];
                        *values.cast::<f32>().add(value) = v[d];
                    }
                    KvFormat::F16 => {
                        *keys.cast::<u16>().add(key) = f16::from_f32(k[d]).to_bits();
                        *values.cast::<u16>().add(value) = f16::from_f32(v[d]).to_bits();
                    }
                    KvFormat::BF16 => {
                        *keys.cast::<u16>().add(key) = bf16::from_f32(k[d]).to_bits();
                        *values.cast::<u16>().add(value) = bf16::from_f32(v[d]).to_bits();
                    }
                }
            }
        }
    }

    /// Copies the first `copy.tokens` positions of every page of one layer.
    ///
    /// # Safety
    /// Blocks are in range and differ, and nobody else touches this layer of block `to`.
    pub(crate) unsafe fn copy_layer(&self, copy: BlockCopy, layer: u32) {
        let (dim, format) = (self.group.head_dim, self.format(layer));
        let size = format.bytes_per_head(1);
        let tokens = copy.tokens as usize;
        let whole = tokens / GROUP * GROUP;
        for head in 0..self.group.kv_heads {
            let (from, to) = (self.page(copy.from, layer, head), self.page(copy.to, layer, head));
            let plane = self.plane_bytes(layer);
            // SAFETY: all ranges are inside the two pages, which are different ones.
            unsafe {
                std::ptr::copy_nonoverlapping(from, to, whole * dim * size);
                std::ptr::copy_nonoverlapping(from.add(plane), to.add(plane), tokens * dim * size);
                for token in whole..tokens {
                    for d in 0..dim {
                        let at = self.key_at(format, token, d) * size;
                        std::ptr::copy_nonoverlapping(from.add(at), to.add(at), size);
                    }
                }
            }
        }
    }
}
