//! Where an answer is in its grammar: what was said, and so what may come next.
//!
//! Owns: where in an answer its grammar begins (behind reasoning, or at a call). Cost of a token: its text, once; of a mask: the grammar
//! library's, where the grammar binds.

use std::collections::VecDeque;
use std::sync::Arc;

use folio_text::{CallPlace, Grammar, Matcher, Tokenizer};

/// Bytes of an answer that are looked for ahead of the model; each look counts as one more. Who cuts a text again and again in another way
/// than its tokenizer is not looked ahead for any more.
const FORCED_MAX: usize = 16 << 10;

/// Where in an answer its grammar begins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Begin {
    /// Texts that come before it, one after the other; none: it begins at once.
    pub after: Vec<&'static str>,
    /// An answer that should begin at once may begin with this token instead, and then the grammar begins behind the text.
    pub unless: Option<(u32, &'static str)>,
}

/// What a grammar is a grammar of.
#[derive(Clone)]
pub enum Form {
    /// The whole answer.
    Answer(Arc<Grammar>),
    /// Its beginning; behind that anything may come.
    Opening(Arc<Grammar>),
    /// Tool calls, of which an answer may have any number.
    Calls {
        place: CallPlace,
        grammar: Arc<Grammar>,
        /// For the call that the prompt begins, if it does.
        begun: Option<Arc<Grammar>>,
    },
}

/// Where an answer is in its grammar.
pub struct Follower {
    phase: FollowerPhase,
    form: Form,
    tokenizer: Arc<Tokenizer>,
    ends: Arc<[u32]>,
    unless: Option<(u32, &'static str)>,
    /// Tokens that were chosen and are being told.
    pub told: Vec<u32>,
    /// Bytes that may still be found to be forced.
    forcible: usize,
    /// Whether all that was found to come next begins with the same byte: where it does not, nothing is forced.
    alike: bool,
}

enum FollowerPhase {
    /// Anything but an end may come until these texts have been said, one after the other.
    Free {
        until: VecDeque<&'static str>,
        said: Vec<u8>,
    },
    /// Anything may come until a call is begun.
    Watching {
        said: Vec<u8>,
        at_start: bool,
    },
    Bound(Box<Matcher>),
    /// Anything may come.
    Done,
}

impl Follower {
    pub fn new(form: &Form, begin: &Begin, tokenizer: &Arc<Tokenizer>, ends: &Arc<[u32]>) -> Self {
        let Begin { after, unless } = begin;
        let phase = match (form, after.is_empty()) {
            (Form::Calls { begun: Some(grammar), .. }, _) => {
                FollowerPhase::Bound(Box::new(grammar.matcher()))
            }
            (_, false) => FollowerPhase::Free { until: after.iter().copied().collect(), said: Vec::new() },
            (form, true) => form.phase(),
        };
        Self {
            phase,
            form: form.clone(),
            tokenizer: tokenizer.clone(),
            ends: ends.clone(),
            unless: *unless,
            told: Vec::new(),
            forcible: FORCED_MAX,
            alike: false,
        }
    }

    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        if let Some((opening, close)) = self.unless.take()
            && token == opening
        {
            self.phase = FollowerPhase::Free { until: [close].into(), said: Vec::new() };
            return Ok(());
        }
        match &mut self.phase {
            FollowerPhase::Bound(matcher) => {
                matcher.accept(token).map_err(|e| e.to_string())?;
                self.go_on();
                Ok(())
            }
            FollowerPhase::Free { until, said } => {
                said.extend_from_slice(self.tokenizer.token_bytes(token));
                while let Some(text) = until.front() {
                    match behind(said, text) {
                        Some(rest) => {
                            *said = rest;
                            until.pop_front();
                        }
                        None => return Ok(()),
                    }
                }
                let rest = std::mem::take(said);
                self.phase = self.form.phase();
                // Space between the reasoning and the answer is nobody's.
                match rest.trim_ascii_start() {
                    [] => Ok(()),
                    rest => self.said(rest),
                }
            }
            FollowerPhase::Watching { .. } => {
                let tokenizer = self.tokenizer.clone();
                self.said(tokenizer.token_bytes(token))
            }
            FollowerPhase::Done => Ok(()),
        }
    }

    /// `text` was said where the form has its say.
    fn said(&mut self, text: &[u8]) -> Result<(), String> {
        let begin = |grammar: &Grammar, text: &[u8]| {
            let mut matcher = Box::new(grammar.matcher());
            match matcher.begin(text) {
                true => Ok(FollowerPhase::Bound(matcher)),
                false => Err("the model wrote on where its answer's form allows something else".to_owned()),
            }
        };
        match (&self.form, &mut self.phase) {
            (Form::Answer(grammar) | Form::Opening(grammar), FollowerPhase::Bound(_)) => {
                self.phase = begin(grammar, text)?
            }
            (
                Form::Calls { place: CallPlace { trigger, .. }, grammar, .. },
                FollowerPhase::Watching { said, at_start },
            ) => {
                said.extend_from_slice(text);
                if *at_start {
                    let start = said.trim_ascii_start();
                    let common = start.len().min(trigger.len());
                    if start[..common] != trigger.as_bytes()[..common] {
                        self.phase = FollowerPhase::Done;
                    } else if common == trigger.len() {
                        self.phase = begin(grammar, &start[common..])?;
                    }
                } else if let Some(rest) = behind(said, trigger) {
                    self.phase = begin(grammar, &rest)?;
                }
            }
            _ => {}
        }
        self.go_on();
        Ok(())
    }

    /// What is over is left, where something may follow.
    fn go_on(&mut self) {
        let FollowerPhase::Bound(matcher) = &self.phase else { return };
        match self.form {
            Form::Opening(_) if matcher.is_over() => self.phase = FollowerPhase::Done,
            Form::Calls { place, .. } if place.again && matcher.is_over() => self.phase = self.form.phase(),
            _ => {}
        }
    }

    /// A follower of the same answer, which may be told what may come next and is then given back.
    pub fn ahead(&mut self) -> Self {
        let phase = match &mut self.phase {
            FollowerPhase::Free { until, said } => {
                FollowerPhase::Free { until: until.clone(), said: said.clone() }
            }
            FollowerPhase::Watching { said, at_start } => {
                FollowerPhase::Watching { said: said.clone(), at_start: *at_start }
            }
            FollowerPhase::Bound(matcher) => FollowerPhase::Bound(matcher.ahead()),
            FollowerPhase::Done => FollowerPhase::Done,
        };
        Self {
            phase,
            form: self.form.clone(),
            tokenizer: self.tokenizer.clone(),
            ends: self.ends.clone(),
            unless: self.unless,
            told: Vec::new(),
            forcible: self.forcible,
            alike: self.alike,
        }
    }

    /// Takes back what `ahead` was told, so that it need not be made anew the next time.
    pub fn give_back(&mut self, ahead: Self) {
        if let (FollowerPhase::Bound(matcher), FollowerPhase::Bound(ahead)) = (&mut self.phase, ahead.phase) {
            matcher.give_back(ahead);
        }
    }

    /// What must come next, if anything must: behind what was looked at last. Asked of the grammar only where something may be forced.
    pub fn forced(&mut self) -> Vec<u32> {
        let FollowerPhase::Bound(matcher) = &mut self.phase else { return Vec::new() };
        if self.forcible == 0 || self.unless.is_some() {
            return Vec::new();
        }
        let text = if self.alike { matcher.forced() } else { Vec::new() };
        self.forcible = self.forcible.saturating_sub(1 + text.len());
        cut(&self.tokenizer, &text)
    }

    /// Computes what may come next, one bit per token.
    pub fn look(&mut self, allowed: &mut Vec<u32>) -> Result<(), String> {
        if let FollowerPhase::Bound(matcher) = &mut self.phase {
            matcher.allowed(allowed).map_err(|e| e.to_string())?;
            self.alike = begin_alike(&self.tokenizer, allowed);
            if let Some((opening, _)) = self.unless {
                allowed[opening as usize / 32] |= 1 << (opening % 32);
            }
            return Ok(());
        }
        allowed.clear();
        allowed.resize(self.tokenizer.vocab_size().div_ceil(32), u32::MAX);
        if let FollowerPhase::Free { .. } = self.phase {
            for end in self.ends.iter() {
                if let Some(word) = allowed.get_mut(*end as usize / 32) {
                    *word &= !(1 << (end % 32));
                }
            }
        }
        Ok(())
    }
}

impl Form {
    /// Where it has its say from here on.
    fn phase(&self) -> FollowerPhase {
        match self {
            Self::Answer(grammar) | Self::Opening(grammar) => {
                FollowerPhase::Bound(Box::new(grammar.matcher()))
            }
            Self::Calls { place, .. } => {
                FollowerPhase::Watching { said: Vec::new(), at_start: place.at_start }
            }
        }
    }
}

/// Whether all tokens of a mask begin with the same byte. It reads as far as the first that does not.
fn begin_alike(tokenizer: &Tokenizer, allowed: &[u32]) -> bool {
    let words = allowed.iter().enumerate().filter(|(_, word)| **word != 0);
    let ids = words.flat_map(|(at, word)| {
        (0..32u32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at as u32 * 32 + bit)
    });
    let mut first = ids.map(|id| tokenizer.token_bytes(id).first());
    let Some(one) = first.next() else { return false };
    first.all(|other| other == one)
}

/// A text within an answer as the tokenizer cuts it, where that says the text and nothing else.
fn cut(tokenizer: &Tokenizer, text: &[u8]) -> Vec<u32> {
    let text = std::str::from_utf8(text).unwrap_or_default();
    let tokens = tokenizer.encode(text, false, FORCED_MAX).unwrap_or_default();
    let said = tokens.iter().flat_map(|token| tokenizer.token_bytes(*token));
    if said.eq(text.as_bytes()) { tokens } else { Vec::new() }
}

/// What comes behind `text` in `said`. `None`: it was not said yet; what cannot be its beginning is forgotten.
fn behind(said: &mut Vec<u8>, text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    let found = said.windows(text.len()).position(|window| window == text);
    if found.is_none() {
        said.drain(..(said.len() + 1).saturating_sub(text.len()));
    }
    found.map(|at| said[at + text.len()..].to_vec())
}
