//! Quantized safetensors checkpoints: the values, what they compute, and the digest.

mod common;

use std::fs;

use common::tensors::{File, Stored};
use common::{copy, copy_of};
use folio_model::backend::{DType, TensorView};
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{QUANTIZED, Runner, check_fixture, quantized};
use folio_model::weights::{TensorSpec, weight_specs};
use folio_model::{Checkpoint, LoadOptions, Model};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

#[test]
fn every_way_of_quantizing_matches_transformers() {
    for name in QUANTIZED {
        let parity = check_fixture(&quantized(name), ReferenceBackend::new);
        println!("{name}: logits within {:.1e}, {} greedy tokens equal", parity.worst, parity.greedy_tokens);
    }
}

#[test]
fn no_fixture_is_forgotten() {
    let entries = fs::read_dir(quantized("")).unwrap();
    let mut on_disk: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    on_disk.sort();
    let mut listed: Vec<&str> = QUANTIZED.to_vec();
    listed.sort_unstable();
    assert_eq!(on_disk, listed);
}

/// The values of a matrix in the model's order of columns.
fn values(view: TensorView<'_>) -> Vec<f32> {
    let Encoding::Block(format) = view.encoding else { panic!("not in blocks") };
    let [rows, cols] = *view.shape else { panic!("not a matrix") };
    let mut stored = vec![0.0; rows * cols];
    format.decode(view.bytes, &mut stored);
    let Some(order) = view.order else { return stored };
    let mut values = vec![0.0; rows * cols];
    for (from, to) in stored.chunks(cols).zip(values.chunks_mut(cols)) {
        for (value, column) in from.iter().zip(order) {
            to[*column as usize] = *value;
        }
    }
    values
}

/// Each tensor once, whatever is made of it.
fn specs(checkpoint: &Checkpoint) -> Vec<TensorSpec> {
    let specs = weight_specs(checkpoint.config());
    let mut parts: Vec<TensorSpec> = specs.iter().flat_map(|weight| weight.parts.clone()).collect();
    let mut seen = std::collections::BTreeSet::new();
    parts.retain(|part| seen.insert(part.name.clone()));
    parts
}

#[test]
fn decoded_weights_are_the_dequantized_ones_bit_for_bit() {
    for name in QUANTIZED {
        let text = fs::read(quantized(name).join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&text).unwrap();
        let digests = expected["weights"].as_object().unwrap();
        let checkpoint = Checkpoint::open(quantized(name)).unwrap();
        let mut checked = 0;
        for spec in specs(&checkpoint) {
            let tensor = checkpoint.tensor(&spec).unwrap();
            let Some(digest) = digests.get(&spec.name) else {
                assert!(tensor.encoding.plain().is_some(), "{name}: {}", spec.name);
                continue;
            };
            let read = tensor.read().unwrap();
            let mut hash = Sha256::new();
            for value in values(tensor.view(&read)) {
                // Either sign of zero is the same weight.
                hash.update((value + 0.0).to_le_bytes());
            }
            let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(digest, &found, "{name}: {}", spec.name);
            checked += 1;
        }
        assert_eq!(checked, digests.len(), "{name}");
    }
}

/// The format follows from the scheme, the group and the columns; the order from act-order alone.
#[test]
fn formats_follow_the_scheme() {
    use BlockFormat::*;
    for (name, module, format, ordered) in [
        ("awq", "self_attn.q_proj", Uint4x128, false),
        ("awq_neighbours", "self_attn.k_proj", Uint4x32, false),
        ("gptq_act_order", "mlp.down_proj", Uint4x32, true),
        ("gptq_v2", "mlp.down_proj", Int4x128, false),
        ("gptq_8bit", "self_attn.q_proj", Int8x32, true),
        ("ct_w4a16", "self_attn.q_proj", Int4x128, false),
        ("ct_w4a16", "mlp.down_proj", Int8x128, false),
        ("ct_w4a16_order", "self_attn.qkv_proj", Uint4x32, true),
        ("ct_w8a8", "mlp.up_proj", Int8x128, false),
        ("ct_fp8", "self_attn.o_proj", Fp8x128, false),
        ("ct_fp8", "mlp.down_proj", Fp8x32, false),
        ("ct_mxfp4", "mlp.down_proj", MXFP4, false),
        ("ct_nvfp4", "mlp.down_proj", Fp4x16, false),
        ("modelopt_nvfp4", "self_attn.k_proj", Fp4x16, false),
        ("fp8_block", "mlp.gate_proj", Fp8x128, false),
        ("fp8_block", "mlp.down_proj", Fp8x32, false),
        ("fp8_tensor", "self_attn.o_proj", Fp8x32, false),
        ("fp8_latent", "self_attn.kv_b_proj", Fp8x32, false),
        ("fp8_delta", "linear_attn.in_proj_qkv", Fp8x32, false),
        ("fp8_delta", "mlp.experts.3.down_proj", Fp8x32, false),
    ] {
        let checkpoint = Checkpoint::open(quantized(name)).unwrap();
        let stored = format!("model.layers.0.{module}.weight");
        let spec = specs(&checkpoint).into_iter().find(|spec| spec.name == stored).unwrap();
        let tensor = checkpoint.tensor(&spec).unwrap();
        assert_eq!(tensor.encoding, Encoding::Block(format), "{name}: {module}");
        let read = tensor.read().unwrap();
        assert_eq!(read.order.is_some(), ordered, "{name}: {module}");
        let view = tensor.view(&read);
        assert!(view.order_fits(), "{name}: {module}");
        assert_eq!(view.encoding.bytes(spec.shape[1]).map(|row| row * spec.shape[0]), Some(view.bytes.len()));
    }
}

#[test]
fn the_parts_of_a_matrix_are_one_tensor_to_everybody_else() {
    let checkpoint = Checkpoint::open(quantized("gptq_8bit")).unwrap();
    let names: Vec<&str> = checkpoint.tensor_names().collect();
    assert!(names.contains(&"lm_head.weight") && names.contains(&"model.layers.0.mlp.up_proj.weight"));
    let parts = ["qweight", "qzeros", "scales", "g_idx"];
    assert!(!names.iter().any(|name| parts.iter().any(|part| name.ends_with(part))), "{names:?}");
    let (file, stored) = checkpoint.stored_as("lm_head.weight").unwrap();
    assert!(file.ends_with("model.safetensors") && stored == "lm_head.qweight");
    let model = Runner::load(&checkpoint, ReferenceBackend::new(), None).model;
    assert_eq!(model.weight_encoding, Encoding::Block(BlockFormat::Int8x32));
    // Biases of zeros that AutoGPTQ wrote for every layer are no part of a model without biases.
    let checkpoint = Checkpoint::open(quantized("gptq_v2")).unwrap();
    assert!(!checkpoint.tensor_names().any(|name| name.ends_with("bias")));
}

/// Older checkpoints of ModelOpt say in a file of their own how they are quantized; the tensors say which module is how.
#[test]
fn modelopt_says_it_in_either_file() {
    let say = |folder: &std::path::Path, quantization: Value| {
        let text = json!({"producer": {"name": "modelopt"}, "quantization": quantization}).to_string();
        fs::write(folder.join("hf_quant_config.json"), text).unwrap();
    };
    for (name, algorithm) in [
        ("modelopt_nvfp4", "NVFP4"),
        ("modelopt_nvfp4", "MIXED_PRECISION"),
        ("fp8_tensor", "FP8"),
        ("fp8_tensor", "MIXED_PRECISION"),
    ] {
        let folder = copy(&quantized(name));
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config["quantization_config"] = Value::Null;
        fs::write(&path, config.to_string()).unwrap();
        say(
            folder.path(),
            json!({"quant_algo": algorithm, "group_size": 16, "exclude_modules": ["lm_head"]}),
        );
        check_fixture(folder.path(), ReferenceBackend::new);
    }
    // Only the KV cache is quantized, whose scales are read past.
    let folder = copy_of("llama3");
    let mut file = File::read(&folder.path().join("model.safetensors"));
    let scale = Stored { dtype: "F32".to_owned(), shape: Vec::new(), bytes: 0.5f32.to_le_bytes().to_vec() };
    file.tensors.insert("model.layers.0.self_attn.k_proj.k_scale".to_owned(), scale);
    file.write();
    say(folder.path(), json!({"quant_algo": null, "kv_cache_quant_algo": "FP8"}));
    check_fixture(folder.path(), ReferenceBackend::new);
}

#[test]
fn the_digest_sees_every_part() {
    let digest = |folder: &std::path::Path| {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let options = LoadOptions {
            max_rows: 8,
            max_logit_rows: 1,
            max_model_len: Some(64),
            kv_formats: DType::F32.into(),
            block_tokens: 16,
            keeps_all: false,
            taps: None,
            progress: None,
        };
        let model = Model::load(&checkpoint, &mut ReferenceBackend::new(), options).unwrap();
        assert_eq!(model.digest, checkpoint.digest(64).unwrap());
        model.digest
    };
    let original = digest(&quantized("gptq_act_order"));
    // One bit of the first value, which is in the first block of a row. Groups are exchanged: 0 for 1 and 1 for 0.
    for part in ["qweight", "qzeros", "scales", "g_idx"] {
        let folder = copy(&quantized("gptq_act_order"));
        let mut file = File::read(&folder.path().join("model.safetensors"));
        let bytes = &mut file.get(&format!("model.layers.0.mlp.down_proj.{part}")).bytes;
        match part {
            "g_idx" => bytes.chunks_mut(4).filter(|group| group[0] < 2).for_each(|group| group[0] ^= 1),
            _ => bytes[0] ^= 1,
        }
        file.write();
        assert_ne!(digest(folder.path()), original, "{part}");
    }
}

#[test]
fn progress_covers_every_byte_once() {
    let checkpoint = Checkpoint::open(quantized("awq")).unwrap();
    let mut last = None;
    let mut record = |p: folio_model::Progress<'_>| last = Some((p.done_bytes, p.total_bytes));
    let options = LoadOptions { progress: Some(&mut record), ..common::options(None) };
    Model::load(&checkpoint, &mut ReferenceBackend::new(), options).unwrap();
    let (done, total) = last.unwrap();
    assert!(done == total && total > 0, "{done} of {total}");
}
