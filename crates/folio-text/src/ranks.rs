//! Byte-level BPE by ranks, tiktoken's, as a tokenizer of the library.
//!
//! Owns: what ranks mean: in a word those two neighbours are joined first whose whole has the lowest rank. The library wants to know the
//! neighbours: of a token, they are what is left of it once all lower ranks in it are joined. If more than two are left, no two ever make it,
//! and it is found as a whole word only. Must never: know which file ranks are from.
//!
//! Cost: one pass over the vocabulary; a token takes as many steps as the square of its bytes, of which there are few.

use std::collections::{HashMap, HashSet};

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

/// The longest of Mistral's have 78.
pub(crate) const TOKEN_BYTES_MAX: usize = 512;

/// `tokens` are by rank, each of up to [`TOKEN_BYTES_MAX`] bytes, and all bytes are among them; that of rank 0 has the id `first`. `special` has
/// ids of its own. `pattern` finds words. An error is a sentence about the file that all this is from.
pub(crate) fn library(
    tokens: &[Vec<u8>],
    first: u32,
    special: Vec<(u32, AddedToken)>,
    pattern: &str,
) -> Result<Library, String> {
    check_special(&special)?;
    let ranks: HashMap<&[u8], usize> = (0..).zip(tokens).map(|(rank, token)| (&token[..], rank)).collect();
    let mut alphabet = ['\0'; 256];
    byte_alphabet().for_each(|(character, byte)| alphabet[usize::from(byte)] = character);
    let spell = |bytes: &[u8]| bytes.iter().map(|byte| alphabet[usize::from(*byte)]).collect::<String>();
    let mut vocab: Vocab = special.iter().map(|(id, token)| (token.content.clone(), *id)).collect();
    let mut pairs = Vec::with_capacity(tokens.len());
    for (rank, token) in tokens.iter().enumerate() {
        let last = ranks[&token[..]];
        if last != rank {
            return Err(format!("its tokens of ranks {rank} and {last} are the same"));
        }
        if let Some(at) = last_join(&ranks, token, rank) {
            pairs.push((spell(&token[..at]), spell(&token[at..])));
        }
        let text = spell(token);
        if vocab.contains_key(&text) {
            return Err(format!("its token of rank {rank} is the special token {text:?}"));
        }
        vocab.insert(text, first + rank as u32);
    }
    let model = BPE::builder().vocab_and_merges(vocab, pairs).ignore_merges(true);
    let mut library = Library::new(model.build().map_err(|error| error.to_string())?);
    let pre_tokenizer = pre_tokenizer(pattern)?;
    // Else it could be made of a text in which no special token may be.
    for (_, token) in &special {
        let mut pieces = PreTokenizedString::from(token.content.as_str());
        pre_tokenizer.pre_tokenize(&mut pieces).map_err(|error| error.to_string())?;
        if pieces.get_splits(OffsetReferential::Original, OffsetType::Byte).len() < 2 {
            return Err(format!("its special token {:?} is one word by its pattern", token.content));
        }
    }
    library.with_pre_tokenizer(Some(pre_tokenizer));
    let special: Vec<AddedToken> = special.into_iter().map(|(_, token)| token).collect();
    library.add_tokens(special).map_err(|error| error.to_string())?;
    Ok(library)
}

fn check_special(special: &[(u32, AddedToken)]) -> Result<(), String> {
    let mut texts = HashSet::new();
    for (_, token) in special {
        if token.content.is_empty() {
            return Err("it has a special token without a text".to_owned());
        }
        if !texts.insert(&token.content) {
            return Err(format!("its special token {:?} is there twice", token.content));
        }
    }
    Ok(())
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
