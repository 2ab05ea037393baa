//! How TCP and UDP differ in reading and rewriting.

use health_common::ct::IP_PROTOCOL_UDP;
use health_common::nat::apply_folded;
use health_common::tcp::{ACK, FIN, IP_PROTOCOL_TCP, RST, SYN, TcpHeader};

/// UDP header (RFC 768), network byte order.
#[repr(C)]
pub(super) struct UdpHeader {
    source_be: u16,
    destination_be: u16,
    len_be: u16,
    /// 0: no checksum.
    check: u16,
}

/// A header of a transport protocol.
pub(super) trait Transport {
    /// Its IP protocol number.
    const PROTOCOL: u8;
    /// Source and destination port.
    fn ports_be(&self) -> [u16; 2];
    /// TCP flags; 0 for other protocols.
    fn tcp_flags(&self) -> u8;
    /// Replaces the ports, and updates the checksum by [`health_common::nat::Difference::folded`].
    fn rewrite(&mut self, ports_be: [u16; 2], change: u16);
}

impl Transport for TcpHeader {
    const PROTOCOL: u8 = IP_PROTOCOL_TCP;

    #[inline(always)]
    fn ports_be(&self) -> [u16; 2] {
        [self.source_be, self.destination_be]
    }

    #[inline(always)]
    fn tcp_flags(&self) -> u8 {
        self.flags
    }

    #[inline(always)]
    fn rewrite(&mut self, ports_be: [u16; 2], change: u16) {
        [self.source_be, self.destination_be] = ports_be;
        self.check = apply_folded(change, self.check);
    }
}

impl Transport for UdpHeader {
    const PROTOCOL: u8 = IP_PROTOCOL_UDP;

    #[inline(always)]
    fn ports_be(&self) -> [u16; 2] {
        [self.source_be, self.destination_be]
    }

    #[inline(always)]
    fn tcp_flags(&self) -> u8 {
        0
    }

    #[inline(always)]
    fn rewrite(&mut self, ports_be: [u16; 2], change: u16) {
        [self.source_be, self.destination_be] = ports_be;
        if self.check != 0 {
            self.check = match apply_folded(change, self.check) {
                0 => 0xffff,
                check => check,
            };
        }
    }
}

/// Whether a packet neither opens nor ends a connection.
#[inline(always)]
pub(super) const fn is_between(protocol: u8, tcp_flags: u8) -> bool {
    protocol == IP_PROTOCOL_UDP || tcp_flags & (SYN | FIN | RST | ACK) == ACK
}
