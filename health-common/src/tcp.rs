//! TCP round trips, timed from a segment's departure to the arrival of its acknowledgement.
//!
//! Each connection has at most one timed segment: one that opens it, or one with new data that the peer must
//! acknowledge at once. The first pure acknowledgement of that segment ends the round trip. Retransmitted data is never
//! timed (Karn and Partridge, SIGCOMM 1987; RFC 6298 section 3).
//!
//! The module of the same name in `health-ebpf` reads the segments. The pair shares its name on purpose: the
//! decisions live here, kernel-only code lives there.

use network_types::ip::IpProto;

use crate::addr::Addr;
use crate::checksum::fold;
use crate::rtt::RttKey;

/// Length of a TCP header without options, in bytes.
pub const TCP_LEN: usize = 20;
/// Maximum length of a TCP header in bytes (RFC 9293 section 3.1).
pub const TCP_MAX_LEN: usize = 60;
/// IP protocol number of TCP.
pub const IP_PROTOCOL_TCP: u8 = IpProto::Tcp as u8;

/// No more data from the sender.
pub const FIN: u8 = 0x01;
/// Opens a connection.
pub const SYN: u8 = 0x02;
/// Aborts a connection.
pub const RST: u8 = 0x04;
/// The acknowledgement number is valid.
pub const ACK: u8 = 0x10;

/// Minimum time between two timed segments of one connection.
pub const SAMPLE_PAUSE_NS: u64 = 10_000_000;
/// A connection first seen mid-stream may be retransmitting, so no segment is timed for this long. Retransmission
/// time-outs are at least as long (RFC 6298 section 2.4).
pub const UNKNOWN_PAUSE_NS: u64 = 1_000_000_000;

const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_TIMESTAMPS: u8 = 8;
/// Length of the timestamps option in bytes (RFC 7323 section 3.2).
const TIMESTAMPS_LEN: usize = 10;

/// TCP header without options (RFC 9293 section 3.1). Multi-byte fields in network byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpHeader {
    /// Source port.
    pub source_be: u16,
    /// Destination port.
    pub destination_be: u16,
    /// Sequence number.
    pub sequence_be: u32,
    /// Acknowledgement number.
    pub acknowledgement_be: u32,
    /// Header length in words in the high four bits.
    pub offset: u8,
    /// [`FIN`], [`SYN`], [`RST`], [`ACK`] and others.
    pub flags: u8,
    /// Window.
    pub window_be: u16,
    /// Checksum over pseudo header, header and data.
    pub check: u16,
    /// Urgent pointer.
    pub urgent_be: u16,
}

const _: () = assert!(core::mem::size_of::<TcpHeader>() == TCP_LEN);

/// Whether sequence number or timestamp `a` comes before `b` (RFC 9293 section 3.4, RFC 7323 section 5.2).
#[inline(always)]
pub const fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// The contents of a segment's header, host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Sequence number of the first byte, or of the SYN.
    pub sequence: u32,
    /// The next sequence number that the sender of the segment expects.
    pub acknowledgement: u32,
    /// [`FIN`], [`SYN`], [`RST`], [`ACK`] and others.
    pub flags: u8,
    /// Length of the header in bytes, 20..=60.
    pub header_len: u32,
    /// Length of the data in bytes.
    pub data_len: u32,
}

impl Segment {
    /// Reads the header of a segment of `len` bytes, header included; `None` if the lengths contradict each other.
    #[inline(always)]
    pub fn read(header: &TcpHeader, len: u32) -> Option<Self> {
        let header_len = (u32::from(header.offset) >> 4) * 4;
        if header_len < TCP_LEN as u32 || header_len > len {
            return None;
        }
        Some(Self {
            sequence: u32::from_be(header.sequence_be),
            acknowledgement: u32::from_be(header.acknowledgement_be),
            flags: header.flags,
            header_len,
            data_len: len - header_len,
        })
    }

    /// The sequence number after the segment's last one.
    #[inline(always)]
    pub const fn end(&self) -> u32 {
        let syn = (self.flags & SYN != 0) as u32;
        let fin = (self.flags & FIN != 0) as u32;
        self.sequence
            .wrapping_add(self.data_len)
            .wrapping_add(syn + fin)
    }

    /// Whether all of these flags are set.
    #[inline(always)]
    pub const fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    /// Whether this opens a connection: SYN without contradicting flags.
    #[inline(always)]
    pub const fn opens(&self) -> bool {
        self.flags & (SYN | ACK | RST | FIN) == SYN
    }

    /// Whether this accepts a connection: SYN and ACK.
    #[inline(always)]
    pub const fn agrees(&self) -> bool {
        self.flags & (SYN | ACK | RST | FIN) == SYN | ACK
    }
}

/// The timestamps in a segment's options (RFC 7323 section 3.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timestamps {
    /// TSval: the sender's timestamp.
    pub value: u32,
    /// TSecr: the last timestamp that the sender received from the other side.
    pub echo: u32,
}

/// Size of the TCP header buffer in bytes: a power of two, so that a mask keeps any index in bounds. Verifiers before
/// Linux 6.15 cannot derive the bound from all the comparisons that LLVM generates.
pub const HEADER_ROOM: usize = TCP_MAX_LEN.next_power_of_two();

/// A whole TCP header with its options, in memory order; zero after its end.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub struct HeaderBytes(pub [u8; HEADER_ROOM]);

/// Error: the options have inconsistent lengths. No host sends such options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl HeaderBytes {
    /// The timestamps in the options of a header of `len` bytes.
    #[inline(always)]
    pub fn timestamps(&self, len: u32) -> Result<Option<Timestamps>, Malformed> {
        let len = len as usize;
        // Offset of the next option. `at` advances by one per iteration, so the verifier knows its value in each.
        let mut next = TCP_LEN;
        let mut at = TCP_LEN;
        while at < TCP_MAX_LEN {
            if at >= len {
                return Ok(None);
            }
            if at == next {
                let kind = self.byte(at);
                if kind == OPTION_END {
                    return Ok(None);
                }
                let mut size = 1;
                if kind != OPTION_NOP {
                    if at + 1 >= len {
                        return Err(Malformed);
                    }
                    size = self.byte(at + 1) as usize;
                    if size < 2 || at + size > len {
                        return Err(Malformed);
                    }
                }
                if kind == OPTION_TIMESTAMPS {
                    if size != TIMESTAMPS_LEN {
                        return Err(Malformed);
                    }
                    return Ok(Some(Timestamps {
                        value: self.word(at + 2),
                        echo: self.word(at + 6),
                    }));
                }
                next = at + size;
            }
            at += 1;
        }
        Ok(None)
    }

    /// Four bytes in network byte order.
    #[inline(always)]
    fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes([at, at + 1, at + 2, at + 3].map(|at| self.byte(at)))
    }

    #[inline(always)]
    fn byte(&self, at: usize) -> u8 {
        self.0[at % HEADER_ROOM]
    }

    /// Whether the checksum is right for a segment without data. `pseudo` is the unfolded sum of the pseudo header.
    ///
    /// A segment from this machine, even from another namespace, carries only the sum of the pseudo header, which its
    /// device was supposed to complete (`CHECKSUM_PARTIAL`).
    #[inline(always)]
    pub fn has_good_checksum(&self, pseudo: u32) -> bool {
        let mut sum = pseudo;
        let mut at = 0;
        while at < TCP_MAX_LEN {
            sum += u32::from(u16::from_ne_bytes([self.0[at], self.0[at + 1]]));
            at += 2;
        }
        let check = u16::from_ne_bytes([self.0[16], self.0[17]]);
        fold(sum) == 0xffff || fold(pseudo) == check
    }
}

/// The unfolded sum of the pseudo header of a segment of `len` bytes (RFC 9293 section 3.1).
///
/// IPv4 addresses may be passed in their IPv6-mapped form: both have the same prefix, which is left out.
#[inline(always)]
pub fn pseudo_header_sum(source: &Addr, destination: &Addr, len: u32, ipv4: bool) -> u32 {
    let mut sum = u32::from((IP_PROTOCOL_TCP as u16).to_be())
        + u32::from((len as u16).to_be())
        + u32::from(((len >> 16) as u16).to_be());
    let mut word = if ipv4 { 3 } else { 0 };
    while word < 4 {
        for addr in [source, destination] {
            let both = addr.words_be[word];
            sum += (both & 0xffff) + (both >> 16);
        }
        word += 1;
    }
    sum
}

/// Key of `HEALTH_TCP`: a connection, from this host's point of view.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Address of the other side.
    pub peer: Addr,
    /// Address of this side.
    pub local: Addr,
    /// Port of the other side.
    pub peer_port_be: u16,
    /// Port of this side.
    pub local_port_be: u16,
}

/// Flag: the timed segment opens the connection; the accepting segment answers it.
pub const TIMED_SYN: u8 = 1;
/// Flag: the timed segment carries timestamps.
pub const TIMED_CLOCK: u8 = 2;

/// Value of `HEALTH_TCP`. Times are `CLOCK_MONOTONIC`, in nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// When the timed segment left; 0 while none is timed. Written last and taken first: the CPU that exchanges the
    /// value for 0 gets the sample.
    pub timed_ns: u64,
    /// No data is timed before this time.
    pub pause_ns: u64,
    /// For a probe's connection: the round trip of its handshake; 0 while unknown.
    pub handshake_ns: u64,
    /// The sequence number that follows the last one sent.
    pub sent_end: u32,
    /// Acknowledgements beyond this number answer the timed segment.
    pub timed_sequence: u32,
    /// TSval of the timed segment.
    pub timed_clock: u32,
    /// [`TIMED_SYN`], [`TIMED_CLOCK`].
    pub timed_flags: u8,
    /// [`crate::probe::Path`] of the peer's address as a byte; 0 for a probe's connection.
    pub path: u8,
    /// Explicit padding, zero.
    pub pad: u16,
}

/// What to do about an outgoing segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Nothing further: the segment has been recorded.
    Noted,
    /// Time the segment.
    Time,
    /// Cancel the timing, if any: the segment repeats earlier data.
    Repeated,
}

/// How a segment from the peer relates to the timed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// It is unrelated to the timed segment.
    Unrelated,
    /// It acknowledges the timed segment but says nothing about the round trip.
    Void,
    /// It answers the timed segment if checksum and options are good.
    Answer,
}

impl Flow {
    /// Creates the entry of a connection that is first seen when this segment leaves. The caller should time the
    /// segment if it opens or accepts the connection.
    #[inline(always)]
    pub fn met(segment: &Segment, path: u8, now_ns: u64) -> Self {
        Self {
            pause_ns: now_ns + UNKNOWN_PAUSE_NS,
            sent_end: segment.end(),
            path,
            ..Self::default()
        }
    }

    /// Records an outgoing segment. `segments` is the number of full-sized segments that it will be split into on the
    /// wire, and `now_ns` reads a clock that may lag by some milliseconds.
    ///
    /// Data is timed if it is new and fills at least two full-sized segments: a receiver acknowledges every second
    /// one at once (RFC 5681 section 4.2), and may delay its answer to a single one.
    #[inline(always)]
    pub fn sent(&mut self, segment: &Segment, segments: u32, now_ns: impl FnOnce() -> u64) -> Sent {
        let end = segment.end();
        if segment.has(SYN) {
            if end == self.sent_end {
                return Sent::Repeated;
            }
            // This is a new connection between the same ports.
            self.sent_end = end;
            return Sent::Time;
        }
        if is_before(segment.sequence, self.sent_end) {
            if is_before(self.sent_end, end) {
                self.sent_end = end;
            }
            return Sent::Repeated;
        }
        let is_next = segment.sequence == self.sent_end;
        self.sent_end = end;
        if !is_next {
            // The data in between left unseen and may be retransmitted.
            self.pause_ns = now_ns() + UNKNOWN_PAUSE_NS;
            return Sent::Repeated;
        }
        if segments < 2 || self.timed_ns != 0 {
            return Sent::Noted;
        }
        if now_ns() < self.pause_ns {
            return Sent::Noted;
        }
        Sent::Time
    }

    /// Records the segment to time, except for the time itself, `timed_ns`, which the caller must set last.
    #[inline(always)]
    pub fn prepare(&mut self, segment: &Segment, clock: Option<Timestamps>, now_ns: u64) {
        let syn = if segment.opens() { TIMED_SYN } else { 0 };
        let with_clock = if clock.is_some() { TIMED_CLOCK } else { 0 };
        self.timed_flags = syn | with_clock;
        self.timed_clock = clock.map_or(0, |clock| clock.value);
        self.timed_sequence = segment.sequence;
        // A SYN also cuts short the longer pause set by `met`: the connection is seen from its first segment
        // on.
        self.pause_ns = now_ns + SAMPLE_PAUSE_NS;
    }

    /// How a segment from the peer relates to the timed segment.
    ///
    /// Only the first acknowledgement counts, and only if it carries no data: with data, it may have waited for the
    /// application.
    #[inline(always)]
    pub fn received(&self, segment: &Segment) -> Received {
        if !segment.has(ACK) || segment.has(RST) {
            return Received::Unrelated;
        }
        if !is_before(self.timed_sequence, segment.acknowledgement) {
            return Received::Unrelated;
        }
        let of_more_than_sent = is_before(self.sent_end, segment.acknowledgement);
        let expects_syn = self.timed_flags & TIMED_SYN != 0;
        if of_more_than_sent || segment.has(SYN) != expects_syn {
            // The acknowledgement is old or forged, or some of this host's packets take a path that is not visible
            // here.
            return Received::Unrelated;
        }
        if segment.data_len > 0 || segment.has(FIN) {
            return Received::Void;
        }
        Received::Answer
    }

    /// How a segment relates to the handshake of a probe's connection. Only the handshake is timed, and only once.
    #[inline(always)]
    pub fn handshake(&self, segment: &Segment) -> Received {
        let is_first = self.handshake_ns == 0 && segment.acknowledgement == self.sent_end;
        if is_first && segment.agrees() && segment.data_len == 0 {
            Received::Answer
        } else {
            Received::Unrelated
        }
    }

    /// Whether the timestamps of an answer match those of the timed segment. An echo of a later segment's timestamp
    /// means that the later segment triggered this answer and that the answer to the timed one was lost. An echo of an
    /// earlier segment's timestamp is valid if the receiver answers several segments at once (RFC 7323 section 4.3).
    #[inline(always)]
    pub fn agrees(&self, answer: Option<Timestamps>) -> bool {
        if self.timed_flags & TIMED_CLOCK == 0 {
            return true;
        }
        let is_syn = self.timed_flags & TIMED_SYN != 0;
        match answer {
            Some(clock) if is_syn => clock.echo == self.timed_clock,
            Some(clock) => !is_before(self.timed_clock, clock.echo),
            // Only the peer's first segment may still decline timestamps (RFC 7323 section 3.2).
            None => is_syn,
        }
    }
}

/// The agent's request to `tcp_account` about a probe's connection, passed as the packet of a test run, which
/// overwrites it with the result. It starts with a placeholder for the Ethernet header that the kernel requires.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionRequest {
    /// Unused, zero.
    pub ethernet: [u8; 16],
    /// Key of the row that counts the round trip.
    pub key: RttKey,
    /// The connection.
    pub flow: FlowKey,
    /// When the connection was opened: `CLOCK_MONOTONIC`, in nanoseconds. Anything timed earlier belongs to another
    /// connection between the same ports.
    pub begun_ns: u64,
    /// The round-trip time that the agent measured, in nanoseconds; on return, the one that was counted.
    pub rtt_ns: u64,
    /// On return, the source of that round trip: [`crate::rtt::SOURCE_KERNEL`] or [`crate::rtt::SOURCE_SOCKET`].
    pub source: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 7],
}

/// Value of `HEALTH_PEERS`, whose key is an address of a peer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// [`crate::probe::Path`] as a byte.
    pub path: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 3],
}

crate::map_types!(FlowKey = 36, Flow = 40, ConnectionRequest = 96, Peer = 4,);

#[cfg(test)]
mod tests;
