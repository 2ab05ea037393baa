//! Conntrack: `HEALTH_CT4` and `HEALTH_CT6` for TCP flows, `HEALTH_CT_ANY4` and `HEALTH_CT_ANY6` for all other flows.
//! Defines tuples, entries and lifetimes; [`tcp`] defines how the segments of a TCP connection change its entry.

pub mod tcp;

use network_types::ip::IpProto;

use crate::echo::{PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use crate::tcp::{IP_PROTOCOL_TCP, SYN};

/// IP protocol number of UDP.
pub const IP_PROTOCOL_UDP: u8 = IpProto::Udp as u8;
/// IP protocol number of SCTP.
pub const IP_PROTOCOL_SCTP: u8 = IpProto::Sctp as u8;

/// Capacity of `HEALTH_CT4`, `HEALTH_CT6`, `HEALTH_NAT4` and `HEALTH_NAT6`, unless the agent asks for another size.
pub const DEFAULT_ENTRIES: u32 = 65_536;
/// Like [`DEFAULT_ENTRIES`], for the maps of protocols other than TCP, such as `HEALTH_CT_ANY4`.
pub const DEFAULT_ANY_ENTRIES: u32 = 32_768;

/// Direction bit of a tuple: the flow was opened towards a local endpoint.
pub const TUPLE_IN: u8 = 1;
/// Direction bit of a tuple: the flow was opened by this host.
pub const TUPLE_OUT: u8 = 0;

/// Conntrack and NAT tuple, in the flow's original direction. `A` is an address.
///
/// For ICMP echo, `sport_be` is the identifier and `dport_be` is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FlowTuple<A> {
    /// Source address of the first packet.
    pub saddr_be: A,
    /// Destination address of the first packet.
    pub daddr_be: A,
    /// Source port, or the ICMP identifier.
    pub sport_be: u16,
    /// Destination port, or 0.
    pub dport_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// [`TUPLE_IN`] or [`TUPLE_OUT`].
    pub direction: u8,
    /// Explicit padding, zero.
    pub pad: u16,
}

/// IPv4 conntrack and NAT tuple.
pub type Tuple4 = FlowTuple<u32>;

/// IPv6 conntrack and NAT tuple.
pub type Tuple6 = FlowTuple<[u32; 4]>;

impl<A: Copy> FlowTuple<A> {
    /// The tuple of a packet in the opposite direction: the reply to a packet with this tuple.
    #[inline(always)]
    pub const fn reversed(self) -> Self {
        Self {
            saddr_be: self.daddr_be,
            daddr_be: self.saddr_be,
            sport_be: self.dport_be,
            dport_be: self.sport_be,
            protocol: self.protocol,
            direction: self.direction ^ TUPLE_IN,
            pad: 0,
        }
    }
}

/// How a packet relates to its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The flow's first packet.
    New,
    /// In the direction of the first packet.
    Established,
    /// In the opposite direction.
    Reply,
    /// An ICMP error about the flow.
    Related,
    /// Opens a new connection between the ports of a closed one.
    Reopened,
    /// Not allowed by the protocol in this state: the packet neither starts nor changes a flow.
    Invalid,
}

/// Which side of a flow sent a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that sent the first packet.
    Original,
    /// The other side.
    Reply,
}

impl Side {
    /// How a packet from this side relates to a known flow whose protocol has no closed state.
    #[inline(always)]
    pub const fn outcome(self) -> Outcome {
        match self {
            Self::Original => Outcome::Established,
            Self::Reply => Outcome::Reply,
        }
    }
}

/// State of one flow. "rx" is traffic towards the local side, "tx" is traffic from it; bytes count from the IP header
/// on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtEntry {
    /// Packets received.
    pub rx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// When the entry expires and may be collected: `CLOCK_MONOTONIC`, in seconds.
    pub expires: u32,
    /// Flag bits: [`CT_RX_CLOSING`] and the others.
    pub flags: u16,
    /// Union of the TCP flags received.
    pub rx_flags_seen: u8,
    /// Union of the TCP flags sent.
    pub tx_flags_seen: u8,
    /// When the last packet was received: `CLOCK_MONOTONIC`, in seconds; 0 for never.
    pub last_rx: u32,
    /// When the last packet was sent: `CLOCK_MONOTONIC`, in seconds; 0 for never.
    pub last_tx: u32,
    /// Identity of the side that opened the flow.
    pub source_identity: u32,
    /// Interface on which the flow was opened.
    pub ifindex: u32,
    /// Number of the policy table that last allowed the flow; 0 if none was consulted, or if the last one refused it.
    pub policy: u32,
    /// Explicit padding, zero.
    pub pad: u32,
}

/// Flag: the sender of the received packets has closed the connection with FIN. RST sets both closing bits.
pub const CT_RX_CLOSING: u16 = 0x1;
/// Flag: like [`CT_RX_CLOSING`], for sent packets.
pub const CT_TX_CLOSING: u16 = 0x2;
/// Flag: the handshake is over, or was never seen.
pub const CT_SEEN_NON_SYN: u16 = 0x10;
/// Flag: the flow's source address is translated.
pub const CT_MASQUERADED: u16 = 0x1000;
/// Flag: an acknowledgement was received after a FIN was sent.
pub const CT_RX_ACKED_FIN: u16 = 0x2000;
/// Flag: an acknowledgement was sent after a FIN was received.
pub const CT_TX_ACKED_FIN: u16 = 0x4000;

/// Flag: the side that reset the connection sent something else afterwards, and the other side has not sent anything
/// since.
pub const CT_RESET_DOUBTED: u16 = 0x8000;

/// Names of the flags, for listings. Those below 0x1000 use Cilium's number and name.
pub const CT_FLAG_NAMES: [(u16, &str); 7] = [
    (CT_RX_CLOSING, "RxClosing"),
    (CT_TX_CLOSING, "TxClosing"),
    (CT_SEEN_NON_SYN, "SeenNonSyn"),
    (CT_MASQUERADED, "Masqueraded"),
    (CT_RX_ACKED_FIN, "RxAckedFin"),
    (CT_TX_ACKED_FIN, "TxAckedFin"),
    (CT_RESET_DOUBTED, "ResetDoubted"),
];

const BOTH_CLOSING: u16 = CT_RX_CLOSING | CT_TX_CLOSING;

/// The `flags`, `rx_flags_seen` and `tx_flags_seen` fields of an entry, as the single aligned word that they form in
/// memory. They change together: any CPU may update the word by compare-and-swap.
///
/// Bits are only ever added, except when a connection is reopened or continues after a RST, and each direction has
/// its own bits. So CPUs that each handle one direction need no lock, and independent segments may be recorded in
/// either order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtState(u32);

/// Offset of [`CtState`] in an entry, in bytes.
pub const CT_STATE_OFFSET: usize = core::mem::offset_of!(CtEntry, flags);

const _: () = {
    assert!(CT_STATE_OFFSET.is_multiple_of(4));
    assert!(core::mem::offset_of!(CtEntry, rx_flags_seen) == CT_STATE_OFFSET + 2);
    assert!(core::mem::offset_of!(CtEntry, tx_flags_seen) == CT_STATE_OFFSET + 3);
};

impl CtState {
    /// Converts the word in memory.
    #[inline(always)]
    pub const fn from_word(word: u32) -> Self {
        Self(word)
    }

    /// The word in memory.
    #[inline(always)]
    pub const fn word(self) -> u32 {
        self.0
    }

    /// Combines the fields of an entry.
    #[inline(always)]
    pub const fn new(flags: u16, rx_flags_seen: u8, tx_flags_seen: u8) -> Self {
        let [a, b] = flags.to_ne_bytes();
        Self(u32::from_ne_bytes([a, b, rx_flags_seen, tx_flags_seen]))
    }

    /// The flag bits.
    #[inline(always)]
    pub const fn flags(self) -> u16 {
        let [a, b, _, _] = self.0.to_ne_bytes();
        u16::from_ne_bytes([a, b])
    }

    /// Union of the TCP flags received.
    #[inline(always)]
    pub const fn rx_flags_seen(self) -> u8 {
        self.0.to_ne_bytes()[2]
    }

    /// Union of the TCP flags sent.
    #[inline(always)]
    pub const fn tx_flags_seen(self) -> u8 {
        self.0.to_ne_bytes()[3]
    }
}

impl CtState {
    /// Whether all of these flag bits are set.
    #[inline(always)]
    pub const fn has(self, flags: u16) -> bool {
        self.flags() & flags == flags
    }

    /// The state with these flag bits added.
    #[inline(always)]
    pub const fn with(self, flags: u16) -> Self {
        Self::new(
            self.flags() | flags,
            self.rx_flags_seen(),
            self.tx_flags_seen(),
        )
    }

    /// Whether both directions are closed.
    #[inline(always)]
    pub const fn is_closed(self) -> bool {
        self.has(BOTH_CLOSING)
    }
}

impl CtEntry {
    /// Whether the entry has expired at `now` (`CLOCK_MONOTONIC`, in seconds).
    #[inline(always)]
    pub const fn has_expired(&self, now: u32) -> bool {
        self.expires <= now
    }

    /// Whether this is a TCP connection that is open at `now` (`CLOCK_MONOTONIC`, in seconds): both sides have sent
    /// packets, and not only those of a handshake.
    #[inline(always)]
    pub const fn is_open(&self, now: u32) -> bool {
        let state = self.state();
        let is_answered = state.rx_flags_seen() != 0 && state.tx_flags_seen() != 0;
        state.has(CT_SEEN_NON_SYN) && !state.is_closed() && is_answered && !self.has_expired(now)
    }

    /// Whether the flow is only an attempt: for TCP, an incomplete handshake; for other protocols, packets from one
    /// side only.
    #[inline(always)]
    pub const fn is_attempt(&self, protocol: u8) -> bool {
        if protocol != IP_PROTOCOL_TCP {
            return self.rx_packets == 0 || self.tx_packets == 0;
        }
        let state = self.state();
        let is_answered = state.rx_flags_seen() != 0 && state.tx_flags_seen() != 0;
        // A connection first seen mid-stream is not an attempt, even if only one side has been seen.
        let has_begun = (state.rx_flags_seen() | state.tx_flags_seen()) & SYN != 0;
        has_begun && (!state.has(CT_SEEN_NON_SYN) || !is_answered)
    }

    /// The entry's flags as one word.
    #[inline(always)]
    pub const fn state(&self) -> CtState {
        CtState::new(self.flags, self.rx_flags_seen, self.tx_flags_seen)
    }

    /// Sets the entry's flags.
    #[inline(always)]
    pub const fn set_state(&mut self, state: CtState) {
        self.flags = state.flags();
        self.rx_flags_seen = state.rx_flags_seen();
        self.tx_flags_seen = state.tx_flags_seen();
    }
}

/// How long entries outlive their last packet, in seconds. 0 counts as 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// TCP, during the handshake.
    pub tcp_syn: u32,
    /// TCP, after the handshake and until both sides have closed.
    pub tcp_established: u32,
    /// TCP, after both sides have closed.
    pub tcp_close: u32,
    /// UDP.
    pub udp: u32,
    /// ICMP and ICMPv6 echo.
    pub icmp: u32,
    /// SCTP. An idle association sends heartbeats 30 s plus a retransmission timeout apart; the timeout may be 60 s,
    /// plus half of that as jitter (RFC 9260 sections 8.3 and 16).
    pub sctp: u32,
    /// Other protocols.
    pub any: u32,
    /// Ports of fragmented packets: [`crate::fragment::FragmentPorts`]. Hosts keep an incomplete packet for at most 60
    /// s (RFC 8200 section 4.5); Linux keeps an IPv4 one for 30 s (`net.ipv4.ipfrag_time`).
    pub fragment: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            tcp_syn: 60,
            tcp_established: 8000,
            tcp_close: 10,
            udp: 60,
            icmp: 60,
            sctp: 210,
            any: 60,
            fragment: 30,
        }
    }
}

/// How long an entry lives after a packet that left it in `state`, in seconds; at least 1.
#[inline(always)]
pub const fn lifetime(protocol: u8, state: CtState, timeouts: &Timeouts) -> u32 {
    let seconds = match protocol {
        IP_PROTOCOL_TCP if state.is_closed() => timeouts.tcp_close,
        IP_PROTOCOL_TCP if state.has(CT_SEEN_NON_SYN) => timeouts.tcp_established,
        IP_PROTOCOL_TCP => timeouts.tcp_syn,
        IP_PROTOCOL_UDP => timeouts.udp,
        PROTOCOL_ICMP | PROTOCOL_ICMPV6 => timeouts.icmp,
        IP_PROTOCOL_SCTP => timeouts.sctp,
        _ => timeouts.any,
    };
    if seconds == 0 { 1 } else { seconds }
}

crate::map_types!(Tuple4 = 16, Tuple6 = 40, CtEntry = 64, Timeouts = 32);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn tuple4() -> impl Strategy<Value = Tuple4> {
        (any::<(u32, u32, u16, u16, u8)>(), 0_u8..2).prop_map(|(fields, direction)| {
            let (saddr_be, daddr_be, sport_be, dport_be, protocol) = fields;
            Tuple4 {
                saddr_be,
                daddr_be,
                sport_be,
                dport_be,
                protocol,
                direction,
                pad: 0,
            }
        })
    }

    pub(crate) fn tuple6() -> impl Strategy<Value = Tuple6> {
        (tuple4(), any::<([u32; 4], [u32; 4])>()).prop_map(|(ports, (saddr_be, daddr_be))| Tuple6 {
            saddr_be,
            daddr_be,
            sport_be: ports.sport_be,
            dport_be: ports.dport_be,
            protocol: ports.protocol,
            direction: ports.direction,
            pad: 0,
        })
    }

    #[test]
    fn the_word_of_an_entry_is_its_three_fields() {
        let state = CtState::new(0x1234, 0x56, 0x78);
        let mut entry = CtEntry::default();
        entry.set_state(state);
        let fields = (entry.flags, entry.rx_flags_seen, entry.tx_flags_seen);
        assert_eq!(fields, (0x1234, 0x56, 0x78));
        assert_eq!(entry.state(), state);
        assert_eq!(state.word().to_ne_bytes()[2..], [0x56, 0x78]);
    }

    #[test]
    fn an_entry_lives_as_its_protocol_and_its_state_say() {
        let timeouts = Timeouts::default();
        let new = CtState::default();
        let established = new.with(CT_SEEN_NON_SYN);
        let half_closed = established.with(CT_RX_CLOSING);
        let closed = half_closed.with(CT_TX_CLOSING);
        for (state, seconds) in [
            (new, 60),
            (established, 8000),
            (half_closed, 8000),
            (closed, 10),
        ] {
            assert_eq!(lifetime(6, state, &timeouts), seconds);
        }
        let refused = new.with(CT_RX_CLOSING | CT_TX_CLOSING);
        assert_eq!(lifetime(6, refused, &timeouts), 10);
        for (protocol, seconds) in [(17, 60), (1, 60), (58, 60), (132, 210), (47, 60)] {
            assert_eq!(lifetime(protocol, new, &timeouts), seconds);
        }
    }

    #[test]
    fn an_entry_expires_at_its_second() {
        let entry = CtEntry {
            expires: 100,
            ..CtEntry::default()
        };
        assert!(!entry.has_expired(99));
        assert!(entry.has_expired(100));
    }

    proptest! {
        #[test]
        fn the_reverse_of_the_reverse_is_the_tuple(four in tuple4(), six in tuple6()) {
            prop_assert_eq!(four.reversed().reversed(), four);
            prop_assert_ne!(four.reversed(), four);
            prop_assert_eq!(six.reversed().reversed(), six);
            prop_assert_ne!(six.reversed(), six);
        }

        #[test]
        fn the_fields_of_a_state_are_kept_apart(flags: u16, rx: u8, tx: u8, more: u16) {
            let state = CtState::new(flags, rx, tx);
            prop_assert_eq!((state.flags(), state.rx_flags_seen(), state.tx_flags_seen()), (flags, rx, tx));
            prop_assert_eq!(CtState::from_word(state.word()), state);
            prop_assert_eq!(state.with(more), CtState::new(flags | more, rx, tx));
        }

        #[test]
        fn every_entry_lives_for_a_second_at_least(protocol: u8, word: u32, seconds in prop::array::uniform8(0_u32..3)) {
            let [tcp_syn, tcp_established, tcp_close, udp, icmp, sctp, any, fragment] = seconds;
            let timeouts = Timeouts { tcp_syn, tcp_established, tcp_close, udp, icmp, sctp, any, fragment };
            prop_assert!(lifetime(protocol, CtState::from_word(word), &timeouts) > 0);
        }
    }
}
