//! Masquerading: packets that leave by an uplink get this node's address, and what comes back is given to
//! those who asked.
//!
//! `to_netdev` and `from_netdev` hand packets on to the programs `masquerade` and `unmasquerade`, which have
//! a stack of their own. A packet's way through these is cut into steps that are functions of their own in
//! the kernel too: the verifier looks at each once, and not once for each way that leads there.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_or};

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{__sk_buff, BPF_F_CURRENT_NETNS, BPF_NOEXIST};
use aya_ebpf::helpers::generated::{
    bpf_get_prandom_u32, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp,
};
use aya_ebpf::programs::TcContext;
use health_common::calls::{CALL_MASQUERADE, CALL_UNMASQUERADE};
use health_common::collect::may_be_orphan;
use health_common::ct::{
    CT_MASQUERADED, CT_STATE_OFFSET, CtEntry, CtState, IP_PROTOCOL_UDP, TUPLE_IN, TUPLE_OUT,
    Tuple4, Tuple6,
};
use health_common::identity;
use health_common::masquerade::{Address as _, Masquerade};
use health_common::metrics::{Direction, Reason};
use health_common::nat::{
    End, NAT_CREATED_OFFSET, NAT_HOST_LOCAL, NAT_NEEDS_CT, TRIES, can_change_port,
};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::packet::{Kind, Packet};
use health_common::tcp::IP_PROTOCOL_TCP;

use crate::bounds::forgotten;
use crate::clock::{coarse_now_ns, coarse_now_secs};
use crate::conntrack::{Said, Tracked, Traffic, enter, is_known};
use crate::fragment::resolve;
use crate::frame::{Frame, IP_AT_MAX};
use crate::maps::{HEALTH_CALLS, HEALTH_CONFIG, HEALTH_ENDPOINTS, HEALTH_MASQUERADE, HEALTH_PEERS};
use crate::metrics::{Verdict, ignore, refuse};
use crate::packet::{Found, Inner};
use crate::rewrite::{self, Ends};
use crate::version::Version;

/// Result of a step: the packet goes on as it is. Results from 128 on are the [`Reason`] for which it is
/// dropped.
const PASSED: u32 = 0;
/// Result of a step: on to the next.
const FOUND: u32 = 1;
/// Result of a step: it is an ICMP error.
const IS_ERROR: u32 = 2;
/// Result of a step: the flow has no translation yet.
const IS_NEW: u32 = 3;
/// Result of a step: the port is another's.
const IS_TAKEN: u32 = 4;

/// Why packets are dropped here.
const DROPS: [Reason; 4] = [
    Reason::NatNoMapping,
    Reason::NatUnsupported,
    Reason::FragmentUnknown,
    Reason::WriteFailed,
];

/// What `bpf_map_update_elem` says of a key that is there.
const EEXIST: i32 = -17;

/// Who sends a packet that leaves.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sender {
    /// The node's own address: this host, or one that was masqueraded already.
    Node,
    /// An endpoint of this node, whose packets are in conntrack.
    Endpoint,
    /// A host behind this gateway.
    Routed,
}

/// What the steps know of a packet.
#[repr(C)]
struct Passage<T: Version> {
    /// Leaving: the flow, in direction out. Arriving: the key of the entry of direction in.
    tuple: T,
    /// The translation: for a packet that arrives, the entry of direction in.
    entry: T::Translation,
    /// Where the IP header begins.
    ip_at: u32,
    /// Where the transport header or the ICMP error begins.
    content_at: u32,
    sender: Sender,
    /// A later fragment: there is no transport header.
    is_later: u32,
    /// Of the segment, 0 for other protocols.
    tcp_flags: u32,
}

impl<T: Version> Passage<T> {
    #[inline(always)]
    fn at(ip_at: usize) -> Self {
        Self {
            tuple: T::default(),
            entry: T::Translation::default(),
            ip_at: ip_at as u32,
            content_at: 0,
            sender: Sender::Node,
            is_later: 0,
            tcp_flags: 0,
        }
    }

    #[inline(always)]
    fn take_in(&mut self, packet: &Packet<T>) {
        self.tuple = packet.tuple;
        self.is_later = packet.is_later().into();
        self.tcp_flags = packet.tcp_flags.into();
    }

    #[inline(always)]
    fn said(&self) -> Said {
        if self.is_later != 0 {
            Said::Nothing
        } else {
            Said::Flags(self.tcp_flags as u8)
        }
    }

    /// Where the IP header begins, in bounds that the verifier sees.
    #[inline(always)]
    fn ip_at(&self) -> Option<usize> {
        // A mask's bounds stay with the value where it is put away; those of comparisons do not in Linux 6.1.
        const MASK: u32 = (IP_AT_MAX + 1).next_power_of_two() - 1;
        (self.ip_at <= IP_AT_MAX).then(|| (forgotten(self.ip_at) & MASK) as usize)
    }

    #[inline(always)]
    fn is_host_local(&self) -> bool {
        T::flags(&self.entry) & NAT_HOST_LOCAL != 0
    }

    #[inline(always)]
    fn needs_ct(&self) -> bool {
        T::flags(&self.entry) & NAT_NEEDS_CT != 0
    }
}

/// Hands a packet that leaves by an uplink on to `masquerade`, if anything of its IP version is masqueraded.
#[inline(always)]
pub fn leave(frame: &Frame, ethertype: u16) -> Verdict {
    if is_on(ethertype) {
        // SAFETY: nothing is held that would have to be dropped.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_MASQUERADE) };
    }
    ignore()
}

/// Hands a packet that came by an uplink on to `unmasquerade`, if it may be for a masqueraded flow.
#[inline(always)]
pub fn arrive(frame: &Frame, ethertype: u16) -> Verdict {
    if is_on(ethertype) {
        // SAFETY: as above.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_UNMASQUERADE) };
    }
    ignore()
}

#[inline(always)]
fn is_on(ethertype: u16) -> bool {
    match (HEALTH_MASQUERADE.get(0), ethertype) {
        (Some(config), ETHERTYPE_IPV4) => config.v4.is_on(),
        (Some(config), ETHERTYPE_IPV6) => config.v6.is_on(),
        _ => false,
    }
}

/// The program `masquerade`: a packet that leaves by an uplink.
#[inline(always)]
pub fn masquerade(frame: &Frame) -> Verdict {
    let result = match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => leaving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => leaving::<Tuple6>(frame, ip_at),
        _ => PASSED,
    };
    verdict(frame, result, Direction::Egress)
}

/// The program `unmasquerade`: a packet that came by an uplink.
#[inline(always)]
pub fn unmasquerade(frame: &Frame) -> Verdict {
    let result = match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => arriving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => arriving::<Tuple6>(frame, ip_at),
        _ => PASSED,
    };
    verdict(frame, result, Direction::Ingress)
}

#[inline(always)]
fn verdict(frame: &Frame, result: u32, direction: Direction) -> Verdict {
    for reason in DROPS {
        if result == reason as u32 {
            return refuse(frame, reason, direction);
        }
    }
    ignore()
}

#[inline(always)]
fn leaving<T: Steps>(frame: &Frame, ip_at: usize) -> u32 {
    let skb = frame.skb();
    let mut passage = Passage::<T>::at(ip_at);
    match T::read_leaving(skb, &mut passage) {
        FOUND => {}
        IS_ERROR => return T::leaving_error(skb, &mut passage),
        result => return result,
    }
    let found = match T::find(skb, &mut passage) {
        IS_NEW => T::translate(skb, &mut passage),
        result => result,
    };
    match found {
        FOUND if passage.is_host_local() => PASSED,
        FOUND => T::rewrite_source(skb, &mut passage),
        result => result,
    }
}

#[inline(always)]
fn arriving<T: Steps>(frame: &Frame, ip_at: usize) -> u32 {
    let Some(settings) = settings::<T>() else {
        return PASSED;
    };
    let skb = frame.skb();
    let mut passage = Passage::<T>::at(ip_at);
    match T::addresses(frame, ip_at) {
        Some((_, destination)) if destination == settings.node_be => {}
        Some((_, destination)) if settings.is_behind(&destination) => {
            return T::note_opened(skb, &mut passage);
        }
        _ => return PASSED,
    }
    match T::read_arriving(skb, &mut passage) {
        FOUND => {}
        IS_ERROR => return T::arriving_error(skb, &mut passage),
        result => return result,
    }
    match T::find_reply(skb, &mut passage) {
        FOUND => T::rewrite_destination(skb, &mut passage),
        result => result,
    }
}

/// The steps as functions of their own. The verifier does not take a pointer for granted that is handed to
/// such a function.
trait Steps: Version {
    fn read_leaving(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn find(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn translate(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn take(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn rewrite_source(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn leaving_error(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn read_arriving(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn find_reply(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn rewrite_destination(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn arriving_error(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
    fn note_opened(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32;
}

macro_rules! steps {
    ($tuple:ty, $($step:ident as $name:ident),+) => {
        impl Steps for $tuple {$(
            #[inline(always)]
            fn $step(skb: *mut __sk_buff, passage: &mut Passage<Self>) -> u32 {
                #[unsafe(no_mangle)]
                #[inline(never)]
                extern "C" fn $name(skb: *mut __sk_buff, passage: *mut Passage<$tuple>) -> u32 {
                    let ctx = TcContext::new(skb);
                    // SAFETY: a reference, in the only call.
                    match unsafe { passage.as_mut() } {
                        Some(passage) => $step::<$tuple>(&Frame::new(&ctx), passage),
                        None => PASSED,
                    }
                }
                $name(skb, passage)
            }
        )+}
    };
}

steps!(
    Tuple4,
    read_leaving as nat4_read_leaving,
    find as nat4_find,
    translate as nat4_translate,
    take as nat4_take,
    rewrite_source as nat4_rewrite_source,
    leaving_error as nat4_leaving_error,
    read_arriving as nat4_read_arriving,
    find_reply as nat4_find_reply,
    rewrite_destination as nat4_rewrite_destination,
    arriving_error as nat4_arriving_error,
    note_opened as nat4_note_opened
);
steps!(
    Tuple6,
    read_leaving as nat6_read_leaving,
    find as nat6_find,
    translate as nat6_translate,
    take as nat6_take,
    rewrite_source as nat6_rewrite_source,
    leaving_error as nat6_leaving_error,
    read_arriving as nat6_read_arriving,
    find_reply as nat6_find_reply,
    rewrite_destination as nat6_rewrite_destination,
    arriving_error as nat6_arriving_error,
    note_opened as nat6_note_opened
);

/// Reads a packet that leaves.
#[inline(always)]
fn read_leaving<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return PASSED;
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return PASSED;
    };
    let Some(sender) = sender::<T>(&source, settings) else {
        return PASSED;
    };
    if sender == Sender::Node && is_native::<T>(&destination, settings) {
        return PASSED;
    }
    passage.sender = sender;
    let Some(Found {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_OUT)
    else {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    passage.content_at = content_at;
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return IS_ERROR,
        Kind::NoFlow => {
            return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
        }
    }
    if !resolve(&mut packet, &config.timeouts) {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::FragmentUnknown);
    }
    passage.take_in(&packet);
    if sender == Sender::Node
        && !settings.is_shared(packet.tuple.protocol(), packet.tuple.source().1)
    {
        return PASSED;
    }
    FOUND
}

/// Finds the translation of a flow. Without one, it tells whether there is to be one.
#[inline(always)]
fn find<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return PASSED;
    };
    let traffic = Traffic {
        tx_bytes: frame.length() - ip_at as u32,
        source_identity: if passage.sender == Sender::Node {
            identity::HOST
        } else {
            identity::UNKNOWN
        },
        ifindex: frame.ifindex(),
        ..Traffic::default()
    };
    let (said, timeouts) = (passage.said(), &config.timeouts);
    let sender = passage.sender;
    // Linux 6.1 takes keys of maps from the stack alone.
    let mut flow = passage.tuple;
    if let Some(entry) = whole(&flow) {
        passage.entry = entry;
        if T::flags(&entry) & NAT_NEEDS_CT != 0 {
            // A segment that is no part of its connection is translated all the same.
            let _ = enter(T::flows(), &mut flow, said, traffic, timeouts);
            flow = flow.outbound();
        }
        passage.tuple = flow;
        return FOUND;
    }
    if sender != Sender::Node && is_native::<T>(&flow.destination().0, settings) {
        return PASSED;
    }
    let is_tracked = sender == Sender::Endpoint && is_known(T::flows(), &mut flow)
        || matches!(
            enter(T::flows(), &mut flow, said, traffic, timeouts),
            Tracked::Known | Tracked::New
        );
    passage.tuple = flow;
    // What answers somebody who knows its source keeps it.
    if is_tracked && flow.direction() != TUPLE_OUT {
        return PASSED;
    }
    // The identifier of an echo reply is that of the request.
    let is_echo_reply = flow.protocol() == T::ICMP && flow.destination().1 != 0;
    if is_tracked && !is_echo_reply {
        return IS_NEW;
    }
    if sender == Sender::Node {
        PASSED
    } else {
        Reason::NatUnsupported as u32
    }
}

#[inline(always)]
fn rewrite_source<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let ends = Ends::<T> {
        end: End::Source,
        old: passage.tuple.source(),
        new: T::translated(&passage.entry),
    };
    rewrite_end(frame, passage, &ends)
}

/// Sees to an ICMP error that leaves: about a packet that came for one whose flow is translated.
#[inline(always)]
fn leaving_error<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let (Some(ip_at), Some(settings)) = (passage.ip_at(), settings::<T>()) else {
        return PASSED;
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return PASSED;
    };
    let sender = passage.sender;
    let Some(mut inner) = T::read_inner(frame, ip_at, passage.content_at, TUPLE_OUT) else {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    let Some(entry) = translation(&inner.reply) else {
        // About a packet of somebody who knows whom it was for.
        if is_known(T::flows(), &mut inner.reply) && inner.reply.direction() == TUPLE_IN {
            return PASSED;
        }
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    if T::flags(&entry) & NAT_HOST_LOCAL != 0 {
        return PASSED;
    }
    let inside = Ends::<T> {
        end: End::Destination,
        old: inner.reply.source(),
        new: T::translated(&entry),
    };
    let around = Ends::<T> {
        end: End::Source,
        old: (source, 0),
        new: (settings.node_be, 0),
    };
    rewrite_error(frame, passage, &inner, &inside, &around)
}

/// Reads a packet for this node's address.
#[inline(always)]
fn read_arriving<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return PASSED;
    };
    let Some(Found {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_IN)
    else {
        return PASSED;
    };
    passage.content_at = content_at;
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return IS_ERROR,
        Kind::NoFlow => return PASSED,
    }
    if !resolve(&mut packet, &config.timeouts) {
        return PASSED;
    }
    passage.take_in(&packet);
    if settings.is_shared(packet.tuple.protocol(), packet.tuple.destination().1) {
        FOUND
    } else {
        PASSED
    }
}

/// Finds the translation that a packet for this node's address belongs to.
#[inline(always)]
fn find_reply<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let (Some(ip_at), Some(config)) = (passage.ip_at(), HEALTH_CONFIG.get(0)) else {
        return PASSED;
    };
    // As in `find`.
    let key = passage.tuple;
    let Some(entry) = translation(&key) else {
        return PASSED;
    };
    passage.entry = entry;
    let mut flow = key.flow(&entry);
    if let Some(tracked) = T::flows().get_ptr_mut(flow) {
        // A flow that is over and only waits to be collected gets nothing any more.
        // SAFETY: a value of that map.
        if unsafe { (*tracked).has_expired(coarse_now_secs()) } {
            return PASSED;
        }
        // It may have been made anew under a translation that there was.
        // SAFETY: as above.
        unsafe { mark_masqueraded::<T>(tracked, &entry) };
    }
    // The look-up keeps the other entry, too, from being evicted.
    if T::translations().get_ptr(flow).is_none() {
        let out = T::translation(key.destination(), T::flags(&entry), T::created_ns(&entry));
        // The next packet out tries again.
        let _ = T::translations().insert(flow, out, u64::from(BPF_NOEXIST));
    }
    if passage.needs_ct() {
        flow = flow.reply();
        let traffic = received(frame, ip_at);
        // As on the way out.
        let _ = enter(
            T::flows(),
            &mut flow,
            passage.said(),
            traffic,
            &config.timeouts,
        );
    }
    if passage.is_host_local() {
        PASSED
    } else {
        FOUND
    }
}

#[inline(always)]
fn rewrite_destination<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let ends = Ends::<T> {
        end: End::Destination,
        old: passage.tuple.destination(),
        new: T::translated(&passage.entry),
    };
    rewrite_end(frame, passage, &ends)
}

/// Sees to an ICMP error for this node's address: about a packet that was translated.
#[inline(always)]
fn arriving_error<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let (Some(ip_at), Some(settings)) = (passage.ip_at(), settings::<T>()) else {
        return PASSED;
    };
    let Some(inner) = T::read_inner(frame, ip_at, passage.content_at, TUPLE_IN) else {
        return PASSED;
    };
    let Some(entry) = translation(&inner.reply) else {
        return PASSED;
    };
    if T::flags(&entry) & NAT_HOST_LOCAL != 0 {
        return PASSED;
    }
    let to = T::translated(&entry);
    let inside = Ends::<T> {
        end: End::Source,
        old: inner.reply.destination(),
        new: to,
    };
    let around = Ends::<T> {
        end: End::Destination,
        old: (settings.node_be, 0),
        new: (to.0, 0),
    };
    rewrite_error(frame, passage, &inner, &inside, &around)
}

/// Enters a packet for a host behind this gateway: what that host answers is told from what it opens.
#[inline(always)]
fn note_opened<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let (Some(ip_at), Some(config)) = (passage.ip_at(), HEALTH_CONFIG.get(0)) else {
        return PASSED;
    };
    let Some(Found { mut packet, .. }) = T::read(frame, ip_at, TUPLE_IN) else {
        return PASSED;
    };
    if !matches!(packet.kind, Kind::Flow | Kind::Fragment(_)) {
        return PASSED;
    }
    if resolve(&mut packet, &config.timeouts) {
        let said = Said::by(&packet);
        let traffic = received(frame, ip_at);
        // Whether it was entered decides nothing.
        let _ = enter(
            T::flows(),
            &mut packet.tuple,
            said,
            traffic,
            &config.timeouts,
        );
    }
    PASSED
}

#[inline(always)]
fn received(frame: &Frame, ip_at: usize) -> Traffic {
    Traffic {
        rx_bytes: frame.length() - ip_at as u32,
        ifindex: frame.ifindex(),
        ..Traffic::default()
    }
}

/// The translation of an outbound flow, of which both entries are there. Both are looked up, so the map,
/// which evicts what is not used, has both or none for long.
#[inline(always)]
fn whole<T: Version>(flow: &T) -> Option<T::Translation> {
    let out = translation(flow)?;
    let key = flow.reply_key(&out);
    match translation(&key) {
        Some(back) if T::translated(&back) == flow.source() => return Some(out),
        Some(_) => {}
        None => {
            let back = T::translation(flow.source(), T::flags(&out), T::created_ns(&out));
            if T::translations()
                .insert(key, back, u64::from(BPF_NOEXIST))
                .is_ok()
            {
                return Some(out);
            }
        }
    }
    // Its port is another flow's by now.
    let _ = T::translations().remove(flow);
    None
}

/// Finds a port for a new flow, and makes both entries.
#[inline(always)]
fn translate<T: Steps>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    let Some(settings) = settings::<T>() else {
        return PASSED;
    };
    let now_ns = coarse_now_ns();
    let own = passage.tuple.source();
    if passage.sender == Sender::Node {
        passage.entry = T::translation(own, NAT_HOST_LOCAL | NAT_NEEDS_CT, now_ns);
        match T::take(frame.skb(), passage) {
            IS_TAKEN => {}
            FOUND => return FOUND,
            // Without room, nothing is translated wrongly.
            _ => return PASSED,
        }
        // Without a socket it is a packet that was translated before, at a port of this bridge.
        if !has_socket(frame) {
            return PASSED;
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
        match T::take(frame.skb(), passage) {
            IS_TAKEN => {}
            FOUND => {
                if let Some(tracked) = T::flows().get_ptr_mut(passage.tuple) {
                    // SAFETY: a value of that map.
                    unsafe { mark_masqueraded::<T>(tracked, &passage.entry) };
                }
                return FOUND;
            }
            _ => break,
        }
    }
    Reason::NatNoMapping as u32
}

/// Takes the port of the entry for a flow: makes both entries, or none. Where another CPU was faster, the
/// entry is what that one made.
#[inline(always)]
fn take<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> u32 {
    // As in `find`; of values, too.
    let (flow, out) = (&{ passage.tuple }, &{ passage.entry });
    let key = flow.reply_key(out);
    match translation(&key) {
        // What is left of its translation, or what another CPU is about to make whole.
        Some(back) if T::translated(&back) == flow.source() => {}
        there => {
            if there.is_some_and(|back| !released(&key, &back))
                || !passage.is_host_local() && is_used_by_host(frame, &key)
            {
                return IS_TAKEN;
            }
            let back = T::translation(flow.source(), T::flags(out), T::created_ns(out));
            match T::translations().insert(key, back, u64::from(BPF_NOEXIST)) {
                Ok(()) => {}
                Err(EEXIST) => return IS_TAKEN,
                Err(_) => return Reason::NatNoMapping as u32,
            }
        }
    }
    if T::translations()
        .insert(flow, out, u64::from(BPF_NOEXIST))
        .is_ok()
    {
        return FOUND;
    }
    let there = translation(flow);
    if there.is_none_or(|there| T::translated(&there) != T::translated(out)) {
        let _ = T::translations().remove(key);
    }
    match there {
        Some(there) => {
            passage.entry = there;
            FOUND
        }
        None => Reason::NatNoMapping as u32,
    }
}

/// Removes a translation, whose entry of direction in is `back`, if its flow is over and only waits to be
/// collected. `false` when it is not, or when another CPU does.
#[inline(always)]
fn released<T: Version>(key: &T, back: &T::Translation) -> bool {
    let flow = key.flow(back);
    let (created_ns, now_ns) = (T::created_ns(back), coarse_now_ns());
    let is_over = has_expired(&flow).unwrap_or_else(|| may_be_orphan(created_ns, now_ns));
    let Some(entry) = T::translations().get_ptr_mut(key).filter(|_| is_over) else {
        return false;
    };
    // SAFETY: an aligned word of a map value. For why an intrinsic see `conntrack::add`. Who changes it
    // removes the entries: else two CPUs could, the second of them those that the first has made since.
    let (seen_ns, _) = unsafe {
        atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
            entry.cast::<u8>().add(NAT_CREATED_OFFSET).cast::<u64>(),
            created_ns,
            now_ns,
        )
    };
    if seen_ns != created_ns {
        return false;
    }
    let _ = T::translations().remove(flow);
    T::translations().remove(key).is_ok()
}

/// Whether a process of this host would get packets with this tuple.
#[inline(always)]
fn is_used_by_host<T: Version>(frame: &Frame, key: &T) -> bool {
    let ctx = frame.ctx().as_ptr();
    let tuple = core::ptr::from_ref(key).cast_mut().cast();
    let (len, netns) = (T::SOCKET_TUPLE_LEN, BPF_F_CURRENT_NETNS as u64);
    // SAFETY: a valid context; a tuple begins as the helpers want one. The reference is given back.
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

/// Whether a process of this host sends the packet: those that are passed on have no socket.
#[inline(always)]
fn has_socket(frame: &Frame) -> bool {
    // SAFETY: the context pointer is valid for the program's run.
    unsafe { !(*frame.skb()).__bindgen_anon_2.sk.is_null() }
}

/// Tells conntrack that a flow's source is translated.
///
/// # Safety
///
/// `tracked` must point to a value of a conntrack map.
#[inline(always)]
unsafe fn mark_masqueraded<T: Version>(tracked: *mut CtEntry, entry: &T::Translation) {
    let is_host_local = T::flags(entry) & NAT_HOST_LOCAL != 0;
    // SAFETY: the caller's promise.
    if is_host_local || unsafe { (*tracked).flags } & CT_MASQUERADED != 0 {
        return;
    }
    let bits = CtState::default().with(CT_MASQUERADED).word();
    // SAFETY: an aligned word in the entry, to which bits are added. For why an intrinsic see
    // `conntrack::add`.
    unsafe {
        let word = tracked.cast::<u8>().add(CT_STATE_OFFSET).cast::<u32>();
        atomic_or::<u32, u32, { AtomicOrdering::Relaxed }>(word, bits);
    }
}

/// Whether a flow's time in conntrack is over; `None` for one that is not there.
#[inline(always)]
fn has_expired<T: Version>(flow: &T) -> Option<bool> {
    let entry = T::flows().get_ptr(flow)?;
    // SAFETY: a value of that map.
    Some(unsafe { (*entry).has_expired(coarse_now_secs()) })
}

#[inline(always)]
fn translation<T: Version>(key: &T) -> Option<T::Translation> {
    let entry = T::translations().get_ptr(key)?;
    // SAFETY: a value of that map.
    Some(unsafe { *entry })
}

/// Who sends a packet with this source; `None` for those that are none of our business.
#[inline(always)]
fn sender<T: Version>(source: &T::Address, settings: &Masquerade<T::Address>) -> Option<Sender> {
    if *source == settings.node_be {
        return Some(Sender::Node);
    }
    if HEALTH_ENDPOINTS.get_ptr(source.to_addr()).is_some() {
        return Some(Sender::Endpoint);
    }
    settings.is_behind(source).then_some(Sender::Routed)
}

/// Whether packets to this address keep their source.
#[inline(always)]
fn is_native<T: Version>(destination: &T::Address, settings: &Masquerade<T::Address>) -> bool {
    settings.is_native(destination) || HEALTH_PEERS.get_ptr(destination.to_addr()).is_some()
}

/// The result of a packet that cannot be masqueraded: it is dropped where it had to be.
#[inline(always)]
fn unmasqueraded<T: Version>(
    sender: Sender,
    destination: &T::Address,
    settings: &Masquerade<T::Address>,
    reason: Reason,
) -> u32 {
    if sender == Sender::Node || is_native::<T>(destination, settings) {
        PASSED
    } else {
        reason as u32
    }
}

#[inline(always)]
fn rewrite_end<T: Version>(frame: &Frame, passage: &Passage<T>, ends: &Ends<T>) -> u32 {
    let content_at = (passage.is_later == 0).then_some(passage.content_at);
    let protocol = passage.tuple.protocol();
    written(rewrite::packet(
        frame,
        passage.ip_at,
        content_at,
        protocol,
        ends,
    ))
}

#[inline(always)]
fn rewrite_error<T: Version>(
    frame: &Frame,
    passage: &Passage<T>,
    inner: &Inner<T>,
    inside: &Ends<T>,
    around: &Ends<T>,
) -> u32 {
    let error_at = passage.content_at;
    if rewrite::inner(frame, error_at, inner, inside).is_none() {
        return Reason::WriteFailed as u32;
    }
    written(rewrite::packet(
        frame,
        passage.ip_at,
        Some(error_at),
        T::ICMP,
        around,
    ))
}

#[inline(always)]
fn written(result: Option<()>) -> u32 {
    match result {
        Some(()) => PASSED,
        None => Reason::WriteFailed as u32,
    }
}

#[inline(always)]
fn settings<T: Version>() -> Option<&'static Masquerade<T::Address>> {
    // Else LLVM adds the place in it before the comparison with null, which older verifiers do not take.
    Some(T::masquerade(forgotten(HEALTH_MASQUERADE.get(0)?)))
}
