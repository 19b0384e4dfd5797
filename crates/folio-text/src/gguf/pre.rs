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
/// As [`GPT4O`], with runs of Chinese characters by themselves.
pub(crate) const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
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
    Pre {
        names: &["dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"],
        cuts: &[Cut::Regex(LLAMA3)],
        ..PLAIN
    },
    Pre { names: &["qwen2", "megrez"], cuts: &[Cut::Regex(QWEN2)], nfc: true, ..PLAIN },
    Pre {
        names: &["deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"],
        cuts: &[Cut::Regex(QWEN2)],
        ..PLAIN
    },
    Pre { names: &["qwen35"], cuts: &[Cut::Regex(QWEN35)], nfc: true, ..PLAIN },
    Pre { names: &["tekken"], cuts: &[Cut::Regex(TEKKEN)], ignore_merges: true, add_bos: true, ..PLAIN },
    Pre { names: &["gpt-4o", "llama4", "kanana2", "minimax-m2"], cuts: &[Cut::Regex(GPT4O)], ..PLAIN },
    Pre { names: &["kimi-k2"], cuts: &[Cut::Regex(KIMI)], ..PLAIN },
    Pre {
        names: &["deepseek-llm"],
        cuts: &[
            Cut::Regex(r"[\r\n]"),
            Cut::Regex(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
            Cut::Regex("\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+"),
            Cut::Regex(r"\s+$"),
            Cut::Regex("[一-龥ࠀ-一가-\u{d7ff}]+"),
            Cut::Digits,
        ],
        ..PLAIN
    },
    Pre {
        names: &["falcon"],
        cuts: &[Cut::Regex(r"[\p{P}\$\+<=>\^~\|`]+"), Cut::Regex(GPT2), Cut::Regex("[0-9][0-9][0-9]")],
        ..PLAIN
    },
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
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    /// Where a text is cut, before bytes are replaced by their stand-ins.
    fn cut(name: &str, text: &str) -> Vec<String> {
        let split = |pattern: &str| {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            PreTokenizerWrapper::from(Split::new(pattern, Isolated, false).expect("compiles"))
        };
        let steps = find(name).expect("there is one").cuts.iter().map(|cut| match cut {
            Cut::Regex(pattern) => split(pattern),
            Cut::Digits => Digits::new(true).into(),
            Cut::Gpt2 => split(GPT2),
        });
        let mut pieces = PreTokenizedString::from(text);
        Sequence::new(steps.collect()).pre_tokenize(&mut pieces).expect("cuts");
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    /// Contractions of either case, digits, line ends, accents composed and not, Chinese beside Japanese. By hand, from llama.cpp's patterns.
    #[test]
    fn every_name_cuts_as_its_pattern_says() {
        const TEXT: &str = "It's we'LL 12345\n\nna\u{ef}ve cafe\u{301}s 漢字，かな!\n";
        let tables: &[(&[&str], &[&str])] = &[
            (
                &[
                    "glm4",
                    "glm5",
                    "chatglm-bpe",
                    "smaug-bpe",
                    "lfm2",
                    "llama3",
                    "llama-v3",
                    "falcon3",
                    "falcon-h1",
                    "pixtral",
                    "midm-2.0",
                ],
                &[
                    "It",
                    "'s",
                    " we",
                    "'LL",
                    " ",
                    "123",
                    "45",
                    "\n\n",
                    "na\u{ef}ve",
                    " cafe",
                    "\u{301}s",
                    " 漢字",
                    "，かな",
                    "!\n",
                ],
            ),
            (
                &["hunyuan", "megrez", "stablelm2", "solar-open", "grok-2", "kormo"],
                &[
                    "It",
                    "'s",
                    " we",
                    "'LL",
                    " ",
                    "1",
                    "2",
                    "3",
                    "4",
                    "5",
                    "\n\n",
                    "na\u{ef}ve",
                    " cafe",
                    "\u{301}s",
                    " 漢字",
                    "，かな",
                    "!\n",
                ],
            ),
            (
                &["minimax-m2", "llama4", "kanana2"],
                &[
                    "It's",
                    " we'LL",
                    " ",
                    "123",
                    "45",
                    "\n\n",
                    "na\u{ef}ve",
                    " cafe\u{301}s",
                    " 漢字",
                    "，かな",
                    "!\n",
                ],
            ),
            (
                &["kimi-k2"],
                &[
                    "It's",
                    " we'LL",
                    " ",
                    "123",
                    "45",
                    "\n\n",
                    "na\u{ef}ve",
                    " cafe\u{301}s",
                    " ",
                    "漢字",
                    "，かな",
                    "!\n",
                ],
            ),
            (
                &["hunyuan-dense"],
                &[
                    "It",
                    "'s",
                    " we",
                    "'LL",
                    " ",
                    "123",
                    "45",
                    "\n\n",
                    "na\u{ef}ve",
                    " cafe\u{301}s",
                    " ",
                    "漢字",
                    "，",
                    "かな",
                    "!\n",
                ],
            ),
            // What it calls signs are letters of ASCII, too.
            (
                &["deepseek-llm"],
                &[
                    "It", "'", "s", " we", "'", "LL", " ", "1", "2", "3", "4", "5", "\n", "\n", "na",
                    "\u{ef}", "ve", " cafe", "\u{301}", "s", " ", "漢字", "，", "かな", "!", "\n",
                ],
            ),
            (
                &["falcon"],
                &[
                    "It",
                    "'",
                    "s",
                    " we",
                    "'",
                    "LL",
                    " ",
                    "123",
                    "45",
                    "\n",
                    "\n",
                    "na\u{ef}ve",
                    " cafe",
                    "\u{301}",
                    "s",
                    " 漢字",
                    "，",
                    "かな",
                    "!",
                    "\n",
                ],
            ),
            (
                &["starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
                &[
                    "It",
                    "'s",
                    " we",
                    "'",
                    "LL",
                    " ",
                    "1",
                    "2",
                    "3",
                    "4",
                    "5",
                    "\n",
                    "\n",
                    "na\u{ef}ve",
                    " cafe",
                    "\u{301}",
                    "s",
                    " 漢字",
                    "，",
                    "かな",
                    "!",
                    "\n",
                ],
            ),
            (
                &["phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "a.x-4.0", "mellum", "gigachat"],
                &[
                    "It",
                    "'s",
                    " we",
                    "'",
                    "LL",
                    " 12345",
                    "\n",
                    "\n",
                    "na\u{ef}ve",
                    " cafe",
                    "\u{301}",
                    "s",
                    " 漢字",
                    "，",
                    "かな",
                    "!",
                    "\n",
                ],
            ),
        ];
        // Those that llama.cpp itself was asked for (tests/gguf_pre.json).
        let mut checked = vec![
            "llama-bpe",
            "dbrx",
            "qwen2",
            "deepseek-r1-qwen",
            "qwen35",
            "tekken",
            "gpt-4o",
            "seed-coder",
            "deepseek-v3",
            "deepseek-coder",
            "smollm",
            "gpt-2",
        ];
        for (names, expected) in tables {
            for name in *names {
                assert_eq!(cut(name, TEXT), *expected, "{name}");
                checked.push(name);
            }
        }
        let unchecked: Vec<&str> = names().filter(|name| !checked.contains(name)).collect();
        assert!(unchecked.is_empty(), "{unchecked:?}");
    }

    /// Patterns that are tried one after another, as transformers' tokenizers cut with them.
    #[test]
    fn texts_are_cut_as_the_models_own_tokenizers_do() {
        assert_eq!(
            cut("deepseek-llm", "It's 3 Words,\r\nnext 你好。  "),
            ["It", "'", "s", " ", "3", " Words", ",", "\r", "\n", "next", " ", "你好", "。", "  "]
        );
        assert_eq!(
            cut("falcon", "It's x<=12345 words!!  end"),
            ["It", "'", "s", " x", "<=", "123", "45", " words", "!!", " ", " end"]
        );
        assert_eq!(
            cut("kimi-k2", "Don't HTTPServer读书abc中文 12345 a/b\n"),
            ["Don't", " HTTPServer", "读书", "abc", "中文", " ", "123", "45", " a", "/b", "\n"]
        );
    }

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
