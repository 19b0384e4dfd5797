//! A head that proposes drafts from the model's features (EAGLE-3): the tokens are as alone, and it gets the features of the right rows. The
//! modelled head is right whenever it does, and wrong otherwise.

use folio_engine::{Drafter, Request, SchedulerConfig};
use folio_sim::machine::Machine;
use folio_sim::scenario::{self, request};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_prefill_tokens_while_decoding: 64,
        max_model_len: 400,
        ..SchedulerConfig::default()
    }
}

fn machine(blocks: u32, of_head: u32) -> Machine {
    Machine::new(config(), blocks, 4).with_head(of_head, 64)
}

/// At most `drafts` of it in a step.
fn drafted(id: u64, prompt: &[u32], max_tokens: u32, drafts: u32) -> Request {
    scenario::drafted(id, Drafter::Eagle3, prompt, max_tokens, drafts)
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| at * 7 % 29).collect()
}

/// Drafts, and those that were right.
fn drafts(machine: &Machine) -> (u64, u64) {
    machine.scheduler.counters().draft_tokens()
}

/// Of what the head computed of a sequence: context, first position, rows, drafts.
fn computed(machine: &Machine, sequence: u64) -> Vec<(u32, u32, u32, u32)> {
    let sequences = machine.plans().iter().flat_map(|plan| &plan.sequences).filter(|of| of.id.0 == sequence);
    let of_head = sequences.map(|of| &of.drafter).filter(|drafter| !drafter.tokens.is_empty());
    of_head.map(|of| (of.context, of.first_position, of.tokens.len() as u32, of.drafts)).collect()
}

#[test]
fn with_the_right_features_it_is_always_right() {
    for sampling in [false, true] {
        for temperature in [0.0, 1.0] {
            let mut machine = machine(100, 100);
            if sampling {
                machine = Machine::new(config(), 100, 4).with_sampling().with_head(100, 64);
            }
            let mut request = drafted(1, &prompt(150), 40, 3);
            (request.sampling.temperature, request.sampling.seed) = (temperature, 17);
            machine.submit(request.clone());
            machine.run();
            machine.assert_as_alone(&request);
            let (drafted, right) = drafts(&machine);
            assert!(drafted >= 24 && drafted == right, "{sampling}, {temperature}: {right} of {drafted}");
        }
    }
}

#[test]
fn each_row_is_computed_when_the_model_has_its_features_and_those_of_drafts_again() {
    let mut machine = machine(100, 100);
    machine.submit(drafted(1, &prompt(70), 12, 2));
    machine.run();
    // Before the second piece of the prompt what the first gave; then what the second gave, and then what the model said behind the
    // drafts that were right.
    let wanted = [(0, 0, 64, 0), (0, 64, 7, 1), (0, 71, 2, 2), (0, 73, 3, 2), (0, 76, 3, 1)];
    assert_eq!(computed(&machine, 1), wanted);
}

#[test]
fn several_sequences_of_many_lengths_have_their_own_features() {
    let mut machine = machine(200, 200);
    let requests: Vec<Request> =
        (0..6).map(|id| drafted(id + 1, &prompt(11 + 17 * id as u32), 30, 4)).collect();
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    let (drafted, right) = drafts(&machine);
    assert!(drafted > 60 && drafted == right, "{right} of {drafted}");
}

/// The positions that were found have no features; the head's rows of them were found, too.
#[test]
fn a_prefix_that_is_found_is_found_by_the_head_too() {
    let mut machine = machine(200, 200);
    machine.submit(drafted(1, &prompt(160), 20, 3));
    machine.run();
    let second = drafted(2, &[prompt(140), vec![3, 4, 5]].concat(), 20, 3);
    machine.submit(second.clone());
    machine.run();
    machine.assert_as_alone(&second);
    assert_eq!(machine.cached_tokens(2), Some(140));
    assert_eq!(computed(&machine, 2)[0], (0, 140, 3, 3));
    let (drafted, right) = drafts(&machine);
    assert_eq!(drafted, right);
}

/// Where it was not there, its context begins with the first block of what the model computes.
#[test]
fn without_its_part_of_a_prefix_its_context_begins_behind() {
    let mut machine = machine(200, 200);
    machine.submit(request(1, &prompt(160), 8));
    machine.run();
    let second = drafted(2, &[prompt(142), vec![3, 4, 5]].concat(), 30, 3);
    machine.submit(second.clone());
    machine.run();
    machine.assert_as_alone(&second);
    let cached = machine.cached_tokens(2).expect("a prompt");
    assert!(cached >= 140, "{cached}");
    let of_second = computed(&machine, 2);
    assert_eq!(of_second[0], (140, 140, 2, 0));
    assert!(of_second.iter().all(|(context, ..)| *context == 140), "{of_second:?}");
    let (drafted, right) = drafts(&machine);
    assert!(drafted > 15 && drafted == right, "{right} of {drafted}");
    // What it writes then is of no use to others: a third begins anew, too.
    machine.submit(Request { id: folio_engine::RequestId(3), ..second });
    machine.run();
    assert!(computed(&machine, 3)[0].0 > 0);
}

/// Of a few positions its rows are computed without features, and its context stays.
#[test]
fn a_few_positions_without_features_do_not_end_its_context() {
    let mut machine = machine(200, 200);
    machine.submit(request(1, &prompt(40), 8));
    machine.run();
    let second = drafted(2, &[prompt(40), vec![3, 4, 5]].concat(), 30, 3);
    machine.submit(second.clone());
    machine.run();
    machine.assert_as_alone(&second);
    assert_eq!(computed(&machine, 2)[..2], [(0, 0, 40, 0), (0, 40, 3, 1)]);
    let (drafted, right) = drafts(&machine);
    assert!(drafted > 15 && drafted == right, "{right} of {drafted}");
}

#[test]
fn a_preempted_sequence_goes_on_with_drafts() {
    let mut machine = machine(200, 200);
    let wanted = drafted(1, &prompt(120), 60, 3);
    machine.submit(wanted.clone());
    for _ in 0..8 {
        machine.step();
    }
    let (before, _) = drafts(&machine);
    machine.scheduler.preempt_all(&mut machine.cache);
    machine.run();
    machine.assert_as_alone(&wanted);
    let (drafted, right) = drafts(&machine);
    assert!(drafted > before + 20 && drafted == right, "{right} of {drafted}, {before} before");
}

#[test]
fn choices_of_one_prompt_have_drafts_each() {
    let mut machine = machine(200, 200);
    let mut wanted = drafted(1, &prompt(90), 40, 3);
    (wanted.sampling.temperature, wanted.sampling.seed, wanted.n) = (1.0, 5, 3);
    machine.submit(wanted.clone());
    machine.run();
    machine.assert_as_alone(&wanted);
    let (drafted, right) = drafts(&machine);
    assert!(drafted > 60 && drafted == right, "{right} of {drafted}");
}

#[test]
fn without_room_for_the_head_everything_goes_on_without_it() {
    let mut machine = machine(100, 9);
    let wanted = drafted(1, &prompt(30), 40, 3);
    machine.submit(wanted.clone());
    machine.run();
    machine.assert_as_alone(&wanted);
    let (drafted, right) = drafts(&machine);
    assert!((1..=6).contains(&drafted) && drafted == right, "{drafted} drafts, {right} right");
}

/// While drafts are not worth it, rows are computed now and then, so that features do not become many.
#[test]
fn features_are_read_before_they_are_many() {
    let mut machine = machine(200, 200);
    // The first answer's rows have a price; then drafts are wrong for as long as nothing is right, and pauses grow.
    let wanted = drafted(1, &prompt(20), 300, 1);
    machine.submit(Request {
        sampling: folio_engine::SamplingParams { repetition_penalty: 5.0, ..wanted.sampling.clone() },
        ..wanted
    });
    machine.run();
    let mut last = 0;
    for plan in machine.plans() {
        for sequence in &plan.sequences {
            let end = sequence.drafter.first_position + sequence.drafter.tokens.len() as u32;
            last = last.max(end);
            assert!(sequence.first_position <= last + 64 + 64, "{last}: {sequence:?}");
        }
    }
    assert!(last > 200, "{last}");
}

#[test]
fn who_wants_no_drafts_gives_no_features() {
    let mut machine = machine(64, 64);
    machine.submit(request(1, &prompt(40), 8));
    machine.run();
    let sequences = || machine.plans().iter().flat_map(|plan| &plan.sequences);
    assert!(sequences().all(|of| of.drafter.tokens.is_empty() && of.features == 0));
}

#[test]
fn a_head_that_fails_is_not_asked_again_and_costs_no_token() {
    let mut machine = Machine::new(config(), 64, 4).with_head(64, 8);
    let wanted = drafted(1, &prompt(30), 40, 3);
    machine.submit(wanted.clone());
    machine.run();
    machine.assert_as_alone(&wanted);
    let (drafted, right) = drafts(&machine);
    assert!(right < drafted / 2, "its backend refuses {drafted} drafts' first rows");
}
