//! Learned retention against LRU on generated traffic: never clearly below, on the whole above. No trace needed.

use folio_sim::retention::{BlockTrace, Policy, hits};
use folio_sim::rng::Rng;

const REQUESTS: usize = 1500;

/// Blocks as numbers: equal ones after equal beginnings only.
#[derive(Default)]
struct Blocks(u32);

impl Blocks {
    fn fresh(&mut self, count: u64) -> Vec<u32> {
        let first = self.0;
        self.0 += count as u32;
        (first..self.0).collect()
    }
}

/// Conversations that go on after a while, or do not.
fn chats(rng: &mut Rng, blocks: &mut Blocks) -> Vec<Vec<u32>> {
    let system = blocks.fresh(3);
    let mut open: Vec<Vec<u32>> = Vec::new();
    let requests = (0..REQUESTS).map(|_| {
        let at = rng.range(0, 39) as usize;
        if at >= open.len() || rng.one_in(6) {
            open.push(system.clone());
        }
        let at = at.min(open.len() - 1);
        let more = rng.skewed(1, 12);
        open[at].extend(blocks.fresh(more));
        let request = open[at].clone();
        if request.len() > 80 || rng.one_in(8) {
            open.swap_remove(at);
        }
        request
    });
    requests.collect()
}

/// A few agents that add a little at a time to a long beginning, and many pasted documents that nobody asks for again.
fn agents_and_documents(rng: &mut Rng, blocks: &mut Blocks) -> Vec<Vec<u32>> {
    let mut agents: Vec<Vec<u32>> = (0..6).map(|_| blocks.fresh(20)).collect();
    let requests = (0..REQUESTS).map(|_| {
        if rng.one_in(2) {
            let length = rng.range(16, 60);
            return blocks.fresh(length);
        }
        let at = rng.range(0, 5) as usize;
        agents[at].extend(blocks.fresh(1));
        let request = agents[at].clone();
        if request.len() > 60 {
            agents[at] = blocks.fresh(20);
        }
        request
    });
    requests.collect()
}

/// Documents by popularity, each with a question of its own. There is nothing to learn but who is popular.
fn popular_documents(rng: &mut Rng, blocks: &mut Blocks) -> Vec<Vec<u32>> {
    let documents: Vec<Vec<u32>> = (0..200).map(|_| blocks.fresh(8)).collect();
    let requests =
        (0..REQUESTS).map(|_| [documents[rng.skewed(0, 199) as usize].clone(), blocks.fresh(1)].concat());
    requests.collect()
}

/// Single blocks at random: LRU is as good as anything.
fn at_random(rng: &mut Rng, blocks: &mut Blocks) -> Vec<Vec<u32>> {
    let texts: Vec<Vec<u32>> = (0..800).map(|_| blocks.fresh(1)).collect();
    (0..2 * REQUESTS).map(|_| texts[rng.range(0, 799) as usize].clone()).collect()
}

/// Chats in the morning, documents at night.
fn phases(rng: &mut Rng, blocks: &mut Blocks) -> Vec<Vec<u32>> {
    [chats(rng, blocks), agents_and_documents(rng, blocks), chats(rng, blocks)].concat()
}

type Traffic = (&'static str, fn(&mut Rng, &mut Blocks) -> Vec<Vec<u32>>);

const TRAFFIC: [Traffic; 5] = [
    ("chats", chats),
    ("agents and documents", agents_and_documents),
    ("popular documents", popular_documents),
    ("at random", at_random),
    ("phases", phases),
];

/// Percent of all blocks that were found.
fn found(trace: &BlockTrace, blocks: u32, policy: Policy) -> f64 {
    100.0 * hits(trace, blocks, policy) as f64 / trace.blocks() as f64
}

#[test]
fn learned_retention_is_never_clearly_below_lru_and_above_it_on_the_whole() {
    let (mut gained, mut lfu_lost): (f64, f64) = (0.0, 0.0);
    for (name, traffic) in TRAFFIC {
        for seed in 0..2 {
            let trace = BlockTrace { requests: traffic(&mut Rng::new(seed), &mut Blocks::default()) };
            for blocks in [150, 500] {
                let [folio, lru, lfu] =
                    [Policy::Folio, Policy::Lru, Policy::Lfu].map(|policy| found(&trace, blocks, policy));
                println!(
                    "{name}, seed {seed}, {blocks} blocks: Folio {folio:.2} %, LRU {lru:.2}, LFU {lfu:.2}"
                );
                assert!(
                    folio >= lru - 1.0,
                    "{name}, seed {seed}, {blocks} blocks: {folio:.2} %, LRU {lru:.2}"
                );
                gained += folio - lru;
                lfu_lost = lfu_lost.max(lru - lfu);
            }
        }
    }
    assert!(gained > 0.0, "{gained} points in all");
    assert!(lfu_lost > 1.0, "the control: a worse policy stays within the bound, {lfu_lost} points");
}
