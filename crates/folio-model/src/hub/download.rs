//! One blob: from the hub to `blobs/<etag>`, across interruptions.
//!
//! Owns: resuming, retrying, checking. Invariant: a file is renamed to its etag only after its length and checksum were
//! checked over every byte. Cost: one pass of hashing along with the download; a resumed file is hashed up to where it
//! stopped.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::DownloadProgress;
use super::error::{HubError, Result, at};
use super::http::{Failure, Http, Refusal, Reply, header};
use super::layout::RepoFolder;
use super::listing::{Etag, RemoteFile};

/// Attempts in a row without a single new byte.
const ATTEMPTS_MAX: u32 = 5;
const CHUNK: usize = 256 << 10;
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// Shared by the files of one download.
pub struct Transfer<'a> {
    pub http: &'a Http,
    pub layout: &'a RepoFolder,
    /// Address of the commit's files, without the last slash.
    pub address: String,
    /// Says what the hub's refusal means.
    pub refused: &'a (dyn Fn(&str, &Refusal) -> HubError + Sync),
    pub backoff: Duration,
    pub progress: &'a (dyn Fn(DownloadProgress<'_>) + Sync),
    pub done_bytes: AtomicU64,
    pub total_bytes: u64,
    /// Set when another file failed for good.
    pub stop: AtomicBool,
}

/// Why one attempt ended.
enum Ended {
    Failure(Failure),
    Stopped,
}

impl From<Failure> for Ended {
    fn from(failure: Failure) -> Self {
        Ended::Failure(failure)
    }
}

impl From<HubError> for Ended {
    fn from(error: HubError) -> Self {
        Ended::Failure(Failure::Fatal(error))
    }
}

/// A partial file and the hash of what it holds.
struct Partial {
    path: PathBuf,
    file: File,
    hash: Hash,
    bytes: u64,
    /// Bytes that an earlier run left behind.
    inherited: u64,
}

impl Transfer<'_> {
    /// Address of a file by its path in the repository.
    pub fn url(&self, file: &str) -> String {
        let mut url = format!("{}/", self.address);
        for byte in file.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                    url.push(byte.into())
                }
                other => url += &format!("%{other:02X}"),
            }
        }
        url
    }

    /// Brings a blob in. `Ok(false)`: stopped because another file failed.
    pub fn fetch(&self, remote: &RemoteFile) -> Result<bool> {
        let url = self.url(&remote.name);
        let lock_path = self.layout.lock(remote.etag.hex());
        let lock = File::create(&lock_path).map_err(at(&lock_path))?;
        // Another process may be downloading the same file: wait, then find it done.
        if lock.try_lock().is_err() {
            tracing::info!(file = remote.name, "waiting for another download of the same file");
            lock.lock().map_err(at(&lock_path))?;
        }
        let blob = self.layout.blob(remote.etag.hex());
        if fs::metadata(&blob).is_ok_and(|metadata| metadata.len() == remote.bytes) {
            self.advance(remote, remote.bytes);
            return Ok(true);
        }
        let mut partial = self.open_partial(remote)?;
        loop {
            if !self.fill(&url, remote, &mut partial)? {
                return Ok(false);
            }
            let found = partial.hash.clone().finish();
            if found == remote.etag.hex() {
                break;
            }
            let inherited = partial.inherited > 0;
            self.restart(remote, &mut partial)?;
            if !inherited {
                fs::remove_file(&partial.path).map_err(at(&partial.path))?;
                let expected = remote.etag.hex().to_owned();
                return Err(HubError::Checksum { file: remote.name.clone(), expected, found });
            }
            // What an earlier run left behind was bad; once more from the start.
        }
        partial.file.sync_all().map_err(at(&partial.path))?;
        fs::rename(&partial.path, &blob).map_err(at(&blob))?;
        Ok(true)
    }

    fn open_partial(&self, remote: &RemoteFile) -> Result<Partial> {
        let path = self.layout.incomplete(remote.etag.hex());
        let mut file =
            OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(at(&path))?;
        let mut hash = Hash::new(remote);
        let mut bytes = io::copy(&mut file, &mut hash).map_err(at(&path))?;
        if bytes > remote.bytes {
            file.set_len(0).map_err(at(&path))?;
            (hash, bytes) = (Hash::new(remote), 0);
        }
        self.advance(remote, bytes);
        Ok(Partial { path, file, hash, bytes, inherited: bytes })
    }

    fn restart(&self, remote: &RemoteFile, partial: &mut Partial) -> Result<()> {
        partial.file.set_len(0).map_err(at(&partial.path))?;
        self.done_bytes.fetch_sub(partial.bytes, Ordering::Relaxed);
        partial.hash = Hash::new(remote);
        partial.bytes = 0;
        partial.inherited = 0;
        Ok(())
    }

    /// Attempts until the file has its full length. `Ok(false)`: stopped.
    fn fill(&self, url: &str, remote: &RemoteFile, partial: &mut Partial) -> Result<bool> {
        let mut fruitless = 0;
        while partial.bytes < remote.bytes {
            let before = partial.bytes;
            let (reason, retry_after) = match self.attempt(url, remote, partial) {
                Ok(()) if partial.bytes == remote.bytes => break,
                Ok(()) => ("the connection was closed early".to_owned(), None),
                Err(Ended::Stopped) => return Ok(false),
                Err(Ended::Failure(Failure::Fatal(error))) => return Err(error),
                Err(Ended::Failure(Failure::Transient { reason, retry_after })) => (reason, retry_after),
            };
            fruitless = if partial.bytes > before { 1 } else { fruitless + 1 };
            if fruitless >= ATTEMPTS_MAX {
                return Err(HubError::Network { url: url.to_owned(), reason, attempts: fruitless });
            }
            tracing::debug!(file = remote.name, reason, "download interrupted, trying again");
            if !self.pause(fruitless, retry_after) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sleeps before the next attempt; false when told to stop meanwhile.
    fn pause(&self, fruitless: u32, retry_after: Option<Duration>) -> bool {
        std::thread::sleep(backoff(self.backoff, fruitless, retry_after));
        !self.stop.load(Ordering::Relaxed)
    }

    fn attempt(
        &self,
        url: &str,
        remote: &RemoteFile,
        partial: &mut Partial,
    ) -> std::result::Result<(), Ended> {
        let response = match self.http.get(url, partial.bytes)? {
            Reply::Body(response) => response,
            // The server cannot continue there; without the range it can.
            Reply::Refused(refusal) if refusal.status == 416 && partial.bytes > 0 => {
                self.restart(remote, partial)?;
                return Ok(());
            }
            Reply::Refused(refusal) if refusal.status == 404 => {
                return Err(HubError::Status { url: url.to_owned(), status: 404 }.into());
            }
            Reply::Refused(refusal) => return Err((self.refused)(url, &refusal).into()),
        };
        if partial.bytes > 0 && !continues_at(&response, partial.bytes) {
            self.restart(remote, partial)?;
        }
        let mut body = response.into_body().into_reader();
        let mut chunk = vec![0; CHUNK];
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Ended::Stopped);
            }
            let read = match body.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) => {
                    return Err(Failure::Transient { reason: error.to_string(), retry_after: None }.into());
                }
            };
            if partial.bytes + read as u64 > remote.bytes {
                let reason = format!("more than the {} bytes the hub announced", remote.bytes);
                return Err(HubError::Protocol { url: url.to_owned(), reason }.into());
            }
            let missing = remote.bytes - partial.bytes;
            let failed = |error| write_error(error, &remote.name, missing, &partial.path);
            partial.file.write_all(&chunk[..read]).map_err(failed)?;
            partial.hash.update(&chunk[..read]);
            partial.bytes += read as u64;
            self.advance(remote, read as u64);
        }
    }

    fn advance(&self, remote: &RemoteFile, bytes: u64) {
        let done_bytes = self.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        (self.progress)(DownloadProgress { file: &remote.name, done_bytes, total_bytes: self.total_bytes });
    }
}

fn write_error(error: io::Error, file: &str, needed_bytes: u64, path: &Path) -> HubError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => HubError::DiskFull {
            file: file.to_owned(),
            needed_bytes,
            folder: path.parent().unwrap_or(path).display().to_string(),
        },
        _ => at(path)(error),
    }
}

/// Exponential, unless the server said how long.
pub fn backoff(unit: Duration, fruitless: u32, retry_after: Option<Duration>) -> Duration {
    retry_after.unwrap_or(unit * 2u32.pow(fruitless.saturating_sub(1).min(10))).min(BACKOFF_MAX)
}

fn continues_at(response: &ureq::http::Response<ureq::Body>, offset: u64) -> bool {
    let start = header(response, "content-range")
        .and_then(|range| range.strip_prefix("bytes ")?.split_once('-')?.0.parse::<u64>().ok());
    response.status().as_u16() == 206 && start == Some(offset)
}

#[derive(Clone)]
enum Hash {
    Sha256(Sha256),
    GitSha1(Sha1),
}

impl Hash {
    fn new(remote: &RemoteFile) -> Self {
        match remote.etag {
            Etag::Sha256(_) => Hash::Sha256(Sha256::new()),
            Etag::GitSha1(_) => Hash::GitSha1(Sha1::new_with_prefix(format!("blob {}\0", remote.bytes))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hash::Sha256(hash) => hash.update(bytes),
            Hash::GitSha1(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> String {
        let bytes = match self {
            Hash::Sha256(hash) => hash.finalize().to_vec(),
            Hash::GitSha1(hash) => hash.finalize().to_vec(),
        };
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_apart_and_says_how_much_is_missing() {
        let blob = Path::new("/cache/blobs/abc.incomplete");
        let full = write_error(io::Error::from_raw_os_error(28), "model.safetensors", 1234, blob).to_string();
        assert!(
            full.starts_with("disk full: model.safetensors needs 1234 more bytes in /cache/blobs;"),
            "{full}"
        );
        let denied =
            write_error(io::Error::from_raw_os_error(13), "model.safetensors", 1234, blob).to_string();
        assert!(
            denied.starts_with("cannot write /cache/blobs/abc.incomplete: Permission denied"),
            "{denied}"
        );
    }

    #[test]
    fn pauses_double_up_to_a_limit_and_yield_to_the_server() {
        let unit = Duration::from_millis(500);
        let pauses: Vec<u128> = (1..4).map(|n| backoff(unit, n, None).as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000]);
        assert_eq!(backoff(unit, 60, None), BACKOFF_MAX);
        assert_eq!(backoff(unit, 1, Some(Duration::from_secs(7))), Duration::from_secs(7));
    }
}
