//! Finished answers, in which drafts for later ones are found.
//!
//! Owns: one store for each owner; what one was told is never looked at for another, because a draft that is accepted shows in the
//! time it takes. Must never: hold more than its bytes.
//!
//! A store has two generations. When the younger is full the older is dropped as a whole: old answers go at no cost, and nothing is
//! searched for what to remove. An answer is taken up in parts, so that none takes long. When all stores together are too large, that which was used least recently goes: the oldest use is the first,
//! and no store is looked at that stays.

use std::collections::{BTreeMap, VecDeque};
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

impl Store {
    fn bytes(&self) -> usize {
        self.young.bytes() + self.old.bytes()
    }
}

/// An answer that is not in its store as a whole yet.
#[derive(Debug)]
struct Ended<O> {
    owner: O,
    tokens: Vec<u32>,
    /// The first token that is not.
    next: usize,
    has_begun: bool,
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
    ended: VecDeque<Ended<O>>,
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
            ended: VecDeque::new(),
            bytes: 0,
            uses: 0,
        }
    }

    /// A finished answer, the tokens of `text` from `from` on, which [`Answers::index`] takes up. O(1).
    pub fn add(&mut self, owner: O, text: Vec<u32>, from: usize) {
        let most = ANSWER_TOKENS_MAX.min((self.store_bytes / 2 / TOKEN_BYTES).saturating_sub(1));
        let next = from.max(text.len().saturating_sub(most));
        if text.len() >= next + 3 {
            self.ended.push_back(Ended { owner, tokens: text, next, has_begun: false });
        }
    }

    /// Takes up to `most` tokens of finished answers into their stores, in order.
    pub fn index(&mut self, mut most: usize) {
        while let Some(Ended { owner, tokens, next, has_begun }) = self.ended.front_mut().filter(|_| most > 0)
        {
            let store = self.stores.entry(*owner).or_default();
            let before = store.bytes();
            let bytes = (tokens.len() - *next + 1) * TOKEN_BYTES;
            if !std::mem::replace(has_begun, true) && store.young.bytes() + bytes > self.store_bytes / 2 {
                store.old = std::mem::take(&mut store.young);
            }
            let part = &tokens[*next..tokens.len().min(next.saturating_add(most))];
            part.iter().for_each(|token| store.young.push(*token));
            (*next, most) = (*next + part.len(), most - part.len());
            let (owner, is_whole) = (*owner, *next == tokens.len());
            if is_whole {
                store.young.push(SEPARATOR);
            }
            self.bytes = self.bytes + store.bytes() - before;
            if is_whole {
                self.ended.pop_front();
            }
            self.of(owner);
            self.make_room();
        }
    }

    fn make_room(&mut self) {
        while self.bytes > self.bytes_max {
            let Some((_, owner)) = self.used.pop_first() else { return };
            let gone = self.stores.remove(&owner).unwrap_or_default();
            self.bytes -= gone.bytes();
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
