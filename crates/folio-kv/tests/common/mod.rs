//! Shared by the integration tests: roots, a second policy, and where the test data lies.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use folio_kv::{
    BlockCopy, BlockHashes, BlockId, BlockMeta, BlockTable, CacheConfig, EvictionPolicy, GroupConfig,
    Identity, KeepRefused, KvCache, Lookup, LruLeafFirst, PrefixInfo, Retention, Root, TenantId,
};

pub fn root(tenant: u32) -> Root {
    let secret = [tenant as u8 + 1; 32];
    Root::derive(&Identity {
        tenant: TenantId(tenant),
        tenant_secret: &secret,
        model_digest: &[7; 32],
        layout_digest: &[9; 32],
        extra: &[],
    })
}

pub fn config(blocks: u32, block_tokens: u32) -> CacheConfig {
    CacheConfig { blocks, block_tokens, bytes_per_block: 1024 }
}

pub fn cache(blocks: u32, block_tokens: u32) -> KvCache {
    KvCache::new(config(blocks, block_tokens), Box::new(LruLeafFirst::new()))
}

/// With a window group for each (blocks, window).
pub fn windowed(blocks: u32, block_tokens: u32, windows: &[(u32, u32)]) -> KvCache {
    let windows: Vec<GroupConfig> =
        windows.iter().map(|(blocks, tokens)| sized_window(*blocks, *tokens, block_tokens)).collect();
    KvCache::with_groups(config(blocks, block_tokens), &windows, Box::new(LruLeafFirst::new()))
}

/// Of blocks of four tokens.
pub fn window(blocks: u32, window_tokens: u32) -> GroupConfig {
    sized_window(blocks, window_tokens, 4)
}

pub fn sized_window(blocks: u32, tokens: u32, block_tokens: u32) -> GroupConfig {
    GroupConfig::window(tokens, blocks, block_tokens, 256)
}

/// The operations as a test wants them: with a root, hashed here and now, and where nothing is refused.
pub trait ByRoot {
    fn hashes_at(&self, root: &Root, tokens: &[u32]) -> BlockHashes;
    fn attach_at(&mut self, root: &Root, tokens: &[u32], max_tokens: u32) -> (BlockTable, Vec<BlockCopy>);
    fn lookup_at(&self, root: &Root, tokens: &[u32]) -> Lookup;
    /// Cached tokens that `attach` would find, given one available block for the tail.
    fn probe_at(&self, root: &Root, tokens: &[u32]) -> u32;
    fn keep_at(
        &mut self,
        root: &Root,
        tokens: &[u32],
        retention: Retention,
        pin: bool,
        spare: u32,
    ) -> Result<PrefixInfo, KeepRefused>;
    fn committed(&mut self, table: &mut BlockTable, tokens: &[u32], computed: u32);
}

impl ByRoot for KvCache {
    fn hashes_at(&self, root: &Root, tokens: &[u32]) -> BlockHashes {
        BlockHashes::new(root, tokens, self.config().block_tokens)
    }

    fn attach_at(&mut self, root: &Root, tokens: &[u32], max_tokens: u32) -> (BlockTable, Vec<BlockCopy>) {
        let mut copies = Vec::new();
        let hashes = self.hashes_at(root, tokens);
        let table = self.attach(hashes, tokens, max_tokens, &mut copies);
        (table, copies)
    }

    fn lookup_at(&self, root: &Root, tokens: &[u32]) -> Lookup {
        self.lookup(&self.hashes_at(root, tokens), tokens)
    }

    fn probe_at(&self, root: &Root, tokens: &[u32]) -> u32 {
        let found = self.lookup_at(root, tokens);
        found.full_blocks * self.config().block_tokens + found.tail_tokens
    }

    fn keep_at(
        &mut self,
        root: &Root,
        tokens: &[u32],
        retention: Retention,
        pin: bool,
        spare: u32,
    ) -> Result<PrefixInfo, KeepRefused> {
        self.keep_cached(&self.hashes_at(root, tokens), tokens.len() as u32, retention, pin, spare)
    }

    fn committed(&mut self, table: &mut BlockTable, tokens: &[u32], computed: u32) {
        self.commit(table, tokens, computed).expect("what was grown can be committed");
    }
}

/// Computes a whole sequence at once and gives it back; returns the cached tokens.
pub fn serve(cache: &mut KvCache, root: &Root, tokens: &[u32]) -> u32 {
    let (mut table, _) = cache.attach_at(root, tokens, tokens.len() as u32);
    let cached = table.computed();
    cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("the pool is large enough");
    cache.committed(&mut table, tokens, tokens.len() as u32);
    cache.release(table, tokens);
    cached
}

/// First in, first out among the leaves: a second user of the policy seam, with bookkeeping unlike LRU's.
#[derive(Default)]
pub struct Fifo {
    clock: u64,
    /// When each block was inserted, or `None`.
    inserted: Vec<Option<u64>>,
    freed: Vec<bool>,
    /// Freed leaves by age.
    candidates: BTreeMap<u64, BlockId>,
}

impl Fifo {
    fn age(&self, block: BlockId) -> u64 {
        self.inserted[block.0 as usize].expect("on_insert comes first")
    }
}

impl EvictionPolicy for Fifo {
    fn resize(&mut self, blocks: u32) {
        self.inserted = vec![None; blocks as usize];
        self.freed = vec![false; blocks as usize];
    }

    fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        assert!(self.inserted[block.0 as usize].replace(self.clock).is_none(), "inserted twice");
        assert_eq!(meta.hits, 0);
        self.clock += 1;
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        assert!(!std::mem::replace(&mut self.freed[block.0 as usize], true), "freed twice");
        if meta.children == 0 {
            self.candidates.insert(self.age(block), block);
        }
    }

    fn on_use(&mut self, block: BlockId, _meta: &BlockMeta) {
        assert!(std::mem::replace(&mut self.freed[block.0 as usize], false), "used and never freed");
        self.candidates.remove(&self.age(block));
    }

    fn on_leaf(&mut self, block: BlockId, meta: &BlockMeta) {
        assert_eq!(meta.children, 0);
        if self.freed[block.0 as usize] {
            self.candidates.insert(self.age(block), block);
        }
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.on_use(block, meta);
        self.inserted[block.0 as usize] = None;
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.candidates.first_key_value().map(|(_, &block)| block)
    }
}

/// A file of the test data, or a loud `None`.
pub fn data(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("FOLIO_TEST_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    let file = root.join(path);
    if file.exists() {
        return Some(file);
    }
    // Past the test runner, which shows what a passing test prints to nobody.
    let why = "is absent; set FOLIO_TEST_DATA to the folder of test data";
    let _ = writeln!(std::io::stderr(), "SKIPPED: {} {why}", file.display());
    None
}
