//! Who asks, what they may have, and what they hold.

pub(crate) mod answering;
pub(crate) mod bucket;
pub(crate) mod cache_keys;
pub(crate) mod declared;
pub(crate) mod gate;
pub(crate) mod kept;
pub(crate) mod keyring;
pub mod keys;
pub(crate) mod prefix_texts;
pub(crate) mod secret;
pub(crate) mod shared_prefixes;
pub(crate) mod tenant;
pub(crate) mod tenants;
pub(crate) mod unread;
pub(crate) mod wrapping;

use std::collections::HashSet;
use std::sync::Arc;

use folio_api::ApiError;
use folio_engine::RequestAdapter;
use folio_kv::{Identity, Root, TenantId};

use crate::engine::Served;
use crate::error::ServerError;
use cache_keys::CacheKeys;
use declared::DeclaredPrefix;
use prefix_texts::PrefixTexts;
use shared_prefixes::SharedPrefixes;
use tenant::Tenant;
use tenants::Tenants;

/// Who is who, and what of the cache is whose.
pub(crate) struct Tenancy {
    pub tenants: Arc<Tenants>,
    /// What the operator declared to be shared.
    pub shared: SharedPrefixes,
    pub cache_keys: CacheKeys,
    /// Of prefixes that are kept by name.
    pub prefix_texts: PrefixTexts,
    served: Arc<Served>,
}

impl Tenancy {
    /// `tokens`: those of a prefix that the operator declared.
    pub fn new(
        tenants: Arc<Tenants>,
        served: Arc<Served>,
        declared: &[DeclaredPrefix],
        tokens: impl Fn(&DeclaredPrefix) -> Result<Vec<u32>, ApiError>,
    ) -> Result<Self, ServerError> {
        let read = |(prefix, holder)| (prefix, root(&served, holder, None), tokens(prefix));
        let read = declared.iter().zip(tenants.prefixes()).map(read);
        let shared = SharedPrefixes::new(read, served.engine.stats().cache.block_tokens)?;
        Ok(Self {
            tenants,
            shared,
            cache_keys: CacheKeys::default(),
            prefix_texts: PrefixTexts::default(),
            served,
        })
    }

    /// Start of the tenant's block-hash chains, with an adapter or without.
    pub fn root(&self, tenant: &Tenant, adapter: Option<&RequestAdapter>) -> Root {
        root(&self.served, tenant, adapter)
    }

    /// Tenants that have no valid key and are at rest leave; who they were. Blocks.
    pub fn leave(&self) -> HashSet<TenantId> {
        let gone = self.tenants.leave();
        if !gone.is_empty() {
            self.cache_keys.forget(&gone);
            self.prefix_texts.forget(&gone);
        }
        gone
    }
}

fn root(served: &Served, tenant: &Tenant, adapter: Option<&RequestAdapter>) -> Root {
    Root::derive(&Identity {
        tenant: tenant.cache,
        tenant_secret: &tenant.secret,
        model_digest: &served.model.model_digest,
        layout_digest: &served.model.layout_digest,
        extra: adapter.map_or(&[], |adapter| adapter.source.digest()),
    })
}
