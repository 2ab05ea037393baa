//! `health-agent bpf map`: the pinned maps themselves.

use std::fmt::Display;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::entry::{Entry, lines};
use super::{clock, ct, endpoint, inflight, metrics, nat, rtt, settings, stream};
use crate::cli::output::{Format, NONE, OutputArgs, table};
use crate::datapath::dump::{DumpError, MapInfo, Pinned};
use crate::datapath::layout;

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
            Self::Dump(args) => Dump {
                name: &args.name,
                format: args.output.output,
                pinned,
            }
            .execute(),
        }
    }
}

/// One map to show.
struct Dump<'a> {
    name: &'a str,
    format: Format,
    pinned: &'a Pinned,
}

impl Dump<'_> {
    fn execute(&self) -> anyhow::Result<()> {
        // Patterns must be paths.
        const CT4: &str = layout::CT4.name;
        const CT6: &str = layout::CT6.name;
        const NAT4: &str = layout::NAT4.name;
        const NAT6: &str = layout::NAT6.name;
        const RTT: &str = layout::RTT.name;
        const INFLIGHT: &str = layout::INFLIGHT.name;
        const ENDPOINTS: &str = layout::ENDPOINTS.name;
        const METRICS: &str = layout::METRICS.name;
        const CONFIG: &str = layout::CONFIG.name;

        let pinned = self.pinned;
        match self.name {
            CT4 | CT6 => {
                let [v4, v6] = pinned.conntrack_rows()?;
                let rows = if self.name == CT4 { v4 } else { v6 };
                stream::print(self.format, &[rows], |row| Some(ct::entry(row)))
            }
            NAT4 | NAT6 => {
                let now_ns = clock::monotonic_ns()?;
                let [v4, v6] = pinned.nat_rows()?;
                let rows = if self.name == NAT4 { v4 } else { v6 };
                stream::print(self.format, &[rows], |row| Some(nat::entry(row, now_ns)))
            }
            RTT => self.print(pinned.rtt().map(rtt::entries)),
            INFLIGHT => self.print(pinned.inflight().map(inflight::entries)),
            ENDPOINTS => self.print(pinned.endpoints().map(endpoint::entries)),
            METRICS => self.print(pinned.metrics().map(metrics::entries)),
            CONFIG => self.print(pinned.config().map(settings::entries)),
            _ => self.print_hex(),
        }
    }

    fn print<K, V>(&self, entries: Result<Vec<Entry<K, V>>, DumpError>) -> anyhow::Result<()>
    where
        K: Display + Serialize,
        V: Display + Serialize,
    {
        match entries {
            Ok(entries) => self.format.print_rows(&entries, lines),
            // Another version's map: its bytes are all that can be told.
            Err(DumpError::OtherLayout(_)) => self.print_hex(),
            Err(error) => Err(error.into()),
        }
    }

    fn print_hex(&self) -> anyhow::Result<()> {
        let entries = in_hex(&self.pinned.raw(self.name)?);
        self.format.print_rows(&entries, lines)
    }
}

fn in_hex(entries: &[(Vec<u8>, Vec<u8>)]) -> Vec<Entry<String, String>> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    entries
        .iter()
        .map(|(key, value)| Entry {
            key: hex(key),
            value: hex(value),
        })
        .collect()
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
    fn unknown_layouts_are_hexadecimal() {
        let entries = in_hex(&[(vec![1, 2], vec![0xff])]);
        assert_eq!(lines(&entries), "0102: ff\n");
        assert_eq!(
            serde_json::to_string(&entries).unwrap(),
            r#"[{"key":"0102","value":"ff"}]"#
        );
    }
}
