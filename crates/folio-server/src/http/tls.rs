//! HTTPS: rustls with ring, HTTP/1.1 only.
//!
//! Owns: certificate and key, and reading them again when their files change, so that a renewed certificate needs no restart.
//! A pair that cannot be used is refused at start; later, the one before stays and the log says why. Must never: look at a file for a
//! connection: whoever serves has the files looked at beside the event loop, every [`LOOKED_AT_EVERY`].

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

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

/// How often the files are looked at.
pub(crate) const LOOKED_AT_EVERY: Duration = Duration::from_secs(5);

pub(crate) struct Tls {
    files: TlsFiles,
    now: Mutex<Arc<ServerConfig>>,
    /// When the files that it came from were written. Locked while they are read.
    written: Mutex<[Option<SystemTime>; 2]>,
}

impl Tls {
    pub fn open(files: &TlsFiles) -> Result<Self, ServerError> {
        let written = Mutex::new(written(files));
        let now = Mutex::new(load(files).map_err(ServerError::Config)?);
        Ok(Self { files: files.clone(), now, written })
    }

    /// For the next connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.now.lock().clone())
    }

    /// Reads the files again if they changed. Blocks.
    pub fn look(&self) {
        let mut before = self.written.lock();
        let written = written(&self.files);
        if written == *before {
            return;
        }
        *before = written;
        match load(&self.files) {
            Ok(config) => *self.now.lock() = config,
            Err(error) => tracing::error!(%error, "the certificate before is still used"),
        }
    }
}

fn written(files: &TlsFiles) -> [Option<SystemTime>; 2] {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_looks_at_no_file_and_a_pair_that_changed_is_read_when_somebody_looks() {
        let folder = std::env::temp_dir().join(format!("folio-tls-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let files = TlsFiles { certificate: folder.join("cert.pem"), key: folder.join("key.pem") };
        let copy = || {
            for (name, path) in [("cert.pem", &files.certificate), ("key.pem", &files.key)] {
                let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(name);
                std::fs::copy(from, path).unwrap();
            }
        };
        copy();
        let tls = Tls::open(&files).unwrap();
        let now = || tls.now.lock().clone();
        let first = now();
        std::fs::remove_file(&files.key).unwrap();
        tls.acceptor();
        assert!(tls.written.lock()[1].is_some(), "nobody looked");
        tls.look();
        assert!(Arc::ptr_eq(&first, &now()), "a pair that is not whole is not used");
        copy();
        tls.look();
        assert!(!Arc::ptr_eq(&first, &now()));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
