//! Event streams, server-sent events or lines: a response body fed by a task, with signs of life, that reports when nobody reads it.
//!
//! Invariants: the task that fills it never waits for the reader. What a slow reader has not accepted is held in memory and
//! counted in bytes (`unread`), frame by frame until its last byte is accepted. Dropping the body (the client vanished) drops the
//! [`Abort`] guard, which cancels the request in the engine.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use folio_api::events::{Framing, StreamSink};
use folio_engine::CancelFlag;
use futures_core::Stream;
use parking_lot::Mutex;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::tenancy::unread::Unread;

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

/// Bytes of a frame that are handed on at once; what is longer leaves in parts.
const PART: usize = 64 << 10;
/// What a frame takes beside its bytes.
const FRAME: usize = 64;

/// The writing end. Sending to a reader that left does nothing.
pub struct Events(Arc<Frames>, Framing);

/// Frames on their way to the reader.
struct Frames {
    unread: Arc<Unread>,
    inner: Mutex<QueuedFrames>,
}

#[derive(Default)]
struct QueuedFrames {
    waiting: VecDeque<Bytes>,
    /// Bytes of the first that left already.
    begun: usize,
    /// Nothing more will come.
    closed: bool,
    /// Nobody reads.
    left: bool,
    reader: Option<Waker>,
}

impl Events {
    /// An event stream of a request, and its reading end.
    pub fn new(unread: Arc<Unread>, framing: Framing) -> (Self, FrameReader) {
        let frames = Arc::new(Frames { unread, inner: Mutex::default() });
        (Self(frames.clone(), framing), FrameReader(frames))
    }

    /// Drops what was not accepted. What follows is an event of its own.
    pub fn cut(&self) {
        let partly = self.0.clear();
        if partly {
            self.0.push(self.end().to_owned());
        }
    }

    /// What an event ends with.
    fn end(&self) -> &'static str {
        match self.1 {
            Framing::Events => "\n\n",
            Framing::Lines => "\n",
        }
    }
}

impl StreamSink for Events {
    fn send(&self, json: &str) {
        let begin = if self.1 == Framing::Events { "data: " } else { "" };
        self.0.push(format!("{begin}{json}{}", self.end()));
    }

    fn named(&self, name: &str, json: &str) {
        match self.1 {
            Framing::Events => self.0.push(format!("event: {name}\ndata: {json}\n\n")),
            Framing::Lines => self.send(json),
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let reader = {
            let mut inner = self.0.inner.lock();
            inner.closed = true;
            inner.reader.take()
        };
        reader.into_iter().for_each(Waker::wake);
    }
}

impl Frames {
    fn push(&self, frame: String) {
        let reader = {
            let mut inner = self.inner.lock();
            if inner.left {
                return;
            }
            let frame = Bytes::from(frame.into_bytes().into_boxed_slice());
            // Whoever fills the stream looks whether it is over.
            self.unread.hold(frame.len() + FRAME);
            if inner.waiting.is_empty() {
                self.unread.accepted(true);
            }
            inner.waiting.push_back(frame);
            inner.reader.take()
        };
        reader.into_iter().for_each(Waker::wake);
    }

    /// The next part of what waits.
    fn accept(&self, cx: &Context<'_>) -> Poll<Option<Bytes>> {
        let mut inner = self.inner.lock();
        let begun = inner.begun;
        let Some(first) = inner.waiting.front() else {
            if inner.closed {
                return Poll::Ready(None);
            }
            inner.reader = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let part = if first.len() - begun > PART {
            inner.begun += PART;
            // A copy: a frame is held as long as a part of it is not accepted, and no longer.
            Bytes::copy_from_slice(&inner.waiting[0][begun..begun + PART])
        } else {
            let last = if begun > 0 { Bytes::copy_from_slice(&first[begun..]) } else { first.clone() };
            let held = first.len() + FRAME;
            inner.waiting.pop_front();
            inner.begun = 0;
            self.unread.release(held);
            last
        };
        self.unread.accepted(!inner.waiting.is_empty());
        Poll::Ready(Some(part))
    }

    /// Whether the first frame had left in part.
    fn clear(&self) -> bool {
        let mut inner = self.inner.lock();
        let frames = std::mem::take(&mut inner.waiting);
        self.unread.release(frames.iter().map(|frame| frame.len() + FRAME).sum());
        self.unread.accepted(false);
        std::mem::take(&mut inner.begun) > 0
    }
}

/// The reading end.
pub struct FrameReader(Arc<Frames>);

impl FrameReader {
    /// The next part of what is written; `None` at the end.
    pub async fn next(&self) -> Option<Bytes> {
        std::future::poll_fn(|cx| self.0.accept(cx)).await
    }
}

impl Drop for FrameReader {
    fn drop(&mut self) {
        self.0.inner.lock().left = true;
        self.0.clear();
    }
}

struct EventBody {
    events: FrameReader,
    keep_alive: Interval,
    idle: &'static str,
    _guard: AbortGuard,
}

impl Stream for EventBody {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.events.0.accept(cx) {
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

/// The response around the reading end; `idle` is sent at once where nothing else is there, and whenever nothing else was for `keep_alive`.
pub fn response(
    events: FrameReader,
    guard: AbortGuard,
    keep_alive: Duration,
    (framing, idle): (Framing, &'static str),
) -> Response<Body> {
    // The first at once: headers and a sign of life leave as soon as the engine has taken the request.
    let mut interval = tokio::time::interval_at(Instant::now(), keep_alive);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let body = Body::from_stream(EventBody { events, keep_alive: interval, idle, _guard: guard });
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    let content_type = match framing {
        Framing::Events => "text/event-stream; charset=utf-8",
        Framing::Lines => "application/x-ndjson",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks nginx and its like not to hold events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::gate::Gate;
    use crate::tenancy::unread::Budget;

    #[tokio::test]
    async fn what_is_cut_short_ends_as_its_framing_does() {
        for (framing, sent, named) in [
            (Framing::Events, "\n\ndata: {}\n\n", "event: e\ndata: []\n\n"),
            (Framing::Lines, "\n{}\n", "[]\n"),
        ] {
            let budget = Budget::new(1 << 30, 1 << 30, Duration::MAX);
            let gate = Arc::new(Gate::new(Default::default(), std::time::Instant::now()));
            let (events, reader) = Events::new(budget.answer(&gate), framing);
            events.send(&"x".repeat(2 * PART));
            assert_eq!(reader.next().await.unwrap().len(), PART);
            events.cut();
            events.send("{}");
            events.named("e", "[]");
            drop(events);
            let mut rest = Vec::new();
            while let Some(part) = reader.next().await {
                rest.extend_from_slice(&part);
            }
            assert_eq!(String::from_utf8(rest).unwrap(), format!("{sent}{named}"));
        }
    }
}
