//! Sockets, the connections that come in by them, and HTTP on each.
//!
//! Owns: accepting within the limit of connections, TLS, and how long a peer may say or read nothing. Must never: know a route.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::HeaderMap;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tower::ServiceExt;

use crate::config::Limits;
use crate::error::ServerError;
use crate::http::connections::{ConnectionPlace, Connections, PatientSocket};
use crate::http::tls::Tls;
use crate::http::{PEER, Peer};
use crate::load::Load;

/// Pause after a failed accept (out of file descriptors, mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What connections come in by.
pub(crate) enum ListeningSocket {
    Tcp(TcpListener),
    /// Of a router of this user, which says for whom it asks ([`PEER`]).
    Unix(UnixListener),
}

pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener, ServerError> {
    let listener = TcpListener::bind(address).await;
    listener.map_err(|source| ServerError::Bind { address: address.to_string(), source })
}

/// What all connections have in common.
pub(crate) struct Front {
    pub load: Arc<Load>,
    /// How many there are.
    pub open: Gauge,
    pub tls: Option<Arc<Tls>>,
}

impl Front {
    /// Accepts for as long as it is polled.
    async fn accept(&self, socket: &ListeningSocket, router: &Router, graceful: &GracefulShutdown) {
        let connections = Connections::new(self.load.limits.connections);
        loop {
            let place = connections.enter().await;
            let accepted = match socket {
                ListeningSocket::Tcp(listener) => listener.accept().await.map(|(stream, peer)| {
                    // Tokens are small and should leave at once.
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "cannot set TCP_NODELAY");
                    }
                    self.connection(stream, Some(Peer(peer)), place, router, graceful);
                }),
                ListeningSocket::Unix(listener) => {
                    let accepted = listener.accept().await;
                    accepted.map(|(stream, _)| self.connection(stream, None, place, router, graceful))
                }
            };
            if let Err(error) = accepted {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }

    /// The same of both listeners. Operators have connections of their own: whoever takes all of the others does not lock them out.
    pub async fn accept_all(
        &self,
        (serving, router): (&ListeningSocket, &Router),
        admin: Option<(&ListeningSocket, &Router)>,
        graceful: &GracefulShutdown,
    ) {
        let serving = self.accept(serving, router, graceful);
        match admin {
            None => serving.await,
            Some((admin, operators)) => {
                tokio::join!(serving, self.accept(admin, operators, graceful));
            }
        }
    }

    fn connection<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        &self,
        socket: S,
        peer: Option<Peer>,
        place: ConnectionPlace,
        router: &Router,
        graceful: &GracefulShutdown,
    ) {
        let (load, place) = (self.load.clone(), Arc::new(place));
        let open = self.open.clone();
        let acceptor = self.tls.as_ref().map(|tls| tls.acceptor());
        let service = Service { peer, place: place.clone(), router: router.clone() };
        let watcher = graceful.watcher();
        tokio::spawn(async move {
            open.inc();
            let limits = &load.limits;
            let socket = PatientSocket::new(socket, limits.write_timeout);
            let spoken = async {
                match acceptor {
                    None => speak(TokioIo::new(socket), service, limits, watcher).await,
                    Some(acceptor) => {
                        match tokio::time::timeout(limits.header_timeout, acceptor.accept(socket)).await {
                            Ok(Ok(stream)) => speak(TokioIo::new(stream), service, limits, watcher).await,
                            Ok(Err(error)) => Err(format!("TLS: {error}")),
                            Err(_) => Err("TLS: the handshake took too long".to_owned()),
                        }
                    }
                }
            };
            let ended = tokio::select! {
                ended = spoken => ended,
                () = place.closing() => Err("idle, and another one wanted its place".to_owned()),
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended early");
            }
            open.dec();
        });
    }
}

/// What answers on one connection.
struct Service {
    /// `None`: who asks says for whom.
    peer: Option<Peer>,
    place: Arc<ConnectionPlace>,
    router: Router,
}

/// HTTP on one connection, until it ends or, while it is idle, the server does.
async fn speak<T: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static>(
    io: T,
    service: Service,
    limits: &Limits,
    watcher: Watcher,
) -> Result<(), String> {
    let Service { peer, place, router } = service;
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Arc::new(place.begin()));
        if let Some(peer) = peer.or_else(|| told_peer(request.headers_mut())) {
            request.extensions_mut().insert(peer);
        }
        router.clone().oneshot(request)
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(limits.header_bytes)
        .serve_connection(io, service);
    watcher.watch(connection).await.map_err(|error| error.to_string())
}

/// Whose request a router passes on.
fn told_peer(headers: &mut HeaderMap) -> Option<Peer> {
    headers.remove(PEER)?.to_str().ok()?.parse().ok().map(Peer)
}
