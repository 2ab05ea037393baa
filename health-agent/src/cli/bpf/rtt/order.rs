//! The order of rows.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use clap::ValueEnum;
use health_common::rtt::{RttKey, RttRow};

use super::names::Names;

/// What rows are sorted by: names and addresses in ascending order, figures from the largest on.
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
    /// Round trips measured
    Samples,
    /// Part of the probes that was lost
    Loss,
    /// The last round trip
    Last,
    /// The shortest
    Min,
    /// The mean
    Mean,
    /// The median
    P50,
    /// The 90th percentile
    P90,
    /// The 99th percentile
    P99,
    /// The longest
    Max,
    /// The jitter
    Jitter,
    /// The part that was not spent in the peer's host
    Network,
}

/// Indices of `rows`, sorted. What is not known comes last in either direction, and equal rows are in
/// the order of their addresses.
pub(super) fn sorted(
    rows: &[(RttKey, impl Borrow<RttRow>)],
    sort: Sort,
    is_reversed: bool,
    names: &Names,
) -> Vec<u32> {
    let ranks: BTreeMap<&str, u64> = match sort {
        Sort::Node => {
            let known = rows
                .iter()
                .filter_map(|(key, _)| names.of(key.peer.to_ip()));
            let mut ranks: BTreeMap<&str, u64> = known.map(|name| (name, 0)).collect();
            for (rank, place) in ranks.values_mut().zip(0..) {
                *rank = place;
            }
            ranks
        }
        _ => BTreeMap::new(),
    };
    let is_figure = !matches!(sort, Sort::Peer | Sort::Node | Sort::Path | Sort::Protocol);
    let mut places: Vec<(u64, u128, u16, u32)> = (0..)
        .zip(rows)
        .map(|(index, (key, row))| {
            let name = || names.of(key.peer.to_ip());
            let value = match sort {
                Sort::Peer => Some(0),
                Sort::Node => name().and_then(|name| ranks.get(name).copied()),
                Sort::Path => Some(key.path.into()),
                Sort::Protocol => Some(protocol_rank(key.protocol).into()),
                _ => figure(row.borrow(), sort),
            };
            let rank = match value {
                None => u64::MAX,
                // One less than the largest: that is what is not known.
                Some(value) if is_figure != is_reversed => u64::MAX - 1 - value.min(u64::MAX - 1),
                Some(value) => value,
            };
            let path = u16::from_be_bytes([key.path, protocol_rank(key.protocol)]);
            (rank, address_rank(key), path, index)
        })
        .collect();
    places.sort_unstable();
    if sort == Sort::Peer && is_reversed {
        places.reverse();
    }
    places.into_iter().map(|(_, _, _, index)| index).collect()
}

/// IPv4 addresses before those of IPv6.
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

/// Probes before what is not probed.
fn protocol_rank(protocol: u8) -> u8 {
    use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, PROTOCOL_TCP};
    match protocol {
        PROTOCOL_ICMP => 0,
        PROTOCOL_HTTP => 1,
        PROTOCOL_TCP => 2,
        _ => 3,
    }
}

fn figure(row: &RttRow, sort: Sort) -> Option<u64> {
    let known = |ns| (row.samples > 0).then_some(ns);
    let millionths = |ratio: f64| (ratio * 1e6) as u64;
    match sort {
        Sort::Peer | Sort::Node | Sort::Path | Sort::Protocol => None,
        Sort::Samples => Some(row.samples),
        Sort::Loss => {
            let probes = row.samples + row.lost;
            (probes > 0).then(|| millionths(row.lost as f64 / probes as f64))
        }
        Sort::Last => known(row.last_ns),
        Sort::Min => known(row.min_ns),
        Sort::Mean => row.mean_ns(),
        Sort::P50 => row.percentile_ns(50.0),
        Sort::P90 => row.percentile_ns(90.0),
        Sort::P99 => row.percentile_ns(99.0),
        Sort::Max => known(row.max_ns),
        Sort::Jitter => known(row.jitter_ns),
        Sort::Network => row.remote.network_share().map(millionths),
    }
}

#[cfg(test)]
mod tests {
    use super::super::select::tests::{key, names};
    use super::*;
    use health_common::probe::Path;
    use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, SOURCE_KERNEL};

    fn rows() -> Vec<(RttKey, RttRow)> {
        let row = |ns: &[u64], lost| {
            let mut row = RttRow::EMPTY;
            for (&ns, at) in ns.iter().zip(0..) {
                row.record(ns, at, 0, SOURCE_KERNEL);
            }
            row.lost = lost;
            row
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
        let order = |sort, is_reversed| sorted(&rows(), sort, is_reversed, &names());
        assert_eq!(order(Sort::Peer, false), [3, 2, 1, 0]);
        assert_eq!(order(Sort::Peer, true), [0, 1, 2, 3]);
        assert_eq!(order(Sort::P99, false), [3, 1, 2, 0]);
        assert_eq!(order(Sort::P99, true), [2, 1, 3, 0]);
        assert_eq!(order(Sort::Loss, false), [1, 3, 2, 0]);
        assert_eq!(order(Sort::Samples, false), [2, 3, 1, 0]);
        assert_eq!(order(Sort::Node, false), [3, 2, 0, 1]);
        assert_eq!(order(Sort::Protocol, false), [3, 1, 0, 2]);
    }
}
