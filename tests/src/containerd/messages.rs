//! The subset of the container runtime protocol (CRI, `runtime.v1`) that is needed to run containers.

use std::collections::HashMap;

use prost::Message;

/// `NamespaceMode.NODE`: pods share the host's network namespace.
pub(super) const NETWORK_OF_NODE: i32 = 2;
/// `NamespaceMode.CONTAINER`: containers have their own PID namespaces.
pub(super) const PROCESSES_OF_CONTAINER: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) uid: String,
    #[prost(string, tag = "3")]
    pub(super) namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Namespaces {
    #[prost(int32, tag = "1")]
    pub(super) network: i32,
    #[prost(int32, tag = "2")]
    pub(super) processes: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSecurity {
    #[prost(message, optional, tag = "1")]
    pub(super) namespaces: Option<Namespaces>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LinuxPod {
    #[prost(message, optional, tag = "2")]
    pub(super) security: Option<PodSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodConfig {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<PodMetadata>,
    #[prost(message, optional, tag = "8")]
    pub(super) linux: Option<LinuxPod>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RunPodRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) config: Option<PodConfig>,
}

/// Shared by all requests and responses that only contain the ID of a pod or container.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Id {
    #[prost(string, tag = "1")]
    pub(super) id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Image {
    #[prost(string, tag = "1")]
    pub(super) image: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct UserId {
    #[prost(int64, tag = "1")]
    pub(super) value: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerSecurity {
    #[prost(message, optional, tag = "3")]
    pub(super) namespaces: Option<Namespaces>,
    #[prost(message, optional, tag = "5")]
    pub(super) user: Option<UserId>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LinuxContainer {
    #[prost(message, optional, tag = "2")]
    pub(super) security: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    pub(super) image: Option<Image>,
    #[prost(string, repeated, tag = "3")]
    pub(super) command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    pub(super) environment: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    pub(super) linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CreateRequest {
    #[prost(string, tag = "1")]
    pub(super) pod: String,
    #[prost(message, optional, tag = "2")]
    pub(super) config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    pub(super) pod_config: Option<PodConfig>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StopRequest {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    /// Timeout in seconds.
    #[prost(int64, tag = "2")]
    pub(super) timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusRequest {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(bool, tag = "2")]
    pub(super) verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusAnswer {
    #[prost(map = "string, string", tag = "2")]
    pub(super) info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Nothing {}

/// `ExecSyncRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExecRequest {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(string, repeated, tag = "2")]
    pub(super) command: Vec<String>,
    /// Timeout in seconds; 0 for none.
    #[prost(int64, tag = "3")]
    pub(super) timeout: i64,
}

/// `ExecSyncResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExecAnswer {
    #[prost(bytes = "vec", tag = "2")]
    pub(super) stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub(super) exit_code: i32,
}
