//! Flows whose way was looked up recently: `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`. The other maps and the host's
//! routes are consulted only from time to time, and the flow's packets are reported to conntrack then.

use core::intrinsics::{AtomicOrdering, atomic_xchg};
use core::ptr;

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::bindings::xdp_action::XDP_ABORTED;
use aya_ebpf::helpers::generated::bpf_jiffies64;
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_IN};
use health_common::service::xdp::{Pending, XdpFlow};
use health_common::tcp::{IP_PROTOCOL_TCP, TcpHeader};

use super::conntrack::enter_passed;
use super::draft::{Draft, Drafted};
use super::frame::{Headers, Plain, XdpFrame};
use super::rewrite;
use super::transport::{Transport, UdpHeader, is_between};
use super::verdict::{XdpVerdict, counted, handed_over};
use crate::conntrack::add;
use crate::frame::IP_AT;
use crate::maps::{HEALTH_CONFIG, HEALTH_XDP_TIMES};
use crate::subprogram::{Returned, subprogram};

/// Whether the way of a packet is known.
pub(super) enum Known {
    /// Not yet.
    Unknown,
    /// Yes, and this is the packet's fate; or it is for the stack.
    Done(XdpVerdict),
}

impl Returned for Known {
    #[inline(always)]
    fn encode(self) -> u32 {
        match self {
            // No packet has this fate.
            Self::Unknown => XDP_ABORTED,
            Self::Done(verdict) => verdict.encode(),
        }
    }

    #[inline(always)]
    fn decode(number: u32) -> Self {
        match number {
            XDP_ABORTED => Self::Unknown,
            _ => Self::Done(XdpVerdict::decode(number)),
        }
    }
}

/// Forwards a packet like those before it, if it is a whole UDP datagram or TCP segment.
#[subprogram(xdp4_send_known, xdp6_send_known)]
pub(super) fn send_known<T: Drafted>(frame: &XdpFrame) -> Known {
    let known = match frame.at::<T::Header>(IP_AT) {
        Some(ip) => match T::protocol_behind(ip) {
            IP_PROTOCOL_TCP => send_known_of::<T, TcpHeader>(frame),
            IP_PROTOCOL_UDP => send_known_of::<T, UdpHeader>(frame),
            _ => None,
        },
        None => None,
    };
    known.unwrap_or(Known::Done(XdpVerdict::PASSED))
}

/// `None` if the packet is for the stack.
#[inline(always)]
fn send_known_of<T: Drafted, L: Transport>(frame: &XdpFrame) -> Option<Known> {
    let headers = frame.headers::<T::Header, L>(T::L4_AT)?;
    let (length, len) = (frame.length(), T::total_len(headers.ip));
    let is_whole = len >= (T::HEADER_LEN + size_of::<L>()) as u32 && length >= IP_AT as u32 + len;
    if !is_whole || !T::is_plain(headers.ip) {
        return None;
    }
    // Keys must be on the stack.
    let key = T::tuple(headers.ip, headers.transport.ports_be(), L::PROTOCOL);
    let tcp_flags = headers.transport.tcp_flags();
    if is_between(L::PROTOCOL, tcp_flags)
        && let Some(verdict) = send_on_as_before::<T, L>(frame, headers, &key)
    {
        return Some(Known::Done(verdict));
    }
    Draft::begin(&key, tcp_flags)?;
    Some(Known::Unknown)
}

/// `None` if everything must be looked up.
#[inline(always)]
fn send_on_as_before<T: Plain, L: Transport>(
    frame: &XdpFrame,
    headers: Headers<'_, T::Header, L>,
    key: &T,
) -> Option<XdpVerdict> {
    let entry = T::known().get_ptr_mut(key)?;
    let times = HEALTH_XDP_TIMES.get(0)?;
    // SAFETY: a value of that map, valid memory for the program's run. The way never changes.
    let (made_ns, until_ticks, way) =
        unsafe { ((*entry).made_ns, (*entry).until_ticks, &(*entry).way) };
    // SAFETY: a helper without arguments.
    let now_ticks = unsafe { bpf_jiffies64() };
    let is_alike = made_ns > times.changed_ns
        && now_ticks < until_ticks
        && headers.receiver() == way.mac
        && frame.ifindex() == way.from
        && T::class(headers.ip) == way.class
        && T::total_len(headers.ip) <= way.mtu.into();
    if !is_alike {
        let offset = way.ports_be[0] ^ way.ports_be[1];
        if now_ticks >= until_ticks && times.is_turn_of_stack(until_ticks, now_ticks, offset) {
            // The next packet is looked up.
            // SAFETY: as above, an aligned word.
            unsafe { ptr::write_volatile(&raw mut (*entry).until_ticks, now_ticks) };
            return Some(XdpVerdict::PASSED);
        }
        return None;
    }
    let verdict = handed_over(way.to)?;
    rewrite::headers::<T, L>(headers, way);
    let length = frame.length();
    let passed = Pending::packet(length - IP_AT as u32);
    // SAFETY: a counter in that value, which is aligned.
    unsafe { add(&raw mut (*entry).pending, passed.0) };
    Some(counted(length, verdict))
}

/// Reports to conntrack the packets that passed under a key, in this direction of its flow. They count for the flow
/// that the way belonged to: packets under this key may belong to another flow by now.
#[inline(always)]
pub(super) fn report<T: Plain>(key: &T, direction: u8) {
    let (Some(entry), Some(config)) = (T::known().get_ptr_mut(key), HEALTH_CONFIG.get(0)) else {
        return;
    };
    // SAFETY: as above. For why an intrinsic see `conntrack::add`.
    let (passed, made_ns, destination) = unsafe {
        let passed = atomic_xchg::<u64, { AtomicOrdering::SeqCst }>(&raw mut (*entry).pending, 0);
        let way = &(*entry).way;
        let destination = (way.destination_be, way.ports_be[1]);
        (Pending(passed), (*entry).made_ns, destination)
    };
    let mut flow = key.with_destination(destination).with_direction(direction);
    enter_passed(T::flows(), &mut flow, passed, made_ns, &config.timeouts);
}

/// Removes the look-up result for packets with this tuple, in this direction of their flow, and reports those that
/// passed to conntrack.
#[inline(always)]
pub(super) fn remove<T: Plain>(key: &T, direction: u8) {
    report(key, direction);
    let _ = T::known().remove(key);
}

/// Stores how to forward packets with this tuple.
#[inline(always)]
pub(super) fn keep<T: Plain>(key: &T, flow: &XdpFlow<T::Address>) {
    if let Some(entry) = T::known().get_ptr_mut(key)
        // SAFETY: as above.
        && unsafe { (*entry).way == flow.way }
    {
        // SAFETY: as above, aligned words.
        unsafe {
            ptr::write_volatile(&raw mut (*entry).made_ns, flow.made_ns);
            ptr::write_volatile(&raw mut (*entry).until_ticks, flow.until_ticks);
        }
        return;
    }
    // Replaced as a whole: others may be reading.
    let _ = T::known().insert(key, flow, u64::from(BPF_ANY));
}

/// Removes the look-up results for both directions of a flow, and reports the packets that passed to conntrack: the
/// end of a connection, and everything after it, is left to the tc programs.
#[subprogram(xdp4_forget, xdp6_forget)]
pub(super) fn forget<T: Drafted>(_frame: &XdpFrame) {
    let Some(draft) = Draft::<T>::here() else {
        return;
    };
    // Keys must be on the stack.
    let mut key = draft.received;
    let direction = draft.flow.direction();
    remove(&key, direction);
    // Packets in the other direction have the ends that this packet would get.
    let way = &draft.known.way;
    key = key
        .with_destination((way.destination_be, way.ports_be[1]))
        .reply()
        .with_destination((way.source_be, way.ports_be[0]))
        .with_direction(TUPLE_IN);
    remove(&key, draft.flow.reply().direction());
}
