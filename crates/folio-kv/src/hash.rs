//! Identity of content: roots and chained block hashes.
//!
//! Owns: the exact bytes that are hashed. They are part of every stored format: a change here is a change of the
//! numerics version in the layout digest. Must never: hash anything a request body controls except token ids.
//!
//! `root  = H(root_key,  tenant id, model digest, layout digest, extra)`, every field prefixed by its length (u64 LE)
//! `block = H(block_key, parent hash, token ids as u32 LE)`
//!
//! `H` is keyed BLAKE3. Both keys are derived from the tenant's secret under different contexts, so a root can never
//! equal a block hash, and nobody without the secret can compute, guess or probe for another tenant's hashes.

use crate::types::{BlockHash, Identity, Root};

const ROOT_CONTEXT: &str = "folio-kv 2026 root key v1";
const BLOCK_CONTEXT: &str = "folio-kv 2026 block key v1";
/// Blocks of up to this many tokens are hashed from the stack in one call.
const STACK_TOKENS: usize = 64;

impl Root {
    /// Start of the hash chain of everything that depends on `identity` and a token sequence.
    pub fn derive(identity: &Identity<'_>) -> Root {
        let mut hasher = blake3::Hasher::new_keyed(&blake3::derive_key(ROOT_CONTEXT, identity.tenant_secret));
        let tenant = identity.tenant.0.to_le_bytes();
        for field in [&tenant[..], identity.model_digest, identity.layout_digest, identity.extra] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        Root {
            tenant: identity.tenant,
            hash: BlockHash(*hasher.finalize().as_bytes()),
            key: blake3::derive_key(BLOCK_CONTEXT, identity.tenant_secret),
        }
    }

    /// Hash of the block that holds `tokens` after everything `parent` stands for.
    pub(crate) fn chain(&self, parent: &BlockHash, tokens: &[u32]) -> BlockHash {
        if tokens.len() > STACK_TOKENS {
            let mut hasher = blake3::Hasher::new_keyed(&self.key);
            hasher.update(&parent.0);
            for token in tokens {
                hasher.update(&token.to_le_bytes());
            }
            return BlockHash(*hasher.finalize().as_bytes());
        }
        let mut bytes = [0u8; 32 + 4 * STACK_TOKENS];
        bytes[..32].copy_from_slice(&parent.0);
        for (slot, token) in bytes[32..].chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        BlockHash(*blake3::keyed_hash(&self.key, &bytes[..32 + 4 * tokens.len()]).as_bytes())
    }
}
