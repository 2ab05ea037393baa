//! Parses an entry and checks it in isolation.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use health_model::address::{parse_ip, parse_network};
use ipnet::IpNet;

use super::problem::{Problem, RefusedEntry, refused};
use super::{Claim, Entry, MAX_LIST_LEN, MAX_NAME_LEN, SourceText, health_endpoint, overlap};
use crate::nodes::Node;
use crate::prefix::{v4, v6};

/// An entry that is valid in isolation.
pub(super) struct ParsedEntry<P> {
    pub(super) node: Node,
    pub(super) full_name: String,
    pub(super) name_place: P,
    pub(super) node_addresses: Vec<(IpAddr, P)>,
    pub(super) pod_cidrs: Vec<(IpNet, P)>,
    pub(super) health_addresses: Vec<(IpAddr, P)>,
}

/// Parses an entry, and checks everything that does not depend on other entries.
pub(super) fn parse<P: Clone + fmt::Display>(
    entry: Entry<P>,
    default_cluster: &str,
) -> Result<ParsedEntry<P>, RefusedEntry<P>> {
    let name_place = entry.name.place.clone();
    let name = name("node name", entry.name)?;
    let cluster = match entry.cluster {
        Some(cluster) => self::name("cluster name", cluster)?,
        None => default_cluster.to_owned(),
    };
    let full_name = format!("{cluster}/{name}");
    if entry.addresses.is_empty() {
        return Err(refused(&entry.place, Problem::NoAddress(full_name)));
    }
    for (what, list) in [
        ("addresses", &entry.addresses),
        ("secondary addresses", &entry.secondary_addresses),
        ("pod CIDRs", &entry.pod_cidrs),
        ("health addresses", &entry.health_addresses),
    ] {
        if list.len() > MAX_LIST_LEN {
            let problem = Problem::TooMany {
                node: full_name,
                what,
                len: list.len(),
            };
            return Err(refused(&entry.place, problem));
        }
    }

    let primary_count = entry.addresses.len();
    let own = entry.addresses.into_iter().chain(entry.secondary_addresses);
    let node_addresses = own.map(address).collect::<Result<Vec<_>, _>>()?;
    let pod_cidrs = entry
        .pod_cidrs
        .into_iter()
        .map(cidr)
        .collect::<Result<Vec<_>, _>>()?;
    let health = entry.health_addresses.into_iter().map(address);
    let health_addresses = health.collect::<Result<Vec<_>, _>>()?;

    check_within(&full_name, &node_addresses, &pod_cidrs, &health_addresses)?;
    let ips = |list: &[(IpAddr, P)]| list.iter().map(|(address, _)| *address).collect();
    Ok(ParsedEntry {
        node: Node {
            name,
            cluster,
            addresses: ips(&node_addresses[..primary_count]),
            secondary_addresses: ips(&node_addresses[primary_count..]),
            pod_cidrs: pod_cidrs.iter().map(|(cidr, _)| *cidr).collect(),
            health_addresses: ips(&health_addresses),
            labels: entry.labels,
        },
        full_name,
        name_place,
        node_addresses,
        pod_cidrs,
        health_addresses,
    })
}

/// Checks the parts of an entry against each other.
fn check_within<P: Clone + fmt::Display>(
    full_name: &str,
    node_addresses: &[(IpAddr, P)],
    pod_cidrs: &[(IpNet, P)],
    health_addresses: &[(IpAddr, P)],
) -> Result<(), RefusedEntry<P>> {
    let mut seen: HashMap<IpAddr, Claim<P>> = HashMap::new();
    let own = node_addresses.iter().map(|a| (a, full_name.to_owned()));
    let health = health_addresses
        .iter()
        .map(|a| (a, health_endpoint(full_name)));
    for ((address, place), owner) in own.chain(health) {
        if let Some(first) = seen.get(address) {
            return Err(refused(place, first.duplicate(*address)));
        }
        let place = place.clone();
        seen.insert(*address, Claim { owner, place });
    }
    for (i, (cidr, place)) in pod_cidrs.iter().enumerate() {
        if let Some((other, first)) = pod_cidrs[..i].iter().find(|(o, _)| overlap(*cidr, *o)) {
            return Err(refused(
                place,
                Problem::OverlappingCidrs {
                    cidr: *cidr,
                    owner: full_name.to_owned(),
                    other: *other,
                    other_owner: full_name.to_owned(),
                    place: first.clone(),
                },
            ));
        }
    }
    let holding = |address| {
        pod_cidrs
            .iter()
            .find(move |(cidr, _)| cidr.contains(address))
    };
    for (address, place) in node_addresses {
        if let Some((cidr, cidr_place)) = holding(address) {
            return Err(refused(
                place,
                Problem::AddressInPodCidr {
                    address: *address,
                    node: full_name.to_owned(),
                    cidr: *cidr,
                    owner: full_name.to_owned(),
                    place: cidr_place.clone(),
                },
            ));
        }
    }
    for (address, place) in health_addresses {
        if holding(address).is_none() {
            return Err(refused(
                place,
                Problem::OutsidePodCidrs {
                    address: *address,
                    node: full_name.to_owned(),
                },
            ));
        }
    }
    Ok(())
}

fn name<P: Clone + fmt::Display>(
    what: &'static str,
    written: SourceText<P>,
) -> Result<String, RefusedEntry<P>> {
    let name = written.text;
    if name.len() > MAX_NAME_LEN {
        let len = name.len();
        return Err(refused(&written.place, Problem::LongName { what, len }));
    }
    if name.is_empty() || name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control()) {
        return Err(refused(&written.place, Problem::InvalidName { what, name }));
    }
    Ok(name)
}

fn address<P: Clone + fmt::Display>(
    written: SourceText<P>,
) -> Result<(IpAddr, P), RefusedEntry<P>> {
    let SourceText { text, place } = written;
    let Ok(address) = parse_ip(&text) else {
        return Err(refused(&place, Problem::InvalidAddress(shortened(text))));
    };
    let broadcast = address == IpAddr::V4(Ipv4Addr::BROADCAST);
    if address.is_unspecified() || address.is_multicast() || broadcast {
        return Err(refused(&place, Problem::NotUnicast(address)));
    }
    Ok((address, place))
}

/// Networks that pods cannot use: this network, loopback, link-local, multicast and reserved addresses (RFC 6890).
const SPECIAL: [IpNet; 8] = [
    v4([0, 0, 0, 0], 8),
    v4([127, 0, 0, 0], 8),
    v4([169, 254, 0, 0], 16),
    v4([224, 0, 0, 0], 3),
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),
];

fn cidr<P: Clone + fmt::Display>(written: SourceText<P>) -> Result<(IpNet, P), RefusedEntry<P>> {
    let SourceText { text, place } = written;
    let Ok(cidr) = parse_network(&text) else {
        return Err(refused(&place, Problem::InvalidCidr(shortened(text))));
    };
    if let Some(special) = SPECIAL.iter().find(|special| overlap(cidr, **special)) {
        let special = *special;
        return Err(refused(&place, Problem::SpecialCidr { cidr, special }));
    }
    if cidr != cidr.trunc() {
        return Err(refused(
            &place,
            Problem::HostBits {
                written: cidr,
                network: cidr.trunc(),
            },
        ));
    }
    Ok((cidr, place))
}

/// Shortens a string: malformed addresses may have any length, but reports are single lines.
fn shortened(mut text: String) -> String {
    const LONGEST: usize = 64;
    if text.len() > LONGEST {
        text.truncate(text.floor_char_boundary(LONGEST));
        text.push('…');
    }
    text
}
