//! Verdicts of the safety callout: whom to ask, what is on its way to be judged, and what a verdict puts in a text's place.

use std::sync::Arc;

use folio_api::events::Delta;
use folio_text::OutputEvent;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

use crate::safety::{Callout, CalloutAnswer, Texts};

/// Whom to ask, and where its verdicts come.
pub struct Judge {
    pub callout: Arc<Callout>,
    pub sender: mpsc::UnboundedSender<CalloutVerdict>,
    pub verdicts: mpsc::UnboundedReceiver<CalloutVerdict>,
}

impl Judge {
    pub fn new(callout: Arc<Callout>) -> Self {
        let (sender, verdicts) = mpsc::unbounded_channel();
        Self { callout, sender, verdicts }
    }
}

/// The next verdict; where nobody judges there is none.
pub async fn verdict(judge: &mut Option<Judge>) -> Option<CalloutVerdict> {
    judge.as_mut()?.verdicts.recv().await
}

/// A slot's index, and what was answered or why nothing was.
pub type CalloutVerdict = (usize, Result<CalloutAnswer, &'static str>);

/// A choice's way through the verdicts.
#[derive(Default)]
pub struct JudgedChoice {
    pub held: Delta,
    pub asked: Delta,
    /// What that takes.
    pub asked_bytes: usize,
    pub asking: bool,
    /// Nothing follows what is held.
    pub over: bool,
    /// The end of what was shown, in windows.
    pub before: String,
    pub notes: Map<String, Value>,
}

impl JudgedChoice {
    /// Keeps the last characters that were shown.
    pub fn remember(&mut self, shown: &Delta, overlap: usize) {
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

pub fn characters(delta: &Delta) -> usize {
    let length = |piece: &OutputEvent| match piece {
        OutputEvent::Content(text) | OutputEvent::Reasoning(text) => text.chars().count(),
        OutputEvent::Arguments { text, .. } => text.chars().count(),
        _ => 0,
    };
    delta.pieces.iter().map(length).sum()
}

/// Puts other texts in the place of a delta's. Its tokens are those of the texts before, so they go.
pub fn replace(delta: &mut Delta, texts: &Texts) -> Result<(), &'static str> {
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
pub fn gather(all: &mut Map<String, Value>, notes: Map<String, Value>) {
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
