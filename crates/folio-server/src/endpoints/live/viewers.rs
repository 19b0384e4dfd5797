//! Who has the page open, and what they are sent.
//!
//! Owns: how many there may be, and frames on their way. Must never: wait for a reader. A frame is shared by all of them; who has not accepted the last
//! [`FRAMES_WAITING`] is not sent any more, and comes again.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use futures_core::Stream;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Pages that may be open at once, of everybody together.
pub(super) const PAGES_MAX: usize = 16;
/// PageFrames that wait for one reader: two seconds of them.
const FRAMES_WAITING: usize = 8;

/// Pages that are open.
#[derive(Default)]
pub(super) struct Viewers(Vec<Sender<Bytes>>);

/// What one page reads. It ends where its reader was too slow, or nothing more comes.
pub(super) struct PageFrames(Receiver<Bytes>);

impl Viewers {
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// One more, who is sent this first. `None`: there are as many as there may be.
    pub fn enter(&mut self, first: Bytes) -> Option<PageFrames> {
        self.0.retain(|viewer| !viewer.is_closed());
        if self.0.len() >= PAGES_MAX {
            return None;
        }
        let (sender, receiver) = channel(FRAMES_WAITING);
        // There is room for it: nothing was sent before.
        let _ = sender.try_send(first);
        self.0.push(sender);
        Some(PageFrames(receiver))
    }

    /// Sends a frame to everybody who reads, and lets go of the others.
    pub fn send(&mut self, frame: &Bytes) {
        self.0.retain(|viewer| viewer.try_send(frame.clone()).is_ok());
    }

    /// Whether somebody is there.
    pub fn any(&mut self) -> bool {
        self.0.retain(|viewer| !viewer.is_closed());
        !self.0.is_empty()
    }
}

impl Stream for PageFrames {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|frame| frame.map(Ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(frames: &mut PageFrames) -> Option<Bytes> {
        match Pin::new(frames).poll_next(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(frame) => frame.map(|Ok(frame)| frame),
            Poll::Pending => Some(Bytes::new()),
        }
    }

    #[test]
    fn who_does_not_read_is_let_go_of_and_the_others_read_on() {
        let mut viewers = Viewers::default();
        let [mut slow, mut quick] = [0, 1].map(|_| viewers.enter("first".into()).expect("room"));
        assert_eq!(next(&mut quick), Some("first".into()));
        for at in 0..20 {
            viewers.send(&at.to_string().into());
            assert_eq!(next(&mut quick), Some(at.to_string().into()));
        }
        assert_eq!(viewers.count(), 1);
        let read: Vec<Bytes> = std::iter::from_fn(|| next(&mut slow)).collect();
        assert_eq!(
            (read.len(), &read[7]),
            (FRAMES_WAITING, &Bytes::from("6")),
            "what was there, and the end"
        );
        drop(quick);
        assert!(!viewers.any());
    }

    #[test]
    fn there_are_as_many_as_there_may_be_and_whoever_leaves_makes_room() {
        let mut viewers = Viewers::default();
        let mut all: Vec<_> = (0..PAGES_MAX).map(|_| viewers.enter("x".into()).expect("room")).collect();
        assert!(viewers.enter("x".into()).is_none());
        all.pop();
        assert!(viewers.enter("x".into()).is_some() && viewers.count() == PAGES_MAX);
    }
}
