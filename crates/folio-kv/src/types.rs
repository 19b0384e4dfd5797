//! Names for the numbers that cross this crate's boundary.

/// A block of KV memory: an index into the device's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// In a block table: a block that no query reads any more and that was released, or one of an optional group that was not
/// to be had.
pub const HOLE: BlockId = BlockId(u32::MAX);

/// A tenant: whoever authenticated with one key. Assigned by the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u32);

/// A tier off the device, by its place in their order: 0 is the nearest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierId(pub u8);

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

/// A key that is never in a log.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SecretKey(pub [u8; 32]);

impl std::fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("..")
    }
}

/// Start of a hash chain. Two roots differ unless tenant secret, model digest, layout digest and extras are all equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Root {
    pub tenant: TenantId,
    pub(crate) hash: BlockHash,
    /// Key of the tenant's keyed hash: makes block hashes unguessable.
    pub(crate) key: SecretKey,
    /// What an operator declared to be shared, and chains from here may begin with.
    pub(crate) declared: Option<Declared>,
}

/// The blocks of a prefix that an operator declared: computed for `tenant`, which is nobody, and read by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Declared {
    pub tenant: TenantId,
    pub hash: BlockHash,
    pub key: SecretKey,
    /// At least one.
    pub blocks: u32,
    /// The root that the reader's own blocks hang on behind it: of the reader's key and the declared content.
    pub boundary: BlockHash,
}

/// Tokens that are placeholders: what is computed of them depends on something else, such as an image [vLLM: `PlaceholderRange` and
/// the `mm_hash` of its item].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentRange {
    /// Position of the first.
    pub start: u32,
    /// At least 1.
    pub len: u32,
    /// Digest of what stands in their places.
    pub content: [u8; 32],
}

impl ContentRange {
    /// The position behind the last.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }
}

/// What a [`Root`] is derived from.
#[derive(Clone, Copy)]
pub struct Identity<'a> {
    pub tenant: TenantId,
    /// Secret of the tenant, derived on the server from its key; never from a request body.
    pub tenant_secret: &'a [u8; 32],
    /// Digest of the checkpoint's bytes and configuration.
    pub model_digest: &'a [u8; 32],
    /// Digest of the KV layout: dtype, heads, head_dim, block size, numerics version.
    pub layout_digest: &'a [u8; 32],
    /// Whatever else all of the content depends on, such as an adapter; empty where that is nothing.
    pub extra: &'a [u8],
}

// By hand, so that the secret is never in a log.
impl std::fmt::Debug for Identity<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("tenant", &self.tenant).finish_non_exhaustive()
    }
}

/// Copy `tokens` positions of block `from` into block `to`, both of `group`'s pool. Executed in list order, before anything
/// else in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// 0 is full attention, then the window groups in the order they were given.
    pub group: u32,
    pub from: BlockId,
    pub to: BlockId,
    pub tokens: u32,
}

/// Group 0, which holds every position and is the index of all; and what all groups have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    pub blocks: u32,
    /// Tokens per block, and between two hashes.
    pub block_tokens: u32,
    /// For accounting only; this crate never touches KV bytes.
    pub bytes_per_block: u64,
}

impl CacheConfig {
    /// As a group among others.
    pub fn first_group(&self) -> GroupConfig {
        let Self { blocks, block_tokens, bytes_per_block } = *self;
        GroupConfig { layout: Layout::Paged, blocks, block_tokens, bytes_per_block, optional: false }
    }
}

/// What the blocks of a cache group hold, and so which of them the next query reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Something of every position, all of which is read: K and V, or the latent vector they are made of.
    Paged,
    /// K and V of layers that look back: a query at position `p` reads positions `p - tokens + 1 ..= p`.
    Window { tokens: u32 },
    /// The state of recurrent layers behind the last position that the block has. A step reads the last one and writes the
    /// next over it, but for rows that may be taken back: each of those writes a block of its own. It is of use only as a whole.
    State,
}

impl Layout {
    /// Positions that a query reads, its own included; `None`: all.
    pub fn reach(self) -> Option<u32> {
        match self {
            Self::Paged => None,
            Self::Window { tokens } => Some(tokens),
            Self::State => Some(2),
        }
    }
}

/// A cache group: layers whose KV has one layout, and their pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    pub layout: Layout,
    pub blocks: u32,
    /// Tokens per block, a multiple of group 0's.
    pub block_tokens: u32,
    /// For accounting only.
    pub bytes_per_block: u64,
    /// Nothing depends on it (a drafter's KV): no hit needs it, and who gets no block of it goes on without.
    pub optional: bool,
}

impl GroupConfig {
    /// Layers that look back `tokens` positions.
    pub fn window(tokens: u32, blocks: u32, block_tokens: u32, bytes_per_block: u64) -> Self {
        Self { layout: Layout::Window { tokens }, blocks, block_tokens, bytes_per_block, optional: false }
    }

    /// Blocks of a table for `positions`, the last `tentative` of which may be taken back.
    pub fn blocks_of(&self, positions: u32, tentative: u32) -> u32 {
        let apart = if self.layout == Layout::State { tentative.min(positions) } else { 0 };
        (positions - apart).div_ceil(self.block_tokens) + apart
    }

    /// Of a sequence with `computed` positions, the first block that its next query reads or writes: everything before it is
    /// released.
    pub fn first_block(&self, computed: u32) -> u32 {
        match self.layout.reach() {
            None => 0,
            Some(tokens) => (computed + 1).saturating_sub(tokens) / self.block_tokens,
        }
    }

    /// Most blocks a sequence holds at once when at most `chunk` positions are computed in a step, of which `tentative` may be
    /// taken back, however what it reads lies on the blocks.
    pub fn blocks_max(&self, chunk: u32, tentative: u32) -> u32 {
        let Some(tokens) = self.layout.reach() else { return u32::MAX };
        let apart = if self.layout == Layout::State { tentative } else { 0 };
        // `tokens - 1` positions before the chunk and the chunk itself, starting anywhere in a block.
        let positions = u64::from(tokens - 1) + u64::from(chunk) + u64::from(self.block_tokens - 1);
        u32::try_from(positions.div_ceil(self.block_tokens.into())).unwrap_or(u32::MAX).saturating_add(apart)
    }

    /// Whether the first `tokens` positions of a block that has `filled` can be copied.
    pub(crate) fn is_divisible(&self, tokens: u32, filled: u32) -> bool {
        self.layout != Layout::State || tokens == filled
    }
}

/// A pool cannot give what was asked for; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are not enough KV blocks")]
pub struct OutOfBlocks;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_is_ever_in_what_is_printed() {
        let secret: [u8; 32] = std::array::from_fn(|at| 201 + at as u8);
        let identity = |tenant, tenant_secret| Identity {
            tenant: TenantId(tenant),
            tenant_secret,
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        };
        let (owner, reader) = (identity(7, &secret), identity(8, &[5; 32]));
        let tokens: Vec<u32> = (0..8).collect();
        let root = Root::derive(&reader).below(&Root::derive(&owner), &tokens, 4);
        let declared = root.declared.expect("two blocks are shared");
        let printed = format!("{owner:?} {reader:?} {root:?} {root:#?}");
        for key in [secret, root.key.0, declared.key.0, Root::derive(&owner).key.0] {
            let bytes = key.map(|byte| byte.to_string()).join(", ");
            let hex = key.map(|byte| format!("{byte:02x}")).join("");
            for form in [&bytes[..16], &hex[..8]] {
                assert!(!printed.contains(form), "{printed}");
            }
        }
        assert!(printed.contains("TenantId(8)"), "{printed}");
    }
}
