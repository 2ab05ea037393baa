use proptest::prelude::*;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(1);
const RTT: Duration = Duration::from_millis(2);
const ROUTER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

fn limits(mtu: u32) -> Limits {
    Limits {
        mtu,
        device_mtu: mtu,
    }
}

/// Everything that a search did, and its cost.
#[derive(Debug)]
struct Trace {
    verdict: Verdict,
    probes: Vec<(u32, Outcome)>,
    time: Duration,
}

impl Trace {
    fn sizes(&self) -> Vec<u32> {
        self.probes.iter().map(|(size, _)| *size).collect()
    }
}

/// Runs a search to its end over a path, which is called with each size.
fn run(mut search: Search, mut path: impl FnMut(u32) -> Outcome) -> Trace {
    let (mut probes, mut now) = (Vec::new(), Duration::ZERO);
    loop {
        match search.step(now) {
            Step::Send { size, patience } => {
                let outcome = path(size);
                now += match outcome {
                    Outcome::Lost => patience,
                    Outcome::Answered(rtt) => rtt,
                    Outcome::TooBig(_) | Outcome::Refused => Duration::ZERO,
                };
                search.note(outcome, now);
                probes.push((size, outcome));
            }
            Step::Wait(until) => {
                assert!(until > now);
                now = until;
            }
            Step::End(verdict) => {
                return Trace {
                    verdict,
                    probes,
                    time: now,
                };
            }
        }
    }
}

fn search(mtu: u32) -> Search {
    Search::new(limits(mtu), None, TIMEOUT)
}

/// A path behind a device of `device_mtu` that lets packets of up to `mtu` bytes through, and answers larger ones
/// with `error`.
fn path(device_mtu: u32, mtu: u32, error: Outcome) -> impl Fn(u32) -> Outcome {
    move |size| match size {
        _ if size > device_mtu => Outcome::Refused,
        _ if size > mtu => error,
        _ => Outcome::Answered(RTT),
    }
}

fn too_big(next_hop_mtu: u32) -> Outcome {
    Outcome::TooBig(TooBig {
        from: ROUTER,
        next_hop_mtu,
    })
}

fn too_big_error(next_hop_mtu: u32) -> Option<TooBig> {
    match too_big(next_hop_mtu) {
        Outcome::TooBig(notice) => Some(notice),
        _ => None,
    }
}

#[test]
fn a_full_path_takes_a_small_one_one_that_is_refused_and_a_full_one() {
    let trace = run(search(1500), path(1500, 1500, Outcome::Lost));
    assert_eq!(trace.verdict, Verdict::Full);
    assert_eq!(trace.sizes(), [SMALL, 1501, 1500]);
    // A route may allow less than its device.
    let limits = Limits {
        mtu: 1400,
        device_mtu: 1500,
    };
    let trace = run(
        Search::new(limits, None, TIMEOUT),
        path(1500, 1400, Outcome::Lost),
    );
    assert_eq!(trace.verdict, Verdict::Full);
    assert_eq!(trace.sizes(), [SMALL, 1501, 1400]);
}

#[test]
fn a_router_that_reports_its_mtu_is_believed_once_that_is_confirmed() {
    let trace = run(search(1500), path(1500, 1400, too_big(1400)));
    let verdict = Verdict::Reduced {
        mtu: 1400,
        notice: too_big_error(1400),
    };
    assert_eq!(trace.verdict, verdict);
    assert_eq!(trace.sizes()[2..5], [1500, 1400, 1401]);
    assert_eq!(trace.sizes()[5..], [1400, 1401, 1401, 1401, 1401, 1401]);
    assert!(trace.time >= CONFIRM_AFTER);
}

#[test]
fn a_black_hole_is_found_without_a_word_from_anybody() {
    let trace = run(search(1500), path(1500, 1404, Outcome::Lost));
    let verdict = Verdict::Reduced {
        mtu: 1404,
        notice: None,
    };
    assert_eq!(trace.verdict, verdict);
    assert!(trace.time < Duration::from_secs(20), "{:?}", trace.time);
}

#[test]
fn what_was_found_before_is_seen_again_with_few_probes() {
    let before = |error| {
        let search = Search::new(limits(1500), Some(1400), TIMEOUT);
        run(search, path(1500, 1400, error))
    };
    let trace = before(too_big(1400));
    assert_eq!(trace.sizes(), [SMALL, 1501, 1500, 1400, 1401]);
    let trace = before(Outcome::Lost);
    assert_eq!(
        trace.verdict,
        Verdict::Reduced {
            mtu: 1400,
            notice: None
        }
    );
    assert_eq!(trace.probes.len(), 15, "{:?}", trace.sizes());
    let search = Search::new(limits(1500), Some(1400), TIMEOUT);
    let trace = run(search, path(1500, 1500, Outcome::Lost));
    assert_eq!(trace.verdict, Verdict::Full);
}

#[test]
fn an_error_about_a_size_that_fits_changes_nothing() {
    let mut forged = false;
    let trace = run(search(1500), |size| match size {
        1501 => Outcome::Refused,
        1500 if !std::mem::replace(&mut forged, true) => too_big(600),
        _ => Outcome::Answered(RTT),
    });
    assert_eq!(trace.verdict, Verdict::Full);
}

#[test]
fn a_path_without_answers_reports_nothing() {
    let trace = run(search(1500), |_| Outcome::Lost);
    assert_eq!(trace.verdict, Verdict::Inconclusive);
    assert_eq!(trace.sizes(), [SMALL; 3]);
    // A path that breaks down midway gives no result either.
    let mut probes = 0;
    let trace = run(search(1500), |size| {
        probes += 1;
        match size {
            1501 => Outcome::Refused,
            _ if probes < 3 => Outcome::Answered(RTT),
            _ => Outcome::Lost,
        }
    });
    assert_eq!(trace.verdict, Verdict::Inconclusive);
    assert_eq!(trace.sizes()[2..], [1500, SMALL, SMALL, SMALL]);
}

#[test]
fn controls_that_are_lost_now_and_then_do_not_end_the_search() {
    // For every second packet that is too large, the control is lost too.
    let (mut tries, mut control_is_lost) = (0_u32, false);
    let trace = run(search(1500), |size| match size {
        1501 => Outcome::Refused,
        _ if size > 1404 => {
            tries += 1;
            control_is_lost = !tries.is_multiple_of(2);
            Outcome::Lost
        }
        _ if std::mem::take(&mut control_is_lost) => Outcome::Lost,
        _ => Outcome::Answered(RTT),
    });
    let verdict = Verdict::Reduced {
        mtu: 1404,
        notice: None,
    };
    assert_eq!(trace.verdict, verdict);
}

#[test]
fn what_is_lost_together_with_its_control_does_not_count() {
    let mut losses = 0;
    let trace = run(search(1500), |size| {
        let is_lost = match size {
            1501 => return Outcome::Refused,
            1500 => losses < 6,
            _ => losses % 2 == 1,
        };
        losses += u32::from(is_lost);
        match is_lost {
            true => Outcome::Lost,
            false => Outcome::Answered(RTT),
        }
    });
    assert_eq!(trace.verdict, Verdict::Full);
    let tries = [1500, SMALL, SMALL].repeat(3);
    assert_eq!(
        trace.sizes(),
        [&[SMALL, 1501], &tries[..], &[1500]].concat()
    );
}

#[test]
fn a_device_with_another_mtu_ends_the_search() {
    // The MTU has grown in one case and shrunk in the other.
    for mtu in [9000, 1400] {
        let trace = run(search(1500), path(mtu, mtu, Outcome::Lost));
        assert_eq!(trace.verdict, Verdict::OtherMtu, "{mtu}");
    }
}

/// Uniform numbers from 0 to 99, reproducible from a seed (splitmix64).
fn percents(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % 100
    }
}

proptest! {
    #[test]
    fn the_mtu_of_any_path_is_found_to_the_byte(
        (device, mtu) in (SMALL + 1..=LARGEST).prop_flat_map(|d| (Just(d), SMALL..=d)),
        hint in prop_oneof![Just(None), (0_u32..70_000).prop_map(Some)],
        honest: bool,
    ) {
        let error = match hint {
            Some(hint) => too_big(if honest { mtu } else { hint }),
            None => Outcome::Lost,
        };
        let trace = run(search(device), path(device, mtu, error));
        let expected = match (mtu == device, hint) {
            (true, _) => Verdict::Full,
            (_, None) => Verdict::Reduced { mtu, notice: None },
            (_, Some(hint)) => Verdict::Reduced {
                mtu,
                notice: too_big_error(if honest { mtu } else { hint }),
            },
        };
        prop_assert_eq!(trace.verdict, expected);
        prop_assert!(trace.probes.len() <= 130, "{}", trace.probes.len());
    }

    #[test]
    fn any_search_ends_and_a_reduced_mtu_was_seen_to_fit_and_one_byte_more_to_fail(
        outcomes in prop::collection::vec((0_u8..8, 0_u32..2000), 1..400),
        before in prop::option::of(0_u32..2000),
    ) {
        let mut outcomes = outcomes.into_iter().cycle();
        let search = Search::new(limits(1500), before, TIMEOUT);
        let trace = run(search, |size| match outcomes.next() {
            _ if size == 1501 => Outcome::Refused,
            Some((0..4, _)) => Outcome::Answered(RTT),
            Some((4, mtu)) => too_big(mtu),
            _ => Outcome::Lost,
        });
        prop_assert!(trace.probes.len() <= MOST_PROBES as usize);
        if let Verdict::Reduced { mtu, .. } = trace.verdict {
            let count = |wanted: u32, answered: bool| {
                let is = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_)) == answered;
                let all = trace.probes.iter();
                all.filter(|(size, outcome)| *size == wanted && is(outcome)).count()
            };
            prop_assert!(count(mtu, true) >= 1);
            prop_assert!(count(mtu + 1, false) >= 1);
            prop_assert!(before == Some(mtu) || count(mtu + 1, false) >= 5);
        }
    }

    #[test]
    fn chance_does_not_reduce_a_path(seed: u64, loss in 0_u64..10) {
        let mut percent = percents(seed);
        let trace = run(search(1500), |size| match size {
            1501 => Outcome::Refused,
            _ if percent() < loss => Outcome::Lost,
            _ => Outcome::Answered(RTT),
        });
        prop_assert!(!matches!(trace.verdict, Verdict::Reduced { .. }), "{:?}", trace);
    }

    #[test]
    fn chance_does_not_hide_a_reduced_path(seed: u64, mtu in 600_u32..1499) {
        let mut percent = percents(seed);
        let trace = run(search(1500), |size| match size {
            1501 => Outcome::Refused,
            _ if size > mtu || percent() < 2 => Outcome::Lost,
            _ => Outcome::Answered(RTT),
        });
        // Even a size that fits may be lost three times; then the result is inconclusive or correct.
        match trace.verdict {
            Verdict::Reduced { mtu: found, .. } => prop_assert_eq!(found, mtu),
            verdict => prop_assert_eq!(verdict, Verdict::Inconclusive),
        }
    }
}
