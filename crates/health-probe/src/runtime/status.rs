//! The pods and containers of a runtime, and the status that the kubelet would report.

use std::net::IpAddr;

use jiff::Timestamp;

use super::RuntimeError;
use crate::spec::{PodSpec, RestartPolicy, Role};
use crate::worker::{ContainerState, ContainerStatus, Phase, PodStatus};

/// The pods and containers of a runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The pods; only the newest of those with the same UID.
    pub pods: Vec<RuntimePod>,
    /// Parts of the observation that failed.
    pub problems: Vec<RuntimeError>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimePod {
    /// The UID that the pod was created with.
    pub uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The runtime's ID for the pod.
    pub sandbox_id: String,
    /// Whether containers can run in the pod.
    pub is_ready: bool,
    /// The pod's addresses, the primary one first; none if the pod uses the host's network.
    pub ips: Vec<IpAddr>,
    /// A process in the pod's namespaces, if known.
    pub pid: Option<u32>,
    /// The pod's containers; only the last attempt of those with the same name.
    pub containers: Vec<RuntimeContainer>,
}

/// A container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeContainer {
    /// The runtime's ID for the container.
    pub id: String,
    /// The container's name in the pod.
    pub name: String,
    /// How many times the container was created before.
    pub attempt: u32,
    /// Whether the container is running.
    pub state: ContainerState,
    /// The PID of the first process, if the container is running and the runtime reports the PID.
    pub pid: Option<u32>,
    /// When the container exited.
    pub finished_at: Option<Timestamp>,
}

impl RuntimePod {
    /// The status that the kubelet would report for a pod with this `spec`: its containers in manifest order, and its
    /// phase (pkg/kubelet/kubelet_pods.go, `getPhase`). Containers that the runtime does not have are waiting.
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
