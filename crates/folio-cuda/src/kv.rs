//! The paged KV cache of one group on the device: where its bytes lie, and the kernels that write them.
//!
//! Owns: the layout of a block. Must never: know which sequence a block belongs to, or what a block table says.
//!
//! # Layout
//!
//! A block is contiguous over all layers of its group, so that one copy moves it. Each layer has, one after the other:
//!
//! | part | shape |
//! |---|---|
//! | codes of K | `[kv head][token][KvFormat::code_bytes]` |
//! | codes of V | likewise |
//! | scales of K, of formats that have some | `[kv head][token]`, bf16 |
//! | scales of V | likewise |
//!
//! Codes are those of `kv_format::encode`, a byte each; of int4, byte `i` holds dim `2 * i` in its low nibble and `2 * i + 1` in the
//! high one. Tokens of a block are a multiple of 8, so every part begins at a multiple of 16 bytes.

use std::sync::{Arc, Once};

use folio_model::backend::{BlockMemory, HostBuffer, KvFormat, KvGroup};
use folio_model::program::AttentionSpec;

use crate::driver::{Arg, Copies, DevicePtr, Driver, DriverError, Launch};
use crate::planes::{Meta, Planes, RowBound};

type Result<T> = std::result::Result<T, DriverError>;

/// Where a layer's K and V lie in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPlace {
    pub format: KvFormat,
    /// Bytes from the start of the block.
    pub offset: u64,
}

/// Blocks of one cache group.
#[derive(Debug)]
pub struct KvPool {
    pub base: DevicePtr,
    pub blocks: u32,
    /// Bytes of one block; a multiple of 16.
    pub block_bytes: u64,
    pub block_tokens: u32,
    /// Where the group's block table begins among the words of a slot.
    pub table_start: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub layers: Vec<LayerPlace>,
}

/// The blocks of all pools, for copies beside the steps: where each pool begins, its blocks, and their bytes.
pub(crate) struct DeviceBlocks {
    pub copies: Arc<dyn Copies>,
    pub pools: Vec<(DevicePtr, u32, u64)>,
}

impl DeviceBlocks {
    fn block(&self, group: usize, block: u32, length: usize) -> DevicePtr {
        let (base, blocks, block_bytes) = self.pools[group];
        assert!(block < blocks && length as u64 == block_bytes, "a block of its group, as a whole");
        DevicePtr(base.0 + u64::from(block) * block_bytes)
    }
}

/// A device whose copies fail can do nothing any more: whoever copies panics, and gives up what it was at.
impl BlockMemory for DeviceBlocks {
    fn host_buffer(&self, bytes: usize) -> Arc<dyn HostBuffer> {
        let locked = self.copies.clone().host_buffer(bytes);
        locked.unwrap_or_else(|error| {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                tracing::warn!("host memory cannot be page-locked, and is copied slowly: {error}")
            });
            Arc::new(vec![0; bytes])
        })
    }

    fn block_bytes(&self, group: usize) -> usize {
        self.pools[group].2 as usize
    }

    fn read(&self, group: usize, block: u32, into: &mut [u8]) {
        let from = self.block(group, block, into.len());
        let read = self.copies.download(from, into);
        read.unwrap_or_else(|error| panic!("a block cannot be read: {error}"));
    }

    fn write(&self, group: usize, block: u32, from: &[u8]) {
        let to = self.block(group, block, from.len());
        let written = self.copies.upload(to, from);
        written.unwrap_or_else(|error| panic!("a block cannot be written: {error}"));
    }
}

impl KvPool {
    /// `blocks` zeroed blocks. A group without layers takes nothing.
    pub fn allocate(
        driver: &mut dyn Driver,
        group: &KvGroup,
        table_start: u32,
        blocks: usize,
    ) -> Result<Self> {
        let mut block_bytes = 0;
        let places = group.formats.iter().map(|format| {
            let place = LayerPlace { format: *format, offset: block_bytes };
            let head = format.bytes_per_head(group.head_dim);
            block_bytes += (2 * group.kv_heads * group.block_tokens * head) as u64;
            place
        });
        let layers = places.collect();
        let bytes = block_bytes * blocks as u64;
        let mut base = DevicePtr::default();
        if bytes > 0 {
            base = driver.allocate(bytes)?;
            driver.zero(base, bytes)?;
        }
        Ok(Self {
            base,
            blocks: blocks as u32,
            block_bytes,
            block_tokens: group.block_tokens as u32,
            table_start,
            kv_heads: group.kv_heads as u32,
            head_dim: group.head_dim as u32,
            layers,
        })
    }

    /// Gives the memory back.
    pub fn free(self, driver: &mut dyn Driver) -> Result<()> {
        if self.base == DevicePtr::default() { Ok(()) } else { driver.free(self.base) }
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.blocks)
    }

    /// Start of a block: [`KvPool::block_bytes`] bytes, all layers.
    pub fn block(&self, block: u32) -> DevicePtr {
        debug_assert!(block < self.blocks);
        self.base.offset(u64::from(block) * self.block_bytes)
    }

    /// Copies a whole block, whatever of it is written.
    pub fn copy(&self, driver: &mut dyn Driver, from: u32, to: u32) -> Result<()> {
        match from == to || self.block_bytes == 0 {
            true => Ok(()),
            false => driver.copy(self.block(from), self.block(to), self.block_bytes),
        }
    }

    pub fn format(&self, layer: u32) -> KvFormat {
        self.layers[layer as usize].format
    }

    /// A layer in block 0; it lies [`KvPool::block_bytes`] further in each following block.
    pub fn layer(&self, layer: u32) -> DevicePtr {
        self.base.offset(self.layers[layer as usize].offset)
    }
}

/// Queries as attention reads them, `[rows, heads, stride]`: normalized, rotated, in the type that meets the keys of the cache's
/// format (see [`Queries::bytes`]), zero behind `head_dim`. Those of an int4 cache are rotated as its keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queries(pub DevicePtr);

impl Queries {
    /// Values from one head to the next.
    pub const fn stride(head_dim: u32) -> u32 {
        head_dim.next_multiple_of(16)
    }

    /// Bytes of `rows` rows: f32 for a cache in f32, f16 for one in f16, bf16 for all others.
    pub fn bytes(format: KvFormat, rows: usize, heads: usize, head_dim: usize) -> u64 {
        let value = if format == KvFormat::F32 { 4 } else { 2 };
        (rows * heads * Self::stride(head_dim as u32) as usize * value) as u64
    }
}

/// A rotary embedding on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeOnDevice {
    /// f32, one per rotated pair.
    pub inv_freq: DevicePtr,
    /// Rotated pairs of a head.
    pub pairs: u32,
    /// Multiplies cosines and sines.
    pub scale: f32,
    /// `[rows, 2 * pairs]` f32: cosines, then sines, of each row of the step; filled by [`rope_table`].
    pub table: DevicePtr,
}

/// Fills the table of a rotary embedding for the rows of a step, once for all layers.
pub fn rope_table(driver: &mut dyn Driver, meta: Meta, rows: RowBound, rope: &RopeOnDevice) -> Result<()> {
    let args = [
        Arg::Ptr(meta.0),
        Arg::Ptr(rope.inv_freq),
        Arg::U32(rope.pairs),
        Arg::F32(rope.scale),
        Arg::Ptr(rope.table),
    ];
    driver.launch(&Launch {
        kernel: "rope_table",
        grid: [rows.bound, 1, 1],
        threads: 128.min(rope.pairs.next_multiple_of(32)),
        shared: 0,
        args: &args,
    })
}

/// What [`write_kv`] needs beside the specification.
#[derive(Clone, Copy, Debug)]
pub struct KvWrite<'a> {
    /// f32 plane of rows `[q heads | k heads | v heads]`; it stays as it is.
    pub qkv: &'a Planes,
    /// The embedding of `spec.rope`, its table filled.
    pub rope: Option<&'a RopeOnDevice>,
    /// f32 `[head_dim]`, of `spec.q_norm` and `spec.k_norm`.
    pub q_norm: Option<DevicePtr>,
    pub k_norm: Option<DevicePtr>,
    /// The pool of `spec.group`.
    pub pool: &'a KvPool,
    pub queries: Queries,
}

/// Normalizes and rotates q and k of every row, writes k and v to the cache, and q to `queries`. `rows` counts the step's rows.
pub fn write_kv(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    spec: &AttentionSpec,
    write: &KvWrite<'_>,
) -> Result<()> {
    let (pool, dim) = (write.pool, spec.head_dim as u32);
    let none = DevicePtr::default();
    let args = [
        Arg::Ptr(meta.0),
        Arg::U32(spec.group),
        Arg::Ptr(write.qkv.f32.unwrap_or_default()),
        Arg::U32(write.qkv.f32_stride),
        Arg::U32(spec.heads as u32),
        Arg::U32(spec.kv_heads as u32),
        Arg::U32(dim),
        Arg::Ptr(write.q_norm.unwrap_or_default()),
        Arg::Ptr(write.k_norm.unwrap_or_default()),
        Arg::F32(spec.norm_eps),
        Arg::Ptr(write.rope.map_or(none, |rope| rope.table)),
        Arg::U32(write.rope.map_or(0, |rope| rope.pairs)),
        Arg::Ptr(pool.layer(spec.layer)),
        Arg::U32(pool.block_bytes as u32),
        Arg::U32(pool.block_tokens),
        Arg::Ptr(write.queries.0),
        Arg::U32(Queries::stride(dim)),
    ];
    let kernel = match pool.format(spec.layer) {
        KvFormat::F32 => "write_kv_f32",
        KvFormat::F16 => "write_kv_f16",
        KvFormat::BF16 => "write_kv_bf16",
        KvFormat::Int8 => "write_kv_int8",
        KvFormat::Fp8 => "write_kv_fp8",
        KvFormat::Int4 => "write_kv_int4",
    };
    let heads = (spec.heads + 2 * spec.kv_heads) as u32;
    let grid = [rows.bound, heads.div_ceil(4), 1];
    driver.launch(&Launch { kernel, grid, threads: 128, shared: 0, args: &args })
}
