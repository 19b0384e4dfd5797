//! Text in, tokens out, and back: the tokenizer, incremental detokenization, stop strings, chat templates, and what an
//! answer consists of: text, reasoning, tool calls.
//!
//! Owns: every rule about how text and token ids correspond. Must never: know about HTTP, sequences or the cache, or
//! read a clock (a template's date is an input).
//!
//! Invariants: the pieces a [`Detokenizer`] emits concatenate to [`Tokenizer::decode`] of the same ids, whatever the
//! ids are; a [`StopMatcher`] never releases text that turns out to be part of a stop string.
//!
//! Cost: loading builds one table of bytes per token id; after that detokenizing a token is a copy of its bytes.
#![forbid(unsafe_code)]

mod added;
mod charsmap;
mod decoder;
mod detokenizer;
mod error;
mod gguf;
mod grammar;
mod library;
mod normalizer;
mod pieces;
mod prompt;
mod ranks;
mod reasoning;
mod sentencepiece;
mod stop;
mod tekken;
mod template;
mod tiktoken;
mod token_cache;
mod tokenizer;
mod tools;
mod unigram;
pub mod work;

pub use detokenizer::{DetokenizeOptions, Detokenizer};
pub use error::TextError;
pub use grammar::{CHOICES_MAX, Grammar, GrammarError, Grammars, Matcher, STACK_BYTES, Syntax, Whitespace};
pub use prompt::Prompt;
pub use reasoning::{REASONING_FORMATS, ReasoningFormat};
pub use sentencepiece::BesideModel;
pub use stop::StopMatcher;
pub use template::{AnswerFormats, ChatInput, ChatTemplate, TemplateSources, TemplateTools, rfc_3339};
pub use token_cache::{SegmentKey, TokenCache};
pub use tokenizer::{SpecialToken, SpecialTokens, Tokenizer};
pub use tools::{
    CallPlace, CallableFunction, ForcedPrefix, Functions, HELD_MAX, OutputEvent, OutputParser, ParserSetup,
    TOOL_FORMATS, ToolFormat,
};
