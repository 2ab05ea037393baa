//! The known runtime status of a pod and its containers.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as k8s;

/// A pod's phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Not all of the pod's containers have been started.
    #[default]
    Pending,
    /// The pod is running.
    Running,
    /// All containers of the pod have exited with 0 and will not run again.
    Succeeded,
    /// All containers of the pod have exited and will not run again, and at least one exited with a code other than 0.
    Failed,
    /// The pod's phase cannot be determined.
    Unknown,
}

impl Phase {
    /// Whether none of the pod's containers will run again.
    pub(crate) const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// The known status of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodStatus {
    /// The pod's phase.
    pub phase: Phase,
    /// Whether the pod is being deleted.
    pub deleting: bool,
    /// Whether the pod was last reported ready as a whole, possibly by an earlier agent.
    pub ready: bool,
    /// The pod's regular containers.
    pub containers: Vec<ContainerStatus>,
    /// The pod's init containers.
    pub init_containers: Vec<ContainerStatus>,
}

/// The known status of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerStatus {
    /// The container's name in the pod.
    pub name: Arc<str>,
    /// The ID that the runtime assigned, which changes with each restart; `None` if there is no container.
    pub id: Option<Arc<str>>,
    /// Whether the container is running.
    pub state: ContainerState,
    /// Whether the container can serve. Computed by the manager.
    pub ready: bool,
    /// Whether the startup probe has succeeded, if there is one. Computed by the manager.
    pub started: Option<bool>,
}

/// Whether a container is running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContainerState {
    /// Not running yet, or not again yet.
    #[default]
    Waiting,
    /// Running.
    Running {
        /// Since when, if known.
        started_at: Option<Timestamp>,
    },
    /// Exited.
    Terminated {
        /// The exit code.
        exit_code: i32,
    },
}

impl ContainerState {
    /// Whether it is running.
    pub const fn is_running(self) -> bool {
        matches!(self, Self::Running { .. })
    }
}

impl PodStatus {
    /// Returns the container of this name if it has an ID; looks at regular containers first.
    pub(super) fn container(&self, name: &str) -> Option<(&ContainerStatus, &Arc<str>)> {
        let mut all = self.containers.iter().chain(&self.init_containers);
        let container = all.find(|container| *container.name == *name)?;
        let id = container.id.as_ref().filter(|id| !id.is_empty())?;
        Some((container, id))
    }

    /// Converts the status that the Kubernetes API reports for a pod; `None` if the pod has no status.
    pub(crate) fn from_pod(pod: &k8s::Pod) -> Option<Self> {
        let status = pod.status.as_ref()?;
        let phase = match status.phase.as_deref().unwrap_or_default() {
            "Running" => Phase::Running,
            "Succeeded" => Phase::Succeeded,
            "Failed" => Phase::Failed,
            "Unknown" => Phase::Unknown,
            _ => Phase::Pending,
        };
        let is_ready = |condition: &k8s::PodCondition| {
            condition.type_ == "Ready" && condition.status == "True"
        };
        let containers = |all: &Option<Vec<k8s::ContainerStatus>>| {
            all.iter().flatten().map(container_status).collect()
        };
        Some(Self {
            phase,
            deleting: pod.metadata.deletion_timestamp.is_some(),
            ready: status.conditions.iter().flatten().any(is_ready),
            containers: containers(&status.container_statuses),
            init_containers: containers(&status.init_container_statuses),
        })
    }
}

fn container_status(status: &k8s::ContainerStatus) -> ContainerStatus {
    let id = status.container_id.as_deref().filter(|id| !id.is_empty());
    let state = status.state.as_ref();
    let running = state.and_then(|state| state.running.as_ref());
    let terminated = state.and_then(|state| state.terminated.as_ref());
    let state = match (running, terminated) {
        (Some(running), _) => ContainerState::Running {
            started_at: running.started_at.as_ref().map(|time| time.0),
        },
        (None, Some(terminated)) => ContainerState::Terminated {
            exit_code: terminated.exit_code,
        },
        (None, None) => ContainerState::Waiting,
    };
    ContainerStatus {
        name: Arc::from(status.name.as_str()),
        id: id.map(Arc::from),
        state,
        ready: status.ready,
        started: status.started,
    }
}
