//! Finished answers, in which drafts for later ones are found.
//!
//! Owns: one store for each owner; what one was told is never looked at for another, because a draft that is accepted shows in the
//! time it takes. Must never: hold more than its bytes.
//!
//! A store has two generations. When the younger is full the older is dropped as a whole: old answers go at no cost, and nothing is
//! searched for what to remove. When all stores together are too large, that which was used least recently goes: the oldest use is the first,
//! and no store is looked at that stays.

use std::collections::BTreeMap;
use std::hash::Hash;

use rustc_hash::FxHashMap;

use super::index::SEPARATOR;
use super::text::{GrowingText, TOKEN_BYTES, View};

/// Of an answer so many last tokens are kept: adding them is work of who drafts.
const ANSWER_TOKENS_MAX: usize = 4096;

#[derive(Debug, Default)]
struct Store {
    young: GrowingText,
    old: GrowingText,
    used: u64,
}

/// Of owners `O`.
#[derive(Debug)]
pub struct Answers<O> {
    /// Of a store, and of all.
    store_bytes: usize,
    bytes_max: usize,
    stores: FxHashMap<O, Store>,
    /// Whose store was used when; the number of a use is its time.
    used: BTreeMap<u64, O>,
    bytes: usize,
    uses: u64,
}

impl<O: Copy + Eq + Hash> Answers<O> {
    /// Holds so many bytes of each owner, and in all.
    pub fn new(store_bytes: usize, bytes_max: usize) -> Self {
        Self {
            store_bytes,
            bytes_max,
            stores: FxHashMap::default(),
            used: BTreeMap::new(),
            bytes: 0,
            uses: 0,
        }
    }

    /// A finished answer. O(its tokens).
    pub fn add(&mut self, owner: O, answer: &[u32]) {
        let most = ANSWER_TOKENS_MAX.min((self.store_bytes / 2 / TOKEN_BYTES).saturating_sub(1));
        let answer = &answer[answer.len().saturating_sub(most)..];
        if answer.len() < 3 {
            return;
        }
        let store = self.stores.entry(owner).or_default();
        let before = store.young.bytes() + store.old.bytes();
        if store.young.bytes() + (answer.len() + 1) * TOKEN_BYTES > self.store_bytes / 2 {
            store.old = std::mem::take(&mut store.young);
        }
        answer.iter().for_each(|token| store.young.push(*token));
        store.young.push(SEPARATOR);
        self.bytes = self.bytes + store.young.bytes() + store.old.bytes() - before;
        self.of(owner);
        while self.bytes > self.bytes_max {
            let Some((_, owner)) = self.used.pop_first() else { return };
            let gone = self.stores.remove(&owner).unwrap_or_default();
            self.bytes -= gone.young.bytes() + gone.old.bytes();
        }
    }

    /// The younger first. It is a use.
    pub fn of(&mut self, owner: O) -> Option<[View<'_>; 2]> {
        let store = self.stores.get_mut(&owner)?;
        self.uses += 1;
        self.used.remove(&std::mem::replace(&mut store.used, self.uses));
        self.used.insert(self.uses, owner);
        Some([store.young.view(), store.old.view()])
    }

    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
