//! The holder of a key, and what it may.

use std::sync::Arc;
use std::time::Instant;

use folio_api::ApiError;
use folio_kv::TenantId;

use crate::adapters::AllowedAdapters;
use crate::tenancy::declared::PriorityRange;
use crate::tenancy::gate::{Gate, TenantLimits};
use crate::tenancy::keys::{Scope, Scopes, sha256};

/// The holder of a key, and the key's rights.
#[derive(Clone)]
pub struct Tenant {
    pub id: TenantId,
    /// The tenant that it is to the cache: its group, or itself.
    pub cache: TenantId,
    /// Keys the block hashes of that cache.
    pub secret: [u8; 32],
    /// What an operator calls it.
    pub name: Arc<str>,
    /// What an operator calls the key; never the key.
    pub key: Arc<str>,
    /// What tells it apart in whatever outlives the process: its name, or a digest of the key that is all there is of it.
    pub owner: Arc<str>,
    pub scopes: Scopes,
    /// Lower runs before other tenants.
    pub class: i32,
    pub priority: PriorityRange,
    /// Adapters that there are for it.
    pub adapters: AllowedAdapters,
    pub(crate) gate: Arc<Gate>,
}

impl Tenant {
    /// A tenant by itself, with the usual rights; `secret` keys its cache.
    pub(super) fn new(id: TenantId, name: &str, secret: [u8; 32], limits: TenantLimits) -> Self {
        Self {
            id,
            cache: id,
            secret,
            name: name.into(),
            key: name.into(),
            owner: format!("tenant {name}").into(),
            scopes: Scopes::new(&Scope::DEFAULT),
            class: 0,
            priority: PriorityRange::default(),
            adapters: AllowedAdapters::default(),
            gate: Arc::new(Gate::new(limits, Instant::now())),
        }
    }

    /// 403 for a key that does not open this.
    pub(crate) fn check_scope(&self, scope: Scope) -> Result<(), ApiError> {
        if self.scopes.has(scope) {
            return Ok(());
        }
        let message =
            format!("This API key does not have the scope '{}' that this route needs.", scope.name());
        let error = ApiError::new(403, "invalid_request_error", message);
        Err(ApiError { code: Some("insufficient_scope"), ..error })
    }

    /// Whether its requests may give this number as theirs.
    pub(crate) fn check_priority(&self, priority: i32) -> Result<(), ApiError> {
        let PriorityRange { min, max } = self.priority;
        if (min..=max).contains(&priority) {
            return Ok(());
        }
        let message =
            format!("'priority' must be between {min} and {max} with this API key, but is {priority}.");
        Err(ApiError::invalid("priority", message))
    }
}

/// Without the secret.
impl std::fmt::Debug for Tenant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Tenant");
        out.field("id", &self.id).field("cache", &self.cache).field("name", &self.name);
        out.field("key", &self.key).field("scopes", &self.scopes).finish_non_exhaustive()
    }
}

/// What the keyring knows a tenant by that has a name, however many keys.
pub fn owner_digest(name: &str) -> [u8; 32] {
    sha256(&[b"folio declared tenant", name.as_bytes()])
}
