//! The messages that were published last, in order: for subscribers and for replays.
//!
//! Owns: sequence numbers, and the bounds in messages and bytes. Must never: grow with the number of those who read it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

pub(crate) type Message = Arc<[u8]>;

pub(crate) enum Read {
    Message(Message),
    /// It was given up; the oldest there is.
    Gone(u64),
    /// It was not published yet.
    Ahead,
}

pub(crate) struct Log {
    messages_max: usize,
    bytes_max: usize,
    kept: Mutex<KeptMessages>,
    /// The number of the next message.
    head: watch::Sender<u64>,
}

#[derive(Default)]
struct KeptMessages {
    messages: VecDeque<Message>,
    /// Number of the first.
    first: u64,
    bytes: usize,
}

impl Log {
    pub fn new(messages_max: usize, bytes_max: usize) -> Self {
        Self { messages_max, bytes_max, kept: Mutex::default(), head: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, KeptMessages> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest message is kept whatever its size.
    pub fn push(&self, message: Vec<u8>) {
        let mut kept = self.lock();
        kept.bytes += message.len();
        kept.messages.push_back(message.into());
        while kept.messages.len() > 1
            && (kept.messages.len() > self.messages_max || kept.bytes > self.bytes_max)
        {
            kept.bytes -= kept.messages.pop_front().map_or(0, |message| message.len());
            kept.first += 1;
        }
        let head = kept.first + kept.messages.len() as u64;
        drop(kept);
        self.head.send_replace(head);
    }

    pub fn read(&self, number: u64) -> Read {
        let kept = self.lock();
        match number.checked_sub(kept.first) {
            None => Read::Gone(kept.first),
            Some(at) => match usize::try_from(at).ok().and_then(|at| kept.messages.get(at)) {
                Some(message) => Read::Message(message.clone()),
                None => Read::Ahead,
            },
        }
    }

    /// Numbers of the oldest message there is and of the next one.
    pub fn range(&self) -> (u64, u64) {
        let kept = self.lock();
        (kept.first, kept.first + kept.messages.len() as u64)
    }

    /// The oldest message for who may be so many messages late.
    pub fn floor(&self, hwm: u64) -> u64 {
        let (oldest, next) = self.range();
        oldest.max(next.saturating_sub(hwm))
    }

    pub fn head(&self) -> watch::Receiver<u64> {
        self.head.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(log: &Log) -> u64 {
        match log.read(0) {
            Read::Gone(first) => first,
            Read::Message(_) => 0,
            Read::Ahead => panic!("nothing was pushed"),
        }
    }

    #[test]
    fn it_is_bounded_in_messages_and_in_bytes_and_keeps_its_numbers() {
        let log = Log::new(3, 100);
        assert!(matches!(log.read(0), Read::Ahead) && matches!(log.read(u64::MAX), Read::Ahead));
        (0..5u8).for_each(|of| log.push(vec![of; 10]));
        assert_eq!((first(&log), log.range(), *log.head().borrow()), (2, (2, 5), 5));
        assert!(matches!(log.read(4), Read::Message(message) if *message == [4; 10]));
        assert!(matches!(log.read(5), Read::Ahead));
        log.push(vec![5; 95]);
        assert_eq!(log.range(), (5, 6), "the others would be more than 100 bytes with it");
        log.push(vec![6; 1000]);
        assert_eq!(log.range(), (6, 7), "the newest is always there");
    }
}
