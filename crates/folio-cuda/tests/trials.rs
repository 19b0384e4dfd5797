//! Whom the backend lets multiply: libraries on the host that are right, or wrong in a way of choice.

use std::hash::{DefaultHasher, Hash, Hasher};

use folio_cuda::{CudaBackend, Driver};
use folio_emulator::{Conduct, Emulator};
use folio_model::backend::{Backend, Batch, DType, Span, TableEdit};
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::testing::recast::{Cast, Recast};
use folio_model::testing::{fixture, quantized, relative_difference};
use folio_model::{Checkpoint, LoadOptions, Model};

const BLOCK: usize = 16;

fn backend(driver: impl Driver + 'static) -> CudaBackend {
    CudaBackend::new(Box::new(driver)).unwrap_or_else(|error| panic!("{error}"))
}

fn with(conducts: &[Conduct]) -> CudaBackend {
    backend(Emulator::default().with_library(conducts))
}

/// Loads a fixture with weights in bf16, or in the type that a quantized one has.
fn load(backend: CudaBackend, name: &str) -> CudaBackend {
    let (folder, cast) = match folio_model::testing::QUANTIZED.contains(&name) {
        true => (quantized(name), Cast::Keep),
        false => (fixture(name), Cast::Plain(DType::BF16)),
    };
    let checkpoint = Checkpoint::open(folder).unwrap_or_else(|error| panic!("{error}"));
    let mut recast = Recast { backend, recast: 0, cast };
    let model = Model::load(&checkpoint, &mut recast, options()).unwrap_or_else(|error| panic!("{error}"));
    recast.backend.allocate_cache(&model.kv_layout, &[64]).unwrap();
    recast.backend
}

fn options() -> LoadOptions<'static> {
    LoadOptions {
        max_rows: 96,
        max_logit_rows: 96,
        max_model_len: Some(128),
        kv_formats: DType::BF16.into(),
        block_tokens: BLOCK,
        keeps_all: false,
        taps: None,
        progress: None,
    }
}

/// A digest of the bits of [`logits`].
fn bits(backend: &mut CudaBackend, rows: u32) -> u64 {
    let mut hasher = DefaultHasher::new();
    logits(backend, rows).iter().for_each(|value| value.to_bits().hash(&mut hasher));
    hasher.finish()
}

/// The logits of `rows` tokens of one sequence.
fn logits(backend: &mut CudaBackend, rows: u32) -> Vec<f32> {
    let batch = Batch {
        tokens: (0..rows).map(|row| 3 + (row * 7) % 50).collect(),
        spans: vec![Span { first_row: 0, rows, first_position: 0, slot: 0, tentative_from: u32::MAX }],
        edits: vec![TableEdit::whole(0, 0, 0, 8)],
        blocks: (0..8).collect(),
        logit_rows: (0..rows).collect(),
        ..Batch::default()
    };
    backend.forward(&batch).unwrap().to_vec()
}

/// What no algorithm may do; each is of an algorithm that is right otherwise.
const WRONG: [Conduct; 6] = [
    Conduct::SplitsFew,
    Conduct::LastRowDiffers,
    Conduct::TakesAtMost(95),
    Conduct::FailsAt(17),
    Conduct::Doubles,
    Conduct::WritesNothing,
];

#[test]
fn an_algorithm_that_is_wrong_is_never_used() {
    if !folio_emulator::available() {
        return;
    }
    for name in ["llama3", "ct_fp8"] {
        let mut own = load(backend(Emulator::default()), name);
        let mut right = load(with(&[Conduct::Right]), name);
        let (by_own, by_right) = (bits(&mut own, 20), bits(&mut right, 20));
        let given = right.given_to_a_library();
        assert!(given > 0 && own.given_to_a_library() == 0);
        // Of 64 columns our own kernels make one sum too; with FP8, rows are rounded once more.
        assert_eq!(by_own == by_right, name == "llama3", "{name}");
        for conduct in WRONG {
            let mut second = load(with(&[conduct, Conduct::Right]), name);
            assert_eq!(second.given_to_a_library(), given, "{name}: the one after {conduct:?} is taken");
            assert_eq!(bits(&mut second, 20), by_right, "{name}: {conduct:?}");
            let mut alone = load(with(&[conduct]), name);
            assert_eq!(alone.given_to_a_library(), 0, "{name}: {conduct:?} alone");
            assert_eq!(bits(&mut alone, 20), by_own, "{name}: {conduct:?} alone");
        }
        assert_eq!(bits(&mut load(with(&WRONG), name), 20), by_own, "{name}: none may be used");
        assert_eq!(bits(&mut load(with(&[]), name), 20), by_own, "{name}: none is offered");
    }
}

/// Once more, with a process's worth of other work in between: the same choice, the same bits.
#[test]
fn the_same_is_chosen_at_every_load() {
    if !folio_emulator::available() {
        return;
    }
    let conducts = [Conduct::SplitsFew, Conduct::Right, Conduct::Right];
    let mut first = load(with(&conducts), "qwen3");
    let before = bits(&mut first, 33);
    let mut second = load(with(&conducts), "qwen3");
    assert_eq!(bits(&mut second, 33), before);
    assert_eq!(first.weight_bytes(), second.weight_bytes());
}

#[test]
fn a_matrix_is_held_once() {
    if !folio_emulator::available() {
        return;
    }
    let of = |backend: CudaBackend| {
        let before = backend.free_bytes().unwrap();
        let backend = load(backend, "llama3");
        (backend.weight_bytes(), before - backend.free_bytes().unwrap(), backend.buffer_bytes())
    };
    let (own, own_taken, own_buffers) = of(backend(Emulator::default()));
    let (given, taken, buffers) = of(with(&[Conduct::Right]));
    // Tiles of 16 rows are padded, rows are not.
    assert!(given <= own, "{given} bytes of weights, {own} in our own form");
    assert!(buffers > own_buffers, "the workspace is counted");
    assert_eq!(taken - buffers - given, own_taken - own_buffers - own, "nothing of a trial is left");
}

/// The head of a model whose embeddings are tied is an embedding table, experts are multiplied in ranges, and rows of several blocks have
/// several scales: those stay our own, and so do numbers of columns that are not aligned.
#[test]
fn what_a_library_does_not_know_stays_our_own() {
    if !folio_emulator::available() {
        return;
    }
    let given = |name: &str| load(with(&[Conduct::Right]), name).given_to_a_library();
    // One layer. Only rows of the down projection are longer than a block.
    assert_eq!(given("fp8_block"), 3);
    // Two layers; of 100 columns of the down projection nothing is aligned.
    assert_eq!(given("llama3"), 2 * 3);
    assert!(given("fp8_tensor") > 0 && given("ct_fp8") > 0 && given("qwen3_moe") > 0);
    let floats = Recast { backend: with(&[Conduct::Right]), recast: 0, cast: Cast::Plain(DType::F32) };
    let checkpoint = Checkpoint::open(fixture("llama3")).unwrap();
    let mut floats = floats;
    Model::load(&checkpoint, &mut floats, options()).unwrap();
    assert_eq!(floats.backend.given_to_a_library(), 0, "f32 weights are multiplied by f32");
}

/// What `bench engine --load-format dummy:Fp8x128 --gemm-backend cublaslt` measures.
#[test]
fn weights_that_a_device_makes_up_can_be_given_to_a_library() {
    if !folio_emulator::available() {
        return;
    }
    for encoding in [Encoding::Plain(DType::BF16), Encoding::Block(BlockFormat::Fp8x32)] {
        let of = |mut backend: CudaBackend| {
            let checkpoint = Checkpoint::open_without_weights(quantized("fp8_tensor")).unwrap();
            let model = Model::load_dummy(&checkpoint, &mut backend, encoding, options()).unwrap();
            backend.allocate_cache(&model.kv_layout, &[64]).unwrap();
            (backend.given_to_a_library(), logits(&mut backend, 9))
        };
        let (given, found) = of(with(&[Conduct::Right]));
        let (none, own) = of(backend(Emulator::default()));
        assert!(given > 0 && none == 0, "{encoding}");
        let difference = relative_difference(&found, &own);
        assert!(difference < 0.25, "{encoding}: {difference}");
    }
}
