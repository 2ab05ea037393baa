//! Ownership of the addresses in this node's pod CIDRs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use rand::Rng;

use super::pool::{Family, IpamError, Pool};
use super::range::AddressRange;

/// Owner of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The endpoint's id.
    pub endpoint: u16,
    /// Its name; may be empty.
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

/// A search for an address that nothing else on the host uses. It terminates because no address is offered to it twice.
#[derive(Clone, Debug)]
pub struct Search {
    family: Family,
    owner: Owner,
    /// Addresses that were offered but are in use elsewhere.
    refused: BTreeSet<IpAddr>,
}

impl Search {
    /// Starts a search.
    pub fn new(family: Family, owner: Owner) -> Self {
        Self {
            family,
            owner,
            refused: BTreeSet::new(),
        }
    }
}

/// A node's pools, and the owners of their addresses.
///
/// A released address is reused only after a cool-down time, so that late packets and stale caches of its former owner
/// do not affect the next one. It is reused earlier only if no other address is free, or if it is requested explicitly.
#[derive(Debug)]
pub struct NodeIpam {
    pools: BTreeMap<Family, Pool>,
    owners: BTreeMap<IpAddr, Owner>,
    cooling_time: Duration,
    /// Cooling addresses with the time of their release, oldest first.
    cooling: VecDeque<(Instant, IpAddr)>,
}

impl NodeIpam {
    /// Creates the pools of these pod CIDRs.
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

    /// The IP versions that have a pool, IPv4 first.
    pub fn families(&self) -> impl Iterator<Item = Family> {
        self.pools.keys().copied()
    }

    /// The endpoints' gateway.
    pub fn gateway(&self, family: Family) -> Option<IpAddr> {
        self.pools.get(&family).map(Pool::gateway)
    }

    /// Allocates an address. A caller that finds it in use elsewhere [refuses](Self::refuse) it and asks again.
    pub fn allocate(
        &mut self,
        search: &Search,
        now: Instant,
        rng: &mut (impl Rng + ?Sized),
    ) -> Result<IpAddr, IpamError> {
        self.release_cooled(now, &search.refused);
        let allocated = self.pool(search.family)?.allocate(None, rng);
        let address = match (allocated, self.longest_cooled(search)) {
            (Ok(address), _) => address,
            (Err(_), Some(address)) => {
                self.cooling.retain(|(_, cooling)| *cooling != address);
                address
            }
            (Err(IpamError::Exhausted(cidrs)), None) if !search.refused.is_empty() => {
                let count = search.refused.len();
                return Err(IpamError::InUse { cidrs, count });
            }
            (Err(error), None) => return Err(error),
        };
        self.owners.insert(address, search.owner.clone());
        Ok(address)
    }

    /// Takes back an address that a search found to be in use elsewhere. It cools down like any other; other searches
    /// may try it.
    pub fn refuse(&mut self, search: &mut Search, address: IpAddr, now: Instant) {
        search.refused.insert(address);
        self.release_address(address, now);
    }

    /// Allocates exactly this address.
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

    /// Releases all addresses of an endpoint.
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

    /// Releases one address; it cools down like any other.
    pub fn release_address(&mut self, address: IpAddr, now: Instant) {
        if self.owners.remove(&address).is_some() {
            self.cooling.push_back((now, address));
        }
    }

    /// All allocated addresses and their owners.
    pub fn owners(&self) -> impl Iterator<Item = (IpAddr, &Owner)> {
        self.owners.iter().map(|(address, owner)| (*address, owner))
    }

    /// Returns the addresses whose endpoint is not `living`, with their owners.
    pub fn leaks(&self, living: impl Fn(u16) -> bool) -> Vec<(IpAddr, Owner)> {
        self.owners
            .iter()
            .filter(|(_, owner)| !living(owner.endpoint))
            .map(|(address, owner)| (*address, owner.clone()))
            .collect()
    }

    /// The owner of an address.
    pub fn owner(&self, address: IpAddr) -> Option<&Owner> {
        self.owners.get(&address)
    }

    fn pool(&mut self, family: Family) -> Result<&mut Pool, IpamError> {
        self.pools
            .get_mut(&family)
            .ok_or(IpamError::NoFamily(family.name()))
    }

    /// Returns cooled-down addresses to the pools, except these.
    fn release_cooled(&mut self, now: Instant, except: &BTreeSet<IpAddr>) {
        let (pools, cooling_time) = (&mut self.pools, self.cooling_time);
        self.cooling.retain(|(since, address)| {
            let is_warm = now.saturating_duration_since(*since) < cooling_time;
            let stays = is_warm || except.contains(address);
            if !stays && let Some(pool) = pools.get_mut(&Family::of(*address)) {
                pool.release(*address);
            }
            stays
        });
    }

    fn longest_cooled(&self, search: &Search) -> Option<IpAddr> {
        let mut addresses = self.cooling.iter().map(|(_, address)| *address);
        addresses.find(|address| {
            Family::of(*address) == search.family && !search.refused.contains(address)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

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
        let search = Search::new(Family::V4, owner(endpoint));
        ipam.allocate(&search, now, &mut rand::rng())
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
    fn a_search_is_offered_each_address_once_and_the_next_search_again() {
        // Also with no cool-down time.
        for cooling in [COOLING, Duration::ZERO] {
            let cidrs = ["10.0.0.0/29".parse().unwrap()];
            let mut ipam = NodeIpam::new(&cidrs, &[], &[], cooling).unwrap();
            let now = Instant::now();
            allocate(&mut ipam, 1, now).unwrap();
            ipam.release(1, now);
            for endpoint in [2, 3] {
                let mut search = Search::new(Family::V4, owner(endpoint));
                let mut offered = BTreeSet::new();
                for _ in 0..5 {
                    let address = ipam.allocate(&search, now, &mut rand::rng()).unwrap();
                    assert!(offered.insert(address), "{address} was offered twice");
                    ipam.refuse(&mut search, address, now);
                }
                let error = ipam.allocate(&search, now, &mut rand::rng()).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "no free address in pod CIDR 10.0.0.0/29: 5 without an endpoint are in use \
                     on this host; free them, or give the node a larger one"
                );
            }
            assert_eq!(ipam.owners().count(), 0);
        }
    }

    #[test]
    fn an_address_that_is_asked_for_is_had_or_its_owner_named() {
        let mut ipam = ipam(&["10.0.0.0/24"]);
        let address = "10.0.0.9".parse().unwrap();
        assert_eq!(ipam.claim(address, owner(1)), Ok(()));
        assert_eq!(
            ipam.claim(address, owner(2)).unwrap_err().to_string(),
            "address 10.0.0.9 belongs to endpoint 1 (e1); request another, or delete that endpoint"
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

    /// An operation on the addresses.
    #[derive(Clone, Debug)]
    enum Step {
        /// Endpoint, and how many of the offered addresses are in use elsewhere.
        Allocate(u16, u8),
        Claim(u8, u16),
        Release(u16),
        SetAside(u8),
        Wait(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let endpoint = || 1_u16..6;
        // Includes addresses that are never given out.
        let host = || 0_u8..18;
        let step = prop_oneof![
            4 => (endpoint(), 0_u8..3).prop_map(|(endpoint, foreign)| Step::Allocate(endpoint, foreign)),
            2 => (host(), endpoint()).prop_map(|(host, endpoint)| Step::Claim(host, endpoint)),
            2 => endpoint().prop_map(Step::Release),
            1 => host().prop_map(Step::SetAside),
            1 => (1_u64..90).prop_map(Step::Wait),
        ];
        proptest::collection::vec(step, 1..60)
    }

    /// A simple model of the same: the owner of each address, and when it started to cool down.
    #[derive(Default)]
    struct Plain {
        owners: BTreeMap<IpAddr, u16>,
        cooling: Vec<(Instant, IpAddr)>,
    }

    impl Plain {
        fn usable() -> impl Iterator<Item = IpAddr> {
            (2_u8..15).map(|host| IpAddr::from([10, 0, 0, host]))
        }

        fn is_cooling(&self, address: IpAddr) -> bool {
            self.cooling.iter().any(|(_, cooling)| *cooling == address)
        }

        fn free(&self) -> Vec<IpAddr> {
            Self::usable()
                .filter(|one| !self.owners.contains_key(one) && !self.is_cooling(*one))
                .collect()
        }

        /// The addresses that may be offered now to a search that has refused these.
        fn candidates(&mut self, now: Instant, refused: &[IpAddr]) -> Vec<IpAddr> {
            self.cooling
                .retain(|(since, one)| now - *since < COOLING || refused.contains(one));
            let free = self.free();
            if free.is_empty() {
                let mut cooling = self.cooling.iter().map(|(_, one)| *one);
                return cooling
                    .find(|one| !refused.contains(one))
                    .into_iter()
                    .collect();
            }
            free
        }

        fn give(&mut self, address: IpAddr, endpoint: u16) {
            self.cooling.retain(|(_, cooling)| *cooling != address);
            self.owners.insert(address, endpoint);
        }

        fn cool(&mut self, now: Instant, mut is_to_cool: impl FnMut(IpAddr, u16) -> bool) {
            let owned = std::mem::take(&mut self.owners);
            for (address, endpoint) in owned {
                if is_to_cool(address, endpoint) {
                    self.cooling.push((now, address));
                } else {
                    self.owners.insert(address, endpoint);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn addresses_are_given_out_as_a_plain_list_would(steps in steps(), seed: u64) {
            let mut ipam = ipam(&["10.0.0.0/28"]);
            let mut plain = Plain::default();
            let mut rng = StdRng::seed_from_u64(seed);
            let mut now = Instant::now();
            let address = |host: u8| IpAddr::from([10, 0, 0, host]);
            for step in steps {
                match step {
                    Step::Allocate(endpoint, foreign) => {
                        let mut search = Search::new(Family::V4, owner(endpoint));
                        let mut refused = Vec::new();
                        loop {
                            let candidates = plain.candidates(now, &refused);
                            let Ok(given) = ipam.allocate(&search, now, &mut rng) else {
                                prop_assert!(candidates.is_empty(), "none of {candidates:?}");
                                break;
                            };
                            prop_assert!(candidates.contains(&given), "{given} of {candidates:?}");
                            plain.give(given, endpoint);
                            if refused.len() == usize::from(foreign) {
                                break;
                            }
                            ipam.refuse(&mut search, given, now);
                            plain.cool(now, |one, _| one == given);
                            refused.push(given);
                        }
                    }
                    Step::Claim(host, endpoint) => {
                        let address = address(host);
                        let may_have = Plain::usable().any(|one| one == address)
                            && !plain.owners.contains_key(&address);
                        let claimed = ipam.claim(address, owner(endpoint));
                        prop_assert_eq!(claimed.is_ok(), may_have, "{:?}", claimed);
                        if may_have {
                            plain.give(address, endpoint);
                        }
                    }
                    Step::Release(endpoint) => {
                        ipam.release(endpoint, now);
                        plain.cool(now, |_, owner| owner == endpoint);
                    }
                    Step::SetAside(host) => {
                        ipam.release_address(address(host), now);
                        plain.cool(now, |one, _| one == address(host));
                    }
                    Step::Wait(seconds) => now += Duration::from_secs(seconds),
                }
                let owners: BTreeMap<_, _> = ipam
                    .owners()
                    .map(|(address, owner)| (address, owner.endpoint))
                    .collect();
                prop_assert_eq!(&owners, &plain.owners);
            }
        }
    }
}
