//! Compact rows of round-trip times, and the difference between two reads of a row.

use health_common::rtt::{HISTOGRAM_BUCKETS, RttRow, bucket_bounds, percentiles_ns};
use serde::ser::SerializeSeq as _;
use serde::{Serialize, Serializer};

/// A row of `HEALTH_RTT` at a third of its size, since most histogram buckets are empty. Times are in nanoseconds, and
/// meaningless without samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RttSummary {
    pub(super) source: u8,
    /// Round trips measured.
    pub samples: u64,
    pub(super) lost: u64,
    pub(super) late: u64,
    pub(super) duplicates: u64,
    pub(super) last_ns: u64,
    pub(super) min_ns: Option<u64>,
    pub(super) max_ns: Option<u64>,
    pub(super) sum_ns: u64,
    pub(super) smoothed_ns: u64,
    pub(super) jitter_ns: u64,
    pub(super) remote: Remote,
    pub(super) one_way: OneWay,
    pub(super) histogram: Histogram,
}

/// Times in the peer's host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) samples: u64,
    pub(super) last_ns: u64,
    pub(super) max_ns: Option<u64>,
    pub(super) sum_ns: u64,
    pub(super) smoothed_ns: u64,
    pub(super) rtt_sum_ns: u64,
}

/// Delays in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OneWay {
    pub(super) samples: u64,
    pub(super) forward: Delay,
    pub(super) back: Delay,
}

/// Delays of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Delay {
    pub(super) last_ns: i64,
    pub(super) min_ns: Option<i64>,
    pub(super) smoothed_ns: i64,
}

impl From<&RttRow> for RttSummary {
    fn from(row: &RttRow) -> Self {
        let (remote, one_way) = (row.remote, row.one_way);
        let delay = |delay: health_common::rtt::Delay| Delay {
            last_ns: delay.last_ns,
            min_ns: (one_way.samples > 0).then_some(delay.min_ns),
            smoothed_ns: delay.smoothed_ns,
        };
        Self {
            source: row.source,
            samples: row.samples,
            lost: row.lost,
            late: row.late,
            duplicates: row.duplicates,
            last_ns: row.last_ns,
            min_ns: (row.samples > 0).then_some(row.min_ns),
            max_ns: (row.samples > 0).then_some(row.max_ns),
            sum_ns: row.sum_ns,
            smoothed_ns: row.smoothed_ns,
            jitter_ns: row.jitter_ns,
            remote: Remote {
                samples: remote.samples,
                last_ns: remote.last_ns,
                max_ns: (remote.samples > 0).then_some(remote.max_ns),
                sum_ns: remote.sum_ns,
                smoothed_ns: remote.smoothed_ns,
                rtt_sum_ns: remote.rtt_sum_ns,
            },
            one_way: OneWay {
                samples: one_way.samples,
                forward: delay(one_way.forward),
                back: delay(one_way.back),
            },
            histogram: Histogram::from(&row.histogram),
        }
    }
}

impl RttSummary {
    /// The measurements since `earlier`, a previous read of the same row; the whole row if it was reset in between.
    ///
    /// The row does not keep the shortest and longest times of an interval. They are exact if no earlier time was
    /// shorter or longer; otherwise the histogram gives them within 6.25 %. If the row's counts were halved in between,
    /// neither these times nor percentiles are known.
    pub fn since(&self, earlier: &Self) -> Self {
        if self.began_anew_after(earlier) {
            return self.clone();
        }
        let samples = self.samples - earlier.samples;
        let histogram = self.histogram.since(&earlier.histogram, samples);
        let read_off = self
            .min_ns
            .zip(self.max_ns)
            .zip(percentiles_ns(histogram.buckets(), [0.0, 100.0]))
            .map(|((min, max), ends)| ends.map(|ns| ns.clamp(min, max)));
        let min_ns = self
            .min_ns
            .filter(|&min| is_new(min, earlier.min_ns, u64::lt));
        let max_ns = self
            .max_ns
            .filter(|&max| is_new(max, earlier.max_ns, u64::gt));
        Self {
            samples,
            lost: self.lost - earlier.lost,
            late: self.late - earlier.late,
            duplicates: self.duplicates - earlier.duplicates,
            min_ns: min_ns.or(read_off.map(|[min, _]| min.min(self.last_ns))),
            max_ns: max_ns.or(read_off.map(|[_, max]| max.max(self.last_ns))),
            sum_ns: self.sum_ns - earlier.sum_ns,
            remote: self.remote.since(&earlier.remote),
            one_way: self.one_way.since(&earlier.one_way),
            histogram,
            ..*self
        }
    }

    /// Whether a count has fallen, which only a reset causes.
    fn began_anew_after(&self, earlier: &Self) -> bool {
        let counts = |row: &Self| {
            [
                row.samples,
                row.lost,
                row.late,
                row.duplicates,
                row.sum_ns,
                row.remote.samples,
                row.remote.sum_ns,
                row.remote.rtt_sum_ns,
                row.one_way.samples,
            ]
        };
        let mut pairs = counts(self).into_iter().zip(counts(earlier));
        pairs.any(|(now, before)| now < before)
    }

    /// The mean round trip; `None` without samples.
    pub fn mean_ns(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.samples)
    }

    /// The share of the probes that were lost, 0 to 1; `None` without probes.
    pub fn loss_ratio(&self) -> Option<f64> {
        let probes = self.samples + self.lost;
        (probes > 0).then(|| self.lost as f64 / probes as f64)
    }

    /// The share of the round trips not spent in the peer's host, 0 to 1; `None` if unknown.
    pub fn network_share(&self) -> Option<f64> {
        let Remote {
            sum_ns, rtt_sum_ns, ..
        } = self.remote;
        (rtt_sum_ns > 0).then(|| 1.0 - sum_ns as f64 / rtt_sum_ns as f64)
    }

    /// The last round trip; `None` without samples.
    pub fn last_ns(&self) -> Option<u64> {
        self.known(self.last_ns)
    }

    /// The shortest round trip; `None` if unknown.
    pub fn min_ns(&self) -> Option<u64> {
        self.min_ns
    }

    /// The longest round trip; `None` if unknown.
    pub fn max_ns(&self) -> Option<u64> {
        self.max_ns
    }

    /// The mean deviation between consecutive round trips; `None` without samples.
    pub fn jitter_ns(&self) -> Option<u64> {
        self.known(self.jitter_ns)
    }

    /// The percentiles of the round trips for `percents`, which must ascend; `None` if unknown.
    pub fn percentiles_ns<const N: usize>(&self, percents: [f64; N]) -> Option<[u64; N]> {
        let (min, max) = (self.min_ns?, self.max_ns?);
        let values = percentiles_ns(self.histogram.buckets(), percents)?;
        Some(values.map(|value| value.clamp(min, max)))
    }

    pub(super) fn known<T>(&self, value: T) -> Option<T> {
        (self.samples > 0).then_some(value)
    }
}

impl Remote {
    fn since(&self, earlier: &Self) -> Self {
        Self {
            samples: self.samples - earlier.samples,
            max_ns: self
                .max_ns
                .filter(|&max| is_new(max, earlier.max_ns, u64::gt)),
            sum_ns: self.sum_ns - earlier.sum_ns,
            rtt_sum_ns: self.rtt_sum_ns - earlier.rtt_sum_ns,
            ..*self
        }
    }
}

impl OneWay {
    fn since(&self, earlier: &Self) -> Self {
        let delay = |now: &Delay, before: &Delay| Delay {
            min_ns: now
                .min_ns
                .filter(|&min| is_new(min, before.min_ns, i64::lt)),
            ..*now
        };
        Self {
            samples: self.samples - earlier.samples,
            forward: delay(&self.forward, &earlier.forward),
            back: delay(&self.back, &earlier.back),
        }
    }
}

/// Whether an extreme is new since the earlier read.
fn is_new<T>(now: T, before: Option<T>, exceeds: impl Fn(&T, &T) -> bool) -> bool {
    before.is_none_or(|before| exceeds(&now, &before))
}

/// Nonzero counts by bucket. In JSON, an array of [`RttBucket`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(with = "Vec<RttBucket>", inline)
)]
pub struct Histogram(Box<[(u8, u16)]>);

/// Buckets that are checked together.
const GROUP: usize = 8;
const _: () =
    assert!(HISTOGRAM_BUCKETS.is_multiple_of(GROUP) && HISTOGRAM_BUCKETS <= 1 << u8::BITS);

impl From<&[u16; HISTOGRAM_BUCKETS]> for Histogram {
    fn from(counts: &[u16; HISTOGRAM_BUCKETS]) -> Self {
        let mut filled = [(0, 0); HISTOGRAM_BUCKETS];
        let mut length = 0;
        for (group, counts) in counts.chunks_exact(GROUP).enumerate() {
            // Few buckets are nonempty, and one instruction checks a whole group.
            if counts.iter().fold(0, |any, count| any | count) == 0 {
                continue;
            }
            for (place, &count) in counts.iter().enumerate() {
                filled[length] = ((group * GROUP + place) as u8, count);
                length += usize::from(count > 0);
            }
        }
        Self(filled[..length].into())
    }
}

impl Histogram {
    /// The nonempty buckets, in ascending order.
    pub fn buckets(&self) -> impl Iterator<Item = (usize, u16)> + Clone {
        self.0
            .iter()
            .map(|&(index, count)| (usize::from(index), count))
    }

    /// The counts since `earlier`; empty if they do not add up to `samples`, which happens if the counts were halved in
    /// between.
    fn since(&self, earlier: &Self, samples: u64) -> Self {
        let mut before = earlier.0.iter().peekable();
        let mut total = 0;
        let mut grown = Vec::with_capacity(self.0.len());
        for &(index, now) in &self.0 {
            let before = before
                .next_if(|&&(other, _)| other == index)
                .map_or(0, |&(_, count)| count);
            let Some(count) = now.checked_sub(before) else {
                return Self::default();
            };
            total += u64::from(count);
            grown.extend((count > 0).then_some((index, count)));
        }
        if before.next().is_some() || total != samples {
            return Self::default();
        }
        Self(grown.into())
    }
}

/// A nonempty bucket: its lower bound (inclusive) and its upper bound (exclusive) in nanoseconds, and its number of
/// round trips. The last bucket has no upper bound.
#[derive(Serialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
struct RttBucket(
    u64,
    Option<u64>,
    #[cfg_attr(feature = "openapi", schemars(range(min = 1)))] u16,
);

impl Serialize for Histogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut sequence = serializer.serialize_seq(None)?;
        for (index, count) in self.buckets() {
            let (low, high) = bucket_bounds(index);
            let high = (high < u64::MAX).then_some(high);
            sequence.serialize_element(&RttBucket(low, high, count))?;
        }
        sequence.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use health_common::rtt::{Reply, SOURCE_KERNEL, bucket};
    use proptest::prelude::*;

    fn add(row: &mut RttRow, all: &[u64]) {
        for (at, &ns) in (0..).zip(all) {
            row.record(ns, at, 0, SOURCE_KERNEL);
        }
    }

    fn row_of(all: &[u64]) -> RttRow {
        let mut row = RttRow::EMPTY;
        add(&mut row, all);
        row
    }

    proptest! {
        #[test]
        fn a_difference_reports_what_came_and_nothing_of_before(
            before in proptest::collection::vec(1_u64..100_000_000_000, 0..100),
            after in proptest::collection::vec(1_000_u64..60_000_000_000, 0..100),
            lost in (0_u64..9, 0_u64..9),
        ) {
            let mut row = row_of(&before);
            row.lost = lost.0;
            let earlier = RttSummary::from(&row);
            add(&mut row, &after);
            row.lost += lost.1;
            let since = RttSummary::from(&row).since(&earlier);
            let alone = RttSummary::from(&row_of(&after));
            prop_assert_eq!(since.samples, after.len() as u64);
            prop_assert_eq!(since.lost, lost.1);
            prop_assert_eq!(since.mean_ns(), alone.mean_ns());
            prop_assert_eq!(since.last_ns(), alone.last_ns());
            prop_assert_eq!(&since.histogram, &alone.histogram);
            if let Some(last) = since.last_ns() {
                prop_assert!(since.min_ns() <= Some(last) && Some(last) <= since.max_ns());
            }
            let percents = [0.0, 50.0, 99.0, 100.0];
            let near = |a: u64, b: u64| a.abs_diff(b) as f64 <= b as f64 * 0.125;
            match (since.percentiles_ns(percents), alone.percentiles_ns(percents)) {
                (Some(some), Some(others)) => {
                    let all_near = some.iter().zip(others).all(|(&a, b)| near(a, b));
                    prop_assert!(all_near, "{some:?} for {others:?}");
                    prop_assert!(since.min_ns().zip(alone.min_ns()).is_some_and(|(a, b)| near(a, b)));
                    prop_assert!(since.max_ns().zip(alone.max_ns()).is_some_and(|(a, b)| near(a, b)));
                }
                (some, others) => prop_assert_eq!(some, others),
            }
        }

        #[test]
        fn a_summary_has_the_percentiles_of_its_row(
            all in proptest::collection::vec(1_u64..100_000_000_000, 0..100),
        ) {
            let row = row_of(&all);
            let percents = [0.0, 50.0, 90.0, 99.0, 100.0];
            prop_assert_eq!(RttSummary::from(&row).percentiles_ns(percents), row.percentiles_ns(percents));
        }
    }

    #[test]
    fn after_a_reset_all_of_the_row_is_new() {
        let mut row = row_of(&[20_000; 9]);
        row.lost = 4;
        let earlier = RttSummary::from(&row);
        row.clear();
        let empty = RttSummary::from(&row);
        assert_eq!(empty.since(&earlier), empty);
        add(&mut row, &[30_000; 2]);
        let anew = RttSummary::from(&row);
        assert_eq!(anew.since(&earlier), anew);
        // As many probes were lost since the reset as before.
        row.lost = 4;
        let anew = RttSummary::from(&row);
        assert_eq!(anew.since(&earlier), anew);
    }

    #[test]
    fn without_new_round_trips_no_time_is_known() {
        let mut row = row_of(&[20_000, 30_000]);
        let earlier = RttSummary::from(&row);
        row.lost += 1;
        let since = RttSummary::from(&row).since(&earlier);
        assert_eq!(since.loss_ratio(), Some(1.0));
        let times = [since.last_ns(), since.min_ns(), since.max_ns()];
        assert_eq!(times, [None; 3]);
        assert_eq!([since.mean_ns(), since.jitter_ns()], [None; 2]);
        assert_eq!(since.percentiles_ns([50.0]), None);
    }

    #[test]
    fn halved_counts_leave_percentiles_unknown_and_counts_right() {
        let mut row = row_of(&[20_000; 65_530]);
        let earlier = RttSummary::from(&row);
        add(&mut row, &[20_000; 20]);
        assert!(row.histogram[bucket(20_000)] < 40_000);
        let since = RttSummary::from(&row).since(&earlier);
        assert_eq!(since.samples, 20);
        assert_eq!(since.mean_ns(), Some(20_000));
        assert_eq!(since.percentiles_ns([50.0]), None);
        assert_eq!(since.max_ns(), None);
    }

    #[test]
    fn the_peers_part_is_that_of_the_new_round_trips() {
        let mut row = RttRow::EMPTY;
        let mut reply = |rtt_ns, remote_ns| {
            let reply = Reply {
                rtt_ns,
                remote_ns,
                forward_ns: 5_000,
                back_ns: -1_000,
            };
            assert!(row.record_reply(bucket(rtt_ns), &reply, 1, 1, SOURCE_KERNEL));
            RttSummary::from(&row)
        };
        let earlier = reply(100_000, 75_000);
        let since = reply(40_000, 10_000).since(&earlier);
        assert_eq!(earlier.network_share(), Some(0.25));
        assert_eq!(since.network_share(), Some(0.75));
        assert_eq!((since.remote.samples, since.remote.max_ns), (1, None));
        assert_eq!(since.one_way.samples, 1);
        assert_eq!(since.one_way.forward.min_ns, None);
    }
}
