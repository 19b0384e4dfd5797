//! KV bytes of one cache group on the host.
//!
//! Owns: where the K and V of a position lie, writing one position, copying positions between blocks. Must never: know which
//! sequence a block belongs to.
//!
//! # Layout
//!
//! A block is contiguous: `[layer][kv head]` pages, of a size that the layer's format decides. A page is the K plane and the V
//! plane of `block_tokens` tokens, then, in formats with scales, those of K and those of V, bf16, one per token:
//!
//! - K: groups of 8 tokens, lanes = tokens: `[unit][token]`. A unit is what a token stores for a few dims together: one f32 or
//!   f16; two bf16, even dim first; two codes of int8 or e4m3, likewise; two bytes of int4 for four dims, the first two in the
//!   low nibbles. So two dims of 8 tokens are 16 consecutive values in every format but int4, where four are.
//! - V: `[token][dim]` of floats and e4m3. int8: `[token pair][dim]{even, odd token}`. int4: `[token pair]`, then for each 32 dims
//!   16 times `{even, odd token}`, with dim `i` in the low nibble of byte `i` and dim `i + 16` in the high one; what is left of the
//!   dims, if anything, is cut in half in the same way. No byte has two tokens, which may be written at the same time.
//!
//! A page of latents is one plane, `[token][dim]` as V is, of which keys and values are read.
//!
//! A block of states has them layer after layer, in f32 as [`StatePlace`] lays them out.
//!
//! Invariant: nothing a reader computes depends on a position it does not attend to. Blocks are zeroed when the cache is
//! made and not when they are reused, so readers mask by position, never by value.

mod encode;

use std::sync::Arc;

use folio_model::backend::{BlockCopy, BlockMemory, KvFormat, KvGroup};
use folio_model::kv_format::{SCALE_BYTES, SCALED_HEAD_DIM_MAX};
use folio_model::program::StatePlace;
use half::{bf16, f16};

use crate::error::CpuError;
use crate::memory::HugeBuffer;
use encode::Codes;
pub(crate) use encode::{largest_magnitude, nearest, rotate};

/// Tokens of a K group.
pub(crate) const GROUP: usize = folio_model::check::GROUP;

/// What of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Key,
    /// Or a latent.
    Value,
}

#[derive(Debug)]
pub(crate) struct KvPages {
    pub(crate) group: KvGroup,
    pub(crate) blocks: usize,
    /// Where the pages of each layer begin inside a block, in bytes.
    layers: Vec<usize>,
    pub(crate) block_bytes: usize,
    memory: Arc<HugeBuffer>,
}

/// The blocks of all groups, whoever else has them.
pub(crate) struct SharedBlocks(Vec<(Arc<HugeBuffer>, usize)>);

impl SharedBlocks {
    pub(crate) fn of(caches: &[KvPages]) -> Self {
        Self(caches.iter().map(|cache| (cache.memory.clone(), cache.block_bytes)).collect())
    }

    /// Start and length of a block. Panics if there is none, or if so many `bytes` are not its.
    fn block(&self, group: usize, block: u32, bytes: usize) -> *mut u8 {
        let (memory, block_bytes) = &self.0[group];
        let start = block as usize * block_bytes;
        assert!(bytes == *block_bytes && start + bytes <= memory.len(), "a block of its group, as a whole");
        memory.ptr().wrapping_add(start)
    }
}

impl BlockMemory for SharedBlocks {
    fn block_bytes(&self, group: usize) -> usize {
        self.0[group].1
    }

    fn read(&self, group: usize, block: u32, into: &mut [u8]) {
        let from = self.block(group, block, into.len());
        // SAFETY: the block lies inside memory that this value keeps, and `into` does not; the caller's lease says that nobody
        // writes the block meanwhile ([`BlockMemory`]).
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    fn write(&self, group: usize, block: u32, from: &[u8]) {
        let to = self.block(group, block, from.len());
        // SAFETY: as above; the caller's ticket says that nobody else touches the block meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
}

impl KvPages {
    /// `blocks` zeroed blocks. The caller checked the layout: even `head_dim`, `block_tokens` a multiple of [`GROUP`].
    pub(crate) fn new(group: KvGroup, blocks: usize) -> Result<Self, CpuError> {
        let mut block_bytes = 0;
        let starts = group.formats.iter().map(|format| {
            let start = block_bytes;
            block_bytes += match group.state_values() {
                Some(values) => values * size_of::<f32>(),
                None => {
                    let vectors = group.vectors() * group.kv_heads * group.block_tokens;
                    vectors * format.bytes_per_head(group.head_dim)
                }
            };
            start
        });
        let layers = starts.collect();
        let memory = Arc::new(HugeBuffer::zeroed(block_bytes.saturating_mul(blocks))?);
        Ok(Self { group, blocks, layers, block_bytes, memory })
    }

    #[inline(always)]
    pub(crate) fn format(&self, layer: u32) -> KvFormat {
        self.group.formats[layer as usize]
    }

    /// Bytes of K, or of V, of one token of one head of this layer, without the scale.
    #[inline(always)]
    pub(crate) fn code_bytes(&self, layer: u32) -> usize {
        self.format(layer).code_bytes(self.group.head_dim)
    }

    /// Bytes of the K plane, and of the V plane, of a page of this layer. There is no K plane before latents.
    #[inline(always)]
    pub(crate) fn plane_bytes(&self, layer: u32) -> usize {
        if self.group.is_latent() { 0 } else { self.group.block_tokens * self.code_bytes(layer) }
    }

    /// Start of a part of a layer's state.
    pub(crate) fn state(&self, block: u32, place: StatePlace) -> *mut f32 {
        debug_assert!((block as usize) < self.blocks && self.group.state_values() > Some(place.offset));
        let layer = block as usize * self.block_bytes + self.layers[place.layer as usize];
        self.memory.ptr().wrapping_add(layer).cast::<f32>().wrapping_add(place.offset)
    }

    /// Start of the page: K, V [`Self::plane_bytes`] further, and as much further the scales.
    #[inline(always)]
    pub(crate) fn page(&self, block: u32, layer: u32, head: usize) -> *mut u8 {
        debug_assert!((block as usize) < self.blocks && head < self.group.kv_heads);
        let pages = block as usize * self.block_bytes + self.layers[layer as usize];
        let head_bytes = self.format(layer).bytes_per_head(self.group.head_dim);
        let head = head * self.group.vectors() * self.group.block_tokens * head_bytes;
        self.memory.ptr().wrapping_add(pages + head)
    }

    /// Where the first unit of a token lies in a K plane, in bytes; the next one is [`GROUP`] units further.
    fn key_at(&self, layer: u32, token: usize) -> usize {
        token / GROUP * GROUP * self.code_bytes(layer) + token % GROUP * unit_bytes(self.format(layer))
    }

    /// Stores K or V of one position, rounded to the format of the layer.
    ///
    /// # Safety
    /// `block` and `layer` are in range, `token < block_tokens`, and nobody else touches this half of this position of this
    /// page.
    pub(crate) unsafe fn write(
        &self,
        half: Half,
        block: u32,
        layer: u32,
        head: usize,
        token: usize,
        values: &[f32],
    ) {
        let (dim, format) = (self.group.head_dim, self.format(layer));
        debug_assert!(values.len() == dim && token < self.group.block_tokens);
        let (page, plane) = (self.page(block, layer, head), self.plane_bytes(layer));
        // Where the token begins, and units from one to the next.
        let (to, stride) = match half {
            Half::Key => (page.wrapping_add(self.key_at(layer, token)), GROUP),
            Half::Value => (page.wrapping_add(plane + token * self.code_bytes(layer)), 1),
        };
        // SAFETY: all positions are inside their planes; the caller promises that no one else touches them.
        unsafe {
            match format {
                KvFormat::F32 => {
                    for (d, x) in values.iter().enumerate() {
                        *to.cast::<f32>().add(d * stride) = *x;
                    }
                }
                KvFormat::F16 => {
                    for (d, x) in values.iter().enumerate() {
                        *to.cast::<u16>().add(d * stride) = f16::from_f32(*x).to_bits();
                    }
                }
                KvFormat::BF16 => {
                    for (d, x) in values.iter().enumerate() {
                        *to.cast::<u16>().add(d / 2 * 2 * stride + d % 2) = bf16::from_f32(*x).to_bits();
                    }
                }
                KvFormat::Int8 | KvFormat::Fp8 | KvFormat::Int4 => {
                    let scales = page.add(2 * plane).cast::<u16>().add(token);
                    let mut codes: Codes = [0; SCALED_HEAD_DIM_MAX];
                    let codes = &mut codes[..dim];
                    let scale = encode::encode(format, values, codes);
                    match half {
                        Half::Key => {
                            scales.write_unaligned(scale);
                            write_keys(format, codes, to);
                        }
                        Half::Value => {
                            scales.add(self.group.block_tokens).write_unaligned(scale);
                            let pair =
                                page.add(plane + token / 2 * 2 * self.code_bytes(layer)).add(token % 2);
                            write_values(format, codes, to, pair);
                        }
                    }
                }
            }
        }
    }

    /// Copies the first `copy.tokens` positions of every page of one layer, scales too; or its state.
    ///
    /// # Safety
    /// Blocks are in range and differ, and nobody else touches this layer of block `to`.
    pub(crate) unsafe fn copy_layer(&self, copy: BlockCopy, layer: u32) {
        if let Some(values) = self.group.state_values() {
            let place = StatePlace { group: copy.group, layer, offset: 0 };
            let (from, to) = (self.state(copy.from, place), self.state(copy.to, place));
            // SAFETY: both are of `values` values, in different blocks; nobody else touches the latter.
            return unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, values) };
        }
        let (format, bytes) = (self.format(layer), self.code_bytes(layer));
        let (tokens, plane) = (copy.tokens as usize, self.plane_bytes(layer));
        let whole = tokens / GROUP * GROUP;
        // A pair of values with an odd token that is not wanted: it is not read before it is written.
        let values = match format {
            KvFormat::Int8 | KvFormat::Int4 => tokens.next_multiple_of(2),
            _ => tokens,
        };
        let unit = unit_bytes(format);
        for head in 0..self.group.kv_heads {
            let (from, to) = (self.page(copy.from, layer, head), self.page(copy.to, layer, head));
            let copy = |at: usize, bytes: usize| {
                // SAFETY: all ranges are inside the two pages, which are different ones.
                unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), bytes) }
            };
            copy(plane, values * bytes);
            if self.group.is_latent() {
                continue;
            }
            copy(0, whole * bytes);
            for token in whole..tokens {
                for i in 0..bytes / unit {
                    copy(self.key_at(layer, token) + i * GROUP * unit, unit);
                }
            }
            if format.is_scaled() {
                copy(2 * plane, tokens * SCALE_BYTES);
                copy(2 * plane + self.group.block_tokens * SCALE_BYTES, tokens * SCALE_BYTES);
            }
        }
    }
}

/// Bytes that a token of a K group has side by side.
const fn unit_bytes(format: KvFormat) -> usize {
    match format {
        KvFormat::F32 | KvFormat::BF16 => 4,
        KvFormat::F16 | KvFormat::Int8 | KvFormat::Fp8 | KvFormat::Int4 => 2,
    }
}

/// # Safety
/// `keys` is the first unit of a token, and the token's units may be written.
unsafe fn write_keys(format: KvFormat, codes: &[u8], keys: *mut u8) {
    let unit = keys.cast::<[u8; 2]>();
    // SAFETY: the contract of this function.
    unsafe {
        if format == KvFormat::Int4 {
            for (i, c) in codes.chunks_exact(4).enumerate() {
                *unit.add(i * GROUP) = [c[0] | c[2] << 4, c[1] | c[3] << 4];
            }
        } else {
            for (i, c) in codes.chunks_exact(2).enumerate() {
                *unit.add(i * GROUP) = [c[0], c[1]];
            }
        }
    }
}

/// # Safety
/// `value` is where the token begins in the V plane, or `pair` its first byte where tokens lie in pairs; its bytes may be
/// written.
unsafe fn write_values(format: KvFormat, codes: &[u8], value: *mut u8, pair: *mut u8) {
    // SAFETY: the contract of this function.
    unsafe {
        match format {
            KvFormat::Int8 => codes.iter().enumerate().for_each(|(d, c)| *pair.add(2 * d) = *c),
            KvFormat::Int4 => write_nibbles(codes, pair),
            _ => codes.iter().enumerate().for_each(|(d, c)| *value.add(d) = *c),
        }
    }
}

/// # Safety
/// `pair` is this token's first byte in the V plane, and its bytes may be written.
unsafe fn write_nibbles(codes: &[u8], pair: *mut u8) {
    let mut byte = 0;
    for block in codes.chunks(32) {
        let (low, high) = block.split_at(block.len() / 2);
        for (low, high) in low.iter().zip(high) {
            // SAFETY: the contract of this function: there is a byte for two codes.
            unsafe { *pair.add(2 * byte) = low | high << 4 };
            byte += 1;
        }
    }
}

#[cfg(test)]
mod tests;
