//! The kernels: their sources, and which of them belong together.
//!
//! Owns: the list. Sources are header-less CUDA C++ over `kernels/prelude.cuh`, which has two forms: one for the device, in inline
//! PTX, and one for the host (`folio-emulator`).

use folio_model::kv_format::KvFormat;

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

/// The module that attends over a cache of this format, beside those that every model needs. A cache in f32 needs none.
pub fn of_cache(format: KvFormat) -> Option<&'static Module> {
    match format {
        KvFormat::F32 => None,
        KvFormat::F16 => Some(&ATTENTION_F16),
        KvFormat::BF16 => Some(&ATTENTION_BF16),
        KvFormat::Int8 => Some(&ATTENTION_INT8),
        KvFormat::Fp8 => Some(&ATTENTION_FP8),
        KvFormat::Int4 => Some(&ATTENTION_INT4),
    }
}

/// How weights are held, as far as kernels are compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// f32, f16, bf16.
    Plain,
    /// Bytes with scales.
    Eight,
    /// Nibbles with scales.
    Four,
}

impl Weights {
    const ALL: [Weights; 3] = [Weights::Plain, Weights::Eight, Weights::Four];

    /// The module of products and embeddings.
    pub fn products(self) -> &'static Module {
        match self {
            Weights::Plain => &LINEAR_PLAIN,
            Weights::Eight => &LINEAR_EIGHT,
            Weights::Four => &LINEAR_FOUR,
        }
    }

    /// The module of products of experts.
    pub fn experts(self) -> &'static Module {
        match self {
            Weights::Plain => &EXPERTS_PLAIN,
            Weights::Eight => &EXPERTS_EIGHT,
            Weights::Four => &EXPERTS_FOUR,
        }
    }
}

/// What every model needs: all but [`of_cache`], [`Weights::products`] and [`Weights::experts`], which take the compiler longest,
/// [`MADE_UP`] and [`LIBRARY`].
pub fn always() -> impl Iterator<Item = &'static Module> {
    let weights = Weights::ALL.iter().flat_map(|weights| [weights.products(), weights.experts()]);
    let optional = KvFormat::ALL.into_iter().filter_map(of_cache).chain(weights).chain([&MADE_UP, &LIBRARY]);
    let optional: Vec<&Module> = optional.collect();
    MODULES.iter().filter(move |module| !optional.contains(module))
}

/// All of them.
pub const MODULES: &[Module] = &[
    ROWS,
    KV,
    ATTENTION,
    ATTENTION_F16,
    ATTENTION_BF16,
    ATTENTION_INT8,
    ATTENTION_FP8,
    ATTENTION_INT4,
    SAMPLE,
    LINEAR_PLAIN,
    LINEAR_EIGHT,
    LINEAR_FOUR,
    EXPERTS,
    EXPERTS_PLAIN,
    EXPERTS_EIGHT,
    EXPERTS_FOUR,
    MADE_UP,
    LIBRARY,
    RATES,
];

const ROWS: Module = Module {
    name: "rows",
    source: include_str!("../kernels/rows.cu"),
    kernels: &[
        "rms_norm",
        "add_rms_norm",
        "scale_rows",
        "copy_rows",
        "input_rows",
        "softcap_rows",
        "gate_rows",
    ],
};

const SAMPLE: Module = Module {
    name: "sample",
    source: include_str!("../kernels/sample.cu"),
    kernels: &["sample_rows", "follow"],
};

const KV: Module = Module {
    name: "kv",
    source: concat!(
        include_str!("../kernels/vector.cuh"),
        include_str!("../kernels/e4m3.cuh"),
        include_str!("../kernels/kv.cu")
    ),
    kernels: &[
        "rope_table",
        "set_tables",
        "write_kv_f32",
        "write_kv_f16",
        "write_kv_bf16",
        "write_kv_int8",
        "write_kv_fp8",
        "write_kv_int4",
    ],
};

const ATTENTION: Module = Module {
    name: "attention",
    source: concat!(
        include_str!("../kernels/vector.cuh"),
        include_str!("../kernels/attention.cuh"),
        include_str!("../kernels/attention.cu")
    ),
    kernels: &["attention_f32", "attention_merge", "attention_merge_rotated"],
};

/// Attention over one format of the cache, for heads of up to 64, 128 and 256 dimensions.
macro_rules! attention_over {
    ($name:literal, $format:literal) => {
        Module {
            name: $name,
            source: concat!(
                include_str!("../kernels/vector.cuh"),
                include_str!("../kernels/attention.cuh"),
                include_str!("../kernels/attention_tiles.cu"),
                concat!("ATTENTION(", $name, "_64, ", $format, ", 4)\n"),
                concat!("ATTENTION(", $name, "_128, ", $format, ", 8)\n"),
                concat!("ATTENTION(", $name, "_256, ", $format, ", 16)\n")
            ),
            kernels: &[concat!($name, "_64"), concat!($name, "_128"), concat!($name, "_256")],
        }
    };
}

const ATTENTION_F16: Module = attention_over!("attention_f16", "F16");
const ATTENTION_BF16: Module = attention_over!("attention_bf16", "BF16");
const ATTENTION_INT8: Module = attention_over!("attention_int8", "INT8");
const ATTENTION_FP8: Module = attention_over!("attention_fp8", "FP8");
const ATTENTION_INT4: Module = attention_over!("attention_int4", "INT4");

const EXPERTS: Module = Module {
    name: "experts",
    source: include_str!("../kernels/experts.cu"),
    kernels: &["route", "expert_counts", "expert_lists", "combine_experts"],
};

/// Kernels over packed weights: so many for each kind, and others.
macro_rules! linear {
    ($name:literal, [$($source:literal),*], [$($kind:literal),*], $suffixes:tt, [$($other:literal),*]) => {
        Module {
            name: $name,
            source: concat!(
                include_str!("../kernels/linear/product.cuh"),
                $(include_str!(concat!("../kernels/linear/", $source))),*
            ),
            kernels: linear!(@names [$($kind),*] $suffixes [$($other),*]),
        }
    };
    (@names [$($kind:literal),*] products [$($other:literal),*]) => {
        &[
            $(
                concat!($kind, "_8"),
                concat!($kind, "_32"),
                concat!($kind, "_64"),
                concat!($kind, "_128"),
                concat!($kind, "_256"),
                concat!($kind, "_embed"),
            )*
            $($other),*
        ]
    };
    (@names [$($kind:literal),*] experts [$($other:literal),*]) => {
        &[$(concat!($kind, "_experts_8"), concat!($kind, "_experts_wide"),)* $($other),*]
    };
}

const LINEAR_PLAIN: Module =
    linear!("linear_plain", ["plain.cuh", "plain.cu"], ["bf16", "f16"], products, ["f32_8", "f32_embed"]);
const LINEAR_EIGHT: Module =
    linear!("linear_eight", ["codes.cuh", "eight.cu"], ["eight_16", "eight", "fp8"], products, []);
const LINEAR_FOUR: Module =
    linear!("linear_four", ["codes.cuh", "four.cu"], ["four_16", "four", "mx4", "iq4"], products, []);
const EXPERTS_PLAIN: Module = linear!(
    "experts_plain",
    ["plain.cuh", "experts.cuh", "experts_plain.cu"],
    ["bf16", "f16"],
    experts,
    ["f32_experts_8"]
);
const EXPERTS_EIGHT: Module = linear!(
    "experts_eight",
    ["codes.cuh", "experts.cuh", "experts_eight.cu"],
    ["eight_16", "eight", "fp8"],
    experts,
    []
);
const EXPERTS_FOUR: Module = linear!(
    "experts_four",
    ["codes.cuh", "experts.cuh", "experts_four.cu"],
    ["four_16", "four", "mx4", "iq4"],
    experts,
    []
);

/// What weights are made up with.
pub const MADE_UP: Module = Module {
    name: "made_up",
    source: include_str!("../kernels/made_up.cu"),
    kernels: &["make_up_sixteen", "make_up_eight", "make_up_four", "make_up_scales", "make_up_f32"],
};

/// What stands around products of a library.
pub const LIBRARY: Module = Module {
    name: "library",
    source: concat!(
        include_str!("../kernels/vector.cuh"),
        include_str!("../kernels/e4m3.cuh"),
        include_str!("../kernels/library.cu")
    ),
    kernels: &[
        "try_fill_bf16",
        "try_fill_fp8",
        "try_exact_bf16",
        "try_exact_fp8",
        "try_same",
        "rows_of_sixteen",
        "rows_of_eight",
        "quantize_rows",
        "finish_rows",
    ],
};

const RATES: Module = Module {
    name: "rates",
    source: include_str!("../kernels/rates.cu"),
    kernels: &["fill_noise", "matrix_rate", "read_rate"],
};
