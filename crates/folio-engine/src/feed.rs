//! How what the cache records leaves the engine: one batch behind a lock, that the engine fills and somebody else takes.
//!
//! Owns: the batch, and the wake-up of who takes it. Must never: keep the engine waiting. The lock is held for the copy of one step's events, or
//! for the exchange of two batches; what does not fit is told anew later ([`KvCache::take_events`]), so a listener that is late or
//! gone costs the engine that copy and nothing more.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use folio_kv::{EventBatch, KvCache};

/// See the module documentation.
pub struct EventFeed {
    most: usize,
    block_tokens: u32,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    batch: EventBatch,
    is_closed: bool,
}

impl EventFeed {
    /// Between an engine whose blocks have so many tokens and a listener that may be `most` events late, at least 2.
    pub fn new(most: usize, block_tokens: u32) -> Self {
        let batch = EventBatch::with_capacity(most.max(2), block_tokens);
        let state = Mutex::new(State { batch, is_closed: false });
        Self { most: most.max(2), block_tokens, state, changed: Condvar::new() }
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// A batch to take events with.
    pub fn empty_batch(&self) -> EventBatch {
        EventBatch::with_capacity(self.most, self.block_tokens)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
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

    /// Exchanges what is there for `taken`, which is emptied and was made by [`EventFeed::empty_batch`]. Waits until there is something, or
    /// somebody calls [`EventFeed::wake`], but no longer than `patience`. `false`: there is nothing, and there will be nothing.
    pub fn take(&self, taken: &mut EventBatch, patience: Duration) -> bool {
        taken.clear();
        let mut state = self.lock();
        if state.batch.is_empty() && !state.is_closed {
            let waited = self.changed.wait_timeout(state, patience);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::swap(&mut state.batch, taken);
        !(state.is_closed && taken.is_empty())
    }
}
