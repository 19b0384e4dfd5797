//! Promise 1 on a device: the CUDA backend through the same scheduler and cache, judged like the CPU's.
//!
//! On a machine with a GPU the kernels run there; everywhere else they run on the host, thread by thread, which is slow: so there are
//! fewer requests here than in the CPU's suite, each chosen to cross what could tell them apart (tiles of 16 tokens, chunks of 256
//! positions, buckets of graphs, blocks of 16).

use folio_emulator::Order;
use folio_model::backend::{DType, KvFormat};

use crate::harness::{Arrival, On, Oracle, Setup, World, batched, chunked, prompt, whole};
use folio_model::testing::recast::Cast;

const DEVICE: Setup = Setup { on: On::Device(Order::Ascending), ..Setup::PLAIN };
/// One with plain attention, one with windows, soft caps and norms behind, one with norms of heads, one with odd sizes.
const SOME: [&str; 4] = ["llama3", "gemma2", "qwen3", "phi3"];

fn requests(vocab: u32, lengths: &[usize]) -> Vec<Arrival> {
    let arrival = |(i, length): (usize, &usize)| Arrival::new(prompt(i as u64 + 1, *length, vocab), 4);
    lengths.iter().enumerate().map(arrival).collect()
}

#[test]
fn in_batches_of_any_size() {
    for fixture in SOME {
        let mut world = World::new(fixture, DEVICE, 128);
        let arrivals = requests(world.recorder.vocab(), &[5, 37, 16, 270, 1, 64, 23, 48, 15]);
        let oracle = Oracle::new(&mut world, &arrivals);
        for count in [2, 3, 7, 9] {
            world.forget();
            let run = world.run(&batched(count as u32), &arrivals[..count]);
            oracle.first(count).check(&run, &format!("{fixture}, {count} together"));
        }
    }
}

#[test]
fn in_chunks_behind_hits_and_after_preemption() {
    for fixture in SOME {
        let mut world = World::new(fixture, DEVICE, 64);
        let vocab = world.recorder.vocab();
        let arrivals = requests(vocab, &[280, 35]);
        let oracle = Oracle::new(&mut world, &arrivals);
        for chunk in [1, 64, 250] {
            world.forget();
            oracle.check(&world.run(&chunked(chunk), &arrivals), &format!("{fixture}, chunks of {chunk}"));
        }
        let again = world.run(&whole(), &arrivals);
        assert!(again.cached.iter().all(|cached| *cached > 30), "{fixture}: {:?}", again.cached);
        oracle.check(&again, &format!("{fixture}, from the cache"));
        for step in [1, 2] {
            world.forget();
            let run = world.run_disturbed(&batched(2), &arrivals, &mut |now, scheduler, cache| {
                if now == step {
                    assert!(scheduler.preempt_all(cache) > 0, "nobody ran at step {step}");
                    cache.clear(None);
                }
            });
            oracle.check(&run, &format!("{fixture}, preempted at step {step}"));
        }
    }
}

#[test]
fn after_copies_to_host_memory_and_back() {
    for kv in [KvFormat::BF16, KvFormat::Int8] {
        let mut world = World::new("llama3", Setup { kv, ..DEVICE }, 64).with_swap(64);
        let arrivals = requests(world.recorder.vocab(), &[60, 35]);
        let oracle = Oracle::new(&mut world, &arrivals);
        for step in [1, 2] {
            world.forget();
            let run = world.run_disturbed(&batched(2), &arrivals, &mut |now, scheduler, cache| {
                if now == step {
                    assert!(scheduler.preempt_all(cache) > 0, "nobody ran at step {step}");
                    cache.clear(None);
                }
            });
            assert!(run.swapped > 0 && run.recomputed == 0, "{kv}: {} tokens again", run.recomputed);
            oracle.check(&run, &format!("{kv}, copied out at step {step}"));
        }
    }
}

#[test]
fn with_every_type_of_weights_and_cache_and_in_any_order_of_threads() {
    for (weights, kv) in [
        (Cast::Plain(DType::F32), KvFormat::F32),
        (Cast::Plain(DType::F16), KvFormat::F16),
        (Cast::Plain(DType::BF16), KvFormat::Fp8),
        (Cast::Keep, KvFormat::Int4),
    ] {
        let setup = Setup { weights, kv, ..DEVICE };
        let mut world = World::new("llama3", setup, 64);
        let arrivals = requests(world.recorder.vocab(), &[40, 17, 270]);
        let oracle = Oracle::new(&mut world, &arrivals);
        for order in [Order::Descending, Order::Shuffled { seed: 5 }] {
            let mut world = World::new("llama3", Setup { on: On::Device(order), ..setup }, 64);
            oracle.check(&world.run(&batched(3), &arrivals), &format!("{weights:?}, {kv}, {order:?}"));
        }
    }
}
