//! Addresses whose requests are refused: how fast they are told so.
//!
//! Owns: a fixed number of [`Refusals`], each shared by the addresses that a keyed hash leads to it, so that no flood makes it larger and
//! nobody chooses with whom to share. Who is not refused never waits.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::tenancy::bucket::Refusals;

const BUCKETS: usize = 1024;

/// See the module documentation.
pub(crate) struct RefusedPeers {
    hasher: RandomState,
    buckets: Vec<Mutex<Refusals>>,
}

impl RefusedPeers {
    pub fn new(now: Instant) -> Self {
        let buckets = (0..BUCKETS).map(|_| Mutex::new(Refusals::new(now))).collect();
        Self { hasher: RandomState::new(), buckets }
    }

    /// How long the answer to a refused request from `peer` waits.
    pub fn delay(&self, peer: IpAddr, now: Instant) -> Option<Duration> {
        let bucket = self.hasher.hash_one(network(peer)) as usize % BUCKETS;
        self.buckets[bucket].lock().delay(now)
    }
}

/// What one client has: an IPv4 address, or an IPv6 network of 64 bits.
fn network(peer: IpAddr) -> u64 {
    match peer.to_canonical() {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[test]
    fn a_flood_waits_whatever_address_of_its_network_it_comes_from_and_others_do_not() {
        let now = Instant::now();
        let peers = RefusedPeers::new(now);
        let address = |network: u16, host: u128| {
            IpAddr::V6(Ipv6Addr::from_bits(u128::from(network) << 64 | 0x2001_0db8 << 96 | host))
        };
        let at_once = (0..10_000).filter(|host| peers.delay(address(1, *host), now).is_none()).count();
        assert_eq!(at_once, 6000);
        assert_eq!(peers.delay(address(1, 0), now), Some(Duration::from_secs(1)), "never longer");
        // One in 1,024 shares its bucket.
        let others = (2..102).filter(|network| peers.delay(address(*network, 1), now).is_none()).count();
        assert!(others >= 95, "{others} of 100 wait for nothing");
        let mapped = IpAddr::V6("::ffff:192.0.2.1".parse().unwrap());
        assert_eq!(network(mapped), network("192.0.2.1".parse().unwrap()));
    }
}
