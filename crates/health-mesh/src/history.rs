//! Results of a target's probes in the last hour, in four bytes per result.
//!
//! Pure: time is passed in as the duration since the mesh's start. Times are stored in tenths of a second, round-trip
//! times to one part in 4096.

use std::collections::VecDeque;
use std::time::Duration;

/// The windows in reports.
pub(super) const WINDOWS: [Duration; 3] = [SHORT, MIDDLE, LONGEST];
const SHORT: Duration = Duration::from_secs(60);
const MIDDLE: Duration = Duration::from_secs(600);
/// Nothing is kept for longer.
pub(super) const LONGEST: Duration = Duration::from_secs(3600);

/// Unit of stored times.
const TICK: Duration = Duration::from_millis(100);
/// Results within this many ticks of the newest are kept, plus one before them.
const KEPT: u32 = ticks(LONGEST);

/// Maximum number of results in the histories of all targets together: 16 MiB, or an hour at 1165 a second.
const ALL_RESULTS: usize = 4 << 20;
/// Minimum and maximum number of results per target, whatever the number of targets: 256 bytes to 16 kB. The maximum is
/// an hour of one result a second, with a tenth to spare for confirming probes.
const TARGET_RESULTS: (usize, usize) = (64, 4000);

/// Number of newest answers that represent the current latency: at an interval of 10 s, they span 80 s.
const RECENT_ANSWERS: usize = 8;
/// Maximum number of earlier answers, evenly sampled, that represent the usual latency. Limits the cost.
const USUAL_ANSWERS: usize = 64;

/// Maximum number of results that one of `targets` histories should hold: an hour's worth, as long as all targets
/// together get at most 1000 probes a second.
pub(super) fn most_results(targets: usize) -> usize {
    let (fewest, most) = TARGET_RESULTS;
    (ALL_RESULTS / targets.max(1)).clamp(fewest, most)
}

/// The results of one target.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// By time sent. All lie within [`KEPT`] ticks of `newest`, except that the first may be up to the `u16::MAX` ticks
    /// old that its time field can express.
    results: VecDeque<PackedResult>,
    /// When the newest probe was sent, ticks since the start.
    newest: u32,
}

/// A result.
#[derive(Clone, Copy, Debug)]
struct PackedResult {
    /// When it was sent, ticks since the start, modulo 2^16.
    sent: u16,
    outcome: Outcome,
}

/// One result from a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecentResult {
    /// When the probe was sent, since the start, to a tenth of a second.
    pub(super) sent: Duration,
    /// The round-trip time; `None` if lost.
    pub(super) rtt: Option<Duration>,
}

/// Summary of the probes sent within a window. Round-trip times are those of answered probes; percentiles use the
/// nearest rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    /// Probes with a result.
    pub(super) probes: u32,
    /// Probes without an answer.
    pub(super) lost: u32,
    /// The part of the window for which there are results: all of it if an older result exists, else the time since the
    /// oldest result.
    pub(super) covered: Duration,
    /// Shortest round trip; like all below, `None` if no probe was answered.
    pub(super) min: Option<Duration>,
    /// Median.
    pub(super) p50: Option<Duration>,
    /// 90th percentile.
    pub(super) p90: Option<Duration>,
    /// 99th percentile.
    pub(super) p99: Option<Duration>,
    /// Longest round trip.
    pub(super) max: Option<Duration>,
    /// Mean absolute difference between the round trips of consecutive probes. A lost probe has no difference to its
    /// neighbours, as in RFC 3393. Unlike the running estimate of RFC 3550, it does not depend on anything outside the
    /// window. `None` without two consecutive answers.
    pub(super) jitter: Option<Duration>,
}

/// Probes and losses in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Loss {
    /// Probes with a result.
    pub(super) probes: u32,
    /// Probes without an answer.
    pub(super) lost: u32,
    /// Length of the window.
    pub(super) window: Duration,
}

/// Distribution of a number of round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Latency {
    /// Number of round trips.
    pub(super) samples: u32,
    /// 25th percentile.
    pub(super) p25: Duration,
    /// Median.
    pub(super) p50: Duration,
    /// 90th percentile.
    pub(super) p90: Duration,
}

/// A target's current state compared with its past.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trend {
    /// Losses in the last ten minutes and in the last hour.
    pub(super) loss: [Loss; 2],
    /// The newest eight answers, as far as they lie within the last ten minutes.
    pub(super) recent: Option<Latency>,
    /// Earlier answers of the last hour, evenly sampled.
    pub(super) usual: Option<Latency>,
}

impl History {
    /// Records the outcome of a probe sent at `sent`: its round-trip time, or `None` if it was lost. Results may arrive
    /// in any order. The oldest beyond `most` are dropped.
    pub(super) fn record(&mut self, sent: Duration, rtt: Option<Duration>, most: usize) {
        let sent = ticks(sent);
        if self.newest.saturating_sub(sent) > u32::from(u16::MAX) {
            return;
        }
        if sent > self.newest {
            self.forget(sent);
            self.newest = sent;
        }
        let before = |&result: &PackedResult| self.sent(result) <= sent;
        let at = match self.results.back() {
            Some(&last) if !before(&last) => self.results.partition_point(before),
            _ => self.results.len(),
        };
        self.reserve();
        let result = PackedResult {
            // The low bits.
            sent: sent as u16,
            outcome: rtt.map_or(Outcome::LOST, Outcome::answered),
        };
        self.results.insert(at, result);
        self.forget(self.newest);
        let excess = self.results.len().saturating_sub(most);
        if excess > 0 {
            self.results.drain(..excess);
        }
        if self.results.capacity() > most + most / 2 {
            self.results.shrink_to(most);
        }
    }

    /// Summary of the probes sent in the last `length` before `now`, at most an hour; `None` without results.
    pub(super) fn window(&self, now: Duration, length: Duration) -> Option<Window> {
        let now = ticks(now).max(self.newest);
        let length = ticks(length).min(KEPT);
        let start = self.start(now, length);
        let oldest = *self.results.get(start)?;
        let covered = if start > 0 {
            length
        } else {
            now - self.sent(oldest)
        };

        let mut answered = Vec::with_capacity(self.results.len() - start);
        let mut differences = (0, Duration::ZERO);
        let mut previous = None;
        for result in self.results.range(start..) {
            let rtt = result.outcome.rtt();
            if let Some(rtt) = rtt {
                answered.push(result.outcome);
                if let Some(previous) = previous {
                    differences.0 += 1;
                    differences.1 += rtt.abs_diff(previous);
                }
            }
            previous = rtt;
        }
        answered.sort_unstable();
        let probes = count(self.results.len() - start);
        Some(Window {
            probes,
            lost: probes - count(answered.len()),
            covered: TICK * covered,
            min: rank(&answered, 0),
            p50: rank(&answered, 50),
            p90: rank(&answered, 90),
            p99: rank(&answered, 99),
            max: rank(&answered, 100),
            jitter: differences.1.checked_div(differences.0),
        })
    }

    /// The last `most` results, newest first.
    pub(super) fn recent(&self, most: usize) -> impl Iterator<Item = RecentResult> {
        self.results
            .iter()
            .rev()
            .take(most)
            .map(|&result| RecentResult {
                sent: TICK * self.sent(result),
                rtt: result.outcome.rtt(),
            })
    }

    /// Compares the target's state at `now` with its past. Losses before `reachable_since` are excluded: an outage is
    /// not loss. Does not allocate.
    pub(super) fn trend(&self, now: Duration, reachable_since: Duration) -> Trend {
        let now = ticks(now).max(self.newest);
        let since = ticks(reachable_since);
        let loss = [MIDDLE, LONGEST].map(|window| {
            let start = self.start(now, ticks(window));
            let mut loss = Loss {
                window,
                ..Loss::default()
            };
            let up = self.results.partition_point(|&r| self.sent(r) < since);
            for result in self.results.range(start.max(up)..) {
                loss.probes += 1;
                loss.lost += u32::from(result.outcome == Outcome::LOST);
            }
            loss
        });

        let start = self.start(now, KEPT);
        let recent_start = self.start(now, ticks(MIDDLE));
        let mut recent = [Outcome::LOST; RECENT_ANSWERS];
        let mut found = 0;
        let mut before = self.results.len();
        while found < RECENT_ANSWERS && before > recent_start {
            before -= 1;
            let outcome = self.results[before].outcome;
            if outcome != Outcome::LOST {
                recent[found] = outcome;
                found += 1;
            }
        }

        let mut usual = [Outcome::LOST; USUAL_ANSWERS];
        let mut picked = 0;
        let step = (before - start).div_ceil(USUAL_ANSWERS).max(1);
        for result in self.results.range(start..before).step_by(step) {
            if result.outcome != Outcome::LOST {
                usual[picked] = result.outcome;
                picked += 1;
            }
        }
        Trend {
            loss,
            recent: Latency::of(&mut recent[..found]),
            usual: Latency::of(&mut usual[..picked]),
        }
    }

    /// When the round trips rose above `level`: the time of the first probe after which no two successive answers took
    /// less. `None` if the newest ones do.
    pub(super) fn risen_since(&self, level: Duration) -> Option<Duration> {
        let mut since = None;
        let mut below = 0;
        for &result in self.results.iter().rev() {
            let Some(rtt) = result.outcome.rtt() else {
                continue;
            };
            if rtt > level {
                since = Some(self.sent(result));
                below = 0;
            } else {
                below += 1;
            }
            if below == 2 {
                break;
            }
        }
        since.map(|sent| TICK * sent)
    }

    /// Whether a probe sent in the last `length` before `now` was lost.
    pub(super) fn has_losses(&self, now: Duration, length: Duration) -> bool {
        let start = self.start(ticks(now).max(self.newest), ticks(length));
        let mut results = self.results.range(start..);
        results.any(|result| result.outcome == Outcome::LOST)
    }

    /// When a result's probe was sent, ticks since the start.
    fn sent(&self, result: PackedResult) -> u32 {
        // The low bits: nothing is older than they can express.
        let age = (self.newest as u16).wrapping_sub(result.sent);
        self.newest - u32::from(age)
    }

    /// Index of the first result in the `length` ticks before `now`.
    fn start(&self, now: u32, length: u32) -> usize {
        self.results
            .partition_point(|&result| now - self.sent(result) >= length)
    }

    /// Drops what becomes useless once `newest` is the time of the newest result: everything before the longest window,
    /// except for the last such result, which proves that the window is covered.
    fn forget(&mut self, newest: u32) {
        let age = |index: usize| Some(newest - self.sent(*self.results.get(index)?));
        let mut gone = 0;
        while age(gone).is_some_and(|age| age > u32::from(u16::MAX))
            || age(gone + 1).is_some_and(|age| age >= KEPT)
        {
            gone += 1;
        }
        self.results.drain(..gone);
    }

    /// Reserves space for one more result, growing by a quarter: most targets settle at one size.
    fn reserve(&mut self) {
        let len = self.results.len();
        if len == self.results.capacity() {
            self.results.reserve_exact((len / 4).max(4));
        }
    }
}

impl Latency {
    fn of(outcomes: &mut [Outcome]) -> Option<Self> {
        outcomes.sort_unstable();
        Some(Self {
            samples: count(outcomes.len()),
            p25: rank(outcomes, 25)?,
            p50: rank(outcomes, 50)?,
            p90: rank(outcomes, 90)?,
        })
    }
}

/// A round-trip time or a loss, ordered by round-trip time.
///
/// A floating-point number of nanoseconds with five exponent and eleven mantissa bits, as in IEEE 754: with exponent 0
/// the mantissa itself, else `2048 + mantissa` times two to the power of `exponent - 1`. The largest code means a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Outcome(u16);

impl Outcome {
    const LOST: Self = Self(u16::MAX);
    const MANTISSA_BITS: u32 = 11;

    /// The nearest representable value; 73 minutes for anything longer.
    fn answered(rtt: Duration) -> Self {
        let ns = u64::try_from(rtt.as_nanos()).unwrap_or(u64::MAX);
        let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(Self::MANTISSA_BITS + 1);
        let rounded = ns.saturating_add((1 << shift) >> 1) >> shift;
        // The mantissa's leading one, if any, increments the exponent, as does a carry.
        let code = (u64::from(shift) << Self::MANTISSA_BITS) + rounded;
        Self(u16::try_from(code).map_or(u16::MAX - 1, |code| code.min(u16::MAX - 1)))
    }

    fn rtt(self) -> Option<Duration> {
        let mantissa = u64::from(self.0) & ((1 << Self::MANTISSA_BITS) - 1);
        let ns = match u32::from(self.0) >> Self::MANTISSA_BITS {
            0 => mantissa,
            exponent => (mantissa + (1 << Self::MANTISSA_BITS)) << (exponent - 1),
        };
        (self != Self::LOST).then_some(Duration::from_nanos(ns))
    }
}

/// The value at `percent` of the sorted answers, by nearest rank.
fn rank(sorted: &[Outcome], percent: usize) -> Option<Duration> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1))?.rtt()
}

/// Whole ticks in `time`, rounded down; saturates after 13 years.
const fn ticks(time: Duration) -> u32 {
    let ticks = time.as_millis() / TICK.as_millis();
    if ticks > u32::MAX as u128 {
        u32::MAX
    } else {
        ticks as u32
    }
}

fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
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
    fn a_window_tells_what_was_sent_in_it() {
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
        let told = trend.loss.map(|loss| (loss.probes, loss.lost, loss.window));
        assert_eq!(told, [(60, 0, MIDDLE), (200, 0, LONGEST)]);
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
}
