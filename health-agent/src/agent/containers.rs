//! Container probes: what they are made of, and the endpoints that they are about.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use health_endpoint::manager::Manager;
use health_model::api::Endpoint;
use health_probe::runtime::Runtime;
use health_probe::source::Folder;
use health_probe::spec::PodSpec;
use health_probe::supervisor::{Endpoints, LocalEndpoint, Supervisor, SupervisorOptions};
use health_probe::worker::Limits;
use health_registry::config::Config;
use health_registry::nodes::Node;
use tokio::sync::watch;

/// File in the state folder of what is known of probes.
const STATE_FILE: &str = "probes.json";
/// Folder in the state folder of the certificates and keys that annotations name.
pub(crate) const CERTIFICATES: &str = "certificates";

/// The probing of this node's containers.
pub(super) struct ContainerProbes {
    pub(super) supervisor: Supervisor,
    /// Ends when it is dropped.
    _folder: Folder,
}

/// Begins to probe containers, if this agent is to.
pub(super) fn start(config: &Config, own: &Node, manager: Manager) -> Option<ContainerProbes> {
    let settings = &config.container_probing;
    let folder = Folder::watch(settings.pod_manifests.as_deref()?);
    let state_dir = &config.location.state_dir;
    let supervisor = Supervisor::start(SupervisorOptions {
        sources: vec![folder.pods()],
        runtime: settings.runtime_endpoint.as_deref().map(Runtime::at),
        restarts: settings.container_restarts,
        endpoints: Arc::new(LocalEndpoints(manager)),
        node_addresses: own.addresses.clone(),
        limits: Limits {
            per_second: settings.container_probe_rate,
            concurrent: usize::try_from(settings.container_probe_concurrency).unwrap_or(usize::MAX),
        },
        certificates: state_dir.join(CERTIFICATES),
        state_file: state_dir.join(STATE_FILE),
    });
    Some(ContainerProbes {
        supervisor,
        _folder: folder,
    })
}

/// The endpoints of the manager.
struct LocalEndpoints(Manager);

impl Endpoints for LocalEndpoints {
    fn find(&self, pod: &PodSpec) -> Option<LocalEndpoint> {
        let is_of_pod = |endpoint: &Endpoint| {
            if !pod.ips.is_empty() {
                return addresses(endpoint).any(|address| pod.ips.contains(&address));
            }
            let name = endpoint.name.as_deref();
            name.is_some_and(|name| name == format!("{}/{}", pod.namespace, pod.name))
        };
        let endpoints = self.0.endpoints();
        let mut living = endpoints
            .iter()
            .filter(|endpoint| !endpoint.state.starts_with("disconnect"));
        let endpoint = living.find(|endpoint| is_of_pod(endpoint))?;
        Some(LocalEndpoint {
            id: endpoint.id,
            ips: addresses(endpoint).collect(),
            netns: PathBuf::from(&endpoint.netns),
        })
    }

    fn set_ready(&self, id: u16, ready: Option<bool>) {
        self.0.set_ready(id, ready);
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes()
    }
}

fn addresses(endpoint: &Endpoint) -> impl Iterator<Item = IpAddr> {
    endpoint.ipv4.into_iter().chain(endpoint.ipv6)
}
