//! Heads that draft against `tools/make_eagle_fixtures.py` and `tools/make_mtp_fixtures.py`, on any backend.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{BLOCK_TOKENS, MAX_ROWS, argmax, fixture, relative_difference};
use crate::backend::{Backend, Batch, DType, KvLayout, Span};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::safetensors::read_header;
use crate::draft_head::{DraftHead, LoadedHead};
use crate::loader::{LoadOptions, Model};
use crate::{eagle, mtp};

/// EAGLE-3 heads, one for each form in which they are published.
pub const HEADS: &[&str] = &["authors", "speculators", "sglang", "gpt_oss"];

/// Models with an MTP head, likewise; but for that they are the fixture `qwen3`.
pub const WITH_MTP: &[&str] = &["qwen", "deepseek", "mimo"];

/// Models of families that are published with an MTP head, which keep states or latents: fixtures of the same names with one.
pub const PUBLISHED_WITH_MTP: &[&str] =
    &["qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe_lite"];

/// Folder of an EAGLE-3 head.
pub fn head(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/eagle").join(name)
}

/// Folder of a model with an MTP head.
pub fn with_mtp(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mtp").join(name)
}

/// Name of the fixture that an EAGLE-3 head drafts for.
pub fn target(name: &str) -> String {
    note(&head(name))["target"].as_str().expect("a target").to_owned()
}

/// What a backend is prepared for.
fn options(taps: Option<&dyn DraftHead>) -> LoadOptions<'_> {
    LoadOptions {
        max_rows: MAX_ROWS,
        max_logit_rows: MAX_ROWS,
        max_model_len: Some(128),
        keeps_all: false,
        kv_formats: DType::F32.into(),
        block_tokens: BLOCK_TOKENS,
        taps,
        progress: None,
    }
}

/// A sequence on a backend.
struct Sequence<B> {
    backend: B,
    /// Tokens in a block of each cache group.
    block_tokens: Vec<usize>,
    position: u32,
}

impl<B: Backend> Sequence<B> {
    fn new(mut backend: B, layout: &KvLayout) -> Self {
        let blocks = vec![128 / BLOCK_TOKENS; layout.groups.len()];
        backend.allocate_cache(layout, &blocks).unwrap_or_else(|error| panic!("{error}"));
        let block_tokens = layout.groups.iter().map(|group| group.block_tokens).collect();
        Self { backend, block_tokens, position: 0 }
    }

    /// Logits and features of the next rows.
    fn rows(&mut self, tokens: &[u32], features: &[f32]) -> (Vec<f32>, Vec<Vec<f32>>) {
        let rows = tokens.len() as u32;
        let (first_position, tentative_from) = (self.position, u32::MAX);
        let mut batch = Batch {
            tokens: tokens.to_vec(),
            spans: vec![Span { first_row: 0, rows, first_position, slot: 0, tentative_from }],
            logit_rows: (0..rows).collect(),
            feature_rows: (0..rows).collect(),
            features: features.to_vec(),
            ..Batch::default()
        };
        for (group, tokens) in (0..).zip(&self.block_tokens) {
            batch.edit_table(0, group, 0, (0..128usize.div_ceil(*tokens) as u32).rev());
        }
        self.position += rows;
        let logits = self.backend.forward(&batch).unwrap_or_else(|error| panic!("{error}")).to_vec();
        (logits, (0..rows).map(|row| self.backend.features(row).to_vec()).collect())
    }
}

/// An EAGLE-3 head, see [`check`].
pub fn check_head<B: Backend>(name: &str, new_backend: impl Fn() -> B, tolerance: f32) -> f32 {
    let checkpoint = Checkpoint::open(fixture(&target(name))).unwrap_or_else(|error| panic!("{error}"));
    let opened = eagle::Head::open(&head(name), &checkpoint).unwrap_or_else(|error| panic!("{error}"));
    let taps: Vec<u32> = opened.taps().iter().map(|tap| *tap as u32).collect();
    assert_eq!(taps, super::numbers(&note(&head(name))["taps"]), "{name}");
    check(&head(name), &checkpoint, &opened, new_backend, tolerance)
}

/// A model with an MTP head, see [`check`].
pub fn check_mtp<B: Backend>(name: &str, new_backend: impl Fn() -> B, tolerance: f32) -> f32 {
    let checkpoint = Checkpoint::open(with_mtp(name)).unwrap_or_else(|error| panic!("{error}"));
    check_mtp_of(name, &checkpoint, new_backend, tolerance)
}

/// The same of a checkpoint that is that model otherwise.
pub fn check_mtp_of<B: Backend>(
    name: &str,
    checkpoint: &Checkpoint,
    new_backend: impl Fn() -> B,
    tolerance: f32,
) -> f32 {
    let opened = mtp::Head::open(checkpoint).unwrap_or_else(|error| panic!("{error}"));
    check(&with_mtp(name), checkpoint, &opened.expect("a head"), new_backend, tolerance)
}

/// Logits of a few rows of an MTP head whose features are made up.
pub fn logits_of_mtp<B: Backend>(checkpoint: &Checkpoint, mut backend: B) -> Vec<f32> {
    let opened = mtp::Head::open(checkpoint).unwrap_or_else(|error| panic!("{error}")).expect("a head");
    let loaded = opened.load(checkpoint, &mut backend, &options(None));
    let loaded = loaded.unwrap_or_else(|error| panic!("{error}"));
    let features: Vec<f32> = (0..3 * opened.width()).map(|i| (i * 5 % 13) as f32 - 6.0).collect();
    Sequence::new(backend, &loaded.kv_layout).rows(&[7, 1, 30], &features).0
}

fn note(folder: &Path) -> Value {
    let text = std::fs::read(folder.join("expected.json")).expect("a head has expected.json");
    serde_json::from_slice(&text).expect("expected.json is JSON")
}

/// Features, logits and drafts of a head, where logits may differ by `tolerance` of the largest. Panics on the first difference; returns
/// the largest. Both are computed in two pieces, so that features and keys come from a step before.
fn check<B: Backend>(
    folder: &Path,
    checkpoint: &Checkpoint,
    opened: &dyn DraftHead,
    new_backend: impl Fn() -> B,
    tolerance: f32,
) -> f32 {
    let (name, note) = (folder.display(), note(folder));
    let stored = std::fs::read(folder.join("expected.safetensors")).expect("expected.safetensors");
    let header = read_header(&stored).expect("expected.safetensors is sound");
    let floats = |name: &str| -> Vec<f32> {
        let bytes = stored[header[name].range.clone()].as_chunks().0;
        bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let numbers = |field: &str| super::numbers(&note[field]);
    let (tokens, drafts) = (numbers("tokens"), numbers("drafts"));

    let mut backend = new_backend();
    let model = Model::load(checkpoint, &mut backend, options(Some(opened)));
    let model = model.unwrap_or_else(|error| panic!("{error}"));
    let mut target = Sequence::new(backend, &model.kv_layout);
    let mut backend = new_backend();
    let loaded =
        opened.load(checkpoint, &mut backend, &options(None)).unwrap_or_else(|error| panic!("{error}"));
    let mut drafter = Sequence::new(backend, &loaded.kv_layout);

    let mut worst = 0.0f32;
    let mut same = |what: &str, found: &[f32], expected: &[f32]| {
        assert_eq!(found.len(), expected.len(), "{name}: {what}");
        let difference = relative_difference(found, expected);
        assert!(difference <= tolerance, "{name}: {what} differ by {difference:e}");
        worst = worst.max(difference);
    };
    let mut features = Vec::new();
    for piece in [&tokens[..11], &tokens[11..]] {
        features.extend(target.rows(piece, &[]).1);
    }
    let expected = floats("features");
    for (position, (found, expected)) in features.iter().zip(expected.chunks(opened.width())).enumerate() {
        same(&format!("features of position {position}"), found, expected);
    }
    let (all, mut logits, mut own) = (features.concat(), Vec::new(), Vec::new());
    let given = |rows: std::ops::Range<usize>| &all[rows.start * opened.width()..rows.end * opened.width()];
    for rows in [0..17, 17..tokens.len() - 1] {
        let (found, following) = drafter.rows(&tokens[rows.start + 1..rows.end + 1], given(rows));
        logits.extend(found);
        own = following.last().expect("there are rows").clone();
    }
    let (vocab, expected) = (loaded.vocab, floats("logits"));
    for (row, (found, expected)) in logits.chunks(vocab).zip(expected.chunks(vocab)).enumerate() {
        same(&format!("logits of row {row}"), found, expected);
    }
    let mut last = logits[logits.len() - vocab..].to_vec();
    for (at, expected) in floats("draft_logits").chunks(vocab).enumerate() {
        assert_eq!(said(&loaded, &last), drafts[at], "{name}: draft {at}");
        let (found, following) = drafter.rows(&drafts[at..=at], &own);
        same(&format!("logits behind draft {at}"), &found, expected);
        (last, own) = (found, following.concat());
    }
    worst
}

/// The most probable token of a row of logits, as the model calls it.
fn said(head: &LoadedHead, logits: &[f32]) -> u32 {
    let own = argmax(logits);
    head.token_ids.as_ref().map_or(own, |ids| ids[own as usize])
}
