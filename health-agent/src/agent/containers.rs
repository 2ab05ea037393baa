//! Container probes: their sources, and the endpoints that they probe.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use health_endpoint::manager::Manager;
use health_model::api::Endpoint;
use health_probe::runtime::Runtime;
use health_probe::source::{Folder, Merged, PodSet};
use health_probe::spec::PodSpec;
use health_probe::supervisor::{
    Endpoints, LocalEndpoint, NoPodEvents, PodEvents, Restarts, Supervisor, SupervisorOptions,
};
use health_probe::worker::Limits;
use health_settings::Settings;
use tokio::sync::watch;

use super::kubernetes_events::KubernetesEvents;
use super::start_context::StartContext;

/// Name of the file in the state folder that stores the state of probes.
pub(super) const STATE_FILE: &str = "probes.json";

/// Probes this node's containers.
pub(super) struct ContainerProbes {
    pub(super) supervisor: Supervisor,
    /// Sources that stop when dropped.
    _sources: Sources,
}

/// Pod sources.
pub(super) struct Sources {
    merged: Merged,
    events: Arc<dyn PodEvents>,
    _folder: Option<Folder>,
}

impl Sources {
    /// Opens the configured pod sources. Pods from the folder take precedence over those `from_kubernetes`, because
    /// write access to the folder is a greater privilege than write access to pods. `events` receives the
    /// events of pods from Kubernetes. Returns `None` if this agent should not probe containers.
    pub(super) fn open(
        config: &Settings,
        from_kubernetes: Option<watch::Receiver<Arc<PodSet>>>,
        events: Option<KubernetesEvents>,
    ) -> Option<Self> {
        let settings = &config.containers;
        if !settings.has_pods() {
            return None;
        }
        let folder = settings.pod_manifests.as_deref().map(Folder::watch);
        let pods = folder.iter().map(Folder::pods).chain(from_kubernetes);
        Some(Self {
            merged: Merged::of(pods.collect()),
            events: match events {
                Some(events) => Arc::new(events),
                None => Arc::new(NoPodEvents),
            },
            _folder: folder,
        })
    }
}

/// Starts probing containers.
pub(super) fn start(
    StartContext { config, own, .. }: &StartContext<'_>,
    manager: Manager,
    sources: Sources,
) -> anyhow::Result<ContainerProbes> {
    let settings = &config.containers;
    let location = &config.location;
    let supervisor = Supervisor::start(SupervisorOptions {
        pods: sources.merged.pods(),
        runtime: settings.runtime_endpoint.as_deref().map(Runtime::at),
        restarts: match (settings.container_restarts, settings.kubelet_pod_restarts) {
            (false, _) => Restarts::None,
            (true, false) => Restarts::Own,
            (true, true) => Restarts::All,
        },
        endpoints: Arc::new(LocalEndpoints(manager)),
        pod_events: sources.events.clone(),
        node_addresses: own.addresses.clone(),
        limits: Limits {
            per_second: settings.container_probe_rate,
            concurrent: usize::try_from(settings.container_probe_concurrency).unwrap_or(usize::MAX),
            pod_per_second: settings.container_probe_pod_rate,
        },
        certificates: location.certificates(),
        state_file: location.state_dir.join(STATE_FILE),
    })
    .context("cannot start the container probe thread")?;
    Ok(ContainerProbes {
        supervisor,
        _sources: sources,
    })
}

/// Looks up endpoints in the manager.
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
