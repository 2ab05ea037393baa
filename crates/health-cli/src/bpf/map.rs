//! `health-agent bpf map`: the pinned maps themselves.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::{Args, Subcommand};
use health_datapath::btf::Value;
use health_datapath::dump::{DumpError, MapInfo, OpenMap, Pinned, raw};
use health_datapath::layout;
use health_model::settings::Location;
use health_net::{self, clock};
use serde::Serialize;

use super::entry::{Entry, lines};
use super::{
    arrivals, calls, connections, ct, direct, endpoint, event_filter, fragments, inflight, ipcache,
    lb, masquerade, metrics, nat, policy, ring, rtt, settings, stream, xdp,
};
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

/// Shows one of the agent's own maps.
fn dump(pinned: &Pinned, name: &str, format: Format) -> anyhow::Result<()> {
    // Patterns must be paths.
    const CT4: &str = layout::CT4.name;
    const CT6: &str = layout::CT6.name;
    const CT_ANY4: &str = layout::CT_ANY4.name;
    const CT_ANY6: &str = layout::CT_ANY6.name;
    const FRAGMENTS4: &str = layout::FRAGMENTS4.name;
    const FRAGMENTS6: &str = layout::FRAGMENTS6.name;
    const NAT4: &str = layout::NAT4.name;
    const NAT6: &str = layout::NAT6.name;
    const NAT_ANY4: &str = layout::NAT_ANY4.name;
    const NAT_ANY6: &str = layout::NAT_ANY6.name;
    const RTT: &str = layout::RTT.name;
    const INFLIGHT: &str = layout::INFLIGHT.name;
    const ARRIVALS: &str = layout::ARRIVALS.name;
    const PEERS: &str = layout::PEERS.name;
    const TCP: &str = layout::TCP.name;
    const ENDPOINTS: &str = layout::ENDPOINTS.name;
    const POLICY: &str = layout::POLICY.name;
    const POLICY_COUNTERS: &str = layout::POLICY_COUNTERS.name;
    const IPCACHE: &str = layout::IPCACHE.name;
    const METRICS: &str = layout::METRICS.name;
    const CALLS: &str = layout::CALLS.name;
    const IP_CALLS: &str = layout::IP_CALLS.name;
    const MASQUERADE: &str = layout::MASQUERADE.name;
    const EVENTS: &str = layout::EVENTS.name;
    const MONITOR: &str = layout::MONITOR.name;
    const DIRECT: &str = layout::DIRECT.name;
    const CONFIG: &str = layout::CONFIG.name;
    const SVC4: &str = layout::SVC4.name;
    const SVC6: &str = layout::SVC6.name;
    const SLOTS: &str = layout::SLOTS.name;
    const MAGLEV: &str = layout::MAGLEV.name;
    const BACKENDS: &str = layout::BACKENDS.name;
    const SOURCE_RANGES: &str = layout::SOURCE_RANGES.name;
    const AFFINITY: &str = layout::AFFINITY.name;
    const REVNAT4: &str = layout::REVNAT4.name;
    const REVNAT6: &str = layout::REVNAT6.name;
    const REVNAT_ANY4: &str = layout::REVNAT_ANY4.name;
    const REVNAT_ANY6: &str = layout::REVNAT_ANY6.name;
    const SOCKETS: &str = layout::SOCKETS.name;
    const XDP_DEVICES: &str = layout::XDP_DEVICES.name;
    const XDP_FLOWS4: &str = layout::XDP_FLOWS4.name;
    const XDP_FLOWS6: &str = layout::XDP_FLOWS6.name;
    const XDP_TIMES: &str = layout::XDP_TIMES.name;
    const HANDS: &str = layout::HANDS.name;
    const OWN: &str = layout::OWN.name;
    const DEVICES: &str = layout::DEVICES.name;

    match name {
        CT4 | CT6 | CT_ANY4 | CT_ANY6 => {
            let maps = pinned.conntrack_rows()?;
            let rows = maps
                .into_iter()
                .zip([CT4, CT6, CT_ANY4, CT_ANY6])
                .filter_map(|(rows, map)| (map == name).then_some(rows));
            let rows: Vec<_> = rows.collect();
            stream::print(format, &rows, |row| Some(ct::entry(row)))
        }
        FRAGMENTS4 => stream::print(format, &[pinned.fragments4_rows()?], |row| {
            Some(fragments::entry4(row))
        }),
        FRAGMENTS6 => stream::print(format, &[pinned.fragments6_rows()?], |row| {
            Some(fragments::entry6(row))
        }),
        NAT4 | NAT6 | NAT_ANY4 | NAT_ANY6 => {
            let now_ns = clock::now_ns();
            let maps = pinned.nat_rows()?;
            let rows = maps
                .into_iter()
                .zip([NAT4, NAT6, NAT_ANY4, NAT_ANY6])
                .filter_map(|(rows, map)| (map == name).then_some(rows));
            let rows: Vec<_> = rows.collect();
            stream::print(format, &rows, |row| Some(nat::entry(row, now_ns)))
        }
        RTT => {
            let clock = health_net::clock::state().ok();
            stream::print_each(format, |each| {
                pinned.each_rtt(&mut |key, row| each(&rtt::entry(key, row, clock)))
            })
        }
        INFLIGHT => stream::print(format, &[pinned.inflight_rows()?], |row| {
            Some(inflight::entry(row))
        }),
        ARRIVALS => stream::print(format, &[pinned.arrivals_rows()?], |row| {
            Some(arrivals::entry(row))
        }),
        PEERS => stream::print(format, &[pinned.peers_rows()?], |row| {
            Some(connections::peer(row))
        }),
        TCP => stream::print(format, &[pinned.tcp_rows()?], |row| {
            Some(connections::connection(row))
        }),
        ENDPOINTS => format.print_rows(&endpoint::entries(pinned.endpoints()?), lines),
        POLICY => stream::print(format, &[pinned.policy_rows()?], |row| {
            Some(policy::entry(&row))
        }),
        POLICY_COUNTERS => stream::print(format, &[pinned.policy_counter_rows()?], |row| {
            Some(policy::counter(row))
        }),
        IPCACHE => stream::print(format, &[pinned.ipcache_rows()?], |row| {
            Some(ipcache::entry(row))
        }),
        METRICS => format.print_rows(&metrics::entries(pinned.metrics()?), lines),
        CALLS => format.print_rows(&calls::entries(pinned.calls(&layout::CALLS)?), lines),
        IP_CALLS => format.print_rows(&calls::ip_entries(pinned.calls(&layout::IP_CALLS)?), lines),
        MASQUERADE => format.print_rows(&masquerade::entries(pinned.masquerade()?), lines),
        EVENTS => bail!(
            "{EVENTS} cannot be dumped: reading an event removes it; `health-agent monitor` \
             shows them"
        ),
        MONITOR => format.print_rows(&event_filter::entries(pinned.monitor()?), lines),
        DIRECT => format.print_rows(&direct::entries(pinned.direct()?), lines),
        CONFIG => format.print_rows(&settings::entries(pinned.config()?), lines),
        SVC4 => stream::print(format, &[pinned.frontend4_rows()?], |row| {
            Some(lb::entries::frontend4(row))
        }),
        SVC6 => stream::print(format, &[pinned.frontend6_rows()?], |row| {
            Some(lb::entries::frontend6(row))
        }),
        SLOTS => stream::print(format, &[pinned.place_rows(&layout::SLOTS)?], |row| {
            Some(lb::entries::place(row))
        }),
        MAGLEV => stream::print(format, &[pinned.place_rows(&layout::MAGLEV)?], |row| {
            Some(lb::entries::place(row))
        }),
        BACKENDS => stream::print(format, &[pinned.backend_rows()?], |row| {
            Some(lb::entries::backend(row))
        }),
        SOURCE_RANGES => stream::print(format, &[pinned.source_range_rows()?], |row| {
            Some(lb::entries::source_range(row))
        }),
        AFFINITY => lb::print_clients(pinned, &lb::Selection::default(), format),
        REVNAT4 | REVNAT6 | REVNAT_ANY4 | REVNAT_ANY6 => {
            let maps = pinned.service_flow_rows()?;
            let rows = maps
                .into_iter()
                .zip([REVNAT4, REVNAT6, REVNAT_ANY4, REVNAT_ANY6])
                .filter_map(|(rows, map)| (map == name).then_some(rows));
            let rows: Vec<_> = rows.collect();
            stream::print(format, &rows, |row| Some(lb::flow_entry(row)))
        }
        SOCKETS => stream::print(format, &[pinned.socket_rows()?], |row| {
            Some(lb::socket_entry(row))
        }),
        XDP_DEVICES => stream::print(format, &[pinned.xdp_device_rows()?], |row| {
            Some(xdp::device(row))
        }),
        XDP_FLOWS4 | XDP_FLOWS6 => {
            let [four, six] = pinned.xdp_flow_rows()?;
            let rows = if name == XDP_FLOWS4 { four } else { six };
            stream::print(format, &[rows], |row| Some(xdp::flow(row)))
        }
        XDP_TIMES => stream::print(format, &[pinned.xdp_time_rows()?], |row| {
            Some(xdp::times(row))
        }),
        OWN => stream::print(format, &[pinned.own_rows()?], |row| {
            Some(endpoint::own(row))
        }),
        DEVICES => stream::print(format, &[pinned.device_rows()?], |row| {
            Some(endpoint::device(row))
        }),
        HANDS => stream::print(format, &[pinned.hand_rows()?], |row| Some(ring::hand(row))),
        _ => match pinned.ring_rows(name)? {
            Some(rows) => stream::print(format, &[rows], ring::place),
            None => dump_by_types(pinned.map(name)?, format),
        },
    }
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
