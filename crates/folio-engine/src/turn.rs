//! One turn of the loop: fill the ring of steps, then commit the oldest.
//!
//! Owns: the order of plan, begin, finish and commit. It is written once, and run by the engine, by the simulator, by the replay of
//! traces and by tests, each with a driver of its own.

use folio_kv::KvCache;

use crate::adapters::{AdapterOrder, AdapterReport};
use crate::plan::{ExecutorError, StepOutput, StepPlan};
use crate::request::{Event, Micros, RequestId};
use crate::scheduler::Scheduler;
use crate::tier::TransferOrder;

/// What surrounds the scheduler: a clock and an executor.
pub trait StepDriver {
    fn now(&mut self) -> Micros;

    /// Begins `plan`, which has sequences. What goes wrong is told by its `finish`. Of the cache it may take the events.
    fn begin(&mut self, plan: &StepPlan, scheduler: &Scheduler, cache: &mut KvCache);

    /// Waits for the oldest step that was begun, and says when it ended.
    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>);

    /// Asks a tier. `false`: it will not be carried out, and nothing be reported.
    fn order(&mut self, _: TransferOrder) -> bool {
        false
    }

    /// Has weights of an adapter read, or freed: here at once, elsewhere beside the steps, and then what is to be reported follows
    /// ([`Scheduler::adapter_read`]).
    fn order_adapter(&mut self, order: AdapterOrder) -> Option<AdapterReport> {
        order.carry_out()
    }
}

/// Plans and begins steps while there is room and something to compute, then commits the oldest. Without one there is nothing to
/// wait for. What is wanted of tiers, and of weights of adapters, is ordered as soon as that is known: that is done while steps run. Returns
/// the events so far, which the caller drains.
pub fn turn<'a>(
    scheduler: &'a mut Scheduler,
    cache: &mut KvCache,
    driver: &mut impl StepDriver,
) -> &'a mut Vec<(RequestId, Event)> {
    let now = driver.now();
    while scheduler.has_room() {
        let begins = !scheduler.plan(cache, now).sequences.is_empty();
        order_transfers(scheduler, cache, driver, now);
        for order in scheduler.adapter_orders() {
            if let Some(report) = driver.order_adapter(order) {
                scheduler.adapter_read(cache, report, now);
            }
        }
        if !begins {
            break;
        }
        driver.begin(scheduler.planned(), scheduler, cache);
    }
    if scheduler.under_way() {
        let (now, output) = driver.finish();
        scheduler.commit(cache, output, now);
        order_transfers(scheduler, cache, driver, now);
    }
    scheduler.events()
}

/// Orders what is wanted of tiers.
pub(crate) fn order_transfers(
    scheduler: &mut Scheduler,
    cache: &mut KvCache,
    driver: &mut impl StepDriver,
    now: Micros,
) {
    loop {
        let orders: Vec<TransferOrder> = scheduler.transfers().collect();
        if orders.is_empty() {
            break;
        }
        for order in orders {
            let (ticket, lease) = match &order {
                TransferOrder::Load(load) => (Some(load.ticket), None),
                TransferOrder::Store(store) => (None, Some(store.lease)),
                TransferOrder::Promote { .. } | TransferOrder::Cancel { .. } => (None, None),
            };
            if driver.order(order) {
                continue;
            }
            // What is refused may make room for what waited behind it.
            ticket.into_iter().for_each(|ticket| scheduler.end_load(cache, ticket, false, now));
            if let Some(lease) = lease {
                scheduler.end_store(cache, lease, 0, now);
            }
        }
    }
}
