//! GGUF files on disk.

use std::path::{Path, PathBuf};

/// Writes a file and returns its folder, which must outlive its use.
pub fn on_disk(file: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(path_in(&folder), file).unwrap();
    folder
}

pub fn path_in(folder: &tempfile::TempDir) -> PathBuf {
    Path::new(folder.path()).join("model.gguf")
}
