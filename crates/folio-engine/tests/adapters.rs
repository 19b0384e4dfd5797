//! Adapters whose weights come and go: who waits for some waits alone, nobody loses those it runs with, and nobody waits for ever.

use std::num::NonZeroU32;
use std::sync::Arc;

use folio_engine::request::{Event, Request, RequestId};
use folio_engine::{
    Adapter, AdapterId, AdapterSource, FinishReason, RequestAdapter, SchedulerConfig, WaitingFor,
};
use folio_sim::Machine;
use folio_sim::scenario::{adapter, request, small, text};

/// Room for so many adapters in memory.
fn room_for(adapters: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_adapters: 4,
        max_resident_adapters: adapters,
        adapter_wait_us_max: 50_000,
        max_bypasses: 2,
        ..small()
    }
}

fn id(of: u32) -> AdapterId {
    AdapterId(NonZeroU32::new(of).expect("a number"))
}

/// A request with this adapter; 0: with none.
fn with(number: u64, of: u32, max_tokens: u32) -> Request {
    let adapter = NonZeroU32::new(of).map(adapter);
    Request { adapter, ..request(number, &text(number as u32, 9), max_tokens) }
}

fn weights() -> Result<Arc<Adapter>, String> {
    Ok(Arc::default())
}

/// Adapters whose rows are in the last plan.
fn planned(machine: &Machine) -> Vec<u32> {
    let plan = machine.plans().last().expect("a plan");
    let adapters = plan.sequences.iter().filter_map(|entry| Some(entry.adapter.as_ref()?.id.0.get()));
    adapters.collect()
}

fn error(machine: &Machine, request: u64) -> String {
    let error = machine.events[&RequestId(request)].iter().find_map(|event| match event {
        Event::Finished { error: Some(error), .. } => Some(error.to_string()),
        _ => None,
    });
    error.expect("it ended with an error")
}

#[test]
fn with_room_for_one_everybody_gets_what_it_gets_with_room_for_all() {
    for (most, bytes) in [(1, u64::MAX), (2, u64::MAX), (u32::MAX, 5)] {
        let config = SchedulerConfig { max_adapter_bytes: bytes, ..room_for(most) };
        let mut machine = Machine::new(config, 200, 4);
        let requests: Vec<Request> = (1..13).map(|number| with(number, number as u32 % 4, 6)).collect();
        for requests in requests.chunks(3) {
            requests.iter().for_each(|request| machine.submit(request.clone()));
            machine.step();
            machine.scheduler.preempt_all(&mut machine.cache);
        }
        machine.run();
        requests.iter().for_each(|request| machine.assert_as_alone(request));
        let counters = machine.scheduler.counters();
        assert!(counters.adapter_loads >= 3 && counters.adapter_evictions >= 1, "{counters:?}");
        assert_eq!(counters.failed_adapter_loads, 0);
    }
}

#[test]
fn who_waits_for_weights_waits_alone() {
    let mut machine = Machine::new(room_for(2), 200, 4).with_slow_adapters();
    machine.submit(with(1, 1, 20));
    machine.step();
    machine.adapter_read(weights());
    machine.step();
    assert_eq!(planned(&machine), [1]);
    // Two for the same, and those that need nothing.
    let requests = [with(2, 2, 4), with(3, 2, 4), with(4, 0, 4), with(5, 1, 4)];
    requests.iter().for_each(|request| machine.submit(request.clone()));
    while machine.finished(4).is_empty() || machine.finished(5).is_empty() {
        machine.step();
        assert!(!planned(&machine).contains(&2));
    }
    assert_eq!((machine.reads(), machine.scheduler.suspended()), (&[id(2)][..], 2));
    machine.adapter_read(weights());
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    let counters = machine.scheduler.counters();
    assert_eq!((counters.waits[WaitingFor::Adapter], counters.adapter_loads), (3, 2));
}

#[test]
fn the_least_recently_used_goes_and_never_one_that_runs() {
    let mut machine = Machine::new(room_for(2), 200, 4).with_slow_adapters();
    for (number, of) in [(1, 1), (2, 2), (3, 1)] {
        machine.submit(with(number, of, 3));
        machine.step();
        if !machine.reads().is_empty() {
            machine.adapter_read(weights());
        }
        machine.run();
    }
    assert_eq!(machine.scheduler.counters().adapter_loads, 2, "the third found its own");
    machine.submit(with(4, 3, 30));
    machine.step();
    assert_eq!((machine.reads(), machine.scheduler.counters().adapter_evictions), (&[id(3)][..], 1));
    machine.adapter_read(weights());
    machine.submit(with(5, 1, 30));
    machine.step();
    assert_eq!(planned(&machine).len(), 2, "it was the second that went");
    // Both run: the third waits for the end of one, and nothing is read.
    machine.submit(with(6, 2, 3));
    while machine.finished(4).is_empty() && machine.finished(5).is_empty() {
        machine.step();
        assert!(machine.finished(4).len() + machine.finished(5).len() > 0 || machine.reads().is_empty());
    }
    machine.step();
    assert_eq!(machine.reads(), [id(2)]);
    machine.adapter_read(weights());
    machine.run();
    (1..7).for_each(|number| assert_eq!(machine.finished(number), [(0, FinishReason::Length)]));
}

#[test]
fn weights_that_cannot_be_read_end_those_who_wait_for_them_and_are_tried_again() {
    let mut machine = Machine::new(room_for(1), 200, 4).with_slow_adapters();
    let requests = [with(1, 1, 4), with(2, 1, 4), with(3, 0, 4)];
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.step();
    machine.adapter_read(Err("its file is gone".into()));
    machine.step();
    for number in [1, 2] {
        assert_eq!(machine.finished(number), [(0, FinishReason::Error)]);
        assert_eq!(error(&machine, number), "its file is gone");
    }
    machine.submit(with(4, 1, 4));
    machine.step();
    machine.adapter_read(weights());
    machine.run();
    machine.assert_as_alone(&requests[2]);
    machine.assert_as_alone(&with(4, 1, 4));
    let counters = machine.scheduler.counters();
    assert_eq!((counters.adapter_loads, counters.failed_adapter_loads), (2, 1));
}

/// The end of a wait, or of who waits, is not that of the reading: the weights are there for the next.
#[test]
fn weights_that_are_late_are_kept() {
    let mut machine = Machine::new(room_for(1), 200, 4).with_slow_adapters();
    machine.submit(with(1, 1, 4));
    machine.run();
    assert!(error(&machine, 1).contains("not loaded within 0.05 s"));
    machine.submit(with(2, 1, 4));
    machine.step();
    machine.cancel(2);
    machine.step();
    assert_eq!((machine.reads(), machine.finished(2)), (&[id(1)][..], vec![(0, FinishReason::Cancelled)]));
    machine.adapter_read(weights());
    machine.submit(with(3, 1, 4));
    machine.run();
    machine.assert_as_alone(&with(3, 1, 4));
    assert_eq!(machine.scheduler.counters().adapter_loads, 1);
}

/// Requests for the adapter that is there come all the time: they pass who waits for room a bounded number of times, then it is its turn. Those
/// without one go on.
#[test]
fn nobody_waits_for_ever_for_room() {
    let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 32, ..room_for(1) }, 400, 4);
    machine.submit(with(1, 1, 8));
    (0..2).for_each(|_| _ = machine.step());
    machine.submit(with(2, 2, 3));
    let mut last = 2;
    while machine.finished(2).is_empty() {
        assert!(last < 120, "others with an adapter are admitted for ever");
        for of in [1, 0] {
            last += 1;
            machine.submit(with(last, of, 8));
        }
        machine.step();
    }
    let first_token = |number: u64| !machine.tokens(number, 0).is_empty();
    let passed = (3..=last).filter(|number| number % 2 == 1 && first_token(*number)).count();
    assert!((1..=4).contains(&passed), "{passed} passed it");
    assert!((4..12).filter(|number| number % 2 == 0).all(first_token), "those without one were held up");
    machine.run();
    (1..=last).for_each(|number| assert_eq!(machine.finished(number).len(), 1));
}

/// Who is first lacks blocks; who is behind it may not take the weights that are there.
#[test]
fn the_weights_of_who_comes_first_stay() {
    let mut machine = Machine::new(SchedulerConfig { max_bypasses: 100, ..room_for(1) }, 30, 4);
    let long = |number, of| Request {
        adapter: NonZeroU32::new(of).map(adapter),
        ..request(number, &text(number as u32, 90), 8)
    };
    machine.submit(long(1, 0));
    machine.step();
    machine.submit(long(2, 1));
    machine.step();
    machine.submit(with(3, 2, 3));
    while machine.finished(1).is_empty() {
        machine.step();
        assert_eq!(machine.scheduler.counters().adapter_loads, 1, "the weights of the first, and no others");
    }
    machine.run();
    assert_eq!(machine.scheduler.counters().adapter_loads, 2);
    for request in [long(1, 0), long(2, 1), with(3, 2, 3)] {
        machine.assert_as_alone(&request);
    }
}

/// Who lacks weights does not run because a transfer from outside brings a part of it.
#[test]
fn a_transfer_begins_for_nobody_who_lacks_weights() {
    let mut machine = Machine::new(room_for(1), 200, 4);
    machine.submit(with(1, 1, 30));
    (0..2).for_each(|_| _ = machine.step());
    machine.submit(with(2, 2, 3));
    machine.step();
    assert_eq!((planned(&machine), machine.scheduler.suspended()), (vec![1], 0));
    let ticket = machine.scheduler.begin_load(&mut machine.cache, (RequestId(2), 0), 1, machine.now);
    assert_eq!(ticket, None);
    machine.run();
    [with(1, 1, 30), with(2, 2, 3)].iter().for_each(|request| machine.assert_as_alone(request));
}

/// An adapter that comes with its weights needs no reading where there is room, and takes nobody's.
#[test]
fn weights_that_come_are_kept_where_there_is_room() {
    let mut machine = Machine::new(room_for(1), 200, 4).with_slow_adapters();
    for of in [1, 2] {
        let report = folio_engine::AdapterReport { id: id(of), weights: weights() };
        machine.scheduler.adapter_read(&mut machine.cache, report, machine.now);
    }
    machine.submit(with(1, 1, 3));
    machine.run();
    assert_eq!(machine.scheduler.counters().adapter_loads, 0);
    machine.submit(with(2, 2, 3));
    machine.step();
    assert_eq!(machine.reads(), [id(2)]);
}

struct Broken;

impl AdapterSource for Broken {
    fn digest(&self) -> &[u8; 32] {
        &[0; 32]
    }

    fn bytes(&self) -> u64 {
        1
    }

    fn read(&self) -> Result<Arc<Adapter>, String> {
        panic!("this one cannot be read")
    }
}

#[test]
fn a_source_that_panics_is_one_that_cannot_be_read() {
    let adapter = RequestAdapter { id: id(1), source: Arc::new(Broken) };
    let mut machine = Machine::new(room_for(1), 200, 4);
    machine.submit(Request { adapter: Some(adapter), ..with(1, 0, 3) });
    machine.run();
    assert!(error(&machine, 1).contains("panicked"));
}
