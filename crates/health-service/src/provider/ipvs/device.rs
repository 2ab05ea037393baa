//! The device that carries service addresses, and the addresses of all other devices.

use std::collections::BTreeSet;
use std::net::IpAddr;

use health_net::address::{is_for_others, is_link_local};
use health_net::link::{self, Link};
use health_net::netlink::Handle;
use ipnet::IpNet;

use super::error::IpvsError;
use super::plan::NodeAddresses;

pub use link::SERVICES_DEVICE as DEVICE;

const KIND: &str = "dummy";

/// Returns the device, and whether it was missing and has just been created. It stays down: its addresses are local to
/// the node anyway, and then have no other effect.
pub(super) async fn ensure(handle: &Handle) -> Result<(Link, bool), IpvsError> {
    if let Some(link) = find(handle).await? {
        return Ok((link, false));
    }
    link::create_dummy(handle, DEVICE).await?;
    let made = find(handle).await?;
    made.map(|link| (link, true))
        .ok_or(IpvsError::ForeignDevice(DEVICE))
}

async fn find(handle: &Handle) -> Result<Option<Link>, IpvsError> {
    match link::by_name(handle, DEVICE).await? {
        Some(link) if link.kind.as_deref() != Some(KIND) => Err(IpvsError::ForeignDevice(DEVICE)),
        found => Ok(found),
    }
}

/// Whether the device exists.
pub(super) async fn is_present(handle: &Handle) -> Result<bool, IpvsError> {
    Ok(ours(handle).await?.is_some())
}

/// Returns the device; `None` if another device has its name.
async fn ours(handle: &Handle) -> Result<Option<Link>, IpvsError> {
    match find(handle).await {
        Err(IpvsError::ForeignDevice(_)) => Ok(None),
        found => found,
    }
}

/// Removes the device with all its addresses. Returns whether it existed.
pub(super) async fn remove(handle: &Handle) -> Result<bool, IpvsError> {
    match ours(handle).await? {
        Some(link) => Ok(link::delete(handle, &link).await?),
        None => Ok(false),
    }
}

/// Returns the addresses of the device.
pub(super) async fn bound(handle: &Handle, device: &Link) -> Result<BTreeSet<IpAddr>, IpvsError> {
    let listed = link::addresses_of(handle, device.index).await?;
    let addresses = listed.into_iter().map(|listed| listed.address);
    // The kernel may add an IPv6 address of its own when someone brings the device up.
    Ok(addresses
        .filter(|address| address.is_ipv4() || !is_link_local(address))
        .collect())
}

/// Returns the addresses of all other devices, with those that serve NodePorts: those in `networks`, or all if
/// `networks` is empty. Skips our device, which may have many addresses.
pub(super) async fn of_node(
    handle: &Handle,
    device: &Link,
    networks: &[IpNet],
) -> Result<NodeAddresses, IpvsError> {
    let mut node = NodeAddresses::default();
    for other in link::list(handle).await? {
        if other.index == device.index {
            continue;
        }
        for listed in link::addresses_of(handle, other.index).await? {
            let address = listed.address;
            node.all.insert(address);
            let is_chosen =
                networks.is_empty() || networks.iter().any(|net| net.contains(&address));
            if is_chosen && is_for_others(&address) {
                node.node_ports.insert(address);
            }
        }
    }
    Ok(node)
}
