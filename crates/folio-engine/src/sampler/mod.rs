//! From a row of logits to a token.
//!
//! Owns: every rule that turns logits into a choice, and its scratch memory. Must never: depend on the batch, the step
//! or the slot; a choice is a function of (logits, [`SampleSpec`], drafts) bit for bit (promise 1).
//!
//! Order of the rules (vLLM's): stop tokens forbidden before min_tokens, logit_bias, repetition penalty (prompt and
//! generated), frequency and presence penalties (generated), what a guide forbids, temperature, min_p, top_k, top_p, Gumbel-max. min_p and
//! top_p look at the distribution after temperature; top_p at what top_k left.
//!
//! Gumbel-max: the token with the largest `logit / T + g`, where `g` is a function of (seed, absolute position, token).
//! Nothing is summed, so nothing can round differently. All ties go to the lowest id. What is summed elsewhere, the masses of top_p
//! and of log probabilities, are whole numbers. So a device that computes in another order chooses the same token.
//!
//! Log probabilities are those of the raw row: before temperature, penalties and truncation.
//!
//! Cost per row of V logits: greedy is one look at the row, plus one copy if a rule changes logits. top_k and min_p are
//! another look; top_p computes V exponentials; no truncation draws noise only for tokens that can still win, those
//! within about 26 T of the best. No full sort of the row, ever.

pub mod math;
pub mod rng;
mod select;
#[cfg(test)]
mod tests;

use std::cell::RefCell;

use crate::guide::Restricted;
use crate::plan::{SampleSpec, Sampled, TokenHistory};
use crate::request::{SamplingParams, TokenLogprobs};
use rng::PositionRng;

/// Largest Gumbel draw: -ln(-ln(1 - 2^-33)), rounded up.
const GUMBEL_MAX: f64 = 22.9;
/// top_p's histogram: bins of 1/32 nat below the best, the last one open.
const BINS: usize = 1024;
const BINS_PER_NAT: f32 = 32.0;
/// Logits that are treated together.
const CHUNK: usize = 64;

/// Scratch memory of the rules; one per thread that samples.
pub struct Sampler {
    /// A row with the logits of tokens that the model cannot say.
    whole: Vec<f32>,
    row: Vec<f32>,
    keys: Vec<u64>,
    bins: Vec<u64>,
    bin_of: Vec<u32>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { whole: Vec::new(), row: Vec::new(), keys: Vec::new(), bins: vec![0; BINS], bin_of: Vec::new() }
    }
}

thread_local! {
    static SAMPLER: RefCell<Sampler> = RefCell::default();
}

impl Sampler {
    /// That of this thread. `with` must not ask for it again.
    pub(crate) fn of_thread<T>(with: impl FnOnce(&mut Self) -> T) -> T {
        SAMPLER.with_borrow_mut(with)
    }

    /// Makes of a row of logits of some tokens one of all `vocab` there are, in which the others' are impossible. Its memory is there for any
    /// row of that length afterwards.
    pub(crate) fn with_row<T>(
        &mut self,
        logits: &[f32],
        some_tokens: Option<(&[u32], usize)>,
        with: impl FnOnce(&mut Self, &[f32]) -> T,
    ) -> T {
        let vocab = some_tokens.map_or(logits.len(), |(_, vocab)| vocab);
        if self.keys.capacity() < vocab {
            self.row.reserve(vocab.saturating_sub(self.row.len()));
            self.bin_of.reserve(vocab.saturating_sub(self.bin_of.len()));
            self.keys.reserve(vocab.saturating_sub(self.keys.len()));
        }
        let Some((ids, vocab)) = some_tokens else { return with(self, logits) };
        let mut whole = std::mem::take(&mut self.whole);
        whole.clear();
        whole.resize(vocab, f32::NEG_INFINITY);
        ids.iter().zip(logits).for_each(|(id, logit)| whole[*id as usize] = *logit);
        let answer = with(self, &whole);
        self.whole = whole;
        answer
    }

    /// Chooses the next token from `logits`, `[vocab]`.
    pub fn sample(&mut self, logits: &[f32], spec: &SampleSpec) -> Sampled {
        self.sample_behind(&[], logits, spec)
    }

    /// The same where `drafts` come before it.
    pub fn sample_behind(&mut self, drafts: &[u32], logits: &[f32], spec: &SampleSpec) -> Sampled {
        let Some(raw_max) = math::max(logits) else { return failed("a logit is not a number") };
        if !raw_max.is_finite() {
            return failed("no logit is finite, or one is infinite");
        }
        let id = match changes_logits(spec) {
            false => self.choose(logits, raw_max, spec),
            true => {
                let mut row = std::mem::take(&mut self.row);
                row.clear();
                row.extend_from_slice(logits);
                let max = changed(&mut row, logits, spec, drafts);
                let id = max.map(|max| self.choose(&row, max, spec));
                self.row = row;
                match id {
                    Ok(id) => id,
                    Err(none) => return none,
                }
            }
        };
        let logprobs = spec.params.logprobs.map(|top| self.logprobs(logits, raw_max, id, top));
        Sampled::Token { id, logprobs }
    }

    /// Log probability of a known token.
    pub fn score(&mut self, logits: &[f32], next: u32, top: u32) -> Sampled {
        match math::max(logits) {
            None => failed("a logit is not a number"),
            Some(max) if !max.is_finite() => failed("no logit is finite, or one is infinite"),
            Some(_) if next as usize >= logits.len() => failed("the token is not in the vocabulary"),
            Some(max) => Sampled::Score(self.logprobs(logits, max, next, top)),
        }
    }

    fn logprobs(&mut self, logits: &[f32], max: f32, id: u32, top: u32) -> TokenLogprobs {
        let normalizer = f64::from(max) + math::ln(math::sum_mass(logits, max, 1.0) as f64 / math::MASS_ONE);
        let logprob = |logit: f32| (f64::from(logit) - normalizer) as f32;
        let own = logits[id as usize];
        let before = logits[..id as usize].iter().filter(|logit| **logit >= own).count();
        let after = logits[id as usize..].iter().filter(|logit| **logit > own).count();
        select::best_k(logits, top as usize, f32::NEG_INFINITY, &mut self.keys);
        self.keys.sort_unstable_by(|a, b| b.cmp(a));
        let top = self.keys.iter().map(|key| {
            let token = select::token(*key);
            (token, logprob(logits[token as usize]))
        });
        TokenLogprobs { logprob: logprob(own), rank: (before + after) as u32 + 1, top: top.collect() }
    }

    fn choose(&mut self, row: &[f32], max: f32, spec: &SampleSpec) -> u32 {
        let params = &*spec.params;
        if params.temperature == 0.0 {
            return first_equal(row, max);
        }
        let rng = PositionRng::new(spec.seed, spec.position);
        let temperature = f64::from(params.temperature);
        if !self.truncate(row, max, params) {
            return gumbel_all(row, max, temperature, &rng);
        }
        let scores = self.keys.iter().map(|key| {
            let token = select::token(*key);
            (score(row[token as usize], temperature, rng.token(token)), token)
        });
        best(scores).unwrap_or_else(|| first_equal(row, max))
    }

    /// Leaves in `keys` what min_p, top_k and top_p keep; `false`: nothing truncates. The best token is always kept.
    fn truncate(&mut self, row: &[f32], max: f32, params: &SamplingParams) -> bool {
        let scale = 1.0 / params.temperature;
        let top_k = (params.top_k > 0).then_some(params.top_k as usize).filter(|k| *k < row.len());
        let floor = match params.min_p > 0.0 {
            // The best token stays even if the product rounds badly.
            true => {
                (max + (math::ln(f64::from(params.min_p)) * f64::from(params.temperature)) as f32).min(max)
            }
            false => f32::NEG_INFINITY,
        };
        match (top_k, params.top_p < 1.0) {
            (None, false) if params.min_p <= 0.0 => return false,
            (Some(k), _) => select::best_k(row, k, floor, &mut self.keys),
            (None, false) => select::best_k(row, row.len(), floor, &mut self.keys),
            (None, true) => {
                self.nucleus_of_row(row, max, scale, floor, params.top_p);
                return true;
            }
        }
        if params.top_p < 1.0 {
            self.keys.sort_unstable_by(|a, b| b.cmp(a));
            let mass = |key: &u64| math::mass((row[select::token(*key) as usize] - max) * scale);
            let total = self.keys.iter().map(mass).sum();
            keep_mass(&mut self.keys, mass, math::share(params.top_p, total));
        }
        true
    }

    /// top_p over the whole row: a histogram of mass by logit finds the neighbourhood of the threshold, only what lies
    /// above it is sorted.
    fn nucleus_of_row(&mut self, row: &[f32], max: f32, scale: f32, floor: f32, top_p: f32) {
        let shift = scale * BINS_PER_NAT;
        self.bins.fill(0);
        self.bin_of.clear();
        self.bin_of.extend(row.iter().map(|logit| bin((max - logit) * shift)));
        // One loop for each, so that each is vectorized.
        let (mut shares, mut masses) = ([0.0; CHUNK], [0; CHUNK]);
        for (logits, bins) in row.chunks(CHUNK).zip(self.bin_of.chunks(CHUNK)) {
            for (share, logit) in shares.iter_mut().zip(logits) {
                *share = if *logit >= floor { math::exp((logit - max) * scale) } else { 0.0 };
            }
            for (mass, share) in masses.iter_mut().zip(shares) {
                *mass = math::whole(share);
            }
            for (mass, bin) in masses.iter().zip(bins) {
                self.bins[*bin as usize] += mass;
            }
        }
        let wanted = math::share(top_p, self.bins.iter().sum());
        let mut above = 0;
        let last = self.bins.iter().position(|mass| {
            above += mass;
            above >= wanted
        });
        let last = last.unwrap_or(BINS - 1) as u32;
        self.keys.clear();
        for (chunk, bins) in self.bin_of.chunks(CHUNK).enumerate() {
            if bins.iter().fold(u32::MAX, |a, b| a.min(*b)) > last {
                continue;
            }
            for (offset, bin) in bins.iter().enumerate() {
                let token = chunk * CHUNK + offset;
                if *bin <= last && row[token] >= floor {
                    self.keys.push(select::key(row[token], token as u32));
                }
            }
        }
        self.keys.sort_unstable_by(|a, b| b.cmp(a));
        let mass = |key: &u64| math::mass((row[select::token(*key) as usize] - max) * scale);
        keep_mass(&mut self.keys, mass, wanted);
    }
}

/// Nearest bin of a distance that is not negative; the last is open. Monotone, and without a conversion that would
/// keep it from being vectorized.
#[inline(always)]
fn bin(distance: f32) -> u32 {
    const ROUND: f32 = 8_388_608.0;
    let clamped = if distance < (BINS - 1) as f32 { distance } else { (BINS - 1) as f32 };
    (clamped + ROUND).to_bits() - ROUND.to_bits()
}

/// Keeps the shortest beginning of `keys` whose mass reaches `wanted`; at least one.
fn keep_mass(keys: &mut Vec<u64>, mass: impl Fn(&u64) -> u64, wanted: u64) {
    let mut sum = 0;
    let cut = keys.iter().position(|key| {
        sum += mass(key);
        sum >= wanted
    });
    if let Some(cut) = cut {
        keys.truncate(cut + 1);
    }
}

fn changes_logits(spec: &SampleSpec) -> bool {
    let params = &spec.params;
    let stops = !params.eos_token_ids.is_empty() || !params.stop_token_ids.is_empty();
    !params.logit_bias.is_empty()
        || spec.history.is_some()
        || spec.guide.is_some()
        || (spec.forbid_stop && stops)
}

fn failed(reason: &'static str) -> Sampled {
    Sampled::Failed(reason.into())
}

/// Applies every rule that changes logits to `row`, a copy of `raw`, and returns the largest that is left, or why there is no token.
fn changed(row: &mut [f32], raw: &[f32], spec: &SampleSpec, drafts: &[u32]) -> Result<f32, Sampled> {
    let restrict = |row: &mut [f32]| match spec.guide.as_ref().map(|guide| guide.0.restrict(drafts, row)) {
        None | Some(Ok(Restricted::Applied)) => Ok(math::max(row)),
        Some(Ok(Restricted::Late)) => Err(Sampled::Late),
        Some(Err(reason)) => Err(Sampled::Failed(reason.into())),
    };
    apply(row, spec, drafts, spec.forbid_stop);
    let mut max = restrict(row)?;
    if spec.guide.is_some() && spec.forbid_stop && max == Some(f32::NEG_INFINITY) {
        // What must be said is said: the answer ends before min_tokens.
        row.copy_from_slice(raw);
        apply(row, spec, drafts, false);
        max = restrict(row)?;
    }
    max.filter(|max| max.is_finite()).ok_or_else(|| failed("every token is forbidden"))
}

fn apply(row: &mut [f32], spec: &SampleSpec, drafts: &[u32], forbid_stop: bool) {
    let params = &spec.params;
    if forbid_stop {
        for token in params.eos_token_ids.iter().chain(params.stop_token_ids.iter()) {
            if let Some(logit) = row.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    for (token, bias) in params.logit_bias.iter() {
        if let Some(logit) = row.get_mut(*token as usize) {
            *logit += bias;
        }
    }
    if let Some(history) = &spec.history {
        penalize(row, history, drafts, params);
    }
}

/// Drafts count as generated: behind them stands what is chosen when they were.
fn penalize(row: &mut [f32], history: &TokenHistory, drafts: &[u32], params: &SamplingParams) {
    let drafted = |token: u32| drafts.iter().filter(|draft| **draft == token).count() as u32;
    for (token, generated) in history.entries() {
        let Some(logit) = row.get_mut(*token as usize) else { continue };
        penalize_token(logit, *generated + drafted(*token), params);
    }
    for (at, token) in drafts.iter().enumerate() {
        let new = !history.contains(*token) && !drafts[..at].contains(token);
        if let Some(logit) = row.get_mut(*token as usize).filter(|_| new) {
            penalize_token(logit, drafted(*token), params);
        }
    }
}

fn penalize_token(logit: &mut f32, generated: u32, params: &SamplingParams) {
    *logit =
        if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
    if generated > 0 {
        *logit -= params.frequency_penalty * generated as f32;
        *logit -= params.presence_penalty;
    }
}

fn first_equal(row: &[f32], max: f32) -> u32 {
    row.iter().position(|logit| *logit == max).unwrap_or(0) as u32
}

/// `logit / T + g`, with g = -ln(-ln(u)) and u = (bits + 1/2) / 2^32.
fn score(logit: f32, temperature: f64, bits: u32) -> f64 {
    let u = (f64::from(bits) + 0.5) / 4_294_967_296.0;
    f64::from(logit) / temperature - math::ln(-math::ln(u))
}

fn best(scores: impl Iterator<Item = (f64, u32)>) -> Option<u32> {
    let better = |a: (f64, u32), b: (f64, u32)| if b.0 > a.0 || (b.0 == a.0 && b.1 < a.1) { b } else { a };
    scores.reduce(better).map(|(_, token)| token)
}

/// Gumbel-max over the whole row. Starts from the largest logit, so that most tokens are passed over: those that could
/// not win with the largest draw there is without drawing, and most others by a look at what they drew.
fn gumbel_all(row: &[f32], max: f32, temperature: f64, rng: &PositionRng) -> u32 {
    let start = first_equal(row, max);
    let mut best = (score(max, temperature, rng.token(start)), start);
    let reach = |best: f64| ((best - GUMBEL_MAX) * temperature) as f32 - 1e-3 * max.abs().max(1.0);
    let mut least = reach(best.0);
    for (chunk, logits) in row.chunks(CHUNK).enumerate() {
        // A row with what is not a number has no choice.
        let Some(largest) = math::max(logits).filter(|largest| *largest >= least) else { continue };
        let first = chunk * CHUNK;
        let drawn = rng.groups::<{ CHUNK / 4 }>((first / 4) as u32);
        let needed = bits_needed(f64::from(largest) / temperature - best.0);
        if drawn.iter().all(|bits| bits.iter().all(|bits| *bits < needed)) {
            continue;
        }
        for (offset, logit) in logits.iter().enumerate() {
            let bits = drawn[offset % 4][offset / 4];
            if bits < needed || *logit < least || bits < bits_needed(f64::from(*logit) / temperature - best.0)
            {
                continue;
            }
            let token = (first + offset) as u32;
            let score = score(*logit, temperature, bits);
            if score > best.0 || (score == best.0 && token < best.1) {
                best = (score, token);
                least = reach(score);
            }
        }
    }
    best.1
}

/// A token whose logit is `lead` above the best score so far (nearly always below) surely loses with fewer bits than these. It wins if
/// -ln(u) < e^lead; and -ln(u) >= 1 - u.
fn bits_needed(lead: f64) -> u32 {
    // The margin is thousands of times what rounding could do.
    let reach = f64::from(math::exp(lead.min(0.0) as f32)) * 1.001;
    // u = (bits + 1/2) / 2^32, and a conversion that saturates.
    (((1.0 - reach) * 4_294_967_296.0).floor() - 1.0) as u32
}
