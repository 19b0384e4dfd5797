//! KV *identity*: which block holds what, for whom, and what may be taken next.
#![forbid(unsafe_code)]

mod cache;
mod check;
mod hash;
mod policy;
mod pool;
mod stats;
mod table;
mod tree;
mod types;

pub use cache::{KvCache, Lookup};
pub use check::Violation;
pub use policy::{BlockMeta, EvictionPolicy, LruLeafFirst};
pub use stats::{CacheStats, TenantStats};
pub use table::BlockTable;
pub use types::{BlockCopy, BlockHash, BlockId, CacheConfig, Identity, OutOfBlocks, Root, TenantId};
