//! `health-agent bpf map`: the pinned maps themselves.

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, Subcommand};
use health_datapath::dump::{MapInfo, Pinned};
use health_model::settings::Location;
use serde::Serialize;

use super::dump;
use crate::output::{NONE, OutputArgs, table};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf map list
  health-agent bpf map dump HEALTH_CONFIG";

const LIST_EXAMPLES: &str = "\
Examples:
  health-agent bpf map list
  health-agent bpf map list -o json | jq 'map(.\"memory-bytes\") | add'";

const DUMP_EXAMPLES: &str = "\
Output:
  Entries of large maps are shown while they are read, unordered. For the maps of other programs,
  use bpftool map dump

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
    /// Show all entries of a map
    #[command(after_help = DUMP_EXAMPLES)]
    Dump(DumpArgs),
}

/// Flags of `bpf map dump`.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// Name of the map in `bpf map list`
    #[arg(value_name = "NAME")]
    map: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl MapCommand {
    pub(super) fn execute(self, location: &Location) -> anyhow::Result<()> {
        match self {
            Self::List(args) => {
                let maps = Pinned::open(location)?.maps()?;
                let mut rows: Vec<MapRow> = maps.into_iter().map(MapRow::from).collect();
                rows.sort_by(|a, b| a.name.cmp(&b.name));
                args.output.print_rows(&rows, maps_table)
            }
            Self::Dump(DumpArgs { map, output }) => {
                if map.contains('/') {
                    bail!(
                        "{map} is a path, not the name of one of the agent's maps; use `bpftool map dump pinned {map}`"
                    );
                }
                dump::dump(&Pinned::open(location)?, &map, output.output)
            }
        }
    }
}

/// A map as JSON.
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
    in_use: bool,
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
            in_use: info.is_in_use,
        }
    }
}

fn maps_table(rows: &[MapRow]) -> String {
    let rows = rows.iter().map(|row| {
        [
            match row.in_use {
                true => row.name.clone(),
                false => format!("{} (not in use)", row.name),
            },
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
            is_in_use: true,
        };
        assert_eq!(
            maps_table(&[info.into()]),
            "\
NAME            ID   KIND    KEY BYTES   VALUE BYTES   ENTRIES   MAX ENTRIES   MEMORY BYTES
HEALTH_CONFIG   12   array   4           56            -         1             344
"
        );
    }
}
