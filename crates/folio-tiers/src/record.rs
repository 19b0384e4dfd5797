//! One block on disk: 192 bytes of header, its bytes, zeros up to a page.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | `FOLIOKVR` |
//! | 8 | 2 | version, 1 |
//! | 10 | 2 | flags: 1 is sealed |
//! | 12 | 4 | epoch of the key, 0 |
//! | 16 | 1 | cache group |
//! | 17 | 3 | 0 |
//! | 20 | 4 | length of the block |
//! | 24 | 32 | hash of the block |
//! | 56 | 32 | layout digest |
//! | 88 | 24 | nonce; zeros where it is not sealed |
//! | 112 | 16 | tag over the bytes before the nonce and the block |
//! | 128 | 4 | CRC-32C of the block as it lies here |
//! | 132 | 56 | 0 |
//! | 188 | 4 | CRC-32C of the 188 bytes before |
//!
//! Numbers are little-endian. The checksums need no key: they tell damage from another's key, and a record from anything else. What is
//! served has been verified by the tag.

use folio_kv::BlockHash;

use crate::io::PAGE;
use crate::seal::{self, NONCE, TAG};
use crate::types::{BlockKey, DataKey, Miss};

pub const HEADER: usize = 192;
pub const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"FOLIOKVR";
const SEALED: u16 = 1;
/// What the tag covers besides the block.
const ABOUT: usize = 88;

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub key: BlockKey,
    pub length: u32,
    pub layout: [u8; 32],
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

/// That a block of so many bytes takes.
pub fn pages(length: usize) -> usize {
    (HEADER + length).div_ceil(PAGE)
}

fn word(bytes: &[u8], at: usize) -> u32 {
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
    key: &BlockKey,
    layout: &[u8; 32],
    data_key: &DataKey,
    nonce: Option<[u8; NONCE]>,
    block: &[u8],
) {
    let (head, rest) = into.split_at_mut(HEADER);
    let (body, padding) = rest.split_at_mut(block.len());
    padding.fill(0);
    head.fill(0);
    head[..8].copy_from_slice(MAGIC);
    head[8..10].copy_from_slice(&VERSION.to_le_bytes());
    head[10..12].copy_from_slice(&if nonce.is_some() { SEALED } else { 0 }.to_le_bytes());
    head[16] = key.group;
    head[20..24].copy_from_slice(&(block.len() as u32).to_le_bytes());
    head[24..56].copy_from_slice(&key.hash.0);
    head[56..88].copy_from_slice(layout);
    let tag = match nonce {
        Some(nonce) => {
            head[88..112].copy_from_slice(&nonce);
            seal::seal(data_key, &nonce, &head[..ABOUT], block, body)
        }
        None => {
            body.copy_from_slice(block);
            seal::authenticate(data_key, &head[..ABOUT], block)
        }
    };
    head[112..128].copy_from_slice(&tag);
    head[128..132].copy_from_slice(&crc32c::crc32c(body).to_le_bytes());
    let crc = crc32c::crc32c(&head[..188]);
    head[188..].copy_from_slice(&crc.to_le_bytes());
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
        layout: *array(head, 56),
        crc: word(head, 128),
        sealed: flags & SEALED != 0,
    })
}

impl Header {
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
    let body = record.get(HEADER..HEADER + into.len()).ok_or(Miss::Damaged)?;
    let (about, nonce, tag) = (&record[..ABOUT], array::<NONCE>(record, 88), array::<TAG>(record, 112));
    let opened = if header.sealed {
        seal::open(data_key, nonce, about, body, tag, into)
    } else {
        let authentic = seal::is_authentic(data_key, about, body, tag);
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
