//! Who is asking. A tenant is whoever authenticated with one key; everything the cache may share hangs on that.
//!
//! Invariants: tenancy comes from the key in the `Authorization` or `x-api-key` header and from nothing else in a request. Keys are not kept, only
//! their digests; comparing digests takes the same time wherever they differ, and every key is compared every time. A
//! tenant's cache secret depends on the server's secret and the key (of a declared tenant or group: its name), so it is
//! neither guessable nor the client's to choose. Tenants share a cache only where the operator put them into one group.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, header};
use folio_kv::TenantId;
use sha2::{Digest, Sha256};

use crate::declared::Declared;
use crate::error::{ApiError, ServerError};

/// One key's holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    pub id: TenantId,
    /// Keys the tenant's block hashes.
    pub secret: [u8; 32],
}

/// The key ring.
pub struct Tenants {
    /// Several keys may be one tenant's.
    keys: Vec<([u8; 32], Tenant)>,
    /// Whose cache a tenant uses, where that is a group's.
    caches: HashMap<TenantId, TenantId>,
    /// What an operator calls the tenants, and the groups, in the order of keys and file.
    names: Vec<(TenantId, String)>,
    groups: Vec<(TenantId, String)>,
    /// Declared prefixes: tenants to the cache, whom nobody authenticates as.
    prefixes: Vec<(Tenant, String)>,
    /// The only tenant when no keys are configured.
    open: Tenant,
}

impl Tenants {
    /// `server_secret`: see [`crate::ServerConfig::server_secret`].
    pub fn new(
        api_keys: &[String],
        declared: &Declared,
        server_secret: Option<[u8; 32]>,
    ) -> Result<Self, ServerError> {
        let server_secret = server_secret.unwrap_or_else(process_secret);
        let mut keys: Vec<([u8; 32], Tenant)> = Vec::new();
        for key in api_keys {
            let digest = new_key(&keys, key).map_err(|reason| ServerError::Config(reason.into()))?;
            // Tenant 0 is the open tenant.
            let id = TenantId(keys.len() as u32 + 1);
            keys.push((digest, Tenant { id, secret: tenant_secret(&server_secret, &digest) }));
        }
        let mut caches = HashMap::new();
        let mut names: Vec<_> = keys.iter().map(|(_, key)| (key.id, format!("key:{}", key.id.0))).collect();
        names.extend(declared.tenants.iter().map(|tenant| (tenant.id, tenant.name.clone())));
        let groups = declared.groups.iter().map(|group| (group.id, group.name.clone())).collect();
        for tenant in &declared.tenants {
            let group = tenant.group.map(|group| &declared.groups[group]);
            let whose = match group {
                Some(group) => sha256(&[b"folio sharing group", group.name.as_bytes()]),
                None => sha256(&[b"folio declared tenant", tenant.name.as_bytes()]),
            };
            caches.extend(group.map(|group| (tenant.id, group.id)));
            let secret = tenant_secret(&server_secret, &whose);
            for key in &tenant.keys {
                let digest = new_key(&keys, key).map_err(|reason| {
                    ServerError::Config(format!("the tenants file: tenant {:?}: keys: {reason}", tenant.name))
                })?;
                keys.push((digest, Tenant { id: tenant.id, secret }));
            }
        }
        let open = Tenant { id: TenantId(0), secret: tenant_secret(&server_secret, &[0; 32]) };
        if names.is_empty() {
            names.push((open.id, "anonymous".to_owned()));
        }
        let prefixes = declared.prefixes.iter().map(|prefix| {
            let whose = sha256(&[b"folio declared prefix", prefix.name.as_bytes()]);
            (Tenant { id: prefix.id, secret: tenant_secret(&server_secret, &whose) }, prefix.name.clone())
        });
        let prefixes = prefixes.collect();
        Ok(Self { keys, caches, names, groups, prefixes, open })
    }

    /// The tenant that a tenant is to the cache: its group, or itself.
    pub fn cache_of(&self, tenant: TenantId) -> TenantId {
        self.caches.get(&tenant).copied().unwrap_or(tenant)
    }

    /// Every tenant that can authenticate, by the name an operator knows.
    pub fn names(&self) -> impl Iterator<Item = (TenantId, &str)> {
        self.names.iter().map(|(id, name)| (*id, name.as_str()))
    }

    /// Every cache there is: what its owner is, its name, and its id.
    pub fn caches(&self) -> impl Iterator<Item = (&'static str, &str, TenantId)> {
        let groups = self.groups.iter().map(|(id, name)| ("group", name.as_str(), *id));
        let prefixes = self.prefixes.iter().map(|(tenant, name)| ("prefix", name.as_str(), tenant.id));
        let alone = self.names().filter(|(id, _)| !self.caches.contains_key(id));
        prefixes.chain(groups).chain(alone.map(|(id, name)| ("tenant", name, id)))
    }

    /// Declared prefixes, in the order of the file.
    pub fn prefixes(&self) -> impl Iterator<Item = &Tenant> {
        self.prefixes.iter().map(|(tenant, _)| tenant)
    }

    pub fn all(&self) -> impl Iterator<Item = &Tenant> {
        std::iter::once(&self.open).chain(self.keys.iter().map(|(_, tenant)| tenant))
    }

    /// The tenant of a request, from its `Authorization: Bearer` header or, Anthropic's way, its `x-api-key` header.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<&Tenant, ApiError> {
        if self.keys.is_empty() {
            return Ok(&self.open);
        }
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
        let key = bearer.or(plain).ok_or_else(|| {
            ApiError::unauthorized(
                "You didn't provide an API key. Send it in an Authorization header ('Authorization: Bearer YOUR_KEY') or \
                 an x-api-key header.",
            )
        })?;
        let digest = sha256(&[b"folio api key", key.as_bytes()]);
        let mut found = None;
        for (known, tenant) in &self.keys {
            if equal(known, &digest) {
                found = Some(tenant);
            }
        }
        found.ok_or_else(|| ApiError::unauthorized("Incorrect API key provided."))
    }
}

/// Digest of a key that nobody has yet.
fn new_key(keys: &[([u8; 32], Tenant)], key: &str) -> Result<[u8; 32], &'static str> {
    if key.trim().is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("an API key must be one or more visible ASCII characters without spaces");
    }
    let digest = sha256(&[b"folio api key", key.as_bytes()]);
    match keys.iter().any(|(known, _)| *known == digest) {
        true => Err("the same API key is given twice"),
        false => Ok(digest),
    }
}

/// Equality in a time that does not depend on the contents.
fn equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let difference = a.iter().zip(b).fold(0u8, |acc, (x, y)| acc | (x ^ y));
    std::hint::black_box(difference) == 0
}

/// Digest over length-prefixed parts.
fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn tenant_secret(server_secret: &[u8; 32], key_digest: &[u8; 32]) -> [u8; 32] {
    // Outer and inner digest, so that nothing about the inner state leaves (HMAC's construction).
    let inner = sha256(&[b"folio tenant", server_secret, key_digest]);
    sha256(&[b"folio tenant secret", server_secret, &inner])
}

/// 256 bits nobody outside this process knows: std seeds its hashers from the operating system.
fn process_secret() -> [u8; 32] {
    let mut parts = Vec::new();
    for index in 0..8u64 {
        let mut hasher = std::hash::RandomState::new().build_hasher();
        hasher.write_u64(index);
        parts.extend_from_slice(&hasher.finish().to_le_bytes());
    }
    if let Ok(mut random) = std::fs::File::open("/dev/urandom") {
        let mut bytes = [0u8; 32];
        if std::io::Read::read_exact(&mut random, &mut bytes).is_ok() {
            parts.extend_from_slice(&bytes);
        }
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    sha256(&[b"folio server secret", &parts, &now.as_nanos().to_le_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn each_key_is_its_own_tenant() {
        let keys = ["alpha".to_owned(), "beta".to_owned()];
        let tenants = Tenants::new(&keys, &Declared::default(), Some([7; 32])).unwrap();
        let alpha = tenants.authenticate(&headers("Bearer alpha")).unwrap();
        let beta = tenants.authenticate(&headers("bearer  beta")).unwrap();
        assert_ne!(alpha.id, beta.id);
        assert_ne!(alpha.secret, beta.secret);
        for wrong in ["Bearer alph", "Bearer alphaa", "Basic alpha", "alpha", "Bearer "] {
            let error = tenants.authenticate(&headers(wrong)).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (401, Some("invalid_api_key")), "{wrong}");
        }
        assert!(tenants.authenticate(&HeaderMap::new()).is_err());

        let mut plain = HeaderMap::from_iter([("x-api-key".parse().unwrap(), "alpha".parse().unwrap())]);
        assert_eq!(tenants.authenticate(&plain).unwrap().id, alpha.id);
        plain.insert(header::AUTHORIZATION, "Bearer alpha".parse().unwrap());
        assert_eq!(tenants.authenticate(&plain).unwrap().id, alpha.id);
        plain.insert(header::AUTHORIZATION, "Bearer beta".parse().unwrap());
        assert!(tenants.authenticate(&plain).is_err(), "two keys are two tenants");
    }

    #[test]
    fn secrets_survive_a_restart_only_with_a_configured_server_secret() {
        let keys = ["alpha".to_owned()];
        let secret = |server| {
            let tenants = Tenants::new(&keys, &Declared::default(), server).ok().unwrap();
            tenants.authenticate(&headers("Bearer alpha")).unwrap().secret
        };
        assert_eq!(secret(Some([1; 32])), secret(Some([1; 32])));
        assert_ne!(secret(Some([1; 32])), secret(Some([2; 32])));
        assert_ne!(secret(None), secret(None));
    }

    #[test]
    fn keys_that_cannot_work_are_refused_at_start() {
        let refused = |keys: &[String]| Tenants::new(keys, &Declared::default(), None).is_err();
        assert!(refused(&["".into()]));
        assert!(refused(&["a b".into()]));
        assert!(refused(&["a".into(), "a".into()]));
    }

    #[test]
    fn declared_tenants_have_their_keys_and_groups_one_cache() {
        let file = r#"{"tenants": [{"name": "acme", "keys": ["k1", "k2"]}, {"name": "a", "keys": ["k3"], "group": "lab"},
            {"name": "b", "keys": ["k4"], "group": "lab"}], "groups": [{"name": "lab"}]}"#;
        let declared = Declared::parse(file, &|_| None).unwrap();
        let tenants = Tenants::new(&["plain".into()], &declared, Some([1; 32])).unwrap();
        let of = |key: &str| tenants.authenticate(&headers(&format!("Bearer {key}"))).unwrap();
        assert_eq!(of("k1"), of("k2"), "two keys, one tenant");
        assert_ne!(of("k3").id, of("k4").id);
        assert_eq!(of("k3").secret, of("k4").secret, "one cache");
        assert_eq!(tenants.cache_of(of("k3").id), tenants.cache_of(of("k4").id));
        for (one, other) in [("k1", "k3"), ("k1", "plain"), ("plain", "k4")] {
            assert_ne!(of(one).secret, of(other).secret, "{one} and {other}");
            assert_ne!(tenants.cache_of(of(one).id), tenants.cache_of(of(other).id));
        }
        let other = Tenants::new(&[], &declared, Some([2; 32])).unwrap();
        assert_ne!(other.authenticate(&headers("Bearer k3")).unwrap().secret, of("k3").secret);
        let twice = Tenants::new(&["k4".into()], &declared, None).err().unwrap().to_string();
        assert!(twice.contains("\"b\"") && twice.contains("twice"), "{twice}");
    }
}
