//! The CUDA backend: kernels compiled at run time, the driver they are launched through, and the planning in between.
//!
//! **Architecture Invariant:** everything but `cuda` is ordinary code over the [`Driver`] trait, so that it runs, kernels
//! included, where no GPU is: `folio-emulator` is the other implementor.
//!
//! **Architecture Invariant:** the bits of a row depend on (token, absolute position, cached bits, weights), as on the CPU. A
//! kernel may choose its tile by the batch, never the order in which it sums.

pub mod attention;
mod cubins;
pub mod cuda;
pub mod driver;
pub mod kernels;
pub mod kv;
pub mod linear;
pub mod nvrtc;
pub mod planes;
pub mod rows;

pub use driver::{Arg, DeviceInfo, DevicePtr, Driver, DriverError, Launch};
pub use planes::{Meta, Planes, RowBound};
