//! What the engine asks of its tiers: KV bytes off the device, kept by threads of their own.
//!
//! Tiers stand in an order, the nearest first ([`TierId`]). Each is asked what it has of a prompt ([`find`]), is given what it lacks of
//! what ends, and is loaded from where it is the cheapest: so what was loaded from a far one is stored in a near one, too.
//!
//! Owns: the words of that conversation. Must never: wait, or touch a byte. The scheduler says what is to be loaded and stored
//! ([`crate::Scheduler::transfers`]), the engine passes it on, and reports come back through its mailbox.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use folio_kv::{BlockHashes, Content, Lease, Lineage, Root, Ticket, TierId};

use crate::clock::Clock;
use crate::feed::EventFeed;
use crate::request::Micros;

/// Blocks to be filled with what a tier has of them. It ends with [`Report::Loaded`] or [`Report::Cancelled`], whatever becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOrder {
    pub tier: TierId,
    pub ticket: Ticket,
    /// Whose they are, and what they are sealed with ([`Root::data_key`]).
    pub root: Root,
    pub contents: Vec<Content>,
    /// Its request still waits in the queue: it goes behind the loads of those that do not, until [`TransferOrder::Promote`].
    pub prefetch: bool,
}

/// Blocks to be stored. It ends with [`Report::Read`] when none of them is read any more, whatever becomes of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOrder {
    pub tier: TierId,
    pub lease: Lease,
    /// The lease holds until then: what was copied later, by the engine's clock, is thrown away.
    pub until: Micros,
    pub root: Root,
    pub contents: Vec<Content>,
    pub lineage: Lineage,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferOrder {
    Load(LoadOrder),
    Store(StoreOrder),
    /// The request of a prefetch was admitted: it is a load like others from now on.
    Promote {
        tier: TierId,
        ticket: Ticket,
    },
    /// Nobody wants what a load brings any more: if it is not begun it ends with [`Report::Cancelled`], if it is it goes on.
    Cancel {
        tier: TierId,
        ticket: Ticket,
    },
}

impl TransferOrder {
    /// Who is asked.
    pub fn tier(&self) -> TierId {
        match self {
            Self::Load(LoadOrder { tier, .. })
            | Self::Store(StoreOrder { tier, .. })
            | Self::Promote { tier, .. }
            | Self::Cancel { tier, .. } => *tier,
        }
    }
}

/// What a tier tells the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// Nothing is written under the ticket any more. `verified`: all of it is there, and is what was asked for. To read and check
    /// so many bytes took the tier `us`.
    Loaded { tier: TierId, ticket: Ticket, verified: bool, bytes: u64, us: u64 },
    /// Nothing was written under the ticket: it was cancelled before that.
    Cancelled { ticket: Ticket },
    /// Nothing is read under the lease any more, and of the contents so many, from the first on, are kept now.
    Read { lease: Lease, kept: u32 },
}

/// The most blocks that a tier keeps together, which are also what it loads at once: if it has not all of them, those before are there.
pub const CHUNK_BLOCKS_MAX: u32 = 64;

/// The most tiers of an engine.
pub const TIERS_MAX: usize = 4;

/// What each tier has of the first `most` blocks of a prompt ([`Tier::find`]), the nearest first. Those behind one that has all of it are
/// not asked: nobody waits for what would not be loaded.
pub fn find(tiers: &[Arc<dyn Tier>], hashes: &BlockHashes, most: u32) -> Vec<Vec<Range<u32>>> {
    let own = hashes.declared_blocks();
    let mut is_covered = false;
    let ask = |tier: &Arc<dyn Tier>| {
        let ranges = if is_covered { Vec::new() } else { tier.find(hashes, most) };
        is_covered |= ranges.iter().any(|range| range.start <= own && range.end >= most);
        ranges
    };
    tiers.iter().map(ask).collect()
}

/// Takes reports from any thread, never blocks.
pub type ReportSink = Box<dyn Fn(Report) + Send + Sync>;

/// A tier off the device. Nothing here but [`Tier::find`] waits or does I/O.
pub trait Tier: Send + Sync {
    /// Where reports go, and what tells the time of leases; and who is told what becomes known here and what goes, if anybody is. Called once,
    /// before anything is asked for.
    fn start(&self, reports: ReportSink, clock: Arc<dyn Clock>, events: Option<&Arc<EventFeed>>);

    /// How many blocks of group 0 it keeps together, a power of two up to [`CHUNK_BLOCKS_MAX`]: those whose index divided by it is the
    /// same, but for blocks that an operator declared. Loads and stores end where such a run does.
    fn chunk_blocks(&self) -> u32 {
        1
    }

    /// Whether it takes what it is given as fast as memory does. Then sequences that are preempted are swapped to it: whoever wants their
    /// blocks waits until it has read them.
    fn swaps(&self) -> bool {
        false
    }

    /// Of the first `most` blocks of a prompt, the ranges that can be loaded up to their end: under the hashes with what an operator
    /// declared, where there is such. It may wait for an answer from elsewhere, for a time that the tier bounds: called where a thread
    /// may, never on the engine's thread or an event loop.
    fn find(&self, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>>;

    /// Takes an order; those about a load that is begun, or not known, change nothing. `false`: it is closed; nothing will be read, and nothing
    /// reported.
    fn order(&self, order: TransferOrder) -> bool;

    /// For metrics.
    fn stats(&self) -> TierStats;

    /// Stores what was ordered, for `patience` at most, and nothing more after that.
    fn close(&self, patience: Duration);
}

/// What a tier did and holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierStats {
    /// Where: "host", "disk", "valkey".
    pub name: &'static str,
    /// Why it stores nothing at present, or any more.
    pub off: Option<String>,
    /// What can be found, as far as is known here, in blocks or values; and the bytes that it takes. No limit: they are not known.
    pub blocks: u64,
    pub bytes: u64,
    pub bytes_limit: u64,
    /// Of memory that is set aside ahead, the bytes that are; blocks may be in them or not.
    pub bytes_ready: Option<u64>,
    /// Since the start.
    pub blocks_stored: u64,
    pub blocks_loaded: u64,
    pub bytes_written: u64,
    /// Of those, the blocks themselves.
    pub payload_written: u64,
    pub bytes_read: u64,
    /// That could be found and went to make room.
    pub blocks_evicted: u64,
    /// Ordered and not stored: no room, too late.
    pub blocks_dropped: u64,
    /// That were to be found and were not what they had to be, by reason.
    pub misses: Vec<(&'static str, u64)>,
    /// Questions to a server, by what became of them.
    pub requests: Vec<(&'static str, u64)>,
}

#[cfg(test)]
mod tests {
    use folio_kv::{Identity, TenantId};

    use super::*;

    /// Has some ranges.
    struct Has(Vec<Range<u32>>);

    impl Tier for Has {
        fn start(&self, _: ReportSink, _: Arc<dyn Clock>, _: Option<&Arc<EventFeed>>) {}
        fn find(&self, _: &BlockHashes, _: u32) -> Vec<Range<u32>> {
            self.0.clone()
        }
        fn order(&self, _: TransferOrder) -> bool {
            false
        }
        fn stats(&self) -> TierStats {
            TierStats::default()
        }
        fn close(&self, _: Duration) {}
    }

    #[test]
    fn a_tier_behind_one_that_has_all_is_not_asked() {
        let root = Root::derive(&Identity {
            tenant: TenantId(1),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        let hashes = BlockHashes::new(&root, &[7; 64], 4);
        let (part, all) = (vec![0..4, 6..16], vec![Range { start: 0, end: 16 }]);
        let asked = |near: &Vec<Range<u32>>, far: &Vec<Range<u32>>| {
            let tiers: [Arc<dyn Tier>; 2] = [Arc::new(Has(near.clone())), Arc::new(Has(far.clone()))];
            find(&tiers, &hashes, 16)
        };
        assert_eq!(asked(&part, &all), [part.clone(), all.clone()]);
        assert_eq!(asked(&all, &part), [all.clone(), vec![]]);
        assert_eq!(asked(&vec![], &all), [vec![], all]);
    }
}
