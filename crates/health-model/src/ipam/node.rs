//! Who has which address of this node's pod CIDRs.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use rand::Rng;

use super::pool::{Family, IpamError, Pool};
use super::range::AddressRange;

/// Who has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The endpoint's id.
    pub endpoint: u16,
    /// What it is called; may be empty.
    pub name: String,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.endpoint)?;
        if !self.name.is_empty() {
            write!(f, " ({})", self.name)?;
        }
        Ok(())
    }
}

/// The pools of a node, and the owners of the addresses.
///
/// An address that was given back is given out again only after a time to cool down, so that late packets
/// and caches of its former owner do not meet the next one; earlier only where no other is free, or where
/// it is asked for by name.
#[derive(Debug)]
pub struct NodeIpam {
    pools: BTreeMap<Family, Pool>,
    owners: BTreeMap<IpAddr, Owner>,
    cooling_time: Duration,
    /// Since when, the oldest first.
    cooling: VecDeque<(Instant, IpAddr)>,
}

impl NodeIpam {
    /// The pools of these pod CIDRs.
    pub fn new(
        cidrs: &[IpNet],
        node_addresses: &[IpAddr],
        excluded: &[AddressRange],
        cooling_time: Duration,
    ) -> Result<Self, IpamError> {
        let mut pools = BTreeMap::new();
        for family in Family::ALL {
            if let Some(pool) = Pool::new(family, cidrs, node_addresses)? {
                pools.insert(family, pool.excluding(excluded));
            }
        }
        Ok(Self {
            pools,
            owners: BTreeMap::new(),
            cooling_time,
            cooling: VecDeque::new(),
        })
    }

    /// The IP versions that there are addresses of, IPv4 first.
    pub fn families(&self) -> impl Iterator<Item = Family> {
        self.pools.keys().copied()
    }

    /// The gateway of endpoints.
    pub fn gateway(&self, family: Family) -> Option<IpAddr> {
        self.pools.get(&family).map(Pool::gateway)
    }

    /// Gives out an address.
    pub fn allocate(
        &mut self,
        family: Family,
        owner: Owner,
        now: Instant,
        rng: &mut (impl Rng + ?Sized),
    ) -> Result<IpAddr, IpamError> {
        self.thaw(now);
        let allocated = self.pool(family)?.allocate(None, rng);
        let address = match (allocated, self.longest_cooled(family)) {
            (Ok(address), _) => address,
            (Err(_), Some(address)) => {
                self.cooling.retain(|(_, cooling)| *cooling != address);
                address
            }
            (Err(error), None) => return Err(error),
        };
        self.owners.insert(address, owner);
        Ok(address)
    }

    /// Gives out exactly this address.
    pub fn claim(&mut self, address: IpAddr, owner: Owner) -> Result<(), IpamError> {
        if let Some(other) = self.owners.get(&address) {
            return Err(IpamError::Owned {
                address,
                owner: other.to_string(),
            });
        }
        let was_cooling = self.cooling.len();
        self.cooling.retain(|(_, cooling)| *cooling != address);
        let is_cooling = self.cooling.len() < was_cooling;
        if !is_cooling {
            self.pool(Family::of(address))?.claim(address)?;
        }
        self.owners.insert(address, owner);
        Ok(())
    }

    /// Takes back all addresses of an endpoint.
    pub fn release(&mut self, endpoint: u16, now: Instant) -> Vec<IpAddr> {
        let released: Vec<_> = self
            .owners
            .extract_if(.., |_, owner| owner.endpoint == endpoint)
            .map(|(address, _)| address)
            .collect();
        self.cooling
            .extend(released.iter().map(|address| (now, *address)));
        released
    }

    /// Takes back one address, as it turned out to be in use by somebody else; it cools down as others do.
    pub fn set_aside(&mut self, address: IpAddr, now: Instant) {
        if self.owners.remove(&address).is_some() {
            self.cooling.push_back((now, address));
        }
    }

    /// Every address that is taken, and its owner.
    pub fn owners(&self) -> impl Iterator<Item = (IpAddr, &Owner)> {
        self.owners.iter().map(|(address, owner)| (*address, owner))
    }

    /// The addresses whose endpoint is none of the `living`.
    pub fn leaks(&self, living: impl Fn(u16) -> bool) -> Vec<(IpAddr, Owner)> {
        self.owners
            .iter()
            .filter(|(_, owner)| !living(owner.endpoint))
            .map(|(address, owner)| (*address, owner.clone()))
            .collect()
    }

    /// Who has an address.
    pub fn owner(&self, address: IpAddr) -> Option<&Owner> {
        self.owners.get(&address)
    }

    fn pool(&mut self, family: Family) -> Result<&mut Pool, IpamError> {
        self.pools
            .get_mut(&family)
            .ok_or(IpamError::NoFamily(family.name()))
    }

    /// Has the pools give out again what has cooled down.
    fn thaw(&mut self, now: Instant) {
        while let Some((since, address)) = self.cooling.front().copied() {
            if now.saturating_duration_since(since) < self.cooling_time {
                return;
            }
            self.cooling.pop_front();
            if let Some(pool) = self.pools.get_mut(&Family::of(address)) {
                pool.release(address);
            }
        }
    }

    fn longest_cooled(&self, family: Family) -> Option<IpAddr> {
        let mut addresses = self.cooling.iter().map(|(_, address)| *address);
        addresses.find(|address| Family::of(*address) == family)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOLING: Duration = Duration::from_secs(60);

    fn ipam(cidrs: &[&str]) -> NodeIpam {
        let cidrs: Vec<_> = cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect();
        NodeIpam::new(&cidrs, &[], &[], COOLING).unwrap()
    }

    fn owner(endpoint: u16) -> Owner {
        Owner {
            endpoint,
            name: format!("e{endpoint}"),
        }
    }

    fn allocate(ipam: &mut NodeIpam, endpoint: u16, now: Instant) -> Result<IpAddr, IpamError> {
        ipam.allocate(Family::V4, owner(endpoint), now, &mut rand::rng())
    }

    #[test]
    fn an_address_is_given_out_again_after_it_has_cooled_down() {
        let mut ipam = ipam(&["10.0.0.0/28"]);
        let start = Instant::now();
        let first = allocate(&mut ipam, 1, start).unwrap();
        assert_eq!(ipam.owner(first), Some(&owner(1)));
        assert_eq!(ipam.release(1, start), [first]);
        for endpoint in 2..14 {
            let other = allocate(&mut ipam, endpoint, start).unwrap();
            assert_ne!(other, first);
        }
        let cooled = start + COOLING;
        assert_eq!(allocate(&mut ipam, 14, cooled), Ok(first));
    }

    #[test]
    fn where_no_other_is_free_the_one_that_cooled_longest_is_given_out() {
        let mut ipam = ipam(&["10.0.0.0/29"]);
        let now = Instant::now();
        let all: Vec<_> = (1..=5)
            .map(|id| allocate(&mut ipam, id, now).unwrap())
            .collect();
        assert!(allocate(&mut ipam, 6, now).is_err());
        ipam.release(4, now);
        ipam.release(2, now);
        assert_eq!(allocate(&mut ipam, 6, now), Ok(all[3]));
        assert_eq!(allocate(&mut ipam, 7, now), Ok(all[1]));
        assert_eq!(
            allocate(&mut ipam, 8, now).unwrap_err().to_string(),
            "no free address in pod CIDR 10.0.0.0/29: give the node a larger one"
        );
    }

    #[test]
    fn an_address_that_is_asked_for_is_had_or_its_owner_named() {
        let mut ipam = ipam(&["10.0.0.0/24"]);
        let address = "10.0.0.9".parse().unwrap();
        assert_eq!(ipam.claim(address, owner(1)), Ok(()));
        assert_eq!(
            ipam.claim(address, owner(2)).unwrap_err().to_string(),
            "address 10.0.0.9 is of endpoint 1 (e1): ask for another, or delete that endpoint"
        );
        ipam.release(1, Instant::now());
        assert_eq!(ipam.claim(address, owner(2)), Ok(()));
        assert_eq!(
            ipam.claim("fd00::9".parse().unwrap(), owner(2)),
            Err(IpamError::NoFamily("IPv6"))
        );
    }

    #[test]
    fn addresses_of_endpoints_that_are_gone_are_leaks() {
        let mut ipam = ipam(&["10.0.0.0/24"]);
        let now = Instant::now();
        let leaked = allocate(&mut ipam, 1, now).unwrap();
        allocate(&mut ipam, 2, now).unwrap();
        assert_eq!(ipam.leaks(|id| id == 2), [(leaked, owner(1))]);
        assert_eq!(ipam.leaks(|_| true), []);
    }
}
