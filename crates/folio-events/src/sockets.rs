//! The two sockets: PUB, which tells everybody, and ROUTER, which repeats what somebody missed.
//!
//! Owns: peers. Must never: keep anything of a peer but its place in the log and how many of its subscriptions match.
//!
//! What can go wrong, and what happens then:
//! - a subscriber reads slowly: it falls behind the log or `hwm`, what it lost is counted, and it goes on with the oldest there is;
//! - it reads nothing for [`STALLED`] while there is something to send: it is closed, and ZMQ's own sockets connect again;
//! - a peer says what is no ZMTP, or too much of it: it is closed and counted;
//! - there are [`PEERS_MAX`] peers of a socket: the next is closed at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

use crate::counts::{Counts, Peer, add};
use crate::log::{Log, Read};
use crate::zmtp::{Asked, Frame, PeerError, begin_frame, put_frame, read_frame, read_request, shake_hands};

/// Connections of one socket.
pub(crate) const PEERS_MAX: usize = 256;
const HANDSHAKE: Duration = Duration::from_secs(10);
const STALLED: Duration = Duration::from_secs(60);
/// After a failed accept: out of file descriptors, mostly.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Answers to PINGs that were not accepted yet.
const PONGS_MAX: usize = 4;
/// Ends a replay.
const END: [u8; 8] = [0xff; 8];

/// What the sockets share.
pub(crate) struct Published {
    pub log: Arc<Log>,
    pub counts: Arc<Counts>,
    pub topic: Vec<u8>,
    /// Messages that a subscriber may be late.
    pub hwm: u64,
    /// Replies of a replay carry the topic.
    pub replay_topic: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Socket {
    Pub,
    Router,
}

pub(crate) async fn listen(listener: TcpListener, socket: Socket, published: Arc<Published>) {
    let places = Arc::new(Semaphore::new(PEERS_MAX));
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "a connection for KV events could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            add(&published.counts.refused, 1);
            continue;
        };
        let published = published.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(stream, address, socket, &published).await {
                match &error {
                    PeerError::Io(error) => tracing::debug!(%address, %error, "a peer of KV events is gone"),
                    _ => {
                        add(&published.counts.refused, 1);
                        tracing::warn!(%address, %error, "a peer of KV events was closed");
                    }
                }
            }
            drop(place);
        });
    }
}

async fn serve(
    mut stream: TcpStream,
    address: SocketAddr,
    socket: Socket,
    published: &Published,
) -> Result<(), PeerError> {
    stream.set_nodelay(true)?;
    let (name, peers) = match socket {
        Socket::Pub => ("PUB", &["SUB", "XSUB"][..]),
        Socket::Router => ("ROUTER", &["DEALER", "REQ", "ROUTER"][..]),
    };
    let hands = shake_hands(&mut stream, name, peers);
    timeout(HANDSHAKE, hands).await.map_err(|_| PeerError::Slow)??;
    let (reader, writer) = stream.into_split();
    match socket {
        Socket::Pub => publish(reader, writer, address, published).await,
        Socket::Router => replay(reader, writer, published).await,
    }
}

/// Where a subscriber is: the number of the next message to send, from when it subscribed on.
type Place = Option<u64>;

async fn publish(
    reader: OwnedReadHalf,
    writer: OwnedWriteHalf,
    address: SocketAddr,
    published: &Published,
) -> Result<(), PeerError> {
    let peer = published.counts.enter(address);
    let (subscribed, place) = watch::channel(None);
    let (pings, pongs) = mpsc::channel(PONGS_MAX);
    let ended = tokio::select! {
        ended = follow_subscriptions(reader, published, subscribed, pings) => ended,
        ended = send_messages(writer, published, place, pongs, &peer) => ended,
    };
    published.counts.leave(&peer, published.log.floor(published.hwm));
    ended
}

/// Subscriptions and their ends. Of each it keeps whether it matches the topic, so thousands of them take nothing.
async fn follow_subscriptions(
    mut reader: OwnedReadHalf,
    published: &Published,
    subscribed: watch::Sender<Place>,
    pings: mpsc::Sender<Vec<u8>>,
) -> Result<(), PeerError> {
    let mut matching = 0u64;
    loop {
        let frame = read_frame(&mut reader).await?;
        if let Some(pong) = frame.pong() {
            // Who sends PINGs and reads no answers gets none.
            let _ = pings.try_send(pong);
            continue;
        }
        let Some((subscribes, prefix)) = subscription(&frame)? else { continue };
        if !published.topic.starts_with(prefix) {
            continue;
        }
        matching = if subscribes { matching.saturating_add(1) } else { matching.saturating_sub(1) };
        subscribed.send_if_modified(|place| match (matching, *place) {
            (1.., None) => {
                *place = Some(published.log.range().1);
                true
            }
            (0, Some(_)) => place.take().is_some(),
            _ => false,
        });
    }
}

/// Whether a frame subscribes (or ends that), and to what. Nothing: it is of no meaning here.
fn subscription(frame: &Frame) -> Result<Option<(bool, &[u8])>, PeerError> {
    if frame.is_command {
        return match frame.command() {
            Some((b"SUBSCRIBE", prefix)) => Ok(Some((true, prefix))),
            Some((b"CANCEL", prefix)) => Ok(Some((false, prefix))),
            Some(_) => Ok(None),
            None => Err(PeerError::Message),
        };
    }
    match (frame.more, frame.body.split_first()) {
        (false, Some((1, prefix))) => Ok(Some((true, prefix))),
        (false, Some((0, prefix))) => Ok(Some((false, prefix))),
        _ => Err(PeerError::Message),
    }
}

async fn send_messages(
    mut writer: OwnedWriteHalf,
    published: &Published,
    mut subscribed: watch::Receiver<Place>,
    mut pongs: mpsc::Receiver<Vec<u8>>,
    peer: &Peer,
) -> Result<(), PeerError> {
    let mut head = published.log.head();
    let mut place: Place = None;
    loop {
        // Who subscribes to something more stays where it is.
        let new = *subscribed.borrow_and_update();
        place = new.map(|new| place.unwrap_or(new));
        peer.next.store(place.unwrap_or(u64::MAX), Relaxed);
        while let Ok(pong) = pongs.try_recv() {
            write(&mut writer, &pong).await?;
        }
        let newest = *head.borrow_and_update();
        if let Some(next) = place.as_mut().filter(|next| **next < newest) {
            let floor = published.log.floor(published.hwm);
            if *next < floor {
                peer.lost(&published.counts, floor - *next);
                *next = floor;
                peer.next.store(floor, Relaxed);
            }
            match published.log.read(*next) {
                Read::Message(message) => {
                    let header = header(&[&published.topic], *next);
                    send(&mut writer, header, &message).await?;
                    add(&peer.sent, 1);
                    *next += 1;
                }
                // It was given up since: counted next time.
                Read::Gone(_) | Read::Ahead => {}
            }
            continue;
        }
        tokio::select! {
            changed = head.changed() => if changed.is_err() { return Ok(()) },
            changed = subscribed.changed() => if changed.is_err() { return Ok(()) },
            pong = pongs.recv() => match pong {
                Some(pong) => write(&mut writer, &pong).await?,
                None => return Ok(()),
            },
        }
    }
}

/// Frames of `before`, and the number.
fn header(before: &[&[u8]], number: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(300);
    before.iter().for_each(|frame| put_frame(&mut out, frame));
    put_frame(&mut out, &number.to_be_bytes());
    out
}

/// The last frame is the payload.
async fn send(
    writer: &mut (impl AsyncWrite + Unpin),
    mut header: Vec<u8>,
    payload: &[u8],
) -> Result<(), PeerError> {
    begin_frame(&mut header, payload.len(), false);
    write(writer, &header).await?;
    write(writer, payload).await
}

/// Gives up on who takes nothing for [`STALLED`].
async fn write(writer: &mut (impl AsyncWrite + Unpin), mut bytes: &[u8]) -> Result<(), PeerError> {
    while !bytes.is_empty() {
        let written = timeout(STALLED, writer.write(bytes)).await.map_err(|_| PeerError::Slow)??;
        if written == 0 {
            return Err(PeerError::Io(std::io::ErrorKind::WriteZero.into()));
        }
        bytes = &bytes[written..];
    }
    Ok(())
}

/// Answers requests one after another; the next is read when the last is answered.
async fn replay(
    mut reader: OwnedReadHalf,
    mut writer: OwnedWriteHalf,
    published: &Published,
) -> Result<(), PeerError> {
    loop {
        let mut next = match read_request(&mut reader).await? {
            Asked::Replay(number) => number,
            Asked::Command(frame) => {
                if let Some(pong) = frame.pong() {
                    write(&mut writer, &pong).await?;
                }
                continue;
            }
        };
        add(&published.counts.replays, 1);
        // What is published from here on comes by the other socket.
        let end = published.log.range().1;
        let before: &[&[u8]] = if published.replay_topic { &[b"", &published.topic] } else { &[b""] };
        while next < end {
            match published.log.read(next) {
                Read::Message(message) => {
                    send(&mut writer, header(before, next), &message).await?;
                    next += 1;
                }
                Read::Gone(oldest) => next = oldest,
                Read::Ahead => break,
            }
        }
        let before: &[&[u8]] = if published.replay_topic { &[b"", b""] } else { &[b""] };
        send(&mut writer, header(before, u64::from_be_bytes(END)), &[]).await?;
    }
}
