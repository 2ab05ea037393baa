//! Rewrites a packet in place, with all checksums that cover it.

use health_common::nat::checksum_field;
use health_common::service::xdp::XdpWay;
use health_common::tcp::{IP_PROTOCOL_TCP, TcpHeader};

use super::flow::Passage;
use super::frame::{Headers, Plain, XdpFrame};
use super::transport::{Transport, UdpHeader};

/// The changes in the sums under a packet's checksums, IP header first: like [`XdpWay::ip_change`].
#[inline(always)]
pub(super) fn changes<T: Plain>(received: &T, passage: &Passage<T>) -> Option<[u16; 2]> {
    let field = checksum_field(received.protocol())?;
    let change = T::change(&received.source(), &passage.source)
        .and(T::change(&received.destination(), &passage.destination));
    let of_ip = change.address.and(T::HOP);
    Some([of_ip.folded(), change.under(&field).folded()])
}

/// Sets a packet's new ends and the hardware addresses of its next hop, and counts down one hop.
#[inline(always)]
pub(super) fn headers<T: Plain, L: Transport>(
    headers: Headers<'_, T::Header, L>,
    way: &XdpWay<T::Address>,
) {
    T::send_on(headers.ip, way);
    headers
        .transport
        .rewrite(way.ports_be, way.transport_change);
    *headers.macs = way.macs;
}

/// Like [`headers`], for a UDP or TCP packet; `None`, with the packet unchanged, if its headers are incomplete.
#[inline(always)]
pub(super) fn packet<T: Plain>(
    frame: &XdpFrame,
    protocol: u8,
    way: &XdpWay<T::Address>,
) -> Option<()> {
    if protocol == IP_PROTOCOL_TCP {
        headers::<T, TcpHeader>(frame.headers(T::L4_AT)?, way);
    } else {
        headers::<T, UdpHeader>(frame.headers(T::L4_AT)?, way);
    }
    Some(())
}
