//! MTP heads: what is read of each form, and what is refused in which words.

mod common;

use common::tensors::{File, Stored};
use folio_model::Checkpoint;
use folio_model::draft_head::DraftHead;
use folio_model::mtp::Head;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::heads::{PUBLISHED_WITH_MTP, WITH_MTP, with_mtp};
use folio_model::testing::{fixture, quantized};
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

#[test]
fn shapes_are_those_of_the_model() {
    let what = refusal("qwen", |file| file.get("mtp.fc.weight").shape = vec![96, 48]);
    assert_names(&what, &["mtp.fc.weight", "[96, 48]", "[48, 96]"]);
    let what =
        refusal("mimo", |file| file.get("model.mtp_layers.0.self_attn.k_proj.weight").shape = vec![48, 32]);
    assert_names(&what, &["model.mtp_layers.0.self_attn.k_proj.weight", "[48, 32]", "[32, 48]"]);
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
