//! tiktoken.model, a list of tokens and their ranks, as a tokenizer of the library.
//!
//! Owns: what such a list leaves out. How texts are cut into words, and which tokens are special, says the code of the class that reads it. Known
//! is Moonshot's `TikTokenTokenizer` (Kimi K2, Moonlight): behind the list's tokens are 256 that are found in a text before anything else, by the
//! names that tokenizer_config.json has for them. Must never: guess for another class.
//!
//! Cost: one pass over the list, besides that of [`ranks`].

use std::collections::{HashMap, HashSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer as Library};

use crate::gguf::KIMI;
use crate::ranks::{self, TOKEN_BYTES_MAX};
use crate::tokenizer::{Object, token_content};

/// Kimi's has 163,584.
const TOKENS_MAX: usize = 1 << 20;
/// The class makes two more, which are none of the models'.
const SPECIAL_TOKENS: u32 = 256;
/// As `auto_map` names the class.
const CLASSES: [&str; 2] = ["tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer"];

/// Tokens with a role where tokenizer_config.json names none.
pub(crate) const NAMED: [(&str, &str); 2] = [("bos_token", "[BOS]"), ("eos_token", "[EOS]")];

/// Reads the file's bytes; `config` is tokenizer_config.json. An error is a sentence about the file.
pub(crate) fn read(list: &[u8], config: &Object) -> Result<Library, String> {
    check_class(config)?;
    let tokens = tokens(list)?;
    let special = special_tokens(tokens.len() as u32, config)?;
    ranks::library(&tokens, 0, special, KIMI)
}

fn check_class(config: &Object) -> Result<(), String> {
    let class = config.get("auto_map").and_then(|map| map.get("AutoTokenizer"));
    // The class that is not fast, and the one that is.
    let class = class.and_then(|class| class.as_str().or_else(|| class.get(0)?.as_str())).unwrap_or_default();
    // A repository may be named before it.
    if class.rsplit("--").next().is_some_and(|class| CLASSES.contains(&class)) {
        return Ok(());
    }
    let class: String = class.chars().take(60).collect();
    Err(format!(
        "it does not say how texts are cut into words; that is known of {} (`auto_map` in tokenizer_config.json), and this is {class:?}; \
         convert the tokenizer with transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(...)`",
        CLASSES.join(" and ")
    ))
}

/// By rank.
fn tokens(list: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let list = std::str::from_utf8(list).map_err(|_| "it is no text")?;
    let mut tokens = Vec::new();
    let mut bytes = [false; 256];
    for line in list.lines().filter(|line| !line.is_empty()) {
        let rank = tokens.len();
        if rank == TOKENS_MAX {
            return Err(format!("it has more than {TOKENS_MAX} tokens"));
        }
        let (token, number) = line.split_once(' ').unwrap_or((line, ""));
        if number.parse::<usize>() != Ok(rank) {
            let number: String = number.chars().take(20).collect();
            return Err(format!("its entry {rank} has the rank {number:?}"));
        }
        let token = BASE64.decode(token);
        let token = token.map_err(|error| format!("its token of rank {rank} is no base64: {error}"))?;
        if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
            let length = token.len();
            return Err(format!(
                "its token of rank {rank} has {length} bytes, expected 1 to {TOKEN_BYTES_MAX}"
            ));
        }
        if let [byte] = token[..] {
            bytes[usize::from(byte)] = true;
        }
        tokens.push(token);
    }
    match bytes.iter().position(|is_token| !is_token) {
        Some(byte) => Err(format!("the byte {byte} is none of its tokens")),
        None => Ok(tokens),
    }
}

/// Of ids from `first` on. One that is not listed has a name of its own.
fn special_tokens(first: u32, config: &Object) -> Result<Vec<(u32, AddedToken)>, String> {
    let ids = first..first + SPECIAL_TOKENS;
    let roles = config.iter().filter(|(key, _)| key.ends_with("_token")).map(|(_, value)| value);
    let more = config.get("additional_special_tokens").and_then(Value::as_array);
    let hidden: HashSet<&str> = roles
        .chain(more.into_iter().flatten())
        .filter_map(token_content)
        .chain(NAMED.map(|(_, text)| text))
        .collect();
    let mut listed: HashMap<u32, AddedToken> = HashMap::new();
    let decoder = config.get("added_tokens_decoder").and_then(Value::as_object);
    for (key, value) in decoder.into_iter().flatten() {
        let id = key.parse::<u32>().ok().filter(|id| ids.contains(id));
        let (Some(id), Some(text)) = (id, token_content(value)) else {
            return Err(format!(
                "`added_tokens_decoder` in tokenizer_config.json has {value} for the id {key:?}, expected a `content` for one of {} to {}",
                ids.start,
                ids.end - 1
            ));
        };
        let is_special = hidden.contains(text) || value.get("special").and_then(Value::as_bool) == Some(true);
        listed.insert(id, AddedToken::from(text, is_special).normalized(false));
    }
    let token = |id: u32| {
        let unnamed = || AddedToken::from(format!("<|reserved_token_{id}|>"), false).normalized(false);
        (id, listed.remove(&id).unwrap_or_else(unnamed))
    };
    Ok(ids.map(token).collect())
}
