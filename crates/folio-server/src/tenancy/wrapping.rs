//! An operator's key around the secrets of a keyring: who has the keyring's file and not this key has nothing.
//!
//! Owns: the form of a wrapped secret: 12 random bytes, and the secret sealed with ChaCha20-Poly1305, bound to whose it is; hexadecimal.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::error::ServerError;
use crate::tenancy::keys::random;

/// Of a secret.
const SECRET: usize = 32;
/// An operator's key has this many hexadecimal digits at least.
const DIGITS: usize = 64;
/// Of a file that holds one.
const FILE_MAX: u64 = 4096;

/// See the module documentation. Cannot be printed.
#[derive(Clone)]
pub struct WrappingKey([u8; 32]);

impl WrappingKey {
    /// The key in a file that nobody else may read: 64 hexadecimal digits or more, as `openssl rand -hex 32` writes them.
    pub fn read(path: &Path) -> Result<Self, ServerError> {
        let wrong =
            |reason: String| ServerError::Config(format!("the keyring's key {}: {reason}", path.display()));
        let file = std::fs::File::open(path).map_err(|error| wrong(error.to_string()))?;
        let mode = file.metadata().map_err(|error| wrong(error.to_string()))?.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(wrong(format!("others may read it (mode {mode:o}): chmod 600")));
        }
        let mut text = String::new();
        file.take(FILE_MAX).read_to_string(&mut text).map_err(|error| wrong(error.to_string()))?;
        let digits = text.trim();
        if digits.len() < DIGITS || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong(format!(
                "it has {} characters and must have {DIGITS} hexadecimal digits or more: openssl rand -hex 32",
                digits.len()
            )));
        }
        Ok(Self(blake3::derive_key(
            "folio 2026 keyring, wrapping key",
            digits.to_ascii_lowercase().as_bytes(),
        )))
    }

    fn cipher(&self) -> Option<LessSafeKey> {
        Some(LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, &self.0).ok()?))
    }

    /// `None`: it could not be done.
    pub(super) fn wrap(&self, whose: &str, secret: &[u8; SECRET]) -> Option<String> {
        let nonce: [u8; NONCE_LEN] = random();
        let mut sealed = secret.to_vec();
        let aad = Aad::from(whose.as_bytes());
        self.cipher()?
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), aad, &mut sealed)
            .ok()?;
        Some(format!("{}{}", hex::encode(nonce), hex::encode(sealed)))
    }

    /// `None`: another key made it, for somebody else, or it was changed.
    pub(super) fn unwrap(&self, whose: &str, wrapped: &str) -> Option<[u8; SECRET]> {
        let bytes = hex::decode(wrapped).ok()?;
        let (nonce, sealed) = bytes.split_at_checked(NONCE_LEN)?;
        let mut sealed = sealed.to_vec();
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let opened = self.cipher()?.open_in_place(nonce, Aad::from(whose.as_bytes()), &mut sealed).ok()?;
        <[u8; SECRET]>::try_from(&*opened).ok()
    }
}
