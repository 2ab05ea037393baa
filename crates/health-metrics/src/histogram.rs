//! Round-trip times as counted in the rows of the kernel's map, and their conversion to Prometheus buckets.

use std::collections::BTreeMap;

use health_common::rtt::{HISTOGRAM_BUCKETS, bucket_bounds, bucket_value};

/// Lowest and highest bound of the classic buckets, as powers of two in nanoseconds: 16.4 us and 17.2 s. Powers of two
/// are also bounds of the rows' own buckets, so no count has to be split.
const FIRST_BOUND: u32 = 14;
const LAST_BOUND: u32 = 34;
/// Resolution of native buckets: each is `2^(1/8)` times as wide as the previous one. The rows have the same number of
/// buckets per octave.
pub(super) const SCHEMA: i32 = 3;

/// Counts per row bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Histogram([u64; HISTOGRAM_BUCKETS]);

impl Default for Histogram {
    fn default() -> Self {
        Self([0; HISTOGRAM_BUCKETS])
    }
}

impl From<&[u16; HISTOGRAM_BUCKETS]> for Histogram {
    fn from(counts: &[u16; HISTOGRAM_BUCKETS]) -> Self {
        Self(counts.map(u64::from))
    }
}

/// Buckets of a native histogram in Prometheus's exposition format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NativeBuckets {
    /// For each span, how many buckets are skipped before it and how many it contains.
    pub(super) spans: Vec<(i32, u32)>,
    /// Each bucket's count minus the previous bucket's.
    pub(super) deltas: Vec<i64>,
}

impl Histogram {
    /// The count of each bucket of a row.
    #[cfg(test)]
    pub(super) fn counts(&self) -> &[u64; HISTOGRAM_BUCKETS] {
        &self.0
    }

    /// Sum of all counts.
    pub(super) fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds the counts of another histogram.
    pub(super) fn add(&mut self, more: &Self) {
        for (count, more) in self.0.iter_mut().zip(more.0) {
            *count += more;
        }
    }

    /// The counts since `before`, which has no larger counts.
    pub(super) fn since(&self, before: &Self) -> Self {
        let mut since = self.clone();
        for (count, before) in since.0.iter_mut().zip(before.0) {
            *count = count.saturating_sub(before);
        }
        since
    }

    /// Scales the histogram to a total of `total`, keeping its shape. Without any counts, puts everything in the first
    /// bucket.
    pub(super) fn scaled(&self, total: u64) -> Self {
        let sum = u128::from(self.total());
        let mut scaled = self.0.map(|weight| {
            let part = (u128::from(total) * u128::from(weight)).checked_div(sum);
            // At most `total`, since no weight exceeds their sum.
            part.unwrap_or_default() as u64
        });
        let rest = total - scaled.iter().sum::<u64>();
        let largest = (0..HISTOGRAM_BUCKETS)
            .rev()
            .max_by_key(|&index| self.0[index]);
        scaled[largest.unwrap_or_default()] += rest;
        Self(scaled)
    }

    /// The time in nanoseconds that a fraction `quantile` of all round trips does not exceed; `None` without round
    /// trips.
    pub(super) fn quantile_ns(&self, quantile: f64) -> Option<u64> {
        let target = quantile * self.total() as f64;
        let mut seen = 0;
        let reached = self.0.iter().position(|&count| {
            seen += count;
            count > 0 && seen as f64 >= target
        });
        reached.map(bucket_value)
    }

    /// Upper bound in seconds and count of each classic bucket; the bound of the last bucket is infinite.
    pub(super) fn classic(&self) -> Vec<(f64, u64)> {
        let bounds = (FIRST_BOUND..=LAST_BOUND).map(|power| 1_u64 << power);
        let mut buckets: Vec<(u64, u64)> = bounds.map(|bound| (bound, 0)).collect();
        let mut without_bound = 0;
        for (index, count) in self.0.iter().enumerate() {
            let (_, end) = bucket_bounds(index);
            match buckets.iter_mut().find(|(bound, _)| end <= *bound) {
                Some((_, sum)) => *sum += count,
                None => without_bound += count,
            }
        }
        let seconds = buckets
            .into_iter()
            .map(|(ns, count)| (ns as f64 / 1e9, count));
        seconds.chain([(f64::INFINITY, without_bound)]).collect()
    }

    /// Converts the counts to native buckets. All row buckets within an octave of nanoseconds have the same width, so
    /// each count goes to the native bucket that contains the middle of its row bucket. A round trip is off by at most
    /// 6.25 %, and is reported to within the 9.1 % width of a native bucket.
    pub(super) fn native(&self) -> NativeBuckets {
        let mut counts: BTreeMap<i32, u64> = BTreeMap::new();
        for (index, &count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            *counts.entry(native_index(bucket_value(index))).or_default() += count;
        }
        let mut native = NativeBuckets::default();
        let mut end = 0;
        let mut before = 0;
        for (index, count) in counts {
            match native.spans.last_mut() {
                Some((_, length)) if index == end => *length += 1,
                _ => native.spans.push((index - end, 1)),
            }
            end = index + 1;
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            native.deltas.push(count - before);
            before = count;
        }
        native
    }
}

/// The native bucket of a value: the first whose upper bound, `2^(index / 8)` seconds, is not below the value.
fn native_index(ns: u64) -> i32 {
    ((ns as f64 / 1e9).log2() * f64::from(1 << SCHEMA)).ceil() as i32
}

#[cfg(test)]
mod tests {
    use health_common::rtt::bucket;

    use super::*;

    fn of(all: &[(u64, u64)]) -> Histogram {
        let mut histogram = Histogram::default();
        all.iter()
            .for_each(|&(ns, count)| histogram.0[bucket(ns)] += count);
        histogram
    }

    #[test]
    fn classic_buckets_keep_to_their_bounds() {
        let histogram = of(&[
            (1, 1),
            (16_383, 1),
            (16_384, 1),
            (40_000, 1),
            (1 << 34, 1),
            (1 << 40, 1),
        ]);
        let buckets = histogram.classic();
        let held: Vec<_> = buckets.iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(
            held,
            [
                &(0.000_016_384, 2),
                &(0.000_032_768, 1),
                &(0.000_065_536, 1),
                &(f64::INFINITY, 2)
            ]
        );
    }

    #[test]
    fn native_buckets_hold_every_count_near_its_value() {
        let values = [
            500,
            1_500,
            20_000,
            21_000,
            300_000,
            7_000_000,
            1_000_000_000,
            80_000_000_000,
        ];
        for ns in values {
            let native = of(&[(ns, 3)]).native();
            let [(index, 1)] = native.spans[..] else {
                panic!("{native:?}");
            };
            assert_eq!(native.deltas, [3]);
            let bound = |index: i32| (f64::from(index) / 8.0).exp2() * 1e9;
            let middle = bucket_value(bucket(ns)) as f64;
            assert!(bound(index - 1) < middle && middle <= bound(index), "{ns}");
        }
        let native = of(&values.map(|ns| (ns, 2))).native();
        let buckets: u32 = native.spans.iter().map(|(_, length)| length).sum();
        assert_eq!(native.deltas.len(), buckets as usize);
        let mut count = 0;
        let counts = native.deltas.iter().map(|delta| {
            count += delta;
            count
        });
        assert_eq!(counts.sum::<i64>(), 2 * values.len() as i64);
    }

    #[test]
    fn quantiles_are_of_the_bucket_that_reaches_them() {
        let histogram = of(&[(20_000, 90), (1_000_000, 10)]);
        let quantile = |q| histogram.quantile_ns(q).map(bucket);
        assert_eq!(quantile(0.5), Some(bucket(20_000)));
        assert_eq!(quantile(0.9), Some(bucket(20_000)));
        assert_eq!(quantile(0.99), Some(bucket(1_000_000)));
        assert_eq!(Histogram::default().quantile_ns(0.5), None);
    }

    #[test]
    fn scaling_keeps_the_shape_and_hits_the_total() {
        let scaled = of(&[(20_000, 2), (1_000_000, 1)]).scaled(100);
        assert_eq!(scaled.total(), 100);
        assert_eq!(scaled.counts()[bucket(1_000_000)], 33);
        assert_eq!(Histogram::default().scaled(7).total(), 7);
    }
}
