//! HTTPS: rustls with ring, HTTP/1.1 only.
//!
//! Owns: certificate and key, and reading them again when their files change, so that a renewed certificate needs no restart.
//! A pair that cannot be used is refused at start; later, the one before stays and the log says why.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::ServerError;

/// PEM files; read again when they change.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate and what leads from it to its authority.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// How often the files are looked at, at most.
const LOOKED_AT_EVERY: Duration = Duration::from_secs(5);

pub(crate) struct Tls {
    files: TlsFiles,
    now: Mutex<Now>,
}

struct Now {
    config: Arc<ServerConfig>,
    changed: [Option<SystemTime>; 2],
    looked: Instant,
}

impl Tls {
    pub fn open(files: &TlsFiles) -> Result<Self, ServerError> {
        let changed = changed(files);
        let now = Now { config: load(files).map_err(ServerError::Config)?, changed, looked: Instant::now() };
        Ok(Self { files: files.clone(), now: Mutex::new(now) })
    }

    /// For the next connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        let mut now = self.now.lock();
        if now.looked.elapsed() >= LOOKED_AT_EVERY {
            now.looked = Instant::now();
            let changed = changed(&self.files);
            if changed != now.changed {
                now.changed = changed;
                match load(&self.files) {
                    Ok(config) => now.config = config,
                    Err(error) => tracing::error!(%error, "the certificate before is still used"),
                }
            }
        }
        TlsAcceptor::from(now.config.clone())
    }
}

fn changed(files: &TlsFiles) -> [Option<SystemTime>; 2] {
    [&files.certificate, &files.key].map(|path| std::fs::metadata(path).and_then(|data| data.modified()).ok())
}

fn load(files: &TlsFiles) -> Result<Arc<ServerConfig>, String> {
    let named = |path: &Path, what: &str, error: &dyn std::fmt::Display| {
        format!("{}: {what}: {error}", path.display())
    };
    let wrong =
        |error: &dyn std::fmt::Display| named(&files.certificate, "no certificate in PEM form", error);
    let chain = CertificateDer::pem_file_iter(&files.certificate).map_err(|error| wrong(&error))?;
    let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(|error| wrong(&error))?;
    if chain.is_empty() {
        return Err(wrong(&"the file has none"));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key);
    let key = key.map_err(|error| named(&files.key, "no private key in PEM form", &error))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, key);
    let mut config =
        config.map_err(|error| named(&files.key, "certificate and key cannot be used together", &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
