//! How targets are probed: by HTTP, TCP, gRPC, or a command in the container.
//!
//! Each mechanism is passed everything that it needs, and one [`Deadline`] for all of its work. Problems on this side,
//! such as too few file descriptors, say nothing about the target: they are errors, never failures.

mod connect;
mod deadline;
mod dialogue;
pub mod exec;
pub mod grpc;
pub mod http;
mod lookup;
pub mod tcp;
#[cfg(test)]
mod testing;
pub mod tls;
mod url;

use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use health_model::address::parse_ip;
use health_net::netns::NetNs;

pub use deadline::Deadline;

use crate::{Outcome, RawResult};

/// The user agent of probes: the kubelet's name, by which servers, logs and rules tell probes from other requests, and
/// the Kubernetes version whose probes these implement.
pub(crate) const USER_AGENT: &str = "kube-probe/1.35";

/// Maximum number of bytes read from a response's body or a command's output.
pub const OUTPUT_LIMIT: usize = 10 * 1024;

/// A target's host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// An address, such as the pod's.
    Ip(IpAddr),
    /// A name, resolved for each probe.
    Name(String),
}

impl FromStr for Host {
    type Err = Infallible;

    /// Parses an address, with or without brackets, or else a name.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let bare = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .unwrap_or(text);
        Ok(parse_ip(bare).map_or_else(|_| Self::Name(text.to_owned()), Self::Ip))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Where to connect to.
#[derive(Clone, Debug)]
pub struct Target {
    /// The host.
    pub host: Host,
    /// The TCP port.
    pub port: u16,
    /// The network namespace to connect in; `None` for the agent's own. Names are resolved in the agent's.
    pub netns: Option<Arc<NetNs>>,
    /// Who asks: the pod's Kubernetes namespace. Askers share the slots for name lookups.
    pub asker: Arc<str>,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

fn success(message: impl Into<String>) -> Outcome {
    outcome(RawResult::Success, message, false)
}

fn failure(message: impl Into<String>) -> Outcome {
    outcome(RawResult::Failure, message, false)
}

/// The outcome of an attempt that went wrong on this side.
fn own_error(message: impl Into<String>) -> Outcome {
    outcome(RawResult::Unknown, message, true)
}

fn outcome(result: RawResult, message: impl Into<String>, errored: bool) -> Outcome {
    Outcome {
        result,
        message: message.into(),
        errored,
    }
}

/// An error and its causes, in one line. Each cause appears once.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let reported = error.to_string();
        if !text.ends_with(&reported) {
            text.push_str(": ");
            text.push_str(&reported);
        }
        cause = error.source();
    }
    text
}
