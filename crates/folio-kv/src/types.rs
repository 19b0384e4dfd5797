//! Names for the numbers that cross this crate's boundary.

/// A block of KV memory: an index into the device's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// A tenant: whoever authenticated with one key. Assigned by the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u32);

/// Identity of a full block: a keyed 256-bit hash chained over everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 32]);

impl std::fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for byte in &self.0[..6] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("..")
    }
}

/// Start of a hash chain. Two roots differ unless tenant secret, model digest, layout digest and extras are all equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Root {
    pub tenant: TenantId,
    pub(crate) hash: BlockHash,
    /// Key of the tenant's keyed hash: makes block hashes unguessable.
    pub(crate) key: [u8; 32],
}

/// What a [`Root`] is derived from.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    pub tenant: TenantId,
    /// Secret of the tenant, derived on the server from its key; never from a request body.
    pub tenant_secret: &'a [u8; 32],
    /// Digest of the checkpoint's bytes and configuration.
    pub model_digest: &'a [u8; 32],
    /// Digest of the KV layout: dtype, heads, head_dim, block size, numerics version.
    pub layout_digest: &'a [u8; 32],
    /// Adapter, multimodal content and so on; empty today.
    pub extra: &'a [u8],
}

/// Copy `tokens` positions of block `from` into block `to`. Executed in list order, before anything else in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
    pub tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    pub blocks: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// For accounting only; this crate never touches KV bytes.
    pub bytes_per_block: u64,
}

/// The pool cannot give what was asked for; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} KV blocks needed, {available} available")]
pub struct OutOfBlocks {
    pub needed: u32,
    pub available: u32,
}
