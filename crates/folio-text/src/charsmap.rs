//! Sentencepiece's `precompiled_charsmap`: rules that write the beginning of a text otherwise, as NFKC does.
//!
//! The format is sentencepiece's (`normalizer.cc`), little-endian: the bytes of a trie as a u32, the trie as a double array of u32 (darts-clone),
//! and what the rules write, each with a NUL behind it.
//!
//! Owns: reading it, and looking a text's beginning up in it. Must never: look outside it: all that a text can reach is checked when it is read.
//!
//! Cost: reading is linear in the map times the longest rule; a look-up looks at [`KEY_BYTES_MAX`] bytes at most.

use crate::work;

/// `nmt_nfkc` has 240 kB.
const MAP_BYTES_MAX: usize = 4 << 20;
/// Of what a rule is for. `nmt_nfkc` has rules for up to 10.
const KEY_BYTES_MAX: usize = 64;
/// What a rule writes has no more bytes than so many times those that it is for. NFKC's largest factor is 11.
const GROWTH_MAX: usize = 16;

pub(crate) struct Charsmap {
    /// Not empty.
    units: Vec<Unit>,
    replacements: String,
}

/// A place of the double array: a node, or where what a rule writes begins.
#[derive(Clone, Copy)]
struct Unit(u32);

impl Unit {
    /// Whether a rule ends here.
    fn has_leaf(self) -> bool {
        (self.0 >> 8) & 1 == 1
    }

    /// Of a leaf.
    fn value(self) -> usize {
        (self.0 & 0x7FFF_FFFF) as usize
    }

    /// The byte by which it is reached; above 255 by none.
    fn label(self) -> u32 {
        self.0 & 0x8000_00FF
    }

    /// The base of the node at `place`: its child by a byte is at the base XOR the byte, its leaf at the base.
    fn base(self, place: usize) -> usize {
        let offset = (self.0 >> 10) << ((self.0 & 0x200) >> 6);
        place ^ offset as usize
    }
}

impl Charsmap {
    /// An error is the rest of a sentence that begins with the map.
    pub(crate) fn read(map: &[u8]) -> Result<Self, String> {
        if map.len() > MAP_BYTES_MAX {
            return Err(format!("has {} bytes, more than {MAP_BYTES_MAX}", map.len()));
        }
        let Some((head, rest)) = map.split_first_chunk::<4>() else {
            return Err(format!("has {} bytes, too few for the size of its trie", map.len()));
        };
        let bytes = u32::from_le_bytes(*head) as usize;
        if bytes == 0 || !bytes.is_multiple_of(4) || bytes > rest.len() {
            return Err(format!(
                "has a trie of {bytes} bytes, expected a multiple of 4 and no more than the {} that are left",
                rest.len()
            ));
        }
        let (trie, replacements) = rest.split_at(bytes);
        let units = trie
            .chunks_exact(4)
            .map(|unit| Unit(u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]])))
            .collect();
        let replacements = std::str::from_utf8(replacements).map_err(|_| "writes what is no UTF-8")?;
        let map = Self { units, replacements: replacements.to_owned() };
        map.check()?;
        Ok(map)
    }

    /// Checks all nodes that a text can reach, by the number of bytes after which it does. In a circle that has no end.
    fn check(&self) -> Result<(), String> {
        // By the base of their parent.
        let mut children: Vec<(usize, usize)> = (0..)
            .zip(&self.units)
            .filter(|(_, unit)| (1..=255).contains(&unit.label()))
            .map(|(place, unit)| (place ^ unit.label() as usize, place))
            .collect();
        children.sort_unstable();
        // Bases. Nodes may share one, as darts-clone builds them.
        let mut level = vec![self.inside(self.units[0].base(0))?];
        let mut reached = vec![0; self.units.len()];
        for length in 1..=KEY_BYTES_MAX + 1 {
            let mut next = Vec::new();
            for parent in level {
                let first = children.partition_point(|(base, _)| *base < parent);
                for (_, place) in children[first..].iter().take_while(|(base, _)| *base == parent) {
                    let unit = self.units[*place];
                    let base = self.inside(unit.base(*place))?;
                    if unit.has_leaf() {
                        self.check_replacement(self.units[base].value(), length)?;
                    }
                    if reached[base] != length {
                        reached[base] = length;
                        next.push(base);
                    }
                }
            }
            if next.is_empty() {
                return Ok(());
            }
            level = next;
        }
        Err(format!("has rules for more than {KEY_BYTES_MAX} bytes"))
    }

    /// The base, if a look-up of any byte from there stays inside.
    fn inside(&self, base: usize) -> Result<usize, String> {
        if (base | 0xFF) < self.units.len() {
            return Ok(base);
        }
        Err(format!("has a trie of {} units, one of which points to {base}", self.units.len()))
    }

    /// Of a rule for `length` bytes, which writes what is at `place`.
    fn check_replacement(&self, place: usize, length: usize) -> Result<(), String> {
        let Some(rest) = self.replacements.get(place..) else {
            return Err(format!(
                "has a rule that writes what is at byte {place} of {}, where no character begins",
                self.replacements.len()
            ));
        };
        let most = GROWTH_MAX * length;
        if rest.bytes().take(most + 1).all(|byte| byte != 0) {
            return Err(format!("has a rule for {length} bytes that writes more than {most}, or has no end"));
        }
        Ok(())
    }

    /// What the longest rule for a beginning of `text` writes, and the bytes of that beginning. What ends within a character is none.
    pub(crate) fn longest(&self, text: &str) -> Option<(&str, usize)> {
        let mut base = self.units[0].base(0);
        let (mut found, mut looked) = (None, 0);
        for (length, byte) in (1..).zip(text.bytes()) {
            looked = length;
            let place = base ^ usize::from(byte);
            let unit = self.units[place];
            // Checked are rules without a NUL, and there are no others.
            if byte == 0 || unit.label() != u32::from(byte) {
                break;
            }
            base = unit.base(place);
            if unit.has_leaf() && text.is_char_boundary(length) {
                found = Some((self.units[base].value(), length));
            }
        }
        work::add(looked);
        let (place, length) = found?;
        let written = self.replacements[place..].split('\0').next()?;
        Some((written, length))
    }
}
