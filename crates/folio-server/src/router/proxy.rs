//! Passes a request on to a model's process, and its answer back as it comes.
//!
//! Owns: one connection to the process for each request, so that a client that leaves takes its request with it: the connection is closed
//! when the answer is dropped. Nothing is buffered: what a client does not take stays in its process, where it is bounded. A process that
//! ends in the middle of a stream ends that with an error in the API's own form.

use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, header};
use folio_api::ApiError;
use folio_api::{anthropic, ollama};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use crate::arrival::PassedOn;
use crate::http::PEER;

use super::engines::Held;

/// Of one connection alone (RFC 9110, 7.6.1), and what the process is told otherwise.
const NOT_PASSED_ON: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::EXPECT,
    header::CONTENT_LENGTH,
];
/// Of an answer that is read as a whole, and how long it is waited for.
const PAGE_BYTES: usize = 64 << 20;
const PAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// A request on its way. It can be asked of several processes.
#[derive(Clone)]
pub(super) struct Passing {
    pub method: Method,
    /// Path and query.
    pub uri: Uri,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Passing {
    /// `peer`: whose it is. What the client says of that is nobody's word.
    pub fn new(
        method: Method,
        uri: &Uri,
        mut headers: HeaderMap,
        peer: Option<HeaderValue>,
        body: Bytes,
    ) -> Self {
        let named: Vec<HeaderName> = headers
            .get_all(header::CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in NOT_PASSED_ON.iter().chain(&named) {
            headers.remove(name);
        }
        headers.remove(PEER);
        if let Some(peer) = peer {
            headers.insert(PEER, peer);
        }
        headers.entry(header::HOST).or_insert(HeaderValue::from_static("folio"));
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Self { method, uri: path.parse().unwrap_or_default(), headers, body }
    }

    /// In the form that `curl` gets.
    pub fn plain(mut self) -> Self {
        self.headers.remove(header::ACCEPT);
        self
    }

    /// Asks the process at this socket. What `held` keeps is kept until the answer has been taken, or nobody wants it any more.
    pub async fn to(
        self,
        socket: PathBuf,
        held: impl Send + Unpin + 'static,
    ) -> Result<Response<Body>, String> {
        let stream = UnixStream::connect(socket).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        let connection = Connection(tokio::spawn(async move {
            let _ = connection.await;
        }));
        let path = self.uri.path().to_owned();
        let mut request = Request::new(Full::new(self.body));
        (*request.method_mut(), *request.uri_mut(), *request.headers_mut()) =
            (self.method, self.uri, self.headers);
        let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let (mut head, body) = answer.into_parts();
        for name in [&header::CONNECTION, &header::TRANSFER_ENCODING, &NOT_PASSED_ON[1]] {
            head.headers.remove(name);
        }
        head.extensions.insert(PassedOn);
        let ending = Ending::of(&path, &head.headers);
        let body = PassedBody { body, ending, last: *b"\n\n", over: false, _held: (held, connection) };
        Ok(Response::from_parts(head, Body::new(body)))
    }

    /// The same for a page that is read as a whole.
    pub async fn page(self, held: Held, socket: PathBuf) -> Option<(u16, Bytes)> {
        let asked = async {
            let answer = self.to(socket, held).await.ok()?;
            let status = answer.status().as_u16();
            Some((status, to_bytes(answer.into_body(), PAGE_BYTES).await.ok()?))
        };
        tokio::time::timeout(PAGE_TIMEOUT, asked).await.ok().flatten()
    }
}

/// What is said where a process ended before it answered.
pub(super) fn gone(model: &str) -> ApiError {
    ApiError {
        code: Some("engine_ended"),
        ..ApiError::unavailable(format!("The process of the model '{model}' ended before it answered."), 1)
    }
}

/// A connection that ends with this.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// How a stream says that it was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// It is no stream: its connection is cut off, too.
    None,
    OpenAi,
    Responses,
    Anthropic,
    Lines,
}

impl Ending {
    fn of(path: &str, headers: &HeaderMap) -> Self {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if kind.starts_with("application/x-ndjson") {
            return Self::Lines;
        }
        match path {
            _ if !kind.starts_with("text/event-stream") => Self::None,
            _ if path.starts_with("/v1/messages") => Self::Anthropic,
            _ if path.starts_with("/v1/responses") => Self::Responses,
            _ => Self::OpenAi,
        }
    }

    /// The last of a stream whose last two bytes were these.
    fn told(self, last: [u8; 2]) -> Option<Bytes> {
        let error = ApiError {
            code: Some("engine_ended"),
            ..ApiError::internal("The model's process ended in the middle of this answer.")
        };
        let text = match self {
            Self::None => return None,
            Self::OpenAi => format!("data: {}\n\n", error.to_json()),
            Self::Anthropic => {
                format!("event: error\ndata: {}\n\n", anthropic::error::to_json(&error, ""))
            }
            Self::Responses => {
                let event =
                    json!({"type": "error", "code": "server_error", "message": error.message, "param": null});
                format!("event: error\ndata: {event}\n\n")
            }
            Self::Lines => format!("{}\n", ollama::error::to_json(&error)),
        };
        // What was cut off within an event must not be part of this one.
        let between = match (self, last) {
            (Self::Lines, [_, b'\n']) | (_, [b'\n', b'\n']) => "",
            (Self::Lines, _) => "\n",
            _ => "\n\n",
        };
        Some(format!("{between}{text}").into())
    }
}

/// An answer's body on its way through.
struct PassedBody<T> {
    body: Incoming,
    ending: Ending,
    /// Its last two bytes.
    last: [u8; 2],
    over: bool,
    _held: T,
}

impl<T: Unpin> HttpBody for PassedBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.over {
            return Poll::Ready(None);
        }
        Poll::Ready(match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => {
                if let Some(bytes) = frame.data_ref() {
                    for byte in &bytes[bytes.len().saturating_sub(2)..] {
                        self.last = [self.last[1], *byte];
                    }
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                self.over = true;
                match self.ending.told(self.last) {
                    Some(end) => Some(Ok(Frame::data(end))),
                    None => Some(Err(axum::Error::new(error))),
                }
            }
            None => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.over || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_cut_off_ends_in_its_own_form() {
        let kind = |kind: &'static str| {
            HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(kind))])
        };
        let events = kind("text/event-stream; charset=utf-8");
        for (path, headers, last, begins, has) in [
            ("/v1/completions", &events, *b"\n\n", "data: {\"error\":{", "engine_ended"),
            ("/v1/completions", &events, *b"ab", "\n\ndata: {", "engine_ended"),
            ("/v1/messages", &events, *b"}\n", "\n\nevent: error\ndata: {\"type\":\"error\"", "api_error"),
            ("/v1/responses", &events, *b"\n\n", "event: error\ndata: {\"type\":\"error\"", "server_error"),
            ("/api/chat", &kind("application/x-ndjson"), *b"}\n", "{\"error\":", "ended in the middle"),
            ("/api/chat", &kind("application/x-ndjson"), *b"ab", "\n{\"error\":", "ended in the middle"),
        ] {
            let told = Ending::of(path, headers).told(last).unwrap();
            let text = String::from_utf8(told.to_vec()).unwrap();
            assert!(text.starts_with(begins) && text.contains(has) && text.ends_with('\n'), "{path}: {text}");
        }
        assert_eq!(Ending::of("/v1/completions", &kind("application/json")).told(*b"ab"), None);
    }

    #[test]
    fn what_is_a_connections_own_is_not_passed_on_and_nobody_says_for_whom_he_asks() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("expect", "100-continue"),
            ("content-length", "7"),
            (PEER, "9.9.9.9:9"),
            ("authorization", "Bearer k"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        let uri = "http://somewhere:1/v1/models?a=b".parse().unwrap();
        let passing =
            Passing::new(Method::GET, &uri, headers, Some("1.2.3.4:5".parse().unwrap()), Bytes::new());
        assert_eq!(passing.uri, "/v1/models?a=b");
        let mut names: Vec<_> = passing.headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "host", PEER]);
        assert_eq!(passing.headers[PEER], "1.2.3.4:5");
    }
}
