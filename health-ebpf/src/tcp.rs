//! Times this host's TCP connections as their segments cross the uplinks. `health_common::tcp` decides which segment
//! is timed and which one answers it.

use core::intrinsics::{AtomicOrdering, atomic_xchg};

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use aya_ebpf::helpers::generated::bpf_skb_load_bytes;
use health_common::addr::Addr;
use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::echo::{IPV4_LEN, IPV6_LEN, Ipv4Header, Ipv6Header};
use health_common::metrics::Direction;
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::rtt::{
    ACCOUNTED, BUSY, PROTOCOL_TCP, RttKey, RttRow, SOURCE_KERNEL, SOURCE_SOCKET, UNKNOWN_PEER,
};
use health_common::tcp::{
    ConnectionRequest, Flow, FlowKey, HEADER_ROOM, HeaderBytes, IP_PROTOCOL_TCP, Malformed,
    Received, SYN, Segment, Sent, TCP_LEN, TCP_MAX_LEN, TcpHeader, Timestamps, pseudo_header_sum,
};

use crate::bounds::within;
use crate::clock::{coarse_now_ns, now_ns};
use crate::frame::Frame;
use crate::maps::{HEALTH_CONFIG, HEALTH_PEERS, HEALTH_RTT, HEALTH_TCP};
use crate::rtt;

/// Mask for the more-fragments bit and the fragment offset.
const FRAGMENT_MASK: u16 = 0x3fff;

/// Template for new rows: a row does not fit on the stack.
static EMPTY_ROW: RttRow = RttRow::EMPTY;

/// A TCP segment at a hook.
pub struct Packet {
    key: FlowKey,
    segment: Segment,
    /// Offset of the TCP header.
    at: usize,
    is_ipv4: bool,
}

impl Packet {
    /// Reads a packet whose IP header is at `ip_at`. `None` unless it holds a whole TCP segment right after an IP
    /// header without options.
    #[inline(always)]
    pub fn read(frame: &Frame, ethertype: u16, ip_at: usize, direction: Direction) -> Option<Self> {
        let is_ipv4 = ethertype == ETHERTYPE_IPV4;
        let (source, destination, at, len) = match ethertype {
            ETHERTYPE_IPV4 => {
                let ip = frame.at::<Ipv4Header>(ip_at)?;
                if ip.protocol != IP_PROTOCOL_TCP
                    || ip.version_ihl != 0x45
                    || u16::from_be(ip.fragment_be) & FRAGMENT_MASK != 0
                    || !frame.pull(ip_at + IPV4_LEN + TCP_LEN)
                {
                    return None;
                }
                let ip = frame.at::<Ipv4Header>(ip_at)?;
                let at = ip_at + IPV4_LEN;
                let len = match u16::from_be(ip.total_len_be) {
                    // Too large for the field (BIG TCP).
                    0 => frame.length().checked_sub(at as u32)?,
                    len => u32::from(len).checked_sub(IPV4_LEN as u32)?,
                };
                (Addr::v4(ip.saddr_be), Addr::v4(ip.daddr_be), at, len)
            }
            ETHERTYPE_IPV6 => {
                let ip = frame.at::<Ipv6Header>(ip_at)?;
                if ip.next_header != IP_PROTOCOL_TCP || !frame.pull(ip_at + IPV6_LEN + TCP_LEN) {
                    return None;
                }
                let ip = frame.at::<Ipv6Header>(ip_at)?;
                let at = ip_at + IPV6_LEN;
                let len = match u16::from_be(ip.payload_len_be) {
                    // As above.
                    0 => frame.length().checked_sub(at as u32)?,
                    len => u32::from(len),
                };
                (Addr::v6(ip.saddr_be), Addr::v6(ip.daddr_be), at, len)
            }
            _ => return None,
        };
        let header = frame.at::<TcpHeader>(at)?;
        if at as u32 + len > frame.length() {
            return None;
        }
        let key = match direction {
            Direction::Egress => FlowKey {
                peer: destination,
                local: source,
                peer_port_be: header.destination_be,
                local_port_be: header.source_be,
            },
            Direction::Ingress => FlowKey {
                peer: source,
                local: destination,
                peer_port_be: header.source_be,
                local_port_be: header.destination_be,
            },
        };
        Some(Self {
            key,
            segment: Segment::read(header, len)?,
            at,
            is_ipv4,
        })
    }
}

/// Handles a segment that leaves.
#[inline(always)]
pub fn sent(frame: &Frame, packet: &Packet) {
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return;
    };
    let segment = &packet.segment;
    if packet.key.peer_port_be == config.health_port_be {
        if segment.opens() {
            probe_opened(packet);
        }
        return;
    }
    let takes_up_nothing = segment.end() == segment.sequence;
    if takes_up_nothing || !is_passive(config, packet) {
        return;
    }
    // SAFETY: the value is read at once.
    let Some(peer) = (unsafe { HEALTH_PEERS.get(packet.key.peer) }) else {
        return;
    };
    let flow = match flow(&packet.key) {
        Some(flow) => {
            let segments = frame.full_segments(segment.data_len);
            let what = flow.sent(segment, segments, coarse_now_ns);
            if what == Sent::Noted {
                return;
            }
            if flow.timed_ns != 0 {
                take_timed(flow);
            }
            if what == Sent::Repeated {
                return;
            }
            flow
        }
        None => {
            let met = Flow::met(segment, peer.path, coarse_now_ns());
            // If there is no space, this connection is not timed.
            let _ = HEALTH_TCP.insert(packet.key, met, u64::from(BPF_NOEXIST));
            if !segment.has(SYN) {
                return;
            }
            let Some(flow) = flow(&packet.key) else {
                return;
            };
            flow
        }
    };
    time(frame, packet, flow);
}

/// Records when a segment leaves. Called last, to be as late as possible.
#[inline(always)]
fn time(frame: &Frame, packet: &Packet, flow: &mut Flow) {
    let Some(header) = header(frame, packet) else {
        return;
    };
    let Ok(clock) = timestamps(&header, packet.segment.header_len) else {
        return;
    };
    flow.prepare(&packet.segment, clock, coarse_now_ns());
    let now_ns = now_ns();
    // SAFETY: an aligned word of a map value. The exchange makes the prepared fields visible before the time.
    unsafe { atomic_xchg::<u64, { AtomicOrdering::AcqRel }>(&raw mut flow.timed_ns, now_ns) };
}

/// Handles the segment with which a probe opens its connection. After a retransmission, it is unclear which of the two
/// segments is answered.
#[inline(always)]
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
    // If there is no space, the agent falls back to its own measurement.
    let _ = HEALTH_TCP.insert(packet.key, flow, u64::from(BPF_ANY));
}

/// Handles a segment that came in.
#[inline(always)]
pub fn received(frame: &Frame, packet: &Packet) {
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return;
    };
    let segment = &packet.segment;
    let of_probe = packet.key.peer_port_be == config.health_port_be;
    if of_probe && !segment.agrees() || !of_probe && !is_passive(config, packet) {
        return;
    }
    let Some(flow) = flow(&packet.key) else {
        return;
    };
    let timed_ns = flow.timed_ns;
    if timed_ns == 0 {
        return;
    }
    let what = if of_probe {
        flow.handshake(segment)
    } else {
        flow.received(segment)
    };
    match what {
        Received::Unrelated => return,
        Received::Void => {
            take_timed(flow);
            return;
        }
        Received::Answer => {}
    }
    let now_ns = now_ns();
    let rtt_ns = now_ns.saturating_sub(timed_ns);
    let Some(header) = header(frame, packet) else {
        return;
    };
    let FlowKey { peer, local, .. } = &packet.key;
    let pseudo = pseudo_header_sum(peer, local, segment.header_len, packet.is_ipv4);
    if !header.has_good_checksum(pseudo) {
        return;
    }
    if of_probe {
        flow.handshake_ns = rtt_ns;
        return;
    }
    let Ok(clock) = timestamps(&header, segment.header_len) else {
        return;
    };
    let agrees = flow.agrees(clock);
    // Another CPU may have taken the time, or may have timed another segment since.
    if take_timed(flow) == timed_ns && agrees {
        record(*peer, flow.path, rtt_ns, now_ns);
    }
}

/// Counts the connection that the agent asks about; the result is the classifier's return value.
#[inline(always)]
pub fn account(request: &mut ConnectionRequest) -> u32 {
    let ConnectionRequest { key, flow: of, .. } = *request;
    request.source = SOURCE_SOCKET;
    if let Some(flow) = flow(&of)
        && flow.handshake_ns != 0
        && flow.timed_ns >= request.begun_ns
    {
        request.rtt_ns = flow.handshake_ns;
        request.source = SOURCE_KERNEL;
    }
    if rtt::record(&key, request.rtt_ns, now_ns(), request.source) {
        // The flow may have been evicted already.
        let _ = HEALTH_TCP.remove(of);
        ACCOUNTED
    } else if HEALTH_RTT.get_ptr(key).is_some() {
        BUSY
    } else {
        UNKNOWN_PEER
    }
}

/// Records a round trip of a connection to `peer`. The row is created for the first one: most peers never have any.
#[inline(always)]
fn record(peer: Addr, path: u8, rtt_ns: u64, now_ns: u64) {
    let key = RttKey {
        peer,
        path,
        protocol: PROTOCOL_TCP,
        pad: 0,
    };
    if HEALTH_RTT.get_ptr(key).is_none() && HEALTH_PEERS.get_ptr(peer).is_some() {
        let empty: &RttRow = &EMPTY_ROW;
        // Another CPU may have created it; if there is no space, nothing is counted.
        let _ = HEALTH_RTT.insert(key, empty, u64::from(BPF_NOEXIST));
    }
    // A row that other writers keep busy can do without this sample.
    rtt::record(&key, rtt_ns, now_ns, SOURCE_KERNEL);
}

/// Whether this is ordinary traffic, not a probe of this agent or of another.
#[inline(always)]
fn is_passive(config: &DatapathConfig, packet: &Packet) -> bool {
    config.flags & PASSIVE_RTT != 0
        && packet.key.peer_port_be != config.health_port_be
        && packet.key.local_port_be != config.health_port_be
}

/// Returns when the timed segment left, and stops timing it.
#[inline(always)]
fn take_timed(flow: &mut Flow) -> u64 {
    // SAFETY: an aligned word of a map value.
    unsafe { atomic_xchg::<u64, { AtomicOrdering::AcqRel }>(&raw mut flow.timed_ns, 0) }
}

/// Reads the whole TCP header.
#[inline(always)]
fn header(frame: &Frame, packet: &Packet) -> Option<HeaderBytes> {
    let mut header = HeaderBytes([0; HEADER_ROOM]);
    // Already checked, but the verifier has forgotten.
    let len = within(
        packet.segment.header_len,
        TCP_LEN as u32,
        TCP_MAX_LEN as u32,
    )?;
    // SAFETY: the buffer holds `len` bytes, which are plain data.
    let result = unsafe {
        bpf_skb_load_bytes(
            frame.ctx().as_ptr(),
            packet.at as u32,
            header.0.as_mut_ptr().cast(),
            len,
        )
    };
    (result == 0).then_some(header)
}

/// Like [`HeaderBytes::timestamps`].
#[inline(always)]
fn timestamps(header: &HeaderBytes, len: u32) -> Result<Option<Timestamps>, Malformed> {
    let mut timestamps = Timestamps::default();
    match tcp_timestamps(header, len, &mut timestamps) {
        NO_TIMESTAMPS => Ok(None),
        TIMESTAMPS => Ok(Some(timestamps)),
        _ => Err(Malformed),
    }
}

/// Result of [`tcp_timestamps`]: the options contain no timestamps.
const NO_TIMESTAMPS: u32 = 0;
/// Result of [`tcp_timestamps`]: the timestamps were written to the output argument.
const TIMESTAMPS: u32 = 1;
/// Result of [`tcp_timestamps`]: the options are malformed.
const MALFORMED: u32 = 2;

/// Kept as a separate BPF function, so that the verifier follows the many paths through the options once rather than
/// once per path that reaches the function.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tcp_timestamps(
    header: *const HeaderBytes,
    len: u32,
    timestamps: *mut Timestamps,
) -> u32 {
    // SAFETY: made from references; the verifier requires a null check.
    let (Some(header), Some(timestamps)) = (unsafe { (header.as_ref(), timestamps.as_mut()) })
    else {
        return MALFORMED;
    };
    match header.timestamps(len) {
        Ok(None) => NO_TIMESTAMPS,
        Ok(Some(found)) => {
            *timestamps = found;
            TIMESTAMPS
        }
        Err(Malformed) => MALFORMED,
    }
}

#[inline(always)]
fn flow(key: &FlowKey) -> Option<&'static mut Flow> {
    // SAFETY: a map value stays valid while the program runs. Changes by several CPUs are synchronised by exchanging
    // `timed_ns` atomically.
    HEALTH_TCP
        .get_ptr_mut(key)
        .map(|flow| unsafe { &mut *flow })
}
