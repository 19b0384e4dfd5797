//! What makes a record unreadable and unforgeable for whoever lacks its tenant's key.
//!
//! Sealed: XChaCha20-Poly1305, whose nonce is long enough to be drawn at random for each write. Not sealed: a keyed BLAKE3 of the
//! same bytes, cut to the same 16. The two use keys that are derived from the tenant's apart.

use chacha20poly1305::aead::inout::InOutBuf;
use chacha20poly1305::{AeadInOut, KeyInit, XChaCha20Poly1305};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::types::DataKey;

pub const NONCE: usize = 24;
pub const TAG: usize = 16;

/// Of a record. Each has keys of its own, so that one nonce serves both.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    Block,
    Lineage,
}

impl Part {
    fn cipher(self, key: &DataKey) -> XChaCha20Poly1305 {
        let context = match self {
            Self::Block => "folio 2026 disk store, XChaCha20-Poly1305 of a block",
            Self::Lineage => "folio 2026 disk store, XChaCha20-Poly1305 of a lineage",
        };
        let key = Zeroizing::new(blake3::derive_key(context, &key.0));
        XChaCha20Poly1305::new((&*key).into())
    }

    fn context_without_cipher(self) -> &'static str {
        match self {
            Self::Block => "folio 2026 disk store, keyed BLAKE3 of a block",
            Self::Lineage => "folio 2026 disk store, keyed BLAKE3 of a lineage",
        }
    }
}

/// `about` is bound to the bytes and stays readable. `into` is as long as `plain`.
pub fn seal(
    part: Part,
    key: &DataKey,
    nonce: &[u8; NONCE],
    about: &[u8],
    plain: &[u8],
    into: &mut [u8],
) -> [u8; TAG] {
    let buffer = InOutBuf::new(plain, into).expect("they are equally long");
    let tag = part.cipher(key).encrypt_inout_detached(nonce.into(), about, buffer);
    tag.expect("a segment is shorter than the cipher's limit").into()
}

/// Whether it was this; only then is `into` written.
pub fn open(
    part: Part,
    key: &DataKey,
    nonce: &[u8; NONCE],
    about: &[u8],
    sealed: &[u8],
    tag: &[u8; TAG],
    into: &mut [u8],
) -> bool {
    let buffer = InOutBuf::new(sealed, into).expect("they are equally long");
    part.cipher(key).decrypt_inout_detached(nonce.into(), about, buffer, tag.into()).is_ok()
}

/// Without encryption. A nonce adds nothing: it is zeros.
pub fn authenticate(part: Part, key: &DataKey, about: &[u8], plain: &[u8]) -> [u8; TAG] {
    let key = Zeroizing::new(blake3::derive_key(part.context_without_cipher(), &key.0));
    let mut hasher = blake3::Hasher::new_keyed(&key);
    hasher.update(about).update(plain);
    hasher.finalize().as_bytes()[..TAG].try_into().expect("a hash has 32 bytes")
}

pub fn is_authentic(part: Part, key: &DataKey, about: &[u8], plain: &[u8], tag: &[u8; TAG]) -> bool {
    authenticate(part, key, about, plain).ct_eq(tag).into()
}

/// Tells a tenant's records to who has its key, and nobody which of them belong together.
pub struct OwnerKey(Zeroizing<[u8; 32]>);

impl From<&DataKey> for OwnerKey {
    fn from(key: &DataKey) -> Self {
        Self(Zeroizing::new(blake3::derive_key("folio 2026 disk store, whose a block is", &key.0)))
    }
}

impl OwnerKey {
    /// Of the block that `block` names.
    pub fn mark(&self, block: &[u8]) -> [u8; 8] {
        let hash = blake3::keyed_hash(&self.0, block);
        std::array::from_fn(|at| hash.as_bytes()[at])
    }
}
