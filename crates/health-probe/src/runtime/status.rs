//! The pods and containers of a runtime, and the status that the kubelet would report.

use std::net::IpAddr;

use jiff::Timestamp;

use super::RuntimeError;
use crate::spec::{PodSpec, RestartPolicy, Role};
use crate::worker::{ContainerState, ContainerStatus, Phase, PodStatus};

/// The pods and containers of a runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Its pods; the newest if several have one UID.
    pub pods: Vec<RuntimePod>,
    /// What it could not report.
    pub problems: Vec<RuntimeError>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimePod {
    /// The UID that it was created with.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The runtime's ID for it.
    pub sandbox_id: String,
    /// Whether containers can run in it.
    pub is_ready: bool,
    /// Its addresses, the primary one first; none if it uses the host's network.
    pub ips: Vec<IpAddr>,
    /// A process in its namespaces, if known.
    pub pid: Option<u32>,
    /// Its containers; the last attempt if several have one name.
    pub containers: Vec<RuntimeContainer>,
}

/// A container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeContainer {
    /// The runtime's ID for it.
    pub id: String,
    /// Its name in the pod.
    pub name: String,
    /// How many times it was created before.
    pub attempt: u32,
    /// Whether it is running.
    pub state: ContainerState,
    /// Its first process, if it is running and the runtime reports it.
    pub pid: Option<u32>,
    /// When it exited.
    pub finished_at: Option<Timestamp>,
}

impl RuntimePod {
    /// The status that the kubelet would report for a pod with this `spec`: its containers in manifest order, and its
    /// phase (pkg/kubelet/kubelet_pods.go, `getPhase`). A container that the runtime does not have is waiting.
    pub fn status(&self, spec: &PodSpec) -> PodStatus {
        let status = |name: &std::sync::Arc<str>| {
            let known = self.containers.iter().find(|known| *known.name == **name);
            ContainerStatus {
                name: name.clone(),
                id: known.map(|known| known.id.as_str().into()),
                state: known.map_or(ContainerState::Waiting, |known| known.state),
                ready: false,
                started: None,
            }
        };
        let (init, regular): (Vec<_>, Vec<_>) = spec
            .containers
            .iter()
            .partition(|container| container.role != Role::Regular);
        let regular: Vec<_> = regular.iter().map(|one| status(&one.name)).collect();
        PodStatus {
            phase: phase(spec, &regular),
            deleting: false,
            ready: false,
            containers: regular,
            init_containers: init.iter().map(|one| status(&one.name)).collect(),
        }
    }
}

fn phase(spec: &PodSpec, regular: &[ContainerStatus]) -> Phase {
    let mut running = 0;
    let mut failed = 0;
    let mut succeeded = 0;
    for container in regular {
        match container.state {
            ContainerState::Waiting => return Phase::Pending,
            ContainerState::Running { .. } => running += 1,
            ContainerState::Terminated { exit_code: 0 } => succeeded += 1,
            ContainerState::Terminated { .. } => failed += 1,
        }
    }
    match spec.restart_policy {
        _ if running > 0 => Phase::Running,
        RestartPolicy::Always => Phase::Running,
        RestartPolicy::OnFailure if failed > 0 => Phase::Running,
        RestartPolicy::Never if failed > 0 => Phase::Failed,
        _ if succeeded > 0 => Phase::Succeeded,
        _ => Phase::Pending,
    }
}
