//! A config.json, generation_config.json or weight index from a stranger: an error that names the file, or a
//! configuration whose tables and tensor list can be built.
#![no_main]

use folio_model::checkpoint::{GenerationConfig, json, parse_index};
use folio_model::config::Config;
use folio_model::weights::weight_specs;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    match Config::parse("config.json", data) {
        Ok(config) => {
            let table = config.rope.table(config.max_position);
            assert_eq!(2 * table.inv_freq.len(), config.rope.rotary_dim);
            // Layers may have heads of their own sizes, which it then is for.
            let widest = (0..config.layers).map(|layer| config.head_sizes(layer).head_dim).max();
            assert!(config.rope.rotary_dim <= widest.unwrap_or(0).max(config.head_dim));
            assert_eq!(config.heads % config.kv_heads, 0);
            // Thousands of layers are legal but slow to list.
            if config.layers <= 64 {
                let elements = |shape: &[usize]| {
                    shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size))
                };
                for part in weight_specs(&config).iter().flat_map(|weight| &weight.parts) {
                    elements(&part.shape).expect("sizes are bounded");
                }
            }
        }
        Err(error) => assert!(error.to_string().contains("config.json")),
    }
    if let Ok(map) = json::parse_object("config.json", data) {
        let _ = GenerationConfig::parse(
            Some(("generation_config.json", data)),
            json::Fields::new("config.json", &map),
        );
    }
    if let Ok(map) = parse_index("model.safetensors.index.json", data) {
        assert!(map.values().all(|file| !file.contains('/') && !file.contains('\\')));
    }
});
