//! The pods and containers of a test runtime, and the effects of calls on them.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};
use tonic::Status;

use super::super::config::{ContainerMetadata, PodSandboxMetadata};
use super::super::messages::{
    Container, ContainerId, ContainerList, ContainerStatus, ContainerStatusResponse,
    CreateContainerRequest, EXITED, Nothing, PodSandbox, PodSandboxList, PodSandboxStatus,
    PodSandboxStatusResponse, READY, RUNNING,
};
use super::Fault;

/// `runtime.v1.ExecSyncResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ExecSyncResponse {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub(crate) exit_code: i32,
}

/// `ContainerState` of a container that was created but not started.
const CREATED: i32 = 0;
/// `PodSandboxState` of a pod that has ended.
const NOT_READY: i32 = 1;
/// Exit code of a container that could not be started, with containerd.
const START_FAILED: i32 = 128;
/// Exit code of a container that was killed.
const KILLED: i32 = 137;

#[derive(Default)]
pub(super) struct State {
    /// Pod names, and whether the pods can hold containers.
    pods: BTreeMap<String, bool>,
    containers: Vec<FakeContainer>,
    /// Faults by method and subject.
    pub(super) faults: HashMap<(String, String), Fault>,
}

pub(super) struct FakeContainer {
    id: String,
    pod: String,
    name: String,
    attempt: u32,
    pub(super) stage: Stage,
    /// The PID of the first process; 0 if there is none.
    pub(super) pid: u32,
    pub(super) command_exit_code: i32,
}

/// The stage of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Created.
    Made,
    /// Running.
    Running,
    /// Exited with this code.
    Ended(i32),
}

impl Stage {
    const fn number(self) -> i32 {
        match self {
            Self::Made => CREATED,
            Self::Running => RUNNING,
            Self::Ended(_) => EXITED,
        }
    }
}

impl State {
    pub(super) fn add_pod(&mut self, name: &str) {
        self.pods.insert(name.to_owned(), true);
    }

    pub(super) fn end_pod(&mut self, name: &str) {
        self.pods.insert(name.to_owned(), false);
    }

    pub(super) fn add_container(
        &mut self,
        pod: &str,
        name: &str,
        attempt: u32,
        stage: Stage,
    ) -> String {
        let id = id(pod, name, attempt);
        self.containers.push(FakeContainer {
            id: id.clone(),
            pod: pod.to_owned(),
            name: name.to_owned(),
            attempt,
            stage,
            pid: 0,
            command_exit_code: 0,
        });
        id
    }

    pub(super) fn container(&mut self, id: &str) -> Result<&mut FakeContainer, Status> {
        let mut containers = self.containers.iter_mut();
        let found = containers.find(|container| container.id == id);
        found.ok_or_else(|| Status::not_found(format!("no container {id}")))
    }

    pub(super) fn list_pods(&self) -> PodSandboxList {
        let pod = |(name, is_ready): (&String, &bool)| PodSandbox {
            id: name.clone(),
            metadata: Some(PodSandboxMetadata {
                name: name.clone(),
                uid: format!("uid-{name}"),
                namespace: "default".to_owned(),
                attempt: 0,
            }),
            state: pod_state(*is_ready),
            created_at: 0,
        };
        PodSandboxList {
            items: self.pods.iter().map(pod).collect(),
        }
    }

    pub(super) fn list_containers(&self) -> ContainerList {
        let container = |one: &FakeContainer| Container {
            id: one.id.clone(),
            pod_sandbox_id: one.pod.clone(),
            metadata: Some(ContainerMetadata {
                name: one.name.clone(),
                attempt: one.attempt,
            }),
            state: one.stage.number(),
            created_at: 0,
        };
        ContainerList {
            containers: self.containers.iter().map(container).collect(),
        }
    }

    pub(super) fn pod_status(&self, name: &str) -> Result<PodSandboxStatusResponse, Status> {
        let is_ready = self.pods.get(name);
        let is_ready = is_ready.ok_or_else(|| Status::not_found(format!("no pod {name}")))?;
        let config = json!({"metadata": {"name": name, "uid": format!("uid-{name}"), "namespace": "default"}});
        Ok(PodSandboxStatusResponse {
            status: Some(PodSandboxStatus {
                state: pod_state(*is_ready),
                network: None,
            }),
            info: info(0, config),
        })
    }

    /// Does not report when the container exited: that would be wall-clock time, and tests have their own clock.
    pub(super) fn container_status(&mut self, id: &str) -> Result<ContainerStatusResponse, Status> {
        let one = self.container(id)?;
        let config = json!({"metadata": {"name": one.name, "attempt": one.attempt}});
        Ok(ContainerStatusResponse {
            status: Some(ContainerStatus {
                state: one.stage.number(),
                started_at: 0,
                finished_at: 0,
                exit_code: match one.stage {
                    Stage::Ended(exit_code) => exit_code,
                    Stage::Made | Stage::Running => 0,
                },
            }),
            info: info(one.pid, config),
        })
    }

    pub(super) fn create(
        &mut self,
        request: &CreateContainerRequest,
    ) -> Result<ContainerId, Status> {
        let pod = &request.pod_sandbox_id;
        if self.pods.get(pod) != Some(&true) {
            return Err(Status::failed_precondition(format!(
                "pod {pod} is not ready"
            )));
        }
        let config = request.config.clone().unwrap_or_default();
        let ContainerMetadata { name, attempt } = config.metadata.unwrap_or_default();
        if self.container(&id(pod, &name, attempt)).is_ok() {
            return Err(Status::already_exists(format!("{name} is there")));
        }
        let container_id = self.add_container(pod, &name, attempt, Stage::Made);
        Ok(ContainerId { container_id })
    }

    pub(super) fn start(&mut self, id: &str) -> Result<Nothing, Status> {
        let container = self.container(id)?;
        if container.stage != Stage::Made {
            return Err(Status::failed_precondition(format!("{id} is not new")));
        }
        container.stage = Stage::Running;
        Ok(Nothing {})
    }

    /// Marks a container as exited because it could not be started.
    pub(super) fn fail_start(&mut self, id: &str) {
        if let Ok(container) = self.container(id) {
            container.stage = Stage::Ended(START_FAILED);
        }
    }

    pub(super) fn stop(&mut self, id: &str) -> Result<Nothing, Status> {
        let container = self.container(id)?;
        if container.stage == Stage::Running {
            container.stage = Stage::Ended(KILLED);
        }
        Ok(Nothing {})
    }

    pub(super) fn remove(&mut self, id: &str) -> Nothing {
        self.containers.retain(|container| container.id != id);
        Nothing {}
    }

    pub(super) fn run_command(&mut self, id: &str) -> Result<ExecSyncResponse, Status> {
        let container = self.container(id)?;
        if container.stage != Stage::Running {
            return Err(Status::failed_precondition(format!("{id} does not run")));
        }
        Ok(ExecSyncResponse {
            exit_code: container.command_exit_code,
            ..ExecSyncResponse::default()
        })
    }
}

/// The ID of a container.
pub(super) fn id(pod: &str, name: &str, attempt: u32) -> String {
    format!("{pod}.{name}.{attempt}")
}

const fn pod_state(is_ready: bool) -> i32 {
    match is_ready {
        true => READY,
        false => NOT_READY,
    }
}

/// Returns the details of a container in containerd's format.
fn info(pid: u32, config: Value) -> BTreeMap<String, String> {
    let details = json!({"pid": pid, "config": config});
    BTreeMap::from([("info".to_owned(), details.to_string())])
}
