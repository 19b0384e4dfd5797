//! The tokenizer of a checkpoint: text to ids, ids to bytes, and which ids are special.
//!
//! Owns: tokenizer.json and what tokenizer_config.json says about it (tekken.json is read by `tekken`, tokenizer.model by `sentencepiece`, tiktoken.model by `tiktoken`, vocabularies of GGUF files by `gguf`). Must
//! never: truncate or pad (a file that asks for it is overruled: limits are the caller's and are errors, not silence).
//!
//! Cost: loading reads the vocabulary once; [`Tokenizer::token_bytes`] is an index into a table.

use std::collections::BTreeMap;
use std::path::Path;

use folio_model::checkpoint::gguf::{Metadata, Vocabulary};
use serde_json::Value;

use crate::decoder::{DecodeKind, Plan, TokenBytes, verbatim_table};
use crate::detokenizer::{DetokenizeOptions, Detokenizer};
use crate::error::TextError;
use crate::gguf;
use crate::library::{Library, check_normalizer};
use crate::pieces::Pieces;
use crate::prompt::Prompt;
use crate::sentencepiece::{self, BesideModel};
use crate::tekken;
use crate::tiktoken;
use crate::token_cache::{self, Part, TokenCache};

/// A token with a role, as tokenizer_config.json names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    pub id: u32,
    pub text: String,
}

/// The named special tokens. `named` holds all of them by their key without `_token` (`bos`, `eos`, `pad`, `image`, ...)
/// as chat templates see them, including those whose text is no token of the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos: Option<SpecialToken>,
    pub eos: Option<SpecialToken>,
    pub pad: Option<SpecialToken>,
    pub unk: Option<SpecialToken>,
    pub named: BTreeMap<String, String>,
    /// Texts that are tokens of their own wherever they occur, and whether they are special: what a conversation must not
    /// forge.
    pub added: Vec<(String, bool)>,
}

pub struct Tokenizer {
    encoder: Encoder,
    table: TokenBytes,
    kind: DecodeKind,
    special: SpecialTokens,
    /// By id; true for added tokens marked special.
    is_special: Vec<bool>,
    vocab_size: usize,
    /// Prepended to every encoding with special tokens, where tokenizer.json has no post-processor of its own.
    forced_bos: Option<u32>,
    /// Appended likewise.
    forced_eos: Option<u32>,
}

/// Steps for each byte that is tokenized: two places in the text are kept for it, and both are moved about.
pub(crate) const TOKENIZE_STEPS: usize = 16;

/// Who turns text into ids.
pub(crate) enum Encoder {
    Library(Box<Library>),
    Pieces(Box<Pieces>),
}

/// What a [`Tokenizer`] is made of.
pub(crate) struct TokenizerParts<'a> {
    pub encoder: Encoder,
    /// The `decoder` section of a tokenizer.json.
    pub decoder: &'a Value,
    /// By id.
    pub tokens: Vec<Option<String>>,
    pub is_special: Vec<bool>,
    pub special: SpecialTokens,
    pub forced_bos: Option<u32>,
    pub forced_eos: Option<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size).field("kind", &self.kind).finish()
    }
}

impl Tokenizer {
    /// Reads the first that is there of `tokenizer.json`, `tekken.json`, `tokenizer.model` and `tiktoken.model`; and where present
    /// `tokenizer_config.json`, `special_tokens_map.json`, and beside a `tokenizer.model` `added_tokens.json`.
    pub fn from_folder(folder: &Path) -> Result<Self, TextError> {
        let side = |name: &str| read_optional(&folder.join(name));
        let (config, map) = (side("tokenizer_config.json")?, side("special_tokens_map.json")?);
        if let Some(json) = side("tokenizer.json")? {
            return Self::build(&json, config.as_deref(), map.as_deref());
        }
        if let Some(json) = side(TEKKEN)? {
            return Self::build_tekken(&json, config.as_deref(), map.as_deref());
        }
        if let Some(model) = sentencepiece::read(folder)? {
            let added = side("added_tokens.json")?;
            let beside = BesideModel {
                tokenizer_config: config.as_deref(),
                special_tokens_map: map.as_deref(),
                added_tokens: added.as_deref(),
            };
            return Self::from_sentencepiece(&model, beside);
        }
        if let Some(list) = side(TIKTOKEN)? {
            return Self::build_tiktoken(&list, config.as_deref(), map.as_deref());
        }
        Err(TextError::NoTokenizer { folder: folder.to_owned() })
    }

    /// `tokenizer_json` and `tokenizer_config_json` are the files' bytes.
    pub fn from_bytes(
        tokenizer_json: &[u8],
        tokenizer_config_json: Option<&[u8]>,
    ) -> Result<Self, TextError> {
        Self::build(tokenizer_json, tokenizer_config_json, None)
    }

    fn build(json: &[u8], config: Option<&[u8]>, map: Option<&[u8]>) -> Result<Self, TextError> {
        let bad = |reason: String| TextError::BadTokenizer { file: "tokenizer.json".into(), reason };
        let spec: TokenizerSpec = serde_json::from_slice(json).map_err(|e| bad(e.to_string()))?;
        check_normalizer(&spec.normalizer).map_err(bad)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| bad(e.to_string()))?;
        for token in &spec.added_tokens {
            // The library renumbers added tokens that leave a gap; the model would then see the wrong ids.
            let read = inner.token_to_id(&token.content);
            if read != Some(token.id) {
                return Err(bad(format!(
                    "token {:?} is declared with id {} but reads as {read:?}",
                    token.content, token.id
                )));
            }
        }
        inner.with_truncation(None).map_err(|e| bad(e.to_string()))?;
        inner.with_padding(None);

        let config = parse_object("tokenizer_config.json", config)?;
        let map = parse_object("special_tokens_map.json", map)?;
        let add_bos = spec.post_processor.is_null() && adds_bos(&config).unwrap_or(false);
        Self::of_library(inner, &spec.decoder, (&config, &map), add_bos).map_err(bad)
    }

    /// The tokenizer of a tekken.json's bytes, and of the tokenizer_config.json beside it.
    pub fn from_tekken(json: &[u8], tokenizer_config_json: Option<&[u8]>) -> Result<Self, TextError> {
        Self::build_tekken(json, tokenizer_config_json, None)
    }

    fn build_tekken(json: &[u8], config: Option<&[u8]>, map: Option<&[u8]>) -> Result<Self, TextError> {
        let bad = |reason: String| TextError::BadTokenizer { file: TEKKEN.into(), reason };
        let config = parse_object("tokenizer_config.json", config)?;
        let names = roles(&tekken::NAMED, map)?;
        let inner = tekken::read(json).map_err(bad)?;
        let decoder = serde_json::json!({"type": "ByteLevel"});
        Self::of_library(inner, &decoder, (&config, &names), adds_bos(&config).unwrap_or(true)).map_err(bad)
    }

    /// The tokenizer of a tiktoken.model's bytes, and of the tokenizer_config.json beside it, which names the class that reads the list.
    pub fn from_tiktoken(list: &[u8], tokenizer_config_json: Option<&[u8]>) -> Result<Self, TextError> {
        Self::build_tiktoken(list, tokenizer_config_json, None)
    }

    fn build_tiktoken(list: &[u8], config: Option<&[u8]>, map: Option<&[u8]>) -> Result<Self, TextError> {
        let bad = |reason: String| TextError::BadTokenizer { file: TIKTOKEN.into(), reason };
        let config = parse_object("tokenizer_config.json", config)?;
        let names = roles(&tiktoken::NAMED, map)?;
        let inner = tiktoken::read(list, &config).map_err(bad)?;
        let decoder = serde_json::json!({"type": "ByteLevel"});
        // The class puts nothing before a text.
        Self::of_library(inner, &decoder, (&config, &names), false).map_err(bad)
    }

    /// `names`: tokenizer_config.json and special_tokens_map.json.
    fn of_library(
        inner: tokenizers::Tokenizer,
        decoder: &Value,
        (config, map): (&Object, &Object),
        add_bos: bool,
    ) -> Result<Self, String> {
        let tokens = vocabulary(&inner)?;
        let mut is_special = vec![false; tokens.len()];
        for (id, token) in inner.get_added_tokens_decoder() {
            if let Some(flag) = is_special.get_mut(id as usize) {
                *flag = token.special;
            }
        }
        let special = special_tokens(&inner, config, map);
        let forced_bos = special.bos.as_ref().filter(|_| add_bos).map(|bos| bos.id);
        let encoder = Encoder::Library(Box::new(Library::new(inner)?));
        Ok(Self::from_parts(TokenizerParts {
            encoder,
            decoder,
            tokens,
            is_special,
            special,
            forced_bos,
            forced_eos: None,
        }))
    }

    /// The tokenizer of a tokenizer.model's bytes.
    pub fn from_sentencepiece(model: &[u8], beside: BesideModel<'_>) -> Result<Self, TextError> {
        sentencepiece::tokenizer(model, beside)
    }

    /// The tokenizer inside a GGUF file.
    pub fn from_gguf(metadata: Metadata<'_>) -> Result<Self, TextError> {
        let file = metadata.file();
        let bad = |reason: String| TextError::BadTokenizer { file: file.to_owned(), reason };
        match Vocabulary::read(metadata) {
            Ok(Some(vocabulary)) => gguf::tokenizer(file, &vocabulary),
            Ok(None) => Err(bad("it holds no tokenizer".to_owned())),
            Err(error) => Err(bad(error.to_string())),
        }
    }

    pub(crate) fn from_parts(parts: TokenizerParts<'_>) -> Self {
        let TokenizerParts { encoder, decoder, tokens, is_special, special, forced_bos, forced_eos } = parts;
        let (kind, table) = match Plan::parse(decoder) {
            Some(plan) => (DecodeKind::Table(plan.start()), plan.table(&tokens)),
            None => (DecodeKind::Whole, verbatim_table(&tokens)),
        };
        let vocab_size = tokens.len();
        Self { encoder, table, kind, special, is_special, vocab_size, forced_bos, forced_eos }
    }

    /// Token ids of `text`. Special tokens written out in `text` are recognized, as in Hugging Face's tokenizers;
    /// `add_special_tokens` adds what the model expects around a text (usually bos). A text over `max_bytes` is refused.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        max_bytes: usize,
    ) -> Result<Vec<u32>, TextError> {
        self.encode_with(text, None, add_special_tokens, max_bytes, None)
    }

    /// The same of a rendered conversation, in which markers count only where no break is in them and where they stand as
    /// they are written (not where normalizing makes them).
    pub fn encode_prompt(
        &self,
        prompt: &Prompt,
        add_special_tokens: bool,
        max_bytes: usize,
    ) -> Result<Vec<u32>, TextError> {
        self.encode_with(prompt.text(), Some(prompt.breaks()), add_special_tokens, max_bytes, None)
    }

    /// Either, by `breaks`, which are a prompt's. What `cache` has of the text is not tokenized again, and what it has not it is
    /// given; the ids are the same.
    pub fn encode_with(
        &self,
        text: &str,
        breaks: Option<&[usize]>,
        add_special_tokens: bool,
        max_bytes: usize,
        cache: Option<&dyn TokenCache>,
    ) -> Result<Vec<u32>, TextError> {
        if text.len() > max_bytes {
            return Err(TextError::TooLong { bytes: text.len(), limit: max_bytes });
        }
        crate::work::add(text.len());
        let (before, behind) = match &self.encoder {
            Encoder::Library(library) => library.around(add_special_tokens),
            Encoder::Pieces(_) => const { &(Vec::new(), Vec::new()) },
        };
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        out.extend(self.forced_bos.filter(|_| add_special_tokens));
        out.extend(before);
        let parts = match &self.encoder {
            Encoder::Library(library) => library.parts(text, breaks),
            Encoder::Pieces(pieces) => pieces.parts(text, breaks.unwrap_or_default()),
        };
        for segment in token_cache::segments(&parts) {
            let Some(cache) = cache else {
                self.encode_segment(text, segment, breaks, &mut out)?;
                continue;
            };
            let key = token_cache::key(text, segment, breaks);
            if let Some(ids) = cache.find(&key) {
                out.extend_from_slice(&ids);
                continue;
            }
            let from = out.len();
            self.encode_segment(text, segment, breaks, &mut out)?;
            cache.keep(key, &out[from..]);
        }
        out.extend(behind);
        out.extend(self.forced_eos.filter(|_| add_special_tokens));
        Ok(out)
    }

    fn encode_segment(
        &self,
        text: &str,
        segment: &[Part],
        breaks: Option<&[usize]>,
        out: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        for (range, token) in segment {
            if let Some(id) = token {
                out.push(*id);
                continue;
            }
            match &self.encoder {
                Encoder::Library(library) => library
                    .encode_part(text, range.clone(), breaks, out)
                    .map_err(|error| TextError::Encode(error.to_string()))?,
                Encoder::Pieces(pieces) => pieces.encode_part(text, range.clone(), out),
            }
        }
        Ok(())
    }

    /// The whole text of `ids`: what a [`Detokenizer`] that starts a text emits. Bytes that are no UTF-8 become U+FFFD,
    /// one for each maximal broken piece.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut detokenizer = Detokenizer::new(DetokenizeOptions { skip_special_tokens, continues: false });
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(self, id, &mut text);
        }
        detokenizer.finish(self, &mut text);
        text
    }

    /// The bytes a token adds to the text (before any strip at the text's start); empty for an id that is no token.
    /// For the rare decoder that has no per-token bytes (WordPiece) this is the vocabulary's own text.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.bytes_of(id)
    }

    /// The token as the vocabulary writes it (`Ġthe`, `▁the`).
    pub fn token_text(&self, id: u32) -> Option<String> {
        match &self.encoder {
            Encoder::Library(library) => library.tokenizer.id_to_token(id),
            Encoder::Pieces(pieces) => pieces.token(id).map(str::to_owned),
        }
    }

    /// The id of a token written as the vocabulary writes it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.encoder {
            Encoder::Library(library) => library.tokenizer.token_to_id(token),
            Encoder::Pieces(pieces) => pieces.id(token),
        }
    }

    /// Largest id plus one. A checkpoint's logits may be wider (padding).
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// True for control tokens (`<s>`, `<|im_end|>`), which are left out of text when special tokens are skipped.
    pub fn is_special(&self, id: u32) -> bool {
        self.is_special.get(id as usize).copied().unwrap_or(false)
    }

    /// All control tokens, ascending.
    pub fn special_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.is_special.iter().enumerate().filter(|(_, special)| **special).map(|(id, _)| id as u32)
    }

    pub(crate) fn kind(&self) -> DecodeKind {
        self.kind
    }

    /// The library's own decoding, for decoders that work on runs of tokens.
    pub(crate) fn library_decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let text = match &self.encoder {
            Encoder::Library(library) => library.tokenizer.decode(ids, skip_special_tokens).ok(),
            // Always decoded by the table.
            Encoder::Pieces(_) => None,
        };
        text.unwrap_or_else(|| char::REPLACEMENT_CHARACTER.to_string())
    }
}

/// The parts of tokenizer.json that are read here and not by the library.
#[derive(serde::Deserialize)]
struct TokenizerSpec {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    added_tokens: Vec<AddedTokenSpec>,
}

#[derive(serde::Deserialize)]
struct AddedTokenSpec {
    id: u32,
    content: String,
}

/// Ids beyond this are taken for a damaged file rather than for a vocabulary.
pub(crate) const MAX_TOKEN_ID: u32 = 16 << 20;
const TEKKEN: &str = "tekken.json";
const TIKTOKEN: &str = "tiktoken.model";

/// Tokens with a role, as special_tokens_map.json names them; those that it does not name are as in `otherwise`.
fn roles(otherwise: &[(&str, &str)], map: Option<&[u8]>) -> Result<Object, TextError> {
    let mut names: Object =
        otherwise.iter().map(|(name, token)| ((*name).to_owned(), Value::from(*token))).collect();
    names.extend(parse_object("special_tokens_map.json", map)?);
    Ok(names)
}

/// Whether tokenizer_config.json wants bos before texts.
fn adds_bos(config: &Object) -> Option<bool> {
    config.get("add_bos_token")?.as_bool()
}

fn vocabulary(inner: &tokenizers::Tokenizer) -> Result<Vec<Option<String>>, String> {
    let vocab = inner.get_vocab(true);
    let Some(&last) = vocab.values().max() else {
        return Err("the vocabulary is empty".into());
    };
    if last > MAX_TOKEN_ID {
        return Err(format!("token id {last} is larger than {MAX_TOKEN_ID}"));
    }
    let mut tokens = vec![None; last as usize + 1];
    for id in vocab.into_values() {
        tokens[id as usize] = inner.id_to_token(id);
    }
    Ok(tokens)
}

fn special_tokens(inner: &tokenizers::Tokenizer, config: &Object, map: &Object) -> SpecialTokens {
    let mut named = BTreeMap::new();
    for (key, value) in map.iter().chain(config) {
        let Some(name) = key.strip_suffix("_token") else { continue };
        if let Some(text) = token_content(value) {
            named.insert(name.to_owned(), text.to_owned());
        }
    }
    let find = |name: &str| {
        let text: &String = named.get(name)?;
        Some(SpecialToken { id: inner.token_to_id(text)?, text: text.clone() })
    };
    let (bos, eos, pad, unk) = (find("bos"), find("eos"), find("pad"), find("unk"));
    let added = inner.get_added_tokens_decoder();
    let mut added: Vec<(String, bool)> =
        added.into_values().map(|token| (token.content, token.special)).collect();
    added.sort();
    SpecialTokens { bos, eos, pad, unk, named, added }
}

/// `"</s>"` or `{"content": "</s>", ...}`.
pub(crate) fn token_content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

pub(crate) type Object = serde_json::Map<String, Value>;

pub(crate) fn parse_object(file: &str, bytes: Option<&[u8]>) -> Result<Object, TextError> {
    let Some(bytes) = bytes else { return Ok(Object::new()) };
    serde_json::from_slice(bytes)
        .map_err(|e| TextError::BadConfig { file: file.into(), reason: e.to_string() })
}

pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Io { path: path.to_owned(), source }),
    }
}
