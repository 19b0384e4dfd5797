//! Server-sent events: a response body fed by a task, with keep-alive comments, that reports when nobody reads it.
//!
//! Invariants: the task that fills it never waits for the reader. What a slow reader has not taken is held in memory; it
//! is bounded by the request's own `max_tokens` times `n`, since nothing else is ever sent. Dropping the body (the client
//! vanished) drops the [`Abort`] guard, which cancels the request in the engine.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use folio_engine::CancelFlag;
use futures_core::Stream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, Interval, MissedTickBehavior};

/// Cancels requests unless they were finished first.
#[derive(Clone)]
pub struct Abort(Arc<AbortInner>);

struct AbortInner {
    flags: Vec<CancelFlag>,
    finished: AtomicBool,
}

impl Abort {
    pub fn new(flags: Vec<CancelFlag>) -> Self {
        Self(Arc::new(AbortInner { flags, finished: AtomicBool::new(false) }))
    }

    /// Ends one choice of one request; the others go on.
    pub fn cancel_choice(&self, request: usize, choice: u32) {
        self.0.flags[request].cancel_choice(choice);
    }

    /// Everything is over: a later [`AbortGuard`] has nothing to do.
    pub fn finished(&self) {
        self.0.finished.store(true, Ordering::Release);
    }

    pub fn cancel(&self) {
        if !self.0.finished.swap(true, Ordering::AcqRel) {
            self.0.flags.iter().for_each(CancelFlag::cancel);
        }
    }

    pub fn guard(&self) -> AbortGuard {
        AbortGuard(self.clone())
    }
}

/// Held by whoever waits for the answer.
pub struct AbortGuard(Abort);

impl Drop for AbortGuard {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A comment, which readers skip.
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// The writing end. Sending to a reader that left does nothing.
pub struct Events(pub UnboundedSender<Bytes>);

impl Events {
    pub fn send(&self, json: &str) {
        // A reader that left was already noticed by its guard.
        let _ = self.0.send(Bytes::from(format!("data: {json}\n\n")));
    }

    /// An event with a name.
    pub fn named(&self, name: &str, json: &str) {
        let _ = self.0.send(Bytes::from(format!("event: {name}\ndata: {json}\n\n")));
    }
}

struct EventBody {
    events: UnboundedReceiver<Bytes>,
    keep_alive: Interval,
    idle: &'static str,
    _guard: AbortGuard,
}

impl Stream for EventBody {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.events.poll_recv(cx) {
            Poll::Ready(Some(event)) => {
                self.keep_alive.reset();
                Poll::Ready(Some(Ok(event)))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                ready!(self.keep_alive.poll_tick(cx));
                Poll::Ready(Some(Ok(Bytes::from_static(self.idle.as_bytes()))))
            }
        }
    }
}

/// The response around the reading end; `idle` is sent whenever nothing else was for `keep_alive`.
pub fn response(
    events: UnboundedReceiver<Bytes>,
    guard: AbortGuard,
    keep_alive: Duration,
    idle: &'static str,
) -> Response<Body> {
    let mut interval = tokio::time::interval_at(Instant::now() + keep_alive, keep_alive);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let body = Body::from_stream(EventBody { events, keep_alive: interval, idle, _guard: guard });
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks nginx and its like not to hold events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
