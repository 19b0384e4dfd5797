//! Heads that draft: what reads the features that a model gives of its rows, beside tokens.
//!
//! Owns: what is the same of all of them, whatever they are made of and wherever their weights lie. Must never: know who drafts, or change a
//! token of the model.
//!
//! A head has a row for each token but the first: the row of token `q` takes the embedding of `q` and the features of position `q - 1`, and
//! lies at that position. The model gives the features ([`DraftHead::load_taps`]); behind what it has computed the head's own take their place.
//!
//! | kind | features | where its weights are |
//! |---|---|---|
//! | EAGLE-3 ([`eagle`](crate::eagle)) | a product of hidden states of a few layers | a checkpoint of its own |
//! | MTP ([`mtp`](crate::mtp)) | the hidden state of the last layer | in the model's checkpoint |

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Backend, KvLayout, TensorView};
use crate::checkpoint::Checkpoint;
use crate::decoder::Taps;
use crate::error::{ModelError, Result};
use crate::loader::LoadOptions;
use crate::program::MatrixId;
use crate::quant::Encoding;
use crate::weights::TensorSpec;

/// A head whose files are open and fit each other and the model that it was opened for. No weight is read.
pub trait DraftHead: Send + Sync {
    /// Values of a row's features.
    fn width(&self) -> usize;

    /// As what its first product is stored, for the rest. `target` is the model's checkpoint.
    fn weight_encoding(&self, target: &Checkpoint) -> Result<Encoding>;

    /// Bytes of the weights that a row of the head is multiplied with: all but what the model computes for it, and the embeddings. Of experts
    /// those that a row chooses.
    fn bytes_of_a_row(&self, target: &Checkpoint) -> Result<u64>;

    /// What the model is to give out of its rows; matrices that this needs go to the model's backend.
    fn load_taps(&self, backend: &mut dyn Backend) -> Result<Taps>;

    /// Packs the head into a backend of its own and gives it the program. Its sequences are as long as the model's,
    /// `options.max_model_len`; what it lacks is read from the model's checkpoint.
    fn load(
        &self,
        target: &Checkpoint,
        backend: &mut dyn Backend,
        options: &LoadOptions<'_>,
    ) -> Result<LoadedHead>;
}

/// A head in a backend that has no cache yet.
#[derive(Clone, Debug)]
pub struct LoadedHead {
    /// Tokens that it can say, values in a row of its logits.
    pub vocab: usize,
    /// Of each of them, the model's; `None`: they are the model's.
    pub token_ids: Option<Arc<[u32]>>,
    /// One group of one layer.
    pub kv_layout: KvLayout,
}

/// What a tensor takes in a backend.
pub(crate) fn bytes_of(checkpoint: &Checkpoint, spec: &TensorSpec) -> Result<u64> {
    let values = spec.picked_shape().iter().product::<usize>() as f64;
    Ok((values * checkpoint.tensor(spec)?.encoding.bytes_per_value()) as u64)
}

/// Tensors stacked along rows, of each all columns or some. What is quantized is cut between its blocks; an error names what cannot be.
pub(crate) fn load_matrix(
    checkpoint: &Checkpoint,
    backend: &mut dyn Backend,
    label: &str,
    specs: &[TensorSpec],
    columns: Option<Range<usize>>,
) -> Result<MatrixId> {
    let mut parts = Vec::with_capacity(specs.len());
    for spec in specs {
        let tensor = checkpoint.tensor(spec)?;
        let values = tensor.read()?;
        let (all, range) = (spec.shape[1], columns.clone().unwrap_or(0..spec.shape[1]));
        let bytes: Vec<u8> = match range.len() == all {
            true => values.bytes.into_owned(),
            false => {
                let [row, start, end] = [all, range.start, range.end].map(|to| tensor.encoding.bytes(to));
                let (Some(row), Some(start), Some(end)) = (row, start, end) else {
                    let (file, name) = checkpoint.stored_as(&spec.name)?;
                    let problem = format!(
                        "is {}, whose blocks do not end at columns {} and {}",
                        tensor.encoding, range.start, range.end
                    );
                    let (file, tensor) = (file.to_owned(), name.to_owned());
                    return Err(ModelError::Tensor { file, tensor, problem });
                };
                values.bytes.chunks_exact(row).flat_map(|row| &row[start..end]).copied().collect()
            }
        };
        parts.push((tensor.encoding, [spec.shape[0], range.len()], bytes));
    }
    let views: Vec<TensorView<'_>> = parts
        .iter()
        .map(|(encoding, shape, bytes)| TensorView { encoding: *encoding, shape, bytes, order: None })
        .collect();
    Ok(backend.load_matrix(label, &views)?)
}
