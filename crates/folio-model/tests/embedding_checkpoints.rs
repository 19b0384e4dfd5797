//! Checkpoints published for embeddings: the decoder without a name before its tensors, without an output matrix, and with
//! the files of sentence-transformers.

mod common;

use std::fs;
use std::path::Path;

use common::copy_of;
use common::tensors::File;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::gguf::as_gguf;
use folio_model::testing::{Runner, fixture};
use folio_model::{Checkpoint, Pooling};

/// Renames the tensors of a copy, or drops them where that gives `None`.
fn renamed(folder: &Path, rename: impl Fn(&str) -> Option<String>) {
    let mut file = File::read(&folder.join("model.safetensors"));
    file.tensors = std::mem::take(&mut file.tensors)
        .into_iter()
        .filter_map(|(name, t)| Some((rename(&name)?, t)))
        .collect();
    file.write();
}

fn bare(name: &str) -> Option<String> {
    (name != "lm_head.weight").then(|| name.strip_prefix("model.").unwrap_or(name).to_owned())
}

fn rows(folder: &Path) -> (Vec<Vec<f32>>, bool) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let mut runner = Runner::load(&checkpoint, ReferenceBackend::new(), None);
    runner.compute(&[5, 1, 9], &[], &[0, 2]);
    use folio_model::backend::Backend;
    let rows = [0, 2].map(|row| runner.backend.hidden(row).to_vec()).to_vec();
    (rows, runner.model.only_embeds)
}

#[test]
fn names_without_a_prefix_and_a_missing_output_matrix() {
    for (name, only_embeds) in [("qwen3", false), ("llama2", true)] {
        let copy = copy_of(name);
        renamed(copy.path(), bare);
        let (whole, generates) = rows(&fixture(name));
        assert!(!generates && whole[0].iter().all(|value| value.is_finite()));
        // With a tied output matrix nothing is missing.
        assert_eq!(rows(copy.path()), (whole, only_embeds), "{name}");
    }
    // Of a model for generation a missing matrix is a damage.
    let copy = copy_of("llama2");
    renamed(copy.path(), |name| (name != "lm_head.weight").then(|| name.to_owned()));
    let refusal = common::load(copy.path(), None).unwrap_err().to_string();
    assert!(refusal.contains("lm_head.weight"), "{refusal}");
}

#[test]
fn pooling_is_what_the_files_say() {
    let copy = copy_of("qwen3");
    let pooling = || Checkpoint::open(copy.path()).unwrap().pooling();
    assert_eq!(pooling(), Ok(Pooling::Last));
    fs::create_dir(copy.path().join("1_Pooling")).unwrap();
    fs::write(copy.path().join("1_Pooling/config.json"), r#"{"pooling_mode_mean_tokens": true}"#).unwrap();
    assert_eq!(pooling(), Ok(Pooling::Mean));
    for (kind, expected) in
        [(0, Some(Pooling::Last)), (1, Some(Pooling::Mean)), (2, None), (3, Some(Pooling::Last))]
    {
        let folder = common::gguf::on_disk(&as_gguf("qwen3").u32("qwen3.pooling_type", kind).finish());
        let found = Checkpoint::open(common::gguf::path_in(&folder)).unwrap().pooling();
        assert_eq!(found.clone().ok(), expected);
        assert!(found.err().is_none_or(|why| why.contains("qwen3.pooling_type is 2")));
    }
    let modules = r#"[{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Dense"}]"#;
    fs::write(copy.path().join("modules.json"), modules).unwrap();
    assert!(pooling().unwrap_err().contains("Dense"));
}
