//! What the engine asks of a tier: KV bytes off the device, kept by threads of their own.
//!
//! Owns: the words of that conversation. Must never: wait, or touch a byte. The scheduler says what is to be loaded and stored
//! ([`crate::Scheduler::transfers`]), the engine passes it on, and reports come back through its mailbox.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use folio_kv::{BlockHashes, Content, Lease, Root, Ticket};

use crate::clock::Clock;
use crate::request::Micros;

/// Blocks to be filled with what a tier has of them. It ends with [`Report::Loaded`], whatever becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOrder {
    pub ticket: Ticket,
    /// Whose they are, and what they are sealed with ([`Root::data_key`]).
    pub root: Root,
    pub contents: Vec<Content>,
}

/// Blocks to be stored. It ends with [`Report::Read`] when none of them is read any more, whatever becomes of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOrder {
    pub lease: Lease,
    /// The lease holds until then: what was copied later, by the engine's clock, is thrown away.
    pub until: Micros,
    pub root: Root,
    pub contents: Vec<Content>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferOrder {
    Load(LoadOrder),
    Store(StoreOrder),
}

/// What a tier tells the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// Nothing is written under the ticket any more. `verified`: all of it is there, and is what was asked for. To read and check
    /// so many bytes took `us`.
    Loaded { ticket: Ticket, verified: bool, bytes: u64, us: u64 },
    /// Nothing is read under the lease any more.
    Read { lease: Lease },
}

/// The most blocks that a tier keeps together, which are also what it loads at once: if it has not all of them, those before are there.
pub const CHUNK_BLOCKS_MAX: u32 = 64;

/// Takes reports from any thread, never blocks.
pub type ReportSink = Box<dyn Fn(Report) + Send + Sync>;

/// A tier off the device. Nothing here but [`Tier::find`] waits or does I/O.
pub trait Tier: Send + Sync {
    /// Where reports go, and what tells the time of leases. Called once, before anything is asked for.
    fn start(&self, reports: ReportSink, clock: Arc<dyn Clock>);

    /// How many blocks of group 0 it keeps together, a power of two up to [`CHUNK_BLOCKS_MAX`]: those whose index divided by it is the
    /// same, but for blocks that an operator declared. Loads and stores end where such a run does.
    fn chunk_blocks(&self) -> u32 {
        1
    }

    /// Of the first `most` blocks of a prompt, the ranges that can be loaded up to their end: under the hashes with what an operator
    /// declared, where there is such. It may wait for an answer from elsewhere, for a time that the tier bounds: called where a thread
    /// may, never on the engine's thread or an event loop.
    fn find(&self, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>>;

    fn load(&self, order: LoadOrder);

    /// `false`: there is too much to do already; nothing will be read, and nothing reported.
    fn store(&self, order: StoreOrder) -> bool;

    /// For metrics.
    fn stats(&self) -> TierStats;

    /// Stores what was ordered, for `patience` at most, and nothing more after that.
    fn close(&self, patience: Duration);
}

/// What a tier did and holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierStats {
    /// Where: "disk", "valkey".
    pub name: &'static str,
    /// Why it stores nothing at present, or any more.
    pub off: Option<String>,
    /// What can be found, as far as is known here, in blocks or values; and the bytes that it takes. No limit: they are not known.
    pub blocks: u64,
    pub bytes: u64,
    pub bytes_limit: u64,
    /// Since the start.
    pub blocks_stored: u64,
    pub blocks_loaded: u64,
    pub bytes_written: u64,
    pub bytes_read: u64,
    /// That could be found and went to make room.
    pub blocks_evicted: u64,
    /// Ordered and not stored: too much to do, no room, too late.
    pub blocks_dropped: u64,
    /// That were to be found and were not what they had to be, by reason.
    pub misses: Vec<(&'static str, u64)>,
    /// Questions to a server, by what became of them.
    pub requests: Vec<(&'static str, u64)>,
}
