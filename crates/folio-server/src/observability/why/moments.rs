//! What passed between two samples, for whoever watches.

use folio_engine::Activity;
use serde_json::{Value, json};

use super::config::seconds;
use super::history::Sample;

/// What a [`moment`] has, in its order: the engine's time; shares of the time by what it passed with; sums of the steps between; and what is there now.
pub(crate) const MOMENT: [&str; 14] = [
    "at_s",
    "prefill",
    "decode",
    "mixed",
    "waiting",
    "idle",
    "steps",
    "prompt_tokens",
    "output_tokens",
    "evicted_blocks",
    "running",
    "queued",
    "active_blocks",
    "cached_blocks",
];

/// Between two samples, the first of them earlier. `None`: no time is counted between them, for a step goes on; what comes later tells it.
pub(super) fn moment(before: &Sample, now: &Sample) -> Option<Value> {
    let passed = now.work.total_us().saturating_sub(before.work.total_us()) as f64;
    if passed == 0.0 {
        return None;
    }
    let share = |activity| {
        // What went on at a sample is taken to go on until it: what began meanwhile shows in the next one.
        let share = now.work.us(activity).saturating_sub(before.work.us(activity)) as f64 / passed;
        (1000.0 * share).round() / 1000.0
    };
    let [prefill, decode, mixed, waiting, idle] = Activity::ALL.map(share);
    let mut sums = [0; 3];
    for (now, before) in now.work.steps.iter().zip(&before.work.steps) {
        let steps = now.since(before);
        for (sum, part) in sums.iter_mut().zip([steps.steps, steps.prompt_rows, steps.decode_rows]) {
            *sum += part;
        }
    }
    let evicted = now.cache.evictions.saturating_sub(before.cache.evictions);
    let [steps, prompt, output] = sums;
    let at = (100.0 * seconds(now.at.0 as f64)).round() / 100.0;
    Some(json!([
        at,
        prefill,
        decode,
        mixed,
        waiting,
        idle,
        steps,
        prompt,
        output,
        evicted,
        now.running,
        now.waiting.total(),
        now.cache.active_blocks,
        now.cache.cached_blocks,
    ]))
}

#[cfg(test)]
mod tests {
    use folio_engine::{Micros, Scheduler, SchedulerConfig};

    use super::*;

    #[test]
    fn a_moment_has_what_it_is_said_to_have() {
        let (before, mut now) = (Sample::default(), Sample::default());
        now.running = 3;
        now.cache.groups[0].cached_blocks = 7;
        assert_eq!(moment(&before, &now), None, "no time is counted");
        now.at = Micros(1_234_567);
        let idle = *Scheduler::new(SchedulerConfig::default()).unwrap().work();
        now.work = idle.at(now.at);
        let moment = moment(&before, &now).unwrap();
        assert_eq!(moment.as_array().map(Vec::len), Some(MOMENT.len()));
        let of = |name| moment[MOMENT.iter().position(|known| *known == name).unwrap()].clone();
        assert_eq!((of("running"), of("cached_blocks"), of("at_s")), (json!(3), json!(7), json!(1.23)));
        assert_eq!((of("idle"), of("decode")), (json!(1.0), json!(0.0)), "nobody is there");
        // Idle until a later time than that to which it turned out to be.
        let mut later = now;
        (later.at, later.work) = (Micros(2_000_000), idle.at(Micros(1_000_000)));
        assert_eq!(super::moment(&now, &later), None);
    }
}
