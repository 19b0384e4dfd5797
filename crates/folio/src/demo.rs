//! The model inside the binary: trained by `tools/demo_model`, so that the first minute needs no download.

pub const NAME: &str = "folio-demo";

/// `(file name, bytes)`, the same names as in a model folder.
pub static FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../assets/demo/config.json")),
    ("generation_config.json", include_bytes!("../assets/demo/generation_config.json")),
    ("model.safetensors", include_bytes!("../assets/demo/model.safetensors")),
    ("tokenizer.json", include_bytes!("../assets/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../assets/demo/tokenizer_config.json")),
];
