//! Reading one section of calls, from its opening marker to its closing one.
//!
//! Owns: the position in the format's pieces. The text from the opening marker on stays in the machine's buffer until the
//! first call begins, so that a section that is none can be given back. Must never: take text out of the buffer that it
//! did not understand.

use super::envelope::{self, Envelope};
use super::format::{Markup, NAME_MAX, Piece, Shape, ToolFormat};
use super::json::{Feed, JsonScanner, escape_into};
use super::literal::{CallEnd, End, is_name_byte, translate};
use super::machine::{Calls, Text};
use super::markup::{self, MarkupReader};
use super::{BLANK_MAX, HELD_MAX, partial_suffix};

#[derive(Clone, Debug)]
enum Phase {
    /// Pieces that come once.
    Begin(usize),
    Between,
    /// Inside a call, at this piece.
    Call(usize),
    /// Behind the closing marker.
    Tail,
}

/// Where the reading of a piece stands.
#[derive(Clone, Debug)]
enum PieceScan {
    Fresh,
    Json(JsonScanner),
    /// JSON that is broken: as it comes, until the next marker.
    Raw,
    Envelope(Envelope, Option<JsonScanner>),
    Markup(&'static Markup, MarkupReader),
    Literal(CallEnd),
}

/// What became of the section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    More,
    /// Something was read; there may be more to read.
    On,
    /// The section is over.
    Over,
    /// It is none.
    Fail,
}

#[derive(Clone, Debug)]
pub struct Section {
    format: &'static ToolFormat,
    marker: &'static str,
    /// Index of the shape being tried.
    shape: usize,
    /// Where to go on when this is no section.
    pub back: Text,
    phase: Phase,
    /// Bytes of the buffer that were read.
    at: usize,
    /// Calls made.
    made: u32,
    name: Option<String>,
    id: Option<String>,
    started: bool,
    scan: PieceScan,
}

impl Section {
    /// The section that `marker`, at the buffer's start, opens.
    pub fn open(format: &'static ToolFormat, marker: &'static str, back: Text) -> Option<Self> {
        let mut section = Self {
            format,
            marker,
            shape: 0,
            back,
            phase: Phase::Begin(0),
            at: 0,
            made: 0,
            name: None,
            id: None,
            started: false,
            scan: PieceScan::Fresh,
        };
        section.shape_from(0).then_some(section)
    }

    /// Bytes of the buffer that need not be looked at again.
    pub fn read(&self) -> usize {
        self.at
    }

    pub fn marker(&self) -> &'static str {
        self.marker
    }

    /// Starts again with the next shape that opens with the same marker.
    pub fn next_shape(&mut self) -> bool {
        self.made == 0 && !self.started && self.shape_from(self.shape + 1)
    }

    fn shape_from(&mut self, from: usize) -> bool {
        let mut shapes = self.format.shapes.iter().enumerate().skip(from);
        let Some((index, shape)) = shapes.find(|(_, shape)| shape.open.contains(&self.marker)) else {
            return false;
        };
        self.shape = index;
        self.phase = Phase::Begin(0);
        self.at = if shape.bare { 0 } else { self.marker.len() };
        self.fresh_call();
        true
    }

    fn shape(&self) -> &'static Shape {
        &self.format.shapes[self.shape]
    }

    fn fresh_call(&mut self) {
        (self.name, self.id, self.started, self.scan) = (None, None, false, PieceScan::Fresh);
    }

    /// True once a call has begun: the section cannot be given back any more.
    pub fn is_certain(&self) -> bool {
        self.started || self.made > 0
    }

    /// Reads on in `buf`.
    pub fn step(&mut self, buf: &mut String, calls: &mut Calls<'_>) -> Outcome {
        let outcome = match self.phase {
            Phase::Begin(at) => match self.shape().begin.get(at) {
                Some(Piece::Lit(text)) => match self.literal(buf, text) {
                    Outcome::On => {
                        self.phase = Phase::Begin(at + 1);
                        Outcome::On
                    }
                    other => other,
                },
                _ => {
                    self.phase = Phase::Between;
                    Outcome::On
                }
            },
            Phase::Between => self.between(buf),
            Phase::Call(at) => match self.shape().call.get(at) {
                Some(piece) => self.piece(piece, at, buf, calls),
                None => self.call_over(buf, calls),
            },
            Phase::Tail => self.tail(buf),
        };
        let too_long = !self.started && self.at > HELD_MAX;
        match outcome {
            Outcome::More if !self.started && buf.len() > HELD_MAX + BLANK_MAX => self.no_further(),
            Outcome::On | Outcome::More if too_long => self.no_further(),
            outcome => outcome,
        }
    }

    /// A call that is none: the section fails with its first, and is over with a later one.
    fn no_further(&self) -> Outcome {
        if self.made == 0 { Outcome::Fail } else { Outcome::Over }
    }

    /// Exactly `text`, after white space.
    fn literal(&mut self, buf: &str, text: &str) -> Outcome {
        let rest = &buf[self.at..];
        let item = rest.trim_start();
        let blank = rest.len() - item.len();
        if blank > BLANK_MAX {
            return Outcome::Fail;
        }
        if item.starts_with(text) {
            self.at += blank + text.len();
            return Outcome::On;
        }
        if text.starts_with(item) { Outcome::More } else { Outcome::Fail }
    }

    fn between(&mut self, buf: &mut String) -> Outcome {
        let shape = self.shape();
        let mut waiting = false;
        for close in shape.close {
            match self.literal(buf, close) {
                Outcome::On if self.made == 0 => return Outcome::Fail,
                Outcome::On => {
                    self.take(buf);
                    self.phase = Phase::Tail;
                    return Outcome::On;
                }
                Outcome::More => waiting = true,
                _ => {}
            }
        }
        if self.made > 0 {
            if !shape.several {
                return match (waiting, shape.close.is_empty()) {
                    (true, _) => Outcome::More,
                    (false, true) => {
                        self.phase = Phase::Tail;
                        Outcome::On
                    }
                    (false, false) => Outcome::Over,
                };
            }
            for separator in shape.separators {
                match self.literal(buf, separator) {
                    Outcome::On => return Outcome::On,
                    Outcome::More => waiting = true,
                    _ => {}
                }
            }
        }
        if waiting {
            return Outcome::More;
        }
        self.begin_call(buf)
    }

    fn begin_call(&mut self, buf: &str) -> Outcome {
        let rest = &buf[self.at..];
        match rest.len() - rest.trim_start().len() {
            blank if blank > BLANK_MAX => self.no_further(),
            blank if blank == rest.len() => Outcome::More,
            _ => {
                self.fresh_call();
                self.phase = Phase::Call(0);
                Outcome::On
            }
        }
    }

    fn call_over(&mut self, buf: &mut String, calls: &mut Calls<'_>) -> Outcome {
        self.take(buf);
        calls.end();
        self.made += 1;
        self.fresh_call();
        self.phase = Phase::Between;
        Outcome::On
    }

    fn tail(&mut self, buf: &mut String) -> Outcome {
        let tail = self.shape().tail;
        if tail.is_empty() {
            return Outcome::Over;
        }
        match self.literal(buf, tail) {
            Outcome::On => {
                self.take(buf);
                Outcome::Over
            }
            Outcome::More => Outcome::More,
            _ => Outcome::Over,
        }
    }

    /// Drops what was read.
    fn take(&mut self, buf: &mut String) {
        buf.drain(..self.at);
        self.at = 0;
    }

    /// The piece was read.
    fn next(&mut self, at: usize) -> Outcome {
        self.scan = PieceScan::Fresh;
        self.phase = Phase::Call(at + 1);
        Outcome::On
    }

    fn piece(
        &mut self,
        piece: &'static Piece,
        at: usize,
        buf: &mut String,
        calls: &mut Calls<'_>,
    ) -> Outcome {
        if let PieceScan::Raw = self.scan {
            return self.raw(at, buf, calls);
        }
        match piece {
            Piece::Lit(text) => match self.literal(buf, text) {
                Outcome::On => self.next(at),
                // The arguments are complete: a missing marker does not undo the call.
                Outcome::Fail if self.started => {
                    self.phase = Phase::Call(self.shape().call.len());
                    Outcome::On
                }
                Outcome::Fail => self.no_further(),
                other => other,
            },
            Piece::Name | Piece::NumberedName | Piece::Id => self.word(piece, at, buf),
            Piece::Json => self.json(at, buf, calls),
            Piece::Envelope => self.envelope(at, buf, calls),
            Piece::Markup(markup) => self.markup(markup, at, buf, calls),
            Piece::Literal(dialect) => {
                let start = buf.len() - buf[self.at..].trim_start().len();
                if !matches!(self.scan, PieceScan::Literal(_)) {
                    self.scan = PieceScan::Literal(CallEnd::default());
                }
                let PieceScan::Literal(end) = &mut self.scan else { return Outcome::Fail };
                match end.find(&buf[start..], *dialect) {
                    End::More => Outcome::More,
                    End::Never => self.no_further(),
                    End::At(length) => {
                        let Some((name, arguments)) = translate(&buf[start..start + length], *dialect) else {
                            return self.no_further();
                        };
                        self.name = Some(name);
                        self.at = start + length;
                        if !self.start(calls) {
                            return self.no_further();
                        }
                        calls.arguments(&arguments);
                        self.next(at)
                    }
                }
            }
        }
    }

    fn word(&mut self, piece: &Piece, at: usize, buf: &str) -> Outcome {
        let rest = &buf[self.at..];
        let item = rest.trim_start();
        let blank = rest.len() - item.len();
        let length = item.bytes().position(|byte| !is_name_byte(byte)).unwrap_or(item.len());
        if blank > BLANK_MAX || length > NAME_MAX {
            return self.no_further();
        }
        if length == item.len() {
            return Outcome::More;
        }
        let word = &item[..length];
        let name = match piece {
            Piece::NumberedName => {
                let name = word.strip_prefix("functions.").unwrap_or(word);
                name.rsplit_once(':').map_or(name, |(name, _)| name)
            }
            _ => word,
        };
        if name.is_empty() {
            return self.no_further();
        }
        match piece {
            Piece::Name => self.name = Some(name.to_owned()),
            Piece::Id => self.id = Some(word.to_owned()),
            _ => (self.name, self.id) = (Some(name.to_owned()), Some(word.to_owned())),
        }
        self.at += blank + length;
        self.next(at)
    }

    /// From here on it is a call. False when it is none.
    fn start(&mut self, calls: &mut Calls<'_>) -> bool {
        let Some(name) = self.name.take() else { return false };
        if self.at > HELD_MAX || (self.shape().bare && !calls.functions().has(&name)) {
            return false;
        }
        calls.start(name, self.id.take());
        self.started = true;
        true
    }

    fn json(&mut self, at: usize, buf: &mut String, calls: &mut Calls<'_>) -> Outcome {
        if !self.started {
            let rest = &buf[self.at..];
            let item = rest.trim_start();
            let blank = rest.len() - item.len();
            match item.as_bytes().first() {
                None if blank <= BLANK_MAX => return Outcome::More,
                Some(b'{') if blank <= BLANK_MAX => self.at += blank,
                _ => return self.no_further(),
            }
            if !self.start(calls) {
                return self.no_further();
            }
            self.take(buf);
            self.scan = PieceScan::Json(JsonScanner::default());
        }
        let PieceScan::Json(scanner) = &mut self.scan else { return Outcome::Fail };
        let streamed = stream(scanner, buf, calls);
        match streamed {
            Streamed::More => Outcome::More,
            Streamed::Complete => self.next(at),
            Streamed::Broken => {
                self.scan = PieceScan::Raw;
                Outcome::On
            }
        }
    }

    fn envelope(&mut self, at: usize, buf: &mut String, calls: &mut Calls<'_>) -> Outcome {
        if let PieceScan::Fresh = self.scan {
            self.scan = PieceScan::Envelope(Envelope::new(self.shape().bare), None);
        }
        let PieceScan::Envelope(envelope, streaming) = &mut self.scan else { return Outcome::Fail };
        if let Some(scanner) = streaming {
            match stream(scanner, buf, calls) {
                Streamed::More => return Outcome::More,
                Streamed::Complete => *streaming = None,
                Streamed::Broken => self.scan = PieceScan::Raw,
            }
            return Outcome::On;
        }
        let mut progress = envelope.step(buf, &mut self.at);
        if self.started && self.at > HELD_MAX {
            progress = envelope::Progress::Fail;
        }
        match progress {
            envelope::Progress::More => Outcome::More,
            envelope::Progress::Fail if self.started => {
                // The call has all it needs; what follows is no part of it.
                self.at = 0;
                self.next(at)
            }
            envelope::Progress::Fail => self.no_further(),
            envelope::Progress::Stream => {
                *streaming = Some(JsonScanner::default());
                (self.name, self.id) = (envelope.name.clone(), envelope.id.clone());
                if !self.start(calls) {
                    return self.no_further();
                }
                self.take(buf);
                Outcome::On
            }
            envelope::Progress::Done(None) => self.next(at),
            envelope::Progress::Done(Some(arguments)) => {
                (self.name, self.id) = (envelope.name.clone(), envelope.id.clone());
                if !self.start(calls) {
                    return self.no_further();
                }
                calls.arguments(&arguments);
                self.take(buf);
                self.next(at)
            }
        }
    }

    fn markup(
        &mut self,
        markup: &'static Markup,
        at: usize,
        buf: &mut String,
        calls: &mut Calls<'_>,
    ) -> Outcome {
        if !self.started {
            let rest = &buf[self.at..];
            let item = rest.trim_start();
            let blank = rest.len() - item.len();
            if blank > BLANK_MAX {
                return self.no_further();
            }
            let mut marks = [markup.open, markup.end].into_iter();
            if !marks.clone().any(|mark| item.starts_with(mark)) {
                return match marks.any(|mark| mark.starts_with(item)) {
                    true => Outcome::More,
                    false => self.no_further(),
                };
            }
            if !self.start(calls) {
                return self.no_further();
            }
            self.take(buf);
            self.scan = PieceScan::Markup(markup, MarkupReader::new());
        }
        let PieceScan::Markup(_, reader) = &mut self.scan else { return Outcome::Fail };
        let (mut used, mut out) = (0, String::new());
        let types = (calls.functions(), calls.name());
        let progress = reader.step(markup, buf, types, &mut used, &mut out);
        calls.arguments(&out);
        buf.drain(..used);
        match progress {
            markup::MarkupProgress::More => Outcome::More,
            markup::MarkupProgress::Done => self.next(at),
        }
    }

    /// Broken arguments go on until the marker that would have ended them.
    fn raw(&mut self, at: usize, buf: &mut String, calls: &mut Calls<'_>) -> Outcome {
        let shape = self.shape();
        let lits = shape.call.iter().enumerate().skip(at + 1).filter_map(|(index, piece)| match piece {
            Piece::Lit(text) => Some((index, *text)),
            _ => None,
        });
        let close = shape.close.first().map(|close| (shape.call.len(), *close));
        // A bracket is no marker: it may be part of the text.
        let end = lits.chain(close).chain([(shape.call.len(), shape.tail)]).find(|(_, text)| text.len() > 1);
        let Some((index, marker)) = end else {
            calls.arguments(buf);
            buf.clear();
            return Outcome::More;
        };
        if let Some(found) = buf.find(marker) {
            calls.arguments(&buf[..found]);
            buf.drain(..found);
            self.scan = PieceScan::Fresh;
            self.phase = Phase::Call(index);
            return Outcome::On;
        }
        let certain = buf.len() - partial_suffix(buf, marker);
        calls.arguments(&buf[..certain]);
        buf.drain(..certain);
        Outcome::More
    }

    /// The text ends while a call is being read. What belongs to its arguments is appended; a call that has them all
    /// ends. False when one was left unfinished. What is left in the buffer is text.
    pub fn cut_off(&mut self, buf: &mut String, calls: &mut Calls<'_>) -> bool {
        if !self.started {
            return true;
        }
        let complete = match &mut self.scan {
            PieceScan::Raw => {
                calls.arguments(buf);
                buf.clear();
                false
            }
            PieceScan::Markup(markup, reader) => {
                let mut out = String::new();
                let used = reader.cut_off(markup, buf, &mut out);
                calls.arguments(&out);
                buf.drain(..used);
                false
            }
            PieceScan::Json(_) | PieceScan::Envelope(_, Some(_)) => false,
            PieceScan::Fresh | PieceScan::Envelope(_, None) | PieceScan::Literal(_) => true,
        };
        if complete {
            calls.end();
        }
        complete
    }
}

enum Streamed {
    More,
    Complete,
    Broken,
}

/// Moves arguments from the buffer to the call, up to the end of their object.
fn stream(scanner: &mut JsonScanner, buf: &mut String, calls: &mut Calls<'_>) -> Streamed {
    let mut out = String::with_capacity(buf.len());
    let mut copied = 0;
    let mut result = Streamed::More;
    let mut used = buf.len();
    for (at, byte) in buf.bytes().enumerate() {
        match scanner.feed(byte) {
            Feed::Part => {}
            Feed::Control => {
                out.push_str(&buf[copied..at]);
                escape_into(&buf[at..=at], &mut out);
                copied = at + 1;
            }
            Feed::Last => {
                (result, used) = (Streamed::Complete, at + 1);
                break;
            }
            Feed::After | Feed::Bad => {
                (result, used) = (Streamed::Broken, buf.floor_char_boundary(at));
                break;
            }
        }
    }
    out.push_str(&buf[copied..used]);
    buf.drain(..used);
    calls.arguments(&out);
    result
}
