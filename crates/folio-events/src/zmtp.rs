//! ZMTP 3, without security: what ZMQ sockets say to each other over TCP (RFC 23, 37).
//!
//! Owns: the greeting, the handshake, frames. Must never: read more of a peer than a bound, or believe a length.
//!
//! ```text
//! greeting   ff 8*00 7f | 03 minor | mechanism, 20 bytes | as-server | 31*00
//! frame      flags (1 more, 2 long, 4 command) | length u8, or u64 big-endian if long | body
//! command    length of its name u8 | name | data; READY: properties: length u8 | name | length u32 big-endian | value
//! ```

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of one frame of a peer. Subscriptions and requests of replays are shorter, and so is metadata.
pub(crate) const FRAME_BYTES_MAX: u64 = 4096;

const GREETING: usize = 64;
const MECHANISM: [u8; 20] = *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Of a request: an empty one and a number.
const REQUEST_FRAMES_MAX: usize = 4;
/// Commands may have names of so many bytes of their own frames.
const PONG_CONTEXT_MAX: usize = 16;

/// Why a peer is no peer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    #[error("it speaks no ZMTP 3")]
    Greeting,
    #[error("it wants a security mechanism; there is none")]
    Mechanism,
    #[error("its handshake is not one")]
    Handshake,
    #[error("it is a {0}, which this socket does not talk to")]
    Socket(String),
    #[error("its frame of {0} bytes is longer than {FRAME_BYTES_MAX}")]
    TooLong(u64),
    #[error("its frame has unknown flags")]
    Flags,
    #[error("its message is none that is understood here")]
    Message,
    #[error("it took too long")]
    Slow,
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub is_command: bool,
    pub more: bool,
    pub body: Vec<u8>,
}

impl Frame {
    /// Name and data of a command.
    pub fn command(&self) -> Option<(&[u8], &[u8])> {
        let (length, rest) = self.body.split_first().filter(|_| self.is_command)?;
        rest.split_at_checked(usize::from(*length))
    }

    /// What to answer a PING with: its context.
    pub fn pong(&self) -> Option<Vec<u8>> {
        let (name, data) = self.command()?;
        let context = data.get(2..).filter(|context| name == b"PING" && context.len() <= PONG_CONTEXT_MAX)?;
        let body = [b"\x04PONG", context].concat();
        Some([&[COMMAND, body.len() as u8][..], &body].concat())
    }
}

pub(crate) async fn read_frame(from: &mut (impl AsyncRead + Unpin)) -> Result<Frame, PeerError> {
    let flags = from.read_u8().await?;
    if flags & !(MORE | LONG | COMMAND) != 0 {
        return Err(PeerError::Flags);
    }
    let length = match flags & LONG {
        0 => u64::from(from.read_u8().await?),
        _ => from.read_u64().await?,
    };
    if length > FRAME_BYTES_MAX {
        return Err(PeerError::TooLong(length));
    }
    let mut body = vec![0; length as usize];
    from.read_exact(&mut body).await?;
    Ok(Frame { is_command: flags & COMMAND != 0, more: flags & MORE != 0, body })
}

/// What a peer wants of a socket that answers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Messages from this number on.
    Replay(u64),
    /// Nothing: it says something of the connection.
    Command(Frame),
}

/// A number of 8 bytes, big-endian, and before it empty frames: a REQ puts one there, a DEALER up to three.
pub(crate) async fn read_request(from: &mut (impl AsyncRead + Unpin)) -> Result<Asked, PeerError> {
    let mut frames = 0;
    loop {
        let frame = read_frame(from).await?;
        if frame.is_command {
            return if frames == 0 { Ok(Asked::Command(frame)) } else { Err(PeerError::Message) };
        }
        frames += 1;
        match (frame.more, &frame.body[..]) {
            (true, b"") if frames < REQUEST_FRAMES_MAX => {}
            (false, number) => {
                let number = number.try_into().map_err(|_| PeerError::Message)?;
                return Ok(Asked::Replay(u64::from_be_bytes(number)));
            }
            _ => return Err(PeerError::Message),
        }
    }
}

/// Appends what stands before a frame's body, which is part of a message.
pub(crate) fn begin_frame(out: &mut Vec<u8>, length: usize, more: bool) {
    let more = if more { MORE } else { 0 };
    match u8::try_from(length) {
        Ok(length) => out.extend([more, length]),
        Err(_) => {
            out.push(more | LONG);
            out.extend((length as u64).to_be_bytes());
        }
    }
}

/// Appends a frame of a message that has more.
pub(crate) fn put_frame(out: &mut Vec<u8>, body: &[u8]) {
    begin_frame(out, body.len(), true);
    out.extend_from_slice(body);
}

fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..32].copy_from_slice(&MECHANISM);
    bytes
}

fn ready(socket: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend((socket.len() as u32).to_be_bytes());
    body.extend(socket.as_bytes());
    [&[COMMAND, body.len() as u8][..], &body].concat()
}

/// Makes a connection one between `socket` and a peer of one of `peers`.
pub(crate) async fn shake_hands(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    socket: &str,
    peers: &[&str],
) -> Result<(), PeerError> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING];
    // An older version waits behind its signature.
    stream.read_exact(&mut theirs[..11]).await?;
    if (theirs[0], theirs[9]) != (0xff, 0x7f) || theirs[10] < 3 {
        return Err(PeerError::Greeting);
    }
    stream.read_exact(&mut theirs[11..]).await?;
    if theirs[12..32] != MECHANISM {
        return Err(PeerError::Mechanism);
    }
    stream.write_all(&ready(socket)).await?;
    let frame = read_frame(stream).await?;
    let Some((b"READY", properties)) = frame.command() else { return Err(PeerError::Handshake) };
    match property(properties, b"Socket-Type") {
        Some(peer) if peers.iter().any(|known| known.as_bytes() == peer) => Ok(()),
        Some(peer) => {
            Err(PeerError::Socket(String::from_utf8_lossy(&peer[..peer.len().min(16)]).into_owned()))
        }
        None => Err(PeerError::Handshake),
    }
}

/// The value of a property; names are compared without regard to case.
fn property<'a>(mut rest: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    loop {
        let (length, after) = rest.split_first()?;
        let (name, after) = after.split_at_checked(usize::from(*length))?;
        let (length, after) = after.split_first_chunk::<4>()?;
        let (value, after) = after.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn hands(theirs: &[u8]) -> Result<(), PeerError> {
        let (mut ours, mut peer) = tokio::io::duplex(1 << 16);
        peer.write_all(theirs).await.unwrap();
        peer.shutdown().await.unwrap();
        shake_hands(&mut ours, "PUB", &["SUB", "XSUB"]).await
    }

    #[tokio::test]
    async fn a_peer_is_what_says_so_in_order() {
        let good = [&greeting()[..], &ready("SUB")].concat();
        hands(&good).await.unwrap();
        for wrong in ["PULL", "PUB", "", "sub"] {
            let refused = hands(&[&greeting()[..], &ready(wrong)].concat()).await;
            assert!(matches!(refused, Err(PeerError::Socket(_))), "{wrong}");
        }
        let changed = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            bytes
        };
        assert!(matches!(hands(&changed(0, 0)).await, Err(PeerError::Greeting)));
        assert!(matches!(hands(&changed(10, 1)).await, Err(PeerError::Greeting)));
        assert!(matches!(hands(&changed(12, b'C')).await, Err(PeerError::Mechanism)));
        assert!(matches!(hands(&changed(64, 0)).await, Err(PeerError::Handshake)), "a message");
        assert!(matches!(hands(&changed(67, b'X')).await, Err(PeerError::Handshake)));
        for length in [0xff, 0x7f] {
            assert!(hands(&changed(66, length)).await.is_err(), "a name longer than its frame");
            assert!(hands(&changed(72, length)).await.is_err(), "a property longer than its frame");
            assert!(hands(&changed(84, length)).await.is_err(), "a value of 4 GB");
        }
        for end in 0..good.len() {
            assert!(hands(&good[..end]).await.is_err(), "cut off at {end}");
        }
        assert!(
            hands(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:5557\r\nUser-Agent: nobody in particular\r\n\r\n")
                .await
                .is_err()
        );
    }

    async fn frame(bytes: &[u8]) -> Result<Frame, PeerError> {
        read_frame(&mut &bytes[..]).await
    }

    #[tokio::test]
    async fn no_length_is_believed() {
        let long = |length: u64| [&[LONG][..], &length.to_be_bytes()].concat();
        for length in [FRAME_BYTES_MAX + 1, 1 << 32, u64::MAX] {
            assert!(matches!(frame(&long(length)).await, Err(PeerError::TooLong(found)) if found == length));
        }
        assert!(matches!(frame(&[8, 0]).await, Err(PeerError::Flags)));
        assert!(matches!(frame(&[0, 5, 1]).await, Err(PeerError::Io(_))), "cut off");
        let whole = frame(&[&long(2)[..], b"ab"].concat()).await.unwrap();
        assert_eq!((whole.body.as_slice(), whole.more, whole.is_command), (&b"ab"[..], false, false));
        let ping = frame(b"\x04\x09\x04PING\0\0xy").await.unwrap();
        assert_eq!(ping.pong().unwrap(), b"\x04\x07\x04PONGxy");
        assert_eq!(frame(b"\x04\x03\x04PI").await.unwrap().command(), None);
    }

    async fn asked(bytes: &[u8]) -> Result<Asked, PeerError> {
        read_request(&mut &bytes[..]).await
    }

    #[tokio::test]
    async fn the_request_of_a_replay_is_whole_or_none() {
        for (before, number) in [(0, 0), (1, 7), (3, u64::MAX)] {
            let good = [&[MORE, 0].repeat(before)[..], &[0, 8], &number.to_be_bytes()].concat();
            assert_eq!(asked(&good).await.unwrap(), Asked::Replay(number));
            for end in 0..good.len() {
                assert!(asked(&good[..end]).await.is_err(), "cut off at {end}");
            }
            // Another bit is another number, or no request; never a command.
            for bit in 0..8 * good.len() {
                let mut wrong = good.clone();
                wrong[bit / 8] ^= 1 << (bit % 8);
                match asked(&wrong).await {
                    Ok(Asked::Replay(of)) => assert_eq!((of ^ number).count_ones(), 1, "bit {bit}"),
                    Ok(Asked::Command(_)) => assert_eq!(bit, 2),
                    Err(_) => assert!(bit / 8 < good.len() - 8, "bit {bit}"),
                }
            }
        }
        let command = Frame { is_command: true, more: false, body: b"\x04PING\0\0xy".to_vec() };
        assert_eq!(asked(b"\x04\x09\x04PING\0\0xy").await.unwrap(), Asked::Command(command));
        for wrong in [&[MORE, 0].repeat(4)[..], &[MORE, 0, COMMAND, 0], &[MORE, 1, 5], &[0, 0], &[0, 7, 0]] {
            assert!(asked(wrong).await.is_err(), "{wrong:?}");
        }
    }

    /// A peer's first bytes, changed at random: whatever they are, they end, and nothing is longer than it may be.
    #[tokio::test]
    async fn noise_is_read_within_bounds() {
        let good = [
            &greeting()[..],
            &ready("SUB"),
            b"\x04\x09\x04PING\0\0xy",
            b"\x00\x03\x01kv",
            b"\x02\0\0\0\0\0\0\0\x02ab",
        ]
        .concat();
        let mut state = 7u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let mut let_in = 0;
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..random(5) {
                let at = random(bytes.len());
                match random(4) {
                    0 => bytes[at] ^= 1 << random(8),
                    1 => bytes[at] = [0, 0x7f, 0xff, random(256) as u8][random(4)],
                    2 => bytes.insert(at, random(256) as u8),
                    _ => drop(bytes.split_off(at.max(1))),
                }
            }
            let mut stream = tokio::io::join(&bytes[..], tokio::io::sink());
            if shake_hands(&mut stream, "PUB", &["SUB", "XSUB"]).await.is_ok() {
                let_in += 1;
                while let Ok(frame) = read_frame(&mut stream).await {
                    assert!(frame.body.len() as u64 <= FRAME_BYTES_MAX);
                    assert!(frame.pong().is_none_or(|pong| pong.len() <= 7 + PONG_CONTEXT_MAX));
                }
            }
        }
        assert!(
            (4000..16_000).contains(&let_in),
            "{let_in} of them are peers: the noise is not all there is"
        );
    }
}
