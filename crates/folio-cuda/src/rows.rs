//! Launches of the kernels that work on rows: norms, scaling, activations.
//!
//! Owns: how they are launched. Must never: allocate, or look at more of a step than its bounds. The number of threads of a block
//! follows from the width of a row alone, and with it the order of every sum. No bound is zero.

use folio_model::program::Activation;

use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
use crate::planes::{Meta, Planes, RowBound, word};

type Result = std::result::Result<(), DriverError>;

/// A weight vector with the epsilon of its norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// f32, one per column.
    pub weight: DevicePtr,
    pub eps: f32,
}

/// Rows of a norm's input, when not all are wanted: a list in the metadata, and at most how many it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    Logits(u32),
    Hidden(u32),
}

/// `out = x * weight / sqrt(mean(x^2) + eps)`. `x` needs its f32 plane; `out` gets those it has and may be `x` itself.
pub fn norm(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    x: &Planes,
    norm: Norm,
    out: &Planes,
) -> Result {
    rms_norm(driver, meta, rows, 0, x, norm, out)
}

/// [`norm`] of the rows that a list of the metadata names; the i-th row of `out` is the i-th of the list.
pub fn norm_listed(
    driver: &mut dyn Driver,
    meta: Meta,
    listed: Listed,
    x: &Planes,
    norm: Norm,
    out: &Planes,
) -> Result {
    let (bound, count_word, list) = match listed {
        Listed::Logits(bound) => (bound, word::LOGIT_ROWS, word::AT_LOGIT_ROWS),
        Listed::Hidden(bound) => (bound, word::HIDDEN_ROWS, word::AT_HIDDEN_ROWS),
    };
    rms_norm(driver, meta, RowBound { bound, count_word }, list, x, norm, out)
}

fn rms_norm(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    list: u32,
    x: &Planes,
    norm: Norm,
    out: &Planes,
) -> Result {
    let head = [Arg::Ptr(meta.0), Arg::U32(rows.count_word), Arg::U32(list)];
    let middle =
        [full(x), Arg::U32(x.f32_stride), Arg::Ptr(norm.weight), Arg::U32(x.width), Arg::F32(norm.eps)];
    launch(driver, "rms_norm", rows, x.width, &[&head, &middle, &planes(out)])
}

/// `out += x * weight / sqrt(mean(x^2) + eps)`. Both need their f32 planes; `x` is not `out`.
pub fn add_norm(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    x: &Planes,
    norm: Norm,
    out: &Planes,
) -> Result {
    let head = [Arg::Ptr(meta.0), Arg::U32(rows.count_word)];
    let middle =
        [full(x), Arg::U32(x.f32_stride), Arg::Ptr(norm.weight), Arg::U32(x.width), Arg::F32(norm.eps)];
    launch(driver, "add_rms_norm", rows, x.width, &[&head, &middle, &planes(out)])
}

/// `x *= by`, in its f32 plane; a bf16 plane follows it.
pub fn scale(driver: &mut dyn Driver, meta: Meta, rows: RowBound, x: &Planes, by: f32) -> Result {
    let head = [Arg::Ptr(meta.0), Arg::U32(rows.count_word), Arg::U32(x.width), Arg::F32(by)];
    launch(driver, "scale_rows", rows, x.width, &[&head, &planes(x)])
}

/// `out = x`, from the f32 plane into those that `out` has.
pub fn copy(driver: &mut dyn Driver, meta: Meta, rows: RowBound, x: &Planes, out: &Planes) -> Result {
    let head = [Arg::Ptr(meta.0), Arg::U32(rows.count_word)];
    let middle = [full(x), Arg::U32(x.f32_stride), Arg::U32(x.width)];
    launch(driver, "copy_rows", rows, x.width, &[&head, &middle, &planes(out)])
}

/// `out` = the features of the step ([`word::AT_FEATURES`]), into the planes that it has.
pub fn input(driver: &mut dyn Driver, meta: Meta, rows: RowBound, out: &Planes) -> Result {
    let head =
        [Arg::Ptr(meta.0), Arg::U32(rows.count_word), Arg::U32(word::AT_FEATURES), Arg::U32(out.width)];
    launch(driver, "input_rows", rows, out.width, &[&head, &planes(out)])
}

/// `out = activation(gate, up)`: `gate_up` has rows `[gate | up]` in its f32 plane, each as wide as `out`.
pub fn gate(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    gate_up: &Planes,
    activation: Activation,
    out: &Planes,
) -> Result {
    let (kind, alpha, limit) = match activation {
        Activation::Silu => (0, 0.0, 0.0),
        Activation::GeluTanh => (1, 0.0, 0.0),
        Activation::SwigluOai { alpha, limit } => (2, alpha, limit),
        Activation::ReluSquared => unreachable!("refused with the program"),
    };
    let head = [Arg::Ptr(meta.0), Arg::U32(rows.count_word), full(gate_up), Arg::U32(gate_up.f32_stride)];
    let middle = [Arg::U32(out.width), Arg::U32(kind), Arg::F32(alpha), Arg::F32(limit)];
    let args = [&head[..], &middle, &planes(out)].concat();
    let threads = threads(out.width);
    let grid = [rows.bound, out.width.div_ceil(GATED * threads), 1];
    driver.launch(&Launch { kernel: "gate_rows", grid, threads, shared: 0, args: &args })
}

/// `x = cap * tanh(x / cap)` of rows of logits, in the f32 plane.
pub fn softcap(driver: &mut dyn Driver, meta: Meta, rows: RowBound, x: &Planes, cap: f32) -> Result {
    const THREADS: u32 = 256;
    let args = [
        Arg::Ptr(meta.0),
        Arg::U32(rows.count_word),
        Arg::U32(x.width),
        Arg::F32(cap),
        full(x),
        Arg::U32(x.f32_stride),
    ];
    let grid = [rows.bound, x.width.div_ceil(THREADS), 1];
    driver.launch(&Launch { kernel: "softcap_rows", grid, threads: THREADS, shared: 0, args: &args })
}

/// Columns of a thread of `gate_rows`, which has none to add up.
const GATED: u32 = 4;

/// Threads that share a row.
fn threads(width: u32) -> u32 {
    width.div_ceil(8).next_power_of_two().clamp(32, 1024)
}

fn full(x: &Planes) -> Arg {
    Arg::Ptr(x.f32.unwrap_or_default())
}

pub(crate) fn planes(out: &Planes) -> [Arg; 4] {
    let half = Arg::Ptr(out.bf16.unwrap_or_default());
    [full(out), Arg::U32(out.f32_stride), half, Arg::U32(out.bf16_stride)]
}

fn launch(
    driver: &mut dyn Driver,
    kernel: &'static str,
    rows: RowBound,
    width: u32,
    args: &[&[Arg]],
) -> Result {
    let args = args.concat();
    driver.launch(&Launch {
        kernel,
        grid: [rows.bound, 1, 1],
        threads: threads(width),
        shared: 0,
        args: &args,
    })
}
