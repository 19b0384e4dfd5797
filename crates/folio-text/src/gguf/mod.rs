//! A tokenizer from the vocabulary inside a GGUF file.
//!
//! Owns: what `tokenizer.ggml.model` and `tokenizer.ggml.pre` mean. Three kinds are read: `gpt2`, byte-level BPE with a named
//! pre-tokenizer, and `gemma4`, BPE over the characters of whole texts, which become tokenizers of the library; and `llama`,
//! sentencepiece's BPE by scores, which is [`Pieces`]. Must never: guess a pre-tokenizer: a wrong one splits words otherwise than the model was trained with, and
//! the answers are only a little worse, so nobody notices.
//!
//! Control tokens written out in a text are recognized, as with tokenizer.json.

mod pre;

use std::collections::HashSet;

use folio_model::checkpoint::gguf::{TokenKind, Vocabulary};
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::Replace;
use tokenizers::{AddedToken, Tokenizer as Library};

use crate::added::{Added, AddedTokens};
use crate::error::TextError;
use crate::normalizer::Normalizer;
use crate::pieces::{Pieces, PiecesParts, SpacePrefix};
use crate::tokenizer::{Encoder, SpecialToken, SpecialTokens, Tokenizer, TokenizerParts};
pub(crate) use pre::KIMI;

/// Builds the tokenizer of a vocabulary; `file` is for messages.
pub(crate) fn tokenizer(file: &str, vocabulary: &Vocabulary<'_>) -> Result<Tokenizer, TextError> {
    let bad = |reason: String| TextError::BadTokenizer { file: file.to_owned(), reason };
    let (encoder, decoder, add_bos) = match vocabulary.model {
        "gpt2" => {
            let name = vocabulary.pre.filter(|name| *name != "default");
            let Some(name) = name else {
                return Err(bad(
                    "it does not name its pre-tokenizer (`tokenizer.ggml.pre`), as files from before May 2024; convert the model again"
                        .to_owned(),
                ));
            };
            let Some(pre) = pre::find(name) else {
                let known = pre::names().collect::<Vec<_>>().join(", ");
                return Err(bad(format!("its pre-tokenizer `{name}` is not supported; supported: {known}")));
            };
            let library = byte_level(vocabulary, pre).map_err(bad)?;
            let library = crate::library::Library::new(library).map_err(bad)?;
            (Encoder::Library(Box::new(library)), json!({"type": "ByteLevel"}), pre.add_bos)
        }
        "gemma4" => {
            let library = characters(vocabulary).map_err(bad)?;
            let library = crate::library::Library::new(library).map_err(bad)?;
            (Encoder::Library(Box::new(library)), sentencepiece_decoder(false), true)
        }
        "llama" => {
            let pieces = scored(vocabulary).map_err(bad)?;
            let decoder = sentencepiece_decoder(pieces.has_space_prefix());
            (Encoder::Pieces(Box::new(pieces)), decoder, true)
        }
        other => {
            let kind: String = other.chars().take(60).collect();
            return Err(bad(format!(
                "its tokenizer is of kind `{kind}`; supported: gpt2 (byte-level BPE), gemma4 (BPE of characters) and llama (sentencepiece BPE)"
            )));
        }
    };
    let ids = &vocabulary.ids;
    let tokens = vocabulary.tokens.iter().map(|token| Some((*token).to_owned())).collect();
    let special = special_tokens(vocabulary);
    Ok(Tokenizer::from_parts(TokenizerParts {
        encoder,
        decoder: &decoder,
        tokens,
        is_special: (0..)
            .zip(&vocabulary.kinds)
            .map(|(id, kind)| is_special(vocabulary, id, *kind))
            .collect(),
        special,
        forced_bos: ids.bos.filter(|_| vocabulary.add_bos.unwrap_or(add_bos)),
        forced_eos: ids.eos.filter(|_| vocabulary.add_eos.unwrap_or(false)),
    }))
}

/// Tokens that have a text, and their ids.
fn texts<'a>(vocabulary: &'a Vocabulary<'_>) -> impl Iterator<Item = (u32, &'a str)> {
    (0..).zip(vocabulary.tokens.iter().copied()).filter(|(_, token)| !token.is_empty())
}

/// Structure rather than text. Of the "unknown" kind only the one that is used: old files give it to padding as well.
fn is_special(vocabulary: &Vocabulary<'_>, id: u32, kind: TokenKind) -> bool {
    kind == TokenKind::Control || (kind == TokenKind::Unknown && vocabulary.ids.unk == Some(id))
}

/// Tokens that are found in a text before anything else: (id, text, special).
fn added<'a>(vocabulary: &'a Vocabulary<'_>) -> impl Iterator<Item = (u32, &'a str, bool)> {
    texts(vocabulary).filter_map(move |(id, token)| {
        let kind = vocabulary.kinds[id as usize];
        let special = is_special(vocabulary, id, kind);
        (special || kind == TokenKind::UserDefined).then_some((id, token, special))
    })
}

/// Whether white space after a special token belongs to it. Files do not say; Phi-3's tokenizer does so, for all but three.
fn strips_right(vocabulary: &Vocabulary<'_>, token: &str) -> bool {
    vocabulary.architecture == "phi3"
        && vocabulary.model == "llama"
        && !["<unk>", "<s>", "<|endoftext|>"].contains(&token)
}

fn byte_level(vocabulary: &Vocabulary<'_>, pre: &pre::Pre) -> Result<Library, String> {
    let (vocab, pairs) = merges(vocabulary)?;
    let model = BPE::builder().vocab_and_merges(vocab, pairs).ignore_merges(pre.ignore_merges);
    let mut library = Library::new(model.build().map_err(|error| error.to_string())?);
    library.with_pre_tokenizer(Some(pre.build().map_err(|error| error.to_string())?));
    if pre.nfc {
        let result = library.with_normalizer(Some(tokenizers::normalizers::NFC));
        result.map_err(|error| error.to_string())?;
    }
    with_added(vocabulary, library)
}

/// As Gemma 4's tokenizer.json: spaces are written as what stands for them, texts are not cut into words, and a character that is no token
/// becomes its bytes.
fn characters(vocabulary: &Vocabulary<'_>) -> Result<Library, String> {
    let (vocab, pairs) = merges(vocabulary)?;
    let mut model = BPE::builder().vocab_and_merges(vocab, pairs).byte_fallback(true).fuse_unk(true);
    if let Some(unk) = vocabulary.ids.unk {
        model = model.unk_token(vocabulary.tokens[unk as usize].to_owned());
    }
    let mut library = Library::new(model.build().map_err(|error| error.to_string())?);
    let spaces = Replace::new(" ", "▁").map_err(|error| error.to_string())?;
    library.with_normalizer(Some(spaces)).map_err(|error| error.to_string())?;
    with_added(vocabulary, library)
}

/// Sentencepiece's BPE.
fn scored(vocabulary: &Vocabulary<'_>) -> Result<Pieces, String> {
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
    let text =
        |kind: &TokenKind| matches!(kind, TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused);
    let prefix = match vocabulary.add_space_prefix {
        Some(false) => SpacePrefix::Never,
        _ => SpacePrefix::Always,
    };
    Ok(Pieces::new(PiecesParts {
        tokens: vocabulary.tokens.iter().map(|token| (*token).to_owned()).collect(),
        scores: scores.iter().map(|score| *score as f32).collect(),
        unigram: None,
        is_text: vocabulary.kinds.iter().map(text).collect(),
        // As llama.cpp, which tells neither apart.
        unused: HashSet::new(),
        fuses_unk: false,
        unk: vocabulary.ids.unk,
        byte_fallback: true,
        added: scored_added(vocabulary)?,
        normalizer: Normalizer::IDENTITY,
        prefix,
    }))
}

/// Tokens that are looked for in the text as it stands; the leftmost wins, then the longest.
fn scored_added(vocabulary: &Vocabulary<'_>) -> Result<AddedTokens, String> {
    AddedTokens::new(added(vocabulary).map(|(id, text, special)| {
        let strips_right = special && strips_right(vocabulary, text);
        (text.to_owned(), Added { id, strips_right, ..Added::default() })
    }))
}

/// The tokens, and pairs of those that are merged, in this order.
fn merges(vocabulary: &Vocabulary<'_>) -> Result<(Vocab, Merges), String> {
    let Some(merges) = &vocabulary.merges else {
        return Err("it has no `tokenizer.ggml.merges`".to_owned());
    };
    let vocab: Vocab = texts(vocabulary).map(|(id, token)| (token.to_owned(), id)).collect();
    let mut pairs = Vec::with_capacity(merges.len());
    let mut merged = String::new();
    for merge in merges {
        // The first half may itself be a space.
        let first = merge.chars().next().map_or(0, char::len_utf8);
        let Some((left, right)) =
            merge[first..].split_once(' ').map(|(rest, right)| (&merge[..first + rest.len()], right))
        else {
            return Err(format!("its merge {merge:?} is not two tokens"));
        };
        merged.clear();
        merged.push_str(left);
        merged.push_str(right);
        // The library would go out of bounds on a result that is longer than any token.
        if let Some(missing) = [left, right, &merged].into_iter().find(|token| !vocab.contains_key(*token)) {
            return Err(format!("its merge {merge:?} needs the token {missing:?}, which there is not"));
        }
        pairs.push((left.to_owned(), right.to_owned()));
    }
    Ok((vocab, pairs))
}

fn with_added(vocabulary: &Vocabulary<'_>, mut library: Library) -> Result<Library, String> {
    let tokens: Vec<AddedToken> = added(vocabulary)
        .map(|(_, token, special)| {
            AddedToken::from(token, special).normalized(false).rstrip(strips_right(vocabulary, token))
        })
        .collect();
    library.add_tokens(tokens).map_err(|error| error.to_string())?;
    Ok(library)
}

/// Ids to text as tokenizer.json would say it.
pub(crate) fn sentencepiece_decoder(space_prefix: bool) -> Value {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if space_prefix {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": steps})
}

fn special_tokens(vocabulary: &Vocabulary<'_>) -> SpecialTokens {
    let ids = &vocabulary.ids;
    let token = |id: Option<u32>| {
        let text = *vocabulary.tokens.get(id? as usize)?;
        Some(SpecialToken { id: id?, text: text.to_owned() })
    };
    let mut special = SpecialTokens {
        bos: token(ids.bos),
        eos: token(ids.eos),
        pad: token(ids.pad),
        unk: token(ids.unk),
        added: added(vocabulary).map(|(_, text, special)| (text.to_owned(), special)).collect(),
        ..SpecialTokens::default()
    };
    for (name, token) in
        [("bos", &special.bos), ("eos", &special.eos), ("pad", &special.pad), ("unk", &special.unk)]
    {
        if let Some(token) = token {
            special.named.insert(name.to_owned(), token.text.clone());
        }
    }
    special
}
