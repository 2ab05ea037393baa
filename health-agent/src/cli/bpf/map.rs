//! `health-agent bpf map`: the pinned maps themselves.

use std::fmt::Display;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::entry::{Entry, lines};
use super::flow::FlowKey;
use super::layout::{DatapathConfig, Hex, Index, Inflight, InflightKey, decode};
use super::{ct, endpoint, metrics, nat, rtt};
use crate::cli::output::{Format, NONE, OutputArgs, table};
use crate::datapath::dump::{MapInfo, Pinned};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf map list
  health-agent bpf map dump HEALTH_CONFIG";

const LIST_EXAMPLES: &str = "\
Examples:
  health-agent bpf map list
  health-agent bpf map list -o json | jq 'map(.\"memory-bytes\") | add'";

const DUMP_EXAMPLES: &str = "\
Examples:
  health-agent bpf map dump HEALTH_CONFIG
  health-agent bpf map dump HEALTH_INFLIGHT -o jsonl";

/// Commands of `bpf map`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum MapCommand {
    /// List all maps
    #[command(after_help = LIST_EXAMPLES)]
    List(OutputArgs),
    /// Show all entries of a map, in hexadecimal where the layout is not known
    #[command(after_help = DUMP_EXAMPLES)]
    Dump(DumpArgs),
}

/// Flags of `bpf map dump`.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// Name of the map; `bpf map list` shows those there are
    name: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl MapCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        match self {
            Self::List(args) => {
                let mut rows: Vec<MapRow> = pinned.maps()?.into_iter().map(MapRow::from).collect();
                rows.sort_by(|a, b| a.name.cmp(&b.name));
                args.output.print_rows(&rows, maps_table)
            }
            Self::Dump(args) => dump(&args.name, args.output.output, pinned),
        }
    }
}

fn dump(name: &str, format: Format, pinned: &Pinned) -> anyhow::Result<()> {
    match name {
        "HEALTH_CT4" => print(
            format,
            only(ct::entries(pinned.conntrack()?), IpAddr::is_ipv4),
        ),
        "HEALTH_CT6" => print(
            format,
            only(ct::entries(pinned.conntrack()?), IpAddr::is_ipv6),
        ),
        "HEALTH_NAT4" => {
            let entries = nat::entries(pinned.nat()?, nat::monotonic_ns()?);
            print(format, only(entries, IpAddr::is_ipv4))
        }
        "HEALTH_NAT6" => {
            let entries = nat::entries(pinned.nat()?, nat::monotonic_ns()?);
            print(format, only(entries, IpAddr::is_ipv6))
        }
        "HEALTH_RTT" => print(format, rtt::entries(pinned.rtt()?)),
        "HEALTH_ENDPOINTS" => print(format, endpoint::entries(pinned.endpoints()?)),
        "HEALTH_METRICS" => print(format, metrics::entries(pinned.metrics()?)),
        _ => {
            let raw = pinned.raw(name)?;
            match name {
                "HEALTH_INFLIGHT" => {
                    if let Some(entries) = decode(&raw, InflightKey::decode, Inflight::decode) {
                        return print(format, entries);
                    }
                }
                "HEALTH_CONFIG" => {
                    if let Some(entries) = decode(&raw, Index::decode, DatapathConfig::decode) {
                        return print(format, entries);
                    }
                }
                _ => {}
            }
            print(format, in_hex(&raw))
        }
    }
}

/// Both families of flows come from one listing.
fn only<V>(
    entries: Vec<Entry<FlowKey, V>>,
    family: impl Fn(&IpAddr) -> bool,
) -> Vec<Entry<FlowKey, V>> {
    entries
        .into_iter()
        .filter(|entry| family(&entry.key.source))
        .collect()
}

fn in_hex(entries: &[(Vec<u8>, Vec<u8>)]) -> Vec<Entry<Hex, Hex>> {
    entries
        .iter()
        .map(|(key, value)| Entry {
            key: Hex::from(key.as_slice()),
            value: Hex::from(value.as_slice()),
        })
        .collect()
}

fn print<K, V>(format: Format, entries: Vec<Entry<K, V>>) -> anyhow::Result<()>
where
    K: Display + Serialize,
    V: Display + Serialize,
{
    format.print_rows(&entries, lines)
}

/// A map as JSON shows it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct MapRow {
    name: String,
    id: u32,
    kind: String,
    key_bytes: u32,
    value_bytes: u32,
    max_entries: u32,
    entries: Option<u64>,
    memory_bytes: u64,
    pin: PathBuf,
}

impl From<MapInfo> for MapRow {
    fn from(info: MapInfo) -> Self {
        Self {
            name: info.name,
            id: info.id,
            kind: info.kind,
            key_bytes: info.key_size,
            value_bytes: info.value_size,
            max_entries: info.max_entries,
            entries: info.entries,
            memory_bytes: info.memory_bytes,
            pin: info.pin,
        }
    }
}

fn maps_table(rows: &[MapRow]) -> String {
    let rows = rows.iter().map(|row| {
        [
            row.name.clone(),
            row.id.to_string(),
            row.kind.clone(),
            row.key_bytes.to_string(),
            row.value_bytes.to_string(),
            row.entries
                .map_or_else(|| NONE.to_owned(), |n| n.to_string()),
            row.max_entries.to_string(),
            row.memory_bytes.to_string(),
        ]
    });
    table(
        [
            "NAME",
            "ID",
            "KIND",
            "KEY BYTES",
            "VALUE BYTES",
            "ENTRIES",
            "MAX ENTRIES",
            "MEMORY BYTES",
        ],
        rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::dump::Flow;
    use health_common::ct::CtEntry;

    #[test]
    fn maps_are_listed() {
        let info = MapInfo {
            name: "HEALTH_CONFIG".into(),
            id: 12,
            kind: "array".into(),
            key_size: 4,
            value_size: 56,
            max_entries: 1,
            entries: None,
            memory_bytes: 344,
            pin: "/sys/fs/bpf/health/default/HEALTH_CONFIG".into(),
        };
        assert_eq!(
            maps_table(&[info.into()]),
            "\
NAME            ID   KIND    KEY BYTES   VALUE BYTES   ENTRIES   MAX ENTRIES   MEMORY BYTES
HEALTH_CONFIG   12   array   4           56            -         1             344
"
        );
    }

    #[test]
    fn a_dump_takes_a_line_an_entry_and_keeps_families_apart() {
        let flow = |source: &str, destination: &str| Flow {
            protocol: 1,
            inbound: true,
            source: source.parse().unwrap(),
            source_port: 1,
            destination: destination.parse().unwrap(),
            destination_port: 0,
        };
        let flows = || {
            ct::entries(vec![
                (flow("172.30.0.2", "10.244.1.7"), CtEntry::default()),
                (flow("fd00:30::2", "fd00:10:244:1::7"), CtEntry::default()),
            ])
        };
        let text = lines(&only(flows(), IpAddr::is_ipv4));
        assert!(text.starts_with("ICMP IN 172.30.0.2:1 -> 10.244.1.7:0: expires=0 "));
        assert_eq!(text.lines().count(), 1);
        let text = lines(&only(flows(), IpAddr::is_ipv6));
        assert!(text.starts_with("ICMP IN [fd00:30::2]:1 -> "), "{text}");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn unknown_layouts_are_hexadecimal() {
        let entries = in_hex(&[(vec![1, 2], vec![0xff])]);
        assert_eq!(lines(&entries), "0102: ff\n");
        assert_eq!(
            serde_json::to_string(&entries).unwrap(),
            r#"[{"key":"0102","value":"ff"}]"#
        );
    }
}
