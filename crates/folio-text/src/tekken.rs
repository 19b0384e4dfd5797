//! tekken.json, Mistral's tokenizer file, as a tokenizer of the library.
//!
//! Owns: what its fields mean (`tokens/tokenizers/tekken.py` of mistral-common). Special tokens have the first ids, and a token of rank `r` has the
//! id `default_num_special_tokens + r`. Ranks are tiktoken's: in a word those two neighbours are joined first whose whole has the lowest rank. The
//! library wants to know the neighbours: of a token, they are what is left of it once all lower ranks in it are joined. If more than two are
//! left, no two ever make it, and it is found as a whole word only.
//!
//! Cost: one pass over the vocabulary; a token takes as many steps as the square of its bytes, of which there are few.

use std::borrow::Cow;
use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior::Isolated;
use tokenizers::{
    AddedToken, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, Tokenizer as Library,
};

use crate::decoder::byte_alphabet;
use crate::tokenizer::MAX_TOKEN_ID;

/// The longest of Mistral's have 78.
const TOKEN_BYTES_MAX: usize = 512;
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
    let ranks: HashMap<&[u8], usize> = (0..).zip(&tokens).map(|(rank, token)| (&token[..], rank)).collect();
    let mut alphabet = ['\0'; 256];
    byte_alphabet().for_each(|(character, byte)| alphabet[usize::from(byte)] = character);
    let spell = |bytes: &[u8]| bytes.iter().map(|byte| alphabet[usize::from(*byte)]).collect::<String>();
    let mut vocab: Vocab = (0..).zip(&special).map(|(id, token)| (token.clone(), id)).collect();
    let mut pairs = Vec::with_capacity(tokens.len());
    for (rank, token) in tokens.iter().enumerate() {
        let last = ranks[&token[..]];
        if last != rank {
            return Err(format!("its tokens of ranks {rank} and {last} are the same"));
        }
        if let Some(at) = last_join(&ranks, token, rank) {
            pairs.push((spell(&token[..at]), spell(&token[at..])));
        }
        if let Some(id) = vocab.insert(spell(token), (special.len() + rank) as u32) {
            return Err(format!("its token of rank {rank} is the special token {:?}", special[id as usize]));
        }
    }
    let model = BPE::builder().vocab_and_merges(vocab, pairs).ignore_merges(true);
    let mut library = Library::new(model.build().map_err(|error| error.to_string())?);
    let pre_tokenizer = pre_tokenizer(&file.config.pattern)?;
    // Else it could be made of a text in which no special token may be.
    for token in &special {
        let mut pieces = PreTokenizedString::from(token.as_str());
        pre_tokenizer.pre_tokenize(&mut pieces).map_err(|error| error.to_string())?;
        if pieces.get_splits(OffsetReferential::Original, OffsetType::Byte).len() < 2 {
            return Err(format!("its special token {token:?} is one word by `pattern`"));
        }
    }
    library.with_pre_tokenizer(Some(pre_tokenizer));
    let added: Vec<AddedToken> =
        special.into_iter().map(|token| AddedToken::from(token, true).normalized(false)).collect();
    library.add_tokens(added).map_err(|error| error.to_string())?;
    Ok(library)
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
    let mut sorted: Vec<&String> = special.iter().collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("its special token {:?} is there twice", pair[0])),
        None if special.iter().any(String::is_empty) => {
            Err("it has a special token without a text".to_owned())
        }
        None => Ok(special),
    }
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

/// Where the last two parts of a token meet, if joining what has a lower rank than `below` leaves two.
fn last_join(ranks: &HashMap<&[u8], usize>, token: &[u8], below: usize) -> Option<usize> {
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    let joined = |cuts: &[usize], at: usize| match (cuts.get(at), cuts.get(at + 2)) {
        (Some(from), Some(to)) => ranks.get(&token[*from..*to]).copied().filter(|rank| *rank < below),
        _ => None,
    };
    // By part, the rank of it and the next.
    let mut next: Vec<Option<usize>> = (0..token.len()).map(|at| joined(&cuts, at)).collect();
    while cuts.len() > 3 {
        let (at, _) =
            (0..).zip(&next).filter_map(|(at, rank)| Some((at, (*rank)?))).min_by_key(|(_, rank)| *rank)?;
        cuts.remove(at + 1);
        next.remove(at);
        next[at] = joined(&cuts, at);
        if let Some(before) = at.checked_sub(1) {
            next[before] = joined(&cuts, before);
        }
    }
    (cuts.len() == 3).then(|| cuts[1])
}

fn pre_tokenizer(pattern: &str) -> Result<PreTokenizerWrapper, String> {
    let split = Split::new(SplitPattern::Regex(pattern.to_owned()), Isolated, false);
    let split = split.map_err(|error| format!("its `pattern` is no regular expression: {error}"))?;
    Ok(Sequence::new(vec![split.into(), ByteLevel::new(false, false, false).into()]).into())
}
