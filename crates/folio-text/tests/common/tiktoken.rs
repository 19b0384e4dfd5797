//! Turns tiktoken rank files into tokenizer.json, so that the goldens of those vocabularies can be checked.

use std::collections::HashMap;

use serde_json::{Value, json};

pub type Ranks = HashMap<Vec<u8>, u32>;

pub const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
pub const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// `base64 rank` lines.
pub fn rank_lines(text: &str) -> Ranks {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(token, rank)| (base64(token), rank.trim().parse().expect("rank")))
        .collect()
}

/// `! offset token token ...` lines, as in the npm package.
pub fn rank_runs(text: &str) -> Ranks {
    let mut ranks = Ranks::new();
    for line in text.lines() {
        let mut words = line.split(' ').skip(1);
        let first: u32 = words.next().expect("offset").parse().expect("number");
        ranks.extend(words.enumerate().map(|(i, token)| (base64(token), first + i as u32)));
    }
    ranks
}

/// A tokenizer.json with these ranks as byte-level BPE and `special` added tokens.
pub fn tokenizer_json(ranks: &Ranks, pattern: &str, ignore_merges: bool, special: &[(&str, u32)]) -> Value {
    let alphabet = alphabet();
    let spell = |bytes: &[u8]| bytes.iter().map(|b| alphabet[*b as usize]).collect::<String>();
    let mut by_rank: Vec<(&Vec<u8>, u32)> = ranks.iter().map(|(token, rank)| (token, *rank)).collect();
    by_rank.sort_by_key(|(_, rank)| *rank);
    let mut vocab = serde_json::Map::new();
    let mut merges = Vec::new();
    for (token, rank) in by_rank {
        vocab.insert(spell(token), json!(rank));
        if token.len() > 1 {
            let parts = split_below(ranks, token, rank);
            if let [left, right] = parts.as_slice() {
                merges.push(json!([spell(left), spell(right)]));
            }
        }
    }
    let added: Vec<Value> = special
        .iter()
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges},
    })
}

/// BPE of `token` with the merges of lower rank than its own: two parts, the merge that makes it.
fn split_below<'a>(ranks: &Ranks, token: &'a [u8], limit: u32) -> Vec<&'a [u8]> {
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    while cuts.len() > 3 {
        let best = (0..cuts.len() - 2)
            .filter_map(|i| Some((*ranks.get(&token[cuts[i]..cuts[i + 2]])?, i)))
            .filter(|(rank, _)| *rank < limit)
            .min();
        match best {
            Some((_, i)) => cuts.remove(i + 1),
            None => break,
        };
    }
    cuts.windows(2).map(|w| &token[w[0]..w[1]]).collect()
}

/// GPT-2's printable stand-ins, by byte.
pub fn alphabet() -> Vec<char> {
    let mut next = 256;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).expect("a letter")
            }
        })
        .collect()
}

fn base64(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let (mut bits, mut held) = (0u32, 0);
    for c in text.bytes() {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    out
}
