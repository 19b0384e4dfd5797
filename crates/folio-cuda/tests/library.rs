//! Products by a library: cuBLASLt on this machine's GPU, or one on the host.

use folio_cuda::CudaBackend;
use folio_emulator::{Conduct, Emulator, Order, device_with_library};
use folio_model::backend::{Backend, Batch, DType, Span, TableEdit};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::recast::{Cast, Recast};
use folio_model::testing::{Runner, fixture, quantized, relative_difference};
use folio_model::{Checkpoint, LoadOptions, Model};

const BLOCK: usize = 16;

fn backend() -> CudaBackend {
    CudaBackend::new(device_with_library(Order::default())).unwrap_or_else(|error| panic!("{error}"))
}

/// The host's, whatever this machine has.
fn numerics(driver: Emulator) -> String {
    let backend = CudaBackend::new(Box::new(driver)).unwrap_or_else(|error| panic!("{error}"));
    load(backend, "llama3").numerics()
}

#[test]
fn whose_products_they_are_is_part_of_the_identity_of_cached_bits() {
    if !folio_emulator::available() {
        return;
    }
    let device = || Emulator::new(Order::default());
    let own = numerics(device());
    assert_eq!(own, format!("cuda kernels {} on sm_80", folio_cuda::NUMERICS));
    // Of two algorithms the second, because the first may not be used.
    let [first, second] =
        [&[Conduct::Right][..], &[Conduct::LastRowDiffers, Conduct::Right]].map(|conducts| {
            let all = numerics(device().with_library(conducts));
            assert!(all.starts_with(&own) && all.contains("the emulator's library"), "{all}");
            all
        });
    assert_ne!(first, second);
    assert_eq!(numerics(device().with_library(&[Conduct::Doubles])), own, "no algorithm may be used");
    assert_eq!(numerics(device().with_multiprocessors(7).with_memory(2 << 30)), own);
    let other = device().with_library(&[Conduct::Right]).with_multiprocessors(7);
    assert_eq!(numerics(other), first);
}

/// On the host the library multiplies what it may; on a GPU it may be too old for a type, which is said.
fn check_given(backend: &CudaBackend, name: &str) {
    let given = backend.given_to_a_library();
    println!("{name}: {given} matrices are multiplied by a library");
    assert!(given > 0 || backend.device().name != "emulator", "{name}");
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

#[test]
fn graphs_of_a_librarys_products_give_what_its_calls_give() {
    if !folio_emulator::available() {
        return;
    }
    for name in ["llama3", "fp8_tensor"] {
        let (mut graphs, mut eager) = (load(backend(), name), load(backend(), name));
        eager.without_graphs();
        check_given(&eager, name);
        for (position, sequences) in (0..).zip([7u32, 5, 8, 6, 1, 2, 7, 1]) {
            let span = |row| Span {
                first_row: row,
                rows: 1,
                first_position: position,
                slot: row,
                tentative_from: u32::MAX,
            };
            let batch = Batch {
                tokens: (0..sequences).map(|row| 3 + (row + 7 * position) % 50).collect(),
                spans: (0..sequences).map(span).collect(),
                edits: (0..sequences).map(|row| TableEdit::whole(row, 0, 8 * row, 8)).collect(),
                blocks: (0..8 * sequences).collect(),
                logit_rows: (0..sequences).collect(),
                ..Batch::default()
            };
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            let expected = bits(eager.forward(&batch).unwrap());
            assert_eq!(bits(graphs.forward(&batch).unwrap()), expected, "{name}: {sequences} at {position}");
        }
        assert_eq!((graphs.graphs(), eager.graphs()), (2, 0));
    }
}

/// bf16 is multiplied as our own kernels do; with FP8 weights, rows are rounded to FP8, which our own kernels do not.
#[test]
fn families_are_near_the_reference() {
    if !folio_emulator::available() {
        return;
    }
    let prompt: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 97).collect();
    let plain = ["llama3", "qwen3", "qwen2", "phi3", "gemma3_text", "qwen3_moe"]
        .map(|name| (name, fixture(name), 0.06));
    let fp8 = ["ct_fp8", "fp8_tensor"].map(|name| (name, quantized(name), 0.15));
    for (name, folder, most) in plain.into_iter().chain(fp8) {
        let cast = if most > 0.1 { Cast::Keep } else { Cast::Plain(DType::BF16) };
        let checkpoint = Checkpoint::open(folder).unwrap_or_else(|error| panic!("{error}"));
        let reference = Recast { backend: ReferenceBackend::new(), recast: 0, cast };
        let mut reference = Runner::load(&checkpoint, reference, None);
        let mut cuda = Runner::load(&checkpoint, Recast { backend: backend(), recast: 0, cast }, None);
        let expected = reference.forward(&prompt, &[0, 11, 23]).to_vec();
        let difference = relative_difference(cuda.forward(&prompt, &[0, 11, 23]), &expected);
        println!("{name}: logits within {difference:.1e} of the reference's");
        assert!(difference < most, "{name}: {difference}");
        check_given(&cuda.backend.backend, name);
    }
}
