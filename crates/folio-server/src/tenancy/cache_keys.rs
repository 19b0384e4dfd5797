//! What `prompt_cache_key` is for on one machine: hits accounted by key, so that whoever names a group of requests sees
//! whether they share what they should.
//!
//! Owns: the figures of every tenant's keys. Must never: have an effect on what is cached or found: prefixes are found by
//! content. Bounded: the key used longest ago makes room.

use std::collections::{HashMap, HashSet};

use folio_kv::TenantId;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// Keys remembered for each tenant.
const KEYS_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Figures {
    requests: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    /// Order of use.
    used: u64,
}

#[derive(Default)]
struct KeyTable {
    figures: HashMap<String, Figures>,
    uses: u64,
}

/// See the module documentation.
#[derive(Default)]
pub struct CacheKeys(Mutex<HashMap<TenantId, KeyTable>>);

impl CacheKeys {
    /// One prompt was computed under `key`. O(1), and O(keys) for a new key where there are too many.
    pub fn count(&self, tenant: TenantId, key: &str, prompt_tokens: u64, cached_tokens: u64) {
        let mut all = self.0.lock();
        let keys = all.entry(tenant).or_default();
        keys.uses += 1;
        if !keys.figures.contains_key(key) {
            if keys.figures.len() >= KEYS_MAX
                && let Some(oldest) = keys.figures.iter().min_by_key(|(_, figures)| figures.used)
            {
                let oldest = oldest.0.clone();
                keys.figures.remove(&oldest);
            }
            keys.figures.insert(key.to_owned(), Figures::default());
        }
        if let Some(figures) = keys.figures.get_mut(key) {
            figures.requests += 1;
            figures.prompt_tokens += prompt_tokens;
            figures.cached_tokens += cached_tokens;
            figures.used = keys.uses;
        }
    }

    /// Tenants that are no more.
    pub fn forget(&self, gone: &HashSet<TenantId>) {
        let mut all = self.0.lock();
        all.retain(|tenant, _| !gone.contains(tenant));
    }

    /// The tenant's keys, the one used last first.
    pub fn list(&self, tenant: TenantId) -> Value {
        let all = self.0.lock();
        let mut keys: Vec<(&String, &Figures)> =
            all.get(&tenant).map(|keys| keys.figures.iter().collect()).unwrap_or_default();
        keys.sort_unstable_by_key(|(_, figures)| std::cmp::Reverse(figures.used));
        let one = |(key, figures): (&String, &Figures)| {
            json!({
                "key": key, "requests": figures.requests, "prompt_tokens": figures.prompt_tokens,
                "cached_tokens": figures.cached_tokens,
            })
        };
        json!({"object": "list", "data": keys.into_iter().map(one).collect::<Vec<_>>()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_bounded_and_each_tenant_s_own() {
        let keys = CacheKeys::default();
        for key in 0..KEYS_MAX + 5 {
            keys.count(TenantId(1), &key.to_string(), 10, 4);
            keys.count(TenantId(1), "often", 1, 0);
        }
        let list = keys.list(TenantId(1));
        assert_eq!(list["data"].as_array().unwrap().len(), KEYS_MAX);
        let often = json!({"key": "often", "requests": KEYS_MAX + 5, "prompt_tokens": KEYS_MAX + 5, "cached_tokens": 0});
        assert_eq!(list["data"][0], often);
        assert_eq!(keys.list(TenantId(2))["data"], json!([]));
        (0..100_000).for_each(|tenant| keys.count(TenantId(tenant), "k", 1, 0));
        keys.forget(&(2..100_000).map(TenantId).collect());
        assert_eq!(keys.0.lock().len(), 2);
    }
}
