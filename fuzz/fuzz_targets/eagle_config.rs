//! The config.json of a head from a stranger: an error that names the file, or layers that the model has.
#![no_main]

use std::sync::LazyLock;

use folio_model::config::Config;
use folio_model::eagle::{is_head, layers_read};
use libfuzzer_sys::fuzz_target;

/// Of the model that every head is for: that of the fixture `llama3`.
static TARGET: LazyLock<Config> = LazyLock::new(|| {
    let text = include_bytes!("../../crates/folio-model/tests/fixtures/llama3/config.json");
    Config::parse("config.json", text).expect("a fixture")
});

fuzz_target!(|data: &[u8]| {
    let _ = is_head(data);
    match layers_read("config.json", data, &TARGET) {
        Ok(layers) => assert!(!layers.is_empty() && layers.iter().all(|layer| *layer <= TARGET.layers)),
        Err(error) => assert!(error.to_string().starts_with("config.json")),
    }
});
