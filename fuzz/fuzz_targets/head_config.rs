//! The config.json of a head from a stranger, or of a model that has one: an error that names the file, or layers that the model has and tensors
//! of bounded sizes.
#![no_main]

use std::sync::LazyLock;

use folio_model::config::Config;
use folio_model::eagle::{is_head, layers_read};
use folio_model::mtp;
use libfuzzer_sys::fuzz_target;

/// Of the model that every EAGLE-3 head is for: that of the fixture `llama3`.
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
    match mtp::layers_stated("config.json", data) {
        Ok(stated) => assert!(stated.is_none_or(|(_, layers)| layers > 0)),
        Err(error) => assert!(error.to_string().starts_with("config.json")),
    }
    for tensor in Config::parse("config.json", data).iter().flat_map(mtp::tensors_read) {
        let elements = tensor.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        elements.expect("sizes are bounded");
    }
});
