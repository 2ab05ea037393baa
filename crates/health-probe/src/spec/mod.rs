//! Reads what to probe from pod manifests.
//!
//! [`read`] takes YAML or JSON, [`PodSpec::from_pod`] a pod of the Kubernetes API. Both apply the defaults and checks
//! of Kubernetes 1.20 and later to all fields that matter for probes, and to our [`annotation`]s. They report all
//! errors at once, each with the path of its field.

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

/// The parts of a pod that its probes need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSpec {
    /// The pod's unique ID: the UID that the API assigned, or `NAMESPACE/NAME` for a manifest without a UID. For
    /// mirrors see [`mirror`](Self::mirror).
    pub uid: Arc<str>,
    /// For an object that mirrors a static pod: the UID that it claims that pod has.
    pub mirrored_uid: Option<Arc<str>>,
    /// The pod's namespace; `default` if the manifest has none.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's addresses, the primary one first; empty while unknown.
    pub ips: Vec<IpAddr>,
    /// Whether the pod's containers are restarted when they exit.
    pub restart_policy: RestartPolicy,
    /// How long the pod's containers may take to exit before they are killed.
    pub termination_grace: Duration,
    /// Regular containers, then init containers, each in the order of the manifest.
    pub containers: Vec<ContainerSpec>,
}

impl PodSpec {
    /// Turns the pod into the mirror of the static pod with this UID. Anyone who may write pods can claim any UID, but
    /// only for a pod of the same name; therefore the name is part of the unique ID.
    pub(crate) fn mirror(&mut self, uid: &str) {
        self.uid = Arc::from(format!("{uid}@{}/{}", self.namespace, self.name));
        self.mirrored_uid = Some(Arc::from(uid));
    }

    /// The UID by which the runtime knows the pod; `None` for a manifest without a UID.
    pub(crate) fn known_uid(&self) -> Option<&str> {
        let has_uid = *self.uid != format!("{}/{}", self.namespace, self.name);
        let own = has_uid.then_some(&self.uid);
        self.mirrored_uid.as_ref().or(own).map(|uid| &**uid)
    }

    /// The UID for display. Pods of different names may have the same displayed UID.
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
    /// Always, whatever the exit code.
    #[default]
    Always,
    /// After an exit code other than 0.
    OnFailure,
    /// Never.
    Never,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerSpec {
    /// The container's name, unique in the pod.
    pub name: Arc<str>,
    /// The container's role in the pod.
    pub role: Role,
    /// The container's image; may be empty.
    pub image: String,
    /// The environment variables whose values are in the manifest itself.
    pub env: BTreeMap<String, String>,
    /// The container's listed ports, with and without names.
    pub ports: Vec<NamedPort>,
    /// The startup probe.
    pub startup: Option<Arc<Probe>>,
    /// The readiness probe.
    pub readiness: Option<Arc<Probe>>,
    /// The liveness probe.
    pub liveness: Option<Arc<Probe>>,
}

impl ContainerSpec {
    /// The probe of this type.
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
    /// A main container: the pod's purpose.
    Regular,
    /// An init container that is always restarted, and runs alongside the regular containers. It may have probes.
    Sidecar,
    /// An init container that finishes before other containers start. It has no probes.
    Init,
}

/// The purpose of a probe, in the order in which the workers of a container are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeType {
    /// Whether the container has started. The other probes wait for this one.
    Startup,
    /// Whether the container can serve.
    Readiness,
    /// Whether the container must be restarted.
    Liveness,
}

impl ProbeType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::Startup, Self::Readiness, Self::Liveness];

    /// The name in annotations and output: `startup`, `readiness`, `liveness`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Startup => "startup",
            Self::Readiness => "readiness",
            Self::Liveness => "liveness",
        }
    }

    /// The name at the start of a sentence and in metrics: `Startup`, `Readiness`, `Liveness`.
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

/// A string that names no type of probe.
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
    /// How the container is probed.
    pub handler: Handler,
    /// How long the container must run before the first probe, in seconds. Zero or less means no delay.
    pub initial_delay_seconds: i32,
    /// Time from one probe to the next.
    pub period: Duration,
    /// The period until the container is ready or has started; set by an annotation.
    pub period_until_ready: Option<Duration>,
    /// Time limit for the response.
    pub timeout: Duration,
    /// Number of consecutive successes that make a success; at least 1.
    pub success_threshold: u32,
    /// Number of consecutive failures that make a failure; at least 1.
    pub failure_threshold: u32,
    /// How long the container may take to exit when this probe causes a restart. Defaults to the pod's value.
    pub termination_grace: Option<Duration>,
    /// The network namespace to probe from. Ignored for commands.
    pub origin: Origin,
}

/// The network namespace to probe from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The node's, as with the kubelet.
    #[default]
    Node,
    /// The pod's own, so that no policy has to admit the node.
    Pod,
}

/// How a container is probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handler {
    /// A command in the container.
    Exec {
        /// The program and its arguments, with references to variables expanded.
        command: Vec<String>,
    },
    /// A GET request.
    Http(HttpGet),
    /// A connection.
    Tcp {
        /// An address or name; `None` for the pod's address.
        host: Option<String>,
        /// The port.
        port: Port,
    },
    /// A call of `grpc.health.v1.Health/Check`.
    Grpc {
        /// The port.
        port: Port,
        /// The service to request; empty for the server as a whole.
        service: String,
        /// TLS; `None` for plain text.
        tls: Option<Tls>,
    },
}

impl Handler {
    /// The name for display: `exec`, `http`, `https`, `tcp` or `grpc`.
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
    /// TLS settings; set for the scheme HTTPS.
    pub tls: Option<Tls>,
    /// An address or name; `None` for the pod's address.
    pub host: Option<String>,
    /// The port.
    pub port: Port,
    /// Path and query as written in the manifest; never empty.
    pub path: String,
    /// Names and values of headers, in manifest order.
    pub headers: Vec<(String, String)>,
}

/// TLS settings from annotations. Files are names in the node's folder of certificates, never paths: users who may
/// write a pod must not choose which files the agent reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// How to check the server's certificate; `None` for no check.
    pub check: Option<ServerCheck>,
    /// The certificate to present to servers that ask for one.
    pub client: Option<ClientIdentity>,
}

/// How a server's certificate is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerCheck {
    /// The PEM file with the certificates of the accepted signers.
    pub ca: String,
    /// The name that the certificate must be valid for; `None` for the probed host.
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
