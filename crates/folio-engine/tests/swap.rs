//! Preempted sequences in a tier that is memory: kept when that pays, loaded when they come back, and nobody's afterwards.

use folio_engine::SchedulerConfig;
use folio_engine::request::Request;
use folio_sim::Machine;
use folio_sim::scenario::{request, text};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 1024,
        watermark_permille: 0,
        ..SchedulerConfig::default()
    }
}

/// Runs `requests` for some steps, then takes everything from everybody, and what the tier did not read in time.
fn disturbed(mut machine: Machine, requests: &[Request], steps: usize) -> Machine {
    requests.iter().for_each(|request| machine.submit(request.clone()));
    (0..steps).for_each(|_| drop(machine.step().clone()));
    assert!(machine.scheduler.preempt_all(&mut machine.cache) > 0);
    // What of it takes longest ends with its lease.
    while machine.scheduler.is_preempting() {
        let plan = machine.step();
        assert!(plan.sequences.is_empty(), "nobody is admitted while the tier reads");
    }
    machine.cache.clear(None);
    machine
}

#[test]
fn what_was_kept_is_not_computed_again() {
    for windows in [vec![], vec![(40, 20), (64, 100)]] {
        let requests = [request(1, &text(1, 100), 40), request(2, &text(2, 45), 30)];
        for is_kept in [false, true] {
            let machine = Machine::with_windows(config(), 64, 16, &windows);
            let machine = if is_kept { machine.with_tier(1000, 0.0) } else { machine };
            let mut machine = disturbed(machine, &requests, 12);
            machine.run();
            requests.iter().for_each(|request| machine.assert_as_alone(request));
            let counters = *machine.scheduler.counters();
            assert_eq!(counters.preemptions, 2);
            assert_eq!(counters.preemptions_swapped, if is_kept { 2 } else { 0 });
            // But for what is less than a block of each.
            assert_eq!(counters.recomputed_tokens <= 30, is_kept, "{counters:?}");
            assert_eq!(machine.cache.stats().active_blocks, 0, "nothing stays behind");
        }
    }
}

#[test]
fn so_it_is_with_steps_under_way() {
    let requests = [request(1, &text(1, 100), 40), request(2, &text(2, 45), 30)];
    let mut machine = Machine::new(config(), 64, 16).with_sampling().with_tier(1000, 0.0);
    requests.iter().for_each(|request| machine.submit(request.clone()));
    (0..12).for_each(|_| drop(machine.step().clone()));
    assert!(machine.scheduler.preempt_all(&mut machine.cache) > 0 && machine.scheduler.is_preempting());
    while machine.scheduler.is_preempting() {
        machine.step();
    }
    machine.cache.clear(None);
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    let counters = machine.scheduler.counters();
    assert_eq!((counters.preemptions_swapped, counters.recomputed_tokens <= 30), (2, true), "{counters:?}");
    assert!(counters.steps_ahead > 0);
}

/// A step of the machine takes a millisecond, so computing 100 tokens takes two.
#[test]
fn where_keeping_costs_more_than_computing_nothing_is_kept() {
    let rounds = |us: f64| {
        let mut machine = Machine::new(config(), 64, 16).with_tier(1000, us);
        for round in 0..6 {
            let one = [request(round, &text(round as u32, 100), 8)];
            machine = disturbed(machine, &one, 4);
            machine.run();
            machine.assert_as_alone(&one[0]);
        }
        machine.scheduler.counters().preemptions_swapped
    };
    assert_eq!(rounds(1.0), 6);
    assert_eq!(rounds(10_000.0), 1, "the first is how it is found out");
}

#[test]
fn what_the_cache_still_has_is_not_loaded() {
    let mut machine = Machine::new(config(), 64, 16).with_tier(1000, 0.0);
    let one = request(1, &text(1, 100), 20);
    machine.submit(one.clone());
    (0..6).for_each(|_| drop(machine.step().clone()));
    machine.scheduler.preempt_all(&mut machine.cache);
    machine.run();
    machine.assert_as_alone(&one);
    let counters = machine.scheduler.counters();
    assert_eq!((counters.preemptions_swapped, counters.tier_loads[0]), (1, 0), "the pool had it all");
    assert_eq!(counters.recomputed_tokens, 0);
}

#[test]
fn choices_come_back_with_what_they_share() {
    for clear in [true, false] {
        let mut machine = Machine::new(config(), 120, 16).with_tier(1000, 0.0);
        let mut four = Request { n: 4, ..request(1, &text(1, 90), 40) };
        four.sampling.temperature = 1.0;
        machine.submit(four.clone());
        (0..30).for_each(|_| drop(machine.step().clone()));
        assert_eq!(machine.scheduler.preempt_all(&mut machine.cache), 4);
        machine.step();
        if clear {
            machine.cache.clear(None);
        }
        machine.run();
        machine.assert_as_alone(&four);
        let counters = machine.scheduler.counters();
        assert!(counters.preemptions_swapped > 0 && (counters.loaded_tokens > 0) == clear, "{counters:?}");
    }
}

/// What is wanted of every row of a prompt was had of those that are loaded.
#[test]
fn scores_of_rows_that_are_loaded_are_not_lost() {
    let mut machine = Machine::new(config(), 64, 16).with_tier(1000, 0.0);
    let one = Request { prompt_logprobs: Some(2), ..request(1, &text(1, 200), 10) };
    machine = disturbed(machine, std::slice::from_ref(&one), 2);
    machine.run();
    machine.assert_as_alone(&one);
    let counters = machine.scheduler.counters();
    assert!(counters.preemptions_swapped == 1 && counters.loaded_tokens > 0, "{counters:?}");
}

#[test]
fn a_full_tier_keeps_the_beginnings_of_whom_it_can() {
    let requests: Vec<_> = (1..=4).map(|id| request(id, &text(id as u32, 60), 30)).collect();
    let mut machine = disturbed(Machine::new(config(), 64, 16).with_tier(7, 0.0), &requests, 10);
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    let counters = machine.scheduler.counters();
    assert_eq!(counters.loaded_tokens, 7 * 16, "all that it has");
    assert!(counters.recomputed_tokens > 60, "{counters:?}");
}
