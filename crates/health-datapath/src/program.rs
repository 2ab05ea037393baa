//! The programs: their names, where each is attached, and whether the datapath can do without it.

use std::fmt;

use aya_obj::generated::bpf_attach_type::{self, *};
use health_common::calls::{
    CALL_DELIVER, CALL_FROM_SERVICE, CALL_MASQUERADE, CALL_TO_SERVICE, CALL_UNMASQUERADE,
    CALLS_ENTRIES,
};

/// A program of the datapath. Socket programs are in the order in which they are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DatapathProgram {
    /// For packets to an endpoint.
    ToEndpoint,
    /// For packets from an endpoint.
    FromEndpoint,
    /// For packets that leave through an uplink.
    ToNetdev,
    /// For packets that arrive on an uplink.
    FromNetdev,
    /// `to_netdev` tail-calls it.
    Masquerade,
    /// `from_netdev` tail-calls it.
    Unmasquerade,
    /// `from_netdev` and `unmasquerade` tail-call it.
    ToService,
    /// `to_netdev` tail-calls it if services are on.
    FromService,
    /// `from_endpoint` and `to_service` tail-call it if host routing is on.
    Deliver,
    /// Writes RTT rows on behalf of user space.
    RttAccount,
    /// Counts the handshakes of HTTP probes.
    TcpAccount,
    /// Removes expired conntrack and NAT entries.
    CtCollect,
    /// `to_netdev` for uplinks whose packets begin with the IP header.
    ToIpNetdev,
    /// `from_netdev` for such uplinks.
    FromIpNetdev,
    /// `to_ip_netdev` tail-calls it.
    IpMasquerade,
    /// `from_ip_netdev` tail-calls it.
    IpUnmasquerade,
    /// `from_ip_netdev` and `ip_unmasquerade` tail-call it.
    IpToService,
    /// `to_ip_netdev` tail-calls it if services are on.
    IpFromService,
    /// The XDP program for packets that arrive on an uplink; pinned only if it has to handle service traffic.
    XdpNetdev,
    /// For `connect` of IPv4 sockets.
    SockConnect4,
    /// For `connect` of IPv6 sockets.
    SockConnect6,
    /// For `getpeername` of IPv4 sockets.
    SockGetpeername4,
    /// For `getpeername` of IPv6 sockets.
    SockGetpeername6,
    /// For `recvmsg` of IPv4 sockets.
    SockRecvmsg4,
    /// For `recvmsg` of IPv6 sockets.
    SockRecvmsg6,
    /// For sockets that are closed.
    SockRelease,
    /// For `sendmsg` of IPv4 sockets.
    SockSendmsg4,
    /// For `sendmsg` of IPv6 sockets.
    SockSendmsg6,
}

/// Where a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachPoint {
    /// A device, for packets of this direction.
    Tc(Direction),
    /// A device, for packets that its driver receives.
    Xdp,
    /// This hook of the root cgroup.
    Cgroup(bpf_attach_type),
    /// Nowhere: other programs tail-call it.
    TailCall,
    /// Nowhere: user space runs it.
    UserSpace,
}

/// The direction of the packets that a program sees, from the device's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Received by the device.
    Ingress,
    /// Sent by the device.
    Egress,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

impl DatapathProgram {
    /// All programs that are always pinned, except those for sockets. The slowest to load come first.
    pub const ALWAYS: [Self; 12] = [
        Self::ToEndpoint,
        Self::FromEndpoint,
        Self::ToNetdev,
        Self::FromNetdev,
        Self::Masquerade,
        Self::Unmasquerade,
        Self::ToService,
        Self::FromService,
        Self::Deliver,
        Self::RttAccount,
        Self::TcpAccount,
        Self::CtCollect,
    ];

    /// Second copies of programs, for uplinks whose packets begin with the IP header.
    pub const FOR_IP: [Self; 6] = [
        Self::ToIpNetdev,
        Self::FromIpNetdev,
        Self::IpMasquerade,
        Self::IpUnmasquerade,
        Self::IpToService,
        Self::IpFromService,
    ];

    /// The programs for the host's own sockets. They are attached to the root cgroup.
    pub const FOR_SOCKETS: [Self; 9] = [
        Self::SockConnect4,
        Self::SockConnect6,
        Self::SockSendmsg4,
        Self::SockSendmsg6,
        Self::SockRecvmsg4,
        Self::SockRecvmsg6,
        Self::SockGetpeername4,
        Self::SockGetpeername6,
        Self::SockRelease,
    ];

    /// The tail-called programs, with their slots in `HEALTH_CALLS`.
    pub const CALLED: [(u32, Self); CALLS_ENTRIES as usize] = [
        (CALL_MASQUERADE, Self::Masquerade),
        (CALL_UNMASQUERADE, Self::Unmasquerade),
        (CALL_TO_SERVICE, Self::ToService),
        (CALL_FROM_SERVICE, Self::FromService),
        (CALL_DELIVER, Self::Deliver),
    ];

    /// Like [`Self::CALLED`], for `HEALTH_IP_CALLS`.
    pub const CALLED_FOR_IP: [(u32, Self); 4] = [
        (CALL_MASQUERADE, Self::IpMasquerade),
        (CALL_UNMASQUERADE, Self::IpUnmasquerade),
        (CALL_TO_SERVICE, Self::IpToService),
        (CALL_FROM_SERVICE, Self::IpFromService),
    ];

    /// All programs except those for sockets.
    pub(crate) fn of_devices() -> impl Iterator<Item = Self> {
        let always = Self::ALWAYS.into_iter();
        always.chain(Self::FOR_IP).chain([Self::XdpNetdev])
    }

    /// The name of the program and of its pin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ToEndpoint => "to_endpoint",
            Self::FromEndpoint => "from_endpoint",
            Self::ToNetdev => "to_netdev",
            Self::FromNetdev => "from_netdev",
            Self::Masquerade => "masquerade",
            Self::Unmasquerade => "unmasquerade",
            Self::ToService => "to_service",
            Self::FromService => "from_service",
            Self::Deliver => "deliver",
            Self::RttAccount => "rtt_account",
            Self::TcpAccount => "tcp_account",
            Self::CtCollect => "ct_collect",
            Self::ToIpNetdev => "to_ip_netdev",
            Self::FromIpNetdev => "from_ip_netdev",
            Self::IpMasquerade => "ip_masquerade",
            Self::IpUnmasquerade => "ip_unmasquerade",
            Self::IpToService => "ip_to_service",
            Self::IpFromService => "ip_from_service",
            Self::XdpNetdev => "xdp_netdev",
            Self::SockConnect4 => "sock_connect4",
            Self::SockConnect6 => "sock_connect6",
            Self::SockGetpeername4 => "sock_getpeername4",
            Self::SockGetpeername6 => "sock_getpeername6",
            Self::SockRecvmsg4 => "sock_recvmsg4",
            Self::SockRecvmsg6 => "sock_recvmsg6",
            Self::SockRelease => "sock_release",
            Self::SockSendmsg4 => "sock_sendmsg4",
            Self::SockSendmsg6 => "sock_sendmsg6",
        }
    }

    /// Returns the program in the object from which this one is loaded; they differ for second copies.
    pub const fn origin(self) -> Self {
        match self {
            Self::ToIpNetdev => Self::ToNetdev,
            Self::FromIpNetdev => Self::FromNetdev,
            Self::IpMasquerade => Self::Masquerade,
            Self::IpUnmasquerade => Self::Unmasquerade,
            Self::IpToService => Self::ToService,
            Self::IpFromService => Self::FromService,
            other => other,
        }
    }

    /// Returns the program's name in the object.
    pub const fn object_name(self) -> &'static str {
        self.origin().name()
    }

    /// Returns where the program is attached.
    pub const fn attach_point(self) -> AttachPoint {
        match self {
            Self::FromEndpoint | Self::FromNetdev | Self::FromIpNetdev => {
                AttachPoint::Tc(Direction::Ingress)
            }
            Self::ToEndpoint | Self::ToNetdev | Self::ToIpNetdev => {
                AttachPoint::Tc(Direction::Egress)
            }
            Self::XdpNetdev => AttachPoint::Xdp,
            Self::Masquerade
            | Self::Unmasquerade
            | Self::ToService
            | Self::FromService
            | Self::Deliver
            | Self::IpMasquerade
            | Self::IpUnmasquerade
            | Self::IpToService
            | Self::IpFromService => AttachPoint::TailCall,
            Self::RttAccount | Self::TcpAccount | Self::CtCollect => AttachPoint::UserSpace,
            Self::SockConnect4 => AttachPoint::Cgroup(BPF_CGROUP_INET4_CONNECT),
            Self::SockConnect6 => AttachPoint::Cgroup(BPF_CGROUP_INET6_CONNECT),
            Self::SockGetpeername4 => AttachPoint::Cgroup(BPF_CGROUP_INET4_GETPEERNAME),
            Self::SockGetpeername6 => AttachPoint::Cgroup(BPF_CGROUP_INET6_GETPEERNAME),
            Self::SockRecvmsg4 => AttachPoint::Cgroup(BPF_CGROUP_UDP4_RECVMSG),
            Self::SockRecvmsg6 => AttachPoint::Cgroup(BPF_CGROUP_UDP6_RECVMSG),
            Self::SockRelease => AttachPoint::Cgroup(BPF_CGROUP_INET_SOCK_RELEASE),
            Self::SockSendmsg4 => AttachPoint::Cgroup(BPF_CGROUP_UDP4_SENDMSG),
            Self::SockSendmsg6 => AttachPoint::Cgroup(BPF_CGROUP_UDP6_SENDMSG),
        }
    }

    /// Whether everything else works without the program: XDP only makes services faster, and without the socket
    /// programs, only the host's own sockets cannot reach services.
    pub const fn is_optional(self) -> bool {
        matches!(
            self.attach_point(),
            AttachPoint::Xdp | AttachPoint::Cgroup(_)
        )
    }
}

impl fmt::Display for DatapathProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_for_sockets_are_attached_by_name() {
        let mut by_program = DatapathProgram::FOR_SOCKETS;
        by_program.sort();
        assert!(by_program.is_sorted_by_key(|program| program.name()));
    }
}
