//! KV *identity*: which block holds what, for whom, and what may be taken next.
#![forbid(unsafe_code)]

mod types;

pub use types::{BlockCopy, BlockHash, BlockId, CacheConfig, Identity, OutOfBlocks, Root, TenantId};
