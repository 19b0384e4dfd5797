//! What is kept of tenants' requests so that it need not be made again: compiled grammars, tokenized texts and their indices.
//!
//! Owns: what is kept, for whom, and how much. Invariants: a tenant finds its own and no other's, so that nobody can tell by the time
//! whether another asked for the same; never more bytes than the limits, of one tenant and in all, as whoever keeps something counts them; the
//! least recently used go first. Cost: a look-up in a hash table and in two trees.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use folio_engine::IndexBlock;
use folio_kv::TenantId;
use parking_lot::Mutex;

/// What tokenizing texts came to.
pub type KeptTexts = Kept<KeptText>;

#[derive(Clone)]
pub enum KeptText {
    /// The ids of a segment of a text.
    Ids(Arc<[u32]>),
    /// Where pairs of tokens are among such as follow one another in a prompt.
    Index(Arc<IndexBlock>),
}

/// What all of them may take.
pub const TEXTS_BYTES_MAX: usize = 64 << 20;

/// A digest of what something is made from.
pub type Digest = [u8; 32];

type Key = (TenantId, Digest);

/// See the module documentation.
pub struct Kept<V> {
    bytes_max: usize,
    tenant_bytes_max: usize,
    inner: Mutex<KeptTable<V>>,
}

struct KeptTable<V> {
    entries: HashMap<Key, KeptEntry<V>>,
    /// By last use, of each tenant and of all.
    uses: BTreeMap<(TenantId, u64), Key>,
    all_uses: BTreeMap<u64, Key>,
    held: HashMap<TenantId, usize>,
    bytes: usize,
    clock: u64,
}

struct KeptEntry<V> {
    value: V,
    used: u64,
    bytes: usize,
}

impl<V: Clone> Kept<V> {
    /// A tenant may have a quarter.
    pub fn new(bytes_max: usize) -> Self {
        let inner = KeptTable {
            entries: HashMap::new(),
            uses: BTreeMap::new(),
            all_uses: BTreeMap::new(),
            held: HashMap::new(),
            bytes: 0,
            clock: 0,
        };
        Self { bytes_max, tenant_bytes_max: bytes_max / 4, inner: Mutex::new(inner) }
    }

    pub fn find(&self, tenant: TenantId, digest: &Digest) -> Option<V> {
        let mut inner = self.inner.lock();
        let key = (tenant, *digest);
        let entry = inner.take(&key)?;
        let value = entry.value.clone();
        inner.put(key, entry);
        Some(value)
    }

    /// `bytes`: about what it takes. More than a tenant may have is not kept.
    pub fn keep(&self, tenant: TenantId, digest: Digest, value: V, bytes: usize) {
        if bytes > self.tenant_bytes_max {
            return;
        }
        let key = (tenant, digest);
        let mut inner = self.inner.lock();
        inner.take(&key);
        while inner.held.get(&tenant).is_some_and(|held| held + bytes > self.tenant_bytes_max) {
            let Some(oldest) = inner.of_tenant(tenant).next() else { break };
            inner.take(&oldest);
        }
        while inner.bytes + bytes > self.bytes_max {
            let Some(oldest) = inner.all_uses.values().next().copied() else { break };
            inner.take(&oldest);
        }
        inner.put(key, KeptEntry { value, used: 0, bytes });
    }

    /// Lets go of what these tenants have.
    pub fn forget(&self, gone: &HashSet<TenantId>) {
        let mut inner = self.inner.lock();
        for tenant in gone {
            let keys: Vec<Key> = inner.of_tenant(*tenant).collect();
            keys.iter().for_each(|key| drop(inner.take(key)));
        }
    }
}

impl<V> KeptTable<V> {
    /// The least recently used first.
    fn of_tenant(&self, tenant: TenantId) -> impl Iterator<Item = Key> {
        self.uses.range((tenant, 0)..=(tenant, u64::MAX)).map(|(_, key)| *key)
    }

    fn take(&mut self, key: &Key) -> Option<KeptEntry<V>> {
        let entry = self.entries.remove(key)?;
        self.uses.remove(&(key.0, entry.used));
        self.all_uses.remove(&entry.used);
        self.bytes -= entry.bytes;
        if let Some(held) = self.held.get_mut(&key.0) {
            *held -= entry.bytes;
            if *held == 0 {
                self.held.remove(&key.0);
            }
        }
        Some(entry)
    }

    /// As the last used.
    fn put(&mut self, key: Key, entry: KeptEntry<V>) {
        self.clock += 1;
        let used = self.clock;
        self.uses.insert((key.0, used), key);
        self.all_uses.insert(used, key);
        self.bytes += entry.bytes;
        *self.held.entry(key.0).or_default() += entry.bytes;
        self.entries.insert(key, KeptEntry { used, ..entry });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_find_their_own_and_the_least_used_go_first() {
        const BYTES: usize = 100;
        let kept = Kept::new(16 * BYTES);
        let tenant = TenantId;
        let digest = |index: u8| [index; 32];
        let sound = || {
            let inner = kept.inner.lock();
            assert_eq!(inner.bytes, inner.entries.values().map(|entry| entry.bytes).sum::<usize>());
            assert_eq!(inner.bytes, inner.held.values().sum::<usize>());
            assert!(inner.bytes <= 16 * BYTES && inner.held.values().all(|held| *held <= 4 * BYTES));
            assert!(inner.uses.len() == inner.entries.len() && inner.all_uses.len() == inner.entries.len());
        };
        assert_eq!(kept.find(tenant(1), &digest(0)), None);
        kept.keep(tenant(1), digest(0), 'a', BYTES);
        assert_eq!(kept.find(tenant(1), &digest(0)), Some('a'));
        assert_eq!(kept.find(tenant(2), &digest(0)), None);
        // More than one tenant may have; the first is used again and again.
        for index in 1..10 {
            kept.keep(tenant(1), digest(index), 'b', BYTES);
            assert_eq!(kept.find(tenant(1), &digest(0)), Some('a'), "{index}");
            sound();
        }
        assert!(kept.find(tenant(1), &digest(6)).is_none() && kept.find(tenant(1), &digest(9)).is_some());
        kept.keep(tenant(1), digest(9), 'c', 2 * BYTES);
        assert_eq!(kept.find(tenant(1), &digest(9)), Some('c'));
        kept.keep(tenant(1), digest(20), 'd', 5 * BYTES);
        assert_eq!(kept.find(tenant(1), &digest(20)), None, "more than a tenant may have");
        sound();
        for other in 2..7 {
            (0..4).for_each(|index| kept.keep(tenant(other), digest(index), 'e', BYTES));
            sound();
        }
        assert!(kept.find(tenant(1), &digest(9)).is_none(), "the others' were used later");
        assert!(kept.find(tenant(6), &digest(0)).is_some());
        kept.forget(&[tenant(6), tenant(5)].into());
        sound();
        assert!(kept.find(tenant(6), &digest(0)).is_none() && kept.find(tenant(4), &digest(0)).is_some());
    }
}
