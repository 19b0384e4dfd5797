//! Simulations beside one another: each is a thread's own, and they come out in the order in which they were asked for.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Simulations at once, whatever the machine has: each holds its prompts.
const THREADS_MAX: usize = 8;

/// What `work` makes of each item.
pub fn each<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads =
        std::thread::available_parallelism().map_or(1, |n| n.get()).min(THREADS_MAX).min(items.len());
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(items.len())));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let result = work(item);
                    if let Ok(mut done) = done.lock() {
                        done.push((index, result));
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_default();
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_their_items() {
        let items: Vec<u64> = (0..100).collect();
        assert_eq!(
            each(&items, |item| item * item),
            items.iter().map(|item| item * item).collect::<Vec<_>>()
        );
        assert!(each(&[] as &[u64], |item| *item).is_empty());
    }
}
