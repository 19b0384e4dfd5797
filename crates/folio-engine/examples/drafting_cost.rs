//! What drafts from text cost and what they find, without any model: `cargo run --release -p folio-engine --example drafting_cost`.
//!
//! The text is this repository's sources, cut into words. A prompt has so many of them; the tenant's store of finished answers is full; the answer is
//! a part of the prompt with every so many words changed, then words that the prompt does not have. Every token is told and drafted behind, and of the
//! drafts of a step those are verified that there are. Printed: microseconds for a request and a step (median, 99 of 100, most), drafts, those that
//! were right, tokens a step; then what indexing a prompt takes, anew and with what was kept of it 900 tokens ago, and ending an answer of 4,096 tokens.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use folio_engine::request::Token;
use folio_engine::{
    DRAFTS_MAX, Drafter, Drafters, Event, FinishReason, IndexBlock, IndexCache, Request, RequestId,
    SamplingParams, Speculation,
};
use folio_kv::TenantId;
use folio_sim::scenario::root;

/// The allocator of `folio`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ANSWER: usize = 4096;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("sources").flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => files(&path, found),
            false if path.extension().is_some_and(|extension| extension == "rs") => found.push(path),
            false => {}
        }
    }
}

/// All sources as tokens: words, single signs, and runs of blanks.
fn tokens() -> Vec<u32> {
    let mut paths = Vec::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut paths);
    paths.sort();
    let (mut vocabulary, mut tokens) = (HashMap::new(), Vec::new());
    let kind = |c: char| (c.is_alphanumeric() || c == '_', c.is_whitespace());
    for path in paths.iter().filter(|path| !path.components().any(|part| part.as_os_str() == "target")) {
        let text = std::fs::read_to_string(path).expect("a source");
        let mut from = 0;
        for (at, c) in text.char_indices() {
            let next = text[at + c.len_utf8()..].chars().next();
            if next.is_some_and(|next| kind(next) == kind(c) && kind(c) != (false, false)) {
                continue;
            }
            let id = vocabulary.len() as u32;
            tokens.push(*vocabulary.entry(text[from..at + c.len_utf8()].to_owned()).or_insert(id));
            from = at + c.len_utf8();
        }
    }
    println!("{} tokens, {} of them different", tokens.len(), vocabulary.len());
    tokens
}

/// Keeps all blocks, as a tenant's are kept.
#[derive(Default)]
struct Kept(RefCell<HashMap<Vec<u32>, Arc<IndexBlock>>>);

impl IndexCache for Kept {
    fn block(&self, tokens: &[u32], make: &dyn Fn() -> Arc<IndexBlock>) -> Arc<IndexBlock> {
        self.0.borrow_mut().entry(tokens.into()).or_insert_with(make).clone()
    }
}

struct World {
    drafters: Drafters,
    next_id: u64,
}

impl World {
    fn open(&mut self, drafter: Drafter, prompt: &[u32]) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let sampling = SamplingParams::greedy(2 * ANSWER as u32);
        let speculation = Some(Speculation::new(drafter, DRAFTS_MAX, prompt, &[]));
        let request = Request::new(id, TenantId(1), root(TenantId(1)), prompt.into(), sampling);
        self.drafters.open(&Request { speculation, ..request });
        id
    }

    fn say(&mut self, id: RequestId, token: u32) {
        let token = Event::Token { choice: 0, token: Token { id: token, logprobs: None, us: 0.0 } };
        self.drafters.follow(&[(id, token)]);
    }

    /// Returns the microseconds that it took to follow.
    fn end(&mut self, id: RequestId) -> f64 {
        let (reason, timing) = (FinishReason::Stop, Box::default());
        let event = Event::Finished { choice: 0, reason, stop_token: None, error: None, timing };
        let started = Instant::now();
        self.drafters.follow(&[(id, event)]);
        us(started)
    }
}

fn us(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

fn of_hundred(sorted: &[f64], share: usize) -> f64 {
    sorted[(sorted.len() - 1) * share / 100]
}

fn main() {
    let text = tokens();
    for drafter in [Drafter::Suffix, Drafter::Ngram] {
        for length in [1 << 10, 1 << 13, 60_000, 1 << 17, text.len() / 2] {
            measure(drafter, &text, length);
        }
    }
    let kept = Kept::default();
    Speculation::with_cache(Drafter::Suffix, DRAFTS_MAX, Arc::from(&text[..59_100]), &[], &kept);
    let prompt: Arc<[u32]> = Arc::from(&text[..60_000]);
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..21 {
        let started = Instant::now();
        Speculation::new(Drafter::Suffix, DRAFTS_MAX, &prompt, &[]);
        times[0].push(us(started));
        let started = Instant::now();
        Speculation::with_cache(Drafter::Suffix, DRAFTS_MAX, prompt.clone(), &[], &kept);
        times[1].push(us(started));
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let [anew, with_kept] = times.map(|times| of_hundred(&times, 50));
    println!("index of a prompt of 60,000 tokens: {anew:.0} us anew, {with_kept:.0} us with what was kept");
}

fn measure(drafter: Drafter, text: &[u32], length: usize) {
    let prompt = &text[..length];
    let mut world = World { drafters: Drafters::default(), next_id: 1 };
    let mut ends = Vec::new();
    // Finished answers, until what is kept of them is full.
    for answer in text[text.len() / 2..].chunks_exact(ANSWER) {
        let id = world.open(Drafter::Suffix, &answer[..1]);
        answer.iter().for_each(|token| world.say(id, *token));
        ends.push(world.end(id));
    }
    let copied = prompt[length.saturating_sub(ANSWER)..].iter().enumerate();
    let copied = copied.map(|(at, token)| if at % 37 == 36 { 1 } else { *token });
    let fresh = (0..ANSWER as u32).map(|at| 1_000_000 + at * at % 1009);
    let answer: Vec<u32> = copied.chain(text[length..].iter().copied().take(ANSWER)).chain(fresh).collect();
    let id = world.open(drafter, prompt);
    let (mut times, mut drafted, mut right, mut at, mut steps) = (Vec::new(), 0, 0, 0, 0);
    while at < answer.len() {
        let started = Instant::now();
        world.say(id, answer[at]);
        at += 1;
        let drafts = world.drafters.drafts(id, 0);
        times.push(us(started));
        let said = drafts.iter().zip(&answer[at..]).take_while(|(a, b)| a == b).count();
        steps += 1;
        drafted += drafts.len();
        right += said;
        // Those were told, too, at a token each.
        answer[at..at + said].iter().for_each(|token| world.say(id, *token));
        at += said;
    }
    times.sort_by(f64::total_cmp);
    ends.sort_by(f64::total_cmp);
    println!(
        "{:6} prompt of {length:7}: {:5.2} us (99 of 100 {:5.2}, most {:6.1}); {drafted} drafts, {right} right, {:.2} tokens a step; an answer's end {:.0} us",
        drafter.name(),
        of_hundred(&times, 50),
        of_hundred(&times, 99),
        of_hundred(&times, 100),
        answer.len() as f64 / steps as f64,
        of_hundred(&ends, 50),
    );
}
