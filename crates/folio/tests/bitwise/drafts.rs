//! Every drafter, and drafts of every kind that one may give, by name, against the ways in which they may be verified: sizes of chunks, prefix
//! hits, preemption at each step, memory and a disk beside the cache, threads, and steps under way. Every pair of them in each run of the tests;
//! with `FOLIO_TEST_EXHAUSTIVE` all together, which takes hours.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use folio_engine::{Drafter, SamplingParams, SchedulerConfig};
use folio_model::testing::heads;

use crate::harness::{Arrival, Oracle, SCRIPTS, Script, Setup, World, batched, prompt};

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Source {
    Scripted(Script),
    Drafter(Drafter),
}

const SOURCES: [Source; SCRIPTS.len() + Drafter::ALL.len()] = {
    let mut sources = [Source::Drafter(Drafter::Suffix); SCRIPTS.len() + Drafter::ALL.len()];
    let mut at = 0;
    while at < sources.len() {
        sources[at] = match at < SCRIPTS.len() {
            true => Source::Scripted(SCRIPTS[at]),
            false => Source::Drafter(Drafter::ALL[at - SCRIPTS.len()]),
        };
        at += 1;
    }
    sources
};

/// Layers that see everything, that look back so far, and a mixture of experts.
const MODELS: [&str; 3] = ["llama3", "gemma3", "qwen3_moe"];
/// What drafts for each of them as a draft model: itself, and others, one of which keeps latents.
const DRAFT_MODELS: [&str; 3] = ["llama3", "llama2", "deepseek_v3"];
/// Models with an MTP head, and the fixtures that they are: the layers of the second keep states, those of the third and of its head latents.
const WITH_MTP: [(&str, &str); 3] =
    [("mimo", "qwen3"), ("qwen3_next", "qwen3_next"), ("deepseek_v3", "deepseek_v3")];
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
    [SOURCES.len(), PREEMPTED.len(), BESIDE.len(), DEPTHS.len(), ROWS.len(), MODELS.len(), 2, 2];

#[derive(Clone, Copy, Debug)]
struct Case {
    source: Source,
    preempted: Option<u64>,
    beside: Beside,
    depth: usize,
    rows: u32,
    /// Of [`MODELS`], or of those with a head.
    model: usize,
    /// It runs behind another that left the same prompts.
    hits: bool,
    threads: usize,
}

impl Case {
    fn new(levels: [usize; 8]) -> Self {
        let [source, preempted, beside, depth, rows, model, hits, threads] = levels;
        Self {
            source: SOURCES[source],
            preempted: PREEMPTED[preempted],
            beside: BESIDE[beside],
            depth: DEPTHS[depth],
            rows: ROWS[rows],
            model,
            hits: hits == 1,
            threads: 1 + threads,
        }
    }

    fn drafter(&self) -> Option<Drafter> {
        match self.source {
            Source::Drafter(drafter) => Some(drafter),
            Source::Scripted(_) => None,
        }
    }

    /// The fixture that its model is.
    fn fixture(&self) -> String {
        match self.drafter() {
            Some(Drafter::Eagle3) => heads::target(heads::HEADS[self.model]),
            Some(Drafter::Mtp) => WITH_MTP[self.model].1.to_owned(),
            _ => MODELS[self.model].to_owned(),
        }
    }

    /// Cases with the same have one.
    fn world_of(&self) -> (Option<Drafter>, usize, usize, Beside) {
        (self.drafter().filter(|drafter| drafter.is_model()), self.model, self.threads, self.beside)
    }

    /// Whatever drafts has room for all of its KV, or for a third.
    fn world(&self, folder: &Path) -> World {
        let setup = Setup { threads: self.threads, ..Setup::PLAIN };
        let of_drafter = if self.threads == 1 { BLOCKS } else { BLOCKS / 3 };
        let mut world = match self.drafter() {
            Some(Drafter::Eagle3) => World::with_head(heads::HEADS[self.model], setup, BLOCKS, of_drafter),
            Some(Drafter::Mtp) => World::with_mtp(WITH_MTP[self.model].0, setup, BLOCKS, of_drafter),
            _ => World::new(MODELS[self.model], setup, BLOCKS),
        };
        match self.beside {
            Beside::Nothing => {}
            Beside::Memory => world.keep_in_memory(2 * BLOCKS),
            Beside::Disk => {
                let (drafter, model, threads, _) = self.world_of();
                let place = format!("{}-{model}-{threads}", drafter.map_or("text", Drafter::name));
                world.keep_on_disk(&folder.join(place), 64 << 20);
            }
        }
        if let Some(Drafter::Model) = self.drafter() {
            world.draft_by(DRAFT_MODELS[self.model], setup, of_drafter);
        }
        world
    }
}

/// For every source and step of preemption one, the other factors in columns that are orthogonal as far as they can be.
fn pairwise() -> Vec<[usize; 8]> {
    let of = |source: usize, step: usize| {
        let (low, high) = (source % 3, source / 3);
        let third = |of: usize| (of + step) % 3;
        let beside = [third(low), third(high), third(low + high), third(low + 2 * high)];
        let [beside, depth, rows, model] = beside;
        [source, step, beside, depth, rows, model, (source + step / 3) % 2, (source + step) % 2]
    };
    (0..SOURCES.len()).flat_map(|source| (0..PREEMPTED.len()).map(move |step| of(source, step))).collect()
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
    let (mut models, mut worlds) = (HashMap::new(), HashMap::new());
    let mut seen: HashMap<Source, (u64, u64)> = HashMap::new();
    let (mut preemptions, mut ahead, mut cached, mut loads) = (0, 0, 0, 0);
    for case in cases.into_iter().map(Case::new) {
        let (arrivals, oracle) = models.entry(case.fixture()).or_insert_with_key(|fixture| {
            let arrivals = arrivals(fixture);
            let oracle = Oracle::new(&mut World::new(fixture, Setup::PLAIN, BLOCKS), &arrivals);
            (arrivals, oracle)
        });
        let world = worlds.entry(case.world_of()).or_insert_with(|| case.world(folder.path()));
        let config =
            SchedulerConfig { max_num_batched_tokens: case.rows, max_model_len: CONTEXT, ..batched(6) };
        let (scripted, speculation) = match case.source {
            Source::Scripted(script) => (Some(oracle.drafter(script)), Vec::new()),
            Source::Drafter(drafter) => (None, oracle.speculation(arrivals, drafter, 4)),
        };
        world.overlap(case.depth, 1, scripted);
        world.speculate(speculation);
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
        let (drafts, right) = seen.entry(case.source).or_default();
        *drafts += run.drafts.0;
        *right += run.drafts.1;
        preemptions += run.preemptions;
        ahead += run.ahead;
        cached += run.cached.iter().sum::<u32>();
        loads += run.loads.iter().filter(|arrived| **arrived).count();
    }
    let expected = |source: Source, drafts: u64, right: u64| match source {
        Source::Scripted(Script::Wrong | Script::Forbidden) => drafts > 20 && right == 0,
        // Up to what is no token, and all but what lies behind the end of an answer.
        Source::Scripted(Script::Right(_) | Script::OutOfVocabulary) => {
            drafts > 50 && right > drafts - drafts / 10
        }
        // Nobody trained them.
        Source::Drafter(Drafter::Eagle3 | Drafter::Mtp) => drafts > 200 && right < drafts / 4,
        _ => right > 20 && drafts > right,
    };
    let counts = SOURCES.map(|source| (source, seen[&source]));
    let others: Vec<_> =
        counts.iter().filter(|(source, (drafts, right))| !expected(*source, *drafts, *right)).collect();
    assert!(others.is_empty(), "{others:?} of {counts:?}");
    assert!(
        preemptions > 100 && ahead > 100 && cached > 1000 && loads > 50,
        "{preemptions} {ahead} {cached} {loads}"
    );
}
