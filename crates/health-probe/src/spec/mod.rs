//! What to probe, read from pod manifests.
//!
//! [`read`] takes YAML or JSON text, [`PodSpec::from_pod`] a pod of the Kubernetes API. Both apply the defaults and
//! checks of Kubernetes 1.20 and later to all fields that matter for probes, and to our [`annotation`]s. They report
//! all errors at once, each with the path of its field.

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
    /// Its unique ID: the UID that the API gave it, or `NAMESPACE/NAME` for a manifest without a UID. For mirrors see
    /// [`mirror`](Self::mirror).
    pub uid: Arc<str>,
    /// The UID that an object that mirrors a static pod claims for that pod.
    pub mirrored_uid: Option<Arc<str>>,
    /// Its namespace; `default` if the manifest has none.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its addresses, the primary one first; none while they are not known.
    pub ips: Vec<IpAddr>,
    /// Whether its containers are restarted when they exit.
    pub restart_policy: RestartPolicy,
    /// How long its containers may take to exit before they are killed.
    pub termination_grace: Duration,
    /// Regular containers, then init containers, each in the order of the manifest.
    pub containers: Vec<ContainerSpec>,
}

impl PodSpec {
    /// Makes it the mirror of the static pod with this UID. Anyone who may write pods can claim a UID, but only for a
    /// pod of the same name: so the name is part of the unique ID.
    pub(crate) fn mirror(&mut self, uid: &str) {
        self.uid = Arc::from(format!("{uid}@{}/{}", self.namespace, self.name));
        self.mirrored_uid = Some(Arc::from(uid));
    }

    /// The UID that the runtime knows it by; `None` for a manifest without a UID.
    pub(crate) fn known_uid(&self) -> Option<&str> {
        let has_uid = *self.uid != format!("{}/{}", self.namespace, self.name);
        let own = has_uid.then_some(&self.uid);
        self.mirrored_uid.as_ref().or(own).map(|uid| &**uid)
    }

    /// The UID that listings show. Two pods of different names may have the same.
    pub fn shown_uid(&self) -> &str {
        self.known_uid().unwrap_or(&self.uid)
    }

    /// The container with this name.
    pub fn container(&self, name: &str) -> Option<&ContainerSpec> {
        let mut containers = self.containers.iter();
        containers.find(|container| &*container.name == name)
    }
}

/// Whether containers are restarted when they exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    /// However they exited.
    #[default]
    Always,
    /// If they exited with a code other than 0.
    OnFailure,
    /// Not at all.
    Never,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Its name, unique in the pod.
    pub name: Arc<str>,
    /// Its role in the pod.
    pub role: Role,
    /// Its image; may be empty.
    pub image: String,
    /// The environment variables with a literal value in the manifest.
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

/// A container's role in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A main container, which the pod exists for.
    Regular,
    /// An init container that is always restarted, and runs beside the regular ones: it may have probes.
    Sidecar,
    /// An init container that finishes before others start: it has no probes.
    Init,
}

/// What a probe is for. Ordered as the workers of a container are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeType {
    /// Whether the container has started: the other probes wait for it.
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

    /// Its name at the start of a sentence and in metrics: `Startup`, `Readiness`, `Liveness`.
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

/// The text does not name a type of probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a probe type; expected startup, readiness or liveness")]
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
    /// No probe before the container has run for this many seconds. Zero and less mean no delay.
    pub initial_delay_seconds: i32,
    /// Time from one probe to the next.
    pub period: Duration,
    /// The period until the container is ready, or has started; set by an annotation.
    pub period_until_ready: Option<Duration>,
    /// Time limit for the answer.
    pub timeout: Duration,
    /// Consecutive successes needed for a success. At least 1.
    pub success_threshold: u32,
    /// Consecutive failures needed for a failure. At least 1.
    pub failure_threshold: u32,
    /// How long the container may take to exit when this probe causes a restart; by default the pod's value applies.
    pub termination_grace: Option<Duration>,
    /// Where the target is reached from. Ignored for commands.
    pub origin: Origin,
}

/// Which network namespace a target is reached from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The node's, as for the kubelet.
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
        /// An address or name; `None` for the pod's address.
        host: Option<String>,
        /// Its port.
        port: Port,
    },
    /// A call of `grpc.health.v1.Health/Check`.
    Grpc {
        /// Its port.
        port: Port,
        /// The service to ask for; empty for the server as a whole.
        service: String,
        /// TLS; `None` for plain text.
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
    /// An address or name; `None` for the pod's address.
    pub host: Option<String>,
    /// Its port.
    pub port: Port,
    /// Path and query, as written in the manifest; never empty.
    pub path: String,
    /// Names and values of headers, in manifest order.
    pub headers: Vec<(String, String)>,
}

/// TLS settings from annotations. Files are names in the node's folder of certificates, never paths: those who may
/// write a pod must not choose what the agent reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// How to check the server's certificate; `None` if it is not checked.
    pub check: Option<ServerCheck>,
    /// What we present to a server that asks for a certificate.
    pub client: Option<ClientIdentity>,
}

/// How a server's certificate is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerCheck {
    /// The PEM file with the certificates of the accepted signers.
    pub ca: String,
    /// The name that the certificate must be for; `None` for the host that is probed.
    pub server_name: Option<String>,
}

/// A client's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The PEM file with the certificate and its intermediates.
    pub certificate: String,
    /// The PEM file with its private key.
    pub key: String,
}
