//! EAGLE-3 heads: what is read of each form, what is refused and in which words, and what a model does more for one.

mod common;

use std::path::Path;

use common::tensors::{File, Stored};
use folio_model::Checkpoint;
use folio_model::decoder::{Tap, Taps, program};
use folio_model::draft_head::DraftHead;
use folio_model::eagle::{Head, is_head};
use folio_model::program::{Buf, MatrixId, Op, VectorId};
use folio_model::testing::fixture;
use folio_model::testing::heads::{HEADS, head, target};
use folio_model::weights::{Load, WeightSpec, weight_specs};
use serde_json::{Value, json};

fn open(folder: &Path, target: &str) -> Result<Head, String> {
    let checkpoint = Checkpoint::open(fixture(target)).expect("a fixture");
    Head::open(folder, &checkpoint).map_err(|error| error.to_string())
}

/// Why a head is refused after such changes.
fn refusal(name: &str, config: impl FnOnce(&mut Value), tensors: impl FnOnce(&mut File)) -> String {
    refused_for(&target(name), name, config, tensors)
}

fn refused_for(
    target: &str,
    name: &str,
    config: impl FnOnce(&mut Value),
    tensors: impl FnOnce(&mut File),
) -> String {
    let folder = common::copy(&head(name));
    let path = folder.path().join("config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config(&mut settings);
    std::fs::write(&path, settings.to_string()).unwrap();
    let mut file = File::read(&folder.path().join("model.safetensors"));
    tensors(&mut file);
    file.write();
    open(folder.path(), target).err().unwrap_or_else(|| panic!("{name}: nothing is wrong"))
}

fn as_is(_: &mut File) {}

fn config_as_is(_: &mut Value) {}

fn assert_names(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{sentence:?} does not name {part:?}");
    }
}

#[test]
fn heads_are_told_from_models() {
    for name in HEADS {
        assert!(is_head(&std::fs::read(head(name).join("config.json")).unwrap()), "{name}");
        assert!(!is_head(&std::fs::read(fixture(&target(name)).join("config.json")).unwrap()), "{name}");
    }
    assert!(!is_head(b"[") && !is_head(b"{}"));
}

#[test]
fn no_head_is_forgotten() {
    let listed = std::fs::read_dir(head("")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut listed: Vec<_> = listed.map(|name| name.into_string().unwrap()).collect();
    listed.sort();
    let mut known = HEADS.to_vec();
    known.sort_unstable();
    assert_eq!(listed, known);
}

/// Bytes of the matrices in a file whose names are not among these.
fn matrices_but(folder: &Path, without: &[&str]) -> u64 {
    let file = File::read(&folder.join("model.safetensors"));
    let mut of = file.tensors.iter().filter(|(_, stored)| stored.shape.len() > 1).collect::<Vec<_>>();
    of.retain(|(name, _)| !without.contains(&name.as_str()));
    of.iter().map(|(_, stored)| stored.bytes.len() as u64).sum()
}

#[test]
fn a_row_reads_all_but_embeddings_and_what_the_model_computes() {
    for name in HEADS {
        let folder = head(name);
        let checkpoint = Checkpoint::open(fixture(&target(name))).expect("a fixture");
        let own = matrices_but(&folder, &["fc.weight", "embed_tokens.weight"]);
        let file = File::read(&folder.join("model.safetensors"));
        let output = match file.tensors.contains_key("lm_head.weight") {
            true => 0,
            false => {
                let mut model = File::read(&fixture(&target(name)).join("model.safetensors"));
                let tied = checkpoint.config().tied;
                let table = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
                model.get(table).bytes.len() as u64
            }
        };
        let head = Head::open(&folder, &checkpoint).expect("sound");
        assert_eq!(head.bytes_of_a_row(&checkpoint).expect("all there"), own + output, "{name}");
    }
}

#[test]
fn layers_are_counted_by_inputs_or_outputs_as_the_form_has_it() {
    let taps = |name: &str| open(&head(name), &target(name)).expect("a head").taps().to_vec();
    assert_eq!(taps("authors"), [2, 2, 2], "2, 5 / 2 and 5 - 3 of 5");
    assert_eq!(taps("speculators"), [0, 1, 2], "inputs, as stated");
    assert_eq!(taps("sglang"), [1, 2], "outputs 0 and 1");
    const IDS: &str = "eagle_aux_hidden_state_layer_ids";
    let what = refusal("speculators", |config| config[IDS] = json!([0, 1, 3]), as_is);
    assert_names(&what, &[IDS, "layer 3", "inputs", "the model has 2"]);
    let what = refusal("sglang", |config| config["eagle_config"][IDS] = json!([0, 2]), as_is);
    assert_names(&what, &["eagle_config.", IDS, "layer 2", "outputs", "the model has 2"]);
    let what = refusal("sglang", |config| config["eagle_config"] = json!({}), as_is);
    assert_names(&what, &[IDS, "missing", "2 layers", "at least 4"]);
}

#[test]
fn a_head_of_another_model_is_refused_with_both_numbers() {
    // llama3 has a hidden size of 64, the head is for one of 48; then a vocabulary.
    let what = refused_for("llama3", "sglang", config_as_is, as_is);
    assert_names(&what, &["hidden_size", "48", "64"]);
    let what = refusal("authors", |config| config["vocab_size"] = 200.into(), as_is);
    assert_names(&what, &["vocab_size", "200", "199"]);
    let what = refusal("speculators", |config| config["target_hidden_size"] = 48.into(), as_is);
    assert_names(&what, &["target_hidden_size", "48", "64"]);
    let what = refused_for("qwen3", "speculators", config_as_is, as_is);
    assert_names(&what, &["fc.weight", "[40, 192]", "[40, 144]"]);
    let what = refusal("authors", |config| config["head_dim"] = 16.into(), as_is);
    assert_names(&what, &["self_attn.q_proj.weight", "[48, 96]", "[64, 96]"]);
    let without = |file: &mut File| drop(file.tensors.remove("lm_head.weight"));
    let what = refusal("authors", config_as_is, without);
    assert_names(&what, &["draft_vocab_size", "64", "199", "no output matrix"]);
}

#[test]
fn a_vocabulary_that_cannot_be_is_refused() {
    let offsets = |edit: fn(&mut [i64])| {
        move |file: &mut File| {
            let stored = file.get("d2t");
            let mut values: Vec<i64> =
                stored.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
            edit(&mut values);
            stored.bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        }
    };
    let what = refusal("authors", config_as_is, offsets(|values| values[63] = 199 - 63));
    assert_names(&what, &["`d2t`", "63 + 136", "199"]);
    let what = refusal("authors", config_as_is, offsets(|values| values[1] = values[0] - 1));
    assert_names(&what, &["`d2t`", "two tokens"]);
    let what = refusal("authors", config_as_is, |file| file.get("t2d").bytes.fill(1));
    assert_names(&what, &["`t2d`", "199", "64"]);
    let what = refusal("authors", config_as_is, |file| drop(file.tensors.remove("d2t")));
    assert_names(&what, &["`d2t`", "64", "199"]);
    let what = refusal("authors", |config| config["draft_vocab_size"] = 63.into(), as_is);
    assert_names(&what, &["d2t", "[64]", "[63]"]);
}

#[test]
fn what_is_not_served_is_named() {
    let what = refusal("authors", |config| config["num_hidden_layers"] = 2.into(), as_is);
    assert_names(&what, &["2 layers", "num_hidden_layers", "EAGLE-3 heads of one layer"]);
    let what = refusal("speculators", |config| config["norm_before_fc"] = true.into(), as_is);
    assert_names(&what, &["`fc_norm`", "`norm_before_fc`"]);
    let what = refusal("authors", |config| config["norm_before_fc"] = true.into(), as_is);
    assert_names(&what, &["input_norm.weight"]);
    let off = |config: &mut Value| config["eagle_config"]["use_aux_hidden_state"] = false.into();
    assert_names(&refusal("sglang", off, as_is), &["use_aux_hidden_state"]);
    let windowed = |config: &mut Value| {
        let layer = &mut config["transformer_layer_config"];
        (layer["layer_types"], layer["sliding_window"]) = (json!(["sliding_attention"]), 16.into());
    };
    let what = refusal("speculators", windowed, as_is);
    assert_names(&what, &["sliding_attention", "transformer_layer_config.layer_types", "all positions"]);
    let what = refusal("speculators", |config| config["speculators_model_type"] = "dflash".into(), as_is);
    assert_names(&what, &["dflash", "speculators_model_type"]);
    let more = |file: &mut File| {
        let tensor = Stored { dtype: "F16".to_owned(), shape: vec![12], bytes: vec![0; 24] };
        file.tensors.insert("midlayer.self_attn.q_norm.weight".to_owned(), tensor);
    };
    assert_names(&refusal("authors", config_as_is, more), &["q_norm.weight", "not part of an EAGLE-3 head"]);
    let what =
        refusal("authors", config_as_is, |file| drop(file.tensors.remove("midlayer.mlp.up_proj.weight")));
    assert_names(&what, &["midlayer.mlp.up_proj.weight", "missing"]);
}

#[test]
fn pickled_weights_are_refused_with_the_way_out() {
    let folder = common::copy(&head("authors"));
    std::fs::rename(folder.path().join("model.safetensors"), folder.path().join("pytorch_model.bin"))
        .unwrap();
    let what = open(folder.path(), &target("authors")).err().expect("refused");
    assert_names(&what, &["pytorch_model.bin", "convert", "model.safetensors", "save_file"]);
}

/// Gives ids.
#[derive(Default)]
struct Ids(u32);

impl Load<()> for Ids {
    fn matrix(&mut self, _: &WeightSpec) -> Result<MatrixId, ()> {
        self.0 += 1;
        Ok(MatrixId(self.0))
    }

    fn vector(&mut self, _: &WeightSpec) -> Result<VectorId, ()> {
        self.0 += 1;
        Ok(VectorId(self.0))
    }
}

/// What is tapped stands between the model's own operations, which are the same; and without taps there is nothing else.
#[test]
fn taps_change_nothing_of_the_model() {
    for name in ["llama3", "gemma2", "gpt_oss"] {
        let checkpoint = Checkpoint::open(fixture(name)).expect("a fixture");
        let config = checkpoint.config();
        let weights = weight_specs(config).try_map(&mut Ids::default()).expect("ids");
        let encoding = folio_model::quant::Encoding::Plain(folio_model::backend::DType::BF16);
        let plain = program(config, &weights, 64, encoding, None);
        assert_eq!((plain.features, plain.input_width()), (None, 0));
        let tap = |before, norm| Tap { before, norm, matrix: MatrixId(900 + before as u32) };
        let of = vec![tap(0, None), tap(1, Some((VectorId(7), 0.5))), tap(config.layers, None)];
        let taps = Taps::Products { width: 24, of };
        let tapped = program(config, &weights, 64, encoding, Some(&taps));
        let features = tapped.features.expect("features");
        assert_eq!(tapped.buffers[features.0 as usize], 24);
        assert!(tapped.buffers.starts_with(&plain.buffers));
        let of_taps = |op: &Op| match op {
            Op::Linear { out, .. } => *out == features,
            op => op.writes().0 as usize == plain.buffers.len(),
        };
        let (more, same): (Vec<_>, Vec<_>) = tapped.body.into_iter().partition(of_taps);
        assert_eq!(same, plain.body, "{name}");
        let adds: Vec<bool> = more
            .iter()
            .filter_map(|op| match op {
                Op::Linear { add, .. } => Some(*add),
                _ => None,
            })
            .collect();
        assert_eq!((more.len(), adds), (6, vec![false, true, true]), "{name}");
        let (width, before) = (24, vec![2, 0, 0]);
        let taps = Taps::Product { width, before, norm: (VectorId(7), 0.5), matrix: MatrixId(900) };
        let tapped = program(config, &weights, 64, encoding, Some(&taps));
        let (features, x) = (tapped.features.expect("features"), plain.head.x);
        let (more, same): (Vec<_>, Vec<_>) =
            tapped.body.into_iter().partition(|op| op.writes().0 as usize >= plain.buffers.len());
        assert_eq!(same, plain.body, "{name}");
        let (multiplied, gathered) = (Buf(features.0 - 1), Buf(features.0 + 1));
        let place = |at: usize| Op::Place { x, out: gathered, first: at * config.hidden };
        let norm = Op::RmsNorm { x: gathered, weight: VectorId(7), eps: 0.5, out: multiplied };
        let product =
            Op::Linear { x: multiplied, weight: MatrixId(900), bias: None, out: features, add: false };
        assert_eq!(more, [place(1), place(2), place(0), norm, product], "{name}");
        for normed in [false, true] {
            let mut last = program(config, &weights, 64, encoding, Some(&Taps::Last { normed }));
            let features = last.features.expect("features");
            let norm = normed.then(|| last.body.pop().expect("operations"));
            assert_eq!(last.body, plain.body, "{name}");
            let plain = plain.head.clone();
            let (x, weight, eps) = (plain.x, plain.norm, plain.eps);
            let expected = normed.then_some(Op::RmsNorm { x, weight, eps, out: features });
            assert_eq!((norm, features == x), (expected, !normed), "{name}");
        }
    }
}
