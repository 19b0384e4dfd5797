//! A pool that is full to the last block, with every format of the cache on the real backend: the bits stay the same.
//!
//! Wrong output at a full pool is what a reused block looks like that somebody still reads, or that was not written again.

use folio_engine::{AdmissionPolicy, SchedulerConfig};
use folio_model::backend::KvFormat;

use crate::harness::{Arrival, Oracle, Setup, World, batched, prompt};

/// Many short answers first; then eight that together need more than any pool here.
fn crowd(vocab: u32) -> Vec<Arrival> {
    let short = (0..40).map(|i| Arrival::brief(prompt(900 + i, 3, vocab)));
    let long = (0..8u64).map(|i| {
        let own = prompt(i, 3 + 7 * i as usize, vocab);
        // Two groups with a beginning in common, so that full blocks are shared, and tails copied, under pressure.
        let tokens = [prompt(500 + i % 2, 21, vocab), own].concat();
        Arrival { step: 60 + i, ..Arrival::new(tokens, 40 + 5 * i as u32) }
    });
    short.chain(long).collect()
}

#[test]
fn at_a_full_pool_with_every_format() {
    for (kv, fixture) in KvFormat::ALL.into_iter().zip(["llama3", "qwen3"].into_iter().cycle()) {
        let setup = Setup { threads: 1, kv, ..Setup::PLAIN };
        let mut world = World::new(fixture, setup, 128);
        let arrivals = crowd(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        let (mut preemptions, mut full) = (0, 0);
        for blocks in [11, 13, 17] {
            let mut world = World::new(fixture, setup, blocks);
            // As many as hold what they know: their next tokens fill the pool.
            let config = SchedulerConfig { headroom_tokens: 0, ..batched(8) };
            let run = world.run_disturbed(&config, &arrivals, &mut |_, _, cache| {
                let stats = cache.stats();
                full += u32::from(stats.active_blocks == stats.blocks);
            });
            oracle.check(&run, &format!("{fixture}, {kv} cache, {blocks} blocks"));
            preemptions += run.preemptions;
        }
        assert!(full > 0, "{fixture}, {kv}: the pool was never full");
        assert!(preemptions > 0, "{fixture}, {kv}: nobody had to give way");
    }
}

/// The same crowd where completion is guaranteed: nobody gives way, the pool is used, and the bits are the same.
#[test]
fn at_a_full_pool_where_completion_is_guaranteed() {
    for fixture in ["llama3", "qwen3"] {
        let mut world = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, 128);
        let arrivals = crowd(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        let config = SchedulerConfig { guarantee_completion: true, ..batched(8) };
        let mut world = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, 17);
        let mut together = 0;
        let run = world.run_disturbed(&config, &arrivals, &mut |_, scheduler, _| {
            together = together.max(scheduler.tables().count());
        });
        oracle.check(&run, &format!("{fixture}, guaranteed"));
        assert_eq!(run.preemptions, 0, "{fixture}");
        assert!(together > 1, "{fixture}: one at a time proves nothing");
        let config = SchedulerConfig { admission: AdmissionPolicy::Static, ..config };
        let mut world = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, 17);
        oracle.check(&world.run(&config, &arrivals), &format!("{fixture}, guaranteed, in static batches"));
    }
}
