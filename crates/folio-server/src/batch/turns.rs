//! How many lines run at once, and whose turn it is.
//!
//! Owns: a fixed number of turns and who waits for one. Must never: let one owner's lines keep another's from running, however many
//! batches it has: owners that wait take turns, and one owner's lines run in the order in which they came.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// See the module documentation.
#[derive(Clone)]
pub struct Turns(Arc<Mutex<Inner>>);

struct Inner {
    free: usize,
    /// Those that wait, by owner; whose turn is next comes first. No owner is here twice or without a line.
    waiting: VecDeque<(Arc<str>, VecDeque<oneshot::Sender<Turn>>)>,
}

/// Given back when it is dropped.
pub struct Turn(Option<Turns>);

impl Turns {
    pub fn new(turns: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner { free: turns.max(1), waiting: VecDeque::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn of `owner`. Who stops waiting loses its place and nothing else.
    pub async fn take(&self, owner: &Arc<str>) -> Turn {
        let receiver = {
            let mut inner = self.lock();
            if inner.free > 0 {
                // Nobody waits while a turn is free.
                inner.free -= 1;
                return Turn(Some(self.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            match inner.waiting.iter_mut().find(|(waiting, _)| waiting == owner) {
                Some((_, line)) => line.push_back(sender),
                None => inner.waiting.push_back((owner.clone(), [sender].into())),
            }
            receiver
        };
        match receiver.await {
            Ok(turn) => turn,
            // Senders live in `waiting` until they send.
            Err(_) => unreachable!("a turn that was waited for is given"),
        }
    }

    /// Gives a turn on to whoever is next and still waits.
    fn give(&self) {
        loop {
            let next = {
                let mut inner = self.lock();
                let Some((owner, mut line)) = inner.waiting.pop_front() else {
                    inner.free += 1;
                    return;
                };
                let next = line.pop_front();
                if !line.is_empty() {
                    inner.waiting.push_back((owner, line));
                }
                next
            };
            // Outside of the lock: a turn that nobody takes comes back here.
            let Some(next) = next else { continue };
            match next.send(Turn(Some(self.clone()))) {
                Ok(()) => return,
                // This loop gives it on, not its drop.
                Err(mut turn) => turn.0 = None,
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = &self.0 {
            turns.give();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn owners_take_turns_however_many_lines_they_have() {
        let turns = Turns::new(1);
        let (many, few): (Arc<str>, Arc<str>) = ("many".into(), "few".into());
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = turns.take(&many).await;
        let mut tasks = Vec::new();
        for (owner, line) in (0..5).map(|i| (&many, i)).chain((0..2).map(|i| (&few, i))) {
            let (turns, owner, order) = (turns.clone(), owner.clone(), order.clone());
            tasks.push(tokio::spawn(async move {
                let _turn = turns.take(&owner).await;
                order.lock().unwrap().push(format!("{owner} {line}"));
            }));
            tokio::task::yield_now().await;
        }
        drop(first);
        for task in tasks {
            task.await.unwrap();
        }
        let order = order.lock().unwrap().join(", ");
        assert_eq!(order, "many 0, few 0, many 1, few 1, many 2, many 3, many 4");
    }

    #[tokio::test]
    async fn who_stops_waiting_loses_no_turn() {
        let turns = Turns::new(2);
        let owner: Arc<str> = "a".into();
        let held = [turns.take(&owner).await, turns.take(&owner).await];
        for _ in 0..3 {
            let waits = tokio::time::timeout(Duration::from_millis(5), turns.take(&owner)).await;
            assert!(waits.is_err(), "both are taken");
        }
        drop(held);
        let again = [turns.take(&owner).await, turns.take(&owner).await];
        assert!(turns.lock().waiting.is_empty() && turns.lock().free == 0);
        // Given to one that is dropped before it looks.
        let mut late = Box::pin(turns.take(&owner));
        assert!(tokio::time::timeout(Duration::from_millis(5), &mut late).await.is_err());
        drop(again);
        drop(late);
        assert_eq!(turns.lock().free, 2);
    }
}
