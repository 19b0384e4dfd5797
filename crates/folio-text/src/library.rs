//! Hugging Face's tokenizers, with our own search for added tokens.
//!
//! The library's search is quadratic for tokens that ask for white space or words around them, and it cannot be told
//! where a token may not be. Everything else is the library's: normalizer, pre-tokenizer, model, post-processor, in the
//! order in which its `encode_fast` applies them. Invariant: without breaks the ids are those of `encode_fast`.
//!
//! Cost: linear in the text for the search; what the library needs besides.

use tokenizers::normalizer::Range;
use tokenizers::{
    Encoding, Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Result,
    Token, Tokenizer,
};

use crate::added::{Added, AddedTokens, Found, parts};

pub(crate) struct Library {
    pub tokenizer: Tokenizer,
    /// Found in the text as it stands.
    verbatim: AddedTokens,
    /// Found in the normalized text between those.
    normalized: AddedTokens,
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
            tokenizer,
        })
    }

    /// `breaks`: the text is a prompt, and there no token may be.
    pub(crate) fn encode(
        &self,
        text: &str,
        breaks: Option<&[usize]>,
        add_special_tokens: bool,
    ) -> Result<Encoding> {
        let tokenizer = &self.tokenizer;
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, text| {
            let found = self.verbatim.find(text.get(), breaks.unwrap_or_default());
            Ok(split(&text, &found))
        })?;
        pieces.split(|_, mut text| {
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut text)?;
            }
            let found = match breaks {
                None => self.normalized.find_accepted(text.get(), |_| true),
                Some(breaks) => {
                    self.normalized.find_accepted(text.get(), |found| self.stands(&text, found, breaks))
                }
            };
            Ok(split(&text, &found))
        })?;
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        tokenizer.get_model().tokenize_in_pretokenized(&mut pieces, None)?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
        tokenizer.post_process(encoding, None, add_special_tokens)
    }

    /// Whether what was found in a normalized text is written out in the original, without a break.
    fn stands(&self, text: &NormalizedString, found: &Found, breaks: &[usize]) -> bool {
        let Some(original) = text.convert_offsets(Range::Normalized(found.range.clone())) else {
            return false;
        };
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let written = text.get_original().get(original.clone());
        if written.is_none() || written != added.get(&found.id).map(|token| token.content.as_str()) {
            return false;
        }
        let shift = text.offsets_original().0;
        let next = breaks.partition_point(|at| *at <= shift + original.start);
        breaks.get(next).is_none_or(|at| *at >= shift + original.end)
    }
}

/// The text cut where something was found.
fn split(text: &NormalizedString, found: &[Found]) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    if found.is_empty() {
        return vec![(text.clone(), None)];
    }
    let part = |(range, id): (std::ops::Range<usize>, Option<u32>)| {
        let part = text.slice(Range::Normalized(range))?;
        let token = id.map(|id| {
            let value = part.get().to_owned();
            let length = value.len();
            vec![Token::new(id, value, (0, length))]
        });
        Some((part, token))
    };
    parts(found, text.get().len()).into_iter().filter_map(part).collect()
}
