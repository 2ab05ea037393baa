//! Rewriting a packet in place, with all checksums that cover it.

use health_common::nat::{Difference, checksum_field};
use health_common::service::xdp::XdpWay;
use health_common::tcp::{IP_PROTOCOL_TCP, TcpHeader};

use super::flow::Passage;
use super::frame::{Plain, UdpHeader, XdpFrame};
use crate::frame::IP_AT;

/// By how much the sums under the checksums of a packet change, that of the IP header first: see
/// [`XdpWay::ip_change`].
#[inline(always)]
pub(super) fn changes<T: Plain>(received: &T, passage: &Passage<T>) -> Option<[u32; 2]> {
    let field = checksum_field(received.protocol())?;
    let change = T::change(&received.source(), &passage.source)
        .and(T::change(&received.destination(), &passage.destination));
    Some([change.address.word(), change.under(&field).word()])
}

/// Gives a packet its new ends and the hardware addresses of its next hop, one hop further. `None`, with the packet as
/// it was, if its headers are not all there.
#[inline(always)]
pub(super) fn packet<T: Plain>(
    frame: &XdpFrame,
    protocol: u8,
    way: &XdpWay<T::Address>,
) -> Option<()> {
    let macs = frame.at::<[u32; 3]>(0)?;
    let ip = frame.at::<T::Header>(IP_AT)?;
    let ports = frame.at::<[u16; 2]>(T::L4_AT)?;
    let difference = Difference::of_word(way.transport_change);
    if protocol == IP_PROTOCOL_TCP {
        let check = &mut frame.at::<TcpHeader>(T::L4_AT)?.check;
        *check = difference.apply(*check);
    } else {
        // The only other one, whose checksum is optional.
        let check = &mut frame.at::<UdpHeader>(T::L4_AT)?.check;
        *check = difference.apply_optional(*check);
    }
    *ports = way.ports_be;
    let ends = (way.source_be, way.destination_be);
    T::send_on(ip, ends, Difference::of_word(way.ip_change));
    *macs = way.macs;
    Some(())
}
