//! Families whose parts others have: everything that is read of a checkpoint matters, and what is not understood is named. (Hybrids and
//! latents have files of their own.)

mod common;

use common::tensors::File;
use common::{copy_of, load, logits, perturbed, with_config};
use folio_model::config::{Config, Mixer};
use folio_model::testing::{LOGIT_TOLERANCE, fixture, relative_difference};
use serde_json::{Value, json};

const NAMES: &[&str] = &[
    "glm4_moe",
    "olmo2",
    "olmo3",
    "granitemoe",
    "granitemoeshared",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "cohere2",
    "apertus",
    "granite4",
    "llama4_text",
    "llama4",
];

#[test]
fn every_tensor_moves_the_logits() {
    for name in NAMES {
        let copy = copy_of(name);
        let expected = logits(copy.path());
        let mut file = File::read(&copy.path().join("model.safetensors"));
        let names: Vec<String> = file.tensors.keys().cloned().collect();
        // Where xIELU's exponential stops growing is nearly 0 whatever it is; an expert may be chosen for no token.
        let matters = |tensor: &&String| {
            !["act_fn.eps", ".experts.", "vision_model.", "multi_modal_projector."]
                .iter()
                .any(|part| tensor.contains(part))
        };
        for tensor in names.iter().filter(matters) {
            let stored = file.get(tensor);
            let before = stored.bytes.clone();
            stored.bytes = perturbed(&stored.dtype, &before);
            file.write();
            let difference = relative_difference(&logits(copy.path()), &expected);
            assert!(difference > 10.0 * LOGIT_TOLERANCE, "{name}: {tensor} moves them by {difference:e}");
            file.get(tensor).bytes = before;
        }
        assert!(names.len() > 15, "{name}: {} tensors", names.len());
    }
}

#[test]
fn every_field_that_is_read_moves_the_logits() {
    let olmo3 = |theta: f64, factor: f64| {
        json!({"sliding_attention": {"rope_type": "default", "rope_theta": theta},
            "full_attention": {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0,
                "attention_factor": 1.2079, "original_max_position_embeddings": 32}})
    };
    for (name, field, value) in [
        ("glm4_moe", "partial_rotary_factor", json!(0.25)),
        ("glm4_moe", "rope_theta", json!(500.0)),
        ("glm4_moe", "rms_norm_eps", json!(1e-2)),
        ("glm4_moe", "routed_scaling_factor", json!(1.0)),
        ("glm4_moe", "norm_topk_prob", json!(false)),
        ("glm4_moe", "num_experts_per_tok", json!(2)),
        ("olmo2", "rope_theta", json!(500.0)),
        ("olmo2", "rms_norm_eps", json!(1e-2)),
        ("olmo3", "sliding_window", json!(4)),
        ("olmo3", "rope_parameters", olmo3(500.0, 8.0)),
        ("olmo3", "rope_parameters", olmo3(500_000.0, 2.0)),
        ("granitemoe", "embedding_multiplier", json!(1.0)),
        ("granitemoe", "residual_multiplier", json!(1.0)),
        ("granitemoe", "attention_multiplier", json!(1.0)),
        ("granitemoe", "logits_scaling", json!(1.0)),
        ("granitemoe", "num_experts_per_tok", json!(1)),
        ("minimax_m2", "rotary_dim", json!(12)),
        ("minimax_m2", "rope_theta", json!(500.0)),
        ("minimax_m2", "num_experts_per_tok", json!(2)),
        ("ernie4_5_moe", "moe_k", json!(2)),
        ("hunyuan_v1_dense", "rope_scaling", json!({"rope_type": "dynamic", "alpha": 2.0})),
        ("hunyuan_v1_dense", "rope_theta", json!(500.0)),
        ("hunyuan_v1_moe", "moe_topk", json!(1)),
        ("cohere2", "logit_scale", json!(0.5)),
        ("cohere2", "layer_norm_eps", json!(1e-2)),
        ("cohere2", "sliding_window", json!(4)),
        ("lfm2", "norm_eps", json!(1e-2)),
        ("granite4_h", "rms_norm_eps", json!(1e-1)),
        ("granite4_h", "position_embedding_type", json!("rope")),
        ("granite4", "position_embedding_type", json!("nope")),
        ("llama4_text", "attention_chunk_size", json!(4)),
        ("llama4_text", "attention_chunk_size", Value::Null),
        ("llama4_text", "attn_temperature_tuning", json!(false)),
        ("llama4_text", "attn_scale", json!(0.5)),
        ("llama4_text", "floor_scale", json!(2)),
        ("llama4_text", "use_qk_norm", json!(false)),
        ("llama4_text", "no_rope_layers", json!([1, 1, 1, 1])),
        ("nemotron_h", "layer_norm_epsilon", json!(1e-1)),
        ("nemotron_h", "num_experts_per_tok", json!(2)),
        ("nemotron_h", "routed_scaling_factor", json!(1.0)),
        ("nemotron_h", "norm_topk_prob", json!(false)),
        ("lfm2_moe", "routed_scaling_factor", json!(1.0)),
        ("lfm2_moe", "norm_topk_prob", json!(false)),
    ] {
        let expected = logits(&fixture(name));
        let copy = with_config(name, |config| config[field] = value.clone());
        let difference = relative_difference(&logits(copy.path()), &expected);
        assert!(
            difference > 10.0 * LOGIT_TOLERANCE,
            "{name}: {field} = {value} moves them by {difference:e}"
        );
    }
}

#[test]
fn what_does_not_fit_or_is_not_computed_is_refused_by_name() {
    let (conv, full) = ("conv", "full_attention");
    for (name, field, value, named) in [
        ("glm4_moe", "use_qk_norm", json!(false), "self_attn"),
        ("glm4_moe_air", "use_qk_norm", json!(true), "self_attn.q_norm.weight"),
        ("glm4_moe", "attention_bias", json!(false), "self_attn"),
        ("glm4_moe", "first_k_dense_replace", json!(2), "layers.1.mlp.gate_proj.weight"),
        ("glm4_moe", "n_shared_experts", json!(2), "shared_experts"),
        ("olmo2", "num_key_value_heads", json!(1), "k_proj.weight"),
        ("granitemoe", "num_local_experts", json!(5), "block_sparse_moe"),
        ("granitemoeshared", "shared_intermediate_size", json!(20), "shared_mlp"),
        ("granitemoeshared", "shared_intermediate_size", json!(0), "shared_mlp"),
        ("minimax_m2", "rotary_dim", json!(5), "5 of 12 dimensions"),
        ("minimax_m2", "rotary_dim", json!(14), "rotary_dim"),
        ("ernie4_5_moe", "moe_layer_interval", json!(2), "moe_layer_interval"),
        ("ernie4_5_moe", "moe_layer_end_index", json!(1), "moe_layer_end_index"),
        ("ernie4_5_moe", "moe_layer_start_index", json!(0), "layers.0.mlp.gate.weight"),
        ("ernie4_5_moe", "moe_num_experts", json!(7), "mlp.gate.weight"),
        ("ernie4_5_moe", "use_bias", json!(true), "bias"),
        ("hunyuan_v1_moe", "moe_topk", json!([2, 1]), "layers that differ in field `moe_topk`"),
        ("hunyuan_v1_moe", "moe_topk", json!([]), "must hold integers from 1 to 4096"),
        ("hunyuan_v1_moe", "num_shared_expert", json!([2, 2]), "shared_mlp"),
        ("hunyuan_v1_dense", "rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0}), "`dynamic`"),
        ("hunyuan_v1_dense", "rope_scaling", json!({"rope_type": "dynamic", "alpha": 0.0}), "alpha"),
        ("cohere2", "logit_scale", json!(0.0), "logit_scale"),
        ("cohere2", "hidden_act", json!("gelu"), "`gelu`"),
        ("apertus", "hidden_act", json!("silu"), "xielu"),
        ("lfm2", "conv_bias", json!(true), "conv_bias"),
        ("lfm2", "conv_L_cache", json!(4), "conv.conv.weight"),
        ("lfm2", "conv_L_cache", json!(1), "expected 2 to 16"),
        ("lfm2", "block_ffn_dim_multiplier", json!(0.5), "feed_forward"),
        ("lfm2", "block_ffn_dim_multiplier", json!(1e9), "block_ffn_dim_multiplier"),
        ("lfm2", "block_auto_adjust_ff_dim", json!(false), "feed_forward"),
        ("lfm2", "layer_types", json!([full, conv, full, conv, full]), "layers.0.self_attn"),
        ("lfm2", "layer_types", json!([conv, "mamba", full, conv, full]), "full_attention, conv"),
        ("lfm2", "tie_embedding", json!(false), "lm_head.weight"),
        ("granite4_h", "mamba_n_heads", json!(2), "in_proj.weight"),
        ("granite4_h", "mamba_n_groups", json!(3), "not a multiple of mamba_n_groups = 3"),
        ("granite4_h", "mamba_n_groups", json!(1), "in_proj.weight"),
        ("granite4_h", "mamba_d_state", json!(8), "in_proj.weight"),
        ("granite4_h", "mamba_d_state", json!(1 << 20), "mamba_d_state"),
        ("granite4_h", "mamba_d_head", json!(1 << 19), "mamba_d_head"),
        ("granite4_h", "mamba_d_conv", json!(3), "conv1d.weight"),
        ("granite4_h", "mamba_d_conv", json!(1), "expected 2 to 16"),
        ("granite4_h", "mamba_conv_bias", json!(false), "conv1d.bias"),
        ("granite4_h", "mamba_proj_bias", json!(true), "mamba_proj_bias"),
        ("granite4_h", "time_step_limit", json!([0.0, 1.0]), "time_step_limit"),
        ("granite4_h", "layer_types", json!(["mamba", "attention", "mamba", "mamba"]), "layers.1.self_attn"),
        ("granite4_h", "layer_types", json!(["mamba", "conv", "mamba", "mamba"]), "attention, mamba"),
        ("granite4", "shared_intermediate_size", json!(48), "shared_mlp"),
        ("granite4", "num_local_experts", json!(2), "num_experts_per_tok"),
        ("llama4_text", "num_experts_per_tok", json!(2), "2 experts of a token"),
        ("llama4_text", "moe_layers", json!([0, 4]), "names layer 4 of 4"),
        ("llama4_text", "moe_layers", json!([0, 1, 2]), "layers.3.mlp.gate_proj.weight"),
        ("llama4_text", "intermediate_size", json!(24), "mlp.experts.gate_up_proj"),
        ("llama4_text", "num_local_experts", json!(5), "mlp."),
        ("llama4_text", "layer_types", json!(["sliding_attention"]), "full_attention, chunked_attention"),
        ("llama3", "layer_types", json!(["chunked_attention"]), "full_attention, sliding_attention"),
        (
            "nemotron_h",
            "layers_block_type",
            json!(["mamba", "moe", "moe", "attention", "mlp", "moe"]),
            "layers.2.",
        ),
        ("nemotron_h", "layers_block_type", json!(["mamba", "conv"]), "mamba, attention, mlp, moe"),
        ("nemotron_h", "layers_block_type", json!([]), "names 0 layers, expected 1 to"),
        ("nemotron_h", "layers_block_type", Value::Null, "hybrid_override_pattern"),
        ("nemotron_h", "mlp_hidden_act", json!("silu"), "relu2"),
        ("nemotron_h", "mamba_hidden_act", json!("gelu"), "mamba_hidden_act"),
        ("nemotron_h", "use_bias", json!(true), "use_bias"),
        ("nemotron_h", "use_conv_bias", json!(false), "conv1d.bias"),
        ("nemotron_h", "n_groups", json!(4), "not a multiple of n_groups = 4"),
        ("nemotron_h", "mamba_num_heads", json!(3), "in_proj.weight"),
        ("nemotron_h", "mamba_head_dim", json!(18), "in_proj.weight"),
        ("nemotron_h", "ssm_state_size", json!(16), "in_proj.weight"),
        ("nemotron_h", "conv_kernel", json!(3), "conv1d.weight"),
        ("nemotron_h", "time_step_limit", json!([0.001, {"__float__": "Infinity"}]), "time_step_limit"),
        ("nemotron_h", "n_routed_experts", json!(7), "gate"),
        ("nemotron_h", "moe_intermediate_size", json!(16), "experts"),
        ("nemotron_h", "moe_shared_expert_intermediate_size", json!(24), "shared_experts"),
        ("nemotron_h", "moe_latent_size", json!(24), "fc1_latent_proj"),
        ("nemotron_h", "intermediate_size", json!(48), "up_proj"),
        ("nemotron_h_latent", "moe_latent_size", json!(20), "fc1_latent_proj"),
        ("nemotron_h_latent", "moe_latent_size", Value::Null, "experts"),
        (
            "nemotron_h_dense",
            "hybrid_override_pattern",
            json!("M-*-"),
            "names 4 layers, expected num_hidden_layers = 5",
        ),
        ("nemotron_h_dense", "hybrid_override_pattern", json!("M-*|M"), "`|`"),
        ("lfm2_moe", "use_expert_bias", json!(false), "use_expert_bias"),
        ("lfm2_moe", "num_dense_layers", json!(2), "layers.1.mlp.gate_proj.weight"),
    ] {
        let copy = with_config(name, |config| config[field] = value.clone());
        let error = load(copy.path(), None).expect_err(field).to_string();
        assert!(error.contains(named), "{name}: {field} = {value}: {error}");
    }
}

/// As Python writes it, and transformers since version 5; limits that hold nothing are none.
#[test]
fn infinity_is_read_in_either_form() {
    let expected = logits(&fixture("nemotron_h"));
    let copy = copy_of("nemotron_h");
    let path = copy.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(config["time_step_limit"], json!([0.0, {"__float__": "Infinity"}]));
    config["time_step_limit"] = json!(["LIMITS"]);
    config["name"] = json!("\"to Infinity\\");
    let text = config.to_string().replace("\"LIMITS\"", "0.0, Infinity");
    std::fs::write(&path, text).unwrap();
    assert_eq!(logits(copy.path()), expected);
}

/// Before `layer_types` was there.
#[test]
fn layers_of_lfm2_that_attend_may_be_listed() {
    let parse = |listed: Value| {
        let config = json!({"model_type": "lfm2", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4,
            "num_attention_heads": 8, "block_ff_dim": 100, "full_attn_idxs": listed});
        Config::parse("config.json", config.to_string().as_bytes()).map_err(|error| error.to_string())
    };
    let config = parse(json!([1, 3])).unwrap();
    let attends = config.mixers.iter().map(|mixer| *mixer == Mixer::Attention);
    assert_eq!(attends.collect::<Vec<_>>(), [false, true, false, true]);
    // Two thirds, up to a multiple of 256.
    assert_eq!((config.intermediate, config.tied, config.eps), (256, true, 1e-5));
    assert!(parse(json!([4])).unwrap_err().contains("names layer 4 of 4"));
}

/// What OLMo 3 had in config.json before transformers 5: only layers without a window are scaled.
#[test]
fn scaling_of_olmo3_is_that_of_full_layers() {
    let config = json!({"model_type": "olmo3", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 64, "rope_theta": 1000.0, "sliding_window": 8,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}});
    let config = Config::parse("config.json", config.to_string().as_bytes()).unwrap();
    let local = config.local_rope.unwrap();
    assert_eq!((local.theta, local.table(64).scale), (1000.0, 1.0));
    assert!(config.rope.theta == 1000.0 && config.rope.table(64).scale > 1.2);
    assert_eq!(config.windows, [Some(8), Some(8), Some(8), None]);
}
