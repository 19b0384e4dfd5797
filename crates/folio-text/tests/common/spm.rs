//! Writes files of sentencepiece.
#![allow(dead_code)] // Each test file uses a part of this.

pub const NORMAL: u64 = 1;
pub const UNKNOWN: u64 = 2;
pub const CONTROL: u64 = 3;
pub const USER_DEFINED: u64 = 4;
pub const UNUSED: u64 = 5;
pub const BYTE: u64 = 6;

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

pub fn number(field: u64, value: i64) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3, &mut out);
    varint(value as u64, &mut out);
    out
}

pub fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    varint((field << 3) | 2, &mut out);
    varint(value.len() as u64, &mut out);
    out.extend(value);
    out
}

pub fn piece(text: &[u8], score: f32, kind: u64) -> Vec<u8> {
    let mut score_field = vec![0x15u8];
    score_field.extend(score.to_le_bytes());
    bytes(1, &[bytes(1, text), score_field, number(3, kind as i64)].concat())
}

/// `trainer_spec` and `normalizer_spec` of a model as Llama's, with more fields behind.
pub fn specs(trainer: &[u8], normalizer: &[u8]) -> Vec<u8> {
    let of_trainer = [&number(3, 2)[..], &number(43, -1)[..], trainer].concat();
    let of_normalizer =
        [&bytes(1, b"identity")[..], &bytes(2, b"")[..], &number(4, 0)[..], normalizer].concat();
    [bytes(2, &of_trainer), bytes(3, &of_normalizer)].concat()
}

/// A `precompiled_charsmap` that writes the second text for the first. The children of each node have 256 units of their own: the root's are
/// the second, those of other nodes follow in the order in which the rules make them.
pub fn charsmap(rules: &[(&str, &str)]) -> Vec<u8> {
    let mut units = vec![0u32; 512];
    units[0] = 256 << 10;
    let mut replacements: Vec<u8> = Vec::new();
    for (key, replacement) in rules {
        let (mut place, mut base) = (0, 256);
        for byte in key.bytes() {
            place = base ^ usize::from(byte);
            if units[place] == 0 {
                let children = units.len();
                units.resize(children + 256, 0);
                units[place] = u32::from(byte) | (((place ^ children) as u32) << 10);
            }
            base = place ^ (units[place] >> 10) as usize;
        }
        units[place] |= 1 << 8;
        units[base] = (replacements.len() as u32) | (1 << 31);
        replacements.extend(replacement.bytes());
        replacements.push(0);
    }
    let trie = units.iter().flat_map(|unit| unit.to_le_bytes());
    (units.len() as u32 * 4).to_le_bytes().into_iter().chain(trie).chain(replacements).collect()
}
