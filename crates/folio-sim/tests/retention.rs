//! Learned retention against LRU on generated traffic: never clearly below, on the whole above. No trace needed.

use folio_sim::retention::workloads::Kind;
use folio_sim::retention::{BlockTrace, Policy, hits};
use folio_sim::rng::Rng;

const BLOCKS: u32 = 2000;
/// None of the study's (`examples/retention_study`).
const SEED: u64 = 77;

/// Single blocks at random: LRU is as good as anything.
fn at_random() -> BlockTrace {
    let mut rng = Rng::new(SEED);
    BlockTrace { requests: (0..20_000).map(|_| vec![rng.range(0, 3999) as u32]).collect() }
}

#[test]
fn learned_retention_is_never_clearly_below_lru_and_above_it_on_the_whole() {
    let kinds = Kind::ALL.into_iter().map(|kind| (kind.name(), kind.generate(SEED, 16)));
    let (mut gained, mut lfu_lost): (f64, f64) = (0.0, 0.0);
    for (name, trace) in kinds.chain([("at random", at_random())]) {
        let [folio, lru, lfu] = [Policy::Folio, Policy::Lru, Policy::Lfu]
            .map(|policy| 100.0 * hits(&trace, BLOCKS, policy) as f64 / trace.blocks() as f64);
        println!("{name}: Folio {folio:.2} %, LRU {lru:.2}, LFU {lfu:.2}");
        assert!(folio >= 0.99 * lru, "{name}: {folio:.2} %, LRU {lru:.2}");
        gained += folio - lru;
        lfu_lost = lfu_lost.max(1.0 - lfu / lru);
    }
    assert!(gained > 20.0, "{gained} points in all");
    assert!(lfu_lost > 0.01, "the control: a worse policy stays within the bound, {lfu_lost}");
}

#[test]
fn the_same_seed_and_load_give_the_same_requests_and_others_do_not() {
    for kind in Kind::ALL {
        let trace = kind.generate(1, 4);
        assert_eq!(trace, kind.generate(1, 4));
        assert!(trace != kind.generate(2, 4) && trace != kind.generate(1, 5), "{}", kind.name());
        assert!(trace.requests.iter().all(|ids| !ids.is_empty()));
        let halves = trace.by_session();
        assert_eq!(halves.iter().map(|half| half.requests.len()).sum::<usize>(), trace.requests.len());
        assert!(halves.iter().all(|half| half.requests.len() > trace.requests.len() / 4), "{}", kind.name());
    }
}
