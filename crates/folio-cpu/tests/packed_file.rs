//! A model from a file of packed weights is the model itself: the same facts, the same digest, the same bits.

use std::path::Path;

use folio_cpu::packed_file::PackedFile;
use folio_cpu::{CpuBackend, CpuOptions, Isa, Quantize};
use folio_model::backend::{Backend, Batch, DType, Span, TableEdit};
use folio_model::checkpoint::PACKED;
use folio_model::testing::{FIXTURES, fixture};
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model, PackedAbout};

fn backend(isa: Option<Isa>, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(threads), isa }).expect("a backend")
}

fn options() -> LoadOptions<'static> {
    LoadOptions {
        max_rows: 8,
        max_logit_rows: 8,
        max_model_len: None,
        kv_formats: DType::F32.into(),
        block_tokens: 16,
        keeps_all: false,
        taps: None,
        progress: None,
    }
}

fn logits(backend: &mut CpuBackend, model: &LoadedModel) -> Vec<u32> {
    let groups = model.kv_layout.groups.len();
    backend.allocate_cache(&model.kv_layout, &vec![2; groups]).expect("a cache");
    let batch = Batch {
        tokens: vec![1, 5, 3, 7],
        spans: vec![Span { first_row: 0, rows: 4, first_position: 0, slot: 0, tentative_from: u32::MAX }],
        edits: (0..groups as u32).map(|group| TableEdit::whole(0, group, 0, 1)).collect(),
        blocks: vec![1],
        logit_rows: vec![0, 3],
        ..Batch::default()
    };
    backend.forward(&batch).expect("logits").iter().map(|x| x.to_bits()).collect()
}

fn about(model: &LoadedModel) -> PackedAbout {
    PackedAbout {
        made_from: "a test".into(),
        quantized: None,
        parameters: model.parameters,
        weight_encoding: model.weight_encoding,
        kv_dtype: DType::BF16,
        tensors: model.tensor_digests.clone(),
    }
}

fn write(backend: &CpuBackend, model: &LoadedModel, path: &Path) {
    backend.packed_weights().write(path, &about(model).to_bytes(), &mut |_, _| true).expect("written");
}

/// A backend and model from the file; the checkpoint gives the configuration only.
fn load(path: &Path, checkpoint: &Checkpoint, mut backend: CpuBackend) -> (CpuBackend, LoadedModel) {
    let file = PackedFile::open(path).expect("opens");
    let about = PackedAbout::parse("the file", file.about()).expect("its description");
    let counts = file.counts();
    backend.load_packed(file).expect("loads");
    let model = Model::load_packed(checkpoint, &mut backend, &about, counts, options()).expect("fits");
    (backend, model)
}

#[test]
fn the_same_model_on_every_instruction_set() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join(PACKED);
    for (name, quantize) in FIXTURES.iter().flat_map(|name| [(name, None), (name, Some(Quantize::Q8))]) {
        let checkpoint = Checkpoint::open(fixture(name)).expect("opens");
        let mut packed = backend(None, 2);
        if let Some(to) = quantize {
            packed.quantize_weights(to);
        }
        let model = Model::load(&checkpoint, &mut packed, options()).expect("loads");
        write(&packed, &model, &path);
        let expected = logits(&mut packed, &model);
        assert_eq!(packed.mapped_bytes(), 0);
        for isa in [None, Some(Isa::Scalar)] {
            let (mut mapped, again) = load(&path, &checkpoint, backend(isa, 1));
            assert_eq!(again, model, "{name}: with the same digest");
            assert!(mapped.mapped_bytes() > 0);
            assert_eq!(mapped.weight_bytes(), packed.weight_bytes());
            assert!(logits(&mut mapped, &again) == expected, "{name} {quantize:?} {isa:?}");
        }
        // Made on the scalar instruction set, the file is the same, byte for byte.
        let mut scalar = backend(Some(Isa::Scalar), 1);
        if let Some(to) = quantize {
            scalar.quantize_weights(to);
        }
        let model = Model::load(&checkpoint, &mut scalar, options()).expect("loads");
        let other = folder.path().join("other");
        write(&scalar, &model, &other);
        assert!(std::fs::read(&other).expect("file") == std::fs::read(&path).expect("file"), "{name}");
    }
}

#[test]
fn weights_of_another_configuration_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join(PACKED);
    let checkpoint = Checkpoint::open(fixture("llama3")).expect("opens");
    let mut packed = backend(None, 1);
    let model = Model::load(&checkpoint, &mut packed, options()).expect("loads");
    write(&packed, &model, &path);
    for other in ["qwen2", "qwen3", "phi3"] {
        let checkpoint = Checkpoint::open(fixture(other)).expect("opens");
        let file = PackedFile::open(&path).expect("opens");
        let counts = file.counts();
        let mut backend = backend(None, 1);
        backend.load_packed(file).expect("loads");
        let fits = Model::load_packed(&checkpoint, &mut backend, &about(&model), counts, options());
        assert!(fits.is_err(), "{other}");
    }
}
