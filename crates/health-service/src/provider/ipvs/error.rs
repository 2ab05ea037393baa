//! Errors of the IPVS provider.

use health_net::KernelError;

use super::netlink::NetlinkError;

/// Why services could not be written into the kernel.
#[derive(Debug, thiserror::Error)]
pub enum IpvsError {
    /// A request to IPVS, ipset or nf_tables failed.
    #[error("cannot {attempt}: {source}")]
    Netlink {
        /// The attempted operation and its object.
        attempt: String,
        /// The netlink error.
        source: NetlinkError,
    },
    /// The kernel lacks a module and could not load it.
    #[error("this kernel has no {what}: load the module {module}, or use another proxy mode")]
    Missing {
        /// What the module provides.
        what: &'static str,
        /// The name of the module.
        module: &'static str,
    },
    /// Another agent serves through IPVS in this network namespace.
    #[error("another agent is using IPVS in this network namespace")]
    InUse,
    /// A device, an address or a sysctl could not be changed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A foreign device has the name of ours.
    #[error("{0} is not a dummy device: service addresses cannot be bound to it")]
    ForeignDevice(&'static str),
    /// Some steps failed; all others succeeded.
    #[error("{first}{}", others(*more))]
    Steps {
        /// The first failure.
        first: String,
        /// The number of further failures.
        more: usize,
    },
}

fn others(more: usize) -> String {
    match more {
        0 => String::new(),
        more => format!("; and {more} more"),
    }
}

impl IpvsError {
    pub(super) fn netlink(attempt: impl Into<String>) -> impl FnOnce(NetlinkError) -> Self {
        let attempt = attempt.into();
        |source| Self::Netlink { attempt, source }
    }
}
