//! Addresses and networks in manifests.

use std::net::IpAddr;

use health_model::address::{AddressError, parse_ip, parse_network};
use health_model::manifest::Problem;
use health_net::address::is_link_local;
use ipnet::IpNet;

/// The use of an address, which determines which addresses are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// A service address that the cluster or its load balancer assigned.
    Assigned,
    /// An address that a user wrote, as an external IP or an endpoint. Kubernetes accepts fewer of these.
    Written,
}

/// Parses an address.
pub(super) fn address(text: &str, what_for: Use) -> Result<IpAddr, Problem> {
    let address =
        parse_ip(text).map_err(|_| Problem::invalid(text, "must be a valid IP address"))?;
    let detail = if address.is_unspecified() {
        "may not be unspecified"
    } else if address.is_loopback() {
        "may not be a loopback address"
    } else if address.is_multicast() {
        "may not be a multicast address"
    } else if is_link_local(&address) && what_for == Use::Written {
        "may not be a link-local address"
    } else {
        return Ok(address);
    };
    Err(Problem::invalid(text, detail))
}

/// Parses a network and clears the host bits. Ignores spaces around it.
pub(super) fn network(text: &str) -> Result<IpNet, Problem> {
    let network = parse_network(text.trim()).map_err(|error| {
        let detail = match error {
            AddressError::ShortMapped => error.to_string(),
            _ => "must be a valid CIDR value".to_owned(),
        };
        Problem::invalid(text, detail)
    })?;
    Ok(network.trunc())
}
