//! `reasoning.encrypted_content`: what the model thought, carried by the client and opened by this server alone.
//!
//! Owns: the format `fr1.` + base64url of nonce (12 bytes), end of validity (Unix seconds, 8 bytes, big endian), and ciphertext with its tag
//! (ChaCha20-Poly1305). Must never: open what another tenant, another model or a changed byte made. Invariants: the key is derived from
//! the tenant's secret and the model's digest, the tenant's name and the end of validity are authenticated; a nonce is random and a key's
//! messages are far fewer than 2^32. Without `--keyring` a tenant's secret, and so what it sealed, ends with the process.
//! Cost: linear in the text.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};

use crate::tenancy::keys::random;
use crate::tenancy::tenant::Tenant;
use folio_api::{ApiError, unix_s};

const PREFIX: &str = "fr1.";
const PURPOSE: &[u8] = b"folio reasoning v1";
/// How long what was sealed can be opened.
const VALID_S: u64 = 30 * 24 * 3600;
const END_LEN: usize = 8;

/// Seals and opens for one tenant and model.
pub struct Sealer {
    key: LessSafeKey,
    tenant: Vec<u8>,
}

impl Sealer {
    /// `model`: its digest.
    pub fn new(model: &[u8; 32], tenant: &Tenant) -> Result<Self, ApiError> {
        Self::of(&tenant.secret, &tenant.name, model)
    }

    fn of(secret: &[u8; 32], tenant: &str, model: &[u8; 32]) -> Result<Self, ApiError> {
        let failed = |_| ApiError::internal("no key to seal reasoning with");
        let info = [PURPOSE, &model[..]];
        let root = Salt::new(HKDF_SHA256, PURPOSE).extract(secret);
        let derived = root.expand(&info, &CHACHA20_POLY1305).map_err(failed)?;
        Ok(Self { key: LessSafeKey::new(UnboundKey::from(derived)), tenant: tenant.into() })
    }

    /// What is authenticated beside the text.
    fn aad(&self, end: [u8; END_LEN]) -> Aad<Vec<u8>> {
        Aad::from([&end[..], &self.tenant].concat())
    }

    pub fn seal(&self, text: &str) -> Result<String, ApiError> {
        self.seal_until(text, unix_s() + VALID_S)
    }

    fn seal_until(&self, text: &str, end: u64) -> Result<String, ApiError> {
        let end = end.to_be_bytes();
        let nonce: [u8; NONCE_LEN] = random();
        let mut sealed = text.as_bytes().to_vec();
        self.key
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), self.aad(end), &mut sealed)
            .map_err(|_| ApiError::internal("reasoning could not be sealed"))?;
        Ok(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode([&nonce[..], &end, &sealed].concat())))
    }

    /// The text, if this tenant and model sealed it and its time is not over. `path` is where it stands in the request.
    pub fn open(&self, sealed: &str, path: &str) -> Result<String, ApiError> {
        self.opened(sealed).ok_or_else(|| {
            let message = format!(
                "Invalid '{path}': it was not made by this server for this API key and model, or its 30 days are over. Leave the \
                 item out, or send its content."
            );
            ApiError { code: Some("invalid_encrypted_content"), ..ApiError::invalid(path, message) }
        })
    }

    fn opened(&self, sealed: &str) -> Option<String> {
        let bytes = URL_SAFE_NO_PAD.decode(sealed.strip_prefix(PREFIX)?).ok()?;
        let (nonce, rest) = bytes.split_first_chunk::<NONCE_LEN>()?;
        let (end, rest) = rest.split_first_chunk::<END_LEN>()?;
        let mut text = rest.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let text = self.key.open_in_place(nonce, self.aad(*end), &mut text).ok()?;
        let valid = u64::from_be_bytes(*end) >= unix_s();
        valid.then(|| String::from_utf8(text.to_vec()).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_opens_for_its_tenant_and_model_until_its_end() {
        let sealer = |secret, tenant, model| Sealer::of(&[secret; 32], tenant, &[model; 32]).unwrap();
        let mine = sealer(1, "a", 1);
        let sealed = mine.seal("a thought").unwrap();
        assert_eq!(mine.opened(&sealed).as_deref(), Some("a thought"));
        assert_ne!(sealed, mine.seal("a thought").unwrap(), "a nonce of its own");
        for other in [sealer(2, "a", 1), sealer(1, "b", 1), sealer(1, "a", 2)] {
            assert_eq!(other.opened(&sealed), None);
        }
        assert_eq!(mine.opened(&mine.seal_until("old", unix_s() - 1).unwrap()), None);
        let error = mine.open("ENC", "input[0].encrypted_content").unwrap_err();
        assert_eq!(error.code, Some("invalid_encrypted_content"));
    }

    #[test]
    fn no_changed_byte_opens() {
        let sealer = Sealer::of(&[1; 32], "a", &[1; 32]).unwrap();
        let sealed = sealer.seal("a thought").unwrap();
        let bytes = URL_SAFE_NO_PAD.decode(&sealed[PREFIX.len()..]).unwrap();
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            let changed = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(changed));
            assert_eq!(sealer.opened(&changed), None, "byte {index}");
        }
        for text in ["", "fr1.", "fr1.AAAA", &sealed[1..]] {
            assert_eq!(sealer.opened(text), None, "{text}");
        }
    }
}
