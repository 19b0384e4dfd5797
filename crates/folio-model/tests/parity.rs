//! Every family computes what transformers computes, and a trained model says what it was trained to say.

use std::path::Path;

use folio_model::reference::ReferenceBackend;
use folio_model::testing::heads::{HEADS, PUBLISHED_WITH_MTP, WITH_MTP, check_head, check_mtp};
use folio_model::testing::{
    FIXTURES, LOGIT_TOLERANCE, Runner, check_fixture, check_stories, fixture, test_data,
};
use folio_model::{Checkpoint, supported_families};

#[test]
fn every_family_matches_transformers() {
    for name in FIXTURES {
        let parity = check_fixture(&fixture(name), ReferenceBackend::new);
        assert!(parity.vectors > 0, "{name} expects no vectors");
        println!("{name}: logits within {:.1e}, {} greedy tokens equal", parity.worst, parity.greedy_tokens);
    }
}

#[test]
fn heads_compute_what_their_formulas_say() {
    for name in HEADS {
        let worst = check_head(name, ReferenceBackend::new, LOGIT_TOLERANCE);
        println!("{name}: within {worst:.1e}");
    }
    for name in WITH_MTP.iter().chain(PUBLISHED_WITH_MTP) {
        let worst = check_mtp(name, ReferenceBackend::new, LOGIT_TOLERANCE);
        println!("{name}: within {worst:.1e}");
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
        assert!(FIXTURES.iter().any(served), "no fixture for {}", family.model_type);
    }
}

#[test]
fn stories260k_matches_its_goldens() {
    let Some(folder) = test_data("model-stories260k") else { return };
    assert_eq!(check_stories(&folder, ReferenceBackend::new), 4 * 96);
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
    assert_eq!(embedded.digest(64).unwrap(), opened.digest(64).unwrap());
    assert_eq!(embedded.config(), opened.config());
    let mut a = Runner::load(&embedded, ReferenceBackend::new(), None);
    let mut b = Runner::load(&opened, ReferenceBackend::new(), None);
    assert_eq!(a.model, b.model);
    assert_eq!(a.forward(&[1, 5, 9], &[2]), b.forward(&[1, 5, 9], &[2]));
}
