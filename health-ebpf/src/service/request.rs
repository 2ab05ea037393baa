//! State of a packet across the steps.

use health_common::packet::Packet;
use health_common::tcp::{ACK, SYN};
use health_common::tuple::ServiceFlowParts;

use crate::bounds::header_at;
use crate::conntrack::PacketFlags;
use crate::frame::{Frame, IP_AT};
use crate::hook::Hook;
use crate::ip_version::Version;

/// The receiver of an ICMP error.
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Receiver {
    /// The client, or, if the flow was not looked up, no one.
    Client = 0,
    /// The client, which is its own backend.
    OwnClient = 1,
    /// The backend.
    Backend = 2,
    /// The backend, which is its own client.
    OwnBackend = 3,
}

impl Receiver {
    /// Whether it sent packets to the service.
    #[inline(always)]
    pub(super) const fn is_client(self) -> bool {
        matches!(self, Self::Client | Self::OwnClient)
    }
}

/// State of a packet to a service across the steps.
#[repr(C)]
pub(super) struct Request<T: Version> {
    /// The packet's tuple, in direction out.
    pub(super) tuple: T,
    /// Address of the backend.
    pub(super) addr_be: T::Address,
    /// Port of the backend.
    pub(super) port_be: u16,
    /// The receiver of an ICMP error.
    pub(super) receiver: Receiver,
    /// Index of the backend of a new flow.
    pub(super) backend: u32,
    /// Number of the service port, for a new flow.
    pub(super) service: u32,
    /// Number of ports, or backends, that were tried for it and are taken.
    pub(super) attempt: u16,
    /// Whether the service has affinity, for a new flow.
    pub(super) has_affinity: u16,
    /// At an uplink: offset of the IP header.
    pub(super) ip_at: u32,
    /// Offset of the transport header or the ICMP error.
    pub(super) content_at: u32,
    /// A later fragment: there is no transport header.
    pub(super) is_later: u16,
    /// The client's port as seen by the backend, if it differs: see [`health_common::service::FLOW_MOVED`]. Else 0.
    pub(super) moved_port_be: u16,
    /// TCP flags of the segment; 0 for other protocols.
    pub(super) tcp_flags: u16,
    /// At an uplink: an answer that passes through this node, and gets the service's source when it leaves.
    pub(super) is_passing: u16,
    /// Flags of the packet's flow.
    pub(super) flow_flags: u32,
    /// For an ICMP error: offset of the transport header of the packet that it quotes. Else 0. The tuple is then that
    /// of a reply to this packet.
    pub(super) quoted_at: u16,
    /// Number of the quoted packet's bytes from that offset on.
    pub(super) quoted_len: u16,
}

impl<T: Version> Request<T> {
    /// For a packet that has not been read yet.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self::at(IP_AT)
    }

    /// The same, with its IP header at this offset.
    #[inline(always)]
    pub(super) fn at(ip_at: usize) -> Self {
        Self {
            tuple: T::default(),
            addr_be: T::Address::default(),
            port_be: 0,
            receiver: Receiver::Client,
            backend: 0,
            service: 0,
            attempt: 0,
            has_affinity: 0,
            ip_at: ip_at as u32,
            content_at: 0,
            is_later: 0,
            moved_port_be: 0,
            tcp_flags: 0,
            flow_flags: 0,
            is_passing: 0,
            quoted_at: 0,
            quoted_len: 0,
        }
    }

    /// Offset of the packet's IP header.
    #[inline(always)]
    pub(super) fn ip_at<P: Hook>(&self) -> Option<usize> {
        if P::IS_UPLINK {
            header_at(self.ip_at)
        } else {
            Some(IP_AT)
        }
    }

    /// The address and port that the backend listens on.
    #[inline(always)]
    pub(super) fn backend(&self) -> (T::Address, u16) {
        (self.addr_be, self.port_be)
    }

    #[inline(always)]
    pub(super) fn set_backend(&mut self, (addr_be, port_be): (T::Address, u16)) {
        (self.addr_be, self.port_be) = (addr_be, port_be);
    }

    /// The packet's tuple, with the source port that the backend sees.
    #[inline(always)]
    pub(super) fn moved(&self) -> T {
        if self.moved_port_be == 0 {
            self.tuple
        } else {
            self.tuple.with_source_port(self.moved_port_be)
        }
    }

    /// Records a packet of a flow.
    #[inline(always)]
    pub(super) fn take_in(&mut self, packet: &Packet<T>) {
        self.tuple = packet.tuple;
        self.is_later = packet.is_later().into();
        self.tcp_flags = packet.tcp_flags.into();
    }

    /// Records the parts of the packet's flow.
    #[inline(always)]
    pub(super) fn follow(&mut self, parts: &ServiceFlowParts<T::Address>) {
        self.set_backend(parts.to);
        self.flow_flags = parts.flags.into();
        self.moved_port_be = parts.client_port_be;
    }

    /// Whether the packet itself belongs to a flow, and is not an error about one.
    #[inline(always)]
    pub(super) fn has_flow(&self) -> bool {
        self.tuple.protocol() != 0 && !self.is_error()
    }

    /// Whether it is such an error, and the packet that it quotes was read.
    #[inline(always)]
    pub(super) fn is_error(&self) -> bool {
        self.quoted_at != 0
    }

    /// Whether the packet's IP header follows an Ethernet header, without a VLAN tag.
    #[inline(always)]
    pub(super) fn is_untagged(&self, frame: &Frame) -> bool {
        self.ip_at == IP_AT as u32 && !frame.has_vlan_tag()
    }

    /// Offset of the transport header, if there is one.
    #[inline(always)]
    pub(super) fn content_at(&self) -> Option<u32> {
        (self.is_later == 0).then_some(self.content_at)
    }

    /// Whether the packet opens a connection.
    #[inline(always)]
    pub(super) fn opens(&self) -> bool {
        opens(self.tcp_flags as u8)
    }

    /// The packet's TCP flags, for conntrack.
    #[inline(always)]
    pub(super) fn packet_flags(&self) -> PacketFlags {
        PacketFlags::new(self.is_later != 0, self.tcp_flags as u8)
    }

    /// Whether the packet's flow has this flag.
    #[inline(always)]
    pub(super) fn has(&self, flag: u16) -> bool {
        self.flow_flags as u16 & flag != 0
    }
}

/// Whether a segment with these flags opens a connection.
#[inline(always)]
pub(super) fn opens(tcp_flags: u8) -> bool {
    tcp_flags & (SYN | ACK) == SYN
}
