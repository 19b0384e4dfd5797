//! Sentencepiece's tokenizers. BPE: neighbours are merged into the token of the highest score until nothing can be merged; of unigram models the
//! best way to write a text ([`unigram`](crate::unigram)).
//!
//! The algorithm of BPE is sentencepiece's (`bpe_model.cc`) as llama.cpp applies it (`llm_tokenizer_spm`): ties go to the left;
//! what is no token in the end becomes bytes, or `<unk>`. Texts are not cut into words. Own code, because the library's BPE
//! ranks *pairs*, and two ways to make the same token must rank equal here.
//!
//! Owns: the merging. Must never: know which file a vocabulary is from (`gguf`, `sentencepiece`).
//!
//! Cost: O(n log n) for n characters of text between special tokens.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::ops::Range;

use crate::added::{AddedTokens, parts};
use crate::normalizer::{Normalizer, PartStart};
use crate::token_cache::Part;
use crate::unigram::Unigram;
use crate::work;

/// What stands for a space.
pub(crate) const SPACE: &str = "▁";

/// Where a space is put before what is tokenized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpacePrefix {
    Never,
    /// Where a text begins.
    First,
    /// Also behind each added token.
    Always,
}

/// What [`Pieces`] are made of. The lists are by id and of one length.
pub(crate) struct PiecesParts {
    /// All different, but for empty ones, which are no tokens of any text.
    pub tokens: Vec<String>,
    /// None is NaN.
    pub scores: Vec<f32>,
    /// `None`: neighbours are merged.
    pub unigram: Option<Unigram>,
    /// Whether text may become this token: control tokens and bytes are never spelled out.
    pub is_text: Vec<bool>,
    /// Of those, the ones that are merged on the way to others only, and taken apart again if they are left.
    pub unused: HashSet<u32>,
    pub unk: Option<u32>,
    /// Whether what is no token becomes its bytes (`<0x0A>`), if there are those.
    pub byte_fallback: bool,
    /// Whether neighbours that are no tokens are one `<unk>`.
    pub fuses_unk: bool,
    pub added: AddedTokens,
    /// Of each part between added tokens, by itself.
    pub normalizer: Normalizer,
    pub prefix: SpacePrefix,
}

pub(crate) struct Pieces {
    ids: HashMap<String, u32>,
    bytes: [Option<u32>; 256],
    parts: PiecesParts,
}

impl Pieces {
    pub(crate) fn new(parts: PiecesParts) -> Self {
        let texts = (0..).zip(&parts.tokens).filter(|(_, token)| !token.is_empty());
        let ids: HashMap<String, u32> = texts.map(|(id, token)| (token.clone(), id)).collect();
        let mut bytes = [None; 256];
        for (byte, id) in bytes.iter_mut().enumerate().filter(|_| parts.byte_fallback) {
            *id = ids.get(&format!("<0x{byte:02X}>")).copied();
        }
        Self { ids, bytes, parts }
    }

    /// A space is put before a text.
    pub(crate) fn has_space_prefix(&self) -> bool {
        self.parts.prefix != SpacePrefix::Never
    }

    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    pub(crate) fn token(&self, id: u32) -> Option<&str> {
        self.parts.tokens.get(id as usize).map(String::as_str)
    }

    /// By id.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = &str> {
        self.parts.tokens.iter().map(String::as_str)
    }

    /// The text's parts by the added tokens in it, of which none lies across one of `breaks`.
    pub(crate) fn parts(&self, text: &str, breaks: &[usize]) -> Vec<Part> {
        parts(&self.parts.added.find(text, breaks), text.len())
    }

    /// The part of `text` in `range`, which is no added token.
    pub(crate) fn encode_part(&self, text: &str, range: Range<usize>, out: &mut Vec<u32>) {
        let escaped = self.normalized(&text[range.clone()], range.start == 0);
        let from = out.len();
        if let Some(unigram) = &self.parts.unigram {
            for (range, id) in unigram.best(&self.parts.tokens, &self.parts.scores, &escaped) {
                match id {
                    Some(id) => out.push(id),
                    None => self.push_unknown(&escaped[range], from, out),
                }
            }
            return;
        }
        let mut merging = Merging::new(self, &escaped);
        merging.run();
        for symbol in merging.symbols.iter().filter(|symbol| symbol.end > symbol.start) {
            self.push_used(&escaped[symbol.start..symbol.end], &merging.halves, from, out);
        }
    }

    fn normalized(&self, part: &str, is_first: bool) -> String {
        work::add(part.len());
        let normalizer = &self.parts.normalizer;
        match self.parts.prefix {
            SpacePrefix::Never => normalizer.normalize(part, PartStart::AsItIs),
            SpacePrefix::Always => normalizer.normalize(part, PartStart::Prefixed),
            // As transformers: the prefix is normalized with the text, and a part that begins with a space keeps one.
            SpacePrefix::First => {
                let prefix = if is_first { SPACE } else { "" };
                let part = format!("{prefix}{}", part.replace(SPACE, " "));
                let has_space = part.starts_with(SPACE) || part.starts_with(' ');
                normalizer.normalize(&part, if has_space { PartStart::Continued } else { PartStart::AsItIs })
            }
        }
    }

    fn text_token(&self, text: &str) -> Option<u32> {
        self.id(text).filter(|id| self.parts.is_text[*id as usize])
    }

    /// A symbol, which is taken apart while it is an unused token. `halves`: where those are taken apart; `from`: where the part's
    /// ids begin.
    fn push_used(&self, symbol: &str, halves: &HashMap<&str, usize>, from: usize, out: &mut Vec<u32>) {
        let mut text = symbol;
        let mut behind: Vec<&str> = Vec::new();
        loop {
            while let Some(at) = halves.get(text) {
                let (left, right) = text.split_at(*at);
                behind.push(right);
                text = left;
            }
            self.push(text, from, out);
            let Some(next) = behind.pop() else { return };
            text = next;
        }
    }

    /// A symbol as its token, else as what is none.
    fn push(&self, text: &str, from: usize, out: &mut Vec<u32>) {
        match self.text_token(text) {
            Some(id) => out.push(id),
            None => self.push_unknown(text, from, out),
        }
    }

    /// What is no token: as bytes, else as `<unk>`.
    fn push_unknown(&self, text: &str, from: usize, out: &mut Vec<u32>) {
        let bytes: Option<Vec<u32>> = text.bytes().map(|byte| self.bytes[usize::from(byte)]).collect();
        match (bytes, self.parts.unk) {
            (Some(bytes), _) => out.extend(bytes),
            (None, Some(unk)) if self.parts.fuses_unk && out[from..].last() == Some(&unk) => {}
            (None, unk) => out.extend(unk),
        }
    }
}

/// A run of the text that is, or may become, a token; empty once merged into its left neighbour.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    end: usize,
    previous: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

/// Two neighbours are looked up by their text, and may be put into the queue and taken out.
const PAIR_STEPS: usize = 4;

/// Two neighbours that make a token.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both, to notice that one has changed since.
    length: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

struct Merging<'a> {
    pieces: &'a Pieces,
    text: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Pair>,
    /// By the text of an unused token, the length of its left half, as it was proposed last.
    halves: HashMap<&'a str, usize>,
}

impl<'a> Merging<'a> {
    fn new(pieces: &'a Pieces, text: &'a str) -> Self {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, char))| Symbol {
                start,
                end: start + char.len_utf8(),
                previous: index.wrapping_sub(1),
                next: index + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        let queue = BinaryHeap::with_capacity(symbols.len());
        let mut merging = Self { pieces, text, queue, symbols, halves: HashMap::new() };
        for right in 1..merging.symbols.len() {
            merging.propose(right - 1, right);
        }
        merging
    }

    fn propose(&mut self, left: usize, right: usize) {
        if left == NONE || right == NONE {
            return;
        }
        let (start, end) = (self.symbols[left].start, self.symbols[right].end);
        work::add(PAIR_STEPS + end - start);
        let text: &'a str = &self.text[start..end];
        if let Some(id) = self.pieces.text_token(text) {
            if self.pieces.parts.unused.contains(&id) {
                self.halves.insert(text, self.symbols[left].end - start);
            }
            // -0.0 and 0.0 are one score.
            let score = self.pieces.parts.scores[id as usize] + 0.0;
            self.queue.push(Pair { score, left, right, length: end - start });
        }
    }

    fn run(&mut self) {
        while let Some(pair) = self.queue.pop() {
            let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
            let gone = |symbol: Symbol| symbol.start == symbol.end;
            if gone(left) || gone(right) || right.end - left.start != pair.length {
                continue;
            }
            self.symbols[pair.left].end = right.end;
            self.symbols[pair.left].next = right.next;
            self.symbols[pair.right].end = right.start;
            if right.next != NONE {
                self.symbols[right.next].previous = pair.left;
            }
            self.propose(left.previous, pair.left);
            self.propose(pair.left, right.next);
        }
    }
}
