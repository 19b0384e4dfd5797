//! What a client was sent, held against what it must be sent.
//!
//! Owns: the state of one client. Must never: forgive an event that is late, doubled or of somebody else.

use folio_engine::FinishReason;
use folio_engine::request::{Event, Micros};

use crate::oracle::Expectation;
use crate::scenario::{Behaviour, Client};

/// See the module documentation.
pub(crate) struct ClientStream {
    pub client: Client,
    pub expectation: Option<Expectation>,
    pub events: u32,
    pub buffered: u32,
    pub prompt_seen: bool,
    pub pooled: bool,
    pub tokens: Vec<Vec<(u32, Option<folio_engine::request::TokenLogprobs>)>>,
    pub finished: Vec<Option<FinishReason>>,
    /// The step in which it asked to be cancelled, or was found gone.
    pub left: Option<u64>,
    pub ended_choice: Option<u32>,
    pub deaf: bool,
    /// Its sequences were part of a step that failed.
    pub struck: bool,
    /// Since when it waits for its adapter.
    pub adapter: Option<Micros>,
    /// The weights of its adapter could not be read while it was there.
    pub unread: bool,
}

impl ClientStream {
    /// Whether the client still listens, after an event was put before it.
    pub fn answers(&mut self) -> bool {
        if self.deaf {
            return false;
        }
        self.events += 1;
        self.buffered += 1;
        match self.client.behaviour {
            Behaviour::VanishesAfter(events) => self.events <= events,
            Behaviour::Slow { capacity } => self.buffered <= capacity,
            _ => true,
        }
    }

    /// `unloaded`: its adapter was not loaded, or not in time.
    pub fn take(
        &mut self,
        event: &Event,
        expected: &Expectation,
        now: Micros,
        unloaded: bool,
    ) -> Result<(), String> {
        match event {
            Event::Prompt { cached_tokens, prompt_logprobs, .. } => {
                if std::mem::replace(&mut self.prompt_seen, true) || self.tokens.iter().any(|t| !t.is_empty())
                {
                    return Err("the prompt was reported twice or late".into());
                }
                if *cached_tokens as usize >= self.client.request.prompt.len() {
                    return Err("the whole prompt is said to be cached".into());
                }
                if *prompt_logprobs != expected.prompt_logprobs {
                    return Err(format!("prompt logprobs differ from {:?}", expected.prompt_logprobs));
                }
            }
            Event::Token { choice, token } => {
                let choice = *choice as usize;
                if self.finished[choice].is_some() || !self.prompt_seen {
                    return Err("a token out of turn".into());
                }
                let at = self.tokens[choice].len();
                let want = expected.choices[choice].tokens.get(at);
                if want != Some(&(token.id, token.logprobs.clone())) {
                    return Err(format!("token {at} differs: alone it was {want:?}"));
                }
                self.tokens[choice].push((token.id, token.logprobs.clone()));
            }
            Event::Pooled { vector } => {
                if !self.prompt_seen || std::mem::replace(&mut self.pooled, true) {
                    return Err("a vector twice or before its prompt".into());
                }
                if Some(vector) != expected.pooled.as_ref() {
                    return Err(format!("the vector differs: alone it was {:?}", expected.pooled));
                }
            }
            Event::Finished { choice, reason, stop_token, .. } => {
                let choice = *choice as usize;
                if self.finished[choice].replace(*reason).is_some() {
                    return Err("finished twice".into());
                }
                let fine = unloaded && *reason == FinishReason::Error;
                if !fine {
                    self.check_reason(choice, *reason, *stop_token, expected, now)?;
                }
            }
        }
        Ok(())
    }

    fn check_reason(
        &self,
        choice: usize,
        reason: FinishReason,
        stop_token: Option<u32>,
        expected: &Expectation,
        now: Micros,
    ) -> Result<(), String> {
        let answer = &expected.choices[choice];
        let last = self.tokens[choice].last().map(|(token, _)| *token);
        let fine = match reason {
            FinishReason::Stop | FinishReason::Length => {
                let stop = (reason == FinishReason::Stop).then_some(last).flatten();
                answer.reason == reason
                    && answer.tokens.len() == self.tokens[choice].len()
                    && expected.pooled.is_some() == self.pooled
                    && stop == stop_token
            }
            FinishReason::Cancelled => self.left.is_some() || self.ended_choice == Some(choice as u32),
            FinishReason::Deadline => self.client.request.deadline.is_some_and(|deadline| deadline <= now),
            FinishReason::Error => self.struck || answer.reason == FinishReason::Error,
        };
        if fine {
            Ok(())
        } else {
            Err(format!("finished for the wrong reason; alone it was {:?}", answer.reason))
        }
    }
}
