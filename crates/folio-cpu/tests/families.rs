//! Every family on the CPU backend: logits and greedy tokens as transformers computes them in float32, with every
//! instruction set this machine has.

use folio_cpu::{CpuBackend, CpuOptions, Isa};
use folio_model::testing::{FIXTURES, check_fixture, check_stories, fixture, test_data};

fn backend(isa: Option<Isa>) -> impl Fn() -> CpuBackend {
    move || CpuBackend::new(CpuOptions { threads: Some(2), isa }).unwrap_or_else(|error| panic!("{error}"))
}

fn check_all(isa: Option<Isa>) {
    for name in FIXTURES {
        let parity = check_fixture(&fixture(name), backend(isa));
        println!("{name}: logits within {:.1e}, {} greedy tokens equal", parity.worst, parity.greedy_tokens);
    }
}

#[test]
fn every_family_matches_transformers_with_the_widest_instruction_set() {
    check_all(None);
}

#[test]
fn every_family_matches_transformers_with_the_scalar_kernels() {
    check_all(Some(Isa::Scalar));
}

#[test]
fn a_trained_model_says_what_it_was_trained_to_say() {
    let Some(folder) = test_data("model-stories260k") else { return };
    assert_eq!(check_stories(&folder, backend(None)), 4 * 96);
}
