//! Counts work, so that tests can say how it grows without looking at a clock, and long work gives way.
//!
//! Owns: one counter a thread, in steps: a byte that is looked at, copied or moved, or a name that is compared. Code whose cost
//! depends on what a stranger sent adds up what it does, while it does it and holding no lock: where long work runs ([`giving_way`]), that is
//! where its thread lets others have the processor. Must never: decide anything else. Cost: an addition to a thread's own
//! number for a whole run of bytes, never for each.
//!
//! Work that is short for all that its size says may still turn out to be long, because a model's template makes it so. On the event loop it
//! is done as [`quick`] work: what can take long asks [`is_quick`], does a little, and gives up; then a thread does it anew.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Steps after which long work gives way: some 50 us. A thread that is woken meanwhile may wait for the system's next tick, milliseconds later.
pub const GIVES_WAY_EVERY: u64 = 64 << 10;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
    /// Steps at which the thread gives way next.
    static NEXT: Cell<u64> = const { Cell::new(u64::MAX) };
    /// Whether the thread does work that should be quick, and that gave up.
    static QUICK: Cell<(bool, bool)> = const { Cell::new((false, false)) };
}

static GIVEN_WAY: AtomicU64 = AtomicU64::new(0);

/// So many steps were done on this thread.
#[inline]
pub fn add(steps: usize) {
    let done = done().wrapping_add(steps as u64);
    STEPS.set(done);
    if done >= NEXT.get() {
        give_way(done);
    }
}

#[cold]
fn give_way(done: u64) {
    NEXT.set(done + GIVES_WAY_EVERY);
    GIVEN_WAY.fetch_add(1, Ordering::Relaxed);
    std::thread::yield_now();
}

/// All steps of this thread so far.
pub fn done() -> u64 {
    STEPS.get()
}

/// How often all threads gave way.
pub fn given_way() -> u64 {
    GIVEN_WAY.load(Ordering::Relaxed)
}

/// Does work that may be long and holds no lock where it counts.
pub fn giving_way<T>(work: impl FnOnce() -> T) -> T {
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            NEXT.set(u64::MAX);
        }
    }
    NEXT.set(done() + GIVES_WAY_EVERY);
    let _over = Over;
    work()
}

/// Does work that should be quick. `None`: it gave up, and is to be done anew where it may take long.
pub fn quick<T>(work: impl FnOnce() -> T) -> Option<T> {
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            QUICK.set((false, false));
        }
    }
    QUICK.set((true, false));
    let _over = Over;
    let done = work();
    let (_, gave_up) = QUICK.get();
    (!gave_up).then_some(done)
}

/// Whether what is done now should be quick.
pub fn is_quick() -> bool {
    QUICK.get().0
}

/// Quick work is not: whatever comes of it counts for nothing.
pub fn give_up() {
    let (quick, _) = QUICK.get();
    QUICK.set((quick, true));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_work_gives_way_and_other_work_does_not() {
        let half = GIVES_WAY_EVERY as usize / 2;
        let gave = |work: &dyn Fn()| {
            let before = given_way();
            work();
            given_way() - before
        };
        let long = || (0..10).for_each(|_| add(half));
        assert_eq!(gave(&|| giving_way(|| add(half))), 0, "it is short");
        assert_eq!(gave(&|| giving_way(long)), 5);
        assert_eq!(gave(&long), 0);
        let failed = std::panic::catch_unwind(|| giving_way(|| panic!("as it may")));
        assert!(failed.is_err() && gave(&long) == 0);
    }

    #[test]
    fn quick_work_gives_up_or_is_done() {
        assert_eq!((is_quick(), quick(is_quick), is_quick()), (false, Some(true), false));
        assert_eq!(quick(give_up), None);
        let failed = std::panic::catch_unwind(|| quick(|| panic!("as it may")));
        assert!(failed.is_err() && !is_quick());
        give_up();
        assert_eq!(quick(|| 7), Some(7), "what nobody waited for is forgotten");
    }
}
