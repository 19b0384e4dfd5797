//! Who is asking. A tenant is whoever authenticated with one key; everything the cache may share hangs on that.
//!
//! Invariants: tenancy comes from the key in the `Authorization` or `x-api-key` header and from nothing else in a request. Keys are not kept, only
//! their digests; comparing digests takes the same time wherever they differ, and every key is compared every time. A
//! tenant's cache secret depends on the server's secret and the key, so it is neither guessable nor the client's to choose.

use std::hash::{BuildHasher, Hasher};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, header};
use folio_kv::TenantId;
use sha2::{Digest, Sha256};

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
    keys: Vec<([u8; 32], Tenant)>,
    /// The only tenant when no keys are configured.
    open: Tenant,
}

impl Tenants {
    /// `server_secret`: see [`crate::ServerConfig::server_secret`].
    pub fn new(api_keys: &[String], server_secret: Option<[u8; 32]>) -> Result<Self, ServerError> {
        let server_secret = server_secret.unwrap_or_else(process_secret);
        let mut keys: Vec<([u8; 32], Tenant)> = Vec::new();
        for key in api_keys {
            if key.trim().is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                let reason = "an API key must be one or more visible ASCII characters without spaces";
                return Err(ServerError::Config(reason.into()));
            }
            let digest = sha256(&[b"folio api key", key.as_bytes()]);
            if keys.iter().any(|(known, _)| *known == digest) {
                return Err(ServerError::Config("the same API key is given twice".into()));
            }
            // Tenant 0 is the open tenant.
            let id = TenantId(keys.len() as u32 + 1);
            keys.push((digest, Tenant { id, secret: tenant_secret(&server_secret, &digest) }));
        }
        let open = Tenant { id: TenantId(0), secret: tenant_secret(&server_secret, &[0; 32]) };
        Ok(Self { keys, open })
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
        let tenants = Tenants::new(&keys, Some([7; 32])).unwrap();
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
            let tenants = Tenants::new(&keys, server).ok().unwrap();
            tenants.authenticate(&headers("Bearer alpha")).unwrap().secret
        };
        assert_eq!(secret(Some([1; 32])), secret(Some([1; 32])));
        assert_ne!(secret(Some([1; 32])), secret(Some([2; 32])));
        assert_ne!(secret(None), secret(None));
    }

    #[test]
    fn keys_that_cannot_work_are_refused_at_start() {
        assert!(Tenants::new(&["".into()], None).is_err());
        assert!(Tenants::new(&["a b".into()], None).is_err());
        assert!(Tenants::new(&["a".into(), "a".into()], None).is_err());
    }
}
