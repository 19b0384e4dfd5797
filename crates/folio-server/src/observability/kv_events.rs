//! KV events: of whom they tell, and what an operator can see of them.
//!
//! Owns: which tenants are told. Must never: tell of one that the operator did not name.

use std::sync::Arc;

use folio_events::{CacheNames, EventSource, KvEvents, KvEventsConfig, Owners};
use folio_kv::Root;

use crate::error::ServerError;
use crate::tenancy::tenants::Tenants;

/// What is published, and how that was asked for.
pub(crate) struct Published {
    pub events: Arc<KvEvents>,
    pub source: EventSource,
}

/// Starts to publish.
pub(crate) fn start(source: &EventSource, tenants: &Arc<Tenants>) -> Result<Published, ServerError> {
    check(&source.config, tenants)?;
    let owners = owners(&source.config, tenants);
    let events = KvEvents::start(source, told(&source.config, tenants), owners)
        .map_err(|error| ServerError::Config(error.to_string()))?;
    Ok(Published { events: Arc::new(events), source: source.clone() })
}

/// Whether the names are those of tenants or groups with caches of their own. Where there is a file of keys, a tenant may come later.
pub(crate) fn check(config: &KvEventsConfig, tenants: &Tenants) -> Result<(), ServerError> {
    let caches = tenants.caches();
    for name in config.tenants.iter().flatten() {
        if caches.iter().any(|(_, known, _)| known == name) {
            continue;
        }
        let problem = if tenants.names().iter().any(|(_, known)| known == name) {
            "shares its cache: name its group"
        } else if tenants.may_come() {
            continue;
        } else {
            "is no tenant or group that has a cache"
        };
        return Err(ServerError::Config(format!("--kv-events-config: tenants: {name:?} {problem}")));
    }
    Ok(())
}

/// The names of those who are told. What an operator declared to be shared is nobody's prompt, and what is told hangs on it.
pub(crate) fn told(config: &KvEventsConfig, tenants: &Arc<Tenants>) -> CacheNames {
    let (names, tenants) = (config.tenants.clone(), tenants.clone());
    Box::new(move |id| match (&names, tenants.cache_name(id)) {
        (None, name) => Some(name.map_or_else(|| "".into(), |(_, name)| name)),
        (Some(_), Some(("prefix", name))) => Some(name),
        (Some(names), Some((_, name))) => Some(name).filter(|name| names.iter().any(|told| **told == **name)),
        (Some(_), None) => None,
    })
}

/// Who is told, as far as they are known now, and what their blocks are sealed with: so tiers can tell what they hold of them.
pub(crate) fn owners(config: &KvEventsConfig, tenants: &Arc<Tenants>) -> Owners {
    let (told, tenants) = (told(config, tenants), tenants.clone());
    Box::new(move || {
        let caches = tenants.cache_secrets().into_iter().filter(|(cache, _)| told(*cache).is_some());
        caches.map(|(cache, secret)| (cache, Root::data_key_of(&secret))).collect()
    })
}
