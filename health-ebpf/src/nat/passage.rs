//! State of a packet across the steps.

use health_common::metrics::Reason;
use health_common::nat::{NAT_HOST_LOCAL, NAT_NEEDS_CT};
use health_common::packet::Packet;

use super::sender::Sender;
use crate::bounds::header_at;
use crate::conntrack::PacketFlags;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::rewrite::{self, Ends};
use crate::subprogram::Stage;

/// How masquerading treats a packet.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(super) enum Content {
    /// It passes unchanged.
    Passed,
    /// It belongs to a flow that may be translated.
    Flow,
    /// It is an ICMP error.
    Error,
}

// SAFETY: `repr(u32)`, three variants without fields.
unsafe impl Stage for Content {}

/// State of a packet across the steps.
#[repr(C)]
pub(super) struct Passage<T: Version> {
    /// For a leaving packet, the flow, in direction out; for an arriving one, the key of the `IN` entry.
    pub(super) tuple: T,
    /// The translation; for an arriving packet, its `IN` entry.
    pub(super) entry: T::Translation,
    /// Offset of the IP header.
    pub(super) ip_at: u32,
    /// Offset of the transport header or the ICMP error.
    pub(super) content_at: u32,
    pub(super) sender: Sender,
    /// The port (network byte order) of the oldest unanswered flow among those whose ports were tried.
    pub(super) oldest_be: u16,
    /// The age of that flow: see [`super::port::consider`]; 0 if there is none.
    pub(super) oldest_age: u32,
    /// Ifindex to store in the flow's entry if one is created.
    pub(super) ifindex: u32,
    /// Non-zero for a later fragment, which has no transport header.
    pub(super) is_later: u16,
    /// TCP flags of the segment; 0 for other protocols.
    pub(super) tcp_flags: u16,
}

impl<T: Version> Passage<T> {
    #[inline(always)]
    pub(super) fn at(ip_at: usize) -> Self {
        Self {
            tuple: T::default(),
            entry: T::Translation::default(),
            ip_at: ip_at as u32,
            content_at: 0,
            sender: Sender::Node,
            oldest_be: 0,
            oldest_age: 0,
            ifindex: 0,
            is_later: 0,
            tcp_flags: 0,
        }
    }

    #[inline(always)]
    pub(super) fn take_in(&mut self, packet: &Packet<T>) {
        self.tuple = packet.tuple;
        self.is_later = packet.is_later().into();
        self.tcp_flags = packet.tcp_flags.into();
    }

    #[inline(always)]
    pub(super) fn packet_flags(&self) -> PacketFlags {
        PacketFlags::new(self.is_later != 0, self.tcp_flags as u8)
    }

    /// Offset of the IP header, with bounds that the verifier sees.
    #[inline(always)]
    pub(super) fn ip_at(&self) -> Option<usize> {
        header_at(self.ip_at)
    }

    #[inline(always)]
    pub(super) fn is_host_local(&self) -> bool {
        T::flags(&self.entry) & NAT_HOST_LOCAL != 0
    }

    #[inline(always)]
    pub(super) fn needs_ct(&self) -> bool {
        T::flags(&self.entry) & NAT_NEEDS_CT != 0
    }

    /// Rewrites one end of the packet.
    #[inline(always)]
    pub(super) fn rewrite(&self, frame: &Frame, ends: &Ends<T>) -> Result<(), Reason> {
        let content_at = (self.is_later == 0).then_some(self.content_at);
        let protocol = self.tuple.protocol();
        rewrite::packet(frame, self.ip_at, content_at, protocol, ends).ok_or(Reason::WriteFailed)
    }
}
