//! KV *identity*: what content is cached, where it resides, for whom, and what may be taken next.
//!
//! Owns: the block pool, the block tables, the prefix index, eviction, and the account of all of it. Must never: touch KV
//! bytes, do I/O, read a clock, or let two tenants reach one block.
//!
//! A sequence's life: [`KvCache::attach`] what is cached, then per step [`KvCache::grow`] before it and
//! [`KvCache::commit`] after it, [`KvCache::fork`] for further choices, [`KvCache::release`] at its end or preemption.
//!
//! | module | one noun |
//! |---|---|
//! | `cache`, `lookup`, `attach` | the operations and what they promise; why copies are safe; what a hit needs |
//! | `hash` | roots and chained block hashes, byte for byte |
//! | `nodes` | content: hash to node, parents and children |
//! | `pool` | storage: slots, reference counts, the free list |
//! | `group` | where nodes reside in one cache group; the order of eviction where the policy has no say |
//! | `blocks` | the life of a block on the device |
//! | `list` | lists of blocks in order of last use |
//! | `lease` | what is read and written beside the steps |
//! | `events` | what became cached and what is gone, recorded |
//! | `policy` | the order of eviction in group 0, a trait object |
//! | `retention`, `prefixes` | what callers say about it: priority, time to live, pins |
//! | `table` | one sequence's blocks |
//! | `quota` | guarantees, ceilings, and whose cached block goes |
//! | `account` | who held how much memory for how long |
//! | `stats`, `check` | what the cache says about itself, and the proof that it is true |
//! | `view` | what some blocks hold, for whoever draws the pool |
//!
//! Cost: `grow` and `commit` are O(blocks touched), `attach` and `release` O(blocks of the sequence), everything else
//! O(1) but `clear`, `check` and what concerns kept prefixes. Nothing is allocated on these paths once pool and tables have been used.
#![forbid(unsafe_code)]

mod account;
mod attach;
mod blocks;
mod cache;
mod check;
mod counts;
mod demand;
mod events;
mod group;
mod hash;
mod lease;
mod list;
mod lookup;
mod nodes;
mod policy;
mod pool;
mod prefixes;
mod quota;
mod retention;
mod stats;
mod table;
mod types;
mod view;

pub use account::Holdings;
pub use cache::{CommitRefused, KvCache};
pub use counts::{GroupCounts, MAX_GROUPS};
pub use demand::Growth;
pub use events::{CacheEvent, EventBatch};
pub use hash::BlockHashes;
pub use lease::{Content, Lease, Lineage, Ticket};
pub use lookup::Lookup;
pub use policy::{
    BlockMeta, EvictionPolicy, LearnedLifetimes, LearningSettings, LruLeafFirst, default_policy,
};
pub use prefixes::{KeepRefused, PREFIXES_MAX, PinLimits, PrefixId, PrefixInfo};
pub use quota::{Quota, QuotaError};
pub use retention::{DEFAULT_PRIORITY, OPERATOR_PRIORITY, PRIORITY_MAX, Retention, RetentionRange};
pub use stats::{CacheStats, GroupStats, QueryStats, TenantStats};
pub use table::BlockTable;
pub use types::{
    BlockCopy, BlockHash, BlockId, CacheConfig, ContentRange, GroupConfig, HOLE, Identity, Layout,
    OutOfBlocks, Root, TenantId, TierId,
};
pub use view::{BlockState, BlockView, VIEW_MAX, ViewedNode};
