//! tekken.json, Mistral's tokenizer file, as a tokenizer of the library.
//!
//! Owns: what its fields mean (`tokens/tokenizers/tekken.py` of mistral-common). Special tokens have the first ids, and a token of rank `r` has the
//! id `default_num_special_tokens + r`. Ranks are tiktoken's ([`ranks`]).
//!
//! Cost: one pass over the vocabulary.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use tokenizers::{AddedToken, Tokenizer as Library};

use crate::ranks::{self, TOKEN_BYTES_MAX};
use crate::tokenizer::MAX_TOKEN_ID;

/// Mistral's have 1,000. Those that are not listed are made, whatever the file's size.
const SPECIAL_TOKENS_MAX: usize = 10_000;

/// What files up to version 7 leave out.
const SPECIAL_TOKENS: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// The special tokens with a role, by the names of tokenizer_config.json.
pub(crate) const NAMED: [(&str, &str); 4] =
    [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>"), ("unk_token", "<unk>")];

/// What is read of the file. Images, audio and settings of the model are of no concern to texts; `num_vocab_tokens` is the length of a list.
#[derive(Deserialize)]
struct TekkenFile<'a> {
    config: TekkenConfig,
    #[serde(borrow)]
    vocab: Vec<TekkenToken<'a>>,
    special_tokens: Option<Vec<TekkenSpecialToken>>,
}

#[derive(Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
    version: String,
}

#[derive(Deserialize)]
struct TekkenToken<'a> {
    rank: usize,
    #[serde(borrow)]
    token_bytes: Cow<'a, str>,
}

#[derive(Deserialize)]
struct TekkenSpecialToken {
    rank: usize,
    token_str: String,
}

/// Reads the file's bytes; an error is a sentence about it.
pub(crate) fn read(json: &[u8]) -> Result<Library, String> {
    let file: TekkenFile<'_> = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let size = file.config.default_vocab_size;
    if size > MAX_TOKEN_ID as usize {
        return Err(format!("`default_vocab_size` is {size}, more than {MAX_TOKEN_ID}"));
    }
    let special = special_tokens(&file)?;
    let tokens = ordinary_tokens(&file)?;
    let first = special.len() as u32;
    let special = special.into_iter().map(|token| AddedToken::from(token, true).normalized(false));
    ranks::library(&tokens, first, (0..).zip(special).collect(), &file.config.pattern)
}

/// By id: those that are listed, and names for the others.
fn special_tokens(file: &TekkenFile<'_>) -> Result<Vec<String>, String> {
    let TekkenConfig { default_num_special_tokens: count, default_vocab_size: size, version, .. } =
        &file.config;
    if count >= size {
        return Err(format!(
            "`default_num_special_tokens` is {count}, `default_vocab_size` {size}: no others are left"
        ));
    }
    if *count > SPECIAL_TOKENS_MAX {
        return Err(format!("`default_num_special_tokens` is {count}, more than {SPECIAL_TOKENS_MAX}"));
    }
    let mut special: Vec<String> = match &file.special_tokens {
        Some(listed) => {
            if let Some((at, token)) = listed.iter().enumerate().find(|(at, token)| token.rank != *at) {
                return Err(format!("entry {at} of `special_tokens` has the rank {}", token.rank));
            }
            listed.iter().map(|token| token.token_str.clone()).collect()
        }
        None => match version.strip_prefix('v').and_then(|number| number.parse::<u32>().ok()) {
            Some(..=7) => SPECIAL_TOKENS.map(str::to_owned).into(),
            _ => {
                return Err(format!(
                    "it has no `special_tokens`, without which version {version:?} is not known"
                ));
            }
        },
    };
    if special.len() > *count {
        return Err(format!(
            "it has {} special tokens, and `default_num_special_tokens` is {count}",
            special.len()
        ));
    }
    special.extend((special.len()..*count).map(|id| format!("<SPECIAL_{id}>")));
    Ok(special)
}

/// By rank: as many as the vocabulary's size leaves, the first 256 of which are the bytes.
fn ordinary_tokens(file: &TekkenFile<'_>) -> Result<Vec<Vec<u8>>, String> {
    let TekkenConfig { default_num_special_tokens: special, default_vocab_size: size, .. } = &file.config;
    let count = size - special;
    if file.vocab.len() < count || count < 256 {
        return Err(format!(
            "`vocab` has {} tokens; `default_vocab_size` {size} without {special} special tokens takes {count}, at least 256",
            file.vocab.len()
        ));
    }
    let token = |(at, token): (usize, &TekkenToken<'_>)| {
        if token.rank != at {
            return Err(format!("entry {at} of `vocab` has the rank {}", token.rank));
        }
        let bytes = BASE64.decode(token.token_bytes.as_bytes());
        let bytes = bytes.map_err(|error| format!("`token_bytes` of rank {at} is no base64: {error}"))?;
        match bytes.len() {
            1..=TOKEN_BYTES_MAX if at >= 256 || bytes == [at as u8] => Ok(bytes),
            1..=TOKEN_BYTES_MAX => Err(format!("its token of rank {at} is not the byte {at}")),
            length => {
                Err(format!("its token of rank {at} has {length} bytes, expected 1 to {TOKEN_BYTES_MAX}"))
            }
        }
    };
    file.vocab[..count].iter().enumerate().map(token).collect()
}
