//! MTP heads: what is read of each form, and what is refused in which words.

mod common;

use common::gguf::{on_disk, path_in};
use common::tensors::{File, Stored};
use folio_model::Checkpoint;
use folio_model::draft_head::DraftHead;
use folio_model::mtp::Head;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::gguf::{Writer, gguf_of};
use folio_model::testing::heads::{PUBLISHED_WITH_MTP, WITH_MTP, check_mtp_of, logits_of_mtp, with_mtp};
use folio_model::testing::{LOGIT_TOLERANCE, fixture, quantized};
use half::{bf16, f16};
use serde_json::Value;

/// A fixture after such changes.
fn opened(
    name: &str,
    config: impl FnOnce(&mut Value),
    tensors: impl FnOnce(&mut File),
) -> Result<Option<Head>, String> {
    let folder = common::copy(&with_mtp(name));
    let path = folder.path().join("config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config(&mut settings);
    std::fs::write(&path, settings.to_string()).unwrap();
    let mut file = File::read(&folder.path().join("model.safetensors"));
    tensors(&mut file);
    file.write();
    let checkpoint = Checkpoint::open(folder.path()).expect("a model");
    Head::open(&checkpoint).map_err(|error| error.to_string())
}

fn refusal(name: &str, tensors: impl FnOnce(&mut File)) -> String {
    match opened(name, |_| (), tensors) {
        Err(sentence) => sentence,
        Ok(_) => panic!("{name}: nothing is wrong"),
    }
}

fn assert_names(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{sentence:?} does not name {part:?}");
    }
}

#[test]
fn no_form_is_forgotten() {
    let listed = std::fs::read_dir(with_mtp("")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut listed: Vec<_> = listed.map(|name| name.into_string().unwrap()).collect();
    listed.sort();
    let mut known = [WITH_MTP, PUBLISHED_WITH_MTP].concat();
    known.sort_unstable();
    assert_eq!(listed, known);
    for name in known {
        let head = opened(name, |_| (), |_| ()).expect("sound").expect("a head");
        let hidden = Checkpoint::open(with_mtp(name)).expect("a model").config().hidden;
        assert_eq!(head.width(), hidden, "{name}");
    }
}

/// The layer behind the last one changes nothing of the model.
#[test]
fn a_model_is_the_same_with_its_head() {
    for name in PUBLISHED_WITH_MTP {
        assert_eq!(common::logits(&with_mtp(name)), common::logits(&fixture(name)), "{name}");
    }
}

/// As DeepSeek-V3's: a layer in blocks of FP8 like the model's, and a projection that is not. What is wrong with it keeps nobody from the model.
#[test]
fn a_head_is_quantized_as_its_model_is() {
    let with_head = |without: &str| {
        let folder = common::copy(&quantized("fp8_latent"));
        let mut file = File::read(&folder.path().join("model.safetensors"));
        let last = file.tensors.iter().filter_map(|(name, stored)| {
            let name = format!("model.layers.2.{}", name.strip_prefix("model.layers.1.")?);
            (name != without).then(|| (name, copied(stored)))
        });
        let last: Vec<_> = last.collect();
        file.tensors.extend(last);
        for (name, shape) in [
            ("eh_proj", vec![64, 128]),
            ("enorm", vec![64]),
            ("hnorm", vec![64]),
            ("shared_head.norm", vec![64]),
        ] {
            let bytes = vec![0; 2 * shape.iter().product::<usize>()];
            let tensor = Stored { dtype: "BF16".to_owned(), shape, bytes };
            file.tensors.insert(format!("model.layers.2.{name}.weight"), tensor);
        }
        file.write();
        common::load(folder.path(), None).expect("the model is sound");
        folder
    };
    let folder = with_head("");
    let target = Checkpoint::open(folder.path()).expect("a model");
    let head = Head::open(&target).expect("sound").expect("a head");
    head.load(&target, &mut ReferenceBackend::new(), &common::options(Some(64))).expect("it loads");

    let lost = "model.layers.2.self_attn.q_a_proj.weight_scale_inv";
    let folder = with_head(lost);
    let target = Checkpoint::open(folder.path()).expect("a model");
    let error = Head::open(&target).err().expect("refused").to_string();
    assert_names(&error, &["model.layers.2.", "not part of an MTP head"]);
}

#[test]
fn a_checkpoint_without_a_head_has_none_and_one_that_lost_it_is_refused() {
    let plain = Checkpoint::open(fixture("qwen3")).expect("a fixture");
    assert!(Head::open(&plain).expect("sound").is_none());
    for (name, field) in [("qwen", "mtp_num_hidden_layers"), ("deepseek", "num_nextn_predict_layers")] {
        let what = refusal(name, |file| {
            file.tensors.retain(|name, _| !name.starts_with("mtp.") && !name.starts_with("model.layers.2."));
        });
        assert_names(&what, &[field, "is 1", "0 tensors of an MTP head"]);
    }
    let none = opened(
        "qwen",
        |config| drop(config["mtp_num_hidden_layers"].take()),
        |file| file.tensors.retain(|name, _| !name.starts_with("mtp.")),
    );
    assert!(none.expect("sound").is_none());
}

#[test]
fn what_is_missing_or_too_much_is_named() {
    let what = refusal("qwen", |file| drop(file.tensors.remove("mtp.pre_fc_norm_hidden.weight")));
    assert_names(&what, &["mtp.pre_fc_norm_hidden.weight", "missing"]);
    let what = refusal("deepseek", |file| drop(file.tensors.remove("model.layers.2.mlp.up_proj.weight")));
    assert_names(&what, &["model.layers.2.mlp.up_proj.weight", "missing"]);
    let more = |name: &'static str| {
        move |file: &mut File| {
            let tensor = Stored { dtype: "BF16".to_owned(), shape: vec![12], bytes: vec![0; 24] };
            file.tensors.insert(name.to_owned(), tensor);
        }
    };
    for (name, tensor) in [
        ("qwen", "mtp.gate.weight"),
        ("deepseek", "model.layers.2.gate.weight"),
        ("mimo", "model.mtp_layers.0.gate.weight"),
    ] {
        assert_names(&refusal(name, more(tensor)), &[tensor, "not part of an MTP head", "qwen3 decoder"]);
    }
    for (name, tensor) in [
        ("qwen", "mtp.layers.1.input_layernorm.weight"),
        ("deepseek", "model.layers.3.input_layernorm.weight"),
        ("mimo", "model.mtp_layers.1.input_proj.weight"),
    ] {
        assert_names(&refusal(name, more(tensor)), &["more than one layer", tensor, "one layer"]);
    }
}

/// Nothing says which of the model's kinds of layers its head has.
#[test]
fn a_head_of_a_model_with_windows_is_refused() {
    let windowed = |config: &mut Value| {
        (config["use_sliding_window"], config["sliding_window"]) = (true.into(), 16.into());
        config["layer_types"] = serde_json::json!(["full_attention", "sliding_attention"]);
    };
    let what = opened("qwen", windowed, |_| ()).err().expect("refused");
    assert_names(&what, &["an MTP head", "a window", "attend to all positions"]);
}

#[test]
fn shapes_are_those_of_the_model() {
    let what = refusal("qwen", |file| file.get("mtp.fc.weight").shape = vec![96, 48]);
    assert_names(&what, &["mtp.fc.weight", "[96, 48]", "[48, 96]"]);
    let what =
        refusal("mimo", |file| file.get("model.mtp_layers.0.self_attn.k_proj.weight").shape = vec![48, 32]);
    assert_names(&what, &["model.mtp_layers.0.self_attn.k_proj.weight", "[48, 32]", "[32, 48]"]);
}

/// A fixture with its head as llama.cpp's converter writes it: the head's layer is counted among the model's.
fn as_gguf(name: &str, architecture: &str) -> Writer {
    let folder = common::copy(&with_mtp(name));
    let path = folder.path().join("config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let last = settings["num_hidden_layers"].as_u64().unwrap();
    settings["num_hidden_layers"] = (last + 1).into();
    if let Some(types) = settings.get_mut("layer_types").and_then(Value::as_array_mut) {
        types.push("full_attention".into());
    }
    std::fs::write(&path, settings.to_string()).unwrap();
    let mut file = File::read(&folder.path().join("model.safetensors"));
    let layer = format!("model.layers.{last}.");
    let tensors = std::mem::take(&mut file.tensors).into_iter();
    file.tensors = tensors.map(|(name, stored)| (name.replace("mtp.layers.0.", &layer), stored)).collect();
    file.write();
    let checkpoint = Checkpoint::open(folder.path()).expect("a model with a layer more");
    let mut writer = gguf_of(&checkpoint).u32(&format!("{architecture}.nextn_predict_layers"), 1);
    for (name, stored) in &file.tensors {
        let part = name.strip_prefix("mtp.").or(name.strip_prefix(&layer));
        let part = match part.and_then(|part| part.strip_suffix(".weight")) {
            Some("fc" | "eh_proj") => "eh_proj",
            Some("pre_fc_norm_embedding" | "enorm") => "enorm",
            Some("pre_fc_norm_hidden" | "hnorm") => "hnorm",
            Some("norm" | "shared_head.norm") => "shared_head_norm",
            Some("shared_head.head") => "shared_head_head",
            Some("embed_tokens") => "embed_tokens",
            _ => continue,
        };
        let name = format!("blk.{last}.nextn.{part}.weight");
        writer = match stored.shape.len() {
            1 => {
                // What is added to one is stored with the one.
                let value =
                    |half: &[u8; 2]| bf16::from_le_bytes(*half).to_f32() + checkpoint.config().norm_offset;
                let values = stored.bytes.as_chunks().0.iter().map(value);
                writer.tensor(
                    &name,
                    &stored.shape,
                    0,
                    &values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>(),
                )
            }
            _ => writer.tensor(&name, &stored.shape, 30, &stored.bytes),
        };
    }
    writer
}

/// Held to the same reference as the folders that they were.
#[test]
fn a_gguf_file_has_the_head_of_the_folder() {
    for (name, architecture) in [("qwen", "qwen3"), ("deepseek_v3", "deepseek2"), ("qwen3_next", "qwen3next")]
    {
        let disk = on_disk(&as_gguf(name, architecture).finish());
        let file = Checkpoint::open(path_in(&disk)).expect("a model");
        check_mtp_of(name, &file, ReferenceBackend::new, LOGIT_TOLERANCE);
    }
}

#[test]
fn a_projection_in_blocks_is_cut_between_them() {
    let codes: Vec<i8> = (0..32 * 64).map(|i: i32| (i * 37 % 251 - 125) as i8).collect();
    let with = |kind: u32, bytes: Vec<u8>| {
        let mut writer = as_gguf("qwen3_next", "qwen3next");
        let mut tensors = writer.tensors.iter_mut();
        let tensor = tensors.find(|(name, ..)| name.ends_with(".nextn.eh_proj.weight")).expect("a head");
        (tensor.2, tensor.3) = (kind, bytes);
        let disk = on_disk(&writer.finish());
        logits_of_mtp(&Checkpoint::open(path_in(&disk)).expect("a model"), ReferenceBackend::new())
    };
    let d = f16::from_f32(0.01);
    let blocks = codes
        .chunks(32)
        .flat_map(|codes| d.to_le_bytes().into_iter().chain(codes.iter().map(|code| *code as u8)));
    let values = codes.iter().flat_map(|code| (d.to_f32() * f32::from(*code)).to_le_bytes());
    assert_eq!(with(8, blocks.collect()), with(0, values.collect()));

    // 96 columns are three blocks, and halves of 48 are not whole ones.
    let mut writer = as_gguf("qwen", "qwen3");
    let mut tensors = writer.tensors.iter_mut();
    let tensor = tensors.find(|(name, ..)| name.ends_with(".nextn.eh_proj.weight")).expect("a head");
    (tensor.2, tensor.3) = (8, vec![0; 48 * 3 * 34]);
    let disk = on_disk(&writer.finish());
    let error = Head::open(&Checkpoint::open(path_in(&disk)).expect("a model")).err().expect("refused");
    assert_names(&error.to_string(), &["nextn.eh_proj.weight", "Q8_0", "halves"]);
}

fn copied(stored: &Stored) -> Stored {
    Stored { dtype: stored.dtype.clone(), shape: stored.shape.clone(), bytes: stored.bytes.clone() }
}

/// Bytes of the matrices whose names begin so and do not end so.
fn matrices(file: &File, prefix: &str, but: &str) -> u64 {
    let of = file.tensors.iter().filter(|(name, _)| name.starts_with(prefix) && !name.ends_with(but));
    of.filter(|(_, stored)| stored.shape.len() > 1).map(|(_, stored)| stored.bytes.len() as u64).sum()
}

#[test]
fn a_row_reads_all_but_embeddings_and_experts_that_it_does_not_choose() {
    let table = "model.embed_tokens.weight";
    for (name, prefix, output) in [
        ("qwen", "mtp.", table),
        ("deepseek", "model.layers.2.", "an output of its own"),
        ("mimo", "model.mtp_layers.", table),
    ] {
        let file = File::read(&with_mtp(name).join("model.safetensors"));
        let own = matrices(&file, prefix, "embed_tokens.weight");
        let output = file.tensors.get(output).map_or(0, |stored| stored.bytes.len() as u64);
        let target = Checkpoint::open(with_mtp(name)).expect("a model");
        let head = Head::open(&target).expect("sound").expect("a head");
        assert_eq!(head.bytes_of_a_row(&target).expect("all there"), own + output, "{name}");
    }
    // The last layer of a mixture once more; a row chooses three of its eight experts.
    let folder = common::copy(&fixture("qwen3_moe"));
    let mut file = File::read(&folder.path().join("model.safetensors"));
    let last = file.tensors.iter().filter_map(|(name, stored)| {
        Some((format!("mtp.layers.0.{}", name.strip_prefix("model.layers.1.")?), copied(stored)))
    });
    let last: Vec<_> = last.collect();
    file.tensors.extend(last);
    for (name, shape) in [
        ("pre_fc_norm_embedding", vec![32]),
        ("pre_fc_norm_hidden", vec![32]),
        ("norm", vec![32]),
        ("fc", vec![32, 64]),
    ] {
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        file.tensors.insert(format!("mtp.{name}.weight"), Stored { dtype: "BF16".to_owned(), shape, bytes });
    }
    file.write();
    let target = Checkpoint::open(folder.path()).expect("a model");
    let head = Head::open(&target).expect("sound").expect("a head");
    let experts = matrices(&file, "mtp.layers.0.mlp.experts.", "bias");
    let all = matrices(&file, "mtp.", "bias") + matrices(&file, "lm_head.", "bias");
    assert!(experts > 0);
    assert_eq!(head.bytes_of_a_row(&target).expect("all there"), all - experts * 5 / 8);
}
