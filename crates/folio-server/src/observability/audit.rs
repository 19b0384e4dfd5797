//! The audit log: who asked for what, when, and how it ended; one JSON object a line.
//!
//! Owns: the file, and the thread that writes it. Must never: contain a prompt, an answer or a key, or hold a request up: lines
//! wait in a bounded line, and where the disk cannot keep up, what is lost is counted and said in the log itself.
//!
//! The file is opened for appending, and anew when its path names another file (or none), so that it can be rotated by
//! renaming it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use folio_text::rfc_3339;
use serde_json::{Value, json};

use crate::error::ServerError;

/// Lines that wait for the disk.
const WAITING_MAX: usize = 65_536;

pub(crate) struct Audit {
    sender: Option<SyncSender<String>>,
    lost: Arc<AtomicU64>,
    writer: Option<JoinHandle<()>>,
}

impl Audit {
    pub fn open(path: &Path) -> Result<Self, ServerError> {
        let unusable = |error: std::io::Error| {
            ServerError::Config(format!("{}: the audit log cannot be written: {error}", path.display()))
        };
        let file = append_to(path).map_err(unusable)?;
        let (sender, lines) = sync_channel(WAITING_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let (path, known_lost) = (path.to_owned(), lost.clone());
        let writer = std::thread::Builder::new().name("folio-audit".into());
        let writer = writer.spawn(move || write_all(&path, file, &lines, &known_lost)).map_err(unusable)?;
        Ok(Self { sender: Some(sender), lost, writer: Some(writer) })
    }

    /// `fields` is an object.
    pub fn write(&self, event: &str, fields: Value) {
        let mut line = json!({"time": time(SystemTime::now()), "event": event});
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        let sent = self.sender.as_ref().is_some_and(|sender| sender.try_send(line.to_string()).is_ok());
        if !sent {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Audit {
    /// Waits until everything is written.
    fn drop(&mut self) {
        self.sender = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn append_to(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Until there is no sender.
fn write_all(path: &Path, mut file: File, lines: &Receiver<String>, lost: &AtomicU64) {
    let mut buffer = Vec::new();
    while let Ok(line) = lines.recv() {
        buffer.clear();
        let mut next = Some(line);
        while let Some(line) = next {
            buffer.extend_from_slice(line.as_bytes());
            buffer.push(b'\n');
            next = if buffer.len() < 1 << 20 { lines.try_recv().ok() } else { None };
        }
        let missing = lost.swap(0, Ordering::Relaxed);
        if missing > 0 {
            let line = json!({"time": time(SystemTime::now()), "event": "lost", "lines": missing});
            buffer.extend_from_slice(format!("{line}\n").as_bytes());
        }
        if moved(path, &file) {
            match append_to(path) {
                Ok(new) => file = new,
                Err(error) => {
                    tracing::error!(%error, "the audit log cannot be opened anew; the old file is still written")
                }
            }
        }
        if let Err(error) = file.write_all(&buffer) {
            tracing::error!(%error, "the audit log cannot be written");
            lost.fetch_add(buffer.iter().filter(|byte| **byte == b'\n').count() as u64, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Whether the path names another file than this one, or none.
fn moved(path: &Path, file: &File) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |data: std::fs::Metadata| (data.dev(), data.ino());
        std::fs::metadata(path).map(id).ok() != file.metadata().map(id).ok()
    }
    #[cfg(not(unix))]
    {
        let _ = (path, file);
        false
    }
}

/// RFC 3339, UTC, milliseconds.
fn time(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let second = rfc_3339(since.as_secs() as i64);
    format!("{}.{:03}Z", second.trim_end_matches('Z'), since.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_civil() {
        let at =
            |seconds: u64, millis: u64| time(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + millis));
        assert_eq!(at(0, 7), "1970-01-01T00:00:00.007Z");
        assert_eq!(at(951_782_399, 0), "2000-02-28T23:59:59.000Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_767_225_599, 999), "2025-12-31T23:59:59.999Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn every_line_is_written_also_after_the_file_was_moved_away() {
        let folder = tempfile::tempdir().unwrap();
        let (path, old) = (folder.path().join("audit.log"), folder.path().join("audit.log.1"));
        let audit = Audit::open(&path).unwrap();
        (0..100).for_each(|n| audit.write("request", json!({"n": n})));
        let lines = |path: &Path| -> Vec<Value> {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        while lines(&path).len() < 100 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::rename(&path, &old).unwrap();
        audit.write("request", json!({"n": 100}));
        drop(audit);
        assert_eq!((lines(&old).len(), lines(&path).len()), (100, 1));
        let last = &lines(&path)[0];
        assert_eq!((&last["event"], &last["n"]), (&json!("request"), &json!(100)));
        assert!(Audit::open(folder.path()).is_err(), "a folder is no log");
    }
}
