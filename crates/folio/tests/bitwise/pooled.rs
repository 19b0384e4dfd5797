//! Vectors of prompts: the bits of a request alone, in whatever company, pieces and places it was computed.
//!
//! What the harness pools by itself shows that rows and their order are right in every plan; the last test shows the same of the
//! executor that serves.

use folio_cpu::{CpuBackend, CpuOptions, Isa};
use folio_engine::plan::StepOutput;
use folio_engine::{Event, Executor, Micros, ModelExecutor, Pooling, Scheduler, SchedulerConfig};
use folio_model::testing::{FIXTURES, fixture};
use folio_model::{Checkpoint, LoadOptions, Model};

use crate::harness::{self, Arrival, Oracle, Setup, World, batched, chunked, in_turn, prompt, whole};

/// Prompts to be pooled, both ways, and between them some that are answered.
fn among_others(count: usize, vocab: u32) -> Vec<Arrival> {
    let lengths = [33, 300, 1, 16, 64, 129, 5, 48];
    let arrival = |i: usize| {
        let prompt = prompt(i as u64 + 1, lengths[i % lengths.len()], vocab);
        match i % 3 {
            0 => Arrival::pooled(prompt, Pooling::Mean),
            1 => Arrival::pooled(prompt, Pooling::Last),
            _ => Arrival::new(prompt, 5),
        }
    };
    (0..count).map(arrival).collect()
}

#[test]
fn vectors_in_batches_chunks_and_after_preemption() {
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let mut world = World::new(fixture, Setup::PLAIN, 160);
        let arrivals = among_others(9, world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        let run = world.run(&batched(9), &arrivals);
        oracle.check(&run, &format!("{fixture}, together"));
        for (_, chunk) in [77, 9, 30].into_iter().enumerate().filter(|(at, _)| in_turn(number, *at)) {
            world.forget();
            let run = world.run(&chunked(chunk), &arrivals);
            oracle.check(&run, &format!("{fixture}, chunks of {chunk}"));
        }
        let config = SchedulerConfig { max_num_batched_tokens: 24, ..batched(4) };
        for (at, step) in [2, 5, 12].into_iter().enumerate() {
            for survives in [true, false] {
                if !in_turn(number, at + usize::from(survives)) {
                    continue;
                }
                world.forget();
                let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                    if now == step {
                        assert!(scheduler.preempt_all(cache) > 0);
                        if !survives {
                            cache.clear(None);
                        }
                    }
                });
                oracle.check(&run, &format!("{fixture}, preempted at step {step}, cached: {survives}"));
            }
        }
    }
}

/// The last row may stand on cached blocks; a mean looks at every row, and leaves its blocks to others.
#[test]
fn vectors_after_prefix_hits() {
    for fixture in FIXTURES {
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let first = prompt(11, 70, world.recorder.vocab());
        for shared in [1, 15, 16, 17, 38, 64, 69] {
            let mut second = first[..shared].to_vec();
            second.push((first[shared] + 1) % world.recorder.vocab());
            second.extend(prompt(shared as u64 + 100, 9, world.recorder.vocab()));
            let kept = world.recorder.kept(shared as u32);
            for (pooling, cached) in [(Pooling::Last, kept), (Pooling::Mean, 0)] {
                let arrivals = [Arrival::pooled(second.clone(), pooling)];
                let oracle = Oracle::new(&mut world, &arrivals);
                // Where those before parted there may be states.
                world.forget();
                world.run(&whole(), &[Arrival::pooled(first.clone(), Pooling::Mean)]);
                let run = world.run(&whole(), &arrivals);
                assert_eq!(run.cached, [cached], "{fixture}: a hit of {shared} tokens, {pooling:?}");
                oracle.check(&run, &format!("{fixture}, {shared} tokens of it cached, {pooling:?}"));
            }
        }
    }
}

#[test]
fn vectors_with_any_number_of_threads_and_any_instruction_set() {
    for fixture in ["llama3", "gemma2", "qwen3_moe"] {
        let mut world = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, 160);
        let arrivals = among_others(6, world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        let isas = Isa::ALL.into_iter().filter(|isa| harness::runs(*isa));
        for (threads, isa) in [(2, None), (3, None)].into_iter().chain(isas.map(|isa| (2, Some(isa)))) {
            let mut world = World::new(fixture, Setup { threads, isa, ..Setup::PLAIN }, 160);
            let run = world.run(&batched(6), &arrivals);
            oracle.check(&run, &format!("{fixture}, {threads} threads, {isa:?}"));
        }
    }
}

/// One prompt through the executor that serves, whose backend has room for so many rows in a pass.
fn served(fixture: &std::path::Path, rows: usize, budget: u32, tokens: &[u32], pooling: Pooling) -> Vec<u32> {
    let checkpoint = Checkpoint::open(fixture).expect("a fixture");
    let mut backend = CpuBackend::new(CpuOptions { threads: Some(2), isa: None }).expect("a backend");
    let options = LoadOptions {
        max_rows: rows,
        max_logit_rows: 1,
        max_model_len: None,
        kv_formats: folio_model::backend::DType::F16.into(),
        block_tokens: harness::BLOCK_TOKENS as usize,
        keeps_all: false,
        taps: None,
        progress: None,
    };
    let model = Model::load(&checkpoint, &mut backend, options).expect("a model");
    folio_model::backend::Backend::allocate_cache(&mut backend, &model.kv_layout, &[64]).expect("a cache");
    let mut executor = ModelExecutor::new(Box::new(backend), model.vocab, rows, 1);
    let mut cache = harness::empty_cache(64, &[]);
    let config = SchedulerConfig { max_num_batched_tokens: budget, ..whole() };
    let mut scheduler = Scheduler::new(config).expect("limits");
    let request = folio_engine::Request {
        pooling: Some(pooling),
        prompt: tokens.into(),
        ..folio_sim::scenario::request(1, tokens, 0)
    };
    scheduler.admit([request.hashed(cache.config().block_tokens)], [], Micros(0));
    for _ in 0..1000 {
        let plan = scheduler.plan(&mut cache, Micros(0));
        let output: Result<&StepOutput, _> = executor.execute(plan);
        for (_, event) in scheduler.commit(&mut cache, output, Micros(1)).drain(..) {
            if let Event::Pooled { vector } = event {
                return vector.iter().map(|value| value.to_bits()).collect();
            }
        }
    }
    panic!("no vector");
}

#[test]
fn vectors_of_the_executor_that_serves() {
    for name in ["llama3", "qwen3"] {
        let mut world = World::new(name, Setup::PLAIN, 64);
        for pooling in [Pooling::Last, Pooling::Mean] {
            let tokens = prompt(5, 150, world.recorder.vocab());
            world.forget();
            let expected = world.run(&whole(), &[Arrival::pooled(tokens.clone(), pooling)]).vectors.remove(0);
            for (rows, budget) in [(256, 256), (7, 256), (64, 40), (1, 9)] {
                let found = served(&fixture(name), rows, budget, &tokens, pooling);
                assert_eq!(found, expected, "{name}, {pooling:?}, {rows} rows a pass, {budget} a step");
            }
        }
    }
}
