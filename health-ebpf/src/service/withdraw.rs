//! Packets of endpoints that policy refuses after they were rewritten: what was stored for them is removed.

use health_common::ct::TUPLE_OUT;

use super::flow::{forget, forget_from_outside};
use crate::fragment;
use crate::frame::{Frame, IP_AT};
use crate::ip_version::Version;
use crate::packet::ParsedPacket;
use crate::subprogram::subprogram;

/// Removes the flow of a packet that was rewritten.
#[subprogram(service4_withdraw, service6_withdraw)]
pub(super) fn withdraw<T: Version>(frame: &Frame) {
    if let Some(sent) = rewritten::<T>(frame) {
        forget(sent);
    }
}

/// Like [`withdraw`], if the flow is from outside.
#[subprogram(service4_withdraw_from_outside, service6_withdraw_from_outside)]
pub(super) fn withdraw_from_outside<T: Version>(frame: &Frame) {
    if let Some(sent) = rewritten::<T>(frame) {
        forget_from_outside(sent);
    }
}

/// Removes the stored ports of a first fragment that was rewritten.
#[subprogram(service4_forget_ports, service6_forget_ports)]
pub(super) fn forget_ports<T: Version>(frame: &Frame) {
    let Some(ParsedPacket { packet, .. }) = T::read(frame, IP_AT, TUPLE_OUT) else {
        return;
    };
    // The key must be on the stack.
    let answer = packet.tuple.reply();
    if let Some(back) = T::service_flows().get_ptr(&answer) {
        // SAFETY: a value of that map.
        let back = T::service_flow_parts(unsafe { &*back });
        fragment::forget(&packet, back.to);
    }
}

/// The tuple of a packet that was sent to a backend.
#[inline(always)]
fn rewritten<T: Version>(frame: &Frame) -> Option<T> {
    let ParsedPacket { packet, .. } = T::read(frame, IP_AT, TUPLE_OUT)?;
    (!packet.is_later()).then_some(packet.tuple)
}
