//! The connections of one listener: how many there may be, which one makes room, and how long a peer may not read.
//!
//! Owns: their number. Invariants: there are never more than the limit; a connection on which a request of somebody known is being read,
//! answered or written is never closed to make room; where all are busy, new ones wait in the system's backlog. So ten thousand
//! connections that say nothing, or ask what needs no key and read it slowly, lock nobody out: the one idle for longest goes.
//!
//! Cost per request: a few operations on a map behind a lock that is never held across anything else.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};

use crate::http::rest;
use crate::tenancy::unread::HeldBytes;

/// See the module documentation.
pub(crate) struct Connections {
    most: usize,
    inner: Mutex<ConnectionTable>,
    /// Somebody left or became idle.
    changed: Notify,
}

#[derive(Default)]
struct ConnectionTable {
    next: u64,
    live: HashMap<u64, ConnectionEntry>,
    /// By when they became idle: order -> connection.
    idle: BTreeMap<u64, u64>,
    /// Told to make room, and still there.
    closing: usize,
}

struct ConnectionEntry {
    close: Arc<Notify>,
    /// Its place among the idle ones.
    idle: Option<u64>,
    /// Requests being answered: two while one answer's last bytes leave and the next request is read.
    busy: u32,
    closing: bool,
}

/// One connection's place.
pub(crate) struct ConnectionPlace {
    all: Arc<Connections>,
    id: u64,
    close: Arc<Notify>,
}

/// A request on a connection, until its answer is written, or it turns out that nobody knows who asks.
pub(crate) struct Busy(Arc<ConnectionPlace>);

impl Connections {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), inner: Mutex::default(), changed: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.inner.lock()
    }

    /// Waits until there is room for one more, making it where a connection is idle.
    pub async fn enter(self: &Arc<Self>) -> ConnectionPlace {
        loop {
            // Registered before looking, so that no change is missed.
            let changed = self.changed.notified();
            {
                let mut inner = self.lock();
                if inner.live.len() < self.most {
                    return self.add(&mut inner);
                }
                if inner.live.len() - inner.closing >= self.most {
                    inner.evict();
                }
            }
            changed.await;
        }
    }

    fn add(self: &Arc<Self>, inner: &mut ConnectionTable) -> ConnectionPlace {
        let id = inner.next;
        inner.next += 1;
        let close = Arc::new(Notify::new());
        inner
            .live
            .insert(id, ConnectionEntry { close: close.clone(), idle: Some(id), busy: 0, closing: false });
        inner.idle.insert(id, id);
        ConnectionPlace { all: self.clone(), id, close }
    }
}

impl ConnectionTable {
    /// Tells the one idle for longest to go.
    fn evict(&mut self) {
        if let Some((_, id)) = self.idle.pop_first()
            && let Some(entry) = self.live.get_mut(&id)
        {
            (entry.idle, entry.closing) = (None, true);
            self.closing += 1;
            entry.close.notify_one();
        }
    }
}

impl ConnectionPlace {
    /// Returns when this connection should make room.
    pub async fn closing(&self) {
        loop {
            self.close.notified().await;
            // A request may have come in between.
            if self.all.lock().live.get(&self.id).is_none_or(|entry| entry.busy == 0) {
                return;
            }
        }
    }

    /// A request came.
    pub fn begin(self: &Arc<Self>) -> Busy {
        let mut inner = self.all.lock();
        if let Some(entry) = inner.live.get_mut(&self.id) {
            entry.busy += 1;
            let stays = std::mem::take(&mut entry.closing);
            let place = entry.idle.take();
            inner.closing -= usize::from(stays);
            if let Some(place) = place {
                inner.idle.remove(&place);
            }
        }
        drop(inner);
        Busy(self.clone())
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut inner = self.all.lock();
        if let Some(entry) = inner.live.remove(&self.id) {
            inner.closing -= usize::from(entry.closing);
            entry.idle.map(|place| inner.idle.remove(&place));
        }
        drop(inner);
        self.all.changed.notify_waiters();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let place = &self.0;
        let mut inner = place.all.lock();
        let order = inner.next;
        inner.next += 1;
        if let Some(entry) = inner.live.get_mut(&place.id) {
            entry.busy -= 1;
            if entry.busy == 0 {
                entry.idle = Some(order);
                inner.idle.insert(order, place.id);
            }
        }
        drop(inner);
        place.all.changed.notify_waiters();
    }
}

/// A body, and what is held until its last byte was taken or nobody wants it any more.
pub(crate) struct HoldingBody<T> {
    inner: Body,
    _held: T,
    bytes: Option<HeldBytes>,
}

impl<T> HoldingBody<T> {
    pub fn new(inner: Body, held: T) -> Self {
        Self { inner, _held: held, bytes: None }
    }
}

impl HoldingBody<()> {
    /// The bytes of a body are held for as long as they are there.
    pub fn counted(inner: Body, bytes: HeldBytes) -> Self {
        Self { inner, _held: (), bytes: Some(bytes) }
    }
}

/// The end of a body, which is here until it is written.
struct CountedPiece {
    piece: Bytes,
    _bytes: HeldBytes,
}

impl AsRef<[u8]> for CountedPiece {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl<T: Unpin> HttpBody for HoldingBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        // Whoever sends lets go of a body once it has taken its last piece, and that waits for its reader.
        let Poll::Ready(Some(Ok(frame))) = polled else { return polled };
        let last = self.inner.is_end_stream();
        let Some(bytes) = self.bytes.take_if(|_| last) else { return Poll::Ready(Some(Ok(frame))) };
        let counted = |piece| Bytes::from_owner(CountedPiece { piece, _bytes: bytes });
        Poll::Ready(Some(Ok(frame.map_data(counted))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// How long, and for how many bytes, what a peer still sends is let pass behind the last answer.
const LINGERS: Duration = Duration::from_secs(1);
const LINGERS_BYTES: usize = 4 << 20;
/// What is let pass before others have a turn.
const LINGERS_AT_ONCE: usize = 4;
/// Bytes that are written before others have a turn: of a stream whose reader comes back after a while megabytes may wait.
const WRITES_AT_ONCE: usize = 64 << 10;

/// A socket whose peer must go on reading: a write that makes no progress for `patience` is an error. Behind the last answer it lingers, as
/// RFC 9112 (9.6) has it: a socket that is closed while something lies unread in it takes away from its peer what that was told last.
pub(crate) struct PatientSocket<S> {
    socket: S,
    patience: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    /// Until when, and how many bytes passed.
    lingering: Option<(Pin<Box<Sleep>>, usize)>,
    /// Bytes written since others had a turn.
    written: usize,
}

impl<S> PatientSocket<S> {
    pub fn new(socket: S, patience: Duration) -> Self {
        Self { socket, patience, waiting: None, lingering: None, written: 0 }
    }

    fn progress<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let until = Instant::now() + self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        ready!(waiting.as_mut().poll(cx));
        let message = format!("the client has read nothing for {} s", self.patience.as_secs());
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }

    /// Whether it may write on; else others come first.
    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.written < WRITES_AT_ONCE {
            return Poll::Ready(());
        }
        self.written = 0;
        rest(cx)
    }

    fn wrote(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Ready(Ok(bytes)) => self.written += bytes,
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.written = 0,
        }
        self.progress(cx, written)
    }
}

impl<S: AsyncRead + Unpin> PatientSocket<S> {
    /// Lets pass what still comes, until nothing does.
    fn linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some((until, passed)) = &mut self.lingering else { return Poll::Ready(()) };
        let mut room = [0; 16 << 10];
        for _ in 0..LINGERS_AT_ONCE {
            let mut buffer = ReadBuf::new(&mut room);
            match Pin::new(&mut self.socket).poll_read(cx, &mut buffer) {
                Poll::Pending => return until.as_mut().poll(cx),
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => *passed += buffer.filled().len(),
                Poll::Ready(_) => return Poll::Ready(()),
            }
            if *passed > LINGERS_BYTES {
                return Poll::Ready(());
            }
        }
        rest(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PatientSocket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for PatientSocket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.turn(cx));
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.wrote(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.turn(cx));
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, buffers);
        self.wrote(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.socket).poll_flush(cx);
        self.progress(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            let shut = Pin::new(&mut self.socket).poll_shutdown(cx);
            ready!(self.progress(cx, shut))?;
            self.lingering = Some((Box::pin(tokio::time::sleep(LINGERS)), 0));
        }
        self.linger(cx).map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn soon<T>(future: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(Duration::from_millis(20), future).await.ok()
    }

    #[tokio::test]
    async fn whoever_is_idle_for_longest_makes_room_and_the_busy_stay() {
        let all = Connections::new(3);
        let places = [all.enter().await, all.enter().await, all.enter().await].map(Arc::new);
        let [first, second, third] = places;
        let working = first.begin();
        drop(second.begin());
        // Idle: the third since it came, the second since its answer left.
        let waiting = tokio::spawn({
            let all = all.clone();
            async move { all.enter().await }
        });
        assert!(soon(first.closing()).await.is_none() && soon(second.closing()).await.is_none());
        assert!(soon(third.closing()).await.is_some());
        drop(third);
        let fourth = Arc::new(soon(waiting).await.expect("there is room").unwrap());
        let fourth_works = fourth.begin();
        let waiting = tokio::spawn({
            let all = all.clone();
            async move { all.enter().await }
        });
        assert!(
            soon(second.closing()).await.is_some(),
            "it is told again only where it is the last idle one"
        );
        // A request came just then: it stays, and nobody is let in until one leaves or is idle.
        let second_works = second.begin();
        assert!(soon(second.closing()).await.is_none());
        assert!(!waiting.is_finished());
        drop(working);
        assert!(soon(first.closing()).await.is_some());
        drop(first);
        assert!(soon(waiting).await.is_some());
        drop((second_works, second, fourth_works, fourth));
        let inner = all.lock();
        assert_eq!((inner.live.len(), inner.idle.len(), inner.closing), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_peer_that_does_not_read_is_given_up_and_one_that_reads_slowly_is_not() {
        let (near, mut far) = tokio::io::duplex(16);
        let mut near = PatientSocket::new(near, Duration::from_secs(2));
        let writer =
            tokio::spawn(async move { near.write_all(&[7; 64]).await.map_err(|error| error.kind()) });
        let mut taken = [0; 16];
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(800)).await;
            far.read_exact(&mut taken).await.unwrap();
        }
        assert_eq!(writer.await.unwrap(), Ok(()), "it took longer, and never so long without progress");
        let (near, _far) = tokio::io::duplex(16);
        let mut near = PatientSocket::new(near, Duration::from_millis(50));
        assert_eq!(near.write_all(&[7; 64]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    /// A socket that takes whatever it is given.
    struct Taking(usize);

    impl AsyncWrite for Taking {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.0 += bytes.len();
            Poll::Ready(Ok(bytes.len()))
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncRead for Taking {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[test]
    fn what_waits_for_a_reader_who_comes_back_is_written_in_pieces() {
        const PIECE: usize = 10_000;
        let mut socket = PatientSocket::new(Taking(0), Duration::from_secs(60));
        let cx = &mut Context::from_waker(std::task::Waker::noop());
        for _ in 0..20 {
            let before = socket.socket.0;
            while Pin::new(&mut socket).poll_write(cx, &[7; PIECE]).is_ready() {}
            let took = socket.socket.0 - before;
            assert!(
                (WRITES_AT_ONCE..WRITES_AT_ONCE + PIECE).contains(&took),
                "{took} bytes between two turns"
            );
        }
    }

    #[tokio::test]
    async fn behind_the_last_answer_what_still_comes_is_let_pass_for_a_while() {
        let (near, mut far) = tokio::io::duplex(1 << 10);
        let mut near = PatientSocket::new(near, Duration::from_secs(60));
        let closing = tokio::spawn(async move { near.shutdown().await });
        far.write_all(&[0; 100_000]).await.expect("it is taken");
        assert!(!closing.is_finished());
        drop(far);
        assert!(soon(closing).await.is_some(), "its peer has closed");
        let (near, _far) = tokio::io::duplex(16);
        let mut near = PatientSocket::new(near, Duration::from_secs(60));
        assert!(
            tokio::time::timeout(LINGERS * 20, near.shutdown()).await.is_ok(),
            "nor is a silent one waited for"
        );
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let mut near = PatientSocket::new(near, Duration::from_secs(60));
        let closing = tokio::spawn(async move { near.shutdown().await });
        let flood = async { while far.write_all(&[0; 1 << 16]).await.is_ok() {} };
        tokio::time::timeout(LINGERS * 20, flood).await.expect("a flood ends");
        closing.await.unwrap().unwrap();
    }
}
