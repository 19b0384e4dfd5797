//! Requests that come to the engine in this process at their times, and when their tokens came.
//!
//! Owns: a thread's sleep until the next arrival. What is late to be sent counts from when it should have been.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use folio_engine::{Event, FinishReason, Request, SamplingParams};
use folio_kv::TenantId;

use crate::runtime::Runtime;
use crate::session;

/// Between two events of an engine that has something to do.
const PATIENCE: Duration = Duration::from_secs(3600);

/// A prompt, and how many tokens are wanted.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// After the start.
    pub at: Duration,
    pub prompt: Arc<[u32]>,
    pub output: u32,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Answered {
    /// Tokens of the prompt that were found.
    pub cached_tokens: u32,
    /// When each token came, after the start.
    pub tokens: Vec<Duration>,
}

/// Sends all, ascending by time, and waits for the last token. In their order.
pub fn answer(runtime: &Runtime, arrivals: &[Arrival]) -> Result<Vec<Answered>> {
    let (sender, events) = mpsc::channel();
    let start = Instant::now();
    let root = session::local_root(runtime, &[]);
    for (index, arrival) in arrivals.iter().enumerate() {
        std::thread::sleep((start + arrival.at).saturating_duration_since(Instant::now()));
        let sender = sender.clone();
        let sink = move |event: Event| sender.send((index, start.elapsed(), event)).is_ok();
        let (id, sampling) = (runtime.engine.next_request_id(), SamplingParams::greedy(arrival.output));
        let request = Request::new(id, TenantId(0), root, arrival.prompt.clone(), sampling);
        runtime.engine.submit(request, Box::new(sink))?;
    }
    drop(sender);
    let mut answers = vec![Answered::default(); arrivals.len()];
    let mut running = arrivals.len();
    while running > 0 {
        let (index, at, event) = events.recv_timeout(PATIENCE).context("the engine does not answer")?;
        match event {
            Event::Prompt { cached_tokens, .. } => answers[index].cached_tokens = cached_tokens,
            Event::Pooled { .. } => {}
            Event::Token { .. } => answers[index].tokens.push(at),
            Event::Finished { reason: FinishReason::Length, .. } => running -= 1,
            Event::Finished { reason, error, .. } => {
                bail!("a sequence ended with {reason:?}: {}", error.as_deref().unwrap_or("no message"))
            }
        }
    }
    Ok(answers)
}
