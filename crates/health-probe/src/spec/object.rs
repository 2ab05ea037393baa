//! The fields of a pod that matter for probes, as they appear in manifests. Parsing the unused fields of Kubernetes'
//! own types would cost half a megabyte of code.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as k8s;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;
use serde::de::IgnoredAny;

#[derive(Deserialize)]
#[serde(expecting = "a Pod")]
pub(super) struct Pod {
    metadata: Option<Metadata>,
    spec: Option<Spec>,
    status: Option<Status>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "an ObjectMeta")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    annotations: Option<BTreeMap<String, String>>,
    #[serde(rename = "deletionTimestamp")]
    deletion_timestamp: Option<Time>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a PodSpec")]
struct Spec {
    restart_policy: Option<String>,
    termination_grace_period_seconds: Option<i64>,
    containers: Option<Vec<Container>>,
    init_containers: Option<Vec<Container>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a Container")]
struct Container {
    name: Option<String>,
    image: Option<String>,
    restart_policy: Option<String>,
    env: Option<Vec<EnvVar>>,
    ports: Option<Vec<k8s::ContainerPort>>,
    startup_probe: Option<k8s::Probe>,
    readiness_probe: Option<k8s::Probe>,
    liveness_probe: Option<k8s::Probe>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an EnvVar")]
struct EnvVar {
    name: Option<String>,
    value: Option<String>,
    value_from: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a PodStatus")]
struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<k8s::PodIP>>,
    conditions: Option<Vec<Condition>>,
    container_statuses: Option<Vec<ContainerStatus>>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a PodCondition")]
struct Condition {
    #[serde(rename = "type")]
    kind: Option<String>,
    status: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a ContainerStatus")]
struct ContainerStatus {
    name: Option<String>,
    #[serde(rename = "containerID")]
    container_id: Option<String>,
    ready: Option<bool>,
    started: Option<bool>,
    state: Option<State>,
}

#[derive(Deserialize)]
#[serde(expecting = "a ContainerState")]
struct State {
    running: Option<Running>,
    terminated: Option<Terminated>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a ContainerStateRunning")]
struct Running {
    started_at: Option<Time>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a ContainerStateTerminated")]
struct Terminated {
    exit_code: Option<i32>,
}

impl From<Pod> for k8s::Pod {
    fn from(pod: Pod) -> Self {
        let metadata = pod.metadata.unwrap_or_default();
        Self {
            metadata: ObjectMeta {
                name: metadata.name,
                namespace: metadata.namespace,
                uid: metadata.uid,
                annotations: metadata.annotations,
                deletion_timestamp: metadata.deletion_timestamp,
                ..ObjectMeta::default()
            },
            spec: pod.spec.map(Into::into),
            status: pod.status.map(Into::into),
        }
    }
}

impl From<Status> for k8s::PodStatus {
    fn from(status: Status) -> Self {
        let all = |containers: Vec<ContainerStatus>| containers.into_iter().map(Into::into);
        Self {
            phase: status.phase,
            pod_ip: status.pod_ip,
            pod_ips: status.pod_ips,
            conditions: status.conditions.map(|conditions| {
                let condition = |one: Condition| k8s::PodCondition {
                    type_: one.kind.unwrap_or_default(),
                    status: one.status.unwrap_or_default(),
                    ..k8s::PodCondition::default()
                };
                conditions.into_iter().map(condition).collect()
            }),
            container_statuses: status.container_statuses.map(|list| all(list).collect()),
            init_container_statuses: status
                .init_container_statuses
                .map(|list| all(list).collect()),
            ..Self::default()
        }
    }
}

impl From<ContainerStatus> for k8s::ContainerStatus {
    fn from(status: ContainerStatus) -> Self {
        let running = |running: Running| k8s::ContainerStateRunning {
            started_at: running.started_at,
        };
        let terminated = |terminated: Terminated| k8s::ContainerStateTerminated {
            exit_code: terminated.exit_code.unwrap_or_default(),
            ..k8s::ContainerStateTerminated::default()
        };
        Self {
            name: status.name.unwrap_or_default(),
            container_id: status.container_id,
            ready: status.ready.unwrap_or_default(),
            started: status.started,
            state: status.state.map(|state| k8s::ContainerState {
                running: state.running.map(running),
                terminated: state.terminated.map(terminated),
                waiting: None,
            }),
            ..Self::default()
        }
    }
}

impl From<Spec> for k8s::PodSpec {
    fn from(spec: Spec) -> Self {
        let all = |containers: Vec<Container>| containers.into_iter().map(Into::into).collect();
        Self {
            restart_policy: spec.restart_policy,
            termination_grace_period_seconds: spec.termination_grace_period_seconds,
            containers: spec.containers.map(all).unwrap_or_default(),
            init_containers: spec.init_containers.map(all),
            ..Self::default()
        }
    }
}

impl From<Container> for k8s::Container {
    fn from(container: Container) -> Self {
        Self {
            name: container.name.unwrap_or_default(),
            image: container.image,
            restart_policy: container.restart_policy,
            env: container
                .env
                .map(|all| all.into_iter().map(Into::into).collect()),
            ports: container.ports,
            startup_probe: container.startup_probe,
            readiness_probe: container.readiness_probe,
            liveness_probe: container.liveness_probe,
            ..Self::default()
        }
    }
}

impl From<EnvVar> for k8s::EnvVar {
    fn from(var: EnvVar) -> Self {
        Self {
            name: var.name.unwrap_or_default(),
            value: var.value,
            value_from: var.value_from.map(|_| k8s::EnvVarSource::default()),
        }
    }
}
