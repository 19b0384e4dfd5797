//! Answers that must follow a schema, a regular expression, a list of choices or a grammar: what may come next, token by token.
//!
//! Owns: which notations there are, their limits, and the wrapping of llguidance, which does the work. Must never: let a panic or a
//! stack overflow of that work out: compiling runs on a thread with a stack of its own, and every panic becomes an error.
//!
//! A schema is either followed to the letter or refused: a keyword that cannot be kept is an error that names it.
//!
//! Cost: [`Grammars::new`] sorts the vocabulary once (0.1 to 1 s for 128k tokens); compiling takes milliseconds, a step of a
//! matcher some 50 us, each bounded by fuel ([`limits`]) and not by a clock, so the same text gives the same answer everywhere.

mod gbnf;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, ParserFactory};
use serde_json::{Value, json};

use crate::tokenizer::Tokenizer;
use crate::work;

/// Brackets inside each other in a regular expression or grammar.
pub(crate) const DEPTH_MAX: usize = 128;
/// Choices of one answer.
pub const CHOICES_MAX: usize = 10_000;
/// For parsers that call themselves as deep as a grammar is nested; untouched pages cost nothing.
pub const STACK_BYTES: usize = 64 << 20;
/// Of what is wrong with a grammar, shown to the client.
const MESSAGE_MAX: usize = 600;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Syntax {
    /// JSON that a schema (draft 2020-12) allows.
    Json { schema: Value, whitespace: Whitespace },
    /// The whole answer matches a regular expression (Rust's syntax).
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Lark with llguidance's extensions, or GBNF.
    Grammar(String),
}

/// Between the parts of a JSON text.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Whitespace {
    /// A space, or a line break with indentation. Bounded, so that a model cannot go on with it for ever.
    #[default]
    Readable,
    /// None.
    Compact,
    /// What a regular expression matches.
    Pattern(String),
}

impl Whitespace {
    const READABLE: &str = r"\x20|\r?\n[\x20\x09]{0,60}";

    /// The schema with this written where llguidance reads it.
    pub fn apply(&self, schema: Value) -> Result<Value, String> {
        let mut schema = match schema {
            Value::Object(_) => schema,
            Value::Bool(true) => json!({}),
            Value::Bool(false) => return Err("the schema 'false' allows nothing".into()),
            _ => return Err("a schema is an object or a boolean".into()),
        };
        if schema.get("x-guidance").is_some() {
            return Err("'x-guidance' is not a keyword of JSON Schema".into());
        }
        let mut options = JsonCompileOptions::default();
        match self {
            Whitespace::Readable => options.whitespace_pattern = Some(Whitespace::READABLE.into()),
            Whitespace::Compact => options.whitespace_flexible = false,
            Whitespace::Pattern(pattern) => {
                flat(pattern)?;
                options.whitespace_pattern = Some(pattern.clone());
            }
        }
        options.apply_to(&mut schema);
        Ok(schema)
    }
}

/// Why there is no grammar, or why it cannot go on. The text is for the client.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

/// Compiles for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
}

/// A compiled grammar.
pub struct Grammar {
    fresh: Mutex<llguidance::Matcher>,
}

/// Follows one answer.
pub struct Matcher {
    inner: llguidance::Matcher,
    /// Tokens and bytes that it was told. All of it is in each copy.
    told: usize,
    /// The newest of them, where it can be taken back.
    last: Option<u32>,
    /// What looks ahead of it, and the tokens that this was not told yet.
    ahead: Option<Box<Matcher>>,
    behind: Vec<u32>,
    /// How many tokens it was told that can be taken back, while it looks ahead of another. `None`: nothing can.
    drafts: Option<usize>,
}

/// What one step may cost; llguidance's own defaults, but for errors, which are for strangers.
fn limits() -> ParserLimits {
    ParserLimits { verbose_errors: false, ..ParserLimits::default() }
}

impl Grammars {
    /// `ends` are the tokens that end an answer: they may come where a grammar is complete, and only there.
    pub fn new(tokenizer: &Tokenizer, ends: &[u32]) -> Result<Self, GrammarError> {
        let error = |what: String| GrammarError(what);
        let vocab = tokenizer.vocab_size() as u32;
        let ends: Vec<u32> = ends.iter().copied().filter(|id| *id < vocab).collect();
        let Some(first) = ends.first() else {
            return Err(error(
                "the model has no token that ends an answer, so an answer cannot follow a grammar".into(),
            ));
        };
        let words: Vec<Vec<u8>> = (0..vocab)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                match tokenizer.is_special(id) || ends.contains(&id) {
                    // Control tokens are no text, whatever they are spelled like.
                    true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                    false => bytes.to_vec(),
                }
            })
            .collect();
        guarded(|| {
            let trie = TokTrie::from(&TokRxInfo::new(vocab, *first), &words).with_eos_tokens(&ends);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            // One token at a time: nothing is forced, nor taken back by the library itself.
            let caps = InferenceCapabilities::default();
            let mut factory = ParserFactory::new(&env, caps, &SlicedBiasComputer::general_slices())
                .map_err(|e| e.to_string())?;
            *factory.limits_mut() = limits();
            factory.quiet();
            Ok(Self { factory })
        })
    }

    /// Reads and checks a grammar. Blocks for as long as its limits allow: some 100 ms.
    pub fn compile(&self, syntax: &Syntax) -> Result<Grammar, GrammarError> {
        let grammar = top_level(syntax).map_err(GrammarError)?;
        guarded(|| {
            let parser = self.factory.create_parser(grammar).map_err(|e| e.to_string())?;
            let mut fresh = llguidance::Matcher::new(Ok(parser));
            // The first step finds what only shows when a grammar is used, such as a start that matches nothing.
            let allowed = fresh.compute_mask_or_eos().map_err(|e| e.to_string())?;
            match allowed.is_zero() {
                true => Err("no token of the model's vocabulary can begin such an answer".into()),
                false => Ok(Grammar { fresh: Mutex::new(fresh) }),
            }
        })
    }
}

impl Grammar {
    /// A matcher of an empty answer.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.fresh.lock().unwrap_or_else(PoisonError::into_inner).deep_clone(), 0)
    }
}

impl Matcher {
    fn new(inner: llguidance::Matcher, told: usize) -> Self {
        Self { inner, told, last: None, ahead: None, behind: Vec::new(), drafts: None }
    }

    /// A matcher of the same answer, which may be told what may come next and is then given back ([`Matcher::give_back`]). This one is
    /// told nothing meanwhile. O(what was said since the last time); the first time, and where the last one was not given back or could not
    /// be brought back, O(what was said).
    pub fn ahead(&mut self) -> Box<Self> {
        let behind = std::mem::take(&mut self.behind);
        let kept = self.ahead.take().and_then(|mut ahead| {
            behind.iter().try_for_each(|token| ahead.accept(*token)).is_ok().then_some(ahead)
        });
        let mut ahead = kept.unwrap_or_else(|| {
            work::add(self.told);
            Box::new(Self::new(self.inner.deep_clone(), self.told))
        });
        ahead.drafts = Some(0);
        ahead
    }

    /// Takes back what `ahead` was told, and keeps it for the next time, if that can be done: behind an end or an error it cannot, nor in
    /// grammars with `stop` or `max_tokens`. Another answer's is dropped.
    pub fn give_back(&mut self, mut ahead: Box<Self>) {
        let Some(drafts) = ahead.drafts.take() else { return };
        if ahead.inner.rollback(drafts).is_ok() {
            // The last mask is kept by its place, where a draft may have been.
            ahead.inner.invalidate_bias_cache();
            self.ahead = Some(ahead);
        }
    }

    /// `token`, which was allowed, was chosen.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        self.told += 1;
        self.last = None;
        if self.ahead.is_some() {
            self.behind.push(token);
        }
        if self.inner.is_stopped() {
            // Complete, and what was allowed is an end.
            return self.inner.get_error().map_or(Ok(()), |error| Err(short(error)));
        }
        self.inner.consume_token(token).map_err(short)?;
        // The library may count an end or not.
        let is_end = self.inner.tok_env().is_ok_and(|env| env.tok_trie().eos_tokens().contains(&token));
        self.last = (!is_end).then_some(token);
        self.drafts = self.drafts.filter(|_| !is_end).map(|drafts| drafts + 1);
        Ok(())
    }

    /// Writes which tokens may come next: bit `id % 32` of word `id / 32`. Where the grammar is complete the tokens that end
    /// an answer are among them.
    pub fn allowed(&mut self, words: &mut Vec<u32>) -> Result<(), GrammarError> {
        let mask = self.inner.compute_mask_or_eos().map_err(short)?;
        words.clear();
        words.extend_from_slice(mask.as_slice());
        Ok(())
    }

    /// The text that must come next, as far as nothing else may. Costs what [`Matcher::ahead`] does, and that text.
    pub fn forced(&mut self) -> Vec<u8> {
        // Not asked of this one: what it was asked must not show in what it allows. A token that is taken back takes that along.
        let mut ahead = self.ahead();
        let text = ahead.inner.compute_ff_bytes();
        if text.is_empty() {
            self.give_back(ahead);
        } else if let Some(last) = self.last
            && ahead.inner.rollback(1).is_ok()
        {
            self.give_back(ahead);
            self.behind.push(last);
        }
        text
    }

    /// `text`, which was said before anything was allowed or forbidden, begins the answer. `false`: it cannot.
    pub fn begin(&mut self, text: &[u8]) -> bool {
        let Ok(env) = self.inner.tok_env() else { return false };
        let tokens = env.tok_trie().greedy_tokenize(text);
        self.told += text.len();
        self.inner.try_consume_tokens(&tokens).is_ok_and(|taken| taken == tokens.len())
    }

    /// Whether nothing but an end may come.
    pub fn is_over(&self) -> bool {
        self.inner.is_stopped()
    }

    /// Whether the answer may end here.
    pub fn is_complete(&mut self) -> bool {
        self.inner.is_stopped() || self.inner.is_accepting().unwrap_or(false)
    }
}

fn short(error: impl std::fmt::Display) -> GrammarError {
    let text = error.to_string();
    let text = text.trim();
    let end = text.char_indices().nth(MESSAGE_MAX).map_or(text.len(), |(at, _)| at);
    GrammarError(text[..end].to_owned())
}

/// Runs `work` on a thread with a large stack; a panic is an error.
fn guarded<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, GrammarError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("folio-grammar".into()).stack_size(STACK_BYTES);
        let thread =
            thread.spawn_scoped(scope, work).map_err(|e| GrammarError(format!("no thread for it: {e}")))?;
        match thread.join() {
            Ok(result) => result.map_err(short),
            Err(_) => Err(GrammarError("reading it failed inside the grammar library".into())),
        }
    })
}

fn top_level(syntax: &Syntax) -> Result<TopLevelGrammar, String> {
    Ok(match syntax {
        Syntax::Json { schema, whitespace } => {
            TopLevelGrammar::from_json_schema(whitespace.apply(schema.clone())?)
        }
        Syntax::Regex(pattern) => {
            flat(pattern)?;
            TopLevelGrammar::from_regex(pattern)
        }
        Syntax::Choice(choices) => {
            if choices.is_empty() || choices.len() > CHOICES_MAX {
                return Err(format!("there are {} choices; give 1 to {CHOICES_MAX}", choices.len()));
            }
            let quoted: Vec<String> =
                choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}\n", quoted.join(" | ")))
        }
        Syntax::Grammar(text) => {
            flat(text)?;
            match gbnf::looks_like(text) {
                true => TopLevelGrammar::from_lark(gbnf::to_lark(text)?),
                false => TopLevelGrammar::from_lark(text.clone()),
            }
        }
    })
}

/// Refuses brackets nested so deep that reading them could take a stack's worth of calls. Counts those in literals, too.
fn flat(text: &str) -> Result<(), String> {
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEPTH_MAX {
            return Err(format!("brackets are nested more than {DEPTH_MAX} deep"));
        }
    }
    Ok(())
}
