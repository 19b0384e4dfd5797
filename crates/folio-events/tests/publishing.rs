//! What a subscriber knows is what the cache holds.

mod common;

use common::{Bench, Mirror, Peer, bench, wait_until};
use folio_kv::TenantId;

fn random(state: &mut u64, below: u32) -> u32 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    ((*state >> 33) % u64::from(below)) as u32
}

/// A prompt that may begin as others do.
fn prompt(state: &mut u64) -> Vec<u32> {
    let (begin, length) = (random(state, 6), 5 + random(state, 60));
    let own = random(state, 1 << 20);
    let shared = random(state, length);
    (0..length).map(|at| if at < shared { 100 * begin + at } else { own + at }).collect()
}

fn run(bench: &mut Bench, requests: u32, seed: u64) {
    let mut state = seed;
    for _ in 0..requests {
        let tenant = 1 + random(&mut state, 2);
        let tokens = prompt(&mut state);
        bench.serve(tenant, &tokens);
        // As a step takes its time: events of a few of them are a message.
        std::thread::sleep(std::time::Duration::from_millis(1));
        if random(&mut state, 100) == 0 {
            bench.cache.clear(Some(TenantId(tenant)));
        }
    }
}

/// Reads until message `end`; messages that `lose` says are thrown away and asked for again.
fn follow(bench: &Bench, peer: &mut Peer, mirror: &mut Mirror, end: u64, lose: impl Fn(u64) -> bool) {
    let mut next = 0;
    while next < end {
        let (number, events) = peer.published();
        if lose(number) {
            continue;
        }
        if number > next {
            for (missed, events) in Peer::replayed(&bench.events, next, 4) {
                if missed < number {
                    assert_eq!(missed, next, "no gap in a replay");
                    mirror.follow(&events);
                    next += 1;
                }
            }
        }
        assert_eq!(number, next);
        mirror.follow(&events);
        next += 1;
    }
}

#[test]
fn after_a_long_random_run_with_losses_and_replays_a_subscriber_has_every_block() {
    let mut bench = bench(64, 4096, r#""tenants": "*""#);
    let mut peer = Peer::subscriber(&bench.events);
    run(&mut bench, 600, 7);
    let end = bench.settle();
    let mut mirror = Mirror::default();
    let last = end - 1;
    follow(&bench, &mut peer, &mut mirror, end, |number| number % 7 == 3 && number != last);
    assert_eq!(mirror.held, bench.resident(&|_| true));
    let stats = bench.events.stats();
    assert!(end > 200 && mirror.held.len() > 20 && stats.removed > 1000 && stats.replays > 20, "{stats:?}");
    assert_eq!((stats.dropped, stats.lost, stats.refused), (0, 0, 0));
    let on_device = mirror.held.len() as u64;
    assert_eq!(stats.blocks, [on_device, 0, 0]);
}

#[test]
fn what_the_engine_lost_is_cleared_and_told_anew_parents_first() {
    let mut bench = bench(4000, 1024, r#""tenants": "*", "max_queue_size": 1024"#);
    let mut peer = Peer::subscriber(&bench.events);
    let long: Vec<u32> = (0..4 * 3000).collect();
    bench.serve(1, &[1, 2, 3, 4, 5, 6, 7, 8]);
    bench.serve(1, &long);
    run(&mut bench, 50, 3);
    let end = bench.settle();
    let mut mirror = Mirror::default();
    follow(&bench, &mut peer, &mut mirror, end, |_| false);
    assert_eq!(mirror.held, bench.resident(&|_| true));
    let stats = bench.events.stats();
    assert!(stats.lost > 0 && mirror.cleared > 1 && stats.stored > 3000, "{stats:?}");
}

#[test]
fn who_is_not_named_is_not_told() {
    let mut bench = bench(64, 4096, r#""tenants": ["two"], "tenant_extra_keys": true"#);
    let mut peer = Peer::subscriber(&bench.events);
    run(&mut bench, 200, 11);
    let end = bench.settle();
    let mut mirror = Mirror::default();
    follow(&bench, &mut peer, &mut mirror, end, |_| false);
    assert_eq!(mirror.held, bench.resident(&|tenant| tenant == TenantId(2)));
    assert!(!mirror.held.is_empty() && bench.resident(&|_| true).len() > mirror.held.len());
    assert!(!mirror.salts.is_empty() && mirror.salts.values().all(|salt| salt == "two"));
}

#[test]
fn a_late_subscriber_has_all_of_it_once_it_is_told_again() {
    let mut bench = bench(64, 4096, r#""tenants": "*", "buffer_steps": 4"#);
    run(&mut bench, 100, 5);
    let end = bench.settle();
    let mut peer = Peer::subscriber(&bench.events);
    let kept = Peer::replayed(&bench.events, 0, 4);
    assert_eq!(kept.iter().map(|of| of.0).collect::<Vec<_>>(), [end - 4, end - 3, end - 2, end - 1]);
    bench.events.republish();
    let mut mirror = Mirror::default();
    wait_until("it is told", || bench.events.stats().next_message >= end + 2);
    for number in end..bench.events.stats().next_message {
        let (found, events) = peer.published();
        assert_eq!(found, number);
        mirror.follow(&events);
    }
    assert_eq!(mirror.held, bench.resident(&|_| true));
}

#[test]
fn an_end_is_told_and_a_new_beginning_too() {
    let mut bench = bench(64, 4096, r#""tenants": "*", "replay_topic": false"#);
    bench.serve(1, &[1, 2, 3, 4, 5]);
    bench.settle();
    let all = Peer::replayed(&bench.events, 0, 3);
    let tags = |events: &[rmpv::Value]| events.iter().map(|event| event[0].to_string()).collect::<Vec<_>>();
    assert_eq!(tags(&all[0].1), ["\"AllBlocksCleared\""]);
    assert_eq!(tags(&all[1].1), ["\"BlockStored\""]);
    let mut peer = Peer::subscriber(&bench.events);
    bench.events.stop();
    assert_eq!(tags(&peer.published().1), ["\"AllBlocksCleared\""]);
    assert!(peer.frame().is_none());
}
