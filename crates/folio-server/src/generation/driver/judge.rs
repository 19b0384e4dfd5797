//! Answers that wait for the safety callout's verdict.
//!
//! Owns: what of a choice is held, what of it was asked about, and what becomes of either. Invariants: nothing of an answer is
//! shown that was not asked about, unless the callout failed and is declared to fail open; a choice has one question on its
//! way at most; its siblings do not wait for it.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::response::ResponseDriver;
use super::verdict::{characters, gather, replace};
use crate::safety::{CalloutAnswer, Mode, question, subject};
use folio_api::events::{CONTENT_FILTER, Delta, PromptReport};

impl ResponseDriver {
    /// Prompts that were denied have answers without text.
    pub(super) fn refuse_denied(&mut self) {
        for index in 0..self.slots.len() {
            let prompt = self.prompt_of(index);
            if self.job.prompts[prompt].screened.denied {
                let report = PromptReport { tokens: Arc::new([]), logprobs: None };
                self.open(index, &report);
                self.reports[prompt] = Some(report);
                self.slots[index].choice.deny();
                self.conclude(index);
            }
        }
    }

    /// Shows what became certain, or holds it for a verdict.
    pub(super) fn flush(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let Some(delta) = slot.choice.take() else { return };
        if self.judge.is_none() {
            return self.show(index, delta);
        }
        slot.judged.held.append(delta);
        self.consider(index);
    }

    /// The choice has its last token.
    pub(super) fn complete(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if slot.choice.finish().is_some_and(|finish| finish.reason == CONTENT_FILTER) {
            // What was not judged is not shown either.
            slot.judged.held = Delta::default();
        } else if self.judge.is_some() {
            slot.judged.over = true;
            let rest = slot.choice.take().unwrap_or_default();
            slot.judged.held.append(rest);
            return self.consider(index);
        }
        self.conclude(index);
    }

    /// Asks, if there is enough to ask about and no question on its way.
    fn consider(&mut self, index: usize) {
        let Some(judge) = &self.judge else { return };
        let (slot, n) = (&mut self.slots[index], self.job.generation.n as usize);
        let judged = &mut slot.judged;
        if judged.asking {
            return;
        }
        let window = match judge.callout.mode {
            Mode::Hold => usize::MAX,
            Mode::Window { characters, .. } => characters,
        };
        if judged.over && judged.held.is_empty() {
            return self.conclude(index);
        }
        if !judged.over && (window == usize::MAX || characters(&judged.held) < window) {
            return;
        }
        judged.asked = std::mem::take(&mut judged.held);
        judged.asking = true;
        judged.asked_bytes += std::mem::take(&mut slot.hidden);
        let reason = slot.choice.finish().map(|finish| finish.reason);
        let mut subject = subject((index % n) as u32, &judged.asked.pieces, reason);
        if window != usize::MAX {
            subject.insert("before".into(), judged.before.as_str().into());
        }
        let question = question(&self.job.asker, "output", subject);
        let (callout, sender) = (judge.callout.clone(), judge.sender.clone());
        tokio::spawn(async move {
            // A driver that ended meanwhile needs no verdict.
            let _ = sender.send((index, callout.ask(question).await));
        });
    }

    /// A verdict came.
    pub(super) fn judged(&mut self, index: usize, verdict: Result<CalloutAnswer, &'static str>) {
        let slot = &mut self.slots[index];
        slot.judged.asking = false;
        let mut asked = std::mem::take(&mut slot.judged.asked);
        if slot.done || self.delivery.failed {
            slot.done = true;
            return;
        }
        let Some(judge) = &self.judge else { return };
        let verdict = verdict.and_then(|answer| {
            let (action, notes) = (answer.action(), answer.notes());
            let texts = answer.of_answer();
            if let Ok(texts) = &texts {
                replace(&mut asked, texts)?;
            }
            Ok((action, notes, texts.is_ok()))
        });
        let (action, allowed) = match verdict {
            Ok((action, notes, allowed)) => {
                if let Some(Value::Object(notes)) = notes {
                    gather(&mut slot.judged.notes, notes);
                }
                (action, allowed)
            }
            Err(reason) => {
                tracing::warn!(reason, "the safety callout judged no answer");
                ("failed", !judge.callout.fails_closed)
            }
        };
        self.generator.observability.metrics.safety("output", "callout", action);
        if !allowed {
            if !slot.judged.over {
                self.cancel(index);
            }
            self.slots[index].judged.held = Delta::default();
            self.slots[index].choice.deny();
            return self.conclude(index);
        }
        if let Mode::Window { overlap, .. } = judge.callout.mode {
            slot.judged.remember(&asked, overlap);
        }
        self.show(index, asked);
        self.consider(index);
    }

    /// A choice is over for the client.
    pub(super) fn conclude(&mut self, index: usize) {
        let input = self.job.prompts[self.prompt_of(index)].screened.notes.clone();
        let slot = &mut self.slots[index];
        slot.done = true;
        let output = std::mem::take(&mut slot.judged.notes);
        let mut notes = Map::new();
        notes.extend(input.map(|input| ("input".to_owned(), input)));
        if !output.is_empty() {
            notes.insert("output".into(), output.into());
        }
        if !notes.is_empty() {
            slot.choice.note(notes.into());
        }
        if let Some(gate) = slot.choice.gate() {
            let metrics = &self.generator.observability.metrics;
            gate.redacted().for_each(|rule| metrics.safety("output", rule, "redact"));
            gate.denied().into_iter().for_each(|rule| metrics.safety("output", rule, "deny"));
        }
        let mut rest = std::mem::take(&mut slot.judged.held);
        rest.append(slot.choice.take().unwrap_or_default());
        let reason = slot.choice.finish().map_or("stop", |finish| finish.reason);
        // For the metrics, whose labels are vLLM's, an end by calls is an end by the model.
        self.count(index, if reason == "tool_calls" { "stop" } else { reason });
        self.show(index, rest);
    }
}
