//! How token ids become bytes: the `decoder` section of tokenizer.json, reduced to a table where that is possible.
//!
//! Owns: the classification and the table. A decoder that works token by token (byte-level BPE, sentencepiece with or
//! without byte fallback) becomes id -> bytes plus an optional strip at the very start of the text. Anything else
//! (WordPiece, CTC, decoders of several tokens at once) is [`DecodeKind::Whole`] and is decoded by the library.
//!
//! Cost: one pass over the vocabulary; two allocations for the table.

use std::collections::HashMap;

use serde_json::Value;

/// Bytes of every token id, back to back.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenBytes {
    bytes: Vec<u8>,
    /// `starts[id] .. starts[id + 1]`.
    starts: Vec<u32>,
}

impl TokenBytes {
    /// Empty for an id that is no token.
    pub(crate) fn bytes_of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        self.bytes.extend_from_slice(bytes);
        self.starts.push(self.bytes.len() as u32);
    }
}

/// What happens to the first bytes of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Keep,
    /// Up to this many spaces are removed at the start of the text.
    StripSpaces(usize),
    /// All spaces that come from the prefix mark in the first token are removed (the Metaspace decoder).
    StripFirstToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeKind {
    /// The text is the concatenation of the tokens' bytes, after [`Start`].
    Table(Start),
    /// Only a run of tokens has a text; ask the library.
    Whole,
}

/// One step applied to each token by itself.
#[derive(Clone, Debug)]
enum DecoderStep {
    Replace { pattern: String, content: String },
    ByteFallback,
    ByteLevel,
    Metaspace { replacement: char },
}

/// A decoder as steps over single tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    steps: Vec<DecoderStep>,
    start: Option<Start>,
}

impl Plan {
    /// `None` when the decoder cannot be expressed token by token.
    pub(crate) fn parse(decoder: &Value) -> Option<Plan> {
        let mut plan = Plan::default();
        let mut fused = false;
        match kind(decoder)? {
            "Sequence" => {
                for step in decoder.get("decoders")?.as_array()? {
                    plan.add(step, &mut fused)?;
                }
            }
            _ => plan.add(decoder, &mut fused)?,
        }
        Some(plan)
    }

    pub(crate) fn start(&self) -> Start {
        self.start.unwrap_or(Start::Keep)
    }

    fn add(&mut self, step: &Value, fused: &mut bool) -> Option<()> {
        let bytes_already =
            self.steps.iter().any(|s| matches!(s, DecoderStep::ByteFallback | DecoderStep::ByteLevel));
        match kind(step)? {
            "Fuse" => *fused = true,
            "Replace" if !*fused && !bytes_already => {
                let pattern = step.get("pattern")?.get("String")?.as_str()?.to_owned();
                let content = step.get("content")?.as_str()?.to_owned();
                self.steps.push(DecoderStep::Replace { pattern, content });
            }
            "ByteFallback" if !*fused && !bytes_already => self.steps.push(DecoderStep::ByteFallback),
            "ByteLevel" if !*fused && self.steps.is_empty() => {
                self.steps.push(DecoderStep::ByteLevel);
                *fused = true;
            }
            "Metaspace" if !*fused && self.steps.is_empty() => {
                let replacement = step.get("replacement")?.as_str()?.chars().next()?;
                // Older files say add_prefix_space instead of prepend_scheme.
                let never = match step.get("prepend_scheme").and_then(Value::as_str) {
                    Some(scheme) => scheme == "never",
                    None => step.get("add_prefix_space").and_then(Value::as_bool) == Some(false),
                };
                self.steps.push(DecoderStep::Metaspace { replacement });
                self.start = Some(if never { Start::Keep } else { Start::StripFirstToken });
            }
            "Strip" if *fused && self.start.is_none() => {
                let stop = step.get("stop")?.as_u64()?;
                if stop != 0 || step.get("content")?.as_str()? != " " {
                    return None;
                }
                self.start = Some(Start::StripSpaces(step.get("start")?.as_u64()? as usize));
            }
            _ => return None,
        }
        Some(())
    }

    fn token(&self, token: &str, unbyte: &HashMap<char, u8>) -> Vec<u8> {
        let mut text = token.to_owned();
        for step in &self.steps {
            match step {
                DecoderStep::Replace { pattern, content } => text = text.replace(pattern.as_str(), content),
                DecoderStep::Metaspace { replacement } => text = text.replace(*replacement, " "),
                DecoderStep::ByteFallback => {
                    if let Some(byte) = fallback_byte(&text) {
                        return vec![byte];
                    }
                }
                DecoderStep::ByteLevel => {
                    // A token with a character outside the byte alphabet (an added token) stands for itself.
                    let bytes: Option<Vec<u8>> = text.chars().map(|c| unbyte.get(&c).copied()).collect();
                    return bytes.unwrap_or_else(|| text.into_bytes());
                }
            }
        }
        text.into_bytes()
    }

    /// `tokens[id]` is the token's text in the vocabulary.
    pub(crate) fn table(&self, tokens: &[Option<String>]) -> TokenBytes {
        let unbyte: HashMap<char, u8> = byte_alphabet().collect();
        let mut table = TokenBytes::default();
        for token in tokens {
            match token {
                Some(token) => table.push(&self.token(token, &unbyte)),
                None => table.push(&[]),
            }
        }
        table
    }
}

/// The table of a decoder that is not per token: the vocabulary's own text, for display only.
pub(crate) fn verbatim_table(tokens: &[Option<String>]) -> TokenBytes {
    let mut table = TokenBytes::default();
    for token in tokens {
        table.push(token.as_deref().unwrap_or_default().as_bytes());
    }
    table
}

fn kind(step: &Value) -> Option<&str> {
    step.get("type")?.as_str()
}

/// `<0x0A>` is byte 10.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// GPT-2's printable stand-ins for bytes: (character, byte).
pub(crate) fn byte_alphabet() -> impl Iterator<Item = (char, u8)> {
    let mut next = 256;
    (0..=255u8).map(move |byte| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => (char::from(byte), byte),
        _ => {
            let stand_in = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
            next += 1;
            (stand_in, byte)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_byte_alphabet_is_gpt2s() {
        let map: HashMap<u8, char> = byte_alphabet().map(|(c, b)| (b, c)).collect();
        assert_eq!(map.len(), 256);
        assert_eq!(map[&b' '], 'Ġ');
        assert_eq!(map[&b'\n'], 'Ċ');
        assert_eq!(map[&0xAD], 'Ń');
        let distinct: std::collections::HashSet<char> = map.values().copied().collect();
        assert_eq!(distinct.len(), 256);
    }

    #[test]
    fn decoders_are_classified() {
        let llama2 = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(Plan::parse(&llama2).map(|p| p.start()), Some(Start::StripSpaces(1)));
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": true});
        assert_eq!(Plan::parse(&bytes).map(|p| p.start()), Some(Start::Keep));
        let meta =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        assert_eq!(Plan::parse(&meta).map(|p| p.start()), Some(Start::StripFirstToken));
        for whole in [
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            json!({"type": "CTC"}),
            json!({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
            json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}),
            Value::Null,
        ] {
            assert!(Plan::parse(&whole).is_none(), "{whole}");
        }
    }

    #[test]
    fn bytes_of_an_unknown_id_are_empty() {
        let plan = Plan::parse(&json!({"type": "ByteLevel"})).expect("byte level");
        let table = plan.table(&[Some("Ġa".into()), None, Some("<｜end▁of▁x｜>".into()), Some("ä".into())]);
        assert_eq!(table.bytes_of(0), b" a");
        assert_eq!(table.bytes_of(1), b"");
        assert_eq!(table.bytes_of(2), "<｜end▁of▁x｜>".as_bytes());
        assert_eq!(table.bytes_of(3), [0xE4]);
        assert_eq!(table.bytes_of(4), b"");
        assert_eq!(table.bytes_of(u32::MAX), b"");
    }
}
