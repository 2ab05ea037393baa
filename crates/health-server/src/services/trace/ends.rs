//! The source and destination of a traced flow.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::http::StatusCode;
use health_common::identity;
use health_endpoint::lifecycle::State;
use health_model::address::{parse_ip, parse_socket_address};
use health_model::api::{
    Endpoint, NodeEntry, ServiceEntry, ServicePortEntry, SourceKind, TracedSource,
};
use health_model::identity::Identity;
use health_model::ipam::Family;
use health_model::policy::Protocol;

use super::TraceQuery;
use super::kernel::Kernel;
use crate::answer::Refusal;
use crate::services::ServiceCatalog;
use crate::source::Source;

/// The name for the node itself.
const HOST: &str = "host";

/// Both ends of the traced flow.
pub(super) struct Ends {
    who: Who,
    source_port: Option<u16>,
    pub(super) destination: SocketAddr,
    pub(super) protocol: Protocol,
}

/// Who opens the flow.
enum Who {
    Host,
    Address(IpAddr),
    Endpoint(Arc<Endpoint>),
}

impl Ends {
    pub(super) fn of<S: Source>(
        source: &S,
        catalog: &ServiceCatalog,
        query: &TraceQuery,
    ) -> Result<Self, Refusal> {
        let (who, source_port) = who(source, &query.source)?;
        if let Who::Address(address) = who
            && !is_sent_from(address)
        {
            return Err(bad(format!("source: no packet can come from {address}")));
        }
        if let Some(protocol) = query.protocol
            && !Protocol::WITH_PORTS.contains(&protocol)
        {
            return Err(bad(format!(
                "protocol: {protocol} is not supported; expected TCP, UDP or SCTP"
            )));
        }
        let (destination, protocol) = match parse_socket_address(&query.destination) {
            Ok(address) => (address, query.protocol.unwrap_or(Protocol::TCP)),
            Err(_) => of_service(catalog, &who, query)?,
        };
        let family = Family::of(destination.ip());
        if !who.has(family) {
            let family = family.name();
            let source = &query.source;
            return Err(bad(format!("source: {source:?} has no {family} address")));
        }
        Ok(Self {
            who,
            source_port,
            destination,
            protocol,
        })
    }

    /// Whether an address belongs to this node.
    pub(super) fn is_own<S: Source>(&self, source: &S, ip: IpAddr) -> bool {
        let nodes = source.nodes().nodes;
        nodes
            .iter()
            .any(|node| node.local && node.addresses.contains(&ip))
    }

    /// The source of the flow as the programs see it.
    pub(super) fn source<S: Source>(
        &self,
        source: &S,
        kernel: &Kernel,
        differences: &mut Vec<String>,
    ) -> Result<TracedSource, Refusal> {
        let nodes = source.nodes().nodes;
        let family = Family::of(self.destination.ip());
        let address = match &self.who {
            Who::Address(address) => *address,
            // Without a node address, the host's sockets still reach loopback services.
            Who::Host => kernel.node_address(family).unwrap_or(match family {
                Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
                Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
            }),
            Who::Endpoint(endpoint) => address_of(endpoint, family).ok_or_else(|| {
                bad(format!(
                    "source: endpoint {} has no such address",
                    endpoint.id
                ))
            })?,
        };
        let info = kernel.pinned.endpoint(address)?;
        if let (Who::Endpoint(endpoint), None) = (&self.who, &info) {
            differences.push(format!(
                "the programs have no endpoint at {address}, the address of endpoint {}",
                endpoint.id
            ));
        }
        let identity = match info {
            Some(info) => info.identity,
            None => kernel.pinned.identity_of(address)?,
        };
        let (kind, name) = match (info, &self.who) {
            (Some(info), _) => (SourceKind::Endpoint, name_of(source, info.id)),
            (None, who) if who.is_host(identity) => {
                let own = nodes.iter().find(|node| node.local);
                (SourceKind::Host, own.map(|node| node.name.clone()))
            }
            (None, _) => elsewhere(&nodes, address)?,
        };
        let labels = source.enforcer().and_then(|enforcer| {
            let identities = enforcer.identities();
            let labels = identities.labels.get(&Identity(identity))?;
            Some(labels.iter().map(ToString::to_string).collect())
        });
        Ok(TracedSource {
            address,
            port: self.source_port,
            kind,
            endpoint: info.map(|info| info.id),
            name,
            identity,
            labels: labels.unwrap_or_default(),
        })
    }
}

impl Who {
    /// Whether this node opens the flow, given the identity of the source address.
    fn is_host(&self, identity: u32) -> bool {
        match self {
            Self::Host => true,
            Self::Address(address) => identity == identity::HOST && !is_of_link(*address),
            Self::Endpoint(_) => false,
        }
    }

    /// Whether the source may have an address of a family.
    fn has(&self, family: Family) -> bool {
        match self {
            Self::Host => true,
            Self::Address(address) => Family::of(*address) == family,
            Self::Endpoint(endpoint) => address_of(endpoint, family).is_some(),
        }
    }
}

/// The name of an endpoint of this node.
pub(super) fn name_of<S: Source>(source: &S, id: u16) -> Option<String> {
    let endpoints = source.endpoints();
    let endpoint = endpoints.iter().find(|endpoint| endpoint.id == id)?;
    endpoint.name.clone()
}

fn address_of(endpoint: &Endpoint, family: Family) -> Option<IpAddr> {
    match family {
        Family::V4 => endpoint.ipv4,
        Family::V6 => endpoint.ipv6,
    }
}

/// Whether an address is a valid source of packets.
fn is_sent_from(ip: IpAddr) -> bool {
    let is_broadcast = ip == IpAddr::from(Ipv4Addr::BROADCAST);
    !ip.is_unspecified() && !ip.is_multicast() && !is_broadcast
}

/// Whether an address is IPv6 link-local: it is only unique per link, and may be this node's or a neighbour's.
fn is_of_link(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The kind of an address that belongs to no endpoint of this node, and the node it belongs to.
fn elsewhere(nodes: &[NodeEntry], ip: IpAddr) -> Result<(SourceKind, Option<String>), Refusal> {
    for node in nodes {
        let kind = match (node.addresses.contains(&ip), node.local) {
            (true, true) => SourceKind::Host,
            (true, false) => SourceKind::Node,
            (false, is_local) if node.pod_cidrs.iter().any(|cidr| cidr.contains(&ip)) => {
                if is_local {
                    let problem = format!("source: no endpoint on this node has address {ip}");
                    return Err(missing(problem));
                }
                SourceKind::RemoteEndpoint
            }
            _ => continue,
        };
        return Ok((kind, Some(node.name.clone())));
    }
    Ok((SourceKind::Outside, None))
}

/// Parses the source and its optional port.
fn who<S: Source>(source: &S, text: &str) -> Result<(Who, Option<u16>), Refusal> {
    if let Ok(address) = parse_ip(text) {
        return Ok((Who::Address(address), None));
    }
    if let Ok(address) = parse_socket_address(text) {
        return Ok((Who::Address(address.ip()), Some(address.port())));
    }
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => return Err(bad(format!("source: invalid port {port:?}"))),
        },
        None => (text, None),
    };
    if name == HOST {
        return Ok((Who::Host, port));
    }
    let is_live = |endpoint: &&Arc<Endpoint>| State::of(endpoint) != Some(State::Disconnected);
    let endpoints = source.endpoints();
    let by_id = name.parse::<u16>().ok();
    let is_meant = |endpoint: &&Arc<Endpoint>| match by_id {
        Some(id) => endpoint.id == id,
        None => endpoint.name.as_deref() == Some(name),
    };
    let mut meant = endpoints.iter().filter(is_live).filter(is_meant);
    match (meant.next(), meant.next()) {
        (Some(endpoint), None) => Ok((Who::Endpoint(endpoint.clone()), port)),
        (Some(_), Some(_)) => Err(bad(format!(
            "source: several endpoints are named {name:?}; give an endpoint's id"
        ))),
        (None, _) => Err(missing(format!(
            "source: no endpoint {name:?} on this node; give an endpoint's id or name, an address, or {HOST}"
        ))),
    }
}

/// The address at which the service port `NAMESPACE/NAME:PORT` is reached.
fn of_service(
    catalog: &ServiceCatalog,
    who: &Who,
    query: &TraceQuery,
) -> Result<(SocketAddr, Protocol), Refusal> {
    let text = &query.destination;
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (&**text, None),
    };
    if parse_ip(name).is_ok() || parse_ip(text).is_ok() {
        return Err(bad(format!(
            "destination: {text:?} has no port; expected ADDRESS:PORT"
        )));
    }
    let services = catalog.services(|service| service.is_named(name));
    let service = match &services[..] {
        [service] => service,
        [] => {
            return Err(missing(format!(
                "destination: no service {name:?}; `health-agent service list` lists the existing ones"
            )));
        }
        several => {
            let names: Vec<_> = several.iter().map(ServiceEntry::full_name).collect();
            return Err(bad(format!(
                "destination: several services match {name:?}: give one of {}",
                names.join(", ")
            )));
        }
    };
    let is_meant = |entry: &&ServicePortEntry| {
        let is_port = port.is_none_or(|port| entry.is_called(port));
        let protocol = query.protocol.map(|protocol| protocol.to_string());
        is_port && protocol.is_none_or(|protocol| entry.protocol == protocol)
    };
    let ports: Vec<_> = service.ports.iter().filter(is_meant).collect();
    let is_tcp = |port: &&&ServicePortEntry| port.protocol == Protocol::TCP.to_string();
    let entry = match &ports[..] {
        [entry] => entry,
        [] => {
            let has = ports_of(service);
            return Err(missing(format!(
                "destination: {name} has no such port; it has {has}"
            )));
        }
        // Several protocols use this port number.
        several if port.is_some() => several.iter().find(is_tcp).unwrap_or(&several[0]),
        _ => {
            let has = ports_of(service);
            return Err(bad(format!(
                "destination: {name} has several ports; give one of {has}"
            )));
        }
    };
    let addresses = entry.frontends.iter();
    let mut addresses = addresses.filter_map(|frontend| frontend.listen.parse::<SocketAddr>().ok());
    let address = addresses.find(|address| who.has(Family::of(address.ip())));
    let protocol = entry.protocol.parse();
    match (address, protocol) {
        (Some(address), Ok(protocol)) => Ok((address, protocol)),
        _ => Err(missing(format!(
            "destination: {name} has no address that the source can reach"
        ))),
    }
}

/// The ports of a service, for an error about a wrong port.
pub(super) fn ports_of(service: &ServiceEntry) -> String {
    let ports: Vec<_> = service.ports.iter().map(ServicePortEntry::title).collect();
    ports.join(", ")
}

fn bad(problem: String) -> Refusal {
    Refusal(StatusCode::BAD_REQUEST, problem)
}

fn missing(problem: String) -> Refusal {
    Refusal(StatusCode::NOT_FOUND, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_whose_the_nodes_say_it_is() {
        let node = |name: &str, local, last: u8| NodeEntry {
            name: name.to_owned(),
            local,
            addresses: vec![[172, 30, 0, last].into()],
            pod_cidrs: vec![format!("10.244.{last}.0/24").parse().unwrap()],
            health_addresses: Vec::new(),
            not_probed: Vec::new(),
        };
        let nodes = [node("default/a", true, 1), node("default/b", false, 2)];
        for (ip, kind, name) in [
            ("172.30.0.1", SourceKind::Host, Some("default/a")),
            ("172.30.0.2", SourceKind::Node, Some("default/b")),
            ("10.244.2.9", SourceKind::RemoteEndpoint, Some("default/b")),
            ("192.0.2.1", SourceKind::Outside, None),
        ] {
            let Ok(found) = elsewhere(&nodes, ip.parse().unwrap()) else {
                panic!("{ip} is refused")
            };
            assert_eq!(found, (kind, name.map(str::to_owned)), "{ip}");
        }
        let absent = elsewhere(&nodes, "10.244.1.9".parse().unwrap());
        assert!(absent.is_err_and(|refusal| refusal.1.contains("no endpoint on this node")));
    }
}
