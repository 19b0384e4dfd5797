//! Every family computes what transformers computes, and a trained model says what it was trained to say.

use std::path::Path;

use folio_model::reference::ReferenceBackend;
use folio_model::testing::{FIXTURES, Runner, check_fixture, fixture, test_data};
use folio_model::{Checkpoint, supported_families};
use serde_json::Value;

#[test]
fn every_family_matches_transformers() {
    for name in FIXTURES {
        let parity = check_fixture(&fixture(name), ReferenceBackend::new);
        println!("{name}: logits within {:.1e}, {} greedy tokens equal", parity.worst, parity.greedy_tokens);
    }
}

#[test]
fn no_fixture_is_forgotten_and_no_family_is_without_one() {
    let folder = fixture("");
    let mut on_disk: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    on_disk.sort();
    let mut listed: Vec<&str> = FIXTURES.to_vec();
    listed.sort_unstable();
    assert_eq!(on_disk, listed);
    for family in supported_families() {
        let served = |name: &&str| Checkpoint::open(fixture(name)).unwrap().config().family == *family;
        assert!(FIXTURES.iter().any(|name| served(name)), "no fixture for {}", family.model_type);
    }
}

/// stories260K is small and trained: its goldens were made by a float64 forward pass and agree with llama2.c.
#[test]
fn stories260k_matches_its_goldens() {
    let Some(folder) = test_data("model-stories260k") else { return };
    let checkpoint = Checkpoint::open(folder.join("hf")).unwrap();
    let goldens: Value =
        serde_json::from_slice(&std::fs::read(folder.join("goldens.json")).unwrap()).unwrap();
    for case in goldens["cases"].as_array().unwrap() {
        check_story(&checkpoint, case);
    }
}

fn check_story(checkpoint: &Checkpoint, case: &Value) {
    let ids = |field: &str| -> Vec<u32> {
        case[field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let mut runner = Runner::load(checkpoint, ReferenceBackend::new(), None);
    let mut next = ids("prompt_ids");
    for (step, expected) in case["steps"].as_array().unwrap().iter().enumerate() {
        let last = next.len() as u32 - 1;
        let logits = runner.forward(&next, &[last]);
        let best = expected["top5"].as_array().unwrap().iter().zip(expected["logits"].as_array().unwrap());
        for (id, golden) in best {
            let (found, golden) = (logits[id.as_u64().unwrap() as usize], golden.as_f64().unwrap() as f32);
            assert!(
                (found - golden).abs() < 1e-4 * golden.abs().max(1.0),
                "step {step}: {found} but {golden}"
            );
        }
        let token = folio_model::testing::argmax(logits);
        assert_eq!(token, ids("output_ids")[step], "step {step}");
        next = vec![token];
    }
}

#[test]
fn the_same_checkpoint_from_memory_is_the_same_model() {
    let folder = fixture("llama3");
    let leak = |name: &'static str| -> (&'static str, &'static [u8]) {
        (name, Vec::leak(std::fs::read(Path::new(&folder).join(name)).unwrap()))
    };
    let files: &'static [_] =
        vec![leak("config.json"), leak("generation_config.json"), leak("model.safetensors")].leak();
    let embedded = Checkpoint::from_bytes(files).unwrap();
    let opened = Checkpoint::open(&folder).unwrap();
    assert_eq!(embedded.digest().unwrap(), opened.digest().unwrap());
    assert_eq!(embedded.config(), opened.config());
    let mut a = Runner::load(&embedded, ReferenceBackend::new(), None);
    let mut b = Runner::load(&opened, ReferenceBackend::new(), None);
    assert_eq!(a.model, b.model);
    assert_eq!(a.forward(&[1, 5, 9], &[2]), b.forward(&[1, 5, 9], &[2]));
}
