//! The named pre-tokenizers: how a text is cut into words before BPE merges inside each.
//!
//! The patterns are those of the models' own tokenizer.json, which llama.cpp (`llama-vocab.cpp`) names and approximates.

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior::Isolated;

/// One pre-tokenizer.
pub struct Pre {
    /// What files call it.
    names: &'static [&'static str],
    cuts: &'static [Cut],
    /// A word that is a token is that token, whatever the merges say.
    pub ignore_merges: bool,
    /// Whether bos is added where the file does not say.
    pub add_bos: bool,
    /// Texts are brought to Unicode's composed form first.
    pub nfc: bool,
}

#[derive(Clone, Copy)]
enum Cut {
    /// Matches and what lies between them are words.
    Regex(&'static str),
    /// Every digit is a word.
    Digits,
    /// GPT-2's own pattern.
    Gpt2,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

const PLAIN: Pre = Pre { names: &[], cuts: &[], ignore_merges: false, add_bos: false, nfc: false };

/// All that are supported.
const TABLE: &[Pre] = &[
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        cuts: &[Cut::Regex(LLAMA3)],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    Pre { names: &["dbrx", "smaug-bpe"], cuts: &[Cut::Regex(LLAMA3)], ..PLAIN },
    Pre { names: &["qwen2", "megrez"], cuts: &[Cut::Regex(QWEN2)], nfc: true, ..PLAIN },
    Pre {
        names: &["deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"],
        cuts: &[Cut::Regex(QWEN2)],
        ..PLAIN
    },
    Pre { names: &["qwen35"], cuts: &[Cut::Regex(QWEN35)], nfc: true, ..PLAIN },
    Pre { names: &["tekken"], cuts: &[Cut::Regex(TEKKEN)], ignore_merges: true, add_bos: true, ..PLAIN },
    Pre { names: &["gpt-4o", "llama4", "kanana2"], cuts: &[Cut::Regex(GPT4O)], ..PLAIN },
    Pre { names: &["seed-coder"], cuts: &[Cut::Regex(SEED_CODER)], ..PLAIN },
    Pre {
        names: &["deepseek-v3", "hunyuan-dense"],
        cuts: &[Cut::Regex(r"\p{N}{1,3}"), Cut::Regex("[一-龥\u{3040}-ゟ゠-ヿ]+"), Cut::Regex(DEEPSEEK3)],
        ..PLAIN
    },
    Pre {
        names: &["deepseek-coder"],
        cuts: &[
            Cut::Regex(r"[\r\n]"),
            Cut::Regex(r"\s?\p{L}+"),
            Cut::Regex(r"\s?\p{P}+"),
            Cut::Regex("[一-龥ࠀ-一가-\u{d7ff}]+"),
            Cut::Digits,
        ],
        ..PLAIN
    },
    Pre {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        cuts: &[Cut::Digits, Cut::Gpt2],
        ..PLAIN
    },
    Pre {
        names: &[
            "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "a.x-4.0", "mellum", "gigachat",
        ],
        cuts: &[Cut::Gpt2],
        ..PLAIN
    },
];

pub fn find(name: &str) -> Option<&'static Pre> {
    TABLE.iter().find(|pre| pre.names.contains(&name))
}

pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|pre| pre.names).copied()
}

impl Pre {
    pub fn build(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::with_capacity(self.cuts.len() + 1);
        let mut gpt2 = false;
        for cut in self.cuts {
            match cut {
                Cut::Regex(pattern) => {
                    let pattern = SplitPattern::Regex((*pattern).to_owned());
                    steps.push(Split::new(pattern, Isolated, false)?.into());
                }
                Cut::Digits => steps.push(Digits::new(true).into()),
                Cut::Gpt2 => gpt2 = true,
            }
        }
        // Last, since it replaces bytes by their stand-ins.
        steps.push(ByteLevel::new(false, false, gpt2).into());
        Ok(Sequence::new(steps).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_compiles_and_every_name_is_one_thing() {
        let mut seen = std::collections::BTreeSet::new();
        for pre in TABLE {
            pre.build().expect("compiles");
            assert!(pre.names.iter().all(|name| seen.insert(*name)), "{:?}", pre.names);
            assert!(pre.cuts.iter().rev().skip(1).all(|cut| !matches!(cut, Cut::Gpt2)));
        }
        assert!(find("default").is_none());
    }
}
