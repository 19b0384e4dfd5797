//! KV events: of whom they tell, and what an operator can see of them.
//!
//! Owns: which tenants are told. Must never: tell of one that the operator did not name.

use std::sync::Arc;

use folio_events::{KvEvents, KvEventsConfig, KvEventsStats, Source, Told};

use super::metrics::{Labels, Samples};
use crate::error::ServerError;
use crate::tenancy::tenants::Tenants;

/// What is published, and how that was asked for.
pub(crate) struct Published {
    pub events: Arc<KvEvents>,
    pub source: Source,
}

/// Starts to publish.
pub(crate) fn start(source: &Source, tenants: &Arc<Tenants>) -> Result<Published, ServerError> {
    check(&source.config, tenants)?;
    let events = KvEvents::start(source, told(&source.config, tenants))
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
pub(crate) fn told(config: &KvEventsConfig, tenants: &Arc<Tenants>) -> Told {
    let (names, tenants) = (config.tenants.clone(), tenants.clone());
    Box::new(move |id| match (&names, tenants.cache_name(id)) {
        (None, name) => Some(name.map_or_else(|| "".into(), |(_, name)| name)),
        (Some(_), Some(("prefix", name))) => Some(name),
        (Some(names), Some((_, name))) => Some(name).filter(|name| names.iter().any(|told| **told == **name)),
        (Some(_), None) => None,
    })
}

/// Of one metric; none where nothing is published.
pub(crate) fn samples(name: &str, stats: Option<&KvEventsStats>) -> Samples {
    let Some(stats) = stats else {
        return if name.ends_with("_total") { Samples::Counters(vec![]) } else { Samples::Gauges(vec![]) };
    };
    let of = |label: &'static str, value: &str| -> Labels { vec![(label, value.to_owned())] };
    match name {
        "folio:kv_events_published_total" => Samples::Counters(vec![
            (of("event", "stored"), stats.stored),
            (of("event", "removed"), stats.removed),
            (of("event", "cleared"), stats.cleared),
        ]),
        "folio:kv_events_messages_total" => Samples::Counter(stats.next_message),
        "folio:kv_events_dropped_total" => Samples::Counter(stats.dropped),
        "folio:kv_events_lost_total" => Samples::Counter(stats.lost),
        "folio:kv_events_replays_total" => Samples::Counter(stats.replays),
        "folio:kv_events_refused_total" => Samples::Counter(stats.refused),
        "folio:kv_events_subscribers" => Samples::Gauge(stats.subscribers.len() as f64),
        "folio:kv_events_blocks" => Samples::Gauges(vec![
            (of("medium", "GPU"), stats.device_blocks as f64),
            (of("medium", "CPU"), stats.host_blocks as f64),
        ]),
        other => unreachable!("{other} is in the table of metrics but has no figure"),
    }
}
