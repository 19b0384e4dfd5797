//! The events of a response that runs in the background, for whoever comes to read them, also again and from the middle.
//!
//! Owns: the events, as they were written. Must never: hold up who writes, or end a response because nobody reads. Invariants: an event's
//! place is its `sequence_number`; what a reader gets from the beginning is what it gets in parts. The bytes count with the stored
//! response's (`store`), and go with it. Cost: one copy of each event; a reader holds [`READ_AHEAD`] pieces at most.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use futures_core::Stream;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use folio_api::events::KEEP_ALIVE;

/// Pieces on their way to one reader.
const READ_AHEAD: usize = 16;

/// See the module documentation.
#[derive(Default)]
pub struct Log {
    inner: Mutex<Inner>,
    changed: Notify,
}

#[derive(Default)]
struct Inner {
    /// Events, the long ones in several pieces, each with its event's number.
    pieces: Vec<(u64, Bytes)>,
    /// Events that are complete.
    events: u64,
    closed: bool,
}

impl Log {
    /// The next piece; an event ends with an empty line.
    pub fn push(&self, piece: Bytes) {
        let mut inner = self.inner.lock();
        let (event, ends) = (inner.events, piece.ends_with(b"\n\n"));
        inner.pieces.push((event, piece));
        inner.events += u64::from(ends);
        drop(inner);
        self.changed.notify_waiters();
    }

    /// Nothing more will come.
    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.changed.notify_waiters();
    }

    /// The place of the first piece behind event number `after`; `None`: of the first.
    fn place(&self, after: Option<u64>) -> usize {
        let inner = self.inner.lock();
        after.map_or(0, |after| inner.pieces.partition_point(|(event, _)| *event <= after))
    }

    /// The piece at `at`, or whether none will be there.
    fn piece(&self, at: usize) -> Result<Bytes, bool> {
        let inner = self.inner.lock();
        inner.pieces.get(at).map(|(_, piece)| piece.clone()).ok_or(inner.closed)
    }

    /// Sends what there is from `at` on, and what comes, until the end or until nobody reads.
    async fn send(self: Arc<Self>, after: Option<u64>, pieces: mpsc::Sender<Bytes>, keep_alive: Duration) {
        let mut at = self.place(after);
        loop {
            // Registered before looking, so that no change is missed.
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            let piece = match self.piece(at) {
                Ok(piece) => {
                    // What lies behind a number that is still to come is skipped, too.
                    let early = after.is_some_and(|after| self.place(Some(after)) > at);
                    at += 1;
                    if early {
                        continue;
                    }
                    piece
                }
                Err(true) => return,
                Err(false) => match tokio::time::timeout(keep_alive, changed).await {
                    Ok(()) => continue,
                    Err(_) => Bytes::from_static(KEEP_ALIVE.as_bytes()),
                },
            };
            if pieces.send(piece).await.is_err() {
                return;
            }
        }
    }
}

struct Pieces(mpsc::Receiver<Bytes>);

impl Stream for Pieces {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|piece| piece.map(Ok))
    }
}

/// A response that reads the log behind event number `after`.
pub fn follow(log: Arc<Log>, after: Option<u64>, keep_alive: Duration) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(READ_AHEAD);
    tokio::spawn(log.send(after, sender, keep_alive));
    let mut response = Response::new(Body::from_stream(Pieces(receiver)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
