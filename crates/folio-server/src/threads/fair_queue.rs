//! Whose work is done next, where more comes than can be done at once.
//!
//! Owns: a fixed number of turns and who waits for one. Must never: let one owner's work keep another's from its share, however
//! much of it waits, or let large pieces take every turn. Start-time fair queueing (Goyal, Vin and Cheng, 1996): an owner's
//! pieces are lined up behind each other by their cost, and the piece that would begin first is next; whoever was idle begins
//! now, not in the past. Where there are several turns, one is never taken by a large piece, so small ones wait for small ones.
//!
//! Bounds: pieces that wait, of all owners; one owner's may be as many as places are left, so it leaves half to the others.
//! Cost: a few operations on ordered maps behind a lock that is never held across anything else.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

/// A piece that costs more is large.
pub const LARGE: u64 = 64 << 10;

/// See the module documentation.
pub struct FairQueue<K: Ord + Clone>(Arc<Mutex<QueueState<K>>>);

impl<K: Ord + Clone> Clone for FairQueue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct QueueState<K: Ord + Clone> {
    /// Turns that nobody has.
    free: usize,
    /// Of those that large pieces may have.
    free_large: usize,
    waiting_max: usize,
    /// By when they would begin, and then by arrival: small ones, large ones.
    waiting: [BTreeMap<(u64, u64), QueuedPiece<K>>; 2],
    owners: BTreeMap<K, OwnerState>,
    /// When the piece that was begun last was to begin.
    now: u64,
    arrived: u64,
}

struct QueuedPiece<K: Ord + Clone> {
    owner: K,
    begin: oneshot::Sender<Turn<K>>,
}

#[derive(Default)]
struct OwnerState {
    /// When its last piece would be over if it had a turn of its own.
    end: u64,
    waiting: usize,
}

/// Given back when it is dropped.
pub struct Turn<K: Ord + Clone> {
    queue: Option<FairQueue<K>>,
    large: bool,
}

/// No place is left to wait in.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// Waits for a turn. Dropped before that, it gives up its place.
pub struct Wait<K: Ord + Clone> {
    queue: FairQueue<K>,
    key: (u64, u64),
    large: bool,
    receiver: oneshot::Receiver<Turn<K>>,
}

impl<K: Ord + Clone> FairQueue<K> {
    /// `turns` at once; `waiting_max` in line.
    pub fn new(turns: usize, waiting_max: usize) -> Self {
        let turns = turns.max(1);
        let inner = QueueState {
            free: turns,
            free_large: (turns - 1).max(1),
            waiting_max,
            waiting: [BTreeMap::new(), BTreeMap::new()],
            owners: BTreeMap::new(),
            now: 0,
            arrived: 0,
        };
        Self(Arc::new(Mutex::new(inner)))
    }

    fn inner(&self) -> MutexGuard<'_, QueueState<K>> {
        self.0.lock()
    }

    /// Pieces that wait.
    pub fn waiting(&self) -> usize {
        self.inner().waiting.iter().map(BTreeMap::len).sum()
    }

    /// Waits for a turn of `owner`, whose piece costs about `cost`.
    pub async fn turn(&self, owner: &K, cost: u64) -> Result<Turn<K>, Full> {
        let wait = self.line_up(owner, cost, true)?;
        self.give();
        // Senders live in the line until they send.
        wait.await.map_err(|_| Full)
    }

    /// The same for a piece that was let in before: it has a place however many wait.
    pub async fn turn_of_admitted(&self, owner: &K, cost: u64) -> Result<Turn<K>, Full> {
        let wait = self.line_up(owner, cost, false)?;
        self.give();
        wait.await.map_err(|_| Full)
    }

    /// `may_be_full`: only where there is a place.
    fn line_up(&self, owner: &K, cost: u64, may_be_full: bool) -> Result<Wait<K>, Full> {
        let (begin, receiver) = oneshot::channel();
        let large = cost > LARGE;
        let mut inner = self.inner();
        let all: usize = inner.waiting.iter().map(BTreeMap::len).sum();
        let own = inner.owners.get(owner).map_or(0, |owner| owner.waiting);
        let begins_now = inner.free > 0 && (!large || inner.free_large > 0);
        if may_be_full && !begins_now && own >= inner.waiting_max.saturating_sub(all) {
            return Err(Full);
        }
        inner.arrived += 1;
        let (now, arrived) = (inner.now, inner.arrived);
        let entry = inner.owners.entry(owner.clone()).or_default();
        let start = entry.end.max(now);
        entry.end = start + cost.max(1);
        entry.waiting += 1;
        let key = (start, arrived);
        inner.waiting[usize::from(large)].insert(key, QueuedPiece { owner: owner.clone(), begin });
        Ok(Wait { queue: self.clone(), key, large, receiver })
    }

    /// Gives free turns to those who are next and still wait.
    fn give(&self) {
        loop {
            let next = self.inner().next();
            let Some((begin, large)) = next else { return };
            // Outside of the lock: a turn that nobody takes comes back here.
            if let Err(mut turn) = begin.send(Turn { queue: Some(self.clone()), large }) {
                turn.queue = None;
                self.inner().take_back(large);
            }
        }
    }
}

impl<K: Ord + Clone> QueueState<K> {
    fn next(&mut self) -> Option<(oneshot::Sender<Turn<K>>, bool)> {
        if self.free == 0 {
            return None;
        }
        let first = |line: &BTreeMap<(u64, u64), QueuedPiece<K>>| line.keys().next().copied();
        let small = first(&self.waiting[0]);
        let large = first(&self.waiting[1]).filter(|_| self.free_large > 0);
        let is_large = match (small, large) {
            (None, None) => return None,
            (small, large) => large.is_some_and(|large| small.is_none_or(|small| large < small)),
        };
        let (key, piece) = self.waiting[usize::from(is_large)].pop_first()?;
        self.now = self.now.max(key.0);
        self.free -= 1;
        self.free_large -= usize::from(is_large);
        self.left(&piece.owner);
        Some((piece.begin, is_large))
    }

    fn take_back(&mut self, large: bool) {
        self.free += 1;
        self.free_large += usize::from(large);
    }

    /// One of the owner's pieces waits no more. Who has none, and none that would still go on, is forgotten.
    fn left(&mut self, owner: &K) {
        let now = self.now;
        if let Some(entry) = self.owners.get_mut(owner) {
            entry.waiting -= 1;
            if entry.waiting == 0 && entry.end <= now {
                self.owners.remove(owner);
            }
        }
        if self.waiting.iter().all(BTreeMap::is_empty) {
            // Nobody waits: everybody begins anew.
            self.owners.clear();
        }
    }
}

impl<K: Ord + Clone> Future for Wait<K> {
    type Output = Result<Turn<K>, oneshot::error::RecvError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver).poll(cx)
    }
}

impl<K: Ord + Clone> Drop for Wait<K> {
    fn drop(&mut self) {
        let mut inner = self.queue.inner();
        if let Some(piece) = inner.waiting[usize::from(self.large)].remove(&self.key) {
            inner.left(&piece.owner);
        }
    }
}

impl<K: Ord + Clone> Drop for Turn<K> {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            queue.inner().take_back(self.large);
            queue.give();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Lines up pieces of (owner, cost) while the only turn is held, and says in which order they ran.
    async fn order(queue: &FairQueue<&'static str>, pieces: &[(&'static str, u64)]) -> Vec<&'static str> {
        let first = queue.turn(&"first", 1).await.unwrap();
        let ran = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for (owner, cost) in pieces.iter().copied() {
            let wait = queue.line_up(&owner, cost, true).unwrap();
            let ran = ran.clone();
            tasks.push(tokio::spawn(async move {
                let _turn = wait.await.unwrap();
                ran.lock().push(owner);
            }));
        }
        drop(first);
        for task in tasks {
            task.await.unwrap();
        }
        Arc::into_inner(ran).unwrap().into_inner()
    }

    #[tokio::test]
    async fn owners_take_turns_however_much_one_has() {
        let queue = FairQueue::new(1, 100);
        let ran = order(&queue, &[("many", 1), ("many", 1), ("many", 1), ("few", 1), ("few", 1)]).await;
        assert_eq!(ran, ["many", "few", "many", "few", "many"]);
        assert!(queue.inner().owners.is_empty() && queue.inner().free == 1);
    }

    #[tokio::test]
    async fn who_brings_large_pieces_gets_fewer_of_them() {
        let queue = FairQueue::new(1, 100);
        let mut pieces = vec![("large", 1000); 3];
        pieces.extend([("small", 100); 12]);
        let ran = order(&queue, &pieces).await;
        let place =
            |owner, number| ran.iter().enumerate().filter(|(_, ran)| **ran == owner).nth(number).unwrap().0;
        assert_eq!(place("large", 0), 0);
        assert!((10..=11).contains(&place("large", 1)), "{ran:?}");
    }

    #[tokio::test]
    async fn one_turn_is_never_a_large_pieces() {
        let queue = FairQueue::new(3, 100);
        let large = [queue.turn(&"a", LARGE + 1).await.unwrap(), queue.turn(&"b", LARGE + 1).await.unwrap()];
        let waits = queue.line_up(&"c", LARGE + 1, true).unwrap();
        queue.give();
        let small = queue.turn(&"d", 10).await.unwrap();
        assert_eq!((queue.waiting(), queue.inner().free), (1, 0));
        drop(small);
        assert_eq!((queue.waiting(), queue.inner().free), (1, 1), "kept for small ones");
        drop(large);
        drop(waits.await.unwrap());
        let inner = queue.inner();
        assert_eq!((inner.free, inner.free_large), (3, 2));
    }

    #[tokio::test]
    async fn one_owner_leaves_half_of_the_places_to_the_others() {
        let queue = FairQueue::new(1, 8);
        let _first = queue.turn(&"first", 1).await.unwrap();
        let hoarded: Vec<_> = (0..).map_while(|_| queue.line_up(&"greedy", 1, true).ok()).collect();
        assert_eq!(hoarded.len(), 4);
        let other: Vec<_> = (0..).map_while(|_| queue.line_up(&"other", 1, true).ok()).collect();
        assert_eq!(other.len(), 2);
        assert_eq!(queue.turn(&"greedy", 1).await.err(), Some(Full));
        assert!(queue.line_up(&"third", 1, true).is_ok());
    }

    #[tokio::test]
    async fn who_stops_waiting_loses_no_turn_and_holds_no_place() {
        let queue = FairQueue::new(2, 4);
        let held = [queue.turn(&"a", 1).await.unwrap(), queue.turn(&"a", 1).await.unwrap()];
        for _ in 0..10 {
            let waits = tokio::time::timeout(Duration::from_millis(2), queue.turn(&"a", 1)).await;
            assert!(waits.is_err(), "both are taken");
        }
        assert_eq!(queue.waiting(), 0);
        // Given to one that is dropped before it looks.
        let mut late = Box::pin(queue.turn(&"a", 1));
        assert!(tokio::time::timeout(Duration::from_millis(2), &mut late).await.is_err());
        drop(held);
        drop(late);
        let inner = queue.inner();
        assert!(inner.free == 2 && inner.owners.is_empty());
    }
}
