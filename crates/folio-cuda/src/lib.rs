//! The CUDA backend: kernels compiled at run time, the driver they are launched through, and the planning in between.
//!
//! What goes in and comes out is what `folio-cpu` takes and gives. Look for [`CudaBackend`] (the `Backend` trait), `launches` (a program as
//! launches), `step` (a batch as the device reads it), `graphs`, `kernels` (the sources), [`cuda`] (the real driver), `nvrtc` and `cubins`
//! (how kernels are compiled and kept), `gemm` (what a library of products is asked for, if one is used).
//!
//! **Architecture Invariant:** everything but `cuda` is ordinary code over the [`Driver`] trait, so that it runs, kernels
//! included, where no GPU is: `folio-emulator` is the other implementor.
//!
//! **Architecture Invariant:** the bits of a row depend on (token, absolute position, cached bits, weights), as on the CPU. A
//! kernel may choose its tile by the batch, never the order in which it sums.

pub mod attention;
mod backend;
pub mod cubins;
pub mod cuda;
pub mod driver;
pub mod experts;
pub mod gemm;
mod graphs;
pub mod kernels;
pub mod kv;
mod launches;
pub mod libraries;
pub mod linear;
pub mod machine;
pub mod nvrtc;
pub mod planes;
pub mod rows;
mod rows_plan;
pub mod sample;
pub mod step;
pub mod tables;
mod turns;

pub use backend::CudaBackend;
pub use driver::{Arg, Copies, DeviceInfo, DevicePtr, Driver, DriverError, Launch};
pub use planes::{Meta, Planes, RowBound};

/// Of the kernels' arithmetic: raised whenever they would give other bits of K and V for the same weights on the same architecture.
pub const NUMERICS: u32 = 2;
