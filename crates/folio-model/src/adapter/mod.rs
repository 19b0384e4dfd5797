//! Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685): `y = W x + s B (A x)` for rows of a batch that ask for it.
//!
//! Owns: an adapter in memory ([`Adapter`]), which of a model's tensors may have one ([`AdapterTargets`]), and reading them ([`Adapter::read`]).
//! Must never: know a request, or change a weight of the model: what is added is computed from unrounded activations, in f32, and added
//! to the product before anything else is done with it.
//!
//! A row's result depends on that row, the weights and its adapter: how rows are grouped changes no bit, nor do other adapters.

mod gguf;
mod peft;
mod read;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use half::{bf16, f16};

use crate::backend::DType;
use crate::checkpoint::gguf::Names;
use crate::config::{Config, Mixer};
use crate::error::{ModelError, Result};
use crate::packed::Ids;
use crate::program::{MatrixId, Op, Program, VectorId};
use crate::weights::{Load, Made, Pick, WeightSpec, weight_specs};
pub use read::AdapterLimits;

/// Values side by side in [`LowRank`].
pub const LANES: usize = 16;

/// What is added to the products of a model. Immutable; shared by the sequences that use it. By default, nothing.
#[derive(Debug, Default, PartialEq)]
pub struct Adapter {
    digest: [u8; 32],
    /// The largest.
    rank: usize,
    /// By matrix.
    products: Vec<Option<LowRank>>,
    lanes: usize,
}

impl Adapter {
    fn new(digest: [u8; 32], rank: usize, of: impl Iterator<Item = (MatrixId, LowRank)>) -> Self {
        let mut products = Vec::new();
        for (matrix, product) in of {
            products.resize_with(products.len().max(matrix.0 as usize + 1), || None);
            products[matrix.0 as usize] = Some(product);
        }
        let lanes = products.iter().flatten().map(LowRank::lanes).max().unwrap_or(0);
        Self { digest, rank, products, lanes }
    }

    /// Of all that decides what it computes, names and files apart: part of the identity of KV that is computed with it.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Of its weights in memory.
    pub fn bytes(&self) -> usize {
        self.products.iter().flatten().map(|product| product.down.bytes() + product.up.bytes()).sum()
    }

    /// What it adds to products with a matrix.
    pub fn of(&self, matrix: MatrixId) -> Option<&LowRank> {
        self.products.get(matrix.0 as usize)?.as_ref()
    }

    /// Every matrix with whose products it adds to, and what.
    pub fn products(&self) -> impl Iterator<Item = (MatrixId, &LowRank)> {
        (0..).map(MatrixId).zip(&self.products).filter_map(|(matrix, low)| Some((matrix, low.as_ref()?)))
    }

    /// Most values between A and B of a product.
    pub fn lanes(&self) -> usize {
        self.lanes
    }
}

/// What is added to the products with one matrix `[rows, cols]`, which may be several stacked: each has its own A, `[rank, cols]`, and B.
/// `h = s A x` of all of them side by side, ranks of each filled up to whole [`LANES`]. A and B are as they were stored.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    rows: usize,
    cols: usize,
    /// `[lanes / 16, cols, 16]`: A of 16 values of `h` at a time.
    down: AdapterWeights,
    /// `[lanes]`: what each value of `A x` is multiplied by.
    scales: Vec<f32>,
    /// Values of `h` that are their scale: what they are multiplied by is a bias.
    biases: Vec<usize>,
    panels: Vec<LowRankPanel>,
    /// LowRankPanel after panel `[values of h, 16 rows]`.
    up: AdapterWeights,
}

/// Numbers of a stored type, or a part of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdapterSlice<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl AdapterSlice<'_> {
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// # Panics
    /// If there is no such value.
    pub fn get(&self, at: usize) -> f32 {
        match self {
            Self::F32(values) => values[at],
            Self::F16(values) => values[at].to_f32(),
            Self::BF16(values) => values[at].to_f32(),
        }
    }
}

/// Numbers of a stored type.
#[derive(Clone, Debug, PartialEq)]
enum AdapterWeights {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl AdapterWeights {
    fn new(dtype: DType, values: Vec<f32>) -> Self {
        match dtype {
            DType::F32 => Self::F32(values),
            DType::F16 => Self::F16(values.into_iter().map(f16::from_f32).collect()),
            DType::BF16 => Self::BF16(values.into_iter().map(bf16::from_f32).collect()),
        }
    }

    #[inline]
    fn slice(&self, range: Range<usize>) -> AdapterSlice<'_> {
        match self {
            Self::F32(values) => AdapterSlice::F32(&values[range]),
            Self::F16(values) => AdapterSlice::F16(&values[range]),
            Self::BF16(values) => AdapterSlice::BF16(&values[range]),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    fn bytes(&self) -> usize {
        self.len() * if matches!(self, Self::F32(_)) { 4 } else { 2 }
    }
}

/// 16 rows of the matrix, and the values of `h` that they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LowRankPanel {
    start: usize,
    first: usize,
    count: usize,
}

/// What is added to some neighbouring rows of a matrix.
pub(crate) struct LowRankPart {
    pub first_row: usize,
    /// `[rank, cols]`
    pub down: Vec<f32>,
    /// `[rows, rank]`
    pub up: Vec<f32>,
    /// `[rows]`
    pub bias: Option<Vec<f32>>,
    pub rank: usize,
    /// What all that is added is multiplied by.
    pub scale: f32,
}

impl LowRankPart {
    fn rows(&self) -> usize {
        self.up.len() / self.rank
    }

    /// Values of `h`.
    fn values(&self) -> usize {
        self.rank + usize::from(self.bias.is_some())
    }

    /// What row `row` of it multiplies value `value` of `h` by.
    fn up(&self, row: usize, value: usize) -> f32 {
        match &self.bias {
            Some(bias) if value == self.rank => bias[row],
            _ if value < self.rank => self.up[row * self.rank + value],
            _ => 0.0,
        }
    }
}

impl LowRank {
    /// `parts`: of rows apart from each other, of at least rank 1, with `cols` columns each, and values of type `dtype`.
    pub(crate) fn new(rows: usize, cols: usize, dtype: DType, mut parts: Vec<LowRankPart>) -> Self {
        parts.sort_by_key(|part| part.first_row);
        let mut starts = Vec::with_capacity(parts.len());
        let mut scales = Vec::new();
        for part in &parts {
            starts.push(scales.len());
            let values = scales.len() + part.values().next_multiple_of(LANES);
            scales.resize(values, part.scale);
        }
        let mut down = vec![0.0; scales.len() * cols];
        let mut biases = Vec::new();
        for (part, start) in parts.iter().zip(&starts) {
            for (value, a) in part.down.chunks_exact(cols.max(1)).enumerate() {
                let (chunk, lane) = ((start + value) / LANES, (start + value) % LANES);
                for (col, a) in a.iter().enumerate() {
                    down[(chunk * cols + col) * LANES + lane] = *a;
                }
            }
            biases.extend(part.bias.as_ref().map(|_| start + part.rank));
        }
        let (mut panels, mut up) = (Vec::with_capacity(rows.div_ceil(LANES)), Vec::new());
        for first_row in (0..rows).step_by(LANES) {
            let here: Vec<(&LowRankPart, usize)> = parts
                .iter()
                .zip(&starts)
                .filter(|(part, _)| {
                    part.first_row < first_row + LANES && first_row < part.first_row + part.rows()
                })
                .map(|(part, start)| (part, *start))
                .collect();
            let first = here.first().map_or(0, |(_, start)| *start);
            let end = here.last().map_or(0, |(part, start)| start + part.values());
            panels.push(LowRankPanel { start: up.len(), first, count: end - first });
            for value in first..end {
                for row in first_row..first_row + LANES {
                    let of = here.iter().find(|(part, start)| {
                        (part.first_row..part.first_row + part.rows()).contains(&row)
                            && (*start..start + part.values()).contains(&value)
                    });
                    up.push(of.map_or(0.0, |(part, start)| part.up(row - part.first_row, value - start)));
                }
            }
        }
        let [down, up] = [down, up].map(|values| AdapterWeights::new(dtype, values));
        Self { rows, cols, down, scales, biases, panels, up }
    }

    /// Of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Values of `h`: whole [`LANES`].
    pub fn lanes(&self) -> usize {
        self.scales.len()
    }

    /// `[cols, 16]`: what 16 values of `h` are made with.
    pub fn down(&self, chunk: usize) -> AdapterSlice<'_> {
        let values = self.cols * LANES;
        self.down.slice(chunk * values..(chunk + 1) * values)
    }

    /// `[lanes]`: what each value of `A x` is multiplied by.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Values of `h` that are their scale, whatever `x` is.
    pub fn biases(&self) -> &[usize] {
        &self.biases
    }

    /// Of rows `16 * panel ..`: the first value of `h` that they take, and from it on `[values, 16]`, what each row multiplies it by.
    /// Nothing behind the last row.
    #[inline]
    pub fn up(&self, panel: usize) -> (usize, AdapterSlice<'_>) {
        let LowRankPanel { start, first, count } = self.panels.get(panel).copied().unwrap_or_default();
        (first, self.up.slice(start..start + count * LANES))
    }
}

/// Of a model's tensors, which matrices they are part of, and whether an adapter may add to their products.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterTargets {
    tensors: BTreeMap<String, Vec<AdapterTarget>>,
    /// Of the family.
    model_type: &'static str,
    /// Of GGUF files whose rows are as the decoder's.
    names: Names,
    /// Value heads of delta nets are in the order of GGUF files.
    tiled: bool,
}

/// A tensor, or some of its rows, inside a matrix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AdapterTarget {
    pub matrix: MatrixId,
    /// Of the matrix.
    pub rows: usize,
    pub first_row: usize,
    pub pick: Pick,
    /// `[rows, cols]` as it is stored.
    pub stored: [usize; 2],
    /// It is the matrix of a plain product. Else (a table, experts, what was made of it) an adapter cannot add to it here.
    pub is_product: bool,
}

impl AdapterTargets {
    /// Of a model that is loaded as [`weight_specs`] says.
    pub(crate) fn of(config: &Config, program: &Program) -> Result<Self> {
        let products = program.body.iter().filter_map(|op| match op {
            Op::Linear { weight, .. } | Op::GatedLinear { weight, .. } => Some(*weight),
            _ => None,
        });
        let targets = Self {
            tensors: BTreeMap::new(),
            model_type: config.family.model_type,
            names: Names::of(config, false),
            tiled: config.mixers.iter().any(|mixer| matches!(mixer, Mixer::Delta(net) if net.tiled)),
        };
        let mut finding = FindTargets { products: products.collect(), ids: Ids::default(), targets };
        weight_specs(config).try_map(&mut finding)?;
        Ok(finding.targets)
    }

    pub(crate) fn get(&self, tensor: &str) -> Option<&[AdapterTarget]> {
        self.tensors.get(tensor).map(Vec::as_slice)
    }

    /// The tensors that an adapter may add to, and their `[rows, cols]` as stored.
    pub fn products(&self) -> impl Iterator<Item = (&str, [usize; 2])> {
        let products = self.tensors.iter().filter(|(_, targets)| targets.iter().all(|of| of.is_product));
        products.filter_map(|(name, targets)| Some((name.as_str(), targets.first()?.stored)))
    }
}

struct FindTargets {
    products: BTreeSet<MatrixId>,
    ids: Ids,
    targets: AdapterTargets,
}

impl Load<ModelError> for FindTargets {
    fn matrix(&mut self, spec: &WeightSpec) -> Result<MatrixId> {
        let matrix = self.ids.matrix(spec)?;
        let is_product = self.products.contains(&matrix) && spec.made == Made::AS_STORED;
        let mut first_row = 0;
        for part in &spec.parts {
            let stored = [part.stored_rows(), part.shape.last().copied().unwrap_or(0)];
            let rows = spec.matrix_shape()[0];
            let target = AdapterTarget { matrix, rows, first_row, pick: part.rows, stored, is_product };
            self.targets.tensors.entry(part.name.clone()).or_default().push(target);
            first_row += part.picked_shape()[0];
        }
        Ok(matrix)
    }

    fn vector(&mut self, spec: &WeightSpec) -> Result<VectorId> {
        self.ids.vector(spec)
    }
}
