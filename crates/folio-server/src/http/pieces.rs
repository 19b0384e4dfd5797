//! A body that is written while it is read.
//!
//! Owns: cutting an answer that may be a hundred times larger than what it is made of into pieces. Must never: hold more than
//! one piece, or do more work in one poll of the event loop than a piece takes. What a client does not read is not written.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use folio_text::work;
use futures_core::Stream;

use crate::http::rest;

/// A piece ends with the item that makes it longer than this.
const PIECE_BYTES: usize = 16 << 10;

/// Items of one piece.
const ITEMS_MAX: usize = 2 << 10;

/// Appends the next item to the text; false: there is none.
type Write = Box<dyn FnMut(&mut String) -> bool + Send>;

struct PieceStream {
    write: Write,
    over: bool,
    /// The next poll gives way to others.
    rests: bool,
}

impl Stream for PieceStream {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if std::mem::take(&mut self.rests) {
            // Whoever sends takes pieces as long as there are any: others come first.
            return rest(cx);
        }
        let (mut piece, mut items) = (String::new(), 0);
        while !self.over && piece.len() < PIECE_BYTES && items < ITEMS_MAX {
            self.over = !(self.write)(&mut piece);
            items += 1;
        }
        work::add(piece.len() + items);
        if piece.is_empty() && !self.over {
            // Items without text.
            return rest(cx);
        }
        self.rests = !self.over;
        Poll::Ready((!piece.is_empty()).then(|| Ok(piece.into())))
    }
}

/// An answer in JSON that `write` writes item by item. An item is small.
pub fn json(write: impl FnMut(&mut String) -> bool + Send + 'static) -> Response<Body> {
    let mut response =
        Response::new(Body::from_stream(PieceStream { write: Box::new(write), over: false, rests: false }));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
