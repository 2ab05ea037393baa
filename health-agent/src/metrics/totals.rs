//! Counters over all peers that never fall, made of rows that come, go and are halved.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, RttKey, RttRow, bucket_bounds};

use crate::api::types::{AddressGroupStatus, HealthStatus, NodeStatus};

/// The lowest and the highest bound of a bucket, as powers of two, nanoseconds: 16.4 us and 17.2 s.
/// Powers of two are bounds of the rows' own buckets, so that no count has to be split.
const FIRST_BOUND: u32 = 14;
const LAST_BOUND: u32 = 34;
/// Number of buckets, that without a bound included.
const BUCKETS: usize = (LAST_BOUND - FIRST_BOUND) as usize + 2;

type Buckets = [u64; BUCKETS];

/// What round trips are told apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    /// `node` or `endpoint`.
    pub(super) path: &'static str,
    /// `icmp` or `http`.
    pub(super) protocol: &'static str,
    /// `primary` or `secondary`.
    pub(super) address_type: &'static str,
}

/// What happened to the probes of one class since the agent started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Probes {
    /// Answered in time, each with a round trip.
    pub(super) answered: u64,
    /// Given up.
    pub(super) lost: u64,
    /// Replies to probes that were given up, and duplicates.
    pub(super) late: u64,
    /// Sum of the round trips, nanoseconds.
    pub(super) sum_ns: u64,
    buckets: Buckets,
}

impl Probes {
    /// Upper bound in seconds and count of each bucket; the last has no bound, which is infinite.
    pub(super) fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = (FIRST_BOUND..=LAST_BOUND).map(|power| (1_u64 << power) as f64 / 1e9);
        bounds.chain([f64::INFINITY]).zip(self.buckets).collect()
    }

    fn of(row: &RttRow) -> Self {
        let mut buckets = Buckets::default();
        for (index, &count) in row.histogram.iter().enumerate() {
            buckets[bucket_of(index)] += u64::from(count);
        }
        Self {
            answered: row.samples,
            lost: row.lost,
            late: row.late,
            sum_ns: row.sum_ns,
            buckets,
        }
    }

    /// What came to a row since it looked like `before`.
    fn since(&self, before: &Self) -> Self {
        let was_made_anew = self.answered < before.answered
            || self.lost < before.lost
            || self.late < before.late
            || self.sum_ns < before.sum_ns;
        let zero = Self::default();
        let before = if was_made_anew { &zero } else { before };
        let answered = self.answered - before.answered;
        Self {
            answered,
            lost: self.lost - before.lost,
            late: self.late - before.late,
            sum_ns: self.sum_ns - before.sum_ns,
            buckets: growth(&self.buckets, &before.buckets, answered),
        }
    }

    fn add(&mut self, more: &Self) {
        self.answered += more.answered;
        self.lost += more.lost;
        self.late += more.late;
        self.sum_ns += more.sum_ns;
        for (sum, more) in self.buckets.iter_mut().zip(more.buckets) {
            *sum += more;
        }
    }
}

/// Where `total` more samples fell. Exact as long as the row was not halved in between; then they
/// are shared out in the proportion in which buckets hold more than half of what they held.
fn growth(now: &Buckets, before: &Buckets, total: u64) -> Buckets {
    let was_halved = now.iter().zip(before).any(|(now, before)| now < before);
    let divisor = if was_halved { 2 } else { 1 };
    let mut grown = *now;
    for (grown, before) in grown.iter_mut().zip(before) {
        *grown = grown.saturating_sub(before / divisor);
    }
    match grown.iter().sum::<u64>() {
        sum if sum == total => grown,
        0 => share_out(total, now),
        _ => share_out(total, &grown),
    }
}

/// Parts of `total` in the proportion of `weights`, whose sum is `total`.
fn share_out(total: u64, weights: &Buckets) -> Buckets {
    let sum: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
    let mut parts = weights.map(|weight| {
        let part = (u128::from(total) * u128::from(weight)).checked_div(sum);
        // At most `total`, since no weight exceeds their sum.
        part.unwrap_or_default() as u64
    });
    let rest = total - parts.iter().sum::<u64>();
    if let Some((largest, _)) = weights
        .iter()
        .enumerate()
        .max_by_key(|(_, weight)| **weight)
    {
        parts[largest] += rest;
    }
    parts
}

/// The bucket here that holds bucket `index` of a row.
fn bucket_of(index: usize) -> usize {
    let (_, end) = bucket_bounds(index);
    let power = end
        .checked_next_power_of_two()
        .map_or(u64::BITS, u64::ilog2);
    (power.clamp(FIRST_BOUND, LAST_BOUND + 1) - FIRST_BOUND) as usize
}

/// Totals over all rows since the agent started.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// The rows as they were last seen.
    seen: HashMap<RttKey, Probes>,
    by_class: BTreeMap<Class, Probes>,
}

impl Totals {
    /// Nothing was counted yet, and what `rows` hold does not count.
    pub(super) fn starting_from(rows: &[(RttKey, RttRow)]) -> Self {
        Self {
            seen: rows
                .iter()
                .map(|(key, row)| (*key, Probes::of(row)))
                .collect(),
            by_class: BTreeMap::new(),
        }
    }

    /// Adds what came to the rows since they were last seen. What belongs to no address of
    /// `report`, whose peer has just gone, is left out.
    pub(super) fn add(&mut self, rows: &[(RttKey, RttRow)], report: &HealthStatus) {
        let types = address_types(report);
        let before = std::mem::take(&mut self.seen);
        for (key, row) in rows {
            let now = Probes::of(row);
            let more = now.since(before.get(key).unwrap_or(&Probes::default()));
            self.seen.insert(*key, now);
            if let Some(class) = class(key, &types) {
                self.by_class.entry(class).or_default().add(&more);
            }
        }
    }

    /// The totals, in a fixed order.
    pub(super) fn by_class(&self) -> impl Iterator<Item = (Class, Probes)> {
        self.by_class
            .iter()
            .map(|(class, probes)| (*class, *probes))
    }
}

type AddressTypes = HashMap<(IpAddr, u8), &'static str>;

fn address_types(report: &HealthStatus) -> AddressTypes {
    let of_group = |group: &AddressGroupStatus, path: Path| {
        let types = std::iter::once("primary").chain(std::iter::repeat("secondary"));
        let keys = group.paths().map(|shown| (shown.ip, path as u8));
        keys.zip(types).collect::<Vec<_>>()
    };
    let of_node = |node: &NodeStatus| {
        let mut types = of_group(&node.host, Path::Host);
        if let Some(endpoint) = &node.health_endpoint {
            types.extend(of_group(endpoint, Path::Endpoint));
        }
        types
    };
    report.nodes.iter().flat_map(of_node).collect()
}

fn class(key: &RttKey, types: &AddressTypes) -> Option<Class> {
    Some(Class {
        path: match Path::from_u8(key.path)? {
            Path::Host => "node",
            Path::Endpoint => "endpoint",
        },
        protocol: match key.protocol {
            PROTOCOL_ICMP => "icmp",
            PROTOCOL_HTTP => "http",
            _ => return None,
        },
        address_type: types.get(&(key.peer.to_ip(), key.path))?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::render::samples::{key, report};
    use super::*;
    use health_common::rtt::SOURCE_KERNEL;

    fn record(row: &mut RttRow, ns: u64, times: u32) {
        for _ in 0..times {
            row.record(ns, 0, 0, SOURCE_KERNEL);
        }
    }

    fn only(totals: &Totals) -> Probes {
        let all: Vec<_> = totals.by_class().collect();
        assert_eq!(all.len(), 1, "{all:?}");
        all[0].1
    }

    #[test]
    fn buckets_keep_to_their_bounds() {
        let mut row = RttRow::EMPTY;
        for ns in [1, 16_383, 16_384, 40_000, 1 << 34, 1 << 40] {
            record(&mut row, ns, 1);
        }
        let buckets = Probes::of(&row).buckets();
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
    fn what_was_there_before_the_start_does_not_count() {
        let mut row = RttRow::EMPTY;
        record(&mut row, 20_000, 5);
        let mut totals = Totals::starting_from(&[(key(2), row)]);
        record(&mut row, 20_000, 2);
        row.lost = 3;
        totals.add(&[(key(2), row)], &report());
        let probes = only(&totals);
        assert_eq!((probes.answered, probes.lost), (2, 3));
        assert_eq!(probes.sum_ns, 40_000);
        assert_eq!(probes.buckets[1], 2);
    }

    #[test]
    fn totals_never_fall_when_rows_go_or_are_made_anew() {
        let mut totals = Totals::default();
        let mut row = RttRow::EMPTY;
        record(&mut row, 20_000, 5);
        totals.add(&[(key(2), row)], &report());
        totals.add(&[], &report());
        assert_eq!(only(&totals).answered, 5);
        let mut again = RttRow::EMPTY;
        record(&mut again, 20_000, 2);
        totals.add(&[(key(2), again)], &report());
        assert_eq!(only(&totals).answered, 7);

        let mut anew = RttRow::EMPTY;
        record(&mut anew, 20_000, 1);
        totals.add(&[(key(2), anew)], &report());
        assert_eq!(only(&totals).answered, 8);
        assert_eq!(only(&totals).buckets.iter().sum::<u64>(), 8);
    }

    #[test]
    fn halved_rows_go_on_counting() {
        let mut totals = Totals::default();
        let mut row = RttRow::EMPTY;
        let (mut fast, mut slow) = (0, 0);
        for _ in 0..30 {
            record(&mut row, 20_000, 3_000);
            record(&mut row, 2_000_000, 1_000);
            fast += 3_000;
            slow += 1_000;
            let before = only_or_zero(&totals);
            totals.add(&[(key(2), row)], &report());
            let now = only(&totals);
            assert_eq!(now.answered, fast + slow);
            assert_eq!(now.buckets.iter().sum::<u64>(), fast + slow);
            let grows = |(now, before): (&u64, &u64)| now >= before;
            assert!(now.buckets.iter().zip(&before.buckets).all(grows));
        }
        let counted = only(&totals).buckets[1];
        assert!(counted.abs_diff(fast) < fast / 50, "{counted} of {fast}");
    }

    fn only_or_zero(totals: &Totals) -> Probes {
        totals.by_class().next().map(|(_, p)| p).unwrap_or_default()
    }

    #[test]
    fn rows_of_unknown_addresses_are_left_out() {
        let mut row = RttRow::EMPTY;
        record(&mut row, 20_000, 5);
        let mut totals = Totals::default();
        totals.add(&[(key(77), row)], &report());
        assert_eq!(totals.by_class().count(), 0);
    }
}
