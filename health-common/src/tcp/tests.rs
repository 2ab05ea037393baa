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

/// A connection whose next sequence number is `next` and whose pauses are over.
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
fn timestamps_distinguish_answers_to_later_segments() {
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

    /// A segment is timed only if none of its bytes left before, regardless of which segments leave in which order.
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
