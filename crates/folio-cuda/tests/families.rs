//! Every family on the CUDA backend, on this machine's GPU or, where it has none, with the kernels run on the host.
//!
//! With weights in f32 nothing is rounded that transformers does not round, so logits and greedy tokens must be transformers'. With the
//! weights that a checkpoint has, products round their inputs to bf16: logits are near, and ten times nearer than with a wrong scale, a
//! wrong order or a wrong mask.

use folio_cuda::CudaBackend;
use folio_emulator::{Order, device};
use folio_model::backend::DType;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::heads::{HEADS, WITH_MTP, check_head, check_mtp};
use folio_model::testing::recast::{Cast, Recast};
use folio_model::testing::{
    CPU_ONLY, FIXTURES, HYBRIDS, LATENT, LOGIT_TOLERANCE, QUANTIZED, Runner, check_fixture, fixture,
    quantized, relative_difference,
};
use folio_model::{Checkpoint, LoadOptions, Model};

fn backend() -> CudaBackend {
    CudaBackend::new(device(Order::default())).unwrap_or_else(|error| panic!("{error}"))
}

/// Weights in f32.
fn floats() -> Recast<CudaBackend> {
    Recast { backend: backend(), recast: 0, cast: Cast::Plain(DType::F32) }
}

#[test]
fn every_family_matches_transformers_where_nothing_is_rounded() {
    if !folio_emulator::available() {
        return;
    }
    for name in FIXTURES.iter().filter(|name| is_served(name)) {
        let parity = check_fixture(&fixture(name), floats);
        assert!(parity.vectors > 0, "{name} expects no vectors");
        println!("{name}: logits within {:.1e}, {} greedy tokens equal", parity.worst, parity.greedy_tokens);
    }
}

/// There are kernels for its layers.
fn is_served(name: &str) -> bool {
    let only = CPU_ONLY.iter().any(|(other, _)| *other == name);
    !only
        && !HYBRIDS.contains(&name)
        && !LATENT.contains(&name)
        && !["fp8_latent", "fp8_delta"].contains(&name)
}

#[test]
fn layers_that_have_no_kernels_are_refused_by_name() {
    if !folio_emulator::available() {
        return;
    }
    let of = |names: &'static [&'static str], what| names.iter().map(move |name| (name, what));
    let own = CPU_ONLY.iter().map(|(name, what)| (name, *what));
    for (name, what) in of(HYBRIDS, "gated delta nets").chain(of(LATENT, "latent attention")).chain(own) {
        let options = LoadOptions {
            max_rows: 8,
            max_logit_rows: 8,
            max_model_len: None,
            kv_formats: DType::F16.into(),
            block_tokens: 16,
            keeps_all: false,
            taps: None,
            progress: None,
        };
        let checkpoint = Checkpoint::open(fixture(name)).unwrap_or_else(|error| panic!("{error}"));
        let error = Model::load(&checkpoint, &mut backend(), options).expect_err(name).to_string();
        assert!(error.contains(what) && error.contains("on the CPU only"), "{name}: {error}");
    }
}

#[test]
fn heads_compute_what_their_formulas_say() {
    if !folio_emulator::available() {
        return;
    }
    for name in HEADS {
        let worst = check_head(name, floats, LOGIT_TOLERANCE);
        println!("{name}: within {worst:.1e}");
    }
    for name in WITH_MTP {
        let worst = check_mtp(name, floats, LOGIT_TOLERANCE);
        println!("{name}: within {worst:.1e}");
    }
}

#[test]
fn every_family_is_near_the_reference_with_its_own_weights() {
    if !folio_emulator::available() {
        return;
    }
    let prompt: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 97).collect();
    let served = FIXTURES.iter().filter(|name| is_served(name));
    let folders = served.map(|name| (name, fixture(name)));
    let quantized = QUANTIZED.iter().filter(|name| is_served(name)).map(|name| (name, quantized(name)));
    for (name, folder) in folders.chain(quantized) {
        let checkpoint = Checkpoint::open(folder).unwrap_or_else(|error| panic!("{error}"));
        let mut reference = Runner::load(&checkpoint, ReferenceBackend::new(), None);
        let mut cuda = Runner::load(&checkpoint, backend(), None);
        let expected = reference.forward(&prompt, &[0, 11, 23]).to_vec();
        let difference = relative_difference(cuda.forward(&prompt, &[0, 11, 23]), &expected);
        println!("{name}: logits within {difference:.1e} of the reference's");
        assert!(difference < 0.06, "{name}: {difference}");
    }
}
