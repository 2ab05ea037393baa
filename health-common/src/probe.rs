//! The payload of an echo probe: how the agents of a mesh recognise each other's probes, and the fields that the
//! responder's programs fill in.
//!
//! A probe is an echo message with exactly [`PROBE_LEN`] bytes of payload in a packet without options, extension
//! headers or fragmentation. Other pings lack the tag and are never modified.

use crate::checksum::{fold, fold64, sum, sum32};
use crate::echo::{EchoHeader, FRAGMENT_MASK, IPV4_LEN, Ipv4Header, Ipv6Header, PROTOCOL_ICMPV6};
use crate::rtt::Reply;
use crate::siphash::{SipKey, siphash24_two_words};

/// Length of a probe's payload in bytes.
pub const PROBE_LEN: usize = size_of::<ProbePayload>();
/// Length of a probe's ICMP message in bytes.
pub const MESSAGE_LEN: usize = size_of::<ProbeMessage>();

/// First bytes of a probe's payload. They prove nothing, but make it unnecessary to compute the tag for most other
/// pings.
pub const PROBE_MAGIC: u32 = u32::from_ne_bytes(*b"hlt\x02");

/// Flag: asks the responder to report the time of day at which the probe arrived there.
pub const ASK_ONE_WAY: u8 = 1;

/// Bit of [`ProbePayload::turnround_be`]: the field holds the arrival time, which the responder has not (yet) replaced
/// with a duration.
pub const ARRIVAL: u64 = 1 << 63;

/// The key of a mesh without a configured key: not secret, but sufficient to distinguish the mesh's probes from other
/// pings.
pub const DEFAULT_KEY: SipKey = [
    u64::from_le_bytes(*b"health-a"),
    u64::from_le_bytes(*b"gent-key"),
];

/// Largest offset between two supposedly synchronised clocks, in nanoseconds.
pub const MAX_CLOCK_ERROR_NS: u64 = 1_000_000_000;

/// Which of a peer's addresses a probe goes to.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// The node's own address.
    Host = 1,
    /// The node's health endpoint.
    Endpoint = 2,
}

impl Path {
    /// The path for a byte value.
    pub const fn from_u8(value: u8) -> Option<Self> {
        match value {
            1 => Some(Self::Host),
            2 => Some(Self::Endpoint),
            _ => None,
        }
    }
}

/// How an address is probed; the value equals the IP protocol field.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// ICMP or ICMPv6 echo.
    Icmp = 1,
    /// HTTP `GET /hello` over TCP.
    Http = 6,
}

/// Id of an agent's echo probe. Within one session and IP version, the ids of the first 2^32 probes all differ.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProbeId {
    /// Random number chosen on each start of the agent, never 0.
    pub session: u32,
    /// Number of times that the sequence numbers have wrapped.
    pub round: u16,
    /// The ICMP sequence number.
    pub sequence: u16,
}

/// The payload of a probe.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbePayload {
    /// [`PROBE_MAGIC`].
    pub magic: u32,
    /// [`ProbeId::session`].
    pub session_be: u32,
    /// Keyed hash of identifier, sequence number, session, round, path and flags, under the key of the mesh; compared
    /// in memory order.
    pub tag: u64,
    /// [`ProbeId::round`].
    pub round_be: u16,
    /// [`Path`] as a byte.
    pub path: u8,
    /// [`ASK_ONE_WAY`] or 0.
    pub flags: u8,
    /// Reserved, zero.
    pub reserved: u32,
    /// Written by the responder: how long the probe spent in the host, from uplink to uplink, in nanoseconds. While the
    /// probe is still in the host, the field holds [`ARRIVAL`] and the `CLOCK_MONOTONIC` time of its arrival. 0:
    /// unknown.
    pub turnround_be: u64,
    /// Written by the responder on request: the time of day at which the probe arrived, in nanoseconds since 1970
    /// (UTC). 0: unknown.
    pub arrived_be: u64,
}

/// The ICMP message of a probe or its reply.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeMessage {
    /// The header.
    pub echo: EchoHeader,
    /// The payload.
    pub payload: ProbePayload,
}

const _: () = assert!(PROBE_LEN == 40 && MESSAGE_LEN == 48);

impl ProbePayload {
    /// Creates the payload of a probe. The ICMP identifier `icmp_id` is in host byte order.
    pub fn new(key: SipKey, icmp_id: u16, id: ProbeId, path: Path, flags: u8) -> Self {
        let mut payload = Self {
            magic: PROBE_MAGIC,
            session_be: id.session.to_be(),
            round_be: id.round.to_be(),
            path: path as u8,
            flags,
            ..Self::default()
        };
        payload.tag = payload.expected_tag(key, icmp_id.to_be(), id.sequence.to_be());
        payload
    }

    /// Returns the payload in wire format.
    pub fn to_bytes(&self) -> [u8; PROBE_LEN] {
        let mut bytes = [0; PROBE_LEN];
        bytes[..4].copy_from_slice(&self.magic.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.session_be.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[16..18].copy_from_slice(&self.round_be.to_ne_bytes());
        bytes[18] = self.path;
        bytes[19] = self.flags;
        bytes[20..24].copy_from_slice(&self.reserved.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.turnround_be.to_ne_bytes());
        bytes[32..].copy_from_slice(&self.arrived_be.to_ne_bytes());
        bytes
    }

    /// Parses a payload in wire format; `None` unless there are exactly [`PROBE_LEN`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; PROBE_LEN] = bytes.try_into().ok()?;
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut double = [[0; 8]; 3];
        for (double, at) in double.iter_mut().zip([8, 24, 32]) {
            double.copy_from_slice(&bytes[at..at + 8]);
        }
        let [tag, turnround_be, arrived_be] = double.map(u64::from_ne_bytes);
        Some(Self {
            magic: word(0),
            session_be: word(4),
            tag,
            round_be: u16::from_ne_bytes([bytes[16], bytes[17]]),
            path: bytes[18],
            flags: bytes[19],
            reserved: word(20),
            turnround_be,
            arrived_be,
        })
    }

    /// The tag that this payload must carry in an echo message with these fields, both in network byte order.
    #[inline(always)]
    pub const fn expected_tag(&self, key: SipKey, icmp_id_be: u16, sequence_be: u16) -> u64 {
        // The hash covers the fields' bytes in this order, regardless of the host's byte order.
        let first = icmp_id_be.to_le() as u64
            | (sequence_be.to_le() as u64) << 16
            | (self.session_be.to_le() as u64) << 32;
        let rest =
            self.round_be.to_le() as u64 | (self.path as u64) << 16 | (self.flags as u64) << 24;
        siphash24_two_words::<12>(key, first, rest).to_le()
    }

    /// Whether an agent that holds the mesh's key created this payload for an echo message with these fields, both in
    /// network byte order. The times that responders write are not covered.
    #[inline(always)]
    pub const fn is_genuine(&self, key: SipKey, icmp_id_be: u16, sequence_be: u16) -> bool {
        self.magic == PROBE_MAGIC && self.tag == self.expected_tag(key, icmp_id_be, sequence_be)
    }

    /// The probe's id, for a message with this sequence number.
    #[inline(always)]
    pub const fn id(&self, sequence_be: u16) -> ProbeId {
        ProbeId {
            session: u32::from_be(self.session_be),
            round: u16::from_be(self.round_be),
            sequence: u16::from_be(sequence_be),
        }
    }

    /// The contents of a reply with this payload after a round trip of `rtt_ns`. A time in the responding host that
    /// exceeds the round trip is discarded, because the tag does not cover it.
    #[inline(always)]
    pub const fn reply(&self, rtt_ns: u64) -> Reply {
        let turnround_ns = u64::from_be(self.turnround_be);
        Reply {
            // An arrival time that was never replaced is far larger than any round trip.
            remote_ns: if turnround_ns > rtt_ns {
                0
            } else {
                turnround_ns
            },
            ..Reply::new(rtt_ns)
        }
    }

    /// Whether [`Self::add_delays`] may be able to add delays to a reply.
    #[inline(always)]
    pub const fn reports_arrival(&self, reply: &Reply) -> bool {
        self.flags & ASK_ONE_WAY != 0 && self.arrived_be != 0 && reply.remote_ns != 0
    }

    /// Adds the forward and return delays of a reply that arrived at `now_utc_ns`, unless the two clocks are obviously
    /// out of step. A clock offset makes one delay too long and the other too short by the same amount: the shorter one
    /// may be negative.
    #[inline(always)]
    pub const fn add_delays(&self, reply: &mut Reply, now_utc_ns: u64) {
        let sent_ns = now_utc_ns.wrapping_sub(reply.rtt_ns);
        let forward_ns = u64::from_be(self.arrived_be).wrapping_sub(sent_ns) as i64;
        // The rest of the round trip, without the way there and the time in the peer's host.
        let back_ns = (reply.rtt_ns - reply.remote_ns).wrapping_sub(forward_ns as u64) as i64;
        let limit = reply.rtt_ns + MAX_CLOCK_ERROR_NS;
        if forward_ns.unsigned_abs() <= limit && back_ns.unsigned_abs() <= limit {
            reply.forward_ns = forward_ns;
            reply.back_ns = back_ns;
        }
    }
}

/// Whether an ICMP message in an IPv4 packet may be a probe or its reply: unfragmented, without options and of a
/// probe's length. Only the tag proves it.
#[inline(always)]
pub const fn may_be_probe4(ip: &Ipv4Header, message: &ProbeMessage) -> bool {
    ip.version_ihl == 0x45
        && ip.total_len_be == ((IPV4_LEN + MESSAGE_LEN) as u16).to_be()
        && ip.fragment_be & FRAGMENT_MASK.to_be() == 0
        && message.echo.code == 0
        && message.payload.magic == PROBE_MAGIC
}

/// Like [`may_be_probe4`], for IPv6. The caller has checked the protocol, which rules out extension headers.
#[inline(always)]
pub const fn may_be_probe6(ip: &Ipv6Header, message: &ProbeMessage) -> bool {
    ip.is_version_6()
        && ip.payload_len_be == (MESSAGE_LEN as u16).to_be()
        && message.echo.code == 0
        && message.payload.magic == PROBE_MAGIC
}

/// Whether both checksums of an IPv4 packet that may be a probe are right, given its message in memory order.
#[inline(always)]
pub fn is_intact4(ip: &Ipv4Header, message: &[u32; MESSAGE_LEN / 4]) -> bool {
    fold(sum(&ip.words())) == 0xffff && fold64(sum32(message)) == 0xffff
}

/// Like [`is_intact4`], for an IPv6 packet, whose only checksum also covers the addresses (RFC 8200 section 8.1).
#[inline(always)]
pub fn is_intact6(ip: &Ipv6Header, message: &[u32; MESSAGE_LEN / 4]) -> bool {
    let pseudo = sum32(&ip.saddr_be)
        + sum32(&ip.daddr_be)
        + (MESSAGE_LEN as u32).to_be() as u64
        + (PROTOCOL_ICMPV6 as u32).to_be() as u64;
    fold64(pseudo + sum32(message)) == 0xffff
}

/// The times that the responder's programs write into a probe and its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// See [`ProbePayload::turnround_be`].
    pub turnround_be: u64,
    /// See [`ProbePayload::arrived_be`].
    pub arrived_be: u64,
}

impl Times {
    /// The times for a request that arrived at `now_ns` (`CLOCK_MONOTONIC`). `utc_ns` is the time of day, or 0 if the
    /// request does not ask for it.
    #[inline(always)]
    pub const fn of_arrival(now_ns: u64, utc_ns: u64) -> Self {
        Self {
            turnround_be: (ARRIVAL | now_ns).to_be(),
            arrived_be: utc_ns.to_be(),
        }
    }

    /// The times for a reply that leaves at `now_ns`; `None` if the reply carries no arrival time.
    #[inline(always)]
    pub const fn of_departure(payload: &ProbePayload, now_ns: u64) -> Option<Self> {
        let field = u64::from_be(payload.turnround_be);
        if field & ARRIVAL == 0 {
            return None;
        }
        let arrived_ns = field & !ARRIVAL;
        // The arrival time is not from this host's clock, so it is meaningless.
        let turnround_ns = if arrived_ns > now_ns {
            0
        } else if arrived_ns == now_ns {
            1
        } else {
            now_ns - arrived_ns
        };
        Some(Self {
            turnround_be: turnround_ns.to_be(),
            arrived_be: payload.arrived_be,
        })
    }

    /// The fields as words, for the checksum.
    #[inline(always)]
    pub const fn words(&self) -> [u32; 4] {
        // The order of a word's halves does not matter to a sum.
        [
            self.turnround_be as u32,
            (self.turnround_be >> 32) as u32,
            self.arrived_be as u32,
            (self.arrived_be >> 32) as u32,
        ]
    }
}

impl From<&ProbePayload> for Times {
    #[inline(always)]
    fn from(payload: &ProbePayload) -> Self {
        Self {
            turnround_be: payload.turnround_be,
            arrived_be: payload.arrived_be,
        }
    }
}
