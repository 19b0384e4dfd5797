//! A file of records: a page that says what it is, records one after the other, and once it is full a footer that lists them.
//!
//! First page:
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | `FOLIOKVS` |
//! | 8 | 4 | version, 2 |
//! | 12 | 4 | CRC-32C of the 12 bytes before |
//! | 16 | 4 | class of its blocks: 0 low, 1 ordinary, 2 declared |
//! | 20 | 4 | CRC-32C of the 20 bytes before |
//!
//! The first 16 bytes stay what they are in every version, so that a file of a later one is known for what it is, and kept.
//!
//! The footer begins at a page and ends with the file: entries of 48 bytes, zeros, and in the last 64 bytes:
//!
//! | of an entry | bytes | | | of the end | bytes | |
//! |---|---|---|---|---|---|---|
//! | 0 | 32 | hash | | 0 | 8 | `FOLIOKVE` |
//! | 32 | 1 | cache group | | 8 | 4 | version, 2 |
//! | 33 | 1 | 0 | | 12 | 4 | entries |
//! | 34 | 2 | length of the lineage | | 16 | 4 | page where the footer begins |
//! | 36 | 4 | page of the record | | 20 | 4 | CRC-32C of all of the footer before this end |
//! | 40 | 4 | length of the block | | 24 | 32 | layout digest |
//! | 44 | 4 | when it expires | | | | |
//! | | | | | 56 | 4 | 0 |
//! | | | | | 60 | 4 | CRC-32C of the 60 bytes before |
//!
//! A segment without a footer that can be believed is read header by header.

use std::io;

use folio_kv::BlockHash;

use crate::io::{File, PAGE, Pages, read_full};
use crate::record::{self, Header, Parsed, VERSION, word};
use crate::types::{BlockKey, Class};

const FIRST: &[u8; 8] = b"FOLIOKVS";
const LAST: &[u8; 8] = b"FOLIOKVE";
const ENTRY: usize = 48;
const END: usize = 64;
/// Of a file that is looked at together where nothing was found.
const WINDOW: usize = 64;

/// A record of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: BlockKey,
    pub page: u32,
    pub length: u32,
    pub lineage: u16,
    /// In seconds since 1970; 0: never.
    pub expires_s: u32,
}

impl Entry {
    /// Bytes of the block and its lineage.
    pub fn body(&self) -> usize {
        self.length as usize + usize::from(self.lineage)
    }
}

/// What a segment holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Contents {
    pub entries: Vec<Entry>,
    /// Of all of them.
    pub layout: [u8; 32],
    /// Behind the last record.
    pub end: u32,
    pub class: Class,
}

/// What was found in a file.
#[derive(Debug)]
pub enum Found {
    Footer(Contents),
    /// Its records, one by one: it has no footer that can be believed.
    Scanned(Contents),
    /// Of another version, at least in part. It is left as it is.
    Foreign,
}

pub fn name(number: u32) -> String {
    format!("{number:010}.segment")
}

pub fn number(name: &str) -> Option<u32> {
    let digits = name.strip_suffix(".segment")?;
    if digits.len() == 10 && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        digits.parse().ok()
    } else {
        None
    }
}

pub fn first_page(class: Class) -> Pages {
    let mut page = Pages::new(PAGE);
    page[..8].copy_from_slice(FIRST);
    page[8..12].copy_from_slice(&u32::from(VERSION).to_le_bytes());
    let crc = crc32c::crc32c(&page[..12]);
    page[12..16].copy_from_slice(&crc.to_le_bytes());
    page[16..20].copy_from_slice(&(class as u32).to_le_bytes());
    let crc = crc32c::crc32c(&page[..20]);
    page[20..24].copy_from_slice(&crc.to_le_bytes());
    page
}

/// Of a segment whose first page is this.
fn class(page: &[u8]) -> Class {
    let is_valid = page.len() >= 24 && crc32c::crc32c(&page[..20]) == word(page, 20);
    let class = Class::ALL.into_iter().find(|class| is_valid && *class as u32 == word(page, 16));
    class.unwrap_or_default()
}

/// Whether a file that begins with `page` is of segments of this or another version.
pub fn is_first_page(page: &[u8]) -> bool {
    page.len() >= 16 && &page[..8] == FIRST && crc32c::crc32c(&page[..12]) == word(page, 12)
}

/// That a footer with so many entries takes.
pub fn footer_pages(entries: usize) -> usize {
    (entries * ENTRY + END).div_ceil(PAGE)
}

pub fn footer(contents: &Contents) -> Pages {
    let mut footer = Pages::new(footer_pages(contents.entries.len()) * PAGE);
    for (entry, into) in contents.entries.iter().zip(footer.chunks_exact_mut(ENTRY)) {
        into[..32].copy_from_slice(&entry.key.hash.0);
        into[32] = entry.key.group;
        into[34..36].copy_from_slice(&entry.lineage.to_le_bytes());
        into[36..40].copy_from_slice(&entry.page.to_le_bytes());
        into[44..48].copy_from_slice(&entry.expires_s.to_le_bytes());
        into[40..44].copy_from_slice(&entry.length.to_le_bytes());
    }
    let at = footer.len() - END;
    let (list, end) = footer.split_at_mut(at);
    end[..8].copy_from_slice(LAST);
    end[8..12].copy_from_slice(&u32::from(VERSION).to_le_bytes());
    end[12..16].copy_from_slice(&(contents.entries.len() as u32).to_le_bytes());
    end[16..20].copy_from_slice(&contents.end.to_le_bytes());
    end[20..24].copy_from_slice(&crc32c::crc32c(list).to_le_bytes());
    end[24..56].copy_from_slice(&contents.layout);
    let crc = crc32c::crc32c(&end[..60]);
    end[60..64].copy_from_slice(&crc.to_le_bytes());
    footer
}

/// Reads what a file holds. With `whole`, records that are scanned are read to their end and left out where they are torn.
pub fn read(file: &dyn File, whole: bool) -> io::Result<Found> {
    let bytes = file.bytes()?;
    let mut page = Pages::new(PAGE);
    let first = read_full(file, &mut page, 0)?;
    if is_first_page(&page[..first]) && word(&page, 8) != u32::from(VERSION) {
        return Ok(Found::Foreign);
    }
    let class = class(&page[..first]);
    Ok(match read_footer(file, bytes)? {
        Some(contents) => Found::Footer(Contents { class, ..contents }),
        None => match scan(file, bytes, whole)? {
            Found::Scanned(contents) => Found::Scanned(Contents { class, ..contents }),
            other => other,
        },
    })
}

/// What a segment lists that was ended; `None`: it was not, its list cannot be believed, or it is of another version.
pub fn read_ended(file: &dyn File) -> io::Result<Option<Contents>> {
    let mut page = Pages::new(PAGE);
    let first = read_full(file, &mut page, 0)?;
    if !is_first_page(&page[..first]) || word(&page, 8) != u32::from(VERSION) {
        return Ok(None);
    }
    let class = class(&page[..first]);
    Ok(read_footer(file, file.bytes()?)?.map(|contents| Contents { class, ..contents }))
}

fn read_footer(file: &dyn File, bytes: u64) -> io::Result<Option<Contents>> {
    let pages = bytes / PAGE as u64;
    if bytes == 0 || !bytes.is_multiple_of(PAGE as u64) || u32::try_from(pages).is_err() {
        return Ok(None);
    }
    // Most footers lie in the last pages.
    let mut tail = Pages::new((4 * PAGE).min(bytes as usize));
    let at = bytes - tail.len() as u64;
    if read_full(file, &mut tail, at)? < tail.len() {
        return Ok(None);
    }
    let end = &tail[tail.len() - END..];
    let (count, page) = (word(end, 12) as usize, word(end, 16));
    let begins = u64::from(page) * PAGE as u64;
    if &end[..8] != LAST
        || crc32c::crc32c(&end[..60]) != word(end, 60)
        || word(end, 8) != u32::from(VERSION)
        || begins >= bytes
        // Each record takes a page: so much memory a list takes, and no more.
        || count > page as usize
        || footer_pages(count) as u64 != pages - u64::from(page)
    {
        return Ok(None);
    }
    let length = (bytes - begins) as usize;
    if length > tail.len() {
        tail = Pages::new(length);
        if read_full(file, &mut tail, begins)? < length {
            return Ok(None);
        }
    }
    let footer = &tail[tail.len() - length..];
    let (list, end) = footer.split_at(length - END);
    if crc32c::crc32c(list) != word(end, 20) {
        return Ok(None);
    }
    let layout = end[24..56].try_into().expect("32 bytes");
    let entries: Vec<_> = list.chunks_exact(ENTRY).take(count).map(entry).collect();
    let within = |entry: &Entry| {
        let pages = record::pages(entry.body()) as u64;
        entry.page > 0 && u64::from(entry.page) + pages <= u64::from(page)
    };
    let contents = Contents { entries, layout, end: page, class: Class::default() };
    Ok(contents.entries.iter().all(within).then_some(contents))
}

fn entry(bytes: &[u8]) -> Entry {
    let hash = BlockHash(bytes[..32].try_into().expect("32 bytes"));
    Entry {
        key: BlockKey { hash, group: bytes[32] },
        page: word(bytes, 36),
        length: word(bytes, 40),
        lineage: u16::from_le_bytes([bytes[34], bytes[35]]),
        expires_s: word(bytes, 44),
    }
}

/// Looks for records at every page that no record before it covers.
fn scan(file: &dyn File, bytes: u64, whole: bool) -> io::Result<Found> {
    let mut contents = Contents { end: 1, ..Contents::default() };
    let mut foreign = false;
    let pages = u32::try_from(bytes.div_ceil(PAGE as u64)).unwrap_or(u32::MAX);
    let mut window = Pages::new(WINDOW * PAGE);
    // Which pages are in the window, and how many are read next.
    let (mut from, mut have, mut next) = (0, 0, 1);
    let mut page = 1;
    while page < pages {
        if page >= from + have {
            let read = read_full(file, &mut window[..next * PAGE], u64::from(page) * PAGE as u64)?;
            (from, have) = (page, (read / PAGE) as u32);
            if have == 0 {
                break;
            }
        }
        let at = (page - from) as usize * PAGE;
        match record::parse(&window[at..at + PAGE]) {
            Parsed::Header(header) if is_there(file, &header, page, bytes, whole)? => {
                let record::Header { key, length, lineage, expires_s, .. } = header;
                if contents.entries.is_empty() {
                    contents.layout = header.layout;
                }
                if header.layout == contents.layout {
                    contents.entries.push(Entry { key, page, length, lineage, expires_s });
                }
                page += record::pages(header.body()) as u32;
                contents.end = page;
                next = 1;
            }
            parsed => {
                foreign |= parsed == Parsed::Foreign;
                page += 1;
                next = WINDOW;
            }
        }
    }
    Ok(if foreign { Found::Foreign } else { Found::Scanned(contents) })
}

/// Whether the file goes on to the end of a record, and with `whole` whether it is what was written.
fn is_there(file: &dyn File, header: &Header, page: u32, bytes: u64, whole: bool) -> io::Result<bool> {
    let begins = u64::from(page) * PAGE as u64;
    let length = record::HEADER + header.length as usize;
    if begins + (record::HEADER + header.body()) as u64 > bytes {
        return Ok(false);
    }
    if !whole {
        return Ok(true);
    }
    let mut record = Pages::new(length);
    let read = read_full(file, &mut record, begins)?;
    Ok(header.is_whole(&record[..read]))
}
