//! Families whose parts others have: everything that is read of a checkpoint matters, and what is not understood is named. (Hybrids and
//! latents have files of their own.)

mod common;

use common::tensors::{File, Stored};
use common::{copy_of, load, logits, perturbed, with_config};
use folio_model::Checkpoint;
use folio_model::backend::{DType, GroupKind, KvGroup};
use folio_model::config::{Config, Mixer};
use folio_model::decoder::kv_layout;
use folio_model::reference::ReferenceBackend;
use folio_model::rope::Sections;
use folio_model::testing::{
    FIXTURES, HYBRIDS, LATENT, LOGIT_TOLERANCE, Runner, check_fixture, fixture, relative_difference,
};
use serde_json::{Value, json};

/// Parts of names of tensors that may change what they like, and why.
const UNFELT: &[(&str, &str)] = &[
    (".experts.", "an expert may be chosen for no token"),
    ("act_fn.eps", "where xIELU's exponential stops growing is nearly 0 whatever it is"),
    ("vision_model.", "of a tower that is skipped"),
    ("vision_tower.", "of a tower that is skipped"),
    ("embed_vision.", "what brings images to the decoder is skipped"),
    ("multi_modal_projector.", "what brings images to the decoder is skipped"),
];

/// Experts that are one tensor in a model as it was trained are linear layers where those were quantized.
#[test]
fn experts_of_one_tensor_may_be_layers_of_their_own() {
    for (name, turned) in [("qwen3_5_moe_text", false), ("gemma4_moe", false), ("llama4_text", true)] {
        let copy = copy_of(name);
        let mut file = File::read(&copy.path().join("model.safetensors"));
        let stacked = [".experts.gate_up_proj", ".experts.down_proj"];
        let names: Vec<String> = file.tensors.keys().cloned().collect();
        for tensor in names.iter().filter(|name| stacked.iter().any(|part| name.ends_with(part))) {
            let Stored { dtype, shape, bytes } = file.tensors.remove(tensor).unwrap();
            let [count, high, wide] = shape[..] else { panic!("{tensor} is of {shape:?}") };
            let (rows, cols) = if turned { (wide, high) } else { (high, wide) };
            let values = bytes.as_chunks::<2>().0;
            let (path, part) = tensor.rsplit_once('.').unwrap();
            let parts = if part == "down_proj" { vec![part] } else { vec!["gate_proj", "up_proj"] };
            let rows = rows / parts.len();
            for (i, expert) in (0..count * parts.len()).map(|i| (i % parts.len(), i / parts.len())) {
                let at = |row: usize, col: usize| {
                    let row = i * rows + row;
                    expert * high * wide + if turned { col * wide + row } else { row * wide + col }
                };
                let own = (0..rows * cols).flat_map(|value| values[at(value / cols, value % cols)]).collect();
                let own = Stored { dtype: dtype.clone(), shape: vec![rows, cols], bytes: own };
                file.tensors.insert(format!("{path}.{expert}.{}.weight", parts[i]), own);
            }
        }
        file.write();
        check_fixture(copy.path(), ReferenceBackend::new);
    }
}

#[test]
fn every_tensor_moves_the_logits() {
    // Those have files of their own.
    let elsewhere = |name: &&str| HYBRIDS.contains(name) || LATENT.contains(name);
    for name in FIXTURES.iter().filter(|name| !elsewhere(name)) {
        let copy = copy_of(name);
        let expected = logits(copy.path());
        // The last norm takes out what the last layer is multiplied by.
        let last = Checkpoint::open(copy.path()).unwrap().config().layers - 1;
        let last = format!("layers.{last}.layer_scalar");
        let matters =
            |tensor: &str| !tensor.contains(&last) && !UNFELT.iter().any(|(part, _)| tensor.contains(part));
        let mut moved = 0;
        for entry in std::fs::read_dir(copy.path()).unwrap() {
            let path = entry.unwrap().path();
            let file_name = path.file_name().unwrap().to_str().unwrap();
            if !file_name.starts_with("model") || !file_name.ends_with(".safetensors") {
                continue;
            }
            let mut file = File::read(&path);
            let names: Vec<String> = file.tensors.keys().cloned().collect();
            for tensor in names.iter().filter(|tensor| matters(tensor)) {
                let stored = file.get(tensor);
                let before = stored.bytes.clone();
                stored.bytes = perturbed(&stored.dtype, &before);
                file.write();
                let difference = relative_difference(&logits(copy.path()), &expected);
                assert!(difference > 10.0 * LOGIT_TOLERANCE, "{name}: {tensor} moves them by {difference:e}");
                file.get(tensor).bytes = before;
                moved += 1;
            }
            file.write();
        }
        assert!(moved >= 12, "{name}: {moved} tensors");
    }
}

/// Of families with few fields of their own.
#[test]
fn every_field_of_plain_families_moves_the_logits() {
    for (name, pointer, value) in [
        ("mixtral", "/rms_norm_eps", json!(0.1)),
        ("mixtral", "/rope_theta", json!(500.0)),
        ("mixtral", "/num_experts_per_tok", json!(1)),
        ("mixtral", "/sliding_window", json!(4)),
        ("mistral3", "/text_config/rms_norm_eps", json!(0.1)),
        ("mistral3", "/text_config/rope_parameters/rope_theta", json!(500.0)),
        ("mistral3", "/text_config/sliding_window", json!(4)),
        ("granite", "/rms_norm_eps", json!(0.1)),
        ("granite", "/rope_parameters/rope_theta", json!(500.0)),
        ("granite", "/embedding_multiplier", json!(1.0)),
        ("granite", "/residual_multiplier", json!(1.0)),
        ("granite", "/attention_multiplier", json!(1.0)),
        ("granite", "/logits_scaling", json!(1.0)),
        ("seed_oss", "/rms_norm_eps", json!(0.1)),
        ("seed_oss", "/rope_parameters/rope_theta", json!(500.0)),
        ("exaone4", "/rms_norm_eps", json!(0.1)),
        ("exaone4", "/rope_parameters/rope_theta", json!(500.0)),
        ("exaone4", "/sliding_window", json!(4)),
        ("exaone4", "/layer_types/0", json!("full_attention")),
        ("exaone4", "/layer_types/3", json!("sliding_attention")),
        ("ernie4_5", "/rms_norm_eps", json!(0.1)),
        ("ernie4_5", "/rope_parameters/rope_theta", json!(500.0)),
        ("apertus", "/rms_norm_eps", json!(0.1)),
        ("apertus", "/rope_parameters/rope_theta", json!(500.0)),
        ("apertus", "/rope_parameters/factor", json!(2.0)),
        // Of its five rotations only the second is near a border.
        ("apertus", "/rope_parameters/low_freq_factor", json!(0.5)),
        ("apertus", "/rope_parameters/high_freq_factor", json!(16.0)),
        ("apertus", "/rope_parameters/original_max_position_embeddings", json!(64)),
        ("qwen3_5_text", "/rms_norm_eps", json!(0.1)),
        ("qwen3_5_text", "/rope_parameters/rope_theta", json!(500.0)),
        ("qwen3_5_text", "/rope_parameters/partial_rotary_factor", json!(0.5)),
        ("glm4_moe_lite", "/rms_norm_eps", json!(0.1)),
        ("glm4_moe_lite", "/rope_parameters/rope_theta", json!(500.0)),
        ("glm4_moe_lite", "/rope_interleave", json!(false)),
        ("glm4_moe_lite", "/num_experts_per_tok", json!(2)),
        ("glm4_moe_lite", "/norm_topk_prob", json!(false)),
        ("glm4_moe_lite", "/routed_scaling_factor", json!(1.0)),
    ] {
        let expected = logits(&fixture(name));
        let copy = with_config(name, |config| {
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            let parent = config.pointer_mut(parent).unwrap_or_else(|| panic!("{name}: no {parent}"));
            match parent {
                Value::Array(values) => values[field.parse::<usize>().unwrap()] = value.clone(),
                fields => fields[field] = value.clone(),
            }
        });
        let difference = relative_difference(&logits(copy.path()), &expected);
        assert!(
            difference > 10.0 * LOGIT_TOLERANCE,
            "{name}: {pointer} = {value} moves them by {difference:e}"
        );
    }
}

#[test]
fn every_field_that_is_read_moves_the_logits() {
    let olmo3 = |theta: f64, factor: f64| {
        json!({"sliding_attention": {"rope_type": "default", "rope_theta": theta},
            "full_attention": {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0,
                "attention_factor": 1.2079, "original_max_position_embeddings": 32}})
    };
    let gemma4 = |part: f64, theta: f64, local: f64| {
        json!({"sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part}})
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
        ("gemma4_text", "rms_norm_eps", json!(1e-1)),
        ("gemma4_text", "sliding_window", json!(4)),
        ("gemma4_text", "final_logit_softcapping", json!(1.5)),
        ("gemma4_text", "final_logit_softcapping", Value::Null),
        ("gemma4_text", "rope_parameters", gemma4(0.5, 1000.0, 10_000.0)),
        ("gemma4_text", "rope_parameters", gemma4(0.25, 50.0, 10_000.0)),
        ("gemma4_text", "rope_parameters", gemma4(0.25, 1000.0, 100.0)),
        ("gemma4_moe", "top_k_experts", json!(1)),
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
    let (conv, full, sliding) = ("conv", "full_attention", "sliding_attention");
    let gemma4 = |part: f64, theta: f64, local: f64| {
        json!({"sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part}})
    };
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
        ("gemma4_text", "global_head_dim", json!(20), "layers.1.self_attn.q_proj.weight"),
        ("gemma4_text", "global_head_dim", json!(21), "is 21, expected an even number"),
        ("gemma4_text", "head_dim", json!(14), "layers.0.self_attn.q_proj.weight"),
        ("gemma4_text", "num_global_key_value_heads", json!(2), "layers.1.self_attn.k_proj.weight"),
        ("gemma4_text", "num_global_key_value_heads", json!(3), "does not divide num_attention_heads = 4"),
        ("gemma4_text", "attention_k_eq_v", json!(false), "layers.1.self_attn"),
        ("gemma4_text", "attention_bias", json!(true), "bias"),
        ("gemma4_text", "num_kv_shared_layers", json!(4), "no layer before them keeps K and V as layer 0"),
        ("gemma4_text", "num_kv_shared_layers", json!(5), "is 5 of 4 layers"),
        ("gemma4_text", "use_bidirectional_attention", json!("all"), "use_bidirectional_attention"),
        ("gemma4_text", "enable_moe_block", json!(true), "moe_intermediate_size"),
        ("gemma4_text", "hidden_size_per_layer_input", json!(4), "embed_tokens_per_layer.weight"),
        ("gemma4_text", "rope_parameters", Value::Null, "rope_parameters"),
        ("gemma4_text", "rope_parameters", gemma4(1.5, 1000.0, 10_000.0), "partial_rotary_factor"),
        (
            "gemma4_text",
            "layer_types",
            json!(["full_attention", sliding, "full_attention", sliding]),
            "on the last layer",
        ),
        (
            "gemma4_moe",
            "per_layer_config",
            json!({"2": {"head_dim": 24, "rope": 1}}),
            "field `rope` of layer 2",
        ),
        ("gemma4_moe", "per_layer_config", json!({"0": {"head_dim": 24}}), "other heads in layer 0"),
        ("gemma4_moe", "per_layer_config", json!({"3": {}}), "is none of 3 layers"),
        ("gemma4_moe", "per_layer_config", json!({}), "layers.2.self_attn.q_proj.weight"),
        ("gemma4_moe", "enable_moe_block", json!(false), "layers.0."),
        ("gemma4_moe", "enable_moe_block", json!("on"), "expected true or false"),
        ("gemma4_moe", "num_experts", json!(5), "router.proj.weight"),
        ("gemma4_moe", "top_k_experts", json!(7), "`top_k_experts` is 7, but num_experts is 6"),
        ("gemma4_moe", "moe_intermediate_size", json!(24), "experts.gate_up_proj"),
        ("gemma4_moe", "intermediate_size", json!(24), "mlp.gate_proj.weight"),
    ] {
        let copy = with_config(name, |config| config[field] = value.clone());
        let error = load(copy.path(), None).expect_err(field).to_string();
        assert!(error.contains(named), "{name}: {field} = {value}: {error}");
    }
}

/// What the text part of a multimodal Gemma 4 says of layers that share K and V, and of values that they are given.
#[test]
fn what_layers_share_and_are_given_is_read_from_the_text_part() {
    for (field, value, named) in [
        ("num_kv_shared_layers", json!(2), "layers.3.self_attn.k_proj.weight"),
        ("num_kv_shared_layers", json!(4), "no layer before them keeps K and V as layer 2"),
        ("use_double_wide_mlp", json!(false), "layers.3.mlp.gate_proj.weight"),
        ("hidden_size_per_layer_input", json!(0), "per_layer_input_gate.weight"),
        ("hidden_size_per_layer_input", Value::Null, "per_layer_input_gate.weight"),
        ("vocab_size_per_layer_input", json!(100), "100 of 199 tokens"),
        ("model_type", json!("gemma3n_text"), "`gemma3n_text`"),
    ] {
        let copy = with_config("gemma4", |config| config["text_config"][field] = value.clone());
        let error = load(copy.path(), None).expect_err(field).to_string();
        assert!(error.contains(named), "{field} = {value}: {error}");
    }
    // Attention among the tokens of an image changes nothing for texts.
    let expected = logits(&fixture("gemma4"));
    let vision = with_config("gemma4", |config| {
        config["text_config"]["use_bidirectional_attention"] = json!("vision");
    });
    assert_eq!(logits(vision.path()), expected);
}

/// Positions on three axes are of tokens of images: texts have one, so what says which frequency turns by which changes nothing for them.
#[test]
fn sections_of_rotary_frequencies_are_read_and_leave_texts_alone() {
    let with = |value: Value, interleaved: Value| {
        with_config("qwen3", |config| {
            config["rope_parameters"]["mrope_section"] = value;
            config["rope_parameters"]["mrope_interleaved"] = interleaved;
        })
    };
    let expected = logits(&fixture("qwen3"));
    assert_eq!(Checkpoint::open(fixture("qwen3")).unwrap().config().rope.sections, None);
    for (interleaved, is) in [(json!(true), true), (json!(false), false), (Value::Null, false)] {
        let copy = with(json!([6, 5, 5]), interleaved);
        let sections = Checkpoint::open(copy.path()).unwrap().config().rope.sections;
        assert_eq!(sections, Some(Sections { frequencies: [6, 5, 5], interleaved: is }));
        assert_eq!(logits(copy.path()), expected);
    }
    for (value, named) in [
        (json!([6, 5]), "three numbers"),
        (json!([6, 5, "5"]), "three numbers"),
        (json!([6, 5, 4]), "15 frequencies of 16"),
    ] {
        let error = load(with(value, Value::Null).path(), None).expect_err(named).to_string();
        assert!(error.contains("mrope_section") && error.contains(named), "{error}");
    }
}

/// Layers that share keep nothing; those with other heads have a group of their own, even where a window holds every sequence.
#[test]
fn layers_that_differ_are_cached_apart_and_those_that_share_not_at_all() {
    let groups = |name: &str, max_model_len: usize| -> Vec<(GroupKind, usize, usize, usize)> {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let layout = kv_layout(checkpoint.config(), &DType::F32.into(), 16, max_model_len).unwrap();
        let of = |group: &KvGroup| (group.kind, group.layers(), group.kv_heads, group.head_dim);
        layout.groups.iter().map(of).collect()
    };
    let window = |tokens| GroupKind::Window { tokens };
    assert_eq!(groups("gemma4_text", 64), [(GroupKind::Full, 2, 1, 24), (window(11), 2, 2, 12)]);
    assert_eq!(groups("gemma4", 64), [(GroupKind::Full, 1, 1, 16), (window(9), 2, 1, 8)]);
    assert_eq!(groups("gemma4", 8), [(GroupKind::Full, 1, 1, 16), (window(8), 2, 1, 8)]);
    // What others have there.
    assert_eq!(groups("gemma3_text", 8), [(GroupKind::Full, 4, 1, 16)]);
    let checkpoint = Checkpoint::open(fixture("gemma4")).unwrap();
    let config = checkpoint.config();
    let sources: Vec<usize> = (0..6).map(|layer| config.kv_source(layer)).collect();
    assert_eq!(sources, [0, 1, 2, 1, 1, 2]);
    let tokens = [5u32, 90, 17, 33, 150, 8, 61, 7];
    let logits = |length| {
        let mut runner = Runner::load(&checkpoint, ReferenceBackend::new(), Some(length));
        runner.forward(&tokens, &[0, 4, 7]).to_vec()
    };
    assert_eq!(logits(8), logits(64));
    // Part by part, what is shared is read back from the cache.
    let mut runner = Runner::load(&checkpoint, ReferenceBackend::new(), Some(64));
    runner.forward(&tokens[..3], &[]);
    let last = runner.forward(&tokens[3..], &[1, 4]).to_vec();
    assert_eq!(last, logits(64)[config.vocab..]);
}

/// Values that are made as keys are, and a norm that all layers share, count once.
#[test]
fn what_is_read_twice_is_counted_once() {
    for name in ["gemma4_text", "gemma4_moe"] {
        let file = File::read(&fixture(name).join("model.safetensors"));
        let stored: usize = file.tensors.values().map(|tensor| tensor.bytes.len() / 2).sum();
        assert_eq!(load(&fixture(name), None).unwrap().parameters, stored as u64, "{name}");
    }
}

/// What Gemma 4's configuration leaves out.
#[test]
fn gemma4_takes_its_defaults() {
    let parse = |changes: Value| {
        let mut config = json!({"model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 7, "intermediate_size": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
                "sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
        for (field, value) in changes.as_object().unwrap() {
            config[field] = value.clone();
        }
        Config::parse("config.json", config.to_string().as_bytes()).map_err(|error| error.to_string())
    };
    let config = parse(json!({})).unwrap();
    let sizes = |layer| (config.head_sizes(layer).kv_heads, config.head_sizes(layer).head_dim);
    assert_eq!((config.heads, sizes(0), sizes(6)), (8, (4, 256), (4, 512)));
    assert_eq!((config.windows[0], config.windows[5]), (Some(512), None));
    assert_eq!((config.layer_input, config.sharing_layers, config.experts), (Some(256), 0, None));
    assert_eq!((config.attention_scale, config.norm_offset, config.tied), (1.0, 0.0, true));
    let table = config.rope.table(64);
    assert_eq!((table.inv_freq.len(), table.inv_freq[63] > 0.0, table.inv_freq[64]), (256, true, 0.0));
    assert_eq!(table.inv_freq[32], (1e6f64.powf(-64.0 / 512.0)) as f32);
    assert_eq!(config.local_rope.unwrap().table(64).inv_freq.len(), 128);
    // Other heads of K and V only where values are made as keys are.
    let heads = |keys_are_values: bool| {
        let changes = json!({"num_global_key_value_heads": 2, "attention_k_eq_v": keys_are_values});
        parse(changes).unwrap().head_sizes(6).kv_heads
    };
    assert_eq!((heads(false), heads(true)), (4, 2));
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
