//! The order of rows.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use health_api::rtt_summary::RttSummary;
use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, PROTOCOL_TCP, RttKey};

use super::names::Names;

/// The sort column. Names and addresses sort in ascending order, figures in descending order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Sort {
    /// Address
    #[default]
    Peer,
    /// Name of the node
    Node,
    /// Host, then endpoint
    Path,
    /// ICMP, HTTP, TCP
    Protocol,
    /// Number of round trips
    Samples,
    /// Share of probes that were lost
    Loss,
    /// Last round trip
    Last,
    /// Shortest round trip
    Min,
    /// Mean
    Mean,
    /// Median
    P50,
    /// 90th percentile
    P90,
    /// 99th percentile
    P99,
    /// Longest round trip
    Max,
    /// Jitter
    Jitter,
    /// Share of the time that was not spent in the peer's host
    Network,
}

/// The order of rows. Unknown values come last whether or not it is reversed, and equal rows are ordered by address.
#[derive(Debug)]
pub(super) struct Order<'a> {
    sort: Sort,
    is_reversed: bool,
    names: &'a Names,
    /// Ranks of the names, if sorted by name.
    ranks: BTreeMap<&'a str, u64>,
}

/// A row's sort key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    rank: u64,
    address: u128,
    path: u16,
}

impl<'a> Order<'a> {
    pub(super) fn new(sort: Sort, is_reversed: bool, names: &'a Names) -> Self {
        let ranked: BTreeSet<&str> = match sort {
            Sort::Node => names.all().collect(),
            _ => BTreeSet::new(),
        };
        Self {
            sort,
            is_reversed,
            names,
            ranks: ranked.into_iter().zip(0..).collect(),
        }
    }

    /// The sort key of a row.
    pub(super) fn place(&self, key: &RttKey, row: &RttSummary) -> Place {
        let name = || self.names.of(key.peer.to_ip());
        let value = match self.sort {
            Sort::Peer => Some(0),
            Sort::Node => name().and_then(|name| self.ranks.get(name).copied()),
            Sort::Path => Some(key.path.into()),
            Sort::Protocol => Some(protocol_rank(key.protocol).into()),
            figure => figure_of(row, figure),
        };
        let rank = match value {
            None => u64::MAX,
            // One below the maximum, which stands for unknown values.
            Some(value) if self.sort.is_figure() != self.is_reversed => {
                u64::MAX - 1 - value.min(u64::MAX - 1)
            }
            Some(value) => value,
        };
        let place = Place {
            rank,
            address: address_rank(key),
            path: u16::from_be_bytes([key.path, protocol_rank(key.protocol)]),
        };
        if self.sort == Sort::Peer && self.is_reversed {
            return Place {
                address: !place.address,
                path: !place.path,
                ..place
            };
        }
        place
    }
}

impl Sort {
    fn is_figure(self) -> bool {
        !matches!(self, Self::Peer | Self::Node | Self::Path | Self::Protocol)
    }
}

/// Sorts IPv4 addresses before IPv6 addresses.
fn address_rank(key: &RttKey) -> u128 {
    let words = key.peer.words_be.map(|word| u128::from(u32::from_be(word)));
    let number = words
        .into_iter()
        .fold(0, |number, word| number << 32 | word);
    if key.peer.is_v4() {
        number & u128::from(u32::MAX)
    } else {
        number
    }
}

/// Sorts probes before other traffic.
fn protocol_rank(protocol: u8) -> u8 {
    match protocol {
        PROTOCOL_ICMP => 0,
        PROTOCOL_HTTP => 1,
        PROTOCOL_TCP => 2,
        _ => 3,
    }
}

fn figure_of(row: &RttSummary, sort: Sort) -> Option<u64> {
    let millionths = |ratio: f64| (ratio * 1e6) as u64;
    let percentile = |percent| row.percentiles_ns([percent]).map(|[value]| value);
    match sort {
        Sort::Peer | Sort::Node | Sort::Path | Sort::Protocol => None,
        Sort::Samples => Some(row.samples),
        Sort::Loss => row.loss_ratio().map(millionths),
        Sort::Last => row.last_ns(),
        Sort::Min => row.min_ns(),
        Sort::Mean => row.mean_ns(),
        Sort::P50 => percentile(50.0),
        Sort::P90 => percentile(90.0),
        Sort::P99 => percentile(99.0),
        Sort::Max => row.max_ns(),
        Sort::Jitter => row.jitter_ns(),
        Sort::Network => row.network_share().map(millionths),
    }
}

#[cfg(test)]
mod tests {
    use super::super::select::tests::{key, names};
    use super::*;
    use health_common::probe::Path;
    use health_common::rtt::{RttRow, SOURCE_KERNEL};

    fn rows() -> Vec<(RttKey, RttSummary)> {
        let row = |ns: &[u64], lost| {
            let mut row = RttRow::EMPTY;
            for (&ns, at) in ns.iter().zip(0..) {
                row.record(ns, at, 0, SOURCE_KERNEL);
            }
            row.lost = lost;
            RttSummary::from(&row)
        };
        vec![
            (key("fd00:30::3", Path::Host, PROTOCOL_ICMP), row(&[], 0)),
            (
                key("172.30.0.10", Path::Host, PROTOCOL_ICMP),
                row(&[9_000], 1),
            ),
            (
                key("172.30.0.2", Path::Host, PROTOCOL_HTTP),
                row(&[5_000, 7_000], 0),
            ),
            (
                key("172.30.0.2", Path::Host, PROTOCOL_ICMP),
                row(&[70_000], 0),
            ),
        ]
    }

    #[test]
    fn addresses_are_sorted_as_numbers_and_figures_from_the_largest() {
        let (names, rows) = (names(), rows());
        let sorted = |sort, is_reversed| {
            let order = Order::new(sort, is_reversed, &names);
            let mut indices: Vec<usize> = (0..rows.len()).collect();
            indices.sort_by_key(|&index| order.place(&rows[index].0, &rows[index].1));
            indices
        };
        assert_eq!(sorted(Sort::Peer, false), [3, 2, 1, 0]);
        assert_eq!(sorted(Sort::Peer, true), [0, 1, 2, 3]);
        assert_eq!(sorted(Sort::P99, false), [3, 1, 2, 0]);
        assert_eq!(sorted(Sort::P99, true), [2, 1, 3, 0]);
        assert_eq!(sorted(Sort::Loss, false), [1, 3, 2, 0]);
        assert_eq!(sorted(Sort::Samples, false), [2, 3, 1, 0]);
        assert_eq!(sorted(Sort::Node, false), [3, 2, 0, 1]);
        assert_eq!(sorted(Sort::Protocol, false), [3, 1, 0, 2]);
    }
}
