//! Every family on the CPU backend: logits and greedy tokens as transformers computes them in float32, with every
//! instruction set this machine has.

use folio_cpu::{CpuBackend, CpuOptions, Isa};
use folio_model::Checkpoint;
use folio_model::backend::{Backend as _, Batch, Span};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::heads::{HEADS, PUBLISHED_WITH_MTP, WITH_MTP, check_head, check_mtp};
use folio_model::testing::{
    ADAPTERS, FIXTURES, LOGIT_TOLERANCE, QUANTIZED, Runner, check_adapter, check_fixture, check_stories,
    fixture, quantized, relative_difference, test_data,
};

fn backend(isa: Option<Isa>) -> impl Fn() -> CpuBackend {
    move || CpuBackend::new(CpuOptions { threads: Some(2), isa }).unwrap_or_else(|error| panic!("{error}"))
}

fn check_all(isa: Option<Isa>) {
    for name in FIXTURES {
        let parity = check_fixture(&fixture(name), backend(isa));
        assert!(parity.vectors > 0, "{name} expects no vectors");
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
fn adapters_add_what_peft_adds() {
    for isa in [None, Some(Isa::Scalar)] {
        for name in ADAPTERS {
            let parity = check_adapter(name, backend(isa));
            println!("{name}: logits within {:.1e}, {} tokens equal", parity.worst, parity.greedy_tokens);
        }
    }
}

#[test]
fn an_adapter_for_other_matrices_is_refused() {
    let other = Runner::with_adapter("qwen3_5_text", backend(None)());
    let mut runner = Runner::with_adapter("llama3", backend(None)());
    let span = Span { first_row: 0, rows: 1, first_position: 0, slot: 0, tentative_from: u32::MAX };
    let mut batch =
        Batch { tokens: vec![3], spans: vec![span], adapters: vec![other.adapter], ..Batch::default() };
    batch.edit_table(0, 0, 0, [0]);
    let error = runner.backend.forward(&batch).expect_err("other matrices");
    assert!(error.to_string().contains("an adapter for a matrix of"), "{error}");
    batch.adapters.push(runner.adapter.clone());
    assert!(
        runner.backend.forward(&batch).expect_err("too many").to_string().contains("2 adapters for 1 spans")
    );
}

#[test]
fn heads_compute_what_their_formulas_say() {
    for isa in [None, Some(Isa::Scalar)] {
        for name in HEADS {
            let worst = check_head(name, backend(isa), LOGIT_TOLERANCE);
            println!("{name}: within {worst:.1e}");
        }
        for name in WITH_MTP.iter().chain(PUBLISHED_WITH_MTP) {
            let worst = check_mtp(name, backend(isa), LOGIT_TOLERANCE);
            println!("{name}: within {worst:.1e}");
        }
    }
}

#[test]
fn a_trained_model_says_what_it_was_trained_to_say() {
    let Some(folder) = test_data("model-stories260k") else { return };
    assert_eq!(check_stories(&folder, backend(None)), 4 * 96);
}

/// FP8 is multiplied as floats and is as close as they are. Integers are multiplied with activations of 8 bits, so their
/// logits are only near: ten times nearer than columns in a wrong order, a wrong scale or a wrong zero point would be.
#[test]
fn every_way_of_quantizing_is_computed_as_it_is_decoded() {
    let prompt: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 97).collect();
    for name in QUANTIZED {
        if name.contains("fp8") {
            check_fixture(&quantized(name), backend(None));
            continue;
        }
        let checkpoint = Checkpoint::open(quantized(name)).unwrap_or_else(|error| panic!("{error}"));
        let mut reference = Runner::load(&checkpoint, ReferenceBackend::new(), None);
        let mut cpu = Runner::load(&checkpoint, backend(None)(), None);
        let expected = reference.forward(&prompt, &[0, 11, 23]).to_vec();
        let difference = relative_difference(cpu.forward(&prompt, &[0, 11, 23]), &expected);
        println!("{name}: logits within {difference:.1e} of those of the decoded weights");
        assert!(difference < 0.06, "{name}: {difference}");
    }
}
