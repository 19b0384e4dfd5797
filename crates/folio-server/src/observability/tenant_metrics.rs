//! Series per tenant on `/metrics`, for an operator who asked for them (`--tenant-metrics`).
//!
//! Owns: their names, and who is called what. Must never: be there unasked: the page is open to whoever can reach it, and
//! names of tenants are nobody's business.
//!
//! Tokens are counted with the responses, by the meters of `GET /v1/usage`, so they are equal to what that says; memory comes
//! from the engine's snapshot. A declared tenant goes by its name and an API key by its number (`key:1`, in the order given);
//! the only tenant of a server without keys is `anonymous`. Declared names have no colon, so nobody is mistaken for another.
//! Memory of tenants that share a cache is their group's, and stands there once.
//!
//! Bounded: beyond [`TENANTS_MAX`] tenants, in the order of keys and file, the rest is one sum, `tenant=":others"`. So sums
//! over all tenants stay right.

use std::fmt;
use std::sync::Arc;

use folio_kv::TenantId;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use crate::engine::Engine;
use crate::observability::metrics::{Documented, Labels, Samples, counter, encode_samples, gauge};
use crate::observability::usage::{Count, Meters, seconds};
use crate::tenancy::tenants::Tenants;

/// Tenants, and caches, with series of their own.
pub const TENANTS_MAX: usize = 1000;

pub(crate) const OTHERS: &str = ":others";

const TENANT: &[Documented] = &[
    counter("folio:tenant_requests_total", "Prompts that the engine took").by("tenant"),
    counter("folio:tenant_prompt_tokens_total", "Prompt tokens, computed or cached (found in the cache)").by("tenant, source"),
    counter("folio:tenant_generation_tokens_total", "Generated tokens").by("tenant"),
    gauge("folio:tenant_kv_cache_bytes", "Bytes of cache, active (held by sequences) or cached; of a group where several tenants share a cache, or of a declared prefix").by("tenant, group or prefix; state"),
    gauge("folio:tenant_kv_cache_byte_seconds", "Those times seconds since the start; only grows").by("tenant, group or prefix; state"),
];

/// Every metric that `--tenant-metrics` adds.
pub fn documented() -> impl Iterator<Item = Documented> {
    TENANT.iter().copied()
}

/// Several ids where the series is the sum of what is beyond the limit.
struct Series {
    labels: Labels,
    ids: Vec<TenantId>,
}

/// The first [`TENANTS_MAX`] by themselves, the rest together.
fn series(all: Vec<(&'static str, String, TenantId)>) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    for (at, (label, name, id)) in all.into_iter().enumerate() {
        match series.last_mut() {
            Some(others) if at > TENANTS_MAX => others.ids.push(id),
            _ if at == TENANTS_MAX => {
                series.push(Series { labels: vec![("tenant", OTHERS.to_owned())], ids: vec![id] });
            }
            _ => series.push(Series { labels: vec![(label, name)], ids: vec![id] }),
        }
    }
    series
}

pub(crate) struct TenantCollector {
    engine: Arc<dyn Engine>,
    meters: Arc<Meters>,
    tenants: Arc<Tenants>,
}

impl TenantCollector {
    pub fn new(engine: Arc<dyn Engine>, meters: Arc<Meters>, tenants: Arc<Tenants>) -> Self {
        Self { engine, meters, tenants }
    }

    fn tokens(&self, of: impl Fn(Count) -> Vec<(Option<&'static str>, u64)>) -> Samples {
        let mut samples = Vec::new();
        let tenants = self.tenants.names().into_iter().map(|(id, name)| ("tenant", name, id));
        for Series { labels, ids } in &series(tenants.collect()) {
            let mut count = Count::default();
            ids.iter().for_each(|id| count.add(self.meters.count(*id)));
            for (source, value) in of(count) {
                let source = source.map(|source| ("source", source.to_owned()));
                samples.push((labels.iter().cloned().chain(source).collect(), value));
            }
        }
        Samples::Counters(samples)
    }

    /// `of`: active and cached.
    fn memory(&self, of: impl Fn(folio_kv::Holdings) -> [f64; 2]) -> Samples {
        let now = self.engine.now();
        let mut samples = Vec::new();
        for Series { labels, ids } in &series(self.tenants.caches()) {
            let held = ids.iter().map(|id| of(self.engine.holdings(*id).at(now.0)));
            let held = held.fold([0.0; 2], |sum, held| [sum[0] + held[0], sum[1] + held[1]]);
            for (state, value) in ["active", "cached"].into_iter().zip(held) {
                let state = [("state", state.to_owned())];
                samples.push((labels.iter().cloned().chain(state).collect(), value));
            }
        }
        Samples::Gauges(samples)
    }
}

impl fmt::Debug for TenantCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TenantCollector")
    }
}

impl Collector for TenantCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        for Documented { name, help, .. } in TENANT {
            let samples = match *name {
                "folio:tenant_requests_total" => self.tokens(|count| vec![(None, count.requests)]),
                "folio:tenant_prompt_tokens_total" => self.tokens(|count| {
                    vec![(Some("computed"), count.computed_tokens()), (Some("cached"), count.cached_tokens)]
                }),
                "folio:tenant_generation_tokens_total" => {
                    self.tokens(|count| vec![(None, count.completion_tokens)])
                }
                "folio:tenant_kv_cache_bytes" => {
                    self.memory(|kv| [kv.active_bytes as f64, kv.cached_bytes as f64])
                }
                "folio:tenant_kv_cache_byte_seconds" => {
                    self.memory(|kv| [seconds(kv.active_byte_us), seconds(kv.cached_byte_us)])
                }
                other => unreachable!("{other} is in the table above but has no figure"),
            };
            encode_samples(&mut encoder, name, help, samples)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_limit_the_rest_is_one_sum() {
        let tenants =
            |count: u32| (0..count).map(|id| ("tenant", format!("t{id}"), TenantId(id))).collect::<Vec<_>>();
        let few = series(tenants(3));
        assert_eq!(few.iter().map(|series| series.ids.len()).collect::<Vec<_>>(), [1, 1, 1]);
        let most = series(tenants(TENANTS_MAX as u32));
        assert!(most.len() == TENANTS_MAX && most[TENANTS_MAX - 1].labels[0].1 == "t999");
        let many = series(tenants(TENANTS_MAX as u32 + 500));
        assert_eq!(many.len(), TENANTS_MAX + 1);
        assert_eq!((many[TENANTS_MAX].labels[0].1.as_str(), many[TENANTS_MAX].ids.len()), (OTHERS, 500));
    }
}
