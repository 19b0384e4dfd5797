//! Promise 1 at the level of the backend: what a row computes does not depend on how the work is cut.

mod common;

use common::{Sequence, Spec, assert_same_bits, cpu, isas, load, run_chunks, step};
use folio_cpu::{Isa, Quantize};
use folio_model::backend::{Backend, Batch, DType, HOLE, KvFormat, Span, TableEdit};
use folio_model::program::Routing;
use folio_model::quant::BlockFormat;
use folio_model::reference::ReferenceBackend;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn chunks_threads_and_instruction_sets_do_not_touch_a_bit() {
    for kv in [KvFormat::BF16, KvFormat::Int8, KvFormat::Fp8, KvFormat::Int4] {
        let spec = Spec { kv, ..Spec::default() };
        let len = 600; // three chunks of positions
        let blocks = 40;
        let sequence = Sequence::new(&spec, 7, len, 1);
        let oracle = run_chunks(&mut cpu(&spec, blocks, 1, Isa::Scalar), &sequence, len, spec.vocab);
        assert!(oracle.iter().all(|x| x.is_finite()));
        let all = kv == KvFormat::BF16;
        for isa in isas() {
            for threads in if all { 1..=3 } else { 2..=2 } {
                let mut backend = cpu(&spec, blocks, threads, isa);
                let chunks: &[usize] = match isa {
                    Isa::Scalar => &[333],
                    _ if all => &[1, 16, 64, 333, 600],
                    _ => &[1, 47, 600],
                };
                for &chunk in chunks {
                    let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                    let what = format!("{kv}, {isa:?}, {threads} threads, chunks of {chunk}");
                    assert_same_bits(&what, &logits, &oracle, spec.vocab);
                }
            }
        }
    }
}

/// How far from the reference logits may be, relative to the largest. A value on the border of two codes may become either.
fn tolerance(kv: KvFormat) -> f32 {
    match kv {
        KvFormat::F32 => 1e-4,
        KvFormat::F16 | KvFormat::BF16 | KvFormat::Int8 => 2e-2,
        KvFormat::Fp8 => 5e-2,
        KvFormat::Int4 => 1e-1,
    }
}

#[test]
fn every_weight_and_kv_type_agrees_with_itself_and_with_the_reference() {
    let scaled = [KvFormat::Int8, KvFormat::Fp8, KvFormat::Int4].map(|kv| (DType::BF16, kv));
    let plain = DTYPES.iter().flat_map(|weights| DTYPES.map(|kv| (*weights, kv.into())));
    for (weights, kv) in plain.chain(scaled) {
        let spec = Spec { weights, kv, max_rows: 128, ..Spec::default() };
        let sequence = Sequence::new(&spec, 3, 70, 0);
        let oracle = run_chunks(&mut cpu(&spec, 8, 1, Isa::Scalar), &sequence, 70, spec.vocab);
        for isa in isas() {
            let mut backend = cpu(&spec, 8, 2, isa);
            for chunk in [1, 13, 70] {
                let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                let what = format!("{weights:?} weights, {kv} kv, {isa:?}, chunks of {chunk}");
                assert_same_bits(&what, &logits, &oracle, spec.vocab);
            }
        }
        let mut reference = ReferenceBackend::new();
        load(&mut reference, &spec, 8);
        let expected = run_chunks(&mut reference, &sequence, 70, spec.vocab);
        close(&format!("{weights:?}, {kv}"), &oracle, &expected, tolerance(kv));
    }
}

fn close(what: &str, a: &[f32], b: &[f32], tolerance: f32) {
    let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= tolerance * largest, "{what}: value {i}: {x} is not near {y}");
    }
}

#[test]
fn quantized_weights_agree_with_themselves_and_nearly_with_their_decoded_values() {
    for (to, seed) in [(Quantize::Q8, 3), (Quantize::Q4, 4)] {
        let quantize = Some(to);
        let spec = Spec {
            quantize,
            hidden: 64,
            ffn: 96,
            kv: KvFormat::F32,
            vocab: 103,
            max_rows: 128,
            ..Spec::default()
        };
        let sequence = Sequence::new(&spec, seed, 90, 0);
        let oracle = run_chunks(&mut cpu(&spec, 8, 1, Isa::Scalar), &sequence, 90, spec.vocab);
        for isa in isas() {
            for threads in [1, 3] {
                let mut backend = cpu(&spec, 8, threads, isa);
                let chunks: &[usize] = if isa == Isa::Scalar { &[7] } else { &[1, 2, 3, 5, 13, 17, 33, 90] };
                for &chunk in chunks {
                    let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                    let what = format!("{to:?}, {isa:?}, {threads} threads, chunks of {chunk}");
                    assert_same_bits(&what, &logits, &oracle, spec.vocab);
                }
            }
        }
        let mut reference = ReferenceBackend::new();
        load(&mut reference, &spec, 8);
        let expected = run_chunks(&mut reference, &sequence, 90, spec.vocab);
        // Activations are rounded to 8 bits before each product; nothing else differs.
        close(&format!("{to:?}"), &oracle, &expected, 5e-2);
    }
}

/// Folio's own formats, and the order of columns that GPTQ stores, which some models here have.
#[test]
fn formats_of_safetensors_agree_with_themselves_and_nearly_with_their_decoded_values() {
    let own = BlockFormat::ALL.into_iter().filter(|format| format.ggml_type().is_none());
    let quantized = own.enumerate().flat_map(|(i, format)| {
        let ordered = if i % 2 == 0 { vec![false] } else { vec![false, true] };
        ordered.into_iter().map(move |ordered| (Some(format), ordered))
    });
    for (blocks, ordered) in quantized.chain([(None, true)]) {
        let spec = Spec {
            blocks,
            ordered,
            hidden: 128,
            heads: 4,
            head_dim: 32,
            ffn: 256,
            kv: KvFormat::F32,
            layers: 1,
            vocab: 103,
            max_rows: 128,
            ..Spec::default()
        };
        let sequence = Sequence::new(&spec, 5, 60, 0);
        let oracle = run_chunks(&mut cpu(&spec, 8, 1, Isa::Scalar), &sequence, 60, spec.vocab);
        for isa in isas() {
            for threads in [1, 3] {
                let mut backend = cpu(&spec, 8, threads, isa);
                let chunks: &[usize] = if isa == Isa::Scalar { &[7] } else { &[1, 2, 3, 5, 13, 33, 60] };
                for &chunk in chunks {
                    let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                    let what =
                        format!("{blocks:?}, order {ordered}, {isa:?}, {threads} threads, chunks of {chunk}");
                    assert_same_bits(&what, &logits, &oracle, spec.vocab);
                }
            }
        }
        let mut reference = ReferenceBackend::new();
        load(&mut reference, &spec, 8);
        let expected = run_chunks(&mut reference, &sequence, 60, spec.vocab);
        let floats = matches!(blocks, None | Some(BlockFormat::Fp8x32 | BlockFormat::Fp8x128));
        let what = format!("{blocks:?}, order {ordered}");
        close(&what, &oracle, &expected, if floats { 1e-4 } else { 5e-2 });
        // The same model, whatever order it is stored in.
        if ordered && blocks.is_none() {
            let plain = Spec { ordered: false, ..spec.clone() };
            let plain = run_chunks(&mut cpu(&plain, 8, 1, Isa::best()), &sequence, 60, spec.vocab);
            close(&what, &oracle, &plain, 1e-4);
        }
    }
}

/// Windows shorter than a step of keys, longer than a chunk of positions, and on their borders; soft caps and sinks. What
/// lies behind a window is a hole in the table.
#[test]
fn windows_soft_caps_and_sinks_agree_with_themselves_and_with_the_reference() {
    let len = 600;
    type Kind = (&'static [Option<u32>], Option<f32>, bool);
    let kinds: [Kind; 7] = [
        (&[Some(1), None], None, false),
        (&[Some(9), Some(40), None], None, true),
        (&[Some(31), Some(32), Some(33)], Some(1.5), false),
        (&[Some(255), Some(257), Some(256)], None, true),
        (&[Some(300)], Some(4.0), true),
        (&[None], None, true),
        (&[None], Some(0.7), false),
    ];
    for (windows, softcap, sinks) in kinds {
        let spec = Spec {
            windows,
            softcap,
            sinks,
            layers: windows.len().max(2),
            kv: KvFormat::F32,
            vocab: 37,
            ..Spec::default()
        };
        let sequence = Sequence::new(&spec, 13, len, 2);
        let oracle = run_chunks(&mut cpu(&spec, 41, 1, Isa::Scalar), &sequence, len, spec.vocab);
        for isa in isas() {
            for threads in [1, 3] {
                let mut backend = cpu(&spec, 41, threads, isa);
                let chunks: &[usize] = if isa == Isa::Scalar { &[333] } else { &[1, 23, 333, len] };
                for &chunk in chunks {
                    let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                    let what = format!(
                        "{windows:?} {softcap:?} {sinks} {isa:?}, {threads} threads, chunks of {chunk}"
                    );
                    assert_same_bits(&what, &logits, &oracle, spec.vocab);
                }
            }
        }
        let mut reference = ReferenceBackend::new();
        load(&mut reference, &spec, 41);
        let expected = run_chunks(&mut reference, &sequence, 100, spec.vocab);
        close(&format!("{windows:?} {softcap:?} {sinks}"), &oracle, &expected, 1e-4);
        // Whatever is left out would show.
        for plain in [
            Spec { windows: &[None], ..spec.clone() },
            Spec { softcap: None, ..spec.clone() },
            Spec { sinks: false, ..spec.clone() },
        ] {
            let same =
                (plain.windows == spec.windows, plain.softcap == spec.softcap, plain.sinks == spec.sinks);
            if same != (true, true, true) {
                let sequence = Sequence { groups: plain.groups(), ..sequence.clone() };
                let other = run_chunks(&mut cpu(&plain, 41, 2, Isa::best()), &sequence, len, spec.vocab);
                let largest = oracle.iter().zip(&other).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(largest > 0.01, "{windows:?} {softcap:?} {sinks}: {largest}");
            }
        }
    }
}

/// A sequence has the same bits on every instruction set, with any number of threads, in any chunks, and is what the reference says.
fn agrees(spec: &Spec, seed: u64, tolerance: f32) {
    let len = 70;
    let sequence = Sequence::new(spec, seed, len, 0);
    let oracle = run_chunks(&mut cpu(spec, 8, 1, Isa::Scalar), &sequence, len, spec.vocab);
    for isa in isas() {
        for (threads, chunk) in [(1, 1), (3, 7), (2, len)] {
            let logits = run_chunks(&mut cpu(spec, 8, threads, isa), &sequence, chunk, spec.vocab);
            let what = format!("{spec:?} {isa:?}, {threads} threads, chunks of {chunk}");
            assert_same_bits(&what, &logits, &oracle, spec.vocab);
        }
    }
    let mut reference = ReferenceBackend::new();
    load(&mut reference, spec, 8);
    let expected = run_chunks(&mut reference, &sequence, len, spec.vocab);
    close(&format!("{spec:?}"), &oracle, &expected, tolerance);
}

/// What few families have: whole rows of q and k are normalized together, heads behind the rotation, means are subtracted.
#[test]
fn other_norms_and_curves_agree_with_themselves_and_with_the_reference() {
    let others = Spec { others: true, kv: KvFormat::F32, vocab: 37, max_rows: 128, ..Spec::default() };
    for spec in
        [Spec { hidden: 41, ffn: 23, ..others.clone() }, Spec { weights: DType::F32, heads: 6, ..others }]
    {
        agrees(&spec, 29, 1e-4);
    }
}

/// What layers may have of their own: other heads than others, K and V that another keeps, values of each token.
#[test]
fn layers_of_different_sizes_agree_with_themselves_and_with_the_reference() {
    let mixed = Spec {
        mixed: true,
        layers: 5,
        windows: &[Some(19), Some(19), None],
        kv: KvFormat::F32,
        vocab: 37,
        max_rows: 128,
        ..Spec::default()
    };
    for spec in [
        // The last layer reads what the second before it with a window keeps, or the only one without.
        mixed.clone(),
        Spec { layers: 6, hidden: 41, weights: DType::F32, softcap: Some(3.0), ..mixed.clone() },
        Spec { layers: 6, kv: KvFormat::Int8, kv_heads: 4, window_blocks: 2, ..mixed.clone() },
        // Heads of 512.
        Spec { layers: 3, head_dim: 256, kv: KvFormat::F16, rotary: 64, ..mixed },
    ] {
        agrees(&spec, 31, tolerance(spec.kv));
    }
}

/// Few experts and many, all of them chosen and one; widths that are no whole tiles, so that experts share panels; steps small
/// enough that workers pack for themselves, and large enough that an expert has several groups of rows.
#[test]
fn mixtures_of_experts_agree_with_themselves_and_with_the_reference() {
    let plain = |experts, hidden, ffn| Spec { experts: Some(experts), hidden, ffn, ..Spec::default() };
    let (some, all) = (Routing::AmongChosen, Routing::AmongAll);
    let blocks = |format| Spec { blocks: Some(format), ..plain((5, 2, some), 64, 96) };
    let specs = [
        plain((6, 2, some), 48, 72),
        Spec { weights: DType::F32, ..plain((4, 4, all), 40, 23) },
        Spec { weights: DType::F16, bias: false, ..plain((1, 1, some), 33, 16) },
        plain((33, 5, all), 20, 130),
        // Too wide for workers to pack for themselves.
        Spec { layers: 1, ..plain((3, 2, some), 704, 32) },
        blocks(BlockFormat::Int4x32),
        blocks(BlockFormat::Fp8x32),
        Spec { ordered: true, ..blocks(BlockFormat::Int8x32) },
        Spec { quantize: Some(Quantize::Q4), ..plain((5, 2, some), 64, 96) },
    ];
    for spec in specs {
        let spec = Spec { kv: KvFormat::F32, vocab: 37, max_rows: 128, ..spec };
        let len = 110;
        let sequence = Sequence::new(&spec, 23, len, 0);
        let oracle = run_chunks(&mut cpu(&spec, 8, 1, Isa::Scalar), &sequence, len, spec.vocab);
        for isa in isas() {
            for threads in [1, 3] {
                let mut backend = cpu(&spec, 8, threads, isa);
                let chunks: &[usize] = if isa == Isa::Scalar { &[37] } else { &[1, 7, 37, len] };
                for &chunk in chunks {
                    let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                    let what = format!("{spec:?} {isa:?}, {threads} threads, chunks of {chunk}");
                    assert_same_bits(&what, &logits, &oracle, spec.vocab);
                }
            }
        }
        let integers = spec.quantize.is_some() || matches!(spec.blocks, Some(f) if f != BlockFormat::Fp8x32);
        if !integers {
            let mut reference = ReferenceBackend::new();
            load(&mut reference, &spec, 8);
            let expected = run_chunks(&mut reference, &sequence, len, spec.vocab);
            close(&format!("{spec:?}"), &oracle, &expected, 1e-4);
        }
    }
}

/// Rows that are not numbers choose experts too, and share them with rows that are.
#[test]
fn poisoned_rows_do_not_touch_others_of_their_expert() {
    for quantize in [None, Some(Quantize::Q8)] {
        let experts = Some((3, 2, Routing::AmongChosen));
        let spec = Spec { experts, quantize, hidden: 64, ffn: 96, nan_token: Some(100), ..Spec::default() };
        let sequence = Sequence::new(&spec, 5, 24, 0);
        for isa in isas() {
            let clean = run_chunks(&mut cpu(&spec, 8, 2, isa), &sequence, 24, spec.vocab);
            let mut backend = cpu(&spec, 8, 2, isa);
            let mut poison =
                Sequence { tokens: vec![100; 24], blocks: vec![5, 4], computed: 0, ..sequence.clone() };
            let mut other = sequence.clone();
            let mut logits = Vec::new();
            for rows in [1, 5, 18] {
                let found = step(&mut backend, &mut [(&mut poison, rows), (&mut other, rows)], spec.vocab);
                assert!(found[0].iter().all(|x| x.is_nan()), "the poison works");
                logits.extend_from_slice(&found[1]);
            }
            assert_same_bits(&format!("{quantize:?} {isa:?}"), &logits, &clean, spec.vocab);
        }
    }
}

#[test]
fn heads_and_shapes_of_all_kinds() {
    let shapes = [
        // heads, kv_heads, head_dim, rotary pairs, block_tokens, hidden, ffn
        (1, 1, 8, 4, 8, 16, 24),
        (3, 1, 32, 16, 16, 33, 40),
        (5, 1, 80, 20, 24, 20, 17),
        (8, 1, 64, 32, 32, 64, 64),
        (7, 1, 10, 0, 16, 31, 9),
        (4, 4, 96, 48, 16, 40, 24),
        (12, 2, 128, 64, 16, 48, 32),
    ];
    for (heads, kv_heads, head_dim, rotary, block_tokens, hidden, ffn) in shapes {
        for kv in KvFormat::ALL.into_iter().filter(|kv| kv.refusal(head_dim).is_none()) {
            let spec = Spec {
                heads,
                kv_heads,
                head_dim,
                rotary,
                block_tokens,
                hidden,
                ffn,
                kv,
                layers: 1,
                vocab: 37,
                max_rows: 64,
                max_position: 512,
                ..Spec::default()
            };
            let sequence = Sequence::new(&spec, 11, 50, 0);
            let oracle = run_chunks(&mut cpu(&spec, 16, 1, Isa::Scalar), &sequence, 50, spec.vocab);
            for isa in isas() {
                let mut backend = cpu(&spec, 16, 2, isa);
                for chunk in [1, 7, 50] {
                    let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                    assert_same_bits(&format!("{spec:?} {isa:?} {chunk}"), &logits, &oracle, spec.vocab);
                }
            }
            let mut reference = ReferenceBackend::new();
            load(&mut reference, &spec, 16);
            let expected = run_chunks(&mut reference, &sequence, 50, spec.vocab);
            close(&format!("{spec:?}"), &oracle, &expected, tolerance(kv));
        }
    }
}

#[test]
fn neighbours_do_not_touch_a_bit() {
    let spec = Spec { max_rows: 256, ..Spec::default() };
    let len = 40;
    let alone: Vec<Vec<f32>> = (0..64)
        .map(|i| {
            let sequence = Sequence::new(&spec, i + 1, len, 0);
            run_chunks(&mut cpu(&spec, 4, 1, Isa::best()), &sequence, len, spec.vocab)
        })
        .collect();
    for isa in isas().into_iter().filter(|&isa| isa != Isa::Scalar) {
        for batch in [2, 3, 7, 8, 9, 31, 64] {
            let mut backend = cpu(&spec, 64 * 3, 2, isa);
            let mut sequences: Vec<Sequence> =
                (0..batch).map(|i| Sequence::new(&spec, i as u64 + 1, len, 3 * i as u32)).collect();
            let mut logits = vec![Vec::new(); batch];
            let mut round = 0usize;
            while sequences.iter().any(|s| s.computed < len) {
                // One to three tokens each, differently for every sequence and step; some sit out.
                let mut parts = Vec::new();
                let mut who = Vec::new();
                for (i, sequence) in sequences.iter_mut().enumerate() {
                    let rows = ((i * 7 + round * 5) % 4).min(len - sequence.computed);
                    if rows > 0 {
                        who.push(i);
                        parts.push((sequence, rows));
                    }
                }
                round += 1;
                if parts.is_empty() {
                    continue;
                }
                for (i, rows) in who.into_iter().zip(step(&mut backend, &mut parts, spec.vocab)) {
                    logits[i].extend(rows);
                }
            }
            for (i, logits) in logits.iter().enumerate() {
                assert_same_bits(&format!("{isa:?}, sequence {i} of {batch}"), logits, &alone[i], spec.vocab);
            }
        }
    }
}

#[test]
fn every_kv_format_has_windows() {
    for kv in KvFormat::ALL {
        let spec =
            Spec { kv, windows: &[Some(19), None], layers: 2, sinks: true, vocab: 37, ..Spec::default() };
        let sequence = Sequence::new(&spec, 17, 300, 2);
        let oracle = run_chunks(&mut cpu(&spec, 21, 1, Isa::Scalar), &sequence, 300, spec.vocab);
        for isa in isas() {
            for chunk in [7, 300] {
                let logits = run_chunks(&mut cpu(&spec, 21, 2, isa), &sequence, chunk, spec.vocab);
                assert_same_bits(&format!("{kv:?} {isa:?}, chunks of {chunk}"), &logits, &oracle, spec.vocab);
            }
            // Blocks of 32 and 64 tokens behind the window, of 16 before the others.
            for window_blocks in [2, 4] {
                let spec = Spec { window_blocks, ..spec.clone() };
                let sequence = Sequence::new(&spec, 17, 300, 2);
                let logits = run_chunks(&mut cpu(&spec, 21, 2, isa), &sequence, 23, spec.vocab);
                let what = format!("{kv:?} {isa:?}, window blocks {window_blocks} times as large");
                assert_same_bits(&what, &logits, &oracle, spec.vocab);
                let mut reference = ReferenceBackend::new();
                load(&mut reference, &spec, 21);
                let expected = run_chunks(&mut reference, &sequence, 60, spec.vocab);
                close(&what, &oracle, &expected, tolerance(kv));
            }
        }
        let mut reference = ReferenceBackend::new();
        load(&mut reference, &spec, 21);
        let expected = run_chunks(&mut reference, &sequence, 60, spec.vocab);
        close(&format!("{kv:?}"), &oracle, &expected, tolerance(kv));
    }
}

#[test]
fn what_a_batch_does_not_change_of_a_block_table_stays() {
    let spec = Spec { windows: &[Some(19), None], layers: 2, window_blocks: 2, ..Spec::default() };
    let sequence = Sequence::new(&spec, 17, 70, 0);
    let whole = run_chunks(&mut cpu(&spec, 8, 2, Isa::best()), &sequence, 70, spec.vocab);
    let mut reference = ReferenceBackend::new();
    load(&mut reference, &spec, 8);
    let expected = run_chunks(&mut reference, &sequence, 70, spec.vocab);
    let mut backends: [(Box<dyn Backend>, _); 2] =
        [(Box::new(cpu(&spec, 8, 2, Isa::best())), whole), (Box::new(reference), expected)];
    for (backend, whole) in &mut backends {
        for position in 0..70u32 {
            let mut batch = Batch {
                tokens: vec![sequence.tokens[position as usize]],
                spans: vec![Span {
                    first_row: 0,
                    rows: 1,
                    first_position: position,
                    slot: 3,
                    tentative_from: u32::MAX,
                }],
                logit_rows: vec![0],
                ..Batch::default()
            };
            // Each block is named once, when it is first needed.
            for (group, tokens) in [(0, 16), (1, 32)] {
                if position % tokens == 0 {
                    let entry = position / tokens;
                    batch.edit_table(3, group, entry, [7 - entry]);
                }
            }
            // A hole is put where the first block was, and the rest of the table stays.
            if position == 60 {
                batch.edits.push(TableEdit { len: 2, ..TableEdit::whole(3, 1, 0, 1) });
                batch.blocks.push(HOLE);
            }
            let logits = backend.forward(&batch).expect("a step");
            let at = position as usize * spec.vocab;
            assert_same_bits(
                &format!("position {position}"),
                logits,
                &whole[at..at + spec.vocab],
                spec.vocab,
            );
        }
    }
}

/// The same behind a window: the blocks that it gave back are full of NaN, and so is what is ahead.
#[test]
fn stale_bytes_behind_a_window_are_never_seen() {
    for windows in [&[Some(20), None][..], &[Some(7)]] {
        let windows: &'static [Option<u32>] = windows.to_vec().leak();
        let spec = Spec {
            windows,
            sinks: true,
            softcap: Some(3.0),
            nan_token: Some(100),
            max_rows: 128,
            ..Spec::default()
        };
        let sequence = Sequence::new(&spec, 5, 61, 0);
        for isa in isas() {
            let clean = run_chunks(&mut cpu(&spec, 8, 2, isa), &sequence, 61, spec.vocab);
            let mut backend = cpu(&spec, 8, 2, isa);
            let poison = Sequence { tokens: vec![100; 64], blocks: vec![2, 0, 3, 1], ..sequence.clone() };
            for chunk in [1, 5, 61] {
                run_chunks(&mut backend, &poison, 64, spec.vocab);
                let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                assert_same_bits(&format!("{isa:?} chunks of {chunk}"), &logits, &clean, spec.vocab);
            }
        }
    }
}

#[test]
fn stale_bytes_in_a_reused_block_are_never_seen() {
    let quantized = [Quantize::Q8, Quantize::Q4].map(|to| (KvFormat::F16, Some(to)));
    for (kv, quantize) in KvFormat::ALL.map(|kv| (kv, None)).into_iter().chain(quantized) {
        let plain = Spec { nan_token: Some(100), kv, max_rows: 128, ..Spec::default() };
        let spec = match quantize {
            Some(_) => Spec { quantize, hidden: 64, ffn: 96, ..plain },
            None => plain,
        };
        let sequence = Sequence::new(&spec, 5, 45, 0);
        for isa in isas() {
            let clean = run_chunks(&mut cpu(&spec, 4, 2, isa), &sequence, 45, spec.vocab);
            let mut backend = cpu(&spec, 4, 2, isa);
            let poison =
                Sequence { tokens: vec![100; 64], blocks: vec![2, 0, 3, 1], computed: 0, ..sequence.clone() };
            let poisoned = run_chunks(&mut backend, &poison, 64, spec.vocab);
            assert!(poisoned.iter().all(|x| x.is_nan()), "the poison works");
            for chunk in [1, 5, 45] {
                let logits = run_chunks(&mut backend, &sequence, chunk, spec.vocab);
                assert_same_bits(&format!("{kv:?} {isa:?} chunks of {chunk}"), &logits, &clean, spec.vocab);
                run_chunks(&mut backend, &poison, 64, spec.vocab);
            }
        }
    }
}
