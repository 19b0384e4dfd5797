//! Valkey or Redis as the server: `GETRANGE`, `SET`, `EXISTS`, each bounded in time, and an answer in bytes.
//!
//! Connections are taken for one thing at a time and put back when it was done in order; one on which anything went wrong is closed, so
//! no late answer is ever taken for another one. A connection of its own (`wire`) reads no more than what was asked for can take, and a
//! value to where it stays. In cluster mode the client crate makes the connections, and what bounds an answer there is time alone.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::aio::ConnectionLike;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{Cmd, ErrorKind, IntoConnectionInfo, RedisConnectionInfo, RedisError, ServerErrorKind, Value};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

use super::wire::Wire;
use super::{AddressError, Fault, Name, ObjectLimits, Objects};
use crate::types::Secret;

const LIMITS: ObjectLimits = ObjectLimits {
    // Large enough that a server is busy with bytes and not with requests, small enough that one does not hold up the next for long.
    value_bytes: 4 << 20,
    // What a server takes at most (`proto-max-bulk-len` is that by default).
    value_bytes_max: 512 << 20,
    asked_at_once: 16,
    find: Duration::from_millis(20),
    carry: Duration::from_secs(2),
};
const KEY_PREFIX: &str = "folio:kv:";
/// Connections that wait for the next question.
const IDLE: usize = 64;

/// Where the server is, and how to get in.
#[derive(Clone)]
pub struct ValkeyConfig {
    /// `valkey://`, `valkeys://` (TLS), `redis://` or `rediss://`, then `[USER[:PASSWORD]@]HOST[:PORT][/DATABASE][?cluster=true]`.
    pub url: Secret,
    pub password: Option<Secret>,
    /// PEM of the certificates that the server's is signed with; `None`: the public ones.
    pub authorities: Option<Vec<u8>>,
}

/// See the module documentation.
pub struct Valkey {
    host: String,
    port: u16,
    /// What a connection begins with.
    login: Vec<Cmd>,
    tls: Option<TlsConnector>,
    cluster: Option<ClusterClient>,
    idle: Mutex<Vec<Conn>>,
    /// There until it is dropped.
    runtime: Option<Runtime>,
}

impl Drop for Valkey {
    /// Waits for nothing: an event loop may be the last to let go of it.
    fn drop(&mut self) {
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

impl fmt::Debug for Valkey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Valkey").field("host", &self.host).field("port", &self.port).finish_non_exhaustive()
    }
}

enum Conn {
    Single(Wire),
    Cluster(ClusterConnection),
}

impl Valkey {
    /// Looks at the address; asks nobody.
    pub fn new(config: &ValkeyConfig) -> Result<Self, AddressError> {
        let url = redis::parse_redis_url(&config.url.0);
        let scheme = config.url.0.split("://").next().unwrap_or_default();
        if !matches!(scheme, "valkey" | "valkeys" | "redis" | "rediss") {
            return Err(AddressError::Scheme(scheme.chars().take(40).collect()));
        }
        let url = url.ok_or_else(|| AddressError::Url("it cannot be read".into()))?;
        let mut cluster = false;
        for (name, value) in url.query_pairs() {
            match (&*name, &*value) {
                ("cluster", "true") => cluster = true,
                ("cluster", "false") => {}
                _ => {
                    return Err(AddressError::Url(format!(
                        "of ?{name}={value} nothing is known, only cluster=true"
                    )));
                }
            }
        }
        if url.fragment().is_some() {
            return Err(AddressError::Url("nothing may follow behind a '#'".into()));
        }
        let wrong = |error: RedisError| AddressError::Url(error.to_string());
        let info = url.into_connection_info().map_err(wrong)?;
        let (host, port, tls) = match info.addr() {
            redis::ConnectionAddr::Tcp(host, port) => (host.clone(), *port, false),
            redis::ConnectionAddr::TcpTls { host, port, .. } => (host.clone(), *port, true),
            _ => return Err(AddressError::Url("it names no host".into())),
        };
        let mut login = info.redis_settings().clone().set_skip_set_lib_name();
        if let Some(password) = &config.password {
            login = login.set_password(&password.0);
        }
        let tls = tls.then(|| connector(config.authorities.as_deref())).transpose()?;
        let cluster =
            cluster.then(|| cluster_client(info.set_redis_settings(login.clone()), config)).transpose()?;
        let login = greeting(&login);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(4)
            .thread_name("folio-valkey-io")
            .enable_all()
            .build()?;
        Ok(Self { host, port, login, tls, cluster, idle: Mutex::default(), runtime: Some(runtime) })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until it is dropped")
    }

    async fn connect(&self) -> Result<Conn, RedisError> {
        if let Some(cluster) = &self.cluster {
            return Ok(Conn::Cluster(cluster.get_async_connection().await?));
        }
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        stream.set_nodelay(true)?;
        let mut wire = match &self.tls {
            None => Wire::new(stream),
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(std::io::Error::other)?;
                Wire::new(tls.connect(name, stream).await?)
            }
        };
        let denied = |error: RedisError| match error.kind() {
            ErrorKind::Extension => {
                let what = "Password authentication failed";
                RedisError::from((ErrorKind::AuthenticationFailed, what, error.to_string()))
            }
            _ => error,
        };
        wire.ask(&self.login, 0).await.map_err(denied)?;
        Ok(Conn::Single(wire))
    }

    /// Asks everything at once. `bytes`: what the answers take at most, without their frames.
    fn ask(&self, commands: &[Cmd], bytes: usize, limit: Duration) -> Result<Vec<Value>, Fault> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = async {
            let taken = idle().pop();
            let mut conn = match taken {
                Some(conn) => conn,
                None => self.connect().await?,
            };
            let answers: Vec<Value> = match &mut conn {
                Conn::Single(wire) => wire.ask(commands, bytes).await?,
                Conn::Cluster(conn) => {
                    let one = |command| {
                        let mut conn = conn.clone();
                        async move { conn.req_packed_command(command).await }
                    };
                    join_all(commands.iter().map(one)).await.into_iter().collect::<Result<_, _>>()?
                }
            };
            Ok::<_, RedisError>((conn, answers))
        };
        let (conn, answers) =
            match self.runtime().block_on(async { tokio::time::timeout(limit, asked).await }) {
                Ok(Ok(asked)) => asked,
                Ok(Err(error)) => return Err(self.fault(&error)),
                Err(_) => return Err(Fault::Late),
            };
        for answer in &answers {
            if let Value::ServerError(error) = answer {
                return Err(Fault::Refused(format!("{}: {error:?}", self.server())));
            }
        }
        let mut idle = idle();
        if idle.len() < IDLE {
            idle.push(conn);
        }
        Ok(answers)
    }

    fn fault(&self, error: &RedisError) -> Fault {
        let text = format!("{}: {error}", self.server());
        match error.kind() {
            // It has just begun, or is changing who is who.
            ErrorKind::Server(
                ServerErrorKind::BusyLoading | ServerErrorKind::ClusterDown | ServerErrorKind::MasterDown,
            ) => Fault::Broken(text),
            ErrorKind::AuthenticationFailed | ErrorKind::Server(_) | ErrorKind::Extension => {
                Fault::Refused(text)
            }
            _ => Fault::Broken(text),
        }
    }

    fn garbage(&self) -> Fault {
        Fault::Broken(format!("{}: what it answers is no answer", self.server()))
    }
}

impl Objects for Valkey {
    fn name(&self) -> &'static str {
        "valkey"
    }

    fn server(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    fn limits(&self) -> ObjectLimits {
        LIMITS
    }

    fn exist(&self, names: &[Name], limit: Duration) -> Result<Vec<bool>, Fault> {
        let commands: Vec<Cmd> = names.iter().map(|name| command("EXISTS", name)).collect();
        let answers = self.ask(&commands, 0, limit)?;
        let is_there = |answer: &Value| match answer {
            Value::Int(count) => Ok(*count > 0),
            _ => Err(self.garbage()),
        };
        answers.iter().map(is_there).collect()
    }

    fn get(&self, name: &Name, range: Range<usize>, limit: Duration) -> Result<Option<Vec<u8>>, Fault> {
        let mut get = command("GETRANGE", name);
        get.arg(range.start).arg(range.end - 1);
        let mut answers = self.ask(&[get], range.len(), limit)?;
        match answers.pop() {
            // A key that is not there reads as if it were empty; a value here never is.
            Some(Value::BulkString(value)) => Ok((!value.is_empty()).then_some(value)),
            _ => Err(self.garbage()),
        }
    }

    fn put(&self, name: &Name, value: &[u8], replace: bool, limit: Duration) -> Result<(), Fault> {
        let mut set = command("SET", name);
        set.arg(value);
        if !replace {
            set.arg("NX");
        }
        match self.ask(&[set], 0, limit)?.pop() {
            // It was there, and is left.
            Some(Value::Nil) if !replace => Ok(()),
            Some(Value::Okay) => Ok(()),
            _ => Err(self.garbage()),
        }
    }

    fn ping(&self, limit: Duration) -> Result<(), Fault> {
        match self.ask(&[redis::cmd("PING")], 0, limit)?.pop() {
            Some(Value::SimpleString(pong)) if pong == "PONG" => Ok(()),
            _ => Err(self.garbage()),
        }
    }
}

fn command(what: &str, name: &Name) -> Cmd {
    let mut command = redis::cmd(what);
    command.arg(format!("{KEY_PREFIX}{name}"));
    command
}

/// Who asks, and in which of the server's databases.
fn greeting(login: &RedisConnectionInfo) -> Vec<Cmd> {
    let mut commands = Vec::new();
    if let Some(password) = login.password() {
        let mut auth = redis::cmd("AUTH");
        auth.arg(login.username()).arg(password);
        commands.push(auth);
    }
    if login.db() != 0 {
        let mut select = redis::cmd("SELECT");
        select.arg(login.db());
        commands.push(select);
    }
    commands
}

/// With the public authorities, or those in `pem`.
fn connector(pem: Option<&[u8]>) -> Result<TlsConnector, AddressError> {
    let mut roots = RootCertStore::empty();
    match pem {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(pem) => {
            let wrong = |error: &dyn fmt::Display| AddressError::Authorities(error.to_string());
            for certificate in CertificateDer::pem_slice_iter(pem) {
                let certificate = certificate.map_err(|error| wrong(&error))?;
                roots.add(certificate).map_err(|error| wrong(&error))?;
            }
            if roots.is_empty() {
                return Err(wrong(&"there is none in the file"));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| AddressError::Authorities(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

fn cluster_client(info: redis::ConnectionInfo, config: &ValkeyConfig) -> Result<ClusterClient, AddressError> {
    // The client crate asks for the process's provider. Whoever set one before set this one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = ClusterClient::builder(vec![info])
        .connection_timeout(LIMITS.carry)
        .response_timeout(LIMITS.carry)
        .retries(1);
    if let Some(pem) = &config.authorities {
        let certificates = redis::TlsCertificates { client_tls: None, root_cert: Some(pem.clone()) };
        builder = builder.certs(certificates);
    }
    builder.build().map_err(|error| AddressError::Url(error.to_string()))
}
