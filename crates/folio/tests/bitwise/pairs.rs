//! Whatever a request can meet, each with each: kinds of layers, adapters beside rows without one, every drafter and drafts of every kind that
//! one may give by name, sizes of chunks and of batches, prefix hits, preemption at each step, memory and a disk beside the cache, threads, steps under
//! way, choices that are used later and masks that come late. Every pair of them in each run of the tests; with `FOLIO_TEST_EXHAUSTIVE` all
//! together, which takes days.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use folio_engine::{Drafter, Pooling, SamplingParams, SchedulerConfig};
use folio_model::testing::heads;

use crate::harness::{Arrival, KINDS, Oracle, SCRIPTS, Script, Setup, World, batched, prompt};

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

/// What drafts as a draft model, by turns: the same, one with states, one with windows whose heads are of another size, and one that keeps
/// latents.
const DRAFT_MODELS: [Option<&str>; 4] = [None, Some("qwen3_next"), Some("gemma4"), Some("deepseek_v3")];
/// (steps under way, steps until a choice is used)
const OVERLAPS: [(usize, usize); 4] = [(1, 1), (2, 1), (4, 1), (2, 3)];
/// Most tokens of a step.
const ROWS: [u32; 3] = [7, 24, 512];
/// Most sequences of a step.
const TOGETHER: [u32; 2] = [2, 16];
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
const ADAPTERS: usize = 2;
/// So that answers end at the end of the context.
const CONTEXT: u32 = 96;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Beside {
    Nothing,
    Memory,
    Disk,
}

const BESIDE: [Beside; 3] = [Beside::Nothing, Beside::Memory, Beside::Disk];

/// What a case chooses of each, in this order.
#[derive(Clone, Copy, Debug)]
struct Case {
    source: Source,
    preempted: Option<u64>,
    /// Of [`KINDS`], or of those with a head.
    model: usize,
    /// Nobody has one; every other has the same; every third has none, and only one of two is in a step.
    adapters: usize,
    beside: Beside,
    overlap: (usize, usize),
    rows: u32,
    together: u32,
    /// It runs behind another that left the same prompts.
    hits: bool,
    threads: usize,
    /// Masks come late.
    late: bool,
}

const FACTORS: usize = 11;

/// Levels of each factor.
const LEVELS: [usize; FACTORS] = [
    SOURCES.len(),
    PREEMPTED.len(),
    KINDS.len(),
    3,
    BESIDE.len(),
    OVERLAPS.len(),
    ROWS.len(),
    TOGETHER.len(),
    2,
    2,
    2,
];

impl Case {
    fn new(levels: [usize; FACTORS]) -> Self {
        let [source, preempted, model, adapters, beside, overlap, rows, together, hits, threads, late] =
            levels;
        Self {
            source: SOURCES[source],
            preempted: PREEMPTED[preempted],
            model,
            adapters,
            beside: BESIDE[beside],
            overlap: OVERLAPS[overlap],
            rows: ROWS[rows],
            together: TOGETHER[together],
            hits: hits == 1,
            threads: 1 + threads,
            late: late == 1,
        }
    }

    fn drafter(&self) -> Option<Drafter> {
        match self.source {
            Source::Drafter(drafter) => Some(drafter),
            Source::Scripted(_) => None,
        }
    }

    /// Of models with an MTP head.
    fn with_mtp(&self) -> &'static str {
        let all = heads::WITH_MTP.iter().chain(heads::PUBLISHED_WITH_MTP);
        all.cycle().nth(self.model).expect("there are some")
    }

    fn eagle(&self) -> &'static str {
        heads::HEADS[self.model % heads::HEADS.len()]
    }

    /// The fixture that its model is.
    fn fixture(&self) -> String {
        match self.drafter() {
            Some(Drafter::Eagle3) => heads::target(self.eagle()),
            Some(Drafter::Mtp) if heads::WITH_MTP.contains(&self.with_mtp()) => "qwen3".to_owned(),
            Some(Drafter::Mtp) => self.with_mtp().to_owned(),
            _ => KINDS[self.model].to_owned(),
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
            Some(Drafter::Eagle3) => World::with_head(self.eagle(), setup, BLOCKS, of_drafter),
            Some(Drafter::Mtp) => World::with_mtp(self.with_mtp(), setup, BLOCKS, of_drafter),
            _ => World::new(KINDS[self.model], setup, BLOCKS),
        };
        world.make_adapters(ADAPTERS);
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
            let other = DRAFT_MODELS[self.model % DRAFT_MODELS.len()];
            world.draft_by(other.unwrap_or(KINDS[self.model]), setup, of_drafter);
        }
        world
    }

    fn config(&self) -> SchedulerConfig {
        SchedulerConfig {
            max_num_batched_tokens: self.rows,
            max_model_len: CONTEXT,
            max_adapters: if self.adapters == 2 { 1 } else { 4 },
            ..batched(self.together.min(self.rows))
        }
    }
}

/// For every source and step of preemption one, the other factors in columns that are orthogonal as far as they can be: of a source, a step and
/// what thirds of them they are.
fn pairwise() -> Vec<[usize; FACTORS]> {
    const COLUMNS: [[usize; 4]; FACTORS] = [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 2],
        [0, 0, 1, 2],
        [0, 1, 1, 0],
        [0, 1, 1, 0],
        [1, 0, 1, 1],
        [0, 0, 1, 1],
        [0, 1, 1, 1],
        [1, 0, 0, 1],
    ];
    let of = |source: usize, step: usize| {
        let parts = [source, step, source / 3, step / 3];
        std::array::from_fn(|factor| {
            let sum: usize = parts.iter().zip(COLUMNS[factor]).map(|(part, times)| part * times).sum();
            sum % LEVELS[factor]
        })
    };
    (0..SOURCES.len()).flat_map(|source| (0..PREEMPTED.len()).map(move |step| of(source, step))).collect()
}

fn all() -> impl Iterator<Item = [usize; FACTORS]> {
    (0..LEVELS.iter().product()).map(|number: usize| {
        let mut rest = number;
        LEVELS.map(|levels| {
            let level = rest % levels;
            rest /= levels;
            level
        })
    })
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
/// the log probabilities of their tokens. Besides, the first once more, and vectors of prompts. Who has which adapter: [`Case::adapters`].
fn arrivals(model: &str, adapters: usize) -> Vec<Arrival> {
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
    let pooled = |length: usize, pooling| Arrival::pooled(prompt(length as u64, length, 97), pooling);
    let mut arrivals = vec![
        of(60, greedy(12)),
        of(35, drawn(16)),
        Arrival { rules: Some(3), ..of(7, greedy(11)) },
        Arrival { rules: Some(4), ..of(20, drawn(9)) },
        of(context, greedy(12)),
        of(28, drawn(14)),
        pooled(33, Pooling::Mean),
        of(60, greedy(12)),
        pooled(40, Pooling::Last),
        pooled(33, Pooling::Mean),
    ];
    for (id, arrival) in arrivals.iter_mut().enumerate() {
        arrival.adapter = (id % (adapters + 1)).checked_sub(1);
    }
    // What it would say at the seventh place ends it, there or where it says so before.
    let mut world = World::new(model, Setup::PLAIN, BLOCKS);
    world.make_adapters(ADAPTERS);
    let stopped = &mut arrivals[5];
    let said = world.run(&batched(1), std::slice::from_ref(stopped)).tokens.remove(0);
    stopped.stop = Some(said[6]);
    arrivals
}

/// Whatever its layers keep, behind pieces of prompts, hits and preemptions.
#[test]
fn a_drafter_that_is_the_same_model_is_always_right() {
    for fixture in ["qwen3_next", "nemotron_h", "lfm2", "gemma4"] {
        let mut world = World::new(fixture, Setup::PLAIN, BLOCKS);
        let arrivals = [40, 17, 50].map(|length| Arrival::new(prompt(length as u64, length, 97), 24));
        let oracle = Oracle::new(&mut world, &arrivals);
        world.draft_by(fixture, Setup::PLAIN, BLOCKS);
        world.speculate(oracle.speculation(&arrivals, Drafter::Model, 4));
        let config = SchedulerConfig { max_num_batched_tokens: 24, ..batched(3) };
        for behind in ["nothing", "the same prompts"] {
            let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                if now == 9 {
                    scheduler.preempt_all(cache);
                }
            });
            let what = format!("{fixture} behind {behind}");
            oracle.check(&run, &what);
            let (drafted, right) = run.drafts;
            assert!(drafted > 10 && right == drafted, "{what}: {right} of {drafted}");
        }
    }
}

#[test]
fn of_every_kind_in_every_way() {
    let cases: Box<dyn Iterator<Item = _>> = match std::env::var_os("FOLIO_TEST_EXHAUSTIVE") {
        Some(_) => Box::new(all()),
        None => Box::new(pairwise().into_iter()),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let (mut models, mut worlds) = (HashMap::new(), HashMap::new());
    let mut seen: HashMap<Source, (u64, u64)> = HashMap::new();
    let (mut preemptions, mut ahead, mut cached, mut loads, mut late) = (0, 0, 0, 0, 0);
    for case in cases.map(Case::new) {
        let (arrivals, oracle) =
            models.entry((case.fixture(), case.adapters)).or_insert_with_key(|(fixture, adapters)| {
                let arrivals = arrivals(fixture, *adapters);
                let mut world = World::new(fixture, Setup::PLAIN, BLOCKS);
                world.make_adapters(ADAPTERS);
                let oracle = Oracle::new(&mut world, &arrivals);
                (arrivals, oracle)
            });
        let world = worlds.entry(case.world_of()).or_insert_with(|| case.world(folder.path()));
        let (scripted, speculation) = match case.source {
            Source::Scripted(script) => (Some(oracle.drafter(script)), Vec::new()),
            Source::Drafter(drafter) => (None, oracle.speculation(arrivals, drafter, 4)),
        };
        let (depth, lag) = case.overlap;
        world.overlap(depth, lag, scripted);
        world.speculate(speculation);
        match case.late {
            true => world.late_masks(),
            false => world.on_time(),
        }
        if case.hits {
            oracle.check(&world.run(&case.config(), arrivals), &format!("before {case:?}"));
        } else {
            world.forget();
        }
        let run = world.run_disturbed(&case.config(), arrivals, &mut |now, scheduler, cache| {
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
        late += run.late;
    }
    let expected = |source: Source, drafts: u64, right: u64| match source {
        Source::Scripted(Script::Wrong) => drafts > 20 && right == 0,
        // Of those without rules and a stop token a few.
        Source::Scripted(Script::Forbidden) => drafts > 20 && right < drafts / 20,
        // Up to what is no token, and all but what lies behind the end of an answer.
        Source::Scripted(Script::Right(_) | Script::OutOfVocabulary) => {
            drafts > 50 && right > drafts - drafts / 10
        }
        // Nobody trained them.
        Source::Drafter(Drafter::Eagle3 | Drafter::Mtp) => drafts > 200 && right < drafts / 4,
        _ => right > 10 && drafts > right,
    };
    let counts = SOURCES.map(|source| (source, seen[&source]));
    let others: Vec<_> =
        counts.iter().filter(|(source, (drafts, right))| !expected(*source, *drafts, *right)).collect();
    assert!(others.is_empty(), "{others:?} of {counts:?}");
    assert!(
        preemptions > 100 && ahead > 100 && cached > 1000 && loads > 50 && late > 100,
        "{preemptions} {ahead} {cached} {loads} {late}"
    );
}
