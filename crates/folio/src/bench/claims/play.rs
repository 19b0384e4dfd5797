//! Requests as a client sends them, and what becomes of each.
//!
//! Owns: when the next one is sent, and when a client has enough. The engine treats them like any others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use folio_engine::{
    CancelFlag, DRAFTS_MAX, Drafter, Event, FinishReason, Request, SamplingParams, Speculation,
};
use folio_kv::{Identity, Root, TenantId};

use crate::bench::stats::Random;
use crate::cli::EngineArgs;
use crate::runtime::{Loaded, Runtime};

/// No answer takes longer.
const PATIENCE: Duration = Duration::from_secs(3600);

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrivals {
    /// All at once.
    Together,
    /// By so many clients, each of which sends its next when it has its answer.
    Clients(usize),
}

/// What is asked for.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub prompt: Arc<[u32]>,
    /// Whose: nothing is shared between two scopes.
    pub scope: u64,
    /// Tokens that the client reads; it says only that it takes up to `max_tokens`.
    pub tokens: u32,
    pub max_tokens: u32,
    /// What the drafter is told to expect; `None`: no drafts.
    pub expected: Option<Vec<u32>>,
}

impl Asked {
    pub fn new(prompt: Vec<u32>, tokens: u32) -> Self {
        Self { prompt: prompt.into(), scope: 0, tokens, max_tokens: tokens, expected: None }
    }
}

/// What became of one.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub tokens: Vec<u32>,
    /// Seconds from sending it to the first token.
    pub ttft_s: f64,
    pub cached_tokens: u32,
}

/// An engine of its own for what is measured.
pub(super) struct Player {
    runtime: Runtime,
    scopes: AtomicU64,
    /// Tells of tokens that nobody has seen.
    random: Random,
}

impl Player {
    pub fn start(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        let loaded = Loaded::open(model, args)?;
        let runtime = Runtime::serving(loaded, args, &folio_server::Declared::default(), None)?;
        Ok(Self { runtime, scopes: AtomicU64::new(1), random: Random::new(1) })
    }

    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// One that no request had before.
    pub fn scope(&self) -> u64 {
        self.scopes.fetch_add(1, Ordering::Relaxed)
    }

    /// Random ones.
    pub fn prompt(&mut self, tokens: u32) -> Vec<u32> {
        let vocab = self.runtime.model.vocab.min(self.runtime.tokenizer.vocab_size()).max(1) as u64;
        (0..tokens).map(|_| self.random.below(vocab) as u32).collect()
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    /// A length of this mean, exponentially distributed, up to `most`.
    pub fn length(&mut self, mean: f64, most: u32) -> u32 {
        (self.random.exponential(1.0 / mean).ceil() as u32).clamp(1, most)
    }

    pub fn ask(&self, asked: Asked) -> Result<Told> {
        Ok(self.play(vec![asked], Arrivals::Together)?.0.pop().unwrap_or_default())
    }

    /// What became of all, and the seconds that they took together.
    pub fn play(&self, asked: Vec<Asked>, arrivals: Arrivals) -> Result<(Vec<Told>, f64)> {
        let (sender, events) = mpsc::channel();
        let started = Instant::now();
        let mut told: Vec<Told> = asked.iter().map(|_| Told::default()).collect();
        let mut sent: Vec<(Instant, CancelFlag)> = Vec::with_capacity(asked.len());
        let mut running = 0;
        while running > 0 || sent.len() < asked.len() {
            let next = match arrivals {
                Arrivals::Together => true,
                Arrivals::Clients(clients) => running < clients,
            };
            if let Some(next) = asked.get(sent.len()).filter(|_| next) {
                let (index, sender) = (sent.len(), sender.clone());
                let sink = move |event: Event| sender.send((index, Instant::now(), event)).is_ok();
                let at = Instant::now();
                sent.push((at, self.runtime.engine.submit(self.request(next), Box::new(sink))?));
                running += 1;
                continue;
            }
            let (index, at, event) = events.recv_timeout(PATIENCE).context("the engine does not answer")?;
            let (asked, told, (sent_at, cancel)) = (&asked[index], &mut told[index], &sent[index]);
            match event {
                Event::Prompt { cached_tokens, .. } => told.cached_tokens = cached_tokens,
                Event::Pooled { .. } => {}
                Event::Token { token, .. } => {
                    if told.tokens.is_empty() {
                        told.ttft_s = at.duration_since(*sent_at).as_secs_f64();
                    }
                    told.tokens.push(token.id);
                    if told.tokens.len() as u32 == asked.tokens && asked.tokens < asked.max_tokens {
                        cancel.cancel();
                    }
                }
                Event::Finished { reason: FinishReason::Length | FinishReason::Cancelled, .. } => {
                    running -= 1
                }
                Event::Finished { reason, error, .. } => {
                    bail!("a sequence ended with {reason:?}: {}", error.as_deref().unwrap_or("no message"))
                }
            }
        }
        Ok((told, started.elapsed().as_secs_f64()))
    }

    fn request(&self, asked: &Asked) -> Request {
        let root = Root::derive(&Identity {
            tenant: TenantId(0),
            tenant_secret: &[0; 32],
            model_digest: &self.runtime.model.digest,
            layout_digest: &self.runtime.layout_digest,
            extra: &asked.scope.to_le_bytes(),
        });
        let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::greedy(asked.max_tokens) };
        let speculation = asked
            .expected
            .as_ref()
            .map(|expected| Speculation::new(Drafter::Suffix, DRAFTS_MAX, &asked.prompt, expected));
        let id = self.runtime.engine.next_request_id();
        Request { speculation, ..Request::new(id, TenantId(0), root, asked.prompt.clone(), sampling) }
    }
}
