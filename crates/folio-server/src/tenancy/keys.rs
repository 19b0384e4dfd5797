//! API keys in a file: made, listed and revoked by `folio keys`, read by any number of servers.
//!
//! Owns: the file (redb: transactions, checksums, one writer at a time) and what is known of a key: a digest, never the key
//! itself. Must never: hold the file open between two uses, so that a key can be made or revoked while servers run.
//!
//! A server reads the file at start and again whenever it changed, asked for every authentication (one `stat`, off the event loop, shared by
//! all who wait for one): a key that `folio keys revoke` reported as revoked opens nothing any more. A file that cannot be read any
//! more opens nothing either.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use redb::{Database, DatabaseError, ReadOnlyDatabase, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Key id -> [`KeyRecord`] as JSON.
const KEYS: TableDefinition<&str, &[u8]> = TableDefinition::new("folio api keys");
/// Every key begins so: whoever finds one knows what it is.
const PREFIX: &str = "fk";
/// How long another writer is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// File times are this coarse: a file that changed so recently may change again unseen.
pub(crate) const RACY: Duration = Duration::from_millis(50);
const NAME_BYTES_MAX: usize = 64;

/// What a key opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Everything that computes or describes the model: completions, embeddings, models, tokenize, ...
    Generate,
    /// `/v1/cache/*`
    Cache,
    /// `/v1/files`, `/v1/batches`
    Batch,
    /// `/v1/usage*`, `/v1/why*`, `/v1/trace`
    Usage,
    /// The admin listener. Not among the default ones.
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 5] = [Scope::Generate, Scope::Cache, Scope::Batch, Scope::Usage, Scope::Admin];
    /// Of a key that nothing is said about.
    pub const DEFAULT: [Scope; 4] = [Scope::Generate, Scope::Cache, Scope::Batch, Scope::Usage];

    pub fn name(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Cache => "cache",
            Self::Batch => "batch",
            Self::Usage => "usage",
            Self::Admin => "admin",
        }
    }

    /// Of the route's path.
    pub fn of(path: &str) -> Self {
        let under = |folder: &str| {
            path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        match path {
            _ if under("/v1/cache") => Self::Cache,
            _ if under("/v1/files") || under("/v1/batches") => Self::Batch,
            _ if under("/v1/usage") || under("/v1/why") || under("/v1/trace") => Self::Usage,
            "/api/delete" => Self::Admin,
            _ => Self::Generate,
        }
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of scopes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    pub fn new(scopes: &[Scope]) -> Self {
        Self(scopes.iter().fold(0, |set, scope| set | 1 << *scope as u8))
    }

    pub fn has(self, scope: Scope) -> bool {
        self.0 & (1 << scope as u8) != 0
    }
}

/// What is known of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// Part of the key, and its name everywhere else.
    pub id: String,
    pub tenant: String,
    #[serde(default)]
    pub name: String,
    /// SHA-256, hex.
    digest: String,
    pub scopes: Vec<Scope>,
    /// Unix times, seconds.
    pub created_s: u64,
    pub expires_s: Option<u64>,
    pub revoked_s: Option<u64>,
}

impl KeyRecord {
    /// At a Unix time in seconds.
    pub fn state(&self, now_s: u64) -> &'static str {
        match (self.revoked_s, self.expires_s) {
            (Some(_), _) => "revoked",
            (None, Some(end)) if end <= now_s => "expired",
            _ => "valid",
        }
    }
}

/// A key to be made.
#[derive(Clone, Debug)]
pub struct NewKey {
    pub tenant: String,
    pub name: String,
    pub scopes: Vec<Scope>,
    pub expires_s: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("{path}: another process has held the file of keys open for {}s", PATIENCE.as_secs())]
    Busy { path: PathBuf },
    #[error("{path}: {reason}")]
    File { path: PathBuf, reason: std::io::Error },
    #[error("{path} is not a usable file of keys: {reason}")]
    Broken { path: PathBuf, reason: String },
    #[error("there is no key '{0}'; `folio keys list` shows all")]
    Missing(String),
    #[error("{0}")]
    Invalid(String),
}

/// Makes a key. The key itself is returned once and kept nowhere.
pub fn create(path: &Path, new: NewKey, now_s: u64) -> Result<(KeyRecord, String), KeyFileError> {
    if !crate::tenancy::declared::good_name(&new.tenant) {
        return Err(KeyFileError::Invalid(
            "a tenant's name is 1 to 64 letters, digits, '-', '_' or '.'".into(),
        ));
    }
    if new.name.len() > NAME_BYTES_MAX || new.name.chars().any(char::is_control) {
        let message = format!("a key's name has at most {NAME_BYTES_MAX} bytes and no control characters");
        return Err(KeyFileError::Invalid(message));
    }
    if new.scopes.is_empty() {
        return Err(KeyFileError::Invalid("a key without a scope opens nothing".into()));
    }
    let id = hex::encode(random::<6>());
    let key = format!("{PREFIX}-{id}-{}", hex::encode(random::<24>()));
    let record = KeyRecord {
        id: id.clone(),
        tenant: new.tenant,
        name: new.name,
        digest: hex::encode(key_digest(&key)),
        scopes: new.scopes,
        created_s: now_s,
        expires_s: new.expires_s,
        revoked_s: None,
    };
    write(path, true, |keys| {
        keys.insert(id.clone(), record.clone())
            .map_or(Ok(()), |_| Err(KeyFileError::Invalid("try again".into())))
    })?;
    Ok((record, key))
}

/// Revokes a key for good; once more changes nothing.
pub fn revoke(path: &Path, id: &str, now_s: u64) -> Result<KeyRecord, KeyFileError> {
    // Whoever has the key at hand may give that: its id is a part of it.
    let id = id_of(id).unwrap_or(id);
    let mut revoked = None;
    write(path, false, |keys| {
        let record = keys.get_mut(id).ok_or_else(|| KeyFileError::Missing(id.to_owned()))?;
        record.revoked_s.get_or_insert(now_s);
        revoked = Some(record.clone());
        Ok(())
    })?;
    revoked.ok_or_else(|| KeyFileError::Missing(id.to_owned()))
}

/// All keys, oldest first.
pub fn list(path: &Path) -> Result<Vec<KeyRecord>, KeyFileError> {
    let mut keys: Vec<_> = patiently(path, || read(path))?.into_values().collect();
    keys.sort_by(|a, b| (a.created_s, &a.id).cmp(&(b.created_s, &b.id)));
    Ok(keys)
}

/// The id in a key of this format.
fn id_of(key: &str) -> Option<&str> {
    let (prefix, rest) = key.split_once('-')?;
    let (id, _) = rest.split_once('-')?;
    (prefix == PREFIX).then_some(id)
}

type Records = HashMap<String, KeyRecord>;

fn broken(path: &Path, reason: impl ToString) -> KeyFileError {
    KeyFileError::Broken { path: path.to_owned(), reason: reason.to_string() }
}

fn cannot_open(path: &Path, error: DatabaseError) -> KeyFileError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => KeyFileError::Busy { path: path.to_owned() },
        DatabaseError::Storage(redb::StorageError::Io(source)) => {
            KeyFileError::File { path: path.to_owned(), reason: source }
        }
        other => broken(path, other),
    }
}

/// While another process has the file.
fn patiently<T>(path: &Path, attempt: impl Fn() -> Result<T, KeyFileError>) -> Result<T, KeyFileError> {
    let begun = Instant::now();
    if !path.exists() {
        let source = std::io::Error::new(std::io::ErrorKind::NotFound, "there is no such file");
        return Err(KeyFileError::File { path: path.to_owned(), reason: source });
    }
    loop {
        match attempt() {
            Err(KeyFileError::Busy { .. }) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

fn read(path: &Path) -> Result<Records, KeyFileError> {
    let database = match ReadOnlyDatabase::open(path) {
        Err(DatabaseError::RepairAborted) => {
            // A writer died; opening it to write repairs it.
            drop(Database::open(path).map_err(|error| cannot_open(path, error))?);
            ReadOnlyDatabase::open(path)
        }
        result => result,
    };
    let database = database.map_err(|error| cannot_open(path, error))?;
    let transaction = database.begin_read().map_err(|error| broken(path, error))?;
    let table = transaction.open_table(KEYS).map_err(|error| broken(path, error))?;
    records(path, &table)
}

fn records(
    path: &Path,
    table: &impl ReadableTable<&'static str, &'static [u8]>,
) -> Result<Records, KeyFileError> {
    let mut records = Records::new();
    for entry in table.iter().map_err(|error| broken(path, error))? {
        let (id, record) = entry.map_err(|error| broken(path, error))?;
        let record = serde_json::from_slice(record.value()).map_err(|error| broken(path, error))?;
        records.insert(id.value().to_owned(), record);
    }
    Ok(records)
}

/// Changes the records in one transaction that is on disk when this returns; the file is closed again.
fn write(
    path: &Path,
    make: bool,
    change: impl FnOnce(&mut Records) -> Result<(), KeyFileError>,
) -> Result<(), KeyFileError> {
    if make && !path.exists() {
        private(path).map_err(|source| KeyFileError::File { path: path.to_owned(), reason: source })?;
    }
    let database = patiently(path, || match make {
        true => Database::create(path).map_err(|error| cannot_open(path, error)),
        false => Database::open(path).map_err(|error| cannot_open(path, error)),
    })?;
    let mut transaction = database.begin_write().map_err(|error| broken(path, error))?;
    transaction.set_quick_repair(true);
    {
        let mut table = transaction.open_table(KEYS).map_err(|error| broken(path, error))?;
        let before = records(path, &table)?;
        let mut after = before.clone();
        change(&mut after)?;
        for (id, record) in after.iter().filter(|(id, record)| before.get(*id) != Some(record)) {
            let json = serde_json::to_vec(record).map_err(|error| broken(path, error))?;
            table.insert(id.as_str(), json.as_slice()).map_err(|error| broken(path, error))?;
        }
    }
    transaction.commit().map_err(|error| broken(path, error))
}

/// An empty file that nobody else may read.
fn private(path: &Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}

pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the operating system has randomness");
    bytes
}

/// What is kept of a key. Keys of `folio keys` have 192 random bits, so nothing is gained by guessing from digests.
pub(crate) fn key_digest(key: &str) -> [u8; 32] {
    sha256(&[b"folio api key", key.as_bytes()])
}

/// Digest over length-prefixed parts.
pub(crate) fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// What a file looked like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    bytes: u64,
    #[cfg(unix)]
    inode: u64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let data = std::fs::metadata(path).ok()?;
        Some(Self {
            modified: data.modified().ok()?,
            bytes: data.len(),
            #[cfg(unix)]
            inode: std::os::unix::fs::MetadataExt::ino(&data),
        })
    }

    /// Whether a change of the file after this look would be seen.
    fn settled(&self) -> bool {
        SystemTime::now().duration_since(self.modified).is_ok_and(|age| age > RACY)
    }
}

/// A server's view of the file.
#[derive(Clone, Debug)]
pub(crate) struct KeyFile {
    path: PathBuf,
    seen: Option<Stamp>,
    keys: Arc<KeyRecords>,
}

/// Digests and records by key id.
type KeyRecords = HashMap<String, ([u8; 32], KeyRecord)>;

impl KeyFile {
    pub fn open(path: &Path) -> Result<Self, KeyFileError> {
        let seen = Stamp::of(path);
        let keys = Arc::new(patiently(path, || read_keys(path))?);
        Ok(Self { path: path.to_owned(), seen: seen.filter(Stamp::settled), keys })
    }

    pub fn changed(&self) -> bool {
        self.seen.is_none() || Stamp::of(&self.path) != self.seen
    }

    /// Reads again. What was read stays while a writer has the file; of a file that cannot be used nothing stays.
    pub fn refreshed(&self) -> Self {
        let seen = Stamp::of(&self.path);
        let (seen, keys) = match read_keys(&self.path) {
            Ok(keys) => (seen.filter(Stamp::settled), Arc::new(keys)),
            Err(KeyFileError::Busy { .. }) => (None, self.keys.clone()),
            Err(error) => {
                tracing::error!(%error, "no key of this file is accepted");
                // Not read again before it changes.
                (seen, Arc::default())
            }
        };
        Self { path: self.path.clone(), seen, keys }
    }

    /// The digest and record that a key must have to be one of this file's.
    pub fn find(&self, key: &str) -> Option<&([u8; 32], KeyRecord)> {
        self.keys.get(id_of(key)?)
    }

    /// Of a key, by its id.
    pub fn record(&self, id: &str) -> Option<&KeyRecord> {
        self.keys.get(id).map(|(_, record)| record)
    }

    /// In no order.
    pub fn records(&self) -> impl Iterator<Item = &KeyRecord> {
        self.keys.values().map(|(_, record)| record)
    }
}

fn read_keys(path: &Path) -> Result<KeyRecords, KeyFileError> {
    let digest = |(id, record): (String, KeyRecord)| {
        let mut digest = [0; 32];
        hex::decode_to_slice(&record.digest, &mut digest)
            .map_err(|_| broken(path, format!("the digest of key {id}")))?;
        Ok((id, (digest, record)))
    };
    read(path)?.into_iter().map(digest).collect()
}

/// One key for each of many tenants, in one go.
#[cfg(test)]
pub(crate) fn create_many(path: &Path, count: usize, tenant: impl Fn(usize) -> String) -> Vec<String> {
    let mut made = Vec::new();
    write(path, true, |keys| {
        for at in 0..count {
            let id = hex::encode(random::<6>());
            let key = format!("{PREFIX}-{id}-{at}");
            keys.insert(
                id.clone(),
                KeyRecord {
                    id,
                    tenant: tenant(at),
                    name: String::new(),
                    digest: hex::encode(key_digest(&key)),
                    scopes: Scope::DEFAULT.into(),
                    created_s: 1,
                    expires_s: None,
                    revoked_s: None,
                },
            );
            made.push(key);
        }
        Ok(())
    })
    .unwrap();
    made
}

#[cfg(test)]
pub(crate) fn revoke_all_but(path: &Path, id: &str) {
    write(path, false, |keys| {
        keys.values_mut().filter(|record| record.id != id).for_each(|record| record.revoked_s = Some(1));
        Ok(())
    })
    .unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(tenant: &str) -> NewKey {
        NewKey { tenant: tenant.into(), name: "ci".into(), scopes: Scope::DEFAULT.into(), expires_s: None }
    }

    #[test]
    fn keys_are_made_listed_and_revoked_and_the_file_has_no_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.redb");
        assert!(matches!(list(&path), Err(KeyFileError::File { .. })), "listing makes no file");
        let (first, key) = create(&path, new("acme"), 100).unwrap();
        let (second, other) = create(&path, new("search"), 200).unwrap();
        assert!(key != other && key.len() > 50 && key.starts_with(&format!("fk-{}-", first.id)));
        assert_eq!(list(&path).unwrap(), [first.clone(), second.clone()]);
        let bytes = std::fs::read(&path).unwrap();
        let secret = key.rsplit('-').next().unwrap().as_bytes();
        assert!(!bytes.windows(secret.len()).any(|window| window == secret), "only its digest is kept");

        let revoked = revoke(&path, &first.id, 300).unwrap();
        assert_eq!((revoked.revoked_s, revoked.state(301)), (Some(300), "revoked"));
        assert_eq!(revoke(&path, &key, 400).unwrap().revoked_s, Some(300), "the first time counts");
        assert!(matches!(revoke(&path, "nobody", 400), Err(KeyFileError::Missing(_))));
        assert_eq!(list(&path).unwrap()[1], second);
    }

    #[test]
    #[cfg(unix)]
    fn nobody_else_may_read_the_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.redb");
        create(&path, new("acme"), 1).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn an_open_view_sees_every_change_and_nothing_in_a_broken_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.redb");
        let (first, key) = create(&path, new("acme"), 1).unwrap();
        let mut view = KeyFile::open(&path).unwrap();
        let look = |view: &mut KeyFile, key: &str| {
            if view.changed() {
                *view = view.refreshed();
            }
            view.find(key).map(|(_, record)| record.state(10))
        };
        assert_eq!(look(&mut view, &key), Some("valid"));
        // Back to back, far faster than file times tick.
        for _ in 0..20 {
            let (record, key) = create(&path, new("acme"), 1).unwrap();
            assert_eq!(look(&mut view, &key), Some("valid"));
            revoke(&path, &record.id, 2).unwrap();
            assert_eq!(look(&mut view, &key), Some("revoked"));
        }
        revoke(&path, &first.id, 2).unwrap();
        assert_eq!(look(&mut view, &key), Some("revoked"));
        std::fs::write(&path, b"not a database").unwrap();
        assert_eq!(look(&mut view, &key), None);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(look(&mut view, &key), None);
    }

    #[test]
    fn what_cannot_be_a_key_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.redb");
        for wrong in [
            new("a b"),
            new(""),
            NewKey { scopes: Vec::new(), ..new("a") },
            NewKey { name: "x".repeat(65), ..new("a") },
            NewKey { name: "a\nb".into(), ..new("a") },
        ] {
            assert!(matches!(create(&path, wrong.clone(), 1), Err(KeyFileError::Invalid(_))), "{wrong:?}");
        }
        assert!(!path.exists());
    }

    #[test]
    fn paths_have_scopes() {
        for (path, scope) in [
            ("/v1/chat/completions", Scope::Generate),
            ("/v1/cache/prefixes/7", Scope::Cache),
            ("/v1/cachet", Scope::Generate),
            ("/v1/files", Scope::Batch),
            ("/v1/batches/b/cancel", Scope::Batch),
            ("/v1/usage/records", Scope::Usage),
            ("/v1/why", Scope::Usage),
            ("/v1/trace", Scope::Usage),
        ] {
            assert_eq!(Scope::of(path), scope, "{path}");
        }
        let scopes = Scopes::new(&Scope::DEFAULT);
        assert!(Scope::DEFAULT.iter().all(|scope| scopes.has(*scope)) && !scopes.has(Scope::Admin));
    }
}
