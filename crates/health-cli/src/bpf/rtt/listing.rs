//! The rows to show, in order.

use std::collections::HashMap;

use health_api::rtt::{RttEntry, RttFigures, RttPath};
use health_api::rtt_summary::RttSummary;
use health_common::rtt::RttKey;
use health_datapath::dump::{DumpError, Pinned};
use health_net::clock::{self, ClockState};

use super::names::Names;
use super::order::{Order, Place, Sort};
use super::select::{Addresses, Scope};
use crate::bpf::parallel::on_all_cpus;

/// Number of rows that are stored and sorted together.
const CHUNK: usize = 4_096;

/// All rows of one update. The next update subtracts them to show only what has been counted since.
pub(super) type Look = HashMap<RttKey, RttSummary>;

/// The requested rows.
#[derive(Debug)]
pub(super) struct Query<'a> {
    /// Peers whose rows are shown; all if empty.
    pub(super) peers: &'a [Addresses],
    /// Which rows of these peers.
    pub(super) scope: Scope,
    /// Only rows that lost at least this percentage of their probes.
    pub(super) min_loss: Option<f64>,
    /// The column to sort by.
    pub(super) sort: Sort,
    /// Whether the order is reversed.
    pub(super) is_reversed: bool,
    /// Maximum number of rows.
    pub(super) top: Option<usize>,
    /// The update to count from; `None` for totals.
    pub(super) earlier: Option<&'a Look>,
}

/// The rows to show.
#[derive(Debug)]
pub(super) struct Listing {
    /// In chunks of [`CHUNK`]: a single growing vector would repeatedly move a hundred thousand rows.
    rows: Vec<Vec<(RttKey, RttSummary)>>,
    /// Row numbers in display order.
    order: Vec<u32>,
    names: Names,
    clock: Option<ClockState>,
    look: Look,
}

impl Listing {
    /// Reads the requested rows.
    pub(super) fn read(
        pinned: &Pinned,
        query: &Query<'_>,
        names: Names,
    ) -> Result<Self, DumpError> {
        let order = Order::new(query.sort, query.is_reversed, &names);
        let pinned_rows = pinned.rtt_rows()?;
        let parts = on_all_cpus(|| {
            let mut part = CollectedRows::default();
            pinned_rows.each(&mut |key, row| {
                if query.has(key) {
                    part.add(key, row.into(), query, &order);
                }
            })?;
            Ok(part)
        })?;
        let CollectedRows { rows, places, look } = CollectedRows::of(parts);
        let order = sorted(places, query.top);
        Ok(Self {
            rows,
            order,
            names,
            clock: clock::state().ok(),
            look,
        })
    }

    /// Number of shown rows.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// The row at a position in the order.
    pub(super) fn row(&self, place: usize) -> (RttKey, RttSummary) {
        let number = self.order[place] as usize;
        self.rows[number / CHUNK][number % CHUNK].clone()
    }

    /// Converts a row for display.
    pub(super) fn entry(&self, (key, row): (RttKey, RttSummary)) -> RttEntry<'_> {
        let path = RttPath::from(&key);
        RttEntry {
            node: self.names.of(path.peer),
            path,
            figures: RttFigures::new(row, self.clock),
        }
    }

    /// All entries in order.
    pub(super) fn entries(&self) -> impl Iterator<Item = RttEntry<'_>> {
        (0..self.len()).map(|place| self.entry(self.row(place)))
    }

    /// The rows for the next update to compare with; empty unless this update was itself compared with an earlier one.
    pub(super) fn into_look(self) -> Look {
        self.look
    }
}

impl Query<'_> {
    fn has(&self, key: &RttKey) -> bool {
        let is_of_peer = self.peers.is_empty() || self.peers.iter().any(|peers| peers.has(key));
        is_of_peer && self.scope.has(key)
    }

    fn is_lossy(&self, row: &RttSummary) -> bool {
        self.min_loss.is_none_or(|percent| {
            row.loss_ratio()
                .is_some_and(|ratio| ratio >= percent / 100.0)
        })
    }
}

/// The rows collected by one thread.
#[derive(Debug, Default)]
struct CollectedRows {
    rows: Vec<Vec<(RttKey, RttSummary)>>,
    places: Vec<(Place, u32)>,
    look: Look,
}

impl CollectedRows {
    /// Merges the parts of all threads.
    fn of(parts: Vec<Self>) -> Self {
        let mut all = Self::default();
        for part in parts {
            let first = (all.rows.len() * CHUNK) as u32;
            let places = part.places.into_iter();
            all.places
                .extend(places.map(|(place, number)| (place, first + number)));
            all.rows.extend(part.rows);
            all.look.extend(part.look);
        }
        all
    }

    fn add(&mut self, key: &RttKey, row: RttSummary, query: &Query<'_>, order: &Order<'_>) {
        let shown = match query.earlier {
            None => row,
            Some(earlier) => {
                let since = earlier
                    .get(key)
                    .map_or_else(|| row.clone(), |before| row.since(before));
                self.look.insert(*key, row);
                since
            }
        };
        if !query.is_lossy(&shown) {
            return;
        }
        let number = self.places.len();
        if number.is_multiple_of(CHUNK) {
            self.rows.push(Vec::with_capacity(CHUNK));
            // The final sort merges sorted runs quickly.
            self.places[number.saturating_sub(CHUNK)..].sort_unstable();
        }
        // The number fits: no map has 2^32 rows.
        self.places.push((order.place(key, &shown), number as u32));
        self.rows[number / CHUNK].push((*key, shown));
    }
}

/// Row numbers sorted by place.
fn sorted(mut places: Vec<(Place, u32)>, top: Option<usize>) -> Vec<u32> {
    places.sort();
    places.truncate(top.unwrap_or(usize::MAX));
    places.into_iter().map(|(_, number)| number).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::Ipv4Addr;

    use health_common::probe::Path;
    use health_common::rtt::{PROTOCOL_ICMP, RttRow, SOURCE_KERNEL};

    use super::super::select::tests::key;
    use super::*;

    /// A listing of these rows, ordered by address.
    pub(in super::super) fn listing(rows: &[(RttKey, RttRow)], names: Names) -> Listing {
        listing_of(rows, &query(None), names)
    }

    /// A listing of those rows that the query selects.
    fn listing_of(rows: &[(RttKey, RttRow)], query: &Query<'_>, names: Names) -> Listing {
        let order = Order::new(query.sort, query.is_reversed, &names);
        let mut collected = CollectedRows::default();
        for (key, row) in rows {
            collected.add(key, row.into(), query, &order);
        }
        Listing {
            rows: collected.rows,
            order: sorted(collected.places, query.top),
            names,
            clock: None,
            look: collected.look,
        }
    }

    fn query(earlier: Option<&Look>) -> Query<'_> {
        Query {
            peers: &[],
            scope: Scope::default(),
            min_loss: None,
            sort: Sort::Peer,
            is_reversed: false,
            top: None,
            earlier,
        }
    }

    fn rows(count: u32, samples: u64) -> Vec<(RttKey, RttRow)> {
        (0..count)
            .rev()
            .map(|number| {
                let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 0).to_bits() + number);
                let mut row = RttRow::EMPTY;
                for at in 0..samples + u64::from(number % 2) {
                    row.record(u64::from(2_000 + number), at, 0, SOURCE_KERNEL);
                }
                row.lost = u64::from(number % 3);
                (key(&address.to_string(), Path::Host, PROTOCOL_ICMP), row)
            })
            .collect()
    }

    #[test]
    fn very_many_rows_are_in_their_order() {
        let rows = rows(3 * CHUNK as u32 + 5, 1);
        let all = listing(&rows, Names::default());
        assert_eq!(all.len(), rows.len());
        let expected = rows.iter().rev().map(|(key, _)| key.peer.to_ip());
        assert!(all.entries().map(|entry| entry.path.peer).eq(expected));
        let slowest = Query {
            sort: Sort::Max,
            top: Some(3),
            ..query(None)
        };
        let slowest = listing_of(&rows, &slowest, Names::default());
        let longest = slowest.entries().filter_map(|entry| entry.figures.max_ns);
        let last = 2_000 + rows.len() as u64 - 1;
        assert_eq!(longest.collect::<Vec<_>>(), [last, last - 1, last - 2]);
    }

    #[test]
    fn rows_are_chosen_and_sorted_by_their_differences() {
        let first = listing_of(&rows(4, 100), &query(Some(&Look::new())), Names::default());
        // Not seen before, so everything is new.
        assert!(first.entries().all(|entry| entry.figures.samples >= 100));
        let earlier = first.into_look();
        let mut later = rows(4, 100);
        for ((_, row), more) in later.iter_mut().zip([0, 7, 0, 3]) {
            (0..more).for_each(|at| row.record(5_000, at, 0, SOURCE_KERNEL));
            row.lost += more;
        }
        let busiest = Query {
            sort: Sort::Samples,
            min_loss: Some(50.0),
            ..query(Some(&earlier))
        };
        let busiest = listing_of(&later, &busiest, Names::default());
        let counts = busiest
            .entries()
            .map(|entry| (entry.figures.samples, entry.figures.lost));
        assert_eq!(counts.collect::<Vec<_>>(), [(7, 7), (3, 3)]);
        // Rows that are not shown are kept for the next update.
        assert_eq!(busiest.into_look().len(), 4);
    }
}
