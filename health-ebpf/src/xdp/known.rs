//! Flows whose way was looked up a moment ago: `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`. What all maps say of a flow,
//! and the host's routes, are asked for once in a while, and its packets are told to conntrack then.

use core::intrinsics::{AtomicOrdering, atomic_xchg};
use core::ptr;

use aya_ebpf::bindings::BPF_ANY;
use health_common::ct::TUPLE_IN;
use health_common::packet::Packet;
use health_common::service::xdp::{Pending, XdpFlow};

use super::frame::{Plain, XdpFrame, is_between, read};
use super::look_up::{Draft, StepResult};
use super::{XdpVerdict, counted, handed_over, rewrite};
use crate::clock::coarse_now_ns;
use crate::conntrack::{add, enter_passed};
use crate::frame::IP_AT;
use crate::maps::HEALTH_XDP_CHANGED;

/// Sends a packet on as those before it; `None` if it is for the stack.
#[inline(always)]
pub(super) fn send_on<T: Plain>(frame: &XdpFrame) -> Option<XdpVerdict> {
    let packet: Packet<T> = read(frame)?;
    if is_between(&packet)
        && let Some(verdict) = send_on_as_before(frame, &packet)
    {
        return Some(verdict);
    }
    Draft::begin(&packet)?;
    Some(XdpVerdict::LOOK_UP)
}

#[inline(always)]
fn send_on_as_before<T: Plain>(frame: &XdpFrame, packet: &Packet<T>) -> Option<XdpVerdict> {
    // Keys must be on the stack.
    let key = packet.tuple;
    let entry = T::known().get_ptr_mut(&key)?;
    let changed_ns = HEALTH_XDP_CHANGED.get(0)?;
    // SAFETY: a value of that map, valid memory for the program's run. All but the first two words stay as they are.
    let (made_ns, way) = unsafe { ((*entry).made_ns, &(*entry).way) };
    if !XdpFlow::<T::Address>::serves(made_ns, *changed_ns, coarse_now_ns()) {
        return None;
    }
    let ip = frame.at::<T::Header>(IP_AT)?;
    let is_alike = *frame.at::<[u16; 3]>(0)? == way.mac
        && frame.ifindex() == way.from
        && T::class(ip) == way.class
        && T::total_len(ip) <= way.mtu.into();
    if !is_alike {
        return None;
    }
    let verdict = handed_over(way.to)?;
    let length = frame.length();
    rewrite::packet::<T>(frame, key.protocol(), way)?;
    let passed = Pending::packet(length - IP_AT as u32);
    // SAFETY: a counter in that value, which is aligned.
    unsafe { add(&raw mut (*entry).pending, passed.0) };
    Some(counted(length, verdict))
}

/// Takes what went by under a key and conntrack has not been told of.
#[inline(always)]
pub(super) fn take<T: Plain>(key: &T) -> Pending {
    let Some(entry) = T::known().get_ptr_mut(key) else {
        return Pending::default();
    };
    // SAFETY: as above. For why an intrinsic see `conntrack::add`.
    let taken =
        unsafe { atomic_xchg::<u64, { AtomicOrdering::SeqCst }>(&raw mut (*entry).pending, 0) };
    Pending(taken)
}

/// Has packets with this tuple go on as `flow` says.
#[inline(always)]
pub(super) fn keep<T: Plain>(key: &T, flow: &XdpFlow<T::Address>) {
    if let Some(entry) = T::known().get_ptr_mut(key)
        // SAFETY: as above.
        && unsafe { (*entry).way == flow.way }
    {
        // SAFETY: as above, an aligned word.
        unsafe { ptr::write_volatile(&raw mut (*entry).made_ns, flow.made_ns) };
        return;
    }
    // As a whole: others may be reading.
    let _ = T::known().insert(key, flow, u64::from(BPF_ANY));
}

/// Forgets both ways of a flow, and tells conntrack of what went by: the end of a connection, and what comes after it, is
/// for the programs of tc.
#[inline(always)]
pub(super) fn forget<T: Plain>(_frame: &XdpFrame, draft: &mut Draft<T>) -> Option<StepResult> {
    // As above.
    let mut key = draft.received;
    let mut flow = draft.flow;
    enter_passed(T::flows(), &mut flow, take(&key));
    let _ = T::known().remove(&key);
    // What comes the other way has the ends that this packet would get.
    let way = &draft.known.way;
    key = key
        .with_destination((way.destination_be, way.ports_be[1]))
        .reply()
        .with_destination((way.source_be, way.ports_be[0]))
        .with_direction(TUPLE_IN);
    flow = draft.flow.reply();
    enter_passed(T::flows(), &mut flow, take(&key));
    let _ = T::known().remove(&key);
    None
}
