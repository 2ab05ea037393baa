//! This node's own entry: where it comes from, and that it is registered by us.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;
use std::{fmt, fs};

use anyhow::Context as _;
use health_net::address::is_for_others;
use health_net::netlink::{self, Handle};
use health_net::{link, route};
use health_registry::config::{Config, RegistrySpec};
use health_registry::nodes::validate::{Claims, Entry};
use health_registry::nodes::{self, Node, NodeSet, Registry};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::state::AgentSource;

/// Name of the file in the state folder that says where this node is registered.
const REGISTERED_FILE: &str = "registered.json";
/// Addresses of nobody (RFC 5737, RFC 3849): the way to them is the way out.
const ELSEWHERE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

/// This node as the flags describe it, for registries in which nodes register themselves; `None` for
/// the others.
pub(super) async fn from_settings(config: &Config) -> anyhow::Result<Option<Node>> {
    if !config.registry.is_written_by_nodes() {
        return Ok(None);
    }
    let addresses = match config.node_addresses.as_slice() {
        [] => uplink_addresses(config).await?,
        given => given.to_vec(),
    };
    let node = Node {
        name: config.node_name.clone(),
        cluster: config.cluster_name.clone(),
        addresses,
        secondary_addresses: Vec::new(),
        pod_cidrs: config.pod_cidrs.clone(),
        health_addresses: Vec::new(),
    };
    let entry = Entry::from_node(&node, "the settings");
    let node = Claims::default()
        .take(entry, &config.cluster_name)
        .context("this node cannot be registered; correct --node-address and --pod-cidr")?;
    Ok(Some(node))
}

/// The first address of each family of the uplinks: those that are named, or those with the way out.
async fn uplink_addresses(config: &Config) -> anyhow::Result<Vec<IpAddr>> {
    let netlink = netlink::open()?;
    let exits = match config.devices.as_slice() {
        [] => exits(&netlink).await?,
        _ => Vec::new(),
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for (link, carried) in link::list_with_addresses(&netlink).await? {
        if !config.devices.contains(&link.name) && !exits.contains(&link.index) {
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
        "this node's address cannot be found: no device with a default route has one; give \
         --node-address or --device"
    );
    Ok(addresses)
}

/// Numbers of the devices that lead out.
async fn exits(netlink: &Handle) -> anyhow::Result<Vec<u32>> {
    let mut devices = Vec::new();
    for address in ELSEWHERE.iter().filter_map(|text| text.parse().ok()) {
        let route = route::matching(netlink, address).await?;
        devices.extend(route.and_then(|route| route.device));
    }
    Ok(devices)
}

/// This node's entry. `None` where it may still come; fails where it will not by itself.
pub(super) fn known(registry: &dyn Registry, config: &Config) -> anyhow::Result<Option<Node>> {
    let own = find(&registry.watch().borrow(), config);
    if own.is_none() && matches!(config.registry, RegistrySpec::File(_)) {
        anyhow::bail!(
            "{} has no node {}/{}: add it, or give this node's name with --node-name and --cluster-name",
            config.registry,
            config.cluster_name,
            config.node_name
        );
    }
    Ok(own)
}

/// Waits for this node's entry, and tells why it has to.
pub(super) async fn wait(
    registry: &dyn Registry,
    config: &Config,
    source: &AgentSource,
) -> anyhow::Result<Node> {
    let mut nodes = registry.watch();
    let mut told = None;
    loop {
        let set = nodes.borrow_and_update().clone();
        if let Some(own) = find(&set, config) {
            source.set_waiting(None);
            return Ok(own);
        }
        let waiting = waiting_for(&set, config);
        if told.as_ref() != Some(&waiting) {
            warn!(node = %config.node_name, "{waiting}");
            source.set_waiting(Some(waiting.clone()));
            told = Some(waiting);
        }
        nodes
            .changed()
            .await
            .context("the node registry ended before it had this node")?;
    }
}

fn waiting_for(set: &NodeSet, config: &Config) -> String {
    let name = format!("{}/{}", config.cluster_name, config.node_name);
    let state = set.sources.first();
    let stale = state.and_then(|state| state.stale.as_ref());
    let reason = stale.map(|stale| stale.reason.clone()).or_else(|| {
        let rejected = &state?.rejected;
        let own = rejected
            .iter()
            .find(|r| r.key.ends_with(&config.node_name))?;
        Some(format!("{} is left out: {}", own.key, own.reason))
    });
    match reason {
        Some(reason) => format!("waiting for node {name} in {}: {reason}", config.registry),
        None => format!("waiting for node {name} in {}", config.registry),
    }
}

fn find(set: &NodeSet, config: &Config) -> Option<Node> {
    let is_own =
        |node: &&Node| node.name == config.node_name && node.cluster == config.cluster_name;
    let mut own = set.nodes.iter().find(is_own)?.clone();
    if !matches!(config.registry, RegistrySpec::File(_)) {
        // Those that we told it ourselves must not bind us.
        own.health_addresses.clear();
    }
    Some(own)
}

/// Why this node has no health endpoint; `None` if it is to have one.
pub(super) fn hosts_only(config: &Config, own: &Node) -> Option<HostsOnly> {
    if !config.endpoint_health {
        Some(HostsOnly::Setting)
    } else if own.pod_cidrs.is_empty() {
        Some(HostsOnly::NoPodCidr)
    } else {
        None
    }
}

/// Why a node takes no part in the health of endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostsOnly {
    /// It is told not to.
    Setting,
    /// There is nothing to give an endpoint an address from.
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

/// Whether the registry gives this node a pod CIDR, as Kubernetes does some time after it registers a node.
pub(super) fn has_pod_cidr(set: &NodeSet, own: &Node) -> bool {
    let is_own = |node: &&Node| node.name == own.name && node.cluster == own.cluster;
    let now = set.nodes.iter().find(is_own);
    now.is_some_and(|now| !now.pod_cidrs.is_empty())
}

/// The node with what is known of its health endpoint now.
pub(super) fn with_health_addresses(own: &Node, addresses: &[IpAddr]) -> Node {
    Node {
        health_addresses: addresses.to_vec(),
        ..own.clone()
    }
}

/// Where this node is registered.
#[derive(Debug, Serialize, Deserialize)]
struct RegistrationNote {
    registry: RegistrySpec,
    cluster: String,
    node: String,
}

/// Notes that this node is going to be registered, for [`forget`].
pub(super) fn remember(config: &Config) -> anyhow::Result<()> {
    if !config.registry.is_written_by_nodes() {
        return Ok(());
    }
    let registered = RegistrationNote {
        registry: config.registry.clone(),
        cluster: config.cluster_name.clone(),
        node: config.node_name.clone(),
    };
    let path = config.location.state_dir.join(REGISTERED_FILE);
    let json =
        serde_json::to_vec(&registered).context("cannot write where this node is registered")?;
    fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))
}

/// Deletes this node's record, if an earlier agent registered it; what was removed. After a failure
/// the next try knows of it.
pub(super) async fn forget(state_dir: &Path) -> anyhow::Result<Vec<String>> {
    let path = state_dir.join(REGISTERED_FILE);
    let json = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        json => json.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let registered: RegistrationNote = serde_json::from_slice(&json)
        .with_context(|| format!("{} is damaged; delete it", path.display()))?;
    let mut removed = Vec::new();
    let name = format!("{}/{}", registered.cluster, registered.node);
    match nodes::deregister(&registered.registry, &registered.cluster, &registered.node).await {
        Ok(true) => removed.push(format!("record of {name} in {}", registered.registry)),
        Ok(false) => {}
        Err(reason) => anyhow::bail!(
            "the record of {name} stays in {}; repeat when it is back: {reason}",
            registered.registry
        ),
    }
    fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    removed.push(format!("file {}", path.display()));
    Ok(removed)
}
