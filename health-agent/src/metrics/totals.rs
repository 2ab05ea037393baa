//! Counters over all peers that never fall, made of rows that come, go and are halved.

use std::collections::{BTreeMap, HashMap};

use health_common::probe::Path;
use health_common::rtt::{
    HISTOGRAM_BUCKETS, PROTOCOL_HTTP, PROTOCOL_ICMP, RttKey, RttRow, bucket_bounds,
};

use super::Maps;
use super::summary::{Summary, path_name};
use crate::datapath::dump::DumpError;

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
        for (&count, &bucket) in row.histogram.iter().zip(&BUCKET_OF) {
            buckets[usize::from(bucket)] += u64::from(count);
        }
        Self {
            answered: row.samples,
            lost: row.lost,
            late: row.late,
            sum_ns: row.sum_ns,
            buckets,
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

/// A row as a scrape saw it: enough to tell what came since, in 72 bytes. Counts are kept modulo
/// their width; the differences between two scrapes are small.
#[derive(Clone, Copy, Debug)]
struct Seen {
    sum_ns: u64,
    answered: u32,
    lost: u32,
    late: u32,
    /// The scrape that saw it.
    round: u32,
    buckets: [u16; BUCKETS],
}

impl Seen {
    fn new(probes: &Probes, round: u32) -> Self {
        Self {
            sum_ns: probes.sum_ns,
            answered: probes.answered as u32,
            lost: probes.lost as u32,
            late: probes.late as u32,
            round,
            buckets: probes.buckets.map(|count| count as u16),
        }
    }

    /// What came to the row since; all that is in it, when it was made anew.
    fn until(&self, now: &Probes) -> Probes {
        let since = |now: u64, before: u32| (now as u32).wrapping_sub(before);
        let answered = since(now.answered, self.answered);
        let lost = since(now.lost, self.lost);
        let late = since(now.late, self.late);
        // A count that fell differs by more than half of its range.
        let fell = [answered, lost, late].iter().any(|&n| n > u32::MAX / 2);
        if fell || now.sum_ns < self.sum_ns {
            return Probes {
                buckets: fitted(now.answered, &now.buckets, &now.buckets),
                ..*now
            };
        }
        let mut grown = now.buckets;
        for (grown, before) in grown.iter_mut().zip(self.buckets) {
            *grown = u64::from((*grown as u16).wrapping_sub(before));
        }
        Probes {
            answered: answered.into(),
            lost: lost.into(),
            late: late.into(),
            sum_ns: now.sum_ns - self.sum_ns,
            buckets: fitted(answered.into(), &grown, &now.buckets),
        }
    }
}

/// `grown`, if that is where all of `total` samples fell. It is not when the row was halved in
/// between, which happens once in 65 535 samples; then they are shared out as all of the row's are.
fn fitted(total: u64, grown: &Buckets, all: &Buckets) -> Buckets {
    match grown.iter().sum::<u64>() {
        sum if sum == total => *grown,
        // The row was read while it was written.
        sum if 0 < sum && sum < total => share_out(total, grown),
        _ => share_out(total, all),
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

/// The bucket here that holds each bucket of a row.
const BUCKET_OF: [u8; HISTOGRAM_BUCKETS] = {
    let mut table = [0; HISTOGRAM_BUCKETS];
    let mut index = 0;
    while index < HISTOGRAM_BUCKETS {
        let (_, end) = bucket_bounds(index);
        let power = match end.checked_next_power_of_two() {
            Some(power) => power.ilog2(),
            None => u64::BITS,
        };
        table[index] = if power < FIRST_BOUND {
            0
        } else if power > LAST_BOUND {
            BUCKETS as u8 - 1
        } else {
            (power - FIRST_BOUND) as u8
        };
        index += 1;
    }
    table
};

/// Totals over all rows since the agent started.
#[derive(Debug, Default)]
pub(super) struct Totals {
    seen: HashMap<RttKey, Seen>,
    round: u32,
    by_class: BTreeMap<Class, Probes>,
}

impl Totals {
    /// Nothing was counted yet, and what the rows hold does not count.
    pub(super) fn starting_from(maps: &impl Maps) -> Result<Self, DumpError> {
        let mut totals = Self::default();
        maps.rtt(&mut |key, row| {
            totals.seen.insert(*key, Seen::new(&Probes::of(row), 0));
        })?;
        Ok(totals)
    }

    /// Adds what came to the rows since they were last seen, and tells `summary` of them. What
    /// belongs to no address of it, whose peer has just gone, is left out.
    pub(super) fn read(
        &mut self,
        maps: &impl Maps,
        summary: &mut Summary,
    ) -> Result<(), DumpError> {
        self.round = self.round.wrapping_add(1);
        maps.rtt(&mut |key, row| {
            self.add(key, row, summary);
            summary.note(key, row);
        })?;
        let round = self.round;
        self.seen.retain(|_, seen| seen.round == round);
        Ok(())
    }

    fn add(&mut self, key: &RttKey, row: &RttRow, summary: &Summary) {
        let now = Probes::of(row);
        let seen = Seen::new(&now, self.round);
        let more = match self.seen.insert(*key, seen) {
            Some(before) => before.until(&now),
            None => Probes {
                buckets: fitted(now.answered, &now.buckets, &now.buckets),
                ..now
            },
        };
        if let Some(class) = class(key, summary) {
            self.by_class.entry(class).or_default().add(&more);
        }
    }

    /// The totals, in a fixed order.
    pub(super) fn by_class(&self) -> impl Iterator<Item = (Class, Probes)> {
        self.by_class
            .iter()
            .map(|(class, probes)| (*class, *probes))
    }
}

fn class(key: &RttKey, summary: &Summary) -> Option<Class> {
    Some(Class {
        path: path_name(Path::from_u8(key.path)?),
        protocol: match key.protocol {
            PROTOCOL_ICMP => "icmp",
            PROTOCOL_HTTP => "http",
            _ => return None,
        },
        address_type: summary.address_type(key)?,
    })
}

#[cfg(test)]
mod tests {
    use health_common::rtt::SOURCE_KERNEL;

    use super::super::samples::{self, Rows, key, report};
    use super::*;

    fn add(totals: &mut Totals, rows: &[(RttKey, RttRow)]) {
        let mut summary = samples::summary(&report(), false);
        totals.read(&Rows(rows.to_vec()), &mut summary).unwrap();
    }

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
        let mut totals = Totals::starting_from(&Rows(vec![(key(2), row)])).unwrap();
        record(&mut row, 20_000, 2);
        row.lost = 3;
        add(&mut totals, &[(key(2), row)]);
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
        add(&mut totals, &[(key(2), row)]);
        add(&mut totals, &[]);
        assert_eq!(only(&totals).answered, 5);
        let mut again = RttRow::EMPTY;
        record(&mut again, 20_000, 2);
        add(&mut totals, &[(key(2), again)]);
        assert_eq!(only(&totals).answered, 7);

        let mut anew = RttRow::EMPTY;
        record(&mut anew, 20_000, 1);
        add(&mut totals, &[(key(2), anew)]);
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
            add(&mut totals, &[(key(2), row)]);
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
        add(&mut totals, &[(key(77), row)]);
        assert_eq!(totals.by_class().count(), 0);
    }
}
