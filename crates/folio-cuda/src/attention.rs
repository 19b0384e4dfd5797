//! Launches of attention over the paged cache.
//!
//! Owns: which form computes a tile of queries, and the workspace of the form that is split. Must never: let a choice reach a bit
//! of a result; see `kernels/attention.cuh`, which says what the arithmetic of a row is fixed by.

use folio_model::backend::KvFormat;
use folio_model::program::AttentionSpec;

use crate::driver::{Arg, DeviceInfo, DevicePtr, Driver, DriverError, Launch};
use crate::kv::{KvPool, Queries};
use crate::planes::{Meta, Planes};
use crate::rows::planes;

/// Positions whose result is kept apart when a row's attention is split: absolute, from a multiple of it.
pub const CHUNK: u32 = 256;
/// Largest heads.
pub const HEAD_DIM_MAX: usize = 256;
/// Rows (token, head of a group) of a warp; tiles of no more may be split.
const WARP_ROWS: u32 = 16;
/// Shared memory that the system takes of each block, and that a multiprocessor has beyond what one block may have.
const RESERVED: u32 = 1024;

/// Most that the tiles of a launch can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileBounds {
    pub tiles: u32,
    /// Tokens of a tile, up to [`crate::planes::word::TILE_TOKENS`].
    pub tile_tokens: u32,
    /// Rows of the step.
    pub rows: u32,
    /// Positions of a sequence, the rows of the step among them.
    pub positions: u32,
}

impl TileBounds {
    /// Rows of a tile that a warp has room for.
    fn tile_rows(&self, spec: &AttentionSpec) -> u32 {
        WARP_ROWS.min(self.tile_tokens * (spec.heads / spec.kv_heads) as u32)
    }
}

/// Tokens whose heads of a group are rows of one warp; at least 1.
pub fn warp_tokens(spec: &AttentionSpec) -> u32 {
    (WARP_ROWS * spec.kv_heads as u32 / spec.heads as u32).max(1)
}

/// How a launch divides its work. Any plan gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPlan {
    /// Tiles of up to 16 rows (token, head of a group) and up to this many chunks get a block for each chunk, and a merge; all
    /// others one block that walks their chunks. 0: no tile is split.
    pub split: u32,
    /// Bytes of the workspace; 0 without a split.
    pub workspace_bytes: u64,
}

impl AttentionPlan {
    /// Splits where whole tiles are too few for the device, and where the workspace is at most `most_bytes`.
    pub fn new(info: &DeviceInfo, spec: &AttentionSpec, bounds: &TileBounds, most_bytes: u64) -> Self {
        let walking = Self::walking();
        let split = Self::splitting(spec, bounds);
        let blocks = u64::from(bounds.tiles) * spec.kv_heads as u64;
        let many = blocks >= 4 * u64::from(info.multiprocessors);
        if many || split.split <= 1 || split.workspace_bytes > most_bytes { walking } else { split }
    }

    /// One block walks all chunks of a tile.
    pub const fn walking() -> Self {
        Self { split: 0, workspace_bytes: 0 }
    }

    /// Every tile that can be is split, however long its sequence.
    pub fn splitting(spec: &AttentionSpec, bounds: &TileBounds) -> Self {
        // A window that begins anywhere in a chunk reaches into one more than its length fills; a tile's tokens into another.
        let of_window = |window: u32| (window.saturating_add(bounds.tile_tokens)).div_ceil(CHUNK) + 1;
        let chunks = bounds.positions.div_ceil(CHUNK);
        let split = spec.window.map_or(chunks, |window| chunks.min(of_window(window)));
        let rows = u64::from(bounds.tile_rows(spec));
        let parts = u64::from(bounds.tiles) * spec.kv_heads as u64 * u64::from(split) * rows;
        let part = 4 * (u64::from(Queries::stride(spec.head_dim as u32)) + 2);
        Self { split, workspace_bytes: parts * part }
    }
}

/// What [`attend`] needs beside the specification.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Written by [`crate::kv::write_kv`].
    pub queries: Queries,
    /// The pool of `spec.group`.
    pub pool: &'a KvPool,
    /// f32 `[heads]`, of `spec.sinks`.
    pub sinks: Option<DevicePtr>,
    /// `[rows, heads * head_dim]`
    pub out: &'a Planes,
    pub bounds: TileBounds,
    pub plan: AttentionPlan,
    /// [`AttentionPlan::workspace_bytes`]; of no meaning before or after.
    pub workspace: DevicePtr,
}

/// Causal attention of the step's queries over the cache, into the planes that `out` has.
pub fn attend(
    driver: &mut dyn Driver,
    meta: Meta,
    spec: &AttentionSpec,
    work: &Attention<'_>,
) -> Result<(), DriverError> {
    let (pool, format) = (work.pool, work.pool.format(spec.layer));
    let (kv_heads, bounds) = (spec.kv_heads as u32, &work.bounds);
    let tile_rows = bounds.tile_rows(spec);
    let blocks = u64::from(bounds.tiles) * u64::from(kv_heads) * u64::from(work.plan.split.max(1));
    let crowded = blocks > u64::from(driver.info().multiprocessors);
    let fit = Fit::new(format, spec.head_dim as u32, tile_rows, crowded, driver.info().shared_bytes);
    let mut args = vec![
        Arg::Ptr(meta.0),
        Arg::U32(pool.table_start),
        Arg::Ptr(pool.layer(spec.layer)),
        Arg::U32(pool.block_bytes as u32),
        Arg::U32(pool.block_tokens),
        Arg::U32(spec.heads as u32),
        Arg::U32(kv_heads),
        Arg::U32(spec.head_dim as u32),
        Arg::Ptr(work.queries.0),
        Arg::F32(spec.scale),
        Arg::F32(spec.softcap.unwrap_or(0.0)),
        Arg::U32(spec.window.unwrap_or(0)),
        Arg::Ptr(work.sinks.unwrap_or_default()),
        Arg::U32(work.plan.split),
        Arg::U32(fit.slots),
        Arg::U32(tile_rows),
        Arg::Ptr(work.workspace),
    ];
    args.extend(planes(work.out));
    let mut launch = |kernel: &str, grid: [u32; 3], shared: u32| {
        driver.launch(&Launch { kernel, grid, threads: 128, shared, args: &args })
    };
    if format == KvFormat::F32 {
        return launch("attention_f32", [bounds.rows, (spec.heads as u32).div_ceil(4), 1], 0);
    }
    let group = spec.heads as u32 / kv_heads;
    let runs = (bounds.tile_tokens * group).div_ceil(4 * WARP_ROWS);
    launch(
        kernel(format, spec.head_dim),
        [bounds.tiles, kv_heads * runs, work.plan.split.max(1)],
        fit.shared_bytes,
    )?;
    if work.plan.split > 1 {
        let kernel = if format == KvFormat::Int4 { "attention_merge_rotated" } else { "attention_merge" };
        launch(kernel, [bounds.tiles, kv_heads, 1], 0)?;
    }
    Ok(())
}

/// The kernel for heads of up to 64, 128 or 256 dimensions.
fn kernel(format: KvFormat, head_dim: usize) -> &'static str {
    let size = [64, 128].iter().filter(|most| head_dim > **most).count();
    let names = match format {
        KvFormat::F32 => ["attention_f32"; 3],
        KvFormat::F16 => ["attention_f16_64", "attention_f16_128", "attention_f16_256"],
        KvFormat::BF16 => ["attention_bf16_64", "attention_bf16_128", "attention_bf16_256"],
        KvFormat::Int8 => ["attention_int8_64", "attention_int8_128", "attention_int8_256"],
        KvFormat::Fp8 => ["attention_fp8_64", "attention_fp8_128", "attention_fp8_256"],
        KvFormat::Int4 => ["attention_int4_64", "attention_int4_128", "attention_int4_256"],
    };
    names[size]
}

/// How much of the cache a block holds in shared memory; as `layout_of` and `leaf_of` of `attention_tiles.cu` have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fit {
    /// Leaves: of warps that have one of their own, in tiles of up to 16 rows: 4, 2 or 1; in others, the one that is worked on and the next.
    slots: u32,
    shared_bytes: u32,
}

impl Fit {
    /// The most slots; where multiprocessors have several blocks each, the most with which two are there at once, if there are such.
    fn new(format: KvFormat, head_dim: u32, tile_rows: u32, crowded: bool, most_bytes: u32) -> Self {
        let with = |slots| Fit { slots, shared_bytes: shared_bytes(format, head_dim, tile_rows, slots) };
        let within = |most: u32| [4, 2].into_iter().map(with).find(|fit| fit.shared_bytes <= most);
        let beside = crowded.then(|| within((most_bytes + RESERVED) / 2 - RESERVED)).flatten();
        beside.or_else(|| within(most_bytes)).unwrap_or_else(|| with(1))
    }
}

fn shared_bytes(format: KvFormat, head_dim: u32, tile_rows: u32, slots: u32) -> u32 {
    if format == KvFormat::F32 {
        return 0; // Its kernel has none but its own.
    }
    let dims = Queries::stride(head_dim);
    let row = format.code_bytes(dims as usize) as u32;
    // Rows that do not fill the banks evenly are an odd number of units, so that they lie in different banks.
    let stride = if row.is_multiple_of(128) { row } else { (row.div_ceil(16) | 1) * 16 };
    let (pairs, sums) = (1024, 5 * tile_rows * 4 * (dims + 4) + 640);
    pairs + sums + slots * (1536 + 128 * stride)
}

/// Most bytes of shared memory that heads of this size take at least; more than a device has means that it cannot attend.
pub fn least_shared_bytes(format: KvFormat, head_dim: usize) -> u32 {
    shared_bytes(format, head_dim as u32, WARP_ROWS, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_and_head_fits_the_smallest_device() {
        for format in KvFormat::ALL {
            for head_dim in (8..=HEAD_DIM_MAX).step_by(8) {
                let least = least_shared_bytes(format, head_dim);
                assert!(least <= 163 << 10, "{format} {head_dim}: {least}");
                for (tile_rows, crowded) in [(4, false), (16, false), (4, true), (16, true)] {
                    let fit = Fit::new(format, head_dim as u32, tile_rows, crowded, 163 << 10);
                    assert!(fit.shared_bytes <= 163 << 10, "{format} {head_dim}: {fit:?}");
                }
            }
        }
    }
}
