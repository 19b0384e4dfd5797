//! What the backend needs of a library that multiplies matrices.
//!
//! Owns: the contract. Must never: know which library it is, or what a product is for. Everything is row-major: weights `[n, k]`, rows
//! of the batch `[rows, k]`, products `[rows, n]` in f32. The work is in the order of the driver's stream.

use crate::driver::{DevicePtr, DriverError};

type Result<T> = std::result::Result<T, DriverError>;

/// What a library may use beside its operands: less than one partial tile of each multiprocessor, so that nothing is summed in parts.
pub const WORKSPACE_BYTES: u64 = 64 << 10;

/// What addresses are multiples of, and strides in bytes; so are rows of `k` values of operands and of `n` of f32.
pub const ALIGNMENT: usize = 16;

/// What is multiplied. Sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operands {
    Bf16,
    /// e4m3.
    Fp8,
}

impl Operands {
    /// Bytes of a value.
    pub const fn size(self) -> usize {
        match self {
            Operands::Bf16 => 2,
            Operands::Fp8 => 1,
        }
    }
}

/// What an algorithm is chosen for, whatever the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub n: u32,
    pub k: u32,
    pub operands: Operands,
}

impl Shape {
    /// Whether rows of both operands and of products are aligned.
    pub fn is_aligned(&self) -> bool {
        let (n, k) = (4 * self.n as usize, self.k as usize * self.operands.size());
        n > 0 && k > 0 && n.is_multiple_of(ALIGNMENT) && k.is_multiple_of(ALIGNMENT)
    }
}

/// One of a library's algorithms with all its settings, in the library's own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Algorithm(pub [u64; 8]);

/// One product: `out = x . weights^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Multiply {
    pub shape: Shape,
    pub algorithm: Algorithm,
    pub rows: u32,
    pub weights: DevicePtr,
    pub x: DevicePtr,
    /// Values from one row to the next.
    pub x_stride: u32,
    pub out: DevicePtr,
    pub out_stride: u32,
    /// Of [`WORKSPACE_BYTES`].
    pub workspace: DevicePtr,
}

/// A library and the stream it works on.
pub trait Gemm {
    /// For logs: "cuBLASLt 13.10".
    fn name(&self) -> String;

    /// Algorithms for about so many rows, best first as the library sees it; none of them adds partial sums, as far as it tells.
    fn candidates(&mut self, shape: Shape, rows: u32) -> Result<Vec<Algorithm>>;

    /// Whether this algorithm multiplies so many rows within [`WORKSPACE_BYTES`].
    fn takes(&mut self, shape: Shape, algorithm: &Algorithm, rows: u32) -> bool;

    fn multiply(&mut self, work: &Multiply) -> Result<()>;
}
