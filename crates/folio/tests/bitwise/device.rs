//! Promise 1 on a device: the CUDA backend through the same scheduler and cache, judged like the CPU's.
//!
//! On a machine with a GPU the kernels run there; everywhere else they run on the host, thread by thread, which is slow: so there are
//! fewer requests here than in the CPU's suite, each chosen to cross what could tell them apart (tiles of 16 tokens, chunks of 256
//! positions, buckets of graphs, blocks of 16).

use std::sync::{Arc, mpsc};
use std::time::Duration;

use folio_cuda::CudaBackend;
use folio_emulator::Order;
use folio_engine::engine::EngineParts;
use folio_engine::request::{Token, TokenLogprobs};
use folio_engine::{Drafter, Event, ModelExecutor, Request, SamplingParams, SchedulerConfig, SystemClock};
use folio_kv::TenantId;
use folio_model::backend::{Backend, DType, KvFormat};
use folio_model::testing::{fixture, heads};

use crate::harness::{
    Arrival, On, Oracle, Script, Setup, World, batched, chunked, empty_cache, prompt, root_of, whole, windows,
};
use folio_model::testing::recast::{Cast, Recast};
use folio_model::{Checkpoint, LoadOptions, Model};

const DEVICE: Setup = Setup { on: On::Device(Order::Ascending), ..Setup::PLAIN };
/// One with plain attention, one with windows, soft caps and norms behind, one with norms of heads, one with odd sizes, one of experts,
/// one of experts with biases, windows and sinks.
const SOME: [&str; 6] = ["llama3", "gemma2", "qwen3", "phi3", "qwen3_moe", "gpt_oss"];

fn requests(vocab: u32, lengths: &[usize]) -> Vec<Arrival> {
    let arrival = |(i, length): (usize, &usize)| Arrival::new(prompt(i as u64 + 1, *length, vocab), 4);
    lengths.iter().enumerate().map(arrival).collect()
}

#[test]
fn in_batches_of_any_size() {
    if !folio_emulator::available() {
        return;
    }
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
    if !folio_emulator::available() {
        return;
    }
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

/// Products of bf16 and of FP8 by a library, whose algorithms were tried when the model was loaded.
#[test]
fn by_a_library_of_products() {
    if !folio_emulator::available() {
        return;
    }
    let bf16 = Cast::Plain(DType::BF16);
    for (fixture, weights) in [("llama3", bf16), ("ct_fp8", Cast::Keep)] {
        let setup = Setup { on: On::Library(Order::Ascending), weights, ..DEVICE };
        let mut world = World::new(fixture, setup, 128);
        let arrivals = requests(world.recorder.vocab(), &[70, 37, 5, 16, 23]);
        let oracle = Oracle::new(&mut world, &arrivals);
        for count in [2, 5] {
            world.forget();
            let run = world.run(&batched(count as u32), &arrivals[..count]);
            oracle.first(count).check(&run, &format!("{fixture}, {count} together"));
        }
        for chunk in [1, 33] {
            world.forget();
            let run = world.run(&chunked(chunk), &arrivals[..2]);
            oracle.first(2).check(&run, &format!("{fixture}, chunks of {chunk}"));
        }
        let again = world.run(&whole(), &arrivals[..2]);
        assert!(again.cached.iter().all(|cached| *cached > 30), "{fixture}: {:?}", again.cached);
        oracle.first(2).check(&again, &format!("{fixture}, from the cache"));
        let order = Order::Shuffled { seed: 5 };
        let mut other = World::new(fixture, Setup { on: On::Library(order), ..setup }, 128);
        oracle.first(2).check(&other.run(&batched(2), &arrivals[..2]), &format!("{fixture}, loaded again"));
    }
}

#[test]
fn after_copies_to_host_memory_and_back() {
    if !folio_emulator::available() {
        return;
    }
    for kv in [KvFormat::BF16, KvFormat::Int8] {
        let mut world = World::new("llama3", Setup { kv, ..DEVICE }, 64);
        let arrivals = requests(world.recorder.vocab(), &[60, 35]);
        let oracle = Oracle::new(&mut world, &arrivals);
        for step in [1, 2] {
            world.forget();
            world.keep_in_memory(256);
            let run = world.run_disturbed(&batched(2), &arrivals, &mut |now, scheduler, cache| {
                if now == step {
                    assert!(scheduler.preempt_all(cache) > 0, "nobody ran at step {step}");
                }
                if now == step + 1 {
                    cache.clear(None);
                }
            });
            assert!(run.kept > 0 && run.loads.contains(&true) && run.recomputed <= 30, "{kv}: {run:?}");
            oracle.check(&run, &format!("{kv}, kept in memory of the host at step {step}"));
        }
    }
}

#[test]
fn with_every_type_of_weights_and_cache_and_in_any_order_of_threads() {
    if !folio_emulator::available() {
        return;
    }
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

/// Scripted drafts, a model that drafts, and both kinds of heads: on this device model and drafter both compute.
#[test]
fn with_drafts() {
    if !folio_emulator::available() {
        return;
    }
    let of = |drafter: Option<Drafter>, fixture: &str, most: usize| {
        let (mut world, target) = match drafter {
            Some(Drafter::Eagle3) => (World::with_head(fixture, DEVICE, 64, 64), heads::target(fixture)),
            Some(Drafter::Mtp) => (World::with_mtp(fixture, DEVICE, 64, 64), "qwen3".to_owned()),
            _ => (World::new(fixture, DEVICE, 64), fixture.to_owned()),
        };
        if drafter == Some(Drafter::Model) {
            world.draft_by(fixture, DEVICE, 64);
        }
        let mut arrivals = requests(world.recorder.vocab(), &[37, 5, 20]);
        arrivals.iter_mut().for_each(|arrival| arrival.max_tokens = 12);
        let oracle = Oracle::new(&mut World::new(&target, DEVICE, 64), &arrivals);
        match drafter {
            None => world.overlap(1, 1, Some(oracle.drafter(Script::Mixed(most)))),
            Some(drafter) => world.speculate(oracle.speculation(&arrivals, drafter, 4)),
        }
        for chunk in [16, 64] {
            world.forget();
            let config = SchedulerConfig { max_num_batched_tokens: chunk, ..batched(3) };
            let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                if now == 6 {
                    scheduler.preempt_all(cache);
                }
            });
            oracle.check(&run, &format!("{drafter:?} of {fixture}, chunks of {chunk}"));
            assert!(run.drafts.0 > 3, "{drafter:?} of {fixture}: {:?}", run.drafts);
        }
    };
    of(None, "llama3", 3);
    of(None, "gpt_oss", 5);
    of(Some(Drafter::Model), "llama3", 3);
    of(Some(Drafter::Eagle3), "authors", 3);
    of(Some(Drafter::Mtp), "qwen", 3);
}

/// What the device chooses is what the sampler chooses from the same logits: the engine with either, requests of every kind together.
#[test]
fn tokens_chosen_on_the_device_are_those_chosen_from_its_logits() {
    if !folio_emulator::available() {
        return;
    }
    let cuda = || CudaBackend::new(folio_emulator::device(Order::Ascending)).expect("a backend");
    let (on_device, _) = answers("qwen3", cuda(), kinds);
    // A backend that says nothing of sampling is asked for logits.
    let (on_host, ahead) = answers("qwen3", Recast { backend: cuda(), recast: 0, cast: Cast::Keep }, kinds);
    assert_eq!((on_device.len(), ahead), (on_host.len(), 0));
    for (index, (device, host)) in on_device.iter().zip(&on_host).enumerate() {
        assert_eq!(device, host, "request {index}");
        assert!(device.0.len() > 3, "request {index} gave {} tokens", device.0.len());
        assert_eq!(device.1.is_empty(), index % 3 != 0, "request {index}: log probabilities of its prompt");
    }
}

/// Steps that are begun while others run give the same tokens, also where sequences end by a token that nobody knew when the next step
/// was begun.
#[test]
fn steps_begun_ahead_give_the_same_tokens() {
    if !folio_emulator::available() {
        return;
    }
    let cuda = || CudaBackend::new(folio_emulator::device(Order::Ascending)).expect("a backend");
    // One cache group, and two: what leaves a window is given to others while a step that holds it runs.
    for fixture in ["qwen3", "gemma2"] {
        let (on_device, ahead) = answers(fixture, cuda(), plain);
        let (on_host, _) = answers(fixture, Recast { backend: cuda(), recast: 0, cast: Cast::Keep }, plain);
        for (index, (device, host)) in on_device.iter().zip(&on_host).enumerate() {
            assert_eq!(device.0, host.0, "{fixture}, request {index}");
        }
        let lengths: Vec<usize> = on_device.iter().map(|(tokens, _)| tokens.len()).collect();
        assert!(ahead > 20, "{fixture}: {ahead} steps ahead, {lengths:?}");
        assert!(
            lengths.iter().filter(|length| **length < 40).count() > 1,
            "{fixture}: nobody stopped, {lengths:?}"
        );
    }
}

/// Requests whose steps are planned ahead; some stop by a token.
fn plain(vocab: u32) -> Vec<SamplingParams> {
    let stops = |part: u32| (0..vocab).filter(|token| token % 12 == part).collect::<Vec<u32>>();
    let params = |index: u32| SamplingParams {
        temperature: if index.is_multiple_of(2) { 0.0 } else { 1.2 },
        seed: index.into(),
        min_tokens: index,
        logprobs: (index == 3).then_some(2),
        stop_token_ids: if index < 2 { Arc::new([]) } else { stops(index).into() },
        ..SamplingParams::greedy(40)
    };
    (0..6).map(params).collect()
}

/// Tokens and their log probabilities of each of some requests.
type Answers = Vec<(Vec<Token>, Vec<TokenLogprobs>)>;

/// By an engine over this backend, and how many of its steps were begun ahead.
fn answers<B: Backend + 'static>(
    name: &str,
    mut backend: B,
    requests: fn(u32) -> Vec<SamplingParams>,
) -> (Answers, u64) {
    let checkpoint = Checkpoint::open(fixture(name)).expect("opens");
    let options = LoadOptions {
        max_rows: 64,
        max_logit_rows: 16,
        max_model_len: Some(128),
        kv_formats: KvFormat::BF16.into(),
        block_tokens: 16,
        keeps_all: false,
        taps: None,
        progress: None,
    };
    let model = Model::load(&checkpoint, &mut backend, options).expect("loads");
    backend.allocate_cache(&model.kv_layout, &vec![64; model.kv_layout.groups.len()]).expect("a cache");
    let engine = folio_engine::start(EngineParts {
        config: SchedulerConfig {
            max_model_len: 128,
            max_num_batched_tokens: 64,
            ..SchedulerConfig::default()
        },
        cache: empty_cache(64, &windows(&model.kv_layout)),
        executor: Box::new(ModelExecutor::new(Box::new(backend), model.vocab, 64, 16)),
        clock: Arc::new(SystemClock::new()),
        vocab: model.vocab as u32,
        tiers: Vec::new(),
        events: None,
    })
    .expect("an engine");
    let (sender, events) = mpsc::channel();
    let params = requests(model.vocab as u32);
    let count = params.len();
    for (index, sampling) in params.into_iter().enumerate() {
        let sender = sender.clone();
        let prompt = prompt(index as u64 + 1, 5 + 3 * index, model.vocab as u32).into();
        let (id, root) = (engine.next_request_id(), root_of(TenantId(0), [1; 32]));
        let request = Request {
            prompt_logprobs: (index % 3 == 0).then_some(2),
            ..Request::new(id, TenantId(0), root, prompt, sampling)
        };
        let sink = move |event: Event| sender.send((index, event)).is_ok();
        engine.submit(request, Box::new(sink)).expect("taken");
    }
    let mut answers = vec![(Vec::new(), Vec::new()); count];
    let mut running = count;
    while running > 0 {
        match events.recv_timeout(Duration::from_secs(120)).expect("an event") {
            // What a token took is no part of what is the same.
            (index, Event::Token { token, .. }) => answers[index].0.push(Token { us: 0.0, ..token }),
            (index, Event::Prompt { prompt_logprobs, .. }) => answers[index].1 = prompt_logprobs,
            (_, Event::Finished { error, .. }) => {
                assert_eq!(error, None);
                running -= 1;
            }
            _ => {}
        }
    }
    let ahead = engine.stats().counters.steps_ahead;
    (answers, ahead)
}

fn kinds(vocab: u32) -> Vec<SamplingParams> {
    let greedy = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy(12) };
    let warm = SamplingParams { temperature: 1.0, seed: 7, ..greedy.clone() };
    vec![
        SamplingParams::greedy(12),
        greedy.clone(),
        warm.clone(),
        SamplingParams { temperature: 0.3, top_k: 5, ..warm.clone() },
        SamplingParams { top_p: 0.6, seed: 8, ..warm.clone() },
        SamplingParams { min_p: 0.2, top_p: 0.9, top_k: 20, temperature: 1.7, ..warm.clone() },
        SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.2,
            ..warm.clone()
        },
        SamplingParams { logit_bias: Arc::new([(3, 2.5), (vocab - 1, -5.0)]), ..warm.clone() },
        SamplingParams {
            min_tokens: 6,
            eos_token_ids: Arc::new([1, 2]),
            stop_token_ids: (4..vocab / 2).collect::<Vec<u32>>().into(),
            ..warm
        },
    ]
}
