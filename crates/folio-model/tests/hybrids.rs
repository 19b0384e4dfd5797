//! Layers that keep a state: everything that is read of a checkpoint matters, what is not understood is named, and the cache that they
//! need has the sizes that are known of real models.

mod common;

use common::tensors::File;
use common::{copy_of, load, logits, perturbed, with_config};
use folio_model::Checkpoint;
use folio_model::backend::{DType, GroupKind};
use folio_model::config::{Config, Mixer};
use folio_model::decoder::kv_layout;
use folio_model::testing::{HYBRIDS, LOGIT_TOLERANCE, fixture, relative_difference};
use folio_model::weights::{Made, Pick, weight_specs};
use serde_json::{Value, json};

#[test]
fn every_tensor_moves_the_logits() {
    for name in HYBRIDS {
        let copy = copy_of(name);
        let path = copy.path().join("model.safetensors");
        let expected = logits(copy.path());
        let mut file = File::read(&path);
        let names: Vec<String> = file.tensors.keys().cloned().collect();
        let mut moved = 0;
        for tensor in names.iter().filter(|tensor| !tensor.contains("visual")) {
            let stored = file.get(tensor);
            let before = stored.bytes.clone();
            stored.bytes = perturbed(&stored.dtype, &before);
            file.write();
            let difference = relative_difference(&logits(copy.path()), &expected);
            assert!(difference > 10.0 * LOGIT_TOLERANCE, "{name}: {tensor} moves them by {difference:e}");
            file.get(tensor).bytes = before;
            moved += 1;
        }
        assert!(moved > 20, "{name}: {moved} tensors");
    }
}

#[test]
fn every_field_that_is_read_moves_the_logits_or_is_refused() {
    let expected = logits(&fixture("qwen3_next"));
    for (field, value) in [
        ("rms_norm_eps", json!(1e-2)),
        ("num_experts_per_tok", json!(3)),
        ("norm_topk_prob", json!(false)),
        (
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}),
        ),
        (
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        ),
    ] {
        let copy = with_config("qwen3_next", |config| config[field] = value.clone());
        let difference = relative_difference(&logits(copy.path()), &expected);
        assert!(difference > 10.0 * LOGIT_TOLERANCE, "{field} = {value} moves them by {difference:e}");
    }
    let linear = "linear_attention";
    for (field, value, named) in [
        ("linear_num_key_heads", json!(3), "in_proj_qkvz.weight"),
        ("linear_num_key_heads", json!(4), "linear_num_value_heads"),
        ("linear_num_value_heads", json!(4), "in_proj_qkvz.weight"),
        ("linear_key_head_dim", json!(4), "in_proj_qkvz.weight"),
        ("linear_value_head_dim", json!(8), "in_proj_qkvz.weight"),
        ("linear_conv_kernel_dim", json!(3), "conv1d.weight"),
        ("linear_conv_kernel_dim", json!(1), "expected 2 to 16"),
        ("linear_conv_kernel_dim", json!(17), "linear_conv_kernel_dim"),
        ("linear_value_head_dim", json!(1 << 19), "linear_value_head_dim"),
        ("layer_types", json!([linear, linear, linear, linear]), "layers.1.linear_attn"),
        ("layer_types", json!([linear, "mamba", linear, linear]), "full_attention, linear_attention"),
        ("layer_types", json!([linear]), "expected 4"),
        ("shared_expert_intermediate_size", json!(27), "shared_expert"),
        ("shared_expert_intermediate_size", Value::Null, "shared_expert_intermediate_size"),
        ("mlp_only_layers", json!([1]), "mlp_only_layers"),
        ("attn_output_gate", json!(false), "attn_output_gate"),
        ("head_dim", json!(8), "q_proj.weight"),
    ] {
        let copy = with_config("qwen3_next", |config| config[field] = value.clone());
        let error = load(copy.path(), None).expect_err(field).to_string();
        assert!(error.contains(named), "{field} = {value}: {error}");
    }
    // A family without such layers does not take them.
    let copy = with_config("qwen3", |config| config["layer_types"] = json!([linear, linear]));
    let error = load(copy.path(), None).expect_err("refused").to_string();
    assert!(error.contains(linear) && error.contains("full_attention, sliding_attention"), "{error}");
}

/// What an absent field means, as transformers has it.
#[test]
fn every_fourth_layer_attends_where_nothing_is_said() {
    let copy = with_config("qwen3_5_text", |config| {
        config["num_hidden_layers"] = json!(9);
        config.as_object_mut().unwrap().remove("layer_types");
    });
    let config = Checkpoint::open_without_weights(copy.path()).unwrap().config().clone();
    let attends: Vec<usize> = (0..9).filter(|layer| config.mixers[*layer] == Mixer::Attention).collect();
    assert_eq!(attends, [3, 7]);
}

fn real(family: &str, sizes: Value) -> Config {
    let mut config = json!({"model_type": family, "vocab_size": 1000, "max_position_embeddings": 262_144,
        "intermediate_size": 512, "shared_expert_intermediate_size": 512, "moe_intermediate_size": 512});
    config.as_object_mut().unwrap().extend(sizes.as_object().unwrap().clone());
    Config::parse("config.json", config.to_string().as_bytes()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn states_have_the_sizes_that_are_known() {
    let sizes = |layers: usize, hidden: usize, heads: [usize; 3]| {
        json!({"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1], "linear_num_value_heads": heads[2]})
    };
    for (family, sizes, layers, mib, of_token, every) in [
        ("qwen3_next", sizes(48, 2048, [16, 2, 32]), 36, 75, 24, 1024),
        ("qwen3_5_text", sizes(32, 4096, [16, 4, 32]), 24, 50, 32, 512),
        ("qwen3_5_text", sizes(64, 5120, [24, 4, 48]), 48, 149, 64, 1024),
    ] {
        let layout = kv_layout(&real(family, sizes), &DType::BF16.into(), 16, 262_144).unwrap();
        let [attention, states] = &layout.groups[..] else { panic!("{layout:?}") };
        assert_eq!(attention.kind, GroupKind::Full);
        assert_eq!((states.layers(), states.block_tokens), (layers, every), "{family}");
        assert_eq!(states.bytes_per_block() >> 20, mib, "{family}");
        assert_eq!(layout.bytes_per_token(), of_token << 10, "{family}");
        assert_eq!(states.bytes_per_block(), layers * states.state_values().unwrap() * 4);
    }
    // Never fewer tokens than a block of K and V, never more than a sequence has.
    let small = sizes(4, 256, [2, 1, 16]);
    let every = |block: usize, most: usize| {
        let layout =
            kv_layout(&real("qwen3_5_text", small.clone()), &DType::BF16.into(), block, most).unwrap();
        layout.groups[1].block_tokens
    };
    assert_eq!((every(16, 262_144), every(16, 100), every(48, 100), every(2048, 4096)), (1024, 64, 96, 2048));
}

/// A tensor that holds several projections is read once for each, and together they are all of it.
#[test]
fn rows_of_projections_that_are_stored_together_are_taken_apart() {
    let rows: Vec<u8> = (0..12).flat_map(|row| [row, 100 + row]).collect();
    let pick = |period, first, rows_of| Pick { period, first, rows: rows_of };
    assert_eq!(pick(6, 1, 2).picked(&rows, 12), [1, 101, 2, 102, 7, 107, 8, 108]);
    assert_eq!(Pick::ALL.picked(&rows, 12), rows);
    for name in HYBRIDS {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let specs = weight_specs(checkpoint.config());
        let parts: Vec<_> = specs.iter().flat_map(|spec| &spec.parts).collect();
        for part in &parts {
            let taken: Vec<_> = parts.iter().filter(|other| other.name == part.name).collect();
            let all: usize = taken.iter().map(|part| part.picked_shape()[0]).sum();
            assert_eq!(all, part.stored_rows(), "{name}: {}", part.name);
        }
        assert!(specs.iter().any(|spec| spec.made == Made::Taps), "{name}");
    }
}
