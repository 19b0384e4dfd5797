//! Sentencepiece's BPE: neighbours are merged into the token of the highest score until nothing can be merged.
//!
//! The algorithm is sentencepiece's (`bpe_model.cc`) as llama.cpp applies it (`llm_tokenizer_spm`): ties go to the left;
//! what is no token in the end becomes bytes, or `<unk>`. Texts are not cut into words. Own code, because the library's BPE
//! ranks *pairs*, and two ways to make the same token must rank equal here.
//!
//! Cost: O(n log n) for n characters of text between special tokens.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use folio_model::checkpoint::gguf::{TokenKind, Vocabulary};

use super::{added, strips_right, texts};
use crate::added::{Added, AddedTokens, parts};
use crate::token_cache::Part;
use crate::work;

/// What stands for a space.
const SPACE: &str = "▁";

pub(crate) struct Pieces {
    ids: HashMap<String, u32>,
    tokens: Vec<String>,
    scores: Vec<f32>,
    /// Whether text may become this token: control tokens and bytes are never spelled out.
    is_text: Vec<bool>,
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
    added: AddedTokens,
    space_prefix: bool,
}

impl Pieces {
    pub(super) fn new(vocabulary: &Vocabulary<'_>) -> Result<Self, String> {
        let Some(scores) = &vocabulary.scores else {
            return Err("it has no `tokenizer.ggml.scores`".to_owned());
        };
        if vocabulary.remove_extra_whitespaces == Some(true) {
            return Err(
                "it removes repeated spaces (`tokenizer.ggml.remove_extra_whitespaces`), which is not supported"
                    .to_owned(),
            );
        }
        if scores.iter().any(|score| score.is_nan()) {
            return Err("one of its scores is not a number".to_owned());
        }
        let tokens: Vec<String> = vocabulary.tokens.iter().map(|token| (*token).to_owned()).collect();
        let ids: HashMap<String, u32> = texts(vocabulary).map(|(id, token)| (token.to_owned(), id)).collect();
        let mut bytes = [None; 256];
        for (byte, id) in bytes.iter_mut().enumerate() {
            *id = ids.get(&format!("<0x{byte:02X}>")).copied();
        }
        let text =
            |kind: &TokenKind| matches!(kind, TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused);
        Ok(Self {
            scores: scores.iter().map(|score| *score as f32).collect(),
            is_text: vocabulary.kinds.iter().map(text).collect(),
            bytes,
            unk: vocabulary.ids.unk,
            added: added_tokens(vocabulary)?,
            space_prefix: vocabulary.add_space_prefix.unwrap_or(true),
            ids,
            tokens,
        })
    }

    /// A space is put before a text, and before what follows a special token.
    pub(super) fn has_space_prefix(&self) -> bool {
        self.space_prefix
    }

    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    pub(crate) fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    /// The text's parts by the added tokens in it, of which none lies across one of `breaks`.
    pub(crate) fn parts(&self, text: &str, breaks: &[usize]) -> Vec<Part> {
        parts(&self.added.find(text, breaks), text.len())
    }

    /// A part that is no added token.
    pub(crate) fn encode_part(&self, text: &str, out: &mut Vec<u32>) {
        work::add(text.len());
        let mut escaped = String::with_capacity(text.len() + text.len() / 4 + SPACE.len());
        if self.space_prefix {
            escaped.push_str(SPACE);
        }
        escaped.extend(text.split_inclusive(' ').flat_map(|word| match word.strip_suffix(' ') {
            Some(word) => [word, SPACE],
            None => [word, ""],
        }));
        let mut merging = Merging::new(self, &escaped);
        merging.run();
        for symbol in merging.symbols.iter().filter(|symbol| symbol.end > symbol.start) {
            self.push(&escaped[symbol.start..symbol.end], out);
        }
    }

    fn text_token(&self, text: &str) -> Option<u32> {
        self.id(text).filter(|id| self.is_text[*id as usize])
    }

    /// A symbol as its token, else as bytes, else as `<unk>`.
    fn push(&self, text: &str, out: &mut Vec<u32>) {
        if let Some(id) = self.text_token(text) {
            return out.push(id);
        }
        let bytes: Option<Vec<u32>> = text.bytes().map(|byte| self.bytes[usize::from(byte)]).collect();
        match bytes {
            Some(bytes) => out.extend(bytes),
            None => out.extend(self.unk),
        }
    }
}

/// Tokens that are looked for in the text as it stands; the leftmost wins, then the longest.
fn added_tokens(vocabulary: &Vocabulary<'_>) -> Result<AddedTokens, String> {
    AddedTokens::new(added(vocabulary).map(|(id, text, special)| {
        let strips_right = special && strips_right(vocabulary, text);
        (text.to_owned(), Added { id, strips_right, ..Added::default() })
    }))
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
        let mut merging = Self { pieces, text, queue: BinaryHeap::with_capacity(symbols.len()), symbols };
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
        if let Some(id) = self.pieces.text_token(&self.text[start..end]) {
            // -0.0 and 0.0 are one score.
            let score = self.pieces.scores[id as usize] + 0.0;
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
