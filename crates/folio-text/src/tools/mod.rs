//! From what a model writes to what a client is told: text, reasoning, and tool calls.
//!
//! Owns: one incremental state machine ([`OutputParser`]) driven by tables ([`TOOL_FORMATS`], and
//! [`REASONING_FORMATS`](crate::REASONING_FORMATS)). It is fed detokenized text in pieces of any size and says what became
//! certain. Must never: know about requests or JSON responses.
//!
//! Invariants:
//! - The events of a text depend on the text alone, not on how it was cut: neighbouring events of a kind joined, they are
//!   the same for every cutting.
//! - Nothing that may still turn out to begin a marker is emitted; everything else is, at once.
//! - A call is a call once its name is known and its arguments begin. What never gets that far is given back as the text
//!   it was, markers and all. From there on its arguments are what the model wrote, valid or not. No text is lost but
//!   what makes up a call: markers, keys, ids, and white space between calls.
//! - Text is held back up to [`HELD_MAX`] bytes; a call that is still no call by then is text. After [`GIVEN_BACK_MAX`]
//!   calls that were none, markers of calls are text too, so that reading again stays cheap whatever a model writes.
//!
//! Cost: each piece is searched for the few markers that count in the current state; arguments in JSON are scanned once
//! and copied; a call that turns out to be text is read again from behind its marker.

mod envelope;
mod format;
mod functions;
mod harmony;
mod json;
mod literal;
mod machine;
mod markup;
mod section;
mod strict;

pub use format::{TOOL_FORMATS, ToolFormat};
pub use functions::Functions;
pub(crate) use harmony::MARKERS as HARMONY_MARKERS;
pub use machine::{OutputEvent, OutputParser, ParserSetup};
pub use strict::{CallPlace, CallableFunction, ForcedPrefix};

/// Bytes of a call that may be held back before it is certain that it is one.
pub const HELD_MAX: usize = 1 << 20;
/// Calls of one answer that may turn out to be none.
const GIVEN_BACK_MAX: u32 = 64;
/// White space between the parts of a call, bytes.
const BLANK_MAX: usize = 1024;

/// Length of the longest end of `text` that begins `marker` (and is not all of it).
fn partial_suffix(text: &str, marker: &str) -> usize {
    let (text, marker) = (text.as_bytes(), marker.as_bytes());
    let most = text.len().min(marker.len().saturating_sub(1));
    (1..=most).rev().find(|&len| text.ends_with(&marker[..len])).unwrap_or(0)
}
