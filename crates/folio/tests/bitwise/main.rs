//! Promise 1: what a request generates depends on the request and the model, never on its neighbours.
//!
//! Every family is run through the real scheduler, cache and CPU backend in every way the engine could serve it, and every
//! computed row's logits are compared, bit for bit, with the same request run alone, cold and in one chunk.

mod adapters;
mod device;
mod embeddings;
mod exhaustion;
mod harness;
mod kept;
mod overlap;
mod pairs;
mod pooled;
mod tier;

use folio_cpu::{Isa, Quantize};
use folio_model::backend::{DType, KvFormat};
use folio_model::quant::BlockFormat;
use folio_model::testing::recast::Cast;
use folio_model::testing::{FIXTURES, QUANTIZED};
use harness::{Arrival, KINDS, MAX_LEN, Oracle, Setup, World, batched, in_turn, prompt, whole};

/// Requests of mixed lengths: some inside one block, some past the first attention chunk of 256 positions. The answer of every third
/// must follow rules.
fn mixed(count: usize, vocab: u32) -> Vec<Arrival> {
    let lengths = [5, 37, 16, 300, 1, 64, 23, 48, 15, 33, 129, 17];
    let arrival = |i: usize| {
        let prompt = prompt(i as u64 + 1, lengths[i % lengths.len()], vocab);
        Arrival { rules: (i % 3 == 2).then_some(i as u64), ..Arrival::new(prompt, 4 + (i % 5) as u32) }
    };
    (0..count).map(arrival).collect()
}

/// Many short answers first, so that admission expects short ones; then long ones.
fn crowd() -> Vec<Arrival> {
    let mut arrivals: Vec<_> = (0..40).map(|i| Arrival::brief(prompt(900 + i, 5, 100))).collect();
    for (i, long) in mixed(8, 100).into_iter().enumerate() {
        let mut arrival = Arrival { step: 60 + 3 * i as u64, max_tokens: 60 + 7 * i as u32, ..long };
        arrival.prompt.truncate(64);
        arrivals.push(arrival);
    }
    arrivals
}

fn blocks_for(arrivals: &[Arrival]) -> u32 {
    let tokens = arrivals.iter().map(|a| a.prompt.len() as u32 + a.max_tokens + harness::BLOCK_TOKENS);
    tokens.sum::<u32>() / harness::BLOCK_TOKENS + 8
}

#[test]
fn in_batches_of_any_size() {
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let counts = [2, 64, 9, 3, 31, 8, 7].into_iter().enumerate();
        let counts: Vec<usize> =
            counts.filter(|(at, _)| in_turn(number, *at)).map(|(_, count)| count).collect();
        let most = *counts.iter().max().expect("each has some");
        let mut world = World::new(fixture, Setup::PLAIN, blocks_for(&mixed(most, 100)));
        let arrivals = mixed(most, world.recorder.vocab());
        let oracle_of_all = Oracle::new(&mut world, &arrivals);
        for count in counts {
            world.forget();
            let run = world.run(&batched(count as u32), &arrivals[..count]);
            oracle_of_all.first(count).check(&run, &format!("{fixture}, {count} together"));
            let in_turn = arrivals.len() as u64 + 64;
            assert!(run.steps < in_turn, "{count} sequences were not batched");
        }
    }
}

#[test]
fn in_prefill_chunks_of_any_size() {
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let arrivals = [Arrival::new(prompt(7, 400, world.recorder.vocab()), 6)];
        let oracle = Oracle::new(&mut world, &arrivals);
        let chunks = [1, 16, 64, 333, MAX_LEN].into_iter().enumerate();
        for (_, chunk) in chunks.filter(|(at, _)| in_turn(number, *at)) {
            world.forget();
            let run = world.run(&harness::chunked(chunk), &arrivals);
            oracle.check(&run, &format!("{fixture}, chunks of {chunk}"));
            assert_eq!(run.steps, u64::from(400u32.div_ceil(chunk)) + 5, "chunks of {chunk}");
        }
    }
}

#[test]
fn after_a_prefix_hit_at_any_position() {
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let vocab = world.recorder.vocab();
        let first = prompt(11, 70, vocab);
        let positions = (1..=first.len()).filter(|n| n % 5 == 1 || n % 16 < 2 || n % 16 == 15).enumerate();
        for (_, shared) in positions.filter(|(at, _)| in_turn(number, *at)) {
            // Another token right after the shared part, so that the hit is exactly `shared` long.
            let mut second = first[..shared].to_vec();
            second.push((first.get(shared).copied().unwrap_or(0) + 1) % vocab);
            second.extend(prompt(shared as u64 + 100, 9, vocab));
            let arrivals = [Arrival::new(second, 5)];
            let oracle = Oracle::new(&mut world, &arrivals);
            // Where those before parted there may be states.
            world.forget();
            world.run(&whole(), &[Arrival::new(first.clone(), 3)]);
            let run = world.run(&whole(), &arrivals);
            let kept = world.recorder.kept(shared as u32);
            assert_eq!(run.cached, [kept], "{fixture}: a hit of {shared} tokens");
            oracle.check(&run, &format!("{fixture}, {shared} tokens from the cache"));
        }
    }
}

/// What an operator declared and somebody else computed, continued inside its last block and behind it.
#[test]
fn after_hits_of_a_declared_prefix() {
    for fixture in FIXTURES {
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let vocab = world.recorder.vocab();
        let declared = prompt(11, 70, vocab);
        let arrivals: Vec<_> = (0..3)
            .map(|i| Arrival::new([&declared[..], &prompt(20 + i, 9 + 8 * i as usize, vocab)].concat(), 5))
            .collect();
        let oracle = Oracle::new(&mut world, &arrivals);
        world.declare(&declared);
        let run = world.run(&batched(3), &arrivals);
        assert_eq!(run.cached, [world.recorder.kept(64); 3], "{fixture}: whole blocks of it");
        oracle.check(&run, &format!("{fixture}, behind a declared prefix"));
        let again = world.run(&batched(3), &arrivals);
        let least = world.recorder.kept(71);
        assert!(again.cached.iter().all(|cached| *cached >= least), "{fixture}: {:?}", again.cached);
        oracle.check(&again, &format!("{fixture}, behind a declared prefix, again"));
    }
}

#[test]
fn after_preemption_at_any_step() {
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let vocab = world.recorder.vocab();
        let lengths = [(60, 12), (35, 16), (7, 9)];
        let arrivals =
            lengths.map(|(len, max_tokens)| Arrival::new(prompt(len as u64, len, vocab), max_tokens));
        let oracle = Oracle::new(&mut world, &arrivals);
        // Long prompts in chunks of 24, so that some of the steps are in the middle of one.
        let config = folio_engine::SchedulerConfig { max_num_batched_tokens: 24, ..batched(3) };
        for step in 1..18 {
            for content_survives in [true, false] {
                if !in_turn(number, 2 * step as usize + usize::from(content_survives)) {
                    continue;
                }
                world.forget();
                let mut preempted = 0;
                let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                    if now == step {
                        preempted = scheduler.preempt_all(cache);
                        if !content_survives {
                            cache.clear(None);
                        }
                    }
                });
                assert!(preempted > 0 && run.preemptions as usize >= preempted, "nobody ran at step {step}");
                oracle
                    .check(&run, &format!("{fixture}, preempted at step {step}, cached: {content_survives}"));
            }
        }
    }
}

#[test]
fn in_a_pool_too_small_for_all() {
    for fixture in FIXTURES {
        let arrivals = crowd();
        let mut world = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, blocks_for(&arrivals));
        let oracle = Oracle::new(&mut world, &arrivals);
        let mut preemptions = 0;
        for blocks in [14, 18, 25] {
            let mut world = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, blocks);
            let run = world.run(&batched(8), &arrivals);
            oracle.check(&run, &format!("{fixture}, {blocks} blocks"));
            preemptions += run.preemptions;
        }
        assert!(preemptions > 0, "{fixture}: the pools were large enough");
    }
}

#[test]
fn with_any_number_of_threads_and_any_instruction_set() {
    for fixture in FIXTURES {
        let arrivals = mixed(9, 100);
        let mut world = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, blocks_for(&arrivals));
        let oracle = Oracle::new(&mut world, &arrivals);
        let isas = Isa::ALL.into_iter().filter(|isa| harness::runs(*isa));
        for (threads, isa) in [(2, None), (3, None)].into_iter().chain(isas.map(|isa| (2, Some(isa)))) {
            let mut world =
                World::new(fixture, Setup { threads, isa, ..Setup::PLAIN }, blocks_for(&arrivals));
            let run = world.run(&batched(9), &arrivals);
            oracle.check(&run, &format!("{fixture}, {threads} threads, {isa:?}"));
        }
    }
}

#[test]
fn with_any_type_of_weights_and_cache() {
    let types = [DType::F32, DType::F16, DType::BF16];
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let pairs = (0..9).filter(|pair| in_turn(number, pair / 3 + pair % 3));
        for (weights, kv) in pairs.map(|pair| (types[pair / 3], types[pair % 3])) {
            let setup = Setup { weights: Cast::Plain(weights), kv: kv.into(), ..Setup::PLAIN };
            let arrivals = mixed(8, 100);
            let mut world = World::new(fixture, setup, blocks_for(&arrivals));
            let oracle = Oracle::new(&mut world, &arrivals);
            let run = world.run(&batched(8), &arrivals);
            let what = format!("{fixture}, {weights:?} weights, {kv:?} cache");
            oracle.check(&run, &format!("{what}, 8 together"));
            let again = world.run(&harness::chunked(16), &arrivals);
            let least = world.recorder.kept(300).min(299);
            assert!(again.cached.iter().sum::<u32>() > least - 1, "the second time comes from the cache");
            oracle.check(&again, &format!("{what}, again, in chunks of 16"));
        }
    }
}

/// Formats with a scale per token: together, in chunks, by threads and instruction sets, after hits and after preemption.
#[test]
fn with_every_format_of_the_cache() {
    for (fixture, kv, mixed) in [
        ("llama3", KvFormat::Int8, false),
        ("qwen3", KvFormat::Int8, true),
        ("llama3", KvFormat::Fp8, false),
        ("phi3", KvFormat::Fp8, true),
        ("smollm2", KvFormat::Int4, true),
        ("qwen3", KvFormat::Int4, false),
    ] {
        let setup = Setup { kv, mixed, ..Setup::PLAIN };
        let what = format!("{fixture}, {kv} cache, mixed {mixed}");
        in_short(fixture, setup, &what);

        let mut world = World::new(fixture, setup, 64);
        let first = prompt(11, 70, world.recorder.vocab());
        for shared in [1, 15, 17, 38, 64, 69] {
            let mut second = first[..shared].to_vec();
            second.push((first[shared] + 1) % world.recorder.vocab());
            second.extend(prompt(shared as u64 + 100, 9, world.recorder.vocab()));
            let arrivals = [Arrival::new(second, 5)];
            let oracle = Oracle::new(&mut world, &arrivals);
            world.run(&whole(), &[Arrival::new(first.clone(), 3)]);
            let run = world.run(&whole(), &arrivals);
            assert_eq!(run.cached, [shared as u32], "{what}: a hit of {shared} tokens");
            oracle.check(&run, &format!("{what}, {shared} tokens from the cache"));
        }

        let arrivals = [(60, 12), (35, 16), (7, 9)].map(|(len, max_tokens)| {
            Arrival::new(prompt(len as u64, len, world.recorder.vocab()), max_tokens)
        });
        let oracle = Oracle::new(&mut world, &arrivals);
        let config = folio_engine::SchedulerConfig { max_num_batched_tokens: 24, ..batched(3) };
        for (step, survives) in [(3, true), (9, false), (14, true)] {
            world.forget();
            let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                if now == step {
                    assert!(scheduler.preempt_all(cache) > 0);
                    if !survives {
                        cache.clear(None);
                    }
                }
            });
            oracle.check(&run, &format!("{what}, preempted at step {step}"));
        }
    }
}

#[test]
fn with_quantized_weights() {
    let mut quantized = 0;
    for fixture in FIXTURES {
        for quantize in [Quantize::Q8, Quantize::Q4] {
            let setup = Setup { quantize: Some(quantize), ..Setup::PLAIN };
            let arrivals = mixed(31, 100);
            let mut world = World::new(fixture, setup, blocks_for(&arrivals));
            quantized += world.recorder.quantized();
            let oracle = Oracle::new(&mut world, &arrivals);
            // The kernels are the same for all of them; shapes are not.
            let (counts, chunks): (&[usize], &[u32]) = match KINDS.contains(fixture) {
                true => (&[2, 3, 7, 8, 9, 31], &[1, 16, 64, 333]),
                false => (&[9, 31], &[16]),
            };
            for count in counts.iter().copied() {
                world.forget();
                let run = world.run(&batched(count as u32), &arrivals[..count]);
                oracle.first(count).check(&run, &format!("{fixture}, {quantize:?}, {count} together"));
            }
            for chunk in chunks.iter().copied() {
                world.forget();
                let run = world.run(&harness::chunked(chunk), &arrivals[..8]);
                oracle.first(8).check(&run, &format!("{fixture}, {quantize:?}, chunks of {chunk}"));
            }
            if !KINDS.contains(fixture) {
                continue;
            }
            let isas = Isa::ALL.into_iter().filter(|isa| harness::runs(*isa));
            for (threads, isa) in [(1, None), (3, None)].into_iter().chain(isas.map(|isa| (2, Some(isa)))) {
                let setup = Setup { threads, isa, ..setup };
                let run = World::new(fixture, setup, blocks_for(&arrivals)).run(&batched(9), &arrivals[..9]);
                oracle.first(9).check(&run, &format!("{fixture}, {quantize:?}, {threads} threads, {isa:?}"));
            }
        }
    }
    assert!(quantized > 40, "only {quantized} matrices were quantized");
}

/// What quantized safetensors become: each kind of block, and with columns in an order of their own.
#[test]
fn with_weights_in_blocks_of_every_kind() {
    let mut quantized = 0;
    for fixture in ["llama3", "smollm2", "phi3"] {
        for (format, ordered) in [
            (BlockFormat::Int4x32, true),
            (BlockFormat::Uint4x32, false),
            (BlockFormat::Int8x32, true),
            (BlockFormat::Fp8x32, false),
            (BlockFormat::Fp8x32, true),
        ] {
            let setup = Setup { weights: Cast::Blocks { format, ordered }, ..Setup::PLAIN };
            quantized += in_short(fixture, setup, &format!("{fixture}, {format:?}, order {ordered}"));
        }
    }
    assert!(quantized > 40, "only {quantized} matrices became blocks");
}

/// Checkpoints that others quantized.
#[test]
fn with_quantized_checkpoints() {
    for fixture in QUANTIZED {
        in_short(fixture, Setup::PLAIN, fixture);
    }
}

/// A few of each: requests together, sizes of chunks, numbers of threads, instruction sets. Gives the number of matrices that
/// became blocks.
fn in_short(fixture: &str, setup: Setup, what: &str) -> usize {
    // All of them have 97 tokens.
    let arrivals = mixed(12, 97);
    let mut world = World::new(fixture, setup, blocks_for(&arrivals));
    let quantized = world.recorder.quantized();
    let oracle = Oracle::new(&mut world, &arrivals);
    for count in [2, 3, 9, 12] {
        world.forget();
        let run = world.run(&batched(count as u32), &arrivals[..count]);
        oracle.first(count).check(&run, &format!("{what}, {count} together"));
    }
    for chunk in [1, 16, 333] {
        world.forget();
        let run = world.run(&harness::chunked(chunk), &arrivals[..5]);
        oracle.first(5).check(&run, &format!("{what}, chunks of {chunk}"));
    }
    let isas = Isa::ALL.into_iter().filter(|isa| harness::runs(*isa));
    for (threads, isa) in [(1, None), (3, None)].into_iter().chain(isas.map(|isa| (2, Some(isa)))) {
        let setup = Setup { threads, isa, ..setup };
        let run = World::new(fixture, setup, blocks_for(&arrivals)).run(&batched(9), &arrivals[..9]);
        oracle.first(9).check(&run, &format!("{what}, {threads} threads, {isa:?}"));
    }
    quantized
}
