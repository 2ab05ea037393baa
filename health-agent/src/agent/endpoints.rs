//! The workload endpoints: their manager, and the parts that build their datapath.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use health_datapath::pin_folder;
use health_endpoint::enforcement::{Enforcer, EnforcerOptions, Surroundings};
use health_endpoint::identities::AllocatedIdentities;
use health_endpoint::manager::{self, Manager, ManagerOptions, Survey};
use health_endpoint::pods::PodLabels;
use health_endpoint::workload::{HostDevices, StateDir};
use health_model::api::PolicyLag;
use health_model::ipam::NodeIpam;
use health_model::task::AbortOnDrop;
use health_policy::PolicySettings;
use health_registry::identity::{EndpointDetails, IdentityAllocator};
use health_registry::nodes::Registry;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::deletions;
use super::node::NodeDatapath;
use super::outcome::EndpointOutcome;
use super::start_context::StartContext;

/// Maximum number of concurrent regenerations.
const PARALLEL: usize = 4;

/// Minimum time between two descriptions of all endpoints for the identity store.
const DESCRIBE_GAP: Duration = Duration::from_millis(200);

/// The running parts that serve workload endpoints.
pub(super) struct WorkloadEndpoints {
    pub(super) manager: Manager,
    pub(super) enforcer: Enforcer,
}

/// Sources of the endpoints' labels, identities and policies.
pub(super) struct EndpointSources {
    pub(super) identities: Arc<IdentityAllocator>,
    /// The labels of this node's pods; `None` if the agent does not follow pods.
    pub(super) pods: Option<watch::Receiver<Arc<PodLabels>>>,
    /// Whether the agent follows the policies of a Kubernetes cluster.
    pub(super) has_cluster_policies: bool,
}

/// Surveys the endpoints of previous agents and removes all traces of dead ones.
pub(super) async fn survey(context: &StartContext<'_>) -> anyhow::Result<Survey> {
    let location = &context.config.location;
    // Another agent's endpoints must not be touched.
    pin_folder::require_unused(location)?;
    let devices = HostDevices::new(context.netlink.clone(), &location.instance);
    let states = states(&location.state_dir);
    if let Err(error) = deletions::announce(location, &states) {
        warn!(%error, "cannot read the queued endpoint deletions");
    }
    manager::survey(&states, &devices)
        .await
        .context("cannot take over the endpoints of the previous agent")
}

/// Starts managing endpoints, beginning with those found by the survey.
pub(super) fn start(
    context: &StartContext<'_>,
    node: &NodeDatapath,
    survey: Survey,
    sources: EndpointSources,
    lag: watch::Sender<Option<PolicyLag>>,
) -> anyhow::Result<WorkloadEndpoints> {
    let StartContext {
        config,
        own,
        netlink,
    } = context;
    let EndpointSources {
        identities,
        pods,
        has_cluster_policies,
    } = sources;
    let location = &config.location;
    let ipam = NodeIpam::new(
        &own.pod_cidrs,
        &own.addresses,
        &config.endpoints.ipam_excludes,
        config.endpoints.ipam_cooling_time,
    )?;
    let options = EnforcerOptions {
        settings: PolicySettings {
            mode: config.policy.policy_mode,
            allow_localhost: config.policy.policy_allow_localhost,
        },
        allow_dhcpv6: config.policy.policy_allow_dhcpv6,
        node_addresses: own.addresses.clone(),
        lag,
        follows_cluster: has_cluster_policies,
        clock: Timestamp::now,
    };
    let datapath = node.shared_datapath();
    let enforcer = Enforcer::open(&location.state_dir, options, identities.clone(), datapath)?;
    let options = ManagerOptions {
        states: states(&location.state_dir),
        ipam,
        node_addresses: own.addresses.clone(),
        health: node.health_report(&EndpointOutcome::default()),
        mtu: node.mtu(),
        parallel: PARALLEL,
        devices: Arc::new(HostDevices::new(netlink.clone(), &location.instance)),
        identities: Arc::new(AllocatedIdentities::by(identities)),
        pods,
        regenerator: Arc::new(enforcer.clone()),
        clock: Timestamp::now,
    };
    Ok(WorkloadEndpoints {
        manager: Manager::start(options, survey),
        enforcer,
    })
}

/// Keeps the identity store informed about the pods and states of endpoints, until dropped.
pub(super) fn describe(manager: Manager, identities: Arc<IdentityAllocator>) -> AbortOnDrop {
    AbortOnDrop::spawn(async move {
        let mut changes = manager.changes();
        loop {
            changes.mark_unchanged();
            let next = Instant::now() + DESCRIBE_GAP;
            let endpoints = manager.endpoints();
            let details = endpoints.iter().map(|endpoint| {
                let pod = endpoint.pod.as_ref();
                let details = EndpointDetails {
                    pod: pod.map(|pod| format!("{}/{}", pod.namespace, pod.name)),
                    state: endpoint.state.clone(),
                };
                (endpoint.id, details)
            });
            identities.describe(details.collect());
            if changes.changed().await.is_err() {
                return;
            }
            sleep_until(next).await;
        }
    })
}

fn states(state_dir: &Path) -> StateDir {
    StateDir::of(state_dir)
}

/// Collects the endpoints' environment, on which policy depends.
pub(super) fn surroundings(
    context: &StartContext<'_>,
    node: &NodeDatapath,
    registry: &dyn Registry,
    services: watch::Receiver<Arc<BTreeSet<IpAddr>>>,
) -> Surroundings {
    let StartContext { own, netlink, .. } = context;
    let host = own.addresses.iter().chain(&own.secondary_addresses);
    Surroundings {
        own: own.full_name(),
        host: host.copied().collect(),
        routes: Box::new(netlink.clone()),
        host_prefixes: None,
        services,
        health: node.health_addresses(),
        nodes: registry.watch(),
        has_heard: false,
    }
}
