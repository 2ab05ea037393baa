//! Slots for connections: limited in total and per source.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use ipnet::IpNet;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of connections served at a time; more wait in the backlog.
const PLACES: usize = 512;
/// Maximum number of slots per address, so that a silent client leaves slots to others. Nodes behind one NAT address
/// need a slot for only milliseconds each.
pub(super) const SLOTS_OF_ADDRESS: usize = 64;
/// Maximum number of slots per IPv6 network, within which one host can choose its addresses freely.
const SLOTS_OF_NETWORK: usize = 256;
/// Prefix length of such a network: RFC 4291 section 2.5.1.
const NETWORK_BITS: u8 = 64;

/// The slots of a responder.
#[derive(Clone)]
pub(super) struct Slots {
    all: Arc<Semaphore>,
    /// Used slots by address, and by network.
    taken: Arc<Mutex<HashMap<IpNet, usize>>>,
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(PLACES)),
            taken: Arc::default(),
        }
    }
}

impl Slots {
    /// Waits for a free slot; `None` only if the semaphore is closed, which never happens.
    pub(super) async fn free(&self) -> Option<FreeSlot> {
        let permit = self.all.clone().acquire_owned().await.ok()?;
        Some(FreeSlot {
            permit,
            slots: self.clone(),
        })
    }

    /// Waits until all slots are free.
    pub(super) async fn all_free(&self) {
        let _ = self.all.acquire_many(PLACES as u32).await;
    }

    fn leave(&self, source: Source) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        for (prefix, _) in source.limits() {
            if let Entry::Occupied(mut count) = taken.entry(prefix) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }
}

/// A slot that is not assigned yet.
pub(super) struct FreeSlot {
    permit: OwnedSemaphorePermit,
    slots: Slots,
}

impl FreeSlot {
    /// Assigns the slot to a connection from this address, unless the source already uses all its slots.
    pub(super) fn take(self, from: IpAddr) -> Option<Slot> {
        let source = Source(from.to_canonical());
        {
            let taken = &self.slots.taken;
            let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
            let is_full = |(prefix, most)| taken.get(&prefix).is_some_and(|count| *count >= most);
            if source.limits().any(is_full) {
                return None;
            }
            for (prefix, _) in source.limits() {
                *taken.entry(prefix).or_default() += 1;
            }
        }
        Some(Slot {
            source,
            slots: self.slots,
            _permit: self.permit,
        })
    }
}

/// A connection's slot, until it is dropped.
pub(super) struct Slot {
    source: Source,
    slots: Slots,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.leave(self.source);
    }
}

/// An address, which is limited by itself and, for IPv6, together with its network.
#[derive(Clone, Copy)]
struct Source(IpAddr);

impl Source {
    /// The prefixes under which it is counted, with the maximum number of slots of each.
    fn limits(self) -> impl Iterator<Item = (IpNet, usize)> {
        let network = match self.0 {
            IpAddr::V6(_) => IpNet::new(self.0, NETWORK_BITS).ok(),
            IpAddr::V4(_) => None,
        };
        let network = network.map(|network| (network.trunc(), SLOTS_OF_NETWORK));
        [(self.0.into(), SLOTS_OF_ADDRESS)]
            .into_iter()
            .chain(network)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[tokio::test]
    async fn one_source_leaves_places_to_others() {
        let slots = Slots::default();
        let take = async |from: IpAddr| slots.free().await.unwrap().take(from);
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        for (own, other) in [("10.0.0.1", "10.0.0.2"), ("2001:db8::1", "2001:db8::2")] {
            let mut held = Vec::new();
            for _ in 0..SLOTS_OF_ADDRESS {
                held.push(take(ip(own)).await.unwrap());
            }
            assert!(take(ip(own)).await.is_none());
            assert!(take(ip(other)).await.is_some());
            held.pop();
            assert!(take(ip(own)).await.is_some());
        }
        slots.all_free().await;
        assert!(slots.taken.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn one_ipv6_network_leaves_places_to_others() {
        let slots = Slots::default();
        let take = async |from: u128| {
            let from = IpAddr::from(Ipv6Addr::from_bits(from));
            slots.free().await.unwrap().take(from)
        };
        let network = 0x2001_0db8_u128 << 96;
        let mut held = Vec::new();
        for host in 0..SLOTS_OF_NETWORK as u128 {
            held.push(take(network | host).await.unwrap());
        }
        assert!(take(network | 1 << 63).await.is_none());
        assert!(take(network | 1 << 64).await.is_some());
    }
}
