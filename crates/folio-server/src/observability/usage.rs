//! What was used: by whom, with which key, of which model, in which minute.
//!
//! Owns: token counts, counted with the responses, so that at any moment the sums over a tenant's responses, its usage since
//! the start, its records and its metrics are equal; and the file in which records outlive the process (redb, at most
//! [`SAVED_EVERY`] behind, complete after an orderly end). Must never: tell a tenant about another.
//!
//! Memory comes from the engine's snapshot, brought up to date: exact while nothing runs, at most a few steps behind while
//! something does.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use folio_kv::TenantId;
use parking_lot::Mutex;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use crate::error::ServerError;
use crate::tenancy::tenant::Tenant;
use folio_api::{ApiError, unix_s};

/// How often new records are written to the file.
pub(crate) const SAVED_EVERY: Duration = Duration::from_secs(1);
/// Records kept without a file; the oldest go first.
const MEMORY_ROWS_MAX: usize = 200_000;
/// Records of the file older than this are removed at start.
const KEPT_S: u64 = 400 * 86_400;

type StoredKey = (&'static str, u64, &'static str, &'static str);
type StoredCount = (u64, u64, u64, u64);

/// (tenant, start of the minute in Unix seconds, key, model) -> requests, prompt, cached and generated tokens.
const ROWS: TableDefinition<StoredKey, StoredCount> = TableDefinition::new("folio usage");

/// Figures that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub requests: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
}

impl Count {
    /// Prompt tokens that were not found in the cache.
    pub fn computed_tokens(&self) -> u64 {
        self.prompt_tokens - self.cached_tokens.min(self.prompt_tokens)
    }

    pub fn add(&mut self, other: Count) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.completion_tokens += other.completion_tokens;
    }

    fn stored(self) -> StoredCount {
        (self.requests, self.prompt_tokens, self.cached_tokens, self.completion_tokens)
    }

    fn of_stored((requests, prompt_tokens, cached_tokens, completion_tokens): StoredCount) -> Self {
        Self { requests, prompt_tokens, cached_tokens, completion_tokens }
    }
}

/// Whose a record is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowKey {
    pub tenant: Arc<str>,
    /// Start of the minute, Unix seconds.
    pub minute: u64,
    pub key: Arc<str>,
    pub model: Arc<str>,
}

#[derive(Default)]
struct UnsavedUsage {
    /// Since the start of the process.
    total: Count,
    /// By minute, not yet among the rows; in order.
    unsaved: Vec<(u64, Count)>,
}

/// What one key of one tenant uses.
pub(crate) struct UsageMeter {
    tenant: Arc<str>,
    key: Arc<str>,
    inner: Mutex<UnsavedUsage>,
}

impl UsageMeter {
    /// The engine took a prompt.
    pub fn request(&self) {
        self.add(Count { requests: 1, ..Count::default() });
    }

    /// A prompt was computed.
    pub fn prompt(&self, tokens: u64, cached: u64) {
        self.add(Count { prompt_tokens: tokens, cached_tokens: cached, ..Count::default() });
    }

    pub fn generated(&self, tokens: u64) {
        self.add(Count { completion_tokens: tokens, ..Count::default() });
    }

    fn add(&self, count: Count) {
        let minute = unix_s() / 60 * 60;
        let mut inner = self.inner.lock();
        inner.total.add(count);
        match inner.unsaved.last_mut() {
            // A clock that is set back changes no minute that is over.
            Some((last, sum)) if *last >= minute => sum.add(count),
            _ => inner.unsaved.push((minute, count)),
        }
    }
}

/// What a tenant used since the start.
#[derive(Default)]
struct Used {
    /// With keys that are not in use.
    past: Count,
    keys: HashMap<Arc<str>, Arc<UsageMeter>>,
    /// Kept until it is saved.
    left: bool,
}

enum UsageRows {
    Memory(BTreeMap<RowKey, Count>),
    File(Database),
}

/// A meter for every key that is in use, and the records.
pub(crate) struct Meters {
    model: Arc<str>,
    meters: Mutex<HashMap<TenantId, Used>>,
    /// Held while meters are emptied into it, and while records are read: no figure is there twice or not at all.
    rows: Mutex<UsageRows>,
    /// Held by whoever reads records: one at a time, so that long readings are nobody else's business.
    pub reading: tokio::sync::Mutex<()>,
}

impl Meters {
    /// `file`: where records outlive the process; made if it is not there.
    pub fn new(model: &str, file: Option<&Path>) -> Result<Self, ServerError> {
        let rows = match file {
            None => UsageRows::Memory(BTreeMap::new()),
            Some(path) => UsageRows::File(open(path).map_err(|reason| {
                ServerError::Config(format!(
                    "{}: records of usage cannot be kept here: {reason}",
                    path.display()
                ))
            })?),
        };
        Ok(Self {
            model: model.into(),
            meters: Mutex::default(),
            rows: Mutex::new(rows),
            reading: tokio::sync::Mutex::default(),
        })
    }

    pub fn of(&self, tenant: &Tenant) -> Arc<UsageMeter> {
        let mut meters = self.meters.lock();
        let used = meters.entry(tenant.id).or_default();
        let new = || {
            let (tenant, key) = (tenant.name.clone(), tenant.key.clone());
            Arc::new(UsageMeter { tenant, key, inner: Mutex::default() })
        };
        used.keys.entry(tenant.key.clone()).or_insert_with(new).clone()
    }

    /// Since the start; zeros for a tenant that used nothing.
    pub fn count(&self, tenant: TenantId) -> Count {
        let meters = self.meters.lock();
        let Some(used) = meters.get(&tenant) else { return Count::default() };
        used.keys.values().fold(used.past, |mut sum, meter| {
            sum.add(meter.inner.lock().total);
            sum
        })
    }

    /// Tenants that are no more, once what they used is saved.
    pub fn forget(&self, gone: &HashSet<TenantId>) {
        self.meters.lock().iter_mut().for_each(|(id, used)| used.left |= gone.contains(id));
        self.settle();
    }

    /// Meters that nobody uses and that have nothing to save become part of their tenant's past.
    fn settle(&self) {
        self.meters.lock().retain(|_, used| {
            let Used { past, keys, left } = used;
            keys.retain(|_, meter| {
                let inner = meter.inner.lock();
                let stays = Arc::strong_count(meter) > 1 || !inner.unsaved.is_empty();
                if !stays {
                    past.add(inner.total);
                }
                stays
            });
            keys.shrink_to(64);
            !*left || !keys.is_empty()
        });
    }

    fn all(&self) -> Vec<Arc<UsageMeter>> {
        self.meters.lock().values().flat_map(|used| used.keys.values().cloned()).collect()
    }

    /// Moves what was counted into the records; what cannot be written stays for the next time. O(used keys), and a disk
    /// write where there is a file and something was counted.
    pub fn save(&self) {
        self.write();
        self.settle();
    }

    fn write(&self) {
        let mut rows = self.rows.lock();
        let take = |meter: Arc<UsageMeter>| {
            let counts = std::mem::take(&mut meter.inner.lock().unsaved);
            (counts, meter)
        };
        let taken: Vec<_> = self.all().into_iter().map(take).collect();
        let new = || {
            let model = &self.model;
            taken.iter().flat_map(move |(counts, meter)| {
                counts.iter().map(move |(minute, count)| {
                    let (tenant, key) = (meter.tenant.clone(), meter.key.clone());
                    (RowKey { minute: *minute, tenant, key, model: model.clone() }, *count)
                })
            })
        };
        if new().next().is_none() {
            return;
        }
        match &mut *rows {
            UsageRows::Memory(rows) => {
                new().for_each(|(key, count)| rows.entry(key).or_default().add(count));
                while rows.len() > MEMORY_ROWS_MAX {
                    let oldest = rows.keys().map(|key| key.minute).min();
                    rows.retain(|key, _| Some(key.minute) != oldest);
                }
            }
            UsageRows::File(database) => {
                if let Err(error) = append(database, new()) {
                    tracing::error!(%error, "records of usage are kept in memory until they can be written");
                    for (counts, meter) in &taken {
                        let mut inner = meter.inner.lock();
                        inner.unsaved.splice(0..0, counts.iter().copied());
                    }
                }
            }
        }
    }

    /// Tells every record of minutes that begin within `from..to`, of one tenant or of all, until `take` wants no more. A record
    /// may come in two parts. O(records of the tenant in that time).
    pub fn records(
        &self,
        tenant: Option<&str>,
        from: u64,
        to: u64,
        take: &mut Take<'_>,
    ) -> Result<(), ApiError> {
        let rows = self.rows.lock();
        let wanted = |key: &RowKey| {
            (from..to).contains(&key.minute) && tenant.is_none_or(|tenant| tenant == &*key.tenant)
        };
        match &*rows {
            UsageRows::Memory(rows) => {
                let mut kept = rows.iter().filter(|(key, _)| wanted(key));
                kept.try_for_each(|(key, count)| take(key.clone(), *count))?;
            }
            UsageRows::File(database) => read(database, tenant, from..to, take).map_err(|error| {
                tracing::error!(%error, "records of usage cannot be read");
                ApiError::internal("the records of usage cannot be read")
            })??,
        }
        for meter in self.all() {
            for (minute, count) in &meter.inner.lock().unsaved {
                let (tenant, key) = (meter.tenant.clone(), meter.key.clone());
                let key = RowKey { minute: *minute, tenant, key, model: self.model.clone() };
                if wanted(&key) {
                    take(key, *count)?;
                }
            }
        }
        Ok(())
    }
}

/// Takes records one after the other, or says why it wants no more.
pub(crate) type Take<'a> = dyn FnMut(RowKey, Count) -> Result<(), ApiError> + 'a;

fn open(path: &Path) -> Result<Database, redb::Error> {
    let database = Database::create(path)?;
    let mut transaction = database.begin_write()?;
    transaction.set_quick_repair(true);
    {
        let mut table = transaction.open_table(ROWS)?;
        let oldest = unix_s().saturating_sub(KEPT_S);
        table.retain(|(_, minute, _, _), _| minute >= oldest)?;
    }
    transaction.commit()?;
    Ok(database)
}

fn append(database: &Database, new: impl Iterator<Item = (RowKey, Count)>) -> Result<(), redb::Error> {
    let mut transaction = database.begin_write()?;
    transaction.set_quick_repair(true);
    {
        let mut table = transaction.open_table(ROWS)?;
        for (RowKey { minute, tenant, key, model }, count) in new {
            let at = (&*tenant, minute, &*key, &*model);
            let mut sum = table.get(at)?.map(|known| Count::of_stored(known.value())).unwrap_or_default();
            sum.add(count);
            table.insert(at, sum.stored())?;
        }
    }
    transaction.commit()?;
    Ok(())
}

fn read(
    database: &Database,
    tenant: Option<&str>,
    minutes: Range<u64>,
    take: &mut Take<'_>,
) -> Result<Result<(), ApiError>, redb::Error> {
    let transaction = database.begin_read()?;
    let table = transaction.open_table(ROWS)?;
    let rows = match tenant {
        Some(tenant) => {
            let end = minutes.end.max(minutes.start);
            table.range((tenant, minutes.start, "", "")..(tenant, end, "", ""))?
        }
        None => table.iter()?,
    };
    for row in rows {
        let (key, count) = row?;
        let (tenant, minute, api_key, model) = key.value();
        if !minutes.contains(&minute) {
            continue;
        }
        let (tenant, key, model) = (tenant.into(), api_key.into(), model.into());
        let taken = take(RowKey { minute, tenant, key, model }, Count::of_stored(count.value()));
        if taken.is_err() {
            return Ok(taken);
        }
    }
    Ok(Ok(()))
}

/// Of an integral over microseconds.
pub(crate) fn seconds(integral: u128) -> f64 {
    integral as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::declared::Declared;
    use crate::tenancy::keyring::Keyring;
    use crate::tenancy::tenants::Tenants;

    fn tenants() -> [Tenant; 2] {
        let tenants = Tenants::new(&["a".into(), "b".into()], &Declared::default(), None, Keyring::default());
        let tenants = Arc::new(tenants.unwrap());
        ["a", "b"].map(|key| {
            let header = ("x-api-key".parse().unwrap(), key.parse().unwrap());
            tenants.authenticate_now(&axum::http::HeaderMap::from_iter([header])).unwrap()
        })
    }

    fn sum(meters: &Meters, tenant: Option<&str>) -> Count {
        let mut sum = Count::default();
        let mut add = |_, count| {
            sum.add(count);
            Ok(())
        };
        meters.records(tenant, 0, u64::MAX, &mut add).unwrap();
        sum
    }

    #[test]
    fn records_are_equal_to_what_was_counted_before_and_after_saving() {
        for with_file in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("usage.redb");
            let file = with_file.then_some(path.as_path());
            let meters = Meters::new("m", file).unwrap();
            let [a, b] = tenants();
            for round in 0..5 {
                meters.of(&a).request();
                meters.of(&a).prompt(10, 4);
                meters.of(&b).generated(round);
                for saved in [false, true] {
                    assert_eq!(sum(&meters, Some(&a.name)), meters.count(a.id), "saved: {saved}");
                    assert_eq!(sum(&meters, Some(&b.name)), meters.count(b.id), "saved: {saved}");
                    meters.save();
                }
            }
            let total = Count { requests: 5, prompt_tokens: 50, cached_tokens: 20, completion_tokens: 0 };
            assert_eq!((meters.count(a.id), total.computed_tokens()), (total, 30));
            assert_eq!(sum(&meters, None).completion_tokens, 10);
            drop(meters);
            let again = Meters::new("m", file).unwrap();
            assert_eq!(sum(&again, Some(&a.name)), if with_file { total } else { Count::default() });
            assert_eq!(again.count(a.id), Count::default(), "since the start of this process");
            again.of(&a).request();
            again.save();
            assert_eq!(sum(&again, Some(&a.name)).requests, if with_file { 6 } else { 1 });
        }
    }

    #[test]
    fn keys_used_once_become_a_sum_and_tenants_that_left_nothing() {
        let meters = Meters::new("m", None).unwrap();
        let [tenant, other] = tenants();
        let once = |number: usize| Tenant { key: format!("k{number}").as_str().into(), ..tenant.clone() };
        let held = meters.of(&once(0));
        for number in 0..100_000 {
            meters.of(&once(number)).request();
        }
        meters.save();
        let keys = |id| meters.meters.lock().get(&id).map(|used| used.keys.len());
        assert_eq!(keys(tenant.id), Some(1), "the one that is in use");
        held.request();
        assert_eq!(meters.count(tenant.id).requests, 100_001);
        assert_eq!(sum(&meters, Some(&tenant.name)).requests, 100_001);
        meters.of(&other).request();
        meters.forget(&[tenant.id].into());
        assert_eq!(meters.count(tenant.id).requests, 100_001, "not while somebody counts");
        drop(held);
        meters.save();
        assert_eq!((keys(tenant.id), keys(other.id)), (None, Some(0)));
        assert_eq!((meters.count(tenant.id), meters.count(other.id).requests), (Count::default(), 1));
    }

    #[test]
    fn the_file_is_one_servers_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.redb");
        let _first = Meters::new("m", Some(&path)).unwrap();
        let error = Meters::new("m", Some(&path)).err().unwrap().to_string();
        assert!(error.contains("usage.redb"), "{error}");
    }
}
