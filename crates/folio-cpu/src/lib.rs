//! The CPU backend: kernels, a thread pool, packed weights, paged KV.
//!
//! What goes in: tensors as they lie in a checkpoint, a decoder [`Program`](folio_model::program::Program), batches. What
//! comes out: logits. Look for [`CpuBackend`] (the `Backend` trait), `step` (which worker does what), `linear` and `attend`
//! (the two kernels that take all the time), `quant` (quantized weights), `simd` (instruction sets), [`ThreadPool`], and [`machine`] (measured limits).
//!
//! **Architecture Invariant:** the bits of a row depend on (token, absolute position, cached bits, weights). Not on its
//! neighbours, the number of rows, the worker, the number of workers, or the instruction set.
//!
//! **Architecture Invariant:** kernels check nothing. `folio_model::check` establishes what they assume, once per program and batch.

mod adapters;
mod ahead;
mod attend;
mod attention;
mod backend;
mod error;
mod experts;
mod fp8;
mod groups;
mod kv;
mod latent;
mod linear;
pub mod machine;
mod memory;
mod packed;
pub mod packed_file;
mod plain;
mod pool;
mod quant;
mod recurrent;
mod rows;
mod simd;
mod stages;
mod step;
mod threads;

pub use backend::{CpuBackend, CpuOptions, Quantized};
pub use error::CpuError;
pub use memory::trim_heap;
pub use packed::packed_bytes_per_value;
pub use pool::{Claims, MAX_THREADS, ThreadPool, Worker};
pub use quant::quantize::Quantize;
pub use simd::Isa;

/// Of the kernels' arithmetic: raised whenever they would give other bits of K and V for the same weights.
pub const NUMERICS: u32 = 1;
