//! Counts work, so that tests can say how it grows without looking at a clock.
//!
//! Owns: one counter a thread, in steps: a byte that is looked at, copied or moved, or a name that is compared. Code whose cost
//! depends on what a stranger sent adds up what it does. Must never: decide anything. Cost: an addition to a thread's own
//! number for a whole run of bytes, never for each.

use std::cell::Cell;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// So many steps were done on this thread.
#[inline]
pub fn add(steps: usize) {
    STEPS.with(|done| done.set(done.get().wrapping_add(steps as u64)));
}

/// All steps of this thread so far.
pub fn done() -> u64 {
    STEPS.with(Cell::get)
}
