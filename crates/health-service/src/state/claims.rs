//! Which port owns an address that several ports claim.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use health_model::ipam::Family;
use health_model::policy::Protocol;
use imbl::OrdMap;
use jiff::Timestamp;

use super::frontend::{FrontendKind, Listen};
use super::reserved::ReservedFor;
use crate::spec::{PortKey, ServicePort, ServicePortName};

/// What can be claimed: an address or node port, in one family and protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Claimed {
    family: Family,
    protocol: Protocol,
    listen: Listen,
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
}

/// A claim on an address or node port; the smallest one owns it. ClusterIPs come first: the cluster assigns each only once,
/// while anybody may write an external address into a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    is_written: bool,
    created: Option<Timestamp>,
    name: ServicePortName,
}

/// Whose an address or node port is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Another port has claimed it, and comes first.
    Port(ServicePortName),
    /// Something of this node has the address, and keeps it.
    Node(ReservedFor),
}

/// A port is not served at an address because that is somebody else's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The port that lost the address.
    pub key: PortKey,
    /// The address or node port that it claims.
    pub listen: Listen,
    /// The kind of frontend that it would have there.
    pub kind: FrontendKind,
    /// Whose it is.
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

/// The field of a service that contains the address.
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
    /// Sorted; never empty.
    claims: OrdMap<Claimed, Vec<Claim>>,
}

/// Addresses and node ports whose claims have changed, with their former owners.
#[derive(Debug, Default)]
pub(super) struct Touched(BTreeMap<Claimed, Option<ServicePortName>>);

impl Claims {
    /// The port that owns this address or node port.
    pub(super) fn owner(&self, claimed: &Claimed) -> Option<&ServicePortName> {
        let claims = self.claims.get(claimed)?;
        claims.first().map(|claim| &claim.name)
    }

    pub(super) fn add(
        &mut self,
        key: &PortKey,
        (listen, kind): (Listen, FrontendKind),
        port: &ServicePort,
        touched: &mut Touched,
    ) {
        let claimed = Claimed::of(key, listen);
        self.touch(claimed, touched);
        let claim = Claim {
            is_written: kind != FrontendKind::ClusterIp,
            created: port.service.created,
            name: key.name.clone(),
        };
        let claims = self.claims.entry(claimed).or_default();
        if let Err(index) = claims.binary_search(&claim) {
            claims.insert(index, claim);
        }
    }

    pub(super) fn remove(&mut self, key: &PortKey, listen: Listen, touched: &mut Touched) {
        let claimed = Claimed::of(key, listen);
        self.touch(claimed, touched);
        if let Some(claims) = self.claims.get_mut(&claimed) {
            claims.retain(|claim| claim.name != key.name);
            if claims.is_empty() {
                self.claims.remove(&claimed);
            }
        }
    }

    /// All ports that claim this address, whatever their number and protocol.
    pub(super) fn at(&self, ip: IpAddr) -> impl Iterator<Item = PortKey> {
        let family = Family::of(ip);
        let listen = move |port| Listen::Address(SocketAddr::new(ip, port));
        let ranges = [Protocol::TCP, Protocol::UDP, Protocol::SCTP]
            .into_iter()
            .flat_map(move |protocol| {
                let end = |port| Claimed::new(family, protocol, listen(port));
                self.claims.range(end(0)..=end(u16::MAX))
            });
        ranges.flat_map(move |(_, claims)| {
            let names = claims.iter().map(|claim| claim.name.clone());
            names.map(move |name| PortKey { name, family })
        })
    }

    fn touch(&self, claimed: Claimed, touched: &mut Touched) {
        let owner = || self.owner(&claimed).cloned();
        touched.0.entry(claimed).or_insert_with(owner);
    }

    /// All ports that claim an address or node port whose owner has changed.
    pub(super) fn moved(&self, touched: Touched) -> BTreeSet<PortKey> {
        let moved = touched
            .0
            .into_iter()
            .filter(|(claimed, before)| self.owner(claimed) != before.as_ref());
        let claimants = moved.flat_map(|(claimed, _)| {
            let claims = self.claims.get(&claimed).into_iter().flatten();
            claims.map(move |claim| PortKey {
                name: claim.name.clone(),
                family: claimed.family,
            })
        });
        claimants.collect()
    }
}
