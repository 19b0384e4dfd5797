//! Drafts of every kind that a drafter may give, by name, against the ways in which they may be verified: sizes of chunks, prefix hits, preemption
//! at each step, memory and a disk beside the cache, threads, and steps under way. Every pair of them in each run of the tests; with
//! `FOLIO_TEST_EXHAUSTIVE` all together, which takes hours.

use std::collections::{BTreeSet, HashMap};

use folio_engine::{SamplingParams, SchedulerConfig};

use crate::harness::{Arrival, Oracle, SCRIPTS, Script, Setup, World, batched, prompt};

/// Layers that see everything, that look back so far, and a mixture of experts.
const MODELS: [&str; 3] = ["llama3", "gemma3", "qwen3_moe"];
/// Most tokens of a step.
const ROWS: [u32; 3] = [7, 24, 512];
const DEPTHS: [usize; 3] = [1, 2, 4];
/// Nobody is preempted, or everybody before this step.
const PREEMPTED: [Option<u64>; 17] = {
    let mut steps = [None; 17];
    let mut step = 1;
    while step < 17 {
        steps[step] = Some(step as u64);
        step += 1;
    }
    steps
};
const BLOCKS: u32 = 64;
/// So that answers end at the end of the context.
const CONTEXT: u32 = 96;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Beside {
    Nothing,
    Memory,
    Disk,
}

const BESIDE: [Beside; 3] = [Beside::Nothing, Beside::Memory, Beside::Disk];

/// Levels of each factor, by their number.
const LEVELS: [usize; 8] =
    [SCRIPTS.len(), PREEMPTED.len(), BESIDE.len(), DEPTHS.len(), ROWS.len(), MODELS.len(), 2, 2];

#[derive(Clone, Copy, Debug)]
struct Case {
    script: Script,
    preempted: Option<u64>,
    beside: Beside,
    depth: usize,
    rows: u32,
    model: &'static str,
    /// It runs behind another that left the same prompts.
    hits: bool,
    threads: usize,
}

impl Case {
    fn new(levels: [usize; 8]) -> Self {
        let [script, preempted, beside, depth, rows, model, hits, threads] = levels;
        Self {
            script: SCRIPTS[script],
            preempted: PREEMPTED[preempted],
            beside: BESIDE[beside],
            depth: DEPTHS[depth],
            rows: ROWS[rows],
            model: MODELS[model],
            hits: hits == 1,
            threads: 1 + threads,
        }
    }
}

/// For every script and step of preemption one, the other factors in columns that are orthogonal as far as they can be.
fn pairwise() -> Vec<[usize; 8]> {
    let of = |script: usize, step: usize| {
        let (low, high) = (script % 3, script / 3);
        let third = |of: usize| (of + step) % 3;
        let beside = [third(low), third(high), third(low + high), third(low + 2 * high)];
        let [beside, depth, rows, model] = beside;
        [script, step, beside, depth, rows, model, (script + step / 3) % 2, (script + step) % 2]
    };
    (0..SCRIPTS.len()).flat_map(|script| (0..PREEMPTED.len()).map(move |step| of(script, step))).collect()
}

fn all() -> Vec<[usize; 8]> {
    let mut all = vec![[0; 8]];
    for (factor, levels) in LEVELS.into_iter().enumerate() {
        let each = |of: [usize; 8]| {
            (0..levels).map(move |level| {
                let mut of = of;
                of[factor] = level;
                of
            })
        };
        all = all.into_iter().flat_map(each).collect();
    }
    all
}

#[test]
fn every_pair_is_tried() {
    let cases = pairwise();
    for first in 0..LEVELS.len() {
        for second in 0..first {
            let found: BTreeSet<_> = cases.iter().map(|case| (case[first], case[second])).collect();
            assert_eq!(found.len(), LEVELS[first] * LEVELS[second], "factors {first} and {second}");
        }
    }
}

/// Greedy, drawn with everything that looks at what was said, by rules, up to the end of the context, and one that a stop token ends; all with
/// the log probabilities of their tokens.
fn arrivals(model: &str) -> Vec<Arrival> {
    let drawn = |max_tokens| SamplingParams {
        temperature: 0.9,
        min_p: 0.01,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        presence_penalty: -0.2,
        logit_bias: [(3, 1.5), (7, -2.0)].into(),
        seed: 5,
        min_tokens: 4,
        ..SamplingParams::greedy(max_tokens)
    };
    let greedy = SamplingParams::greedy;
    let context = CONTEXT as usize - 12;
    let of = |length: usize, sampling: SamplingParams| Arrival {
        sampling: Some(SamplingParams { logprobs: Some(2), ..sampling.clone() }),
        ..Arrival::new(prompt(length as u64, length, 97), sampling.max_tokens)
    };
    let mut arrivals = vec![
        of(60, greedy(12)),
        of(35, drawn(16)),
        Arrival { rules: Some(3), ..of(7, greedy(11)) },
        Arrival { rules: Some(4), ..of(20, drawn(9)) },
        of(context, greedy(12)),
    ];
    // What it would say at the seventh place ends it, there or where it says so before.
    let mut world = World::new(model, Setup::PLAIN, BLOCKS);
    let said = world.run(&batched(1), &[of(28, drawn(14))]).tokens.remove(0);
    arrivals.push(Arrival { stop: Some(said[6]), ..of(28, drawn(14)) });
    arrivals
}

#[test]
fn of_every_kind_in_every_way() {
    let cases = if std::env::var_os("FOLIO_TEST_EXHAUSTIVE").is_some() { all() } else { pairwise() };
    let folder = tempfile::tempdir().expect("a folder");
    let models: HashMap<&str, _> = MODELS
        .iter()
        .map(|model| {
            let arrivals = arrivals(model);
            let oracle = Oracle::new(&mut World::new(model, Setup::PLAIN, BLOCKS), &arrivals);
            (*model, (arrivals, oracle))
        })
        .collect();
    let mut worlds = HashMap::new();
    let mut seen: HashMap<Script, (u64, u64)> = HashMap::new();
    let (mut preemptions, mut ahead, mut cached, mut loads) = (0, 0, 0, 0);
    for case in cases.into_iter().map(Case::new) {
        let (arrivals, oracle) = &models[case.model];
        let world = worlds.entry((case.model, case.threads, case.beside)).or_insert_with(|| {
            let mut world = World::new(case.model, Setup { threads: case.threads, ..Setup::PLAIN }, BLOCKS);
            let place = folder.path().join(format!("{}-{}", case.model, case.threads));
            match case.beside {
                Beside::Nothing => {}
                Beside::Memory => world.keep_in_memory(2 * BLOCKS),
                Beside::Disk => world.keep_on_disk(&place, 64 << 20),
            }
            world
        });
        let config =
            SchedulerConfig { max_num_batched_tokens: case.rows, max_model_len: CONTEXT, ..batched(6) };
        world.overlap(case.depth, 1, Some(oracle.drafter(case.script)));
        if case.hits {
            oracle.check(&world.run(&config, arrivals), &format!("before {case:?}"));
        } else {
            world.forget();
        }
        let run = world.run_disturbed(&config, arrivals, &mut |now, scheduler, cache| {
            if Some(now) == case.preempted {
                scheduler.preempt_all(cache);
            }
        });
        oracle.check(&run, &format!("{case:?}"));
        let (drafts, right) = seen.entry(case.script).or_default();
        *drafts += run.drafts.0;
        *right += run.drafts.1;
        preemptions += run.preemptions;
        ahead += run.ahead;
        cached += run.cached.iter().sum::<u32>();
        loads += run.loads.iter().filter(|arrived| **arrived).count();
    }
    let expected = |script: Script, drafts: u64, right: u64| match script {
        Script::Wrong | Script::Forbidden => drafts > 20 && right == 0,
        // Up to what is no token, and all but what lies behind the end of an answer.
        Script::Right(_) | Script::OutOfVocabulary => drafts > 50 && right > drafts - drafts / 10,
        _ => right > 20 && drafts > right,
    };
    let counts = SCRIPTS.map(|script| (script, seen[&script]));
    let others: Vec<_> =
        counts.iter().filter(|(script, (drafts, right))| !expected(*script, *drafts, *right)).collect();
    assert!(others.is_empty(), "{others:?} of {counts:?}");
    assert!(
        preemptions > 100 && ahead > 100 && cached > 1000 && loads > 50,
        "{preemptions} {ahead} {cached} {loads}"
    );
}
