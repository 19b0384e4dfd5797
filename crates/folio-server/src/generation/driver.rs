//! Follows the events of one job, and has its answer written.
//!
//! At the engine's pace, whatever the client does, so stop strings are found when they happen and figures are counted once; tokens that
//! nothing waits for come several at a time. Invariants:
//! every choice ends exactly once for the client; figures are counted before the response that reports them is sent; the task lives until
//! the engine has ended every choice.

mod judge;
mod response;
mod verdict;

use std::sync::Arc;
use std::time::Instant;

use folio_api::ApiError;
use folio_api::events::{Delta, PromptReport, Scored};
use folio_engine::request::{Timing, Token, TokenLogprobs};
use folio_engine::{Event, FinishReason};
use folio_text::work::giving_way;
use folio_text::{DetokenizeOptions, Detokenizer, work};
use tokio::sync::mpsc;

use crate::arrival::Flight;
use crate::decoding::choice::told;
use crate::generation::Generator;
use crate::generation::retention::refused;
use crate::tenancy::gate::Permit;
use crate::tenancy::unread::{event_bytes, gathered_bytes, gathered_vector_bytes};
pub(crate) use response::Whole;
pub(super) use response::{Output, ResponseDriver};

/// Bytes of an answer that are worked on at once, on the event loop.
pub(crate) const AT_ONCE_BYTES: usize = 64 << 10;
/// Events that wait, and bytes of them, after which others have a turn: a step may bring one for each of hundreds of choices.
const TURN_EVENTS: usize = 8;
const TURN_BYTES: usize = 16 << 10;
/// Of a token's id in JSON.
const ID_BYTES: usize = 8;

/// An event that the engine delivered.
#[derive(Clone)]
pub(super) struct Delivered {
    pub prompt: usize,
    pub event: Event,
    pub at: Instant,
}

impl ResponseDriver {
    pub(super) async fn follow(mut self, mut events: mpsc::UnboundedReceiver<Delivered>, flight: Flight) {
        self.refuse_denied();
        let (mut turn_events, mut turn_bytes) = (0, 0);
        loop {
            let is_over = turn_events >= TURN_EVENTS || turn_bytes >= TURN_BYTES;
            if is_over && !events.is_empty() {
                tokio::task::yield_now().await;
            }
            if is_over || events.is_empty() {
                (turn_events, turn_bytes) = (0, 0);
            }
            if !self.delivery.answered && self.slots.iter().all(|slot| slot.done) {
                let bytes = match self.delivery.output {
                    Output::Whole(_) => self.delivery.memory.gathered,
                    Output::Stream(_) => self.job.writer.owes(),
                };
                let bytes = bytes + self.job.writer.repeats();
                let Some(answered) = self.off_loop(bytes, ResponseDriver::answer).await else { return };
                self = answered;
            }
            let running = self.slots.iter().any(|slot| !slot.ended);
            let judging = self.slots.iter().any(|slot| slot.judged.asking);
            tokio::select! {
                event = events.recv(), if running => match event {
                    Some(Delivered { prompt, event, at }) => {
                        let bytes = event_bytes(&event);
                        self.delivery.memory.unread.release(bytes);
                        let bytes = bytes + self.opening_bytes(prompt, &event);
                        (turn_events, turn_bytes) = (turn_events + 1, turn_bytes + bytes);
                        let Some(done) = self.off_loop(bytes, move |driver| driver.event(prompt, event, at)).await else { return };
                        self = done;
                    }
                    None => {
                        self.slots.iter_mut().for_each(|slot| (slot.done, slot.ended) = (true, true));
                        self.delivery.fail(ApiError::internal("the engine stopped before the request was finished"));
                    }
                },
                Some((index, verdict)) = verdict::verdict(&mut self.judge), if judging => self.judged(index, verdict),
                else => break,
            }
            self.count_gathered();
            let Some(written) = self.catch_up().await else { return };
            self = written;
        }
        self.delivery.abort.finished();
        self.accounting.settle();
        if !self.delivery.failed {
            let overhead = self.job.arrived.elapsed().saturating_sub(self.accounting.in_engine.took());
            self.metrics().overhead(overhead);
        }
        self.audit(&flight);
        drop(flight);
    }

    /// Does work on about so many bytes: at once where they are few, else on a text thread, when it is the tenant's turn. `None`: it
    /// failed, and the request with it.
    async fn off_loop(mut self, bytes: usize, work: impl FnOnce(&mut Self) + Send + 'static) -> Option<Self> {
        if bytes <= AT_ONCE_BYTES {
            work::add(bytes);
            work(&mut self);
            return Some(self);
        }
        let (generator, abort) = (self.generator.clone(), self.delivery.abort.clone());
        let tenant = self.tenant.id;
        let work = move || {
            giving_way(|| work(&mut self));
            self
        };
        let worked = generator.load.text.finish(tenant, bytes, work).await;
        if worked.is_err() {
            generator.observability.metrics.panicked();
            abort.cancel();
        }
        worked.ok()
    }

    /// Writes what the writer put off, or why the stream ends.
    async fn catch_up(self) -> Option<Self> {
        let writer = &self.job.writer;
        match (&self.delivery.refusal, writer.owes()) {
            (None, 0) => Some(self),
            (None, owed) => {
                let write = |driver: &mut Self| {
                    if let Output::Stream(events) = &driver.delivery.output {
                        driver.job.writer.catch_up(events);
                    }
                };
                self.off_loop(owed, write).await
            }
            (Some(_), _) => {
                let bytes = writer.repeats();
                self.off_loop(bytes, Self::tell_refusal).await
            }
        }
    }

    /// Bytes that are shown before a prompt's answers: of each what its opening repeats of the request and what it shows of the prompt, and
    /// that once more, where it is decoded token by token.
    fn opening_bytes(&self, prompt: usize, event: &Event) -> usize {
        let Event::Prompt { prompt_logprobs, .. } = event else { return 0 };
        let job = &self.job.prompts[prompt];
        let decoded = if job.echo_logprobs { job.tokens.len() * gathered_bytes(None) } else { 0 };
        let of_each = self.job.writer.repeats() + self.shown_of_prompt(prompt, prompt_logprobs);
        decoded + of_each.saturating_mul(self.job.generation.n as usize)
    }

    /// Bytes that each of a prompt's answers shows of it: its scores, its ids, and its text, as it is and as JSON.
    fn shown_of_prompt(&self, prompt: usize, logprobs: &[TokenLogprobs]) -> usize {
        let job = &self.job.prompts[prompt];
        let scores: usize = logprobs.iter().map(|entry| gathered_bytes(Some(entry))).sum();
        let ids = if self.job.generation.return_token_ids { ID_BYTES * job.tokens.len() } else { 0 };
        scores + ids + 2 * job.echo.as_ref().map_or(0, String::len)
    }

    fn event(&mut self, prompt: usize, event: Event, at: Instant) {
        match event {
            Event::Prompt { cached_tokens, us, cached_us, prompt_logprobs, kept } => {
                // Before anything of the answer is shown; the figures are counted all the same.
                if let Some(Err(reason)) = kept.as_deref() {
                    self.delivery.fail(refused(reason, "cache.pin", "cache.pin"));
                }
                self.accounting.record.prompt(
                    prompt,
                    &self.job.prompts[prompt].tokens,
                    cached_tokens,
                    (us, cached_us),
                );
                self.accounting.usage.times.prompt = at - self.job.arrived;
                self.prompt_done(prompt, cached_tokens, prompt_logprobs);
            }
            Event::Token { choice, token } => {
                let index = self.index(prompt, choice);
                self.accounting.record.token(index, token.id, token.us);
                self.token(index, token, at);
            }
            Event::Pooled { vector } => {
                let index = self.index(prompt, 0);
                self.delivery.memory.gathered += gathered_vector_bytes(&vector);
                self.slots[index].whole.vector = vector;
            }
            Event::Finished { choice, reason, stop_token, error, timing } => {
                let index = self.index(prompt, choice);
                self.slots[index].ended = true;
                let slot = &self.slots[index];
                let produced = slot.choice.tokens > 0 || !slot.whole.vector.is_empty();
                // It also queues until the step under way ends and the engine takes it up.
                let timing = Timing { arrived: self.accounting.in_engine.submitted, ..*timing };
                self.metrics().timing(&timing, produced);
                let of = (prompt, &self.job.prompts[prompt].tokens, index);
                self.accounting.record.finished(of, reason, &timing);
                self.predicted(prompt, &timing);
                self.accounting.in_engine.finished = self.accounting.in_engine.finished.max(timing.finished);
                self.ended(index, reason, stop_token, error);
            }
        }
    }

    /// Drafts of a choice that ended, for who asked for some: how many are verified depends on what else runs.
    fn predicted(&mut self, prompt: usize, timing: &Timing) {
        if timing.draft_tokens > 0 && self.job.generation.speculation.wants_drafts() {
            let predicted = self.accounting.usage.predicted.get_or_insert_default();
            let speculation = self.job.prompts[prompt].speculation.as_ref();
            predicted.drafter = speculation.map_or("", |speculation| speculation.drafter().name());
            predicted.steps += u64::from(timing.draft_steps);
            predicted.accepted += u64::from(timing.accepted_draft_tokens);
            predicted.rejected += u64::from(timing.draft_tokens - timing.accepted_draft_tokens);
        }
    }

    /// The prompt was computed: its figures are final and its choices begin.
    fn prompt_done(&mut self, prompt: usize, cached: u32, logprobs: Vec<TokenLogprobs>) {
        let job = &self.job.prompts[prompt];
        let tokens = job.tokens.len() as u64;
        self.accounting.usage.prompt_tokens += tokens;
        self.accounting.usage.cached_tokens += u64::from(cached);
        self.metrics().prompt(tokens, u64::from(cached));
        self.accounting.meter.prompt(tokens, cached.into());
        self.accounting.ticket.iter_mut().for_each(Permit::started);
        let Generator { tenancy, served, .. } = &*self.generator;
        if self.job.reads_shared(job) {
            tenancy.shared.served(served, &job.tokens, cached);
        }
        if let Some(key) = &self.job.generation.cache.key {
            tenancy.cache_keys.count(self.tenant.id, key, tokens, cached.into());
        }
        let wanted = self.job.generation.prompt_logprobs.is_some() && !job.echo_logprobs;
        // Every choice shows them.
        let shown = self.shown_of_prompt(prompt, &logprobs);
        self.delivery.memory.gathered += shown.saturating_mul(self.job.generation.n as usize);
        self.count_gathered();
        if self.delivery.failed {
            return;
        }
        let job = &self.job.prompts[prompt];
        let echo = self.echo(prompt, &logprobs);
        let report = PromptReport {
            tokens: job.tokens.clone(),
            logprobs: wanted.then(|| logprobs.into_iter().map(told).collect()),
        };
        let n = self.job.generation.n as usize;
        for index in prompt * n..(prompt + 1) * n {
            self.open(index, &report);
            if let Some((echo, characters)) = &echo {
                self.slots[index].hidden += shown;
                match self.slots[index].choice.echo(echo, *characters) {
                    Some(_) => self.stop(index),
                    None => self.flush(index),
                }
            }
        }
        if echo.is_none() && matches!(self.delivery.output, Output::Stream(_)) {
            // Its frames are counted by themselves.
            self.delivery.memory.gathered =
                self.delivery.memory.gathered.saturating_sub(shown.saturating_mul(n));
        }
        self.reports[prompt] = Some(report);
    }

    /// A choice ended before the engine knows.
    fn stop(&mut self, index: usize) {
        self.cancel(index);
        self.complete(index);
    }

    /// What `echo` puts before the generated text, and its length in characters.
    fn echo(&self, prompt: usize, logprobs: &[TokenLogprobs]) -> Option<(Delta, usize)> {
        let job = &self.job.prompts[prompt];
        let text = job.echo.clone()?;
        let mut scored = Vec::new();
        if job.echo_logprobs {
            let tokenizer = &self.generator.served.tokenizer;
            let skip_special_tokens = self.job.generation.skip_special_tokens;
            let mut detokenizer =
                Detokenizer::new(DetokenizeOptions { skip_special_tokens, continues: false });
            let mut before = String::new();
            let (mut at, mut offset) = (0, 0);
            for (position, id) in job.tokens.iter().enumerate() {
                // Rank 0 marks the first token, which nothing predicts.
                let logprobs = match position.checked_sub(1) {
                    Some(entry) => logprobs.get(entry).cloned().unwrap_or_default(),
                    None => Default::default(),
                };
                scored.push(Scored { id: *id, logprobs: told(logprobs), offset });
                before.clear();
                // A special token is in the text only where the client wrote it there.
                let written = text
                    .get(at..)
                    .is_some_and(|rest| rest.as_bytes().starts_with(tokenizer.token_bytes(*id)));
                match tokenizer.is_special(*id) && written {
                    true => before.push_str(&String::from_utf8_lossy(tokenizer.token_bytes(*id))),
                    false => detokenizer.push(tokenizer, *id, &mut before),
                }
                at += before.len();
                offset += before.chars().count();
            }
        }
        let characters = text.chars().count();
        Some((Delta { scored, ..Delta::text(text) }, characters))
    }

    fn token(&mut self, index: usize, token: Token, at: Instant) {
        let metrics = &self.generator.observability.metrics;
        let slot = &mut self.slots[index];
        if slot.done || slot.judged.over || self.delivery.failed {
            return;
        }
        match slot.last_token.replace(at) {
            Some(last) => metrics.inter_token(at - last),
            None => {
                slot.first_token = Some(at);
                metrics.first_token(at - self.job.arrived);
                self.accounting.record.first_token(at - self.job.arrived);
            }
        }
        let bytes = gathered_bytes(token.logprobs.as_ref());
        slot.hidden += bytes;
        self.delivery.memory.gathered += bytes;
        let (before, thought) = (slot.choice.tokens, slot.choice.reasoning_tokens);
        let stopped = slot.choice.push(token);
        let counted = u64::from(slot.choice.tokens - before);
        if let Some(tokens) = &mut self.accounting.usage.reasoning_tokens {
            *tokens += u64::from(slot.choice.reasoning_tokens - thought);
        }
        self.accounting.usage.completion_tokens += counted;
        self.accounting.usage.times.answer =
            (at - self.job.arrived).saturating_sub(self.accounting.usage.times.prompt);
        metrics.generated(counted);
        self.accounting.meter.generated(counted);
        match stopped {
            Some(_) => self.stop(index),
            None => self.flush(index),
        }
    }

    /// The engine ended a choice.
    fn ended(
        &mut self,
        index: usize,
        reason: FinishReason,
        stop_token: Option<u32>,
        error: Option<Arc<str>>,
    ) {
        if self.slots[index].done || self.slots[index].judged.over {
            return;
        }
        let reason = match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled | FinishReason::Deadline | FinishReason::Error => {
                self.slots[index].done = true;
                self.count(index, if reason == FinishReason::Cancelled { "abort" } else { "error" });
                let message = error.as_deref().unwrap_or("the request was cancelled by the server");
                return match reason {
                    FinishReason::Deadline => self.delivery.fail(ApiError::deadline()),
                    _ if self.generator.load.is_draining() => {
                        self.delivery.fail(ApiError::unavailable("the server is shutting down", 5));
                    }
                    _ => self.delivery.fail(ApiError::internal(message)),
                };
            }
        };
        self.slots[index].choice.end(reason, stop_token);
        self.complete(index);
    }
}
