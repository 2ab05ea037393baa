//! Finds, creates and removes the namespace and the veth pair as a unit.

use std::os::fd::AsFd;

use health_net::KernelError;
use health_net::link::{self, Link, VethPair};
use health_net::mac::MacAddr;
use health_net::netlink::Handle;
use health_net::netns::{self, NetNs};
use health_net::sysctl::{self, Setting};

use super::{DEVICE, End, Fault, HealthError, INNER_DEVICE, State};

/// A namespace with one end of a veth pair whose other end is on the host.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) netns: NetNs,
    /// Netlink connection in the namespace.
    pub(super) inside: Handle,
    /// The host's end.
    pub(super) outer: Link,
    /// The endpoint's end.
    pub(super) inner: Link,
}

/// The existing state of a pair.
pub(super) enum PairState {
    Nothing,
    /// Remains of a pair that cannot be completed again.
    Remains {
        /// The fault.
        fault: Fault,
        /// Whether one of the devices still exists. The endpoint's addresses are then in use by the endpoint itself.
        device_stands: bool,
    },
    Living(Pair),
}

/// The intended state of a new pair.
pub(super) struct Blueprint {
    pub(super) mac: MacAddr,
    pub(super) host_mac: MacAddr,
    pub(super) mtu: u32,
    pub(super) ipv6: bool,
}

/// Prefix of the device alias of every agent.
pub(crate) const ALIAS_PREFIX: &str = "health-agent/";

/// Returns the alias that marks the host's end as this instance's.
pub(super) fn alias(instance: &str) -> String {
    format!("{ALIAS_PREFIX}{instance}")
}

/// Whether a device belongs to an endpoint of any agent.
pub(super) fn is_an_agents(link: &Link) -> bool {
    let alias = link.alias.as_deref().unwrap_or_default();
    link.name == DEVICE || alias.starts_with(ALIAS_PREFIX)
}

/// Returns the name of this instance's namespace.
pub(super) fn netns_name(instance: &str) -> String {
    format!("health-{instance}")
}

/// Returns the host's end, if it exists and belongs to this instance.
pub(super) async fn own_device(host: &Handle, instance: &str) -> Result<Option<Link>, HealthError> {
    match link::by_name(host, DEVICE).await? {
        Some(device) if device.alias.as_deref() != Some(&alias(instance)) => {
            let alias = device.alias.unwrap_or_default();
            Err(HealthError::ForeignDevice { alias })
        }
        own => Ok(own),
    }
}

/// Finds this instance's pair.
pub(super) async fn find(
    host: &Handle,
    instance: &str,
    saved: Option<&State>,
) -> Result<PairState, HealthError> {
    let outer = own_device(host, instance).await?;
    let name = netns_name(instance);
    if !netns::is_alive(&name) {
        return Ok(match outer {
            None => PairState::Nothing,
            Some(_) => PairState::Remains {
                fault: Fault::NetnsGone(netns::path_of(&name)?),
                device_stands: true,
            },
        });
    }
    let netns = NetNs::open(&name)?;
    let inside = netns::netlink_in(&netns)?;
    let inner = link::by_name(&inside, INNER_DEVICE).await?;
    if !is_ours(&netns, inner.as_ref(), saved) {
        return Err(HealthError::ForeignNetns(netns.path().to_owned()));
    }
    Ok(match (outer, inner) {
        (Some(outer), Some(inner)) if are_peers(&inner, &outer) => PairState::Living(Pair {
            netns,
            inside,
            outer,
            inner,
        }),
        (Some(_), _) => PairState::Remains {
            fault: Fault::PeerGone,
            device_stands: true,
        },
        // One end of a veth pair cannot exist alone: the host's end has been renamed and is in use under its new name.
        (None, inner) => PairState::Remains {
            fault: Fault::VethGone,
            device_stands: inner.is_some(),
        },
    })
}

/// Whether a namespace with our name is ours, which the state tells, as it is saved before the namespace is created.
fn is_ours(netns: &NetNs, inner: Option<&Link>, saved: Option<&State>) -> bool {
    inner.is_some() || saved.is_some_and(|state| state.netns == netns.path())
}

/// Whether a namespace with our name is foreign.
pub(super) async fn netns_is_foreign(
    instance: &str,
    saved: Option<&State>,
) -> Result<bool, HealthError> {
    let name = netns_name(instance);
    if !netns::is_alive(&name) {
        return Ok(false);
    }
    let netns = NetNs::open(&name)?;
    let inner = link::by_name(&netns::netlink_in(&netns)?, INNER_DEVICE).await?;
    Ok(!is_ours(&netns, inner.as_ref(), saved))
}

fn are_peers(a: &Link, b: &Link) -> bool {
    let leads_to = |from: &Link, to: &Link| from.peer.is_some_and(|peer| peer.index == to.index);
    leads_to(a, b) && leads_to(b, a)
}

/// Creates the namespace and the pair, with both ends down. If this fails, the caller must call [`remove`] to remove
/// what was created.
///
/// Both ends are created inside the namespace. The host's end gets its name and mark there and is then moved out, so
/// the host never sees it without the mark. A crash before the move leaves only a namespace behind.
pub(super) async fn create(
    host: &Handle,
    instance: &str,
    blueprint: &Blueprint,
) -> Result<Pair, HealthError> {
    let netns = NetNs::create(&netns_name(instance))?;
    netns.run_in(|| configure_namespace(blueprint.ipv6))??;
    let inside = netns::netlink_in(&netns)?;
    // The peer gets the lower ifindex, 2, which the host's end then almost never gets. If both ifindexes were equal,
    // the kernel would take up to a second to let packets pass.
    let pair = VethPair {
        name: DEVICE,
        mac: blueprint.host_mac,
        peer_name: INNER_DEVICE,
        peer_mac: blueprint.mac,
        mtu: blueprint.mtu,
    };
    link::create_veth(&inside, &pair).await?;
    let outer = existing(&inside, End::Outer).await?;
    link::set_alias(&inside, &outer, &alias(instance)).await?;
    link::move_to_netns(&inside, &outer, netns::own()?.as_fd()).await?;
    Ok(Pair {
        outer: existing(host, End::Outer).await?,
        inner: existing(&inside, End::Inner).await?,
        netns,
        inside,
    })
}

/// Returns an end of the pair that was just created.
async fn existing(handle: &Handle, end: End) -> Result<Link, HealthError> {
    let found = link::by_name(handle, end.device()).await?;
    found.ok_or(HealthError::Unrepaired(match end {
        End::Outer => Fault::VethGone,
        End::Inner => Fault::PeerGone,
    }))
}

/// Sets the defaults for devices in the namespace.
fn configure_namespace(ipv6: bool) -> Result<(), KernelError> {
    let disable = if ipv6 { "0" } else { "1" };
    for setting in [
        Setting::new("ipv6/conf/default/disable_ipv6", disable),
        // Mode 1 creates no link-local address; the endpoint needs none.
        Setting::new("ipv6/conf/default/addr_gen_mode", "1"),
    ] {
        // A kernel without IPv6 has neither setting.
        if sysctl::read(&setting.key)?.is_some() {
            setting.apply()?;
        }
    }
    Ok(())
}

/// Removes all parts of this instance's pair that exist.
pub(super) async fn remove(host: &Handle, instance: &str) -> Result<(), HealthError> {
    // Remove the device first: the namespace lives on while a socket in it is open.
    let device = remove_device(host, instance).await;
    let inner = remove_inner_device(instance).await;
    netns::remove(&netns_name(instance))?;
    device.map(drop).and(inner)
}

/// Removes the endpoint's end, and with it the host's end even if that was renamed.
async fn remove_inner_device(instance: &str) -> Result<(), HealthError> {
    let name = netns_name(instance);
    if !netns::is_alive(&name) {
        return Ok(());
    }
    let inside = netns::netlink_in(&NetNs::open(&name)?)?;
    if let Some(inner) = link::by_name(&inside, INNER_DEVICE).await? {
        link::delete(&inside, &inner).await?;
    }
    Ok(())
}

/// Removes the host's end, and with it the endpoint's. Returns whether it existed.
pub(super) async fn remove_device(host: &Handle, instance: &str) -> Result<bool, HealthError> {
    match own_device(host, instance).await? {
        Some(device) => Ok(link::delete(host, &device).await?),
        None => Ok(false),
    }
}
