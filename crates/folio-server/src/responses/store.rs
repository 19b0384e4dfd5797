//! Responses that can be asked for again, and gone on from.
//!
//! Owns: who may see which, and how many are kept. Invariants: a tenant reaches its own and no other's; never more than the limits, the
//! least recently used go first, one that still runs last. Nothing outlives the process.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_kv::TenantId;
use serde_json::Value;

use super::log::Log;
use crate::stream::Abort;

/// See the module documentation.
pub struct Store {
    count_max: usize,
    bytes_max: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<(TenantId, String), Entry>,
    /// By last use.
    uses: BTreeMap<u64, (TenantId, String)>,
    clock: u64,
    bytes: usize,
}

struct Entry {
    record: Record,
    used: u64,
    bytes: usize,
    /// How to cancel it, while it runs in the background.
    running: Option<Abort>,
    /// Its events, where it was to be streamed from the background. Their bytes are among `bytes`.
    log: Option<(Arc<Log>, usize)>,
}

/// What is kept of a response.
#[derive(Clone)]
pub struct Record {
    /// The response object as JSON.
    pub response: Value,
    /// The conversation up to its end, without instructions.
    pub messages: Arc<[Value]>,
    /// The request's own items, each with an id.
    pub input: Arc<[Value]>,
}

impl Record {
    /// An item of the answer or of what it was asked with.
    pub fn item(&self, id: &str) -> Option<&Value> {
        let output = self.response["output"].as_array().into_iter().flatten();
        output.chain(self.input.iter()).find(|item| item["id"] == *id)
    }
}

impl Store {
    pub fn new(count_max: usize, bytes_max: usize) -> Self {
        Self { count_max, bytes_max, inner: Mutex::default() }
    }

    /// Keeps a response, in the place of an earlier state of it. `running`: it goes on, as far as is known.
    pub fn put(&self, tenant: TenantId, id: &str, record: Record, running: Option<Abort>) {
        let bytes = size(&record.response)
            + record.messages.iter().chain(record.input.iter()).map(size).sum::<usize>();
        let mut inner = self.lock();
        if running.is_some() && inner.entries.contains_key(&(tenant, id.to_owned())) {
            // It has ended meanwhile.
            return;
        }
        let log = inner.remove(&(tenant, id.to_owned())).and_then(|entry| entry.log);
        let bytes = bytes + log.as_ref().map_or(0, |(_, bytes)| *bytes);
        if bytes > self.bytes_max {
            return;
        }
        inner.clock += 1;
        let used = inner.clock;
        inner.bytes += bytes;
        inner.uses.insert(used, (tenant, id.to_owned()));
        inner.entries.insert((tenant, id.to_owned()), Entry { record, used, bytes, running, log });
        self.make_room(&mut inner);
    }

    fn make_room(&self, inner: &mut Inner) {
        while inner.entries.len() > self.count_max || inner.bytes > self.bytes_max {
            let idle = inner.uses.values().find(|key| inner.entries[*key].running.is_none());
            let Some(key) = idle.or(inner.uses.values().next()).cloned() else { break };
            inner.remove(&key);
        }
    }

    /// Where the events of one that runs will be found.
    pub fn attach(&self, tenant: TenantId, id: &str, log: Arc<Log>) {
        if let Some(entry) = self.lock().entries.get_mut(&(tenant, id.to_owned())) {
            entry.log = Some((log, 0));
        }
    }

    /// Its events, where there are any.
    pub fn log(&self, tenant: TenantId, id: &str) -> Option<Arc<Log>> {
        self.lock().entries.get(&(tenant, id.to_owned()))?.log.as_ref().map(|(log, _)| log.clone())
    }

    /// Counts bytes that were added to its events. False: it is no longer kept.
    pub fn grow(&self, tenant: TenantId, id: &str, bytes: usize) -> bool {
        let mut inner = self.lock();
        let key = (tenant, id.to_owned());
        let Some((log, entry_bytes)) =
            inner.entries.get_mut(&key).and_then(|entry| Some((entry.log.as_mut()?, &mut entry.bytes)))
        else {
            return false;
        };
        log.1 += bytes;
        *entry_bytes += bytes;
        inner.bytes += bytes;
        self.make_room(&mut inner);
        inner.entries.contains_key(&key)
    }

    /// A response that was put and neither dropped nor forgotten.
    pub fn get(&self, tenant: TenantId, id: &str) -> Option<Record> {
        let mut inner = self.lock();
        inner.clock += 1;
        let now = inner.clock;
        let key = (tenant, id.to_owned());
        let entry = inner.entries.get_mut(&key)?;
        let before = std::mem::replace(&mut entry.used, now);
        let record = entry.record.clone();
        inner.uses.remove(&before);
        inner.uses.insert(now, key);
        Some(record)
    }

    /// Takes the way to cancel one that runs; the response as it is now stays. `None`: there is no such response.
    pub fn stop(&self, tenant: TenantId, id: &str) -> Option<Option<Abort>> {
        let mut inner = self.lock();
        Some(inner.entries.get_mut(&(tenant, id.to_owned()))?.running.take())
    }

    /// Whether there was one. It is cancelled if it runs.
    pub fn delete(&self, tenant: TenantId, id: &str) -> bool {
        let entry = self.lock().remove(&(tenant, id.to_owned()));
        let found = entry.is_some();
        if let Some(abort) = entry.and_then(|entry| entry.running) {
            abort.cancel();
        }
        found
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn remove(&mut self, key: &(TenantId, String)) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.uses.remove(&entry.used);
        self.bytes -= entry.bytes;
        Some(entry)
    }
}

/// About what a value takes in memory, bytes.
fn size(value: &Value) -> usize {
    const NODE: usize = 64;
    NODE + match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + size(value)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(text: &str) -> Record {
        Record { response: text.into(), messages: Arc::new([]), input: Arc::new([]) }
    }

    #[test]
    fn the_least_recently_used_go_first_and_those_that_run_last() {
        let (one, two) = (TenantId(1), TenantId(2));
        let store = Store::new(3, 1 << 20);
        store.put(one, "runs", record("runs"), Some(Abort::new(Vec::new())));
        store.put(one, "a", record("a"), None);
        store.put(one, "b", record("b"), None);
        assert!(store.get(one, "a").is_some() && store.get(two, "a").is_none());
        store.put(two, "c", record("c"), None);
        assert!(store.get(one, "b").is_none(), "used least recently of those that do not run");
        assert!(store.get(one, "runs").is_some() && store.get(one, "a").is_some());
        store.put(one, "a", record("late"), Some(Abort::new(Vec::new())));
        assert_eq!(
            store.get(one, "a").map(|record| record.response),
            Some("a".into()),
            "what is over stays over"
        );
        store.put(one, "runs", record("over"), None);
        assert_eq!(store.get(one, "runs").map(|record| record.response), Some("over".into()));
        assert!(!store.delete(two, "a") && store.delete(one, "a") && !store.delete(one, "a"));
        assert_eq!(store.lock().uses.len(), 2);
    }

    #[test]
    fn bytes_are_bounded_too() {
        let store = Store::new(100, 1000);
        for index in 0..20 {
            store.put(TenantId(0), &index.to_string(), record(&"x".repeat(200)), None);
            let inner = store.lock();
            assert_eq!(inner.bytes, inner.entries.values().map(|entry| entry.bytes).sum::<usize>());
            assert!(inner.bytes <= 1000 && inner.uses.len() == inner.entries.len());
        }
        store.put(TenantId(0), "huge", record(&"x".repeat(2000)), None);
        assert!(store.get(TenantId(0), "huge").is_none() && store.get(TenantId(0), "19").is_some());
    }
}
