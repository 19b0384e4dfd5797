//! Requests with adapters, without one and with another beside each other: each says what it says alone.

use folio_engine::SchedulerConfig;
use folio_model::testing::adapted;

use super::harness::{Arrival, BLOCK_TOKENS, Oracle, Setup, World, batched, prompt, whole};

/// Adapters of one fixture.
const SETS: [&[&str]; 4] =
    [&["llama3", "llama3_ranks", "llama3_bias"], &["phi3"], &["qwen3_5_text"], &["deepseek_v2_lite"]];

/// Every prompt with every adapter and without.
fn arrivals(adapters: usize, vocab: u32) -> Vec<Arrival> {
    let lengths = [5, 37, 130, 16];
    let with = |i: usize, adapter: Option<usize>| Arrival {
        adapter,
        step: i as u64 % 3,
        ..Arrival::new(prompt(i as u64 + 1, lengths[i], vocab), 6 + i as u32)
    };
    let choices = || (0..adapters).map(Some).chain([None]);
    (0..lengths.len()).flat_map(|i| choices().map(move |adapter| with(i, adapter))).collect()
}

fn world(names: &[&str], setup: Setup, blocks: u32) -> World {
    let fixture = adapted(names[0]);
    let mut world = World::new(fixture.file_name().unwrap().to_str().unwrap(), setup, blocks);
    world.adapters(names);
    world
}

fn with_adapters(most: u32, config: SchedulerConfig) -> SchedulerConfig {
    SchedulerConfig { max_adapters: most, ..config }
}

#[test]
fn beside_other_adapters_and_none() {
    for names in SETS {
        let mut world = world(names, Setup::PLAIN, 200);
        let arrivals = arrivals(names.len(), world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        for (most, seqs, tokens) in [(3, 16, 512), (3, 3, 40), (1, 16, 23), (2, 5, 7)] {
            world.forget();
            let config = SchedulerConfig { max_num_batched_tokens: tokens, ..batched(seqs) };
            let run = world.run(&with_adapters(most, config), &arrivals);
            oracle.check(&run, &format!("{names:?}, {most} at a time, {seqs} sequences, {tokens} tokens"));
        }
        // With room for one in memory their weights are read again and again.
        world.forget();
        let config = SchedulerConfig { max_resident_adapters: 1, ..with_adapters(3, batched(16)) };
        let run = world.run(&config, &arrivals);
        oracle.check(&run, &format!("{names:?}, one in memory"));
        assert_eq!(run.adapter_loads > 0, names.len() > 1, "{names:?}");
        // What was computed is found again, by whom it was computed for and nobody else.
        let run = world.run(&with_adapters(3, batched(16)), &arrivals);
        oracle.check(&run, &format!("{names:?}, from the cache"));
        let least = |arrival: &Arrival| {
            let before_last = arrival.prompt.len() as u32 - 1;
            world.recorder.kept(before_last - before_last % BLOCK_TOKENS)
        };
        let found = run.cached.iter().zip(&arrivals).all(|(cached, arrival)| *cached >= least(arrival));
        assert!(found, "{names:?}: {:?}", run.cached);
    }
}

#[test]
fn preempted_in_a_small_pool() {
    for names in SETS {
        let mut world = world(names, Setup::PLAIN, 11 + 3 * names.len() as u32);
        let arrivals = arrivals(names.len(), world.recorder.vocab());
        let arrivals: Vec<Arrival> =
            arrivals.into_iter().map(|arrival| Arrival { max_tokens: 40, ..arrival }).collect();
        let oracle = Oracle::new(&mut world, &arrivals);
        let run =
            world.run_disturbed(&with_adapters(3, batched(16)), &arrivals, &mut |step, scheduler, cache| {
                if step % 7 == 3 && step < 60 {
                    scheduler.preempt_all(cache);
                }
            });
        oracle.check(&run, &format!("{names:?}, preempted"));
        assert!(run.preemptions > 0, "{names:?}: nobody was preempted");
    }
}

#[test]
fn with_any_number_of_threads_and_any_instructions() {
    for names in SETS {
        let blocks = 200;
        let mut first = world(names, Setup::PLAIN, blocks);
        let arrivals = arrivals(names.len(), first.recorder.vocab());
        let oracle = Oracle::new(&mut first, &arrivals);
        let isas = [folio_cpu::Isa::Scalar, folio_cpu::Isa::Avx2].map(Some);
        for (threads, isa) in [(1, None), (3, None), (2, isas[0]), (2, isas[1])] {
            if isa.is_some_and(|isa| !super::harness::runs(isa)) {
                continue;
            }
            let mut world = world(names, Setup { threads, isa, ..Setup::PLAIN }, blocks);
            let run = world.run(&with_adapters(3, batched(16)), &arrivals);
            oracle.check(&run, &format!("{names:?}, {threads} threads, {isa:?}"));
        }
    }
}

#[test]
fn an_adapter_is_an_identity() {
    let mut world = world(SETS[0], Setup::PLAIN, 64);
    let plain = Arrival::new(prompt(1, 60, world.recorder.vocab()), 6);
    let with = |at| Arrival { adapter: Some(at), ..plain.clone() };
    let config = with_adapters(1, whole());
    let first = world.run(&config, std::slice::from_ref(&plain));
    for at in 0..3 {
        let run = world.run(&config, &[with(at)]);
        assert_eq!(run.cached, [0], "adapter {at} found what others computed");
        assert_ne!(run.tokens, first.tokens, "adapter {at} changes nothing");
        assert!(world.run(&config, &[with(at)]).cached[0] >= 48);
    }
}
