//! S3's wire: what is put is got by ranges, written once, counted; whatever a server answers, it is right or a fault, in time.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::objects::NAME;
use folio_tiers::Secret;
use folio_tiers::remote::s3::{S3, S3Config};
use folio_tiers::remote::{AddressError, Fault, Objects, greet};

const LIMIT: Duration = Duration::from_millis(500);

struct Asked {
    method: String,
    /// Without its query.
    path: String,
    query: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

type Answer = Arc<dyn Fn(&Asked) -> Vec<u8> + Send + Sync>;

fn asked(reader: &mut BufReader<TcpStream>) -> Option<Asked> {
    let mut line = String::new();
    (reader.read_line(&mut line).ok()? > 0).then_some(())?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let (path, query) = (path.to_owned(), query.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let mut body = vec![0; headers.get("content-length").map_or(0, |length| length.parse().unwrap())];
    reader.read_exact(&mut body).ok()?;
    Some(Asked { method, path, query, headers, body })
}

fn serve(answer: Answer) -> u16 {
    common::objects::serve(move |reader, stream| stream.write_all(&answer(&asked(reader)?)).ok())
}

fn answer(status: &str, length: usize, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n").into_bytes();
    bytes.extend(body);
    bytes
}

fn plain(status: &str) -> Vec<u8> {
    answer(status, 0, b"")
}

/// What S3 does with the few requests that are made.
fn honest() -> Answer {
    let objects: Mutex<HashMap<String, Vec<u8>>> = Mutex::default();
    Arc::new(move |asked| {
        assert!(asked.query.contains("X-Amz-Signature=") && asked.query.contains("X-Amz-Credential=key"));
        let mut objects = objects.lock().unwrap();
        if asked.path == "/bucket/" || asked.path == "/bucket" {
            return plain("200 OK");
        }
        assert!(asked.path.starts_with("/bucket/some/prefix/0"), "{}", asked.path);
        let there = objects.get(&asked.path);
        match (&*asked.method, there) {
            ("HEAD", Some(object)) => answer("200 OK", object.len(), b""),
            ("GET", Some(object)) => {
                let range = asked.headers["range"].strip_prefix("bytes=").unwrap();
                let (from, to) = range.split_once('-').unwrap();
                let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
                if from >= object.len() {
                    return plain("416 Range Not Satisfiable");
                }
                let part = &object[from..(to + 1).min(object.len())];
                answer("206 Partial Content", part.len(), part)
            }
            ("PUT", Some(_)) if asked.headers.get("if-none-match").is_some_and(|value| value == "*") => {
                plain("412 Precondition Failed")
            }
            ("PUT", _) => {
                objects.insert(asked.path.clone(), asked.body.clone());
                plain("200 OK")
            }
            _ => plain("404 Not Found"),
        }
    })
}

fn config(url: &str) -> S3Config {
    let secret = |text: &str| Secret(text.into());
    S3Config {
        url: secret(url),
        credentials: Some((secret("key"), secret("sesame"), None)),
        endpoint: None,
        region: None,
        authorities: None,
        requests_per_day: None,
        dollars_per_month: None,
    }
}

fn client(port: u16) -> S3 {
    let endpoint = Some(format!("http://127.0.0.1:{port}"));
    S3::new(&S3Config { endpoint, ..config("s3://bucket/some/prefix") }).unwrap()
}

#[test]
fn what_is_put_is_got() {
    let s3 = client(serve(honest()));
    common::objects::what_is_put_is_got(&s3, LIMIT * 20);
    let end = 3 << 20;
    s3.put(&NAME, &vec![1; end], true, LIMIT * 20).unwrap();
    assert_eq!(s3.get(&NAME, end..end + 9, LIMIT * 20).unwrap().unwrap(), b"");
}

#[test]
fn whatever_it_answers_is_a_fault_in_time() {
    let endless: Vec<u8> = answer("206 Partial Content", 1 << 30, &vec![b'0'; 8 << 20]);
    let more: Vec<u8> = answer("206 Partial Content", 5000, &[b'0'; 5000]);
    let all: [Vec<u8>; 9] = [
        b"garbage\r\n\r\n".to_vec(),
        vec![0xff; 300],
        answer("206 Partial Content", 100, b"half"),
        endless,
        more,
        plain("500 Internal Server Error"),
        plain("503 Slow Down"),
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n".to_vec(),
        // The whole object, although a part was asked for.
        answer("200 OK", 100, &[1; 100]),
    ];
    for bytes in all {
        let head = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
        let s3 = client(serve(Arc::new(move |_| bytes.clone())));
        let began = Instant::now();
        let got = s3.get(&NAME, 0..100, LIMIT);
        assert!(got.is_err(), "{head:?}: {:?}", got.map(|value| value.map(|value| value.len())));
        assert!(began.elapsed() < LIMIT * 4, "{head:?}");
    }
}

#[test]
fn who_says_nothing_is_late() {
    let s3 = client(serve(Arc::new(|_| {
        thread::sleep(LIMIT * 10);
        Vec::new()
    })));
    let began = Instant::now();
    assert_eq!(s3.get(&NAME, 0..100, LIMIT), Err(Fault::Late));
    assert_eq!(s3.exist(&[NAME; 5], LIMIT), Err(Fault::Late));
    assert!(began.elapsed() < LIMIT * 6);
}

#[test]
fn requests_of_a_day_are_counted_before_they_are_made() {
    let made = Arc::new(AtomicUsize::new(0));
    let (count, honest) = (made.clone(), honest());
    let port = serve(Arc::new(move |asked| {
        count.fetch_add(1, SeqCst);
        honest(asked)
    }));
    let endpoint = Some(format!("http://127.0.0.1:{port}"));
    let requests_per_day = Some(5);
    let s3 = S3::new(&S3Config { endpoint, requests_per_day, ..config("s3://bucket/some/prefix") }).unwrap();
    for _ in 0..5 {
        assert_eq!(s3.get(&NAME, 0..9, LIMIT * 10), Ok(None));
    }
    for _ in 0..5 {
        assert!(matches!(s3.get(&NAME, 0..9, LIMIT), Err(Fault::Refused(_))));
    }
    assert_eq!(made.load(SeqCst), 5);
}

#[test]
fn what_is_spent_in_a_day_is_a_thirtieth_of_a_month() {
    let port = serve(honest());
    let endpoint = Some(format!("http://127.0.0.1:{port}"));
    let dollars_per_month = Some(0.01);
    let s3 = S3::new(&S3Config { endpoint, dollars_per_month, ..config("s3://bucket/some/prefix") }).unwrap();
    // A third of a thousandth of a dollar: a MiB for a month and its request are 27 millionths.
    let value = vec![7; 1 << 20];
    let stored = (0..99).take_while(|_| s3.put(&NAME, &value, true, LIMIT * 10).is_ok()).count();
    assert_eq!(stored, 12);
    // What is left pays for reading.
    let read = (0..99).take_while(|_| s3.get(&NAME, 0..9, LIMIT * 10).is_ok()).count();
    assert_eq!(read, (333_333 - 12 * 27_461) / 400);
    assert!(matches!(s3.get(&NAME, 0..9, LIMIT), Err(Fault::Refused(why)) if why.contains("spent")));
}

#[test]
fn who_is_not_let_in_is_told_and_nothing_is_shown() {
    for status in ["403 Forbidden", "404 Not Found"] {
        let s3 = client(serve(Arc::new(move |_| plain(status))));
        let error = greet(&s3).expect_err("nobody is let in").to_string();
        assert!(error.contains("127.0.0.1") && error.contains("bucket"), "{error}");
        assert!(!format!("{error} {s3:?}").contains("sesame"));
    }
    assert!(matches!(greet(&client(1)), Ok(Some(Fault::Broken(_)))));
}

#[test]
fn addresses_that_cannot_be_are_refused_by_a_sentence() {
    let error = |url: &str| S3::new(&config(url)).map(|_| ()).expect_err(url).to_string();
    for (url, part) in [
        ("s3://", "bucket"),
        ("s3://Bucket", "bucket"),
        ("s3://bucket/white space", "prefix"),
        ("s3://bucket?ttl=1", "ttl"),
        ("s3://bucket?endpoint=nowhere", "nowhere"),
        ("s3://bucket?endpoint=ftp://host", "ftp"),
    ] {
        assert!(error(url).contains(part), "{url}: {}", error(url));
    }
    let authorities = Some(b"no certificate".to_vec());
    let wrong = S3::new(&S3Config { authorities, ..config("s3://bucket") }).map(|_| ());
    assert!(matches!(wrong, Err(AddressError::Authorities(_))));
}
