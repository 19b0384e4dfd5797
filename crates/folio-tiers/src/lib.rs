//! KV bytes outside the device: blocks in memory of this process, found by hash; on a disk, sealed by their tenant's key and there again after a
//! restart; with a server.
//!
//! Owns: that memory, the files, their format, what is known of them in memory, and which of them goes when room is needed. Must never:
//! decide what is stored or loaded, serve bytes that were not verified, or take more of the memory or the disk than it was given.
#![forbid(unsafe_code)]

mod clock;
mod disk;
pub mod export;
mod host;
mod index;
pub mod inspect;
pub mod io;
mod lookup;
mod record;
pub mod remote;
mod seal;
mod segment;
mod shared;
mod store;
mod tier;
mod types;
mod wear;
mod worth;
mod writer;

pub use clock::WallClock;
pub use host::HostStore;
pub use store::DiskStore;
pub use tier::{Carried, Device, Store, StoreTier};
pub use types::{
    About, BlockKey, Class, DataKey, DiskConfig, DiskState, DiskStats, Miss, OpenError, PutError, Secret,
    Sharing, Stored,
};
