//! A cache that tells what becomes of it, and a client that speaks just enough ZMTP to listen.
#![allow(dead_code)] // Each test uses a part.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_engine::EventFeed;
use folio_events::{EventSource, KvEvents, KvEventsConfig, int_hash};
use folio_kv::{BlockHashes, CacheConfig, CacheEvent, Identity, KvCache, LruLeafFirst, Root, TenantId};
use rmpv::Value;

pub const SIZE: u32 = 4;
/// Long enough for any machine; nothing is asserted about how long things take.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Bench {
    pub cache: KvCache,
    pub feed: Arc<EventFeed>,
    pub events: KvEvents,
}

/// `more`: fields of the configuration; tenants 1 and 2 are named "one" and "two".
pub fn bench(blocks: u32, most: usize, more: &str) -> Bench {
    let json = format!(
        r#"{{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", {more}}}"#
    );
    let config = KvEventsConfig::parse(Some(&json), None).expect("valid").expect("on");
    let feed = Arc::new(EventFeed::new(most, SIZE));
    let config_of_cache = CacheConfig { blocks, block_tokens: SIZE, bytes_per_block: 1 };
    let mut cache = KvCache::new(config_of_cache, Box::new(LruLeafFirst::new()));
    feed.open(&mut cache);
    let names = config.tenants.clone();
    let told = move |tenant: TenantId| {
        let name = ["zero", "one", "two"][tenant.0 as usize];
        names.as_ref().is_none_or(|names| names.iter().any(|told| told == name)).then(|| name.into())
    };
    let source = EventSource { config, feed: feed.clone() };
    let events = KvEvents::start(&source, Box::new(told), Box::new(Vec::new)).expect("it starts");
    wait_until("it has begun", || events.stats().next_message == 1);
    Bench { cache, feed, events }
}

pub fn root(tenant: u32) -> Root {
    Root::derive(&Identity {
        tenant: TenantId(tenant),
        tenant_secret: &[tenant as u8 + 1; 32],
        model_digest: &[7; 32],
        layout_digest: &[9; 32],
        extra: &[],
    })
}

impl Bench {
    /// Computes `tokens` as a request of the tenant does, and tells what happened.
    pub fn serve(&mut self, tenant: u32, tokens: &[u32]) {
        let hashes = BlockHashes::new(&root(tenant), tokens, SIZE);
        let mut copies = Vec::new();
        let most = tokens.len() as u32 - 1;
        let mut table = self.cache.attach(hashes, tokens, most, &mut copies);
        self.cache.grow(&mut table, tokens.len() as u32, &mut copies).expect("room");
        self.feed.put(&mut self.cache);
        self.cache.commit(&mut table, tokens, tokens.len() as u32).expect("in order");
        self.cache.release(table, tokens);
        self.feed.put(&mut self.cache);
    }

    /// Waits until the publisher took everything, and so many messages are there.
    pub fn settle(&mut self) -> u64 {
        while self.cache.has_events() {
            self.feed.put(&mut self.cache);
            std::thread::sleep(Duration::from_millis(1));
        }
        let expected = self.resident(&|_| true).len() as u64;
        let (mut before, mut quiet) = (0, 0);
        wait_until("the publisher is done", || {
            let stats = self.events.stats();
            quiet = if stats.next_message == before { quiet + 1 } else { 0 };
            before = stats.next_message;
            quiet > 100 && (stats.blocks[0] == expected || quiet > 1000)
        });
        before
    }

    /// (hash, medium) -> parent and tokens, as a subscriber should know it.
    pub fn resident(&self, told: &dyn Fn(TenantId) -> bool) -> Held {
        let all = self.cache.resident();
        let blocks = all.events.iter().zip(all.tokens.chunks_exact(SIZE as usize));
        let entry = |(event, tokens): (&CacheEvent, &[u32])| match *event {
            CacheEvent::Stored { tenant, hash, parent } if told(tenant) => {
                Some(((int_hash(&hash), "GPU".to_owned()), (parent.as_ref().map(int_hash), tokens.to_vec())))
            }
            _ => None,
        };
        blocks.filter_map(entry).collect()
    }
}

pub type Held = BTreeMap<(u64, String), (Option<u64>, Vec<u32>)>;

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A connected ZMTP peer.
pub struct Peer(pub TcpStream);

pub fn greeting() -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

pub fn ready(socket: &str) -> Vec<u8> {
    let body = [b"\x05READY\x0bSocket-Type\0\0\0", &[socket.len() as u8][..], socket.as_bytes()].concat();
    [&[4, body.len() as u8][..], &body].concat()
}

impl Peer {
    pub fn connect(address: SocketAddr, socket: &str) -> Self {
        let mut peer = Self::raw(address);
        peer.write(&[greeting(), ready(socket)].concat());
        let mut theirs = [0; 64];
        peer.0.read_exact(&mut theirs).expect("a greeting");
        let (flags, body) = peer.frame().expect("a handshake");
        assert!(flags == 4 && body.starts_with(b"\x05READY"), "{body:?}");
        peer
    }

    pub fn raw(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        Self(stream)
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("it takes them");
    }

    pub fn subscriber(events: &KvEvents) -> Self {
        let before = events.stats().subscribers.iter().filter(|of| of.late.is_some()).count();
        let mut peer = Self::connect(events.endpoint(), "SUB");
        peer.write(&[0, 1, 1]);
        wait_until("it is subscribed", || {
            events.stats().subscribers.iter().filter(|of| of.late.is_some()).count() > before
        });
        peer
    }

    /// Flags and body; nothing at the end.
    pub fn frame(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut flags = [0];
        self.0.read_exact(&mut flags).ok()?;
        let mut length = [0; 8];
        let at = if flags[0] & 2 == 0 { 7 } else { 0 };
        self.0.read_exact(&mut length[at..]).ok()?;
        let mut body = vec![0; u64::from_be_bytes(length) as usize];
        self.0.read_exact(&mut body).ok()?;
        Some((flags[0], body))
    }

    pub fn message(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.frame()?;
            frames.push(body);
            if flags & 1 == 0 {
                return Some(frames);
            }
        }
    }

    /// The number of a published message and its events.
    pub fn published(&mut self) -> (u64, Vec<Value>) {
        let frames = self.message().expect("a message");
        let [topic, number, payload] = &frames[..] else { panic!("{} frames", frames.len()) };
        assert!(topic.is_empty());
        (number_of(number), events_of(payload))
    }

    /// Everything from message `start` on that is still there; `frames` of a reply.
    pub fn replayed(events: &KvEvents, start: u64, frames: usize) -> Vec<(u64, Vec<Value>)> {
        let mut peer = Self::connect(events.replay_endpoint().expect("there is one"), "DEALER");
        peer.ask(start);
        peer.replies(frames)
    }

    pub fn ask(&mut self, start: u64) {
        self.write(&[&[1, 0, 0, 8][..], &start.to_be_bytes()].concat());
    }

    pub fn replies(&mut self, frames: usize) -> Vec<(u64, Vec<Value>)> {
        let mut out = Vec::new();
        loop {
            let reply = self.message().expect("a reply");
            assert_eq!((reply.len(), reply[0].len()), (frames, 0));
            let [.., number, payload] = &reply[..] else { panic!("{reply:?}") };
            match number_of(number) {
                u64::MAX => {
                    assert!(payload.is_empty());
                    return out;
                }
                number => out.push((number, events_of(payload))),
            }
        }
    }
}

pub fn number_of(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().expect("eight bytes"))
}

pub fn events_of(mut payload: &[u8]) -> Vec<Value> {
    let batch = rmpv::decode::read_value(&mut payload).expect("msgpack");
    assert!(payload.is_empty());
    let [time, events, rank] = &batch.as_array().expect("an array")[..] else { panic!("{batch}") };
    assert!(time.as_f64().expect("a time") > 1e9 && rank.as_u64() == Some(0));
    events.as_array().expect("an array").clone()
}

/// What a subscriber knows. Panics where an event contradicts it.
#[derive(Default)]
pub struct Mirror {
    pub held: Held,
    pub cleared: u32,
    /// Extra keys of first blocks.
    pub salts: HashMap<u64, String>,
}

impl Mirror {
    pub fn follow(&mut self, events: &[Value]) {
        events.iter().for_each(|event| self.apply(event.as_array().expect("positional")));
    }

    fn apply(&mut self, event: &[Value]) {
        let numbers = |value: &Value| -> Vec<u64> {
            let list = value.as_array().expect("a list");
            list.iter().map(|number| number.as_u64().expect("a number")).collect()
        };
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        match event[0].as_str().expect("a tag") {
            "BlockStored" => {
                let [_, hashes, parent, tokens, size, lora, medium, name, keys, group, kind] = event else {
                    panic!("{event:?}")
                };
                let (hashes, medium) = (numbers(hashes), text(medium));
                let tokens: Vec<u32> = numbers(tokens).into_iter().map(|token| token as u32).collect();
                assert!(lora.is_nil() && name.is_nil() && group.as_u64() == Some(0));
                assert_eq!((size.as_u64(), kind.as_str()), (Some(SIZE.into()), Some("full_attention")));
                assert_eq!(tokens.len(), hashes.len() * SIZE as usize);
                if let Some([Value::Array(first), rest @ ..]) = keys.as_array().map(Vec::as_slice) {
                    assert!(rest.len() + 1 == hashes.len() && rest.iter().all(Value::is_nil));
                    self.salts.insert(hashes[0], text(&first[0]));
                }
                let mut parent = parent.as_u64();
                for (hash, tokens) in hashes.into_iter().zip(tokens.chunks(SIZE as usize)) {
                    let there = parent.is_none_or(|parent| self.held.keys().any(|(held, _)| *held == parent));
                    assert!(there, "a block was stored before its parent");
                    let before = self.held.insert((hash, medium.clone()), (parent, tokens.to_vec()));
                    assert_eq!(before, None, "a block was stored twice");
                    parent = Some(hash);
                }
            }
            "BlockRemoved" => {
                let [_, hashes, medium, group] = event else { panic!("{event:?}") };
                assert_eq!(group.as_u64(), Some(0));
                for hash in numbers(hashes) {
                    let was = self.held.remove(&(hash, text(medium)));
                    assert!(was.is_some(), "a block was removed that was not there");
                }
            }
            "AllBlocksCleared" => {
                self.held.clear();
                self.cleared += 1;
            }
            other => panic!("there is no {other}"),
        }
    }
}
