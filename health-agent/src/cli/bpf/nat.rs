//! `health-agent bpf nat`: address translation.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use clap::Subcommand;
use serde::Serialize;

use super::entry::{Entry, Row, lines};
use super::flow::{Direction, FlowKey};
use crate::cli::output::OutputArgs;
use crate::datapath::clock;
use crate::datapath::dump::{Flow, Pinned, Translation};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf nat list
  health-agent bpf nat list -o jsonl";

/// Commands of `bpf nat`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum NatCommand {
    /// List the translations; the age of each stands under Created
    #[command(after_help = EXAMPLES)]
    List(OutputArgs),
}

impl NatCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let rows: Vec<Row<_, _>> = entries(pinned.nat()?, clock::now_ns())
            .into_iter()
            .map(Row::from)
            .collect();
        args.output.print_rows(&rows, lines)
    }
}

/// Entries as they are shown at `now_ns`, sorted.
pub(super) fn entries(
    translations: Vec<(Flow, Translation)>,
    now_ns: u64,
) -> Vec<Entry<FlowKey, NatValue>> {
    let mut entries: Vec<_> = translations
        .into_iter()
        .map(|(flow, to)| {
            let key = FlowKey::from(flow);
            let value = NatValue {
                direction: key.direction,
                address: to.addr,
                port: to.port,
                created_ns: to.created_ns,
                age_ns: now_ns.saturating_sub(to.created_ns),
                host_local: to.host_local,
            };
            Entry { key, value }
        })
        .collect();
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    entries
}

/// What a tuple is translated to.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct NatValue {
    // The key tells it.
    #[serde(skip)]
    direction: Direction,
    #[serde(rename = "translated-address")]
    address: IpAddr,
    #[serde(rename = "translated-port")]
    port: u16,
    /// `CLOCK_MONOTONIC`.
    created_ns: u64,
    age_ns: u64,
    host_local: bool,
}

/// The line of `cilium bpf nat list`.
impl fmt::Display for NatValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rewritten = match self.direction {
            Direction::Out => "XLATE_SRC",
            Direction::In => "XLATE_DST",
        };
        write!(
            f,
            "{rewritten} {} Created={}sec HostLocal={}",
            SocketAddr::new(self.address, self.port),
            self.age_ns / 1_000_000_000,
            u8::from(self.host_local)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_entries_of_a_translation_are_listed_as_cilium_does() {
        let flow = |inbound, source: &str, destination: &str, source_port, destination_port| Flow {
            protocol: 6,
            inbound,
            source: source.parse().unwrap(),
            source_port,
            destination: destination.parse().unwrap(),
            destination_port,
        };
        let to = |addr: &str, port, host_local| Translation {
            addr: addr.parse().unwrap(),
            port,
            created_ns: 5_000_000_000,
            host_local,
        };
        let entries = entries(
            vec![
                (
                    flow(true, "1.1.1.1", "172.30.0.1", 80, 40_000),
                    to("10.244.1.9", 4000, false),
                ),
                (
                    flow(false, "10.244.1.9", "1.1.1.1", 4000, 80),
                    to("172.30.0.1", 40_000, false),
                ),
                (
                    flow(false, "172.30.0.1", "1.1.1.1", 5000, 80),
                    to("172.30.0.1", 5000, true),
                ),
            ],
            17_900_000_000,
        );
        let rows: Vec<Row<_, _>> = entries.into_iter().map(Row::from).collect();
        assert_eq!(
            lines(&rows),
            "\
TCP OUT 10.244.1.9:4000 -> 1.1.1.1:80 XLATE_SRC 172.30.0.1:40000 Created=12sec HostLocal=0
TCP OUT 172.30.0.1:5000 -> 1.1.1.1:80 XLATE_SRC 172.30.0.1:5000 Created=12sec HostLocal=1
TCP IN 1.1.1.1:80 -> 172.30.0.1:40000 XLATE_DST 10.244.1.9:4000 Created=12sec HostLocal=0
"
        );
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[0]["direction"], "out");
        assert_eq!(json[0]["translated-port"], 40_000);
        assert_eq!(json[0]["age-ns"], 12_900_000_000_u64);
    }
}
