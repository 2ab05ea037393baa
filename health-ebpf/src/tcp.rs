//! Times the TCP connections of this host as their segments cross the uplinks. `health_common::tcp`
//! decides which segment is timed and which one answers it.

use core::intrinsics::{AtomicOrdering, atomic_xchg};

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::{bpf_ktime_get_coarse_ns, bpf_skb_load_bytes};
use health_common::addr::Addr;
use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::echo::{IPV4_LEN, Ipv4Header, Ipv6Header};
use health_common::rtt::{AccountRequest, PROTOCOL_TCP, RttKey, RttRow, SOURCE_KERNEL};
use health_common::tcp::{
    Flow, FlowKey, HeaderBytes, IP_PROTOCOL_TCP, Received, SYN, Segment, Sent, TCP_LEN,
    TCP_MAX_LEN, TcpHeader, pseudo_header_sum,
};

use crate::frame::{Frame, IP_AT, L4_AT4, L4_AT6};
use crate::maps::{HEALTH_PEERS, HEALTH_RTT, HEALTH_TCP};
use crate::rtt;

/// The more-fragments bit and the fragment offset.
const FRAGMENT_MASK: u16 = 0x3fff;

/// What a row is made from: the stack has no room for one.
static EMPTY_ROW: RttRow = RttRow::EMPTY;

/// A TCP segment at a hook.
struct Packet {
    key: FlowKey,
    segment: Segment,
    /// Where the TCP header begins.
    at: u32,
    is_ipv4: bool,
}

/// Which way a packet goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

/// A packet with an IPv4 header leaves.
#[inline(always)]
pub fn sent4(frame: &Frame, config: &DatapathConfig) {
    if let Some(packet) = packet4(frame, Way::Out) {
        sent(frame, config, &packet);
    }
}

/// A packet with an IPv6 header leaves.
#[inline(always)]
pub fn sent6(frame: &Frame, config: &DatapathConfig) {
    if let Some(packet) = packet6(frame, Way::Out) {
        sent(frame, config, &packet);
    }
}

/// A packet with an IPv4 header came.
#[inline(always)]
pub fn received4(frame: &Frame, config: &DatapathConfig) {
    if let Some(packet) = packet4(frame, Way::In) {
        received(frame, config, &packet);
    }
}

/// A packet with an IPv6 header came.
#[inline(always)]
pub fn received6(frame: &Frame, config: &DatapathConfig) {
    if let Some(packet) = packet6(frame, Way::In) {
        received(frame, config, &packet);
    }
}

/// Takes the round trip of the handshake of a probe's connection, if it was timed, and forgets the
/// connection.
#[inline(always)]
pub fn take_handshake(request: &mut AccountRequest) {
    let key = request.flow;
    let Some(flow) = flow(&key) else {
        return;
    };
    if flow.handshake_ns != 0 && flow.timed_ns >= request.begun_ns {
        request.rtt_ns = flow.handshake_ns;
        request.source = u32::from(SOURCE_KERNEL);
    }
    // It may have made room for another already.
    let _ = HEALTH_TCP.remove(&key);
}

#[inline(always)]
fn sent(frame: &Frame, config: &DatapathConfig, packet: &Packet) {
    let segment = &packet.segment;
    if packet.key.peer_port_be == config.health_port_be {
        if segment.opens() {
            probe_opened(packet);
        }
        return;
    }
    let takes_up_nothing = segment.end() == segment.sequence;
    if !is_passive(config, packet) || takes_up_nothing {
        return;
    }
    // SAFETY: read at once.
    let Some(peer) = (unsafe { HEALTH_PEERS.get(&packet.key.peer) }) else {
        return;
    };
    let Some(flow) = flow(&packet.key) else {
        met(frame, packet, peer.path);
        return;
    };
    let segments = frame.full_segments(segment.data_len);
    let what = flow.sent(segment, segments, coarse_now_ns);
    if what == Sent::Noted {
        return;
    }
    if flow.timed_ns != 0 {
        take_timed(flow);
    }
    if what == Sent::Time {
        time(frame, packet, flow);
    }
}

/// A connection to a peer is seen for the first time.
#[inline(never)]
fn met(frame: &Frame, packet: &Packet, path: u8) {
    let mut flow = Flow::met(&packet.segment, path, coarse_now_ns());
    if packet.segment.has(SYN) {
        time(frame, packet, &mut flow);
    }
    // Without room, this connection is not timed.
    let _ = HEALTH_TCP.insert(&packet.key, &flow, u64::from(BPF_NOEXIST));
}

/// Notes the time at which a segment leaves. Called last, so that it is as late as it can be.
#[inline(never)]
fn time(frame: &Frame, packet: &Packet, flow: &mut Flow) {
    let mut header = HeaderBytes([0; TCP_MAX_LEN]);
    if !load(frame, packet, &mut header) {
        return;
    }
    let Ok(clock) = header.timestamps(packet.segment.header_len) else {
        return;
    };
    flow.prepare(&packet.segment, clock, coarse_now_ns());
    let now_ns = now_ns();
    // SAFETY: an aligned word of a map value or of the stack. The exchange keeps what was prepared
    // from being seen after it.
    unsafe { atomic_xchg::<u64, { AtomicOrdering::AcqRel }>(&raw mut flow.timed_ns, now_ns) };
}

/// A probe opens its connection. Sent again, it leaves open which of both is answered.
#[inline(never)]
fn probe_opened(packet: &Packet) {
    let end = packet.segment.end();
    if let Some(flow) = flow(&packet.key)
        && flow.sent_end == end
    {
        flow.timed_ns = 0;
        return;
    }
    let flow = Flow {
        sent_end: end,
        timed_ns: now_ns(),
        ..Flow::default()
    };
    // Without room, the agent falls back to what it measures itself.
    let _ = HEALTH_TCP.insert(&packet.key, &flow, u64::from(BPF_ANY));
}

#[inline(always)]
fn received(frame: &Frame, config: &DatapathConfig, packet: &Packet) {
    let segment = &packet.segment;
    let of_probe = packet.key.peer_port_be == config.health_port_be;
    if of_probe && !segment.agrees() || !of_probe && !is_passive(config, packet) {
        return;
    }
    let Some(flow) = flow(&packet.key) else {
        return;
    };
    if flow.timed_ns == 0 {
        return;
    }
    if of_probe {
        probe_answered(frame, packet, flow);
        return;
    }
    match flow.received(segment) {
        Received::Unrelated => {}
        Received::Void => {
            take_timed(flow);
        }
        Received::Answer => answered(frame, packet, flow),
    }
}

/// The peer agrees to the connection of a probe.
#[inline(never)]
fn probe_answered(frame: &Frame, packet: &Packet, flow: &mut Flow) {
    let now_ns = now_ns();
    let segment = &packet.segment;
    let is_first = flow.handshake_ns == 0 && segment.acknowledgement == flow.sent_end;
    let mut header = HeaderBytes([0; TCP_MAX_LEN]);
    if is_first && segment.data_len == 0 && load_verified(frame, packet, &mut header) {
        flow.handshake_ns = now_ns.saturating_sub(flow.timed_ns);
    }
}

/// The timed segment is answered, if the answer is good.
#[inline(never)]
fn answered(frame: &Frame, packet: &Packet, flow: &mut Flow) {
    let now_ns = now_ns();
    let timed_ns = flow.timed_ns;
    let mut header = HeaderBytes([0; TCP_MAX_LEN]);
    if !load_verified(frame, packet, &mut header) {
        return;
    }
    let Ok(clock) = header.timestamps(packet.segment.header_len) else {
        return;
    };
    let agrees = flow.agrees(clock);
    // Another CPU may have taken it, or timed another segment since.
    if take_timed(flow) == timed_ns && agrees {
        record(
            &packet.key.peer,
            flow.path,
            now_ns.saturating_sub(timed_ns),
            now_ns,
        );
    }
}

/// A round trip of a connection to `peer`. The row comes with the first one: most peers never have any.
#[inline(always)]
fn record(peer: &Addr, path: u8, rtt_ns: u64, now_ns: u64) {
    if rtt::row(*peer, path, PROTOCOL_TCP).is_none() && HEALTH_PEERS.get_ptr(peer).is_some() {
        let key = RttKey {
            peer: *peer,
            path,
            protocol: PROTOCOL_TCP,
            pad: 0,
        };
        let empty: &RttRow = &EMPTY_ROW;
        // Another CPU may have made it; without room, nothing is counted.
        let _ = HEALTH_RTT.insert(&key, empty, u64::from(BPF_NOEXIST));
    }
    if let Some(row) = rtt::row(*peer, path, PROTOCOL_TCP) {
        row.record(rtt_ns, now_ns, 0, SOURCE_KERNEL);
    }
}

/// Whether this is traffic that flows anyway: no probe, neither of this agent nor of another.
#[inline(always)]
fn is_passive(config: &DatapathConfig, packet: &Packet) -> bool {
    config.flags & PASSIVE_RTT != 0
        && packet.key.peer_port_be != config.health_port_be
        && packet.key.local_port_be != config.health_port_be
}

/// When the timed segment left, which is timed no more.
#[inline(always)]
fn take_timed(flow: &mut Flow) -> u64 {
    // SAFETY: an aligned word of a map value.
    unsafe { atomic_xchg::<u64, { AtomicOrdering::AcqRel }>(&raw mut flow.timed_ns, 0) }
}

#[inline(always)]
fn packet4(frame: &Frame, way: Way) -> Option<Packet> {
    let ip = frame.at::<Ipv4Header>(IP_AT)?;
    if ip.protocol != IP_PROTOCOL_TCP
        || ip.version_ihl != 0x45
        || u16::from_be(ip.fragment_be) & FRAGMENT_MASK != 0
        || !frame.pull(L4_AT4 + TCP_LEN)
    {
        return None;
    }
    let ip = frame.at::<Ipv4Header>(IP_AT)?;
    let len = match u16::from_be(ip.total_len_be) {
        // Larger than the field can say (BIG TCP).
        0 => frame.length().checked_sub(L4_AT4 as u32)?,
        len => u32::from(len).checked_sub(IPV4_LEN as u32)?,
    };
    let addresses = (Addr::v4(ip.saddr_be), Addr::v4(ip.daddr_be));
    packet(frame, way, addresses, L4_AT4, len, true)
}

/// As [`packet4`].
#[inline(always)]
fn packet6(frame: &Frame, way: Way) -> Option<Packet> {
    let ip = frame.at::<Ipv6Header>(IP_AT)?;
    if ip.next_header != IP_PROTOCOL_TCP || !frame.pull(L4_AT6 + TCP_LEN) {
        return None;
    }
    let ip = frame.at::<Ipv6Header>(IP_AT)?;
    let len = match u16::from_be(ip.payload_len_be) {
        0 => frame.length().checked_sub(L4_AT6 as u32)?,
        len => u32::from(len),
    };
    let addresses = (Addr::v6(ip.saddr_be), Addr::v6(ip.daddr_be));
    packet(frame, way, addresses, L4_AT6, len, false)
}

/// The segment of `len` bytes, header included, at `at`, between these addresses, the source first;
/// `None` unless it is all there.
#[inline(always)]
fn packet(
    frame: &Frame,
    way: Way,
    (source, destination): (Addr, Addr),
    at: usize,
    len: u32,
    is_ipv4: bool,
) -> Option<Packet> {
    let header = frame.at::<TcpHeader>(at)?;
    if at as u32 + len > frame.length() {
        return None;
    }
    let key = match way {
        Way::Out => FlowKey {
            peer: destination,
            local: source,
            peer_port_be: header.destination_be,
            local_port_be: header.source_be,
        },
        Way::In => FlowKey {
            peer: source,
            local: destination,
            peer_port_be: header.source_be,
            local_port_be: header.destination_be,
        },
    };
    Some(Packet {
        key,
        segment: Segment::read(header, len)?,
        at: at as u32,
        is_ipv4,
    })
}

/// Copies the whole TCP header; `false` when it cannot be read.
#[inline(always)]
fn load(frame: &Frame, packet: &Packet, header: &mut HeaderBytes) -> bool {
    let len = packet.segment.header_len;
    // As said already, but the verifier has forgotten.
    if len < TCP_LEN as u32 || len > TCP_MAX_LEN as u32 {
        return false;
    }
    // SAFETY: the buffer holds `len` bytes, which are plain data.
    let result = unsafe {
        bpf_skb_load_bytes(
            frame.ctx().as_ptr(),
            packet.at,
            header.0.as_mut_ptr().cast(),
            len,
        )
    };
    result == 0
}

/// Copies the whole header of a segment without data; `false` when its checksum is wrong.
#[inline(always)]
fn load_verified(frame: &Frame, packet: &Packet, header: &mut HeaderBytes) -> bool {
    let Packet { key, segment, .. } = packet;
    let pseudo = pseudo_header_sum(&key.peer, &key.local, segment.header_len, packet.is_ipv4);
    load(frame, packet, header) && header.has_good_checksum(pseudo)
}

#[inline(always)]
fn flow(key: &FlowKey) -> Option<&'static mut Flow> {
    // SAFETY: a map value stays valid memory for the program's run. What several CPUs change goes through
    // `timed_ns`, which is exchanged.
    HEALTH_TCP
        .get_ptr_mut(key)
        .map(|flow| unsafe { &mut *flow })
}

#[inline(always)]
fn now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

/// Late by a tick of the kernel at most, and a fraction of the cost.
#[inline(always)]
fn coarse_now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}
