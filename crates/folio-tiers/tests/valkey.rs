//! The wire to a server that speaks RESP: whatever it answers, the answer is right or a fault, in time, and in bounded memory.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::objects::NAME;
use folio_tiers::Secret;
use folio_tiers::remote::valkey::{Valkey, ValkeyConfig};
use folio_tiers::remote::{AddressError, Fault, Objects, greet};

const LIMIT: Duration = Duration::from_millis(400);

/// What a server does with a command; `None`: it ends the connection.
type Answer = Arc<dyn Fn(&[Vec<u8>], &mut TcpStream) -> Option<()> + Send + Sync>;

/// A server that parses commands and answers as a test wants.
fn serve(answer: Answer) -> u16 {
    common::objects::serve(move |reader, stream| answer(&command(reader)?, stream))
}

fn line(reader: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    (reader.read_line(&mut line).ok()? > 0).then(|| line.trim_end().to_owned())
}

fn command(reader: &mut BufReader<TcpStream>) -> Option<Vec<Vec<u8>>> {
    let words: usize = line(reader)?.strip_prefix('*')?.parse().ok()?;
    let word = |_| {
        let bytes: usize = line(reader)?.strip_prefix('$')?.parse().ok()?;
        let mut word = vec![0; bytes + 2];
        reader.read_exact(&mut word).ok()?;
        word.truncate(bytes);
        Some(word)
    };
    (0..words).map(word).collect()
}

fn say(stream: &mut TcpStream, bytes: &[u8]) -> Option<()> {
    stream.write_all(bytes).ok()
}

fn client_of(url: &str) -> Result<Valkey, AddressError> {
    Valkey::new(&ValkeyConfig { url: Secret(url.into()), password: None, authorities: None })
}

fn client(port: u16) -> Valkey {
    client_of(&format!("valkey://127.0.0.1:{port}")).unwrap()
}

/// What a real server does with the few commands that are used.
fn honest() -> Answer {
    let values: Mutex<HashMap<Vec<u8>, Vec<u8>>> = Mutex::default();
    Arc::new(move |words, stream| {
        let mut values = values.lock().unwrap();
        match (&words[0][..], words.get(1)) {
            (b"EXISTS", Some(key)) => {
                say(stream, format!(":{}\r\n", u8::from(values.contains_key(key))).as_bytes())
            }
            (b"GETRANGE", Some(key)) => {
                let number = |at: usize| String::from_utf8_lossy(&words[at]).parse::<usize>().unwrap();
                let value = values.get(key).map_or(&[][..], |value| value);
                let range = number(2).min(value.len())..(number(3) + 1).min(value.len());
                say(stream, format!("${}\r\n", range.len()).as_bytes())?;
                say(stream, &value[range])?;
                say(stream, b"\r\n")
            }
            (b"SET", Some(key)) => {
                let is_there = values.contains_key(key) && words.get(3).is_some_and(|word| word == b"NX");
                if !is_there {
                    values.insert(key.clone(), words[2].clone());
                }
                say(stream, if is_there { b"$-1\r\n" } else { b"+OK\r\n" })
            }
            (b"PING", _) => say(stream, b"+PONG\r\n"),
            _ => say(stream, b"-ERR unknown command\r\n"),
        }
    })
}

#[test]
fn what_is_put_is_got() {
    common::objects::what_is_put_is_got(&client(serve(honest())), LIMIT * 10);
}

/// Noise, lengths that cannot be, what is no answer to this question, silence, drops, half an answer: a fault, in time.
#[test]
fn whatever_it_answers_is_a_fault_in_time() {
    let fixed: [&[u8]; 16] = [
        b"\r\n",
        b"garbage\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        &[0xff; 300],
        &[0; 300],
        b"$99999999999999\r\n",
        b"$18446744073709551615\r\n",
        b"$-2\r\nxx\r\n",
        b"$abc\r\n",
        b"*1000000000\r\n:1\r\n",
        b"*-5\r\n",
        b"%9223372036854775807\r\n",
        b"+OK\r\n",
        b":17\r\n",
        b"$100\r\nhalf",
        b"=3\r\nabc\r\n",
    ];
    for bytes in fixed {
        let valkey = client(serve(Arc::new(move |_, stream| say(stream, bytes))));
        let began = Instant::now();
        let got = valkey.get(&NAME, 0..100, LIMIT);
        assert!(got.is_err(), "{:?}: {got:?}", String::from_utf8_lossy(bytes));
        let put = valkey.put(&NAME, b"value", true, LIMIT);
        assert!(put.is_err() || bytes == b"+OK\r\n", "{:?}: {put:?}", String::from_utf8_lossy(bytes));
        assert!(began.elapsed() < LIMIT * 2 + Duration::from_secs(2), "{:?}", String::from_utf8_lossy(bytes));
    }
    let deep = "*1\r\n".repeat(100_000);
    let valkey = client(serve(Arc::new(move |_, stream| say(stream, deep.as_bytes()))));
    assert!(valkey.get(&NAME, 0..100, LIMIT).is_err());
    // The connection ends.
    let valkey = client(serve(Arc::new(|_, _| None)));
    assert!(matches!(valkey.get(&NAME, 0..100, LIMIT), Err(Fault::Broken(_))));
    // In the middle of an answer.
    let valkey = client(serve(Arc::new(|_, stream| say(stream, b"$100\r\nhalf").and(None))));
    assert!(matches!(valkey.get(&NAME, 0..100, LIMIT), Err(Fault::Broken(_))));
}

#[test]
fn who_says_nothing_or_one_byte_at_a_time_is_late() {
    let silent = client(serve(Arc::new(|_, _| Some(()))));
    let began = Instant::now();
    assert_eq!(silent.get(&NAME, 0..100, LIMIT), Err(Fault::Late));
    assert!((LIMIT..LIMIT * 4).contains(&began.elapsed()));
    let dripping = client(serve(Arc::new(|_, stream| {
        say(stream, b"$1000\r\n")?;
        loop {
            say(stream, b"x")?;
            thread::sleep(Duration::from_millis(20));
        }
    })));
    let began = Instant::now();
    assert_eq!(dripping.get(&NAME, 0..1000, LIMIT), Err(Fault::Late));
    assert!(began.elapsed() < LIMIT * 4);
}

/// An answer without end is cut off where it is longer than what was asked for, not where memory ends.
#[test]
fn an_answer_without_end_is_not_kept() {
    for head in ["$99999999999\r\n", "+", "*1\r\n$4000000000\r\n"] {
        let sent = Arc::new(Mutex::new(0usize));
        let count = sent.clone();
        let valkey = client(serve(Arc::new(move |_, stream| {
            say(stream, head.as_bytes())?;
            let zeros = [b'0'; 64 << 10];
            loop {
                say(stream, &zeros)?;
                *count.lock().unwrap() += zeros.len();
            }
        })));
        let got = valkey.get(&NAME, 0..1000, Duration::from_secs(20));
        assert!(matches!(got, Err(Fault::Broken(_))), "{got:?}");
        // But for what the system's buffers take.
        assert!(*sent.lock().unwrap() < 64 << 20);
    }
}

/// What comes too late is nobody's answer.
#[test]
fn a_late_answer_is_not_taken_for_another_ones() {
    let asked = Mutex::new(0);
    let valkey = client(serve(Arc::new(move |_, stream| {
        let mut asked = asked.lock().unwrap();
        *asked += 1;
        if *asked == 1 {
            thread::sleep(LIMIT * 2);
            return say(stream, b"$3\r\nold\r\n");
        }
        say(stream, b"$3\r\nnew\r\n")
    })));
    assert_eq!(valkey.get(&NAME, 0..3, LIMIT), Err(Fault::Late));
    assert_eq!(valkey.get(&NAME, 0..3, LIMIT * 10).unwrap().unwrap(), b"new");
}

#[test]
fn what_comes_unasked_is_nobodys_answer() {
    let valkey = client(serve(Arc::new(|_, stream| say(stream, b"$3\r\nabc\r\n$3\r\nxyz\r\n"))));
    for _ in 0..2 {
        assert_eq!(valkey.get(&NAME, 0..3, LIMIT).unwrap().unwrap(), b"abc");
        let got = valkey.get(&NAME, 0..3, LIMIT);
        assert!(matches!(got, Err(Fault::Broken(_))), "{got:?}");
    }
}

#[test]
fn a_connection_begins_with_who_asks_and_where() {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = asked.clone();
    let port = serve(Arc::new(move |words, stream| {
        log.lock().unwrap().push(String::from_utf8_lossy(&words.join(&b' ')).into_owned());
        say(stream, if words[0] == b"PING" { &b"+PONG\r\n"[..] } else { &b"+OK\r\n"[..] })
    }));
    for (url, first) in [
        (format!("valkey://me:sesame@127.0.0.1:{port}/3"), &["AUTH me sesame", "SELECT 3"][..]),
        (format!("valkey://:sesame@127.0.0.1:{port}"), &["AUTH sesame"][..]),
        (format!("valkey://127.0.0.1:{port}"), &[][..]),
    ] {
        let valkey = client_of(&url).unwrap();
        assert!(matches!(greet(&valkey), Ok(None)));
        assert!(matches!(greet(&valkey), Ok(None)), "on the same connection");
        let said = std::mem::take(&mut *asked.lock().unwrap());
        assert_eq!(said, [first, &["PING", "PING"]].concat());
    }
}

#[test]
fn what_it_refuses_is_told_and_it_is_asked_on() {
    let full = "OOM command not allowed when used memory > 'maxmemory'.";
    let valkey = client(serve(Arc::new(move |_, stream| say(stream, format!("-{full}\r\n").as_bytes()))));
    for _ in 0..3 {
        let Err(Fault::Refused(why)) = valkey.put(&NAME, b"value", false, LIMIT) else {
            panic!("it was refused")
        };
        assert!(why.contains("maxmemory"), "{why}");
    }
}

#[test]
fn addresses_that_cannot_be_are_refused_by_a_sentence() {
    let error = |url: &str| client_of(url).map(|_| ()).expect_err(url).to_string();
    for (url, part) in [
        ("http://127.0.0.1", "\"http\""),
        ("127.0.0.1:6379", "valkey://HOST:6379"),
        ("", "valkey://HOST:6379"),
        ("valkey://", "URL"),
        ("valkey://host:99999999", "URL"),
        ("valkey://host/abc", "database"),
        ("valkey://host?ttl=5", "ttl"),
        ("valkeys://host#insecure", "#"),
        ("unix:///tmp/socket", "\"unix\""),
    ] {
        assert!(error(url).to_lowercase().contains(&part.to_lowercase()), "{url}: {}", error(url));
    }
    let with = |pem: &[u8]| {
        let url = Secret("valkeys://127.0.0.1".into());
        Valkey::new(&ValkeyConfig { url, password: None, authorities: Some(pem.to_vec()) }).map(|_| ())
    };
    assert!(matches!(with(b"no certificate"), Err(AddressError::Authorities(_))));
    // Nobody is there, by number or by name: it may come.
    assert!(matches!(greet(&client(1)), Ok(Some(Fault::Broken(_)))));
    let nowhere = greet(&client_of("valkey://nobody.invalid").unwrap());
    assert!(matches!(nowhere, Ok(Some(_))), "{nowhere:?}");
}

#[test]
fn a_wrong_password_is_told_and_not_shown() {
    let port = serve(Arc::new(|words, stream| match &words[0][..] {
        b"AUTH" | b"HELLO" => {
            say(stream, b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
        }
        _ => say(stream, b"-NOAUTH Authentication required.\r\n"),
    }));
    for url in [format!("valkey://:open-sesame@127.0.0.1:{port}"), format!("valkey://127.0.0.1:{port}")] {
        let valkey = client_of(&url).unwrap();
        let error = greet(&valkey).expect_err("it lets nobody in").to_string();
        assert!(error.contains("127.0.0.1") && error.contains("AUTH") | error.contains("assword"), "{error}");
        assert!(!format!("{error} {valkey:?}").contains("sesame"), "{error}");
    }
}
