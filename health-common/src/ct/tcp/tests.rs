extern crate std;
use super::*;
use crate::ct::{CT_MASQUERADED, TUPLE_OUT};
use Outcome::{Invalid, New, Reopened};
use Side::{Original, Reply};
use TcpState::*;
use proptest::prelude::*;
use std::vec::Vec;

const SYN_ACK: u8 = SYN | ACK;
const FIN_ACK: u8 = FIN | ACK;
const SEGMENTS: [u8; 6] = [SYN, SYN_ACK, FIN_ACK, ACK, RST, RST | ACK];
const ALL: [TcpState; 10] = [
    None,
    SynSent,
    SynSent2,
    SynRecv,
    Established,
    FinWait,
    CloseWait,
    LastAck,
    TimeWait,
    Close,
];

fn play(direction: u8, segments: &[(Side, u8)]) -> CtState {
    segments
        .iter()
        .fold(CtState::default(), |state, &(side, flags)| {
            next(state, direction, side, flags).state
        })
}

/// Segments that lead to a state; the original side closes first.
fn way_to(state: TcpState) -> Vec<(Side, u8)> {
    let open = [(Original, SYN), (Reply, SYN_ACK), (Original, ACK)];
    let close = [
        (Original, FIN_ACK),
        (Reply, ACK),
        (Reply, FIN_ACK),
        (Original, ACK),
    ];
    let of_close = |n: usize| [&open[..], &close[..n]].concat();
    match state {
        None => Vec::new(),
        SynSent => open[..1].to_vec(),
        SynSent2 => [(Original, SYN), (Reply, SYN)].to_vec(),
        SynRecv => open[..2].to_vec(),
        Established => of_close(0),
        FinWait => of_close(1),
        CloseWait => of_close(2),
        LastAck => of_close(3),
        TimeWait => of_close(4),
        Close => [&open[..], &[(Reply, RST)]].concat(),
    }
}

/// The expected effect of a segment: the next state, and how the entry changes.
#[derive(Clone, Copy, Debug)]
enum Expected {
    /// Recorded, or passed as part of the connection.
    To(TcpState),
    /// Reopens the connection.
    Anew,
    /// Refused.
    No,
}
use Expected::{Anew, No, To};

/// The effect of SYN, SYN/ACK, FIN, ACK and RST in each state, in the order of [`ALL`]. The original side closes
/// first, as in [`way_to`].
const FROM_ORIGINAL: [[Expected; 5]; 10] = [
    [To(SynSent), No, No, To(Established), No],
    [To(SynSent), No, No, No, To(Close)],
    [To(SynSent2), To(SynRecv), No, No, To(Close)],
    [
        To(SynRecv),
        To(SynRecv),
        To(FinWait),
        To(Established),
        To(Close),
    ],
    [
        To(Established),
        To(Established),
        To(FinWait),
        To(Established),
        To(Close),
    ],
    [
        To(FinWait),
        To(FinWait),
        To(FinWait),
        To(FinWait),
        To(Close),
    ],
    [
        To(CloseWait),
        To(CloseWait),
        To(CloseWait),
        To(CloseWait),
        To(Close),
    ],
    [Anew, To(LastAck), To(TimeWait), To(TimeWait), To(Close)],
    [Anew, To(TimeWait), To(TimeWait), To(TimeWait), To(Close)],
    [Anew, To(Close), To(Close), To(Close), To(Close)],
];
const FROM_REPLY: [[Expected; 5]; 10] = [
    [No, No, No, No, No],
    [To(SynSent2), To(SynRecv), No, To(SynSent), To(Close)],
    [To(SynSent2), To(SynRecv), No, To(SynSent2), To(Close)],
    [No, To(SynRecv), To(FinWait), To(SynRecv), To(Close)],
    [No, To(Established), To(FinWait), To(Established), To(Close)],
    [No, To(FinWait), To(LastAck), To(CloseWait), To(Close)],
    [No, To(CloseWait), To(LastAck), To(CloseWait), To(Close)],
    [No, To(LastAck), To(LastAck), To(LastAck), To(Close)],
    [No, To(TimeWait), To(TimeWait), To(TimeWait), To(Close)],
    [No, To(Close), To(Close), To(Close), To(Close)],
];

#[test]
fn each_segment_does_in_each_state_what_the_table_says() {
    for direction in [TUPLE_IN, TUPLE_OUT] {
        for (side, table) in [(Original, FROM_ORIGINAL), (Reply, FROM_REPLY)] {
            for (from, row) in ALL.into_iter().zip(table) {
                let state = play(direction, &way_to(from));
                assert_eq!(TcpState::of(state), from);
                for (flags, expected) in [SYN, SYN_ACK, FIN_ACK, ACK, RST].into_iter().zip(row) {
                    let step = next(state, direction, side, flags);
                    let (after, outcome) = match expected {
                        To(after) if from == None => (after, New),
                        To(after) => (after, side.outcome()),
                        Anew => (SynSent, Reopened),
                        No => (from, Invalid),
                    };
                    let what = (from, side, flags);
                    assert_eq!(TcpState::of(step.state), after, "{what:?}");
                    assert_eq!(step.outcome, outcome, "{what:?}");
                    let is_open = |state| !matches!(state, LastAck | TimeWait | Close);
                    assert_eq!(step.closed, is_open(from) && !is_open(after), "{what:?}");
                    if let No = expected {
                        assert_eq!(step.state, state, "{what:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_seen_of_a_direction_stands_in_its_field() {
    let open = [(Original, SYN), (Reply, SYN_ACK)];
    let inbound = play(TUPLE_IN, &open);
    assert_eq!(inbound, CtState::new(0, SYN, SYN_ACK));
    let outbound = play(TUPLE_OUT, &open);
    assert_eq!(outbound, CtState::new(0, SYN_ACK, SYN));
    let fin = next(outbound, TUPLE_OUT, Original, FIN_ACK).state;
    assert_eq!(fin.flags(), CT_SEEN_NON_SYN | CT_TX_CLOSING);
    let acknowledged = next(fin, TUPLE_OUT, Reply, ACK).state;
    assert!(acknowledged.has(CT_RX_ACKED_FIN));
    let fin = next(inbound, TUPLE_IN, Original, FIN_ACK).state;
    assert_eq!(fin.flags(), CT_SEEN_NON_SYN | CT_RX_CLOSING);
}

#[test]
fn a_reset_closes_both_directions_whenever_and_whoever_sends_it() {
    for from in ALL.into_iter().filter(|&from| from != None) {
        for side in [Original, Reply] {
            for flags in [RST, RST | ACK] {
                let step = next(play(TUPLE_OUT, &way_to(from)), TUPLE_OUT, side, flags);
                assert!(step.state.has(CT_RX_CLOSING | CT_TX_CLOSING));
                assert_eq!(TcpState::of(step.state), Close);
            }
        }
    }
}

#[test]
fn a_reset_is_over_once_the_side_in_whose_name_it_came_goes_on_and_the_other_answers() {
    for direction in [TUPLE_IN, TUPLE_OUT] {
        for from in [Established, FinWait, CloseWait, LastAck, TimeWait] {
            for (side, other) in [(Original, Reply), (Reply, Original)] {
                let before = play(direction, &way_to(from));
                let after = |segments: &[(Side, u8)]| {
                    segments.iter().fold(before, |state, &(side, flags)| {
                        next(state, direction, side, flags).state
                    })
                };
                let go_on = [(side, ACK), (other, ACK)];
                assert_eq!(
                    after(&[&[(side, RST)], &go_on[..]].concat()),
                    after(&go_on),
                    "{from:?} {side:?}"
                );
                for others in [
                    // Sent before the RST, which overtook it.
                    &[(side, RST), (side, ACK)][..],
                    &[(side, RST), (other, ACK)],
                    &[(side, RST), (other, ACK), (side, ACK)],
                    &[(side, RST), (side, ACK), (side, RST), (other, ACK)],
                    &[(side, RST), (other, RST), (side, ACK), (other, ACK)],
                ] {
                    let state = after(others);
                    assert_eq!(TcpState::of(state), Close, "{from:?} {others:?}");
                    assert!(state.is_closed());
                }
            }
        }
    }
    let refused = [(Original, SYN), (Reply, RST | ACK), (Reply, ACK)];
    assert_eq!(TcpState::of(play(TUPLE_OUT, &refused)), Close);
}

#[test]
fn either_side_may_close_first() {
    for (first, second) in [(Original, Reply), (Reply, Original)] {
        let mut state = play(TUPLE_IN, &way_to(Established));
        for (side, flags, after) in [
            (first, FIN_ACK, FinWait),
            (first, FIN_ACK, FinWait),
            (second, ACK, CloseWait),
            (first, FIN_ACK, CloseWait),
            (second, FIN_ACK, LastAck),
            (second, FIN_ACK, LastAck),
            (first, ACK, TimeWait),
            (second, FIN_ACK, TimeWait),
        ] {
            state = next(state, TUPLE_IN, side, flags).state;
            assert_eq!(
                TcpState::of(state),
                after,
                "{first:?} first: {side:?} {flags}"
            );
        }
    }
}

#[test]
fn both_sides_may_close_at_once() {
    let open = way_to(Established);
    let crossed = [(Original, FIN_ACK), (Reply, FIN_ACK)];
    let state = play(TUPLE_OUT, &[&open[..], &crossed].concat());
    assert_eq!(TcpState::of(state), LastAck);
    let last = [(Reply, ACK), (Original, ACK)];
    let state = play(TUPLE_OUT, &[&open[..], &crossed, &last].concat());
    assert_eq!(TcpState::of(state), TimeWait);
}

#[test]
fn both_sides_may_open_at_once() {
    let syns = [(Original, SYN), (Reply, SYN)];
    let agreements = [
        [(Original, SYN_ACK), (Reply, SYN_ACK)],
        [(Reply, SYN_ACK), (Original, SYN_ACK)],
    ];
    for agreement in agreements {
        for side in [Original, Reply] {
            let way = [&syns[..], &agreement].concat();
            let state = play(TUPLE_OUT, &way);
            assert_eq!(TcpState::of(state), SynRecv);
            let step = next(state, TUPLE_OUT, side, ACK);
            assert_eq!(TcpState::of(step.state), Established, "{side:?}");
        }
    }
}

#[test]
fn a_connection_is_picked_up_under_way_by_what_carries_its_data_only() {
    for flags in [ACK, ACK | 8, ACK | URG] {
        let step = next(CtState::default(), TUPLE_OUT, Original, flags);
        assert_eq!(step.outcome, New);
        assert_eq!(step.state.flags(), CT_SEEN_NON_SYN);
        assert_eq!(TcpState::of(step.state), Established);
    }
    for flags in [SYN_ACK, FIN_ACK, RST, RST | ACK, 0] {
        let step = next(CtState::default(), TUPLE_OUT, Original, flags);
        assert_eq!(step.outcome, Invalid, "{flags}");
    }
}

#[test]
fn flags_that_contradict_each_other_change_nothing() {
    let possible = [
        SYN,
        SYN | URG,
        SYN_ACK,
        RST,
        RST | ACK,
        FIN_ACK,
        FIN_ACK | URG,
        ACK,
        ACK | URG,
    ];
    for from in ALL {
        let state = play(TUPLE_IN, &way_to(from));
        for flags in 0..=u8::MAX {
            if possible.contains(&(flags & (FIN | SYN | RST | ACK | URG))) {
                continue;
            }
            for side in [Original, Reply] {
                let step = next(state, TUPLE_IN, side, flags);
                let nothing = Step {
                    state,
                    outcome: Invalid,
                    closed: false,
                };
                assert_eq!(step, nothing, "{from:?} {side:?} {flags:#x}");
            }
        }
    }
}

#[test]
fn a_connection_that_is_opened_anew_forgets_all_but_its_translation() {
    for from in [LastAck, TimeWait, Close] {
        let state = play(TUPLE_OUT, &way_to(from)).with(CT_MASQUERADED);
        let step = next(state, TUPLE_OUT, Original, SYN);
        assert_eq!(step.outcome, Reopened);
        assert_eq!(step.state, CtState::new(CT_MASQUERADED, 0, SYN));
    }
}

fn side() -> impl Strategy<Value = Side> {
    prop::bool::ANY.prop_map(|reply| if reply { Reply } else { Original })
}

/// Flags that are in `before` and not in `after`.
fn lost(before: CtState, after: CtState) -> u32 {
    before.word() & !after.word()
}

/// Interleaves two sequences, keeping the order within each: `picks` says which one is next.
fn mix(original: &[u8], reply: &[u8], picks: &[bool]) -> Vec<(Side, u8)> {
    let (mut original, mut reply) = (original.iter(), reply.iter());
    let mut mixed = Vec::new();
    for &pick in picks {
        let (side, segments) = if pick {
            (Reply, &mut reply)
        } else {
            (Original, &mut original)
        };
        mixed.extend(segments.next().map(|&flags| (side, flags)));
    }
    mixed.extend(original.map(|&flags| (Original, flags)));
    mixed.extend(reply.map(|&flags| (Reply, flags)));
    mixed
}

proptest! {
    #[test]
    fn bits_are_only_added_but_for_a_connection_that_goes_on_or_is_opened_anew(
        direction in 0_u8..2,
        segments in prop::collection::vec((side(), any::<u8>()), 0..60),
    ) {
        let mut state = CtState::default();
        for (side, flags) in segments {
            let step = next(state, direction, side, flags);
            let is_opening = step.outcome == Reopened;
            let goes_on = TcpState::of(state) == Close && matches!(flags & (FIN | SYN | RST | ACK), ACK | FIN_ACK);
            let doubt = CtState::new(CT_RESET_DOUBTED, 0, 0).word();
            let lost = lost(state, step.state) & !doubt;
            prop_assert!(is_opening || goes_on || lost == 0);
            prop_assert_eq!(step.outcome == New, state.word() == 0 && step.state.word() != 0);
            let is_open_again = state.is_closed() && !step.state.is_closed();
            prop_assert_eq!(is_opening, is_open_again && !goes_on);
            prop_assert_eq!(step.closed, !state.is_closed() && step.state.is_closed());
            prop_assert!(step.outcome != Invalid || step.state == state);
            let after = TcpState::of(step.state);
            prop_assert_eq!(step.state.is_closed(), matches!(after, LastAck | TimeWait | Close));
            state = step.state;
        }
    }

    #[test]
    fn whatever_comes_the_direction_only_swaps_the_fields(
        segments in prop::collection::vec((side(), prop::sample::select(&SEGMENTS[..])), 0..60),
    ) {
        let (inbound, outbound) = (play(TUPLE_IN, &segments), play(TUPLE_OUT, &segments));
        prop_assert_eq!(TcpState::of(inbound), TcpState::of(outbound));
        prop_assert_eq!(inbound.rx_flags_seen(), outbound.tx_flags_seen());
        prop_assert_eq!(inbound.tx_flags_seen(), outbound.rx_flags_seen());
    }

    /// The last segment of a direction may be a RST.
    #[test]
    fn two_directions_lead_to_one_end_in_whatever_order_they_are_taken_in(
        original in prop::collection::vec(prop::sample::select(&[ACK, ACK | 8][..]), 0..10),
        reply in prop::collection::vec(prop::sample::select(&[ACK, ACK | 8][..]), 0..10),
        ends in prop::array::uniform2(prop::sample::select(&[ACK, RST, RST | ACK][..])),
        picks in prop::collection::vec(any::<bool>(), 0..22),
    ) {
        let [original_end, reply_end] = ends;
        let original = [&original[..], &[original_end]].concat();
        let reply = [&reply[..], &[reply_end]].concat();
        let open = way_to(Established);
        let end = |picks: &[bool]| {
            play(TUPLE_OUT, &[&open[..], &mix(&original, &reply, picks)].concat())
        };
        prop_assert_eq!(end(&picks), end(&[]));
    }

    #[test]
    fn closing_ends_in_time_wait_in_whatever_order_the_two_directions_are_taken_in(
        data in 0_usize..5,
        picks in prop::collection::vec(any::<bool>(), 0..20),
    ) {
        let side = [&[ACK; 5][..data], &[FIN_ACK]].concat();
        let closing = mix(&side, &side, &picks);
        let last = [(Original, ACK), (Reply, ACK)];
        let before = [&way_to(Established)[..], &closing].concat();
        prop_assert_eq!(TcpState::of(play(TUPLE_OUT, &before)), LastAck);
        let state = play(TUPLE_OUT, &[&before[..], &last].concat());
        prop_assert_eq!(TcpState::of(state), TimeWait);
    }
}
