//! Adapters compute what PEFT computes, and what is no adapter of the model is refused by a sentence.

mod common;

use std::path::Path;

use common::tensors::File;
use common::{Random, copy, mutate, perturbed};
use folio_model::adapter::{Adapter, AdapterLimits};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{
    ADAPTERS, LOGIT_TOLERANCE, Runner, adapted, adapter, check_adapter, relative_difference,
};
use folio_model::{Checkpoint, ModelError};
use serde_json::{Value, json};

const LIMITS: AdapterLimits = AdapterLimits { rank: 64, bytes: 1 << 20 };

#[test]
fn every_adapter_matches_peft() {
    let on_disk = std::fs::read_dir(adapter("")).unwrap().count();
    assert_eq!(on_disk, ADAPTERS.len());
    for name in ADAPTERS {
        let parity = check_adapter(name, ReferenceBackend::new);
        println!("{name}: logits within {:.1e}, {} greedy tokens equal", parity.worst, parity.greedy_tokens);
    }
}

fn runner(base: &Path) -> Runner<ReferenceBackend> {
    let checkpoint = Checkpoint::open(base).unwrap();
    Runner::load(&checkpoint, ReferenceBackend::new(), None)
}

fn read(name: &str, folder: &Path, limits: AdapterLimits) -> Result<Adapter, ModelError> {
    Adapter::read(folder, &runner(&adapted(name)).model.targets, limits)
}

/// A copy of an adapter whose configuration has other fields.
fn with_fields(name: &str, fields: &[(&str, Value)]) -> tempfile::TempDir {
    let folder = copy(&adapter(name));
    let path = folder.path().join("adapter_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (field, value) in fields {
        config[*field] = value.clone();
    }
    std::fs::write(path, config.to_string()).unwrap();
    folder
}

#[test]
fn the_digest_is_of_what_is_computed() {
    let digest = |folder: &Path| *read("llama3", folder, LIMITS).unwrap().digest();
    let own = digest(&adapter("llama3"));
    let copied = with_fields(
        "llama3",
        &[("base_model_name_or_path", json!("elsewhere")), ("lora_dropout", json!(0.1))],
    );
    assert_eq!(digest(copied.path()), own, "names and places are no part of it");
    for (field, value) in [
        ("lora_alpha", json!(7)),
        ("use_rslora", json!(true)),
        ("alpha_pattern", json!({"layers.1.mlp.down_proj": 7})),
    ] {
        assert_ne!(digest(with_fields("llama3", &[(field, value)]).path()), own, "{field}");
    }
    assert_ne!(read("llama3_ranks", &adapter("llama3_ranks"), LIMITS).unwrap().digest(), &own);
}

#[test]
fn fields_that_change_what_is_computed_are_refused_by_name() {
    for (field, value, words) in [
        ("peft_type", json!("LOHA"), "expected \"LORA\""),
        ("peft_type", Value::Null, "missing"),
        ("r", json!(5), "whose tensors have rank 4"),
        ("r", json!("4"), "a number above 0"),
        ("lora_alpha", json!(-1), "a number above 0"),
        ("rank_pattern", json!({"q_proj": 5}), "is 5 for"),
        ("rank_pattern", json!([1]), "expected an object"),
        ("alpha_pattern", json!({"(": 5}), "has `(`"),
        ("use_rslora", json!("yes"), "true or false"),
        ("use_dora", json!(true), "DoRA"),
        ("bias", json!("all"), "biases"),
        ("modules_to_save", json!(["lm_head"]), "lm_head"),
        ("init_lora_weights", json!("pissa_niter_4"), "pissa"),
        ("layer_replication", json!([[0, 1]]), "not served"),
        ("fan_in_fan_out", json!(true), "not served"),
        ("alora_invocation_tokens", json!([5]), "not served"),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"]), "not served"),
        ("trainable_token_indices", json!([1]), "not served"),
        ("something_new", json!(3), "not served"),
    ] {
        let folder = with_fields("llama3", &[(field, value.clone())]);
        let error = read("llama3", folder.path(), LIMITS).expect_err(field).to_string();
        let field = if field == "rank_pattern" && value.is_object() { "r" } else { field };
        assert!(error.contains(&format!("`{field}`")) && error.contains(words), "{error}");
    }
    for harmless in [json!(null), json!(false), json!([]), json!({})] {
        read("llama3", with_fields("llama3", &[("something_new", harmless)]).path(), LIMITS).unwrap();
    }
}

#[test]
fn files_that_are_no_adapter_of_the_model_are_refused_by_name() {
    let error = |folder: &Path, limits| read("llama3", folder, limits).expect_err("refused").to_string();
    assert!(error(&adapter("phi3"), LIMITS).contains("is this the adapter of another model?"));
    let other = read("qwen3_5_text", &adapter("llama3"), LIMITS).expect_err("another model").to_string();
    assert!(other.contains("expected [") || other.contains("another model"), "{other}");
    assert!(
        error(&adapter("llama3"), AdapterLimits { rank: 3, ..LIMITS }).contains("rank 4, more than the 3")
    );
    assert!(
        error(&adapter("llama3"), AdapterLimits { bytes: 5000, ..LIMITS }).contains("more than the 5000")
    );

    let folder = copy(&adapter("llama3"));
    let weights = folder.path().join("adapter_model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    let damaged = |bytes: &[u8]| {
        std::fs::write(&weights, bytes).unwrap();
        error(folder.path(), LIMITS)
    };
    assert!(damaged(&whole[..whole.len() - 1]).contains("cut short"));
    assert!(damaged(&whole[..4]).contains("too short"));
    let renamed = |from: &str, to: &str| {
        let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
        let text = String::from_utf8(whole[8..header].to_vec()).unwrap().replacen(from, to, 1);
        [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &whole[header..]].concat()
    };
    for (from, to, words) in [
        ("q_proj.lora_A.weight", "q_proj.lora_C.weight", "no part of a LoRA adapter"),
        ("q_proj.lora_A.weight", "q_proj.lora_magnitude_vector", "DoRA"),
        ("q_proj.lora_A.weight", "q_prod.lora_A.weight", "another model"),
        ("layers.0.self_attn.q_proj.lora_A", "layers.7.self_attn.q_proj.lora_A", "lora_A.weight` is missing"),
        ("model.layers.0.self_attn.q_proj.lora_A", "lm_head.lora_A", "another model"),
        ("model.layers.0.self_attn.q_proj.lora_A", "model.embed_tokens.lora_A", "no plain product"),
        ("\"BF16\"", "\"I16\"", "dtype I16"),
        ("[4,64]", "[64,4]", "expected [rank, 64]"),
    ] {
        let error = damaged(&renamed(from, to));
        assert!(error.contains(words), "{from} to {to}: {error}");
    }
    let mut infinite = whole.clone();
    let end = infinite.len();
    infinite[end - 2..].copy_from_slice(&[0x80, 0x7f]);
    assert!(damaged(&infinite).contains("which is no number"));

    std::fs::remove_file(&weights).unwrap();
    assert!(error(folder.path(), LIMITS).contains("adapter_model.safetensors is missing"));
    std::fs::write(folder.path().join("adapter_model.bin"), b"").unwrap();
    assert!(error(folder.path(), LIMITS).contains("a pickle"));
    std::fs::create_dir(&weights).unwrap();
    assert!(error(folder.path(), LIMITS).contains("no regular file"));
}

/// Every tensor that an adapter has is used: with others it computes something else.
#[test]
fn every_tensor_moves_the_logits() {
    let prompt: Vec<u32> = (3..20).collect();
    let rows: Vec<u32> = (0..17).collect();
    for name in ADAPTERS {
        let own = Runner::with_adapter(name, ReferenceBackend::new()).forward(&prompt, &rows).to_vec();
        let folder = copy(&adapter(name));
        let mut file = File::read(&folder.path().join("adapter_model.safetensors"));
        let tensors: Vec<String> = file.tensors.keys().cloned().collect();
        for tensor in &tensors {
            let stored = file.get(tensor);
            let before = stored.bytes.clone();
            stored.bytes = perturbed(&stored.dtype, &before);
            file.write();
            let mut runner = runner(&adapted(name));
            runner.adapter =
                Some(Adapter::read(folder.path(), &runner.model.targets, LIMITS).unwrap().into());
            let moved = relative_difference(runner.forward(&prompt, &rows), &own);
            assert!(moved > 10.0 * LOGIT_TOLERANCE, "{name}: {tensor} moves them by {moved:e}");
            file.get(tensor).bytes = before;
        }
    }
}

/// Damage anywhere in a folder: an adapter, or a refusal that names the file.
#[test]
fn damage_anywhere_is_no_crash() {
    let mut random = Random(11);
    let (mut taken, mut refused) = (0, 0);
    for name in ADAPTERS {
        let targets = runner(&adapted(name)).model.targets;
        let folder = copy(&adapter(name));
        let path = |file: &str| folder.path().join(file);
        let files = ["adapter_config.json", "adapter_model.safetensors"];
        let [config, weights] = files.map(|file| std::fs::read(path(file)).unwrap());
        let header = 8 + u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
        for _ in 0..500 {
            let (mut damaged_config, mut damaged_weights) = (config.clone(), weights.clone());
            match random.below(4) {
                0 => damaged_config = mutate(&mut random, &config),
                // With the right length, so that what is inside is read.
                1 | 2 => {
                    let text = mutate(&mut random, &weights[8..header]);
                    let length = (text.len() as u64).to_le_bytes();
                    damaged_weights = [&length[..], &text, &weights[header..]].concat();
                }
                _ => damaged_weights = mutate(&mut random, &weights),
            }
            std::fs::write(path(files[0]), &damaged_config).unwrap();
            std::fs::write(path(files[1]), &damaged_weights).unwrap();
            match Adapter::read(folder.path(), &targets, LIMITS) {
                Ok(_) => taken += 1,
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("adapter_"), "{name}: {error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(taken > 50 && refused > 1000, "{taken} {refused}");
}
