//! `folio bench claims`: what the field says of serving, each claim re-created on this machine with a switch of our own.
//!
//! Owns: the claims, and what stands beside each. A baseline is a policy of the same scheduler and cache, or another request; never
//! another program. Claims about time are measured in pairs, in turn, in one process.

mod play;
mod policies;

use anyhow::{Context, Result, bail};
use folio_engine::AdmissionPolicy;
use folio_model::backend::KvFormat;
use serde::Serialize;

use self::play::{Arrivals, Asked, Player};
use self::policies::{PolicyFigure, ROOM, behind_opener, unequal};
use super::stats::{Summary, median};
use super::table;
use crate::cli::{BenchClaimsArgs, EngineArgs, Speculate};
use crate::progress::Bar;

/// Tokens that the longest of the loads needs.
const CONTEXT: u32 = 2048;

/// One claim, and how it is re-created.
struct Claim {
    name: &'static str,
    /// What is said, and how many times as good that is at least and at most.
    said: &'static str,
    field: Option<[f64; 2]>,
    /// The switch, and what it is set to in the baseline.
    baseline: &'static str,
    measure: fn(&Claims) -> Result<Vec<Figure>>,
}

const CLAIMS: [Claim; 9] = [
    Claim {
        name: "kv-cache",
        said: "a KV cache makes generation 5.2 times as fast",
        baseline: "each token is a request of its own, of which nothing is cached",
        field: Some([5.2, 5.2]),
        measure: kv_cache,
    },
    Claim {
        name: "continuous-batching",
        said: "continuous batching has 10 to 23 times the throughput of static batching",
        baseline: "static batching: as many requests as --max-num-seqs are admitted together, and the next when the last of them has its answer",
        field: Some([10.0, 23.0]),
        measure: continuous_batching,
    },
    Claim {
        name: "paging",
        said: "paging has 2 to 4 times the throughput of contiguous reservations, and wastes under 4 %",
        baseline: "--guarantee-completion: room for the longest answer is reserved before a request runs",
        field: Some([2.0, 4.0]),
        measure: paging,
    },
    Claim {
        name: "prefix-cache",
        said: "a cached prompt has its first token 5 times as soon",
        baseline: "a prompt that was never seen",
        field: Some([5.0, 5.0]),
        measure: prefix_cache,
    },
    Claim {
        name: "offload",
        said: "KV in host memory: the first token up to 14 times as soon as computed again",
        baseline: "no --host-kv-memory, and a KV cache for a quarter of the prompts that come again",
        field: Some([14.0, 14.0]),
        measure: offload,
    },
    Claim {
        name: "multi-round",
        said: "conversations over long documents that pause: 3 to 10 times less delay with a tier",
        baseline: "no --host-kv-memory, and a KV cache for a quarter of the conversations",
        field: Some([3.0, 10.0]),
        measure: multi_round,
    },
    Claim {
        name: "block-size",
        said: "blocks of 8 tokens instead of 64: 7 % less TTFT, because more of a prefix is found",
        baseline: "--block-size 64",
        field: Some([1.07, 1.07]),
        measure: block_size,
    },
    Claim {
        name: "speculation",
        said: "speculative decoding: 2 to 3 times less latency per token",
        baseline: "--speculate off",
        field: Some([2.0, 3.0]),
        measure: speculation,
    },
    Claim {
        name: "swapping",
        said: "a preempted sequence is swapped back sooner than it is computed again",
        baseline: "no --host-kv-memory: what was preempted is computed again",
        field: None,
        measure: swapping,
    },
];

/// What was measured of a claim.
#[derive(Debug, Serialize)]
struct Figure {
    claim: &'static str,
    said: &'static str,
    field: Option<[f64; 2]>,
    /// Of what, where a claim has several.
    of: &'static str,
    baseline: &'static str,
    unit: &'static str,
    /// Medians, with what is claimed and without it.
    with: f64,
    without: f64,
    /// Of each pair, how many times as good; and the median.
    gains: Vec<f64>,
    gain: f64,
    note: String,
}

impl Figure {
    /// `pairs`: with and without, of each repetition. Less is better, but of rates.
    fn new(of: &'static str, unit: &'static str, pairs: &[[f64; 2]], note: String) -> Self {
        let is_rate = unit.ends_with("/s");
        let gains: Vec<f64> = pairs
            .iter()
            .map(|[with, without]| if is_rate { with / without } else { without / with })
            .collect();
        let of_column = |column: usize| median(pairs.iter().map(|pair| pair[column]).collect());
        let (with, without) = (of_column(0), of_column(1));
        let gain = median(gains.clone());
        Self { claim: "", said: "", field: None, of, baseline: "", unit, with, without, gains, gain, note }
    }
}

/// A format of the cache, and what it takes.
#[derive(Debug, Serialize)]
struct Format {
    name: &'static str,
    bytes_per_token: usize,
    /// Of what f16 takes.
    share: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    version: &'static str,
    figures: Vec<Figure>,
    /// With `--policy`, instead of claims.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    policies: Vec<PolicyFigure>,
    /// "int8 halves, 4 bits quarter": sizes are exact, nothing is measured. What each costs in quality is told by `folio bench kv`.
    formats: Vec<Format>,
    /// Claims of what Folio does not do (yet), and what could not be measured here, with the reason.
    left_out: Vec<(&'static str, String)>,
}

pub fn run(args: &BenchClaimsArgs) -> Result<()> {
    args.engine.refuse_tiers()?;
    let unknown = args.only.iter().find(|only| CLAIMS.iter().all(|claim| claim.name != **only));
    if let Some(only) = unknown {
        let names: Vec<&str> = CLAIMS.iter().map(|claim| claim.name).collect();
        bail!("--only {only}: there is no such claim, only {}", names.join(", "));
    }
    let report = Claims { args, block_bytes: 0 }.report()?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

struct Claims<'a> {
    args: &'a BenchClaimsArgs,
    /// A block of the cache, in bytes.
    block_bytes: u64,
}

impl Claims<'_> {
    fn report(mut self) -> Result<Report> {
        let player = self.player(|_| {})?;
        let runtime = player.runtime();
        self.block_bytes = runtime.report.kv_bytes / u64::from(runtime.report.kv_blocks.max(1));
        let layout = &runtime.model.kv_layout.groups[0];
        let bytes = |format: KvFormat| {
            layout.vectors() * layout.layers() * layout.kv_heads * format.bytes_per_head(layout.head_dim)
        };
        let possible = KvFormat::ALL.into_iter().filter(|format| {
            format.refusal(layout.head_dim).is_none() && !(layout.is_latent() && format.is_scaled())
        });
        let formats = possible.map(|format| Format {
            name: format.name(),
            bytes_per_token: bytes(format),
            share: bytes(format) as f64 / bytes(KvFormat::F16) as f64,
        });
        let mut report = Report {
            model: runtime.name.clone(),
            device: runtime.report.device.clone(),
            version: env!("CARGO_PKG_VERSION"),
            figures: Vec::new(),
            policies: Vec::new(),
            formats: formats.collect(),
            left_out: vec![(
                "H2O: 2 to 5 times the throughput",
                "Folio evicts no tokens of a running sequence".into(),
            )],
        };
        let context = runtime.max_model_len();
        drop(player);
        let wanted =
            |claim: &&Claim| self.args.only.is_empty() || self.args.only.iter().any(|o| o == claim.name);
        let claims: Vec<&Claim> = CLAIMS.iter().filter(wanted).collect();
        if context < CONTEXT {
            let reason = format!("the context is {context} tokens, the loads need {CONTEXT}");
            report.left_out.extend(claims.iter().map(|claim| (claim.name, reason.clone())));
            return Ok(report);
        }
        if !self.args.policy.is_empty() {
            let measured = self.args.policy.iter().map(|policy| policies::measure(&self, *policy));
            report.policies = measured.collect::<Result<_>>()?;
            return Ok(report);
        }
        let bar = Bar::items("measuring", claims.len() as u64);
        for claim in claims {
            bar.advance(claim.name);
            let figures = (claim.measure)(&self).context(claim.name)?;
            let named = |figure| Figure {
                claim: claim.name,
                said: claim.said,
                field: claim.field,
                baseline: claim.baseline,
                ..figure
            };
            report.figures.extend(figures.into_iter().map(named));
        }
        bar.finish();
        Ok(report)
    }

    /// An engine with other arguments than were given.
    fn player(&self, change: impl FnOnce(&mut EngineArgs)) -> Result<Player> {
        let mut engine = self.args.engine.clone();
        engine.max_model_len = engine.max_model_len.or(Some(CONTEXT));
        // Drafts are a claim of their own.
        engine.speculate = engine.speculate.or(Some(Speculate::Off));
        change(&mut engine);
        Player::start(self.args.model.as_deref(), &engine)
    }

    /// Bytes of KV of so many tokens.
    fn kv_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.args.engine.block_size)) * self.block_bytes
    }

    /// With and without, in turn, after one of each to warm up.
    fn pairs(&self, mut measure: impl FnMut(bool) -> Result<f64>) -> Result<Vec<[f64; 2]>> {
        measure(true)?;
        measure(false)?;
        (0..self.args.repeat).map(|_| Ok([measure(true)?, measure(false)?])).collect()
    }
}

fn kv_cache(claims: &Claims) -> Result<Vec<Figure>> {
    const PROMPT: u32 = 64;
    const ANSWER: u32 = 192;
    let mut player = claims.player(|_| {})?;
    let text = player.prompt(PROMPT + ANSWER);
    let pairs = claims.pairs(|with| {
        let (each, tokens) = if with { (1, ANSWER) } else { (ANSWER, 1) };
        let prompt = |i: u32| text[..(PROMPT + i) as usize].to_vec();
        let asked = (0..each).map(|i| Asked { scope: player.scope(), ..Asked::new(prompt(i), tokens) });
        Ok(player.play(asked.collect(), Arrivals::Clients(1))?.1)
    })?;
    let note = format!("{ANSWER} tokens behind {PROMPT}");
    Ok(vec![Figure::new("", "s", &pairs, note)])
}

fn continuous_batching(claims: &Claims) -> Result<Vec<Figure>> {
    const SEQUENCES: u32 = 8;
    const REQUESTS: u32 = 64;
    let engine = |admission| {
        claims.player(|args| {
            args.max_num_seqs = Some(SEQUENCES);
            args.admission = admission;
        })
    };
    let (mut continuous, batches) = (engine(AdmissionPolicy::Continuous)?, engine(AdmissionPolicy::Static)?);
    let load: Vec<Asked> = (0..REQUESTS)
        .map(|_| {
            let tokens = continuous.length(64.0, 512);
            Asked::new(continuous.prompt(32), tokens)
        })
        .collect();
    let tokens: u32 = load.iter().map(|asked| asked.tokens).sum();
    let longest = load.iter().map(|asked| asked.tokens).max().unwrap_or(0);
    let load = behind_opener(&mut continuous, load);
    let pairs = claims.pairs(|with| {
        let player = if with { &continuous } else { &batches };
        let scope = player.scope();
        let asked = load.iter().map(|asked| Asked { scope, ..asked.clone() }).collect();
        Ok(f64::from(tokens) / player.play(asked, Arrivals::Together)?.1)
    })?;
    let note = format!(
        "{REQUESTS} requests, answers of {:.0} tokens on average and {longest} at most, {SEQUENCES} at once",
        f64::from(tokens) / f64::from(REQUESTS)
    );
    Ok(vec![Figure::new("", "tokens/s", &pairs, note)])
}

fn paging(claims: &Claims) -> Result<Vec<Figure>> {
    const REQUESTS: u32 = 32;
    let pool = claims.kv_bytes(ROOM * CONTEXT + 64);
    let engine = |guaranteed: bool| {
        claims.player(|args| {
            args.kv_cache_memory = Some(pool);
            args.max_num_seqs = Some(REQUESTS);
            args.guarantee_completion = guaranteed;
        })
    };
    let (mut paged, contiguous) = (engine(false)?, engine(true)?);
    let load = unequal(&mut paged, REQUESTS);
    let tokens: u32 = load.iter().map(|asked| asked.tokens).sum();
    let pairs = claims.pairs(|with| {
        let player = if with { &paged } else { &contiguous };
        let scope = player.scope();
        let asked = load.iter().map(|asked| Asked { scope, ..asked.clone() }).collect();
        Ok(f64::from(tokens) / player.play(asked, Arrivals::Together)?.1)
    })?;
    let note = format!("{REQUESTS} requests in a KV cache for {ROOM} of the longest");
    // Of all slots that its sequences had and gave up, as its cache counts them, those of the preempted among them.
    let wasted = 100.0 * paged.runtime().engine.stats().cache.lifetime_waste();
    // A reservation is no memory that is given out, so there is nothing to count.
    let written: u32 = load.iter().map(|asked| asked.prompt.len() as u32 + asked.tokens).sum();
    let reserved = 100.0 * (1.0 - f64::from(written) / f64::from(REQUESTS * CONTEXT));
    let of_slots = format!(
        "counted by the cache: slots that were given up and never written, blocks of {}; of reservations arithmetic, {CONTEXT} tokens for each request",
        claims.args.engine.block_size
    );
    let wastes = Figure::new("waste", "%", &[[wasted, reserved]], of_slots);
    Ok(vec![Figure::new("throughput", "tokens/s", &pairs, note), wastes])
}

fn prefix_cache(claims: &Claims) -> Result<Vec<Figure>> {
    const PREFIX: u32 = 1536;
    let mut player = claims.player(|_| {})?;
    let prefix = player.prompt(PREFIX);
    let known = player.scope();
    let pairs = claims.pairs(|with| {
        let scope = if with { known } else { player.scope() };
        let prompt = [&prefix[..], &player.prompt(16)].concat();
        Ok(player.ask(Asked { scope, ..Asked::new(prompt, 1) })?.ttft_s * 1e3)
    })?;
    Ok(vec![Figure::new("", "ms", &pairs, format!("{PREFIX} tokens that are shared and 16 that are not"))])
}

/// Prompts in turn, of which the cache holds a quarter: TTFT of those that come again.
fn offload(claims: &Claims) -> Result<Vec<Figure>> {
    const PREFIX: u32 = 1536;
    const PREFIXES: u32 = 8;
    let mut engines = tiered(claims, PREFIXES * (PREFIX + 32))?;
    let prefixes: Vec<Vec<u32>> = (0..PREFIXES).map(|_| engines[0].prompt(PREFIX)).collect();
    let pairs = claims.pairs(|with| {
        let player = &mut engines[usize::from(!with)];
        let mut round = || -> Result<f64> {
            let mut ttft = Vec::new();
            for prefix in &prefixes {
                let prompt = [&prefix[..], &player.prompt(16)].concat();
                ttft.push(player.ask(Asked::new(prompt, 1))?.ttft_s);
            }
            Ok(Summary::of(ttft).p50 * 1e3)
        };
        // The first pair of rounds finds nothing; it warms up.
        round()
    })?;
    let note =
        format!("{PREFIXES} prompts of {PREFIX} tokens in turn, memory for all of them beside the cache");
    Ok(vec![Figure::new("", "ms", &pairs, note)])
}

/// Users with a long document each ask in turn.
fn multi_round(claims: &Claims) -> Result<Vec<Figure>> {
    const USERS: u32 = 8;
    const DOCUMENT: u32 = 1024;
    const ROUNDS: u32 = 6;
    const QUESTION: u32 = 32;
    const ANSWER: u32 = 16;
    let longest = DOCUMENT + ROUNDS * (QUESTION + ANSWER);
    let mut engines = tiered(claims, USERS * longest)?;
    let pairs = claims.pairs(|with| {
        let player = &mut engines[usize::from(!with)];
        let mut texts: Vec<Vec<u32>> = (0..USERS).map(|_| player.prompt(DOCUMENT)).collect();
        let scope = player.scope();
        let mut delay = Vec::new();
        for round in 0..ROUNDS {
            for text in &mut texts {
                text.extend(player.prompt(QUESTION));
                let told = player.ask(Asked { scope, ..Asked::new(text.clone(), ANSWER) })?;
                text.extend(&told.tokens);
                if round > 0 {
                    delay.push(told.ttft_s);
                }
            }
        }
        Ok(Summary::of(delay).mean * 1e3)
    })?;
    let note = format!(
        "{USERS} users in turn, documents of {DOCUMENT} tokens, {ROUNDS} questions each; TTFT from the second on"
    );
    Ok(vec![Figure::new("", "ms", &pairs, note)])
}

/// With memory beside a cache for a quarter of so many tokens, and without.
fn tiered(claims: &Claims, tokens: u32) -> Result<[Player; 2]> {
    let (pool, all) = (claims.kv_bytes((tokens / 4).max(CONTEXT + 64)), claims.kv_bytes(tokens));
    let engine = |host: Option<u64>| {
        claims.player(|args| (args.kv_cache_memory, args.host_kv_memory) = (Some(pool), host))
    };
    Ok([engine(Some(2 * all))?, engine(None)?])
}

fn block_size(claims: &Claims) -> Result<Vec<Figure>> {
    const REQUESTS: u32 = 24;
    let engine = |block| claims.player(|args| args.block_size = block);
    let mut engines = [engine(8)?, engine(64)?];
    let small = &mut engines[0];
    let text = small.prompt(1024);
    // Prompts that share with the first as much as it happens.
    let shared: Vec<usize> = (0..REQUESTS).map(|_| 64 + small.below(900) as usize).collect();
    let own: Vec<Vec<u32>> = (0..REQUESTS).map(|_| small.prompt(48)).collect();
    let mut found = [0; 2];
    let pairs = claims.pairs(|with| {
        let player = &engines[usize::from(!with)];
        let scope = player.scope();
        player.ask(Asked { scope, ..Asked::new(text.clone(), 1) })?;
        let mut ttft = Vec::new();
        for (shared, own) in shared.iter().zip(&own) {
            let told = player.ask(Asked { scope, ..Asked::new([&text[..*shared], own].concat(), 1) })?;
            ttft.push(told.ttft_s);
            found[usize::from(!with)] += told.cached_tokens as usize;
        }
        Ok(Summary::of(ttft).mean * 1e3)
    })?;
    let most = shared.iter().sum::<usize>() * (claims.args.repeat as usize + 1);
    let share = found.map(|found| 100.0 * found as f64 / most as f64);
    let note = format!(
        "of what prompts share {:.1} % were found in blocks of 8, {:.1} % in blocks of 64: a hit ends at any token",
        share[0], share[1]
    );
    Ok(vec![Figure::new("", "ms", &pairs, note)])
}

fn speculation(claims: &Claims) -> Result<Vec<Figure>> {
    const ANSWER: u32 = 256;
    let mut player = claims.player(|args| args.speculate = None)?;
    let mut figures = Vec::new();
    for (of, wrong) in [("all drafts right", 0), ("one token of 20 wrong", 20), ("one token of 5 wrong", 5)] {
        let (mut prompt, mut answer) = (Vec::new(), Vec::new());
        let pairs = claims.pairs(|with| {
            if with {
                // Another text each time: answers that had drafts are drafts themselves.
                prompt = player.prompt(64);
                answer = player.ask(Asked::new(prompt.clone(), ANSWER))?.tokens;
            }
            let mut expected = answer.clone();
            let places = expected.iter_mut().enumerate().filter(|(i, _)| wrong > 0 && i % wrong == wrong - 1);
            places.for_each(|(_, token)| *token = token.checked_sub(1).unwrap_or(1));
            let scope = player.scope();
            let asked =
                Asked { scope, expected: with.then_some(expected), ..Asked::new(prompt.clone(), ANSWER) };
            let (told, seconds) = player.play(vec![asked], Arrivals::Together)?;
            if told[0].tokens != answer {
                bail!("with drafts the answer is another: this is a defect, please report it");
            }
            Ok(seconds / f64::from(ANSWER) * 1e3)
        })?;
        let note = format!("{ANSWER} tokens, alone, suffix drafts of a text that is expected");
        figures.push(Figure::new(of, "ms a token", &pairs, note));
    }
    Ok(figures)
}

fn swapping(claims: &Claims) -> Result<Vec<Figure>> {
    const REQUESTS: u32 = 16;
    const PROMPT: u32 = 256;
    const ANSWER: u32 = 192;
    let all = claims.kv_bytes(REQUESTS * (PROMPT + ANSWER));
    let pool = claims.kv_bytes(REQUESTS * (PROMPT + ANSWER) / 2).max(claims.kv_bytes(CONTEXT + 64));
    let engine = |host: Option<u64>| {
        claims.player(|args| {
            (args.kv_cache_memory, args.host_kv_memory) = (Some(pool), host);
            args.max_num_seqs = Some(REQUESTS);
        })
    };
    let mut engines = [engine(Some(2 * all))?, engine(None)?];
    let mut preemptions = [0; 2];
    let pairs = claims.pairs(|with| {
        let player = &mut engines[usize::from(!with)];
        let before = player.runtime().engine.stats().counters.preemptions;
        let asked: Vec<Asked> = (0..REQUESTS)
            .map(|_| Asked { scope: player.scope(), ..Asked::new(player.prompt(PROMPT), ANSWER) })
            .collect();
        let (_, seconds) = player.play(asked, Arrivals::Together)?;
        preemptions[usize::from(!with)] += player.runtime().engine.stats().counters.preemptions - before;
        Ok(seconds)
    })?;
    let note = format!(
        "{REQUESTS} requests of {PROMPT} and {ANSWER} tokens in a cache for half of them; {} and {} preemptions in all",
        preemptions[0], preemptions[1]
    );
    Ok(vec![Figure::new("", "s", &pairs, note)])
}

impl Report {
    fn policy_table(&self) -> String {
        let rows = self.policies.iter().map(|figure| {
            let ttft = |ms: f64| format!("{ms:.0} ms");
            let PolicyFigure { policy, how, tokens_per_s, ttft_ms } = figure;
            vec![
                (*policy).to_owned(),
                format!("{tokens_per_s:.1} tokens/s"),
                ttft(ttft_ms.p50),
                ttft(ttft_ms.p99),
                (*how).to_owned(),
            ]
        });
        table::render(&["policy", "rate", "TTFT p50", "TTFT p99", "how"], &rows.collect::<Vec<_>>())
    }

    fn table(&self) -> String {
        let mut out = format!("{} on {}\n", self.model, self.device);
        let mut rows = Vec::new();
        for figure in &self.figures {
            let name = [figure.claim, figure.of].join(" ").trim_end().to_owned();
            let value = |value: f64| format!("{value:.3} {}", figure.unit);
            let least = figure.gains.iter().copied().fold(f64::INFINITY, f64::min);
            let most = figure.gains.iter().copied().fold(0.0, f64::max);
            let gain = format!("{:.2} ({least:.2} to {most:.2})", figure.gain);
            rows.push(vec![name, value(figure.without), value(figure.with), gain]);
        }
        if self.policies.is_empty() {
            out.push_str(&table::render(&["claim", "without", "with", "times as good"], &rows));
        } else {
            out.push_str(&self.policy_table());
        }
        for figure in &self.figures {
            out.push_str(&format!(
                "\n{} {}: {}.\n  said: {}\n  without: {}\n",
                figure.claim, figure.of, figure.note, figure.said, figure.baseline
            ));
        }
        out.push('\n');
        let formats = self.formats.iter().map(|format| {
            vec![format.name.to_owned(), format.bytes_per_token.to_string(), format!("{:.3}", format.share)]
        });
        out.push_str(&table::render(&["KV format", "bytes a token", "of f16"], &formats.collect::<Vec<_>>()));
        self.left_out
            .iter()
            .for_each(|(claim, reason)| out.push_str(&format!("left out: {claim}: {reason}\n")));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_is_of_pairs_and_says_how_many_times_as_good() {
        let times = Figure::new("", "ms", &[[2.0, 8.0], [1.0, 3.0], [1.0, 5.0]], String::new());
        assert_eq!((times.gain, &times.gains[..]), (4.0, &[4.0, 3.0, 5.0][..]));
        assert_eq!((times.with, times.without), (1.0, 5.0));
        let rates = Figure::new("", "tokens/s", &[[8.0, 2.0]], String::new());
        assert_eq!(rates.gain, 4.0);
    }

    #[test]
    fn no_two_claims_have_one_name() {
        for (at, claim) in CLAIMS.iter().enumerate() {
            assert!(CLAIMS[at + 1..].iter().all(|other| other.name != claim.name), "{}", claim.name);
            assert!(!claim.said.is_empty() && !claim.baseline.is_empty());
        }
    }
}
