//! One answer on its way: its choices, what of them was shown and counted, and where it goes.
//!
//! Invariants: every choice ends exactly once for the client, and is counted before the response that reports it is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_api::ApiError;
use folio_api::events::{Delta, Finished, PromptReport, Usage};
use folio_engine::Micros;
use folio_text::{StopMatcher, work};
use serde_json::json;
use tokio::sync::oneshot;

use super::verdict::{Judge, JudgedChoice};
use crate::arrival::Flight;
use crate::decoding::choice::Choice;
use crate::decoding::reading::Reading;
use crate::generation::Generator;
use crate::generation::job::Job;
use crate::http::stream::{Abort, Events};
use crate::observability::metrics::{FinishedChoice, FinishedPrompt, Metrics};
use crate::observability::usage::UsageMeter;
use crate::observability::why::RequestRecord;
use crate::tenancy::gate::Permit;
use crate::tenancy::tenant::Tenant;
use crate::tenancy::unread::Unread;

/// Where an answer goes.
pub enum Output {
    Stream(Events),
    Whole(Option<oneshot::Sender<Result<Whole, ApiError>>>),
}

/// An answer that counts as unread until its last byte is on its way.
pub struct Whole {
    pub json: String,
    _unread: Vec<Arc<Unread>>,
}

impl Whole {
    /// One answer of several, between a beginning and an end. O(bytes).
    pub fn joined(start: &str, parts: Vec<Whole>, end: &str) -> Self {
        let bytes = parts.iter().map(|part| part.json.len() + 1).sum::<usize>();
        let (mut json, mut unread) = (String::with_capacity(start.len() + bytes + end.len()), Vec::new());
        json.push_str(start);
        for (number, part) in parts.into_iter().enumerate() {
            json.extend((number > 0).then_some(','));
            json.push_str(&part.json);
            unread.extend(part._unread);
        }
        json.push_str(end);
        work::add(json.len());
        Self { json, _unread: unread }
    }
}

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        self.json.as_bytes()
    }
}

/// One choice of one prompt.
pub struct Slot {
    pub choice: Choice,
    /// Text and tokens of a response that is not streamed.
    pub whole: Delta,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
    /// Bytes gathered of what was not shown yet.
    pub hidden: usize,
    /// Over for the client.
    pub done: bool,
    /// Over for the engine.
    pub ended: bool,
    pub judged: JudgedChoice,
}

/// When the prompts were handed to the engine, and when it ended the last choice, by its clock.
pub struct InEngine {
    pub submitted: Micros,
    pub finished: Micros,
}

impl InEngine {
    pub fn took(&self) -> Duration {
        Duration::from_micros(self.finished.0.saturating_sub(self.submitted.0))
    }
}

/// Bytes that an answer takes until its client has accepted them.
pub struct Memory {
    pub unread: Arc<Unread>,
    /// Those that are gathered here, of which `unread` knows so far.
    pub gathered: usize,
    pub counted: usize,
}

impl Memory {
    /// Tells `unread` what is gathered. False: that, or what the client did not accept, is too much.
    pub fn count(&mut self) -> bool {
        let (before, now) = (std::mem::replace(&mut self.counted, self.gathered), self.gathered);
        if now > before {
            self.unread.hold(now - before);
        } else {
            self.unread.release(before - now);
        }
        !self.unread.is_over()
    }

    /// Nothing is gathered any more.
    pub fn clear(&mut self) {
        self.unread.release(std::mem::take(&mut self.counted));
        self.gathered = 0;
    }
}

/// What is counted of a request, and against whose limits.
pub struct Accounting {
    /// Of the tenant that asked.
    pub meter: Arc<UsageMeter>,
    pub record: RequestRecord,
    /// Until the end.
    pub ticket: Option<Permit>,
    pub usage: Usage,
    pub in_engine: InEngine,
}

impl Accounting {
    /// Every choice has ended: the limits are told what was used.
    pub fn settle(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            ticket.settle(self.usage.prompt_tokens + self.usage.completion_tokens);
        }
    }
}

/// Where an answer goes, and what became of it.
pub struct Delivery {
    pub abort: Abort,
    pub output: Output,
    pub memory: Memory,
    /// There is nothing to answer but an error.
    pub failed: bool,
    /// What a stream is still to be told of that.
    pub refusal: Option<ApiError>,
    /// The response is complete.
    pub answered: bool,
}

impl Delivery {
    /// Ends what still runs, and tells the client, once: one that waits for the whole at once, one of a stream when its turn comes
    /// ([`ResponseDriver::tell_refusal`]), since its last event may repeat much.
    pub fn fail(&mut self, error: ApiError) {
        if std::mem::replace(&mut self.failed, true) {
            return;
        }
        self.abort.cancel();
        match &mut self.output {
            Output::Stream(_) => self.refusal = Some(error),
            Output::Whole(sender) => {
                if let Some(sender) = sender.take() {
                    let _ = sender.send(Err(error));
                }
                self.close();
            }
        }
    }

    /// Ends the response; the task itself goes on until the engine is done.
    pub fn close(&mut self) {
        self.output = Output::Whole(None);
    }
}

/// Follows one job.
pub struct ResponseDriver {
    pub generator: Arc<Generator>,
    pub tenant: Tenant,
    pub job: Job,
    pub accounting: Accounting,
    pub delivery: Delivery,
    /// Prompt-major: choice `c` of prompt `p` is `p * n + c`.
    pub slots: Vec<Slot>,
    pub reports: Vec<Option<PromptReport>>,
    /// Who judges answers, where somebody does.
    pub judge: Option<Judge>,
}

impl ResponseDriver {
    pub fn new(
        generator: Arc<Generator>,
        tenant: Tenant,
        (ticket, submitted, record): (Permit, Micros, RequestRecord),
        job: Job,
        abort: Abort,
        (unread, output): (Arc<Unread>, Output),
    ) -> Self {
        let mut slots = Vec::new();
        let rules = generator.inputs.safety.output().cloned();
        // Made once: of hundreds of choices each would take as much again.
        let matcher = StopMatcher::new(job.generation.stop.iter().cloned(), job.generation.include_stop);
        for prompt in &job.prompts {
            let params = Arc::new(prompt.params.clone());
            for _ in 0..job.generation.n {
                let tokenizer = generator.served.tokenizer.clone();
                let choice = Choice::new(
                    tokenizer,
                    &job.generation,
                    job.reading.as_ref(),
                    (params.clone(), matcher.clone()),
                    rules.as_ref(),
                );
                slots.push(Slot {
                    choice,
                    whole: Delta::default(),
                    first_token: None,
                    last_token: None,
                    hidden: 0,
                    done: false,
                    ended: prompt.screened.denied,
                    judged: JudgedChoice::default(),
                });
            }
        }
        let judge = generator.inputs.safety.judge().cloned();
        let meter = generator.observability.meters.of(&tenant);
        let reports = vec![None; job.prompts.len()];
        let thinks = job.reading.as_ref().is_some_and(Reading::separates_reasoning);
        let usage = Usage { reasoning_tokens: thinks.then_some(0), ..Usage::default() };
        Self {
            generator,
            tenant,
            job,
            accounting: Accounting {
                meter,
                record,
                ticket: Some(ticket),
                usage,
                in_engine: InEngine { submitted, finished: submitted },
            },
            delivery: Delivery {
                abort,
                output,
                memory: Memory { unread, gathered: 0, counted: 0 },
                failed: false,
                refusal: None,
                answered: false,
            },
            slots,
            reports,
            judge: judge.map(Judge::new),
        }
    }

    pub fn metrics(&self) -> &Metrics {
        &self.generator.observability.metrics
    }

    /// Ends the answer where what it takes is too much.
    pub fn count_gathered(&mut self) {
        if self.delivery.memory.count() || self.delivery.failed || self.delivery.answered {
            return;
        }
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            (slot.whole, slot.judged) = (Delta::default(), JudgedChoice::default());
            if !std::mem::replace(&mut slot.done, true) {
                self.count(index, "abort");
            }
        }
        if let Output::Stream(events) = &self.delivery.output {
            events.cut();
        }
        self.delivery.memory.clear();
        self.delivery.fail(self.delivery.memory.unread.refusal());
    }

    /// What was computed for whom, and how it ended.
    pub fn audit(&self, flight: &Flight) {
        let Some(audit) = &self.generator.observability.audit else { return };
        let ends = self.slots.iter().map(|slot| slot.choice.finish().map_or("error", |finish| finish.reason));
        audit.write(
            "generation",
            json!({
                "request_id": flight.request,
                "tenant": &*self.tenant.name,
                "key": &*self.tenant.key,
                "model": self.job.generation.model(self.generator.served.name()),
                "prompts": self.job.prompts.len(),
                "prompt_tokens": self.accounting.usage.prompt_tokens,
                "cached_tokens": self.accounting.usage.cached_tokens,
                "completion_tokens": self.accounting.usage.completion_tokens,
                "finish_reasons": ends.collect::<Vec<_>>(),
                "failed": self.delivery.failed,
                "ms": self.job.arrived.elapsed().as_millis() as u64,
            }),
        );
    }

    pub fn index(&self, prompt: usize, choice: u32) -> usize {
        prompt * self.job.generation.n as usize + choice as usize
    }

    pub fn prompt_of(&self, index: usize) -> usize {
        index / self.job.generation.n as usize
    }

    /// A choice begins.
    pub fn open(&mut self, index: usize, report: &PromptReport) {
        if let Output::Stream(events) = &self.delivery.output {
            self.job.writer.opening(index as u32, report, self.accounting.usage, events);
        }
    }

    pub fn cancel(&mut self, index: usize) {
        let prompt = self.prompt_of(index);
        let choice = index as u32 - (prompt as u32) * self.job.generation.n;
        self.delivery.abort.cancel_choice(prompt, choice);
    }

    /// Counts a choice, and its prompt when this was the last of it.
    pub fn count(&self, index: usize, reason: &'static str) {
        let slot = &self.slots[index];
        let now = Instant::now();
        let decode = slot.first_token.zip(slot.last_token).map(|(first, last)| last - first);
        self.metrics().choice(FinishedChoice {
            reason,
            e2e: now - self.job.arrived,
            tokens: slot.choice.tokens,
            decode,
        });
        let (prompt, n) = (self.prompt_of(index), self.job.generation.n as usize);
        let siblings = &self.slots[prompt * n..(prompt + 1) * n];
        if siblings.iter().all(|slot| slot.done) {
            let job = &self.job.prompts[prompt];
            self.metrics().request(FinishedPrompt {
                prompt_tokens: job.tokens.len(),
                n: self.job.generation.n,
                max_tokens: self.job.generation.max_tokens.unwrap_or(job.params.max_tokens),
                most_generated: siblings.iter().map(|slot| slot.choice.tokens).max().unwrap_or(0),
            });
        }
    }

    pub fn show(&mut self, index: usize, delta: Delta) {
        if self.delivery.failed {
            return;
        }
        let slot = &mut self.slots[index];
        let mut shown = std::mem::take(&mut slot.judged.asked_bytes);
        if self.judge.is_none() || slot.done {
            shown += std::mem::take(&mut slot.hidden);
        }
        match &self.delivery.output {
            Output::Stream(events) => {
                self.delivery.memory.gathered -= shown;
                let finish = slot.done.then(|| slot.choice.finish()).flatten();
                self.job.writer.delta(index as u32, &delta, finish, self.accounting.usage, events);
            }
            Output::Whole(_) => slot.whole.append(delta),
        }
    }

    /// Everybody is done.
    pub fn answer(&mut self) {
        self.delivery.answered = true;
        if self.delivery.failed {
            return;
        }
        self.delivery.abort.finished();
        self.accounting.usage.times.total = self.job.arrived.elapsed();
        match &mut self.delivery.output {
            Output::Stream(events) => self.job.writer.closing(self.accounting.usage, events),
            Output::Whole(sender) => {
                let n = self.job.generation.n as usize;
                let choices = self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
                    Some(Finished {
                        index: index as u32,
                        delta: std::mem::take(&mut slot.whole),
                        finish: slot.choice.finish()?.clone(),
                        prompt: self.reports[index / n].clone(),
                    })
                });
                let json = self.job.writer.whole(&choices.collect::<Vec<_>>(), self.accounting.usage);
                self.delivery.memory.gathered = json.len();
                if let Some(sender) = sender.take() {
                    let _ =
                        sender.send(Ok(Whole { json, _unread: vec![self.delivery.memory.unread.clone()] }));
                }
            }
        }
        self.delivery.close();
    }

    /// Tells a stream why it ends.
    pub fn tell_refusal(&mut self) {
        if let (Some(error), Output::Stream(events)) = (self.delivery.refusal.take(), &self.delivery.output) {
            self.job.writer.failed(&error, events);
        }
        self.delivery.close();
    }
}
