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
pub const MODULES: &[Module] = &[ROWS, KV];

const ROWS: Module = Module {
    name: "rows",
    source: include_str!("../kernels/rows.cu"),
    kernels: &["rms_norm", "add_rms_norm", "scale_rows", "softcap_rows", "gate_rows"],
};

const KV: Module = Module {
    name: "kv",
    source: include_str!("../kernels/kv.cu"),
    kernels: &[
        "rope_table",
        "write_kv_f32",
        "write_kv_f16",
        "write_kv_bf16",
        "write_kv_int8",
        "write_kv_fp8",
        "write_kv_int4",
    ],
};
