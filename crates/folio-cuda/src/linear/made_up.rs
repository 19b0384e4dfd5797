//! Matrices that are made up where they lie, value for value those of [`folio_model::dummy`].
//!
//! Owns: what a kernel must know of an encoding to make its packed form. Must never: need the matrix on the host.

use folio_model::backend::{BackendError, DType};
use folio_model::dummy;
use folio_model::quant::{BlockFormat, Encoding};

use super::unpack::{Codes, Numbers, WeightLayout, unpack};
use super::{DeviceMatrix, Kind, Loader, Segment, check_size, failed, pack};
use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
use crate::kernels;

const THREADS: u32 = 256;

/// A matrix `[rows, cols]` as [`dummy::values`] has it. `None` where a block has more than one scale, or minimums, or where a launch
/// would not reach its end.
pub fn make_up(
    driver: &mut dyn Driver,
    name: &str,
    encoding: Encoding,
    [rows, cols]: [usize; 2],
) -> Result<Option<DeviceMatrix>, BackendError> {
    let known = dummy::ENCODINGS.contains(&encoding) && encoding.bytes(cols).is_some();
    if !known || rows == 0 || cols == 0 || blocks_of(rows.next_multiple_of(32) * cols).is_none() {
        return Ok(None);
    }
    check_size(name, rows, cols)?;
    let kind = Kind::of(encoding);
    if matches!(kind, Kind::Blocks(WeightLayout { minimums: true, .. })) {
        return Ok(None);
    }
    for module in [&kernels::MADE_UP, kind.weights().products()] {
        driver.load(module).map_err(failed)?;
    }
    let mut loader = Loader { driver, bytes: 0 };
    let segment = loader.room(kind, 0, rows, cols)?;
    match encoding {
        Encoding::Plain(dtype) => plain(loader.driver, &segment, dtype, cols),
        Encoding::Block(format) => blocks(loader.driver, &segment, format, cols),
    }
    .map_err(failed)?;
    Ok(Some(DeviceMatrix {
        rows,
        cols,
        bytes: loader.bytes,
        segments: vec![segment],
        pinned: None,
        order: DevicePtr::default(),
    }))
}

/// Which bits of the run a plain value keeps, and which are set.
fn bits(dtype: DType) -> (u32, u32) {
    match dtype {
        DType::F32 => (0x80ff_ffff, 0x3c00_0000),
        DType::F16 => (0x83ff, 0x2400),
        DType::BF16 => (0x80ff, 0x3c00),
    }
}

fn plain(driver: &mut dyn Driver, segment: &Segment, dtype: DType, cols: usize) -> Result<(), DriverError> {
    let (keep, set) = bits(dtype);
    let mut args = vec![Arg::Ptr(segment.codes), Arg::U32(segment.rows as u32), Arg::U32(cols as u32)];
    let (kernel, threads) = match dtype {
        DType::F32 => ("make_up_f32", segment.rows.next_multiple_of(32) * cols),
        DType::F16 | DType::BF16 => {
            args.push(Arg::U32(pack::ktiles(cols) as u32));
            ("make_up_sixteen", loads(segment.rows, pack::ktiles(cols)))
        }
    };
    args.extend([Arg::U32(keep), Arg::U32(set)]);
    launch(driver, kernel, threads, &args)
}

fn blocks(
    driver: &mut dyn Driver,
    segment: &Segment,
    format: BlockFormat,
    cols: usize,
) -> Result<(), DriverError> {
    let layout = WeightLayout::of(format);
    let of_a_tile = pack::ktiles(cols).div_ceil(pack::covers(layout.codes));
    let (values, bytes) = (format.values(), format.bytes());
    let (kernel, code_bytes) = match layout.codes {
        Codes::Eight | Codes::Fp8 => ("make_up_eight", values),
        Codes::Four { .. } | Codes::Mx4 | Codes::Iq4 => ("make_up_four", values / 2),
    };
    let mut args = vec![
        Arg::Ptr(segment.codes),
        Arg::U32(segment.rows as u32),
        Arg::U32(cols as u32),
        Arg::U32(of_a_tile as u32),
        Arg::U32(values as u32),
        Arg::U32(bytes as u32),
        Arg::U32((bytes - code_bytes) as u32),
    ];
    if kernel == "make_up_eight" {
        args.push(Arg::U32(u32::from(layout.codes == Codes::Fp8)));
    }
    launch(driver, kernel, loads(segment.rows, of_a_tile), &args)?;
    let groups = cols / layout.group;
    let args = [
        Arg::Ptr(segment.scales),
        Arg::U32(segment.rows as u32),
        Arg::U32(groups as u32),
        Arg::F32(scale(format)),
    ];
    launch(driver, "make_up_scales", segment.rows.next_multiple_of(pack::TILE) * groups, &args)
}

/// The scale of every block.
fn scale(format: BlockFormat) -> f32 {
    let block = dummy::values(Encoding::Block(format), format.bytes());
    let (mut codes, mut scales) =
        (vec![0; format.values()], vec![0.0; format.values() / WeightLayout::of(format).group]);
    unpack(format, &block, &mut Numbers { codes: &mut codes, scales: &mut scales, minimums: &mut [] });
    scales[0]
}

/// Threads of one load each.
fn loads(rows: usize, of_a_tile: usize) -> usize {
    rows.div_ceil(pack::TILE) * of_a_tile * 32
}

/// Blocks of a launch of so many threads, if there can be as many.
fn blocks_of(threads: usize) -> Option<u32> {
    u32::try_from(threads.div_ceil(THREADS as usize)).ok().filter(|blocks| *blocks < 1 << 31)
}

fn launch(driver: &mut dyn Driver, kernel: &str, threads: usize, args: &[Arg]) -> Result<(), DriverError> {
    let blocks = blocks_of(threads).ok_or_else(|| DriverError::Call {
        call: "make_up",
        reason: format!("{threads} threads are more than a launch has"),
    })?;
    driver.launch(&Launch { kernel, grid: [blocks, 1, 1], threads: THREADS, shared: 0, args })
}
