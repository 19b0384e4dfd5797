//! Results of batches that run, before they are files.
//!
//! Invariants: lines are whole, but for the last of a process that ended; bytes are counted in [`Room`] as they come.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::records::Batch;

/// What is kept: bytes of everybody, and of each owner how many files and their bytes. Files, uploads, and results that are no file yet.
#[derive(Default)]
pub struct Room {
    pub all: u64,
    pub own: HashMap<Arc<str>, (usize, u64)>,
}

impl Room {
    /// Whether so many bytes more are within `max` for everybody, and within half of that for one owner.
    pub fn fits(&self, owner: &str, more: u64, max: u64) -> bool {
        let (_, own) = self.own.get(owner).copied().unwrap_or_default();
        self.all + more <= max && own + more <= max / 2
    }

    pub fn files(&self, owner: &str) -> usize {
        self.own.get(owner).map_or(0, |(files, _)| *files)
    }

    fn take(&mut self, owner: &Arc<str>, files: usize, bytes: u64) {
        let own = self.own.entry(owner.clone()).or_default();
        *own = (own.0 + files, own.1 + bytes);
        self.all += bytes;
    }

    fn give_back(&mut self, owner: &str, bytes: u64) {
        self.all -= bytes;
        if let Some(own) = self.own.get_mut(owner) {
            *own = (own.0 - 1, own.1 - bytes);
            if own.0 == 0 {
                self.own.remove(owner);
            }
        }
    }
}

/// What a file takes, or a batch's results until they are files.
pub struct TakenRoom {
    room: Arc<Mutex<Room>>,
    owner: Arc<str>,
    bytes: u64,
}

impl TakenRoom {
    /// Whether or not there is room for it.
    pub fn new(room: &Arc<Mutex<Room>>, owner: &str, bytes: u64) -> Self {
        let Ok(taken) = Self::within(room, owner, bytes, |_| Ok::<_, Infallible>(()));
        taken
    }

    /// As long as `refusal` has none, of what is taken before.
    pub fn within<E>(
        room: &Arc<Mutex<Room>>,
        owner: &str,
        bytes: u64,
        refusal: impl FnOnce(&Room) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut taken = room.lock();
        refusal(&taken)?;
        let owner: Arc<str> = owner.into();
        taken.take(&owner, 1, bytes);
        Ok(Self { room: room.clone(), owner, bytes })
    }

    fn grow(&mut self, more: u64) {
        self.room.lock().take(&self.owner, 0, more);
        self.bytes += more;
    }
}

impl Drop for TakenRoom {
    fn drop(&mut self) {
        self.room.lock().give_back(&self.owner, self.bytes);
    }
}

/// Results of a batch that runs.
pub struct Results {
    pub batch: Arc<Batch>,
    /// Of what was answered, and of what was not.
    sinks: [ResultSink; 2],
    taken: TakenRoom,
}

pub enum ResultSink {
    Memory(Vec<u8>),
    Disk { file: File, path: PathBuf, bytes: u64 },
}

impl ResultSink {
    /// Behind the last whole line.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
        let mut whole = 0;
        let mut reader = BufReader::new(&mut file);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.read_until(b'\n', &mut line)? {
                0 => break,
                bytes if line.ends_with(b"\n") => whole += bytes as u64,
                _ => break,
            }
        }
        file.set_len(whole)?;
        Ok(Self::Disk { file, path, bytes: whole })
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::Disk { bytes, .. } => *bytes,
        }
    }

    fn lines(&self) -> io::Result<Box<dyn BufRead + '_>> {
        Ok(match self {
            Self::Memory(bytes) => Box::new(bytes.as_slice()),
            Self::Disk { path, .. } => Box::new(BufReader::new(File::open(path)?)),
        })
    }
}

impl Results {
    /// Behind what the sinks have.
    pub fn new(batch: Arc<Batch>, sinks: [ResultSink; 2], room: &Arc<Mutex<Room>>) -> Self {
        let taken = TakenRoom::new(room, &batch.record().owner, sinks.iter().map(ResultSink::bytes).sum());
        Self { batch, sinks, taken }
    }

    /// What they are of and what there is of them, which counts no longer.
    pub fn into_sinks(self) -> (Arc<Batch>, [ResultSink; 2]) {
        (self.batch, self.sinks)
    }

    /// Adds a line, to the answers or to the others.
    pub fn append(&mut self, answered: bool, line: &str) -> io::Result<()> {
        match &mut self.sinks[usize::from(!answered)] {
            ResultSink::Memory(bytes) => bytes.extend_from_slice(line.as_bytes()),
            ResultSink::Disk { file, bytes, .. } => {
                file.write_all(line.as_bytes())?;
                *bytes += line.len() as u64;
            }
        }
        self.taken.grow(line.len() as u64);
        Ok(())
    }

    /// Calls `each` with every line there is, and whether it is an answer.
    pub fn each(&self, mut each: impl FnMut(bool, &[u8])) -> io::Result<()> {
        for (sink, answered) in self.sinks.iter().zip([true, false]) {
            for line in sink.lines()?.split(b'\n') {
                each(answered, &line?);
            }
        }
        Ok(())
    }
}
