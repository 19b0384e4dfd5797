//! `guarantee_completion`: whoever is admitted runs to its end, whatever else comes.

use std::sync::Arc;

use folio_engine::request::Request;
use folio_engine::{FinishReason, SchedulerConfig};
use folio_kv::{Quota, TenantId};
use folio_sim::Machine;
use folio_sim::scenario::{request, root, text};

fn machine(guarantee_completion: bool, windows: &[(u32, u32)]) -> Machine {
    let config = SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_prefill_tokens_while_decoding: 16,
        max_model_len: 128,
        watermark_permille: 0,
        headroom_tokens: 0,
        guarantee_completion,
        ..SchedulerConfig::default()
    };
    Machine::with_windows(config, 24, 4, windows)
}

/// Runs `requests` and gives (preemptions, most that ran at once, most blocks held).
fn run(machine: &mut Machine, requests: &[Request]) -> (u64, usize, u32) {
    let before = machine.scheduler.counters().preemptions;
    requests.iter().for_each(|request| machine.submit(request.clone()));
    let (mut most, mut held) = (0, 0);
    loop {
        machine.step();
        most = most.max(machine.scheduler.tables().count());
        held = held.max(machine.cache.stats().active_blocks);
        if !machine.scheduler.has_work() {
            break;
        }
    }
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    (machine.scheduler.counters().preemptions - before, most, held)
}

#[test]
fn on_a_full_pool_nobody_is_preempted_and_all_complete() {
    // 31 positions at most: eight blocks of four, so three fit a pool of 24.
    let requests: Vec<Request> = (1..=12).map(|id| request(id, &text(id as u32, 8), 24)).collect();
    for windows in [&[][..], &[(24, 6)]] {
        let (preemptions, most, held) = run(&mut machine(true, windows), &requests);
        assert_eq!((preemptions, most), (0, 3), "{windows:?}");
        assert!(held >= 20, "only {held} of 24 blocks were ever used");
        let (preemptions, most, _) = run(&mut machine(false, windows), &requests);
        assert!(preemptions > 0 && most > 3, "the control is not pressed: {preemptions}, {most} at once");
    }
}

#[test]
fn nor_are_choices_of_one_request() {
    let choices = |id: u64| {
        let mut many = request(id, &text(id as u32, 10), 40);
        (many.n, many.sampling.temperature, many.sampling.seed) = (4, 1.0, id);
        many
    };
    let requests = [choices(1), choices(2), request(3, &text(3, 8), 24)];
    for windows in [&[][..], &[(24, 6)]] {
        let (preemptions, ..) = run(&mut machine(true, windows), &requests);
        assert_eq!(preemptions, 0, "{windows:?}");
        let (preemptions, ..) = run(&mut machine(false, windows), &requests);
        assert!(preemptions > 0, "the control is not pressed");
    }
}

#[test]
fn better_priority_waits_for_whoever_runs_and_goes_before_whoever_waits() {
    for guaranteed in [true, false] {
        let mut machine = machine(guaranteed, &[]);
        // 91 positions: 23 of 24 blocks.
        let low = Request { priority: 5, ..request(1, &text(1, 60), 32) };
        machine.submit(low.clone());
        for _ in 0..6 {
            machine.step();
        }
        let next = Request { priority: 5, ..request(2, &text(2, 60), 5) };
        let high = Request { priority: -1, ..request(3, &text(3, 60), 5) };
        machine.submit(next.clone());
        machine.submit(high.clone());
        while machine.tokens(3, 0).is_empty() {
            machine.step();
        }
        assert!(machine.tokens(2, 0).is_empty(), "better priority comes first among those that wait");
        let ended = machine.finished(1) == [(0, FinishReason::Length)];
        machine.run();
        [&low, &next, &high].iter().for_each(|request| machine.assert_as_alone(request));
        let preemptions = machine.scheduler.counters().preemptions;
        assert_eq!((ended, preemptions == 0), (guaranteed, guaranteed), "{preemptions} preemptions");
    }
}

/// What is set aside below its ceiling is its own affair: others need room in the pool.
#[test]
fn a_tenant_at_its_ceiling_keeps_nobody_else_out() {
    let mut machine = machine(true, &[]);
    let quota = Quota { guarantee: 0, ceiling: 8 };
    machine.cache.set_quotas(&[(TenantId(1), quota)]).expect("a division that can be");
    // Eight blocks each: of the first tenant one, and in a pool of 24 two beside it.
    let of = |tenant: u32, id: u64| {
        let tenant = TenantId(tenant);
        Request { tenant, root: root(tenant), ..request(id, &text(id as u32, 8), 24) }
    };
    let (preemptions, most, _) = run(&mut machine, &[of(1, 1), of(1, 2), of(0, 3), of(0, 4)]);
    assert_eq!((preemptions, most), (0, 3));
}

#[test]
fn what_ends_early_makes_room_early() {
    let mut machine = machine(true, &[]);
    let brief: Vec<Request> = (1..=9)
        .map(|id| {
            let mut request = request(id, &text(id as u32, 8), 24);
            request.sampling.stop_token_ids = Arc::new([(id % 29) as u32, 3, 5, 7, 11, 13]);
            request
        })
        .collect();
    let steps = machine.plans().len();
    let (preemptions, ..) = run(&mut machine, &brief);
    assert_eq!(preemptions, 0);
    let taken = machine.plans().len() - steps;
    assert!(taken < 3 * 26, "{taken} steps: nothing was gained by ending early");
}
