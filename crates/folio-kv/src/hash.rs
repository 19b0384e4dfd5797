//! Identity of content: roots and chained block hashes.
//!
//! Owns: the exact bytes that are hashed. They are part of every stored format: a change here is a change of the
//! numerics version in the layout digest. Must never: hash anything a request body controls except token ids, and digests of what
//! stands in the places of some.
//!
//! `root  = H(root_key,  model digest, layout digest, extra)`, every field prefixed by its length (u64 LE)
//! `block = H(block_key, parent hash, token ids as u32 LE, ranges)`
//!
//! `ranges`: of each range of placeholders that the block has some of, in order, its content's digest, and as u32 LE where in the block
//! those begin, at which of the range's, and how many there are. Blocks of one root have one number of tokens, so a block with ranges is as
//! long as none without.
//!
//! `below = H(block_key, hash of the declared prefix's last block)`, the root of a tenant's blocks behind a prefix that an operator
//! declared to be shared; the declared blocks have the hashes of the tenant that they were computed for.
//!
//! `H` is keyed BLAKE3. Both keys are derived from the tenant's secret under different contexts, so a root can never
//! equal a block hash, and nobody without the secret can compute, guess or probe for another tenant's hashes. A tenant's id is not
//! hashed: it is a number of this process, and stored content outlives that.

use std::ops::Range;
use std::sync::Arc;

use crate::types::{BlockHash, ContentRange, Declared, Identity, Root, SecretKey, TenantId, TierId};

const ROOT_CONTEXT: &str = "folio-kv 2026 root key v1";
const BLOCK_CONTEXT: &str = "folio-kv 2026 block key v1";
const POSITIONS_CONTEXT: &str = "folio-kv 2026 positions v1";
const DATA_CONTEXT: &str = "folio-kv 2026 data key v1";
/// Blocks of up to this many tokens are hashed from the stack in one call.
const STACK_TOKENS: usize = 64;

impl ContentRange {
    /// `len` placeholders from `start` on, at least one, for something with this digest. `positions`: where each stands on three axes, unless
    /// that is where text would; they are part of what it is. O(positions).
    pub fn new(start: u32, len: u32, content: [u8; 32], positions: Option<&[[u32; 3]]>) -> Self {
        let Some(positions) = positions else { return Self { start, len, content } };
        let mut hasher = blake3::Hasher::new_derive_key(POSITIONS_CONTEXT);
        hasher.update(&content);
        for position in positions.as_flattened() {
            hasher.update(&position.to_le_bytes());
        }
        Self { start, len, content: *hasher.finalize().as_bytes() }
    }
}

impl Root {
    /// Start of the hash chain of everything that depends on `identity` and a token sequence.
    pub fn derive(identity: &Identity<'_>) -> Root {
        let mut hasher = blake3::Hasher::new_keyed(&blake3::derive_key(ROOT_CONTEXT, identity.tenant_secret));
        for field in [&identity.model_digest[..], identity.layout_digest, identity.extra] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        Root {
            tenant: identity.tenant,
            hash: BlockHash(*hasher.finalize().as_bytes()),
            key: SecretKey(blake3::derive_key(BLOCK_CONTEXT, identity.tenant_secret)),
            declared: None,
        }
    }

    /// This root for sequences that begin with `tokens`, a prefix an operator declared to be shared, of which `owner` computes
    /// the whole blocks. Those are found, and only ever read, by whoever has such a root; what stands behind them hangs on a
    /// root of this tenant's key, so nobody else reaches it. Of less than one block nothing is shared.
    pub fn below(&self, owner: &Root, tokens: &[u32], block_tokens: u32) -> Root {
        let chunks = tokens.chunks_exact(block_tokens as usize);
        let blocks = chunks.len() as u32;
        let last = chunks.fold(owner.hash, |hash, chunk| owner.chain(&hash, chunk));
        let boundary = self.chain(&last, &[]);
        let declared = Declared { tenant: owner.tenant, hash: owner.hash, key: owner.key, blocks, boundary };
        Root { declared: (blocks > 0).then_some(declared), ..*self }
    }

    /// What the tenant's blocks are sealed with outside the process.
    pub fn data_key(&self) -> [u8; 32] {
        blake3::derive_key(DATA_CONTEXT, &self.key.0)
    }

    /// The same from the tenant's secret alone: it is one key for all of its models.
    pub fn data_key_of(tenant_secret: &[u8; 32]) -> [u8; 32] {
        blake3::derive_key(DATA_CONTEXT, &blake3::derive_key(BLOCK_CONTEXT, tenant_secret))
    }

    /// The same without anything shared.
    pub fn own(&self) -> Root {
        Root { declared: None, ..*self }
    }

    /// Leading blocks that are shared.
    pub fn declared_blocks(&self) -> u32 {
        self.declared.map_or(0, |declared| declared.blocks)
    }

    /// Where block `index` hangs on a root and not on the block before it.
    pub(crate) fn base(&self, index: u32) -> Option<BlockHash> {
        match self.declared {
            Some(declared) if index == 0 => Some(declared.hash),
            Some(declared) => (index == declared.blocks).then_some(declared.boundary),
            None => (index == 0).then_some(self.hash),
        }
    }

    /// Whose block `index` is.
    pub(crate) fn owner(&self, index: u32) -> TenantId {
        self.declared
            .filter(|declared| index < declared.blocks)
            .map_or(self.tenant, |declared| declared.tenant)
    }

    /// Hash of block `index`, which holds `tokens`; `parent`: that of the block before, where there is one. `ranges`: those of the
    /// sequence.
    pub(crate) fn chain_at(
        &self,
        index: u32,
        parent: &BlockHash,
        tokens: &[u32],
        ranges: &[ContentRange],
    ) -> BlockHash {
        let parent = self.base(index).unwrap_or(*parent);
        let root = match self.declared.filter(|declared| index < declared.blocks) {
            Some(declared) => Root { key: declared.key, declared: None, ..*self },
            None => *self,
        };
        let size = tokens.len() as u32;
        let (first, end) = (index * size, (index + 1) * size);
        match overlapping(ranges, first, end) {
            [] => root.chain(&parent, tokens),
            ranges => root.chain_with(&parent, tokens, first, ranges),
        }
    }

    /// [`Root::chain`] of a block of any length, whose first position is `first`, and which has placeholders of each of `ranges`.
    fn chain_with(
        &self,
        parent: &BlockHash,
        tokens: &[u32],
        first: u32,
        ranges: &[ContentRange],
    ) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key.0);
        hasher.update(&parent.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        for range in ranges {
            let from = range.start.max(first);
            let to = range.end().min(first + tokens.len() as u32);
            hasher.update(&range.content);
            for number in [from - first, from - range.start, to - from] {
                hasher.update(&number.to_le_bytes());
            }
        }
        BlockHash(*hasher.finalize().as_bytes())
    }

    /// Hash of the block that holds `tokens` after everything `parent` stands for.
    pub(crate) fn chain(&self, parent: &BlockHash, tokens: &[u32]) -> BlockHash {
        if tokens.len() > STACK_TOKENS {
            return self.chain_with(parent, tokens, 0, &[]);
        }
        let mut bytes = [0u8; 32 + 4 * STACK_TOKENS];
        bytes[..32].copy_from_slice(&parent.0);
        for (slot, token) in bytes[32..].chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        BlockHash(*blake3::keyed_hash(&self.key.0, &bytes[..32 + 4 * tokens.len()]).as_bytes())
    }
}

/// Those of `ranges`, which are in order, that have positions in `first .. end`.
fn overlapping(ranges: &[ContentRange], first: u32, end: u32) -> &[ContentRange] {
    let from = ranges.partition_point(|range| range.end() <= first);
    let to = ranges.partition_point(|range| range.start < end);
    &ranges[from..to.max(from)]
}

/// What identifies the full blocks of one sequence: their hashes under its root, and where an operator shares the beginning,
/// also under that root without. Made where a prompt is read, never on the engine's thread; what is generated is hashed when it
/// is committed. A clone shares the prompt's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockHashes {
    root: Arc<Root>,
    block_tokens: u32,
    own: Chain,
    /// Empty where nothing is shared.
    declared: Chain,
    /// Which of the two they are: as if nothing were shared where that is of no use.
    is_declared: bool,
    /// Placeholders among the tokens, in order and apart from each other.
    ranges: Arc<[ContentRange]>,
    /// Which blocks each tier had when the prompt was read, or was given since, in order and apart from each other.
    stored: Arc<[Vec<Range<u32>>]>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chain {
    prompt: Arc<[BlockHash]>,
    generated: Vec<BlockHash>,
}

impl Chain {
    fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    pub fn get(&self, index: usize) -> Option<&BlockHash> {
        match index.checked_sub(self.prompt.len()) {
            None => self.prompt.get(index),
            Some(index) => self.generated.get(index),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &BlockHash> {
        self.prompt.iter().chain(&self.generated)
    }

    /// Hashes the full blocks of `tokens` that come after those it has.
    fn extend(&mut self, root: &Root, tokens: &[u32], block_tokens: u32, ranges: &[ContentRange]) {
        for (index, chunk) in tokens.chunks_exact(block_tokens as usize).enumerate().skip(self.len()) {
            let parent = index.checked_sub(1).and_then(|last| self.get(last)).unwrap_or(&root.hash);
            let hash = root.chain_at(index as u32, parent, chunk, ranges);
            self.generated.push(hash);
        }
    }

    fn of_prompt(root: &Root, tokens: &[u32], block_tokens: u32, ranges: &[ContentRange]) -> Self {
        let mut chain = Self::default();
        chain.extend(root, tokens, block_tokens, ranges);
        Self { prompt: chain.generated.into(), generated: Vec::new() }
    }
}

impl BlockHashes {
    /// Of the full blocks of `tokens`, those that an operator declared first. O(tokens), once for a root that shares nothing, else twice.
    pub fn new(root: &Root, tokens: &[u32], block_tokens: u32) -> Self {
        Self::with_ranges(root, tokens, block_tokens, Arc::default())
    }

    /// The same of tokens some of which are placeholders: `ranges`, in order and apart from each other. A prefix that an operator declared
    /// is text: behind a placeholder in its place nothing is shared.
    pub fn with_ranges(root: &Root, tokens: &[u32], block_tokens: u32, ranges: Arc<[ContentRange]>) -> Self {
        let is_text = ranges.first().is_none_or(|range| range.start >= root.declared_blocks() * block_tokens);
        let root = if is_text { *root } else { root.own() };
        let of = |root: &Root| Chain::of_prompt(root, tokens, block_tokens, &ranges);
        let declared = if root.declared.is_some() { of(&root) } else { Chain::default() };
        let (own, stored) = (of(&root.own()), Arc::new([]));
        let is_declared = root.declared.is_some();
        Self { root: Arc::new(root), block_tokens, own, declared, is_declared, ranges, stored }
    }

    /// Placeholders among the tokens, in order.
    pub fn ranges(&self) -> &[ContentRange] {
        &self.ranges
    }

    /// The first placeholder in positions `first .. end`.
    pub(crate) fn first_placeholder(&self, first: u32, end: u32) -> Option<u32> {
        overlapping(&self.ranges, first, end).first().map(|range| range.start.max(first))
    }

    /// With what each tier has of them, the nearest tier first: ranges of blocks, in order and apart from each other, each of which can
    /// be loaded up to its end.
    pub fn with_stored(self, stored: Vec<Vec<Range<u32>>>) -> Self {
        Self { stored: stored.into(), ..self }
    }

    /// Blocks of what a tier has that begin at `block` or before, and their end.
    pub fn stored_from(&self, tier: TierId, block: u32) -> Option<u32> {
        let stored = self.stored.get(usize::from(tier.0))?;
        let at = stored.partition_point(|range| range.end <= block);
        stored.get(at).filter(|range| range.start <= block).map(|range| range.end)
    }

    /// Whether any tier has any of them.
    pub fn is_stored(&self) -> bool {
        self.stored.iter().any(|ranges| !ranges.is_empty())
    }

    /// A tier was given `blocks`, too, and can load them up to their end.
    pub fn add_stored(&mut self, tier: TierId, mut blocks: Range<u32>) {
        let (mut stored, tier) = (self.stored.to_vec(), usize::from(tier.0));
        stored.resize(stored.len().max(tier + 1), Vec::new());
        stored[tier].retain(|had| {
            let apart = had.end < blocks.start || blocks.end < had.start;
            if !apart {
                blocks = blocks.start.min(had.start)..blocks.end.max(had.end);
            }
            apart
        });
        let at = stored[tier].partition_point(|had| had.end < blocks.start);
        stored[tier].insert(at, blocks);
        self.stored = stored.into();
    }

    /// The root that they were made for.
    pub fn root(&self) -> &Root {
        &self.root
    }

    /// The root that they hang on: without what is shared where they do not begin with it.
    pub fn chain_root(&self) -> Root {
        if self.is_declared { *self.root } else { self.root.own() }
    }

    /// Leading blocks that are shared: all that an operator declared, or none.
    pub fn declared_blocks(&self) -> u32 {
        if self.is_declared { self.root.declared_blocks() } else { 0 }
    }

    /// Whether they begin with what an operator declared, where there is such.
    pub fn set_declared(&mut self, declared: bool) {
        self.is_declared = declared;
    }

    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks that are hashed.
    pub fn len(&self) -> u32 {
        self.own.len() as u32
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = &BlockHash> {
        self.chain(self.is_declared).iter()
    }

    pub fn get(&self, index: u32) -> Option<&BlockHash> {
        self.chain(self.is_declared).get(index as usize)
    }

    /// The hashes, with the blocks that an operator declared or as if nothing were shared.
    pub(crate) fn chain(&self, declared: bool) -> &Chain {
        if declared && self.root.declared.is_some() { &self.declared } else { &self.own }
    }

    /// Sets memory aside, so that hashing so many positions in all allocates nothing.
    pub(crate) fn reserve(&mut self, positions: u32) {
        let blocks = (positions / self.block_tokens) as usize;
        for chain in [&mut self.own, &mut self.declared] {
            let more = blocks.saturating_sub(chain.len());
            if chain.len() > 0 || self.root.declared.is_none() {
                chain.generated.reserve_exact(more);
            }
        }
    }

    /// Hashes what became full. `tokens`: all there are, of which the first are those that are hashed.
    pub fn extend(&mut self, tokens: &[u32]) {
        let (root, size) = (&*self.root, self.block_tokens);
        if self.own.len() == tokens.len() / size as usize {
            return;
        }
        self.own.extend(&root.own(), tokens, size, &self.ranges);
        if root.declared.is_some() {
            self.declared.extend(root, tokens, size, &self.ranges);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::TenantId;

    fn secret() -> [u8; 32] {
        std::array::from_fn(|i| i as u8)
    }

    fn identity<'a>(secret: &'a [u8; 32]) -> Identity<'a> {
        Identity {
            tenant: TenantId(7),
            tenant_secret: secret,
            model_digest: &[0x11; 32],
            layout_digest: &[0x22; 32],
            extra: b"adapter",
        }
    }

    fn hex(hash: &BlockHash) -> String {
        hash.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Computed with the Python package `blake3` from the formulas in the module documentation.
    #[test]
    fn hashes_equal_independent_vectors() {
        let root = Root::derive(&identity(&secret()));
        assert_eq!(hex(&root.hash), "e9c350ca713ed0423e16cf6945dfc6d4c974694384266a416615db1f030d7932");
        let first: Vec<u32> = (0..16).collect();
        let first = root.chain(&root.hash, &first);
        assert_eq!(hex(&first), "50a2024bd70ff90d84ae7cd9cae14257151cfd26799678682d9d43f54985b618");
        let second: Vec<u32> = (0..16).map(|i| u32::MAX - i).collect();
        let second = root.chain(&first, &second);
        assert_eq!(hex(&second), "eaaff0a23bab2f8201649237c5b71443e6a0d1af575eb4642afc00a7ad8ac0e3");
        let long: Vec<u32> = (0..100).collect();
        let long = root.chain(&root.hash, &long);
        assert_eq!(
            hex(&BlockHash(root.data_key())),
            "35840a162001f74daaf637fc1900e3c19abd25a77cae5c7cee7ae02ff43e307d"
        );
        assert_eq!(root.data_key(), Root::data_key_of(&secret()), "it hangs on the secret alone");
        assert_eq!(hex(&long), "de324f19f65f1867c9bbfdc1effc68ed2b85b36acb7e63aee766942132d917a5");
    }

    #[test]
    fn behind_what_is_shared_everybody_has_hashes_of_their_own() {
        let root = |tenant: u8| {
            let secret = [tenant; 32];
            Root::derive(&Identity { tenant: TenantId(tenant.into()), ..identity(&secret) })
        };
        let (owner, one, two) = (root(9), root(1), root(2));
        let tokens: Vec<u32> = (0..40).collect();
        let hashes = |root: Root| BlockHashes::new(&root, &tokens, 4).iter().copied().collect::<Vec<_>>();
        let (a, b) = (one.below(&owner, &tokens[..18], 4), two.below(&owner, &tokens[..18], 4));
        assert_eq!((a.declared_blocks(), a.owner(3), a.owner(4)), (4, owner.tenant, one.tenant));
        assert_eq!(hashes(a)[..4], hashes(owner)[..4], "the declared part is the owner's");
        assert_eq!(hashes(a)[..4], hashes(b)[..4]);
        let all: std::collections::BTreeSet<BlockHash> =
            [hashes(a)[4..].to_vec(), hashes(b)[4..].to_vec(), hashes(owner), hashes(one), hashes(two)]
                .concat()
                .into_iter()
                .collect();
        assert_eq!(all.len(), 6 + 6 + 30, "and nothing else is anybody's but one's");
        assert_eq!(one.below(&owner, &tokens[..3], 4), one, "less than a block");
        assert_eq!(a.own(), one);
        let mut grown = BlockHashes::new(&a, &tokens[..9], 4);
        (10..=40).for_each(|known| grown.extend(&tokens[..known]));
        let whole = BlockHashes::new(&a, &tokens, 4);
        for declared in [false, true] {
            let [grown, whole] = [&grown, &whole].map(|hashes| hashes.chain(declared));
            assert!(grown.iter().eq(whole.iter()), "hashed at once or as it is generated");
        }
        let other = one.below(&owner, &tokens[..8], 4);
        assert_ne!(hashes(other)[4..], hashes(a)[4..], "another prefix is another boundary");
    }

    #[test]
    fn ranges_of_placeholders_are_part_of_the_blocks_that_they_reach_into() {
        let root = Root::derive(&identity(&secret()));
        let tokens: Vec<u32> = (0..20).collect();
        let hashes = |ranges: &[ContentRange]| {
            let hashes = BlockHashes::with_ranges(&root, &tokens, 4, ranges.into());
            let mut grown = BlockHashes::with_ranges(&root, &tokens[..11], 4, ranges.into());
            (12..=20).for_each(|known| grown.extend(&tokens[..known]));
            assert!(grown.iter().eq(hashes.iter()), "hashed at once or as it is generated");
            hashes.iter().copied().collect::<Vec<_>>()
        };
        let range = |start, len, content| ContentRange { start, len, content: [content; 32] };
        let text = hashes(&[]);
        assert_eq!(text, BlockHashes::new(&root, &tokens, 4).iter().copied().collect::<Vec<_>>());
        let image = hashes(&[range(6, 5, 1)]);
        assert_eq!(image[0], text[0], "before it");
        let mut bytes = text[0].0.to_vec();
        bytes.extend((4u32..8).flat_map(u32::to_le_bytes));
        bytes.extend([1; 32]);
        bytes.extend([2u32, 0, 2].into_iter().flat_map(u32::to_le_bytes));
        assert_eq!(image[1].0, *blake3::keyed_hash(&root.key.0, &bytes).as_bytes());
        let mut bytes = image[1].0.to_vec();
        bytes.extend((8u32..12).flat_map(u32::to_le_bytes));
        bytes.extend([1; 32]);
        bytes.extend([0u32, 2, 3].into_iter().flat_map(u32::to_le_bytes));
        assert_eq!(image[2].0, *blake3::keyed_hash(&root.key.0, &bytes).as_bytes());
        assert_eq!(image[3], root.chain(&image[2], &tokens[12..16]), "behind it the chain alone says so");
        let others = [
            hashes(&[range(6, 5, 2)]),
            hashes(&[range(6, 4, 1)]),
            hashes(&[range(5, 6, 1)]),
            hashes(&[range(6, 2, 1), range(8, 3, 1)]),
            text,
        ];
        for other in others {
            assert!(other[2..].iter().zip(&image[2..]).all(|(other, image)| other != image));
        }
        assert_eq!(
            hashes(&[range(6, 5, 1), range(16, 1, 9)])[..4],
            image[..4],
            "what is behind changes nothing"
        );
    }

    #[test]
    fn where_an_image_stands_is_part_of_what_it_is() {
        let of = |positions: &[[u32; 3]]| ContentRange::new(3, 2, [1; 32], Some(positions));
        assert_eq!(ContentRange::new(3, 2, [1; 32], None).content, [1; 32]);
        let grids = [of(&[[3; 3], [3, 3, 4]]), of(&[[3; 3], [3, 4, 3]]), of(&[[3; 3], [4, 4, 4]])];
        assert!(grids.iter().all(|grid| (grid.start, grid.len) == (3, 2) && grid.content != [1; 32]));
        assert!(grids[0] != grids[1] && grids[1] != grids[2] && grids[0] != grids[2]);
        assert_ne!(of(&[[3; 3]]), ContentRange::new(3, 2, [2; 32], Some(&[[3; 3]])));
    }

    #[test]
    fn what_an_operator_declared_is_text() {
        let root = |tenant: u8| {
            Root::derive(&Identity { tenant: TenantId(tenant.into()), ..identity(&[tenant; 32]) })
        };
        let tokens: Vec<u32> = (0..16).collect();
        let below = root(1).below(&root(9), &tokens[..8], 4);
        let of = |start| {
            let range = ContentRange { start, len: 2, content: [5; 32] };
            BlockHashes::with_ranges(&below, &tokens, 4, [range].into())
        };
        assert_eq!(of(7).root(), &below.own());
        assert_eq!(of(8).root(), &below);
        assert_eq!(of(8).get(1), BlockHashes::new(&below, &tokens, 4).get(1));
        assert_ne!(of(8).get(2), BlockHashes::new(&below, &tokens, 4).get(2));
    }

    #[test]
    fn what_is_stored_is_told_from_where_it_is_asked_for() {
        let root = Root::derive(&identity(&secret()));
        let hashes = BlockHashes::new(&root, &[1; 64], 4);
        let (near, far) = (TierId(0), TierId(1));
        assert_eq!(hashes.stored_from(near, 0), None);
        let hashes = hashes.with_stored(vec![vec![2..5, 8..9], vec![Range { start: 0, end: 9 }]]);
        assert_eq!((hashes.stored_from(near, 0), hashes.stored_from(far, 0)), (None, Some(9)));
        assert_eq!(hashes.stored_from(TierId(2), 0), None, "there is no such tier");
        let from: Vec<Option<u32>> = (0..10).map(|block| hashes.stored_from(near, block)).collect();
        assert_eq!(from[..5], [None, None, Some(5), Some(5), Some(5)]);
        assert_eq!(from[5..], [None, None, None, Some(9), None]);
    }

    #[test]
    fn one_call_and_streamed_hashing_agree_at_the_border() {
        let root = Root::derive(&identity(&secret()));
        let tokens: Vec<u32> = (0..STACK_TOKENS as u32).collect();
        let mut bytes = root.hash.0.to_vec();
        bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
        assert_eq!(root.chain(&root.hash, &tokens).0, *blake3::keyed_hash(&root.key.0, &bytes).as_bytes());
        bytes.extend(99u32.to_le_bytes());
        let longer: Vec<u32> = tokens.iter().copied().chain([99]).collect();
        assert_eq!(root.chain(&root.hash, &longer).0, *blake3::keyed_hash(&root.key.0, &bytes).as_bytes());
    }

    #[test]
    fn every_part_of_the_identity_changes_the_root_and_its_chain() {
        let (secret, other_secret) = (secret(), [5; 32]);
        let base = identity(&secret);
        let renumbered = Root::derive(&Identity { tenant: TenantId(8), ..base });
        assert_eq!(renumbered.hash, Root::derive(&base).hash, "what is stored outlives a tenant's number");
        let mut roots: Vec<Root> = [
            base,
            Identity { tenant_secret: &other_secret, ..base },
            Identity { model_digest: &[0x12; 32], ..base },
            Identity { layout_digest: &[0x23; 32], ..base },
            Identity { extra: b"adapte", ..base },
            Identity { extra: b"", ..base },
        ]
        .iter()
        .map(Root::derive)
        .collect();
        roots.dedup();
        let mut seen: Vec<BlockHash> =
            roots.iter().flat_map(|r| [r.hash, r.chain(&r.hash, &[1, 2, 3])]).collect();
        assert_eq!(seen.len(), 12);
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 12);
    }

    #[test]
    fn what_a_tier_is_given_joins_what_it_had() {
        let secret = secret();
        let mut hashes = BlockHashes::new(&Root::derive(&identity(&secret)), &[7; 64], 4);
        let from = |hashes: &BlockHashes, tier, block| hashes.stored_from(TierId(tier), block);
        hashes.add_stored(TierId(1), 4..8);
        assert_eq!([from(&hashes, 1, 4), from(&hashes, 1, 3), from(&hashes, 0, 4)], [Some(8), None, None]);
        hashes.add_stored(TierId(1), 0..2);
        hashes.add_stored(TierId(1), 10..12);
        assert_eq!(
            [0, 1, 2, 5, 9, 11].map(|at| from(&hashes, 1, at)),
            [Some(2), Some(2), None, Some(8), None, Some(12)]
        );
        hashes.add_stored(TierId(1), 0..10);
        assert_eq!([0, 11].map(|at| from(&hashes, 1, at)), [Some(12); 2], "what meets is one");
        hashes.add_stored(TierId(1), 3..5);
        assert_eq!(from(&hashes, 1, 0), Some(12), "and stays it");
    }
}
