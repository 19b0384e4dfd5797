//! Test data that is not ours: found by `FOLIO_TEST_DATA`, skipped with a warning without it.
#![allow(dead_code)] // Each test file uses a part of this.

use std::io::{Read, Write};
use std::path::PathBuf;

/// A folder of the test data, or `None` after saying so.
pub fn data(folder: &str) -> Option<PathBuf> {
    let root = std::env::var_os("FOLIO_TEST_DATA").map(PathBuf::from);
    let root = root.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"));
    let path = root.join(folder);
    if path.exists() {
        return Some(path);
    }
    // Past the test runner, which shows what a passing test prints to nobody.
    let _ = writeln!(std::io::stderr(), "SKIPPED: no {} (set FOLIO_TEST_DATA)", path.display());
    None
}

/// The JSON objects of a gzipped file, one a line.
pub fn gz_lines(path: PathBuf) -> Vec<serde_json::Value> {
    let file = std::fs::File::open(&path).expect("golden file");
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).expect("gzip");
    text.lines().map(|line| serde_json::from_str(line).expect("json")).collect()
}
