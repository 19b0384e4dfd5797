//! Responses that can be asked for again, and gone on from.
//!
//! Owns: who may see which, and how many are kept. Invariants: a tenant reaches its own and no other's; never more than the limits. Where
//! there are more, the tenant that holds the most gives way, with what it used least recently, and what still runs last: so one
//! tenant's flood drives out its own. Nothing outlives the process.
//!
//! Cost: a few operations on ordered maps, and nothing that grows with a response, which is shared with whoever asks. A response costs its
//! bytes, and at least an even share of all, so that the bytes bound their number too.

pub(crate) mod log;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use axum::body::Bytes;
use folio_kv::TenantId;
use folio_text::work;
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;

use crate::http::stream::Abort;
use log::Log;

/// See the module documentation.
pub struct ResponseStore {
    /// The least that a response costs.
    share: usize,
    bytes_max: usize,
    inner: Mutex<ResponseTable>,
}

#[derive(Default)]
struct ResponseTable {
    tenants: HashMap<TenantId, TenantResponses>,
    /// By what they hold.
    largest: BTreeSet<(usize, TenantId)>,
    clock: u64,
    bytes: usize,
}

/// One tenant's.
#[derive(Default)]
struct TenantResponses {
    entries: HashMap<String, ResponseEntry>,
    /// By last use: those that are over, and those that run.
    over: BTreeMap<u64, String>,
    running: BTreeMap<u64, String>,
    bytes: usize,
}

struct ResponseEntry {
    record: StoredResponse,
    used: u64,
    bytes: usize,
    /// How to cancel it, while it runs in the background.
    running: Option<Abort>,
    /// Its events, where it was to be streamed from the background. Their bytes are among `bytes`.
    log: Option<(Arc<Log>, usize)>,
}

impl ResponseEntry {
    /// Its events go with it, whoever reads them.
    fn forget(&self) {
        self.log.iter().for_each(|(log, _)| log.forget());
    }
}

/// What is kept of a response.
#[derive(Clone)]
pub struct StoredResponse {
    /// The response object as JSON.
    pub response: Arc<str>,
    /// The items of its answer, each with an id.
    output: Arc<[Value]>,
    /// The conversation up to its end, without instructions.
    pub messages: Arc<[Value]>,
    /// The request's own items, each with an id.
    pub input: Arc<[Value]>,
    /// It was asked for without waiting for it.
    pub background: bool,
    /// About what all that takes in memory.
    pub bytes: usize,
}

impl StoredResponse {
    /// Of an answer with these items, to a conversation of these `messages` that ended with `input`. Counts what it takes: O(that).
    pub fn new(
        response: Arc<str>,
        output: Vec<Value>,
        messages: Vec<Value>,
        input: Arc<[Value]>,
        background: bool,
    ) -> Self {
        let items = output.iter().chain(&messages).chain(input.iter());
        let bytes = response.len() + items.map(size).sum::<usize>();
        work::add(bytes);
        Self { response, output: output.into(), messages: messages.into(), input, background, bytes }
    }

    /// The response, shared with whoever is answered.
    pub fn json(&self) -> Bytes {
        Bytes::from_owner(Arc::<[u8]>::from(self.response.clone()))
    }

    /// The same with the response in another state.
    pub fn with(&self, response: Arc<str>) -> Self {
        let bytes = self.bytes - self.response.len() + response.len();
        Self { response, bytes, ..self.clone() }
    }

    /// How many there are.
    pub fn items(&self) -> usize {
        self.output.len() + self.input.len()
    }

    /// An item of the answer or of what it was asked with.
    pub fn item(&self, id: &str) -> Option<&Value> {
        self.output.iter().chain(self.input.iter()).find(|item| item["id"] == *id)
    }
}

impl ResponseStore {
    pub fn new(count_max: usize, bytes_max: usize) -> Self {
        Self { share: bytes_max / count_max.max(1), bytes_max, inner: Mutex::default() }
    }

    /// Keeps a response, in the place of an earlier state of it. `running`: it goes on, as far as is known.
    pub fn put(&self, tenant: TenantId, id: &str, record: StoredResponse, running: Option<Abort>) {
        let bytes = record.bytes;
        let mut inner = self.lock();
        if running.is_some() && inner.own(tenant, id).is_some() {
            // It has ended meanwhile.
            return;
        }
        let log = inner.remove(tenant, id).and_then(|entry| entry.log);
        let bytes = bytes.max(self.share).max(1) + log.as_ref().map_or(0, |(_, bytes)| *bytes);
        if bytes > self.bytes_max {
            log.iter().for_each(|(log, _)| log.forget());
            return;
        }
        inner.clock += 1;
        let used = inner.clock;
        inner.change(tenant, |own| {
            own.line(running.is_some()).insert(used, id.to_owned());
            own.bytes += bytes;
            own.entries.insert(id.to_owned(), ResponseEntry { record, used, bytes, running, log });
        });
        self.make_room(&mut inner);
    }

    fn make_room(&self, inner: &mut ResponseTable) {
        while inner.bytes > self.bytes_max {
            let Some((_, tenant)) = inner.largest.last().copied() else { break };
            let Some(id) = inner.tenants.get(&tenant).and_then(TenantResponses::least_used).cloned() else {
                break;
            };
            if let Some(entry) = inner.remove(tenant, &id) {
                entry.forget();
            }
        }
    }

    /// Where the events of one that runs will be found.
    pub fn attach(&self, tenant: TenantId, id: &str, log: Arc<Log>) {
        let mut inner = self.lock();
        let entry = inner.tenants.get_mut(&tenant).and_then(|own| own.entries.get_mut(id));
        entry.into_iter().for_each(|entry| entry.log = Some((log.clone(), 0)));
    }

    /// Its events, where there are any.
    pub fn log(&self, tenant: TenantId, id: &str) -> Option<Arc<Log>> {
        self.lock().own(tenant, id)?.log.as_ref().map(|(log, _)| log.clone())
    }

    /// Counts bytes that were added to its events. False: it is no longer kept.
    pub fn grow(&self, tenant: TenantId, id: &str, bytes: usize) -> bool {
        let mut inner = self.lock();
        if inner.own(tenant, id).is_none_or(|entry| entry.log.is_none()) {
            return false;
        }
        inner.change(tenant, |own| {
            let Some(entry) = own.entries.get_mut(id) else { return };
            entry.bytes += bytes;
            entry.log.iter_mut().for_each(|(_, of_log)| *of_log += bytes);
            own.bytes += bytes;
        });
        self.make_room(&mut inner);
        inner.own(tenant, id).is_some()
    }

    /// A response that was put and neither dropped nor forgotten.
    pub fn get(&self, tenant: TenantId, id: &str) -> Option<StoredResponse> {
        let mut inner = self.lock();
        inner.clock += 1;
        let now = inner.clock;
        let own = inner.tenants.get_mut(&tenant)?;
        let entry = own.entries.get_mut(id)?;
        let before = std::mem::replace(&mut entry.used, now);
        let (record, running) = (entry.record.clone(), entry.running.is_some());
        own.line(running).remove(&before);
        own.line(running).insert(now, id.to_owned());
        Some(record)
    }

    /// Takes the way to cancel one that runs; the response as it is now stays. `None`: there is no such response.
    pub fn stop(&self, tenant: TenantId, id: &str) -> Option<Option<Abort>> {
        let mut inner = self.lock();
        let own = inner.tenants.get_mut(&tenant)?;
        let entry = own.entries.get_mut(id)?;
        let (running, used) = (entry.running.take(), entry.used);
        own.running.remove(&used);
        own.over.insert(used, id.to_owned());
        Some(running)
    }

    /// Whether there was one. It is cancelled if it runs.
    pub fn delete(&self, tenant: TenantId, id: &str) -> bool {
        let entry = self.lock().remove(tenant, id);
        let Some(entry) = entry else { return false };
        entry.forget();
        if let Some(abort) = entry.running {
            abort.cancel();
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, ResponseTable> {
        self.inner.lock()
    }
}

impl TenantResponses {
    fn line(&mut self, running: bool) -> &mut BTreeMap<u64, String> {
        if running { &mut self.running } else { &mut self.over }
    }

    fn least_used(&self) -> Option<&String> {
        self.over.values().next().or_else(|| self.running.values().next())
    }
}

impl ResponseTable {
    fn own(&self, tenant: TenantId, id: &str) -> Option<&ResponseEntry> {
        self.tenants.get(&tenant)?.entries.get(id)
    }

    /// Changes what a tenant holds. Who holds nothing is forgotten.
    fn change<T>(&mut self, tenant: TenantId, change: impl FnOnce(&mut TenantResponses) -> T) -> T {
        let own = self.tenants.entry(tenant).or_default();
        let before = own.bytes;
        let changed = change(own);
        let after = own.bytes;
        self.largest.remove(&(before, tenant));
        match after {
            0 => drop(self.tenants.remove(&tenant)),
            after => drop(self.largest.insert((after, tenant))),
        }
        self.bytes = self.bytes + after - before;
        changed
    }

    fn remove(&mut self, tenant: TenantId, id: &str) -> Option<ResponseEntry> {
        self.own(tenant, id)?;
        self.change(tenant, |own| {
            let entry = own.entries.remove(id)?;
            own.line(entry.running.is_some()).remove(&entry.used);
            own.bytes -= entry.bytes;
            Some(entry)
        })
    }
}

/// About what a value takes in memory, bytes.
pub(crate) fn size(value: &Value) -> usize {
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

    fn record(text: &str) -> StoredResponse {
        StoredResponse::new(text.into(), Vec::new(), Vec::new(), Arc::new([]), false)
    }

    #[test]
    fn the_least_recently_used_go_first_and_those_that_run_last() {
        let (one, two) = (TenantId(1), TenantId(2));
        let store = ResponseStore::new(3, 1 << 20);
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
        assert!(store.delete(one, "runs") && store.delete(two, "c"));
        let inner = store.lock();
        assert!(inner.tenants.is_empty() && inner.largest.is_empty() && inner.bytes == 0);
    }

    #[test]
    fn a_tenants_flood_drives_out_its_own() {
        let (quiet, loud) = (TenantId(1), TenantId(2));
        let store = ResponseStore::new(100, 100 << 10);
        for index in 0..10 {
            store.put(quiet, &index.to_string(), record("mine"), None);
        }
        for index in 0..5000 {
            store.put(loud, &index.to_string(), record(&"x".repeat(index % 3000)), None);
        }
        assert!((0..10).all(|index| store.get(quiet, &index.to_string()).is_some()));
        assert!(store.get(loud, "4999").is_some() && store.get(loud, "0").is_none());
        let inner = store.lock();
        assert!(inner.bytes <= 100 << 10 && inner.tenants[&loud].entries.len() <= 90);
    }

    #[test]
    fn bytes_are_bounded_too() {
        let store = ResponseStore::new(100, 1000);
        for index in 0..20 {
            store.put(TenantId(0), &index.to_string(), record(&"x".repeat(200)), None);
            let inner = store.lock();
            let own = &inner.tenants[&TenantId(0)];
            assert_eq!(inner.bytes, own.entries.values().map(|entry| entry.bytes).sum::<usize>());
            assert!(inner.bytes <= 1000 && own.over.len() == own.entries.len());
        }
        store.put(TenantId(0), "huge", record(&"x".repeat(2000)), None);
        assert!(store.get(TenantId(0), "huge").is_none() && store.get(TenantId(0), "19").is_some());
    }
}
