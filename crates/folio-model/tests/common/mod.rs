//! Loading fixtures, whole and damaged.
#![allow(dead_code, reason = "each test binary uses its part of this module")]

pub mod gguf;

use std::fs;
use std::path::Path;

use folio_model::backend::DType;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::fixture;
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model, ModelError};

pub fn options(max_model_len: Option<usize>) -> LoadOptions<'static> {
    LoadOptions {
        max_rows: 64,
        max_logit_rows: 8,
        max_model_len,
        kv_dtype: DType::BF16,
        block_tokens: 16,
        progress: None,
    }
}

pub fn load(folder: &Path, max_model_len: Option<usize>) -> Result<LoadedModel, ModelError> {
    Model::load(&Checkpoint::open(folder)?, &mut ReferenceBackend::new(), options(max_model_len))
}

/// A copy of a fixture that may be damaged.
pub fn copy_of(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}
