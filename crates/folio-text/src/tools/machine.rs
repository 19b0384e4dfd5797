//! The state machine: plain text, reasoning, sections of calls, and gpt-oss's messages.

use std::sync::Arc;

use super::format::{Ids, ToolFormat};
use super::functions::Functions;
use super::harmony::{self, Header, MessageKind};
use super::section::{Outcome, Section};
use super::{BLANK_MAX, GIVEN_BACK_MAX, partial_suffix};
use crate::reasoning::ReasoningFormat;
use crate::work;

/// What a model's text turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    Content(String),
    Reasoning(String),
    /// Calls are numbered from 0; one ends before the next begins.
    CallStarted {
        index: u32,
        id: String,
        name: String,
    },
    /// More of the call's arguments, as JSON text.
    Arguments {
        index: u32,
        text: String,
    },
    /// The arguments are complete. A call that was cut off does not end.
    CallEnded {
        index: u32,
    },
}

/// How to read one answer.
#[derive(Clone, Debug, Default)]
pub struct ParserSetup {
    /// `None`: calls are text.
    pub tools: Option<&'static ToolFormat>,
    /// `None`: reasoning is text.
    pub reasoning: Option<&'static ReasoningFormat>,
    pub functions: Arc<Functions>,
    /// The prompt left the model inside reasoning; see [`ReasoningFormat::begins_inside`].
    pub inside_reasoning: bool,
    /// The calls' ids are made from this.
    pub id_seed: u64,
    /// The answer is over after this many calls. 0: no limit.
    pub calls_max: u32,
}

/// Where plain text goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text {
    reasoning: bool,
    /// Nothing but white space so far.
    fresh: bool,
    /// White space that comes before a marker or the end is dropped.
    after_call: bool,
}

#[derive(Clone, Debug)]
enum ParserState {
    Text(Text),
    Section(Box<Section>),
    /// A header of gpt-oss is expected.
    Header,
    Body(MessageKind),
    Over,
}

/// What a marker in plain text does.
#[derive(Clone, Copy, Debug)]
enum Action {
    Reason,
    Answer,
    Section,
}

/// Reads one answer.
#[derive(Clone, Debug)]
pub struct OutputParser {
    setup: ParserSetup,
    state: ParserState,
    buf: String,
    calls: CallState,
    /// Sections that were none.
    given_back: u32,
}

#[derive(Clone, Debug, Default)]
struct CallState {
    made: u32,
    name: String,
    /// Some of the current call's arguments are out.
    any: bool,
}

/// The sink of a call being read.
pub struct Calls<'a> {
    setup: &'a ParserSetup,
    state: &'a mut CallState,
    out: &'a mut Vec<OutputEvent>,
}

impl Calls<'_> {
    pub fn functions(&self) -> &Functions {
        &self.setup.functions
    }

    /// Of the current call.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    pub fn start(&mut self, name: String, id: Option<String>) {
        let index = self.state.made;
        let ids = self.setup.tools.map_or(Ids::OpenAi, |format| format.ids);
        let id = id.unwrap_or_else(|| make_id(ids, self.setup.id_seed, index, &name));
        self.state.name.clone_from(&name);
        self.state.any = false;
        self.out.push(OutputEvent::CallStarted { index, id, name });
    }

    pub fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.state.any = true;
        match self.out.last_mut() {
            Some(OutputEvent::Arguments { text: last, .. }) => last.push_str(text),
            _ => self.out.push(OutputEvent::Arguments { index: self.state.made, text: text.to_owned() }),
        }
    }

    pub fn end(&mut self) {
        self.out.push(OutputEvent::CallEnded { index: self.state.made });
        self.state.made += 1;
    }
}

impl OutputParser {
    pub fn new(setup: ParserSetup) -> Self {
        let harmony = setup.tools.is_some_and(|format| format.harmony)
            || setup.reasoning.is_some_and(|format| format.harmony);
        let state = match harmony {
            true => ParserState::Header,
            false => {
                ParserState::Text(Text { reasoning: setup.inside_reasoning, fresh: true, after_call: false })
            }
        };
        Self { setup, state, buf: String::new(), calls: CallState::default(), given_back: 0 }
    }

    /// Takes the next piece; appends what became certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<OutputEvent>) {
        self.buf.push_str(text);
        self.advance(false, out);
    }

    /// The text is over: what was held back is what it is.
    pub fn finish(&mut self, out: &mut Vec<OutputEvent>) {
        self.advance(true, out);
        self.state = ParserState::Over;
        self.buf.clear();
    }

    /// As many calls as there may be were made: nothing that follows counts.
    pub fn is_over(&self) -> bool {
        matches!(self.state, ParserState::Over)
    }

    /// The model is thinking: what comes next is reasoning, until it turns out otherwise.
    pub fn in_reasoning(&self) -> bool {
        match &self.state {
            ParserState::Text(text) => text.reasoning,
            ParserState::Section(section) => section.back.reasoning && !section.is_certain(),
            ParserState::Body(body) => *body == MessageKind::Reasoning,
            ParserState::Header | ParserState::Over => false,
        }
    }

    /// Bytes held back now.
    pub fn held_bytes(&self) -> usize {
        self.buf.len()
    }

    /// Whether this text, if it is a control token, must be among what is pushed.
    pub fn needs(setup: &ParserSetup, token: &str) -> bool {
        let tools = setup.tools.into_iter().flat_map(ToolFormat::markers);
        let reasoning = setup.reasoning.into_iter().flat_map(ReasoningFormat::markers);
        !token.is_empty() && tools.chain(reasoning).any(|marker| marker.contains(token))
    }

    fn advance(&mut self, last: bool, out: &mut Vec<OutputEvent>) {
        let mut on = true;
        while on {
            // The buffer is searched, or its beginning moved out of it.
            work::add(self.searched());
            let state = std::mem::replace(&mut self.state, ParserState::Over);
            (self.state, on) = match state {
                ParserState::Text(text) => self.text(text, last, out),
                ParserState::Section(section) => self.section(section, last, out),
                ParserState::Header => self.header(last, out),
                ParserState::Body(body) => self.body(body, last, out),
                ParserState::Over => {
                    self.buf.clear();
                    (ParserState::Over, false)
                }
            };
            if self.setup.calls_max > 0 && self.calls.made >= self.setup.calls_max {
                self.state = ParserState::Over;
            }
        }
    }

    /// Bytes of the buffer that this state looks at: a section goes on where it stopped.
    fn searched(&self) -> usize {
        match &self.state {
            ParserState::Section(section) => self.buf.len() - section.read().min(self.buf.len()),
            _ => self.buf.len(),
        }
    }

    /// Removes the first bytes of the buffer and emits them as text.
    fn emit(&mut self, reasoning: bool, length: usize, out: &mut Vec<OutputEvent>) {
        if length == 0 {
            return;
        }
        let text = self.buf.drain(..length);
        match out.last_mut() {
            Some(OutputEvent::Reasoning(last)) if reasoning => last.extend(text),
            Some(OutputEvent::Content(last)) if !reasoning => last.extend(text),
            _ if reasoning => out.push(OutputEvent::Reasoning(text.collect())),
            _ => out.push(OutputEvent::Content(text.collect())),
        }
    }

    /// The markers that count in `text`, whether only where it begins, and what they do.
    fn markers(&self, text: Text) -> Vec<(&'static str, bool, Action)> {
        let mut markers = Vec::new();
        if let Some(format) = self.setup.reasoning.filter(|format| !format.harmony) {
            match text.reasoning {
                // A model that writes the mark although the prompt has it already.
                true => markers.push((format.open, true, Action::Reason)),
                false => markers.push((format.open, !format.anywhere, Action::Reason)),
            }
            if text.reasoning {
                markers.push((format.close, false, Action::Answer));
            }
        }
        let may_call = |format: &&ToolFormat| {
            self.given_back < GIVEN_BACK_MAX && (!text.reasoning || format.ends_reasoning)
        };
        if let Some(format) = self.setup.tools.filter(may_call) {
            for shape in format.shapes.iter().filter(|shape| !(shape.bare && text.reasoning)) {
                markers.extend(shape.open.iter().map(|open| (*open, shape.bare, Action::Section)));
            }
        }
        markers
    }

    fn text(&mut self, mut text: Text, last: bool, out: &mut Vec<OutputEvent>) -> (ParserState, bool) {
        let buf = self.buf.as_str();
        let lead = buf.len() - buf.trim_start().len();
        let mut found: Option<(usize, &'static str, Action)> = None;
        let mut certain = buf.len();
        for (marker, only_fresh, action) in self.markers(text) {
            let at = match only_fresh {
                true if !text.fresh => None,
                true => {
                    let rest = &buf[lead..];
                    if marker.starts_with(rest) && rest.len() < marker.len() {
                        certain = certain.min(lead);
                    }
                    rest.starts_with(marker).then_some(lead)
                }
                false => {
                    certain = certain.min(buf.len() - partial_suffix(buf, marker));
                    buf.find(marker)
                }
            };
            let Some(at) = at else { continue };
            let better =
                found.is_none_or(|(best, other, _)| at < best || (at == best && marker.len() > other.len()));
            if better {
                found = Some((at, marker, action));
            }
        }
        if let Some((at, marker, action)) = found {
            text.fresh &= buf[..at].trim_start().is_empty();
            if text.after_call && at == lead && at <= BLANK_MAX {
                self.buf.drain(..at);
            } else {
                self.emit(text.reasoning, at, out);
            }
            return (self.opened(text, marker, action), true);
        }
        if last {
            certain = if text.after_call && lead == buf.len() && lead <= BLANK_MAX { 0 } else { buf.len() };
        } else if text.after_call && certain <= lead && lead <= BLANK_MAX {
            certain = 0;
        }
        if certain > 0 {
            text.fresh &= buf[..certain].trim_start().is_empty();
            text.after_call = false;
            self.emit(text.reasoning, certain, out);
        }
        (ParserState::Text(text), false)
    }

    /// The marker at the buffer's start counts.
    fn opened(&mut self, text: Text, marker: &'static str, action: Action) -> ParserState {
        match action {
            Action::Reason | Action::Answer => {
                self.buf.drain(..marker.len());
                let reasoning = matches!(action, Action::Reason);
                // An opening mark counts once, where reasoning begins.
                let fresh = !reasoning;
                ParserState::Text(Text { reasoning, fresh, after_call: false })
            }
            Action::Section => {
                match self.setup.tools.and_then(|format| Section::open(format, marker, text)) {
                    Some(section) => ParserState::Section(Box::new(section)),
                    None => ParserState::Text(Text { fresh: false, ..text }),
                }
            }
        }
    }

    fn section(
        &mut self,
        mut section: Box<Section>,
        last: bool,
        out: &mut Vec<OutputEvent>,
    ) -> (ParserState, bool) {
        let mut calls = Calls { setup: &self.setup, state: &mut self.calls, out };
        let after = ParserState::Text(Text { reasoning: false, fresh: true, after_call: true });
        match section.step(&mut self.buf, &mut calls) {
            Outcome::On => (ParserState::Section(section), true),
            Outcome::More if !last => (ParserState::Section(section), false),
            Outcome::Over => (after, true),
            Outcome::More if section.is_certain() => {
                if section.cut_off(&mut self.buf, &mut calls) {
                    return (after, true);
                }
                // No call can follow one that is unfinished.
                self.emit(false, self.buf.len(), out);
                (ParserState::Over, false)
            }
            Outcome::More | Outcome::Fail if section.next_shape() => (ParserState::Section(section), true),
            Outcome::More | Outcome::Fail => {
                // The marker is text; what follows is read again.
                let back = section.back;
                self.given_back += 1;
                self.emit(back.reasoning, section.marker().len(), out);
                (ParserState::Text(Text { fresh: false, after_call: false, ..back }), true)
            }
        }
    }

    fn header(&mut self, last: bool, out: &mut Vec<OutputEvent>) -> (ParserState, bool) {
        let functions = &self.setup.functions;
        let tools = self.setup.tools.is_some_and(|format| format.harmony);
        match harmony::header(&self.buf, |name| functions.has(name)) {
            Header::More if !last => (ParserState::Header, false),
            Header::Message(length, MessageKind::Arguments(name)) if tools => {
                self.buf.drain(..length);
                let mut calls = Calls { setup: &self.setup, state: &mut self.calls, out };
                calls.start(name.clone(), None);
                (ParserState::Body(MessageKind::Arguments(name)), true)
            }
            Header::Message(length, body) if !matches!(body, MessageKind::Arguments(_)) => {
                self.buf.drain(..length);
                (ParserState::Body(body), true)
            }
            _ => {
                // No header: text, its first marker included.
                let blank = self.buf.len() - self.buf.trim_start().len();
                let rest = &self.buf[blank..];
                let marker = harmony::BEGINS.iter().find(|marker| rest.starts_with(**marker));
                let length = marker.map_or(0, |marker| blank + marker.len());
                self.emit(false, length, out);
                (ParserState::Body(MessageKind::Content), !self.buf.is_empty())
            }
        }
    }

    fn body(&mut self, body: MessageKind, last: bool, out: &mut Vec<OutputEvent>) -> (ParserState, bool) {
        let markers = harmony::ENDS.iter().chain(&[harmony::START, harmony::CHANNEL]);
        let found = markers.clone().filter_map(|marker| Some((self.buf.find(marker)?, *marker))).min();
        let certain = match found {
            Some((at, _)) => at,
            None if last => self.buf.len(),
            None => {
                let held = markers.map(|marker| partial_suffix(&self.buf, marker)).max().unwrap_or(0);
                self.buf.len() - held
            }
        };
        let call = matches!(body, MessageKind::Arguments(_));
        if call {
            let mut calls = Calls { setup: &self.setup, state: &mut self.calls, out };
            calls.arguments(&self.buf[..certain]);
            self.buf.drain(..certain);
        } else {
            self.emit(body == MessageKind::Reasoning, certain, out);
        }
        let over = found.is_some() || last;
        if call && over {
            let mut calls = Calls { setup: &self.setup, state: &mut self.calls, out };
            if !calls.state.any && found.is_some() {
                calls.arguments("{}");
            }
            calls.end();
        }
        match found {
            None if over => (ParserState::Over, false),
            None => (ParserState::Body(body), false),
            Some((_, marker)) => {
                if harmony::ENDS.contains(&marker) {
                    self.buf.drain(..marker.len());
                }
                (ParserState::Header, true)
            }
        }
    }
}

/// An id that no other call of this or another answer has.
fn make_id(ids: Ids, seed: u64, index: u32, name: &str) -> String {
    if ids == Ids::Kimi {
        return format!("functions.{name}:{index}");
    }
    const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let (prefix, length) = if ids == Ids::Nine { ("", 9) } else { ("call_", 24) };
    let mut state = seed ^ u64::from(index).wrapping_mul(0xd605_bbb5_8c8a_bc2d);
    let mut id = prefix.to_owned();
    for _ in 0..length {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        id.push(char::from(LETTERS[((mixed ^ (mixed >> 31)) % 62) as usize]));
    }
    id
}
