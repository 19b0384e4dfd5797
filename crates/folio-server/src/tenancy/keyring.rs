//! The keyring: the secret from which all tenants' cache secrets are derived, in a file, so that what is cached outside the process is
//! found again by the next one.
//!
//! Whoever has the file can read what a tier keeps. It is its owner's alone (0600), and refused if others may read it. Servers that share a
//! store share the file.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::error::ServerError;
use crate::tenancy::keys::random;

const HEADER: &str = "folio keyring 1\nserver ";

/// The secret of the keyring at `path`, which is made if there is none.
pub fn server_secret(path: &Path) -> Result<[u8; 32], ServerError> {
    let wrong = |reason: &dyn std::fmt::Display| {
        ServerError::Config(format!("the keyring {}: {reason}", path.display()))
    };
    match File::open(path) {
        Ok(file) => read(file).map_err(|reason| wrong(&reason)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let made = make(path).map_err(|error| wrong(&error))?;
            match made {
                Some(secret) => Ok(secret),
                // Another server was faster.
                None => {
                    let file = File::open(path).map_err(|error| wrong(&error))?;
                    read(file).map_err(|reason| wrong(&reason))
                }
            }
        }
        Err(error) => Err(wrong(&error)),
    }
}

fn read(file: File) -> Result<[u8; 32], String> {
    let mode = file.metadata().map_err(|error| error.to_string())?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(format!("others may read it (mode {:o}): chmod 600", mode & 0o777));
    }
    let mut text = String::new();
    file.take(4096).read_to_string(&mut text).map_err(|error| error.to_string())?;
    let secret = text.strip_prefix(HEADER).and_then(|rest| hex::decode(rest.trim_end()).ok());
    let secret = secret.and_then(|bytes| bytes.try_into().ok());
    secret.ok_or_else(|| {
        "it is no keyring of this version of Folio; a lost one is no loss but of what was kept".into()
    })
}

/// `None`: somebody else made it meanwhile. It is there as a whole or not at all.
fn make(path: &Path) -> std::io::Result<Option<[u8; 32]>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), std::fs::create_dir_all)?;
    let secret: [u8; 32] = random();
    let name = format!("{}.{}.tmp", path.display(), hex::encode(random::<8>()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&name)?;
    let written = file.write_all(format!("{HEADER}{}\n", hex::encode(secret)).as_bytes());
    let linked = written.and_then(|()| file.sync_all()).and_then(|()| std::fs::hard_link(&name, path));
    std::fs::remove_file(&name)?;
    match linked {
        Ok(()) => {
            folder.map_or(Ok(()), |folder| File::open(folder)?.sync_all())?;
            Ok(Some(secret))
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_is_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/keyring");
        let threads: Vec<_> = (0..8)
            .map(|_| path.clone())
            .map(|path| std::thread::spawn(move || server_secret(&path).unwrap()))
            .collect();
        let secrets: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(secrets.iter().all(|secret| *secret == secrets[0]), "one secret, whoever was first");
        assert_eq!(std::fs::read_dir(folder.path().join("new")).unwrap().count(), 1, "and nothing beside it");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o600);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let error = server_secret(&path).unwrap_err().to_string();
        assert!(error.contains("mode 640") && error.contains("new/keyring"), "{error}");
    }

    #[test]
    fn what_is_no_keyring_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyring");
        let many = "f".repeat(100_000);
        for text in [
            "",
            "folio keyring 2\nserver 00",
            "folio keyring 1\nserver 00",
            "folio keyring 1\nserver zz",
            &many,
        ] {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            assert!(server_secret(&path).is_err(), "{text:.40}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
