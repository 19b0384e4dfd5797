//! Mixtures of experts: routing, the products of each expert over the rows that chose it, and their sum.
//!
//! Owns: the launches of one mixture and the layout of its workspace. Must never: allocate, or let rows meet: which expert a row has,
//! and in which order they are added, follows from the row's logits alone.

use folio_model::program::{ExpertsSpec, Routing};

use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
use crate::linear::{self, DeviceMatrix, ExpertRange, ExpertRows, Output};
use crate::planes::{Meta, Planes, RowBound};
use crate::rows;

type Result<T> = std::result::Result<T, DriverError>;

/// Most experts of a mixture.
const MOST: usize = 1024;
/// Blocks of a grid along y are counted with 16 bits.
const TILES_MAX: usize = u16::MAX as usize;

/// A mixture's weights, and memory of [`workspace_bytes`].
#[derive(Clone, Copy, Debug)]
pub struct Mixture<'a> {
    pub spec: &'a ExpertsSpec,
    pub gate_up: &'a DeviceMatrix,
    pub gate_up_bias: Option<DevicePtr>,
    pub down: &'a DeviceMatrix,
    pub down_bias: Option<DevicePtr>,
    pub workspace: DevicePtr,
}

/// Why a mixture cannot be computed for steps of so many rows.
pub fn refusal(spec: &ExpertsSpec, max_rows: usize) -> Option<String> {
    let tiles = tiles_bound(spec, max_rows * spec.chosen, ExpertRows::FEW as usize);
    if spec.count > MOST {
        return Some(format!("{} experts, at most {MOST} are served", spec.count));
    }
    if tiles > TILES_MAX {
        return Some(format!("{max_rows} rows a step with {} experts each are too many", spec.chosen));
    }
    None
}

/// Bytes that a mixture needs for steps of up to `rows` rows.
pub fn workspace_bytes(spec: &ExpertsSpec, gate_up: &DeviceMatrix, down: &DeviceMatrix, rows: usize) -> u64 {
    Workspace::new(spec, (gate_up, down), rows, DevicePtr(0)).1
}

/// What lies where in a workspace.
struct Workspace {
    rows: ExpertRows,
    picks: DevicePtr,
    /// Of each pair, f32.
    weights: DevicePtr,
    counts: DevicePtr,
    gate_up: Planes,
    gated: Planes,
    /// What each pair's expert says, `[pairs, width]`.
    values: DevicePtr,
}

impl Workspace {
    /// And its bytes.
    fn new(
        spec: &ExpertsSpec,
        (gate_up, down): (&DeviceMatrix, &DeviceMatrix),
        rows: usize,
        start: DevicePtr,
    ) -> (Self, u64) {
        let pairs = rows * spec.chosen;
        let floats = gate_up.reads_floats() || down.reads_floats();
        let few = floats || pairs <= ExpertRows::FEW as usize * spec.count;
        let tile_rows = if few { ExpertRows::FEW } else { ExpertRows::MANY };
        let tiles_bound = tiles_bound(spec, pairs, tile_rows as usize);
        let mut at = start;
        let mut take = |bytes: usize| {
            let place = at;
            at = at.offset((bytes as u64).next_multiple_of(256));
            place
        };
        let stride = spec.inner.next_multiple_of(32);
        let workspace = Self {
            rows: ExpertRows {
                header: take(8),
                tiles: take(16 * tiles_bound),
                list: take(4 * pairs),
                tile_rows,
                tiles_bound: tiles_bound as u32,
            },
            picks: take(4 * pairs),
            weights: take(4 * pairs),
            counts: take(4 * spec.count),
            gate_up: Planes {
                width: 2 * spec.inner as u32,
                f32: Some(take(4 * pairs * 2 * spec.inner)),
                f32_stride: 2 * spec.inner as u32,
                ..Planes::default()
            },
            gated: Planes {
                width: spec.inner as u32,
                f32: down.reads_floats().then(|| take(4 * pairs * stride)),
                f32_stride: stride as u32,
                bf16: (!down.reads_floats()).then(|| take(2 * pairs * stride)),
                bf16_stride: stride as u32,
            },
            values: take(4 * pairs * (down.rows / spec.count)),
        };
        (workspace, at.0 - start.0)
    }
}

/// Most tiles of `tile_rows` rows that so many pairs make: full ones, and one for every expert that has any.
fn tiles_bound(spec: &ExpertsSpec, pairs: usize, tile_rows: usize) -> usize {
    pairs / tile_rows + spec.count.min(pairs)
}

/// [`Op::Experts`](folio_model::program::Op::Experts). `logits` has its f32 plane.
pub fn mix(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    (x, logits): (&Planes, &Planes),
    mixture: &Mixture<'_>,
    out: Output,
) -> Result<()> {
    let Mixture { spec, gate_up, down, .. } = *mixture;
    let (space, _) = Workspace::new(spec, (gate_up, down), rows.bound as usize, mixture.workspace);
    route(driver, meta, rows, logits, spec, &space)?;
    let (count, inner) = (spec.count as u32, spec.inner as u32);
    let range = ExpertRange { experts: count, parts: 2, range: inner, share: spec.chosen as u32 };
    let to = Output { at: space.gate_up.f32.unwrap_or_default(), stride: 2 * inner, add: false };
    linear::experts_product(driver, &space.rows, range, x, gate_up, mixture.gate_up_bias, to)?;
    // The workspace's header has the number of pairs where a step's metadata has that of rows.
    let pairs = RowBound { bound: rows.bound * spec.chosen as u32, count_word: 0 };
    rows::gate(driver, Meta(space.rows.header), pairs, &space.gate_up, spec.activation, &space.gated)?;
    let width = (down.rows / spec.count) as u32;
    let range = ExpertRange { experts: count, parts: 1, range: width, share: 1 };
    let to = Output { at: space.values, stride: width, add: false };
    linear::experts_product(driver, &space.rows, range, &space.gated, down, mixture.down_bias, to)?;
    let args = [
        Arg::Ptr(meta.0),
        Arg::U32(rows.count_word),
        Arg::Ptr(space.values),
        Arg::U32(width),
        Arg::Ptr(space.weights),
        Arg::U32(spec.chosen as u32),
        Arg::U32(width),
        Arg::Ptr(out.at),
        Arg::U32(out.stride),
        Arg::U32(u32::from(out.add)),
    ];
    let grid = [rows.bound, width.div_ceil(256), 1];
    driver.launch(&Launch { kernel: "combine_experts", grid, threads: 256, shared: 0, args: &args })
}

/// The experts of each row, their weights, and the lists of each expert's rows.
fn route(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: RowBound,
    logits: &Planes,
    spec: &ExpertsSpec,
    space: &Workspace,
) -> Result<()> {
    let count = spec.count as u32;
    let args = [
        Arg::Ptr(meta.0),
        Arg::U32(rows.count_word),
        Arg::Ptr(logits.f32.unwrap_or_default()),
        Arg::U32(logits.f32_stride),
        Arg::U32(count),
        Arg::U32(spec.chosen as u32),
        Arg::U32(u32::from(spec.routing == Routing::AmongAll)),
        Arg::Ptr(space.rows.header),
        Arg::Ptr(space.picks),
        Arg::Ptr(space.weights),
    ];
    driver.launch(&Launch {
        kernel: "route",
        grid: [rows.bound, 1, 1],
        threads: 32,
        shared: 0,
        args: &args,
    })?;
    let per_expert = |driver: &mut dyn Driver, kernel, args: &[Arg]| {
        driver.launch(&Launch { kernel, grid: [count, 1, 1], threads: 256, shared: 0, args })
    };
    let (header, picks, counts) =
        (Arg::Ptr(space.rows.header), Arg::Ptr(space.picks), Arg::Ptr(space.counts));
    per_expert(driver, "expert_counts", &[header, picks, counts])?;
    let (list, tiles) = (Arg::Ptr(space.rows.list), Arg::Ptr(space.rows.tiles));
    per_expert(driver, "expert_lists", &[header, picks, counts, Arg::U32(space.rows.tile_rows), list, tiles])
}
