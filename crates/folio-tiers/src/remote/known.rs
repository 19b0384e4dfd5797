//! What is known of a server's values: which are there, by what was stored, read or asked, and which are wrong. Guesses: the server may
//! have forgotten any of them since.
//!
//! Memory is bounded: each of the two is two sets of 64 bits of a name; when the younger one is full the older one goes.

use std::sync::{Mutex, PoisonError};

use rustc_hash::FxHashSet;

use super::pieces::Name;

/// Of a set: 17 bytes each.
const ENTRIES: usize = 1 << 19;
const WRONG_ENTRIES: usize = 1 << 14;

#[derive(Default)]
pub struct Known {
    there: Mutex<Aging>,
    wrong: Mutex<Aging>,
}

#[derive(Default)]
struct Aging {
    young: FxHashSet<u64>,
    old: FxHashSet<u64>,
}

impl Aging {
    fn insert(&mut self, word: u64, most: usize) {
        self.young.insert(word);
        if self.young.len() >= most {
            self.old = std::mem::take(&mut self.young);
        }
    }

    fn has(&self, word: u64) -> bool {
        self.young.contains(&word) || self.old.contains(&word)
    }

    fn remove(&mut self, word: u64) {
        self.young.remove(&word);
        self.old.remove(&word);
    }
}

/// Names are keyed hashes: nobody chooses them.
fn word(name: &Name) -> u64 {
    u64::from_le_bytes(name.0[..8].try_into().expect("eight bytes"))
}

fn with<T>(of: &Mutex<Aging>, then: impl FnOnce(&mut Aging) -> T) -> T {
    then(&mut of.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Known {
    pub fn has(&self, name: &Name) -> bool {
        with(&self.there, |there| there.has(word(name)))
    }

    /// It is there, and right as far as anybody knows.
    pub fn insert(&self, name: &Name) {
        with(&self.wrong, |wrong| wrong.remove(word(name)));
        with(&self.there, |there| there.insert(word(name), ENTRIES));
    }

    /// It is not there.
    pub fn remove(&self, name: &Name) {
        with(&self.there, |there| there.remove(word(name)));
    }

    /// What is there is not what it must be.
    pub fn wrong(&self, name: &Name) {
        self.remove(name);
        with(&self.wrong, |wrong| wrong.insert(word(name), WRONG_ENTRIES));
    }

    pub fn is_wrong(&self, name: &Name) -> bool {
        with(&self.wrong, |wrong| wrong.has(word(name)))
    }

    /// Values that are there.
    pub fn len(&self) -> usize {
        with(&self.there, |there| there.young.union(&there.old).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u64) -> Name {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        Name(bytes)
    }

    #[test]
    fn what_is_wrong_is_not_there_until_it_is_stored_again() {
        let known = Known::default();
        known.insert(&name(1));
        assert!(known.has(&name(1)) && !known.is_wrong(&name(1)));
        known.wrong(&name(1));
        assert!(!known.has(&name(1)) && known.is_wrong(&name(1)));
        known.insert(&name(1));
        assert!(known.has(&name(1)) && !known.is_wrong(&name(1)));
        known.remove(&name(1));
        assert!(!known.has(&name(1)));
    }

    #[test]
    fn memory_is_bounded_and_what_is_young_stays() {
        let mut aging = Aging::default();
        (0..1000).for_each(|word| aging.insert(word, 100));
        assert!(aging.young.len() + aging.old.len() <= 200);
        assert!((901..1000).all(|word| aging.has(word)) && !aging.has(5));
    }
}
