//! What is to be probed, from the manifests of pods.
//!
//! [`read`] takes a text in YAML or JSON, [`PodSpec::from_pod`] a pod of the Kubernetes API. Both apply the defaults and
//! the checks of Kubernetes 1.20 and later to all that matters for probes, and to our [`annotation`]s, and report every
//! error at once, each with the path of its field.

pub mod annotation;
mod container;
mod error;
mod expand;
mod manifest;
mod object;
mod pod;
mod port;
mod probe;
mod target;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use error::{Problem, SpecError};
pub use expand::expand;
pub use manifest::{Manifest, read};
pub(crate) use manifest::{read_pod, read_status};
pub use port::{NamedPort, Port, PortError};
pub use target::{Target, TargetAction, TargetError};

/// A pod, as far as its probes need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSpec {
    /// What tells it from all other pods: the UID that the API gave it, or `NAMESPACE/NAME` for a manifest without. For
    /// mirrors see [`mirror`](Self::mirror).
    pub uid: Arc<str>,
    /// The UID that an object that mirrors a static pod claims for that pod.
    pub mirrored_uid: Option<Arc<str>>,
    /// Its namespace; `default` if the manifest has none.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its addresses, the primary one first; none while they are not known.
    pub ips: Vec<IpAddr>,
    /// Whether its containers are restarted when they end.
    pub restart_policy: RestartPolicy,
    /// How long its containers may take to end before they are killed.
    pub termination_grace: Duration,
    /// Regular containers, then init containers, each in the order of the manifest.
    pub containers: Vec<ContainerSpec>,
}

impl PodSpec {
    /// Makes it the mirror of the static pod with this UID. Anybody who may write pods can claim a UID, and only for a pod
    /// of the same name: so the name is part of what tells it from others.
    pub(crate) fn mirror(&mut self, uid: &str) {
        self.uid = Arc::from(format!("{uid}@{}/{}", self.namespace, self.name));
        self.mirrored_uid = Some(Arc::from(uid));
    }

    /// The UID that the runtime knows it by; `None` for a manifest without.
    pub fn known_uid(&self) -> Option<&str> {
        let has_uid = *self.uid != format!("{}/{}", self.namespace, self.name);
        let own = has_uid.then_some(&self.uid);
        self.mirrored_uid.as_ref().or(own).map(|uid| &**uid)
    }

    /// What a listing shows as its UID. Two pods of different names may have the same.
    pub fn shown_uid(&self) -> &str {
        self.known_uid().unwrap_or(&self.uid)
    }

    /// The container of this name.
    pub fn container(&self, name: &str) -> Option<&ContainerSpec> {
        let mut containers = self.containers.iter();
        containers.find(|container| &*container.name == name)
    }
}

/// Whether containers are restarted when they end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    /// However they ended.
    #[default]
    Always,
    /// If they ended with an exit code other than 0.
    OnFailure,
    /// Not at all.
    Never,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Its name, which no other container of the pod has.
    pub name: Arc<str>,
    /// What it is to the pod.
    pub role: Role,
    /// Its image; may be empty.
    pub image: String,
    /// The environment variables that the manifest gives a literal value.
    pub env: BTreeMap<String, String>,
    /// The ports that the manifest lists, with and without names.
    pub ports: Vec<NamedPort>,
    /// Its startup probe.
    pub startup: Option<Arc<Probe>>,
    /// Its readiness probe.
    pub readiness: Option<Arc<Probe>>,
    /// Its liveness probe.
    pub liveness: Option<Arc<Probe>>,
}

impl ContainerSpec {
    /// Its probe of this type.
    pub fn probe(&self, kind: ProbeType) -> Option<&Arc<Probe>> {
        match kind {
            ProbeType::Startup => self.startup.as_ref(),
            ProbeType::Readiness => self.readiness.as_ref(),
            ProbeType::Liveness => self.liveness.as_ref(),
        }
    }
}

/// What a container is to its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// One of those that the pod is there for.
    Regular,
    /// An init container that is restarted always, and runs beside the regular ones: it may have probes.
    Sidecar,
    /// An init container that ends before others begin: it has no probes.
    Init,
}

/// What a probe is for. In the order in which the workers of a container are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeType {
    /// Whether the container has started: the others wait for it.
    Startup,
    /// Whether it can serve.
    Readiness,
    /// Whether it must be restarted.
    Liveness,
}

impl ProbeType {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Startup, Self::Readiness, Self::Liveness];

    /// Its name in annotations and listings: `startup`, `readiness`, `liveness`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Startup => "startup",
            Self::Readiness => "readiness",
            Self::Liveness => "liveness",
        }
    }

    /// Its name at the beginning of a sentence and in metrics: `Startup`, `Readiness`, `Liveness`.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Readiness => "Readiness",
            Self::Liveness => "Liveness",
        }
    }

    /// The field of a container that holds the probe.
    pub const fn field(self) -> &'static str {
        match self {
            Self::Startup => "startupProbe",
            Self::Readiness => "readinessProbe",
            Self::Liveness => "livenessProbe",
        }
    }
}

impl fmt::Display for ProbeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text names no type of probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a type of probe; there are startup, readiness and liveness")]
pub struct ProbeTypeError;

impl FromStr for ProbeType {
    type Err = ProbeTypeError;

    fn from_str(text: &str) -> Result<Self, ProbeTypeError> {
        let named = |kind: &Self| kind.name() == text;
        Self::ALL.into_iter().find(named).ok_or(ProbeTypeError)
    }
}

/// How and when a container is probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// How.
    pub handler: Handler,
    /// No probe before the container has run for so many seconds. Zero and less mean none.
    pub initial_delay_seconds: i32,
    /// From one probe to the next.
    pub period: Duration,
    /// The same until the container is ready, or has started; an annotation sets it.
    pub period_until_ready: Option<Duration>,
    /// Within which the answer must have come.
    pub timeout: Duration,
    /// Successes in a row that make a success. At least 1.
    pub success_threshold: u32,
    /// Failures in a row that make a failure. At least 1.
    pub failure_threshold: u32,
    /// How long the container may take to end when this probe has it restarted; the pod says it otherwise.
    pub termination_grace: Option<Duration>,
    /// From where the target is reached. Means nothing for a command.
    pub origin: Origin,
}

/// From which network namespace a target is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The node's, as the kubelet does.
    #[default]
    Node,
    /// The pod's own, so that no policy has to let the node in.
    Pod,
}

/// How a container is probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handler {
    /// A command in the container.
    Exec {
        /// The program and its arguments, references to variables expanded.
        command: Vec<String>,
    },
    /// A GET request.
    Http(HttpGet),
    /// A connection.
    Tcp {
        /// An address or name; the pod's address if there is none.
        host: Option<String>,
        /// Its port.
        port: Port,
    },
    /// A call of `grpc.health.v1.Health/Check`.
    Grpc {
        /// Its port.
        port: Port,
        /// The service that is asked for; empty for the server as a whole.
        service: String,
        /// TLS; none for plain text.
        tls: Option<Tls>,
    },
}

impl Handler {
    /// Its name in listings: `exec`, `http`, `https`, `tcp` or `grpc`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Exec { .. } => "exec",
            Self::Http(HttpGet { tls: None, .. }) => "http",
            Self::Http(HttpGet { tls: Some(_), .. }) => "https",
            Self::Tcp { .. } => "tcp",
            Self::Grpc { .. } => "grpc",
        }
    }
}

/// A GET request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpGet {
    /// TLS, for the scheme HTTPS.
    pub tls: Option<Tls>,
    /// An address or name; the pod's address if there is none.
    pub host: Option<String>,
    /// Its port.
    pub port: Port,
    /// Path and query, as the manifest has them; never empty.
    pub path: String,
    /// Names and values of headers, in the order of the manifest.
    pub headers: Vec<(String, String)>,
}

/// What annotations say of TLS. Files are names in the node's folder of certificates, never paths: who may write a pod
/// must not choose what the agent reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Whom the server's certificate is checked against; it is not checked if there is none.
    pub check: Option<ServerCheck>,
    /// What we show to a server that asks for it.
    pub client: Option<ClientIdentity>,
}

/// How a server's certificate is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerCheck {
    /// The file with the certificates of those that may have signed it, in PEM.
    pub ca: String,
    /// The name that it must be for; the host that is probed if there is none.
    pub server_name: Option<String>,
}

/// A client's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The file with the certificate and those between it and its root, in PEM.
    pub certificate: String,
    /// The file with its private key, in PEM.
    pub key: String,
}
