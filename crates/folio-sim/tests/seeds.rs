//! Thousands of small worlds, one per seed. See `folio_sim` for what is checked in each.

use folio_engine::{AdmissionPolicy, WaitingFor};
use folio_sim::{RunReport, Scenario, run_seed, simulator::Simulator};

fn seeds() -> u64 {
    std::env::var("FOLIO_SIM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(3000)
}

/// All seeds below `seeds`, on every core there is. The lowest failing seed of a core is reported.
fn run(seeds: u64) -> RunReport {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let part = |first: u64| {
        let mut total = RunReport::default();
        for seed in (first..seeds).step_by(cores as usize) {
            match run_seed(seed) {
                Ok(report) => total.add(&report),
                Err(what) => panic!("{what}"),
            }
        }
        total
    };
    let mut total = RunReport::default();
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..cores).map(|first| scope.spawn(move || part(first))).collect();
        for part in parts {
            total.add(&part.join().expect("a seed failed, see above"));
        }
    });
    total
}

#[test]
fn many_seeds() {
    let seeds = seeds();
    let total = run(seeds);
    println!("{seeds} seeds: {total:#?}");
    // A simulator that never gets into trouble proves nothing.
    for (what, count) in [
        ("preemptions", total.preemptions),
        ("preemptions that a tier was to keep", total.preemptions_swapped),
        ("stores that a tier kept as a whole", total.kept_whole),
        ("in part", total.kept_in_part),
        ("not at all", total.not_kept),
        ("blocks of those that were loaded", total.kept_blocks_loaded),
        ("waits for blocks", total.waits[WaitingFor::Blocks]),
        ("waits for a shared prefix", total.waits[WaitingFor::SharedPrefix]),
        ("waits for a tier", total.waits[WaitingFor::TierLoad]),
        ("waits for a tier that lasted too long", total.waits_expired[WaitingFor::TierLoad]),
        ("waits for another engine", total.waits[WaitingFor::RemotePrefill]),
        ("waits for another engine that lasted too long", total.waits_expired[WaitingFor::RemotePrefill]),
        ("waits for an adapter", total.waits[WaitingFor::Adapter]),
        ("waits for an adapter that lasted too long", 10 * total.waits_expired[WaitingFor::Adapter]),
        ("adapters that were read", total.adapter_loads),
        ("that could not be", 10 * total.failed_adapter_loads),
        ("that made room for others", total.adapter_evictions),
        ("reports after the end", 10 * total.late_reports),
        ("rows with a late mask", total.late_rows),
        ("masks that never came", 10 * total.waits_expired[WaitingFor::Grammar]),
        ("readers with a lease", total.leases),
        ("leases that were lost", total.lost_leases),
        ("readers who lost their lease and saw something else", 10 * total.torn_reads),
        ("transfers", total.transfers),
        ("transfers whose content was taken", total.loaded_transfers),
        ("transfers that arrived damaged", total.damaged_transfers),
        ("transfers that reported late", total.late_transfers),
        ("turns in which slots of late transfers were wanted", total.wanted_late_slots),
        ("transfers into tables of sequences", total.sequence_transfers),
        ("loads that a tier was asked for", total.tier_loads),
        ("loads that never reported", 10 * total.unreported_loads),
        ("stores that a tier was asked for", total.tier_stores),
        ("deaths of an engine", 2 * total.crashes),
        ("requests that were asked again behind one", total.repeated_requests),
        ("blocks that were given up meanwhile", 10 * total.reclaimed_blocks),
        ("blocks that were stored before one and loaded behind it", 100 * total.recovered_blocks),
        ("blocks that were gone before their turn to be stored", total.missed_blocks),
        ("transfers behind what was still to compute", 10 * total.partial_loads),
        ("transfers that a sequence went on from", total.sequence_loads),
        ("loads of sequences that waited", total.prefetch_loads),
        ("of which everything arrived before their admission", total.prefetches.completed),
        ("which were under way then", total.prefetches.admitted),
        ("which were given up", 2 * total.prefetches.aborted),
        ("transfers that were cancelled before they began", 10 * total.cancelled_transfers),
        ("events", total.events),
        ("times that all was cleared", total.cleared),
        ("times that a recorder was too slow", total.resyncs),
        ("copies", total.copies),
        ("worlds with windows", total.windowed),
        ("worlds with states", total.with_states),
        ("worlds with groups that nobody needs", total.with_optional),
        ("right drafts of a model", total.right_drafts),
        ("times that a draft model went on from a state", total.drafter.states),
        ("of those from another sequence's", 10 * total.drafter.others_states),
        ("from that of a right draft", 10 * total.drafter.drafts_states),
        ("from before what it had computed", 10 * total.drafter.taken_back),
        ("times that one went on with a window", total.drafter.windows),
        ("full blocks of a draft model that are found at the end", total.drafter.found_blocks),
        ("evictions from windows", total.window_evictions),
        ("tokens lost to a window", total.window_miss_tokens),
        ("cached tokens", total.cached_tokens),
        ("cancellations", total.cancelled),
        ("deadlines", total.deadline),
        ("executor failures", total.errors),
        ("stops", total.stopped),
        ("vectors", total.pooled),
        ("vectors in spite of a preemption", total.pooled_preempted),
        ("pinned prefixes", total.pins),
        ("evictions", total.evictions),
        ("blocks shared by declaration", total.declared_blocks),
        ("steps planned behind others", total.ahead),
        ("rows of sequences that had ended", 10 * total.orphans),
        ("steps that failed with others behind them", 100 * total.behind_failures),
        ("drafts", total.drafts),
        ("drafts that were right", total.accepted_drafts),
    ] {
        assert!(count > seeds / 20, "only {count} {what} in {seeds} seeds");
    }
}

/// `FOLIO_SIM_SEED=123 cargo test -p folio-sim one_seed -- --nocapture`
#[test]
fn one_seed() {
    let seed = std::env::var("FOLIO_SIM_SEED").ok().and_then(|seed| seed.parse().ok());
    let simulator = Simulator::new(Scenario::from_seed(seed.unwrap_or(1)));
    let simulator = if seed.is_some() { simulator.traced() } else { simulator };
    match simulator.run() {
        Ok(report) => println!("{report:#?}"),
        Err(what) => panic!("seed {seed:?}: {what}"),
    }
}

/// Batches that nobody joins, of benchmarks alone: the same promises, and the same tokens.
#[test]
fn static_batches() {
    for seed in 0..60 {
        let mut scenario = Scenario::from_seed(seed);
        scenario.config.admission = AdmissionPolicy::Static;
        if let Err(what) = Simulator::new(scenario).run() {
            panic!("seed {seed}: {what}");
        }
    }
}

/// A world that shows what few others do: a sequence gives up its blocks in the very step in which it came back from its copy.
#[test]
fn a_rare_seed() {
    if let Err(what) = run_seed(12969) {
        panic!("{what}");
    }
}
