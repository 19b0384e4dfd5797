//! Identity of a model for the KV cache: two models with equal digests may share cached KV.
//!
//! SHA-256 over config.json, the rotary table (LongRoPE's depends on the server's longest sequence) and, for every tensor
//! the decoder uses, in name order: name, encoding, shape and a *sample* of its bytes: the first 64 of every 4,096, and the
//! last 64. How the tensors are spread over files does not matter, nor do tensors the decoder ignores.
//!
//! Why a sample: hashing all of 2.5 GB would take a second or more at every start. The sample takes 0.07 s of hashing,
//! and the page faults it causes are those that packing needs anyway. What it can miss: an edit that changes nothing but
//! fewer than 4,096 neighbouring bytes of a tensor (one row of a small embedding table, a hand-edited weight). Training,
//! merging an adapter, quantizing or converting changes a tensor throughout and is always seen. Whoever edits single
//! weights by hand must use a fresh cache directory.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use crate::backend::{DType, TensorView};
use crate::program::Rope;
use crate::quant::Encoding;

const STRIDE: usize = 4096;
const SAMPLE: usize = 64;

/// Accumulates a model's digest, tensor by tensor in any order.
pub struct Digest {
    config: Sha256,
    tensors: BTreeMap<String, [u8; 32]>,
}

impl Digest {
    pub(super) fn new(config_text: &[u8], rope: &Rope) -> Self {
        let mut config = Sha256::new();
        config.update(b"folio model digest 1");
        config.update((config_text.len() as u64).to_le_bytes());
        config.update(config_text);
        config.update((rope.inv_freq.len() as u64).to_le_bytes());
        for value in rope.inv_freq.iter().chain([&rope.scale]) {
            config.update(value.to_le_bytes());
        }
        Self { config, tensors: BTreeMap::new() }
    }

    /// Adds a tensor; adding it twice changes nothing.
    pub fn tensor(&mut self, name: &str, view: &TensorView<'_>) {
        if self.tensors.contains_key(name) {
            return;
        }
        let mut hash = Sha256::new();
        hash.update([match view.encoding {
            Encoding::Plain(DType::F32) => 0,
            Encoding::Plain(DType::F16) => 1,
            Encoding::Plain(DType::BF16) => 2,
            Encoding::Block(format) => format.tag(),
        }]);
        hash.update((view.shape.len() as u64).to_le_bytes());
        for size in view.shape {
            hash.update((*size as u64).to_le_bytes());
        }
        for column in view.order.unwrap_or_default() {
            hash.update(column.to_le_bytes());
        }
        for page in view.bytes.chunks(STRIDE) {
            hash.update(&page[..page.len().min(SAMPLE)]);
        }
        hash.update(&view.bytes[view.bytes.len().saturating_sub(SAMPLE)..]);
        self.tensors.insert(name.to_owned(), hash.finalize().into());
    }

    /// Adds tensors by the digests they had in [`Digest::tensors`].
    pub fn known(&mut self, tensors: &BTreeMap<String, [u8; 32]>) {
        self.tensors.extend(tensors.iter().map(|(name, digest)| (name.clone(), *digest)));
    }

    /// What was added so far, by name.
    pub fn tensors(&self) -> &BTreeMap<String, [u8; 32]> {
        &self.tensors
    }

    pub fn finish(self) -> [u8; 32] {
        let mut hash = self.config;
        for (name, tensor) in self.tensors {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update(tensor);
        }
        hash.finalize().into()
    }
}
