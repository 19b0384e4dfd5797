//! Weight matrices on the device: packing, products, and rows of an embedding table.
//!
//! Owns: what a [`DeviceMatrix`] is and which kernel multiplies it. Must never: change a weight, or let the number of rows decide how
//! an element is summed (see `kernels/linear/product.cuh`). Weights are the checkpoint's, exactly; the rows they are multiplied with
//! are bf16, and f32 where the weights are f32.

pub mod choose;
mod launch;
mod library;
mod made_up;
mod pack;
mod trial;
mod unpack;

use folio_model::backend::{BackendError, DType, TensorView};
use folio_model::quant::Encoding;

use crate::driver::{DevicePtr, Driver, DriverError};
use crate::gemm::Algorithm;
use crate::kernels::{Module, Weights};
use unpack::{Codes, WeightLayout};

pub use launch::{ExpertRange, ExpertRows, Output, embed, experts_product, product};
pub use library::Scratch;
pub(crate) use library::adopt;
pub use made_up::make_up;

/// Host memory that one thread packs at a time.
const CHUNK_BYTES: usize = 16 << 20;

/// What the rows of a segment are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain(DType),
    Blocks(WeightLayout),
}

impl Kind {
    fn of(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Plain(dtype) => Kind::Plain(dtype),
            Encoding::Block(format) => Kind::Blocks(WeightLayout::of(format)),
        }
    }

    /// Whose kernels multiply it.
    fn weights(self) -> Weights {
        match self {
            Kind::Plain(_) => Weights::Plain,
            Kind::Blocks(layout) => match layout.codes {
                Codes::Eight | Codes::Fp8 => Weights::Eight,
                Codes::Four { .. } | Codes::Mx4 | Codes::Iq4 => Weights::Four,
            },
        }
    }
}

/// Consecutive rows that are packed alike.
#[derive(Clone, Debug)]
struct Segment {
    kind: Kind,
    first_row: usize,
    rows: usize,
    codes: DevicePtr,
    scales: DevicePtr,
    /// None: address zero.
    minimums: DevicePtr,
}

/// A matrix `[rows, cols]` in the order in which kernels load it.
#[derive(Clone, Debug)]
pub struct DeviceMatrix {
    pub rows: usize,
    pub cols: usize,
    /// On the device.
    pub bytes: u64,
    /// In the order of rows; none where a library has the matrix.
    segments: Vec<Segment>,
    pinned: Option<library::Pinned>,
    /// The model's column of each stored one, u32 each; address zero where they are the same.
    order: DevicePtr,
}

impl DeviceMatrix {
    /// Whether products read the f32 plane of their rows, and not the bf16 plane.
    pub fn reads_floats(&self) -> bool {
        self.segments.iter().any(|segment| segment.kind == Kind::Plain(DType::F32))
    }

    /// How a library multiplies it, if one does.
    pub fn algorithm_of_a_library(&self) -> Option<Algorithm> {
        self.pinned.map(|pinned| pinned.algorithm)
    }

    /// The modules that [`experts_product`] needs for it.
    pub fn expert_modules(&self) -> impl Iterator<Item = &'static Module> {
        self.segments.iter().map(|segment| segment.kind.weights().experts())
    }
}

/// Whether rows of both encodings fit one matrix.
pub fn stack(a: Encoding, b: Encoding) -> bool {
    a == b || matches!((a, b), (Encoding::Block(_), Encoding::Block(_)))
}

/// Packs the parts, stacked along rows, and copies them to the device, with the kernels that they need. They were checked; see
/// [`check::parts`](folio_model::check::parts).
pub fn load(
    driver: &mut dyn Driver,
    name: &str,
    parts: &[TensorView<'_>],
) -> Result<DeviceMatrix, BackendError> {
    let cols = parts[0].shape[1];
    let rows = parts.iter().map(|part| part.shape[0]).sum();
    check_size(name, rows, cols)?;
    let mut loader = Loader { driver, bytes: 0 };
    let plain = matches!(parts[0].encoding, Encoding::Plain(_));
    // Plain columns are put where the model has them; those of blocks stay with their scales.
    let (moved, order) = if plain { (parts[0].order, None) } else { (None, parts[0].order) };
    let order = match order {
        Some(order) => loader.words(order.iter().map(|column| column.to_le_bytes()))?,
        None => DevicePtr::default(),
    };
    let mut segments = Vec::new();
    let mut first_row = 0;
    for same in parts.chunk_by(|a, b| Kind::of(a.encoding) == Kind::of(b.encoding)) {
        loader.driver.load(Kind::of(same[0].encoding).weights().products()).map_err(failed)?;
        let segment = loader.segment(same, cols, first_row, moved)?;
        first_row += segment.rows;
        segments.push(segment);
    }
    Ok(DeviceMatrix { rows, cols, bytes: loader.bytes, segments, pinned: None, order })
}

fn check_size(name: &str, rows: usize, cols: usize) -> Result<(), BackendError> {
    let fits = |value: usize| u32::try_from(value.next_multiple_of(256)).is_ok();
    if fits(rows) && fits(cols) {
        return Ok(());
    }
    let reason = "kernels count rows and columns with 32 bits".to_owned();
    Err(BackendError::Shape { name: name.to_owned(), shape: vec![rows, cols], reason })
}

struct Loader<'a> {
    driver: &'a mut dyn Driver,
    bytes: u64,
}

impl Loader<'_> {
    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, BackendError> {
        self.bytes += bytes as u64;
        self.driver.allocate(bytes as u64).map_err(failed)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), BackendError> {
        self.driver.upload(to, bytes).map_err(failed)
    }

    fn words(&mut self, words: impl Iterator<Item = [u8; 4]>) -> Result<DevicePtr, BackendError> {
        let bytes: Vec<u8> = words.flatten().collect();
        let at = self.allocate(bytes.len())?;
        self.upload(at, &bytes)?;
        Ok(at)
    }

    /// A segment whose bytes are anything.
    fn room(
        &mut self,
        kind: Kind,
        first_row: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Segment, BackendError> {
        let none = DevicePtr::default();
        let mut segment = Segment { kind, first_row, rows, codes: none, scales: none, minimums: none };
        if kind == Kind::Plain(DType::F32) {
            segment.codes = self.allocate(4 * cols * rows.next_multiple_of(32))?;
            return Ok(segment);
        }
        let (sizes, tiles) = (Sizes::of(kind, cols), rows.div_ceil(pack::TILE));
        segment.codes = self.allocate(tiles * sizes.codes)?;
        if let Kind::Blocks(layout) = kind {
            segment.scales = self.allocate(tiles * sizes.scales)?;
            if layout.minimums {
                segment.minimums = self.allocate(tiles * sizes.scales)?;
            }
        }
        Ok(segment)
    }

    /// Parts of one kind.
    fn segment(
        &mut self,
        parts: &[TensorView<'_>],
        cols: usize,
        first_row: usize,
        order: Option<&[u32]>,
    ) -> Result<Segment, BackendError> {
        let kind = Kind::of(parts[0].encoding);
        let rows: Vec<(Encoding, &[u8])> = parts
            .iter()
            .flat_map(|part| pack::rows_of(part).into_iter().map(|row| (part.encoding, row)))
            .collect();
        let segment = self.room(kind, first_row, rows.len(), cols)?;
        if kind == Kind::Plain(DType::F32) {
            let rows: Vec<&[u8]> = rows.iter().map(|(_, row)| *row).collect();
            self.upload(segment.codes, &pack::f32_columns(&rows, cols, order))?;
            return Ok(segment);
        }
        let sizes = Sizes::of(kind, cols);
        let chunk = (CHUNK_BYTES / sizes.codes).max(1) * pack::TILE;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let chunks: Vec<&[(Encoding, &[u8])]> = rows.chunks(chunk).collect();
        for (wave, chunks) in chunks.chunks(threads).enumerate() {
            let packed: Vec<pack::Packed> = std::thread::scope(|scope| {
                let pack = |rows| scope.spawn(move || pack_rows(kind, rows, cols, order));
                let threads: Vec<_> = chunks.iter().map(|rows| pack(*rows)).collect();
                threads.into_iter().map(|thread| thread.join().expect("packing does not panic")).collect()
            });
            for (i, packed) in packed.iter().enumerate() {
                let tile = ((wave * threads + i) * chunk / pack::TILE) as u64;
                self.upload(segment.codes.offset(tile * sizes.codes as u64), &packed.codes)?;
                let scales = tile * sizes.scales as u64;
                self.floats(segment.scales.offset(scales), &packed.scales)?;
                self.floats(segment.minimums.offset(scales), &packed.minimums)?;
            }
        }
        Ok(segment)
    }

    fn floats(&mut self, to: DevicePtr, values: &[f32]) -> Result<(), BackendError> {
        if values.is_empty() {
            return Ok(());
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.upload(to, &bytes)
    }
}

/// Bytes of a tile of 16 rows.
struct Sizes {
    codes: usize,
    scales: usize,
}

impl Sizes {
    fn of(kind: Kind, cols: usize) -> Self {
        match kind {
            Kind::Plain(_) => Self { codes: 512 * pack::ktiles(cols), scales: 0 },
            Kind::Blocks(layout) => Self {
                codes: 512 * pack::ktiles(cols).div_ceil(pack::covers(layout.codes)),
                scales: 4 * pack::TILE * cols / layout.group,
            },
        }
    }
}

fn pack_rows(kind: Kind, rows: &[(Encoding, &[u8])], cols: usize, order: Option<&[u32]>) -> pack::Packed {
    match kind {
        Kind::Plain(_) => {
            let rows: Vec<&[u8]> = rows.iter().map(|(_, row)| *row).collect();
            pack::sixteen(&rows, cols, order)
        }
        Kind::Blocks(layout) => {
            let formats = rows.iter().filter_map(|(encoding, row)| match encoding {
                Encoding::Block(format) => Some((*format, *row)),
                Encoding::Plain(_) => None,
            });
            pack::blocks(&formats.collect::<Vec<_>>(), cols, layout)
        }
    }
}

fn failed(error: DriverError) -> BackendError {
    match error {
        DriverError::OutOfMemory { needed_bytes, free_bytes } => BackendError::OutOfMemory {
            what: "weights on the device",
            needed_bytes,
            reason: format!("{free_bytes} bytes are free"),
        },
        error => BackendError::Device(error.to_string()),
    }
}
