//! How what the cache records leaves the engine: one batch behind a lock, that the engine fills and somebody else takes; and beside it what
//! tiers tell of what they hold.
//!
//! Owns: the batch, and the wake-up of who takes it. Must never: keep the engine or a tier waiting. The lock is held for the copy of one step's
//! events, for one event of a tier, or for the exchange of two batches; what does not fit is told anew later ([`KvCache::take_events`],
//! [`EventFeed::tell_anew`]), so a listener that is late or gone costs the engine that copy and nothing more.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use folio_kv::{BlockHash, EventBatch, KvCache, TenantId};

/// Memory in which content can reside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Medium {
    /// What the model computes in.
    Device,
    /// Of the process, beside the device's.
    Host,
    Disk,
}

impl Medium {
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];
}

/// One change of what a tier holds of blocks of group 0. A tier tells those of one block in the order in which they come to be: of the disk a
/// block is known by [`short_name`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierEvent {
    Stored {
        medium: Medium,
        tenant: TenantId,
        hash: BlockHash,
        parent: Option<BlockHash>,
        tokens: Box<[u32]>,
    },
    Removed {
        medium: Medium,
        name: u64,
    },
}

impl TierEvent {
    fn medium(&self) -> Medium {
        let (Self::Stored { medium, .. } | Self::Removed { medium, .. }) = self;
        *medium
    }
}

/// The first 8 bytes of a hash.
pub fn short_name(hash: &BlockHash) -> u64 {
    u64::from_le_bytes(hash.0[..8].try_into().expect("eight bytes"))
}

/// Events of tiers, in one order.
#[derive(Debug, Default)]
pub struct TierBatch {
    pub events: Vec<TierEvent>,
    /// Events of these media were lost: what was told of them before counts for nothing.
    pub lost: Vec<Medium>,
}

/// Whether a [`TierEvent`] was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    Yes,
    /// There is no room just now.
    NotYet,
    /// Nobody listens any more.
    Never,
}

/// A cache and what its blocks are sealed with ([`folio_kv::Root::data_key`]).
pub type Owner = (TenantId, [u8; 32]);

/// What a tier can be asked to tell.
pub trait Resident: Send + Sync {
    /// Tells every block of group 0 that is held of these owners, each while it is there: what goes after that is told behind it. It reads
    /// what it must, and waits where `tell` has no room.
    fn tell(&self, owners: &[Owner], tell: &mut dyn FnMut(TierEvent) -> Taken);
}

/// See the module documentation.
pub struct EventFeed {
    most: usize,
    block_tokens: u32,
    state: Mutex<FeedState>,
    changed: Condvar,
    /// They hold this.
    tiers: Mutex<Vec<(Medium, Weak<dyn Resident>)>>,
}

struct FeedState {
    batch: EventBatch,
    tiers: TierBatch,
    is_closed: bool,
}

impl EventFeed {
    /// Between an engine whose blocks have so many tokens and a listener that may be `most` events late, at least 2.
    pub fn new(most: usize, block_tokens: u32) -> Self {
        let batch = EventBatch::with_capacity(most.max(2), block_tokens);
        let state = Mutex::new(FeedState { batch, tiers: TierBatch::default(), is_closed: false });
        let (changed, tiers) = Default::default();
        Self { most: most.max(2), block_tokens, state, changed, tiers }
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// A batch to take events with.
    pub fn empty_batch(&self) -> EventBatch {
        EventBatch::with_capacity(self.most, self.block_tokens)
    }

    fn lock(&self) -> MutexGuard<'_, FeedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine: has the cache record for it.
    pub fn open(&self, cache: &mut KvCache) {
        cache.record_events(self.most);
    }

    /// The engine: takes what the cache recorded.
    pub fn put(&self, cache: &mut KvCache) {
        if cache.has_events() {
            cache.take_events(&mut self.lock().batch);
            self.changed.notify_one();
        }
    }

    /// There will be nothing more.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Has whoever waits in [`EventFeed::take`] come back.
    pub fn wake(&self) {
        self.changed.notify_all();
    }

    /// A tier: can be asked from now on.
    pub fn add_tier(&self, medium: Medium, tier: &Arc<dyn Resident>) {
        self.tiers().push((medium, Arc::downgrade(tier)));
    }

    fn tiers(&self) -> MutexGuard<'_, Vec<(Medium, Weak<dyn Resident>)>> {
        self.tiers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that tell.
    pub fn media(&self) -> Vec<Medium> {
        self.tiers().iter().map(|(medium, _)| *medium).collect()
    }

    /// A tier: something changed. Where there is no room, all of its medium is lost.
    pub fn push(&self, event: TierEvent) {
        let mut state = self.lock();
        let tiers = &mut state.tiers;
        let medium = event.medium();
        if tiers.lost.contains(&medium) {
            // It is told anew.
        } else if tiers.events.len() < self.most {
            tiers.events.push(event);
        } else {
            tiers.events.retain(|event| event.medium() != medium);
            tiers.lost.push(medium);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// The same of what was there before. Half of the room is left for what happens.
    fn push_if_room(&self, event: TierEvent) -> Taken {
        let mut state = self.lock();
        match &mut *state {
            FeedState { is_closed: true, .. } => return Taken::Never,
            FeedState { tiers, .. } if tiers.events.len() >= self.most / 2 => return Taken::NotYet,
            FeedState { tiers, .. } if tiers.lost.contains(&event.medium()) => return Taken::Yes,
            FeedState { tiers, .. } => tiers.events.push(event),
        }
        drop(state);
        self.changed.notify_one();
        Taken::Yes
    }

    /// Has what a tier holds of these owners told again, by a thread that begins here.
    pub fn tell_anew(self: &Arc<Self>, medium: Medium, owners: Vec<Owner>) -> std::io::Result<()> {
        let asked: Vec<_> = self.tiers().iter().filter(|(of, _)| *of == medium).cloned().collect();
        for tier in asked.iter().filter_map(|(_, tier)| tier.upgrade()) {
            let (feed, owners) = (self.clone(), owners.clone());
            let thread = std::thread::Builder::new().name("folio-kv-resident".into());
            thread.spawn(move || tier.tell(&owners, &mut |event| feed.push_if_room(event)))?;
        }
        Ok(())
    }

    /// What tiers hold of these owners. It waits for them.
    pub fn resident(&self, owners: &[Owner]) -> Vec<TierEvent> {
        let mut resident = Vec::new();
        let tiers: Vec<_> = self.tiers().iter().filter_map(|(_, tier)| tier.upgrade()).collect();
        for tier in tiers {
            tier.tell(owners, &mut |event| {
                resident.push(event);
                Taken::Yes
            });
        }
        resident
    }

    /// Exchanges what is there for `taken` and `of_tiers`, which are emptied; `taken` was made by [`EventFeed::empty_batch`]. Waits until there
    /// is something, or somebody calls [`EventFeed::wake`], but no longer than `patience`. `false`: there is nothing, and there will be nothing.
    pub fn take(&self, taken: &mut EventBatch, of_tiers: &mut TierBatch, patience: Duration) -> bool {
        taken.clear();
        of_tiers.events.clear();
        of_tiers.lost.clear();
        let mut state = self.lock();
        if state.batch.is_empty() && state.tiers.is_empty() && !state.is_closed {
            let waited = self.changed.wait_timeout(state, patience);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::swap(&mut state.batch, taken);
        std::mem::swap(&mut state.tiers, of_tiers);
        // Until the engine says otherwise.
        state.batch.incomplete = taken.incomplete;
        !(state.is_closed && taken.is_empty() && of_tiers.is_empty())
    }
}

impl TierBatch {
    pub fn is_empty(&self) -> bool {
        self.events.is_empty() && self.lost.is_empty()
    }
}
