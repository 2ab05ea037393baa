//! Container probes of this node.

use std::collections::BTreeMap;
use std::net::IpAddr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// One probe of one container, in `GET /v1/probes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ContainerProbe {
    /// The pod, `NAMESPACE/NAME`.
    pub pod: String,
    /// Its UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// What the runtime calls it; `None` before there is one.
    pub container_id: Option<String>,
    /// `startup`, `readiness` or `liveness`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What is probed, such as `http://10.244.1.7:8080/ready`.
    pub target: String,
    /// The result that holds; `None` while nothing is known.
    pub result: Option<ProbeVerdict>,
    /// What the last run that told something came to.
    pub last: Option<ProbeVerdict>,
    /// How many runs in a row came to that.
    pub run: u32,
    /// How many in a row it takes to be the result.
    pub threshold: u32,
    /// Whether it is not probed until there is a new container.
    pub on_hold: bool,
    /// Why it was not probed when it last could have been.
    pub waiting: Option<String>,
    /// Whether a run is under way.
    pub in_flight: bool,
    /// Time between two runs, ns.
    pub period_ns: u64,
    /// Time in which the answer must have come, ns.
    pub timeout_ns: u64,
    /// When the next run is due.
    pub next: Option<Timestamp>,
    /// How long no run has found anything out, ns, if a result should be there by now: the one shown may not hold any more.
    pub overdue_ns: Option<u64>,
    /// The last run.
    pub last_run: Option<ProbeRun>,
}

/// What tells a probe from all others of an agent: the pod's name and UID, container and type.
pub type ContainerProbeKey = (String, String, String, String);

impl ContainerProbe {
    /// What tells it from all others.
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

    /// Whether both are the same but for what each run changes: times, and counts beyond the threshold.
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

/// What a probe says of its container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeVerdict {
    /// It is well.
    Success,
    /// It is not.
    Failure,
    /// It is not known.
    Unknown,
}

impl ProbeVerdict {
    /// As listings show it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Unknown => "unknown",
        }
    }
}

/// A run of a probe that is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProbeRun {
    /// When it ended.
    pub at: Timestamp,
    /// `successful`, `failed`, `errored` (nothing was found out) or `not_sent` (not in time).
    pub counted: String,
    /// What was found.
    pub message: String,
}

/// A pod whose containers are probed, in `GET /v1/pods`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProbedPod {
    /// `NAMESPACE/NAME`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Where it was read.
    pub source: String,
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`; `None` while nothing is known of it.
    pub phase: Option<String>,
    /// Whether all of its containers can serve.
    pub ready: bool,
    /// Its addresses.
    pub ips: Vec<IpAddr>,
    /// Id of its endpoint on this node, if it has one.
    pub endpoint: Option<u16>,
    /// Its containers, as in its manifest.
    pub containers: Vec<ProbedContainer>,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProbedContainer {
    /// Its name.
    pub name: String,
    /// What the runtime calls it.
    pub id: Option<String>,
    /// `waiting`, `running` or `terminated`.
    pub state: String,
    /// Its exit code, if it has ended.
    pub exit_code: Option<i32>,
    /// Whether it can serve.
    pub ready: bool,
    /// Whether it has started.
    pub started: Option<bool>,
    /// How often this agent started it again.
    pub restarts: u32,
    /// When it is started again, if that waits.
    pub restart_at: Option<Timestamp>,
}

/// Something that happened to a container, in `GET /v1/pods/events`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ContainerEvent {
    /// Larger than that of each earlier event of this agent.
    pub number: u64,
    /// When it happened first.
    pub first: Timestamp,
    /// When it happened last.
    pub last: Timestamp,
    /// How often it happened.
    pub count: u64,
    /// `Normal` or `Warning`.
    #[serde(rename = "type")]
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

/// What keeps pods from being probed, in `GET /v1/pods/problems`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PodProblem {
    /// What it is about: a file, the runtime's socket.
    pub subject: String,
    /// What is wrong, with the pod, the container and the field.
    pub problem: String,
}

/// Whether `wanted`, NAME or NAMESPACE/NAME, means `pod`, `NAMESPACE/NAME`.
pub fn is_pod_named(pod: &str, wanted: &str) -> bool {
    let name = pod.rsplit_once('/').map_or(pod, |(_, name)| name);
    wanted == pod || wanted == name
}

/// A line of `GET /v1/probes?watch=true`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum ContainerProbeEvent {
    /// A probe that is there, at first and whenever it changes.
    Updated {
        /// As it is now.
        probe: Box<ContainerProbe>,
    },
    /// One that is no more.
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
        kind: String,
    },
    /// Something that happened to a container.
    Happened {
        /// What.
        happened: Box<ContainerEvent>,
    },
    /// All probes that were there at first have been told.
    Listed,
}

/// How container probing does as a whole, in `GET /v1/probes/summary`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ContainerProbeSummary {
    /// Whether this agent probes containers at all.
    pub enabled: bool,
    /// Pods that are probed.
    pub pods: u64,
    /// Pods whose containers all can serve.
    pub ready_pods: u64,
    /// Probes.
    pub probes: u64,
    /// Those whose result is a failure.
    pub failing: u64,
    /// Those whose last run erred, or was not sent in time.
    pub errored: u64,
    /// Those whose last three periods passed without a run that found something out.
    pub overdue: u64,
    /// Runs that are over, by what they came to.
    pub runs: BTreeMap<String, u64>,
    /// How late runs began.
    pub start_delays: Vec<DelayBucket>,
    /// What keeps pods from being probed.
    pub problems: Vec<PodProblem>,
}

/// Runs that began late by at most so much, and by more than the bucket before says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DelayBucket {
    /// The bound, ns; `None` for none.
    pub at_most_ns: Option<u64>,
    /// How many.
    pub count: u64,
}
