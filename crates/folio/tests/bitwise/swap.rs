//! Preemption with copies in host memory: what comes back from there has the bits it had.

use folio_engine::SchedulerConfig;
use folio_model::backend::KvFormat;
use folio_model::testing::FIXTURES;

use crate::harness::{Arrival, Oracle, Run, Setup, World, batched, prompt};
use crate::{blocks_for, crowd};

/// In chunks of 24, so that some of the steps are in the middle of a prompt.
fn config() -> SchedulerConfig {
    SchedulerConfig { max_num_batched_tokens: 24, ..batched(3) }
}

/// Lengths that end inside a block, at its end, and beyond every fixture's window.
fn arrivals(vocab: u32) -> [Arrival; 3] {
    [(60, 12), (32, 17), (7, 9)]
        .map(|(len, max_tokens)| Arrival::new(prompt(len as u64, len, vocab), max_tokens))
}

/// Preempts everybody at `step`; unless `survives`, nothing of theirs stays in the prefix cache.
fn preempted_at(world: &mut World, arrivals: &[Arrival], step: u64, survives: bool) -> Run {
    world.forget();
    world.run_disturbed(&config(), arrivals, &mut |now, scheduler, cache| {
        if now == step {
            assert!(scheduler.preempt_all(cache) > 0, "nobody ran at step {step}");
            if !survives {
                cache.clear(None);
            }
        }
    })
}

#[test]
fn after_preemption_with_copies_at_any_step() {
    for fixture in FIXTURES {
        let mut world = World::new(fixture, Setup::PLAIN, 64).with_swap(64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        for step in 1..18 {
            for survives in [true, false] {
                let run = preempted_at(&mut world, &arrivals, step, survives);
                let what = format!("{fixture}, preempted at step {step}, cached: {survives}");
                oracle.check(&run, &what);
                assert!(run.swapped > 0 && run.swapped == u64::from(run.preemptions), "{what}: {run:?}");
                assert_eq!(run.recomputed, 0, "{what}: a copy is there, and tokens were computed again");
            }
        }
    }
}

/// The control of the test above: what is not copied is computed again.
#[test]
fn without_copies_it_is_computed_again() {
    let mut world = World::new("llama3", Setup::PLAIN, 64);
    let arrivals = arrivals(world.recorder.vocab());
    let run = preempted_at(&mut world, &arrivals, 9, false);
    assert!(run.swapped == 0 && run.recomputed > 50, "{run:?}");
}

#[test]
fn with_every_format_of_the_cache() {
    for fixture in ["llama3", "gemma3"] {
        for (kv, mixed) in KvFormat::ALL.into_iter().flat_map(|kv| [(kv, false), (kv, true)]) {
            let mut world = World::new(fixture, Setup { kv, mixed, ..Setup::PLAIN }, 64).with_swap(64);
            let arrivals = arrivals(world.recorder.vocab());
            let oracle = Oracle::new(&mut world, &arrivals);
            for step in [2, 9, 14] {
                let run = preempted_at(&mut world, &arrivals, step, false);
                let what = format!("{fixture}, {kv} cache, mixed {mixed}, preempted at step {step}");
                oracle.check(&run, &what);
                assert!(run.swapped > 0 && run.recomputed == 0, "{what}: {run:?}");
            }
        }
    }
}

/// Pools that run dry by themselves, with much, little and next to no swap space.
#[test]
fn in_a_pool_too_small_for_all() {
    for fixture in FIXTURES {
        let arrivals = crowd();
        let setup = Setup { threads: 1, ..Setup::PLAIN };
        let oracle = Oracle::new(&mut World::new(fixture, setup, blocks_for(&arrivals)), &arrivals);
        let mut swapped = 0;
        for (blocks, slots) in [(14, 40), (18, 9), (18, 3)] {
            let run = World::new(fixture, setup, blocks).with_swap(slots).run(&batched(8), &arrivals);
            oracle.check(&run, &format!("{fixture}, {blocks} blocks, {slots} slots"));
            swapped += run.swapped;
        }
        assert!(swapped > 0, "{fixture}: nobody was copied");
    }
}
