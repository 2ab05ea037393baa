//! `health-agent bpf metrics`: packet counters.

use std::borrow::Cow;
use std::fmt;

use clap::Subcommand;
use health_common::metrics::{Direction, Reason};
use health_datapath::dump::{MetricRow, Pinned};
use serde::Serialize;

use super::entry::{Entry, Row};
use crate::output::{OutputArgs, table};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf metrics list
  health-agent bpf metrics list -o json | jq '.[] | select(.drop)'";

/// Commands of `bpf metrics`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum MetricsCommand {
    /// List packet counters by reason and direction
    #[command(after_help = EXAMPLES)]
    List(OutputArgs),
}

impl MetricsCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let rows: Vec<Row<_, _>> = entries(pinned.metrics()?)
            .into_iter()
            .map(Row::from)
            .collect();
        args.output.print_rows(&rows, metrics_table)
    }
}

/// Converts entries for display, sorted by reason.
pub(super) fn entries(mut rows: Vec<MetricRow>) -> Vec<Entry<CounterKey, CounterValue>> {
    rows.sort_by_key(|row| (row.reason, row.direction));
    rows.into_iter()
        .map(|row| Entry {
            key: CounterKey::new(row.reason, row.direction),
            value: CounterValue {
                packets: row.packets,
                bytes: row.bytes,
            },
        })
        .collect()
}

fn metrics_table(rows: &[Row<CounterKey, CounterValue>]) -> String {
    let rows = rows.iter().map(|Row { key, value }| {
        [
            key.reason.to_string(),
            key.direction.to_string(),
            value.packets.to_string(),
            value.bytes.to_string(),
        ]
    });
    table(["REASON", "DIRECTION", "PACKETS", "BYTES"], rows)
}

/// The key of a counter.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct CounterKey {
    reason: Cow<'static, str>,
    reason_code: u8,
    drop: bool,
    direction: Cow<'static, str>,
}

impl CounterKey {
    fn new(code: u8, direction: u8) -> Self {
        let reason = Reason::ALL.into_iter().find(|&reason| reason as u8 == code);
        Self {
            reason: reason.map_or_else(
                || format!("Unknown ({code})").into(),
                |reason| reason.text().into(),
            ),
            reason_code: code,
            // Like `Reason::is_drop`, but also covers the codes of other versions.
            drop: code >= 128,
            direction: match direction {
                d if d == Direction::Ingress as u8 => "INGRESS".into(),
                d if d == Direction::Egress as u8 => "EGRESS".into(),
                other => format!("UNKNOWN ({other})").into(),
            },
        }
    }
}

impl fmt::Display for CounterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.reason, self.direction)
    }
}

/// The counts, summed over all CPUs.
#[derive(Debug, Serialize)]
pub(super) struct CounterValue {
    packets: u64,
    bytes: u64,
}

impl fmt::Display for CounterValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "packets={} bytes={}", self.packets, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_named_and_sorted() {
        let row = |reason, direction, packets, bytes| MetricRow {
            reason,
            direction,
            packets,
            bytes,
        };
        let rows: Vec<Row<_, _>> = entries(vec![
            row(200, 3, 1, 60),
            row(Reason::InvalidSource as u8, 1, 2, 120),
            row(Reason::EchoAnswered as u8, 2, 10, 980),
        ])
        .into_iter()
        .map(Row::from)
        .collect();
        assert_eq!(
            metrics_table(&rows),
            "\
REASON              DIRECTION     PACKETS   BYTES
Echo answered       EGRESS        10        980
Invalid source IP   INGRESS       2         120
Unknown (200)       UNKNOWN (3)   1         60
"
        );
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[0]["drop"], false);
        assert_eq!(json[1]["drop"], true);
        assert_eq!(json[1]["reason-code"], 132);
    }
}
