//! `health-agent bpf nat`: address translation.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use clap::{ArgGroup, Args, Subcommand};
use health_datapath::dump::{Flow, Pinned, Translation};
use health_net::clock;
use serde::Serialize;

use super::entry::{Entry, Row};
use super::filter::FlowFilter;
use super::flow::{Direction, FlowKey};
use super::{address, flush, stream};
use crate::output::{OutputArgs, print};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf nat list --proto tcp
  health-agent bpf nat flush --src 10.244.1.9";

const LIST_EXAMPLES: &str = "\
Output:
  Entries are listed while they are read, unordered: pipe them through sort. An entry that is
  created or deleted meanwhile may be listed or not; every other entry is listed once. Created is
  the age of an entry

Examples:
  health-agent bpf nat list
  health-agent bpf nat list --src 10.244.0.0/16 --count
  health-agent bpf nat list -o jsonl";

const FLUSH_EXAMPLES: &str = "\
Examples:
  health-agent bpf nat flush --all
  health-agent bpf nat flush --proto icmp --dst 172.30.0.0/24";

/// Commands of `bpf nat`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum NatCommand {
    /// List the translations, two entries each
    #[command(after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Delete translations with both of their entries
    #[command(after_help = FLUSH_EXAMPLES)]
    Flush(FlushArgs),
}

/// Flags of `bpf nat list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    filter: FlowFilter,
    /// Print only the number of entries
    #[arg(long)]
    count: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// Flags of `bpf nat flush`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("what").args(["all"]).args(FlowFilter::FLAGS).multiple(true).required(true))]
pub struct FlushArgs {
    /// Delete all translations
    #[arg(long, conflicts_with_all = FlowFilter::FLAGS)]
    all: bool,
    #[command(flatten)]
    filter: FlowFilter,
}

impl NatCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        match self {
            Self::List(args) => args.execute(pinned),
            Self::Flush(args) => flush::print(&pinned.flush_nat(|flow, _| args.filter.has(flow))?),
        }
    }
}

impl ListArgs {
    fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let maps = pinned.nat_rows()?;
        if self.count {
            let mut count = 0_u64;
            for rows in maps {
                rows.each(|(flow, _)| count += u64::from(self.filter.has(&flow)))?;
            }
            return print(|out| writeln!(out, "{count}"));
        }
        let now_ns = clock::now_ns();
        stream::print(self.output.output, &maps, |(flow, to)| {
            let is_wanted = self.filter.has(&flow);
            is_wanted.then(|| Row::from(entry((flow, to), now_ns)))
        })
    }
}

/// Converts an entry for display at `now_ns`.
pub(super) fn entry((flow, to): (Flow, Translation), now_ns: u64) -> Entry<FlowKey, NatValue> {
    let key = FlowKey::from(&flow);
    let value = NatValue {
        direction: key.direction,
        address: to.addr,
        port: to.port,
        created_ns: to.created_ns,
        age_ns: now_ns.saturating_sub(to.created_ns),
        host_local: to.host_local,
    };
    Entry { key, value }
}

/// The translation of a tuple.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct NatValue {
    // Already in the key.
    #[serde(skip)]
    direction: Direction,
    #[serde(rename = "translated-address", serialize_with = "address::serialize")]
    address: IpAddr,
    #[serde(rename = "translated-port")]
    port: u16,
    /// In `CLOCK_MONOTONIC`.
    created_ns: u64,
    age_ns: u64,
    host_local: bool,
}

/// The format of `cilium bpf nat list`.
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
    use crate::bpf::entry::lines;

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
        let rows: Vec<Row<_, _>> = [
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
        ]
        .map(|translation| entry(translation, 17_900_000_000).into())
        .into();
        assert_eq!(
            lines(&rows),
            "\
TCP IN 1.1.1.1:80 -> 172.30.0.1:40000 XLATE_DST 10.244.1.9:4000 Created=12sec HostLocal=0
TCP OUT 10.244.1.9:4000 -> 1.1.1.1:80 XLATE_SRC 172.30.0.1:40000 Created=12sec HostLocal=0
TCP OUT 172.30.0.1:5000 -> 1.1.1.1:80 XLATE_SRC 172.30.0.1:5000 Created=12sec HostLocal=1
"
        );
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[1]["direction"], "out");
        assert_eq!(json[1]["translated-port"], 40_000);
        assert_eq!(json[1]["age-ns"], 12_900_000_000_u64);
    }
}
