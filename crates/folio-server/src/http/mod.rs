//! What HTTP is to this server: connections, TLS, bodies within their limits, event streams, and how answers leave.
//!
//! Must never: know a route, or who asks.

pub(crate) mod anthropic;
pub(crate) mod connections;
pub(crate) mod ollama;
pub(crate) mod pieces;
pub(crate) mod refused;
pub(crate) mod reply;
pub(crate) mod stream;
pub(crate) mod tls;

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use folio_api::ApiError;
use futures_core::Stream;

use crate::tenancy::keys::random;
use crate::tenancy::unread::HeldBytes;

/// A part of the server, as a handler takes it.
pub type Shared<T> = State<Arc<T>>;

/// Who connected, as an extension of a request; known where there is a socket. Whoever serves the router by
/// other means puts it there, or else refusals wait for nothing.
#[derive(Clone, Copy)]
pub struct Peer(pub std::net::SocketAddr);

/// Who connected to a router, as it tells the engines' processes behind it. Of anybody else it means nothing.
pub(crate) const PEER: &str = "x-folio-peer";

/// What comes of `future`, unless it panics: one request's failure ends no connection, and is counted.
pub(crate) async fn caught<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(polled) => polled.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}

const FORM: &str = "application/x-www-form-urlencoded";

pub fn fresh_id() -> String {
    format!("{:032x}", u128::from_le_bytes(random()))
}

/// `form`: whether JSON may be called what `curl -d` calls every body.
pub fn check_content_type(headers: &HeaderMap, form: bool) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let value = value.to_str().unwrap_or("?");
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || essence.ends_with("+json") || (form && essence == FORM) {
        return Ok(());
    }
    let message = format!("Unsupported content type '{value}'; send 'Content-Type: application/json'.");
    Err(ApiError::new(415, "invalid_request_error", message))
}

/// Lets others have a turn first, also whoever a socket or another thread wakes meanwhile: what has always more to do rests between its pieces.
pub(crate) fn rest<T>(cx: &mut Context<'_>) -> Poll<T> {
    let _ = pin!(tokio::task::yield_now()).poll(cx);
    Poll::Pending
}

/// What is read and thrown away of a body that is too large, so that the client gets to read the answer.
const DISCARD_BYTES_MAX: usize = 64 << 20;

/// What is made room for before it arrives.
const ROOM_BYTES: usize = 64 << 10;

/// What is read of a body before others have a turn: a sender that is fast enough has always more.
const READ_BYTES: usize = 64 << 10;

/// Reads a body within `limit`. What arrived is counted in `held`; what was only announced takes nothing.
pub(crate) async fn read_body(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    held: &mut HeldBytes,
) -> Result<Bytes, ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let mut stream = pin!(body.into_data_stream());
    let mut bytes = Vec::with_capacity(announced.unwrap_or(0).min(limit).min(ROOM_BYTES));
    let (mut discarded, mut taken) = (0usize, 0usize);
    let mut too_large = announced.is_some_and(|length| length > limit);
    if announced.is_some_and(|length| length > DISCARD_BYTES_MAX) {
        return Err(ApiError::too_large(limit));
    }
    while let Some(chunk) = poll_fn(|cx| stream.as_mut().poll_next(cx)).await {
        let chunk = chunk
            .map_err(|error| ApiError::bad_request(format!("The request body was cut off: {error}.")))?;
        taken += chunk.len();
        if taken >= READ_BYTES {
            taken = 0;
            tokio::task::yield_now().await;
        }
        too_large |= bytes.len() + chunk.len() > limit;
        if !too_large {
            held.grow(chunk.len())?;
            bytes.extend_from_slice(&chunk);
            continue;
        }
        discarded += chunk.len();
        if discarded > DISCARD_BYTES_MAX {
            break;
        }
    }
    if too_large { Err(ApiError::too_large(limit)) } else { Ok(bytes.into()) }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::tenancy::gate::Gate;
    use crate::tenancy::unread::Budget;

    struct Chunks(usize);

    impl Stream for Chunks {
        type Item = Result<Bytes, std::convert::Infallible>;

        fn poll_next(mut self: std::pin::Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
            let left = self.0.checked_sub(1);
            self.0 = left.unwrap_or(0);
            Poll::Ready(left.map(|_| Ok(Bytes::from_static(&[b' '; 10_000]))))
        }
    }

    #[test]
    fn a_body_that_is_always_there_is_read_in_pieces() {
        let budget = Budget::new(1 << 30, 1 << 30, Duration::MAX);
        let mut held = budget.hold(&Arc::new(Gate::new(Default::default(), Instant::now())));
        let headers = HeaderMap::new();
        let mut read = pin!(read_body(&headers, Body::from_stream(Chunks(100)), 1 << 20, &mut held));
        let mut before = 0;
        loop {
            let polled = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            let took = budget.held() - before;
            assert!(took <= READ_BYTES + 10_000, "{took} bytes between two turns of others");
            before += took;
            if let Poll::Ready(body) = polled {
                assert_eq!((body.unwrap().len(), before), (1_000_000, 1_000_000));
                return;
            }
        }
    }
}
