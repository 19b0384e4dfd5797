//! KV bytes outside the device: blocks on a disk, found by hash, sealed by their tenant's key, there again after a restart.
//!
//! Owns: the files, their format, what is known of them in memory, and which of them goes when room is needed. Must never:
//! decide what is stored or loaded, serve bytes that were not verified, or take more of the disk than it was given.
#![forbid(unsafe_code)]

mod disk;
pub mod export;
mod index;
pub mod inspect;
pub mod io;
mod record;
pub mod remote;
mod seal;
mod segment;
mod store;
mod tier;
mod types;
mod wear;
mod writer;

pub use store::DiskStore;
pub use tier::{Carried, Device, Store, StoreTier};
pub use types::{
    BlockKey, DataKey, DiskConfig, DiskState, DiskStats, Miss, OpenError, PutError, Secret, Stored,
};
