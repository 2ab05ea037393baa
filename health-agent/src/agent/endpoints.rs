//! The workload endpoints: their manager, and the parts that build their datapath.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use health_common::endpoint::EndpointInfo;
use health_datapath::{Workload, pin_folder};
use health_endpoint::enforcement::{self, Enforcer, Surroundings};
use health_endpoint::identities::AllocatedIdentities;
use health_endpoint::manager::{self, Manager, ManagerOptions, Parts, Survey};
use health_endpoint::workload::{HostDevices, SavedEndpoint, StateDir};
use health_model::api::PolicyLag;
use health_model::ipam::NodeIpam;
use health_net::netlink::Handle;
use health_policy::PolicySettings;
use health_registry::identity::IdentityAllocator;
use health_registry::nodes::{Node, Registry};
use health_settings::Settings;
use jiff::Timestamp;
use tokio::sync::watch;
use tracing::warn;

use super::deletions;
use super::node::NodeDatapath;
use super::watch::EndpointOutcome;

/// Maximum number of concurrent regenerations.
const PARALLEL: usize = 4;

/// Surveys the endpoints of former agents. Nothing remains of those that are dead.
pub(super) async fn survey(config: &Settings, netlink: &Handle) -> anyhow::Result<Survey> {
    let location = &config.location;
    // Another agent's endpoints must not be touched.
    pin_folder::require_unused(location)?;
    let devices = HostDevices::new(netlink.clone(), &location.instance);
    let states = states(&location.state_dir);
    if let Err(error) = deletions::announce(location, &states) {
        warn!(%error, "cannot read the queued endpoint deletions");
    }
    manager::survey(&states, &devices)
        .await
        .context("cannot take over the endpoints of the previous agent")
}

/// Starts to manage endpoints, beginning with those of the survey.
pub(super) fn start(
    config: &Settings,
    own: &Node,
    netlink: &Handle,
    node: &NodeDatapath,
    survey: Survey,
    identities: Arc<IdentityAllocator>,
    lag: watch::Sender<Option<PolicyLag>>,
) -> anyhow::Result<(Manager, Enforcer)> {
    let location = &config.location;
    let ipam = NodeIpam::new(
        &own.pod_cidrs,
        &own.addresses,
        &config.endpoints.ipam_excludes,
        config.endpoints.ipam_cooling_time,
    )?;
    let options = ManagerOptions {
        states: states(&location.state_dir),
        ipam,
        node_addresses: own.addresses.clone(),
        health: node.health_report(&EndpointOutcome::default()),
        mtu: node.mtu(),
        parallel: PARALLEL,
    };
    let enforcer = Enforcer::open(
        &location.state_dir,
        enforcement::Parts {
            settings: PolicySettings {
                mode: config.policy.policy_mode,
                allow_localhost: config.policy.policy_allow_localhost,
            },
            allow_dhcpv6: config.policy.policy_allow_dhcpv6,
            allocator: identities.clone(),
            datapath: node.shared_datapath(),
            node_addresses: own.addresses.clone(),
            lag,
        },
    )?;
    let parts = Parts {
        devices: Arc::new(HostDevices::new(netlink.clone(), &location.instance)),
        identities: Arc::new(AllocatedIdentities::by(identities)),
        regenerator: Arc::new(enforcer.clone()),
        clock: Timestamp::now,
    };
    Ok((Manager::start(options, parts, survey), enforcer))
}

fn states(state_dir: &Path) -> StateDir {
    StateDir::of(state_dir)
}

/// A former agent's endpoint as the programs know it, unless the maps know better.
pub(super) fn workload(saved: &SavedEndpoint) -> Option<Workload> {
    Some(Workload {
        device: saved.device.clone(),
        addresses: saved.addresses().collect(),
        info: EndpointInfo {
            ifindex: saved.ifindex?,
            identity: saved.identity.0,
            id: saved.id,
            mac: saved.mac.0,
            host_mac: saved.host_mac.0,
            ..EndpointInfo::default()
        },
    })
}

/// The endpoints' environment.
pub(super) fn surroundings(
    own: &Node,
    node: &NodeDatapath,
    registry: &dyn Registry,
    netlink: Handle,
    services: watch::Receiver<Arc<BTreeSet<IpAddr>>>,
) -> Surroundings {
    let host = own.addresses.iter().chain(&own.secondary_addresses);
    Surroundings {
        own: own.full_name(),
        host: host.copied().collect(),
        routes: Box::new(netlink),
        host_prefixes: None,
        services,
        health: node.health_addresses(),
        nodes: registry.watch(),
        has_heard: false,
    }
}
