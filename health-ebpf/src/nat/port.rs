//! Port selection for new flows.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_F_CURRENT_NETNS, BPF_NOEXIST};
use aya_ebpf::helpers::generated::{
    bpf_get_prandom_u32, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp,
};
use health_common::ct::IP_PROTOCOL_UDP;
use health_common::nat::{NAT_HOST_LOCAL, NAT_NEEDS_CT, TRIES, can_change_port};
use health_common::tcp::IP_PROTOCOL_TCP;

use super::entry::{is_unanswered, mark_masqueraded, released, taken_back, translation};
use super::passage::Passage;
use super::sender::Sender;
use super::settings::settings;
use crate::clock::coarse_now_ns;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::subprogram::{Stage, subprogram};
use crate::table::EEXIST;

/// Whether a flow got a port of this node's address.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Allocated {
    /// The flow needs none: its packets pass unchanged.
    Passed,
    /// The flow has one.
    Port,
    /// Other flows have the port, or all ports that were tried.
    InUse,
    /// The maps have no space for another translation.
    NoRoom,
}

// SAFETY: `repr(u32)`, four variants without fields.
unsafe impl Stage for Allocated {}

/// Finds a port for a new flow, and creates both entries.
#[subprogram(nat4_allocate, nat6_allocate)]
pub(super) fn allocate<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Allocated {
    let Some(settings) = settings::<T>() else {
        return Allocated::Passed;
    };
    let now_ns = coarse_now_ns();
    let own = passage.tuple.source();
    if passage.sender == Sender::Node {
        passage.entry = T::translation(own, NAT_HOST_LOCAL | NAT_NEEDS_CT, now_ns);
        match take(frame, passage) {
            Allocated::InUse => {}
            allocated => return allocated,
        }
        // Without a socket, the packet was already translated, at a port of this bridge.
        if !has_socket(frame) {
            return Allocated::Passed;
        }
    }
    let flags = if passage.sender == Sender::Endpoint {
        0
    } else {
        NAT_NEEDS_CT
    };
    // SAFETY: a helper without arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    let search = settings.ports.search(u16::from_be(own.1), random);
    let is_fixed = !can_change_port(passage.tuple.protocol());
    for tries in 0..TRIES {
        let port_be = match search.candidate(tries) {
            _ if is_fixed && tries == 0 => own.1,
            Some(port) if !is_fixed => port.to_be(),
            _ => break,
        };
        passage.entry = T::translation((settings.node_be, port_be), flags, now_ns);
        match take(frame, passage) {
            Allocated::InUse => consider(frame, passage),
            allocated => return allocated,
        }
    }
    Allocated::InUse
}

/// Records a new translation in conntrack.
#[subprogram(nat4_mark, nat6_mark)]
pub(super) fn mark<T: Version>(_frame: &Frame, passage: &mut Passage<T>) {
    // Map keys must be on the stack.
    let flow = passage.tuple;
    if let Some(tracked) = T::flows().get_ptr_mut(&flow) {
        // SAFETY: a value of that map.
        unsafe { mark_masqueraded::<T>(tracked, &passage.entry) };
    }
}

/// Takes the port in `passage.entry` for a flow: creates both entries, or neither. If another CPU was faster,
/// `passage.entry` becomes the entry which that CPU created.
#[subprogram(nat4_take, nat6_take)]
pub(super) fn take<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> Allocated {
    // Map keys and values must be on the stack.
    let (flow, out) = (&{ passage.tuple }, &{ passage.entry });
    let key = flow.reply_key(out);
    let mut is_new = false;
    match translation(&key) {
        // A remnant of this flow's translation, or one that another CPU is about to complete.
        Some(back) if T::translated(&back) == flow.source() => {}
        there => {
            if there.is_some_and(|back| !released(&key, &back))
                || !passage.is_host_local() && is_used_by_host(frame, &key)
            {
                return Allocated::InUse;
            }
            let back = T::translation(flow.source(), T::flags(out), T::created_ns(out));
            match T::translations().insert_unnoted(&key, &back, u64::from(BPF_NOEXIST)) {
                Ok(_) => is_new = true,
                Err(EEXIST) => return Allocated::InUse,
                Err(_) => return Allocated::NoRoom,
            }
        }
    }
    if T::translations()
        .insert(flow, out, u64::from(BPF_NOEXIST))
        .is_ok()
    {
        if is_new {
            T::translations().note(&key);
        }
        return Allocated::Port;
    }
    let there = translation(flow);
    if there.is_none_or(|there| T::translated(&there) != T::translated(out)) {
        let _ = T::translations().remove(&key);
    }
    match there {
        Some(there) => {
            passage.entry = there;
            Allocated::Port
        }
        None => Allocated::NoRoom,
    }
}

/// Remembers the port in `passage.entry`, which is taken, if the flow that has it is the oldest unanswered one so far.
#[subprogram(nat4_consider, nat6_consider)]
fn consider<T: Version>(_frame: &Frame, passage: &mut Passage<T>) {
    // Map keys and values must be on the stack.
    let (flow, out) = (&{ passage.tuple }, &{ passage.entry });
    let key = flow.reply_key(out);
    // Two flows that can only use one port would keep taking it from each other.
    if can_change_port(flow.protocol())
        && let Some(back) = translation(&key)
        && is_unanswered(&key, &back)
    {
        let age = age(T::created_ns(&back));
        if age > passage.oldest_age {
            (passage.oldest_age, passage.oldest_be) = (age, T::translated(out).1);
        }
    }
}

/// The age of a translation: approximately in milliseconds, and never 0.
#[inline(always)]
fn age(created_ns: u64) -> u32 {
    let age = coarse_now_ns().saturating_sub(created_ns) >> 20;
    if age >= u64::from(u32::MAX) {
        u32::MAX
    } else {
        age as u32 + 1
    }
}

/// When no port is free, takes back the port of the oldest unanswered flow among those whose ports were tried, and puts
/// that port into the entry. Returns whether a port was freed.
#[subprogram(nat4_take_back, nat6_take_back)]
pub(super) fn take_back<T: Version>(_frame: &Frame, passage: &mut Passage<T>) -> bool {
    if passage.oldest_age == 0 {
        return false;
    }
    passage.oldest_age = 0;
    let tried = passage.entry;
    let own = (T::translated(&tried).0, passage.oldest_be);
    passage.entry = T::translation(own, T::flags(&tried), T::created_ns(&tried));
    // Map keys must be on the stack.
    let key = { passage.tuple }.reply_key(&{ passage.entry });
    translation(&key).is_none_or(|back| taken_back(&key, &back))
}

/// Whether a process on this host would receive packets with this tuple.
#[inline(always)]
fn is_used_by_host<T: Version>(frame: &Frame, key: &T) -> bool {
    let ctx = frame.ctx().as_ptr();
    let tuple = core::ptr::from_ref(key).cast_mut().cast();
    let (len, netns) = (T::SOCKET_TUPLE_LEN, BPF_F_CURRENT_NETNS as u64);
    // SAFETY: a valid context; a tuple starts with the layout that the helpers expect. The socket reference is
    // released.
    unsafe {
        let socket = match key.protocol() {
            IP_PROTOCOL_TCP => bpf_skc_lookup_tcp(ctx, tuple, len, netns, 0),
            IP_PROTOCOL_UDP => bpf_sk_lookup_udp(ctx, tuple, len, netns, 0),
            _ => return false,
        };
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
    }
    true
}

/// Whether a process on this host sent the packet: forwarded packets have no socket.
#[inline(always)]
pub(super) fn has_socket(frame: &Frame) -> bool {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { !(*frame.skb()).__bindgen_anon_2.sk.is_null() }
}
