//! What prompts have in common with those before them: what a larger cache would have hit, and which clients break their own prefix; and what
//! answers repeat (`lookups`).
//!
//! Owns: the thread that looks, and what it found. Must never: keep whoever answers waiting: what is too much for the thread is left out, and
//! counted. Memory: [`SAMPLED`] hashes ([`ShadowIndex`], under 16 MiB), the beginnings of a few prompts of each tenant (`breaks`),
//! names of prefixes and what they cost (`repeated`), and [`WAITING`] prompts on the way.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use folio_engine::{Drafters, Micros};
use folio_kv::{BlockHashes, TenantId};
use parking_lot::Mutex;

use super::breaks::Breaks;
use super::lookups::LookupOutcomes;
use super::repeated::RepeatedPrefixes;
use super::shadow::ShadowIndex;

/// Hashes of blocks that are followed: all, up to two million tokens in blocks of 16.
const SAMPLED: usize = 1 << 17;
/// Prompts that wait for the thread.
const WAITING: usize = 256;
/// Of answers without drafts one in so many is looked through for them, if it has so many tokens at least and its prompt so many at most.
const LOOKED_THROUGH: u64 = 8;
const ANSWER_LEAST: usize = 16;
const PROMPT_MOST: usize = 16_384;
/// What is older counts half.
const HALF_LIFE_US: f64 = 300e6;

/// Something to look at.
enum ComparedText {
    Prompt {
        tenant: TenantId,
        hashes: BlockHashes,
        tokens: Arc<[u32]>,
        cached: u32,
        at: Micros,
    },
    /// A prompt, its hashes, and what was computed of its answer.
    Answer {
        hashes: BlockHashes,
        prompt: Arc<[u32]>,
        answer: Vec<u32>,
    },
    /// An answer without drafts.
    Undrafted {
        prompt: Arc<[u32]>,
        answer: Vec<u32>,
    },
}

/// What was found.
pub(super) struct PromptFindings {
    pub index: ShadowIndex,
    pub breaks: Breaks,
    pub repeated: RepeatedPrefixes,
    pub lookups: LookupOutcomes,
    aged: Micros,
}

/// See the module documentation.
pub(super) struct Prompts {
    seen: SyncSender<ComparedText>,
    found: Arc<Mutex<PromptFindings>>,
    left_out: AtomicU64,
    undrafted: AtomicU64,
}

impl Prompts {
    /// With a thread, which ends with it.
    pub fn new() -> Self {
        let (seen, receiver) = sync_channel(WAITING);
        let found = Arc::new(Mutex::new(PromptFindings::default()));
        let shared = found.clone();
        let thread =
            std::thread::Builder::new().name("folio-why".into()).spawn(move || look(&receiver, &shared));
        if let Err(error) = thread {
            tracing::warn!(%error, "prompts are not compared: the thread could not be started");
        }
        Self { seen, found, left_out: AtomicU64::new(0), undrafted: AtomicU64::new(0) }
    }

    /// A prompt was computed, of which `cached` tokens were found.
    pub fn prompt(&self, tenant: TenantId, hashes: BlockHashes, tokens: Arc<[u32]>, cached: u32, at: Micros) {
        self.see(ComparedText::Prompt { tenant, hashes, tokens, cached, at });
    }

    /// An answer ended, of which these tokens were computed.
    pub fn answer(&self, hashes: BlockHashes, prompt: Arc<[u32]>, answer: Vec<u32>) {
        self.see(ComparedText::Answer { hashes, prompt, answer });
    }

    /// An answer ended of a request that had no drafter.
    pub fn undrafted(&self, prompt: &Arc<[u32]>, answer: &[u32]) {
        let is_fit = answer.len() >= ANSWER_LEAST && prompt.len() <= PROMPT_MOST;
        if is_fit && self.undrafted.fetch_add(1, Ordering::Relaxed).is_multiple_of(LOOKED_THROUGH) {
            self.see(ComparedText::Undrafted { prompt: prompt.clone(), answer: answer.to_vec() });
        }
    }

    fn see(&self, seen: ComparedText) {
        if self.seen.try_send(seen).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Prompts and answers that were not looked at.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// What was found up to then.
    pub fn found<T>(&self, at: Micros, read: impl FnOnce(&PromptFindings) -> T) -> T {
        let mut found = self.found.lock();
        found.age(at);
        read(&found)
    }

    pub fn forget(&self, gone: &HashSet<TenantId>) {
        let mut found = self.found.lock();
        found.breaks.forget(gone);
        found.repeated.forget(gone);
    }
}

impl Default for PromptFindings {
    fn default() -> Self {
        let (breaks, repeated, lookups) = Default::default();
        Self { index: ShadowIndex::new(SAMPLED), breaks, repeated, lookups, aged: Micros(0) }
    }
}

impl PromptFindings {
    /// A prompt was computed, of which `cached` tokens were found.
    pub fn see(&mut self, tenant: TenantId, hashes: &BlockHashes, tokens: &[u32], cached: u32, at: Micros) {
        let block = hashes.block_tokens();
        // The last token is computed whatever is cached, so a prompt of whole blocks finds one less.
        let most = tokens.len().saturating_sub(1) / block as usize;
        self.age(at);
        self.index.ask(hashes.iter().take(most), (cached / block) as usize);
        self.index.computed(hashes.iter().skip(most));
        self.breaks.ask(tenant, tokens, cached as usize, block as usize);
        self.repeated.ask(tenant, hashes, most as u32, cached);
    }

    fn age(&mut self, at: Micros) {
        let us = at.0.saturating_sub(self.aged.0);
        // Not for every prompt.
        if us > 1_000_000 {
            let factor = (-(us as f64) / HALF_LIFE_US).exp2();
            self.index.age(factor);
            self.breaks.age(factor);
            self.repeated.age(factor);
            self.lookups.age(factor);
            self.aged = at;
        }
    }
}

fn look(seen: &Receiver<ComparedText>, found: &Mutex<PromptFindings>) {
    let mut drafters = Drafters::default();
    for seen in seen {
        match seen {
            ComparedText::Prompt { tenant, hashes, tokens, cached, at } => {
                found.lock().see(tenant, &hashes, &tokens, cached, at);
            }
            ComparedText::Answer { mut hashes, prompt, answer } => {
                let of_prompt = hashes.iter().count();
                hashes.extend(&[&prompt[..], &answer].concat());
                found.lock().index.computed(hashes.iter().skip(of_prompt));
            }
            ComparedText::Undrafted { prompt, answer } => {
                let outcomes = LookupOutcomes::of(&mut drafters, &prompt, &answer);
                found.lock().lookups.add(&outcomes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use folio_kv::{Identity, Root};

    use super::*;

    #[test]
    fn what_was_asked_for_or_answered_before_would_be_hit() {
        let prompts = Prompts::new();
        let root = Root::derive(&Identity {
            tenant: TenantId(1),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        let ask = |tokens: Vec<u32>, at| {
            let hashes = BlockHashes::new(&root, &tokens, 4);
            prompts.prompt(TenantId(1), hashes.clone(), tokens.into(), 0, Micros(at));
            hashes
        };
        let first: Vec<u32> = (0..21).collect();
        let hashes = ask(first.clone(), 1);
        prompts.answer(hashes, first.into(), (50..60).collect());
        ask([(0..21).collect::<Vec<u32>>(), (50..60).collect(), (90..93).collect()].concat(), 2);
        for _ in 0..1000 {
            std::thread::sleep(std::time::Duration::from_millis(1));
            let (asked, unbounded) =
                prompts.found(Micros(3), |found| (found.index.asked(), found.index.unbounded()));
            if asked == 13.0 {
                // Five of nothing before; then all but the last of eight.
                assert_eq!(unbounded, Some(7.0 / 13.0));
                return;
            }
        }
        panic!("it was not looked at");
    }
}
