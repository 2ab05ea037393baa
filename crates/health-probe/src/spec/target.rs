//! The target of one probe, as far as it can be determined.

use std::fmt;

use super::{ContainerSpec, Handler, HttpGet, NamedPort, Origin, PodSpec, PortError, Probe, Tls};
use crate::{Outcome, RawResult};

/// The target of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    /// The network namespace to probe from.
    pub origin: Origin,
    /// How to probe it.
    pub action: TargetAction<'a>,
}

/// How to probe a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetAction<'a> {
    /// Runs a command in the container.
    Exec(&'a [String]),
    /// A GET request.
    Http {
        /// An address (IPv6 without brackets) or a name.
        host: String,
        /// The port.
        port: u16,
        /// The rest of the request.
        request: &'a HttpGet,
    },
    /// A connection.
    Tcp {
        /// An address or a name.
        host: String,
        /// The port.
        port: u16,
    },
    /// A call of `grpc.health.v1.Health/Check`.
    Grpc {
        /// An address.
        host: String,
        /// The port.
        port: u16,
        /// The service to request.
        service: &'a str,
        /// TLS; `None` for plain text.
        tls: Option<&'a Tls>,
    },
}

impl fmt::Display for TargetAction<'_> {
    /// Formats the target as a URL or a command.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exec(command) => {
                f.write_str("exec")?;
                command.iter().try_for_each(|word| write!(f, " {word}"))
            }
            Self::Http {
                host,
                port,
                request,
            } => {
                let scheme = if request.tls.is_some() {
                    "https"
                } else {
                    "http"
                };
                let slash = if request.path.starts_with('/') {
                    ""
                } else {
                    "/"
                };
                let path = &request.path;
                write!(f, "{scheme}://{}:{port}{slash}{path}", InUrl(host))
            }
            Self::Tcp { host, port } => write!(f, "tcp://{}:{port}", InUrl(host)),
            Self::Grpc {
                host,
                port,
                service,
                tls,
            } => {
                let scheme = if tls.is_some() { "grpcs" } else { "grpc" };
                write!(f, "{scheme}://{}:{port}/{service}", InUrl(host))
            }
        }
    }
}

/// A host as written in URLs: IPv6 addresses in brackets.
struct InUrl<'a>(&'a str);

impl fmt::Display for InUrl<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.contains(':') && !self.0.starts_with('[') {
            true => write!(f, "[{}]", self.0),
            false => f.write_str(self.0),
        }
    }
}

/// Why a probe has no target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The port does not exist.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The pod's address is unknown.
    #[error("the pod has no address yet")]
    NoAddress,
}

impl From<TargetError> for Outcome {
    /// A missing target says nothing about the container, so no conclusion is drawn.
    fn from(error: TargetError) -> Self {
        Self {
            result: RawResult::Unknown,
            message: error.to_string(),
            errored: true,
        }
    }
}

impl Probe {
    /// Returns the target of a probe of this container.
    pub fn target<'a>(
        &'a self,
        pod: &PodSpec,
        container: &ContainerSpec,
    ) -> Result<Target<'a>, TargetError> {
        let ports: &[NamedPort] = &container.ports;
        let action = match &self.handler {
            Handler::Exec { command } => TargetAction::Exec(command),
            Handler::Http(request) => TargetAction::Http {
                host: host(pod, request.host.as_deref())?,
                port: request.port.resolve(ports)?,
                request,
            },
            Handler::Tcp { host: name, port } => TargetAction::Tcp {
                host: host(pod, name.as_deref())?,
                port: port.resolve(ports)?,
            },
            Handler::Grpc { port, service, tls } => TargetAction::Grpc {
                host: host(pod, None)?,
                port: port.resolve(ports)?,
                service,
                tls: tls.as_ref(),
            },
        };
        let origin = self.origin;
        Ok(Target { origin, action })
    }
}

fn host(pod: &PodSpec, host: Option<&str>) -> Result<String, TargetError> {
    match (host, pod.ips.first()) {
        (Some(host), _) => Ok(host.to_owned()),
        (None, Some(address)) => Ok(address.to_string()),
        (None, None) => Err(TargetError::NoAddress),
    }
}
