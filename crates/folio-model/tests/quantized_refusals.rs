//! Quantized checkpoints that Folio does not load are refused with a sentence that names file, tensor or field, and fault.

mod common;

use std::fs;

use common::tensors::{File, Stored};
use common::{Random, copy, load, set_config};
use folio_model::Checkpoint;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{QUANTIZED, Runner, quantized};
use serde_json::{Value, json};

fn assert_names(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{sentence:?} does not name {part:?}");
    }
}

/// The refusal of a fixture whose quantization_config was edited.
fn configured(name: &str, edit: impl FnOnce(&mut Value)) -> String {
    let folder = copy(&quantized(name));
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config["quantization_config"]);
    fs::write(&path, config.to_string()).unwrap();
    load(folder.path(), None).expect_err("should be refused").to_string()
}

/// The refusal of a fixture whose tensors were edited.
fn stored(name: &str, edit: impl FnOnce(&mut File)) -> String {
    let folder = copy(&quantized(name));
    let mut file = File::read(&folder.path().join("model.safetensors"));
    edit(&mut file);
    file.write();
    load(folder.path(), None).expect_err("should be refused").to_string()
}

#[test]
fn other_ways_of_quantizing_are_named() {
    for method in ["bitsandbytes", "hqq", "quanto", "eetq", "aqlm", "torchao", "bitnet", "mxfp4", "new"] {
        let sentence = configured("awq", |config| *config = json!({"quant_method": method}));
        assert_names(
            &sentence,
            &["config.json", &format!("`{method}`"), "`quantization_config.quant_method`", "AWQ", "GGUF"],
        );
    }
    assert_names(
        &configured("awq", |config| *config = json!({"bits": 4})),
        &["`quantization_config.quant_method`", "missing"],
    );
    assert_names(&configured("awq", |config| *config = json!([])), &["`quantization_config` is a list"]);
}

#[test]
fn options_are_named() {
    let cases: Vec<(&str, &str, Value, &[&str])> = vec![
        ("awq", "bits", json!(3), &["AWQ with 3 bits", "`quantization_config.bits`", "supported: 4"]),
        ("awq", "version", json!("gemv"), &["`gemv`", "version"]),
        ("awq", "zero_point", json!(false), &["without zero points"]),
        ("awq", "backend", json!("llm-awq"), &["llm-awq"]),
        ("awq", "group_size", json!(48), &["qweight", "groups of 48", "multiples of 32"]),
        ("awq", "group_size", json!(0), &["`quantization_config.group_size` is 0"]),
        ("awq", "group_size", json!("128"), &["`quantization_config.group_size`"]),
        ("awq", "new_trick", json!({"x": 1}), &["`quantization_config.new_trick`"]),
        ("awq", "method", json!("gptq"), &["`quantization_config.method` is \"gptq\"", "awq"]),
        ("awq", "dynamic", json!({".*down.*": {"group_size": 32}}), &[".*down.*", "dynamic"]),
        ("gptq_v2", "bits", json!(5), &["GPTQ with 5 bits", "2 and 3 and 4 and 8"]),
        ("gptq_v2", "bits", json!(2), &["q_proj.qweight`", "shape"]),
        ("gptq_act_order", "bits", json!(3), &["3 bits and zero points that are stored minus one"]),
        ("gptq_v2", "checkpoint_format", json!("marlin"), &["`marlin`"]),
        ("gptq_v2", "is_marlin_format", json!(true), &["`marlin`"]),
        ("gptq_v2", "pack_dtype", json!("int16"), &["`int16`"]),
        ("gptq_v2", "dynamic", json!({"+:.*down.*": {"bits": 8}}), &["down_proj.qweight`", "shape"]),
        (
            "gptq_v2",
            "dynamic",
            json!({"+:.*": {"rotation": 1}}),
            &["`quantization_config.dynamic.+:.*.rotation`"],
        ),
        ("gptq_v2", "dynamic", json!({"(?!x)": {"bits": 4}}), &["(?!x)", "`quantization_config.dynamic`"]),
        ("gptq_v2", "data_type", json!("mx_fp"), &["`mx_fp`", "`quantization_config.data_type`"]),
        ("gptq_v2", "rotation", json!("hadamard"), &["`quantization_config.rotation`"]),
        ("gptq_8bit", "sym", json!(false), &["8 bits and zero points"]),
        ("fp8_block", "fmt", json!("e5m2"), &["`e5m2`", "e4m3"]),
        ("fp8_block", "weight_block_size", json!([128]), &["`quantization_config.weight_block_size`"]),
        ("fp8_block", "weight_block_size", json!([64, 64]), &["weight_scale_inv", "shape"]),
        ("ct_w4a16", "format", json!("marlin-24"), &["`marlin-24`", "pack-quantized"]),
        ("ct_w4a16", "format", json!("nvfp4-pack-quantized"), &["`nvfp4-pack-quantized`"]),
        (
            "ct_w4a16",
            "transform_config",
            json!({"config_groups": {"a": {}}}),
            &["transform", "transform_config"],
        ),
        (
            "ct_w4a16",
            "sparsity_config",
            json!({"format": "sparse-24-bitmask"}),
            &["sparsity", "sparse-24-bitmask"],
        ),
        (
            "modelopt_nvfp4",
            "quant_algo",
            json!("W4A8_AWQ"),
            &["`W4A8_AWQ`", "`quantization_config.quant_algo`"],
        ),
        ("modelopt_nvfp4", "quant_algo", Value::Null, &["`quantization_config.quant_algo` is missing"]),
        ("modelopt_nvfp4", "pre_quant_scale", json!(true), &["`quantization_config.pre_quant_scale`"]),
        ("modelopt_nvfp4", "quant_algo", json!("FP8"), &["q_proj.weight`", "has dtype U8", "F8_E4M3"]),
        ("ct_w4a16", "config_groups", Value::Null, &["`quantization_config.config_groups` is missing"]),
        ("ct_w4a16", "ignore", json!(["re:.*k_proj"]), &["k_proj.weight_packed", "`ignore`"]),
        ("ct_w4a16", "ignore", json!(["re:(?!x)"]), &["(?!x)", "`quantization_config.ignore`"]),
    ];
    for (name, field, value, expected) in cases {
        let sentence = configured(name, |config| config[field] = value);
        assert_names(&sentence, expected);
    }
}

#[test]
fn options_of_auto_round_are_named() {
    let base = json!({"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": -1, "sym": true});
    let own = |of_down: Value| json!({".*down_proj": of_down});
    let cases: Vec<(&str, Value, &[&str])> = vec![
        (
            "packing_format",
            json!("auto_round:llm_compressor"),
            &["`auto_round:llm_compressor`", "packing_format"],
        ),
        ("data_type", json!("nv_fp"), &["`nv_fp`", "`quantization_config.data_type`"]),
        ("act_bits", json!(8), &["activations of 8 bits", "`quantization_config.act_bits`"]),
        ("bits", json!(5), &["with 5 bits", "`quantization_config.bits`"]),
        ("super_bits", json!(6), &["`quantization_config.super_bits`"]),
        ("rotation_config", json!({"a": 1}), &["`quantization_config.rotation_config`"]),
        ("extra_config", own(json!({"bits": 16})), &["down_proj.qweight`", "says that its module is not"]),
        ("extra_config", own(json!({"bits": 8})), &["down_proj.qweight`", "shape"]),
        ("extra_config", own(json!({"data_type": "fp8"})), &["`fp8`", "extra_config..*down_proj.data_type`"]),
        ("extra_config", json!({"(?!x)": {"bits": 4}}), &["(?!x)", "`quantization_config.extra_config`"]),
    ];
    for (field, value, expected) in cases {
        let sentence = configured("gptq_v2", |config| {
            config.clone_from(&base);
            config[field] = value;
        });
        assert_names(&sentence, expected);
    }
    let sentence = configured("gptq_v2", |config| {
        config.clone_from(&base);
        (config["packing_format"], config["sym"]) = (Value::Null, json!(false));
    });
    assert_names(&sentence, &["`quantization_config.packing_format` is missing"]);
}

/// Loads a fixture whose quantization_config was edited.
fn taken(name: &str, edit: impl FnOnce(&mut Value)) {
    let folder = copy(&quantized(name));
    set_config(folder.path(), |config| edit(&mut config["quantization_config"]));
    load(folder.path(), None).unwrap();
}

#[test]
fn other_ways_of_saying_the_same_are_taken() {
    for (method, packing) in [
        ("auto-round", json!("auto_round:auto_gptq")),
        ("auto-round", json!("auto_round")),
        ("intel/auto-round", Value::Null),
    ] {
        taken("gptq_v2", |config| {
            *config = json!({
                "quant_method": method, "packing_format": packing, "bits": 4, "group_size": -1, "sym": true,
                "backend": "auto_round:exllamav2",
            });
        });
    }
    // Symmetric, with the zero points that are written in any case.
    taken("awq", |config| {
        (config["zero_point"], config["provider"], config["iters"]) =
            (json!(false), json!("auto-round"), json!(200));
    });
    taken("modelopt_nvfp4", |config| config["quant_algo"] = json!("W4A16_NVFP4"));
    taken("modelopt_nvfp4", |config| {
        (config["quant_algo"], config["pre_quant_scale"]) = (json!("NVFP4_AWQ"), json!(true));
    });
}

#[test]
fn options_that_change_nothing_are_taken() {
    let folder = copy(&quantized("gptq_v2"));
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let more = json!({"method": "gptq", "format": "gptq_v2", "pack_dtype": "int32", "dynamic": {"-:.*lm_head": {}}, "rotation": null});
    let options = config["quantization_config"].as_object_mut().unwrap();
    options.extend(more.as_object().unwrap().clone());
    fs::write(&path, config.to_string()).unwrap();
    load(folder.path(), None).unwrap();
    // How somebody else's KV cache is quantized, and the scales of that.
    let folder = copy(&quantized("ct_w4a16"));
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"]["kv_cache_scheme"] = json!({"num_bits": 8, "type": "float"});
    fs::write(&path, config.to_string()).unwrap();
    let mut file = File::read(&folder.path().join("model.safetensors"));
    for name in ["self_attn.k_scale", "self_attn.v_scale"] {
        let scale = Stored { dtype: "BF16".to_owned(), shape: vec![1], bytes: vec![0, 0x3f] };
        file.tensors.insert(format!("model.layers.0.{name}"), scale);
    }
    file.write();
    load(folder.path(), None).unwrap();
}

#[test]
fn options_of_a_group_are_named() {
    let weights = |field: &'static str, value: Value| {
        move |config: &mut Value| config["config_groups"]["group_0"]["weights"][field] = value
    };
    assert_names(
        &configured("ct_w4a16", weights("num_bits", json!(3))),
        &["3 bits", "group_0.weights.num_bits"],
    );
    assert_names(&configured("ct_w4a16", weights("type", json!("float"))), &["`pack-quantized`"]);
    assert_names(&configured("ct_w4a16", weights("strategy", json!("tensor_group"))), &["`tensor_group`"]);
    assert_names(&configured("ct_w4a16", weights("group_size", Value::Null)), &["group_size` is missing"]);
    assert_names(&configured("ct_w4a16", weights("dynamic", json!(true))), &["while running"]);
    assert_names(
        &configured("ct_w4a16", weights("actorder", json!("group"))),
        &["`model.layers.0.self_attn.q_proj.weight_g_idx`"],
    );
    assert_names(
        &configured("ct_w8a8", weights("symmetric", json!(false))),
        &["int-quantized", "zero points"],
    );
    assert_names(&configured("ct_mxfp4", weights("group_size", json!(64))), &["MXFP4", "32"]);
    assert_names(&configured("ct_nvfp4", weights("group_size", json!(32))), &["NVFP4", "16"]);
    assert_names(
        &configured("ct_nvfp4", weights("strategy", json!("group"))),
        &["NVFP4", "scale of the matrix"],
    );
    let group = |field: &'static str, value: Value| {
        move |config: &mut Value| config["config_groups"]["group_0"][field] = value
    };
    assert_names(&configured("ct_w8a8", group("output_activations", json!({"num_bits": 8}))), &["outputs"]);
    assert_names(
        &configured("ct_w8a8", group("input_activations", json!({"num_bits": 4}))),
        &["activations of 4 bits"],
    );
    assert_names(
        &configured("ct_w8a8", group("targets", json!(["re:.*mlp.*"]))),
        &["q_proj.weight", "no group"],
    );
    // Two groups, equally close, that differ.
    let sentence =
        configured("ct_w4a16", |config| config["config_groups"]["group_1"]["targets"] = json!(["Linear"]));
    assert_names(&sentence, &["q_proj.weight_packed", "two groups"]);
}

const DOWN: &str = "model.layers.0.mlp.down_proj";

/// A fixture, a part of its down projection, what is done to it, and what the refusal names.
type Edit = (&'static str, &'static str, fn(&mut Stored), &'static [&'static str]);

#[test]
fn values_that_cannot_be_held_are_named() {
    let edits: Vec<Edit> = vec![
        ("fp8_block", "weight", |part| part.bytes[200] = 0x7f, &["NaN", "row 1"]),
        ("fp8_tensor", "weight", |part| part.bytes[0] = 0xff, &["NaN", "row 0"]),
        ("ct_fp8", "weight", |part| *part.bytes.last_mut().unwrap() = 0xff, &["NaN", "row 127"]),
        ("ct_mxfp4", "weight_scale", |part| part.bytes[3] = 255, &["NaN", "255"]),
        ("ct_nvfp4", "weight_scale", |part| part.bytes[3] = 0x7f, &["scale NaN"]),
        ("modelopt_nvfp4", "weight_scale", |part| part.bytes[3] = 0xff, &["scale NaN"]),
        ("awq", "scales", |part| part.bytes[..2].copy_from_slice(&[0x00, 0x7c]), &["scale inf"]),
        ("awq", "scales", |part| part.bytes[..2].copy_from_slice(&[0x01, 0x7e]), &["scale NaN"]),
        ("gptq_v2", "qzeros", |part| part.bytes[9] = 0x77, &["zero points", "all 8"]),
        ("gptq_8bit", "qzeros", |part| part.bytes[9] = 0, &["zero points", "all 127 or all 128"]),
        ("gptq_act_order", "g_idx", |part| part.bytes[4] = 5, &["column 1", "group 5", "there are 5"]),
        ("gptq_act_order", "g_idx", |part| part.bytes[7] = 0x80, &["column 1", "group -"]),
        (
            "gptq_act_order",
            "g_idx",
            |part| part.bytes[0] = (part.bytes[0] + 1) % 5,
            &["gives group", "no multiple of 32"],
        ),
        ("ct_w4a16", "weight_shape", |part| part.bytes[0] ^= 1, &["says [129, 256]", "[128, 256]"]),
    ];
    for (name, part, edit, expected) in edits {
        let tensor = format!("{DOWN}.{part}");
        let sentence = stored(name, |file| edit(file.get(&tensor)));
        assert_names(&sentence, &["model.safetensors", &format!("`{tensor}`")]);
        assert_names(&sentence, expected);
    }
    // A number for all scales that makes them too large, and one that makes them too small.
    let scales = format!("{DOWN}.weight_scale");
    let sentence =
        stored("ct_nvfp4", |file| file.get(&format!("{DOWN}.weight_global_scale")).bytes = vec![0; 4]);
    assert_names(&sentence, &[&format!("`{scales}`"), "scale inf"]);
    let sentence = stored("modelopt_nvfp4", |file| {
        // 9 times the smallest f32.
        file.get(&scales).bytes.fill(0x51);
        file.get(&format!("{DOWN}.weight_scale_2")).bytes = f32::from_bits(1).to_le_bytes().to_vec();
    });
    assert_names(&sentence, &[&format!("`{scales}`"), "too small"]);
}

#[test]
fn parts_that_are_missing_or_of_another_kind_are_named() {
    for (name, part) in [
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("gptq_act_order", "g_idx"),
        ("gptq_v2", "qzeros"),
        ("ct_w4a16", "weight_shape"),
        ("ct_w4a16", "weight_scale"),
        ("ct_w4a16_order", "weight_zero_point"),
        ("ct_fp8", "weight_scale"),
        ("ct_mxfp4", "weight_scale"),
        ("ct_nvfp4", "weight_global_scale"),
        ("modelopt_nvfp4", "weight_scale"),
        ("modelopt_nvfp4", "weight_scale_2"),
        ("fp8_block", "weight_scale_inv"),
        ("fp8_tensor", "weight_scale"),
    ] {
        let tensor = format!("{DOWN}.{part}");
        let sentence = stored(name, |file| assert!(file.tensors.remove(&tensor).is_some()));
        assert_names(&sentence, &[&format!("`{tensor}` is missing")]);
        // One row less: another shape.
        let sentence = stored(name, |file| {
            let part = file.get(&tensor);
            let elements: usize = part.shape.iter().product();
            let size = part.bytes.len() / elements;
            part.shape = vec![elements + 1];
            part.bytes.extend(vec![0; size]);
        });
        assert_names(&sentence, &["model.safetensors", &format!("`{tensor}` has shape"), "expected"]);
        let sentence = stored(name, |file| {
            let part = file.get(&tensor);
            (part.dtype, part.shape) = ("BOOL".to_owned(), vec![part.bytes.len()]);
        });
        assert_names(&sentence, &["model.safetensors", &format!("`{tensor}` has dtype BOOL"), "expected"]);
    }
}

#[test]
fn parts_that_no_scheme_has_are_named() {
    let add = |file: &mut File, name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
        file.tensors
            .insert(name.to_owned(), Stored { dtype: dtype.to_owned(), shape: shape.to_vec(), bytes });
    };
    for (name, tensor) in [
        ("awq", "model.layers.0.mlp.down_proj.g_idx"),
        ("ct_w4a16", "model.layers.0.mlp.down_proj.weight_global_scale"),
        ("gptq_8bit", "lm_head.perm"),
        // AWQ's smoothing, where it is no part of other weights.
        ("modelopt_nvfp4", "model.layers.0.mlp.down_proj.pre_quant_scale"),
    ] {
        let sentence = stored(name, |file| {
            add(file, tensor, "F32", &[1], vec![0; 4]);
            // A bias of zeros is harmless, anything else is not.
            add(file, &format!("{DOWN}.bias"), "F32", &[1], vec![0; 4]);
        });
        assert_names(&sentence, &["model.safetensors", &format!("`{tensor}`"), "quantization_config"]);
    }
    let bias = format!("{DOWN}.bias");
    let sentence = stored("gptq_v2", |file| file.get(&bias).bytes[1] = 0x3c);
    assert_names(&sentence, &[&format!("`{bias}`"), "mistral decoder"]);
    let plain = format!("{DOWN}.weight");
    let sentence = stored("gptq_v2", |file| add(file, &plain, "F32", &[1], vec![0; 4]));
    assert_names(&sentence, &[&format!("`{DOWN}.qweight`"), &format!("`{plain}`"), "not clear"]);
    let zero = format!("{DOWN}.weight_zero_point");
    let sentence = stored("ct_fp8", |file| add(file, &zero, "I8", &[2], vec![0, 3]));
    assert_names(&sentence, &[&format!("`{zero}`"), "symmetric"]);
    // Quantized weights without a word about them.
    let folder = copy(&quantized("fp8_tensor"));
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = Value::Null;
    fs::write(&path, config.to_string()).unwrap();
    let sentence = load(folder.path(), None).unwrap_err().to_string();
    assert_names(&sentence, &["q_proj.weight", "F8_E4M3", "quantization_config"]);
    let sentence = stored("fp8_tensor", |file| file.get(&plain).dtype = "F8_E5M2".to_owned());
    assert_names(&sentence, &[&format!("`{plain}`"), "F8_E5M2", "expected F8_E4M3"]);
}

#[test]
fn experts_that_do_not_fit_are_named() {
    let blocks = "model.layers.1.mlp.experts.gate_up_proj_blocks";
    let scales = "model.layers.0.mlp.experts.down_proj_scales";
    assert_names(
        &stored("gpt_oss_mxfp4", |file| file.get(scales).bytes[3] = 255),
        &["model.safetensors", &format!("`{scales}`"), "NaN"],
    );
    assert_names(
        &stored("gpt_oss_mxfp4", |file| drop(file.tensors.remove(scales))),
        &[&format!("`{scales}` is missing")],
    );
    assert_names(
        &stored("gpt_oss_mxfp4", |file| file.get(blocks).shape = vec![4, 64, 1, 32]),
        &[&format!("`{blocks}` has shape [4, 64, 1, 32]"), "[4, 64, 2, 16]"],
    );
    assert_names(
        &stored("gpt_oss_mxfp4", |file| file.get(blocks).dtype = "I8".to_owned()),
        &[&format!("`{blocks}` has dtype I8"), "expected U8"],
    );
    assert_names(
        &configured("gpt_oss_mxfp4", |config| *config = Value::Null),
        &["experts.gate_up_proj_blocks`", "MXFP4", "quantization_config"],
    );
    assert_names(
        &configured("gpt_oss_mxfp4", |config| config["group_size"] = json!(16)),
        &["`quantization_config.group_size`"],
    );
}

#[test]
fn stacked_parts_in_different_orders_are_named() {
    let k = "model.layers.0.self_attn.k_proj";
    let sentence = stored("gptq_act_order", |file| file.get(&format!("{k}.g_idx")).bytes.rotate_left(4));
    // Rotated by a column: groups stay whole, the order is another.
    assert_names(
        &sentence,
        &["model.safetensors", &format!("`{k}.qweight`"), "another order", "q_proj.qweight"],
    );
}

#[test]
fn symmetric_zero_points_may_be_written_either_way() {
    // GPTQModel has written 8 and called it "gptq", whose readers add one.
    let folder = copy(&quantized("gptq_v2"));
    let path = folder.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"gptq_v2\"", "\"gptq\"");
    fs::write(&path, text).unwrap();
    load(folder.path(), None).unwrap();
    let mut file = File::read(&folder.path().join("model.safetensors"));
    file.tensors
        .iter_mut()
        .filter(|(name, _)| name.ends_with("qzeros"))
        .for_each(|(_, part)| part.bytes.fill(0x77));
    file.write();
    load(folder.path(), None).unwrap();
}

/// A damaged configuration or file: any outcome but a panic.
#[test]
fn damaged_checkpoints_load_or_refuse() {
    let mut random = Random(7);
    let (mut loaded, mut refused) = (0, 0);
    for name in QUANTIZED.iter().filter(|name| **name != "ct_w8a8") {
        let folder = copy(&quantized(name));
        let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
        let weights = fs::read(folder.path().join("model.safetensors")).unwrap();
        for round in 0..14 {
            let (mut text, mut bytes) = (config.clone(), weights.clone());
            if round % 2 == 0 {
                // A number of the quantization, replaced.
                let from = text.find("quantization_config").unwrap();
                let digits: Vec<usize> = text[from..]
                    .char_indices()
                    .filter(|(_, c)| c.is_ascii_digit())
                    .map(|(at, _)| from + at)
                    .collect();
                let at = digits[random.below(digits.len())];
                let hostile = ["0", "-1", "1e99", "18446744073709551615", "33", "null", "[]", "1048576"];
                text.replace_range(at..=at, hostile[random.below(hostile.len())]);
            } else {
                for _ in 0..3 {
                    let header = 8 + random.below(3000);
                    let at = if random.below(2) == 0 { header } else { random.below(bytes.len()) };
                    bytes[at] = random.next() as u8;
                }
            }
            fs::write(folder.path().join("config.json"), text).unwrap();
            fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
            match load(folder.path(), Some(32)) {
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    refused += 1;
                }
                Ok(_) => {
                    let checkpoint = Checkpoint::open(folder.path()).unwrap();
                    Runner::load(&checkpoint, ReferenceBackend::new(), Some(32)).forward(&[1, 2, 3], &[2]);
                    loaded += 1;
                }
            }
        }
    }
    assert!(loaded > 10 && refused > 30, "{loaded} loaded, {refused} refused");
}
