//! Who is asking. A tenant is whoever authenticated with one of its keys; everything the cache may share hangs on that.
//!
//! Invariants: tenancy comes from the key in the `Authorization` or `x-api-key` header and from nothing else in a request.
//! Keys are not kept, only their digests; comparing digests takes the same time wherever they differ, and every key of flags
//! and tenants file is compared every time (one of the file of keys is found by its id, which is no secret). A
//! tenant's cache secret depends on the server's secret and the key (of a named tenant or group: its name), so it is
//! neither guessable nor the client's to choose. Tenants share a cache only where the operator put them into one group.
//!
//! A tenant that only the file of keys names comes to be when it is first seen, and is told apart by its name from then on, until
//! its last key is revoked or expired and its last request over: then it leaves ([`Tenants::leave`]), with everything that is counted by its
//! id. So there are never more than there are valid keys, and tenants at work.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::{HeaderMap, header};
use folio_kv::TenantId;
use parking_lot::Mutex;
use subtle::ConstantTimeEq;

use crate::adapters::AllowedAdapters;
use crate::error::ServerError;
use crate::tenancy::declared::Declared;
use crate::tenancy::gate::TenantLimits;
use crate::tenancy::keyring::Keyring;
use crate::tenancy::keys::{KeyFile, Scope, Scopes, key_digest, sha256};
use crate::tenancy::tenant::{Tenant, owner_digest};
use folio_api::ApiError;
use folio_api::unix_s;

/// Ids of tenants that only the file of keys names begin here.
const FIRST_NAMED: u32 = 1 << 26;
/// How the owner of a key begins that is all there is of its tenant.
const ALONE: &str = "key ";
/// Whoever has an admin key: no tenant of anything.
const OPERATOR: TenantId = TenantId(u32::MAX);

/// The key ring.
pub struct Tenants {
    keyring: Keyring,
    /// Several keys may be one tenant's.
    keys: Vec<([u8; 32], Tenant)>,
    file: Option<File>,
    default_limits: TenantLimits,
    /// Of every tenant that has no list of its own.
    default_adapters: AllowedAdapters,
    /// Somebody may not use every adapter.
    restricts_adapters: bool,
    /// All that were given, and those with valid keys of the file.
    named: Mutex<TenantNames>,
    groups: Vec<(TenantId, String)>,
    /// Declared prefixes: tenants to the cache, whom nobody authenticates as.
    prefixes: Vec<(Tenant, String)>,
    /// The only tenant when no keys are configured.
    open: Tenant,
    /// Digests of keys that open the admin listener and nothing else, and who has them.
    admin: Vec<[u8; 32]>,
    operator: Tenant,
}

/// The file of keys. Whoever asks with one of them first has a look at it that began after the request came ([`Tenants::look`]), off the
/// event loop, which takes what was read and waits for nothing.
struct File {
    read: Mutex<Arc<KeysRead>>,
    /// One look at a time.
    reading: Mutex<()>,
    /// Its holder looks for all who wait.
    turn: tokio::sync::Mutex<()>,
    /// Numbers of the last look that began, and of the last that ended.
    begun: AtomicU64,
    ended: AtomicU64,
}

/// What was read of the file.
struct KeysRead {
    keys: KeyFile,
    /// Of the valid ones, by key id.
    holders: HashMap<String, Tenant>,
}

#[derive(Default)]
struct TenantNames {
    /// By id, which is the order of keys, tenants file and first sight. No id is used again.
    tenants: BTreeMap<TenantId, Tenant>,
    by_name: HashMap<Arc<str>, TenantId>,
    /// Tenants that only the file of keys named.
    came: u32,
}

impl TenantNames {
    fn add(&mut self, tenant: Tenant) {
        self.by_name.entry(tenant.name.clone()).or_insert(tenant.id);
        self.tenants.insert(tenant.id, tenant);
    }
}

impl Tenants {
    /// `file`: of keys ([`crate::tenancy::keys`]).
    pub fn new(
        api_keys: &[String],
        declared: &Declared,
        file: Option<&Path>,
        keyring: Keyring,
    ) -> Result<Self, ServerError> {
        let mut keys: Vec<([u8; 32], Tenant)> = Vec::new();
        let mut named = TenantNames::default();
        for key in api_keys {
            let digest = new_key(&keys, key).map_err(|reason| ServerError::Config(reason.into()))?;
            // Tenant 0 is the open tenant.
            let id = TenantId(keys.len() as u32 + 1);
            let secret = keyring.secret(&digest);
            let mut holder = Tenant::new(id, &format!("key:{}", id.0), secret, declared.default_limits);
            holder.adapters = declared.default_adapters.clone();
            holder.owner =
                format!("{ALONE}{}", hex::encode(&sha256(&[b"folio owner", &digest])[..16])).into();
            named.add(holder.clone());
            keys.push((digest, holder));
        }
        let groups = declared.groups.iter().map(|group| (group.id, group.name.clone())).collect();
        for declared_tenant in &declared.tenants {
            let group = declared_tenant.group.map(|group| &declared.groups[group]);
            let secret = match group {
                Some(group) => keyring.secret(&sha256(&[b"folio sharing group", group.name.as_bytes()])),
                None => keyring.secret(&owner_digest(&declared_tenant.name)),
            };
            let limits = declared_tenant.limits.unwrap_or(declared.default_limits);
            let mut holder = Tenant::new(declared_tenant.id, &declared_tenant.name, secret, limits);
            holder.cache = group.map_or(holder.id, |group| group.id);
            (holder.class, holder.priority) = (declared_tenant.class, declared_tenant.priority);
            holder.adapters =
                declared_tenant.adapters.clone().unwrap_or_else(|| declared.default_adapters.clone());
            if declared_tenant.keys.is_empty() && file.is_none() {
                return Err(ServerError::Config(format!(
                    "the tenants file: tenant {:?}: keys: is empty, and there is no file of keys, so nobody can be this tenant",
                    declared_tenant.name
                )));
            }
            for (at, key) in declared_tenant.keys.iter().enumerate() {
                let digest = new_key(&keys, key).map_err(|reason| {
                    ServerError::Config(format!(
                        "the tenants file: tenant {:?}: keys: {reason}",
                        declared_tenant.name
                    ))
                })?;
                let key = format!("{}:{}", declared_tenant.name, at + 1).into();
                keys.push((digest, Tenant { key, ..holder.clone() }));
            }
            named.add(holder);
        }
        let secret = keyring.secret(&[0; 32]);
        let open = Tenant {
            adapters: declared.default_adapters.clone(),
            ..Tenant::new(TenantId(0), "anonymous", secret, declared.default_limits)
        };
        if keys.is_empty() && file.is_none() {
            named.add(open.clone());
        }
        let operator = Tenant {
            scopes: Scopes::new(&[Scope::Admin]),
            ..Tenant::new(OPERATOR, "admin", [0; 32], TenantLimits::default())
        };
        let prefixes = declared.prefixes.iter().map(|prefix| {
            let whose = sha256(&[b"folio declared prefix", prefix.name.as_bytes()]);
            let secret = keyring.secret(&whose);
            (Tenant::new(prefix.id, &prefix.name, secret, TenantLimits::default()), prefix.name.clone())
        });
        let prefixes = prefixes.collect();
        let tenants = Self {
            keyring,
            keys,
            file: None,
            default_limits: declared.default_limits,
            default_adapters: declared.default_adapters.clone(),
            restricts_adapters: declared.restricts_adapters(),
            named: Mutex::new(named),
            groups,
            prefixes,
            open,
            admin: Vec::new(),
            operator,
        };
        let Some(path) = file else { return Ok(tenants) };
        let keys = KeyFile::open(path).map_err(|error| {
            ServerError::Config(format!(
                "{error} (the first key makes it: folio keys create --keys FILE --tenant NAME)"
            ))
        })?;
        let read = Mutex::new(Arc::new(tenants.held(keys)));
        let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
        let file = File { read, reading: Mutex::default(), turn: Default::default(), begun, ended };
        Ok(Self { file: Some(file), ..tenants })
    }

    /// Lets whoever has this key use the admin listener.
    pub fn add_admin(&mut self, key: &str) -> Result<(), ServerError> {
        let digest = new_key(&self.keys, key)
            .map_err(|reason| ServerError::Config(format!("the admin key: {reason}")))?;
        self.admin.push(digest);
        Ok(())
    }

    /// Whether there are adapters that somebody may not know of.
    pub fn restricts_adapters(&self) -> bool {
        self.restricts_adapters
    }

    /// Whether anybody may ask.
    pub fn is_open(&self) -> bool {
        self.keys.is_empty() && self.file.is_none()
    }

    /// Who holds the keys of the file.
    fn held(&self, keys: KeyFile) -> KeysRead {
        let now_s = unix_s();
        let records = keys.records().filter(|record| record.state(now_s) == "valid");
        let holders = records
            .map(|record| {
                let tenant = self.named(&record.tenant);
                let scopes = Scopes::new(&record.scopes);
                (record.id.clone(), Tenant { key: record.id.as_str().into(), scopes, ..tenant })
            })
            .collect();
        KeysRead { keys, holders }
    }

    /// Reads the file again if it changed, or if `again`. Blocks.
    fn look_now(&self, file: &File, again: bool) {
        let _reading = file.reading.lock();
        let before = file.read.lock().clone();
        let keys = match before.keys.changed() {
            true => before.keys.refreshed(),
            false if again => before.keys.clone(),
            false => return,
        };
        let read = Arc::new(self.held(keys));
        *file.read.lock() = read;
    }

    /// Comes back when what is known of the file is not older than this call. Whoever comes while somebody looks has the next look,
    /// together with all others who do.
    async fn look(self: &Arc<Self>) -> Option<Arc<KeysRead>> {
        let file = self.file.as_ref()?;
        let wanted = file.begun.load(Ordering::Acquire) + 1;
        let _turn = file.turn.lock().await;
        if file.ended.load(Ordering::Acquire) < wanted {
            let number = file.begun.fetch_add(1, Ordering::AcqRel) + 1;
            let tenants = self.clone();
            let looked = tokio::task::spawn_blocking(move || {
                if let Some(file) = &tenants.file {
                    tenants.look_now(file, false);
                }
            });
            // It fails where the process ends: then nobody is let in.
            looked.await.ok()?;
            file.ended.store(number, Ordering::Release);
        }
        Some(file.read.lock().clone())
    }

    /// Tenants that are at rest and have no valid key any more leave; who they were. Blocks. O(keys of the file and tenants).
    pub fn leave(&self) -> HashSet<TenantId> {
        let Some(file) = &self.file else { return HashSet::new() };
        self.look_now(file, true);
        let stays: HashSet<TenantId> = file.read.lock().holders.values().map(|holder| holder.id).collect();
        let mut named = self.named.lock();
        let TenantNames { tenants, by_name, .. } = &mut *named;
        let file_only = tenants.range(TenantId(FIRST_NAMED)..);
        // Whoever is at work has a hand on the gate.
        let idle =
            file_only.filter(|(id, tenant)| !stays.contains(id) && Arc::strong_count(&tenant.gate) == 1);
        let left: HashSet<TenantId> = idle.map(|(id, _)| *id).collect();
        tenants.retain(|id, _| !left.contains(id));
        by_name.retain(|_, id| !left.contains(id));
        by_name.shrink_to_fit();
        left
    }

    /// The tenant of this name, from now on there if it was not.
    fn named(&self, name: &str) -> Tenant {
        let mut named = self.named.lock();
        if let Some(tenant) = named.by_name.get(name).and_then(|id| named.tenants.get(id)) {
            return tenant.clone();
        }
        let id = TenantId(FIRST_NAMED + named.came);
        named.came += 1;
        let secret = self.keyring.secret(&owner_digest(name));
        let tenant = Tenant {
            adapters: self.default_adapters.clone(),
            ..Tenant::new(id, name, secret, self.default_limits)
        };
        named.add(tenant.clone());
        tenant
    }

    /// The tenant with this [`Tenant::owner`], if it still is one.
    pub fn of_owner(&self, owner: &str) -> Option<Tenant> {
        let named = self.named.lock();
        named.tenants.values().find(|tenant| &*tenant.owner == owner).cloned()
    }

    /// The holder of a key with the rights it has now, by its [`Tenant::owner`] and what an operator calls the key. `None`: the key is not
    /// valid any more.
    pub async fn of_key(self: &Arc<Self>, owner: &str, key: &str) -> Option<Tenant> {
        if self.is_open() {
            return Some(self.open.clone()).filter(|open| &*open.owner == owner);
        }
        // A key that is all there is of its tenant is called by its place, which may change.
        let alone = |holder: &Tenant| holder.owner.starts_with(ALONE);
        let mut given = self.keys.iter().map(|(_, holder)| holder).filter(|holder| &*holder.owner == owner);
        if let Some(holder) = given.find(|holder| alone(holder) || &*holder.key == key) {
            return Some(holder.clone());
        }
        let read = self.look().await?;
        // What expired since the file was read is found out from its record.
        let valid = read.keys.record(key).is_some_and(|record| record.state(unix_s()) == "valid");
        read.holders.get(key).filter(|holder| valid && &*holder.owner == owner).cloned()
    }

    /// Every tenant that can authenticate or is at work, by the name an operator knows.
    pub fn names(&self) -> Vec<(TenantId, String)> {
        self.named.lock().tenants.values().map(|tenant| (tenant.id, tenant.name.to_string())).collect()
    }

    /// Whether a cache is anybody's: a tenant's that has not left, a group's or a prefix's.
    pub fn is_known(&self, id: TenantId) -> bool {
        id.0 < FIRST_NAMED || self.named.lock().tenants.contains_key(&id)
    }

    /// Every cache there is: what its owner is, its name, and its id.
    pub fn caches(&self) -> Vec<(&'static str, String, TenantId)> {
        let prefixes = self.prefixes.iter().map(|(tenant, name)| ("prefix", name.clone(), tenant.id));
        let groups = self.groups.iter().map(|(id, name)| ("group", name.clone(), *id));
        let named = self.named.lock();
        let alone = named.tenants.values().filter(|tenant| tenant.cache == tenant.id);
        prefixes
            .chain(groups)
            .chain(alone.map(|tenant| ("tenant", tenant.name.to_string(), tenant.id)))
            .collect()
    }

    /// The secret of each cache.
    pub(crate) fn cache_secrets(&self) -> BTreeMap<TenantId, [u8; 32]> {
        let named = self.named.lock();
        let prefixes = self.prefixes.iter().map(|(tenant, _)| tenant);
        let tenants = prefixes.chain(named.tenants.values());
        tenants.map(|tenant| (tenant.cache, tenant.secret)).collect()
    }

    /// What owns a cache, and its name; `None` of a tenant that left.
    pub fn cache_name(&self, id: TenantId) -> Option<(&'static str, Arc<str>)> {
        if let Some((_, name)) = self.prefixes.iter().find(|(tenant, _)| tenant.id == id) {
            return Some(("prefix", name.as_str().into()));
        }
        if let Some((_, name)) = self.groups.iter().find(|(group, _)| *group == id) {
            return Some(("group", name.as_str().into()));
        }
        self.named.lock().tenants.get(&id).map(|tenant| ("tenant", tenant.name.clone()))
    }

    /// Whether there may be tenants later that are not known now.
    pub fn may_come(&self) -> bool {
        self.file.is_some()
    }

    /// Declared prefixes, in the order of the file.
    pub fn prefixes(&self) -> impl Iterator<Item = &Tenant> {
        self.prefixes.iter().map(|(tenant, _)| tenant)
    }

    /// The tenant of a request, from its `Authorization: Bearer` header or, Anthropic's way, its `x-api-key` header.
    pub async fn authenticate(self: &Arc<Self>, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if self.is_open() {
            return Ok(self.open.clone());
        }
        let key = key_of(headers)?;
        let digest = key_digest(key);
        let mut found = None;
        for (known, tenant) in &self.keys {
            if bool::from(known.ct_eq(&digest)) {
                found = Some(tenant);
            }
        }
        match found {
            Some(tenant) => Ok(tenant.clone()),
            None => self.of_the_file(key, &digest).await,
        }
    }

    /// Who asks on the admin listener: an admin key's holder, or that of a key of the file with this scope. Anybody where
    /// there is neither a file nor an admin key.
    pub async fn authenticate_operator(self: &Arc<Self>, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if self.admin.is_empty() && self.file.is_none() {
            return Ok(self.operator.clone());
        }
        let key = key_of(headers)?;
        let digest = key_digest(key);
        if self.admin.iter().fold(false, |found, known| found | bool::from(known.ct_eq(&digest))) {
            return Ok(self.operator.clone());
        }
        let tenant = self.of_the_file(key, &digest).await?;
        tenant.check_scope(Scope::Admin)?;
        Ok(tenant)
    }

    /// Whether the request was sent with an operator's key, or there is nobody to be told apart from.
    pub async fn is_operator(self: &Arc<Self>, headers: &HeaderMap) -> bool {
        let keys = !self.admin.is_empty() || self.file.is_some();
        self.is_open() || (keys && self.authenticate_operator(headers).await.is_ok())
    }

    /// The same where nothing is asynchronous.
    #[cfg(test)]
    pub fn authenticate_now(self: &Arc<Self>, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.authenticate(headers))
    }

    async fn of_the_file(self: &Arc<Self>, key: &str, digest: &[u8; 32]) -> Result<Tenant, ApiError> {
        let incorrect = || ApiError::unauthorized("Incorrect API key provided.");
        let read = self.look().await.ok_or_else(incorrect)?;
        let (known, record) = read.keys.find(key).ok_or_else(incorrect)?;
        if !bool::from(known.ct_eq(digest)) {
            return Err(incorrect());
        }
        match record.state(unix_s()) {
            "valid" => read.holders.get(&record.id).cloned().ok_or_else(incorrect),
            over => Err(ApiError::unauthorized(format!("This API key is {over}."))),
        }
    }
}

/// The key that a request was sent with.
fn key_of(headers: &HeaderMap) -> Result<&str, ApiError> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, key)| key.trim());
    let plain = headers.get("x-api-key").and_then(|value| value.to_str().ok()).map(str::trim);
    if bearer.is_some() && plain.is_some() && bearer != plain {
        return Err(ApiError::unauthorized(
            "The Authorization and x-api-key headers name two different keys; send one of them.",
        ));
    }
    bearer.or(plain).ok_or_else(|| {
        ApiError::unauthorized(
            "You didn't provide an API key. Send it in an Authorization header ('Authorization: Bearer YOUR_KEY') or \
             an x-api-key header.",
        )
    })
}

/// Digest of a key that nobody has yet.
fn new_key(keys: &[([u8; 32], Tenant)], key: &str) -> Result<[u8; 32], &'static str> {
    if key.trim().is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("an API key must be one or more visible ASCII characters without spaces");
    }
    let digest = key_digest(key);
    match keys.iter().any(|(known, _)| *known == digest) {
        true => Err("the same API key is given twice"),
        false => Ok(digest),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tenancy::keys;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn each_key_is_its_own_tenant() {
        let keys = ["alpha".to_owned(), "beta".to_owned()];
        let tenants =
            Arc::new(Tenants::new(&keys, &Declared::default(), None, Keyring::of_server([7; 32])).unwrap());
        let alpha = tenants.authenticate_now(&headers("Bearer alpha")).unwrap();
        let beta = tenants.authenticate_now(&headers("bearer  beta")).unwrap();
        assert_ne!(alpha.id, beta.id);
        assert_ne!(alpha.secret, beta.secret);
        let printed = format!("{alpha:?}");
        let secret = format!("{:?}", &alpha.secret[..4]);
        assert!(!printed.contains(secret.trim_matches(['[', ']'])), "{printed}");
        for wrong in ["Bearer alph", "Bearer alphaa", "Basic alpha", "alpha", "Bearer "] {
            let error = tenants.authenticate_now(&headers(wrong)).unwrap_err();
            assert_eq!((error.status, error.code), (401, Some("invalid_api_key")), "{wrong}");
        }
        assert!(tenants.authenticate_now(&HeaderMap::new()).is_err());

        let mut plain = HeaderMap::from_iter([("x-api-key".parse().unwrap(), "alpha".parse().unwrap())]);
        assert_eq!(tenants.authenticate_now(&plain).unwrap().id, alpha.id);
        plain.insert(header::AUTHORIZATION, "Bearer alpha".parse().unwrap());
        assert_eq!(tenants.authenticate_now(&plain).unwrap().id, alpha.id);
        plain.insert(header::AUTHORIZATION, "Bearer beta".parse().unwrap());
        assert!(tenants.authenticate_now(&plain).is_err(), "two keys are two tenants");
    }

    #[test]
    fn secrets_survive_a_restart_only_with_a_configured_server_secret() {
        let keys = ["alpha".to_owned()];
        let secret = |server| {
            let tenants = Arc::new(Tenants::new(&keys, &Declared::default(), None, server).ok().unwrap());
            tenants.authenticate_now(&headers("Bearer alpha")).unwrap().secret
        };
        assert_eq!(secret(Keyring::of_server([1; 32])), secret(Keyring::of_server([1; 32])));
        assert_ne!(secret(Keyring::of_server([1; 32])), secret(Keyring::of_server([2; 32])));
        assert_ne!(secret(Keyring::default()), secret(Keyring::default()));
        // What a cache on disk was written with: another derivation would find nothing of it.
        assert_eq!(
            hex::encode(secret(Keyring::of_server([1; 32]))),
            "a94ce71f36875ea3b5f216c404d418b6ca360936b1510354914db1e4b5799595"
        );
    }

    #[test]
    fn keys_that_cannot_work_are_refused_at_start() {
        let refused =
            |keys: &[String]| Tenants::new(keys, &Declared::default(), None, Keyring::default()).is_err();
        assert!(refused(&["".into()]));
        assert!(refused(&["a b".into()]));
        assert!(refused(&["a".into(), "a".into()]));
    }

    #[test]
    fn declared_tenants_have_their_keys_and_groups_one_cache() {
        let file = r#"{"tenants": [{"name": "acme", "keys": ["k1", "k2"]}, {"name": "a", "keys": ["k3"], "group": "lab"},
            {"name": "b", "keys": ["k4"], "group": "lab"}], "groups": [{"name": "lab"}]}"#;
        let declared = Declared::parse(file, &|_| None).unwrap();
        let tenants =
            Arc::new(Tenants::new(&["plain".into()], &declared, None, Keyring::of_server([1; 32])).unwrap());
        let of = |key: &str| tenants.authenticate_now(&headers(&format!("Bearer {key}"))).unwrap();
        assert_eq!(of("k1").id, of("k2").id, "two keys, one tenant");
        assert_ne!(of("k1").key, of("k2").key);
        assert_ne!(of("k3").id, of("k4").id);
        assert_eq!(of("k3").secret, of("k4").secret, "one cache");
        assert_eq!(of("k3").cache, of("k4").cache);
        for (one, other) in [("k1", "k3"), ("k1", "plain"), ("plain", "k4")] {
            assert_ne!(of(one).secret, of(other).secret, "{one} and {other}");
            assert_ne!(of(one).cache, of(other).cache);
        }
        let other = Arc::new(Tenants::new(&[], &declared, None, Keyring::of_server([2; 32])).unwrap());
        assert_ne!(other.authenticate_now(&headers("Bearer k3")).unwrap().secret, of("k3").secret);
        let twice =
            Tenants::new(&["k4".into()], &declared, None, Keyring::default()).err().unwrap().to_string();
        assert!(twice.contains("\"b\"") && twice.contains("twice"), "{twice}");
    }

    #[test]
    fn tenants_of_a_hundred_thousand_one_off_keys_leave_when_they_are_at_rest() {
        const MANY: usize = 100_000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.redb");
        let made = keys::create_many(&path, MANY, |at| format!("t{at}"));
        // Reading it is slow here: a file that has not changed for a while is read once.
        std::thread::sleep(keys::RACY + Duration::from_millis(100));
        let tenants = Tenants::new(&["plain".into()], &Declared::default(), Some(&path), Keyring::default());
        let tenants = Arc::new(tenants.unwrap());
        let of = |key: &str| tenants.authenticate_now(&headers(&format!("Bearer {key}")));
        assert_eq!(tenants.names().len(), MANY + 1);
        let working = of(&made[7]).unwrap();
        let id = working.id;
        assert!(tenants.leave().is_empty(), "every key is valid");
        let id_of_key = made[99].split('-').nth(1).unwrap();
        keys::revoke_all_but(&path, id_of_key);
        let left = tenants.leave();
        assert_eq!((left.len(), left.contains(&id)), (MANY - 2, false));
        assert!(left.iter().all(|left| !tenants.is_known(*left)) && tenants.is_known(id));
        let mut names: Vec<String> = tenants.names().into_iter().map(|(_, name)| name).collect();
        names.sort();
        assert_eq!(names, ["key:1", "t7", "t99"], "given by a flag, at work, valid");
        drop(working);
        assert_eq!(tenants.leave(), [id].into());
        assert!(of(&made[7]).unwrap_err().message.contains("revoked"), "they are still told why");
    }

    #[test]
    fn keys_of_the_file_open_what_they_say_until_they_are_revoked_or_expire() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.redb");
        let make = |tenant: &str, scopes: &[Scope], expires_s| {
            let new =
                keys::NewKey { tenant: tenant.into(), name: String::new(), scopes: scopes.into(), expires_s };
            keys::create(&path, new, 1).unwrap()
        };
        let (first, acme) = make("acme", &Scope::DEFAULT, None);
        let (_, late) = make("acme", &Scope::DEFAULT, Some(5));
        let declared = Declared::parse(
            r#"{"tenants": [{"name": "acme", "limits": {"requests_per_minute": 7}}]}"#,
            &|_| None,
        );
        let tenants =
            Tenants::new(&["plain".into()], &declared.unwrap(), Some(&path), Keyring::of_server([1; 32]));
        let tenants = Arc::new(tenants.unwrap());
        let of = |key: &str| tenants.authenticate_now(&headers(&format!("Bearer {key}")));
        let tenant = of(&acme).unwrap();
        assert_eq!((&*tenant.name, &*tenant.key), ("acme", first.id.as_str()));
        assert_eq!(tenant.gate.limits().requests_per_minute, Some(7), "it is the declared tenant");
        assert!(of(&late).unwrap_err().message.contains("expired"));
        assert!(of("plain").is_ok());

        // Made while the server runs, for a tenant nobody declared.
        let (_, usage) = make("search", &[Scope::Usage], None);
        let search = of(&usage).unwrap();
        assert!(search.scopes.has(Scope::Usage) && !search.scopes.has(Scope::Generate));
        assert_ne!((search.id, search.secret), (tenant.id, tenant.secret));
        let (_, again) = make("search", &[Scope::Generate], None);
        assert_eq!((of(&again).unwrap().id, of(&again).unwrap().secret), (search.id, search.secret));

        keys::revoke(&path, &first.id, 2).unwrap();
        assert!(of(&acme).unwrap_err().message.contains("revoked"), "at once");
        for wrong in [
            acme.replace('a', "b"),
            format!("{usage}0"),
            usage[..usage.len() - 1].to_owned(),
            "fk-x-y".into(),
        ] {
            assert_eq!(of(&wrong).unwrap_err().code, Some("invalid_api_key"), "{wrong}");
        }
        let missing =
            Tenants::new(&[], &Declared::default(), Some(&folder.path().join("none")), Keyring::default());
        assert!(missing.err().unwrap().to_string().contains("folio keys create"));
    }

    #[tokio::test]
    #[allow(clippy::await_holding_lock)] // Only a thread beside this one waits for it.
    async fn a_file_that_takes_long_keeps_only_those_waiting_who_need_it_and_is_read_once_for_all() {
        const MANY: usize = 50;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.redb");
        let key = keys::create_many(&path, 1, |_| "t".into()).remove(0);
        let tenants =
            Tenants::new(&["plain".into()], &Declared::default(), Some(&path), Keyring::default()).unwrap();
        let tenants = Arc::new(tenants);
        let file = tenants.file.as_ref().unwrap();
        // As a disk does that has stopped.
        let reading = file.reading.lock();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..MANY {
            let (tenants, headers) = (tenants.clone(), headers(&format!("Bearer {key}")));
            waiting.spawn(async move { tenants.authenticate(&headers).await });
        }
        while file.begun.load(Ordering::Acquire) == 0 {
            tokio::task::yield_now().await;
        }
        assert!(tenants.authenticate(&headers("Bearer plain")).await.is_ok(), "others are let in");
        assert!(waiting.try_join_next().is_none());
        drop(reading);
        while let Some(tenant) = waiting.join_next().await {
            assert_eq!(&*tenant.unwrap().unwrap().name, "t");
        }
        let looks = file.begun.load(Ordering::Acquire);
        assert!(looks <= 2, "{looks} looks for {MANY} requests");
        keys::revoke_all_but(&path, "none");
        let refused = tenants.authenticate(&headers(&format!("Bearer {key}"))).await.unwrap_err();
        assert!(refused.message.contains("revoked"), "a look is not older than who wants it");
    }

    #[test]
    fn a_declared_tenant_needs_a_way_to_have_a_key() {
        let declared = Declared::parse(r#"{"tenants": [{"name": "acme"}]}"#, &|_| None).unwrap();
        let error = Tenants::new(&[], &declared, None, Keyring::default()).err().unwrap().to_string();
        assert!(error.contains("\"acme\"") && error.contains("keys"), "{error}");
    }
}
