//! What is malformed is refused with a sentence, and the backend goes on working.

mod common;

use common::{Sequence, Spec, assert_same_bits, cpu, run_chunks};
use folio_cpu::{CpuBackend, CpuError, CpuOptions, Isa, Quantize, Quantized};
use folio_model::backend::{
    Backend, BackendError, Batch, BlockCopy, DType, KvFormat, KvLayout, Span, TableEdit, TensorView,
};
use folio_model::quant::{BlockFormat, Encoding};

fn good() -> Batch {
    Batch {
        tokens: vec![1, 2, 3],
        spans: vec![
            Span { first_row: 0, rows: 2, first_position: 0, slot: 0, tentative_from: u32::MAX },
            Span { first_row: 2, rows: 1, first_position: 0, slot: 1, tentative_from: u32::MAX },
        ],
        edits: vec![TableEdit::whole(0, 0, 0, 1), TableEdit::whole(1, 0, 1, 1)],
        blocks: vec![0, 1],
        logit_rows: vec![1, 2],
        ..Batch::default()
    }
}

#[test]
fn a_malformed_batch_is_refused_and_changes_nothing() {
    let spec = Spec { max_rows: 8, max_position: 64, ..Spec::default() };
    let mut backend = cpu(&spec, 6, 2, Isa::best());
    let mut bad: Vec<(&str, Batch)> = Vec::new();
    let mut add = |what, change: &dyn Fn(&mut Batch)| {
        let mut batch = good();
        change(&mut batch);
        bad.push((what, batch));
    };
    add("vocabulary", &|b| b.tokens[1] = 101);
    add("rows exceed", &|b| b.tokens.resize(9, 0));
    add("spans cover", &|b| b.tokens.push(0));
    add("ascending", &|b| b.logit_rows = vec![2, 1]);
    add("does not exist", &|b| b.logit_rows = vec![3]);
    add("does not exist", &|b| b.blocks[1] = 6);
    add("does not start", &|b| b.spans[1].first_row = 1);
    add("does not start", &|b| b.spans[0].rows = 0);
    add("limit is", &|b| b.spans[1].first_position = 64);
    add("covers less", &|b| b.spans[1].first_position = 16);
    add("covers less", &|b| b.spans[1].slot = 2);
    add("the batch has 2 entries", &|b| b.edits[1].blocks_len = 2);
    add("no such group", &|b| b.edits[1].group = 1);
    add("written twice", &|b| b.blocks[1] = 0);
    add("impossible", &|b| b.copies.push(BlockCopy { group: 0, from: 2, to: 2, tokens: 1 }));
    add("impossible", &|b| b.copies.push(BlockCopy { group: 0, from: 2, to: 6, tokens: 1 }));
    add("do not fit", &|b| b.copies.push(BlockCopy { group: 0, from: 2, to: 3, tokens: 17 }));
    for (what, batch) in bad {
        match backend.forward(&batch) {
            Err(BackendError::Batch(reason)) => assert!(reason.contains(what), "{what}: {reason}"),
            other => panic!("{what}: expected a refusal, got {:?}", other.map(<[f32]>::len)),
        }
    }
    assert_eq!(backend.forward(&good()).expect("still works").len(), 2 * spec.vocab);
}

#[test]
fn jobs_behind_a_step_see_its_logits_on_every_thread_and_one_that_panics_is_an_error() {
    use std::sync::Mutex;
    let spec = Spec { max_rows: 8, max_position: 64, ..Spec::default() };
    let mut backend = cpu(&spec, 6, 2, Isa::best());
    let want = backend.forward(&good()).expect("a step").to_vec();
    let mut threads = std::collections::HashSet::new();
    for _ in 0..200 {
        let seen = Mutex::new(Vec::new());
        let job = |index: usize, logits: &[f32]| {
            assert_same_bits("what a job sees", logits, &want, spec.vocab);
            seen.lock().expect("nobody panicked").push((index, std::thread::current().id()));
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        backend.forward_and(&good(), 5, &job).expect("a step");
        let mut seen = seen.into_inner().expect("nobody panicked");
        seen.sort_by_key(|(index, _)| *index);
        assert_eq!(seen.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        threads.extend(seen.into_iter().map(|(_, thread)| thread));
        if threads.len() == 2 {
            break;
        }
    }
    assert_eq!(threads.len(), 2, "one thread had all jobs of all steps");

    let broken = |index: usize, _: &[f32]| {
        if index == 1 {
            std::panic::resume_unwind(Box::new("broken on purpose")); // no message on stderr
        }
    };
    let error = backend.forward_and(&good(), 3, &broken).expect_err("a job panicked").to_string();
    assert!(error.contains("broken on purpose"), "{error}");
    assert_same_bits("afterwards", backend.forward(&good()).expect("still works"), &want, spec.vocab);
}

#[test]
fn copies_take_the_first_positions_of_a_block_in_order() {
    for kv in KvFormat::ALL {
        let spec = Spec { kv, ..Spec::default() };
        let sequence = Sequence { blocks: vec![0, 1, 2], ..Sequence::new(&spec, 9, 40, 0) };
        let whole = run_chunks(&mut cpu(&spec, 8, 2, Isa::best()), &sequence, 40, spec.vocab);
        for tokens in [1u32, 7, 8, 11, 15, 16] {
            let mut backend = cpu(&spec, 8, 2, Isa::best());
            run_chunks(&mut backend, &sequence, 40, spec.vocab);
            // The second block travels over block 6 to block 7; the continuation starts inside it.
            let first = 16 + tokens;
            let rows = 40 - first;
            let batch = Batch {
                tokens: sequence.tokens[first as usize..].to_vec(),
                spans: vec![Span {
                    first_row: 0,
                    rows,
                    first_position: first,
                    slot: 0,
                    tentative_from: u32::MAX,
                }],
                edits: vec![TableEdit::whole(0, 0, 0, 3)],
                blocks: vec![0, 7, 5],
                logit_rows: (0..rows).collect(),
                copies: vec![
                    BlockCopy { group: 0, from: 1, to: 6, tokens: 16 },
                    BlockCopy { group: 0, from: 6, to: 7, tokens },
                ],
                ..Batch::default()
            };
            let logits = backend.forward(&batch).expect("a step");
            assert_same_bits(
                &format!("{kv:?} {tokens}"),
                logits,
                &whole[first as usize * spec.vocab..],
                spec.vocab,
            );
        }
    }
}

#[test]
fn copies_in_a_group_of_larger_blocks_go_up_to_their_size() {
    let windows: &[Option<u32>] = &[Some(19), None];
    let spec = Spec { windows, layers: 2, window_blocks: 2, ..Spec::default() };
    let mut backend = cpu(&spec, 8, 2, Isa::best());
    for (group, tokens, fits) in [(0, 16, true), (0, 17, false), (1, 32, true), (1, 33, false)] {
        let copies = vec![BlockCopy { group, from: 3, to: 4, tokens }];
        let copied = backend.forward(&Batch { copies, ..Batch::default() });
        assert_eq!(copied.is_ok(), fits, "{tokens} tokens in group {group}");
    }
    let sequence = Sequence { blocks: vec![0, 1, 2], ..Sequence::new(&spec, 9, 40, 0) };
    let whole = run_chunks(&mut backend, &sequence, 40, spec.vocab);
    // A fork behind 24 positions: half of a block of the first group, three quarters of one of the second.
    let mut fork = Batch {
        tokens: sequence.tokens[24..].to_vec(),
        spans: vec![Span { first_row: 0, rows: 16, first_position: 24, slot: 5, tentative_from: u32::MAX }],
        logit_rows: (0..16).collect(),
        copies: vec![
            BlockCopy { group: 0, from: 1, to: 7, tokens: 8 },
            BlockCopy { group: 1, from: 1, to: 6, tokens: 24 },
        ],
        ..Batch::default()
    };
    fork.edit_table(5, 0, 0, [0, 7, 5]);
    fork.edit_table(5, 1, 0, [6, 5]);
    let logits = backend.forward(&fork).expect("a step");
    assert_same_bits("a fork", logits, &whole[24 * spec.vocab..], spec.vocab);
}

#[test]
fn a_step_may_be_copies_alone() {
    for quantize in [None, Some(Quantize::Q8)] {
        let spec = Spec { hidden: 64, ffn: 96, quantize, ..Spec::default() };
        let sequence = Sequence { blocks: vec![0, 1, 2], ..Sequence::new(&spec, 9, 40, 0) };
        let mut backend = cpu(&spec, 8, 2, Isa::best());
        let whole = run_chunks(&mut backend, &sequence, 40, spec.vocab);
        let copies = vec![BlockCopy { group: 0, from: 1, to: 7, tokens: 16 }];
        let logits = backend.forward(&Batch { copies, ..Batch::default() }).expect("a step");
        assert!(logits.is_empty());
        let rows = 8;
        let batch = Batch {
            tokens: sequence.tokens[32..].to_vec(),
            spans: vec![Span { first_row: 0, rows, first_position: 32, slot: 0, tentative_from: u32::MAX }],
            edits: vec![TableEdit::whole(0, 0, 0, 3)],
            blocks: vec![0, 7, 5],
            logit_rows: (0..rows).collect(),
            ..Batch::default()
        };
        let logits = backend.forward(&batch).expect("a step");
        assert_same_bits(&format!("{quantize:?}"), logits, &whole[32 * spec.vocab..], spec.vocab);
    }
}

#[test]
fn instruction_sets_are_parsed_strictly() {
    assert!(matches!(Isa::parse("sse9"), Err(CpuError::UnknownIsa(name)) if name == "sse9"));
    assert_eq!(Isa::parse("scalar").expect("always there"), Isa::Scalar);
    for isa in Isa::ALL {
        assert_eq!(Isa::parse(isa.name()).is_ok(), isa.is_available());
    }
    let message = CpuError::UnknownIsa("sse9".into()).to_string();
    assert!(message.contains("scalar, avx2, avx512 or avx512vnni"), "{message}");
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let mut backend = CpuBackend::new(CpuOptions { threads: Some(1), isa: None }).expect("a backend");
    let view = |shape, bytes| TensorView { encoding: Encoding::Plain(DType::F32), shape, bytes, order: None };
    let refused = |r: Result<_, BackendError>| r.expect_err("refused").to_string();
    let zeros = [0u8; 64];
    assert!(refused(backend.load_matrix("a.weight", &[view(&[2, 2], &zeros[..15])])).contains("a.weight"));
    assert!(refused(backend.load_matrix("b", &[view(&[4], &zeros[..16])])).contains("2 dimensions"));
    let two = [view(&[2, 2], &zeros[..16]), view(&[1, 3], &zeros[..12])];
    assert!(refused(backend.load_matrix("c", &two)).contains("differ"));
    assert!(refused(backend.load_matrix("d", &[])).contains("no parts"));
    let ordered = |order| TensorView { order, ..view(&[2, 2], &zeros[..16]) };
    for order in [&[0][..], &[0, 0], &[0, 2], &[0, 1, 1]] {
        assert!(refused(backend.load_matrix("e", &[ordered(Some(order))])).contains("no permutation"));
    }
    let two = [ordered(Some(&[1, 0])), ordered(Some(&[0, 1]))];
    assert!(refused(backend.load_matrix("f", &two)).contains("differ in the order"));
    let vector = TensorView { order: Some(&[0]), ..view(&[1], &zeros[..4]) };
    assert!(backend.load_vector("g", &[vector]).expect_err("refused").to_string().contains("no permutation"));
    let layout = KvLayout::full(1, 1, 8, KvFormat::F32, 16);
    assert!(backend.allocate_cache(&layout, &[1]).is_err(), "no program yet");
}

#[test]
fn plain_weights_are_quantized_on_request_and_others_are_not() {
    let mut backend = CpuBackend::new(CpuOptions { threads: Some(1), isa: None }).expect("a backend");
    let zeros = [0u8; 8192];
    let view = |encoding, shape: &'static [usize], bytes| TensorView { encoding, shape, bytes, order: None };
    let plain = Encoding::Plain(DType::F32);
    backend.load_matrix("before", &[view(plain, &[16, 32], &zeros[..2048])]).expect("a matrix");
    assert_eq!(
        (backend.weight_bytes(), backend.quantized()),
        (4 * 2048, Quantized::default()),
        "whole tiles"
    );
    backend.quantize_weights(Quantize::Q4);
    backend.load_matrix("blocks", &[view(plain, &[64, 32], &zeros[..8192])]).expect("a matrix");
    assert_eq!(backend.weight_bytes(), 4 * 2048 + 64 * 18);
    backend.load_matrix("odd", &[view(plain, &[2, 33], &zeros[..264])]).expect("a matrix");
    assert_eq!(backend.quantized(), Quantized { matrices: 1, kept_plain: 1 });
    let stored = view(Encoding::Block(BlockFormat::Q8_0), &[2, 32], &zeros[..68]);
    let refusal = backend.load_matrix("quantized.weight", &[stored]).expect_err("refused").to_string();
    assert!(refusal.contains("quantized.weight") && refusal.contains("Q8_0 already"), "{refusal}");
    // A vector is never quantized.
    backend.load_vector("norm", &[view(plain, &[32], &zeros[..128])]).expect("a vector");
    // Columns must be whole blocks, and floats and blocks cannot be stacked.
    let mut backend = CpuBackend::new(CpuOptions { threads: Some(1), isa: None }).expect("a backend");
    let short = view(Encoding::Block(BlockFormat::Q4_0), &[1, 33], &zeros[..18]);
    assert!(backend.load_matrix("short", &[short]).is_err());
    let mixed = [view(plain, &[1, 32], &zeros[..128]), stored];
    assert!(backend.load_matrix("mixed", &mixed).expect_err("refused").to_string().contains("differ"));
    let several = [view(Encoding::Block(BlockFormat::Q4_0), &[3, 32], &zeros[..54]), stored];
    backend.load_matrix("several", &several).expect("block formats mix");
    let floats = view(Encoding::Block(BlockFormat::Fp8x32), &[2, 32], &zeros[..72]);
    assert!(
        backend.load_matrix("both", &[floats, stored]).expect_err("refused").to_string().contains("differ")
    );
    backend.load_matrix("floats", &[floats, floats]).expect("FP8 mixes with itself");
}

#[test]
fn heads_that_a_format_cannot_store_are_refused_by_name() {
    for (kv, head_dim, word) in
        [(KvFormat::Int8, 10, "int8"), (KvFormat::Int4, 12, "int4"), (KvFormat::Fp8, 514, "fp8")]
    {
        let spec = Spec { head_dim, rotary: 0, ..Spec::default() };
        let mut backend = cpu(&spec, 2, 1, Isa::Scalar);
        let layout = KvLayout::full(spec.layers, spec.kv_heads, head_dim, kv, 16);
        let refusal = backend.allocate_cache(&layout, &[2]).expect_err("refused").to_string();
        assert!(refusal.contains(word) && refusal.contains(&head_dim.to_string()), "{refusal}");
    }
}
