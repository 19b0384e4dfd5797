//! Preemption with a tier that is memory: what comes back from there has the bits it had.

use folio_engine::SchedulerConfig;
use folio_model::backend::KvFormat;
use folio_model::testing::FIXTURES;

use crate::harness::{Arrival, Oracle, Run, Setup, World, batched, in_turn, prompt};
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

/// Preempts everybody at `step`; unless `survives`, nothing of theirs stays in the prefix cache. Without a tier who is preempted is back before
/// that.
fn preempted_at(world: &mut World, arrivals: &[Arrival], step: u64, survives: bool) -> Run {
    world.forget();
    world.keep_in_memory(256);
    world.run_disturbed(&config(), arrivals, &mut |now, scheduler, cache| {
        if now == step {
            assert!(scheduler.preempt_all(cache) > 0, "nobody ran at step {step}");
        }
        // Until then a tier may read it.
        if now == step + 1 && !survives {
            cache.clear(None);
        }
    })
}

#[test]
fn after_preemption_at_any_step() {
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        // Before the second nobody has computed a whole block.
        for step in 2..18 {
            for survives in [true, false] {
                if !in_turn(number, 2 * step as usize + usize::from(survives)) {
                    continue;
                }
                let run = preempted_at(&mut world, &arrivals, step, survives);
                let what = format!("{fixture}, preempted at step {step}, cached: {survives}");
                oracle.check(&run, &what);
                assert!(run.kept > 0, "{what}: {run:?}");
                assert!(
                    run.loads.iter().all(|arrived| *arrived) && run.loads.is_empty() == survives,
                    "{what}"
                );
                assert!(
                    run.recomputed <= 15 * u64::from(run.preemptions),
                    "{what}: {} again",
                    run.recomputed
                );
            }
        }
    }
}

/// The control of the test above: what nothing keeps is computed again.
#[test]
fn what_is_not_kept_is_computed_again() {
    let mut world = World::new("llama3", Setup::PLAIN, 64);
    let arrivals = arrivals(world.recorder.vocab());
    let run = world.run_disturbed(&config(), &arrivals, &mut |now, scheduler, cache| {
        if now == 9 {
            assert!(scheduler.preempt_all(cache) > 0);
            cache.clear(None);
        }
    });
    assert!(run.kept == 0 && run.recomputed > 50, "{run:?}");
}

/// The same with several steps under way, as on a device.
#[test]
fn with_steps_under_way() {
    for fixture in ["llama3", "gemma3"] {
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        for (depth, lag) in [(2, 1), (3, 2)] {
            world.overlap(depth, lag, None);
            for step in [3, 8, 13] {
                world.forget();
                world.keep_in_memory(256);
                let run = world.run_disturbed(&config(), &arrivals, &mut |now, scheduler, cache| {
                    if now == step {
                        scheduler.preempt_all(cache);
                    }
                    if now > step + 2 && now < step + 8 && !scheduler.is_preempting() {
                        cache.clear(None);
                    }
                });
                let what = format!("{fixture}, {depth} steps under way, preempted at step {step}");
                oracle.check(&run, &what);
                assert!(run.kept > 0 && run.ahead > 0, "{what}: {run:?}");
            }
        }
    }
}

#[test]
fn with_every_format_of_the_cache() {
    for fixture in ["llama3", "gemma3"] {
        for (kv, mixed) in KvFormat::ALL.into_iter().flat_map(|kv| [(kv, false), (kv, true)]) {
            let mut world = World::new(fixture, Setup { kv, mixed, ..Setup::PLAIN }, 64);
            let arrivals = arrivals(world.recorder.vocab());
            let oracle = Oracle::new(&mut world, &arrivals);
            for step in [2, 9, 14] {
                let run = preempted_at(&mut world, &arrivals, step, false);
                let what = format!("{fixture}, {kv} cache, mixed {mixed}, preempted at step {step}");
                oracle.check(&run, &what);
                assert!(run.kept > 0 && run.loads.contains(&true) && run.recomputed <= 45, "{what}: {run:?}");
            }
        }
    }
}

/// Pools that run dry by themselves, beside much, little and next to no memory for what they lose.
#[test]
fn in_a_pool_too_small_for_all() {
    for fixture in FIXTURES {
        let arrivals = crowd();
        let setup = Setup { threads: 1, ..Setup::PLAIN };
        let oracle = Oracle::new(&mut World::new(fixture, setup, blocks_for(&arrivals)), &arrivals);
        let (mut kept, mut loads) = (0, 0);
        for (blocks, memory) in [(14, 100), (18, 9), (18, 3)] {
            let run =
                World::new(fixture, setup, blocks).keeping_in_memory(memory).run(&batched(8), &arrivals);
            oracle.check(&run, &format!("{fixture}, {blocks} blocks, {memory} beside"));
            kept += run.kept;
            loads += run.loads.len();
        }
        assert!(kept > 0 && loads > 0, "{fixture}: {kept} were kept, {loads} loads");
    }
}
