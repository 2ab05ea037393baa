//! `health-agent bpf rtt`: round-trip times by peer.

use std::fmt;
use std::net::IpAddr;

use clap::Subcommand;
use health_common::probe::Path;
use health_common::rtt::{
    PROTOCOL_HTTP, PROTOCOL_ICMP, RttKey, RttRow, SOURCE_KERNEL, SOURCE_SOCKET,
};
use serde::Serialize;

use super::entry::{Entry, Row};
use crate::api::types::go_duration;
use crate::cli::output::{NONE, OutputArgs, table};
use crate::datapath::dump::Pinned;

const EXAMPLES: &str = "\
Examples:
  health-agent bpf rtt list
  health-agent bpf rtt list -o json | jq '.[] | {peer, path, \"p99-ns\"}'";

/// Commands of `bpf rtt`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum RttCommand {
    /// List the round-trip times along each path
    #[command(after_help = EXAMPLES)]
    List(OutputArgs),
}

impl RttCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let rows: Vec<Row<_, _>> = entries(pinned.rtt()?).into_iter().map(Row::from).collect();
        args.output.print_rows(&rows, rtt_table)
    }
}

/// Entries as they are shown, sorted by peer.
pub(super) fn entries(rows: Vec<(RttKey, RttRow)>) -> Vec<Entry<RttPath, RttStatistics>> {
    let mut entries: Vec<_> = rows
        .iter()
        .map(|(key, row)| Entry {
            key: RttPath::from(key),
            value: RttStatistics::from(row),
        })
        .collect();
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    entries
}

fn rtt_table(rows: &[Row<RttPath, RttStatistics>]) -> String {
    let rows = rows.iter().map(|Row { key, value }| {
        [
            key.peer.to_string(),
            key.path.to_owned(),
            key.protocol.to_owned(),
            value.source.unwrap_or(NONE).to_owned(),
            value.samples.to_string(),
            value.lost.to_string(),
            duration(value.last_ns),
            duration(value.min_ns),
            duration(value.mean_ns),
            duration(value.p50_ns),
            duration(value.p99_ns),
            duration(value.max_ns),
            duration(value.jitter_ns),
            value
                .network_share
                .map_or_else(|| NONE.to_owned(), |share| format!("{:.0}%", share * 100.0)),
        ]
    });
    table(
        [
            "PEER", "PATH", "PROTOCOL", "SOURCE", "SAMPLES", "LOST", "LAST", "MIN", "MEAN", "P50",
            "P99", "MAX", "JITTER", "NETWORK",
        ],
        rows,
    )
}

fn duration(ns: Option<u64>) -> String {
    ns.map_or_else(
        || NONE.to_owned(),
        |ns| go_duration(ns.try_into().unwrap_or(i64::MAX)),
    )
}

/// What a row of `HEALTH_RTT` is about.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct RttPath {
    peer: IpAddr,
    path: &'static str,
    protocol: &'static str,
}

impl From<&RttKey> for RttPath {
    fn from(key: &RttKey) -> Self {
        Self {
            peer: key.peer.to_ip(),
            path: path_name(key.path),
            protocol: match key.protocol {
                PROTOCOL_ICMP => "ICMP",
                PROTOCOL_HTTP => "HTTP",
                _ => "unknown",
            },
        }
    }
}

impl fmt::Display for RttPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.peer, self.path, self.protocol)
    }
}

/// The name of a [`Path`] that a map holds as a byte.
pub(super) fn path_name(path: u8) -> &'static str {
    match Path::from_u8(path) {
        Some(Path::Host) => "host",
        Some(Path::Endpoint) => "endpoint",
        None => "unknown",
    }
}

/// What a row of `HEALTH_RTT` says. The times are nanoseconds, and absent without samples.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RttStatistics {
    source: Option<&'static str>,
    samples: u64,
    lost: u64,
    late: u64,
    duplicates: u64,
    received_host: u64,
    received_endpoint: u64,
    last_ns: Option<u64>,
    min_ns: Option<u64>,
    mean_ns: Option<u64>,
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    max_ns: Option<u64>,
    smoothed_ns: Option<u64>,
    jitter_ns: Option<u64>,
    remote_samples: u64,
    remote_last_ns: Option<u64>,
    remote_smoothed_ns: Option<u64>,
    remote_max_ns: Option<u64>,
    /// The part of the round trips that was not spent in the peer's host, 0 to 1.
    network_share: Option<f64>,
    one_way_samples: u64,
    forward_last_ns: Option<i64>,
    forward_min_ns: Option<i64>,
    forward_smoothed_ns: Option<i64>,
    back_last_ns: Option<i64>,
    back_min_ns: Option<i64>,
    back_smoothed_ns: Option<i64>,
}

impl From<&RttRow> for RttStatistics {
    fn from(row: &RttRow) -> Self {
        let known = |ns| (row.samples > 0).then_some(ns);
        let remote = |ns| (row.remote.samples > 0).then_some(ns);
        let one_way = |ns| (row.one_way.samples > 0).then_some(ns);
        let (forward, back) = (row.one_way.forward, row.one_way.back);
        Self {
            source: match row.source {
                SOURCE_KERNEL => Some("kernel"),
                SOURCE_SOCKET => Some("socket"),
                _ => None,
            },
            samples: row.samples,
            lost: row.lost,
            late: row.late,
            duplicates: row.duplicates,
            received_host: row.received_host,
            received_endpoint: row.received_endpoint,
            last_ns: known(row.last_ns),
            min_ns: known(row.min_ns),
            mean_ns: row.mean_ns(),
            p50_ns: row.percentile_ns(50.0),
            p99_ns: row.percentile_ns(99.0),
            max_ns: known(row.max_ns),
            smoothed_ns: known(row.smoothed_ns),
            jitter_ns: known(row.jitter_ns),
            remote_samples: row.remote.samples,
            remote_last_ns: remote(row.remote.last_ns),
            remote_smoothed_ns: remote(row.remote.smoothed_ns),
            remote_max_ns: remote(row.remote.max_ns),
            network_share: row.remote.network_share(),
            one_way_samples: row.one_way.samples,
            forward_last_ns: one_way(forward.last_ns),
            forward_min_ns: one_way(forward.min_ns),
            forward_smoothed_ns: one_way(forward.smoothed_ns),
            back_last_ns: one_way(back.last_ns),
            back_min_ns: one_way(back.min_ns),
            back_smoothed_ns: one_way(back.smoothed_ns),
        }
    }
}

impl fmt::Display for RttStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "samples={} lost={} min={} mean={} p50={} p99={} max={} jitter={}",
            self.samples,
            self.lost,
            duration(self.min_ns),
            duration(self.mean_ns),
            duration(self.p50_ns),
            duration(self.p99_ns),
            duration(self.max_ns),
            duration(self.jitter_ns)
        )
    }
}

#[cfg(test)]
mod tests {
    use health_common::rtt::Reply;

    use super::*;

    fn key(peer: &str, path: Path, protocol: u8) -> RttKey {
        let peer: IpAddr = peer.parse().unwrap();
        RttKey {
            peer: peer.into(),
            path: path as u8,
            protocol,
            pad: 0,
        }
    }

    #[test]
    fn rows_are_sorted_by_peer_and_gaps_are_marked() {
        let mut measured = RttRow::EMPTY;
        measured.record(20_000, 1, 1, SOURCE_KERNEL);
        let reply = Reply {
            rtt_ns: 22_000,
            remote_ns: 5_500,
            ..Reply::default()
        };
        measured.record_reply(&reply, 2, 2);
        let mut silent = RttRow::EMPTY;
        silent.lost = 3;
        let rows: Vec<Row<_, _>> = entries(vec![
            (key("172.30.0.10", Path::Host, PROTOCOL_HTTP), silent),
            (key("172.30.0.2", Path::Host, PROTOCOL_ICMP), measured),
        ])
        .into_iter()
        .map(Row::from)
        .collect();
        assert_eq!(
            rtt_table(&rows),
            "\
PEER          PATH   PROTOCOL   SOURCE   SAMPLES   LOST   LAST   MIN    MEAN   P50    P99        MAX    JITTER   NETWORK
172.30.0.2    host   ICMP       kernel   2         0      22µs   20µs   21µs   20µs   21.504µs   22µs   125ns    75%
172.30.0.10   host   HTTP       -        0         3      -      -      -      -      -          -      -        -
"
        );
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[0]["mean-ns"], 21_000);
        assert_eq!(json[1]["p50-ns"], serde_json::Value::Null);
        assert_eq!(json[1]["lost"], 3);
    }
}
