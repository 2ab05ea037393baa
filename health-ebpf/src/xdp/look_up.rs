//! Looks up what to do with a packet, and stores it for later packets. The steps store their results in a [`Draft`].

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::BPF_FIB_LKUP_RET_SUCCESS;
use health_common::config::{DatapathConfig, SERVICES};
use health_common::ct::TUPLE_OUT;
use health_common::packet::Packet;
use health_common::service::xdp::{Pending, XDP_RETURNS, XDP_SENDS};
use network_types::eth::EthHdr;

use super::conntrack::enter_under_way;
use super::draft::{Draft, Drafted};
use super::flow::{self, Passage};
use super::frame::{Plain, XdpFrame};
use super::verdict::{XdpVerdict, counted, handed_over};
use super::{known, rewrite};
use crate::fib::FibLookup;
use crate::frame::IP_AT;
use crate::maps::{HEALTH_CONFIG, HEALTH_XDP_DEVICES};
use crate::source::is_own;
use crate::subprogram::{Stage, subprogram};

/// Whether a packet belongs to a flow whose packets are forwarded here.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(super) enum Found {
    /// No: it is for the stack.
    Passed,
    /// Yes.
    Flow,
    /// It opens or ends such a flow.
    Ends,
}

// SAFETY: `repr(u32)`, three variants without fields.
unsafe impl Stage for Found {}

/// Finds the flow of a client's packet. The last step that looks for a flow.
#[subprogram(xdp4_find_request, xdp6_find_request)]
pub(super) fn find_request<T: Drafted>(_frame: &XdpFrame) -> Found {
    let Some(draft) = Draft::<T>::here() else {
        return Found::Passed;
    };
    let found = find(draft, flow::requested);
    if found.is_none() && !draft.is_between() {
        // It opens another connection between the same ports, which may get another backend.
        let key = draft.received;
        known::remove(&key, TUPLE_OUT);
    }
    found.unwrap_or(Found::Passed)
}

/// Finds the flow of a backend's answer.
#[subprogram(xdp4_find_answer, xdp6_find_answer)]
pub(super) fn find_answer<T: Drafted>(_frame: &XdpFrame) -> Found {
    Draft::<T>::here()
        .and_then(|draft| find(draft, flow::answered))
        .unwrap_or(Found::Passed)
}

#[inline(always)]
fn find<T: Drafted>(
    draft: &mut Draft<T>,
    passage: impl Fn(&Packet<T>, &DatapathConfig) -> Option<Passage<T>>,
) -> Option<Found> {
    let config = HEALTH_CONFIG.get(0)?;
    if config.flags & SERVICES == 0 {
        return None;
    }
    let received = draft.packet();
    let passage = passage(&received, config)?;
    draft.flow = passage.flow;
    let way = &mut draft.known.way;
    (way.source_be, way.destination_be) = (passage.source.0, passage.destination.0);
    way.ports_be = [passage.source.1, passage.destination.1];
    [way.ip_change, way.transport_change] = rewrite::changes(&received.tuple, &passage)?;
    Some(if draft.is_between() {
        Found::Flow
    } else {
        Found::Ends
    })
}

/// Determines where the packet goes; `false` if it is for the stack.
#[subprogram(xdp4_route, xdp6_route)]
pub(super) fn route<T: Drafted>(frame: &XdpFrame) -> bool {
    Draft::<T>::here()
        .and_then(|draft| route_to(frame, draft))
        .is_some()
}

#[inline(always)]
fn route_to<T: Plain>(frame: &XdpFrame, draft: &mut Draft<T>) -> Option<()> {
    // The tc programs drop it.
    if is_own::<T>(draft.received.source().0, frame.ifindex()) {
        return None;
    }
    let way = &mut draft.known.way;
    let ip = frame.at::<T::Header>(IP_AT)?;
    (way.from, way.class) = (frame.ifindex(), T::class(ip));
    way.mac = *frame.at::<[u16; 3]>(0)?;
    let mut hop = FibLookup::of::<T>(way.from, way.source_be, way.destination_be);
    hop.protocol = T::protocol_behind(ip);
    // A packet whose length does not fit the field is longer than an uplink accepts.
    hop.total_len = u16::try_from(T::total_len(ip)).ok()?;
    hop.flow_info = way.class;
    // SAFETY: the context of this program.
    if unsafe { hop.ask(frame.ctx().as_ptr()) } != BPF_FIB_LKUP_RET_SUCCESS.into() {
        return None;
    }
    way.mtu = hop.total_len;
    let [own, next] = hop.macs;
    way.macs = [
        u32::from_ne_bytes([next[0], next[1], next[2], next[3]]),
        u32::from_ne_bytes([next[4], next[5], own[0], own[1]]),
        u32::from_ne_bytes([own[2], own[3], own[4], own[5]]),
    ];
    way.to = departure(frame, hop.ifindex)?;
    Some(())
}

/// How a frame to this host leaves on a device: as in [`health_common::service::xdp::XdpWay::to`].
#[inline(always)]
fn departure(frame: &XdpFrame, by: u32) -> Option<u32> {
    let ifindex = frame.ifindex();
    // SAFETY: entries are replaced as a whole.
    let device = unsafe { HEALTH_XDP_DEVICES.get(ifindex) }?;
    if frame.at::<EthHdr>(0)?.dst_addr != device.mac {
        return None;
    }
    if by == ifindex && device.flags & XDP_RETURNS != 0 {
        return Some(0);
    }
    // SAFETY: as above.
    let device = unsafe { HEALTH_XDP_DEVICES.get(by) }?;
    (device.flags & XDP_SENDS != 0).then_some(by)
}

/// Records a packet, and forwards it.
#[subprogram(xdp4_enter, xdp6_enter)]
pub(super) fn enter<T: Drafted>(frame: &XdpFrame) -> XdpVerdict {
    Draft::<T>::here()
        .and_then(|draft| enter_into(frame, draft))
        .unwrap_or(XdpVerdict::PASSED)
}

#[inline(always)]
fn enter_into<T: Plain>(frame: &XdpFrame, draft: &mut Draft<T>) -> Option<XdpVerdict> {
    let config = HEALTH_CONFIG.get(0)?;
    let verdict = handed_over(draft.known.way.to)?;
    // Keys must be on the stack.
    let (key, mut flow) = (draft.received, draft.flow);
    let length = frame.length();
    known::report(&key, flow.direction());
    let lasts_secs = enter_under_way(
        T::flows(),
        &mut flow,
        draft.tcp_flags as u8,
        Pending::packet(length - IP_AT as u32),
        &config.timeouts,
    )?;
    rewrite::packet::<T>(frame, key.protocol(), &draft.known.way)?;
    // If it lasts one second, that may already be over.
    if lasts_secs > 1 {
        known::keep(&key, &draft.known);
    }
    Some(counted(length, verdict))
}
