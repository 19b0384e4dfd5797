//! Requests that come to the engine in this process at their times, and when their tokens came.
//!
//! Owns: a thread's sleep until the next arrival. What is late to be sent counts from when it should have been. Nobody is woken for a token,
//! for that would be time of the engine's processors: each request keeps its times, and hands them over at its end.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use folio_engine::{Event, FinishReason, Request, SamplingParams};
use folio_kv::TenantId;

use crate::runtime::Runtime;
use crate::session;

/// Between the ends of two requests.
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
    let (sender, ended) = mpsc::channel();
    let start = Instant::now();
    let root = session::local_root(runtime, &[]);
    for (index, arrival) in arrivals.iter().enumerate() {
        std::thread::sleep((start + arrival.at).saturating_duration_since(Instant::now()));
        let sender = sender.clone();
        let mut answered =
            Answered { tokens: Vec::with_capacity(arrival.output as usize), ..Answered::default() };
        let sink = move |event: Event| {
            let end = match event {
                Event::Prompt { cached_tokens, .. } => {
                    answered.cached_tokens = cached_tokens;
                    return true;
                }
                Event::Pooled { .. } => return true,
                Event::Token { .. } => {
                    answered.tokens.push(start.elapsed());
                    return true;
                }
                Event::Finished { reason: FinishReason::Length, .. } => Ok(std::mem::take(&mut answered)),
                Event::Finished { reason, error, .. } => Err((reason, error)),
            };
            sender.send((index, end)).is_ok()
        };
        let (id, sampling) = (runtime.engine.next_request_id(), SamplingParams::greedy(arrival.output));
        let request = Request::new(id, TenantId(0), root, arrival.prompt.clone(), sampling);
        runtime.engine.submit(request, Box::new(sink))?;
    }
    drop(sender);
    let mut answers = vec![Answered::default(); arrivals.len()];
    for _ in arrivals {
        let (index, end) = ended.recv_timeout(PATIENCE).context("the engine does not answer")?;
        match end {
            Ok(answered) => answers[index] = answered,
            Err((reason, error)) => {
                bail!("a sequence ended with {reason:?}: {}", error.as_deref().unwrap_or("no message"))
            }
        }
    }
    Ok(answers)
}
