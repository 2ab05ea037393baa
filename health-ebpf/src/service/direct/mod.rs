//! Direct server return, on the node that a client's packets come to: it selects the backend, names the packets'
//! frontend to the backend's node, and sees no answers. [`accept`] is the other node's part.

pub(super) mod accept;

use aya_ebpf::bindings::BPF_F_ADJ_ROOM_FIXED_GSO;
use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_NET;
use aya_ebpf::helpers::generated::bpf_skb_adjust_room;
use health_common::addr::Addr;
use health_common::ct::{
    CT_RX_CLOSING, CT_SEEN_NON_SYN, CtState, IP_PROTOCOL_UDP, Side, TUPLE_IN, Tuple4, Tuple6,
};
use health_common::identity;
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::service::direct::{Covered, DirectOption, Option4, Option6};
use health_common::service::{FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, FLOW_MOVED};
use health_common::tcp::{ACK, FIN, IP_PROTOCOL_TCP, RST, SYN};

use super::request::Request;
use crate::conntrack::{Traffic, advance, enter, find};
use crate::fib::FibLookup;
use crate::frame::Frame;
use crate::hook::AtUplink;
use crate::ip_version::Version;
use crate::ipcache::identity_of;
use crate::maps::{HEALTH_CONFIG, HEALTH_DIRECT};
use crate::packet::load;
use crate::rewrite::store_recomputed;
use crate::subprogram::subprogram;

/// Offset of the sequence number in a TCP segment.
const SEQUENCE_AT: u32 = 4;

/// An IP version with its option.
pub trait Direct: Version {
    /// The option.
    type Option: DirectOption<Address = Self::Address, Header = Self::Header>;
    /// Its length in bytes.
    const OPTION_LEN: u32 = size_of::<Self::Option>() as u32;
    /// An address from the form of the kernel's route look-up.
    fn of_fib(words: [u32; 4]) -> Addr;
}

impl Direct for Tuple4 {
    type Option = Option4;

    #[inline(always)]
    fn of_fib(words: [u32; 4]) -> Addr {
        Addr::v4(words[0])
    }
}

impl Direct for Tuple6 {
    type Option = Option6;

    #[inline(always)]
    fn of_fib(words: [u32; 4]) -> Addr {
        Addr::v6(words)
    }
}

/// Whether this node has keys: to send notices to other nodes about flows to their backends, and to verify theirs.
#[inline(always)]
pub(super) fn is_on() -> bool {
    HEALTH_DIRECT.get(0).is_some_and(|direct| direct.count != 0)
}

/// Decides whether the backend that was selected for a new flow answers the client directly, if its service asks for
/// that. Otherwise it gets the packets from this node.
#[subprogram(uplink4_settle, uplink6_settle)]
pub(super) fn settle<T: Direct>(frame: &Frame, request: &mut Request<T>) {
    if request.has(FLOW_DIRECT) {
        // The backend's answers to a port other than the client's own must come back here.
        let is_moved = request.moved_port_be != 0;
        let flags = if is_moved {
            FLOW_MASQUERADED | FLOW_MOVED
        } else if may_answer(frame, request) {
            FLOW_DIRECT
        } else {
            FLOW_MASQUERADED
        };
        request.flow_flags = (FLOW_FROM_OUTSIDE | flags).into();
    }
}

/// Whether the backend's node can be notified, and its programs will see the answers: the backend is an endpoint that
/// is reached through another node, and the client is not.
#[inline(always)]
fn may_answer<T: Direct>(frame: &Frame, request: &Request<T>) -> bool {
    let protocol = request.tuple.protocol();
    if !is_on()
        || protocol != IP_PROTOCOL_TCP && protocol != IP_PROTOCOL_UDP
        // The first packet that this node sees may be in the middle of a connection.
        || protocol == IP_PROTOCOL_TCP && !request.opens()
        || !is_plain(frame, request)
    {
        return false;
    }
    let (client, backend) = (request.tuple.source().0, request.addr_be);
    // Packets to a process of the node itself bypass the programs.
    if identity::is_remote_node(identity_of(backend)) {
        return false;
    }
    let Some(there) = route::<T>(frame, client, backend) else {
        return false;
    };
    if !frame.fits_longer(there.ifindex, T::OPTION_LEN) || !is_by_node::<T>(&there) {
        return false;
    }
    route::<T>(frame, backend, client).is_some_and(|back| !is_by_node::<T>(&back))
}

/// Whether the option can be added to a packet.
#[inline(always)]
fn is_plain<T: Direct>(frame: &Frame, request: &Request<T>) -> bool {
    let ip_at = frame.link_header_len();
    request.ip_at == ip_at as u32
        && request.content_at() == Some((ip_at + T::HEADER_LEN) as u32)
        && !frame.has_vlan_tag()
        && !frame.is_merged()
        && frame
            .at::<T::Header>(ip_at)
            .is_some_and(|ip| T::Option::is_plain(ip))
}

/// The route of a packet that came in on the frame's device.
#[inline(always)]
fn route<T: Direct>(
    frame: &Frame,
    source: T::Address,
    destination: T::Address,
) -> Option<FibLookup> {
    let mut route = FibLookup::of::<T>(frame.ifindex(), source, destination);
    (route.is_found(frame) && route.family == T::FAMILY).then_some(route)
}

/// Whether the next hop of a route is another node.
#[inline(always)]
fn is_by_node<T: Direct>(route: &FibLookup) -> bool {
    let next_hop = T::of_fib(route.destination);
    identity::is_remote_node(identity_of(next_hop.words_be))
}

/// Records a client's packet in conntrack, which sees no answers: answers that must have been sent count as seen.
#[subprogram(uplink4_follow, uplink6_follow)]
pub(super) fn follow<T: Direct>(frame: &Frame, request: &mut Request<T>) {
    let (Some(ip_at), Some(config)) = (request.ip_at::<AtUplink>(), HEALTH_CONFIG.get(0)) else {
        return;
    };
    let mut tuple = request
        .tuple
        .with_destination(request.backend())
        .with_direction(TUPLE_IN);
    let traffic = Traffic {
        rx_bytes: frame.length() - ip_at as u32,
        ifindex: frame.ifindex(),
        ..Traffic::default()
    };
    let is_tcp = tuple.protocol() == IP_PROTOCOL_TCP;
    let tcp_flags = request.tcp_flags as u8;
    let mut is_half_closed = false;
    let mut reopens_until = None;
    if is_tcp && let Some((entry, Side::Original)) = find(T::flows(), &mut tuple) {
        // SAFETY: a value of a conntrack map, as below.
        let state = unsafe { (*entry).state() };
        let answers = unseen_answers(state, tcp_flags);
        if answers != 0 {
            // SAFETY: as above.
            unsafe { advance(entry, &tuple, Side::Reply, answers) };
        }
        let is_open = state.has(CT_SEEN_NON_SYN) && !state.is_closed() && answers == 0;
        if is_open && tcp_flags & (SYN | ACK) == SYN {
            // SAFETY: as above; a single word.
            reopens_until = Some(unsafe { (*entry).expires });
        }
        is_half_closed = tcp_flags & (SYN | RST) == 0
            && (state.has(CT_RX_CLOSING) || tcp_flags & FIN != 0)
            && !state.is_closed();
    }
    let flags = request.packet_flags();
    // It does not matter whether it was recorded.
    let _ = enter(T::flows(), &mut tuple, flags, traffic, &config.timeouts);
    if is_half_closed {
        shorten::<T>(&mut tuple, config.timeouts.tcp_syn, u32::MAX);
    } else if let Some(until) = reopens_until {
        // Its backend may have reset it. Otherwise the client's next segment extends it to its previous lifetime.
        shorten::<T>(&mut tuple, config.timeouts.tcp_close, until);
    }
    // The entry for the backend's answers is not used here, but an LRU map must not evict it before the flow.
    let answer = tuple.reply();
    let _ = T::service_flows().get_ptr(&answer);
}

/// TCP flags of the answers that the backend must have sent before the client sends a segment with these flags,
/// except for known answers; 0: none.
#[inline(always)]
const fn unseen_answers(state: CtState, tcp_flags: u8) -> u8 {
    if tcp_flags & RST != 0 {
        return 0;
    }
    if tcp_flags & (SYN | ACK) == SYN {
        // A client that has closed its side opens another connection only when the first one is over.
        return if state.has(CT_RX_CLOSING) && !state.is_closed() {
            RST | ACK
        } else {
            0
        };
    }
    if state.has(CT_SEEN_NON_SYN) || (state.rx_flags_seen() | state.tx_flags_seen()) & ACK != 0 {
        0
    } else {
        SYN | ACK
    }
}

/// This node does not see when the backend closes or resets a connection. It ends this many seconds after the
/// client's last packet, or at `until` if that is earlier.
#[inline(always)]
fn shorten<T: Version>(tuple: &mut T, lifetime: u32, until: u32) {
    if let Some((entry, _)) = find(T::flows(), tuple) {
        // SAFETY: a value of a conntrack map; single words.
        unsafe { (*entry).expires = ((*entry).last_rx + lifetime).min(until) };
    }
}

/// Names a packet's frontend to the backend's node: with each SYN, and with each datagram that has space for the
/// option. The packet already has the backend's address.
#[subprogram(uplink4_name_frontend, uplink6_name_frontend)]
pub(super) fn name_frontend<T: Direct>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<(), Reason> {
    let is_tcp = request.tuple.protocol() == IP_PROTOCOL_TCP;
    if is_tcp && !request.opens() {
        return Ok(());
    }
    // If a packet cannot be forwarded, the host's stack quotes its whole header to its sender, who must not see a
    // tag.
    let (true, Some(route)) = (
        has_time::<T>(frame),
        route::<T>(frame, request.tuple.source().0, request.addr_be),
    ) else {
        return Ok(());
    };
    let has_room =
        is_tcp || is_plain(frame, request) && frame.fits_longer(route.ifindex, T::OPTION_LEN);
    if !has_room {
        // The other node still has the two entries from earlier datagrams.
        return Ok(());
    }
    put(frame, request).ok_or(Reason::WriteFailed)
}

/// Whether a packet has hops left to reach another host.
#[inline(always)]
fn has_time<T: Direct>(frame: &Frame) -> bool {
    let mut ttl = 0_u8;
    load(
        frame,
        frame.link_header_len() as u32 + T::TTL_AT,
        &mut ttl,
        1,
    )
    .is_some()
        && ttl > 1
}

/// Adds the option to a packet.
#[inline(always)]
fn put<T: Direct>(frame: &Frame, request: &Request<T>) -> Option<()> {
    if !is_plain(frame, request) {
        return None;
    }
    let covered = covered(frame, &request.tuple, request.backend(), request.content_at)?;
    let mut option = T::Option::new(
        request.tuple.destination(),
        direct_tag(&raw const covered, 0),
    );
    let ip_at = frame.link_header_len();
    let ip = option.put_behind(frame.at::<T::Header>(ip_at)?)?;
    resize(frame, T::OPTION_LEN as i32)?;
    store_recomputed(frame, ip_at as u32, &ip)?;
    store_recomputed(frame, (ip_at + T::HEADER_LEN) as u32, &option)
}

/// The data that the tag of a packet for a frontend covers. `asked`: the client's tuple, to the frontend.
#[inline(always)]
fn covered<T: Version>(
    frame: &Frame,
    asked: &T,
    backend: (T::Address, u16),
    content_at: u32,
) -> Option<Covered> {
    let mut sequence_be = 0_u32;
    if asked.protocol() == IP_PROTOCOL_TCP {
        load(frame, content_at + SEQUENCE_AT, &mut sequence_be, 4)?;
    }
    let [client, frontend, backend] = [asked.source(), asked.destination(), backend]
        .map(|(address, port_be)| (address.to_addr(), port_be));
    Some(Covered::new(
        &client,
        &frontend,
        &backend,
        asked.protocol(),
        sequence_be,
    ))
}

/// The tag under one of the keys. A separate function in the kernel too: it is long.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn direct_tag(covered: *const Covered, key: u32) -> u64 {
    // SAFETY: made of a reference; the verifier requires a comparison with null.
    let (Some(covered), Some(direct)) = (unsafe { covered.as_ref() }, HEALTH_DIRECT.get(0)) else {
        return 0;
    };
    let [first, second] = direct.keys;
    covered.tag(if key == 0 { first } else { second })
}

/// Makes a packet longer or shorter after its IP header.
#[inline(always)]
fn resize(frame: &Frame, by: i32) -> Option<()> {
    // SAFETY: a valid context; the helper checks the rest.
    let result = unsafe {
        bpf_skb_adjust_room(
            frame.skb(),
            by,
            BPF_ADJ_ROOM_NET,
            BPF_F_ADJ_ROOM_FIXED_GSO.into(),
        )
    };
    (result == 0).then_some(())
}
