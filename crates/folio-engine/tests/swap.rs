//! Copies of preempted sequences in host memory: made when they pay, used once, by nobody else, and never left behind.

use folio_engine::plan::ExecutorError;
use folio_engine::request::Request;
use folio_engine::{Micros, SchedulerConfig};
use folio_kv::TenantId;
use folio_sim::Machine;
use folio_sim::scenario::{request, root};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 1024,
        watermark_permille: 0,
        ..SchedulerConfig::default()
    }
}

fn text(kind: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 7 + kind * 11 + i * i * (kind + 1)) % 29).collect()
}

/// Runs `requests` for some steps, then takes everything from everybody, the content too.
fn disturbed(mut machine: Machine, requests: &[Request], steps: usize) -> Machine {
    requests.iter().for_each(|request| machine.submit(request.clone()));
    (0..steps).for_each(|_| {
        machine.step();
    });
    assert!(machine.scheduler.preempt_all(&mut machine.cache) > 0);
    machine.cache.clear(None);
    machine
}

#[test]
fn what_was_copied_is_not_computed_again() {
    for windows in [vec![], vec![(40, 20), (64, 100)]] {
        let requests = [request(1, &text(1, 100), 40), request(2, &text(2, 45), 30)];
        for slots in [0, 64] {
            let machine = Machine::with_windows(config(), 64, 16, &windows).with_swap(slots, 0.0);
            let mut machine = disturbed(machine, &requests, 12);
            machine.run();
            requests.iter().for_each(|request| machine.assert_as_alone(request));
            let counters = *machine.scheduler.counters();
            assert_eq!(counters.preemptions, 2);
            assert_eq!(counters.preemptions_swapped, if slots > 0 { 2 } else { 0 });
            assert_eq!(counters.recomputed_tokens == 0, slots > 0, "{counters:?}");
            assert_eq!(counters.swapped_in_bytes, counters.swapped_out_bytes, "all of it was needed");
            assert_eq!(machine.cache.stats().swapped_bytes, 0, "nothing stays behind");
        }
    }
}

/// A step of the machine takes a millisecond, so computing 100 tokens takes two.
#[test]
fn where_copying_costs_more_than_computing_nothing_is_copied() {
    let rounds = |us: f64| {
        let mut machine = Machine::new(config(), 64, 16).with_swap(64, us);
        for round in 0..6 {
            let one = [request(round, &text(round as u32, 100), 8)];
            machine = disturbed(machine, &one, 4);
            machine.run();
            machine.assert_as_alone(&one[0]);
        }
        machine.scheduler.counters().preemptions_swapped
    };
    assert_eq!(rounds(1.0), 6);
    assert_eq!(rounds(10_000.0), 1, "the first copy is how it is found out");
}

#[test]
fn what_the_cache_kept_is_not_copied_back() {
    let mut machine = Machine::new(config(), 64, 16).with_swap(64, 0.0);
    let one = request(1, &text(1, 100), 20);
    machine.submit(one.clone());
    (0..6).for_each(|_| {
        machine.step();
    });
    machine.scheduler.preempt_all(&mut machine.cache);
    machine.run();
    machine.assert_as_alone(&one);
    let counters = machine.scheduler.counters();
    assert_eq!((counters.preemptions_swapped, counters.swapped_in_bytes), (1, 0), "the pool had it all");
    assert_eq!((counters.recomputed_tokens, machine.cache.stats().swapped_bytes), (0, 0));
}

#[test]
fn a_copy_ends_with_its_request() {
    for ends in ["cancelled", "overdue", "failed"] {
        let mut machine = Machine::new(config(), 64, 16).with_swap(64, 0.0);
        let mut one = request(1, &text(1, 100), 40);
        one.deadline = (ends == "overdue").then_some(Micros(20_000));
        // Somebody who keeps it waiting: better priority, all of the pool.
        machine = disturbed(machine, &[one], 8);
        machine.submit(Request { priority: -1, ..request(2, &text(2, 900), 60) });
        machine.step();
        assert!(machine.cache.stats().swapped_bytes > 0, "{ends}: no copy was made");
        match ends {
            "cancelled" => machine.cancel(1),
            "overdue" => machine.now = Micros(20_000),
            _ => {
                machine.scheduler.fail_all(&mut machine.cache, "stopped", Micros(0));
            }
        }
        if ends != "failed" {
            machine.step();
        }
        assert_eq!(machine.cache.stats().swapped_bytes, 0, "{ends}: its copy stayed");
    }
}

/// Nobody knows what of a failed step's copying happened, so nothing of it is used.
#[test]
fn a_copy_whose_step_failed_is_forgotten() {
    let one = request(1, &text(1, 100), 40);
    let mut machine =
        disturbed(Machine::new(config(), 64, 16).with_swap(64, 0.0), std::slice::from_ref(&one), 8);
    assert!(machine.cache.stats().swapped_bytes > 0, "a copy is to be made");
    let other = Request { priority: -1, ..request(2, &text(2, 900), 60) };
    machine.scheduler.admit([other.hashed(16)], [], machine.now);
    let plan = machine.scheduler.plan(&mut machine.cache, machine.now);
    assert!(!plan.swap_outs.is_empty() && plan.sequences.len() == 1, "it belongs into the other's step");
    let error = ExecutorError { step: plan.step, reason: "injected".into() };
    machine.scheduler.commit(&mut machine.cache, Err(error), machine.now).clear();
    assert_eq!(machine.cache.stats().swapped_bytes, 0);
    machine.run();
    machine.assert_as_alone(&one);
    assert!(machine.scheduler.counters().recomputed_tokens > 0);
}

/// A copy is in no index: whoever asks for the same text, of whatever tenant, finds what the cache has and no more.
#[test]
fn a_copy_is_its_sequences_alone() {
    for tenant in [0, 1] {
        let mut machine = Machine::new(config(), 80, 16).with_swap(64, 0.0);
        machine = disturbed(machine, &[request(1, &text(1, 100), 40)], 8);
        let tenant = TenantId(tenant);
        let prober = Request { tenant, root: root(tenant), priority: -1, ..request(2, &text(1, 100), 30) };
        machine.submit(prober.clone());
        machine.step();
        machine.run();
        assert_eq!(machine.cached_tokens(2), Some(0), "{tenant:?} was given what only a copy had");
        machine.assert_as_alone(&prober);
        machine.assert_as_alone(&request(1, &text(1, 100), 40));
        assert_eq!(machine.scheduler.counters().preemptions_swapped, 1);
    }
}

#[test]
fn choices_come_back_with_what_they_share() {
    for clear in [true, false] {
        let mut machine = Machine::new(config(), 120, 16).with_swap(120, 0.0);
        let mut four = Request { n: 4, ..request(1, &text(1, 90), 40) };
        four.sampling.temperature = 1.0;
        machine.submit(four.clone());
        (0..30).for_each(|_| {
            machine.step();
        });
        assert_eq!(machine.scheduler.preempt_all(&mut machine.cache), 4);
        if clear {
            machine.cache.clear(None);
        }
        machine.run();
        machine.assert_as_alone(&four);
        assert!(machine.scheduler.counters().preemptions_swapped > 0);
        assert_eq!(machine.cache.stats().swapped_bytes, 0);
    }
}

#[test]
fn a_full_swap_space_copies_whom_it_can() {
    let requests: Vec<_> = (1..=4).map(|id| request(id, &text(id as u32, 60), 30)).collect();
    let mut machine = disturbed(Machine::new(config(), 64, 16).with_swap(11, 0.0), &requests, 10);
    let used = machine.cache.stats().swapped_bytes;
    assert!((5..=11).contains(&used), "{used} slots of 11");
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    let counters = machine.scheduler.counters();
    assert!((1..4).contains(&counters.preemptions_swapped) && counters.recomputed_tokens > 0, "{counters:?}");
}
