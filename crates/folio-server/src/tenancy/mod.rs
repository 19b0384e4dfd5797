//! Who asks, what they may have, and what they hold.

pub(crate) mod cache_keys;
pub(crate) mod declared;
pub(crate) mod fair_queue;
pub(crate) mod gate;
pub(crate) mod kept;
pub(crate) mod keyring;
pub mod keys;
pub(crate) mod secret;
pub(crate) mod shared_prefixes;
pub(crate) mod tenants;
pub(crate) mod unread;
