//! The outside of the engine: what the server holds. Cheap to clone; every method returns at once except `join`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use folio_kv::{BlockHashes, Holdings, Root, TenantId};
use folio_model::program::EmbeddingInput;
use rustc_hash::FxHashMap;

use crate::adapters::{Adapter, AdapterId, AdapterReport};
use crate::clock::Clock;
use crate::commands::{CacheCommand, CacheReply};
use crate::config::SchedulerConfig;
use crate::embeddings;
use crate::mailbox::{Mailbox, Phase, Refusal, Submission};
use crate::request::{CancelFlag, EventSink, Micros, Request, RequestId, SamplingParams};
use crate::stats::EngineStats;
use crate::tier::{self, Tier, TierStats};

/// Why a request was not taken. Nothing of it is kept.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejected {
    /// 429 with `Retry-After`.
    #[error(
        "the queue is full: {queued_requests} requests with {queued_tokens} prompt tokens are waiting; retry in {retry_after_s} s"
    )]
    QueueFull { queued_requests: u32, queued_tokens: u64, retry_after_s: u32 },
    /// 400.
    #[error(
        "the request needs {prompt_tokens} prompt tokens and up to {max_tokens} more, the model's context is {max_model_len}"
    )]
    TooLong { prompt_tokens: u32, max_tokens: u32, max_model_len: u32 },
    /// 400: it could never run on this machine, however long it waited.
    #[error("the request needs KV memory for {needed_tokens} tokens, the whole cache holds {cache_tokens}")]
    LargerThanCache { needed_tokens: u32, cache_tokens: u64 },
    /// 413: more than its tenant may ever hold, or can be sure to get beside the others' guarantees.
    #[error(
        "the request needs KV memory for {needed_tokens} tokens, the quota of its tenant allows {quota_tokens}"
    )]
    LargerThanQuota { needed_tokens: u32, quota_tokens: u64 },
    /// 400.
    #[error("n is {n}, at most {max} choices are possible")]
    TooManyChoices { n: u32, max: u32 },
    /// 400.
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },
    /// 503.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// 503.
    #[error("the engine cannot go on: {reason}")]
    Unhealthy { reason: Arc<str> },
}

/// Forward progress, not existence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Ok,
    /// Work is waiting, and for this long no token was computed and nothing ended otherwise than by the executor's failure.
    Stalled {
        for_us: u64,
    },
    Unhealthy {
        reason: Arc<str>,
    },
}

impl Health {
    /// `oldest`: when the oldest submission was posted that the engine has not taken.
    fn of(stats: &EngineStats, oldest: Option<Micros>, now: Micros, stall_us: u64) -> Self {
        if let Some(reason) = &stats.unhealthy {
            return Self::Unhealthy { reason: reason.clone() };
        }
        let (since, until) = match stats.busy {
            true => (Some(stats.last_progress.max(stats.busy_since)), stats.waits_until),
            false => (oldest, None),
        };
        let waits = until.is_some_and(|until| now <= until);
        match since.map(|since| now.0.saturating_sub(since.0)) {
            Some(for_us) if for_us > stall_us && !waits => Self::Stalled { for_us },
            _ => Self::Ok,
        }
    }
}

pub(crate) struct Shared {
    pub config: SchedulerConfig,
    /// Longest sequence that the pools can hold, each group counted.
    pub cache_tokens: u64,
    /// Tokens of one request of each tenant with a quota, and of any other.
    pub quota_tokens: (FxHashMap<TenantId, u64>, u64),
    pub vocab: u32,
    /// What requests may give in place of embeddings.
    pub embeddings: Option<EmbeddingInput>,
    pub block_tokens: u32,
    pub mailbox: Arc<Mailbox>,
    /// The nearest first.
    pub tiers: Vec<Arc<dyn Tier>>,
    pub stats: Mutex<Arc<EngineStats>>,
    /// What each tenant held until the cache forgot it. Locked before `stats`; the engine never waits for it.
    pub past: Mutex<FxHashMap<TenantId, Holdings>>,
    pub clock: Arc<dyn Clock>,
    pub next_id: AtomicU64,
}

struct EngineOwner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for EngineOwner {
    /// The last handle is gone: nobody can talk to the engine any more.
    fn drop(&mut self) {
        self.shared.mailbox.advance(Phase::Stopping);
    }
}

/// Talks to a running engine.
#[derive(Clone)]
pub struct EngineHandle(Arc<EngineOwner>);

impl EngineHandle {
    pub(crate) fn new(shared: Arc<Shared>, thread: JoinHandle<()>) -> Self {
        Self(Arc::new(EngineOwner { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// A fresh id for [`Request::id`].
    pub fn next_request_id(&self) -> RequestId {
        RequestId(self.0.shared.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// What identifies the blocks of a prompt, and which of them tiers have. O(prompt), and it may wait for a tier elsewhere, for a
    /// bounded time: not for an event loop.
    pub fn hashes(&self, root: &Root, prompt: &[u32]) -> BlockHashes {
        let hashes = BlockHashes::new(root, prompt, self.0.shared.block_tokens);
        self.find_stored(hashes, prompt.len())
    }

    /// The same of a request, which may give embeddings.
    pub fn hashes_of(&self, request: &Request) -> BlockHashes {
        self.find_stored(request.hashes(self.0.shared.block_tokens), request.prompt.len())
    }

    fn find_stored(&self, hashes: BlockHashes, tokens: usize) -> BlockHashes {
        let shared = &self.0.shared;
        if shared.tiers.is_empty() {
            return hashes;
        }
        // The last row must be computed.
        let most = tokens.saturating_sub(1) as u32 / shared.block_tokens;
        let stored = tier::find(&shared.tiers, &hashes, most);
        hashes.with_stored(stored)
    }

    /// Why a request would be refused now: before anything is done for it.
    pub fn check(&self, request: &Request) -> Result<(), Rejected> {
        let shared = &self.0.shared;
        check(shared, request)?;
        shared.mailbox.admits(request.queued_tokens()).map_err(|refusal| self.rejected(refusal))
    }

    /// Checks a request, hashes its prompt, and hands it to the engine: see [`EngineHandle::submit_hashed`].
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<CancelFlag, Rejected> {
        self.check(&request)?;
        let hashes = self.hashes_of(&request);
        self.submit_hashed(request, hashes, sink)
    }

    /// Hands a request to the engine, or says why not. From here on the sink gets exactly one `Finished` per choice. `hashes`: those of
    /// its root, prompt and embeddings ([`EngineHandle::hashes_of`]).
    pub fn submit_hashed(
        &self,
        request: Request,
        hashes: BlockHashes,
        sink: Box<dyn EventSink>,
    ) -> Result<CancelFlag, Rejected> {
        let shared = &self.0.shared;
        check(shared, &request)?;
        if !embeddings::are_hashed(request.embeddings(), hashes.ranges()) {
            let reason = "are not those that its blocks' hashes were made with".to_owned();
            return Err(Rejected::Invalid { field: "embeddings", reason });
        }
        let id = request.id;
        let posted = shared.mailbox.post(Submission { request, hashes, sink }, shared.clock.now());
        posted.map_err(|refusal| self.rejected(refusal))?;
        Ok(CancelFlag::new(shared.mailbox.clone(), id))
    }

    /// Whether [`EngineHandle::hashes`] may wait for a tier.
    pub fn asks_a_tier(&self) -> bool {
        !self.0.shared.tiers.is_empty()
    }

    /// Tokens of a block, and between two hashes.
    pub fn block_tokens(&self) -> u32 {
        self.0.shared.block_tokens
    }

    /// Gives the engine the weights of an adapter that requests may name, which it keeps where there is room: elsewhere they are read when a
    /// request wants them.
    pub fn keep_adapter(&self, id: AdapterId, weights: Arc<Adapter>) {
        self.0.shared.mailbox.report_adapter(AdapterReport { id, weights: Ok(weights) });
    }

    /// Asks something of the cache. Answered at the end of the step in progress.
    pub fn command(&self, command: CacheCommand, reply: CacheReply) -> Result<(), Rejected> {
        self.0.shared.mailbox.command(command, reply).map_err(|refusal| self.rejected(refusal))
    }

    fn rejected(&self, refusal: Refusal) -> Rejected {
        match refusal {
            Refusal::Closed => Rejected::ShuttingDown,
            Refusal::Unhealthy(reason) => Rejected::Unhealthy { reason },
            Refusal::Full(queued) => Rejected::QueueFull {
                queued_requests: queued.requests,
                queued_tokens: queued.tokens,
                retry_after_s: self.retry_after_s(),
            },
        }
    }

    /// Seconds until the queue is likely to have room: half of its prompt tokens at the measured rate.
    pub fn retry_after_s(&self) -> u32 {
        let rate = self.stats().prefill_tokens_per_s;
        let queued = self.0.shared.mailbox.queued();
        if rate <= 0.0 {
            return 1;
        }
        (queued.tokens as f64 / 2.0 / rate).ceil().clamp(1.0, 120.0) as u32
    }

    /// Figures at the end of the last step. Cheap: clones an `Arc`.
    pub fn stats(&self) -> Arc<EngineStats> {
        self.0.shared.stats.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Of what keeps KV off the device, the nearest first.
    pub fn tier_stats(&self) -> Vec<TierStats> {
        self.0.shared.tiers.iter().map(|tier| tier.stats()).collect()
    }

    /// Memory that a tenant holds and has held since the start; its integrals only grow.
    pub fn holdings(&self, tenant: TenantId) -> Holdings {
        let past = self.0.shared.past.lock().unwrap_or_else(PoisonError::into_inner);
        let mut holdings = self.stats().holdings(tenant);
        holdings.carry(&past.get(&tenant).copied().unwrap_or_default());
        holdings
    }

    /// Forgets the past of tenants that are no more. O(tenants that the cache forgot).
    pub fn retain_tenants(&self, stays: &dyn Fn(TenantId) -> bool) {
        let mut past = self.0.shared.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.retain(|tenant, _| stays(*tenant));
        past.shrink_to_fit();
    }

    /// Fails when work is waiting and there has been no progress for `stall_us`, unless all of it may wait longer.
    pub fn health(&self, stall_us: u64) -> Health {
        Health::of(&self.stats(), self.0.shared.mailbox.oldest(), self.now(), stall_us)
    }

    /// The engine's time, for deadlines.
    pub fn now(&self) -> Micros {
        self.0.shared.clock.now()
    }

    pub fn config(&self) -> &SchedulerConfig {
        &self.0.shared.config
    }

    /// Refuses new requests, finishes the rest, then the engine's thread ends.
    pub fn drain(&self) {
        self.0.shared.mailbox.advance(Phase::Draining);
    }

    /// Refuses new requests and ends all others with `Finished { Error }` after the step in progress.
    pub fn stop(&self) {
        self.0.shared.mailbox.advance(Phase::Stopping);
    }

    /// Whether the engine's thread has ended.
    pub fn is_finished(&self) -> bool {
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_none_or(|thread| thread.is_finished())
    }

    /// Waits for the engine's thread to end, after [`EngineHandle::drain`] or [`EngineHandle::stop`].
    pub fn join(&self) {
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The loop catches the executor's panics; one of its own was already reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// Refuses what can never run or makes no sense, before it takes a place in the queue.
fn check(shared: &Shared, request: &Request) -> Result<(), Rejected> {
    let config = &shared.config;
    let invalid = |field, reason: String| Err(Rejected::Invalid { field, reason });
    if request.prompt.is_empty() {
        return invalid("prompt", "is empty".into());
    }
    if let Some(token) = request.prompt.iter().find(|token| **token >= shared.vocab) {
        return invalid("prompt", format!("token id {token} is not in the vocabulary of {}", shared.vocab));
    }
    if let Some(speculation) = &request.speculation {
        if !speculation.is_of(&request.prompt) {
            return invalid("speculation", "is of another prompt".into());
        }
        if let Some(token) = speculation.prediction().iter().find(|token| **token >= shared.vocab) {
            let reason = format!("token id {token} is not in the vocabulary of {}", shared.vocab);
            return invalid("prediction", reason);
        }
        if speculation.prediction().len() as u64 > u64::from(config.max_model_len) {
            let (tokens, most) = (speculation.prediction().len(), config.max_model_len);
            return invalid("prediction", format!("has {tokens} tokens, the model's context is {most}"));
        }
    }
    if request.n == 0 {
        return invalid("n", "must be at least 1".into());
    }
    if request.n > config.max_choices {
        return Err(Rejected::TooManyChoices { n: request.n, max: config.max_choices });
    }
    if let Some(adapter) = &request.adapter {
        let (bytes, most) = (adapter.source.bytes(), config.max_adapter_bytes);
        if config.max_adapters == 0 {
            return invalid("adapter", "names one, and none is served".into());
        }
        if bytes > most {
            let reason = format!("has weights of {bytes} bytes, and all in memory may have {most}");
            return invalid("adapter", reason);
        }
    }
    let alone = request.n == 1 && request.sampling.max_tokens == 0 && request.prompt_logprobs.is_none();
    if request.pooling.is_some() && !alone {
        return invalid("pooling", "has one choice, no tokens and no logprobs".into());
    }
    let (prompt, max_tokens) = (request.prompt.len() as u64, u64::from(request.sampling.max_tokens));
    if prompt + max_tokens > u64::from(config.max_model_len) {
        return Err(Rejected::TooLong {
            prompt_tokens: u32::try_from(prompt).unwrap_or(u32::MAX),
            max_tokens: request.sampling.max_tokens,
            max_model_len: config.max_model_len,
        });
    }
    let needed = (prompt + max_tokens).saturating_sub(1).max(prompt);
    if needed > shared.cache_tokens {
        return Err(Rejected::LargerThanCache {
            needed_tokens: needed as u32,
            cache_tokens: shared.cache_tokens,
        });
    }
    let (quotas, others) = &shared.quota_tokens;
    let quota_tokens = quotas.get(&request.root.tenant).copied().unwrap_or(*others);
    if needed > quota_tokens {
        return Err(Rejected::LargerThanQuota { needed_tokens: needed as u32, quota_tokens });
    }
    embeddings::check(request, config.max_model_len, shared.embeddings)
        .map_err(|reason| Rejected::Invalid { field: "embeddings", reason })?;
    check_sampling(&request.sampling, shared.vocab)
}

fn check_sampling(params: &SamplingParams, vocab: u32) -> Result<(), Rejected> {
    let number = |field: &'static str, value: f32, range: std::ops::RangeInclusive<f32>| {
        let (least, most) = (*range.start(), *range.end());
        if range.contains(&value) {
            return Ok(());
        }
        Err(Rejected::Invalid { field, reason: format!("{value} is not within {least} to {most}") })
    };
    number("temperature", params.temperature, 0.0..=1e4)?;
    number("top_p", params.top_p, f32::MIN_POSITIVE..=1.0)?;
    number("min_p", params.min_p, 0.0..=1.0)?;
    number("presence_penalty", params.presence_penalty, -1e4..=1e4)?;
    number("frequency_penalty", params.frequency_penalty, -1e4..=1e4)?;
    number("repetition_penalty", params.repetition_penalty, 1e-4..=1e4)?;
    let invalid = |field, reason: String| Err(Rejected::Invalid { field, reason });
    if params.min_tokens > params.max_tokens {
        return invalid(
            "min_tokens",
            format!("{} exceeds max_tokens {}", params.min_tokens, params.max_tokens),
        );
    }
    if !params.logit_bias.is_sorted_by(|a, b| a.0 < b.0) {
        return invalid("logit_bias", "must be sorted by token id, each id once".into());
    }
    for (token, bias) in params.logit_bias.iter() {
        if *token >= vocab {
            return invalid("logit_bias", format!("token id {token} is not in the vocabulary of {vocab}"));
        }
        number("logit_bias", *bias, -1e4..=1e4)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_within_a_limit_is_healthy_until_it() {
        let waiting = EngineStats {
            busy: true,
            busy_since: Micros(10),
            last_progress: Micros(20),
            waits_until: Some(Micros(500)),
            ..EngineStats::default()
        };
        let health = |stats: &EngineStats, now| Health::of(stats, None, Micros(now), 100);
        assert_eq!(health(&waiting, 120), Health::Ok);
        assert_eq!(health(&waiting, 500), Health::Ok);
        assert_eq!(health(&waiting, 501), Health::Stalled { for_us: 481 });
        let computing = EngineStats { waits_until: None, ..waiting };
        assert_eq!(health(&computing, 121), Health::Stalled { for_us: 101 });
        let idle = EngineStats { busy: false, ..computing };
        assert_eq!(health(&idle, 1_000_000), Health::Ok);
        let deaf = Health::of(&idle, Some(Micros(300)), Micros(401), 100);
        assert_eq!(deaf, Health::Stalled { for_us: 101 }, "nobody takes what is posted");
    }
}
