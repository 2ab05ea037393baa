//! Counters over all peers that never decrease, although the rows they are built from appear, disappear and are halved.

use std::collections::{BTreeMap, HashMap};

use health_common::probe::Path;
use health_common::rtt::{
    HISTOGRAM_BUCKETS, PROTOCOL_HTTP, PROTOCOL_ICMP, PROTOCOL_TCP, RttKey, RttRow,
};
use health_datapath::dump::DumpError;

use super::Maps;
use super::histogram::Histogram;
use super::summary::{Summary, path_name};

/// The attributes by which round trips are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    /// `node` or `endpoint`.
    pub(super) path: &'static str,
    /// `icmp`, `http` or `tcp`.
    pub(super) protocol: &'static str,
    /// `primary` or `secondary`.
    pub(super) address_type: &'static str,
}

impl Class {
    /// Whether the round trips are from probes, not from existing connections.
    pub(super) fn is_probed(&self) -> bool {
        self.protocol != TCP
    }
}

const TCP: &str = "tcp";

/// The counts in the rows of one class since the agent started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Probes {
    /// Probes answered in time, each with a round trip.
    pub(super) answered: u64,
    /// Probes that timed out.
    pub(super) lost: u64,
    /// Replies to probes that had timed out.
    pub(super) late: u64,
    /// Additional replies to answered probes.
    pub(super) duplicates: u64,
    /// Sum of the round trips, in nanoseconds.
    pub(super) sum_ns: u64,
    /// The part of this sum known to have been spent in peers' hosts, in nanoseconds.
    pub(super) remote_ns: u64,
    /// Sum of the round trips for which that part is known, in nanoseconds.
    pub(super) remote_rtt_ns: u64,
    /// The round trips.
    pub(super) histogram: Histogram,
}

impl Probes {
    /// Adds further counts.
    pub(super) fn add(&mut self, more: &Self) {
        self.answered += more.answered;
        self.lost += more.lost;
        self.late += more.late;
        self.duplicates += more.duplicates;
        self.sum_ns += more.sum_ns;
        self.remote_ns += more.remote_ns;
        self.remote_rtt_ns += more.remote_rtt_ns;
        self.histogram.add(&more.histogram);
    }
}

/// A row as seen by a scrape, with enough data to compute the counts added since. Counts are truncated to their width,
/// because the differences between two scrapes are small.
#[derive(Clone, Debug)]
struct ScrapedRow {
    sum_ns: u64,
    remote_ns: u64,
    remote_rtt_ns: u64,
    answered: u32,
    lost: u32,
    late: u32,
    duplicates: u32,
    /// Number of the scrape that saw the row.
    round: u32,
    /// Only the nonempty buckets, because most buckets are empty.
    buckets: Box<[(u8, u16)]>,
}

impl ScrapedRow {
    fn new(row: &RttRow, round: u32) -> Self {
        let buckets = (0..).zip(row.histogram).filter(|(_, count)| *count > 0);
        Self {
            sum_ns: row.sum_ns,
            remote_ns: row.remote.sum_ns,
            remote_rtt_ns: row.remote.rtt_sum_ns,
            answered: row.samples as u32,
            lost: row.lost as u32,
            late: row.late as u32,
            duplicates: row.duplicates as u32,
            round,
            buckets: buckets.collect(),
        }
    }

    /// The counts added to `row` since then; `None` if the row was recreated.
    fn until(&self, row: &RttRow) -> Option<Probes> {
        let since = |now: u64, before: u32| (now as u32).wrapping_sub(before);
        let answered = since(row.samples, self.answered);
        let lost = since(row.lost, self.lost);
        let late = since(row.late, self.late);
        let duplicates = since(row.duplicates, self.duplicates);
        // A count that has fallen yields a difference of more than half of its range.
        let counts = [answered, lost, late, duplicates];
        if counts.iter().any(|&n| n > u32::MAX / 2) {
            return None;
        }
        let mut histogram = row.histogram;
        for &(index, before) in &self.buckets {
            let count = &mut histogram[usize::from(index)];
            *count = count.wrapping_sub(before);
        }
        Some(Probes {
            answered: answered.into(),
            lost: lost.into(),
            late: late.into(),
            duplicates: duplicates.into(),
            sum_ns: row.sum_ns.checked_sub(self.sum_ns)?,
            remote_ns: row.remote.sum_ns.checked_sub(self.remote_ns)?,
            remote_rtt_ns: row.remote.rtt_sum_ns.checked_sub(self.remote_rtt_ns)?,
            histogram: fitted(answered.into(), &histogram, &row.histogram),
        })
    }
}

/// All counts of a row.
fn all_of(row: &RttRow) -> Probes {
    Probes {
        answered: row.samples,
        lost: row.lost,
        late: row.late,
        duplicates: row.duplicates,
        sum_ns: row.sum_ns,
        remote_ns: row.remote.sum_ns,
        remote_rtt_ns: row.remote.rtt_sum_ns,
        histogram: fitted(row.samples, &row.histogram, &row.histogram),
    }
}

/// Returns `grown` if it accounts for all `total` samples. It does not if the row was halved in the meantime, which
/// happens once in 65 535 samples; then the samples are distributed like all samples of the row.
fn fitted(
    total: u64,
    grown: &[u16; HISTOGRAM_BUCKETS],
    all: &[u16; HISTOGRAM_BUCKETS],
) -> Histogram {
    let grown = Histogram::from(grown);
    if grown.total() == total {
        grown
    } else {
        Histogram::from(all).scaled(total)
    }
}

/// Totals over all rows since the agent started.
#[derive(Debug, Default)]
pub(super) struct Totals {
    seen: HashMap<RttKey, ScrapedRow>,
    round: u32,
    by_class: BTreeMap<Class, Probes>,
}

impl Totals {
    /// Starts from zero: existing row contents do not count.
    pub(super) fn starting_from(maps: &impl Maps) -> Result<Self, DumpError> {
        let mut totals = Self::default();
        maps.rtt(&mut |key, row| {
            totals.seen.insert(*key, ScrapedRow::new(row, 0));
        })?;
        Ok(totals)
    }

    /// Adds the rows' increments since the last read, and passes the rows to `summary`. Skips rows whose address is
    /// missing because their peer has just been removed.
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
        let seen = ScrapedRow::new(row, self.round);
        let before = self.seen.insert(*key, seen);
        if let Some(class) = class(key, summary) {
            let more = before.and_then(|before| before.until(row));
            let more = more.unwrap_or_else(|| all_of(row));
            self.by_class.entry(class).or_default().add(&more);
        }
    }

    /// The totals of each class, in a fixed order.
    pub(super) fn by_class(&self) -> impl Iterator<Item = (Class, &Probes)> {
        self.by_class.iter().map(|(class, probes)| (*class, probes))
    }
}

fn class(key: &RttKey, summary: &Summary) -> Option<Class> {
    Some(Class {
        path: path_name(Path::from_u8(key.path)?),
        protocol: match key.protocol {
            PROTOCOL_ICMP => "icmp",
            PROTOCOL_HTTP => "http",
            PROTOCOL_TCP => TCP,
            _ => return None,
        },
        address_type: summary.address_type(key)?,
    })
}

#[cfg(test)]
mod tests {
    use health_common::rtt::{Reply, SOURCE_KERNEL, bucket};

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
        all[0].1.clone()
    }

    fn in_bucket(probes: &Probes, ns: u64) -> u64 {
        probes.histogram.counts()[bucket(ns)]
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
        assert_eq!(in_bucket(&probes, 20_000), 2);
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
        assert_eq!(only(&totals).histogram.total(), 8);
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
            assert_eq!(now.histogram.total(), fast + slow);
            let grows = |(now, before): (&u64, &u64)| now >= before;
            let counts = now.histogram.counts().iter();
            assert!(counts.zip(before.histogram.counts()).all(grows));
        }
        let counted = in_bucket(&only(&totals), 20_000);
        assert!(counted.abs_diff(fast) < fast / 50, "{counted} of {fast}");
    }

    fn only_or_zero(totals: &Totals) -> Probes {
        totals
            .by_class()
            .next()
            .map(|(_, p)| p.clone())
            .unwrap_or_default()
    }

    #[test]
    fn rows_of_unknown_addresses_are_left_out() {
        let mut row = RttRow::EMPTY;
        record(&mut row, 20_000, 5);
        let mut totals = Totals::default();
        add(&mut totals, &[(key(77), row)]);
        assert_eq!(totals.by_class().count(), 0);
    }

    #[test]
    fn time_in_peers_hosts_is_counted_with_the_round_trips_it_is_known_of() {
        let reply = |rtt_ns, remote_ns| Reply {
            remote_ns,
            ..Reply::new(rtt_ns)
        };
        let mut row = RttRow::EMPTY;
        assert!(row.record_reply(bucket(20_000), &reply(20_000, 4_000), 1, 1, SOURCE_KERNEL));
        let mut totals = Totals::starting_from(&Rows(vec![(key(2), row)])).unwrap();
        assert!(row.record_reply(bucket(30_000), &reply(30_000, 6_000), 2, 2, SOURCE_KERNEL));
        row.record(50_000, 3, 3, SOURCE_KERNEL);
        row.duplicates = 2;
        add(&mut totals, &[(key(2), row)]);
        let probes = only(&totals);
        assert_eq!((probes.remote_ns, probes.remote_rtt_ns), (6_000, 30_000));
        assert_eq!((probes.sum_ns, probes.duplicates), (80_000, 2));
    }

    #[test]
    fn connections_are_a_class_of_their_own() {
        let mut row = RttRow::EMPTY;
        record(&mut row, 20_000, 5);
        let passive = RttKey {
            protocol: PROTOCOL_TCP,
            ..key(2)
        };
        let mut totals = Totals::default();
        add(&mut totals, &[(passive, row), (key(2), row)]);
        let probed: Vec<_> = totals.by_class().map(|(c, _)| c.is_probed()).collect();
        assert_eq!(probed, [true, false]);
    }
}
