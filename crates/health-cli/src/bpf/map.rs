//! `health-agent bpf map`: the pinned maps themselves.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use health_datapath::btf::Value;
use health_datapath::dump::{DumpError, MapInfo, OpenMap, Pinned, raw};
use health_model::settings::Location;
use serde::Serialize;

use super::entry::Entry;
use super::{dump, stream};
use crate::output::{Format, NONE, OutputArgs, table};

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
  Entries of large maps are shown while they are read, unordered. The map of another program is
  decoded by its types (BTF), or shown in hexadecimal without them. Each value of a per-CPU map is a
  list of the values of all CPUs

Examples:
  health-agent bpf map dump HEALTH_CONFIG
  health-agent bpf map dump HEALTH_INFLIGHT -o jsonl
  health-agent bpf map dump /sys/fs/bpf/tc/globals/cilium_ipcache -o json";

/// Commands of `bpf map`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum MapCommand {
    /// List all maps
    #[command(after_help = LIST_EXAMPLES)]
    List(OutputArgs),
    /// Show all entries of a pinned map
    #[command(after_help = DUMP_EXAMPLES)]
    Dump(DumpArgs),
}

/// Flags of `bpf map dump`.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// Name of the map in `bpf map list`, or the path of any pinned map
    #[arg(value_name = "NAME|PATH")]
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
                let format = output.output;
                if map.contains('/') {
                    return dump_by_types(OpenMap::open(Path::new(&map))?, format);
                }
                let pinned = Pinned::open(location)?;
                dump(&pinned, &map, format).or_else(|error| match error.downcast_ref() {
                    // The map of another version.
                    Some(DumpError::OtherLayout(_)) => dump_by_types(pinned.map(&map)?, format),
                    _ => Err(error),
                })
            }
        }
    }
}

/// Shows a map from the agent's folder.
fn dump(pinned: &Pinned, name: &str, format: Format) -> anyhow::Result<()> {
    if dump::dump(pinned, name, format)? {
        return Ok(());
    }
    dump_by_types(pinned.map(name)?, format)
}

/// Shows a map of any layout by the types that it was created with, or in hexadecimal if it has none.
fn dump_by_types(map: OpenMap, format: Format) -> anyhow::Result<()> {
    let types = map.types().unwrap_or_else(|error| {
        eprintln!("warning: {error}; its entries are shown in hexadecimal");
        None
    });
    let entry = |(key, value): (Vec<u8>, Vec<u8>)| match &types {
        Some(types) => Entry {
            key: types.key(&key),
            value: types.value(&value),
        },
        None => Entry {
            key: Value::Bytes(key),
            value: Value::Bytes(value),
        },
    };
    stream::print(format, &[map.rows(raw)?], |row| Some(entry(row)))
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
