//! Which blocks make a value, and what it is called.
//!
//! Of group 0 a value is a *chunk*: the blocks whose index divided by a power of two is the same, but for those that an operator
//! declared. Of a group of windows it is a part of what the query behind an end reads. A value is records of its blocks, one behind the
//! other (`record`), so each of its blocks can be read by itself.
//!
//! A name is a keyed hash of everything that says what the value holds. Its key is derived from the tenant's: nobody else can tell whose
//! it is or whether two names belong together, and no two tenants, layouts or versions have one in common.

use std::fmt;

use folio_kv::Content;

use crate::record::{HEADER, VERSION};
use crate::tier::Device;
use crate::types::DataKey;

/// What a value is called.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name(pub [u8; 32]);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub group: u32,
    /// Index of its first block.
    pub first: u32,
    pub blocks: u32,
    pub name: Name,
}

/// Blocks that fit into `value_bytes` together, as a power of two; at least one.
pub fn chunk_blocks(block_bytes: usize, value_bytes: usize) -> u32 {
    let fit = (value_bytes / (HEADER + block_bytes)).max(1);
    1 << fit.ilog2().min(6)
}

/// Makes the names of a tenant's values.
pub struct Names {
    key: [u8; 32],
    layout: [u8; 32],
    /// Of a block of each group.
    bytes: Vec<usize>,
    value_bytes: usize,
}

impl Names {
    pub fn new(data_key: &DataKey, layout: &[u8; 32], bytes: Vec<usize>, value_bytes: usize) -> Self {
        let key = blake3::derive_key("folio 2026 remote store, names of values", &data_key.0);
        Self { key, layout: *layout, bytes, value_bytes }
    }

    pub fn chunk_blocks(&self) -> u32 {
        chunk_blocks(self.bytes[0], self.value_bytes)
    }

    /// Of group 0, with its last block before `end`, whose hash is `hash`. Of them `own` blocks are somebody else's.
    pub fn chunk(&self, own: u32, end: u32, hash: &[u8; 32]) -> Piece {
        let first = own.max(end - self.chunk_blocks());
        self.piece(0, first, end - first, 0, hash)
    }

    /// What the query behind `end` blocks of group 0, the last of them with `hash`, reads of a group of windows.
    pub fn window(&self, device: &Device, group: u32, end: u32, hash: &[u8; 32]) -> Vec<Piece> {
        let (size, config) = (device.groups[0].block_tokens, &device.groups[group as usize]);
        let whole = end * size / config.block_tokens;
        let most = chunk_blocks(self.bytes[group as usize], self.value_bytes);
        let first = config.first_block(end * size).min(whole);
        (first..whole)
            .step_by(most as usize)
            .zip(0..)
            .map(|(at, number)| self.piece(group, at, most.min(whole - at), number, hash))
            .collect()
    }

    /// The values that blocks of an order belong to, in order, each with those of them that are its. A chunk whose end is not among them
    /// has no name, so nothing of it comes; of windows nothing comes unless group 0 tells where they end.
    pub fn of<'a>(&self, device: &Device, own: u32, contents: &'a [Content]) -> Vec<(Piece, &'a [Content])> {
        let chunk = self.chunk_blocks();
        let mut pieces = Vec::new();
        let same = |a: &Content, b: &Content| {
            a.group == b.group && (a.group > 0 || a.index / chunk == b.index / chunk)
        };
        let mut last = None;
        for part in contents.chunk_by(same) {
            let end = part[part.len() - 1];
            let is_run = part.windows(2).all(|pair| pair[1].index == pair[0].index + 1);
            if part[0].group == 0 {
                let is_whole = (end.index + 1).is_multiple_of(chunk) && part[0].index >= own;
                last = Some((end.index + 1, end.hash.0));
                if is_run && is_whole {
                    pieces.push((self.chunk(own, end.index + 1, &end.hash.0), part));
                }
                continue;
            }
            let Some((end, hash)) = last else { continue };
            for piece in self.window(device, part[0].group, end, &hash) {
                let is_its =
                    |content: &&Content| (piece.first..piece.first + piece.blocks).contains(&content.index);
                let from = part.partition_point(|content| content.index < piece.first);
                let len = part[from..].iter().take_while(is_its).count();
                let its = &part[from..from + len];
                let is_run = its.windows(2).all(|pair| pair[1].index == pair[0].index + 1);
                if len > 0 && is_run {
                    pieces.push((piece, its));
                }
            }
        }
        pieces
    }

    fn piece(&self, group: u32, first: u32, blocks: u32, number: u32, hash: &[u8; 32]) -> Piece {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&u32::from(VERSION).to_le_bytes());
        // The epoch of the key.
        hasher.update(&0u32.to_le_bytes());
        hasher.update(&self.layout);
        for field in [group, number, blocks, self.bytes[group as usize] as u32] {
            hasher.update(&field.to_le_bytes());
        }
        hasher.update(hash);
        Piece { group, first, blocks, name: Name(*hasher.finalize().as_bytes()) }
    }
}
