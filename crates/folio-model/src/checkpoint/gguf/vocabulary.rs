//! The vocabulary inside a GGUF file: tokens, their kinds, and the ids with a role.
//!
//! Owns: reading `tokenizer.ggml.*` and checking that it is consistent. Must never: tokenize (that is `folio-text`).
//! Where llama.cpp decides by a token's text what ends a generation, so does this: files do not say it otherwise.

use std::collections::HashMap;

use super::Metadata;
use crate::error::Result;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const TOKENS_MAX: usize = 1 << 24;

/// Tokens that end a turn or a text in the models people have (llama.cpp, `llama-vocab.cpp`).
const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "</s>",
    "<｜end▁of▁sentence｜>",
];

/// What a token is (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    Normal,
    /// `<unk>`
    Unknown,
    /// Structure, never text: `<s>`, `<|im_end|>`.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// Padding of the table.
    Unused,
    /// `<0x0A>`: one byte.
    Byte,
}

/// Ids with a role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    /// Everything that ends a generation, `eos` included. Sorted.
    pub ends: Vec<u32>,
}

/// A checked vocabulary.
#[derive(Clone, Debug)]
pub struct Vocabulary<'a> {
    /// `general.architecture`
    pub architecture: &'a str,
    /// Kind of tokenizer: `gpt2`, `llama`, `bert`, ...
    pub model: &'a str,
    /// Name of the pre-tokenizer.
    pub pre: Option<&'a str>,
    /// By id; all different, but for empty ones.
    pub tokens: Vec<&'a str>,
    pub kinds: Vec<TokenKind>,
    /// Where the file has them.
    pub scores: Option<Vec<f64>>,
    pub merges: Option<Vec<&'a str>>,
    pub ids: SpecialIds,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
    pub remove_extra_whitespaces: Option<bool>,
}

impl<'a> Vocabulary<'a> {
    /// `None` where the file has no vocabulary at all.
    pub fn read(metadata: Metadata<'a>) -> Result<Option<Self>> {
        let Some(model) = metadata.text("tokenizer.ggml.model")? else { return Ok(None) };
        let Some(tokens) = metadata.texts(TOKENS)? else { return Ok(None) };
        if tokens.is_empty() || tokens.len() > TOKENS_MAX {
            let problem = format!("holds {} tokens, expected 1 to {TOKENS_MAX}", tokens.len());
            return Err(metadata.problem(TOKENS, problem));
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        // Ids without a text may be many; they are no tokens of any text.
        for (id, token) in tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            if let Some(first) = ids.insert(*token, id) {
                let problem = format!("holds token {token:?} twice, as {first} and as {id}");
                return Err(metadata.problem(TOKENS, problem));
            }
        }
        let mut kinds = kinds(metadata, tokens.len())?;
        let ids = special_ids(metadata, model, &ids, &kinds)?;
        for id in &ids.ends {
            kinds[*id as usize] = TokenKind::Control;
        }
        let scores = metadata.numbers("tokenizer.ggml.scores")?;
        if let Some(scores) = scores.as_ref().filter(|scores| scores.len() != tokens.len()) {
            let problem = format!("holds {} scores for {} tokens", scores.len(), tokens.len());
            return Err(metadata.problem("tokenizer.ggml.scores", problem));
        }
        Ok(Some(Self {
            architecture: metadata.text("general.architecture")?.unwrap_or_default(),
            model,
            pre: metadata.text("tokenizer.ggml.pre")?,
            kinds,
            scores,
            merges: metadata.texts("tokenizer.ggml.merges")?,
            ids,
            add_bos: metadata.flag("tokenizer.ggml.add_bos_token")?,
            add_eos: metadata.flag("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: metadata.flag("tokenizer.ggml.add_space_prefix")?,
            remove_extra_whitespaces: metadata.flag("tokenizer.ggml.remove_extra_whitespaces")?,
            tokens,
        }))
    }
}

fn kinds(metadata: Metadata<'_>, tokens: usize) -> Result<Vec<TokenKind>> {
    let Some(numbers) = metadata.numbers(TYPES)? else { return Ok(vec![TokenKind::Normal; tokens]) };
    if numbers.len() != tokens {
        return Err(metadata.problem(TYPES, format!("holds {} types for {tokens} tokens", numbers.len())));
    }
    let kind = |number: &f64| match *number as i64 {
        2 => TokenKind::Unknown,
        3 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        5 => TokenKind::Unused,
        6 => TokenKind::Byte,
        _ => TokenKind::Normal,
    };
    Ok(numbers.iter().map(kind).collect())
}

fn special_ids(
    metadata: Metadata<'_>,
    model: &str,
    ids: &HashMap<&str, usize>,
    kinds: &[TokenKind],
) -> Result<SpecialIds> {
    let id = |role: &str| -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{role}_token_id");
        match metadata.integer(&key)? {
            // -1 in the writers' 32 bits: none.
            None | Some(0xffff_ffff) => Ok(None),
            Some(id) if id < kinds.len() as u64 => Ok(Some(id as u32)),
            Some(id) => {
                Err(metadata.problem(&key, format!("is {id}, outside of a vocabulary of {}", kinds.len())))
            }
        }
    };
    // Sentencepiece's own defaults, which files may leave out.
    let default = |id: u32| (model == "llama" && (id as usize) < kinds.len()).then_some(id);
    let eos = id("eos")?.or(default(2));
    let mut ends: Vec<u32> = [eos, id("eot")?, id("eom")?].into_iter().flatten().collect();
    for text in ENDS {
        let Some(id) = ids.get(text) else { continue };
        // A token of plain text could also be the model's way of writing these characters.
        if matches!(kinds[*id], TokenKind::Control | TokenKind::UserDefined) {
            ends.push(*id as u32);
        }
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(SpecialIds {
        bos: id("bos")?.or(default(1)),
        eos,
        unk: id("unknown")?.or(default(0)),
        pad: id("padding")?,
        ends,
    })
}
