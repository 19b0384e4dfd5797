//! Matrices that a library multiplies.
//!
//! Owns: which matrices those are, their row-major form, and what stands around their products. Must never: hold a matrix twice, or give
//! a matrix to a library whose products were not tried on this device; see [`super::choose`].

use std::collections::HashMap;

use folio_model::backend::{BackendError, DType};
use folio_model::program::{MatrixId, Op, Program};

use super::launch::{Output, absent};
use super::trial::try_out;
use super::unpack::{Codes, WeightLayout};
use super::{DeviceMatrix, Kind, Segment, failed, pack};
use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
use crate::gemm::{Algorithm, Multiply, Operands, Shape, WORKSPACE_BYTES};
use crate::kernels;
use crate::planes::{Meta, Planes, RowBound};

type Result<T> = std::result::Result<T, DriverError>;

const THREADS: u32 = 256;

/// What a library needs of a matrix, whose own form is gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned {
    shape: Shape,
    pub(super) algorithm: Algorithm,
    /// `[rows, cols]`
    weights: DevicePtr,
    /// One a row, f32; of FP8 alone.
    scales: DevicePtr,
}

/// What products by a library need beside their operands. Zero: nothing needs it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scratch {
    workspace: DevicePtr,
    /// Products that are then added to something.
    sums: DevicePtr,
    /// Rows as FP8, and their scales.
    codes: DevicePtr,
    scales: DevicePtr,
}

impl Scratch {
    /// For products of up to `max_rows` rows.
    pub(crate) fn allocate(
        driver: &mut dyn Driver,
        program: &Program,
        matrices: &[DeviceMatrix],
        max_rows: usize,
    ) -> Result<Self> {
        let shape = |id: MatrixId| matrices[id.0 as usize].pinned.map(|pinned| pinned.shape);
        let pinned: Vec<Shape> = matrices.iter().filter_map(|matrix| Some(matrix.pinned?.shape)).collect();
        if pinned.is_empty() {
            return Ok(Self::default());
        }
        let added = program.body.iter().filter_map(|op| match *op {
            Op::Linear { weight, add: true, .. } => Some(shape(weight)?.n),
            _ => None,
        });
        let fp8 = pinned.iter().filter(|shape| shape.operands == Operands::Fp8).map(|shape| shape.k);
        let mut allocate = |bytes: Option<usize>| -> Result<DevicePtr> {
            bytes.map_or(Ok(DevicePtr::default()), |bytes| driver.allocate(bytes as u64))
        };
        let fp8 = fp8.max();
        Ok(Self {
            workspace: allocate(Some(WORKSPACE_BYTES as usize))?,
            sums: allocate(added.max().map(|n| 4 * max_rows * n as usize))?,
            codes: allocate(fp8.map(|k| max_rows * k as usize))?,
            scales: allocate(fp8.map(|_| 4 * max_rows))?,
        })
    }
}

/// Gives the library what it may multiply in steps of up to `max_rows` rows: matrices that `program` does nothing else with, in forms
/// that the library knows, of shapes for which an algorithm was found. The others stay as they are, and the log says why.
pub(crate) fn adopt(
    driver: &mut dyn Driver,
    program: &Program,
    matrices: &mut [DeviceMatrix],
    max_rows: usize,
) -> std::result::Result<(), BackendError> {
    let Some(library) = driver.gemm().map(|gemm| gemm.name()) else { return Ok(()) };
    driver.load(&kernels::LIBRARY).map_err(failed)?;
    let max_rows = u32::try_from(max_rows).unwrap_or(u32::MAX / 2);
    let mut tried: HashMap<Shape, Option<Algorithm>> = HashMap::new();
    let mut given = 0;
    for index in only_multiplied(program, matrices.len()) {
        let matrix = &mut matrices[index];
        let Some((shape, segment)) = form(matrix) else { continue };
        let algorithm = *tried.entry(shape).or_insert_with(|| {
            let Shape { n, k, operands } = shape;
            match try_out(driver, shape, max_rows) {
                Ok(algorithm) => {
                    tracing::debug!("{library} multiplies [{n}, {k}] in {operands:?}");
                    Some(algorithm)
                }
                Err(reason) => {
                    tracing::warn!(
                        "Folio's own kernels multiply [{n}, {k}] in {operands:?}: {library}: {reason}"
                    );
                    None
                }
            }
        });
        let Some(algorithm) = algorithm else { continue };
        match pin(driver, shape, &segment, algorithm) {
            Ok(Some((pinned, bytes))) => {
                for old in [segment.codes, segment.scales] {
                    if old != DevicePtr::default() {
                        driver.free(old).map_err(failed)?;
                    }
                }
                (matrix.pinned, matrix.bytes) = (Some(pinned), bytes);
                matrix.segments.clear();
                given += 1;
            }
            // Several scales in a row.
            Ok(None) => {}
            Err(error @ DriverError::OutOfMemory { .. }) => {
                tracing::warn!(
                    "Folio's own kernels multiply a matrix of [{}, {}]: {error}",
                    shape.n,
                    shape.k
                );
            }
            Err(error) => return Err(failed(error)),
        }
    }
    tracing::info!(
        "{library} multiplies {given} of {} matrices, Folio's own kernels the others",
        matrices.len()
    );
    Ok(())
}

/// Of so many matrices, those that a program multiplies rows with and does nothing else with.
fn only_multiplied(program: &Program, count: usize) -> Vec<usize> {
    let (mut multiplied, mut otherwise) = (vec![false; count], vec![false; count]);
    multiplied[program.head.matrix.0 as usize] = true;
    for op in &program.body {
        match *op {
            Op::Linear { weight, .. } | Op::GatedLinear { weight, .. } => {
                multiplied[weight.0 as usize] = true
            }
            Op::Embed { table, .. } => otherwise[table.0 as usize] = true,
            _ => {}
        }
    }
    for id in program.experts.iter().flat_map(|spec| [spec.gate_up, spec.down]) {
        otherwise[id.0 as usize] = true;
    }
    (0..count).filter(|index| multiplied[*index] && !otherwise[*index]).collect()
}

/// What a matrix is to a library, if it may be one at all.
fn form(matrix: &DeviceMatrix) -> Option<(Shape, Segment)> {
    let [segment] = &matrix.segments[..] else { return None };
    let operands = match segment.kind {
        Kind::Plain(DType::BF16) => Operands::Bf16,
        Kind::Blocks(WeightLayout { codes: Codes::Fp8, .. }) => Operands::Fp8,
        _ => return None,
    };
    let shape = Shape { n: matrix.rows as u32, k: matrix.cols as u32, operands };
    (shape.is_aligned() && matrix.order == DevicePtr::default()).then(|| (shape, segment.clone()))
}

/// The row-major form of a segment and its bytes; `None` where a row has not one scale.
fn pin(
    driver: &mut dyn Driver,
    shape: Shape,
    segment: &Segment,
    algorithm: Algorithm,
) -> Result<Option<(Pinned, u64)>> {
    let (n, k) = (shape.n as usize, shape.k as usize);
    let scales = match segment.kind {
        Kind::Blocks(layout) => {
            let Some(scales) = row_scales(driver, segment, k / layout.group)? else { return Ok(None) };
            Some(scales)
        }
        Kind::Plain(_) => None,
    };
    let (kernel, loads) = match shape.operands {
        Operands::Bf16 => ("rows_of_sixteen", pack::ktiles(k)),
        Operands::Fp8 => ("rows_of_eight", pack::ktiles(k).div_ceil(pack::covers(Codes::Fp8))),
    };
    let bytes = (n * k * shape.operands.size()) as u64;
    let scales: Vec<u8> = scales.iter().flatten().flat_map(|scale| scale.to_le_bytes()).collect();
    let mut pinned =
        Pinned { shape, algorithm, weights: driver.allocate(bytes)?, scales: DevicePtr::default() };
    if !scales.is_empty() {
        pinned.scales = match driver.allocate(scales.len() as u64) {
            Ok(at) => at,
            Err(error) => {
                driver.free(pinned.weights)?;
                return Err(error);
            }
        };
        driver.upload(pinned.scales, &scales)?;
    }
    driver.launch(&Launch {
        kernel,
        grid: [(n * k).div_ceil(THREADS as usize) as u32, 1, 1],
        threads: THREADS,
        shared: 0,
        args: &[
            Arg::Ptr(segment.codes),
            Arg::U32(shape.n),
            Arg::U32(shape.k),
            Arg::U32(loads as u32),
            Arg::Ptr(pinned.weights),
        ],
    })?;
    Ok(Some((pinned, bytes + scales.len() as u64)))
}

/// The scale of every row, if each has one and it is a number.
fn row_scales(driver: &mut dyn Driver, segment: &Segment, groups: usize) -> Result<Option<Vec<f32>>> {
    let mut bytes = vec![0; 4 * segment.rows.next_multiple_of(pack::TILE) * groups];
    driver.download(segment.scales, &mut bytes)?;
    let packed: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let at = |row: usize, group: usize| {
        packed[(row / pack::TILE * groups + group) * pack::TILE + row % pack::TILE]
    };
    let one = |row: usize| (0..groups).all(|group| at(row, group).to_bits() == at(row, 0).to_bits());
    let all = (0..segment.rows).all(|row| one(row) && at(row, 0).is_finite());
    Ok(all.then(|| (0..segment.rows).map(|row| at(row, 0)).collect()))
}

/// As [`product`](super::product) of a matrix that the library has. Rows behind the count are multiplied too, and written where nothing
/// is added: what they hold is anything.
pub(super) fn product(
    driver: &mut dyn Driver,
    (meta, rows): (Meta, RowBound),
    x: &Planes,
    pinned: &Pinned,
    bias: Option<DevicePtr>,
    out: Output,
    scratch: &Scratch,
) -> Result<()> {
    let Shape { n, k, operands } = pinned.shape;
    let x_at = x.bf16.ok_or_else(|| absent("bf16"))?;
    let head = [Arg::Ptr(meta.0), Arg::U32(rows.count_word)];
    let (x_at, x_stride, row_scales) = match operands {
        Operands::Bf16 => (x_at, x.bf16_stride, DevicePtr::default()),
        Operands::Fp8 => {
            let from = [Arg::Ptr(x_at), Arg::U32(x.bf16_stride), Arg::U32(k)];
            let args = [&head[..], &from, &[Arg::Ptr(scratch.codes), Arg::Ptr(scratch.scales)]].concat();
            let grid = [rows.bound, 1, 1];
            driver.launch(&Launch {
                kernel: "quantize_rows",
                grid,
                threads: THREADS,
                shared: 0,
                args: &args,
            })?;
            (scratch.codes, k, scratch.scales)
        }
    };
    let (sums, sums_stride) = if out.add { (scratch.sums, n) } else { (out.at, out.stride) };
    let gemm = driver.gemm().ok_or_else(|| DriverError::Library("the library is gone".to_owned()))?;
    gemm.multiply(&Multiply {
        shape: pinned.shape,
        algorithm: pinned.algorithm,
        rows: rows.bound,
        weights: pinned.weights,
        x: x_at,
        x_stride,
        out: sums,
        out_stride: sums_stride,
        workspace: scratch.workspace,
    })?;
    if !out.add && bias.is_none() && operands == Operands::Bf16 {
        return Ok(());
    }
    let from = [
        Arg::Ptr(sums),
        Arg::U32(sums_stride),
        Arg::U32(n),
        Arg::Ptr(row_scales),
        Arg::Ptr(pinned.scales),
        Arg::Ptr(bias.unwrap_or_default()),
    ];
    let to = [Arg::Ptr(out.at), Arg::U32(out.stride), Arg::U32(u32::from(out.add))];
    let grid = [rows.bound, n.div_ceil(THREADS), 1];
    let args = [&head[..], &from, &to].concat();
    driver.launch(&Launch { kernel: "finish_rows", grid, threads: THREADS, shared: 0, args: &args })
}
