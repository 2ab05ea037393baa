//! Conntrack and policy for packets that endpoints send and receive.

use core::ptr;

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;
use health_common::ct::{CtEntry, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::echo::PROTOCOL_ICMPV6;
use health_common::endpoint::EndpointInfo;
use health_common::identity;
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::is_of_router;
use health_common::packet::Kind;

use crate::conntrack::{Gate, PacketFlags, Tracked, Traffic, enter_if, has_entry, is_admitted};
use crate::delivery;
use crate::fragment::{find, keep};
use crate::frame::{Frame, IP_AT};
use crate::ip_version::Version;
use crate::link::Link;
use crate::maps::HEALTH_CONFIG;
use crate::metrics::count;
use crate::packet::{ParsedPacket, load};
use crate::policy::{Enforcement, admit};
use crate::service::is_past_stack;

/// Records a packet that travels in `direction` (as in a tuple) in the entry of its flow, unless it is refused by the
/// policy of the endpoint that sends or receives it. Without an endpoint there is no policy, and the sender is
/// unknown. Returns the ways that the packet may take.
#[inline(always)]
pub fn track<T: Steps>(
    frame: &Frame,
    direction: u8,
    endpoint: Option<&EndpointInfo>,
) -> Result<Ways, Reason> {
    let message = match T::enter_packet(frame.skb(), direction, endpoint).read()? {
        Entered::Whole(ways) => return Ok(ways),
        Entered::Left(message) => message,
    };
    if message.is_error {
        let is_related = T::is_related(frame.skb(), message.at, direction, endpoint);
        note_error(frame, direction, is_related);
        if is_related {
            return Ok(Ways::HostStack);
        }
    }
    if let Some(table) = Enforcement::of(endpoint).table(direction) {
        T::judge_message(frame.skb(), direction, message, table)?;
    }
    Ok(Ways::HostStack)
}

/// The ways that a packet may take.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ways {
    /// Any way.
    All,
    /// Only through the host's stack: it may have translated the packet that this one answers.
    HostStack,
    /// Past the host's stack, to an outside client: the stack has not seen the packet that this one answers.
    PastStack,
}

/// The steps as separate functions in the kernel too: the verifier checks each one once, not once per path that leads
/// there. A program and the functions it calls share 512 bytes of stack, so the steps do not call each other.
pub trait Steps: Link {
    /// See [`enter_packet`].
    fn enter_packet(
        skb: *mut __sk_buff,
        direction: u8,
        endpoint: Option<&EndpointInfo>,
    ) -> EnterResult;
    /// See [`judge_message`].
    fn judge_message(
        skb: *mut __sk_buff,
        direction: u8,
        message: Message,
        table: u32,
    ) -> Result<(), Reason>;
    /// See [`is_related`].
    fn is_related(
        skb: *mut __sk_buff,
        error_at: u32,
        direction: u8,
        endpoint: Option<&EndpointInfo>,
    ) -> bool;
}

macro_rules! steps {
    ($tuple:ty, $enter_packet:ident, $judge_message:ident, $is_related:ident) => {
        impl Steps for $tuple {
            #[inline(always)]
            fn enter_packet(
                skb: *mut __sk_buff,
                direction: u8,
                endpoint: Option<&EndpointInfo>,
            ) -> EnterResult {
                let endpoint = endpoint.map_or(ptr::null(), ptr::from_ref);
                EnterResult($enter_packet(skb, direction.into(), endpoint))
            }

            #[inline(always)]
            fn judge_message(
                skb: *mut __sk_buff,
                direction: u8,
                message: Message,
                table: u32,
            ) -> Result<(), Reason> {
                refusal($judge_message(skb, direction.into(), message.word(), table))
            }

            #[inline(always)]
            fn is_related(
                skb: *mut __sk_buff,
                error_at: u32,
                direction: u8,
                endpoint: Option<&EndpointInfo>,
            ) -> bool {
                let endpoint = endpoint.map_or(ptr::null(), ptr::from_ref);
                $is_related(skb, error_at, direction.into(), endpoint) != 0
            }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $enter_packet(
            skb: *mut __sk_buff,
            direction: u32,
            endpoint: *const EndpointInfo,
        ) -> u32 {
            // SAFETY: null, or made of a reference to an endpoint.
            enter_packet::<$tuple>(skb, direction as u8, unsafe { endpoint.as_ref() }).0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $judge_message(
            skb: *mut __sk_buff,
            direction: u32,
            message: u32,
            table: u32,
        ) -> u32 {
            match judge_message::<$tuple>(skb, direction as u8, Message::of(message), table) {
                Ok(()) => ADMITTED,
                Err(reason) => reason as u32,
            }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $is_related(
            skb: *mut __sk_buff,
            error_at: u32,
            direction: u32,
            endpoint: *const EndpointInfo,
        ) -> u32 {
            // SAFETY: as above.
            let endpoint = unsafe { endpoint.as_ref() };
            is_related::<$tuple>(skb, error_at, direction as u8, endpoint).into()
        }
    };
}

steps!(Tuple4, enter_packet4, judge_message4, is_related4);
steps!(Tuple6, enter_packet6, judge_message6, is_related6);

/// The work that is left for a packet.
#[derive(Clone, Copy)]
pub struct Message {
    /// Offset of the packet's content.
    at: u32,
    /// IP protocol.
    protocol: u8,
    /// An ICMP error, as opposed to something else that belongs to no flow.
    is_error: bool,
}

impl Message {
    #[inline(always)]
    fn word(self) -> u32 {
        self.at | u32::from(self.protocol) << 16 | u32::from(self.is_error) << 24
    }

    #[inline(always)]
    fn of(word: u32) -> Self {
        Self {
            at: word & 0xffff,
            protocol: (word >> 16) as u8,
            is_error: word >> 24 & 1 != 0,
        }
    }
}

/// The result of [`enter_packet`]: [`Self::DONE`], [`Self::THROUGH_STACK`] or [`Self::PAST_STACK`] if nothing is left
/// to do; a reason to drop the packet, with the highest bit set; else the word of a [`Message`]. Functions in the
/// kernel can only return numbers.
pub struct EnterResult(u32);

/// How much is done for a packet.
enum Entered {
    /// Everything.
    Whole(Ways),
    /// Something is left to do.
    Left(Message),
}

impl EnterResult {
    const REFUSED: u32 = 1 << 31;
    const DONE: Self = Self(0);
    /// As [`Self::DONE`], but the packet must go through the host's stack.
    const THROUGH_STACK: Self = Self(1 << 30);
    /// As [`Self::DONE`], but the packet goes past the host's stack to an outside client.
    const PAST_STACK: Self = Self(1 << 29);

    #[inline(always)]
    fn refused(reason: Reason) -> Self {
        Self(Self::REFUSED | reason as u32)
    }

    #[inline(always)]
    fn read(self) -> Result<Entered, Reason> {
        if self.0 & Self::REFUSED != 0 {
            refusal(self.0 & 0xff).map(|()| Entered::Whole(Ways::All))
        } else if self.0 == Self::DONE.0 {
            Ok(Entered::Whole(Ways::All))
        } else if self.0 == Self::THROUGH_STACK.0 {
            Ok(Entered::Whole(Ways::HostStack))
        } else if self.0 == Self::PAST_STACK.0 {
            Ok(Entered::Whole(Ways::PastStack))
        } else {
            Ok(Entered::Left(Message::of(self.0)))
        }
    }
}

/// Takes the place of a reason: the packet is not refused.
const ADMITTED: u32 = 0;

/// Converts a number to the reason for which a policy refuses a packet.
#[inline(always)]
fn refusal(number: u32) -> Result<(), Reason> {
    const NONE: u8 = ADMITTED as u8;
    const DENIED_BY_RULE: u8 = Reason::PolicyDeniedByRule as u8;
    const INVALID: u8 = Reason::InvalidPacket as u8;
    const FRAGMENT: u8 = Reason::FragmentUnknown as u8;
    const INVALID_SOURCE: u8 = Reason::InvalidSource as u8;
    match number as u8 {
        NONE => Ok(()),
        DENIED_BY_RULE => Err(Reason::PolicyDeniedByRule),
        INVALID => Err(Reason::InvalidPacket),
        FRAGMENT => Err(Reason::FragmentUnknown),
        INVALID_SOURCE => Err(Reason::InvalidSource),
        _ => Err(Reason::PolicyDenied),
    }
}

/// Completes packets of flows, and all other packets that no policy must judge.
#[inline(always)]
fn enter_packet<T: Version>(
    skb: *mut __sk_buff,
    direction: u8,
    endpoint: Option<&EndpointInfo>,
) -> EnterResult {
    let ctx = TcContext::new(skb);
    let frame = &Frame::new(&ctx);
    let gate = EndpointGate::new(endpoint, frame);
    let table = gate.enforcement.table(direction);
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return EnterResult::DONE;
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
        return EnterResult::refused(Reason::InvalidSource);
    }
    let is_error = matches!(packet.kind, Kind::IcmpError);
    if is_error || is_no_flow && table.is_some() {
        let message = Message {
            at: content_at,
            protocol: packet.tuple.protocol(),
            is_error,
        };
        return EnterResult(message.word());
    }
    if is_no_flow {
        return EnterResult::DONE;
    }
    if !find(&mut packet) {
        return left_out(frame, direction, table, Reason::FragmentUnknown);
    }
    let flags = PacketFlags::of(&packet);
    let entered = enter_if(
        T::flows(),
        &mut packet.tuple,
        flags,
        || traffic(frame, direction, endpoint),
        &config.timeouts,
        &gate,
    );
    match entered {
        Ok(tracked) => note(frame, direction, tracked),
        Err(reason) => return EnterResult::refused(reason),
    }
    let is_answer = packet.tuple.direction() != direction;
    let mut result = EnterResult::DONE;
    if is_answer {
        // If another endpoint reached this one by its own address, there is an entry for that flow too. Otherwise the
        // packet came from elsewhere, or was translated in the host's stack, which must see the answer unless the
        // packet bypassed it.
        let asked = packet.tuple.with_direction(TUPLE_OUT);
        if direction == TUPLE_OUT && delivery::routes(config) && !has_entry(T::flows(), &asked) {
            result = if is_past_stack(&asked.reply()) {
                EnterResult::PAST_STACK
            } else {
                EnterResult::THROUGH_STACK
            };
        }
        packet.tuple = packet.tuple.reply();
    }
    // Not earlier: refused packets would use up space that others need.
    keep(&packet, &config.timeouts);
    result
}

/// An endpoint's policy, if it has one, for the flow of a packet.
struct EndpointGate<'a> {
    /// The endpoint's device; 0 without an endpoint.
    ifindex: u32,
    enforcement: Enforcement,
    frame: &'a Frame<'a>,
}

impl<'a> EndpointGate<'a> {
    #[inline(always)]
    fn new(endpoint: Option<&EndpointInfo>, frame: &'a Frame<'a>) -> Self {
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
fn left_out(frame: &Frame, direction: u8, table: Option<u32>, reason: Reason) -> EnterResult {
    if table.is_some() {
        return EnterResult::refused(reason);
    }
    note(frame, direction, Tracked::Invalid);
    EnterResult::DONE
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

/// The destination port of a flow's packet for policy, network byte order: for an echo, its type.
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
#[inline(always)]
fn judge_message<T: Link>(
    skb: *mut __sk_buff,
    direction: u8,
    message: Message,
    table: u32,
) -> Result<(), Reason> {
    let ctx = TcContext::new(skb);
    let frame = &Frame::new(&ctx);
    let Some((source, destination)) = T::addresses(frame, IP_AT) else {
        return Err(Reason::InvalidPacket);
    };
    let peer = peer(source, destination, direction);
    let mut port_be = 0;
    if message.protocol == T::ICMP {
        let mut start = [0_u8; 2];
        if load(frame, message.at, &mut start, 2).is_none() {
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
        message.protocol,
        port_be,
        frame.length(),
    )
}

/// Whether an ICMP error that starts at `error_at` and travels in `direction` is about a known flow and addressed to
/// the sender of the packet inside it. If an endpoint sent the error, it must also be about a packet to that
/// endpoint.
#[inline(always)]
fn is_related<T: Version>(
    skb: *mut __sk_buff,
    error_at: u32,
    direction: u8,
    endpoint: Option<&EndpointInfo>,
) -> bool {
    let ctx = TcContext::new(skb);
    let frame = &Frame::new(&ctx);
    let Some(mut inner) = T::read_inner(frame, IP_AT, error_at, direction) else {
        return false;
    };
    let Some((source, destination)) = T::addresses(frame, IP_AT) else {
        return false;
    };
    // Routers on the way may report to an endpoint that its packets did not reach others.
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
