//! TCP round trips, timed where segments leave and where their acknowledgements come back.
//!
//! Each connection has at most one timed segment: one that opens it, or one with new data that the peer must
//! acknowledge at once. The first pure acknowledgement of it ends the round trip. Retransmitted data never counts
//! (Karn and Partridge, SIGCOMM 1987; RFC 6298 section 3).
//!
//! The module of the same name in `health-ebpf` reads the segments. The pair shares its name on purpose: the
//! decisions live here, kernel-only code lives there.

use network_types::ip::IpProto;

use crate::addr::Addr;
use crate::checksum::fold;
use crate::rtt::RttKey;

/// Length of a TCP header without options, bytes.
pub const TCP_LEN: usize = 20;
/// Longest TCP header, bytes (RFC 9293 section 3.1).
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
/// A connection first seen mid-stream may be retransmitting: nothing of it is timed for this long. Retransmission
/// time-outs are at least as long (RFC 6298 section 2.4).
pub const UNKNOWN_PAUSE_NS: u64 = 1_000_000_000;

const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_TIMESTAMPS: u8 = 8;
/// Length of the timestamps option, bytes (RFC 7323 section 3.2).
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
    /// Length of the header, bytes, 20..=60.
    pub header_len: u32,
    /// Length of the data, bytes.
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
    /// TSecr: the last timestamp that it received from the other side.
    pub echo: u32,
}

/// Size of the TCP header buffer, bytes: a power of two, so that a mask keeps any index in bounds. Verifiers before
/// Linux 6.15 cannot derive the bound from all the comparisons that LLVM generates.
pub const HEADER_ROOM: usize = TCP_MAX_LEN.next_power_of_two();

/// A whole TCP header with its options, in memory order; zero after its end.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub struct HeaderBytes(pub [u8; HEADER_ROOM]);

/// Options that no host sends: their lengths are inconsistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl HeaderBytes {
    /// The timestamps in the options of a header of `len` bytes.
    #[inline(always)]
    pub fn timestamps(&self, len: u32) -> Result<Option<Timestamps>, Malformed> {
        let len = len as usize;
        // Offset of the next option. The offset into the header counts up by one each time, so the verifier knows it
        // at each step.
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
    /// A segment from this machine, even from another namespace, carries only the sum of the pseudo header: its
    /// device was supposed to complete it (`CHECKSUM_PARTIAL`).
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

/// The timed segment opens the connection: the accepting segment answers it.
pub const TIMED_SYN: u8 = 1;
/// The timed segment carries timestamps.
pub const TIMED_CLOCK: u8 = 2;

/// Value of `HEALTH_TCP`. Times are nanoseconds of `CLOCK_MONOTONIC`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// When the timed segment left; 0 while none is timed. Written last and taken first: whichever CPU exchanges it
    /// for 0 gets the sample.
    pub timed_ns: u64,
    /// No data is timed before this.
    pub pause_ns: u64,
    /// For a probe's connection: the round trip of its handshake; 0 while unknown.
    pub handshake_ns: u64,
    /// The sequence number after the last one sent.
    pub sent_end: u32,
    /// Acknowledgements beyond this number answer the timed segment.
    pub timed_sequence: u32,
    /// Its TSval.
    pub timed_clock: u32,
    /// [`TIMED_SYN`], [`TIMED_CLOCK`].
    pub timed_flags: u8,
    /// [`crate::probe::Path`] of the peer's address as a byte; 0 for a probe's connection.
    pub path: u8,
    /// Explicit padding, zero.
    pub pad: u16,
}

/// What to do with a segment that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Nothing, or nothing else.
    Noted,
    /// Time it.
    Time,
    /// It repeats earlier data: cancel the timing, if any.
    Repeated,
}

/// How a segment from the peer relates to the timed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Nothing.
    Unrelated,
    /// It acknowledges the timed segment but says nothing about the round trip.
    Void,
    /// It answers the timed segment if checksum and options are good.
    Answer,
}

impl Flow {
    /// A connection first seen at a segment that leaves now. If the segment opens or accepts it, it should be timed.
    #[inline(always)]
    pub fn met(segment: &Segment, path: u8, now_ns: u64) -> Self {
        Self {
            pause_ns: now_ns + UNKNOWN_PAUSE_NS,
            sent_end: segment.end(),
            path,
            ..Self::default()
        }
    }

    /// Records a segment that leaves. `segments` is the number of full-sized segments that it will be split into on
    /// the wire, and `now_ns` reads a clock that may lag by some milliseconds.
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
            // A new connection between the same ports.
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
            // The data in between left unseen, and may be sent again.
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

    /// Records everything about a segment to be timed except the time, `timed_ns`, which the caller must set last.
    #[inline(always)]
    pub fn prepare(&mut self, segment: &Segment, clock: Option<Timestamps>, now_ns: u64) {
        let syn = if segment.opens() { TIMED_SYN } else { 0 };
        let with_clock = if clock.is_some() { TIMED_CLOCK } else { 0 };
        self.timed_flags = syn | with_clock;
        self.timed_clock = clock.map_or(0, |clock| clock.value);
        self.timed_sequence = segment.sequence;
        // If the connection was first seen mid-stream, its longer pause ends with a segment known to be its first.
        self.pause_ns = now_ns + SAMPLE_PAUSE_NS;
    }

    /// What a segment from the peer means while one is timed.
    ///
    /// Only the first acknowledgement counts, and only one without data: one with data may have waited for the
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
            // Old, forged, or this host's packets take paths that are not visible here.
            return Received::Unrelated;
        }
        if segment.data_len > 0 || segment.has(FIN) {
            return Received::Void;
        }
        Received::Answer
    }

    /// What a segment means for a probe's connection. Only the handshake is timed, and only once.
    #[inline(always)]
    pub fn handshake(&self, segment: &Segment) -> Received {
        let is_first = self.handshake_ns == 0 && segment.acknowledgement == self.sent_end;
        if is_first && segment.agrees() && segment.data_len == 0 {
            Received::Answer
        } else {
            Received::Unrelated
        }
    }

    /// Whether the timestamps of an answer match those of the timed segment. An echo of a later segment means that
    /// the later segment triggered the answer: the answer to the timed one was lost. An echo of an earlier one is
    /// right if the receiver answers several segments at once (RFC 7323 section 4.3).
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

/// The agent's request to `tcp_account` about a probe's connection, as the "packet" of a test run; the answer
/// overwrites it. The space in front stands in for the Ethernet header that the kernel requires.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionRequest {
    /// Unused, zero.
    pub ethernet: [u8; 16],
    /// The row that counts the round trip.
    pub key: RttKey,
    /// The connection.
    pub flow: FlowKey,
    /// When it was opened: `CLOCK_MONOTONIC`, nanoseconds. Anything timed earlier belongs to another connection
    /// between the same ports.
    pub begun_ns: u64,
    /// The round trip that the agent measured, nanoseconds; in the answer, the one that was counted.
    pub rtt_ns: u64,
    /// In the answer, its source: [`crate::rtt::SOURCE_KERNEL`] or [`crate::rtt::SOURCE_SOCKET`].
    pub source: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 7],
}

/// Value of `HEALTH_PEERS`: an address of a peer.
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
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const NOW: u64 = 1 << 40;
    const FULL: u32 = 1448;

    fn segment(sequence: u32, data_len: u32, flags: u8) -> Segment {
        Segment {
            sequence,
            acknowledgement: 0,
            flags,
            header_len: 20,
            data_len,
        }
    }

    fn acknowledgement(number: u32) -> Segment {
        Segment {
            acknowledgement: number,
            ..segment(1, 0, ACK)
        }
    }

    fn clock(value: u32, echo: u32) -> Option<Timestamps> {
        Some(Timestamps { value, echo })
    }

    /// A connection at `next` whose pauses are over.
    fn flow(next: u32) -> Flow {
        Flow::met(&segment(next.wrapping_sub(10), 10, ACK), 1, 0)
    }

    fn timed(next: u32, value: Option<Timestamps>) -> Flow {
        let mut flow = flow(next);
        let data = segment(next, 2 * FULL, ACK);
        assert_eq!(flow.sent(&data, 2, || NOW), Sent::Time);
        flow.prepare(&data, value, NOW);
        flow.timed_ns = NOW;
        flow
    }

    fn options(bytes: &[u8]) -> Result<Option<Timestamps>, Malformed> {
        let mut header = HeaderBytes([0; HEADER_ROOM]);
        header.0[TCP_LEN..TCP_LEN + bytes.len()].copy_from_slice(bytes);
        header.timestamps((TCP_LEN + bytes.len()) as u32)
    }

    #[test]
    fn a_handshake_is_timed_from_either_side() {
        for (flags, answer) in [(SYN, SYN | ACK), (SYN | ACK, ACK)] {
            for isn in [0, 7, u32::MAX] {
                let opening = segment(isn, 0, flags);
                let mut flow = Flow::met(&opening, 1, NOW);
                flow.prepare(&opening, clock(5, 0), NOW);
                flow.timed_ns = NOW;
                let good = Segment {
                    flags: answer,
                    ..acknowledgement(isn.wrapping_add(1))
                };
                assert_eq!(flow.received(&good), Received::Answer);
                assert!(flow.agrees(clock(1, 5)));
                let others = [
                    acknowledgement(isn),
                    acknowledgement(isn.wrapping_add(2)),
                    Segment {
                        flags: answer | RST,
                        ..good
                    },
                    Segment {
                        flags: answer ^ SYN,
                        ..good
                    },
                ];
                for other in others {
                    assert_eq!(flow.received(&other), Received::Unrelated, "{other:?}");
                }
            }
        }
    }

    #[test]
    fn an_opening_segment_that_is_sent_again_is_never_timed() {
        let syn = segment(u32::MAX, 0, SYN);
        let mut flow = Flow::met(&syn, 1, NOW);
        assert_eq!(flow.sent(&syn, 1, || NOW), Sent::Repeated);
        let next_connection = segment(77, 0, SYN);
        assert_eq!(flow.sent(&next_connection, 1, || NOW), Sent::Time);
    }

    #[test]
    fn data_is_timed_when_the_peer_must_answer_at_once() {
        let mut flow = flow(1000);
        assert_eq!(flow.sent(&segment(1000, 100, ACK), 1, || NOW), Sent::Noted);
        let two = segment(1100, 2 * FULL, ACK);
        assert_eq!(flow.sent(&two, 2, || NOW), Sent::Time);
        flow.prepare(&two, None, NOW);
        flow.timed_ns = NOW;
        let next = segment(two.end(), 2 * FULL, ACK);
        assert_eq!(
            flow.sent(&next, 2, || NOW + (1 << 40)),
            Sent::Noted,
            "one at a time"
        );
        flow.timed_ns = 0;
        let next = segment(next.end(), 2 * FULL, ACK);
        let soon = NOW + SAMPLE_PAUSE_NS - 1;
        assert_eq!(flow.sent(&next, 2, || soon), Sent::Noted, "not too often");
        let next = segment(next.end(), 2 * FULL, ACK);
        assert_eq!(flow.sent(&next, 2, || soon + 1), Sent::Time);
    }

    #[test]
    fn a_connection_met_under_way_is_watched_first() {
        let mut flow = Flow::met(&segment(0, FULL, ACK), 1, NOW);
        let next = segment(FULL, 2 * FULL, ACK);
        let early = NOW + UNKNOWN_PAUSE_NS - 1;
        assert_eq!(flow.sent(&next, 2, || early), Sent::Noted);
        let gap = segment(10 * FULL, 2 * FULL, ACK);
        assert_eq!(flow.sent(&gap, 2, || early + 1), Sent::Repeated);
        let next = segment(gap.end(), 2 * FULL, ACK);
        assert_eq!(flow.sent(&next, 2, || early + 2), Sent::Noted);
    }

    #[test]
    fn only_a_bare_acknowledgement_of_the_timed_data_answers() {
        let flow = timed(1000, None);
        assert_eq!(flow.received(&acknowledgement(1000)), Received::Unrelated);
        assert_eq!(flow.received(&acknowledgement(1001)), Received::Answer);
        let end = flow.sent_end;
        assert_eq!(flow.received(&acknowledgement(end)), Received::Answer);
        assert_eq!(
            flow.received(&acknowledgement(end + 1)),
            Received::Unrelated
        );
        let with_data = Segment {
            data_len: 1,
            ..acknowledgement(end)
        };
        assert_eq!(flow.received(&with_data), Received::Void);
        let last = Segment {
            flags: ACK | FIN,
            ..acknowledgement(end)
        };
        assert_eq!(flow.received(&last), Received::Void);
        let reset = Segment {
            flags: ACK | RST,
            ..acknowledgement(end)
        };
        assert_eq!(flow.received(&reset), Received::Unrelated);
        let no_number = Segment {
            flags: 0,
            ..acknowledgement(end)
        };
        assert_eq!(flow.received(&no_number), Received::Unrelated);
    }

    #[test]
    fn timestamps_tell_answers_to_later_segments_apart() {
        for now in [100, u32::MAX, 0] {
            let flow = timed(1000, clock(now, 9));
            assert!(flow.agrees(clock(50, now)));
            assert!(flow.agrees(clock(50, now.wrapping_sub(3))));
            assert!(!flow.agrees(clock(50, now.wrapping_add(1))));
            assert!(!flow.agrees(None), "the connection has timestamps");
        }
        assert!(timed(1000, None).agrees(None));
    }

    #[test]
    fn options_are_read_wherever_they_stand() {
        let timestamps = [8, 10, 0, 0, 1, 0, 0, 0, 2, 0];
        let expected = Ok(clock(256, 512));
        for before in [
            &[][..],
            &[1, 1],
            &[2, 4, 5, 180, 4, 2],
            &[1; 30],
            &[5, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ] {
            let all: Vec<u8> = before.iter().chain(&timestamps).copied().collect();
            assert_eq!(options(&all), expected, "{before:?}");
        }
        for none in [
            &[][..],
            &[1, 1, 1, 1],
            &[0, 8, 10, 0],
            &[2, 4, 5, 180],
            &[1; 40],
        ] {
            assert_eq!(options(none), Ok(None), "{none:?}");
        }
        for bad in [
            &[8][..],
            &[8, 0, 0, 0],
            &[8, 1, 0, 0],
            &[8, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[8, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[8, 10, 0, 0, 1, 0, 0, 0],
            &[1, 1, 1, 8, 10, 0, 0, 1],
            &[3, 0, 8, 10],
            &[2, 255, 0, 0],
            &[1, 1, 1, 2],
        ] {
            assert_eq!(options(bad), Err(Malformed), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_options_panic(bytes in prop::collection::vec(any::<u8>(), 0..=40), len in 0_u32..100) {
            let mut header = HeaderBytes([0; HEADER_ROOM]);
            header.0[TCP_LEN..TCP_LEN + bytes.len()].copy_from_slice(&bytes);
            let _ = header.timestamps(len);
        }

        #[test]
        fn lengths_that_contradict_each_other_are_refused(offset: u8, len in 0_u32..100) {
            let header = TcpHeader { offset, ..TcpHeader::default() };
            if let Some(segment) = Segment::read(&header, len) {
                prop_assert!((20..=60).contains(&segment.header_len));
                prop_assert_eq!(segment.header_len + segment.data_len, len);
            }
        }

        #[test]
        fn numbers_compare_across_the_wrap(a: u32, distance in 1_u32..(1 << 31)) {
            let b = a.wrapping_add(distance);
            prop_assert!(is_before(a, b));
            prop_assert!(!is_before(b, a));
            prop_assert!(!is_before(a, a));
        }

        /// Whatever leaves, in whatever order: a segment is timed only if none of its bytes left before.
        #[test]
        fn nothing_that_was_sent_before_is_timed(
            isn: u32,
            steps in prop::collection::vec((0_u32..6, 1_u32..4), 1..60),
        ) {
            let opening = segment(isn, 0, SYN);
            let mut flow = Flow::met(&opening, 1, 0);
            let mut highest = 0_u32;
            for (back, segments) in steps {
                let start = highest.saturating_sub(back * FULL);
                let data = segment(isn.wrapping_add(1 + start), segments * FULL, ACK);
                if flow.sent(&data, segments, || NOW) == Sent::Time {
                    prop_assert_eq!(start, highest);
                    prop_assert!(segments > 1);
                }
                highest = highest.max(start + segments * FULL);
            }
        }

        #[test]
        fn a_changed_bit_shows_in_the_checksum(
            source: u32,
            destination: u32,
            mut header: [u8; 32],
            place in 0_usize..32,
            bit in 0_u32..8,
        ) {
            let (source, destination) = (Addr::v4(source), Addr::v4(destination));
            let pseudo = pseudo_header_sum(&source, &destination, 32, true);
            let mut bytes = HeaderBytes([0; HEADER_ROOM]);
            header[16..18].fill(0);
            let words = header.chunks(2).map(|w| u32::from(u16::from_ne_bytes([w[0], w[1]])));
            let check = !fold(pseudo + words.sum::<u32>());
            header[16..18].copy_from_slice(&check.to_ne_bytes());
            bytes.0[..32].copy_from_slice(&header);
            prop_assert!(bytes.has_good_checksum(pseudo));
            bytes.0[place] ^= 1 << bit;
            let partial = u16::from_ne_bytes([bytes.0[16], bytes.0[17]]) == fold(pseudo);
            prop_assert!(partial || !bytes.has_good_checksum(pseudo));
        }
    }
}
