//! The programs that handle a traced flow first.

use health_common::ct::IP_PROTOCOL_SCTP;
use health_common::service::outside::is_own;
use health_common::service::{FRONTEND_HOST_ONLY, Frontend, Origin};
use health_datapath::DatapathProgram;
use health_datapath::services::Connection;
use health_model::api::{SourceKind, TracedSource};

use super::kernel::Kernel;

/// Where the programs first see a flow, depending on its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TraceHook {
    /// The programs on system calls of the host's own sockets.
    Socket,
    /// The program on an endpoint's device.
    Endpoint,
    /// The programs on uplinks.
    Uplink,
}

impl TraceHook {
    pub(super) const fn of(source: SourceKind) -> Self {
        match source {
            SourceKind::Host => Self::Socket,
            SourceKind::Endpoint => Self::Endpoint,
            SourceKind::Node | SourceKind::RemoteEndpoint | SourceKind::Outside => Self::Uplink,
        }
    }

    /// Whether the programs at this hook see packets, as opposed to system calls.
    pub(super) fn has_packets(self) -> bool {
        self != Self::Socket
    }

    /// The origin of flows at this hook.
    pub(super) const fn origin(self) -> Origin {
        match self {
            Self::Socket | Self::Endpoint => Origin::Inside,
            Self::Uplink => Origin::Outside,
        }
    }

    /// Why the programs at this hook do not serve a flow to a frontend; `None` if they do.
    pub(super) fn unserved(
        self,
        kernel: &Kernel,
        source: &TracedSource,
        flow: &Connection,
        frontend: &Frontend,
    ) -> Option<&'static str> {
        let is_host_only = frontend.flags & FRONTEND_HOST_ONLY != 0;
        match self {
            Self::Socket if !kernel.pinned.has_program(DatapathProgram::SockConnect4) => {
                Some("host sockets cannot reach services")
            }
            Self::Socket if flow.protocol == IP_PROTOCOL_SCTP => {
                Some("the kernel runs no program when an SCTP socket connects")
            }
            Self::Socket => None,
            _ if is_host_only => {
                Some("only this node's sockets can reach a service at a loopback address")
            }
            Self::Endpoint => None,
            Self::Uplink if !kernel.pinned.has_program(DatapathProgram::ToService) => {
                Some("packets from outside the node cannot reach services")
            }
            Self::Uplink if is_own(source.endpoint.is_some(), || source.identity) => {
                Some("no packet from outside can have a source address of this node")
            }
            Self::Uplink => None,
        }
    }
}
