use proptest::prelude::*;

use super::*;

const MOST: usize = 4000;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn micros(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// Keeps all results and scans all of them.
#[derive(Debug, Default)]
struct Model(Vec<(u64, Option<Duration>)>);

impl Model {
    fn record(&mut self, sent: Duration, rtt: Option<Duration>) {
        let sent = (sent.as_millis() / 100) as u64;
        let rtt = rtt.map(|rtt| Outcome::answered(rtt).rtt().unwrap());
        self.0.push((sent, rtt));
        // Stable: results of the same tick stay in recording order.
        self.0.sort_by_key(|&(sent, _)| sent);
    }

    fn window(&self, now: Duration, length: Duration) -> Option<Window> {
        let now = (now.as_millis() / 100) as u64;
        let length = (length.as_millis() / 100) as u64;
        let newest = self.0.last()?.0;
        let inside: Vec<_> = self.0.iter().filter(|r| r.0 + length > now).collect();
        let mut rtts: Vec<Duration> = inside.iter().filter_map(|r| r.1).collect();
        let differences: Vec<Duration> = inside
            .windows(2)
            .filter_map(|pair| Some(pair[0].1?.abs_diff(pair[1].1?)))
            .collect();
        rtts.sort();
        let at_least = |percent: usize| {
            rtts.iter()
                .find(|&&rtt| {
                    let below = rtts.iter().filter(|&&other| other <= rtt).count();
                    below * 100 >= percent * rtts.len()
                })
                .copied()
        };
        let older = self
            .0
            .iter()
            .any(|r| r.0 + length <= now && r.0 + u64::from(u16::MAX) >= newest);
        let covered = if older {
            length
        } else {
            now - inside.first()?.0
        };
        Some(Window {
            probes: inside.len() as u32,
            lost: inside.iter().filter(|r| r.1.is_none()).count() as u32,
            covered: (!inside.is_empty()).then_some(millis(covered * 100))?,
            min: rtts.first().copied(),
            p50: at_least(50),
            p90: at_least(90),
            p99: at_least(99),
            max: rtts.last().copied(),
            jitter: differences
                .iter()
                .sum::<Duration>()
                .checked_div(differences.len() as u32),
        })
    }
}

#[test]
fn a_window_reports_what_was_sent_in_it() {
    let mut history = History::default();
    assert_eq!(history.window(secs(100), SHORT), None);
    for (second, rtt) in [
        (10, Some(1000)),
        (20, Some(3000)),
        (30, None),
        (40, Some(2000)),
        (50, Some(2500)),
    ] {
        history.record(secs(second), rtt.map(micros), MOST);
    }
    let window = history.window(secs(50), SHORT).unwrap();
    assert_eq!((window.probes, window.lost), (5, 1));
    assert_eq!(window.covered, secs(40));
    let near = |value: Option<Duration>, us: u64| {
        let difference = value.unwrap().abs_diff(micros(us));
        assert!(difference <= micros(us) / 4096, "{value:?} for {us} µs");
    };
    near(window.min, 1000);
    near(window.p50, 2000);
    near(window.p90, 3000);
    near(window.max, 3000);
    // From 1000 to 3000 and from 2000 to 2500; the loss separates the two pairs.
    let jitter = window.jitter.unwrap();
    assert!(jitter.abs_diff(micros(1250)) < micros(3), "{jitter:?}");

    // A minute starting at 41 s; earlier results show that it is covered.
    let window = history.window(secs(101), SHORT).unwrap();
    assert_eq!((window.probes, window.lost), (1, 0));
    assert_eq!(window.covered, SHORT);
    assert_eq!(window.jitter, None);
    assert_eq!(history.window(secs(110), SHORT), None);
}

#[test]
fn only_losses_have_no_round_trips() {
    let mut history = History::default();
    history.record(secs(1), None, MOST);
    history.record(secs(2), None, MOST);
    let window = history.window(secs(2), SHORT).unwrap();
    let expected = Window {
        probes: 2,
        lost: 2,
        covered: secs(1),
        ..Window::default()
    };
    assert_eq!(window, expected);
}

#[test]
fn the_newest_results_come_first() {
    let mut history = History::default();
    history.record(millis(1000), Some(micros(1)), MOST);
    history.record(millis(3040), None, MOST);
    // Its time-out arrived late.
    history.record(millis(2000), None, MOST);
    let recent: Vec<RecentResult> = history.recent(2).collect();
    let expected = [millis(3000), millis(2000)].map(|sent| RecentResult { sent, rtt: None });
    assert_eq!(recent, expected);
    assert_eq!(history.recent(9).last().unwrap().rtt, Some(micros(1)));
}

#[test]
fn a_long_silence_makes_nothing_young_again() {
    // 2^16 ticks are 6553.6 s.
    for silence in [3_601, 6_553, 6_554, 6_560, 13_107, 13_108, 1_000_000] {
        let mut history = History::default();
        for second in 0..10 {
            history.record(secs(100 + second), None, MOST);
        }
        let now = secs(110 + silence);
        assert_eq!(history.window(now, LONGEST), None, "{silence}");
        history.record(now, Some(micros(5)), MOST);
        let window = history.window(now, LONGEST).unwrap();
        assert_eq!((window.probes, window.lost), (1, 0), "{silence}");
        // A result that is far too late changes nothing.
        history.record(secs(105), None, MOST);
        let window = history.window(now, LONGEST).unwrap();
        assert_eq!((window.probes, window.lost), (1, 0), "{silence}");
        assert!(history.results.len() <= 2);
    }
}

#[test]
fn memory_is_bounded() {
    assert_eq!(size_of::<PackedResult>(), 4);
    assert_eq!(size_of::<History>(), 40);
    let capacity = |interval: Duration, most: usize| {
        let mut history = History::default();
        for number in 0..10_000 {
            history.record(interval * number, Some(micros(100)), most);
            assert!(history.results.capacity() <= most + most / 4);
        }
        history.results.capacity()
    };
    // An hour of results and one before, plus a quarter for growth.
    assert!((361..=452).contains(&capacity(secs(10), MOST)));
    assert!((91..=114).contains(&capacity(secs(40), MOST)));
    assert!((100..=125).contains(&capacity(secs(1), 100)));

    // The limit for all targets is an hour at 1000 probes a second.
    for targets in [40, 400, 4_000, 40_000] {
        let interval = secs(targets as u64) / 1000;
        let hour = (LONGEST.as_secs_f64() / interval.as_secs_f64()) as usize;
        let most = most_results(targets);
        assert!(most >= hour.min(TARGET_RESULTS.1), "{targets}: {most}");
        assert!(most * targets <= ALL_RESULTS, "{targets}: {most}");
    }
    assert_eq!(most_results(0), TARGET_RESULTS.1);
    assert_eq!(most_results(usize::MAX), TARGET_RESULTS.0);
}

#[test]
fn a_lower_bound_frees_memory() {
    let mut history = History::default();
    for second in 0..3000 {
        history.record(secs(second), None, MOST);
    }
    history.record(secs(3000), None, 100);
    assert!(history.results.capacity() <= 150);
    let window = history.window(secs(3000), LONGEST).unwrap();
    assert_eq!((window.probes, window.covered), (100, secs(99)));
}

#[test]
fn a_trend_leaves_outages_out() {
    let mut history = History::default();
    for number in 0..400 {
        let out = (100..200).contains(&number);
        history.record(secs(10 * number), (!out).then_some(micros(200)), MOST);
    }
    let now = secs(3990);
    let trend = history.trend(now, secs(2000));
    let reported = trend.loss.map(|loss| (loss.probes, loss.lost, loss.window));
    assert_eq!(reported, [(60, 0, MIDDLE), (200, 0, LONGEST)]);
    let trend = history.trend(now, Duration::ZERO);
    assert_eq!((trend.loss[1].probes, trend.loss[1].lost), (360, 100));
}

#[test]
fn a_trend_sets_the_newest_answers_against_those_before() {
    let mut history = History::default();
    for number in 0..300 {
        let rtt = micros(if number < 292 { 200 } else { 900 });
        history.record(secs(10 * number), Some(rtt), MOST);
    }
    let trend = history.trend(secs(2990), Duration::ZERO);
    let (recent, usual) = (trend.recent.unwrap(), trend.usual.unwrap());
    assert_eq!(recent.samples, 8);
    assert!(recent.p25 > micros(890) && recent.p50 < micros(910));
    assert!(usual.samples > 50 && usual.samples <= 64);
    assert!(usual.p50 > micros(199) && usual.p90 < micros(201));
    // Old results say nothing about the present.
    let trend = history.trend(secs(2990 + 600), Duration::ZERO);
    assert_eq!(trend.recent, None);
    assert_eq!(History::default().trend(secs(1), secs(0)).usual, None);
}

#[test]
fn a_rise_lasts_through_a_single_short_round_trip() {
    let mut history = History::default();
    for (second, us) in [
        (10, 100),
        (20, 100),
        (30, 900),
        (40, 900),
        (50, 100),
        (60, 900),
        (70, 900),
    ] {
        history.record(secs(second), Some(micros(us)), MOST);
    }
    let level = micros(200);
    assert_eq!(history.risen_since(level), Some(secs(30)));
    history.record(secs(80), Some(micros(100)), MOST);
    assert_eq!(history.risen_since(level), Some(secs(30)));
    history.record(secs(90), Some(micros(100)), MOST);
    assert_eq!(history.risen_since(level), None);
}

proptest! {
    #[test]
    fn round_trips_are_kept_to_one_part_in_4096(ns in 0_u64..4_000_000_000_000) {
        let rtt = Duration::from_nanos(ns);
        let kept = Outcome::answered(rtt).rtt().unwrap();
        prop_assert!(kept.abs_diff(rtt) <= rtt / 4096, "{rtt:?} as {kept:?}");
    }

    #[test]
    fn codes_are_in_the_order_of_the_round_trips(a in any::<u64>(), b in any::<u64>()) {
        let code = |ns| Outcome::answered(Duration::from_nanos(ns));
        prop_assert!(code(a.min(b)) <= code(a.max(b)));
        prop_assert!(code(a) < Outcome::LOST);
    }

    #[test]
    fn windows_agree_with_a_model_that_keeps_all(
        results in prop::collection::vec(
            (
                // Pauses of all lengths, some longer than a result's time field can express.
                prop_oneof![
                    8 => 0_u64..20_000,
                    2 => 0_u64..900_000,
                    1 => 0_u64..20_000_000,
                ],
                // How long before the newest it was sent.
                prop_oneof![4 => Just(0_u64), 2 => 0_u64..5_000, 1 => 0_u64..8_000_000],
                prop::option::weighted(0.8, 0_u64..3_000_000_000),
            ),
            1..150,
        ),
        after in prop_oneof![2 => 0_u64..30_000, 1 => 0_u64..8_000_000],
    ) {
        let mut history = History::default();
        let mut model = Model::default();
        let mut clock = Duration::ZERO;
        for (pause, late, rtt) in results {
            clock += millis(pause);
            let sent = clock.saturating_sub(millis(late));
            let rtt = rtt.map(Duration::from_nanos);
            history.record(sent, rtt, MOST);
            model.record(sent, rtt);
            for length in WINDOWS {
                prop_assert_eq!(
                    history.window(clock, length),
                    model.window(clock, length)
                );
            }
        }
        let now = clock + millis(after);
        for length in WINDOWS {
            prop_assert_eq!(history.window(now, length), model.window(now, length));
        }
    }

    #[test]
    fn the_bound_keeps_the_newest(
        sent in prop::collection::vec(0_u64..3_000, 1..200),
        most in 1_usize..50,
    ) {
        let mut history = History::default();
        for &second in &sent {
            history.record(secs(second), None, most);
        }
        let kept: Vec<Duration> = history.recent(usize::MAX).map(|r| r.sent).collect();
        prop_assert!(kept.len() <= most && kept.is_sorted_by(|a, b| a >= b));
        prop_assert_eq!(kept[0], secs(sent.iter().copied().max().unwrap()));
    }
}
