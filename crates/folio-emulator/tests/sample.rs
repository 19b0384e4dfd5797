//! Sampling on the device chooses what folio-engine's sampler chooses, for thousands of rows and every mix of rules.

use std::sync::Arc;

use folio_cuda::Planes;
use folio_cuda::kernels::MODULES;
use folio_cuda::sample::{Sampling, decode, encode, result_words, sample};
use folio_emulator::Order;
use folio_engine::plan::{SampleSpec, Sampled, TokenHistory};
use folio_engine::request::SamplingParams;
use folio_engine::sampler::{Sampler, rng::philox4x32_10};
use folio_model::sampling::{Choice, Draw, Logprobs, Outcome, SampleRow};

/// What is asked of one row, as the engine says it; the token of a score.
struct Wanted {
    spec: SampleSpec,
    known: Option<u32>,
    seen: Vec<(u32, u32)>,
}

impl Wanted {
    fn row(&self) -> SampleRow<'_> {
        let (spec, params) = (&self.spec, &*self.spec.params);
        let stops: [&[u32]; 2] = match spec.forbid_stop {
            true => [&params.eos_token_ids, &params.stop_token_ids],
            false => [&[], &[]],
        };
        let draw = Draw {
            seed: spec.seed,
            position: spec.position,
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            frequency_penalty: params.frequency_penalty,
            presence_penalty: params.presence_penalty,
            seen: &self.seen,
            bias: &params.logit_bias,
            forbidden: stops,
        };
        let choice = self.known.map_or(Choice::Draw(draw), Choice::Known);
        SampleRow { choice, logprobs: params.logprobs }
    }

    /// What the engine's sampler makes of it.
    fn expected(&self, logits: &[f32]) -> Outcome {
        let sampled = match self.known {
            Some(token) => Sampler::default().score(logits, token, self.spec.params.logprobs.unwrap_or(0)),
            None => Sampler::default().sample(logits, &self.spec),
        };
        let plain = |of: folio_engine::request::TokenLogprobs| Logprobs {
            logprob: of.logprob,
            rank: of.rank,
            top: of.top,
        };
        match sampled {
            Sampled::Token { id, logprobs } => Outcome::Token { id, logprobs: logprobs.map(plain) },
            Sampled::Score(of) => Outcome::Score(plain(of)),
            Sampled::Failed(reason) => Outcome::Failed(match reason {
                std::borrow::Cow::Borrowed(reason) => reason,
                other => panic!("{other}"),
            }),
            other => panic!("{other:?}"),
        }
    }
}

/// Runs rows `[rows, vocab]` on the device.
fn on_device(logits: &[f32], vocab: usize, wanted: &[Wanted], order: Order) -> Vec<Outcome> {
    let mut driver = folio_emulator::device(order);
    driver.load(MODULES.iter().find(|module| module.name == "sample").unwrap()).unwrap();
    let rows: Vec<SampleRow<'_>> = wanted.iter().map(Wanted::row).collect();
    let (mut words, mut asked) = (Vec::new(), Vec::new());
    let needs = encode(&mut rows.iter().copied(), &mut words, &mut asked);
    let mut up = |words: &[u32]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = driver.allocate(bytes.len() as u64).unwrap();
        driver.upload(at, &bytes).unwrap();
        at
    };
    let words = up(&words);
    let stride = vocab.next_multiple_of(32);
    let mut padded = Vec::new();
    for row in logits.chunks(vocab) {
        padded.extend(row.iter().map(|x| x.to_bits()));
        padded.resize(padded.len().next_multiple_of(stride), f32::NAN.to_bits());
    }
    let mut plane = Planes { width: vocab as u32, f32_stride: stride as u32, ..Planes::default() };
    plane.f32 = Some(up(&padded));
    let mut scratch = plane;
    scratch.f32 = Some(driver.allocate(4 * padded.len() as u64).unwrap());
    let top = 300;
    let bytes = 4 * result_words(top) * rows.len();
    let out = driver.allocate(bytes as u64).unwrap();
    let scratch = needs.scratch.then_some(&scratch);
    let work = Sampling { words, rows: rows.len() as u32 + 1, logits: &plane, scratch, top, out };
    sample(&mut *driver, &work).unwrap();
    let mut found = vec![0; bytes];
    driver.download(out, &mut found).unwrap();
    let found: Vec<u32> = found.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    found.chunks(result_words(top)).zip(asked).map(|(words, row)| decode(row, words)).collect()
}

fn random(seed: u32, at: u32) -> u32 {
    philox4x32_10([seed, 77], [at, 0, 0, 0])[0]
}

/// A row of one of several kinds: even, with ties, steep, with what is forbidden or no number.
fn logits(seed: u32, vocab: usize) -> Vec<f32> {
    let unit = |i: usize| (random(seed, i as u32) >> 8) as f32 / 16_777_216.0;
    let mut row: Vec<f32> = (0..vocab)
        .map(|i| match seed % 4 {
            0 => unit(i) * 12.0 - 6.0,
            1 => (unit(i) * 30.0).floor() / 8.0 - 1.0,
            2 => unit(i).powi(8) * 40.0 - 20.0,
            _ => -(unit(i) * 3.0).exp(),
        })
        .collect();
    for (i, x) in row.iter_mut().enumerate() {
        if seed % 5 == 2 && i % 3 == 0 {
            *x = f32::NEG_INFINITY;
        }
        if seed % 7 == 3 && i % 2 == 0 {
            *x = if i % 4 == 0 { 0.0 } else { -0.0 };
        }
    }
    match seed % 61 {
        7 => row[vocab / 2] = f32::NAN,
        8 => row[vocab - 1] = f32::INFINITY,
        9 => row.fill(f32::NEG_INFINITY),
        _ => {}
    }
    row
}

fn wanted(seed: u32, vocab: usize) -> Wanted {
    let pick = |salt: u32, of: usize| random(seed ^ 0x5555, salt) as usize % of;
    let token = |salt: u32| pick(salt, vocab + 2) as u32;
    let few = |salt: u32, most: usize| (0..pick(salt, most) as u32).map(move |i| salt * 100 + i);
    let mut bias: Vec<(u32, f32)> = few(1, 6).map(|salt| (token(salt), pick(salt, 9) as f32 - 4.0)).collect();
    bias.sort_by_key(|(token, _)| *token);
    bias.dedup_by_key(|(token, _)| *token);
    let mut history = TokenHistory::of_prompt(&few(2, 8).map(token).collect::<Vec<_>>(), 0);
    few(3, 20).for_each(|salt| history.push(token(salt)));
    let penalized = pick(4, 3) == 0;
    let params = SamplingParams {
        temperature: [0.0, 0.2, 0.7, 1.0, 1.0, 3.0][pick(5, 6)],
        top_k: [0, 0, 1, 5, 40, 3000][pick(6, 6)],
        top_p: [1.0, 1.0, 0.05, 0.5, 0.9, 0.999][pick(7, 6)],
        min_p: [0.0, 0.0, 0.02, 1.0][pick(8, 4)],
        presence_penalty: [0.0, 0.7][pick(9, 2)],
        frequency_penalty: [0.0, 0.3, -0.2][pick(10, 3)],
        repetition_penalty: [1.0, 1.3][pick(11, 2)],
        logit_bias: if pick(12, 3) == 0 { bias.into() } else { Arc::new([]) },
        eos_token_ids: few(13, 3).map(token).collect(),
        stop_token_ids: few(14, 3).map(token).collect(),
        logprobs: [None, None, Some(0), Some(1), Some(20), Some(256)][pick(15, 6)],
        ..SamplingParams::greedy(1)
    };
    let seen = history.entries().iter().copied();
    Wanted {
        seen: if penalized { seen.collect() } else { Vec::new() },
        known: (pick(16, 8) == 0).then(|| token(17)),
        spec: SampleSpec {
            params: Arc::new(params),
            seed: u64::from(random(seed, 1)) << 32 | u64::from(seed),
            position: random(seed, 2) >> 12,
            history: penalized.then(|| Arc::new(history)),
            forbid_stop: pick(18, 3) == 0,
            guide: None,
        },
    }
}

#[test]
fn the_device_chooses_what_the_engine_chooses() {
    if !folio_emulator::available() {
        return;
    }
    let mut failed = 0;
    for (i, vocab) in [1, 3, 64, 200, 257, 900, 3000].into_iter().enumerate() {
        let order = Order::SEVERAL[i % 3];
        let seeds = |round: u32| (0..60).map(move |row| (i as u32) << 16 | round << 8 | row);
        for round in 0..if vocab < 1000 { 8 } else { 2 } {
            let rows: Vec<f32> = seeds(round).flat_map(|seed| logits(seed, vocab)).collect();
            let wanted: Vec<Wanted> = seeds(round).map(|seed| wanted(seed, vocab)).collect();
            let found = on_device(&rows, vocab, &wanted, order);
            for ((found, wanted), logits) in found.iter().zip(&wanted).zip(rows.chunks(vocab)) {
                assert_eq!(*found, wanted.expected(logits), "vocabulary {vocab}: {:?}", wanted.row());
                failed += u32::from(matches!(found, Outcome::Failed(_)));
            }
        }
    }
    assert!(failed > 20, "{failed} rows without an answer: too few to have been tested");
}

/// Where a block is large.
#[test]
fn a_large_vocabulary() {
    if !folio_emulator::available() {
        return;
    }
    let vocab = 33_000;
    let mut row = logits(4, vocab);
    row[20_000] = 9.0;
    row[31_999] = 9.0;
    let of = |temperature, top_p, top_k| {
        let mut wanted = wanted(1, vocab);
        let params =
            SamplingParams { temperature, top_p, top_k, logprobs: Some(20), ..SamplingParams::greedy(1) };
        (wanted.known, wanted.spec.params) = (None, Arc::new(params));
        wanted
    };
    let wanted = [of(0.0, 1.0, 0), of(1.0, 0.9, 0), of(1.0, 0.9, 50), of(0.8, 1.0, 0)];
    let rows = row.repeat(wanted.len());
    let found = on_device(&rows, vocab, &wanted, Order::Ascending);
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(*found, wanted.expected(&row), "{:?}", wanted.row());
    }
}
