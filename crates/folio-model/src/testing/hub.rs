//! A hub in the process: a little HTTP server that behaves as badly as a test asks, and repositories for it to serve.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::fixture;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKENIZER: &[u8] = b"{\"version\": \"1.0\"}";

/// A request as it arrived; header names in lower case.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub headers: HashMap<String, String>,
    /// How many requests for this path came before.
    pub nth: usize,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// First byte asked for.
    pub fn range(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

#[derive(Clone, Debug, Default)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Close the connection after this many bytes of the body.
    pub cut: Option<usize>,
}

impl Response {
    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    /// The file, or the rest of it when a range is asked for.
    pub fn file(request: &Request, content: &[u8]) -> Self {
        match request.range() {
            None => Self { status: 200, body: content.to_vec(), ..Self::default() },
            Some(start) if start < content.len() => {
                let range = format!("bytes {start}-{}/{}", content.len() - 1, content.len());
                Self { status: 206, body: content[start..].to_vec(), ..Self::default() }
                    .with("content-range", &range)
            }
            Some(_) => Self::status(416),
        }
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn cut(mut self, bytes: usize) -> Self {
        self.cut = Some(bytes);
        self
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

pub struct Server {
    pub address: String,
    log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Serves on a free port until the test ends.
    pub fn start(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let (shared, handler) = (Arc::clone(&log), Arc::<Handler>::from(Box::new(handler) as Box<Handler>));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, handler) = (Arc::clone(&shared), Arc::clone(&handler));
                std::thread::spawn(move || answer(stream, &log, &*handler));
            }
        });
        Self { address, log }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }

    pub fn requests_for(&self, part: &str) -> Vec<Request> {
        self.requests().into_iter().filter(|request| request.path.contains(part)).collect()
    }
}

fn answer(stream: TcpStream, log: &Mutex<Vec<Request>>, handler: &Handler) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    while let Some(Ok(line)) = lines.next().filter(|line| line.as_ref().is_ok_and(|line| !line.is_empty())) {
        let (name, value) = line.split_once(':')?;
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let request = {
        let mut log = log.lock().unwrap();
        let nth = log.iter().filter(|earlier| earlier.path == path).count();
        let request = Request { path, headers, nth };
        log.push(request.clone());
        request
    };
    let response = handler(&request);
    let mut stream = stream;
    let mut head = format!(
        "HTTP/1.1 {} X\r\nconnection: close\r\ncontent-length: {}\r\n",
        response.status,
        response.body.len()
    );
    for (name, value) in &response.headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    let sent = response.cut.unwrap_or(response.body.len());
    stream.write_all(&response.body[..sent]).ok()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The repository `org/tiny` as the hub lists it: weights in LFS, the rest in git.
#[derive(Clone)]
pub struct Repo {
    pub files: Vec<(String, Vec<u8>)>,
}

impl Repo {
    /// A fixture, and files beside it.
    pub fn from_fixture(name: &str) -> Self {
        let mut files = vec![
            ("tokenizer.json".to_owned(), TOKENIZER.to_vec()),
            ("README.md".to_owned(), b"---\nlicense: mit\n---\n".to_vec()),
            (".gitattributes".to_owned(), b"not needed".to_vec()),
            ("original/consolidated.00.pth".to_owned(), b"not needed".to_vec()),
            ("consolidated.safetensors".to_owned(), b"not needed".to_vec()),
        ];
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap().to_str().unwrap().to_owned();
            if !file.starts_with("expected") {
                files.push((file, fs::read(path).unwrap()));
            }
        }
        files.sort();
        Self { files }
    }

    pub fn of(files: &[(&str, &[u8])]) -> Self {
        Self { files: files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())).collect() }
    }

    pub fn content(&self, name: &str) -> &[u8] {
        &self.files.iter().find(|(file, _)| file == name).unwrap().1
    }

    pub fn etag(&self, name: &str) -> String {
        let content = self.content(name);
        if is_large(name) {
            return hex(&Sha256::digest(content));
        }
        hex(&Sha1::new_with_prefix(format!("blob {}\0", content.len())).chain_update(content).finalize())
    }

    pub fn listing(&self) -> Vec<u8> {
        let siblings = self.files.iter().map(|(name, content)| {
            let mut sibling =
                serde_json::json!({"rfilename": name, "size": content.len(), "blobId": self.etag(name)});
            if is_large(name) {
                sibling["blobId"] = "f".repeat(40).into();
                sibling["lfs"] =
                    serde_json::json!({"sha256": self.etag(name), "size": content.len(), "pointerSize": 134});
            }
            sibling
        });
        serde_json::json!({"sha": COMMIT, "siblings": siblings.collect::<Vec<_>>()}).to_string().into_bytes()
    }

    /// What a well-behaved hub answers.
    pub fn answer(&self, request: &Request) -> Response {
        if request.path.starts_with("/api/models/org/tiny/revision/") {
            return Response::file(request, &self.listing());
        }
        let Some(file) = request.path.strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/")) else {
            return Response::status(404);
        };
        match self.files.iter().find(|(name, _)| name.replace(' ', "%20") == file) {
            Some((_, content)) => Response::file(request, content),
            None => Response::status(404),
        }
    }
}

/// Kept in LFS.
fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}
