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

    /// Returns when the round trips rose above `level`: the time of the first probe after which no two successive
    /// answers took less. `None` if the newest answers took less.
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

    /// Drops results that become useless once `newest` is the time of the newest result: all before the longest window,
    /// except the last of them, which proves that the window is covered.
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
mod tests;
