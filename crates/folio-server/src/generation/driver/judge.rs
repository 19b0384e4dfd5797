//! Answers that wait for the safety callout's verdict.
//!
//! Owns: what of a choice is held, what of it was asked about, and what becomes of either. Invariants: nothing of an answer is
//! shown that was not asked about, unless the callout failed and is declared to fail open; a choice has one question on its
//! way at most; its siblings do not wait for it.

use std::sync::Arc;

use folio_text::OutputEvent;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

use super::ResponseDriver;
use crate::safety::{Callout, CalloutAnswer, Mode, Texts, question, subject};
use folio_api::events::{CONTENT_FILTER, Delta, PromptReport};

/// Whom to ask, and where its verdicts come.
pub(super) struct Judge {
    callout: Arc<Callout>,
    sender: mpsc::UnboundedSender<Verdict>,
    verdicts: mpsc::UnboundedReceiver<Verdict>,
}

impl Judge {
    pub fn new(callout: Arc<Callout>) -> Self {
        let (sender, verdicts) = mpsc::unbounded_channel();
        Self { callout, sender, verdicts }
    }
}

/// The next verdict; where nobody judges there is none.
pub(super) async fn verdict(judge: &mut Option<Judge>) -> Option<Verdict> {
    judge.as_mut()?.verdicts.recv().await
}

/// A slot's index, and what was answered or why nothing was.
pub(super) type Verdict = (usize, Result<CalloutAnswer, &'static str>);

/// A choice's way through the verdicts.
#[derive(Default)]
pub(super) struct Judged {
    held: Delta,
    asked: Delta,
    /// What that takes.
    pub asked_bytes: usize,
    pub asking: bool,
    /// Nothing follows what is held.
    pub over: bool,
    /// The end of what was shown, in windows.
    before: String,
    notes: Map<String, Value>,
}

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
            // A pump that ended meanwhile needs no verdict.
            let _ = sender.send((index, callout.ask(question).await));
        });
    }

    /// A verdict came.
    pub(super) fn judged(&mut self, index: usize, verdict: Result<CalloutAnswer, &'static str>) {
        let slot = &mut self.slots[index];
        slot.judged.asking = false;
        let mut asked = std::mem::take(&mut slot.judged.asked);
        if slot.done || self.failed {
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

impl Judged {
    /// Keeps the last characters that were shown.
    fn remember(&mut self, shown: &Delta, overlap: usize) {
        for piece in &shown.pieces {
            if let OutputEvent::Content(text) = piece {
                self.before.push_str(text);
            }
        }
        let surplus = self.before.chars().count().saturating_sub(overlap);
        let at = self.before.char_indices().nth(surplus).map_or(self.before.len(), |(at, _)| at);
        self.before.drain(..at);
    }
}

fn characters(delta: &Delta) -> usize {
    let length = |piece: &OutputEvent| match piece {
        OutputEvent::Content(text) | OutputEvent::Reasoning(text) => text.chars().count(),
        OutputEvent::Arguments { text, .. } => text.chars().count(),
        _ => 0,
    };
    delta.pieces.iter().map(length).sum()
}

/// Puts other texts in the place of a delta's. Its tokens are those of the texts before, so they go.
fn replace(delta: &mut Delta, texts: &Texts) -> Result<(), &'static str> {
    if *texts == Texts::default() {
        return Ok(());
    }
    // Calls by their place among those that are asked about.
    let mut calls: Vec<u32> = Vec::new();
    for piece in &delta.pieces {
        if let OutputEvent::CallStarted { index, .. } | OutputEvent::Arguments { index, .. } = piece
            && !calls.contains(index)
        {
            calls.push(*index);
        }
    }
    if texts.arguments.as_ref().is_some_and(|arguments| arguments.len() != calls.len()) {
        return Err("its answer has other calls than it was asked about");
    }
    let mut replaced = Delta::default();
    let (mut text, mut reasoning) = (texts.text.clone(), texts.reasoning.clone());
    let mut arguments = texts.arguments.clone();
    for piece in std::mem::take(&mut delta.pieces) {
        let piece = match piece {
            OutputEvent::Content(_) if texts.text.is_some() => {
                OutputEvent::Content(text.take().unwrap_or_default())
            }
            OutputEvent::Reasoning(_) if texts.reasoning.is_some() => {
                OutputEvent::Reasoning(reasoning.take().unwrap_or_default())
            }
            OutputEvent::Arguments { index, text } => {
                let place = calls.iter().position(|call| *call == index);
                let text = match (&mut arguments, place) {
                    (Some(arguments), Some(place)) => std::mem::take(&mut arguments[place]),
                    _ => text,
                };
                OutputEvent::Arguments { index, text }
            }
            other => other,
        };
        replaced.push(piece);
    }
    // Where there was none before.
    replaced.push(OutputEvent::Reasoning(reasoning.unwrap_or_default()));
    replaced.push(OutputEvent::Content(text.unwrap_or_default()));
    *delta = replaced;
    Ok(())
}

/// What several verdicts say: later annotations in the place of earlier ones of the same name.
fn gather(all: &mut Map<String, Value>, notes: Map<String, Value>) {
    for (key, value) in notes {
        match (all.get_mut(&key), value) {
            (Some(Value::Object(before)), Value::Object(more)) => before.extend(more),
            (_, value) => drop(all.insert(key, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_replaced_where_they_stood() {
        let pieces = vec![
            OutputEvent::Reasoning("r".into()),
            OutputEvent::Content("a".into()),
            OutputEvent::CallStarted { index: 3, id: "i".into(), name: "f".into() },
            OutputEvent::Arguments { index: 3, text: "{}".into() },
            OutputEvent::Content("b".into()),
        ];
        let delta = Delta { pieces, token_ids: vec![1], ..Delta::default() };
        let mut other = delta.clone();
        replace(&mut other, &Texts::default()).unwrap();
        assert_eq!(other, delta);
        let texts = Texts { text: Some("c".into()), arguments: Some(vec!["[]".into()]), reasoning: None };
        replace(&mut other, &texts).unwrap();
        let call = OutputEvent::CallStarted { index: 3, id: "i".into(), name: "f".into() };
        let expected = [
            OutputEvent::Reasoning("r".into()),
            OutputEvent::Content("c".into()),
            call,
            OutputEvent::Arguments { index: 3, text: "[]".into() },
        ];
        assert_eq!((other.pieces.as_slice(), other.token_ids.as_slice()), (&expected[..], &[][..]));
        let texts = Texts { arguments: Some(Vec::new()), ..Texts::default() };
        assert!(replace(&mut delta.clone(), &texts).is_err());
    }
}
