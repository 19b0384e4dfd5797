//! The events of a response that runs in the background, for whoever comes to read them, also again and from the middle.
//!
//! Owns: the events, as they were written, and who reads them. Must never: hold up who writes, or end a response because nobody reads.
//! Invariants: an event's place is its `sequence_number`; what a reader gets from the beginning is what it gets in parts. The bytes count with
//! the stored response's (`response_store`) and go with it, whoever reads: then there is nothing more to read. Cost: a reader holds the piece
//! that it hands on; an event wakes [`READERS_MAX`] at most.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use futures_core::Stream;
use parking_lot::Mutex;
use tokio::time::{Interval, MissedTickBehavior};

use folio_api::ApiError;
use folio_api::events::KEEP_ALIVE;

/// Readers of one response at once.
const READERS_MAX: usize = 16;

/// See the module documentation.
#[derive(Default)]
pub struct Log {
    inner: Mutex<LoggedEvents>,
}

#[derive(Default)]
struct LoggedEvents {
    /// Events, the long ones in several pieces, each with its event's number.
    pieces: Vec<(u64, Bytes)>,
    /// Events that are complete.
    events: u64,
    closed: bool,
    /// By number: those that wait have a waker.
    readers: BTreeMap<u64, Option<Waker>>,
    came: u64,
}

impl LoggedEvents {
    fn waiting(&mut self) -> Vec<Waker> {
        self.readers.values_mut().filter_map(Option::take).collect()
    }
}

impl Log {
    /// The next piece; an event ends with an empty line.
    pub fn push(&self, piece: Bytes) {
        let mut inner = self.inner.lock();
        if inner.closed {
            return;
        }
        let (event, ends) = (inner.events, piece.ends_with(b"\n\n"));
        inner.pieces.push((event, piece));
        inner.events += u64::from(ends);
        let waiting = inner.waiting();
        drop(inner);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Nothing more will come.
    pub fn close(&self) {
        let mut inner = self.inner.lock();
        inner.closed = true;
        let waiting = inner.waiting();
        drop(inner);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// The response is not kept any more, and neither is this.
    pub fn forget(&self) {
        self.inner.lock().pieces = Vec::new();
        self.close();
    }
}

/// Reads a log from an event on.
struct LogReader {
    log: Arc<Log>,
    number: u64,
    /// The next piece.
    at: usize,
    /// Events up to this one are passed over, also those that are still to come.
    after: Option<u64>,
    keep_alive: Interval,
}

impl LogReader {
    fn new(log: Arc<Log>, after: Option<u64>, keep_alive: Duration) -> Result<Self, ApiError> {
        let mut inner = log.inner.lock();
        let readers = inner.readers.len();
        if readers >= READERS_MAX {
            let message = format!("{readers} connections read this response, and {READERS_MAX} may.");
            return Err(ApiError { code: Some("too_many_readers"), ..ApiError::busy(message, 1) });
        }
        let number = inner.came;
        inner.came += 1;
        inner.readers.insert(number, None);
        let at = after.map_or(0, |after| inner.pieces.partition_point(|(event, _)| *event <= after));
        drop(inner);
        let mut interval = tokio::time::interval_at(tokio::time::Instant::now() + keep_alive, keep_alive);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self { log, number, at, after, keep_alive: interval })
    }

    /// The next piece that is read, if it is there.
    fn piece(&mut self, cx: &Context<'_>) -> Poll<Option<Bytes>> {
        let mut inner = self.log.inner.lock();
        while let Some((event, piece)) = inner.pieces.get(self.at) {
            self.at += 1;
            if self.after.is_none_or(|after| *event > after) {
                return Poll::Ready(Some(piece.clone()));
            }
        }
        if inner.closed {
            return Poll::Ready(None);
        }
        inner.readers.insert(self.number, Some(cx.waker().clone()));
        Poll::Pending
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        self.log.inner.lock().readers.remove(&self.number);
    }
}

impl Stream for LogReader {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.piece(cx) {
            Poll::Ready(piece) => {
                self.keep_alive.reset();
                Poll::Ready(piece.map(Ok))
            }
            Poll::Pending => {
                ready!(self.keep_alive.poll_tick(cx));
                Poll::Ready(Some(Ok(Bytes::from_static(KEEP_ALIVE.as_bytes()))))
            }
        }
    }
}

/// A response that reads the log behind event number `after`, unless many do.
pub fn follow(log: Arc<Log>, after: Option<u64>, keep_alive: Duration) -> Result<Response<Body>, ApiError> {
    let mut response = Response::new(Body::from_stream(LogReader::new(log, after, keep_alive)?));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_forgotten_takes_no_memory_and_ends_for_whoever_reads() {
        let log = Arc::new(Log::default());
        let reader = || LogReader::new(log.clone(), None, Duration::from_secs(60));
        let mut readers: Vec<_> = (0..).map_while(|_| reader().ok()).collect();
        assert_eq!(readers.len(), READERS_MAX);
        assert_eq!(reader().err().map(|error| (error.status, error.retry_after_s)), Some((429, Some(1))));
        let event = Bytes::from(vec![b'\n'; 1000]);
        log.push(event.clone());
        let mut next = async || std::future::poll_fn(|cx| readers[0].piece(cx)).await;
        assert_eq!(next().await, Some(event.clone()));
        log.forget();
        log.push(event.clone());
        assert_eq!(next().await, None);
        assert!(log.inner.lock().pieces.is_empty() && event.is_unique());
        drop(readers);
        assert!(log.inner.lock().readers.is_empty() && reader().is_ok());
    }
}
