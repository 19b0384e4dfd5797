//! Rows with embeddings of their own, on one axis and on three: the logits of the reference backend, which rotates number by number.

use std::sync::Arc;

use folio_cpu::{CpuBackend, CpuOptions};
use folio_model::Checkpoint;
use folio_model::backend::{Axes, Backend, Batch, RowEmbeddings, RowPositions, Span};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{LOGIT_TOLERANCE, Runner, fixture, relative_difference};

const ROWS: u32 = 24;

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), isa: None }).expect("a backend")
}

/// Its heads turn by three axes.
fn three_axes(folder: &std::path::Path) -> Checkpoint {
    let from = fixture("qwen3");
    for entry in std::fs::read_dir(&from).expect("a fixture").flatten() {
        std::fs::copy(entry.path(), folder.join(entry.file_name())).expect("a copy");
    }
    let text = std::fs::read_to_string(from.join("config.json")).expect("a configuration");
    let own = "\"rope_parameters\": {";
    assert!(text.contains(own), "{text}");
    let sections = format!("{own}\"mrope_section\": [6, 5, 5], \"mrope_interleaved\": true,");
    std::fs::write(folder.join("config.json"), text.replace(own, &sections)).expect("a configuration");
    Checkpoint::open(folder).expect("opens")
}

/// One sequence, with an image at rows 5 to 16.
fn batch(width: usize, positions: bool) -> Batch {
    let values: Arc<[f32]> = (0..20 * width).map(|at| ((at * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let each: Arc<[[u32; 3]]> = (0..20).map(|at| [5, 5 + at / 4, 5 + at % 4]).collect();
    let image = |first| RowEmbeddings { first_row: 5, rows: 12, first, values: values.clone() };
    let moved = vec![
        RowPositions { first_row: 5, rows: 12, axes: Axes::Each { first: 2, values: each } },
        RowPositions { first_row: 17, rows: 7, axes: Axes::Shifted(-8) },
    ];
    let span = Span { first_row: 0, rows: ROWS, first_position: 0, slot: 0, tentative_from: u32::MAX };
    let mut batch = Batch {
        tokens: (0..ROWS).map(|at| (at * 7 + 3) % 199).collect(),
        spans: vec![span],
        logit_rows: (0..ROWS).collect(),
        embeddings: vec![image(2)],
        positions: if positions { moved } else { Vec::new() },
        ..Batch::default()
    };
    batch.edit_table(0, 0, 0, [1, 0]);
    batch
}

fn logits<B: Backend>(checkpoint: &Checkpoint, backend: B, batch: &Batch) -> Vec<f32> {
    let mut runner = Runner::load(checkpoint, backend, None);
    runner.backend.forward(batch).unwrap_or_else(|error| panic!("{error}")).to_vec()
}

#[test]
fn logits_are_those_of_the_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = three_axes(folder.path());
    let width = checkpoint.config().hidden;
    let text = Batch { embeddings: Vec::new(), ..batch(width, false) };
    let mut found = vec![logits(&checkpoint, backend(), &text)];
    for positions in [false, true] {
        let batch = batch(width, positions);
        let logits_here = logits(&checkpoint, backend(), &batch);
        let expected = logits(&checkpoint, ReferenceBackend::new(), &batch);
        let difference = relative_difference(&logits_here, &expected);
        assert!(difference <= LOGIT_TOLERANCE, "positions: {positions}: they differ by {difference:e}");
        let vocab = logits_here.len() / ROWS as usize;
        for other in &found {
            assert_eq!(other[..5 * vocab], logits_here[..5 * vocab], "before the image");
            let moved = relative_difference(&logits_here[6 * vocab..], &other[6 * vocab..]);
            assert!(moved > 10.0 * LOGIT_TOLERANCE, "positions: {positions}: {moved:e}");
        }
        found.push(logits_here);
    }
}

#[test]
fn what_is_not_of_its_rows_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = three_axes(folder.path());
    let width = checkpoint.config().hidden;
    type Change = fn(&mut Batch);
    let refusal = |checkpoint: &Checkpoint, change: Change| {
        let mut batch = batch(width, true);
        change(&mut batch);
        let mut runner = Runner::load(checkpoint, backend(), None);
        runner.backend.forward(&batch).expect_err("refused").to_string()
    };
    let cases: [(Change, &str); 5] = [
        (|batch| batch.embeddings[0].rows = 20, "embeddings of 20 rows from row 5 on, of 24"),
        (|batch| batch.embeddings[0].first = 9, "values of embeddings"),
        (|batch| batch.positions[1].first_row = 16, "positions of 7 rows from row 16 on, of 24"),
        (|batch| batch.positions[1].rows = 0, "positions of 0 rows"),
        (
            |batch| {
                let Axes::Each { first, .. } = &mut batch.positions[0].axes else { return };
                *first = 9;
            },
            "20 positions on three axes, 21 are needed",
        ),
    ];
    for (change, named) in cases {
        let error = refusal(&checkpoint, change);
        assert!(error.contains(named), "{named}: {error}");
    }
    let plain = Checkpoint::open(fixture("qwen3")).expect("opens");
    let error = refusal(&plain, |_| ());
    assert!(error.contains("three axes, and the model has one"), "{error}");
}
