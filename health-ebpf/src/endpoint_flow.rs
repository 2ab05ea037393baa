//! Conntrack and policy for packets that endpoints send and receive.
//!
//! The steps are subprograms. A program and the subprograms that it calls share 512 bytes of stack, so the steps do not
//! call each other.

use health_common::ct::{CtEntry, TUPLE_IN, TUPLE_OUT};
use health_common::echo::PROTOCOL_ICMPV6;
use health_common::endpoint::EndpointInfo;
use health_common::identity;
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::is_of_router;
use health_common::packet::Kind;

use crate::conntrack::{Gate, PacketFlags, Tracked, Traffic, enter_if, has_entry, is_admitted};
use crate::delivery;
use crate::events::passed;
use crate::fragment::{find, keep};
use crate::frame::{Frame, IP_AT};
use crate::ip_version::Version;
use crate::link::Link;
use crate::maps::HEALTH_CONFIG;
use crate::metrics::count;
use crate::packet::{ParsedPacket, load};
use crate::policy::{Enforcement, admit};
use crate::service::{is_of_service, is_past_stack};
use crate::subprogram::{Argument, Returned, Stage, subprogram};

/// Records a packet that travels in `direction` (as in a tuple) in the entry of its flow, unless the policy of the
/// sending or receiving endpoint refuses it. An untracked endpoint's packets get no entry. Without an endpoint there is
/// no policy, and the sender is unknown. Returns the paths that the packet may take.
#[inline(always)]
pub fn track<T: Link>(
    frame: &Frame,
    direction: u8,
    endpoint: Option<&EndpointInfo>,
) -> Result<Ways, Reason> {
    let ways = judge::<T>(frame, direction, endpoint)?;
    if let Some(endpoint) = endpoint {
        passed(frame, endpoint, metrics_direction(direction));
    }
    Ok(ways)
}

/// Like [`track`], without reporting the packet.
#[inline(always)]
fn judge<T: Link>(
    frame: &Frame,
    direction: u8,
    endpoint: Option<&EndpointInfo>,
) -> Result<Ways, Reason> {
    let message = match enter_packet::<T>(frame, direction, endpoint)? {
        Entered::Whole(ways) => return Ok(ways),
        Entered::Left(message) => message,
    };
    if message.is_error() {
        let is_related = is_related::<T>(frame, message.at(), direction, endpoint);
        note_error(frame, direction, is_related);
        if is_related {
            return Ok(Ways::HostStack);
        }
    }
    if let Some(table) = Enforcement::of(endpoint).table(direction) {
        judge_message::<T>(frame, direction, message, table)?;
    }
    Ok(Ways::HostStack)
}

/// Paths that a packet may take.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ways {
    /// Any path.
    All,
    /// Only through the host's stack, which may have translated the packet that this one answers.
    HostStack,
    /// Past the host's stack, to an outside client: the stack has not seen the packet that this one answers.
    PastStack,
}

// SAFETY: `repr(u32)`, three variants without fields.
unsafe impl Stage for Ways {}

/// How far [`enter_packet`] got with a packet.
enum Entered {
    /// It is done with the packet.
    Whole(Ways),
    /// The message is still to be judged.
    Left(Message),
}

impl Returned for Entered {
    #[inline(always)]
    fn encode(self) -> u32 {
        match self {
            Self::Whole(ways) => ways.encode(),
            Self::Left(message) => message.0,
        }
    }

    #[inline(always)]
    fn decode(number: u32) -> Self {
        if number & Message::MARK != 0 {
            Self::Left(Message(number))
        } else {
            Self::Whole(Ways::decode(number))
        }
    }
}

/// A packet that belongs to no flow, packed into one word so that LLVM does not split it: the offset of its content
/// (bits 0 to 15), its protocol (16 to 23), and whether it is an ICMP error (24).
#[derive(Clone, Copy)]
struct Message(u32);

impl Message {
    /// Bit that is set in every message.
    const MARK: u32 = 1 << 31;

    #[inline(always)]
    fn new(at: u32, protocol: u8, is_error: bool) -> Self {
        Self(Self::MARK | at & 0xffff | u32::from(protocol) << 16 | u32::from(is_error) << 24)
    }

    /// Offset of the packet's content.
    #[inline(always)]
    fn at(self) -> u32 {
        self.0 & 0xffff
    }

    /// IP protocol.
    #[inline(always)]
    fn protocol(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// Whether this is an ICMP error rather than another packet that belongs to no flow.
    #[inline(always)]
    fn is_error(self) -> bool {
        self.0 >> 24 & 1 != 0
    }
}

impl Argument for Message {
    type Raw = u32;

    #[inline(always)]
    fn pass(self) -> u32 {
        self.0
    }

    #[inline(always)]
    unsafe fn receive(raw: u32) -> Option<Self> {
        Some(Self(raw))
    }
}

/// Fully handles packets that belong to flows, and all others that no policy must judge.
#[subprogram(enter_packet4, enter_packet6)]
fn enter_packet<T: Version>(
    frame: &Frame,
    direction: u8,
    endpoint: Option<&EndpointInfo>,
) -> Result<Entered, Reason> {
    let gate = EndpointGate::new(endpoint, frame);
    let table = gate.enforcement.table(direction);
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return Ok(Entered::Whole(Ways::All));
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, IP_AT, direction)
    else {
        return left_out(frame, direction, table, Reason::InvalidPacket);
    };
    let is_no_flow = matches!(packet.kind, Kind::NoFlow);
    if is_no_flow && direction != TUPLE_IN && is_routers(frame, &packet.tuple, content_at) {
        return Err(Reason::InvalidSource);
    }
    let is_tracked = gate.enforcement.is_tracked();
    let is_error = matches!(packet.kind, Kind::IcmpError);
    if is_error || is_no_flow && table.is_some() {
        // Without entries, no error is about a known flow.
        let message = Message::new(content_at, packet.tuple.protocol(), is_error && is_tracked);
        return Ok(Entered::Left(message));
    }
    if is_no_flow {
        return Ok(Entered::Whole(Ways::All));
    }
    if !find(&mut packet) {
        return left_out(frame, direction, table, Reason::FragmentUnknown);
    }
    if !is_tracked && !is_of_service(&mut packet.tuple) {
        gate.admit(&packet.tuple)?;
        keep(&packet, &config.timeouts);
        // The host's stack may have translated the packet that this one answers.
        return Ok(Entered::Whole(Ways::HostStack));
    }
    let flags = PacketFlags::of(&packet);
    let tracked = enter_if(
        T::flows(),
        &mut packet.tuple,
        flags,
        || traffic(frame, direction, endpoint),
        &config.timeouts,
        &gate,
    )?;
    note(frame, direction, tracked);
    let is_answer = packet.tuple.direction() != direction;
    let mut ways = Ways::All;
    if is_answer {
        // If another endpoint reached this one by its own address, that flow has an entry too. Otherwise, the request
        // came from elsewhere or was translated in the host's stack. The stack must then see the answer, unless the
        // request bypassed it.
        let asked = packet.tuple.with_direction(TUPLE_OUT);
        if direction == TUPLE_OUT && delivery::routes(config) && !has_entry(T::flows(), &asked) {
            ways = if is_past_stack(&asked.reply()) {
                Ways::PastStack
            } else {
                Ways::HostStack
            };
        }
        packet.tuple = packet.tuple.reply();
    }
    // Not earlier, or refused packets would use up space that others need.
    keep(&packet, &config.timeouts);
    Ok(Entered::Whole(ways))
}

/// An endpoint's policy, if it has one, for the flow of a packet.
struct EndpointGate<'a> {
    /// The endpoint's device; 0 without an endpoint.
    ifindex: u32,
    enforcement: Enforcement,
    frame: &'a Frame,
}

impl<'a> EndpointGate<'a> {
    #[inline(always)]
    fn new(endpoint: Option<&EndpointInfo>, frame: &'a Frame) -> Self {
        Self {
            ifindex: endpoint.map_or(0, |endpoint| endpoint.ifindex),
            enforcement: Enforcement::of(endpoint),
            frame,
        }
    }
}

impl<T: Version> Gate<T> for EndpointGate<'_> {
    type Refusal = Reason;

    #[inline(always)]
    fn owns(&self, entry: &CtEntry) -> bool {
        self.ifindex == 0 || self.ifindex == entry.ifindex
    }

    #[inline(always)]
    fn table(&self, direction: u8) -> Option<u32> {
        self.enforcement.table(direction)
    }

    #[inline(always)]
    fn admit(&self, tuple: &T) -> Result<(), Reason> {
        let direction = tuple.direction();
        let Some(table) = self.enforcement.table(direction) else {
            return Ok(());
        };
        admit(
            table,
            direction,
            peer(tuple.source().0, tuple.destination().0, direction),
            tuple.protocol(),
            destination_port(tuple),
            self.frame.length(),
        )
    }
}

/// Whether a packet without a flow is of a kind that only routers send.
#[inline(always)]
fn is_routers<T: Version>(frame: &Frame, tuple: &T, content_at: u32) -> bool {
    let mut kind = 0_u8;
    T::ICMP == PROTOCOL_ICMPV6
        && tuple.protocol() == PROTOCOL_ICMPV6
        && load(frame, content_at, &mut kind, 1).is_some()
        && is_of_router(kind)
}

/// Handles a packet that conntrack cannot interpret: no policy can allow it.
#[inline(always)]
fn left_out(
    frame: &Frame,
    direction: u8,
    table: Option<u32>,
    reason: Reason,
) -> Result<Entered, Reason> {
    if table.is_some() {
        return Err(reason);
    }
    note(frame, direction, Tracked::Invalid);
    Ok(Entered::Whole(Ways::All))
}

/// The endpoint's peer.
#[inline(always)]
fn peer<A>(source: A, destination: A, direction: u8) -> A {
    if direction == TUPLE_IN {
        source
    } else {
        destination
    }
}

/// The destination port of a flow's packet that policy applies to, in network byte order; for an echo, its ICMP type.
#[inline(always)]
fn destination_port<T: Version>(tuple: &T) -> u16 {
    let (_, port_be) = tuple.destination();
    if tuple.protocol() != T::ICMP {
        return port_be;
    }
    // The identifier is in the port of the requesting side.
    let is_reply = port_be != 0;
    let kind = if is_reply {
        T::ECHO_REPLY
    } else {
        T::ECHO_REQUEST
    };
    u16::from(kind).to_be()
}

/// Applies the policy in `table` to a packet that belongs to no flow.
#[subprogram(judge_message4, judge_message6)]
fn judge_message<T: Link>(
    frame: &Frame,
    direction: u8,
    message: Message,
    table: u32,
) -> Result<(), Reason> {
    let Some((source, destination)) = T::addresses(frame, IP_AT) else {
        return Err(Reason::InvalidPacket);
    };
    let peer = peer(source, destination, direction);
    let mut port_be = 0;
    if message.protocol() == T::ICMP {
        let mut start = [0_u8; 2];
        if load(frame, message.at(), &mut start, 2).is_none() {
            return Err(Reason::InvalidPacket);
        }
        if T::is_discovery(frame, direction, start, peer) {
            return Ok(());
        }
        port_be = u16::from(start[0]).to_be();
    }
    admit(
        table,
        direction,
        peer,
        message.protocol(),
        port_be,
        frame.length(),
    )
}

/// Whether an ICMP error that starts at `error_at` and travels in `direction` is about a known flow and addressed to
/// the sender of the packet inside it. If an endpoint sent the error, it must also be about a packet to that
/// endpoint.
#[subprogram(is_related4, is_related6)]
fn is_related<T: Version>(
    frame: &Frame,
    error_at: u32,
    direction: u8,
    endpoint: Option<&EndpointInfo>,
) -> bool {
    let Some(mut inner) = T::read_inner(frame, IP_AT, error_at, direction) else {
        return false;
    };
    let Some((source, destination)) = T::addresses(frame, IP_AT) else {
        return false;
    };
    // Routers on the path may report to an endpoint that its packets did not reach their destination.
    let is_between = inner.reply.destination().0 == destination
        && (direction == TUPLE_IN || inner.reply.source().0 == source);
    let gate = EndpointGate::new(endpoint, frame);
    is_between && is_admitted(T::flows(), &mut inner.reply, &gate)
}

#[inline(always)]
fn traffic(frame: &Frame, direction: u8, endpoint: Option<&EndpointInfo>) -> Traffic {
    let bytes = frame.length() - IP_AT as u32;
    let is_in = direction == TUPLE_IN;
    Traffic {
        rx_bytes: if is_in { bytes } else { 0 },
        tx_bytes: if is_in { 0 } else { bytes },
        source_identity: match endpoint {
            Some(endpoint) if !is_in => endpoint.identity,
            _ => identity::UNKNOWN,
        },
        ifindex: endpoint.map_or_else(|| frame.ifindex(), |endpoint| endpoint.ifindex),
        ..Traffic::default()
    }
}

/// Counts conntrack failures. The packet passes anyway.
#[inline(always)]
fn note(frame: &Frame, direction: u8, tracked: Tracked) {
    match tracked {
        Tracked::Full => count(frame, Reason::CtFull, metrics_direction(direction)),
        Tracked::Invalid => count(frame, Reason::CtInvalid, metrics_direction(direction)),
        Tracked::New | Tracked::Known => {}
    }
}

#[inline(always)]
fn note_error(frame: &Frame, direction: u8, is_related: bool) {
    let reason = if is_related {
        Reason::CtRelated
    } else {
        Reason::CtInvalid
    };
    count(frame, reason, metrics_direction(direction));
}

/// The packet's direction, seen from the host.
#[inline(always)]
fn metrics_direction(direction: u8) -> Direction {
    if direction == TUPLE_IN {
        Direction::Egress
    } else {
        Direction::Ingress
    }
}
