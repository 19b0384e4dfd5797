//! What was published, lost and refused.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_engine::Medium;

use crate::wire::Item;

#[derive(Default)]
pub(crate) struct Counts {
    pub stored: AtomicU64,
    pub removed: AtomicU64,
    pub cleared: AtomicU64,
    /// Messages that subscribers were too late for, summed.
    pub dropped: AtomicU64,
    /// Times that the engine told everything anew because the publisher was late.
    pub lost: AtomicU64,
    pub replays: AtomicU64,
    /// Peers that were closed, or not let in.
    pub refused: AtomicU64,
    /// In the order of [`Medium::ALL`].
    pub blocks: [AtomicU64; Medium::ALL.len()],
    /// Somebody wants everything to be told again.
    pub republish: AtomicBool,
    peers: Mutex<BTreeMap<u64, Arc<Peer>>>,
    entered: AtomicU64,
}

/// A connected subscriber.
pub(crate) struct Peer {
    number: u64,
    address: SocketAddr,
    pub sent: AtomicU64,
    pub dropped: AtomicU64,
    /// The next message it is sent; the greatest number where it has not subscribed.
    pub next: AtomicU64,
}

pub(crate) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Relaxed);
}

impl Peer {
    /// Messages that it will not be sent, and that are not counted yet because it is being sent one: what is being sent is not lost.
    fn losing(&self, floor: u64) -> u64 {
        floor.saturating_sub(self.next.load(Relaxed).saturating_add(1))
    }

    pub fn lost(&self, counts: &Counts, messages: u64) {
        add(&self.dropped, messages);
        add(&counts.dropped, messages);
        tracing::warn!(address = %self.address, messages, "a subscriber of KV events is late and lost some");
    }
}

impl Counts {
    fn peers(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn enter(&self, address: SocketAddr) -> Arc<Peer> {
        let number = self.entered.fetch_add(1, Relaxed);
        let (sent, dropped, next) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(u64::MAX));
        let peer = Arc::new(Peer { number, address, sent, dropped, next });
        self.peers().insert(number, peer.clone());
        peer
    }

    /// `floor`: the oldest message that it could still have been sent.
    pub fn leave(&self, peer: &Peer, floor: u64) {
        let mut peers = self.peers();
        add(&self.dropped, peer.losing(floor));
        peers.remove(&peer.number);
    }

    /// Whether some subscriber was not sent everything before message `head`.
    pub fn is_late(&self, head: u64) -> bool {
        self.peers().values().any(|peer| peer.next.load(Relaxed) < head)
    }

    pub fn count(&self, items: &[Item]) {
        for item in items {
            let of = match item {
                Item::Stored { .. } => &self.stored,
                Item::Removed { .. } => &self.removed,
                Item::Cleared => &self.cleared,
            };
            add(of, 1);
        }
    }

    /// Of the messages that are kept, the range; and the oldest that a subscriber may be sent.
    pub fn stats(&self, (oldest, next): (u64, u64), floor: u64) -> KvEventsStats {
        let get = |count: &AtomicU64| count.load(Relaxed);
        let subscriber = |peer: &Arc<Peer>| {
            let at = get(&peer.next);
            SubscriberStats {
                address: peer.address,
                sent: get(&peer.sent),
                dropped: get(&peer.dropped) + peer.losing(floor),
                late: (at != u64::MAX).then(|| next.saturating_sub(at)),
            }
        };
        let peers = self.peers();
        KvEventsStats {
            oldest_message: oldest,
            next_message: next,
            stored: get(&self.stored),
            removed: get(&self.removed),
            cleared: get(&self.cleared),
            dropped: get(&self.dropped) + peers.values().map(|peer| peer.losing(floor)).sum::<u64>(),
            lost: get(&self.lost),
            replays: get(&self.replays),
            refused: get(&self.refused),
            blocks: self.blocks.each_ref().map(get),
            subscribers: peers.values().map(subscriber).collect(),
        }
    }
}

/// What was published, and to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsStats {
    /// Number of the oldest message that can be repeated, and of the next one.
    pub oldest_message: u64,
    pub next_message: u64,
    /// Blocks that were told to be stored and removed; times that everything was told to be cleared.
    pub stored: u64,
    pub removed: u64,
    pub cleared: u64,
    /// Messages that subscribers were too late for, summed over all there were.
    pub dropped: u64,
    /// Times that the publisher was late, and told everything anew.
    pub lost: u64,
    pub replays: u64,
    /// Connections that were closed because of what they said, or not let in.
    pub refused: u64,
    /// Blocks that are told and not taken back, in the order of [`Medium::ALL`].
    pub blocks: [u64; Medium::ALL.len()],
    /// Who is connected.
    pub subscribers: Vec<SubscriberStats>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubscriberStats {
    pub address: SocketAddr,
    pub sent: u64,
    pub dropped: u64,
    /// Messages that it was not sent yet. `None`: it has not subscribed to the topic.
    pub late: Option<u64>,
}
