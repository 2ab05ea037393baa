//! This node's own entry: where it comes from, and how it changes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use health_net::address::is_for_others;
use health_net::netlink::{self, Handle};
use health_net::{link, route};
use health_registry::nodes::validate::{Claims, Entry};
use health_registry::nodes::{Node, NodeSet, Registry};
use health_settings::{RegistrySpec, Settings};
use tokio::time::{Instant, sleep};
use tracing::warn;

use super::source::AgentSource;

/// How long to wait for the registry before using the entry that an earlier agent saved.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for a correction if the registry's entry contradicts this host. A node that comes up with new
/// addresses soon reports them to its cluster.
const CORRECTION_PATIENCE: Duration = Duration::from_secs(30);
/// Time between two checks of this host's addresses while an entry does not match them.
const LOOK_PERIOD: Duration = Duration::from_millis(500);
/// Documentation addresses (RFC 5737, RFC 3849), which belong to no host: the routes to them lead out of this host.
const ELSEWHERE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

/// This node as described by the settings, for registries in which nodes register themselves; `None` for other
/// registries.
pub(super) async fn from_settings(config: &Settings) -> anyhow::Result<Option<Node>> {
    if !config.node.registry.is_written_by_nodes() {
        return Ok(None);
    }
    let addresses = match config.node.node_addresses.as_slice() {
        [] => uplink_addresses(config).await?,
        given => given.to_vec(),
    };
    let node = Node {
        name: config.node.node_name.clone(),
        cluster: config.node.cluster_name.clone(),
        addresses,
        secondary_addresses: Vec::new(),
        pod_cidrs: config.endpoints.pod_cidrs.clone(),
        health_addresses: Vec::new(),
        labels: BTreeMap::new(),
    };
    let entry = Entry::from_node(&node, "the settings");
    let node = Claims::default()
        .take(entry, &config.node.cluster_name)
        .context("this node cannot be registered; correct --node-address and --pod-cidr")?;
    Ok(Some(node))
}

/// The first address of each family on the uplinks: the configured devices, or those with a route out of this host.
async fn uplink_addresses(config: &Settings) -> anyhow::Result<Vec<IpAddr>> {
    let netlink = netlink::open()?;
    let exits = match config.node.devices.as_slice() {
        [] => exits(&netlink).await?,
        _ => Vec::new(),
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for (link, carried) in link::list_with_addresses(&netlink).await? {
        if !config.node.devices.contains(&link.name) && !exits.contains(&link.index) {
            continue;
        }
        let usable = carried.iter().filter(|a| !a.tentative).map(|a| a.address);
        for address in usable.filter(is_for_others) {
            if !addresses
                .iter()
                .any(|known| known.is_ipv4() == address.is_ipv4())
            {
                addresses.push(address);
            }
        }
    }
    anyhow::ensure!(
        !addresses.is_empty(),
        "cannot find this node's address: no device with a default route has one; set --node-address or --device"
    );
    Ok(addresses)
}

/// Interface indices of the devices with a route out of this host.
async fn exits(netlink: &Handle) -> anyhow::Result<Vec<u32>> {
    let mut devices = Vec::new();
    for address in ELSEWHERE.iter().filter_map(|text| text.parse().ok()) {
        let route = route::matching(netlink, address).await?;
        devices.extend(route.and_then(|route| route.device));
    }
    Ok(devices)
}

/// Returns this node's entry, or `None` if it may still arrive. Fails if it will not arrive without intervention.
pub(super) fn known(registry: &dyn Registry, config: &Settings) -> anyhow::Result<Option<Node>> {
    let is_reported = !matches!(config.node.registry, RegistrySpec::Kubernetes(_));
    let own = find(&registry.watch().borrow(), config).filter(|_| is_reported);
    if own.is_none() && matches!(config.node.registry, RegistrySpec::File(_)) {
        anyhow::bail!(
            "{} has no node {}/{}: add it, or give this node's name with --node-name and --cluster-name",
            config.node.registry,
            config.node.cluster_name,
            config.node.node_name
        );
    }
    Ok(own)
}

/// Waits for this node's entry and reports the reason for the wait. Uses an entry saved by an earlier agent only if it
/// matches this host and the registry has not answered for a while. If the registry's own entry does not match, waits a
/// while for a correction; after that, accepts the entry and leaves it to its users to report the error.
pub(super) async fn wait(
    registry: &dyn Registry,
    config: &Settings,
    netlink: &Handle,
    source: &AgentSource,
) -> anyhow::Result<Node> {
    let mut nodes = registry.watch();
    let begun = Instant::now();
    let mut unfit_since = None;
    let mut reported = None;
    loop {
        let set = nodes.borrow_and_update().clone();
        let kept_as_of = kept_as_of(&set);
        let mut waiting = waiting_for(&set, config);
        if let Some(own) = find(&set, config) {
            let misfit = misfit(&own, config, netlink).await?;
            let is_taken = match (&misfit, kept_as_of) {
                (None, None) => true,
                (None, Some(_)) => begun.elapsed() >= ANSWER_PATIENCE,
                (Some(_), None) => {
                    let since = unfit_since.get_or_insert_with(Instant::now);
                    since.elapsed() >= CORRECTION_PATIENCE
                }
                (Some(_), Some(_)) => false,
            };
            if is_taken {
                if let Some(as_of) = kept_as_of {
                    warn!(%as_of, "the registry is not responding; using this node's saved entry");
                }
                source.set_waiting(None);
                return Ok(own);
            }
            if let Some(misfit) = misfit {
                let whose = if kept_as_of.is_some() {
                    "saved entry"
                } else {
                    "entry"
                };
                waiting = format!("{waiting}; the {whose} does not match this host: {misfit}");
            }
        }
        if reported.as_ref() != Some(&waiting) {
            warn!(node = %config.node.node_name, "{waiting}");
            source.set_waiting(Some(waiting.clone()));
            reported = Some(waiting);
        }
        tokio::select! {
            changed = nodes.changed() => {
                changed.context("the node registry closed before this node appeared in it")?;
            }
            () = sleep(LOOK_PERIOD) => {}
        }
    }
}

/// When the entries from this cluster's registry were last up to date, if the registry is unreachable now.
pub(super) fn kept_as_of(set: &NodeSet) -> Option<jiff::Timestamp> {
    let state = set.sources.first()?;
    state.stale.as_ref().map(|stale| stale.since)
}

/// Why an agent on this host cannot use this entry; `None` if it can.
async fn misfit(own: &Node, config: &Settings, netlink: &Handle) -> anyhow::Result<Option<String>> {
    if let Some(address) = uncarried(&own.addresses, netlink).await? {
        return Ok(Some(format!(
            "no interface has this node's address {address}"
        )));
    }
    let masquerade = config
        .masquerade
        .of_node(&own.addresses, &own.pod_cidrs)
        .err();
    Ok(masquerade.map(|error| error.to_string()))
}

/// The first of these addresses that no device has.
async fn uncarried(
    addresses: &[IpAddr],
    netlink: &Handle,
) -> Result<Option<IpAddr>, health_net::KernelError> {
    let carrying = link::carrying(netlink, addresses).await?;
    let is_carried = |address: &IpAddr| {
        let mut carried = carrying.iter();
        carried.any(|(_, carried)| carried.contains(address))
    };
    Ok(addresses
        .iter()
        .copied()
        .find(|address| !is_carried(address)))
}

fn waiting_for(set: &NodeSet, config: &Settings) -> String {
    let name = config.node.full_name();
    let state = set.sources.first();
    let stale = state.and_then(|state| state.stale.as_ref());
    let reason = stale.map(|stale| stale.reason.clone()).or_else(|| {
        let rejected = &state?.rejected;
        let own = rejected
            .iter()
            .find(|r| r.key.ends_with(&config.node.node_name))?;
        Some(format!("{} is left out: {}", own.key, own.reason))
    });
    match reason {
        Some(reason) => format!(
            "waiting for node {name} in {}: {reason}",
            config.node.registry
        ),
        None => format!("waiting for node {name} in {}", config.node.registry),
    }
}

fn find(set: &NodeSet, config: &Settings) -> Option<Node> {
    let is_own = |node: &&Node| {
        node.name == config.node.node_name && node.cluster == config.node.cluster_name
    };
    let mut own = set.nodes.iter().find(is_own)?.clone();
    if !matches!(config.node.registry, RegistrySpec::File(_)) {
        // Ignores addresses that this agent published there itself.
        own.health_addresses.clear();
    }
    Some(own)
}

/// Why this node has no health endpoint; `None` if it should have one.
pub(super) fn hosts_only(config: &Settings, own: &Node) -> Option<HostsOnly> {
    if !config.mesh.endpoint_health {
        Some(HostsOnly::Setting)
    } else if own.pod_cidrs.is_empty() {
        Some(HostsOnly::NoPodCidr)
    } else {
        None
    }
}

/// Why a node does not take part in endpoint health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostsOnly {
    /// The settings disable endpoint health.
    Setting,
    /// The node has no pod CIDR from which to take an endpoint address.
    NoPodCidr,
}

impl fmt::Display for HostsOnly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setting => "--endpoint-health is off",
            Self::NoPodCidr => "this node has no pod CIDR",
        })
    }
}

/// How this node's entry has changed since the agent started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OwnChange {
    /// No change that concerns the agent.
    None,
    /// It has these additional addresses.
    MoreAddresses(Vec<IpAddr>),
    /// Its addresses are now exactly these, and the agent cannot switch to them.
    OtherAddresses(Vec<IpAddr>),
    /// It now has a pod CIDR for endpoints, but had none before.
    PodCidr,
}

/// Compares this node's entry with the one that the agent started with. Ignores entries that nodes register themselves,
/// because they come from the agent, and outdated entries from before the registry became unreachable.
pub(super) fn change(
    set: &NodeSet,
    registry: &RegistrySpec,
    own: &Node,
    has_services: bool,
) -> OwnChange {
    if registry.is_written_by_nodes() || kept_as_of(set).is_some() {
        return OwnChange::None;
    }
    let is_own = |node: &&Node| node.name == own.name && node.cluster == own.cluster;
    let Some(now) = set.nodes.iter().find(is_own) else {
        return OwnChange::None;
    };
    if own.pod_cidrs.is_empty() && !now.pod_cidrs.is_empty() {
        return OwnChange::PodCidr;
    }
    // Flows are masqueraded as the first address of their family; service flows are masqueraded even if no setting
    // enables masquerading.
    let is_as_masqueraded = [IpAddr::is_ipv4 as fn(&IpAddr) -> bool, IpAddr::is_ipv6]
        .into_iter()
        .all(|is_of_family| {
            let first = |node: &Node| node.addresses.iter().copied().find(is_of_family);
            match (first(own), first(now)) {
                (None, Some(_)) => !has_services,
                (before, now) => before == now,
            }
        });
    let is_there = |address: &IpAddr| now.addresses.contains(address);
    if !is_as_masqueraded || !own.addresses.iter().all(is_there) {
        return OwnChange::OtherAddresses(now.addresses.clone());
    }
    let more: Vec<_> = now
        .addresses
        .iter()
        .copied()
        .filter(|address| !own.addresses.contains(address))
        .collect();
    match more.is_empty() {
        true => OwnChange::None,
        false => OwnChange::MoreAddresses(more),
    }
}

/// Whether a device of this host has each of these addresses.
pub(super) async fn is_here(
    addresses: &[IpAddr],
    netlink: &Handle,
) -> Result<bool, health_net::KernelError> {
    Ok(uncarried(addresses, netlink).await?.is_none())
}

/// The node with the currently known addresses of its health endpoint.
pub(super) fn with_health_addresses(own: &Node, addresses: &[IpAddr]) -> Node {
    Node {
        health_addresses: addresses.to_vec(),
        ..own.clone()
    }
}

#[cfg(test)]
mod tests {
    use health_registry::nodes::{LastHeard, SourceState, Staleness};

    use super::*;

    fn node(addresses: &[&str], pod_cidrs: &[&str]) -> Node {
        Node {
            name: "n1".to_owned(),
            cluster: "default".to_owned(),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            secondary_addresses: Vec::new(),
            pod_cidrs: pod_cidrs.iter().map(|text| text.parse().unwrap()).collect(),
            health_addresses: Vec::new(),
            labels: BTreeMap::new(),
        }
    }

    fn set(nodes: Vec<Node>, is_stale: bool) -> NodeSet {
        let heard = LastHeard::now();
        NodeSet {
            nodes,
            sources: vec![SourceState {
                registry: String::new(),
                cluster: "default".to_owned(),
                stale: is_stale.then(|| Staleness {
                    since: heard.time(),
                    reason: "away".to_owned(),
                }),
                heard,
                rejected: Vec::new(),
            }],
        }
    }

    #[test]
    fn changes_of_this_nodes_entry_are_distinguished() {
        let own = node(&["10.0.0.1"], &["10.1.0.0/24"]);
        let ips = |texts: &[&str]| node(texts, &[]).addresses;
        let more = |texts: &[&str]| OwnChange::MoreAddresses(ips(texts));
        let other = |texts: &[&str]| OwnChange::OtherAddresses(ips(texts));
        for (addresses, expected) in [
            (&["10.0.0.1"][..], OwnChange::None),
            (&["10.0.0.1", "fd00::1"], more(&["fd00::1"])),
            (&["fd00::1", "10.0.0.1"], more(&["fd00::1"])),
            (&["10.0.0.1", "10.0.0.2"], more(&["10.0.0.2"])),
            (&["10.0.0.2", "10.0.0.1"], other(&["10.0.0.2", "10.0.0.1"])),
            (&["10.0.0.2"], other(&["10.0.0.2"])),
            (&["fd00::1"], other(&["fd00::1"])),
        ] {
            let now = node(addresses, &["10.1.0.0/24"]);
            let fresh = set(vec![now.clone()], false);
            for registry in ["kubernetes", "file:/nodes.yaml"] {
                let registry = registry.parse().unwrap();
                let found = |set: &NodeSet| change(set, &registry, &own, false);
                assert_eq!(found(&fresh), expected, "{addresses:?}");
                assert_eq!(found(&set(vec![now.clone()], true)), OwnChange::None);
                assert_eq!(found(&set(Vec::new(), false)), OwnChange::None);
            }
            // Either the agent wrote this entry itself, or another process did so in its name.
            let etcd = "etcd:http://192.0.2.1:2379".parse().unwrap();
            assert_eq!(change(&fresh, &etcd, &own, false), OwnChange::None);
        }
        let kubernetes = "kubernetes".parse().unwrap();
        let dual = set(
            vec![node(&["10.0.0.1", "fd00::1"], &["10.1.0.0/24"])],
            false,
        );
        let serving = change(&dual, &kubernetes, &own, true);
        assert_eq!(serving, other(&["10.0.0.1", "fd00::1"]));
        let bare = node(&["10.0.0.1"], &[]);
        let now = set(vec![own], false);
        assert_eq!(change(&now, &kubernetes, &bare, false), OwnChange::PodCidr);
    }
}
