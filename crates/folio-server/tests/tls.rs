//! HTTPS against who means it badly: handshakes that never end, and protocols that are not spoken. The key is the test's own.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use common::{FakeEngine, app};
use folio_server::{Limits, Listeners, Server, ServerConfig, TlsFiles};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const CERTIFICATE: &str = "tests/data/tls/cert.pem";

async fn served() -> (SocketAddr, mpsc::Sender<()>) {
    let config = ServerConfig {
        tls: Some(TlsFiles { certificate: CERTIFICATE.into(), key: "tests/data/tls/key.pem".into() }),
        limits: Limits { header_timeout: Duration::from_millis(300), ..Limits::default() },
        ..Default::default()
    };
    let server = Server::new(config, app(FakeEngine::saying("ok"))).unwrap();
    let serving = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = serving.local_addr().unwrap();
    let (signals, receiver) = mpsc::channel(4);
    tokio::spawn(server.listen(Listeners { serving, admin: None }, receiver));
    (address, signals)
}

async fn connect(address: SocketAddr, protocols: &[&[u8]]) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(CERTIFICATE).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    let socket = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("localhost").unwrap(), socket).await
}

async fn healthy(address: SocketAddr, protocols: &[&[u8]]) {
    let mut stream = connect(address, protocols).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[tokio::test]
async fn only_http_1_1_is_offered() {
    let (address, _signals) = served().await;
    healthy(address, &[]).await;
    healthy(address, &[b"h2", b"http/1.1"]).await;
    let stream = connect(address, &[b"h2", b"http/1.1"]).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"http/1.1".as_slice()));
    let refused = match connect(address, &[b"h2"]).await {
        Err(_) => true,
        // With TLS 1.3 the alert comes behind the client's own last word.
        Ok(mut stream) => stream.read(&mut [0; 16]).await.is_err(),
    };
    assert!(refused, "who speaks nothing else is not spoken to");
}

#[tokio::test]
async fn handshakes_that_never_end_are_given_up_and_delay_nobody() {
    let (address, _signals) = served().await;
    let mut open = Vec::new();
    for at in 0..200 {
        let mut socket = TcpStream::connect(address).await.unwrap();
        // Nothing, or the beginning of a first message that announces more.
        let said: &[u8] = if at % 2 == 0 { b"" } else { b"\x16\x03\x01\x02\x00\x01" };
        socket.write_all(said).await.unwrap();
        open.push(socket);
    }
    healthy(address, &[]).await;
    for mut socket in open {
        let ended = tokio::time::timeout(Duration::from_secs(20), socket.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "a handshake that does not go on is not waited for");
    }
}
