//! KV *identity*: which block holds what, for whom, and what may be taken next.
//!
//! Owns: the block pool, the block tables, the prefix index, eviction, and the account of all of it. Must never: touch KV
//! bytes, do I/O, read a clock, or let two tenants reach one block.
//!
//! A sequence's life: [`KvCache::attach`] what is cached, then per step [`KvCache::grow`] before it and
//! [`KvCache::commit`] after it, [`KvCache::fork`] for further choices, [`KvCache::release`] at its end or preemption.
//!
//! | module | one noun |
//! |---|---|
//! | `cache` | the operations and what they promise; why copies are safe |
//! | `pool` | the states of a block, reference counts, the free list |
//! | `tree` | the index: hash to block, parents and children |
//! | `policy` | the order of eviction, a trait object |
//! | `retention`, `prefixes` | what callers say about it: priority, time to live, pins |
//! | `hash` | roots and chained block hashes, byte for byte |
//! | `table` | one sequence's blocks |
//! | `swap` | copies of a preempted sequence's blocks |
//! | `quota` | guarantees, ceilings, and whose cached block goes |
//! | `account` | who held how much memory for how long |
//! | `stats`, `check` | what the cache says about itself, and the proof that it is true |
//!
//! Cost: `grow` and `commit` are O(blocks touched), `attach` and `release` O(blocks of the sequence), everything else
//! O(1) but `clear`, `check` and what concerns kept prefixes. Nothing is allocated on these paths once pool and tables have been used.
#![forbid(unsafe_code)]

mod account;
mod cache;
mod check;
mod check_windows;
mod companions;
mod counts;
mod demand;
mod hash;
mod policy;
mod pool;
mod prefixes;
mod quota;
mod retention;
mod stats;
mod swap;
mod table;
mod tree;
mod types;
mod window;
mod workload;

pub use account::Holdings;
pub use cache::{KvCache, Lookup};
pub use check::Violation;
pub use companions::Copies;
pub use counts::{GroupCounts, MAX_GROUPS};
pub use policy::{BlockMeta, EvictionPolicy, LearnedLifetimes, LruLeafFirst, default_policy};
pub use prefixes::{KeepRefused, PREFIXES_MAX, PinLimits, PrefixId, PrefixInfo};
pub use quota::{Quota, QuotaError};
pub use retention::{DEFAULT_PRIORITY, OPERATOR_PRIORITY, PRIORITY_MAX, Retention, RetentionRange};
pub use stats::{CacheStats, MAX_WINDOWS, TenantStats, WindowStats};
pub use swap::{BlockSwap, SwapOffer, Swapped};
pub use table::BlockTable;
pub use types::{
    BlockCopy, BlockHash, BlockId, CacheConfig, HOLE, Identity, OutOfBlocks, Root, TenantId, WindowConfig,
};
pub use workload::DecodeWorkload;
