//! Peers that mean no good, or are only slow: nobody else notices, and nothing of them is kept.

mod common;

use std::io::Read;
use std::time::Duration;

use common::{Bench, Mirror, Peer, bench, greeting, ready, wait_until};

/// Whether it is closed without a word beyond the handshake.
fn is_closed(mut peer: Peer) -> bool {
    let mut bytes = Vec::new();
    // A reset is an end, too.
    let _ = peer.0.read_to_end(&mut bytes);
    bytes.len() <= 64 + 2 + 64
}

/// A subscriber that was there all along is still told.
fn still_tells(bench: &mut Bench, peer: &mut Peer, of: u32) {
    bench.serve(1, &[of, of, of, of, of]);
    loop {
        let (_, events) = peer.published();
        if events.iter().any(|event| event[3][0].as_u64() == Some(of.into())) {
            return;
        }
    }
}

#[test]
fn who_speaks_no_zmtp_or_too_much_is_closed_and_counted() {
    let mut bench = bench(64, 4096, r#""tenants": "*""#);
    let mut good = Peer::subscriber(&bench.events);
    let (published, replays) = (bench.events.endpoint(), bench.events.replay_endpoint().unwrap());
    let hands = |socket: &str| [greeting(), ready(socket)].concat();
    let with = |socket: &str, more: &[u8]| [&hands(socket)[..], more].concat();
    let huge = [&[2][..], &u64::MAX.to_be_bytes(), &[0; 100]].concat();
    let number = |length: u8| [&[1, 0, 0, length][..], &vec![0; length.into()]].concat();
    let cases: Vec<(_, Vec<u8>)> = vec![
        (published, b"GET /metrics HTTP/1.1\r\nhost: folio\r\n\r\n................................".to_vec()),
        (published, vec![0xff; 64]),
        (published, hands("PULL")),
        (published, hands("DEALER")),
        (replays, hands("SUB")),
        (published, with("SUB", &huge)),
        (replays, with("DEALER", &huge)),
        (published, [greeting(), huge.clone()].concat()),
        (published, with("SUB", &[0x80, 1, 1])),
        (published, with("SUB", &[0, 2, 7, 7])),
        (replays, with("DEALER", &number(7))),
        (replays, with("DEALER", &number(9))),
        (replays, with("DEALER", &[1, 0].repeat(10))),
        (replays, with("DEALER", &[1, 1, 5].repeat(10))),
    ];
    let count = cases.len() as u64;
    for (at, (address, bytes)) in cases.into_iter().enumerate() {
        let mut peer = Peer::raw(address);
        peer.write(&bytes);
        assert!(is_closed(peer), "case {at}");
        wait_until(&format!("case {at} is counted"), || bench.events.stats().refused == at as u64 + 1);
    }
    // Half a greeting, and nothing more: a place, until its time is up.
    let mut silent = Peer::raw(published);
    silent.write(&greeting()[..20]);
    still_tells(&mut bench, &mut good, 900);
    assert_eq!(bench.events.stats().refused, count);
}

#[test]
fn thousands_of_subscriptions_are_a_number() {
    let mut bench = bench(64, 4096, r#""tenants": "*", "topic": "kv@a""#);
    let mut peer = Peer::connect(bench.events.endpoint(), "SUB");
    for prefix in ["x", "kv@a@", "kv@b"] {
        let frame = [&[0, prefix.len() as u8 + 1, 1][..], prefix.as_bytes()].concat();
        peer.write(&frame.repeat(10_000));
    }
    bench.serve(1, &[1, 2, 3, 4, 5]);
    let end = bench.settle();
    assert_eq!(bench.events.stats().subscribers[0].late, None, "none of them is the topic's");
    // As ZMTP 3.1 has it, and as 3.0; then the ends of all but one.
    peer.write(&b"\x04\x0e\x09SUBSCRIBEkv@a".repeat(5000));
    peer.write(&b"\x00\x03\x01kv".repeat(5000));
    peer.write(&b"\x04\x0b\x06CANCELkv@a".repeat(5000));
    peer.write(&b"\x00\x03\x00kv".repeat(4999));
    peer.write(b"\x04\x09\x04PING\0\0ab");
    assert_eq!(peer.frame(), Some((4, b"\x04PONGab".to_vec())));
    bench.serve(1, &[9, 9, 9, 9, 9]);
    let frames = peer.message().expect("a message");
    assert_eq!((frames.len(), &frames[0][..]), (3, &b"kv@a"[..]));
    assert_eq!(common::number_of(&frames[1]), end);
    peer.write(b"\x00\x03\x00kv");
    wait_until("it is not subscribed", || bench.events.stats().subscribers[0].late.is_none());
}

#[test]
fn who_never_reads_is_counted_and_holds_up_nobody() {
    is_counted(r#""tenants": "*", "buffer_steps": 16"#);
}

#[test]
fn who_is_later_than_the_high_water_mark_is_counted_though_everything_is_kept() {
    is_counted(r#""tenants": "*", "hwm": 16"#);
}

fn is_counted(config: &str) {
    let mut bench = bench(3000, 8192, config);
    let mut slow = Peer::subscriber(&bench.events);
    let mut good = Peer::subscriber(&bench.events);
    let (mut mirror, mut next, mut round) = (Mirror::default(), 1, 0);
    // More than sockets take for themselves.
    while bench.events.stats().dropped < 20 {
        assert!(round < 4000, "sockets took all of it, {:?}", bench.events.stats());
        let tokens: Vec<u32> = (0..4000).map(|at| 1_000_000 + 4000 * (round % 7) + at).collect();
        bench.serve(1, &tokens);
        round += 1;
        while next < bench.events.stats().next_message {
            let (number, events) = good.published();
            assert_eq!(number, next, "who reads misses nothing");
            mirror.follow(&events);
            next += 1;
        }
        bench.cache.clear(None);
    }
    let stats = bench.events.stats();
    assert_eq!(stats.subscribers.iter().map(|of| of.dropped > 0).collect::<Vec<_>>(), [true, false]);
    // What it finds when it reads at last: no message twice, and gaps that are as large as what was counted.
    let (mut before, mut missed) = (0, 0);
    let end = bench.settle() - 1;
    while before < end {
        let (number, _) = slow.published();
        assert!(number > before);
        missed += number - before - 1;
        before = number;
    }
    assert_eq!(missed, bench.events.stats().dropped);
}

#[test]
fn a_replay_of_anything_is_what_there_is_and_an_end() {
    let mut bench = bench(64, 4096, r#""tenants": "*", "buffer_steps": 8"#);
    for of in 0..20 {
        bench.serve(1, &[of; 5]);
        wait_until("it is a message", || bench.events.stats().stored == u64::from(of) + 1);
    }
    let end = bench.settle();
    let numbers = |start| Peer::replayed(&bench.events, start, 4).iter().map(|of| of.0).collect::<Vec<_>>();
    let kept: Vec<u64> = (end - 8..end).collect();
    for start in [0, 1, end - 8] {
        assert_eq!(numbers(start), kept, "{start}");
    }
    assert_eq!(numbers(end - 1), [end - 1]);
    for start in [end, end + 1, 1 << 63, u64::MAX] {
        assert!(numbers(start).is_empty(), "{start}");
    }
    let mut peer = Peer::connect(bench.events.replay_endpoint().unwrap(), "REQ");
    // Asked a thousand times before an answer is read: each is answered.
    (0..1000).for_each(|_| peer.ask(end - 1));
    (0..1000).for_each(|_| assert_eq!(peer.replies(4).len(), 1));
}

#[test]
fn there_is_no_more_than_so_many_connections() {
    let mut bench = bench(64, 4096, r#""tenants": "*""#);
    let mut good = Peer::subscriber(&bench.events);
    let mut others: Vec<Peer> = (0..255).map(|_| Peer::raw(bench.events.endpoint())).collect();
    std::thread::sleep(Duration::from_millis(50));
    let beyond = Peer::raw(bench.events.endpoint());
    assert!(is_closed(beyond));
    still_tells(&mut bench, &mut good, 7);
    assert!(bench.events.stats().refused >= 1);
    others.clear();
    wait_until("there is room again", || {
        let mut peer = Peer::raw(bench.events.endpoint());
        peer.write(&[greeting(), ready("SUB")].concat());
        let mut theirs = [0; 64];
        peer.0.read_exact(&mut theirs).is_ok()
    });
}
