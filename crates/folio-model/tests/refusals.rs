//! What Folio does not serve is refused with a sentence that names what and where.

mod common;

use std::fs;
use std::path::Path;

use common::{copy_of, load, options};
use folio_model::backend::{Backend, DType, GroupKind, KvGroup, KvLayout};
use folio_model::check;
use folio_model::config::Config;
use folio_model::kv_format::{KvFormat, KvFormats};
use folio_model::program::Program;
use folio_model::quant::Encoding;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::fixture;
use folio_model::weights::weight_specs;
use folio_model::{Checkpoint, LoadOptions, Model};
use serde_json::{Value, json};

fn edit_config(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(&path, config.to_string()).unwrap();
}

fn refusal(name: &str, edit: impl FnOnce(&mut Value)) -> String {
    let copy = copy_of(name);
    edit_config(copy.path(), edit);
    load(copy.path(), None).expect_err("should be refused").to_string()
}

fn assert_names(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{sentence:?} does not name {part:?}");
    }
}

#[test]
fn a_cache_that_the_model_cannot_have_is_refused_before_its_weights_are_read() {
    // Heads of 12 dimensions, 2 layers, no windows.
    let checkpoint = Checkpoint::open(fixture("llama2")).unwrap();
    let refusal = |most, skip: &[&str]| {
        let skip = skip.iter().map(|text| text.parse().unwrap()).collect();
        let kv_formats = KvFormats { most, skipped: KvFormat::F16, skip };
        let options = LoadOptions { kv_formats, ..options(None) };
        let result = Model::load(&checkpoint, &mut ReferenceBackend::new(), options);
        result.map(|model| model.kv_layout.groups[0].formats.clone()).map_err(|error| error.to_string())
    };
    assert_names(&refusal(KvFormat::Int4, &[]).unwrap_err(), &["llama2", "head_dim 12", "int4"]);
    assert_names(&refusal(KvFormat::Int8, &["2"]).unwrap_err(), &["layer 2", "2 layers"]);
    assert_names(&refusal(KvFormat::Int8, &["sliding_window"]).unwrap_err(), &["sliding_window"]);
    assert_eq!(refusal(KvFormat::Int8, &["0"]), Ok(vec![KvFormat::F16, KvFormat::Int8]));
}

#[test]
fn blocks_of_a_group_are_a_multiple_of_those_of_the_first() {
    let refusal = |block_tokens| {
        let mut layout = KvLayout::full(1, 2, 16, KvFormat::F16, 16);
        let kind = GroupKind::Window { tokens: 20 };
        layout.groups.push(KvGroup { kind, block_tokens, ..layout.groups[0].clone() });
        check::layout(&layout, &[4, 4], &Program::default()).map_err(|error| error.to_string())
    };
    for block_tokens in [16, 32, 64] {
        assert_eq!(refusal(block_tokens), Ok(()));
    }
    for block_tokens in [8, 24] {
        assert_names(&refusal(block_tokens).unwrap_err(), &["group 1", "a multiple of those of the first"]);
    }
    assert_names(&refusal(0).unwrap_err(), &["group 1", "zero"]);
}

#[test]
fn unsupported_models_are_named() {
    const SUPPORTED: &str = "llama, llama4_text, llama4, mistral, mistral3, mixtral, qwen2, qwen3, qwen3_moe, qwen3_next, qwen3_5_text, qwen3_5, qwen3_5_moe_text, qwen3_5_moe, deepseek_v2, deepseek_v3, kimi_k2, glm4_moe_lite, glm4_moe, olmo2, olmo3, minimax_m2, smollm3, phi3, granite, granitemoe, granitemoeshared, granitemoehybrid, nemotron_h, cohere2, apertus, hunyuan_v1_dense, hunyuan_v1_moe, lfm2, lfm2_moe, seed_oss, exaone4, ernie4_5, ernie4_5_moe, gemma2, gemma3_text, gemma3, gemma4_text, gemma4, gpt_oss";
    let cases: Vec<(Value, &[&str])> = vec![
        (json!({"model_type": "gemma3n"}), &["config.json", "`gemma3n`", SUPPORTED]),
        (
            json!({"architectures": ["LlamaForSequenceClassification"]}),
            &["`LlamaForSequenceClassification`", SUPPORTED],
        ),
        (
            json!({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}}),
            &["config.json", "`bitsandbytes`", "AWQ", "GPTQ", "BF16, F16 and F32"],
        ),
        (json!({"hidden_act": "gelu"}), &["config.json", "`gelu`", "silu"]),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
            &["`dynamic`", "llama3", "longrope"],
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
            &["`full_attention`", "rope_parameters"],
        ),
        (
            json!({"layer_types": ["full_attention", "linear_attention"]}),
            &["\"linear_attention\"", "layer_types"],
        ),
    ];
    for (changes, expected) in cases {
        let sentence = refusal("llama3", |config| {
            for (field, value) in changes.as_object().unwrap() {
                config[field] = value.clone();
            }
        });
        assert_names(&sentence, expected);
    }
}

/// Another decoder inside, and a multiplier that cannot be.
#[test]
fn what_is_not_understood_of_later_families_is_named() {
    let inner = refusal("mistral3", |config| config["text_config"]["model_type"] = json!("ministral3"));
    assert_names(&inner, &["`ministral3`", "text_config.model_type", "mistral"]);
    let zero = refusal("granite", |config| config["logits_scaling"] = json!(0.0));
    assert_names(&zero, &["`logits_scaling`", "0"]);
}

#[test]
fn multipliers_are_one_when_absent() {
    let config =
        changed("granite", json!({"embedding_multiplier": 1.0, "residual_multiplier": 1.0})).unwrap();
    assert_eq!((config.embedding_scale, config.residual_scale), (None, 1.0));
    let plain = changed("llama3", json!({"embedding_multiplier": 3.0, "logits_scaling": 2.0})).unwrap();
    assert_eq!((plain.embedding_scale, plain.logit_divisor), (None, 1.0));
}

#[test]
fn what_is_not_understood_of_gemma_is_named() {
    let cases: Vec<(&str, Value, &[&str])> = vec![
        (
            "gemma2",
            json!({"hidden_activation": "gelu"}),
            &["`gelu`", "hidden_activation", "gelu_pytorch_tanh"],
        ),
        (
            "gemma3_text",
            json!({"use_bidirectional_attention": true}),
            &["`use_bidirectional_attention`", "causal"],
        ),
        (
            "gemma3_text",
            json!({"rope_parameters": {"rope_theta": 1e6}}),
            &["`rope_parameters`", "full_attention"],
        ),
        ("gemma3_text", json!({"query_pre_attn_scalar": 0}), &["query_pre_attn_scalar", "above 0"]),
        ("gemma3", json!({"text_config": null}), &["`text_config` is missing"]),
        ("gemma3", json!({"text_config": {"hidden_size": 40}}), &["num_hidden_layers"]),
        (
            "gemma3",
            json!({"architectures": ["Gemma3nForConditionalGeneration"]}),
            &["`Gemma3nForConditionalGeneration`"],
        ),
    ];
    for (name, changes, expected) in cases {
        let sentence = refusal(name, |config| {
            for (field, value) in changes.as_object().unwrap() {
                config[field] = value.clone();
            }
        });
        assert_names(&sentence, expected);
    }
}

#[test]
fn what_is_wrong_with_a_mixture_of_experts_is_named() {
    const GATE_UP: &str = "model.layers.0.mlp.experts.gate_up_proj";
    let cases: Vec<(Value, &[&str])> = vec![
        (json!({"num_experts_per_tok": 7}), &["`num_experts_per_tok` is 7", "num_local_experts is 6"]),
        (json!({"num_experts_per_tok": 0}), &["`num_experts_per_tok` is 0", "from 1"]),
        (json!({"num_local_experts": 4096, "intermediate_size": 1 << 20}), &["`num_local_experts`", "rows"]),
        (json!({"num_local_experts": 5}), &["model.safetensors", GATE_UP, "[6, 32, 48]", "[5, 32, 48]"]),
        (json!({"intermediate_size": 25}), &[GATE_UP, "[6, 32, 48]", "[6, 32, 50]"]),
        (json!({"rope_scaling": null}), &["`rope_scaling` is missing"]),
        (json!({"swiglu_limit": 0}), &["`swiglu_limit` is 0"]),
        (json!({"hidden_act": "gelu"}), &["`gelu`", "silu"]),
        (json!({"quantization_config": {"quant_method": "mxfp8"}}), &["`mxfp8`", "MXFP4"]),
    ];
    for (changes, expected) in cases {
        let sentence = refusal("gpt_oss", |config| {
            for (field, value) in changes.as_object().unwrap() {
                config[field] = value.clone();
            }
        });
        assert_names(&sentence, expected);
    }
    let cases: Vec<(Value, &[&str])> = vec![
        (json!({"mlp_only_layers": [0]}), &["mlp_only_layers", "every layer"]),
        (json!({"decoder_sparse_step": 2}), &["decoder_sparse_step", "every layer"]),
        (json!({"num_experts": 9}), &["`num_local_experts` is 8", "num_experts is 9"]),
        (json!({"num_local_experts": 9}), &["`model.layers.0.mlp.gate.weight`", "[8, 32]", "[9, 32]"]),
        (
            json!({"num_local_experts": null, "num_experts": 2}),
            &["`num_experts_per_tok` is 3", "num_experts is 2"],
        ),
        (json!({"moe_intermediate_size": 21}), &["mlp.experts.0.gate_proj.weight", "[20, 32]", "[21, 32]"]),
        (json!({"quantization_config": {"quant_method": "mxfp4"}}), &["`mxfp4`", "gpt-oss"]),
    ];
    for (changes, expected) in cases {
        let sentence = refusal("qwen3_moe", |config| {
            for (field, value) in changes.as_object().unwrap() {
                config[field] = value.clone();
            }
        });
        assert_names(&sentence, expected);
    }
    for missing in [GATE_UP, "model.layers.2.mlp.experts.down_proj_bias", "model.layers.1.mlp.router.bias"] {
        let copy = copy_of("gpt_oss");
        edit_header(copy.path(), |header| {
            let entry = header.as_object_mut().unwrap().remove(missing).unwrap();
            header["elsewhere"] = entry;
        });
        let sentence = load(copy.path(), None).expect_err(missing).to_string();
        assert_names(&sentence, &[&format!("`{missing}` is missing")]);
    }
}

/// The configuration of a fixture, with changes.
fn changed(name: &str, changes: Value) -> Result<Config, String> {
    let bytes = fs::read(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&bytes).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    Config::parse("config.json", config.to_string().as_bytes()).map_err(|error| error.to_string())
}

#[test]
fn more_experts_than_any_model_has_are_refused_before_they_are_listed() {
    let listed = |layers: usize, experts: usize| {
        let changes = json!({"num_hidden_layers": layers, "num_local_experts": experts});
        let config = changed("qwen3_moe", changes)?;
        Ok(weight_specs(&config).iter().map(|spec| spec.parts.len()).sum())
    };
    // Llama 4 Maverick, DeepSeek-V3, Qwen3-235B, Kimi K2, Qwen3-Next.
    for (layers, experts) in [(48, 128), (61, 256), (94, 128), (61, 384), (48, 512)] {
        let tensors: Result<usize, String> = listed(layers, experts);
        assert!(tensors.is_ok_and(|tensors| tensors > 3 * layers * experts), "{layers} x {experts}");
    }
    for (layers, experts) in [(33, 4096), (4096, 33), (4096, 4096)] {
        let sentence = listed(layers, experts).expect_err("refused");
        let each = format!("`num_local_experts` is {experts} in each of {layers} layers");
        assert_names(&sentence, &["config.json", &each, "131072"]);
    }
}

#[test]
fn a_window_of_a_mixture_is_on_all_layers() {
    let windows = |changes: Value| changed("qwen3_moe", changes).unwrap().windows;
    assert_eq!(windows(json!({"sliding_window": 9})), [None; 2]);
    let on = json!({"sliding_window": 9, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(on), [Some(9); 2]);
}

#[test]
fn gpt_oss_takes_its_defaults() {
    let config = json!({"model_type": "gpt_oss", "hidden_size": 64, "num_attention_heads": 16, "num_hidden_layers": 3,
        "intermediate_size": 64, "vocab_size": 100, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}});
    let config = Config::parse("config.json", config.to_string().as_bytes()).unwrap();
    let experts = config.experts.unwrap();
    assert_eq!((experts.count, experts.chosen, config.head_dim, config.kv_heads), (128, 4, 64, 8));
    assert_eq!(config.windows, [Some(128), None, Some(128)]);
    assert!(config.qkv_bias && config.o_bias && config.mlp_bias && !config.tied);
    assert_eq!((config.rope.theta, config.max_position), (150_000.0, 131_072));
}

#[test]
fn gemma_takes_its_defaults_and_leaves_out_what_is_null() {
    let config = |name: &str, changes: Value| changed(name, changes).unwrap();
    let gemma2 = config("gemma2", json!({}));
    assert_eq!((gemma2.attention_softcap, gemma2.logit_softcap), (Some(4.0), Some(2.5)));
    assert_eq!(gemma2.windows, [Some(12), None, Some(12), None]);
    let gemma2 = config("gemma2", json!({"attn_logit_softcapping": null, "sliding_window": null}));
    assert_eq!((gemma2.attention_softcap, gemma2.logit_softcap), (None, Some(2.5)));
    assert_eq!(gemma2.windows, [None; 4]);
    // The heads are not in the text part of the first checkpoints.
    let gemma3 = config("gemma3", json!({}));
    assert_eq!((gemma3.heads, gemma3.kv_heads, gemma3.head_dim), (8, 4, 8));
    assert_eq!(gemma3.windows, [Some(11), None, Some(11)]);
    assert_eq!(gemma3.local_rope.map(|rope| rope.theta), Some(10_000.0));
}

#[test]
fn wrong_fields_are_named_with_their_value() {
    let cases: Vec<(&str, Value, &[&str])> = vec![
        ("hidden_size", Value::Null, &["config.json", "`hidden_size` is missing"]),
        ("hidden_size", json!("64"), &["`hidden_size` is \"64\", expected an integer"]),
        ("hidden_size", json!(-3), &["`hidden_size` is -3"]),
        ("num_hidden_layers", json!(1u64 << 40), &["`num_hidden_layers`", "from 1 to"]),
        ("num_attention_heads", json!(5), &["`hidden_size` is 64", "num_attention_heads = 5"]),
        ("num_key_value_heads", json!(3), &["`num_key_value_heads` is 3", "num_attention_heads = 4"]),
        ("head_dim", json!(15), &["`head_dim` is 15", "even"]),
        ("tie_word_embeddings", json!(1), &["`tie_word_embeddings` is 1, expected true or false"]),
        ("rope_scaling", json!([]), &["`rope_scaling` is a list, expected an object"]),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 0}), &["`rope_scaling.factor` is 0"]),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8}),
            &["`rope_scaling.low_freq_factor` is missing"],
        ),
        ("rms_norm_eps", json!(-1e-5), &["`rms_norm_eps` is"]),
        ("eos_token_id", json!(["2"]), &["`eos_token_id`", "a token id or a list"]),
    ];
    for (field, value, expected) in cases {
        // eos_token_id of config.json is read when generation_config.json does not say.
        let copy = copy_of("llama3");
        fs::remove_file(copy.path().join("generation_config.json")).unwrap();
        edit_config(copy.path(), |config| config[field] = value);
        assert_names(&load(copy.path(), None).expect_err(field).to_string(), expected);
    }
}

#[test]
fn weights_that_do_not_fit_the_configuration_are_named() {
    let sentence = refusal("llama3", |config| config["intermediate_size"] = json!(101));
    assert_names(
        &sentence,
        &["model.safetensors", "model.layers.0.mlp.gate_proj.weight", "[100, 64]", "[101, 64]"],
    );
    let sentence = refusal("llama3", |config| config["num_hidden_layers"] = json!(3));
    assert_names(&sentence, &["`model.layers.2.input_layernorm.weight` is missing"]);
    let sentence = refusal("llama3", |config| config["tie_word_embeddings"] = json!(false));
    assert_names(&sentence, &["`lm_head.weight` is missing"]);
    let sentence = refusal("llama3", |config| config["attention_bias"] = json!(true));
    assert_names(&sentence, &["`model.layers.0.self_attn.q_proj.bias` is missing"]);
}

#[test]
fn weights_that_the_decoder_would_ignore_are_refused() {
    let sentence = refusal("llama_bias", |config| config["mlp_bias"] = json!(false));
    assert_names(&sentence, &["model.safetensors", "`model.layers.0.mlp.down_proj.bias`", "llama decoder"]);
    let sentence = refusal("qwen3", |config| {
        config["model_type"] = json!("mistral");
        config["architectures"] = json!(["MistralForCausalLM"]);
        config["sliding_window"] = json!(null);
    });
    assert_names(&sentence, &["`model.layers.0.self_attn.k_norm.weight`", "mistral decoder"]);

    // Nothing reads what layers that share K and V were trained with.
    for (tensor, read) in [("layers.3.self_attn.k_proj", false), ("layers.2.self_attn.v_norm", true)] {
        let copy = copy_of("gemma4");
        let name = format!("model.language_model.{tensor}.weight");
        add_empty_tensor(copy.path(), &name, "BF16");
        let loaded = load(copy.path(), None).map_err(|error| error.to_string());
        assert_eq!(loaded.err().map(|error| error.contains(&name)), read.then_some(true), "{tensor}");
    }

    let copy = copy_of("llama3");
    for harmless in ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.mlp.up_proj.weight"] {
        add_empty_tensor(copy.path(), harmless, "F64");
    }
    load(copy.path(), None).unwrap();
}

fn add_empty_tensor(folder: &Path, name: &str, dtype: &str) {
    edit_header(folder, |header| {
        let ends = header.as_object().unwrap().values().filter_map(|entry| entry["data_offsets"][1].as_u64());
        let end = ends.max().unwrap();
        header[name] = json!({"dtype": dtype, "shape": [0], "data_offsets": [end, end]});
    });
}

/// Rewrites the JSON header of model.safetensors, keeping the data.
fn edit_header(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(*bytes.first_chunk::<8>().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    edit(&mut header);
    let header = header.to_string().into_bytes();
    let mut edited = (header.len() as u64).to_le_bytes().to_vec();
    edited.extend(header);
    edited.extend(&bytes[8 + length..]);
    fs::write(&path, edited).unwrap();
}

#[test]
fn unsupported_and_mixed_dtypes_are_named() {
    let gate = "model.layers.1.mlp.gate_proj.weight";
    for (dtype, expected) in [
        ("F4", &["model.safetensors", gate, "F4", "BF16, F16, F32"]),
        ("F16", &["model.safetensors", "model.layers.1.mlp.up_proj.weight", "BF16", gate]),
    ] {
        let copy = copy_of("llama3");
        // Of a dtype that the header's reader knows, the size would be wrong too.
        edit_header(copy.path(), |header| header[gate]["dtype"] = json!(dtype));
        assert_names(&load(copy.path(), None).unwrap_err().to_string(), expected);
    }
}

#[test]
fn damaged_files_are_named() {
    let truncated = copy_of("llama3");
    let path = truncated.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for (length, expected) in [
        (0, "too short"),
        (7, "too short"),
        (100, "header claims"),
        (bytes.len() - 1, "cut short"),
        (bytes.len() / 2, "cut short"),
    ] {
        fs::write(&path, &bytes[..length]).unwrap();
        let sentence = load(truncated.path(), None).unwrap_err().to_string();
        assert_names(&sentence, &["model.safetensors is damaged", expected]);
    }
    let mut longer = bytes.clone();
    longer.push(0);
    fs::write(&path, longer).unwrap();
    assert_names(&load(truncated.path(), None).unwrap_err().to_string(), &["1 bytes follow the last tensor"]);

    let broken = copy_of("llama3");
    fs::write(broken.path().join("config.json"), "{\"model_type\": ").unwrap();
    assert_names(
        &load(broken.path(), None).unwrap_err().to_string(),
        &["config.json is not valid JSON", "line 1"],
    );
    fs::write(broken.path().join("config.json"), "[]").unwrap();
    assert_names(
        &load(broken.path(), None).unwrap_err().to_string(),
        &["config.json is not valid JSON", "a list"],
    );
}

#[test]
fn folders_that_are_not_models_say_what_is_missing() {
    let empty = tempfile::tempdir().unwrap();
    assert_names(
        &load(empty.path(), None).unwrap_err().to_string(),
        &["is not a model folder", "no config.json"],
    );
    assert_names(
        &load(&empty.path().join("nowhere"), None).unwrap_err().to_string(),
        &["nowhere", "no config.json"],
    );

    let copy = copy_of("llama3");
    fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    assert_names(&load(copy.path(), None).unwrap_err().to_string(), &["neither model.safetensors nor"]);
    fs::write(copy.path().join("pytorch_model.bin"), "").unwrap();
    assert_names(
        &load(copy.path(), None).unwrap_err().to_string(),
        &["pytorch_model.bin", "only safetensors"],
    );
}

#[test]
fn shards_are_checked_against_the_index() {
    let copy = copy_of("qwen2");
    let index = copy.path().join("model.safetensors.index.json");
    let original = fs::read_to_string(&index).unwrap();
    fs::remove_file(copy.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert_names(
        &load(copy.path(), None).unwrap_err().to_string(),
        &["names model-00002-of-00003.safetensors, which is not there"],
    );

    let copy = copy_of("qwen2");
    let index_of = |text: String| {
        fs::write(copy.path().join("model.safetensors.index.json"), text).unwrap();
        load(copy.path(), None).unwrap_err().to_string()
    };
    let swapped =
        original.replace("\"model.norm.weight\": \"model-00002", "\"model.norm.weight\": \"model-00001");
    assert_ne!(swapped, original);
    assert_names(&index_of(swapped), &["model-00001-of-00003.safetensors is damaged", "`model.norm.weight`"]);
    let outside = original.replace("model-00003-of-00003", "../model");
    assert_names(&index_of(outside), &["model.safetensors.index.json", "`weight_map`", "no plain"]);
    assert_names(&index_of("{}".to_owned()), &["`weight_map` is missing"]);
}

#[test]
fn the_context_is_limited_by_the_model() {
    let llama = load(&fixture("llama3"), None).unwrap();
    assert_eq!(llama.max_model_len, 256);
    assert_names(
        &load(&fixture("llama3"), Some(257)).unwrap_err().to_string(),
        &["257", "256", "max_position_embeddings", "config.json"],
    );
    assert_names(&load(&fixture("llama3"), Some(0)).unwrap_err().to_string(), &["max_model_len is 0"]);
}

#[test]
fn a_cache_group_for_every_window_that_is_shorter_than_a_sequence() {
    let kinds = |name: &str, length: usize| -> Vec<(GroupKind, usize)> {
        let layout = load(&fixture(name), Some(length)).unwrap().kv_layout;
        layout.groups.iter().map(|group| (group.kind, group.layers())).collect()
    };
    let window = |tokens| GroupKind::Window { tokens };
    assert_eq!(kinds("mistral", 256), [(GroupKind::Full, 0), (window(20), 2)]);
    assert_eq!(kinds("mistral", 21), [(GroupKind::Full, 0), (window(20), 2)]);
    assert_eq!(kinds("mistral", 20), [(GroupKind::Full, 2)]);
    assert_eq!(kinds("qwen3_window", 256), [(GroupKind::Full, 1), (window(9), 2)]);
    assert_eq!(kinds("llama3", 256), [(GroupKind::Full, 2)]);
}

#[test]
fn windows_are_those_that_the_configuration_describes() {
    let windows = |name: &str, changes: Value| {
        let copy = copy_of(name);
        edit_config(copy.path(), |config| {
            for (field, value) in changes.as_object().unwrap() {
                config[field] = value.clone();
            }
            config.as_object_mut().unwrap().retain(|_, value| *value != json!("absent"));
        });
        Config::parse("config.json", &fs::read(copy.path().join("config.json")).unwrap()).unwrap().windows
    };
    assert_eq!(windows("mistral", json!({"sliding_window": null})), [None; 2]);
    assert_eq!(windows("mistral", json!({"sliding_window": "absent"})), [Some(4096); 2]);
    assert_eq!(windows("qwen2", json!({"sliding_window": 64})), [None; 2], "use_sliding_window is false");
    let switched = json!({"sliding_window": 64, "use_sliding_window": true, "max_window_layers": 1, "layer_types": "absent"});
    assert_eq!(windows("qwen2", switched.clone()), [None, Some(64)]);
    for (first, expected) in [(2, [None; 2]), (0, [Some(64); 2])] {
        let mut other = switched.clone();
        other["max_window_layers"] = json!(first);
        assert_eq!(windows("qwen2", other), expected);
    }
    let typed = json!({"sliding_window": 64, "use_sliding_window": true, "layer_types": ["sliding_attention", "full_attention"]});
    assert_eq!(windows("qwen2", typed), [Some(64), None]);
    let smol = json!({"sliding_window": 64, "use_sliding_window": true, "layer_types": "absent"});
    assert_eq!(windows("smollm3", smol), [None, None, None, Some(64), None], "where nothing is rotated");
    assert_eq!(windows("phi3", json!({"sliding_window": 33})), [Some(33); 2]);
    assert_eq!(windows("llama3", json!({"sliding_window": 64})), [None; 2], "Llama has no window");
}

#[test]
fn absent_fields_take_the_familys_defaults() {
    let parse = |config: Value| Config::parse("config.json", config.to_string().as_bytes()).unwrap();
    let minimal = |family: &str| {
        parse(
            json!({"model_type": family, "hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 8,
            "intermediate_size": 64, "vocab_size": 100}),
        )
    };
    let llama = minimal("llama");
    assert_eq!((llama.head_dim, llama.kv_heads, llama.tied, llama.rope.theta), (32, 32, false, 10_000.0));
    assert_eq!((minimal("mistral").kv_heads, minimal("qwen3").head_dim), (8, 128));
    let smollm3 = minimal("smollm3");
    assert_eq!((smollm3.tied, smollm3.kv_heads, smollm3.rope.theta), (true, 4, 2_000_000.0));
    assert_eq!(smollm3.rotated, [true, true, true, false, true, true, true, false]);
    assert_eq!(minimal("phi3").eps, 1e-5);
    let by_architecture =
        parse(json!({"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": null, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 100}));
    assert!(by_architecture.qkv_bias && !by_architecture.o_bias && by_architecture.kv_heads == 4);
}

#[test]
fn eos_ids_come_from_generation_config_first() {
    assert_eq!(load(&fixture("llama3"), None).unwrap().eos_token_ids, [2, 5, 7]);
    let copy = copy_of("llama3");
    fs::write(
        copy.path().join("generation_config.json"),
        r#"{"eos_token_id": [9, 4, 9], "temperature": 0.6, "top_k": 20}"#,
    )
    .unwrap();
    let model = load(copy.path(), None).unwrap();
    assert_eq!(model.eos_token_ids, [4, 9]);
    assert_eq!(
        (model.generation.temperature, model.generation.top_k, model.generation.top_p),
        (Some(0.6), Some(20), None)
    );
    fs::write(copy.path().join("generation_config.json"), "{}").unwrap();
    assert_eq!(load(copy.path(), None).unwrap().eos_token_ids, [2, 5, 7]);
}

#[test]
fn the_digest_sees_weights_and_configuration_but_not_how_they_are_stored() {
    let digest = |folder: &Path| load(folder, None).unwrap().digest;
    let original = digest(&fixture("llama3"));
    assert_eq!(original, Checkpoint::open(fixture("llama3")).unwrap().digest(256).unwrap());

    // The pages that loading gave back read the same again, and the server's length matters only to LongRoPE.
    let checkpoint = Checkpoint::open(fixture("llama3")).unwrap();
    let loaded = Model::load(&checkpoint, &mut ReferenceBackend::new(), options(Some(64))).unwrap();
    assert_eq!((loaded.digest, checkpoint.digest(64).unwrap()), (original, original));
    let phi = |length| load(&fixture("phi4_mini"), Some(length)).unwrap().digest;
    assert_eq!((phi(90), phi(97)), (phi(96), phi(200)));
    assert_ne!(phi(96), phi(97));

    let copy = copy_of("llama3");
    assert_eq!(digest(copy.path()), original);
    fs::write(copy.path().join("generation_config.json"), "{}").unwrap();
    assert_eq!(digest(copy.path()), original, "sampling defaults do not change KV");
    edit_config(copy.path(), |config| config["rope_theta"] = json!(20_000.0));
    assert_ne!(digest(copy.path()), original);

    let copy = copy_of("llama3");
    let path = copy.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_ne!(digest(copy.path()), original, "the last byte of a tensor is sampled");
}

#[test]
fn progress_covers_every_byte_once() {
    let checkpoint = Checkpoint::open(fixture("phi3")).unwrap();
    let mut steps: Vec<(String, u64, u64)> = Vec::new();
    let mut record =
        |p: folio_model::Progress<'_>| steps.push((p.weight.to_owned(), p.done_bytes, p.total_bytes));
    let mut backend = ReferenceBackend::new();
    let model =
        Model::load(&checkpoint, &mut backend, LoadOptions { progress: Some(&mut record), ..options(None) })
            .unwrap();
    assert_eq!(steps.first().map(|step| step.1), Some(0));
    assert!(steps.windows(2).all(|pair| pair[0].1 < pair[1].1));
    let (_, done, total) = steps.last().unwrap();
    assert_eq!(done, total);
    assert_eq!(*total, model.parameters * 2);
    assert_eq!(backend.weight_bytes(), model.parameters * 4);
    assert_eq!(model.weight_encoding, Encoding::Plain(DType::F16));
}

/// LongRoPE: the same model has other frequencies for long servers, and the server's limit alone decides.
#[test]
fn longrope_factors_are_fixed_by_the_servers_length() {
    let config = Checkpoint::open(fixture("phi4_mini")).unwrap().config().clone();
    let (short, long) = (config.rope.table(96), config.rope.table(97));
    assert_eq!(short.inv_freq.len(), 6, "0.75 of 16 dimensions are rotated");
    assert_eq!(short.inv_freq[0], long.inv_freq[0]);
    assert!(short.inv_freq[1..].iter().zip(&long.inv_freq[1..]).all(|(short, long)| short > long));
    assert_eq!(config.rope.table(200), long);
    let expected = (1.0 + (256.0f64 / 96.0).ln() / 96.0f64.ln()).sqrt() as f32;
    assert_eq!((short.scale, long.scale), (expected, expected));
}
