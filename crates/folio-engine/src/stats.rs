//! What the engine says about itself: a snapshot of plain figures, taken after every step.
//!
//! Counters only grow; gauges are exact at the end of the last step. The server turns them into metrics.

use folio_kv::{CacheStats, Holdings, TenantId};

use crate::config::SchedulerConfig;
use crate::request::Micros;

/// Why a sequence is not computed. Each reason is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitingFor {
    /// Its turn: nobody refused it yet, the budget or the slots went to others.
    Turn,
    /// KV blocks: the pool cannot hold it and what is already promised.
    Blocks,
    /// Another sequence is computing a prefix of it.
    SharedPrefix { leader: crate::plan::SequenceId },
    /// Blocks are on their way to or from another tier.
    TierLoad,
    /// Its grammar is being compiled. Nothing produces this yet.
    Grammar,
    /// Another machine computes its prompt. Nothing produces this yet.
    RemotePrefill,
}

impl WaitingFor {
    /// How long who began to wait at `since` may go without being computed; then it is computed without what it waited for, or ends.
    /// `None`: its turn comes with the progress of others.
    pub fn until(self, since: Micros, config: &SchedulerConfig) -> Option<Micros> {
        match self {
            Self::SharedPrefix { .. } => Some(Micros(since.0 + config.shared_prefix_wait_us_max)),
            Self::Turn | Self::Blocks | Self::TierLoad | Self::Grammar | Self::RemotePrefill => None,
        }
    }
}

/// Sequences by what they wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitingCounts {
    pub turn: u32,
    pub blocks: u32,
    pub shared_prefix: u32,
    pub tier_load: u32,
    pub grammar: u32,
    pub remote_prefill: u32,
}

impl WaitingCounts {
    /// The count of those that wait for `reason`.
    pub(crate) fn of(&mut self, reason: WaitingFor) -> &mut u32 {
        match reason {
            WaitingFor::Turn => &mut self.turn,
            WaitingFor::Blocks => &mut self.blocks,
            WaitingFor::SharedPrefix { .. } => &mut self.shared_prefix,
            WaitingFor::TierLoad => &mut self.tier_load,
            WaitingFor::Grammar => &mut self.grammar,
            WaitingFor::RemotePrefill => &mut self.remote_prefill,
        }
    }

    pub fn total(&self) -> u32 {
        self.turn + self.blocks + self.shared_prefix + self.tier_load + self.grammar + self.remote_prefill
    }
}

/// Counters of the scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps that computed something.
    pub steps: u64,
    /// Steps that were planned while the one before ran.
    pub steps_ahead: u64,
    /// Rows of steps under way whose sequence had ended when they were committed.
    pub orphan_rows: u64,
    /// Drafts that were verified, and those of them that were what was chosen.
    pub draft_tokens: u64,
    pub accepted_draft_tokens: u64,
    /// Tokens computed in all steps (prompt, generated and recomputed).
    pub iteration_tokens: u64,
    /// Prompt tokens of requests whose prompt is done, cached ones included. Equals the sum of `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// Of `prompt_tokens`, those from the prefix cache. Equals the sum of `cached_tokens` in the responses.
    pub cached_prompt_tokens: u64,
    /// Tokens delivered. Equals the sum of `usage.completion_tokens`.
    pub generation_tokens: u64,
    /// Sequences that lost their blocks.
    pub preemptions: u64,
    /// Of `preemptions`, those whose sequence kept a copy in host memory.
    pub preemptions_swapped: u64,
    /// Bytes of KV copied to host memory and back.
    pub swapped_out_bytes: u64,
    pub swapped_in_bytes: u64,
    /// Tokens computed a second time because of preemptions.
    pub recomputed_tokens: u64,
    /// Times a sequence began to wait for a shared prefix, and tokens it did not have to compute thanks to that.
    pub shared_prefix_waits: u64,
    pub shared_prefix_tokens: u64,
    /// Times a sequence began to wait for blocks.
    pub block_waits: u64,
    pub requests_received: u64,
    /// Choices finished, by reason.
    pub finished_stop: u64,
    pub finished_length: u64,
    pub finished_cancelled: u64,
    pub finished_deadline: u64,
    pub finished_error: u64,
    /// Steps that the executor could not compute.
    pub executor_failures: u64,
}

impl Counters {
    /// Choices that ended without an error.
    pub fn finished_otherwise(&self) -> u64 {
        self.finished_stop + self.finished_length + self.finished_cancelled + self.finished_deadline
    }
}

/// Everything at the end of the last step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests accepted and not yet scheduled for the first time, those in the mailbox included.
    pub queued_requests: u32,
    pub queued_tokens: u64,
    /// Sequences that hold blocks.
    pub running: u32,
    /// Sequences that hold none, by reason.
    pub waiting: WaitingCounts,
    pub counters: Counters,
    pub cache: CacheStats,
    /// Tokens computed in the last step, and how many of them were decodes.
    pub last_step_tokens: u32,
    pub last_step_decodes: u32,
    /// How long the last step took.
    pub last_step_us: u64,
    /// When a token was last computed, or a choice ended otherwise than by the executor's failure.
    pub last_progress: Micros,
    /// There was nothing to compute, and until then there need not be: the first limit of those who wait.
    pub waits_until: Option<Micros>,
    /// Measured rate of prompt computation, tokens per second, smoothed; 0 before the first.
    pub prefill_tokens_per_s: f64,
    /// Something is running or waiting, and since when without interruption.
    pub busy: bool,
    pub busy_since: Micros,
    /// Set when the executor can no longer be trusted; nothing is accepted any more.
    pub unhealthy: Option<std::sync::Arc<str>>,
    /// Memory held, and for how long, by tenants that the cache has not forgotten, ascending. Until something changes,
    /// [`Holdings::at`] brings it up to any later time. Refreshed less often than the rest while the engine is busy.
    pub tenants: std::sync::Arc<Vec<(TenantId, Holdings)>>,
    /// What tenants held until the cache forgot them, together; one by one, see [`crate::EngineHandle::holdings`].
    pub retired: Holdings,
}

impl EngineStats {
    /// Share of the fullest pool held by sequences, 0..=1.
    pub fn kv_usage(&self) -> f64 {
        self.cache.usage()
    }

    /// Of one tenant, since the cache forgot it last.
    pub(crate) fn holdings(&self, tenant: TenantId) -> Holdings {
        let at = self.tenants.binary_search_by_key(&tenant, |(tenant, _)| *tenant);
        at.map(|at| self.tenants[at].1).unwrap_or_default()
    }
}
