//! KV behind a server that several engines share: runs of blocks as values, each under one name.
//!
//! Owns: which blocks make a value and what it is called (`pieces`), what is known of the server's values (`known`), whether the server
//! is asked at all (`breaker`). Must never: believe an answer that was not verified, wait without a limit, or hold up who asks while the
//! server does not answer.
//!
//! | thread | what it does here | how long it may wait |
//! |---|---|---|
//! | one that reads prompts | `find` | [`ObjectLimits::find`] in all, and not at all while the server is given up |
//! | one of the tier | `load`, `store` | [`ObjectLimits::carry`] for a value, the same |
//! | the prober | asks whether a server that was given up is back | nobody waits for it |
//!
//! A server may forget any value at any time. So what is known of it is a guess: where it was wrong, the load fails, and the next look-up
//! does not repeat it. Values are immutable; one that was found wrong is written over.

mod breaker;
mod known;
mod pieces;
pub mod s3;
pub mod valkey;
mod wire;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use folio_engine::{CHUNK_BLOCKS_MAX, LoadOrder, StoreOrder, TierStats};
use folio_kv::{BlockHashes, Content, Retention};

use self::breaker::Breaker;
use self::known::Known;
pub use self::pieces::Name;
use self::pieces::{Names, Piece, chunk_blocks};
use crate::clock::{Forward, WallClock};
use crate::record;
use crate::seal::NONCE;
use crate::tier::{Carried, Device, Store};
use crate::types::{About, BlockKey, DataKey, Miss};

/// At the start.
const GREETING_LIMIT: Duration = Duration::from_secs(2);
/// Look-ups that ask at once: who comes beside them makes do with what is known.
const LOOK_UPS: usize = 32;
/// Ends of a prompt that are tried for what windows read there.
const ENDS: u32 = 8;

/// Why a server did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Of a server that does so for long nothing is asked.
    #[error("it did not answer in time")]
    Late,
    #[error("{0}")]
    Broken(String),
    /// It answers, and says no: it is full, or not allowed to us. Not a sign that it is gone.
    #[error("{0}")]
    Refused(String),
}

/// Why there can be no such tier.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error(
        "{0:?} is none of valkey, valkeys, redis, rediss, s3 (a URL is like valkey://HOST:6379 or s3://BUCKET/PREFIX)"
    )]
    Scheme(String),
    #[error("it is no URL of a server: {0}")]
    Url(String),
    #[error("the certificates are none: {0}")]
    Authorities(String),
    #[error("{server} lets nobody in like this: {reason}")]
    Denied { server: String, reason: String },
    #[error("a thread for it cannot be made: {0}")]
    Thread(#[from] std::io::Error),
}

/// Whether a server lets us in. One that does not answer may come back: `Some` says why it is taken for gone.
pub fn greet(objects: &dyn Objects) -> Result<Option<Fault>, AddressError> {
    match objects.ping(GREETING_LIMIT) {
        Ok(()) => Ok(None),
        Err(Fault::Refused(reason)) => Err(AddressError::Denied { server: objects.server(), reason }),
        Err(fault) => Ok(Some(fault)),
    }
}

/// What is asked of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectLimits {
    /// How large values are made of small blocks.
    pub value_bytes: usize,
    /// How large one may be at most.
    pub value_bytes_max: usize,
    /// About how many names one question asks for.
    pub asked_at_once: usize,
    /// How long a look-up takes in all.
    pub find: Duration,
    /// How long a value takes to be read or written.
    pub carry: Duration,
}

/// Values by name, on a server. Whoever calls waits for the answer, up to `limit`.
pub trait Objects: Send + Sync + 'static {
    /// For metrics, logs and threads.
    fn name(&self) -> &'static str;
    /// For people: where it is, without what opens it.
    fn server(&self) -> String;
    fn limits(&self) -> ObjectLimits;
    /// Whether there are such values.
    fn exist(&self, names: &[Name], limit: Duration) -> Result<Vec<bool>, Fault>;
    /// These bytes of a value, or less where it ends before; `None`: there is no such value.
    fn get(&self, name: &Name, range: Range<usize>, limit: Duration) -> Result<Option<Vec<u8>>, Fault>;
    /// `replace`: what is there is wrong. Otherwise it may stay.
    fn put(&self, name: &Name, value: &[u8], replace: bool, limit: Duration) -> Result<(), Fault>;
    /// Whether it answers.
    fn ping(&self, limit: Duration) -> Result<(), Fault>;
}

/// See the module documentation.
pub struct RemoteStore {
    objects: Arc<dyn Objects>,
    /// Of what a block's bytes mean: model, numerics, geometry.
    layout: [u8; 32],
    breaker: Arc<Breaker>,
    clock: Forward,
    known: Known,
    counts: RemoteCounts,
    asking: AtomicUsize,
}

#[derive(Default)]
struct RemoteCounts {
    bytes_written: AtomicU64,
    payload_written: AtomicU64,
    misses: [AtomicU64; Miss::ALL.len()],
    answered: AtomicU64,
    late: AtomicU64,
    broken: AtomicU64,
    refused: AtomicU64,
}

/// One of [`LOOK_UPS`].
struct Turn<'a>(&'a AtomicUsize);

impl<'a> Turn<'a> {
    fn of(asking: &'a AtomicUsize) -> Option<Self> {
        let turn = Self(asking);
        (asking.fetch_add(1, Relaxed) < LOOK_UPS).then_some(turn)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl RemoteStore {
    /// `gone`: why the server is taken for gone from the start, until it answers.
    pub fn new(
        objects: Arc<dyn Objects>,
        layout_digest: [u8; 32],
        gone: Option<Fault>,
        clock: WallClock,
    ) -> std::io::Result<Arc<Self>> {
        let breaker = Breaker::new(objects.clone(), gone)?;
        let (known, counts, asking) = Default::default();
        let (layout, clock) = (layout_digest, Forward::new(clock, 0));
        Ok(Arc::new(Self { objects, layout, breaker, clock, known, counts, asking }))
    }

    /// Asks the server, if it is not given up.
    fn ask<T>(&self, ask: impl FnOnce(&dyn Objects) -> Result<T, Fault>) -> Result<T, Miss> {
        if !self.breaker.allows() {
            return Err(Miss::Off);
        }
        let answer = ask(&*self.objects);
        let (count, miss) = match &answer {
            Ok(_) => (&self.counts.answered, Miss::Io),
            Err(Fault::Late) => (&self.counts.late, Miss::Late),
            Err(Fault::Broken(_)) => (&self.counts.broken, Miss::Io),
            Err(Fault::Refused(_)) => (&self.counts.refused, Miss::Io),
        };
        count.fetch_add(1, Relaxed);
        match &answer {
            Ok(_) | Err(Fault::Refused(_)) => self.breaker.answered(),
            Err(fault) => self.breaker.failed(fault),
        }
        answer.map_err(|_| miss)
    }

    fn missed(&self, miss: Miss, blocks: usize) {
        self.counts.misses[miss as usize].fetch_add(blocks as u64, Relaxed);
    }

    fn names(&self, device: &Device, data_key: &DataKey) -> Names {
        let value_bytes = self.objects.limits().value_bytes;
        let groups = (0..device.groups.len() as u32).map(|group| device.block_bytes(group));
        Names::new(data_key, &self.layout, groups.collect(), value_bytes)
    }

    /// Which of these values there are, as far as anybody answers until `end`.
    fn exist(&self, names: &[Name], end: Instant) -> Option<Vec<bool>> {
        let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        let _turn = Turn::of(&self.asking)?;
        let found = self.ask(|objects| objects.exist(names, left)).ok()?;
        (found.len() == names.len()).then_some(found)
    }

    /// How many of `names` there are before the first that is not. Whoever stores a value stored those before it, so few are asked for:
    /// where a server forgot one in between, a load shows it.
    fn leading(&self, names: &[Name], end: Instant) -> usize {
        let usable = names.iter().position(|name| self.known.is_wrong(name)).unwrap_or(names.len());
        let mut there = names[..usable].iter().position(|name| !self.known.has(name)).unwrap_or(usable);
        let mut unknown = usable;
        while there < unknown {
            let open = unknown - there;
            let step = open.div_ceil(self.objects.limits().asked_at_once);
            // The next one first: mostly nothing more is there, and that ends it.
            let mut asked: Vec<usize> =
                std::iter::once(there).chain((there..unknown).skip(step - 1).step_by(step)).collect();
            asked.push(unknown - 1);
            asked.dedup();
            let wanted: Vec<Name> = asked.iter().map(|at| names[*at]).collect();
            let Some(found) = self.exist(&wanted, end) else { break };
            let first_absent = found.iter().position(|there| !there);
            let before = match first_absent {
                Some(at) => {
                    unknown = asked[at];
                    at
                }
                None => asked.len(),
            };
            let now = before.checked_sub(1).map_or(there, |last| asked[last] + 1);
            names[there..now].iter().for_each(|name| self.known.insert(name));
            there = now;
        }
        there
    }

    /// The last end up to `end` blocks of group 0 where the other groups have what is read there, of the last few.
    fn end_of_all(
        &self,
        device: &Device,
        names: &Names,
        ends: &[(u32, [u8; 32])],
        until: Instant,
    ) -> Option<u32> {
        let windows: Vec<usize> =
            (1..device.groups.len()).filter(|group| !device.groups[*group].optional).collect();
        let size = device.groups[0].block_tokens;
        let is_border = |end: u32| {
            windows.iter().all(|group| (end * size).is_multiple_of(device.groups[*group].block_tokens))
        };
        let ends: Vec<_> = ends.iter().rev().filter(|(end, _)| is_border(*end)).take(ENDS as usize).collect();
        // Of what a window reads at an end all was stored, or nothing: its first value stands for it.
        let first = |(end, hash): &(u32, [u8; 32]), group: usize| {
            let pieces = names.window(device, group as u32, *end, hash);
            pieces.first().map(|piece| piece.name)
        };
        let wanted: Vec<Name> =
            ends.iter().flat_map(|end| windows.iter().filter_map(|group| first(end, *group))).collect();
        let unknown: Vec<Name> = wanted
            .iter()
            .filter(|name| !self.known.has(name) && !self.known.is_wrong(name))
            .copied()
            .collect();
        if !unknown.is_empty() {
            let found = self.exist(&unknown, until).unwrap_or_default();
            let there = unknown.iter().zip(found).filter(|(_, there)| *there);
            there.for_each(|(name, _)| self.known.insert(name));
        }
        let has = |name: &Name| self.known.has(name) && !self.known.is_wrong(name);
        let has_all = |end: &&&(u32, [u8; 32])| {
            windows.iter().all(|group| first(end, *group).is_none_or(|name| has(&name)))
        };
        ends.iter().find(has_all).map(|(end, _)| *end)
    }

    /// Asks which of the first of these chunks there are, where that is not known: a prompt that a nearer tier had was not asked for.
    fn learn(&self, pieces: &[(Piece, &[Content])]) {
        let is_whole = |(piece, contents): &&(Piece, &[Content])| contents.len() == piece.blocks as usize;
        let chunks = pieces.iter().filter(|(piece, _)| piece.group == 0).filter(is_whole);
        let names: Vec<Name> = chunks.map(|(piece, _)| piece.name).collect();
        self.leading(&names, Instant::now() + self.objects.limits().find);
    }

    /// Reads what is wanted of a value. What it brought, or why nothing.
    fn load_piece(
        &self,
        device: &Device,
        data_key: &DataKey,
        piece: &Piece,
        wanted: &[Content],
    ) -> Result<usize, Miss> {
        let length = device.block_bytes(piece.group);
        let record_bytes = record::HEADER + length;
        let first = wanted[0].index - piece.first;
        let range = first as usize * record_bytes..(first as usize + wanted.len()) * record_bytes;
        let limit = self.objects.limits().carry;
        let value = self.ask(|objects| objects.get(&piece.name, range.clone(), limit))?;
        let value = value.ok_or(Miss::Absent)?;
        if value.len() != range.len() {
            return Err(Miss::Damaged);
        }
        let mut block = vec![0; length];
        for (content, record) in wanted.iter().zip(value.chunks_exact(record_bytes)) {
            record::read(record, &BlockKey::from(content), &self.layout, data_key, &self.clock, &mut block)?;
            device.memory.write(content.group as usize, content.block.0, &block);
        }
        Ok(wanted.len() * length)
    }

    /// When contents of an order expire. `None`: one of them has.
    fn ends(&self, order: &StoreOrder, contents: &[Content]) -> Option<Vec<Option<u32>>> {
        let first = order.contents.iter().position(|content| content == &contents[0])?;
        let retentions = (first..first + contents.len()).map(|at| order.lineage.retention(at));
        let end = |of: Option<Retention>| Some(self.clock.expires_s(of?.ttl_us.map(Duration::from_micros)));
        retentions.map(end).collect()
    }

    /// `None`: the lease is over, or the server did not take it.
    fn store_piece(
        &self,
        device: &Device,
        data_key: &DataKey,
        piece: &Piece,
        (contents, ends): (&[Content], &[Option<u32>]),
        holds: &dyn Fn() -> bool,
        value: &mut Vec<u8>,
    ) -> Option<usize> {
        let length = device.block_bytes(piece.group);
        let record_bytes = record::HEADER + length;
        value.resize(contents.len() * record_bytes, 0);
        let mut block = vec![0; length];
        let records = value.chunks_exact_mut(record_bytes);
        for ((content, expires_s), record) in contents.iter().zip(ends).zip(records) {
            device.memory.read(content.group as usize, content.block.0, &mut block);
            let mut nonce = [0; NONCE];
            getrandom::fill(&mut nonce).ok()?;
            let key = BlockKey::from(content);
            let about = About { expires_s: *expires_s, ..About::default() };
            record::write(record, (&key, &self.layout), data_key, Some(nonce), &block, &about);
        }
        // Asked behind the copies: only then are they what was leased.
        if !holds() {
            return None;
        }
        let (replace, limit) = (self.known.is_wrong(&piece.name), self.objects.limits().carry);
        self.ask(|objects| objects.put(&piece.name, value, replace, limit)).ok()?;
        self.known.insert(&piece.name);
        self.counts.bytes_written.fetch_add(value.len() as u64, Relaxed);
        self.counts.payload_written.fetch_add((contents.len() * length) as u64, Relaxed);
        Some(contents.len() * length)
    }
}

impl Store for RemoteStore {
    fn chunk_blocks(&self, device: &Device) -> u32 {
        chunk_blocks(device.block_bytes(0), self.objects.limits().value_bytes).min(CHUNK_BLOCKS_MAX)
    }

    fn find(&self, device: &Device, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        if !self.breaker.allows() {
            return Vec::new();
        }
        let until = Instant::now() + self.objects.limits().find;
        let own = hashes.declared_blocks();
        let data_key = DataKey::from(hashes.root().data_key());
        let names = self.names(device, &data_key);
        let chunk = names.chunk_blocks();
        let ends: Vec<(u32, [u8; 32])> = (own / chunk + 1..=most / chunk)
            .filter_map(|number| Some((number * chunk, hashes.get(number * chunk - 1)?.0)))
            .collect();
        let wanted: Vec<Name> = ends.iter().map(|(end, hash)| names.chunk(own, *end, hash).name).collect();
        let there = self.leading(&wanted, until);
        let end = match device.groups.len() {
            1 => there.checked_sub(1).map(|last| ends[last].0),
            _ => self.end_of_all(device, &names, &ends[..there], until),
        };
        end.map(|end| own..end).into_iter().collect()
    }

    fn load(&self, device: &Device, order: &LoadOrder, _: &mut Vec<u8>) -> Carried {
        let data_key = DataKey::from(order.root.data_key());
        let names = self.names(device, &data_key);
        let mut done = Carried { left: order.contents.len(), ..Carried::default() };
        let pieces = names.of(device, order.root.declared_blocks(), &order.contents);
        for (piece, wanted) in &pieces {
            match self.load_piece(device, &data_key, piece, wanted) {
                Ok(bytes) => {
                    self.known.insert(&piece.name);
                    done.blocks += wanted.len();
                    done.bytes += bytes;
                    done.left -= wanted.len();
                }
                Err(miss) => {
                    self.missed(miss, wanted.len());
                    // Of a server that does not answer nothing was learned.
                    if !matches!(miss, Miss::Late | Miss::Io | Miss::Off) {
                        let is_its = |other: &&(Piece, &[Content])| match piece.group {
                            0 => other.0.name == piece.name,
                            // The first stands for all of them.
                            group => other.0.group == group,
                        };
                        pieces.iter().filter(is_its).for_each(|(its, _)| self.known.wrong(&its.name));
                    }
                    break;
                }
            }
        }
        done
    }

    fn store(
        &self,
        device: &Device,
        order: &StoreOrder,
        holds: &dyn Fn() -> bool,
        scratch: &mut Vec<u8>,
    ) -> Carried {
        let data_key = DataKey::from(order.root.data_key());
        let names = self.names(device, &data_key);
        let mut done = Carried::default();
        let mut pieces = names.of(device, order.root.declared_blocks(), &order.contents);
        self.learn(&pieces);
        // The first of a window stands for all of it, so it is stored last.
        let windows = pieces.partition_point(|(piece, _)| piece.group == 0);
        pieces[windows..].reverse();
        let mut left: usize = pieces.iter().map(|(_, contents)| contents.len()).sum();
        for (piece, contents) in pieces {
            left -= contents.len();
            // Of what it has a part only the rest was stored before, or is gone.
            if contents.len() != piece.blocks as usize || self.known.has(&piece.name) {
                continue;
            }
            // All of a value expires with its first block that does.
            let Some(ends) = self.ends(order, contents) else { continue };
            match self.store_piece(device, &data_key, &piece, (contents, &ends), holds, scratch) {
                Some(bytes) => {
                    done.blocks += contents.len();
                    done.bytes += bytes;
                }
                None => {
                    done.left = left + contents.len();
                    break;
                }
            }
        }
        done
    }

    fn stats(&self) -> TierStats {
        let get = |count: &AtomicU64| count.load(Relaxed);
        let misses = Miss::ALL.into_iter();
        let counts = &self.counts;
        TierStats {
            name: self.objects.name(),
            off: self.breaker.reason(),
            blocks: self.known.len() as u64,
            bytes_written: get(&counts.bytes_written),
            payload_written: get(&counts.payload_written),
            misses: misses.map(|miss| (miss.name(), get(&counts.misses[miss as usize]))).collect(),
            requests: vec![
                ("answered", get(&counts.answered)),
                ("late", get(&counts.late)),
                ("broken", get(&counts.broken)),
                ("refused", get(&counts.refused)),
            ],
            ..TierStats::default()
        }
    }

    fn close(&self) {
        self.breaker.close();
    }
}

impl Drop for RemoteStore {
    fn drop(&mut self) {
        self.breaker.close();
    }
}
