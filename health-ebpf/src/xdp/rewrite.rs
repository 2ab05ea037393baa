//! Rewriting a packet in place, with all checksums that cover it.

use health_common::nat::checksum_field;
use health_common::tcp::{IP_PROTOCOL_TCP, TcpHeader};

use super::flow::Passage;
use super::frame::{Plain, UdpHeader, XdpFrame};
use crate::frame::IP_AT;

/// Gives a packet its new ends and the hardware addresses of its next hop, one hop further. `None`, with the packet as
/// it was, if its headers are not all there.
#[inline(always)]
pub(super) fn packet<T: Plain>(
    frame: &XdpFrame,
    passage: &Passage<T>,
    next_hop: [[u8; 6]; 2],
) -> Option<()> {
    let protocol = passage.flow.protocol();
    let field = checksum_field(protocol)?;
    let hardware = frame.at::<[[u8; 6]; 2]>(0)?;
    let ip = frame.at::<T::Header>(IP_AT)?;
    let ports = frame.at::<[u16; 2]>(T::L4_AT)?;
    let check = if protocol == IP_PROTOCOL_TCP {
        &mut frame.at::<TcpHeader>(T::L4_AT)?.check
    } else {
        &mut frame.at::<UdpHeader>(T::L4_AT)?.check
    };
    let (source, destination) = T::ends(ip);
    let change = T::change(&(source, ports[0]), &passage.source)
        .and(T::change(&(destination, ports[1]), &passage.destination));
    let difference = change.under(&field);
    *check = if field.is_optional {
        difference.apply_optional(*check)
    } else {
        difference.apply(*check)
    };
    *ports = [passage.source.1, passage.destination.1];
    let ends = (passage.source.0, passage.destination.0);
    T::send_on(ip, ends, change.address);
    *hardware = next_hop;
    Some(())
}
