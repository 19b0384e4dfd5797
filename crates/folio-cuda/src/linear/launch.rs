//! Launches of products and of embeddings.
//!
//! Owns: which kernel a segment and a number of rows get, and its arguments. Must never: allocate.

use folio_model::backend::DType;

use super::unpack::Codes;
use super::{DeviceMatrix, Kind, Scratch, Segment, library, pack};
use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
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

/// Rows of the batch that a block of each kernel takes, and up to how many rows in all it is chosen.
const FEW: u32 = 8;
const SOME: u32 = 32;
const SOME_AT_MOST: u32 = 64;
const MANY: u32 = 64;

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
    let (suffix, threads, grid) = if rows.bound <= FEW {
        ("8", 128, [tiles, rows.bound.div_ceil(FEW), 1])
    } else if rows.bound <= SOME_AT_MOST {
        ("32", 128, [tiles, rows.bound.div_ceil(SOME), 1])
    } else {
        ("wide", 256, [tiles.div_ceil(8), rows.bound.div_ceil(MANY), 1])
    };
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
        kernel: &format!("{}_{suffix}", prefix(kind)),
        grid,
        threads,
        shared: 0,
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
    pub const FEW: u32 = FEW;
    pub const MANY: u32 = MANY;
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
        let (suffix, threads, rows_of_a_block) = match rows.tile_rows {
            FEW => ("experts_8", 128, if floats { 32 } else { 16 }),
            _ => ("experts_wide", 256, 128),
        };
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
            kernel: &format!("{}_{suffix}", prefix(segment.kind)),
            grid: [blocks, rows.tiles_bound, range.parts],
            threads,
            shared: 0,
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
