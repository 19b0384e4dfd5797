//! The kernels: their sources, and which of them belong together.
//!
//! Owns: the list. Sources are header-less CUDA C++ over `kernels/prelude.cuh`, which has two forms: one for the device, in inline
//! PTX, and one for the host (`folio-emulator`).

/// Kernels that are compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    pub name: &'static str,
    /// Without the prelude.
    pub source: &'static str,
    /// Every `extern "C" __global__` function in it.
    pub kernels: &'static [&'static str],
}

/// What comes before every module's source on a device.
pub const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

/// All of them.
pub const MODULES: &[Module] = &[];
