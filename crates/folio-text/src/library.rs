//! Hugging Face's tokenizers, with our own search for added tokens.
//!
//! The library's search is quadratic for tokens that ask for white space or words around them, and it cannot be told
//! where a token may not be. Everything else is the library's: normalizer, pre-tokenizer, model, post-processor, in the
//! order in which its `encode_fast` applies them, for each part of a text between added tokens by itself. Invariant: without breaks the ids are
//! those of `encode_fast`. Where a normalizer changes nothing and words are cut by expressions and written in the byte alphabet
//! (GPT-2's heirs), that is done here: the library keeps track of where each byte came from, which costs more than the rest together.
//!
//! Cost: linear in the text for the search; what the library needs besides.

use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;
use tokenizers::normalizer::Range as NormalizedRange;
use tokenizers::pre_tokenizers::split::Split;
use tokenizers::{
    Encoding, Model, NormalizedString, Normalizer, NormalizerWrapper, OffsetType, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper, Result, SplitDelimiterBehavior, Token, Tokenizer,
};

use crate::added::{Added, AddedTokens, FoundToken, parts};
use crate::charsmap::Charsmap;
use crate::decoder::byte_alphabet;
use crate::token_cache::Part;
use crate::tokenizer::TOKENIZE_STEPS;
use crate::work;

pub(crate) struct Library {
    pub tokenizer: Tokenizer,
    /// Found in the text as it stands.
    verbatim: AddedTokens,
    /// Found in the normalized text between those.
    normalized: AddedTokens,
    /// What the post-processor puts before and behind a text, without and with special tokens.
    around: [(Vec<u32>, Vec<u32>); 2],
    words: Option<Words>,
}

/// Each is a call within that of the one before. Models have up to four.
const CUTS_MAX: usize = 16;

/// How a text becomes words of a byte-level vocabulary.
struct Words {
    /// Each cuts what the ones before it left.
    cuts: Vec<Split>,
    /// The character that stands for a byte.
    alphabet: [char; 256],
}

/// Of a tokenizer.json's `normalizer` what the library would panic on, when it reads the file or a text. An error is a sentence about the file.
pub(crate) fn check_normalizer(normalizer: &Value) -> std::result::Result<(), String> {
    match normalizer {
        Value::Array(values) => values.iter().try_for_each(check_normalizer),
        Value::Object(fields) => {
            match fields.get("type") {
                Some(Value::String(kind)) if kind == "Precompiled" => {
                    let map = fields.get("precompiled_charsmap").and_then(Value::as_str);
                    check_charsmap(map).map_err(|what| format!("its `precompiled_charsmap` {what}"))?;
                }
                None | Some(Value::String(_)) => {}
                Some(_) => return Err("a `type` in its `normalizer` is no text".to_owned()),
            }
            fields.values().try_for_each(check_normalizer)
        }
        _ => Ok(()),
    }
}

fn check_charsmap(base64: Option<&str>) -> std::result::Result<(), String> {
    let map = base64.and_then(|map| BASE64.decode(map).ok()).ok_or("is no text in base64")?;
    Charsmap::read(&map).map(drop)
}

impl Library {
    pub(crate) fn new(tokenizer: Tokenizer) -> std::result::Result<Self, String> {
        let added = tokenizer.get_added_vocabulary();
        let mut lists = [Vec::new(), Vec::new()];
        for (&id, token) in added.get_added_tokens_decoder() {
            let wanted = Added {
                id,
                single_word: token.single_word,
                strips_left: token.lstrip,
                strips_right: token.rstrip,
            };
            // Of a normalized token, the library's text for decoding is the normalized one.
            let text = match token.normalized {
                true => added.simple_id_to_token(id),
                false => Some(token.content.clone()),
            };
            lists[usize::from(token.normalized)].extend(text.map(|text| (text, wanted)));
        }
        let [verbatim, normalized] = lists;
        Ok(Self {
            verbatim: AddedTokens::new(verbatim)?,
            normalized: AddedTokens::new(normalized)?,
            around: [around(&tokenizer, false)?, around(&tokenizer, true)?],
            words: tokenizer.get_pre_tokenizer().and_then(Words::of),
            tokenizer,
        })
    }

    /// The text's parts by the added tokens that are found in it as it stands.
    pub(crate) fn parts(&self, text: &str, breaks: Option<&[usize]>) -> Vec<Part> {
        parts(&self.verbatim.find(text, breaks.unwrap_or_default()), text.len())
    }

    /// What comes before and behind a text.
    pub(crate) fn around(&self, add_special_tokens: bool) -> &(Vec<u32>, Vec<u32>) {
        &self.around[usize::from(add_special_tokens)]
    }

    /// A part of `text` that is no added token. `breaks` of the text: it is a prompt, and there no token may be.
    pub(crate) fn encode_part(
        &self,
        text: &str,
        part: Range<usize>,
        breaks: Option<&[usize]>,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let tokenizer = &self.tokenizer;
        if let Some(words) = &self.words {
            let part = &text[part.clone()];
            let normal = match tokenizer.get_normalizer() {
                None => true,
                Some(NormalizerWrapper::NFC(_)) => part.is_ascii(),
                Some(_) => false,
            };
            if normal && self.normalized.find_accepted(part, |_| true).is_empty() {
                return words.encode(part, tokenizer, out);
            }
        }
        work::add(part.len() * TOKENIZE_STEPS);
        // Some pre-tokenizers ask whether a part begins the text: what does not is a slice, as it would be of the whole.
        let before = text[..part.start].chars().next_back().map_or(0, char::len_utf8);
        let from = part.start - before;
        let sliced =
            NormalizedString::from(&text[from..part.end]).slice(NormalizedRange::Normalized(before..));
        let mut pieces = PreTokenizedString::from(sliced.ok_or("a part ends inside a character")?);
        pieces.split(|_, mut text| {
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut text)?;
            }
            let found = match breaks {
                None => self.normalized.find_accepted(text.get(), |_| true),
                Some(breaks) => {
                    self.normalized.find_accepted(text.get(), |found| self.stands(&text, found, from, breaks))
                }
            };
            Ok(split(&text, &found))
        })?;
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        tokenizer.get_model().tokenize_in_pretokenized(&mut pieces, None)?;
        out.extend_from_slice(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids());
        Ok(())
    }

    /// Whether what was found in a normalized text is written out in the original, without a break.
    /// `from`: where `text` counts from.
    fn stands(&self, text: &NormalizedString, found: &FoundToken, from: usize, breaks: &[usize]) -> bool {
        let Some(original) = text.convert_offsets(NormalizedRange::Normalized(found.range.clone())) else {
            return false;
        };
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let written = text.get_original().get(original.clone());
        if written.is_none() || written != added.get(&found.id).map(|token| token.content.as_str()) {
            return false;
        }
        let shift = from + text.offsets_original().0;
        let next = breaks.partition_point(|at| *at <= shift + original.start);
        breaks.get(next).is_none_or(|at| *at >= shift + original.end)
    }
}

impl Words {
    /// `None`: the library's pre-tokenizer does something else.
    fn of(pre_tokenizer: &PreTokenizerWrapper) -> Option<Self> {
        let PreTokenizerWrapper::Sequence(sequence) = pre_tokenizer else { return None };
        let (last, cuts) = sequence.as_ref().split_last()?;
        let PreTokenizerWrapper::ByteLevel(bytes) = last else { return None };
        if bytes.add_prefix_space || bytes.use_regex || cuts.len() > CUTS_MAX {
            return None;
        }
        let cut = |cut: &PreTokenizerWrapper| match cut {
            PreTokenizerWrapper::Split(cut)
                if cut.behavior == SplitDelimiterBehavior::Isolated && !cut.invert =>
            {
                Some(cut.clone())
            }
            _ => None,
        };
        let cuts = cuts.iter().map(cut).collect::<Option<_>>()?;
        let mut alphabet = ['\0'; 256];
        byte_alphabet().for_each(|(character, byte)| alphabet[usize::from(byte)] = character);
        Some(Self { cuts, alphabet })
    }

    /// Word by word as they are found: of a long text nothing takes long before its work is counted.
    fn encode(&self, text: &str, tokenizer: &Tokenizer, out: &mut Vec<u32>) -> Result<()> {
        let mut written = String::new();
        cut(&self.cuts, text, &mut |word| {
            work::add(word.len() * TOKENIZE_STEPS);
            written.clear();
            written.extend(word.bytes().map(|byte| self.alphabet[usize::from(byte)]));
            out.extend(tokenizer.get_model().tokenize(&written)?.iter().map(|token| token.id));
            Ok(())
        })
    }
}

/// Gives `each` the words that `cuts` make of a text, in their order; none is empty.
fn cut(cuts: &[Split], text: &str, each: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((first, others)) = cuts.split_first() else { return each(text) };
    let mut end = 0;
    for (from, to) in first.regex.find_iter(text) {
        cut(others, &text[end..from], each)?;
        cut(others, &text[from..to], each)?;
        end = to;
    }
    cut(others, &text[end..], each)
}

/// What the post-processor puts around a text, seen by two ids that no vocabulary has.
fn around(tokenizer: &Tokenizer, special: bool) -> std::result::Result<(Vec<u32>, Vec<u32>), String> {
    let inner = [u32::MAX - 1, u32::MAX];
    let text = inner.map(|id| Token::new(id, String::new(), (0, 0))).to_vec();
    let processed = tokenizer.post_process(Encoding::from_tokens(text, 0), None, special);
    let processed = processed.map_err(|error| error.to_string())?;
    let ids = processed.get_ids();
    let at = ids.windows(2).position(|pair| pair == inner);
    let outside = at.map(|at| (ids[..at].to_vec(), ids[at + 2..].to_vec()));
    let outside =
        outside.filter(|(before, behind)| !before.iter().chain(behind).any(|id| inner.contains(id)));
    outside.ok_or_else(|| "its post-processor does more to a text than put tokens around it".to_owned())
}

/// The text cut where something was found.
fn split(text: &NormalizedString, found: &[FoundToken]) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    if found.is_empty() {
        return vec![(text.clone(), None)];
    }
    let part = |(range, id): Part| {
        let part = text.slice(NormalizedRange::Normalized(range))?;
        let token = id.map(|id| {
            let value = part.get().to_owned();
            let length = value.len();
            vec![Token::new(id, value, (0, length))]
        });
        Some((part, token))
    };
    parts(found, text.get().len()).into_iter().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_models_words_are_cut_here() {
        let file = include_bytes!("../../folio/assets/demo/tokenizer.json");
        let library = Library::new(Tokenizer::from_bytes(file).expect("loads")).expect("is known");
        assert!(library.words.is_some());
        let text = "Lily's 12 cats — naïve, 日本!\n\n  <tool";
        let mut ids = Vec::new();
        library.encode_part(text, 0..text.len(), None, &mut ids).expect("encodes");
        assert_eq!(ids, library.tokenizer.encode_fast(text, false).expect("encodes").get_ids());
    }
}
