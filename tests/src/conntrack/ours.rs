//! Flows in the datapath's maps.

use std::net::IpAddr;

use anyhow::Context as _;
use aya::maps::{Array, Map, MapData};
use health_common::config::DatapathConfig;
use health_common::ct::tcp::TcpState;
use health_common::ct::{CtEntry, Timeouts};
use health_common::metrics::Reason;
use health_common::tcp::IP_PROTOCOL_TCP;
use health_datapath::dump::{Flow, Pinned};
use health_datapath::layout;
use health_model::settings::Location;
use health_net::clock::now_ns;

use super::{Entry, EntrylessPackets, TrafficCount, Tuple};
use crate::Node;
use crate::bed::BPFFS;

/// The pinned maps of a node's agent.
pub struct Ours {
    pinned: Pinned,
    config: Array<MapData, DatapathConfig>,
}

impl Ours {
    /// Opens the maps.
    pub fn open(node: &Node) -> anyhow::Result<Self> {
        let location = Location {
            instance: node.name().to_owned(),
            runtime_dir: node.runtime_dir(),
            state_dir: node.runtime_dir(),
            bpf_root: BPFFS.into(),
        };
        let config = MapData::from_pin(node.pins().join(layout::CONFIG.name))?;
        Ok(Self {
            pinned: Pinned::open(&location)?,
            config: Array::try_from(Map::from_map_data(config)?)?,
        })
    }

    /// Sets the timeouts that apply to each entry from its next packet on. A running agent overwrites them when its own
    /// settings change.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) -> anyhow::Result<()> {
        let config = self.config.get(&0, 0)?;
        let config = DatapathConfig { timeouts, ..config };
        self.config.set(0, config, 0).context("cannot set timeouts")
    }

    /// Returns the live entries of flows with this host.
    pub fn entries(&self, host: IpAddr) -> anyhow::Result<Vec<Entry>> {
        let now = u32::try_from(now_ns() / 1_000_000_000)?;
        let rows = self.pinned.conntrack()?;
        Ok(rows
            .iter()
            .filter(|(flow, entry)| {
                (flow.source == host || flow.destination == host) && !entry.has_expired(now)
            })
            .map(|(flow, entry)| to_entry(flow, entry))
            .collect())
    }

    /// All flows with an entry, including expired entries that have not been collected yet.
    pub fn flows(&self) -> anyhow::Result<Vec<Flow>> {
        let entries = self.pinned.conntrack()?;
        Ok(entries.into_iter().map(|(flow, _)| flow).collect())
    }

    /// Number of NAT entries.
    pub fn translations(&self) -> anyhow::Result<usize> {
        Ok(self.pinned.nat()?.len())
    }

    /// Numbers of packets from or to endpoints that created no entry.
    pub fn noted(&self) -> anyhow::Result<EntrylessPackets> {
        let rows = self.pinned.metrics()?;
        let of = |reason| {
            let rows = rows.iter().filter(|row| row.reason == reason as u8);
            rows.map(|row| row.packets).sum()
        };
        Ok(EntrylessPackets {
            related: of(Reason::CtRelated),
            invalid: of(Reason::CtInvalid),
        })
    }
}

fn to_entry(flow: &Flow, entry: &CtEntry) -> Entry {
    let received = TrafficCount {
        packets: entry.rx_packets,
        bytes: entry.rx_bytes,
    };
    let sent = TrafficCount {
        packets: entry.tx_packets,
        bytes: entry.tx_bytes,
    };
    let (there, back) = if flow.inbound {
        (received, sent)
    } else {
        (sent, received)
    };
    let state = match flow.protocol {
        IP_PROTOCOL_TCP => TcpState::of(entry.state()).name(),
        _ => "",
    };
    Entry {
        tuple: Tuple {
            protocol: flow.protocol,
            source: flow.source,
            destination: flow.destination,
            source_port: flow.source_port,
            destination_port: flow.destination_port,
        },
        state: state.to_owned(),
        replied: back.packets > 0,
        there,
        back,
    }
}
