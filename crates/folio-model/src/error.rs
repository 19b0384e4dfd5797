//! Everything that can be wrong with a model, one variant per kind of fact.
//!
//! Owns: the sentences a user reads when a checkpoint is refused. Each names what is wrong and where (file, field,
//! tensor), and what would be accepted. Must never: lose the file name on the way up.

use crate::backend::BackendError;
use crate::hub::HubError;

/// Why a checkpoint was refused or could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    // -- files --
    #[error("cannot read {file}: {source}")]
    Io { file: String, source: std::io::Error },
    #[error("{folder} is not a model folder: {missing}")]
    Folder { folder: String, missing: String },
    #[error("{folder} is no adapter: {problem}")]
    AdapterFolder { folder: String, problem: String },
    #[error("{file} is {bytes} bytes, more than the {limit} that such a file may have")]
    FileTooLarge { file: String, bytes: u64, limit: u64 },

    // -- JSON --
    #[error("{file} is not valid JSON: {reason}")]
    Json { file: String, reason: String },
    #[error("{file}: field `{field}` {problem}")]
    Field { file: String, field: String, problem: String },

    // -- what Folio does not serve --
    #[error("{file}: model family `{family}` is not supported; supported families: {supported}")]
    Family { file: String, family: String, supported: String },
    #[error("{file}: {what} is not supported; {supported}")]
    Unsupported { file: String, what: String, supported: String },
    #[error("max_model_len {asked} is more than {limit}, the limit set by {reason}")]
    ModelLength { asked: usize, limit: usize, reason: String },

    #[error("max_model_len is 0, expected at least 1")]
    NoModelLength,
    #[error("the KV cache of {place} cannot be laid out: {problem}")]
    KvLayout { place: String, problem: String },

    // -- weights --
    #[error("{file} is damaged: {problem}")]
    Damaged { file: String, problem: String },
    #[error("tensor `{tensor}` is missing from {checkpoint}")]
    MissingTensor { tensor: String, checkpoint: String },
    #[error(
        "{file}: tensor `{tensor}` is not part of a {family} decoder as {settings} describes it; the checkpoint is of another architecture or {settings} is wrong"
    )]
    UnexpectedTensor { file: String, tensor: String, settings: &'static str, family: &'static str },
    #[error("{file}: tensor `{tensor}` has shape {found:?}, expected {expected:?} from {settings}")]
    Shape { file: String, tensor: String, found: Vec<usize>, expected: Vec<usize>, settings: &'static str },
    #[error(
        "{file}: tensor `{tensor}` has dtype {found}; supported weight dtypes: BF16, F16, F32, those that a quantization_config in config.json describes and, in GGUF files, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ1_S to IQ4_XS, IQ4_NL, TQ1_0, TQ2_0, MXFP4, NVFP4"
    )]
    DType { file: String, tensor: String, found: String },
    #[error("{file}: tensor `{tensor}` {problem}")]
    Tensor { file: String, tensor: String, problem: String },
    #[error(
        "{file}: tensor `{tensor}` has its columns in another order than `{other}`, stacked with it (act-order); they were quantized apart"
    )]
    MixedOrders { file: String, tensor: String, other: String },
    #[error(
        "{file}: tensor `{tensor}` has dtype {found} but `{other}`, stacked with it, has {other_encoding}"
    )]
    MixedEncodings {
        file: String,
        tensor: String,
        found: crate::quant::Encoding,
        other: String,
        other_encoding: crate::quant::Encoding,
    },

    #[error(
        "{place}: the packed weights are not those that {settings} describes; make them again with `folio quantize`"
    )]
    PackedOtherwise { settings: &'static str, place: String },

    // -- elsewhere --
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Hub(#[from] HubError),
}

pub type Result<T> = std::result::Result<T, ModelError>;
