//! The types of the API. Everything under `/v1beta` except `status/path-mtu` has the paths, field names and types of
//! Cilium's health API (`api/v1/health/openapi.yaml`); fields that Cilium lacks are optional additions.

mod agent;
mod endpoint;
mod history;
mod nodes;
mod path;
mod policy;
mod probe;
mod service;
mod service_trace;
mod status;

use serde::{Deserialize, Serialize};

pub use self::agent::{
    AgentReport, AgentState, ControllerStatus, HealthzResponse, LoadAverage, ProgramStatus,
};
pub use self::endpoint::{
    Deleted, Endpoint, EndpointEvent, EndpointHealth, EndpointRequest, EndpointSettings,
    EndpointSettingsChange, Enforcement, HealthState, IdentityEntry, LabelChange, PodName,
    TakenAddress,
};
pub use self::history::{HistoryWindow, TargetHistory};
pub use self::nodes::{
    ClusterNodeStatus, NodeAddressing, NodeAddressingElement, NodeElement, NodeEntry, NodeList,
    RegistryState, RejectedEntry,
};
pub use self::path::{
    AddressGroupStatus, ConnectivityStatus, LargerPackets, PathKind, PathMtuEntry, PathMtuStatus,
    PathStatus, Protocol, Reachability, RttSource,
};
pub use self::policy::{
    PolicyChange, PolicyDocument, PolicyList, PolicyModeChange, PolicyModeStatus, RefusedPolicy,
    TraceEndRequest, TraceQuery,
};
pub use self::probe::{
    ContainerEvent, ContainerProbe, ContainerProbeEvent, ContainerProbeKey, ContainerProbeSummary,
    DelayBucket, PodProblem, ProbeRun, ProbeVerdict, ProbedContainer, ProbedPod, is_pod_named,
};
pub use self::service::{
    ServiceBackend, ServiceConflict, ServiceEntry, ServiceFrontend, ServicePortEntry,
    ServiceProblem, ServiceSummary, ServiceTopology,
};
pub use self::service_trace::{
    ServiceTrace, SourceKind, TraceVerdict, TracedBackend, TracedFrontend, TracedPolicy,
    TracedPool, TracedRanges, TracedSource, TracedStay,
};
pub use self::status::{
    AgentProblem, Diagnosis, FullMap, HealthStatus, NodeStatus, PolicyLag, ProbeEvent, SelfStatus,
};

/// Body of every error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct ErrorBody {
    /// What failed, and on which object.
    pub error: String,
}
