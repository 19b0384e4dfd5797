//! A PEFT folder from a stranger, for the model of the fixture `llama3`: an error that names the file, or an adapter within the limits. An input is
//! adapter_config.json, a zero byte, and the header of adapter_model.safetensors, whose length is right and whose values are zeros.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use folio_model::Checkpoint;
use folio_model::adapter::{Adapter, AdapterLimits, AdapterTargets};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{Runner, fixture};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

const LIMITS: AdapterLimits = AdapterLimits { rank: 64, bytes: 1 << 20 };
/// Most bytes of values.
const VALUES_MAX: u64 = 1 << 16;

static TARGETS: LazyLock<AdapterTargets> = LazyLock::new(|| {
    let checkpoint = Checkpoint::open(fixture("llama3")).expect("a fixture");
    Runner::load(&checkpoint, ReferenceBackend::new(), None).model.targets
});

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("folio-fuzz-adapter-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    folder
});

/// Bytes of values that a header speaks of.
fn values(header: &[u8]) -> u64 {
    let entries = serde_json::from_slice(header).unwrap_or(Value::Null);
    let end = |entry: &Value| entry.pointer("/data_offsets/1").and_then(Value::as_u64);
    let ends = entries.as_object().into_iter().flat_map(|entries| entries.values()).filter_map(end);
    ends.max().unwrap_or(0).min(VALUES_MAX)
}

fuzz_target!(|data: &[u8]| {
    let at = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (config, header) = (&data[..at], data.get(at + 1..).unwrap_or_default());
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + values(header) as usize, 0);
    fs::write(FOLDER.join("adapter_config.json"), config).expect("a folder to write to");
    fs::write(FOLDER.join("adapter_model.safetensors"), file).expect("a folder to write to");
    match Adapter::read(&FOLDER, &TARGETS, LIMITS) {
        Ok(adapter) => assert!((1..=LIMITS.rank).contains(&adapter.rank())),
        Err(error) => assert!(error.to_string().contains("adapter_"), "{error}"),
    }
});
