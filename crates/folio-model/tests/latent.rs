//! Latent attention: everything that is read of a checkpoint matters, what is not understood is named, and the cache has the sizes that
//! are known of real models.

mod common;

use std::path::Path;

use common::tensors::File;
use common::{copy_of, load, logits, perturbed, with_config};
use folio_model::backend::{DType, GroupKind, KvFormat};
use folio_model::config::Config;
use folio_model::decoder::kv_layout;
use folio_model::kv_format::KvFormats;
use folio_model::program::{ExpertGroups, Routing};
use folio_model::testing::{LATENT, LOGIT_TOLERANCE, fixture, relative_difference};
use serde_json::{Value, json};

#[test]
fn every_tensor_moves_the_logits() {
    for name in LATENT {
        let copy = copy_of(name);
        let path = copy.path().join("model.safetensors");
        let expected = logits(copy.path());
        let mut file = File::read(&path);
        let names: Vec<String> = file.tensors.keys().cloned().collect();
        for tensor in &names {
            let stored = file.get(tensor);
            let before = stored.bytes.clone();
            stored.bytes = perturbed(&stored.dtype, &before);
            file.write();
            let difference = relative_difference(&logits(copy.path()), &expected);
            assert!(difference > 10.0 * LOGIT_TOLERANCE, "{name}: {tensor} moves them by {difference:e}");
            file.get(tensor).bytes = before;
        }
        assert!(names.len() > 40, "{name}: {} tensors", names.len());
    }
}

fn moves(name: &str, field: &str, value: &Value) {
    let expected = logits(&fixture(name));
    let copy = with_config(name, |config| config[field] = value.clone());
    let difference = relative_difference(&logits(copy.path()), &expected);
    assert!(difference > 10.0 * LOGIT_TOLERANCE, "{name}: {field} = {value} moves them by {difference:e}");
}

#[test]
fn every_field_that_is_read_moves_the_logits() {
    let yarn = |field: &str, value: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 64});
        scaling[field] = value;
        scaling
    };
    for (field, value) in [
        ("rms_norm_eps", json!(1e-2)),
        ("num_experts_per_tok", json!(2)),
        ("norm_topk_prob", json!(false)),
        ("routed_scaling_factor", json!(2.0)),
        ("topk_group", json!(3)),
        ("n_group", json!(2)),
        ("rope_interleave", json!(false)),
        ("rope_theta", json!(500.0)),
        ("rope_scaling", Value::Null),
        ("rope_scaling", yarn("factor", json!(8.0))),
        ("rope_scaling", yarn("mscale", json!(0.5))),
        ("rope_scaling", yarn("mscale_all_dim", json!(0.5))),
        ("rope_scaling", yarn("original_max_position_embeddings", json!(32))),
        ("rope_scaling", yarn("beta_slow", json!(8.0))),
    ] {
        moves("deepseek_v3", field, &value);
    }
    moves("deepseek_v2", "topk_method", &json!("greedy"));
    moves("deepseek_v2", "topk_group", &json!(3));
    moves("deepseek_v2", "routed_scaling_factor", &json!(1.0));
}

#[test]
fn what_does_not_fit_or_is_not_computed_is_refused_by_name() {
    for (name, field, value, named) in [
        ("deepseek_v3", "q_lora_rank", json!(27), "q_a_proj.weight"),
        ("deepseek_v3", "q_lora_rank", Value::Null, "q_proj.weight"),
        ("deepseek_v2_lite", "q_lora_rank", json!(12), "q_a_proj.weight"),
        ("deepseek_v3", "kv_lora_rank", json!(18), "kv_a_proj_with_mqa.weight"),
        ("deepseek_v3", "kv_lora_rank", json!(19), "expected an even number"),
        ("deepseek_v3", "kv_lora_rank", json!(1 << 20), "exceed 1048576"),
        ("deepseek_v3", "qk_nope_head_dim", json!(11), "q_b_proj.weight"),
        ("deepseek_v3", "qk_rope_head_dim", json!(6), "q_b_proj.weight"),
        ("deepseek_v3", "qk_rope_head_dim", json!(7), "expected an even number"),
        ("deepseek_v3", "v_head_dim", json!(13), "kv_b_proj.weight"),
        ("deepseek_v3", "num_key_value_heads", json!(2), "num_key_value_heads"),
        ("deepseek_v3", "partial_rotary_factor", json!(0.5), "qk_rope_head_dim = 8"),
        ("deepseek_v3", "index_topk", json!(2048), "an indexer picks (field `index_topk`)"),
        ("deepseek_v3", "attention_bias", json!(true), "q_a_proj.bias"),
        ("deepseek_v3_bias", "attention_bias", json!(false), "kv_a_proj_with_mqa.bias"),
        ("deepseek_v3", "n_routed_experts", json!(7), "n_group"),
        ("deepseek_v3", "n_routed_experts", json!(4), "groups of one"),
        ("deepseek_v3", "n_group", json!(128), "expected an integer from 1 to 64"),
        ("deepseek_v3", "topk_group", json!(5), "but n_group is 4"),
        ("deepseek_v3", "topk_group", json!(1), "groups of 2 experts, of which 3"),
        ("deepseek_v3", "num_local_experts", json!(9), "but n_routed_experts is 8"),
        ("deepseek_v3", "n_shared_experts", json!(2), "shared_experts"),
        ("deepseek_v3", "n_shared_experts", Value::Null, "shared_experts"),
        ("deepseek_v3", "n_shared_experts", json!(0), "shared_experts"),
        ("deepseek_v3", "first_k_dense_replace", json!(2), "layers.1.mlp.gate_proj.weight"),
        ("deepseek_v3", "first_k_dense_replace", json!(0), "layers.0.mlp.gate.weight"),
        ("deepseek_v3", "moe_layer_freq", json!(2), "moe_layer_freq"),
        ("deepseek_v3", "scoring_func", json!("softmax"), "scoring_func"),
        ("deepseek_v3", "topk_method", json!("greedy"), "topk_method"),
        ("deepseek_v2", "scoring_func", json!("sigmoid"), "scoring_func"),
        ("deepseek_v2", "norm_topk_prob", json!(true), "norm_topk_prob"),
        ("deepseek_v2", "topk_method", json!("noaux_tc"), "greedy, group_limited_greedy"),
        ("deepseek_v2", "n_group", Value::Null, "n_group"),
        ("glm4_moe_lite", "mlp_layer_types", json!(["sparse", "dense", "sparse"]), "mlp_layer_types"),
        ("glm4_moe_lite", "mlp_layer_types", json!(["dense", "sparse"]), "must name 3 layers"),
        ("glm4_moe_lite", "first_k_dense_replace", json!(2), "begins with 1 dense layers"),
    ] {
        let copy = with_config(name, |config| config[field] = value.clone());
        let error = load(copy.path(), None).expect_err(field).to_string();
        assert!(error.contains(named), "{name}: {field} = {value}: {error}");
    }
    let copy = with_config("deepseek_v3", |config| {
        config.as_object_mut().unwrap().remove("q_lora_rank");
    });
    let error = load(copy.path(), None).expect_err("q_lora_rank").to_string();
    assert!(error.contains("q_lora_rank") && error.contains("is missing"), "{error}");
    let copy = with_config("deepseek_v3", |config| {
        config["model_type"] = json!("deepseek_v32");
        config["architectures"] = json!(["DeepseekV32ForCausalLM"]);
    });
    let error = load(copy.path(), None).expect_err("V3.2").to_string();
    assert!(error.contains("`deepseek_v32`"), "{error}");
}

fn config(fields: Value) -> Config {
    let mut config = json!({"model_type": "deepseek_v3", "vocab_size": 1000, "max_position_embeddings": 163_840,
        "intermediate_size": 512, "moe_intermediate_size": 512, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128});
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    Config::parse("config.json", config.to_string().as_bytes()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn latents_have_the_sizes_that_are_known() {
    for (fields, of_token) in [
        (json!({}), 61 * 1152),
        (json!({"num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": null}), 27 * 1152),
        (
            json!({"num_hidden_layers": 47, "num_attention_heads": 20, "qk_nope_head_dim": 192, "v_head_dim": 256}),
            47 * 1152,
        ),
    ] {
        let config = config(fields);
        let layout = kv_layout(&config, &DType::BF16.into(), 16, 163_840).unwrap();
        let [group] = &layout.groups[..] else { panic!("{layout:?}") };
        assert_eq!(group.kind, GroupKind::Latent { rank: 512 });
        assert_eq!((group.layers(), group.kv_heads, group.head_dim), (config.layers, 1, 576));
        assert_eq!(layout.bytes_per_token(), of_token);
        for format in KvFormat::ALL.into_iter().filter(|format| format.is_scaled()) {
            let error = kv_layout(&config, &KvFormats::from(format), 16, 163_840).expect_err("refused");
            assert!(error.contains(format.name()), "{error}");
        }
    }
    // Also where the vector itself would fit.
    let small = config(json!({"kv_lora_rank": 64, "qk_rope_head_dim": 32}));
    let error = kv_layout(&small, &KvFormat::Int8.into(), 16, 4096).expect_err("refused");
    assert_eq!(error, "latents are kept in f32, f16 or bf16, not in int8");
}

/// What absent fields mean, as transformers has it, and the factor of V3.
#[test]
fn defaults_are_those_of_the_models() {
    let v3 =
        config(json!({"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}}));
    assert!((v3.attention_scale - 0.13523).abs() < 1e-5, "{}", v3.attention_scale);
    assert_eq!(v3.rope.table(4096).scale, 1.0);
    let experts = v3.experts.unwrap();
    assert_eq!((experts.count, experts.chosen, v3.dense_layers(), experts.shared), (256, 8, 3, Some(512)));
    assert_eq!((experts.routing, experts.scale), (Routing::SigmoidAmongChosen, 2.5));
    assert_eq!(experts.groups, Some(ExpertGroups { count: 8, kept: 4, by_two: true }));
    assert_eq!((v3.experts_of(2), v3.experts_of(3)), (None, Some(experts)));
    let glm = config(json!({"model_type": "glm4_moe_lite"}));
    let experts = glm.experts.unwrap();
    assert_eq!((experts.count, experts.chosen, glm.dense_layers(), experts.groups), (64, 4, 1, None));
    let v2 = config(json!({"model_type": "deepseek_v2"}));
    let experts = v2.experts.unwrap();
    assert_eq!((experts.count, v2.dense_layers(), experts.scale, experts.shared), (64, 0, 1.0, Some(1024)));
    assert_eq!((experts.routing, experts.groups), (Routing::AmongAll, None));
}

/// Blocks of FP8 are decoded before what makes keys is transposed: nothing is rounded again.
#[test]
fn what_is_transposed_keeps_its_values() {
    let folder: &Path = &folio_model::testing::quantized("fp8_latent");
    let parity = folio_model::testing::check_fixture(folder, folio_model::reference::ReferenceBackend::new);
    assert!(parity.worst < 1e-5, "{}", parity.worst);
}
