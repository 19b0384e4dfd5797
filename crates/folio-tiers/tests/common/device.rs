//! Memory of a device that is no device, prompts, and what an engine orders of them.

use std::sync::{Arc, Mutex};

use folio_engine::{LoadOrder, Micros, StoreOrder};
use folio_kv::{
    BlockHashes, BlockId, Content, GroupConfig, Identity, Layout, Lease, Lineage, Root, TenantId, Ticket,
    TierId,
};
use folio_model::backend::BlockMemory;
use folio_tiers::Device;

pub const BLOCK_TOKENS: u32 = 4;
pub const BLOCK_BYTES: usize = 600;

pub struct Memory(Vec<Mutex<Vec<Vec<u8>>>>);

impl BlockMemory for Memory {
    fn block_bytes(&self, group: usize) -> usize {
        BLOCK_BYTES + 8 * group
    }

    fn read(&self, group: usize, block: u32, into: &mut [u8]) {
        into.copy_from_slice(&self.0[group].lock().unwrap()[block as usize]);
    }

    fn write(&self, group: usize, block: u32, from: &[u8]) {
        self.0[group].lock().unwrap()[block as usize].copy_from_slice(from);
    }
}

/// A device with so many blocks in each group: the first keeps all, the others windows of so many tokens.
pub fn device(blocks: u32, windows: &[u32]) -> Device {
    let all = GroupConfig {
        layout: Layout::Paged,
        blocks,
        block_tokens: BLOCK_TOKENS,
        bytes_per_block: BLOCK_BYTES as u64,
        optional: false,
    };
    let windows = windows.iter().zip(1..).map(|(tokens, group)| {
        GroupConfig::window(*tokens, blocks, BLOCK_TOKENS, (BLOCK_BYTES + 8 * group) as u64)
    });
    let groups: Vec<GroupConfig> = std::iter::once(all).chain(windows).collect();
    let pool = |group| Mutex::new(vec![vec![0; BLOCK_BYTES + 8 * group]; blocks as usize]);
    Device { memory: Arc::new(Memory((0..groups.len()).map(pool).collect())), groups }
}

pub fn root(tenant: u8) -> Root {
    Root::derive(&Identity {
        tenant: TenantId(tenant.into()),
        tenant_secret: &[tenant; 32],
        model_digest: &[1; 32],
        layout_digest: &[2; 32],
        extra: &[],
    })
}

pub fn prompt(tenant: u8, seed: u32, blocks: u32) -> BlockHashes {
    let tokens: Vec<u32> =
        (0..blocks * BLOCK_TOKENS).map(|at| at.wrapping_mul(2_654_435_761) ^ seed).collect();
    BlockHashes::new(&root(tenant), &tokens, BLOCK_TOKENS)
}

/// What a block holds follows from its hash.
pub fn bytes_of(content: &Content) -> Vec<u8> {
    let seed = u64::from_le_bytes(content.hash.0[..8].try_into().unwrap());
    super::block(seed + u64::from(content.group), BLOCK_BYTES + 8 * content.group as usize)
}

/// Blocks `from..to` of a prompt, in the device's blocks of the same number, and of windows what the query behind them reads.
pub fn contents(device: &Device, hashes: &BlockHashes, from: u32, to: u32) -> Vec<Content> {
    let content = |group: usize, index: u32| {
        let hash = *hashes.get(index).expect("a block of the prompt");
        Content { group: group as u32, index, block: BlockId(index), hash }
    };
    let mut all: Vec<Content> = (from..to).map(|index| content(0, index)).collect();
    for (group, config) in device.groups.iter().enumerate().skip(1) {
        let first = config.first_block(to * BLOCK_TOKENS);
        all.extend((first..to).map(|index| content(group, index)));
    }
    all
}

/// Puts into memory what it would compute.
pub fn compute(device: &Device, contents: &[Content]) {
    for content in contents {
        device.memory.write(content.group as usize, content.block.0, &bytes_of(content));
    }
}

pub fn store_order(hashes: &BlockHashes, contents: Vec<Content>) -> StoreOrder {
    let lineage = lineage(hashes, &contents);
    let (tier, root) = (TierId(0), *hashes.root());
    StoreOrder { tier, lease: Lease(1), until: Micros(u64::MAX), root, contents, lineage }
}

/// What a cache would say of these: tokens that follow from the block's number.
pub fn lineage(hashes: &BlockHashes, contents: &[Content]) -> Lineage {
    let blocks = || contents.iter().filter(|content| content.group == 0).map(|content| content.index);
    let before = blocks().next().and_then(|first| first.checked_sub(1));
    Lineage {
        parent: before.and_then(|before| hashes.get(before)).copied(),
        tokens: blocks().flat_map(tokens).collect(),
        block_tokens: BLOCK_TOKENS,
        retentions: Vec::new(),
    }
}

pub fn tokens(index: u32) -> [u32; BLOCK_TOKENS as usize] {
    std::array::from_fn(|at| 1000 * index + at as u32)
}

pub fn load_order(hashes: &BlockHashes, contents: Vec<Content>) -> LoadOrder {
    LoadOrder { tier: TierId(0), ticket: Ticket(1), root: *hashes.root(), contents, prefetch: false }
}

/// How many of these blocks hold what they should; the others must be as they were.
pub fn filled(device: &Device, contents: &[Content]) -> usize {
    let is_filled = |content: &&Content| {
        let right = bytes_of(content);
        let mut bytes = vec![0; right.len()];
        device.memory.read(content.group as usize, content.block.0, &mut bytes);
        assert!(
            bytes == right || bytes.iter().all(|byte| *byte == 0),
            "block {} has wrong bytes",
            content.index
        );
        bytes == right
    };
    contents.iter().filter(is_filled).count()
}
