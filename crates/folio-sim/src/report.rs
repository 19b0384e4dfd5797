//! What happened in a run.
//!
//! Owns: counts, so that a test can say that there was trouble enough. Must never: be read by what is simulated.

use folio_engine::{PerReason, PrefetchCounts, Scheduler, WaitingFor};
use folio_kv::CacheStats;

/// What a draft model did that has states or windows beside K and V of all positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrafterCounts {
    /// Times that it went on from a state; of those, for a sequence that it had computed nothing of, from the state behind a draft that was right,
    /// and from before what it had computed.
    pub states: u64,
    pub others_states: u64,
    pub drafts_states: u64,
    pub taken_back: u64,
    /// Times that it went on where it has a window.
    pub windows: u64,
    /// Full blocks of any of its groups that are found at the end.
    pub found_blocks: u64,
}

/// What happened in a run, for statistics over many of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunReport {
    pub steps: u64,
    pub requests: u64,
    pub tokens: u64,
    pub preemptions: u64,
    /// Of those, given to a tier to keep; what it kept as a whole, in part, and not at all; and blocks of all that which were loaded.
    pub preemptions_swapped: u64,
    pub kept_whole: u64,
    pub kept_in_part: u64,
    pub not_kept: u64,
    pub kept_blocks_loaded: u64,
    pub recomputed_tokens: u64,
    pub cached_tokens: u64,
    /// Times sequences began to wait, by reason, and waits that ended at their deadline.
    pub waits: PerReason<u64>,
    pub waits_expired: PerReason<u64>,
    /// Weights of adapters that were read, those that could not be, and those that made room for others.
    pub adapter_loads: u64,
    pub failed_adapter_loads: u64,
    pub adapter_evictions: u64,
    /// Rows whose mask was late, and reports of requests that had ended.
    pub late_rows: u64,
    pub late_reports: u64,
    /// Readers with a lease, leases that were lost, and of those the readers who saw other content.
    pub leases: u64,
    pub lost_leases: u64,
    pub torn_reads: u64,
    /// Transfers into tables; those whose content was taken, that arrived damaged, and that reported after their table was gone; turns
    /// in which somebody was refused blocks while such a one was under way.
    pub transfers: u64,
    pub loaded_transfers: u64,
    pub damaged_transfers: u64,
    pub late_transfers: u64,
    pub wanted_late_slots: u64,
    /// Transfers into tables of sequences; those of them that began with something left to compute before them, and those whose
    /// content was taken.
    pub sequence_transfers: u64,
    /// Deaths of an engine; requests that it owed answers, those of them that were asked again, blocks that tiers gave up meanwhile, and those
    /// that they had stored before and were loaded behind it.
    pub crashes: u64,
    pub lost_requests: u64,
    pub repeated_requests: u64,
    pub reclaimed_blocks: u64,
    pub recovered_blocks: u64,
    /// That the scheduler ordered of a tier.
    pub tier_loads: u64,
    /// Of those, what had not reported when the last request had ended.
    pub unreported_loads: u64,
    pub tier_stores: u64,
    pub missed_blocks: u64,
    /// Of `tier_loads`, for sequences that waited; what became of those, by sequence; and transfers that were cancelled before they began.
    pub prefetch_loads: u64,
    pub prefetches: PrefetchCounts,
    pub cancelled_transfers: u64,
    pub partial_loads: u64,
    pub sequence_loads: u64,
    /// Events of the cache, times that everything was cleared, and times that a recorder was too slow.
    pub events: u64,
    pub cleared: u64,
    pub resyncs: u64,
    pub copies: u64,
    /// Worlds with window groups; blocks evicted from those, and prompt tokens lost because of that.
    pub windowed: u64,
    /// Worlds with states, and with groups that nobody needs.
    pub with_states: u64,
    pub with_optional: u64,
    /// Drafts of a model that is the same as the one that chooses, all of them right.
    pub right_drafts: u64,
    pub drafter: DrafterCounts,
    pub window_evictions: u64,
    pub window_miss_tokens: u64,
    pub forks: u64,
    pub stopped: u64,
    /// Vectors delivered, and those of requests that were preempted on the way.
    pub pooled: u64,
    pub pooled_preempted: u64,
    pub length: u64,
    pub cancelled: u64,
    pub deadline: u64,
    pub errors: u64,
    /// Blocks that an operator shares in tables of others, summed over steps and groups.
    pub declared_blocks: u64,
    /// Pinned prefixes, summed over the steps.
    pub pins: u64,
    pub evictions: u64,
    /// Drafts verified, and those that were right.
    pub drafts: u64,
    pub accepted_drafts: u64,
    /// Steps planned behind others; rows whose sequence had ended meanwhile, and steps that failed with others behind them.
    pub ahead: u64,
    pub orphans: u64,
    pub behind_failures: u64,
}

impl RunReport {
    /// Takes in what scheduler and cache counted.
    pub(crate) fn collect(&mut self, scheduler: &Scheduler, cache: &CacheStats) {
        let counters = scheduler.counters();
        self.tokens = counters.generation_tokens;
        self.missed_blocks = counters.missed_blocks;
        self.preemptions = counters.preemptions;
        self.preemptions_swapped = counters.preemptions_swapped;
        self.recomputed_tokens = counters.recomputed_tokens;
        self.cached_tokens = counters.cached_prompt_tokens;
        self.waits = counters.waits;
        self.waits_expired = counters.waits_expired;
        self.adapter_loads = counters.adapter_loads;
        self.failed_adapter_loads = counters.failed_adapter_loads;
        self.adapter_evictions = counters.adapter_evictions;
        self.late_rows = counters.late_rows;
        self.prefetches = counters.prefetches;
        self.copies = cache.copies;
        self.evictions = cache.evictions;
        self.ahead = counters.steps_ahead;
        self.orphans = counters.orphan_rows;
        (self.drafts, self.accepted_drafts) = counters.draft_tokens();
        self.windowed = u64::from(!cache.windows().is_empty());
        self.window_evictions = cache.windows().iter().map(|window| window.evictions).sum();
        self.window_miss_tokens = cache.queries.window_miss_tokens;
        [self.stopped, self.length, self.cancelled, self.deadline, self.errors] = counters.finished;
    }

    pub fn add(&mut self, other: &RunReport) {
        self.steps += other.steps;
        self.requests += other.requests;
        self.tokens += other.tokens;
        self.preemptions += other.preemptions;
        self.preemptions_swapped += other.preemptions_swapped;
        self.kept_whole += other.kept_whole;
        self.kept_in_part += other.kept_in_part;
        self.not_kept += other.not_kept;
        self.kept_blocks_loaded += other.kept_blocks_loaded;
        self.recomputed_tokens += other.recomputed_tokens;
        self.cached_tokens += other.cached_tokens;
        for reason in WaitingFor::ALL {
            self.waits[reason] += other.waits[reason];
            self.waits_expired[reason] += other.waits_expired[reason];
        }
        self.adapter_loads += other.adapter_loads;
        self.failed_adapter_loads += other.failed_adapter_loads;
        self.adapter_evictions += other.adapter_evictions;
        self.late_rows += other.late_rows;
        self.late_reports += other.late_reports;
        self.leases += other.leases;
        self.lost_leases += other.lost_leases;
        self.torn_reads += other.torn_reads;
        self.transfers += other.transfers;
        self.loaded_transfers += other.loaded_transfers;
        self.damaged_transfers += other.damaged_transfers;
        self.late_transfers += other.late_transfers;
        self.wanted_late_slots += other.wanted_late_slots;
        self.sequence_transfers += other.sequence_transfers;
        self.crashes += other.crashes;
        self.lost_requests += other.lost_requests;
        self.repeated_requests += other.repeated_requests;
        self.reclaimed_blocks += other.reclaimed_blocks;
        self.recovered_blocks += other.recovered_blocks;
        self.tier_loads += other.tier_loads;
        self.unreported_loads += other.unreported_loads;
        self.tier_stores += other.tier_stores;
        self.missed_blocks += other.missed_blocks;
        self.prefetch_loads += other.prefetch_loads;
        self.prefetches.begun += other.prefetches.begun;
        self.prefetches.completed += other.prefetches.completed;
        self.prefetches.admitted += other.prefetches.admitted;
        self.prefetches.aborted += other.prefetches.aborted;
        self.prefetches.tokens += other.prefetches.tokens;
        self.cancelled_transfers += other.cancelled_transfers;
        self.partial_loads += other.partial_loads;
        self.sequence_loads += other.sequence_loads;
        self.events += other.events;
        self.cleared += other.cleared;
        self.resyncs += other.resyncs;
        self.copies += other.copies;
        self.windowed += other.windowed;
        self.with_states += other.with_states;
        self.with_optional += other.with_optional;
        self.right_drafts += other.right_drafts;
        self.drafter.states += other.drafter.states;
        self.drafter.others_states += other.drafter.others_states;
        self.drafter.drafts_states += other.drafter.drafts_states;
        self.drafter.taken_back += other.drafter.taken_back;
        self.drafter.windows += other.drafter.windows;
        self.drafter.found_blocks += other.drafter.found_blocks;
        self.window_evictions += other.window_evictions;
        self.window_miss_tokens += other.window_miss_tokens;
        self.forks += other.forks;
        self.stopped += other.stopped;
        self.pooled += other.pooled;
        self.pooled_preempted += other.pooled_preempted;
        self.length += other.length;
        self.cancelled += other.cancelled;
        self.deadline += other.deadline;
        self.errors += other.errors;
        self.declared_blocks += other.declared_blocks;
        self.pins += other.pins;
        self.evictions += other.evictions;
        self.ahead += other.ahead;
        self.orphans += other.orphans;
        self.behind_failures += other.behind_failures;
        self.drafts += other.drafts;
        self.accepted_drafts += other.accepted_drafts;
    }
}
