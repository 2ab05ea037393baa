//! A pool: which addresses of a node's pod CIDRs of one family endpoints may use, and which are taken.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use rand::Rng;

use super::range::AddressRange;

/// Number of random draws before a nearly full pool is searched sequentially.
const RANDOM_TRIES: usize = 32;

/// Why no address can be given out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IpamError {
    /// No address is free.
    #[error("no free address in pod CIDR {0}: give the node a larger one")]
    Exhausted(Cidrs),
    /// No address is free, and some are only unavailable because they are in use elsewhere on the host.
    #[error(
        "no free address in pod CIDR {cidrs}: {count} without an endpoint are in use on this host; free \
         them, or give the node a larger one"
    )]
    InUse {
        /// The pod CIDRs.
        cidrs: Cidrs,
        /// Number of addresses in use elsewhere.
        count: usize,
    },
    /// A node address lies in a pod CIDR.
    #[error("pod CIDR {cidr} overlaps node address {node}: give the node a different pod CIDR")]
    OverlapsNode {
        /// The CIDR.
        cidr: IpNet,
        /// The node's address in it.
        node: IpAddr,
    },
    /// The requested address is not in the pool.
    #[error("address {address} is in none of this node's pod CIDRs ({cidrs})")]
    NotInPool {
        /// The requested address.
        address: IpAddr,
        /// The pod CIDRs.
        cidrs: Cidrs,
    },
    /// The requested address is never given out.
    #[error("address {address} is the network, broadcast or gateway address of pod CIDR {cidrs}")]
    Reserved {
        /// The requested address.
        address: IpAddr,
        /// The pod CIDRs.
        cidrs: Cidrs,
    },
    /// The requested address is reserved for others.
    #[error("address {address} is in {range}, which the settings exclude (--ipam-exclude)")]
    Excluded {
        /// The requested address.
        address: IpAddr,
        /// The range that contains it.
        range: AddressRange,
    },
    /// The requested address is already taken.
    #[error("address {0} is already in use on this host")]
    Taken(IpAddr),
    /// The requested address belongs to another endpoint.
    #[error(
        "address {address} belongs to endpoint {owner}; request another, or delete that endpoint"
    )]
    Owned {
        /// The requested address.
        address: IpAddr,
        /// Id and name of that endpoint.
        owner: String,
    },
    /// The node has no addresses of this IP version.
    #[error("this node has no {0} pod CIDR")]
    NoFamily(&'static str),
}

/// CIDRs of one family; comma-separated in text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cidrs(Vec<IpNet>);

impl fmt::Display for Cidrs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (i, cidr) in self.0.iter().enumerate() {
            write!(f, "{}{cidr}", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// Family of an address.
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Its display name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

/// The addresses of a node's pod CIDRs of one family, and which of them are taken.
///
/// Never given out: the first address of each CIDR (the network address; for IPv6 the subnet-router anycast address),
/// the last address of each IPv4 CIDR (broadcast), the gateway, and excluded ranges.
#[derive(Clone, Debug)]
pub struct Pool {
    cidrs: Cidrs,
    gateway: IpAddr,
    excluded: Vec<AddressRange>,
    taken: HashSet<IpAddr>,
}

impl Pool {
    /// Creates the pool from those `cidrs` that are of this family; `None` if there are none.
    pub fn new(
        family: Family,
        cidrs: &[IpNet],
        node_addresses: &[IpAddr],
    ) -> Result<Option<Self>, IpamError> {
        let cidrs: Vec<_> = cidrs
            .iter()
            .map(IpNet::trunc)
            .filter(|cidr| Family::of(cidr.addr()) == family)
            .collect();
        let Some(first) = cidrs.first() else {
            return Ok(None);
        };
        for &cidr in &cidrs {
            if let Some(&node) = node_addresses.iter().find(|node| cidr.contains(*node)) {
                return Err(IpamError::OverlapsNode { cidr, node });
            }
        }
        if host_bits(first) == 0 {
            return Err(IpamError::Exhausted(Cidrs(vec![*first])));
        }
        Ok(Some(Self {
            gateway: nth(first, 1),
            cidrs: Cidrs(cidrs),
            excluded: Vec::new(),
            taken: HashSet::new(),
        }))
    }

    /// The same pool without the addresses in these ranges.
    #[must_use]
    pub fn excluding(mut self, ranges: &[AddressRange]) -> Self {
        self.excluded.extend_from_slice(ranges);
        self
    }

    /// The endpoints' gateway: the first host address of the first CIDR.
    pub fn gateway(&self) -> IpAddr {
        self.gateway
    }

    /// Takes the `preferred` address if it is in the pool and free, else a random one.
    pub fn allocate(
        &mut self,
        preferred: Option<IpAddr>,
        rng: &mut (impl Rng + ?Sized),
    ) -> Result<IpAddr, IpamError> {
        let chosen = preferred
            .filter(|address| self.is_free(*address))
            .or_else(|| self.draw(rng))
            .or_else(|| self.search())
            .ok_or_else(|| IpamError::Exhausted(self.cidrs.clone()))?;
        self.taken.insert(chosen);
        Ok(chosen)
    }

    /// Takes exactly this address.
    pub fn claim(&mut self, address: IpAddr) -> Result<(), IpamError> {
        let cidrs = || self.cidrs.clone();
        if !self.covers(address) {
            let cidrs = cidrs();
            return Err(IpamError::NotInPool { address, cidrs });
        }
        if self.is_reserved(address) {
            let cidrs = cidrs();
            return Err(IpamError::Reserved { address, cidrs });
        }
        if let Some(range) = self.exclusion(address) {
            return Err(IpamError::Excluded { address, range });
        }
        if !self.taken.insert(address) {
            return Err(IpamError::Taken(address));
        }
        Ok(())
    }

    /// Gives an address back. Returns whether it was taken.
    pub fn release(&mut self, address: IpAddr) -> bool {
        self.taken.remove(&address)
    }

    fn exclusion(&self, address: IpAddr) -> Option<AddressRange> {
        let mut ranges = self.excluded.iter();
        ranges.find(|range| range.contains(address)).copied()
    }

    fn is_free(&self, address: IpAddr) -> bool {
        self.covers(address)
            && !self.is_reserved(address)
            && self.exclusion(address).is_none()
            && !self.taken.contains(&address)
    }

    fn covers(&self, address: IpAddr) -> bool {
        self.cidrs.0.iter().any(|cidr| cidr.contains(&address))
    }

    fn is_reserved(&self, address: IpAddr) -> bool {
        address == self.gateway
            || self.cidrs.0.iter().any(|cidr| {
                address == cidr.network() || cidr.addr().is_ipv4() && address == cidr.broadcast()
            })
    }

    /// Draws a random free address; may fail if the pool is nearly full.
    fn draw(&self, rng: &mut (impl Rng + ?Sized)) -> Option<IpAddr> {
        let total: u128 = self.cidrs.0.iter().map(size).fold(0, u128::saturating_add);
        (0..RANDOM_TRIES)
            .map(|_| self.at(rng.random_range(0..total)))
            .find(|address| self.is_free(*address))
    }

    /// Returns the first free address. Skips each excluded range in one step; every other skipped address is reserved
    /// or taken. The number of steps is therefore bounded by the number of those ranges and addresses, no matter how
    /// large the pool is.
    fn search(&self) -> Option<IpAddr> {
        self.cidrs.0.iter().find_map(|cidr| {
            let mut n = 0;
            while n < size(cidr) {
                let address = nth(cidr, n);
                match self.exclusion(address) {
                    Some(range) => n = position(cidr, range.last()).checked_add(1)?,
                    None if self.is_free(address) => return Some(address),
                    None => n += 1,
                }
            }
            None
        })
    }

    /// The address at a position in the concatenated CIDRs.
    fn at(&self, mut position: u128) -> IpAddr {
        for cidr in &self.cidrs.0 {
            if position < size(cidr) {
                return nth(cidr, position);
            }
            position -= size(cidr);
        }
        self.gateway
    }
}

fn host_bits(cidr: &IpNet) -> u32 {
    u32::from(cidr.max_prefix_len() - cidr.prefix_len())
}

/// Number of addresses in a CIDR; one too few for `::/0`, whose size needs 129 bits.
fn size(cidr: &IpNet) -> u128 {
    1_u128.checked_shl(host_bits(cidr)).unwrap_or(u128::MAX)
}

/// The address `n` after the CIDR's first; `n` must be less than its size.
fn nth(cidr: &IpNet, n: u128) -> IpAddr {
    match cidr.network() {
        IpAddr::V4(first) => {
            let n = u32::try_from(n).unwrap_or(u32::MAX);
            Ipv4Addr::from(u32::from(first).saturating_add(n)).into()
        }
        IpAddr::V6(first) => Ipv6Addr::from(u128::from(first).saturating_add(n)).into(),
    }
}

/// Offset of an address from the CIDR's first; 0 if the address is lower.
fn position(cidr: &IpNet, address: IpAddr) -> u128 {
    match (cidr.network(), address) {
        (IpAddr::V4(first), IpAddr::V4(address)) => {
            u32::from(address).saturating_sub(u32::from(first)).into()
        }
        (IpAddr::V6(first), IpAddr::V6(address)) => {
            u128::from(address).saturating_sub(u128::from(first))
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn pool(cidrs: &[&str]) -> Pool {
        let cidrs: Vec<_> = cidrs.iter().map(|cidr| net(cidr)).collect();
        let family = Family::of(cidrs[0].addr());
        Pool::new(family, &cidrs, &[]).unwrap().unwrap()
    }

    fn rng() -> StdRng {
        StdRng::seed_from_u64(7)
    }

    fn drain(pool: &mut Pool) -> Vec<IpAddr> {
        let mut rng = rng();
        let mut all: Vec<_> = std::iter::from_fn(|| pool.allocate(None, &mut rng).ok()).collect();
        all.sort();
        all
    }

    #[test]
    fn a_pool_gives_each_host_address_once_but_the_gateway() {
        let mut pool = pool(&["10.244.1.0/29"]);
        assert_eq!(pool.gateway(), ip("10.244.1.1"));
        let expected: Vec<_> = (2..=6).map(|n| ip(&format!("10.244.1.{n}"))).collect();
        assert_eq!(drain(&mut pool), expected);
        let error = pool.allocate(None, &mut rng()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no free address in pod CIDR 10.244.1.0/29: give the node a larger one"
        );
    }

    #[test]
    fn ipv6_has_no_broadcast_address() {
        let mut pool = pool(&["fd00::/126"]);
        assert_eq!(pool.gateway(), ip("fd00::1"));
        assert_eq!(drain(&mut pool), [ip("fd00::2"), ip("fd00::3")]);
    }

    #[test]
    fn several_cidrs_make_one_pool() {
        let mut pool = pool(&["10.0.0.0/30", "10.0.1.0/30"]);
        assert_eq!(
            drain(&mut pool),
            [ip("10.0.0.2"), ip("10.0.1.1"), ip("10.0.1.2")]
        );
    }

    #[test]
    fn the_preferred_address_wins_while_it_is_free() {
        let mut pool = pool(&["10.0.0.0/24"]);
        let wanted = ip("10.0.0.77");
        assert_eq!(pool.allocate(Some(wanted), &mut rng()), Ok(wanted));
        assert_ne!(pool.allocate(Some(wanted), &mut rng()), Ok(wanted));
        for outside in ["10.0.1.5", "fd00::5", "10.0.0.0", "10.0.0.1", "10.0.0.255"] {
            let got = pool.allocate(Some(ip(outside)), &mut rng()).unwrap();
            assert_ne!(got, ip(outside));
        }
    }

    #[test]
    fn claims_name_what_is_wrong() {
        let mut pool = pool(&["10.0.0.0/24"]);
        let why = |pool: &mut Pool, text: &str| pool.claim(ip(text)).unwrap_err().to_string();
        assert_eq!(pool.claim(ip("10.0.0.9")), Ok(()));
        assert_eq!(
            why(&mut pool, "10.0.0.9"),
            "address 10.0.0.9 is already in use on this host"
        );
        assert_eq!(
            why(&mut pool, "10.0.1.9"),
            "address 10.0.1.9 is in none of this node's pod CIDRs (10.0.0.0/24)"
        );
        assert_eq!(
            why(&mut pool, "10.0.0.1"),
            "address 10.0.0.1 is the network, broadcast or gateway address of pod CIDR 10.0.0.0/24"
        );
    }

    #[test]
    fn a_node_address_in_the_pod_cidr_is_refused() {
        let nodes = [ip("192.168.0.1"), ip("10.0.0.200")];
        let error = Pool::new(Family::V4, &[net("10.0.0.0/24")], &nodes).unwrap_err();
        assert_eq!(
            error.to_string(),
            "pod CIDR 10.0.0.0/24 overlaps node address 10.0.0.200: give the node a different pod CIDR"
        );
    }

    #[test]
    fn cidrs_without_a_host_are_exhausted() {
        for cidr in ["10.0.0.1/32", "fd00::1/128"] {
            let family = Family::of(net(cidr).addr());
            let error = Pool::new(family, &[net(cidr)], &[]).unwrap_err();
            assert!(matches!(error, IpamError::Exhausted(_)), "{cidr}");
        }
        for cidr in ["10.0.0.0/31", "10.0.0.0/30", "fd00::/127"] {
            let mut pool = pool(&[cidr]);
            let free = drain(&mut pool);
            assert_eq!(free.len(), usize::from(cidr == "10.0.0.0/30"), "{cidr}");
        }
    }

    #[test]
    fn only_cidrs_of_the_family_count() {
        let cidrs = [net("10.0.0.0/24"), net("fd00::/64")];
        let v6 = Pool::new(Family::V6, &cidrs, &[]).unwrap().unwrap();
        assert_eq!(v6.gateway(), ip("fd00::1"));
        assert!(Pool::new(Family::V6, &cidrs[..1], &[]).unwrap().is_none());
    }

    #[test]
    fn host_bits_of_a_cidr_do_not_matter() {
        assert_eq!(pool(&["10.0.0.57/24"]).gateway(), ip("10.0.0.1"));
    }

    #[test]
    fn what_is_excluded_is_never_given_out_however_large_it_is() {
        let mut pool = pool(&["10.0.0.0/29"]).excluding(&["10.0.0.3-10.0.0.5".parse().unwrap()]);
        assert_eq!(drain(&mut pool), [ip("10.0.0.2"), ip("10.0.0.6")]);
        assert_eq!(
            pool.claim(ip("10.0.0.4")).unwrap_err().to_string(),
            "address 10.0.0.4 is in 10.0.0.3-10.0.0.5, which the settings exclude (--ipam-exclude)"
        );
        let all_but_one = "fd00::-fd00::ffff:ffff:ffff:fffe".parse().unwrap();
        let mut pool = Pool::new(Family::V6, &[net("fd00::/64")], &[])
            .unwrap()
            .unwrap()
            .excluding(&[all_but_one]);
        assert_eq!(drain(&mut pool), [ip("fd00::ffff:ffff:ffff:ffff")]);
    }

    #[test]
    fn the_largest_pools_give_addresses() {
        for cidr in ["0.0.0.0/0", "::/0"] {
            let mut pool = pool(&[cidr]);
            assert!(pool.allocate(None, &mut rng()).is_ok(), "{cidr}");
        }
    }

    proptest! {
        #[test]
        fn addresses_are_unique_inside_and_never_reserved(
            v4: bool, bits: u128, host_bits in 1_u8..=9, seed: u64,
            preferred in proptest::collection::vec(any::<u128>(), 0..20),
        ) {
            let make = |bits: u128| -> IpAddr {
                if v4 { Ipv4Addr::from(bits as u32).into() } else { Ipv6Addr::from(bits).into() }
            };
            let length = if v4 { 32 } else { 128 } - host_bits;
            let cidr = IpNet::new(make(bits), length).unwrap().trunc();
            let family = Family::of(cidr.addr());
            let mut pool = Pool::new(family, &[cidr], &[]).unwrap().unwrap();
            let mut rng = StdRng::seed_from_u64(seed);
            let mut seen = HashSet::new();
            let mut preferred = preferred.into_iter().map(make);
            while let Ok(address) = pool.allocate(preferred.next(), &mut rng) {
                prop_assert!(cidr.contains(&address));
                prop_assert!(address != cidr.network() && address != pool.gateway());
                prop_assert!(!v4 || address != cidr.broadcast());
                prop_assert!(seen.insert(address));
            }
            let usable = (1_usize << host_bits).saturating_sub(if v4 { 3 } else { 2 });
            prop_assert_eq!(seen.len(), usable);
        }
    }
}
