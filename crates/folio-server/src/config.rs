//! What an operator chooses: addresses, keys and limits. Every limit of the server is a field here.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use folio_api::RequestLimits;
use folio_api::hints::HintPolicy;
use folio_engine::Drafter;
use folio_events::EventSource;

use crate::batch::config::BatchConfig;
use crate::error::ServerError;
use crate::http::tls::TlsFiles;
use crate::observability::why::WhyConfig;
use crate::safety::Safety;
use crate::tenancy::declared::Declared;
use crate::tenancy::keyring::Keyring;
use crate::tenancy::tenants::Tenants;
use crate::threads::fair_queue::LARGE;

/// How to serve. `Default` is what `folio serve` starts with.
///
/// Cannot be printed: it holds keys.
#[derive(Clone)]
pub struct ServerConfig {
    pub listen: SocketAddr,
    /// Each key is a tenant of its own. Empty: no authentication, one tenant.
    pub api_keys: Vec<String>,
    /// Tenants of the operator's file, beside those keys.
    pub tenants: Declared,
    /// File of keys ([`crate::tenancy::keys`]); keys made or revoked in it count at once.
    pub key_file: Option<PathBuf>,
    /// File in which records of usage outlive the process. `None`: they are kept in memory.
    pub usage_file: Option<PathBuf>,
    /// JSON lines of who asked for what, without any text of a prompt or answer.
    pub audit_file: Option<PathBuf>,
    /// The second listener, for operators.
    pub admin: Option<AdminConfig>,
    /// `/metrics` is on the second listener only.
    pub metrics_on_admin: bool,
    /// HTTPS, on both listeners.
    pub tls: Option<TlsFiles>,
    /// What tenants' cache secrets are derived from. `Default`: random at every start, so that nothing cached outside the
    /// process is reachable after a restart.
    pub keyring: Keyring,
    /// Series per tenant on `/metrics`, with their names.
    pub tenant_metrics: bool,
    /// Where a span of each request is sent (OTLP over HTTP). `None`: nowhere.
    pub traces_endpoint: Option<String>,
    /// What `/v1/why` is told by whoever runs this.
    pub why: WhyConfig,
    /// Fields of requests that may be passed over.
    pub hints: HintPolicy,
    /// What is let in and out.
    pub safety: Safety,
    pub limits: Limits,
    pub batch: BatchConfig,
    /// What is told to routers of what the cache holds, and of whom. `None`: nothing.
    pub kv_events: Option<EventSource>,
    /// Where drafts come from for a request that says nothing of it. `None`: from nowhere.
    pub speculate: Option<Drafter>,
    /// Threads of the event loop: connections, TLS, streams.
    pub http_threads: usize,
    /// How long a drain waits for running requests before it cancels them; what is left of it is told at the end ([`crate::Server::listen`]).
    pub drain_timeout: Duration,
}

/// Where operators reach what no tenant may.
#[derive(Clone)]
pub struct AdminConfig {
    pub listen: SocketAddr,
    /// Keys that open it, beside keys of the file of keys with the scope `admin`. Without either it is open.
    pub keys: Vec<String>,
}

impl ServerConfig {
    /// The key ring that it declares.
    pub(crate) fn key_ring(&self) -> Result<Tenants, ServerError> {
        let file = self.key_file.as_deref();
        let mut tenants = Tenants::new(&self.api_keys, &self.tenants, file, self.keyring.clone())?;
        self.admin.iter().flat_map(|admin| &admin.keys).try_for_each(|key| tenants.add_admin(key))?;
        Ok(tenants)
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8000),
            api_keys: Vec::new(),
            tenants: Declared::default(),
            key_file: None,
            usage_file: None,
            audit_file: None,
            admin: None,
            metrics_on_admin: false,
            tls: None,
            keyring: Keyring::default(),
            tenant_metrics: false,
            traces_endpoint: None,
            why: WhyConfig::default(),
            hints: HintPolicy::default(),
            safety: Safety::default(),
            limits: Limits::default(),
            batch: BatchConfig::default(),
            kv_events: None,
            speculate: None,
            http_threads: 1,
            drain_timeout: Duration::from_secs(120),
        }
    }
}

/// Everything has a limit; refusing is an answer. The queue's limits (requests and tokens) belong to the engine.
#[derive(Clone, Debug)]
pub struct Limits {
    /// 413 above this.
    pub body_bytes: usize,
    /// What one request may hold.
    pub request: RequestLimits,
    /// Responses that can be asked for again or gone on from, of all keys together, and their bytes.
    pub responses: usize,
    pub responses_bytes: usize,
    /// Pieces of text work (parsing, rendering, tokenizing, long answers) done at once, off the event loop; more wait in line.
    pub text_threads: usize,
    /// Pieces waiting for that; 429 above this. One tenant may have half of the places.
    pub text_waiting: usize,
    /// A piece of text work on more bytes has a thread of its own, which gives way to others.
    pub text_large_bytes: usize,
    /// Connections of one listener. Beyond it the one idle for longest is closed.
    pub connections: usize,
    /// Bytes of a request's line and headers.
    pub header_bytes: usize,
    /// A client that accepts nothing of what waits for it for this long is cut off.
    pub write_timeout: Duration,
    /// Bytes of one answer that are held for a client that has not accepted them; beyond it the answer ends.
    pub unread_bytes: usize,
    /// Bytes held for all requests together: bodies, prompts, and answers that were not accepted. One tenant may have half of them.
    pub in_flight_bytes: usize,
    /// Time to send a request's head, and time between requests on a kept-alive connection.
    pub header_timeout: Duration,
    /// Time to send a request's body.
    pub body_timeout: Duration,
    /// A request fails with 504 after this. `None`: never.
    pub request_timeout: Option<Duration>,
    /// Comment lines on an idle event stream, so that proxies keep it open.
    pub keep_alive: Duration,
    /// `/health` fails when work waits and no step finished for this long. A step is at most a few seconds on a slow
    /// machine with a large model.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 8 << 20,
            request: RequestLimits::default(),
            responses: 4096,
            responses_bytes: 64 << 20,
            text_threads: 2,
            text_waiting: 512,
            text_large_bytes: LARGE as usize,
            connections: 16_384,
            header_bytes: 64 << 10,
            write_timeout: Duration::from_secs(120),
            unread_bytes: 256 << 20,
            in_flight_bytes: 1 << 30,
            header_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            request_timeout: None,
            keep_alive: Duration::from_secs(15),
            stall: Duration::from_secs(60),
        }
    }
}
