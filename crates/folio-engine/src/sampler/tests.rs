//! The rules one by one, then all together against a plain f64 implementation, then the distribution itself.

use std::sync::Arc;

use super::*;
use crate::plan::SampleSpec;

fn params() -> SamplingParams {
    SamplingParams { temperature: 1.0, ..SamplingParams::greedy(10) }
}

fn spec(params: SamplingParams, seed: u64, position: u32) -> SampleSpec {
    SampleSpec { params: Arc::new(params), seed, position, history: None, forbid_stop: false, guide: None }
}

fn pick(row: &[f32], spec: &SampleSpec) -> u32 {
    match Sampler::default().sample(row, spec) {
        Sampled::Token { id, .. } => id,
        other => panic!("{other:?}"),
    }
}

/// Pseudo-random rows without a dependency.
fn row(seed: u32, length: usize) -> Vec<f32> {
    let words = (0..length as u32).map(|i| rng::philox4x32_10([seed, 1], [i, 0, 0, 0])[0]);
    words.map(|word| (word >> 8) as f32 / 16_777_216.0 * 12.0 - 6.0).collect()
}

/// Tokens ever drawn under `params` in `draws` draws, with their counts.
fn histogram(row: &[f32], params: SamplingParams, draws: u32) -> Vec<u32> {
    let mut counts = vec![0; row.len()];
    let mut sampler = Sampler::default();
    let mut spec = spec(params, 99, 0);
    for position in 0..draws {
        spec.position = position;
        let Sampled::Token { id, .. } = sampler.sample(row, &spec) else { panic!("no token") };
        counts[id as usize] += 1;
    }
    counts
}

fn drawn(row: &[f32], params: SamplingParams) -> Vec<u32> {
    let counts = histogram(row, params, 3000);
    (0..row.len() as u32).filter(|token| counts[*token as usize] > 0).collect()
}

/// Probability of a token before truncation, but for a common factor.
fn mass(row: &[f32], params: &SamplingParams, token: usize) -> f64 {
    let max = row.iter().copied().fold(f32::MIN, f32::max);
    ((f64::from(row[token]) - f64::from(max)) / f64::from(params.temperature)).exp()
}

/// What survives truncation, best first, in f64 and the obvious way.
fn survivors(row: &[f32], params: &SamplingParams) -> Vec<usize> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
    order.retain(|token| mass(row, params, *token) >= f64::from(params.min_p));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let total: f64 = order.iter().map(|token| mass(row, params, *token)).sum();
        let mut sum = 0.0;
        order.retain(|token| {
            let keeps = sum < f64::from(params.top_p) * total;
            sum += mass(row, params, *token);
            keeps
        });
    }
    order
}

/// Probabilities after all rules.
fn exact(row: &[f32], params: &SamplingParams) -> Vec<f64> {
    let order = survivors(row, params);
    let total: f64 = order.iter().map(|token| mass(row, params, *token)).sum();
    let mut probabilities = vec![0.0; row.len()];
    order.iter().for_each(|token| probabilities[*token] = mass(row, params, *token) / total);
    probabilities
}

#[test]
fn greedy_takes_the_best_and_the_lowest_of_equals() {
    let greedy = spec(SamplingParams { temperature: 0.0, ..params() }, 1, 1);
    assert_eq!(pick(&[1.0, 5.0, 5.0, 2.0], &greedy), 1);
    assert_eq!(pick(&[-1.0, f32::NEG_INFINITY, -0.5], &greedy), 2);
    for length in [1, 63, 64, 65, 1000] {
        let row = row(length as u32, length);
        let best = (0..length).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("not empty");
        assert_eq!(pick(&row, &greedy), best as u32);
    }
}

#[test]
fn what_is_not_a_number_is_an_error() {
    for bad in [f32::NAN, f32::INFINITY] {
        for at in [0, 7, 40] {
            let mut row = row(1, 41);
            row[at] = bad;
            for temperature in [0.0, 1.0] {
                let spec = spec(SamplingParams { temperature, ..params() }, 1, 1);
                assert!(matches!(Sampler::default().sample(&row, &spec), Sampled::Failed(_)));
            }
            assert!(matches!(Sampler::default().score(&row, 0, 1), Sampled::Failed(_)));
        }
    }
    let nothing = [f32::NEG_INFINITY; 5];
    assert!(matches!(Sampler::default().sample(&nothing, &spec(params(), 1, 1)), Sampled::Failed(_)));
}

#[test]
fn top_k_keeps_exactly_k_and_the_lowest_of_equals() {
    let row = [1.0, 3.0, 3.0, 3.0, 0.0];
    assert_eq!(drawn(&row, SamplingParams { top_k: 2, ..params() }), [1, 2]);
    assert_eq!(drawn(&row, SamplingParams { top_k: 1, ..params() }), [1]);
    assert_eq!(drawn(&row, SamplingParams { top_k: 5, ..params() }).len(), 5);
}

#[test]
fn top_p_keeps_the_shortest_set_that_reaches_it() {
    // 0.5, 0.25, 0.125, 0.125
    let row = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    let with = |top_p| drawn(&row, SamplingParams { top_p, ..params() });
    assert_eq!(with(0.4), [0]);
    assert_eq!(with(0.6), [0, 1]);
    assert_eq!(with(0.8), [0, 1, 2]);
    assert_eq!(with(0.9), [0, 1, 2, 3]);
    assert_eq!(with(1e-6), [0], "the best always stays");
    // After top_k, the mass is that of what is left: 2/3 and 1/3.
    assert_eq!(drawn(&row, SamplingParams { top_p: 0.6, top_k: 2, ..params() }), [0]);
    assert_eq!(drawn(&row, SamplingParams { top_p: 0.7, top_k: 2, ..params() }), [0, 1]);
}

#[test]
fn min_p_is_relative_to_the_best() {
    let row = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    assert_eq!(drawn(&row, SamplingParams { min_p: 0.45, ..params() }), [0, 1]);
    assert_eq!(drawn(&row, SamplingParams { min_p: 1.0, ..params() }), [0]);
    // After temperature: at T = 2 the ratio of the first two is 0.71.
    assert_eq!(drawn(&row, SamplingParams { min_p: 0.6, temperature: 2.0, ..params() }), [0, 1]);
}

#[test]
fn penalties_bias_and_forbidden_stops_change_the_greedy_choice() {
    let row = [2.0, 1.9, 1.8, -1.0];
    let base = SamplingParams { temperature: 0.0, ..params() };
    let mut history = TokenHistory::of_prompt(&[1], 0);
    history.push(0);
    history.push(0);
    let with = |change: &dyn Fn(&mut SamplingParams), history: Option<&TokenHistory>| {
        let mut params = base.clone();
        change(&mut params);
        let mut spec = spec(params, 1, 1);
        spec.history = history.map(|history| Arc::new(history.clone()));
        pick(&row, &spec)
    };
    assert_eq!(with(&|_| {}, Some(&history)), 0);
    assert_eq!(
        with(&|p| p.presence_penalty = 0.15, Some(&history)),
        1,
        "generated tokens only, not the prompt's"
    );
    assert_eq!(with(&|p| p.frequency_penalty = 0.06, Some(&history)), 1, "counted twice");
    assert_eq!(with(&|p| p.frequency_penalty = 0.04, Some(&history)), 0);
    assert_eq!(with(&|p| p.repetition_penalty = 1.2, Some(&history)), 2, "prompt and generated");
    assert_eq!(with(&|p| p.logit_bias = Arc::new([(3, 3.5)]), None), 3);
    let mut stop = spec(SamplingParams { stop_token_ids: Arc::new([0]), ..base.clone() }, 1, 1);
    assert_eq!(pick(&row, &stop), 0);
    stop.forbid_stop = true;
    assert_eq!(pick(&row, &stop), 1);
    let negative = [-2.0, -2.1];
    let mut repeated = spec(SamplingParams { repetition_penalty: 1.5, ..base }, 1, 1);
    repeated.history = Some(Arc::new(TokenHistory::of_prompt(&[0], 0)));
    assert_eq!(pick(&negative, &repeated), 1, "a negative logit is multiplied, not divided");
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let row = row(3, 500);
    let mut warm = Sampler::default();
    for position in 0..50 {
        // Other work in between leaves no trace.
        warm.sample(&row[..100], &spec(SamplingParams { top_p: 0.5, ..params() }, 8, 8));
        let spec = spec(params(), 1, position);
        assert_eq!(warm.sample(&row, &spec), Sampler::default().sample(&row, &spec));
    }
    let draws =
        |seed| (0..50).map(|position| pick(&row, &spec(params(), seed, position))).collect::<Vec<_>>();
    assert_ne!(draws(1), draws(2));
    assert_ne!(draws(1)[..25], draws(1)[25..]);
}

/// A token kept by several sets of rules has the same noise in each: truncation never changes the order of survivors.
#[test]
fn passing_over_hopeless_tokens_changes_nothing() {
    for seed in 0..300 {
        let row = row(seed, 640 + seed as usize % 130);
        for temperature in [0.05, 0.7, 1.0, 3.0, 40.0] {
            let rng = PositionRng::new(u64::from(seed), 5);
            let scores = row.iter().enumerate();
            let scores =
                scores.map(|(i, l)| (score(*l, f64::from(temperature), rng.token(i as u32)), i as u32));
            let spec = spec(SamplingParams { temperature, ..params() }, u64::from(seed), 5);
            assert_eq!(Some(pick(&row, &spec)), best(scores), "seed {seed}, T {temperature}");
        }
    }
}

#[test]
fn kept_tokens_match_the_obvious_implementation() {
    let mut sampler = Sampler::default();
    for seed in 0..400u32 {
        let length = 1 + (seed as usize * 13) % 900;
        let row = row(seed, length);
        let params = SamplingParams {
            temperature: [0.3, 0.9, 1.7][seed as usize % 3],
            top_k: [0, 1, 7, 64, 5000][seed as usize % 5],
            top_p: [1.0, 0.2, 0.9, 0.999][seed as usize % 4],
            min_p: [0.0, 0.0, 0.02][seed as usize % 3],
            ..params()
        };
        let want = survivors(&row, &params);
        let max = math::max(&row).expect("numbers");
        if !sampler.truncate(&row, max, &params) {
            assert_eq!(want.len(), length);
            continue;
        }
        sampler.keys.sort_unstable_by(|a, b| b.cmp(a));
        let got: Vec<usize> = sampler.keys.iter().map(|key| select::token(*key) as usize).collect();
        // At the threshold f32 and f64 may disagree about one token; about nothing else.
        let common = got.len().min(want.len());
        assert_eq!(got[..common], want[..common], "seed {seed}: {params:?}");
        assert!(
            got.len().abs_diff(want.len()) <= 1,
            "seed {seed}: {} kept, {} wanted",
            got.len(),
            want.len()
        );
    }
}

/// Chi-square against the exact distribution. With a fixed seed this is one number, not a gamble.
#[test]
fn draws_follow_the_exact_distribution() {
    const DRAWS: u32 = 40_000;
    let row = row(17, 24);
    for (name, params) in [
        ("plain", params()),
        ("hot", SamplingParams { temperature: 2.5, ..params() }),
        ("cold", SamplingParams { temperature: 0.6, ..params() }),
        ("top_k", SamplingParams { top_k: 6, ..params() }),
        ("top_p", SamplingParams { top_p: 0.8, ..params() }),
        ("min_p", SamplingParams { min_p: 0.05, ..params() }),
        ("all", SamplingParams { temperature: 1.4, top_k: 12, top_p: 0.95, min_p: 0.01, ..params() }),
    ] {
        let want = exact(&row, &params);
        let counts = histogram(&row, params, DRAWS);
        let (mut chi, mut cells) = (0.0, 0);
        let (mut rare_want, mut rare_got) = (0.0, 0.0);
        for (probability, count) in want.iter().zip(&counts) {
            let expected = probability * f64::from(DRAWS);
            assert!(*probability > 0.0 || *count == 0, "{name}: a truncated token was drawn");
            if expected < 5.0 {
                rare_want += expected;
                rare_got += f64::from(*count);
            } else {
                chi += (f64::from(*count) - expected).powi(2) / expected;
                cells += 1;
            }
        }
        if rare_want > 1.0 {
            chi += (rare_got - rare_want).powi(2) / rare_want;
        }
        // Mean `cells`, deviation sqrt(2 cells): four deviations.
        let limit = f64::from(cells) + 4.0 * (2.0 * f64::from(cells)).sqrt();
        assert!(cells > 1 && chi < limit, "{name}: chi-square {chi:.1} with {cells} cells, limit {limit:.1}");
    }
}

#[test]
fn logprobs_are_of_the_raw_row_with_ranks_and_ties() {
    let row = [1.0, 3.0, 3.0, 0.0, -2.0];
    let normalizer: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>().ln();
    let params = SamplingParams {
        temperature: 0.0,
        logprobs: Some(3),
        logit_bias: Arc::new([(3, 100.0)]),
        ..params()
    };
    let Sampled::Token { id, logprobs: Some(got) } = Sampler::default().sample(&row, &spec(params, 1, 1))
    else {
        panic!("no logprobs")
    };
    assert_eq!((id, got.rank), (3, 4), "chosen by bias, judged without it");
    assert!((f64::from(got.logprob) - (0.0 - normalizer)).abs() < 1e-5);
    assert_eq!(got.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 2, 0]);
    assert!((f64::from(got.top[0].1) - (3.0 - normalizer)).abs() < 1e-5);
    let Sampled::Score(second) = Sampler::default().score(&row, 2, 0) else { panic!("no score") };
    assert_eq!((second.rank, second.top.len()), (2, 0), "equal to the best, but of a higher id");
}

#[test]
fn probabilities_of_a_large_row_sum_to_one() {
    let row = row(4, 128_000);
    let Sampled::Score(got) = Sampler::default().score(&row, 5, 128_000) else { panic!("no score") };
    let sum: f64 = got.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
}
