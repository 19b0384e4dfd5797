//! Answers that follow a grammar: from a compiled grammar to the masks the engine's sampler waits for.
//!
//! Owns: the threads that compute masks, and where in an answer its grammar begins (behind reasoning). Must never: make the engine
//! wait for longer than [`PATIENCE`], or let one answer's failure reach another.
//!
//! A [`Follower`] is one answer's state. It is either with a thread, which tells it the last token and computes the next mask
//! while the forward pass runs, or in its [`Cell`], ready for the sampler. A panic or an error of the grammar library puts the
//! reason there instead, and ends that answer alone.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use folio_engine::{Guide, Rules};
use folio_text::{Grammar, Matcher, Place, STACK_BYTES, Tokenizer};

use crate::lock;
use crate::metrics::MaskFigures;

/// Longest the sampler waits for a mask; a mask is bounded by fuel to some 10 ms, so longer means that the machine is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where in an answer its grammar begins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Begin {
    /// Texts that come before it, one after the other; none: it begins at once.
    pub after: Vec<&'static str>,
    /// An answer that should begin at once may begin with this token instead, and then the grammar begins behind the text.
    pub unless: Option<(u32, &'static str)>,
}

/// Threads that compute masks.
pub struct Masks {
    jobs: Mutex<Sender<Job>>,
    figures: Arc<MaskFigures>,
}

struct Job {
    cell: Arc<Cell>,
    follower: Box<Follower>,
    tokens: Tokens,
}

/// What to tell a follower before its next mask.
enum Tokens {
    One(u32),
    Many(Vec<u32>),
}

impl Masks {
    /// `threads` threads; they end with this object.
    pub fn start(threads: usize, figures: Arc<MaskFigures>) -> std::io::Result<Self> {
        let (jobs, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for index in 0..threads.max(1) {
            let (receiver, figures) = (receiver.clone(), figures.clone());
            let thread =
                std::thread::Builder::new().name(format!("folio-masks-{index}")).stack_size(STACK_BYTES);
            thread.spawn(move || work(&receiver, &figures))?;
        }
        Ok(Self { jobs: Mutex::new(jobs), figures })
    }

    fn send(&self, job: Job) {
        let jobs = lock(&self.jobs);
        if let Err(lost) = jobs.send(job) {
            lost.0.cell.put(Err("the threads that follow grammars have ended".into()));
        }
    }
}

fn work(jobs: &Mutex<Receiver<Job>>, figures: &MaskFigures) {
    loop {
        let job = lock(jobs).recv();
        let Ok(Job { cell, mut follower, tokens }) = job else { return };
        let began = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| {
            match &tokens {
                Tokens::One(token) => follower.accept(*token)?,
                Tokens::Many(tokens) => tokens.iter().try_for_each(|token| follower.accept(*token))?,
            }
            follower.look()?;
            Ok::<_, String>(follower)
        }));
        figures.computed(began.elapsed());
        cell.put(result.unwrap_or_else(|_| Err("the grammar library failed".into())));
    }
}

/// What a grammar is a grammar of.
#[derive(Clone)]
pub enum Form {
    /// The whole answer.
    Answer(Arc<Grammar>),
    /// Tool calls, of which an answer may have any number.
    Calls {
        place: Place,
        grammar: Arc<Grammar>,
        /// For the call that the prompt begins, if it does.
        begun: Option<Arc<Grammar>>,
    },
}

/// Rules of one request, for the engine.
pub struct Structured {
    pub form: Form,
    pub begin: Begin,
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens that end an answer; not before the grammar has begun.
    pub ends: Arc<[u32]>,
    pub masks: Arc<Masks>,
}

impl Rules for Structured {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        let cell = Arc::new(Cell { slot: Mutex::new(Slot::Busy), changed: Condvar::new() });
        let follower = Box::new(Follower::new(self));
        self.masks.send(Job { cell: cell.clone(), follower, tokens: Tokens::Many(chosen.to_vec()) });
        Arc::new(Following { cell, masks: self.masks.clone() })
    }
}

struct Following {
    cell: Arc<Cell>,
    masks: Arc<Masks>,
}

/// Where a follower and its mask wait for the sampler.
struct Cell {
    slot: Mutex<Slot>,
    changed: Condvar,
}

enum Slot {
    /// A thread has it.
    Busy,
    Ready(Box<Follower>),
    Failed(String),
}

impl Cell {
    fn put(&self, result: Result<Box<Follower>, String>) {
        let mut slot = lock(&self.slot);
        // Nobody waits any more for what comes too late.
        if matches!(*slot, Slot::Busy) {
            *slot = match result {
                Ok(follower) => Slot::Ready(follower),
                Err(reason) => Slot::Failed(reason),
            };
            self.changed.notify_all();
        }
    }
}

impl Guide for Following {
    fn advance(&self, token: u32) {
        let mut slot = lock(&self.cell.slot);
        match std::mem::replace(&mut *slot, Slot::Busy) {
            Slot::Ready(follower) => {
                drop(slot);
                self.masks.send(Job { cell: self.cell.clone(), follower, tokens: Tokens::One(token) });
            }
            Slot::Busy => *slot = Slot::Failed("a token was chosen before its grammar was asked".into()),
            failed => *slot = failed,
        }
    }

    fn restrict(&self, logits: &mut [f32]) -> Result<(), String> {
        let mut slot = lock(&self.cell.slot);
        if matches!(*slot, Slot::Busy) {
            let began = Instant::now();
            let busy = |slot: &mut Slot| matches!(slot, Slot::Busy);
            let waited = self.cell.changed.wait_timeout_while(slot, PATIENCE, busy);
            slot = waited.unwrap_or_else(PoisonError::into_inner).0;
            self.masks.figures.waited(began.elapsed());
        }
        match &mut *slot {
            Slot::Ready(follower) => follower.restrict(logits),
            Slot::Failed(reason) => return Err(reason.clone()),
            slot => {
                let reason = format!("what the grammar allows was not known within {} s", PATIENCE.as_secs());
                *slot = Slot::Failed(reason.clone());
                return Err(reason);
            }
        }
        Ok(())
    }
}

/// One answer.
struct Follower {
    phase: Phase,
    form: Form,
    tokenizer: Arc<Tokenizer>,
    ends: Arc<[u32]>,
    unless: Option<(u32, &'static str)>,
    /// What may come next: one bit per token.
    allowed: Vec<u32>,
}

enum Phase {
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
    fn new(rules: &Structured) -> Self {
        let Begin { after, unless } = &rules.begin;
        let phase = match (&rules.form, after.is_empty()) {
            (Form::Calls { begun: Some(grammar), .. }, _) => Phase::Bound(Box::new(grammar.matcher())),
            (_, false) => Phase::Free { until: after.iter().copied().collect(), said: Vec::new() },
            (form, true) => form.phase(),
        };
        Self {
            phase,
            form: rules.form.clone(),
            tokenizer: rules.tokenizer.clone(),
            ends: rules.ends.clone(),
            unless: *unless,
            allowed: Vec::new(),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        if let Some((opening, close)) = self.unless.take()
            && token == opening
        {
            self.phase = Phase::Free { until: [close].into(), said: Vec::new() };
            return Ok(());
        }
        match &mut self.phase {
            Phase::Bound(matcher) => {
                matcher.accept(token).map_err(|e| e.to_string())?;
                if matches!(self.form, Form::Calls { place, .. } if place.again) && matcher.is_over() {
                    self.phase = self.form.phase();
                }
                Ok(())
            }
            Phase::Free { until, said } => {
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
            Phase::Watching { .. } => {
                let tokenizer = self.tokenizer.clone();
                self.said(tokenizer.token_bytes(token))
            }
            Phase::Done => Ok(()),
        }
    }

    /// `text` was said where the form has its say.
    fn said(&mut self, text: &[u8]) -> Result<(), String> {
        let begin = |grammar: &Grammar, text: &[u8]| {
            let mut matcher = Box::new(grammar.matcher());
            match matcher.begin(text) {
                true => Ok(Phase::Bound(matcher)),
                false => Err("the model wrote on where its answer's form allows something else".to_owned()),
            }
        };
        match (&self.form, &mut self.phase) {
            (Form::Answer(grammar), Phase::Bound(_)) => self.phase = begin(grammar, text)?,
            (
                Form::Calls { place: Place { trigger, .. }, grammar, .. },
                Phase::Watching { said, at_start },
            ) => {
                said.extend_from_slice(text);
                if *at_start {
                    let start = said.trim_ascii_start();
                    let common = start.len().min(trigger.len());
                    if start[..common] != trigger.as_bytes()[..common] {
                        self.phase = Phase::Done;
                    } else if common == trigger.len() {
                        self.phase = begin(grammar, &start[common..])?;
                    }
                } else if let Some(rest) = behind(said, trigger) {
                    self.phase = begin(grammar, &rest)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Computes what may come next.
    fn look(&mut self) -> Result<(), String> {
        match &mut self.phase {
            Phase::Bound(matcher) => {
                matcher.allowed(&mut self.allowed).map_err(|e| e.to_string())?;
                if let Some((opening, _)) = self.unless {
                    self.allowed[opening as usize / 32] |= 1 << (opening % 32);
                }
            }
            Phase::Watching { .. } | Phase::Done => self.allow_everything(),
            Phase::Free { .. } => {
                self.allow_everything();
                for end in self.ends.iter() {
                    if let Some(word) = self.allowed.get_mut(*end as usize / 32) {
                        *word &= !(1 << (end % 32));
                    }
                }
            }
        }
        Ok(())
    }

    fn allow_everything(&mut self) {
        self.allowed.clear();
        self.allowed.resize(self.tokenizer.vocab_size().div_ceil(32), u32::MAX);
    }

    fn restrict(&self, logits: &mut [f32]) {
        let mut rows = logits.chunks_mut(32);
        for (word, row) in self.allowed.iter().zip(&mut rows) {
            match *word {
                u32::MAX => {}
                0 => row.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in row.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
        // A checkpoint's logits may be wider than its vocabulary.
        rows.for_each(|row| row.fill(f32::NEG_INFINITY));
    }
}

impl Form {
    /// Where it has its say from here on.
    fn phase(&self) -> Phase {
        match self {
            Self::Answer(grammar) => Phase::Bound(Box::new(grammar.matcher())),
            Self::Calls { place, .. } => Phase::Watching { said: Vec::new(), at_start: place.at_start },
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use folio_text::{Grammars, Syntax};

    fn rules(pattern: &str, begin: Begin) -> Structured {
        // One token per byte, and an end.
        let vocab: serde_json::Map<String, serde_json::Value> =
            (0..95u8).map(|id| (char::from(id + 32).to_string().replace(' ', "Ġ"), id.into())).collect();
        let special = |id: u32, text: &str| serde_json::json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let file = serde_json::json!({
            "model": {"type": "BPE", "vocab": vocab, "merges": []}, "decoder": byte_level, "pre_tokenizer": byte_level,
            "added_tokens": [special(95, "<end>"), special(96, "<|channel|>"), special(97, "<|message|>")],
        });
        let tokenizer =
            Arc::new(Tokenizer::from_bytes(file.to_string().as_bytes(), None).expect("a tokenizer"));
        let ends: Arc<[u32]> = Arc::new([95]);
        let grammars = Grammars::new(&tokenizer, &ends).expect("a vocabulary");
        let grammar = Arc::new(grammars.compile(&Syntax::Regex(pattern.into())).expect("a grammar"));
        let registry = crate::metrics::MaskFigures::default();
        let masks = Arc::new(Masks::start(1, Arc::new(registry)).expect("threads"));
        Structured { form: Form::Answer(grammar), begin, tokenizer, ends, masks }
    }

    fn id(c: char) -> u32 {
        c as u32 - 32
    }

    /// What may come next.
    fn allowed(guide: &Arc<dyn Guide>) -> Result<Vec<u32>, String> {
        let mut logits = [0.0; 130];
        guide.restrict(&mut logits)?;
        Ok((0..130).filter(|id| logits[*id as usize] == 0.0).collect())
    }

    #[test]
    fn a_guide_follows_its_answer_and_no_other() {
        let rules = rules("ab?", Begin::default());
        let (one, other) = (rules.guide(&[]), rules.guide(&[id('a')]));
        assert_eq!(allowed(&one), Ok(vec![id('a')]));
        assert_eq!(allowed(&other), Ok(vec![id('b'), 95]));
        one.advance(id('a'));
        assert_eq!(allowed(&one), Ok(vec![id('b'), 95]));
        assert_eq!(allowed(&one), Ok(vec![id('b'), 95]), "asking changes nothing");
        other.advance(id('b'));
        assert_eq!(allowed(&other), Ok(vec![95]));
        other.advance(95);
        assert!(allowed(&other).is_ok());
    }

    #[test]
    fn a_failure_ends_its_own_answer_only() {
        let rules = rules("a*", Begin::default());
        let (broken, whole) = (rules.guide(&[]), rules.guide(&[]));
        assert!(allowed(&broken).is_ok() && allowed(&whole).is_ok());
        broken.advance(4_000_000);
        assert!(allowed(&broken).is_err());
        broken.advance(id('a'));
        assert!(allowed(&broken).is_err(), "what failed stays failed");
        whole.advance(id('a'));
        assert_eq!(allowed(&whole), Ok(vec![id('a'), 95]));
    }

    #[test]
    fn what_comes_before_the_grammar_is_free_but_for_an_end() {
        let begin = Begin { after: vec!["<|channel|>final", "<|message|>"], unless: None };
        let rules = rules("x", begin);
        let guide = rules.guide(&[]);
        let everything: Vec<u32> = (0..128).filter(|id| *id != 95).collect();
        let said = [
            vec![96],
            "analysis".chars().map(id).collect(),
            vec![97],
            vec![id('x'), 96],
            "final json".chars().map(id).collect(),
        ];
        for token in said.concat() {
            assert_eq!(allowed(&guide).map(|ids| ids.into_iter().filter(|id| *id < 95).count()), Ok(95));
            assert!(!allowed(&guide).is_ok_and(|ids| ids.contains(&95)));
            guide.advance(token);
        }
        assert!(
            allowed(&guide).is_ok_and(|ids| ids.len() > 90 && ids.iter().all(|id| everything.contains(id)))
        );
        guide.advance(97);
        assert_eq!(allowed(&guide), Ok(vec![id('x')]));
    }

    #[test]
    fn calls_are_held_wherever_they_begin_and_text_around_them_is_free() {
        let mut rules = rules("never used", Begin { after: vec!["</think>"], unless: None });
        let grammars = Grammars::new(&rules.tokenizer, &rules.ends).expect("a vocabulary");
        let call = Arc::new(grammars.compile(&Syntax::Regex("[ab]</call>".into())).expect("a grammar"));
        rules.form = Form::Calls {
            place: Place { trigger: "<call>", at_start: false, again: true },
            grammar: call,
            begun: None,
        };
        let guide = rules.guide(&[]);
        let say = |text: &str| {
            for c in text.chars() {
                assert!(allowed(&guide).is_ok_and(|ids| ids.contains(&id(c))), "{c:?} of {text:?}");
                guide.advance(id(c));
            }
        };
        let may_end = || allowed(&guide).is_ok_and(|ids| ids.contains(&95));
        say("thinks of <call>zzz");
        assert!(!may_end());
        say("</think> and says <cal");
        assert!(may_end());
        say("l>");
        assert_eq!(allowed(&guide), Ok(vec![id('a'), id('b')]));
        say("b</call>");
        assert!(may_end());
        say(" more <call>a");
        assert_eq!(allowed(&guide), Ok(vec![id('<')]));
    }
}
