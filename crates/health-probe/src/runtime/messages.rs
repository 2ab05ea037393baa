//! The required `runtime.v1` messages, with the names of k8s.io/cri-api, `pkg/apis/runtime/v1/api.proto`.

use std::collections::BTreeMap;

use super::config::{ContainerConfig, ContainerMetadata, PodSandboxConfig, PodSandboxMetadata};

/// A running container (`ContainerState`).
pub(super) const RUNNING: i32 = 1;
/// An exited container.
pub(super) const EXITED: i32 = 2;
/// A pod that can hold containers (`PodSandboxState`).
pub(super) const READY: i32 = 0;

/// An empty message: a response without content, or a request to list everything.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandboxList {
    #[prost(message, repeated, tag = "1")]
    pub(super) items: Vec<PodSandbox>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandbox {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(message, optional, tag = "2")]
    pub(super) metadata: Option<PodSandboxMetadata>,
    #[prost(int32, tag = "3")]
    pub(super) state: i32,
    #[prost(int64, tag = "4")]
    pub(super) created_at: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerList {
    #[prost(message, repeated, tag = "1")]
    pub(super) containers: Vec<Container>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Container {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(string, tag = "2")]
    pub(super) pod_sandbox_id: String,
    #[prost(message, optional, tag = "3")]
    pub(super) metadata: Option<ContainerMetadata>,
    #[prost(int32, tag = "6")]
    pub(super) state: i32,
    #[prost(int64, tag = "7")]
    pub(super) created_at: i64,
}

/// `PodSandboxStatusRequest` and `ContainerStatusRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StatusRequest {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(bool, tag = "2")]
    pub(super) verbose: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<PodSandboxStatus>,
    #[prost(btree_map = "string, string", tag = "2")]
    pub(super) info: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandboxStatus {
    #[prost(int32, tag = "3")]
    pub(super) state: i32,
    #[prost(message, optional, tag = "5")]
    pub(super) network: Option<PodNetwork>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodNetwork {
    #[prost(string, tag = "1")]
    pub(super) ip: String,
    #[prost(message, repeated, tag = "2")]
    pub(super) additional_ips: Vec<PodIp>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodIp {
    #[prost(string, tag = "1")]
    pub(super) ip: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<ContainerStatus>,
    #[prost(btree_map = "string, string", tag = "2")]
    pub(super) info: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerStatus {
    #[prost(int32, tag = "3")]
    pub(super) state: i32,
    /// In nanoseconds since the epoch; 0 for never. The same applies to `finished_at`.
    #[prost(int64, tag = "5")]
    pub(super) started_at: i64,
    #[prost(int64, tag = "6")]
    pub(super) finished_at: i64,
    #[prost(int32, tag = "7")]
    pub(super) exit_code: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StopContainerRequest {
    #[prost(string, tag = "1")]
    pub(super) container_id: String,
    /// In seconds.
    #[prost(int64, tag = "2")]
    pub(super) timeout: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pub(super) pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    pub(super) config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    pub(super) sandbox_config: Option<PodSandboxConfig>,
}

/// `CreateContainerResponse`, `StartContainerRequest` and `RemoveContainerRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerId {
    #[prost(string, tag = "1")]
    pub(super) container_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ExecSyncRequest {
    #[prost(string, tag = "1")]
    pub(crate) container_id: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) cmd: Vec<String>,
    /// In seconds.
    #[prost(int64, tag = "3")]
    pub(crate) timeout: i64,
}
