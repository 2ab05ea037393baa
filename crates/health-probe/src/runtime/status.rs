//! What a runtime has, and what the kubelet would say of it.

use std::net::IpAddr;

use jiff::Timestamp;

use super::RuntimeError;
use crate::spec::{PodSpec, RestartPolicy, Role};
use crate::worker::{ContainerState, ContainerStatus, Phase, PodStatus};

/// What a runtime has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Its pods; of several with one UID, the newest.
    pub pods: Vec<RuntimePod>,
    /// What it did not tell.
    pub problems: Vec<RuntimeError>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimePod {
    /// The UID that it was made with.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What the runtime calls it.
    pub sandbox_id: String,
    /// Whether containers can run in it.
    pub is_ready: bool,
    /// Its addresses, the primary one first; none if it uses the host's network.
    pub ips: Vec<IpAddr>,
    /// A process in its namespaces, if known.
    pub pid: Option<u32>,
    /// Its containers; of several with one name, that of the last attempt.
    pub containers: Vec<RuntimeContainer>,
}

/// A container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeContainer {
    /// What the runtime calls it.
    pub id: String,
    /// Its name in the pod.
    pub name: String,
    /// How often it was made before.
    pub attempt: u32,
    /// Whether it runs.
    pub state: ContainerState,
    /// Its first process, if it runs and the runtime tells.
    pub pid: Option<u32>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
}

impl RuntimePod {
    /// What the kubelet would say of a pod that is to be as `spec`: its containers in the order of the manifest, and its
    /// phase (pkg/kubelet/kubelet_pods.go, `getPhase`). One that the runtime does not have waits.
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
