//! vLLM's bytes: a batch of events in msgpack.
//!
//! Owns: the order and names of fields. Must never: decide what is told.
//!
//! A batch is `[time in seconds, [event, ...], data-parallel rank]`; see docs/kv-events.md for its events, field by field.

use std::sync::Arc;

use folio_engine::Medium;
use folio_kv::BlockHash;
use rmp::encode;

use crate::config::EventFormat;

/// Something to tell, of one block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    Stored {
        hash: BlockHash,
        parent: Option<BlockHash>,
        tokens: Arc<[u32]>,
        /// The extra key of its chain.
        salt: Option<Arc<str>>,
        medium: Medium,
    },
    Removed {
        hash: BlockHash,
        medium: Medium,
    },
    Cleared,
}

/// vLLM's name of a memory: that which the model computes in is "GPU" wherever it is.
pub fn medium_name(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU",
        Medium::Disk => "STORAGE",
    }
}

/// How batches are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    pub format: EventFormat,
    pub int_block_hashes: bool,
    pub block_tokens: u32,
}

/// This engine has one rank.
const RANK: u64 = 0;
/// Group 0 is what a prefix is found in.
const GROUP: u64 = 0;
const KIND: &str = "full_attention";

impl Wire {
    /// `time_s`: seconds since 1970. Blocks of a chain that were stored, and what was removed, one after another, are one event each.
    pub fn batch(&self, time_s: f64, items: &[Item]) -> Vec<u8> {
        let events: Vec<&[Item]> = items.chunk_by(belong).collect();
        let mut out = Vec::with_capacity(64 + items.len() * (16 + 5 * self.block_tokens as usize));
        ok(encode::write_array_len(&mut out, 3));
        ok(encode::write_f64(&mut out, time_s));
        ok(encode::write_array_len(&mut out, events.len() as u32));
        for event in events {
            match &event[0] {
                Item::Stored { .. } => self.stored(&mut out, event),
                Item::Removed { .. } => self.removed(&mut out, event),
                Item::Cleared => self.begin(&mut out, "AllBlocksCleared", 0),
            }
        }
        ok(encode::write_uint(&mut out, RANK).map(|_| ()));
        out
    }

    fn begin(&self, out: &mut Vec<u8>, tag: &str, fields: u32) {
        match self.format {
            EventFormat::Array => ok(encode::write_array_len(out, fields + 1)),
            EventFormat::Map => {
                ok(encode::write_map_len(out, fields + 1));
                ok(encode::write_str(out, "type"));
            }
        }
        ok(encode::write_str(out, tag));
    }

    /// In the wire's order.
    fn name(&self, out: &mut Vec<u8>, name: &str) {
        if self.format == EventFormat::Map {
            ok(encode::write_str(out, name));
        }
    }

    fn stored(&self, out: &mut Vec<u8>, chain: &[Item]) {
        let Item::Stored { parent, medium, .. } = &chain[0] else { return };
        self.begin(out, "BlockStored", 10);
        self.name(out, "block_hashes");
        self.hashes(out, chain);
        self.name(out, "parent_block_hash");
        match parent {
            Some(parent) => self.hash(out, parent),
            None => ok(encode::write_nil(out)),
        }
        self.name(out, "token_ids");
        ok(encode::write_array_len(out, chain.len() as u32 * self.block_tokens));
        for item in chain {
            let Item::Stored { tokens, .. } = item else { continue };
            tokens.iter().for_each(|token| ok(encode::write_uint(out, (*token).into()).map(|_| ())));
        }
        self.name(out, "block_size");
        ok(encode::write_uint(out, self.block_tokens.into()).map(|_| ()));
        for adapter in ["lora_id", "medium", "lora_name"] {
            self.name(out, adapter);
            match adapter {
                "medium" => ok(encode::write_str(out, medium_name(*medium))),
                _ => ok(encode::write_nil(out)),
            }
        }
        self.name(out, "extra_keys");
        extra_keys(out, chain);
        self.name(out, "group_idx");
        ok(encode::write_uint(out, GROUP).map(|_| ()));
        self.name(out, "kv_cache_spec_kind");
        ok(encode::write_str(out, KIND));
    }

    fn removed(&self, out: &mut Vec<u8>, items: &[Item]) {
        let Item::Removed { medium, .. } = &items[0] else { return };
        self.begin(out, "BlockRemoved", 3);
        self.name(out, "block_hashes");
        self.hashes(out, items);
        self.name(out, "medium");
        ok(encode::write_str(out, medium_name(*medium)));
        self.name(out, "group_idx");
        ok(encode::write_uint(out, GROUP).map(|_| ()));
    }

    fn hashes(&self, out: &mut Vec<u8>, items: &[Item]) {
        ok(encode::write_array_len(out, items.len() as u32));
        for item in items {
            if let Item::Stored { hash, .. } | Item::Removed { hash, .. } = item {
                self.hash(out, hash);
            }
        }
    }

    fn hash(&self, out: &mut Vec<u8>, hash: &BlockHash) {
        match self.int_block_hashes {
            true => ok(encode::write_uint(out, int_hash(hash)).map(|_| ())),
            false => ok(encode::write_bin(out, &hash.0)),
        }
    }
}

/// The last 8 bytes as a number, as vLLM cuts its hashes. Hashes are keyed by a secret of their tenant, so it tells nothing of the tokens.
pub fn int_hash(hash: &BlockHash) -> u64 {
    u64::from_be_bytes(hash.0[24..].try_into().expect("eight bytes"))
}

/// Whether two items that follow each other are one event.
fn belong(one: &Item, other: &Item) -> bool {
    match (one, other) {
        (
            Item::Stored { hash, medium: one, .. },
            Item::Stored { parent: Some(parent), medium: other, .. },
        ) => hash == parent && one == other,
        (Item::Removed { medium: one, .. }, Item::Removed { medium: other, .. }) => one == other,
        _ => false,
    }
}

/// Of each block a list or nothing; only the first of a chain can have some.
fn extra_keys(out: &mut Vec<u8>, chain: &[Item]) {
    let Item::Stored { salt: Some(salt), parent: None, .. } = &chain[0] else {
        return ok(encode::write_nil(out));
    };
    ok(encode::write_array_len(out, chain.len() as u32));
    ok(encode::write_array_len(out, 1));
    ok(encode::write_str(out, salt));
    chain[1..].iter().for_each(|_| ok(encode::write_nil(out)));
}

/// Memory takes whatever is written to it.
fn ok<T, E>(written: Result<T, E>) {
    debug_assert!(written.is_ok());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(of: u8) -> BlockHash {
        let mut bytes = [0x11; 32];
        bytes[24..].copy_from_slice(&[0, 0, 0, 0, 0, 0, 1, of]);
        BlockHash(bytes)
    }

    fn stored(of: u8, parent: Option<u8>, salt: Option<&str>) -> Item {
        let (hash, parent, tokens) = (hash(of), parent.map(hash), [u32::from(of), 300].into());
        Item::Stored { hash, parent, tokens, salt: salt.map(Into::into), medium: Medium::Device }
    }

    fn wire(format: EventFormat, int_block_hashes: bool) -> Wire {
        Wire { format, int_block_hashes, block_tokens: 2 }
    }

    #[test]
    fn arrays_are_vllms_byte_for_byte() {
        let removed = Item::Removed { hash: hash(7), medium: Medium::Device };
        let items = [stored(1, None, None), stored(2, Some(1), None), removed, Item::Cleared];
        let bytes = wire(EventFormat::Array, true).batch(1.5, &items);
        let mut expected = vec![0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x93];
        expected.push(0x9b);
        expected.extend([&[0xab][..], b"BlockStored"].concat());
        expected.extend([0x92, 0xcd, 1, 1, 0xcd, 1, 2, 0xc0]);
        expected.extend([0x94, 1, 0xcd, 1, 44, 2, 0xcd, 1, 44, 2, 0xc0]);
        expected.extend([&[0xa3][..], b"GPU", &[0xc0, 0xc0, 0], &[0xae], b"full_attention"].concat());
        expected.push(0x94);
        expected.extend([&[0xac][..], b"BlockRemoved", &[0x91, 0xcd, 1, 7], &[0xa3], b"GPU", &[0]].concat());
        expected.extend([&[0x91, 0xb0][..], b"AllBlocksCleared", &[0]].concat());
        assert_eq!(bytes, expected);
    }

    #[test]
    fn only_what_hangs_together_is_one_event() {
        let items = [stored(1, None, None), stored(3, Some(2), None), stored(4, Some(3), None)];
        assert_eq!(items.chunk_by(belong).map(<[Item]>::len).collect::<Vec<_>>(), [1, 2]);
        let removed = |of, medium| Item::Removed { hash: hash(of), medium };
        let [first, second] = [1, 2].map(|of| removed(of, Medium::Host));
        let items = [first, second, removed(3, Medium::Disk), stored(1, None, None), Item::Cleared];
        assert_eq!(items.chunk_by(belong).map(<[Item]>::len).collect::<Vec<_>>(), [2, 1, 1, 1]);
        let bytes = wire(EventFormat::Array, true).batch(0.0, &items);
        let has = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        assert!(has(b"\xa3CPU") && has(b"\xa7STORAGE") && has(b"\xa3GPU"));
    }

    #[test]
    fn whole_hashes_and_extra_keys_are_written_where_they_are_asked_for() {
        let bytes = wire(EventFormat::Map, false)
            .batch(0.0, &[stored(1, None, Some("ab")), stored(2, Some(1), Some("ab"))]);
        let has = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        assert!(has(&[&[0xc4, 32][..], &hash(2).0].concat()), "32 bytes");
        assert!(has(&[&[0xaa][..], b"extra_keys", &[0x92, 0x91, 0xa2], b"ab", &[0xc0]].concat()));
        assert!(has(b"\x8b\xa4type\xabBlockStored\xacblock_hashes"));
        assert_eq!(int_hash(&hash(9)), 0x109);
    }
}
