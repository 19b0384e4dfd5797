//! The oracle itself: rows do not see their neighbours, blocks are honoured, malformed work is refused.

use folio_model::backend::{Backend, BackendError, Batch, BlockCopy, DType, Span};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::fixture;
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model};

const TOKENS: [u32; 37] = {
    let mut tokens = [0; 37];
    let mut i = 0;
    while i < tokens.len() {
        tokens[i] = (i as u32 * 71 + 3) % 199;
        i += 1;
    }
    tokens
};

fn load(kv_dtype: DType) -> (ReferenceBackend, LoadedModel) {
    let checkpoint = Checkpoint::open(fixture("qwen3")).unwrap();
    let mut backend = ReferenceBackend::new();
    let options = LoadOptions {
        max_rows: 80,
        max_logit_rows: 80,
        max_model_len: Some(64),
        kv_formats: kv_dtype.into(),
        block_tokens: 8,
        keeps_all: false,
        taps: None,
        progress: None,
    };
    let model = Model::load(&checkpoint, &mut backend, options).unwrap();
    backend.allocate_cache(&model.kv_layout, &[12]).unwrap();
    (backend, model)
}

/// Spans of `(first position, tokens, block table)`; logits of every row.
fn batch(parts: &[(u32, &[u32], &[u32])]) -> Batch {
    let mut batch = Batch::default();
    for (slot, (first_position, tokens, blocks)) in (0..).zip(parts) {
        batch.spans.push(Span {
            first_row: batch.tokens.len() as u32,
            rows: tokens.len() as u32,
            first_position: *first_position,
            slot,
            tentative_from: u32::MAX,
        });
        batch.tokens.extend_from_slice(tokens);
        batch.edit_table(slot, 0, 0, blocks.iter().copied());
    }
    batch.logit_rows = (0..batch.tokens.len() as u32).collect();
    batch
}

#[test]
fn logits_have_the_same_bits_in_any_chunks_and_company() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (mut backend, model) = load(dtype);
        let whole = backend.forward(&batch(&[(0, &TOKENS, &[0, 1, 2, 3, 4])])).unwrap().to_vec();
        for chunk in [1, 5, 8, 36] {
            let mut found = Vec::new();
            for (i, tokens) in TOKENS.chunks(chunk).enumerate() {
                // A stranger computes something else in the same step.
                let work =
                    batch(&[(0, &TOKENS[3..9], &[11]), ((i * chunk) as u32, tokens, &[9, 5, 7, 6, 8])]);
                found.extend_from_slice(&backend.forward(&work).unwrap()[6 * model.vocab..]);
            }
            assert!(found == whole, "chunks of {chunk}, {dtype:?}");
        }
    }
}

#[test]
fn a_fork_continues_from_copied_positions() {
    let (mut backend, model) = load(DType::BF16);
    let whole = backend.forward(&batch(&[(0, &TOKENS[..20], &[0, 1, 2])])).unwrap().to_vec();
    // Block 2 holds positions 16..20; the fork takes 16 and 17 of it and computes 18 and 19 itself.
    let mut fork = batch(&[(18, &TOKENS[18..20], &[0, 1, 5])]);
    fork.copies.push(BlockCopy { group: 0, from: 2, to: 5, tokens: 2 });
    assert!(backend.forward(&fork).unwrap() == &whole[18 * model.vocab..]);
    // With fewer positions copied, what is missing is zero and shows.
    let mut short = batch(&[(18, &TOKENS[18..20], &[0, 1, 6])]);
    short.copies.push(BlockCopy { group: 0, from: 2, to: 6, tokens: 1 });
    assert!(backend.forward(&short).unwrap() != &whole[18 * model.vocab..]);
}

#[test]
fn only_the_rows_asked_for_get_logits() {
    let (mut backend, model) = load(DType::F32);
    let mut work = batch(&[(0, &TOKENS, &[0, 1, 2, 3, 4])]);
    let whole = backend.forward(&work).unwrap().to_vec();
    work.logit_rows = vec![4, 30];
    let some = backend.forward(&work).unwrap();
    let row = |row: usize| &whole[row * model.vocab..(row + 1) * model.vocab];
    assert!(some == [row(4), row(30)].concat());
}

#[test]
fn malformed_batches_are_refused() {
    let (mut backend, _) = load(DType::F32);
    let sound = || batch(&[(0, &TOKENS[..9], &[0, 1]), (3, &TOKENS[..2], &[2])]);
    backend.forward(&sound()).unwrap();
    type Damage = fn(&mut Batch);
    let damages: &[(&str, Damage)] = &[
        ("token 199 is outside", |b| b.tokens[0] = 199),
        ("block outside of the cache", |b| b.blocks[2] = 12),
        ("block table is too short", |b| (b.edits[0].blocks_len, b.edits[0].len) = (1, 1)),
        ("it is outside of the batch", |b| b.edits[1].blocks_start = 3),
        ("it is outside of the batch or of the cache", |b| b.edits[1].group = 1),
        ("it leaves a gap", |b| b.edits[1].start = 2),
        ("another number of entries", |b| b.edits[0].len = 1),
        ("another number of entries", |b| b.edits[0].len = 3),
        ("it has no block table", |b| b.spans[1].slot = 2),
        ("past the longest sequence", |b| b.spans[0].first_position = 60),
        ("cover the rows in order", |b| b.spans[1].first_row = 8),
        ("cover the rows in order", |b| b.spans[0].rows = 0),
        ("spans cover 11 of 12 rows", |b| b.tokens.push(1)),
        ("not ascending", |b| b.logit_rows = vec![1, 1]),
        ("not ascending", |b| b.logit_rows = vec![11]),
        ("exceed the limits", |b| b.tokens.resize(81, 1)),
        ("outside of the cache", |b| b.copies.push(BlockCopy { group: 0, from: 0, to: 12, tokens: 1 })),
        ("outside of the cache", |b| b.copies.push(BlockCopy { group: 0, from: 0, to: 1, tokens: 9 })),
    ];
    for (expected, damage) in damages {
        let mut work = sound();
        damage(&mut work);
        let error = backend.forward(&work).unwrap_err();
        assert!(
            matches!(error, BackendError::Batch(_)) && error.to_string().contains(expected),
            "{expected}: {error}"
        );
    }
    let mut without_cache = ReferenceBackend::new();
    assert!(without_cache.forward(&Batch::default()).is_err());
}
