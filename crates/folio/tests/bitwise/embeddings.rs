//! Embeddings in place of tokens: the bits of a request alone, in whatever pieces and company it was computed, and never those of another
//! image, though all of them have the same tokens.

use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use folio_cpu::{CpuBackend, CpuOptions};
use folio_engine::engine::EngineParts;
use folio_engine::{
    AxisPositions, EmbeddingRange, Event, ModelExecutor, Rejected, Request, SamplingParams, SchedulerConfig,
    SystemClock,
};
use folio_kv::TenantId;
use folio_model::backend::Backend as _;
use folio_model::testing::fixture;
use folio_model::weights::weight_specs;
use folio_model::{Checkpoint, LoadOptions, Model, check};
use serde_json::json;

use crate::harness::{
    Arrival, Oracle, Run, Setup, World, batched, chunked, empty_cache, prompt, root_of, whole, windows,
};

/// Plain attention; windows and a table that is scaled; a residual stream that is; latents; states.
const SOME: [&str; 5] = ["llama3", "gemma3", "granite", "deepseek_v3", "qwen3_5_text"];
/// What all images have in their places.
const PLACEHOLDER: u32 = 5;

/// Rows of the table of embeddings, as the layers begin with them.
struct Table {
    width: usize,
    values: Vec<f32>,
}

impl Table {
    fn of(name: &str) -> Self {
        let checkpoint = Checkpoint::open(fixture(name)).expect("a fixture");
        let tensor = checkpoint.tensor(&weight_specs(checkpoint.config()).embed.parts[0]).expect("a table");
        let values = tensor.read().expect("its values");
        let dtype = tensor.encoding.plain().expect("floats");
        let width = tensor.shape[1];
        // Gemma multiplies by this root, in the weights' type.
        let root = half::bf16::from_f32((width as f64).sqrt() as f32).to_f32();
        let scaled = |value: f32| if name == "gemma3" { value * root } else { value };
        let values = values.bytes.chunks_exact(dtype.size());
        Self { width, values: values.map(|bytes| scaled(check::to_f32(dtype, bytes))).collect() }
    }

    /// What tokens `range` of a prompt are.
    fn range(&self, tokens: &[u32], range: Range<usize>, content: u8) -> EmbeddingRange {
        let of = |token: &u32| &self.values[*token as usize * self.width..][..self.width];
        EmbeddingRange {
            start: range.start as u32,
            len: range.len() as u32,
            content: [content; 32],
            embeddings: tokens[range].iter().flat_map(of).copied().collect(),
            positions: None,
        }
    }

    /// What no token is.
    fn image(&self, range: Range<usize>, content: u8) -> EmbeddingRange {
        let values = prompt(u64::from(content) + 1000, range.len() * self.width, 1000);
        EmbeddingRange {
            start: range.start as u32,
            len: range.len() as u32,
            content: [content; 32],
            embeddings: values.into_iter().map(|value| (value as f32 - 500.0) / 500.0).collect(),
            positions: None,
        }
    }
}

/// The prompt with placeholders in these ranges.
fn with(tokens: &[u32], ranges: Vec<EmbeddingRange>, max_tokens: u32) -> Arrival {
    let mut tokens = tokens.to_vec();
    for range in &ranges {
        tokens[range.start as usize..range.end() as usize].fill(PLACEHOLDER);
    }
    Arrival { embeddings: Some(ranges.into()), ..Arrival::new(tokens, max_tokens) }
}

/// Hashes of all logits of its only sequence.
fn bits(run: &Run) -> Vec<u64> {
    assert_eq!(run.rows.len(), 1);
    run.rows[0].iter().map(|row| row.2).collect()
}

#[test]
fn embeddings_of_the_table_are_those_of_its_tokens() {
    for name in SOME {
        let (mut world, table) = (World::new(name, Setup::PLAIN, 64), Table::of(name));
        let tokens = prompt(3, 90, world.recorder.vocab());
        let expected = world.run(&whole(), &[Arrival::new(tokens.clone(), 6)]);
        for config in [whole(), chunked(11)] {
            world.forget();
            let ranges = [7..29, 40..45, 45..46].into_iter().zip(1..);
            let ranges = ranges.map(|(range, content)| table.range(&tokens, range, content));
            let run = world.run(&config, &[with(&tokens, ranges.collect(), 6)]);
            assert_eq!(run.tokens, expected.tokens, "{name}");
            assert_eq!(bits(&run), bits(&expected), "{name}");
        }
    }
}

#[test]
fn the_same_image_is_found_and_another_is_not() {
    for name in SOME {
        let (mut world, table) = (World::new(name, Setup::PLAIN, 64), Table::of(name));
        let tokens = prompt(4, 90, world.recorder.vocab());
        let arrival = |content| with(&tokens, vec![table.image(20..60, content)], 5);
        let first = world.run(&whole(), &[arrival(1)]);
        let again = world.run(&whole(), &[arrival(1)]);
        assert_eq!(again.tokens, first.tokens, "{name}");
        assert!(again.cached[0] >= world.recorder.kept(80), "{name}: {:?}", again.cached);
        let other = world.run(&whole(), &[arrival(2)]);
        assert!(other.cached[0] <= 20, "{name}: {:?} of another image", other.cached);
        assert_ne!(bits(&other).last(), bits(&first).last(), "{name}");
        // The tokens of placeholders are text, too.
        let text = world.run(&whole(), &[Arrival { embeddings: None, ..arrival(1) }]);
        assert!(text.cached[0] <= 20, "{name}: {:?} of an image", text.cached);
        assert_ne!(bits(&text).last(), bits(&first).last(), "{name}");
    }
}

/// Images, some of which share their text and some their beginning, and text that looks like them. `place` says where an image stands.
fn mixed(table: &Table, vocab: u32, place: fn(EmbeddingRange) -> EmbeddingRange) -> Vec<Arrival> {
    let image = |range, content| place(table.image(range, content));
    let (tokens, other) = (prompt(7, 100, vocab), prompt(8, 30, vocab));
    let behind = [&tokens[..60], &other].concat();
    let one = with(&tokens, vec![image(20..60, 1)], 5);
    vec![
        one.clone(),
        Arrival { embeddings: None, ..one },
        with(&tokens, vec![image(20..60, 2)], 6),
        with(&behind, vec![image(20..60, 1)], 4),
        with(&tokens, vec![image(0..3, 3), image(16..48, 4), image(48..49, 5)], 5),
        with(&tokens[..61], vec![image(20..60, 1)], 7),
        Arrival::new(tokens, 4),
    ]
}

fn in_any_pieces(mut world: World, table: &Table, place: fn(EmbeddingRange) -> EmbeddingRange, name: &str) {
    let arrivals = mixed(table, world.recorder.vocab(), place);
    let oracle = Oracle::new(&mut world, &arrivals);
    for chunk in [1, 7, 16, 45] {
        world.forget();
        let run = world.run(&chunked(chunk), &arrivals);
        oracle.check(&run, &format!("{name}, chunks of {chunk}"));
        // The image of the first, up to the block in which other text is behind it.
        assert!(run.cached[3] >= world.recorder.kept(48) && run.cached[3] < 60, "{name}: {:?}", run.cached);
    }
    let run = world.run(&batched(7), &arrivals);
    oracle.check(&run, &format!("{name}, from the cache"));
    world.forget();
    let config = SchedulerConfig { max_num_batched_tokens: 64, ..batched(7) };
    for survives in [true, false] {
        let run = world.run_disturbed(&config, &arrivals, &mut |step, scheduler, cache| {
            if [2, 5, 9].contains(&step) {
                scheduler.preempt_all(cache);
                if !survives {
                    cache.clear(None);
                }
            }
        });
        oracle.check(&run, &format!("{name}, preempted, cached: {survives}"));
        assert!(run.preemptions > 0, "{name}: nobody was preempted");
        world.forget();
    }
}

#[test]
fn in_chunks_preempted_and_from_the_middle_of_an_image() {
    for name in SOME {
        in_any_pieces(World::new(name, Setup::PLAIN, 64), &Table::of(name), |range| range, name);
    }
}

/// What a disk has of one image is loaded for it and not for another.
#[test]
fn from_a_disk() {
    for name in ["llama3", "qwen3_5_text"] {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut world, table) = (World::new(name, Setup::PLAIN, 64), Table::of(name));
        let tokens = prompt(4, 90, world.recorder.vocab());
        let arrivals = [1, 2].map(|content| with(&tokens, vec![table.image(20..60, content)], 5));
        let oracle = Oracle::new(&mut world, &arrivals);
        world.keep_on_disk(folder.path(), 64 << 20);
        world.run(&whole(), &arrivals[..1]);
        world.forget();
        let run = world.run(&whole(), &arrivals);
        oracle.check(&run, name);
        assert_eq!((run.cached[0], run.loads), (80, vec![true]), "{name}");
        assert!(run.cached[1] <= 20, "{name}: {:?}", run.cached);
    }
}

/// Of the 16 frequencies of its heads, five turn by height and five by width.
fn three_axes(name: &str) -> World {
    let sections = |decoder: &mut serde_json::Value| {
        decoder["rope_parameters"]["mrope_section"] = json!([6, 5, 5]);
        decoder["rope_parameters"]["mrope_interleaved"] = json!(true);
    };
    World::changed(name, sections, Setup::PLAIN, 64)
}

/// An image whose tokens stand in rows of five.
fn in_rows(range: EmbeddingRange) -> EmbeddingRange {
    let first = range.start;
    let token = |at: u32| [first, first + at / 5, first + at % 5];
    let positions = AxisPositions::new((0..range.len).map(token).collect());
    EmbeddingRange { positions: Some(positions), ..range }
}

#[test]
fn text_stands_where_it_stood_on_three_axes() {
    let (mut plain, mut world) = (World::new("qwen3", Setup::PLAIN, 64), three_axes("qwen3"));
    let (table, tokens) = (Table::of("qwen3"), prompt(4, 90, plain.recorder.vocab()));
    let straight = |range: EmbeddingRange| {
        let each = (range.start..range.end()).map(|at| [at; 3]).collect();
        EmbeddingRange { positions: Some(AxisPositions::new(each)), ..range }
    };
    let image = table.image(20..60, 1);
    for (known, found) in [
        (Arrival::new(tokens.clone(), 6), Arrival::new(tokens.clone(), 6)),
        (with(&tokens, vec![image.clone()], 6), with(&tokens, vec![image.clone()], 6)),
        (with(&tokens, vec![image.clone()], 6), with(&tokens, vec![straight(image.clone())], 6)),
    ] {
        plain.forget();
        world.forget();
        assert_eq!(bits(&world.run(&whole(), &[found])), bits(&plain.run(&whole(), &[known])));
    }
    // In rows it is another, to whom nothing of it is given.
    let known = world.run(&whole(), &[with(&tokens, vec![image.clone()], 6)]);
    let rows = world.run(&whole(), &[with(&tokens, vec![in_rows(image)], 6)]);
    assert!(rows.cached[0] <= 20, "{:?}", rows.cached);
    assert_ne!(bits(&rows).last(), bits(&known).last());
}

#[test]
fn on_three_axes_in_chunks_preempted_and_from_the_middle_of_an_image() {
    in_any_pieces(three_axes("qwen3"), &Table::of("qwen3"), in_rows, "qwen3 on three axes");
}

#[test]
fn an_engine_is_given_embeddings_with_the_hashes_that_they_are_part_of() {
    let (checkpoint, table) = (Checkpoint::open(fixture("llama3")).expect("opens"), Table::of("llama3"));
    let mut backend = CpuBackend::new(CpuOptions { threads: Some(2), isa: None }).expect("a backend");
    let options = LoadOptions {
        max_rows: 64,
        max_logit_rows: 16,
        max_model_len: Some(128),
        kv_formats: folio_model::backend::KvFormat::F16.into(),
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
            max_queued_requests: 2,
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
    let tokens = prompt(9, 80, model.vocab as u32);
    let request = |ranges: Vec<EmbeddingRange>| {
        let Arrival { prompt, embeddings, .. } = with(&tokens, ranges, 8);
        let (id, root) = (engine.next_request_id(), root_of(TenantId(1), [1; 32]));
        let sampling = SamplingParams::greedy(8);
        Request { embeddings, ..Request::new(id, TenantId(1), root, prompt.into(), sampling) }
    };
    let answer = |request: Request| {
        let (sender, events) = mpsc::channel();
        let sink = move |event: Event| sender.send(event).is_ok();
        engine.submit(request, Box::new(sink)).expect("taken");
        let (mut said, mut cached) = (Vec::new(), 0);
        loop {
            match events.recv_timeout(Duration::from_secs(60)).expect("an event") {
                Event::Token { token, .. } => said.push(token.id),
                Event::Prompt { cached_tokens, .. } => cached = cached_tokens,
                Event::Finished { error, .. } => {
                    assert_eq!(error, None);
                    return (said, cached);
                }
                Event::Pooled { .. } => {}
            }
        }
    };
    let (text, _) = answer(request(Vec::new()));
    assert_eq!(answer(request(vec![table.range(&tokens, 10..50, 1)])).0, text);
    let (said, cached) = answer(request(vec![table.image(10..50, 2)]));
    assert!(cached <= 10, "{cached} tokens of another's");
    let again = answer(request(vec![table.image(10..50, 2)]));
    assert!(again.0 == said && again.1 >= 64, "{again:?}");

    let refused = |request: Request, hashed: &Request| {
        let sink = Box::new(|_: Event| true);
        let refused = engine.submit_hashed(request, engine.hashes_of(hashed), sink);
        match refused.map(|_| ()).expect_err("refused") {
            Rejected::Invalid { field, reason } => format!("{field}: {reason}"),
            other => panic!("{other}"),
        }
    };
    let (image, plain) = (request(vec![table.image(10..50, 2)]), request(Vec::new()));
    let mismatch = "embeddings: are not those that its blocks' hashes were made with";
    assert_eq!(refused(image.clone(), &plain), mismatch);
    assert_eq!(refused(plain.clone(), &image), mismatch);
    let mut narrow = table.image(10..50, 2);
    narrow.len += 1;
    let needed = 41 * table.width;
    let expected = format!(
        "embeddings: range 0 has {} values, 41 tokens of {} have {needed}",
        40 * table.width,
        table.width
    );
    assert_eq!(refused(request(vec![narrow]), &plain), expected);
    engine.stop();
    engine.join();
}
