//! What a peer of the KV events says: a handshake, and behind it requests of replays.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
#[path = "../../crates/folio-events/src/zmtp.rs"]
mod zmtp;

async fn read_all(bytes: &[u8]) -> Result<(), zmtp::PeerError> {
    let mut peer = tokio::io::join(bytes, tokio::io::sink());
    zmtp::shake_hands(&mut peer, "ROUTER", &["DEALER", "REQ"]).await?;
    loop {
        if let zmtp::Asked::Command(frame) = zmtp::read_request(&mut peer).await? {
            assert!(frame.pong().is_none_or(|pong| pong.len() < 64));
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    assert!(runtime.block_on(read_all(bytes)).is_err(), "bytes end");
});
