//! One turn of the loop: fill the ring of steps, then commit the oldest.
//!
//! Owns: the order of plan, begin, finish and commit. It is written once, and run by the engine, by the simulator, by the replay of
//! traces and by tests, each with a driver of its own.

use folio_kv::KvCache;

use crate::plan::{ExecutorError, StepOutput, StepPlan};
use crate::request::{Event, Micros, RequestId};
use crate::scheduler::Scheduler;

/// What surrounds the scheduler: a clock and an executor.
pub trait Driver {
    fn now(&mut self) -> Micros;

    /// Begins `plan`, which has sequences. What goes wrong is told by its `finish`. Of the cache it may take the events.
    fn begin(&mut self, plan: &StepPlan, scheduler: &Scheduler, cache: &mut KvCache);

    /// Waits for the oldest step that was begun, and says when it ended.
    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>);
}

/// Plans and begins steps while there is room and something to compute, then commits the oldest. Without one there is nothing to
/// wait for. Returns the events so far, which the caller drains.
pub fn turn<'a>(
    scheduler: &'a mut Scheduler,
    cache: &mut KvCache,
    driver: &mut impl Driver,
) -> &'a mut Vec<(RequestId, Event)> {
    let now = driver.now();
    while scheduler.has_room() && !scheduler.plan(cache, now).sequences.is_empty() {
        driver.begin(scheduler.planned(), scheduler, cache);
    }
    if scheduler.under_way() {
        let (now, output) = driver.finish();
        scheduler.commit(cache, output, now);
    }
    scheduler.events()
}
