//! Places for connections: so many at a time, and so many of one source.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Connections served at a time; more wait in the backlog.
const PLACES: usize = 512;
/// Those that one source may have, so that one that says nothing leaves places to others. Nodes behind one
/// translated address need a place for milliseconds each.
pub(super) const PLACES_OF_SOURCE: usize = 64;
/// The part of an IPv6 address that one host can choose freely: RFC 4291 section 2.5.1.
const INTERFACE_BITS: u32 = 64;

/// The places of a responder.
#[derive(Clone)]
pub(super) struct Places {
    all: Arc<Semaphore>,
    /// Taken ones by source.
    taken: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(PLACES)),
            taken: Arc::default(),
        }
    }
}

impl Places {
    /// Waits for a free place; `None` only if the semaphore is closed, which nobody does.
    pub(super) async fn free(&self) -> Option<FreePlace> {
        let permit = self.all.clone().acquire_owned().await.ok()?;
        Some(FreePlace {
            permit,
            places: self.clone(),
        })
    }

    /// Waits until nobody has a place.
    pub(super) async fn all_free(&self) {
        let _ = self.all.acquire_many(PLACES as u32).await;
    }

    fn leave(&self, source: IpAddr) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut count) = taken.entry(source) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// A place that is nobody's yet.
pub(super) struct FreePlace {
    permit: OwnedSemaphorePermit,
    places: Places,
}

impl FreePlace {
    /// Gives it to a connection from this address, unless its source already has all its places.
    pub(super) fn take(self, from: IpAddr) -> Option<Place> {
        let source = source(from);
        {
            let taken = &self.places.taken;
            let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
            let count = taken.entry(source).or_default();
            if *count == PLACES_OF_SOURCE {
                return None;
            }
            *count += 1;
        }
        Some(Place {
            source,
            places: self.places,
            _permit: self.permit,
        })
    }
}

/// A connection's place, until it is dropped.
pub(super) struct Place {
    source: IpAddr,
    places: Places,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.leave(self.source);
    }
}

/// Whom an address is counted for.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = address.to_bits() >> INTERFACE_BITS << INTERFACE_BITS;
            Ipv6Addr::from_bits(network).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_source_leaves_places_to_others() {
        let places = Places::default();
        let take = async |address: String| {
            let place = places.free().await.unwrap();
            place.take(address.parse().unwrap())
        };
        for (own, other) in [("10.0.0.1", "10.0.0.2"), ("2001:db8::", "2001:db8:0:1::")] {
            let mut held = Vec::new();
            for host in 0..PLACES_OF_SOURCE {
                // Addresses of one network are one host's.
                let suffix = if own.ends_with(':') {
                    format!("{host:x}")
                } else {
                    String::new()
                };
                held.push(take(format!("{own}{suffix}")).await.unwrap());
            }
            assert!(take(own.to_owned()).await.is_none());
            assert!(take(other.to_owned()).await.is_some());
            held.pop();
            assert!(take(own.to_owned()).await.is_some());
        }
        places.all_free().await;
        assert!(places.taken.lock().unwrap().is_empty());
    }
}
