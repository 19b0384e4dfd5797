//! What choosing one token from a large vocabulary costs: `cargo run --release -p folio-engine --example sampler_cost`.

use std::sync::Arc;
use std::time::Instant;

use folio_engine::plan::SampleSpec;
use folio_engine::{Sampler, SamplingParams};

const VOCAB: u32 = 128_000;

type Change = fn(&mut SamplingParams);

fn main() {
    // About the shape of a language model's logits: a few good tokens over a wide, low bell.
    let row: Vec<f32> = (0..VOCAB)
        .map(|token| {
            let hash = |salt: u32| {
                (token ^ salt).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(0x85eb_ca6b)
            };
            let uniform = |salt| (hash(salt) >> 8) as f32 / 16_777_216.0;
            let bell = uniform(1) + uniform(2) + uniform(3) + uniform(4) - 2.0;
            bell * 5.0 + if token % 9973 == 0 { 16.0 } else { 0.0 }
        })
        .collect();
    let cases: [(&str, Change); 8] = [
        ("greedy", |_| {}),
        ("greedy, logprobs 5", |p| p.logprobs = Some(5)),
        ("greedy, one bias", |p| p.logit_bias = Arc::new([(5, 1.0)])),
        ("temperature 1", |p| p.temperature = 1.0),
        ("temperature 1, top_k 50", |p| (p.temperature, p.top_k) = (1.0, 50)),
        ("temperature 1, top_p 0.95", |p| (p.temperature, p.top_p) = (1.0, 0.95)),
        ("temperature 1, top_k 50, top_p 0.95", |p| (p.temperature, p.top_k, p.top_p) = (1.0, 50, 0.95)),
        ("temperature 1, min_p 0.05", |p| (p.temperature, p.min_p) = (1.0, 0.05)),
    ];
    let mut sampler = Sampler::default();
    for (name, change) in cases {
        let mut params = SamplingParams::greedy(1);
        change(&mut params);
        let mut spec = SampleSpec {
            params: Arc::new(params),
            seed: 1,
            position: 0,
            history: None,
            forbid_stop: false,
            guide: None,
        };
        let mut times: Vec<f64> = (0..200)
            .map(|position| {
                spec.position = position;
                let began = Instant::now();
                std::hint::black_box(sampler.sample(std::hint::black_box(&row), &spec));
                began.elapsed().as_nanos() as f64 / 1000.0
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{name:38} median {:7.1} us of {VOCAB} logits", times[times.len() / 2]);
    }
}
