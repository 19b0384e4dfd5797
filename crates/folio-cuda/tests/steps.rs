//! The backend around its kernels: graphs, memory, and what it refuses.

use folio_cuda::{CudaBackend, Driver};
use folio_emulator::{Emulator, Order, device};
use folio_model::backend::{Backend, BackendError, Batch, BlockCopy, DType, PLACEHOLDER, Span, TableEdit};
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::sampling::{Choice, Draw, Outcome, SampleRow};
use folio_model::testing::fixture;
use folio_model::testing::recast::{Cast, Recast};
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model};

const BLOCK: usize = 16;
const BLOCKS: usize = 64;

fn backend(driver: Box<dyn Driver>) -> CudaBackend {
    CudaBackend::new(driver).unwrap_or_else(|error| panic!("{error}"))
}

fn load(backend: &mut CudaBackend, max_rows: usize) -> Result<LoadedModel, String> {
    let checkpoint = Checkpoint::open(fixture("llama3")).unwrap_or_else(|error| panic!("{error}"));
    Model::load(&checkpoint, backend, options(max_rows)).map_err(|error| error.to_string())
}

fn options(max_rows: usize) -> LoadOptions<'static> {
    LoadOptions {
        max_rows,
        max_logit_rows: 8,
        max_model_len: Some(128),
        kv_formats: DType::BF16.into(),
        block_tokens: BLOCK,
        keeps_all: false,
        taps: None,
        progress: None,
    }
}

fn loaded() -> (CudaBackend, LoadedModel) {
    let mut backend = backend(device(Order::default()));
    let model = load(&mut backend, 32).unwrap_or_else(|error| panic!("{error}"));
    backend.allocate_cache(&model.kv_layout, &[BLOCKS]).unwrap_or_else(|error| panic!("{error}"));
    (backend, model)
}

/// One row of each of `sequences` sequences, at `position`; each sequence has eight blocks of its own.
fn decode(sequences: u32, position: u32) -> Batch {
    let span =
        |row| Span { first_row: row, rows: 1, first_position: position, slot: row, tentative_from: u32::MAX };
    Batch {
        tokens: (0..sequences).map(|row| 3 + (row + 7 * position) % 50).collect(),
        spans: (0..sequences).map(span).collect(),
        edits: (0..sequences).map(|row| TableEdit::whole(row, 0, 8 * row, 8)).collect(),
        blocks: (0..8 * sequences).collect(),
        logit_rows: (0..sequences).collect(),
        ..Batch::default()
    }
}

#[test]
fn a_graph_gives_what_its_launches_give_and_serves_every_step_of_its_bucket() {
    if !folio_emulator::available() {
        return;
    }
    let (mut graphs, _) = loaded();
    let (mut eager, _) = loaded();
    eager.without_graphs();
    // 5, 6, 7 and 8 share a graph, 1 has its own; a bucket's first step has none, and 2 come only once.
    for (position, sequences) in (0..).zip([7, 5, 8, 6, 1, 2, 7, 1]) {
        let batch = decode(sequences, position);
        let expected = eager.forward(&batch).unwrap().to_vec();
        let found = graphs.forward(&batch).unwrap();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(found), bits(&expected), "{sequences} sequences at {position}");
    }
    assert_eq!((graphs.graphs(), eager.graphs()), (2, 0));
    let mut prompt = decode(1, 0);
    (prompt.tokens, prompt.spans[0].rows, prompt.logit_rows) = (vec![5, 6, 7], 3, vec![2]);
    graphs.forward(&prompt).unwrap();
    assert_eq!(graphs.graphs(), 2, "a prompt is launched kernel by kernel");
}

/// A sequence's token and the drafts behind it are run from a graph, and give what its tokens give one by one.
#[test]
fn drafts_are_computed_from_graphs() {
    if !folio_emulator::available() {
        return;
    }
    let (mut graphs, model) = loaded();
    let (mut eager, _) = loaded();
    eager.without_graphs();
    let mut ends = [0, 0, 0];
    for rows in [[6, 1, 1], [1, 5, 2], [3, 3, 1], [1, 1, 6], [2, 1, 4]] {
        let mut batch = decode(3, 0);
        let mut first_row = 0;
        for (span, (rows, end)) in batch.spans.iter_mut().zip(rows.into_iter().zip(&ends)) {
            (span.first_row, span.rows, span.first_position) = (first_row, rows, *end);
            first_row += rows;
        }
        batch.tokens = (0..first_row).map(|row| 3 + (11 * row + ends[0]) % 50).collect();
        batch.logit_rows = (0..first_row).collect();
        let mut expected = Vec::new();
        for span in &batch.spans {
            for row in 0..span.rows {
                let mut one = batch.clone();
                one.tokens = vec![batch.tokens[(span.first_row + row) as usize]];
                one.spans =
                    vec![Span { first_row: 0, rows: 1, first_position: span.first_position + row, ..*span }];
                one.logit_rows = vec![0];
                expected.extend(eager.forward(&one).unwrap().iter().map(|value| value.to_bits()));
            }
        }
        let found: Vec<u32> = graphs.forward(&batch).unwrap().iter().map(|value| value.to_bits()).collect();
        assert_eq!(found.len(), first_row as usize * model.vocab);
        assert!(found == expected, "{rows:?} rows from {ends:?}");
        ends.iter_mut().zip(rows).for_each(|(end, rows)| *end += rows);
    }
    assert_eq!((graphs.graphs(), eager.graphs()), (1, 0), "all of them share one");
}

/// The first step's words fit what is set aside; a step with very long tables does not, and what was captured before it is made again.
#[test]
fn graphs_survive_that_the_words_of_a_step_move() {
    if !folio_emulator::available() {
        return;
    }
    let (mut backend, model) = loaded();
    let batch = decode(2, 0);
    let before = backend.forward(&batch).unwrap().to_vec();
    assert_eq!(backend.forward(&batch).unwrap(), before);
    let mut long = batch.clone();
    long.blocks = (0..8).cycle().take(1 << 17).collect();
    long.blocks.extend(8..16);
    long.edits[1].blocks_start = 1 << 17;
    assert_eq!(backend.forward(&long).unwrap(), before);
    assert_eq!(backend.forward(&batch).unwrap(), before);
    assert_eq!((backend.graphs(), before.len()), (1, 2 * model.vocab));
}

/// A step brings what changed of block tables and nothing else; what one that was refused may have changed is sent again, and all of it
/// where there are more tables than before.
#[test]
fn block_tables_stay_on_the_device() {
    if !folio_emulator::available() {
        return;
    }
    let (mut kept, _) = loaded();
    let (mut whole, _) = loaded();
    for position in 0..40 {
        let mut batch = decode(2, position);
        // From here on the second sequence has its tables elsewhere, where there was no room for any.
        let moved = position == 36;
        batch.spans[1].slot = if position < 36 { 1 } else { 70 };
        batch.edits[1].slot = batch.spans[1].slot;
        let expected = whole.forward(&batch).unwrap().to_vec();
        let mut refused = batch.clone();
        refused.spans[0].first_position = 128;
        batch.edits.retain(|edit| moved && edit.slot == 70);
        for row in 0..2 {
            // Each block when it is first needed.
            if position % BLOCK as u32 == 0 {
                let entry = position / BLOCK as u32;
                batch.edit_table(row, 0, entry, [8 * row + entry]);
            }
        }
        if position == 20 {
            refused.edits.retain(|edit| edit.slot == 0);
            refused.edits[0].blocks_len = 2;
            refused.edits[0].len = 2;
            kept.forward(&refused).expect_err("refused");
        }
        assert_eq!(kept.forward(&batch).unwrap(), expected, "position {position}");
    }
}

/// Windows keep their K and V in a cache group of their own, whose blocks may be larger than those of the first.
#[test]
fn a_cache_group_with_larger_blocks_gives_the_same_bits() {
    if !folio_emulator::available() {
        return;
    }
    let checkpoint = Checkpoint::open(fixture("gemma2")).unwrap_or_else(|error| panic!("{error}"));
    let bits = |times: usize, chunk: usize| {
        let mut backend = backend(device(Order::default()));
        let model = Model::load(&checkpoint, &mut backend, options(32)).unwrap();
        let mut layout = model.kv_layout;
        assert_eq!(layout.groups.len(), 2);
        layout.groups[1].block_tokens *= times;
        backend.allocate_cache(&layout, &[8, 8]).unwrap();
        let mut bits = Vec::new();
        let tokens: Vec<u32> = (0..70).map(|i| 3 + i * 37 % 90).collect();
        for (i, tokens) in tokens.chunks(chunk).enumerate() {
            let first_position = (i * chunk) as u32;
            let rows = tokens.len() as u32;
            let mut batch = Batch {
                tokens: tokens.to_vec(),
                spans: vec![Span { first_row: 0, rows, first_position, slot: 0, tentative_from: u32::MAX }],
                logit_rows: vec![rows - 1],
                ..Batch::default()
            };
            batch.edit_table(0, 0, 0, [3, 1, 4, 0, 5]);
            batch.edit_table(0, 1, 0, [7, 2, 6, 5, 1].into_iter().take(70usize.div_ceil(BLOCK * times)));
            let logits = backend.forward(&batch).unwrap();
            bits.push(logits.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
        }
        bits
    };
    for chunk in [1, 30] {
        let expected = bits(1, chunk);
        assert!(bits(2, chunk) == expected && bits(4, chunk) == expected, "chunks of {chunk}");
    }
}

#[test]
fn what_is_allocated_is_told_and_what_does_not_fit_is_named() {
    if !folio_emulator::available() {
        return;
    }
    let mut small = backend(Box::new(Emulator::default().with_memory(64 << 20)));
    let before = small.free_bytes().unwrap();
    let model = load(&mut small, 32).unwrap();
    let taken = before - small.free_bytes().unwrap();
    assert!(taken >= small.weight_bytes() + small.buffer_bytes(), "{taken} bytes");
    assert!(small.buffer_bytes() > 0 && small.weight_bytes() > 0);
    let blocks = (small.free_bytes().unwrap() / model.kv_layout.groups[0].bytes_per_block() as u64) as usize;
    match small.allocate_cache(&model.kv_layout, &[2 * blocks]) {
        Err(BackendError::OutOfMemory { needed_bytes, reason, .. }) => {
            assert!(needed_bytes > 64 << 20 && reason.contains("of device memory are free"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let error =
        load(&mut backend(Box::new(Emulator::default().with_memory(64 << 10))), 32).expect_err("no room");
    assert!(error.contains("out of memory"), "{error}");
}

/// Consumer cards have less shared memory than servers' do.
#[test]
fn heads_that_do_not_fit_the_devices_shared_memory_are_refused_by_name() {
    let mut small = backend(Box::new(Emulator::default().with_shared_memory(8 << 10)));
    let model = load(&mut small, 32).unwrap();
    let error = small.allocate_cache(&model.kv_layout, &[BLOCKS]).expect_err("refused").to_string();
    assert!(error.contains("dimensions in bf16 needs") && error.contains("this device has 8192"), "{error}");
}

#[test]
fn a_malformed_batch_is_refused_before_a_kernel_sees_it() {
    if !folio_emulator::available() {
        return;
    }
    let (mut backend, _) = loaded();
    type Spoil = fn(&mut Batch);
    let refused: [(&str, Spoil); 6] = [
        ("vocabulary", |batch| batch.tokens[0] = 1 << 30),
        ("does not exist", |batch| batch.blocks[0] = BLOCKS as u32),
        ("written twice", |batch| batch.spans[1].slot = 0),
        ("the limit is 128", |batch| batch.spans[0].first_position = 128),
        ("impossible", |batch| batch.copies = vec![BlockCopy { group: 0, from: 1, to: 1, tokens: 1 }]),
        ("exceed", |batch| *batch = decode(33, 0)),
    ];
    for (what, spoil) in refused {
        let mut batch = decode(2, 0);
        spoil(&mut batch);
        let error = backend.forward(&batch).expect_err(what).to_string();
        assert!(error.contains(what), "{what}: {error}");
    }
    assert!(backend.forward(&decode(2, 0)).is_ok(), "and the next one is computed");
}

#[test]
fn the_same_bytes_come_back_from_beside_the_steps() {
    if !folio_emulator::available() {
        return;
    }
    let (mut backend, _) = loaded();
    let step = |backend: &mut CudaBackend, change: &dyn Fn(&mut Batch)| {
        let mut batch = decode(1, 5);
        change(&mut batch);
        backend.forward(&batch).unwrap().to_vec()
    };
    for position in 0..5 {
        backend.forward(&decode(1, position)).unwrap();
    }
    let expected = step(&mut backend, &|_| {});
    // Out of block 0, into block 9, which then is the sequence's; by another thread, and while the step before is still a wish.
    let memory = backend.block_memory().unwrap();
    let mut bytes = vec![0; memory.block_bytes(0)];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            memory.read(0, 0, &mut bytes);
            memory.write(0, 9, &bytes);
        });
    });
    assert!(bytes.iter().any(|byte| *byte != 0));
    assert_eq!(step(&mut backend, &|batch| batch.blocks[0] = 9), expected);
    // And a copy on the device.
    let copied = |batch: &mut Batch| {
        batch.copies = vec![BlockCopy { group: 0, from: 9, to: 12, tokens: 6 }];
        batch.blocks[0] = 12;
    };
    assert_eq!(step(&mut backend, &copied), expected);
}

/// The device makes up its weights itself; what they come to is what the host's would.
#[test]
fn a_made_up_model_is_the_same_wherever_it_was_made() {
    if !folio_emulator::available() {
        return;
    }
    fn logits(mut backend: impl Backend, encoding: Encoding) -> Vec<u32> {
        let checkpoint = Checkpoint::open_without_weights(fixture("qwen3")).unwrap();
        let model = Model::load_dummy(&checkpoint, &mut backend, encoding, options(32)).unwrap();
        backend.allocate_cache(&model.kv_layout, &[BLOCKS]).unwrap();
        backend.forward(&decode(3, 0)).unwrap().iter().map(|value| value.to_bits()).collect()
    }
    let cuda = || backend(device(Order::default()));
    for encoding in [Encoding::Plain(DType::BF16), Encoding::Block(BlockFormat::Fp8x32)] {
        // A backend that says nothing of making up weights is given the host's.
        let on_host = Recast { backend: cuda(), recast: 0, cast: Cast::Keep };
        let on_device = logits(cuda(), encoding);
        assert_eq!(on_device, logits(on_host, encoding), "{encoding}");
        assert!(on_device.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    }
    let table = cuda().make_up_matrix("a", Encoding::Plain(DType::BF16), [40, 64]).unwrap();
    assert!(table.is_some(), "the device makes up bf16 itself");
}

/// Greedy, or with noise that is a function of the position.
fn draw(position: u32, warm: bool) -> SampleRow<'static> {
    let draw = Draw {
        seed: 9,
        position,
        temperature: if warm { 1.5 } else { 0.0 },
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        seen: &[],
        bias: &[],
        forbidden: [&[], &[]],
    };
    SampleRow { choice: Choice::Draw(draw), logprobs: None }
}

fn token(outcome: &Outcome) -> u32 {
    match outcome {
        Outcome::Token { id, .. } => *id,
        other => panic!("{other:?}"),
    }
}

/// What each of two sequences says in so many steps, the second with log probabilities in every third step. `ahead`: a step is begun
/// while the one before it runs, and reads the tokens of that one where they are.
fn said(backend: &mut CudaBackend, steps: u32, ahead: bool) -> Vec<Vec<u32>> {
    let mut said: Vec<Vec<u32>> = Vec::new();
    let mut outcomes = Vec::new();
    let mut tokens = vec![3, 7];
    let mut under_way = 0;
    for position in 0..steps {
        let mut batch = decode(2, position);
        batch.tokens = tokens;
        let mut rows = [draw(position, false), draw(position, true)];
        // Results of other sizes, and so in other places.
        rows[1].logprobs = (position % 3 == 1).then_some(4);
        // The rows change places in every step.
        batch.spans.iter_mut().for_each(|span| span.slot = (span.first_row + position) % 2);
        backend.begin_and_sample(&batch, &mut rows.into_iter()).unwrap();
        under_way += 1;
        if !ahead || under_way == 2 {
            outcomes.clear();
            backend.finish_sampled(&mut outcomes).unwrap();
            said.push(outcomes.iter().map(token).collect());
            under_way -= 1;
        }
        tokens = match ahead {
            true => vec![PLACEHOLDER | 1, PLACEHOLDER],
            false => said.last().iter().flat_map(|said| [said[1], said[0]]).collect(),
        };
    }
    while under_way > 0 {
        outcomes.clear();
        backend.finish_sampled(&mut outcomes).unwrap();
        said.push(outcomes.iter().map(token).collect());
        under_way -= 1;
    }
    said
}

/// On the emulator nothing runs before somebody waits for it: memory that two steps shared would be seen.
#[test]
fn a_step_begun_ahead_reads_the_tokens_of_the_one_before() {
    if !folio_emulator::available() {
        return;
    }
    for graphs in [true, false] {
        let (mut backend, _) = loaded();
        if !graphs {
            backend.without_graphs();
        }
        let one_by_one = said(&mut backend, 40, false);
        assert_eq!(said(&mut backend, 40, true), one_by_one, "graphs: {graphs}");
        assert_eq!(backend.graphs() > 0, graphs);
        let different: std::collections::BTreeSet<_> = one_by_one.iter().flatten().collect();
        assert!(different.len() > 5, "{different:?}");
    }
}

/// The words of the second step need a larger place than those of the first, which is still to run.
#[test]
fn a_step_ahead_may_need_more_memory_than_the_one_before() {
    if !folio_emulator::available() {
        return;
    }
    let (mut backend, _) = loaded();
    let rows = |position| [draw(position, false), draw(position, true)];
    let one_by_one = said(&mut backend, 2, false);
    let (mut backend, _) = loaded();
    let mut first = decode(2, 0);
    first.tokens = vec![3, 7];
    let mut second = decode(2, 1);
    second.tokens = vec![PLACEHOLDER | 1, PLACEHOLDER];
    second.spans.iter_mut().for_each(|span| span.slot = 1 - span.slot);
    second.blocks.extend((0..8).cycle().take(1 << 17));
    backend.begin_and_sample(&first, &mut rows(0).into_iter()).unwrap();
    let mut asked = rows(1);
    asked[1].logprobs = Some(4);
    backend.begin_and_sample(&second, &mut asked.into_iter()).unwrap();
    for step in one_by_one {
        let mut outcomes = Vec::new();
        backend.finish_sampled(&mut outcomes).unwrap();
        assert_eq!(outcomes.iter().map(token).collect::<Vec<_>>(), step);
    }
}

/// Rows of logits that are wanted themselves, of two steps that are under way, beside those that are chosen from there.
#[test]
fn rows_that_are_wanted_themselves_come_with_the_answers_of_their_step() {
    if !folio_emulator::available() {
        return;
    }
    let (mut twin, _) = loaded();
    let wanted: Vec<Vec<f32>> =
        (0..4).map(|position| twin.forward(&decode(2, position)).unwrap().to_vec()).collect();
    let vocab = wanted[0].len() / 2;
    let itself = SampleRow { choice: Choice::Logits, logprobs: None };
    // How many, and which, differs from step to step.
    let rows = |position: u32| match position {
        0 => [draw(0, false), itself],
        1 => [itself, draw(1, true)],
        _ => [itself, itself],
    };
    let (mut backend, _) = loaded();
    let check = |backend: &mut CudaBackend, position: u32| {
        let mut outcomes = Vec::new();
        backend.finish_sampled(&mut outcomes).unwrap();
        for ((at, asked), outcome) in (0..).zip(rows(position)).zip(outcomes) {
            let is_wanted = asked.choice == Choice::Logits;
            assert_eq!(outcome == Outcome::Logits, is_wanted, "step {position}, row {at}");
            if is_wanted {
                let row = &wanted[position as usize][at as usize * vocab..][..vocab];
                assert_eq!(backend.sampled_logits(at), row, "step {position}, row {at}");
            }
        }
    };
    for position in 0..4 {
        backend.begin_and_sample(&decode(2, position), &mut rows(position).into_iter()).unwrap();
        if position > 0 {
            check(&mut backend, position - 1);
        }
    }
    check(&mut backend, 3);
}

#[test]
fn only_tokens_of_the_step_before_can_be_followed_and_only_two_steps_be_under_way() {
    if !folio_emulator::available() {
        return;
    }
    let (mut backend, _) = loaded();
    let rows = [draw(0, false), draw(0, false)];
    let refused = |backend: &mut CudaBackend, batch: &Batch, why: &str| {
        let begun = backend.begin_and_sample(batch, &mut rows.into_iter().take(batch.logit_rows.len()));
        let error = begun.expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
    };
    let follows = |row: u32, position| {
        let mut batch = decode(1, position);
        batch.tokens[0] = PLACEHOLDER | row;
        batch
    };
    refused(&mut backend, &follows(0, 1), "of the step before, which chooses 0");
    backend.begin_and_sample(&decode(2, 0), &mut rows.into_iter()).unwrap();
    refused(&mut backend, &follows(2, 1), "of the step before, which chooses 2");
    // After one that was refused nothing can be followed.
    refused(&mut backend, &follows(1, 1), "of the step before, which chooses 0");
    backend.begin_and_sample(&decode(2, 1), &mut rows.into_iter()).unwrap();
    refused(&mut backend, &decode(2, 2), "two steps are under way");
    let error = backend.forward(&decode(2, 2)).expect_err("it waits").to_string();
    assert!(error.contains("is not finished"), "{error}");
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        backend.finish_sampled(&mut outcomes).unwrap();
    }
    assert_eq!(outcomes.len(), 4);
    let error = backend.finish_sampled(&mut outcomes).expect_err("none").to_string();
    assert!(error.contains("no step was begun"), "{error}");
    // A prompt that wants no token is a step like any other.
    let mut prompt = decode(1, 2);
    prompt.logit_rows.clear();
    backend.begin_and_sample(&prompt, &mut std::iter::empty()).unwrap();
    backend.finish_sampled(&mut outcomes).unwrap();
    assert_eq!(outcomes.len(), 4);
    assert!(backend.forward(&decode(2, 3)).is_ok());
    let error = backend.forward(&follows(0, 4)).expect_err("logits are asked for").to_string();
    assert!(error.contains("which chooses 0"), "{error}");
}
