//! Blocks in memory as a backend has them, and prompts whose blocks they are: what is carried in the examples.

use std::sync::{Arc, Mutex};

use folio_engine::{LoadOrder, Micros, StoreOrder};
use folio_kv::{
    BlockHashes, BlockId, CacheConfig, Content, Identity, Lease, Lineage, Root, TenantId, Ticket, TierId,
};
use folio_model::backend::BlockMemory;
use folio_tiers::Device;

const BLOCK_TOKENS: u32 = 16;

/// A pool of blocks.
struct Pool {
    block_bytes: usize,
    blocks: Vec<Mutex<Vec<u8>>>,
}

impl BlockMemory for Pool {
    fn block_bytes(&self, _: usize) -> usize {
        self.block_bytes
    }

    fn read(&self, _: usize, block: u32, into: &mut [u8]) {
        into.copy_from_slice(&self.blocks[block as usize].lock().expect("one thread"));
    }

    fn write(&self, _: usize, block: u32, from: &[u8]) {
        self.blocks[block as usize].lock().expect("one thread").copy_from_slice(from);
    }
}

/// Of so many blocks, and of nobody else.
pub fn prompt(seed: u32, blocks: u32) -> BlockHashes {
    let root = Root::derive(&Identity {
        tenant: TenantId(1),
        tenant_secret: &[1; 32],
        model_digest: &[2; 32],
        layout_digest: &[3; 32],
        extra: &[],
    });
    let tokens: Vec<u32> = (0..blocks * BLOCK_TOKENS).map(|at| at ^ (seed << 20)).collect();
    BlockHashes::new(&root, &tokens, BLOCK_TOKENS)
}

fn contents(hashes: &BlockHashes) -> Vec<Content> {
    let content = |(index, hash): (u32, _)| Content { group: 0, index, block: BlockId(index), hash };
    (0..).zip(hashes.iter().copied()).map(content).collect()
}

/// Memory of so many blocks.
pub fn device(block_bytes: usize, blocks: u32) -> Device {
    let memory = (0..blocks).map(|at| Mutex::new(vec![at as u8 | 1; block_bytes])).collect();
    let config = CacheConfig { blocks, block_tokens: BLOCK_TOKENS, bytes_per_block: block_bytes as u64 };
    Device { memory: Arc::new(Pool { block_bytes, blocks: memory }), groups: vec![config.first_group()] }
}

pub fn store_order(hashes: &BlockHashes) -> StoreOrder {
    let (root, contents, lineage) = (*hashes.root(), contents(hashes), Lineage::default());
    StoreOrder { tier: TierId(0), lease: Lease(1), until: Micros(u64::MAX), root, contents, lineage }
}

pub fn load_order(hashes: &BlockHashes) -> LoadOrder {
    let (root, contents) = (*hashes.root(), contents(hashes));
    LoadOrder { tier: TierId(0), ticket: Ticket(1), root, contents, prefetch: false }
}
