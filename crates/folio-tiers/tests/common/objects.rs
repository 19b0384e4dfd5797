//! A port that answers as a test wants, and what every kind of server is held to.

use std::io::BufReader;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use folio_tiers::remote::{Name, Objects, greet};

pub const NAME: Name = Name([7; 32]);

/// Each connection has a thread, which calls `turn` until it says `None`: it reads a question, and answers it.
pub fn serve(
    turn: impl Fn(&mut BufReader<TcpStream>, &mut TcpStream) -> Option<()> + Send + Sync + 'static,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let turn = Arc::new(turn);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, turn) = (stream.unwrap(), turn.clone());
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            thread::spawn(move || while turn(&mut reader, &mut stream).is_some() {});
        }
    });
    port
}

/// Of an honest server, which has nothing yet.
pub fn what_is_put_is_got(objects: &dyn Objects, limit: Duration) {
    assert!(greet(objects).unwrap().is_none());
    let value: Vec<u8> = (0..3 << 20).map(|at: u32| ((at * 31) >> 3) as u8).collect();
    let other = Name([8; 32]);
    assert_eq!(objects.exist(&[NAME, other], limit).unwrap(), [false, false]);
    assert_eq!(objects.get(&NAME, 0..100, limit).unwrap(), None);
    objects.put(&NAME, &value, false, limit).unwrap();
    assert_eq!(objects.exist(&[other, NAME], limit).unwrap(), [false, true]);
    assert_eq!(objects.get(&NAME, 0..value.len(), limit).unwrap().unwrap(), value);
    assert_eq!(objects.get(&NAME, 1000..2000, limit).unwrap().unwrap(), value[1000..2000]);
    objects.put(&NAME, &value[..10], false, limit).unwrap();
    assert_eq!(objects.get(&NAME, 0..20, limit).unwrap().unwrap(), value[..20], "what is there stays");
    objects.put(&NAME, &value[5..10], true, limit).unwrap();
    assert_eq!(objects.get(&NAME, 0..100, limit).unwrap().unwrap(), value[5..10], "unless it is wrong");
}
