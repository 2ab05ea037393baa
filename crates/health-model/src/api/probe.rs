//! Container probes of this node.

use std::collections::BTreeMap;
use std::net::IpAddr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// One probe of one container, in `GET /v1/probes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ContainerProbe {
    /// The pod, `NAMESPACE/NAME`.
    pub pod: String,
    /// Its UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// The runtime's id for it; `null` before it exists.
    pub container_id: Option<String>,
    /// `startup`, `readiness` or `liveness`.
    #[serde(rename = "type")]
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["startup", "readiness", "liveness"])))]
    pub kind: String,
    /// Probe target, such as `http://10.244.1.7:8080/ready`.
    #[cfg_attr(feature = "openapi", schemars(extend("examples" = ["http://10.244.1.7:8080/ready"])))]
    pub target: String,
    /// The current result; `null` while nothing is known.
    pub result: Option<ProbeVerdict>,
    /// Outcome of the last conclusive run.
    pub last: Option<ProbeVerdict>,
    /// Number of consecutive runs with that outcome.
    pub run: u32,
    /// Number of consecutive runs after which the outcome becomes the result.
    pub threshold: u32,
    /// Whether probing is suspended until the container is replaced.
    pub on_hold: bool,
    /// Why it was not probed at the last opportunity.
    pub waiting: Option<String>,
    /// Whether a run is in progress.
    pub in_flight: bool,
    /// Time between two runs, ns.
    pub period_ns: u64,
    /// Time limit for the answer, ns.
    pub timeout_ns: u64,
    /// When the next run is due.
    pub next: Option<Timestamp>,
    /// Time without a conclusive run, ns, if a result should be available by now: the result shown may be outdated.
    pub overdue_ns: Option<u64>,
    /// The last run.
    pub last_run: Option<ProbeRun>,
}

/// Key that is unique per probe within an agent: the pod's name and UID, container and type.
pub type ContainerProbeKey = (String, String, String, String);

impl ContainerProbe {
    /// The key that identifies this probe.
    pub fn key(&self) -> ContainerProbeKey {
        let Self {
            pod,
            pod_uid,
            container,
            kind,
            ..
        } = self;
        (
            pod.clone(),
            pod_uid.clone(),
            container.clone(),
            kind.clone(),
        )
    }

    /// Whether both are equal except for values that change with every run: times, and counts beyond the threshold.
    pub fn is_like(&self, other: &Self) -> bool {
        let steady = |one: &Self| Self {
            run: one.run.min(one.threshold),
            in_flight: false,
            next: None,
            overdue_ns: one.overdue_ns.map(|_| 0),
            last_run: one.last_run.as_ref().map(|run| ProbeRun {
                at: Timestamp::UNIX_EPOCH,
                message: match run.counted.as_str() {
                    "successful" => String::new(),
                    _ => run.message.clone(),
                },
                ..run.clone()
            }),
            ..one.clone()
        };
        steady(self) == steady(other)
    }
}

/// What a probe reports about its container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ProbeVerdict {
    /// Healthy.
    Success,
    /// Unhealthy.
    Failure,
    /// Unknown.
    Unknown,
}

impl ProbeVerdict {
    /// Name shown in listings.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Unknown => "unknown",
        }
    }
}

/// A finished run of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ProbeRun {
    /// When it finished.
    pub at: Timestamp,
    /// `successful`, `failed`, `errored` (inconclusive) or `not_sent` (not in time).
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["successful", "failed", "errored", "not_sent"])))]
    pub counted: String,
    /// What the run found.
    pub message: String,
}

/// A pod whose containers are probed, in `GET /v1/pods`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ProbedPod {
    /// `NAMESPACE/NAME`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Where it was read from.
    pub source: String,
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`; `null` while nothing is known.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["Pending", "Running", "Succeeded", "Failed", "Unknown", null])))]
    pub phase: Option<String>,
    /// Whether all its containers can serve.
    pub ready: bool,
    /// Its addresses.
    pub ips: Vec<IpAddr>,
    /// Id of its endpoint on this node, if it has one.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1, max = 4095)))]
    pub endpoint: Option<u16>,
    /// Its containers, in manifest order.
    pub containers: Vec<ProbedContainer>,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ProbedContainer {
    /// Its name.
    pub name: String,
    /// The runtime's id for it.
    pub id: Option<String>,
    /// `waiting`, `running` or `terminated`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["waiting", "running", "terminated"])))]
    pub state: String,
    /// Its exit code, if it has terminated.
    pub exit_code: Option<i32>,
    /// Whether it can serve.
    pub ready: bool,
    /// Whether it has started.
    pub started: Option<bool>,
    /// How often this agent has restarted it.
    pub restarts: u32,
    /// When it will be restarted, if a restart is pending.
    pub restart_at: Option<Timestamp>,
}

/// An event of a container, in `GET /v1/pods/events`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ContainerEvent {
    /// Larger than the number of every earlier event of this agent.
    pub number: u64,
    /// When it first happened.
    pub first: Timestamp,
    /// When it last happened.
    pub last: Timestamp,
    /// How often it happened.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
    pub count: u64,
    /// `Normal` or `Warning`.
    #[serde(rename = "type")]
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["Normal", "Warning"])))]
    pub kind: String,
    /// `Unhealthy`, `ProbeWarning`, `Killing`, `NotKilled`, `Started`, `BackOff`, `FailedKillContainer`,
    /// `Failed`.
    pub reason: String,
    /// The pod, `NAMESPACE/NAME`.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// What happened.
    pub message: String,
}

/// Problems that keep pods from being probed, in `GET /v1/pods/problems`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct PodProblem {
    /// The subject: a file, or the runtime's socket.
    pub subject: String,
    /// What is wrong, with the pod, the container and the field.
    pub problem: String,
}

/// Whether `wanted`, NAME or NAMESPACE/NAME, refers to `pod`, `NAMESPACE/NAME`.
pub fn is_pod_named(pod: &str, wanted: &str) -> bool {
    let name = pod.rsplit_once('/').map_or(pod, |(_, name)| name);
    wanted == pod || wanted == name
}

/// A line of `GET /v1/probes?watch=true`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum ContainerProbeEvent {
    /// A probe that exists: sent once at the start, then on every change.
    Updated {
        /// Current state.
        probe: Box<ContainerProbe>,
    },
    /// A probe that no longer exists.
    #[serde(rename_all = "kebab-case")]
    Deleted {
        /// The pod, `NAMESPACE/NAME`.
        pod: String,
        /// Its UID.
        pod_uid: String,
        /// The container's name.
        container: String,
        /// `startup`, `readiness` or `liveness`.
        #[serde(rename = "type")]
        #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["startup", "readiness", "liveness"])))]
        kind: String,
    },
    /// An event of a container.
    Happened {
        /// The event.
        happened: Box<ContainerEvent>,
    },
    /// All initial probes have been sent.
    Listed,
}

/// Overall state of container probing, in `GET /v1/probes/summary`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ContainerProbeSummary {
    /// Whether this agent probes containers at all.
    pub enabled: bool,
    /// Number of probed pods.
    pub pods: u64,
    /// Pods in which every container can serve.
    pub ready_pods: u64,
    /// Number of probes.
    pub probes: u64,
    /// Probes whose result is a failure.
    pub failing: u64,
    /// Probes whose last run ended with an error or was not sent in time.
    pub errored: u64,
    /// Probes without a conclusive run in their last three periods.
    pub overdue: u64,
    /// Finished runs, by outcome: `successful`, `failed`, `errored` or `not_sent`.
    pub runs: BTreeMap<String, u64>,
    /// Histogram of how late runs started.
    pub start_delays: Vec<DelayBucket>,
    /// Problems that keep pods from being probed.
    pub problems: Vec<PodProblem>,
}

/// Number of runs that started late by at most this bound, and by more than the previous bucket's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct DelayBucket {
    /// Upper bound, ns; `null` if unbounded.
    pub at_most_ns: Option<u64>,
    /// Number of runs.
    pub count: u64,
}
