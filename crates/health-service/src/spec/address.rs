//! Addresses and networks of manifests.

use std::net::IpAddr;

use health_model::manifest::Problem;
use ipnet::IpNet;

/// What an address is for, which decides what it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// A service's, that the cluster or its load balancer has assigned.
    Assigned,
    /// One that somebody wrote down: an external one, or an endpoint's. Kubernetes refuses more of them.
    Written,
}

/// An address. IPv4 in IPv6 (RFC 4291, 2.5.5.2) is IPv4, as Kubernetes has it.
pub(super) fn address(text: &str, what_for: Use) -> Result<IpAddr, Problem> {
    let address: IpAddr = text
        .parse()
        .map_err(|_| Problem::invalid(text, "must be a valid IP address"))?;
    let address = address.to_canonical();
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let detail = if address.is_unspecified() {
        "may not be unspecified"
    } else if address.is_loopback() {
        "may not be a loopback address"
    } else if address.is_multicast() {
        "may not be a multicast address"
    } else if is_link_local && what_for == Use::Written {
        "may not be a link-local address"
    } else {
        return Ok(address);
    };
    Err(Problem::invalid(text, detail))
}

/// A network, without the bits past its prefix. Spaces around it do not count.
pub(super) fn network(text: &str) -> Result<IpNet, Problem> {
    let network: IpNet = text
        .trim()
        .parse()
        .map_err(|_| Problem::invalid(text, "must be a valid CIDR value"))?;
    Ok(network.trunc())
}
