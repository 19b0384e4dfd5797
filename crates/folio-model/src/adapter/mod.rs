//! Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685): `y = W x + s B (A x)` for rows of a batch that ask for it.
//!
//! Owns: an adapter in memory ([`Adapter`]), which of a model's tensors may have one ([`AdapterTargets`]), and reading them ([`Adapter::read`]).
//! Must never: know a request, or change a weight of the model: what is added is computed from unrounded activations, in f32, and added
//! to the product before anything else is done with it.
//!
//! A row's result depends on that row, the weights and its adapter: how rows are grouped changes no bit, nor do other adapters.

mod read;

use std::collections::{BTreeMap, BTreeSet};

use crate::config::Config;
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
        self.products.iter().flatten().map(|product| 4 * (product.down.len() + product.up.len())).sum()
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
/// `h = A x` of all of them side by side, ranks of each filled up to whole [`LANES`]; B with the scale in it.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    rows: usize,
    cols: usize,
    /// `[lanes / 16, cols, 16]`: A of 16 values of `h` at a time.
    down: Vec<f32>,
    /// Values of `h` that are 1: what they are multiplied by is a bias.
    ones: Vec<usize>,
    panels: Vec<LowRankPanel>,
    /// LowRankPanel after panel `[values of h, 16 rows]`.
    up: Vec<f32>,
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
    /// `[rows, rank]`, times the scale.
    pub up: Vec<f32>,
    /// `[rows]`, times the scale.
    pub bias: Option<Vec<f32>>,
    pub rank: usize,
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
    /// `parts`: of rows apart from each other, of at least rank 1, with `cols` columns each.
    pub(crate) fn new(rows: usize, cols: usize, mut parts: Vec<LowRankPart>) -> Self {
        parts.sort_by_key(|part| part.first_row);
        let mut starts = Vec::with_capacity(parts.len());
        let mut lanes = 0;
        for part in &parts {
            starts.push(lanes);
            lanes += part.values().next_multiple_of(LANES);
        }
        let mut down = vec![0.0; lanes * cols];
        let mut ones = Vec::new();
        for (part, start) in parts.iter().zip(&starts) {
            for (value, a) in part.down.chunks_exact(cols.max(1)).enumerate() {
                let (chunk, lane) = ((start + value) / LANES, (start + value) % LANES);
                for (col, a) in a.iter().enumerate() {
                    down[(chunk * cols + col) * LANES + lane] = *a;
                }
            }
            ones.extend(part.bias.as_ref().map(|_| start + part.rank));
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
        Self { rows, cols, down, ones, panels, up }
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
        self.down.len() / self.cols.max(1)
    }

    /// `[cols, 16]`: what 16 values of `h` are made with.
    pub fn down(&self, chunk: usize) -> &[f32] {
        &self.down[chunk * self.cols * LANES..][..self.cols * LANES]
    }

    /// Values of `h` that are 1 whatever `x` is.
    pub fn ones(&self) -> &[usize] {
        &self.ones
    }

    /// Of rows `16 * panel ..`: the first value of `h` that they take, and from it on `[values, 16]`, what each row multiplies it by.
    /// Nothing behind the last row.
    pub fn up(&self, panel: usize) -> (usize, &[f32]) {
        let LowRankPanel { start, first, count } = self.panels.get(panel).copied().unwrap_or_default();
        (first, &self.up[start..start + count * LANES])
    }
}

/// Of a model's tensors, which matrices they are part of, and whether an adapter may add to their products.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterTargets {
    tensors: BTreeMap<String, Vec<AdapterTarget>>,
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
        let mut finding =
            FindTargets { products: products.collect(), ids: Ids::default(), targets: Self::default() };
        weight_specs(config).try_map(&mut finding)?;
        Ok(finding.targets)
    }

    pub(crate) fn get(&self, tensor: &str) -> Option<&[AdapterTarget]> {
        self.tensors.get(tensor).map(Vec::as_slice)
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
