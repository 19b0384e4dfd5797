//! The keyring: secrets that tenants' cached content hangs on and is sealed with, in a file, so that what is kept outside the process is
//! found again by the next one.
//!
//! ```text
//! folio keyring 1
//! server SECRET
//! tenant OWNER SECRET
//! ```
//!
//! A tenant's secret is derived from both: without its line what is kept of it is noise, for good. A line is added when a tenant is first
//! seen, and taken out by [`Keyring::forget`]; a tenant of the same name then begins anew. `OWNER` says nothing of a name to who has not
//! the file. Lines are appended under a lock, so servers that share a store share the file; one that was cut off is ignored.
//!
//! With an operator's key ([`WrappingKey`]) the first line ends with `wrapped`, and each `SECRET` is sealed with that key. Whoever has the file, and
//! the key where there is one, can read what a tier keeps. It is its owner's alone (0600), and refused if others may read it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::ServerError;
use crate::tenancy::keys::random;
use crate::tenancy::wrapping::WrappingKey;

const HEADER: &str = "folio keyring 1\nserver ";
const WRAPPED: &str = "folio keyring 1 wrapped\nserver ";
/// Whose the server's secret is.
const SERVER: &str = "server";
/// Half a million tenants.
const BYTES_MAX: u64 = 64 << 20;

type Owner = [u8; 16];

/// See the module documentation. Cannot be printed.
#[derive(Clone)]
pub struct Keyring {
    server: [u8; 32],
    /// Of tenants; `None`: all hangs on the server's secret alone, and nothing outlives the process.
    file: Option<Arc<Mutex<Lines>>>,
}

struct Lines {
    path: PathBuf,
    wrapping: Option<WrappingKey>,
    server: Option<[u8; 32]>,
    known: HashMap<Owner, [u8; 32]>,
    /// The file that was read, and how far.
    inode: u64,
    read: u64,
}

impl Default for Keyring {
    /// Of this process alone.
    fn default() -> Self {
        Self { server: random(), file: None }
    }
}

impl Keyring {
    /// The keyring at `path`, which is made if there is none; its secrets are wrapped by a key or not at all.
    pub fn open(path: &Path, wrapping: Option<&WrappingKey>) -> Result<Self, ServerError> {
        let wrong =
            |reason: std::io::Error| ServerError::Config(format!("the keyring {}: {reason}", path.display()));
        if let Err(error) = make(path, wrapping).or_else(|error| match error.kind() {
            ErrorKind::AlreadyExists => Ok(()),
            _ => Err(error),
        }) {
            return Err(wrong(error));
        }
        let (known, path) = (HashMap::new(), path.to_owned());
        let wrapping = wrapping.cloned();
        let mut lines = Lines { path, wrapping, server: None, known, inode: 0, read: 0 };
        lines.locked().and_then(|file| lines.catch_up(&file)).map_err(wrong)?;
        let server = lines.server.unwrap_or_default();
        Ok(Self { server, file: Some(Arc::new(Mutex::new(lines))) })
    }

    /// Without a file, from a secret that somebody else keeps.
    #[cfg(test)]
    pub(crate) fn of_server(server: [u8; 32]) -> Self {
        Self { server, file: None }
    }

    /// The secret of the tenant that `digest` stands for. Of one that is new a line is written; where that cannot be, what is kept of it
    /// will not be found again, and a warning says so.
    pub(crate) fn secret(&self, digest: &[u8; 32]) -> [u8; 32] {
        let Some(file) = &self.file else { return *blake3::keyed_hash(&self.server, digest).as_bytes() };
        let entry = file.lock().entry(self.owner(digest));
        *blake3::keyed_hash(&self.server, &[&digest[..], &entry].concat()).as_bytes()
    }

    /// The secret of a tenant that the keyring at `path` knows.
    pub fn find(
        path: &Path,
        wrapping: Option<&WrappingKey>,
        digest: &[u8; 32],
    ) -> Result<Option<[u8; 32]>, ServerError> {
        let ring = Self::open(path, wrapping)?;
        let is_known = |file: &Arc<Mutex<Lines>>| file.lock().known.contains_key(&ring.owner(digest));
        Ok(ring.file.as_ref().is_some_and(is_known).then(|| ring.secret(digest)))
    }

    /// Wraps the secrets of a keyring by another key, or by none. Servers that run go on with what they know.
    pub fn wrap(
        path: &Path,
        from: Option<&WrappingKey>,
        to: Option<&WrappingKey>,
    ) -> Result<(), ServerError> {
        let ring = Self::open(path, from)?;
        let Some(file) = &ring.file else { return Ok(()) };
        let done = file.lock().wrap(&ring.server, to);
        done.map_err(|error| ServerError::Config(format!("the keyring {}: {error}", path.display())))
    }

    fn owner(&self, digest: &[u8; 32]) -> Owner {
        let hash = blake3::keyed_hash(&self.server, &[&b"owner"[..], digest].concat());
        std::array::from_fn(|at| hash.as_bytes()[at])
    }

    /// Takes the line of a tenant out. Servers that run have its secret until they end. Whether there was one.
    pub fn forget(
        path: &Path,
        wrapping: Option<&WrappingKey>,
        digest: &[u8; 32],
    ) -> Result<bool, ServerError> {
        let ring = Self::open(path, wrapping)?;
        let Some(file) = &ring.file else { return Ok(false) };
        let owner = format!("tenant {} ", hex::encode(ring.owner(digest)));
        let found = file.lock().remove(&owner);
        found.map_err(|error| ServerError::Config(format!("the keyring {}: {error}", path.display())))
    }
}

/// A secret as a line has it.
fn write_secret(wrapping: Option<&WrappingKey>, whose: &str, secret: &[u8; 32]) -> std::io::Result<String> {
    match wrapping {
        None => Ok(hex::encode(secret)),
        Some(key) => {
            key.wrap(whose, secret).ok_or_else(|| std::io::Error::other("a secret cannot be wrapped"))
        }
    }
}

fn read_secret(wrapping: Option<&WrappingKey>, whose: &str, text: &str) -> Option<[u8; 32]> {
    match wrapping {
        None => bytes(text),
        Some(key) => key.unwrap(whose, text),
    }
}

fn header(wrapping: Option<&WrappingKey>) -> &'static str {
    if wrapping.is_some() { WRAPPED } else { HEADER }
}

impl Lines {
    /// All of it in a new file, which takes the place of this one.
    fn wrap(&mut self, server: &[u8; 32], to: Option<&WrappingKey>) -> std::io::Result<()> {
        let file = self.locked()?;
        self.catch_up(&file)?;
        let mut text = format!("{}{}\n", header(to), write_secret(to, SERVER, server)?);
        for (owner, secret) in &self.known {
            let owner = hex::encode(owner);
            let secret = write_secret(to, &owner, secret)?;
            text.push_str(&format!("tenant {owner} {secret}\n"));
        }
        self.replace(&text)
    }

    fn replace(&self, text: &str) -> std::io::Result<()> {
        let name = temporary(&self.path);
        let written =
            create(&name).and_then(|mut new| new.write_all(text.as_bytes()).and_then(|()| new.sync_all()));
        let moved = written.and_then(|()| std::fs::rename(&name, &self.path));
        // Best effort: what is left is nobody's.
        if moved.is_err() {
            let _ = std::fs::remove_file(&name);
        }
        moved
    }

    fn entry(&mut self, owner: Owner) -> [u8; 32] {
        if let Some(entry) = self.known.get(&owner) {
            return *entry;
        }
        let mut entry = random();
        if let Err(error) = self.add(owner, &mut entry) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "a tenant's line cannot be written: what is kept of it will not be found again");
        }
        self.known.insert(owner, entry);
        entry
    }

    /// Writes a line for `entry`, or changes it to what another server wrote.
    fn add(&mut self, owner: Owner, entry: &mut [u8; 32]) -> std::io::Result<()> {
        let mut file = self.locked()?;
        self.catch_up(&file)?;
        if let Some(known) = self.known.get(&owner) {
            *entry = *known;
            return Ok(());
        }
        let end = file.seek(SeekFrom::End(0))?;
        // A line that was cut off ends here, and is none.
        let cut = if end > self.read { "#\n" } else { "" };
        let owner = hex::encode(owner);
        let secret = write_secret(self.wrapping.as_ref(), &owner, entry)?;
        let line = format!("{cut}tenant {owner} {secret}\n");
        if end + line.len() as u64 > BYTES_MAX {
            return Err(std::io::Error::other("it is full"));
        }
        file.write_all(line.as_bytes())?;
        self.read = end + line.len() as u64;
        Ok(())
    }

    fn remove(&mut self, beginning: &str) -> std::io::Result<bool> {
        let mut file = self.locked()?;
        let text = read(&mut file)?;
        let kept: String = text.split_inclusive('\n').filter(|line| !line.starts_with(beginning)).collect();
        if kept.len() == text.len() {
            return Ok(false);
        }
        self.replace(&kept).map(|()| true)
    }

    /// The file, which nobody else changes while it is open.
    fn locked(&self) -> std::io::Result<File> {
        loop {
            let file = OpenOptions::new().read(true).append(true).open(&self.path)?;
            file.lock()?;
            // Somebody may have put another in its place while this one was waited for.
            let (mine, there) = (file.metadata()?, std::fs::metadata(&self.path)?);
            if mine.mode() & 0o077 != 0 {
                let mode = mine.mode() & 0o777;
                return Err(std::io::Error::other(format!("others may read it (mode {mode:o}): chmod 600")));
            }
            if mine.ino() == there.ino() {
                return Ok(file);
            }
        }
    }

    /// Learns what was written since the file was read last, all of it where it is another file. The server's secret is in the beginning.
    fn catch_up(&mut self, mut file: &File) -> std::io::Result<()> {
        let inode = file.metadata()?.ino();
        if self.inode != inode {
            (self.inode, self.read) = (inode, 0);
            self.server = None;
        }
        file.seek(SeekFrom::Start(self.read))?;
        let text = read(&mut file)?;
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let lines = match self.server {
            Some(_) => whole,
            None => {
                let key = self.wrapping.as_ref();
                let other = if key.is_some() { HEADER } else { WRAPPED };
                let (server, rest) = whole
                    .strip_prefix(header(key))
                    .and_then(|rest| rest.split_once('\n'))
                    .unwrap_or_default();
                let what = match key {
                    Some(_) if whole.starts_with(other) => {
                        "its secrets are not wrapped: `folio keys wrap` does that, or start without --keyring-key"
                    }
                    None if whole.starts_with(other) => {
                        "its secrets are wrapped by a key: give --keyring-key FILE"
                    }
                    Some(_) if whole.starts_with(WRAPPED) => "its secrets are wrapped by another key",
                    _ => {
                        "it is no keyring of this version of Folio; without one, what was kept is computed again"
                    }
                };
                let secret = read_secret(key, SERVER, server);
                self.server = Some(secret.ok_or_else(|| std::io::Error::other(what))?);
                rest
            }
        };
        self.read += whole.len() as u64;
        for line in lines.lines() {
            let mut words = line.split(' ');
            let entry = (words.next() == Some("tenant")).then(|| (words.next(), words.next()));
            if let Some((Some(owner), Some(secret))) = entry
                && let Some(secret) = read_secret(self.wrapping.as_ref(), owner, secret)
                && let Some(owner) = bytes(owner)
            {
                self.known.entry(owner).or_insert(secret);
            }
        }
        Ok(())
    }
}

fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    hex::decode(text).ok()?.try_into().ok()
}

fn read(file: &mut impl Read) -> std::io::Result<String> {
    let mut text = String::new();
    file.take(BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn create(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn temporary(path: &Path) -> PathBuf {
    format!("{}.{}.tmp", path.display(), hex::encode(random::<8>())).into()
}

/// It is there as a whole or not at all.
fn make(path: &Path, wrapping: Option<&WrappingKey>) -> std::io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), std::fs::create_dir_all)?;
    let name = temporary(path);
    let mut file = create(&name)?;
    let written = write_secret(wrapping, SERVER, &random()).and_then(|server| {
        let text = format!("{}{server}\n", header(wrapping));
        file.write_all(text.as_bytes())
    });
    let linked = written.and_then(|()| file.sync_all()).and_then(|()| std::fs::hard_link(&name, path));
    std::fs::remove_file(&name)?;
    linked
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const OWNERS: [[u8; 32]; 3] = [[1; 32], [2; 32], [3; 32]];

    fn secrets(ring: &Keyring) -> [[u8; 32]; 3] {
        OWNERS.map(|owner| ring.secret(&owner))
    }

    #[test]
    fn it_is_made_once_and_is_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/keyring");
        let open = |path: PathBuf| std::thread::spawn(move || secrets(&Keyring::open(&path, None).unwrap()));
        let threads: Vec<_> = (0..8).map(|_| open(path.clone())).collect();
        let all: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(all.iter().all(|of| *of == all[0]), "the same, whoever was first");
        assert!(all[0][0] != all[0][1] && all[0][1] != all[0][2]);
        assert_eq!(std::fs::read_dir(folder.path().join("new")).unwrap().count(), 1, "and nothing beside it");
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 5);
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o600);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let error = Keyring::open(&path, None).err().unwrap().to_string();
        assert!(error.contains("mode 640") && error.contains("new/keyring"), "{error}");
    }

    #[test]
    fn a_tenant_that_is_forgotten_begins_anew_and_the_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyring");
        let ring = Keyring::open(&path, None).unwrap();
        let before = secrets(&ring);
        assert_eq!(Keyring::find(&path, None, &OWNERS[1]).unwrap(), Some(before[1]));
        assert_eq!(Keyring::find(&path, None, &[8; 32]).unwrap(), None, "who is not there is not added");
        assert!(Keyring::forget(&path, None, &OWNERS[1]).unwrap());
        assert_eq!(Keyring::find(&path, None, &OWNERS[1]).unwrap(), None);
        assert!(!Keyring::forget(&path, None, &OWNERS[1]).unwrap(), "it is gone");
        assert_eq!(secrets(&ring), before, "who runs goes on");
        // Whoever comes later, and a server that runs and sees somebody new.
        ring.secret(&[9; 32]);
        let after = secrets(&Keyring::open(&path, None).unwrap());
        assert_eq!((after[0], after[2]), (before[0], before[2]));
        assert_ne!(after[1], before[1]);
        assert_eq!(Keyring::open(&path, None).unwrap().secret(&[9; 32]), ring.secret(&[9; 32]));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_line_that_was_cut_off_costs_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyring");
        let before = secrets(&Keyring::open(&path, None).unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        for cut in text.rfind("tenant").unwrap()..text.len() {
            std::fs::write(&path, &text[..cut]).unwrap();
            let ring = Keyring::open(&path, None).unwrap();
            assert_eq!(secrets(&ring)[..2], before[..2]);
            assert_eq!(secrets(&Keyring::open(&path, None).unwrap()), secrets(&ring), "cut at {cut}");
        }
    }

    #[test]
    fn what_is_no_keyring_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyring");
        let many = "f".repeat(100_000);
        let wrong = [
            "folio keyring 2\nserver 00\n",
            "folio keyring 1\nserver 00\n",
            "folio keyring 1\nserver zz\n",
            &many,
        ];
        for text in wrong.into_iter().chain([""]) {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            assert!(Keyring::open(&path, None).is_err(), "{text:.40}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_file_that_is_gone_costs_only_what_would_be_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyring");
        let ring = Keyring::open(&path, None).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(secrets(&ring), secrets(&ring));
    }

    #[test]
    fn an_operators_key_wraps_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, key) = (folder.path().join("keyring"), |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            WrappingKey::read(&path)
        });
        let (one, other) = (key("one", &"ab".repeat(32)).unwrap(), key("other", &"cd".repeat(40)).unwrap());
        let short = key("short", "ab").err().unwrap().to_string();
        assert!(short.contains("2 characters") && short.contains("64"), "{short}");
        let open = |key: Option<&WrappingKey>| Keyring::open(&path, key).map(|ring| secrets(&ring));
        let fault = |key| open(key).err().unwrap().to_string();
        let before = open(Some(&one)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with(WRAPPED) && text.lines().all(|line| line.len() != 71),
            "nothing is readable"
        );
        assert_eq!(open(Some(&one)).unwrap(), before);
        assert!(fault(None).contains("--keyring-key"));
        assert!(fault(Some(&other)).contains("another key"));
        // A line of one tenant is nobody else's.
        let lines: Vec<&str> = text.lines().collect();
        let secret = |at: usize| lines[at].rsplit_once(' ').unwrap().1;
        let swapped = text.replace(secret(2), "x").replace(secret(3), secret(2)).replace('x', secret(3));
        std::fs::write(&path, swapped).unwrap();
        let after = open(Some(&one)).unwrap();
        assert_eq!((0..3).filter(|at| after[*at] == before[*at]).count(), 1, "both begin anew");
        std::fs::write(&path, &text).unwrap();
        // By another key, by none, and back.
        Keyring::wrap(&path, Some(&one), Some(&other)).unwrap();
        assert_eq!(open(Some(&other)).unwrap(), before);
        assert!(fault(Some(&one)).contains("another key"));
        Keyring::wrap(&path, Some(&other), None).unwrap();
        assert_eq!(open(None).unwrap(), before);
        assert!(fault(Some(&one)).contains("not wrapped"));
        assert!(Keyring::wrap(&path, Some(&one), None).is_err());
        Keyring::wrap(&path, None, Some(&one)).unwrap();
        assert_eq!(open(Some(&one)).unwrap(), before);
        assert_eq!(Keyring::find(&path, Some(&one), &OWNERS[0]).unwrap(), Some(before[0]));
        assert!(Keyring::forget(&path, Some(&one), &OWNERS[0]).unwrap());
        assert_ne!(open(Some(&one)).unwrap()[0], before[0]);
    }
}
