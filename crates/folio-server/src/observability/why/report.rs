//! What is told of the last minute: of one tenant, or of the machine and everybody on it.
//!
//! Invariant: the times of tenants, what falls to nobody, waiting and being idle add up to the time that passed; so do their costs.

use std::sync::Arc;

use folio_engine::{Activity, StepWork, WaitingFor};
use folio_kv::{Holdings, TenantId};
use serde_json::{Map, Value, json};

use super::account::{Account, Spending};
use super::advice::{Advice, Evidence, StepEvidence, TierRoom, advise};
use super::config::{WhyConfig, seconds, since};
use super::history::Sample;
use super::latencies::Latencies;
use super::prompts::Prompts;
use crate::engine::Engine;
use crate::observability::tenant_metrics::{OTHERS, TENANTS_MAX};

pub(super) struct WhyReport<'a> {
    pub engine: &'a dyn Engine,
    pub config: &'a WhyConfig,
    /// Of the longest sequence.
    pub context_tokens: u32,
    pub prompts: &'a Prompts,
    pub latencies: &'a Latencies,
    pub begin: Sample,
    pub end: Sample,
    /// Mean numbers since `begin`.
    pub waiting: Vec<(WaitingFor, f64)>,
    pub accounts: Vec<Arc<Account>>,
}

/// A share, where there is anything to have a share of.
fn share(part: f64, of: f64) -> Option<f64> {
    (of > 0.0).then(|| part / of)
}

/// Those with the most, and the rest as one sum: [`TENANTS_MAX`] by name.
fn most<T>(mut all: Vec<(String, T)>, of: impl Fn(&T) -> f64, add: impl Fn(&mut T, &T)) -> Vec<(String, T)> {
    all.sort_by(|one, other| of(&other.1).total_cmp(&of(&one.1)));
    if all.len() > TENANTS_MAX {
        let (mut sum, mut rest) = (None, all.split_off(TENANTS_MAX).into_iter());
        if let Some((_, first)) = rest.next() {
            let sum = sum.insert(first);
            rest.for_each(|(_, other)| add(sum, &other));
        }
        all.extend(sum.map(|sum| (OTHERS.to_owned(), sum)));
    }
    all
}

impl WhyReport<'_> {
    /// Microseconds that are counted.
    fn passed_us(&self) -> f64 {
        (self.end.work.total_us() - self.begin.work.total_us()) as f64
    }

    fn us(&self, activity: Activity) -> u64 {
        self.end.work.us(activity) - self.begin.work.us(activity)
    }

    fn steps(&self, activity: Activity) -> StepWork {
        self.end.work.steps[activity as usize].since(&self.begin.work.steps[activity as usize])
    }

    /// Of one tenant alone.
    pub fn of_tenant(&self, account: &Account, held: Holdings) -> Value {
        let spent = account.spent(self.end.at);
        let held = held.at(self.end.at.0);
        json!({
            "object": "why",
            "of": &*account.name,
            "window_s": self.window_s(),
            "served": self.served(&spent),
            "cache": {
                "active_bytes": held.active_bytes,
                "cached_bytes": held.cached_bytes,
                "hit_share": share(spent.cached_tokens as f64, (spent.cached_tokens + spent.computed_tokens) as f64),
            },
            "cost": self.cost(&spent),
            "advice": self.own_advice(account, &spent),
        })
    }

    /// Of everything.
    pub fn of_machine(&self, caches: &[(&'static str, String, TenantId)]) -> Value {
        let mut all = Spending::default();
        let each: Vec<_> =
            self.accounts.iter().map(|account| (account.clone(), account.spent(self.end.at))).collect();
        each.iter().for_each(|(_, spent)| all.add(spent));
        json!({
            "object": "why",
            "of": "machine",
            "window_s": self.window_s(),
            "time": self.time(),
            "limits": self.limits(),
            "batch": self.batch(),
            "queue": self.queue(),
            "served": self.served(&all),
            "latency": self.latencies.report(self.end.at),
            "cache": self.cache(&all, caches),
            "cost": self.costs(&all, &each),
            "advice": self.advice(&all),
        })
    }

    fn window_s(&self) -> f64 {
        seconds(since(self.begin.at, self.end.at) as f64)
    }

    /// Shares of the time, by what it passed with.
    fn time(&self) -> Value {
        let passed = self.passed_us();
        let shares = Activity::ALL.map(|activity| (activity, share(self.us(activity) as f64, passed)));
        let steps =
            shares.iter().take(Activity::STEPS).filter(|(_, share)| share.is_some_and(|share| share > 0.0));
        let most =
            steps.max_by(|one, other| one.1.partial_cmp(&other.1).unwrap_or(std::cmp::Ordering::Equal));
        let mut time: Map<String, Value> =
            shares.iter().map(|(activity, share)| (activity.name().to_owned(), json!(share))).collect();
        time.insert("mostly".to_owned(), json!(most.map(|(activity, _)| activity.name())));
        time.insert("counted_s".to_owned(), json!(seconds(passed)));
        time.into()
    }

    /// How near to the machine's limits steps of each kind come.
    fn limits(&self) -> Value {
        let roofline = match &self.config.roofline {
            Ok(roofline) => roofline,
            Err(why) => return json!({"known": false, "why": why}),
        };
        let kinds = &Activity::ALL[..Activity::STEPS];
        let mut limits = json!({"known": true, "machine": roofline.machine()});
        for activity in kinds {
            let reached = roofline.reached(&self.steps(*activity), self.us(*activity));
            limits[activity.name()] = json!(reached.map(|reached| reached.json()));
        }
        limits
    }

    fn batch(&self) -> Value {
        let mut all = StepWork::default();
        Activity::ALL[..Activity::STEPS].iter().for_each(|activity| all.add(&self.steps(*activity)));
        let steps = all.steps as f64;
        let (sequences_max, tokens_max) = self.engine.step_limits();
        let rows = all.rows() as f64;
        json!({
            "steps": all.steps,
            "sequences_per_step": share(all.sequences as f64, steps),
            "sequences_max": sequences_max,
            "tokens_per_step": share(rows, steps),
            "tokens_max": tokens_max,
            "budget_used": share(rows, steps * f64::from(tokens_max)),
            "prompt_tokens": all.prompt_rows,
            "output_tokens": all.decode_rows,
            "recomputed_tokens": self.end.recomputed_tokens - self.begin.recomputed_tokens,
            "preemptions": self.end.preemptions - self.begin.preemptions,
            "draft_tokens": self.end.drafts.0 - self.begin.drafts.0,
            "accepted_draft_tokens": self.end.drafts.1 - self.begin.drafts.1,
        })
    }

    fn queue(&self) -> Value {
        let reasons = self.waiting.iter().map(|(reason, mean)| {
            let began = self.end.waits[*reason] - self.begin.waits[*reason];
            (
                reason.name().to_owned(),
                json!({"now": self.end.waiting[*reason], "mean": mean, "began": began}),
            )
        });
        json!({
            "running": self.end.running,
            "waiting": self.end.waiting.total(),
            "new_requests": self.end.queued_requests,
            "new_prompt_tokens": self.end.queued_tokens,
            "reasons": reasons.collect::<Map<String, Value>>(),
        })
    }

    /// What requests were served, and how many in time.
    fn served(&self, spent: &Spending) -> Value {
        let window = self.window_s();
        json!({
            "requests": spent.requests,
            "first_tokens": spent.begun,
            "in_time": spent.in_time,
            "in_time_share": share(spent.in_time as f64, spent.begun as f64),
            "goodput_per_s": share(spent.in_time as f64, window),
            "output_tokens_per_s": share(spent.output_tokens as f64, window),
            "targets": {
                "chat_s": self.config.targets.chat.as_secs_f64(),
                "completion_s": self.config.targets.completion.as_secs_f64(),
            },
        })
    }

    fn cache(&self, spent: &Spending, caches: &[(&'static str, String, TenantId)]) -> Value {
        let (now, before) = (&self.end.cache, &self.begin.cache);
        let block = now.bytes_per_block;
        let bytes = |blocks: u32| u64::from(blocks) * block;
        let loaded = self.end.loaded_tokens - self.begin.loaded_tokens;
        let evictions = now.evictions.saturating_sub(before.evictions);
        // What leaves a store at this rate has been there for as long as the store takes to be filled again.
        let lifetime = share(f64::from(now.cached_blocks) * self.window_s(), evictions as f64);
        let prompt = (spent.cached_tokens + spent.computed_tokens) as f64;
        let brought = self.end.tier_tokens.iter().zip(self.begin.tier_tokens).map(|(end, begin)| end - begin);
        let tiers = self.engine.tier_stats().into_iter().zip(brought).map(|(tier, tokens)| {
            let figures = json!({
                "bytes": tier.bytes,
                "blocks": tier.blocks,
                "blocks_loaded": tier.blocks_loaded,
                "blocks_evicted": tier.blocks_evicted,
                "loaded_tokens": tokens,
                "hit_share": share(tokens as f64, prompt),
            });
            (tier.name.to_owned(), figures)
        });
        let held = caches.iter().filter_map(|(_, name, id)| {
            let held = self.engine.holdings(*id);
            let some = held.active_bytes + held.cached_bytes > 0;
            some.then(|| (name.clone(), (held.active_bytes, held.cached_bytes)))
        });
        let bytes_of = |held: &(u64, u64)| (held.0 + held.1) as f64;
        let held = most(held.collect(), bytes_of, |sum, other| *sum = (sum.0 + other.0, sum.1 + other.1));
        let tenants = held
            .into_iter()
            .map(|(name, (active, cached))| (name, json!({"active_bytes": active, "cached_bytes": cached})));
        json!({
            "bytes": {
                "free": bytes(now.free_blocks),
                "cached": now.cached_bytes(),
                "active": now.active_bytes(),
                "pinned": bytes(now.pinned_blocks),
            },
            "block_tokens": now.block_tokens,
            "usage": now.usage(),
            "waste": now.waste(),
            "tokens": {"computed": spent.computed_tokens, "cached": spent.cached_tokens, "loaded_from_tiers": loaded},
            "hit_share": share(spent.cached_tokens as f64, prompt),
            "evicted_blocks": evictions,
            "lifetime_s": lifetime,
            "tiers": tiers.collect::<Map<String, Value>>(),
            "tenants": tenants.collect::<Map<String, Value>>(),
            "contiguous": self.contiguous(),
            "unbounded": self.unbounded(),
        })
    }

    /// What those who run now would take if each had room for the longest sequence set aside in one piece, and how many could run at once.
    /// Windows and states take the same either way.
    fn contiguous(&self) -> Value {
        let cache = &self.end.cache;
        let each = self.context_tokens.div_ceil(cache.block_tokens.max(1));
        let others = cache.active_bytes() - u64::from(cache.active_blocks) * cache.bytes_per_block;
        let reserved = u64::from(self.end.running) * u64::from(each) * cache.bytes_per_block;
        json!({
            "sequence_tokens": self.context_tokens,
            "sequences": self.end.running,
            "bytes": reserved + others,
            "paged_bytes": cache.active_bytes(),
            "sequences_max": cache.blocks / each.max(1),
        })
    }

    /// What larger caches would hit.
    fn unbounded(&self) -> Value {
        let blocks = f64::from(self.end.cache.blocks);
        let left_out = self.prompts.left_out();
        self.prompts.found(self.end.at, |found| {
            let by_memory = [1.0, 1.5, 2.0, 4.0, 8.0]
                .map(|times| json!({"times": times, "hit_share": found.index.hits_with(times * blocks)}));
            json!({
                "hit_share": found.index.unbounded(),
                "found_share": found.index.found(),
                "by_memory": by_memory,
                "prompts_left_out": left_out,
            })
        })
    }

    /// The largest tier, where it is known how much each has room for, and that it is blocks of one size.
    fn tier(&self) -> Option<TierRoom> {
        let tiers = self.engine.tier_stats();
        let is_known = tiers.iter().all(|tier| tier.bytes_limit > 0 && tier.off.is_none());
        if !is_known || !self.end.cache.windows().is_empty() {
            return None;
        }
        let largest = tiers.iter().max_by_key(|tier| tier.bytes_limit)?;
        // It has evicted, and not only what was too old.
        let is_full = largest.blocks_evicted > 0 && largest.bytes >= largest.bytes_limit / 4 * 3;
        Some(TierRoom { name: largest.name, bytes: largest.bytes_limit, is_full })
    }

    fn step_evidence(&self) -> StepEvidence {
        let waiting =
            |reason| self.waiting.iter().find(|(of, _)| *of == reason).map_or(0.0, |(_, mean)| *mean);
        let (sequences_max, tokens_max) = self.engine.step_limits();
        StepEvidence {
            row_us: self.end.row_us,
            sequences_max,
            tokens_max,
            waiting_for_turn: waiting(WaitingFor::Turn),
            waiting_for_blocks: waiting(WaitingFor::Blocks),
            draft_tokens: self.end.drafts.0 - self.begin.drafts.0,
            ahead: self.end.steps_ahead - self.begin.steps_ahead,
            ..StepEvidence::of(|activity| (self.steps(activity), self.us(activity)))
        }
    }

    /// Share of the slots of blocks that were given up that was never written.
    fn waste(&self) -> Option<f64> {
        let (now, before) = (&self.end.cache, &self.begin.cache);
        let slots = now.closed_slots.saturating_sub(before.closed_slots);
        let written = now.closed_written_slots.saturating_sub(before.closed_written_slots);
        share(slots.saturating_sub(written) as f64, slots as f64)
    }

    fn evidence(&self, spent: &Spending) -> Evidence {
        let cache = &self.end.cache;
        Evidence {
            blocks: cache.blocks,
            block_tokens: cache.block_tokens,
            block_bytes: cache.bytes_per_block,
            has_windows: !cache.windows().is_empty(),
            evictions: cache.evictions.saturating_sub(self.begin.cache.evictions),
            waste: self.waste(),
            computed_tokens: spent.computed_tokens,
            prompt_s: seconds(spent.computed_us()),
            int8: self.config.int8_times,
            has_tier: !self.engine.tier_stats().is_empty(),
            tier: self.tier(),
            preemptions: self.end.preemptions - self.begin.preemptions,
            recomputed_tokens: self.end.recomputed_tokens - self.begin.recomputed_tokens,
            copy_bytes_per_s: self.config.roofline.as_ref().ok().map(|of| of.rates.copy_bytes_per_s),
            steps: self.step_evidence(),
        }
    }

    fn advice(&self, spent: &Spending) -> Vec<Value> {
        let evidence = self.evidence(spent);
        let name = |tenant| {
            let account = self.accounts.iter().find(|account| account.tenant == tenant)?;
            Some(account.name.to_string())
        };
        let all = self.prompts.found(self.end.at, |found| advise(found, &evidence, name));
        all.iter().map(|advice| advice.json(&evidence)).collect()
    }

    /// What concerns one tenant alone, without what is of others.
    fn own_advice(&self, account: &Account, spent: &Spending) -> Vec<Value> {
        let evidence = self.evidence(spent);
        let own = |tenant| (tenant == account.tenant).then(|| account.name.to_string());
        let all = self.prompts.found(self.end.at, |found| advise(found, &evidence, own));
        all.iter().filter(|advice| advice.is_a_clients()).map(Advice::told).collect()
    }

    /// Of one tenant, or of all together.
    fn cost(&self, spent: &Spending) -> Value {
        let price = |us: f64| self.config.price_per_hour.map(|price| seconds(us) / 3600.0 * price);
        let million = |us: f64, tokens: u64| price(us).and_then(|price| share(price * 1e6, tokens as f64));
        json!({
            "seconds": seconds(spent.us()),
            "prompt_s": seconds(spent.prompt_us),
            "cached_s": seconds(spent.cached_us),
            "output_s": seconds(spent.output_us),
            "share": share(spent.us(), self.passed_us()),
            "price": price(spent.us()),
            "computed_tokens": spent.computed_tokens,
            "cached_tokens": spent.cached_tokens,
            "output_tokens": spent.output_tokens,
            "per_million_computed": million(spent.computed_us(), spent.computed_tokens),
            "per_million_cached": million(spent.cached_us, spent.cached_tokens),
            "per_million_output": million(spent.output_us, spent.output_tokens),
            "spared_by_cache_s": share(spent.computed_us() * spent.cached_tokens as f64, spent.computed_tokens as f64).map(seconds),
        })
    }

    fn costs(&self, all: &Spending, each: &[(Arc<Account>, Spending)]) -> Value {
        let mut cost = self.cost(all);
        let unattributed = self.end.work.unattributed_us - self.begin.work.unattributed_us;
        let steps: u64 = Activity::ALL[..Activity::STEPS].iter().map(|activity| self.us(*activity)).sum();
        cost["price_per_hour"] = json!(self.config.price_per_hour);
        cost["steps_s"] = json!(seconds(steps as f64));
        cost["waiting_s"] = json!(seconds(self.us(Activity::Waiting) as f64));
        cost["idle_s"] = json!(seconds(self.us(Activity::Idle) as f64));
        // Of requests that ended while their rows were computed, and of steps that failed.
        cost["unattributed_s"] = json!(seconds(unattributed));
        // Told with the next event of who it falls to; and what was computed for no tenant.
        cost["untold_s"] = json!(seconds(steps as f64 - all.us() - unattributed));
        let some = each.iter().filter(|(_, spent)| *spent != Spending::default());
        let some = some.map(|(account, spent)| (account.name.to_string(), *spent));
        let tenants = most(some.collect(), Spending::us, Spending::add).into_iter();
        let tenants = tenants.map(|(name, spent)| (name, self.cost(&spent)));
        cost["tenants"] = tenants.collect::<Map<String, Value>>().into();
        cost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_limit_the_least_are_one_sum() {
        let all = (0..TENANTS_MAX + 10).map(|at| (format!("t{at}"), at as f64)).collect();
        let told = most(all, |of| *of, |sum, other| *sum += other);
        assert_eq!((told.len(), told[0].1), (TENANTS_MAX + 1, (TENANTS_MAX + 9) as f64));
        assert_eq!(told[TENANTS_MAX], (OTHERS.to_owned(), 45.0));
    }
}
