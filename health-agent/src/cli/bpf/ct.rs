//! `health-agent bpf ct`: connection tracking.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use anyhow::bail;
use clap::{Args, Subcommand};
use health_common::ct::CtEntry;
use serde::Serialize;

use super::entry::{Entry, Row, lines};
use super::flow::FlowKey;
use crate::cli::output::OutputArgs;
use crate::datapath::dump::{Flow, Pinned};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf ct list
  health-agent bpf ct list 1017
  health-agent bpf ct list global -o jsonl";

/// Commands of `bpf ct`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum CtCommand {
    /// List the flows that are tracked
    #[command(after_help = EXAMPLES)]
    List(ListArgs),
}

/// Flags of `bpf ct list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// `global` for all flows, or the id of the endpoint whose flows are wanted
    #[arg(default_value = "global")]
    scope: Scope,
    #[command(flatten)]
    output: OutputArgs,
}

/// Whose flows are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    Global,
    Endpoint(u16),
}

impl FromStr for Scope {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse() {
            Ok(id @ 1..=4095) => Ok(Self::Endpoint(id)),
            _ if text == "global" => Ok(Self::Global),
            _ => Err("give `global` or an endpoint id from 1 to 4095"),
        }
    }
}

impl CtCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let mut flows = entries(pinned.conntrack()?);
        if let Scope::Endpoint(id) = args.scope {
            let addresses = addresses_of(id, pinned)?;
            flows.retain(|flow| touches(&flow.key, &addresses));
        }
        let rows: Vec<Row<_, _>> = flows.into_iter().map(Row::from).collect();
        args.output.output.print_rows(&rows, lines)
    }
}

fn addresses_of(id: u16, pinned: &Pinned) -> anyhow::Result<BTreeSet<IpAddr>> {
    let addresses: BTreeSet<IpAddr> = pinned
        .endpoints()?
        .into_iter()
        .filter(|(_, endpoint)| endpoint.id == id)
        .map(|(address, _)| address)
        .collect();
    if addresses.is_empty() {
        bail!(
            "the datapath knows no endpoint {id}; `health-agent bpf endpoint list` shows those it \
             knows"
        );
    }
    Ok(addresses)
}

fn touches(flow: &FlowKey, addresses: &BTreeSet<IpAddr>) -> bool {
    addresses.contains(&flow.source) || addresses.contains(&flow.destination)
}

/// Entries as they are shown, sorted.
pub(super) fn entries(flows: Vec<(Flow, CtEntry)>) -> Vec<Entry<FlowKey, CtValue>> {
    let mut entries: Vec<_> = flows
        .into_iter()
        .map(|(flow, entry)| Entry {
            key: FlowKey::from(flow),
            value: CtValue::from(entry),
        })
        .collect();
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    entries
}

/// State of a flow. Times are seconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct CtValue {
    expires_s: u32,
    rx_packets: u64,
    rx_bytes: u64,
    rx_flags_seen: u8,
    last_rx_s: u32,
    tx_packets: u64,
    tx_bytes: u64,
    tx_flags_seen: u8,
    last_tx_s: u32,
    flags: u16,
    source_identity: u32,
    ifindex: u32,
}

impl From<CtEntry> for CtValue {
    fn from(entry: CtEntry) -> Self {
        Self {
            expires_s: entry.expires,
            rx_packets: entry.rx_packets,
            rx_bytes: entry.rx_bytes,
            rx_flags_seen: entry.rx_flags_seen,
            last_rx_s: entry.last_rx,
            tx_packets: entry.tx_packets,
            tx_bytes: entry.tx_bytes,
            tx_flags_seen: entry.tx_flags_seen,
            last_tx_s: entry.last_tx,
            flags: entry.flags,
            source_identity: entry.source_identity,
            ifindex: entry.ifindex,
        }
    }
}

/// The line of `cilium bpf ct list`. No flag has a name, and no flow is translated back, yet.
impl fmt::Display for CtValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expires={} RxPackets={} RxBytes={} RxFlagsSeen=0x{:02x} LastRxReport={} \
             TxPackets={} TxBytes={} TxFlagsSeen=0x{:02x} LastTxReport={} Flags=0x{:04x} [ ] \
             RevNAT=0 SourceSecurityID={} IfIndex={}",
            self.expires_s,
            self.rx_packets,
            self.rx_bytes,
            self.rx_flags_seen,
            self.last_rx_s,
            self.tx_packets,
            self.tx_bytes,
            self.tx_flags_seen,
            self.last_tx_s,
            self.flags,
            self.source_identity,
            self.ifindex
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<(Flow, CtEntry)> {
        let flow = |source: &str, source_port, inbound| Flow {
            protocol: 1,
            inbound,
            source: source.parse().unwrap(),
            source_port,
            destination: "10.244.1.7".parse().unwrap(),
            destination_port: 0,
        };
        let entry = CtEntry {
            rx_packets: 1,
            rx_bytes: 50,
            tx_packets: 1,
            tx_bytes: 50,
            expires: 1_987_899,
            last_rx: 1_987_839,
            last_tx: 1_987_839,
            source_identity: 1,
            ifindex: 5,
            ..CtEntry::default()
        };
        vec![
            (flow("172.30.0.10", 7, true), entry),
            (flow("172.30.0.2", 1234, true), entry),
            (flow("172.30.0.2", 9, false), entry),
        ]
    }

    #[test]
    fn flows_are_listed_as_cilium_does_and_sorted() {
        let rows: Vec<Row<_, _>> = entries(rows()).into_iter().map(Row::from).collect();
        let tail = "expires=1987899 RxPackets=1 RxBytes=50 RxFlagsSeen=0x00 LastRxReport=1987839 \
                    TxPackets=1 TxBytes=50 TxFlagsSeen=0x00 LastTxReport=1987839 Flags=0x0000 [ ] \
                    RevNAT=0 SourceSecurityID=1 IfIndex=5";
        assert_eq!(
            lines(&rows),
            format!(
                "ICMP OUT 172.30.0.2:9 -> 10.244.1.7:0 {tail}\n\
                 ICMP IN 172.30.0.2:1234 -> 10.244.1.7:0 {tail}\n\
                 ICMP IN 172.30.0.10:7 -> 10.244.1.7:0 {tail}\n"
            )
        );
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[1]["source-port"], 1234);
        assert_eq!(json[1]["expires-s"], 1_987_899);
    }

    #[test]
    fn an_endpoints_flows_are_those_from_and_to_it() {
        let flows = entries(rows());
        let of = |ip: &str| {
            let addresses = BTreeSet::from([ip.parse().unwrap()]);
            flows.iter().filter(|f| touches(&f.key, &addresses)).count()
        };
        assert_eq!(of("10.244.1.7"), 3);
        assert_eq!(of("172.30.0.10"), 1);
        assert_eq!(of("10.244.1.8"), 0);
    }

    #[test]
    fn a_scope_is_global_or_an_endpoint() {
        assert_eq!("global".parse(), Ok(Scope::Global));
        assert_eq!("4095".parse(), Ok(Scope::Endpoint(4095)));
        for bad in ["0", "4096", "-1", "all", ""] {
            assert!(bad.parse::<Scope>().is_err(), "{bad}");
        }
    }
}
