//! The model that is planned for: its configuration alone, from wherever it can be had.
//!
//! Owns: what weights take in each format, and what the cache's own layout says of KV beside the formula that is in every text on the
//! matter. Must never: load a weight, or download more than a config.json.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use folio_model::backend::{GroupKind, KvGroup, KvLayout};
use folio_model::checkpoint::quantized::Quantization;
use folio_model::config::Mixer;
use folio_model::decoder::kv_layout;
use folio_model::hub::Hub;
use folio_model::kv_format::{KvFormat, KvFormats, SCALE_BYTES};
use folio_model::weights::weight_specs;
use folio_model::{Checkpoint, Config};

use super::shape;
use crate::models::{Aliases, Source};
use crate::units;

/// Of a file that is named as a configuration.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// What weights are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightFormat {
    F32,
    /// Also of F16
    Bf16,
    Fp8,
    /// 8.5 bits a weight
    Q8,
    /// 4.5 bits a weight
    Q4,
}

impl WeightFormat {
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        }
    }

    /// Bits of a weight with its part of a scale; those with columns that are no multiple of 32 stay in 16 bits.
    fn bits(self, columns: usize) -> f64 {
        match self {
            Self::F32 => 32.0,
            Self::Q8 | Self::Q4 if !columns.is_multiple_of(32) => 16.0,
            Self::Bf16 => 16.0,
            Self::Fp8 => 8.0,
            Self::Q8 => 8.5,
            Self::Q4 => 4.5,
        }
    }
}

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct PlannedModel {
    pub name: String,
    pub config: Config,
    pub parameters: u64,
    /// What its files hold, as near as there is a name for it.
    pub stored: WeightFormat,
}

impl PlannedModel {
    /// A shape (`layers=32,hidden=4096,...`), a config.json, or what any other command takes; of a hub name that is not on this machine
    /// config.json is downloaded and nothing else.
    pub fn open(model: &str) -> Result<Self> {
        if shape::is_shape(model) {
            return Ok(Self::of(model.to_owned(), shape::config(model)?));
        }
        let path = Path::new(model);
        if path.is_file() && path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
        {
            let size = path.metadata().with_context(|| format!("cannot read {model}"))?.len();
            if size > CONFIG_BYTES_MAX {
                bail!("{model} has {} bytes, a config.json at most {CONFIG_BYTES_MAX}", size);
            }
            let text = std::fs::read(path).with_context(|| format!("cannot read {model}"))?;
            let folder =
                path.canonicalize().ok().and_then(|path| Some(path.parent()?.file_name()?.to_owned()));
            let name = folder.map_or_else(|| model.to_owned(), |name| name.to_string_lossy().into_owned());
            return Ok(Self::of(name, Config::parse(model, &text)?));
        }
        let source = Source::parse(Some(model), &Aliases::default())
            .context("a shape is written as layers=32,hidden=4096,heads=32,intermediate=11008,vocab=32000")?;
        let config = match &source {
            Source::BuiltIn | Source::Gguf(_) => source.open_here()?.config().clone(),
            Source::Folder(path) => match Checkpoint::open_without_weights(path) {
                Ok(checkpoint) => checkpoint.config().clone(),
                // A folder of one GGUF model.
                Err(error) => match source.open_here() {
                    Ok(checkpoint) => checkpoint.config().clone(),
                    Err(_) => return Err(error.into()),
                },
            },
            Source::Hub(name) => {
                let hub = Hub::from_env()?;
                match hub.cached(name) {
                    Some(_) => source.open_here()?.config().clone(),
                    None => Config::parse("config.json", &hub.config(name)?)
                        .with_context(|| format!("{name}: config.json"))?,
                }
            }
        };
        Ok(Self::of(source.name(), config))
    }

    fn of(name: String, config: Config) -> Self {
        let parts = weight_specs(&config);
        let parts = parts.iter().flat_map(|weight| weight.distinct());
        let parameters = parts.map(|part| part.picked_shape().iter().product::<usize>() as u64).sum();
        let stored = match config.quantization {
            None => WeightFormat::Bf16,
            Some(Quantization::Fp8(_)) => WeightFormat::Fp8,
            Some(_) => WeightFormat::Q4,
        };
        Self { name, config, parameters, stored }
    }

    pub fn weight_bytes(&self, format: WeightFormat) -> u64 {
        let specs = weight_specs(&self.config);
        let bytes = specs.iter().map(|weight| {
            let is_matrix = weight.parts.first().is_some_and(|part| part.shape.len() > 1);
            let [rows, columns] = weight.matrix_shape();
            match is_matrix {
                true => (rows as f64 * columns as f64) * format.bits(columns) / 8.0,
                // Norms and biases stay in f32.
                false => weight.parts.iter().map(|part| 4.0 * part.picked_shape()[0] as f64).sum(),
            }
        });
        bytes.sum::<f64>() as u64
    }

    /// Geometry of its cache, as the engine lays it out.
    pub fn layout(
        &self,
        format: KvFormat,
        block_tokens: u32,
        max_model_len: u32,
    ) -> Result<KvLayout, String> {
        let formats = KvFormats { most: format, skipped: format, skip: Vec::new() };
        kv_layout(&self.config, &formats, block_tokens as usize, max_model_len as usize)
    }

    /// 2 x layers x KV heads x head_dim x bytes: bytes of a token in a decoder whose layers all attend and keep K and V of as many heads, as
    /// wide. `None`: some do not.
    pub fn formula(&self, format: KvFormat) -> Option<u64> {
        let config = &self.config;
        let plain = config.mixers.iter().all(|mixer| *mixer == Mixer::Attention)
            && config.full_heads.is_none()
            && config.sharing_layers == 0;
        let values = 2 * config.layers * config.kv_heads;
        (plain && !format.is_scaled()).then(|| (values * format.code_bytes(config.head_dim)) as u64)
    }
}

/// A layout in numbers: a term for each cache group, in the order of their pools.
pub fn terms(layout: &KvLayout) -> Vec<String> {
    layout.groups.iter().filter(|group| group.layers() > 0).map(term).collect()
}

fn term(group: &KvGroup) -> String {
    let layers = group.layers();
    if let Some(values) = group.state_values() {
        let bytes = units::bytes(group.bytes_per_block() as u64);
        return format!(
            "{layers} layers x {values} x 4 B = {bytes} for a sequence, and for each {} tokens that are kept",
            group.block_tokens
        );
    }
    // Layers of one group may keep different formats; no option of this command says so.
    let format = group.formats.first().copied().unwrap_or(KvFormat::F16);
    let per_value = match format {
        KvFormat::F32 => "x 4 B".to_owned(),
        KvFormat::F16 | KvFormat::BF16 => "x 2 B".to_owned(),
        KvFormat::Int8 | KvFormat::Fp8 => format!("x 1 B + {SCALE_BYTES} B of scale"),
        KvFormat::Int4 => format!("x 0.5 B + {SCALE_BYTES} B of scale"),
    };
    let of_head = match format.is_scaled() {
        true => format!("({} {per_value})", group.head_dim),
        false => format!("{} {per_value}", group.head_dim),
    };
    let bytes = units::bytes(group.bytes_per_token() as u64);
    match group.kind {
        GroupKind::Full => format!("2 x {layers} layers x {} KV heads x {of_head} = {bytes}", group.kv_heads),
        GroupKind::Window { tokens } => format!(
            "2 x {layers} layers x {} KV heads x {of_head} = {bytes}, of the last {} tokens",
            group.kv_heads,
            units::count(tokens.into())
        ),
        GroupKind::Latent { .. } | GroupKind::State { .. } => {
            format!("{layers} layers x a latent of {of_head} = {bytes}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama-2-7B as its config.json says.
    pub fn llama_2_7b() -> PlannedModel {
        let text = br#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2}"#;
        PlannedModel::of("llama-2-7b".to_owned(), Config::parse("config.json", text).expect("a config"))
    }

    #[test]
    fn llama_2_7b_keeps_half_a_megabyte_a_token_and_14_gigabytes_of_28k() {
        let model = llama_2_7b();
        let layout = model.layout(KvFormat::F16, 16, 28_672).expect("a layout");
        let bytes = layout.bytes_per_token() as u64;
        assert_eq!(bytes, 512 << 10, "0.5 MB");
        assert_eq!(model.formula(KvFormat::F16), Some(bytes), "the formula says the same");
        assert_eq!(bytes * 28_672, 14 << 30, "14 GB at 28k");
        assert_eq!(terms(&layout), ["2 x 32 layers x 32 KV heads x 128 x 2 B = 512 KiB"]);
        assert_eq!(model.parameters, 6_738_415_616);
        assert_eq!(units::bytes(model.weight_bytes(WeightFormat::Bf16)), "12.6 GiB");
    }

    #[test]
    fn formats_take_what_their_scales_add() {
        let model = llama_2_7b();
        let bytes = |format| model.layout(format, 16, 4096).expect("a layout").bytes_per_token();
        assert_eq!(bytes(KvFormat::Int8), 2 * 32 * 32 * 130);
        assert_eq!(bytes(KvFormat::Int4), 2 * 32 * 32 * 66);
        assert_eq!(model.formula(KvFormat::Int8), None, "it knows no scales");
        let q4 = model.weight_bytes(WeightFormat::Q4) as f64 / model.parameters as f64 * 8.0;
        assert!((4.5..4.51).contains(&q4), "{q4}");
    }

    /// Gemma 4 31B, and as E2B with fewer layers: heads of two sizes, layers that keep nothing.
    #[test]
    fn layers_that_differ_are_terms_of_their_own() {
        let config = |changes: serde_json::Value| {
            let types = |layer: usize| if layer % 6 == 5 { "full_attention" } else { "sliding_attention" };
            let mut config = serde_json::json!({"model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21_504,
                "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
                "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": true, "sliding_window": 1024,
                "hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144,
                "rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
            for (field, value) in changes.as_object().expect("fields") {
                config[field] = value.clone();
            }
            let layers = config["num_hidden_layers"].as_u64().expect("a number") as usize;
            config["layer_types"] = (0..layers).map(types).collect();
            let text = config.to_string();
            PlannedModel::of(
                "it".to_owned(),
                Config::parse("config.json", text.as_bytes()).expect("a config"),
            )
        };
        let terms = |model: &PlannedModel| terms(&model.layout(KvFormat::F16, 16, 8192).expect("a layout"));
        let large = config(serde_json::json!({}));
        assert_eq!(units::parameters(large.parameters), "30.70 B");
        assert_eq!(large.formula(KvFormat::F16), None);
        assert_eq!(
            terms(&large),
            [
                "2 x 10 layers x 4 KV heads x 512 x 2 B = 80.0 KiB",
                "2 x 50 layers x 16 KV heads x 256 x 2 B = 800 KiB, of the last 1,024 tokens"
            ]
        );
        let small = config(
            serde_json::json!({"num_hidden_layers": 18, "num_kv_shared_layers": 10, "attention_k_eq_v": false,
            "hidden_size_per_layer_input": 256}),
        );
        assert_eq!(
            terms(&small),
            [
                "2 x 1 layers x 16 KV heads x 512 x 2 B = 32.0 KiB",
                "2 x 7 layers x 16 KV heads x 256 x 2 B = 112 KiB, of the last 1,024 tokens"
            ]
        );
    }

    #[test]
    fn the_built_in_model_is_told_from_its_own_files() {
        let model = PlannedModel::open("demo").expect("built in");
        let layout = model.layout(KvFormat::BF16, 16, 2048).expect("a layout");
        assert_eq!(model.formula(KvFormat::BF16), Some(layout.bytes_per_token() as u64));
        assert_eq!(layout.bytes_per_token(), 2 * 4 * 2 * 32 * 2);
    }

    #[test]
    fn a_config_json_is_read_and_a_large_or_broken_one_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("config.json");
        let path = file.to_str().expect("text");
        std::fs::write(&file, "{}").expect("written");
        assert!(PlannedModel::open(path).is_err());
        std::fs::write(&file, vec![b' '; CONFIG_BYTES_MAX as usize + 1]).expect("written");
        let error = PlannedModel::open(path).expect_err("too large").to_string();
        assert!(error.contains("1048577") && error.contains("1048576"), "{error}");
        // As large as numbers may be.
        let bomb = format!(
            r#"{{"model_type": "llama", "vocab_size": 10, "hidden_size": {0}, "intermediate_size": {0},
            "num_hidden_layers": {0}, "num_attention_heads": 1, "max_position_embeddings": 10}}"#,
            1u64 << 40
        );
        std::fs::write(&file, bomb).expect("written");
        assert!(PlannedModel::open(path).is_err());
    }
}
