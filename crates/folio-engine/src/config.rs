//! Limits of the engine. Everything that could grow has one.

use folio_kv::{CacheConfig, PinLimits, TenantId};

/// Largest weight of a tenant: more would be a share of nothing for the others.
pub const TENANT_WEIGHT_MAX: u32 = 1000;

/// Who may join those that run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// Whoever there is room for, in any step.
    #[default]
    Continuous,
    /// Static batching, to compare with: whoever there is room for when nobody runs, as many as that step has tokens for, and nobody else
    /// until all of them have ended. Who was preempted comes with the next batch.
    Static,
}

/// How the scheduler divides steps, blocks and patience.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Sequences that may hold blocks at once.
    pub max_num_seqs: u32,
    /// Tokens one step may compute. At least `max_num_seqs`, so that every decode fits into every step.
    pub max_num_batched_tokens: u32,
    /// Prompt tokens one step may compute while some sequence is decoding. A step lasts as long as its tokens take, and
    /// everybody who streams waits for its end: this bounds the gap between two tokens of a stream. When nobody decodes
    /// the whole budget goes to prompts.
    pub max_prefill_tokens_while_decoding: u32,
    /// Prompt and generated tokens of one sequence.
    pub max_model_len: u32,
    /// Requests, and prompt tokens of theirs, that may wait to be scheduled for the first time. A value of an embedding that a request
    /// gives counts as a token.
    pub max_queued_requests: u32,
    pub max_queued_tokens: u64,
    /// Most choices of one request.
    pub max_choices: u32,
    /// Share of the pool (in thousandths) that admission leaves free on top of what is needed.
    pub watermark_permille: u32,
    /// Next tokens of every running sequence that admission leaves room for at least. More means fewer preemptions and a pool less used.
    pub headroom_tokens: u32,
    /// After this many preemptions a sequence is admitted only when all blocks it may ever need can be reserved for it,
    /// and it is never preempted again. So every sequence is preempted a bounded number of times.
    pub max_preemptions: u32,
    /// Sequences behind one that waits for blocks that may be admitted before it; then nobody passes it any more.
    pub max_bypasses: u32,
    /// Admit only what fits even if everybody generates up to max_tokens, and set it aside: nobody is ever preempted, not
    /// even for better priority, which comes first among those that wait. Uses the pool less.
    pub guarantee_completion: bool,
    pub admission: AdmissionPolicy,
    /// Longest wait for a prefix that another sequence is computing; then it is computed twice.
    pub shared_prefix_wait_us_max: u64,
    /// Longest wait for KV from another tier, and for a prompt that another engine computes; then it is computed here.
    pub tier_load_wait_us_max: u64,
    pub remote_prefill_wait_us_max: u64,
    /// Longest wait for what a grammar allows next, and for the weights of an adapter; then the request ends with an error. A mask is
    /// bounded by fuel to some 10 ms, so longer means that the machine is stuck.
    pub grammar_wait_us_max: u64,
    pub adapter_wait_us_max: u64,
    /// Adapters that a step may use, vLLM's `max_loras`: sequences of others wait for one whose last sequence ends. 0: none is served.
    pub max_adapters: u32,
    /// Adapters whose weights may be in memory, vLLM's `max_cpu_loras`, and their bytes: those of others are read when a sequence is to run
    /// with them.
    pub max_resident_adapters: u32,
    pub max_adapter_bytes: u64,
    /// Bytes of blocks that transfers from outside may be writing at once, until they report, whoever still waits for them.
    pub max_transfer_bytes: u64,
    /// Bytes of blocks that each tier may hold up until it has read what it is to store; one piece of one sequence in any case.
    pub max_store_bytes: u64,
    /// Requests at the head of the queue whose loads from tiers may begin while they wait; 0: none. And of `max_transfer_bytes` what
    /// those loads may be writing at once.
    pub max_prefetch_requests: u32,
    pub max_prefetch_bytes: u64,
    /// Share of the pool (in thousandths) that may be pinned by all tenants, and by one. Less where the longest request
    /// needs the rest: whatever is pinned, every request that is accepted can run.
    pub pin_permille: u32,
    pub tenant_pin_permille: u32,
    /// A tenant's share of what several tenants of one priority class want at once; 1 for a tenant that is not listed.
    pub tenant_weights: Vec<(TenantId, u32)>,
    /// What a generated token counts in that, a prompt token being 1 (a cached one 0).
    pub generated_token_weight: u32,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_prefill_tokens_while_decoding: 64,
            max_model_len: 2048,
            max_queued_requests: 1024,
            max_queued_tokens: 4 << 20,
            max_choices: 16,
            watermark_permille: 10,
            headroom_tokens: 64,
            max_preemptions: 3,
            max_bypasses: 32,
            guarantee_completion: false,
            admission: AdmissionPolicy::default(),
            shared_prefix_wait_us_max: 60_000_000,
            tier_load_wait_us_max: 5_000_000,
            remote_prefill_wait_us_max: 60_000_000,
            grammar_wait_us_max: 5_000_000,
            adapter_wait_us_max: 60_000_000,
            max_adapters: 0,
            max_resident_adapters: u32::MAX,
            max_adapter_bytes: u64::MAX,
            max_transfer_bytes: 1 << 30,
            max_store_bytes: u64::MAX,
            max_prefetch_requests: 8,
            max_prefetch_bytes: 1 << 28,
            pin_permille: 250,
            tenant_pin_permille: 250,
            tenant_weights: Vec::new(),
            generated_token_weight: 2,
        }
    }
}

/// A limit that contradicts another.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{name} must be at least 1")]
    Zero { name: &'static str },
    #[error(
        "max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): every decode gets its token in every step"
    )]
    BudgetBelowSequences { tokens: u32, seqs: u32 },
    #[error("the weight of tenant {tenant} is {weight}, it must be 1 to {TENANT_WEIGHT_MAX}")]
    Weight { tenant: u32, weight: u32 },
}

impl SchedulerConfig {
    /// What of a pool may be pinned.
    pub fn pin_limits(&self, cache: &CacheConfig) -> PinLimits {
        let longest = self.max_model_len.div_ceil(cache.block_tokens);
        let most = cache.blocks.saturating_sub(longest);
        let share = |permille: u32| {
            let blocks = u64::from(cache.blocks) * u64::from(permille.min(1000)) / 1000;
            most.min(blocks as u32)
        };
        PinLimits { pool: share(self.pin_permille), tenant: share(self.tenant_pin_permille) }
    }

    pub fn validate(&self) -> Result<(), ConfigError> {
        for (name, value) in [
            ("max_num_seqs", u64::from(self.max_num_seqs)),
            ("max_num_batched_tokens", u64::from(self.max_num_batched_tokens)),
            ("max_prefill_tokens_while_decoding", u64::from(self.max_prefill_tokens_while_decoding)),
            ("max_model_len", u64::from(self.max_model_len)),
            ("max_queued_requests", u64::from(self.max_queued_requests)),
            ("max_queued_tokens", self.max_queued_tokens),
            ("max_choices", u64::from(self.max_choices)),
            ("max_resident_adapters", u64::from(self.max_resident_adapters)),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { name });
            }
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            let (tokens, seqs) = (self.max_num_batched_tokens, self.max_num_seqs);
            return Err(ConfigError::BudgetBelowSequences { tokens, seqs });
        }
        let wrong = |weight: u32| !(1..=TENANT_WEIGHT_MAX).contains(&weight);
        if let Some((tenant, weight)) = self.tenant_weights.iter().find(|(_, weight)| wrong(*weight)) {
            return Err(ConfigError::Weight { tenant: tenant.0, weight: *weight });
        }
        Ok(())
    }
}
