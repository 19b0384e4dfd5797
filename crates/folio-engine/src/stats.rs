//! What the engine says about itself: a snapshot of plain figures, taken after every step.
//!
//! Counters only grow; gauges are exact at the end of the last step. The server turns them into metrics.

use std::ops::{Index, IndexMut};

use folio_kv::{CacheStats, Holdings, TenantId};

use crate::config::SchedulerConfig;
use crate::drafting::{DRAFTS_MAX, Drafter};
use crate::request::{AdapterId, FinishReason, Micros};
use crate::tier::TIERS_MAX;
use crate::work::Work;

/// Why a sequence is not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitingFor {
    /// Its turn: nobody refused it yet, the budget or the slots went to others.
    Turn,
    /// KV blocks: the pool cannot hold it and what is already promised.
    Blocks,
    /// Another sequence is computing a prefix of it.
    SharedPrefix,
    /// Its KV is on its way from a tier.
    TierLoad,
    /// Which tokens its grammar allows next is being computed.
    Grammar,
    /// Another engine computes its prompt. Nothing produces this yet but the simulator.
    RemotePrefill,
    /// The weights of its adapter are being read.
    Adapter,
}

impl WaitingFor {
    /// In the order of a [`PerReason`].
    pub const ALL: [Self; 7] = [
        Self::Turn,
        Self::Blocks,
        Self::SharedPrefix,
        Self::TierLoad,
        Self::Grammar,
        Self::RemotePrefill,
        Self::Adapter,
    ];

    /// As metrics call it; `capacity` is vLLM's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Blocks => "capacity",
            Self::SharedPrefix => "shared_prefix",
            Self::TierLoad => "tier_load",
            Self::Grammar => "grammar",
            Self::RemotePrefill => "remote_prefill",
            Self::Adapter => "adapter",
        }
    }

    /// Something outside the engine's steps, which ends with a report or at a deadline: until then nothing is planned for it.
    pub fn is_outside(self) -> bool {
        matches!(self, Self::TierLoad | Self::Grammar | Self::RemotePrefill | Self::Adapter)
    }

    /// How long who began to wait at `since` may go without being computed; then it is computed without what it waited for, or ends
    /// with an error where it cannot be. `None`: its turn comes with the progress of others.
    pub fn until(self, since: Micros, config: &SchedulerConfig) -> Option<Micros> {
        let wait_us = match self {
            Self::Turn | Self::Blocks => return None,
            Self::SharedPrefix => config.shared_prefix_wait_us_max,
            Self::TierLoad => config.tier_load_wait_us_max,
            Self::Grammar => config.grammar_wait_us_max,
            Self::RemotePrefill => config.remote_prefill_wait_us_max,
            Self::Adapter => config.adapter_wait_us_max,
        };
        Some(Micros(since.0.saturating_add(wait_us)))
    }
}

/// A figure for each reason to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerReason<T>([T; WaitingFor::ALL.len()]);

impl<T: Copy> PerReason<T> {
    pub fn iter(&self) -> impl Iterator<Item = (WaitingFor, T)> {
        WaitingFor::ALL.into_iter().zip(self.0)
    }
}

impl PerReason<u32> {
    pub fn total(&self) -> u32 {
        self.0.iter().sum()
    }
}

impl<T> Index<WaitingFor> for PerReason<T> {
    type Output = T;
    fn index(&self, reason: WaitingFor) -> &T {
        &self.0[reason as usize]
    }
}

impl<T> IndexMut<WaitingFor> for PerReason<T> {
    fn index_mut(&mut self, reason: WaitingFor) -> &mut T {
        &mut self.0[reason as usize]
    }
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Sequences with drafts, in all steps.
    pub sequences: u64,
    /// Drafts that were verified.
    pub tokens: u64,
    /// Those of them that were what was chosen, and by place.
    pub accepted: u64,
    pub accepted_by_place: [u64; DRAFTS_MAX as usize],
}

impl DraftCounts {
    /// The draft at this place, from 0, was what was chosen.
    pub(crate) fn accept(&mut self, place: usize) {
        self.accepted += 1;
        self.accepted_by_place.get_mut(place).into_iter().for_each(|accepted| *accepted += 1);
    }
}

/// What became of loads that began while their request waited in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchCounts {
    pub begun: u64,
    /// Everything arrived before the request was admitted; was under way when it was; or was given up: its request ended, somebody
    /// lacked blocks, it was late, or something did not arrive. Those under way are in none.
    pub completed: u64,
    pub admitted: u64,
    pub aborted: u64,
    /// Tokens that arrived before admission.
    pub tokens: u64,
}

/// What a load of a tier takes: a latency, and its bytes by the bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadCost {
    pub latency_us: f64,
    pub us_per_byte: f64,
}

impl LoadCost {
    /// Of so many bytes, microseconds.
    pub fn us(&self, bytes: f64) -> f64 {
        self.latency_us + bytes * self.us_per_byte
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
    /// Drafts, by where they come from: by [`Drafter`] as a number.
    pub drafts: [DraftCounts; Drafter::ALL.len()],
    /// Tokens that rules left alone and that were verified ahead of time, and those of them that were chosen.
    pub forced_tokens: u64,
    pub accepted_forced_tokens: u64,
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
    /// Of `preemptions`, those whose blocks a tier was given to keep.
    pub preemptions_swapped: u64,
    /// Loads that each tier ended, those of them that brought nothing, and the tokens that need not be computed thanks to the others.
    pub tier_loads: [u64; TIERS_MAX],
    pub failed_tier_loads: [u64; TIERS_MAX],
    pub tier_tokens: [u64; TIERS_MAX],
    /// Parts of prompts that each tier had and the device lacked: those that were ordered, and those that computing was faster for.
    pub taken_offers: [u64; TIERS_MAX],
    pub declined_offers: [u64; TIERS_MAX],
    /// Tokens that need not be computed thanks to loads, those of tiers and of whoever else fills blocks.
    pub loaded_tokens: u64,
    pub prefetches: PrefetchCounts,
    /// Blocks that tiers lack and were not given, for what is like them is seldom wanted again.
    pub unstored_blocks: u64,
    /// Blocks that tiers were to be given and were not: they were gone before their turn, or what was before them was not kept.
    pub missed_blocks: u64,
    /// Tokens computed a second time because of preemptions.
    pub recomputed_tokens: u64,
    /// Times a sequence began to wait for something else than its turn, and how many of those waits ended at their deadline.
    pub waits: PerReason<u64>,
    pub waits_expired: PerReason<u64>,
    /// Rows whose mask was not there when their token was to be chosen: computed again.
    pub late_rows: u64,
    /// Weights of adapters that were read because a sequence was to run with them, and those of them that could not be.
    pub adapter_loads: u64,
    pub failed_adapter_loads: u64,
    /// Adapters that made room in memory for others.
    pub adapter_evictions: u64,
    pub requests_received: u64,
    /// Choices finished, by [`FinishReason`] as a number.
    pub finished: [u64; FinishReason::Error as usize + 1],
    /// Steps that the executor could not compute.
    pub executor_failures: u64,
}

impl Counters {
    /// Drafts that were verified, and those of them that were what was chosen.
    pub fn draft_tokens(&self) -> (u64, u64) {
        let add = |(all, accepted), of: &DraftCounts| (all + of.tokens, accepted + of.accepted);
        self.drafts.iter().fold((0, 0), add)
    }
}

/// Of [`EngineStats::prefill_us`].
pub const PREFILL_TOKENS: u32 = 1024;

/// Everything at the end of the last step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests accepted and not yet scheduled for the first time, those in the mailbox included.
    pub queued_requests: u32,
    pub queued_tokens: u64,
    /// Sequences that are computed.
    pub running: u32,
    /// Those that are not, by what they wait for.
    pub waiting: PerReason<u32>,
    pub counters: Counters,
    pub work: Work,
    pub cache: CacheStats,
    /// Those that are in use, and how many different ones may be in a step.
    pub adapters: Vec<AdapterId>,
    pub max_adapters: u32,
    /// Adapters in memory or being read, and their bytes.
    pub resident_adapters: u32,
    pub adapter_bytes: u64,
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
    /// What loads of each tier take, and computing the first [`PREFILL_TOKENS`] of a prompt, microseconds, by which it is decided what is
    /// loaded. `None` and 0: not measured.
    pub load_costs: [Option<LoadCost>; TIERS_MAX],
    pub prefill_us: f64,
    /// Microseconds that a row of a prompt is measured to take, and each position that it sees; 0 before the first.
    pub row_us: (f64, f64),
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
    /// Of one tenant, since the cache forgot it last.
    pub(crate) fn holdings(&self, tenant: TenantId) -> Holdings {
        let at = self.tenants.binary_search_by_key(&tenant, |(tenant, _)| *tenant);
        at.map(|at| self.tenants[at].1).unwrap_or_default()
    }
}
