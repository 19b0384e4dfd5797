//! What a rendering may use: a chat template comes with a model, and a model from anywhere.
//!
//! Owns: the count of bytes that a rendering has made (nothing of it counts as freed, so it bounds what is held as well)
//! and of steps of work inside single instructions, which the engine's fuel does not see. Invariant: both are charged
//! *before* the bytes are made or the work is done. Measuring a value costs what is measured, and ends at the limit.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Bytes that a rendering may make, besides [`BYTES_PER_INPUT_BYTE`] for each of the conversation.
pub(super) const BYTES: usize = 256 << 20;
pub(super) const BYTES_PER_INPUT_BYTE: usize = 64;
/// Steps inside instructions: values looked at, and 16 bytes of text each.
const STEPS: usize = 50_000_000;
/// The same of quick work.
const QUICK_BYTES: usize = 256 << 10;
pub(super) const QUICK_STEPS: usize = 50_000;
/// Values inside values. Deeper ones would be dropped, compared and printed on a stack that ends.
pub(super) const DEPTH: usize = 64;
/// What an element of a list, and an entry of a mapping, takes at most.
pub(super) const ELEMENT: usize = 64;
/// The variable that says how many bytes the conversation has; no template can spell it.
pub(super) const INPUT_BYTES: &str = "!input";
/// The variable that says whether the rendering is quick work; no template can spell it either.
pub(super) const QUICK: &str = "!quick";

/// Why a rendering ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Spent {
    #[error("it makes more text than it may ({0} bytes)")]
    Bytes(usize),
    #[error("it ran for too long")]
    Steps,
    #[error("it puts values into values more than {DEPTH} times")]
    Depth,
    #[error("it keeps a namespace in a list, a mapping or a namespace, which is not supported")]
    Namespace,
}

impl From<Spent> for Error {
    fn from(spent: Spent) -> Self {
        Self::new(ErrorKind::InvalidOperation, spent.to_string())
    }
}

#[derive(Debug, Default)]
pub(super) struct Meter {
    bytes: usize,
    limit: usize,
    steps: usize,
    steps_limit: usize,
    /// Bytes written, into what is kept for later too; and those when it was first asked whether the assistant's turn is to begin.
    written: usize,
    asked_at: Option<usize>,
}

/// A value as it would be printed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    /// At most; of text inside values, with its escapes.
    pub bytes: usize,
    pub nodes: usize,
    pub depth: usize,
    pub has_namespace: bool,
}

/// Of the rendering that `state` belongs to.
pub(super) fn meter<'s>(state: &'s mut State<'_, '_>) -> &'s mut Meter {
    if state.get_extension::<Meter>().is_none() {
        let input = state.lookup(INPUT_BYTES).and_then(|bytes| bytes.as_usize()).unwrap_or(0);
        let quick = state.lookup(QUICK).is_some_and(|quick| quick.is_true());
        let (bytes, steps_limit) = if quick { (QUICK_BYTES, QUICK_STEPS) } else { (BYTES, STEPS) };
        let limit = bytes.saturating_add(input.saturating_mul(BYTES_PER_INPUT_BYTE));
        return state.get_or_insert_extension(Meter { limit, steps_limit, ..Meter::default() });
    }
    state.get_or_insert_extension_with(Meter::default)
}

impl Meter {
    /// Bytes are about to be made.
    pub(super) fn make(&mut self, bytes: usize) -> Result<(), Spent> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.limit { Err(Spent::Bytes(self.limit)) } else { self.work(bytes / 16) }
    }

    /// So many bytes, at most, are about to be written.
    pub(super) fn write(&mut self, bytes: usize) {
        self.written = self.written.saturating_add(bytes);
    }

    pub(super) fn asked(&mut self) {
        self.asked_at.get_or_insert(self.written);
    }

    /// Bytes written since then, at most.
    pub(super) fn behind_asking(&self) -> usize {
        self.written - self.asked_at.unwrap_or(self.written)
    }

    /// Steps taken so far.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// Steps are about to be taken.
    pub(super) fn work(&mut self, steps: usize) -> Result<(), Spent> {
        self.steps = self.steps.saturating_add(steps);
        if self.steps > self.steps_limit { Err(Spent::Steps) } else { Ok(()) }
    }

    /// Walks all of a value.
    pub(super) fn measure(&mut self, value: &Value) -> Result<Size, Spent> {
        let mut size = Size::default();
        self.measure_into(value, 0, &mut size)?;
        Ok(size)
    }

    fn measure_into(&mut self, value: &Value, depth: usize, size: &mut Size) -> Result<(), Spent> {
        if depth > DEPTH {
            return Err(Spent::Depth);
        }
        self.work(1)?;
        size.nodes += 1;
        size.depth = size.depth.max(depth);
        let Some(object) = value.as_object() else {
            let text =
                value.as_str().map_or(48, |text| if depth > 0 { text.len() * 6 + 2 } else { text.len() });
            size.bytes = size.bytes.saturating_add(text);
            return Ok(());
        };
        size.bytes = size.bytes.saturating_add(64);
        size.has_namespace |= is_namespace(value);
        match value.kind() {
            ValueKind::Map => {
                for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                    self.measure_into(&key, depth + 1, size)?;
                    self.measure_into(&item, depth + 1, size)?;
                }
            }
            ValueKind::Seq | ValueKind::Iterable => {
                for item in object.try_iter().into_iter().flatten() {
                    self.measure_into(&item, depth + 1, size)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Elements, or characters.
pub(super) fn elements(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => value.as_object().and_then(|object| object.enumerator_len()).unwrap_or(0),
    }
}
