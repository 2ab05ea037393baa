//! The namespace and the veth pair: finding, making and removing them, as one thing.

use std::os::fd::AsFd;

use super::{DEVICE, Fault, HealthError, INNER_DEVICE};
use crate::net::link::{self, Link, VethPair};
use crate::net::mac::MacAddr;
use crate::net::netlink::Handle;
use crate::net::netns::{self, NetNs};
use crate::net::sysctl::{self, Setting, SysctlError};

/// A namespace with one end of a veth pair, the other end of which is on the host.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) netns: NetNs,
    /// Netlink in the namespace.
    pub(super) inside: Handle,
    /// The host's end.
    pub(super) outer: Link,
    /// The endpoint's end.
    pub(super) inner: Link,
}

/// What there is of a pair.
pub(super) enum Found {
    Nothing,
    /// Parts of one, of which no pair can be made any more, and what is wrong with it.
    Remains(Fault),
    Living(Pair),
}

/// What a new pair shall be.
pub(super) struct Blueprint {
    pub(super) mac: MacAddr,
    pub(super) host_mac: MacAddr,
    pub(super) mtu: u32,
    pub(super) ipv6: bool,
}

/// How the mark of every agent's device starts.
pub(super) const ALIAS_PREFIX: &str = "health-agent/";

/// What marks the host's end as this instance's.
pub(super) fn alias(instance: &str) -> String {
    format!("{ALIAS_PREFIX}{instance}")
}

/// Name of this instance's namespace.
pub(super) fn netns_name(instance: &str) -> String {
    format!("health-{instance}")
}

/// The host's end, if there is one and it is this instance's.
pub(super) async fn own_device(host: &Handle, instance: &str) -> Result<Option<Link>, HealthError> {
    match link::by_name(host, DEVICE).await? {
        Some(device) if device.alias.as_deref() != Some(&alias(instance)) => {
            let alias = device.alias.unwrap_or_default();
            Err(HealthError::ForeignDevice { alias })
        }
        own => Ok(own),
    }
}

/// Looks for this instance's pair.
pub(super) async fn find(host: &Handle, instance: &str) -> Result<Found, HealthError> {
    let name = netns_name(instance);
    let (outer, alive) = (own_device(host, instance).await?, netns::is_alive(&name));
    let outer = match (outer, alive) {
        (None, false) => return Ok(Found::Nothing),
        (None, true) => return Ok(Found::Remains(Fault::VethGone)),
        (Some(_), false) => {
            let path = netns::path_of(&name)?;
            return Ok(Found::Remains(Fault::NetnsGone(path)));
        }
        (Some(outer), true) => outer,
    };
    let netns = NetNs::open(&name)?;
    let inside = netns::netlink_in(&netns)?;
    let inner = link::by_name(&inside, INNER_DEVICE)
        .await?
        .filter(|inner| are_peers(inner, &outer));
    Ok(match inner {
        None => Found::Remains(Fault::PeerGone),
        Some(inner) => Found::Living(Pair {
            netns,
            inside,
            outer,
            inner,
        }),
    })
}

fn are_peers(a: &Link, b: &Link) -> bool {
    let leads_to = |from: &Link, to: &Link| from.peer.is_some_and(|peer| peer.index == to.index);
    leads_to(a, b) && leads_to(b, a)
}

/// Makes the namespace and the pair, both ends down. What it made before a failure is left to
/// [`remove`].
///
/// Both ends are made inside the namespace; the host's gets its name and mark there and is then
/// moved out. So the host never sees it without the mark, and a crash before that leaves only a
/// namespace.
pub(super) async fn create(
    host: &Handle,
    instance: &str,
    blueprint: &Blueprint,
) -> Result<Pair, HealthError> {
    let netns = NetNs::create(&netns_name(instance))?;
    netns.run_in(|| configure_namespace(blueprint.ipv6))??;
    let inside = netns::netlink_in(&netns)?;
    // The peer gets the lower number, 2, which the host's end then hardly ever gets. Were both
    // equal, the kernel would take its time, up to a second, to let packets pass.
    let pair = VethPair {
        name: DEVICE,
        mac: blueprint.host_mac,
        peer_name: INNER_DEVICE,
        peer_mac: blueprint.mac,
        mtu: blueprint.mtu,
    };
    link::create_veth(&inside, &pair).await?;
    let outer = existing(&inside, DEVICE).await?;
    link::set_alias(&inside, &outer, &alias(instance)).await?;
    link::move_to_netns(&inside, &outer, netns::own()?.as_fd()).await?;
    Ok(Pair {
        outer: existing(host, DEVICE).await?,
        inner: existing(&inside, INNER_DEVICE).await?,
        netns,
        inside,
    })
}

async fn existing(handle: &Handle, name: &'static str) -> Result<Link, HealthError> {
    link::by_name(handle, name)
        .await?
        .ok_or_else(|| HealthError::NoSuchDevice(name.to_owned()))
}

/// Settings that the namespace's devices start with.
fn configure_namespace(ipv6: bool) -> Result<(), SysctlError> {
    let disable = if ipv6 { "0" } else { "1" };
    for setting in [
        Setting::new("ipv6/conf/default/disable_ipv6", disable),
        // Mode 1 makes no link-local address, for which there is no use.
        Setting::new("ipv6/conf/default/addr_gen_mode", "1"),
    ] {
        // A kernel without IPv6 has neither.
        if sysctl::read(&setting.key)?.is_some() {
            setting.apply()?;
        }
    }
    Ok(())
}

/// Removes whatever there is of this instance's pair.
pub(super) async fn remove(host: &Handle, instance: &str) -> Result<(), HealthError> {
    // The device first: the namespace may live on for a while, as long as a socket is in it.
    let device = remove_device(host, instance).await;
    netns::remove(&netns_name(instance))?;
    device.map(drop)
}

/// Removes the host's end, and with it the other. Returns whether it was there.
pub(super) async fn remove_device(host: &Handle, instance: &str) -> Result<bool, HealthError> {
    match own_device(host, instance).await? {
        Some(device) => Ok(link::delete(host, &device).await?),
        None => Ok(false),
    }
}
