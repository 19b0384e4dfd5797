//! Launches of products and of embeddings.
//!
//! Owns: which kernel a segment and a number of rows get, and its arguments. Must never: allocate.

use folio_model::backend::DType;

use super::unpack::Codes;
use super::{DeviceMatrix, Kind, Scratch, Segment, library, pack};
use crate::driver::{Arg, DeviceInfo, DevicePtr, Driver, DriverError, Launch};
use crate::planes::{Meta, Planes, RowBound};

type Result<T> = std::result::Result<T, DriverError>;

/// Where a product goes, f32.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    pub at: DevicePtr,
    /// Values from one row to the next.
    pub stride: u32,
    /// Add to what is there.
    pub add: bool,
}

/// How a kernel divides a product; `kernels/linear/product.cuh` has the same numbers.
#[derive(Clone, Copy, Debug)]
struct TileShape {
    suffix: &'static str,
    threads: u32,
    /// Rows of the batch, and tiles of 16 weight rows, of a block.
    rows: u32,
    tiles: u32,
    /// Rings in shared memory, and stages of each.
    rings: u32,
    stages: u32,
    /// What its block costs, in the unit of the others, when a multiprocessor has nothing else to do.
    cost: u64,
}

const FEW: TileShape =
    TileShape { suffix: "8", threads: 128, rows: 8, tiles: 1, rings: 4, stages: 4, cost: 0 };
const SOME: TileShape =
    TileShape { suffix: "32", threads: 128, rows: 32, tiles: 2, rings: 4, stages: 3, cost: 0 };
/// For more rows, the cheapest; the larger a block, the more often what it reads is used.
const MANY: [TileShape; 3] = [
    TileShape { suffix: "64", threads: 128, rows: 64, tiles: 4, rings: 4, stages: 3, cost: 7 },
    TileShape { suffix: "128", threads: 256, rows: 128, tiles: 8, rings: 1, stages: 3, cost: 20 },
    TileShape { suffix: "256", threads: 256, rows: 256, tiles: 8, rings: 1, stages: 3, cost: 32 },
];
const FEW_OF_EXPERT: TileShape = TileShape { suffix: "experts_8", ..FEW };
const MANY_OF_EXPERT: TileShape =
    TileShape { suffix: "experts_wide", threads: 256, rows: 64, tiles: 8, rings: 1, stages: 3, cost: 0 };

impl TileShape {
    /// The kernel for so many rows of the batch and tiles of weights. Any gives the same bits.
    fn of(rows: u32, tiles: u32, kind: Kind, info: &DeviceInfo) -> Self {
        if rows <= FEW.rows {
            return FEW;
        }
        if rows <= SOME.rows {
            return SOME;
        }
        let fits = |shape: &&TileShape| shape.shared_bytes(kind) <= info.shared_bytes;
        let cost = |shape: &&TileShape| {
            let blocks = rows.div_ceil(shape.rows) * tiles.div_ceil(shape.tiles);
            u64::from(blocks.div_ceil(info.multiprocessors.max(1))) * shape.cost
        };
        MANY.iter().filter(fits).min_by_key(cost).copied().unwrap_or(SOME)
    }

    /// Dynamic shared memory of a block.
    fn shared_bytes(&self, kind: Kind) -> u32 {
        let (loads, groups) = match kind {
            Kind::Plain(DType::F32) => return 0,
            Kind::Plain(_) => (4, 0),
            Kind::Blocks(layout) => {
                let loads = if matches!(layout.codes, Codes::Eight | Codes::Fp8) { 2 } else { 1 };
                (loads, if layout.group == 16 { 4 } else { 2 })
            }
        };
        // Codes, scales and minimums of each tile; 64 columns of each row.
        let stage = self.tiles * (512 * loads + 2 * 64 * groups) + 128 * self.rows;
        self.rings * self.stages * stage
    }
}

/// `out = W . x + bias` for every row, or `out += `. `scratch` is for matrices that a library has.
#[expect(clippy::too_many_arguments, reason = "what a product is of")]
pub fn product(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    x: &Planes,
    matrix: &DeviceMatrix,
    bias: Option<DevicePtr>,
    out: Output,
    scratch: &Scratch,
) -> Result<()> {
    if let Some(pinned) = &matrix.pinned {
        return library::product(driver, (meta, rows), x, pinned, bias, out, scratch);
    }
    for segment in &matrix.segments {
        let place = ProductPlace {
            bias: bias.map_or(DevicePtr::default(), |bias| bias.offset(4 * segment.first_row as u64)),
            out: Output { at: out.at.offset(4 * segment.first_row as u64), ..out },
        };
        match segment.kind {
            Kind::Plain(DType::F32) => floats(driver, meta, rows, x, (matrix, segment), &place)?,
            kind => halves(driver, meta, rows, x, (matrix, segment, kind), &place)?,
        }
    }
    Ok(())
}

/// Where a segment's part of a product goes.
struct ProductPlace {
    bias: DevicePtr,
    out: Output,
}

fn floats(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    x: &Planes,
    (matrix, segment): (&DeviceMatrix, &Segment),
    place: &ProductPlace,
) -> Result<()> {
    let x_at = x.f32.ok_or_else(|| absent("f32"))?;
    driver.launch(&Launch {
        kernel: "f32_8",
        grid: [segment.rows.div_ceil(32) as u32, rows.bound.div_ceil(8), 1],
        threads: 128,
        shared: 0,
        args: &[
            Arg::Ptr(meta.0),
            Arg::U32(rows.count_word),
            Arg::Ptr(x_at),
            Arg::U32(x.f32_stride),
            Arg::Ptr(segment.codes),
            Arg::U32(segment.rows as u32),
            Arg::U32(matrix.cols as u32),
            Arg::Ptr(place.bias),
            Arg::Ptr(place.out.at),
            Arg::U32(place.out.stride),
            Arg::U32(u32::from(place.out.add)),
        ],
    })
}

fn halves(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    x: &Planes,
    (matrix, segment, kind): (&DeviceMatrix, &Segment, Kind),
    place: &ProductPlace,
) -> Result<()> {
    let x_at = x.bf16.ok_or_else(|| absent("bf16"))?;
    let tiles = segment.rows.div_ceil(pack::TILE) as u32;
    let shape = TileShape::of(rows.bound, tiles, kind, driver.info());
    let mut args = vec![
        Arg::Ptr(meta.0),
        Arg::U32(rows.count_word),
        Arg::Ptr(x_at),
        Arg::U32(x.bf16_stride),
        Arg::Ptr(matrix.order),
    ];
    args.extend(weights(matrix, segment));
    args.extend([
        Arg::Ptr(place.bias),
        Arg::Ptr(place.out.at),
        Arg::U32(place.out.stride),
        Arg::U32(u32::from(place.out.add)),
    ]);
    driver.launch(&Launch {
        kernel: &format!("{}_{}", prefix(kind), shape.suffix),
        grid: [rows.bound.div_ceil(shape.rows), tiles.div_ceil(shape.tiles), 1],
        threads: shape.threads,
        shared: shape.shared_bytes(kind),
        args: &args,
    })
}

/// Which rows of the batch each expert works on, as lists on the device; see `kernels/linear/experts.cuh`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRows {
    /// Pairs, tiles.
    pub header: DevicePtr,
    pub tiles: DevicePtr,
    /// Pairs, expert by expert.
    pub list: DevicePtr,
    /// Most rows of a tile: [`ExpertRows::FEW`] or [`ExpertRows::MANY`]; the first where weights are f32.
    pub tile_rows: u32,
    /// Most tiles there are.
    pub tiles_bound: u32,
}

impl ExpertRows {
    pub const FEW: u32 = FEW_OF_EXPERT.rows;
    pub const MANY: u32 = MANY_OF_EXPERT.rows;
}

/// Which rows of a matrix are an expert's: `range` rows in each of `parts`, expert after expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRange {
    pub experts: u32,
    pub parts: u32,
    pub range: u32,
    /// Neighbouring pairs that read one row.
    pub share: u32,
}

/// Row `pair` of `out`, `[pairs, parts * range]`, becomes the product of its expert's weights and row `pair / share` of `x`, plus bias.
pub fn experts_product(
    driver: &mut dyn Driver,
    rows: &ExpertRows,
    range: ExpertRange,
    x: &Planes,
    matrix: &DeviceMatrix,
    bias: Option<DevicePtr>,
    out: Output,
) -> Result<()> {
    for segment in &matrix.segments {
        let floats = segment.kind == Kind::Plain(DType::F32);
        let (x_at, x_stride) = if floats { (x.f32, x.f32_stride) } else { (x.bf16, x.bf16_stride) };
        let x_at = x_at.ok_or_else(|| absent(if floats { "f32" } else { "bf16" }))?;
        let mut args = vec![
            Arg::Ptr(rows.header),
            Arg::Ptr(rows.tiles),
            Arg::Ptr(rows.list),
            Arg::U32(range.share),
            Arg::U32(range.experts),
            Arg::U32(range.range),
            Arg::U32(segment.first_row as u32),
            Arg::Ptr(x_at),
            Arg::U32(x_stride),
        ];
        let shape = if rows.tile_rows == ExpertRows::FEW { FEW_OF_EXPERT } else { MANY_OF_EXPERT };
        // A block has 32 weight rows in f32.
        let rows_of_a_block = if floats { 32 } else { 16 * shape.tiles };
        if floats {
            args.extend([
                Arg::Ptr(segment.codes),
                Arg::U32(segment.rows as u32),
                Arg::U32(matrix.cols as u32),
            ]);
        } else {
            args.push(Arg::Ptr(matrix.order));
            args.extend(weights(matrix, segment));
        }
        args.extend([Arg::Ptr(bias.unwrap_or_default()), Arg::Ptr(out.at), Arg::U32(out.stride)]);
        // A range may begin inside of a tile, and then ends in one more.
        let blocks = range.range.div_ceil(rows_of_a_block) + 1;
        driver.launch(&Launch {
            kernel: &format!("{}_{}", prefix(segment.kind), shape.suffix),
            grid: [blocks, rows.tiles_bound, range.parts],
            threads: shape.threads,
            shared: shape.shared_bytes(segment.kind),
            args: &args,
        })?;
    }
    Ok(())
}

/// `out[r] = table[token[r]]`, in the planes that `out` has.
pub fn embed(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    table: &DeviceMatrix,
    out: &Planes,
) -> Result<()> {
    for segment in &table.segments {
        let mut args = vec![Arg::Ptr(meta.0), Arg::U32(segment.first_row as u32)];
        match segment.kind {
            Kind::Plain(DType::F32) => {
                args.extend([Arg::Ptr(segment.codes), Arg::U32(segment.rows as u32)]);
            }
            _ => {
                args.push(Arg::Ptr(table.order));
                args.extend(weights(table, segment));
            }
        }
        args.extend([
            Arg::U32(table.cols as u32),
            Arg::Ptr(out.f32.unwrap_or_default()),
            Arg::U32(out.f32_stride),
            Arg::Ptr(out.bf16.unwrap_or_default()),
            Arg::U32(if out.bf16.is_some() { out.bf16_stride } else { 0 }),
        ]);
        let kernel = format!("{}_embed", prefix(segment.kind));
        driver.launch(&Launch {
            kernel: &kernel,
            grid: [rows.bound, 1, 1],
            threads: 256,
            shared: 0,
            args: &args,
        })?;
    }
    Ok(())
}

/// The kernels' `WEIGHTS_PARAMETERS`.
fn weights(matrix: &DeviceMatrix, segment: &Segment) -> [Arg; 7] {
    let (offset, group_shift) = match segment.kind {
        Kind::Plain(_) => (0, 0),
        Kind::Blocks(layout) => {
            let offset = if let Codes::Four { offset } = layout.codes { offset } else { 0 };
            (offset, (layout.group / 16).ilog2())
        }
    };
    [
        Arg::Ptr(segment.codes),
        Arg::Ptr(segment.scales),
        Arg::Ptr(segment.minimums),
        Arg::U32(segment.rows as u32),
        Arg::U32(pack::ktiles(matrix.cols) as u32),
        Arg::U32(offset),
        Arg::U32(group_shift),
    ]
}

/// How the names of a kind's kernels begin.
fn prefix(kind: Kind) -> &'static str {
    match kind {
        Kind::Plain(DType::F32) => "f32",
        Kind::Plain(DType::F16) => "f16",
        Kind::Plain(DType::BF16) => "bf16",
        Kind::Blocks(layout) => match (layout.codes, layout.group) {
            (Codes::Eight, 16) => "eight_16",
            (Codes::Eight, _) => "eight",
            (Codes::Fp8, _) => "fp8",
            (Codes::Four { .. }, 16) => "four_16",
            (Codes::Four { .. }, _) => "four",
            (Codes::Mx4, _) => "mx4",
            (Codes::Iq4, _) => "iq4",
        },
    }
}

pub(super) fn absent(plane: &str) -> DriverError {
    DriverError::Call { call: "product", reason: format!("the rows have no {plane} plane") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(rows: u32, tiles: u32, shared_bytes: u32) -> &'static str {
        let info = DeviceInfo {
            name: "a device".to_owned(),
            arch: 90,
            multiprocessors: 132,
            memory_bytes: 0,
            shared_bytes,
        };
        let shape = TileShape::of(rows, tiles, Kind::Plain(DType::BF16), &info);
        assert!(shape.shared_bytes(Kind::Plain(DType::BF16)) <= shared_bytes, "{shape:?}");
        shape.suffix
    }

    #[test]
    fn blocks_are_as_large_as_still_leaves_one_for_every_multiprocessor() {
        let most = 227 << 10;
        // 4,096 weight rows, then 28,672.
        let of = |rows| (shape(rows, 256, most), shape(rows, 1792, most));
        assert_eq!([1, 8, 9, 32].map(of), [("8", "8"), ("8", "8"), ("32", "32"), ("32", "32")]);
        assert_eq!([33, 64].map(of), [("64", "64"); 2]);
        assert_eq!(of(128), ("64", "128"));
        assert_eq!([1024, 4096].map(of), [("256", "256"); 2]);
    }

    #[test]
    fn no_block_wants_more_shared_memory_than_there_is() {
        for most in [99 << 10, 163 << 10, 227 << 10] {
            for rows in [1, 16, 64, 100, 300, 5000] {
                shape(rows, 256, most);
            }
        }
    }
}
