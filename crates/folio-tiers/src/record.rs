//! One block on disk: 192 bytes of header, its bytes, what is kept with it, zeros up to a page.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | `FOLIOKVR` |
//! | 8 | 2 | version, 2 |
//! | 10 | 2 | flags: 1 is sealed |
//! | 12 | 4 | epoch of the key, 0 |
//! | 16 | 1 | cache group |
//! | 17 | 1 | 0 |
//! | 18 | 2 | length of the lineage |
//! | 20 | 4 | length of the block |
//! | 24 | 32 | hash of the block |
//! | 56 | 32 | layout digest |
//! | 88 | 4 | when it expires, in seconds since 1970; 0: never |
//! | 92 | 4 | 0 |
//! | 96 | 8 | mark of its owner |
//! | 104 | 24 | nonce; zeros where it is not sealed |
//! | 128 | 16 | tag over the bytes before the nonce and the block |
//! | 144 | 16 | tag over the bytes before the nonce and the lineage |
//! | 160 | 4 | CRC-32C of the block as it lies here |
//! | 164 | 24 | 0 |
//! | 188 | 4 | CRC-32C of the 188 bytes before |
//!
//! The *lineage* follows the block, sealed like it: the hash of the block before it (zeros: it is the first of a chain) and its token ids, 4
//! bytes each. Blocks of groups above 0 have none.
//!
//! Numbers are little-endian. The checksums need no key: they tell damage from another's key, and a record from anything else. What is
//! served has been verified by the tag.

use folio_kv::BlockHash;

use crate::clock::Forward;
use crate::io::PAGE;
use crate::seal::{self, NONCE, OwnerKey, Part, TAG};
use crate::types::{About, BlockKey, DataKey, Miss};

pub const HEADER: usize = 192;
pub const VERSION: u16 = 2;

const MAGIC: &[u8; 8] = b"FOLIOKVR";
const SEALED: u16 = 1;
/// What the tag covers besides the block.
const ABOUT: usize = 104;
/// Its group and hash, which its owner's mark is of.
const NAME: usize = 33;
const PARENT: usize = 32;

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub key: BlockKey,
    pub length: u32,
    pub lineage: u16,
    pub layout: [u8; 32],
    pub expires_s: u32,
    owner: [u8; 8],
    crc: u32,
    sealed: bool,
}

/// What lies where a header is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    Header(Header),
    /// A record, but of a version that this one cannot read.
    Foreign,
    Nothing,
}

/// That a block and its lineage take, which have so many bytes.
pub fn pages(length: usize) -> usize {
    (HEADER + length).div_ceil(PAGE)
}

/// Bytes of the lineage of a block of so many tokens. A list that is longer than a header can say is not kept.
pub fn lineage_bytes(tokens: usize) -> u16 {
    let bytes = if tokens == 0 { 0 } else { PARENT + 4 * tokens };
    u16::try_from(bytes).unwrap_or(0)
}

fn name(key: &BlockKey) -> [u8; NAME] {
    let mut name = [key.group; NAME];
    name[1..].copy_from_slice(&key.hash.0);
    name
}

pub fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..at + N].try_into().expect("as long")
}

/// Makes the record of `block` in `into`, which is [`pages`] long.
pub fn write(
    into: &mut [u8],
    (key, layout): (&BlockKey, &[u8; 32]),
    data_key: &DataKey,
    nonce: Option<[u8; NONCE]>,
    block: &[u8],
    about: &About<'_>,
) {
    let mut lineage = Vec::new();
    if lineage_bytes(about.tokens.len()) > 0 {
        lineage.extend_from_slice(&about.parent.map_or([0; PARENT], |parent| parent.0));
        lineage.extend(about.tokens.iter().flat_map(|token| token.to_le_bytes()));
    }
    let (head, rest) = into.split_at_mut(HEADER);
    let (body, rest) = rest.split_at_mut(block.len());
    let (behind, padding) = rest.split_at_mut(lineage.len());
    padding.fill(0);
    head.fill(0);
    head[..8].copy_from_slice(MAGIC);
    head[8..10].copy_from_slice(&VERSION.to_le_bytes());
    head[10..12].copy_from_slice(&if nonce.is_some() { SEALED } else { 0 }.to_le_bytes());
    head[16] = key.group;
    head[18..20].copy_from_slice(&(lineage.len() as u16).to_le_bytes());
    head[20..24].copy_from_slice(&(block.len() as u32).to_le_bytes());
    head[24..56].copy_from_slice(&key.hash.0);
    head[56..88].copy_from_slice(layout);
    head[88..92].copy_from_slice(&about.expires_s.unwrap_or(0).to_le_bytes());
    head[96..104].copy_from_slice(&OwnerKey::from(data_key).mark(&name(key)));
    head[104..128].copy_from_slice(&nonce.unwrap_or_default());
    for (part, plain, into, tag) in
        [(Part::Block, block, body, 128), (Part::Lineage, &lineage[..], behind, 144)]
    {
        let sealed = match nonce {
            Some(nonce) => seal::seal(part, data_key, &nonce, &head[..ABOUT], plain, into),
            None => {
                into.copy_from_slice(plain);
                seal::authenticate(part, data_key, &head[..ABOUT], plain)
            }
        };
        head[tag..tag + TAG].copy_from_slice(&sealed);
    }
    let crc = crc32c::crc32c(&into[HEADER..HEADER + block.len()]);
    into[160..164].copy_from_slice(&crc.to_le_bytes());
    let crc = crc32c::crc32c(&into[..188]);
    into[188..HEADER].copy_from_slice(&crc.to_le_bytes());
}

pub fn parse(bytes: &[u8]) -> Parsed {
    let Some(head) = bytes.get(..HEADER) else { return Parsed::Nothing };
    if &head[..8] != MAGIC || crc32c::crc32c(&head[..188]) != word(head, 188) {
        return Parsed::Nothing;
    }
    let flags = half(head, 10);
    if half(head, 8) != VERSION || flags & !SEALED != 0 || word(head, 12) != 0 {
        return Parsed::Foreign;
    }
    Parsed::Header(Header {
        key: BlockKey { hash: BlockHash(*array(head, 24)), group: head[16] },
        length: word(head, 20),
        lineage: half(head, 18),
        layout: *array(head, 56),
        expires_s: word(head, 88),
        owner: *array(head, 96),
        crc: word(head, 160),
        sealed: flags & SEALED != 0,
    })
}

/// Whose a record is.
pub fn is_of(record: &[u8], owner: &OwnerKey) -> bool {
    matches!(parse(record), Parsed::Header(header) if header.is_of(owner))
}

impl Header {
    /// Of the block and what is kept with it.
    pub fn body(&self) -> usize {
        self.length as usize + usize::from(self.lineage)
    }

    pub fn is_of(&self, owner: &OwnerKey) -> bool {
        owner.mark(&name(&self.key)) == self.owner
    }

    /// The block before it, and its tokens, from the lineage as it lies behind the block; `head` begins with the header. `None`: it has none, or
    /// not what was written.
    pub fn open_lineage(
        &self,
        head: &[u8],
        lineage: &[u8],
        data_key: &DataKey,
    ) -> Option<(Option<BlockHash>, Box<[u32]>)> {
        let (about, nonce, tag) = (head.get(..ABOUT)?, array::<NONCE>(head, 104), array::<TAG>(head, 144));
        let tokens = lineage.len().checked_sub(PARENT)?;
        let mut plain = lineage.to_vec();
        let opened = match self.sealed {
            true => seal::open(Part::Lineage, data_key, nonce, about, lineage, tag, &mut plain),
            false => seal::is_authentic(Part::Lineage, data_key, about, lineage, tag),
        };
        let parent = BlockHash(*array(&plain, 0));
        let tokens = plain[PARENT..][..tokens].chunks_exact(4).map(|token| word(token, 0)).collect();
        opened.then_some((Some(parent).filter(|parent| parent.0 != [0; PARENT]), tokens))
    }

    /// Whether the block behind this header is as it was written. `record` begins with the header.
    pub fn is_whole(&self, record: &[u8]) -> bool {
        let body = record.get(HEADER..).and_then(|rest| rest.get(..self.length as usize));
        body.is_some_and(|body| crc32c::crc32c(body) == self.crc)
    }
}

/// The block of a record, if it is what was asked for; otherwise `into` stays as it is.
pub fn read(
    record: &[u8],
    key: &BlockKey,
    layout: &[u8; 32],
    data_key: &DataKey,
    clock: &Forward,
    into: &mut [u8],
) -> Result<(), Miss> {
    let header = match parse(record) {
        Parsed::Header(header) => header,
        Parsed::Foreign => return Err(Miss::Version),
        Parsed::Nothing => return Err(Miss::Damaged),
    };
    if header.layout != *layout {
        return Err(Miss::Layout);
    }
    if header.key != *key {
        return Err(Miss::Block);
    }
    if header.length as usize != into.len() {
        return Err(Miss::Length);
    }
    if clock.is_over(header.expires_s) {
        return Err(Miss::Expired);
    }
    let body = record.get(HEADER..HEADER + into.len()).ok_or(Miss::Damaged)?;
    let (about, nonce, tag) = (&record[..ABOUT], array::<NONCE>(record, 104), array::<TAG>(record, 128));
    let opened = if header.sealed {
        seal::open(Part::Block, data_key, nonce, about, body, tag, into)
    } else {
        let authentic = seal::is_authentic(Part::Block, data_key, about, body, tag);
        if authentic {
            into.copy_from_slice(body);
        }
        authentic
    };
    match opened {
        true => Ok(()),
        false if header.is_whole(record) => Err(Miss::Key),
        false => Err(Miss::Damaged),
    }
}
