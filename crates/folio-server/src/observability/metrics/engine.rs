//! The engine's figures, read from its snapshot when somebody asks.

use std::fmt;
use std::sync::Arc;

use folio_engine::{
    Activity, DraftCounts, Drafter, EngineStats, LoadCost, Micros, PREFILL_TOKENS, PerReason, TierStats,
    WaitingFor,
};
use folio_events::KvEvents;
use folio_kv::CacheStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::documented::{Documented, ENGINE};
use super::kv_events;
use super::samples::{Labels, Samples, encode_samples};
use crate::adapters::Adapters;
use crate::engine::Engine;
use crate::observability::usage::seconds;

pub(super) struct EngineCollector {
    pub engine: Arc<dyn Engine>,
    pub kv_events: Option<Arc<KvEvents>>,
    pub adapters: Arc<Adapters>,
}

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineCollector")
    }
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let stats = self.engine.stats();
        let events = self.kv_events.as_ref().map(|events| events.stats());
        let cache = &stats.cache;
        let (waiting, tiers) = (stats.waiting, self.engine.tier_stats());
        for Documented { name, help, .. } in ENGINE {
            let samples = match *name {
                "vllm:num_requests_running" => Samples::Gauge(f64::from(stats.running)),
                "vllm:num_requests_waiting" => Samples::Gauge(f64::from(waiting.total())),
                "vllm:num_requests_waiting_by_reason" => Samples::Gauges(
                    waiting.iter().map(|(reason, n)| (by_reason(reason), f64::from(n))).collect(),
                ),
                "folio:waits_total" => waits(stats.counters.waits),
                "folio:waits_expired_total" => waits(stats.counters.waits_expired),
                "vllm:kv_cache_usage_perc" => Samples::Gauge(cache.usage()),
                "vllm:cache_config_info" => Samples::Gauges(vec![(
                    vec![
                        ("num_gpu_blocks", cache.blocks.to_string()),
                        ("block_size", cache.block_tokens.to_string()),
                        ("bytes_per_block", cache.bytes_per_block.to_string()),
                    ],
                    1.0,
                )]),
                "vllm:num_preemptions_total" => Samples::Counter(stats.counters.preemptions),
                "vllm:spec_decode_num_drafts_total" => by_drafter(&stats, |counts| counts.sequences),
                "folio:grammar_forced_tokens_total" => Samples::Counter(stats.counters.forced_tokens),
                "folio:grammar_accepted_forced_tokens_total" => {
                    Samples::Counter(stats.counters.accepted_forced_tokens)
                }
                "vllm:spec_decode_num_draft_tokens_total" => by_drafter(&stats, |counts| counts.tokens),
                "vllm:spec_decode_num_accepted_tokens_total" => by_drafter(&stats, |counts| counts.accepted),
                "vllm:spec_decode_num_accepted_tokens_per_pos_total" => accepted_by_place(&stats),
                "folio:preemptions_total" => {
                    let (all, kept) = (stats.counters.preemptions, stats.counters.preemptions_swapped);
                    labelled("mode", &[("tier", kept), ("recompute", all - kept)])
                }
                "vllm:prefix_cache_queries_total" => Samples::Counter(cache.queries.tokens),
                "vllm:prefix_cache_hits_total" => Samples::Counter(cache.queries.hit_tokens),
                "vllm:iteration_tokens_total" => Samples::Total {
                    count: stats.counters.steps,
                    sum: stats.counters.iteration_tokens as f64,
                },
                "folio:kv_cache_blocks" => Samples::Gauges(blocks_by_state(cache)),
                "folio:kv_cache_waste_ratio" => Samples::Gauge(cache.waste()),
                "folio:kv_cache_evictions_total" => match cache.windows() {
                    [] => Samples::Counter(cache.evictions),
                    _ => Samples::Counters(evictions_by_group(cache)),
                },
                "folio:kv_cache_window_miss_tokens_total" => {
                    Samples::Counter(cache.queries.window_miss_tokens)
                }
                "folio:kv_cache_byte_seconds" => {
                    let (active, cached) = byte_seconds(&stats, self.engine.now());
                    let state = |state: &str| vec![("state", state.to_owned())];
                    Samples::Gauges(vec![(state("active"), active), (state("cached"), cached)])
                }
                "folio:recomputed_tokens_total" => Samples::Counter(stats.counters.recomputed_tokens),
                "vllm:external_prefix_cache_queries_total" => Samples::Counter(
                    cache.queries.tokens + stats.counters.loaded_tokens - cache.queries.hit_tokens,
                ),
                "vllm:external_prefix_cache_hits_total" => Samples::Counter(stats.counters.loaded_tokens),
                "folio:tier_loads_total" => {
                    let counters = &stats.counters;
                    let loads = counters.tier_loads.iter().zip(&counters.failed_tier_loads);
                    let loads = loads.map(|(all, failed)| [("loaded", all - failed), ("failed", *failed)]);
                    by_tier(&tiers, "outcome", loads)
                }
                "folio:tier_offers_total" => {
                    let counters = &stats.counters;
                    let offers = counters.taken_offers.iter().zip(&counters.declined_offers);
                    let offers = offers.map(|(taken, declined)| [("load", *taken), ("compute", *declined)]);
                    by_tier(&tiers, "decision", offers)
                }
                "folio:tier_load_latency_seconds" => {
                    load_costs(&stats, &tiers, |cost| Some(cost.latency_us / 1e6))
                }
                "folio:tier_load_bytes_per_second" => load_costs(&stats, &tiers, |cost| {
                    (cost.us_per_byte > 0.0).then(|| 1e6 / cost.us_per_byte)
                }),
                "folio:prefill_tokens_per_second" => {
                    let rate = f64::from(PREFILL_TOKENS) / stats.prefill_us * 1e6;
                    Samples::Gauge(if stats.prefill_us > 0.0 { rate } else { 0.0 })
                }
                "folio:unstored_blocks_total" => {
                    let (unwanted, missed) = (stats.counters.unstored_blocks, stats.counters.missed_blocks);
                    labelled("reason", &[("unwanted", unwanted), ("missed", missed)])
                }
                "folio:prefetches_total" => {
                    let counts = stats.counters.prefetches;
                    let outcomes = [
                        ("completed", counts.completed),
                        ("admitted", counts.admitted),
                        ("aborted", counts.aborted),
                    ];
                    labelled("outcome", &outcomes)
                }
                "folio:prefetched_tokens_total" => Samples::Counter(stats.counters.prefetches.tokens),
                name if name.starts_with("folio:tier_") => tier_samples(name, &tiers),
                name if name.starts_with("folio:kv_events_") => kv_events::samples(name, events.as_ref()),
                "vllm:lora_requests_info" => lora(&stats, &self.adapters),
                "folio:adapters_resident" => Samples::Gauge(f64::from(stats.resident_adapters)),
                "folio:adapter_bytes" => Samples::Gauge(stats.adapter_bytes as f64),
                "folio:adapter_loads_total" => {
                    let (all, failed) = (stats.counters.adapter_loads, stats.counters.failed_adapter_loads);
                    labelled("outcome", &[("loaded", all - failed), ("failed", failed)])
                }
                "folio:adapter_evictions_total" => Samples::Counter(stats.counters.adapter_evictions),
                "folio:queued_prompt_tokens" => Samples::Gauge(stats.queued_tokens as f64),
                "folio:last_step_seconds" => Samples::Gauge(stats.last_step_us as f64 / 1e6),
                "folio:executor_failures_total" => Samples::Counter(stats.counters.executor_failures),
                "folio:time_seconds" => {
                    let work = stats.work.at(self.engine.now());
                    let of = |activity: Activity| {
                        (vec![("kind", activity.name().to_owned())], seconds(work.us(activity).into()))
                    };
                    Samples::Gauges(Activity::ALL.map(of).to_vec())
                }
                "folio:steps_ahead_total" => Samples::Counter(stats.counters.steps_ahead),
                other => unreachable!("{other} is in the table above but has no figure"),
            };
            encode_samples(&mut encoder, name, help, samples)?;
        }
        Ok(())
    }
}

/// Counts of each tier, by a label.
fn by_tier(
    tiers: &[TierStats],
    label: &'static str,
    counts: impl Iterator<Item = [(&'static str, u64); 2]>,
) -> Samples {
    let of = |(tier, counts): (&TierStats, [(&'static str, u64); 2])| {
        counts.map(|(value, n)| (tier_labels(tier, Some((label, value))), n))
    };
    Samples::Counters(tiers.iter().zip(counts).flat_map(of).collect())
}

/// A figure of what loads take, of each tier that was loaded from.
fn load_costs(stats: &EngineStats, tiers: &[TierStats], figure: impl Fn(LoadCost) -> Option<f64>) -> Samples {
    let of =
        |(tier, cost): (&TierStats, &Option<LoadCost>)| Some((tier_labels(tier, None), figure((*cost)?)?));
    Samples::Gauges(tiers.iter().zip(&stats.load_costs).filter_map(of).collect())
}

/// Of all tiers.
fn tier_samples(name: &str, tiers: &[TierStats]) -> Samples {
    if name.ends_with("_total") {
        return Samples::Counters(tiers.iter().flat_map(|tier| tier_counters(name, tier)).collect());
    }
    Samples::Gauges(tiers.iter().flat_map(|tier| tier_gauges(name, tier)).collect())
}

fn tier_gauges(name: &str, tier: &TierStats) -> Vec<(Labels, f64)> {
    let of = |more: Option<(&'static str, &str)>| tier_labels(tier, more);
    match name {
        "folio:tier_up" => vec![(of(None), f64::from(u8::from(tier.off.is_none())))],
        "folio:tier_bytes" if tier.bytes_limit == 0 => Vec::new(),
        "folio:tier_bytes" => {
            let state = |state, bytes: u64| (of(Some(("state", state))), bytes as f64);
            let ready = tier.bytes_ready.map(|bytes| state("ready", bytes));
            let both = [state("used", tier.bytes), state("limit", tier.bytes_limit)];
            both.into_iter().chain(ready).collect()
        }
        "folio:tier_blocks" => vec![(of(None), tier.blocks as f64)],
        other => unreachable!("{other} is in the table above but has no figure"),
    }
}

fn tier_counters(name: &str, tier: &TierStats) -> Vec<(Labels, u64)> {
    let by = |label, list: &[(&str, u64)]| {
        list.iter().map(|(value, n)| (tier_labels(tier, Some((label, *value))), *n)).collect()
    };
    match name {
        "folio:tier_blocks_total" => by(
            "event",
            &[
                ("stored", tier.blocks_stored),
                ("loaded", tier.blocks_loaded),
                ("evicted", tier.blocks_evicted),
                ("dropped", tier.blocks_dropped),
            ],
        ),
        "folio:tier_bytes_total" => by(
            "direction",
            &[("out", tier.bytes_written), ("payload", tier.payload_written), ("in", tier.bytes_read)],
        ),
        "folio:tier_misses_total" => by("reason", &tier.misses),
        "folio:tier_requests_total" => by("outcome", &tier.requests),
        other => unreachable!("{other} is in the table above but has no figure"),
    }
}

fn tier_labels(tier: &TierStats, more: Option<(&'static str, &str)>) -> Labels {
    let more = more.map(|(name, value)| (name, value.to_owned()));
    std::iter::once(("tier", tier.name.to_owned())).chain(more).collect()
}

/// As vLLM tells routers of adapters: names in labels, the time as the value.
fn lora(stats: &EngineStats, adapters: &Adapters) -> Samples {
    let (running, waiting) = adapters.in_use(&stats.adapters);
    let labels = vec![
        ("max_lora", stats.max_adapters.to_string()),
        ("running_lora_adapters", running.join(",")),
        ("waiting_lora_adapters", waiting.join(",")),
    ];
    Samples::Gauges(vec![(labels, folio_api::unix_s() as f64)])
}

fn by_reason(reason: WaitingFor) -> Labels {
    vec![("reason", reason.name().to_owned())]
}

fn waits(counts: PerReason<u64>) -> Samples {
    Samples::Counters(counts.iter().map(|(reason, n)| (by_reason(reason), n)).collect())
}

fn labelled(label: &'static str, list: &[(&str, u64)]) -> Samples {
    Samples::Counters(list.iter().map(|(value, n)| (vec![(label, value.to_string())], *n)).collect())
}

fn by_drafter(stats: &EngineStats, figure: fn(&DraftCounts) -> u64) -> Samples {
    let counts =
        Drafter::ALL.map(|drafter| (drafter.name(), figure(&stats.counters.drafts[drafter as usize])));
    labelled("drafter", &counts)
}

fn accepted_by_place(stats: &EngineStats) -> Samples {
    let mut samples = Vec::new();
    for (drafter, counts) in Drafter::ALL.into_iter().zip(&stats.counters.drafts) {
        for (place, accepted) in counts.accepted_by_place.iter().enumerate() {
            let labels = vec![("drafter", drafter.name().to_owned()), ("position", place.to_string())];
            samples.push((labels, *accepted));
        }
    }
    Samples::Counters(samples)
}

/// Of all tenants together: names stay out of this page unless they are asked for (`tenant_metrics`).
fn byte_seconds(stats: &EngineStats, now: Micros) -> (f64, f64) {
    let mut held = stats.retired;
    stats.tenants.iter().for_each(|(_, holdings)| held.carry(&holdings.at(now.0)));
    (seconds(held.active_byte_us), seconds(held.cached_byte_us))
}

/// Labels of a cache group: none where there is only one, so that nobody's queries change.
fn group_labels(cache: &CacheStats, group: usize) -> Labels {
    if cache.windows().is_empty() { Vec::new() } else { vec![("group", group.to_string())] }
}

fn blocks_by_state(cache: &CacheStats) -> Vec<(Labels, f64)> {
    let mut samples = Vec::new();
    for (group, of) in cache.groups().iter().enumerate() {
        let counts = [of.free_blocks, of.cached_blocks, of.active_blocks];
        for (state, count) in ["free", "cached", "active"].into_iter().zip(counts) {
            let mut labels = group_labels(cache, group);
            labels.push(("state", state.to_owned()));
            samples.push((labels, f64::from(count)));
        }
    }
    samples
}

fn evictions_by_group(cache: &CacheStats) -> Vec<(Labels, u64)> {
    let groups = cache.groups().iter().enumerate();
    groups.map(|(group, of)| (group_labels(cache, group), of.evictions)).collect()
}
