//! Decides which port owns an address that several ports claim.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use health_model::ipam::Family;
use health_model::policy::Protocol;
use imbl::OrdMap;
use jiff::Timestamp;

use super::frontend::{FrontendKind, Listen};
use super::reserved::{Reserved, ReservedFor};
use crate::spec::{PortKey, ServiceName, ServicePort, ServicePortName};

/// The object of a claim: an address or node port, in one family and protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Claimed {
    family: Family,
    protocol: Protocol,
    pub(super) listen: Listen,
}

impl Claimed {
    pub(super) fn new(family: Family, protocol: Protocol, listen: Listen) -> Self {
        Self {
            family,
            protocol,
            listen,
        }
    }

    pub(super) fn of(key: &PortKey, listen: Listen) -> Self {
        Self::new(key.family, key.name.protocol, listen)
    }

    /// Returns the node port that is also served at this address.
    fn node_port(&self, reserved: &Reserved) -> Option<Self> {
        let Listen::Address(address) = self.listen else {
            return None;
        };
        let listen = Listen::NodePort(address.port());
        let is_shared = reserved.serves_node_ports(address.ip());
        is_shared.then_some(Self { listen, ..*self })
    }

    /// Returns the addresses at which this node port is served.
    pub(super) fn addresses<'a>(
        &self,
        reserved: &'a Reserved,
    ) -> impl Iterator<Item = Self> + use<'a> {
        let this = *self;
        let port = match self.listen {
            Listen::NodePort(port) => Some(port),
            Listen::Address(_) => None,
        };
        port.into_iter().flat_map(move |port| {
            let ips = reserved.node_ports.iter();
            let ips = ips.filter(move |ip| Family::of(**ip) == this.family);
            ips.map(move |ip| Self {
                listen: Listen::Address(SocketAddr::new(*ip, port)),
                ..this
            })
        })
    }

    /// Returns this object and all others that share an address with it.
    fn sharing(self, reserved: &Reserved) -> impl Iterator<Item = Self> {
        let addresses = self.addresses(reserved);
        [Some(self), self.node_port(reserved)]
            .into_iter()
            .flatten()
            .chain(addresses)
    }
}

/// A claim on an address or node port. The smallest claim that may be served there wins. ClusterIPs come first: the
/// cluster assigns each of them only once, while anyone may write an external address into a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    is_written: bool,
    created: Option<Timestamp>,
    pub(super) name: ServicePortName,
    kind: FrontendKind,
}

impl Claim {
    pub(super) fn of(port: &ServicePort, name: &ServicePortName, kind: FrontendKind) -> Self {
        Self {
            is_written: kind != FrontendKind::ClusterIp,
            created: port.service.created,
            name: name.clone(),
            kind,
        }
    }

    /// Whether this claim comes before another port's claim on the same address or node port.
    pub(super) fn comes_before(&self, other: &Self) -> bool {
        self.name != other.name && self < other
    }
}

/// Determines which claims may be served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permits<'a> {
    pub(super) reserved: &'a Reserved,
    pub(super) checks: &'a CheckPorts,
}

/// The health-check node ports, each with the services that have it.
pub(super) type CheckPorts = OrdMap<u16, BTreeSet<ServiceName>>;

impl Permits<'_> {
    /// Returns why a frontend of this kind is not served here, regardless of other services' claims.
    pub(super) fn reason(self, kind: FrontendKind, claimed: &Claimed) -> Option<ReservedFor> {
        let reserved = self.reserved.reason(kind, claimed.protocol, claimed.listen);
        reserved.or_else(|| self.check(claimed))
    }

    /// Returns the health check that uses this port of the node.
    fn check(self, claimed: &Claimed) -> Option<ReservedFor> {
        if claimed.protocol != Protocol::TCP {
            return None;
        }
        let port = match claimed.listen {
            Listen::NodePort(port) => port,
            Listen::Address(address) if self.reserved.own.contains(&address.ip()) => address.port(),
            Listen::Address(_) => return None,
        };
        let service = self.checks.get(&port)?.first()?;
        Some(ReservedFor::HealthCheck(service.clone()))
    }
}

/// The owner of an address or node port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Another port has claimed it, and takes precedence.
    Port(ServicePortName),
    /// The address belongs to something on this node.
    Node(ReservedFor),
}

/// A conflict: a port is not served at an address because something else owns the address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The port that lost the address.
    pub key: PortKey,
    /// The address or node port that the port claims.
    pub listen: Listen,
    /// The kind of frontend that the port would have there.
    pub kind: FrontendKind,
    /// The owner of the address.
    pub owner: Owner,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let service = &self.key.name.service;
        let protocol = self.key.name.protocol;
        write!(
            f,
            "service {service}: {} of {} ",
            field(self.kind),
            self.key
        )?;
        match &self.owner {
            Owner::Port(name) => write!(f, "belongs to {name}, which comes first")?,
            Owner::Node(reserved) => write!(f, "is {reserved}")?,
        }
        write!(f, ": it is not served at {}/{protocol}", self.listen)
    }
}

/// Returns the field of a service that contains the address.
fn field(kind: FrontendKind) -> &'static str {
    match kind {
        FrontendKind::ClusterIp => "spec.clusterIPs",
        FrontendKind::LoadBalancer => "status.loadBalancer.ingress",
        FrontendKind::ExternalIp => "spec.externalIPs",
        FrontendKind::NodePort => "spec.ports.nodePort",
    }
}

/// All claims of all ports.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Claims {
    /// The claims on each address or node port; sorted and never empty.
    claims: OrdMap<Claimed, Vec<Claim>>,
}

/// Addresses and node ports whose claims have changed, each with the previous winner.
#[derive(Debug, Default)]
pub(super) struct Touched(BTreeMap<Claimed, Option<Claim>>);

impl Claims {
    /// Returns the claim that owns this address or node port, considering only claims on exactly the same one.
    pub(super) fn owner(&self, claimed: &Claimed, permits: Permits<'_>) -> Option<&Claim> {
        let mut claims = self.claims.get(claimed)?.iter();
        claims.find(|claim| permits.reason(claim.kind, claimed).is_none())
    }

    /// Returns another port's claim that comes before this one: a claim on the same address or node port, on a node
    /// port that is served at this address, or on an address of the node where this node port would be served.
    pub(super) fn rival(
        &self,
        claim: &Claim,
        claimed: &Claimed,
        permits: Permits<'_>,
    ) -> Option<&Claim> {
        let others = [Some(*claimed), claimed.node_port(permits.reserved)];
        let owners = others.into_iter().flatten();
        let owners = owners.filter_map(|claimed| self.owner(&claimed, permits));
        owners.filter(|owner| owner.comes_before(claim)).min()
    }

    pub(super) fn add(
        &mut self,
        key: &PortKey,
        (listen, kind): (Listen, FrontendKind),
        port: &ServicePort,
        permits: Permits<'_>,
        touched: &mut Touched,
    ) {
        let claimed = Claimed::of(key, listen);
        self.touch(claimed, permits, touched);
        let claim = Claim::of(port, &key.name, kind);
        let claims = self.claims.entry(claimed).or_default();
        if let Err(index) = claims.binary_search(&claim) {
            claims.insert(index, claim);
        }
    }

    pub(super) fn remove(
        &mut self,
        key: &PortKey,
        listen: Listen,
        permits: Permits<'_>,
        touched: &mut Touched,
    ) {
        let claimed = Claimed::of(key, listen);
        self.touch(claimed, permits, touched);
        if let Some(claims) = self.claims.get_mut(&claimed) {
            claims.retain(|claim| claim.name != key.name);
            if claims.is_empty() {
                self.claims.remove(&claimed);
            }
        }
    }

    /// Returns all ports that claim this address, with any port number and protocol.
    pub(super) fn at(&self, ip: IpAddr) -> impl Iterator<Item = PortKey> {
        let family = Family::of(ip);
        let listen = move |port| Listen::Address(SocketAddr::new(ip, port));
        let ranges = [Protocol::TCP, Protocol::UDP, Protocol::SCTP]
            .into_iter()
            .flat_map(move |protocol| {
                let end = |port| Claimed::new(family, protocol, listen(port));
                self.claims.range(end(0)..=end(u16::MAX))
            });
        ranges.flat_map(move |(claimed, claims)| keys(claimed, claims))
    }

    /// Returns all ports that claim anything besides ClusterIPs.
    pub(super) fn written(&self) -> impl Iterator<Item = PortKey> {
        self.claims.iter().flat_map(|(claimed, claims)| {
            let claims = claims.iter().filter(|claim| claim.is_written);
            let family = claimed.family;
            claims.map(move |claim| claim.key(family))
        })
    }

    /// Returns all ports that claim a port of the node, as a NodePort or at one of the node's addresses.
    pub(super) fn at_port<'a>(
        &'a self,
        protocol: Protocol,
        port: u16,
        own: &'a BTreeSet<IpAddr>,
    ) -> impl Iterator<Item = PortKey> + 'a {
        let node_ports = Family::ALL.into_iter();
        let node_ports = node_ports.map(move |family| (family, Listen::NodePort(port)));
        let addresses = own.iter().map(move |ip| {
            let listen = Listen::Address(SocketAddr::new(*ip, port));
            (Family::of(*ip), listen)
        });
        node_ports
            .chain(addresses)
            .flat_map(move |(family, listen)| {
                let claimed = Claimed::new(family, protocol, listen);
                let found = self.claims.get_key_value(&claimed).into_iter();
                found.flat_map(|(claimed, claims)| keys(claimed, claims))
            })
    }

    fn touch(&self, claimed: Claimed, permits: Permits<'_>, touched: &mut Touched) {
        let owner = || self.owner(&claimed, permits).cloned();
        touched.0.entry(claimed).or_insert_with(owner);
    }

    /// Returns all ports that claim an address or node port whose owner has changed, or one that shares an address with
    /// it.
    pub(super) fn moved(&self, touched: Touched, permits: Permits<'_>) -> BTreeSet<PortKey> {
        let moved = touched
            .0
            .into_iter()
            .filter(|(claimed, before)| self.owner(claimed, permits) != before.as_ref());
        let places = moved.flat_map(|(claimed, _)| claimed.sharing(permits.reserved));
        let claimants = places.flat_map(|place| {
            let found = self.claims.get_key_value(&place).into_iter();
            found.flat_map(|(claimed, claims)| keys(claimed, claims))
        });
        claimants.collect()
    }
}

impl Claim {
    fn key(&self, family: Family) -> PortKey {
        PortKey {
            name: self.name.clone(),
            family,
        }
    }
}

fn keys<'a>(claimed: &Claimed, claims: &'a [Claim]) -> impl Iterator<Item = PortKey> + 'a {
    let family = claimed.family;
    claims.iter().map(move |claim| claim.key(family))
}
